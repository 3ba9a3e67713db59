//! The steps of shutdowns, with a fake clock and a fake node.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::json;

use super::Orders;
use super::core::{Action, Core, World};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::pods::plan::shutdown::two_steps;

#[derive(Default)]
struct Fake {
    notified: Cell<bool>,
    /// A source has not delivered its pods.
    silent: Cell<bool>,
    written: Cell<bool>,
    pods: RefCell<Vec<Pod>>,
    ended: RefCell<BTreeSet<PodUid>>,
}

impl World for Fake {
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
struct Bench {
    core: Core,
    fake: Fake,
    start: Instant,
}

impl Bench {
    fn new() -> Self {
        let start = Instant::now();
        let fake = Fake::default();
        fake.pods.replace(vec![pod("n", 0, 30), pod("m", 0, 5), pod("c", 2_000_000_000, 30)]);
        let steps = two_steps(Duration::from_secs(30), Duration::from_secs(10));
        Bench { core: Core::new(steps, start), fake, start }
    }

    fn at(&self, seconds: f64) -> Instant {
        self.start + Duration::from_secs_f64(seconds)
    }

    fn prepare(&mut self, on: bool, seconds: f64) -> Option<Action> {
        self.core.prepare(on, self.at(seconds))
    }

    fn turn(&mut self, seconds: f64) -> Vec<Action> {
        self.core.turn(&self.fake, self.at(seconds))
    }

    fn end(&self, uid: &str) {
        self.fake.ended.borrow_mut().insert(uid.into());
    }

    fn due(&self) -> Option<f64> {
        self.core.due().map(|due| (due - self.start).as_secs_f64())
    }
}

fn kill(pods: &[(&str, i64)]) -> Action {
    Action::Kill(pods.iter().map(|(uid, grace)| ((*uid).into(), *grace)).collect())
}

#[test]
fn groups_are_stopped_in_order_and_then_the_lock_is_released() {
    let mut bench = Bench::new();
    assert_eq!(bench.core.total(), Duration::from_secs(30));
    assert_eq!((bench.turn(0.0), bench.due()), (vec![], None));
    assert_eq!(bench.prepare(true, 1.0), Some(Action::Begin));
    // A repeated signal does not start the shutdown again.
    assert_eq!(bench.prepare(true, 1.0), None);
    assert_eq!((bench.turn(1.0), bench.due()), (vec![], Some(3.0)));
    bench.fake.notified.set(true);
    assert_eq!(bench.turn(1.1), [kill(&[("n", 20), ("m", 5)])]);
    assert_eq!(bench.due(), Some(21.1));
    bench.end("m");
    assert_eq!(bench.turn(2.0), []);
    // The next group is stopped as soon as all pods of this group have ended.
    bench.end("n");
    assert_eq!((bench.turn(3.0), bench.due()), (vec![kill(&[("c", 10)])], Some(13.0)));
    assert_eq!(bench.turn(3.1), []);
    bench.end("c");
    assert_eq!((bench.turn(5.0), bench.due()), (vec![], Some(5.05)));
    assert!(!bench.core.is_over());
    bench.fake.written.set(true);
    assert_eq!((bench.turn(5.05), bench.due()), (vec![Action::Release], None));
    assert!(bench.core.is_over());
    assert_eq!(bench.turn(6.0), []);
}

#[test]
fn no_wait_is_longer_than_its_limit() {
    let mut bench = Bench::new();
    bench.prepare(true, 0.0);
    // `sync` hangs: the pods that were known before are stopped.
    assert_eq!(bench.turn(1.9), []);
    assert_eq!(bench.turn(2.0), [kill(&[("n", 20), ("m", 5)])]);
    bench.end("n");
    assert_eq!(bench.turn(21.9), []);
    assert_eq!(bench.turn(22.0), [Action::Overdue(vec!["m".into()]), kill(&[("c", 10)])]);
    // No time is left to send the statuses to the API server.
    assert_eq!(bench.turn(32.0), [Action::Overdue(vec!["c".into()]), Action::Release]);
}

#[test]
fn pods_that_a_source_delivers_late_get_the_time_of_their_group() {
    let mut bench = Bench::new();
    let all = bench.fake.pods.replace(vec![pod("s", 2_000_000_000, 30)]);
    bench.fake.notified.set(true);
    bench.fake.silent.set(true);
    bench.prepare(true, 0.0);
    // The other source may still deliver its pods.
    assert_eq!((bench.turn(0.0), bench.due()), (vec![], Some(2.0)));
    assert_eq!(bench.turn(2.0), [kill(&[("s", 10)])]);
    bench.end("s");
    assert_eq!((bench.turn(3.0), bench.due()), (vec![], Some(10.0)));
    bench.fake.silent.set(false);
    bench.fake.pods.borrow_mut().extend(all);
    assert_eq!(bench.turn(4.0), [kill(&[("n", 20), ("m", 5)])]);
    bench.end("n");
    bench.end("m");
    assert_eq!(bench.turn(5.0), [kill(&[("c", 10)])]);
    bench.end("c");
    bench.fake.written.set(true);
    assert_eq!(bench.turn(6.0), [Action::Release]);
}

#[test]
fn source_that_never_delivers_does_not_delay_the_shutdown() {
    let mut bench = Bench::new();
    bench.fake.pods.replace(Vec::new());
    bench.fake.notified.set(true);
    bench.fake.written.set(true);
    bench.fake.silent.set(true);
    bench.prepare(true, 0.0);
    assert_eq!((bench.turn(2.0), bench.due()), (vec![], Some(10.0)));
    assert_eq!(bench.turn(9.9), []);
    assert_eq!(bench.turn(10.0), [Action::Release]);
}

#[test]
fn statuses_get_the_time_that_is_left() {
    let mut bench = Bench::new();
    bench.fake.notified.set(true);
    bench.fake.pods.replace(Vec::new());
    bench.prepare(true, 0.0);
    assert_eq!(bench.turn(0.0), []);
    assert_eq!(bench.turn(1.99), []);
    assert_eq!(bench.turn(2.0), [Action::Release]);
}

#[test]
fn cancelled_shutdown_kills_no_more_pods() {
    let mut bench = Bench::new();
    assert_eq!(bench.prepare(false, 0.0), None);
    bench.fake.notified.set(true);
    bench.prepare(true, 0.0);
    assert_eq!(bench.turn(0.0).len(), 1);
    assert_eq!(bench.prepare(false, 1.0), Some(Action::Undo));
    bench.end("n");
    bench.end("m");
    assert_eq!((bench.turn(2.0), bench.due()), (vec![], None));
    // The next shutdown proceeds like the first.
    assert_eq!(bench.prepare(true, 3.0), Some(Action::Begin));
    bench.fake.pods.replace(vec![pod("c", 2_000_000_000, 3)]);
    assert_eq!(bench.turn(3.0), [kill(&[("c", 3)])]);
    bench.end("c");
    bench.fake.written.set(true);
    assert_eq!(bench.turn(4.0), [Action::Release]);
    assert_eq!(bench.prepare(false, 5.0), Some(Action::Undo));
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
