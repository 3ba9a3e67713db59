//! `coracle leave --drain`: cordons the node and evicts its pods, with credentials that may do that.
//!
//! Go: k8s.io/kubectl/pkg/drain (`filters.go`, `drain.go`), with --ignore-daemonsets.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::config::kubeconfig;
use crate::kube::client::Client;
use crate::kube::error::ApiError;
use crate::kube::target::Target;
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;

use super::files::Record;
use super::refusal::{Reason, Refusal};

/// The time between two rounds.
const INTERVAL: Duration = Duration::from_secs(2);

/// The time for the node's own credentials, which may have expired.
const OWN_LIMIT: Duration = Duration::from_secs(20);

/// The most pods that a line names.
const MAX_NAMES: usize = 5;

/// A pod that has to go.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pod {
    namespace: String,
    name: String,
    uid: String,
    /// Whether its deletion has begun.
    is_ending: bool,
}

/// What a list of the node's pods means.
#[derive(Debug, Default, PartialEq, Eq)]
struct Pods {
    evictable: Vec<Pod>,
    /// Pods that nothing makes again on another node.
    alone: Vec<Pod>,
}

/// Sorts the pods of a node. Mirrors of static pods and pods of DaemonSets stay.
fn sorted(list: &Value) -> Pods {
    let mut pods = Pods::default();
    for item in list.get("items").and_then(Value::as_array).into_iter().flatten() {
        let text = |pointer: &str| item.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let owners = item.pointer("/metadata/ownerReferences").and_then(Value::as_array);
        let controller = owners
            .into_iter()
            .flatten()
            .find(|owner| owner.get("controller").and_then(Value::as_bool).unwrap_or(false))
            .map(|owner| owner.get("kind").and_then(Value::as_str).unwrap_or_default());
        let is_mirror = item.pointer("/metadata/annotations/kubernetes.io~1config.mirror").is_some();
        if is_mirror || controller == Some("DaemonSet") {
            continue;
        }
        let pod = Pod {
            namespace: text("/metadata/namespace").to_owned(),
            name: text("/metadata/name").to_owned(),
            uid: text("/metadata/uid").to_owned(),
            is_ending: item.pointer("/metadata/deletionTimestamp").is_some(),
        };
        let is_finished = matches!(text("/status/phase"), "Succeeded" | "Failed");
        if controller.is_some() || is_finished || pod.is_ending {
            pods.evictable.push(pod);
        } else {
            pods.alone.push(pod);
        }
    }
    pods
}

fn names(pods: &[Pod]) -> String {
    let mut shown: Vec<String> =
        pods.iter().take(MAX_NAMES).map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect();
    if pods.len() > MAX_NAMES {
        shown.push(format!("and {} more", pods.len() - MAX_NAMES));
    }
    shown.join(", ")
}

fn refused(text: String, advice: &str) -> Refusal {
    Refusal::new(Reason::Drain, format!("drain: {text}"), advice)
}

fn of_server(error: &ApiError) -> Refusal {
    refused(chain(error), "check the file of --kubeconfig and the rights of its user")
}

/// What this command does with an API server.
trait ApiServer {
    /// The UID of a node; `None`: there is no such node.
    fn node_uid(&self, node: &str) -> Result<Option<String>, ApiError>;

    /// Cordons the node if it has this UID.
    fn cordon(&self, node: &str, uid: &str) -> Result<(), ApiError>;

    /// The list of the node's pods.
    fn pods(&self, node: &str) -> Result<Value, ApiError>;

    /// Requests an eviction of this pod, and not of a later one with its name.
    fn evict(&self, pod: &Pod) -> Result<(), ApiError>;
}

impl ApiServer for Client {
    fn node_uid(&self, node: &str) -> Result<Option<String>, ApiError> {
        match self.get::<Value>(&Target::node(node)) {
            Ok(found) => {
                let uid = found.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default();
                Ok(Some(uid.to_owned()))
            }
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn cordon(&self, node: &str, uid: &str) -> Result<(), ApiError> {
        let cordon = json!({"metadata": {"uid": uid}, "spec": {"unschedulable": true}});
        self.patch::<Value>(&Target::node(node), &cordon).map(drop)
    }

    fn pods(&self, node: &str) -> Result<Value, ApiError> {
        let selector = format!("spec.nodeName={node}");
        self.get_with(&Target::pods(), &[("fieldSelector", selector.as_str())])
    }

    fn evict(&self, pod: &Pod) -> Result<(), ApiError> {
        let target = Target::pod(&pod.namespace, &pod.name).subresource("eviction");
        let body = json!({
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": pod.namespace, "name": pod.name},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        });
        self.create::<_, Value>(&target, &body).map(drop)
    }
}

/// Connects with a kubeconfig; returns the URL of its server, too. Nothing is sent yet.
fn connect(file: &Path) -> Result<(Client, String), String> {
    let config = kubeconfig::load(file).map_err(|problem| problem.to_string())?;
    let credentials = crate::kube::kubeconfig::credentials(&config, file)
        .map_err(|error| format!("{}: {error}", file.display()))?;
    let base_path = credentials.base_path.clone();
    let client = Client::new(credentials, None).map_err(|error| chain(&error))?;
    let server = format!("{}{base_path}", client.origin());
    Ok((client, server))
}

/// Whether the cluster of `--kubeconfig` is that of this node: another one may have a node of its name.
/// `own`: the UID of the node as its own credentials read it, or why they do not. `other` and
/// `other_server`: the UID and the server of `--kubeconfig`.
fn check_cluster(
    record: &Record,
    own: &Result<Option<String>, String>,
    other: Option<&str>,
    other_server: &str,
) -> Result<(), Refusal> {
    let (node, server) = (&record.node, &record.server);
    let advice = "give a kubeconfig of the node's own cluster with --kubeconfig";
    match own {
        Ok(own) if own.as_deref() == other => Ok(()),
        Ok(_) => {
            let text = format!(
                "{other_server} of --kubeconfig is not the cluster of this node: its node {node} is not that \
                 of {server}"
            );
            Err(refused(text, advice))
        }
        // A control plane may have several addresses, so this is only the second best.
        Err(_) if server == other_server => Ok(()),
        Err(reason) => {
            let text = format!(
                "it is not known whether {other_server} of --kubeconfig is the cluster of this node, {server}: \
                 {reason}"
            );
            Err(refused(text, "name the server in the file of --kubeconfig as the node does"))
        }
    }
}

/// Whether the server may do the same request later (kubectl repeats an eviction at 429, and in a
/// namespace that is being deleted until the deletion of the pod has begun).
fn is_temporary(error: &ApiError) -> bool {
    error.is_namespace_ending() || matches!(error.status(), Some(408 | 429 | 500..=599))
}

/// How long it is waited.
struct Patience {
    begin: Instant,
    limit: Duration,
    /// The time between two rounds.
    interval: Duration,
}

impl Patience {
    fn is_over(&self) -> bool {
        self.begin.elapsed() >= self.limit
    }

    fn wait(&self) {
        let _ = StopToken::never().wait(self.interval);
    }

    /// Repeats a request while the server is busy or, after the first of all, away.
    fn repeat<T>(
        &self,
        is_first: bool,
        mut request: impl FnMut() -> Result<T, ApiError>,
    ) -> Result<T, Refusal> {
        loop {
            let error = match request() {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            let is_away = error.is_transport() && !is_first;
            if !(is_temporary(&error) || is_away) || self.is_over() {
                return Err(of_server(&error));
            }
            self.wait();
        }
    }
}

/// Cordons the node, evicts its pods, and waits until they are gone. `own`: the kubeconfig of the node.
/// `progress` prints a line.
pub(super) fn drain(
    file: &Path,
    record: &Record,
    own: &Path,
    limit: Duration,
    progress: &mut dyn FnMut(String),
) -> Result<(), Refusal> {
    let advice = "give a kubeconfig of an administrator with --kubeconfig";
    let (client, server) = connect(file).map_err(|reason| refused(reason, advice))?;
    let own = connect(own).and_then(|(client, _)| {
        client.with_timeout(OWN_LIMIT).node_uid(&record.node).map_err(|error| chain(&error))
    });
    let patience = Patience { begin: Instant::now(), limit, interval: INTERVAL };
    let uid = patience.repeat(true, || client.node_uid(&record.node))?;
    check_cluster(record, &own, uid.as_deref(), &server)?;
    match uid {
        Some(uid) => evict_all(&client, &record.node, &uid, &patience, progress),
        None => {
            progress(format!("drain: the cluster has no node {}", record.node));
            Ok(())
        }
    }
}

fn evict_all(
    api: &dyn ApiServer,
    node: &str,
    uid: &str,
    patience: &Patience,
    progress: &mut dyn FnMut(String),
) -> Result<(), Refusal> {
    patience.repeat(false, || api.cordon(node, uid))?;
    progress(format!("drain: the node {node} is cordoned"));
    let (mut shown, mut obstacle) = (String::new(), String::new());
    loop {
        let pods = sorted(&patience.repeat(false, || api.pods(node))?);
        if !pods.alone.is_empty() {
            let text = format!("these pods have no controller, and would be lost: {}", names(&pods.alone));
            return Err(refused(text, "delete them with kubectl delete pod, and run the same command again"));
        }
        if pods.evictable.is_empty() {
            return Ok(());
        }
        for pod in pods.evictable.iter().filter(|pod| !pod.is_ending) {
            match api.evict(pod) {
                Ok(()) => {}
                // It ended, or another pod has its name: the next list shows which.
                Err(error) if error.is_not_found() || error.is_conflict() => {}
                // Such as a budget for disruptions that permits none at this time.
                Err(error) if is_temporary(&error) || error.is_transport() => obstacle = chain(&error),
                Err(error) => return Err(of_server(&error)),
            }
        }
        let text = format!(
            "drain: waiting for the end of {} pods: {}",
            pods.evictable.len(),
            names(&pods.evictable)
        );
        if text != shown {
            progress(text.clone());
            shown = text;
        }
        if patience.is_over() {
            let seconds = patience.limit.as_secs();
            let text = match obstacle.as_str() {
                "" => format!("after {seconds} s there are still pods: {}", names(&pods.evictable)),
                obstacle => format!("after {seconds} s an eviction is still refused: {obstacle}"),
            };
            return Err(refused(
                text,
                "run the same command again, with a longer --timeout if pods end slowly",
            ));
        }
        patience.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    fn pod(name: &str, more: Value) -> Value {
        let mut pod = json!({"metadata": {"namespace": "n", "name": name, "uid": "u"}});
        crate::config::defaults::merge_patch(&mut pod, more);
        pod
    }

    fn owned(kind: &str) -> Value {
        json!({"metadata": {"ownerReferences": [{"kind": "Other"}, {"kind": kind, "controller": true}]}})
    }

    fn record() -> Record {
        Record { node: "n".into(), server: "https://a:6443".into(), ..Record::default() }
    }

    #[test]
    fn node_of_another_cluster_with_the_same_name_is_not_drained() {
        let uid = |text: &str| Ok(Some(text.to_owned()));
        let failed = || Err("expired".to_owned());
        for (own, other, server, is_same) in [
            (uid("u"), Some("u"), "https://vip:6443", true),
            (Ok(None), None, "https://vip:6443", true),
            (uid("u"), Some("v"), "https://a:6443", false),
            (uid("u"), None, "https://b:6443", false),
            (Ok(None), Some("v"), "https://b:6443", false),
            (failed(), Some("v"), "https://a:6443", true),
            (failed(), Some("v"), "https://b:6443", false),
            (failed(), None, "https://b:6443", false),
        ] {
            let checked = check_cluster(&record(), &own, other, server);
            assert_eq!(checked.is_ok(), is_same, "{own:?} {other:?} {server}: {checked:?}");
            if let Err(refusal) = checked {
                assert!(refusal.text.contains(server) && refusal.code == Reason::Drain.code(), "{refusal:?}");
            }
        }
    }

    /// A server with one pod, which goes when an eviction succeeds. Each request takes the next of the errors
    /// of its kind.
    #[derive(Default)]
    struct Fake {
        cordons: RefCell<Vec<ApiError>>,
        lists: RefCell<Vec<ApiError>>,
        evictions: RefCell<Vec<ApiError>>,
        is_evicted: Cell<bool>,
    }

    fn next(errors: &RefCell<Vec<ApiError>>) -> Result<(), ApiError> {
        errors.borrow_mut().pop().map_or(Ok(()), Err)
    }

    impl ApiServer for Fake {
        fn node_uid(&self, _: &str) -> Result<Option<String>, ApiError> {
            Ok(None)
        }

        fn cordon(&self, _: &str, _: &str) -> Result<(), ApiError> {
            next(&self.cordons)
        }

        fn pods(&self, _: &str) -> Result<Value, ApiError> {
            next(&self.lists)?;
            let items = if self.is_evicted.get() { Vec::new() } else { vec![pod("p", owned("ReplicaSet"))] };
            Ok(json!({ "items": items }))
        }

        fn evict(&self, _: &Pod) -> Result<(), ApiError> {
            next(&self.evictions)?;
            self.is_evicted.set(true);
            Ok(())
        }
    }

    fn drained(fake: &Fake, limit: Duration) -> Result<(), Refusal> {
        let patience = Patience { begin: Instant::now(), limit, interval: Duration::ZERO };
        evict_all(fake, "n", "u", &patience, &mut |_| {})
    }

    #[test]
    fn drain_waits_for_a_busy_server_and_for_a_namespace_that_ends() {
        let error = |code| ApiError::for_test(code, "r", "m");
        let fake = Fake {
            cordons: vec![error(500)].into(),
            lists: vec![error(503), ApiError::for_test_transport()].into(),
            evictions: vec![
                error(500),
                error(429),
                ApiError::for_test_namespace_ending(),
                ApiError::for_test_transport(),
            ]
            .into(),
            ..Fake::default()
        };
        // The limit only ends a test that hangs.
        assert_eq!(drained(&fake, Duration::from_secs(60)), Ok(()));
        assert!(fake.is_evicted.get() && fake.evictions.borrow().is_empty());
    }

    #[test]
    fn refused_eviction_ends_the_drain_and_an_obstacle_is_named_after_the_time() {
        let forbidden = || vec![ApiError::for_test(403, "Forbidden", "no rights")].into();
        for fake in [
            Fake { cordons: forbidden(), ..Fake::default() },
            Fake { lists: forbidden(), ..Fake::default() },
            Fake { evictions: forbidden(), ..Fake::default() },
        ] {
            let refusal = drained(&fake, Duration::from_secs(60)).unwrap_err();
            assert!(refusal.text.contains("no rights"), "{refusal:?}");
        }
        let fake = Fake { evictions: vec![ApiError::for_test_namespace_ending()].into(), ..Fake::default() };
        let refusal = drained(&fake, Duration::ZERO).unwrap_err();
        assert!(refusal.text.contains("an eviction is still refused: m"), "{refusal:?}");
    }

    #[test]
    fn daemon_sets_and_mirrors_stay_and_pods_without_a_controller_are_named() {
        let mirror = json!({"metadata": {"annotations": {"kubernetes.io/config.mirror": "x"}}});
        let list = json!({"items": [
            pod("replica", owned("ReplicaSet")),
            pod("daemon", owned("DaemonSet")),
            pod("static", mirror),
            pod("done", json!({"status": {"phase": "Succeeded"}})),
            pod("ending", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})),
            pod("bare", json!({"status": {"phase": "Running"}})),
        ]});
        let pods = sorted(&list);
        assert_eq!(names(&pods.evictable), "n/replica, n/done, n/ending");
        assert_eq!(names(&pods.alone), "n/bare");
        let ending: Vec<bool> = pods.evictable.iter().map(|pod| pod.is_ending).collect();
        assert_eq!(ending, [false, false, true]);
    }

    #[test]
    fn malformed_lists_have_no_pods_and_long_ones_few_names() {
        for list in [json!({}), json!({"items": "x"}), json!([])] {
            assert_eq!(sorted(&list), Pods::default());
        }
        let items: Vec<Value> = (0..8).map(|index| pod(&format!("p{index}"), owned("Job"))).collect();
        assert!(names(&sorted(&json!({"items": items})).evictable).ends_with("n/p4, and 3 more"));
    }

    #[test]
    fn missing_kubeconfig_is_refused_with_its_name() {
        let (file, own) = (Path::new("/no/such"), Path::new("/no/own"));
        let refusal = drain(file, &record(), own, Duration::ZERO, &mut |_| {}).unwrap_err();
        assert!(refusal.text.contains("/no/such") && refusal.code == Reason::Drain.code(), "{refusal:?}");
    }
}
