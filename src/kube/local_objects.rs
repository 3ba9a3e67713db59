//! ConfigMaps and Secrets from files of this node, which only static pods use.
//!
//! The thread `src-objects` of room `sources` reads the files and calls
//! [`LocalObjects::replace`]; the rooms that set pods up read the objects through
//! [`PodObjects`], as they read those of the API server.
//!
//! DIFFERS: upstream refuses static pods that name ConfigMaps or Secrets.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use super::PodDependencies;
use super::objects::{FIRST_READ, Key, Kind, Object, ObjectError, Objects, SyncPod, not_found, references};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads;

/// The local objects by kind, namespace and name.
pub type ObjectMap = BTreeMap<Key, Arc<Object>>;

/// The local objects and the static pods that name them. Clones share everything. The default has
/// no objects and never gets any.
#[derive(Clone)]
pub struct LocalObjects {
    shared: Arc<Shared>,
}

struct Shared {
    changed: SyncPod,
    /// Locked for short reads and updates only.
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// `None` until the files were read for the first time.
    objects: Option<ObjectMap>,
    /// The current problems of the files, as text.
    problems: Vec<String>,
    pods: HashMap<PodUid, References>,
    /// Dropped to wake the callers that wait for the first read.
    waiters: Option<(Sender<()>, Receiver<()>)>,
}

/// The objects that a pod names.
#[derive(Default)]
struct References {
    keys: BTreeSet<Key>,
    /// The number of changes of these objects.
    changes: u64,
}

impl fmt::Debug for LocalObjects {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.table();
        let keys: Vec<_> = table.objects.iter().flat_map(BTreeMap::keys).collect();
        write!(out, "LocalObjects({keys:?})")
    }
}

impl Default for LocalObjects {
    fn default() -> LocalObjects {
        let local = LocalObjects::new(Box::new(|_| {}));
        local.replace(ObjectMap::new(), Vec::new());
        local
    }
}

impl LocalObjects {
    /// An empty set; callers wait until [`LocalObjects::replace`] is called for the first time.
    /// `changed` receives the pods with a changed object.
    #[must_use]
    pub fn new(changed: SyncPod) -> LocalObjects {
        LocalObjects { shared: Arc::new(Shared { changed, table: Mutex::default() }) }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.shared.table.locked()
    }

    /// Replaces all objects, and reports the pods that name one that has changed.
    pub fn replace(&self, objects: ObjectMap, problems: Vec<String>) {
        let mut pods = Vec::new();
        {
            let mut guard = self.table();
            let table = &mut *guard;
            let before = table.objects.take();
            for (uid, named) in &mut table.pods {
                let changed = match &before {
                    // Pods whose wait ended before the first read.
                    None => !named.keys.is_empty(),
                    Some(before) => named.keys.iter().any(|key| before.get(key) != objects.get(key)),
                };
                if changed {
                    named.changes += 1;
                    pods.push(uid.clone());
                }
            }
            table.objects = Some(objects);
            table.problems = problems;
            table.waiters = None;
        }
        for uid in pods {
            (self.shared.changed)(&uid);
        }
    }

    /// The current problems of the files.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        self.table().problems.clone()
    }

    /// Must be called before any resource of the pod is created, and at each of its new versions.
    /// Pods that are not static never use local objects.
    pub fn register(&self, pod: &Pod) {
        if !pod.is_static() {
            return;
        }
        let keys = references(pod);
        let mut table = self.table();
        if keys.is_empty() {
            table.pods.remove(pod.uid());
        } else {
            table.pods.entry(pod.uid().clone()).or_default().keys = keys;
        }
    }

    /// Must be called when all resources of the pod are removed.
    pub fn forget(&self, uid: &PodUid) {
        self.table().pods.remove(uid);
    }

    /// The object. Waits for the first read of the files.
    fn get(&self, key: &Key, wait: Duration, stop: &StopToken) -> Result<Arc<Object>, ObjectError> {
        let until = Instant::now() + wait;
        loop {
            let word = {
                let mut table = self.table();
                if let Some(objects) = &table.objects {
                    return objects.get(key).cloned().ok_or_else(|| not_found(key));
                }
                table.waiters.get_or_insert_with(|| bounded(0)).1.clone()
            };
            let _waiting = threads::waiting("first read of the local objects");
            select_biased! {
                recv(stop.signal()) -> _ => return Err(ObjectError::Stopping),
                recv(word) -> _ => {}
                default(until.saturating_duration_since(Instant::now())) => {
                    return Err(ObjectError::NotYet { kind: key.kind });
                }
            }
        }
    }

    fn changes(&self, uid: &PodUid) -> u64 {
        self.table().pods.get(uid).map_or(0, |named| named.changes)
    }
}

/// Where a pod's ConfigMaps and Secrets come from.
#[derive(Debug, Clone, Copy)]
pub enum PodObjects<'a> {
    /// The API server.
    Api(&'a Objects),
    /// Files of this node.
    Local(&'a LocalObjects),
}

impl<'a> PodObjects<'a> {
    /// The source of the objects of `pod`: a static pod has those of the node's files only, and any
    /// other pod those of the API server only. `None` for another pod without an API server.
    #[must_use]
    pub fn for_pod(
        pod: &Pod,
        api: Option<&'a PodDependencies>,
        local: &'a LocalObjects,
    ) -> Option<PodObjects<'a>> {
        match api {
            _ if pod.is_static() => Some(PodObjects::Local(local)),
            Some(api) => Some(PodObjects::Api(&api.objects)),
            None => None,
        }
    }

    /// The object; waits up to the usual limit of pods.
    ///
    /// # Errors
    /// When the object does not exist, or was never read.
    pub fn get(self, key: &Key, stop: &StopToken) -> Result<Arc<Object>, ObjectError> {
        match self {
            PodObjects::Api(objects) => objects.get(key, FIRST_READ, stop),
            PodObjects::Local(local) => local.get(key, FIRST_READ, stop),
        }
    }

    /// Whether the object is returned without a request.
    #[must_use]
    pub fn is_cached(self, key: &Key) -> bool {
        match self {
            PodObjects::Api(objects) => objects.is_cached(key),
            PodObjects::Local(_) => true,
        }
    }

    /// A ConfigMap.
    ///
    /// # Errors
    /// See [`PodObjects::get`].
    pub fn config_map(
        self,
        namespace: &str,
        name: &str,
        stop: &StopToken,
    ) -> Result<Arc<Object>, ObjectError> {
        self.get(&Key::new(Kind::ConfigMap, namespace, name), stop)
    }

    /// A Secret.
    ///
    /// # Errors
    /// See [`PodObjects::get`].
    pub fn secret(self, namespace: &str, name: &str, stop: &StopToken) -> Result<Arc<Object>, ObjectError> {
        self.get(&Key::new(Kind::Secret, namespace, name), stop)
    }

    /// A number that increases whenever an object that the pod names changes.
    #[must_use]
    pub fn changes(self, uid: &PodUid) -> u64 {
        match self {
            PodObjects::Api(objects) => objects.changes(uid),
            PodObjects::Local(local) => local.changes(uid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::threads::{OnDeath, Stack};
    use serde_json::json;

    fn pod(uid: &str, source: &str, secret: &str) -> Pod {
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": uid,
                "annotations": {"kubernetes.io/config.source": source}},
            "spec": {"containers": [], "volumes": [{"name": "v", "secret": {"secretName": secret}}]}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
    }

    fn secret(name: &str, value: &str) -> (Key, Arc<Object>) {
        let data = [("k".to_owned(), value.as_bytes().to_vec())].into();
        (Key::new(Kind::Secret, "n", name), Arc::new(Object { data, ..Object::default() }))
    }

    #[test]
    fn pods_with_a_changed_object_are_reported() {
        let (sent, received) = bounded(100);
        let local = LocalObjects::new(Box::new(move |uid| sent.send(uid.as_str().to_owned()).unwrap()));
        for (uid, name) in [("u1", "a"), ("u2", "b"), ("u3", "c")] {
            local.register(&pod(uid, "file", name));
        }
        local.register(&pod("u4", "api", "a"));
        let reported = || -> BTreeSet<String> { received.try_iter().collect() };
        local.replace([secret("a", "1"), secret("b", "1")].into(), Vec::new());
        assert_eq!(reported(), ["u1", "u2", "u3"].map(String::from).into());
        local.replace([secret("a", "1"), secret("b", "1")].into(), vec!["x".to_owned()]);
        assert_eq!((reported(), local.problems()), (BTreeSet::new(), vec!["x".to_owned()]));
        let before = local.changes(pod("u1", "file", "a").uid());
        local.replace([secret("a", "2"), secret("c", "1")].into(), Vec::new());
        assert_eq!(reported(), ["u1", "u2", "u3"].map(String::from).into());
        assert_eq!(local.changes(pod("u1", "file", "a").uid()), before + 1);
        local.forget(pod("u1", "file", "a").uid());
        local.replace(ObjectMap::new(), Vec::new());
        assert_eq!(reported(), ["u3"].map(String::from).into());
    }

    #[test]
    fn only_static_pods_use_local_objects() {
        let local = LocalObjects::default();
        local.replace([secret("a", "1")].into(), Vec::new());
        let stop = StopToken::never();
        let objects = PodObjects::for_pod(&pod("u", "file", "a"), None, &local).unwrap();
        assert_eq!(objects.secret("n", "a", &stop).unwrap().get("k"), Some(&b"1"[..]));
        assert!(objects.secret("other", "a", &stop).unwrap_err().is_not_found());
        assert!(objects.config_map("n", "a", &stop).unwrap_err().is_not_found());
        assert!(PodObjects::for_pod(&pod("u", "api", "a"), None, &local).is_none());
    }

    #[test]
    fn caller_waits_for_the_first_read() {
        let local = LocalObjects::new(Box::new(|_| {}));
        let key = Key::new(Kind::Secret, "n", "a");
        let stop = StopToken::never();
        let early = local.get(&key, Duration::ZERO, &stop);
        assert_eq!(early, Err(ObjectError::NotYet { kind: Kind::Secret }));
        let writer = local.clone();
        let running = threads::spawn("t/writer", Stack::Small, OnDeath::Unsupervised, move |stop| {
            writer.replace([secret("a", "1")].into(), Vec::new());
            let _ = stop.wait(Duration::from_secs(60));
        });
        assert!(local.get(&key, Duration::from_secs(60), &stop).is_ok());
        drop(running);
        assert!(!format!("{local:?}").contains('1'), "content is not printed");
    }
}
