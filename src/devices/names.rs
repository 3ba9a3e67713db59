//! Names that plugins choose (pure; Go: pkg/kubelet/cm/devicemanager/plugin/v1beta1,
//! pkg/apis/core/v1/helper `IsExtendedResourceName`).

use std::path::{Component, Path, PathBuf};

use crate::model::names::is_qualified_name;

/// The version of the plugin API.
pub const VERSION: &str = "v1beta1";
/// The socket on which plugins register.
pub const SOCKET: &str = "kubelet.sock";
/// The state file.
pub const CHECKPOINT: &str = "kubelet_internal_checkpoint";
/// The directory of plugins below the root directory.
pub const DIRECTORY: &str = "device-plugins";

/// A socket's address cannot be longer.
const ENDPOINT_BYTES: usize = 107;

/// Checks a request for registration on our socket.
///
/// # Errors
/// The text for the plugin, which is upstream's.
pub(super) fn check_request(version: &str, resource: &str) -> Result<(), String> {
    if version != VERSION {
        return Err(format!(
            "requested API version {version:?} is not supported by kubelet. Supported version is [{VERSION:?}]"
        ));
    }
    if is_extended_resource(resource) { Ok(()) } else { Err(invalid(resource)) }
}

/// Checks a plugin that the plugin watcher has found.
///
/// # Errors
/// The text for the plugin, which is upstream's.
pub fn check_plugin_info(resource: &str, versions: &[String]) -> Result<(), String> {
    if !versions.iter().any(|version| version == VERSION) {
        return Err(format!(
            "manager version, {VERSION}, is not among plugin supported versions [{}]",
            versions.join(" ")
        ));
    }
    if is_extended_resource(resource) {
        Ok(())
    } else {
        Err(format!("invalid name of device plugin socket: {}", invalid(resource)))
    }
}

fn invalid(resource: &str) -> String {
    format!("the ResourceName {resource:?} is invalid")
}

/// The socket that a plugin names in its request: a path below the directory of plugins.
///
/// DIFFERS: upstream also follows `..`.
///
/// # Errors
/// A text for the plugin.
pub(super) fn plugin_socket_path(directory: &Path, endpoint: &str) -> Result<PathBuf, String> {
    let path = Path::new(endpoint);
    let is_below = path.components().all(|part| matches!(part, Component::Normal(_)));
    let is_ours = endpoint == SOCKET || endpoint == CHECKPOINT;
    let is_usable = !endpoint.is_empty()
        && endpoint.len() <= ENDPOINT_BYTES
        && is_below
        && !is_ours
        && !endpoint.contains('\0');
    if !is_usable {
        let shown: String = endpoint.chars().take(100).collect();
        return Err(format!("the endpoint {shown:?} is not a socket in the directory of device plugins"));
    }
    Ok(directory.join(path))
}

/// Whether this is the name of an extended resource: `<domain>/<name>`, the domain is not one of
/// Kubernetes, and the name of its quota is valid, too.
#[must_use]
pub fn is_extended_resource(name: &str) -> bool {
    let is_native = !name.contains('/') || name.contains("kubernetes.io/");
    if is_native || name.starts_with("requests.") {
        return false;
    }
    is_qualified_name(&format!("requests.{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_extended_resources_are_accepted() {
        for (name, expected) in [
            ("example.com/widget", true),
            ("nvidia.com/mig-1g.5gb", true),
            ("a/b", true),
            ("cpu", false),
            ("kubernetes.io/widget", false),
            ("sub.kubernetes.io/widget", false),
            ("requests.example.com/widget", false),
            ("example.com/", false),
            ("/widget", false),
            ("example.com/a/b", false),
            ("Example.com/widget", false),
            ("example..com/widget", false),
            ("example.com/-widget", false),
            ("example.com/wid get", false),
            ("", false),
        ] {
            assert_eq!(is_extended_resource(name), expected, "{name}");
        }
        assert!(is_extended_resource(&format!("a/{}", "b".repeat(63))));
        assert!(!is_extended_resource(&format!("a/{}", "b".repeat(64))));
        assert!(!is_extended_resource(&format!("{}/b", "a".repeat(254))));
    }

    #[test]
    fn refused_plugins_get_the_texts_of_the_go_kubelet() {
        assert_eq!(check_request("v1beta1", "example.com/widget"), Ok(()));
        let expected = r#"requested API version "v1alpha1" is not supported by kubelet. Supported version is ["v1beta1"]"#;
        assert_eq!(check_request("v1alpha1", "cpu").unwrap_err(), expected);
        assert_eq!(check_request("v1beta1", "cpu").unwrap_err(), r#"the ResourceName "cpu" is invalid"#);
        let versions = ["v1".to_owned(), "v2".to_owned()];
        let expected = "manager version, v1beta1, is not among plugin supported versions [v1 v2]";
        assert_eq!(check_plugin_info("example.com/widget", &versions).unwrap_err(), expected);
        let versions = ["v1".to_owned(), "v1beta1".to_owned()];
        assert_eq!(check_plugin_info("example.com/widget", &versions), Ok(()));
        let expected = r#"invalid name of device plugin socket: the ResourceName "cpu" is invalid"#;
        assert_eq!(check_plugin_info("cpu", &versions).unwrap_err(), expected);
    }

    #[test]
    fn a_socket_is_below_the_directory_of_plugins() {
        let directory = Path::new("/d");
        assert_eq!(plugin_socket_path(directory, "x.sock").unwrap(), Path::new("/d/x.sock"));
        assert_eq!(plugin_socket_path(directory, "a/x.sock").unwrap(), Path::new("/d/a/x.sock"));
        let long = "x".repeat(108);
        for endpoint in ["", ".", "..", "../x", "a/../../x", "/x", "kubelet.sock", CHECKPOINT, "a\0b", &long]
        {
            assert!(plugin_socket_path(directory, endpoint).is_err(), "{endpoint}");
        }
    }
}
