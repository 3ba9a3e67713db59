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
    let (mut state, now) = (PluginState::default(), Instant::now());
    let path = PathBuf::from("/r/a");
    state.found(&found(&[("/r/a", 1)]), &BTreeSet::new());
    assert_eq!(state.next(now), Some((path.clone(), Operation::Register(identity(1)))));
    assert_eq!(state.next(now), None);
    state.ended(&path, OperationResult::Registered(plugin("a")), now);
    assert_eq!(state.next(now), None);
    state.found(&found(&[("/r/a", 2)]), &BTreeSet::new());
    assert_eq!(state.next(now), Some((path.clone(), Operation::Deregister(plugin("a")))));
    state.ended(&path, OperationResult::Deregistered, now);
    assert_eq!(state.next(now), Some((path.clone(), Operation::Register(identity(2)))));
    state.found(&found(&[]), &BTreeSet::new());
    state.ended(&path, OperationResult::Registered(plugin("a")), now);
    assert_eq!(state.next(now), Some((path.clone(), Operation::Deregister(plugin("a")))));
    state.ended(&path, OperationResult::Deregistered, now);
    assert!(state.list().is_empty());
}

#[test]
fn sockets_below_a_path_that_cannot_be_read_stay() {
    let (mut state, now) = (PluginState::default(), Instant::now());
    let all = found(&[("/r/a/s", 1), ("/r/ab", 2), ("/r/b/c/s", 3)]);
    state.found(&all, &BTreeSet::new());
    while let Some((path, _)) = state.next(now) {
        state.ended(&path, OperationResult::Registered(plugin("p")), now);
    }
    let left = |state: &mut PluginState, unread: &[&str]| {
        state.found(&found(&[]), &unread.iter().map(PathBuf::from).collect());
        let exists = state.list().into_iter().filter(|socket| socket.exists);
        exists.map(|socket| socket.socket.display().to_string()).collect::<Vec<_>>()
    };
    assert_eq!(left(&mut state, &["/r"]), ["/r/a/s", "/r/ab", "/r/b/c/s"]);
    assert_eq!(state.next(now), None);
    assert_eq!(left(&mut state, &["/r/a", "/r/b/c/s"]), ["/r/a/s", "/r/b/c/s"]);
    assert_eq!(left(&mut state, &[]), [""; 0]);
    assert!(matches!(state.next(now), Some((_, Operation::Deregister(_)))));
}

#[test]
fn failures_are_tried_again_later_and_later() {
    let (mut state, mut now) = (PluginState::default(), Instant::now());
    let path = PathBuf::from("/r/a");
    state.found(&found(&[("/r/a", 1)]), &BTreeSet::new());
    let mut pauses = Vec::new();
    for _ in 0..10 {
        assert!(state.next(now).is_some());
        state.ended(&path, OperationResult::Failed("no".into()), now);
        assert_eq!(state.next(now), None);
        let due = state.due().unwrap();
        pauses.push((due - now).as_millis());
        now = due;
    }
    assert_eq!(pauses[..4], [500, 1000, 2000, 4000]);
    assert_eq!(*pauses.last().unwrap(), 122_000);
    assert_eq!(state.list()[0].error.as_deref(), Some("no"));
}

#[test]
fn operations_that_were_not_started_are_due_again() {
    let (mut state, now) = (PluginState::default(), Instant::now());
    let path = PathBuf::from("/r/a");
    let later = now + FIRST_PAUSE;
    let starts = |state: &mut PluginState| {
        let (_, operation) = state.next(now).unwrap();
        assert!(!state.ended(&path, OperationResult::NotStarted, now));
        assert_eq!((state.next(now), state.due()), (None, Some(later)));
        assert_eq!(state.next(later), Some((path.clone(), operation.clone())));
        operation
    };
    state.found(&found(&[("/r/a", 1)]), &BTreeSet::new());
    assert_eq!(starts(&mut state), Operation::Register(identity(1)));
    state.ended(&path, OperationResult::Registered(plugin("a")), now);
    state.found(&found(&[]), &BTreeSet::new());
    // The handler still has the plugin.
    assert_eq!(starts(&mut state), Operation::Deregister(plugin("a")));
    state.ended(&path, OperationResult::Deregistered, now);
    assert!(state.list().is_empty());
}

#[test]
fn operations_and_sockets_are_limited() {
    let (mut state, now) = (PluginState::default(), Instant::now());
    let many: BTreeMap<_, _> =
        (0..MOST_SOCKETS as u64 + 9).map(|n| (PathBuf::from(format!("/r/{n}")), identity(n))).collect();
    state.found(&many, &BTreeSet::new());
    assert_eq!(state.list().len(), MOST_SOCKETS);
    let started = std::iter::from_fn(|| state.next(now)).count();
    assert_eq!(started, MOST_OPERATIONS);
}

proptest! {
    #[test]
    fn all_sockets_are_registered_in_the_end_and_no_others(
        events in proptest::collection::vec((0_u8..4, 0_u8..4, 0_u64..3), 0..80),
    ) {
        let (mut state, mut now) = (PluginState::default(), Instant::now());
        let mut directory = BTreeMap::new();
        let mut running: Vec<(PathBuf, Operation)> = Vec::new();
        let mut handler: BTreeMap<PathBuf, Identity> = BTreeMap::new();
        let mut finish = |state: &mut PluginState, path: PathBuf, operation: Operation, fail: bool, now| {
            let ended = match operation {
                Operation::Register(_) if fail => OperationResult::Failed("no".into()),
                Operation::Register(identity) => {
                    assert!(handler.insert(path.clone(), identity).is_none(), "registered twice");
                    OperationResult::Registered(plugin(path.to_str().unwrap()))
                }
                Operation::Deregister(_) => {
                    assert!(handler.remove(&path).is_some());
                    OperationResult::Deregistered
                }
            };
            state.ended(&path, ended, now);
            handler.clone()
        };
        for (what, which, inode) in events {
            let path = PathBuf::from(format!("/r/{which}"));
            match what {
                0 => { directory.insert(path, identity(inode)); state.found(&directory, &BTreeSet::new()); }
                1 => { directory.remove(&path); state.found(&directory, &BTreeSet::new()); }
                2 => if let Some((path, operation)) = state.next(now) {
                    assert!(running.iter().all(|(other, _)| *other != path), "two operations");
                    running.push((path, operation));
                },
                _ => if !running.is_empty() {
                    let (path, operation) = running.remove(usize::from(which) % running.len());
                    finish(&mut state, path, operation, inode == 0, now);
                },
            }
            now += Duration::from_millis(100);
        }
        for (path, operation) in running {
            finish(&mut state, path, operation, false, now);
        }
        now += LONGEST_PAUSE;
        let mut last = None;
        while let Some((path, operation)) = state.next(now) {
            last = Some(finish(&mut state, path, operation, false, now));
        }
        if let Some(last) = last {
            prop_assert_eq!(last, directory.clone());
        }
        let listed = state.list().into_iter().map(|socket| (socket.socket, socket.plugin.is_some()));
        let listed: Vec<_> = listed.collect();
        prop_assert_eq!(listed, directory.into_keys().map(|path| (path, true)).collect::<Vec<_>>());
    }
}
