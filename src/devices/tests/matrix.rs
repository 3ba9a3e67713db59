//! Every method of a plugin fails in every way, and the agent is killed during each call: no device
//! belongs to two pods, none is lost, and none is left.

use std::path::Path;
use std::time::{Duration, Instant};

use super::super::testing::{FakePlugin, Fault};
use super::faults::{Fixture, LONG, open, state_file};
use super::*;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Stack};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// The work is done, and the response is lost.
    LosesResponse,
    Hangs,
    IsSlow,
    /// The plugin ends during the call, and comes back.
    Dies,
    /// The agent is killed during the call.
    AgentIsKilled,
}

const FAILURES: [Failure; 5] =
    [Failure::LosesResponse, Failure::Hangs, Failure::IsSlow, Failure::Dies, Failure::AgentIsKilled];
/// A plugin that is not asked for its devices in this time has failed.
const PATIENCE: Duration = Duration::from_secs(4);

const METHODS: [&str; 5] = ["Options", "ListAndWatch", "Preferred", "Allocate", "PreStart"];

/// Whether the devices of a registered plugin may be allocated.
fn is_usable(devices: &Devices) -> bool {
    devices.capacity().allocatable.get(WIDGET).is_some_and(|count| *count > 0)
}

/// Waits until a condition is met, or returns false after `LONG`.
fn wait_until(condition: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    while !condition() {
        if begun.elapsed() > LONG {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// Registers the plugin, unless it is, and allocates the pod's devices, unless it has them.
fn start(devices: &Devices, plugin: &FakePlugin, pod: &PodRequest) -> Result<Vec<String>, String> {
    if !is_usable(devices) {
        let name = plugin.socket.file_name().unwrap().to_str().unwrap();
        plugin.forget_streams();
        devices.register("v1beta1", name, WIDGET)?;
        plugin.list_if_watched(&four(), PATIENCE)?;
        if !wait_until(|| is_usable(devices)) {
            return Err("the devices of the plugin are not there".to_owned());
        }
    }
    if devices.read(|state| held(state, pod.uid.as_str(), "main")).is_empty() {
        devices.reserve(pod, "main", None, false).map_err(|error| error.to_string())?;
        devices.allocate(pod, &StopToken::never()).map_err(|error| error.to_string())?;
    }
    let setup = devices.prepare(pod, "main", true, &StopToken::never()).map_err(|error| error.to_string())?;
    let ids = &setup.ok_or("the container has no devices")?.envs["WIDGETS"];
    Ok(ids.split(',').map(str::to_owned).collect())
}

/// Two pods get all devices, a third one gets none, and when the pods are gone all devices are free.
fn check(directory: &Path, fixture: &Fixture, plugin: &FakePlugin, what: &str) {
    let devices = &fixture.devices;
    let mut all =
        start(devices, plugin, &simple_pod("p", 2)).unwrap_or_else(|error| panic!("{what}: {error}"));
    all.extend(start(devices, plugin, &simple_pod("q", 2)).unwrap_or_else(|error| panic!("{what}: {error}")));
    all.sort();
    assert_eq!(all, ["d1", "d2", "d3", "d4"], "{what}");
    let error = start(devices, plugin, &simple_pod("r", 1)).unwrap_err();
    assert!(error.starts_with("requested number of devices unavailable"), "{what}: {error}");
    devices.release_inactive(&|_| false);
    assert!(!state_file(directory).contains("\"PodUID\""), "{what}: {}", state_file(directory));
    assert_eq!(start(devices, plugin, &simple_pod("s", 4)).map(|ids| ids.len()), Ok(4), "{what}");
}

fn wait_for_call(plugin: &FakePlugin, method: &str) -> bool {
    wait_until(|| plugin.calls().iter().any(|call| call.split(' ').next() == Some(method)))
}

#[test]
fn each_method_may_fail_and_the_agent_may_be_killed_during_each_call() {
    let mut count = 0;
    for method in METHODS {
        for failure in FAILURES {
            let what = format!("{method} {failure:?}");
            let directory = tempfile::tempdir().unwrap();
            let mut plugin = FakePlugin::start(directory.path(), "widget.sock", ALL_OPTIONS);
            let mut fixture = open(directory.path());
            let fault = match failure {
                Failure::LosesResponse => Fault::Fail,
                Failure::Hangs | Failure::Dies | Failure::AgentIsKilled => Fault::Hang,
                Failure::IsSlow => Fault::Slow(Duration::from_millis(20)),
            };
            plugin.fault(method, Some(fault));
            if matches!(failure, Failure::Dies | Failure::AgentIsKilled) {
                let (devices, next) = (fixture.devices.clone(), plugin.handle());
                let running = threads::spawn("t/start", Stack::Large, OnDeath::Unsupervised, move |_| {
                    let _ = start(&devices, &next, &simple_pod("p", 2));
                })
                .unwrap();
                assert!(wait_for_call(&plugin, method), "{what}");
                if failure == Failure::Dies {
                    plugin.die();
                    drop(running);
                    // Else a container could start with what the dead plugin has said.
                    assert!(wait_until(|| !is_usable(&fixture.devices)), "{what}");
                    plugin = FakePlugin::start(directory.path(), "next.sock", ALL_OPTIONS);
                } else {
                    // What the agent does after the call never happens.
                    let file = directory.path().join(CHECKPOINT);
                    let at_call = std::fs::read(&file).ok();
                    drop(fixture);
                    drop(running);
                    match at_call {
                        Some(content) => std::fs::write(&file, content).unwrap(),
                        None => drop(std::fs::remove_file(&file)),
                    }
                    fixture = open(directory.path());
                }
            } else {
                let started = start(&fixture.devices, &plugin, &simple_pod("p", 2));
                assert_eq!(started.is_ok(), failure == Failure::IsSlow, "{what}: {started:?}");
            }
            plugin.fault(method, None);
            check(directory.path(), &fixture, &plugin, &what);
            count += 1;
        }
    }
    println!("{count} faults of device plugins: no device used twice, none lost, none left");
}
