//! Pods that wait for the end of preempted ones: the critical pods for which these were preempted, and
//! pods that were admitted since and have no room before (pure; Go: pkg/kubelet/preemption and
//! killPodNow).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::model::ids::PodUid;
use crate::model::pod::Pod;

/// How often to check whether the victims have ended.
const PERIOD: Duration = Duration::from_millis(200);
/// The shortest limit of a wait.
const SHORTEST: Duration = Duration::from_secs(10);

/// The pods that wait.
#[derive(Debug, Default)]
pub(super) struct PreemptionWaits {
    waiting: BTreeMap<PodUid, Wait>,
}

#[derive(Debug)]
struct Wait {
    /// The preempted pods, each with the time at which it does not delay the start any more.
    victims: Vec<(Pod, Instant)>,
}

/// A pod whose wait is over.
#[derive(Debug, PartialEq)]
pub(super) struct ReadyPod {
    /// The pod that may start.
    pub(super) pod: PodUid,
    /// The victims that have not ended in one and a half of their grace period.
    pub(super) late: Vec<Pod>,
}

impl PreemptionWaits {
    /// `pod` may start when `victims` have ended, or had their time to do so.
    ///
    /// DIFFERS: all victims are stopped at the same time; upstream stops one after the other, and
    /// handles no other pod of the node meanwhile.
    pub(super) fn begin(&mut self, pod: PodUid, victims: Vec<Pod>, now: Instant) {
        let limit = |victim: &Pod| {
            // Its time has begun already if another pod waits for it.
            let others = self.waiting.values().flat_map(|wait| &wait.victims);
            let begun = others.filter(|(other, _)| other.uid() == victim.uid()).map(|(_, until)| *until);
            let grace = Duration::from_secs(victim.grace_seconds().max(0).unsigned_abs());
            let whole = now.checked_add(grace.saturating_add(grace / 2).max(SHORTEST));
            begun.min().unwrap_or_else(|| whole.unwrap_or(now + SHORTEST))
        };
        let victims: Vec<(Pod, Instant)> = victims
            .into_iter()
            .map(|victim| {
                let until = limit(&victim);
                (victim, until)
            })
            .collect();
        if !victims.is_empty() {
            self.waiting.insert(pod, Wait { victims });
        }
    }

    /// Whether the pod must not start yet.
    pub(super) fn waits(&self, pod: &PodUid) -> bool {
        self.waiting.contains_key(pod)
    }

    /// The pod is not desired any more, or ends.
    pub(super) fn forget(&mut self, pod: &PodUid) {
        self.waiting.remove(pod);
    }

    /// These pods have ended. No pod waits for them, even if they run again, as a static pod does whose
    /// manifest was put back.
    pub(super) fn ended(&mut self, has_ended: &dyn Fn(&PodUid) -> bool) {
        for wait in self.waiting.values_mut() {
            wait.victims.retain(|(victim, _)| !has_ended(victim.uid()));
        }
    }

    /// Takes the pods that may start.
    pub(super) fn take_ready(&mut self, has_ended: &dyn Fn(&PodUid) -> bool, now: Instant) -> Vec<ReadyPod> {
        self.ended(has_ended);
        let is_ready = |wait: &Wait| wait.victims.iter().all(|(_, until)| now >= *until);
        let ready = self.waiting.iter().filter(|(_, wait)| is_ready(wait)).map(|(pod, _)| pod.clone());
        let ready: Vec<PodUid> = ready.collect();
        let take = |pod| {
            let victims = self.waiting.remove(&pod)?.victims;
            Some(ReadyPod { pod, late: victims.into_iter().map(|(victim, _)| victim).collect() })
        };
        ready.into_iter().filter_map(take).collect()
    }

    /// When to call [`PreemptionWaits::take_ready`] again.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        (!self.waiting.is_empty()).then(|| now + PERIOD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn victim(uid: &str, grace: i64) -> Pod {
        let object = json!({"metadata": {"name": uid, "uid": uid},
            "spec": {"containers": [], "terminationGracePeriodSeconds": grace}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
    }

    fn ready(preemptions: &mut PreemptionWaits, ended: &[&str], now: Instant) -> Vec<(String, Vec<String>)> {
        let names = |pods: Vec<Pod>| pods.iter().map(|pod| pod.name().to_owned()).collect();
        let ready = preemptions.take_ready(&|uid| ended.contains(&uid.as_str()), now);
        ready.into_iter().map(|ready| (ready.pod.to_string(), names(ready.late))).collect()
    }

    #[test]
    fn preempting_pod_starts_when_its_victims_have_ended_or_had_their_time() {
        let (now, mut preemptions) = (Instant::now(), PreemptionWaits::default());
        assert_eq!(preemptions.due(now), None);
        preemptions.begin("none".into(), Vec::new(), now);
        assert!(!preemptions.waits(&"none".into()));
        preemptions.begin("p".into(), vec![victim("a", 2), victim("b", 60)], now);
        preemptions.begin("q".into(), vec![victim("c", 60)], now);
        assert!(preemptions.waits(&"p".into()) && preemptions.due(now).is_some());
        let after = |seconds| now + Duration::from_secs(seconds);
        // Ten seconds are the least; a victim that is late does not end the wait for the others.
        assert!(ready(&mut preemptions, &[], after(10)).is_empty());
        assert_eq!(ready(&mut preemptions, &["b"], after(10)), [("p".to_owned(), vec!["a".to_owned()])]);
        assert!(ready(&mut preemptions, &[], after(89)).is_empty());
        assert_eq!(ready(&mut preemptions, &["c"], after(89)), [("q".to_owned(), Vec::new())]);
        // A pod that is admitted later waits no longer for a victim than the first one.
        preemptions.begin("s".into(), vec![victim("e", 60)], now);
        preemptions.begin("t".into(), vec![victim("e", 60)], after(80));
        let names = |pod: &str| (pod.to_owned(), vec!["e".to_owned()]);
        assert_eq!(ready(&mut preemptions, &[], after(90)), [names("s"), names("t")]);
        preemptions.begin("r".into(), vec![victim("d", i64::MAX)], now);
        preemptions.forget(&"r".into());
        assert_eq!(preemptions.due(now), None);
    }
}
