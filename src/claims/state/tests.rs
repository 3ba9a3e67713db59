use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::claims::info::Device;
use crate::claims::state_file;
use crate::claims::testing::{device, info};

fn uid(text: &str) -> PodUid {
    PodUid::from(text)
}

fn work(start: OperationStart) -> Work {
    match start {
        OperationStart::Work(work) => work,
        OperationStart::Wait(_) => panic!("another operation uses a claim"),
    }
}

fn prepared_all(batch: &[ClaimId], requests: &[&str]) -> PrepareResults {
    let devices = |claim: &ClaimId| vec![device(&format!("dev-{}", claim.key.name), requests)];
    batch.iter().map(|claim| (claim.uid.clone(), Ok(devices(claim)))).collect()
}

fn unprepared_all(batch: &[ClaimId]) -> UnprepareResults {
    batch.iter().map(|claim| (claim.uid.clone(), Ok(()))).collect()
}

fn batches(work: &Work) -> BTreeMap<&str, Vec<&str>> {
    work.batches
        .iter()
        .map(|(driver, claims)| {
            (driver.as_str(), claims.iter().map(|claim| claim.key.name.as_str()).collect())
        })
        .collect()
}

fn prepare(state: &mut ClaimState, pod: &str, wanted: &[ClaimInfo]) {
    let mut work = work(state.begin_prepare(&uid(pod), wanted).unwrap());
    for (driver, batch) in work.batches.clone() {
        state.driver_prepared(&mut work, &driver, prepared_all(&batch, &[])).unwrap();
    }
    state.finish(work);
}

#[test]
fn each_driver_gets_all_its_claims_in_one_batch() {
    let mut state = ClaimState::default();
    let wanted = [info("a", "1", &["x", "y"]), info("b", "2", &["y"]), info("c", "3", &[])];
    let mut operation = work(state.begin_prepare(&uid("p"), &wanted).unwrap());
    assert_eq!(batches(&operation), BTreeMap::from([("x", vec!["a"]), ("y", vec!["a", "b"])]));
    assert_eq!(state.in_use()[ANY_DRIVER], 0);
    for driver in ["x", "y"] {
        let response = prepared_all(&operation.batches[driver].clone(), &[]);
        state.driver_prepared(&mut operation, driver, response).unwrap();
    }
    state.finish(operation);
    assert_eq!(state.in_use(), BTreeMap::from([("<any>".into(), 3), ("x".into(), 1), ("y".into(), 2)]));
    // A second pod that shares a claim calls no driver.
    let version = state.version();
    let other = work(state.begin_prepare(&uid("q"), &wanted[..1]).unwrap());
    assert!(other.batches.is_empty());
    state.finish(other);
    assert!(state.version() > version && state.uses_any(&uid("q")));
}

#[test]
fn after_a_partial_failure_only_the_claims_that_failed_are_prepared_again() {
    let mut state = ClaimState::default();
    let wanted = [info("a", "1", &["x"]), info("b", "2", &["x", "y"]), info("c", "3", &["y"])];
    let mut first = work(state.begin_prepare(&uid("p"), &wanted).unwrap());
    let response = prepared_all(&first.batches["x"].clone(), &[]);
    state.driver_prepared(&mut first, "x", response).unwrap();
    let mut response = prepared_all(&first.batches["y"].clone(), &[]);
    response.insert("2".into(), Err("no power".into()));
    let error = state.driver_prepared(&mut first, "y", response).unwrap_err();
    assert_eq!(error.to_string(), "NodePrepareResources failed for ResourceClaim b: no power");
    state.finish(first);
    let again = work(state.begin_prepare(&uid("p"), &wanted).unwrap());
    assert_eq!(batches(&again), BTreeMap::from([("x", vec!["b"]), ("y", vec!["b"])]));
    state.finish(again);
}

#[test]
fn a_claim_of_the_same_name_waits_for_the_end_of_the_old_one() {
    let mut state = ClaimState::default();
    prepare(&mut state, "p", &[info("a", "1", &["x"])]);
    let version = state.version();
    let error =
        state.begin_prepare(&uid("q"), &[info("b", "9", &["x"]), info("a", "2", &["x"])]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "old ResourceClaim with same name a and different UID 1 still exists (previous pod force-deleted?!)"
    );
    assert_eq!((state.version(), state.uses_any(&uid("q"))), (version, false));
}

#[test]
fn a_claim_is_unprepared_when_its_last_pod_has_ended() {
    let mut state = ClaimState::default();
    let claim = [info("a", "1", &["x"])];
    prepare(&mut state, "p", &claim);
    prepare(&mut state, "q", &claim);
    let first = work(state.begin_unprepare(&uid("p")));
    assert!(first.batches.is_empty());
    state.finish(first);
    assert!(!state.uses_any(&uid("p")));
    // The other user is not touched by a repeated or late end of the first.
    let late = work(state.begin_unprepare(&uid("p")));
    assert!(late.batches.is_empty());
    state.finish(late);
    let mut last = work(state.begin_unprepare(&uid("q")));
    assert_eq!(batches(&last), BTreeMap::from([("x", vec!["a"])]));
    assert!(state.uses_any(&uid("q")));
    let response = unprepared_all(&last.batches["x"].clone());
    state.driver_unprepared(&mut last, "x", &response).unwrap();
    state.finish(last);
    assert!(state.is_empty());
}

#[test]
fn a_claim_whose_unpreparing_failed_is_prepared_again_for_the_next_pod() {
    let mut state = ClaimState::default();
    let claim = [info("a", "1", &["x"])];
    prepare(&mut state, "p", &claim);
    let ending = work(state.begin_unprepare(&uid("p")));
    let OperationStart::Wait(wait) = state.begin_prepare(&uid("q"), &claim).unwrap() else {
        panic!("not marked")
    };
    assert_eq!(wait.try_recv(), Err(crossbeam_channel::TryRecvError::Empty));
    state.finish(ending);
    assert_eq!(wait.try_recv(), Err(crossbeam_channel::TryRecvError::Disconnected));
    assert!(state.uses_any(&uid("p")));
    let again = work(state.begin_prepare(&uid("q"), &claim).unwrap());
    assert_eq!(batches(&again), BTreeMap::from([("x", vec!["a"])]));
    state.finish(again);
}

#[test]
fn containers_get_the_devices_of_their_requests_once() {
    let mut state = ClaimState::default();
    let mut operation = work(state.begin_prepare(&uid("p"), &[info("a", "1", &["x", "y"])]).unwrap());
    let mut both = device("both", &["r", "s"]);
    both.cdi_ids.push("example.com/dev=more".into());
    let response = [("1".to_owned(), Ok(vec![device("r", &["r"]), both, device("s", &["s"])]))].into();
    state.driver_prepared(&mut operation, "x", response).unwrap();
    let response =
        [("1".to_owned(), Ok(vec![device("all", &[]), Device { cdi_ids: vec![], ..device("none", &[]) }]))]
            .into();
    state.driver_prepared(&mut operation, "y", response).unwrap();
    state.finish(operation);
    let key = info("a", "1", &[]).id.key;
    let names = |requests: &[&str]| -> Vec<String> {
        let ids = state.cdi_devices(&key, requests).unwrap();
        ids.iter().map(|id| id.trim_start_matches("example.com/dev=").to_owned()).collect()
    };
    assert_eq!(names(&["r"]), ["r", "both", "more", "all"]);
    assert_eq!(names(&["r", "s"]), ["r", "both", "more", "all", "s"]);
    assert_eq!(names(&[""]), ["r", "both", "more", "s", "all"]);
    assert!(names(&[]).is_empty());
    let missing = info("z", "1", &[]).id.key;
    assert_eq!(
        state.cdi_devices(&missing, &[""]).unwrap_err().to_string(),
        "internal error: unable to get claim info for ResourceClaim z in namespace n"
    );
    let devices = BTreeSet::from([("pool".to_owned(), "s".to_owned())]);
    assert_eq!(state.users_of("x", &devices), BTreeSet::from([uid("p")]));
    assert!(state.users_of("y", &devices).is_empty());
}

#[test]
fn a_claim_that_is_prepared_again_has_its_devices_once() {
    let mut state = ClaimState::default();
    let claim = [info("a", "1", &["x"])];
    prepare(&mut state, "p", &claim);
    let text = state_file::write(state.claims());
    let mut state = ClaimState::new(state_file::read(&text).unwrap());
    // What the file says is enough for containers that are restarted.
    assert_eq!(state.cdi_devices(&claim[0].id.key, &[""]).unwrap().len(), 1);
    let version = state.version();
    prepare(&mut state, "p", &claim);
    assert_eq!(state.cdi_devices(&claim[0].id.key, &[""]).unwrap().len(), 1);
    assert_eq!(state.version(), version, "nothing has changed that the file would show");
}

#[test]
fn claim_without_devices_is_complete_when_its_last_driver_has_prepared_it() {
    let claim = [info("a", "1", &["x", "y"])];
    let key = claim[0].id.key.clone();
    let mut state = ClaimState::default();
    let mut operation = work(state.begin_prepare(&uid("p"), &claim).unwrap());
    let stored =
        |state: &ClaimState| ClaimState::new(state_file::read(&state_file::write(state.claims())).unwrap());
    for driver in ["x", "y"] {
        assert!(!state.is_prepared_for(&key, &uid("p")) && !stored(&state).is_prepared_for(&key, &uid("p")));
        let version = state.version();
        let response = PrepareResults::from([("1".to_owned(), Ok(Vec::new()))]);
        state.driver_prepared(&mut operation, driver, response).unwrap();
        assert_eq!(state.version() > version, driver == "y");
    }
    assert!(state.is_prepared_for(&key, &uid("p")) && stored(&state).is_prepared_for(&key, &uid("p")));
    state.finish(operation);
}

#[test]
fn a_claim_without_pods_is_unprepared() {
    let mut state = ClaimState::new(vec![info("a", "1", &["x"])]);
    assert!(state.has_unused());
    let mut operation = work(state.begin_unprepare_unused());
    let response = unprepared_all(&operation.batches["x"].clone());
    state.driver_unprepared(&mut operation, "x", &response).unwrap();
    state.finish(operation);
    assert!(state.is_empty());
}

/// What happens next in the random test.
#[derive(Debug, Clone)]
enum Step {
    /// A pod is prepared; the bits say which drivers fail.
    Prepare { pod: usize, claims: Vec<usize>, failing: u8 },
    /// A pod ends; the bits say which drivers fail.
    End { pod: usize, failing: u8 },
    /// The agent is killed: the state is that of the last written file.
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..3_usize, proptest::collection::vec(0..3_usize, 1..3), 0..8_u8)
            .prop_map(|(pod, claims, failing)| Step::Prepare { pod, claims, failing }),
        4 => (0..3_usize, 0..8_u8).prop_map(|(pod, failing)| Step::End { pod, failing }),
        1 => Just(Step::Restart),
    ];
    proptest::collection::vec(step, 1..40)
}

/// The drivers' side: which claims are prepared. A driver that fails has done its work in half of
/// the cases.
#[derive(Default)]
struct Fixture {
    state: ClaimState,
    file: String,
    driver: BTreeSet<(String, String)>,
    running: BTreeMap<usize, BTreeSet<usize>>,
}

const DRIVERS: [&str; 3] = ["x", "y", "z"];

impl Fixture {
    fn claim(number: usize) -> ClaimInfo {
        let drivers: Vec<&str> = DRIVERS.into_iter().take(number + 1).collect();
        info(&format!("c{number}"), &format!("u{number}"), &drivers)
    }

    fn write(&mut self) {
        self.file = state_file::write(self.state.claims());
    }

    fn prepare(&mut self, pod: usize, claims: &[usize], failing: u8) {
        let claims: BTreeSet<usize> = claims.iter().copied().collect();
        let wanted: Vec<ClaimInfo> = claims.iter().map(|number| Fixture::claim(*number)).collect();
        let mut work = work(self.state.begin_prepare(&uid(&pod.to_string()), &wanted).unwrap());
        self.write();
        let mut ok = true;
        for (driver, batch) in work.batches.clone() {
            let fails = failing & (1 << driver.len()) != 0 && failing & 1 != 0;
            if !fails || failing & 2 != 0 {
                self.driver.extend(batch.iter().map(|claim| (driver.clone(), claim.uid.clone())));
            }
            if fails {
                ok = false;
                break;
            }
            self.state.driver_prepared(&mut work, &driver, prepared_all(&batch, &[])).unwrap();
        }
        self.state.finish(work);
        self.write();
        if ok {
            self.running.entry(pod).or_default().extend(claims);
        }
    }

    fn end(&mut self, pod: usize, failing: u8) {
        self.running.remove(&pod);
        let mut work = work(self.state.begin_unprepare(&uid(&pod.to_string())));
        for (driver, batch) in work.batches.clone() {
            let fails = failing & 4 != 0;
            if !fails || failing & 2 != 0 {
                for claim in &batch {
                    self.driver.remove(&(driver.clone(), claim.uid.clone()));
                }
            }
            if fails {
                break;
            }
            self.state.driver_unprepared(&mut work, &driver, &unprepared_all(&batch)).unwrap();
        }
        self.state.finish(work);
        self.write();
    }

    fn check(&self) {
        for number in self.running.values().flatten() {
            let claim = Fixture::claim(*number);
            for driver in claim.drivers.keys() {
                assert!(
                    self.driver.contains(&(driver.clone(), claim.id.uid.clone())),
                    "claim {number} is used and not prepared by {driver}"
                );
            }
            assert!(!self.state.cdi_devices(&claim.id.key, &[""]).unwrap().is_empty());
        }
        // Whatever a driver has is in the state, and so will be unprepared.
        for (driver, claim_uid) in &self.driver {
            let known = self.state.claims().find(|claim| claim.id.uid == *claim_uid);
            assert!(known.is_some_and(|claim| claim.drivers.contains_key(driver)));
        }
        assert!(self.state.marked.is_empty());
    }
}

proptest! {
    #[test]
    fn used_claims_stay_prepared_and_none_is_lost_or_left(steps in steps()) {
        let mut fixture = Fixture::default();
        for step in steps {
            match step {
                Step::Prepare { pod, claims, failing } => fixture.prepare(pod, &claims, failing),
                Step::End { pod, failing } => fixture.end(pod, failing),
                Step::Restart => {
                    fixture.state = ClaimState::new(state_file::read(&fixture.file).unwrap_or_default());
                }
            }
            fixture.check();
        }
        // The clean-up of pods that are gone leaves nothing.
        for pod in fixture.state.pods_to_unprepare(&BTreeSet::new()) {
            fixture.end(pod.as_str().parse().unwrap(), 0);
        }
        prop_assert!(fixture.state.is_empty() && fixture.driver.is_empty());
    }
}
