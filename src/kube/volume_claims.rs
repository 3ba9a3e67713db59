//! Claims and persistent volumes that pods of this node name, one request each (Go:
//! pkg/kubelet/volumemanager/populator). A node may read exactly these.
//!
//! A volume is resolved once, before it is mounted; until then each attempt sends new requests, and
//! the volume's back-off limits them. DIFFERS: while the API server is unavailable, the last known
//! objects are used, so that a pod can be set up again. Not if it forbids to read a claim or a
//! persistent volume: the name may be that of a newer one, for which the node authorizer does not know
//! the pod yet.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use super::objects::Object;
use crate::model::persistent::{Claim, PersistentVolume};
use crate::model::storage::{CsiDriver, VolumeAttachment};
use crate::util::lock::LockExt;

/// The largest number of pairs of claim and volume that are remembered.
const MAX_KNOWN: usize = 1024;

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
        VolumeClaims { shared: Arc::new(Shared { api, known: Mutex::default() }) }
    }

    /// A claim; sends a request.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn claim(&self, namespace: &str, name: &str) -> Result<Claim, ReadError> {
        let key = (namespace.to_owned(), name.to_owned());
        match self.shared.api.read_claim(namespace, name) {
            Ok(claim) => {
                remember(&mut self.known().claims, key, claim.clone());
                Ok(claim)
            }
            Err(error @ ReadError::Unavailable { .. }) => self.known().claims.get(&key).cloned().ok_or(error),
            Err(error @ ReadError::Forbidden { .. }) => Err(error),
            Err(error) => {
                self.known().claims.remove(&key);
                Err(error)
            }
        }
    }

    /// A persistent volume; sends a request.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn volume(&self, name: &str) -> Result<PersistentVolume, ReadError> {
        match self.shared.api.read_volume(name) {
            Ok(volume) => {
                remember(&mut self.known().volumes, name.to_owned(), volume.clone());
                Ok(volume)
            }
            Err(error @ ReadError::Unavailable { .. }) => {
                self.known().volumes.get(name).cloned().ok_or(error)
            }
            Err(error @ ReadError::Forbidden { .. }) => Err(error),
            Err(error) => {
                self.known().volumes.remove(name);
                Err(error)
            }
        }
    }

    /// A Secret of a persistent volume; sends a request, and is never remembered.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn secret(&self, namespace: &str, name: &str) -> Result<Object, ReadError> {
        self.shared.api.read_secret(namespace, name)
    }

    /// The object of a CSI driver, if there is one; sends a request.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn driver(&self, name: &str) -> Result<Option<CsiDriver>, ReadError> {
        match self.shared.api.read_driver(name) {
            Ok(driver) => {
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
        self.shared.api.read_attachment(name)
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

    fn known(&self) -> MutexGuard<'_, KnownObjects> {
        self.shared.known.locked()
    }
}

/// Keeps the table small: when it is full, an arbitrary entry leaves it.
fn remember<K: std::hash::Hash + Eq + Clone, V>(table: &mut HashMap<K, V>, key: K, value: V) {
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
}
