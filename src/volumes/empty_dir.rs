//! emptyDir: a directory on the root directory's disk, or a tmpfs of bounded size.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{self, AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountFlags;

use super::{VolumeError, paths, tree};
use crate::model::api::{Container, EmptyDirVolumeSource};
use crate::model::mount::MountedVolume;
use crate::model::pod::{Pod, is_sidecar, limit};
use crate::model::quantity::amount;

/// `f_type` of a tmpfs.
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// The mode of the directory, whatever the umask.
const MODE: u32 = 0o777;

/// What an emptyDir's bytes lie on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Medium {
    Disk,
    Memory,
}

/// Makes the volume, or finds it made. `pod_dir` is `pods/<uid>`, opened.
pub(super) fn set_up(
    pod: &Pod,
    volume: &str,
    source: &EmptyDirVolumeSource,
    (pod_path, pod_dir): (&Path, BorrowedFd<'_>),
    allocatable_memory_bytes: Option<u64>,
) -> Result<MountedVolume, VolumeError> {
    let medium = match source.medium.as_deref().unwrap_or_default() {
        "" => Medium::Disk,
        "Memory" => Medium::Memory,
        other => return Err(VolumeError::Unsupported { kind: format!("emptyDir with medium {other}") }),
    };
    paths::element(volume)?;
    let path = pod_path.join("volumes").join(paths::EMPTY_DIR).join(volume);
    let make = |attempt| VolumeError::io(attempt, &path);
    let name = CString::new(volume).map_err(|_| VolumeError::Name { name: volume.to_owned() })?;
    let plugin = plugin_dir(pod_dir, c"volumes").map_err(make("make directory above"))?;
    let (mut dir, fresh) = tree::make_at(plugin.as_fd(), &name, MODE).map_err(make("make directory"))?;
    let mounted = is_tmpfs_mount(plugin.as_fd(), dir.as_fd()).map_err(make("look at"))?;
    let markers = plugin_dir(pod_dir, c"plugins").map_err(make("make marker directory of"))?;
    let marked = !fresh && is_marked(markers.as_fd(), volume);
    if !(marked && (medium == Medium::Disk || mounted)) {
        if !mounted {
            fs::fchmod(&dir, Mode::from_raw_mode(MODE)).map_err(make("set the mode of"))?;
        }
        if medium == Medium::Memory && !mounted {
            let size = memory_size(pod, source, allocatable_memory_bytes);
            mount_tmpfs(dir.as_fd(), size).map_err(make("mount tmpfs at"))?;
            // The descriptor of before still shows what is now covered.
            dir = tree::open_at(plugin.as_fd(), &name).map_err(make("open"))?;
        }
        if let Some(gid) = fs_group(pod) {
            tree::give_to_group(dir.as_fd(), gid).map_err(make("set the group of"))?;
        }
        mark(markers.as_fd(), &name).map_err(make("mark as ready"))?;
    }
    Ok(MountedVolume { volume: volume.to_owned(), host_path: path, read_only: false, selinux_relabel: true })
}

/// `<above>/kubernetes.io~empty-dir` in the pod's directory.
fn plugin_dir(pod_dir: BorrowedFd<'_>, above: &std::ffi::CStr) -> rustix::io::Result<OwnedFd> {
    let (above, _) = tree::make_at(pod_dir, above, 0o750)?;
    // The constant has no NUL; an empty name would fail below.
    let name = CString::new(paths::EMPTY_DIR).unwrap_or_default();
    Ok(tree::make_at(above.as_fd(), &name, 0o750)?.0)
}

fn is_marked(markers: BorrowedFd<'_>, volume: &str) -> bool {
    fs::statat(markers, format!("{volume}/ready"), AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

fn mark(markers: BorrowedFd<'_>, name: &std::ffi::CStr) -> rustix::io::Result<()> {
    let (dir, _) = tree::make_at(markers, name, 0o750)?;
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    fs::openat(&dir, c"ready", flags, Mode::from_raw_mode(0o640)).map(drop)
}

/// A tmpfs of its own: the root directory may itself lie on one.
fn is_tmpfs_mount(parent: BorrowedFd<'_>, dir: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    let own = fs::fstat(parent)?.st_dev != fs::fstat(dir)?.st_dev;
    Ok(own && u64::try_from(fs::fstatfs(dir)?.f_type).is_ok_and(|magic| magic == TMPFS_MAGIC))
}

fn mount_tmpfs(dir: BorrowedFd<'_>, size: Option<u64>) -> rustix::io::Result<()> {
    // By descriptor, so that nothing can be slipped in between on the way.
    let target = format!("/proc/self/fd/{}", dir.as_raw_fd());
    let size = size.map_or_else(String::new, |bytes| format!("size={bytes}"));
    let mount = |options: &str| {
        let options = CString::new(options).map_err(|_| Errno::INVAL)?;
        rustix::mount::mount(c"tmpfs", target.as_str(), c"tmpfs", MountFlags::empty(), options.as_c_str())
    };
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    if has_noswap(&release) {
        let options = if size.is_empty() { "noswap".to_owned() } else { format!("noswap,{size}") };
        match mount(&options) {
            // Refused by this kernel after all: without the option then.
            Err(Errno::INVAL | Errno::PERM) => {}
            result => return result,
        }
    }
    mount(&size)
}

/// tmpfs has known `noswap` since Linux 6.4.
fn has_noswap(release: &str) -> bool {
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 4)
}

/// The smallest of the node's allocatable memory, the pod's memory limit and the volume's
/// own limit, as far as they are set.
fn memory_size(pod: &Pod, source: &EmptyDirVolumeSource, allocatable: Option<u64>) -> Option<u64> {
    let own = source.size_limit.as_ref().map(|quantity| amount(quantity).units());
    let limits = [pod_memory_limit(pod), own];
    let limits = limits.into_iter().flatten().filter_map(|bytes| u64::try_from(bytes).ok());
    limits.chain(allocatable).filter(|bytes| *bytes > 0).min()
}

/// The pod's memory limit: its own, else what its containers' limits add up to at the
/// worst moment. Containers without a limit count as nothing, as upstream has it.
fn pod_memory_limit(pod: &Pod) -> Option<i64> {
    let spec = pod.spec();
    let pod_level = Container { resources: spec.resources.clone(), ..Container::default() };
    if let Some(bytes) = limit(&pod_level, "memory") {
        return Some(bytes.units());
    }
    let of = |container: &Container| limit(container, "memory").map_or(0, |bytes| bytes.units().max(0));
    let mut sidecars = 0_i64;
    let mut worst_init = 0_i64;
    for init in pod.init_containers() {
        if is_sidecar(init) {
            sidecars = sidecars.saturating_add(of(init));
            worst_init = worst_init.max(sidecars);
        } else {
            worst_init = worst_init.max(sidecars.saturating_add(of(init)));
        }
    }
    let regular = pod.containers().iter().fold(sidecars, |sum, next| sum.saturating_add(of(next)));
    let total = regular.max(worst_init);
    let overhead = spec.overhead.as_ref().and_then(|overhead| overhead.get("memory"));
    let overhead = overhead.map_or(0, |quantity| amount(quantity).units());
    (total > 0).then(|| total.saturating_add(overhead))
}

fn fs_group(pod: &Pod) -> Option<u32> {
    let gid = pod.spec().security_context.as_ref()?.fs_group?;
    u32::try_from(gid).ok()
}

/// For messages: a name from a directory listing.
pub(super) fn shown(name: &std::ffi::CStr) -> String {
    OsStr::from_bytes(name.to_bytes()).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::os::unix::fs::MetadataExt;

    fn pod(spec: serde_json::Value) -> Pod {
        let value = json!({"metadata": {"name": "p", "uid": "u"}, "spec": spec});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
    }

    fn source(value: serde_json::Value) -> EmptyDirVolumeSource {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn kernel_versions() {
        for (release, expected) in [
            ("6.18.44-x", true),
            ("6.4.0", true),
            ("6.3.9", false),
            ("5.10.0-28-amd64", false),
            ("7.0", true),
            ("", false),
            ("x", false),
        ] {
            assert_eq!(has_noswap(release), expected, "{release}");
        }
    }

    #[test]
    fn the_smallest_limit_bounds_a_memory_volume() {
        let limited = |bytes: &str| json!({"name": "c", "resources": {"limits": {"memory": bytes}}});
        let check = |spec, volume, allocatable, expected| {
            assert_eq!(memory_size(&pod(spec), &source(volume), allocatable), expected);
        };
        check(json!({"containers": [{"name": "c"}]}), json!({}), None, None);
        check(json!({"containers": [{"name": "c"}]}), json!({}), Some(500), Some(500));
        check(json!({"containers": [limited("100")]}), json!({}), Some(500), Some(100));
        check(json!({"containers": [limited("100"), limited("7")]}), json!({}), None, Some(107));
        check(json!({"containers": [limited("100")]}), json!({"sizeLimit": "64"}), Some(500), Some(64));
        check(json!({"containers": [limited("100")]}), json!({"sizeLimit": "0"}), Some(500), Some(100));
        check(json!({"containers": [], "resources": {"limits": {"memory": "9"}}}), json!({}), None, Some(9));
        let mut sidecar = limited("30");
        sidecar["restartPolicy"] = json!("Always");
        check(
            json!({"initContainers": [sidecar.clone(), limited("200")], "containers": [limited("100")]}),
            json!({}),
            None,
            Some(230),
        );
        check(
            json!({"initContainers": [sidecar], "containers": [limited("100")], "overhead": {"memory": "1"}}),
            json!({}),
            None,
            Some(131),
        );
    }

    #[test]
    fn makes_a_directory_once() {
        let root = tempfile::tempdir().unwrap();
        let pod_dir = tree::open(root.path()).unwrap();
        let set_up = |spec| {
            let pod = pod(spec);
            super::set_up(&pod, "e", &source(json!({})), (root.path(), pod_dir.as_fd()), None).unwrap()
        };
        let volume = set_up(json!({"containers": []}));
        assert_eq!(volume.host_path, root.path().join("volumes/kubernetes.io~empty-dir/e"));
        let mode = || std::fs::metadata(&volume.host_path).unwrap().mode() & 0o7777;
        assert_eq!(mode(), 0o777);
        assert!(root.path().join("plugins/kubernetes.io~empty-dir/e/ready").exists());
        // Once ready it is the pod's: a mode that a container set stays.
        std::fs::set_permissions(&volume.host_path, std::os::unix::fs::PermissionsExt::from_mode(0o711))
            .unwrap();
        set_up(json!({"containers": []}));
        assert_eq!(mode(), 0o711);
        // A marker without its directory means nothing.
        std::fs::remove_dir(&volume.host_path).unwrap();
        let gid = std::fs::metadata(root.path()).unwrap().gid();
        set_up(json!({"containers": [], "securityContext": {"fsGroup": gid}}));
        assert_eq!(mode(), 0o2777);
    }

    #[test]
    fn refuses_what_it_cannot_do() {
        let root = tempfile::tempdir().unwrap();
        let pod_dir = tree::open(root.path()).unwrap();
        let pod = pod(json!({"containers": []}));
        let set_up = |volume: &str, value| {
            super::set_up(&pod, volume, &source(value), (root.path(), pod_dir.as_fd()), None)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            set_up("e", json!({"medium": "HugePages-2Mi"})),
            "volumes of type emptyDir with medium HugePages-2Mi are not supported by this version of coracle"
        );
        assert_eq!(set_up("../e", json!({})), "\"../e\" cannot be the name of a directory");
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
