//! Which pods use which volume, and which volumes are staged (pure). The table is rebuilt from the
//! disk at a start.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::super::kind::VolumeLocation;
use crate::model::ids::PodUid;

/// A volume on the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct UsedVolume {
    users: BTreeSet<VolumeLocation>,
    /// The label of the staged mount, once it is known to be staged.
    staged: Option<String>,
    /// No controller attaches it. False until that is known.
    is_unattached: bool,
}

/// All volumes by unique name.
#[derive(Debug, Default)]
pub(super) struct Users {
    volumes: HashMap<String, UsedVolume>,
    /// Volumes that must be published again at each sync of their pod.
    republished: BTreeSet<VolumeLocation>,
    /// The pods have these, or may have. What a driver publishes need not be a mount.
    published: BTreeSet<VolumeLocation>,
    /// The driver does not grow these while they are in use.
    not_grown: BTreeSet<VolumeLocation>,
    /// Pods have volumes there whose names are not known, because their records are damaged.
    unknown: BTreeSet<VolumeLocation>,
    /// A directory that may have volumes of pods cannot be read.
    is_hidden: bool,
    /// The names of the volumes in their pods, once this process has set them up.
    pod_names: BTreeMap<VolumeLocation, String>,
}

impl Users {
    /// A pod uses a volume, or may use it.
    pub(super) fn add(&mut self, name: &str, location: &VolumeLocation) {
        self.unknown.remove(location);
        self.volumes.entry(name.to_owned()).or_default().users.insert(location.clone());
    }

    /// A pod has a volume, and it is not known which.
    pub(super) fn add_unknown(&mut self, location: VolumeLocation) {
        self.unknown.insert(location);
    }

    /// Pods may have volumes that are not known, because a directory cannot be read.
    pub(super) fn set_hidden(&mut self, is_hidden: bool) {
        self.is_hidden = is_hidden;
    }

    /// It has no volume there any more.
    pub(super) fn remove_unknown(&mut self, location: &VolumeLocation) {
        self.unknown.remove(location);
    }

    /// A pod no longer uses a volume. Returns whether no other pod uses it, or may use it.
    pub(super) fn remove(&mut self, name: &str, location: &VolumeLocation) -> bool {
        self.unknown.remove(location);
        self.not_grown.remove(location);
        self.published.remove(location);
        self.republished.remove(location);
        self.pod_names.remove(location);
        let Some(volume) = self.volumes.get_mut(name) else { return true };
        volume.users.remove(location);
        !self.may_be_used(name)
    }

    /// Whether any pod uses the volume.
    fn is_used(&self, name: &str) -> bool {
        self.volumes.get(name).is_some_and(|volume| !volume.users.is_empty())
    }

    /// Whether any pod uses the volume, or has a volume that is not known.
    pub(super) fn may_be_used(&self, name: &str) -> bool {
        self.is_hidden || !self.unknown.is_empty() || self.is_used(name)
    }

    /// The unique names of all volumes.
    pub(super) fn all(&self) -> Vec<String> {
        self.volumes.keys().cloned().collect()
    }

    /// The unique names of the volumes without a user.
    pub(super) fn unused(&self) -> Vec<String> {
        let unused = self.volumes.iter().filter(|(_, volume)| volume.users.is_empty());
        unused.map(|(name, _)| name.clone()).collect()
    }

    /// Whether another pod uses the volume.
    pub(super) fn is_used_by_others(&self, name: &str, location: &VolumeLocation) -> bool {
        self.volumes.get(name).is_some_and(|volume| volume.users.iter().any(|user| user != location))
    }

    /// The other pods that use the volume, or wait for it; `None`: a pod has a volume that is not known.
    pub(super) fn others(&self, name: &str, location: &VolumeLocation) -> Option<Vec<VolumeLocation>> {
        if self.is_hidden || !self.unknown.is_empty() {
            return None;
        }
        let users = self.volumes.get(name).into_iter().flat_map(|volume| &volume.users);
        Some(users.filter(|user| *user != location).cloned().collect())
    }

    /// The volume is staged, with this label or none.
    pub(super) fn set_staged(&mut self, name: &str, label: &str) {
        self.volumes.entry(name.to_owned()).or_default().staged = Some(label.to_owned());
    }

    /// The label of a volume that this process has staged.
    pub(super) fn staged_label(&self, name: &str) -> Option<&str> {
        self.volumes.get(name)?.staged.as_deref()
    }

    /// It is not known whether the volume is staged.
    pub(super) fn clear_staged(&mut self, name: &str) {
        if let Some(volume) = self.volumes.get_mut(name) {
            volume.staged = None;
        }
    }

    /// The volume is no longer staged.
    pub(super) fn set_unstaged(&mut self, name: &str) {
        self.clear_staged(name);
        if !self.is_used(name) {
            self.volumes.remove(name);
        }
    }

    /// The volume at a location.
    pub(super) fn name_at(&self, location: &VolumeLocation) -> Option<String> {
        let has = |volume: &UsedVolume| volume.users.contains(location);
        self.volumes.iter().find(|(_, volume)| has(volume)).map(|(name, _)| name.clone())
    }

    /// The pod calls the volume so.
    pub(super) fn set_pod_name(&mut self, location: &VolumeLocation, volume: &str) {
        self.pod_names.insert(location.clone(), volume.to_owned());
    }

    pub(super) fn pod_name(&self, location: &VolumeLocation) -> Option<&str> {
        self.pod_names.get(location).map(String::as_str)
    }

    /// The volumes of a pod that this process has set up, by their names in the pod.
    pub(super) fn of_pod(&self, pod: &PodUid) -> Vec<(VolumeLocation, String)> {
        let all = self.pod_names.iter().filter(|(location, _)| location.pod == *pod);
        all.map(|(location, name)| (location.clone(), name.clone())).collect()
    }

    /// The volumes of one driver, at each pod that uses them. `prefix`: what their names begin with.
    pub(super) fn locations_of_driver(&self, prefix: &str) -> Vec<VolumeLocation> {
        let volumes = self.volumes.iter().filter(|(name, _)| name.starts_with(prefix));
        let mut locations: Vec<VolumeLocation> =
            volumes.flat_map(|(_, volume)| volume.users.iter().cloned()).collect();
        locations.sort();
        locations
    }

    /// What a pod uses; all pods without a UID.
    pub(super) fn locations(&self, pod: Option<&PodUid>) -> Vec<VolumeLocation> {
        let all = self.volumes.values().flat_map(|volume| &volume.users);
        let mut locations: Vec<VolumeLocation> =
            all.filter(|location| pod.is_none_or(|pod| location.pod == *pod)).cloned().collect();
        locations.sort();
        locations
    }

    /// Whether a controller attaches the volume to nodes.
    pub(super) fn set_attached(&mut self, name: &str, is_attached: bool) {
        self.volumes.entry(name.to_owned()).or_default().is_unattached = !is_attached;
    }

    /// The volume may be staged: an earlier agent has begun to stage it.
    pub(super) fn add_found(&mut self, name: &str) {
        self.volumes.entry(name.to_owned()).or_default();
    }

    /// The names of the volumes that a controller must not detach, for `node.status.volumesInUse`:
    /// those that pods want or use, and those that no pod uses any more, until they are unstaged.
    pub(super) fn names(&self) -> BTreeSet<String> {
        let attached = self.volumes.iter().filter(|(_, volume)| !volume.is_unattached);
        attached.map(|(name, _)| name.clone()).collect()
    }

    /// The pod has the volume, or may have, since a driver may have published it.
    pub(super) fn set_published(&mut self, location: &VolumeLocation) {
        self.published.insert(location.clone());
    }

    /// Whether the pod has the volume, or may have, as far as this process knows. False after a restart if
    /// nothing of the volume is a mount.
    pub(super) fn is_published(&self, location: &VolumeLocation) -> bool {
        self.published.contains(location)
    }

    pub(super) fn set_not_grown(&mut self, location: &VolumeLocation) {
        self.not_grown.insert(location.clone());
    }

    pub(super) fn is_not_grown(&self, location: &VolumeLocation) -> bool {
        self.not_grown.contains(location)
    }

    pub(super) fn set_republished(&mut self, location: &VolumeLocation, is_republished: bool) {
        if is_republished {
            self.republished.insert(location.clone());
        } else {
            self.republished.remove(location);
        }
    }

    pub(super) fn is_republished(&self, location: &VolumeLocation) -> bool {
        self.republished.contains(location)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::kind::Form;
    use super::*;

    #[test]
    fn volume_stays_until_its_last_user_is_removed() {
        let location = |pod: &str| VolumeLocation {
            pod: PodUid::from(pod),
            spec_name: "pv".to_owned(),
            form: Form::Filesystem,
        };
        let mut users = Users::default();
        let names = |users: &Users| users.names().into_iter().collect::<Vec<_>>();
        users.add("v", &location("a"));
        users.add("v", &location("b"));
        users.set_staged("v", "");
        assert_eq!(names(&users), ["v"]);
        users.set_attached("v", false);
        assert!(users.names().is_empty());
        users.set_attached("v", true);
        assert_eq!(users.staged_label("v"), Some(""));
        assert_eq!(users.name_at(&location("b")).as_deref(), Some("v"));
        assert!(!users.remove("v", &location("a")));
        assert_eq!(users.locations(None), [location("b")]);
        assert!(users.remove("v", &location("b")));
        // It is still staged, and must not be detached.
        assert!(!users.is_used("v"));
        assert_eq!((users.staged_label("v"), names(&users)), (Some(""), vec!["v".to_owned()]));
        users.clear_staged("v");
        assert_eq!(names(&users), ["v"]);
        users.set_unstaged("v");
        assert!(users.volumes.is_empty() && names(&users).is_empty());
        // Staged by an earlier agent.
        users.add_found("v");
        assert_eq!(names(&users), ["v"]);
        users.set_unstaged("v");
        assert!(users.remove("v", &location("b")));
    }
}
