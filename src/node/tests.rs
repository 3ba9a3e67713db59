//! Compares request bodies with the Go kubelet's, and tests the reporter with a fake server.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::api::{NodeApi, NodeError, NodeErrorKind};
use super::compose::{self, Image, NodeStatusInputs, largest_images};
use super::reporter::Reporter;
use super::{AddressError, NodeWatch, Sensors, Settings, patch};
use crate::cri::{CriError, Handler, RuntimeFeatures};
use crate::model::api::{Node, NodeAddress, Taint};
use crate::model::event::{Event, EventSink};
use crate::model::node::Allocatable;
use crate::observe::RuntimeHealth;
use crate::resources::system::SystemFacts;
use crate::util::stop::StopToken;

fn timestamp(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn settings() -> Settings {
    Settings {
        name: "node1".to_owned(),
        register: true,
        labels: BTreeMap::from([("example.org/zone".to_owned(), "a".to_owned())]),
        controller_attach_detach: true,
        node_ips: vec!["192.0.2.10".parse().unwrap()],
        port: 10250,
        kubelet_version: "v1.37.2".to_owned(),
        declared_features: [
            "ExtendWebSocketsToKubelet",
            "InPlacePodLevelResourcesVerticalScaling",
            "InPlacePodVerticalScalingInitContainers",
            "RestartAllContainersOnContainerExits",
        ]
        .map(str::to_owned)
        .to_vec(),
        in_user_namespace: Some(false),
        update_every: Duration::from_secs(10),
        report_every: Duration::from_secs(300),
        lease_seconds: 40,
        ..Settings::default()
    }
}

fn addresses() -> Vec<NodeAddress> {
    [("InternalIP", "192.0.2.10"), ("Hostname", "node1")]
        .map(|(kind, address)| NodeAddress { type_: kind.to_owned(), address: address.to_owned() })
        .to_vec()
}

fn image(name: &str, size_bytes: i64) -> Image {
    Image { id: name.to_owned(), tags: vec![name.to_owned()], size_bytes, ..Image::default() }
}

/// The recorded node's.
fn facts() -> NodeStatusInputs {
    let handler = |name: &str| Handler {
        name: name.to_owned(),
        recursive_read_only_mounts: true,
        user_namespaces: false,
    };
    let huge =
        |bytes| BTreeMap::from([("hugepages-1Gi".to_owned(), bytes), ("hugepages-2Mi".to_owned(), bytes)]);
    let all = Allocatable {
        cpu_milli: 2000,
        memory_bytes: 24_684_092 << 10,
        ephemeral_bytes: 264_212_084 << 10,
        pods: 110,
        extended: huge(0),
    };
    let reserved = super::Reservations::new(
        &BTreeMap::new(),
        &BTreeMap::new(),
        None,
        &BTreeMap::from([("memory.available".to_owned(), "1Mi".to_owned())]),
    );
    NodeStatusInputs {
        settled: true,
        allocatable: super::allocatable(&all, &reserved),
        capacity: Some(all),
        system: SystemFacts {
            machine_id: "<hash>".to_owned(),
            system_uuid: "<hash>".to_owned(),
            boot_id: "<uid1>".to_owned(),
            kernel_version: "6.18.44-fc-v657".to_owned(),
            os_image: "Debian GNU/Linux 12 (bookworm)".to_owned(),
            swap_bytes: 0,
        },
        runtime_version: Some("containerd://2.1.9+unknown".to_owned()),
        handlers: vec![handler(""), handler("runc")],
        features: Some(RuntimeFeatures { supplemental_groups_policy: true, ..RuntimeFeatures::default() }),
        images: Some(largest_images(
            vec![image("localhost/pause:3.10", 303_873), image("localhost/busybox:1", 1_032_062)],
            Some(50),
        )),
        ..NodeStatusInputs::default()
    }
}

/// Replaces values that differ from run to run by the names in the recording.
fn anonymous(value: &mut Value, key: &str) {
    match value {
        Value::Object(map) => map.iter_mut().for_each(|(key, value)| anonymous(value, key)),
        Value::Array(list) => list.iter_mut().for_each(|value| anonymous(value, key)),
        Value::String(text) if key.ends_with("Time") || key == "creationTimestamp" => {
            *text = "<time>".to_owned()
        }
        _ => {}
    }
}

fn golden(line: usize) -> Value {
    let text = include_str!("golden.jsonl").lines().nth(line).unwrap();
    serde_json::from_str::<Value>(text).unwrap()["body"].clone()
}

fn sent(body: &impl serde::Serialize) -> Value {
    let mut body = serde_json::to_value(body).unwrap();
    anonymous(&mut body, "");
    body
}

#[test]
fn registers_with_the_recorded_body() {
    let problem = golden(0)["status"]["conditions"][3]["message"].as_str().unwrap().to_owned();
    let facts = NodeStatusInputs { problems: vec![problem], ..facts() };
    let (node, events) = compose::initial(&settings(), &facts, Some(addresses()), timestamp(100));
    let expected = golden(0).to_string().replace("amd64", super::arch());
    assert_eq!(sent(&node), serde_json::from_str::<Value>(&expected).unwrap());
    let reasons: Vec<_> = events.iter().map(|event| event.reason).collect();
    assert_eq!(reasons, ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID"]);
}

#[test]
fn becomes_ready_with_the_recorded_patch() {
    let early = NodeStatusInputs { problems: vec!["CSINode is not yet initialized".to_owned()], ..facts() };
    let (old, _) = compose::initial(&settings(), &early, Some(addresses()), timestamp(100));
    let (new, _) = compose::refreshed(&settings(), &facts(), Some(addresses()), &old, timestamp(100));
    assert_eq!(patch::between(&old, &new), Some(golden(1)));
}

#[test]
fn the_lease_is_the_recorded_one() {
    use super::api::LeaseApi;
    use super::lease::LeaseRenewer;
    use super::lease_object::LeaseObject;
    use crate::model::coordination::Lease;
    /// Has no lease at first, and then the recorded one.
    struct Server(Arc<Mutex<Vec<Value>>>);
    impl Server {
        fn take(&self, lease: &LeaseObject) -> Result<LeaseObject, NodeError> {
            let mut lease: Lease = serde_json::from_slice(&lease.to_body().1).unwrap();
            self.0.lock().unwrap().push(sent(&lease));
            lease.metadata.uid = Some("<uid15>".to_owned());
            lease.metadata.resource_version = Some("<rv>".to_owned());
            lease.metadata.creation_timestamp = Some(crate::model::meta::Time(timestamp(1)));
            lease.metadata.managed_fields = Some(Vec::new());
            Ok(LeaseObject::from_body(&serde_json::to_vec(&lease).unwrap()).unwrap())
        }
    }
    impl LeaseApi for Server {
        fn get(&self) -> Result<LeaseObject, NodeError> {
            Err(NodeError::new("get", "lease".to_owned(), String::new(), NodeErrorKind::NotFound))
        }
        fn create(&self, lease: &LeaseObject) -> Result<LeaseObject, NodeError> {
            self.take(lease)
        }
        fn update(&self, lease: &LeaseObject) -> Result<LeaseObject, NodeError> {
            self.take(lease)
        }
        fn drop_connections(&self) {}
    }
    let bodies = Arc::new(Mutex::new(Vec::new()));
    let mut renewer = LeaseRenewer::new("node1".to_owned(), 40, Box::new(Server(Arc::clone(&bodies))));
    renewer.turn(Some("<uid2>"), timestamp(1));
    renewer.turn(Some("<uid2>"), timestamp(11));
    assert_eq!(*bodies.lock().unwrap(), [golden(2), golden(3)]);
}

#[test]
fn images_are_sorted_by_size() {
    let many = Image {
        digests: (0..4).map(|n| format!("a@{n}")).collect(),
        tags: (0..4).map(|n| format!("a:{n}")).collect(),
        ..image("many", 5)
    };
    let nameless = Image { tags: Vec::new(), ..image("none", 9) };
    let list = vec![image("small", 1), many, image("also5", 5), nameless];
    let sent = |most| serde_json::to_value(largest_images(list.clone(), most)).unwrap();
    assert_eq!(
        sent(Some(3)),
        json!([
            {"sizeBytes": 9},
            {"names": ["a@0", "a@1", "a@2", "a@3", "a:0"], "sizeBytes": 5},
            {"names": ["also5"], "sizeBytes": 5},
        ])
    );
    assert_eq!(sent(None).as_array().unwrap().len(), 4);
}

#[test]
fn a_cloud_node_waits_for_its_cloud() {
    let settings = Settings {
        external_cloud: true,
        controller_attach_detach: false,
        provider_id: "cloud://x".to_owned(),
        taints: vec![Taint { key: "k".to_owned(), effect: "NoExecute".to_owned(), ..Taint::default() }],
        ..settings()
    };
    let node = sent(&compose::initial(&settings, &facts(), Some(addresses()), timestamp(1)).0);
    assert_eq!(
        node["spec"],
        json!({"providerID": "cloud://x", "taints": [
            {"key": "k", "effect": "NoExecute"},
            {"key": "node.cloudprovider.kubernetes.io/uninitialized", "value": "true", "effect": "NoSchedule"},
        ]})
    );
    assert_eq!(
        node["metadata"]["annotations"],
        json!({"alpha.kubernetes.io/provided-node-ip": "192.0.2.10"})
    );
}

/// Administrators and controllers set these.
#[test]
fn conditions_of_other_clients_stay() {
    const OTHERS: [&str; 6] = [
        "GracefulNodeShutdownInProgress",
        "DrainInProgress",
        "Drained",
        "MaintenancePlanned",
        "MaintenanceInProgress",
        "NetworkUnavailable",
    ];
    let other = |kind: &&str| {
        serde_json::from_value(json!({"type": kind, "status": "True", "reason": "R", "message": "m",
            "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z"}))
        .unwrap()
    };
    let (mut before, _) = compose::initial(&settings(), &facts(), Some(addresses()), timestamp(1));
    let conditions = before.status.as_mut().unwrap().conditions.as_mut().unwrap();
    conditions.splice(0..0, OTHERS.iter().map(other));
    let (after, _) = compose::refreshed(&settings(), &facts(), Some(addresses()), &before, timestamp(100));
    let others_of = |node: &Node| {
        let all = node.status.as_ref().unwrap().conditions.iter().flatten();
        all.filter(|condition| OTHERS.contains(&condition.type_.as_str())).cloned().collect::<Vec<_>>()
    };
    assert_eq!((others_of(&after), others_of(&after).len()), (others_of(&before), OTHERS.len()));
    // The heartbeats of our own conditions are all that changed.
    let patch = patch::between(&before, &after).unwrap();
    let changes = patch["status"]["conditions"].as_array().unwrap();
    assert_eq!(changes.len(), 4, "{patch}");
    assert!(changes.iter().all(|change| change.get("$patch").is_none()), "{patch}");
    assert_eq!(patch["status"]["$setElementOrder/conditions"].as_array().unwrap().len(), 10);
}

#[test]
fn node_shows_whether_the_agent_is_in_a_user_namespace() {
    let shown = |in_user_namespace, base: &Node| {
        let settings = Settings { in_user_namespace, ..settings() };
        let (node, _) = compose::refreshed(&settings, &facts(), Some(addresses()), base, timestamp(1));
        (node.status.clone().unwrap().node_info.unwrap().running_in_user_namespace, node)
    };
    let (first, node) = shown(Some(false), &Node::default());
    assert_eq!(first, Some(false));
    assert_eq!(shown(Some(true), &node).0, Some(true));
    // Without the gate, the field of another agent stays.
    assert_eq!(shown(None, &node).0, Some(false));
    assert_eq!(shown(None, &Node::default()).0, None);
}

#[test]
fn provided_node_ip_follows_the_settings_at_each_status() {
    const NAME: &str = "alpha.kubernetes.io/provided-node-ip";
    let after = |before: Option<&str>, external_cloud, ips: &[&str], valid: bool| -> Option<String> {
        let node_ips = ips.iter().map(|ip| ip.parse().unwrap()).collect();
        let settings = Settings { external_cloud, node_ips, ..settings() };
        let mut base = Node::default();
        base.metadata.annotations = before
            .map(|value| BTreeMap::from([(NAME.to_owned(), value.to_owned()), ("a".into(), "b".into())]));
        let addresses = valid.then(addresses);
        let (node, _) = compose::refreshed(&settings, &facts(), addresses, &base, timestamp(1));
        node.metadata.annotations?.get(NAME).cloned()
    };
    let value = |text: &str| Some(text.to_owned());
    let both = ["192.0.2.10", "fd00::10"];
    assert_eq!(after(None, true, &both, true), value("192.0.2.10,fd00::10"));
    // The address was changed after the registration.
    assert_eq!(after(Some("192.0.2.9"), true, &["192.0.2.10"], true), value("192.0.2.10"));
    // It is not written while it is none of this machine.
    assert_eq!(after(Some("192.0.2.9"), true, &["192.0.2.10"], false), value("192.0.2.9"));
    // No cloud, no address, or only a preferred family: a stale value is removed.
    assert_eq!(after(Some("192.0.2.9"), false, &["192.0.2.10"], true), None);
    assert_eq!(after(Some("192.0.2.9"), true, &[], true), None);
    assert_eq!(after(Some("::"), true, &["::"], true), None);
    assert_eq!(after(None, true, &["0.0.0.0"], false), None);
}

fn amounts(map: &Option<BTreeMap<String, crate::model::Quantity>>, name: &str) -> Option<String> {
    Some(map.as_ref()?.get(name)?.0.clone())
}

#[test]
fn resource_that_a_client_adds_to_the_capacity_becomes_allocatable() {
    let mut base: Node = serde_json::from_value(json!({"metadata": {"name": "node1"}, "status": {
        "capacity": {"example.com/dongle": "4", "example.com/odd": "-1", "cpu": "64"},
        "allocatable": {"example.com/gone": "2", "example.com/dongle": "1", "native": "7"},
    }}))
    .unwrap();
    for _ in 0..2 {
        let status = compose::refreshed(&settings(), &facts(), None, &base, timestamp(1)).0.status.unwrap();
        let amounts_of = |name| (amounts(&status.capacity, name), amounts(&status.allocatable, name));
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(amounts_of("example.com/dongle"), (text("4"), text("4")));
        assert_eq!(amounts_of("example.com/odd"), (text("-1"), text("0")));
        // Removed from the capacity.
        assert_eq!(amounts_of("example.com/gone"), (None, None));
        assert_eq!(amounts_of("native"), (None, text("7")));
        // Our own resources keep their reservation.
        assert_eq!(amounts_of("cpu"), (text("2"), text("2")));
        assert_eq!(amounts_of("memory"), (text("24684092Ki"), text("24683068Ki")));
        base.status = Some(status);
    }
    // A device plugin offers fewer healthy devices than there are.
    let mut facts = facts();
    facts.capacity.as_mut().unwrap().extended.insert("example.com/dongle".to_owned(), 3);
    facts.allocatable.extended.insert("example.com/dongle".to_owned(), 2);
    let status = compose::refreshed(&settings(), &facts, None, &base, timestamp(1)).0.status.unwrap();
    assert_eq!(amounts(&status.capacity, "example.com/dongle").as_deref(), Some("3"));
    assert_eq!(amounts(&status.allocatable, "example.com/dongle").as_deref(), Some("2"));
}

#[test]
fn stale_devices_of_a_machine_that_was_installed_again_are_zero() {
    let existing = json!({"metadata": {"name": "node1", "uid": "old"}, "status": {
        "capacity": {"nvidia.com/gpu": "8", "example.com/nic": "2", "hugepages-2Mi": "0"},
        "allocatable": {"nvidia.com/gpu": "8", "example.com/nic": "2", "hugepages-2Mi": "0"},
    }});
    for (register, resets_devices, expected) in [(true, true, "0"), (true, false, "8"), (false, true, "8")] {
        let mut fixture = Fixture::new(Settings { register, resets_devices, ..settings() });
        let node = fixture.server.0.lock().unwrap().store(existing.clone());
        fixture.watch.replace(vec![node]);
        // The plugin of one resource was faster.
        fixture.facts(|facts| {
            facts.capacity.as_mut().unwrap().extended.insert("example.com/nic".to_owned(), 2);
            facts.allocatable.extended.insert("example.com/nic".to_owned(), 1);
        });
        // A failed write is repeated with the same values.
        fixture.server.0.lock().unwrap().failures = vec![NodeErrorKind::Other];
        assert_eq!(fixture.turn(0), ["patch", "get", "patch"]);
        let status = fixture.watch.object().unwrap().status.clone().unwrap();
        for map in [&status.capacity, &status.allocatable] {
            assert_eq!(amounts(map, "nvidia.com/gpu").as_deref(), Some(expected), "{register}");
        }
        assert_eq!(amounts(&status.capacity, "example.com/nic").as_deref(), Some("2"));
        assert_eq!(amounts(&status.allocatable, "example.com/nic").as_deref(), Some("1"));
        // Only at the first status: a value that a client sets afterwards stays.
        let node = fixture.server.edit(|node| {
            node["status"]["capacity"]["nvidia.com/gpu"] = json!("5");
        });
        fixture.watch.store_if_newer(node);
        fixture.turn(10);
        let status = fixture.watch.object().unwrap().status.clone().unwrap();
        assert_eq!(amounts(&status.allocatable, "nvidia.com/gpu").as_deref(), Some("5"));
    }
}

#[test]
fn existing_node_gets_only_our_fields() {
    let existing: Node = serde_json::from_value(json!({
        "metadata": {"name": "node1", "labels": {
            "kubernetes.io/hostname": "wrong", "example.org/zone": "b", "topology.kubernetes.io/zone": "z",
            "kubernetes.io/arch": super::arch(), "kubernetes.io/os": "linux",
            "beta.kubernetes.io/os": "linux", "foreign": "x"},
            "annotations": {"foreign": "x"}},
        "spec": {"taints": [{"key": "theirs", "effect": "NoSchedule"}]},
        "status": {"capacity": {"hugepages-64Ki": "0", "example.org/gpu": "1"}, "allocatable": {"hugepages-64Ki": "0"}},
    }))
    .unwrap();
    let settings = Settings { taints: vec![Taint::default()], ..settings() };
    let reconciled = compose::reconciled(&settings, &facts(), &existing, false);
    assert_eq!(
        patch::between(&existing, &reconciled).unwrap(),
        json!({
            "metadata": {
                "labels": {"kubernetes.io/hostname": "node1", "beta.kubernetes.io/arch": super::arch()},
                "annotations": {"volumes.kubernetes.io/controller-managed-attach-detach": "true"},
            },
            "status": {"capacity": {"hugepages-64Ki": null}, "allocatable": {"hugepages-64Ki": null}},
        })
    );
    assert_eq!(reconciled.spec, existing.spec);
    let own = Settings { controller_attach_detach: false, ..settings };
    let again = compose::reconciled(&own, &facts(), &reconciled, false);
    assert_eq!(again.metadata.annotations, existing.metadata.annotations);
}

// ---- the life of a node ----

/// An API server that stores one node.
#[derive(Default)]
struct Server {
    node: Option<Value>,
    version: u64,
    uids: u64,
    log: Vec<String>,
    patches: Vec<Value>,
    /// The errors of the next requests.
    failures: Vec<NodeErrorKind>,
    /// A status field that it does not know.
    drops: Option<&'static str>,
    /// Another kind of failure for create.
    forbids_create: bool,
    /// Behaves like a server without the status subresource.
    denies_status: bool,
    /// The end of the client certificate.
    certificate_end: Option<Timestamp>,
}

#[derive(Clone, Default)]
struct Handle(Arc<Mutex<Server>>);

impl Handle {
    fn request<T>(
        &self,
        verb: &'static str,
        act: impl FnOnce(&mut Server) -> Result<T, NodeErrorKind>,
    ) -> Result<T, NodeError> {
        let mut server = self.0.lock().unwrap();
        server.log.push(verb.to_owned());
        let result = match server.failures.pop() {
            Some(kind) => Err(kind),
            None => act(&mut server),
        };
        result.map_err(|kind| NodeError::new(verb, "node node1".to_owned(), "scripted".to_owned(), kind))
    }

    fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().log)
    }

    fn edit(&self, edit: impl FnOnce(&mut Value)) -> Node {
        let mut server = self.0.lock().unwrap();
        let mut node = server.node.take().unwrap();
        edit(&mut node);
        server.store(node)
    }
}

impl Server {
    fn store(&mut self, mut node: Value) -> Node {
        self.version += 1;
        node["metadata"]["resourceVersion"] = json!(self.version.to_string());
        if let (Some(field), Some(status)) = (self.drops, node["status"].as_object_mut()) {
            status.remove(field);
        }
        self.node = Some(node.clone());
        serde_json::from_value(node).unwrap()
    }
}

/// As a server applies a strategic merge patch.
fn apply(target: &mut Map<String, Value>, patch: &Value) {
    for (key, change) in patch.as_object().unwrap() {
        match change {
            Value::Null => {
                target.remove(key);
            }
            _ if key.starts_with('$') => {}
            Value::Object(_) => {
                let inner = target.entry(key.clone()).or_insert_with(|| json!({}));
                apply(inner.as_object_mut().unwrap(), change);
            }
            Value::Array(items) if key == "conditions" => {
                let list = target.entry(key.clone()).or_insert_with(|| json!([]));
                let list = list.as_array_mut().unwrap();
                for item in items {
                    match list.iter_mut().find(|old| old["type"] == item["type"]) {
                        Some(old) => apply(old.as_object_mut().unwrap(), item),
                        None => list.push(item.clone()),
                    }
                }
            }
            Value::Array(items) if key == "addresses" => {
                let items: Vec<_> =
                    items.iter().filter(|item| item.get("$patch").is_none()).cloned().collect();
                target.insert(key.clone(), Value::Array(items));
            }
            _ => {
                target.insert(key.clone(), change.clone());
            }
        }
    }
}

impl NodeApi for Handle {
    fn get(&self) -> Result<Node, NodeError> {
        self.request("get", |server| {
            let node = server.node.clone().ok_or(NodeErrorKind::NotFound)?;
            Ok(serde_json::from_value(node).unwrap())
        })
    }

    fn create(&self, node: &Node) -> Result<Node, NodeError> {
        self.request("create", |server| {
            if server.forbids_create {
                return Err(NodeErrorKind::Forbidden);
            }
            if server.node.is_some() {
                return Err(NodeErrorKind::AlreadyExists);
            }
            server.uids += 1;
            let mut node = serde_json::to_value(node).unwrap();
            node["metadata"]["uid"] = json!(format!("uid{}", server.uids));
            Ok(server.store(node))
        })
    }

    fn patch_status(&self, patch: &Value) -> Result<Node, NodeError> {
        self.request("patch", |server| {
            if server.denies_status {
                return Err(NodeErrorKind::NotFound);
            }
            let mut node = server.node.clone().ok_or(NodeErrorKind::NotFound)?;
            let wanted = patch.pointer("/metadata/resourceVersion");
            if wanted.is_some_and(|wanted| *wanted != node["metadata"]["resourceVersion"]) {
                return Err(NodeErrorKind::Conflict);
            }
            apply(node.as_object_mut().unwrap(), patch);
            server.patches.push(patch.clone());
            Ok(server.store(node))
        })
    }

    fn drop_connections(&self) {
        self.0.lock().unwrap().log.push("drop".to_owned());
    }

    fn certificate_problem(&self, now: Timestamp) -> Option<String> {
        self.0.lock().unwrap().certificate_end.filter(|end| now > *end).map(|end| format!("expired at {end}"))
    }
}

#[derive(Default)]
struct Sent {
    facts: NodeStatusInputs,
    cidrs: Vec<String>,
    cidr_fails: bool,
    registrations: u32,
    stored: Vec<(u64, Vec<String>)>,
    /// The address of the machine in place of that of the settings; an empty one: there is none.
    address: Option<&'static str>,
    /// Those that were known when the addresses were found last.
    known: Vec<String>,
    /// An address that the machine has, in addition.
    has: &'static str,
}

struct Fixed(Arc<Mutex<Sent>>);

impl Sensors for Fixed {
    fn end_with(&mut self, _: &StopToken) {}

    fn facts(&mut self) -> NodeStatusInputs {
        self.0.lock().unwrap().facts.clone()
    }

    fn addresses(
        &self,
        settings: &Settings,
        known: &[NodeAddress],
    ) -> Result<Vec<NodeAddress>, AddressError> {
        let mut sent = self.0.lock().unwrap();
        sent.known = known.iter().map(|address| address.address.clone()).collect();
        match sent.address {
            None => Ok(addresses()),
            Some("") => Err(AddressError::NoRoute(settings.name.clone())),
            Some(ip) => Ok(vec![NodeAddress { type_: "InternalIP".to_owned(), address: ip.to_owned() }]),
        }
    }

    fn has_internal(&self, known: &[NodeAddress]) -> bool {
        let has = self.0.lock().unwrap().has;
        known.iter().any(|address| address.address == has)
    }

    fn volumes_stored(&self, number: u64, stored: &BTreeSet<String>) {
        self.0.lock().unwrap().stored.push((number, stored.iter().cloned().collect()));
    }

    fn set_pod_cidrs(&self, cidrs: &str) -> Result<(), CriError> {
        let mut sent = self.0.lock().unwrap();
        sent.cidrs.push(cidrs.to_owned());
        let stopped = CriError::Stopped { method: "UpdateRuntimeConfig", object: String::new() };
        if sent.cidr_fails { Err(stopped) } else { Ok(()) }
    }

    fn registered(&self) {
        self.0.lock().unwrap().registrations += 1;
    }
}

/// A reporter with fakes for all its dependencies, and a clock that is set by hand.
struct Fixture {
    server: Handle,
    sent: Arc<Mutex<Sent>>,
    watch: NodeWatch,
    events: Receiver<Box<Event>>,
    reporter: Reporter,
    start: Instant,
    second: u64,
}

impl Fixture {
    fn new(settings: Settings) -> Fixture {
        let (server, watch, start) = (Handle::default(), NodeWatch::new(), Instant::now());
        watch.replace(Vec::new());
        let sent = Arc::new(Mutex::new(Sent { facts: facts(), ..Sent::default() }));
        let (sink, events) = EventSink::new();
        let reporter = Reporter::new(
            settings,
            Box::new(server.clone()),
            Box::new(Fixed(Arc::clone(&sent))),
            sink,
            watch.clone(),
            start,
        );
        Fixture { server, sent, watch, events, reporter, start, second: 0 }
    }

    /// One turn `seconds` later; the requests that it made.
    fn turn(&mut self, seconds: u64) -> Vec<String> {
        self.second += seconds;
        let now = self.start + Duration::from_secs(self.second);
        self.reporter.turn(now, timestamp(1000 + i64::try_from(self.second).unwrap()), 0.5);
        self.server.log()
    }

    fn facts(&self, change: impl FnOnce(&mut NodeStatusInputs)) {
        change(&mut self.sent.lock().unwrap().facts);
    }

    /// The new Node objects since the last call.
    fn registrations(&self) -> u32 {
        std::mem::take(&mut self.sent.lock().unwrap().registrations)
    }

    fn events(&self) -> Vec<&'static str> {
        self.events.try_iter().map(|event| event.reason).collect()
    }

    fn condition(&self, kind: &str) -> Value {
        let server = self.server.0.lock().unwrap();
        let conditions = server.node.as_ref().unwrap()["status"]["conditions"].as_array().unwrap().clone();
        conditions.into_iter().find(|condition| condition["type"] == kind).unwrap()
    }
}

const NOTHING: [&str; 0] = [];

#[test]
fn node_is_registered_although_a_stored_object_is_assumed() {
    let mut fixture = Fixture::new(settings());
    let stored = json!({"metadata": {"name": "node1", "uid": "stored", "resourceVersion": "7"}});
    fixture.watch.assume(serde_json::from_value(stored).unwrap());
    assert!(fixture.watch.object().is_some());
    assert_eq!(fixture.turn(0), ["create"]);
    // The object for admission stays, and the lease belongs to the new one.
    let admission = fixture.watch.object().unwrap();
    assert_eq!(admission.metadata.uid.as_deref(), Some("stored"));
    assert!(fixture.watch.uid().is_some_and(|uid| uid != "stored"));
}

/// Without a restart, and although no request succeeds.
#[test]
fn addresses_are_followed_while_the_api_server_is_away_and_reported_when_it_is_back() {
    let mut fixture = Fixture::new(settings());
    let shown = |fixture: &Fixture| {
        let ips = fixture.watch.host_ips();
        ips.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(fixture.turn(0), ["create"]);
    assert_eq!(fixture.turn(10), NOTHING);
    assert_eq!(shown(&fixture), "192.0.2.10");
    let uid = fixture.watch.uid();

    // Renumbered, moved to the other family, and then without a link.
    for (address, expected) in [
        ("198.51.100.7", "198.51.100.7"),
        ("fd00::7", "fd00::7"),
        ("", "fd00::7"),
        ("192.0.2.10", "192.0.2.10"),
    ] {
        fixture.sent.lock().unwrap().address = Some(address);
        fixture.server.0.lock().unwrap().failures = vec![NodeErrorKind::Other; 5];
        fixture.turn(10);
        assert_eq!(shown(&fixture), expected, "{address:?}");
    }
    fixture.server.0.lock().unwrap().failures.clear();

    fixture.sent.lock().unwrap().address = Some("203.0.113.9");
    fixture.turn(10);
    let object = fixture.watch.confirmed().unwrap();
    let addresses = object.status.as_ref().unwrap().addresses.as_ref().unwrap();
    assert!(addresses.iter().any(|address| address.address == "203.0.113.9"), "{addresses:?}");
    assert_eq!((shown(&fixture).as_str(), fixture.watch.uid()), ("203.0.113.9", uid));
}

/// A restart of the agent alone, on a machine that was moved while it was off.
#[test]
fn stored_object_of_another_network_does_not_decide_the_addresses() {
    let mut fixture = Fixture::new(Settings { register: false, ..settings() });
    let stored = json!({"metadata": {"name": "node1", "uid": "stored", "resourceVersion": "7"},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.99"}]}});
    fixture.watch.assume(serde_json::from_value(stored).unwrap());
    // Before the start has settled.
    fixture.facts(|facts| facts.settled = false);
    assert_eq!(fixture.turn(0), NOTHING);
    assert_eq!(fixture.watch.host_ips(), ["192.0.2.10".parse::<std::net::IpAddr>().unwrap()]);
}

/// A machine without a default route moves: its devices do not take turns. It returns: the address of the
/// other network does not stay.
#[test]
fn addresses_found_last_are_the_known_ones_except_for_those_of_a_cloud() {
    let known_in_turns = |external_cloud: bool, has: &'static str| {
        let mut fixture = Fixture::new(Settings { register: false, external_cloud, ..settings() });
        let stored = json!({"metadata": {"name": "node1", "uid": "stored", "resourceVersion": "7"},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.99"}]}});
        fixture.watch.assume(serde_json::from_value(stored).unwrap());
        fixture.facts(|facts| facts.settled = false);
        fixture.sent.lock().unwrap().has = has;
        [0, 1].map(|seconds| {
            fixture.turn(seconds);
            fixture.sent.lock().unwrap().known.join(" ")
        })
    };
    assert_eq!(known_in_turns(false, ""), ["192.0.2.99", "192.0.2.10 node1"]);
    assert_eq!(known_in_turns(true, ""), ["192.0.2.99", "192.0.2.99"]);
    // A device of another network is still there, but the object's address is back.
    assert_eq!(known_in_turns(false, "192.0.2.99"), ["192.0.2.99", "192.0.2.99"]);
}

#[test]
fn one_request_registers_a_ready_node() {
    let mut fixture = Fixture::new(settings());
    assert_eq!(fixture.turn(0), ["create"]);
    assert_eq!(
        fixture.events(),
        ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID", "NodeReady"]
    );
    assert_eq!(fixture.turn(10), NOTHING);
    // The report period after a change has a random offset, here zero.
    assert_eq!(fixture.turn(280), NOTHING);
    assert_eq!(fixture.turn(10), ["patch"]);
    let patch = fixture.server.0.lock().unwrap().patches[0].clone();
    let conditions = patch["status"]["conditions"].as_array().unwrap();
    assert_eq!(conditions.len(), 4);
    assert!(conditions.iter().all(|change| change.as_object().unwrap().len() == 2), "{patch}");
    assert!(fixture.events().is_empty());
}

#[test]
fn expired_client_certificate_has_one_event_and_another_one_has_its_own() {
    let mut fixture = Fixture::new(settings());
    fixture.turn(0);
    fixture.events();
    fixture.server.0.lock().unwrap().certificate_end = Some(timestamp(1020));
    fixture.turn(10);
    assert_eq!(fixture.events(), NOTHING);
    fixture.turn(20);
    fixture.turn(10);
    let events: Vec<String> = fixture.events.try_iter().map(|event| event.message.clone()).collect();
    assert!(events.len() == 1 && events[0].starts_with("expired at 1970-01-01T00:17:00Z: pods continue"));
    // A new one, which also expires.
    fixture.server.0.lock().unwrap().certificate_end = Some(timestamp(1050));
    fixture.turn(5);
    fixture.turn(10);
    assert_eq!(fixture.events(), ["InvalidClientCertificate"]);
}

#[test]
fn change_is_reported_at_once() {
    let mut fixture = Fixture::new(settings());
    fixture.turn(0);
    fixture.events();
    fixture.facts(|facts| facts.health.runtime = vec!["container runtime is down".to_owned()]);
    assert_eq!(fixture.turn(3), ["patch"]);
    assert_eq!(fixture.events(), ["NodeNotReady"]);
    let ready = fixture.condition("Ready");
    assert_eq!(
        (ready["status"].as_str(), ready["lastTransitionTime"].as_str()),
        (Some("False"), Some("1970-01-01T00:16:43Z"))
    );
    fixture.facts(|facts| facts.health = RuntimeHealth::default());
    assert_eq!(fixture.turn(3), ["patch"]);
    assert_eq!(fixture.events(), ["NodeReady"]);
    fixture.facts(|facts| facts.images = Some(largest_images(vec![image("new", 1)], None)));
    assert_eq!(fixture.turn(3), ["patch"]);
    // While images are not known, the object keeps them.
    fixture.facts(|facts| facts.images = None);
    assert_eq!(fixture.turn(3), NOTHING);
    fixture.facts(|facts| facts.pressures.disk = true);
    assert_eq!(fixture.turn(3), ["patch"]);
    assert_eq!(fixture.events(), ["NodeHasDiskPressure"]);
    // A platform label is restored; other labels are not ours.
    let node = fixture.server.edit(|node| {
        node["metadata"]["labels"]["kubernetes.io/os"] = json!("plan9");
        node["metadata"]["labels"]["example.org/zone"] = json!("c");
    });
    fixture.watch.store_if_newer(node);
    assert_eq!(fixture.turn(3), ["patch"]);
    let labels = fixture.watch.object().unwrap().metadata.labels.clone().unwrap();
    assert_eq!((labels["kubernetes.io/os"].as_str(), labels["example.org/zone"].as_str()), ("linux", "c"));
}

#[test]
fn registration_is_retried_until_the_server_accepts_it() {
    let mut fixture = Fixture::new(settings());
    fixture.server.0.lock().unwrap().failures = vec![NodeErrorKind::Other, NodeErrorKind::Other];
    assert_eq!(fixture.turn(0), ["create"]);
    // Rings do not shorten the wait.
    assert_eq!(fixture.turn(0), NOTHING);
    assert_eq!(fixture.turn(1), ["create"]);
    assert_eq!(fixture.turn(1), ["create"]);
    assert_eq!(fixture.turn(10), NOTHING);
}

/// The thread of the lease waits for the object, and does not notice the return.
#[test]
fn registration_is_retried_soon_while_the_server_is_away() {
    let mut fixture = Fixture::new(settings());
    fixture.server.0.lock().unwrap().failures = vec![NodeErrorKind::Other];
    assert_eq!(fixture.turn(0), ["create"]);
    fixture.reporter.server_is_away(fixture.start, 0.0);
    assert_eq!(fixture.turn(1), ["create"]);
}

#[test]
fn a_restart_does_not_show_a_ready_node_as_not_ready() {
    let mut first = Fixture::new(settings());
    first.turn(0);
    let mut fixture = Fixture::new(settings());
    let node = first.server.edit(|_| ());
    fixture.server.0.lock().unwrap().store(serde_json::to_value(&node).unwrap());
    fixture.watch.store_if_newer(node);
    let unknown = ["container runtime status check may not have completed yet".to_owned()];
    fixture.facts(|facts| {
        facts.settled = false;
        facts.health.runtime = unknown.to_vec();
    });
    assert_eq!(fixture.turn(0), NOTHING);
    assert_eq!(fixture.turn(4), NOTHING);
    fixture.facts(|facts| {
        facts.settled = true;
        facts.health = RuntimeHealth::default();
    });
    assert_eq!(fixture.turn(0), ["patch"]);
    assert!(fixture.events().is_empty());
    // A runtime that does not respond for this long is reported.
    let mut fixture = Fixture::new(settings());
    fixture.facts(|facts| {
        facts.settled = false;
        facts.health.runtime = unknown.to_vec();
    });
    assert_eq!(fixture.turn(4), NOTHING);
    assert_eq!(fixture.turn(1), ["create"]);
    assert_eq!(fixture.condition("Ready")["status"], "False");
}

#[test]
fn existing_node_is_reconciled() {
    for forbids_create in [false, true] {
        let mut first = Fixture::new(settings());
        first.turn(0);
        let mut fixture = Fixture::new(settings());
        {
            let mut server = fixture.server.0.lock().unwrap();
            let mut node = first.server.0.lock().unwrap().node.clone().unwrap();
            node["status"]["nodeInfo"]["bootID"] = json!("earlier");
            node["metadata"]["labels"]["kubernetes.io/hostname"] = json!("other");
            server.store(node);
            server.forbids_create = forbids_create;
        }
        // One patch for the labels and the status.
        assert_eq!(fixture.turn(0), ["create", "get", "patch"]);
        assert_eq!(fixture.events(), ["Rebooted"]);
        assert_eq!(fixture.turn(10), NOTHING);
        assert_eq!(
            fixture.server.0.lock().unwrap().node.as_ref().unwrap()["metadata"]["labels"]["kubernetes.io/hostname"],
            "node1"
        );
        // An object that the watch has received is not requested again.
        let mut third = Fixture::new(settings());
        let node = fixture.server.edit(|_| ());
        third.server.0.lock().unwrap().node = Some(serde_json::to_value(&node).unwrap());
        third.watch.replace(vec![node]);
        assert_eq!(third.turn(20), ["patch"]);
        assert_eq!(third.turn(10), NOTHING);
    }
}

#[test]
fn a_deleted_node_is_registered_again() {
    // Sent by the watch.
    let mut fixture = Fixture::new(settings());
    fixture.turn(0);
    assert_eq!((fixture.watch.uid().as_deref(), fixture.registrations()), (Some("uid1"), 1));
    fixture.turn(1);
    assert_eq!(fixture.registrations(), 0);
    fixture.server.0.lock().unwrap().node = None;
    fixture.watch.remove(Some("uid1"));
    assert_eq!(fixture.turn(1), ["create"]);
    assert_eq!((fixture.watch.uid().as_deref(), fixture.registrations()), (Some("uid2"), 1));
    // Detected by the response to a patch.
    fixture.server.0.lock().unwrap().node = None;
    fixture.facts(|facts| facts.pressures.pid = true);
    assert_eq!(fixture.turn(1), ["patch"]);
    assert_eq!(fixture.turn(0), ["create"]);
    assert_eq!((fixture.watch.uid().as_deref(), fixture.registrations()), (Some("uid3"), 1));
    // Not if another client registers nodes.
    let mut fixture = Fixture::new(Settings { register: false, ..settings() });
    assert_eq!(fixture.turn(0), NOTHING);
    let mut node =
        serde_json::to_value(compose::initial(&settings(), &facts(), None, timestamp(1)).0).unwrap();
    node["metadata"]["uid"] = json!("theirs");
    node["metadata"]["labels"]["kubernetes.io/hostname"] = json!("theirs");
    let node = fixture.server.0.lock().unwrap().store(node);
    fixture.watch.replace(vec![node]);
    assert_eq!((fixture.turn(1), fixture.registrations()), (vec!["patch".to_owned()], 1));
    let labels = fixture.watch.object().unwrap().metadata.labels.clone().unwrap();
    assert_eq!(labels["kubernetes.io/hostname"], "theirs");
    fixture.server.0.lock().unwrap().node = None;
    fixture.watch.remove(Some("theirs"));
    assert_eq!(fixture.turn(1), NOTHING);
}

#[test]
fn server_that_shows_a_node_but_refuses_writes_gets_no_requests_in_a_loop() {
    let mut fixture = Fixture::new(settings());
    fixture.turn(0);
    fixture.server.0.lock().unwrap().denies_status = true;
    fixture.facts(|facts| facts.pressures.disk = true);
    assert_eq!(fixture.turn(10), ["patch"]);
    assert_eq!(fixture.turn(0), ["create", "get", "patch"]);
    assert_eq!(fixture.turn(0), NOTHING);
    assert_eq!(fixture.turn(1), ["create", "get", "patch"]);
    assert_eq!(fixture.turn(0), NOTHING);
    fixture.server.0.lock().unwrap().denies_status = false;
    assert_eq!(fixture.turn(1), ["create", "get", "patch"]);
    assert_eq!(fixture.turn(10), NOTHING);
}

#[test]
fn failed_write_is_retried_from_the_servers_version() {
    let mut fixture = Fixture::new(settings());
    fixture.turn(0);
    fixture.facts(|facts| facts.pressures.memory = true);
    fixture.server.0.lock().unwrap().failures = vec![NodeErrorKind::Other, NodeErrorKind::Conflict];
    assert_eq!(fixture.turn(10), ["patch", "get", "drop", "get", "patch"]);
    fixture.server.0.lock().unwrap().failures = vec![NodeErrorKind::Other; 5];
    fixture.facts(|facts| facts.pressures.memory = false);
    fixture.events();
    assert_eq!(fixture.turn(10), ["patch", "get", "drop", "get", "drop", "get", "drop", "get"]);
    assert_eq!(fixture.turn(10), ["patch"]);
    // The status was computed twice and sent once.
    assert_eq!(fixture.events(), ["NodeHasSufficientMemory"]);
    fixture.server.0.lock().unwrap().failures = vec![NodeErrorKind::Stopping];
    fixture.facts(|facts| facts.pressures.memory = true);
    assert_eq!(fixture.turn(10), ["patch"]);
}

#[test]
fn field_that_the_server_drops_is_not_sent_again_and_again() {
    let mut fixture = Fixture::new(settings());
    fixture.server.0.lock().unwrap().drops = Some("declaredFeatures");
    assert_eq!(fixture.turn(0), ["create", "patch"]);
    assert_eq!(fixture.turn(10), NOTHING);
    fixture.facts(|facts| facts.pressures.disk = true);
    assert_eq!(fixture.turn(10), ["patch"]);
    assert_eq!(fixture.turn(10), NOTHING);
}

#[test]
fn pod_address_ranges_are_passed_to_the_runtime() {
    let mut fixture = Fixture::new(settings());
    fixture.turn(0);
    fixture.events();
    let cordon = |fixture: &Fixture, on: bool| {
        let node = fixture.server.edit(|node| {
            node["spec"]["unschedulable"] = json!(on);
            node["spec"]["podCIDRs"] = json!(["10.1.0.0/24", "fd00::/64"]);
        });
        fixture.watch.store_if_newer(node);
    };
    fixture.sent.lock().unwrap().cidr_fails = true;
    cordon(&fixture, true);
    assert_eq!(fixture.turn(1), NOTHING);
    assert_eq!(fixture.events(), ["NodeNotSchedulable"]);
    fixture.sent.lock().unwrap().cidr_fails = false;
    fixture.turn(10);
    cordon(&fixture, false);
    fixture.turn(10);
    assert_eq!(fixture.events(), ["NodeSchedulable"]);
    assert_eq!(fixture.sent.lock().unwrap().cidrs, ["10.1.0.0/24,fd00::/64", "10.1.0.0/24,fd00::/64"]);
}

#[test]
fn list_of_volumes_is_written_at_once_and_counts_when_it_is_stored() {
    let mut fixture = Fixture::new(settings());
    fixture.turn(0);
    fixture.turn(1);
    let list = |fixture: &Fixture, number, names: &[&str]| {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        fixture.facts(|facts| (facts.volumes_in_use, facts.volumes_number) = (Some(names), number));
    };
    let stored = |fixture: &Fixture| std::mem::take(&mut fixture.sent.lock().unwrap().stored);
    let v = || vec!["v".to_owned()];
    stored(&fixture);
    list(&fixture, 1, &["v"]);
    assert_eq!(fixture.turn(1), ["patch"]);
    assert_eq!(stored(&fixture), [(1, v())]);
    let patch = fixture.server.0.lock().unwrap().patches.pop().unwrap();
    assert!(patch.pointer("/metadata/resourceVersion").is_some(), "{patch}");
    // Nothing has changed: the object of the watch has the list.
    list(&fixture, 2, &["v"]);
    assert!(fixture.turn(1).is_empty());
    assert_eq!(stored(&fixture), [(2, v())]);
    // Another client has changed the object: the list is written to the newest one.
    fixture.server.edit(|node| node["status"]["volumesAttached"] = json!([{"name": "v", "devicePath": ""}]));
    list(&fixture, 3, &["v", "w"]);
    assert_eq!(fixture.turn(1), ["patch", "get", "patch"]);
    assert_eq!(stored(&fixture), [(3, vec!["v".to_owned(), "w".to_owned()])]);
    // The request may still arrive: no list counts before another request was answered.
    list(&fixture, 4, &["w"]);
    fixture.server.0.lock().unwrap().failures = vec![NodeErrorKind::Other; 20];
    fixture.turn(1);
    fixture.server.0.lock().unwrap().failures.clear();
    assert!(stored(&fixture).is_empty());
    list(&fixture, 5, &["v", "w"]);
    assert!(fixture.turn(1).contains(&"patch".to_owned()), "a heartbeat is enough");
    assert_eq!(stored(&fixture), [(5, vec!["v".to_owned(), "w".to_owned()])]);
}

/// The controller saw the list of an earlier agent until the next change.
#[test]
fn list_of_a_late_request_is_replaced() {
    let mut fixture = Fixture::new(settings());
    fixture.turn(0);
    fixture.turn(1);
    fixture.facts(|facts| (facts.volumes_in_use, facts.volumes_number) = (Some(vec!["v".to_owned()]), 1));
    assert_eq!(fixture.turn(1), ["patch"]);
    // The watch has not shown it yet.
    fixture.server.edit(|node| node["status"]["volumesInUse"] = json!(["old"]));
    fixture.facts(|facts| facts.pressures.memory = true);
    assert_eq!(fixture.turn(10), ["patch"]);
    fixture.sent.lock().unwrap().stored.clear();
    assert_eq!(fixture.turn(1), ["patch"]);
    assert_eq!(fixture.sent.lock().unwrap().stored, [(1, vec!["v".to_owned()])]);
    assert_eq!(fixture.turn(1), NOTHING);
}
