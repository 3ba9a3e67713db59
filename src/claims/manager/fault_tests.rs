//! Both methods of a driver fail in every way, and the agent is killed at each call: each claim is
//! prepared for its pods only, and nothing is left.

use crate::util::lock::LockExt;

use std::sync::atomic::Ordering;

use super::tests::{FakeDriver, Fixture, p, prepare, q, unprepare};
use super::*;

/// What happens to one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// An error; nothing was done.
    Fails,
    /// It was done, and the response is lost.
    LosesResponse,
    /// The driver ends before the call, and comes back.
    Dies,
    /// The agent is killed during the call, which is not carried out.
    KilledBefore,
    /// The agent is killed during the call, which is carried out.
    KilledAfter,
}

const FAULTS: [Fault; 5] =
    [Fault::Fails, Fault::LosesResponse, Fault::Dies, Fault::KilledBefore, Fault::KilledAfter];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Up(usize),
    Down(usize),
}

/// Pod 0 has the claims `one` and `two`, pod 1 has `one`.
const LIFE: [Step; 4] = [Step::Up(0), Step::Up(1), Step::Down(0), Step::Down(1)];

fn run(claims: &ResourceClaims, step: Step) -> bool {
    match step {
        Step::Up(0) => prepare(claims, &p()),
        Step::Up(_) => prepare(claims, &q()),
        Step::Down(0) => unprepare(claims, &p()),
        Step::Down(_) => unprepare(claims, &q()),
    }
    .is_ok()
}

/// The claims that are prepared after a number of steps.
fn prepared_after(steps: usize) -> &'static [&'static str] {
    match steps {
        1 | 2 => &["u1", "u2"],
        3 => &["u1"],
        _ => &[],
    }
}

fn check(driver: &FakeDriver, claims: &ResourceClaims, wanted: &[&str], what: &str) {
    assert_eq!(driver.prepared.locked().iter().map(String::as_str).collect::<Vec<_>>(), wanted, "{what}");
    assert_eq!(claims.list().len(), wanted.len(), "{what}");
}

#[test]
fn each_call_may_fail_and_the_agent_may_be_killed_during_it() {
    let mut count = 0;
    for fault in FAULTS {
        for failing in 0..LIFE.len() {
            for is_given_up in [false, true] {
                let what = format!("{fault:?} at step {failing}, given up: {is_given_up}");
                let fixture = Fixture::new();
                let mut claims = fixture.start();
                for (number, step) in LIFE.into_iter().enumerate() {
                    if number != failing {
                        assert!(run(&claims, step), "{what}");
                        check(&fixture.driver, &claims, prepared_after(number + 1), &what);
                        continue;
                    }
                    fixture.driver.calls();
                    fixture
                        .driver
                        .lost
                        .store(matches!(fault, Fault::LosesResponse | Fault::KilledAfter), Ordering::SeqCst);
                    match fault {
                        Fault::Dies => drop(claims.shared.drivers.locked().remove("d", "/d.sock")),
                        _ => *fixture.driver.fail.locked() = Some("made to fail"),
                    }
                    *fixture.driver.file.locked() = Some(fixture.file());
                    let is_done = run(&claims, step);
                    *fixture.driver.fail.locked() = None;
                    *fixture.driver.file.locked() = None;
                    let at_call = fixture.driver.at_call.locked().take();
                    let is_called = at_call.is_some();
                    match fault {
                        Fault::Dies => {
                            drop(claims);
                            claims = fixture.start();
                        }
                        Fault::KilledBefore | Fault::KilledAfter => {
                            // What the agent did after the call never happened.
                            if let Some(file) = at_call {
                                std::fs::write(fixture.file(), file).unwrap();
                                drop(claims);
                                claims = fixture.start();
                            }
                        }
                        Fault::Fails | Fault::LosesResponse => {}
                    }
                    // The second pod's claim is prepared already: no driver is called.
                    count += usize::from(is_called || !is_done);
                    if is_given_up && let (false, Step::Up(pod)) = (is_done, step) {
                        assert!(run(&claims, Step::Down(pod)), "{what}");
                        check(&fixture.driver, &claims, prepared_after(number), &what);
                    }
                    assert!(run(&claims, step), "{what}");
                    check(&fixture.driver, &claims, prepared_after(number + 1), &what);
                }
                let rest = std::fs::read_to_string(fixture.file()).unwrap();
                assert_eq!(state_file::read(&rest), Ok(vec![]), "{what}");
            }
        }
    }
    assert!(count >= 24, "{count}");
    println!("{count} faults of DRA drivers: nothing prepared twice, nothing lost, nothing left");
}
