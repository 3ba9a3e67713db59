//! The life of volumes without faults, and what drivers are asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::super::attachment::{Controller, NodeVolumes};
use super::super::error::VolumeError;
use super::super::kind::{Certainty, Form, KindError, Phase, ReadyVolume};
use super::driver::{DriverCapabilities, Secrets};
use super::fake::{DRIVER, FakeAgent, Fault};
use super::names;
use super::rebuild::{self, UnreadableDirs};
use super::recover::find_name;
use super::request::tests::wanted;
use super::request::{Lifecycle, TOKENS, VolumeRequest};
use super::volume::mount;
use crate::model::storage::{
    AttachError, CsiDriverSpec, FsGroupPolicy, SecretReference, TokenRequest, VolumeAttachment,
};
use crate::util::sha256;
use crate::util::stop::{self, StopToken};
use crate::util::testing::in_background;

fn kind_error(error: VolumeError) -> KindError {
    let VolumeError::Kind(error) = error else { panic!("{error}") };
    error
}

#[test]
fn volume_is_staged_once_for_two_pods_and_unstaged_after_the_last() {
    let agent = FakeAgent::new();
    let (a, b) = (wanted("a", "h"), wanted("b", "h"));
    let ready = agent.set_up(&a).unwrap();
    let root = agent.root.path();
    assert_eq!(ready.host_path, root.join("pods/a/volumes/kubernetes.io~csi/pv-h/mount"));
    assert!(ready.selinux_relabel && !ready.read_only);
    agent.set_up(&b).unwrap();
    assert_eq!(
        agent.node.calls(),
        ["capabilities", "stage h", "publish h", "capabilities", "publish h"].map(str::to_owned)
    );
    let global = format!("plugins/kubernetes.io/csi/{DRIVER}/{}/globalmount", sha256::sha256_hex(b"h"));
    let stage = agent.node.last_stage();
    assert_eq!(stage.staging_path, root.join(&global).display().to_string());
    assert_eq!(stage.publish_context.get("dev").map(String::as_str), Some("sdx"));
    assert_eq!(stage.volume_capability.access_mode, 1);
    assert_eq!(agent.csi.attachments.in_use(), [format!("kubernetes.io/csi/{DRIVER}^h")]);
    let record = root.join("pods/a/volumes/kubernetes.io~csi/pv-h/vol_data.json");
    let record: BTreeMap<String, String> = serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
    assert_eq!(
        record.into_iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>(),
        [
            format!("attachmentID={}", names::attachment_name("h", DRIVER, "n1")),
            format!("driverName={DRIVER}"),
            "nodeName=n1".to_owned(),
            "specVolID=pv-h".to_owned(),
            "volumeHandle=h".to_owned(),
            "volumeLifecycleMode=Persistent".to_owned(),
        ]
    );
    agent.tear_down(&a).unwrap();
    assert_eq!(agent.node.calls(), ["unpublish h"]);
    agent.tear_down(&b).unwrap();
    assert_eq!(agent.node.calls(), ["unpublish h", "capabilities", "unstage h"]);
    agent.tear_down(&b).unwrap();
    assert!(agent.node.calls().is_empty());
    agent.assert_empty();
}

#[test]
fn driver_without_staging_only_publishes() {
    let agent = FakeAgent::new();
    agent.node.set_capabilities(DriverCapabilities::default());
    let a = wanted("a", "h");
    agent.set_up(&a).unwrap();
    assert_eq!(agent.node.calls(), ["capabilities", "publish h"]);
    assert_eq!(agent.node.last_publish().staging_path, "");
    agent.tear_down(&a).unwrap();
    assert_eq!(agent.node.calls(), ["unpublish h", "capabilities"]);
    assert!(agent.left().is_empty(), "{:?}", agent.left());
}

#[test]
fn inline_volume_is_neither_attached_nor_staged() {
    let agent = FakeAgent::new();
    *agent.cluster.attachment.lock().unwrap() = None;
    agent.driver().spec = CsiDriverSpec {
        volume_lifecycle_modes: vec!["Ephemeral".to_owned()],
        pod_info_on_mount: Some(true),
        ..CsiDriverSpec::default()
    };
    let mut a = wanted("a", &names::inline_handle("a", "v"));
    a.lifecycle = Lifecycle::Ephemeral;
    a.spec_name = "v".to_owned();
    agent.set_up(&a).unwrap();
    let publish = agent.node.last_publish();
    assert_eq!(publish.volume, format!("csi-{}", sha256::sha256_hex(b"av")));
    let ephemeral = publish.volume_context.get("csi.storage.k8s.io/ephemeral");
    assert_eq!(ephemeral.map(String::as_str), Some("true"));
    assert_eq!((agent.node.staged(), publish.staging_path.as_str()), (0, ""));
    agent.tear_down(&a).unwrap();
    assert!(agent.left().is_empty(), "{:?}", agent.left());
}

#[test]
fn secrets_and_tokens_reach_the_driver_and_no_text() {
    let agent = FakeAgent::new();
    let pairs = [("user".to_owned(), "geheim".to_owned())].into();
    agent.cluster.secrets.lock().unwrap().insert("s".to_owned(), Secrets::new(pairs));
    let name = |name: &str| Some(SecretReference { name: name.to_owned(), namespace: "n".to_owned() });
    let mut a = wanted("a", "h");
    a.source.node_stage_secret_ref = name("s");
    a.source.node_publish_secret_ref = name("s");
    agent.driver().spec.token_requests =
        vec![TokenRequest { audience: "x".to_owned(), expiration_seconds: Some(600) }];
    agent.set_up(&a).unwrap();
    assert_eq!(agent.node.last_stage().secrets.expose().len(), 1);
    let publish = agent.node.last_publish();
    assert_eq!(publish.secrets.expose().len(), 1);
    assert_eq!(
        publish.volume_context.get(TOKENS).unwrap(),
        r#"{"x":{"expirationTimestamp":"2030-01-01T00:00:00Z","token":"token-default-x-600"}}"#
    );
    agent.driver().spec.service_account_token_in_secrets = Some(true);
    agent.set_up(&a).unwrap();
    let publish = agent.node.last_publish();
    assert!(publish.secrets.expose().contains_key(TOKENS) && publish.volume_context.is_empty());
    assert!(!format!("{publish:?}").contains("geheim"));
    a.source.node_publish_secret_ref = name("none");
    let error = kind_error(agent.set_up(&a).unwrap_err());
    assert_eq!(
        error.message,
        "kubernetes.io/csi: fetching NodePublishSecretRef n/none failed: secrets \"none\" not found"
    );
    assert_eq!((error.phase, error.certainty), (Phase::SetUp, Certainty::NotBegun));
}

#[test]
fn volume_waits_for_its_attachment() {
    let agent = FakeAgent::new();
    let a = wanted("a", "h");
    let id = names::attachment_name("h", DRIVER, "n1");
    let attempt = |attachment: Option<VolumeAttachment>| {
        *agent.cluster.attachment.lock().unwrap() = attachment;
        let error = kind_error(agent.set_up(&a).unwrap_err());
        assert_eq!((error.phase, error.certainty), (Phase::WaitForAttach, Certainty::NotBegun));
        error.message
    };
    let text = attempt(None);
    assert!(text.contains(&format!("volume h has GET error for volume attachment {id}: ")), "{text}");
    let mut attachment = VolumeAttachment::default();
    let waiting = "timed out waiting for external-attacher of d.example CSI driver to attach volume h";
    assert_eq!(attempt(Some(attachment.clone())), waiting);
    attachment.status.attach_error = Some(AttachError { message: "no slot".to_owned(), error_code: None });
    assert_eq!(attempt(Some(attachment.clone())), "no slot");
    attachment.metadata.deletion_timestamp = Some("2030-01-01T00:00:00Z".to_owned());
    assert_eq!(attempt(Some(attachment)), "volume attachment is being deleted");
    assert!(agent.node.calls().is_empty() && agent.left().is_empty());
    *agent.cluster.attachment.lock().unwrap() = None;
    agent.driver().spec.attach_required = Some(false);
    agent.set_up(&a).unwrap();
    assert!(agent.node.last_stage().publish_context.is_empty());
}

#[test]
fn volume_for_which_the_node_has_no_place_is_known_as_such() {
    let agent = FakeAgent::new();
    let attempt = |form, code, period| {
        let mut attachment = VolumeAttachment::default();
        attachment.status.attach_error =
            Some(AttachError { message: "no slot".to_owned(), error_code: code });
        *agent.cluster.attachment.lock().unwrap() = Some(attachment);
        agent.driver().spec.node_allocatable_update_period_seconds = period;
        let error = kind_error(agent.set_up(&VolumeRequest { form, ..wanted("a", "h") }).unwrap_err());
        assert_eq!(error.message, "no slot");
        error.phase
    };
    let (filesystem, block) = (Form::Filesystem, Form::Block);
    assert_eq!(attempt(filesystem, Some(8), Some(60)), Phase::NoPlace);
    assert_eq!(attempt(block, Some(8), Some(60)), Phase::NoPlaceBlock);
    // Another error, or a driver whose limit is not asked for.
    assert_eq!(attempt(filesystem, Some(2), Some(60)), Phase::WaitForAttach);
    assert_eq!(attempt(filesystem, None, Some(60)), Phase::WaitForAttach);
    assert_eq!(attempt(block, Some(8), None), Phase::WaitForAttachBlock);
    assert_eq!(agent.csi.registry().take_exhausted().len(), 1);
}

#[test]
fn unknown_driver_is_named_as_by_upstream() {
    let agent = FakeAgent::new();
    let mut a = wanted("a", "h");
    a.source.driver = "other".to_owned();
    let error = kind_error(agent.set_up(&a).unwrap_err());
    assert_eq!(error.phase.operation_name(), "MountVolume.MountDevice");
    assert_eq!(
        error.message,
        "kubernetes.io/csi: attacher.MountDevice failed to create newCsiDriverClient: driver name other not found in the list of registered CSI drivers"
    );
}

#[test]
fn staging_is_repeated_and_undone_unless_it_certainly_did_nothing() {
    for (fault, undone) in [(Fault::Final, vec![]), (Fault::Uncertain, vec!["unstage h"])] {
        let agent = FakeAgent::new();
        let a = wanted("a", "h");
        agent.node.fail("stage", fault);
        agent.node.fail("stage", fault);
        for _ in 0..2 {
            agent.set_up(&a).unwrap_err();
            assert_eq!(agent.changes(), ["stage h"], "{fault:?}");
        }
        // The pod is deleted before its volume is ready.
        agent.tear_down(&a).unwrap();
        agent.release_unused().unwrap();
        assert_eq!(agent.changes(), undone, "{fault:?}");
        assert!(agent.left().is_empty(), "{:?}", agent.left());
        // Another pod has it, and the call succeeds.
        agent.set_up(&wanted("b", "h")).unwrap();
        assert_eq!(agent.changes(), ["stage h", "publish h"], "{fault:?}");
    }
}

#[test]
fn volume_is_staged_again_for_the_next_pod_after_a_failed_unstaging() {
    for fault in [Fault::Final, Fault::Uncertain, Fault::LostResponse] {
        let agent = FakeAgent::new();
        let (a, b) = (wanted("a", "h"), wanted("b", "h"));
        agent.set_up(&a).unwrap();
        agent.node.fail("unstage", fault);
        // The volume is not the pod's any more, which can end. It must not be detached yet.
        agent.tear_down(&a).unwrap();
        assert_eq!(agent.csi.users().locations(Some(&a.pod.uid)), []);
        assert_eq!(agent.csi.attachments.in_use(), [a.unique_name()], "{fault:?}");
        agent.changes();
        agent.set_up(&b).unwrap();
        assert_eq!(agent.changes(), ["stage h", "publish h"], "{fault:?}");
        agent.tear_down(&b).unwrap();
        assert!(agent.csi.attachments.in_use().is_empty());
        assert_eq!(agent.changes(), ["unpublish h", "unstage h"], "{fault:?}");
        agent.assert_empty();
    }
}

#[test]
fn changed_object_of_a_driver_counts_for_the_next_pod() {
    let agent = FakeAgent::new();
    let set = |pod_info| agent.driver().spec.pod_info_on_mount = Some(pod_info);
    for (pod, pod_info, keys) in [("a", true, 5), ("b", false, 0), ("c", true, 5)] {
        set(pod_info);
        agent.set_up(&wanted(pod, "h")).unwrap();
        assert_eq!(agent.node.last_publish().volume_context.len(), keys, "{pod}");
    }
}

#[test]
fn failed_operations_are_reported_as_by_upstream() {
    let agent = FakeAgent::new();
    let a = wanted("a", "h");
    agent.node.fail("stage", Fault::Final);
    let error = kind_error(agent.set_up(&a).unwrap_err());
    assert_eq!((error.phase, error.certainty), (Phase::MountDevice, Certainty::Final));
    assert_eq!(error.message, "rpc error: code = Internal desc = stage failed");
    assert!(agent.left().is_empty(), "{:?}", agent.left());
    agent.node.fail("publish", Fault::Uncertain);
    let error = kind_error(agent.set_up(&a).unwrap_err());
    assert_eq!((error.phase, error.certainty), (Phase::SetUp, Certainty::Uncertain));
    assert!(agent.left().iter().any(|name| name.ends_with("pv-h/vol_data.json")));
    agent.node.fail("publish", Fault::Babble);
    let error = kind_error(agent.set_up(&a).unwrap_err());
    assert!(error.message.len() < 5000);
    agent.tear_down(&a).unwrap();
    assert!(agent.left().is_empty(), "{:?}", agent.left());
    assert_eq!(agent.node.staged(), 0);
}

#[test]
fn failed_repetition_leaves_a_published_volume_alone() {
    let agent = FakeAgent::new();
    agent.driver().spec.requires_republish = Some(true);
    let a = wanted("a", "h");
    let volume = agent.csi.volume(a.clone());
    assert!(!volume.requires_remount());
    agent.set_up(&a).unwrap();
    assert!(volume.requires_remount());
    agent.node.fail("publish", Fault::Final);
    agent.set_up(&a).unwrap_err();
    assert_eq!(agent.node.mounts().len(), 2);
    assert!(agent.left().iter().any(|name| name.ends_with("pv-h/vol_data.json")));
    agent.tear_down(&a).unwrap();
    assert!(!volume.requires_remount());
    assert!(agent.left().is_empty(), "{:?}", agent.left());
}

#[test]
fn hanging_driver_ends_with_the_stop_signal_and_is_undone() {
    let agent = FakeAgent::new();
    let a = wanted("a", "h");
    for method in ["stage", "publish"] {
        agent.node.fail(method, Fault::Hang);
        let (source, token) = stop::pair();
        let volume = agent.csi.volume(a.clone());
        let running = in_background(move || volume.set_up(&token));
        drop(source);
        assert!(running.result().is_err());
        // The stop signal may have come before the call.
        agent.node.forget_faults();
    }
    agent.tear_down(&a).unwrap();
    agent.release_unused().unwrap();
    agent.assert_empty();
}

#[test]
fn data_below_a_mount_that_stays_are_not_removed() {
    let agent = FakeAgent::new();
    let a = wanted("a", "h");
    let ready = agent.set_up(&a).unwrap();
    // The driver says that it is done, but a file is there.
    std::fs::write(ready.host_path.join("data"), "precious").unwrap();
    let error = agent.tear_down(&a).unwrap_err();
    assert!(error.to_string().contains("cannot remove directory"), "{error}");
    assert_eq!(std::fs::read_to_string(ready.host_path.join("data")).unwrap(), "precious");
    std::fs::remove_file(ready.host_path.join("data")).unwrap();
    agent.tear_down(&a).unwrap();
    assert!(agent.left().is_empty(), "{:?}", agent.left());
}

#[test]
fn mounts_that_a_driver_forgot_are_unmounted() {
    let agent = FakeAgent::new();
    let a = wanted("a", "h");
    let ready = agent.set_up(&a).unwrap();
    agent.node.mount(&ready.host_path);
    agent.tear_down(&a).unwrap();
    assert!(agent.node.mounts().is_empty() && agent.left().is_empty());
}

#[test]
fn volume_grows_at_its_mount_and_later() {
    let agent = FakeAgent::new();
    let mut a = wanted("a", "h");
    a.grow_to = Some(1 << 30);
    assert_eq!(agent.set_up(&a).unwrap().grown_to, Some(1 << 30));
    let expand = agent.node.last_expand();
    assert!(expand.path.ends_with("pods/a/volumes/kubernetes.io~csi/pv-h/mount"));
    assert!(expand.staging_path.ends_with("globalmount"));
    let volume = agent.csi.volume(a.clone());
    assert_eq!(volume.expand(2 << 30, &StopToken::never()).unwrap(), Some(2 << 30));
    agent.node.fail("expand", Fault::Final);
    let error = kind_error(volume.expand(3 << 30, &StopToken::never()).unwrap_err());
    assert!(error.message.starts_with("Expander.NodeExpand failed to expand the volume : rpc error"));
    agent.node.set_capabilities(DriverCapabilities { stage: true, ..DriverCapabilities::default() });
    assert_eq!(volume.expand(3 << 30, &StopToken::never()).unwrap(), None);
}

#[test]
fn block_device_is_published_held_and_linked() {
    let agent = FakeAgent::new();
    let block = |pod: &str| VolumeRequest { form: Form::Block, ..wanted(pod, "h") };
    let (a, b) = (block("a"), block("b"));
    let ready = agent.set_up(&a).unwrap();
    let devices = agent.root.path().join("plugins/kubernetes.io/csi/volumeDevices");
    assert_eq!(ready.host_path, devices.join("publish/pv-h/a"));
    assert_eq!(agent.node.mounts(), [devices.join("pv-h/dev/a")]);
    let link = agent.root.path().join("pods/a/volumeDevices/kubernetes.io~csi/pv-h");
    assert_eq!(std::fs::read_link(&link).unwrap(), ready.host_path);
    assert!(devices.join("pv-h/data/vol_data.json").exists());
    let stage = agent.node.last_stage();
    assert_eq!(stage.staging_path, devices.join("staging/pv-h").display().to_string());
    assert!(stage.volume_capability.is_block && stage.volume_capability.fs_type.is_empty());
    agent.set_up(&b).unwrap();
    agent.tear_down(&a).unwrap();
    assert!(!link.exists() && agent.node.staged() == 1);
    agent.tear_down(&b).unwrap();
    agent.assert_empty();
    assert_eq!(agent.node.staged(), 0);
    agent.node.check();
}

#[test]
fn restarted_agent_knows_volumes_and_removes_unused_ones() {
    let (a, b) = (wanted("a", "h"), VolumeRequest { form: Form::Block, ..wanted("b", "i") });
    let mut agent = FakeAgent::with(&a);
    agent.set_up(&b).unwrap();
    agent.restart();
    assert_eq!(agent.csi.users().locations(None), [a.location(), b.location()]);
    assert_eq!(agent.csi.users().locations(Some(&a.pod.uid)), [a.location()]);
    agent.release_unused().unwrap();
    assert!(agent.node.calls().is_empty());
    agent.tear_down(&a).unwrap();
    agent.tear_down(&b).unwrap();
    agent.assert_empty();
}

/// The controller detached a disk whose file system was still written.
#[test]
fn volume_is_in_use_until_it_is_unstaged_also_after_a_restart() {
    let mut agent = FakeAgent::new();
    let volumes = [wanted("a", "h"), VolumeRequest { form: Form::Block, ..wanted("a", "i") }];
    let names: Vec<String> = volumes.iter().map(VolumeRequest::unique_name).collect();
    for volume in &volumes {
        agent.set_up(volume).unwrap();
        agent.node.fail("unstage", Fault::Uncertain);
        agent.tear_down(volume).unwrap();
    }
    assert_eq!((agent.node.staged(), agent.node.published()), (2, 0));
    assert_eq!(agent.csi.attachments.in_use(), names);
    agent.restart();
    assert!(agent.csi.users().locations(None).is_empty());
    assert_eq!(agent.csi.attachments.in_use(), names);
    agent.release_unused().unwrap();
    assert_eq!(agent.node.staged(), 0);
    assert!(agent.csi.attachments.in_use().is_empty());
}

#[test]
fn volume_is_mounted_once_the_node_shows_it_in_use_and_attached() {
    let mut agent = FakeAgent::new();
    let a = wanted("a", "h");
    let name = a.unique_name();
    let shown: Arc<Mutex<Option<NodeVolumes>>> = Arc::default();
    let controlled = |agent: &FakeAgent| {
        let shown = Arc::clone(&shown);
        agent.csi.attachments.set_controller(Controller {
            shown: Box::new(move || shown.lock().unwrap().clone()),
            changed: Box::new(|| {}),
        });
    };
    controlled(&agent);
    let waits = |agent: &FakeAgent| {
        assert!(matches!(agent.set_up(&a), Err(VolumeError::AwaitsAttachment(_))));
        assert_eq!(agent.csi.attachments.in_use(), [name.as_str()]);
        assert!(agent.node.calls().is_empty() && agent.left().is_empty());
    };
    waits(&agent);
    // The driver has no place for it, which the pod's end after a long wait must show.
    let mut attachment = VolumeAttachment::default();
    attachment.status.attach_error = Some(AttachError { message: "no slot".to_owned(), error_code: Some(8) });
    let attached = agent.cluster.attachment.lock().unwrap().replace(attachment);
    for period in [None, Some(60)] {
        agent.driver().spec.node_allocatable_update_period_seconds = period;
        let Err(VolumeError::AwaitsAttachment(wait)) = agent.set_up(&a) else { panic!() };
        assert_eq!(wait.no_place, period.map(|_| "no slot".to_owned()));
    }
    assert_eq!(agent.csi.registry().take_exhausted().len(), 1);
    *agent.cluster.attachment.lock().unwrap() = attached;
    let both: BTreeSet<String> = [name.clone()].into();
    *shown.lock().unwrap() = Some(NodeVolumes { in_use: both.clone(), attached: both.clone() });
    waits(&agent);
    let number = agent.csi.attachments.list().0;
    agent.csi.attachments.stored(number, &both);
    *shown.lock().unwrap() = Some(NodeVolumes { in_use: both.clone(), attached: BTreeSet::new() });
    waits(&agent);
    *shown.lock().unwrap() = Some(NodeVolumes { in_use: both.clone(), attached: both });
    agent.set_up(&a).unwrap();
    // The volume of a running pod waits for nothing.
    *shown.lock().unwrap() = None;
    agent.set_up(&a).unwrap();
    agent.restart();
    controlled(&agent);
    agent.set_up(&a).unwrap();
    agent.node.calls();
    // Another pod waits, and its end is not held up.
    let b = wanted("b", "h");
    assert!(matches!(agent.set_up(&b), Err(VolumeError::AwaitsAttachment(_))));
    agent.tear_down(&b).unwrap();
    agent.tear_down(&a).unwrap();
    assert!(agent.csi.attachments.in_use().is_empty() && agent.left().is_empty());
    // A driver without attachments does not wait.
    agent.driver().spec.attach_required = Some(false);
    agent.set_up(&a).unwrap();
    assert!(agent.csi.attachments.in_use().is_empty());
}

#[test]
fn damaged_record_stops_nothing_and_loses_no_mount() {
    let a = wanted("a", "h");
    let mut agent = FakeAgent::with(&a);
    for dir in [
        "pods/a/volumes/kubernetes.io~csi/pv-h".to_owned(),
        format!("plugins/kubernetes.io/csi/{DRIVER}/{}", sha256::sha256_hex(b"h")),
    ] {
        std::fs::write(agent.root.path().join(dir).join("vol_data.json"), "{").unwrap();
    }
    agent.restart();
    assert!(agent.csi.users().locations(None).is_empty());
    agent.release_unused().unwrap();
    assert_eq!(agent.node.mounts().len(), 2);
    // The pod is still there: its set-up writes both records again.
    agent.set_up(&a).unwrap();
    agent.tear_down(&a).unwrap();
    agent.assert_empty();
}

/// An agent that gives files to the group of the pod, and such a pod's volume.
fn with_fs_group() -> (FakeAgent, VolumeRequest) {
    let agent = FakeAgent::new();
    agent.driver().spec.fs_group_policy = Some(FsGroupPolicy::File);
    let fs_group = Some(rustix::process::getegid().as_raw());
    (agent, VolumeRequest { fs_group, ..wanted("a", "h") })
}

/// Such a walk was aborted with its set-up, and began again at the first file.
#[test]
fn walk_through_a_volume_goes_on_when_its_set_up_is_over_its_time() {
    let (agent, a) = with_fs_group();
    let (source, token) = stop::pair();
    agent.node.drop_at_publish(source);
    let volume = agent.csi.volume(a.clone());
    let ready = volume.set_up(&token).unwrap();
    assert!(token.is_stopped());
    assert_eq!(mode(&ready.host_path) & 0o2000, 0o2000);
    // A walk that was completed is not repeated.
    let file = ready.host_path.join("f");
    std::fs::write(&file, "").unwrap();
    set_mode(&file, 0o600);
    agent.set_up(&a).unwrap();
    assert_eq!(mode(&file) & 0o777, 0o600);
}

/// A set-up whose walk ends with the token.
fn set_up_until(
    agent: &FakeAgent,
    wanted: &VolumeRequest,
    until: &StopToken,
) -> Result<ReadyVolume, VolumeError> {
    let (report, reported) = crossbeam_channel::bounded(1);
    let volume = agent.csi.volume(wanted.clone());
    let key = (&wanted.pod.uid, wanted.volume.as_str(), &Default::default());
    let to = move |result| report.send(result).unwrap();
    let operations = &agent.csi.settings.operations;
    let running = operations.start_until(key, until, to, move |stop| volume.set_up(stop)).unwrap();
    let result = reported.recv().unwrap();
    running.finish();
    result
}

/// The pod and its volume were kept until such a walk had ended, and a server can make it endless.
#[test]
fn walk_through_a_volume_ends_with_its_pod() {
    let (agent, a) = with_fs_group();
    let (pod, until) = stop::pair();
    drop(pod);
    let result = set_up_until(&agent, &a, &until);
    assert!(matches!(result, Err(VolumeError::Stopping)), "{result:?}");
    let dir = agent.csi.layout.of_pod(&a.location()).unwrap().join("mount");
    assert_eq!(mode(&dir) & 0o2000, 0, "the walk was not completed");
    agent.tear_down(&a).unwrap();
    agent.assert_empty();
}

/// A volume whose root has the group already, and a file that has not: another pod was there before.
fn with_a_file(agent: &FakeAgent, wanted: &VolumeRequest) -> PathBuf {
    let dir = agent.csi.layout.of_pod(&wanted.location()).unwrap().join("mount");
    std::fs::create_dir_all(&dir).unwrap();
    set_mode(&dir, 0o2770);
    let file = dir.join("f");
    std::fs::write(&file, "").unwrap();
    set_mode(&file, 0o600);
    file
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
}

fn mode(path: &Path) -> u32 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).unwrap().mode() & 0o7777
}

/// The mount and the root alone were taken as a sign that all files had the group.
#[test]
fn walk_that_broke_off_is_repeated_by_the_next_set_up() {
    let (mut agent, mut a) = with_fs_group();
    let file = with_a_file(&agent, &a);
    let (pod, until) = stop::pair();
    drop(pod);
    let result = set_up_until(&agent, &a, &until);
    assert!(matches!(result, Err(VolumeError::Stopping)), "{result:?}");
    agent.restart();
    agent.set_up(&a).unwrap();
    assert_eq!(mode(&file), 0o660);
    // A walk that was completed is not repeated.
    set_mode(&file, 0o600);
    agent.restart();
    agent.set_up(&a).unwrap();
    assert_eq!(mode(&file), 0o600);
    // With the other policy the root decides.
    a.fs_group_on_root_mismatch = true;
    let other = VolumeRequest { fs_group_on_root_mismatch: true, ..wanted("b", "h") };
    let of_other = with_a_file(&agent, &other);
    agent.set_up(&VolumeRequest { fs_group: a.fs_group, ..other }).unwrap();
    assert_eq!(mode(&of_other), 0o600);
}

/// The turn was held during the walk, which may take hours.
#[test]
fn pod_does_not_wait_for_the_walk_of_another_pod_with_its_volume() {
    let agent = FakeAgent::new();
    agent.driver().spec.fs_group_policy = Some(FsGroupPolicy::File);
    let with_group = |pod: &str| VolumeRequest {
        fs_group: Some(rustix::process::getegid().as_raw()),
        grow_to: Some(5),
        ..wanted(pod, "h")
    };
    let (a, b) = (with_group("a"), with_group("b"));
    agent.set_up(&b).unwrap();
    let file = with_a_file(&agent, &a);
    let (ready, change) = mount(&agent.csi, &a, &StopToken::never()).unwrap();
    assert_eq!(ready.grown_to, Some(5), "the walk is the last step");
    let free = |wanted: &VolumeRequest| agent.csi.lock(&wanted.unique_name(), &StopToken::never()).is_ok();
    assert!(free(&a), "the walk is not in the turn");
    agent.tear_down(&b).unwrap();
    agent.release_unused().unwrap();
    assert_eq!((agent.node.staged(), agent.node.published()), (1, 1));
    change.unwrap().apply(&agent.csi.settings, &a).unwrap();
    assert_eq!(mode(&file), 0o660);
    std::fs::remove_file(&file).unwrap();
    agent.tear_down(&a).unwrap();
    agent.assert_empty();
}

#[test]
fn labels_of_read_only_volumes_are_not_changed() {
    let agent = FakeAgent::new();
    for read_only in [true, false] {
        let volume = VolumeRequest { read_only, ..wanted("a", "h") };
        assert_eq!(agent.set_up(&volume).unwrap().selinux_relabel, !read_only);
        agent.tear_down(&volume).unwrap();
    }
}

/// Another pod that waited for the volume got it, and both used it.
#[test]
fn pod_that_has_a_volume_alone_is_known_after_a_restart() {
    let mut agent = FakeAgent::new();
    let mut inline = wanted("b", &names::inline_handle("b", "v"));
    (inline.lifecycle, inline.spec_name) = (Lifecycle::Ephemeral, "v".to_owned());
    agent.driver().spec.volume_lifecycle_modes = vec!["Persistent".to_owned(), "Ephemeral".to_owned()];
    let a = wanted("a", "h");
    agent.set_up(&a).unwrap();
    agent.set_up(&inline).unwrap();
    agent.restart();
    assert_eq!(agent.csi.persistent(), [(a.spec_name.clone(), a.pod.uid.clone())]);
}

#[test]
fn volume_whose_record_is_damaged_is_neither_detached_nor_unstaged_while_its_pod_runs() {
    let (a, b) = (wanted("a", "h"), wanted("b", "i"));
    let mut agent = FakeAgent::with(&a);
    agent.set_up(&b).unwrap();
    damage(&agent, &a);
    agent.restart();
    let names = [a.unique_name(), b.unique_name()];
    assert_eq!(agent.csi.attachments.in_use(), names);
    // It is not known which volume the pod has: none is unstaged.
    agent.tear_down(&b).unwrap();
    agent.release_unused().unwrap();
    assert_eq!((agent.changes(), agent.node.staged()), (vec!["unpublish i".to_owned()], 2));
    assert_eq!(agent.csi.attachments.in_use(), names);
    agent.set_up(&a).unwrap();
    agent.release_unused().unwrap();
    assert_eq!(agent.csi.attachments.in_use(), [a.unique_name()]);
    agent.tear_down(&a).unwrap();
    assert!(agent.left().is_empty() && agent.node.staged() == 0, "{:?}", agent.left());
    agent.node.check();
}

/// The record of a file system in its pod.
fn damage(agent: &FakeAgent, wanted: &VolumeRequest) {
    let dir = agent.csi.layout.of_pod(&wanted.location()).unwrap();
    std::fs::write(dir.join("vol_data.json"), "").unwrap();
}

/// The record of a block volume.
fn damage_block(agent: &FakeAgent, wanted: &VolumeRequest) {
    let data = agent.csi.layout.block_paths(&wanted.spec_name).unwrap().data;
    std::fs::write(data.join("vol_data.json"), "{").unwrap();
}

fn damage_staged(agent: &FakeAgent) {
    let dir = agent.csi.layout.staged(DRIVER, "h").unwrap();
    std::fs::write(dir.join("vol_data.json"), "{").unwrap();
}

/// The node's object has these volumes, all of them attached.
fn show(agent: &FakeAgent, names: &[String]) {
    let names: BTreeSet<String> = names.iter().cloned().collect();
    show_lists(agent, NodeVolumes { in_use: names.clone(), attached: names });
}

fn show_lists(agent: &FakeAgent, shown: NodeVolumes) {
    agent.csi.attachments.set_controller(Controller {
        shown: Box::new(move || Some(shown.clone())),
        changed: Box::new(|| {}),
    });
}

#[test]
fn attached_volume_is_mounted_without_the_server_only_for_a_pod_that_wants_that() {
    let agent = FakeAgent::new();
    show(&agent, &[]);
    let attachment = agent.cluster.attachment.lock().unwrap().take();
    let plain = wanted("a", "h");
    let mut bold = wanted("b", "k");
    bold.pod.uses_attached = true;
    for request in [&plain, &bold] {
        agent.set_up(request).unwrap_err();
    }
    *agent.cluster.last_attachment.lock().unwrap() = attachment;
    agent.set_up(&plain).unwrap_err();
    assert_eq!(agent.node.staged(), 0);
    agent.set_up(&bold).unwrap();
    assert_eq!((agent.node.published(), agent.node.staged()), (1, 1));
    assert!(agent.csi.attachments.in_use().contains(&bold.unique_name()), "it is reported later");
    agent.tear_down(&bold).unwrap();
    assert_eq!(agent.node.staged(), 0);
}

/// Its driver was never called, and the device was detached while it was in use.
#[test]
fn volume_with_a_damaged_record_is_given_back_to_its_driver() {
    for form in [Form::Filesystem, Form::Block] {
        let a = VolumeRequest { form, ..wanted("a", "h") };
        let agent = FakeAgent::with(&a);
        match form {
            Form::Block => damage_block(&agent, &a),
            Form::Filesystem => {
                damage(&agent, &a);
            }
        }
        agent.tear_down(&a).unwrap();
        assert_eq!((agent.node.published(), agent.node.staged()), (0, 0), "{form:?}");
        assert!(agent.left().is_empty() && agent.csi.attachments.in_use().is_empty(), "{:?}", agent.left());
        agent.node.check();
    }
}

/// Its driver was called with the other volume's handle, and may have deleted that one's files.
#[test]
fn inline_volume_with_a_damaged_record_is_not_taken_for_that_of_another_pod() {
    let mut agent = FakeAgent::new();
    agent.driver().spec.volume_lifecycle_modes = vec!["Ephemeral".to_owned()];
    let inline = |pod: &str| {
        let handle = names::inline_handle(pod, "v");
        VolumeRequest { lifecycle: Lifecycle::Ephemeral, spec_name: "v".to_owned(), ..wanted(pod, &handle) }
    };
    let (a, b) = (inline("a"), inline("b"));
    agent.set_up(&a).unwrap();
    agent.set_up(&b).unwrap();
    damage(&agent, &a);
    agent.restart();
    show(&agent, &[]);
    assert_eq!(find_name(&agent.csi, "v", Form::Filesystem, &StopToken::never()), Ok(None));
    let _ = agent.tear_down(&a);
    let calls = agent.node.calls();
    assert!(!calls.iter().any(|call| call.contains("npublish")), "{calls:?}");
}

/// It counted as released, and was neither unstaged nor kept in use.
#[test]
fn block_volume_with_a_damaged_record_stays_in_use_until_it_is_known() {
    let mut agent = FakeAgent::new();
    let a = VolumeRequest { form: Form::Block, ..wanted("a", "h") };
    let b = wanted("b", "i");
    agent.set_up(&a).unwrap();
    agent.set_up(&b).unwrap();
    damage_block(&agent, &a);
    agent.restart();
    let other = format!("kubernetes.io/csi/{DRIVER}^x");
    show(&agent, &[a.unique_name(), b.unique_name(), other.clone()]);
    let list = || agent.csi.attachments.list().1;
    assert_eq!(list(), [a.unique_name(), b.unique_name(), other.clone()]);
    // The API server does not respond: the removal is repeated.
    let error = kind_error(agent.tear_down(&a).unwrap_err());
    assert_eq!((error.phase, error.certainty), (Phase::TearDown, Certainty::NotBegun));
    assert!(error.message.starts_with("the record of volume pv-h is damaged, and it is not"), "{error}");
    let error = kind_error(agent.release_unused().unwrap_err());
    assert!(error.message.ends_with("which one it is: no response"), "{error}");
    assert_eq!(agent.node.staged(), 2);
    // Another volume that is released meanwhile is not kept.
    let id = |handle: &str| names::attachment_name(handle, DRIVER, "n1");
    let attached = [(id("h"), "pv-h".to_owned()), (id("x"), "pv-x".to_owned())].into();
    *agent.cluster.attached.lock().unwrap() = Some(attached);
    agent.tear_down(&a).unwrap();
    agent.tear_down(&b).unwrap();
    agent.release_unused().unwrap();
    assert_eq!((agent.node.published(), agent.node.staged()), (0, 0));
    assert!(list().is_empty(), "{:?}", list());
    assert!(agent.left().is_empty(), "{:?}", agent.left());
    agent.node.check();
}

/// It counted as another volume, and its disk could be detached while it was in use.
#[test]
fn volume_whose_attachment_may_not_be_read_stays_in_use_until_it_is_known() {
    let a = VolumeRequest { form: Form::Block, ..wanted("a", "h") };
    let mut agent = FakeAgent::with(&a);
    damage_block(&agent, &a);
    agent.restart();
    let shown = NodeVolumes { in_use: [a.unique_name()].into(), attached: BTreeSet::new() };
    show_lists(&agent, shown);
    let id = names::attachment_name("h", DRIVER, "n1");
    *agent.cluster.attached.lock().unwrap() = Some([(id.clone(), "pv-h".to_owned())].into());
    agent.cluster.forbidden.lock().unwrap().push(id);
    let find = || find_name(&agent.csi, "pv-h", Form::Block, &StopToken::never());
    assert_eq!(find(), Ok(None));
    assert_eq!(agent.csi.attachments.list().1, [a.unique_name()]);
    agent.cluster.forbidden.lock().unwrap().clear();
    assert_eq!(find(), Ok(Some(a.unique_name())));
    agent.tear_down(&a).unwrap();
    assert_eq!((agent.node.published(), agent.node.staged()), (0, 0));
    assert!(agent.left().is_empty() && agent.csi.attachments.list().1.is_empty(), "{:?}", agent.left());
}

/// Those that may not be read are asked for again each time.
#[test]
fn attached_volumes_are_found_among_many_whose_attachments_may_not_be_read() {
    let a = VolumeRequest { form: Form::Block, ..wanted("a", "h") };
    let mut agent = FakeAgent::with(&a);
    damage_block(&agent, &a);
    agent.restart();
    let handles = (0..300).map(|n| n.to_string());
    let forbidden: Vec<_> =
        handles.clone().map(|handle| names::attachment_name(&handle, "a", "n1")).collect();
    *agent.cluster.forbidden.lock().unwrap() = forbidden;
    let id = names::attachment_name("h", DRIVER, "n1");
    *agent.cluster.attached.lock().unwrap() = Some([(id, "pv-h".to_owned())].into());
    let mut in_use: BTreeSet<String> =
        handles.map(|handle| format!("kubernetes.io/csi/a^{handle}")).collect();
    in_use.insert(a.unique_name());
    let shown = NodeVolumes { in_use, attached: [a.unique_name()].into() };
    show_lists(&agent, shown);
    let found = find_name(&agent.csi, "pv-h", Form::Block, &StopToken::never());
    assert_eq!(found, Ok(Some(a.unique_name())));
    agent.tear_down(&a).unwrap();
    assert_eq!((agent.node.published(), agent.node.staged()), (0, 0));
}

#[test]
fn staged_block_volumes_without_a_pod_and_with_damaged_records_are_unstaged() {
    let mut agent = FakeAgent::new();
    let all = ["h", "k"].map(|handle| VolumeRequest { form: Form::Block, ..wanted("a", handle) });
    for volume in &all {
        agent.set_up(volume).unwrap();
        agent.node.fail("unstage", Fault::Final);
        agent.tear_down(volume).unwrap();
        damage_block(&agent, volume);
    }
    assert_eq!(agent.node.staged(), 2);
    agent.restart();
    let shown = all.each_ref().map(VolumeRequest::unique_name);
    show(&agent, &shown);
    agent.release_unused().unwrap_err();
    // The API server does not know the attachments yet, but the controller shows them.
    *agent.cluster.attached.lock().unwrap() = Some(BTreeMap::new());
    agent.release_unused().unwrap_err();
    assert_eq!((agent.node.staged(), agent.csi.attachments.list().1), (2, shown.to_vec()));
    let attached = |handle: &str| (names::attachment_name(handle, DRIVER, "n1"), format!("pv-{handle}"));
    *agent.cluster.attached.lock().unwrap() = Some([attached("h"), attached("k")].into());
    agent.release_unused().unwrap();
    assert_eq!(agent.node.staged(), 0);
    assert!(agent.left().is_empty() && agent.csi.attachments.list().1.is_empty(), "{:?}", agent.left());
}

/// It stayed mounted on the node.
#[test]
fn staged_volume_whose_record_is_damaged_is_found_in_the_object_of_the_node() {
    let a = wanted("a", "h");
    let mut agent = FakeAgent::with(&a);
    agent.node.fail("unstage", Fault::Final);
    agent.tear_down(&a).unwrap();
    damage_staged(&agent);
    agent.restart();
    agent.release_unused().unwrap();
    assert_eq!(agent.node.staged(), 1);
    let shown = NodeVolumes {
        in_use: [a.unique_name(), "kubernetes.io/csi/other^h".to_owned()].into(),
        attached: BTreeSet::new(),
    };
    show_lists(&agent, shown);
    assert_eq!(agent.csi.attachments.list().1, [a.unique_name()]);
    agent.release_unused().unwrap();
    assert_eq!((agent.node.staged(), agent.left()), (0, Vec::new()));
    assert!(agent.csi.attachments.list().1.is_empty());
}

/// The disk was detached under the mount of a sub path.
#[test]
fn volume_stays_staged_and_in_use_while_its_disk_is_mounted_elsewhere() {
    let a = wanted("a", "h");
    let agent = FakeAgent::with(&a);
    agent.changes();
    agent.node.set_other_mount(Some(Path::new("/x")));
    agent.tear_down(&a).unwrap();
    assert_eq!((agent.changes(), agent.node.staged()), (vec!["unpublish h".to_owned()], 1));
    assert_eq!(agent.csi.attachments.in_use(), [a.unique_name()]);
    let error = agent.release_unused().unwrap_err();
    assert!(error.to_string().contains("is still mounted by other references [/x]"), "{error}");
    agent.node.set_other_mount(None);
    agent.release_unused().unwrap();
    assert_eq!((agent.changes(), agent.left()), (vec!["unstage h".to_owned()], Vec::new()));
    assert!(agent.csi.attachments.in_use().is_empty());
    agent.node.check();
}

/// It stayed in use until the agent restarted.
#[test]
fn volume_that_was_never_staged_is_not_in_use_after_its_pod() {
    let (a, b) = (wanted("a", "h"), wanted("b", "i"));
    let mut agent = FakeAgent::with(&a);
    damage(&agent, &a);
    agent.restart();
    // The pod is deleted while it waits for its volume, and another may have that volume.
    let attachment = agent.cluster.attachment.lock().unwrap().take();
    agent.set_up(&b).unwrap_err();
    agent.tear_down(&b).unwrap();
    agent.release_unused().unwrap();
    assert_eq!(agent.csi.attachments.in_use(), [a.unique_name(), b.unique_name()]);
    *agent.cluster.attachment.lock().unwrap() = attachment;
    agent.set_up(&a).unwrap();
    agent.release_unused().unwrap();
    assert_eq!(agent.csi.attachments.in_use(), [a.unique_name()]);
    agent.tear_down(&a).unwrap();
    assert!(agent.left().is_empty() && agent.csi.attachments.in_use().is_empty());
}

/// It was detached while it was mounted on the node.
#[test]
fn staged_volume_whose_record_is_damaged_meanwhile_stays_in_use_until_it_is_unstaged() {
    let a = wanted("a", "h");
    let agent = FakeAgent::with(&a);
    damage_staged(&agent);
    agent.tear_down(&a).unwrap();
    assert_eq!((agent.node.staged(), agent.csi.attachments.in_use()), (1, vec![a.unique_name()]));
    agent.release_unused().unwrap();
    assert_eq!((agent.node.staged(), agent.left()), (0, Vec::new()));
    assert!(agent.csi.attachments.in_use().is_empty());
    agent.node.check();
}

/// The pod never started.
#[test]
fn volume_that_cannot_grow_while_it_is_in_use_is_mounted() {
    let agent = FakeAgent::new();
    let mut a = wanted("a", "h");
    a.grow_to = Some(1 << 30);
    agent.node.fail("expand", Fault::InUse);
    assert_eq!(agent.set_up(&a).unwrap().grown_to, None);
    // The driver is not asked again before the next mount.
    let volume = agent.csi.volume(a.clone());
    agent.changes();
    assert_eq!(volume.expand(1 << 30, &StopToken::never()).unwrap(), None);
    assert!(agent.changes().is_empty());
    agent.tear_down(&a).unwrap();
    assert_eq!(agent.set_up(&a).unwrap().grown_to, Some(1 << 30));
    agent.node.fail("expand", Fault::OutOfRange);
    let error = kind_error(volume.expand(2 << 30, &StopToken::never()).unwrap_err());
    assert_eq!((error.phase, error.certainty), (Phase::ExpandInfeasible, Certainty::Final));
}

/// Makes a directory that cannot be read, as if the process had no descriptor left, and back.
fn make_unreadable(dir: &Path, is_unreadable: bool) {
    let aside = dir.with_extension("aside");
    if is_unreadable {
        std::fs::rename(dir, &aside).unwrap();
        std::os::unix::fs::symlink(dir, dir).unwrap();
    } else {
        std::fs::remove_file(dir).unwrap();
        std::fs::rename(&aside, dir).unwrap();
    }
}

/// The staged volume counted as released, and its disk was detached while it was mounted.
#[test]
fn volume_stays_in_use_while_the_directory_of_staged_volumes_cannot_be_read() {
    let a = wanted("a", "h");
    let mut agent = FakeAgent::with(&a);
    let shared = agent.csi.layout.shared();
    make_unreadable(&shared, true);
    agent.tear_down(&a).unwrap();
    assert_eq!(agent.csi.attachments.in_use(), [a.unique_name()]);
    let error = agent.release_unused().unwrap_err();
    assert!(error.to_string().starts_with("cannot list the volumes in "), "{error}");
    assert!(agent.csi.has_volumes());
    assert_eq!(agent.csi.attachments.in_use(), [a.unique_name()]);
    // A start that cannot read it keeps what the node's object shows.
    agent.restart();
    show(&agent, &[a.unique_name(), "kubernetes.io/iscsi/x".to_owned()]);
    assert_eq!(agent.csi.attachments.list().1, [a.unique_name()]);
    make_unreadable(&shared, false);
    agent.restart();
    show(&agent, &[a.unique_name()]);
    agent.release_unused().unwrap();
    assert_eq!((agent.node.staged(), agent.left()), (0, Vec::new()));
    assert!(agent.csi.attachments.list().1.is_empty());
}

/// Those behind the limit counted as released.
#[test]
fn directory_of_staged_volumes_with_too_many_entries_is_not_read_to_its_end() {
    let agent = FakeAgent::new();
    let layout = &agent.csi.layout;
    let dir = layout.shared().join("d");
    std::fs::create_dir_all(&dir).unwrap();
    for number in 0..=10_000 {
        std::fs::create_dir(dir.join(format!("{number:064x}"))).unwrap();
    }
    let mut unread = UnreadableDirs::default();
    assert_eq!(rebuild::staged_dirs(layout, &mut unread).len(), 10_000);
    assert!(unread.may_have(layout, "kubernetes.io/csi/d^x"));
    assert!(!unread.may_have(layout, "kubernetes.io/csi/other^x"));
}

/// All volumes stayed in use until the next start, and none was unstaged.
#[test]
fn directory_that_cannot_be_read_keeps_only_its_own_volumes_until_it_can_be_read() {
    let mut agent = FakeAgent::new();
    let (a, b) = (wanted("a", "h"), wanted("b", "i"));
    let other = "kubernetes.io/csi/other^x".to_owned();
    let others = agent.csi.layout.shared().join("other");
    std::fs::create_dir_all(&others).unwrap();
    agent.set_up(&a).unwrap();
    agent.set_up(&b).unwrap();
    for dir in [others, agent.root.path().join("pods/b/volumes/kubernetes.io~csi")] {
        let hides_pods = !dir.ends_with("other");
        make_unreadable(&dir, true);
        agent.restart();
        let shown =
            [a.unique_name(), b.unique_name(), other.clone(), format!("kubernetes.io/csi/{DRIVER}^gone")];
        show(&agent, &shown);
        let mut in_use = shown[..3].to_vec();
        in_use.extend(hides_pods.then(|| shown[3].clone()));
        in_use.sort();
        assert_eq!(agent.csi.attachments.list().1, in_use);
        agent.tear_down(&a).unwrap();
        let error = agent.release_unused().unwrap_err();
        assert!(error.to_string().starts_with("cannot list the volumes in "), "{error}");
        // A pod may use each volume of which it is not known which one it has.
        assert_eq!(agent.node.staged(), if hides_pods { 2 } else { 1 });
        make_unreadable(&dir, false);
        assert!(agent.csi.has_volumes());
        agent.release_unused().unwrap();
        assert_eq!((agent.node.staged(), agent.csi.attachments.list().1), (1, vec![b.unique_name()]));
        assert_eq!(agent.csi.users().locations(None), [b.location()]);
        agent.node.check();
        // Without a controller the volume need not be attached.
        agent.restart();
        agent.set_up(&a).unwrap();
    }
    agent.tear_down(&a).unwrap();
    agent.tear_down(&b).unwrap();
    assert_eq!(agent.node.staged(), 0);
    assert!(agent.csi.attachments.list().1.is_empty());
}

#[test]
fn directory_that_could_not_be_read_is_read_again_although_an_operation_on_a_volume_in_it_hangs() {
    let (a, b, never) = (wanted("a", "h"), wanted("b", "i"), StopToken::never());
    let mut agent = FakeAgent::with(&a);
    agent.set_up(&b).unwrap();
    let dir = agent.root.path().join("pods/b/volumes/kubernetes.io~csi");
    make_unreadable(&dir, true);
    agent.restart();
    make_unreadable(&dir, false);
    let guard = agent.csi.lock(&b.unique_name(), &never).unwrap();
    agent.release_unused().unwrap_err();
    assert_eq!(agent.csi.users().locations(None), [a.location()]);
    drop(guard);
    agent.release_unused().unwrap();
    assert_eq!(agent.csi.users().locations(None), [a.location(), b.location()]);
    assert_eq!(agent.node.staged(), 2);
    agent.tear_down(&a).unwrap();
    agent.tear_down(&b).unwrap();
}

/// It counted as unstaged, and its disk could be detached while it was mounted.
#[test]
fn staged_volume_with_the_record_of_another_one_is_an_error() {
    let a = wanted("a", "h");
    let agent = FakeAgent::with(&a);
    agent.node.fail("unstage", Fault::Final);
    agent.tear_down(&a).unwrap();
    let staged = |handle: &str| agent.csi.layout.staged(DRIVER, handle).unwrap();
    std::fs::create_dir_all(staged("i")).unwrap();
    std::fs::copy(staged("h").join("vol_data.json"), staged("i").join("vol_data.json")).unwrap();
    let error = agent.release_unused().unwrap_err();
    assert!(error.to_string().contains("is that of another volume"), "{error}");
    assert!(staged("i").join("vol_data.json").is_file());
    std::fs::remove_dir_all(staged("i")).unwrap();
    agent.release_unused().unwrap();
    assert_eq!(agent.node.staged(), 0);
}

/// Its record was removed, so that it was never unstaged.
#[test]
fn volume_that_an_earlier_agent_has_staged_is_unstaged_although_it_cannot_be_staged_again() {
    for form in [Form::Filesystem, Form::Block] {
        let mut agent = FakeAgent::new();
        let a = VolumeRequest { form, ..wanted("a", "h") };
        agent.node.fail("publish", Fault::Uncertain);
        agent.set_up(&a).unwrap_err();
        if form == Form::Filesystem {
            // This driver stages without a mount.
            let dir = agent.csi.layout.staged(DRIVER, "h").unwrap();
            agent.csi.mounter.unmount(&dir.join("globalmount")).unwrap();
        }
        agent.restart();
        agent.node.fail("stage", Fault::Final);
        agent.set_up(&a).unwrap_err();
        assert_eq!(agent.node.staged(), 1);
        agent.tear_down(&a).unwrap();
        assert_eq!((agent.node.staged(), agent.left()), (0, Vec::new()), "{form:?}");
        agent.node.check();
    }
}

/// Its record was removed, so that its driver never took it back.
#[test]
fn published_volume_that_is_no_mount_survives_a_failed_update() {
    let agent = FakeAgent::new();
    agent.driver().spec.requires_republish = Some(true);
    let a = wanted("a", "h");
    let ready = agent.set_up(&a).unwrap();
    agent.csi.mounter.unmount(&ready.host_path).unwrap();
    agent.node.fail("publish", Fault::Final);
    agent.set_up(&a).unwrap_err();
    assert!(ready.host_path.is_dir(), "the pod has it");
    agent.changes();
    agent.tear_down(&a).unwrap();
    assert_eq!(agent.changes(), ["unpublish h", "unstage h"]);
    assert!(agent.left().is_empty(), "{:?}", agent.left());
}

#[test]
fn inline_volume_with_the_name_of_a_persistent_one_of_its_pod_is_refused_and_that_is_unstaged() {
    let persistent = wanted("a", "h");
    let mut inline = wanted("a", &names::inline_handle("a", "pv-h"));
    inline.lifecycle = Lifecycle::Ephemeral;
    inline.spec_name.clone_from(&persistent.spec_name);
    for [first, second] in [[&persistent, &inline], [&inline, &persistent]] {
        let agent = FakeAgent::new();
        agent.driver().spec.volume_lifecycle_modes = vec!["Persistent".to_owned(), "Ephemeral".to_owned()];
        agent.set_up(first).unwrap();
        let error = kind_error(agent.set_up(second).unwrap_err());
        assert_eq!(error.certainty, Certainty::NotBegun);
        let other = first.unique_name();
        assert_eq!(error.message, format!("the pod's volume {other} has the same directory \"pv-h\""));
        agent.tear_down(first).unwrap();
        assert!(agent.csi.attachments.in_use().is_empty() && agent.csi.users().all().is_empty());
        let is_second = |call: &String| call.ends_with(&format!(" {}", second.source.volume_handle));
        assert!(!agent.node.calls().iter().any(is_second));
    }
}
