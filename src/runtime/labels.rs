//! The labels and annotations that assign sandboxes and containers in the runtime to pods. Their
//! names and the JSON inside are read by other tools and by a Go kubelet that takes over, so even
//! the order of the JSON fields is upstream's.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::model::api::{Container, LifecycleHandler};
use crate::model::labels as keys;
use crate::model::pod::{Pod, container_hash};

type Map = BTreeMap<String, String>;

fn identity(pod: &Pod) -> [(String, String); 3] {
    [
        (keys::POD_NAME.to_owned(), pod.name().to_owned()),
        (keys::POD_NAMESPACE.to_owned(), pod.namespace().to_owned()),
        (keys::POD_UID.to_owned(), pod.uid().to_string()),
    ]
}

/// The pod's own labels, and its identity.
pub(super) fn sandbox_labels(pod: &Pod) -> Map {
    let own = pod.object().metadata.labels.iter().flatten();
    own.map(|(key, value)| (key.clone(), value.clone())).chain(identity(pod)).collect()
}

/// The pod's own annotations.
pub(super) fn sandbox_annotations(pod: &Pod) -> Map {
    let own = pod.object().metadata.annotations.iter().flatten();
    own.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Which pod and container an instance belongs to.
pub(super) fn container_labels(pod: &Pod, container: &Container) -> Map {
    let mut labels = Map::from(identity(pod));
    labels.insert(keys::CONTAINER_NAME.to_owned(), container.name.clone());
    labels
}

/// The data needed to check and stop an instance, even without the pod's manifest.
pub(super) fn container_annotations(pod: &Pod, container: &Container, restart_count: u32) -> Map {
    let image = container.image.as_deref().unwrap_or_default();
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let mut annotations = Map::from([
        (keys::CONTAINER_HASH.to_owned(), format!("{:x}", container_hash(&container.name, image))),
        (keys::CONTAINER_RESTART_COUNT.to_owned(), restart_count.to_string()),
        (keys::CONTAINER_TERMINATION_MESSAGE_PATH.to_owned(), text(&container.termination_message_path)),
        (keys::CONTAINER_TERMINATION_MESSAGE_POLICY.to_owned(), text(&container.termination_message_policy)),
    ]);
    let mut add = |key: &str, value: Option<String>| {
        if let Some(value) = value {
            annotations.insert(key.to_owned(), value);
        }
    };
    let seconds = |value: Option<i64>| value.map(|value| value.to_string());
    add(keys::POD_DELETION_GRACE_PERIOD, seconds(pod.object().metadata.deletion_grace_period_seconds));
    add(keys::POD_TERMINATION_GRACE_PERIOD, seconds(pod.spec().termination_grace_period_seconds));
    let pre_stop = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.pre_stop.as_ref());
    add(keys::CONTAINER_PRE_STOP_HANDLER, pre_stop.and_then(handler_json));
    add(keys::CONTAINER_PORTS, ports_json(container));
    annotations
}

fn is_blank(text: &Option<&str>) -> bool {
    text.is_none_or(str::is_empty)
}

fn is_zero(number: &i32) -> bool {
    *number == 0
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PortJson<'a> {
    #[serde(skip_serializing_if = "is_blank")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "is_zero")]
    host_port: i32,
    container_port: i32,
    #[serde(skip_serializing_if = "is_blank")]
    protocol: Option<&'a str>,
    #[serde(rename = "hostIP", skip_serializing_if = "is_blank")]
    host_ip: Option<&'a str>,
}

fn ports_json(container: &Container) -> Option<String> {
    let ports: Vec<PortJson<'_>> = container
        .ports
        .iter()
        .flatten()
        .map(|port| PortJson {
            name: port.name.as_deref(),
            host_port: port.host_port.unwrap_or(0),
            container_port: port.container_port,
            protocol: port.protocol.as_deref(),
            host_ip: port.host_ip.as_deref(),
        })
        .collect();
    if ports.is_empty() { None } else { go_json(&ports) }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct HandlerJson<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    exec: Option<&'a crate::model::api::ExecAction>,
    #[serde(skip_serializing_if = "Option::is_none")]
    http_get: Option<HttpGetJson<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tcp_socket: Option<TcpSocketJson<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sleep: Option<&'a crate::model::api::SleepAction>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct HttpGetJson<'a> {
    #[serde(skip_serializing_if = "is_blank")]
    path: Option<&'a str>,
    port: &'a k8s_openapi::apimachinery::pkg::util::intstr::IntOrString,
    #[serde(skip_serializing_if = "is_blank")]
    host: Option<&'a str>,
    #[serde(skip_serializing_if = "is_blank")]
    scheme: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    http_headers: Vec<&'a crate::model::api::HTTPHeader>,
}

#[derive(Serialize)]
struct TcpSocketJson<'a> {
    port: &'a k8s_openapi::apimachinery::pkg::util::intstr::IntOrString,
    #[serde(skip_serializing_if = "is_blank")]
    host: Option<&'a str>,
}

fn handler_json(handler: &LifecycleHandler) -> Option<String> {
    go_json(&HandlerJson {
        exec: handler.exec.as_ref(),
        http_get: handler.http_get.as_ref().map(|get| HttpGetJson {
            path: get.path.as_deref(),
            port: &get.port,
            host: get.host.as_deref(),
            scheme: get.scheme.as_deref(),
            http_headers: get.http_headers.iter().flatten().collect(),
        }),
        tcp_socket: handler
            .tcp_socket
            .as_ref()
            .map(|tcp| TcpSocketJson { port: &tcp.port, host: tcp.host.as_deref() }),
        sleep: handler.sleep.as_ref(),
    })
}

/// JSON as Go's encoder writes it: it escapes the characters that are special in HTML.
/// They can only stand inside strings, so the finished text may be edited.
fn go_json(value: &impl Serialize) -> Option<String> {
    let plain = serde_json::to_string(value).ok()?;
    let mut text = String::with_capacity(plain.len());
    for c in plain.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                use std::fmt::Write;
                // Writing to a String cannot fail.
                let _ = write!(text, "\\u{:04x}", u32::from(c));
            }
            _ => text.push(c),
        }
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations_of(container: serde_json::Value) -> Map {
        let pod = serde_json::json!({"metadata": {"name": "p", "uid": "u", "deletionGracePeriodSeconds": 4},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 9}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
        container_annotations(&pod, &pod.containers()[0], 3)
    }

    #[test]
    fn annotations_have_upstreams_json_order_and_escapes() {
        let map = annotations_of(serde_json::json!({"name": "c", "image": "localhost/busybox:1",
            "ports": [{"containerPort": 80, "name": "http", "protocol": "TCP", "hostPort": 81, "hostIP": "::1"}],
            "lifecycle": {"preStop": {
                "exec": {"command": ["sh", "-c", "a && b > c"]},
                "httpGet": {"scheme": "HTTP", "path": "/x", "port": "web", "host": "h",
                    "httpHeaders": [{"name": "n", "value": "v"}]},
                "tcpSocket": {"host": "h", "port": 1}, "sleep": {"seconds": 2}}}}));
        assert_eq!(
            map[keys::CONTAINER_PORTS],
            r#"[{"name":"http","hostPort":81,"containerPort":80,"protocol":"TCP","hostIP":"::1"}]"#
        );
        assert_eq!(
            map[keys::CONTAINER_PRE_STOP_HANDLER],
            concat!(
                r#"{"exec":{"command":["sh","-c","a \u0026\u0026 b \u003e c"]},"#,
                r#""httpGet":{"path":"/x","port":"web","host":"h","scheme":"HTTP","httpHeaders":[{"name":"n","value":"v"}]},"#,
                r#""tcpSocket":{"port":1,"host":"h"},"sleep":{"seconds":2}}"#
            )
        );
        assert_eq!(map[keys::POD_DELETION_GRACE_PERIOD], "4");
        assert_eq!(map[keys::POD_TERMINATION_GRACE_PERIOD], "9");
        assert_eq!(map[keys::CONTAINER_RESTART_COUNT], "3");
        assert_eq!(map[keys::CONTAINER_HASH], "dd609c43");
        assert_eq!(map[keys::CONTAINER_TERMINATION_MESSAGE_PATH], "");
    }
}
