//! Leaves out of a mirror what the API server refuses in one: references to ConfigMaps and Secrets.
//! They are files of this node, and do not exist at the API server.
//!
//! DIFFERS: upstream has no such static pods.

use crate::model::api::{EmptyDirVolumeSource, EnvFromSource, EnvVar, PodSpec, Volume};

/// Removes all references. Volumes stay, as empty directories, because containers mount them.
pub(super) fn redact(spec: &mut PodSpec) {
    spec.image_pull_secrets = None;
    let init = spec.init_containers.iter_mut().flatten();
    for container in init.chain(&mut spec.containers) {
        environment(&mut container.env, &mut container.env_from);
    }
    for container in spec.ephemeral_containers.iter_mut().flatten() {
        environment(&mut container.env, &mut container.env_from);
    }
    spec.volumes.iter_mut().flatten().for_each(volume);
}

fn environment(env: &mut Option<Vec<EnvVar>>, from: &mut Option<Vec<EnvFromSource>>) {
    let names_object = |variable: &EnvVar| {
        let source = variable.value_from.as_ref();
        source.is_some_and(|source| source.config_map_key_ref.is_some() || source.secret_key_ref.is_some())
    };
    if let Some(env) = env {
        env.retain(|variable| !names_object(variable));
    }
    if let Some(from) = from {
        from.retain(|source| source.config_map_ref.is_none() && source.secret_ref.is_none());
    }
}

fn volume(volume: &mut Volume) {
    let mut emptied = volume.config_map.take().is_some() | volume.secret.take().is_some();
    if let Some(sources) = volume.projected.as_mut().and_then(|projected| projected.sources.as_mut()) {
        let before = sources.len();
        sources.retain(|source| source.config_map.is_none() && source.secret.is_none());
        emptied |= sources.is_empty() && before > 0;
    }
    if emptied {
        volume.projected = None;
        volume.empty_dir = Some(EmptyDirVolumeSource::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn references_to_objects_are_left_out() {
        let container = json!({"name": "c", "env": [{"name": "A", "value": "1"},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
            "envFrom": [{"configMapRef": {"name": "m"}}]});
        let downward = json!({"downwardAPI": {"items": []}});
        let mut spec: PodSpec = serde_json::from_value(json!({
            "imagePullSecrets": [{"name": "s"}], "initContainers": [container.clone()],
            "containers": [container],
            "volumes": [{"name": "a", "secret": {"secretName": "s"}}, {"name": "b", "configMap": {"name": "m"}},
                {"name": "c", "projected": {"sources": [{"secret": {"name": "s"}}, downward]}},
                {"name": "d", "projected": {"sources": [{"secret": {"name": "s"}}]}},
                {"name": "e", "hostPath": {"path": "/e"}}]}))
        .unwrap();
        redact(&mut spec);
        let container = json!({"name": "c", "env": [{"name": "A", "value": "1"},
                {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
            "envFrom": []});
        let expected = json!({"initContainers": [container.clone()], "containers": [container],
            "volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}},
                {"name": "c", "projected": {"sources": [downward]}}, {"name": "d", "emptyDir": {}},
                {"name": "e", "hostPath": {"path": "/e"}}]});
        assert_eq!(crate::util::json::to_value(&spec).unwrap(), expected);
    }
}
