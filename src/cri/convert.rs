//! Converts CRI messages to the types of `model::runtime`. Pure functions.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;

use super::runtime_client::ContainerEvent;
use crate::model::ids::{ContainerId, ImageRef, PodUid, SandboxId};
use crate::model::labels;
use crate::model::runtime::{
    AppliedResources, ContainerState, ContainerStatus, LinuxUser, ListedContainer, ListedSandbox,
    MountStatus, SandboxState, SandboxStatus,
};
use crate::transport::generated::{EnumOrUnknown, runtime};

type Labels = BTreeMap<String, String>;

/// The pod of a sandbox or container, read from its labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodLabels {
    pub(super) uid: PodUid,
    pub(super) name: String,
    pub(super) namespace: String,
}

/// `None` if a pod label is missing: then a kubelet did not create the sandbox or container.
pub(super) fn pod_labels(labels: &Labels) -> Option<PodLabels> {
    let label = |key| labels.get(key).filter(|value| !value.is_empty());
    Some(PodLabels {
        uid: PodUid::from(label(labels::POD_UID)?.as_str()),
        name: label(labels::POD_NAME)?.clone(),
        namespace: label(labels::POD_NAMESPACE)?.clone(),
    })
}

pub(super) fn container_event(event: runtime::ContainerEventResponse) -> ContainerEvent {
    let sandbox = event.pod_sandbox_status.into_option().filter(|sandbox| !sandbox.id.is_empty());
    ContainerEvent {
        uid: sandbox.as_ref().and_then(|sandbox| pod_labels(&sandbox.labels)).map(|labels| labels.uid),
        sandbox_known: sandbox.is_some(),
        id: event.container_id,
        made_at: time(event.created_at),
    }
}

/// Converts nanoseconds since 1970. Zero and negative numbers mean "never".
pub(super) fn time(nanoseconds: i64) -> Option<Timestamp> {
    // A Go zero time arrives as a large negative number.
    (nanoseconds > 0).then(|| Timestamp::from_nanosecond(nanoseconds.into()).ok()).flatten()
}

fn sandbox_state(state: EnumOrUnknown<runtime::PodSandboxState>) -> SandboxState {
    match state.enum_value() {
        Ok(runtime::PodSandboxState::SANDBOX_READY) => SandboxState::Ready,
        Ok(runtime::PodSandboxState::SANDBOX_NOTREADY) | Err(_) => SandboxState::NotReady,
    }
}

fn container_state(state: EnumOrUnknown<runtime::ContainerState>) -> ContainerState {
    match state.enum_value() {
        Ok(runtime::ContainerState::CONTAINER_CREATED) => ContainerState::Created,
        Ok(runtime::ContainerState::CONTAINER_RUNNING) => ContainerState::Running,
        Ok(runtime::ContainerState::CONTAINER_EXITED) => ContainerState::Exited,
        Ok(runtime::ContainerState::CONTAINER_UNKNOWN) | Err(_) => ContainerState::Unknown,
    }
}

pub(super) fn listed_sandbox(sandbox: &runtime::PodSandbox) -> ListedSandbox {
    ListedSandbox {
        id: SandboxId::from(sandbox.id.as_str()),
        state: sandbox_state(sandbox.state),
        attempt: sandbox.metadata.attempt,
        created_at: time(sandbox.created_at),
    }
}

/// The annotations that the agent needs even if it has only the container's list entry.
const LISTED_ANNOTATIONS: [&str; 3] = [
    labels::CONTAINER_RESTART_COUNT,
    labels::POD_DELETION_GRACE_PERIOD,
    labels::POD_TERMINATION_GRACE_PERIOD,
];

pub(super) fn listed_container(mut container: runtime::Container) -> ListedContainer {
    container.annotations.retain(|key, _| LISTED_ANNOTATIONS.contains(&key.as_str()));
    let image_ref = first_filled(container.image_id, container.image_ref);
    ListedContainer {
        name: container_name(&container.labels, &container.metadata),
        id: ContainerId::from(container.id),
        sandbox_id: SandboxId::from(container.pod_sandbox_id),
        state: container_state(container.state),
        attempt: container.metadata.attempt,
        created_at: time(container.created_at),
        image_ref: ImageRef::from(image_ref),
        annotations: Arc::new(container.annotations),
    }
}

fn container_name(labels: &Labels, metadata: &runtime::ContainerMetadata) -> String {
    labels.get(labels::CONTAINER_NAME).unwrap_or(&metadata.name).clone()
}

fn first_filled(first: String, second: String) -> String {
    if first.is_empty() { second } else { first }
}

/// Sorts the newest sandbox first, by attempt, then by creation time, then by id.
pub(super) fn sandbox_order(a: &ListedSandbox, b: &ListedSandbox) -> Ordering {
    b.attempt.cmp(&a.attempt).then(b.created_at.cmp(&a.created_at)).then(a.id.cmp(&b.id))
}

/// Sorts by attempt, creation time and id: of one name, the newest container is first.
pub(super) fn container_order(a: &ListedContainer, b: &ListedContainer) -> Ordering {
    // The attempt is compared first, because a clock can be set back.
    b.attempt.cmp(&a.attempt).then(b.created_at.cmp(&a.created_at)).then(a.id.cmp(&b.id))
}

/// Makes the status of a sandbox from its list entry, without a call for its full status.
pub(super) fn listed_sandbox_status(listed: &ListedSandbox) -> SandboxStatus {
    SandboxStatus {
        id: listed.id.clone(),
        attempt: listed.attempt,
        state: listed.state,
        created_at: listed.created_at,
        host_network: false,
        network_reported: false,
        ips: Vec::new(),
    }
}

pub(super) fn sandbox_status(status: &runtime::PodSandboxStatus) -> SandboxStatus {
    let network = status.linux.namespaces.options.network.enum_value();
    let host_network = network == Ok(runtime::NamespaceMode::NODE);
    SandboxStatus {
        id: SandboxId::from(status.id.as_str()),
        attempt: status.metadata.attempt,
        state: sandbox_state(status.state),
        created_at: time(status.created_at),
        host_network,
        network_reported: status.network.is_some(),
        // In the node's network namespace, the runtime does not assign addresses.
        ips: if host_network { Vec::new() } else { addresses(&status.network) },
    }
}

/// The primary address and the others; if one is invalid, none is used.
fn addresses(network: &runtime::PodSandboxNetworkStatus) -> Vec<IpAddr> {
    if network.ip.is_empty() {
        return Vec::new();
    }
    let texts = std::iter::once(&network.ip).chain(network.additional_ips.iter().map(|more| &more.ip));
    let parsed: Result<Vec<IpAddr>, _> = texts.map(|text| text.parse()).collect();
    parsed.unwrap_or_else(|_| {
        log::debug!("the runtime reported an invalid address; the primary one is {:?}", network.ip);
        Vec::new()
    })
}

pub(super) fn container_status(status: runtime::ContainerStatus, sandbox: &SandboxId) -> ContainerStatus {
    let annotation = |key| status.annotations.get(key).map_or("", String::as_str);
    let state = container_state(status.state);
    let ended = matches!(state, ContainerState::Exited | ContainerState::Unknown);
    ContainerStatus {
        name: container_name(&status.labels, &status.metadata),
        state,
        created_at: time(status.created_at),
        started_at: time(status.started_at),
        finished_at: time(status.finished_at).filter(|_| ended),
        exit_code: status.exit_code,
        image: status.image.image.clone(),
        hash: u32::from_str_radix(annotation(labels::CONTAINER_HASH), 16).ok(),
        restart_count: annotation(labels::CONTAINER_RESTART_COUNT).parse().unwrap_or(0),
        termination_message_path: annotation(labels::CONTAINER_TERMINATION_MESSAGE_PATH).to_owned(),
        termination_message_policy: annotation(labels::CONTAINER_TERMINATION_MESSAGE_POLICY).to_owned(),
        sandbox_id: sandbox.clone(),
        resources: status.resources.linux.as_ref().map(resources),
        cpus: Some(status.resources.linux.cpuset_cpus.clone()).filter(|cpus| !cpus.is_empty()),
        user: status.user.linux.as_ref().map(|user| LinuxUser {
            uid: user.uid,
            gid: user.gid,
            supplemental_groups: user.supplemental_groups.clone(),
        }),
        mounts: status.mounts.iter().map(mount).collect(),
        id: ContainerId::from(status.id),
        image_id: ImageRef::from(first_filled(status.image_id, status.image_ref)),
        reason: status.reason,
        message: status.message,
        log_path: status.log_path,
    }
}

fn resources(linux: &runtime::LinuxContainerResources) -> AppliedResources {
    // Zero means that the runtime reported no value; a negative quota means no limit.
    let reported = |value: i64| (value > 0).then_some(value);
    AppliedResources {
        cpu_shares: reported(linux.cpu_shares),
        cpu_quota: reported(linux.cpu_quota),
        cpu_period: reported(linux.cpu_period),
        memory_limit_bytes: reported(linux.memory_limit_in_bytes),
    }
}

fn mount(mount: &runtime::Mount) -> MountStatus {
    MountStatus {
        container_path: mount.container_path.clone(),
        host_path: mount.host_path.clone(),
        readonly: mount.readonly,
        recursive_read_only: mount.recursive_read_only,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::generated::MessageField;

    fn texts(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn container_without_all_three_pod_labels_is_of_no_pod() {
        let all = texts(&[
            ("io.kubernetes.pod.uid", "u1"),
            ("io.kubernetes.pod.name", "web"),
            ("io.kubernetes.pod.namespace", "default"),
        ]);
        let found = pod_labels(&all).unwrap();
        assert_eq!((found.uid.as_str(), &*found.name, &*found.namespace), ("u1", "web", "default"));
        for missing in all.keys() {
            let mut some = all.clone();
            some.remove(missing);
            assert_eq!(pod_labels(&some), None, "{missing}");
            some.insert(missing.clone(), String::new());
            assert_eq!(pod_labels(&some), None, "{missing}");
        }
    }

    #[test]
    fn zero_and_negative_times_are_absent() {
        for (nanoseconds, expected) in
            [(0, None), (-6_795_364_578_871_345_152, None), (1_500_000_000, Some("1970-01-01T00:00:01.5Z"))]
        {
            assert_eq!(time(nanoseconds).map(|time| time.to_string()).as_deref(), expected);
        }
        assert!(time(i64::MAX).is_some());
    }

    #[test]
    fn container_status_is_converted() {
        let status = runtime::ContainerStatus {
            id: "c1".into(),
            metadata: MessageField::some(runtime::ContainerMetadata {
                name: "ignored".into(),
                attempt: 2,
                ..Default::default()
            }),
            state: runtime::ContainerState::CONTAINER_EXITED.into(),
            created_at: 1,
            finished_at: 3_000_000_000,
            exit_code: 137,
            image_ref: "docker.io/library/x@sha256:aa".into(),
            reason: "OOMKilled".into(),
            labels: texts(&[("io.kubernetes.container.name", "main")]),
            annotations: texts(&[
                ("io.kubernetes.container.hash", "c97bf8df"),
                ("io.kubernetes.container.restartCount", "2"),
                ("io.kubernetes.container.terminationMessagePath", "/dev/termination-log"),
                ("io.kubernetes.container.terminationMessagePolicy", "File"),
            ]),
            resources: MessageField::some(runtime::ContainerResources {
                linux: MessageField::some(runtime::LinuxContainerResources {
                    cpu_shares: 102,
                    cpu_quota: -1,
                    cpu_period: 100_000,
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let read = container_status(status.clone(), &SandboxId::from("s1"));
        assert_eq!(read.name, "main");
        assert_eq!(read.state, ContainerState::Exited);
        assert_eq!((read.hash, read.restart_count), (Some(0xc97b_f8df), 2));
        assert_eq!((read.started_at, read.finished_at), (None, time(3_000_000_000)));
        assert_eq!(read.image_id.as_str(), "docker.io/library/x@sha256:aa");
        assert_eq!(read.user, None);
        let applied = read.resources.unwrap();
        assert_eq!(
            (applied.cpu_shares, applied.cpu_quota, applied.memory_limit_bytes),
            (Some(102), None, None)
        );

        let foreign = runtime::ContainerStatus {
            annotations: texts(&[
                ("io.kubernetes.container.hash", "not hex"),
                ("io.kubernetes.container.restartCount", "-1"),
            ]),
            state: EnumOrUnknown::from_i32(99),
            image_id: "sha256:bb".into(),
            labels: Labels::new(),
            resources: MessageField::none(),
            ..status
        };
        let read = container_status(foreign, &SandboxId::from("s1"));
        assert_eq!((read.hash, read.restart_count, read.state), (None, 0, ContainerState::Unknown));
        assert_eq!((&*read.name, read.image_id.as_str(), read.resources), ("ignored", "sha256:bb", None));
    }

    #[test]
    fn invalid_and_host_network_addresses_are_not_used() {
        let status = |ip: &str, more: &[&str], network| runtime::PodSandboxStatus {
            network: MessageField::some(runtime::PodSandboxNetworkStatus {
                ip: ip.into(),
                additional_ips: more
                    .iter()
                    .map(|ip| runtime::PodIP { ip: (*ip).to_owned(), ..Default::default() })
                    .collect(),
                ..Default::default()
            }),
            linux: MessageField::some(runtime::LinuxPodSandboxStatus {
                namespaces: MessageField::some(runtime::Namespace {
                    options: MessageField::some(runtime::NamespaceOption {
                        network: EnumOrUnknown::new(network),
                        ..Default::default()
                    }),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let (own, node) = (runtime::NamespaceMode::POD, runtime::NamespaceMode::NODE);
        for (ip, more, network, expected) in [
            ("10.1.2.3", &["fd00::1"][..], own, &["10.1.2.3", "fd00::1"][..]),
            ("", &["fd00::1"], own, &[]),
            ("10.1.2.3", &["junk"], own, &[]),
            ("10.1.2.3", &[], node, &[]),
        ] {
            let read = sandbox_status(&status(ip, more, network));
            let ips: Vec<String> = read.ips.iter().map(ToString::to_string).collect();
            assert_eq!(ips, expected, "{ip:?} {more:?}");
            assert_eq!(read.host_network, network == node);
            assert!(read.network_reported);
        }
        assert!(!sandbox_status(&runtime::PodSandboxStatus::default()).network_reported);
    }

    #[test]
    fn newest_container_has_the_highest_attempt_regardless_of_the_clock() {
        let container = |id: &str, attempt, created_at| {
            listed_container(runtime::Container {
                id: id.into(),
                created_at,
                metadata: MessageField::some(runtime::ContainerMetadata { attempt, ..Default::default() }),
                ..Default::default()
            })
        };
        let mut all = [container("old", 0, 9_000_000_000), container("new", 1, 5_000_000_000)];
        all.sort_by(container_order);
        assert_eq!(all[0].id.as_str(), "new");
    }

    #[test]
    fn sandboxes_are_sorted_newest_first() {
        let sandbox = |id: &str, attempt, created| ListedSandbox {
            id: SandboxId::from(id),
            state: SandboxState::Ready,
            attempt,
            created_at: time(created),
        };
        let mut sandboxes = [sandbox("b", 1, 5), sandbox("a", 1, 5), sandbox("c", 1, 9), sandbox("d", 2, 1)];
        sandboxes.sort_by(sandbox_order);
        let ids: Vec<&str> = sandboxes.iter().map(|sandbox| sandbox.id.as_str()).collect();
        assert_eq!(ids, ["d", "c", "a", "b"]);
    }
}
