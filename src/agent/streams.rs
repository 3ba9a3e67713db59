//! What exec, attach and port-forward ask of the other rooms.

use std::sync::Arc;

use crate::config::KubeletConfiguration;
use crate::cri::RuntimeClient;
use crate::observe::Observe;
use crate::server::StreamDeps;
use crate::sync::view::View;

/// Handles on snapshots, and the runtime.
pub(super) fn deps(
    config: &KubeletConfiguration,
    view: &View,
    observe: &Observe,
    cri: &RuntimeClient,
) -> StreamDeps {
    let (pods, mirrors, observe) = (view.clone(), view.clone(), observe.clone());
    StreamDeps {
        enabled: config.enable_debugging_handlers,
        websockets: super::wiring::gates(config).enabled("ExtendWebSocketsToKubelet"),
        find_pod: Arc::new(move |namespace, name| {
            let snapshot = pods.get();
            // One whose manifest is gone can be looked into until it has ended.
            let mut all = snapshot.pods.values().filter_map(|entry| entry.any_pod());
            all.find(|pod| pod.namespace() == namespace && pod.name() == name).cloned()
        }),
        is_mirror: Arc::new(move |uid, pod| mirrors.get().mirrors.get(uid) == Some(&pod.full_name())),
        runtime_pod: Arc::new(move |uid| observe.cached(uid)),
        cri: cri.clone(),
    }
}
