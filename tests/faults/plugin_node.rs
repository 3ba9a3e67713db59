//! A node of a cluster with plugins, and a pod that needs all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::fake_api::FakeApi;
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::fake_plugins::{CLAIM_DRIVER, DEVICES, DRIVER, FakePlugins, RESOURCE, VARIABLE};
use crate::support::node::{FOREVER, NODE, busybox, is_ready, phase, pod, simple};
use crate::support::process_usage::mounts_below;
use crate::support::wait::{pause, wait_until};

/// The pod that needs the plugins.
pub(crate) const WEB: &str = "web";
/// The pod next to it, which has a device.
const CALM: &str = "calm";
/// A pod that has the devices after [`WEB`].
const LATE: &str = "late";
/// The handle of the persistent volume.
const VOLUME: &str = "disk-1";
const CLAIM: &str = "/api/v1/namespaces/default/persistentvolumeclaims/data";
const PERSISTENT: &str = "/api/v1/persistentvolumes/disk";
const RESOURCE_CLAIM: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/gadget";
/// The size that the volume grows to.
const SIZE: (&str, i64) = ("2Gi", 2 << 30);
/// A pod whose device plugin fails is rejected for good, and its controller makes another one.
const MOST_PODS: usize = 4;

/// When a method is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// While the plugin registers.
    Registration,
    /// While a pod starts.
    Start,
    /// When a volume grows.
    Growth,
    /// When volumes are measured.
    Measurement,
    /// While a pod stops.
    End,
}

/// A method at a stage.
pub(crate) type Case = (&'static str, Stage);

/// Every method of the plugin interfaces that the agent calls.
pub(crate) const CASES: &[Case] = &[
    ("GetInfo", Stage::Registration),
    ("NotifyRegistrationStatus", Stage::Registration),
    ("NodeGetInfo", Stage::Registration),
    ("NodeGetCapabilities", Stage::Start),
    ("NodeStageVolume", Stage::Start),
    ("NodePublishVolume", Stage::Start),
    ("NodeExpandVolume", Stage::Growth),
    ("NodeGetVolumeStats", Stage::Measurement),
    ("NodeUnpublishVolume", Stage::End),
    ("NodeUnstageVolume", Stage::End),
    ("GetDevicePluginOptions", Stage::Registration),
    ("ListAndWatch", Stage::Registration),
    ("GetPreferredAllocation", Stage::Start),
    ("Allocate", Stage::Start),
    ("PreStartContainer", Stage::Start),
    ("GetInfo of DRA", Stage::Registration),
    ("NotifyRegistrationStatus of DRA", Stage::Registration),
    ("NodeWatchResources", Stage::Registration),
    ("NodePrepareResources", Stage::Start),
    ("NodeUnprepareResources", Stage::End),
];

/// The methods of device plugins.
const OF_DEVICES: [&str; 5] =
    ["GetDevicePluginOptions", "ListAndWatch", "GetPreferredAllocation", "Allocate", "PreStartContainer"];

/// A failure of these rejects the pod for good.
const REJECTING: [&str; 2] = ["GetPreferredAllocation", "Allocate"];

/// So does the end of a plugin after its list of devices and before the admission of the pod. A pod that was
/// admitted before waits for the plugin. Which text the pod has depends on whether the agent has seen the end
/// of the list, or only finds in the next call that the plugin does not accept connections. A call that
/// arrives while the server of the plugin ends is canceled by the library or, if that has passed it on
/// already, refused as one too many.
const LISTED_AND_ENDED: (&str, [&str; 4]) = (
    "ListAndWatch",
    [
        "no healthy devices present",
        "rpc error: code = Unavailable",
        "rpc error: code = Canceled",
        "rpc error: code = ResourceExhausted desc = too many calls at once",
    ],
);

/// The node with its plugins.
pub(crate) struct PluginNode {
    pub node: FakeNode,
    pub plugins: FakePlugins,
    /// Pods with the name [`WEB`] so far.
    webs: usize,
    /// The running containers of [`CALM`].
    calm: BTreeMap<String, Vec<String>>,
}

impl PluginNode {
    /// Brings the agent to the point where it is about to call the method; `fault` is activated just
    /// before.
    pub(crate) fn approach<T>(stage: Stage, fault: impl FnOnce(&FakePlugins) -> T) -> (PluginNode, T) {
        let config = json!({"syncFrequency": "2s", "volumeStatsAggPeriod": "2s"});
        let node = FakeNode::prepare(config).joined(create_volume_objects);
        let plugins = FakePlugins::new(&node.root());
        let mut this = PluginNode { node, plugins, webs: 0, calm: BTreeMap::new() };
        if stage == Stage::Registration {
            let active = fault(&this.plugins);
            this.plugins.start();
            return (this, active);
        }
        this.plugins.start();
        this.wait_registered();
        this.start_with_devices(CALM, 1);
        this.calm = this.node.running(CALM);
        if stage != Stage::Start {
            this.bind_web();
            this.settle("");
        }
        let active = fault(&this.plugins);
        match stage {
            Stage::Registration | Stage::Measurement => {}
            Stage::Start => this.bind_web(),
            Stage::Growth => this.put_volume(SIZE.0),
            Stage::End => this.node.api().delete_pod(&FakeNode::pod_path(WEB)),
        }
        (this, active)
    }

    /// Starts a pod that needs only devices.
    fn start_with_devices(&self, name: &str, count: usize) {
        let mut main = busybox("main", FOREVER);
        main["resources"] = json!({"limits": {RESOURCE: count.to_string()}});
        let mut manifest = pod(name, json!([main]));
        manifest["spec"]["automountServiceAccountToken"] = json!(false);
        self.node.bind(&manifest);
        self.node.wait_ready(name);
    }

    fn put_volume(&self, size: &str) {
        put_volume(self.node.api(), size);
    }

    fn wait_registered(&self) {
        wait_registered(&self.node);
    }

    /// The claim of the newest pod.
    fn claim_uid(&self) -> String {
        format!("22222222-0000-4000-8000-{:012}", self.webs)
    }

    /// The next pod with a volume of a claim and one of its own, two devices and a resource claim.
    pub(crate) fn bind_web(&mut self) {
        self.webs += 1;
        let uid = format!("11111111-0000-4000-8000-{:012}", self.webs);
        self.node.api().put(
            RESOURCE_CLAIM,
            json!({
                "metadata": {"uid": self.claim_uid()},
                "spec": {"devices": {}},
                "status": {
                    "allocation": {"devices": {"results": [
                        {"driver": CLAIM_DRIVER, "pool": "pool", "device": "gadget", "request": "r"},
                    ]}},
                    "reservedFor": [{"resource": "pods", "name": WEB, "uid": uid}],
                },
            }),
        );
        let mut main = busybox("main", FOREVER);
        main["resources"] = json!({"limits": {RESOURCE: "2"}, "claims": [{"name": "gadget"}]});
        main["volumeMounts"] =
            json!([{"name": "data", "mountPath": "/data"}, {"name": "own", "mountPath": "/own"}]);
        let mut web = pod(WEB, json!([main]));
        web["metadata"]["uid"] = json!(uid);
        web["spec"]["automountServiceAccountToken"] = json!(false);
        web["spec"]["resourceClaims"] = json!([{"name": "gadget", "resourceClaimName": "gadget"}]);
        web["spec"]["volumes"] = json!([
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "own", "csi": {"driver": DRIVER, "volumeAttributes": {"a": "b"}}},
        ]);
        self.node.bind(&web);
    }

    /// Waits until the pod runs with all that it needs. If the plugin's fault rejects pods, a rejected
    /// one is replaced.
    pub(crate) fn settle(&mut self, method: &str) {
        let begun = std::time::Instant::now();
        loop {
            self.assert_sound();
            let found = self.node.shown(WEB);
            match &found {
                Some(pod) if is_ready(pod) => break,
                Some(pod) if phase(pod) == "Failed" => {
                    let text = json!(pod.status).to_string();
                    let ended = method == LISTED_AND_ENDED.0
                        && LISTED_AND_ENDED.1.iter().any(|reason| text.contains(reason));
                    let is_expected = REJECTING.contains(&method) || ended;
                    assert!(is_expected && self.webs < MOST_PODS, "rejected: {text}");
                    self.node.api().delete_pod(&FakeNode::pod_path(WEB));
                    wait_until("the rejected pod to be gone", LONG, || self.node.shown(WEB).is_none());
                    // Else the next one can be rejected for the same reason.
                    self.wait_registered();
                    self.bind_web();
                }
                _ => {}
            }
            assert!(
                begun.elapsed() < LONG,
                "the pod does not run: {}; own: {}",
                json!(found.map(|pod| pod.status)),
                json!(self.node.pod(WEB).map(|pod| pod.status)),
            );
            pause(Duration::from_millis(100));
        }
        let published = self.plugins.published();
        assert!(published.len() == 2 && published.contains(VOLUME), "it runs with {published:?}");
        assert!(self.plugins.is_prepared(&self.claim_uid()), "it runs without its claim");
        assert_eq!(self.devices_of(WEB).len(), 2, "it runs without its devices");
        let mounts = mounts_below(&self.node.root());
        let of_driver = mounts.iter().filter(|path| path.to_string_lossy().contains("csi"));
        assert_eq!(of_driver.count(), 3, "{mounts:?}");
    }

    /// The devices of a pod's running containers.
    fn devices_of(&self, name: &str) -> Vec<String> {
        let running = self.node.containers(name).into_iter().filter(|container| container.is_running());
        let variables = running.flat_map(|container| container.config.envs);
        let texts = variables.filter(|variable| variable.key == VARIABLE);
        let texts = texts.map(|variable| String::from_utf8_lossy(&variable.value).into_owned());
        texts.flat_map(|text| text.split(',').map(str::to_owned).collect::<Vec<_>>()).collect()
    }

    /// What holds at any time.
    pub(crate) fn assert_sound(&self) {
        self.node.assert_no_duplicates();
        let violations = self.plugins.violations();
        assert!(violations.is_empty(), "{violations:#?}");
        let mut devices = self.devices_of(WEB);
        devices.extend(self.devices_of(CALM));
        devices.extend(self.devices_of(LATE));
        let different: BTreeSet<&String> = devices.iter().collect();
        assert_eq!(different.len(), devices.len(), "a device is in use twice: {devices:?}");
        let mounts = mounts_below(&self.node.root());
        let different: BTreeSet<_> = mounts.iter().collect();
        assert_eq!(different.len(), mounts.len(), "mounted twice: {mounts:?}");
    }

    /// A pod without plugins starts meanwhile.
    pub(crate) fn start_other(&self) {
        self.node.apply(&simple("other"));
        self.node.wait_ready("other");
    }

    /// The rest of the pod's life after the fault: it gets to run, grows, and ends.
    pub(crate) fn complete(mut self, (method, stage): Case) {
        if stage == Stage::Registration {
            self.wait_registered();
            self.bind_web();
        }
        if stage != Stage::End {
            self.settle(method);
        }
        if stage == Stage::Growth {
            wait_until("the claim to have the new size", LONG, || {
                self.assert_sound();
                let claim = self.node.api().object(CLAIM).unwrap_or_default();
                claim["status"]["capacity"]["storage"] == SIZE.0
            });
            assert_eq!(self.plugins.size(VOLUME), Some(SIZE.1));
        }
        wait_until(&format!("{method} to succeed"), LONG, || {
            self.assert_sound();
            self.plugins.count(method).responses > 0
        });
        if stage != Stage::End {
            self.node.api().delete_pod(&FakeNode::pod_path(WEB));
        }
        wait_until("the end of the pod", LONG, || {
            self.assert_sound();
            self.node.shown(WEB).is_none() && self.node.running(WEB).is_empty()
        });
        assert_eq!(self.node.running(CALM), self.calm, "the pod next door was disturbed");
        if OF_DEVICES.contains(&method) {
            // A plugin that has died has no healthy devices until it has registered again, and a pod
            // that comes before that is rejected.
            self.wait_registered();
            // All devices but that of the pod next door.
            self.start_with_devices(LATE, DEVICES - 1);
            self.assert_sound();
        }
        self.finish();
    }

    /// Nothing is left of the pod: not with the plugins, not in directories, not in state files.
    fn finish(self) {
        wait_until("the plugins to have nothing left", LONG, || {
            self.assert_sound();
            self.plugins.left().is_empty()
        });
        let root = self.node.root();
        let staged = root.join("plugins/kubernetes.io/csi").join(DRIVER);
        wait_until("no directory of a staged volume", LONG, || {
            fs::read_dir(&staged).map_or(true, |mut entries| entries.next().is_none())
        });
        let prepared = || fs::read_to_string(root.join("dra_manager_state")).unwrap_or_default();
        wait_until("no claim in the state file", LONG, || !prepared().contains("ClaimUID"));
        let unknown: Vec<_> = self
            .plugins
            .methods()
            .into_iter()
            .filter(|method| CASES.iter().all(|(known, _)| known != method))
            .collect();
        assert!(unknown.is_empty(), "not in the fault matrix of plugins: {unknown:?}");
        let PluginNode { node, plugins, .. } = self;
        node.finish();
        let violations = plugins.violations();
        assert!(violations.is_empty(), "{violations:#?}");
    }
}

/// Waits until the API server shows what all plugins have.
pub(crate) fn wait_registered(node: &FakeNode) {
    let api = node.api();
    wait_until("the devices and the CSI driver", LONG, || {
        let object = api.object(&format!("/api/v1/nodes/{NODE}")).unwrap_or_default();
        let drivers = api.object(&format!("/apis/storage.k8s.io/v1/csinodes/{NODE}")).unwrap_or_default();
        object["status"]["allocatable"][RESOURCE] == json!(DEVICES.to_string())
            && drivers["spec"]["drivers"][0]["name"] == DRIVER
    });
    // The objects may be those of an agent that was killed, and a pod whose resource is not known
    // yet starts without it.
    wait_until("the devices of this agent", LONG, || {
        let output = node.command(&["devices", "-o", "json"]);
        let reply: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let healthy = reply["devices"].as_array().into_iter().flatten();
        healthy.filter(|device| device["resource"] == RESOURCE && device["health"] == "Healthy").count()
            == DEVICES
    });
}

fn put_volume(api: &FakeApi, size: &str) {
    let claim = api.object(CLAIM).unwrap_or_default();
    api.put(
        PERSISTENT,
        json!({
            "spec": {
                "capacity": {"storage": size},
                "accessModes": ["ReadWriteOnce"],
                "volumeMode": "Filesystem",
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": "default", "name": "data", "uid": claim["metadata"]["uid"]},
                "csi": {"driver": DRIVER, "volumeHandle": VOLUME, "volumeAttributes": {"a": "b"}},
            },
            "status": {"phase": "Bound"},
        }),
    );
}

/// The objects of the volume.
pub(crate) fn create_volume_objects(api: &FakeApi) {
    let spec: Value = json!({"attachRequired": false, "podInfoOnMount": true, "fsGroupPolicy": "None",
        "volumeLifecycleModes": ["Persistent", "Ephemeral"]});
    api.put(&format!("/apis/storage.k8s.io/v1/csidrivers/{DRIVER}"), json!({"spec": spec}));
    api.put(
        CLAIM,
        json!({
            "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": "disk",
                "resources": {"requests": {"storage": "1Gi"}}},
            "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}},
        }),
    );
    put_volume(api, "1Gi");
}

/// A claim `far` whose volume has to be attached, which no controller does.
pub(crate) fn put_attachable_volume(api: &FakeApi) {
    const FAR: &str = "far.csi.test";
    let spec: Value = json!({"attachRequired": true, "volumeLifecycleModes": ["Persistent"]});
    api.put(&format!("/apis/storage.k8s.io/v1/csidrivers/{FAR}"), json!({"spec": spec}));
    let claim = api.put(
        "/api/v1/namespaces/default/persistentvolumeclaims/far",
        json!({
            "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": "far",
                "resources": {"requests": {"storage": "1Gi"}}},
            "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}},
        }),
    );
    api.put(
        "/api/v1/persistentvolumes/far",
        json!({
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteOnce"],
                "volumeMode": "Filesystem",
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": "default", "name": "far", "uid": claim["metadata"]["uid"]},
                "csi": {"driver": FAR, "volumeHandle": "far-1"},
            },
            "status": {"phase": "Bound"},
        }),
    );
}
