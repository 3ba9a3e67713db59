//! Block volumes whose record is damaged. Until it is known which volume such a one is, it may be each
//! that the node's object names, and none of these is detached. (The directory of a staged file system
//! has the hash of its handle.)

use std::collections::BTreeSet;

use super::super::kind::Form;
use super::names;

/// Block volumes with a damaged record (pure).
#[derive(Debug, Default)]
pub(super) struct DamagedBlocks {
    /// The names of their directories.
    dirs: BTreeSet<String>,
    /// The unique names of other volumes.
    others: BTreeSet<String>,
}

impl DamagedBlocks {
    /// These block volumes have a damaged record; `others` are the volumes whose records are readable.
    pub(super) fn add(&mut self, dirs: &[String], others: impl IntoIterator<Item = String>) {
        if dirs.iter().any(|dir| !self.dirs.contains(dir)) {
            self.dirs.extend(dirs.iter().cloned());
            self.others = others.into_iter().collect();
        }
    }

    /// A volume is known: `dir` is the name of its directory if it is a block volume.
    pub(super) fn set_known(&mut self, name: &str, dir: Option<&str>) {
        if self.dirs.is_empty() {
            return;
        }
        if dir.is_none_or(|dir| !self.dirs.remove(dir)) {
            self.others.insert(name.to_owned());
        }
    }

    /// Whether this is one of them.
    pub(super) fn has(&self, spec_name: &str, form: Form) -> bool {
        form == Form::Block && self.dirs.contains(spec_name)
    }

    /// Nothing is left of a block volume.
    pub(super) fn remove(&mut self, dir: &str) {
        self.dirs.remove(dir);
    }

    /// Whether one of them may be the volume of this unique name.
    pub(super) fn may_be(&self, name: &str) -> bool {
        !self.dirs.is_empty() && names::parts(name).is_some() && !self.others.contains(name)
    }

    pub(super) fn is_any(&self) -> bool {
        !self.dirs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_volume_may_be_each_that_is_not_known() {
        let name = |handle: &str| names::unique_name("d", handle);
        let mut damaged = DamagedBlocks::default();
        damaged.set_known(&name("a"), None);
        assert!(!damaged.may_be(&name("a")), "none is lost");
        damaged.add(&["pv".to_owned()], [name("b")]);
        assert!(damaged.may_be(&name("a")) && damaged.may_be(&name("c")));
        assert!(!damaged.may_be(&name("b")) && !damaged.may_be("kubernetes.io/iscsi/x"));
        damaged.set_known(&name("a"), Some("other"));
        assert!(!damaged.may_be(&name("a")));
        // What is known of the first one may not hold for another one.
        damaged.add(&["pv2".to_owned()], []);
        assert!(damaged.may_be(&name("a")));
        damaged.set_known(&name("c"), Some("pv"));
        assert!(damaged.is_any() && damaged.may_be(&name("a")));
        damaged.remove("pv2");
        assert!(!damaged.is_any() && !damaged.may_be(&name("a")));
    }
}
