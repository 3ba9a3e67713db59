//! What the thread of one probe owns: the probe's state, and which instance it checks. Pure:
//! times come in as arguments.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use super::check::ProbeRun;
use super::container::ContainerIndex;
use super::permits::{EXEC_WEIGHT, NETWORK_WEIGHT};
use super::state::{InstanceOrigin, InstanceState, Kind, Outcome, ProbeSettings, State};
use super::verdicts::Verdicts;
use crate::model::ids::ContainerId;
use crate::model::pod::Pod;
use crate::model::verdict::ProbeVerdict;
use crate::util::stop::StopToken;

/// The newest instance of a container.
#[derive(Debug, Clone)]
pub(super) struct Instance {
    pub(super) id: ContainerId,
    pub(super) origin: InstanceOrigin,
    /// When it started, if it runs.
    pub(super) running_since: Option<Instant>,
    pub(super) verdicts: Arc<Verdicts>,
    /// Ends with the instance or its pod: a check of it is aborted.
    pub(super) stop: StopToken,
}

/// What a probe checks.
#[derive(Debug, Clone, Default)]
pub(super) struct Target {
    pub(super) instance: Option<Instance>,
    /// The pod's address; `None` for a pod on the node's network whose status has none.
    pub(super) ip: Option<IpAddr>,
    /// No further checks.
    pub(super) ended: bool,
}

impl Target {
    pub(super) fn is_same(&self, other: &Target) -> bool {
        let key = |target: &Target| {
            (target.instance.as_ref().and_then(|instance| instance.running_since), target.ip, target.ended)
        };
        self.has_same_instance(other) && key(self) == key(other)
    }

    /// Whether both have the same instance. An instance that an inspection missed is another one
    /// afterwards: its verdicts begin again.
    fn has_same_instance(&self, other: &Target) -> bool {
        match (&self.instance, &other.instance) {
            (Some(first), Some(second)) => Arc::ptr_eq(&first.verdicts, &second.verdicts),
            (None, None) => true,
            _ => false,
        }
    }
}

/// What a probe's thread receives. An empty one makes it read the verdicts again.
#[derive(Debug, Default)]
pub(super) struct Update {
    pub(super) target: Option<Target>,
    /// Check as soon as possible.
    pub(super) trigger: bool,
}

impl Update {
    /// The merge rule of the mailbox.
    pub(super) fn merge(&mut self, newer: Update) {
        self.target = newer.target.or(self.target.take());
        self.trigger |= newer.trigger;
    }
}

/// The effect of a check's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// The check was about an earlier instance.
    Stale,
    Counted,
    /// It changed the verdict to this: the pod's worker has to act.
    Changed(ProbeVerdict),
}

/// One probe of one container.
pub(super) struct Probe {
    pub(super) kind: Kind,
    pub(super) container: ContainerIndex,
    pub(super) pod: Pod,
    state: State,
    target: Target,
}

impl Probe {
    pub(super) fn new(
        kind: Kind,
        container: ContainerIndex,
        pod: Pod,
        timing: ProbeSettings,
        first_tick: Instant,
    ) -> Probe {
        Probe { kind, container, pod, state: State::new(kind, timing, first_tick), target: Target::default() }
    }

    pub(super) fn update(&mut self, update: Update, now: Instant) {
        if let Some(target) = update.target {
            let is_new = !target.has_same_instance(&self.target);
            self.target = target;
            if let Some(instance) = self.target.instance.as_ref().filter(|_| is_new) {
                self.state.instance(instance.origin);
            }
            if self.target.ended {
                self.state.end();
            }
        }
        let startup = self.startup();
        self.state.schedule(startup, now);
        if update.trigger {
            self.state.trigger(startup, now);
        }
    }

    /// When the next check is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.state.due()
    }

    /// Whether a check is due at `now`.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.target.instance.is_some() && self.state.due().is_some_and(|due| due <= now)
    }

    /// Whether there is no check before another update from the registry. A probe that waits for
    /// its container's startup probe is not finished: it waits for the result of that probe.
    pub(super) fn is_finished(&self) -> bool {
        let runs = self.startup().running_since.is_some();
        self.state.due().is_none() && (!runs || self.state.is_held())
    }

    /// Weight of a check for [`super::permits`].
    pub(super) fn weight(&self) -> u32 {
        let probe = self.container.resolve(&self.pod).and_then(|container| self.kind.find_probe(container));
        if probe.is_some_and(|probe| probe.exec.is_some()) { EXEC_WEIGHT } else { NETWORK_WEIGHT }
    }

    /// Begins the check that is due at `now`.
    pub(super) fn begin(&mut self, now: Instant) -> Option<ProbeRun> {
        self.state.due().filter(|due| *due <= now)?;
        let instance = self.target.instance.as_ref()?;
        self.state.begin(now);
        Some(ProbeRun {
            kind: self.kind,
            container: self.container,
            id: instance.id.clone(),
            pod: self.pod.clone(),
            ip: self.target.ip,
            stop: instance.stop.clone(),
        })
    }

    /// Counts the result of a check. A check without an `outcome` does not count.
    pub(super) fn finish(&mut self, id: &ContainerId, outcome: Option<Outcome>, now: Instant) -> Effect {
        let Some(instance) = self.target.instance.as_ref().filter(|instance| instance.id == *id) else {
            return Effect::Stale;
        };
        let changed = self.state.finish(outcome, self.startup(), now);
        let verdict = self.state.verdict();
        instance.verdicts.set(self.kind, verdict);
        self.state.schedule(self.startup(), now);
        if changed { Effect::Changed(verdict) } else { Effect::Counted }
    }

    fn startup(&self) -> InstanceState {
        let instance = self.target.instance.as_ref();
        InstanceState {
            running_since: instance.and_then(|instance| instance.running_since),
            started: instance.is_some_and(|instance| instance.verdicts.has_started()),
        }
    }
}
