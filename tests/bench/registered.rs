//! What is measured of an agent that has joined a cluster: how soon a pod is ready after its
//! creation, as a watch sees it, what the agent holds and does at rest, and how often it asks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use coracle::config;
use coracle::kube::Spread;
use coracle::kube::client::{Client, DeleteOptions};
use coracle::kube::kubeconfig;
use coracle::kube::target::{GroupVersion, Target};
use coracle::kube::watch::{Change, Watched, spawn_reflector};
use coracle::model::api::{Node, Pod};
use coracle::util::threads::{OnDeath, Running};
use crossbeam_channel::{Receiver, bounded};
use serde_json::{Value, json};

use crate::agent::{self, Agent};
use crate::process::cpu_seconds;
use crate::results::{CORACLE, Results};
use crate::rounds::{Plan, footprint, process_memory};
use crate::runtime::{LONG, Runtime};
use crate::support::control_plane::ControlPlane;
use crate::support::wait::{pause, wait_until};

/// Single pods of each kind.
const SINGLES: usize = 10;
/// What the watch may say before anyone listens.
const NEWS: usize = 4096;
/// Pods at once.
const MANY_PODS: usize = 30;

/// All measures of one binary.
pub fn measure(
    results: &mut Results,
    subject: &'static str,
    binary: &Path,
    runtime: &Runtime,
    plane: &ControlPlane,
    base: &Path,
    plan: &Plan,
) {
    let flags: &[String] = if subject == CORACLE { plan.agent_flags.as_slice() } else { &[] };
    if !flags.is_empty() {
        results.note(subject, "more flags", &json!(flags));
    }
    let mut node = JoinedNode::start(results, subject, binary, runtime, plane, base, flags);
    node.idle(results, plan, 0);
    for (network, host) in [("host network", true), ("pod network", false)] {
        node.singles(results, network, host);
    }
    node.many_pods(results, plan);
    process_memory(results, subject, &node.agent, "registered, after all, no pods");
    node.agent.stop();
    let complaints = node.agent.complaints();
    if !complaints.is_empty() {
        results.note(subject, "warnings and errors of its logs", &json!(complaints));
    }
}

/// What the watch said of a pod, and when.
struct ObservedPod {
    time: Instant,
    name: String,
    /// `None` when it has gone.
    ready: Option<bool>,
}

struct JoinedNode<'a> {
    subject: &'static str,
    agent: Agent,
    plane: &'a ControlPlane,
    admin: Client,
    seen: Receiver<ObservedPod>,
    _watch: Running,
}

impl<'a> JoinedNode<'a> {
    fn start(
        results: &mut Results,
        subject: &'static str,
        binary: &Path,
        runtime: &Runtime,
        plane: &'a ControlPlane,
        base: &Path,
        flags: &[String],
    ) -> JoinedNode<'a> {
        let kubeconfig = plane.node_kubeconfig(subject);
        let dir = base.join(format!("reg-{subject}"));
        let mut agent = Agent::joining(binary, dir, runtime, subject, &kubeconfig, flags);
        let admin = administrator(plane);
        let (sender, seen) = bounded(NEWS);
        let watched = Watched {
            target: Target::pods(),
            field_selector: Some(format!("spec.nodeName={subject}")),
            label_selector: None,
            spread: Spread::PODS,
        };
        let sink = move |change: Change<Pod>| {
            let time = Instant::now();
            let (pods, gone) = match change {
                Change::Replaced(pods) => (pods, false),
                Change::Set(pod) => (vec![pod], false),
                Change::Removed(pod) => (vec![pod], true),
            };
            for pod in pods {
                let ready = (!gone).then(|| is_ready(&pod));
                let _ = sender.send(ObservedPod { time, name: pod.metadata.name.unwrap_or_default(), ready });
            }
        };
        let watch =
            spawn_reflector("bench", admin.clone(), watched, OnDeath::Unsupervised, sink).expect("a thread");
        let begun = agent.launch();
        wait_until("the node to be ready", LONG, || {
            admin.get::<Node>(&Target::node(subject)).is_ok_and(|node| node_is_ready(&node))
        });
        results.put(subject, "start to node Ready", "ms", begun.elapsed().as_secs_f64() * 1e3);
        agent.wait_healthy();
        JoinedNode { subject, agent, plane, admin, seen, _watch: watch }
    }

    /// Comes to rest and stays there a while.
    fn idle(&self, results: &mut Results, plan: &Plan, count: usize) {
        pause(plan.settle * 2);
        let before = self.received();
        let begun = Instant::now();
        footprint(results, self.subject, &self.agent, plan, count);
        let span = Duration::from_secs(60).max(plan.idle);
        pause(span.saturating_sub(begun.elapsed()));
        let minutes = begun.elapsed().as_secs_f64() / 60.0;
        let new = self.requests_since(&before);
        let measure = format!("requests per minute, idle, {count} pods");
        results.put(self.subject, &measure, "1/min", count_of(&new) / minutes);
        results.note(self.subject, &measure, &json!(new));
    }

    /// Pods one after the other, and what they cost in requests.
    fn singles(&self, results: &mut Results, network: &str, host: bool) {
        let before = self.received();
        let names: Vec<String> =
            (0..SINGLES).map(|number| format!("{}-{}-{number}", self.subject, &network[..3])).collect();
        for name in &names {
            let begun = Instant::now();
            self.create(name, host);
            let seen = self.wait_seen(std::slice::from_ref(name), Some(true));
            let took = seen.duration_since(begun).as_secs_f64() * 1e3;
            results.put(self.subject, &format!("created → Ready, {network}"), "ms", took);
            pause(Duration::from_millis(1200));
        }
        // The last events are sent.
        pause(Duration::from_secs(2));
        let new: BTreeMap<String, usize> =
            self.requests_since(&before).into_iter().filter(|(kind, _)| !of_the_node(kind)).collect();
        let pods = f64::from(u32::try_from(SINGLES).unwrap_or(u32::MAX));
        let measure = format!("requests per pod start, {network}");
        results.put(self.subject, &measure, "", count_of(&new) / pods);
        results.note(self.subject, &measure, &json!(new));
        for name in &names {
            let begun = Instant::now();
            self.delete(name);
            let seen = self.wait_seen(std::slice::from_ref(name), None);
            let took = seen.duration_since(begun).as_secs_f64() * 1e3;
            results.put(self.subject, &format!("deleted → gone, {network}"), "ms", took);
        }
    }

    fn many_pods(&self, results: &mut Results, plan: &Plan) {
        let names: Vec<String> =
            (0..MANY_PODS).map(|number| format!("{}-many-{number}", self.subject)).collect();
        let cpu = cpu_seconds(self.agent.pid());
        let begun = Instant::now();
        for name in &names {
            self.create(name, true);
        }
        let seen = self.wait_seen(&names, Some(true));
        let took = seen.duration_since(begun).as_secs_f64() * 1e3;
        results.put(self.subject, &format!("{MANY_PODS} created → all Ready"), "ms", took);
        pause(Duration::from_secs(2));
        let spent = cpu_seconds(self.agent.pid()) - cpu;
        results.put(self.subject, &format!("processor for {MANY_PODS} starts"), "s", spent);
        self.idle(results, plan, MANY_PODS);
        let begun = Instant::now();
        for name in &names {
            self.delete(name);
        }
        let seen = self.wait_seen(&names, None);
        let took = seen.duration_since(begun).as_secs_f64() * 1e3;
        results.put(self.subject, &format!("{MANY_PODS} deleted → all gone"), "ms", took);
    }

    fn create(&self, name: &str, host_network: bool) {
        let target = Target::new(GroupVersion::Core, "pods").namespace("default");
        let made = self.admin.create::<_, Value>(&target, &manifest(name, self.subject, host_network));
        made.unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    fn delete(&self, name: &str) {
        let deleted = self.admin.delete(&Target::pod("default", name), &DeleteOptions::default());
        deleted.unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    /// Waits until the watch has said this of all of them: the moment it said so of the last.
    fn wait_seen(&self, names: &[String], wanted: Option<bool>) -> Instant {
        let mut missing: BTreeSet<&String> = names.iter().collect();
        let deadline = Instant::now() + LONG;
        loop {
            let seen = self.seen.recv_deadline(deadline);
            let seen = seen.unwrap_or_else(|_| panic!("timed out waiting for {missing:?} to be {wanted:?}"));
            if seen.ready == wanted && missing.remove(&seen.name) && missing.is_empty() {
                return seen.time;
            }
        }
    }

    /// The requests of this node so far: their kinds by identity.
    fn received(&self) -> BTreeMap<String, String> {
        let user = format!("system:node:{}", self.subject);
        let text = |request: &Value, pointer: &str| {
            request.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let own = self.plane.requests().into_iter().filter(|request| text(request, "/user/username") == user);
        own.map(|request| {
            let mut kind = format!("{} {}", text(&request, "/verb"), text(&request, "/objectRef/resource"));
            let part = text(&request, "/objectRef/subresource");
            if !part.is_empty() {
                kind = format!("{kind}/{part}");
            }
            (text(&request, "/auditID"), kind)
        })
        .collect()
    }

    /// How many of each kind are new.
    fn requests_since(&self, before: &BTreeMap<String, String>) -> BTreeMap<String, usize> {
        let mut kinds = BTreeMap::new();
        for (id, kind) in self.received() {
            if !before.contains_key(&id) {
                *kinds.entry(kind).or_default() += 1;
            }
        }
        kinds
    }
}

/// What a node asks for whether or not a pod starts.
fn of_the_node(kind: &str) -> bool {
    ["leases", "nodes", "nodes/status", "csinodes", "csidrivers", "services", "runtimeclasses"]
        .iter()
        .any(|resource| kind.split(' ').nth(1) == Some(resource))
}

fn count_of(kinds: &BTreeMap<String, usize>) -> f64 {
    f64::from(u32::try_from(kinds.values().sum::<usize>()).unwrap_or(u32::MAX))
}

pub fn administrator(plane: &ControlPlane) -> Client {
    let path = plane.admin_kubeconfig();
    let file = config::kubeconfig::load(&path).expect("the administrator's kubeconfig");
    let credentials = kubeconfig::credentials(&file, &path).expect("its credentials");
    Client::new(credentials, None).expect("a client")
}

pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

pub fn node_is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// A pod as `kubectl apply` makes it: with the token that every pod gets.
pub fn manifest(name: &str, node: &str, host_network: bool) -> Value {
    let mut pod = agent::manifest(name);
    pod["spec"]["nodeName"] = json!(node);
    pod["spec"]["hostNetwork"] = json!(host_network);
    // There is no cluster DNS here, which would be an event each time.
    pod["spec"]["dnsPolicy"] = json!("Default");
    pod
}
