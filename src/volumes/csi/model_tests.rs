//! A model of a cluster: an API server, the controller that attaches and detaches volumes, an attacher,
//! and a node with a driver. The agent is the real one, with its directories. Their steps alternate at
//! random, also within each operation of the agent; requests are late, get lost or fail, the driver
//! fails, the agent is killed, and pods are removed by force. Two properties hold at each step: no
//! device is detached while it is mounted, and none is mounted that is not attached. The files of a pod
//! that runs have its group, although walks break off, and others take steps meanwhile. At the end, without
//! further faults, each pod that can run runs, and each volume that no pod wants is detached.
//!
//! The controller is that of upstream (Go: pkg/controller/volume/attachdetach/reconciler), without the
//! forced detaching from nodes that are not ready. After a detaching that failed it is at random the
//! controller of today, which shows the volume as attached when it was attached again, or an older one,
//! which shows it at once. The writer of the node's status does what `node::reporter` does. The node's
//! object may be deleted, or be replaced by another client, which does not know what is mounted.
//!
//! Each schedule draws how often each part takes a step: some parts are much slower than others.
//!
//! `MODEL_SECONDS=3600` runs for an hour; `MODEL_SEED=7` begins with another seed. A failure prints the
//! seed of its schedule.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::super::attachment::{Attachments, Controller, NodeVolumes};
use super::super::error::VolumeError;
use super::super::kind::{Form, VolumeLocation};
use super::super::selinux_labels::SelinuxLabels;
use super::super::waker::Waker;
use super::cluster::{Cluster, ClusterError, TokenText};
use super::driver::{
    Code, Driver, DriverCapabilities, DriverError, Expand, NodeInfo, Publish, Secrets, Stage, VolumeStats,
};
use super::fake::{self, DRIVER, KILLED};
use super::fs_group::GroupChange;
use super::mounter::Mounter;
use super::names;
use super::request::tests::wanted;
use super::request::{PodFacts, VolumeRequest};
use super::state::Csi;
use super::volume::mount;
use crate::model::ids::PodUid;
use crate::model::storage::{CsiDriver, SecretReference, VolumeAttachment};
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;

/// Schedules of a run without `MODEL_SECONDS`.
const SCHEDULES: u64 = 1500;
/// Picks of a step after which the weights are drawn again.
const PHASE: u64 = 80;
/// Random steps of a schedule.
const STEPS: u32 = 600;
/// Rounds without faults after which a schedule must have come to rest.
const ROUNDS: u32 = 150;
/// Rounds for which it must stay so.
const RESTING: u32 = 6;
const VOLUMES: [&str; 2] = ["h0", "h1"];
/// The file in each volume.
const FILE: &str = "f";
/// Pods that exist at the same time.
const PODS: usize = 3;

/// The node of the agent, and another one.
const OWN: usize = 0;
const OTHER: usize = 1;

type Names = BTreeSet<String>;

/// The node's object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Object {
    version: u64,
    in_use: Names,
    attached: Names,
}

/// A VolumeAttachment.
#[derive(Debug, Clone, Copy, Default)]
struct Attachment {
    is_attached: bool,
    is_deleted: bool,
}

/// What the controller does with a volume. One operation per volume at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Attaching(usize),
    /// The node's object no longer has the volume in `volumesAttached`.
    Withdrawn(usize),
    /// The node's object did not have it in `volumesInUse` then.
    Verified(usize),
    Detaching(usize),
}

/// A request of the agent.
#[derive(Debug, Clone)]
struct Request {
    number: u64,
    /// The list, and the version of the object that it replaces; `None`: it has no list, because the
    /// agent's object has the same.
    list: Option<(Names, u64)>,
    /// The object, or that it has another version.
    response: Option<Result<Object, ()>>,
    /// The agent waits for the response.
    is_awaited: bool,
}

/// What takes a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Agent,
    Control,
    Attach,
    ControllerPods,
    ControllerObject,
    Arrive,
    Report,
    Watch,
    AddPod,
    RemovePod,
    Node,
}

/// Each with its least weight.
const WEIGHTS: [(Step, u64); 11] = [
    (Step::Agent, 12),
    (Step::Control, 16),
    (Step::Attach, 6),
    (Step::ControllerPods, 8),
    (Step::ControllerObject, 8),
    (Step::Arrive, 12),
    (Step::Report, 24),
    (Step::Watch, 12),
    (Step::AddPod, 2),
    (Step::RemovePod, 2),
    (Step::Node, 4),
];

#[derive(Debug, Default)]
struct ClusterState {
    random: u64,
    has_faults: bool,
    /// A hook is at work: it does not begin again.
    is_busy: bool,
    steps: u64,
    trace: Vec<String>,
    broken: Option<String>,
    weights: Vec<(Step, u64)>,
    /// The node's object is replaced in this schedule.
    is_replaced: bool,
    /// The pods of this schedule want so many of the volumes.
    volumes: u64,
    /// One of so many pods is on the other node.
    others_in: u64,
    /// The controller needs so many steps to delete a VolumeAttachment.
    delete_in: u64,
    /// The attacher needs so many attempts to detach.
    detach_in: u64,

    /// The last version of the node's object.
    version: u64,
    object: Option<Object>,
    /// By volume and node.
    attachments: BTreeMap<(usize, usize), Attachment>,
    /// The pods that exist, with their volume and node.
    pods: BTreeMap<usize, (usize, usize)>,
    next_pod: usize,

    controller_pods: BTreeMap<usize, (usize, usize)>,
    controller_object: Object,
    /// By volume and node: whether it is to be in `volumesAttached`.
    actual: BTreeMap<(usize, usize), bool>,
    work: BTreeMap<usize, Work>,

    agent_pods: BTreeSet<usize>,
    agent_object: Option<Object>,
    /// The version of the last object, or of its removal, that the agent received.
    agent_version: u64,
    /// What the agent's watch has not delivered yet.
    events: VecDeque<(u64, Option<Object>)>,
    requests: Vec<Request>,
    /// The list of the next request.
    composed: Option<(u64, Names)>,
    /// A response has arrived, and its object is known; its list does not count yet.
    offered: Option<(u64, Names)>,
    is_open: bool,
    woken: BTreeSet<String>,

    /// Where the storage has a device.
    devices: BTreeSet<(usize, usize)>,
    staged: BTreeSet<usize>,
    /// Staged before the agent received that another client replaced the node's object by one that does
    /// not have them in use. The controller may detach them, which no agent can prevent.
    excused: BTreeSet<usize>,
    /// The version of that object.
    replaced: u64,
    /// The version of the object by which the agent decided last.
    decided: u64,
    published: BTreeMap<PathBuf, usize>,
    mounts: Vec<PathBuf>,
}

fn volume_of(handle: &str) -> usize {
    VOLUMES.iter().position(|volume| *volume == handle).unwrap()
}

fn name_of(volume: usize) -> String {
    names::unique_name(DRIVER, VOLUMES[volume])
}

fn uid_of(pod: usize) -> String {
    format!("u{pod}")
}

fn wants(pod: usize, volume: usize) -> VolumeRequest {
    let mut wanted = wanted(&uid_of(pod), VOLUMES[volume]);
    wanted.source.fs_type = Some("ext4".to_owned());
    wanted.fs_group = Some(rustix::process::getegid().as_raw());
    wanted
}

impl ClusterState {
    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.has_faults && self.below(count) == 0
    }

    fn note(&mut self, step: impl Into<String>) {
        self.steps += 1;
        self.trace.push(step.into());
    }

    fn check(&mut self, holds: bool, what: &str) {
        if !holds && self.broken.is_none() {
            self.broken = Some(what.to_owned());
        }
    }

    fn is_wanted(&self, volume: usize, node: usize) -> bool {
        self.controller_pods.values().any(|location| *location == (volume, node))
    }

    /// Draws how often each part takes a step.
    fn draw_weights(&mut self) {
        self.weights.clear();
        for (step, least) in WEIGHTS {
            let factor = match step {
                // Not in each schedule.
                Step::Node if !self.is_replaced => 0,
                _ => [1, 2, 4, 8][usize::try_from(self.below(4)).unwrap()],
            };
            self.weights.push((step, least * factor));
        }
        self.delete_in = 1 << self.below(6);
        self.detach_in = 1 << self.below(5);
    }

    /// What takes the next step.
    fn pick(&mut self, is_agent_busy: bool) -> Step {
        if self.below(PHASE) == 0 {
            self.draw_weights();
        }
        let is_free = |step: Step| !is_agent_busy || step != Step::Agent;
        let all: u64 = self.weights.iter().filter(|(step, _)| is_free(*step)).map(|(_, weight)| weight).sum();
        let mut rest = self.below(all);
        for (step, weight) in &self.weights {
            if !is_free(*step) {
                continue;
            }
            if rest < *weight {
                return *step;
            }
            rest -= weight;
        }
        Step::Watch
    }

    fn store(&mut self, object: Option<Object>) {
        self.version += 1;
        self.object = object.map(|object| Object { version: self.version, ..object });
        self.events.push_back((self.version, self.object.clone()));
    }

    /// The names in `volumesInUse`, without an object none.
    fn is_in_use(&self, volume: usize) -> bool {
        self.object.as_ref().is_some_and(|object| object.in_use.contains(&name_of(volume)))
    }

    /// The node's object is deleted, and perhaps another client makes a new one.
    fn replace_node(&mut self) {
        let is_awaited = |volume: &usize| self.is_in_use(*volume) && !self.staged.contains(volume);
        if !(0..VOLUMES.len()).any(|volume| is_awaited(&volume)) {
            // At another time it would not be noticed.
            return;
        }
        if self.below(2) == 0 {
            self.note("the node's object is deleted");
            self.store(None);
        } else {
            self.note("another client replaces the node's object");
            self.store(None);
            self.excused = self.staged.clone();
            self.store(Some(Object::default()));
            self.replaced = self.version;
        }
    }

    /// The controller writes `volumesAttached`, unless that fails.
    fn write_attached(&mut self) -> bool {
        if self.one_in(8) {
            return false;
        }
        let shown_name = |((volume, node), is_shown): (&(usize, usize), &bool)| {
            (*node == OWN && *is_shown).then(|| name_of(*volume))
        };
        let attached: Names = self.actual.iter().filter_map(shown_name).collect();
        // Without an object there is nothing to write.
        if let Some(object) = self.object.clone().filter(|object| object.attached != attached) {
            self.store(Some(Object { attached, ..object }));
        }
        true
    }

    /// One step of the controller for a volume.
    fn control(&mut self, volume: usize) {
        let Some(work) = self.work.get(&volume).copied() else { return self.begin_work(volume) };
        self.note(format!("controller {volume}: {work:?}"));
        let key = |node| (volume, node);
        match work {
            Work::Attaching(node) => match self.attachments.get(&key(node)) {
                Some(attachment) if attachment.is_attached && !attachment.is_deleted => {
                    self.actual.insert(key(node), true);
                    self.work.remove(&volume);
                    self.write_attached();
                }
                Some(attachment) if !attachment.is_deleted => {}
                _ => {
                    self.work.remove(&volume);
                }
            },
            Work::Withdrawn(node) => {
                // Without an object upstream detaches also what is mounted, which no agent can prevent.
                let is_in_use = node == OWN && (self.object.is_none() || self.is_in_use(volume));
                if is_in_use || self.one_in(10) {
                    self.give_up(volume, node);
                } else {
                    self.work.insert(volume, Work::Verified(node));
                }
            }
            Work::Verified(node) => {
                if self.has_faults && self.below(self.delete_in) > 0 {
                    return;
                }
                if let Some(attachment) = self.attachments.get_mut(&key(node)) {
                    attachment.is_deleted = true;
                }
                self.work.insert(volume, Work::Detaching(node));
            }
            Work::Detaching(node) => {
                if !self.attachments.contains_key(&key(node)) {
                    self.actual.remove(&key(node));
                    self.work.remove(&volume);
                } else if self.one_in(4) {
                    self.give_up(volume, node);
                }
            }
        }
    }

    /// A volume was not detached.
    fn give_up(&mut self, volume: usize, node: usize) {
        self.work.remove(&volume);
        if self.below(2) == 0 {
            self.actual.insert((volume, node), true);
            self.write_attached();
        }
    }

    fn begin_work(&mut self, volume: usize) {
        // What is gone is not attached any more.
        let gone = |node: &usize| !self.attachments.contains_key(&(volume, *node));
        for node in [OWN, OTHER].into_iter().filter(gone).collect::<Vec<_>>() {
            self.actual.remove(&(volume, node));
        }
        for node in [OWN, OTHER] {
            let is_mounted = node == OWN && self.controller_object.in_use.contains(&name_of(volume));
            if self.actual.contains_key(&(volume, node)) && !self.is_wanted(volume, node) && !is_mounted {
                self.note(format!("controller withdraws {volume} from {node}"));
                let before = self.actual.insert((volume, node), false);
                if self.write_attached() {
                    self.work.insert(volume, Work::Withdrawn(node));
                } else {
                    self.actual.insert((volume, node), before == Some(true));
                }
                return;
            }
        }
        let may_attach = |node: &usize| {
            self.is_wanted(volume, *node)
                && self.actual.get(&(volume, *node)) != Some(&true)
                && !self.attachments.contains_key(&(volume, OWN + OTHER - *node))
        };
        let nodes: Vec<usize> = [OWN, OTHER].into_iter().filter(may_attach).collect();
        if let Some(node) = nodes.first().copied() {
            let node = if nodes.len() > 1 && self.below(2) == 0 { OTHER } else { node };
            self.note(format!("controller attaches {volume} to {node}"));
            self.attachments.entry((volume, node)).or_default();
            self.work.insert(volume, Work::Attaching(node));
        }
        self.write_attached();
    }

    /// One step of the attacher.
    fn attach(&mut self, volume: usize, node: usize) {
        let Some(attachment) = self.attachments.get(&(volume, node)).copied() else { return };
        if attachment.is_deleted {
            if self.has_faults && self.below(self.detach_in) > 0 {
                return;
            }
            self.attachments.remove(&(volume, node));
            self.devices.remove(&(volume, node));
            self.note(format!("{volume} is detached from {node}"));
            let is_mounted = self.staged.contains(&volume) && !self.excused.contains(&volume);
            let is_free = node != OWN || !is_mounted;
            self.check(is_free, &format!("{volume} was detached while it was mounted"));
        } else if !attachment.is_attached {
            self.attachments.insert((volume, node), Attachment { is_attached: true, ..attachment });
            self.devices.insert((volume, node));
            self.note(format!("{volume} is attached to {node}"));
        }
    }

    /// A request arrives at the API server.
    fn arrive(&mut self) {
        let waiting: Vec<usize> =
            (0..self.requests.len()).filter(|index| self.requests[*index].response.is_none()).collect();
        if waiting.is_empty() {
            return;
        }
        let picked = usize::try_from(self.below(waiting.len() as u64)).unwrap();
        let index = waiting[picked];
        let request = self.requests[index].clone();
        self.note(format!("request {} arrives: {:?}", request.number, request.list));
        let response = match (self.object.clone(), request.list) {
            (Some(object), Some((list, base))) if object.version == base => {
                self.store(Some(Object { in_use: list, ..object }));
                Ok(())
            }
            // Heartbeats.
            (Some(object), None) => {
                self.store(Some(object));
                Ok(())
            }
            _ => Err(()),
        };
        let response = response.and_then(|()| self.object.clone().ok_or(()));
        if request.is_awaited {
            self.requests[index].response = Some(response);
        } else {
            self.requests.remove(index);
        }
    }

    /// The controller's watch.
    fn read_object(&mut self) {
        // It keeps the list of an object that is gone.
        if let Some(object) = self.object.clone() {
            self.controller_object = object;
        }
    }

    fn add_pod(&mut self) {
        if self.pods.len() < PODS {
            let volume = usize::try_from(self.below(self.volumes)).unwrap();
            let location = (volume, usize::from(self.below(self.others_in) == 0));
            self.pods.insert(self.next_pod, location);
            self.note(format!("pod {} wants {} on {}", self.next_pod, location.0, location.1));
            self.next_pod += 1;
        }
    }

    fn remove_pod(&mut self) {
        let pods: Vec<usize> = self.pods.keys().copied().collect();
        if !pods.is_empty() {
            let pod = pods[usize::try_from(self.below(pods.len() as u64)).unwrap()];
            self.pods.remove(&pod);
            self.note(format!("pod {pod} is removed"));
        }
    }
}

/// What outlives the agent.
#[derive(Clone, Default)]
struct Model(Arc<Mutex<ClusterState>>, Arc<Mutex<Option<Arc<Attachments>>>>);

impl Model {
    fn cluster(&self) -> MutexGuard<'_, ClusterState> {
        self.0.locked()
    }

    fn attachments(&self) -> Option<Arc<Attachments>> {
        self.1.locked().clone()
    }

    /// A point within an operation of the agent: others take steps, and the agent may be killed.
    fn within(&self) {
        let (steps, is_killed) = {
            let mut cluster = self.cluster();
            if cluster.is_busy {
                return;
            }
            cluster.is_busy = true;
            let steps = if !cluster.has_faults {
                0
            } else if cluster.below(20) == 0 {
                // The agent is slow here.
                8 + cluster.below(70)
            } else {
                cluster.below(3)
            };
            (steps, cluster.one_in(60))
        };
        for _ in 0..steps {
            self.step_of_others();
        }
        self.cluster().is_busy = false;
        if is_killed {
            self.cluster().note("the agent is killed");
            resume_unwind(Box::new(KILLED));
        }
    }

    /// A step of anything but the operations of the agent.
    fn step_of_others(&self) {
        let step = self.cluster().pick(true);
        self.take(step);
    }

    fn take(&self, step: Step) {
        let mut cluster = self.cluster();
        let volumes = cluster.volumes;
        let volume = usize::try_from(cluster.below(volumes)).unwrap();
        match step {
            Step::Agent => {}
            Step::Control => cluster.control(volume),
            Step::Attach => {
                let is_due = |attachment: &Attachment| attachment.is_deleted || !attachment.is_attached;
                let due: Vec<(usize, usize)> = cluster
                    .attachments
                    .iter()
                    .filter(|(_, attachment)| is_due(attachment))
                    .map(|(key, _)| *key)
                    .collect();
                if !due.is_empty() {
                    let picked = cluster.below(due.len() as u64);
                    let (volume, node) = due[usize::try_from(picked).unwrap()];
                    cluster.attach(volume, node);
                }
            }
            Step::ControllerPods => cluster.controller_pods = cluster.pods.clone(),
            Step::ControllerObject => cluster.read_object(),
            Step::Arrive => cluster.arrive(),
            Step::Report => {
                drop(cluster);
                self.report();
            }
            Step::Watch => {
                drop(cluster);
                self.watch();
            }
            Step::AddPod => cluster.add_pod(),
            Step::RemovePod => cluster.remove_pod(),
            Step::Node => cluster.replace_node(),
        }
    }

    /// The agent's watch delivers an event.
    fn watch(&self) {
        let mut cluster = self.cluster();
        while let Some((version, object)) = cluster.events.pop_front() {
            if version > cluster.agent_version {
                cluster.note(format!("the agent receives version {version}"));
                drop(cluster);
                return self.offer(version, object);
            }
        }
    }

    /// The agent has an object of its node; `None`: it is removed.
    fn offer(&self, version: u64, object: Option<Object>) {
        let is_same = {
            let mut cluster = self.cluster();
            if version <= cluster.agent_version {
                return;
            }
            cluster.agent_version = version;
            let before = std::mem::replace(&mut cluster.agent_object, object);
            match (&before, &cluster.agent_object) {
                (Some(before), Some(now)) => {
                    (&before.in_use, &before.attached) == (&now.in_use, &now.attached)
                }
                (before, now) => before.is_none() && now.is_none(),
            }
        };
        if !is_same && let Some(attachments) = self.attachments() {
            attachments.node_changed();
        }
    }

    /// A step of the thread that writes the status, as `node::reporter` does.
    fn report(&self) {
        let Some(attachments) = self.attachments() else { return };
        let mut cluster = self.cluster();
        if let Some((number, stored)) = cluster.offered.take() {
            cluster.note(format!("list {number} counts"));
            drop(cluster);
            return attachments.stored(number, &stored);
        }
        if let Some(index) = cluster.requests.iter().position(|request| request.is_awaited) {
            drop(cluster);
            return self.receive(index);
        }
        let Some((number, list)) = cluster.composed.clone() else {
            drop(cluster);
            let (number, list) = attachments.list();
            self.cluster().composed = Some((number, list.into_iter().collect()));
            return;
        };
        let Some(base) = cluster.agent_object.clone() else {
            return match cluster.object.clone() {
                // It is read.
                Some(object) => {
                    drop(cluster);
                    self.offer(object.version, Some(object));
                }
                None => self.register(cluster, number, list),
            };
        };
        let list = (list != base.in_use).then_some((list, base.version));
        if list.is_none() && !cluster.is_open {
            cluster.composed = None;
            drop(cluster);
            return attachments.stored(number, &base.in_use);
        }
        cluster.note(format!("request {number} is sent: {list:?}"));
        cluster.is_open = true;
        cluster.requests.push(Request { number, list, response: None, is_awaited: true });
    }

    /// The agent makes the node's object.
    fn register(&self, mut cluster: MutexGuard<'_, ClusterState>, number: u64, list: Names) {
        cluster.note(format!("the agent registers the node: {list:?}"));
        cluster.store(Some(Object { in_use: list.clone(), ..Object::default() }));
        cluster.composed = None;
        if cluster.one_in(6) {
            return cluster.note("a response is lost");
        }
        cluster.is_open = false;
        cluster.offered = Some((number, list));
        let object = cluster.object.clone();
        let version = cluster.version;
        drop(cluster);
        self.offer(version, object);
    }

    /// The agent waits for a response.
    fn receive(&self, index: usize) {
        let mut cluster = self.cluster();
        match cluster.requests[index].response.clone() {
            None if cluster.one_in(6) => {
                cluster.note("the agent gives up its request");
                cluster.requests[index].is_awaited = false;
                cluster.composed = None;
            }
            None if cluster.one_in(12) => drop(cluster.requests.remove(index)),
            None => {}
            Some(_) if cluster.one_in(6) => {
                cluster.note("a response is lost");
                cluster.requests.remove(index);
                cluster.composed = None;
            }
            Some(Err(())) => {
                cluster.requests.remove(index);
                // The same list may be sent again, for the newest object.
                if cluster.below(3) == 0 {
                    cluster.composed = None;
                }
                let (version, object) = (cluster.version, cluster.object.clone());
                drop(cluster);
                self.offer(version, object);
            }
            Some(Ok(object)) => {
                let number = cluster.requests.remove(index).number;
                (cluster.is_open, cluster.composed) = (false, None);
                cluster.offered = Some((number, object.in_use.clone()));
                drop(cluster);
                self.offer(object.version, Some(object));
            }
        }
    }

    /// A call of the driver: its work, or a fault.
    fn call(&self, what: &str, work: impl FnOnce(&mut ClusterState)) -> Result<(), DriverError> {
        self.within();
        let failed = |code| Err(DriverError { message: "rpc error".to_owned(), code });
        let result = {
            let mut cluster = self.cluster();
            cluster.note(what);
            if cluster.one_in(8) {
                failed(Code::Internal)
            } else if cluster.one_in(10) {
                failed(Code::Unavailable)
            } else if cluster.one_in(10) {
                work(&mut cluster);
                failed(Code::DeadlineExceeded)
            } else {
                work(&mut cluster);
                Ok(())
            }
        };
        self.within();
        result
    }
}

impl Driver for Model {
    fn info(&self, _: &StopToken) -> Result<NodeInfo, DriverError> {
        Ok(NodeInfo { id: "n".to_owned(), ..NodeInfo::default() })
    }
    fn capabilities(&self, _: &StopToken) -> Result<DriverCapabilities, DriverError> {
        self.within();
        Ok(DriverCapabilities { stage: true, ..DriverCapabilities::default() })
    }
    fn stage(&self, request: &Stage, _: &StopToken) -> Result<(), DriverError> {
        let (volume, path) = (volume_of(&request.volume), PathBuf::from(&request.staging_path));
        let work = move |cluster: &mut ClusterState| {
            if cluster.decided < cluster.replaced {
                cluster.excused.insert(volume);
            }
            let is_attached = cluster.devices.contains(&(volume, OWN)) || cluster.excused.contains(&volume);
            cluster.check(is_attached, &format!("{volume} was mounted and is not attached"));
            if cluster.staged.insert(volume) {
                cluster.mounts.push(path);
            }
        };
        self.call(&format!("stage {volume}"), work)
    }
    fn unstage(&self, volume: &str, staging_path: &str, _: &StopToken) -> Result<(), DriverError> {
        let (volume, path) = (volume_of(volume), PathBuf::from(staging_path));
        let work = move |cluster: &mut ClusterState| {
            let is_free = !cluster.published.values().any(|other| *other == volume);
            cluster.check(is_free, &format!("{volume} was unstaged while it was published"));
            cluster.staged.remove(&volume);
            cluster.excused.remove(&volume);
            cluster.mounts.retain(|mount| *mount != path);
        };
        self.call(&format!("unstage {volume}"), work)
    }
    fn publish(&self, request: &Publish, _: &StopToken) -> Result<(), DriverError> {
        let (volume, path) = (volume_of(&request.volume), PathBuf::from(&request.target_path));
        let work = move |cluster: &mut ClusterState| {
            let is_there = cluster.staged.contains(&volume) && cluster.devices.contains(&(volume, OWN));
            let is_there = is_there || cluster.excused.contains(&volume);
            cluster.check(is_there, &format!("{volume} was published and is not mounted and attached"));
            if cluster.published.insert(path.clone(), volume).is_none() {
                // The root has the group since an earlier pod.
                let _ = std::fs::create_dir(&path);
                std::fs::write(path.join(FILE), "").unwrap();
                for (path, mode) in [(path.clone(), 0o2770), (path.join(FILE), 0o600)] {
                    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
                }
                cluster.mounts.push(path);
            }
        };
        self.call(&format!("publish {volume}"), work)
    }
    fn unpublish(&self, volume: &str, target_path: &str, _: &StopToken) -> Result<(), DriverError> {
        let path = PathBuf::from(target_path);
        let work = move |cluster: &mut ClusterState| {
            cluster.published.remove(&path);
            cluster.mounts.retain(|mount| *mount != path);
            let _ = std::fs::remove_file(path.join(FILE));
            let _ = std::fs::remove_dir(&path);
        };
        self.call(&format!("unpublish {}", volume_of(volume)), work)
    }
    fn expand(&self, _: &Expand, _: &StopToken) -> Result<i64, DriverError> {
        Ok(0)
    }
    fn stats(&self, _: &str, _: &str, _: &str, _: &StopToken) -> Result<VolumeStats, DriverError> {
        Ok(VolumeStats::default())
    }
}

impl Mounter for Model {
    fn is_mount_point(&self, path: &Path) -> std::io::Result<bool> {
        self.within();
        Ok(self.cluster().mounts.iter().any(|mount| mount == path))
    }
    fn has_labels(&self, _: &Path) -> std::io::Result<bool> {
        Ok(true)
    }
    fn other_mount(&self, _: &Path) -> std::io::Result<Option<PathBuf>> {
        Ok(None)
    }
    fn unmount(&self, path: &Path) -> std::io::Result<()> {
        self.cluster().mounts.retain(|mount| mount != path);
        let _ = std::fs::remove_file(path.join(FILE));
        Ok(())
    }
    fn bind(&self, _: &Path, _: &Path) -> std::io::Result<()> {
        Ok(())
    }
}

impl Cluster for Model {
    fn csi_driver(&self, _: &str, _: &StopToken) -> Result<Option<CsiDriver>, ClusterError> {
        self.within();
        Ok(None)
    }
    fn attachment(&self, name: &str, _: &StopToken) -> Result<VolumeAttachment, ClusterError> {
        self.within();
        let volume = (0..VOLUMES.len())
            .find(|volume| names::attachment_name(VOLUMES[*volume], DRIVER, "n") == name)
            .unwrap();
        let attachment = self.cluster().attachments.get(&(volume, OWN)).copied();
        let attachment = attachment.ok_or_else(|| ClusterError("not found".to_owned()))?;
        let mut object = VolumeAttachment::default();
        object.status.attached = attachment.is_attached;
        object.metadata.deletion_timestamp = attachment.is_deleted.then(|| "2030-01-01T00:00:00Z".to_owned());
        self.within();
        Ok(object)
    }
    fn secret(&self, _: &SecretReference, _: &StopToken) -> Result<Secrets, ClusterError> {
        Ok(Secrets::default())
    }
    fn token(&self, _: &PodFacts, _: &str, _: Option<i64>, _: &StopToken) -> Result<TokenText, ClusterError> {
        Err(ClusterError(String::new()))
    }
}

/// What a pod's worker knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// The set-up is due.
    Due,
    /// It is due when the pod is woken.
    Waiting,
    /// The volume is published; the walk through its files goes on.
    Walking,
    Running,
}

struct Agent {
    model: Model,
    root: PathBuf,
    csi: Arc<Csi>,
    attachments: Arc<Attachments>,
    /// By pod, with its volume.
    workers: BTreeMap<usize, (usize, Progress)>,
    /// By pod.
    walks: BTreeMap<usize, GroupChange>,
}

impl Agent {
    fn start(model: &Model, root: &Path) -> Agent {
        let all = Arc::new(model.clone());
        let (read, woken) = (model.clone(), model.clone());
        let waker = Waker(Arc::new(move |pod: &PodUid| {
            woken.cluster().woken.insert(pod.as_str().to_owned());
        }));
        let attachments = Arc::new(Attachments::new(None, waker));
        // The start reads mounts. It is one step.
        let was_busy = std::mem::replace(&mut model.cluster().is_busy, true);
        let csi = fake::start(
            root,
            ("n", SelinuxLabels::for_tests(true)),
            all.clone(),
            all.clone(),
            all,
            Arc::clone(&attachments),
        );
        model.cluster().is_busy = was_busy;
        attachments.set_controller(Controller {
            shown: Box::new(move || {
                read.within();
                let object = {
                    let mut cluster = read.cluster();
                    if !cluster.is_busy {
                        cluster.decided = cluster.agent_version;
                    }
                    cluster.agent_object.clone()
                };
                // It may be old when it is used.
                read.within();
                let object = object?;
                Some(NodeVolumes { in_use: object.in_use, attached: object.attached })
            }),
            changed: Box::new(|| {}),
        });
        {
            let mut cluster = model.cluster();
            // Requests of the agent before may still arrive.
            cluster.requests.iter_mut().for_each(|request| request.is_awaited = false);
            cluster.requests.retain(|request| request.response.is_none());
            (cluster.agent_object, cluster.is_open, cluster.is_busy) = (None, true, false);
            (cluster.composed, cluster.offered, cluster.agent_version) = (None, None, 0);
            let current = (cluster.version, cluster.object.clone());
            cluster.events = VecDeque::from([current]);
            cluster.woken.clear();
        }
        *model.1.locked() = Some(Arc::clone(&attachments));
        let number = |location: &VolumeLocation| location.pod.as_str()[1..].parse().unwrap();
        let volume = |location: &VolumeLocation| volume_of(location.spec_name.trim_start_matches("pv-"));
        let locations = csi.users().locations(None);
        let workers =
            locations.iter().map(|location| (number(location), (volume(location), Progress::Due))).collect();
        let walks = BTreeMap::new();
        Agent { model: model.clone(), root: root.to_owned(), csi, attachments, workers, walks }
    }

    /// Runs an operation; the agent is started again if it was killed.
    fn run(&mut self, work: impl FnOnce(&mut Agent)) {
        let ended = catch_unwind(AssertUnwindSafe(|| work(self)));
        if let Err(panic) = ended {
            if panic.downcast_ref::<&str>() != Some(&KILLED) {
                resume_unwind(panic);
            }
            let (model, root) = (self.model.clone(), self.root.clone());
            *self = Agent::start(&model, &root);
        }
    }

    /// The pods of the API server.
    fn list_pods(&mut self) {
        let mut cluster = self.model.cluster();
        let own: BTreeMap<usize, usize> = cluster
            .pods
            .iter()
            .filter(|(_, location)| location.1 == OWN)
            .map(|(pod, location)| (*pod, location.0))
            .collect();
        cluster.agent_pods = own.keys().copied().collect();
        cluster.note(format!("the agent receives its pods: {own:?}"));
        drop(cluster);
        for (pod, volume) in own {
            self.workers.entry(pod).or_insert((volume, Progress::Due));
        }
    }

    /// One operation of a pod's worker.
    fn work(&mut self, pod: usize) {
        let Some((volume, progress)) = self.workers.get(&pod).copied() else { return };
        let stop = StopToken::never();
        let wanted = wants(pod, volume);
        if !self.model.cluster().agent_pods.contains(&pod) {
            self.model.cluster().note(format!("the agent removes {volume} from pod {pod}"));
            // The removal ends the walk.
            self.walks.remove(&pod);
            let location = VolumeLocation {
                pod: PodUid::from(uid_of(pod).as_str()),
                spec_name: wanted.spec_name,
                form: Form::Filesystem,
            };
            if self.csi.tear_down(&location, &stop).is_ok() {
                self.attachments.forget(&location.pod);
                self.workers.remove(&pod);
            }
            return;
        }
        let is_woken = self.model.cluster().woken.remove(&uid_of(pod));
        if progress == Progress::Running || (progress == Progress::Waiting && !is_woken) {
            return;
        }
        if let Some(walk) = self.walks.remove(&pod) {
            let breaks_off = self.model.cluster().one_in(3);
            let progress = if breaks_off {
                self.model.cluster().note(format!("the walk of pod {pod} breaks off"));
                Progress::Due
            } else {
                walk.apply(&self.csi.settings, &wanted).unwrap();
                self.runs(pod, volume)
            };
            self.workers.insert(pod, (volume, progress));
            return;
        }
        self.model.cluster().note(format!("the agent sets up {volume} for pod {pod}"));
        let progress = match mount(&self.csi, &wanted, &stop) {
            // Others take steps during the walk.
            Ok((_, Some(walk))) if self.model.cluster().has_faults => {
                self.walks.insert(pod, walk);
                Progress::Walking
            }
            Ok((_, walk)) => {
                walk.unwrap().apply(&self.csi.settings, &wanted).unwrap();
                self.runs(pod, volume)
            }
            Err(VolumeError::AwaitsAttachment(_)) => {
                self.check_wake(pod, volume);
                Progress::Waiting
            }
            Err(_) => Progress::Due,
        };
        self.workers.insert(pod, (volume, progress));
    }

    /// The set-up is complete.
    fn runs(&self, pod: usize, volume: usize) -> Progress {
        let target = self.csi.layout.of_pod(&wants(pod, volume).location()).unwrap().join("mount");
        let mode = std::fs::metadata(target.join(FILE)).map(|metadata| metadata.mode() & 0o777);
        let has_group = mode.is_ok_and(|mode| mode == 0o660);
        self.model.cluster().check(has_group, &format!("pod {pod} runs, and its files have not its group"));
        Progress::Running
    }

    /// A pod waits only for what has not happened yet.
    fn check_wake(&self, pod: usize, volume: usize) {
        self.model.cluster().is_busy = true;
        let uid = PodUid::from(uid_of(pod).as_str());
        let result = self.attachments.may_mount(&uid, &name_of(volume), Instant::now());
        let mut cluster = self.model.cluster();
        cluster.is_busy = false;
        let is_woken = cluster.woken.contains(&uid_of(pod));
        cluster.check(result.is_err() || is_woken, &format!("pod {pod} was not woken"));
    }

    fn sweep(&mut self) {
        // A failure is repeated.
        let _ = self.csi.release_unused(&StopToken::never());
    }

    fn step(&mut self) {
        let choice = self.model.cluster().below(8);
        match choice {
            0..5 => {
                let cluster = self.model.cluster();
                let is_due = |(pod, (_, progress)): (&usize, &(usize, Progress))| match progress {
                    _ if !cluster.agent_pods.contains(pod) => true,
                    Progress::Due | Progress::Walking => true,
                    Progress::Waiting => cluster.woken.contains(&uid_of(*pod)),
                    Progress::Running => false,
                };
                let due: Vec<usize> =
                    self.workers.iter().filter(|worker| is_due(*worker)).map(|(pod, _)| *pod).collect();
                drop(cluster);
                if !due.is_empty() {
                    let picked = self.model.cluster().below(due.len() as u64);
                    self.work(due[usize::try_from(picked).unwrap()]);
                }
            }
            5..7 => self.list_pods(),
            _ => self.sweep(),
        }
    }
}

/// All take steps without faults, until the schedule has come to rest. Returns what does not.
fn settle(agent: &mut Agent, model: &Model) -> Option<String> {
    model.cluster().has_faults = false;
    let mut resting = 0;
    for round in 0..ROUNDS {
        agent.list_pods();
        let workers: Vec<usize> = agent.workers.keys().copied().collect();
        workers.into_iter().for_each(|pod| agent.work(pod));
        agent.sweep();
        for _ in 0..4 {
            model.cluster().arrive();
            model.report();
        }
        // The watch may be slow.
        if round % 3 == 0 {
            while !model.cluster().events.is_empty() {
                model.watch();
            }
        }
        let mut cluster = model.cluster();
        cluster.controller_pods = cluster.pods.clone();
        cluster.read_object();
        for volume in 0..VOLUMES.len() {
            cluster.control(volume);
            cluster.attach(volume, OWN);
            cluster.attach(volume, OTHER);
        }
        resting = if unrest(&cluster).is_none() { resting + 1 } else { 0 };
        if resting == RESTING || cluster.broken.is_some() {
            return None;
        }
    }
    unrest(&model.cluster())
}

/// What waits without a reason, or is left.
fn unrest(cluster: &ClusterState) -> Option<String> {
    for volume in 0..VOLUMES.len() {
        let count = |node| cluster.pods.values().filter(|location| **location == (volume, node)).count();
        let (own, other) = (count(OWN), count(OTHER));
        let published = cluster.published.values().filter(|other| **other == volume).count();
        let is_here = cluster.devices.contains(&(volume, OWN));
        let is_there = cluster.devices.contains(&(volume, OTHER));
        if own > 0 && other > 0 {
            if is_here == is_there {
                return Some(format!("{volume} is not attached to one of two nodes"));
            }
        } else if is_there != (other > 0) || is_here != (own > 0) {
            return Some(format!("{volume} is not attached, or not detached"));
        }
        let expected = if is_here { own } else { 0 };
        // One that was detached under its pods stays published there.
        if published != expected && !cluster.excused.contains(&volume) {
            return Some(format!("{volume}: {published} pods run, and not {expected}"));
        }
        if cluster.is_in_use(volume) != (own > 0) {
            return Some(format!("{volume} is in use, or not, at the end"));
        }
    }
    None
}

fn directory() -> tempfile::TempDir {
    // In memory, where there is such a directory: the model writes many small files.
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Returns the number of steps, or what was broken.
fn schedule(seed: u64) -> Result<u64, String> {
    let model = Model::default();
    {
        let mut cluster = model.cluster();
        (cluster.random, cluster.has_faults) = (seed, true);
        cluster.store(Some(Object::default()));
        cluster.is_replaced = cluster.below(2) == 0;
        cluster.volumes = 1 + cluster.below(2);
        cluster.others_in = 2 + cluster.below(6);
        cluster.draw_weights();
    }
    let root = directory();
    let mut agent = Agent::start(&model, root.path());
    for _ in 0..STEPS {
        let step = model.cluster().pick(false);
        if step == Step::Agent {
            agent.run(Agent::step);
        } else {
            model.cluster().is_busy = true;
            model.take(step);
            model.cluster().is_busy = false;
        }
        if model.cluster().broken.is_some() {
            break;
        }
    }
    if model.cluster().broken.is_none() {
        let unrest = settle(&mut agent, &model);
        let mut cluster = model.cluster();
        cluster.broken = cluster.broken.take().or(unrest);
    }
    let cluster = model.cluster();
    match &cluster.broken {
        None => Ok(cluster.steps),
        Some(broken) => Err(format!("{broken}\n  {}", cluster.trace.join("\n  "))),
    }
}

#[test]
fn no_device_is_detached_while_mounted_or_mounted_while_detached() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let (first, limit) = (number("MODEL_SEED").unwrap_or(1), number("MODEL_SECONDS"));
    let begun = Instant::now();
    let (mut schedules, mut steps) = (0, 0);
    loop {
        let is_over = match limit {
            Some(seconds) => begun.elapsed() >= Duration::from_secs(seconds),
            None => schedules >= SCHEDULES,
        };
        if is_over {
            break;
        }
        let seed = first + schedules;
        match schedule(seed) {
            Ok(count) => steps += count,
            Err(broken) => panic!("MODEL_SEED={seed}: {broken}"),
        }
        schedules += 1;
    }
    println!("volume model: {schedules} schedules, {steps} steps from seed {first} passed");
}
