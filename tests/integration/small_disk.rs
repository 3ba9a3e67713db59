//! A disk that a test can fill.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::fake_node::FakeNode;

/// A small file system as root directory. Dropping it unmounts it.
pub(crate) struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `None`: there is no private mount namespace.
    pub(crate) fn mount(node: &FakeNode) -> Option<SmallDisk> {
        if std::env::var_os("E2E_DIR").is_none() {
            eprintln!("skipped: no namespace of its own; run through tests/run integration");
            return None;
        }
        let root = node.root();
        fs::create_dir_all(&root).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=16m,mode=755", "tmpfs"]).arg(&root);
        assert!(mount.status().unwrap().success());
        Some(SmallDisk(root))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    /// Fills it to the last page.
    pub(crate) fn fill(&self) {
        let mut file = fs::File::create(self.filler()).unwrap();
        std::io::copy(&mut std::io::repeat(1), &mut file).expect_err("the disk is full");
    }

    pub(crate) fn clear(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        // The node could not remove its directory with the mount in it.
        let _ = self.0.parent().map(fs::remove_dir_all);
    }
}
