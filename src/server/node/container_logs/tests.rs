use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::server::node::tests::Fixture;

const T: &str = "2026-01-01T00:00:0";

/// A pod whose container `a` has run in two instances, `1` before and `2` now.
fn status() -> Value {
    json!({"containerStatuses": [
        {"name": "a", "containerID": "containerd://2", "state": {"running": {}},
         "lastState": {"terminated": {"containerID": "containerd://1", "exitCode": 1}},
         "image": "", "imageID": "", "ready": true, "restartCount": 1},
    ]})
}

fn fixture(dir: &Path, status: Value) -> Fixture {
    let pod = json!({
        "metadata": {"namespace": "default", "name": "web", "uid": "uid1"},
        "spec": {
            "containers": [{"name": "a"}, {"name": "b"}],
            "initContainers": [{"name": "i"}],
            "ephemeralContainers": [{"name": "e"}],
        },
        "status": status,
    });
    let pod: crate::model::api::Pod = serde_json::from_value(pod).unwrap();
    Fixture::new(|node| {
        node.named = vec![pod.into()];
        node.instance_logs = Some(dir.to_owned());
    })
}

fn logs() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let old = format!("{T}1Z stdout F before\n");
    let new = format!("{T}1.5Z stdout F one\n{T}2Z stderr P tw\n{T}3Z stderr F o\n{T}4Z stdout F three\n");
    std::fs::write(dir.path().join("1.log"), old).unwrap();
    std::fs::write(dir.path().join("2.log"), new).unwrap();
    dir
}

#[test]
fn parameters_are_validated_and_applied() {
    const UNDECODABLE: &str = r#"{"message": "Unable to decode query."}"#;
    const INVALID: &str = r#"{"message": "Invalid request."}"#;
    const ALL: &str = "one\ntwo\nthree\n";
    let dir = logs();
    let fixture = fixture(dir.path(), status());
    for (query, status, text) in [
        ("", 200, ALL),
        ("follow=true", 200, ALL),
        ("follow=false", 200, ALL),
        // Every bool is valid.
        ("follow=maybe&timestamps=0&previous=FALSE", 200, ALL),
        ("previous=true", 200, "before\n"),
        ("previous", 200, "before\n"),
        (
            "timestamps=true",
            200,
            "2026-01-01T00:00:01.500000000Z one\n2026-01-01T00:00:02.000000000Z two\n2026-01-01T00:00:04.000000000Z three\n",
        ),
        ("tailLines=1", 200, "three\n"),
        // Lines of the file, not of the container.
        ("tailLines=2", 200, "o\nthree\n"),
        ("tailLines=0", 200, ""),
        ("tailLines=100", 200, ALL),
        ("tail=1&tailLines=3", 200, "three\n"),
        ("tail=all&tailLines=1", 200, ALL),
        ("tail=&tailLines=1", 200, "three\n"),
        ("limitBytes=5", 200, "one\nt"),
        ("limitBytes=1&timestamps=true", 200, "2"),
        ("limitBytes=1000", 200, ALL),
        ("sinceTime=2026-01-01T00:00:03Z", 200, "o\nthree\n"),
        ("sinceTime=2026-01-01T01:00:04%2B01:00", 200, "three\n"),
        ("sinceTime=", 200, ALL),
        ("sinceSeconds=1", 200, ""),
        ("sinceSeconds=9000000000000000000", 200, ALL),
        ("stream=All", 200, ALL),
        ("unknown=parameter", 200, ALL),
        ("tailLines=x", 400, UNDECODABLE),
        ("tailLines=", 400, UNDECODABLE),
        ("tail=x", 400, UNDECODABLE),
        ("limitBytes=1.5", 400, UNDECODABLE),
        ("sinceSeconds=1h", 400, UNDECODABLE),
        ("sinceTime=yesterday", 400, UNDECODABLE),
        ("sinceTime=2026-01-01T00:00:00", 400, UNDECODABLE),
        ("sinceTime=2026-01-01T00:00:00+01:00", 400, UNDECODABLE),
        ("tailLines=-1", 422, INVALID),
        ("tail=-1", 422, INVALID),
        ("limitBytes=0", 422, INVALID),
        ("limitBytes=-5", 422, INVALID),
        ("sinceSeconds=0", 422, INVALID),
        ("sinceSeconds=-1", 422, INVALID),
        ("sinceSeconds=5&sinceTime=2026-01-01T00:00:00Z", 422, INVALID),
        (
            "stream=Stdout",
            400,
            "unable to return the given log stream: \"Stdout\". Please enable PodLogsQuerySplitStreams feature gate in kubelet",
        ),
    ] {
        let response = fixture.get(&format!("/containerLogs/default/web/a?{query}"));
        assert_eq!(response.brief(), (status, text.to_owned()), "{query}");
        assert_eq!(response.header("Content-Type"), "text/plain; charset=utf-8");
    }
    for (path, status, text) in [
        ("/containerLogs/default/none/a", 404, "pod \"none\" does not exist"),
        ("/containerLogs/default/web/none", 404, "container \"none\" not found in pod \"web\""),
        ("/containerLogs/default/web/", 400, r#"{"message": "Missing container name."}"#),
        ("/containerLogs/default//a", 400, r#"{"message": "Missing podID."}"#),
        ("/containerLogs//web/a", 400, r#"{"message": "Missing podNamespace."}"#),
        ("/containerLogs/default/web", 404, "404: Page Not Found"),
        ("/containerLogs/default/web/a/b", 404, "404: Page Not Found"),
        ("/containerLogs/default/web/..%2f..%2fetc", 404, "404: Page Not Found"),
        // Parameters are validated before the pod is found.
        ("/containerLogs/default/none/a?limitBytes=0", 422, INVALID),
        ("/containerLogs/default/web/b", 400, "container \"b\" in pod \"web\" is not available"),
    ] {
        assert_eq!(fixture.get(path).brief(), (status, text.to_owned()), "{path}");
    }
}

#[test]
fn one_stream_can_be_selected_with_the_gate() {
    let dir = logs();
    let mut fixture = fixture(dir.path(), status());
    Arc::get_mut(&mut fixture.node).unwrap().switches.split_streams = true;
    for (query, status, text) in [
        ("stream=Stdout", 200, "one\nthree\n"),
        ("stream=Stderr", 200, "two\n"),
        ("stream=All&tailLines=1", 200, "three\n"),
        ("stream=Stderr&tailLines=1", 422, r#"{"message": "Invalid request."}"#),
        ("stream=stdout", 422, r#"{"message": "Invalid request."}"#),
    ] {
        let response = fixture.get(&format!("/containerLogs/default/web/a?{query}"));
        assert_eq!(response.brief(), (status, text.to_owned()), "{query}");
    }
}

#[test]
fn pod_status_determines_the_instance_whose_log_is_sent() {
    let ended = |id: &str| json!({"terminated": {"containerID": id, "exitCode": 0}});
    let waits = |reason: &str| json!({"waiting": {"reason": reason}});
    let none = || json!({});
    let running = || json!({"running": {}});
    let which = "container \"a\" in pod \"p\"";
    let no_previous = || Err(format!("previous terminated {which} not found"));
    let error = |problem: &str| Err(format!("{which} is {problem}"));
    let id = |id: &str| Ok(id.to_owned());
    for (state, last, previous, expected) in [
        (running(), none(), false, id("now")),
        (running(), ended("x://b"), true, id("x://b")),
        (running(), none(), true, no_previous()),
        (running(), ended(""), true, no_previous()),
        (ended("x://a"), ended("x://b"), false, id("x://a")),
        (ended(""), ended("x://b"), false, id("x://b")),
        (ended(""), none(), false, error("terminated")),
        (waits("CrashLoopBackOff"), ended("x://b"), false, id("x://b")),
        (waits("CrashLoopBackOff"), ended(""), false, error("terminated")),
        (waits("ContainerCreating"), none(), false, error("waiting to start: ContainerCreating")),
        (waits("ErrImagePull"), none(), false, error("waiting to start: image can't be pulled")),
        (
            waits("ImagePullBackOff"),
            none(),
            false,
            error("waiting to start: trying and failing to pull image"),
        ),
        (none(), none(), false, error("waiting to start - no logs yet")),
    ] {
        for kind in ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"] {
            let status = json!({kind: [{
                "name": "a", "containerID": "now", "state": state, "lastState": last,
                "image": "", "imageID": "", "ready": false, "restartCount": 0,
            }]});
            let pod: crate::model::api::Pod =
                serde_json::from_value(json!({"metadata": {}, "status": status})).unwrap();
            let found = instance(pod.status.as_ref(), "p", "a", previous);
            assert_eq!(found, expected, "{state} {last}");
        }
    }
    assert!(instance(None, "p", "a", false).unwrap_err().ends_with("is not available"));
}

#[test]
fn errors_of_log_files_are_sent_as_text_with_200() {
    let dir = logs();
    let response_for = |id: &str| {
        let mut status = status();
        status["containerStatuses"][0]["containerID"] = id.into();
        fixture(dir.path(), status).get("/containerLogs/default/web/a").brief()
    };
    assert_eq!(
        response_for("containerd://9"),
        (200, "unable to retrieve container logs for containerd://9".to_owned())
    );
    let (status, text) = response_for("containerd://3");
    assert!(status == 200 && text.contains("does not exist"), "{text}");
    // No line of a file that is not a log is sent.
    std::fs::write(dir.path().join("4.log"), "root:secret:0:0\n").unwrap();
    assert_eq!(
        response_for("containerd://4"),
        (200, "failed to get parse function: unsupported log format".to_owned())
    );
    // Links and devices are not opened.
    for (id, target) in [("5", "/etc/passwd"), ("6", "/dev/zero")] {
        std::os::unix::fs::symlink(target, dir.path().join(format!("{id}.log"))).unwrap();
        let (_, text) = response_for(&format!("containerd://{id}"));
        assert!(text.ends_with(&format!("{id}.log is no regular file")), "{text}");
    }
}
