//! Limits of the number of items in the lists of a pod.
//!
//! DIFFERS: upstream has no such limits. An API server stores pods with tens of thousands of
//! containers or mounts; look-ups by name for each of them would take minutes of processor time at
//! each sync. The limits are far above normal use.

use super::api::PodSpec;

/// Containers of all kinds together.
pub const MAX_CONTAINERS: usize = 1000;
/// Volumes.
pub const MAX_VOLUMES: usize = 1000;
/// Items of each list of a container: variables, mounts, ports and so on.
pub const MAX_CONTAINER_ITEMS: usize = 10_000;

/// A list that is too long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Excess {
    /// Path below `spec`, such as `containers[2].env`.
    pub field: String,
    /// The number of its items.
    pub count: usize,
    /// The limit.
    pub max: usize,
}

/// The first list of `spec` that is too long.
#[must_use]
pub fn excess(spec: &PodSpec) -> Option<Excess> {
    fn len<T>(list: Option<&Vec<T>>) -> usize {
        list.map_or(0, Vec::len)
    }
    let over = |field: &str, count: usize, max: usize| {
        (count > max).then(|| Excess { field: field.to_owned(), count, max })
    };
    let ephemeral = len(spec.ephemeral_containers.as_ref());
    let containers = spec.containers.len() + len(spec.init_containers.as_ref()) + ephemeral;
    let whole = over("containers", containers, MAX_CONTAINERS)
        .or_else(|| over("volumes", len(spec.volumes.as_ref()), MAX_VOLUMES));
    if whole.is_some() {
        return whole;
    }
    // Ephemeral containers have the same fields, but another type.
    macro_rules! items {
        ($container:expr) => {
            [
                ("args", len($container.args.as_ref())),
                ("command", len($container.command.as_ref())),
                ("env", len($container.env.as_ref())),
                ("envFrom", len($container.env_from.as_ref())),
                ("ports", len($container.ports.as_ref())),
                ("volumeDevices", len($container.volume_devices.as_ref())),
                ("volumeMounts", len($container.volume_mounts.as_ref())),
            ]
        };
    }
    let regular = spec.containers.iter().map(|container| ("containers", items!(container))).enumerate();
    let init = spec.init_containers.iter().flatten().map(|container| ("initContainers", items!(container)));
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    let ephemeral = ephemeral.map(|container| ("ephemeralContainers", items!(container)));
    for (index, (list, items)) in regular.chain(init.enumerate()).chain(ephemeral.enumerate()) {
        if let Some((field, count)) = items.into_iter().find(|(_, count)| *count > MAX_CONTAINER_ITEMS) {
            return over(&format!("{list}[{index}].{field}"), count, MAX_CONTAINER_ITEMS);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(spec: Value, expected: Option<(&str, usize)>) {
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        let found = excess(&spec);
        assert_eq!(found.as_ref().map(|excess| (excess.field.as_str(), excess.count)), expected);
    }

    fn named(count: usize) -> Value {
        (0..count).map(|index| json!({"name": format!("n{index}")})).collect()
    }

    #[test]
    fn too_long_list_of_a_pod_is_reported() {
        check(json!({"containers": named(1000)}), None);
        check(json!({"containers": named(1001)}), Some(("containers", 1001)));
        check(json!({"containers": named(600), "initContainers": named(401)}), Some(("containers", 1001)));
        check(
            json!({"containers": named(1), "ephemeralContainers": named(1000)}),
            Some(("containers", 1001)),
        );
        check(json!({"containers": [], "volumes": named(1001)}), Some(("volumes", 1001)));
        check(
            json!({"containers": [{"name": "a"}, {"name": "b", "env": named(10_001)}]}),
            Some(("containers[1].env", 10_001)),
        );
        check(
            json!({"containers": [], "initContainers": [{"name": "a", "args": vec!["x"; 10_001]}]}),
            Some(("initContainers[0].args", 10_001)),
        );
        check(
            json!({"containers": [], "ephemeralContainers": [{"name": "a"}, {"name": "b", "env": named(10_001)}]}),
            Some(("ephemeralContainers[1].env", 10_001)),
        );
    }
}
