//! `/run` and `/checkpoint`: actions on one container.

use crate::model::api::Pod;
use crate::model::ids::PodUid;
use crate::server::backend::NodeBackend;
use crate::server::http::request::{Method, Request};
use crate::server::http::response::{Reply, Response};
use crate::server::views::containers::container_names;

/// Responds to `/run/{namespace}/{pod}[/{uid}]/{container}`.
pub(super) fn respond(request: &Request, node: &dyn NodeBackend) -> Result<Reply, Response> {
    let elements: Vec<&str> = request.target.path.trim_start_matches('/').split('/').collect();
    // As upstream, the UID is not compared: a pod's name is unique on its node.
    let ([_, namespace, name, container] | [_, namespace, name, _, container]) = *elements.as_slice() else {
        return Err(Response::no_route());
    };
    let pod = find(request, node, namespace, name)?;
    // Split at each blank: there is no quoting, and two blanks make an empty argument.
    let command = request.target.get("cmd").unwrap_or_default().split(' ').map(str::to_owned).collect();
    let uid = PodUid::from(pod.metadata.uid.unwrap_or_default());
    let container = container.to_owned();
    Ok(Reply::stream(move |out, node, stop| {
        let response = match node.run(&uid, &container, command, stop) {
            // As upstream: JSON, whatever the command prints.
            Ok(body) => Response::new(200, "application/json", body),
            Err(error) => Response::text(500, error.to_string()),
        };
        response.write(out)
    }))
}

/// Responds to `/checkpoint/{namespace}/{pod}/{container}`.
pub(super) fn checkpoint(request: &Request, node: &dyn NodeBackend) -> Result<Reply, Response> {
    let elements: Vec<&str> = request.target.path.trim_start_matches('/').split('/').collect();
    let [_, namespace, name, container] = *elements.as_slice() else {
        return Err(Response::no_route());
    };
    let pod = find(request, node, namespace, name)?;
    if !container_names(&pod).contains(&container) {
        return Err(Response::text(404, format!("container {container} does not exist")));
    }
    let seconds = match request.target.all("timeout").last() {
        Some(text) => {
            text.parse().map_err(|_| Response::text(404, "cannot parse value of timeout parameter"))?
        }
        None => 0,
    };
    let (failed, container) =
        (format!("checkpointing of {namespace}/{name}/{container} failed"), container.to_owned());
    Ok(Reply::stream(move |out, node, stop| {
        let response = match node.checkpoint(&pod, &container, seconds, stop) {
            Ok(path) => Response::json(&serde_json::json!({"items": [path.to_string_lossy()]})),
            Err(error) => Response::text(500, format!("{failed} ({error})")),
        };
        response.write(out)
    }))
}

fn find(request: &Request, node: &dyn NodeBackend, namespace: &str, name: &str) -> Result<Pod, Response> {
    if request.method != Method::Post {
        return Err(Response::not_allowed("POST"));
    }
    let pod = node.find_pod(namespace, name).ok_or_else(|| Response::text(404, "pod does not exist"))?;
    Ok(node.object(&pod))
}
