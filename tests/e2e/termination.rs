//! How pods end, what is reported of the end, and that the report stays.

use std::fs;
use std::time::Duration;

use serde_json::json;

use crate::support::node::{
    FOREVER, LONG, Node, STAMP, busybox, container, container_id, ended, phase, pod, restarts, uid,
};
use crate::support::wait::{holds_for, wait_until};

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn active_deadline_ends_a_pod_within_its_grace_period() {
    // Without the time of its deadline the pod would be synced again only after that.
    let node = Node::start_with("deadline", json!({"syncFrequency": "1h"}));
    let script = format!(
        "trap '{STAMP} >> /out/term; sleep 1; {STAMP} >> /out/end; exit 0' TERM; \
         {STAMP} >> /out/start; while :; do sleep 0.1; done"
    );
    let mut manifest = pod("short", json!([busybox("main", &script)]));
    // The deadline counts from the first sync of the pod: part of it has passed when the pod runs, and
    // much of it on a busy machine.
    manifest["spec"]["activeDeadlineSeconds"] = json!(60);
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(120);
    node.apply("short.json", &node.with_out(manifest));
    node.wait_stamp("start");
    let over = node.wait_pod("short", "over", LONG * 2, |pod| phase(pod) == "Failed");
    let status = over.status.clone().unwrap_or_default();
    assert_eq!(status.reason.as_deref(), Some("DeadlineExceeded"));
    assert_eq!(
        status.message.as_deref(),
        Some("Pod was active on the node longer than the specified deadline")
    );
    wait_until("the end to be reported", LONG, || {
        node.pod("short").is_some_and(|pod| ended(&pod, "main").is_some())
    });
    let over = node.pod("short").expect("the pod is listed");
    let begun = over.status.as_ref().and_then(|status| status.start_time.clone()).expect("a start time").0;
    let end = ended(&over, "main").and_then(|end| end.finished_at).expect("a time of the end").0;
    let lived = (end.as_second() - begun.as_second()) as f64;
    assert!((60.0..178.0).contains(&lived), "ended {lived} s after the pod's start");
    assert!(node.wait_stamp("end") - node.wait_stamp("term") >= 0.9, "it had time to end");
    let event = node.wait_event("short", "DeadlineExceeded", "longer than the specified deadline");
    assert_eq!(event.kind, "Normal");
    wait_until("nothing of it to run", LONG, || {
        node.running("short").is_empty() && node.running_sandboxes("short").is_empty()
    });
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn final_status_survives_removal_of_runtime_records() {
    let node = Node::start("traces");
    for (name, code) in [("good", 0), ("bad", 3)] {
        let mut manifest =
            pod(name, json!([busybox("main", &format!("exit {code}")), busybox("side", "exit 0")]));
        manifest["spec"]["restartPolicy"] = json!("Never");
        node.apply(&format!("{name}.json"), &manifest);
    }
    let good = node.wait_pod("good", "succeeded", LONG, |pod| phase(pod) == "Succeeded");
    let bad = node.wait_pod("bad", "failed", LONG, |pod| phase(pod) == "Failed");
    let address =
        |pod: &coracle::model::api::Pod| pod.status.as_ref().and_then(|status| status.pod_ip.clone());
    let addresses = (address(&good), address(&bad));
    assert!(addresses.0.is_some() && addresses.1.is_some(), "{addresses:?}");
    wait_until("the sandboxes to stop", LONG, || {
        node.running_sandboxes("good").is_empty() && node.running_sandboxes("bad").is_empty()
    });
    let (runtime, _) = node.cri();
    // The agent may remove the same record at this time: then the call fails.
    wait_until("their records to be gone", LONG, || {
        let containers = runtime.list_containers(Default::default()).expect("ListContainers");
        let sandboxes = runtime.list_pod_sandbox(Default::default()).expect("ListPodSandbox");
        let gone = containers.is_empty() && sandboxes.is_empty() && node.containerd.tasks().is_empty();
        for container in containers {
            let _ = runtime.remove_container(&container.id.into());
        }
        for sandbox in sandboxes {
            let _ = runtime.remove_pod_sandbox(&sandbox.id.into());
        }
        gone
    });
    holds_for("nothing starts and all statuses stay", Duration::from_secs(4), || {
        let (Some(good), Some(bad)) = (node.pod("good"), node.pod("bad")) else { return false };
        node.containerd.tasks().is_empty()
            && (phase(&good), phase(&bad)) == ("Succeeded", "Failed")
            && ended(&good, "main").map(|end| end.exit_code) == Some(0)
            && ended(&bad, "main").map(|end| end.exit_code) == Some(3)
            && (restarts(&good, "main"), restarts(&bad, "main")) == (0, 0)
            && (address(&good), address(&bad)) == addresses
    });
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn pod_with_restart_policy_never_ends_with_its_sandbox() {
    let node = Node::start("sandboxend");
    let mut manifest = pod("web", json!([busybox("main", FOREVER), busybox("side", FOREVER)]));
    manifest["spec"]["restartPolicy"] = json!("Never");
    node.apply("web.json", &manifest);
    node.wait_ready("web");
    let sandbox = node.running_sandboxes("web");
    node.containerd.kill_task(&sandbox[0]);
    node.wait_pod("web", "over", LONG, |pod| ["Failed", "Succeeded"].contains(&phase(pod)));
    holds_for("no sandbox follows", Duration::from_secs(3), || {
        node.running_sandboxes("web").is_empty() && node.running("web").is_empty()
    });
    let over = node.pod("web").expect("the pod is listed");
    assert!(["main", "side"].iter().all(|name| ended(&over, name).is_some() && restarts(&over, name) == 0));
    node.finish();
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn termination_messages_share_a_size_limit() {
    let node = Node::start("words");
    let talker = |name: &str| {
        // 5,000 bytes that end in the container's name.
        busybox(
            name,
            &format!("(head -c 4998 /dev/zero | tr '\\0' x; printf {name}) > /dev/termination-log; exit 1"),
        )
    };
    for (name, number) in [("three", 3), ("six", 6)] {
        let containers: Vec<_> = (0..number).map(|index| talker(&format!("c{index}"))).collect();
        let mut manifest = pod(name, json!(containers));
        manifest["spec"]["restartPolicy"] = json!("Never");
        node.apply(&format!("{name}.json"), &manifest);
    }
    let mut logs = pod(
        "logs",
        json!([
            busybox("failed", "for n in $(seq 1 200); do echo line $n; done; exit 2"),
            busybox("fine", "echo all well; exit 0"),
            busybox("spoken", "echo from the log; echo said > /dev/termination-log; exit 2"),
        ]),
    );
    logs["spec"]["restartPolicy"] = json!("Never");
    for index in 0..3 {
        logs["spec"]["containers"][index]["terminationMessagePolicy"] = json!("FallbackToLogsOnError");
    }
    node.apply("logs.json", &logs);

    for (name, number, limit) in [("three", 3, 4096), ("six", 6, 2048)] {
        let over = node.wait_pod(name, "over", LONG, |pod| phase(pod) == "Failed");
        for index in 0..number {
            let container = format!("c{index}");
            let message = ended(&over, &container).and_then(|end| end.message).unwrap_or_default();
            assert_eq!(message.len(), limit, "{name}/{container}");
            if name == "three" {
                assert!(
                    message.ends_with(&container),
                    "the end of the message is kept: {}",
                    &message[message.len() - 9..]
                );
            }
        }
    }
    let over = node.wait_pod("logs", "over", LONG, |pod| phase(pod) == "Failed");
    let message_of = |name: &str| ended(&over, name).and_then(|end| end.message).unwrap_or_default();
    let lines: Vec<String> = message_of("failed").lines().map(str::to_owned).collect();
    assert_eq!(
        (lines.len(), lines.first().map(String::as_str), lines.last().map(String::as_str)),
        (80, Some("line 121"), Some("line 200"))
    );
    assert_eq!((message_of("fine").as_str(), message_of("spoken").as_str()), ("", "said\n"));
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn termination_continues_after_agent_restart() {
    let mut node = Node::start("endrestart");
    let script = format!(
        "trap '{STAMP} >> /out/term' TERM; {STAMP} >> /out/start; while :; do {STAMP} >> /out/beat; sleep 0.1; done"
    );
    let mut manifest = pod("deaf", json!([busybox("main", &script)]));
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(6);
    let manifest = node.with_out(manifest);
    node.apply("deaf.json", &manifest);
    let id = uid(&node.wait_ready("deaf"));
    node.wait_stamp("start");
    node.remove("deaf.json");
    node.wait_stamp("term");
    node.kill_agent();
    node.start_agent();
    wait_until("the container to end", LONG, || node.containerd.tasks().iter().all(|task| !task.running));
    let lived = node.last_stamp("beat") - node.wait_stamp("term");
    assert!(lived < 60.0, "it lived for {lived} s after the signal");
    wait_until("the pod's directory to be gone", LONG, || !node.root().join("pods").join(&id).exists());
    assert_eq!(node.stamps("start").len(), 1, "it was not started again");
    node.finish();
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn log_files_and_links_are_at_the_documented_paths() {
    let node = Node::start_with(
        "logs",
        json!({"containerLogMaxSize": "100Ki", "containerLogMaxFiles": 4, "containerLogMonitorInterval": "3s"}),
    );
    let script = format!(
        "echo first words; until [ -e /out/go ]; do sleep 0.1; done; \
         until [ -e /out/enough ]; do head -c 60000 /dev/zero | tr '\\0' x | fold -w 99; sleep 0.2; done; {FOREVER}"
    );
    let manifest = pod("talker", json!([busybox("main", &script)]));
    node.apply("talker.json", &node.with_out(manifest));
    let ready = node.wait_ready("talker");
    let id = container_id(&ready, "main");
    let dir = node.logs().join(format!("default_talker-e2e_{}", uid(&ready))).join("main");
    wait_until("the log", LONG, || {
        fs::read_to_string(dir.join("0.log")).is_ok_and(|text| text.ends_with(" stdout F first words\n"))
    });
    let link = std::path::PathBuf::from(format!("/var/log/containers/talker-e2e_default_main-{id}.log"));
    // It is made after the start of the container.
    wait_until("the link to the log", LONG, || fs::read_link(&link).ok() == Some(dir.join("0.log")));

    let names = || -> Vec<String> {
        let entries =
            fs::read_dir(&dir).map(|entries| entries.flatten().collect::<Vec<_>>()).unwrap_or_default();
        let mut names: Vec<String> =
            entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    let whole = |names: &[String]| names.iter().filter(|name| !name.ends_with(".tmp")).count();
    node.touch("go");
    let mut most = 0;
    wait_until("a current, a plain and two compressed files", LONG, || {
        let names = names();
        most = most.max(whole(&names));
        let rotated = |name: &String| name.starts_with("0.log.");
        names.iter().any(|name| name == "0.log")
            && names.iter().filter(|name| name.ends_with(".gz")).count() == 2
            && names
                .iter()
                .filter(|name| rotated(name) && !name.ends_with(".gz") && !name.ends_with(".tmp"))
                .count()
                == 1
    });
    node.touch("enough");
    // While a file is compressed its original is still there, once.
    assert!(most <= 5, "{most} files at one time");
    // The agents of all tests share the links' directory, and each removes what leads nowhere and
    // is not its own: another one's look may fall into the moment of a rotation.
    wait_until("the link to lead to a file", LONG, || link.exists() || fs::symlink_metadata(&link).is_err());
    assert_eq!(container(&node.wait_ready("talker"), "main").map(|status| status.restart_count), Some(0));
    node.finish();
}
