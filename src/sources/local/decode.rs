//! Decodes a file of ConfigMaps and Secrets (Go: pkg/apis/core/validation ValidateConfigMap,
//! ValidateSecret).
//!
//! No message quotes a value: it may be a secret. So the types are checked here, and not by
//! `model::typed`.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::super::problem::Fault;
use super::super::validate::names;
use crate::config::yaml;
use crate::kube::objects::{Key, Kind, Object};
use crate::util::encoding::from_go_base64;

/// The limit of the bytes of all values of one object, as in the API.
const MAX_OBJECT_BYTES: usize = 1024 * 1024;
/// The limit of objects in one file.
const MAX_OBJECTS: usize = 256;
/// The limit of reported faults, and of reported unknown fields, of one object and of one file: to
/// find the line of one takes time in proportion to the size of its object.
const MAX_FAULTS: usize = 20;
/// The UID of all local objects: those of an API server have another one.
const LOCAL_UID: &str = "local";

/// The content of one file.
#[derive(Debug, Default)]
pub(super) struct Content {
    /// The valid objects.
    pub(super) objects: BTreeMap<Key, Arc<Object>>,
    /// The faults of the others, with their lines.
    pub(super) faults: Vec<Fault>,
    /// Unknown fields, which have no effect.
    pub(super) unknown: Vec<Fault>,
}

/// Decodes all documents of a file; each is validated separately. `exposed` is the reason why the
/// file must not have Secrets.
pub(super) fn read(bytes: &[u8], exposed: Option<&str>) -> Content {
    let mut content = Content::default();
    let yaml::Content { documents, broken } = yaml::parse(bytes);
    if let Some(error) = broken {
        // The message may quote the text.
        let message = format!("no valid YAML or JSON at column {}", error.column);
        content.faults.push(Fault { line: Some(error.line), ..Fault::whole(message) });
    } else if documents.is_empty() {
        content.faults.push(Fault::whole("the file has no ConfigMap and no Secret"));
    }
    for document in &documents {
        for duplicate in &document.duplicates {
            if content.unknown.len() < MAX_FAULTS {
                let message = format!("{duplicate}; the last one counts");
                content.unknown.push(Fault { line: Some(duplicate.second), ..Fault::whole(message) });
            }
        }
        let mut read_object = |prefix: String, value: &Value| {
            let mut report = Report { faults: Vec::new(), unknown: Vec::new() };
            let object = object(value, exposed, &mut report);
            let place = |mut fault: Fault| {
                let path = match (prefix.as_str(), fault.field.unwrap_or_default()) {
                    ("", field) => field,
                    (prefix, field) if field.is_empty() => prefix.to_owned(),
                    (prefix, field) => format!("{prefix}.{field}"),
                };
                fault.line = document.line_of(&path);
                fault.field = Some(path).filter(|path| !path.is_empty());
                fault
            };
            if report.faults.is_empty()
                && let Some((key, object)) = object
            {
                if content.objects.len() >= MAX_OBJECTS {
                    let message = format!("more than {MAX_OBJECTS} objects in one file");
                    report.faults.push(Fault::whole(message));
                } else {
                    match content.objects.entry(key) {
                        Entry::Vacant(free) => {
                            free.insert(Arc::new(object));
                        }
                        Entry::Occupied(taken) => {
                            let Key { kind, namespace, name } = taken.key();
                            let message = format!("Duplicate value: {} {namespace}/{name}", kind.as_str());
                            report.faults.push(Fault::in_field("metadata.name", message));
                        }
                    }
                }
            }
            let room = MAX_FAULTS.saturating_sub(content.faults.len());
            content.faults.extend(report.faults.into_iter().take(room).map(place));
            let room = MAX_FAULTS.saturating_sub(content.unknown.len());
            content.unknown.extend(report.unknown.into_iter().take(room).map(place));
        };
        let items = document.value.get("items").and_then(Value::as_array);
        match (document.value.get("kind").and_then(Value::as_str), items) {
            (Some("List" | "SecretList" | "ConfigMapList"), Some(items)) => {
                for (index, item) in items.iter().enumerate() {
                    read_object(format!("items[{index}]"), item);
                }
            }
            _ => read_object(String::new(), &document.value),
        }
    }
    content
}

struct Report {
    faults: Vec<Fault>,
    unknown: Vec<Fault>,
}

impl Report {
    fn fault(&mut self, field: &str, message: impl Into<String>) {
        if self.faults.len() < MAX_FAULTS {
            self.faults.push(Fault::in_field(field, message));
        }
    }

    /// The text of a field; empty if it is absent.
    fn text<'a>(&mut self, map: &'a Map<String, Value>, (parent, name): (&str, &str)) -> &'a str {
        match map.get(name) {
            None | Some(Value::Null) => "",
            Some(Value::String(text)) => text,
            Some(other) => {
                self.fault(&format!("{parent}{name}"), wanted("a string", other));
                ""
            }
        }
    }

    fn check(&mut self, field: &str, value: &str, problem: Option<String>) {
        if let Some(problem) = problem {
            self.fault(field, format!("Invalid value: {value:?}: {problem}"));
        }
    }
}

/// The type of a value, which is not quoted.
fn wanted(what: &str, found: &Value) -> String {
    let found = match found {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "a mapping",
    };
    format!("Invalid value: want {what}, found {found}")
}

fn object(value: &Value, exposed: Option<&str>, report: &mut Report) -> Option<(Key, Object)> {
    let Some(map) = value.as_object() else {
        report.faults.push(Fault::whole("want a mapping with apiVersion, kind, metadata and data"));
        return None;
    };
    match report.text(map, ("", "apiVersion")) {
        "v1" => {}
        "" => report.fault("apiVersion", "Required value"),
        _ => report.fault("apiVersion", "Unsupported value: supported values: \"v1\""),
    }
    let kind = match report.text(map, ("", "kind")) {
        "ConfigMap" => Kind::ConfigMap,
        "Secret" => Kind::Secret,
        "" => {
            report.fault("kind", "Required value");
            return None;
        }
        other => {
            let message =
                format!("Unsupported value: {other:?}: supported values: \"ConfigMap\", \"Secret\"");
            report.fault("kind", message);
            return None;
        }
    };
    if let Some(reason) = exposed.filter(|_| kind == Kind::Secret) {
        report.faults.push(Fault::whole(format!("a file with Secrets {reason}")));
    }
    let key = identity(kind, map, report);
    let mut object = Object { uid: LOCAL_UID.to_owned(), ..Object::default() };
    match kind {
        Kind::ConfigMap => {
            object.data = values(map, "data", DataEncoding::Text, report);
            object.binary_data = values(map, "binaryData", DataEncoding::Base64, report);
            for name in object.data.keys().filter(|name| object.binary_data.contains_key(*name)) {
                report.fault(&format!("binaryData[{name}]"), "Invalid value: the key is also in data");
            }
        }
        Kind::Secret => {
            object.data = values(map, "data", DataEncoding::Base64, report);
            object.data.extend(values(map, "stringData", DataEncoding::Text, report));
            let kind = report.text(map, ("", "type"));
            object.secret_type = if kind.is_empty() { "Opaque" } else { kind }.to_owned();
        }
    }
    let bytes: usize = object.data.values().chain(object.binary_data.values()).map(Vec::len).sum();
    if bytes > MAX_OBJECT_BYTES {
        let message = format!("Too long: {bytes} bytes are more than the limit of {MAX_OBJECT_BYTES}");
        report.fault("data", message);
    }
    match map.get("immutable") {
        None | Some(Value::Null | Value::Bool(_)) => {}
        Some(other) => report.fault("immutable", wanted("a boolean", other)),
    }
    let own: &[&str] = match kind {
        Kind::ConfigMap => &["data", "binaryData"],
        Kind::Secret => &["data", "stringData", "type"],
    };
    for name in map.keys() {
        let common = ["apiVersion", "kind", "metadata", "immutable"];
        let known = common.contains(&name.as_str()) || own.contains(&name.as_str());
        if !known && report.unknown.len() < MAX_FAULTS {
            report.unknown.push(Fault::in_field(name.as_str(), "unknown field, ignored"));
        }
    }
    Some((key, object))
}

/// The key of the object. Without a namespace it is in `default`, like a static pod.
fn identity(kind: Kind, map: &Map<String, Value>, report: &mut Report) -> Key {
    let empty = Map::new();
    let metadata = match map.get("metadata") {
        None | Some(Value::Null) => &empty,
        Some(Value::Object(metadata)) => metadata,
        Some(other) => {
            report.fault("metadata", wanted("a mapping", other));
            return Key::new(kind, "", "");
        }
    };
    let name = report.text(metadata, ("metadata.", "name"));
    if name.is_empty() {
        report.fault("metadata.name", "Required value");
    } else {
        report.check("metadata.name", name, names::dns_subdomain(name));
    }
    let namespace = match report.text(metadata, ("metadata.", "namespace")) {
        "" => "default",
        namespace => namespace,
    };
    report.check("metadata.namespace", namespace, names::dns_label(namespace));
    Key::new(kind, namespace, name)
}

/// How a manifest writes the values of a ConfigMap or Secret.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DataEncoding {
    Text,
    Base64,
}

fn values(
    map: &Map<String, Value>,
    field: &str,
    encoding: DataEncoding,
    report: &mut Report,
) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let pairs = match map.get(field) {
        None | Some(Value::Null) => return found,
        Some(Value::Object(pairs)) => pairs,
        Some(other) => {
            report.fault(field, wanted("a mapping", other));
            return found;
        }
    };
    for (key, value) in pairs {
        let path = format!("{field}[{key}]");
        report.check(&path, key, names::config_key(key));
        let bytes = match value {
            Value::Null => Vec::new(),
            Value::String(text) if encoding == DataEncoding::Text => text.clone().into_bytes(),
            Value::String(text) => match from_go_base64(text) {
                Some(bytes) => bytes,
                None => {
                    report.fault(&path, "Invalid value: want base64");
                    continue;
                }
            },
            other => {
                report.fault(&path, wanted("a string", other));
                continue;
            }
        };
        found.insert(key.clone(), bytes);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn faults(text: &str, exposed: Option<&str>) -> Vec<String> {
        let content = read(text.as_bytes(), exposed);
        let show = |fault: Fault| {
            format!("{}: {}: {}", fault.line.unwrap_or(0), fault.field.unwrap_or_default(), fault.message)
        };
        content.faults.into_iter().chain(content.unknown).map(show).collect()
    }

    #[test]
    fn documents_and_lists_of_both_kinds_are_read() {
        let text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {k: v, o: }\nbinaryData: {b: AP8=}\n---\n\
            {\"apiVersion\":\"v1\",\"kind\":\"List\",\"items\":[{\"apiVersion\":\"v1\",\"kind\":\"Secret\",\
            \"metadata\":{\"name\":\"a\",\"namespace\":\"n\",\"uid\":\"x\"},\"type\":\"t\",\"immutable\":true,\
            \"data\":{\"k\":\"aHVu\\ndGVy\",\"l\":\"eA==\"},\"stringData\":{\"l\":\"y\"}}]}\n";
        let content = read(text.as_bytes(), None);
        assert_eq!((content.faults, content.unknown), (vec![], vec![]));
        let map = &content.objects[&Key::new(Kind::ConfigMap, "default", "a")];
        assert_eq!(
            (map.get("k"), map.get("o"), map.get("b")),
            (Some(&b"v"[..]), Some(&b""[..]), Some(&[0, 255][..]))
        );
        let secret = &content.objects[&Key::new(Kind::Secret, "n", "a")];
        assert_eq!((secret.get("k"), secret.get("l")), (Some(&b"hunter"[..]), Some(&b"y"[..])));
        assert_eq!(secret.secret_type, "t");
    }

    #[test]
    fn faults_name_line_and_field_but_no_value() {
        let text = "apiVersion: v1\nkind: Secret\nmetadata:\n  name: s\ndata:\n  pw: 4711\n  key: hunter2!\n\
            ---\napiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: UP\n  namespace: a.b\ndata:\n  a/b: x\n  o: [1]\ndate: 1\n\
            ---\nkind: Pod\napiVersion: v1\n---\napiVersion: v2\nkind: ConfigMap\ndata: 7\nimmutable: 1\n";
        let found = faults(text, None);
        let starts = [
            "7: data[key]: Invalid value: want base64",
            "6: data[pw]: Invalid value: want a string, found a number",
            "12: metadata.name: Invalid value: \"UP\": a lowercase RFC 1123 subdomain",
            "13: metadata.namespace: Invalid value: \"a.b\": a lowercase RFC 1123 label",
            "15: data[a/b]: Invalid value: \"a/b\": a valid config key",
            "16: data[o]: Invalid value: want a string, found a list",
            "19: kind: Unsupported value: \"Pod\": supported values: \"ConfigMap\", \"Secret\"",
            "22: apiVersion: Unsupported value: supported values: \"v1\"",
            "22: metadata.name: Required value",
            "24: data: Invalid value: want a mapping, found a number",
            "25: immutable: Invalid value: want a boolean, found a number",
            "17: date: unknown field, ignored",
        ];
        assert_eq!(found.len(), starts.len(), "{found:#?}");
        for (found, start) in found.iter().zip(starts) {
            assert!(found.starts_with(start), "{found} / {start}");
        }
        assert!(found.iter().all(|text| !text.contains("4711") && !text.contains("hunter")));
        assert_eq!(faults("a: 'hunter2", None), ["1: : no valid YAML or JSON at column 4"]);
        assert_eq!(faults("# nothing\n", None), ["0: : the file has no ConfigMap and no Secret"]);
        let twice = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n";
        assert_eq!(faults(twice, None), ["7: metadata.name: Duplicate value: configmap default/a"]);
    }

    #[test]
    fn exposed_file_may_have_config_maps_only() {
        let text = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: m}\n";
        assert_eq!(faults(text, Some("must be 0600")), ["1: : a file with Secrets must be 0600"]);
        assert_eq!(read(text.as_bytes(), Some("must be 0600")).objects.len(), 1);
    }

    #[test]
    fn too_large_object_is_refused() {
        let text = format!(
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: m}}\ndata: {{a: '{}', b: x}}\n",
            "x".repeat(MAX_OBJECT_BYTES)
        );
        assert_eq!(
            faults(&text, None),
            ["4: data: Too long: 1048577 bytes are more than the limit of 1048576"]
        );
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(text in "([a-zA-Z{}\\[\\]:,'\"\n -]{0,200}|apiVersion: v1\nkind: Secret\n[a-zA-Z{}:\n ]{0,80})") {
            let content = read(text.as_bytes(), None);
            prop_assert!(!content.faults.is_empty() || !content.objects.is_empty());
        }
    }
}
