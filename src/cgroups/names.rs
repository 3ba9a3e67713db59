//! Names of cgroups: the internal name, its path with either driver, and back (pure).

use std::fmt;

use crate::model::ids::PodUid;
use crate::model::pod::QosClass;

/// How cgroups are named and made (`cgroupDriver`; the runtime decides).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driver {
    /// As directories.
    Cgroupfs,
    /// As slices of systemd.
    Systemd,
}

/// The cgroup of all pods, below `cgroupRoot` (Go: pkg/kubelet/cm node_container_manager).
const PODS: &str = "kubepods";
const BURSTABLE: &str = "burstable";
const BEST_EFFORT: &str = "besteffort";
/// Start of the name of a pod's cgroup.
const POD: &str = "pod";
const SLICE: &str = ".slice";
/// The longest name of a directory, and of a unit of systemd.
const MAX_NAME: usize = 255;
/// Parts of a configured path. The kernel has no paths of more than 4,096 bytes.
const MAX_PARTS: usize = 64;

/// A name that cannot be the name of a cgroup.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// A part has a character that one of the drivers cannot express.
    #[error("{0:?} cannot be part of the name of a cgroup")]
    Part(String),
    /// A pod's UID, which two pods could share in the form of systemd, or which is no name.
    #[error(
        "metadata.uid {0:?} cannot be part of the name of a cgroup: only letters, digits, \"-\", \".\" and \":\" can"
    )]
    Uid(String),
    /// A directory's name, or the path, is too long.
    #[error("the name of the cgroup of {0:?} is too long")]
    Long(String),
}

/// A cgroup, by its parts from the root of the hierarchy; no parts: the root itself.
///
/// INVARIANT: no part is empty, `.` or `..`, or has a `/`; `no_name_leaves_its_parent` tests it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Name(Vec<String>);

impl Name {
    /// A configured path (`cgroupRoot`) with the names of directories, `/` if it is empty.
    ///
    /// # Errors
    /// When the path has `..` or is too long.
    pub fn parse(path: &str) -> Result<Name, NameError> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        if parts.len() > MAX_PARTS {
            return Err(NameError::Long(path.chars().take(MAX_NAME).collect()));
        }
        parts.into_iter().try_fold(Name::default(), |name, part| name.with(part))
    }

    /// A configured path (`systemReservedCgroup`) that the driver may have written: with systemd
    /// its last part is the name of a slice (Go: `ParseSystemdToCgroupName`).
    ///
    /// # Errors
    /// As [`Name::parse`].
    pub fn parse_literal(path: &str, driver: Driver) -> Result<Name, NameError> {
        if driver == Driver::Cgroupfs {
            return Name::parse(path);
        }
        let last = path.rsplit('/').find(|part| !part.is_empty()).unwrap_or_default();
        slice_parts(last)
            .filter(|part| !part.is_empty())
            .try_fold(Name::default(), |name, part| name.with(&part))
    }

    /// The cgroup `part` in this one. Parts with `_` are refused, because systemd's form has it in
    /// the place of `-` (Go: `NewCgroupName` panics).
    ///
    /// # Errors
    /// When `part` is not a name.
    pub fn join(&self, part: &str) -> Result<Name, NameError> {
        if part.contains('_') { Err(NameError::Part(part.to_owned())) } else { self.with(part) }
    }

    fn with(&self, part: &str) -> Result<Name, NameError> {
        let bad = |character: char| character == '/' || character.is_control();
        if matches!(part, "" | "." | "..") || part.contains(bad) {
            return Err(NameError::Part(part.to_owned()));
        }
        if part.len() > MAX_NAME {
            return Err(NameError::Long(part.chars().take(64).collect()));
        }
        let mut parts = self.0.clone();
        parts.push(part.to_owned());
        Ok(Name(parts))
    }

    /// The parts, from the root.
    #[must_use]
    pub fn parts(&self) -> &[String] {
        &self.0
    }

    /// Whether it is this cgroup or below it.
    #[must_use]
    pub fn is_within(&self, other: &Name) -> bool {
        self.0.starts_with(&other.0)
    }

    /// The names of its directories, from the root.
    #[must_use]
    pub fn directories(&self, driver: Driver) -> Vec<String> {
        match driver {
            Driver::Cgroupfs => self.0.clone(),
            Driver::Systemd => (1..=self.0.len()).map(|count| slice(self.0.get(..count))).collect(),
        }
    }

    /// Its path from the root of the hierarchy: what the runtime receives as `cgroup_parent`.
    #[must_use]
    pub fn path(&self, driver: Driver) -> String {
        format!("/{}", self.directories(driver).join("/"))
    }

    /// The name of its slice; the root's is `-.slice`.
    #[must_use]
    pub fn slice(&self) -> String {
        slice(Some(&self.0))
    }

    /// The cgroup above it; the root's is the root.
    #[must_use]
    pub fn parent(&self) -> Name {
        Name(self.0.split_last().map(|(_, rest)| rest.to_vec()).unwrap_or_default())
    }
}

/// As in messages: the internal parts.
impl fmt::Display for Name {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "/{}", self.0.join("/"))
    }
}

/// `a`, `b-c` is `a-b_c.slice`.
fn slice(parts: Option<&[String]>) -> String {
    match parts {
        Some(parts) if !parts.is_empty() => {
            let parts: Vec<String> = parts.iter().map(|part| part.replace('-', "_")).collect();
            format!("{}{SLICE}", parts.join("-"))
        }
        _ => format!("-{SLICE}"),
    }
}

fn slice_parts(directory: &str) -> impl Iterator<Item = String> + '_ {
    let name = directory.strip_suffix(SLICE).unwrap_or(directory);
    name.split('-').map(|part| part.replace('_', "-"))
}

/// The cgroups of this agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    root: Name,
    pods: Name,
    driver: Driver,
}

impl Layout {
    /// From `cgroupRoot` and the driver.
    ///
    /// # Errors
    /// When the root is not a path of cgroups.
    pub fn new(cgroup_root: &str, driver: Driver) -> Result<Layout, NameError> {
        let root = Name::parse(cgroup_root)?;
        Ok(Layout { pods: root.join(PODS)?, root, driver })
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> Driver {
        self.driver
    }

    /// `cgroupRoot`. Its directories have these names with both drivers.
    #[must_use]
    pub fn root(&self) -> &Name {
        &self.root
    }

    /// The cgroup of all pods, which is also the tier of Guaranteed pods.
    #[must_use]
    pub fn pods(&self) -> &Name {
        &self.pods
    }

    /// The cgroup in which the pods of a class are.
    #[must_use]
    pub fn tier(&self, class: QosClass) -> Name {
        let mut name = self.pods.clone();
        match class {
            QosClass::Guaranteed => {}
            QosClass::Burstable => name.0.push(BURSTABLE.to_owned()),
            QosClass::BestEffort => name.0.push(BEST_EFFORT.to_owned()),
        }
        name
    }

    /// A pod's cgroup.
    ///
    /// # Errors
    /// When the UID cannot be part of a name. A pod with such a UID cannot run. Different UIDs have
    /// different names with both drivers.
    ///
    /// DIFFERS: the Go kubelet panics for a UID with `/` or `_`, and lets the kernel or systemd
    /// refuse other ones.
    pub fn pod(&self, uid: &PodUid, class: QosClass) -> Result<Name, NameError> {
        let allowed =
            |character: char| character.is_ascii_alphanumeric() || matches!(character, '-' | '.' | ':');
        if uid.is_empty() || !uid.as_str().chars().all(allowed) {
            return Err(NameError::Uid(uid.as_str().chars().take(MAX_NAME).collect()));
        }
        let name = self.tier(class).join(&format!("{POD}{uid}"))?;
        let long = self.driver == Driver::Systemd && name.slice().len() > MAX_NAME;
        if long { Err(NameError::Long(uid.as_str().chars().take(64).collect())) } else { Ok(name) }
    }

    /// The path of a cgroup on the node.
    #[must_use]
    pub fn path(&self, name: &Name) -> String {
        name.path(self.driver)
    }

    /// The pod of a directory in one of the tiers; `None` if it is not a pod's (Go:
    /// `GetAllPodsFromCgroups`): any name that has `pod` once is a pod's, and what follows is the
    /// UID, which may be empty.
    #[must_use]
    pub fn pod_of(&self, directory: &str) -> Option<PodUid> {
        let last = match self.driver {
            Driver::Cgroupfs => directory.to_owned(),
            Driver::Systemd => slice_parts(directory).last().unwrap_or_default(),
        };
        let mut pieces = last.split(POD);
        match (pieces.next(), pieces.next(), pieces.next()) {
            (Some(_), Some(uid), None) => Some(PodUid::from(uid)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UID: &str = "12345678-90ab-cdef-1234-567890abcdef";

    fn layout(root: &str, driver: Driver) -> Layout {
        Layout::new(root, driver).unwrap()
    }

    #[test]
    fn names_with_both_drivers() {
        let check = |root: &str, class, cgroupfs: &str, systemd: &str| {
            for (driver, expected) in [(Driver::Cgroupfs, cgroupfs), (Driver::Systemd, systemd)] {
                let layout = layout(root, driver);
                let tier = layout.path(&layout.tier(class));
                let pod = layout.path(&layout.pod(&UID.into(), class).unwrap());
                assert_eq!(format!("{tier} {pod}"), expected);
                let directory = pod.rsplit('/').next().unwrap();
                assert_eq!(layout.pod_of(directory).unwrap().as_str(), UID);
            }
        };
        check(
            "",
            QosClass::Guaranteed,
            "/kubepods /kubepods/pod12345678-90ab-cdef-1234-567890abcdef",
            "/kubepods.slice /kubepods.slice/kubepods-pod12345678_90ab_cdef_1234_567890abcdef.slice",
        );
        check(
            "/",
            QosClass::Burstable,
            "/kubepods/burstable /kubepods/burstable/pod12345678-90ab-cdef-1234-567890abcdef",
            "/kubepods.slice/kubepods-burstable.slice /kubepods.slice/kubepods-burstable.slice/\
             kubepods-burstable-pod12345678_90ab_cdef_1234_567890abcdef.slice",
        );
        check(
            "/a-b/c/",
            QosClass::BestEffort,
            "/a-b/c/kubepods/besteffort /a-b/c/kubepods/besteffort/pod12345678-90ab-cdef-1234-567890abcdef",
            "/a_b.slice/a_b-c.slice/a_b-c-kubepods.slice/a_b-c-kubepods-besteffort.slice \
             /a_b.slice/a_b-c.slice/a_b-c-kubepods.slice/a_b-c-kubepods-besteffort.slice/\
             a_b-c-kubepods-besteffort-pod12345678_90ab_cdef_1234_567890abcdef.slice",
        );
        assert_eq!(Name::default().path(Driver::Systemd), "/");
        assert_eq!(
            (Name::default().slice().as_str(), Name::default().parent()),
            ("-.slice", Name::default())
        );
    }

    #[test]
    fn reserved_cgroups_are_read_in_the_form_of_the_driver() {
        for (path, driver, expected) in [
            ("/system.slice", Driver::Systemd, "/system.slice"),
            ("system.slice", Driver::Cgroupfs, "/system.slice"),
            ("/a.slice/a-b_c.slice", Driver::Systemd, "/a.slice/a-b_c.slice"),
            ("/kube/reserved", Driver::Cgroupfs, "/kube/reserved"),
            ("reserved", Driver::Systemd, "/reserved.slice"),
        ] {
            assert_eq!(Name::parse_literal(path, driver).unwrap().path(driver), expected, "{path}");
        }
        assert!(Name::parse("/a/../b").is_err());
    }

    #[test]
    fn unusable_uids_are_refused() {
        let long = "a".repeat(300);
        let fits = "a".repeat(200);
        for (uid, usable) in [
            (UID, true),
            ("0123456789abcdef0123456789abcdef", true),
            (fits.as_str(), true),
            ("", false),
            ("a_b", false),
            ("a/b", false),
            ("..", true),
            ("a b", false),
            ("a\nb", false),
            ("ä", false),
            (long.as_str(), false),
        ] {
            for driver in [Driver::Cgroupfs, Driver::Systemd] {
                let name = layout("", driver).pod(&uid.into(), QosClass::Burstable);
                assert_eq!(name.is_ok(), usable, "{uid}");
            }
        }
    }

    #[test]
    fn error_of_an_unusable_uid_names_the_field() {
        let refused = layout("", Driver::Systemd).pod(&"a_b".into(), QosClass::Guaranteed);
        let text = refused.unwrap_err().to_string();
        assert!(text.starts_with("metadata.uid \"a_b\" cannot be part of the name of a cgroup"), "{text}");
    }

    /// The names of the recording `a-orphans`, and what systemd makes of them.
    #[test]
    fn orphans_are_recognised_by_upstreams_rule() {
        let uid_of =
            |directory: &str, driver| layout("", driver).pod_of(directory).map(|uid| uid.to_string());
        for (directory, expected) in [
            ("pod11111111-1111-1111-1111-111111111111", Some("11111111-1111-1111-1111-111111111111")),
            ("xpod44444444-4444-4444-4444-444444444444", Some("44444444-4444-4444-4444-444444444444")),
            ("notapod", Some("")),
            ("podnot-a-uuid", Some("not-a-uuid")),
            ("other", None),
            ("podpod5", None),
        ] {
            assert_eq!(uid_of(directory, Driver::Cgroupfs).as_deref(), expected, "{directory}");
        }
        for (directory, expected) in [
            ("kubepods-burstable-pod1_2.slice", Some("1-2")),
            ("kubepods-pod1_2.slice", Some("1-2")),
            ("kubepods-burstable.slice", None),
            ("kubepods-podpod5.slice", None),
            ("cri-containerd-0123.scope", None),
        ] {
            assert_eq!(uid_of(directory, Driver::Systemd).as_deref(), expected, "{directory}");
        }
    }

    proptest! {
        #[test]
        fn different_uids_have_different_cgroups(uid in "[aA0._:/\\\\-]{0,5}", other in "[aA0._:/\\\\-]{0,5}") {
            for driver in [Driver::Cgroupfs, Driver::Systemd] {
                let layout = layout("/root", driver);
                let path = |uid: &str| {
                    let name = layout.pod(&PodUid::from(uid), QosClass::BestEffort).ok()?;
                    let path = layout.path(&name);
                    Some((path.rsplit('/').next().unwrap().to_owned(), path))
                };
                if let (Some(first), Some(second)) = (path(&uid), path(&other)) {
                    prop_assert_eq!(first == second, uid == other);
                    let found = layout.pod_of(&first.0).unwrap();
                    prop_assert_eq!(found.as_str(), uid.as_str());
                }
            }
        }

        #[test]
        fn no_name_leaves_its_parent(uid: String, root: String, directory: String) {
            for driver in [Driver::Cgroupfs, Driver::Systemd] {
                let Ok(layout) = Layout::new(&root, driver) else { continue };
                let _ = layout.pod_of(&directory);
                let Ok(name) = layout.pod(&PodUid::from(uid.as_str()), QosClass::Burstable) else { continue };
                prop_assert!(name.is_within(layout.pods()));
                for part in name.directories(driver) {
                    prop_assert!(!part.is_empty() && part != "." && part != ".." && !part.contains('/'));
                }
            }
        }
    }
}
