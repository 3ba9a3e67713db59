//! `/logs/` and node log queries while a container that may write to a directory below
//! `/var/log` makes, renames and replaces entries there, with links that lead to the node's
//! other files. No response may contain those, none of them may be opened, and no request may
//! hang.
//!
//! The test takes `RACE_SECONDS` (default 4). `FAULTS_SEED` repeats the moves, though not how
//! they interleave with the requests.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::print_line;
use crate::support::fake_node::FakeNode;
use crate::support::file_attack::{Attack, Canary, RunningAttack, race_duration, race_seed};
use crate::support::random::Random;
use crate::support::tls_client::{Response, TlsClient};

/// What was not observed so long after the end will not be.
const HANGS: Duration = Duration::from_secs(120);

/// The directory below `/var/log`, which is the tests' own. The query for a service of this
/// name finds `race.log` in it.
const NAME: &str = "race";
const NAMES: [&str; 5] = ["race.log", "a", "b", "c", "index.html"];

/// How many responses of each kind there were.
#[derive(Debug, Default)]
struct ResponseCounts {
    lists: u32,
    files: u32,
    refusals: u32,
    services: u32,
    /// Files that became shorter during the response.
    cut: u32,
}

impl ResponseCounts {
    fn is_all(&self) -> bool {
        self.lists > 0 && self.files > 0 && self.refusals > 0 && self.services > 0
    }
}

/// Links to the outside: absolute, through the roots of processes, and upward.
fn targets(canary: &Canary, agent: u32) -> Vec<PathBuf> {
    let mut targets = Vec::new();
    for target in canary.targets() {
        let below = target.strip_prefix("/").unwrap();
        for root in [format!("/proc/{agent}/root"), "/proc/self/root".to_owned(), "/proc/1/root".to_owned()] {
            targets.push(Path::new(&root).join(below));
        }
        for depth in 2..7 {
            targets.push(Path::new(&"../".repeat(depth)).join(below));
        }
        targets.push(target);
    }
    let cwd = PathBuf::from(format!("/proc/{agent}/cwd"));
    targets.extend([cwd, "/dev/zero".into(), "/dev/tty".into(), "/".into()]);
    // Of the many links that lead out, some lead in.
    targets.extend(vec![Path::new("/var/log").join(NAME); 8]);
    targets
}

/// The requested paths.
fn path(random: &mut Random) -> String {
    let depth = random.below(4);
    let inner: Vec<&str> = (0..depth).filter_map(|_| random.pick(&NAMES).copied()).collect();
    let inner = inner.join("/");
    match random.below(6) {
        0 => format!("/logs/?query={NAME}"),
        1 => format!("/logs/?query={NAME}/{inner}"),
        2 | 3 => format!("/logs/{NAME}/{inner}"),
        _ if depth == 0 => format!("/logs/{NAME}/"),
        _ => format!("/logs/{NAME}/{inner}/"),
    }
}

fn ask(client: &TlsClient, path: &str) -> io::Result<Response> {
    client.connect()?.ask(&format!("GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"))
}

#[test]
fn log_requests_never_read_outside_the_log_directory() {
    let Some(base) = std::env::var_os("E2E_DIR") else {
        print_line("races: skipped: no /var/log of their own; run through tests/run faults");
        return;
    };
    let outside = tempfile::Builder::new().prefix("races").tempdir_in(base).unwrap();
    let names = NAMES.map(str::to_owned);
    let canary = Canary::new(&outside.path().join("canary"), &names);
    let dir = Path::new("/var/log").join(NAME);
    fs::create_dir(&dir).unwrap();
    let node = FakeNode::start_with(json!({"enableSystemLogQuery": true}));
    let client = TlsClient::new(node.main_port(), None);
    let seed = race_seed();
    let attack = RunningAttack::start(Attack {
        dir: dir.clone(),
        names: names.to_vec(),
        targets: targets(&canary, node.pid()),
        threads: 1,
        seed,
    });

    let (mut random, mut seen, mut requests) = (Random::new(seed), ResponseCounts::default(), 0);
    let begun = Instant::now();
    while begun.elapsed() < race_duration() || !seen.is_all() {
        assert!(begun.elapsed() < race_duration() + HANGS, "after {requests} requests: {seen:?}");
        let path = path(&mut random);
        requests += 1;
        let service = path == format!("/logs/?query={NAME}");
        match ask(&client, &path) {
            Ok(Response { status, body, head }) => {
                assert!(!body.contains(Canary::TEXT), "{path} shows a file outside: {head}{body}");
                match status {
                    200 if service => seen.services += u32::from(body.contains("xxx")),
                    200 if body.starts_with("<!doctype html>") => seen.lists += 1,
                    200 => seen.files += 1,
                    301 | 403 | 404 | 406 => seen.refusals += u32::from(status != 301),
                    other => panic!("{path}: {other}: {head}{body}"),
                }
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => seen.cut += 1,
            Err(error) => panic!("{path} hangs or fails: {error}"),
        }
        canary.assert_no_events();
    }
    let moves = attack.moves();
    drop(attack);
    canary.assert_untouched();
    node.finish();
    canary.assert_untouched();
    let ResponseCounts { lists, files, refusals, services, cut } = seen;
    print_line(&format!(
        "races: /logs/: {requests} requests ({lists} lists, {files} files, {services} services, {refusals} refused, {cut} cut short), {moves} moves, seed {seed}"
    ));
    fs::remove_dir_all(&dir).unwrap();
}
