//! `coracle images import` that is killed, and on a full disk. The fake runtime pulls nothing from the
//! archives, so no import waits for its images.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::support::fake_node::{FakeNode, LONG};
use crate::support::image_archives;
use crate::support::pty::Pty;
use crate::support::wait::wait_until;

const BIG: &str = "registry.example/big:1";
const SMALL: &str = "registry.example/small:1";
const OTHER: &str = "registry.example/other:1";

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

fn directory(node: &FakeNode) -> PathBuf {
    node.root().join("images.d")
}

/// An archive outside of the directory of archives.
fn archive(node: &FakeNode, image: &str, layer_bytes: usize) -> String {
    let name = image.split(['/', ':']).nth(1).unwrap();
    let path = node.path(&format!("{name}.tar"));
    image_archives::write_made_up(&node.path("work"), image, layer_bytes, &path);
    path.display().to_string()
}

/// The names in the directory of archives, sorted.
fn names(node: &FakeNode) -> Vec<String> {
    let entries = fs::read_dir(directory(node)).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn length(path: &Path) -> Option<u64> {
    fs::metadata(path).map(|about| about.len()).ok()
}

/// Asserts that the agent serves every blob of an image.
fn assert_served(node: &FakeNode, image: &str) {
    let copy = node.path("exported.tar");
    wait_until("the archive to be read", LONG, || {
        node.command(&["images", "export", image, "-o", &copy.to_string_lossy()]).status.success()
    });
    assert!(length(&copy).is_some_and(|bytes| bytes > 4096));
    fs::remove_file(copy).unwrap();
}

/// A file system of its own for the archives of a node. Dropping it unmounts it.
struct ArchiveDisk(PathBuf);

impl ArchiveDisk {
    /// An agent with a disk of this size; `None`: there is no private mount namespace.
    fn with_agent(size: &str) -> Option<(FakeNode, ArchiveDisk)> {
        if std::env::var_os("E2E_DIR").is_none() {
            eprintln!("skipped: no namespace of its own; run through tests/run integration");
            return None;
        }
        let mut node = FakeNode::prepare(json!({}));
        let disk = ArchiveDisk(directory(&node));
        fs::create_dir_all(&disk.0).unwrap();
        let options = format!("size={size}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&disk.0);
        assert!(mount.status().unwrap().success());
        node.start_agent();
        Some((node, disk))
    }
}

impl Drop for ArchiveDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn killed_import_leaves_no_archive_to_serve_and_is_continued() {
    let mut node = FakeNode::start();
    let source = archive(&node, BIG, 3 * MIB + 17);
    let small = archive(&node, SMALL, 100 * KIB);
    let import = ["images", "import", "--no-wait", &source];
    let part = directory(&node).join(".big.tar.part");
    let last = 2 * MIB as u64 + 12_345;
    // In the first write, after a write, and in the middle of one.
    for bytes in [1, MIB as u64, last] {
        // The kernel ends the process at this byte, with a signal that, like SIGKILL, is not handled.
        let command = node.command_line(&import);
        let mut limited = Command::new("prlimit");
        limited.arg(format!("--fsize={bytes}")).arg("--core=0").arg("--");
        limited.arg(command.get_program()).args(command.get_args());
        let output = limited.output().unwrap();
        assert_eq!(output.status.signal(), Some(25), "SIGXFSZ: {output:?}");
        assert_eq!(names(&node), [".big.tar.part"]);
        assert_eq!(length(&part), Some(bytes));
    }
    // What a loss of power may leave, which the next import cuts off before it copies.
    File::options().append(true).open(&part).unwrap().set_len(last + 5000).unwrap();
    let mut stopped = Pty::spawn_stopped(&node.command_line(&import));
    wait_until("the import to go on", LONG, || length(&part) == Some(last));
    assert_eq!(stopped.kill().signal(), Some(9));
    assert_eq!((names(&node), length(&part)), (vec![".big.tar.part".to_owned()], Some(last)));
    // Another import makes the agent list the directory.
    node.cli(&["images", "import", "--no-wait", &small]);
    assert_served(&node, SMALL);
    let list = node.cli(&["images", "list"]);
    assert!(list.contains("small.tar") && !list.contains("/big"), "{list}");

    let text = node.cli(&import);
    assert!(text.contains(&format!("big.tar: copied, {last} bytes were there already\n")), "{text}");
    assert_eq!(names(&node), ["big.tar", "small.tar"]);
    assert!(fs::read(directory(&node).join("big.tar")).unwrap() == fs::read(&source).unwrap());
    assert_served(&node, BIG);
    node.stop_agent();
}

#[test]
fn import_without_enough_free_space_is_refused_and_other_images_are_served() {
    let Some((mut node, _disk)) = ArchiveDisk::with_agent("4m") else { return };
    let (source, small) = (archive(&node, BIG, 6 * MIB), archive(&node, SMALL, 100 * KIB));
    node.cli(&["images", "import", "--no-wait", &small]);
    let output = node.command(&["images", "import", "--no-wait", &source]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains(&format!("{}: there are ", directory(&node).display())), "{message}");
    let size = length(Path::new(&source)).unwrap();
    assert!(message.contains(&format!("bytes of free space for {size} bytes of {source}\n")), "{message}");
    assert_eq!(names(&node), ["small.tar"]);
    assert_served(&node, SMALL);
    node.stop_agent();
}

#[test]
fn import_on_a_disk_that_becomes_full_names_the_archive_and_removes_its_part() {
    let Some((mut node, _disk)) = ArchiveDisk::with_agent("8m") else { return };
    let (source, small) = (archive(&node, BIG, 6 * MIB), archive(&node, SMALL, 100 * KIB));
    let other = archive(&node, OTHER, 100 * KIB);
    node.cli(&["images", "import", "--no-wait", &small]);
    // The part of another file: it is cut after the free space was checked.
    let part = directory(&node).join(".big.tar.part");
    fs::write(&part, "other").unwrap();
    let mut import =
        Pty::spawn_stopped(&node.command_line(&["images", "import", "--no-wait", &source, &other]));
    wait_until("the check of the free space", LONG, || length(&part) == Some(0));
    let growing = directory(&node).join(".growing");
    fs::write(&growing, vec![1; 6 * MIB]).unwrap();
    import.resume_output();
    let target = directory(&node).join("big.tar").display().to_string();
    let expected = format!("{target}: No space left on device; the incomplete copy was removed");
    import.wait_for(&expected, LONG);
    // The next archive of the command has the space again.
    import.wait_for("other.tar: copied", LONG);
    assert_eq!(import.wait_ended(LONG).code(), Some(1));
    assert_eq!(names(&node), [".growing", "other.tar", "small.tar"]);
    let list = node.cli(&["images", "list"]);
    assert!(!list.contains("/big"), "{list}");
    assert_served(&node, SMALL);
    assert_served(&node, OTHER);

    fs::remove_file(growing).unwrap();
    let text = node.cli(&["images", "import", "--no-wait", &source]);
    assert!(text.contains("big.tar: copied\n"), "{text}");
    assert_served(&node, BIG);
    node.stop_agent();
}
