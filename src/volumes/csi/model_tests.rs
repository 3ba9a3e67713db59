//! A model of a cluster: an API server, the controller that attaches and detaches volumes, an attacher,
//! and a node with a driver. The agent is the real one, with its directories. Their steps alternate at
//! random, also within each operation of the agent; requests are late, get lost or fail, the driver
//! fails, the agent is killed, and pods are removed by force. Two properties hold at each step: no
//! device is detached while it is mounted, and none is mounted that is not attached. At the end, without
//! further faults, each pod that can run runs, and each volume that no pod wants is detached.
//!
//! The controller is that of upstream (Go: pkg/controller/volume/attachdetach/reconciler), without the
//! forced detaching from nodes that are not ready. The writer of the node's status does what
//! `node::reporter` does.
//!
//! `MODEL_SECONDS=3600` runs for an hour; `MODEL_SEED=7` begins with another seed. A failure prints the
//! seed of its schedule.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::super::attachment::{Attachments, Controller, Shown};
use super::super::error::VolumeError;
use super::super::kind::{Form, Place, VolumeKeeper, VolumeKind};
use super::cluster::{Cluster, ClusterError, TokenText};
use super::driver::{
    Abilities, Code, Driver, DriverError, DriverNode, Expand, Publish, Secrets, Stage, VolumeStats,
};
use super::fake::{DRIVER, KILLED};
use super::mounter::Mounter;
use super::names;
use super::registry::Registry;
use super::request::tests::wanted;
use super::request::{PodFacts, Wanted};
use super::volume::{Csi, CsiSettings};
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::model::storage::{CsiDriver, SecretReference, VolumeAttachment};
use crate::util::stop::StopToken;

/// Schedules of a run without `MODEL_SECONDS`.
const SCHEDULES: u64 = 1500;
/// Random steps of a schedule.
const STEPS: u32 = 70;
/// Rounds without faults after which a schedule must have come to rest.
const ROUNDS: u32 = 150;
const VOLUMES: [&str; 2] = ["h0", "h1"];
const PODS: usize = 6;

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

/// A request of the agent with a list.
#[derive(Debug, Clone)]
struct Request {
    number: u64,
    list: Names,
    base: u64,
    /// The object, or that it has another version.
    response: Option<Result<Object, ()>>,
    /// The agent waits for the response.
    is_awaited: bool,
}

#[derive(Debug, Default)]
struct World {
    random: u64,
    has_faults: bool,
    /// A hook is at work: it does not begin again.
    is_busy: bool,
    steps: u64,
    trace: Vec<String>,
    broken: Option<String>,

    object: Object,
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
    requests: Vec<Request>,
    is_open: bool,
    woken: BTreeSet<String>,

    /// Where the storage has a device.
    devices: BTreeSet<(usize, usize)>,
    staged: BTreeSet<usize>,
    published: BTreeMap<PathBuf, usize>,
    mounts: Vec<PathBuf>,
}

fn volume_of(handle: &str) -> usize {
    VOLUMES.iter().position(|one| *one == handle).unwrap()
}

fn name_of(volume: usize) -> String {
    names::unique_name(DRIVER, VOLUMES[volume])
}

fn uid_of(pod: usize) -> String {
    format!("u{pod}")
}

fn wants(pod: usize, volume: usize) -> Wanted {
    wanted(&uid_of(pod), VOLUMES[volume])
}

impl World {
    /// A number below `limit`.
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
        self.controller_pods.values().any(|place| *place == (volume, node))
    }

    fn store(&mut self, change: impl FnOnce(&mut Object)) {
        change(&mut self.object);
        self.object.version += 1;
    }

    /// The controller writes `volumesAttached`, unless that fails.
    fn write_attached(&mut self) -> bool {
        if self.one_in(8) {
            return false;
        }
        let of = |((volume, node), is_shown): (&(usize, usize), &bool)| {
            (*node == OWN && *is_shown).then(|| name_of(*volume))
        };
        let attached: Names = self.actual.iter().filter_map(of).collect();
        if attached != self.object.attached {
            self.store(|object| object.attached = attached);
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
                Some(found) if found.is_attached && !found.is_deleted => {
                    self.actual.insert(key(node), true);
                    self.work.remove(&volume);
                    self.write_attached();
                }
                Some(found) if !found.is_deleted => {}
                _ => {
                    self.work.remove(&volume);
                }
            },
            Work::Withdrawn(node) => {
                let is_in_use = node == OWN && self.object.in_use.contains(&name_of(volume));
                if is_in_use || self.one_in(10) {
                    self.actual.insert(key(node), true);
                    self.work.remove(&volume);
                    self.write_attached();
                } else {
                    self.work.insert(volume, Work::Verified(node));
                }
            }
            Work::Verified(node) => {
                if let Some(found) = self.attachments.get_mut(&key(node)) {
                    found.is_deleted = true;
                }
                self.work.insert(volume, Work::Detaching(node));
            }
            Work::Detaching(node) => {
                if !self.attachments.contains_key(&key(node)) {
                    self.actual.remove(&key(node));
                    self.work.remove(&volume);
                } else if self.one_in(4) {
                    // It gives up, and shows the volume as attached again.
                    self.actual.insert(key(node), true);
                    self.work.remove(&volume);
                    self.write_attached();
                }
            }
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
                self.actual.insert((volume, node), false);
                if self.write_attached() {
                    self.work.insert(volume, Work::Withdrawn(node));
                } else {
                    self.actual.insert((volume, node), true);
                }
                return;
            }
        }
        let is_free = [OWN, OTHER].iter().all(|node| !self.attachments.contains_key(&(volume, *node)));
        let nodes: Vec<usize> =
            [OWN, OTHER].into_iter().filter(|node| self.is_wanted(volume, *node)).collect();
        if let (true, Some(node)) = (is_free, nodes.first().copied()) {
            let node = if nodes.len() > 1 && self.below(2) == 0 { OTHER } else { node };
            self.note(format!("controller attaches {volume} to {node}"));
            self.attachments.insert((volume, node), Attachment::default());
            self.work.insert(volume, Work::Attaching(node));
        }
        self.write_attached();
    }

    /// One step of the attacher.
    fn attach(&mut self, volume: usize, node: usize) {
        let Some(found) = self.attachments.get_mut(&(volume, node)) else { return };
        if found.is_deleted {
            self.attachments.remove(&(volume, node));
            self.devices.remove(&(volume, node));
            self.note(format!("{volume} is detached from {node}"));
            let is_free = node != OWN || !self.staged.contains(&volume);
            self.check(is_free, &format!("{volume} was detached while it was mounted"));
        } else if !found.is_attached {
            found.is_attached = true;
            self.devices.insert((volume, node));
            self.note(format!("{volume} is attached to {node}"));
        }
    }

    /// A request arrives at the API server.
    fn arrive(&mut self) {
        let waiting: Vec<usize> =
            (0..self.requests.len()).filter(|at| self.requests[*at].response.is_none()).collect();
        if waiting.is_empty() {
            return;
        }
        let picked = usize::try_from(self.below(waiting.len() as u64)).unwrap();
        let at = waiting[picked];
        let request = self.requests[at].clone();
        self.note(format!("list {} arrives: {:?}", request.number, request.list));
        let response = if request.base == self.object.version {
            self.store(|object| object.in_use = request.list);
            Ok(self.object.clone())
        } else {
            Err(())
        };
        if request.is_awaited {
            self.requests[at].response = Some(response);
        } else {
            self.requests.remove(at);
        }
    }

    fn add_pod(&mut self) {
        if self.next_pod < PODS {
            let place = (usize::try_from(self.below(2)).unwrap(), usize::from(self.below(3) == 0));
            self.pods.insert(self.next_pod, place);
            self.note(format!("pod {} wants {} on {}", self.next_pod, place.0, place.1));
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
struct Model(Arc<Mutex<World>>, Arc<Mutex<Option<Arc<Attachments>>>>);

impl Model {
    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attachments(&self) -> Option<Arc<Attachments>> {
        self.1.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A point within an operation of the agent: others take steps, and the agent may be killed.
    fn within(&self) {
        let (steps, is_killed) = {
            let mut world = self.world();
            if world.is_busy {
                return;
            }
            world.is_busy = true;
            let steps = if world.has_faults { world.below(5) } else { 0 };
            (steps, world.one_in(60))
        };
        for _ in 0..steps {
            self.step_of_others();
        }
        self.world().is_busy = false;
        if is_killed {
            self.world().note("the agent is killed");
            resume_unwind(Box::new(KILLED));
        }
    }

    /// A step of anything but the operations of the agent.
    fn step_of_others(&self) {
        let choice = self.world().below(16);
        let (volume, node) = {
            let mut world = self.world();
            (usize::try_from(world.below(2)).unwrap(), usize::try_from(world.below(2)).unwrap())
        };
        match choice {
            0..4 => self.world().control(volume),
            4..6 => self.world().attach(volume, node),
            6 => {
                let mut world = self.world();
                world.controller_pods = world.pods.clone();
            }
            7 => {
                let mut world = self.world();
                world.controller_object = world.object.clone();
            }
            8..10 => self.world().arrive(),
            10..13 => self.report(),
            13 => self.watch(),
            14 => self.world().remove_pod(),
            _ => self.world().add_pod(),
        }
    }

    /// The agent receives its node's object.
    fn watch(&self) {
        {
            let mut world = self.world();
            world.agent_object = Some(world.object.clone());
            world.note("the agent receives the object");
        }
        if let Some(attachments) = self.attachments() {
            attachments.node_changed();
        }
    }

    /// A step of the thread that writes the status, as `node::reporter` does.
    fn report(&self) {
        let Some(attachments) = self.attachments() else { return };
        let mut world = self.world();
        let Some(at) = world.requests.iter().position(|request| request.is_awaited) else {
            let Some(base) = world.agent_object.clone() else { return };
            drop(world);
            let (number, list) = attachments.list();
            let list: Names = list.into_iter().collect();
            let mut world = self.world();
            if list == base.in_use && !world.is_open {
                drop(world);
                return attachments.stored(number, &base.in_use);
            }
            world.note(format!("list {number} is sent: {list:?}"));
            world.is_open = true;
            let request = Request { number, list, base: base.version, response: None, is_awaited: true };
            return world.requests.push(request);
        };
        match world.requests[at].response.clone() {
            None if world.one_in(6) => {
                world.note("the agent gives up its request");
                world.requests[at].is_awaited = false;
            }
            None if world.one_in(12) => drop(world.requests.remove(at)),
            None => {}
            Some(_) if world.one_in(6) => {
                world.note("a response is lost");
                world.requests.remove(at);
            }
            Some(Err(())) => {
                world.requests.remove(at);
                world.agent_object = Some(world.object.clone());
            }
            Some(Ok(object)) => {
                let number = world.requests.remove(at).number;
                world.note(format!("list {number} is stored"));
                world.is_open = false;
                let stored = object.in_use.clone();
                if world.agent_object.as_ref().is_none_or(|known| known.version < object.version) {
                    world.agent_object = Some(object);
                }
                drop(world);
                attachments.stored(number, &stored);
            }
        }
    }

    /// A call of the driver: its work, or a fault.
    fn call(&self, what: &str, work: impl FnOnce(&mut World)) -> Result<(), DriverError> {
        self.within();
        let failed = |code| Err(DriverError { message: "rpc error".to_owned(), code });
        let result = {
            let mut world = self.world();
            world.note(what);
            if world.one_in(8) {
                failed(Code::Other)
            } else if world.one_in(10) {
                failed(Code::Unavailable)
            } else if world.one_in(10) {
                work(&mut world);
                failed(Code::DeadlineExceeded)
            } else {
                work(&mut world);
                Ok(())
            }
        };
        self.within();
        result
    }
}

impl Driver for Model {
    fn info(&self, _: &StopToken) -> Result<DriverNode, DriverError> {
        Ok(DriverNode { id: "n".to_owned(), ..DriverNode::default() })
    }
    fn abilities(&self, _: &StopToken) -> Result<Abilities, DriverError> {
        self.within();
        Ok(Abilities { stage: true, ..Abilities::default() })
    }
    fn stage(&self, request: &Stage, _: &StopToken) -> Result<(), DriverError> {
        let (volume, path) = (volume_of(&request.volume), PathBuf::from(&request.staging_path));
        let work = move |world: &mut World| {
            let is_attached = world.devices.contains(&(volume, OWN));
            world.check(is_attached, &format!("{volume} was mounted and is not attached"));
            if world.staged.insert(volume) {
                world.mounts.push(path);
            }
        };
        self.call(&format!("stage {volume}"), work)
    }
    fn unstage(&self, volume: &str, staging_path: &str, _: &StopToken) -> Result<(), DriverError> {
        let (volume, path) = (volume_of(volume), PathBuf::from(staging_path));
        let work = move |world: &mut World| {
            let is_free = !world.published.values().any(|other| *other == volume);
            world.check(is_free, &format!("{volume} was unstaged while it was published"));
            world.staged.remove(&volume);
            world.mounts.retain(|mount| *mount != path);
        };
        self.call(&format!("unstage {volume}"), work)
    }
    fn publish(&self, request: &Publish, _: &StopToken) -> Result<(), DriverError> {
        let (volume, path) = (volume_of(&request.volume), PathBuf::from(&request.target_path));
        let work = move |world: &mut World| {
            let is_there = world.staged.contains(&volume) && world.devices.contains(&(volume, OWN));
            world.check(is_there, &format!("{volume} was published and is not mounted and attached"));
            if world.published.insert(path.clone(), volume).is_none() {
                let _ = std::fs::create_dir(&path);
                world.mounts.push(path);
            }
        };
        self.call(&format!("publish {volume}"), work)
    }
    fn unpublish(&self, volume: &str, target_path: &str, _: &StopToken) -> Result<(), DriverError> {
        let path = PathBuf::from(target_path);
        let work = move |world: &mut World| {
            world.published.remove(&path);
            world.mounts.retain(|mount| *mount != path);
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
        Ok(self.world().mounts.iter().any(|mount| mount == path))
    }
    fn has_labels(&self, _: &Path) -> std::io::Result<bool> {
        Ok(true)
    }
    fn unmount(&self, path: &Path) -> std::io::Result<()> {
        self.world().mounts.retain(|mount| mount != path);
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
        let found = self.world().attachments.get(&(volume, OWN)).copied();
        let found = found.ok_or_else(|| ClusterError("not found".to_owned()))?;
        let mut object = VolumeAttachment::default();
        object.status.attached = found.is_attached;
        object.metadata.deletion_timestamp = found.is_deleted.then(|| "2030-01-01T00:00:00Z".to_owned());
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
    Running,
}

/// The agent.
struct Agent {
    model: Model,
    root: PathBuf,
    csi: Arc<Csi>,
    attachments: Arc<Attachments>,
    /// By pod, with its volume.
    workers: BTreeMap<usize, (usize, Progress)>,
}

impl Agent {
    fn start(model: &Model, root: &Path) -> Agent {
        let driver: Arc<dyn Driver> = Arc::new(model.clone());
        let registry = Registry::new(move |_, _| Ok(Arc::clone(&driver)));
        registry.register(DRIVER, "/s", &["1.0.0".to_owned()], &StopToken::never()).unwrap();
        let settings = CsiSettings {
            root_dir: root.to_owned(),
            node_name: "n".to_owned(),
            selinux: None,
            events: EventSink::new().0,
        };
        let attachments = Arc::<Attachments>::default();
        let cluster: Arc<dyn Cluster> = Arc::new(model.clone());
        let mounter = Arc::new(model.clone());
        let csi = Csi::new(settings, Arc::new(registry), cluster, mounter, Arc::clone(&attachments));
        let (read, woken) = (model.clone(), model.clone());
        attachments.agree_with(Controller {
            shown: Box::new(move || {
                let object = read.world().agent_object.clone()?;
                Some(Shown { in_use: object.in_use, attached: object.attached })
            }),
            changed: Box::new(|| {}),
            wake: Box::new(move |pod| {
                woken.world().woken.insert(pod.as_str().to_owned());
            }),
        });
        {
            let mut world = model.world();
            // Requests of the agent before may still arrive.
            world.requests.iter_mut().for_each(|request| request.is_awaited = false);
            world.requests.retain(|request| request.response.is_none());
            (world.agent_object, world.is_open, world.is_busy) = (None, true, false);
            world.woken.clear();
        }
        *model.1.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&attachments));
        let csi = Arc::new(csi);
        let number = |place: &Place| place.pod.as_str()[1..].parse().unwrap();
        let volume = |place: &Place| volume_of(place.spec_name.trim_start_matches("pv-"));
        let places = csi.places(None);
        let workers = places.iter().map(|place| (number(place), (volume(place), Progress::Due))).collect();
        Agent { model: model.clone(), root: root.to_owned(), csi, attachments, workers }
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
        let mut world = self.model.world();
        let own: BTreeMap<usize, usize> = world
            .pods
            .iter()
            .filter(|(_, place)| place.1 == OWN)
            .map(|(pod, place)| (*pod, place.0))
            .collect();
        world.agent_pods = own.keys().copied().collect();
        world.note(format!("the agent receives its pods: {own:?}"));
        drop(world);
        for (pod, volume) in own {
            self.workers.entry(pod).or_insert((volume, Progress::Due));
        }
    }

    /// One operation of a pod's worker.
    fn work(&mut self, pod: usize) {
        let Some((volume, progress)) = self.workers.get(&pod).copied() else { return };
        let stop = StopToken::never();
        let wanted = wants(pod, volume);
        if !self.model.world().agent_pods.contains(&pod) {
            self.model.world().note(format!("the agent removes {volume} from pod {pod}"));
            let place = Place {
                pod: PodUid::from(uid_of(pod).as_str()),
                spec_name: wanted.spec_name,
                form: Form::Filesystem,
            };
            if self.csi.tear_down(&place, &stop).is_ok() {
                self.attachments.forget(&place.pod);
                self.workers.remove(&pod);
            }
            return;
        }
        let is_woken = self.model.world().woken.remove(&uid_of(pod));
        if progress == Progress::Running || (progress == Progress::Waiting && !is_woken) {
            return;
        }
        self.model.world().note(format!("the agent sets up {volume} for pod {pod}"));
        let progress = match self.csi.volume(wanted).set_up(&stop) {
            Ok(_) => Progress::Running,
            Err(VolumeError::AwaitsAttachment(_)) => Progress::Waiting,
            Err(_) => Progress::Due,
        };
        self.workers.insert(pod, (volume, progress));
    }

    fn sweep(&mut self) {
        // A failure is repeated.
        let _ = self.csi.release_unused(&StopToken::never());
    }

    fn step(&mut self, choice: u64) {
        match choice {
            0..4 => {
                let workers: Vec<usize> = self.workers.keys().copied().collect();
                if !workers.is_empty() {
                    let at = self.model.world().below(workers.len() as u64);
                    self.work(workers[usize::try_from(at).unwrap()]);
                }
            }
            4 => self.list_pods(),
            _ => self.sweep(),
        }
    }
}

/// All take steps without faults, until nothing changes any more.
fn settle(agent: &mut Agent, model: &Model) {
    model.world().has_faults = false;
    for round in 0..ROUNDS {
        agent.list_pods();
        let workers: Vec<usize> = agent.workers.keys().copied().collect();
        workers.into_iter().for_each(|pod| agent.work(pod));
        agent.sweep();
        for _ in 0..2 {
            model.world().arrive();
            model.report();
        }
        // The watch may be slow.
        if round % 3 == 0 {
            model.watch();
        }
        let mut world = model.world();
        world.controller_pods = world.pods.clone();
        world.controller_object = world.object.clone();
        for volume in 0..VOLUMES.len() {
            world.control(volume);
            world.attach(volume, OWN);
            world.attach(volume, OTHER);
        }
    }
}

/// Nothing waits without a reason, and nothing is left.
fn check_end(model: &Model) {
    let mut world = model.world();
    let places: Vec<(usize, usize)> = world.pods.values().copied().collect();
    for volume in 0..VOLUMES.len() {
        let count = |node| places.iter().filter(|place| **place == (volume, node)).count();
        let (own, other) = (count(OWN), count(OTHER));
        let published = world.published.values().filter(|one| **one == volume).count();
        let is_here = world.devices.contains(&(volume, OWN));
        let is_there = world.devices.contains(&(volume, OTHER));
        if own > 0 && other > 0 {
            world.check(is_here != is_there, &format!("{volume} is not attached to one of two nodes"));
        } else {
            world.check(is_there == (other > 0), &format!("{volume} is detached or attached elsewhere"));
            world.check(is_here == (own > 0), &format!("{volume} is not attached, or not detached"));
        }
        let expected = if is_here { own } else { 0 };
        world.check(published == expected, &format!("{volume}: {published} pods run, and not {expected}"));
        let is_listed = world.object.in_use.contains(&name_of(volume));
        world.check(is_listed == (own > 0), &format!("{volume} is in use, or not, at the end"));
    }
}

fn directory() -> tempfile::TempDir {
    // In memory, where there is such a directory: the model writes many small files.
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Returns the number of steps, or what was broken.
fn schedule(seed: u64) -> Result<u64, String> {
    let model = Model::default();
    {
        let mut world = model.world();
        (world.random, world.has_faults) = (seed, true);
    }
    let root = directory();
    let mut agent = Agent::start(&model, root.path());
    for _ in 0..STEPS {
        let choice = model.world().below(14);
        if choice < 6 {
            agent.run(|agent| agent.step(choice));
        } else {
            model.step_of_others();
        }
        if model.world().broken.is_some() {
            break;
        }
    }
    if model.world().broken.is_none() {
        settle(&mut agent, &model);
        check_end(&model);
    }
    let world = model.world();
    match &world.broken {
        None => Ok(world.steps),
        Some(broken) => Err(format!("{broken}\n  {}", world.trace.join("\n  "))),
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
