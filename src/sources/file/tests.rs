use std::os::unix::fs::symlink;

use super::*;
use crate::model::event::{Event, EventSink, Regarding};
use crate::model::pod::QosClass;
use crate::sources::decode::{self, Lists};
use crate::sources::defaults;
use crate::sources::fingerprint::{self, RELEASES};
use crate::util::mailbox::{Inbox, mailbox, replace};
use crossbeam_channel::Receiver;

const LIMIT: Duration = Duration::from_secs(60);

fn manifest(name: &str, image: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers:\n  - name: c\n    image: {image}\n"
    )
}

fn names(set: &SourceSet) -> Option<Vec<String>> {
    Some(set.pods.as_ref()?.iter().map(|pod| pod.name().to_owned()).collect())
}

fn some(names: &[&str]) -> Option<Vec<String>> {
    Some(names.iter().map(|name| (*name).to_owned()).collect())
}

fn empty() -> SourceSet {
    SourceSet { pods: Some(vec![]), ..SourceSet::default() }
}

fn nowhere() -> Store {
    Store::new(None, SourceName::File, "n")
}

/// A watched path without a thread: every scan is one call.
struct Fixture {
    directory: tempfile::TempDir,
    files: Files,
    watch: Watch,
    clock: i64,
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::new(directory.path(), "n", nowhere());
        let watch = Watch::new(directory.path(), Wake::new().unwrap());
        Fixture { directory, files, watch, clock: 0 }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// One scan; returns the messages of the notices without the directory.
    fn scan(&mut self) -> Vec<String> {
        self.clock += 1;
        let notices = self.files.scan(&mut self.watch, Timestamp::from_second(self.clock).unwrap());
        let prefix = format!("{}/", self.directory.path().display());
        notices.into_iter().map(|notice| notice.message.replace(&prefix, "")).collect()
    }

    fn names(&self) -> Option<Vec<String>> {
        names(&self.files.set())
    }

    /// One turn of the thread, with the changes that inotify has reported so far.
    fn turn(&mut self) -> Vec<String> {
        // The changes are read first, so it does not matter that the deadline has passed.
        self.watch.wait(Instant::now());
        self.watch.arm();
        self.scan()
    }

    /// Writes `text` to a manifest, in one of the ways in which files are written.
    fn rewrite(&self, method: WriteMethod, name: &str, text: &str) {
        match method {
            WriteMethod::Truncated => {}
            WriteMethod::Removed => std::fs::remove_file(self.path(name)).unwrap(),
            WriteMethod::MovedAway => std::fs::rename(self.path(name), self.path(".backup")).unwrap(),
            WriteMethod::Replaced => {
                self.write(".new", text);
                return std::fs::rename(self.path(".new"), self.path(name)).unwrap();
            }
            WriteMethod::Unlinked => {
                self.write(".new", text);
                std::fs::remove_file(self.path(name)).unwrap();
                return std::fs::rename(self.path(".new"), self.path(name)).unwrap();
            }
        }
        self.write(name, text);
    }

    /// The only pod's UID and its incarnation.
    fn only(&self) -> (PodUid, u64) {
        let set = self.files.set();
        let pods = set.pods.unwrap();
        assert_eq!((pods.len(), set.incarnations.len()), (1, 1));
        let uid = pods[0].uid().clone();
        let number = set.incarnations[&uid];
        (uid, number)
    }
}

/// The ways to write a manifest again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WriteMethod {
    /// The file is overwritten.
    Truncated,
    /// Another file is renamed over it.
    Replaced,
    /// The file is renamed, then created.
    MovedAway,
    /// The file is removed, then created.
    Removed,
    /// The file is removed, then another file is renamed to its name.
    Unlinked,
}

#[test]
fn only_removal_of_a_manifest_restarts_its_pod() {
    for (method, restarts) in [
        (WriteMethod::Truncated, false),
        (WriteMethod::Replaced, false),
        (WriteMethod::MovedAway, false),
        (WriteMethod::Removed, true),
        (WriteMethod::Unlinked, true),
    ] {
        let mut fixture = Fixture::new();
        fixture.watch.arm();
        fixture.write("a.yaml", manifest("a", "i:1"));
        fixture.turn();
        let (uid, first) = fixture.only();
        let pods = fixture.files.set().pods.unwrap();

        fixture.rewrite(method, "a.yaml", &manifest("a", "i:1"));
        fixture.turn();
        let (same, second) = fixture.only();
        assert_eq!((&same, second != first), (&uid, restarts), "{method:?}");
        let shared = std::ptr::eq(fixture.files.set().pods.unwrap()[0].object(), pods[0].object());
        assert_eq!(shared, !restarts, "{method:?}: a restarted pod has new marks");
        // The pod is restarted once.
        fixture.turn();
        assert_eq!(fixture.only(), (uid.clone(), second), "{method:?}");

        // Other content is always another pod.
        fixture.rewrite(method, "a.yaml", &manifest("a", "i:2"));
        fixture.turn();
        let edited = fixture.only();
        assert!(edited.0 != uid && edited.1 != second, "{method:?}");

        // An invalid file keeps the last valid version; if it was removed, that version is
        // restarted when the file is repaired.
        fixture.rewrite(method, "a.yaml", "{");
        fixture.turn();
        assert_eq!(fixture.only(), edited, "{method:?}");
        assert!(fixture.files.set().problems[0].pods_continue);
        fixture.rewrite(WriteMethod::Truncated, "a.yaml", &manifest("a", "i:2"));
        fixture.turn();
        assert_eq!((fixture.only().0, fixture.only().1 != edited.1), (edited.0, restarts), "{method:?}");
    }
}

#[test]
fn pods_of_removed_manifest_run_until_new_one_is_complete() {
    use std::io::Write;
    let mut fixture = Fixture::new();
    fixture.watch.arm();
    fixture.write("a.yaml", manifest("a", "i:1"));
    fixture.turn();
    let first = fixture.only();
    std::fs::remove_file(fixture.path("a.yaml")).unwrap();
    let mut file = File::create(fixture.path("a.yaml")).unwrap();
    fixture.turn();
    assert_eq!(fixture.only(), first);
    file.write_all(manifest("a", "i:1").as_bytes()).unwrap();
    drop(file);
    fixture.turn();
    let second = fixture.only();
    assert!(second.0 == first.0 && second.1 != first.1);
    // The removal was noticed: the pod has a new incarnation, even if the set without it was not posted.
    std::fs::remove_file(fixture.path("a.yaml")).unwrap();
    fixture.turn();
    assert_eq!(fixture.files.set(), empty());
    fixture.write("a.yaml", manifest("a", "i:1"));
    fixture.turn();
    let third = fixture.only();
    assert!(third.0 == first.0 && ![first.1, second.1].contains(&third.1));
}

#[test]
fn only_pods_of_the_removed_manifest_restart() {
    let mut fixture = Fixture::new();
    fixture.watch.arm();
    let fixed = manifest("f", "i:1").replace("metadata: {", "metadata: {uid: fixed, ");
    fixture.write("a.yaml", format!("{}---\n{}", manifest("a", "i:1"), manifest("b", "i:1")));
    fixture.write("c.yaml", manifest("c", "i:1"));
    fixture.write("f.yaml", &fixed);
    fixture.turn();
    let before = fixture.files.set();
    // One of two pods is invalid now: it continues to run. A pod with its own UID moves to another file.
    let half = format!("{}---\n{}", manifest("a", "i:1"), manifest("b", "''"));
    fixture.rewrite(WriteMethod::Removed, "a.yaml", &half);
    std::fs::rename(fixture.path("f.yaml"), fixture.path("g.yaml")).unwrap();
    fixture.turn();
    let after = fixture.files.set();
    let restarted: Vec<&str> = after
        .pods
        .iter()
        .flatten()
        .filter(|pod| before.incarnations[pod.uid()] != after.incarnations[pod.uid()])
        .map(Pod::name)
        .collect();
    assert_eq!((after.incarnations.len(), restarted), (4, vec!["a-n"]));
}

#[test]
fn an_unknown_field_is_reported_once_and_listed_until_it_is_removed() {
    let mut fixture = Fixture::new();
    let good = manifest("web", "a");
    fixture.write("web.yaml", good.replace("    image", "    comand: [x]\n    image"));
    let notices = fixture.scan();
    assert!(notices[0].contains("spec.containers[0].comand: unknown field, ignored"), "{notices:?}");
    assert_eq!(fixture.names(), some(&["web-n"]));
    let problems = fixture.files.set().problems;
    assert_eq!((problems.len(), problems[0].ignored, problems[0].pods_continue), (1, true, false));
    assert!(fixture.scan().is_empty());
    fixture.write("web.yaml", good);
    assert!(fixture.scan().is_empty());
    assert!(fixture.files.set().problems.is_empty());
}

#[test]
fn invalid_files_do_not_affect_valid_ones() {
    let mut fixture = Fixture::new();
    fixture.write("b.yaml", manifest("good", "i:1"));
    fixture.write(".hidden.yaml", manifest("hidden", "i:1"));
    fixture.write("empty.yaml", "");
    fixture.write("comment.yaml", "# nothing here\n");
    fixture.write("binary.yaml", [0, 159, 146, 150, 255]);
    fixture.write(
        "bomb.yaml",
        "a: &a [x,x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\n\
        c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\n\
        e: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e,*e,*e]\n",
    );
    fixture.write("half.yaml", "apiVersion: v1\nkind: Pod\nmetadata:\n  name: [");
    File::create(fixture.path("huge.yaml")).unwrap().set_len(MAX_MANIFEST_BYTES as u64 + 1).unwrap();
    std::fs::create_dir(fixture.path("directory.yaml")).unwrap();
    symlink("/nowhere/at/all", fixture.path("dangling.yaml")).unwrap();
    symlink("loop.yaml", fixture.path("loop.yaml")).unwrap();
    symlink("/dev/zero", fixture.path("zero.yaml")).unwrap();
    let fifo = fixture.path("fifo.yaml");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(fixture.path("socket.yaml")).unwrap();
    fixture.write("real", manifest("linked", "i:1"));
    std::fs::rename(fixture.path("real"), fixture.path(".real")).unwrap();
    symlink(".real", fixture.path("link.yaml")).unwrap();

    let notices = fixture.scan();
    assert_eq!(fixture.names(), some(&["good-n", "linked-n"]));
    let reported: Vec<&str> = notices.iter().filter_map(|line| line.split('.').next()).collect();
    assert_eq!(
        reported,
        ["binary", "bomb", "comment", "dangling", "empty", "fifo", "half", "huge", "loop", "socket", "zero",]
    );
    let set = fixture.files.set();
    assert_eq!(set.problems.len(), reported.len());
    assert!(set.problems.iter().all(|problem| !problem.pods_continue));
    assert!(notices[5].contains("is a named pipe; only regular files are read"), "{}", notices[5]);
    // Without a change nothing is reported again, and the pods are the same objects.
    assert_eq!(fixture.scan(), Vec::<String>::new());
    assert_eq!(fixture.files.set(), set);
}

#[test]
fn a_broken_manifest_keeps_its_pod() {
    let mut fixture = Fixture::new();
    fixture.write("a.yaml", manifest("a", "i:1"));
    assert_eq!(fixture.scan(), Vec::<String>::new());
    let good = fixture.files.set();
    assert_eq!(good.problems, []);

    fixture.write("a.yaml", manifest("a", "[broken"));
    let notices = fixture.files.scan(&mut fixture.watch, Timestamp::from_second(7).unwrap());
    assert_eq!((notices.len(), notices[0].carried_over.len()), (1, 1));
    let set = fixture.files.set();
    assert_eq!(set.pods, good.pods);
    assert!(set.problems[0].pods_continue && set.problems[0].line.is_some());
    assert_eq!(set.problems[0].since, Timestamp::from_second(7).unwrap());

    // Every later list keeps the problem; another fault is reported again, but the problem's time stays.
    assert_eq!(fixture.scan(), Vec::<String>::new());
    fixture.write("a.yaml", manifest("a", "i:1\n    imagePullPolicy: Maybe"));
    let notices = fixture.scan();
    assert_eq!(
        notices,
        ["a.yaml:8: spec.containers[0].imagePullPolicy: Unsupported value: \"Maybe\": \
         supported values: \"Always\", \"IfNotPresent\", \"Never\""]
    );
    assert_eq!(fixture.files.set().pods, good.pods);
    assert_eq!(fixture.files.set().problems[0].since, Timestamp::from_second(7).unwrap());

    // Truncated to zero bytes: the pod stays. Repaired without a change: the same pod. Deleted: removed.
    fixture.write("a.yaml", "");
    assert_eq!(fixture.scan(), ["a.yaml: the manifest is empty"]);
    assert_eq!(fixture.files.set().pods, good.pods);
    fixture.write("a.yaml", manifest("a", "i:1"));
    assert_eq!(fixture.scan(), Vec::<String>::new());
    assert_eq!(fixture.files.set().pods.unwrap()[0].uid(), good.pods.unwrap()[0].uid());
    fixture.write("a.yaml", "{");
    fixture.scan();
    std::fs::remove_file(fixture.path("a.yaml")).unwrap();
    assert_eq!(fixture.scan(), Vec::<String>::new());
    assert_eq!(fixture.files.set(), empty());
}

#[test]
fn several_documents_are_several_pods() {
    let mut fixture = Fixture::new();
    let both = format!("{}---\n{}", manifest("a", "i:1"), manifest("b", "i:1"));
    fixture.write("x.yaml", &both);
    fixture.scan();
    assert_eq!(fixture.names(), some(&["a-n", "b-n"]));
    // One becomes invalid: its pod stays unchanged, an edit of the other takes effect.
    let before = fixture.files.set().pods.unwrap();
    fixture.write("x.yaml", format!("{}---\n{}", manifest("a", "i:2"), manifest("b", "''")));
    assert_eq!(fixture.scan(), ["x.yaml:15: spec.containers[0].image: Required value"]);
    let after = fixture.files.set().pods.unwrap();
    assert_eq!(fixture.names(), some(&["a-n", "b-n"]));
    assert_ne!(before[0].uid(), after[0].uid());
    assert_eq!(before[1], after[1]);
    fixture.write("x.yaml", manifest("b", "i:1"));
    fixture.scan();
    assert_eq!(fixture.names(), some(&["b-n"]));
}

#[test]
fn last_of_two_files_with_the_same_pod_is_used() {
    let mut fixture = Fixture::new();
    fixture.write("a.yaml", manifest("web", "i:a"));
    fixture.write("b.yaml", manifest("web", "i:b"));
    let notices = fixture.scan();
    assert_eq!(notices, ["a.yaml: metadata.name: pod default/web-n is also in b.yaml, which counts"]);
    let set = fixture.files.set();
    assert_eq!(set.pods.as_ref().unwrap()[0].containers()[0].image.as_deref(), Some("i:b"));
    assert_eq!((set.pods.unwrap().len(), set.problems.len()), (1, 1));
    assert_eq!(fixture.scan(), Vec::<String>::new());
    std::fs::remove_file(fixture.path("b.yaml")).unwrap();
    assert_eq!(fixture.scan(), Vec::<String>::new());
    let set = fixture.files.set();
    assert_eq!(set.pods.unwrap()[0].containers()[0].image.as_deref(), Some("i:a"));
    assert_eq!(set.problems, []);

    let fixed = |name: &str| manifest(name, "i:1").replace("metadata: {", "metadata: {uid: one, ");
    fixture.write("c.yaml", fixed("c"));
    fixture.write("d.yaml", fixed("d"));
    assert_eq!(fixture.scan(), ["c.yaml: metadata.name: UID one is also in d.yaml, which counts"]);
}

#[test]
fn missing_path_is_an_empty_set_and_unreadable_one_unknown() {
    let mut fixture = Fixture::new();
    let inner = fixture.path("inner");
    fixture.files = Files::new(&inner, "n", nowhere());
    assert_eq!(fixture.files.set().pods, None, "the set is unknown before the first scan");
    fixture.scan();
    assert_eq!(fixture.names(), some(&[]));

    std::fs::create_dir(&inner).unwrap();
    fixture.write("inner/a.yaml", manifest("a", "i:1"));
    fixture.scan();
    assert_eq!(fixture.names(), some(&["a-n"]));

    // Root may list every directory, so the path becomes a loop of links instead.
    std::fs::rename(&inner, fixture.path("away")).unwrap();
    symlink("inner", &inner).unwrap();
    let notices = fixture.scan();
    assert_eq!(notices.len(), 1);
    assert_eq!(fixture.names(), some(&["a-n"]));
    assert!(fixture.files.set().problems[0].pods_continue);
    assert_eq!(fixture.scan(), Vec::<String>::new());

    std::fs::remove_file(&inner).unwrap();
    std::fs::rename(fixture.path("away"), &inner).unwrap();
    fixture.scan();
    assert_eq!((fixture.names(), fixture.files.set().problems.len()), (some(&["a-n"]), 0));
    std::fs::remove_dir_all(&inner).unwrap();
    fixture.scan();
    assert_eq!(fixture.names(), some(&[]));

    let unreadable = fixture.path("loop");
    symlink("loop", &unreadable).unwrap();
    fixture.files = Files::new(&unreadable, "n", nowhere());
    fixture.scan();
    assert_eq!(fixture.names(), None, "a path that was never read is not an empty one");
    assert_eq!(fixture.files.set().problems.len(), 1);
}

#[test]
fn single_file_is_accepted_as_source() {
    let mut fixture = Fixture::new();
    fixture.write("pod.yaml", manifest("a", "i:1"));
    fixture.files = Files::new(&fixture.path("pod.yaml"), "n", nowhere());
    fixture.scan();
    assert_eq!(fixture.names(), some(&["a-n"]));
    fixture.write("pod.yaml", "]");
    assert_eq!(fixture.scan().len(), 1);
    assert_eq!(fixture.names(), some(&["a-n"]));
}

#[test]
fn an_unchanged_file_is_not_read_again() {
    let fixture = Fixture::new();
    let now = Timestamp::now();
    fixture.write("a", "x");
    let Ok(Reading::Content(bytes, stamp)) = read(&fixture.path("a"), None) else { panic!() };
    assert_eq!(bytes, b"x");
    assert!(matches!(read(&fixture.path("a"), Some(stamp)), Ok(Reading::Unchanged)));
    assert!(stamp.is_fresh(now));
    assert!(!stamp.is_fresh(Timestamp::now() + Duration::from_secs(5)));
    fixture.write("a", "yy");
    assert!(matches!(read(&fixture.path("a"), Some(stamp)), Ok(Reading::Content(..))));
    assert!(matches!(read(&fixture.path("b"), None), Ok(Reading::Gone)));
}

/// A test bench whose agent can be restarted.
struct RestartFixture {
    fixture: Fixture,
    state: tempfile::TempDir,
}

impl RestartFixture {
    fn new() -> Self {
        let mut restarts = RestartFixture { fixture: Fixture::new(), state: tempfile::tempdir().unwrap() };
        restarts.start();
        restarts
    }

    /// The set without the marks, which contain the time of each start, and without the numbers of
    /// incarnations, which each start assigns.
    fn set(&self) -> SourceSet {
        let set = self.fixture.files.set();
        let bare = |pods: Vec<Pod>| pods.iter().map(|pod| Pod::from(merge::unmarked(pod))).collect();
        SourceSet { pods: set.pods.map(bare), incarnations: Incarnations::new(), ..set }
    }

    /// A new agent that has not scanned yet.
    fn start(&mut self) {
        let root = self.fixture.files.root.clone();
        let store = Store::new(Some(self.state.path()), SourceName::File, "n");
        self.fixture.files = Files::new(&root, "n", store);
        self.fixture.watch = Watch::new(&root, Wake::new().unwrap());
    }

    fn turn(&mut self) -> Vec<String> {
        let notices = self.fixture.scan();
        self.fixture.files.save(&StopToken::never());
        notices
    }

    fn restart(&mut self) -> Vec<String> {
        self.start();
        self.turn()
    }

    fn records(&self) -> Vec<(PathBuf, u64)> {
        let entries = std::fs::read_dir(self.state.path()).unwrap().map(Result::unwrap);
        let mut records: Vec<_> =
            entries.map(|entry| (entry.path(), entry.metadata().unwrap().ino())).collect();
        records.sort();
        records
    }
}

#[test]
fn a_manifest_that_broke_before_a_restart_keeps_its_pod() {
    let mut agent = RestartFixture::new();
    agent.fixture.write("a.yaml", manifest("a", "i:1"));
    agent.fixture.write("b.yaml", manifest("b", "i:1"));
    agent.turn();
    let good = agent.set();
    let records = agent.records();
    assert_eq!(records.len(), 2);
    // No record is written again, neither later nor by a start that finds no changes.
    agent.turn();
    agent.restart();
    assert_eq!((agent.records(), agent.set()), (records.clone(), good.clone()));

    for broken in ["", "kind: [", "apiVersion: v1\nkind: Service\n", &manifest("UP", "i:1")] {
        agent.fixture.write("a.yaml", broken);
        let notices = agent.restart();
        assert_eq!(notices.len(), 1);
        assert!(notices[0].starts_with("a.yaml:"), "{notices:?}");
        let set = agent.set();
        assert_eq!(set.pods, good.pods, "the same pods, UIDs included");
        assert_eq!(set.problems.len(), 1);
        assert!(set.problems[0].pods_continue && set.problems[0].since.as_second() == agent.fixture.clock);
        assert_eq!((agent.turn(), agent.records()), (vec![], records.clone()));
    }
    // A file that cannot be read at all is treated like an invalid one.
    std::fs::remove_file(agent.fixture.path("a.yaml")).unwrap();
    symlink("/nowhere/at/all", agent.fixture.path("a.yaml")).unwrap();
    agent.restart();
    assert_eq!(agent.set().pods, good.pods);
    std::fs::remove_file(agent.fixture.path("a.yaml")).unwrap();

    // Repaired without a change, while the pod runs: no change. With an edit: another pod.
    agent.fixture.write("a.yaml", manifest("a", "i:1"));
    assert_eq!((agent.turn(), agent.set()), (vec![], good.clone()));
    agent.fixture.write("a.yaml", "{");
    agent.restart();
    agent.fixture.write("a.yaml", manifest("a", "i:2"));
    agent.turn();
    let edited = agent.set();
    assert_ne!(edited.pods.as_ref().unwrap()[0].uid(), good.pods.unwrap()[0].uid());
    agent.fixture.write("a.yaml", "{");
    agent.restart();
    assert_eq!(agent.set().pods, edited.pods, "the newest good version counts");
}

#[test]
fn a_partly_valid_file_keeps_its_pods() {
    let mut agent = RestartFixture::new();
    agent.fixture.write("x.yaml", format!("{}---\n{}", manifest("a", "i:1"), manifest("b", "i:1")));
    agent.turn();
    agent.fixture.write("x.yaml", format!("{}---\n{}", manifest("a", "i:2"), manifest("b", "''")));
    agent.turn();
    let mixed = agent.set().pods;
    agent.restart();
    assert_eq!(agent.set().pods, mixed);
    agent.fixture.write("x.yaml", "]");
    agent.restart();
    assert_eq!(agent.set().pods, mixed);
    assert_eq!(agent.records().len(), 1);
}

#[test]
fn manifest_deleted_while_agent_was_stopped_has_no_pod() {
    let mut agent = RestartFixture::new();
    for name in ["a", "b", "c"] {
        agent.fixture.write(&format!("{name}.yaml"), manifest(name, "i:1"));
    }
    agent.turn();
    assert_eq!(agent.records().len(), 3);
    std::fs::remove_file(agent.fixture.path("a.yaml")).unwrap();
    agent.turn();
    assert_eq!(agent.records().len(), 2);
    std::fs::remove_file(agent.fixture.path("b.yaml")).unwrap();
    agent.restart();
    assert_eq!((agent.fixture.names(), agent.records().len()), (some(&["c-n"]), 1));
    // It is written again, but invalid: that is a new file.
    agent.fixture.write("b.yaml", "{");
    agent.turn();
    agent.restart();
    assert_eq!(agent.fixture.names(), some(&["c-n"]));

    // A missing directory is an empty set, also at a start.
    std::fs::remove_dir_all(agent.fixture.directory.path()).unwrap();
    agent.restart();
    assert_eq!(agent.set(), empty());
    assert_eq!(agent.records(), []);
}

#[test]
fn a_path_that_cannot_be_listed_at_a_start_keeps_its_pods() {
    let mut agent = RestartFixture::new();
    let inner = agent.fixture.path("inner");
    std::fs::create_dir(&inner).unwrap();
    agent.fixture.files.root = inner.clone();
    agent.start();
    agent.fixture.write("inner/a.yaml", manifest("a", "i:1"));
    agent.turn();
    let good = agent.set();
    std::fs::rename(&inner, agent.fixture.path("away")).unwrap();
    symlink("inner", &inner).unwrap();
    assert_eq!(agent.restart().len(), 1);
    let set = agent.set();
    assert_eq!((set.pods, set.problems.len()), (good.pods.clone(), 1));
    assert!(set.problems[0].pods_continue);
    assert_eq!((agent.turn(), agent.records().len()), (vec![], 1));
    std::fs::remove_file(&inner).unwrap();
    std::fs::rename(agent.fixture.path("away"), &inner).unwrap();
    agent.turn();
    assert_eq!(agent.set(), good);
    std::fs::remove_file(inner.join("a.yaml")).unwrap();
    agent.turn();
    assert_eq!((agent.fixture.names(), agent.records().len()), (some(&[]), 0));
}

#[test]
fn damaged_store_does_not_prevent_start_of_pods() {
    let mut agent = RestartFixture::new();
    agent.fixture.write("a.yaml", manifest("a", "i:1"));
    agent.fixture.write("b.yaml", manifest("b", "i:1"));
    agent.turn();
    let good = agent.set();
    std::fs::write(agent.state.path().join("stray"), "x").unwrap();
    for (path, _) in agent.records() {
        std::fs::write(path, "{\"format\": \"coracle/last-good-manifest\", \"version\": 99}").unwrap();
    }
    // The valid file does not need its record, and writes a new one. The invalid one has none.
    agent.fixture.write("a.yaml", "{");
    agent.restart();
    assert_eq!(agent.fixture.names(), some(&["b-n"]));
    assert!(!agent.set().problems[0].pods_continue);
    agent.fixture.write("a.yaml", manifest("a", "i:1"));
    agent.turn();
    agent.fixture.write("a.yaml", "{");
    agent.fixture.write("b.yaml", "{");
    agent.restart();
    assert_eq!(agent.set().pods, good.pods);

    // The store itself was removed, and a file is at its path.
    let state = agent.state.path().to_owned();
    std::fs::remove_dir_all(&state).unwrap();
    std::fs::write(&state, "x").unwrap();
    agent.fixture.write("a.yaml", manifest("a", "i:1"));
    agent.restart();
    assert_eq!(agent.fixture.names(), some(&["a-n"]));
    std::fs::remove_file(&state).unwrap();
    agent.turn();
    assert_eq!(agent.records().len(), 1, "what failed is made up for");
}

#[test]
fn a_file_that_is_written_during_a_start_keeps_its_pod() {
    use std::io::Write;
    let mut agent = RestartFixture::new();
    agent.fixture.write("a.yaml", manifest("a", "i:1"));
    agent.turn();
    let good = agent.set();
    agent.start();
    agent.fixture.watch.arm();
    let mut file = File::create(agent.fixture.path("a.yaml")).unwrap();
    file.write_all(b"apiVersion: v1\n").unwrap();
    agent.fixture.watch.wait(Instant::now() + Duration::from_millis(1));
    agent.turn();
    assert_eq!(agent.set().pods, good.pods);
    assert_eq!(agent.records().len(), 1);
}

/// The real thread with a real directory; its neighbors are only channels.
struct ThreadFixture {
    directory: tempfile::TempDir,
    inbox: Inbox<SourceName, SourceSet>,
    events: Receiver<Box<Event>>,
    _deaths: Receiver<threads::Died>,
    running: Running,
}

impl ThreadFixture {
    fn new(below: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (post, inbox) = mailbox(replace);
        let (sink, events) = EventSink::new();
        let (on_death, deaths) = crossbeam_channel::bounded(1);
        // No periodic list happens: all changes come from inotify.
        let settings = FileSettings { path: directory.path().join(below), check: CHECK_MAX };
        let store = Store::new(None, SourceName::File, "Node");
        let deps = Deps { post, events: sink, on_death };
        let running = spawn("Node", &settings, PodsAtStart::default(), store, &deps).unwrap();
        ThreadFixture { directory, inbox, events, _deaths: deaths, running }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn next(&self) -> SourceSet {
        self.inbox.bell().recv_timeout(LIMIT).expect("a set in time");
        self.inbox.drain().remove(&SourceName::File).unwrap()
    }
}

#[test]
fn the_thread_follows_the_directory() {
    let live = ThreadFixture::new("");
    assert_eq!(live.next(), empty());

    // As an editor writes: a swap file, a temporary file, a rename. One change. A file that is not
    // hidden counts as another manifest, if the thread scans before the rename.
    std::fs::write(live.path(".a.yaml.swp"), "x").unwrap();
    std::fs::write(live.path(".a.yaml.tmp"), manifest("a", "i:1")).unwrap();
    std::fs::rename(live.path(".a.yaml.tmp"), live.path("a.yaml")).unwrap();
    let set = live.next();
    assert_eq!(names(&set), some(&["a-node"]));
    let first = set.pods.unwrap()[0].clone();

    std::fs::write(live.path(".new"), manifest("a", "i:2")).unwrap();
    std::fs::rename(live.path(".new"), live.path("a.yaml")).unwrap();
    let set = live.next();
    assert_eq!((names(&set), set.problems.len()), (some(&["a-node"]), 0));
    assert_ne!(set.pods.unwrap()[0].uid(), first.uid());

    std::fs::write(live.path("a.yaml"), "kind: [").unwrap();
    let set = live.next();
    assert_eq!(names(&set), some(&["a-node"]));
    assert!(set.problems[0].pods_continue);
    let event = live.events.recv_timeout(LIMIT).unwrap();
    assert_eq!(event.reason, "InvalidManifest");
    assert!(matches!(event.regarding, Regarding::Manifest { source } if source.ends_with("a.yaml")));
    let event = live.events.recv_timeout(LIMIT).unwrap();
    assert!(matches!(event.regarding, Regarding::Pod { name, .. } if name == "a-node"));

    std::fs::remove_file(live.path("a.yaml")).unwrap();
    assert_eq!(live.next(), empty());
    assert_eq!(live.running.stop(LIMIT), threads::Stopped::Joined);
}

#[test]
fn the_thread_waits_for_a_slow_writer() {
    use std::io::Write;
    // As in `watch`: a scan does not wait for a writer that pauses for this long.
    const HOLD: Duration = Duration::from_secs(2);
    let text = format!("{}---\n{}", manifest("a", "i:1"), manifest("b", "i:1"));
    let (start, end) = text.split_at(manifest("a", "i:1").len());
    for round in 1..=5 {
        let live = ThreadFixture::new("");
        live.next();
        let begun = Instant::now();
        let mut file = File::create(live.path("x.yaml")).unwrap();
        file.write_all(start.as_bytes()).unwrap();
        // Well after the settling time, but the file is still open: the first half is a whole pod.
        let early = live.inbox.bell().recv_timeout(Duration::from_millis(250));
        file.write_all(end.as_bytes()).unwrap();
        let paused = begun.elapsed();
        drop(file);
        // On a busy machine this writer may have been too slow: retry.
        if paused >= HOLD && round < 5 {
            continue;
        }
        assert!(early.is_err(), "a pause of {paused:?} was not waited for");
        assert_eq!(names(&live.next()), some(&["a-node", "b-node"]));
        break;
    }
}

#[test]
fn thread_follows_creation_and_removal_of_path() {
    let live = ThreadFixture::new("etc/manifests");
    assert_eq!(names(&live.next()), some(&[]));
    std::fs::create_dir(live.path("etc")).unwrap();
    std::fs::create_dir(live.path("staged")).unwrap();
    std::fs::write(live.path("staged/a.yaml"), manifest("a", "i:1")).unwrap();
    std::fs::rename(live.path("staged"), live.path("etc/manifests")).unwrap();
    assert_eq!(names(&live.next()), some(&["a-node"]));
    std::fs::write(live.path("etc/manifests/b.yaml"), manifest("b", "i:1")).unwrap();
    assert_eq!(names(&live.next()), some(&["a-node", "b-node"]));
    std::fs::rename(live.path("etc"), live.path("gone")).unwrap();
    assert_eq!(names(&live.next()), some(&[]));
    std::fs::rename(live.path("gone"), live.path("etc")).unwrap();
    assert_eq!(names(&live.next()), some(&["a-node", "b-node"]));
}

#[test]
fn the_thread_follows_a_single_file_and_swapped_links() {
    let live = ThreadFixture::new("pod.yaml");
    assert_eq!(names(&live.next()), some(&[]));
    std::fs::write(live.path("pod.yaml"), manifest("a", "i:1")).unwrap();
    assert_eq!(names(&live.next()), some(&["a-node"]));
    std::fs::write(live.path("pod.yaml"), manifest("b", "i:1")).unwrap();
    assert_eq!(names(&live.next()), some(&["b-node"]));

    let live = ThreadFixture::new("");
    live.next();
    for (version, image) in [("..1", "i:1"), ("..2", "i:2")] {
        std::fs::create_dir(live.path(version)).unwrap();
        std::fs::write(live.path(version).join("a.yaml"), manifest("a", image)).unwrap();
    }
    symlink("..1", live.path("..data")).unwrap();
    symlink("..data/a.yaml", live.path("a.yaml")).unwrap();
    let image = |set: SourceSet| set.pods.unwrap()[0].containers()[0].image.clone();
    assert_eq!(image(live.next()).as_deref(), Some("i:1"));
    symlink("..2", live.path("..next")).unwrap();
    std::fs::rename(live.path("..next"), live.path("..data")).unwrap();
    assert_eq!(image(live.next()).as_deref(), Some("i:2"));
}

#[test]
fn the_thread_posts_another_incarnation() {
    let live = ThreadFixture::new("");
    live.next();
    std::fs::write(live.path("a.yaml"), manifest("a", "i:1")).unwrap();
    let first = live.next();
    let uid = first.pods.as_ref().unwrap()[0].uid().clone();
    std::fs::remove_file(live.path("a.yaml")).unwrap();
    std::fs::write(live.path("a.yaml"), manifest("a", "i:1")).unwrap();
    // On a slow machine the removal may be noticed separately.
    let mut second = live.next();
    if second == empty() {
        second = live.next();
    }
    assert_eq!(second.pods.as_ref().unwrap()[0].uid(), &uid);
    assert_ne!(second.incarnations[&uid], first.incarnations[&uid]);
    // After saving it is the same pod. The other file shows that it was read.
    std::fs::write(live.path(".new"), manifest("a", "i:1")).unwrap();
    std::fs::rename(live.path(".new"), live.path("a.yaml")).unwrap();
    std::fs::write(live.path("b.yaml"), manifest("b", "i:1")).unwrap();
    let third = live.next();
    assert_eq!(names(&third), some(&["a-node", "b-node"]));
    assert_eq!(third.incarnations[&uid], second.incarnations[&uid]);
}

/// The UID of a manifest by a release, of which 0 is the newest.
fn uid_by(release: usize, text: &str, path: &Path) -> PodUid {
    let decoding = decode::decode(text.as_bytes(), Lists::Refused).unwrap();
    let written = decoding.pods[0].pod.as_ref().unwrap();
    let mut given = written.clone();
    defaults::set_defaults(&mut given);
    let place = format!("host:nfile:{}", path.display());
    PodUid::from(fingerprint::uid(&RELEASES[release], written, &given, &place).unwrap())
}

#[test]
fn pod_of_another_release_keeps_its_uid_until_its_manifest_changes() {
    let mut fixture = Fixture::new();
    let (text, edited) = (manifest("a", "i:1"), manifest("a", "i:2"));
    let path = fixture.path("a.yaml");
    let former = uid_by(1, &text, &path);
    let pods = tempfile::tempdir().unwrap();
    std::fs::create_dir(pods.path().join(former.as_str())).unwrap();
    let known = PodsAtStart::find(pods.path(), []);
    let restart =
        |fixture: &Fixture| Files::new(fixture.directory.path(), "n", nowhere()).with_pods(known.clone());
    fixture.files = restart(&fixture);
    let uids = |fixture: &mut Fixture| {
        assert_eq!(fixture.scan(), Vec::<String>::new());
        let pods = fixture.files.set().pods.unwrap();
        assert!(
            pods.iter().all(|pod| pod.annotation("kubernetes.io/config.hash") == Some(pod.uid().as_str()))
        );
        pods.iter().map(|pod| pod.uid().clone()).collect::<Vec<_>>()
    };
    fixture.write("a.yaml", &text);
    assert_eq!(uids(&mut fixture), std::slice::from_ref(&former));
    let incarnation = fixture.files.incarnations.get(&former).copied();
    fixture.write("a.yaml", &edited);
    assert_eq!(uids(&mut fixture), [uid_by(0, &edited, &path)]);
    fixture.write("a.yaml", &text);
    assert_eq!(uids(&mut fixture), std::slice::from_ref(&former));
    assert_ne!(fixture.files.incarnations.get(&former).copied(), incarnation);
    // The same pod from another file is another one.
    fixture.write("b.yaml", manifest("b", "i:1"));
    assert_eq!(
        uids(&mut fixture),
        [former.clone(), uid_by(0, &manifest("b", "i:1"), &fixture.path("b.yaml"))]
    );
    std::fs::remove_file(fixture.path("b.yaml")).unwrap();
    fixture.files = restart(&fixture);
    assert_eq!(uids(&mut fixture), [former]);
    // The manifest changes while no agent runs: its former pod is not continued.
    fixture.write("a.yaml", &edited);
    fixture.files = restart(&fixture);
    assert_eq!(uids(&mut fixture), [uid_by(0, &edited, &path)]);
}

/// Limits alone made a pod Guaranteed before 1.37; now it is Burstable, in another cgroup.
#[test]
fn pod_of_another_release_keeps_the_requests_that_its_limits_gave_it() {
    let mut fixture = Fixture::new();
    let text = r#"{"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "a"}, "spec": {
        "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
        "containers": [{"name": "c", "image": "i:1"}]}}"#;
    let path = fixture.path("a.yaml");
    fixture.write("a.yaml", text);
    for (release, is_former) in [(0, false), (1, true), (2, true), (3, true), (4, true)] {
        let pods = tempfile::tempdir().unwrap();
        std::fs::create_dir(pods.path().join(uid_by(release, text, &path).as_str())).unwrap();
        let known = PodsAtStart::find(pods.path(), []);
        fixture.files = Files::new(fixture.directory.path(), "n", nowhere()).with_pods(known);
        assert_eq!(fixture.scan(), Vec::<String>::new());
        let pod = fixture.files.set().pods.unwrap().remove(0);
        let resources = pod.spec().resources.clone().unwrap();
        let requests = is_former.then(|| resources.limits.clone().unwrap());
        assert_eq!(resources.requests, requests, "{release}");
        let class = if is_former { QosClass::Guaranteed } else { QosClass::Burstable };
        assert_eq!(pod.qos(), class, "{release}");
    }
}
