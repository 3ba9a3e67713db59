//! A container runtime for tests: a real gRPC server on a Unix socket, with sandboxes,
//! containers and images in memory, and misbehavior on request.
//!
//! Containers do what their commands say: a command that ends in `exit N` exits with N right
//! after its start (`sleep S; exit N` after S seconds), one below `/no/such/` fails to start,
//! and everything else runs until it is stopped. Images with `none` or `missing` in their
//! names cannot be pulled; [`BUSYBOX`] is there from the beginning. A container whose command has the
//! word `stubborn` ends only at the end of the timeout of its stop. Pulls of images, sandboxes of pods
//! and commands with `endless` in their names last until [`FakeCri::release_endless`].

#![allow(
    clippy::unwrap_used,
    dead_code,
    unused_imports,
    missing_docs,
    reason = "each test binary uses its own part"
)]

mod events;
mod gate;
mod json;
mod records;
mod service;
mod state;
mod wire;

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use coracle::cri::{self, ImageClient, RuntimeClient};
use coracle::transport::grpc::Kind;
use coracle::util::stop::{StopToken, Waited};
use coracle::util::threads::{OnDeath, Running, Stack, spawn};

pub(crate) use events::StreamFault;
pub(crate) use gate::Gate;
pub(crate) use json::ToJson;
pub(crate) use service::JournalEntry;
use service::{Misbehavior, Service, Shared, create_image_service, create_runtime_service};
pub(crate) use state::{BUSYBOX, BUSYBOX_ID, Container, ExecOutput, Failure, Sandbox, State, state_name};
pub(crate) use wire::Wire;

/// How long the helpers here wait before they fail the test.
const PATIENCE: Duration = Duration::from_secs(60);

/// How exact the ends of containers are that end by themselves.
const TICK: Duration = Duration::from_millis(10);

/// The fake. Dropping it ends the server.
pub(crate) struct FakeCri {
    dir: tempfile::TempDir,
    shared: Arc<Shared>,
    server: Mutex<Option<grpcio::Server>>,
    _clock: Running,
}

impl FakeCri {
    /// Starts a server on a fresh socket.
    pub(crate) fn start() -> FakeCri {
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new()),
            counts: Mutex::default(),
            journal: Mutex::default(),
            misbehavior: Mutex::default(),
            subscribers: Mutex::default(),
            stream_faults: Mutex::default(),
            delayed: Mutex::default(),
            endless: Mutex::default(),
            traceparents: Mutex::default(),
        });
        let ticking = Arc::clone(&shared);
        let clock = spawn("fake-clock", Stack::Small, OnDeath::Unsupervised, move |stop| {
            while stop.wait(TICK) == Waited::TimedOut {
                ticking.tick();
            }
        });
        let fake = FakeCri {
            dir: tempfile::tempdir().unwrap(),
            shared,
            server: Mutex::new(None),
            _clock: clock.unwrap(),
        };
        fake.go_up();
        fake
    }

    // ---- how to reach it ----

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("cri.sock")
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// A directory that lives as long as the fake.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn settings(&self) -> cri::Settings {
        cri::Settings {
            runtime_endpoint: self.endpoint(),
            image_endpoint: None,
            request_timeout: Duration::from_secs(120),
        }
    }

    pub(crate) fn connect(&self) -> (RuntimeClient, ImageClient) {
        cri::connect(self.settings()).unwrap()
    }

    // ---- the server ----

    /// Ends the server; every open call fails. What it runs is kept.
    pub(crate) fn go_down(&self) {
        if let Some(mut server) = self.server.lock().unwrap().take() {
            let shutdown = server.shutdown();
            server.cancel_all_calls();
            let _ = block_on(shutdown);
            self.shared.end_streams();
        }
    }

    /// Serves again on the same socket.
    pub(crate) fn go_up(&self) {
        let mut slot = self.server.lock().unwrap();
        if slot.is_some() {
            return;
        }
        let service = Service(Arc::clone(&self.shared));
        let mut server = grpcio::ServerBuilder::new(environment())
            .register_service(create_runtime_service(service.clone()))
            .register_service(create_image_service(service))
            .requests_slot_per_cq(64)
            .build()
            .unwrap();
        let address = format!("unix:{}", self.socket().display());
        server.add_listening_port(address, grpcio::ServerCredentials::insecure()).unwrap();
        server.start();
        *slot = Some(server);
    }

    /// Down and up again, as in an upgrade of the runtime: its containers run on.
    pub(crate) fn restart(&self) {
        self.go_down();
        self.go_up();
    }

    // ---- misbehavior, by method name ----

    /// Every call of `method` fails from now on.
    pub(crate) fn fail(&self, method: &str, kind: Kind, message: &str) {
        self.misbehave(method, kind, message, None);
    }

    /// The next `times` calls of `method` fail.
    pub(crate) fn fail_times(&self, method: &str, times: u32, kind: Kind, message: &str) {
        if times > 0 {
            self.misbehave(method, kind, message, Some(times));
        }
    }

    fn misbehave(&self, method: &str, kind: Kind, message: &str, times: Option<u32>) {
        let failure = Failure { code: service::code(kind), message: message.to_owned() };
        self.add_misbehavior(method, Misbehavior::Fail { failure, times });
    }

    /// The next `times` calls of `method` are carried out, but their callers get an error of the
    /// connection.
    pub(crate) fn lose_responses(&self, method: &str, times: u32) {
        let message = "Socket closed".to_owned();
        let failure = Failure { code: service::code(Kind::Unavailable), message };
        self.add_misbehavior(method, Misbehavior::Lose { failure, times: Some(times) });
    }

    /// Calls of `method` wait until the gate is opened or [`FakeCri::behave`] is called;
    /// then they are carried out.
    pub(crate) fn hang(&self, method: &str) -> Gate {
        let gate = Gate::default();
        self.add_misbehavior(method, Misbehavior::Hang { gate: gate.clone(), times: None });
        gate
    }

    /// The next call of `method` waits until the gate is opened and is then carried out;
    /// those after it are not affected.
    pub(crate) fn hang_next(&self, method: &str) -> Gate {
        let gate = Gate::default();
        self.add_misbehavior(method, Misbehavior::Hang { gate: gate.clone(), times: Some(1) });
        gate
    }

    /// Whether a fault applies to the next call of `method`.
    pub(crate) fn misbehaves(&self, method: &str) -> bool {
        self.shared.misbehavior.lock().unwrap().contains_key(method)
    }

    /// Calls of `method` take this long.
    pub(crate) fn delay(&self, method: &str, delay: Duration) {
        self.add_misbehavior(method, Misbehavior::Delay(delay));
    }

    /// States that must never have occurred, however briefly: two running instances of one container,
    /// two ready sandboxes of one pod.
    pub(crate) fn duplicates(&self) -> Vec<String> {
        self.shared.state.lock().unwrap().duplicates.clone()
    }

    /// Ends the misbehavior of `method` and lets its hanging calls go.
    pub(crate) fn behave(&self, method: &str) {
        if let Some(Misbehavior::Hang { gate, .. }) = self.shared.misbehavior.lock().unwrap().remove(method) {
            gate.open();
        }
    }

    /// Carries out all calls that are endless, and from now on those of stubborn containers at once.
    pub(crate) fn release_endless(&self) {
        let gates = {
            let mut endless = self.shared.endless.lock().unwrap();
            endless.is_released = true;
            std::mem::take(&mut endless.gates)
        };
        gates.iter().for_each(Gate::open);
    }

    fn add_misbehavior(&self, method: &str, misbehavior: Misbehavior) {
        self.behave(method);
        self.shared.misbehavior.lock().unwrap().insert(method.to_owned(), misbehavior);
    }

    // ---- what happened ----

    /// How often `method` was called.
    pub(crate) fn count(&self, method: &str) -> usize {
        self.shared.counts.lock().unwrap().get(method).copied().unwrap_or(0)
    }

    pub(crate) fn counts(&self) -> BTreeMap<&'static str, usize> {
        self.shared.counts.lock().unwrap().clone()
    }

    /// The spans of all calls of a method so far, for calls that had one.
    pub(crate) fn traceparents(&self, method: &str) -> Vec<String> {
        let all = self.shared.traceparents.lock().unwrap();
        all.iter().filter(|(called, _)| *called == method).map(|(_, span)| span.clone()).collect()
    }

    /// All mutating requests so far, in order of arrival.
    pub(crate) fn journal(&self) -> Vec<JournalEntry> {
        self.shared.journal.lock().unwrap().clone()
    }

    /// The method names of the journal.
    pub(crate) fn calls(&self) -> Vec<&'static str> {
        self.shared.journal.lock().unwrap().iter().map(|entry| entry.method).collect()
    }

    pub(crate) fn clear_journal(&self) {
        self.shared.journal.lock().unwrap().clear();
        self.shared.counts.lock().unwrap().clear();
    }

    /// Waits until `condition` holds; fails the test after a while.
    #[track_caller]
    pub(crate) fn wait_until(&self, what: &str, mut condition: impl FnMut(&FakeCri) -> bool) {
        let (start, pause) = (Instant::now(), StopToken::never());
        while !condition(self) {
            assert!(start.elapsed() < PATIENCE, "timed out waiting until {what}; calls: {:?}", self.calls());
            let _ = pause.wait(Duration::from_millis(5));
        }
    }

    // ---- what is there ----

    /// Reads or changes the state directly.
    pub(crate) fn with_state<T>(&self, access: impl FnOnce(&mut State) -> T) -> T {
        let result = {
            let mut state = self.shared.state.lock().unwrap();
            state.end_due_containers();
            access(&mut state)
        };
        self.shared.publish();
        result
    }

    /// How many event streams are open.
    pub(crate) fn listeners(&self) -> usize {
        self.shared.subscribers.lock().unwrap().iter().filter(|subscriber| !subscriber.has_ended()).count()
    }

    /// Ends every event stream in order.
    pub(crate) fn end_event_streams(&self) {
        self.shared.end_streams();
    }

    /// Applies a fault to the events from now on.
    pub(crate) fn set_stream_fault(&self, fault: StreamFault) {
        self.shared.stream_faults.lock().unwrap().fault = fault;
    }

    pub(crate) fn sandboxes(&self) -> Vec<Sandbox> {
        self.with_state(|state| state.sandboxes.values().cloned().collect())
    }

    /// In order of creation.
    pub(crate) fn containers(&self) -> Vec<Container> {
        self.with_state(|state| state.containers.values().cloned().collect())
    }

    /// The newest container of that name, in any pod.
    pub(crate) fn container(&self, name: &str) -> Option<Container> {
        self.containers().into_iter().rfind(|container| container.config.metadata.name == name)
    }

    pub(crate) fn add_image(&self, name: &str) {
        let id = format!("sha256:{:064x}", name.len());
        self.with_state(|state| state.add_image(name, &id));
    }

    /// The container's process dies; `false` if it did not run.
    pub(crate) fn kill_container(&self, id: &str, code: i32) -> bool {
        self.with_state(|state| state.kill_container(id, code))
    }

    /// The sandbox dies with all its containers; `false` if it is not there.
    pub(crate) fn kill_sandbox(&self, id: &str) -> bool {
        self.with_state(|state| state.kill_sandbox(id))
    }

    /// Sets the runtime's time of day, so many seconds from that of the test.
    pub(crate) fn set_clock(&self, ahead: i64) {
        self.with_state(|state| state.set_clock(ahead.saturating_mul(1_000_000_000)));
    }

    /// Sets a condition of `Status`: `RuntimeReady` or `NetworkReady`.
    pub(crate) fn set_condition(&self, name: &'static str, status: bool, reason: &str, message: &str) {
        let condition = (status, reason.to_owned(), message.to_owned());
        self.with_state(|state| state.conditions.insert(name, condition));
    }

    /// Decides what exec answers, from the container's name and the command.
    pub(crate) fn on_exec(&self, rule: impl Fn(&str, &[String]) -> ExecOutput + Send + Sync + 'static) {
        self.with_state(|state| state.exec = Arc::new(rule));
    }

    /// From now on a start writes one line into the container's log.
    pub(crate) fn write_logs(&self) {
        self.with_state(|state| state.writes_logs = true);
    }
}

impl Drop for FakeCri {
    fn drop(&mut self) {
        self.release_endless();
        self.shared.misbehavior.lock().unwrap().retain(|_, misbehavior| {
            if let Misbehavior::Hang { gate, .. } = misbehavior {
                gate.open();
            }
            false
        });
        self.go_down();
    }
}

/// The threads of all servers of the program. They are never ended: a call that hangs until
/// after the end of its server would find its queue gone, which aborts the process.
fn environment() -> Arc<grpcio::Environment> {
    static ALL: OnceLock<Arc<grpcio::Environment>> = OnceLock::new();
    let make = || Arc::new(grpcio::EnvBuilder::new().cq_count(2).name_prefix("fake-cri").build());
    Arc::clone(ALL.get_or_init(make))
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}
