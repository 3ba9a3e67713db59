//! The feature gates of the Go kubelet with their defaults (Go: component-base/featuregate). The
//! facts are in `gates.txt`, a column for each release: the gates of the kubelet's own program,
//! which are those of pkg/features and of the libraries that it is built from. Gates of other
//! components are unknown, as in the Go kubelet.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use crate::model::version::PREVIOUS_RELEASE;
pub use crate::model::version::RELEASE;

/// The gates of several releases.
const TABLE: &str = include_str!("gates.txt");
/// The gates that switch all gates of a stage that are not set by their own name.
const ALL: [(&str, Stage); 2] = [("AllAlpha", Stage::Alpha), ("AllBeta", Stage::Beta)];

/// The stage of a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Alpha: off unless it is set.
    Alpha,
    /// Beta: usually on.
    Beta,
    /// Generally available.
    Stable,
    /// Deprecated.
    Deprecated,
}

/// A feature gate of the Go kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gate {
    /// The name of the gate.
    pub name: &'static str,
    /// The stage of the feature.
    pub stage: Stage,
    /// Whether it is on by default.
    pub default: bool,
    /// Whether its value is fixed.
    pub locked: bool,
}

/// Why a setting of a gate is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum GateError {
    #[error("unrecognized feature gate: {0}")]
    Unknown(String),
    /// `needs`: separated by blanks.
    #[error("{name} is enabled, but depends on features that are disabled: [{needs}]")]
    Needs { name: &'static str, needs: String },
}

/// The gates after the configuration was read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gates {
    changed: BTreeMap<&'static str, bool>,
    /// The gates that the map names to no avail.
    ignored: Vec<&'static str>,
}

impl Gates {
    /// Applies a `featureGates` map; every problem is reported with its gate. `AllAlpha` and
    /// `AllBeta` set gates that the map does not name.
    ///
    /// DIFFERS: the Go kubelet does not start if a gate was removed or is locked to the other value, or
    /// if a gate that the map does not name requires one that is off. An agent that upgrades itself must
    /// not leave its node without an agent for that: what was valid with the previous release has a
    /// warning only.
    #[must_use]
    pub fn resolve(set: &BTreeMap<String, bool>) -> (Gates, Vec<(String, GateError)>) {
        let mut gates = Gates { changed: KNOWN.changed(set), ignored: Vec::new() };
        let mut problems = Vec::new();
        for (name, &wanted) in set {
            match KNOWN.gates.get(name.as_str()) {
                None => match former(name) {
                    Some(former) => gates.ignored.push(former),
                    None => problems.push((name.clone(), GateError::Unknown(name.clone()))),
                },
                Some(gate) if gate.locked && gate.default != wanted => gates.ignored.push(gate.name),
                Some(_) => {}
            }
        }
        loop {
            let unmet = KNOWN.unmet(&gates.changed);
            if unmet.is_empty() {
                break;
            }
            let before = PREVIOUS.unmet(&PREVIOUS.changed(set));
            let is_new = |name: &str| !PREVIOUS.gates.contains_key(name) && set.get(name) == Some(&true);
            let (refused, off): (Vec<_>, Vec<_>) =
                unmet.into_iter().partition(|(name, _)| before.contains_key(name) || is_new(name));
            if off.is_empty() {
                let errors = refused.into_iter().map(|(name, needs)| {
                    (name.to_owned(), GateError::Needs { name, needs: needs.join(" ") })
                });
                problems.extend(errors);
                break;
            }
            // Each turn switches a gate off, so the loop ends.
            for (name, _) in off {
                gates.changed.insert(name, false);
                gates.ignored.push(name);
            }
        }
        (gates, problems)
    }

    /// Whether a gate is on; an unknown one is off.
    #[must_use]
    pub fn enabled(&self, name: &str) -> bool {
        KNOWN.enabled(&self.changed, name)
    }

    /// The value that the configuration gives a gate, by its name or by its stage.
    #[must_use]
    pub fn configured(&self, name: &str) -> Option<bool> {
        self.changed.get(name).copied()
    }

    /// The gates whose chosen value has no effect: this agent behaves as with the other value, the
    /// release has the gate no more or has locked it, or a gate that it requires is off. Sorted.
    #[must_use]
    pub fn without_effect(&self) -> Vec<&'static str> {
        let fixed = FIXED.iter().filter(|(name, here)| self.configured(name).is_some_and(|on| on != *here));
        let all: BTreeSet<_> = fixed.map(|(name, _)| *name).chain(self.ignored.iter().copied()).collect();
        all.into_iter().collect()
    }
}

fn is_all(name: &str) -> bool {
    ALL.iter().any(|(all, _)| *all == name)
}

/// All gates, with `AllAlpha` and `AllBeta`.
pub fn known() -> impl Iterator<Item = Gate> {
    KNOWN.gates.values().copied()
}

#[derive(Debug, Default)]
struct Release {
    gates: BTreeMap<&'static str, Gate>,
    /// The gates that another requires.
    needs: BTreeMap<&'static str, Vec<&'static str>>,
}

impl Release {
    /// The gates that a `featureGates` map switches, by their name or by their stage.
    fn changed(&self, set: &BTreeMap<String, bool>) -> BTreeMap<&'static str, bool> {
        let mut changed = BTreeMap::new();
        for (all, stage) in ALL {
            if let Some(&on) = set.get(all) {
                let gates = self.gates.values().filter(|gate| gate.stage == stage && !is_all(gate.name));
                changed.extend(gates.map(|gate| (gate.name, on)));
            }
        }
        for (name, &wanted) in set {
            if let Some(gate) = self.gates.get(name.as_str())
                && !(gate.locked && gate.default != wanted)
            {
                changed.insert(gate.name, wanted);
            }
        }
        changed
    }

    fn enabled(&self, changed: &BTreeMap<&'static str, bool>, name: &str) -> bool {
        match changed.get(name) {
            Some(on) => *on,
            None => self.gates.get(name).is_some_and(|gate| gate.default),
        }
    }

    /// The gates that are on without a gate that they require, each with those.
    fn unmet(&self, changed: &BTreeMap<&'static str, bool>) -> BTreeMap<&'static str, Vec<&'static str>> {
        let mut unmet = BTreeMap::new();
        for (&name, needs) in self.needs.iter().filter(|(name, _)| self.enabled(changed, name)) {
            let off: Vec<_> = needs.iter().copied().filter(|needed| !self.enabled(changed, needed)).collect();
            if !off.is_empty() {
                unmet.insert(name, off);
            }
        }
        unmet
    }
}

static KNOWN: LazyLock<Release> = LazyLock::new(|| parse(TABLE, RELEASE));
/// Read only for configurations that do not fit [`RELEASE`].
static PREVIOUS: LazyLock<Release> = LazyLock::new(|| parse(TABLE, PREVIOUS_RELEASE));

/// The name of a gate that only an earlier release or another component has.
fn former(name: &str) -> Option<&'static str> {
    let removed = REMOVED.iter().copied().find(|removed| *removed == name);
    removed.or_else(|| PREVIOUS.gates.get(name).map(|gate| gate.name))
}

/// Whether a gate is alpha and the agent has not built what it switches on.
#[must_use]
pub fn is_not_built(name: &str) -> bool {
    FIXED.contains(&(name, false)) && KNOWN.gates.get(name).is_some_and(|gate| gate.stage == Stage::Alpha)
}

/// Reads the column of a release. Rows that cannot be read are left out; a test checks that there are
/// none.
fn parse(table: &'static str, release: &str) -> Release {
    let mut found = Release::default();
    let mut rows = table.lines().filter(|line| !line.starts_with('#')).map(str::split_ascii_whitespace);
    let Some(column) = rows.next().and_then(|mut releases| releases.position(|name| name == release)) else {
        return found;
    };
    for row in rows {
        let (Some(name), Some(cell)) = (row.clone().next(), row.clone().nth(column)) else { continue };
        match (name.split_once('>'), cell) {
            (Some((name, needed)), "needs") => found.needs.entry(name).or_default().push(needed),
            (None, cell) => found.gates.extend(gate(name, cell).map(|gate| (name, gate))),
            _ => {}
        }
    }
    found
}

/// `None`: the release has no such gate.
fn gate(name: &'static str, cell: &str) -> Option<Gate> {
    let (cell, locked) = cell.strip_suffix("-locked").map_or((cell, false), |cell| (cell, true));
    let (stage, default) = cell.split_once('-')?;
    let stage = match stage {
        "alpha" => Stage::Alpha,
        "beta" => Stage::Beta,
        "ga" => Stage::Stable,
        "deprecated" => Stage::Deprecated,
        _ => return None,
    };
    Some(Gate { name, stage, default: default == "on", locked })
}

/// Gates that earlier versions of this agent accepted and [`RELEASE`] has no more, and gates of other
/// components that files for several components may name.
const REMOVED: &[&str] = &[
    "CSIMigrationPortworx",
    "ControllerManagerReleaseLeaderElectionLockOnExit",
    "HonorPVReclaimPolicy",
    "InPlacePodVerticalScalingAllocatedStatus",
    "InTreePluginPortworxUnregister",
    "MemoryManager",
    "ServiceTrafficDistribution",
    "StructuredAuthorizationConfiguration",
    "TopologyAwareHints",
    "WatchFromStorageWithoutResourceVersion",
];

/// Gates of the Go kubelet on Linux that this agent does not read, each with the value as which it
/// behaves. A configuration with the other value gets a warning.
const FIXED: &[(&str, bool)] = &[
    ("AllowDNSOnlyNodeCSR", false),
    ("CRIListStreaming", false),
    ("CSIVolumeHealth", false),
    ("ChangeContainerStatusOnKubeletRestart", false),
    ("DRANodeAllocatableResources", false),
    ("DRAOptionalNodeOperations", false),
    ("EmptyDirVolumeMode", false),
    ("EnvFiles", true),
    ("GRPCContainerProbeTLS", false),
    ("H2CContainerProbe", false),
    ("ImageVolumeWithDigest", false),
    ("InPlacePodVerticalScalingExclusiveCPUs", false),
    ("InPlacePodVerticalScalingExclusiveMemory", false),
    ("InPlacePodVerticalScalingMemoryBackedVolumes", false),
    ("InPlacePodVerticalScalingSchedulerPreemption", true),
    ("KubeletAllocatedPodsEndpoint", false),
    ("KubeletPodResourcesListUseActivePods", true),
    ("KubeletRegistrationGetOnExistsOnly", false),
    ("KubeletSeparateDiskGC", true),
    ("KubeletServiceAccountTokenForCredentialProviders", true),
    ("LocalStorageCapacityIsolationFSQuotaMonitoring", false),
    ("NativeHistograms", false),
    ("PodAndContainerStatsFromCRI", false),
    ("PodLevelResourcesFixDefaulting", true),
    ("PodLevelResourcesFixKubeletQOSClass", true),
    ("ReloadKubeletClientCAFile", true),
    ("ReloadKubeletServerCertificateFile", true),
    ("ResourceHealthStatus", true),
    ("ResourceHealthStatusMessage", true),
    ("TaintTolerationComparisonOperators", true),
    ("UserNamespacesHostNetworkSupport", false),
    ("VolumeBindMountOptions", false),
];

/// The table of `FIXED` in docs/compatibility.md.
#[must_use]
pub fn markdown() -> String {
    let word = |on: bool| if on { "on" } else { "off" };
    let mut out = "| Feature gate | Default | Here |\n|---|---|---|\n".to_owned();
    for (name, here) in FIXED {
        let default = KNOWN.gates.get(name).is_some_and(|gate| gate.default);
        let note = if is_not_built(name) { " (alpha, not built)" } else { "" };
        out += &format!("| `{name}` | {} | always {}{note} |\n", word(default), word(*here));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(entries: &[(&str, bool)]) -> BTreeMap<String, bool> {
        entries.iter().map(|(name, on)| ((*name).to_owned(), *on)).collect()
    }

    #[test]
    fn every_row_of_the_table_can_be_read() {
        let mut rows = TABLE.lines().filter(|line| !line.starts_with('#'));
        let releases: Vec<&str> = rows.next().unwrap().split(' ').collect();
        let mut names = Vec::new();
        for row in rows {
            let cells: Vec<&'static str> = row.split(' ').collect();
            assert_eq!(cells.len(), releases.len(), "{row}");
            for cell in &cells[1..] {
                let is_good = match cells[0].contains('>') {
                    true => *cell == "needs",
                    false => gate(cells[0], cell).is_some(),
                };
                assert!(is_good || *cell == "-", "{row}");
            }
            names.push(cells[0]);
        }
        assert!(names.is_sorted_by(|name, next| name < next), "sorted, each name once");
        for release in &releases[1..] {
            let found = parse(TABLE, release);
            assert!(found.gates.len() > 200, "{release}");
            let needs = found.needs.iter().flat_map(|(name, needed)| needed.iter().chain([name]));
            assert!(needs.into_iter().all(|name| found.gates.contains_key(name)), "{release}");
        }
        assert!(parse(TABLE, "1.1").gates.is_empty());
        // A later release is one more column.
        let later =
            "# x\nrelease 1.36 1.37\nA alpha-off beta-on\nA>B - needs\nB - ga-on-locked\nC beta-on -\n";
        let names = |release| parse(later, release).gates.into_keys().collect::<Vec<_>>();
        assert_eq!((names("1.36"), names("1.37")), (vec!["A", "C"], vec!["A", "B"]));
        assert_eq!(parse(later, "1.37").needs["A"], ["B"]);
        assert!(parse(later, "1.37").gates["B"].locked && parse(later, "1.36").needs.is_empty());
    }

    #[test]
    fn gates_of_1_37_2_have_their_stage_default_and_lock() {
        use Stage::{Alpha, Beta, Deprecated, Stable};
        for (name, stage, default, locked) in [
            ("AtomicWriteVolumeUserFields", Alpha, false, false),
            ("PodLevelResourceManagers", Beta, false, false),
            ("CRIListStreaming", Alpha, false, false),
            ("ResourceHealthStatusMessage", Beta, true, false),
            ("MemoryQoS", Beta, true, false),
            ("HugepageAwareEviction", Beta, true, false),
            ("PodLevelResourcesFixKubeletQOSClass", Beta, true, false),
            ("PodLevelResourcesFixDefaulting", Beta, true, false),
            ("KubeletInUserNamespace", Beta, true, false),
            ("PodsAPI", Beta, true, false),
            ("SELinuxMount", Stable, true, false),
            ("ClusterTrustBundle", Stable, true, false),
            ("ClusterTrustBundleProjection", Stable, true, false),
            ("PodCertificateRequest", Stable, true, false),
            ("NodeDeclaredFeatures", Stable, true, true),
            ("DisableCPUQuotaWithExclusiveCPUs", Deprecated, true, true),
            // Its default is another one only if no component is of 1.36.
            ("DRAFractionalCapacityRange", Beta, false, false),
            ("EventedPLEG", Alpha, false, false),
            ("KubeletServiceAccountTokenForCredentialProviders", Beta, true, false),
            ("GitRepoVolumeDriver", Deprecated, false, true),
            ("DRAAdminAccess", Stable, true, true),
            ("AllAlpha", Alpha, false, false),
        ] {
            assert_eq!(KNOWN.gates.get(name), Some(&Gate { name, stage, default, locked }));
        }
        assert_eq!(KNOWN.needs["EventedPLEG"], ["PLEGOnDemandRelist"]);
        assert_eq!(PREVIOUS.gates["MemoryQoS"].stage, Alpha);
    }

    #[test]
    fn chosen_value_without_effect_is_named() {
        let without_effect = |entries: &[(&str, bool)]| {
            let (gates, problems) = Gates::resolve(&set(entries));
            assert!(problems.is_empty(), "{problems:?}");
            gates.without_effect()
        };
        assert_eq!(without_effect(&[]), [""; 0]);
        assert_eq!(
            without_effect(&[("EnvFiles", true), ("CRIListStreaming", false), ("MemoryQoS", true)]),
            [""; 0]
        );
        assert_eq!(
            without_effect(&[("EnvFiles", false), ("H2CContainerProbe", true)]),
            ["EnvFiles", "H2CContainerProbe"]
        );
        assert!(without_effect(&[("AllBeta", false)]).contains(&"ResourceHealthStatus"));
        // The default has no warning, also where this agent behaves otherwise.
        let on = without_effect(&[("AllBeta", false), ("ResourceHealthStatus", true)]);
        assert!(!on.contains(&"ResourceHealthStatus"));
        for (name, _) in FIXED {
            assert!(KNOWN.gates.get(name).is_some_and(|gate| !gate.locked), "{name}");
        }
        assert!(FIXED.is_sorted());
    }

    #[test]
    fn alpha_gates_of_missing_features_are_not_built() {
        for name in [
            "CSIVolumeHealth",
            "DRANodeAllocatableResources",
            "DRAOptionalNodeOperations",
            "EmptyDirVolumeMode",
            "GRPCContainerProbeTLS",
            "H2CContainerProbe",
            "InPlacePodVerticalScalingMemoryBackedVolumes",
            "KubeletAllocatedPodsEndpoint",
            "VolumeBindMountOptions",
        ] {
            assert!(is_not_built(name), "{name}");
        }
        for name in ["EnvFiles", "PodAndContainerStatsFromCRI", "ContainerStopSignals", "Nonsense"] {
            assert!(!is_not_built(name), "{name}");
        }
    }

    /// A valid configuration of the previous release must not keep the agent from starting.
    #[test]
    fn gate_whose_requirement_the_previous_release_did_not_have_is_switched_off() {
        // Two new gates, on by default, require `PodLevelResources`.
        let (gates, problems) = Gates::resolve(&set(&[
            ("InPlacePodLevelResourcesVerticalScaling", false),
            ("PodLevelResources", false),
        ]));
        assert_eq!(problems, []);
        assert!(!gates.enabled("PodLevelResourcesFixDefaulting"));
        assert_eq!(
            gates.without_effect(),
            ["PodLevelResourcesFixDefaulting", "PodLevelResourcesFixKubeletQOSClass"]
        );
        // `GenericWorkload` was alpha too, and is beta and off.
        let (gates, problems) = Gates::resolve(&set(&[("AllAlpha", true)]));
        assert_eq!(problems, []);
        assert!(!gates.enabled("WorkloadWithJob") && gates.without_effect().contains(&"WorkloadWithJob"));
        // Off by default in 1.36, like the gate that requires it.
        let (gates, problems) = Gates::resolve(&set(&[("ClusterTrustBundle", false)]));
        assert_eq!((problems, gates.enabled("ClusterTrustBundleProjection")), (vec![], false));
        // A new gate is set by its own name without the gate that it requires.
        let (_, problems) = Gates::resolve(&set(&[("CompositePodGroup", true)]));
        assert_eq!(problems.len(), 1, "{problems:?}");
    }

    #[test]
    fn every_gate_of_both_releases_is_accepted() {
        for gate in KNOWN.gates.values().chain(PREVIOUS.gates.values()) {
            let (_, problems) = Gates::resolve(&set(&[(gate.name, gate.default)]));
            assert_eq!(problems, [], "{}", gate.name);
        }
    }

    #[test]
    fn gates_of_a_stage_are_set_together() {
        let (off, _) = Gates::resolve(&set(&[("AllAlpha", false)]));
        assert_eq!((off.configured("EventedPLEG"), off.configured("EnvFiles")), (Some(false), None));
        let (on, _) = Gates::resolve(&set(&[("AllAlpha", false), ("EventedPLEG", true)]));
        assert_eq!(on.configured("EventedPLEG"), Some(true));
        let (_, problems) = Gates::resolve(&set(&[("AllBeta", false)]));
        assert_eq!(problems, []);
    }

    #[test]
    fn gates_have_their_defaults_unless_changed() {
        let (gates, problems) = Gates::resolve(&set(&[("ContainerStopSignals", true), ("EnvFiles", false)]));
        assert!(problems.is_empty());
        for (name, on) in [
            ("ContainerStopSignals", true),
            ("EnvFiles", false),
            ("SidecarContainers", false),
            ("ImageVolume", true),
            ("GracefulNodeShutdown", true),
            ("MemoryQoS", true),
            ("EventedPLEG", false),
            ("KubeletCrashLoopBackOffMax", true),
            ("NoSuchGate", false),
        ] {
            assert_eq!(gates.enabled(name), on, "{name}");
        }
        let (gates, problems) =
            Gates::resolve(&set(&[("AllAlpha", true), ("MemoryQoS", false), ("AllBeta", true)]));
        assert!(problems.is_empty(), "{problems:?}");
        assert!(gates.enabled("PodsAPI") && !gates.enabled("MemoryQoS"));
    }

    #[test]
    fn removed_and_locked_gates_are_ignored_with_a_warning() {
        for name in REMOVED {
            assert!(!KNOWN.gates.contains_key(name), "{name}");
        }
        let (gates, problems) = Gates::resolve(&set(&[
            ("MemoryManager", false),
            ("ImageVolume", false),
            // Removed in 1.37.
            ("SidecarContainers", true),
            ("TopologyAwareHints", true),
        ]));
        assert_eq!(problems, []);
        assert!(gates.enabled("ImageVolume") && gates.configured("ImageVolume").is_none());
        assert_eq!(
            gates.without_effect(),
            ["ImageVolume", "MemoryManager", "SidecarContainers", "TopologyAwareHints"]
        );
        // A locked gate may have the value that it is locked to.
        let (gates, problems) = Gates::resolve(&set(&[("ImageVolume", true)]));
        assert_eq!((gates.without_effect().len(), problems.len()), (0, 0));
    }

    #[test]
    fn unknown_and_dependent_gates_are_refused() {
        for (name, on, words) in [
            ("Nonsense", true, "unrecognized feature gate: Nonsense"),
            // Of another component.
            ("SomeControllerGate", true, "unrecognized feature gate"),
            (
                "GracefulNodeShutdown",
                false,
                "GracefulNodeShutdownBasedOnPodPriority is enabled, but depends on features that are disabled: \
                 [GracefulNodeShutdown]",
            ),
            ("DRAPartitionableDevicesType", true, "disabled: [DRAResourcePoolStatus]"),
        ] {
            let (_, problems) = Gates::resolve(&set(&[(name, on)]));
            assert!(
                problems.iter().any(|(_, error)| error.to_string().contains(words)),
                "{name}: {problems:?}"
            );
        }
        assert!(Gates::resolve(&set(&[("ImageVolume", true)])).1.is_empty());
    }
}
