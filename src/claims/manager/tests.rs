use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Receiver, bounded};
use serde_json::{Value, json};

use super::*;
use crate::claims::api::ReadError;
use crate::claims::object::ResourceClaim;
use crate::claims::testing::{claim, device, pod_of};
use crate::util::lock::LockExt;
use crate::util::stop;
use crate::util::threads::{OnDeath, Stack, spawn};

/// An API server that can be away.
#[derive(Clone, Default)]
struct Server {
    claims: Arc<Mutex<BTreeMap<String, Value>>>,
    away: Arc<AtomicBool>,
}

impl ResourceClaimApi for Server {
    fn read(&self, key: &ClaimKey) -> Result<ResourceClaim, ReadError> {
        if self.away.load(Ordering::SeqCst) {
            return Err(ReadError {
                text: "connection refused".to_owned(),
                unavailable: true,
                is_missing: false,
            });
        }
        let found = self.claims.locked().get(&key.name).cloned();
        let missing = format!("resourceclaims.resource.k8s.io {:?} not found", key.name);
        found.map(|claim| serde_json::from_value(claim).unwrap()).ok_or(ReadError {
            text: missing,
            unavailable: false,
            is_missing: true,
        })
    }

    fn delete_slices(&self, _: &str) -> Result<(), crate::kube::error::ApiError> {
        Ok(())
    }
}

/// A driver in memory: which claims it has prepared, its calls, and its next failures.
#[derive(Default)]
pub(super) struct FakeDriver {
    pub(super) prepared: Mutex<BTreeSet<String>>,
    calls: Mutex<Vec<String>>,
    pub(super) fail: Mutex<Option<&'static str>>,
    /// The failing call has done its work.
    pub(super) lost: AtomicBool,
    /// The file whose content is kept at the next call.
    pub(super) file: Mutex<Option<PathBuf>>,
    pub(super) at_call: Mutex<Option<Vec<u8>>>,
    /// The next call sends to the first channel and waits for the second.
    gate: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

impl FakeDriver {
    fn call(
        &self,
        method: &str,
        claims: &[ClaimId],
        work: impl Fn(&mut BTreeSet<String>, &str),
    ) -> Result<(), String> {
        let names: Vec<&str> = claims.iter().map(|claim| claim.key.name.as_str()).collect();
        self.calls.locked().push(format!("{method} {}", names.join(",")));
        if let Some(file) = self.file.locked().take() {
            *self.at_call.locked() = Some(std::fs::read(file).unwrap());
        }
        let gate = self.gate.locked().take();
        if let Some((reached, go)) = gate {
            reached.send(()).unwrap();
            let _ = go.recv();
        }
        let fail = *self.fail.locked();
        if fail.is_none() || self.lost.load(Ordering::SeqCst) {
            let mut prepared = self.prepared.locked();
            claims.iter().for_each(|claim| work(&mut prepared, &claim.uid));
        }
        fail.map_or(Ok(()), |text| Err(text.to_owned()))
    }

    pub(super) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.locked())
    }
}

impl Driver for FakeDriver {
    fn prepare(&self, claims: &[ClaimId], _: &StopToken) -> Result<PrepareResults, String> {
        self.call("prepare", claims, |prepared, uid| {
            prepared.insert(uid.to_owned());
        })?;
        let devices = |claim: &ClaimId| vec![device(&claim.key.name, &[])];
        Ok(claims.iter().map(|claim| (claim.uid.clone(), Ok(devices(claim)))).collect())
    }

    fn unprepare(&self, claims: &[ClaimId], _: &StopToken) -> Result<UnprepareResults, String> {
        self.call("unprepare", claims, |prepared, uid| {
            prepared.remove(uid);
        })?;
        Ok(claims.iter().map(|claim| (claim.uid.clone(), Ok(()))).collect())
    }

    fn is_connected(&self) -> bool {
        true
    }
}

pub(super) struct Fixture {
    dir: tempfile::TempDir,
    server: Server,
    pub(super) driver: Arc<FakeDriver>,
}

impl Fixture {
    /// The claims `one` and `two` of the driver `d` exist.
    pub(super) fn new() -> Fixture {
        let server = Server::default();
        for (name, uid) in [("one", "u1"), ("two", "u2")] {
            server.claims.locked().insert(name.to_owned(), claim(name, uid, &["d"]));
        }
        Fixture { dir: tempfile::tempdir().unwrap(), server, driver: Arc::new(FakeDriver::default()) }
    }

    /// Starts the agent; the driver is registered.
    pub(super) fn start(&self) -> ResourceClaims {
        let claims = self.start_without_driver();
        let driver: Arc<dyn Driver> = self.driver.clone();
        claims.shared.drivers.locked().add("d", "/d.sock", || Ok(driver)).unwrap();
        claims
    }

    fn start_without_driver(&self) -> ResourceClaims {
        let settings =
            Settings { root_dir: self.dir.path().to_owned(), node: "n1".to_owned(), pod_groups: false };
        let api: Box<dyn ResourceClaimApi> = Box::new(self.server.clone());
        ResourceClaims::open(settings, Some(api), Box::new(|_| {}), bounded(1).0)
    }

    pub(super) fn file(&self) -> PathBuf {
        self.dir.path().join("dra_manager_state")
    }
}

fn pod(name: &str, uid: &str, claims: &[&str]) -> Pod {
    let entries: Vec<Value> =
        claims.iter().map(|claim| json!({"name": claim, "resourceClaimName": claim})).collect();
    let uses: Vec<Value> = claims.iter().map(|claim| json!({"name": claim})).collect();
    pod_of(
        name,
        uid,
        json!({"resourceClaims": entries, "containers": [{"name": "c", "resources": {"claims": uses}}]}),
        json!({}),
    )
}

pub(super) fn p() -> Pod {
    pod("p", "pod-uid", &["one", "two"])
}

pub(super) fn q() -> Pod {
    pod("q", "q-uid", &["one"])
}

fn devices(claims: &ResourceClaims, pod: &Pod) -> Vec<String> {
    claims.cdi_devices(pod, &pod.containers()[0]).unwrap()
}

pub(super) fn prepare(claims: &ResourceClaims, pod: &Pod) -> Result<(), String> {
    claims.prepare(pod, &StopToken::never()).map_err(|error| error.to_string())
}

pub(super) fn unprepare(claims: &ResourceClaims, pod: &Pod) -> Result<(), String> {
    claims.unprepare(pod.uid(), &StopToken::never()).map_err(|error| error.to_string())
}

#[test]
fn claims_are_prepared_once_and_unprepared_after_the_last_pod() {
    let fixture = Fixture::new();
    let claims = fixture.start();
    prepare(&claims, &p()).unwrap();
    prepare(&claims, &p()).unwrap();
    prepare(&claims, &q()).unwrap();
    assert_eq!(fixture.driver.calls(), ["prepare one,two"]);
    assert_eq!(devices(&claims, &p()), ["example.com/dev=one", "example.com/dev=two"]);
    assert_eq!(devices(&claims, &q()), ["example.com/dev=one"]);
    assert_eq!(claims.in_use(), [("<any>".to_owned(), 2), ("d".to_owned(), 2)]);
    assert!(claims.has_claims_of(&p()) && claims.uses_any(p().uid()));
    unprepare(&claims, &p()).unwrap();
    assert_eq!(fixture.driver.calls(), ["unprepare two"]);
    assert!(!claims.uses_any(p().uid()));
    unprepare(&claims, &q()).unwrap();
    assert_eq!(fixture.driver.calls(), ["unprepare one"]);
    assert_eq!(state_file::read(&std::fs::read_to_string(fixture.file()).unwrap()), Ok(vec![]));
    assert_eq!(prepare(&claims, &pod("r", "r", &[])), Ok(()));
}

#[test]
fn errors_have_the_texts_of_the_go_kubelet() {
    let fixture = Fixture::new();
    let claims = fixture.start_without_driver();
    let text = |pod: &Pod| prepare(&claims, pod).unwrap_err();
    assert_eq!(text(&p()), "prepare dynamic resources: DRA driver d is not registered");
    assert!(!fixture.file().exists() && !claims.uses_any(p().uid()), "the pod can be deleted");
    assert_eq!(unprepare(&claims, &p()), Ok(()));
    assert_eq!(
        text(&pod("p", "pod-uid", &["three"])),
        "prepare dynamic resources: fetch ResourceClaim three: resourceclaims.resource.k8s.io \"three\" not found"
    );
    assert_eq!(
        text(&pod("s", "s", &["one"])),
        "prepare dynamic resources: pod s (s) is not allowed to use ResourceClaim one (u1)"
    );
    let claims = fixture.start();
    *fixture.driver.fail.locked() = Some("rpc error: code = Unavailable desc = gone");
    let prefix = "prepare dynamic resources: NodePrepareResources: rpc error:";
    assert!(prepare(&claims, &p()).unwrap_err().starts_with(prefix));
    let prefix = "unprepare dynamic resources: NodeUnprepareResources: rpc error:";
    assert!(unprepare(&claims, &p()).unwrap_err().starts_with(prefix));
}

#[test]
fn a_call_whose_response_was_lost_is_repeated() {
    let fixture = Fixture::new();
    let claims = fixture.start();
    fixture.driver.lost.store(true, Ordering::SeqCst);
    *fixture.driver.fail.locked() = Some("lost");
    prepare(&claims, &p()).unwrap_err();
    // The driver has the claims, so they must be unprepared even if the pod never starts.
    assert!(claims.uses_any(p().uid()) && fixture.driver.prepared.locked().len() == 2);
    unprepare(&claims, &p()).unwrap_err();
    *fixture.driver.fail.locked() = None;
    unprepare(&claims, &p()).unwrap();
    assert!(fixture.driver.prepared.locked().is_empty() && claims.list().is_empty());
    assert_eq!(fixture.driver.calls(), ["prepare one,two", "unprepare one,two", "unprepare one,two"]);
}

#[test]
fn after_a_restart_containers_have_their_devices_and_a_new_sandbox_is_prepared_again() {
    let fixture = Fixture::new();
    prepare(&fixture.start(), &p()).unwrap();
    let claims = fixture.start();
    assert_eq!(devices(&claims, &p()).len(), 2);
    assert!(claims.has_claims_of(&p()));
    prepare(&claims, &p()).unwrap();
    assert_eq!(fixture.driver.calls(), ["prepare one,two", "prepare one,two"]);
    assert_eq!(devices(&claims, &p()).len(), 2);
}

/// Its sandbox is there, and the state file was not usable: only the state shows what is to be prepared.
#[test]
fn pod_whose_driver_has_failed_is_prepared_again_before_its_next_container() {
    let fixture = Fixture::new();
    let claims = fixture.start();
    *fixture.driver.fail.locked() = Some("gone");
    for _ in 0..2 {
        assert!(!claims.has_claims_of(&p()));
        prepare(&claims, &p()).unwrap_err();
    }
    // It is a user of the claims, but has no devices.
    assert!(claims.uses_any(p().uid()) && devices(&claims, &p()).is_empty());
    assert!(!claims.has_claims_of(&p()));
    *fixture.driver.fail.locked() = None;
    prepare(&claims, &p()).unwrap();
    assert!(claims.has_claims_of(&p()) && !claims.has_claims_of(&q()));
    assert_eq!(devices(&claims, &p()).len(), 2);
    unprepare(&claims, &p()).unwrap();
    assert!(!claims.has_claims_of(&p()));
}

/// The agent is restarted before the driver is back: its container would start without devices.
#[test]
fn pod_whose_driver_has_failed_is_prepared_before_its_next_container_also_after_a_restart() {
    let fixture = Fixture::new();
    *fixture.driver.fail.locked() = Some("gone");
    prepare(&fixture.start(), &p()).unwrap_err();
    let claims = fixture.start();
    assert!(claims.uses_any(p().uid()) && !claims.has_claims_of(&p()));
    *fixture.driver.fail.locked() = None;
    prepare(&claims, &p()).unwrap();
    assert!(claims.has_claims_of(&p()));
    let claims = fixture.start();
    assert!(claims.has_claims_of(&p()));
    assert_eq!(devices(&claims, &p()).len(), 2);
}

#[test]
fn an_agent_that_is_killed_during_a_call_loses_no_claim() {
    let fixture = Fixture::new();
    let killed = fixture.start();
    // The call succeeds, and its result is never written: the next start has the earlier file.
    let (reached_tx, reached) = bounded(1);
    let (go, go_rx) = bounded::<()>(1);
    *fixture.driver.gate.locked() = Some((reached_tx, go_rx));
    let running = spawn("t/killed", Stack::Large, OnDeath::Unsupervised, move |_| {
        let _ = prepare(&killed, &p());
    })
    .unwrap();
    reached.recv_timeout(Duration::from_secs(60)).unwrap();
    let file = std::fs::read(fixture.file()).unwrap();
    drop(go);
    drop(running);
    std::fs::write(fixture.file(), file).unwrap();
    let claims = fixture.start();
    assert!(claims.uses_any(p().uid()));
    assert!(devices(&claims, &p()).is_empty(), "containers start only after the pod is prepared");
    fixture.driver.calls();
    claims.unprepare_unused(
        &BTreeSet::new(),
        &mut PodUid::default(),
        &StopToken::never(),
        Duration::from_secs(60),
    );
    assert_eq!(fixture.driver.calls(), ["unprepare one,two"]);
    assert!(fixture.driver.prepared.locked().is_empty() && claims.list().is_empty());
}

#[test]
fn clean_up_ends_the_claims_of_pods_that_are_gone_only() {
    let fixture = Fixture::new();
    let claims = fixture.start();
    prepare(&claims, &p()).unwrap();
    prepare(&claims, &q()).unwrap();
    fixture.driver.calls();
    let active = BTreeSet::from([q().uid().clone()]);
    claims.unprepare_unused(&active, &mut PodUid::default(), &StopToken::never(), Duration::from_secs(60));
    assert_eq!(fixture.driver.calls(), ["unprepare two"]);
    claims.unprepare_unused(&active, &mut PodUid::default(), &StopToken::never(), Duration::from_secs(60));
    assert!(fixture.driver.calls().is_empty());
    assert_eq!(devices(&claims, &q()).len(), 1);
}

/// A driver that hangs would keep the claims of all other drivers prepared.
#[test]
fn clean_up_that_ran_out_of_time_continues_with_the_next_pod() {
    let fixture = Fixture::new();
    let claims = fixture.start();
    prepare(&claims, &p()).unwrap();
    prepare(&claims, &q()).unwrap();
    fixture.driver.calls();
    *fixture.driver.fail.locked() = Some("hangs");
    let mut last = PodUid::default();
    for expected in ["unprepare two", "unprepare one", "unprepare two"] {
        claims.unprepare_unused(&BTreeSet::new(), &mut last, &StopToken::never(), Duration::ZERO);
        assert_eq!(fixture.driver.calls(), [expected]);
    }
}

#[test]
fn pods_that_share_a_claim_wait_for_each_other_and_others_do_not() {
    let fixture = Fixture::new();
    let claims = fixture.start();
    let (reached_tx, reached) = bounded(1);
    let (go, go_rx) = bounded::<()>(1);
    *fixture.driver.gate.locked() = Some((reached_tx, go_rx));
    let (first, second) = (claims.clone(), claims.clone());
    let first_call =
        spawn("t/one", Stack::Large, OnDeath::Unsupervised, move |_| prepare(&first, &q()).unwrap()).unwrap();
    reached.recv_timeout(Duration::from_secs(60)).unwrap();
    // The call for `one` hangs; a pod with `two` is prepared, and a stop ends a wait.
    prepare(&claims, &pod("p", "pod-uid", &["two"])).unwrap();
    let (source, token) = stop::pair();
    drop(source);
    assert_eq!(claims.prepare(&p(), &token).unwrap_err().failure, Failure::Stopping);
    let (done, ended) = bounded(1);
    let two = spawn("t/two", Stack::Large, OnDeath::Unsupervised, move |_| {
        let _ = done.send(prepare(&second, &p()));
    })
    .unwrap();
    assert!(ended.try_recv().is_err());
    drop(go);
    assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(Ok(())));
    drop((first_call, two));
    assert_eq!(fixture.driver.calls(), ["prepare one", "prepare two"]);
}

#[test]
fn without_the_api_server_a_pod_that_was_prepared_before_is_prepared_again() {
    let fixture = Fixture::new();
    prepare(&fixture.start(), &p()).unwrap();
    fixture.server.away.store(true, Ordering::SeqCst);
    let claims = fixture.start();
    prepare(&claims, &p()).unwrap();
    assert_eq!(fixture.driver.calls().len(), 2);
    let text = prepare(&claims, &q()).unwrap_err();
    assert_eq!(text, "prepare dynamic resources: fetch ResourceClaim one: connection refused");
}

#[test]
fn calls_that_a_driver_does_not_want_are_left_out_also_without_the_driver() {
    let fixture = Fixture::new();
    prepare(&fixture.start(), &p()).unwrap();
    let mut known = state_file::read(&std::fs::read_to_string(fixture.file()).unwrap()).unwrap();
    for claim in &mut known {
        claim.skips.insert("d".to_owned(), vec!["*".to_owned()]);
    }
    std::fs::write(fixture.file(), state_file::write(&known)).unwrap();
    fixture.driver.calls();
    fixture.server.away.store(true, Ordering::SeqCst);
    let claims = fixture.start_without_driver();
    prepare(&claims, &p()).unwrap();
    assert_eq!(devices(&claims, &p()).len(), 2);
    unprepare(&claims, &p()).unwrap();
    assert!(fixture.driver.calls().is_empty() && claims.list().is_empty());
    assert_eq!(state_file::read(&std::fs::read_to_string(fixture.file()).unwrap()), Ok(vec![]));
}

#[test]
fn a_damaged_state_file_is_put_aside_and_the_claims_are_entered_again() {
    let fixture = Fixture::new();
    prepare(&fixture.start(), &p()).unwrap();
    let text = std::fs::read_to_string(fixture.file()).unwrap();
    std::fs::write(fixture.file(), &text[..text.len() - 4]).unwrap();
    std::fs::write(fixture.dir.path().join("dra_health_state"), "[").unwrap();
    let claims = fixture.start();
    assert_eq!(claims.problems().len(), 2);
    assert!(fixture.dir.path().join("dra_manager_state.unusable").exists());
    assert!(!claims.has_claims_of(&p()) && claims.cdi_devices(&p(), &p().containers()[0]).is_err());
    prepare(&claims, &p()).unwrap();
    assert!(claims.has_claims_of(&p()) && claims.problems().len() == 2);
    unprepare(&claims, &p()).unwrap();
    assert!(fixture.driver.prepared.locked().is_empty());
}

#[test]
fn a_state_file_that_cannot_be_written_keeps_the_pod_from_starting() {
    let fixture = Fixture::new();
    let claims = fixture.start();
    std::fs::create_dir(fixture.file()).unwrap();
    let text = prepare(&claims, &p()).unwrap_err();
    assert!(text.starts_with("prepare dynamic resources: checkpoint ResourceClaim cache: "), "{text}");
    assert!(fixture.driver.calls().is_empty());
    std::fs::remove_dir(fixture.file()).unwrap();
    prepare(&claims, &p()).unwrap();
    assert_eq!(fixture.driver.calls(), ["prepare one,two"]);
    std::fs::remove_file(fixture.file()).unwrap();
    std::fs::create_dir(fixture.file()).unwrap();
    let text = unprepare(&claims, &p()).unwrap_err();
    assert!(text.starts_with("unprepare dynamic resources: checkpoint ResourceClaim state: "), "{text}");
    std::fs::remove_dir(fixture.file()).unwrap();
    unprepare(&claims, &p()).unwrap();
    assert_eq!(fixture.driver.calls(), ["unprepare one,two"]);
}
