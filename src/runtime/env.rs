//! A container's environment, in the order in which upstream computes it.

use std::collections::HashMap;

use crate::model::api::{Container, EnvVar, EnvVarSource};
use crate::model::pod::Pod;

use super::config_error::ConfigError;
use super::fields::{Addresses, field_value, resource_value};
use super::settings::MachineNumbers;
use crate::model::expand::expand;

/// Variables by name, each once, in the order of their first definition.
/// DIFFERS: upstream hands a map over, so that the order changes from start to start.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Env {
    ordered: Vec<(String, String)>,
    index: HashMap<String, usize>,
}

impl Env {
    /// The value of `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<String> {
        let at = *self.index.get(name)?;
        self.ordered.get(at).map(|(_, value)| value.clone())
    }

    /// All variables.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.ordered.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// `$(NAME)` in `text` replaced by these variables.
    #[must_use]
    pub fn expand(&self, text: &str) -> String {
        expand(text, |name| self.get(name))
    }

    fn set(&mut self, name: &str, value: String) {
        match self.index.get(name).and_then(|at| self.ordered.get_mut(*at)) {
            Some(entry) => entry.1 = value,
            None => {
                self.index.insert(name.to_owned(), self.ordered.len());
                self.ordered.push((name.to_owned(), value));
            }
        }
    }
}

/// Computes the environment of `container`.
///
/// # Errors
/// When a variable's source cannot be read.
pub fn environment(
    pod: &Pod,
    container: &Container,
    addresses: Addresses<'_>,
    machine: &MachineNumbers,
) -> Result<Env, ConfigError> {
    let unsupported = |what: String| ConfigError::Unsupported { what, container: container.name.clone() };
    for from in container.env_from.iter().flatten() {
        if let Some(source) = &from.config_map_ref {
            return Err(unsupported(format!("envFrom.configMapRef {:?}", source.name)));
        }
        if let Some(source) = &from.secret_ref {
            return Err(unsupported(format!("envFrom.secretRef {:?}", source.name)));
        }
    }
    let mut env = Env::default();
    for variable in container.env.iter().flatten() {
        let value = match (variable.value.as_deref().unwrap_or_default(), &variable.value_from) {
            ("", Some(source)) => {
                from_source(pod, container, variable, source, addresses, machine, &unsupported)?
            }
            (text, _) => env.expand(text),
        };
        env.set(&variable.name, value);
    }
    Ok(env)
}

fn from_source(
    pod: &Pod,
    container: &Container,
    variable: &EnvVar,
    source: &EnvVarSource,
    addresses: Addresses<'_>,
    machine: &MachineNumbers,
    unsupported: &impl Fn(String) -> ConfigError,
) -> Result<String, ConfigError> {
    if let Some(selector) = &source.field_ref {
        return field_value(pod, selector, addresses);
    }
    if let Some(selector) = &source.resource_field_ref {
        return resource_value(pod, container, selector, machine);
    }
    let name = &variable.name;
    if let Some(selector) = &source.config_map_key_ref {
        return Err(unsupported(format!("configMapKeyRef {:?} of env variable {name:?}", selector.name)));
    }
    if let Some(selector) = &source.secret_key_ref {
        return Err(unsupported(format!("secretKeyRef {:?} of env variable {name:?}", selector.name)));
    }
    if source.file_key_ref.is_some() {
        return Err(unsupported(format!("fileKeyRef of env variable {name:?}")));
    }
    Ok(String::new())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn env_of(container: serde_json::Value) -> Result<Vec<(String, String)>, String> {
        let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [container]}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
        environment(&pod, &pod.containers()[0], Addresses::default(), &MachineNumbers::default())
            .map(|env| env.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn later_wins_in_place_and_sees_what_came_before() {
        let env = env_of(json!({"name": "c", "env": [
            {"name": "A", "value": "1"}, {"name": "B", "value": "$(A)$(C)"}, {"name": "C", "value": ""},
            {"name": "A", "value": "2$(C)"}, {"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "bad-name.x", "value": "$(N)"}]}));
        let expected = [("A", "2"), ("B", "1$(C)"), ("C", ""), ("N", "p"), ("bad-name.x", "p")];
        assert_eq!(env.unwrap(), expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    }

    #[test]
    fn sources_of_a_later_version_are_named() {
        for (container, part) in [
            (
                json!({"name": "c", "envFrom": [{"configMapRef": {"name": "m"}}]}),
                "envFrom.configMapRef \"m\"",
            ),
            (json!({"name": "c", "envFrom": [{"secretRef": {"name": "s"}}]}), "envFrom.secretRef \"s\""),
            (
                json!({"name": "c", "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}),
                "secretKeyRef \"s\" of env variable \"A\"",
            ),
        ] {
            let error = env_of(container).unwrap_err();
            assert!(error.contains(part) && error.contains("container \"c\""), "{error}");
        }
    }
}
