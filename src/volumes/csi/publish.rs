//! A file system for a pod (Go: csi_mounter.go).

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::super::error::VolumeError;
use super::super::group_marker::{self, Marker};
use super::super::kind::{Form, Phase, Ready};
use super::super::ownership::{self, Access, Broken, Policy};
use super::cluster;
use super::driver::{Pairs, Publish, Secrets};
use super::error::{after_call, changed_nothing, io, not_begun, of_call};
use super::names::{self, GLOBAL_MOUNT};
use super::record::{Look, Record};
use super::request::{TOKENS, Wanted};
use super::stage::make_dirs;
use super::volume::{At, Csi, text};
use crate::model::event::{EventType, Regarding};
use crate::model::reasons;
use crate::util::stop::StopToken;
use crate::util::untrusted;

/// A walk through the files of a published volume, which gives them to the group of its pod.
#[derive(Debug)]
pub(super) struct Walk {
    gid: u32,
    policy: Policy,
    target: PathBuf,
    marker: Marker,
}

/// The publish target in the volume's directory.
pub(super) const TARGET: &str = "mount";

impl Csi {
    /// Stages, publishes and grows a file system. The caller has the turn. Returns what is left to do
    /// without it: a walk may take hours, and other pods want the volume.
    pub(super) fn mount(
        &self,
        wanted: &Wanted,
        stop: &StopToken,
    ) -> Result<(Ready, Option<Walk>), VolumeError> {
        let place = wanted.place();
        let dir = self.layout.of_pod(&place)?;
        let target = dir.join(TARGET);
        let was_mounted = self.is_mount_point(&target);
        let at = self.begin(wanted, was_mounted, stop)?;
        if !wanted.is_ephemeral() {
            self.stage(wanted, &at, stop)?;
        }
        let walks = wanted.walks(&at.spec, at.abilities);
        let marker = Marker::of(&dir)?;
        if walks.is_some() && !was_mounted && wanted.group_policy() == Policy::Always {
            marker.make()?;
        }
        self.publish(wanted, &at, &dir, &target, stop)?;
        let grown_to = match wanted.grow_to {
            Some(bytes) => self.grow_at(wanted, &at, bytes, stop)?,
            None => None,
        };
        let is_republished = at.spec.requires_republish == Some(true);
        self.users().set_republished(&place, is_republished);
        let ready = Ready {
            form: Form::Filesystem,
            read_only: wanted.is_read_only(),
            selinux_relabel: self.is_relabelled(wanted, &at, &target)?,
            host_path: self.real(&target),
            grown_to,
        };
        let policy = group_marker::policy(wanted.group_policy(), was_mounted, marker.state());
        Ok((ready, walks.map(|gid| Walk { gid, policy, target, marker })))
    }

    fn publish(
        &self,
        wanted: &Wanted,
        at: &At,
        dir: &Path,
        target: &Path,
        stop: &StopToken,
    ) -> Result<(), VolumeError> {
        let phase = Phase::SetUp;
        let source = &wanted.source;
        let label = wanted.mount_label(&at.spec);
        let (volume_context, secrets) = self
            .inputs(wanted, at, stop)
            .map_err(|error| not_begun(phase, format!("kubernetes.io/csi: {error}")))?;
        let staging_path = if at.abilities.stage && !wanted.is_ephemeral() {
            text(&self.layout.staged(&source.driver, &source.volume_handle)?.join(GLOBAL_MOUNT))?
        } else {
            String::new()
        };
        let request = Publish {
            volume: source.volume_handle.clone(),
            publish_context: at.publish_context.clone(),
            staging_path,
            target_path: text(target)?,
            capability: wanted.capability(at.abilities, label),
            read_only: wanted.is_read_only(),
            secrets,
            volume_context,
        };
        // The driver makes the target itself.
        make_dirs(dir, "make directory")?;
        let is_new = Record::read(dir) == Look::Missing;
        self.record(wanted, label).write(dir).map_err(io("write the record in", dir))?;
        let result = at.driver.publish(&request, stop).map_err(|error| of_call(phase, "", &error));
        if let Err(error) = &result
            && is_new
            && changed_nothing(error)
        {
            // Published before, perhaps, the volume stays as it is. What a driver publishes need not be a
            // mount (Go: `IsRemount`, `ReconstructedVolume`).
            self.clear_failed(dir, Some(TARGET));
        }
        result
    }

    /// Whether the runtime may change the labels of the files: not of a volume that is mounted with a
    /// label or read-only, or whose file system has no labels.
    fn is_relabelled(&self, wanted: &Wanted, at: &At, target: &Path) -> Result<bool, VolumeError> {
        if wanted.mount_label(&at.spec).is_some() || wanted.is_read_only() {
            return Ok(false);
        }
        if self.settings.selinux.is_none() {
            // No label is changed on this node.
            return Ok(true);
        }
        self.mounter
            .has_labels(target)
            .map_err(|error| after_call(Phase::SetUp, format!("error checking for SELinux support: {error}")))
    }

    /// Gives the files of a published volume to the pod's group. The walk continues when the set-up is
    /// over its time: each attempt would begin at the first file. It ends with the pod, the agent, and
    /// the removal of the pod's volumes.
    pub(super) fn walk(&self, wanted: &Wanted, walk: Walk) -> Result<(), VolumeError> {
        let Walk { gid, policy, target, marker } = walk;
        let failed = |error: String| {
            let text = format!("applyFSGroup failed for vol {}: {error}", wanted.source.volume_handle);
            after_call(Phase::SetUp, text)
        };
        // Before the first call that may wait for a server: the removal of the pod waits for none.
        let stops = self.settings.operations.walk(&wanted.pod.uid, &wanted.volume);
        let root = untrusted::directory(&target, 1).map_err(|error| failed(error.to_string()))?;
        let (mut report_at, mut is_reported) = (Instant::now() + WALK_SLOW, false);
        let mut progress = |count: u64| {
            if Instant::now() >= report_at {
                report_at = Instant::now() + WALK_AGAIN;
                self.report_walk(wanted, is_reported.then_some(count));
                is_reported = true;
            }
        };
        match ownership::give(root.as_fd(), gid, (Access::Write, policy), &stops, &mut progress) {
            Ok(_) => {
                marker.remove();
                Ok(())
            }
            Err(Broken::Stopping) => Err(VolumeError::Stopping),
            Err(Broken::TooDeep) => Err(failed(ownership::too_deep())),
            Err(Broken::Failed(errno)) => Err(failed(std::io::Error::from(errno).to_string())),
        }
    }

    fn report_walk(&self, wanted: &Wanted, count: Option<u64>) {
        let pod = &wanted.pod;
        let regarding = Regarding::Pod {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            field_path: String::new(),
        };
        // As the Go kubelet writes the directory.
        let dir = format!("{}/volumes/{}/{}/{TARGET}", pod.uid, names::DIRECTORY, wanted.spec_name);
        let message = match count {
            None => format!(
                "Setting volume ownership for {dir} is taking longer than expected, consider using \
                 OnRootMismatch - {POLICY_HELP}"
            ),
            Some(count) => format!("Setting volume ownership for {dir}, processed {count} files."),
        };
        let reason = reasons::VOLUME_PERMISSION_CHANGE;
        self.settings.events.raise(regarding, EventType::Warning, reason, message);
    }

    /// The record of a volume of a pod.
    pub(super) fn record(&self, wanted: &Wanted, label: Option<&str>) -> Record {
        let source = &wanted.source;
        let node = &self.settings.node_name;
        Record {
            spec_name: wanted.spec_name.clone(),
            volume_handle: source.volume_handle.clone(),
            driver_name: source.driver.clone(),
            node_name: node.clone(),
            attachment: names::attachment_name(&source.volume_handle, &source.driver, node),
            volume_lifecycle_mode: wanted.lifecycle.as_str().to_owned(),
            selinux_context: label.unwrap_or_default().to_owned(),
        }
    }

    /// The volume's context and the secrets of a publication, with tokens for the driver.
    pub(super) fn inputs(
        &self,
        wanted: &Wanted,
        at: &At,
        stop: &StopToken,
    ) -> Result<(Pairs, Secrets), String> {
        let reference = wanted.source.node_publish_secret_ref.as_ref();
        let mut secrets = self.secret(reference, "NodePublishSecretRef", stop)?;
        let mut context = wanted.context(&at.spec);
        if at.spec.token_requests.is_empty() {
            return Ok((context, secrets));
        }
        let mut tokens = BTreeMap::new();
        for request in at.spec.token_requests.iter().take(MAX_AUDIENCES) {
            let token = self.cluster.token(&wanted.pod, &request.audience, request.expiration_seconds, stop);
            let token = token.map_err(|error| {
                format!("mounter.SetUpAt failed to get service account token attributes: {error}")
            })?;
            tokens.insert(request.audience.clone(), token);
        }
        let json = cluster::tokens_json(&tokens);
        if at.spec.service_account_token_in_secrets == Some(true) {
            secrets.insert(TOKENS, json);
        } else {
            context.insert(TOKENS.to_owned(), json);
        }
        Ok((context, secrets))
    }
}

/// The first event about a slow walk, and the time between later ones.
const WALK_SLOW: Duration = Duration::from_secs(30);
const WALK_AGAIN: Duration = Duration::from_secs(60);
/// The page that the first event names.
const POLICY_HELP: &str = "https://kubernetes.io/docs/tasks/configure-pod-container/security-context/\
#configure-volume-permission-and-ownership-change-policy-for-pods";
/// Tokens of one driver.
const MAX_AUDIENCES: usize = 32;
