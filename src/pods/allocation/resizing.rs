//! The state of a pod's resize, and its conditions.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::resources;
use crate::model::api::{Container, PodCondition};
use crate::model::meta::Time;
use crate::model::pod::Pod;
use crate::model::reasons;

const PENDING: &str = "PodResizePending";
const IN_PROGRESS: &str = "PodResizeInProgress";

/// Why a pod does not get the resources that it requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PendingReason {
    /// The node lacks the resources now.
    Deferred,
    /// This node can never grant the resources.
    Infeasible,
}

impl PendingReason {
    /// The reason of the condition.
    pub fn as_str(self) -> &'static str {
        match self {
            PendingReason::Deferred => "Deferred",
            PendingReason::Infeasible => "Infeasible",
        }
    }

    /// The reason of the event.
    pub fn event(self) -> &'static str {
        match self {
            PendingReason::Deferred => reasons::RESIZE_DEFERRED,
            PendingReason::Infeasible => reasons::RESIZE_INFEASIBLE,
        }
    }
}

/// What is new about a resize that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PendingChange {
    /// Nothing.
    Nothing,
    /// Only the message, such as how much is in use: no event reports it.
    Message,
    /// The reason, or the version of the pod.
    Reason,
}

/// What ended the wait of a deferred resize, as a label of the metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resolution {
    /// The node has the resources now.
    Accepted,
    /// The pod requests what it has.
    Reverted,
    /// The pod has ended.
    Terminated,
}

impl Resolution {
    /// The label of the metric.
    pub fn as_str(self) -> &'static str {
        match self {
            Resolution::Accepted => "accepted",
            Resolution::Reverted => "reverted",
            Resolution::Terminated => "terminated",
        }
    }
}

/// The range of a pod's priority, as a label of metrics (Go: pkg/kubelet/metrics
/// `GetPriorityBucketLabel`).
#[must_use]
pub fn priority_bucket(pod: &Pod) -> &'static str {
    match pod.spec().priority.unwrap_or(0) {
        2_000_000_000.. => "system-critical",
        100_000.. => "high",
        1.. => "medium",
        0 => "normal",
        -999.. => "low",
        _ => "very-low",
    }
}

/// The label of pods that are not known any more.
pub(super) const UNKNOWN_PRIORITY: &str = "unknown";

/// The content of a condition: only its presence, its reason and its message matter.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ConditionContent {
    reason: Option<String>,
    message: Option<String>,
    generation: Option<i64>,
    /// When the condition was set.
    probe_time: Option<Time>,
    /// When it got its reason.
    since: Option<Timestamp>,
}

impl ConditionContent {
    fn new(pod: &Pod, reason: &str, message: &str) -> ConditionContent {
        let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let now = Timestamp::now();
        ConditionContent {
            reason: text(reason),
            message: text(message),
            generation: generation(pod),
            probe_time: Some(Time(now)),
            since: Some(now),
        }
    }

    /// Whether both have the same content, apart from the times.
    fn repeats(&self, other: Option<&ConditionContent>) -> bool {
        let content = |condition: &ConditionContent| {
            (condition.reason.clone(), condition.message.clone(), condition.generation)
        };
        other.is_some_and(|other| content(self) == content(other))
    }

    fn from_status(pod: &Pod, kind: &str) -> Option<ConditionContent> {
        let conditions = pod.object().status.as_ref()?.conditions.as_ref()?;
        let found =
            conditions.iter().find(|condition| condition.type_ == kind && condition.status == "True")?;
        Some(ConditionContent {
            reason: found.reason.clone(),
            message: found.message.clone(),
            generation: found.observed_generation,
            probe_time: found.last_probe_time.clone(),
            since: found.last_transition_time.as_ref().map(|time| time.0),
        })
    }

    fn condition(&self, kind: &str) -> PodCondition {
        PodCondition {
            type_: kind.to_owned(),
            status: "True".to_owned(),
            reason: self.reason.clone(),
            message: self.message.clone(),
            observed_generation: self.generation,
            last_transition_time: None,
            last_probe_time: self.probe_time.clone(),
        }
    }
}

fn generation(pod: &Pod) -> Option<i64> {
    pod.object().metadata.generation.filter(|generation| *generation > 0)
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Resizing {
    pending: Option<ConditionContent>,
    in_progress: Option<ConditionContent>,
    /// The range of the pod's priority when its resize began to wait.
    priority: Option<&'static str>,
}

impl Resizing {
    /// The state that the pod's status at the API server shows.
    pub(super) fn from_status(pod: &Pod) -> Resizing {
        Resizing {
            pending: ConditionContent::from_status(pod, PENDING),
            in_progress: ConditionContent::from_status(pod, IN_PROGRESS),
            priority: Some(priority_bucket(pod)),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_none() && self.in_progress.is_none()
    }

    /// The range of the pod's priority.
    pub(super) fn priority(&self) -> &'static str {
        self.priority.unwrap_or(UNKNOWN_PRIORITY)
    }

    /// For how many seconds a resize has waited; `None`: none waits, this node can never grant it, or
    /// the time at which it began is not known.
    pub(super) fn seconds_deferred(&self, now: Timestamp) -> Option<f64> {
        let pending = self.pending.as_ref();
        let deferred =
            pending.filter(|pending| pending.reason.as_deref() == Some(PendingReason::Deferred.as_str()))?;
        Some(now.duration_since(deferred.since?).as_secs_f64().max(0.0))
    }

    pub(super) fn is_in_progress(&self) -> bool {
        self.in_progress.is_some()
    }

    /// Go: pkg/kubelet/status `SetPodResizePendingCondition`.
    pub(super) fn set_pending(&mut self, pod: &Pod, reason: PendingReason, message: &str) -> PendingChange {
        let mut note = ConditionContent::new(pod, reason.as_str(), message);
        let before = self.pending.as_ref().filter(|before| before.reason == note.reason);
        let change = match before {
            Some(before) if before.generation != note.generation => PendingChange::Reason,
            Some(before) if before.message != note.message => PendingChange::Message,
            Some(_) => PendingChange::Nothing,
            None => PendingChange::Reason,
        };
        self.priority = Some(priority_bucket(pod));
        if change != PendingChange::Nothing {
            if let Some(before) = before {
                note.since = before.since;
            }
            self.pending = Some(note);
        }
        change
    }

    pub(super) fn end_pending(&mut self) -> Option<PendingReason> {
        let reason = self.pending.take()?.reason;
        let infeasible = reason.as_deref() == Some(PendingReason::Infeasible.as_str());
        Some(if infeasible { PendingReason::Infeasible } else { PendingReason::Deferred })
    }

    pub(super) fn begin(&mut self, pod: &Pod) {
        self.in_progress = Some(ConditionContent::new(pod, "", ""));
    }

    pub(super) fn continue_resize(&mut self, pod: &Pod) {
        if self.in_progress.is_none() {
            self.begin(pod);
        }
    }

    pub(super) fn fail(&mut self, pod: &Pod, message: &str) -> bool {
        let note = ConditionContent::new(pod, reasons::ERROR, message);
        // A newer resize was granted meanwhile: it has not failed.
        let newer = self.in_progress.as_ref().is_some_and(|known| known.generation > note.generation);
        let is_new = !newer && !note.repeats(self.in_progress.as_ref());
        if is_new {
            self.in_progress = Some(note);
        }
        is_new
    }

    pub(super) fn complete(&mut self, pod: &Pod) -> Option<i64> {
        let resize_generation = self.in_progress.as_ref()?.generation;
        // A newer resize was granted meanwhile; the worker will receive it.
        if resize_generation > generation(pod) {
            return None;
        }
        self.in_progress = None;
        Some(resize_generation.unwrap_or(0))
    }

    pub(super) fn conditions(&self) -> Vec<PodCondition> {
        let both = [(&self.pending, PENDING), (&self.in_progress, IN_PROGRESS)];
        both.into_iter().filter_map(|(note, kind)| note.as_ref().map(|note| note.condition(kind))).collect()
    }
}

/// The number of pods by the state of their resize.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counts {
    /// Waiting for room, by the range of the pods' priority.
    pub deferred: BTreeMap<&'static str, u64>,
    /// Cannot be granted on this node; in the same way.
    pub infeasible: BTreeMap<&'static str, u64>,
    /// Being carried out.
    pub in_progress: u64,
}

impl Counts {
    pub(super) fn with(mut self, resizing: &Resizing) -> Counts {
        let infeasible = Some(PendingReason::Infeasible.as_str());
        if let Some(note) = &resizing.pending {
            let is_infeasible = note.reason.as_deref() == infeasible;
            let counts = if is_infeasible { &mut self.infeasible } else { &mut self.deferred };
            *counts.entry(resizing.priority()).or_default() += 1;
        }
        self.in_progress += u64::from(resizing.in_progress.is_some());
        self
    }
}

/// An event's message about a resize: a head and, as JSON, the containers' new resources.
#[must_use]
pub fn summary(head: &str, pod: &Pod, generation: i64, error: &str) -> String {
    let list = |containers: &[Container]| {
        let entry = |container: &Container| {
            let own = resources::value(container.resources.as_ref());
            // The fields are written in this order, which a map would not keep.
            format!("{{\"name\":{},\"resources\":{own}}}", serde_json::Value::from(container.name.as_str()))
        };
        containers.iter().map(entry).collect::<Vec<_>>().join(",")
    };
    let mut parts = Vec::new();
    for (name, containers) in [("initContainers", pod.init_containers()), ("containers", pod.containers())] {
        if !containers.is_empty() {
            parts.push(format!("\"{name}\":[{}]", list(containers)));
        }
    }
    parts.push(format!("\"generation\":{generation}"));
    if !error.is_empty() {
        parts.push(format!("\"error\":{}", serde_json::Value::from(error)));
    }
    format!("Pod resize {head}: {{{}}}", parts.join(","))
}
