//! Carries out the decisions of the core.

use std::borrow::Cow;
use std::time::Instant;

use jiff::Timestamp;

use super::core::Effect;
use super::thread::Loop;
use crate::model::api::PodStatus;
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::pod::{CONFIG_MIRROR, Pod};
use crate::model::reasons;
use crate::pods::admission;
use crate::pods::allocation::{PendingChange, PendingReason, Resolution, summary};
use crate::pods::lifecycle::{Failure, PodKill, must_end};
use crate::pods::workers::AfterEnd;
use crate::sources::unsupported_fields;
use crate::status::disrupt;
use crate::status::publish::ApiPod;

impl Loop {
    pub(super) fn carry_out(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Update(pod) => {
                    if must_end(&pod) {
                        self.preemptions.forget(pod.uid());
                    } else if self.preemptions.waits(pod.uid()) {
                        // The newest version starts when the victims have ended.
                        continue;
                    }
                    if !self.deps.workers.knows(pod.uid()) {
                        self.warn_of_unsupported(&pod);
                        self.deps.allocations.restore(&pod);
                        if self.core.has_desired_resources(pod.uid()) {
                            self.deps.allocations.end_pending(pod.uid(), Resolution::Reverted);
                        }
                    }
                    self.update(&pod);
                }
                Effect::Resize { pod, trigger } => self.resize(&pod, trigger),
                Effect::ResizePending { pod, reason, message, detail } => {
                    self.resize_pending(&pod, reason, &message, detail);
                }
                Effect::ResizeReverted(pod) => {
                    if self.deps.allocations.end_pending(pod.uid(), Resolution::Reverted).is_some() {
                        self.deps.workers.resync(pod.uid());
                    }
                }
                Effect::Reject { pod, reason, message } => self.reject(&pod, &reason, &message),
                Effect::Postpone { pod, reason, message } => self.postpone(&pod, &reason, &message),
                // The source has the pod no more.
                Effect::Kill(uid, kill) => {
                    self.preemptions.forget(&uid);
                    self.deps.allocations.revoke(&uid);
                    self.kill(&uid, kill);
                }
                Effect::Preempt { victim, resource } => self.preempt(&victim, resource),
                Effect::StartAfter { pod, victims } => {
                    log::info!("pod starts when {} preempted pods have ended uid={pod}", victims.len());
                    self.preemptions.begin(pod, victims, Instant::now());
                }
                Effect::StopUnknown(pod) => self.deps.workers.stop_unknown(&pod),
                Effect::ForgetStatus(uid) => {
                    self.preemptions.forget(&uid);
                    self.deps.status.forget(&uid);
                    self.garbage = true;
                }
                Effect::ApiPodChanged(pod) => self.api_pod(pod, false),
                Effect::ApiPodRemoved(pod) => self.api_pod(pod, true),
                Effect::FinishStatus(pod) => {
                    if self.deps.status.entry(pod.uid()).is_some_and(|entry| !entry.finished) {
                        self.deps.status.finish(&pod, Timestamp::now());
                    }
                }
                Effect::Invalid { pod, message } => {
                    self.deps.events.warning(&pod, reasons::FAILED_VALIDATION, message);
                }
            }
        }
    }

    /// Creates the pod's worker or passes the new version to it. `pod` has the resources that it
    /// was granted.
    fn update(&mut self, pod: &Pod) {
        self.deps.allocations.grant(pod);
        if self.preemptions.waits(pod.uid()) {
            return;
        }
        if !must_end(pod) && self.deps.workers.forget_former(pod.uid()) {
            // It ended while the new incarnation waited for other pods.
            self.ephemeral.retain(|other| other != pod.uid());
            self.deps.status.forget(pod.uid());
        }
        self.deps.workers.update(&self.ephemeral.complete(pod));
    }

    /// Grants a resize, which the pod's worker then carries out.
    fn resize(&mut self, pod: &Pod, trigger: &'static str) {
        let allocations = &self.deps.allocations;
        if allocations.end_pending(pod.uid(), Resolution::Accepted) == Some(PendingReason::Deferred) {
            metrics::DEFERRED_RESIZES_ACCEPTED.inc([trigger]);
        }
        // First: a worker with an older version of the pod does not end the resize.
        allocations.grant(pod);
        allocations.begin(pod);
        let generation = pod.object().metadata.generation.unwrap_or(0);
        self.deps.events.normal(pod, reasons::RESIZE_STARTED, summary("started", pod, generation, ""));
        log::info!("resize granted: {trigger} pod={} uid={}", pod.full_name(), pod.uid());
        self.update(pod);
    }

    /// The pod keeps its resources for now.
    fn resize_pending(&mut self, pod: &Pod, reason: PendingReason, message: &str, detail: Cow<'static, str>) {
        let head = match reason {
            // As upstream, the event names the reason of the refusal; the condition does not.
            PendingReason::Deferred => detail,
            PendingReason::Infeasible => {
                metrics::INFEASIBLE_RESIZES.inc([detail]);
                reason.as_str().into()
            }
        };
        match self.deps.allocations.set_pending(pod, reason, message) {
            PendingChange::Nothing => return,
            PendingChange::Message => {}
            PendingChange::Reason => {
                let generation = pod.object().metadata.generation.unwrap_or(0);
                let text = summary(&head, pod, generation, message);
                self.deps.events.warning(pod, reason.event(), text);
            }
        }
        self.deps.workers.resync(pod.uid());
    }

    /// Passes a pod on as the API server shows it.
    fn api_pod(&self, pod: Pod, removed: bool) {
        // A client that may create pods may set any annotation. A real mirror has the name of its
        // static pod.
        let forged = pod.annotation(CONFIG_MIRROR).and_then(|uid| self.core.admitted(&uid.into()));
        if forged.is_some_and(|other| other.full_name() != pod.full_name()) {
            log::warn!(
                "ignored a pod that claims to be the mirror of another pod pod={} uid={}",
                pod.full_name(),
                pod.uid()
            );
            return;
        }
        if let Some(api_pods) = &self.deps.api_pods {
            api_pods.put(pod.uid().clone(), ApiPod { pod, removed });
        }
    }

    /// Starts the pods that waited for the end of preempted ones. During a shutdown of the machine, none
    /// starts.
    pub(super) fn start_preempting(&mut self) {
        if self.settings.node.shutting_down {
            return;
        }
        let workers = &self.deps.workers;
        let has_ended = |uid: &PodUid| workers.has_stopped(uid);
        for ready in self.preemptions.take_ready(&has_ended, Instant::now()) {
            for victim in &ready.late {
                let message = "Container runtime did not kill the pod within specified grace period.";
                self.deps.events.warning(victim, reasons::EXCEEDED_GRACE_PERIOD, message);
                log::warn!(
                    "preempted pod has not ended in time pod={} uid={}",
                    victim.full_name(),
                    victim.uid()
                );
            }
            self.core.end_wait(&ready.pod, &ready.late);
            if let Some(pod) = self.core.admitted(&ready.pod).cloned() {
                self.carry_out(vec![Effect::Update(pod)]);
                self.publish();
            }
        }
    }

    pub(super) fn kill(&mut self, uid: &PodUid, kill: PodKill) {
        if self.deps.workers.kill(uid, kill) == AfterEnd::Removed {
            self.deps.status.forget(uid);
            self.garbage = true;
        }
    }

    fn preempt(&mut self, victim: &Pod, resource: String) {
        metrics::PREEMPTIONS.inc([resource]);
        self.deps.events.warning(victim, reasons::PREEMPTING, admission::PREEMPTED_MESSAGE);
        let failure = Failure {
            reason: reasons::PREEMPTING,
            message: admission::PREEMPTED_MESSAGE.to_owned(),
            disrupts: true,
        };
        self.fail(victim.uid(), PodKill { grace_override: None, failure: Some(failure) });
    }

    /// Stops a pod that fails for the reason in `kill`. One that has not started, because it waits
    /// for the pods that are stopped for it or for the former pod of its name, has no worker that
    /// would report this: it is rejected, and never starts.
    pub(super) fn fail(&mut self, uid: &PodUid, kill: PodKill) {
        let waited = self.preemptions.waits(uid);
        self.preemptions.forget(uid);
        let failure = kill.failure.clone();
        // The worker of a pod that is stopped without the API server has ended, and the pod has not.
        let is_stopped = self.fence.has(uid) && self.deps.workers.is_finished(uid);
        if !waited && !is_stopped && self.deps.workers.has_started(uid) {
            self.kill(uid, kill);
            return;
        }
        self.deps.workers.kill(uid, kill);
        let (Some(failure), Some(pod)) = (failure, self.core.fail(uid)) else { return };
        self.garbage = true;
        let mut status = admission::failed_status(&pod, failure.reason, failure.message.clone(), pod.qos());
        let now = Timestamp::now();
        if failure.disrupts {
            let is_preempted = failure.reason == reasons::PREEMPTING;
            let message = if is_preempted { admission::PREEMPTED_CONDITION } else { &failure.message };
            disrupt(&pod, &mut status, message, now);
        }
        self.report_end(&pod, status, now);
    }

    /// Reports fields that have no effect, once per pod.
    fn warn_of_unsupported(&self, pod: &Pod) {
        let fields = unsupported_fields(pod);
        if !fields.is_empty() {
            let text = format!("this version of coracle does not support: {}", fields.join(", "));
            log::warn!("{text} pod={} uid={}", pod.full_name(), pod.uid());
            self.deps.events.warning(pod, reasons::UNSUPPORTED_FIELD, text);
        }
    }

    fn reject(&mut self, pod: &Pod, reason: &str, message: &str) {
        // What was allocated for the pod is released at the end of the turn.
        self.garbage |= self.deps.assignments.holds_resources();
        metrics::ADMISSION_REJECTIONS.inc([reasons::intern(reason)]);
        log::warn!("pod was rejected: {reason}: {message} pod={} uid={}", pod.full_name(), pod.uid());
        self.deps.events.warning(pod, reasons::intern(reason), message);
        let status = admission::rejected_status(pod, reason, message, pod.qos());
        self.report_end(pod, status, Timestamp::now());
    }

    /// The pod waits: its status and an event say for what.
    fn postpone(&mut self, pod: &Pod, reason: &str, message: &str) {
        // What was allocated for the pod is released at the end of the turn.
        self.garbage |= self.deps.assignments.holds_resources();
        log::warn!(
            "pod waits for the API server: {reason}: {message} pod={} uid={}",
            pod.full_name(),
            pod.uid()
        );
        let until = if reason.starts_with("OutOf") { "other pods end, or " } else { "" };
        let message = format!(
            "The pod waits until {until}the API server is back, because the stored Node object may be too old: \
             {message}"
        );
        self.deps.events.warning(pod, reasons::intern(reason), message.as_str());
        let status = admission::postponed_status(pod, reason, message, pod.qos());
        self.deps.status.set(pod, status, Timestamp::now());
    }

    /// Stores the terminal status of a pod without a worker. It is final if no container runs, and no
    /// resource claim is prepared for the pod (Go: `PodCouldHaveRunningContainers`): the claims of a pod
    /// that ran before a restart could be allocated to another one.
    fn report_end(&self, pod: &Pod, status: PodStatus, now: Timestamp) {
        if self.deps.observe.still_runs(pod.uid()) || self.deps.assignments.uses_claims(pod.uid()) {
            self.deps.status.set(pod, status, now);
        } else {
            self.deps.status.set_rejected(pod, status, now);
        }
    }
}
