//! The volumes of pods, for people.

use std::path::Path;
use std::time::{Duration, Instant};

use super::manager::Volumes;
use super::progress::VolumeState;
use super::setup::kind;
use super::{paths, plugin_table};
use crate::model::api::Volume;
use crate::model::ids::PodUid;
use crate::model::persistent;
use crate::model::pod::Pod;

/// A volume of a pod, or what is left of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeStatus {
    /// Its name in the pod; of a volume that is not in the pod: its path below the pod's `volumes`.
    pub volume: String,
    /// The kind with the object, driver or path that matters, such as `csi hostpath.csi.k8s.io`.
    pub kind: String,
    /// `None`: no container uses it, or its pod has not begun.
    pub state: Option<VolumeState>,
    /// The last error.
    pub error: Option<String>,
    /// How long it has been in this state.
    pub since: Option<Duration>,
}

impl Volumes {
    /// The volumes of a pod: those of its specification, and those that could not be removed.
    /// `pod` is `None` if only its UID is known.
    #[must_use]
    pub fn volume_statuses(&self, uid: &PodUid, pod: Option<&Pod>) -> Vec<VolumeStatus> {
        let mut remaining = self.progress().volumes_of(uid);
        let now = Instant::now();
        let mut rows = Vec::new();
        let used = pod.map(Pod::referenced_volumes).unwrap_or_default();
        let is_ending = remaining
            .values()
            .any(|volume| matches!(volume.state, VolumeState::Unmounting | VolumeState::Stuck));
        let volumes = pod.map(Pod::spec).and_then(|spec| spec.volumes.as_deref()).unwrap_or_default();
        for (pod, volume) in volumes.iter().filter_map(|volume| Some((pod?, volume))) {
            let progress = remaining.remove(&volume.name);
            if progress.is_none() && (is_ending || !used.contains(volume.name.as_str())) {
                continue;
            }
            let place = progress.as_ref().and_then(|progress| progress.place.as_deref());
            rows.push(VolumeStatus {
                volume: volume.name.clone(),
                kind: self.kind_of(pod, volume, place),
                state: progress.as_ref().map(|progress| progress.state),
                since: progress.as_ref().map(|progress| now.saturating_duration_since(progress.since)),
                error: progress.and_then(|progress| progress.error),
            });
        }
        rows.extend(remaining.into_iter().map(|(volume, progress)| VolumeStatus {
            volume,
            kind: progress.plugin.unwrap_or_default().to_owned(),
            state: Some(progress.state),
            since: Some(now.saturating_duration_since(progress.since)),
            error: progress.error,
        }));
        rows
    }

    /// The pods of which volumes are mounted, or left.
    #[must_use]
    pub fn pods_with_volumes(&self) -> Vec<PodUid> {
        self.progress().pods()
    }

    /// The kind in words. `place`: its directory below the pod's `volumes`, if it is mounted.
    fn kind_of(&self, pod: &Pod, volume: &Volume, place: Option<&str>) -> String {
        let Some(field) = kind(volume) else { return "emptyDir".to_owned() };
        let name = persistent::claim_name(pod, volume)
            .map(|claim| claim.name)
            .or_else(|| plugin_table::with_plugin(pod, volume, |plugin| plugin.describe())?);
        let behind = persistent::claim_name(pod, volume).and_then(|_| {
            let driver = || self.csi.driver_at(pod.uid(), place?.rsplit('/').next()?);
            let plugin = || self.kinds.plugin(pod, volume).map(str::to_owned);
            driver().or_else(plugin)
        });
        let mut words = field;
        for word in name.into_iter().filter(|word| !word.is_empty()) {
            words.push(' ');
            words.push_str(&word);
        }
        match behind {
            Some(behind) => format!("{words} ({behind})"),
            None => words,
        }
    }

    /// The first two elements of a path below the pod's `volumes`.
    pub(super) fn place_of(&self, uid: &PodUid, path: &Path) -> Option<String> {
        let volumes = paths::pod(&self.settings.root_dir, uid).ok()?.join("volumes");
        let (_, path) = paths::real(&self.settings.root_dir, path);
        let mut elements = path.strip_prefix(volumes).ok()?.components();
        let mut next = || Some(elements.next()?.as_os_str().to_string_lossy().into_owned());
        Some(format!("{}/{}", next()?, next()?))
    }
}
