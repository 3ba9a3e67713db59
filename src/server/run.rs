//! `/run` and `/checkpoint`: what is done to one container while the client waits.

use std::io::Write;

use super::Deps;
use super::routes::{Answer, Asked, Method, Reply};
use super::select::container_names;
use super::streams::{Stream, whole};
use crate::model::api::Pod;
use crate::model::ids::PodUid;

/// Answers `/run/{namespace}/{pod}[/{uid}]/{container}`.
pub(super) fn answer(asked: &Asked, deps: &Deps) -> Result<Reply, Answer> {
    let elements: Vec<&str> = asked.target.path.trim_start_matches('/').split('/').collect();
    // As upstream, the UID is read and not compared: a pod's name leaves no doubt on its node.
    let ([_, namespace, name, container] | [_, namespace, name, _, container]) = *elements.as_slice() else {
        return Err(Answer::no_route());
    };
    let pod = find(asked, deps, namespace, name)?;
    // Split at each blank: there is no quoting, and two blanks make an empty argument.
    let command = asked.target.get("cmd").unwrap_or_default().split(' ').map(str::to_owned).collect();
    let uid = PodUid::from(pod.metadata.uid.unwrap_or_default());
    let container = container.to_owned();
    Ok(Reply::Stream(Stream::Own(Box::new(move |out: &mut dyn Write, deps: &Deps, stop| {
        let answer = match (deps.endpoints.run)(&uid, &container, command, stop) {
            // Declared as JSON, whatever the command says.
            Ok(body) => Answer { body, content_type: "application/json", ..Answer::text(200, "") },
            Err(why) => Answer::text(500, why),
        };
        whole(out, &answer)
    }))))
}

/// Answers `/checkpoint/{namespace}/{pod}/{container}`.
pub(super) fn checkpoint(asked: &Asked, deps: &Deps) -> Result<Reply, Answer> {
    let elements: Vec<&str> = asked.target.path.trim_start_matches('/').split('/').collect();
    let [_, namespace, name, container] = *elements.as_slice() else {
        return Err(Answer::no_route());
    };
    let pod = find(asked, deps, namespace, name)?;
    if !container_names(&pod).contains(&container) {
        return Err(Answer::text(404, format!("container {container} does not exist")));
    }
    let seconds = match asked.target.all("timeout").last() {
        Some(text) => {
            text.parse().map_err(|_| Answer::text(404, "cannot parse value of timeout parameter"))?
        }
        None => 0,
    };
    let (failed, container) =
        (format!("checkpointing of {namespace}/{name}/{container} failed"), container.to_owned());
    Ok(Reply::Stream(Stream::Own(Box::new(move |out: &mut dyn Write, deps: &Deps, stop| {
        let answer = match (deps.endpoints.checkpoint)(&pod, &container, seconds, stop) {
            Ok(path) => Answer::json(&serde_json::json!({"items": [path.to_string_lossy()]})),
            Err(why) => Answer::text(500, format!("{failed} ({why})")),
        };
        whole(out, &answer)
    }))))
}

fn find(asked: &Asked, deps: &Deps, namespace: &str, name: &str) -> Result<Pod, Answer> {
    if asked.method != Method::Post {
        return Err(Answer::not_allowed("POST"));
    }
    (deps.endpoints.pod)(namespace, name).ok_or_else(|| Answer::text(404, "pod does not exist"))
}
