//! What systemd has received, so that it receives values only if they differ: each request makes it
//! read the unit again and write a file to `/run`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::values::Values;

use crate::util::lock::LockExt;

/// More units than a node has pods. Beyond it everything is forgotten, and sent once more.
const MAX_UNITS: usize = 4096;

/// The last values of each slice of which systemd has accepted the properties. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct SentValues(Arc<Mutex<BTreeMap<String, UnitValues>>>);

#[derive(Debug)]
struct UnitValues {
    wanted: Values,
    /// The values of the files, which are rounded for this version of systemd.
    rounded: Values,
}

impl SentValues {
    /// The rounded values, if systemd has received `wanted` for this unit, and nothing else since.
    pub(super) fn rounded(&self, unit: &str, wanted: &Values) -> Option<Values> {
        self.0.locked().get(unit).filter(|last| last.wanted == *wanted).map(|last| last.rounded.clone())
    }

    /// systemd has accepted these values.
    pub(super) fn accepted(&self, unit: String, wanted: &Values, rounded: &Values) {
        let mut all = self.0.locked();
        if all.len() >= MAX_UNITS && !all.contains_key(&unit) {
            all.clear();
        }
        all.insert(unit, UnitValues { wanted: wanted.clone(), rounded: rounded.clone() });
    }

    /// The unit is started or stopped: what systemd has of it is unknown.
    pub(super) fn forget(&self, unit: &str) {
        self.0.locked().remove(unit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_values_of_a_unit_are_known() {
        let values = |shares| Values { cpu_shares: Some(shares), ..Values::default() };
        let sent = SentValues::default();
        assert_eq!(sent.rounded("a.slice", &values(2)), None);
        sent.accepted("a.slice".to_owned(), &values(2), &values(3));
        assert_eq!(sent.clone().rounded("a.slice", &values(2)), Some(values(3)));
        sent.accepted("a.slice".to_owned(), &values(4), &values(4));
        assert_eq!(sent.rounded("a.slice", &values(2)), None);
        assert_eq!(sent.rounded("b.slice", &values(4)), None);
        sent.forget("a.slice");
        assert_eq!(sent.rounded("a.slice", &values(4)), None);
        for unit in 0..2 * MAX_UNITS {
            sent.accepted(unit.to_string(), &values(1), &values(1));
        }
        assert!(sent.0.locked().len() <= MAX_UNITS);
    }
}
