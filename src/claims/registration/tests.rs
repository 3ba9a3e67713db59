//! A driver that fails in many ways, on a real socket.

use std::path::PathBuf;
use std::sync::Mutex;

use crossbeam_channel::{Receiver, Sender, bounded};
use serde_json::{Value, json};

use super::*;
use crate::claims::Settings;
use crate::claims::api::{ReadError, ResourceClaimApi};
use crate::claims::client::{PREPARE_V1BETA1, UNPREPARE_V1BETA1, WATCH_V1ALPHA1};
use crate::claims::info::ClaimKey;
use crate::claims::object::ResourceClaim;
use crate::claims::testing::{claim, pod};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::transport::generated::{dra, drahealth, methods, to_bytes};
use crate::transport::rpc_server::{RpcError, Server, Service as Methods};
use crate::util::lock::LockExt;
use crate::util::threads;

const DRIVER: &str = "dev.example.com";
/// Ends the calls that hang; the others are far below it on a slow machine.
const LIMIT: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(60);

/// What the driver does with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// An error, and nothing is done.
    Refuse,
    /// No response.
    Hang,
    /// A late response.
    Slow,
    /// Everything is done, and the response is lost.
    LoseResponse,
    /// Megabytes.
    Huge,
    /// A message that is none.
    Unreadable,
    /// A response for another claim.
    UnknownClaim,
    /// No response for a claim.
    NoClaims,
    /// An error for each claim.
    ClaimError,
}

const FAULTS: [Fault; 9] = [
    Fault::Refuse,
    Fault::Hang,
    Fault::Slow,
    Fault::LoseResponse,
    Fault::Huge,
    Fault::Unreadable,
    Fault::UnknownClaim,
    Fault::NoClaims,
    Fault::ClaimError,
];

struct FakeDriver {
    fault: Mutex<Fault>,
    prepared: Mutex<BTreeSet<String>>,
    entered: (Sender<()>, Receiver<()>),
}

impl FakeDriver {
    fn new() -> Arc<FakeDriver> {
        let (fault, prepared) = (Mutex::new(Fault::None), Mutex::default());
        Arc::new(FakeDriver { fault, prepared, entered: bounded(64) })
    }

    fn set(&self, fault: Fault) {
        *self.fault.locked() = fault;
    }

    /// The claims of the response, with the text of their error.
    fn handle(
        &self,
        request: &dra::ClaimsRequest,
        stop: &StopToken,
        work: fn(&mut BTreeSet<String>, &str),
    ) -> Result<Vec<(String, String)>, RpcError> {
        let _ = self.entered.0.send(());
        let fault = *self.fault.locked();
        if !matches!(fault, Fault::Refuse | Fault::Hang) {
            let mut prepared = self.prepared.locked();
            request.claims.iter().for_each(|claim| work(&mut prepared, &claim.uid));
        }
        let of_claims = |text: &str| -> Vec<(String, String)> {
            request.claims.iter().map(|claim| (claim.uid.clone(), text.to_owned())).collect()
        };
        match fault {
            Fault::Refuse => Err(RpcError::internal("broken")),
            Fault::LoseResponse => Err(RpcError::unavailable("the answer is lost")),
            Fault::Hang => {
                let _ = stop.wait(Duration::from_secs(600));
                Err(RpcError::unavailable("stopped"))
            }
            Fault::Slow => {
                let _ = stop.wait(Duration::from_millis(100));
                Ok(of_claims(""))
            }
            Fault::None | Fault::Unreadable => Ok(of_claims("")),
            Fault::Huge => Ok(of_claims(&"x".repeat(5 << 20))),
            Fault::UnknownClaim => {
                let mut respond = of_claims("");
                respond.push(("other".to_owned(), String::new()));
                Ok(respond)
            }
            Fault::NoClaims => Ok(Vec::new()),
            Fault::ClaimError => Ok(of_claims("no power")),
        }
    }

    fn prepare(
        &self,
        request: &dra::ClaimsRequest,
        stop: &StopToken,
    ) -> Result<dra::PrepareResponse, RpcError> {
        let respond = self.handle(request, stop, |prepared, uid| {
            prepared.insert(uid.to_owned());
        })?;
        let is_unreadable = *self.fault.locked() == Fault::Unreadable;
        let device = dra::PreparedDevice {
            pool_name: "pool".to_owned(),
            device_name: "dev".to_owned(),
            cdi_device_ids: vec!["example.com/dev=0".to_owned()],
            ..Default::default()
        };
        let bytes = if is_unreadable { vec![0xff, 0xff] } else { to_bytes(&device) };
        let result =
            |error: String| dra::PrepareResult { devices: vec![bytes.clone()], error, ..Default::default() };
        let claims = respond.into_iter().map(|(uid, error)| (uid, result(error))).collect();
        Ok(dra::PrepareResponse { claims, ..Default::default() })
    }

    fn unprepare(
        &self,
        request: &dra::ClaimsRequest,
        stop: &StopToken,
    ) -> Result<dra::UnprepareResponse, RpcError> {
        let respond = self.handle(request, stop, |prepared, uid| {
            prepared.remove(uid);
        })?;
        let result = |error: String| dra::UnprepareResult { error, ..Default::default() };
        let claims = respond.into_iter().map(|(uid, error)| (uid, result(error))).collect();
        Ok(dra::UnprepareResponse { claims, ..Default::default() })
    }

    fn methods(self: &Arc<Self>, version: Service) -> Methods {
        let (prepare, unprepare) = match version {
            Service::V1 => (&methods::NODE_PREPARE_RESOURCES, &methods::NODE_UNPREPARE_RESOURCES),
            Service::V1beta1 => (&*PREPARE_V1BETA1, &*UNPREPARE_V1BETA1),
        };
        let (first, second) = (Arc::clone(self), Arc::clone(self));
        Methods::new()
            .unary(prepare, move |request, stop| first.prepare(&request, stop))
            .unary(unprepare, move |request, stop| second.unprepare(&request, stop))
    }
}

struct Api(Sender<String>);

impl ResourceClaimApi for Api {
    fn read(&self, key: &ClaimKey) -> Result<ResourceClaim, ReadError> {
        Ok(serde_json::from_value(claim(&key.name, "claim-uid", &[DRIVER])).unwrap())
    }

    fn delete_slices(&self, selector: &str) -> Result<(), crate::kube::error::ApiError> {
        let _ = self.0.send(selector.to_owned());
        Ok(())
    }
}

struct Fixture {
    dir: tempfile::TempDir,
    claims: ResourceClaims,
    changed: Receiver<PodUid>,
    wiped: Receiver<String>,
    rings: Receiver<()>,
}

impl Fixture {
    fn new() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings { root_dir: dir.path().to_owned(), node: "n1".to_owned(), pod_groups: false };
        let (changed_tx, changed) = bounded(64);
        let (wiped_tx, wiped) = bounded(64);
        let (bell, rings) = bounded(1);
        let changed_fn = Box::new(move |uid: &PodUid| changed_tx.send(uid.clone()).unwrap());
        let claims = ResourceClaims::open(settings, Some(Box::new(Api(wiped_tx))), changed_fn, bell);
        Fixture { dir, claims, changed, wiped, rings }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("dra.sock")
    }

    fn serve(&self, driver: &Arc<FakeDriver>) -> Server {
        Server::start(&self.socket(), [driver.methods(Service::V1)]).unwrap()
    }

    fn register(&self, offered: &str) {
        self.register_all(&[offered]);
    }

    fn register_all(&self, offered: &[&str]) {
        let endpoint = self.socket().display().to_string();
        let offered: Vec<String> = offered.iter().map(|name| (*name).to_owned()).collect();
        self.claims.register_with(DRIVER, &endpoint, &offered, LIMIT).unwrap();
    }

    fn prepare(&self) -> Result<(), String> {
        self.claims.prepare(&user(), &StopToken::never()).map_err(|error| error.to_string())
    }

    fn unprepare(&self) -> Result<(), String> {
        self.claims.unprepare(user().uid(), &StopToken::never()).map_err(|error| error.to_string())
    }

    /// Repeats a step until it succeeds, as the agent does.
    fn until_ok(&self, step: impl Fn(&Fixture) -> Result<(), String>) {
        let begun = Instant::now();
        while let Err(text) = step(self) {
            assert!(begun.elapsed() < PATIENCE, "{text}");
            let _ = StopToken::never().wait(Duration::from_millis(50));
        }
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.claims.shut_down();
    }
}

fn user() -> Pod {
    pod(
        json!({"resourceClaims": [{"name": "a", "resourceClaimName": "one"}],
            "containers": [{"name": "c", "resources": {"claims": [{"name": "a"}]}}]}),
        json!({}),
    )
}

#[test]
fn each_fault_of_a_driver_is_an_error_in_time_and_the_next_attempt_succeeds() {
    for fault in FAULTS {
        let (fixture, driver) = (Fixture::new(), FakeDriver::new());
        let _server = fixture.serve(&driver);
        fixture.register("v1.DRAPlugin");
        let step =
            |fixture: &Fixture, number| if number == 0 { fixture.prepare() } else { fixture.unprepare() };
        for number in 0..2 {
            driver.set(fault);
            let begun = Instant::now();
            let outcome = step(&fixture, number);
            assert!(
                begun.elapsed() < LIMIT + Duration::from_secs(10),
                "{fault:?} took {:?}",
                begun.elapsed()
            );
            // A response to the end of a claim has no devices that could be unreadable.
            let harmless = fault == Fault::Slow || fault == Fault::Unreadable && number == 1;
            assert_eq!(outcome.is_ok(), harmless, "{fault:?} in step {number}: {outcome:?}");
            if let Err(text) = &outcome {
                assert!(text.len() < 2_000, "{fault:?}");
            }
            driver.set(Fault::None);
            fixture.until_ok(|fixture| step(fixture, number));
            let devices = fixture.claims.cdi_devices(&user(), &user().containers()[0]);
            assert_eq!(
                devices.ok(),
                (number == 0).then(|| vec!["example.com/dev=0".to_owned()]),
                "{fault:?}"
            );
        }
        assert!(driver.prepared.locked().is_empty() && fixture.claims.list().is_empty(), "{fault:?}");
    }
}

#[test]
fn a_driver_that_dies_during_a_call_is_called_again_when_it_is_back() {
    let (fixture, driver) = (Fixture::new(), FakeDriver::new());
    let server = fixture.serve(&driver);
    fixture.register("v1.DRAPlugin");
    driver.set(Fault::Hang);
    let claims = fixture.claims.clone();
    let (done, ended) = bounded(1);
    let caller = threads::spawn("t/caller", Stack::Large, OnDeath::Unsupervised, move |_| {
        let _ = done.send(claims.prepare(&user(), &StopToken::never()).is_ok());
    })
    .unwrap();
    driver.entered.1.recv_timeout(PATIENCE).unwrap();
    drop(server);
    assert_eq!(ended.recv_timeout(PATIENCE), Ok(false));
    drop(caller);
    driver.set(Fault::None);
    let _server = fixture.serve(&driver);
    fixture.until_ok(Fixture::prepare);
    fixture.until_ok(Fixture::unprepare);
    assert!(driver.prepared.locked().is_empty());
}

#[test]
fn a_driver_with_the_older_service_is_called_by_it() {
    let (fixture, driver) = (Fixture::new(), FakeDriver::new());
    let _server = Server::start(&fixture.socket(), [driver.methods(Service::V1beta1)]).unwrap();
    fixture.register("v1.DRAPlugin");
    assert!(fixture.prepare().unwrap_err().contains("code = Unimplemented"));
    fixture.claims.deregister(DRIVER, &fixture.socket().display().to_string());
    assert_eq!(
        fixture.unprepare().unwrap_err(),
        format!("unprepare dynamic resources: DRA driver {DRIVER} is not registered")
    );
    fixture.register("v1beta1.DRAPlugin");
    fixture.until_ok(Fixture::prepare);
    fixture.until_ok(Fixture::unprepare);
    let offered = ["v2.DRAPlugin".to_owned()];
    assert!(fixture.claims.validate(DRIVER, "/x", &offered).is_err());
    assert!(fixture.claims.register("Not A Name", "/x", &["v1.DRAPlugin".to_owned()]).is_err());
}

#[test]
fn health_reports_reach_the_status_of_the_pod_and_end_with_the_stream() {
    let (fixture, driver) = (Fixture::new(), FakeDriver::new());
    let (lists, source) = bounded::<Vec<Vec<u8>>>(4);
    let service = driver.methods(Service::V1).stream(&methods::NODE_WATCH_RESOURCES, move |_, out, stop| {
        while let Ok(devices) = source.recv() {
            let results = drahealth::HealthResponse { devices, ..Default::default() };
            if out.send(results, stop).is_err() {
                break;
            }
        }
        Ok(())
    });
    let _server = Server::start(&fixture.socket(), [service]).unwrap();
    fixture.register_all(&["v1.DRAPlugin", "v1alpha1.DRAResourceHealth", "v1.DRAResourceHealth"]);
    fixture.until_ok(Fixture::prepare);
    let shown = || -> Value {
        serde_json::to_value(fixture.claims.statuses(&user(), &user().containers()[0])).unwrap()
    };
    let status = |health: Value| {
        let mut resource = json!({"resourceID": "example.com/dev=0"});
        resource.as_object_mut().unwrap().extend(health.as_object().unwrap().clone());
        json!([{"name": "claim:a", "resources": [resource]}])
    };
    assert_eq!(shown(), status(json!({"health": "Unknown"})));
    let report = drahealth::DeviceReport {
        device: Some(drahealth::DeviceId {
            pool_name: "pool".to_owned(),
            device_name: "dev".to_owned(),
            ..Default::default()
        })
        .into(),
        health: drahealth::HealthStatus::UNHEALTHY.into(),
        health_check_timeout_seconds: 3600,
        message: "too hot".to_owned(),
        ..Default::default()
    };
    // Many reports on other devices, each alone, do not delay it.
    for number in 0..60 {
        let mut other = report.clone();
        other.device = Some(drahealth::DeviceId {
            pool_name: "pool".to_owned(),
            device_name: format!("other{number}"),
            ..Default::default()
        })
        .into();
        lists.send(vec![to_bytes(&other)]).unwrap();
    }
    lists.send(vec![vec![0xff], to_bytes(&report)]).unwrap();
    assert_eq!(fixture.changed.recv_timeout(PATIENCE), Ok("pod-uid".into()));
    assert_eq!(shown(), status(json!({"health": "Unhealthy", "message": "too hot"})));
    let file = || std::fs::read_to_string(fixture.dir.path().join("dra_health_state")).unwrap();
    assert!(file().contains("\"pool/dev\""));
    drop(lists);
    assert_eq!(fixture.changed.recv_timeout(PATIENCE), Ok("pod-uid".into()));
    assert_eq!(shown(), status(json!({"health": "Unknown"})));
    assert_eq!(file(), "{}");
}

#[test]
fn health_reports_stay_when_the_agent_ends_and_go_with_the_driver() {
    let (fixture, driver) = (Fixture::new(), FakeDriver::new());
    let report = drahealth::DeviceReport {
        device: Some(drahealth::DeviceId {
            pool_name: "pool".to_owned(),
            device_name: "dev".to_owned(),
            ..Default::default()
        })
        .into(),
        health: drahealth::HealthStatus::HEALTHY.into(),
        health_check_timeout_seconds: 3600,
        ..Default::default()
    };
    let service = driver.methods(Service::V1).stream(&methods::NODE_WATCH_RESOURCES, move |_, out, stop| {
        let devices = vec![to_bytes(&report)];
        let _ = out.send(drahealth::HealthResponse { devices, ..Default::default() }, stop);
        let _ = stop.wait(PATIENCE);
        Ok(())
    });
    let _server = Server::start(&fixture.socket(), [service]).unwrap();
    fixture.register_all(&["v1.DRAPlugin", "v1.DRAResourceHealth"]);
    let path = fixture.dir.path().join("dra_health_state");
    let file = || std::fs::read_to_string(&path).unwrap_or_default();
    let begun = Instant::now();
    while !file().contains("\"pool/dev\"") {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    fixture.claims.shut_down();
    assert!(file().contains("\"pool/dev\""));
    fixture.claims.deregister(DRIVER, &fixture.socket().display().to_string());
    assert_eq!(file(), "{}");
}

#[test]
fn driver_with_many_changes_is_limited_also_in_a_new_stream_and_through_another_socket() {
    let fixture = Fixture::new();
    let instance = |endpoint: &str| DriverInstance {
        shared: Arc::clone(&fixture.claims.shared),
        driver: DRIVER.into(),
        endpoint: endpoint.into(),
    };
    let now = Instant::now();
    let waits: Vec<Duration> = (0..100).map(|_| instance("/a").report_wait(1, true, now)).collect();
    let second = Duration::from_secs(1);
    assert!(waits.iter().take(99).all(|wait| *wait < second));
    assert_eq!(instance("/a").report_wait(1, true, now), second * 2);
    assert_eq!(instance("/b").report_wait(1, true, now), second * 3);
}

/// Whether the older and the newer stream are opened after a registration with these services.
fn opened_streams(offered: &[&str]) -> (bool, bool) {
    let (fixture, driver) = (Fixture::new(), FakeDriver::new());
    let (calls_tx, calls) = bounded::<HealthService>(4);
    let older = calls_tx.clone();
    let service = driver
        .methods(Service::V1)
        .stream(&WATCH_V1ALPHA1, move |_, _, stop| {
            let _ = older.send(HealthService::V1alpha1);
            let _ = stop.wait(PATIENCE);
            Ok(())
        })
        .stream(&methods::NODE_WATCH_RESOURCES, move |_, _, stop| {
            let _ = calls_tx.send(HealthService::V1);
            let _ = stop.wait(PATIENCE);
            Ok(())
        });
    let _server = Server::start(&fixture.socket(), [service]).unwrap();
    fixture.register_all(offered);
    fixture.until_ok(Fixture::prepare);
    let mut opened = Vec::new();
    if offered.iter().any(|name| name.ends_with("Health")) {
        opened.push(calls.recv_timeout(PATIENCE).unwrap());
    }
    fixture.claims.deregister(DRIVER, &fixture.socket().display().to_string());
    opened.extend(calls.try_iter());
    (opened.contains(&HealthService::V1alpha1), opened.contains(&HealthService::V1))
}

#[test]
fn only_a_health_service_that_the_driver_offers_is_watched() {
    assert_eq!(opened_streams(&["v1.DRAPlugin"]), (false, false));
    assert_eq!(opened_streams(&["v1.DRAPlugin", "v1alpha1.DRAResourceHealth"]), (true, false));
    assert_eq!(opened_streams(&["v1.DRAPlugin", "v1.DRAResourceHealth"]), (false, true));
}

#[test]
fn driver_that_has_no_reports_is_not_watched_again() {
    let next = |outcome| next_service(HealthService::V1, outcome);
    assert_eq!(next(Err(Kind::Unimplemented)), None);
    assert_eq!(next(Err(Kind::Unavailable)), Some(HealthService::V1));
    assert_eq!(next(Ok(())), Some(HealthService::V1));
}

#[test]
fn driver_that_was_lost_and_reports_again_can_be_lost_again() {
    let (fixture, driver) = (Fixture::new(), FakeDriver::new());
    let service = driver.methods(Service::V1).stream(&methods::NODE_WATCH_RESOURCES, |_, out, stop| {
        let _ = out.send(drahealth::HealthResponse::default(), stop);
        Ok(())
    });
    let _server = Server::start(&fixture.socket(), [service]).unwrap();
    let endpoint = fixture.socket().display().to_string();
    let client = Client::new(DRIVER, &endpoint, Service::V1, LIMIT).unwrap();
    let shared = &fixture.claims.shared;
    let called: Arc<dyn Driver> = Arc::new(client.clone());
    shared.drivers.locked().add(DRIVER, &endpoint, || Ok(called)).unwrap();
    let instance = DriverInstance { shared: Arc::clone(shared), driver: DRIVER.into(), endpoint };
    let far = Instant::now() + Duration::from_secs(3600);
    let is_pending = || shared.wipes.locked().due(far).contains(&Some(DRIVER.to_owned()));
    shared.lost(DRIVER);
    assert!(is_pending());
    let mut is_lost = true;
    let outcome = instance.read(&client, HealthService::V1, &mut is_lost, PATIENCE, &StopToken::never());
    assert_eq!((outcome, is_lost, is_pending()), (Ok(()), false, false));
}

#[test]
fn driver_that_is_back_and_has_nothing_to_report_can_be_lost_again() {
    let (fixture, driver) = (Fixture::new(), FakeDriver::new());
    let shared = Arc::clone(&fixture.claims.shared);
    let far = Instant::now() + Duration::from_secs(3600);
    let is_pending = move || shared.wipes.locked().due(far).contains(&Some(DRIVER.to_owned()));
    let is_unnoticed = is_pending.clone();
    let service = driver.methods(Service::V1).stream(&methods::NODE_WATCH_RESOURCES, move |_, _, stop| {
        let begun = Instant::now();
        while is_unnoticed() && !stop.is_stopped() && begun.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        Ok(())
    });
    let _server = Server::start(&fixture.socket(), [service]).unwrap();
    let endpoint = fixture.socket().display().to_string();
    let client = Client::new(DRIVER, &endpoint, Service::V1, LIMIT).unwrap();
    let shared = &fixture.claims.shared;
    let called: Arc<dyn Driver> = Arc::new(client.clone());
    shared.drivers.locked().add(DRIVER, &endpoint, || Ok(called)).unwrap();
    let instance = DriverInstance { shared: Arc::clone(shared), driver: DRIVER.into(), endpoint };
    shared.lost(DRIVER);
    assert!(is_pending());
    let mut is_lost = true;
    let interval = Duration::from_millis(1);
    let outcome = instance.read(&client, HealthService::V1, &mut is_lost, interval, &StopToken::never());
    assert_eq!((outcome, is_lost, is_pending()), (Ok(()), false, false));
}

#[test]
fn driver_without_health_reports_is_noticed_when_it_is_there() {
    let (fixture, driver) = (Fixture::new(), FakeDriver::new());
    let _server = fixture.serve(&driver);
    fixture.register("v1.DRAPlugin");
    // No call is made.
    let begun = Instant::now();
    while !fixture.claims.shared.is_usable(DRIVER) {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

#[test]
fn the_start_deletes_the_slices_of_the_node_and_cleans_up() {
    let (fixture, driver) = (Fixture::new(), FakeDriver::new());
    let _server = fixture.serve(&driver);
    fixture.register("v1.DRAPlugin");
    fixture.until_ok(Fixture::prepare);
    let active = Box::new(|| Some(BTreeSet::<PodUid>::new()));
    let running = fixture.claims.start(active, fixture.rings.clone(), OnDeath::Unsupervised).unwrap();
    assert_eq!(fixture.wiped.recv_timeout(PATIENCE), Ok("spec.nodeName=n1".to_owned()));
    let begun = Instant::now();
    while fixture.claims.uses_any(user().uid()) {
        assert!(begun.elapsed() < PATIENCE);
        let _ = StopToken::never().wait(Duration::from_millis(20));
    }
    drop(running);
    assert!(driver.prepared.locked().is_empty());
    assert!(fixture.wiped.try_recv().is_err(), "the driver is connected");
}
