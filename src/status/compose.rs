//! Composes the complete status of a pod (pure; Go: generateAPIPodStatus).

use std::net::IpAddr;
use std::time::Duration;

use jiff::Timestamp;

use crate::model::api::{ContainerStatus, HostIP, PodIP, PodStatus};
use crate::model::ids::ContainerId;
use crate::model::meta::Time;
use crate::model::pod::{Pod, is_sidecar};
use crate::model::reasons;
use crate::model::restart;
use crate::model::runtime::{PodRuntime, SandboxState};
use crate::model::verdict::ProbeVerdict;

use super::containers::{self, Kind, all_statuses};
use super::inputs::{Inputs, NodeAddresses, generation};
use super::phase::is_terminal;
use super::{conditions, phase, resources};

/// The state of a pod's `activeDeadlineSeconds`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deadline {
    /// The remaining time: check again after it.
    Remaining(Duration),
    /// The deadline has passed.
    Exceeded,
}

const DEADLINE_MESSAGE: &str = "Pod was active on the node longer than the specified deadline";

/// Checks `activeDeadlineSeconds` of a pod that has been active for this time. `None` without one.
#[must_use]
pub fn active_deadline(pod: &Pod, active: Duration) -> Option<Deadline> {
    let allowed = u64::try_from(pod.spec().active_deadline_seconds?).unwrap_or(0);
    Some(match Duration::from_secs(allowed).checked_sub(active) {
        Some(left) if !left.is_zero() => Deadline::Remaining(left),
        _ => Deadline::Exceeded,
    })
}

/// Composes the status. Times keep their fractions and conditions have `now` as their transition
/// time; the cache normalizes both when it stores the status.
#[must_use]
pub fn compose(inputs: &Inputs) -> PodStatus {
    let pod = inputs.pod;
    let source = pod.object().status.as_ref();
    let mut status = PodStatus {
        observed_generation: generation(pod),
        qos_class: Some(
            source
                .and_then(|status| status.qos_class.clone())
                .filter(|class| !class.is_empty())
                .unwrap_or_else(|| pod.qos().as_str().to_owned()),
        ),
        start_time: start_time(pod, inputs.old, inputs.runtime, inputs.now).map(Time),
        ..PodStatus::default()
    };
    statuses_of_containers(inputs, &mut status);
    // This precedes the phase, which depends on whether sidecars have started.
    fill_probed(inputs, &mut status);
    set_phase(inputs, &mut status);
    resources::set_pod_level(pod, inputs.actual_pod, &mut status);
    status.conditions = Some(conditions::compose(inputs, &status));
    set_addresses(inputs, &mut status);
    status
}

/// When the pod was first seen, as far as it is known.
///
/// DIFFERS: without an older status it is the creation of the pod's first known sandbox, so that a
/// restart of the agent does not make a static pod look new (and does not restart its
/// `activeDeadlineSeconds`). Upstream uses the present time.
#[must_use]
pub fn start_time(
    pod: &Pod,
    old: Option<&PodStatus>,
    runtime: &PodRuntime,
    now: Timestamp,
) -> Option<Timestamp> {
    known_start(pod, old).or_else(|| {
        let created = runtime.sandboxes.iter().filter_map(|sandbox| sandbox.created_at).min()?;
        Some(created.min(now))
    })
}

/// When the pod was first seen, by its statuses alone.
#[must_use]
pub fn known_start(pod: &Pod, old: Option<&PodStatus>) -> Option<Timestamp> {
    let source = pod.object().status.as_ref();
    let known = [old, source].into_iter().flatten().find_map(|status| status.start_time.as_ref());
    known.map(|start| start.0)
}

fn statuses_of_containers(inputs: &Inputs, status: &mut PodStatus) {
    let pod = inputs.pod;
    let non_empty = |list: Vec<ContainerStatus>| (!list.is_empty()).then_some(list);
    status.init_container_statuses =
        non_empty(containers::convert(inputs, pod.init_containers(), Kind::Init));
    status.container_statuses = non_empty(containers::convert(inputs, pod.containers(), Kind::Regular));
    let ephemeral = containers::ephemeral(pod);
    status.ephemeral_container_statuses = non_empty(containers::convert(inputs, &ephemeral, Kind::Ephemeral));
}

/// Phase, reason and message.
///
/// A pod that this node failed while it ran has succeeded if all its containers then exit with 0, as
/// upstream; a deadline that has passed fails it all the same.
///
/// DIFFERS: any other stored terminal phase also never turns into the other terminal phase, and a
/// pod that ended by itself is not failed by its deadline afterwards. Upstream composes
/// both again until the API server has the phase, which never happens on a standalone node.
/// If the API server's phase is used, its reason and message stay.
fn set_phase(inputs: &Inputs, status: &mut PodStatus) {
    let pod = inputs.pod;
    let source = pod.object().status.as_ref();
    let computed = phase::compute(inputs, status);
    let (shown, stored) = (terminal_phase(source), terminal_phase(inputs.old));
    let has_succeeded = inputs.exit_codes_decide
        && shown.is_none()
        && (stored, computed) == (Some("Failed"), "Succeeded")
        && !waits_to_restart(inputs);
    let settled = shown.or(stored).filter(|_| !has_succeeded);
    let phase = settled.unwrap_or(computed).to_owned();
    // Reason and message come from the status that has this phase: another client may have ended
    // the pod at the API server.
    let sources = [inputs.old, source].into_iter().flatten();
    let sources = sources.filter(|status| status.phase.as_deref() == Some(&phase));
    let full = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    status.reason = sources.clone().find_map(|status| full(&status.reason));
    status.message = sources.clone().find_map(|status| full(&status.message));
    status.phase = Some(phase);
    let since_start = || {
        let start = status.start_time.as_ref()?;
        Some(Duration::try_from(inputs.now.duration_since(start.0)).unwrap_or(Duration::ZERO))
    };
    let active = inputs.active.or_else(since_start);
    let deadline = active.and_then(|active| active_deadline(pod, active));
    let is_settled = is_terminal(status.phase.as_deref()) && !has_succeeded;
    if deadline == Some(Deadline::Exceeded) && !is_settled {
        status.phase = Some("Failed".to_owned());
        status.reason = Some(reasons::DEADLINE_EXCEEDED.to_owned());
        status.message = Some(DEADLINE_MESSAGE.to_owned());
    }
}

/// Whether the restart of a container that has ended is delayed: it has not completed (Go: `getPhase`, which
/// finds it waiting, with an end before).
fn waits_to_restart(inputs: &Inputs) -> bool {
    inputs.pod.containers().iter().any(|spec| {
        let newest = inputs.runtime.newest(&spec.name);
        (inputs.failures)(&spec.name).is_some() && restart::should_start(inputs.pod, spec, newest)
    })
}

/// The phase of a status, if it is terminal.
fn terminal_phase(status: Option<&PodStatus>) -> Option<&str> {
    status?.phase.as_deref().filter(|phase| is_terminal(Some(phase)))
}

/// `started` and `ready` of every container, from its state and its probes.
fn fill_probed(inputs: &Inputs, status: &mut PodStatus) {
    let before = inputs.previous_status();
    let sidecar = |name: &str| {
        inputs.pod.init_containers().iter().any(|container| container.name == name && is_sidecar(container))
    };
    let before_of = |status: &ContainerStatus| {
        before.into_iter().flat_map(all_statuses).find(|old| {
            old.name == status.name && old.container_id.is_some() && old.container_id == status.container_id
        })
    };
    let lists = [
        (&mut status.init_container_statuses, Kind::Init),
        (&mut status.container_statuses, Kind::Regular),
        (&mut status.ephemeral_container_statuses, Kind::Ephemeral),
    ];
    for (list, kind) in lists {
        for container in list.iter_mut().flatten() {
            let running = container.state.as_ref().is_some_and(|state| state.running.is_some());
            let old = before_of(container);
            let id = inputs.runtime.newest(&container.name).map(|newest| &newest.id);
            let verdict = |probe: &dyn Fn(&ContainerId) -> ProbeVerdict, was: bool| match id.map(probe) {
                None | Some(ProbeVerdict::NoProbe | ProbeVerdict::Success) => true,
                Some(ProbeVerdict::Failure | ProbeVerdict::Pending) => false,
                Some(ProbeVerdict::Assumed) => was,
            };
            let started = running && verdict(inputs.startup, old.is_none_or(|old| old.started == Some(true)));
            // Ephemeral containers have no probes that show whether they have started.
            container.started = (kind != Kind::Ephemeral).then_some(started);
            container.ready = if kind == Kind::Init && !sidecar(&container.name) {
                let ended = container.state.as_ref().and_then(|state| state.terminated.as_ref());
                ended.is_some_and(|ended| ended.exit_code == 0)
            } else {
                kind != Kind::Ephemeral
                    && started
                    && verdict(inputs.readiness, old.is_none_or(|old| old.ready))
            };
        }
    }
}

fn set_addresses(inputs: &Inputs, status: &mut PodStatus) {
    let hosts = inputs.node.shown_host_ips();
    let before = || inputs.previous_status().and_then(|before| before.pod_ips.clone()).unwrap_or_default();
    let ips: Vec<PodIP> = if inputs.pod.host_network() {
        on_host_network(before(), inputs.node)
    } else {
        let ready = inputs.runtime.sandboxes.iter().any(|sandbox| sandbox.state == SandboxState::Ready);
        let found = one_per_family(&inputs.runtime.ips, hosts.first());
        // A pod that has stopped keeps the address it had.
        if found.is_empty() && !ready {
            before()
        } else {
            found.iter().map(|ip| PodIP { ip: ip.to_string() }).collect()
        }
    };
    if let Some(primary) = hosts.first() {
        status.host_ip = Some(primary.to_string());
        status.host_ips = Some(hosts.iter().map(|ip| HostIP { ip: ip.to_string() }).collect());
    }
    if let Some(first) = ips.first() {
        status.pod_ip = Some(first.ip.clone());
        status.pod_ips = Some(ips);
    }
}

/// The addresses that a running pod's status has, primary first: what environment variables,
/// hosts files, hooks and probes use (Go: SyncPod in pkg/kubelet/kubelet.go). `found` are
/// those of its sandbox, `old` is its stored status.
///
/// A pod on the host's network has the node's, as far as statuses show these.
#[must_use]
pub fn pod_ips(pod: &Pod, found: &[IpAddr], old: Option<&PodStatus>, node: &NodeAddresses) -> Vec<IpAddr> {
    if !pod.host_network() {
        return one_per_family(found, node.shown_host_ips().first());
    }
    let before = old.or(pod.object().status.as_ref()).and_then(|before| before.pod_ips.clone());
    let ips = on_host_network(before.unwrap_or_default(), node);
    ips.iter().filter_map(|ip| ip.ip.parse().ok()).collect()
}

/// The addresses of a pod on the host's network: those of the node. Once they are known those of a cloud
/// controller stay.
///
/// DIFFERS: the Go kubelet's stay until the pod is replaced (`generateAPIPodStatus`). A node that was moved may
/// be alone, and nothing replaces its pods: they would be given an address of the former network.
fn on_host_network(before: Vec<PodIP>, node: &NodeAddresses) -> Vec<PodIP> {
    let hosts = node.shown_host_ips();
    let mut ips = before;
    let Some(primary) = hosts.first() else { return ips };
    let is_former = |ip: &PodIP| ip.ip.parse::<IpAddr>().is_ok_and(|ip| !hosts.contains(&ip));
    if node.are_own && ips.iter().any(is_former) {
        ips.clear();
    }
    if ips.is_empty() {
        ips.push(PodIP { ip: primary.to_string() });
    }
    // An address of the second family may be added later; the first one stays.
    if let (Some(second), [first]) = (hosts.get(1), ips.as_slice())
        && first.ip.parse::<IpAddr>().is_ok_and(|first| first.is_ipv6() != second.is_ipv6())
    {
        ips.push(PodIP { ip: second.to_string() });
    }
    ips
}

/// At most one address per family, the node's primary family first.
fn one_per_family(ips: &[IpAddr], primary: Option<&IpAddr>) -> Vec<IpAddr> {
    let six_first = primary.is_some_and(IpAddr::is_ipv6);
    [six_first, !six_first]
        .into_iter()
        .filter_map(|six| ips.iter().find(|ip| ip.is_ipv6() == six))
        .copied()
        .collect()
}
