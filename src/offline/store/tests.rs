use super::*;
use crate::offline::format;
use crate::offline::settings::Settings;
use crate::util::state_files;
use crate::util::testing::{fifo, without_access};
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

fn settings(root: &Path, stores_secrets: bool) -> Settings {
    Settings {
        directory: root.join("offline"),
        node_name: "n".to_owned(),
        stores_secrets,
        key_file: None,
        wait: Duration::ZERO,
        accept_after: Duration::ZERO,
        fence: super::super::fence::FenceSettings::default(),
    }
}

struct Fixture {
    root: tempfile::TempDir,
    files: Files,
    store: Store,
}

impl Fixture {
    fn new() -> Fixture {
        let root = tempfile::tempdir().unwrap();
        let (files, problems) = Files::open(&settings(root.path(), true));
        assert!(problems.is_empty(), "{problems:?}");
        let (store, problems) = Store::open(&files);
        assert!(problems.is_empty() && store.bytes() == 0, "{problems:?}");
        Fixture { root, files, store }
    }

    fn put(&mut self, key: &Key, body: &[u8]) -> Result<Stored, FileError> {
        self.store.put(&self.files, key, body)
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.root.path().join("offline").join(key.file_name())
    }

    fn copy(&self, key: &Key) -> PathBuf {
        self.root.path().join("offline").join("damaged").join(key.file_name())
    }

    /// The store after a restart.
    fn open(&self) -> (Store, Vec<String>) {
        Store::open(&self.files)
    }
}

fn keys() -> [Key; 4] {
    [
        Key::new(Kind::Pod, "u"),
        Key::new(Kind::Token, "u/1"),
        Key::namespaced(Kind::Secret, "n", "s"),
        Key::namespaced(Kind::ConfigMap, "n", "m"),
    ]
}

#[test]
fn equal_bodies_are_not_written() {
    let mut node = Fixture::new();
    for key in keys() {
        assert_eq!(node.put(&key, b"one").unwrap(), Stored::Written);
        let stat = |node: &Fixture| {
            let stat = std::fs::metadata(node.path(&key)).unwrap();
            (stat.ino(), stat.mtime(), stat.mtime_nsec())
        };
        let before = stat(&node);
        assert_eq!(node.put(&key, b"one").unwrap(), Stored::Same);
        node.store = node.open().0;
        assert_eq!(node.put(&key, b"one").unwrap(), Stored::Same, "after a restart");
        assert_eq!(stat(&node), before);
        assert_eq!(node.put(&key, b"two").unwrap(), Stored::Written);
        assert_ne!(stat(&node).0, before.0);
        // A reader put it aside.
        std::fs::remove_file(node.path(&key)).unwrap();
        assert_eq!(node.put(&key, b"two").unwrap(), Stored::Written);
    }
    let bytes: u64 = keys().iter().map(|key| std::fs::metadata(node.path(key)).unwrap().len()).sum();
    let (again, _) = node.open();
    assert_eq!((node.store.bytes(), again.bytes()), (bytes, bytes));
    assert_eq!(again.objects(), node.store.objects());
    assert_eq!(again.kind_bytes(), node.store.kind_bytes());
    assert_eq!(again.kind_bytes().values().sum::<u64>(), again.bytes());
    assert_eq!(again.objects().get("secret"), Some(&1));
    assert!(again.keys().eq(node.store.keys()) && again.keys().count() == 4);
    for key in keys() {
        node.store.remove(&node.files, &key).unwrap();
        node.store.remove(&node.files, &key).unwrap();
        assert!(!node.path(&key).exists());
    }
    assert_eq!((node.store.bytes(), node.store.keys().count()), (0, 0));
}

#[test]
fn each_damaged_file_is_put_aside_and_the_others_are_read() {
    type Damage = fn(&Path);
    let cases: [(&str, Damage); 10] = [
        ("empty", |path| std::fs::write(path, "").unwrap()),
        ("cut", |path| {
            let file = std::fs::read(path).unwrap();
            std::fs::write(path, &file[..file.len() / 2]).unwrap();
        }),
        ("zeros", |path| {
            let file = std::fs::read(path).unwrap();
            std::fs::write(path, vec![0; file.len()]).unwrap();
        }),
        ("flipped bit", |path| {
            let mut file = std::fs::read(path).unwrap();
            let middle = file.len() / 2;
            file[middle] ^= 4;
            std::fs::write(path, file).unwrap();
        }),
        ("longer", |path| {
            let file = std::fs::read(path).unwrap();
            std::fs::write(path, [&file[..], b"x"].concat()).unwrap();
        }),
        ("large", |path| {
            let file = std::fs::File::create(path).unwrap();
            file.set_len(1 << 30).unwrap();
        }),
        ("directory", |path| {
            std::fs::remove_file(path).unwrap();
            std::fs::create_dir(path).unwrap();
            std::fs::write(path.join("x"), "").unwrap();
        }),
        ("fifo", |path| {
            std::fs::remove_file(path).unwrap();
            fifo(path);
        }),
        ("device", |path| {
            std::fs::remove_file(path).unwrap();
            symlink("/dev/zero", path).unwrap();
        }),
        ("unreadable", |path| std::fs::set_permissions(path, Permissions::from_mode(0o0)).unwrap()),
    ];
    without_access(move || {
        for (case, damage) in cases {
            let [pod, _, secret, _] = keys();
            for key in [pod, secret] {
                let mut node = Fixture::new();
                for other in keys() {
                    node.put(&other, b"body").unwrap();
                }
                damage(&node.path(&key));
                let (store, problems) = node.open();
                let [problem] = &problems[..] else { panic!("{case}: {problems:?}") };
                assert!(problem.contains(&key.file_name()), "{case}: {problem}");
                assert!(node.path(&key).symlink_metadata().is_err(), "{case}");
                assert!(node.copy(&key).symlink_metadata().is_ok(), "{case}");
                assert!(state_files::problems().iter().any(|(path, _)| *path == node.copy(&key)), "{case}");
                let left: Vec<Key> = keys().into_iter().filter(|other| *other != key).collect();
                assert!(store.keys().count() == 3 && left.iter().all(|key| store.known.contains_key(key)));
                for other in left {
                    assert_eq!(node.files.read(&other).unwrap().unwrap().reveal(), b"body", "{case}");
                }
                // It is not stored, so the next body is written.
                assert!(node.files.read(&key).unwrap().is_none(), "{case}");
                node.store = store;
                assert_eq!(node.put(&key, b"body").unwrap(), Stored::Written, "{case}");
                assert!(node.open().1.is_empty(), "{case}");
            }
        }
    });
}

#[test]
fn valid_file_under_another_name_is_put_aside() {
    let mut node = Fixture::new();
    let [pod, _, secret, map] = keys();
    node.put(&map, b"map").unwrap();
    std::fs::rename(node.path(&map), node.path(&secret)).unwrap();
    node.put(&pod, b"pod").unwrap();
    let (store, problems) = node.open();
    assert!(problems.len() == 1 && problems[0].contains("another object"), "{problems:?}");
    assert_eq!(store.keys().collect::<Vec<_>>(), [&pod]);
    assert!(node.copy(&secret).exists() && !node.path(&secret).exists());
}

/// The states of the directory in which a power cut may leave a write: before and after the rename.
#[test]
fn interrupted_write_leaves_the_former_file_or_the_new_one() {
    let mut node = Fixture::new();
    let [_, _, secret, _] = keys();
    node.put(&secret, b"former").unwrap();
    let directory = node.root.path().join("offline");
    let new = node.files.encode(&secret, b"newer").unwrap();
    let temporary = directory.join(format!("{}.0123abcd.tmp", secret.file_name()));
    std::fs::write(directory.join("key.00000000.tmp"), "0123").unwrap();
    std::fs::write(directory.join("notes.tmp"), "of another program").unwrap();
    for length in 0..=new.len() {
        std::fs::write(&temporary, &new[..length]).unwrap();
        let (store, problems) = node.open();
        assert!(problems.is_empty() && store.keys().eq([&secret]), "{length}: {problems:?}");
        assert_eq!(node.files.read(&secret).unwrap().unwrap().reveal(), b"former");
        assert!(!temporary.exists());
    }
    std::fs::write(node.path(&secret), &new).unwrap();
    assert!(node.open().1.is_empty());
    assert_eq!(node.files.read(&secret).unwrap().unwrap().reveal(), b"newer");
    assert!(directory.join("notes.tmp").exists() && directory.join("key").exists());
    assert!(!directory.join("key.00000000.tmp").exists());
}

#[test]
fn sealed_files_stay_without_their_key_and_go_if_they_are_not_wanted() {
    let mut node = Fixture::new();
    for key in keys() {
        node.put(&key, b"body").unwrap();
    }
    let [pod, token, secret, map] = keys();
    std::fs::create_dir(node.root.path().join("offline").join("damaged")).unwrap();
    std::fs::copy(node.path(&secret), node.copy(&secret)).unwrap();
    std::fs::copy(node.path(&map), node.copy(&map)).unwrap();
    let key_file = node.root.path().join("offline").join("key");
    let digits = std::fs::read(&key_file).unwrap();
    std::fs::remove_file(&key_file).unwrap();
    node.files = Files::open(&settings(node.root.path(), true)).0;
    let (mut store, problems) = node.open();
    assert!(problems.is_empty(), "{problems:?}");
    assert_eq!((store.keys().count(), store.bytes()), (4, node.store.bytes()));
    assert!(store.put(&node.files, &secret, b"body").is_err());
    assert_eq!(store.put(&node.files, &map, b"body").unwrap(), Stored::Same);
    // A token goes with its pod.
    store.remove(&node.files, &token).unwrap();
    assert!(node.path(&secret).exists() && node.copy(&secret).exists() && !node.path(&token).exists());
    // The key is back.
    std::fs::write(&key_file, digits).unwrap();
    std::fs::set_permissions(&key_file, Permissions::from_mode(0o600)).unwrap();
    node.files = Files::open(&settings(node.root.path(), true)).0;
    assert_eq!(node.files.read(&secret).unwrap().unwrap().reveal(), b"body");

    node.files = Files::open(&settings(node.root.path(), false)).0;
    let (store, problems) = node.open();
    assert!(problems.is_empty(), "{problems:?}");
    assert_eq!(store.keys().collect::<Vec<_>>(), [&pod, &map]);
    assert!(!node.path(&secret).exists() && !node.copy(&secret).exists());
    assert!(node.copy(&map).exists() && key_file.exists());
    let copy = node.copy(&map);
    let reported = state_files::problems().into_iter().find(|(path, _)| *path == copy).unwrap().1;
    assert!(reported.contains("at an earlier start"), "{reported}");
}

#[test]
fn failed_write_is_repeated_and_its_bytes_count() {
    let mut node = Fixture::new();
    let [_, _, _, map] = keys();
    node.put(&map, b"former").unwrap();
    let bytes = node.store.bytes();
    // A directory with a file in its place.
    std::fs::remove_file(node.path(&map)).unwrap();
    std::fs::create_dir_all(node.path(&map).join("x")).unwrap();
    assert!(node.put(&map, b"new").is_err());
    assert_eq!((node.store.bytes(), node.store.keys().count()), (0, 0));
    std::fs::remove_dir_all(node.path(&map)).unwrap();
    assert_eq!(node.put(&map, b"former").unwrap(), Stored::Written);
    assert_eq!(node.store.bytes(), bytes);
    assert!(matches!(node.put(&map, &vec![0; 7 << 20]), Err(FileError::Format(_))));
    assert_eq!(node.files.read(&map).unwrap().unwrap().reveal(), b"former");
    assert_eq!(node.put(&map, b"former").unwrap(), Stored::Same);
}

#[test]
fn other_kinds_leave_space_for_pods() {
    let mut node = Fixture::new();
    let [pod, token, secret, map] = keys();
    node.put(&map, &[b'x'; 10]).unwrap();
    node.store.bytes = MAX_BYTES - RESERVED_BYTES;
    for key in [&token, &secret] {
        assert!(matches!(node.put(key, b"body"), Err(FileError::Full)));
        assert!(!node.path(key).exists());
    }
    assert!(matches!(node.put(&map, &[b'x'; 11]), Err(FileError::Full)));
    // Smaller than before.
    assert_eq!(node.put(&map, b"small").unwrap(), Stored::Written);
    for key in [&pod, &Key::node(), &Key::new(Kind::PodStatus, "u"), &Key::contact(), &Key::cluster()] {
        assert_eq!(node.put(key, b"body").unwrap(), Stored::Written);
    }
    node.store.bytes = MAX_BYTES;
    assert!(matches!(node.put(&Key::new(Kind::Pod, "v"), &[b'x'; 1000]), Err(FileError::Full)));
    assert!(
        node.path(&map).exists() && node.store.take_evicted().is_empty(),
        "nothing goes if that does not help"
    );

    node.store = Store::default();
    for number in 0..MAX_FILES - RESERVED_FILES {
        node.store.insert(Key::namespaced(Kind::Claim, "n", &number.to_string()), None, 1);
    }
    assert!(matches!(node.put(&map, b"body"), Err(FileError::Full)));
    assert_eq!(node.put(&pod, b"body").unwrap(), Stored::Written);
    let claim = Key::namespaced(Kind::Claim, "n", "0");
    assert!(node.put(&claim, b"body").is_ok(), "an object that has a file");
    node.store = Store::default();
    for number in 0..MAX_FILES {
        node.store.insert(Key::new(Kind::Pod, &number.to_string()), None, 1);
    }
    assert!(matches!(node.put(&Key::new(Kind::Pod, "v"), b"body"), Err(FileError::Full)));
}

#[test]
fn namespace_that_takes_all_the_space_leaves_it_to_others() {
    let mut node = Fixture::new();
    let map = |namespace: &str, name: &str| Key::namespaced(Kind::ConfigMap, namespace, name);
    node.put(&map("large", "a"), &[b'x'; 2000]).unwrap();
    node.put(&map("large", "b"), &[b'x'; 1000]).unwrap();
    node.put(&map("small", "a"), b"body").unwrap();
    node.store.bytes = MAX_BYTES - RESERVED_BYTES;
    let large = |node: &Fixture| ["a", "b"].map(|name| node.path(&map("large", name)).exists());
    assert_eq!(node.put(&map("small", "b"), &[b'x'; 100]).unwrap(), Stored::Written);
    assert_eq!((large(&node), node.store.take_evicted()), ([false, true], vec![map("large", "a")]));
    assert!(node.path(&map("small", "a")).exists());
    // It is not pushed back: nothing swings.
    node.store.bytes = MAX_BYTES - RESERVED_BYTES;
    assert!(matches!(node.put(&map("large", "a"), &[b'x'; 2000]), Err(FileError::Full)));
    assert!(node.path(&map("small", "b")).exists() && node.store.take_evicted().is_empty());
    // Pods come before all others, and the largest of them leaves its place to another one.
    let pod = |uid: &str| Key::new(Kind::Pod, uid);
    node.store.bytes = MAX_BYTES;
    assert_eq!(node.put(&pod("u"), &[b'x'; 900]).unwrap(), Stored::Written);
    assert_eq!((large(&node), node.store.take_evicted()), ([false, false], vec![map("large", "b")]));
    let status = Key::new(Kind::PodStatus, "u");
    node.store.bytes = 0;
    node.put(&status, &[b'x'; 5000]).unwrap();
    node.store.bytes = MAX_BYTES;
    assert_eq!(node.put(&pod("v"), &[b'x'; 300]).unwrap(), Stored::Written);
    assert!(!node.path(&pod("u")).exists() && node.path(&status).exists(), "an ended pod stays ended");
}

/// Few pods start without their other objects.
#[test]
fn pods_take_half_of_the_space_at_most_and_the_largest_goes_for_a_smaller_one() {
    let mut node = Fixture::new();
    let [pod, _, secret, map] = keys();
    let other = |number: u64| Key::new(Kind::Pod, &number.to_string());
    node.put(&map, b"body").unwrap();
    node.store.insert(other(0), None, MAX_POD_BYTES - 100);
    assert_eq!(node.put(&pod, &[b'x'; 200]).unwrap(), Stored::Written);
    assert_eq!(node.store.take_evicted(), [other(0)]);
    for number in 1..=64 {
        node.store.insert(other(number), None, MAX_POD_BYTES / 64);
    }
    // It is larger than each of the others.
    let body = vec![b'x'; 1 << 20];
    assert!(matches!(node.put(&pod, &body), Err(FileError::Full)));
    assert!(node.path(&map).exists() && node.path(&pod).exists() && node.store.take_evicted().is_empty());
    // Statuses are no part of it: an ended pod must stay ended.
    assert_eq!(node.put(&Key::new(Kind::PodStatus, "u"), &body).unwrap(), Stored::Written);
    assert_eq!(node.put(&secret, &body).unwrap(), Stored::Written);
    assert_eq!(node.put(&pod, b"small").unwrap(), Stored::Written);
    assert!(node.path(&map).exists() && node.store.take_evicted().is_empty());
}

#[test]
fn pod_with_thousands_of_missing_objects_leaves_places_to_others() {
    let mut node = Fixture::new();
    for number in 0..MAX_FILES - RESERVED_FILES {
        node.store.insert(Key::namespaced(Kind::Secret, "many", &number.to_string()), None, 1);
    }
    let map = Key::namespaced(Kind::ConfigMap, "few", "m");
    assert_eq!(node.put(&map, b"body").unwrap(), Stored::Written);
    let evicted = node.store.take_evicted();
    assert!(evicted.len() == 1 && evicted[0].owner() == ("namespace", "many"), "{evicted:?}");
    let more = Key::namespaced(Kind::Secret, "many", "more");
    assert!(matches!(node.put(&more, b"body"), Err(FileError::Full)) && node.path(&map).exists());
}

/// One pod may have thousands of optional trust bundles, or of inline volumes of drivers, that do not exist.
#[test]
fn objects_of_the_cluster_that_do_not_exist_take_few_places_and_leave_them_to_those_that_do() {
    for kind in [Kind::TrustBundles, Kind::CsiDriver] {
        let mut node = Fixture::new();
        let name = |number: usize| Key::new(kind, &format!("name/{number:0200}"));
        node.put(&name(0), b"null").unwrap();
        let bytes = node.store.bytes();
        for number in 1..MAX_SHARED {
            node.store.insert(name(number), None, bytes);
        }
        assert!(matches!(node.put(&name(MAX_SHARED), b"null"), Err(FileError::Full)));
        assert!(matches!(node.put(&Key::new(kind, "long-name"), b"null"), Err(FileError::Full)));
        let real = Key::new(kind, "r");
        assert_eq!(node.put(&real, b"{\"spec\":{}}").unwrap(), Stored::Written);
        assert_eq!(node.store.take_evicted().len(), 1);
        assert_eq!(node.put(&real, b"{}").unwrap(), Stored::Written, "one that is stored may change");
        assert_eq!(node.store.keys().count(), MAX_SHARED);
        assert!(node.put(&Key::namespaced(Kind::ConfigMap, "n", "m"), b"null").is_ok());
    }
}

#[test]
fn tokens_and_certificates_of_many_pods_push_out_only_such() {
    for kind in [Kind::Token, Kind::PodCertificate] {
        let mut node = Fixture::new();
        for number in 0..MAX_FILES - RESERVED_FILES - 10 {
            node.store.insert(Key::namespaced(Kind::Secret, "n", &number.to_string()), None, 1);
        }
        for number in 0..10 {
            node.store.insert(Key::new(Kind::Token, &format!("many/{number}")), None, 1);
        }
        let own = Key::new(kind, "few/1");
        assert_eq!(node.put(&own, b"body").unwrap(), Stored::Written);
        assert!(node.store.take_evicted().iter().all(|key| key.owner() == ("pod", "many")));
        let secrets = node.store.keys().filter(|key| key.kind == Kind::Secret).count();
        assert_eq!(secrets, MAX_FILES - RESERVED_FILES - 10);
    }
}

#[test]
fn largest_objects_above_the_limit_go_and_pods_stay() {
    let mut node = Fixture::new();
    let [pod, token, secret, map] = keys();
    for key in [&pod, &token, &secret, &map] {
        node.put(key, b"body").unwrap();
    }
    let found = |sizes: &[(&Key, u64)]| -> Vec<(String, u64)> {
        sizes.iter().map(|(key, bytes)| (key.file_name(), *bytes)).collect()
    };
    let large = format::MAX_FILE_BYTES as u64;
    let mut all = found(&[(&pod, large), (&token, 5), (&secret, large), (&map, large - 1)]);
    // Together with the token and the pod, these have less than the limit.
    all.extend((1..9).map(|number| (Key::new(Kind::Pod, &number.to_string()).file_name(), large)));
    let mut problems = Problems::default();
    let left = remove_largest(&node.files, all.clone(), &mut problems);
    let problems = problems.finish();
    assert!(problems.len() == 1 && problems[0].contains(&secret.file_name()), "{problems:?}");
    assert!(left.len() == 11 && !node.path(&secret).exists() && node.path(&map).exists());
    assert_eq!(remove_largest(&node.files, left.clone(), &mut Problems::default()), left);
    // Only pods, and sizes that no write of ours has.
    all.truncate(1);
    all.extend((1..11).map(|number| (Key::new(Kind::Pod, &number.to_string()).file_name(), u64::MAX)));
    let left = remove_largest(&node.files, all, &mut Problems::default());
    assert_eq!(left.len(), 10);
    assert!(left.contains(&(pod.file_name(), large)) && node.path(&pod).exists());
}

#[test]
fn large_files_of_other_processes_do_not_delay_the_start() {
    let mut node = Fixture::new();
    let [pod, _, secret, _] = keys();
    node.put(&pod, b"pod").unwrap();
    node.put(&secret, b"secret").unwrap();
    for number in 0..20 {
        for kind in [Kind::Pod, Kind::Secret] {
            let path = node.path(&Key::new(kind, &number.to_string()));
            std::fs::File::create(path).unwrap().set_len(1 << 30).unwrap();
        }
    }
    assert_eq!(node.files.keys(Kind::Pod), std::slice::from_ref(&pod));
    let (store, problems) = node.open();
    assert!(store.keys().eq([&pod, &secret]), "{problems:?}");
    assert!(store.bytes() < 1000 && node.files.list().unwrap().len() == 2);
}

#[test]
fn thousands_of_damaged_files_are_a_few_texts() {
    let node = Fixture::new();
    for number in 0..40 {
        std::fs::write(node.path(&Key::new(Kind::Volume, &number.to_string())), "x").unwrap();
    }
    let (store, problems) = node.open();
    assert_eq!((store.keys().count(), problems.len()), (0, MAX_PROBLEMS + 1));
    assert_eq!(problems.last().unwrap(), "24 more stored objects");
    assert!(node.files.list().unwrap().is_empty());
}

#[test]
fn debug_output_has_no_digest() {
    let mut node = Fixture::new();
    let [_, _, secret, _] = keys();
    node.put(&secret, b"canary").unwrap();
    let shown = format!("{:?}", node.store);
    assert!(
        shown.contains("Secret(..)") && !shown.contains(&format!("{}, ", sha256(b"canary")[0])),
        "{shown}"
    );
}
