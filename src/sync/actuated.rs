//! The resources that running containers were given, in the file in which the Go kubelet looks
//! for them (Go: pkg/kubelet/allocation/state, `actuated_pods_state`).
//!
//! It is written for a Go kubelet that gets the node back: of a container without a record it
//! thinks that it runs without resources, and resizes it. Nothing here reads it.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::view::Snapshot;
use crate::model::api;
use crate::model::pod::{self, Pod};
use crate::util::atomic_file;

const FILE: &str = "actuated_pods_state";
const MODE: u32 = 0o600;

/// The file, and what was last written to it.
pub(super) struct Actuated {
    path: PathBuf,
    written: Option<u32>,
    trouble: bool,
}

impl Actuated {
    /// The file below this root directory.
    pub(super) fn below(root_dir: &Path) -> Self {
        Actuated { path: root_dir.join(FILE), written: None, trouble: false }
    }

    /// Makes the file say what these pods have. Before every source has spoken it stays as it is.
    pub(super) fn keep(&mut self, snapshot: &Snapshot) {
        if !snapshot.sources_ready {
            return;
        }
        let pods =
            snapshot.pods.values().filter(|entry| !entry.rejected).filter_map(|entry| entry.pod.as_ref());
        let (content, checksum) = checkpoint(pods);
        if self.written == Some(checksum) {
            return;
        }
        let result = match std::fs::read(&self.path) {
            Ok(old) if old == content.as_bytes() => Ok(()),
            _ => atomic_file::write(&self.path, content.as_bytes(), MODE),
        };
        match result {
            Ok(()) => (self.written, self.trouble) = (Some(checksum), false),
            Err(error) if !self.trouble => {
                self.trouble = true;
                log::warn!("cannot write {}: {error}", self.path.display());
            }
            Err(_) => {}
        }
    }
}

/// The file's content, and the checksum in it.
fn checkpoint<'a>(pods: impl Iterator<Item = &'a Pod>) -> (String, u32) {
    let entries: Map<String, Value> = pods.map(|pod| (pod.uid().as_str().to_owned(), record(pod))).collect();
    let data = json!({ "entries": entries }).to_string();
    // A hash of how Go dumps a text.
    let checksum = pod::fnv32(&format!("(string){data}"));
    (json!({ "data": data, "checksum": checksum }).to_string(), checksum)
}

fn record(pod: &Pod) -> Value {
    let spec = pod.spec();
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let each = |container: &api::Container| (container.name.clone(), value(container.resources.as_ref()));
    let resources: Map<String, Value> = containers.map(each).collect();
    let whole = spec.resources.as_ref().map_or(Value::Null, |resources| value(Some(resources)));
    json!({ "ContainerResources": resources, "PodLevelResources": whole })
}

fn value(resources: Option<&api::ResourceRequirements>) -> Value {
    resources.and_then(|resources| serde_json::to_value(resources).ok()).unwrap_or_else(|| json!({}))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::view::Entry;

    fn snapshot(ready: bool) -> Snapshot {
        let pod: api::Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "default", "uid": "u1"},
            "spec": {
                "initContainers": [{"name": "side", "restartPolicy": "Always"}],
                "containers": [{"name": "main", "resources": {"limits": {"cpu": "500m"}, "requests": {"memory": "1Mi"}}}],
            },
        }))
        .unwrap();
        let entry = Entry { pod: Some(Pod::from(pod)), leaving: None, rejected: false, worker: None };
        Snapshot { pods: [("u1".into(), entry)].into(), sources_ready: ready, ..Snapshot::default() }
    }

    /// The checksum is the Go kubelet's for this very text.
    #[test]
    fn the_go_kubelet_can_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = Actuated::below(dir.path());
        let path = dir.path().join(FILE);
        file.keep(&snapshot(false));
        assert!(!path.exists());
        file.keep(&snapshot(true));
        let read = || serde_json::from_slice::<Value>(&std::fs::read(&path).unwrap()).unwrap();
        let data = r#"{"entries":{"u1":{"ContainerResources":{"main":{"limits":{"cpu":"500m"},"requests":{"memory":"1Mi"}},"side":{}},"PodLevelResources":null}}}"#;
        assert_eq!(read(), json!({"data": data, "checksum": CHECKSUM}));
        // Unchanged, it is left alone; another's is replaced.
        std::fs::remove_file(&path).unwrap();
        file.keep(&snapshot(true));
        assert!(!path.exists());
        std::fs::write(&path, "{}").unwrap();
        Actuated::below(dir.path()).keep(&snapshot(true));
        assert_eq!(read()["data"], json!(data));
    }

    const CHECKSUM: u32 = 4121029496;
}
