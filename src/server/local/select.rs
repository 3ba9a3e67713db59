//! Which pod and container a command means.

use crate::model::api::Pod;

use super::views::PodView;
use crate::server::deps::Deps;
use crate::server::http::response::Response;
use crate::transport::http1::Target;

/// Annotation that names the container to take when none is given.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// How a name resolved.
#[derive(Debug, Clone, PartialEq)]
pub enum Selection<'a> {
    /// Exactly one.
    One(&'a PodView),
    /// Nothing fits.
    None,
    /// Several fit, as `namespace/name (uid)`.
    Several(Vec<String>),
}

/// Finds the pod that `wanted` means: `namespace/name`, a name, a static pod's name without
/// the node's suffix, or the beginning of a UID; the first of these that fits anything counts.
#[must_use]
pub fn resolve<'a>(pods: &'a [PodView], wanted: &str, node: &str) -> Selection<'a> {
    let (namespace, name) = match wanted.split_once('/') {
        Some((namespace, name)) => (Some(namespace), name),
        None => (None, wanted),
    };
    if name.is_empty() {
        return Selection::None;
    }
    let in_namespace = |view: &PodView| namespace.is_none_or(|namespace| view.namespace() == namespace);
    let suffix = format!("-{}", node.to_lowercase());
    let rules: [&dyn Fn(&PodView) -> bool; 3] = [
        &|view| in_namespace(view) && view.name() == name,
        &|view| in_namespace(view) && view.name().strip_suffix(&suffix) == Some(name),
        &|view| in_namespace(view) && view.uid().starts_with(name),
    ];
    for rule in rules {
        let found: Vec<&PodView> = pods.iter().filter(|view| rule(view)).collect();
        match found.as_slice() {
            [] => {}
            [one] => return Selection::One(one),
            several => {
                let mut lines: Vec<String> = several
                    .iter()
                    .map(|view| format!("{}/{} ({})", view.namespace(), view.name(), view.uid()))
                    .collect();
                lines.sort();
                return Selection::Several(lines);
            }
        }
    }
    Selection::None
}

/// Every container name of a pod: regular, init, ephemeral.
pub(in crate::server) fn container_names(pod: &Pod) -> Vec<&str> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    spec.containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .map(|container| container.name.as_str())
        .chain(spec.ephemeral_containers.iter().flatten().map(|container| container.name.as_str()))
        .collect()
}

/// The container to take when none is named.
#[must_use]
pub fn default_container(pod: &Pod) -> Option<&str> {
    let names = container_names(pod);
    let annotated = pod.metadata.annotations.as_ref().and_then(|all| all.get(DEFAULT_CONTAINER));
    match annotated {
        Some(name) if names.contains(&name.as_str()) => Some(name),
        _ => names.first().copied(),
    }
}

/// The pods in the order in which commands show them.
pub(super) fn sorted_pods(deps: &Deps) -> Vec<PodView> {
    let mut pods = all_pods(deps);
    pods.sort_by(|a, b| (a.namespace(), a.name(), a.uid()).cmp(&(b.namespace(), b.name(), b.uid())));
    pods
}

fn all_pods(deps: &Deps) -> Vec<PodView> {
    let mut pods = Vec::new();
    (deps.pods)(&mut |view| pods.push(view));
    pods
}

/// The one pod that the parameter `pod` means.
pub(super) fn find(target: &Target, deps: &Deps) -> Result<PodView, Response> {
    let wanted = target.get("pod").unwrap_or_default();
    let node = (deps.status)().node;
    let pods = all_pods(deps);
    match resolve(&pods, wanted, &node) {
        Selection::One(view) => Ok(view.clone()),
        Selection::None => Err(Response::text(404, format!("there is no pod {wanted:?} on this node\n"))),
        Selection::Several(candidates) => {
            let list = candidates.join("\n  ");
            Err(Response::text(409, format!("{wanted:?} means several pods; say which:\n  {list}\n")))
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
    fn names_suffixes_and_uids() {
        let pods = [
            view("default", "web-node1", "abc1"),
            view("kube-system", "web-node1", "abd2"),
            view("default", "db-node1", "fff3"),
            view("default", "fff", "eee4"),
        ];
        let check = |wanted: &str, expected: &str| {
            let found = match resolve(&pods, wanted, "Node1") {
                Selection::One(view) => view.uid().to_owned(),
                Selection::None => "none".to_owned(),
                Selection::Several(all) => all.len().to_string(),
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
        check("ab", "2");
        check("abd", "abd2");
        check("default/abd", "none");
        check("kube-system/ab", "abd2");
        check("", "none");
        check("default/", "none");
        check("nothing", "none");
    }

    #[test]
    fn the_default_container_is_annotated_or_first() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"annotations": {DEFAULT_CONTAINER: "b"}},
            "spec": {"initContainers": [{"name": "i"}], "containers": [{"name": "a"}, {"name": "b"}]},
        }))
        .unwrap();
        assert_eq!(container_names(&pod), ["a", "b", "i"]);
        assert_eq!(default_container(&pod), Some("b"));
        let pod = Pod { metadata: Default::default(), ..pod };
        assert_eq!(default_container(&pod), Some("a"));
        assert_eq!(default_container(&Pod::default()), None);
    }
}
