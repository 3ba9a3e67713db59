//! A local user who floods the agent with signals of the message bus.

use std::time::Duration;

use serde_json::json;

use crate::print_line;
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::logind::FakeSystemBus;
use crate::support::node::simple;
use crate::support::wait::wait_until;

/// On a real message bus: the flood begins before the agent and lasts until the machine is down.
#[test]
fn flood_of_bus_signals_does_not_disturb_the_shutdown() {
    let mut node = FakeNode::prepare(json!({"shutdownGracePeriod": "30s"}));
    let mut bus = FakeSystemBus::new(&node.path("dbus"), Duration::from_secs(60));
    bus.start();
    // Signals arrive while the agent waits for a response.
    bus.reply_slowly(Duration::from_millis(300));
    node.set_variable("DBUS_SYSTEM_BUS_ADDRESS", &bus.address());
    let flood = bus.flood();
    wait_until("the flood to begin", LONG, || flood.sent() > 10_000);
    node.start_agent();
    wait_until("the lock to be taken", LONG, || bus.locks() == 1);
    node.apply(&simple("web"));
    node.wait_ready("web");
    let before = flood.sent();
    wait_until("more bytes than all buffers hold", LONG, || flood.sent() > before + 100_000);
    assert_eq!((bus.locks(), bus.received().0), (1, 1), "another lock was needed");
    for (words, what) in [
        ("cannot be watched", "the connection was lost"),
        ("cannot watch", "the connection was lost"),
        ("the machine shuts down", "a stranger was believed"),
    ] {
        assert!(!node.log().contains(words), "{what}");
    }

    bus.prepare(true);
    wait_until("the pod to be stopped", LONG, || node.running("web").is_empty());
    wait_until("the lock to be released", LONG, || bus.locks() == 0);
    print_line(&format!("floods: {} signals", flood.sent()));
    drop(flood);
    bus.prepare(false);
    node.wait_ready("web");
    node.finish();
}
