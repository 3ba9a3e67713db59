//! The local socket's own paths.

use jiff::Timestamp;

use super::select::{find, sorted_pods};
use super::streams;
use crate::images::CheckOptions;
use crate::model::event::Regarding;
use crate::model::ids::PodUid;
use crate::offline::CheckReport;
use crate::runtime::logs::read::ReadOptions;
use crate::server::backend::{NodeBackend, OfflineError};
use crate::server::http::response::{Reply, Response};
use crate::server::registry;
use crate::server::views::containers::{container_names, default_container};
use crate::server::views::holdings::DevicesReply;
use crate::server::views::{PodDescription, PodsReply, VersionReply};
use crate::transport::http1::Target;

/// Responds to a GET.
pub(crate) fn route(path: &str, target: &Target, node: &dyn NodeBackend) -> Result<Reply, Response> {
    let response = match path {
        "/v1/pods" => Response::json(&PodsReply { pods: sorted_pods(node) }),
        "/v1/pods/watch" => return Ok(Reply::stream(streams::pods)),
        "/v1/describe" => describe(target, node)?,
        "/v1/logs" => return logs(target, node),
        "/v1/status" => Response::json(&node.report()),
        "/v1/events" => {
            let since = target.parsed("since")?.unwrap_or(0);
            if target.flag("follow")? {
                return Ok(Reply::stream(move |out, node, stop| streams::events(out, node, since, stop)));
            }
            Response::json(&node.events().recent(since))
        }
        "/v1/images" => match node.images() {
            Ok(images) => Response::json(&images),
            Err(error) => Response::text(502, format!("{error}\n")),
        },
        "/v1/images/manifest" => {
            return registry::manifest_by_name(target.get("image").unwrap_or_default(), &*node.image_set());
        }
        "/v1/images/blob" => {
            return registry::blob_of(target.get("digest").unwrap_or_default(), &*node.image_set());
        }
        "/v1/images/verify" => {
            let image = target.get("image").unwrap_or_default().to_owned();
            let options = CheckOptions { contents: target.flag("digests")?, mend: false };
            return Ok(Reply::stream(move |out, node, stop| {
                streams::verify_image(&image, options, out, node, stop)
            }));
        }
        "/v1/images/set" => Response::json(&node.image_set().report()),
        "/v1/volumes" => Response::json(&node.volumes(None)),
        "/v1/devices" => Response::json(&node.devices(None)),
        "/v1/offline" => {
            let report = if target.flag("names")? { node.list_offline() } else { node.offline() };
            Response::json(&report.ok_or_else(no_store)?)
        }
        "/v1/offline/check" => Response::json(&check_store(target, node)?),
        "/v1/version" => Response::json(&VersionReply::own()),
        _ => Response::not_found(),
    };
    Ok(Reply::Whole(response))
}

fn describe(target: &Target, node: &dyn NodeBackend) -> Result<Response, Response> {
    let view = find(target, node)?;
    let uid = PodUid::from(view.uid());
    let mut events = node.events().recent(0);
    events.retain(
        |event| matches!(&event.regarding, Regarding::Pod { uid: event_uid, .. } if *event_uid == uid),
    );
    let cgroup = node.pod_cgroup(&uid);
    let volumes = node.volumes(Some(&uid)).volumes;
    let DevicesReply { devices, claims, .. } = node.devices(Some(&uid));
    Ok(Response::json(&PodDescription { view, cgroup, events, volumes, devices, claims }))
}

fn no_store() -> Response {
    Response::text(404, format!("{}\n", OfflineError::Off))
}

/// The check of all pods, or of the pod of the parameter `pod`.
fn check_store(target: &Target, node: &dyn NodeBackend) -> Result<CheckReport, Response> {
    let wanted = match target.get("pod") {
        Some(_) => Some(find(target, node)?),
        None => None,
    };
    let mut report = node.check_offline().ok_or_else(no_store)?;
    if let Some(view) = wanted {
        report.pods.retain(|pod| pod.uid == view.uid());
        if report.pods.is_empty() {
            let (namespace, name) = (view.namespace(), view.name());
            let text = format!(
                "pod {namespace}/{name} does not start from the store: it is static, has ended or is being deleted\n"
            );
            return Err(Response::text(422, text));
        }
    }
    Ok(report)
}

fn logs(target: &Target, node: &dyn NodeBackend) -> Result<Reply, Response> {
    let options = ReadOptions {
        follow: target.flag("follow")?,
        tail_lines: target.parsed("tail")?,
        since: target.parsed::<Timestamp>("since")?,
        stream: None,
        timestamps: target.flag("timestamps")?,
        limit_bytes: target.parsed("limitBytes")?,
    };
    let previous = target.flag("previous")?;
    let view = find(target, node)?;
    let names = container_names(&view.pod);
    let container = match target.get("container").filter(|name| !name.is_empty()) {
        Some(name) if names.contains(&name) => name,
        Some(name) => {
            let list = names.join(", ");
            return Err(Response::text(
                404,
                format!(
                    "pod {}/{} has no container {name:?}; it has: {list}\n",
                    view.namespace(),
                    view.name()
                ),
            ));
        }
        None => {
            default_container(&view.pod).ok_or_else(|| Response::text(404, "the pod has no containers\n"))?
        }
    };
    let source = node
        .container_log(&PodUid::from(view.uid()), container, previous)
        .map_err(|error| Response::text(404, format!("{error}\n")))?;
    let (container, container_count) = (container.to_owned(), names.len());
    Ok(Reply::stream(move |out, node, stop| {
        streams::logs(&source, &options, (&container, container_count), out, node, stop)
    }))
}
