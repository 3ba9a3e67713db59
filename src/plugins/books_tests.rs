use proptest::prelude::*;

use super::*;

fn identity(inode: u64) -> Identity {
    Identity { device: 1, inode, modified: 0 }
}

fn plugin(name: &str) -> Plugin {
    Plugin { kind: super::super::CSI.into(), name: name.into(), endpoint: "/e".into(), versions: Vec::new() }
}

fn found(sockets: &[(&str, u64)]) -> BTreeMap<PathBuf, Identity> {
    sockets.iter().map(|(path, inode)| (PathBuf::from(path), identity(*inode))).collect()
}

#[test]
fn replaced_socket_is_removed_first_and_registered_then() {
    let (mut books, now) = (Books::default(), Instant::now());
    let path = PathBuf::from("/r/a");
    books.found(&found(&[("/r/a", 1)]));
    assert_eq!(books.next(now), Some((path.clone(), Step::Register(identity(1)))));
    assert_eq!(books.next(now), None);
    books.ended(&path, Ended::Registered(plugin("a")), now);
    assert_eq!(books.next(now), None);
    books.found(&found(&[("/r/a", 2)]));
    assert_eq!(books.next(now), Some((path.clone(), Step::Deregister(plugin("a")))));
    books.ended(&path, Ended::Deregistered, now);
    assert_eq!(books.next(now), Some((path.clone(), Step::Register(identity(2)))));
    books.found(&found(&[]));
    books.ended(&path, Ended::Registered(plugin("a")), now);
    assert_eq!(books.next(now), Some((path.clone(), Step::Deregister(plugin("a")))));
    books.ended(&path, Ended::Deregistered, now);
    assert!(books.list().is_empty());
}

#[test]
fn failures_are_tried_again_later_and_later() {
    let (mut books, mut now) = (Books::default(), Instant::now());
    let path = PathBuf::from("/r/a");
    books.found(&found(&[("/r/a", 1)]));
    let mut pauses = Vec::new();
    for _ in 0..10 {
        assert!(books.next(now).is_some());
        books.ended(&path, Ended::Failed("no".into()), now);
        assert_eq!(books.next(now), None);
        let due = books.wakes().unwrap();
        pauses.push((due - now).as_millis());
        now = due;
    }
    assert_eq!(pauses[..4], [500, 1000, 2000, 4000]);
    assert_eq!(*pauses.last().unwrap(), 122_000);
    assert_eq!(books.list()[0].error.as_deref(), Some("no"));
}

#[test]
fn operations_and_sockets_are_limited() {
    let (mut books, now) = (Books::default(), Instant::now());
    let many: BTreeMap<_, _> =
        (0..MOST_SOCKETS as u64 + 9).map(|n| (PathBuf::from(format!("/r/{n}")), identity(n))).collect();
    books.found(&many);
    assert_eq!(books.list().len(), MOST_SOCKETS);
    let started = std::iter::from_fn(|| books.next(now)).count();
    assert_eq!(started, MOST_OPERATIONS);
}

proptest! {
    #[test]
    fn all_sockets_are_registered_in_the_end_and_no_others(
        events in proptest::collection::vec((0_u8..4, 0_u8..4, 0_u64..3), 0..80),
    ) {
        let (mut books, mut now) = (Books::default(), Instant::now());
        let mut directory = BTreeMap::new();
        let mut running: Vec<(PathBuf, Step)> = Vec::new();
        let mut handler: BTreeMap<PathBuf, Identity> = BTreeMap::new();
        let mut finish = |books: &mut Books, path: PathBuf, step: Step, fail: bool, now| {
            let ended = match step {
                Step::Register(_) if fail => Ended::Failed("no".into()),
                Step::Register(identity) => {
                    assert!(handler.insert(path.clone(), identity).is_none(), "registered twice");
                    Ended::Registered(plugin(path.to_str().unwrap()))
                }
                Step::Deregister(_) => {
                    assert!(handler.remove(&path).is_some());
                    Ended::Deregistered
                }
            };
            books.ended(&path, ended, now);
            handler.clone()
        };
        for (what, which, inode) in events {
            let path = PathBuf::from(format!("/r/{which}"));
            match what {
                0 => { directory.insert(path, identity(inode)); books.found(&directory); }
                1 => { directory.remove(&path); books.found(&directory); }
                2 => if let Some((path, step)) = books.next(now) {
                    assert!(running.iter().all(|(other, _)| *other != path), "two operations");
                    running.push((path, step));
                },
                _ => if !running.is_empty() {
                    let (path, step) = running.remove(usize::from(which) % running.len());
                    finish(&mut books, path, step, inode == 0, now);
                },
            }
            now += Duration::from_millis(100);
        }
        for (path, step) in running {
            finish(&mut books, path, step, false, now);
        }
        now += LONGEST_PAUSE;
        let mut last = None;
        while let Some((path, step)) = books.next(now) {
            last = Some(finish(&mut books, path, step, false, now));
        }
        if let Some(last) = last {
            prop_assert_eq!(last, directory.clone());
        }
        let listed: Vec<_> = books.list().into_iter().map(|it| (it.socket, it.plugin.is_some())).collect();
        prop_assert_eq!(listed, directory.into_keys().map(|path| (path, true)).collect::<Vec<_>>());
    }
}
