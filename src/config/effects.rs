//! The defaults of all fields, also as texts, and the warning at start about settings without effect.

use serde::Deserialize as _;
use serde::de::Error as _;
use serde_json::{Map, Value};

use super::defaults::{DefaultSet, field_default, fill, fill_hard_eviction};
use super::kubelet::KubeletConfiguration;

/// The one warning about settings without effect; `None` when there is nothing to warn about.
#[must_use]
pub fn warning(settings: &[&str]) -> Option<String> {
    (!settings.is_empty())
        .then(|| format!("set, but without effect in this version: {}", settings.join(", ")))
}

/// The configuration without any settings.
#[must_use]
pub fn default_configuration(defaults: DefaultSet) -> KubeletConfiguration {
    let mut value = Value::Object(Map::new());
    if defaults == DefaultSet::WithFile {
        fill_hard_eviction(&mut value, None);
    }
    fill(&mut value, defaults, None);
    // INVARIANT: the defaults fit the types; the test `the_table_and_the_types_agree` checks it.
    typed(value).unwrap_or_default()
}

/// The configuration in a document whose values have been checked. The document is a map, so the
/// decoder needs no code for lists, which would add 50 kB to the binary.
pub(super) fn typed(value: Value) -> Result<KubeletConfiguration, serde_json::Error> {
    match value {
        Value::Object(fields) => KubeletConfiguration::deserialize(fields),
        _ => Err(serde_json::Error::custom("not a map")),
    }
}

/// A field's default in a set, in the format of the documents.
#[must_use]
pub fn default_text(path: &str, defaults: DefaultSet) -> String {
    let value = super::fields::field(path).map_or(Value::Null, |field| field_default(field, defaults));
    match value {
        Value::Null => "unset".to_owned(),
        Value::String(text) if text.is_empty() => "\"\"".to_owned(),
        Value::String(text) => text,
        Value::Array(items) if items.is_empty() => "[]".to_owned(),
        Value::Object(entries) if entries.is_empty() => "{}".to_owned(),
        Value::Object(entries) => {
            let entries: Vec<_> = entries
                .iter()
                .map(|(key, value)| format!("{key}<{}", value.as_str().unwrap_or_default()))
                .collect();
            entries.join(",")
        }
        Value::Array(items) => items.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::defaults::get;
    use super::super::fields::FIELDS;
    use super::*;
    use serde_json::json;

    #[test]
    fn the_table_and_the_types_agree() {
        for defaults in [DefaultSet::WithFile, DefaultSet::FlagsOnly] {
            let config = default_configuration(defaults);
            assert_eq!(config.max_pods, 110, "the defaults do not fit the types");
            let printed = serde_json::to_value(&config).unwrap();
            for field in FIELDS {
                let expected = match field_default(field, defaults) {
                    Value::Null => None,
                    value => Some(value),
                };
                assert_eq!(get(&printed, field.path), expected.as_ref(), "{}", field.path);
            }
        }
        // And every field of the types is in the table.
        let mut printed = serde_json::to_value(default_configuration(DefaultSet::WithFile)).unwrap();
        crate::config::check::check_layer(&mut printed, &mut |path, message| panic!("{path}: {message}"));
    }

    #[test]
    fn settings_without_effect_are_named() {
        assert!(warning(&["a", "b.c"]).is_some_and(|text| text.ends_with(": a, b.c")));
        assert_eq!(warning(&[]), None);
        assert_eq!(
            json!(default_text("evictionHard", DefaultSet::WithFile)),
            json!(
                "imagefs.available<15%,imagefs.inodesFree<5%,memory.available<100Mi,nodefs.available<10%,nodefs.inodesFree<5%"
            )
        );
    }
}
