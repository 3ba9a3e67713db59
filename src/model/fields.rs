//! A pod's fields that its containers can read: `fieldRef` and `resourceFieldRef`, if the values
//! follow from the object alone (Go: pkg/fieldpath, pkg/api/v1/resource).

use std::collections::BTreeMap;

use super::api::{Container, ResourceFieldSelector};
use super::pod::Pod;
use super::quantity::{Amount, amount};

/// The defaults of limits that neither the container nor its pod has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeAllocatable {
    /// CPU that pods can have.
    pub cpu: Amount,
    /// Memory that pods can have.
    pub memory: Amount,
    /// Ephemeral storage that pods can have.
    pub ephemeral_storage: Amount,
}

/// Why a field has no value. The texts are upstream's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// The field does not exist or must not be read.
    #[error("unsupported fieldPath: {path}")]
    FieldPath {
        /// The path as written.
        path: String,
    },
    /// The pod does not have the container of a `resourceFieldRef`.
    #[error("container {container} not found")]
    NoSuchContainer {
        /// The name as written.
        container: String,
    },
    /// The resource is not CPU, memory, storage or huge pages.
    #[error("unsupported container resource : {resource}")]
    ResourceField {
        /// The resource as written.
        resource: String,
    },
}

/// The fields of the metadata that are single texts: names, the UID, one label or
/// annotation (empty if the pod lacks it).
///
/// # Errors
/// When `path` is none of them.
pub fn metadata_field(pod: &Pod, path: &str) -> Result<String, FieldError> {
    let metadata = &pod.object().metadata;
    let unknown = || FieldError::FieldPath { path: path.to_owned() };
    if let Some((map, key)) = subscript(path) {
        let map = match map {
            "metadata.labels" => metadata.labels.as_ref(),
            "metadata.annotations" => metadata.annotations.as_ref(),
            _ => return Err(unknown()),
        };
        return Ok(map.and_then(|map| map.get(key)).cloned().unwrap_or_default());
    }
    match path {
        "metadata.name" => Ok(pod.name().to_owned()),
        "metadata.namespace" => Ok(pod.namespace().to_owned()),
        "metadata.uid" => Ok(pod.uid().to_string()),
        _ => Err(unknown()),
    }
}

/// The fields that a file of a downward API volume may have: those of [`metadata_field`],
/// and all labels or annotations as lines.
///
/// # Errors
/// When `path` is none of them.
pub fn file_field(pod: &Pod, path: &str) -> Result<String, FieldError> {
    let metadata = &pod.object().metadata;
    match path {
        "metadata.labels" => Ok(lines(metadata.labels.as_ref())),
        "metadata.annotations" => Ok(lines(metadata.annotations.as_ref())),
        _ => metadata_field(pod, path),
    }
}

/// Splits `metadata.labels['key']`.
fn subscript(path: &str) -> Option<(&str, &str)> {
    path.strip_suffix("']")?.split_once("['")
}

/// `key="value"` lines in the order of the keys, without a newline at the end.
fn lines(map: Option<&BTreeMap<String, String>>) -> String {
    let mut text = String::new();
    for (key, value) in map.into_iter().flatten() {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(key);
        text.push('=');
        quote_into(&mut text, value);
    }
    text
}

/// Quotes as Go's `%q` does: programs that read these files decode that.
fn quote_into(out: &mut String, text: &str) {
    use std::fmt::Write;
    out.push('"');
    for character in text.chars() {
        let short = match character {
            '"' => Some('"'),
            '\\' => Some('\\'),
            '\u{7}' => Some('a'),
            '\u{8}' => Some('b'),
            '\u{c}' => Some('f'),
            '\n' => Some('n'),
            '\r' => Some('r'),
            '\t' => Some('t'),
            '\u{b}' => Some('v'),
            _ => None,
        };
        // Writing to a String cannot fail.
        let _ = match (short, u32::from(character)) {
            (Some(letter), _) => write!(out, "\\{letter}"),
            (None, code) if code < 0x20 || code == 0x7f => write!(out, "\\x{code:02x}"),
            (None, _) if is_printable(character) => {
                out.push(character);
                Ok(())
            }
            (None, code) if code < 0x10000 => write!(out, "\\u{code:04x}"),
            (None, code) => write!(out, "\\U{code:08x}"),
        };
    }
    out.push('"');
}

/// Letters, marks, numbers, punctuation, symbols and the plain blank: characters that the standard
/// library does not escape after another character.
fn is_printable(character: char) -> bool {
    if character.is_ascii() {
        return !character.is_ascii_control();
    }
    let after_letter = String::from_iter(['a', character]);
    after_letter.escape_debug().nth(1) == Some(character)
}

/// The value of a `resourceFieldRef`. `own` is the container of the environment variable; a file of
/// a volume has none and must name one.
///
/// # Errors
/// When it names an unknown container or resource.
pub fn resource_field(
    pod: &Pod,
    own: Option<&Container>,
    selector: &ResourceFieldSelector,
    allocatable: &NodeAllocatable,
) -> Result<String, FieldError> {
    let name = selector.container_name.as_deref().unwrap_or_default();
    let container = match own.filter(|_| name.is_empty()) {
        Some(own) => own,
        None => pod
            .all_containers()
            .find(|container| container.name == name)
            .ok_or_else(|| FieldError::NoSuchContainer { container: name.to_owned() })?,
    };
    let unknown = || FieldError::ResourceField { resource: selector.resource.clone() };
    let (side, resource) = selector.resource.split_once('.').ok_or_else(unknown)?;
    let hugepages = resource.starts_with("hugepages-");
    if !hugepages && !["cpu", "memory", "ephemeral-storage"].contains(&resource) {
        return Err(unknown());
    }
    let resources = container.resources.as_ref();
    let value = match side {
        "requests" => resources.and_then(|r| r.requests.as_ref()?.get(resource)).map(amount),
        "limits" => {
            let set = |amount: &Amount| !amount.is_zero();
            let own = resources.and_then(|r| r.limits.as_ref()?.get(resource)).map(amount).filter(set);
            let of_pod = || {
                let limits = pod.spec().resources.as_ref()?.limits.as_ref()?;
                limits.get(resource).map(amount).filter(set)
            };
            let of_node = || match resource {
                "cpu" => Some(allocatable.cpu),
                "memory" => Some(allocatable.memory),
                "ephemeral-storage" => Some(allocatable.ephemeral_storage),
                _ => None,
            };
            // Huge pages have no default: they are present only if requested.
            if hugepages { own } else { own.or_else(of_pod).or_else(of_node) }
        }
        _ => return Err(unknown()),
    };
    let divisor = selector.divisor.as_ref().map(amount).unwrap_or_default();
    Ok(value.unwrap_or_default().divide(divisor).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn pod() -> Pod {
        Pod::from(
            serde_json::from_value::<super::super::api::Pod>(json!({
                "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"b": "2", "a": "1"},
                    "annotations": {"example.org/x": "a \"b\"\n\tü\u{1}\u{200b}"}},
                "spec": {"containers": [
                    {"name": "c", "resources": {"limits": {"cpu": "500m", "hugepages-2Mi": "4Mi"},
                        "requests": {"memory": "64Mi"}}},
                    {"name": "d"}]}}))
            .unwrap(),
        )
    }

    #[test]
    fn fields_of_downward_volumes_have_their_values() {
        let check = |path: &str, expected: Option<&str>| {
            assert_eq!(file_field(&pod(), path).ok().as_deref(), expected, "{path}");
        };
        check("metadata.name", Some("p"));
        check("metadata.namespace", Some("n"));
        check("metadata.uid", Some("u"));
        check("metadata.labels", Some("a=\"1\"\nb=\"2\""));
        check("metadata.annotations", Some("example.org/x=\"a \\\"b\\\"\\n\\tü\\x01\\u200b\""));
        check("metadata.labels['a']", Some("1"));
        check("metadata.labels['none']", Some(""));
        check("metadata.annotations['none']", Some(""));
        check("spec.nodeName", None);
        check("status.podIP", None);
        check("spec.x['a']", None);
        let error = file_field(&pod(), "spec.nodeName").unwrap_err();
        assert_eq!(error.to_string(), "unsupported fieldPath: spec.nodeName");
        assert!(metadata_field(&pod(), "metadata.labels").is_err(), "only files show all labels");
    }

    #[test]
    fn labels_are_quoted_as_in_go() {
        for (text, expected) in [
            ("", r#""""#),
            ("plain é \u{301}", "\"plain é \u{301}\""),
            ("\u{7}\u{8}\u{c}\n\r\t\u{b}\\\"'", r#""\a\b\f\n\r\t\v\\\"'""#),
            ("\u{0}\u{7f}", r#""\x00\x7f""#),
            ("\u{a0}\u{ad}\u{feff}\u{e000}\u{e0001}", r#""\u00a0\u00ad\ufeff\ue000\U000e0001""#),
        ] {
            let mut out = String::new();
            quote_into(&mut out, text);
            assert_eq!(out, expected);
        }
    }

    #[test]
    fn resource_fields_are_divided_and_rounded_up() {
        let allocatable = NodeAllocatable {
            cpu: Amount::from_milli(1900),
            memory: Amount::from_units(1 << 30),
            ephemeral_storage: Amount::from_units(5 << 20),
        };
        let check = |own: bool, container: &str, resource: &str, divisor: &str, expected: Option<&str>| {
            let selector: ResourceFieldSelector = serde_json::from_value(
                json!({"containerName": container, "resource": resource, "divisor": divisor}),
            )
            .unwrap();
            let pod = pod();
            let own = own.then(|| &pod.containers()[0]);
            let value = resource_field(&pod, own, &selector, &allocatable);
            assert_eq!(value.ok().as_deref(), expected, "{container} {resource} {divisor}");
        };
        check(true, "", "limits.cpu", "0", Some("1"));
        check(true, "", "limits.cpu", "1m", Some("500"));
        check(false, "c", "limits.cpu", "1m", Some("500"));
        check(false, "", "limits.cpu", "1m", None);
        check(true, "", "requests.cpu", "1m", Some("0"));
        check(true, "", "requests.memory", "1Ki", Some("65536"));
        check(true, "", "limits.memory", "1Mi", Some("1024"));
        check(true, "d", "limits.cpu", "1m", Some("1900"));
        check(true, "d", "limits.ephemeral-storage", "1Mi", Some("5"));
        check(true, "", "limits.hugepages-2Mi", "1Mi", Some("4"));
        check(true, "d", "limits.hugepages-2Mi", "1", Some("0"));
        check(true, "e", "limits.cpu", "1", None);
        check(true, "", "limits.gpu", "1", None);
        check(true, "", "cpu", "1", None);
    }

    proptest! {
        #[test]
        fn a_quoted_value_stays_on_its_line(value in any::<String>()) {
            let mut out = String::new();
            quote_into(&mut out, &value);
            prop_assert!(!out.contains(['\n', '\r', '\0']));
            prop_assert!(out.starts_with('"') && out.ends_with('"'));
        }
    }
}
