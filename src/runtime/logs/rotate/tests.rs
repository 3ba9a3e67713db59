use super::*;
use std::cell::RefCell;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use crate::util::decompress::{self, Compression};
use crate::util::testing::{fifo, unblocked};

const NOW: &str = "20260102-030405";
/// A log with ten thousand times this is one whose content shows in whatever is made of it.
const SECRET: &str = "2026-01-02T03:04:05Z stdout F secret\n";

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

/// A rotated file's name; the higher the number, the newer.
fn old(number: u32, ending: &str) -> String {
    format!("0.log.2020010{number}-000000{ending}")
}

#[test]
fn rotation_plan_follows_from_size_and_file_names() {
    let settings = Settings { max_bytes: Some(10), max_files: 5 };
    let rotate = |delete: &[String], compress: &[String]| RotationPlan::Rotate {
        delete: delete.to_vec(),
        compress: compress.to_vec(),
        rename_to: format!("0.log.{NOW}"),
    };
    let check = |size, listing: &[String], expected: RotationPlan| {
        assert_eq!(plan_rotation("0.log", size, listing, settings, NOW), expected, "{listing:?}");
    };
    check(None, &[], RotationPlan::ReopenOnly);
    check(Some(9), &[old(1, "")], RotationPlan::Nothing);
    check(Some(10), &[], rotate(&[], &[]));
    check(Some(10), &[old(1, "")], rotate(&[], &[old(1, "")]));
    check(Some(10), &[old(1, ".gz"), old(2, "")], rotate(&[], &[old(2, "")]));
    check(
        Some(10),
        &[old(4, ""), old(3, ".gz"), old(2, ".gz"), old(1, ".gz")],
        rotate(&[old(1, ".gz")], &[old(4, "")]),
    );
    check(
        Some(10),
        &[old(2, ""), old(2, ".gz"), old(3, ".gz.tmp"), old(3, ""), old(1, ".tmp")],
        rotate(&[old(1, ".tmp"), old(2, ""), old(3, ".gz.tmp")], &[old(3, "")]),
    );
    check(Some(10), &[format!("0.log.{NOW}")], RotationPlan::Nothing);
    let least = Settings { max_bytes: Some(10), max_files: 2 };
    assert_eq!(plan_rotation("0.log", Some(10), &[old(1, "")], least, NOW), rotate(&[old(1, "")], &[]));
    let off = Settings { max_bytes: None, max_files: 5 };
    assert_eq!(plan_rotation("0.log", Some(1 << 40), &[], off, NOW), RotationPlan::Nothing);
}

#[test]
fn files_with_other_names_are_not_rotated() {
    let settings = Settings { max_bytes: Some(10), max_files: 2 };
    let others = names(&[
        "10.log.20200101-000000",
        "0.logs",
        "0.log",
        "0.log.",
        "0.log.1",
        "0.log.tmp",
        "0.log.bak.gz",
        "0.log.2020-01-01-0000",
        "0.log.20200101_000000",
        "0.log.20200101-00000x",
        "0.log.20200101-000000.",
        "0.log.20200101-000000.xz",
        "0.log.20200101-000000.gz.gz",
        "0.log.2020010\u{661}-000000",
    ]);
    let RotationPlan::Rotate { delete, compress, .. } =
        plan_rotation("0.log", Some(10), &others, settings, NOW)
    else {
        panic!("it is too large");
    };
    assert_eq!((delete, compress), (Vec::new(), Vec::new()));
}

/// A runtime that opens the new file, unless it fails.
struct Fake {
    log: PathBuf,
    fail: bool,
    calls: RefCell<u32>,
}

impl Reopen for Fake {
    fn reopen_log(&self, _: &ContainerId) -> Result<(), String> {
        *self.calls.borrow_mut() += 1;
        if self.fail {
            return Err("no".to_owned());
        }
        fs::write(&self.log, "new").map_err(|error| error.to_string())
    }
}

/// The errors of one pass, and the number of calls to the runtime to reopen the log.
fn rotate_once(log: &Path, fail: bool) -> (Vec<LogError>, u32) {
    let log = log.to_owned();
    unblocked(move || {
        let settings = Settings { max_bytes: Some(4), max_files: 4 };
        let fake = Fake { log: log.clone(), fail, calls: RefCell::default() };
        let rotator = Rotator::new(settings, fake);
        let errors = rotator.rotate_all(&[(ContainerId::from("c"), log)], &StopToken::never());
        let calls = *rotator.runtime.calls.borrow();
        (errors, calls)
    })
}

fn listing(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The directories of two pods, with a container in each; the other one's log must not change.
struct Pods {
    dir: tempfile::TempDir,
}

impl Pods {
    fn new() -> Pods {
        let pods = Pods { dir: tempfile::tempdir().unwrap() };
        for pod in ["pod", "other"] {
            fs::create_dir_all(pods.dir.path().join(pod).join("c")).unwrap();
        }
        fs::write(pods.of_other("0.log"), SECRET.repeat(10_000)).unwrap();
        fs::write(pods.of_other(&old(1, "")), SECRET.repeat(10_000)).unwrap();
        fs::write(pods.path_to("0.log"), "current").unwrap();
        pods
    }

    fn path_to(&self, name: &str) -> PathBuf {
        self.dir.path().join("pod/c").join(name)
    }

    fn of_other(&self, name: &str) -> PathBuf {
        self.dir.path().join("other/c").join(name)
    }

    /// Nothing of the other pod has changed, and none of its text is where it was not before.
    fn assert_other_is_untouched(&self) {
        assert_eq!(listing(&self.of_other("")), ["0.log".to_owned(), old(1, "")]);
        for name in ["0.log".to_owned(), old(1, "")] {
            assert_eq!(fs::read_to_string(self.of_other(&name)).unwrap(), SECRET.repeat(10_000));
        }
        for name in listing(&self.path_to("")) {
            let path = self.path_to(&name);
            if name.ends_with(".gz") && fs::symlink_metadata(&path).unwrap().is_file() {
                assert!(!unpacked(&path).contains("secret"), "{name}");
            }
        }
    }
}

/// Empty for a file that is not compressed.
fn unpacked(path: &Path) -> String {
    match decompress::open(Box::new(File::open(path).unwrap()), u64::MAX).unwrap() {
        (unpacked, Compression::Gzip) => io::read_to_string(unpacked).unwrap(),
        _ => String::new(),
    }
}

#[test]
fn large_log_is_renamed_and_older_ones_compressed() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    fs::write(&log, "abc").unwrap();
    assert!(matches!(rotate_once(&log, false), (errors, 0) if errors.is_empty()));
    fs::write(&log, "current").unwrap();
    for (name, text) in [
        (old(1, ".gz"), "oldest"),
        (old(2, ".gz"), "older"),
        (old(3, ""), "old old old"),
        (old(3, ".gz.tmp"), "half"),
        ("0.log.note".to_owned(), "of another program"),
    ] {
        fs::write(dir.path().join(name), text).unwrap();
    }
    assert!(matches!(rotate_once(&log, false), (errors, 1) if errors.is_empty()));
    let names = listing(dir.path());
    assert_eq!(names.len(), 5, "{names:?}");
    assert_eq!(names[..3], ["0.log".to_owned(), old(2, ".gz"), old(3, ".gz")]);
    assert_eq!(names[4], "0.log.note");
    assert_eq!(fs::read_to_string(&log).unwrap(), "new");
    assert_eq!(fs::read_to_string(dir.path().join(&names[3])).unwrap(), "current");
    let compressed = dir.path().join(&names[2]);
    assert_eq!(unpacked(&compressed), "old old old");
    assert_eq!(fs::metadata(&compressed).unwrap().permissions().mode() & 0o777, MODE);
}

#[test]
fn log_gets_its_name_back_if_runtime_does_not_reopen() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    fs::write(&log, "current").unwrap();
    let (errors, _) = rotate_once(&log, true);
    assert!(matches!(&errors[..], [LogError::Reopen { cause, .. }] if cause == "no"));
    assert_eq!(listing(dir.path()), ["0.log"]);
    assert_eq!(fs::read_to_string(&log).unwrap(), "current");
}

#[test]
fn runtime_opens_a_missing_log() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    assert_eq!(rotate_once(&log, false).1, 1);
    assert!(log.exists());
}

#[test]
fn irregular_log_file_is_neither_renamed_nor_reopened() {
    let pods = Pods::new();
    let log = pods.path_to("0.log");
    let check = |what: &str| {
        let (errors, calls) = rotate_once(&log, false);
        assert!(matches!(&errors[..], [LogError::Kind { .. }]), "{what}: {errors:?}");
        assert_eq!(calls, 0, "{what}");
        assert_eq!(listing(&pods.path_to("")), ["0.log"], "{what}");
        pods.assert_other_is_untouched();
    };
    for target in ["/dev/zero", pods.of_other("0.log").to_str().unwrap(), "/no/such/file"] {
        fs::remove_file(&log).unwrap();
        symlink(target, &log).unwrap();
        check(target);
    }
    fs::remove_file(&log).unwrap();
    fifo(&log);
    check("pipe");
    fs::remove_file(&log).unwrap();
    fs::create_dir(&log).unwrap();
    check("directory");
}

#[test]
fn links_in_place_of_log_directories_are_refused() {
    let pods = Pods::new();
    let check = |log: &Path| {
        let (errors, calls) = rotate_once(log, false);
        assert!(matches!(&errors[..], [LogError::Io { .. }]), "{errors:?}");
        assert_eq!(calls, 0);
        pods.assert_other_is_untouched();
    };
    fs::remove_dir_all(pods.path_to("")).unwrap();
    symlink(pods.of_other(""), pods.dir.path().join("pod/c")).unwrap();
    check(&pods.dir.path().join("pod/c/0.log"));
    fs::remove_dir_all(pods.dir.path().join("pod")).unwrap();
    symlink(pods.dir.path().join("other"), pods.dir.path().join("pod")).unwrap();
    check(&pods.dir.path().join("pod/c/0.log"));
}

/// Each thing in the place of each file that a rotation reads, makes or removes: the log is
/// rotated all the same.
#[test]
fn irregular_files_at_rotation_names_do_not_stop_rotation() {
    let place = |what: &str, pods: &Pods, path: &Path| match what {
        "link" => symlink(pods.of_other("0.log"), path).unwrap(),
        "device" => symlink("/dev/zero", path).unwrap(),
        "pipe" => fifo(path),
        "directory" => fs::create_dir(path).unwrap(),
        _ => fs::write(path, "own").unwrap(),
    };
    for what in ["link", "device", "pipe", "directory", "file"] {
        for name in [old(1, ""), old(1, ".gz"), old(1, ".gz.tmp"), old(1, ".tmp")] {
            let pods = Pods::new();
            fs::write(pods.path_to(&old(2, "")), "older").unwrap();
            place(what, &pods, &pods.path_to(&name));
            let (errors, calls) = rotate_once(&pods.path_to("0.log"), false);
            assert_eq!((errors.len(), calls), (0, 1), "{what} {name}: {errors:?}");
            assert_eq!(fs::read_to_string(pods.path_to("0.log")).unwrap(), "new", "{what} {name}");
            assert_eq!(unpacked(&pods.path_to(&old(2, ".gz"))), "older", "{what} {name}");
            if what != "file" {
                assert!(
                    fs::symlink_metadata(pods.path_to(&name)).is_ok(),
                    "{what} {name} is not the rotation's"
                );
            }
            pods.assert_other_is_untouched();
        }
        // At the path of the compressed file.
        for ending in [".gz", ".gz.tmp"] {
            let pods = Pods::new();
            fs::write(pods.path_to(&old(2, "")), "older").unwrap();
            place(what, &pods, &pods.path_to(&old(2, ending)));
            let (_, calls) = rotate_once(&pods.path_to("0.log"), false);
            assert_eq!(calls, 1, "{what} {ending}");
            assert_eq!(fs::read_to_string(pods.path_to("0.log")).unwrap(), "new", "{what} {ending}");
            pods.assert_other_is_untouched();
        }
    }
}

#[test]
fn rename_of_a_log_replaces_no_other_file() {
    let pods = Pods::new();
    let log = pods.path_to("0.log");
    let name = old(9, "");
    let place = UntrustedPath::find(&log, LOG_LEVELS).unwrap();
    let files = Files { dir: place.dir(), log: &log };
    for kind in ["file", "link", "directory"] {
        let path = pods.path_to(&name);
        match kind {
            "file" => fs::write(&path, "there").unwrap(),
            "link" => symlink(pods.of_other("0.log"), &path).unwrap(),
            _ => fs::create_dir(&path).unwrap(),
        }
        let before = fs::symlink_metadata(&path).unwrap().ino();
        assert!(!files.rename_to_new("0.log", &name).unwrap(), "{kind}");
        assert_eq!(fs::symlink_metadata(&path).unwrap().ino(), before, "{kind}");
        if kind == "directory" { fs::remove_dir(&path).unwrap() } else { fs::remove_file(&path).unwrap() }
    }
    assert!(files.rename_to_new("0.log", &name).unwrap());
    assert_eq!(fs::read_to_string(pods.path_to(&name)).unwrap(), "current");
    pods.assert_other_is_untouched();
}

#[test]
fn compressed_bytes_per_pass_are_limited() {
    unblocked(|| {
        let pods = Pods::new();
        let log = pods.path_to("0.log");
        let place = UntrustedPath::find(&log, LOG_LEVELS).unwrap();
        let files = Files { dir: place.dir(), log: &log };
        let sparse = |number: u32, length: u64| {
            File::create(pods.path_to(&old(number, ""))).unwrap().set_len(length).unwrap();
        };
        let never = StopToken::never();
        // Larger than any disk: not started.
        sparse(1, 1 << 42);
        let mut left = 300_000;
        files.compress(&old(1, ""), &mut left, &never).unwrap();
        assert_eq!((left, pods.path_to(&old(1, "")).exists()), (300_000, true));
        sparse(2, 200_000);
        files.compress(&old(2, ""), &mut left, &never).unwrap();
        assert_eq!((left, pods.path_to(&old(2, ".gz")).exists()), (100_000, true));
        sparse(3, 200_000);
        files.compress(&old(3, ""), &mut left, &never).unwrap();
        assert_eq!((left, pods.path_to(&old(3, "")).exists()), (100_000, true));
        // A file that grows while it is read.
        let source = File::open(pods.path_to(&old(3, ""))).unwrap();
        let written = files.write_compressed((&old(3, ""), source), &old(3, ".gz.tmp"), &mut left, &never);
        assert!(matches!(written, Ok(false)), "{written:?}");
        assert!(Settings { max_bytes: Some(1 << 40), max_files: 5 }.compress_bytes() > 1 << 40);
    });
}

#[test]
fn compression_ends_when_the_agent_stops() {
    let pods = Pods::new();
    fs::write(pods.path_to(&old(1, "")), "older").unwrap();
    let (source, stop) = crate::util::stop::pair();
    drop(source);
    let place = UntrustedPath::find(&pods.path_to("0.log"), LOG_LEVELS).unwrap();
    let log = pods.path_to("0.log");
    let files = Files { dir: place.dir(), log: &log };
    let stopped = files.compress(&old(1, ""), &mut 1000, &stop);
    assert!(matches!(stopped, Err(LogError::Stopping)), "{stopped:?}");
    assert_eq!(listing(&pods.path_to("")), ["0.log".to_owned(), old(1, "")]);
}
