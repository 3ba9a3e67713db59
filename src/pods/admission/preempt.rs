//! Which pods are preempted for a critical one (Go: pkg/kubelet/preemption).

use std::fmt;

use crate::model::ids::PodUid;
use crate::model::pod::{Pod, QosClass};
use crate::model::requests::{Amounts, Overhead, pod_requests};

use super::fit::{Shortage, taken};

/// The resources that are still missing after the preemption of every possible pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NoVictims {
    missing: Vec<Need>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Need {
    resource: String,
    amount: i64,
}

impl fmt::Display for NoVictims {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("no set of running pods found to reclaim resources: [")?;
        for need in &self.missing {
            write!(out, "(res: {}, q: {}), ", need.resource, need.amount)?;
        }
        out.write_str("]")
    }
}

/// A pod that may be killed, with what it would free.
struct Candidate<'a> {
    pod: &'a Pod,
    requests: Amounts,
}

/// Chooses few and small victims, of the lowest class that is sufficient.
pub(super) fn victims(pod: &Pod, others: &[&Pod], short: &[Shortage]) -> Result<Vec<PodUid>, NoVictims> {
    let needs: Vec<Need> = short
        .iter()
        .map(|short| Need { resource: short.resource.clone(), amount: short.missing() })
        .collect();
    let of_class = |class: QosClass| -> Vec<Candidate> {
        others
            .iter()
            .filter(|other| may_preempt(pod, other) && other.qos() == class)
            .map(|other| Candidate { pod: other, requests: pod_requests(other, Overhead::Included) })
            .collect()
    };
    let best_effort = of_class(QosClass::BestEffort);
    let burstable = of_class(QosClass::Burstable);
    let guaranteed = of_class(QosClass::Guaranteed);

    let missing = remaining_needs(&needs, best_effort.iter().chain(&burstable).chain(&guaranteed));
    if !missing.is_empty() {
        return Err(NoVictims { missing });
    }
    // A higher class supplies only what the lower ones cannot; the lower ones supply the rest.
    let from_guaranteed =
        nearest(&guaranteed, remaining_needs(&needs, best_effort.iter().chain(&burstable)))?;
    let from_burstable = nearest(
        &burstable,
        remaining_needs(&needs, best_effort.iter().chain(from_guaranteed.iter().copied())),
    )?;
    let from_best_effort = nearest(
        &best_effort,
        remaining_needs(&needs, from_burstable.iter().chain(&from_guaranteed).copied()),
    )?;
    let chosen = from_best_effort.into_iter().chain(from_burstable).chain(from_guaranteed);
    Ok(chosen.map(|candidate| candidate.pod.uid().clone()).collect())
}

fn may_preempt(pod: &Pod, other: &Pod) -> bool {
    if pod.is_critical() && !other.is_critical() {
        return true;
    }
    match (pod.spec().priority, other.spec().priority) {
        (Some(mine), Some(theirs)) => mine > theirs,
        _ => false,
    }
}

/// The resources that are missing after the pods `gone` have ended.
fn remaining_needs<'a>(needs: &[Need], gone: impl Iterator<Item = &'a Candidate<'a>> + Clone) -> Vec<Need> {
    needs
        .iter()
        .filter_map(|need| {
            let freed = gone
                .clone()
                .fold(0_i64, |sum, candidate| sum.saturating_add(taken(&candidate.requests, &need.resource)));
            let amount = need.amount.saturating_sub(freed);
            (amount > 0).then(|| Need { resource: need.resource.clone(), amount })
        })
        .collect()
}

/// Picks pods one after another: the one that frees the missing amounts most closely; of two
/// equal ones the smaller.
fn nearest<'a>(
    candidates: &'a [Candidate<'a>],
    mut needs: Vec<Need>,
) -> Result<Vec<&'a Candidate<'a>>, NoVictims> {
    let mut left: Vec<&Candidate> = candidates.iter().collect();
    let mut chosen = Vec::new();
    while !needs.is_empty() {
        let best = left
            .iter()
            .enumerate()
            .min_by(|(_, a), (_, b)| {
                let (near_a, near_b) = (distance(&needs, a), distance(&needs, b));
                near_a.total_cmp(&near_b).then_with(|| size(a).cmp(&size(b)))
            })
            .map(|(index, _)| index);
        let Some(best) = best else { return Err(NoVictims { missing: needs }) };
        let candidate = left.swap_remove(best);
        needs = remaining_needs(&needs, std::iter::once(candidate));
        chosen.push(candidate);
    }
    Ok(chosen)
}

/// How much a pod frees too little: 0 if it frees enough, at most 1 for each resource.
fn distance(needs: &[Need], candidate: &Candidate) -> f64 {
    needs
        .iter()
        .map(|need| {
            let rest = need.amount.saturating_sub(taken(&candidate.requests, &need.resource));
            if rest > 0 { (rest as f64 / need.amount as f64).powi(2) } else { 0.0 }
        })
        .sum()
}

/// Memory is compared before CPU: it is the scarcer of the two.
fn size(candidate: &Candidate) -> (i64, i64) {
    (taken(&candidate.requests, "memory"), taken(&candidate.requests, "cpu"))
}
