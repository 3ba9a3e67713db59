//! Gives the server access to the rooms that exec, attach and port-forward need.

use std::sync::Arc;

use super::rooms::Rooms;
use super::settings::gates;
use crate::config::KubeletConfiguration;
use crate::server::StreamDeps;

/// Functions that read the current pods and containers, and the client of the runtime.
pub(super) fn deps(config: &KubeletConfiguration, rooms: &Rooms) -> StreamDeps {
    let (pods, mirrors, observe) = (rooms.view.clone(), rooms.view.clone(), rooms.observe.clone());
    StreamDeps {
        enabled: config.enable_debugging_handlers,
        websockets: gates(config).enabled("ExtendWebSocketsToKubelet"),
        find_pod: Arc::new(move |namespace, name| {
            let snapshot = pods.get();
            // A pod whose manifest was removed is included until it has ended.
            let mut all = snapshot.pods.values().filter_map(|entry| entry.any_pod());
            all.find(|pod| pod.namespace() == namespace && pod.name() == name).cloned()
        }),
        is_mirror: Arc::new(move |uid, pod| mirrors.get().mirrors.get(uid) == Some(&pod.full_name())),
        runtime_pod: Arc::new(move |uid| observe.cached(uid)),
        cri: rooms.cri.clone(),
    }
}
