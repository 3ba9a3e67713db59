//! Claims and persistent volumes that pods of this node name, one request each (Go:
//! pkg/kubelet/volumemanager/populator). A node may read exactly these.
//!
//! A volume is resolved once, before it is mounted; until then each attempt sends new requests, and
//! the volume's back-off limits them. DIFFERS: while the API server is unavailable, the last known
//! objects are used, so that a pod can be set up again. Not if it forbids to read a claim or a
//! persistent volume: the name may be that of a newer one, for which the node authorizer does not know
//! the pod yet.
//!
//! With a store, all of them are stored. While the API server is away or does not know this node, known and
//! stored objects come before requests; but a stored VolumeAttachment serves only pods that want that
//! ([`VolumeClaims::last_attachment`]).

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::objects::Object;
use super::objects::stored_object::StoredObject;
use super::stored;
use crate::model::persistent::{Claim, PersistentVolume};
use crate::model::pod::Pod;
use crate::model::storage::{CsiDriver, VolumeAttachment};
use crate::offline::{Key as StoredKey, Offline, Phase};
use crate::util::lock::LockExt;
use crate::util::sha256::sha256_hex;

/// The largest number of pairs of claim and volume that are remembered.
const MAX_KNOWN: usize = 1024;

/// The annotation of a pod that says which volumes it may use after a start without the API server.
pub const OFFLINE_VOLUMES: &str = "coracle.dev/offline-volumes";
/// Its value: also volumes that a controller attaches, if they were attached to this node when last seen.
pub const USE_ATTACHED: &str = "use-attached";

/// Whether a pod may use such volumes after a start without the API server.
#[must_use]
pub fn uses_attached(pod: &Pod) -> bool {
    pod.annotation(OFFLINE_VOLUMES) == Some(USE_ATTACHED)
}

/// The name of the VolumeAttachment of a volume of a CSI driver on a node (Go: pkg/volume/csi,
/// `getAttachmentName`).
#[must_use]
pub fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", sha256_hex(format!("{handle}{driver}{node}").as_bytes()))
}

/// Why there is no object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum ReadError {
    /// The object does not exist.
    #[error("{text}")]
    NotFound { text: String },
    /// This node may not read it, or not yet: the API server learns late for which objects the pods of
    /// a node need. Whether it exists is not known.
    #[error("{text}")]
    Forbidden { text: String },
    /// The request failed.
    #[error("{text}")]
    Unavailable { text: String },
    /// The agent stops.
    #[error("stopping")]
    Stopping,
}

/// A step of the expansion of a volume on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpansionStep {
    /// The driver is called.
    InProgress,
    /// It has refused, in words; the expansion is repeated.
    Failed(String),
    /// It has refused, in words; the controller decides which size the volume gets.
    Infeasible(String),
}

/// The requests to the API server; a trait so that tests need no server.
pub trait VolumeClaimApi: Send + Sync {
    /// Reads a claim.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn read_claim(&self, namespace: &str, name: &str) -> Result<Claim, ReadError>;

    /// Reads a persistent volume.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn read_volume(&self, name: &str) -> Result<PersistentVolume, ReadError>;

    /// Reads a Secret that a persistent volume names.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn read_secret(&self, namespace: &str, name: &str) -> Result<Object, ReadError>;

    /// Reads a CSIDriver; `None` if there is none.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn read_driver(&self, name: &str) -> Result<Option<CsiDriver>, ReadError> {
        let _ = name;
        Err(unavailable())
    }

    /// Reads a VolumeAttachment.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn read_attachment(&self, name: &str) -> Result<VolumeAttachment, ReadError> {
        let _ = name;
        Err(unavailable())
    }

    /// Shows in the claim's status how the expansion of its volume on this node goes on.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn write_expansion(&self, namespace: &str, name: &str, step: &ExpansionStep) -> Result<(), ReadError> {
        let _ = (namespace, name, step);
        Err(unavailable())
    }

    /// Writes the new size of a claim's volume, a quantity, into the claim's status.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn write_size(&self, namespace: &str, name: &str, size: &str) -> Result<(), ReadError> {
        let _ = (namespace, name, size);
        Err(unavailable())
    }
}

/// The claims of pods. Clones share them.
#[derive(Clone)]
pub struct VolumeClaims {
    shared: Arc<Shared>,
}

struct Shared {
    api: Box<dyn VolumeClaimApi>,
    offline: OnceLock<Offline>,
    /// Not locked during a request.
    known: Mutex<KnownObjects>,
}

#[derive(Default)]
struct KnownObjects {
    claims: HashMap<(String, String), Claim>,
    volumes: HashMap<String, PersistentVolume>,
    drivers: HashMap<String, Option<CsiDriver>>,
}

impl fmt::Debug for VolumeClaims {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("VolumeClaims")
    }
}

impl Default for VolumeClaims {
    /// No claim can be read.
    fn default() -> VolumeClaims {
        struct NoServer;
        impl VolumeClaimApi for NoServer {
            fn read_claim(&self, _: &str, _: &str) -> Result<Claim, ReadError> {
                Err(unavailable())
            }
            fn read_volume(&self, _: &str) -> Result<PersistentVolume, ReadError> {
                Err(unavailable())
            }
            fn read_secret(&self, _: &str, _: &str) -> Result<Object, ReadError> {
                Err(unavailable())
            }
        }
        VolumeClaims::new(Box::new(NoServer))
    }
}

fn unavailable() -> ReadError {
    ReadError::Unavailable { text: "there is no API server".to_owned() }
}

impl VolumeClaims {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(api: Box<dyn VolumeClaimApi>) -> VolumeClaims {
        let shared = Shared { api, offline: OnceLock::new(), known: Mutex::default() };
        VolumeClaims { shared: Arc::new(shared) }
    }

    /// What is read is stored, and stored objects serve while the API server does not count.
    #[must_use]
    pub fn with_offline(self, offline: Option<Offline>) -> VolumeClaims {
        if let Some(offline) = offline {
            let _ = self.shared.offline.set(offline);
        }
        self
    }

    /// A claim; sends a request, unless the API server does not count and the claim is known.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn claim(&self, namespace: &str, name: &str) -> Result<Claim, ReadError> {
        let key = (namespace.to_owned(), name.to_owned());
        let stored_key = || stored::claim_key(namespace, name);
        if let Some(claim) = self.instead(|known| &mut known.claims, &key, stored_key) {
            return Ok(claim);
        }
        match self.shared.api.read_claim(namespace, name) {
            Ok(claim) => {
                // One that waits for its volume would delay the write of the next version, and is of no use.
                if claim.is_bound() {
                    self.store(stored_key, &claim);
                }
                remember(&mut self.known().claims, key, claim.clone());
                Ok(claim)
            }
            Err(error @ ReadError::Unavailable { .. }) => self.known().claims.get(&key).cloned().ok_or(error),
            Err(error @ (ReadError::Forbidden { .. } | ReadError::Stopping)) => Err(error),
            Err(error) => self.gone(|known| &mut known.claims, &key, stored_key).ok_or(error),
        }
    }

    /// A persistent volume; sends a request, unless the API server does not count and the volume is known.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn volume(&self, name: &str) -> Result<PersistentVolume, ReadError> {
        let key = name.to_owned();
        let stored_key = || stored::volume_key(name);
        if let Some(volume) = self.instead(|known| &mut known.volumes, &key, stored_key) {
            return Ok(volume);
        }
        match self.shared.api.read_volume(name) {
            Ok(volume) => {
                self.store(stored_key, &volume);
                remember(&mut self.known().volumes, key, volume.clone());
                Ok(volume)
            }
            Err(error @ ReadError::Unavailable { .. }) => {
                self.known().volumes.get(name).cloned().ok_or(error)
            }
            Err(error @ (ReadError::Forbidden { .. } | ReadError::Stopping)) => Err(error),
            Err(error) => self.gone(|known| &mut known.volumes, &key, stored_key).ok_or(error),
        }
    }

    /// A Secret of a volume; sends a request, unless the API server does not count and it is stored. It is
    /// never remembered.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn secret(&self, namespace: &str, name: &str) -> Result<Object, ReadError> {
        let offline = self.shared.offline.get();
        let key = || stored::secret_key(namespace, name);
        if let Some(object) = stored::instead::<StoredObject>(offline, key) {
            return Ok(object.into());
        }
        let found = self.shared.api.read_secret(namespace, name);
        match &found {
            Ok(object) => stored::put(offline, key, &StoredObject::from(object)),
            Err(ReadError::NotFound { .. }) => stored::remove(offline, key),
            Err(ReadError::Forbidden { .. } | ReadError::Unavailable { .. } | ReadError::Stopping) => {}
        }
        found
    }

    /// The object of a CSI driver, if there is one; sends a request, unless the API server does not count
    /// and it is known.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn driver(&self, name: &str) -> Result<Option<CsiDriver>, ReadError> {
        let stored_key = || stored::driver_key(name);
        if let Some(driver) = self.instead(|known| &mut known.drivers, &name.to_owned(), stored_key) {
            return Ok(driver);
        }
        match self.shared.api.read_driver(name) {
            // The API server has lost its data since the request.
            Ok(None) if !stored::server_counts(self.shared.offline.get()) => {
                Ok(self.known().drivers.get(name).cloned().flatten())
            }
            Ok(driver) => {
                if let Some(offline) = self.shared.offline.get() {
                    offline.put_found(stored_key(), driver.as_ref());
                }
                remember(&mut self.known().drivers, name.to_owned(), driver.clone());
                Ok(driver)
            }
            Err(error @ (ReadError::Unavailable { .. } | ReadError::Forbidden { .. })) => {
                self.known().drivers.get(name).cloned().ok_or(error)
            }
            Err(error) => Err(error),
        }
    }

    /// A VolumeAttachment; sends a request, and is never remembered.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn attachment(&self, name: &str) -> Result<VolumeAttachment, ReadError> {
        let found = self.shared.api.read_attachment(name);
        let (offline, key) = (self.shared.offline.get(), || stored::attachment_key(name));
        match &found {
            Ok(attachment) if attachment.is_attached() => stored::put(offline, key, attachment),
            Ok(_) | Err(ReadError::NotFound { .. }) => stored::remove(offline, key),
            Err(ReadError::Forbidden { .. } | ReadError::Unavailable { .. } | ReadError::Stopping) => {}
        }
        found
    }

    /// The VolumeAttachment as it was when it was read last, if the volume was attached then. Only after a
    /// start without the API server. The volume may be attached elsewhere now.
    #[must_use]
    pub fn last_attachment(&self, name: &str) -> Option<VolumeAttachment> {
        let offline = self.shared.offline.get().filter(|offline| offline.phase() == Phase::Alone)?;
        offline.read_json(&stored::attachment_key(name)).filter(VolumeAttachment::is_attached)
    }

    /// Shows in the claim's status how the expansion of its volume on this node goes on.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn report_expansion(
        &self,
        namespace: &str,
        name: &str,
        step: &ExpansionStep,
    ) -> Result<(), ReadError> {
        self.shared.api.write_expansion(namespace, name, step)
    }

    /// Reports the new size of a claim's volume, a quantity.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn report_size(&self, namespace: &str, name: &str, size: &str) -> Result<(), ReadError> {
        self.shared.api.write_size(namespace, name, size)
    }

    /// The object to use without a request, while the API server does not count: the last known one, or
    /// the stored one.
    fn instead<K: Hash + Eq + Clone, V: Clone + DeserializeOwned>(
        &self,
        table: impl Fn(&mut KnownObjects) -> &mut HashMap<K, V>,
        key: &K,
        stored_key: impl FnOnce() -> StoredKey,
    ) -> Option<V> {
        let offline = self.shared.offline.get();
        if stored::server_counts(offline) {
            return None;
        }
        if let Some(known) = table(&mut self.known()).get(key) {
            return Some(known.clone());
        }
        let object: V = stored::instead(offline, stored_key)?;
        remember(table(&mut self.known()), key.clone(), object.clone());
        Some(object)
    }

    fn store(&self, key: impl FnOnce() -> StoredKey, object: &impl Serialize) {
        stored::put(self.shared.offline.get(), key, object);
    }

    /// The API server has no such object. Returns the last known one if the API server does not count any
    /// more since the request.
    fn gone<K: Hash + Eq, V: Clone>(
        &self,
        table: impl Fn(&mut KnownObjects) -> &mut HashMap<K, V>,
        key: &K,
        stored_key: impl FnOnce() -> StoredKey,
    ) -> Option<V> {
        let offline = self.shared.offline.get();
        if !stored::server_counts(offline) {
            return table(&mut self.known()).get(key).cloned();
        }
        table(&mut self.known()).remove(key);
        stored::remove(offline, stored_key);
        None
    }

    fn known(&self) -> MutexGuard<'_, KnownObjects> {
        self.shared.known.locked()
    }
}

/// Keeps the table small: when it is full, an arbitrary entry leaves it.
fn remember<K: Hash + Eq + Clone, V>(table: &mut HashMap<K, V>, key: K, value: V) {
    if table.len() >= MAX_KNOWN
        && !table.contains_key(&key)
        && let Some(other) = table.keys().next().cloned()
    {
        table.remove(&other);
    }
    table.insert(key, value);
}

#[cfg(test)]
type Fixed = (HashMap<(String, String), Claim>, HashMap<String, PersistentVolume>);

#[cfg(test)]
impl VolumeClaims {
    /// No claim exists.
    pub(crate) fn none() -> VolumeClaims {
        VolumeClaims::fixed(Vec::new(), Vec::new())
    }

    /// Fixed claims and volumes for tests of other rooms.
    pub(crate) fn fixed(claims: Vec<Claim>, volumes: Vec<PersistentVolume>) -> VolumeClaims {
        struct Store(Fixed);
        impl VolumeClaimApi for Store {
            fn read_claim(&self, namespace: &str, name: &str) -> Result<Claim, ReadError> {
                let text = format!("persistentvolumeclaims {name:?} not found");
                let key = (namespace.to_owned(), name.to_owned());
                self.0.0.get(&key).cloned().ok_or(ReadError::NotFound { text })
            }
            fn read_volume(&self, name: &str) -> Result<PersistentVolume, ReadError> {
                let text = format!("persistentvolumes {name:?} not found");
                self.0.1.get(name).cloned().ok_or(ReadError::NotFound { text })
            }
            fn read_secret(&self, _: &str, name: &str) -> Result<Object, ReadError> {
                Err(ReadError::NotFound { text: format!("secrets {name:?} not found") })
            }
            fn read_driver(&self, _: &str) -> Result<Option<CsiDriver>, ReadError> {
                // Volumes of tests are not attached.
                let mut driver = CsiDriver::default();
                driver.spec.attach_required = Some(false);
                driver.spec.volume_lifecycle_modes = vec!["Persistent".to_owned(), "Ephemeral".to_owned()];
                Ok(Some(driver))
            }
            fn read_attachment(&self, name: &str) -> Result<VolumeAttachment, ReadError> {
                Err(ReadError::NotFound { text: format!("volumeattachments {name:?} not found") })
            }
            fn write_expansion(&self, _: &str, _: &str, _: &ExpansionStep) -> Result<(), ReadError> {
                Ok(())
            }
            fn write_size(&self, _: &str, _: &str, _: &str) -> Result<(), ReadError> {
                Ok(())
            }
        }
        let key = |claim: &Claim| (claim.metadata.namespace.clone(), claim.metadata.name.clone());
        let claims = claims.into_iter().map(|claim| (key(&claim), claim)).collect();
        let volumes = volumes.into_iter().map(|volume| (volume.metadata.name.clone(), volume)).collect();
        VolumeClaims::new(Box::new(Store((claims, volumes))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offline::Phase;
    use crate::offline::test_store::TestStore;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Counts requests. What exists is `c`, its volume `pv`, and the driver `d`.
    struct Counting(Arc<AtomicUsize>);

    impl Counting {
        fn find<T>(&self, exists: bool, object: T) -> Result<T, ReadError> {
            self.0.fetch_add(1, Ordering::SeqCst);
            let missing = || ReadError::NotFound { text: "not found".to_owned() };
            Some(object).filter(|_| exists).ok_or_else(missing)
        }
    }

    impl VolumeClaimApi for Counting {
        fn read_claim(&self, _: &str, name: &str) -> Result<Claim, ReadError> {
            let mut found = claim("new");
            found.status.phase = if name == "c" { "Bound" } else { "Pending" }.to_owned();
            self.find(matches!(name, "c" | "waits"), found)
        }
        fn read_volume(&self, name: &str) -> Result<PersistentVolume, ReadError> {
            self.find(name == "pv", PersistentVolume::default())
        }
        fn read_secret(&self, _: &str, _: &str) -> Result<Object, ReadError> {
            self.find(false, Object::default())
        }
        fn read_driver(&self, name: &str) -> Result<Option<CsiDriver>, ReadError> {
            self.find(true, Some(CsiDriver::default()).filter(|_| name == "d"))
        }
    }

    fn claim(uid: &str) -> Claim {
        let mut claim = Claim::default();
        claim.metadata.uid = uid.to_owned();
        claim
    }

    struct Server(Arc<Mutex<Option<ReadError>>>);

    impl VolumeClaimApi for Server {
        fn read_claim(&self, _: &str, name: &str) -> Result<Claim, ReadError> {
            let mut claim = Claim::default();
            claim.metadata.name = name.to_owned();
            self.0.lock().unwrap().clone().map_or(Ok(claim), Err)
        }
        fn read_volume(&self, _: &str) -> Result<PersistentVolume, ReadError> {
            self.0.lock().unwrap().clone().map_or(Ok(PersistentVolume::default()), Err)
        }
        fn read_secret(&self, _: &str, _: &str) -> Result<Object, ReadError> {
            self.0.lock().unwrap().clone().map_or(Ok(Object::default()), Err)
        }
        fn read_driver(&self, _: &str) -> Result<Option<CsiDriver>, ReadError> {
            self.0.lock().unwrap().clone().map_or(Ok(None), Err)
        }
        fn read_attachment(&self, _: &str) -> Result<VolumeAttachment, ReadError> {
            self.0.lock().unwrap().clone().map_or(Ok(VolumeAttachment::default()), Err)
        }
        fn write_size(&self, _: &str, _: &str, _: &str) -> Result<(), ReadError> {
            self.0.lock().unwrap().clone().map_or(Ok(()), Err)
        }
    }

    #[test]
    fn last_known_objects_serve_while_the_server_is_away() {
        let state = Arc::new(Mutex::new(None));
        let claims = VolumeClaims::new(Box::new(Server(Arc::clone(&state))));
        assert_eq!(claims.claim("n", "c").unwrap().metadata.name, "c");
        claims.volume("pv").unwrap();
        assert_eq!(claims.driver("d"), Ok(None));
        let away = ReadError::Unavailable { text: "connection refused".to_owned() };
        *state.lock().unwrap() = Some(away.clone());
        assert!(claims.claim("n", "c").is_ok() && claims.volume("pv").is_ok());
        assert_eq!(claims.claim("m", "c"), Err(away.clone()));
        assert!(claims.secret("n", "s").is_err() && claims.attachment("a").is_err());
        assert_eq!((claims.driver("d"), claims.driver("e").is_err()), (Ok(None), true));
        // After its start the API server may not know yet which objects the node needs.
        *state.lock().unwrap() = Some(ReadError::Forbidden { text: "no relationship found".to_owned() });
        assert!(claims.claim("n", "c").is_err() && claims.volume("pv").is_err(), "it may be a newer one");
        assert_eq!((claims.driver("d"), claims.claim("m", "c").is_err()), (Ok(None), true));
        *state.lock().unwrap() = Some(away.clone());
        assert!(claims.claim("n", "c").is_ok() && claims.volume("pv").is_ok(), "they are not forgotten");
        // A deleted object is forgotten.
        *state.lock().unwrap() = Some(ReadError::NotFound { text: "not found".to_owned() });
        assert!(claims.claim("n", "c").is_err());
        *state.lock().unwrap() = Some(away.clone());
        assert_eq!(claims.claim("n", "c"), Err(away));
    }

    #[test]
    fn memory_of_claims_is_bounded() {
        let mut table = HashMap::new();
        for number in 0..MAX_KNOWN * 2 {
            remember(&mut table, number, ());
        }
        assert_eq!(table.len(), MAX_KNOWN);
    }

    #[test]
    fn stored_claims_need_no_request_while_the_server_is_away() {
        let (store, count) = (TestStore::new(), Arc::new(AtomicUsize::new(0)));
        store.write(&stored::claim_key("n", "x"), &claim("old"));
        store.write(&stored::volume_key("x"), &PersistentVolume::default());
        store.write(&stored::driver_key("x"), &Some(CsiDriver::default()));
        store.write(&stored::driver_key("none"), &None::<CsiDriver>);
        store.enter(Phase::Alone);
        let claims = VolumeClaims::new(Box::new(Counting(Arc::clone(&count))))
            .with_offline(Some(store.offline.clone()));
        for _ in 0..2 {
            assert_eq!(claims.claim("n", "x"), Ok(claim("old")));
            assert!(claims.volume("x").is_ok());
            assert_eq!(claims.driver("x"), Ok(Some(CsiDriver::default())));
            assert_eq!(claims.driver("none"), Ok(None));
        }
        assert_eq!(count.load(Ordering::SeqCst), 0);
        // What is not stored is requested.
        assert!(claims.claim("n", "c").is_ok() && claims.claim("m", "x").is_err());
        assert_eq!((count.load(Ordering::SeqCst), store.changes().len()), (2, 1));
        assert!(claims.claim("n", "waits").is_ok());
        assert_eq!(store.changes().len(), 0, "only a bound claim is stored");
        // The server decides again.
        store.enter(Phase::Online);
        assert!(claims.claim("n", "x").is_err() && claims.volume("x").is_err());
        let gone = [(stored::claim_key("n", "x"), None), (stored::volume_key("x"), None)];
        assert_eq!(store.changes(), gone.into());
    }

    /// An API server with one Secret and one attachment, unless it is down or has lost them.
    struct Secrets(Arc<Mutex<Option<ReadError>>>);

    impl Secrets {
        fn find<T>(&self, object: T) -> Result<T, ReadError> {
            self.0.lock().unwrap().clone().map_or(Ok(object), Err)
        }
    }

    impl VolumeClaimApi for Secrets {
        fn read_claim(&self, _: &str, _: &str) -> Result<Claim, ReadError> {
            Err(unavailable())
        }
        fn read_volume(&self, _: &str) -> Result<PersistentVolume, ReadError> {
            Err(unavailable())
        }
        fn read_secret(&self, _: &str, _: &str) -> Result<Object, ReadError> {
            self.find(Object { data: [("pw".to_owned(), b"x".to_vec())].into(), ..Object::default() })
        }
        fn read_attachment(&self, name: &str) -> Result<VolumeAttachment, ReadError> {
            let mut attachment = VolumeAttachment::default();
            attachment.metadata.name = name.to_owned();
            attachment.status.attached = name != "pending";
            attachment.status.attachment_metadata = [("disk".to_owned(), "3".to_owned())].into();
            self.find(attachment)
        }
    }

    #[test]
    fn secrets_of_volumes_are_stored_sealed_and_serve_while_the_server_is_away() {
        let (store, state) = (TestStore::new(), Arc::new(Mutex::new(None)));
        let claims = VolumeClaims::new(Box::new(Secrets(Arc::clone(&state))))
            .with_offline(Some(store.offline.clone()));
        store.enter(Phase::Online);
        let read = |name: &str| claims.secret("n", name).map(|secret| secret.data["pw"].clone());
        assert_eq!(read("s"), Ok(b"x".to_vec()));
        let key = stored::secret_key("n", "s");
        assert!(key.kind.is_sealed());
        assert_eq!(store.changes().into_keys().collect::<Vec<_>>(), std::slice::from_ref(&key));
        *state.lock().unwrap() = Some(unavailable());
        assert!(read("s").is_err(), "the server counts");
        store.enter(Phase::Held);
        assert_eq!((read("s"), read("t").is_err()), (Ok(b"x".to_vec()), true));
        store.enter(Phase::Online);
        *state.lock().unwrap() = Some(ReadError::NotFound { text: "not found".to_owned() });
        assert!(read("s").is_err());
        assert_eq!(store.changes(), [(key, None)].into());
    }

    #[test]
    fn attachment_serves_after_a_start_without_the_server_only() {
        let (store, state) = (TestStore::new(), Arc::new(Mutex::new(None)));
        let claims = VolumeClaims::new(Box::new(Secrets(Arc::clone(&state))))
            .with_offline(Some(store.offline.clone()));
        // While it is undecided, the server is not known to be away.
        assert!(claims.attachment("a").is_ok() && claims.attachment("pending").is_ok());
        assert_eq!(store.changes().into_keys().collect::<Vec<_>>(), [stored::attachment_key("a")]);
        assert!(claims.last_attachment("a").is_none());
        store.enter(Phase::Alone);
        let last = claims.last_attachment("a").unwrap();
        assert_eq!(last.status.attachment_metadata["disk"], "3");
        assert!(claims.last_attachment("pending").is_none());
        store.enter(Phase::Held);
        assert!(claims.last_attachment("a").is_none(), "a server responds");
        store.enter(Phase::Online);
        *state.lock().unwrap() = Some(ReadError::NotFound { text: "not found".to_owned() });
        assert!(claims.attachment("a").is_err() && claims.last_attachment("a").is_none());
        assert_eq!(store.changes(), [(stored::attachment_key("a"), None)].into());
    }

    #[test]
    fn claims_are_stored_and_a_server_that_does_not_know_the_node_removes_none() {
        let (store, count) = (TestStore::new(), Arc::new(AtomicUsize::new(0)));
        store.enter(Phase::Online);
        let open = || {
            VolumeClaims::new(Box::new(Counting(Arc::clone(&count))))
                .with_offline(Some(store.offline.clone()))
        };
        let claims = open();
        assert!(claims.claim("n", "c").is_ok() && claims.volume("pv").is_ok());
        assert!(claims.driver("d").is_ok_and(|driver| driver.is_some()));
        assert_eq!(claims.driver("none"), Ok(None));
        let names: Vec<_> = store.changes().into_keys().map(|key| key.name).collect();
        assert_eq!(names, ["n/c", "pv", "d", "none"]);
        store.enter(Phase::Held);
        // From memory, and after a restart of the agent from the files.
        for claims in [claims, open()] {
            assert!(claims.claim("n", "c").is_ok() && claims.volume("pv").is_ok());
            assert!(claims.driver("d").is_ok_and(|driver| driver.is_some()));
        }
        assert_eq!((count.load(Ordering::SeqCst), store.changes().len()), (4, 0));
    }

    /// A response that began before the server lost its data.
    #[test]
    fn late_absence_removes_no_claim() {
        /// The server is held while it handles the second request for an object.
        struct Lost(Arc<TestStore>, AtomicUsize);
        impl Lost {
            fn find<T>(&self, object: T, missing: Result<T, ReadError>) -> Result<T, ReadError> {
                if self.1.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
                    return Ok(object);
                }
                self.0.enter(Phase::Held);
                missing
            }
        }
        fn missing<T>() -> Result<T, ReadError> {
            Err(ReadError::NotFound { text: "not found".to_owned() })
        }
        impl VolumeClaimApi for Lost {
            fn read_claim(&self, _: &str, _: &str) -> Result<Claim, ReadError> {
                let mut found = claim("u");
                found.status.phase = "Bound".to_owned();
                self.find(found, missing())
            }
            fn read_volume(&self, _: &str) -> Result<PersistentVolume, ReadError> {
                self.find(PersistentVolume::default(), missing())
            }
            fn read_secret(&self, _: &str, _: &str) -> Result<Object, ReadError> {
                missing()
            }
            fn read_driver(&self, _: &str) -> Result<Option<CsiDriver>, ReadError> {
                self.find(Some(CsiDriver::default()), Ok(None))
            }
        }
        let store = Arc::new(TestStore::new());
        let api = Lost(Arc::clone(&store), AtomicUsize::new(0));
        let claims = VolumeClaims::new(Box::new(api)).with_offline(Some(store.offline.clone()));
        let reads: [&dyn Fn() -> bool; 3] =
            [&|| claims.claim("n", "c").is_ok(), &|| claims.volume("pv").is_ok(), &|| {
                claims.driver("d").is_ok_and(|driver| driver.is_some())
            }];
        for read in reads {
            store.enter(Phase::Online);
            assert!(read());
            assert_eq!(store.changes().len(), 1);
            assert!(read() && store.changes().is_empty());
        }
    }
}
