use super::*;
use crate::kube::objects::Kind;
use crate::util::testing::fifo;
use std::os::unix::fs::{PermissionsExt, symlink};

struct Fixture {
    directory: tempfile::TempDir,
    files: Files,
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::new(directory.path());
        Fixture { directory, files }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
        self.chmod(name, 0o600);
    }

    fn chmod(&self, name: &str, mode: u32) {
        std::fs::set_permissions(self.path(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Reads the directory again. Returns the messages of the notices.
    fn scan(&mut self) -> Vec<String> {
        let listed = list(self.directory.path());
        let changes = FileChanges { all: true, ..FileChanges::default() };
        let notices = self.files.update(listed, &changes, &mut |_| false, Timestamp::now());
        let place = format!("{}/", self.directory.path().display());
        notices.into_iter().map(|notice| notice.message.replace(&place, "")).collect()
    }

    fn value(&self, kind: Kind, name: &str) -> Option<String> {
        let objects = self.files.objects();
        let object = objects.get(&Key::new(kind, "default", name))?;
        Some(String::from_utf8(object.get("k")?.to_vec()).unwrap())
    }
}

fn secret(name: &str, value: &str) -> String {
    format!("apiVersion: v1\nkind: Secret\nmetadata: {{name: {name}}}\nstringData: {{k: {value}}}\n")
}

#[test]
fn broken_file_keeps_its_objects_and_a_removed_one_does_not() {
    let mut fixture = Fixture::new();
    fixture.write("a.yaml", &(secret("s", "one") + "---\n" + &secret("t", "one")));
    assert_eq!(fixture.scan(), Vec::<String>::new());
    assert_eq!(fixture.value(Kind::Secret, "s").as_deref(), Some("one"));
    fixture.write("a.yaml", &(secret("s", "two") + "---\n" + &secret("t", "[two]")));
    let suffix = "; the objects of the last valid version stay in use";
    let expected = format!("a.yaml:9: stringData[k]: Invalid value: want a string, found a list{suffix}");
    assert_eq!(fixture.scan(), [expected]);
    assert_eq!(fixture.scan(), Vec::<String>::new(), "a problem is reported once");
    assert_eq!(fixture.files.problems().len(), 1);
    assert_eq!(fixture.value(Kind::Secret, "s").as_deref(), Some("two"), "valid documents count");
    assert_eq!(fixture.value(Kind::Secret, "t").as_deref(), Some("one"));
    fixture.write("a.yaml", "{");
    assert_eq!(fixture.scan().len(), 1);
    assert_eq!(fixture.value(Kind::Secret, "s").as_deref(), Some("two"));
    fixture.write("a.yaml", &secret("s", "three"));
    assert_eq!((fixture.scan(), fixture.files.problems()), (vec![], vec![]));
    assert_eq!(fixture.value(Kind::Secret, "t"), None);
    std::fs::remove_file(fixture.path("a.yaml")).unwrap();
    fixture.scan();
    assert_eq!(fixture.value(Kind::Secret, "s"), None);
}

#[test]
fn secrets_need_a_private_file() {
    let mut fixture = Fixture::new();
    let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: m}\ndata: {k: v}\n";
    fixture.write("a.yaml", &format!("{map}---\n{}", secret("s", "one")));
    fixture.chmod("a.yaml", 0o640);
    let expected = "a.yaml:6: a file with Secrets must have mode 0600 or stricter, but has 0640";
    assert_eq!(fixture.scan(), [expected]);
    assert_eq!(fixture.value(Kind::ConfigMap, "m").as_deref(), Some("v"));
    assert_eq!(fixture.value(Kind::Secret, "s"), None);
    fixture.chmod("a.yaml", 0o400);
    assert_eq!(fixture.scan(), Vec::<String>::new());
    assert_eq!(fixture.value(Kind::Secret, "s").as_deref(), Some("one"));
    assert_eq!(exposed(0o100_600, 0, 0), None);
    let other = exposed(0o100_600, 1000, 0).unwrap();
    assert_eq!(other, "must belong to root, but belongs to user 1000");
}

#[test]
fn only_regular_files_within_limits_are_read() {
    let mut fixture = Fixture::new();
    fixture.write(".hidden", "{");
    std::fs::create_dir(fixture.path("directory")).unwrap();
    symlink(fixture.path("a.yaml"), fixture.path("link")).unwrap();
    fifo(&fixture.path("pipe"));
    fixture.write("large", &" ".repeat(usize::try_from(MAX_FILE_BYTES).unwrap() + 1));
    fixture.write("a.yaml", &secret("s", "one"));
    let expected = [
        "large: the file is larger than the limit of 4194304 bytes",
        "link: the file is a symbolic link; only regular files are read",
        "pipe: cannot open the file: not a regular file",
    ];
    assert_eq!(fixture.scan(), expected);
    assert_eq!(fixture.value(Kind::Secret, "s").as_deref(), Some("one"));
    for n in 0..MAX_FILES {
        std::fs::write(fixture.path(&format!("{n}")), "").unwrap();
    }
    let message = fixture.scan().pop().unwrap();
    assert!(message.contains("more than 1000 files"), "{message}");
    assert_eq!(fixture.value(Kind::Secret, "s").as_deref(), Some("one"));
    assert!(Files::new(&fixture.path("none")).list_is_missing());
}

impl Files {
    fn list_is_missing(mut self) -> bool {
        !self.read_once(Timestamp::now())
    }
}

#[test]
fn all_files_together_are_limited() {
    let mut fixture = Fixture::new();
    let large = "x".repeat(1_000_000);
    for n in 10..30 {
        fixture.write(&format!("{n}.yaml"), &secret(&format!("s{n}"), &large));
    }
    let messages = fixture.scan();
    assert_eq!(messages.len(), 4, "{messages:?}");
    assert_eq!(messages[0], "26.yaml: the objects of all files are larger than 16777216 bytes");
    assert_eq!(fixture.files.objects().len(), 16);
    std::fs::remove_file(fixture.path("10.yaml")).unwrap();
    fixture.scan();
    assert_eq!(fixture.files.objects().len(), 16);
    assert!(fixture.value(Kind::Secret, "s26").is_some());
}

#[test]
fn later_file_counts_for_an_object_in_two_files() {
    let mut fixture = Fixture::new();
    fixture.write("a.yaml", &secret("s", "one"));
    fixture.write("b.yaml", &secret("s", "two"));
    let messages = fixture.scan();
    assert_eq!(messages, ["a.yaml: metadata.name: secret default/s is also in b.yaml, which counts"]);
    assert_eq!(fixture.files.problems().len(), 1);
    assert_eq!(fixture.value(Kind::Secret, "s").as_deref(), Some("two"));
    std::fs::remove_file(fixture.path("b.yaml")).unwrap();
    assert_eq!((fixture.scan(), fixture.files.problems()), (vec![], vec![]));
    assert_eq!(fixture.value(Kind::Secret, "s").as_deref(), Some("one"));
}
