//! What is known about each volume of each pod, for people and for the metrics of unmounts (pure: time
//! is a parameter).
//!
//! Nothing is decided by this table: it is empty after a start, and is filled by the set-up and the
//! removal of volumes.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use super::error::VolumeError;
use crate::model::ids::PodUid;
use crate::util::clip;
use crate::util::error_chain::chain;

/// The longest error that is kept, in bytes. Drivers and helper programs write them.
const MOST_BYTES: usize = 1024;
/// How many entries of a pod come from names that were found on the disk.
const MOST_FOUND: usize = 100;

/// The state of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeState {
    /// The first set-up has not ended.
    SettingUp,
    /// The pod can use it.
    Mounted,
    /// The last set-up has failed; it is repeated.
    Failed,
    /// The pod has ended.
    Unmounting,
    /// The last removal has failed; it is repeated.
    Stuck,
    /// It is removed, but another volume of the pod is not.
    Unmounted,
}

/// What is known about a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VolumeProgress {
    pub(super) state: VolumeState,
    /// The beginning of the state.
    pub(super) since: Instant,
    /// The last error. A mounted volume has one if its files could not be updated.
    pub(super) error: Option<String>,
    /// The plugin's name in metrics.
    pub(super) plugin: Option<&'static str>,
    /// Its directory below the pod's `volumes`, such as `kubernetes.io~nfs/pv1`.
    pub(super) place: Option<String>,
}

impl VolumeProgress {
    fn new(state: VolumeState, now: Instant) -> VolumeProgress {
        VolumeProgress { state, since: now, error: None, plugin: None, place: None }
    }

    fn enter(&mut self, state: VolumeState, now: Instant) {
        if self.state != state {
            (self.state, self.since) = (state, now);
        }
    }

    /// Whether `path`, which a removal has left behind, belongs to this volume, which has this name.
    fn is_at(&self, name: &str, path: &str) -> bool {
        let in_place = |place: &String| {
            path.strip_prefix(place.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.place.as_ref().is_some_and(in_place) || path.rsplit('/').next() == Some(name)
    }
}

/// All volumes, by pod and name.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pods: HashMap<PodUid, BTreeMap<String, VolumeProgress>>,
}

impl Progress {
    /// A set-up begins.
    pub(super) fn begins(&mut self, uid: &PodUid, volume: &str, now: Instant) {
        let volumes = self.pods.entry(uid.clone()).or_default();
        let entry = volumes
            .entry(volume.to_owned())
            .or_insert_with(|| VolumeProgress::new(VolumeState::SettingUp, now));
        // The pod has been created again before its volumes were removed.
        if matches!(entry.state, VolumeState::Unmounting | VolumeState::Stuck | VolumeState::Unmounted) {
            entry.enter(VolumeState::SettingUp, now);
        }
    }

    /// The volume is ready.
    pub(super) fn mounted(
        &mut self,
        uid: &PodUid,
        volume: &str,
        (plugin, place): (Option<&'static str>, Option<String>),
        now: Instant,
    ) {
        let volumes = self.pods.entry(uid.clone()).or_default();
        let entry = volumes
            .entry(volume.to_owned())
            .or_insert_with(|| VolumeProgress::new(VolumeState::Mounted, now));
        entry.enter(VolumeState::Mounted, now);
        (entry.error, entry.plugin, entry.place) = (None, plugin, place);
    }

    /// The set-up waits for this, and has not failed.
    pub(super) fn waits(&mut self, uid: &PodUid, volume: &str, cause: &str, now: Instant) {
        self.begins(uid, volume, now);
        if let Some(entry) = self.pods.get_mut(uid).and_then(|volumes| volumes.get_mut(volume)) {
            entry.error = Some(short(cause));
        }
    }

    /// The set-up, or an update of the files of a mounted volume, has failed.
    pub(super) fn failed(&mut self, uid: &PodUid, volume: &str, cause: &str, now: Instant) {
        let volumes = self.pods.entry(uid.clone()).or_default();
        let entry =
            volumes.entry(volume.to_owned()).or_insert_with(|| VolumeProgress::new(VolumeState::Failed, now));
        if entry.state != VolumeState::Mounted {
            entry.enter(VolumeState::Failed, now);
        }
        entry.error = Some(short(cause));
    }

    /// The removal of the pod's volumes begins.
    pub(super) fn unmounting(&mut self, uid: &PodUid, now: Instant) {
        for entry in self.pods.get_mut(uid).into_iter().flat_map(BTreeMap::values_mut) {
            if !matches!(entry.state, VolumeState::Stuck | VolumeState::Unmounted) {
                entry.enter(VolumeState::Unmounting, now);
                entry.error = None;
            }
        }
    }

    /// The removal has ended. Returns the plugins of the volumes that are gone, and of those that are
    /// not.
    pub(super) fn removed(
        &mut self,
        uid: &PodUid,
        result: &Result<(), VolumeError>,
        now: Instant,
    ) -> [Vec<&'static str>; 2] {
        let error = match result {
            Ok(()) => {
                let gone = self.pods.remove(uid).unwrap_or_default().into_values();
                let gone = gone.filter(|entry| entry.state != VolumeState::Unmounted);
                return [gone.filter_map(|entry| entry.plugin).collect(), Vec::new()];
            }
            Err(VolumeError::Stopping) => return Default::default(),
            Err(error) => error,
        };
        let volumes = self.pods.entry(uid.clone()).or_default();
        let (left, cause) = match error {
            VolumeError::LeftBehind { volumes, cause } => (Some(volumes), short(cause)),
            error => (None, short(&chain(error))),
        };
        let mut outcome = <[Vec<&'static str>; 2]>::default();
        for (name, entry) in volumes.iter_mut() {
            let is_left =
                left.is_none_or(|left| left.iter().any(|path| path == name || entry.is_at(name, path)));
            if !is_left && entry.state == VolumeState::Unmounted {
                continue;
            }
            entry.enter(if is_left { VolumeState::Stuck } else { VolumeState::Unmounted }, now);
            entry.error = is_left.then(|| cause.clone());
            let [gone, stuck] = &mut outcome;
            if is_left { stuck } else { gone }.extend(entry.plugin);
        }
        for path in left.into_iter().flatten().take(MOST_FOUND) {
            if !volumes.iter().any(|(name, entry)| name == path || entry.is_at(name, path)) {
                let entry = VolumeProgress {
                    error: Some(cause.clone()),
                    ..VolumeProgress::new(VolumeState::Stuck, now)
                };
                volumes.insert(short(path), entry);
            }
        }
        if volumes.is_empty() {
            self.pods.remove(uid);
        }
        outcome
    }

    /// The volumes of a pod.
    pub(super) fn volumes_of(&self, uid: &PodUid) -> BTreeMap<String, VolumeProgress> {
        self.pods.get(uid).cloned().unwrap_or_default()
    }

    /// The pods of which anything is known.
    pub(super) fn pods(&self) -> Vec<PodUid> {
        self.pods.keys().cloned().collect()
    }
}

/// The beginning of a text, at most [`MOST_BYTES`] long.
fn short(text: &str) -> String {
    clip::beginning(text, MOST_BYTES).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn left(volumes: &[&str]) -> Result<(), VolumeError> {
        let volumes = volumes.iter().map(|path| (*path).to_owned()).collect();
        Err(VolumeError::LeftBehind { volumes, cause: "device is busy".to_owned() })
    }

    fn states(progress: &Progress, uid: &PodUid) -> Vec<(String, VolumeState, Option<String>)> {
        let all = progress.volumes_of(uid).into_iter();
        all.map(|(name, entry)| (name, entry.state, entry.error)).collect()
    }

    #[test]
    fn a_volume_is_followed_from_its_set_up_to_its_removal() {
        let (mut progress, uid) = (Progress::default(), PodUid::from("u"));
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        progress.begins(&uid, "a", after(0));
        assert_eq!(states(&progress, &uid), [("a".to_owned(), VolumeState::SettingUp, None)]);
        progress.failed(&uid, "a", "no server", after(1));
        progress.begins(&uid, "a", after(2));
        progress.failed(&uid, "a", "still none", after(3));
        let failed = &progress.volumes_of(&uid)["a"];
        assert_eq!((failed.state, failed.since), (VolumeState::Failed, after(1)));
        assert_eq!(failed.error.as_deref(), Some("still none"));
        progress.mounted(&uid, "a", (Some("kubernetes.io/nfs"), None), after(4));
        // An update that fails leaves the old files.
        progress.failed(&uid, "a", "no update", after(5));
        let mounted = &progress.volumes_of(&uid)["a"];
        assert_eq!((mounted.state, mounted.since), (VolumeState::Mounted, after(4)));
        assert_eq!(mounted.error.as_deref(), Some("no update"));
        progress.unmounting(&uid, after(6));
        assert_eq!(states(&progress, &uid), [("a".to_owned(), VolumeState::Unmounting, None)]);
        assert_eq!(progress.removed(&uid, &Ok(()), after(7)), [vec!["kubernetes.io/nfs"], vec![]]);
        assert!(progress.pods().is_empty());
    }

    #[test]
    fn volumes_that_cannot_be_removed_are_named_and_the_others_are_unmounted() {
        let (mut progress, uid, now) = (Progress::default(), PodUid::from("u"), Instant::now());
        let place = Some("kubernetes.io~csi/pvc-1".to_owned());
        progress.mounted(&uid, "data", (Some("kubernetes.io/csi"), place), now);
        progress.mounted(&uid, "tmp", (Some("kubernetes.io/empty-dir"), None), now);
        progress.mounted(&uid, "cache", (Some("kubernetes.io/empty-dir"), None), now);
        progress.unmounting(&uid, now);
        let result = left(&["kubernetes.io~csi/pvc-1/mount", "kubernetes.io~empty-dir/tmp", "other~x/y"]);
        let [gone, stuck] = progress.removed(&uid, &result, now);
        assert_eq!(gone, ["kubernetes.io/empty-dir"]);
        assert_eq!(stuck, ["kubernetes.io/csi", "kubernetes.io/empty-dir"]);
        let busy = || Some("device is busy".to_owned());
        let stuck = |name: &str| (name.to_owned(), VolumeState::Stuck, busy());
        let all = [
            ("cache".to_owned(), VolumeState::Unmounted, None),
            stuck("data"),
            stuck("other~x/y"),
            stuck("tmp"),
        ];
        assert_eq!(states(&progress, &uid), all);
        // The next attempt removes all but one, and does not count the others again.
        progress.unmounting(&uid, now);
        let [gone, stuck] = progress.removed(&uid, &left(&["kubernetes.io~csi/pvc-1"]), now);
        assert_eq!((gone, stuck), (vec!["kubernetes.io/empty-dir"], vec!["kubernetes.io/csi"]));
        assert_eq!(progress.removed(&uid, &Ok(()), now), [vec!["kubernetes.io/csi"], vec![]]);
    }

    #[test]
    fn an_error_of_the_whole_removal_concerns_every_volume() {
        let (mut progress, uid, now) = (Progress::default(), PodUid::from("u"), Instant::now());
        progress.mounted(&uid, "a", (None, None), now);
        let _ = progress.removed(&uid, &Err(VolumeError::Overdue), now);
        assert_eq!(progress.volumes_of(&uid)["a"].state, VolumeState::Stuck);
        let _ = progress.removed(&uid, &Err(VolumeError::Stopping), now);
        assert_eq!(progress.volumes_of(&uid)["a"].state, VolumeState::Stuck);
        // Nothing is known of the volumes of a pod after a restart.
        let other = PodUid::from("other");
        let _ = progress.removed(&other, &Err(VolumeError::Overdue), now);
        assert_eq!(progress.pods(), [uid]);
    }

    #[test]
    fn errors_and_numbers_are_limited() {
        let (mut progress, uid, now) = (Progress::default(), PodUid::from("u"), Instant::now());
        progress.failed(&uid, "a", &"ä".repeat(10_000), now);
        assert!(progress.volumes_of(&uid)["a"].error.as_ref().unwrap().len() <= MOST_BYTES);
        let many: Vec<String> = (0..1000).map(|number| format!("x~y/{number}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let _ = progress.removed(&uid, &left(&many), now);
        assert!(progress.volumes_of(&uid).len() <= MOST_FOUND + 1);
    }
}
