//! Ephemeral containers: they are not part of a manifest, but are decoded like its containers.

use super::problem::Faults;
use super::{defaults, validate};
use crate::model::api::EphemeralContainer;
use crate::model::pod::Pod;

/// `wanted` with its defaults, if it may be added to `pod`.
///
/// # Errors
/// All faults of the container, worded as upstream.
pub(crate) fn ephemeral_container(
    pod: &Pod,
    wanted: EphemeralContainer,
) -> Result<EphemeralContainer, Faults> {
    let mut container = wanted;
    defaults::set_ephemeral(&mut container);
    let faults = validate::validate_ephemeral(pod, &container);
    if faults.is_empty() { Ok(container) } else { Err(Faults(faults)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(wanted: Value, expected: Result<&str, &str>) {
        let pod = json!({"spec": {"containers": [{"name": "c"}], "initContainers": [{"name": "i"}],
            "ephemeralContainers": [{"name": "e"}]}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
        let found = ephemeral_container(&pod, serde_json::from_value(wanted.clone()).unwrap());
        let found = found.map(|container| container.image_pull_policy.unwrap_or_default());
        let found = found.map_err(|faults| faults.to_string());
        assert_eq!(found, expected.map(str::to_owned).map_err(str::to_owned), "{wanted}");
    }

    #[test]
    fn ephemeral_containers_get_defaults_and_are_validated() {
        check(json!({"name": "d", "image": "localhost/busybox:1"}), Ok("IfNotPresent"));
        check(json!({"name": "d", "image": "busybox", "targetContainerName": "c"}), Ok("Always"));
        check(json!({"name": "d", "image": "b:1", "targetContainerName": "i"}), Ok("IfNotPresent"));
        for (wanted, message) in [
            (
                json!({"name": "e", "image": "b:1"}),
                "spec.ephemeralContainers[1].name: Duplicate value: \"e\"",
            ),
            (
                json!({"name": "c", "image": "b:1"}),
                "spec.ephemeralContainers[1].name: Duplicate value: \"c\"",
            ),
            (json!({"name": "", "image": "b:1"}), "spec.ephemeralContainers[1].name: Required value"),
            (json!({"name": "d"}), "spec.ephemeralContainers[1].image: Required value"),
            (
                json!({"name": "d", "image": "b:1", "targetContainerName": "x"}),
                "spec.ephemeralContainers[1].targetContainerName: Not found: \"x\"",
            ),
        ] {
            check(wanted, Err(message));
        }
    }
}
