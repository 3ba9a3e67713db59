//! RuntimeClasses: the handler of the runtime for a pod's class (Go: pkg/kubelet/runtimeclass).
//!
//! DIFFERS: upstream watches all classes. Few pods name one, and a handler never changes while its
//! class exists: a class is read when a sandbox needs it, and cached for a minute.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::stored;
use crate::offline::Offline;
use crate::util::lock::LockExt;

/// How long a cached class is used without another request.
const FRESH: Duration = Duration::from_secs(60);

/// The fields of a RuntimeClass that are read.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub struct Class {
    handler: String,
}

/// Why there is no handler.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClassError {
    /// The class does not exist.
    #[error("runtimeclass.node.k8s.io {0:?} not found")]
    NotFound(String),
    /// The API server did not respond, or with an error.
    #[error("failed to lookup RuntimeClass {name}: {reason}")]
    Unavailable {
        /// The name of the class.
        name: String,
        /// The error of the request.
        reason: String,
    },
}

/// The requests to the API server; a trait so that tests need no server.
pub trait ClassApi: Send + Sync {
    /// Reads a class.
    ///
    /// # Errors
    /// See [`ClassError`].
    fn read_class(&self, name: &str) -> Result<Class, ClassError>;
}

/// The classes that pods of this node have named. Clones share them.
#[derive(Clone)]
pub struct RuntimeClasses {
    shared: Arc<Shared>,
}

struct Shared {
    api: Box<dyn ClassApi>,
    offline: OnceLock<Offline>,
    /// Handler and age by class; at most all classes of the cluster. Not locked during a request.
    known: Mutex<HashMap<String, (String, Instant)>>,
}

impl fmt::Debug for RuntimeClasses {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("RuntimeClasses")
    }
}

impl RuntimeClasses {
    /// An empty cache.
    #[must_use]
    pub fn new(api: Box<dyn ClassApi>) -> RuntimeClasses {
        let shared = Shared { api, offline: OnceLock::new(), known: Mutex::default() };
        RuntimeClasses { shared: Arc::new(shared) }
    }

    /// The classes are stored, and stored ones serve while the API server does not count.
    #[must_use]
    pub fn with_offline(self, offline: Option<Offline>) -> RuntimeClasses {
        if let Some(offline) = offline {
            let _ = self.shared.offline.set(offline);
        }
        self
    }

    /// The handler of a class, for a new sandbox. May send a request; while the API server is
    /// unavailable, the cached handler is used.
    ///
    /// # Errors
    /// See [`ClassError`].
    pub fn handler(&self, name: &str) -> Result<String, ClassError> {
        self.handler_at(name, Instant::now())
    }

    /// The cached handler of a class, whatever its age; a request is sent only if there is none.
    ///
    /// # Errors
    /// See [`ClassError`].
    pub fn known_handler(&self, name: &str) -> Result<String, ClassError> {
        let known = self.known().get(name).map(|(handler, _)| handler.clone());
        known.map_or_else(|| self.handler(name), Ok)
    }

    fn handler_at(&self, name: &str, now: Instant) -> Result<String, ClassError> {
        let known = self.known().get(name).cloned();
        if let Some((handler, read)) = &known
            && now.saturating_duration_since(*read) < FRESH
        {
            return Ok(handler.clone());
        }
        if let Some(handler) = self.instead(name, known.as_ref(), now) {
            return Ok(handler);
        }
        let offline = self.shared.offline.get();
        match (self.shared.api.read_class(name), known) {
            (Ok(class), _) => {
                stored::put(offline, || stored::class_key(name), &class);
                self.known().insert(name.to_owned(), (class.handler.clone(), now));
                Ok(class.handler)
            }
            (Err(ClassError::Unavailable { reason, .. }), Some((handler, _))) => {
                log::debug!("RuntimeClass {name}: {reason}; its last known handler is used");
                Ok(handler)
            }
            // The API server has lost its data since the request.
            (Err(_), Some((handler, _))) if !stored::server_counts(offline) => Ok(handler),
            (Err(error @ ClassError::Unavailable { .. }), None) => Err(error),
            (Err(error), _) => {
                self.known().remove(name);
                stored::remove(offline, || stored::class_key(name));
                Err(error)
            }
        }
    }

    /// The handler to use without a request, while the API server does not count.
    fn instead(&self, name: &str, known: Option<&(String, Instant)>, now: Instant) -> Option<String> {
        let offline = self.shared.offline.get();
        if stored::server_counts(offline) {
            return None;
        }
        if let Some((handler, _)) = known {
            return Some(handler.clone());
        }
        let class: Class = stored::instead(offline, || stored::class_key(name))?;
        self.known().insert(name.to_owned(), (class.handler.clone(), now));
        Some(class.handler)
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, (String, Instant)>> {
        self.shared.known.locked()
    }
}

#[cfg(test)]
impl RuntimeClasses {
    /// No class exists.
    pub(crate) fn none() -> RuntimeClasses {
        struct NoClasses;
        impl ClassApi for NoClasses {
            fn read_class(&self, name: &str) -> Result<Class, ClassError> {
                Err(ClassError::NotFound(name.to_owned()))
            }
        }
        RuntimeClasses::new(Box::new(NoClasses))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offline::Phase;
    use crate::offline::test_store::TestStore;

    /// The server's next response, and the number of requests.
    struct Server(Arc<Mutex<(Result<&'static str, bool>, u32)>>);

    impl ClassApi for Server {
        fn read_class(&self, name: &str) -> Result<Class, ClassError> {
            let mut state = self.0.lock().unwrap();
            state.1 += 1;
            match state.0 {
                Ok(handler) => Ok(Class { handler: handler.to_owned() }),
                Err(true) => Err(ClassError::NotFound(name.to_owned())),
                Err(false) => Err(ClassError::Unavailable {
                    name: name.to_owned(),
                    reason: "connection refused".to_owned(),
                }),
            }
        }
    }

    #[test]
    fn a_class_is_read_when_needed_and_cached_for_a_minute() {
        let state = Arc::new(Mutex::new((Err(true), 0)));
        let classes = RuntimeClasses::new(Box::new(Server(Arc::clone(&state))));
        let start = Instant::now();
        let get = |second: u64| classes.handler_at("gvisor", start + Duration::from_secs(second));
        let missing = ClassError::NotFound("gvisor".to_owned());
        assert_eq!(missing.to_string(), "runtimeclass.node.k8s.io \"gvisor\" not found");
        // There is a request for a missing class each time: it may be created at any moment.
        assert_eq!(get(0), Err(missing.clone()));
        assert_eq!(get(1), Err(missing.clone()));
        state.lock().unwrap().0 = Err(false);
        assert!(matches!(get(2), Err(ClassError::Unavailable { .. })));
        state.lock().unwrap().0 = Ok("runsc");
        assert_eq!(get(3).as_deref(), Ok("runsc"));
        assert_eq!(get(62).as_deref(), Ok("runsc"));
        assert_eq!(state.lock().unwrap().1, 4);
        // While the server is unavailable, the cache is used. After a deletion it is not.
        state.lock().unwrap().0 = Err(false);
        assert_eq!(get(64).as_deref(), Ok("runsc"));
        assert_eq!(classes.known_handler("gvisor").as_deref(), Ok("runsc"));
        state.lock().unwrap().0 = Err(true);
        assert_eq!(get(65), Err(missing));
        assert!(classes.known_handler("gvisor").is_err());
    }

    #[test]
    fn stored_class_needs_no_request_while_the_server_is_away() {
        let (store, state) = (TestStore::new(), Arc::new(Mutex::new((Ok("runsc"), 0))));
        let classes = || {
            RuntimeClasses::new(Box::new(Server(Arc::clone(&state))))
                .with_offline(Some(store.offline.clone()))
        };
        let start = Instant::now();
        let get = |classes: &RuntimeClasses, second: u64| {
            classes.handler_at("gvisor", start + Duration::from_secs(second))
        };
        store.write(&stored::class_key("gvisor"), &Class { handler: "former".to_owned() });
        store.enter(Phase::Alone);
        let alone = classes();
        for second in [0, 100] {
            assert_eq!(get(&alone, second).as_deref(), Ok("former"));
        }
        assert_eq!(state.lock().unwrap().1, 0);
        assert!(store.changes().is_empty());

        store.enter(Phase::Online);
        let online = classes();
        assert_eq!((get(&online, 0).as_deref(), get(&online, 1).as_deref()), (Ok("runsc"), Ok("runsc")));
        let body = r#"{"handler":"runsc"}"#.to_owned();
        assert_eq!(store.changes(), [(stored::class_key("gvisor"), Some(body))].into());
        // A server that does not know the node removes nothing.
        state.lock().unwrap().0 = Err(true);
        store.enter(Phase::Held);
        assert_eq!(get(&online, 100).as_deref(), Ok("runsc"));
        assert_eq!(get(&classes(), 100).as_deref(), Ok("runsc"));
        assert!(store.changes().is_empty() && state.lock().unwrap().1 == 1);
        store.enter(Phase::Online);
        assert!(get(&online, 200).is_err());
        assert_eq!(store.changes(), [(stored::class_key("gvisor"), None)].into());
    }
}
