//! SIGKILL of the agent in every call of a plugin: the next agent reads the state, and completes the
//! step; nothing is done twice and nothing is left.

use crate::plugin_node::{CASES, Case, PluginNode};
use crate::support::fake_node::LONG;
use crate::support::fake_plugins::CarriedOut;
use crate::support::wait::wait_until;
use crate::{in_parallel, print_line};

fn run(&(method, stage): &Case, carried_out: CarriedOut) {
    let (mut fixture, gate) = PluginNode::approach(stage, |plugins| plugins.hang_next(method, carried_out));
    wait_until(&format!("{method} to be called"), LONG, || gate.waiting() > 0);
    fixture.assert_sound();
    fixture.node.kill_agent();
    fixture.plugins.next_life();
    if carried_out != CarriedOut::AfterwardsOnly {
        gate.open();
    }
    fixture.node.start_agent();
    // The plugin carries the call of the killed agent out while the next agent works.
    gate.open();
    fixture.complete((method, stage));
}

fn kill(carried_out: CarriedOut, when: &str) {
    in_parallel(CASES, |case| run(case, carried_out));
    print_line(&format!(
        "kills: plugins: {} calls of registration, start, use and end; the call is {when}; all passed",
        CASES.len()
    ));
}

#[test]
fn agent_killed_in_each_call_of_a_plugin_recovers_when_the_call_is_not_carried_out() {
    kill(CarriedOut::Never, "not carried out");
}

#[test]
fn agent_killed_in_each_call_of_a_plugin_recovers_when_the_call_was_carried_out() {
    kill(CarriedOut::BeforeItHangs, "carried out before the kill");
}

#[test]
fn agent_killed_in_each_call_of_a_plugin_recovers_when_the_call_is_carried_out_after_the_restart() {
    kill(CarriedOut::AfterwardsOnly, "carried out after the restart");
}
