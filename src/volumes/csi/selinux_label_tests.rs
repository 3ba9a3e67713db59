//! Volumes that are mounted with an SELinux label.

use std::sync::Arc;

use super::super::selinux::PodSelinuxLabels;
use super::super::selinux_labels::SelinuxLabels;
use super::fake::{DRIVER, FakeAgent, FakeMounter, Fault};
use super::mounter::Mounter;
use super::names::{GLOBAL_MOUNT, RECORD, TARGET};
use super::request::VolumeRequest;
use super::request::tests::wanted;

fn labelled(pod: &str, label: &str) -> VolumeRequest {
    VolumeRequest { selinux: PodSelinuxLabels::with_label(label), ..wanted(pod, "h") }
}

fn stage_flags(agent: &FakeAgent) -> Vec<String> {
    agent.node.last_stage().volume_capability.mount_flags
}

#[test]
fn pods_with_other_labels_cannot_share_a_mount() {
    let agent = FakeAgent::new();
    agent.driver().spec.selinux_mount = Some(true);
    let (a, b) = (labelled("a", "l1"), labelled("b", "l2"));
    let ready = agent.set_up(&a).unwrap();
    assert!(!ready.selinux_relabel);
    assert_eq!(stage_flags(&agent), ["context=\"l1\""]);
    let error = agent.set_up(&b).unwrap_err();
    assert_eq!(error.to_string(), r#"conflicting SELinux labels of volume pv-h: "l1" and "l2""#);
    // The second pod gets the volume after the first.
    agent.tear_down(&a).unwrap();
    agent.set_up(&b).unwrap();
    assert_eq!(stage_flags(&agent), ["context=\"l2\""]);
    agent.tear_down(&b).unwrap();
    agent.assert_empty();
}

#[test]
fn volume_of_a_driver_without_selinux_mount_is_shared_by_pods_with_other_labels() {
    let agent = FakeAgent::new();
    let (a, b) = (labelled("a", "l1"), labelled("b", "l2"));
    assert!(agent.set_up(&a).unwrap().selinux_relabel && agent.set_up(&b).unwrap().selinux_relabel);
    assert!(stage_flags(&agent).is_empty());
}

/// The volume was never unmounted, and the pod never started.
#[test]
fn volume_that_is_still_staged_with_another_label_is_unstaged_first() {
    for is_restarted in [false, true] {
        let mut agent = FakeAgent::new();
        agent.driver().spec.selinux_mount = Some(true);
        let (a, b) = (labelled("a", "l1"), labelled("b", "l2"));
        agent.set_up(&a).unwrap();
        agent.node.fail("unstage", Fault::Final);
        agent.tear_down(&a).unwrap();
        if is_restarted {
            agent.restart();
        }
        agent.node.fail("unstage", Fault::Final);
        let error = agent.set_up(&b).unwrap_err().to_string();
        let name = b.unique_name();
        assert_eq!(
            error,
            format!(
                "waiting for unmount of volume {name:?}, because it is already mounted to a different pod \
                 with a different SELinux label"
            )
        );
        agent.set_up(&b).unwrap();
        assert_eq!(stage_flags(&agent), ["context=\"l2\""]);
        agent.tear_down(&b).unwrap();
        agent.assert_empty();
    }
}

#[test]
fn label_of_a_volume_is_known_after_a_restart() {
    let mut agent = FakeAgent::new();
    agent.driver().spec.selinux_mount = Some(true);
    let (a, b) = (labelled("a", "l1"), labelled("b", "l2"));
    agent.set_up(&a).unwrap();
    agent.restart();
    let error = agent.set_up(&b).unwrap_err().to_string();
    assert!(error.starts_with("conflicting SELinux labels"), "{error}");
    assert!(!agent.set_up(&a).unwrap().selinux_relabel);
    agent.tear_down(&a).unwrap();
    agent.set_up(&b).unwrap();
}

/// An earlier release mounted volumes of several pods without a label.
#[test]
fn pod_keeps_a_volume_that_was_mounted_without_a_label() {
    let mut agent = FakeAgent::new();
    let (a, b) = (labelled("a", "l1"), labelled("b", "l1"));
    agent.set_up(&a).unwrap();
    agent.restart();
    agent.driver().spec.selinux_mount = Some(true);
    let error = agent.set_up(&b).unwrap_err().to_string();
    assert_eq!(error, r#"conflicting SELinux labels of volume pv-h: "" and "l1""#);
    assert!(agent.set_up(&a).unwrap().selinux_relabel);
    assert!(!agent.changes().iter().any(|call| call.starts_with("unstage")));
}

#[test]
fn label_that_would_be_another_mount_option_is_refused() {
    let agent = FakeAgent::new();
    agent.driver().spec.selinux_mount = Some(true);
    let mut a = wanted("a", "h");
    for level in ["s0\",errors=panic,x=\"", "s0 ", "s0\n", "s0\u{e4}"] {
        a.selinux = PodSelinuxLabels::with_label(&format!("u:r:t:{level}"));
        let error = agent.set_up(&a).unwrap_err();
        assert!(error.to_string().contains("cannot be an option of a mount"), "{error}");
    }
    assert!(agent.node.calls().is_empty() && agent.left().is_empty());
    a.selinux = PodSelinuxLabels::with_label("system_u:object_r:container_file_t:s0-s15:c0.c1023,c7");
    agent.set_up(&a).unwrap();
}

/// An earlier release mounted it without a label, and its record was taken for the present label.
#[test]
fn label_from_before_a_reboot_does_not_count() {
    let mut agent = FakeAgent::new();
    let (a, b, c) = (labelled("a", "l1"), labelled("b", "l1"), labelled("c", "l1"));
    agent.set_up(&a).unwrap();
    agent.set_up(&b).unwrap();
    agent.node.reboot();
    agent.restart();
    agent.driver().spec.selinux_mount = Some(true);
    for pod in [&a, &b, &c] {
        assert!(!agent.set_up(pod).unwrap().selinux_relabel);
    }
    assert_eq!(stage_flags(&agent), ["context=\"l1\""]);
}

/// The agent was killed after it had staged the volume, and before the pod had it.
#[test]
fn pod_whose_volume_was_only_staged_keeps_its_label_over_a_restart() {
    let mut agent = FakeAgent::new();
    agent.driver().spec.selinux_mount = Some(true);
    let (a, b) = (labelled("a", "l1"), labelled("b", "l2"));
    agent.node.fail("publish", Fault::Uncertain);
    agent.set_up(&a).unwrap_err();
    agent.restart();
    let error = agent.set_up(&b).unwrap_err().to_string();
    assert!(error.starts_with("conflicting SELinux labels"), "{error}");
    agent.set_up(&a).unwrap();
}

/// Each of them took the other for a pod that has the volume.
#[test]
fn pods_that_wait_for_an_unmount_do_not_wait_for_each_other() {
    let agent = FakeAgent::new();
    agent.driver().spec.selinux_mount = Some(true);
    let (a, b, c) = (labelled("a", "l1"), labelled("b", "l2"), labelled("c", "l2"));
    agent.set_up(&a).unwrap();
    agent.node.fail("unstage", Fault::Final);
    agent.tear_down(&a).unwrap();
    for pod in [&b, &c] {
        agent.node.fail("unstage", Fault::Final);
        agent.set_up(pod).unwrap_err();
    }
    for pod in [&c, &b] {
        agent.set_up(pod).unwrap();
    }
    assert_eq!(stage_flags(&agent), ["context=\"l2\""]);
    for pod in [&b, &c] {
        agent.tear_down(pod).unwrap();
    }
    agent.assert_empty();
}

/// What a driver stages need not be a mount.
#[test]
fn volume_that_is_staged_without_a_mount_is_unstaged_before_another_label() {
    let agent = FakeAgent::new();
    let (a, b) = (labelled("a", "l1"), labelled("b", "l2"));
    agent.set_up(&a).unwrap();
    let staged = agent.csi.layout.staged(DRIVER, "h").unwrap().join(GLOBAL_MOUNT);
    FakeMounter(Arc::clone(&agent.node)).unmount(&staged).unwrap();
    agent.driver().spec.selinux_mount = Some(true);
    agent.set_up(&b).unwrap_err();
    agent.tear_down(&a).unwrap();
    agent.node.calls();
    agent.set_up(&b).unwrap();
    assert_eq!(agent.changes(), ["unstage h", "stage h", "publish h"]);
}

/// What a driver publishes need not be a mount. The volume was unstaged while the pod had it.
#[test]
fn pod_keeps_a_volume_without_a_mount_when_its_driver_begins_to_mount_with_labels() {
    for is_restarted in [false, true] {
        let mut agent = FakeAgent::new();
        let (a, b) = (labelled("a", "l1"), labelled("b", "l2"));
        agent.set_up(&a).unwrap();
        let target = agent.csi.layout.of_pod(&a.location()).unwrap().join(TARGET);
        FakeMounter(Arc::clone(&agent.node)).unmount(&target).unwrap();
        if is_restarted {
            agent.restart();
        }
        agent.driver().spec.selinux_mount = Some(true);
        agent.node.calls();
        agent.set_up(&b).unwrap_err();
        assert!(agent.set_up(&a).unwrap().selinux_relabel);
        assert!(!agent.changes().iter().any(|call| call.starts_with("unstage")), "{is_restarted}");
        agent.tear_down(&a).unwrap();
        agent.set_up(&b).unwrap();
        assert_eq!(stage_flags(&agent), ["context=\"l2\""]);
        agent.node.check();
    }
}

#[test]
fn pod_keeps_a_volume_without_a_mount_when_its_driver_ceases_to_mount_with_labels() {
    let agent = FakeAgent::new();
    agent.driver().spec.selinux_mount = Some(true);
    let (a, b) = (labelled("a", "l1"), labelled("b", "l2"));
    agent.set_up(&a).unwrap();
    let target = agent.csi.layout.of_pod(&a.location()).unwrap().join(TARGET);
    FakeMounter(Arc::clone(&agent.node)).unmount(&target).unwrap();
    agent.driver().spec.selinux_mount = None;
    agent.set_up(&b).unwrap_err();
    assert!(!agent.set_up(&a).unwrap().selinux_relabel);
    assert!(!agent.changes().iter().any(|call| call.starts_with("unstage")));
    agent.node.check();
}

#[test]
fn volume_with_a_damaged_record_is_unstaged_before_another_label() {
    let agent = FakeAgent::new();
    agent.driver().spec.selinux_mount = Some(true);
    let (a, b) = (labelled("a", "l1"), labelled("b", "l2"));
    agent.set_up(&a).unwrap();
    agent.node.fail("unstage", Fault::Final);
    agent.tear_down(&a).unwrap();
    std::fs::write(agent.csi.layout.staged(DRIVER, "h").unwrap().join(RECORD), "x").unwrap();
    agent.node.calls();
    agent.set_up(&b).unwrap();
    assert_eq!(agent.changes(), ["unstage h", "stage h", "publish h"]);
}

#[test]
fn damaged_record_of_a_pod_leaves_its_mount_without_a_label() {
    let mut agent = FakeAgent::new();
    let a = labelled("a", "l1");
    agent.set_up(&a).unwrap();
    agent.restart();
    agent.driver().spec.selinux_mount = Some(true);
    std::fs::write(agent.csi.layout.of_pod(&a.location()).unwrap().join(RECORD), "x").unwrap();
    assert!(agent.set_up(&a).unwrap().selinux_relabel);
    assert!(stage_flags(&agent).is_empty());
}

/// The gate was switched off: the labels of the pods, which do not count any more, were taken for those of
/// their mounts.
#[test]
fn volume_from_before_the_gate_was_switched_off_is_unstaged_for_pods_with_other_labels() {
    let mut agent = FakeAgent::new();
    agent.driver().spec.selinux_mount = Some(true);
    let (a, b, c) = (labelled("a", "l1"), labelled("b", "l2"), labelled("c", "l3"));
    agent.set_up(&a).unwrap();
    agent.node.fail("unstage", Fault::Final);
    agent.tear_down(&a).unwrap();
    agent.restart_with(SelinuxLabels::for_tests(false));
    for pod in [&b, &c] {
        agent.node.fail("unstage", Fault::Final);
        agent.set_up(pod).unwrap_err();
    }
    for pod in [&c, &b] {
        agent.set_up(pod).unwrap();
    }
    assert!(stage_flags(&agent).is_empty());
}
