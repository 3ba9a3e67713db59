//! The feature gates of Kubernetes 1.36 with their defaults (Go: component-base/featuregate),
//! including those of other components, so one map can be used for all of them.

use std::collections::BTreeMap;
use std::sync::LazyLock;

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

/// One gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gate {
    /// The name of the gate.
    pub name: &'static str,
    /// The stage of the feature.
    pub stage: Stage,
    /// Whether it is on by default.
    pub preset: bool,
    /// Whether its value is fixed.
    pub locked: bool,
}

/// Why a setting of a gate is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum GateError {
    #[error("unrecognized feature gate: {0}")]
    Unknown(String),
    /// The value of the gate cannot be changed.
    #[error("cannot set feature gate {name} to {wanted}, feature is locked to {locked}")]
    Locked { name: String, wanted: bool, locked: bool },
    #[error("feature gate {name} is on but depends on {needs}, which is off")]
    Needs { name: &'static str, needs: &'static str },
}

/// The gates after the configuration was read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gates {
    changed: BTreeMap<&'static str, bool>,
}

impl Gates {
    /// Applies a `featureGates` map; every problem is reported with its gate. `AllAlpha` and
    /// `AllBeta` set gates that the map does not name.
    #[must_use]
    pub fn resolve(set: &BTreeMap<String, bool>) -> (Gates, Vec<(String, GateError)>) {
        let mut gates = Gates::default();
        let mut problems = Vec::new();
        for (all, stage) in [("AllAlpha", Stage::Alpha), ("AllBeta", Stage::Beta)] {
            if let Some(&on) = set.get(all) {
                gates.changed.insert(all, on);
                for gate in known().filter(|gate| gate.stage == stage && !gate.locked) {
                    gates.changed.insert(gate.name, on);
                }
            }
        }
        for (name, &wanted) in set {
            match BY_NAME.get(name.as_str()) {
                None if name == "AllAlpha" || name == "AllBeta" => {}
                None => problems.push((name.clone(), GateError::Unknown(name.clone()))),
                Some(gate) if gate.locked && gate.preset != wanted => {
                    let error = GateError::Locked { name: name.clone(), wanted, locked: gate.preset };
                    problems.push((name.clone(), error));
                }
                Some(gate) => {
                    gates.changed.insert(gate.name, wanted);
                }
            }
        }
        for &(name, needs) in NEEDS {
            if gates.enabled(name) && !gates.enabled(needs) {
                problems.push((name.to_owned(), GateError::Needs { name, needs }));
            }
        }
        (gates, problems)
    }

    /// Whether a gate is on; an unknown one is off.
    #[must_use]
    pub fn enabled(&self, name: &str) -> bool {
        match self.changed.get(name) {
            Some(on) => *on,
            None => BY_NAME.get(name).is_some_and(|gate| gate.preset),
        }
    }
}

/// All gates.
pub fn known() -> impl Iterator<Item = Gate> {
    let rows = |names: &'static str, stage, preset, locked| {
        names.split_ascii_whitespace().map(move |name| Gate { name, stage, preset, locked })
    };
    rows(LOCKED_ON, Stage::Stable, true, true)
        .chain(rows(LOCKED_OFF, Stage::Deprecated, false, true))
        .chain(rows(STABLE_ON, Stage::Stable, true, false))
        .chain(rows(BETA_ON, Stage::Beta, true, false))
        .chain(rows(BETA_OFF, Stage::Beta, false, false))
        .chain(rows(ALPHA_OFF, Stage::Alpha, false, false))
        .chain(rows(DEPRECATED_ON, Stage::Deprecated, true, false))
        .chain(rows(DEPRECATED_OFF, Stage::Deprecated, false, false))
}

static BY_NAME: LazyLock<BTreeMap<&'static str, Gate>> =
    LazyLock::new(|| known().map(|gate| (gate.name, gate)).collect());

/// Pairs of a gate and another that it requires; locked gates cannot fail and are left out.
const NEEDS: &[(&str, &str)] = &[
    ("ClusterTrustBundleProjection", "ClusterTrustBundle"),
    ("DRADeviceBindingConditions", "DRAResourceClaimDeviceStatus"),
    ("DRADeviceTaintRules", "DRADeviceTaints"),
    ("DeclarativeValidationTakeover", "DeclarativeValidation"),
    ("GangScheduling", "GenericWorkload"),
    ("GracefulNodeShutdownBasedOnPodPriority", "GracefulNodeShutdown"),
    ("InPlacePodLevelResourcesVerticalScaling", "NodeDeclaredFeatures"),
    ("InPlacePodLevelResourcesVerticalScaling", "PodLevelResources"),
    ("MatchLabelKeysInPodTopologySpreadSelectorMerge", "MatchLabelKeysInPodTopologySpread"),
    ("RestartAllContainersOnContainerExits", "ContainerRestartRules"),
    ("RestartAllContainersOnContainerExits", "NodeDeclaredFeatures"),
    ("StorageVersionAPI", "APIServerIdentity"),
    ("UnknownVersionInteroperabilityProxy", "APIServerIdentity"),
    ("WindowsGracefulNodeShutdown", "GracefulNodeShutdown"),
];

const LOCKED_ON: &str = "
APIServerTracing AggregatedDiscoveryRemoveBetaType AnonymousAuthConfigurableEndpoints AnyVolumeDataSource
AuthorizeNodeWithSelectors AuthorizeWithSelectors BtreeWatchCache CPUManagerPolicyOptions
CRDValidationRatcheting CSIMigrationPortworx CSIServiceAccountTokenSecrets ConsistentListFromCache
CustomCPUCFSQuotaPeriod CustomResourceFieldSelectors DisableAllocatorDualWrite DynamicResourceAllocation
ExecProbeTimeout HonorPVReclaimPolicy ImageMaximumGCAge ImageVolume InPlacePodVerticalScaling
JobBackoffLimitPerIndex JobManagedBy JobPodReplacementPolicy JobSuccessPolicy KubeletCgroupDriverFromCRI
KubeletFineGrainedAuthz KubeletPSI KubeletPodResourcesDynamicResources KubeletPodResourcesGet
KubeletTracing LogarithmicScaleDown MatchLabelKeysInPodAffinity MemoryManager MultiCIDRServiceAllocator
MutableCSINodeAllocatableCount NFTablesProxyMode NodeInclusionPolicyInPodTopologySpread NodeLogQuery
NodeSwap OrderedNamespaceDeletion PodLifecycleSleepAction PodLifecycleSleepActionAllowZero
PodObservedGenerationTracking PodSchedulingReadiness PreferSameTrafficDistribution ProcMountType
RecoverVolumeExpansionFailure RecursiveReadOnlyMounts RelaxedDNSSearchValidation
RelaxedEnvironmentVariableValidation ResilientWatchCacheInitialization RetryGenerateName
SELinuxChangePolicy SELinuxMountReadWriteOncePod SchedulerQueueingHints SeparateTaintEvictionController
ServiceAccountTokenJTI ServiceAccountTokenNodeBinding ServiceAccountTokenNodeBindingValidation
ServiceAccountTokenPodNodeInfo ServiceTrafficDistribution SidecarContainers
StreamingCollectionEncodingToJSON StreamingCollectionEncodingToProtobuf
StructuredAuthenticationConfiguration StructuredAuthorizationConfiguration SupplementalGroupsPolicy
SystemdWatchdog TopologyAwareHints TopologyManagerPolicyOptions UserNamespacesSupport
VolumeAttributesClass WinDSR WinOverlay
";

const LOCKED_OFF: &str = "
AllowOverwriteTerminationGracePeriodSeconds WatchFromStorageWithoutResourceVersion
";

const STABLE_ON: &str = "
DRAAdminAccess DRAPrioritizedList ExternalServiceAccountTokenSigner InformerResourceVersion
KubeletServiceAccountTokenForCredentialProviders
";

const BETA_ON: &str = "
APIResponseCompression APIServerIdentity AllowParsingUserUIDFromCertAuth
AuthorizePodWebsocketUpgradeCreatePermission CPUManagerPolicyBetaOptions
ClearingNominatedNodeNameAfterBinding ComponentFlagz ComponentStatusz ContainerCheckpoint
ContainerRestartRules ContextualLogging DRAConsumableCapacity DRADeviceBindingConditions DRADeviceTaints
DRAExtendedResource DRAPartitionableDevices DRAResourceClaimDeviceStatus DRASchedulerFilterTimeout
DeclarativeValidation DeploymentReplicaSetTerminatingReplicas DetectCacheInconsistency EnvFiles
ExtendWebSocketsToKubelet GracefulNodeShutdown GracefulNodeShutdownBasedOnPodPriority
HPAConfigurableTolerance HostnameOverride InOrderInformers InOrderInformersBatchProcess
InPlacePodLevelResourcesVerticalScaling InPlacePodVerticalScalingInitContainers
KubeletCrashLoopBackOffMax KubeletEnsureSecretPulledImages KubeletSeparateDiskGC ListFromCacheSnapshot
LoggingBetaOptions MatchLabelKeysInPodTopologySpread MatchLabelKeysInPodTopologySpreadSelectorMerge
MaxUnavailableStatefulSet NodeDeclaredFeatures NominatedNodeNameForExpectation OpenAPIEnums
OpportunisticBatching PLEGOnDemandRelist PodDeletionCost PodLevelResources
PodReadyToStartContainersCondition PodTopologyLabelsAdmission PortForwardWebsockets
PreventStaticPodAPIReferences ReloadKubeletClientCAFile ReloadKubeletServerCertificateFile
RemoteRequestHeaderUID ResourceHealthStatus RestartAllContainersOnContainerExits
RotateKubeletServerCertificate SchedulerAsyncPreemption SchedulerPopFromBackoffQ
ServiceAccountNodeAudienceRestriction SizeBasedListCostEstimate StatefulSetSemanticRevisionComparison
StorageVersionHash StructuredAuthenticationConfigurationEgressSelector
StructuredAuthenticationConfigurationJWKSMetrics TokenRequestServiceAccountUIDValidation
TopologyManagerPolicyBetaOptions TranslateStreamCloseWebsocketRequests UnauthenticatedHTTP2DOSMitigation
WatchList WatchListClient WindowsGracefulNodeShutdown
";

const BETA_OFF: &str = "
CRDObservedGenerationTracking ClusterTrustBundle ClusterTrustBundleProjection ConcurrentWatchObjectDecode
CoordinatedLeaderElection DeclarativeValidationTakeover EventedPLEG
LocalStorageCapacityIsolationFSQuotaMonitoring MutatingAdmissionPolicy PodCertificateRequest SELinuxMount
SchedulerAsyncAPICalls StorageVersionMigrator WatchCacheInitializationPostStartHook
";

const ALPHA_OFF: &str = "
APIServingWithRoutine AllowUnsafeMalformedObjectDeletion CBORServingAndStorage
CPUManagerPolicyAlphaOptions CSIVolumeHealth ClientsAllowCBOR ClientsPreferCBOR
CloudControllerManagerWatchBasedRoutesReconciliation CloudControllerManagerWebhook
ConstrainedImpersonation ContainerStopSignals CrossNamespaceVolumeDataSource DRADeviceTaintRules
GangScheduling GenericWorkload HPAScaleToZero ImageVolumeWithDigest
InPlacePodVerticalScalingExclusiveCPUs InPlacePodVerticalScalingExclusiveMemory
InTreePluginPortworxUnregister KubeletInUserNamespace LoggingAlphaOptions MemoryQoS
MutablePVNodeAffinity MutablePodResourcesForSuspendedJobs MutableSchedulingDirectivesForSuspendedJobs
PodAndContainerStatsFromCRI PodLogsQuerySplitStreams PodsAPI QOSReserved
ReduceDefaultCrashLoopBackOffDecay RelaxedServiceNameValidation RuntimeClassInImageCriApi
StorageCapacityScoring StorageVersionAPI StrictIPCIDRValidation TaintTolerationComparisonOperators
TopologyManagerPolicyAlphaOptions UnknownVersionInteroperabilityProxy UserNamespacesHostNetworkSupport
VolumeLimitScaling WindowsCPUAndMemoryAffinity
";

const DEPRECATED_ON: &str = "
DisableCPUQuotaWithExclusiveCPUs DisableNodeKubeProxyVersion KubeletPodResourcesListUseActivePods
SeparateCacheWatchRPC StorageNamespaceIndex
";

const DEPRECATED_OFF: &str = "
AllowDNSOnlyNodeCSR AllowInsecureKubeletCertificateSigningRequests ChangeContainerStatusOnKubeletRestart
GitRepoVolumeDriver InPlacePodVerticalScalingAllocatedStatus KMSv1 KubeletRegistrationGetOnExistsOnly
WindowsHostNetwork
";

#[cfg(test)]
mod tests {
    use super::*;

    fn set(entries: &[(&str, bool)]) -> BTreeMap<String, bool> {
        entries.iter().map(|(name, on)| ((*name).to_owned(), *on)).collect()
    }

    #[test]
    fn names_of_feature_gates_are_unique() {
        let mut names: Vec<_> = known().map(|gate| gate.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn gates_have_their_defaults_unless_changed() {
        let (gates, problems) = Gates::resolve(&set(&[("ContainerStopSignals", true), ("EnvFiles", false)]));
        assert!(problems.is_empty());
        for (name, on) in [
            ("ContainerStopSignals", true),
            ("EnvFiles", false),
            ("SidecarContainers", true),
            ("GracefulNodeShutdown", true),
            ("MemoryQoS", false),
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
    fn unknown_locked_and_dependent_gates_are_refused() {
        for (name, on, words) in [
            ("Nonsense", true, "unrecognized feature gate: Nonsense"),
            ("SidecarContainers", false, "locked to true"),
            ("GracefulNodeShutdown", false, "depends on GracefulNodeShutdown"),
            ("ClusterTrustBundleProjection", true, "depends on ClusterTrustBundle"),
        ] {
            let (_, problems) = Gates::resolve(&set(&[(name, on)]));
            assert!(
                problems.iter().any(|(_, error)| error.to_string().contains(words)),
                "{name}: {problems:?}"
            );
        }
        assert!(Gates::resolve(&set(&[("SidecarContainers", true)])).1.is_empty());
    }
}
