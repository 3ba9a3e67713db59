//! Our own Node object as the API server last showed it: a snapshot for all threads.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::view;
use crate::model::api::{Node, NodeAddress};
use crate::util::lock::LockExt;

/// The newest object that was received, from the watch or in a response. Cloning shares it.
#[derive(Clone, Default)]
pub struct NodeWatch {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// As the API server showed it since the start.
    object: Option<Arc<Node>>,
    /// The stored one, while the API server does not decide about this node.
    assumed: Option<Arc<Node>>,
    /// The addresses of this machine, while the object has other ones; empty: those of the object count.
    own: Vec<NodeAddress>,
    /// The watch has listed once.
    listed: bool,
    bells: Vec<Sender<()>>,
    hooks: Vec<Hook>,
    address_hooks: Vec<Hook>,
}

/// Called when the volumes in use or the attached ones, or the addresses, have changed.
type Hook = Arc<dyn Fn() + Send + Sync>;

impl NodeWatch {
    /// A watch without an object.
    #[must_use]
    pub fn new() -> Self {
        NodeWatch::default()
    }

    /// The object for admission; `None` if it does not exist or was not received yet. An assumed one
    /// counts until the API server shows the same object, with the same UID.
    #[must_use]
    pub fn object(&self) -> Option<Arc<Node>> {
        let state = self.state.locked();
        let shown = state.object.as_ref();
        let assumed = state.assumed.as_ref();
        let is_same =
            |assumed: &&Arc<Node>| shown.is_some_and(|shown| shown.metadata.uid == assumed.metadata.uid);
        assumed.filter(|assumed| !is_same(assumed)).or(shown).cloned()
    }

    /// The object as the API server showed it since the start: requests to the API server are based on
    /// this.
    #[must_use]
    pub fn confirmed(&self) -> Option<Arc<Node>> {
        self.state.locked().object.clone()
    }

    /// Uses a stored object for admission until [`NodeWatch::settle`], also if the API server shows another
    /// one or none: it may have lost its data. Running pods would be rejected after a restart of the agent
    /// without the labels that brought them here.
    pub fn assume(&self, node: Node) {
        let mut state = self.state.locked();
        state.assumed = Some(Arc::new(node));
        state.ring();
    }

    /// The API server decides about this node: no object is assumed any more.
    pub fn settle(&self) {
        let mut state = self.state.locked();
        if state.assumed.take().is_some() {
            state.ring();
        }
    }

    /// The object's UID: owner of mirror pods and of the lease. An assumed object has none.
    #[must_use]
    pub fn uid(&self) -> Option<String> {
        self.confirmed()?.metadata.uid.clone()
    }

    /// Whether pods of the API server may be requested: the watch has listed once or an object is
    /// assumed, so the labels and taints for admission are known.
    #[must_use]
    pub fn ready_for_pods(&self) -> bool {
        let state = self.state.locked();
        state.listed || state.assumed.is_some()
    }

    /// A bell that rings when the object is created, is removed, or changes in another part than
    /// its status, and after the first list of the watch.
    #[must_use]
    pub fn subscribe(&self) -> Receiver<()> {
        let (bell, ring) = bounded(1);
        self.state.locked().bells.push(bell);
        ring
    }

    /// Calls `hook` when the object's lists of volumes in use or of attached volumes have changed, on
    /// the thread that received the object. The hook must not block.
    pub fn on_volume_change(&self, hook: impl Fn() + Send + Sync + 'static) {
        self.state.locked().hooks.push(Arc::new(hook));
    }

    /// The addresses of pods on the host's network: those that this machine has now, one of each IP family,
    /// primary first. Those of the object if it has the same or this machine none; empty while both are
    /// unknown.
    ///
    /// DIFFERS: the Go kubelet has only those of the object (`getHostIPsAnyWay`), which are old while the
    /// API server is away from a machine that has moved.
    #[must_use]
    pub fn host_ips(&self) -> Vec<IpAddr> {
        let own = view::first_ips(&self.state.locked().own);
        if own.is_empty() { self.object().map(|node| view::host_ips(&node)).unwrap_or_default() } else { own }
    }

    /// Calls `hook` when this machine has other addresses than before, on the thread `node`. The hook must
    /// not block.
    pub fn on_address_change(&self, hook: impl Fn() + Send + Sync + 'static) {
        self.state.locked().address_hooks.push(Arc::new(hook));
    }

    /// The addresses of this machine that were set last.
    pub(super) fn own_addresses(&self) -> Vec<NodeAddress> {
        self.state.locked().own.clone()
    }

    /// Sets the addresses of this machine. Empty: those of the object count.
    pub(super) fn set_addresses(&self, own: Vec<NodeAddress>) {
        let before = self.host_ips();
        let hooks = {
            let mut state = self.state.locked();
            state.own = own;
            state.address_hooks.clone()
        };
        let now = self.host_ips();
        if now != before {
            log::info!("the addresses of this machine: {now:?}, before: {before:?}");
            hooks.iter().for_each(|hook| hook());
        }
    }

    /// Whether the watch has found that the object does not exist.
    pub(super) fn is_absent(&self) -> bool {
        let state = self.state.locked();
        state.listed && state.object.is_none()
    }

    /// Applies a complete list of the watch. Replaces the known object: a server that was restored
    /// from a backup has smaller versions.
    pub(super) fn replace(&self, nodes: Vec<Node>) {
        let mut state = self.state.locked();
        let before = state.object.clone();
        let first = !state.listed;
        let mut changed = first;
        if nodes.is_empty() {
            changed |= state.object.take().is_some();
        }
        for node in nodes {
            changed |= state.store(node);
        }
        // At the same moment as the object: pods that are admitted without it ignore its taints.
        state.listed = true;
        if changed {
            state.ring();
        }
        call(state, before.as_deref());
    }

    /// Stores an object unless a newer one is stored.
    pub(super) fn store_if_newer(&self, node: Node) {
        let mut state = self.state.locked();
        let before = state.object.clone();
        let is_late = state.object.as_deref().is_some_and(|old| version(old) > version(&node));
        if !is_late && state.store(node) {
            state.ring();
        }
        call(state, before.as_deref());
    }

    /// Removes the object, unless it has another UID now.
    pub(super) fn remove(&self, uid: Option<&str>) {
        let mut state = self.state.locked();
        if state.object.as_ref().is_some_and(|object| object.metadata.uid.as_deref() == uid) {
            let before = state.object.take();
            state.ring();
            call(state, before.as_deref());
        }
    }
}

/// Calls the hooks, without the lock, if the volumes have changed.
fn call(state: MutexGuard<'_, State>, before: Option<&Node>) {
    let is_same = match (before.and_then(|node| node.status.as_ref()), state.object.as_ref()) {
        (Some(old), Some(new)) => new.status.as_ref().is_some_and(|new| {
            (&old.volumes_in_use, &old.volumes_attached) == (&new.volumes_in_use, &new.volumes_attached)
        }),
        (None, None) => true,
        _ => false,
    };
    let hooks = if is_same { Vec::new() } else { state.hooks.clone() };
    drop(state);
    hooks.iter().for_each(|hook| hook());
}

impl State {
    /// Stores an object. Returns whether another part than its status has changed.
    fn store(&mut self, mut node: Node) -> bool {
        // Not used, and often larger than the rest of the object.
        node.metadata.managed_fields = None;
        let is_new = self.object.as_deref().is_none_or(|old| {
            let (was, is) = (&old.metadata, &node.metadata);
            (&was.uid, &was.labels, &was.annotations, &old.spec)
                != (&is.uid, &is.labels, &is.annotations, &node.spec)
        });
        self.object = Some(Arc::new(node));
        is_new
    }

    fn ring(&self) {
        for bell in &self.bells {
            // If the bell is full, its thread wakes anyway; a disconnected one has no reader.
            let _ = bell.try_send(());
        }
    }
}

/// Versions are opaque, except that newer ones are greater numbers.
fn version(node: &Node) -> u64 {
    node.metadata.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn node(uid: &str, version: &str, label: &str) -> Node {
        serde_json::from_value(json!({
            "metadata": {"name": "n", "uid": uid, "resourceVersion": version, "labels": {"a": label},
                "managedFields": [{"manager": "x"}]},
            "status": {"phase": version},
        }))
        .unwrap()
    }

    #[test]
    fn newest_object_stays() {
        let watch = NodeWatch::new();
        let ring = watch.subscribe();
        let rung = || ring.try_recv().is_ok();
        assert!(!watch.ready_for_pods() && !watch.is_absent());
        watch.store_if_newer(node("u", "9", "x"));
        assert!(rung() && !watch.ready_for_pods());
        watch.replace(vec![node("u", "10", "x")]);
        assert!(rung() && watch.ready_for_pods());
        watch.store_if_newer(node("u", "9", "old"));
        let object = watch.object().unwrap();
        assert_eq!(object.metadata.resource_version.as_deref(), Some("10"));
        assert_eq!((object.metadata.managed_fields.is_none(), watch.uid().as_deref()), (true, Some("u")));
        assert!(!rung());
        // A new status rings no bell, a new label does.
        watch.store_if_newer(node("u", "11", "x"));
        assert!(!rung());
        watch.store_if_newer(node("u", "12", "y"));
        assert!(rung());
        watch.remove(Some("other"));
        assert!(!rung() && watch.object().is_some());
        watch.remove(Some("u"));
        assert!(rung() && watch.is_absent());
        // The server was restored from a backup.
        watch.store_if_newer(node("u", "12", "y"));
        while rung() {}
        watch.replace(vec![node("u", "3", "z")]);
        assert!(rung());
        watch.store_if_newer(node("u", "4", "y"));
        assert!(rung() && watch.object().unwrap().metadata.resource_version.as_deref() == Some("4"));
        watch.remove(Some("u"));
        assert!(rung());
        watch.store_if_newer(node("v", "13", "y"));
        watch.replace(Vec::new());
        assert!(rung() && watch.is_absent() && watch.uid().is_none());
        watch.replace(Vec::new());
        assert!(!rung());
    }

    /// Otherwise pods are admitted without the taints of the node.
    #[test]
    fn object_is_known_as_soon_as_pods_may_be_admitted() {
        use crate::util::threads::{OnDeath, Stack, spawn};
        let mut large = node("u", "1", "x");
        // Removing them takes time.
        large.metadata.managed_fields = Some(vec![Default::default(); 200_000]);
        let watch = NodeWatch::new();
        let (reader, (sender, known)) = (watch.clone(), bounded(1));
        let _running = spawn("t/reader", Stack::Small, OnDeath::Unsupervised, move |stop| {
            let _ = sender.send(true);
            while !reader.ready_for_pods() && !stop.is_stopped() {}
            let _ = sender.send(!reader.is_absent() && reader.object().is_some());
        });
        assert_eq!(known.recv(), Ok(true));
        watch.replace(vec![large]);
        assert_eq!(known.recv(), Ok(true));
    }

    #[test]
    fn changed_lists_of_volumes_are_reported_and_nothing_else() {
        let watch = NodeWatch::new();
        let (called, calls) = crossbeam_channel::bounded(64);
        let reader = watch.clone();
        watch.on_volume_change(move || called.send(reader.object().is_some()).unwrap());
        let with = |version: &str, in_use: &[&str], attached: &[&str]| {
            let mut node = node("u", version, "x");
            let status = node.status.as_mut().unwrap();
            status.volumes_in_use = Some(in_use.iter().map(|name| (*name).to_owned()).collect());
            let attached = attached.iter().map(|name| json!({"name": name, "devicePath": ""}));
            let attached: Vec<serde_json::Value> = attached.collect();
            status.volumes_attached = serde_json::from_value(json!(attached)).unwrap();
            node
        };
        let calls = || calls.try_iter().collect::<Vec<bool>>();
        watch.store_if_newer(with("1", &[], &[]));
        assert_eq!(calls(), [true]);
        watch.store_if_newer(with("2", &[], &[]));
        assert!(calls().is_empty());
        watch.store_if_newer(with("3", &["v"], &[]));
        watch.store_if_newer(with("2", &["late"], &[]));
        watch.replace(vec![with("4", &["v"], &["v"])]);
        assert_eq!(calls(), [true, true]);
        watch.remove(Some("u"));
        assert_eq!(calls(), [false]);
        watch.replace(Vec::new());
        assert!(calls().is_empty());
    }

    #[test]
    fn addresses_of_this_machine_count_until_the_object_has_them() {
        let watch = NodeWatch::new();
        let (called, calls) = bounded(64);
        watch.on_address_change(move || called.send(()).unwrap());
        let addresses = |ips: &[&str]| -> Vec<NodeAddress> {
            let internal = |ip: &&str| NodeAddress { type_: "InternalIP".into(), address: (*ip).to_owned() };
            ips.iter().map(internal).collect()
        };
        // How often the hook was called since the last time.
        let check = |expected: &[&str], changes: usize| {
            let shown: Vec<String> = watch.host_ips().iter().map(ToString::to_string).collect();
            assert_eq!(
                (shown, calls.try_iter().count()),
                (expected.iter().map(|ip| (*ip).to_owned()).collect(), changes)
            );
        };
        check(&[], 0);
        let mut stored = node("u", "9", "x");
        stored.status.as_mut().unwrap().addresses = Some(addresses(&["192.0.2.1"]));
        watch.assume(stored.clone());
        check(&["192.0.2.1"], 0);
        // The machine was moved while the API server is away.
        watch.set_addresses(addresses(&["198.51.100.7", "fd00::7"]));
        check(&["198.51.100.7", "fd00::7"], 1);
        watch.set_addresses(addresses(&["198.51.100.7", "fd00::7"]));
        check(&["198.51.100.7", "fd00::7"], 0);
        // It knows only its name: the cloud has the addresses.
        watch.set_addresses(vec![NodeAddress { type_: "Hostname".into(), address: "n".to_owned() }]);
        check(&["192.0.2.1"], 1);
        watch.set_addresses(addresses(&["192.0.2.1"]));
        watch.set_addresses(Vec::new());
        check(&["192.0.2.1"], 0);
    }

    #[test]
    fn assumed_object_serves_admission_and_no_requests() {
        let watch = NodeWatch::new();
        let ring = watch.subscribe();
        watch.assume(node("u", "9", "stored"));
        assert!(ring.try_recv().is_ok() && watch.ready_for_pods() && !watch.is_absent());
        assert!(watch.object().is_some() && watch.confirmed().is_none() && watch.uid().is_none());
        // A restored server has smaller versions.
        watch.store_if_newer(node("u", "3", "shown"));
        assert!(ring.try_recv().is_ok(), "it can be reported now");
        assert_eq!(watch.object().unwrap().metadata.resource_version.as_deref(), Some("3"));
        assert_eq!(watch.uid().as_deref(), Some("u"));
    }

    /// Otherwise running pods are rejected after a restart of the agent.
    #[test]
    fn assumed_object_serves_admission_while_the_server_shows_none_or_another() {
        let watch = NodeWatch::new();
        let label = || watch.object().map(|node| node.metadata.labels.clone().unwrap()["a"].clone());
        watch.replace(Vec::new());
        watch.assume(node("u", "9", "stored"));
        assert!(watch.is_absent() && watch.confirmed().is_none(), "it is registered again");
        assert_eq!(label().as_deref(), Some("stored"));
        watch.store_if_newer(node("v", "10", "new"));
        assert_eq!((label().as_deref(), watch.uid().as_deref()), (Some("stored"), Some("v")));
        let ring = watch.subscribe();
        watch.settle();
        assert!(ring.try_recv().is_ok());
        assert_eq!(label().as_deref(), Some("new"));
        watch.settle();
        watch.replace(Vec::new());
        assert!(ring.try_recv().is_ok() && watch.is_absent() && watch.object().is_none());
    }

    #[test]
    fn missing_object_is_reported_after_the_first_list() {
        let watch = NodeWatch::new();
        let ring = watch.subscribe();
        watch.replace(Vec::new());
        assert!(ring.try_recv().is_ok() && watch.is_absent() && watch.ready_for_pods());
    }
}
