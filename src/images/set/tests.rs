//! Tests of the set (pure) and of the room with its thread, on archives in temporary directories.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::archive::testing;
use super::archive::{Archive, ArchiveFormat, Compression, Digest, Fault, Image, Problem, Stamp};
use super::entries::{Availability, Changes, Key, Set, State};
use super::*;

fn stamp(size: u64) -> Stamp {
    Stamp { dev: 1, ino: 1, size, mtime_ns: 1, ctime_ns: 1 }
}

fn digest(digit: &str) -> Digest {
    Digest::parse(&format!("sha256:{}", digit.repeat(64))).unwrap()
}

fn archive(names: &[&str], faults: &[&str]) -> Archive {
    let image = |name: &&str| Image {
        names: vec![(*name).to_owned()],
        target: digest("a"),
        media_type: String::new(),
        size: 1,
        blobs: Vec::new(),
        layers: Vec::new(),
    };
    let fault = |object: &&str| Fault { object: (*object).to_owned(), problem: Problem::Truncated };
    Archive {
        form: ArchiveFormat::OciTar,
        compression: Compression::None,
        stamp: stamp(1),
        images: names.iter().map(image).collect(),
        blobs: Default::default(),
        faults: faults.iter().map(fault).collect(),
    }
}

fn key(name: &str) -> Key {
    (0, PathBuf::from(name))
}

fn names(list: &[&str]) -> BTreeSet<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

fn set_of(files: &[(&str, u64)]) -> Set {
    let mut set = Set::default();
    set.list(files.iter().map(|(name, size)| (key(name), stamp(*size))).collect(), |_, _| None);
    set
}

#[test]
fn archives_with_wanted_images_are_read_first() {
    let mut set = set_of(&[("a", 9), ("b", 5), ("c", 3), ("d", 1)]);
    set.get_mut(&key("a")).unwrap().names = Some(vec!["r/a:1".into()]);
    set.get_mut(&key("c")).unwrap().names = Some(vec!["r/c:1".into()]);
    assert_eq!(set.next(&names(&[])), Some(key("a")), "in order");
    assert_eq!(set.next(&names(&["r/c:1"])), Some(key("c")), "by its names");
    assert_eq!(set.next(&names(&["r/x:1"])), Some(key("d")), "the smallest of unknown content");

    set.get_mut(&key("a")).unwrap().state = State::Reading;
    assert!(set.is_urgent_elsewhere(&key("a"), &names(&["r/c:1"])));
    assert!(
        !set.is_urgent_elsewhere(&key("a"), &names(&["r/a:1", "r/c:1"])),
        "it has an awaited image itself"
    );
    assert!(!set.is_urgent_elsewhere(&key("a"), &names(&["r/x:1"])), "no archive is known to have it");
    set.get_mut(&key("c")).unwrap().state = State::Ready(Arc::new(archive(&["r/c:1"], &[])));
    assert!(!set.is_urgent_elsewhere(&key("a"), &names(&["r/c:1"])), "it is there");
}

#[test]
fn availability_depends_on_what_was_read() {
    let mut set = Set::default();
    assert_eq!(set.availability("r/a:1"), Availability::Unknown, "the directories were not listed");
    set.list(vec![(key("a"), stamp(1)), (key("b"), stamp(1))], |_, _| None);
    assert_eq!(set.availability("r/a:1"), Availability::Unknown);
    set.get_mut(&key("a")).unwrap().names = Some(vec!["r/a:1".into()]);
    assert_eq!(set.availability("r/a:1"), Availability::Coming);
    set.get_mut(&key("a")).unwrap().state = State::Ready(Arc::new(archive(&["r/a:1"], &["r/broken:1"])));
    assert_eq!(set.availability("r/a:1"), Availability::Available);
    assert_eq!(set.availability(&format!("r/a@{}", digest("a"))), Availability::Available);
    assert_eq!(
        set.availability("r/broken:1"),
        Availability::Damaged("archive a: the archive is truncated".into())
    );
    assert_eq!(set.availability("r/x:1"), Availability::Unknown, "b was not read");
    set.get_mut(&key("b")).unwrap().state = State::Failed("not an archive".into());
    assert_eq!(set.availability("r/x:1"), Availability::Absent);
    assert!(set.is_complete());
}

#[test]
fn unchanged_archives_are_retained_and_changed_ones_read_again() {
    let mut set = set_of(&[("a", 1), ("b", 1), ("c", 1)]);
    for name in ["a", "b", "c"] {
        set.get_mut(&key(name)).unwrap().state = State::Ready(Arc::new(archive(&[name], &[])));
    }
    let files = vec![(key("a"), stamp(1)), (key("b"), stamp(2)), (key("d"), stamp(1)), (key("e"), stamp(1))];
    let known = |path: &Path, _: &Stamp| (path == Path::new("e")).then(|| archive(&["e"], &[]));
    let changes = set.list(files, known);
    assert_eq!(changes, Changes { added: vec!["b".into(), "d".into()], removed: vec!["c".into()] });
    assert_eq!(set.images().into_keys().collect::<Vec<_>>(), ["a", "e"]);
}

/// A room with its thread and without a runtime.
struct Fixture {
    set: ImageSet,
    settings: SetSettings,
    dir: tempfile::TempDir,
    available: Arc<Mutex<Vec<String>>>,
    events: crossbeam_channel::Receiver<Box<crate::model::event::Event>>,
    sink: EventSink,
    running: Option<Running>,
}

impl Fixture {
    fn new() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let directories = vec![dir.path().join("images.d")];
        std::fs::create_dir(&directories[0]).unwrap();
        let (sink, events) = EventSink::new();
        let index = dir.path().join("state/index.json");
        let settings = SetSettings { directories, index };
        let set = ImageSet::new(&settings.directories);
        Fixture { set, settings, dir, available: Arc::default(), events, sink, running: None }
    }

    fn start(mut self) -> Fixture {
        self.set = ImageSet::new(&self.settings.directories);
        let (_, images) = crate::cri::unreachable_clients();
        let list = Arc::clone(&self.available);
        let (on_death, _) = crossbeam_channel::bounded(1);
        let deps = SetDeps {
            images,
            events: self.sink.clone(),
            available: Arc::new(move |names| list.lock().unwrap().extend_from_slice(names)),
            has_disk_pressure: Arc::new(|| false),
            on_death,
        };
        self.running = Some(self.set.spawn(self.settings.clone(), deps).unwrap());
        self.set.set_registry("127.0.0.1:1");
        self
    }

    fn restart(mut self) -> Fixture {
        drop(self.running.take());
        self.start()
    }

    fn put(&self, file: &str, content: &[u8]) {
        let directory = &self.settings.directories[0];
        std::fs::write(directory.join(format!(".{file}")), content).unwrap();
        std::fs::rename(directory.join(format!(".{file}")), directory.join(file)).unwrap();
    }

    fn lookup(&self, image: &str) -> SetLookup {
        self.set.wait_for_image(image, &StopToken::never())
    }

    fn wait(&self, what: &str, check: impl Fn(&ArchiveSetReport) -> bool) -> ArchiveSetReport {
        let begun = Instant::now();
        loop {
            let report = self.set.report();
            if check(&report) {
                return report;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}: {report:?}");
            assert_eq!(
                StopToken::never().wait(Duration::from_millis(10)),
                crate::util::stop::Waited::TimedOut
            );
        }
    }
}

/// A plain OCI archive with one image of this machine's platform.
fn image(name: &str, text: &str) -> Vec<u8> {
    let entries = testing::image(&format!("linux/{}", Platform::of_this_machine().architecture), &[text]);
    testing::tar(&testing::layout(&[(name, &entries)]))
}

#[test]
fn images_of_archives_come_and_go_with_their_files() {
    let fixture = Fixture::new();
    fixture.put("a.tar", &image("registry.example/a:1", "one"));
    let fixture = fixture.start();
    assert_eq!(fixture.lookup("registry.example/a:1"), SetLookup::Available);
    assert_eq!(fixture.lookup("registry.example/b:1"), SetLookup::NotInSet);
    fixture.put("b.tar", &image("registry.example/b:1", "two"));
    fixture.wait("the second image", |report| report.images.len() == 2);
    assert_eq!(fixture.lookup("registry.example/b:1"), SetLookup::Available);
    // The image is in the report before the notice is sent.
    fixture.wait("the notice of the second image", |_| {
        fixture.available.lock().unwrap().contains(&"registry.example/b:1".to_owned())
    });
    assert!(fixture.set.protects(&["registry.example/a:1".into()]));

    let document = fixture.set.manifest("registry.example/a", "1").unwrap();
    let by_digest = fixture.set.manifest("registry.example/a", &document.digest).unwrap();
    assert_eq!(document, by_digest);
    let blob = fixture.set.blob(&document.digest).unwrap();
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut blob.open(3, &StopToken::never()).unwrap(), &mut bytes).unwrap();
    assert_eq!(bytes, document.bytes[3..]);
    assert_eq!(fixture.set.tags("registry.example/a"), ["1"]);

    std::fs::remove_file(fixture.settings.directories[0].join("a.tar")).unwrap();
    fixture.wait("the first image to go", |report| report.images.len() == 1);
    assert!(!fixture.set.protects(&["registry.example/a:1".into()]));
    assert!(matches!(fixture.set.manifest("registry.example/a", "1"), Err(LookupError::Unknown(_))));
    assert!(blob.open(0, &StopToken::never()).is_err(), "a removed archive is not served");
}

#[test]
fn unchanged_archive_is_not_read_again_after_a_restart() {
    let fixture = Fixture::new();
    let content = image("registry.example/a:1", "one");
    fixture.put("a.tar", &content);
    let fixture = fixture.start();
    fixture.wait("the image", |report| report.images.len() == 1);
    assert!(fixture.set.bytes_read() >= content.len() as u64);
    let index = fixture.settings.index.clone();
    let written = || std::fs::metadata(&index).map(|meta| meta.modified().unwrap()).ok();
    fixture.wait("the index", |_| written().is_some());
    let before = written();

    let fixture = fixture.restart();
    fixture.wait("the image after the restart", |report| report.images.len() == 1 && report.complete);
    assert_eq!(fixture.lookup("registry.example/a:1"), SetLookup::Available);
    assert_eq!(fixture.set.bytes_read(), 0);
    assert_eq!(written(), before, "the index is written once");
}

#[test]
fn damaged_archive_is_named_and_others_are_offered() {
    let fixture = Fixture::new();
    let mut damaged = image("registry.example/bad:1", "content of a layer");
    let offset = damaged.windows(7).position(|bytes| bytes == b"content").unwrap();
    damaged[offset] ^= 1;
    fixture.put("bad.tar", &damaged);
    let whole = image("registry.example/cut:1", "layer");
    fixture.put("cut.tar", &whole[..whole.len() / 2]);
    fixture.put("good.tar", &image("registry.example/good:1", "one"));
    fixture.put("text.tar", b"no archive");
    let fixture = fixture.start();
    let report = fixture.wait("all archives", |report| report.complete);
    assert_eq!(
        report.images.iter().map(|image| image.name.as_str()).collect::<Vec<_>>(),
        ["registry.example/good:1"]
    );
    let SetLookup::Damaged(reason) = fixture.lookup("registry.example/bad:1") else {
        panic!("not reported as damaged")
    };
    assert!(reason.contains("bad.tar") && reason.contains("sha256:"), "{reason}");
    let faults: Vec<_> = report
        .archives
        .iter()
        .filter(|archive| !archive.faults.is_empty())
        .map(|archive| archive.path.rsplit('/').next().unwrap())
        .collect();
    assert_eq!(faults, ["bad.tar", "cut.tar", "text.tar"]);
    let problems = fixture.set.problems();
    assert_eq!(problems, report.problems);
    let problem_count =
        |file: &str| problems.iter().filter(|text| text.contains(&format!("/{file}: "))).count();
    assert_eq!(
        ["bad.tar", "cut.tar", "good.tar", "text.tar"].map(problem_count),
        [2, 1, 0, 1],
        "{problems:?}"
    );
    assert!(
        fixture
            .events
            .try_iter()
            .any(|event| event.reason == "ImageArchiveFault" && event.message.contains("bad.tar"))
    );
    fixture.put("bad.tar", &image("registry.example/bad:1", "content of a layer"));
    fixture.wait("the repaired image", |report| report.images.len() == 2);
}

#[test]
fn archive_that_was_replaced_is_served_only_after_it_was_read_again() {
    let fixture = Fixture::new();
    fixture.put("a.tar", &image("registry.example/a:1", "one"));
    let fixture = fixture.start();
    fixture.wait("the image", |report| report.images.len() == 1);
    let first = fixture.set.manifest("registry.example/a", "1").unwrap();
    let blob = fixture.set.blob(&first.digest).unwrap();
    fixture.put("a.tar", &image("registry.example/a:1", "another"));
    assert!(blob.open(0, &StopToken::never()).is_err());
    fixture.wait("the new image", |_| {
        fixture.set.manifest("registry.example/a", "1").is_ok_and(|new| new.digest != first.digest)
    });
}

#[test]
fn reading_is_interrupted_by_the_end_of_the_agent() {
    // On a busy machine the reading may have ended before. Without an interruption none is ever unread.
    assert!((0..20).any(|_| is_reading_interrupted()), "each archive was read to its end");
}

/// Whether the archive that was being read is to be read again after the end of the thread. Without an
/// interruption it is read to its end, and only the archives behind it are not.
fn is_reading_interrupted() -> bool {
    let fixture = Fixture::new();
    let large = testing::tar(&[("large".to_owned(), vec![0; 64 << 20])]);
    for number in 0..4 {
        fixture.put(&format!("{number}.tar"), &large);
    }
    let mut fixture = fixture.start();
    let before = fixture.wait("a reading", |report| {
        let mut states = report.archives.iter().map(|archive| archive.state.as_str());
        states.clone().any(|state| state == "reading")
            || (!report.archives.is_empty() && states.all(|state| state != "waiting"))
    });
    let stopped = fixture.running.take().unwrap().stop(Duration::from_secs(60));
    assert_eq!(stopped, crate::util::threads::Stopped::Joined);
    let Some(read) = before.archives.iter().find(|archive| archive.state == "reading") else { return false };
    let after = fixture.set.report();
    after.archives.iter().any(|archive| archive.path == read.path && archive.state == "waiting")
}

#[test]
fn pulls_leave_nothing_behind_when_they_end() {
    let fixture = Fixture::new();
    fixture.put("a.tar", &image("registry.example/a:1", "one"));
    let fixture = fixture.start();
    fixture.wait("the image", |report| report.complete);
    for _ in 0..100 {
        assert_eq!(fixture.lookup("registry.example/a:1"), SetLookup::Available);
        assert_eq!(fixture.lookup("registry.example/b:1"), SetLookup::NotInSet);
    }
    assert_eq!(fixture.set.shared.waiting(), 0);
}

#[test]
fn archive_is_read_again_later_unless_its_data_are_at_fault() {
    let (mut set, now) = (set_of(&[("a", 1), ("b", 1)]), Instant::now());
    assert!(set.get_mut(&key("a")).unwrap().fail("EIO".into(), true, now));
    assert!(set.get_mut(&key("b")).unwrap().fail("not an archive".into(), false, now));
    assert_eq!(set.next_retry(), Some(now + Duration::from_secs(10)));
    set.release(now + Duration::from_secs(9));
    assert_eq!(set.next(&names(&[])), None);
    let later = now + Duration::from_secs(10);
    set.release(later);
    assert_eq!((set.next(&names(&[])), set.next_retry()), (Some(key("a")), None));
    set.get_mut(&key("a")).unwrap().fail("EIO".into(), true, later);
    assert_eq!(set.next_retry(), Some(later + Duration::from_secs(20)));
    set.retry_all(later);
    set.release(later);
    set.get_mut(&key("a")).unwrap().state = State::Reading;
    assert_eq!(set.next(&names(&[])), Some(key("b")), "a request reads all again");
}

#[test]
fn archives_stay_while_their_directory_cannot_be_read() {
    let fixture = Fixture::new();
    fixture.put("a.tar", &image("registry.example/a:1", "one"));
    let fixture = fixture.start();
    fixture.wait("the image", |report| report.complete && report.images.len() == 1);
    let (directory, away) = (&fixture.settings.directories[0], fixture.dir.path().join("away"));
    // In the place of the directory, the link is an endless loop.
    std::os::unix::fs::symlink("images.d", &away).unwrap();
    let exchange = || {
        let (cwd, flags) = (rustix::fs::CWD, rustix::fs::RenameFlags::EXCHANGE);
        rustix::fs::renameat_with(cwd, directory, cwd, &away, flags).unwrap();
    };
    exchange();
    let report = fixture.wait("the problem", |report| !report.problems.is_empty());
    assert_eq!(report.images.len(), 1, "{report:?}");
    assert!(fixture.set.protects(&["registry.example/a:1".into()]));
    let before = fixture.set.bytes_read();
    exchange();
    fixture.wait("the end of the problem", |report| report.problems.is_empty());
    assert_eq!((fixture.set.report().images.len(), fixture.set.bytes_read()), (1, before));
}

#[test]
fn layout_whose_blobs_arrive_last_is_found() {
    let fixture = Fixture::new().start();
    fixture.wait("the first list", |report| report.complete);
    let layout = fixture.settings.directories[0].join("layout");
    std::fs::create_dir(&layout).unwrap();
    let pause = || {
        let _ = StopToken::never().wait(Duration::from_millis(500));
    };
    // Longer than changes are collected.
    pause();
    let entries =
        testing::image(&format!("linux/{}", Platform::of_this_machine().architecture), &["content"]);
    let mut files = testing::layout(&[("registry.example/slow:1", &entries)]);
    files.sort_by_key(|(name, _)| name.starts_with("blobs/"));
    let blobs = files.iter().position(|(name, _)| name.starts_with("blobs/")).unwrap();
    let write = |(name, content): &(String, Vec<u8>)| {
        let path = layout.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    };
    files[..blobs].iter().for_each(write);
    fixture.wait("the faults", |report| report.archives.iter().any(|archive| !archive.faults.is_empty()));
    for file in &files[blobs..] {
        pause();
        write(file);
    }
    let report = fixture.wait("the image", |report| report.images.len() == 1);
    assert_eq!(report.archives[0].faults, [""; 0]);
}

#[test]
fn archives_of_a_disk_that_was_absent_at_a_start_are_not_read_again() {
    let mut fixture = Fixture::new();
    let other = fixture.dir.path().join("other.d");
    std::fs::create_dir(&other).unwrap();
    fixture.settings.directories.push(other.clone());
    fixture.put("a.tar", &image("registry.example/a:1", "one"));
    let mut fixture = fixture.start();
    let index = fixture.settings.index.clone();
    let saved = |file: &str| std::fs::read_to_string(&index).is_ok_and(|text| text.contains(file));
    fixture.wait("the index", |_| saved("a.tar"));
    drop(fixture.running.take());
    let (disk, away) = (fixture.settings.directories[0].clone(), fixture.dir.path().join("away"));
    std::fs::rename(&disk, &away).unwrap();
    std::fs::create_dir(&disk).unwrap();
    std::fs::write(other.join("b.tar"), image("registry.example/b:1", "two")).unwrap();
    // The index is written without the disk.
    let mut fixture = fixture.start();
    fixture.wait("the other image", |report| report.complete && report.images.len() == 1 && saved("b.tar"));
    drop(fixture.running.take());
    std::fs::remove_dir(&disk).unwrap();
    std::fs::rename(&away, &disk).unwrap();
    let fixture = fixture.start();
    fixture.wait("both images", |report| report.complete && report.images.len() == 2);
    assert_eq!(fixture.set.bytes_read(), 0);
}

#[test]
fn registry_that_cannot_listen_is_a_problem_until_it_can() {
    let set = ImageSet::new(&[]);
    set.report_no_registry("the port is in use");
    assert_eq!(set.problems(), ["the port is in use"]);
    set.set_registry("127.0.0.1:1");
    assert_eq!(set.problems(), [""; 0]);
}
