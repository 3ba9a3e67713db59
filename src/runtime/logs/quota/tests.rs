use super::super::rotate::Settings;
use super::*;
use std::cell::RefCell;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::time::{Duration, UNIX_EPOCH};

use crate::util::testing::{fifo, unblocked};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

fn file(state: LogFileState, bytes: u64, modified: i64) -> LogFile {
    let path = PathBuf::from(format!("{modified}"));
    LogFile { state, bytes, modified: (modified, 0), path, inode: 0 }
}

#[test]
fn oldest_rotated_files_go_first_then_the_largest_current_ones() {
    use LogFileState::*;
    let files = [
        file(Running, 5 * MIB, 1),
        file(Rotated, MIB, 30),
        file(Rotated, MIB, 10),
        file(Rotated, MIB, 20),
        file(Ended, 7 * MIB, 2),
        file(Open, 9 * MIB, 0),
        file(Running, LEAST - 1, 3),
    ];
    let used = 24 * MIB + LEAST - 1;
    let check = |quota: u64, remove: &[usize], current: &[usize], excess: u64| {
        let expected = QuotaPlan { used, remove: remove.to_vec(), current: current.to_vec(), excess };
        assert_eq!(plan(&files, quota), expected, "{quota}");
    };
    check(u64::MAX, &[], &[], 0);
    check(used, &[], &[], 0);
    check(used - 1, &[2], &[], 0);
    check(used - MIB, &[2], &[], 0);
    check(used - MIB - 1, &[2, 3], &[], 0);
    check(used - 3 * MIB, &[2, 3, 1], &[], 0);
    check(used - 3 * MIB - 1, &[2, 3, 1], &[4], 0);
    check(used - 11 * MIB, &[2, 3, 1], &[4, 0], 0);
    // What the runtime may write to, and small current files stay.
    check(MIB, &[2, 3, 1], &[4, 0], 8 * MIB + LEAST - 1);
    assert_eq!(plan(&[], 0), QuotaPlan::default());
    let many: Vec<LogFile> = (0..1000).map(|number| file(Running, MIB, number)).collect();
    assert_eq!(plan(&many, 0).current, (0..CURRENT).collect::<Vec<_>>());
    let huge = [file(Rotated, u64::MAX, 1), file(Rotated, u64::MAX, 2)];
    assert_eq!(plan(&huge, 1).remove, [0]);
}

#[test]
fn only_names_of_logs_and_their_rotated_files_count() {
    for (name, log) in [
        ("0.log", Some("0.log")),
        ("12.log.20260102-030405", Some("12.log")),
        ("0.log.x", Some("0.log")),
        ("0.lo", None),
        (".log", None),
        ("a.log", None),
        ("0.txt.log", None),
        ("1\u{661}.log", None),
        ("0é", None),
        ("", None),
    ] {
        assert_eq!(log_of(name), log, "{name}");
    }
}

/// Log directories, and a runtime that opens a new file.
struct Node {
    dir: tempfile::TempDir,
    writers: BTreeMap<PathBuf, WriterState>,
    reopened: RefCell<Vec<String>>,
    refuses: bool,
}

impl Reopen for &Node {
    fn reopen_log(&self, container: &ContainerId) -> Result<(), String> {
        if self.refuses {
            return Err("no".to_owned());
        }
        self.reopened.borrow_mut().push(container.to_string());
        let running = WriterState::Running(container.clone());
        let path = self.writers.iter().find(|(_, writer)| **writer == running).unwrap().0;
        fs::write(path, "new").map_err(|error| error.to_string())
    }
}

impl Node {
    fn new() -> Node {
        let dir = tempfile::tempdir().unwrap();
        Node { dir, writers: BTreeMap::new(), reopened: RefCell::default(), refuses: false }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file of this size that was changed at this second.
    fn write(&self, name: &str, bytes: u64, second: u64) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "x".repeat(bytes as usize)).unwrap();
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(UNIX_EPOCH + Duration::from_secs(second)).unwrap();
    }

    fn writer(&mut self, name: &str, writer: WriterState) {
        self.writers.insert(self.path(name), writer);
    }

    fn running(&mut self, name: &str, id: &str) {
        self.writer(name, WriterState::Running(ContainerId::from(id)));
    }

    fn enforce(&self, quota: u64) -> Outcome {
        let quota = Quota { bytes: quota, pod_logs_dir: self.dir.path().to_owned() };
        let rotator = Rotator::new(Settings { max_bytes: None, max_files: 5 }, self);
        quota.enforce(&rotator, &self.writers, &StopToken::never())
    }

    /// All files, sorted.
    fn left(&self) -> Vec<String> {
        let (mut left, mut open) = (Vec::new(), vec![self.dir.path().to_owned()]);
        while let Some(dir) = open.pop() {
            for entry in fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() && !path.is_symlink() {
                    true => open.push(path),
                    false => {
                        left.push(path.strip_prefix(self.dir.path()).unwrap().display().to_string());
                    }
                }
            }
        }
        left.sort();
        left
    }
}

#[test]
fn rotated_files_of_all_pods_are_removed_by_age_until_the_quota_is_met() {
    let mut node = Node::new();
    node.running("ns_a_1/c/0.log", "a");
    node.write("ns_a_1/c/0.log", 128 * KIB, 100);
    node.write("ns_a_1/c/0.log.20260103-000000", 64 * KIB, 50);
    node.write("ns_a_1/c/0.log.20260102-000000.gz", 64 * KIB, 20);
    node.write("ns_b_2/c/0.log.20260102-000000.gz", 64 * KIB, 30);
    node.writer("ns_b_2/c/0.log", WriterState::Ended);
    node.write("ns_b_2/c/0.log", 64 * KIB, 10);
    node.write("ns_b_2/c/notes.txt", 512 * KIB, 1);
    let all = node.left();
    let outcome = node.enforce(10 * MIB);
    assert_eq!((outcome.removed, outcome.used), (0, 384 * KIB));
    assert_eq!(node.left(), all);
    let outcome = node.enforce(300 * KIB);
    assert_eq!((outcome.removed, outcome.freed, outcome.excess), (2, 128 * KIB, 0));
    assert!(outcome.errors.is_empty());
    assert_eq!(
        node.left(),
        ["ns_a_1/c/0.log", "ns_a_1/c/0.log.20260103-000000", "ns_b_2/c/0.log", "ns_b_2/c/notes.txt"]
    );
    assert!(node.reopened.borrow().is_empty());
}

#[test]
fn largest_current_file_is_rotated_and_only_the_closed_file_is_removed() {
    let mut node = Node::new();
    node.running("ns_a_1/c/0.log", "a");
    node.running("ns_b_2/c/0.log", "b");
    node.writer("ns_c_3/c/0.log", WriterState::Ended);
    node.writer("ns_d_4/c/0.log", WriterState::Unknown);
    node.write("ns_a_1/c/0.log", 512 * KIB, 1);
    node.write("ns_b_2/c/0.log", 256 * KIB, 1);
    node.write("ns_c_3/c/0.log", 128 * KIB, 1);
    node.write("ns_d_4/c/0.log", MIB, 1);
    node.write("ns_e_5/c/0.log", MIB, 1);
    let held = fs::File::open(node.path("ns_a_1/c/0.log")).unwrap();
    let outcome = node.enforce(2 * MIB + 400 * KIB);
    assert_eq!((outcome.removed, outcome.excess), (1, 0), "{outcome:?}");
    assert_eq!(*node.reopened.borrow(), ["a"]);
    assert_eq!(fs::read_to_string(node.path("ns_a_1/c/0.log")).unwrap(), "new");
    assert_eq!(held.metadata().unwrap().len(), 512 * KIB, "the old file is not shortened");
    assert_eq!(fs::metadata(node.path("ns_b_2/c/0.log")).unwrap().len(), 256 * KIB);
    // The file of the ended container is removed; those to which a runtime may write stay.
    let outcome = node.enforce(MIB);
    assert_eq!(outcome.removed, 2, "{outcome:?}");
    assert!(outcome.excess > 0);
    assert_eq!(*node.reopened.borrow(), ["a", "b"]);
    assert_eq!(node.left(), ["ns_a_1/c/0.log", "ns_b_2/c/0.log", "ns_d_4/c/0.log", "ns_e_5/c/0.log"]);
    // Small files are not rotated again.
    assert_eq!(node.enforce(MIB).removed, 0);
}

#[test]
fn log_that_the_runtime_does_not_reopen_keeps_its_file() {
    let mut node = Node::new();
    node.refuses = true;
    node.running("ns_a_1/c/0.log", "a");
    node.write("ns_a_1/c/0.log", 512 * KIB, 1);
    let outcome = node.enforce(MIB / 4);
    assert!(matches!(&outcome.errors[..], [LogError::Reopen { .. }]), "{outcome:?}");
    assert_eq!((outcome.removed, node.left()), (0, vec!["ns_a_1/c/0.log".to_owned()]));
    assert_eq!(fs::metadata(node.path("ns_a_1/c/0.log")).unwrap().len(), 512 * KIB);
}

/// The agent was killed after it had renamed the file, and the runtime still writes to it.
#[test]
fn newest_rotated_file_without_a_current_one_stays() {
    let mut node = Node::new();
    node.running("ns_a_1/c/0.log", "a");
    node.write("ns_a_1/c/0.log.20260103-000000", 128 * KIB, 1);
    node.write("ns_a_1/c/0.log.20260102-000000.gz", 128 * KIB, 2);
    node.write("ns_b_2/c/3.log.20260103-000000", 128 * KIB, 1);
    node.writer("ns_c_3/c/0.log", WriterState::Ended);
    node.write("ns_c_3/c/0.log.20260103-000000", 128 * KIB, 1);
    let outcome = node.enforce(KIB);
    assert_eq!(outcome.removed, 2, "{outcome:?}");
    assert_eq!(node.left(), ["ns_a_1/c/0.log.20260103-000000", "ns_b_2/c/3.log.20260103-000000"]);
}

#[test]
fn links_holes_and_irregular_files_use_up_no_quota() {
    unblocked(|| {
        let mut node = Node::new();
        node.write("ns_other_2/c/0.log.20260102-000000", 128 * KIB, 1);
        node.running("ns_other_2/c/0.log", "b");
        node.write("ns_other_2/c/0.log", 4 * KIB, 1);
        let old = |number: u32| node.path(&format!("ns_a_1/c/0.log.2026010{number}-000000"));
        fs::create_dir_all(node.path("ns_a_1/c")).unwrap();
        fs::File::create(old(1)).unwrap().set_len(1 << 40).unwrap();
        symlink(node.path("ns_other_2/c/0.log.20260102-000000"), old(2)).unwrap();
        fifo(&old(3));
        fs::create_dir(old(4)).unwrap();
        fs::write(old(5), "x".repeat(64 * 1024)).unwrap();
        for number in 6..10 {
            fs::hard_link(old(5), old(number)).unwrap();
        }
        // A link in the place of a directory.
        symlink(node.path("ns_other_2"), node.path("ns_link_3")).unwrap();
        symlink(node.path("ns_other_2/c"), node.path("ns_a_1/d")).unwrap();
        fs::write(node.path("ns_file_4"), "").unwrap();
        let all = node.left();
        let outcome = node.enforce(256 * KIB);
        assert!(outcome.used <= 200 * KIB, "{outcome:?}");
        assert!(outcome.used >= 128 * KIB, "{outcome:?}");
        assert_eq!((outcome.removed, outcome.errors.len()), (0, 0), "{outcome:?}");
        assert_eq!(node.left(), all);
        // What is removed is the entry, and never the target of a link.
        node.enforce(KIB);
        assert!(node.path("ns_other_2/c/0.log").exists());
        assert!(old(3).exists() && old(4).exists() && old(2).is_symlink());
    });
}

#[test]
fn file_that_took_the_name_of_a_planned_one_stays() {
    let node = Node::new();
    node.write("ns_a_1/c/0.log.20260102-000000", KIB, 1);
    let path = node.path("ns_a_1/c/0.log.20260102-000000");
    let inode = fs::metadata(&path).unwrap().ino();
    assert!(!remove(&path, inode + 1).unwrap());
    assert!(path.exists());
    assert!(remove(&path, inode).unwrap());
    assert!(!remove(&path, inode).unwrap());
    assert!(!remove(&node.path("none/c/0.log"), 1).unwrap());
    assert_eq!(node.enforce(KIB).used, 0);
}

#[test]
fn entries_of_a_pod_are_limited_and_other_pods_are_counted() {
    let node = Node::new();
    fs::create_dir_all(node.path("ns_a_1/c")).unwrap();
    for number in 0..FILES_OF_POD + 100 {
        fs::write(node.path(&format!("ns_a_1/c/{number}.log")), "").unwrap();
    }
    node.write("ns_b_2/c/0.log", 64 * KIB, 1);
    let files = scan(node.dir.path(), &node.writers, &StopToken::never()).unwrap();
    assert_eq!(files.len(), FILES_OF_POD + 1);
    assert_eq!(node.enforce(u64::MAX).used, 64 * KIB);
    let missing = Quota { bytes: 1, pod_logs_dir: node.path("none") };
    let rotator = Rotator::new(Settings { max_bytes: None, max_files: 5 }, &node);
    assert!(missing.enforce(&rotator, &node.writers, &StopToken::never()).errors.is_empty());
}
