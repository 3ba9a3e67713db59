//! Volumes of CSI drivers, which their own part of this room sets up, and the growth of volumes.

use super::super::error::VolumeError;
use super::super::kind::{Form, VolumeKind};
use super::Kinds;
use crate::kube::claims::ReadError;
use crate::model::api::Volume;
use crate::model::ids::PodUid;
use crate::model::mount::MountedVolume;
use crate::model::persistent::{self, Source, Spec};
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;

impl Kinds {
    fn csi_volume(&self, pod: &Pod, volume: &str, spec: &Spec) -> Result<Box<dyn VolumeKind>, VolumeError> {
        let Some(csi) = &self.csi else { return Err(VolumeError::Unsupported { kind: "csi".to_owned() }) };
        csi.kind(pod, volume, spec)
    }

    pub(super) fn set_up_csi(
        &self,
        pod: &Pod,
        volume: &Volume,
        spec: &Spec,
        stop: &StopToken,
    ) -> Result<MountedVolume, VolumeError> {
        let kind = self.csi_volume(pod, &volume.name, spec)?;
        let ready = kind.set_up(stop)?;
        if ready.grown_to.is_some() {
            self.report_growth(pod, volume, spec);
        }
        self.set_refreshed(pod.uid(), &volume.name, spec.is_persistent || kind.requires_remount());
        Ok(MountedVolume {
            volume: volume.name.clone(),
            host_path: ready.host_path,
            read_only: ready.read_only,
            selinux_relabel: ready.selinux_relabel && ready.form == Form::Filesystem,
        })
    }

    pub(super) fn set_refreshed(&self, uid: &PodUid, volume: &str, is_refreshed: bool) {
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

    /// Brings a volume up to date that is set up.
    pub(in super::super) fn refresh(
        &self,
        pod: &Pod,
        volume: &Volume,
        mounted: MountedVolume,
        stop: &StopToken,
    ) -> Result<MountedVolume, VolumeError> {
        let spec = match self.resolve(pod, volume) {
            Ok(spec) => spec,
            Err(VolumeError::Stopping) => return Err(VolumeError::Stopping),
            Err(error) => {
                // The pod keeps its volume, whatever became of the claim.
                log::debug!("volume {} of pod {}: {}", volume.name, pod.uid(), chain(&error));
                return Ok(mounted);
            }
        };
        if let Source::Local(source) = &spec.source {
            if spec.has_grown && !spec.read_only {
                self.grow_local(&spec, source, stop)?;
                self.report_growth(pod, volume, &spec);
            }
            return Ok(mounted);
        }
        let kind = self.csi_volume(pod, &volume.name, &spec)?;
        if kind.requires_remount() {
            return self.set_up_csi(pod, volume, &spec, stop);
        }
        if let Some(bytes) = spec.grow_to()
            && kind.expand(bytes, stop)?.is_some()
        {
            self.report_growth(pod, volume, &spec);
        }
        Ok(mounted)
    }

    /// The claim shows the new size. Until it does, the growth is repeated at each sync, which
    /// drivers must allow.
    fn report_growth(&self, pod: &Pod, volume: &Volume, spec: &Spec) {
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
