//! Decodes bytes into typed pods: documents, kinds, types. Sets no defaults and validates nothing.

use serde_json::Value;

use super::problem::{Fault, Faults};
use crate::config::yaml::{self, Document};
use crate::model::api;
use crate::model::typed;

/// The limit of reported duplicate keys of one manifest.
const MAX_DUPLICATES: usize = 20;

/// Whether a list of pods is allowed instead of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lists {
    /// Allowed, as at a URL.
    Accepted,
    /// Not allowed, as in a file.
    Refused,
}

/// One pod of a manifest, or its faults.
pub(super) struct DecodedPod {
    /// The pod, as far as the types allow.
    pub(super) pod: Result<api::Pod, Vec<Fault>>,
    /// Paths of unknown fields.
    pub(super) unknown: Vec<String>,
    document: usize,
    prefix: String,
}

pub(super) struct DecodedManifest {
    /// In the order of the manifest.
    pub(super) pods: Vec<DecodedPod>,
    /// Keys that are in one mapping twice; they have no effect on the validity.
    pub(super) duplicates: Vec<Fault>,
    documents: Vec<Document>,
}

impl DecodedManifest {
    /// Adds the line, and the index in a list, to a fault of `pod`.
    pub(super) fn locate(&self, pod: &DecodedPod, mut fault: Fault) -> Fault {
        let field = fault.field.unwrap_or_default();
        let path = match (pod.prefix.as_str(), field.as_str()) {
            ("", _) => field,
            (prefix, "") => prefix.to_owned(),
            (prefix, _) => format!("{prefix}.{field}"),
        };
        let document = self.documents.get(pod.document);
        fault.line = fault.line.or_else(|| document.and_then(|document| document.line_of(&path)));
        fault.field = Some(path).filter(|path| !path.is_empty());
        fault
    }
}

/// Decodes a whole manifest. The outer error means that it has no document. A broken document is a
/// fault of its own after the documents before it.
///
/// DIFFERS: upstream reads the first YAML document and ignores the others without a message.
pub(super) fn decode(bytes: &[u8], lists: Lists) -> Result<DecodedManifest, Fault> {
    let yaml::Content { documents, broken } = yaml::parse(bytes);
    let broken = broken.map(|error| Fault { line: Some(error.line), ..Fault::whole(error.message) });
    if documents.is_empty() {
        return Err(broken.unwrap_or_else(|| Fault::whole("the manifest is empty")));
    }
    let mut pods = Vec::new();
    for (index, document) in documents.iter().enumerate() {
        document_pods(index, &document.value, lists, &mut pods);
    }
    if let Some(fault) = broken {
        let message = format!("no document is read from here on: {}", fault.message);
        let pod = Err(vec![Fault { message, ..fault }]);
        pods.push(DecodedPod { pod, unknown: Vec::new(), document: documents.len(), prefix: String::new() });
    }
    let duplicates = documents.iter().flat_map(|document| &document.duplicates).take(MAX_DUPLICATES);
    let duplicates = duplicates
        .map(|duplicate| {
            let message = format!("{duplicate}; the last one counts");
            Fault { line: Some(duplicate.second), ..Fault::whole(message) }
        })
        .collect();
    Ok(DecodedManifest { pods, duplicates, documents })
}

fn document_pods(document: usize, value: &Value, lists: Lists, pods: &mut Vec<DecodedPod>) {
    let refuse =
        |fault| DecodedPod { pod: Err(vec![fault]), unknown: Vec::new(), document, prefix: String::new() };
    let kind = value.get("kind").and_then(Value::as_str);
    match kind {
        Some("PodList" | "List") if lists == Lists::Accepted => {
            if let Err(fault) = version(value) {
                pods.push(refuse(fault));
                return;
            }
            let items = match value.get("items") {
                None | Some(Value::Null) => &[],
                Some(Value::Array(items)) => items.as_slice(),
                Some(_) => {
                    pods.push(refuse(Fault::in_field("items", "want a list")));
                    return;
                }
            };
            for (index, item) in items.iter().enumerate() {
                let prefix = format!("items[{index}]");
                // In upstream's lists the items have no kind and no version.
                let (pod, unknown) = match item.get("kind") {
                    None | Some(Value::Null) if item.is_object() => typed_pod(item),
                    _ => checked_pod(item),
                };
                pods.push(DecodedPod { pod, unknown, document, prefix });
            }
        }
        _ => {
            let (pod, unknown) = checked_pod(value);
            pods.push(DecodedPod { pod, unknown, document, prefix: String::new() });
        }
    }
}

type PodAndUnknown = (Result<api::Pod, Vec<Fault>>, Vec<String>);

fn checked_pod(value: &Value) -> PodAndUnknown {
    let checked = (|| {
        if !value.is_object() {
            return Err(Fault::whole("want a mapping with apiVersion, kind, metadata and spec"));
        }
        match value.get("kind") {
            Some(Value::String(kind)) if kind == "Pod" => version(value),
            None | Some(Value::Null) => Err(Fault::in_field("kind", "Required value")),
            Some(other) => {
                Err(Fault::in_field("kind", format!("Unsupported value: {other}: supported values: \"Pod\"")))
            }
        }
    })();
    match checked {
        Ok(()) => typed_pod(value),
        Err(fault) => (Err(vec![fault]), Vec::new()),
    }
}

fn version(value: &Value) -> Result<(), Fault> {
    match value.get("apiVersion") {
        Some(Value::String(version)) if version == "v1" => Ok(()),
        None | Some(Value::Null) => Err(Fault::in_field("apiVersion", "Required value")),
        Some(other) => Err(Fault::in_field(
            "apiVersion",
            format!("Unsupported value: {other}: supported values: \"v1\""),
        )),
    }
}

fn typed_pod(value: &Value) -> PodAndUnknown {
    match typed::decode_all_faults::<api::Pod>(value) {
        Ok(typed) => (Ok(typed.object), typed.unknown),
        Err(mismatches) => {
            let faults = mismatches.into_iter().map(|mismatch| {
                Fault::in_field(mismatch.path, format!("Invalid value: {}", mismatch.message))
            });
            (Err(faults.collect()), Vec::new())
        }
    }
}

/// A pod from JSON that an agent has written itself, decoded like a manifest.
///
/// # Errors
/// The first fields with invalid values, with their paths.
pub(crate) fn pod_from_value(value: &serde_json::Value) -> Result<api::Pod, Faults> {
    let fault = |typed::WrongValue { path, message }| Fault { line: None, field: Some(path), message };
    let faults =
        |mismatches: Vec<typed::WrongValue>| Faults(mismatches.into_iter().take(3).map(fault).collect());
    typed::decode_all_faults::<api::Pod>(value).map(|typed| typed.object).map_err(faults)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str, lists: Lists) -> Vec<(Option<u32>, String)> {
        let show = |fault: Fault| {
            (fault.line, format!("{}: {}", fault.field.clone().unwrap_or_default(), fault.message))
        };
        match decode(text.as_bytes(), lists) {
            Err(fault) => vec![show(fault)],
            Ok(decoding) => {
                let mut all = Vec::new();
                for pod in &decoding.pods {
                    for fault in pod.pod.as_ref().err().into_iter().flatten() {
                        all.push(show(decoding.locate(pod, fault.clone())));
                    }
                }
                all
            }
        }
    }

    #[test]
    fn every_document_is_decoded_and_kinds_are_checked() {
        let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n---\n# nothing\n---\n\
                    apiVersion: v1\nkind: Pod\nmetadata: {name: b}\n";
        let decoding = decode(text.as_bytes(), Lists::Refused).unwrap();
        let names: Vec<_> =
            decoding.pods.iter().map(|pod| pod.pod.as_ref().unwrap().metadata.name.clone()).collect();
        assert_eq!(names, [Some("a".to_owned()), Some("b".to_owned())]);

        let check = |text: &str, line, expected: &str| {
            assert_eq!(faults(text, Lists::Refused), [(line, expected.to_owned())], "{text}");
        };
        check("", None, ": the manifest is empty");
        check("# only words\n---\n", None, ": the manifest is empty");
        check("apiVersion: v1\n", Some(1), "kind: Required value");
        check("kind: Pod\n", Some(1), "apiVersion: Required value");
        check(
            "apiVersion: v1\nkind: PodList\n",
            Some(2),
            "kind: Unsupported value: \"PodList\": supported values: \"Pod\"",
        );
        check(
            "kind: Pod\napiVersion: v2\n",
            Some(2),
            "apiVersion: Unsupported value: \"v2\": supported values: \"v1\"",
        );
        check("- a\n", Some(1), ": want a mapping with apiVersion, kind, metadata and spec");
        check(
            "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - name: a\n    image: [x]\n",
            Some(6),
            "spec.containers[0].image: Invalid value: want a string, found list",
        );
    }

    #[test]
    fn pod_lists_are_accepted_from_urls_only() {
        let text = "{\"apiVersion\":\"v1\",\"kind\":\"PodList\",\"items\":[\
                    {\"metadata\":{\"name\":\"a\"}},{\"kind\":\"Pod\",\"apiVersion\":\"v1\"},\
                    {\"metadata\":{\"name\":1}},7]}";
        let decoding = decode(text.as_bytes(), Lists::Accepted).unwrap();
        assert_eq!(decoding.pods.len(), 4);
        let found: Vec<String> = faults(text, Lists::Accepted).into_iter().map(|(_, text)| text).collect();
        assert_eq!(
            found,
            [
                "items[2].metadata.name: Invalid value: want a string, found integer `1`",
                "items[3]: want a mapping with apiVersion, kind, metadata and spec",
            ]
        );
    }
}
