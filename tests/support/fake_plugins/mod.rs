//! Plugins of a node for tests, in the test's process: a CSI driver with real mounts, a device plugin
//! and a driver of resource claims. They survive the agent. They keep books of what was done and of
//! what an agent must never do, and misbehave on request.

#![allow(clippy::unwrap_used, dead_code, missing_docs, reason = "each test program uses a part")]

mod claims;
mod csi;
mod devices;
mod gate;
mod supervisor;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use coracle::transport::generated::{methods, pluginregistration as pb};
use coracle::transport::grpc::UnaryMethod;
use coracle::transport::rpc_server::{RpcError, Service};
use coracle::util::stop::StopToken;
use coracle::util::threads::{OnDeath, Running, Stack, spawn};

pub(crate) use gate::Gate;

/// The name of the CSI driver.
pub(crate) const DRIVER: &str = "faulty.csi.test";
/// The resource of the device plugin.
pub(crate) const RESOURCE: &str = "faulty.test/widget";
/// The variable with the names of a container's devices, with commas between them.
pub(crate) const VARIABLE: &str = "WIDGETS";
/// How many devices there are.
pub(crate) const DEVICES: usize = 3;
/// The name of the driver of claims.
pub(crate) const CLAIM_DRIVER: &str = "faulty.dra.test";

/// How long a call waits that is to end with its server.
const PATIENCE: Duration = Duration::from_secs(60);

/// Less than the shortest deadline of a call about a volume or a claim, which is the 45 s of
/// `NodePrepareResources`. An agent may repeat a call that has hung for longer.
const DEADLINE: Duration = Duration::from_secs(30);

/// One of the plugins; each has a server of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Plugin {
    Csi,
    Devices,
    Claims,
}

impl Plugin {
    const ALL: [Plugin; 3] = [Plugin::Csi, Plugin::Devices, Plugin::Claims];

    fn socket(self, root: &Path) -> PathBuf {
        root.join(match self {
            Plugin::Csi => "plugins_registry/csi.sock",
            Plugin::Devices => "device-plugins/widgets.sock",
            Plugin::Claims => "plugins_registry/claims.sock",
        })
    }
}

/// When a call that hangs is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CarriedOut {
    Never,
    BeforeItHangs,
    AfterwardsOnly,
}

/// What happens to calls of one method.
#[derive(Debug, Clone)]
pub(crate) enum Misbehavior {
    /// So many calls fail.
    Fails(u32),
    /// So many calls take longer.
    IsSlow(u32, Duration),
    /// One call is carried out, and its caller gets an error of the connection.
    LosesResponse,
    /// The plugin ends in the middle of one call, and starts again.
    Dies { is_carried_out: bool },
    /// One call waits at the gate.
    Hangs(Gate, CarriedOut),
}

/// How often a method was called.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CallCounts {
    pub called: usize,
    /// A fault applied to so many.
    pub faulty: usize,
    /// So many were carried out and answered.
    pub responses: usize,
    /// So many came while another call for the same volume or claim was under way. They are not in
    /// `called`.
    pub refused: usize,
}

#[derive(Debug, Default)]
struct State {
    counts: BTreeMap<&'static str, CallCounts>,
    /// The calls under way by volume or claim, with the life of the agent and their beginnings.
    busy: BTreeMap<String, (usize, Instant)>,
    violations: BTreeSet<String>,
    csi: csi::Volumes,
    devices: devices::Allocations,
    claims: claims::Prepared,
}

struct Shared {
    /// The agent's root directory.
    root: PathBuf,
    misbehavior: Mutex<HashMap<&'static str, Misbehavior>>,
    state: Mutex<State>,
    /// Plugins that are to be started again.
    dead: Mutex<BTreeSet<Plugin>>,
    /// Counts the starts of the agent.
    life: AtomicUsize,
}

/// The running plugins. Dropping it ends them.
pub(crate) struct FakePlugins {
    shared: Arc<Shared>,
    supervisor: Option<Running>,
}

impl FakePlugins {
    /// Nothing is served before [`FakePlugins::start`].
    pub(crate) fn new(root: &Path) -> FakePlugins {
        let shared = Shared {
            root: root.to_owned(),
            misbehavior: Mutex::default(),
            state: Mutex::default(),
            dead: Mutex::default(),
            life: AtomicUsize::new(0),
        };
        FakePlugins { shared: Arc::new(shared), supervisor: None }
    }

    /// Starts all plugins, and starts each again whenever it dies or an agent has removed its socket.
    pub(crate) fn start(&mut self) {
        let shared = Arc::clone(&self.shared);
        let body = move |stop: StopToken| supervisor::supervise(&shared, &stop);
        self.supervisor = Some(spawn("fake-plugins", Stack::Large, OnDeath::Unsupervised, body).unwrap());
    }

    /// The next agent begins: calls of the one before are not its own.
    pub(crate) fn next_life(&self) {
        self.shared.life.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn misbehave(&self, method: &'static str, how: Misbehavior) {
        self.shared.misbehavior.lock().unwrap().insert(method, how);
    }

    /// The next call of a method hangs.
    pub(crate) fn hang_next(&self, method: &'static str, carried_out: CarriedOut) -> Gate {
        let gate = Gate::default();
        self.misbehave(method, Misbehavior::Hangs(gate.clone(), carried_out));
        gate
    }

    pub(crate) fn count(&self, method: &str) -> CallCounts {
        self.shared.state.lock().unwrap().counts.get(method).copied().unwrap_or_default()
    }

    /// All methods that were called.
    pub(crate) fn methods(&self) -> BTreeSet<&'static str> {
        self.shared.state.lock().unwrap().counts.keys().copied().collect()
    }

    /// What an agent must never do, and has done.
    pub(crate) fn violations(&self) -> BTreeSet<String> {
        self.shared.state.lock().unwrap().violations.clone()
    }

    /// What was not undone.
    pub(crate) fn left(&self) -> Vec<String> {
        let state = self.shared.state.lock().unwrap();
        let mut left = state.csi.left();
        left.extend(state.claims.left());
        left
    }

    /// The volumes that are published.
    pub(crate) fn published(&self) -> BTreeSet<String> {
        self.shared.state.lock().unwrap().csi.published()
    }

    pub(crate) fn is_prepared(&self, claim: &str) -> bool {
        self.shared.state.lock().unwrap().claims.is_prepared(claim)
    }

    /// The size that the volume was grown to.
    pub(crate) fn size(&self, volume: &str) -> Option<i64> {
        self.shared.state.lock().unwrap().csi.size(volume)
    }
}

impl Drop for FakePlugins {
    fn drop(&mut self) {
        drop(self.supervisor.take());
        self.shared.state.lock().unwrap().csi.unmount_all();
    }
}

impl Shared {
    /// Notes what must never happen.
    fn violation(&self, text: String) {
        self.state.lock().unwrap().violations.insert(text);
    }

    fn update(&self, method: &'static str, update: impl FnOnce(&mut CallCounts)) {
        update(self.state.lock().unwrap().counts.entry(method).or_default());
    }

    /// The fault of the next call of a method.
    fn take_fault(&self, method: &'static str) -> Option<Misbehavior> {
        let mut all = self.misbehavior.lock().unwrap();
        let fault = all.get(method)?.clone();
        let is_last = match all.get_mut(method)? {
            Misbehavior::Fails(left) | Misbehavior::IsSlow(left, _) => {
                *left -= 1;
                *left == 0
            }
            _ => true,
        };
        if is_last {
            all.remove(method);
        }
        drop(all);
        self.update(method, |count| count.faulty += 1);
        Some(fault)
    }

    /// Serves one call with its fault.
    fn serve<T>(
        &self,
        (plugin, method): (Plugin, &'static str),
        stop: &StopToken,
        mut work: impl FnMut() -> Result<T, RpcError>,
    ) -> Result<T, RpcError> {
        self.update(method, |count| count.called += 1);
        let closed = || RpcError::unavailable("Socket closed");
        let result = match self.take_fault(method) {
            None => work(),
            Some(Misbehavior::Fails(_)) => Err(RpcError::internal("it fails on request")),
            Some(Misbehavior::IsSlow(_, delay)) => {
                let _ = stop.wait(delay);
                work()
            }
            Some(Misbehavior::LosesResponse) => {
                work()?;
                Err(closed())
            }
            Some(Misbehavior::Dies { is_carried_out }) => {
                if is_carried_out {
                    work()?;
                }
                self.dead.lock().unwrap().insert(plugin);
                let _ = stop.wait(PATIENCE);
                Err(closed())
            }
            Some(Misbehavior::Hangs(gate, carried_out)) => {
                let before = (carried_out == CarriedOut::BeforeItHangs).then(&mut work);
                gate.wait(stop);
                match (before, carried_out) {
                    (Some(before), _) => before,
                    (None, CarriedOut::AfterwardsOnly) if !stop.is_stopped() => work(),
                    _ => Err(closed()),
                }
            }
        };
        if result.is_ok() {
            self.update(method, |count| count.responses += 1);
        }
        result
    }

    /// Serves one call about a volume or a claim. Two calls of one agent at a time are a violation, unless
    /// the deadline of the first one may have passed; drivers refuse a second one.
    fn serve_alone<T>(
        &self,
        call: (Plugin, &'static str),
        subject: &str,
        stop: &StopToken,
        work: impl FnMut() -> Result<T, RpcError>,
    ) -> Result<T, RpcError> {
        let life = self.life.load(Ordering::Relaxed);
        let other = {
            let mut state = self.state.lock().unwrap();
            let other = state.busy.get(subject).copied();
            if other.is_none() {
                state.busy.insert(subject.to_owned(), (life, Instant::now()));
            }
            other
        };
        if let Some((other, begun)) = other {
            if other == life && begun.elapsed() < DEADLINE {
                self.violation(format!("{} while another call for {subject} is under way", call.1));
            }
            self.update(call.1, |count| count.refused += 1);
            return Err(RpcError::unavailable("an operation is pending"));
        }
        let result = self.serve(call, stop, work);
        self.state.lock().unwrap().busy.remove(subject);
        result
    }
}

/// Adds a method to a service.
fn unary<Req: Send + 'static, Resp: Send + 'static>(
    service: Service,
    shared: &Arc<Shared>,
    call: (Plugin, &'static str),
    method: &'static UnaryMethod<Req, Resp>,
    work: impl Fn(&Shared, &Req) -> Result<Resp, RpcError> + Send + Sync + 'static,
) -> Service {
    let shared = Arc::clone(shared);
    service.unary(method, move |request, stop| shared.serve(call, stop, || work(&shared, &request)))
}

/// Adds a method whose calls are about one volume or claim.
fn unary_alone<Req: Send + 'static, Resp: Send + 'static>(
    service: Service,
    shared: &Arc<Shared>,
    call: (Plugin, &'static str),
    method: &'static UnaryMethod<Req, Resp>,
    subject: impl Fn(&Req) -> String + Send + Sync + 'static,
    work: impl Fn(&Shared, &Req) -> Result<Resp, RpcError> + Send + Sync + 'static,
) -> Service {
    let shared = Arc::clone(shared);
    service.unary(method, move |request, stop| {
        shared.serve_alone(call, &subject(&request), stop, || work(&shared, &request))
    })
}

/// The registration of a plugin whose socket the agent watches.
fn registration(
    service: Service,
    shared: &Arc<Shared>,
    plugin: Plugin,
    names: [&'static str; 2],
    info: pb::PluginInfo,
) -> Service {
    let service =
        unary(service, shared, (plugin, names[0]), &methods::pluginregistration::GET_INFO, move |_, _| {
            Ok(info.clone())
        });
    unary(
        service,
        shared,
        (plugin, names[1]),
        &methods::pluginregistration::NOTIFY_REGISTRATION_STATUS,
        |_, _| Ok(pb::RegistrationStatusResponse::default()),
    )
}
