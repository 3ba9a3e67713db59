//! The set-up of volumes by their storage, and what is known of them afterwards.

use super::super::error::VolumeError;
use super::super::plugin_table;
use super::storage::Request;
use super::{Kinds, ResolvedVolume};
use crate::model::api::Volume;
use crate::model::mount::MountedVolume;
use crate::model::persistent::{Spec, VolumeMode};
use crate::model::pod::Pod;
use crate::util::error_chain::chain;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;

impl Kinds {
    /// The name of the volume's plugin; `None` for a claim that was not resolved yet.
    pub(in super::super) fn plugin(&self, pod: &Pod, volume: &Volume) -> Option<&'static str> {
        let plugin = self.with_resolved(pod, volume, |resolved| resolved.plugin);
        plugin.or_else(|| plugin_table::with_plugin(pod, volume, |plugin| plugin.name()))
    }

    /// The file server or driver of the volume, if it is known.
    pub(in super::super) fn server(&self, pod: &Pod, volume: &Volume) -> Option<String> {
        match self.with_resolved(pod, volume, |resolved| resolved.server.clone()) {
            Some(server) => server,
            None => plugin_table::storage(&Spec::inline(pod, volume)?.source).server(),
        }
    }

    /// What the last set-up has found out. Not longer under the lock: a source may be large.
    fn with_resolved<T>(
        &self,
        pod: &Pod,
        volume: &Volume,
        read: impl FnOnce(&ResolvedVolume) -> T,
    ) -> Option<T> {
        self.plugins.locked().get(pod.uid())?.get(&volume.name).map(read)
    }

    /// Makes the volume ready for the pod. Idempotent. May hang.
    pub(in super::super) fn set_up(
        &self,
        pod: &Pod,
        volume: &Volume,
        stop: &StopToken,
    ) -> Result<MountedVolume, VolumeError> {
        let spec = &self.resolve_outside(pod, volume)?;
        let storage = plugin_table::storage(&spec.source);
        let server = storage.server();
        let resolved =
            ResolvedVolume { plugin: storage.name(), name: spec.name.clone(), server: server.clone() };
        self.plugins.locked().entry(pod.uid().clone()).or_default().insert(volume.name.clone(), resolved);
        self.operations.is_served_by(pod.uid(), &volume.name, server);
        if storage.grows() {
            self.set_refreshed(pod.uid(), &volume.name, spec.is_persistent);
        }
        self.check_node(pod, spec)?;
        let label = &self.admit_label(pod, volume, spec, storage)?;
        self.claim_alone(pod, spec)?;
        self.check_attached(pod, spec)?;
        let request = Request { pod, volume, spec, label, stop };
        match spec.mode {
            VolumeMode::Filesystem => storage.mount(self, &request),
            VolumeMode::Block => storage.map(self, &request),
        }
    }

    /// The operation does nothing in the pod's directory from now on.
    pub(in super::super) fn leave_pod_dir(&self, request: &Request<'_>) {
        self.operations.leave_pod_dir(request.pod.uid(), &request.volume.name);
    }

    /// Brings a volume up to date that is set up.
    pub(in super::super) fn refresh(
        &self,
        pod: &Pod,
        volume: &Volume,
        mounted: MountedVolume,
        stop: &StopToken,
    ) -> Result<MountedVolume, VolumeError> {
        let spec = match self.resolve_outside(pod, volume) {
            Ok(spec) => spec,
            Err(VolumeError::Stopping) => return Err(VolumeError::Stopping),
            Err(error) => {
                // The pod keeps its volume, whatever became of the claim.
                log::debug!("volume {} of pod {}: {}", volume.name, pod.uid(), chain(&error));
                return Ok(mounted);
            }
        };
        let request = Request { pod, volume, spec: &spec, label: "", stop };
        let fresh = plugin_table::storage(&spec.source).refresh(self, &request)?;
        Ok(fresh.unwrap_or(mounted))
    }
}
