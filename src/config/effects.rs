//! Settings that were changed but have no effect yet. One warning at start names them; the table of
//! fields has the effect of each field.

use serde::Deserialize as _;
use serde::de::Error as _;
use serde_json::{Map, Value};

use super::defaults::{DefaultSet, field_default, fill, fill_hard_eviction, get};
use super::fields::{FIELDS, FieldEffect};
use super::kubelet::KubeletConfiguration;

/// The fields that differ from their defaults and have no effect yet.
#[must_use]
pub fn without_effect(config: &KubeletConfiguration, defaults: DefaultSet) -> Vec<&'static str> {
    let set = crate::util::json::to_value(config).unwrap_or(Value::Null);
    let plain = crate::util::json::to_value(&default_configuration(defaults)).unwrap_or(Value::Null);
    FIELDS
        .iter()
        .filter(|field| field.effect == FieldEffect::NoEffectYet)
        .filter(|field| get(&set, field.path) != get(&plain, field.path))
        .map(|field| field.path)
        .collect()
}

/// The one warning about them; `None` when there is nothing to warn about.
#[must_use]
pub fn warning(fields: &[&str]) -> Option<String> {
    (!fields.is_empty()).then(|| format!("set, but without effect in this version: {}", fields.join(", ")))
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
            assert!(without_effect(&config, defaults).is_empty());
        }
        // And every field of the types is in the table.
        let mut printed = serde_json::to_value(default_configuration(DefaultSet::WithFile)).unwrap();
        crate::config::check::check_layer(&mut printed, &mut |path, message| panic!("{path}: {message}"));
    }

    #[test]
    fn settings_without_effect_are_named() {
        let mut config = default_configuration(DefaultSet::WithFile);
        config.max_pods = 5;
        config.streaming_connection_idle_timeout = crate::config::GoDuration::ZERO;
        config.port = 10251;
        // Each field has an effect, or is ignored.
        assert_eq!(without_effect(&config, DefaultSet::WithFile), [""; 0]);
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
