//! Volumes of CSI drivers, which their own part of this room sets up, and the expansion of volumes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::MutexGuard;

use super::super::csi::CsiVolume;
use super::super::error::VolumeError;
use super::super::kind::{Certainty, Form, Phase};
use super::super::plugin::Plugin;
use super::Kinds;
use super::storage::{Request, Storage};
use crate::kube::volume_claims::{ExpansionStep, ReadError};
use crate::model::ids::PodUid;
use crate::model::mount::MountedVolume;
use crate::model::persistent;
use crate::model::reasons;
use crate::model::storage::CsiVolumeSource;
use crate::util::lock::LockExt;

impl Plugin for CsiVolumeSource {
    fn name(&self) -> &'static str {
        "kubernetes.io/csi"
    }

    fn describe(&self) -> Option<String> {
        Some(self.driver.clone())
    }
}

impl Storage for CsiVolumeSource {
    fn server(&self) -> Option<String> {
        Some(format!("csi/{}", self.driver))
    }

    fn mount(&self, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError> {
        let Request { pod, volume, spec, stop, .. } = *request;
        let kind = kinds.csi_volume(request)?;
        kinds.note_size(request);
        let ready = kinds.growing(request, || kind.set_up(stop))?;
        if ready.grown_to.is_some() {
            kinds.report_expansion(request);
        }
        kinds.set_refreshed(pod.uid(), &volume.name, spec.is_persistent || kind.requires_remount());
        Ok(MountedVolume {
            volume: volume.name.clone(),
            host_path: ready.host_path,
            read_only: ready.read_only,
            selinux_relabel: ready.selinux_relabel && ready.form == Form::Filesystem,
        })
    }

    fn map(&self, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError> {
        self.mount(kinds, request)
    }

    fn refresh(&self, kinds: &Kinds, request: &Request<'_>) -> Result<Option<MountedVolume>, VolumeError> {
        let Request { pod, volume, spec, stop, .. } = *request;
        let kind = kinds.csi_volume(request)?;
        if kind.requires_remount() {
            return self.mount(kinds, request).map(Some);
        }
        if let Some(bytes) = spec.grow_to() {
            if kinds.growing(request, || kind.expand(bytes, stop))?.is_some() {
                kinds.report_expansion(request);
            }
        } else if let Some(bytes) = kinds.grown_elsewhere(request)
            && kind.expand(bytes, stop)?.is_some()
        {
            kinds.sizes().entry(pod.uid().clone()).or_default().insert(volume.name.clone(), bytes);
        }
        Ok(None)
    }
}

impl Kinds {
    fn csi_volume(&self, request: &Request<'_>) -> Result<CsiVolume, VolumeError> {
        let Some(csi) = &self.csi else { return Err(VolumeError::Unsupported { kind: "csi".to_owned() }) };
        csi.of_spec(request.pod, &request.volume.name, request.spec)
    }

    pub(in super::super) fn set_refreshed(&self, uid: &PodUid, volume: &str, is_refreshed: bool) {
        let mut refreshed = self.refreshed();
        let volumes = refreshed.entry(uid.clone()).or_default();
        if is_refreshed {
            volumes.insert(volume.to_owned());
        } else {
            volumes.remove(volume);
        }
    }

    /// Whether a volume that is set up must be inspected at each sync of its pod: it may have grown,
    /// or its driver wants to be called again.
    pub(in super::super) fn is_refreshed(&self, uid: &PodUid, volume: &str) -> bool {
        self.refreshed().get(uid).is_some_and(|volumes| volumes.contains(volume))
    }

    fn sizes(&self) -> MutexGuard<'_, HashMap<PodUid, BTreeMap<String, i64>>> {
        self.sizes.locked()
    }

    fn failed_growths(&self) -> MutexGuard<'_, HashMap<PodUid, BTreeSet<String>>> {
        self.failed_growths.locked()
    }

    pub(super) fn forget_sizes(&self, uid: &PodUid) {
        self.sizes().remove(uid);
        self.failed_growths().remove(uid);
    }

    /// The size that the volume has at its mount: that of the claim's status.
    fn note_size(&self, request: &Request<'_>) {
        let Request { pod, volume, spec, .. } = *request;
        let mut sizes = self.sizes();
        let volumes = sizes.entry(pod.uid().clone()).or_default();
        volumes.entry(volume.name.clone()).or_insert(spec.expansion.claim_bytes);
    }

    /// The size of a volume that other nodes have too and that one of them has grown: the claim has it
    /// already.
    fn grown_elsewhere(&self, request: &Request<'_>) -> Option<i64> {
        let Request { pod, volume, spec, .. } = *request;
        let bytes = spec.expansion.claim_bytes;
        let size = self.sizes().get(pod.uid()).and_then(|volumes| volumes.get(&volume.name).copied());
        (spec.expansion.is_for_each_node && !spec.read_only && size.is_some_and(|size| size < bytes))
            .then_some(bytes)
    }

    /// Runs an operation that grows the volume if it has to grow, and shows its steps in the claim.
    pub(super) fn growing<T>(
        &self,
        request: &Request<'_>,
        work: impl FnOnce() -> Result<T, VolumeError>,
    ) -> Result<T, VolumeError> {
        let Request { pod, volume, spec, .. } = *request;
        let claim = persistent::claim_name(pod, volume);
        let (Some(api), Some(claim)) = (&self.api, claim.filter(|_| spec.has_grown && !spec.read_only))
        else {
            return work();
        };
        let show = |step: ExpansionStep| {
            let shown = api.claims.report_expansion(pod.namespace(), &claim.name, &step);
            shown.inspect_err(|error| log::warn!("cannot write the status of claim {}: {error}", claim.name))
        };
        let is_shown = spec.expansion.is_shown;
        if is_shown
            && !spec.expansion.is_in_progress
            && let Err(error) = show(ExpansionStep::InProgress)
        {
            let message = format!("failed to mark node expansion in progress: {error}");
            return match error {
                ReadError::Stopping => Err(VolumeError::Stopping),
                _ => Err(VolumeError::device(Phase::Expand, message)),
            };
        }
        let result = work();
        if let Err(VolumeError::Kind(error)) = &result
            && matches!(error.phase, Phase::Expand | Phase::ExpandInfeasible)
            && error.certainty == Certainty::Final
        {
            let has_failed_before =
                !self.failed_growths().entry(pod.uid().clone()).or_default().insert(volume.name.clone());
            let is_infeasible =
                error.phase == Phase::ExpandInfeasible || (has_failed_before && spec.expansion.is_superseded);
            if is_shown {
                // A failure is logged, and the expansion is repeated.
                let _ = show(match is_infeasible {
                    true => ExpansionStep::Infeasible(error.message.clone()),
                    false => ExpansionStep::Failed(error.message.clone()),
                });
            }
        }
        result
    }

    /// The claim shows the new size. Until it does, the expansion is repeated at each sync, which
    /// drivers must allow.
    pub(super) fn report_expansion(&self, request: &Request<'_>) {
        let Request { pod, volume, spec, .. } = *request;
        let (Some(api), Some(size)) = (&self.api, &spec.size) else { return };
        let Some(claim) = persistent::claim_name(pod, volume) else { return };
        let message =
            format!("MountVolume.NodeExpandVolume succeeded for volume {:?} {}", spec.name, self.node);
        match api.claims.report_size(pod.namespace(), &claim.name, &size.0) {
            Ok(()) => self.events.normal(pod, reasons::FILE_SYSTEM_RESIZE_SUCCESS, message),
            Err(ReadError::Stopping) => {}
            Err(error) => log::warn!("cannot write the size of claim {}: {error}", claim.name),
        }
    }
}
