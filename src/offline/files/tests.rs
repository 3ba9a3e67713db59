use super::*;
use crate::util::testing::{fifo, unblocked, without_access};
use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::time::Duration;

fn settings(root: &Path) -> Settings {
    Settings {
        directory: root.join("offline"),
        node_name: "n".to_owned(),
        stores_secrets: true,
        key_file: None,
        wait: Duration::ZERO,
        accept_after: Duration::ZERO,
        fence: super::super::fence::FenceSettings::default(),
    }
}

/// The files with a key, which exist already at the second call.
fn files(root: &Path) -> Files {
    let (files, problems) = Files::open(&settings(root));
    assert!(problems.is_empty() && files.stores_secrets(), "{problems:?}");
    assert_eq!(files.seal_state(), SealState::Sealed);
    files
}

fn secret() -> Key {
    Key::namespaced(Kind::Secret, "n", "s")
}

fn map() -> Key {
    Key::namespaced(Kind::ConfigMap, "n", "s")
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

/// All regular files below a directory.
fn regular_files(below: &Path) -> Vec<PathBuf> {
    let (mut found, mut open) = (Vec::new(), vec![below.to_owned()]);
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { open.push(path) } else { found.push(path) }
        }
    }
    found
}

#[test]
fn secrets_are_sealed_and_other_objects_are_not() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("offline");
    let files = files(root.path());
    let (secret, token, map) = (secret(), Key::new(Kind::Token, "u/1"), map());
    assert!(files.read(&secret).unwrap().is_none() && files.list().unwrap().is_empty());
    for key in [&secret, &token, &map] {
        files.write(key, b"former").unwrap();
        files.write(key, b"canary").unwrap();
        assert_eq!(files.read(key).unwrap().unwrap().reveal(), b"canary");
        assert_eq!(mode(&directory.join(key.file_name())), 0o600);
    }
    let with_canary: Vec<PathBuf> = regular_files(root.path())
        .into_iter()
        .filter(|path| std::fs::read(path).unwrap().windows(6).any(|part| part == b"canary"))
        .collect();
    assert_eq!(with_canary, [directory.join(map.file_name())]);
    assert_eq!(files.list().unwrap().len(), 3);
    assert_eq!(files.keys(Kind::Token), [token]);
    let shown = format!("{files:?} {:?} {:?}", files.read(&secret), files.object(&secret.file_name()));
    assert!(!shown.contains("canary") && !shown.contains("99, 97, 110"), "{shown}");
    files.remove(&secret).unwrap();
    files.remove(&secret).unwrap();
    assert!(files.read(&secret).unwrap().is_none());
}

#[test]
fn key_is_made_once_and_read_again() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("offline");
    files(root.path()).write(&secret(), b"canary").unwrap();
    let text = std::fs::read(directory.join("key")).unwrap();
    assert_eq!((text.len(), mode(&directory.join("key")), mode(&directory)), (65, 0o600, 0o700));
    assert_eq!(files(root.path()).read(&secret()).unwrap().unwrap().reveal(), b"canary");
    assert_eq!(std::fs::read(directory.join("key")).unwrap(), text);
    assert_eq!(regular_files(root.path()).len(), 2);
}

#[test]
fn key_that_cannot_be_used_is_left_with_all_sealed_files() {
    type Damage = fn(&Path);
    let cases: [(&str, &str, Damage); 9] = [
        ("group", "its mode is 0640", |key| {
            std::fs::set_permissions(key, Permissions::from_mode(0o640)).unwrap();
        }),
        ("others", "its mode is 0604", |key| {
            std::fs::set_permissions(key, Permissions::from_mode(0o604)).unwrap();
        }),
        ("short", "64 hexadecimal digits", |key| std::fs::write(key, "0123\n").unwrap()),
        ("zeros", "64 hexadecimal digits", |key| std::fs::write(key, [0; 65]).unwrap()),
        ("missing", "need it", |key| std::fs::remove_file(key).unwrap()),
        ("another key", "opens none", |key| std::fs::write(key, "a".repeat(64)).unwrap()),
        ("directory", "not a regular file", |key| {
            std::fs::remove_file(key).unwrap();
            std::fs::create_dir(key).unwrap();
        }),
        ("fifo", "not a regular file", |key| {
            std::fs::remove_file(key).unwrap();
            fifo(key);
        }),
        ("link", "not a regular file", |key| {
            std::fs::rename(key, key.with_file_name("other")).unwrap();
            symlink("other", key).unwrap();
        }),
    ];
    unblocked(move || {
        for (case, reason, damage) in cases {
            let root = tempfile::tempdir().unwrap();
            let former = files(root.path());
            former.write(&secret(), b"canary").unwrap();
            former.write(&map(), b"map").unwrap();
            let path = root.path().join("offline").join("key");
            damage(&path);
            let exists = path.exists();
            let (files, problems) = Files::open(&settings(root.path()));
            assert_eq!(files.seal_state(), SealState::NoKey, "{case}");
            assert!(!files.stores_secrets(), "{case}");
            let [problem] = &problems[..] else { panic!("{case}: {problems:?}") };
            assert!(problem.contains(reason) && problem.contains("offline/key"), "{case}: {problem}");
            let refused = |error: FileError| matches!(error, FileError::NotStored(SealState::NoKey));
            assert!(refused(files.read(&secret()).unwrap_err()), "{case}");
            assert!(refused(files.write(&secret(), b"new").unwrap_err()), "{case}");
            files.put_aside(&secret(), &files.read(&secret()).unwrap_err());
            assert_eq!(files.read(&map()).unwrap().unwrap().reveal(), b"map", "{case}");
            assert_eq!(path.exists(), exists, "{case}: no new key");
            assert_eq!(former.read(&secret()).unwrap().unwrap().reveal(), b"canary", "{case}");
        }
    });
}

#[test]
fn key_of_another_user_is_not_used() {
    let root = tempfile::tempdir().unwrap();
    let _ = files(root.path());
    let path = root.path().join("offline").join("key");
    // Only root can give a file away.
    if std::os::unix::fs::chown(&path, Some(12_345), None).is_ok() {
        let (files, problems) = Files::open(&settings(root.path()));
        assert!(!files.stores_secrets() && problems[0].contains("belongs to the user 12345"), "{problems:?}");
    }
}

#[test]
fn key_file_of_the_operator_is_made_only_in_an_existing_directory() {
    let root = tempfile::tempdir().unwrap();
    let medium = root.path().join("medium");
    let with_key = |path: &Path| Settings { key_file: Some(path.to_owned()), ..settings(root.path()) };
    let problem = |path: &Path| Files::open(&with_key(path)).1.concat();
    assert!(problem(&medium.join("key")).contains("its directory does not exist"));
    std::fs::create_dir(&medium).unwrap();
    let link = root.path().join("link");
    symlink(medium.join("key"), &link).unwrap();
    assert!(problem(&link).contains("a link to a file that does not exist"));
    assert!(!medium.join("key").exists() && !root.path().join("offline").exists());
    let (files, problems) = Files::open(&with_key(&medium.join("key")));
    assert!(files.stores_secrets() && mode(&medium.join("key")) == 0o600, "{problems:?}");
    files.write(&secret(), b"canary").unwrap();
    assert!(!root.path().join("offline").join("key").exists());
    let (files, problems) = Files::open(&with_key(&link));
    assert!(problems.is_empty(), "{problems:?}");
    assert_eq!(files.read(&secret()).unwrap().unwrap().reveal(), b"canary");
    // Without the medium, and with another one.
    std::fs::rename(&medium, root.path().join("away")).unwrap();
    assert!(problem(&medium.join("key")).contains("need it"));
    std::fs::create_dir(&medium).unwrap();
    assert!(problem(&medium.join("key")).contains("need it"));
    assert_eq!(regular_files(&medium).len(), 0);
    assert!(
        unblocked(|| Files::open(&Settings {
            key_file: Some("/dev/zero".into()),
            ..settings(Path::new("/nonexistent"))
        }))
        .1
        .concat()
        .contains("not a regular file")
    );
}

#[test]
fn sealed_objects_of_another_node_are_not_opened() {
    let root = tempfile::tempdir().unwrap();
    files(root.path()).write(&secret(), b"canary").unwrap();
    let other = Settings { node_name: "m".to_owned(), ..settings(root.path()) };
    let (files, problems) = Files::open(&other);
    assert!(!files.stores_secrets() && problems[0].contains("another node name"), "{problems:?}");
    let digits = std::fs::read(root.path().join("offline").join("key")).unwrap();
    let bytes: Vec<u8> = digits
        .trim_ascii_end()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect();
    let key = SealKey::from_bytes(bytes.try_into().unwrap());
    let files = Files::new(&other, SealState::Sealed, Some(key));
    assert!(matches!(files.read(&secret()), Err(FileError::Seal(AeadError::Refused))));
}

#[test]
fn file_of_another_object_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("offline");
    let files = files(root.path());
    let path_of = |key: &Key| directory.join(key.file_name());
    let other = Key::namespaced(Kind::Secret, "n", "other");
    files.write(&secret(), b"one").unwrap();
    files.write(&map(), b"map").unwrap();
    for source in [secret(), map()] {
        std::fs::copy(path_of(&source), path_of(&other)).unwrap();
        assert!(matches!(files.read(&other), Err(FileError::OtherObject)));
        assert!(matches!(files.object(&other.file_name()), Err(FileError::OtherObject)));
        assert!(!files.keys(Kind::Secret).contains(&other));
    }
    // A body in clear, and the sealed body of another object, with right checksums.
    let forged = format::encode(&other, Body { bytes: b"forged", is_sealed: false }).unwrap();
    std::fs::write(path_of(&other), forged).unwrap();
    assert!(matches!(files.read(&other), Err(FileError::OtherObject)));
    let file = std::fs::read(path_of(&secret())).unwrap();
    let (_, body) = format::decode(&file).unwrap();
    std::fs::write(path_of(&other), format::encode(&other, body).unwrap()).unwrap();
    assert!(matches!(files.read(&other), Err(FileError::Seal(AeadError::Refused))));
}

#[test]
fn failed_write_leaves_the_former_file() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("offline");
    let files = files(root.path());
    files.write(&map(), b"former").unwrap();
    files.write(&map(), &vec![0; format::MAX_BODY_BYTES + 1]).unwrap_err();
    std::fs::set_permissions(&directory, Permissions::from_mode(0o500)).unwrap();
    let written = without_access({
        let settings = settings(root.path());
        move || {
            Files::new(&settings, SealState::Off, None)
                .write(&map(), b"new")
                .map_err(|error| error.to_string())
        }
    });
    std::fs::set_permissions(&directory, Permissions::from_mode(0o700)).unwrap();
    assert!(written.unwrap_err().contains("Permission denied"));
    assert_eq!(files.read(&map()).unwrap().unwrap().reveal(), b"former");
    // A file where the directory should be.
    let other = root.path().join("other");
    std::fs::write(&other, "").unwrap();
    let files = Files::new(&Settings { directory: other, ..settings(root.path()) }, SealState::Off, None);
    files.write(&map(), b"new").unwrap_err();
    assert!(files.list().is_err());
}

#[test]
fn links_in_the_place_of_directories_are_not_followed() {
    let root = tempfile::tempdir().unwrap();
    let (directory, moved) = (root.path().join("offline"), root.path().join("moved"));
    let files = files(root.path());
    files.write(&map(), b"former").unwrap();
    std::fs::rename(&directory, &moved).unwrap();
    symlink(&moved, &directory).unwrap();
    files.write(&map(), b"new").unwrap_err();
    files.read(&map()).unwrap_err();
    files.remove(&map()).unwrap_err();
    files.list().unwrap_err();
    files.clean_up();
    let (other, problems) = Files::open(&settings(root.path()));
    assert!(!other.stores_secrets() && problems.len() == 1, "{problems:?}");
    std::fs::remove_file(&directory).unwrap();
    std::fs::rename(&moved, &directory).unwrap();
    assert_eq!(files.read(&map()).unwrap().unwrap().reveal(), b"former");
    // The directory of the copies, and a file.
    std::fs::create_dir(root.path().join("target")).unwrap();
    symlink(root.path().join("target"), directory.join("damaged")).unwrap();
    std::fs::rename(directory.join(map().file_name()), root.path().join("file")).unwrap();
    symlink(root.path().join("file"), directory.join(map().file_name())).unwrap();
    files.put_aside(&map(), &files.read(&map()).unwrap_err());
    assert_eq!(std::fs::read_dir(root.path().join("target")).unwrap().count(), 0);
    assert!(directory.join(map().file_name()).is_symlink());
}

#[test]
fn damaged_file_is_put_aside_only_if_it_still_is() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("offline");
    let files = files(root.path());
    let (path, copy) = (directory.join(map().file_name()), directory.join("damaged").join(map().file_name()));
    files.write(&map(), b"map").unwrap();
    std::fs::write(&path, "damaged").unwrap();
    let error = files.read(&map()).unwrap_err();
    files.write(&map(), b"map").unwrap();
    files.put_aside(&map(), &error);
    assert!(path.exists() && !copy.exists());
    std::fs::write(&path, "damaged").unwrap();
    // Not an error of the file.
    files.put_aside(&map(), &FileError::Io(Errno::MFILE.into()));
    files.put_aside(&map(), &FileError::Seal(AeadError::Random));
    assert!(path.exists() && !copy.exists());
    files.put_aside(&map(), &error);
    assert!(!path.exists() && std::fs::read(&copy).unwrap() == b"damaged");
    let reported = state_files::problems().into_iter().find(|(path, _)| *path == copy).unwrap().1;
    assert!(reported.contains("too short") && reported.contains(path.to_str().unwrap()), "{reported}");
    assert!(files.read(&map()).unwrap().is_none());
    // Twice, as two readers do; and a second damage replaces the copy.
    files.put_aside(&map(), &error);
    std::fs::write(&path, "again").unwrap();
    files.put_aside(&map(), &files.read(&map()).unwrap_err());
    assert_eq!(std::fs::read(&copy).unwrap(), b"again");
}

#[test]
fn oldest_copies_go_and_full_directories_stay() {
    let root = tempfile::tempdir().unwrap();
    let aside = root.path().join("offline").join("damaged");
    let files = files(root.path());
    let path_of = |number: usize| {
        let key = Key::new(Kind::Volume, &number.to_string());
        (root.path().join("offline").join(key.file_name()), aside.join(key.file_name()), key)
    };
    let put_aside = |number| {
        let (path, _, key) = path_of(number);
        std::fs::write(&path, "damaged").unwrap();
        files.put_aside(&key, &files.read(&key).unwrap_err());
    };
    // A directory with a file is not removed.
    let (path, full, key) = path_of(0);
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join("file"), "").unwrap();
    files.put_aside(&key, &files.read(&key).unwrap_err());
    assert!(full.join("file").exists());
    (1..40).for_each(put_aside);
    assert_eq!(std::fs::read_dir(&aside).unwrap().count(), MAX_ASIDE);
    assert!(full.exists() && path_of(39).1.exists());
    // The times of changes may be equal, so only the rest is certain.
    assert_eq!((1..40).filter(|number| path_of(*number).1.exists()).count(), MAX_ASIDE - 1);
    // No space: the file stays, and is reported.
    for number in 100..115 {
        std::fs::create_dir_all(path_of(number).1.join("x")).unwrap();
    }
    for number in 1..40 {
        let _ = std::fs::remove_file(path_of(number).1);
    }
    put_aside(50);
    let (path, copy, _) = path_of(50);
    assert!(path.exists() && !copy.exists());
    assert!(state_files::problems().iter().any(|(other, text)| *other == path && text.contains("is full")));
}

#[test]
fn only_a_limited_number_of_entries_is_read() {
    let root = tempfile::tempdir().unwrap();
    let files = files(root.path());
    files.write(&map(), b"map").unwrap();
    for number in 0..10 {
        std::fs::write(root.path().join("offline").join(format!("file{number}")), "").unwrap();
    }
    let (entries, is_complete) = files.entries(5).unwrap();
    assert!(entries.len() == 5 && !is_complete);
    let (entries, is_complete) = files.entries(12).unwrap();
    assert!(entries.len() == 12 && is_complete);
    assert_eq!(files.list().unwrap().len(), 1);
}

#[test]
fn only_temporary_files_of_this_directory_are_removed() {
    let map = map().file_name();
    for (name, expected) in [
        (format!("{map}.0123abcd.tmp"), true),
        ("key.0123abcd.tmp".to_owned(), true),
        (map.clone(), false),
        ("key".to_owned(), false),
        ("notes.0123abcd.tmp".to_owned(), false),
        (format!("{map}.tmp"), false),
        (format!("{map}.0123abc.tmp"), false),
        (format!("{map}.0123abcg.tmp"), false),
    ] {
        assert_eq!(is_temporary(&name), expected, "{name}");
    }
}
