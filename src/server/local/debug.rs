//! Requests that change something: `/v1/debug` adds an ephemeral container to a running pod,
//! `/v1/images/rescan` makes the agent read the directories of image archives, `/v1/offline/accept`
//! accepts a set of pods that is held, `/v1/offline/purge` removes stored objects,
//! `/v1/offline/trust` adds authorities of the API server.

use std::path::Path;

use super::select::find;
use crate::model::api::EphemeralContainer;
use crate::model::ids::PodUid;
use crate::offline::PurgeScope;
use crate::server::backend::{NodeBackend, OfflineError};
use crate::server::http::response::Response;
use crate::server::views::DebugReply;
use crate::transport::http1::Target;
use crate::util::backoff::random_u64;

/// Responds to a POST.
pub(crate) fn route(path: &str, target: &Target, node: &dyn NodeBackend) -> Result<Response, Response> {
    if path == "/v1/images/rescan" {
        node.image_set().rescan();
        return Ok(Response::json(&node.image_set().report()));
    }
    if path == "/v1/offline/accept" {
        return node.accept_offline().map(|report| Response::json(&report)).map_err(refusal);
    }
    if path == "/v1/offline/purge" {
        let scope = match (target.get("scope"), target.get("object")) {
            (Some("all"), None) => Ok(PurgeScope::All),
            (Some("damaged"), None) => Ok(PurgeScope::Damaged),
            (None, Some(object)) => PurgeScope::parse(object).map_err(|error| error.to_string()),
            _ => Err("name a scope, all or damaged, or an object".to_owned()),
        };
        let scope = scope.map_err(|error| Response::text(400, format!("{error}\n")))?;
        return node.purge_offline(scope).map(|report| Response::json(&report)).map_err(refusal);
    }
    if path == "/v1/offline/trust" {
        let file = match (target.get("file"), target.flag("remove")?) {
            (Some(file), false) => Some(Path::new(file)),
            (None, true) => None,
            _ => return Err(Response::text(400, "name a file, or remove\n")),
        };
        if file.is_some_and(Path::is_relative) {
            return Err(Response::text(400, "the file must be an absolute path\n"));
        }
        return node.trust_offline(file).map(|report| Response::json(&report)).map_err(refusal);
    }
    if path != "/v1/debug" {
        return Err(Response::text(405, "GET only\n"));
    }
    let view = find(target, node)?;
    let text = |key: &str| target.get(key).filter(|text| !text.is_empty()).map(str::to_owned);
    let command: Vec<String> = target.all("command").map(str::to_owned).collect();
    let flag = |key: &str| target.get(key).is_some_and(|text| text == "1").then_some(true);
    let container = EphemeralContainer {
        name: text("name").unwrap_or_else(random_name),
        image: text("image"),
        command: (!command.is_empty()).then_some(command),
        target_container_name: text("target"),
        stdin: flag("input"),
        tty: flag("tty"),
        ..EphemeralContainer::default()
    };
    let reply = DebugReply {
        namespace: view.namespace().to_owned(),
        pod: view.name().to_owned(),
        container: container.name.clone(),
    };
    node.add_ephemeral(&PodUid::from(view.uid()), container)
        .map_err(|error| Response::text(422, format!("{error}\n")))?;
    Ok(Response::json(&reply))
}

fn refusal(error: OfflineError) -> Response {
    Response::text(error.status(), format!("{error}\n"))
}

/// `debugger-` and five letters, as in kubectl.
fn random_name() -> String {
    const LETTERS: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut rest = random_u64();
    let mut name = String::from("debugger-");
    for _ in 0..5 {
        let index = usize::try_from(rest % LETTERS.len() as u64).unwrap_or(0);
        name.push(LETTERS.get(index).copied().map_or('b', char::from));
        rest /= LETTERS.len() as u64;
    }
    name
}
