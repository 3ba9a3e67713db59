//! The containers that a request can name.

use crate::model::api::Pod;

/// The annotation that names the default container.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// The names of all containers: regular, init, ephemeral.
pub(crate) fn container_names(pod: &Pod) -> Vec<&str> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    spec.containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .map(|container| container.name.as_str())
        .chain(spec.ephemeral_containers.iter().flatten().map(|container| container.name.as_str()))
        .collect()
}

/// The container of a command that names none: the annotated one or the first.
pub(crate) fn default_container(pod: &Pod) -> Option<&str> {
    let names = container_names(pod);
    let annotated = pod.metadata.annotations.as_ref().and_then(|all| all.get(DEFAULT_CONTAINER));
    match annotated {
        Some(name) if names.contains(&name.as_str()) => Some(name),
        _ => names.first().copied(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_container_is_annotated_or_first() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"annotations": {DEFAULT_CONTAINER: "b"}},
            "spec": {"initContainers": [{"name": "i"}], "containers": [{"name": "a"}, {"name": "b"}]},
        }))
        .unwrap();
        assert_eq!(container_names(&pod), ["a", "b", "i"]);
        assert_eq!(default_container(&pod), Some("b"));
        let pod = Pod { metadata: Default::default(), ..pod };
        assert_eq!(default_container(&pod), Some("a"));
        assert_eq!(default_container(&Pod::default()), None);
    }
}
