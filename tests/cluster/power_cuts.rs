//! A whole node without its control plane: twenty pods of all kinds run, the power is cut, the API server
//! is away at the next boot, and returns. On the Go kubelet the same steps show what it does instead.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::claims::claim_spec;
use crate::joined::{JoinedNode, LIMIT, condition, directory, text};
use crate::support::control_plane::{API_SERVER, ControlPlane, ControlPlaneOptions};
use crate::support::disk_search::files_with_except;
use crate::support::launch::runs_go_kubelet;
use crate::support::node::{FOREVER, busybox, pod, simple};
use crate::support::wait::{pause, wait_for, wait_until};
use crate::workloads::{ACCOUNT, CANARY, WEB_SCRIPT, controller, job, web, web_objects, web_output};

/// Names of objects begin with the name of the node.
const NODE: &str = "cut";
/// The pods that a controller or the test makes at the API server, and the static one.
const PODS: usize = 20;
/// Twenty pods start at once, on a machine that may be busy, or be emulated (`tests/vm/run`).
const START: Duration = Duration::from_secs(900);
/// A list of the pods takes some milliseconds on a machine that is not emulated.
const SLOW_LIST: Duration = Duration::from_millis(200);
/// How long a kubelet that starts no pods is watched.
const WATCH: Duration = Duration::from_secs(30);

/// Pod → container → ids of those that run.
type Running = BTreeMap<String, BTreeMap<String, Vec<String>>>;
/// Pod → containers that should run.
type Wanted = BTreeMap<String, BTreeSet<String>>;

/// A volume in a directory of the node, for one claim.
fn local_volume(claim: &str, path: &Path) -> Value {
    fs::create_dir_all(path).expect("the directory can be made");
    let term = json!({"matchExpressions": [
        {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}]});
    json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": claim},
        "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain", "storageClassName": "",
            "claimRef": {"namespace": "default", "name": claim},
            "local": {"path": path}, "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}}},
    })
}

/// An init container, a sidecar and a container, with a file that the first one makes.
fn with_sidecar() -> Value {
    let mount = json!([{"name": "dir", "mountPath": "/dir"}]);
    let mut first = busybox("first", "echo made >/dir/file");
    first["volumeMounts"] = mount.clone();
    let mut side = busybox("side", FOREVER);
    side["restartPolicy"] = json!("Always");
    let mut main = busybox("main", "exec httpd -f -p 8080 -h /dir");
    main["volumeMounts"] = mount;
    // Not a program in the container, which takes a second of an emulated processor.
    main["readinessProbe"] =
        json!({"httpGet": {"path": "/file", "port": 8080}, "periodSeconds": 1, "timeoutSeconds": 60});
    json!({"initContainers": [first, side], "containers": [main],
        "volumes": [{"name": "dir", "emptyDir": {}}]})
}

/// A pod with the local volume of a claim, which it writes to at its first start.
fn with_data() -> Value {
    let mut main = busybox("main", &format!("[ -e /data/file ] || echo first >/data/file; {FOREVER}"));
    main["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    json!({"containers": [main]})
}

/// Makes everything at the API server, and the static pod. All objects are one list: each start of kubectl
/// takes seconds on an emulated processor.
fn make_all(joined: &JoinedNode<'_>) {
    let (base, out) = (directory(NODE), joined.node.shared());
    let mut objects = web_objects("cut-cm", "cut-secret").to_vec();
    for claim in ["cut-data", "data-cut-set-0", "data-cut-set-1"] {
        objects.push(local_volume(claim, &base.join("volumes").join(claim)));
    }
    let mut claim = claim_spec("Filesystem", "ReadWriteOnce");
    claim["volumeName"] = json!("cut-data");
    objects.push(json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "cut-data", "namespace": "default"}, "spec": claim}));

    let host = json!({"hostNetwork": true, "containers": [busybox("main", FOREVER)]});
    let plain = json!({"containers": [busybox("main", FOREVER)]});
    objects.extend([
        controller(NODE, "Deployment", "cut-web", 5, web("cut-cm", "cut-secret")),
        controller(NODE, "Deployment", "cut-side", 3, with_sidecar()),
        controller(NODE, "StatefulSet", "cut-set", 2, with_data()),
        controller(NODE, "Deployment", "cut-host", 2, host),
        controller(NODE, "ReplicaSet", "cut-rs", 2, plain),
        job(NODE, "cut-done", "Never", "echo run >>/out/done", &out),
        job(NODE, "cut-working", "OnFailure", &format!("echo run >>/out/working; {FOREVER}"), &out),
    ]);
    let mut data = pod("cut-data", with_data()["containers"].clone());
    data["spec"]["volumes"] = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "cut-data"}}]);
    for mut pod in [data, simple("cut-plain"), simple("cut-goes")] {
        pod["spec"]["nodeName"] = json!(NODE);
        objects.push(pod);
    }
    joined.plane.apply(&json!({"apiVersion": "v1", "kind": "List", "items": objects}));
    joined.node.apply("static.json", &simple("static"));
}

/// The pods of the default namespace. On an emulated processor a list takes so long that a test that asks all
/// the time leaves nothing for the API server and the agent: it waits three times as long as that.
fn shown(joined: &JoinedNode<'_>) -> Vec<Value> {
    let begun = Instant::now();
    let list = joined.plane.poll(&["pods"]).unwrap_or_default();
    let took = begun.elapsed();
    if took > SLOW_LIST {
        pause(took.saturating_mul(3).min(SLOW_LIST * 50));
    }
    list["items"].as_array().cloned().unwrap_or_default()
}

fn name(pod: &Value) -> &str {
    text(pod, "/metadata/name")
}

/// The containers that a pod should have while it runs.
fn wanted_of(pod: &Value) -> BTreeSet<String> {
    let list = |key: &str| pod["spec"][key].as_array().cloned().unwrap_or_default();
    let side = list("initContainers").into_iter().filter(|container| container["restartPolicy"] == "Always");
    list("containers").into_iter().chain(side).map(|container| text(&container, "/name").to_owned()).collect()
}

/// Container → the id of the running instance, in a status.
fn running_in_status(pod: &Value) -> BTreeMap<String, Vec<String>> {
    ["containerStatuses", "initContainerStatuses"]
        .iter()
        .flat_map(|list| pod["status"][list].as_array().cloned().unwrap_or_default())
        .filter(|status| !status["state"]["running"].is_null())
        .map(|status| {
            let id = text(&status, "/containerID");
            let id = id.split_once("://").map_or(id, |(_, id)| id).to_owned();
            (text(&status, "/name").to_owned(), vec![id])
        })
        .collect()
}

/// Those of the wanted pods of which every container runs, once.
fn complete(running: &Running, wanted: &Wanted) -> Running {
    let is_whole = |pod: &String, containers: &BTreeMap<String, Vec<String>>| {
        wanted.get(pod).is_some_and(|wanted| {
            containers.keys().eq(wanted.iter()) && containers.values().all(|ids| ids.len() == 1)
        })
    };
    running
        .iter()
        .filter(|(pod, all)| is_whole(pod, all))
        .map(|(pod, all)| (pod.clone(), all.clone()))
        .collect()
}

/// Whether the statuses of all pods in `running` are ready, with exactly these containers.
fn are_right(pods: &[Value], running: &Running) -> bool {
    running.iter().all(|(wanted, containers)| {
        pods.iter().any(|pod| {
            name(pod) == wanted && condition(pod, "Ready") == "True" && running_in_status(pod) == *containers
        })
    })
}

/// Waits until the wanted pods run and the node shows them as ready.
fn wait_running(joined: &JoinedNode<'_>, wanted: &Wanted) -> Running {
    let begun = Instant::now();
    loop {
        let running = complete(&joined.node.running_of_all(), wanted);
        let pods = joined.node.try_pods_json().unwrap_or_default();
        let pods = pods.as_array().cloned().unwrap_or_default();
        if running.len() == wanted.len() && are_right(&pods, &running) {
            return running;
        }
        if begun.elapsed() > START {
            let missing: Vec<&String> = wanted.keys().filter(|pod| !running.contains_key(*pod)).collect();
            panic!("these pods do not run: {missing:?}; shown: {}", json!(pods));
        }
        pause(Duration::from_millis(100));
    }
}

/// Waits until the API server shows the pods that run, as they are.
fn wait_reported(joined: &JoinedNode<'_>, running: &Running) {
    wait_until("the statuses at the API server", START, || are_right(&shown(joined), running));
}

/// The part of `coracle status` about the store; null while the agent does not respond.
fn offline(joined: &JoinedNode<'_>) -> Value {
    let output = joined.node.command(&["status", "-o", "json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    report["offline"].clone()
}

fn wait_stored(joined: &JoinedNode<'_>, pods: usize) {
    let pods = u64::try_from(pods).expect("a small number");
    wait_until("the objects to be stored", START, || {
        let objects = &offline(joined)["objects"];
        let count = |kind: &str| objects[kind].as_u64().unwrap_or(0);
        // A token that is mounted by default in each pod that runs, and five for an audience.
        [("pod", pods), ("podstatus", pods), ("token", pods + 4), ("claim", 3), ("volume", 3)]
            .iter()
            .all(|(kind, wanted)| count(kind) >= *wanted)
            && ["node", "configmap", "secret", "services"].iter().all(|kind| count(kind) > 0)
    });
}

/// What a shell in the main container of a pod prints.
fn sh(joined: &JoinedNode<'_>, running: &Running, pod: &str, script: &str) -> String {
    let found = running.iter().find(|(name, _)| name.starts_with(pod));
    let (_, containers) = found.unwrap_or_else(|| panic!("{pod} runs"));
    joined.node.exec(&containers["main"][0], &["sh", "-c", script])
}

/// Each kind of pod has what it needs.
fn check_contents(joined: &JoinedNode<'_>, running: &Running) {
    for pod in running.keys().filter(|pod| pod.starts_with("cut-web")) {
        assert_eq!(sh(joined, running, pod, WEB_SCRIPT), web_output(pod));
    }
    assert_eq!(sh(joined, running, "cut-side", "cat /dir/file"), "made\n");
    for pod in ["cut-data", "cut-set-0", "cut-set-1"] {
        assert_eq!(sh(joined, running, pod, "cat /data/file"), "first\n", "{pod}");
    }
    assert_eq!(sh(joined, running, "cut-plain", &format!("ls {ACCOUNT}")), "ca.crt\nnamespace\ntoken\n");
}

/// The Secret's value, and the signatures of tokens: all that nothing on the disk may have.
fn canaries(joined: &JoinedNode<'_>, running: &Running) -> Vec<String> {
    let mut texts: Vec<String> = CANARY.iter().map(|text| (*text).to_owned()).collect();
    for (pod, file) in [("cut-web", "/all/token"), ("cut-web", ACCOUNT), ("cut-data", ACCOUNT)] {
        let file = if file == ACCOUNT { format!("{ACCOUNT}/token") } else { file.to_owned() };
        let token = sh(joined, running, pod, &format!("cat {file}"));
        let signature = token.rsplit('.').next().unwrap_or_default();
        texts.push(signature.get(..40).expect("a signature has more").to_owned());
    }
    texts
}

/// None of the texts is in a file of the node, in a log, in an event, or in a response. The runtime's
/// directory is left out: it stores the environment of each container, which has the Secret in clear.
fn check_no_copies(joined: &JoinedNode<'_>, texts: &[String]) {
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let found = files_with_except(joined.node.dir(), &texts, &[joined.node.containerd.dir()]);
    assert!(found.is_empty(), "copies of Secrets or tokens: {found:?}");
    for command in [&["events", "-o", "json"][..], &["status", "-o", "json"], &["offline", "list"]] {
        let output = joined.node.cli(command);
        assert!(texts.iter().all(|text| !output.contains(text)), "{command:?}: {output}");
    }
    let pods = joined.node.try_pods_json().unwrap_or_default().to_string();
    assert!(texts.iter().all(|text| !pods.contains(text)), "{pods}");
}

/// The search finds what is there, and what the containers have is in memory.
fn check_search(joined: &JoinedNode<'_>, texts: &[String]) {
    let seen = joined.node.root().join("seen");
    for text in texts {
        fs::write(&seen, format!("x{text}")).expect("the file can be written");
        assert_eq!(
            files_with_except(joined.node.dir(), &[text], &[joined.node.containerd.dir()]),
            std::slice::from_ref(&seen)
        );
    }
    fs::remove_file(seen).expect("the file is there");
}

/// One line of the table of docs/offline.md. It is not captured by the test harness.
fn report(agent: &str, words: &str) {
    let _ = std::io::stderr().write_all(format!("offline: {agent}: {words}\n").as_bytes());
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn twenty_pods_start_alone_after_a_power_cut_and_the_control_plane_takes_them_back() {
    let is_go = runs_go_kubelet();
    let agent = if is_go { "Go kubelet" } else { "coracle" };
    let plane = ControlPlane::start_with(
        &directory("cut-cp"),
        &ControlPlaneOptions { scheduler: false, ..ControlPlaneOptions::default() },
    );
    plane.wait(&["serviceaccount", "default"], "made", LIMIT, |_| true);
    plane.wait(&["configmap", "kube-root-ca.crt"], "made", LIMIT, |_| true);
    let kubeconfig = plane.node_kubeconfig(NODE).display().to_string();
    let mut flags = vec!["--kubeconfig", &kubeconfig];
    if !is_go {
        flags.extend(["--offline", "--offline-wait=2s"]);
    }
    let mut joined = JoinedNode::prepare_with(&plane, NODE, json!({}), &flags).start_and_wait();
    make_all(&joined);

    let all = wait_for("all pods to run or to be done", START, || {
        let all = shown(&joined);
        let done = |pod: &Value| text(pod, "/status/phase") == "Succeeded" && name(pod).contains("-done-");
        let is_right = |pod: &Value| condition(pod, "Ready") == "True" || done(pod);
        (all.len() == PODS && all.iter().all(is_right) && all.iter().any(done)).then_some(all)
    });
    let mut wanted: Wanted = all
        .iter()
        .filter(|pod| !name(pod).contains("-done-"))
        .map(|pod| (name(pod).to_owned(), wanted_of(pod)))
        .collect();
    let first = wait_running(&joined, &wanted);
    check_contents(&joined, &first);
    let mut texts = Vec::new();
    if !is_go {
        wait_stored(&joined, PODS - 1);
        texts = canaries(&joined, &first);
        check_search(&joined, &texts);
        check_no_copies(&joined, &texts);
    }

    joined.node.cut_power();
    plane.kubectl(&["delete", "pod", "cut-goes", "--force", "--grace-period=0"]);
    plane.kubectl(&["patch", "configmap", "cut-cm", "-p", r#"{"data":{"text":"two"}}"#]);
    plane.stop(API_SERVER);
    let begun = joined.node.boot();
    joined.node.wait_healthy();
    let expected = match is_go {
        true => [("static-cut".to_owned(), wanted["static-cut"].clone())].into(),
        false => wanted.clone(),
    };
    wait_running(&joined, &expected);
    let seconds = begun.elapsed().as_secs_f64();
    if is_go {
        pause(WATCH);
    }
    let alone = complete(&joined.node.running_of_all(), &wanted);
    let count = format!("{} of {}", alone.len(), wanted.len());
    report(agent, &format!("{count} pods run alone, {seconds:.1} s after its start"));
    let runs = |file: &str| fs::read_to_string(joined.node.shared().join(file)).unwrap_or_default();
    if is_go {
        assert_eq!(alone.keys().collect::<Vec<_>>(), ["static-cut"]);
    } else {
        assert_eq!(offline(&joined)["phase"], "alone");
        assert!(first.iter().all(|(pod, containers)| alone[pod] != *containers), "a container has survived");
        check_contents(&joined, &alone);
        check_no_copies(&joined, &texts);
        wait_until("the second run of the job", START, || runs("working") == "run\nrun\n");
        assert_eq!(runs("done"), "run\n");
    }

    plane.resume(API_SERVER);
    let begun = Instant::now();
    wanted.remove("cut-goes");
    let last = wait_running(&joined, &wanted);
    wait_reported(&joined, &last);
    let seconds = begun.elapsed().as_secs_f64();
    let restarted = alone.iter().filter(|(pod, all)| *pod != "cut-goes" && last[*pod] != **all).count();
    let late = last.keys().filter(|pod| !alone.contains_key(*pod)).count();
    wait_until("the deleted pod to be gone", START, || {
        !joined.node.running_of_all().contains_key("cut-goes")
    });
    let gone = begun.elapsed().as_secs_f64();
    wait_until("the edit to arrive", START, || {
        last.keys()
            .filter(|pod| pod.starts_with("cut-web"))
            .all(|pod| sh(&joined, &last, pod, "cat /cm/text") == "two")
    });
    let edited = begun.elapsed().as_secs_f64();
    report(
        agent,
        &format!(
            "with the API server again: statuses right after {seconds:.1} s, the deleted pod gone within \
             {gone:.1} s, the edited ConfigMap in the volumes within {edited:.1} s; {late} pods started only \
             then, {restarted} restarted"
        ),
    );
    joined.wait_node_ready();
    assert_eq!(restarted, 0);
    assert_eq!(runs("done"), "run\n", "a finished job runs once");
    let pods = wait_for("the list of pods", LIMIT, || Some(shown(&joined)).filter(|pods| !pods.is_empty()));
    let named = |part: &str| pods.iter().filter(|pod| name(pod).contains(part)).collect::<Vec<_>>();
    assert_eq!(
        named("cut-done-").iter().map(|pod| text(pod, "/status/phase")).collect::<Vec<_>>(),
        ["Succeeded"]
    );
    for pod in pods.iter().filter(|pod| last.contains_key(name(pod)) && !name(pod).starts_with("static")) {
        assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 1, "{}", name(pod));
    }
    if !is_go {
        check_no_copies(&joined, &texts);
        let events = plane.kubectl(&["get", "events", "-A", "-o", "json"]);
        assert!(texts.iter().all(|text| !events.contains(text)), "an event has a Secret or a token");
    }
    finish(joined);
}

/// Deletes the controllers and their pods, and ends the node when no pod is left.
fn finish(joined: JoinedNode<'_>) {
    joined.node.remove("static.json");
    let kinds = "deployment,statefulset,replicaset,job,pod";
    joined.plane.kubectl(&["delete", kinds, "--all", "--wait=false", "--grace-period=1"]);
    wait_until("all pods to be gone", START, || {
        let list = joined.plane.poll(&["pods"]).unwrap_or_default();
        list["items"].as_array().is_some_and(Vec::is_empty)
    });
    joined.finish(&[]);
}
