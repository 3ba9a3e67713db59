//! When the node's ResourceSlices are deleted, so that the scheduler places no pods that would wait
//! for a driver that is gone (pure; Go: pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The time that a driver has to come back.
const DELAY: Duration = Duration::from_secs(30);
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(300);
const JITTER: f64 = 0.2;
const MAX_TRIES: u32 = 100;

/// Which slices of the node: those of one driver, or all.
pub type Slices = Option<String>;

#[derive(Debug, Clone, Copy)]
struct Pending {
    due: Instant,
    wait: Duration,
    tries: u32,
}

/// The deletions to come.
#[derive(Debug, Default)]
pub struct Wipes {
    pending: BTreeMap<Slices, Pending>,
}

impl Wipes {
    /// At the agent's start no driver has registered: all slices of the node are deleted.
    #[must_use]
    pub fn at_start(now: Instant) -> Wipes {
        let mut wipes = Wipes::default();
        wipes.add(None, now);
        wipes
    }

    /// The driver can be called again.
    pub fn usable(&mut self, driver: &str) {
        self.pending.remove(&Some(driver.to_owned()));
    }

    /// The last instance of the driver is gone. An earlier loss counts.
    pub fn lost(&mut self, driver: &str, now: Instant) {
        self.add(Some(driver.to_owned()), now + DELAY);
    }

    fn add(&mut self, slices: Slices, due: Instant) {
        self.pending.entry(slices).or_insert(Pending { due, wait: FIRST_RETRY, tries: 0 });
    }

    /// When the next deletion is due.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        self.pending.values().map(|pending| pending.due).min()
    }

    /// The slices to delete now.
    #[must_use]
    pub fn due(&self, now: Instant) -> Vec<Slices> {
        let due = self.pending.iter().filter(|(_, pending)| pending.due <= now);
        due.map(|(slices, _)| slices.clone()).collect()
    }

    /// The slices are deleted.
    pub fn done(&mut self, slices: &Slices) {
        self.pending.remove(slices);
    }

    /// The deletion failed. `random` is in 0 to 1.
    pub fn failed(&mut self, slices: &Slices, now: Instant, random: f64) {
        let Some(pending) = self.pending.get_mut(slices) else { return };
        pending.tries += 1;
        if pending.tries >= MAX_TRIES {
            self.pending.remove(slices);
            return;
        }
        pending.due = now + pending.wait.mul_f64(1.0 + JITTER * random);
        pending.wait = (pending.wait * 2).min(LAST_RETRY);
    }
}

/// The field selector of a request that deletes these slices of a node.
#[must_use]
pub fn selector(node: &str, slices: &Slices) -> String {
    match slices {
        Some(driver) => format!("spec.driver={},spec.nodeName={}", escaped(driver), escaped(node)),
        None => format!("spec.nodeName={}", escaped(node)),
    }
}

/// Kubernetes: apimachinery/pkg/fields `EscapeValue`.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace(',', "\\,").replace('=', "\\=")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slices(driver: &str) -> Slices {
        Some(driver.to_owned())
    }

    #[test]
    fn slices_are_deleted_at_the_start_and_30_s_after_a_loss() {
        let start = Instant::now();
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        let mut wipes = Wipes::at_start(start);
        assert_eq!(wipes.due(start), [None]);
        wipes.done(&None);
        assert_eq!(wipes.next(), None);
        wipes.lost("a", after(0));
        wipes.lost("a", after(20));
        wipes.lost("b", after(5));
        assert_eq!(wipes.next(), Some(after(30)));
        wipes.usable("b");
        assert!(wipes.due(after(29)).is_empty());
        assert_eq!(wipes.due(after(60)), [slices("a")]);
    }

    #[test]
    fn failed_deletions_are_repeated_up_to_a_limit() {
        let start = Instant::now();
        let mut wipes = Wipes::at_start(start);
        let mut waits = Vec::new();
        while wipes.next().is_some() {
            wipes.failed(&None, start, 0.0);
            waits.extend(wipes.next().map(|due| (due - start).as_secs()));
        }
        assert_eq!(waits[..10], [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
        assert_eq!(waits.len(), 99);
        let mut wipes = Wipes::at_start(start);
        wipes.failed(&None, start, 1.0);
        assert_eq!(wipes.next(), Some(start + Duration::from_millis(1200)));
    }

    #[test]
    fn the_selector_names_node_and_driver() {
        assert_eq!(selector("n1", &None), "spec.nodeName=n1");
        assert_eq!(
            selector("n1", &slices("gpu.example.com")),
            "spec.driver=gpu.example.com,spec.nodeName=n1"
        );
        assert_eq!(selector("n1", &slices("a,b=c")), "spec.driver=a\\,b\\=c,spec.nodeName=n1");
    }
}
