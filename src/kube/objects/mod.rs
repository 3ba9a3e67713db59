//! The ConfigMaps and Secrets that pods of this node name, each read once for all pods (Go:
//! pkg/kubelet/util/manager, pkg/kubelet/configmap, pkg/kubelet/secret).
//!
//! An object is cached from the registration of the first pod that names it until the last such pod
//! has ended. By default it is watched. A cached object stays usable while the API server is
//! unavailable.
//!
//! DIFFERS: a pod whose object changed is synced immediately, and a volume that waits for a missing
//! one does not wait to the end of its back-off; upstream leaves both to the next periodic sync. A
//! watch does not end because no pod reads the object.
//!
//! With a store (`--offline`) objects are stored, and while the API server is away or does not know this
//! node, stored objects come first: it can then neither remove an object nor replace it by another one.
//! Such updates are parked until the API server counts again.
//!
//! DIFFERS: objects beyond [`MAX_WATCHES`] are not watched, but read again when they are used and
//! older than `POLL`: each watch costs a thread and a connection. Nor is `kube-root-ca.crt`, once it could be
//! read: nearly each pod has it, so that there would be a watch per namespace. Only the control plane writes
//! it, when its authorities change, which it does so slowly that `ROOT_POLL` suffices.

mod object;
pub(super) mod stored_object;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use stored_object::{StoredObject, object_key};

use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::offline::Offline;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads::{self, Running};

pub use object::{Key, Kind, Object, Stored, references};

/// The largest number of objects that are watched.
pub const MAX_WATCHES: usize = 64;
/// The age at which an object that is not watched is read again.
const POLL: Duration = Duration::from_secs(60);
/// The age at which the authorities of the cluster are read again, if their pods are synced.
const ROOT_POLL: Duration = Duration::from_secs(300);
/// An absence that has lasted for less is not used again: the pod that waits for the object reads it at once.
const ABSENCE: Duration = Duration::from_secs(10);
/// A longer absence is used for this part of the time that it has lasted, but not for longer than an object, or
/// than `POLL`.
const ABSENCE_PART: u32 = 10;
/// A read that takes longer does not prevent another one.
const READ_LIMIT: Duration = Duration::from_secs(15);
/// How long a pod waits for the first read of an object, or of services.
///
/// DIFFERS: upstream waits one second for an object, which may be too short for the connections of
/// a busy node, and not at all for services.
pub const FIRST_READ: Duration = Duration::from_secs(3);

/// `configMapAndSecretChangeDetectionStrategy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strategy {
    /// A watch per object.
    #[default]
    Watch,
    /// Read again when older than the node's time to live for objects.
    Cache,
    /// Read at each use.
    Get,
}

impl Strategy {
    /// The strategy of a configuration value, which has been validated.
    #[must_use]
    pub fn from_config(word: &str) -> Strategy {
        match word {
            "Get" => Strategy::Get,
            "Cache" => Strategy::Cache,
            _ => Strategy::Watch,
        }
    }
}

/// Why there is no object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum ObjectError {
    /// The API server has no such object.
    #[error("{} {name:?} not found", kind.as_str())]
    NotFound { kind: Kind, name: String },
    /// Access is denied. Right after a pod was bound, the API server may not know yet that this
    /// node may read the object: the caller should retry.
    #[error("{text}")]
    Forbidden {
        /// The API server's message.
        text: String,
    },
    /// The request failed.
    #[error("{text}")]
    Unavailable { text: String },
    /// There is no response yet.
    #[error("failed to sync {} cache: timed out waiting for the condition", kind.as_str())]
    NotYet { kind: Kind },
    /// No registered pod names it.
    #[error("object {namespace:?}/{name:?} not registered")]
    NotRegistered { namespace: String, name: String },
    /// The pod or the agent stops.
    #[error("stopping")]
    Stopping,
}

impl ObjectError {
    /// Whether the object does not exist, which optional references allow.
    pub fn is_not_found(&self) -> bool {
        matches!(self, ObjectError::NotFound { .. })
    }
}

/// Receives the updates of a watch: the current object, or `None` if it does not exist.
pub type OnUpdate = Box<dyn FnMut(Option<Object>) + Send>;

/// The requests to the API server; a trait so that tests need no server.
pub trait ObjectApi: Send + Sync {
    /// Reads the object once.
    ///
    /// # Errors
    /// [`ObjectError::NotFound`], `Forbidden` or `Unavailable`.
    fn read(&self, key: &Key) -> Result<Object, ObjectError>;

    /// Reads an object that was never read: the API server may not know yet that a pod of this node names it.
    ///
    /// # Errors
    /// As [`ObjectApi::read`].
    fn read_new(&self, key: &Key) -> Result<Object, ObjectError> {
        self.read(key)
    }

    /// Watches the object on a thread until that is stopped.
    ///
    /// # Errors
    /// When the thread cannot be started.
    fn watch(&self, key: &Key, sink: OnUpdate) -> io::Result<Running>;

    /// Whether the last request of this node to the API server had a response.
    fn responds(&self) -> bool {
        true
    }
}

/// Receives the pods to sync again.
pub type SyncPod = Box<dyn Fn(&PodUid) + Send + Sync>;

/// The lifetime of cached objects for [`Strategy::Cache`], from the node's annotation; `None`: one minute.
pub type TimeToLive = Box<dyn Fn() -> Option<Duration> + Send + Sync>;

/// The cache. Clones share it.
#[derive(Clone)]
pub struct Objects {
    shared: Arc<Shared>,
}

impl fmt::Debug for Objects {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Objects({:?})", self.shared.strategy)
    }
}

struct Shared {
    strategy: Strategy,
    api: Arc<dyn ObjectApi>,
    changed: SyncPod,
    time_to_live: TimeToLive,
    offline: OnceLock<Offline>,
    /// Locked while an object is passed to the store: the newest version comes last.
    storing: Mutex<()>,
    /// Locked for short reads and updates only, never during a request.
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    entries: HashMap<Key, Entry>,
    pods: HashMap<PodUid, References>,
    /// The number of entries that have a watch or are starting one.
    watches: usize,
    /// The last number of an entry, a read or an update.
    last_id: u64,
    closed: bool,
}

#[derive(Default)]
struct References {
    keys: BTreeSet<Key>,
    /// The number of changes of the pod's objects.
    changes: u64,
}

struct Entry {
    /// Prevents that a watch of an earlier entry with this key changes this one.
    id: u64,
    pods: usize,
    known: KnownObject,
    /// The newest update, which the API server may not make now; `None` in it: there is no object.
    parked: Option<Option<Arc<Object>>>,
    /// Whether `known` changed while nothing was stored.
    is_unstored: bool,
    /// Whether `known` is from the store, and the API server has not shown it since.
    is_from_store: bool,
    /// When the object was read, without a watch; `None`: its age does not matter.
    read: Option<Instant>,
    /// When the first of the last reads in a row found no object.
    absent: Option<Instant>,
    /// When a caller began to read the object, while it does.
    reading: Option<Instant>,
    /// The number of the read or the update of the watch that `known` is from.
    number: u64,
    /// The number of the last time that a pod began to name it; 0: that pod needs no later read.
    named: u64,
    watch: Watch,
    /// Dropped to wake the callers that wait for the first response.
    waiters: Option<(Sender<()>, Receiver<()>)>,
    /// Whether a caller's wait has timed out.
    missed: bool,
}

enum KnownObject {
    Unread,
    Absent,
    Present(Arc<Object>),
}

impl KnownObject {
    fn from_update(object: Option<Arc<Object>>) -> KnownObject {
        object.map_or(KnownObject::Absent, KnownObject::Present)
    }
}

enum Watch {
    No,
    /// The thread that registered the pod starts the watch.
    Starting,
    On(Running),
    /// The object is immutable: it cannot change.
    Over,
}

impl Watch {
    fn counts(&self) -> bool {
        matches!(self, Watch::Starting | Watch::On(_))
    }
}

impl Entry {
    fn new(id: u64) -> Entry {
        Entry {
            id,
            pods: 0,
            known: KnownObject::Unread,
            parked: None,
            is_unstored: false,
            is_from_store: false,
            read: None,
            absent: None,
            reading: None,
            number: 0,
            named: 0,
            watch: Watch::No,
            waiters: None,
            missed: false,
        }
    }

    /// Whether the update needs an API server that knows this node: the object is gone, or is another one.
    fn is_replaced_by(&self, update: Option<&Object>) -> bool {
        match (&self.known, update) {
            (KnownObject::Unread, _) | (KnownObject::Absent, None) => false,
            (KnownObject::Present(known), Some(object)) => known.uid != object.uid,
            (KnownObject::Present(_), None) | (KnownObject::Absent, Some(_)) => true,
        }
    }

    fn cached_result(&self, key: &Key) -> Option<Result<Arc<Object>, ObjectError>> {
        match &self.known {
            KnownObject::Unread => None,
            KnownObject::Absent => Some(Err(not_found(key))),
            KnownObject::Present(object) => Some(Ok(Arc::clone(object))),
        }
    }
}

/// How long an absence that has lasted for this time is used without another request.
fn absence_age(lasted: Duration) -> Duration {
    if lasted < ABSENCE { Duration::ZERO } else { POLL.min(lasted / ABSENCE_PART) }
}

/// The error for a missing object.
#[must_use]
pub fn not_found(key: &Key) -> ObjectError {
    ObjectError::NotFound { kind: key.kind, name: key.name.clone() }
}

enum Step {
    Done(Result<Arc<Object>, ObjectError>),
    Wait(Receiver<()>),
    Read(u64),
}

impl Objects {
    /// An empty cache; it reads nothing and starts no thread before a pod is registered.
    #[must_use]
    pub fn new(
        strategy: Strategy,
        api: Arc<dyn ObjectApi>,
        time_to_live: TimeToLive,
        changed: SyncPod,
    ) -> Objects {
        let shared = Shared {
            strategy,
            api,
            changed,
            time_to_live,
            offline: OnceLock::new(),
            storing: Mutex::default(),
            table: Mutex::default(),
        };
        Objects { shared: Arc::new(shared) }
    }

    /// Objects are stored, and stored ones serve while the API server does not count. Must be called before
    /// the first pod is registered.
    #[must_use]
    pub fn with_offline(self, offline: Option<Offline>) -> Objects {
        if let Some(offline) = offline {
            let _ = self.shared.offline.set(offline);
        }
        self
    }

    /// The store, if there is one.
    pub(super) fn offline(&self) -> Option<&Offline> {
        self.shared.offline.get()
    }

    /// The API server counts again: carries out the updates that were parked.
    pub fn settle(&self) {
        let (mut parked, mut unstored) = (Vec::new(), Vec::new());
        for (key, entry) in &mut self.shared.table().entries {
            if let Some(update) = entry.parked.take() {
                parked.push((key.clone(), (entry.id, entry.number), update));
            }
            if std::mem::take(&mut entry.is_unstored) {
                unstored.push(key.clone());
            }
        }
        for key in unstored {
            self.shared.store(&key);
        }
        for (key, (id, number), update) in parked {
            self.shared.carry_out(&key, id, update, Some(number));
        }
    }

    /// The API server does not count any more: objects that it does not have are read from the store. It may
    /// have lost them just before that was known.
    pub fn use_stored(&self) {
        let Some(offline) = self.shared.offline.get() else { return };
        let absent: Vec<(Key, u64)> = {
            let table = self.shared.table();
            let absent = table.entries.iter().filter(|(_, entry)| matches!(entry.known, KnownObject::Absent));
            absent.map(|(key, entry)| (key.clone(), entry.id)).collect()
        };
        for (key, id) in absent {
            if let Some(Some(object)) = stored_object(offline, &key) {
                self.shared.restore(&key, id, object);
            }
        }
    }

    /// Caches the objects that the pod names, and releases those that only an earlier version of it
    /// named. A repeated call is cheap.
    pub fn register(&self, pod: &Pod) {
        let wanted = references(pod);
        let stored = self.shared.read_stored(&wanted);
        let mut new = Vec::new();
        let mut unused = Vec::new();
        let mut starts = Vec::new();
        {
            let mut table = self.shared.table();
            if table.closed {
                return;
            }
            let known = table.pods.contains_key(pod.uid());
            let before = table.pods.get(pod.uid()).map(|named| named.keys.clone()).unwrap_or_default();
            for key in wanted.difference(&before) {
                let number = table.next_number();
                let entry = table.entry(key);
                entry.pods += 1;
                // The pod may be newer than the cached object, but not than the authorities of the cluster.
                if !key.is_root_authority() {
                    (entry.read, entry.absent, entry.named) = (None, None, number);
                }
            }
            for (key, object) in stored {
                // The API server may have responded meanwhile.
                if let Some(entry) = table.entries.get_mut(&key)
                    && matches!(entry.known, KnownObject::Unread)
                {
                    entry.known = KnownObject::from_update(object.map(Arc::new));
                    entry.is_from_store = true;
                }
            }
            for key in before.difference(&wanted) {
                unused.extend(table.release(key));
            }
            if !known && self.shared.offline.get().is_some() {
                new.extend(wanted.iter().cloned());
            }
            if !wanted.is_empty() || known {
                table.pods.entry(pod.uid().clone()).or_default().keys.clone_from(&wanted);
            }
            if self.shared.strategy == Strategy::Watch {
                for key in wanted.into_iter().filter(|key| !key.is_root_authority()) {
                    if let Some(id) = table.claim_watch(&key) {
                        starts.push((key, id));
                    }
                }
            }
        }
        drop(unused);
        for key in new {
            // The store may have removed it when the last pod that named it was deleted.
            self.shared.store(&key);
        }
        for (key, id) in starts {
            self.start_watch(key, id);
        }
    }

    /// Releases the pod's objects; those that no other pod names are dropped.
    pub fn unregister(&self, uid: &PodUid) {
        let mut unused = Vec::new();
        {
            let mut table = self.shared.table();
            let Some(named) = table.pods.remove(uid) else { return };
            for key in &named.keys {
                unused.extend(table.release(key));
            }
        }
        // This joins the threads, so the table must not be locked.
        drop(unused);
    }

    /// The cached object. Waits up to `wait` for the first response.
    ///
    /// # Errors
    /// When the object does not exist, or was never read.
    pub fn get(&self, key: &Key, wait: Duration, stop: &StopToken) -> Result<Arc<Object>, ObjectError> {
        let until = Instant::now() + wait;
        loop {
            match self.shared.step(key) {
                Step::Done(result) => return result,
                // A pod may name hundreds of objects, each with a request that takes seconds.
                Step::Read(_) if stop.is_stopped() => return Err(ObjectError::Stopping),
                Step::Read(id) => {
                    let result = self.shared.read(key, id);
                    if result.is_err() {
                        self.watch_unreadable(key);
                    }
                    return result;
                }
                Step::Wait(word) => {
                    let _waiting = threads::waiting("first read of an object");
                    select_biased! {
                        recv(stop.signal()) -> _ => return Err(ObjectError::Stopping),
                        recv(word) -> _ => {}
                        default(until.saturating_duration_since(Instant::now())) => {
                            if self.shared.missed(key) {
                                return Err(ObjectError::NotYet { kind: key.kind });
                            }
                        }
                    }
                }
            }
        }
    }

    /// Whether [`Objects::get`] returns without a wait or a request.
    #[must_use]
    pub fn is_cached(&self, key: &Key) -> bool {
        matches!(self.shared.step(key), Step::Done(_))
    }

    /// A ConfigMap; waits up to the usual limit of pods.
    ///
    /// # Errors
    /// See [`Objects::get`].
    pub fn config_map(
        &self,
        namespace: &str,
        name: &str,
        stop: &StopToken,
    ) -> Result<Arc<Object>, ObjectError> {
        self.get(&Key::new(Kind::ConfigMap, namespace, name), FIRST_READ, stop)
    }

    /// A Secret; waits up to the usual limit of pods.
    ///
    /// # Errors
    /// See [`Objects::get`].
    pub fn secret(&self, namespace: &str, name: &str, stop: &StopToken) -> Result<Arc<Object>, ObjectError> {
        self.get(&Key::new(Kind::Secret, namespace, name), FIRST_READ, stop)
    }

    /// A number that increases whenever an object that the pod names changes: an operation that
    /// failed before may succeed now.
    #[must_use]
    pub fn changes(&self, uid: &PodUid) -> u64 {
        self.shared.table().pods.get(uid).map_or(0, |named| named.changes)
    }

    /// Ends all watches; later no object is read.
    pub fn shut_down(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut watches = Vec::new();
        {
            let mut table = self.shared.table();
            table.closed = true;
            for entry in table.entries.values_mut() {
                if let Watch::On(mut running) = std::mem::replace(&mut entry.watch, Watch::No) {
                    running.request_stop();
                    watches.push(running);
                }
                entry.waiters = None;
            }
            table.watches = 0;
        }
        for running in watches {
            running.stop(until.saturating_duration_since(Instant::now()));
        }
    }

    /// Authorities of the cluster that cannot be read are watched like other objects: the control plane
    /// publishes them a moment after it has made their namespace, and their pods are woken then.
    fn watch_unreadable(&self, key: &Key) {
        if self.shared.strategy != Strategy::Watch || !key.is_root_authority() {
            return;
        }
        let id = {
            let mut table = self.shared.table();
            let id = if table.closed { None } else { table.claim_watch(key) };
            // The caller fails now, as one whose wait timed out.
            if let Some(entry) = table.entries.get_mut(key).filter(|_| id.is_some()) {
                entry.missed |= matches!(entry.known, KnownObject::Unread);
            }
            id
        };
        if let Some(id) = id {
            self.start_watch(key.clone(), id);
        }
    }

    fn start_watch(&self, key: Key, id: u64) {
        let shared = Arc::downgrade(&self.shared);
        let watched_key = key.clone();
        let sink: OnUpdate = Box::new(move |object| {
            if let Some(shared) = shared.upgrade() {
                shared.update(&watched_key, id, object.map(Arc::new));
            }
        });
        let started = self.shared.api.watch(&key, sink);
        // If it is not needed any more, its thread is joined after the table is unlocked.
        let _unwanted = {
            let mut table = self.shared.table();
            table.settle_watch(&key, id, started)
        };
    }
}

impl Table {
    fn next_number(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn entry(&mut self, key: &Key) -> &mut Entry {
        let last_id = &mut self.last_id;
        self.entries.entry(key.clone()).or_insert_with(|| {
            *last_id += 1;
            Entry::new(*last_id)
        })
    }

    /// Removes one pod's use of the object. Returns the watch if no pod uses it any more.
    fn release(&mut self, key: &Key) -> Option<Running> {
        let entry = self.entries.get_mut(key)?;
        entry.pods = entry.pods.saturating_sub(1);
        if entry.pods > 0 {
            return None;
        }
        let entry = self.entries.remove(key)?;
        if entry.watch.counts() {
            self.watches = self.watches.saturating_sub(1);
        }
        match entry.watch {
            Watch::On(running) => Some(running),
            _ => None,
        }
    }

    /// Counts a change of the object for the pods that name it, and adds these to `pods`.
    fn note_change(&mut self, key: &Key, pods: &mut Vec<PodUid>) {
        for (uid, named) in self.pods.iter_mut().filter(|(_, named)| named.keys.contains(key)) {
            named.changes += 1;
            pods.push(uid.clone());
        }
    }

    /// Whether the caller must start a watch.
    fn claim_watch(&mut self, key: &Key) -> Option<u64> {
        if self.watches >= MAX_WATCHES {
            return None;
        }
        let entry = self.entries.get_mut(key).filter(|entry| matches!(entry.watch, Watch::No))?;
        entry.watch = Watch::Starting;
        self.watches += 1;
        Some(entry.id)
    }

    /// Stores a watch that was started. Returns it if it is not needed any more.
    fn settle_watch(&mut self, key: &Key, id: u64, started: io::Result<Running>) -> Option<Running> {
        let entry = self.entries.get_mut(key).filter(|entry| entry.id == id && entry.watch.counts());
        match (entry, started) {
            (Some(_), Ok(running)) if self.closed => Some(running),
            (Some(entry), Ok(running)) => {
                entry.watch = Watch::On(running);
                None
            }
            (Some(entry), Err(error)) => {
                log::warn!("cannot watch {} {}/{}: {error}", key.kind.as_str(), key.namespace, key.name);
                entry.watch = Watch::No;
                // Callers read an object without a watch themselves.
                entry.waiters = None;
                self.watches = self.watches.saturating_sub(1);
                None
            }
            (None, started) => started.ok(),
        }
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.locked()
    }

    fn step(&self, key: &Key) -> Step {
        let age = match self.strategy {
            Strategy::Get => Duration::ZERO,
            Strategy::Watch | Strategy::Cache if key.is_root_authority() => ROOT_POLL,
            Strategy::Watch => POLL,
            Strategy::Cache => (self.time_to_live)().unwrap_or(POLL),
        };
        let responds = self.api.responds();
        let mut table = self.table();
        if table.closed {
            return Step::Done(Err(ObjectError::Stopping));
        }
        let Some(entry) = table.entries.get_mut(key) else {
            return Step::Done(Err(ObjectError::NotRegistered {
                namespace: key.namespace.clone(),
                name: key.name.clone(),
            }));
        };
        let fresh = match &entry.watch {
            Watch::No => {
                let immutable = !entry.is_from_store
                    && matches!(&entry.known, KnownObject::Present(object) if object.immutable);
                // A request would wait for a server that does not count.
                let is_last = !self.server_counts() && !matches!(entry.known, KnownObject::Unread);
                // DIFFERS: a request to a server that does not respond would delay restarts of containers. A
                // missing object is read at each use for a short time only (Go: `data.err` of
                // cache_based_manager.go): a pod may name hundreds that never appear.
                let absence = || entry.absent.map_or(Duration::ZERO, |since| absence_age(since.elapsed()));
                let is_usable = entry.read.is_some_and(|read| match entry.known {
                    KnownObject::Unread => false,
                    KnownObject::Present(_) => !responds || read.elapsed() < age,
                    KnownObject::Absent => !responds || read.elapsed() < age.min(absence()),
                });
                immutable || is_last || is_usable
            }
            Watch::Starting | Watch::On(_) | Watch::Over => true,
        };
        // All pods of a namespace need the authorities of the cluster at a start of the agent.
        let is_read_for_all = key.is_root_authority()
            && matches!(entry.known, KnownObject::Unread)
            && entry.reading.is_some_and(|begun| begun.elapsed() < READ_LIMIT);
        if !fresh && !is_read_for_all {
            return Step::Read(entry.id);
        }
        match entry.cached_result(key) {
            Some(result) => Step::Done(result),
            None => Step::Wait(entry.waiters.get_or_insert_with(|| bounded(0)).1.clone()),
        }
    }

    /// Notes that a caller's wait has timed out, and returns `true`; `false`: there was a response meanwhile,
    /// which wakes no pod any more.
    fn missed(&self, key: &Key) -> bool {
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(key) else { return true };
        let is_unread = matches!(entry.known, KnownObject::Unread);
        entry.missed |= is_unread;
        is_unread
    }

    /// Reads an object that is not watched. If that fails, the cached object is used, and also if a read
    /// that began later, or a watch, has a newer one already.
    fn read(&self, key: &Key, id: u64) -> Result<Arc<Object>, ObjectError> {
        let (number, is_new) = {
            let mut table = self.table();
            let mut is_new = true;
            if let Some(entry) = table.entries.get_mut(key).filter(|entry| entry.id == id) {
                entry.reading = Some(Instant::now());
                is_new = matches!(entry.known, KnownObject::Unread);
            }
            (table.next_number(), is_new)
        };
        let result = if is_new { self.api.read_new(key) } else { self.api.read(key) };
        let result = result.map(Arc::new);
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(key).filter(|entry| entry.id == id) else { return result };
        // Callers that wait for this read continue when the table is unlocked.
        (entry.reading, entry.waiters) = (None, None);
        if number < entry.number {
            return entry.cached_result(key).unwrap_or(result);
        }
        let update = match &result {
            Ok(object) => Some(Arc::clone(object)),
            Err(error) if error.is_not_found() => None,
            Err(error) => {
                let cached = match &entry.known {
                    KnownObject::Present(object) => Ok(Arc::clone(object)),
                    // A pod that came after the last read may be newer than the absence.
                    KnownObject::Absent if entry.read.is_some() && *error != ObjectError::Stopping => {
                        Err(not_found(key))
                    }
                    KnownObject::Absent | KnownObject::Unread => return result,
                };
                let Key { kind, namespace, name } = key;
                log::debug!("{} {namespace}/{name}: the last result is used: {error}", kind.as_str());
                return cached;
            }
        };
        entry.number = number;
        if !self.server_counts() && entry.is_replaced_by(update.as_deref()) {
            entry.parked = Some(update);
            return entry.cached_result(key).unwrap_or(result);
        }
        let is_changed = match (&entry.known, &update) {
            (KnownObject::Present(before), Some(now)) => !before.is_version(now),
            (KnownObject::Absent, None) => false,
            _ => true,
        };
        entry.known = KnownObject::from_update(update);
        (entry.parked, entry.is_from_store) = (None, false);
        let now = Instant::now();
        // A pod that named the object meanwhile may be newer than this response, and reads it again.
        let is_current = number > entry.named;
        let is_absent = is_current && matches!(entry.known, KnownObject::Absent);
        entry.read = is_current.then_some(now);
        entry.absent = is_absent.then(|| entry.absent.unwrap_or(now));
        // Pods whose wait for this read timed out must be synced again.
        let mut pods = Vec::new();
        if std::mem::take(&mut entry.missed) {
            table.note_change(key, &mut pods);
        }
        drop(table);
        if is_changed {
            self.store(key);
        }
        for uid in pods {
            (self.changed)(&uid);
        }
        result
    }

    fn server_counts(&self) -> bool {
        self.offline.get().is_none_or(Offline::accepts_absence)
    }

    /// The stored objects of keys that are new here, while they come before those of the API server; `None`
    /// in it: the object did not exist. Reads files.
    fn read_stored(&self, keys: &BTreeSet<Key>) -> Vec<(Key, Option<Object>)> {
        let Some(offline) = self.offline.get().filter(|_| !self.server_counts()) else { return Vec::new() };
        let new: Vec<&Key> = {
            let table = self.table();
            keys.iter().filter(|key| !table.entries.contains_key(*key)).collect()
        };
        new.into_iter().filter_map(|key| Some((key.clone(), stored_object(offline, key)?))).collect()
    }

    /// Stores what is known of an object now.
    fn store(&self, key: &Key) {
        let Some(offline) = self.offline.get() else { return };
        let _order = self.storing.locked();
        let object = {
            let mut table = self.table();
            let Some(entry) = table.entries.get_mut(key) else { return };
            match &entry.known {
                KnownObject::Unread => return,
                KnownObject::Absent => None,
                KnownObject::Present(object) => {
                    let object = Arc::clone(object);
                    entry.is_unstored = offline.uses_stored();
                    Some(object)
                }
            }
        };
        let object = object.as_deref().map(StoredObject::from);
        offline.put_found(object_key(key), object.as_ref());
    }

    /// Uses a stored object in the place of one that the API server does not have.
    fn restore(&self, key: &Key, id: u64, object: Object) {
        let mut pods = Vec::new();
        {
            let mut table = self.table();
            let Some(entry) = table.entries.get_mut(key).filter(|entry| entry.id == id) else { return };
            if !matches!(entry.known, KnownObject::Absent) {
                return;
            }
            entry.known = KnownObject::Present(Arc::new(object));
            entry.is_from_store = true;
            entry.parked.get_or_insert(None);
            table.note_change(key, &mut pods);
        }
        for uid in pods {
            (self.changed)(&uid);
        }
    }

    /// Handles an update of a watch.
    fn update(&self, key: &Key, id: u64, object: Option<Arc<Object>>) {
        self.carry_out(key, id, object, None);
    }

    /// Carries out an update. `parked`: the number of the newest one when it was taken from where it was
    /// parked; it does not replace one that has arrived since.
    fn carry_out(&self, key: &Key, id: u64, object: Option<Arc<Object>>, parked: Option<u64>) {
        let mut over = None;
        let mut pods = Vec::new();
        let is_new;
        {
            let mut table = self.table();
            let number = table.next_number();
            let Some(entry) = table.entries.get_mut(key).filter(|entry| entry.id == id) else { return };
            if parked.is_some_and(|parked| parked != entry.number) {
                return;
            }
            entry.number = number;
            if !self.server_counts() && entry.is_replaced_by(object.as_deref()) {
                entry.parked = Some(object);
                return;
            }
            let is_from_store = std::mem::take(&mut entry.is_from_store);
            entry.parked = None;
            let first = matches!(entry.known, KnownObject::Unread);
            let changed = match (&entry.known, &object) {
                (KnownObject::Absent, None) => false,
                (KnownObject::Present(before), Some(now)) => !before.is_version(now),
                _ => true,
            };
            let immutable = object.as_ref().is_some_and(|object| object.immutable);
            // From now on its age counts: with a watch per namespace none would be left for other objects.
            let is_published = key.is_root_authority() && object.is_some();
            // A stored object is known before its watch begins.
            if !(changed || immutable && is_from_store) {
                return;
            }
            entry.known = KnownObject::from_update(object);
            entry.waiters = None;
            // Waiting callers get the response; pods whose wait timed out must be synced again.
            let notify = changed && (!first || std::mem::take(&mut entry.missed));
            if immutable && entry.watch.counts() || is_published && matches!(entry.watch, Watch::On(_)) {
                let next = if immutable { Watch::Over } else { Watch::No };
                if let Watch::On(running) = std::mem::replace(&mut entry.watch, next) {
                    over = Some(running);
                }
                (entry.read, entry.absent) = (Some(Instant::now()), None);
                table.watches = table.watches.saturating_sub(1);
            }
            if notify {
                table.note_change(key, &mut pods);
            }
            is_new = changed;
        }
        if let Some(running) = over {
            // The current thread is this watch's own, so it is not joined here.
            running.leave();
        }
        if is_new {
            self.store(key);
        }
        for uid in pods {
            (self.changed)(&uid);
        }
    }
}

/// What the store has of an object; `None` in it: the object did not exist.
fn stored_object(offline: &Offline, key: &Key) -> Option<Option<Object>> {
    let stored: Option<StoredObject> = offline.read_json(&object_key(key))?;
    Some(stored.map(Object::from))
}

#[cfg(test)]
impl Objects {
    /// A cache of fixed objects for the tests of other rooms: all of them are registered.
    pub(crate) fn fixed(objects: Vec<(Key, Object)>) -> Objects {
        struct NoServer;
        impl ObjectApi for NoServer {
            fn read(&self, key: &Key) -> Result<Object, ObjectError> {
                Err(not_found(key))
            }
            fn watch(&self, _: &Key, _: OnUpdate) -> io::Result<Running> {
                Err(io::ErrorKind::Unsupported.into())
            }
        }
        let fixed = Objects::new(Strategy::Watch, Arc::new(NoServer), Box::new(|| None), Box::new(|_| {}));
        for (key, object) in objects {
            fixed.set(&key, Some(object));
        }
        fixed
    }

    /// Sets an object for a test; `None`: it does not exist.
    pub(crate) fn set(&self, key: &Key, object: Option<Object>) {
        let id = {
            let mut table = self.shared.table();
            let entry = table.entry(key);
            // Releasing a pod does not drop it.
            entry.pods = entry.pods.max(1000);
            entry.watch = Watch::Over;
            entry.missed = true;
            entry.id
        };
        self.shared.update(key, id, object.map(Arc::new));
    }
}

#[cfg(test)]
mod tests;
