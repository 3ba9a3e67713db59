//! An API server on loopback: objects in memory, lists, watches with bookmarks, and requested
//! faults. It speaks real HTTP/1.1 and answers as the real one does where it matters.
//! Each connection has a thread of its own.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod encoding;
mod http;
mod store;

use std::collections::VecDeque;
use std::io::{ErrorKind, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use coracle::kube::client::{Client, Credentials};
use coracle::transport::api::{Endpoint, Roots};
use coracle::util::threads::{OnDeath, Running, Stack, spawn};
use serde_json::{Value, json};

use super::wait::wait_for;
pub(crate) use http::ReceivedRequest;
pub(crate) use store::{ResourcePath, Store};

/// The longest wait for a request or for a port.
const LIMIT: Duration = Duration::from_secs(150);

/// A fault, and the requests that it applies to.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    /// `GET`, `POST` and so on; empty: any.
    pub method: &'static str,
    /// The request's path and query contain this.
    pub path: String,
    /// The fault applies to so many requests.
    pub times: usize,
    pub what: FaultResponse,
}

/// What a request gets that a fault applies to.
#[derive(Debug, Clone)]
pub(crate) enum FaultResponse {
    /// An error, with `Retry-After` in seconds if there is one.
    Status(u16, &'static str, Option<u32>),
    /// The connection closes without an answer.
    Cut,
    /// No answer; the connection stays open.
    Hang,
    /// These bytes instead of an answer; then the connection closes.
    Raw(Vec<u8>),
    /// A watch of these lines, which then ends properly.
    Lines(Vec<String>),
    /// A watch of these bytes, which then is cut off.
    HalfLine(String),
    /// A watch of these bytes, which then stays silent.
    ThenSilence(String),
    /// The usual response, after this delay.
    Late(Duration),
    /// The request is executed, but the connection closes without a response.
    Lost,
}

impl Fault {
    /// Applies once.
    pub(crate) fn once(method: &'static str, path: &str, what: FaultResponse) -> Fault {
        Fault { method, path: path.to_owned(), times: 1, what }
    }

    /// Applies until it is removed.
    pub(crate) fn always(method: &'static str, path: &str, what: FaultResponse) -> Fault {
        Fault { method, path: path.to_owned(), times: usize::MAX, what }
    }
}

/// The server. It ends when it is dropped.
pub(crate) struct FakeApi {
    pub address: Ipv4Addr,
    pub port: u16,
    shared: Arc<Shared>,
    /// None while it is down.
    listening: Mutex<Option<Running>>,
}

#[derive(Default)]
struct State {
    store: Store,
    faults: Vec<Fault>,
    received: VecDeque<ReceivedRequest>,
    sockets: Vec<TcpStream>,
    /// Counts the orders to end all watches.
    watch_era: u64,
    /// Neither takes requests nor answers.
    frozen: bool,
    stopped: bool,
    reviewer: Option<Reviewer>,
}

/// Says what a TokenReview or SubjectAccessReview comes to: its status.
pub(crate) type Reviewer = Arc<dyn Fn(&Value) -> Value + Send + Sync>;

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    threads: Mutex<Vec<Running>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FakeApi {
    /// An empty one, on a port that no other server gets while this one is down. A port that the
    /// kernel chooses would be free for others then.
    pub(crate) fn start() -> FakeApi {
        // Below the kernel's, and between those of the control planes and those of the nodes.
        static NEXT: AtomicU16 = AtomicU16::new(17_000);
        loop {
            let port = NEXT.fetch_add(1, Ordering::Relaxed);
            assert!(port < 21_000, "no port is left");
            match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
                Ok(listener) => return FakeApi::on(Ipv4Addr::LOCALHOST, listener),
                // Another test program's.
                Err(error) => assert_eq!(error.kind(), ErrorKind::AddrInUse, "port {port}: {error}"),
            }
        }
    }

    /// An empty one on a port, such as that of one that has gone.
    pub(crate) fn start_at(port: u16) -> FakeApi {
        FakeApi::listen(Ipv4Addr::LOCALHOST, port)
    }

    /// An empty one on an address of this machine.
    pub(crate) fn listen(address: Ipv4Addr, port: u16) -> FakeApi {
        FakeApi::on(address, listen_again(address, port))
    }

    fn on(address: Ipv4Addr, listener: TcpListener) -> FakeApi {
        let port = listener.local_addr().unwrap().port();
        let api = FakeApi { address, port, shared: Arc::default(), listening: Mutex::default() };
        api.serve(listener);
        api
    }

    fn serve(&self, listener: TcpListener) {
        let (address, port, own) = (self.address, self.port, Arc::clone(&self.shared));
        let running = spawn("fake-api", Stack::Large, OnDeath::Unsupervised, move |stop| {
            while let Ok((socket, _)) = listener.accept() {
                if stop.is_stopped() {
                    break;
                }
                own.lock().sockets.push(socket.try_clone().unwrap());
                let shared = Arc::clone(&own);
                let thread = spawn("fake-api/conn", Stack::Large, OnDeath::Unsupervised, move |_| {
                    http::serve(socket, |request, socket| shared.respond(request, socket));
                });
                let mut threads = own.threads.lock().unwrap_or_else(PoisonError::into_inner);
                threads.retain(|thread| !thread.is_finished());
                threads.push(thread.unwrap());
            }
        })
        .unwrap()
        .with_waker(Box::new(move || {
            let _ = TcpStream::connect((address, port));
        }));
        *self.listening.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
    }

    /// Refuses connections and cuts those that there are; what it knows stays.
    pub(crate) fn go_down(&self) {
        drop(self.listening.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.cut();
        self.end_watches();
    }

    /// Comes back at its old port.
    pub(crate) fn go_up(&self) {
        self.cut();
        self.serve(listen_again(self.address, self.port));
    }

    /// Takes connections, but says nothing any more, not even on open watches.
    pub(crate) fn freeze(&self) {
        self.shared.lock().frozen = true;
    }

    /// Goes on where it stopped, with late answers.
    pub(crate) fn thaw(&self) {
        self.shared.lock().frozen = false;
        self.shared.changed.notify_all();
    }

    /// Restores a backup: statuses of pods and all history are lost, and versions restart at small
    /// numbers. Watches of greater ones are silent.
    pub(crate) fn restore(&self) {
        let mut state = self.shared.lock();
        state.store.restore();
        state.watch_era += 1;
        drop(state);
        self.cut();
        self.shared.changed.notify_all();
    }

    /// Makes its versions begin with a great number.
    pub(crate) fn raise_versions(&self) {
        self.shared.lock().store.raise_versions();
    }

    /// Every event comes twice, and once more after others.
    pub(crate) fn repeat_events(&self, repeats_events: bool) {
        self.shared.lock().store.repeats_events = repeats_events;
    }

    /// The versions of certificates.k8s.io with ClusterTrustBundles and PodCertificateRequests. At the
    /// start v1 only.
    pub(crate) fn certificate_versions(&self, versions: &[&'static str]) {
        self.shared.lock().store.certificate_versions = versions.to_vec();
    }

    /// So many objects on a page of a list at the most.
    pub(crate) fn page(&self, objects: Option<usize>) {
        self.shared.lock().store.page = objects;
    }

    /// How long tokens live from now on, whatever is asked for.
    pub(crate) fn token_seconds(&self, seconds: Option<i64>) {
        self.shared.lock().store.token_seconds = seconds;
    }

    /// Deletes a pod as a user does, gracefully.
    pub(crate) fn delete_pod(&self, path: &str) {
        let path = ResourcePath::parse(path).unwrap();
        let mut state = self.shared.lock();
        let _ = state.store.delete(&path, &Value::Null);
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Deletes a pod with a grace period in seconds; zero removes it at once.
    pub(crate) fn delete_pod_within(&self, path: &str, seconds: i64) {
        let path = ResourcePath::parse(path).unwrap();
        let _ = self.shared.lock().store.delete(&path, &json!({"gracePeriodSeconds": seconds}));
        self.shared.changed.notify_all();
    }

    /// The objects of a collection.
    pub(crate) fn objects(&self, path: &str) -> Vec<Value> {
        self.shared.lock().store.all(&ResourcePath::parse(path).unwrap())
    }

    /// How many connections are open.
    pub(crate) fn connections(&self) -> usize {
        let threads = self.shared.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.iter().filter(|thread| !thread.is_finished()).count()
    }

    /// How many requests came so far.
    pub(crate) fn requests(&self) -> usize {
        self.shared.lock().received.len()
    }

    /// `http://address:port`.
    pub(crate) fn url(&self) -> String {
        format!("http://{}:{}", self.address, self.port)
    }

    /// How to reach it.
    pub(crate) fn credentials(&self) -> Credentials {
        let endpoint = Endpoint {
            https: false,
            host: self.address.to_string(),
            port: self.port,
            roots: Roots::System,
            server_name: None,
            identity: None,
            proxy: None,
        };
        Credentials { endpoint, base_path: String::new(), token: None }
    }

    /// A client of it, without a limit to its rate.
    pub(crate) fn client(&self) -> Client {
        Client::new(self.credentials(), None).unwrap()
    }

    /// Makes or replaces the object at a path such as `/api/v1/namespaces/ns/pods/p`, and
    /// returns it as stored.
    pub(crate) fn put(&self, path: &str, object: Value) -> Value {
        let path = ResourcePath::parse(path).unwrap();
        let mut state = self.shared.lock();
        let stored = state.store.put(&path, object);
        drop(state);
        self.shared.changed.notify_all();
        stored
    }

    /// Changes the object at a path, with no other change in between.
    pub(crate) fn edit(&self, path: &str, change: impl FnOnce(&mut Value)) {
        let path = ResourcePath::parse(path).unwrap();
        let mut state = self.shared.lock();
        let mut object = state.store.get(&path).cloned().expect("the object exists");
        change(&mut object);
        state.store.put(&path, object);
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Removes the object at a path.
    pub(crate) fn remove(&self, path: &str) {
        self.shared.lock().store.remove(&ResourcePath::parse(path).unwrap());
        self.shared.changed.notify_all();
    }

    /// The object at a path.
    pub(crate) fn object(&self, path: &str) -> Option<Value> {
        self.shared.lock().store.get(&ResourcePath::parse(path).unwrap()).cloned()
    }

    /// Answers reviews; they are stored nowhere.
    pub(crate) fn review(&self, by: impl Fn(&Value) -> Value + Send + Sync + 'static) {
        self.shared.lock().reviewer = Some(Arc::new(by));
    }

    /// Adds a fault; earlier ones apply first.
    pub(crate) fn fault(&self, fault: Fault) {
        self.shared.lock().faults.push(fault);
    }

    /// No more faults.
    pub(crate) fn clear_faults(&self) {
        self.shared.lock().faults.clear();
        self.shared.changed.notify_all();
    }

    /// Every request so far.
    pub(crate) fn received(&self) -> Vec<ReceivedRequest> {
        self.shared.lock().received.iter().cloned().collect()
    }

    /// Waits until as many requests that `wanted` takes have come, and returns them.
    pub(crate) fn wait_for(
        &self,
        count: usize,
        wanted: impl Fn(&ReceivedRequest) -> bool,
    ) -> Vec<ReceivedRequest> {
        let until = Instant::now() + LIMIT;
        let mut state = self.shared.lock();
        loop {
            let found: Vec<ReceivedRequest> =
                state.received.iter().filter(|request| wanted(request)).cloned().collect();
            if found.len() >= count {
                return found;
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{count} wanted, these came: {:#?}", state.received);
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Forgets the past: watches from an older version, and those under way, expire.
    pub(crate) fn compact(&self) {
        let mut state = self.shared.lock();
        state.store.compact();
        state.watch_era += 1;
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Sends a bookmark to every watch.
    pub(crate) fn bookmark(&self) {
        self.shared.lock().store.bookmark();
        self.shared.changed.notify_all();
    }

    /// Ends every watch properly.
    pub(crate) fn end_watches(&self) {
        self.shared.lock().watch_era += 1;
        self.shared.changed.notify_all();
    }

    /// Cuts every connection.
    pub(crate) fn cut(&self) {
        for socket in self.shared.lock().sockets.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for FakeApi {
    fn drop(&mut self) {
        self.shared.lock().stopped = true;
        self.shared.changed.notify_all();
        drop(self.listening.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.cut();
        let threads =
            std::mem::take(&mut *self.shared.threads.lock().unwrap_or_else(PoisonError::into_inner));
        self.cut();
        drop(threads);
    }
}

/// Listens on a port that a server may have just left. A program that another test started at that moment
/// has a copy of the server's socket until its exec.
fn listen_again(address: Ipv4Addr, port: u16) -> TcpListener {
    wait_for(&format!("port {port} of {address}"), LIMIT, || match TcpListener::bind((address, port)) {
        Ok(listener) => Some(listener),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::AddrInUse, "port {port} of {address}: {error}");
            None
        }
    })
}

/// The JSON of an error answer.
pub(crate) fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code})
}

impl Shared {
    /// Answers one request; `false` ends the connection.
    fn respond(&self, request: ReceivedRequest, socket: &mut TcpStream) -> bool {
        let fault = {
            let mut state = self.lock();
            state.received.push_back(request.clone());
            let matching = state.faults.iter().position(|fault| {
                (fault.method.is_empty() || fault.method == request.method)
                    && request.uri.contains(&fault.path)
            });
            matching.and_then(|index| {
                let fault = state.faults.get_mut(index)?;
                fault.times = fault.times.saturating_sub(1);
                let what = fault.what.clone();
                if fault.times == 0 {
                    state.faults.remove(index);
                }
                Some(what)
            })
        };
        self.changed.notify_all();
        drop(self.thawed(self.lock()));
        match fault {
            None => {}
            Some(FaultResponse::Late(span)) => self.wait(span),
            Some(FaultResponse::Lost) => {
                let _ = self.lock().store.respond(&request);
                self.changed.notify_all();
                return false;
            }
            Some(what) => return self.apply_fault(&what, socket),
        }
        if request.is_watch() {
            return self.watch(&request, socket);
        }
        let reviewer = self.lock().reviewer.clone().filter(|_| request.path().ends_with("reviews"));
        let (code, body) = match reviewer {
            Some(reviewer) => {
                let mut review = request.body.clone();
                review["status"] = reviewer(&request.body);
                (201, review)
            }
            None => self.lock().store.respond(&request),
        };
        self.changed.notify_all();
        http::send_encoded(socket, &request, code, &body)
    }

    /// Waits while the server is frozen.
    fn thawed<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        while state.frozen && !state.stopped {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    fn wait(&self, span: Duration) {
        let until = Instant::now() + span;
        let mut state = self.lock();
        while !state.stopped && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn apply_fault(&self, what: &FaultResponse, socket: &mut TcpStream) -> bool {
        let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
        match what {
            FaultResponse::Status(code, reason, after) => {
                let body = status(*code, reason, &format!("made up: {reason}"));
                http::send(socket, *code, *after, &body.to_string())
            }
            FaultResponse::Cut | FaultResponse::Late(_) | FaultResponse::Lost => false,
            FaultResponse::Hang => self.until_stopped(),
            FaultResponse::Raw(bytes) => {
                let _ = socket.write_all(bytes);
                false
            }
            FaultResponse::Lines(lines) => {
                let mut fine = socket.write_all(head.as_bytes()).is_ok();
                for line in lines {
                    fine = fine && http::chunk(socket, &format!("{line}\n"));
                }
                fine && socket.write_all(b"0\r\n\r\n").is_ok()
            }
            FaultResponse::HalfLine(text) => {
                let _ = socket.write_all(head.as_bytes()).is_ok() && http::chunk(socket, text);
                false
            }
            FaultResponse::ThenSilence(text) => {
                let _ = socket.write_all(head.as_bytes()).is_ok() && http::chunk(socket, text);
                self.until_stopped()
            }
        }
    }

    fn until_stopped(&self) -> bool {
        let mut state = self.lock();
        while !state.stopped {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        false
    }

    fn watch(&self, request: &ReceivedRequest, socket: &mut TcpStream) -> bool {
        let path = ResourcePath::parse(&request.path()).unwrap();
        let state = self.lock();
        let era = state.watch_era;
        let (mut lines, mut position) = match state.store.open_watch(&path, request) {
            Ok(opened) => opened,
            Err((code, body)) => {
                drop(state);
                return http::send(socket, code, None, &body.to_string());
            }
        };
        drop(state);
        let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
        if socket.write_all(head.as_bytes()).is_err() {
            return false;
        }
        loop {
            for line in lines.drain(..) {
                if !http::chunk(socket, &format!("{line}\n")) {
                    return false;
                }
            }
            let mut state = self.lock();
            loop {
                state = self.thawed(state);
                if state.stopped {
                    return false;
                }
                match state.store.changes_since(&path, request, &mut position) {
                    Ok(news) if !news.is_empty() => {
                        lines = news;
                        break;
                    }
                    Ok(_) => {}
                    Err(error) => {
                        drop(state);
                        let line = json!({"type": "ERROR", "object": error});
                        return http::chunk(socket, &format!("{line}\n"))
                            && socket.write_all(b"0\r\n\r\n").is_ok();
                    }
                }
                if state.watch_era != era {
                    drop(state);
                    return socket.write_all(b"0\r\n\r\n").is_ok();
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}
