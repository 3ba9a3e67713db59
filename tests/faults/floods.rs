//! A user of the machine who sends the agent more than it ever needs.

use std::time::Duration;

use serde_json::json;

use crate::support::logind::Machine;
use crate::support::node::simple;
use crate::support::solo::{LONG, Solo};
use crate::support::wait::wait_until;
use crate::tell;

/// On a real message bus: the flood begins before the agent and goes on until the machine is down.
#[test]
fn signals_of_strangers_cost_neither_the_lock_nor_the_shutdown() {
    let mut solo = Solo::prepare(json!({"shutdownGracePeriod": "30s"}));
    let mut machine = Machine::new(&solo.path("dbus"), Duration::from_secs(60));
    machine.start();
    // Signals come while an answer is waited for.
    machine.answer_slowly(Duration::from_millis(300));
    solo.set_variable("DBUS_SYSTEM_BUS_ADDRESS", &machine.address());
    let flood = machine.flood();
    wait_until("the flood to begin", LONG, || flood.sent() > 10_000);
    solo.start_agent();
    wait_until("the lock to be taken", LONG, || machine.locks() == 1);
    solo.apply(&simple("web"));
    solo.wait_ready("web");
    let before = flood.sent();
    wait_until("more than any queue holds", LONG, || flood.sent() > before + 100_000);
    assert_eq!((machine.locks(), machine.asked().0), (1, 1), "another lock was needed");
    for (words, what) in [
        ("cannot be watched", "the connection was lost"),
        ("cannot watch", "the connection was lost"),
        ("the machine shuts down", "a stranger was believed"),
    ] {
        assert!(!solo.log().contains(words), "{what}");
    }

    machine.prepare(true);
    wait_until("the pod to be stopped", LONG, || solo.running("web").is_empty());
    wait_until("the lock to be released", LONG, || machine.locks() == 0);
    tell(&format!("floods: {} signals", flood.sent()));
    drop(flood);
    machine.prepare(false);
    solo.wait_ready("web");
    solo.finish();
}
