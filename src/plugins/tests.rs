use std::collections::BTreeSet;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::*;
use crate::transport::generated::methods::pluginregistration as methods;
use crate::transport::generated::pluginregistration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use crate::transport::rpc_server::{RpcError, Server, Service};
use crate::util::metrics::Page;
use crate::util::testing;
use crate::util::threads::OnDeath;

const LIMIT: Duration = Duration::from_secs(60);

/// Refuses the version `v0`, and cannot register the name `broken`.
struct Recorder(Sender<String>);

impl Handler for Recorder {
    fn validate(&self, _name: &str, _endpoint: &str, versions: &[String]) -> Result<(), String> {
        if versions.iter().any(|version| version == "v0") { Err("no v0".into()) } else { Ok(()) }
    }

    fn register(&self, name: &str, endpoint: &str, _: &[String], _: &StopToken) -> Result<(), String> {
        match name {
            "broken" => Err("it is broken".into()),
            "panic" => panic!("on purpose"),
            _ => {
                self.0.send(format!("+{name} {endpoint}")).unwrap();
                Ok(())
            }
        }
    }

    fn deregister(&self, name: &str, _endpoint: &str) {
        self.0.send(format!("-{name}")).unwrap();
    }
}

struct Fixture {
    dir: tempfile::TempDir,
    calls: Receiver<String>,
    listing: KnownPlugins,
    _plugins: Plugins,
}

impl Fixture {
    fn new() -> Fixture {
        Fixture::with(|_| ())
    }

    /// `prepare` runs before the start.
    fn with(prepare: impl FnOnce(&Path)) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        prepare(dir.path());
        let (sender, calls) = bounded(256);
        let handler: Arc<dyn Handler> = Arc::new(Recorder(sender));
        let listing = KnownPlugins::default();
        let settings = Settings {
            directory: dir.path().to_owned(),
            handlers: Handlers::from([(CSI, handler)]),
            listing: listing.clone(),
        };
        let plugins = Plugins::start(settings, OnDeath::Unsupervised).unwrap();
        Fixture { dir, calls, listing, _plugins: plugins }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn next(&self) -> String {
        self.calls.recv_timeout(LIMIT).expect("a call of the handler")
    }

    /// Waits until the list fulfils a condition.
    fn until(&self, holds: impl Fn(&[SocketStatus]) -> bool) -> Vec<SocketStatus> {
        let end = Instant::now() + LIMIT;
        loop {
            let list = self.listing.list();
            if holds(&list) {
                return list;
            }
            assert!(Instant::now() < end, "{list:?}");
            let _ = self.calls.recv_timeout(Duration::from_millis(20)).map(|call| panic!("{call}"));
        }
    }

    /// A first attempt may come between the calls that make the socket and let it listen.
    fn fails_with(&self, text: &str) {
        let fails = |socket: &SocketStatus| socket.error.as_ref().is_some_and(|error| error.contains(text));
        let list = self.until(|list| list.iter().any(fails));
        assert_eq!(list[0].plugin, None);
    }
}

struct FakePlugin {
    _server: Server,
    statuses: Receiver<(bool, String)>,
}

impl FakePlugin {
    fn start(path: &Path, kind: &str, name: &str, version: &str) -> FakePlugin {
        let info = PluginInfo {
            type_: kind.into(),
            name: name.into(),
            supported_versions: vec![version.into()],
            ..PluginInfo::default()
        };
        FakePlugin::with(path, move |_| Ok(info.clone()), |_| Ok(()))
    }

    fn with(
        path: &Path,
        info: impl Fn(&StopToken) -> Result<PluginInfo, RpcError> + Send + Sync + 'static,
        status: impl Fn(bool) -> Result<(), RpcError> + Send + Sync + 'static,
    ) -> FakePlugin {
        let (sender, statuses) = bounded(256);
        let sender = Mutex::new(sender);
        let service = Service::new()
            .unary(&methods::GET_INFO, move |_: InfoRequest, stop: &StopToken| info(stop))
            .unary(
                &methods::NOTIFY_REGISTRATION_STATUS,
                move |request: RegistrationStatus, _: &StopToken| {
                    let _ = sender.lock().unwrap().send((request.plugin_registered, request.error));
                    status(request.plugin_registered)?;
                    Ok(RegistrationStatusResponse::default())
                },
            );
        FakePlugin { _server: Server::start(path, [service]).unwrap(), statuses }
    }

    fn status(&self) -> (bool, String) {
        self.statuses.recv_timeout(LIMIT).unwrap()
    }
}

#[test]
fn plugin_registers_and_leaves_with_its_socket() {
    let fixture = Fixture::new();
    let path = fixture.path("a.sock");
    let fake = FakePlugin::start(&path, CSI, "a", "v1");
    assert_eq!(fixture.next(), format!("+a {}", path.display()));
    assert_eq!(fake.status(), (true, String::new()));
    fixture.until(|list| list.iter().any(|socket| socket.plugin.is_some()));
    let mut page = Page::new();
    fixture.listing.write_metrics(&mut page);
    let text = page.into_text();
    let labels = format!("{{socket_path=\"{}\",state=\"actual_state_of_world\"}} 1", path.display());
    assert!(text.contains(&labels), "{text}");
    drop(fake);
    assert_eq!(fixture.next(), "-a");
    fixture.until(<[_]>::is_empty);
}

#[test]
fn socket_that_is_there_at_the_start_registers() {
    let mut fake = None;
    let fixture = Fixture::with(|dir| fake = Some(FakePlugin::start(&dir.join("a.sock"), CSI, "a", "v1")));
    assert!(fixture.next().starts_with("+a "));
}

#[test]
fn replaced_socket_leaves_and_registers_again() {
    let fixture = Fixture::new();
    let path = fixture.path("a.sock");
    let _old = FakePlugin::start(&path, CSI, "old", "v1");
    assert!(fixture.next().starts_with("+old "));
    let other = tempfile::tempdir_in("/tmp").unwrap();
    let new_path = other.path().join("n.sock");
    let _new = FakePlugin::start(&new_path, CSI, "new", "v1");
    std::fs::rename(&new_path, &path).unwrap();
    assert_eq!(fixture.next(), "-old");
    assert!(fixture.next().starts_with("+new "));
}

#[test]
fn refused_plugins_get_the_reason() {
    for (kind, name, version, text) in [
        (
            "Other",
            "a",
            "v1",
            "RegisterPlugin error -- no handler registered for plugin type: Other at socket ",
        ),
        (CSI, "a", "v0", "RegisterPlugin error -- plugin validation failed with err: no v0"),
        (CSI, "broken", "v1", "RegisterPlugin error -- plugin registration failed with err: it is broken"),
    ] {
        let fixture = Fixture::new();
        let fake = FakePlugin::start(&fixture.path("a.sock"), kind, name, version);
        let (registered, error) = fake.status();
        assert!(!registered && error.starts_with(text), "{error}");
        fixture.fails_with(text);
    }
}

#[test]
fn panic_of_a_handler_is_a_failure() {
    let fixture = Fixture::new();
    let _fake = FakePlugin::start(&fixture.path("a.sock"), CSI, "panic", "v1");
    fixture.fails_with("died");
}

#[test]
fn lost_notice_removes_the_plugin_again() {
    let fixture = Fixture::new();
    let info = PluginInfo { type_: CSI.into(), name: "a".into(), ..PluginInfo::default() };
    let _fake = FakePlugin::with(
        &fixture.path("a.sock"),
        move |_| Ok(info.clone()),
        |_| Err(RpcError::unavailable("gone")),
    );
    assert!(fixture.next().starts_with("+a "));
    assert_eq!(fixture.next(), "-a");
}

/// The node's objects would lose what the plugin offers until the next agent has registered it.
#[test]
fn plugin_that_does_not_take_its_notice_stays_when_the_agent_ends() {
    let fixture = Fixture::new();
    let info = PluginInfo { type_: CSI.into(), name: "a".into(), ..PluginInfo::default() };
    let (entered_tx, entered) = bounded(1);
    let (end_tx, end) = bounded::<()>(0);
    let _fake = FakePlugin::with(
        &fixture.path("a.sock"),
        move |_| Ok(info.clone()),
        move |_| {
            let _ = entered_tx.try_send(());
            let _ = end.recv();
            Ok(())
        },
    );
    // Dropped before the plugin, which waits for its calls.
    let release = end_tx;
    assert!(fixture.next().starts_with("+a "));
    entered.recv_timeout(LIMIT).unwrap();
    let Fixture { dir: _dir, calls, _plugins: plugins, .. } = fixture;
    drop(plugins);
    assert_eq!(calls.try_iter().next(), None);
    drop(release);
}

#[test]
fn plugins_that_hang_delay_no_other() {
    let fixture = Fixture::new();
    let hang = |stop: &StopToken| {
        let _ = stop.signal().recv();
        Err(RpcError::unavailable("end"))
    };
    let hanging: Vec<FakePlugin> =
        (0..3).map(|n| FakePlugin::with(&fixture.path(&format!("h{n}.sock")), hang, |_| Ok(()))).collect();
    let mute = UnixListener::bind(fixture.path("mute.sock")).unwrap();
    let _fake = FakePlugin::start(&fixture.path("z.sock"), CSI, "z", "v1");
    assert!(fixture.next().starts_with("+z "));
    // A first attempt may also fail because the plugin has made its socket and does not listen yet.
    let timed_out =
        |socket: &&SocketStatus| socket.error.iter().any(|error| error.contains("using RPC GetInfo"));
    fixture.until(|list| list.iter().filter(timed_out).count() == 4);
    drop((hanging, mute));
}

#[test]
fn plugin_that_ends_midway_fails_and_its_successor_registers() {
    let fixture = Fixture::new();
    let path = fixture.path("a.sock");
    let listener = UnixListener::bind(&path).unwrap();
    drop(listener.accept().unwrap());
    drop(listener);
    fixture.fails_with("RegisterPlugin error -- ");
    let _fake = FakePlugin::start(&path, CSI, "a", "v1");
    assert!(fixture.next().starts_with("+a "));
}

#[test]
fn huge_response_is_an_error() {
    let fixture = Fixture::new();
    let info = PluginInfo { type_: CSI.into(), name: "x".repeat(1 << 20), ..PluginInfo::default() };
    let _fake = FakePlugin::with(&fixture.path("a.sock"), move |_| Ok(info.clone()), |_| Ok(()));
    fixture.fails_with("using RPC GetInfo");
}

#[test]
fn only_sockets_without_a_dot_count() {
    let fixture = Fixture::new();
    let outside = tempfile::tempdir().unwrap();
    let _linked = FakePlugin::start(&outside.path().join("o.sock"), CSI, "linked", "v1");
    symlink(outside.path().join("o.sock"), fixture.path("link.sock")).unwrap();
    symlink(outside.path(), fixture.path("linked")).unwrap();
    std::fs::write(fixture.path("file.sock"), "x").unwrap();
    let fifo = fixture.path("fifo.sock");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let _hidden = FakePlugin::start(&fixture.path(".hidden.sock"), CSI, "hidden", "v1");
    let _fake = FakePlugin::start(&fixture.path("z.sock"), CSI, "z", "v1");
    assert!(fixture.next().starts_with("+z "));
    assert_eq!(fixture.listing.list().len(), 1);
}

#[test]
fn sockets_in_new_directories_register_and_leave_with_them() {
    let fixture = Fixture::new();
    let deep = fixture.path("a/b/c");
    std::fs::create_dir_all(&deep).unwrap();
    let _fake = FakePlugin::start(&deep.join("s.sock"), CSI, "deep", "v1");
    assert!(fixture.next().starts_with("+deep "));
    std::fs::remove_dir_all(fixture.path("a")).unwrap();
    assert_eq!(fixture.next(), "-deep");
}

#[test]
fn directory_trees_without_end_are_cut() {
    let dir = tempfile::tempdir().unwrap();
    let mut path = dir.path().to_owned();
    for _ in 0..100 {
        path.push("d");
    }
    std::fs::create_dir_all(&path).unwrap();
    let scan = tree::Tree::new(dir.path()).scan();
    assert!(scan.is_truncated && scan.sockets.is_empty() && !scan.is_unwatched);
}

#[test]
fn plugins_behind_the_limits_of_a_scan_stay() {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = (0..5).map(|n| dir.path().join(format!("d{n}/s.sock"))).collect();
    let bind = |path: &PathBuf| {
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        UnixListener::bind(path).unwrap()
    };
    let _sockets: Vec<UnixListener> = paths.iter().map(bind).collect();
    let _here = UnixListener::bind(dir.path().join("s.sock")).unwrap();
    let (mut state, now) = (state::PluginState::default(), Instant::now());
    let mut tree = tree::Tree::new(dir.path());
    let full = tree.scan();
    assert!(full.sockets.len() == 6 && !full.is_truncated && full.unread.is_empty(), "{full:?}");
    state.found(&full.sockets, &full.unread);
    let plugin =
        state::Plugin { kind: CSI.into(), name: "p".into(), endpoint: "/e".into(), versions: Vec::new() };
    while let Some((path, _)) = state.next(now) {
        state.ended(&path, state::OperationResult::Registered(plugin.clone()), now);
    }
    let limits = tree.limits;
    let mut sets = Vec::new();
    sets.extend((0..12).map(|names| tree::ScanLimits { names, ..limits }));
    sets.extend((1..6).map(|directories| tree::ScanLimits { directories, ..limits }));
    sets.extend((0..6).map(|sockets| tree::ScanLimits { sockets, ..limits }));
    for set in sets {
        tree.limits = set;
        let scan = tree.scan();
        state.found(&scan.sockets, &scan.unread);
        let complete = scan.sockets.len() == 6;
        assert!(scan.is_truncated != complete && scan.unread.is_empty() == complete, "{set:?}: {scan:?}");
        assert!(scan.error.is_none());
        assert_eq!(state.next(now), None, "{set:?}: {scan:?}");
    }
    // What was read is known: only the directory of the other sockets is left out.
    std::fs::remove_file(dir.path().join("s.sock")).unwrap();
    tree.limits = tree::ScanLimits { directories: 1, ..limits };
    let scan = tree.scan();
    state.found(&scan.sockets, &scan.unread);
    let removed = (dir.path().join("s.sock"), state::Operation::Deregister(plugin));
    assert_eq!((state.next(now), state.next(now)), (Some(removed), None));
}

#[test]
fn directory_that_cannot_be_read_is_unknown_and_not_empty() {
    let dir = tempfile::tempdir().unwrap();
    let closed = dir.path().join("closed");
    std::fs::create_dir(&closed).unwrap();
    let _sockets =
        [dir.path().join("a.sock"), closed.join("b.sock")].map(|path| UnixListener::bind(path).unwrap());
    let tree = tree::Tree::new(dir.path());
    let scan = tree.scan();
    assert!(scan.sockets.len() == 2 && scan.unread.is_empty() && scan.error.is_none(), "{scan:?}");
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o0)).unwrap();
    let scan = testing::without_access(move || tree.scan());
    assert_eq!(scan.sockets.into_keys().collect::<Vec<_>>(), [dir.path().join("a.sock")]);
    assert_eq!(
        (scan.unread, scan.error),
        (BTreeSet::from([closed.clone()]), Some((closed.clone(), rustix::io::Errno::ACCESS)))
    );
    std::fs::remove_dir_all(&closed).unwrap();
    let scan = tree::Tree::new(&closed).scan();
    assert!(scan.unread.is_empty() && scan.is_unwatched, "a directory that is gone has no sockets");
}

#[test]
fn thousand_dead_sockets_do_not_stop_a_live_one() {
    let fixture = Fixture::with(|dir| {
        for n in 0..1000 {
            drop(UnixListener::bind(dir.join(format!("{n}.sock"))).unwrap());
        }
    });
    let _fake = FakePlugin::start(&fixture.path("live.sock"), CSI, "live", "v1");
    assert!(fixture.next().starts_with("+live "));
    assert_eq!(fixture.listing.list().len(), 1001);
}
