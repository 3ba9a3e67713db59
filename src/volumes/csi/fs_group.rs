//! The last step of a set-up of a file system: its files get the group of the pod (Go: pkg/volume
//! volume_linux.go, for drivers that do not set `fsGroup` themselves).

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::super::error::VolumeError;
use super::super::group_marker::{self, Marker};
use super::super::kind::Phase;
use super::super::ownership::{self, Access, Policy, WalkError};
use super::error::after_call;
use super::names::{self, TARGET};
use super::prepare::PreparedDriver;
use super::request::VolumeRequest;
use super::state::CsiSettings;
use crate::model::event::{EventType, Regarding};
use crate::model::reasons;
use crate::util::untrusted;

/// The first event about a slow walk, and the time between later ones.
const WALK_SLOW: Duration = Duration::from_secs(30);
const WALK_AGAIN: Duration = Duration::from_secs(60);
/// The page that the first event names.
const POLICY_HELP: &str = "https://kubernetes.io/docs/tasks/configure-pod-container/security-context/\
#configure-volume-permission-and-ownership-change-policy-for-pods";

/// A walk through the files of a published volume, which gives them to the group of its pod.
#[derive(Debug)]
pub(super) struct GroupChange {
    gid: u32,
    policy: Policy,
    target: PathBuf,
    marker: Marker,
}

impl GroupChange {
    /// What is to be done after the volume in `dir` is published; `None`: its files keep their group.
    /// To be called before: the mount shows later that the marker was made.
    pub(super) fn plan(
        request: &VolumeRequest,
        driver: &PreparedDriver,
        dir: &Path,
        was_mounted: bool,
    ) -> Result<Option<GroupChange>, VolumeError> {
        let marker = Marker::for_volume(dir)?;
        let Some(gid) = request.group_to_set(&driver.spec, driver.capabilities) else { return Ok(None) };
        let policy = request.group_policy();
        if !was_mounted && policy == Policy::Always {
            marker.make()?;
        }
        let policy = group_marker::policy(policy, was_mounted, marker.state());
        Ok(Some(GroupChange { gid, policy, target: dir.join(TARGET), marker }))
    }

    /// Gives the files to the pod's group. The walk continues when the set-up is over its time: each
    /// attempt would begin at the first file. It ends with the pod, the agent, and the removal of the
    /// pod's volumes.
    pub(super) fn apply(self, settings: &CsiSettings, request: &VolumeRequest) -> Result<(), VolumeError> {
        let GroupChange { gid, policy, target, marker } = self;
        let failed = |error: String| {
            let text = format!("applyFSGroup failed for vol {}: {error}", request.source.volume_handle);
            after_call(Phase::SetUp, text)
        };
        // Before the first call that may wait for a server: the removal of the pod waits for none.
        let stops = settings.operations.walk(&request.pod.uid, &request.volume);
        let root = untrusted::directory(&target, 1).map_err(|error| failed(error.to_string()))?;
        let (mut report_at, mut is_reported) = (Instant::now() + WALK_SLOW, false);
        let mut progress = |count: u64| {
            if Instant::now() >= report_at {
                report_at = Instant::now() + WALK_AGAIN;
                report(settings, request, is_reported.then_some(count));
                is_reported = true;
            }
        };
        match ownership::change_group(root.as_fd(), gid, (Access::Write, policy), &stops, &mut progress) {
            Ok(_) => {
                marker.remove();
                Ok(())
            }
            Err(WalkError::Stopping) => Err(VolumeError::Stopping),
            Err(WalkError::TooDeep) => Err(failed(ownership::too_deep())),
            Err(WalkError::Failed(errno)) => Err(failed(std::io::Error::from(errno).to_string())),
        }
    }
}

fn report(settings: &CsiSettings, request: &VolumeRequest, count: Option<u64>) {
    let pod = &request.pod;
    let regarding = Regarding::Pod {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: pod.uid.clone(),
        field_path: String::new(),
    };
    // As the Go kubelet writes the directory.
    let dir = format!("{}/volumes/{}/{}/{TARGET}", pod.uid, names::DIRECTORY, request.spec_name);
    let message = match count {
        None => format!(
            "Setting volume ownership for {dir} is taking longer than expected, consider using \
             OnRootMismatch - {POLICY_HELP}"
        ),
        Some(count) => format!("Setting volume ownership for {dir}, processed {count} files."),
    };
    settings.events.raise(regarding, EventType::Warning, reasons::VOLUME_PERMISSION_CHANGE, message);
}
