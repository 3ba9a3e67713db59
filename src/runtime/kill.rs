//! Stopping containers and pods (Go: killContainer, killPodWithSyncResult).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Sender, bounded};

use crate::cri::{CriError, ErrorClass};
use crate::model::event::{EventType, Regarding};
use crate::model::ids::{ContainerId, PodUid, SandboxId};
use crate::model::labels;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::model::runtime::{ContainerState, ListedPod, PodRuntime};
use crate::util::stop::{StopToken, Waited};
use crate::util::threads::{self, OnDeath, Stack};
use crate::util::tracing;

use super::client::Runtime;
use super::grace::{Countdown, Grace};
use super::hooks::Hook;
use super::kill_order::{self, KillOrder};
use super::start_request::regarding;

/// The minimum grace period of every container.
pub(super) const MINIMUM_GRACE_SECONDS: i64 = 2;

/// [`MINIMUM_GRACE_SECONDS`] as a time.
pub(super) const MINIMUM_GRACE: Duration = Duration::from_secs(MINIMUM_GRACE_SECONDS.unsigned_abs());

/// The pod of a container to stop.
#[derive(Clone)]
pub enum KillTarget {
    /// A pod with a known manifest.
    Pod(Pod),
    /// A pod known only from the runtime: the grace period comes from the annotations.
    Orphan(Orphan),
}

/// A pod without a manifest.
#[derive(Clone)]
pub struct Orphan {
    pub namespace: String,
    pub name: String,
    pub uid: PodUid,
    /// The container's annotations; `None`: they are read from the runtime.
    pub annotations: Option<Arc<BTreeMap<String, String>>>,
}

/// A container to stop.
#[derive(Clone)]
pub struct ContainerKill {
    /// The container's pod.
    pub target: KillTarget,
    /// Runtime id.
    pub id: ContainerId,
    /// Container name.
    pub name: String,
    /// The event's text; absent: `Stopping container <name>`.
    pub message: Option<String>,
    /// Seconds of grace in place of everything else (a pod that is stopped as a whole).
    pub grace_override: Option<i64>,
    /// The grace period of the probe that failed: it comes before the pod's own, but not
    /// before that of a deletion.
    pub probe_grace: Option<i64>,
    /// The pod's addresses, for hooks that send it a request.
    pub ips: Vec<IpAddr>,
}

impl ContainerKill {
    /// A request to stop one container with the grace period of its pod.
    #[must_use]
    pub fn for_container(pod: &Pod, id: &ContainerId, name: &str) -> ContainerKill {
        ContainerKill {
            target: KillTarget::Pod(pod.clone()),
            id: id.clone(),
            name: name.to_owned(),
            message: None,
            grace_override: None,
            probe_grace: None,
            ips: Vec::new(),
        }
    }

    /// Seconds of grace, before the minimum.
    fn grace_seconds(&self) -> i64 {
        self.grace_override
            .or_else(|| self.target.grace_seconds(self.probe_grace))
            .unwrap_or(MINIMUM_GRACE_SECONDS)
    }

    /// The hook to run before the container is stopped.
    pub(super) fn pre_stop(&self) -> Option<Hook<'_>> {
        // A pod known only from the runtime is stopped without hooks.
        let KillTarget::Pod(pod) = &self.target else { return None };
        let container = pod.all_containers().find(|container| container.name == self.name)?;
        let handler = container.lifecycle.as_ref()?.pre_stop.as_ref()?;
        Some(Hook { handler, pod, container, id: &self.id, ips: &self.ips })
    }
}

/// The known state of a pod to be stopped.
#[derive(Clone, Copy)]
pub enum KnownPod<'a> {
    /// The pod's status.
    Runtime(&'a PodRuntime),
    /// The pod in the list of all pods.
    Listed(&'a ListedPod),
}

/// A container or sandbox that did not stop.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StopFailure {
    #[error("failed to \"KillContainer\" for {name:?} with KillContainerError: \"{error}\"")]
    Container { name: String, error: CriError },
    #[error("failed to \"KillPodSandbox\" for {uid:?} with KillPodSandboxError: \"{error}\"")]
    Sandbox { uid: String, error: CriError },
    /// The thread that was to stop a container ended without a result.
    #[error("failed to \"KillContainer\" for {name:?} with KillContainerError: \"its thread panicked\"")]
    Lost { name: String },
}

/// The parts of a pod, or the container, that did not stop. The others did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KillError {
    /// At least one entry.
    pub unstopped: Vec<StopFailure>,
}

impl std::fmt::Display for KillError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.unstopped.as_slice() {
            [failure] => write!(out, "{failure}"),
            many => {
                let texts: Vec<String> = many.iter().map(ToString::to_string).collect();
                write!(out, "[{}]", texts.join(", "))
            }
        }
    }
}

impl std::error::Error for KillError {}

impl KillTarget {
    /// The requested grace period: that of the deletion, the probe or the pod.
    fn grace_seconds(&self, probe: Option<i64>) -> Option<i64> {
        match self {
            KillTarget::Pod(pod) => (pod.object().metadata.deletion_grace_period_seconds)
                .or(probe)
                .or(pod.spec().termination_grace_period_seconds),
            KillTarget::Orphan(orphan) => {
                let number = |key: &str| orphan.annotations.as_ref()?.get(key)?.parse::<i64>().ok();
                number(labels::POD_DELETION_GRACE_PERIOD)
                    .or_else(|| number(labels::POD_TERMINATION_GRACE_PERIOD))
            }
        }
    }

    fn regarding(&self, container: &str) -> Regarding {
        match self {
            KillTarget::Pod(pod) => regarding(pod, container),
            KillTarget::Orphan(orphan) => Regarding::Pod {
                namespace: orphan.namespace.clone(),
                name: orphan.name.clone(),
                uid: orphan.uid.clone(),
                field_path: format!("spec.containers{{{container}}}"),
            },
        }
    }
}

impl Runtime {
    /// Stops one container and waits for its end; one that does not exist is no error. Its preStop
    /// hook runs first. The hook's time counts against the grace period; a hook that takes longer
    /// continues until the container has ended.
    ///
    /// # Errors
    /// When the runtime did not stop it.
    pub fn kill_container(&self, kill: &ContainerKill, stop: &StopToken) -> Result<(), KillError> {
        self.stop_one(kill, None, &Grace::fixed(stop)).map_err(|error| KillError {
            unstopped: vec![StopFailure::Container { name: kill.name.clone(), error }],
        })
    }

    /// Returns a wait until a container that was to stop within this grace period counts as one that
    /// hangs: half of the request's time is over then. The grace period has begun; a shorter one is
    /// followed. The wait ends early when its token is stopped, and when `grace` is cancelled.
    pub fn overdue(&self, grace: &Grace) -> impl FnOnce(&StopToken) -> Waited + Send + use<> {
        let slack = MINIMUM_GRACE.saturating_add(self.shared.cri.stop_limit(Duration::ZERO) / 2);
        let grace = grace.clone();
        move |stop| grace.wait_until_overdue(slack, stop)
    }

    fn stop_one(
        &self,
        kill: &ContainerKill,
        order: Option<&KillOrder>,
        grace: &Grace,
    ) -> Result<(), CriError> {
        let mut kill = kill.clone();
        if let (KillTarget::Orphan(orphan), None) = (&mut kill.target, kill.grace_override)
            && orphan.annotations.is_none()
        {
            let stop = Countdown::begin(0, grace).wait().token;
            match self.shared.cri.with_stop(stop).container_status(&kill.id) {
                Ok(status) => orphan.annotations = Some(Arc::new(status.annotations)),
                Err(error) if error.is_not_found() => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        let message = kill.message.clone().unwrap_or_else(|| format!("Stopping container {}", kill.name));
        let regarding = kill.target.regarding(&kill.name);
        self.shared.events.raise(regarding, EventType::Normal, reasons::KILLING, message);
        let countdown = Countdown::begin(kill.grace_seconds(), grace);
        // A hook that still runs continues until this is dropped.
        let _hook = if countdown.left() > 0 { self.pre_stop(&kill, &countdown)? } else { None };
        if let Some(order) = order {
            wait_for_turn(order, &kill.id, &countdown)?;
        }
        loop {
            let wait = countdown.wait();
            let left = Duration::from_secs(countdown.left().max(MINIMUM_GRACE_SECONDS).unsigned_abs());
            match self.shared.cri.stop_container(&kill.id, left, &wait.token) {
                // The runtime still waits; another request ends that earlier.
                Err(error) if error.class() == ErrorClass::Stopping && countdown.is_shortened(&wait) => {}
                // A container that waits for this one waits at most for its own grace period.
                Err(error) if !error.is_not_found() => return Err(error),
                _ => break,
            }
        }
        if let Some(order) = order {
            order.ended(&kill.id);
        }
        Ok(())
    }

    /// Stops all running containers of a pod in parallel, waits for all of them, and then stops
    /// each of its sandboxes. After a failure the others are stopped nevertheless. Sidecars end
    /// after the others, the last one first, within the grace period.
    ///
    /// DIFFERS: a running container that the manifest does not name is stopped, too, with
    /// the pod's grace; upstream fails on it at each retry.
    ///
    /// # Errors
    /// All containers and sandboxes that did not stop.
    pub fn kill_pod(
        &self,
        pod: Option<&Pod>,
        observed: KnownPod<'_>,
        grace_override: Option<i64>,
        stop: &StopToken,
    ) -> Result<(), KillError> {
        self.kill_pod_within(pod, observed, grace_override, &Grace::fixed(stop), stop)
    }

    /// As [`Runtime::kill_pod`], and `grace` may be shortened meanwhile: then containers get another
    /// request to stop, with the time that is left, and preStop hooks are not started again.
    ///
    /// # Errors
    /// All containers and sandboxes that did not stop.
    pub fn kill_pod_within(
        &self,
        pod: Option<&Pod>,
        observed: KnownPod<'_>,
        grace_override: Option<i64>,
        grace: &Grace,
        stop: &StopToken,
    ) -> Result<(), KillError> {
        let (uid, mut kills, sandboxes) = plan(pod, observed, grace_override);
        let order = pod.and_then(|pod| {
            // The order is right even if no threads can be started.
            kill_order::sort(pod, &mut kills, |kill| &kill.name);
            KillOrder::new(pod, kills.iter().map(|kill| (&kill.id, kill.name.as_str())))
        });
        let mut unstopped = self.stop_all(&uid, kills, order.map(Arc::new).as_ref(), grace);
        let client = self.shared.cri.with_stop(stop.clone());
        for sandbox in sandboxes {
            match client.stop_pod_sandbox(&sandbox) {
                Err(error) if !error.is_not_found() => {
                    unstopped.push(StopFailure::Sandbox { uid: uid.to_string(), error });
                }
                _ => {}
            }
        }
        if unstopped.is_empty() { Ok(()) } else { Err(KillError { unstopped }) }
    }

    fn stop_all(
        &self,
        uid: &PodUid,
        kills: Vec<ContainerKill>,
        order: Option<&Arc<KillOrder>>,
        grace: &Grace,
    ) -> Vec<StopFailure> {
        let mut waiting: Vec<String> = kills.iter().map(|kill| kill.name.clone()).collect();
        let (tx, results) = bounded(kills.len());
        let mut threads = Vec::new();
        let count = kills.len();
        for (index, kill) in kills.into_iter().enumerate() {
            // The last one (mostly the only one) needs no thread of its own.
            if index + 1 == count {
                self.stop_and_report(&kill, order.map(Arc::as_ref), grace, &tx);
                continue;
            }
            let (runtime, kill, own_grace, tx) = (self.clone(), Arc::new(kill), grace.clone(), tx.clone());
            let (spare_kill, spare_tx) = (Arc::clone(&kill), tx.clone());
            let name = format!("kill/{}", uid.short());
            let own_order = order.map(Arc::clone);
            let parent = tracing::current();
            match threads::spawn(&name, Stack::Small, OnDeath::Unsupervised, move |_| {
                let _span = tracing::enter(parent);
                runtime.stop_and_report(&kill, own_order.as_deref(), &own_grace, &tx);
            }) {
                Ok(running) => threads.push(running),
                Err(error) => {
                    log::warn!("no thread to stop container {} in: {error}", spare_kill.name);
                    self.stop_and_report(&spare_kill, order.map(Arc::as_ref), grace, &spare_tx);
                }
            }
        }
        drop(tx);
        let mut unstopped = Vec::new();
        let _waiting = threads::waiting("containers to stop");
        // Ends when every thread has reported or ended: each call has a deadline and a stop token.
        for (name, result) in results {
            if let Some(position) = waiting.iter().position(|other| *other == name) {
                waiting.swap_remove(position);
            }
            if let Err(error) = result {
                unstopped.push(StopFailure::Container { name, error });
            }
        }
        unstopped.extend(waiting.into_iter().map(|name| StopFailure::Lost { name }));
        unstopped
    }

    fn stop_and_report(
        &self,
        kill: &ContainerKill,
        order: Option<&KillOrder>,
        grace: &Grace,
        results: &Sender<(String, Result<(), CriError>)>,
    ) {
        let result = self.stop_one(kill, order, grace);
        // The channel has the capacity for one result per container.
        let _ = results.send((kill.name.clone(), result));
    }
}

/// Waits for the containers that end before this one, for the rest of its grace period at most.
fn wait_for_turn(order: &KillOrder, id: &ContainerId, countdown: &Countdown<'_>) -> Result<(), CriError> {
    loop {
        let wait = countdown.wait();
        let Some(left) = countdown.time_left() else { return Ok(()) };
        if order.wait_for_turn(id, left, &wait.token).is_some() {
            return Ok(());
        }
        if !countdown.is_shortened(&wait) {
            return Err(CriError::Stopped { method: "StopContainer", object: id.to_string() });
        }
    }
}

/// The containers and sandboxes to stop.
fn plan(
    pod: Option<&Pod>,
    observed: KnownPod<'_>,
    grace_override: Option<i64>,
) -> (PodUid, Vec<ContainerKill>, Vec<SandboxId>) {
    let (uid, namespace, name) = match observed {
        KnownPod::Runtime(runtime) => (&runtime.uid, &runtime.namespace, &runtime.name),
        KnownPod::Listed(listed) => (&listed.uid, &listed.namespace, &listed.name),
    };
    let kill = |id: &ContainerId, container: &str, annotations: Option<&Arc<BTreeMap<String, String>>>| {
        ContainerKill {
            target: match pod {
                Some(pod) => KillTarget::Pod(pod.clone()),
                None => KillTarget::Orphan(Orphan {
                    namespace: namespace.clone(),
                    name: name.clone(),
                    uid: uid.clone(),
                    annotations: annotations.map(Arc::clone),
                }),
            },
            id: id.clone(),
            name: container.to_owned(),
            message: None,
            grace_override,
            probe_grace: None,
            ips: match observed {
                KnownPod::Runtime(runtime) => runtime.ips.clone(),
                KnownPod::Listed(_) => Vec::new(),
            },
        }
    };
    let (kills, sandboxes) = match observed {
        KnownPod::Runtime(runtime) => (
            runtime.running().map(|container| kill(&container.id, &container.name, None)).collect(),
            runtime.sandboxes.iter().map(|sandbox| sandbox.id.clone()).collect(),
        ),
        KnownPod::Listed(listed) => (
            listed
                .containers
                .iter()
                .filter(|container| container.state == ContainerState::Running)
                .map(|container| kill(&container.id, &container.name, Some(&container.annotations)))
                .collect(),
            listed.sandboxes.iter().map(|sandbox| sandbox.id.clone()).collect(),
        ),
    };
    (uid.clone(), kills, sandboxes)
}
