//! Tests of loading, precedence, validation rules and hostile input.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::load::{LoadRequest, clean_path};
use super::*;

const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

fn write(directory: &Path, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
    let path = directory.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, text).unwrap();
    path
}

/// Loads a file with `HEAD` and this body, and applies these flags.
fn load_body(body: &str, overrides: &[(&'static str, Value)]) -> Result<LoadedConfig, Vec<Problem>> {
    let directory = tempfile::tempdir().unwrap();
    let file = write(directory.path(), "config.yaml", format!("{HEAD}{body}"));
    load(&LoadRequest { file: Some(file), overrides: flags(overrides), ..LoadRequest::default() })
}

fn flags(overrides: &[(&'static str, Value)]) -> Vec<Override> {
    overrides
        .iter()
        .map(|(path, value)| Override { flag: format!("--{path}"), path, value: value.clone() })
        .collect()
}

#[test]
fn origin_of_a_field_is_the_last_flag_or_file_that_sets_it() {
    let directory = tempfile::tempdir().unwrap();
    let file =
        write(directory.path(), "config.yaml", format!("{HEAD}port: 1\nmaxPods: 5\nsyncFrequency: 5s\n"));
    let drop_in = write(directory.path(), "d/a.conf", format!("{HEAD}\nmaxPods: 6\n"));
    let request = LoadRequest {
        file: Some(file.clone()),
        drop_ins: Some(directory.path().join("d")),
        overrides: flags(&[("syncFrequency", json!("7s"))]),
        ..LoadRequest::default()
    };
    let fields = ["port", "maxPods", "syncFrequency", "readOnlyPort"];
    let (loaded, origins) = load_with_origins(&request, &fields).unwrap();
    assert_eq!((loaded.config.max_pods, loaded.config.port), (6, 1));
    let origin = |field: &str| origins.get(field).cloned();
    assert_eq!(origin("port"), Some(format!("{}:3", file.display())));
    assert_eq!(origin("maxPods"), Some(format!("{}:4", drop_in.display())));
    assert_eq!(origin("syncFrequency"), Some("--syncFrequency".to_owned()));
    assert_eq!(origin("readOnlyPort"), None);
}

#[test]
fn throttling_factor_has_no_default_and_needs_its_gate() {
    let factor = |body: &str| load_body(body, &[]).map(|loaded| loaded.config.memory_throttling_factor);
    assert_eq!(factor("").unwrap(), None);
    assert_eq!(factor("featureGates: {MemoryQoS: true}").unwrap(), None);
    let gate = |on: bool, value: &str| {
        factor(&format!("memoryThrottlingFactor: {value}\nfeatureGates: {{MemoryQoS: {on}}}"))
    };
    assert_eq!(gate(true, "0.8").unwrap(), Some(0.8));
    assert_eq!(gate(true, "1").unwrap(), Some(1.0));
    // The default of earlier releases, which files may contain, is ignored.
    assert_eq!(gate(false, "0.9").unwrap(), Some(0.9));
    assert!(gate(false, "0.8").is_err());
}

#[test]
fn small_machine_has_a_default_memory_threshold_that_it_can_keep() {
    let directory = tempfile::tempdir().unwrap();
    let threshold = |body: &str, mib: Option<u64>| {
        let file = write(directory.path(), "config.yaml", format!("{HEAD}{body}"));
        let request = LoadRequest {
            file: Some(file),
            memory_bytes: mib.map(|mib| mib << 20),
            ..LoadRequest::default()
        };
        load(&request).unwrap().config.eviction_hard.get("memory.available").cloned()
    };
    assert_eq!(threshold("", Some(128)).as_deref(), Some("10%"));
    assert_eq!(threshold("", Some(999)).as_deref(), Some("10%"));
    assert_eq!(threshold("", Some(1000)).as_deref(), Some("100Mi"));
    assert_eq!(threshold("", None).as_deref(), Some("100Mi"));
    // What is configured counts.
    let own = "evictionHard: {nodefs.available: 5%}\n";
    assert_eq!(threshold(own, Some(128)), None);
    let merged = format!("{own}mergeDefaultEvictionSettings: true\n");
    assert_eq!(threshold(&merged, Some(128)).as_deref(), Some("10%"));
    let amount = "evictionHard: {memory.available: 100Mi}\n";
    assert_eq!(threshold(amount, Some(128)).as_deref(), Some("100Mi"));
    // Without a file there are no thresholds.
    let flags_only = LoadRequest { memory_bytes: Some(128 << 20), ..LoadRequest::default() };
    assert!(load(&flags_only).unwrap().config.eviction_hard.is_empty());
}

#[test]
fn defaults_differ_with_and_without_a_file() {
    let with = load_body("", &[]).unwrap().config;
    let without = load(&LoadRequest::default()).unwrap().config;
    assert!(!with.authentication.anonymous.enabled && without.authentication.anonymous.enabled);
    assert!(with.authentication.webhook.enabled && !without.authentication.webhook.enabled);
    assert_eq!(
        (with.authorization.mode.as_str(), without.authorization.mode.as_str()),
        ("Webhook", "AlwaysAllow")
    );
    assert_eq!((with.read_only_port, without.read_only_port), (0, 10255));
    assert_eq!((with.eviction_hard.len(), without.eviction_hard.len()), (5, 0));
    assert_eq!((with.max_pods, without.max_pods), (110, 110));
    assert_eq!(with.single_process_oom_kill, None);
    assert_eq!(with.crash_loop_back_off.max_container_restart_period, GoDuration::from_secs(300));
    assert!(with.fail_cgroup_v1);
}

/// The expected values are from the reference documentation of v1beta1.
#[test]
fn printed_defaults_are_those_of_the_reference() {
    let printed = load_body("", &[]).unwrap().to_yaml();
    for line in [
        "address: \"0.0.0.0\"",
        "apiVersion: kubelet.config.k8s.io/v1beta1",
        "cgroupDriver: cgroupfs",
        "cgroupsPerQOS: true",
        "containerLogMaxFiles: 5",
        "containerLogMaxSize: 10Mi",
        "containerLogMonitorInterval: 10s",
        "containerRuntimeEndpoint: unix:///run/containerd/containerd.sock",
        "cpuCFSQuotaPeriod: 100ms",
        "evictionPressureTransitionPeriod: 5m0s",
        "  memory.available: 100Mi",
        "healthzPort: 10248",
        "imageGCHighThresholdPercent: 85",
        "imageMaximumGCAge: 0s",
        "imagePullCredentialsVerificationPolicy: NeverVerifyPreloadedImages",
        "kind: KubeletConfiguration",
        "maxPods: 110",
        "nodeStatusReportFrequency: 5m0s",
        "oomScoreAdj: -999",
        "podPidsLimit: -1",
        "resolvConf: /etc/resolv.conf",
        "streamingConnectionIdleTimeout: 4h0m0s",
        "syncFrequency: 1m0s",
        "volumeStatsAggPeriod: 1m0s",
    ] {
        assert!(printed.lines().any(|printed| printed == line), "{line} is not in\n{printed}");
    }
    // The printed configuration can be loaded again.
    let directory = tempfile::tempdir().unwrap();
    let file = write(directory.path(), "config.yaml", &printed);
    let again = load(&LoadRequest { file: Some(file), ..LoadRequest::default() }).unwrap();
    assert_eq!(again.to_yaml(), printed);
}

#[test]
fn drop_ins_merge_in_order_and_flags_win() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let file = write(
        root,
        "main.yaml",
        format!(
            "{HEAD}maxPods: 1\nclusterDNS: [10.0.0.1]\nregisterNode: false\nfeatureGates: {{EnvFiles: false}}\nevictionSoft: {{memory.available: 1Gi}}\nevictionSoftGracePeriod: {{memory.available: 1m}}\n"
        ),
    );
    write(root, "d/10-a.conf", format!("{HEAD}maxPods: 2\npodsPerCore: 3\nclusterDNS: [10.0.0.2]\n"));
    write(
        root,
        "d/20-b.conf",
        format!("{HEAD}maxPods: 4\nregisterNode: null\nevictionSoft: null\nevictionSoftGracePeriod: null\n"),
    );
    write(
        root,
        "d/15/x.conf",
        format!(
            "{HEAD}maxPods: 3\npodsPerCore: 9\nevictionHard: {{memory.available: 1Mi, nodefs.available: null}}\n"
        ),
    );
    write(root, "d/30-c.yaml", "not read: [");
    write(root, "d/.conf.swp", "not read: [");
    let mut request =
        LoadRequest { file: Some(file), drop_ins: Some(root.join("d")), ..LoadRequest::default() };
    let config = load(&request).unwrap().config;
    assert_eq!((config.max_pods, config.pods_per_core), (4, 9));
    assert_eq!(config.cluster_dns, ["10.0.0.2"]);
    assert!(config.register_node && config.eviction_soft.is_empty());
    // Drop-ins are merged key by key over the defaults of a configuration with a file.
    assert_eq!(config.eviction_hard.get("memory.available").map(String::as_str), Some("1Mi"));
    assert_eq!(config.eviction_hard.len(), 4);

    request.overrides =
        flags(&[("maxPods", json!(7)), ("featureGates", json!({"ContainerStopSignals": true}))]);
    let loaded = load(&request).unwrap();
    assert_eq!(loaded.config.max_pods, 7);
    assert!(!loaded.gates.enabled("EnvFiles") && loaded.gates.enabled("ContainerStopSignals"));
    assert_eq!(loaded.files.len(), 4);

    // Drop-ins without a file are merged over the defaults of a start without a file.
    request = LoadRequest { drop_ins: Some(root.join("d")), ..LoadRequest::default() };
    let config = load(&request).unwrap().config;
    assert_eq!((config.read_only_port, config.eviction_hard.len()), (10255, 1));
}

#[test]
fn relative_paths_start_at_the_directory_of_their_file() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    let file = write(
        &root,
        "etc/main.yaml",
        format!("{HEAD}staticPodPath: ../pods/./x\nresolvConf: \"\"\npodLogsDir: logs/\n"),
    );
    write(&root, "d/a.conf", format!("{HEAD}authentication: {{x509: {{clientCAFile: ca.crt}}}}\n"));
    let config =
        load(&LoadRequest { file: Some(file), drop_ins: Some(root.join("d")), ..LoadRequest::default() })
            .unwrap()
            .config;
    assert_eq!(config.static_pod_path, root.join("pods/x").to_str().unwrap());
    assert_eq!(config.pod_logs_dir, root.join("etc/logs").to_str().unwrap());
    assert_eq!(config.authentication.x509.client_ca_file, root.join("d/ca.crt").to_str().unwrap());
    assert_eq!(config.resolv_conf, "");
    for (path, clean) in
        [("/a//b/../c/", "/a/c"), ("/..", "/"), ("a/..", "."), ("../a", "../a"), ("/", "/"), ("", ".")]
    {
        assert_eq!(clean_path(path), clean);
    }
}

#[test]
fn zero_in_a_file_means_the_default_and_in_a_flag_zero() {
    let loaded =
        load_body("", &[("evictionMaxPodGracePeriod", json!(0)), ("maxOpenFiles", json!(0))]).unwrap();
    assert_eq!(loaded.config.max_open_files, 0);
    assert_eq!(load_body("maxOpenFiles: 0\n", &[]).unwrap().config.max_open_files, 1_000_000);
}

/// Its documentation says for years that such a value defers to the pod.
#[test]
fn negative_eviction_grace_period_is_accepted() {
    let text = "evictionSoft: {memory.available: 200Mi}\nevictionSoftGracePeriod: {memory.available: 1m}\n\
                evictionMaxPodGracePeriod: -1\n";
    assert_eq!(load_body(text, &[]).unwrap().config.eviction_max_pod_grace_period, -1);
}

#[test]
fn all_problems_are_reported_with_file_and_line() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let file = write(
        root,
        "main.yaml",
        format!(
            "{HEAD}maxPods: lots\nmaxPod: 3\nimageGCLowThresholdPercent: 90\nauthentication:\n  anonymous:\n    enable: true\nsyncFrequency: 10\nfeatureGates:\n  Nonsense: true\n"
        ),
    );
    write(root, "d/a.conf", format!("{HEAD}port: 70000\n"));
    write(root, "d/b.conf", "port: 1\n");
    write(root, "d/c.conf", "");
    write(root, "d/d.conf", format!("{HEAD}port: 1\nport: 2\n"));
    let request = LoadRequest {
        file: Some(file),
        drop_ins: Some(root.join("d")),
        overrides: flags(&[("oomScoreAdj", json!(5000))]),
        ..LoadRequest::default()
    };
    let found: Vec<String> = load(&request)
        .unwrap_err()
        .iter()
        .map(|problem| problem.to_string().replace(&format!("{}/", root.display()), ""))
        .collect();
    for expected in [
        "main.yaml:3: maxPods: must be a whole number, not the string \"lots\"",
        "main.yaml:4: maxPod: unknown field; did you mean maxPods?",
        "main.yaml:8: authentication.anonymous.enable: unknown field; did you mean authentication.anonymous.enabled?",
        "main.yaml:9: syncFrequency: must be a duration string such as 20s or 1m30s, not the number 10",
        "d/b.conf:1: apiVersion: is missing; want kubelet.config.k8s.io/v1beta1",
        "d/b.conf:1: kind: is missing; want KubeletConfiguration",
        "d/c.conf: is empty; want apiVersion: kubelet.config.k8s.io/v1beta1 and kind: KubeletConfiguration",
        "d/d.conf:4: port: key \"port\" appears twice in one mapping, in lines 3 and 4: remove one",
        "main.yaml:11: featureGates[Nonsense]: unrecognized feature gate: Nonsense",
        "main.yaml:5: imageGCLowThresholdPercent: 90 must be less than imageGCHighThresholdPercent 85",
        "--oomScoreAdj: oomScoreAdj: 5000 must be between -1000 and 1000, inclusive",
    ] {
        assert!(found.iter().any(|found| found == expected), "{expected} is not in\n{}", found.join("\n"));
    }
    assert_eq!(found.len(), 11, "{found:#?}");
}

#[test]
fn unusable_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    write(root, "two", format!("{HEAD}---\n{HEAD}"));
    write(root, "list", "- a\n");
    write(root, "binary", b"\x00\xff\xfe");
    write(root, "wrong", HEAD.replace("v1beta1", "v1"));
    std::fs::File::create(root.join("huge")).unwrap().set_len(20 << 20).unwrap();
    for (name, words) in [
        ("two", "more than one document"),
        ("list", "must be an object"),
        ("binary", "UTF-8"),
        ("wrong", "want kubelet.config.k8s.io/v1beta1, not the string"),
        ("huge", "larger than"),
        ("missing", "cannot be read"),
        (".", "not a regular file"),
    ] {
        let problems =
            load(&LoadRequest { file: Some(root.join(name)), ..LoadRequest::default() }).unwrap_err();
        assert!(problems.iter().any(|problem| problem.to_string().contains(words)), "{name}: {problems:?}");
    }
    let problems =
        load(&LoadRequest { drop_ins: Some(root.join("missing")), ..LoadRequest::default() }).unwrap_err();
    assert!(problems[0].to_string().contains("cannot be listed"));
}

/// Each body violates one rule; the message names the field.
#[test]
fn every_rule_is_enforced() {
    for (body, field) in [
        ("nodeLeaseDurationSeconds: -1", "nodeLeaseDurationSeconds"),
        ("eventBurst: -1", "eventBurst"),
        ("eventRecordQPS: -1", "eventRecordQPS"),
        ("kubeAPIBurst: -1", "kubeAPIBurst"),
        ("kubeAPIQPS: -1", "kubeAPIQPS"),
        ("maxPods: -1", "maxPods"),
        ("podsPerCore: -1", "podsPerCore"),
        ("registryBurst: -1", "registryBurst"),
        ("registryPullQPS: -1", "registryPullQPS"),
        ("maxOpenFiles: -1", "maxOpenFiles"),
        ("healthzPort: 65536", "healthzPort"),
        ("port: -1", "port"),
        ("readOnlyPort: 70000", "readOnlyPort"),
        ("imageGCHighThresholdPercent: 101", "imageGCHighThresholdPercent"),
        ("imageGCLowThresholdPercent: -1", "imageGCLowThresholdPercent"),
        ("imageGCLowThresholdPercent: 85", "imageGCLowThresholdPercent"),
        ("iptablesDropBit: 32", "iptablesDropBit"),
        ("iptablesMasqueradeBit: -1", "iptablesMasqueradeBit"),
        ("oomScoreAdj: -1001", "oomScoreAdj"),
        ("tracing: {samplingRatePerMillion: 1000001}", "tracing.samplingRatePerMillion"),
        ("tracing: {samplingRatePerMillion: -1}", "tracing.samplingRatePerMillion"),
        ("tracing: {endpoint: \"http://collector:4317\"}", "tracing.endpoint"),
        ("nodeStatusMaxImages: -2", "nodeStatusMaxImages"),
        ("memoryThrottlingFactor: 1.1\nfeatureGates: {MemoryQoS: true}", "memoryThrottlingFactor"),
        ("memoryThrottlingFactor: 0\nfeatureGates: {MemoryQoS: true}", "memoryThrottlingFactor"),
        ("memoryThrottlingFactor: 0.8\nfeatureGates: {MemoryQoS: false}", "memoryThrottlingFactor"),
        ("userNamespaces: {idsPerPod: 65537}", "userNamespaces.idsPerPod"),
        ("userNamespaces: {idsPerPod: 0}", "userNamespaces.idsPerPod"),
        ("logging: {verbosity: -1}", "logging.verbosity"),
        ("logging: {format: xml}", "logging.format"),
        ("logging: {format: json}\nfeatureGates: {LoggingBetaOptions: false}", "logging.format"),
        ("logging: {format: json, vmodule: [{filePattern: a, verbosity: 1}]}", "logging.vmodule"),
        ("logging: {vmodule: [{filePattern: \"a=b\", verbosity: 1}]}", "logging.vmodule[0]"),
        ("logging: {vmodule: [{filePattern: a, verbosity: -1}]}", "logging.vmodule[0]"),
        ("logging: {flushFrequency: -1s}", "logging.flushFrequency"),
        ("logging: {options: {text: {splitStream: true}}}", "logging.options.text.splitStream"),
        ("logging: {options: {json: {infoBufferSize: 1Ki}}}", "logging.options.json.infoBufferSize"),
        ("defaultPodSysctls: {net.core.somaxconn: \"1\"}", "defaultPodSysctls"),
        (
            "defaultPodSysctls: {vm.swappiness: \"1\"}\nfeatureGates: {DefaultPodSysctls: true}",
            "defaultPodSysctls[vm.swappiness]",
        ),
        (
            "defaultPodSysctls: {kernel.shm_next_id: \"1\"}\nfeatureGates: {DefaultPodSysctls: true}",
            "defaultPodSysctls[kernel.shm_next_id]",
        ),
        (
            "defaultPodSysctls: {\"net.*\": \"1\"}\nfeatureGates: {DefaultPodSysctls: true}",
            "defaultPodSysctls[net.*]",
        ),
        (
            "defaultPodSysctls: {net.core.somaxconn: \"1\", net/core/somaxconn: \"2\"}\nfeatureGates: {DefaultPodSysctls: true}",
            "defaultPodSysctls[net/core/somaxconn]",
        ),
        ("syncFrequency: -1s", "syncFrequency"),
        ("fileCheckFrequency: -1s", "fileCheckFrequency"),
        ("httpCheckFrequency: -1s", "httpCheckFrequency"),
        ("runtimeRequestTimeout: -1s", "runtimeRequestTimeout"),
        ("nodeStatusUpdateFrequency: -1s\nnodeStatusReportFrequency: 1s", "nodeStatusUpdateFrequency"),
        ("cpuManagerReconcilePeriod: -1s", "cpuManagerReconcilePeriod"),
        ("authentication: {webhook: {cacheTTL: -1s}}", "authentication.webhook.cacheTTL"),
        ("evictionPressureTransitionPeriod: -1s", "evictionPressureTransitionPeriod"),
        ("imageMinimumGCAge: -1s", "imageMinimumGCAge"),
        ("imageMaximumGCAge: -1s", "imageMaximumGCAge"),
        ("imageMaximumGCAge: 2m", "imageMaximumGCAge"),
        ("cpuCFSQuotaPeriod: 2s", "cpuCFSQuotaPeriod"),
        ("cpuCFSQuotaPeriod: 100us", "cpuCFSQuotaPeriod"),
        ("crashLoopBackOff: {maxContainerRestartPeriod: 301s}", "crashLoopBackOff.maxContainerRestartPeriod"),
        ("crashLoopBackOff: {maxContainerRestartPeriod: 0s}", "crashLoopBackOff.maxContainerRestartPeriod"),
        (
            "crashLoopBackOff: {maxContainerRestartPeriod: 10s}\nfeatureGates: {KubeletCrashLoopBackOffMax: false}",
            "crashLoopBackOff.maxContainerRestartPeriod",
        ),
        ("cgroupDriver: other", "cgroupDriver"),
        ("cpuManagerPolicy: dynamic", "cpuManagerPolicy"),
        ("cpuManagerPolicyOptions: {x: y}", "cpuManagerPolicyOptions[x]"),
        ("memoryManagerPolicy: static", "memoryManagerPolicy"),
        ("topologyManagerPolicy: x", "topologyManagerPolicy"),
        ("topologyManagerScope: x", "topologyManagerScope"),
        ("topologyManagerPolicyOptions: {x: y}", "topologyManagerPolicyOptions[x]"),
        ("hairpinMode: x", "hairpinMode"),
        ("authorization: {mode: RBAC}", "authorization.mode"),
        ("memorySwap: {swapBehavior: UnlimitedSwap}", "memorySwap.swapBehavior"),
        ("configMapAndSecretChangeDetectionStrategy: x", "configMapAndSecretChangeDetectionStrategy"),
        ("memoryReservationPolicy: x", "memoryReservationPolicy"),
        (
            "memoryReservationPolicy: TieredReservation\nfeatureGates: {MemoryQoS: false}",
            "memoryReservationPolicy",
        ),
        ("tlsMinVersion: TLS1.2", "tlsMinVersion"),
        ("tlsCipherSuites: [x]", "tlsCipherSuites[0]"),
        ("tlsCertFile: /x", "tlsCertFile"),
        ("runOnce: true", "runOnce"),
        (
            "serverTLSBootstrap: true\nfeatureGates: {RotateKubeletServerCertificate: false}",
            "serverTLSBootstrap",
        ),
        ("address: localhost", "address"),
        ("healthzBindAddress: localhost", "healthzBindAddress"),
        ("clusterDNS: [10.0.0.1, x]", "clusterDNS[1]"),
        ("staticPodURL: ftp://x", "staticPodURL"),
        ("staticPodURLHeader: {\"a b\": [c]}", "staticPodURLHeader"),
        ("podCIDR: 10.0.0.0/33", "podCIDR"),
        ("podCIDR: 10.0.0.0/+8", "podCIDR"),
        ("containerRuntimeEndpoint: tcp://x", "containerRuntimeEndpoint"),
        ("imageServiceEndpoint: x", "imageServiceEndpoint"),
        ("showHiddenMetricsForVersion: \"1.20\"", "showHiddenMetricsForVersion"),
        ("showHiddenMetricsForVersion: \"1.37\"", "showHiddenMetricsForVersion"),
        ("showHiddenMetricsForVersion: \"2.36\"", "showHiddenMetricsForVersion"),
        ("maxParallelImagePulls: 0", "maxParallelImagePulls"),
        ("maxParallelImagePulls: 2\nserializeImagePulls: true", "maxParallelImagePulls"),
        ("imagePullCredentialsVerificationPolicy: x", "imagePullCredentialsVerificationPolicy"),
        ("preloadedImagesVerificationAllowlist: [x]", "preloadedImagesVerificationAllowlist"),
        (
            "imagePullCredentialsVerificationPolicy: NeverVerify\nfeatureGates: {KubeletEnsureSecretPulledImages: false}",
            "imagePullCredentialsVerificationPolicy",
        ),
        ("evictionHard: {memory.free: 1Gi}", "evictionHard[memory.free]"),
        ("evictionHard: {memory.available: 101%}", "evictionHard[memory.available]"),
        ("evictionHard: {memory.available: lots}", "evictionHard[memory.available]"),
        ("evictionHard: {memory.available: -1Gi}", "evictionHard[memory.available]"),
        ("evictionSoft: {memory.available: 1Gi}", "evictionSoft[memory.available]"),
        ("evictionSoftGracePeriod: {memory.available: 1}", "evictionSoftGracePeriod[memory.available]"),
        ("evictionSoftGracePeriod: {memory.available: -1s}", "evictionSoftGracePeriod[memory.available]"),
        ("evictionMinimumReclaim: {x: 1Gi}", "evictionMinimumReclaim[x]"),
        ("systemReserved: {gpu: \"1\"}", "systemReserved[gpu]"),
        ("kubeReserved: {cpu: x}", "kubeReserved[cpu]"),
        ("kubeReserved: {cpu: \"-1\"}", "kubeReserved[cpu]"),
        ("qosReserved: {memory: 50%}", "qosReserved"),
        ("qosReserved: {cpu: 50%}\nfeatureGates: {QOSReserved: true}", "qosReserved[cpu]"),
        ("reservedSystemCPUs: 3-1", "reservedSystemCPUs"),
        ("reservedSystemCPUs: \"0\"\nkubeReservedCgroup: /x", "reservedSystemCPUs"),
        ("reservedMemory: [{numaNode: -1, limits: {memory: 1Gi}}]", "reservedMemory[0]"),
        ("reservedMemory: [{numaNode: 0}]", "reservedMemory[0]"),
        ("reservedMemory: [{numaNode: 0, limits: {cpu: 1}}]", "reservedMemory[0].limits[cpu]"),
        ("reservedMemory: [{numaNode: 0, limits: {memory: 0}}]", "reservedMemory[0].limits[memory]"),
        (
            "reservedMemory: [{numaNode: 0, limits: {memory: 1}}, {numaNode: 0, limits: {memory: 1}}]",
            "reservedMemory[1].limits[memory]",
        ),
        ("systemCgroups: /x", "systemCgroups"),
        ("enforceNodeAllocatable: [x]", "enforceNodeAllocatable"),
        ("enforceNodeAllocatable: [none, pods]", "enforceNodeAllocatable"),
        ("enforceNodeAllocatable: [pods, pods]", "enforceNodeAllocatable"),
        (
            "enforceNodeAllocatable: [kube-reserved, kube-reserved-compressible]\nkubeReservedCgroup: /x",
            "enforceNodeAllocatable",
        ),
        ("enforceNodeAllocatable: [system-reserved]", "systemReservedCgroup"),
        ("enforceNodeAllocatable: [kube-reserved]", "kubeReservedCgroup"),
        ("cgroupsPerQOS: false", "cgroupsPerQOS"),
        ("shutdownGracePeriodCriticalPods: 1s", "shutdownGracePeriodCriticalPods"),
        ("shutdownGracePeriod: 500ms", "shutdownGracePeriod"),
        (
            "shutdownGracePeriod: 5s\nfeatureGates: {GracefulNodeShutdown: false, GracefulNodeShutdownBasedOnPodPriority: false, WindowsGracefulNodeShutdown: false}",
            "shutdownGracePeriod",
        ),
        (
            "shutdownGracePeriod: 5s\nshutdownGracePeriodByPodPriority: [{priority: 1, shutdownGracePeriodSeconds: 1}]",
            "shutdownGracePeriodByPodPriority",
        ),
        (
            "shutdownGracePeriodByPodPriority: [{priority: 1, shutdownGracePeriodSeconds: -1}]",
            "shutdownGracePeriodByPodPriority[0]",
        ),
        (
            "shutdownGracePeriodByPodPriority: [{priority: 1}]\nfeatureGates: {GracefulNodeShutdownBasedOnPodPriority: false}",
            "shutdownGracePeriodByPodPriority",
        ),
        ("containerLogMaxWorkers: 0", "containerLogMaxWorkers"),
        ("containerLogMonitorInterval: 2s", "containerLogMonitorInterval"),
        ("containerLogMaxFiles: 1", "containerLogMaxFiles"),
        ("containerLogMaxSize: big", "containerLogMaxSize"),
        ("containerLogMaxSize: \"-1\"", "containerLogMaxSize"),
        ("podLogsDir: /var//log", "podLogsDir"),
        ("podLogsDir: /var/lög", "podLogsDir"),
        ("enableSystemLogQuery: true\nenableSystemLogHandler: false", "enableSystemLogQuery"),
        ("registerWithTaints: [{key: \"a b\", effect: NoExecute}]", "registerWithTaints[0].key"),
        ("registerWithTaints: [{key: a, value: \"b c\", effect: NoExecute}]", "registerWithTaints[0].value"),
        ("registerWithTaints: [{key: a, effect: Never}]", "registerWithTaints[0].effect"),
        (
            "registerWithTaints: [{key: a, effect: NoExecute, timeAdded: \"2026-01-01T00:00:00Z\"}]",
            "registerWithTaints[0].timeAdded",
        ),
        ("allowedUnsafeSysctls: [kernel.panic]", "allowedUnsafeSysctls[0]"),
        ("allowedUnsafeSysctls: [\"net.*\", \"*\"]", "allowedUnsafeSysctls[1]"),
        ("featureGates: {SidecarContainer: false}", "featureGates[SidecarContainer]"),
    ] {
        let problems = load_body(&format!("{body}\n"), &[]).expect_err(body);
        assert!(problems.iter().all(|problem| problem.field == field), "{body}: {problems:?}");
    }
    // Only flags can violate these rules: files cannot set empty values, zero or relative paths.
    for (path, value) in [
        ("containerRuntimeEndpoint", json!("")),
        ("syncFrequency", json!("0s")),
        ("port", json!(0)),
        ("podLogsDir", json!("relative")),
        ("nodeLeaseDurationSeconds", json!(0)),
    ] {
        let problems = load_body("", &[(path, value)]).expect_err(path);
        assert!(problems.iter().all(|problem| problem.place == format!("--{path}")), "{problems:?}");
    }
}

#[test]
fn configuration_with_many_fields_is_accepted() {
    let loaded = load_body(RICH, &[]).unwrap_or_else(|problems| panic!("{problems:#?}"));
    let config = &loaded.config;
    assert_eq!(config.shutdown_grace_period_by_pod_priority.len(), 2);
    assert_eq!(config.reserved_memory[0].limits.len(), 2);
    assert_eq!(config.register_with_taints[0].key, "dedicated");
    assert_eq!(config.logging.flush_frequency, GoDuration::from_secs(7));
    assert_eq!(config.user_namespaces.ids_per_pod, Some(131_072));
    let tracing = config.tracing.as_ref().unwrap();
    assert_eq!(tracing.endpoint.as_deref(), Some("localhost:4317"));
    assert_eq!(tracing.sampling_rate_per_million, Some(100));
    assert_eq!(config.static_pod_url_header["X-A"], ["b", "c"]);
    assert!(!config.serialize_image_pulls);
}

#[test]
fn tracing_is_on_only_if_its_object_is_there() {
    let tracing = |body: &str| load_body(body, &[]).unwrap().config.tracing;
    assert_eq!((tracing(""), tracing("tracing: null")), (None, None));
    assert_eq!(tracing("tracing: {}"), Some(Tracing::default()));
    assert_eq!(tracing("tracing: {samplingRatePerMillion: 0}").unwrap().sampling_rate_per_million, Some(0));
}

const RICH: &str = r#"
staticPodPath: /etc/kubernetes/manifests
staticPodURL: https://example.com/pods
staticPodURLHeader: {X-A: [b, c]}
authentication: {anonymous: {enabled: false}, webhook: {enabled: true, cacheTTL: 0s}, x509: {clientCAFile: /pki/ca.crt}}
authorization: {mode: Webhook, webhook: {cacheAuthorizedTTL: 0s, cacheUnauthorizedTTL: 0s}}
tlsCurvePreferences: [29, 23]
tlsCipherSuites: [TLS_AES_128_GCM_SHA256]
clusterDNS: [10.96.0.10, "fd00::a"]
clusterDomain: cluster.local
maxParallelImagePulls: 5
evictionHard: {memory.available: 5%, nodefs.available: 1Gi}
evictionSoft: {memory.available: 10%}
evictionSoftGracePeriod: {memory.available: 1m30s}
evictionMinimumReclaim: {nodefs.available: 500Mi}
mergeDefaultEvictionSettings: true
memorySwap: {swapBehavior: LimitedSwap}
failSwapOn: off
featureGates: {AllAlpha: false, SidecarContainers: true, LoggingAlphaOptions: true, DefaultPodSysctls: true}
defaultPodSysctls: {net.core.somaxconn: "1024", kernel.shmmax: "1"}
systemReserved: {cpu: 100m, memory: 1Gi, pid: "1000"}
reservedSystemCPUs: 0,2-3
allowedUnsafeSysctls: [net.core.somaxconn, "kernel.msg*"]
logging: {format: json, flushFrequency: 7000000000, verbosity: 3, options: {json: {infoBufferSize: 4Ki, splitStream: true}}}
shutdownGracePeriodByPodPriority:
- {priority: 100000, shutdownGracePeriodSeconds: 10}
- {priority: 0, shutdownGracePeriodSeconds: 60}
crashLoopBackOff: {maxContainerRestartPeriod: 10s}
reservedMemory: [{numaNode: 0, limits: {memory: 1100Mi, hugepages-2Mi: 0x10}}]
registerWithTaints: [{key: dedicated, value: x, effect: NoSchedule}]
tracing: {endpoint: "localhost:4317", samplingRatePerMillion: 100}
userNamespaces: {idsPerPod: 131072}
topologyManagerPolicyOptions: {prefer-closest-numa-nodes: "true"}
"#;

/// Texts for mutations, with a meaning in YAML or in the configuration.
const FRAGMENTS: &[&str] = &[
    "\n",
    " ",
    ":",
    ": ",
    "-",
    "- ",
    "{",
    "}",
    "[",
    "]",
    "&a ",
    "*a",
    "!!int ",
    "<<: ",
    "|",
    ">",
    "'",
    "\"",
    "#",
    "---\n",
    "...\n",
    "~",
    "null",
    "true",
    "0",
    "-1",
    "1e309",
    "9223372036854775808",
    "\t",
    "\u{0}",
    "\u{feff}",
    "ü",
    "%",
    ",",
    "maxPods",
    "evictionHard",
    "1h",
    "0s",
    "-5m",
    "100%",
    "featureGates",
    "? ",
    "\\",
    "\r\n",
    "\u{2028}",
    "!<x>",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a file contains, loading returns a configuration or problems.
    #[test]
    fn mutated_config_files_never_panic(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), 0_usize..12, 0_usize..FRAGMENTS.len() + 2), 1..6),
        raw in any::<u8>(),
        from in 0_usize..40,
        many in 1_usize..10,
    ) {
        // The text is a few lines of RICH, so that cases are short and changes close together.
        let window: String = RICH.lines().skip(from).take(many).map(|line| format!("{line}\n")).collect();
        let mut bytes = format!("{HEAD}{window}").into_bytes();
        for (position, cut, fragment) in edits {
            let start = position.index(bytes.len().max(1)).min(bytes.len());
            let end = (start + cut).min(bytes.len());
            let piece = match FRAGMENTS.get(fragment) {
                Some(text) => text.as_bytes().to_vec(),
                None if fragment == FRAGMENTS.len() => vec![raw],
                None => bytes[start.saturating_sub(20)..end].to_vec(),
            };
            bytes.splice(start..end, piece);
        }
        match load::load_bytes(&bytes) {
            Ok(loaded) => prop_assert!(loaded.to_yaml().contains("kind: KubeletConfiguration")),
            Err(problems) => prop_assert!(problems.iter().all(|problem| !problem.message.is_empty())),
        }
    }
}
