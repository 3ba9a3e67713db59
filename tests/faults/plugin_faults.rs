//! The fault matrix of plugins: every method of CSI drivers, device plugins and drivers of resource
//! claims that the agent calls, with every fault.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::plugin_node::{CASES, Case, PluginNode};
use crate::support::fake_node::LONG;
use crate::support::fake_plugins::{CarriedOut, FakePlugins, Gate, Misbehavior};
use crate::support::wait::wait_until;
use crate::{in_parallel, print_line};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    FailsTwice,
    /// No response until another pod was started.
    Hangs,
    IsSlow,
    /// It is done, and the caller gets an error of the connection.
    LosesResponse,
    /// The plugin ends in the middle of the call, and registers again. Nothing was done.
    Dies,
    /// As above, but the call was carried out.
    DiesAfterwards,
}

const FAULTS: usize = 6;

/// Less than the shortest deadline, which is that of `GetInfo`.
const SLOW: Duration = Duration::from_millis(600);

fn begin(plugins: &FakePlugins, method: &'static str, fault: Fault) -> Option<Gate> {
    let how = match fault {
        Fault::FailsTwice => Misbehavior::Fails(2),
        Fault::IsSlow => Misbehavior::IsSlow(3, SLOW),
        Fault::LosesResponse => Misbehavior::LosesResponse,
        Fault::Dies => Misbehavior::Dies { is_carried_out: false },
        Fault::DiesAfterwards => Misbehavior::Dies { is_carried_out: true },
        Fault::Hangs => return Some(plugins.hang_next(method, CarriedOut::AfterwardsOnly)),
    };
    plugins.misbehave(method, how);
    None
}

fn run(&(method, stage): &Case, fault: Fault) {
    let (fixture, gate) = PluginNode::approach(stage, |plugins| begin(plugins, method, fault));
    // A call that hangs is counted before it is at its gate.
    wait_until(&format!("{method} to be called"), LONG, || {
        fixture.plugins.count(method).faulty > 0 && gate.as_ref().is_none_or(|gate| gate.waiting() > 0)
    });
    fixture.node.assert_responsive();
    fixture.assert_sound();
    if let Some(gate) = gate {
        fixture.start_other();
        assert!(gate.waiting() > 0, "{method} hangs no more");
        fixture.node.assert_responsive();
        gate.open();
    }
    fixture.complete((method, stage));
}

fn row(fault: Fault) {
    static PASSED: AtomicUsize = AtomicUsize::new(0);
    in_parallel(CASES, |case| run(case, fault));
    let whole = CASES.len() * FAULTS;
    if PASSED.fetch_add(CASES.len(), Ordering::Relaxed) + CASES.len() == whole {
        print_line(&format!(
            "fault matrix: plugins: {} methods x {FAULTS} faults = {whole} runs, all passed",
            CASES.len()
        ));
    }
}

#[test]
fn pods_with_plugins_recover_when_each_method_fails_twice() {
    row(Fault::FailsTwice);
}

#[test]
fn pods_with_plugins_recover_when_each_method_hangs() {
    row(Fault::Hangs);
}

#[test]
fn pods_with_plugins_start_when_each_method_is_slow() {
    row(Fault::IsSlow);
}

#[test]
fn pods_with_plugins_recover_when_each_method_loses_its_response() {
    row(Fault::LosesResponse);
}

#[test]
fn pods_with_plugins_recover_when_the_plugin_dies_in_each_method() {
    row(Fault::Dies);
}

#[test]
fn pods_with_plugins_recover_when_the_plugin_dies_after_each_method() {
    row(Fault::DiesAfterwards);
}
