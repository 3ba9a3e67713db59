//! Actions for regular containers, which do not depend on each other.

use crate::model::api::Container;
use crate::model::restart;
use crate::model::runtime::{ContainerState, ContainerStatus};
use crate::model::verdict::ProbeVerdict;

use super::{Inputs, KillContainer, KillReason, Plan, definition_changed, stop_twins};

/// Fills `start` and `kill`; a pod in which no container runs or will run is killed.
pub(super) fn compute(inputs: &Inputs, plan: &mut Plan) {
    let mut running = 0_usize;
    for (index, container) in inputs.pod.containers().iter().enumerate() {
        let status = inputs.runtime.newest(&container.name);
        stop_twins(inputs, "Container", &container.name, plan);
        match status {
            Some(status) if status.state == ContainerState::Running => {
                running += usize::from(!replace_if_needed(inputs, index, container, status, plan));
            }
            _ if inputs.waits_for_all(container, status) => {}
            _ if !restart::should_start(inputs.pod, container, status) => {}
            _ => {
                if let Some(status) = status.filter(|status| status.state == ContainerState::Unknown) {
                    plan.kill.push(KillContainer {
                        id: status.id.clone(),
                        name: container.name.clone(),
                        message: "Container is in \"unknown\" state, try killing it before restart"
                            .to_owned(),
                        reason: KillReason::Unknown,
                    });
                }
                plan.start.push(index);
            }
        }
    }
    if running == 0 && plan.start.is_empty() && !inputs.reset_held {
        plan.kill_pod = true;
        // Sidecars must not keep a finished pod running.
        plan.start_init.clear();
    }
}

/// Stops a running container that has to be replaced. Returns whether it did.
fn replace_if_needed(
    inputs: &Inputs,
    index: usize,
    container: &Container,
    status: &ContainerStatus,
    plan: &mut Plan,
) -> bool {
    let name = &container.name;
    let comes_back = restart::restarts_after_probe(inputs.pod, container);
    let (what, reason, comes_back) = if definition_changed(container, status) {
        // The old definition no longer exists in any source, so the policy does not matter.
        ("definition changed", KillReason::DefinitionChanged, true)
    } else if (inputs.liveness)(&status.id) == ProbeVerdict::Failure {
        ("failed liveness probe", KillReason::LivenessProbe, comes_back)
    } else if (inputs.startup)(&status.id) == ProbeVerdict::Failure {
        ("failed startup probe", KillReason::StartupProbe, comes_back)
    } else {
        return false;
    };
    let promise = if comes_back { ", will be restarted" } else { "" };
    plan.kill.push(KillContainer {
        id: status.id.clone(),
        name: name.clone(),
        message: format!("Container {name} {what}{promise}"),
        reason,
    });
    if comes_back {
        plan.start.push(index);
    }
    true
}
