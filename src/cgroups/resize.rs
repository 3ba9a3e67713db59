//! In which order a resize in place changes a pod's cgroup and its containers (pure; kubelet:
//! kuberuntime `doPodResizeAction`).

use super::error::CgroupError;
use super::values::Values;

/// What is resized; memory comes before CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// Memory.
    Memory,
    /// CPU.
    Cpu,
}

/// One step. A step that fails ends the resize; the next try begins with the values at that time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Change the pod's cgroup.
    Pod(Box<PodStep>),
    /// Change the containers whose numbers differ.
    Containers(Resource),
}

/// A change of a pod's cgroup: tell the runtime `after` (UpdatePodSandboxResources), then write
/// `write`. If that fails, tell the runtime `before`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodStep {
    /// The values to write.
    pub write: Values,
    /// All values of the pod before the step.
    pub before: Values,
    /// All values of the pod after the step.
    pub after: Values,
}

/// The steps from the values that the pod's cgroup has to the `wanted` ones. Each resource of
/// `resources` is resized. A limit that is not wanted stays: limits cannot be removed.
///
/// A pod that grows gets its limit first, then its request, then its containers theirs; one that
/// shrinks has the opposite order, so that no container has more than its pod.
///
/// With the gate `MemoryQoS`, the memory that is protected for a pod is changed as its request, and
/// `memory.high` with its limit. If the pod is to have none, one that it has is removed.
///
/// DIFFERS: the Go kubelet changes the protected memory only if the limit of memory changes, and lets an
/// old `memory.high` stay. On version 2 it takes memory without a limit for the smallest one, and limits
/// the pod before its containers; on version 1 for the largest, as here.
#[must_use]
pub fn steps(current: &Values, wanted: &Values, resources: &[Resource]) -> Vec<Step> {
    let mut plan = ResizeSteps { now: wanted.merged(current), steps: Vec::new() };
    let unthrottled = current.memory_high.filter(|high| *high >= 0).map(|_| -1);
    for resource in
        [Resource::Memory, Resource::Cpu].into_iter().filter(|resource| resources.contains(resource))
    {
        let (limit, request) = match resource {
            Resource::Memory => (
                Values {
                    memory_bytes: wanted.memory_bytes,
                    memory_high: wanted.memory_high.or(unthrottled),
                    ..Values::default()
                },
                Values { memory_min: wanted.memory_min, memory_low: wanted.memory_low, ..Values::default() },
            ),
            Resource::Cpu => (
                Values { cpu_quota: wanted.cpu_quota, ..Values::default() },
                Values { cpu_shares: wanted.cpu_shares, ..Values::default() },
            ),
        };
        let limit_change = match change(limit_of(current, resource), limit_of(&limit, resource)) {
            // The same limit in another period is written, too.
            Change::Stays if has_other_quota(current, &limit) => Change::Grows,
            change => change,
        };
        let request_change = match resource {
            Resource::Memory => change(protected(current, wanted), protected(wanted, wanted)),
            Resource::Cpu => change(current.cpu_shares, request.cpu_shares),
        };
        if limit_change == Change::Grows {
            plan.write(&limit);
        }
        if request_change == Change::Grows {
            plan.write(&request);
        }
        plan.steps.push(Step::Containers(resource));
        if request_change == Change::Shrinks {
            plan.write(&request);
        }
        if limit_change == Change::Shrinks {
            plan.write(&limit);
        }
    }
    plan.steps
}

/// Checks that a pod does not use more memory than its new limit (Go:
/// `validateMemoryResizeAction`; containers are checked in the same way).
///
/// # Errors
/// [`CgroupError::Usage`].
pub fn check_memory(current: &Values, wanted: &Values, usage: u64) -> Result<(), CgroupError> {
    let (from, to) = (limit_of(current, Resource::Memory), limit_of(wanted, Resource::Memory));
    match (change(from, to), to) {
        (Change::Shrinks, Some(limit)) if usage >= limit => Err(CgroupError::Usage { limit, usage }),
        _ => Ok(()),
    }
}

struct ResizeSteps {
    now: Values,
    steps: Vec<Step>,
}

impl ResizeSteps {
    fn write(&mut self, values: &Values) {
        let after = self.now.merged(values);
        let before = std::mem::replace(&mut self.now, after.clone());
        self.steps.push(Step::Pod(Box::new(PodStep { write: values.clone(), before, after })));
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Grows,
    Shrinks,
    Stays,
}

/// `to` absent: nothing is wanted.
fn change(from: Option<u64>, to: Option<u64>) -> Change {
    match (from, to) {
        (Some(from), Some(to)) if to > from => Change::Grows,
        (Some(from), Some(to)) if to < from => Change::Shrinks,
        (None, Some(_)) => Change::Grows,
        _ => Change::Stays,
    }
}

/// The protected bytes in `values`, in the file that `wanted` uses; `None` without the gate
/// `MemoryQoS`.
fn protected(values: &Values, wanted: &Values) -> Option<u64> {
    let bytes = if wanted.memory_min.is_some() { values.memory_min } else { values.memory_low };
    wanted.memory_min.or(wanted.memory_low)?;
    u64::try_from(bytes?).ok()
}

/// Whether a quota is wanted, and is not the one that there is.
fn has_other_quota(current: &Values, wanted: &Values) -> bool {
    let wanted = wanted.cpu_quota.filter(|quota| quota.microseconds.is_some());
    wanted.is_some() && current.cpu_quota != wanted
}

/// Memory without a limit is the largest; CPU without one is the smallest, as in upstream's
/// number -1. The limit of CPU is the time in 1,000 s.
fn limit_of(values: &Values, resource: Resource) -> Option<u64> {
    match resource {
        Resource::Memory => values.memory_bytes.map(|bytes| u64::try_from(bytes).unwrap_or(u64::MAX)),
        Resource::Cpu => {
            let quota = values.cpu_quota?;
            let time = quota.microseconds.map_or(0, |time| u128::try_from(time).unwrap_or(0));
            let share = time * 1_000_000_000 / u128::from(quota.period.max(1));
            Some(u64::try_from(share).unwrap_or(u64::MAX))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::values::Quota;
    use super::*;

    fn values(memory: i64, quota: i64, shares: u64) -> Values {
        let microseconds = (quota > 0).then_some(quota);
        Values {
            cpu_shares: Some(shares),
            cpu_quota: Some(Quota { microseconds, period: 100_000 }),
            memory_bytes: Some(memory),
            ..Values::default()
        }
    }

    /// The steps as words: what is written, and the containers' turn.
    fn words(current: &Values, wanted: &Values, resources: &[Resource]) -> Vec<String> {
        let step = |step: &Step| match step {
            Step::Containers(Resource::Memory) => "containers memory".to_owned(),
            Step::Containers(Resource::Cpu) => "containers cpu".to_owned(),
            Step::Pod(step) => match (step.write.memory_bytes, step.write.cpu_quota, step.write.cpu_shares) {
                (Some(memory), None, None) => format!("memory {memory}"),
                (None, Some(quota), None) => format!("quota {}", quota.number()),
                (None, None, Some(shares)) => format!("shares {shares}"),
                other => panic!("{other:?}"),
            },
        };
        steps(current, wanted, resources).iter().map(step).collect()
    }

    const BOTH: [Resource; 2] = [Resource::Cpu, Resource::Memory];

    #[test]
    fn growing_pods_come_before_their_containers() {
        let found = words(&values(100, 1000, 10), &values(200, 2000, 20), &BOTH);
        assert_eq!(found, ["memory 200", "containers memory", "quota 2000", "shares 20", "containers cpu"]);
    }

    #[test]
    fn shrinking_pods_come_after_their_containers() {
        let found = words(&values(200, 2000, 20), &values(100, 1000, 10), &BOTH);
        assert_eq!(found, ["containers memory", "memory 100", "containers cpu", "shares 10", "quota 1000"]);
    }

    /// The order of requests in the recording `a-edit-same-uid`: no limits become limits.
    #[test]
    fn unlimited_pods_get_limits_in_the_recorded_order() {
        let unlimited = values(i64::MAX, -1, 102);
        let wanted = values(134_217_728, 50_000, 307);
        let found = words(&unlimited, &wanted, &BOTH);
        let expected =
            ["containers memory", "memory 134217728", "quota 50000", "shares 307", "containers cpu"];
        assert_eq!(found, expected);
        assert_eq!(words(&Values { memory_bytes: Some(-1), ..unlimited }, &wanted, &BOTH), expected);
    }

    #[test]
    fn unwanted_limits_stay_and_only_the_resized_resource_changes() {
        let current = values(100, 1000, 10);
        let wanted =
            Values { memory_bytes: None, cpu_quota: None, cpu_shares: Some(20), ..Values::default() };
        assert_eq!(words(&current, &wanted, &BOTH), ["containers memory", "shares 20", "containers cpu"]);
        assert_eq!(
            words(&current, &values(50, 500, 5), &[Resource::Memory]),
            ["containers memory", "memory 50"]
        );
        assert!(words(&current, &values(50, 500, 5), &[]).is_empty());
    }

    #[test]
    fn limits_of_cpu_are_compared_with_their_periods() {
        let with_period = |quota: i64, period: u64| {
            let cpu_quota = Some(Quota { microseconds: Some(quota), period });
            Values { cpu_quota, ..values(100, 0, 10) }
        };
        let current = with_period(10_000, 100_000);
        let cpu = |wanted: &Values| words(&current, wanted, &[Resource::Cpu]);
        assert_eq!(cpu(&with_period(10_000, 10_000)), ["quota 10000", "containers cpu"]);
        assert_eq!(cpu(&with_period(500, 10_000)), ["containers cpu", "quota 500"]);
        assert_eq!(cpu(&with_period(1_000, 10_000)), ["quota 1000", "containers cpu"]);
        assert_eq!(cpu(&current), ["containers cpu"]);
    }

    #[test]
    fn protected_memory_changes_with_the_request() {
        let protected_values =
            |memory, low: i64| Values { memory_low: Some(low), ..values(memory, 1000, 10) };
        let written = |current: &Values, wanted: &Values| -> Vec<_> {
            let writes = steps(current, wanted, &[Resource::Memory]).into_iter().map(|step| match step {
                Step::Containers(_) => (None, None),
                Step::Pod(step) => (step.write.memory_bytes, step.write.memory_low),
            });
            writes.collect()
        };
        let containers = (None, None);
        assert_eq!(
            written(&protected_values(100, 50), &protected_values(200, 80)),
            [(Some(200), None), (None, Some(80)), containers]
        );
        assert_eq!(
            written(&protected_values(200, 80), &protected_values(100, 50)),
            [containers, (None, Some(50)), (Some(100), None)]
        );
        assert_eq!(
            written(&protected_values(100, 50), &protected_values(100, 80)),
            [(None, Some(80)), containers]
        );
        // Without the gate nothing is protected.
        assert_eq!(written(&protected_values(100, 50), &values(100, 1000, 10)), [containers]);
        let guaranteed = Values { memory_min: Some(100), ..values(100, 1000, 10) };
        assert_eq!(written(&guaranteed, &guaranteed), [containers]);
    }

    #[test]
    fn throttling_changes_only_with_the_limit_of_memory() {
        let throttled = |memory, high: Option<i64>| Values { memory_high: high, ..values(memory, 1000, 10) };
        let written = |current: &Values, wanted: &Values| -> Vec<_> {
            let writes = steps(current, wanted, &BOTH).into_iter().filter_map(|step| match step {
                Step::Containers(_) => None,
                Step::Pod(step) => Some((step.write.memory_bytes, step.write.memory_high)),
            });
            writes.collect()
        };
        let unthrottled = throttled(100, Some(-1));
        assert_eq!(written(&unthrottled, &throttled(200, Some(90))), [(Some(200), Some(90))]);
        assert_eq!(written(&throttled(200, Some(90)), &throttled(100, Some(40))), [(Some(100), Some(40))]);
        assert!(written(&throttled(100, Some(40)), &throttled(100, Some(50))).is_empty());
        assert_eq!(written(&throttled(100, Some(40)), &throttled(200, None)), [(Some(200), Some(-1))]);
        assert_eq!(written(&unthrottled, &throttled(200, None)), [(Some(200), None)]);
    }

    #[test]
    fn the_runtime_receives_all_values_and_those_to_return_to() {
        let (current, wanted) = (values(100, 1000, 10), values(200, 1000, 20));
        let steps = steps(&current, &wanted, &BOTH);
        let Step::Pod(step) = &steps[0] else { panic!("{steps:?}") };
        assert_eq!((&step.before, &step.after), (&current, &values(200, 1000, 10)));
        let Step::Pod(step) = &steps[2] else { panic!("{steps:?}") };
        assert_eq!((&step.before, &step.after), (&values(200, 1000, 10), &wanted));
    }

    #[test]
    fn limits_below_the_usage_are_refused() {
        let check = |from, to, usage| {
            check_memory(&values(from, -1, 2), &values(to, -1, 2), usage).map_err(|error| error.to_string())
        };
        assert_eq!(check(200, 100, 99), Ok(()));
        assert_eq!(check(100, 200, 500), Ok(()));
        assert_eq!(check(100, -1, 500), Ok(()));
        let expected = "cannot decrease memory limits: attempting to set pod memory limit (100) below current \
                        usage (100)";
        assert_eq!(check(-1, 100, 100), Err(expected.to_owned()));
    }
}
