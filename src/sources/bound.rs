//! The pods that the API server has bound to this node (Go: config/apiserver.go).
//!
//! The reflector's thread `watch/pods` keeps the set; each change delivers the whole set, and the
//! newest delivery counts. While the API server is unavailable the last set stays.
//!
//! With `--offline`, the room `offline` decides whose set is delivered: that of the API server, or the
//! stored one.

use std::collections::BTreeMap;

use super::set::{Deps, SourceSet};
use crate::kube::client::Client;
use crate::kube::target::Target;
use crate::kube::watch::{self, Change, Watched};
use crate::model::api;
use crate::model::pod::{Pod, SourceName};
use crate::offline::Offline;
use crate::util::threads::{OnDeath, Running};

/// The current set. By UID: when a pod is deleted and created again with the same name, the two
/// events may arrive in either order.
#[derive(Default)]
struct BoundPods(BTreeMap<String, Pod>);

impl BoundPods {
    /// Applies a change. Returns whether the set has changed.
    fn apply(&mut self, change: Change<api::Pod>) -> bool {
        let key = |pod: &api::Pod| pod.metadata.uid.clone().filter(|uid| !uid.is_empty());
        match change {
            Change::Replaced(pods) => {
                self.0 = pods.into_iter().filter_map(|pod| Some((key(&pod)?, Pod::from(pod)))).collect();
                // Also for the first, empty set: the source has delivered.
                true
            }
            Change::Set(pod) => match key(&pod) {
                Some(uid) => {
                    self.0.insert(uid, Pod::from(pod));
                    true
                }
                None => false,
            },
            Change::Removed(pod) => key(&pod).is_some_and(|uid| self.0.remove(&uid).is_some()),
        }
    }

    fn pods(&self) -> Vec<Pod> {
        self.0.values().cloned().collect()
    }
}

/// Watches the pods whose `spec.nodeName` is this node. `offline`: decides about each set.
///
/// # Errors
/// When the kernel cannot create a thread.
pub(crate) fn spawn(
    node_name: &str,
    client: Client,
    deps: &Deps,
    offline: Option<Offline>,
) -> std::io::Result<Running> {
    let watched = Watched {
        target: Target::pods(),
        field_selector: Some(format!("spec.nodeName={node_name}")),
        label_selector: None,
    };
    let post = deps.post.clone();
    let deliver = move |pods: Vec<Pod>| {
        post.put(SourceName::Api, SourceSet { pods: Some(pods), ..SourceSet::default() });
    };
    if let Some(offline) = &offline {
        offline.deliver_to(Box::new(deliver.clone()));
    }
    let mut bound = BoundPods::default();
    watch::spawn_reflector(
        "pods",
        client,
        watched,
        OnDeath::Supervisor(deps.on_death.clone()),
        move |change| {
            let is_list = matches!(change, Change::Replaced(_));
            if bound.apply(change) {
                match &offline {
                    Some(offline) => offline.server_set(bound.pods(), is_list),
                    None => deliver(bound.pods()),
                }
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(name: &str, uid: &str) -> api::Pod {
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "ns", "uid": uid},
            "spec": {"containers": [{"name": "c", "image": "i"}]}
        }))
        .unwrap()
    }

    fn uids(bound: &BoundPods) -> Vec<String> {
        bound.pods().iter().map(|pod| pod.uid().to_string()).collect()
    }

    #[test]
    fn watch_changes_update_the_set_by_uid() {
        let mut bound = BoundPods::default();
        assert!(bound.apply(Change::Replaced(vec![])), "an empty set is a change, too");
        assert!(bound.apply(Change::Set(pod("web", "1"))));
        assert!(bound.apply(Change::Set(pod("web", "2"))));
        assert!(bound.apply(Change::Removed(pod("web", "1"))), "created again before the deletion arrived");
        assert_eq!(uids(&bound), ["2"]);
        assert!(!bound.apply(Change::Removed(pod("web", "1"))));
        assert!(!bound.apply(Change::Set(pod("web", ""))), "an object without a UID is no pod");
        assert!(bound.apply(Change::Replaced(vec![pod("a", "3"), pod("b", "4")])));
        assert_eq!(uids(&bound), ["3", "4"]);
    }
}
