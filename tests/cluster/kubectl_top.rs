//! `kubectl top` and the resource metrics API: the metrics-server reads the node's numbers with
//! the rights of its account, and the API server passes its answers on.

use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, directory, pod, served, text};
use crate::support::control_plane::{ControlPlane, ControlPlaneOptions};
use crate::support::launch::merged;
use crate::support::node::{FOREVER, busybox};
use crate::support::process_usage::cpu_time;
use crate::support::wait::{pause, wait_for, wait_until};

/// The network namespace is ours alone.
const PORT: u16 = 13_443;

/// A rate needs two readings, ten seconds apart.
const RATES: Duration = Duration::from_secs(240);

/// Runs as long as it is in scope.
struct MetricsServer(Child);

impl Drop for MetricsServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn account(kind: &str, api: &str, name: &str, role: (&str, &str)) -> Value {
    json!({
        "apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": "kube-system"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": role.0, "name": role.1},
        "subjects": [{"kind": "ServiceAccount", "name": "metrics-server", "namespace": "kube-system"}],
    })
}

/// The objects of its manifests, without the pod: the program runs here.
fn install(plane: &ControlPlane) {
    let rbac = "rbac.authorization.k8s.io/v1";
    for object in [
        json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": "metrics-server", "namespace": "kube-system"}}),
        json!({"apiVersion": rbac, "kind": "ClusterRole", "metadata": {"name": "system:metrics-server"},
        "rules": [
            {"apiGroups": [""], "resources": ["nodes/metrics"], "verbs": ["get"]},
            {"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["get", "list", "watch"]},
        ]}),
        account(
            "ClusterRoleBinding",
            rbac,
            "system:metrics-server",
            ("ClusterRole", "system:metrics-server"),
        ),
        account(
            "ClusterRoleBinding",
            rbac,
            "metrics-server:auth-delegator",
            ("ClusterRole", "system:auth-delegator"),
        ),
        account(
            "RoleBinding",
            rbac,
            "metrics-server-auth-reader",
            ("Role", "extension-apiserver-authentication-reader"),
        ),
        json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "metrics-server", "namespace": "kube-system"},
            "spec": {"type": "ExternalName", "externalName": "localhost"}}),
        json!({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
        "metadata": {"name": "v1beta1.metrics.k8s.io"},
        "spec": {
            "service": {"name": "metrics-server", "namespace": "kube-system", "port": PORT},
            "group": "metrics.k8s.io", "version": "v1beta1", "insecureSkipTLSVerify": true,
            "groupPriorityMinimum": 100, "versionPriority": 100,
        }}),
    ] {
        plane.apply(&object);
    }
}

fn start(plane: &ControlPlane) -> MetricsServer {
    let token = plane.kubectl(&["create", "token", "metrics-server", "-n", "kube-system"]);
    let text = fs::read_to_string(plane.admin_kubeconfig()).expect("a kubeconfig");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    config["users"][0]["user"] = json!({"token": token.trim()});
    let path = plane.dir().join("metrics-server.kubeconfig");
    fs::write(&path, config.to_string()).expect("it can be written");
    let flag = |name: &str, value: String| format!("--{name}={value}");
    let kubeconfig = path.display().to_string();
    let log = File::create(plane.dir().join("logs/metrics-server.log")).expect("a log file");
    let mut command = Command::new(plane.bin().join("metrics-server"));
    command
        .arg(flag("kubeconfig", kubeconfig.clone()))
        .arg(flag("authentication-kubeconfig", kubeconfig.clone()))
        .arg(flag("authorization-kubeconfig", kubeconfig))
        .arg(flag("secure-port", PORT.to_string()))
        .arg(flag("cert-dir", plane.dir().join("metrics-server").display().to_string()))
        .arg(flag("kubelet-certificate-authority", plane.dir().join("pki/ca.crt").display().to_string()))
        .args(["--kubelet-preferred-address-types=InternalIP", "--kubelet-use-node-status-port"])
        .args(["--metric-resolution=10s", "--kubelet-request-timeout=8s"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    MetricsServer(command.spawn().expect("the metrics-server starts"))
}

/// `250m` or `32Mi`, without the unit.
fn amount(text: &str, unit: &str) -> Option<u64> {
    text.strip_suffix(unit)?.parse().ok()
}

/// The CPU use of a process in thousandths of a processor: on a busy machine it may be below its
/// limit.
struct CpuSamples {
    pid: u32,
    last: (Instant, Duration),
    seen: Vec<(Instant, u64)>,
}

impl CpuSamples {
    fn new(pid: u32) -> CpuSamples {
        CpuSamples { pid, last: (Instant::now(), cpu_time(pid)), seen: Vec::new() }
    }

    /// Adds the CPU time since the last sample.
    fn measure(&mut self) {
        let now = (Instant::now(), cpu_time(self.pid));
        let (passed, used) = (now.0.duration_since(self.last.0), now.1.saturating_sub(self.last.1));
        let part = used.as_millis() * 1000 / passed.as_millis().max(1);
        self.seen.push((now.0, u64::try_from(part).unwrap_or(0)));
        self.last = now;
    }

    /// A rate over some part of the last minute cannot be less than this, a quarter for the clocks.
    fn least(&self) -> u64 {
        let recent = self.seen.iter().filter(|(time, _)| time.elapsed() < Duration::from_secs(60));
        (recent.map(|(_, part)| *part).min().unwrap_or(0) * 3 / 4).max(1)
    }
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn kubectl_top_shows_usage_of_nodes_and_pods() {
    let plane = ControlPlane::start_with(
        &directory("tops"),
        &ControlPlaneOptions { scheduler: false, ..ControlPlaneOptions::default() },
    );
    plane.wait(&["serviceaccount", "default"], "made", LIMIT, |_| true);
    plane.wait(&["configmap", "kube-root-ca.crt"], "made", LIMIT, |_| true);
    let config = merged(served(&plane), json!({"serverTLSBootstrap": true}));
    let joined = JoinedNode::prepare(&plane, "topped", config).start_and_wait();
    // The node has a serving certificate that the metrics-server can verify.
    let wanted = wait_for("a request for a serving certificate", LIMIT, || {
        let list = plane.poll(&["csr"])?;
        let all = list["items"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|csr| text(csr, "/spec/signerName") == "kubernetes.io/kubelet-serving")
    });
    plane.kubectl(&["certificate", "approve", text(&wanted, "/metadata/name")]);

    let mut busy = busybox("spins", "trap 'exit 0' TERM; while :; do :; done");
    busy["resources"] = json!({"limits": {"cpu": "200m", "memory": "32Mi"}});
    joined.bind(&pod("busy", json!([busy, busybox("rests", FOREVER)])));
    let mut holds = busybox("main", &format!("head -c 33554432 /dev/zero > /dev/shm/held; {FOREVER}"));
    holds["resources"] = json!({"limits": {"cpu": "1", "memory": "64Mi"}});
    joined.bind(&pod("holds", json!([holds])));
    let ready = joined.wait_ready("busy");
    joined.wait_ready("holds");
    let statuses = ready["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
    let spinning = statuses.iter().find(|status| status["name"] == "spins").expect("it runs");
    let id = text(spinning, "/containerID").trim_start_matches("containerd://");
    let mut share = CpuSamples::new(joined.node.process(id));
    install(&plane);
    let server = start(&plane);

    let top = |args: &[&str]| -> Option<Vec<Vec<String>>> {
        let output = plane.try_kubectl(&[&["top"], args, &["--no-headers"]].concat(), "");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
        output.status.success().then(|| text.lines().map(words).collect())
    };
    let log = || fs::read_to_string(plane.dir().join("logs/metrics-server.log")).unwrap_or_default();
    let begun = Instant::now();
    let (spins, rests, main) = loop {
        let rows = top(&["pod", "--containers"]).unwrap_or_default();
        let find = |pod: &str, name: &str| {
            let row = rows.iter().find(|row| row[0] == pod && row[1] == name)?;
            Some((amount(&row[2], "m")?, amount(&row[3], "Mi")?))
        };
        share.measure();
        let found = (find("busy", "spins"), find("busy", "rests"), find("holds", "main"));
        // The first rate covers the time of the start.
        if let (Some(spins), Some(rests), Some(main)) = found
            && (share.least()..=260).contains(&spins.0)
            && main.0 < 20
            && rests.0 < 20
        {
            assert_eq!(rows.len(), 3, "{rows:?}");
            break (spins, rests, main);
        }
        let (waited, least) = (begun.elapsed(), share.least());
        assert!(waited < RATES, "{rows:?}, spinning with {least}m at least: {}", log());
        pause(Duration::from_secs(1));
    };
    assert!(spins.1 < 8 && (32..=40).contains(&main.1), "{spins:?} {rests:?} {main:?}");
    // A late sample is missing until the next one.
    wait_until("the pod with the usage of its containers", RATES, || {
        share.measure();
        let pods = top(&["pod", "busy"]).unwrap_or_default();
        let used = pods.first().and_then(|row| amount(row.get(1)?, "m"));
        used.is_some_and(|used| (share.least()..=280).contains(&used))
    });

    // The node has at least what its pods use, and what its own summary says: that is newer, and
    // whatever else the machine does may have changed it.
    let raw = |path: &str| -> Option<Value> {
        let output = plane.try_kubectl(&["get", "--raw", path], "");
        output.status.success().then(|| serde_json::from_slice(&output.stdout).expect("JSON"))
    };
    wait_for("the node with the numbers of its summary", RATES, || {
        share.measure();
        let nodes = top(&["node"])?;
        let summary = raw("/api/v1/nodes/topped/proxy/stats/summary")?;
        let own = summary["node"]["memory"]["workingSetBytes"].as_u64().expect("a number") >> 20;
        eprintln!("{nodes:?} and {own}");
        let [name, cores, busy, memory, part] = &nodes.first()?[..] else { return None };
        assert_eq!((name.as_str(), nodes.len()), ("topped", 1));
        let shown = amount(memory, "Mi")?;
        let used = amount(cores, "m")? >= share.least() && amount(busy, "%")? > 0 && amount(part, "%")? > 0;
        (used && shown.abs_diff(own) < own / 4).then_some(())
    });
    // As an autoscaler reads it: a rate over the time between two samples.
    wait_for("the numbers of an autoscaler", RATES, || {
        let read = raw("/apis/metrics.k8s.io/v1beta1/namespaces/default/pods/busy")?;
        let whole = read["containers"].as_array().map(Vec::len) == Some(2);
        (whole && text(&read, "/window").ends_with('s')).then_some(())
    });
    drop(server);
    plane.kubectl(&["delete", "apiservice", "v1beta1.metrics.k8s.io"]);
    joined.finish(&["busy", "holds"]);
}
