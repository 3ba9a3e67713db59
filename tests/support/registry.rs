//! An image registry on loopback that serves the local busybox image under every name. It can
//! ask for a password, and it can delay its responses until the test releases them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use serde_json::Value;

use super::web::{Reply, Request, Server};

#[derive(Default)]
struct State {
    /// While true, every manifest asked for by its tag waits.
    held: bool,
    waiting: Vec<String>,
    most_waiting: usize,
    /// `Authorization` header that is wanted.
    wanted: Option<String>,
    /// Names and times of manifests asked for by tag.
    requests: Vec<(String, Instant)>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// A running registry.
pub(crate) struct Registry {
    shared: Arc<Shared>,
    server: Server,
}

impl Registry {
    /// Serves busybox. `dir` takes what the archive holds.
    pub(crate) fn start(dir: &Path) -> Registry {
        let layout = unpack(dir);
        let index: Value = serde_json::from_slice(&read(&layout.join("index.json"))).expect("index.json");
        let manifest = index["manifests"][0].clone();
        let shared = Arc::new(Shared { state: Mutex::new(State::default()), changed: Condvar::new() });
        let state = Arc::clone(&shared);
        let server = Server::start(move |request| respond(&state, &layout, &manifest, request));
        Registry { shared, server }
    }

    /// As [`Registry::start`], for those who know this user and password.
    pub(crate) fn with_password(dir: &Path, user: &str, password: &str) -> Registry {
        let registry = Registry::start(dir);
        let basic = base64(format!("{user}:{password}").as_bytes());
        registry.state(|state| state.wanted = Some(format!("Basic {basic}")));
        registry
    }

    /// `host:port`.
    pub(crate) fn host(&self) -> String {
        format!("127.0.0.1:{}", self.server.port)
    }

    /// A reference to an image of this registry.
    pub(crate) fn image(&self, name: &str) -> String {
        format!("{}/{name}:1", self.host())
    }

    fn state<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        let result = look(&mut self.shared.state.lock().expect("no holder panics"));
        self.shared.changed.notify_all();
        result
    }

    /// Holds every pull that begins from now on.
    pub(crate) fn hold(&self) {
        self.state(|state| state.held = true);
    }

    /// Releases the delayed pulls.
    pub(crate) fn release(&self) {
        self.state(|state| state.held = false);
    }

    /// How many pulls wait now, and how many waited at most at one time.
    pub(crate) fn waiting(&self) -> (usize, usize) {
        self.state(|state| (state.waiting.len(), state.most_waiting))
    }

    /// When an image was asked for.
    pub(crate) fn received(&self, name: &str) -> Vec<Instant> {
        self.state(|state| {
            state.requests.iter().filter(|(path, _)| path == name).map(|(_, time)| *time).collect()
        })
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.release();
    }
}

fn respond(shared: &Shared, layout: &Path, manifest: &Value, request: &Request) -> Reply {
    let mut state = shared.state.lock().expect("no holder panics");
    let mut parts = request.path.split('/').skip(2);
    let (name, kind, which) =
        (parts.next().unwrap_or(""), parts.next().unwrap_or(""), parts.next().unwrap_or(""));
    let by_tag = kind == "manifests" && !which.starts_with("sha256:");
    let knows = state.wanted.is_none() || request.header("Authorization") == state.wanted;
    // A client without a password asks first and comes again with it: one pull, one entry.
    if by_tag && (knows || request.header("Authorization").is_none()) && request.method == "HEAD" {
        state.requests.push((name.to_owned(), Instant::now()));
    }
    if !knows {
        return Reply::text(401, "who is there?").with("WWW-Authenticate", "Basic realm=\"test\"");
    }
    if by_tag && state.held {
        state.waiting.push(name.to_owned());
        state.most_waiting = state.most_waiting.max(state.waiting.len());
        while state.held {
            state = shared.changed.wait(state).expect("no holder panics");
        }
        state.waiting.retain(|waiting| waiting != name);
    }
    drop(state);
    let of_manifest = |field: &str| manifest[field].as_str().unwrap_or("").to_owned();
    match kind {
        "" => Reply::text(200, "{}"),
        "manifests" if by_tag || which == of_manifest("digest") => {
            blob(layout, &of_manifest("digest"), &of_manifest("mediaType"))
        }
        "blobs" => blob(layout, which, "application/octet-stream"),
        _ => Reply::text(404, "{}"),
    }
}

fn blob(layout: &Path, digest: &str, media_type: &str) -> Reply {
    let path = layout.join("blobs").join(digest.replace(':', "/"));
    match std::fs::read(path) {
        Ok(body) => Reply { status: 200, headers: Vec::new(), body }
            .with("Content-Type", media_type)
            .with("Docker-Content-Digest", digest),
        Err(_) => Reply::text(404, "{}"),
    }
}

fn unpack(dir: &Path) -> PathBuf {
    let images = std::env::var("E2E_IMAGES").expect("E2E_IMAGES: run through tests/run e2e");
    let archive = images
        .split_whitespace()
        .find(|path| path.ends_with("busybox.tar"))
        .expect("busybox is one of the local images");
    let layout = dir.join("registry");
    std::fs::create_dir_all(&layout).expect("the registry's directory can be made");
    let done = Command::new("tar").args(["-xf", archive, "-C"]).arg(&layout).status().expect("tar runs");
    assert!(done.success(), "tar -xf {archive}");
    layout
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Standard base64 with padding.
pub(crate) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let mut word = 0u32;
        for index in 0..3 {
            word = word << 8 | u32::from(chunk.get(index).copied().unwrap_or(0));
        }
        for index in 0..4 {
            if index <= chunk.len() {
                out.push(char::from(DIGITS[(word >> (18 - 6 * index) & 63) as usize]));
            } else {
                out.push('=');
            }
        }
    }
    out
}
