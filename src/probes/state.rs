//! One probe of one container, without clock, thread or network (Go: prober/worker.go).
//! Decides when it runs, what a result means, and what delays it. Times are arguments. The ticks of
//! a probe start when the probe is made and keep their period across restarts of the container; a
//! trigger restarts the period.

use std::time::{Duration, Instant};

use crate::model::api::{Container, Probe};
use crate::model::verdict::ProbeVerdict;

/// Triggered runs of one probe are at least this far apart.
///
/// DIFFERS: upstream runs at every trigger, and each status of a pod that is not ready is a
/// trigger, so a start in several steps reaches the failure threshold immediately.
const TRIGGER_GAP: Duration = Duration::from_secs(1);

/// What a probe is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Whether the container has started; the other two wait for it.
    Startup,
    /// Whether it is to be killed.
    Liveness,
    /// Whether it can take traffic.
    Readiness,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 3] = [Kind::Startup, Kind::Liveness, Kind::Readiness];

    /// Its name in events and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Startup => "Startup",
            Kind::Liveness => "Liveness",
            Kind::Readiness => "Readiness",
        }
    }

    /// The probe of this kind that `container` has.
    #[must_use]
    pub fn find_probe(self, container: &Container) -> Option<&Probe> {
        match self {
            Kind::Startup => container.startup_probe.as_ref(),
            Kind::Liveness => container.liveness_probe.as_ref(),
            Kind::Readiness => container.readiness_probe.as_ref(),
        }
    }
}

/// The outcome of a check with a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It passed.
    Success,
    /// It did not.
    Failure,
}

/// The settings of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProbeSettings {
    pub(super) initial_delay: Duration,
    pub(super) period: Duration,
    pub(super) success_threshold: u32,
    pub(super) failure_threshold: u32,
}

impl ProbeSettings {
    /// The numbers of `probe`, with the API's defaults for what is absent or zero.
    pub(super) fn from_probe(probe: &Probe) -> ProbeSettings {
        let number = |value: Option<i32>, absent: u32| {
            value.and_then(|value| u32::try_from(value).ok()).filter(|value| *value > 0).unwrap_or(absent)
        };
        ProbeSettings {
            initial_delay: Duration::from_secs(number(probe.initial_delay_seconds, 0).into()),
            period: Duration::from_secs(number(probe.period_seconds, 10).into()),
            success_threshold: number(probe.success_threshold, 1),
            failure_threshold: number(probe.failure_threshold, 3),
        }
    }
}

/// How a container instance became known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InstanceOrigin {
    /// This agent saw it start.
    Fresh,
    /// It ran before this agent started.
    Adopted,
    /// The same, and its start was known to be complete.
    AdoptedStarted,
}

impl InstanceOrigin {
    /// The verdict before the first result.
    pub(super) fn first_verdict(self, kind: Kind) -> ProbeVerdict {
        match (self, kind) {
            (InstanceOrigin::Fresh, _) => ProbeVerdict::Pending,
            (InstanceOrigin::AdoptedStarted, Kind::Startup) => ProbeVerdict::Success,
            (InstanceOrigin::Adopted | InstanceOrigin::AdoptedStarted, _) => ProbeVerdict::Assumed,
        }
    }
}

/// Whether the container runs and has started, on which its other probes depend.
#[derive(Debug, Clone, Copy)]
pub(super) struct InstanceState {
    /// When the newest instance started, if it runs.
    pub(super) running_since: Option<Instant>,
    /// Whether its startup probe, if any, has passed.
    pub(super) started: bool,
}

#[derive(Debug)]
pub(super) struct State {
    kind: Kind,
    timing: ProbeSettings,
    verdict: ProbeVerdict,
    /// No runs until the next instance.
    held: bool,
    /// No runs any more.
    ended: bool,
    last: Option<Outcome>,
    /// How often `last` was repeated without a change, over all instances.
    run: u32,
    /// The last tick; the first one until it has passed.
    tick: Instant,
    due: Option<Instant>,
    last_start: Option<Instant>,
    checking: bool,
    /// Triggered during a check.
    again: bool,
}

impl State {
    /// A probe whose first tick is at `first`.
    pub(super) fn new(kind: Kind, timing: ProbeSettings, first: Instant) -> State {
        State {
            kind,
            timing,
            verdict: ProbeVerdict::Pending,
            held: false,
            ended: false,
            last: None,
            run: 0,
            tick: first,
            due: None,
            last_start: None,
            checking: false,
            again: false,
        }
    }

    pub(super) fn verdict(&self) -> ProbeVerdict {
        self.verdict
    }

    /// Whether it does not run before the next instance.
    pub(super) fn is_held(&self) -> bool {
        self.held || self.ended
    }

    /// When it is to run next.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// A new instance: the verdict on the earlier one is void. The count of equal results
    /// continues, as upstream. A check of the older instance that is in progress does not count.
    pub(super) fn instance(&mut self, origin: InstanceOrigin) {
        self.verdict = origin.first_verdict(self.kind);
        self.held = self.verdict == ProbeVerdict::Success;
        self.checking = false;
        self.again = false;
        self.due = None;
    }

    /// No further checks. The verdict stays, since the status may still show the container.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.due = None;
    }

    /// Sets or clears the time of the next run after anything may have changed.
    pub(super) fn schedule(&mut self, startup: InstanceState, now: Instant) {
        let waits = self.held || self.ended || (self.kind != Kind::Startup && !startup.started);
        let Some(since) = startup.running_since.filter(|_| !waits) else {
            self.due = None;
            return;
        };
        if self.checking || self.due.is_some() {
            return;
        }
        let earliest = now.max(since + self.timing.initial_delay);
        self.due = Some(self.tick_from(earliest));
    }

    /// Requests a run as soon as possible, if it may run.
    ///
    /// DIFFERS: during the initial delay it runs at the delay's end. Upstream skips such a
    /// run and restarts the period.
    pub(super) fn trigger(&mut self, startup: InstanceState, now: Instant) {
        // An adopted instance that stays in service runs at its first tick, which is spread.
        let spread = self.verdict == ProbeVerdict::Assumed && self.last_start.is_none() && self.tick > now;
        if self.verdict == ProbeVerdict::Success || spread {
            return;
        }
        if self.checking {
            self.again = true;
            return;
        }
        let (Some(due), Some(since)) = (self.due, startup.running_since) else { return };
        let earliest = now.max(since + self.timing.initial_delay);
        let spaced = self.last_start.map_or(earliest, |last| earliest.max(last + TRIGGER_GAP));
        if spaced < due {
            self.due = Some(spaced);
            self.tick = spaced;
        }
    }

    pub(super) fn begin(&mut self, now: Instant) {
        self.due = None;
        self.checking = true;
        self.last_start = Some(now);
        // The last tick that has passed: ticks that a long check missed do not accumulate.
        let next = self.tick_from(now);
        self.tick = if next > now { next.checked_sub(self.timing.period).unwrap_or(now) } else { next };
    }

    /// A run on the present instance ended; without an `outcome` it does not count. Returns whether
    /// the verdict changed.
    pub(super) fn finish(&mut self, outcome: Option<Outcome>, startup: InstanceState, now: Instant) -> bool {
        self.checking = false;
        let changed = outcome.is_some_and(|outcome| self.count(outcome));
        let waits = self.held || self.ended || startup.running_since.is_none();
        if !waits && (self.kind == Kind::Startup || startup.started) {
            // If a tick has passed meanwhile, the next run is due now.
            self.due = Some((self.tick + self.timing.period).max(now));
        }
        if std::mem::take(&mut self.again) {
            self.trigger(startup, now);
        }
        changed
    }

    fn count(&mut self, outcome: Outcome) -> bool {
        self.run = if self.last == Some(outcome) { self.run.saturating_add(1) } else { 1 };
        self.last = Some(outcome);
        let (needed, verdict) = match outcome {
            Outcome::Success => (self.timing.success_threshold, ProbeVerdict::Success),
            Outcome::Failure => (self.timing.failure_threshold, ProbeVerdict::Failure),
        };
        if self.run < needed {
            // An adopted instance that does not respond may never have started.
            let doubt = self.kind == Kind::Startup && self.verdict == ProbeVerdict::Assumed;
            if doubt {
                self.verdict = ProbeVerdict::Pending;
            }
            return doubt;
        }
        // The result may equal the state that an undecided probe already shows.
        let same = match (self.verdict, self.kind) {
            (ProbeVerdict::Pending, Kind::Readiness) => verdict == ProbeVerdict::Failure,
            (ProbeVerdict::Pending | ProbeVerdict::Assumed, Kind::Liveness) => {
                verdict == ProbeVerdict::Success
            }
            (before, _) => before == verdict,
        };
        self.verdict = verdict;
        if self.kind == Kind::Startup || (self.kind == Kind::Liveness && outcome == Outcome::Failure) {
            self.held = true;
            self.run = 0;
        }
        !same
    }

    /// The first tick at or after `earliest`.
    fn tick_from(&self, earliest: Instant) -> Instant {
        let behind = earliest.saturating_duration_since(self.tick).as_nanos();
        let period = self.timing.period.as_nanos().max(1);
        let ticks = u32::try_from(behind.div_ceil(period)).unwrap_or(u32::MAX);
        self.tick + self.timing.period.saturating_mul(ticks)
    }
}

#[cfg(test)]
mod tests;
