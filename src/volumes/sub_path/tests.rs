use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::util::threads::{self, OnDeath, Stack};

fn root(path: &Path) -> OwnedFd {
    fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

/// The path on the node at which a walk ends.
fn walked(volume: &Path, sub_path: &str) -> Result<PathBuf, (SubPathFailure, Errno)> {
    let object = walk(root(volume), Path::new(sub_path)).map_err(|failed| (failed.kind, failed.errno))?;
    let place = std::fs::read_link(format!("/proc/self/fd/{}", object.as_raw_fd())).unwrap();
    Ok(place)
}

fn volume() -> (tempfile::TempDir, PathBuf) {
    let top = tempfile::tempdir().unwrap();
    let volume = std::fs::canonicalize(top.path()).unwrap().join("v");
    std::fs::create_dir(&volume).unwrap();
    std::fs::create_dir(volume.with_file_name("outside")).unwrap();
    std::fs::write(volume.with_file_name("outside").join("secret"), "x").unwrap();
    (top, volume)
}

/// The server of the volume did not respond before the pod was removed.
#[test]
fn sub_path_of_a_pod_that_is_removed_is_not_made() {
    let root = tempfile::tempdir().unwrap();
    let (volume, pods) = (root.path().join("volume"), root.path().join("pods"));
    std::fs::create_dir_all(volume.join("dir")).unwrap();
    std::fs::create_dir_all(pods.join("u")).unwrap();
    let name = |name: &str| CString::new(name).unwrap();
    let target = Target {
        pod_dir: pods.join("u"),
        pod: name("u"),
        above: [name(paths::SUB_PATHS), name("v"), name("c")],
        name: name("0"),
    };
    let operations = Operations::default();
    let uid = PodUid::from("u");
    let operation =
        SubPathOperation { operations: operations.clone(), pod: uid.clone(), volume: "v".to_owned() };
    let (report, begun) = crossbeam_channel::bounded(1);
    let (server, hold) = crossbeam_channel::bounded::<()>(0);
    let work = move |_: &StopToken| {
        operation.leave_pod_dir();
        report.send(()).unwrap();
        let _ = hold.recv();
        Ok(bind(&volume, Path::new("dir"), &target, &operation).map_err(|failed| failed.errno))
    };
    let (ended, result) = crossbeam_channel::bounded(1);
    let to = move |result| ended.send(result).unwrap();
    let key = (&uid, "v", &OperationScope::default());
    let operation = operations.start(key, to, work).unwrap();
    begun.recv().unwrap();
    operations.prepare_removal(&uid, &StopToken::never()).unwrap();
    drop(server);
    assert!(matches!(result.recv().unwrap(), Ok(Err(Errno::CANCELED))));
    operation.finish();
    assert_eq!(std::fs::read_dir(pods.join("u")).unwrap().count(), 0);
}

#[test]
fn links_that_leave_the_volume_are_refused() {
    let (_top, volume) = volume();
    std::fs::create_dir_all(volume.join("a/b")).unwrap();
    std::fs::write(volume.join("a/file"), "x").unwrap();
    for (target, link) in [
        ("a", "in"),
        ("../a/file", "a/up"),
        ("..", "out"),
        ("../outside", "out2"),
        ("a/../../outside/secret", "out3"),
        ("/etc", "etc"),
        ("loop", "loop"),
        ("none", "dangling"),
        ("../../v/a", "a/round"),
    ] {
        symlink(target, volume.join(link)).unwrap();
    }
    symlink(volume.join("a"), volume.join("absolute")).unwrap();
    symlink(format!("{}-other", volume.display()), volume.join("beside")).unwrap();
    let prepare = |errno| Err((SubPathFailure::Prepare, errno));
    for (sub_path, expected) in [
        ("a/b", Ok("a/b")),
        ("./a//b/.", Ok("a/b")),
        ("a/file", Ok("a/file")),
        ("in/b", Ok("a/b")),
        ("in/../a", Ok("a")),
        ("a/up", Ok("a/file")),
        ("absolute/b", Ok("a/b")),
        ("a/file/x", prepare(Errno::NOTDIR)),
        ("out", prepare(Errno::XDEV)),
        ("out/v/a", prepare(Errno::XDEV)),
        ("out2/secret", prepare(Errno::XDEV)),
        ("out3", prepare(Errno::XDEV)),
        ("etc", prepare(Errno::XDEV)),
        ("etc/passwd", prepare(Errno::XDEV)),
        ("beside", prepare(Errno::XDEV)),
        ("a/round", prepare(Errno::XDEV)),
        ("loop", prepare(Errno::LOOP)),
        ("dangling", prepare(Errno::NOENT)),
        ("..", prepare(Errno::XDEV)),
        ("/etc", prepare(Errno::XDEV)),
    ] {
        assert_eq!(walked(&volume, sub_path), expected.map(|path| volume.join(path)), "{sub_path}");
    }
    assert!(!volume.join("none").exists());
    let of_a_file = walked(&volume.join("a/file"), "x");
    assert_eq!(of_a_file, Err((SubPathFailure::Prepare, Errno::NOTDIR)));
}

#[test]
fn missing_directories_get_mode_of_volume_root() {
    let (_top, volume) = volume();
    std::fs::create_dir(volume.join("real")).unwrap();
    symlink("real", volume.join("in")).unwrap();
    std::fs::set_permissions(&volume, PermissionsExt::from_mode(0o2777)).unwrap();
    assert_eq!(walked(&volume, "x/y"), Ok(volume.join("x/y")));
    for made in ["x", "x/y"] {
        assert_eq!(std::fs::metadata(volume.join(made)).unwrap().mode() & 0o7777, 0o2777, "{made}");
    }
    assert_eq!(walked(&volume, "in/z"), Ok(volume.join("real/z")));
    std::fs::write(volume.join("file"), "").unwrap();
    assert_eq!(walked(&volume, "file/z"), Err((SubPathFailure::Prepare, Errno::NOTDIR)));
    let long = "n".repeat(256);
    assert_eq!(walked(&volume, &long), Err((SubPathFailure::Prepare, Errno::NAMETOOLONG)));
}

#[test]
fn sub_path_that_is_too_deep_is_refused() {
    let (_top, volume) = volume();
    let deep = "d/".repeat(MAX_DEPTH - 1);
    assert_eq!(walked(&volume, &deep), Ok(volume.join(deep.trim_end_matches('/'))));
    let deeper = "d/".repeat(MAX_DEPTH);
    assert_eq!(walked(&volume, &deeper), Err((SubPathFailure::Prepare, Errno::NAMETOOLONG)));
}

/// Another thread replaces a directory with a link to the outside, as fast as possible.
#[test]
fn renames_during_walk_lead_to_no_outside_file() {
    let (_top, volume) = volume();
    std::fs::create_dir_all(volume.join("a/secret")).unwrap();
    std::fs::create_dir_all(volume.join("other/secret")).unwrap();
    symlink("../outside", volume.join("link")).unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let (swapper_done, place) = (Arc::clone(&done), volume.clone());
    let swapper = threads::spawn("t/swapper", Stack::Small, OnDeath::Unsupervised, move |_| {
        let below = |name: &str| place.join(name);
        while !swapper_done.load(Ordering::Relaxed) {
            let exchange = |other: &str| {
                let flags = fs::RenameFlags::EXCHANGE;
                fs::renameat_with(fs::CWD, below("a"), fs::CWD, below(other), flags)
            };
            let _ = exchange("link");
            let _ = exchange("link");
            let _ = exchange("other");
        }
    })
    .unwrap();
    let (mut inside, mut refused) = (0, 0);
    let begun = Instant::now();
    let mut round = 0;
    // Until a walk has succeeded once: on a busy machine the thread may be delayed.
    while round < 3000 || inside == 0 && begun.elapsed() < Duration::from_secs(20) {
        round += 1;
        if round % 100 == 0 {
            let _ = StopToken::never().wait(Duration::from_millis(1));
        }
        match walk(root(&volume), Path::new("a/secret")) {
            Ok(object) => {
                // The outside has a file of that name, the volume directories only.
                let stat = fs::fstat(&object).unwrap();
                assert_eq!(FileType::from_raw_mode(stat.st_mode), FileType::Directory);
                inside += 1;
            }
            Err(_) => refused += 1,
        }
    }
    done.store(true, Ordering::Relaxed);
    swapper.stop(Duration::from_secs(5));
    assert!(inside > 0, "{inside} inside, {refused} refused");
}

#[test]
fn targets_are_removed_only_if_empty() {
    let top = tempfile::tempdir().unwrap();
    let targets = top.path().join("volume-subpaths/v/c");
    std::fs::create_dir_all(targets.join("0")).unwrap();
    std::fs::write(targets.join("1"), "").unwrap();
    let dir = tree::open(top.path()).unwrap();
    // Seen through a mount that was not found: data.
    std::fs::write(targets.join("2"), "precious").unwrap();
    assert!(remove_targets(dir.as_fd()).is_err());
    std::fs::remove_file(targets.join("2")).unwrap();
    std::fs::create_dir_all(targets.join("0/precious")).unwrap();
    assert!(remove_targets(dir.as_fd()).is_err());
    assert!(targets.join("0/precious").exists());
    std::fs::remove_dir(targets.join("0/precious")).unwrap();
    remove_targets(dir.as_fd()).unwrap();
    assert!(!top.path().join("volume-subpaths").exists());
    remove_targets(dir.as_fd()).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// With any links the walk ends inside, at the same place as the kernel's own resolution that
    /// may not leave the volume, or not at all.
    #[test]
    fn walk_ends_where_kernel_resolution_ends(
        links in proptest::collection::vec(("[a-c](/[a-c])?", "(\\.\\./){0,3}[a-d](/(\\.\\.|[a-d])){0,2}"), 0..6),
        sub_path in "[a-d](/[a-d]){0,3}",
    ) {
        let (_top, volume) = volume();
        for dir in ["a", "b", "c", "a/b", "b/c"] {
            std::fs::create_dir_all(volume.join(dir)).unwrap();
        }
        for (link, target) in links {
            let _ = std::fs::remove_dir(volume.join(&link));
            let _ = symlink(target, volume.join(&link));
        }
        let fd = root(&volume);
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let resolve = fs::ResolveFlags::BENEATH | fs::ResolveFlags::NO_MAGICLINKS;
        let before = fs::openat2(&fd, &sub_path, flags, Mode::empty(), resolve);
        let found = walk(root(&volume), Path::new(&sub_path));
        match (before, found) {
            (Err(Errno::NOSYS | Errno::AGAIN), _) => {}
            (Ok(expected), Ok(found)) => {
                let (expected, found) = (fs::fstat(expected).unwrap(), fs::fstat(found).unwrap());
                prop_assert_eq!((expected.st_dev, expected.st_ino), (found.st_dev, found.st_ino));
            }
            (Ok(_), Err(failed)) => prop_assert!(false, "{:?}", failed),
            // Made now, or missing behind a link.
            (Err(Errno::NOENT), Ok(found)) => {
                let place = std::fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd())).unwrap();
                prop_assert!(place.starts_with(&volume), "{}", place.display());
            }
            (Err(_), Ok(found)) => {
                prop_assert!(false, "{:?}", std::fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd())));
            }
            (Err(_), Err(_)) => {}
        }
    }
}

/// A dead server of such a volume blocked the pod's worker.
#[test]
fn only_volumes_of_the_agents_own_directories_are_used_without_a_thread() {
    let pod = Path::new("/r/pods/u");
    for (volume, expected) in [
        ("/r/pods/u/volumes/kubernetes.io~empty-dir/e", true),
        ("/r/pods/u/volumes/kubernetes.io~configmap/c", true),
        ("/r/pods/u/volumes/kubernetes.io~projected/p", true),
        ("/r/pods/u/volumes/kubernetes.io~nfs/n", false),
        ("/r/pods/u/volumes/kubernetes.io~csi/pv/mount", false),
        ("/r/pods/u/volumes/kubernetes.io~local-volume/pv", false),
        ("/r/pods/u/volumes", false),
        ("/mnt/host", false),
    ] {
        assert_eq!(is_local(Path::new(volume), pod), expected, "{volume}");
    }
}

/// Such a target kept the container from every start.
#[test]
fn target_whose_mount_is_broken_is_made_again() {
    let broken = [Errno::STALE, Errno::NOTCONN, Errno::IO, Errno::ACCESS, Errno::AGAIN, Errno::NODEV];
    for errno in broken.into_iter().chain([Errno::NOENT]) {
        assert_eq!(is_same(Err(errno), (1, 2)), Ok(false), "{errno}");
    }
    assert_eq!(is_same(Err(Errno::PERM), (1, 2)), Err(Errno::PERM));
    assert_eq!(is_same(Ok((1, 2)), (1, 2)), Ok(true));
    assert_eq!(is_same(Ok((1, 3)), (1, 2)), Ok(false));
    let object = fs::stat("/").unwrap();
    let device = format!("{}:{}", fs::major(object.st_dev), fs::minor(object.st_dev));
    let mount = |device: &str, kind: &str| Mount {
        point: "/t".into(),
        root: "/".into(),
        device: device.to_owned(),
        kind: kind.to_owned(),
        source: String::new(),
    };
    for (table, expected) in [
        (vec![], false),
        (vec![mount(&device, "nfs4")], false),
        (vec![mount("0:999", "nfs4")], true),
        (vec![mount("0:999", "fuse.x")], true),
        (vec![mount("0:999", "ext4")], false),
        (vec![mount("0:999", "nfs4"), mount(&device, "nfs4")], false),
    ] {
        assert_eq!(is_foreign(&table, Path::new("/t"), &object), expected, "{table:?}");
    }
}
