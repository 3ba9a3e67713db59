//! The steps of shutdowns, with a fake clock and a fake node.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::json;

use super::Orders;
use super::core::{Action, Core, ShutdownState};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::pods::plan::shutdown::two_steps;

#[derive(Default)]
struct FakeNode {
    notified: Cell<bool>,
    /// A source has not delivered its pods.
    silent: Cell<bool>,
    written: Cell<bool>,
    pods: RefCell<Vec<Pod>>,
    ended: RefCell<BTreeSet<PodUid>>,
}

impl ShutdownState for FakeNode {
    fn is_acknowledged(&self) -> bool {
        self.notified.get()
    }

    fn is_complete(&self) -> bool {
        !self.silent.get()
    }

    fn pods(&self) -> Vec<Pod> {
        self.pods.borrow().clone()
    }

    fn has_ended(&self, uid: &PodUid) -> bool {
        self.ended.borrow().contains(uid)
    }

    fn is_written(&self) -> bool {
        self.written.get()
    }
}

fn pod(uid: &str, priority: i32, grace: i64) -> Pod {
    let object = json!({"metadata": {"uid": uid}, "spec": {"containers": [],
        "priority": priority, "terminationGracePeriodSeconds": grace}});
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
}

/// A node with the regular pods `n` and `m` (20 s in total) and the critical pod `c` (10 s).
struct Fixture {
    core: Core,
    fake: FakeNode,
    start: Instant,
}

impl Fixture {
    fn new() -> Self {
        let start = Instant::now();
        let fake = FakeNode::default();
        fake.pods.replace(vec![pod("n", 0, 30), pod("m", 0, 5), pod("c", 2_000_000_000, 30)]);
        let steps = two_steps(Duration::from_secs(30), Duration::from_secs(10));
        Fixture { core: Core::new(steps, start), fake, start }
    }

    fn time(&self, seconds: f64) -> Instant {
        self.start + Duration::from_secs_f64(seconds)
    }

    fn prepare(&mut self, on: bool, seconds: f64) -> Option<Action> {
        self.core.prepare_for_shutdown(on, self.time(seconds))
    }

    fn turn(&mut self, seconds: f64) -> Vec<Action> {
        self.core.turn(&self.fake, self.time(seconds))
    }

    fn end(&self, uid: &str) {
        self.fake.ended.borrow_mut().insert(uid.into());
    }

    fn due(&self) -> Option<f64> {
        self.core.next_deadline().map(|due| (due - self.start).as_secs_f64())
    }
}

fn kill(pods: &[(&str, i64)]) -> Action {
    Action::Kill(pods.iter().map(|(uid, grace)| ((*uid).into(), *grace)).collect())
}

#[test]
fn groups_are_stopped_in_order_and_then_the_lock_is_released() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.core.inhibit_delay(), Duration::from_secs(30));
    assert_eq!((fixture.turn(0.0), fixture.due()), (vec![], None));
    assert_eq!(fixture.prepare(true, 1.0), Some(Action::Begin));
    // A repeated signal does not start the shutdown again.
    assert_eq!(fixture.prepare(true, 1.0), None);
    assert_eq!((fixture.turn(1.0), fixture.due()), (vec![], Some(3.0)));
    fixture.fake.notified.set(true);
    assert_eq!(fixture.turn(1.1), [kill(&[("n", 20), ("m", 5)])]);
    assert_eq!(fixture.due(), Some(21.1));
    fixture.end("m");
    assert_eq!(fixture.turn(2.0), []);
    // The next group is stopped as soon as all pods of this group have ended.
    fixture.end("n");
    assert_eq!((fixture.turn(3.0), fixture.due()), (vec![kill(&[("c", 10)])], Some(13.0)));
    assert_eq!(fixture.turn(3.1), []);
    fixture.end("c");
    assert_eq!((fixture.turn(5.0), fixture.due()), (vec![], Some(5.05)));
    assert!(!fixture.core.is_over());
    fixture.fake.written.set(true);
    assert_eq!((fixture.turn(5.05), fixture.due()), (vec![Action::Release], None));
    assert!(fixture.core.is_over());
    assert_eq!(fixture.turn(6.0), []);
}

#[test]
fn no_wait_is_longer_than_its_limit() {
    let mut fixture = Fixture::new();
    fixture.prepare(true, 0.0);
    // `sync` hangs: the pods that were known before are stopped.
    assert_eq!(fixture.turn(1.9), []);
    assert_eq!(fixture.turn(2.0), [kill(&[("n", 20), ("m", 5)])]);
    fixture.end("n");
    assert_eq!(fixture.turn(21.9), []);
    assert_eq!(fixture.turn(22.0), [Action::Overdue(vec!["m".into()]), kill(&[("c", 10)])]);
    // No time is left to send the statuses to the API server.
    assert_eq!(fixture.turn(32.0), [Action::Overdue(vec!["c".into()]), Action::Release]);
}

#[test]
fn pods_that_a_source_delivers_late_get_the_time_of_their_group() {
    let mut fixture = Fixture::new();
    let all = fixture.fake.pods.replace(vec![pod("s", 2_000_000_000, 30)]);
    fixture.fake.notified.set(true);
    fixture.fake.silent.set(true);
    fixture.prepare(true, 0.0);
    // The other source may still deliver its pods.
    assert_eq!((fixture.turn(0.0), fixture.due()), (vec![], Some(2.0)));
    assert_eq!(fixture.turn(2.0), [kill(&[("s", 10)])]);
    fixture.end("s");
    assert_eq!((fixture.turn(3.0), fixture.due()), (vec![], Some(10.0)));
    fixture.fake.silent.set(false);
    fixture.fake.pods.borrow_mut().extend(all);
    assert_eq!(fixture.turn(4.0), [kill(&[("n", 20), ("m", 5)])]);
    fixture.end("n");
    fixture.end("m");
    assert_eq!(fixture.turn(5.0), [kill(&[("c", 10)])]);
    fixture.end("c");
    fixture.fake.written.set(true);
    assert_eq!(fixture.turn(6.0), [Action::Release]);
}

#[test]
fn source_that_never_delivers_does_not_delay_the_shutdown() {
    let mut fixture = Fixture::new();
    fixture.fake.pods.replace(Vec::new());
    fixture.fake.notified.set(true);
    fixture.fake.written.set(true);
    fixture.fake.silent.set(true);
    fixture.prepare(true, 0.0);
    assert_eq!((fixture.turn(2.0), fixture.due()), (vec![], Some(10.0)));
    assert_eq!(fixture.turn(9.9), []);
    assert_eq!(fixture.turn(10.0), [Action::Release]);
}

#[test]
fn statuses_get_the_time_that_is_left() {
    let mut fixture = Fixture::new();
    fixture.fake.notified.set(true);
    fixture.fake.pods.replace(Vec::new());
    fixture.prepare(true, 0.0);
    assert_eq!(fixture.turn(0.0), []);
    assert_eq!(fixture.turn(1.99), []);
    assert_eq!(fixture.turn(2.0), [Action::Release]);
}

#[test]
fn cancelled_shutdown_kills_no_more_pods() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.prepare(false, 0.0), None);
    fixture.fake.notified.set(true);
    fixture.prepare(true, 0.0);
    assert_eq!(fixture.turn(0.0).len(), 1);
    assert_eq!(fixture.prepare(false, 1.0), Some(Action::Undo));
    fixture.end("n");
    fixture.end("m");
    assert_eq!((fixture.turn(2.0), fixture.due()), (vec![], None));
    // The next shutdown proceeds like the first.
    assert_eq!(fixture.prepare(true, 3.0), Some(Action::Begin));
    fixture.fake.pods.replace(vec![pod("c", 2_000_000_000, 3)]);
    assert_eq!(fixture.turn(3.0), [kill(&[("c", 3)])]);
    fixture.end("c");
    fixture.fake.written.set(true);
    assert_eq!(fixture.turn(4.0), [Action::Release]);
    assert_eq!(fixture.prepare(false, 5.0), Some(Action::Undo));
}

#[test]
fn cancelled_shutdown_discards_pending_kill_orders() {
    let kills = |uid: &str| Orders { kills: [(uid.into(), 5)].into(), ..Orders::default() };
    let state = |on| Orders { shutting_down: Some(on), ..Orders::default() };
    let mut orders = state(true);
    orders.merge(kills("a"));
    orders.merge(kills("b"));
    assert_eq!((orders.shutting_down, orders.kills.len()), (Some(true), 2));
    orders.merge(state(false));
    assert_eq!(orders, state(false));
}
