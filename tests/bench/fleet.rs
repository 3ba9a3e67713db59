//! What many nodes cost one API server: agents with fake runtimes, one process each, as nodes of a whole
//! control plane on this machine. A relay between each agent and the API server counts connections and
//! bytes; the audit log of the API server has the requests of the nodes; its metrics have the watches.
//!
//! docs/fleet.md explains the figures, and how those of larger clusters follow from them.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use coracle::kube::client::Client;
use coracle::kube::target::{GroupVersion, Target};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

use crate::fake_agent::{FakeAgent, Program, has_condition, list, wait_all_ready};
use crate::process::{cpu_seconds, memory};
use crate::registered::{administrator, manifest};
use crate::requests::{
    NodeRequest, between, by_kind, by_second, first_of_each, node_requests, number, ratio,
};
use crate::results::Results;
use crate::support::control_plane::{API_SERVER, ControlPlane, ETCD};
use crate::support::exposition::Exposition;
use crate::support::relay::Relay;
use crate::support::wait::{pause, wait_for, wait_until};

/// A part of the measurement that takes longer has failed: many agents share the processors.
const LIMIT: Duration = Duration::from_secs(600);
/// The control plane without nodes.
const ALONE: Duration = Duration::from_secs(20);
/// Requests that belong to the start of the agents.
const SETTLE: Duration = Duration::from_secs(45);
/// At rest without pods, and later with pods.
const REST: Duration = Duration::from_secs(60);
const REST_WITH_PODS: Duration = Duration::from_secs(120);
/// The last events and statuses of what was done.
const AFTER: Duration = Duration::from_secs(8);
/// An outage, and the time after it that is measured.
const MINUTE: Duration = Duration::from_secs(60);
/// Longer than the run.
const RUN: Duration = Duration::from_secs(24 * 3600);
/// The life of the client certificates that are renewed. Seven tenths of it are longer than the start of
/// the agents and [`SETTLE`], and all of it is shorter than a watch.
const LIFE: Duration = Duration::from_secs(240);
/// How exact the time is at which a file has changed.
const STEP: Duration = Duration::from_millis(20);
/// Pods of each node.
const PODS: usize = 3;
/// The ConfigMap of all pods, and the name of its only key.
const SETTINGS: &str = "fleet-settings";
const KEY: &str = "value";
const POD_LABEL: &str = "fleet=life";
const DAEMON_LABEL: &str = "fleet=daemon";
/// Requests for certificates.
const CERTIFICATES: &str = "certificatesigningrequests";

/// The daemons whose memory and processor time are measured.
const DAEMONS: [(&str, &str); 2] = [(API_SERVER, "API server"), (ETCD, "etcd")];

/// All measures of one program.
pub fn measure(
    results: &mut Results,
    subject: &'static str,
    program: Program<'_>,
    nodes: usize,
    base: &Path,
) {
    raise_descriptor_limit();
    let plane = ControlPlane::start(&base.join("plane"));
    let mut fleet = Fleet::start(results, subject, program, nodes, &plane, base);
    step("at rest without pods");
    pause(SETTLE);
    let rest = fleet.rest(results, "no pods", REST);
    step("start of pods");
    fleet.start_pods(results, &rest);
    let label = format!("{PODS} pods");
    step("at rest with pods");
    let rest_with_pods = fleet.rest(results, &label, REST_WITH_PODS);
    step("edit of the ConfigMap");
    fleet.edit_settings(results, &rest_with_pods);
    step("removal of pods");
    fleet.remove_pods(results, &rest);
    step("DaemonSet");
    fleet.roll_out(results, &rest);
    // The nodes have no pods now, as at the first rest.
    step("a minute without the network");
    fleet.relay.set_silent(true);
    pause(MINUTE);
    let back = SystemTime::now();
    fleet.relay.set_silent(false);
    fleet.measure_return(results, "after a minute without the network", back, &rest);
    step("restart of the API server");
    plane.stop(API_SERVER);
    // The agents reach it before it counts as ready.
    let back = SystemTime::now();
    plane.resume(API_SERVER);
    fleet.measure_return(results, "after a restart of the API server", back, &rest);
    // The Go kubelet replaces a certificate of its kubeconfig at its start, whatever the life of that is.
    if !program.is_go_kubelet {
        step("new client certificates");
        fleet.renew_certificates(results, program, base, &rest);
    }
}

fn step(what: &str) {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    eprintln!("==> {what}; load average {}", load.trim());
}

/// The relay has two descriptors for each connection of each agent.
fn raise_descriptor_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    raised.expect("the limit of descriptors can be raised to its maximum");
}

/// What the daemons have used.
struct DaemonUsage {
    time: Instant,
    /// Seconds, in the order of [`DAEMONS`].
    cpu: [f64; 2],
    /// MiB.
    resident: [f64; 2],
}

impl DaemonUsage {
    fn read(plane: &ControlPlane) -> DaemonUsage {
        let pids = DAEMONS.map(|(component, _)| plane.pid(component));
        DaemonUsage {
            time: Instant::now(),
            cpu: pids.map(cpu_seconds),
            resident: pids.map(|pid| memory(pid).resident),
        }
    }

    /// Milliseconds of processor time per second since an earlier time.
    fn cpu_rates(&self, before: &DaemonUsage) -> [f64; 2] {
        let seconds = self.time.duration_since(before.time).as_secs_f64();
        [0, 1].map(|daemon: usize| (self.cpu[daemon] - before.cpu[daemon]) * 1e3 / seconds)
    }
}

/// What the API server counts itself, of all its clients.
struct ServerCounts {
    /// Open watches by resource.
    watches: BTreeMap<String, f64>,
    /// Requests so far, by verb and resource. A watch counts when it ends.
    requests: BTreeMap<String, f64>,
}

impl ServerCounts {
    fn read(plane: &ControlPlane) -> ServerCounts {
        let page = wait_for("the metrics of the API server", LIMIT, || plane.page("/metrics").ok());
        // The page has megabytes of histograms.
        let wanted = ["apiserver_longrunning_requests{", "apiserver_request_total{"];
        let lines: Vec<&str> =
            page.lines().filter(|line| wanted.iter().any(|name| line.starts_with(name))).collect();
        let mut counts = ServerCounts { watches: BTreeMap::new(), requests: BTreeMap::new() };
        for sample in Exposition::parse(&lines.join("\n")).samples {
            let (verb, mut resource) = (sample.label("verb"), sample.label("resource").to_owned());
            if sample.name == "apiserver_longrunning_requests" {
                if verb == "WATCH" {
                    *counts.watches.entry(resource).or_default() += sample.value;
                }
                continue;
            }
            let part = sample.label("subresource");
            if !part.is_empty() {
                resource = format!("{resource}/{part}");
            }
            *counts.requests.entry(format!("{verb} {resource}")).or_default() += sample.value;
        }
        counts
    }
}

/// What has increased.
fn increase(before: &BTreeMap<String, f64>, after: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let change = |(name, value): (&String, &f64)| {
        (name.clone(), value - before.get(name).copied().unwrap_or_default())
    };
    after.iter().map(change).filter(|(_, value)| *value != 0.0).collect()
}

/// What all nodes do in a second at rest.
struct Rest {
    /// Requests by kind.
    requests: BTreeMap<String, f64>,
    /// Bytes to the API server, and from it.
    bytes: [f64; 2],
}

/// A span that is measured, from its begin.
struct Window {
    time: SystemTime,
    begun: Instant,
    /// Bytes to the API server, and from it.
    bytes: [f64; 2],
}

/// The nodes with their control plane.
struct Fleet<'a> {
    subject: &'static str,
    plane: &'a ControlPlane,
    admin: Client,
    relay: Relay,
    agents: Vec<FakeAgent>,
    /// Of the control plane before the first node.
    alone: DaemonUsage,
    alone_cpu: [f64; 2],
    alone_watches: BTreeMap<String, f64>,
}

impl<'a> Fleet<'a> {
    fn start(
        results: &mut Results,
        subject: &'static str,
        program: Program<'_>,
        nodes: usize,
        plane: &'a ControlPlane,
        base: &Path,
    ) -> Fleet<'a> {
        step("the control plane alone");
        let before = DaemonUsage::read(plane);
        pause(ALONE);
        let alone = DaemonUsage::read(plane);
        let alone_cpu = alone.cpu_rates(&before);
        let alone_watches = ServerCounts::read(plane).watches;
        step("start of the agents");
        let address: Option<SocketAddr> =
            plane.server().strip_prefix("https://").and_then(|address| address.parse().ok());
        let relay = Relay::start(address.expect("the address of the API server"), nodes);
        let begun = Instant::now();
        let start = |node: usize| {
            let name = node_name(node);
            let kubeconfig = plane.node_kubeconfig_with(&name, &server_option(&relay, node));
            FakeAgent::start(name, program, &kubeconfig, base)
        };
        let mut agents: Vec<FakeAgent> = (0..nodes).map(start).collect();
        wait_all_ready(&mut agents, plane);
        results.put(subject, "nodes", "", number(nodes));
        results.put(subject, "start of all agents to all nodes Ready", "s", begun.elapsed().as_secs_f64());
        let admin = administrator(plane);
        Fleet { subject, plane, admin, relay, agents, alone, alone_cpu, alone_watches }
    }

    fn nodes(&self) -> f64 {
        number(self.agents.len())
    }

    /// Bytes of all nodes so far: to the API server, and from it.
    fn bytes(&self) -> [f64; 2] {
        let mut bytes = [0.0; 2];
        for node in 0..self.agents.len() {
            let traffic = self.relay.traffic(node);
            bytes[0] += float(traffic.to_server);
            bytes[1] += float(traffic.to_client);
        }
        bytes
    }

    /// Lets a span pass without a change, and measures what happens then.
    fn rest(&self, results: &mut Results, label: &str, span: Duration) -> Rest {
        let subject = self.subject;
        let counts = ServerCounts::read(self.plane);
        let traffic: Vec<_> = (0..self.agents.len()).map(|node| self.relay.traffic(node)).collect();
        let agents_cpu: f64 = self.agents.iter().map(|agent| cpu_seconds(agent.pid())).sum();
        let window = self.begin();
        let before = DaemonUsage::read(self.plane);
        pause(span);
        let after = DaemonUsage::read(self.plane);
        let spent = self.agents.iter().map(|agent| cpu_seconds(agent.pid())).sum::<f64>() - agents_cpu;
        let seconds = window.begun.elapsed().as_secs_f64();
        let hour = 3600.0 / seconds;
        for (node, before) in traffic.iter().enumerate() {
            let after = self.relay.traffic(node);
            let mut put = |what: &str, unit, value| {
                results.put(subject, &format!("{what}, {label}"), unit, value);
            };
            put("connections of a node", "", float(after.open));
            put("connections opened per node and hour", "1/h", float(after.opened - before.opened) * hour);
            let sent = float(after.to_server - before.to_server) * hour;
            put("bytes to the API server per node and hour", "B/h", sent);
            let received = float(after.to_client - before.to_client) * hour;
            put("bytes from the API server per node and hour", "B/h", received);
        }
        let end = self.bytes();
        let bytes = [0, 1].map(|direction: usize| (end[direction] - window.bytes[direction]) / seconds);
        // Sums of a cluster follow from means: a few nodes with many bytes do not change the median.
        for (direction, name) in ["to", "from"].iter().enumerate() {
            let measure =
                format!("bytes {name} the API server per node and hour, {label}: mean of all nodes");
            results.put(subject, &measure, "B/h", bytes[direction] * 3600.0 / self.nodes());
        }

        self.put_watches(results, label, &after);
        for (daemon, (_, name)) in DAEMONS.iter().enumerate() {
            let mut put = |what: &str, unit, value| {
                results.put(subject, &format!("{name}: {what}, {label}"), unit, value);
            };
            put("resident memory", "MiB", after.resident[daemon]);
            let growth = (after.resident[daemon] - self.alone.resident[daemon]) * 1024.0;
            put("resident memory per node", "KiB", growth / self.nodes());
            let rate = after.cpu_rates(&before)[daemon];
            put("processor", "ms/s", rate);
            put("processor per node", "ms/s", (rate - self.alone_cpu[daemon]) / self.nodes());
        }
        for agent in &self.agents {
            let memory = memory(agent.pid());
            let mut put = |what: &str, unit, value| {
                results.put(subject, &format!("agent: {what}, {label}"), unit, value);
            };
            put("resident memory", "MiB", memory.resident);
            put("proportional memory", "MiB", memory.proportional);
            put("threads", "", memory.threads);
        }
        results.put(subject, &format!("agent: processor, {label}"), "s/h", spent * hour / self.nodes());

        let all = node_requests(self.plane);
        let requests = between(&all, window.time, Duration::from_secs_f64(seconds));
        let mut of_nodes: BTreeMap<&str, usize> =
            self.agents.iter().map(|agent| (agent.name.as_str(), 0)).collect();
        for (_, request) in &requests {
            *of_nodes.entry(&request.node).or_default() += 1;
        }
        for count in of_nodes.values() {
            let measure = format!("requests per node and hour, {label}");
            results.put(subject, &measure, "1/h", number(*count) * hour);
        }
        let measure = format!("requests per node and hour, {label}: mean of all nodes");
        results.put(subject, &measure, "1/h", number(requests.len()) * hour / self.nodes());
        let kinds = by_kind(&requests);
        for (kind, count) in &kinds {
            let measure = format!("requests per node and hour, {label}: {kind}");
            results.put(subject, &measure, "1/h", number(*count) * hour / self.nodes());
        }
        let busiest = by_second(&requests).into_iter().max().unwrap_or(0);
        results.put(
            subject,
            &format!("requests of all nodes in the busiest second, {label}"),
            "",
            number(busiest),
        );
        let counted = increase(&counts.requests, &ServerCounts::read(self.plane).requests);
        let what = format!("apiserver_request_total of all clients in {seconds:.0} s, {label}");
        results.note(subject, &what, &json!(counted));
        let rate = |(kind, count): (&&str, &usize)| ((*kind).to_owned(), number(*count) / seconds);
        Rest { requests: kinds.iter().map(rate).collect(), bytes }
    }

    /// The open watches of the nodes. All memory that the API server has more than without nodes is
    /// attributed to them.
    fn put_watches(&self, results: &mut Results, label: &str, usage: &DaemonUsage) {
        let watches = increase(&self.alone_watches, &ServerCounts::read(self.plane).watches);
        let total: f64 = watches.values().sum();
        results.put(self.subject, &format!("watches of a node, {label}"), "", total / self.nodes());
        for (resource, count) in &watches {
            let measure = format!("watches of a node, {label}: {resource}");
            results.put(self.subject, &measure, "", count / self.nodes());
        }
        let growth = (usage.resident[0] - self.alone.resident[0]) * 1024.0;
        let measure = format!("API server: resident memory per watch, {label}");
        results.put(self.subject, &measure, "KiB", growth / total.max(1.0));
    }

    fn begin(&self) -> Window {
        Window { time: SystemTime::now(), begun: Instant::now(), bytes: self.bytes() }
    }

    /// What the nodes have done in a window beyond what they do at rest, per pod or per node.
    fn end(
        &self,
        results: &mut Results,
        window: &Window,
        what: &str,
        (unit, units): (&str, usize),
        rest: &Rest,
    ) {
        let (seconds, end, units) = (window.begun.elapsed().as_secs_f64(), self.bytes(), number(units));
        let all = node_requests(self.plane);
        let requests = between(&all, window.time, Duration::from_secs_f64(seconds));
        for (kind, count) in by_kind(&requests) {
            let at_rest = rest.requests.get(kind).copied().unwrap_or_default() * seconds;
            let net = (number(count) - at_rest) / units;
            if net.abs() >= 0.005 {
                results.put(self.subject, &format!("{what}: requests per {unit}: {kind}"), "", net);
            }
        }
        let at_rest = rest.requests.values().sum::<f64>() * seconds;
        let net = (number(requests.len()) - at_rest) / units;
        results.put(self.subject, &format!("{what}: requests per {unit}"), "", net);
        for (direction, name) in ["to", "from"].iter().enumerate() {
            let net = end[direction] - window.bytes[direction] - rest.bytes[direction] * seconds;
            let measure = format!("{what}: bytes {name} the API server per {unit}");
            results.put(self.subject, &measure, "B", net / units);
        }
        let seconds = by_second(&requests);
        let busiest = seconds.iter().copied().max().unwrap_or(0);
        results.put(
            self.subject,
            &format!("{what}: requests of all nodes in the busiest second"),
            "",
            number(busiest),
        );
        results.note(self.subject, &format!("{what}: requests of each second"), &json!(seconds));
        results.note(self.subject, &format!("{what}: requests that failed"), &json!(failures(&requests)));
    }

    fn pods(&self, label: &str) -> Vec<Value> {
        list(self.plane, &["pods", "-l", label])
    }

    fn wait_pods_ready(&self, label: &str, count: usize) {
        wait_until(&format!("{count} pods to be ready"), LIMIT, || {
            self.pods(label).iter().filter(|pod| has_condition(pod, "Ready")).count() == count
        });
    }

    fn wait_pods_gone(&self, label: &str) {
        // A read that failed is no empty list.
        wait_until("the pods to be gone", LIMIT, || {
            let list = self.plane.poll(&["pods", "-l", label]);
            list.is_some_and(|list| list["items"].as_array().is_none_or(Vec::is_empty))
        });
    }

    /// Pods with a ConfigMap, a token and an emptyDir volume on each node.
    fn start_pods(&self, results: &mut Results, rest: &Rest) {
        let config_maps = Target::new(GroupVersion::Core, "configmaps").namespace("default");
        self.admin.create::<_, Value>(&config_maps, &settings("1")).expect("the ConfigMap can be made");
        let window = self.begin();
        let count = self.agents.len() * PODS;
        for number in 0..PODS {
            for agent in &self.agents {
                self.create_pod(&format!("{}-{number}", agent.name), &agent.name);
            }
        }
        self.wait_pods_ready(POD_LABEL, count);
        let took = window.begun.elapsed().as_secs_f64();
        results.put(self.subject, &format!("{PODS} pods of each node created → all Ready"), "s", took);
        pause(AFTER);
        self.end(results, &window, "pod start", ("pod", count), rest);
    }

    fn create_pod(&self, name: &str, node: &str) {
        let mut pod = manifest(name, node, true);
        pod["metadata"]["labels"] = json!({"fleet": "life"});
        let volume = json!({"name": "settings", "configMap": {"name": SETTINGS}});
        let mount = json!({"name": "settings", "mountPath": "/settings"});
        for (pointer, value) in [("/spec/volumes", volume), ("/spec/containers/0/volumeMounts", mount)] {
            let array = pod.pointer_mut(pointer).and_then(Value::as_array_mut);
            array.expect("the pod has volumes").push(value);
        }
        let target = Target::new(GroupVersion::Core, "pods").namespace("default");
        let made = self.admin.create::<_, Value>(&target, &pod);
        made.unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    fn remove_pods(&self, results: &mut Results, rest: &Rest) {
        let (window, count) = (self.begin(), self.agents.len() * PODS);
        self.plane.kubectl(&["delete", "pods", "-l", POD_LABEL, "--wait=false"]);
        self.wait_pods_gone(POD_LABEL);
        let took = window.begun.elapsed().as_secs_f64();
        results.put(self.subject, &format!("{PODS} pods of each node deleted → all gone"), "s", took);
        pause(AFTER);
        self.end(results, &window, "pod end", ("pod", count), rest);
    }

    /// The ConfigMap of all pods changes: when the volumes of all pods of each node have the change.
    fn edit_settings(&self, results: &mut Results, rest: &Rest) {
        let mut missing: BTreeMap<&str, Vec<PathBuf>> = BTreeMap::new();
        for pod in self.pods(POD_LABEL) {
            let node = pod["spec"]["nodeName"].as_str().unwrap_or_default();
            let agent = self.agents.iter().find(|agent| agent.name == node).expect("a node of the fleet");
            let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
            let path = format!("pods/{uid}/volumes/kubernetes.io~configmap/settings/{KEY}");
            missing.entry(&agent.name).or_default().push(agent.file(&path));
        }
        let has = |file: &PathBuf, value: &str| fs::read_to_string(file).is_ok_and(|text| text == value);
        wait_until("the first value to be in all volumes", MINUTE, || {
            missing.values().flatten().all(|file| has(file, "1"))
        });
        let window = self.begin();
        let target = Target::config_map("default", SETTINGS);
        self.admin.update::<_, Value>(&target, &settings("2")).expect("the ConfigMap can be changed");
        while !missing.is_empty() {
            let elapsed = window.begun.elapsed();
            assert!(elapsed < LIMIT, "without the edited ConfigMap: {missing:?}");
            missing.retain(|_, files| {
                files.retain(|file| !has(file, "2"));
                if files.is_empty() {
                    let measure = "ConfigMap edited → in all volumes of a node";
                    results.put(self.subject, measure, "s", elapsed.as_secs_f64());
                }
                !files.is_empty()
            });
            pause(STEP);
        }
        pause(AFTER);
        // All others are late events and renewals of leases, which the rest has in another number.
        let all = node_requests(self.plane);
        let requests = between(&all, window.time, window.begun.elapsed());
        let reads = requests.iter().filter(|(_, request)| request.kind.ends_with(" configmaps")).count();
        let measure = "ConfigMap edit: requests for ConfigMaps per node";
        results.put(self.subject, measure, "", ratio(reads, self.agents.len()));
        self.end(results, &window, "ConfigMap edit", ("node", self.agents.len()), rest);
    }

    /// A DaemonSet, by the controller and the scheduler.
    fn roll_out(&self, results: &mut Results, rest: &Rest) {
        let mut spec = manifest("any", "any", true)["spec"].take();
        if let Some(spec) = spec.as_object_mut() {
            spec.remove("nodeName");
        }
        let window = self.begin();
        self.plane.apply(&json!({
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": "fleet", "namespace": "default"},
            "spec": {
                "selector": {"matchLabels": {"fleet": "daemon"}},
                "template": {"metadata": {"labels": {"fleet": "daemon"}}, "spec": spec},
            },
        }));
        self.wait_pods_ready(DAEMON_LABEL, self.agents.len());
        let took = window.begun.elapsed().as_secs_f64();
        results.put(self.subject, "DaemonSet created → a pod is Ready on all nodes", "s", took);
        pause(AFTER);
        self.end(results, &window, "DaemonSet", ("node", self.agents.len()), rest);
        self.plane.kubectl(&["delete", "daemonset", "fleet", "--wait=false"]);
        self.wait_pods_gone(DAEMON_LABEL);
        pause(AFTER);
    }

    /// The first minute of requests after an outage, from the first one on, and when the leases are renewed.
    /// `rest` is that of the nodes with the pods that they have during the outage.
    fn measure_return(&self, results: &mut Results, what: &str, back: SystemTime, rest: &Rest) {
        let subject = self.subject;
        let available = back.elapsed().unwrap_or_default().as_secs_f64();
        pause(MINUTE);
        let (all, renewals) = wait_for("all leases to be renewed", LIMIT, || {
            let all = node_requests(self.plane);
            let renewals: Vec<Duration> =
                first_of_each(&between(&all, back, RUN), NodeRequest::has_renewed_lease)
                    .into_values()
                    .collect();
            (renewals.len() == self.agents.len()).then_some((all, renewals))
        });
        let first = between(&all, back, RUN).first().map(|(since, _)| *since).unwrap_or_default();
        let requests = between(&all, back + first, MINUTE);
        let mut put = |measure: &str, unit, value| {
            results.put(subject, &format!("{what}: {measure}"), unit, value);
        };
        put("the API server is ready", "s", available);
        put("first request of any node", "s", first.as_secs_f64());
        put("requests per node in the first minute", "", number(requests.len()) / self.nodes());
        let at_rest = rest.requests.values().sum::<f64>() * MINUTE.as_secs_f64();
        put("requests per node in a minute at rest", "", at_rest / self.nodes());
        put(
            "requests of the first minute, times those of a minute at rest",
            "",
            number(requests.len()) / at_rest,
        );
        let seconds = by_second(&requests);
        let busiest = seconds.iter().copied().max().unwrap_or(0);
        put("requests of all nodes in the busiest second", "", number(busiest));
        put("requests per node in the busiest second", "", ratio(busiest, self.agents.len()));
        for since in first_of_each(&requests, |_| true).values() {
            put("first request of a node, after that of any node", "s", since.as_secs_f64());
        }
        for since in &renewals {
            put("lease of a node renewed", "s", since.as_secs_f64());
        }
        let last = renewals.iter().max().copied().unwrap_or_default();
        put("all leases renewed", "s", last.as_secs_f64());
        results.note(subject, &format!("{what}: requests of each second"), &json!(seconds));
        results.note(subject, &format!("{what}: requests of the first minute"), &json!(by_kind(&requests)));
        results.note(subject, &format!("{what}: requests that failed"), &json!(failures(&requests)));
    }

    /// All nodes renew their client certificates: the agents start again, each with a certificate of a short
    /// life that was issued just before. The new ones have the life of the signer, which is a year.
    fn renew_certificates(&mut self, results: &mut Results, program: Program<'_>, base: &Path, rest: &Rest) {
        let (subject, count) = (self.subject, self.agents.len());
        self.agents.clear();
        let begun = SystemTime::now();
        let since_begin = || begun.elapsed().unwrap_or_default();
        let mut issued: BTreeMap<String, Duration> = BTreeMap::new();
        for node in 0..count {
            let name = node_name(node);
            let options = format!("{} ttl={}s", server_option(&self.relay, node), LIFE.as_secs());
            let kubeconfig = self.plane.node_kubeconfig_with(&name, &options);
            issued.insert(name.clone(), since_begin());
            let fields = json!({"rotateCertificates": true});
            self.agents.push(FakeAgent::configured(name, program, &kubeconfig, base, fields));
        }
        // A certificate is renewed after nine tenths of its life at the latest.
        let end = since_begin() + LIFE.mul_f64(0.9) + AFTER;
        pause(SETTLE);
        let window = self.begin();
        pause(end.saturating_sub(since_begin()));
        self.end(results, &window, "certificate renewal", ("node", count), rest);

        let all = node_requests(self.plane);
        let mut requests = between(&all, begun, RUN);
        requests.retain(|(_, request)| request.kind.ends_with(CERTIFICATES));
        let creation = format!("create {CERTIFICATES}");
        let firsts = first_of_each(&requests, |request| request.kind == creation);
        assert_eq!(firsts.len(), count, "nodes that have renewed their certificate");
        let mut put = |measure: &str, value| {
            results.put(subject, &format!("certificate renewal: {measure}"), "", value);
        };
        put("requests for certificates per node", ratio(requests.len(), count));
        for (node, first) in &firsts {
            let age = first.saturating_sub(issued[*node]);
            put("part of the life of a certificate that has passed", age.as_secs_f64() / LIFE.as_secs_f64());
        }
        let busiest = by_second(&requests).into_iter().max().unwrap_or(0);
        put("requests for certificates of all nodes in the busiest second", number(busiest));
        let window = window.time.duration_since(begun).unwrap_or_default();
        let early = firsts.values().filter(|first| **first < window).count();
        put("nodes that had renewed their certificate before the measurement", number(early));
    }
}

fn node_name(node: usize) -> String {
    format!("fleet-{node}")
}

/// The option of a kubeconfig with the relay's port for a node.
fn server_option(relay: &Relay, node: usize) -> String {
    format!("server=https://127.0.0.1:{}", relay.port(node))
}

/// How many requests of each kind have failed, with the status of the response.
fn failures(requests: &[(Duration, &NodeRequest)]) -> BTreeMap<String, usize> {
    let mut failures = BTreeMap::new();
    for (_, request) in requests.iter().filter(|(_, request)| request.status >= 400) {
        *failures.entry(format!("{}: {}", request.kind, request.status)).or_default() += 1;
    }
    failures
}

/// The ConfigMap of all pods.
fn settings(value: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": SETTINGS, "namespace": "default"},
        "data": {KEY: value},
    })
}

#[expect(clippy::cast_precision_loss, reason = "less than 2^53 bytes")]
fn float(count: u64) -> f64 {
    count as f64
}
