//! A container's environment, in the order in which upstream computes it.

use std::collections::HashMap;

use crate::model::api::{Container, EnvVarSource};
use crate::model::mount::MountedVolume;
use crate::model::pod::Pod;

use super::config_error::ConfigError;
use super::env_file;
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

/// Everything that an environment follows from.
#[derive(Clone, Copy)]
pub struct EnvInputs<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// One of its containers.
    pub container: &'a Container,
    /// What is known of addresses.
    pub addresses: Addresses<'a>,
    /// Stands in for limits that are not set.
    pub machine: &'a MachineNumbers,
    /// Where env files lie.
    pub volumes: &'a [MountedVolume],
    /// Variables about the services of the pod's namespace. They are there for names that
    /// the container does not define itself.
    pub services: &'a [(String, String)],
}

/// Computes the environment of a container.
///
/// # Errors
/// When a variable's source cannot be read.
pub fn environment(inputs: EnvInputs<'_>) -> Result<Env, ConfigError> {
    let EnvInputs { pod, container, services, .. } = inputs;
    for from in container.env_from.iter().flatten() {
        if let Some(source) = &from.config_map_ref {
            without_client(pod, "configMap", &source.name, source.optional)?;
        }
        if let Some(source) = &from.secret_ref {
            without_client(pod, "secret", &source.name, source.optional)?;
        }
    }
    let of_services =
        |name: &str| services.iter().find(|(service, _)| service == name).map(|(_, value)| value.clone());
    let mut env = Env::default();
    for variable in container.env.iter().flatten() {
        let value = match (variable.value.as_deref().unwrap_or_default(), &variable.value_from) {
            ("", Some(source)) => from_source(&inputs, source)?,
            (text, _) => Some(expand(text, |name| env.get(name).or_else(|| of_services(name)))),
        };
        if let Some(value) = value {
            env.set(&variable.name, value);
        }
    }
    for (name, value) in services {
        if env.get(name).is_none() {
            env.set(name, value.clone());
        }
    }
    Ok(env)
}

/// DIFFERS: without an API server upstream refuses optional references, too; here they are
/// as absent as their object.
fn without_client(
    pod: &Pod,
    kind: &'static str,
    name: &str,
    optional: Option<bool>,
) -> Result<(), ConfigError> {
    if optional == Some(true) {
        return Ok(());
    }
    Err(ConfigError::NoClient { kind, namespace: pod.namespace().to_owned(), name: name.to_owned() })
}

/// The value, or none for an optional source that is not there.
fn from_source(inputs: &EnvInputs<'_>, source: &EnvVarSource) -> Result<Option<String>, ConfigError> {
    let EnvInputs { pod, container, .. } = *inputs;
    if let Some(selector) = &source.field_ref {
        return field_value(pod, selector, inputs.addresses).map(Some);
    }
    if let Some(selector) = &source.resource_field_ref {
        return resource_value(pod, container, selector, inputs.machine).map(Some);
    }
    if let Some(selector) = &source.config_map_key_ref {
        return without_client(pod, "configMap", &selector.name, selector.optional).map(|()| None);
    }
    if let Some(selector) = &source.secret_key_ref {
        return without_client(pod, "secret", &selector.name, selector.optional).map(|()| None);
    }
    if let Some(selector) = &source.file_key_ref {
        return env_file::value(selector, inputs.volumes);
    }
    Ok(Some(String::new()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn env_with(
        container: serde_json::Value,
        services: &[(String, String)],
    ) -> Result<Vec<(String, String)>, String> {
        let pod = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"containers": [container]}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
        environment(EnvInputs {
            pod: &pod,
            container: &pod.containers()[0],
            addresses: Addresses::default(),
            machine: &MachineNumbers::default(),
            volumes: &[],
            services,
        })
        .map(|env| env.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
        .map_err(|error| error.to_string())
    }

    fn env_of(container: serde_json::Value) -> Result<Vec<(String, String)>, String> {
        env_with(container, &[])
    }

    fn owned(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    #[test]
    fn later_wins_in_place_and_sees_what_came_before() {
        let env = env_of(json!({"name": "c", "env": [
            {"name": "A", "value": "1"}, {"name": "B", "value": "$(A)$(C)"}, {"name": "C", "value": ""},
            {"name": "A", "value": "2$(C)"}, {"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "bad-name.x", "value": "$(N)"}]}));
        let expected = [("A", "2"), ("B", "1$(C)"), ("C", ""), ("N", "p"), ("bad-name.x", "p")];
        assert_eq!(env.unwrap(), owned(&expected));
    }

    #[test]
    fn services_fill_what_is_not_defined() {
        let services = owned(&[("WEB_SERVICE_HOST", "10.0.0.1"), ("WEB_SERVICE_PORT", "80")]);
        let env = env_with(
            json!({"name": "c", "env": [{"name": "URL", "value": "$(WEB_SERVICE_HOST):$(WEB_SERVICE_PORT)"},
                {"name": "WEB_SERVICE_PORT", "value": "8080"}]}),
            &services,
        );
        let expected =
            [("URL", "10.0.0.1:80"), ("WEB_SERVICE_PORT", "8080"), ("WEB_SERVICE_HOST", "10.0.0.1")];
        assert_eq!(env.unwrap(), owned(&expected));
    }

    #[test]
    fn objects_of_an_api_server_are_missing_or_optional() {
        for (container, expected) in [
            (
                json!({"envFrom": [{"configMapRef": {"name": "m"}}]}),
                "couldn't get configMap n/m, no kubeClient defined",
            ),
            (
                json!({"envFrom": [{"secretRef": {"name": "s"}}]}),
                "couldn't get secret n/s, no kubeClient defined",
            ),
            (
                json!({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}),
                "couldn't get secret n/s, no kubeClient defined",
            ),
            (
                json!({"env": [{"name": "A", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "p", "key": "k"}}}]}),
                "cannot find the volume \"v\" referenced by FileKeyRef",
            ),
        ] {
            let mut container = container;
            container["name"] = json!("c");
            assert_eq!(env_of(container).unwrap_err(), expected);
        }
        let env = env_of(json!({"name": "c",
            "envFrom": [{"configMapRef": {"name": "m", "optional": true}}, {"secretRef": {"name": "s", "optional": true}}],
            "env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k", "optional": true}}},
                {"name": "B", "value": "$(A)"}]}));
        assert_eq!(env.unwrap(), owned(&[("B", "$(A)")]));
    }
}
