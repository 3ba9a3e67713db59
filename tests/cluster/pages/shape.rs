//! The fields of a document.

use std::collections::BTreeSet;

use serde_json::Value;

/// The paths of all values, with the names of what is in lists; `common` takes out of a name
/// what is of one node only.
pub(super) fn paths(document: &Value, common: &dyn Fn(&str) -> String) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    walk(document, "", common, &mut found);
    found
}

fn walk(value: &Value, path: &str, common: &dyn Fn(&str) -> String, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                walk(value, &format!("{path}.{name}"), common, found);
            }
        }
        Value::Array(items) => {
            for item in items {
                let name = item["podRef"]["name"].as_str().or(item["name"].as_str()).unwrap_or_default();
                // The rest of this volume's name is random.
                let name = if name.starts_with("kube-api-access-") { "kube-api-access" } else { name };
                walk(item, &format!("{path}[{}]", common(name)), common, found);
            }
        }
        _ => {
            found.insert(path.to_owned());
        }
    }
}
