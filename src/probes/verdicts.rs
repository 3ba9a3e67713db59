//! The verdicts on one container instance, one per kind of probe. The thread of a probe writes
//! its own; any thread reads them.

use std::sync::atomic::{AtomicU8, Ordering};

use super::state::Kind;
use crate::model::verdict::ProbeVerdict;

/// In the order of their numbers.
const VERDICTS: [ProbeVerdict; 5] = [
    ProbeVerdict::NoProbe,
    ProbeVerdict::Pending,
    ProbeVerdict::Assumed,
    ProbeVerdict::Success,
    ProbeVerdict::Failure,
];

/// By [`Kind`].
#[derive(Debug)]
pub(super) struct Verdicts([AtomicU8; 3]);

impl Verdicts {
    pub(super) fn new(first: impl Fn(Kind) -> ProbeVerdict) -> Verdicts {
        Verdicts(Kind::ALL.map(|kind| AtomicU8::new(first(kind) as u8)))
    }

    pub(super) fn get(&self, kind: Kind) -> ProbeVerdict {
        let number = self.0.get(kind as usize).map_or(0, |cell| cell.load(Ordering::Acquire));
        VERDICTS.get(usize::from(number)).copied().unwrap_or_default()
    }

    pub(super) fn set(&self, kind: Kind, verdict: ProbeVerdict) {
        if let Some(cell) = self.0.get(kind as usize) {
            cell.store(verdict as u8, Ordering::Release);
        }
    }

    /// Whether the startup probe, if there is one, lets the other two run.
    pub(super) fn has_started(&self) -> bool {
        self.get(Kind::Startup).allows_other_probes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_keep_their_kind_and_value() {
        for (number, verdict) in VERDICTS.into_iter().enumerate() {
            assert_eq!(verdict as usize, number);
            for kind in Kind::ALL {
                let verdicts = Verdicts::new(|_| ProbeVerdict::NoProbe);
                verdicts.set(kind, verdict);
                let expected =
                    Kind::ALL.map(|other| if other == kind { verdict } else { ProbeVerdict::NoProbe });
                assert_eq!(Kind::ALL.map(|other| verdicts.get(other)), expected);
                let blocks = kind == Kind::Startup && !verdict.allows_other_probes();
                assert_eq!(verdicts.has_started(), !blocks);
            }
        }
    }
}
