//! The identity of a static pod: UID, name, namespace, node and marks (Go: pkg/kubelet/config/common.go).

use super::fingerprint::{self, RELEASES, Release};
use super::fnv::Fnv128;
use super::pods_at_start::PodsAtStart;
use super::problem::Fault;
use crate::model::api::{self, PodStatus, Toleration};
use crate::model::pod::CONFIG_HASH;

/// The file or URL of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    File(String),
    Http(String),
}

/// The UID of a static pod.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Uid {
    pub(super) text: String,
    /// An earlier release, or an earlier version of this agent, gave it to a pod that is on the node.
    pub(super) is_former: bool,
}

/// Hashes the identity of a pod, `given` with its defaults. The result equals that of the newest release
/// of the Go kubelet, so that either agent can continue to run the static pods that the other has
/// started.
///
/// DIFFERS: a pod of the same manifest that is among the `known` ones keeps the UID that another release
/// gave it; upstream restarts it. If the text that is hashed cannot be determined (`fingerprint`), a hash
/// of the manifest's own fields is used.
pub(super) fn uid(
    written: &api::Pod,
    given: &api::Pod,
    node_name: &str,
    origin: &Origin,
    known: &PodsAtStart,
) -> Uid {
    if let Some(fixed) = written.metadata.uid.as_deref().filter(|uid| !uid.is_empty()) {
        return Uid { text: fixed.to_owned(), is_former: false };
    }
    let place = match origin {
        Origin::File(path) => format!("host:{node_name}file:{path}"),
        Origin::Http(url) => format!("url:{url}"),
    };
    let by = |release: &Release| fingerprint::uid(release, written, given, &place).ok();
    let own = || {
        let mut hash = Fnv128::default();
        // An object of maps with string keys always serializes, and always in the same order.
        hash.add(&serde_json::to_vec(written).unwrap_or_default());
        hash.add(place.as_bytes());
        hash.hex()
    };
    let mut uid = RELEASES.first().and_then(by).unwrap_or_else(own);
    if known.is_empty() {
        return Uid { text: uid, is_former: false };
    }
    // Of several pods of this manifest, one that was to run is continued, or else that of the newest
    // release; the others end.
    let mut found_by = known.found_by(&uid);
    let mut giver = None;
    let former = RELEASES.iter().skip(1).filter_map(|release| Some((release.name, by(release)?)));
    // Earlier versions of this agent gave some pods such a UID.
    for (release, former) in former.chain([("unknown", own())]) {
        let found = known.found_by(&former);
        if found > found_by {
            (uid, found_by, giver) = (former, found, Some(release));
        }
    }
    if let Some(release) = giver {
        let name = written.metadata.name.as_deref().unwrap_or_default();
        log::info!("the static pod {name} keeps its UID {uid} (Kubernetes release: {release})");
    }
    Uid { text: uid, is_former: giver.is_some() }
}

/// Makes a decoded, defaulted pod the static pod `uid` of this node.
pub(super) fn identify(
    pod: &mut api::Pod,
    uid: String,
    node_name: &str,
    origin: &Origin,
) -> Result<(), Fault> {
    let name = pod.metadata.name.take().unwrap_or_default();
    if name.is_empty() {
        return Err(Fault::in_field("metadata.name", "Required value: a static pod needs a name"));
    }
    pod.metadata.name = Some(format!("{name}-{}", node_name.to_lowercase()));
    let namespace = pod.metadata.namespace.get_or_insert_default();
    if namespace.is_empty() {
        *namespace = "default".to_owned();
    }
    pod.metadata.annotations.get_or_insert_default().insert(CONFIG_HASH.to_owned(), uid.clone());
    pod.metadata.uid = Some(uid);
    let spec = pod.spec.get_or_insert_default();
    spec.node_name = Some(node_name.to_owned());
    if matches!(origin, Origin::File(_)) {
        let stay = Toleration {
            operator: Some("Exists".to_owned()),
            effect: Some("NoExecute".to_owned()),
            ..Toleration::default()
        };
        tolerate(spec.tolerations.get_or_insert_default(), &stay);
    }
    // DIFFERS: upstream only sets the phase. A manifest may be the export of a pod that ran
    // elsewhere, whose status does not apply here.
    pod.status = Some(PodStatus { phase: Some("Pending".to_owned()), ..PodStatus::default() });
    Ok(())
}

/// Puts a toleration in the place of each that differs from it in its seconds only, or at the end (Go:
/// pkg/apis/core/helper `AddOrUpdateTolerationInPod`, whose comparison of the whole is never true).
fn tolerate(tolerations: &mut Vec<Toleration>, new: &Toleration) {
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    let key = |toleration: &Toleration| {
        [&toleration.key, &toleration.operator, &toleration.value, &toleration.effect].map(text)
    };
    let mut is_there = false;
    for present in tolerations.iter_mut().filter(|present| key(present) == key(new)) {
        present.clone_from(new);
        is_there = true;
    }
    if !is_there {
        tolerations.push(new.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(value: serde_json::Value) -> api::Pod {
        serde_json::from_value(value).unwrap()
    }

    /// A manifest that needs no defaults.
    fn uid(pod: &api::Pod, node_name: &str, origin: &Origin) -> String {
        super::uid(pod, pod, node_name, origin, &PodsAtStart::default()).text
    }

    #[test]
    fn uid_depends_on_content_node_and_path() {
        let file = Origin::File("/m/a.yaml".into());
        let original = pod(json!({"metadata": {"name": "a", "labels": {"x": "1", "y": "2"}}}));
        let base = uid(&original, "node", &file);
        assert_eq!(base.len(), 32);
        assert!(base.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)));
        let same = pod(json!({"metadata": {"labels": {"y": "2", "x": "1"}, "name": "a"}}));
        assert_eq!(uid(&same, "node", &file), base);
        let edited = pod(json!({"metadata": {"name": "a", "labels": {"x": "1", "y": "3"}}}));
        let url = Origin::Http("http://x/".into());
        for other in [
            uid(&edited, "node", &file),
            uid(&original, "other", &file),
            uid(&original, "node", &Origin::File("/m/b.yaml".into())),
            uid(&original, "node", &url),
        ] {
            assert_ne!(other, base);
        }
        // A pod from a URL has the same UID on every node.
        assert_eq!(uid(&original, "node", &url), uid(&original, "other", &url));
        let fixed = pod(json!({"metadata": {"name": "a", "uid": "given"}}));
        assert_eq!(uid(&fixed, "node", &file), "given");
    }

    #[test]
    fn static_pod_gets_node_name_and_tolerations() {
        let mut static_pod = pod(json!({"metadata": {"name": "web"}}));
        identify(&mut static_pod, "u".into(), "Node-1", &Origin::File("/a".into())).unwrap();
        let expected = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "web-node-1", "namespace": "default", "uid": "u",
                "annotations": {"kubernetes.io/config.hash": "u"},
            },
            "spec": {
                "containers": [], "nodeName": "Node-1",
                "tolerations": [{"operator": "Exists", "effect": "NoExecute"}],
            },
            "status": {"phase": "Pending"},
        });
        assert_eq!(serde_json::to_value(&static_pod).unwrap(), expected);

        let mut tolerant = pod(json!({"metadata": {"name": "a"}, "spec": {
            "tolerations": [{"key": "", "operator": "Exists", "effect": "NoExecute"}]}}));
        identify(&mut tolerant, "u".into(), "n", &Origin::File("/a".into())).unwrap();
        assert_eq!(tolerant.spec.unwrap().tolerations.unwrap().len(), 1);

        // One that ends after some seconds would evict the pod from a tainted node.
        let mut limited = pod(json!({"metadata": {"name": "a"}, "spec": {"tolerations": [
            {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5},
            {"key": "k", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 7},
            {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 9}]}}));
        identify(&mut limited, "u".into(), "n", &Origin::File("/a".into())).unwrap();
        assert_eq!(
            serde_json::to_value(limited.spec.unwrap().tolerations).unwrap(),
            json!([
                {"operator": "Exists", "effect": "NoExecute"},
                {"key": "k", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 7},
                {"operator": "Exists", "effect": "NoExecute"},
            ])
        );

        let mut fetched = pod(json!({"metadata": {"name": "a", "namespace": "x"}}));
        identify(&mut fetched, "u".into(), "n", &Origin::Http("http://a".into())).unwrap();
        assert_eq!(fetched.spec.unwrap().tolerations, None);
        assert_eq!(fetched.metadata.namespace.as_deref(), Some("x"));

        let nameless = identify(&mut pod(json!({})), "u".into(), "n", &Origin::File("/a".into()));
        assert_eq!(nameless.unwrap_err().field.as_deref(), Some("metadata.name"));
    }
}
