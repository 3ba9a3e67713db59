use std::cell::Cell;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use proptest::prelude::*;

use super::*;

fn payload(files: &[(&str, &str)]) -> Payload {
    let mut payload = Payload::default();
    for (path, data) in files {
        payload.insert(path, File::new(data.as_bytes().to_vec(), 0o440)).unwrap();
    }
    payload
}

fn write_to(dir: &Path, payload: &Payload) -> io::Result<WriteOutcome> {
    let fd = tree::open(dir).unwrap();
    let now = Timestamp::from_second(1_000_000_000).unwrap();
    write(fd.as_fd(), payload, now, &|| Ok(()), &StopToken::never())
}

/// Directories of versions.
fn versions(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    names.map(|name| name.to_string_lossy().into_owned()).filter(|name| is_version(name.as_bytes())).collect()
}

/// The visible files in the volume's root.
fn visible(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| !name.starts_with("..")).collect();
    names.sort();
    names
}

fn read_all(dir: &Path, path: &str) -> Option<String> {
    std::fs::read_to_string(dir.join(path)).ok()
}

#[test]
fn paths_that_leave_the_volume_are_refused() {
    for (path, expected) in [
        ("a", Ok("a")),
        ("a/b", Ok("a/b")),
        ("./a//b/.", Ok("a/b")),
        ("a/..b", Ok("a/..b")),
        ("...", Err("invalid path: must not start with '..': ...")),
        ("..a/b", Err("invalid path: must not start with '..': ..a/b")),
        ("a/../b", Err("invalid path: must not contain '..': a/../b")),
        ("..", Err("invalid path: must not contain '..': ..")),
        ("/a", Err("invalid path: must be relative path: /a")),
        ("", Err("invalid path: must not be empty: \"\"")),
        ("./.", Err("invalid path: must not be empty: \"./.\"")),
    ] {
        let found = check(path).map_err(|error| error.to_string());
        assert_eq!(found.as_deref().map_err(String::as_str), expected, "{path}");
    }
    assert_eq!(check(&"a/".repeat(3000)), Err(PathError::TooLong));
    assert_eq!(check(&"a".repeat(256)), Err(PathError::LongName));
    assert!(check(&"a/".repeat(MAX_DEPTH)).is_ok());
    assert_eq!(check(&"a/".repeat(MAX_DEPTH + 1)), Err(PathError::TooDeep));
    let mut files = payload(&[("a/b", "1")]);
    let file = File::new(Vec::new(), 0);
    for path in ["a", "a/b/c"] {
        assert!(matches!(files.insert(path, file.clone()), Err(PathError::Conflict { .. })), "{path}");
    }
    files.insert("ab", file).unwrap();
}

#[test]
fn changed_payload_replaces_all_files_and_equal_one_none() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    let first = payload(&[("labels", "x=\"1\""), ("deep/er/ann", "y"), ("deep/other", "z")]);
    assert_eq!(write_to(path, &first).unwrap(), WriteOutcome::Written);
    assert_eq!(visible(path), ["deep", "labels"]);
    assert_eq!(read_all(path, "labels").as_deref(), Some("x=\"1\""));
    assert_eq!(read_all(path, "deep/er/ann").as_deref(), Some("y"));
    assert_eq!(std::fs::read_link(path.join("labels")).unwrap(), Path::new("..data/labels"));
    assert_eq!(std::fs::metadata(path.join("labels")).unwrap().permissions().mode() & 0o7777, 0o440);
    let before = versions(path);
    assert!(before[0].starts_with("..2001_09_09_01_46_40."), "{before:?}");
    assert_eq!(std::fs::metadata(path.join(&before[0])).unwrap().mode() & 0o7777, 0o755);

    // The same content again, with another mode: nothing is changed.
    let mut same = first.clone();
    same.insert("labels", File::new(b"x=\"1\"".to_vec(), 0o400)).unwrap();
    assert_eq!(write_to(path, &same).unwrap(), WriteOutcome::Unchanged);
    assert_eq!(versions(path), before);
    assert_eq!(std::fs::metadata(path.join("labels")).unwrap().mode() & 0o7777, 0o440);

    // A file is removed, one is new, one is shorter.
    let two = payload(&[("labels", "x"), ("new", "")]);
    assert_eq!(write_to(path, &two).unwrap(), WriteOutcome::Written);
    assert_eq!(visible(path), ["labels", "new"]);
    assert_eq!(read_all(path, "labels").as_deref(), Some("x"));
    assert_eq!(versions(path).len(), 1);
    assert_ne!(versions(path), before);
    // Only a file is removed.
    assert_eq!(write_to(path, &payload(&[("labels", "x")])).unwrap(), WriteOutcome::Written);
    assert_eq!(visible(path), ["labels"]);
    assert_eq!(write_to(path, &Payload::default()).unwrap(), WriteOutcome::Written);
    assert_eq!(visible(path), [""; 0]);
    assert_eq!(write_to(path, &Payload::default()).unwrap(), WriteOutcome::Unchanged);
}

#[test]
fn interrupted_write_is_repaired_by_next_write() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    let files = payload(&[("a", "1"), ("b", "2")]);
    write_to(path, &files).unwrap();
    // Interrupted before the replacement: an invisible version, and the new link.
    std::fs::create_dir(path.join("..2020_01_01_00_00_00.1")).unwrap();
    symlink("..2020_01_01_00_00_00.1", path.join(NEXT)).unwrap();
    // Interrupted after it: a link is missing, another one is stale.
    std::fs::remove_file(path.join("b")).unwrap();
    symlink("..data/old", path.join("old")).unwrap();
    assert_eq!(write_to(path, &files).unwrap(), WriteOutcome::Unchanged);
    assert_eq!(visible(path), ["a", "b"]);
    assert_eq!(versions(path).len(), 1);
    assert_eq!(write_to(path, &payload(&[("a", "3")])).unwrap(), WriteOutcome::Written);
    assert_eq!(versions(path).len(), 1);
    assert!(!path.join(NEXT).exists());
    // The version behind the link was removed by hand.
    std::fs::remove_dir_all(path.join(&versions(path)[0])).unwrap();
    assert_eq!(write_to(path, &payload(&[("a", "3")])).unwrap(), WriteOutcome::Written);
    assert_eq!(read_all(path, "a").as_deref(), Some("3"));
}

#[test]
fn new_version_stays_invisible_if_owner_change_fails() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    write_to(path, &payload(&[("a", "1")])).unwrap();
    let fd = tree::open(path).unwrap();
    let is_called = Cell::new(false);
    let own = || {
        is_called.set(true);
        Err(Errno::PERM)
    };
    let result = write(fd.as_fd(), &payload(&[("a", "2")]), Timestamp::now(), &own, &StopToken::never());
    assert_eq!((result, is_called.get()), (Err(Errno::PERM), true));
    assert_eq!(read_all(path, "a").as_deref(), Some("1"));
    assert_eq!(versions(path).len(), 1);
}

#[test]
fn directory_at_path_of_link_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("mountpoint")).unwrap();
    let error = write_to(dir.path(), &payload(&[("mountpoint/x", "1")])).unwrap_err();
    assert_eq!(error, Errno::EXIST);
    // An entry of another name is no error, and is not changed.
    write_to(dir.path(), &payload(&[("a", "1")])).unwrap();
    assert_eq!(visible(dir.path()), ["a", "mountpoint"]);
}

fn any_payload() -> impl Strategy<Value = Vec<(String, String)>> {
    let path = "[a-c]{1,2}(/[a-c]{1,2}){0,3}";
    proptest::collection::vec((path, "[xy]{0,3}"), 0..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn only_last_payload_is_visible(rounds in proptest::collection::vec(any_payload(), 1..5)) {
        let dir = tempfile::tempdir().unwrap();
        for round in rounds {
            let mut wanted = Payload::default();
            for (path, data) in &round {
                // Conflicts are refused and change nothing.
                let _ = wanted.insert(path, File::new(data.clone().into_bytes(), 0o644));
            }
            write_to(dir.path(), &wanted).unwrap();
            for (path, file) in &wanted.files {
                prop_assert_eq!(&std::fs::read(dir.path().join(path)).unwrap()[..], &*file.data);
            }
            let roots: Vec<String> = wanted.roots().into_keys().map(|name| name.to_str().unwrap().to_owned()).collect();
            prop_assert_eq!(visible(dir.path()), roots);
            prop_assert_eq!(versions(dir.path()).len(), 1);
            prop_assert_eq!(write_to(dir.path(), &wanted).unwrap(), WriteOutcome::Unchanged);
        }
    }

    #[test]
    fn accepted_paths_have_only_plain_elements(path in any::<String>()) {
        if let Ok(clean) = check(&path) {
            prop_assert!(clean.split('/').all(|part| !matches!(part, "" | "." | "..")));
            prop_assert!(!clean.starts_with('/') && !clean.starts_with(".."));
        }
    }
}

/// Only root may change owners: for other users the owner is the same before and after.
fn another_user(dir: &Path) -> (u32, u32) {
    let own = std::fs::metadata(dir).unwrap().uid();
    (own, if own == 0 { 1000 } else { own })
}

#[test]
fn file_and_its_link_have_the_same_owner() {
    let dir = tempfile::tempdir().unwrap();
    let (own, uid) = another_user(dir.path());
    let mut files = Payload::default();
    let owned = |data: &str| File { owner: Some(uid), ..File::new(data.as_bytes().to_vec(), 0o600) };
    files.insert("token", owned("x")).unwrap();
    files.insert("ca", File::new(b"y".to_vec(), 0o644)).unwrap();
    files.insert("deep/ca", File::new(b"y".to_vec(), 0o644)).unwrap();
    files.insert("deep/token", owned("z")).unwrap();
    write_to(dir.path(), &files).unwrap();
    let owner = |path: &str| {
        std::fs::metadata(dir.path().join(path))
            .map(|metadata| (metadata.uid(), metadata.mode() & 0o7777))
            .unwrap()
    };
    assert_eq!((owner("token"), owner("ca")), ((uid, 0o600), (own, 0o644)));
    let link = |path: &str| std::fs::symlink_metadata(dir.path().join(path)).unwrap().uid();
    let links = || ["token", "ca", "deep", "..data"].map(link);
    assert_eq!(links(), [uid, own, uid, own]);
    // A link that an earlier version of the agent has left.
    std::fs::remove_file(dir.path().join("token")).unwrap();
    symlink("..data/token", dir.path().join("token")).unwrap();
    assert_eq!(write_to(dir.path(), &files).unwrap(), WriteOutcome::Unchanged);
    assert_eq!(links(), [uid, own, uid, own]);
    assert_eq!(
        format!("{:?}", files.get("token").unwrap()),
        format!("File(1 bytes, mode 600, owner Some({uid}))")
    );
}

#[test]
fn too_many_files_are_refused() {
    let file = || File::new(Vec::new(), 0o644);
    let mut files = Payload::default();
    for n in 0..MAX_ENTRIES {
        files.insert(&n.to_string(), file()).unwrap();
    }
    files.insert("0", file()).unwrap();
    assert_eq!(files.insert("more", file()), Err(PathError::TooMany));
    // Directories count once each.
    let mut files = Payload::default();
    for path in ["a/b/one", "a/b/two", "a/c/one", "d"] {
        files.insert_up_to(7, path, file()).unwrap();
    }
    assert_eq!(files.entries, 7);
    files.insert_up_to(7, "d", file()).unwrap();
    assert_eq!(files.insert_up_to(7, "e", file()), Err(PathError::TooMany));
    files.insert_up_to(8, "a/c/two", file()).unwrap();
}

/// 10,000 files made of one key of 1 MiB would be 10 GB.
#[test]
fn bytes_of_a_volume_are_limited() {
    let file = || File::new(vec![b'x'; 1 << 20], 0o644);
    let most = MAX_BYTES >> 20;
    let mut files = Payload::default();
    for number in 0..most {
        files.insert(&number.to_string(), file()).unwrap();
    }
    files.insert("empty", File::new(Vec::new(), 0o644)).unwrap();
    assert_eq!(files.insert("more", File::new(vec![b'x'], 0o644)), Err(PathError::TooLarge));
    // Replacing a file costs as much as adding one.
    let mut files = Payload::default();
    for _ in 0..most {
        files.insert("same", file()).unwrap();
    }
    assert_eq!(files.insert("same", file()), Err(PathError::TooLarge));
}

/// Files of one directory, and of one directory each: comparing each path with all others
/// would take 10,000,000,000 steps.
#[test]
fn insertion_time_grows_linearly_with_files() {
    const FILES: usize = 100_000;
    for form in ["a/#", "#/a"] {
        let mut files = Payload::default();
        for n in 0..FILES {
            files
                .insert_up_to(usize::MAX, &form.replace('#', &n.to_string()), File::new(Vec::new(), 0))
                .unwrap();
        }
        assert_eq!((files.files.len(), files.roots().len()), (FILES, if form == "a/#" { 1 } else { FILES }));
    }
}

#[test]
fn stopped_write_is_finished_by_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    write_to(path, &payload(&[("a", "1"), ("b", "1")])).unwrap();
    let (source, stop) = crate::util::stop::pair();
    let next = payload(&[("a", "2"), ("c", "2")]);
    let fd = tree::open(path).unwrap();
    // The stop comes before the new version is visible, and right after it is complete.
    drop(source);
    let stopped = write(fd.as_fd(), &next, Timestamp::now(), &|| Ok(()), &stop);
    assert_eq!((stopped, versions(path).len()), (Err(Errno::CANCELED), 1));
    assert_eq!((read_all(path, "a").as_deref(), visible(path)), (Some("1"), vec!["a".into(), "b".into()]));
    let (source, stop) = crate::util::stop::pair();
    let source = Cell::new(Some(source));
    let own = || {
        drop(source.take());
        Ok(())
    };
    assert_eq!(write(fd.as_fd(), &next, Timestamp::now(), &own, &stop), Err(Errno::CANCELED));
    assert_eq!((read_all(path, "a").as_deref(), versions(path).len()), (Some("2"), 2));
    assert_eq!(write_to(path, &next).unwrap(), WriteOutcome::Unchanged);
    assert_eq!((visible(path), versions(path).len()), (vec!["a".into(), "c".into()], 1));
}

/// A clock without a battery starts in 1970.
#[test]
fn versions_dated_1970_are_replaced_like_others() {
    let dir = tempfile::tempdir().unwrap();
    let fd = tree::open(dir.path()).unwrap();
    let early = |data: &str| {
        let files = payload(&[("a", data)]);
        write(fd.as_fd(), &files, Timestamp::UNIX_EPOCH, &|| Ok(()), &StopToken::never()).unwrap()
    };
    assert_eq!(
        [early("1"), early("1"), early("2")],
        [WriteOutcome::Written, WriteOutcome::Unchanged, WriteOutcome::Written]
    );
    assert_eq!(versions(dir.path()).len(), 1);
    assert!(versions(dir.path())[0].starts_with("..1970_01_01_"));
}

/// The volume is writable through another mount, and not everything in it is ours.
#[test]
fn links_and_pipes_in_a_version_are_not_read() {
    let top = tempfile::tempdir().unwrap();
    let (path, outside) = (top.path().join("v"), top.path().join("outside"));
    std::fs::create_dir(&path).unwrap();
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("x"), "1").unwrap();
    let files = payload(&[("d/x", "1"), ("f", "1")]);
    let disturbances: [&dyn Fn(&Path); 5] = [
        &|version| {
            std::fs::remove_dir_all(version.join("d")).unwrap();
            symlink(&outside, version.join("d")).unwrap();
        },
        &|version| {
            std::fs::remove_file(version.join("f")).unwrap();
            symlink(outside.join("x"), version.join("f")).unwrap();
        },
        // Opening it with blocking would hang.
        &|version| {
            std::fs::remove_file(version.join("f")).unwrap();
            fs::mknodat(fs::CWD, version.join("f"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        },
        &|version| {
            std::fs::remove_file(version.join("f")).unwrap();
            drop(std::os::unix::net::UnixListener::bind(version.join("f")).unwrap());
        },
        &|_| {
            std::fs::remove_file(path.join(DATA)).unwrap();
            symlink("..", path.join(DATA)).unwrap();
        },
    ];
    for disturb in disturbances {
        write_to(&path, &files).unwrap();
        let version = path.join(&versions(&path)[0]);
        disturb(&version);
        assert_eq!(write_to(&path, &files).unwrap(), WriteOutcome::Written);
        assert_eq!(versions(&path).len(), 1);
        assert!(std::fs::symlink_metadata(path.join("f")).unwrap().is_symlink());
        assert_eq!(read_all(&path, "d/x").as_deref(), Some("1"));
    }
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
}
