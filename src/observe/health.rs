//! Whether the runtime is ready (Go: pkg/kubelet/runtime.go).

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::cri::{Handler, RuntimeFeatures, RuntimeVersion};
use crate::util::lock::LockExt;

/// Without a status of a ready runtime for this long, the runtime counts as down.
const STATUS_LIMIT: Duration = Duration::from_secs(30);
/// Without a full list for this long, the `observe` thread counts as stuck.
const RELIST_LIMIT: Duration = Duration::from_secs(180);

/// The health at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeHealth {
    /// Why pods cannot be synced; empty if they can.
    pub runtime: Vec<String>,
    /// Why the network is not ready: pods with their own network cannot start.
    pub network: Option<String>,
}

impl RuntimeHealth {
    /// Whether pods can be synced at all.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.runtime.is_empty()
    }
}

#[derive(Debug, Clone)]
struct RuntimeFacts {
    last_ok: Option<Instant>,
    not_ready: Option<String>,
    unreachable: Option<String>,
    network: Option<String>,
    version: Option<RuntimeVersion>,
    features: Option<RuntimeFeatures>,
    handlers: Arc<[Handler]>,
}

/// What the health is computed from. Clones share it.
#[derive(Clone)]
pub(super) struct Health {
    facts: Arc<Mutex<RuntimeFacts>>,
}

impl Default for Health {
    fn default() -> Self {
        Health {
            facts: Arc::new(Mutex::new(RuntimeFacts {
                last_ok: None,
                not_ready: None,
                unreachable: None,
                network: Some("network state unknown".to_owned()),
                version: None,
                features: None,
                handlers: Arc::default(),
            })),
        }
    }
}

impl Health {
    /// The runtime has reported its status.
    pub(super) fn set_status(&self, not_ready: Option<String>, network: Option<String>, now: Instant) {
        let mut facts = self.facts.locked();
        if not_ready.is_none() {
            facts.last_ok = Some(now);
        }
        facts.not_ready = not_ready;
        facts.network = network;
        facts.unreachable = None;
    }

    /// The status call failed. It does not count before [`STATUS_LIMIT`] has passed.
    pub(super) fn set_unreachable(&self, error: String) {
        self.facts.locked().unreachable = Some(error);
    }

    pub(super) fn set_handlers(&self, handlers: Vec<Handler>) {
        let mut facts = self.facts.locked();
        if *facts.handlers != *handlers {
            facts.handlers = handlers.into();
        }
    }

    pub(super) fn handlers(&self) -> Arc<[Handler]> {
        Arc::clone(&self.facts.locked().handlers)
    }

    /// A handler by name; the default handler's name is empty.
    pub(super) fn handler(&self, name: &str) -> Option<Handler> {
        let facts = self.facts.locked();
        facts.handlers.iter().find(|handler| handler.name == name).cloned()
    }

    pub(super) fn set_version(&self, version: RuntimeVersion) {
        self.facts.locked().version = Some(version);
    }

    /// `None`: the runtime is too old to report its features and has none of them.
    pub(super) fn set_features(&self, features: Option<RuntimeFeatures>) {
        self.facts.locked().features = Some(features.unwrap_or_default());
    }

    /// `None` until the runtime has responded.
    pub(super) fn features(&self) -> Option<RuntimeFeatures> {
        self.facts.locked().features
    }

    /// `None` until the runtime has responded.
    pub(super) fn version(&self) -> Option<RuntimeVersion> {
        self.facts.locked().version.clone()
    }

    /// Whether the last status call failed.
    pub(super) fn is_unreachable(&self) -> bool {
        self.facts.locked().unreachable.is_some()
    }

    pub(super) fn get(&self, last_relist: Option<Instant>, now: Instant) -> RuntimeHealth {
        let facts = self.facts.locked().clone();
        compute(&facts, last_relist, now)
    }
}

fn compute(facts: &RuntimeFacts, last_relist: Option<Instant>, now: Instant) -> RuntimeHealth {
    let mut runtime = Vec::new();
    match (facts.last_ok, &facts.not_ready) {
        (_, Some(reason)) => runtime.push(reason.clone()),
        (None, None) => {
            runtime.push("container runtime status check may not have completed yet".to_owned());
        }
        (Some(ok), None) if now.saturating_duration_since(ok) > STATUS_LIMIT => {
            runtime.push("container runtime is down".to_owned());
        }
        _ => {}
    }
    match last_relist {
        None => runtime.push("PLEG is not healthy: pleg has yet to be successful".to_owned()),
        Some(relisted_at) if now.saturating_duration_since(relisted_at) > RELIST_LIMIT => {
            let ago = now.saturating_duration_since(relisted_at).as_secs();
            runtime.push(format!(
                "PLEG is not healthy: pleg was last seen active {ago}s ago; threshold is 3m0s"
            ));
        }
        Some(_) => {}
    }
    if !runtime.is_empty()
        && let Some(error) = &facts.unreachable
    {
        runtime.push(error.clone());
    }
    RuntimeHealth { runtime, network: facts.network.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_follows_status_lists_and_outages() {
        let now = Instant::now();
        let health = Health::default();
        assert_eq!(health.get(None, now).runtime.len(), 2);
        assert_eq!(health.get(None, now).network.as_deref(), Some("network state unknown"));
        health.set_status(None, Some("cni config uninitialized".into()), now);
        let computed = health.get(Some(now), now);
        assert!(computed.is_usable());
        assert_eq!(computed.network.as_deref(), Some("cni config uninitialized"));
        health.set_unreachable("connection refused".into());
        assert!(health.get(Some(now), now + Duration::from_secs(30)).is_usable());
        let later = health.get(Some(now), now + Duration::from_secs(31));
        assert_eq!(later.runtime, ["container runtime is down", "connection refused"]);
        health.set_status(None, None, now + Duration::from_secs(200));
        let stuck = health.get(Some(now), now + Duration::from_secs(200));
        assert_eq!(
            stuck.runtime,
            ["PLEG is not healthy: pleg was last seen active 200s ago; threshold is 3m0s"]
        );
        health.set_status(Some("shutting down".into()), None, now);
        assert_eq!(health.get(Some(now), now).runtime, ["shutting down"]);
    }
}
