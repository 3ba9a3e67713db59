//! Which types of file systems are mounted from a block device. The type comes from a pod or a
//! persistent volume, and the API server does not check it. The kernel ignores the source of a file
//! system without a device: a volume of type `proc` would be the node's own.
//!
//! DIFFERS: the Go kubelet hands every type to `mount`.

use std::path::Path;

use super::super::mounts::{Mount, OWN_NUMBER};
use super::tools::has_mount_helper;

const MAX_NAME: usize = 32;

/// File systems that need no block device, and words that `mount` does not take for a type.
#[rustfmt::skip]
const REFUSED: [&str; 64] = [
    "9p", "afs", "anon_inodefs", "apparmorfs", "autofs", "bdev", "beegfs", "bind",
    "binder", "binfmt_misc", "bpf", "ceph", "cgroup", "cgroup2", "cifs", "coda",
    "configfs", "cpuset", "davfs", "debugfs", "devfs", "devpts", "devtmpfs", "dmabuf",
    "ecryptfs", "efivarfs", "functionfs", "fuse", "fuse3", "fuseblk", "fusectl", "gadgetfs",
    "glusterfs", "hugetlbfs", "ipathfs", "lustre", "mqueue", "ncpfs", "nsfs", "orangefs",
    "overlay", "overlayfs", "pidfs", "pipefs", "proc", "pstore", "pvfs2", "qibfs",
    "ramfs", "resctrl", "rootfs", "rpc_pipefs", "securityfs", "selinuxfs", "smackfs", "smb3",
    "smbfs", "sockfs", "swap", "sysfs", "tmpfs", "tracefs", "usbfs", "virtiofs",
];

/// Types whose program `mount.<type>` mounts a block device.
#[rustfmt::skip]
const WITH_HELPER: [&str; 13] = [
    "bcachefs", "btrfs", "erofs", "exfat", "f2fs", "gfs2", "nilfs2", "ntfs", "ntfs-3g", "ntfs3",
    "ocfs2", "vxfs", "zfs",
];

/// The reason not to mount a block device as this type. `root` is the node's root directory, with
/// its list of file systems and its mount programs.
pub(super) fn check(root: &Path, kind: &str) -> Result<(), String> {
    // A word that begins with a dash is an option of `mount`.
    let is_plain = (1..=MAX_NAME).contains(&kind.len())
        && !kind.starts_with('-')
        && kind.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
    if !is_plain {
        return Err(format!("fsType {} cannot be the type of a file system", quoted(kind)));
    }
    let refused = |reason: &str| Err(format!("fsType {kind:?} is refused: {reason}"));
    // `mount` reads `noext4` as "every type but ext4".
    if kind.starts_with("no") || is_refused(kind) {
        return refused("it is not a file system of a block device");
    }
    let list = std::fs::read_to_string(root.join("proc/filesystems")).unwrap_or_default();
    if !OWN_NUMBER.contains(&kind) && needs_no_device(&list, kind) {
        return refused("the kernel lists it as a file system without a device");
    }
    let helper = format!("mount.{kind}");
    if !WITH_HELPER.contains(&kind) && has_mount_helper(root, &helper) {
        return refused(&format!("the program {helper} is not known to mount block devices"));
    }
    Ok(())
}

/// A text from an object, as much of it as an event needs.
fn quoted(kind: &str) -> String {
    let short: String = kind.chars().take(2 * MAX_NAME).collect();
    format!("{short:?}")
}

fn is_refused(kind: &str) -> bool {
    let base = kind.split('.').next().unwrap_or_default().to_ascii_lowercase();
    REFUSED.contains(&base.as_str()) || base.starts_with("nfs")
}

/// Whether `/proc/filesystems` lists the type as one without a device.
fn needs_no_device(list: &str, kind: &str) -> bool {
    list.lines().filter_map(|line| line.split_once('\t')).any(|(mark, name)| mark == "nodev" && name == kind)
}

/// The reason why a mount is not that of the device. `number` is the device's `major:minor`; `None`
/// if the source is not a block device, such as an image in a file.
pub(super) fn check_mounted(mount: &Mount, number: Option<&str>) -> Result<(), String> {
    check_kind(mount)?;
    let is_same = match number {
        _ if OWN_NUMBER.contains(&mount.kind.as_str()) => true,
        Some(number) => mount.device == number,
        // A loop device.
        None => !mount.device.starts_with("0:"),
    };
    if is_same { Ok(()) } else { Err(foreign(mount)) }
}

/// The reason why a mount is not that of any device.
pub(super) fn check_kind(mount: &Mount) -> Result<(), String> {
    let is_device = mount.kind == "fuseblk" || !is_refused(&mount.kind);
    if is_device { Ok(()) } else { Err(foreign(mount)) }
}

fn foreign(mount: &Mount) -> String {
    format!(
        "what is mounted is not the file system of the device: {} of type {} ({})",
        mount.source, mount.kind, mount.device
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_types_of_block_devices_are_mounted() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc")).unwrap();
        std::fs::create_dir_all(root.path().join("sbin")).unwrap();
        let list = "nodev\tsysfs\n\text4\nnodev\tnewfs\nnodev\tzfs\n\txfs\n";
        std::fs::write(root.path().join("proc/filesystems"), list).unwrap();
        for helper in ["mount.ntfs", "mount.ntfs-3g", "mount.nilfs2", "mount.erofs", "mount.strange"] {
            std::fs::write(root.path().join("sbin").join(helper), "").unwrap();
        }
        let disks = ["ext2", "ext3", "ext4", "xfs", "btrfs", "vfat", "iso9660", "zfs", "squashfs"];
        for kind in disks.iter().chain(&WITH_HELPER) {
            assert_eq!(check(root.path(), kind), Ok(()), "{kind}");
        }
        for kind in REFUSED.iter().chain(&["nfs", "nfs4", "nfsd", "none", "noext4", "newfs", "strange"]) {
            let refusal = check(root.path(), kind).unwrap_err();
            assert!(refusal.starts_with(&format!("fsType {kind:?} is refused: ")), "{refusal}");
        }
        for kind in ["", "../x", "fuse.sh", "-h", "ext4,proc", "a b", "ext4\n", &"x".repeat(33), "proc/"] {
            assert!(check(root.path(), kind).unwrap_err().contains("cannot be the type"), "{kind:?}");
        }
        assert!(REFUSED.is_sorted());
    }

    #[test]
    fn mount_must_be_that_of_the_device() {
        let mount = |kind: &str, device: &str| Mount {
            point: "/t".into(),
            root: "/".into(),
            device: device.to_owned(),
            kind: kind.to_owned(),
            source: "/dev/sdx".to_owned(),
        };
        for (kind, device, number) in [
            ("ext4", "8:1", Some("8:1")),
            ("fuseblk", "8:1", Some("8:1")),
            ("btrfs", "0:44", Some("8:1")),
            ("ext4", "7:0", None),
        ] {
            assert_eq!(check_mounted(&mount(kind, device), number), Ok(()), "{kind}");
        }
        for (kind, device, number) in [
            ("proc", "0:4", Some("8:1")),
            ("proc", "8:1", Some("8:1")),
            ("ext4", "8:2", Some("8:1")),
            ("fuse.sh", "0:50", Some("8:1")),
            ("fuse.sh", "8:1", Some("8:1")),
            ("unknown", "0:50", None),
        ] {
            assert!(check_mounted(&mount(kind, device), number).is_err(), "{kind} {device}");
        }
    }

    proptest! {
        #[test]
        fn random_type_causes_no_panic(kind in "\\PC{0,80}") {
            let _ = check(Path::new("/nonexistent"), &kind);
        }
    }
}
