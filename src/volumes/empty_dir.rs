//! emptyDir: a directory on the root directory's disk, or a tmpfs or hugetlbfs of the
//! pod's own. The tmpfs of volumes that are made of files comes from here, too.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountFlags;

use super::error::VolumeError;
use super::files::TargetPod;
use super::ownership::{self, Access, Policy};
use super::paths;
use super::plugin::Plugin;
use crate::model::api::{Container, EmptyDirVolumeSource};
use crate::model::mount::MountedVolume;
use crate::model::pod::Pod;
use crate::model::quantity::{Amount, amount};
use crate::model::requests::{Overhead, pod_limits, requests_of};
use crate::util::disk_writes;
use crate::util::stop::StopToken;
use crate::util::tree;

/// `f_type` of a tmpfs.
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// `f_type` of a hugetlbfs.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
/// The mode of the directory, regardless of the umask.
const MODE: u32 = 0o777;

/// The medium of an emptyDir.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Medium {
    /// The root directory's disk.
    Disk,
    /// A tmpfs of at most this size.
    Memory { bytes: Option<u64> },
    /// A hugetlbfs with pages of this size.
    HugePages { page_bytes: u64 },
}

/// The directory of one volume: its path, and the marker that it is ready.
pub(super) struct VolumeDir<'a> {
    /// `pods/<uid>`.
    pub(super) pod_path: &'a Path,
    /// The opened directory `pod_path`.
    pub(super) pod_dir: BorrowedFd<'a>,
    /// Such as `kubernetes.io~empty-dir`.
    pub(super) plugin: &'a str,
    pub(super) volume: &'a str,
    /// The name of the marker's directory: the volume's, or `wrapped_` before it.
    pub(super) marker: String,
}

impl VolumeDir<'_> {
    /// The directory of the volume's content.
    pub(super) fn path(&self) -> PathBuf {
        self.pod_path.join("volumes").join(self.plugin).join(self.volume)
    }
}

impl Plugin for EmptyDirVolumeSource {
    fn name(&self) -> &'static str {
        "kubernetes.io/empty-dir"
    }

    fn describe(&self) -> Option<String> {
        self.medium.clone()
    }

    fn set_up(
        &self,
        target: &TargetPod<'_>,
        volume: &str,
        allocatable_memory: Amount,
    ) -> Option<Result<MountedVolume, VolumeError>> {
        Some(set_up(target, volume, self, allocatable_memory))
    }
}

/// Makes the volume unless it exists.
fn set_up(
    target: &TargetPod<'_>,
    volume: &str,
    source: &EmptyDirVolumeSource,
    allocatable_memory: Amount,
) -> Result<MountedVolume, VolumeError> {
    let TargetPod { pod, path: pod_path, dir: pod_dir, stop, .. } = *target;
    let medium = match source.medium.as_deref().unwrap_or_default() {
        "" => Medium::Disk,
        "Memory" => Medium::Memory { bytes: memory_size(pod, source, allocatable_memory) },
        huge if huge == "HugePages" || huge.starts_with("HugePages-") => {
            Medium::HugePages { page_bytes: page_size(pod, huge)? }
        }
        other => return Err(VolumeError::Medium { medium: other.to_owned() }),
    };
    let place = VolumeDir { pod_path, pod_dir, plugin: paths::EMPTY_DIR, volume, marker: volume.to_owned() };
    make(&place, medium, fs_group(pod), stop)?;
    Ok(MountedVolume {
        volume: volume.to_owned(),
        host_path: place.path(),
        read_only: false,
        selinux_relabel: true,
    })
}

/// Makes the directory on its medium unless it exists, and opens it.
pub(super) fn make(
    place: &VolumeDir<'_>,
    medium: Medium,
    fs_group: Option<u32>,
    stop: &StopToken,
) -> Result<OwnedFd, VolumeError> {
    paths::element(place.volume)?;
    let path = place.path();
    let failed = |attempt| VolumeError::io(attempt, &path);
    let name = paths::c_name(place.volume)?;
    let marker = paths::c_name(&place.marker)?;
    let plugin =
        plugin_dir(place.pod_dir, c"volumes", place.plugin).map_err(failed("make directory above"))?;
    let (mut dir, fresh) = tree::make_at(plugin.as_fd(), &name, MODE).map_err(failed("make directory"))?;
    let mounted = medium.is_mounted(plugin.as_fd(), dir.as_fd()).map_err(failed("look at"))?;
    let markers = plugin_dir(place.pod_dir, c"plugins", paths::EMPTY_DIR)
        .map_err(failed("make marker directory of"))?;
    let marked = !fresh && is_marked(markers.as_fd(), &place.marker);
    if marked && (medium == Medium::Disk || mounted) {
        return Ok(dir);
    }
    if !mounted {
        fs::fchmod(&dir, Mode::from_raw_mode(MODE)).map_err(failed("set the mode of"))?;
    }
    if medium != Medium::Disk && !mounted {
        match medium {
            Medium::HugePages { page_bytes } => mount_hugetlbfs(dir.as_fd(), page_bytes),
            Medium::Memory { bytes } => mount_tmpfs(dir.as_fd(), bytes),
            Medium::Disk => Ok(()),
        }
        .map_err(failed("mount memory at"))?;
        // The old descriptor still refers to the directory below the mount.
        dir = tree::open_at(plugin.as_fd(), &name).map_err(failed("open"))?;
    }
    if let Some(gid) = fs_group {
        // The new volume is nearly empty, so it needs no policy and no progress reports.
        let stops = std::slice::from_ref(stop);
        ownership::change_group(dir.as_fd(), gid, (Access::Write, Policy::Always), stops, &mut |_| {})
            .map_err(|broken| broken.into_error(&path))?;
    }
    mark(markers.as_fd(), &marker).map_err(failed("mark as ready"))?;
    Ok(dir)
}

/// `<above>/<plugin>` in the pod's directory.
fn plugin_dir(pod_dir: BorrowedFd<'_>, above: &std::ffi::CStr, plugin: &str) -> rustix::io::Result<OwnedFd> {
    let (above, _) = tree::make_at(pod_dir, above, 0o750)?;
    let name = CString::new(plugin).map_err(|_| Errno::INVAL)?;
    Ok(tree::make_at(above.as_fd(), &name, 0o750)?.0)
}

fn is_marked(markers: BorrowedFd<'_>, marker: &str) -> bool {
    fs::statat(markers, format!("{marker}/ready"), AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

fn mark(markers: BorrowedFd<'_>, name: &std::ffi::CStr) -> rustix::io::Result<()> {
    let (dir, _) = tree::make_at(markers, name, 0o750)?;
    // Whatever is there marks it: a pipe must not block, and a link not prevent the start of the pod.
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    match disk_writes::created(fs::openat(&dir, c"ready", flags, Mode::from_raw_mode(0o640))) {
        Err(Errno::EXIST) => Ok(()),
        made => made.map(drop),
    }
}

impl Medium {
    /// Whether a file system of this kind is mounted at `dir`. Its device must differ from that of
    /// `parent`, because the root directory may itself be on a tmpfs.
    fn is_mounted(self, parent: BorrowedFd<'_>, dir: BorrowedFd<'_>) -> rustix::io::Result<bool> {
        let wanted = match self {
            Medium::Disk => return Ok(false),
            Medium::Memory { .. } => TMPFS_MAGIC,
            Medium::HugePages { .. } => HUGETLBFS_MAGIC,
        };
        let own = fs::fstat(parent)?.st_dev != fs::fstat(dir)?.st_dev;
        Ok(own && u64::try_from(fs::fstatfs(dir)?.f_type).is_ok_and(|magic| magic == wanted))
    }
}

/// Mounts at the path of a descriptor, so that no directory of the path can be replaced meanwhile.
fn mount_at(dir: BorrowedFd<'_>, kind: &std::ffi::CStr, options: &str) -> rustix::io::Result<()> {
    let target = format!("/proc/self/fd/{}", dir.as_raw_fd());
    let options = CString::new(options).map_err(|_| Errno::INVAL)?;
    rustix::mount::mount(kind, target.as_str(), kind, MountFlags::empty(), options.as_c_str())
}

fn mount_hugetlbfs(dir: BorrowedFd<'_>, page_bytes: u64) -> rustix::io::Result<()> {
    mount_at(dir, c"hugetlbfs", &format!("pagesize={page_bytes}"))
}

fn mount_tmpfs(dir: BorrowedFd<'_>, size: Option<u64>) -> rustix::io::Result<()> {
    let size = size.map_or_else(String::new, |bytes| format!("size={bytes}"));
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    if has_noswap(&release) {
        let options = if size.is_empty() { "noswap".to_owned() } else { format!("noswap,{size}") };
        match mount_at(dir, c"tmpfs", &options) {
            // The kernel refuses the option: mounted without it.
            Err(Errno::INVAL | Errno::PERM) => {}
            result => return result,
        }
    }
    mount_at(dir, c"tmpfs", &size)
}

/// tmpfs has known `noswap` since Linux 6.4.
fn has_noswap(release: &str) -> bool {
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 4)
}

/// The smallest of the node's allocatable memory, the pod's memory limit and the volume's own
/// limit, as far as they are set. Containers without a limit count as zero, as upstream.
pub(super) fn memory_size(pod: &Pod, source: &EmptyDirVolumeSource, allocatable: Amount) -> Option<u64> {
    let own = source.size_limit.as_ref().map(amount);
    let of_pod = pod_limits(pod, Overhead::Included).get("memory").copied();
    let limits = [own, of_pod, Some(allocatable)].into_iter().flatten();
    limits.filter_map(|bytes| u64::try_from(bytes.units()).ok()).filter(|bytes| *bytes > 0).min()
}

/// The size of the pages that `HugePages` or `HugePages-<size>` means in this pod: one that a
/// container requests.
fn page_size(pod: &Pod, medium: &str) -> Result<u64, VolumeError> {
    let refuse = |reason: &str| VolumeError::HugePages { reason: reason.replace('@', medium) };
    let named = match medium.split_once('-') {
        None => None,
        Some((_, size)) => Some(Amount::parse(size).map_err(|error| refuse(&error.to_string()))?),
    };
    let whole = Container { resources: pod.spec().resources.clone(), ..Container::default() };
    let mut found: Option<Amount> = None;
    for container in pod.containers().iter().chain(pod.init_containers()).chain([&whole]) {
        for resource in requests_of(container.resources.as_ref()).keys() {
            let Some(size) = resource.strip_prefix("hugepages-") else { continue };
            let size = Amount::parse(size).map_err(|error| refuse(&error.to_string()))?;
            match (named, found) {
                (Some(named), _) if named != size => {}
                (None, Some(other)) if other != size => {
                    return Err(refuse(
                        "medium: @ can't be used if container requests multiple huge page sizes",
                    ));
                }
                _ => found = Some(size),
            }
        }
    }
    found.and_then(|size| u64::try_from(size.units()).ok()).filter(|bytes| *bytes > 0).ok_or_else(|| {
        refuse("medium @: hugePages storage requested, but there is no resource request for huge pages")
    })
}

pub(super) fn fs_group(pod: &Pod) -> Option<u32> {
    let gid = pod.spec().security_context.as_ref()?.fs_group?;
    u32::try_from(gid).ok()
}

/// A name from a directory listing, for messages.
pub(super) fn name_text(name: &std::ffi::CStr) -> String {
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
    fn noswap_is_used_from_linux_6_4() {
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
        let check = |spec, volume, allocatable: Option<i64>, expected| {
            let allocatable = Amount::from_units(allocatable.unwrap_or(0));
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
    fn ready_directory_keeps_its_mode() {
        let root = tempfile::tempdir().unwrap();
        let pod_dir = tree::open(root.path()).unwrap();
        let set_up = |spec| {
            let pod = pod(spec);
            let stop = StopToken::never();
            let target = TargetPod::new(&pod, root.path(), pod_dir.as_fd(), &stop);
            super::set_up(&target, "e", &source(json!({})), Amount::ZERO).unwrap()
        };
        let volume = set_up(json!({"containers": []}));
        assert_eq!(volume.host_path, root.path().join("volumes/kubernetes.io~empty-dir/e"));
        let mode = || std::fs::metadata(&volume.host_path).unwrap().mode() & 0o7777;
        assert_eq!(mode(), 0o777);
        assert!(root.path().join("plugins/kubernetes.io~empty-dir/e/ready").exists());
        // The mode of a ready volume is not changed: a container may have set it.
        std::fs::set_permissions(&volume.host_path, std::os::unix::fs::PermissionsExt::from_mode(0o711))
            .unwrap();
        set_up(json!({"containers": []}));
        assert_eq!(mode(), 0o711);
        // A marker without its directory is ignored.
        std::fs::remove_dir(&volume.host_path).unwrap();
        let gid = std::fs::metadata(root.path()).unwrap().gid();
        set_up(json!({"containers": [], "securityContext": {"fsGroup": gid}}));
        assert_eq!(mode(), 0o2777);
    }

    #[test]
    fn damaged_mark_is_a_mark_and_does_not_block() {
        crate::util::testing::unblocked(|| {
            let root = tempfile::tempdir().unwrap();
            let markers = tree::open(root.path()).unwrap();
            for (number, damage) in ["none", "pipe", "link", "directory"].into_iter().enumerate() {
                let name = format!("v{number}");
                let path = root.path().join(&name).join("ready");
                std::fs::create_dir(root.path().join(&name)).unwrap();
                match damage {
                    "pipe" => crate::util::testing::fifo(&path),
                    "link" => std::os::unix::fs::symlink("/nonexistent/file", &path).unwrap(),
                    "directory" => std::fs::create_dir(&path).unwrap(),
                    _ => {}
                }
                mark(markers.as_fd(), &CString::new(name.as_str()).unwrap()).unwrap();
                assert!(is_marked(markers.as_fd(), &name), "{damage}");
            }
        });
    }

    #[test]
    fn huge_page_size_follows_from_resource_requests() {
        let huge = |sizes: &[&str]| {
            let requests: serde_json::Map<_, _> =
                sizes.iter().map(|size| (format!("hugepages-{size}"), json!("4Mi"))).collect();
            json!({"name": "c", "resources": {"requests": requests}})
        };
        let check = |spec, medium: &str, expected: Result<u64, &str>| {
            let found = page_size(&pod(spec), medium).map_err(|error| error.to_string());
            assert_eq!(found.as_ref().map_err(String::as_str), expected.as_ref().map_err(|text| *text));
        };
        let none = "medium @: hugePages storage requested, but there is no resource request for huge pages";
        check(json!({"containers": [huge(&["2Mi"])]}), "HugePages", Ok(2 << 20));
        check(json!({"containers": [huge(&["2Mi", "1Gi"])]}), "HugePages-1Gi", Ok(1 << 30));
        check(json!({"containers": [huge(&["2Mi"]), huge(&["2048Ki"])]}), "HugePages", Ok(2 << 20));
        check(
            json!({"initContainers": [huge(&["1Gi"])], "containers": [huge(&[])]}),
            "HugePages",
            Ok(1 << 30),
        );
        check(
            json!({"containers": [huge(&["2Mi"])], "initContainers": [huge(&["1Gi"])]}),
            "HugePages",
            Err("medium: HugePages can't be used if container requests multiple huge page sizes"),
        );
        check(json!({"containers": [huge(&[])]}), "HugePages", Err(&none.replace('@', "HugePages")));
        check(
            json!({"containers": [huge(&["2Mi"])]}),
            "HugePages-1Gi",
            Err(&none.replace('@', "HugePages-1Gi")),
        );
        assert!(page_size(&pod(json!({"containers": []})), "HugePages-x").is_err());
    }

    #[test]
    fn unknown_medium_and_invalid_name_make_no_directory() {
        let root = tempfile::tempdir().unwrap();
        let pod_dir = tree::open(root.path()).unwrap();
        let pod = pod(json!({"containers": []}));
        let set_up = |volume: &str, value| {
            let stop = StopToken::never();
            let target = TargetPod::new(&pod, root.path(), pod_dir.as_fd(), &stop);
            super::set_up(&target, volume, &source(value), Amount::ZERO).unwrap_err().to_string()
        };
        assert_eq!(set_up("e", json!({"medium": "Tape"})), "unknown storage medium \"Tape\"");
        assert_eq!(set_up("../e", json!({})), "\"../e\" cannot be the name of a directory");
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
