//! Finds the pod and the container of a command.

use crate::server::backend::NodeBackend;
use crate::server::http::response::Response;
use crate::server::views::PodView;
use crate::transport::http1::Target;

/// Finds pods by UID, by `namespace/name`, by name, by a static pod's name without the node's suffix, or
/// by the beginning of the UID. The first of these rules that matches any pod decides. The whole UID comes
/// first: a pod whose name is the UID of another one does not hide it.
fn resolve<'a>(pods: &'a [PodView], wanted: &str, node: &str) -> Vec<&'a PodView> {
    let (namespace, name) = match wanted.split_once('/') {
        Some((namespace, name)) => (Some(namespace), name),
        None => (None, wanted),
    };
    if name.is_empty() {
        return Vec::new();
    }
    let in_namespace = |view: &PodView| namespace.is_none_or(|namespace| view.namespace() == namespace);
    let suffix = format!("-{}", node.to_lowercase());
    let rules: [&dyn Fn(&PodView) -> bool; 4] = [
        &|view| namespace.is_none() && view.uid() == name,
        &|view| view.name() == name,
        &|view| view.name().strip_suffix(&suffix) == Some(name),
        &|view| view.uid().starts_with(name),
    ];
    let matches = |rule: &dyn Fn(&PodView) -> bool| -> Vec<&PodView> {
        pods.iter().filter(|view| in_namespace(view) && rule(view)).collect()
    };
    rules.into_iter().map(matches).find(|found| !found.is_empty()).unwrap_or_default()
}

/// The pods in the order of output.
pub(super) fn sorted_pods(node: &dyn NodeBackend) -> Vec<PodView> {
    let mut pods = all_pods(node);
    pods.sort_by(|a, b| (a.namespace(), a.name(), a.uid()).cmp(&(b.namespace(), b.name(), b.uid())));
    pods
}

fn all_pods(node: &dyn NodeBackend) -> Vec<PodView> {
    let mut pods = Vec::new();
    node.each_pod(&mut |view| pods.push(view));
    pods
}

/// The pod of the parameter `pod`.
pub(super) fn find(target: &Target, node: &dyn NodeBackend) -> Result<PodView, Response> {
    let wanted = target.get("pod").unwrap_or_default();
    let node_name = node.node_name();
    let pods = all_pods(node);
    match resolve(&pods, wanted, node_name).as_slice() {
        [view] => Ok((*view).clone()),
        [] => Err(Response::text(404, format!("there is no pod {wanted:?} on this node\n"))),
        several => {
            let line = |view: &&PodView| format!("{}/{} ({})", view.namespace(), view.name(), view.uid());
            let mut lines: Vec<String> = several.iter().map(line).collect();
            lines.sort();
            let list = lines.join("\n  ");
            Err(Response::text(409, format!("{wanted:?} matches several pods; name one of:\n  {list}\n")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(namespace: &str, name: &str, uid: &str) -> PodView {
        let pod = serde_json::json!({"metadata": {"namespace": namespace, "name": name, "uid": uid}});
        PodView { pod: serde_json::from_value(pod).unwrap(), ..PodView::default() }
    }

    #[test]
    fn pods_are_found_by_name_suffix_and_uid() {
        let pods = [
            view("default", "web-node1", "abc1"),
            view("kube-system", "web-node1", "abd2"),
            view("default", "db-node1", "fff3"),
            view("default", "fff", "eee4"),
            view("default", "fff3", "ccc5"),
        ];
        let check = |wanted: &str, expected: &str| {
            let found = match resolve(&pods, wanted, "Node1").as_slice() {
                [view] => view.uid().to_owned(),
                [] => "none".to_owned(),
                several => several.len().to_string(),
            };
            assert_eq!(found, expected, "{wanted}");
        };
        check("default/web-node1", "abc1");
        check("default/web", "abc1");
        check("web-node1", "2");
        check("web", "2");
        check("db", "fff3");
        check("fff", "eee4");
        check("fff3", "fff3");
        check("default/fff3", "ccc5");
        check("ab", "2");
        check("abd", "abd2");
        check("default/abd", "none");
        check("kube-system/ab", "abd2");
        check("", "none");
        check("default/", "none");
        check("nothing", "none");
    }
}
