//! Cgroups as slices of systemd: their properties (pure; github.com/opencontainers/cgroups systemd).

use super::names::Name;
use super::values::{Quota, Values, cpus, rounded_for_systemd};
use crate::model::cpu_shares::weight;
use crate::transport::dbus::wire::Value;
use crate::util::cgroup_mounts::Version;

/// From this version on, the period of a quota can be set.
const HAS_PERIOD: u32 = 242;
/// From this version on, CPUs can be set.
const HAS_CPUS: u32 = 244;
/// systemd's "infinity".
const INFINITY: u64 = u64::MAX;

/// A property of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Property {
    /// Its name in systemd's D-Bus interface.
    pub name: &'static str,
    /// Its value.
    pub value: Value,
}

fn property(name: &'static str, value: Value) -> Property {
    Property { name, value }
}

/// The number of systemd's property `Version`: `v245.4-1.fc32` is 245; 0 if there is none.
#[must_use]
pub fn systemd_version(text: &str) -> u32 {
    let text = text.trim_start_matches(['"', 'v']);
    let digits = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    text.get(..digits).and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// The properties with which the slice of `name` is started.
#[must_use]
pub fn new_slice_properties(name: &Name, version: Version) -> Vec<Property> {
    let parent = Value::Text(name.parent().slice());
    let disks = match version {
        Version::V1 => "BlockIOAccounting",
        Version::V2 => "IOAccounting",
    };
    let accounting = ["MemoryAccounting", "CPUAccounting", disks, "TasksAccounting"];
    let mut all = vec![
        property("Description", Value::Text(format!("cgroup {name} of Kubernetes pods"))),
        // The parent of a slice follows from its name.
        property("Wants", Value::Array("s", vec![parent])),
    ];
    all.extend(accounting.map(|name| property(name, Value::Bool(true))));
    all.push(property("DefaultDependencies", Value::Bool(false)));
    all
}

/// The properties of values, and the values for the files, in which the quota is rounded as systemd
/// rounds it. Without the properties, systemd would write its own values back when it reloads.
#[must_use]
pub fn properties(values: &Values, version: Version, systemd: u32) -> (Vec<Property>, Values) {
    let v2 = version == Version::V2;
    let mut all = Vec::new();
    let mut long = |name: &'static str, number: u64| all.push(property(name, Value::Long(number)));
    // Negative: no limit.
    let limit = |number: i64| u64::try_from(number).unwrap_or(INFINITY);
    if let Some(bytes) = values.memory_bytes.filter(|bytes| *bytes != 0) {
        long(if v2 { "MemoryMax" } else { "MemoryLimit" }, limit(bytes));
    }
    match values.cpu_shares {
        Some(shares) if v2 => long("CPUWeight", weight(shares)),
        Some(shares) => long("CPUShares", shares),
        None => {}
    }
    let mut rounded: Option<Quota> = None;
    if let Some(quota) = values.cpu_quota {
        if systemd >= HAS_PERIOD {
            long("CPUQuotaPeriodUSec", quota.period);
        }
        let (per_second, quota) = rounded_for_systemd(quota);
        long("CPUQuotaPerSecUSec", per_second);
        rounded = Some(quota);
    }
    if let Some(pids) = values.pids {
        long("TasksMax", limit(pids).max(1));
    }
    if v2 {
        let protected = [("MemoryMin", values.memory_min), ("MemoryLow", values.memory_low)];
        for (name, bytes) in protected.into_iter().filter_map(|(name, bytes)| Some((name, bytes?))) {
            long(name, u64::try_from(bytes).unwrap_or(0));
        }
        if let Some(bytes) = values.memory_high {
            long("MemoryHigh", limit(bytes));
        }
    }
    if let Some(list) =
        values.cpus.as_deref().and_then(cpus).filter(|list| !list.is_empty() && systemd >= HAS_CPUS)
    {
        let bits = bits(&list).into_iter().map(Value::Byte).collect();
        all.push(property("AllowedCPUs", Value::Array("y", bits)));
    }
    (all, Values { cpu_quota: rounded, ..values.clone() })
}

/// A bit per CPU, the lowest in the first byte.
fn bits(cpus: &[u16]) -> Vec<u8> {
    let mut bytes = vec![0_u8; cpus.iter().max().map_or(0, |last| usize::from(last / 8) + 1)];
    for cpu in cpus {
        if let Some(byte) = bytes.get_mut(usize::from(cpu / 8)) {
            *byte |= 1 << (cpu % 8);
        }
    }
    bytes
}

/// Properties as an argument of a call: `a(sv)`.
pub(super) fn argument(properties: &[Property]) -> Value {
    let pair = |property: &Property| {
        Value::Struct(vec![
            Value::Text(property.name.to_owned()),
            Value::Variant(Box::new(property.value.clone())),
        ])
    };
    Value::Array("(sv)", properties.iter().map(pair).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values() -> Values {
        Values {
            cpu_shares: Some(512),
            cpu_quota: Some(Quota { microseconds: Some(12_300), period: 100_000 }),
            memory_bytes: Some(100 << 20),
            pids: Some(128),
            cpus: Some("0-1,9".to_owned()),
            memory_min: Some(5),
            memory_high: Some(7),
            ..Values::default()
        }
    }

    fn check(values: &Values, version: Version, systemd: u32, expected: &[(&str, u64)]) -> Values {
        let (found, files) = properties(values, version, systemd);
        let numbers: Vec<(&str, u64)> = found
            .iter()
            .map(|property| match &property.value {
                Value::Long(number) => (property.name, *number),
                Value::Array("y", bytes) => (property.name, bytes.len() as u64),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(numbers, expected);
        files
    }

    #[test]
    fn properties_depend_on_both_versions() {
        let v2 = [
            ("MemoryMax", 100 << 20),
            ("CPUWeight", 20),
            ("CPUQuotaPeriodUSec", 100_000),
            ("CPUQuotaPerSecUSec", 130_000),
            ("TasksMax", 128),
            ("MemoryMin", 5),
            ("MemoryHigh", 7),
            ("AllowedCPUs", 2),
        ];
        let files = check(&values(), Version::V2, 252, &v2);
        let rounded = Some(Quota { microseconds: Some(13_000), period: 100_000 });
        assert_eq!(files, Values { cpu_quota: rounded, ..values() });
        let without = |names: &[&str]| -> Vec<(&str, u64)> {
            v2.into_iter().filter(|(name, _)| !names.contains(name)).collect()
        };
        check(&values(), Version::V2, 243, &without(&["AllowedCPUs"]));
        check(&values(), Version::V2, 241, &without(&["AllowedCPUs", "CPUQuotaPeriodUSec"]));
        let v1 = [
            ("MemoryLimit", 100 << 20),
            ("CPUShares", 512),
            ("CPUQuotaPerSecUSec", 130_000),
            ("TasksMax", 128),
        ];
        check(&values(), Version::V1, 0, &v1);
        let free = Values {
            cpu_quota: Some(Quota { microseconds: None, period: 100_000 }),
            memory_bytes: Some(-1),
            pids: Some(-1),
            memory_high: Some(-1),
            ..Values::default()
        };
        let infinite = [
            ("MemoryMax", INFINITY),
            ("CPUQuotaPerSecUSec", INFINITY),
            ("TasksMax", INFINITY),
            ("MemoryHigh", INFINITY),
        ];
        check(&free, Version::V2, 0, &infinite);
        let zero =
            Values { memory_bytes: Some(0), pids: Some(0), cpus: Some(String::new()), ..Values::default() };
        check(&zero, Version::V2, 252, &[("TasksMax", 1)]);
        check(&Values::default(), Version::V2, 252, &[]);
    }

    #[test]
    fn cpus_are_written_as_a_bit_mask() {
        assert_eq!(bits(&[0, 1, 9]), [3, 2]);
        assert_eq!(bits(&[]), [0_u8; 0]);
        assert_eq!(bits(&[u16::MAX]).len(), 8192);
    }

    #[test]
    fn a_slice_wants_its_parent() {
        let name = Name::parse("/kubepods").unwrap().join("burstable").unwrap();
        let found = new_slice_properties(&name, Version::V2);
        assert_eq!(found[0].value, Value::Text("cgroup /kubepods/burstable of Kubernetes pods".to_owned()));
        assert_eq!(found[1].value, Value::Array("s", vec![Value::Text("kubepods.slice".to_owned())]));
        let names: Vec<&str> = found.iter().map(|property| property.name).collect();
        assert_eq!(
            names,
            [
                "Description",
                "Wants",
                "MemoryAccounting",
                "CPUAccounting",
                "IOAccounting",
                "TasksAccounting",
                "DefaultDependencies"
            ]
        );
        assert_eq!(new_slice_properties(&name.parent(), Version::V1)[4].name, "BlockIOAccounting");
        let root = &new_slice_properties(&name.parent(), Version::V1)[1].value;
        assert_eq!(root, &Value::Array("s", vec![Value::Text("-.slice".to_owned())]));
    }

    #[test]
    fn versions_of_systemd() {
        for (text, expected) in
            [("v245.4-1.fc32", 245), ("245", 245), ("v252", 252), ("\"249\"", 249), ("", 0), ("x", 0)]
        {
            assert_eq!(systemd_version(text), expected, "{text}");
        }
    }
}
