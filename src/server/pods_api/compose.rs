//! What is shown of a pod (pure; Go: pkg/kubelet/apis/pods, `getEffectivePodStatus`).

use crate::model::api::{self, PodStatus};
use crate::model::ids::PodUid;
use crate::model::meta::ObjectMeta;
use crate::model::pod::Pod;

/// The pod with the status that this agent has computed. Before there is one, it has the status of
/// its source, but is not ready: a container may have failed while no agent ran.
pub(super) fn with_status(pod: &Pod, computed: Option<&PodStatus>) -> api::Pod {
    let mut object = pod.object().clone();
    object.status = Some(match computed {
        Some(status) => status.clone(),
        None => unverified(object.status.take().unwrap_or_default()),
    });
    object
}

fn unverified(mut status: PodStatus) -> PodStatus {
    if status.phase.as_deref().unwrap_or_default().is_empty() {
        status.phase = Some("Pending".to_owned());
    }
    let mut conditions = status.conditions.iter_mut().flatten();
    if let Some(ready) = conditions.find(|found| found.type_ == "Ready" && found.status == "True") {
        ready.status = "False".to_owned();
        ready.reason = Some("ContainersNotReady".to_owned());
        ready.message = Some("Kubelet is initializing pod containers".to_owned());
    }
    status
}

/// What is said about a pod that has ended.
pub(super) fn identity(uid: &PodUid, namespace: &str, name: &str) -> api::Pod {
    let metadata = ObjectMeta {
        namespace: Some(namespace.to_owned()),
        name: Some(name.to_owned()),
        uid: Some(uid.as_str().to_owned()),
        ..ObjectMeta::default()
    };
    api::Pod { metadata, ..api::Pod::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn shown(status: Value, computed: Option<Value>) -> Value {
        let object = json!({"metadata": {"name": "p", "uid": "u"}, "status": status});
        let pod = Pod::from(serde_json::from_value::<api::Pod>(object).unwrap());
        let computed = computed.map(|computed| serde_json::from_value::<PodStatus>(computed).unwrap());
        let object = with_status(&pod, computed.as_ref());
        assert_eq!(object.metadata.name.as_deref(), Some("p"));
        serde_json::to_value(object.status).unwrap()
    }

    #[test]
    fn the_computed_status_replaces_that_of_the_source() {
        let ready = json!([{"type": "Ready", "status": "True"}]);
        let computed = json!({"phase": "Running", "conditions": ready});
        assert_eq!(shown(json!({"phase": "Pending"}), Some(computed.clone())), computed);
    }

    #[test]
    fn without_a_computed_status_a_pod_is_pending_and_not_ready() {
        assert_eq!(shown(json!({}), None), json!({"phase": "Pending"}));
        let conditions = json!([
            {"type": "Initialized", "status": "True"},
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z"},
        ]);
        assert_eq!(
            shown(json!({"phase": "Running", "conditions": conditions}), None),
            json!({"phase": "Running", "conditions": [
                {"type": "Initialized", "status": "True"},
                {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-02T03:04:05Z",
                    "reason": "ContainersNotReady", "message": "Kubelet is initializing pod containers"},
            ]})
        );
        let failed = json!({"phase": "Failed", "conditions": [{"type": "Ready", "status": "False", "reason": "PodFailed"}]});
        assert_eq!(shown(failed.clone(), None), failed);
    }
}
