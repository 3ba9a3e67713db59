//! A machine whose clock is wrong while it is alone: without a battery, or after a mistake of a time server.

use super::*;

const DAY: i64 = 24 * 3600;

/// Waits until a new static pod runs, which is a turn of the agent after the changes of before.
fn run_static_pod(node: &FakeNode, name: &str) {
    node.apply(&simple(name));
    node.wait_ready(name);
}

/// The machine starts with a wrong time, gets the right one, loses it again, and comes back with it.
#[test]
fn wrong_and_changed_clocks_stop_no_pod_without_the_server_and_at_its_return() {
    for (name, ahead) in [("fifty years back", -18_262 * DAY), ("ten years ahead", 3653 * DAY)] {
        let mut node = prepared(json!({}));
        node.use_own_clock();
        let mut node = node.start_joined();
        run_pods(&node, &["web"]);
        wait_stored(&node, 1);
        wait_until("the bound of the time to be stored", LONG, || node.root().join("offline/clock").exists());

        node.api().go_down();
        node.stop_agent();
        node.cut_power();
        node.set_clock(ahead);
        node.start_agent();
        wait_phase(&node, "alone");
        node.wait_ready("web");
        assert_eq!(read(&volume(&node, "web", "secret", "login/pw")), CANARY[0], "{name}");
        assert!(read(&volume(&node, "web", "projected", "token/token")).starts_with(TOKEN[0]), "{name}");
        let running = node.running("web");
        let problems = status(&node)["problems"].to_string();
        assert_eq!(problems.contains("the clock of this machine is behind"), ahead < 0, "{name}: {problems}");
        for (pod, ahead) in [("right", 0), ("wrong", ahead)] {
            node.set_clock(ahead);
            run_static_pod(&node, pod);
            assert_eq!(node.running("web"), running, "{name}, then {pod}");
        }
        assert_eq!(status(&node)["offline"]["phase"], "alone", "{name}");

        node.api().go_up();
        wait_phase(&node, "online");
        wait_until("the status to be reported", LONG, || {
            let shown = node.shown("web");
            shown.is_some_and(|pod| is_ready(&pod) && running["main"] == [container_id(&pod, "main")])
        });
        node.set_clock(0);
        node.bind(&simple("late"));
        node.wait_ready("late");
        assert_eq!(node.running("web"), running, "{name}: no container restarts");
        node.finish();
    }
}
