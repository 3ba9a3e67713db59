//! The resources of the node, and those that pods may use (pure). One calculation for the Node
//! object, for admission and for the runtime's settings.

use std::collections::BTreeMap;

use crate::model::Quantity;
use crate::model::node::{Allocatable, HardThresholds};
use crate::model::quantity::Amount;
use crate::resources::machine::Machine;

type Quantities = BTreeMap<String, Quantity>;

/// The resources that pods may not use.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Reservations {
    cpu_milli: i64,
    memory_bytes: i64,
    ephemeral_bytes: i64,
    memory_threshold: Threshold,
    disk_threshold: Threshold,
}

/// How much must be left before pods are evicted.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
enum Threshold {
    #[default]
    None,
    Bytes(i64),
    Share(f32),
}

impl Reservations {
    /// From `systemReserved`, `kubeReserved`, the number of `reservedSystemCPUs` if any are
    /// set, and `evictionHard` (empty if evictions are to be ignored).
    #[must_use]
    pub fn new(
        system: &BTreeMap<String, String>,
        kube: &BTreeMap<String, String>,
        reserved_cpus: Option<u32>,
        eviction_hard: &BTreeMap<String, String>,
    ) -> Self {
        // Validation has checked that they parse.
        let sum = |resource: &str| -> Amount {
            [system, kube].into_iter().filter_map(|map| Amount::parse(map.get(resource)?).ok()).sum()
        };
        // Each is rounded.
        let reserved_cpu = |map: &BTreeMap<String, String>| {
            map.get("cpu").and_then(|text| Amount::parse(text).ok()).map_or(0, Amount::nearest_milli)
        };
        let both_cpus = || reserved_cpu(system).saturating_add(reserved_cpu(kube));
        Reservations {
            // Reserved whole CPUs replace both shares.
            cpu_milli: reserved_cpus.map_or_else(both_cpus, |cpus| i64::from(cpus) * 1000),
            memory_bytes: sum("memory").units(),
            ephemeral_bytes: sum("ephemeral-storage").units(),
            memory_threshold: Threshold::parse(eviction_hard.get("memory.available")),
            disk_threshold: Threshold::parse(eviction_hard.get("nodefs.available")),
        }
    }
}

impl Threshold {
    fn parse(text: Option<&String>) -> Self {
        let Some(text) = text else { return Threshold::None };
        if let Some(percent) = text.strip_suffix('%') {
            return percent.parse().map_or(Threshold::None, |percent: f32| Threshold::Share(percent / 100.0));
        }
        Amount::parse(text).map_or(Threshold::None, |amount| Threshold::Bytes(amount.units()))
    }

    fn resolve(self, capacity: i64) -> i64 {
        match self {
            Threshold::None => 0,
            Threshold::Bytes(bytes) => bytes,
            // Rounded exactly as upstream, so that the Node object does not change when
            // one agent replaces the other.
            Threshold::Share(share) => (capacity as f64 * f64::from(share)) as i64,
        }
    }
}

impl Reservations {
    /// The thresholds for these capacities.
    #[must_use]
    pub fn thresholds(&self, memory_bytes: i64, disk_bytes: i64) -> HardThresholds {
        HardThresholds {
            memory_bytes: self.memory_threshold.resolve(memory_bytes),
            disk_bytes: self.disk_threshold.resolve(disk_bytes),
        }
    }
}

/// All resources of the machine. `disk_bytes`: size of the file system of the root directory.
#[must_use]
pub fn capacity(
    machine: &Machine,
    disk_bytes: Option<u64>,
    max_pods: i32,
    pods_per_core: i32,
) -> Allocatable {
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let cpus = i64::from(machine.cpus);
    let most = i64::from(max_pods);
    Allocatable {
        cpu_milli: cpus * 1000,
        memory_bytes: signed(machine.memory_bytes),
        ephemeral_bytes: disk_bytes.map_or(i64::MAX, signed),
        pods: if pods_per_core > 0 { most.min(cpus * i64::from(pods_per_core)) } else { most },
        extended: machine
            .huge_pages
            .iter()
            .map(|pages| (pages.resource_name(), signed(pages.size_bytes.saturating_mul(pages.total))))
            .collect(),
    }
}

/// The resources that remain for pods.
#[must_use]
pub fn allocatable(capacity: &Allocatable, reserved: &Reservations) -> Allocatable {
    let remaining =
        |all: i64, taken: &[i64]| taken.iter().fold(all, |rest, taken| rest.saturating_sub(*taken)).max(0);
    let is_huge_pages = |name: &str| name.starts_with(HUGE_PAGES);
    let huge_pages: i64 = capacity
        .extended
        .iter()
        .filter(|(name, _)| is_huge_pages(name))
        .fold(0, |sum: i64, (_, bytes)| sum.saturating_add(*bytes));
    Allocatable {
        cpu_milli: remaining(capacity.cpu_milli, &[reserved.cpu_milli]),
        memory_bytes: remaining(
            capacity.memory_bytes,
            &[reserved.memory_bytes, reserved.memory_threshold.resolve(capacity.memory_bytes), huge_pages],
        ),
        ephemeral_bytes: match capacity.ephemeral_bytes {
            i64::MAX => i64::MAX,
            all => remaining(all, &[reserved.ephemeral_bytes, reserved.disk_threshold.resolve(all)]),
        },
        pods: capacity.pods,
        extended: capacity.extended.clone(),
    }
}

/// Prefix of the resources that are huge pages.
pub(super) const HUGE_PAGES: &str = "hugepages-";

/// The quantities of the Node object.
pub(super) fn quantities(resources: &Allocatable) -> Quantities {
    let mut all = Quantities::from([
        ("cpu".to_owned(), Quantity(milli_text(resources.cpu_milli))),
        ("memory".to_owned(), Quantity(binary_text(resources.memory_bytes))),
        ("pods".to_owned(), Quantity(decimal_text(resources.pods))),
    ]);
    if resources.ephemeral_bytes != i64::MAX {
        all.insert("ephemeral-storage".to_owned(), Quantity(decimal_text(resources.ephemeral_bytes)));
    }
    for (name, amount) in &resources.extended {
        let text = if name.starts_with(HUGE_PAGES) { binary_text(*amount) } else { decimal_text(*amount) };
        all.insert(name.clone(), Quantity(text));
    }
    all
}

/// The values of the Node object; missing ones are those of `own`.
pub(super) fn from_quantities(quantities: &Quantities, own: &Allocatable) -> Allocatable {
    let amount = |name: &str| Amount::parse(&quantities.get(name)?.0).ok();
    let mut resources = own.clone();
    for (name, quantity) in quantities {
        let Ok(amount) = Amount::parse(&quantity.0) else { continue };
        if !["cpu", "memory", "pods", "ephemeral-storage"].contains(&name.as_str()) {
            resources.extended.insert(name.clone(), amount.units());
        }
    }
    Allocatable {
        cpu_milli: amount("cpu").map_or(own.cpu_milli, Amount::milli),
        memory_bytes: amount("memory").map_or(own.memory_bytes, Amount::units),
        ephemeral_bytes: amount("ephemeral-storage").map_or(own.ephemeral_bytes, Amount::units),
        pods: amount("pods").map_or(own.pods, Amount::units),
        ..resources
    }
}

/// Formats a value in the largest unit in which it is a whole number, as the API server does.
fn scaled(mut value: i64, step: i64, units: [&str; 7]) -> String {
    let mut unit = 0;
    while value != 0 && value % step == 0 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    format!("{value}{}", units.get(unit).copied().unwrap_or_default())
}

fn decimal_text(value: i64) -> String {
    scaled(value, 1000, ["", "k", "M", "G", "T", "P", "E"])
}

fn binary_text(value: i64) -> String {
    // Below one Ki a number is never binary.
    if value.unsigned_abs() < 1024 {
        return decimal_text(value);
    }
    scaled(value, 1024, ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"])
}

fn milli_text(milli: i64) -> String {
    if milli % 1000 == 0 { decimal_text(milli / 1000) } else { format!("{milli}m") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::machine::HugePages;

    fn machine() -> Machine {
        Machine {
            memory_bytes: 8 << 30,
            cpus: 4,
            huge_pages: vec![
                HugePages { size_bytes: 2 << 20, total: 512 },
                HugePages { size_bytes: 1 << 30, total: 0 },
            ],
            has_swap: false,
            swap_bytes: 0,
            kernel: "6.1".to_owned(),
        }
    }

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn texts(resources: &Allocatable) -> Vec<(String, String)> {
        quantities(resources).into_iter().map(|(name, quantity)| (name, quantity.0)).collect()
    }

    fn check(
        system: &[(&str, &str)],
        kube: &[(&str, &str)],
        cpus: Option<u32>,
        eviction: &[(&str, &str)],
        cpu_memory_disk: [&str; 3],
    ) {
        // The size of a real disk, on which upstream's rounding is known.
        let capacity = capacity(&machine(), Some(101_430_960 << 10), 110, 0);
        let reserved = Reservations::new(&map(system), &map(kube), cpus, &map(eviction));
        let found = quantities(&allocatable(&capacity, &reserved));
        let found = ["cpu", "memory", "ephemeral-storage"].map(|name| found[name].0.clone());
        assert_eq!(found, cpu_memory_disk, "{system:?} {kube:?} {cpus:?} {eviction:?}");
    }

    #[test]
    fn reserved_resources_are_subtracted() {
        // Huge pages are never ordinary memory.
        check(&[], &[], None, &[], ["4", "7Gi", "103865303040"]);
        check(
            &[],
            &[],
            None,
            &[("memory.available", "100Mi"), ("nodefs.available", "10%"), ("imagefs.available", "15%")],
            ["4", "7068Mi", "93478772582"],
        );
        check(
            &[("cpu", "100m"), ("memory", "1Gi")],
            &[("cpu", "0.2"), ("ephemeral-storage", "960Ki"), ("pid", "5")],
            None,
            &[],
            ["3700m", "6Gi", "103864320k"],
        );
        check(&[("cpu", "100m")], &[("cpu", "200m")], Some(1), &[], ["3", "7Gi", "103865303040"]);
        // Each share is rounded to the nearest thousandth.
        check(&[("cpu", "100400u")], &[("cpu", "200400u")], None, &[], ["3700m", "7Gi", "103865303040"]);
        check(&[("cpu", "100500u")], &[("cpu", "200500u")], None, &[], ["3698m", "7Gi", "103865303040"]);
        check(&[("cpu", "64"), ("memory", "1Ti")], &[], None, &[], ["0", "0", "103865303040"]);
        check(&[("cpu", "x")], &[], None, &[("nodefs.available", "x%")], ["4", "7Gi", "103865303040"]);
    }

    #[test]
    fn number_of_pods_is_limited_by_the_maximum_and_by_cores() {
        for (max, per_core, pods) in [(110, 0, "110"), (110, 10, "40"), (20, 10, "20"), (1000, 0, "1k")] {
            assert_eq!(quantities(&capacity(&machine(), None, max, per_core))["pods"].0, pods);
        }
    }

    #[test]
    fn quantities_convert_in_both_directions() {
        let all = capacity(&machine(), Some(1000), 110, 0);
        let written = texts(&all);
        let expected = [
            ("cpu", "4"),
            ("ephemeral-storage", "1k"),
            ("hugepages-1Gi", "0"),
            ("hugepages-2Mi", "1Gi"),
            ("memory", "8Gi"),
            ("pods", "110"),
        ];
        assert_eq!(written, expected.map(|(name, text)| (name.to_owned(), text.to_owned())));
        assert_eq!(from_quantities(&quantities(&all), &Allocatable::default()), all);
        // Missing values are our own, and an unknown disk is not written.
        let unknown = capacity(&machine(), None, 110, 0);
        assert_eq!(from_quantities(&Quantities::new(), &unknown), unknown);
        assert!(!quantities(&unknown).contains_key("ephemeral-storage"));
        assert_eq!(allocatable(&unknown, &Reservations::default()).ephemeral_bytes, i64::MAX);
    }
}
