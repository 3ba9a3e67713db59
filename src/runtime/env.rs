//! A container's environment, in the order in which upstream computes it.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::kube::objects::{FIRST_READ, Key, Kind, Object, ObjectError, not_found};
use crate::kube::{LocalObjects, PodDependencies, PodObjects};
use crate::model::api::{Container, EnvVarSource};
use crate::model::expand::{Budget, TooLarge, expand};
use crate::model::mount::MountedVolume;
use crate::model::pod::Pod;
use crate::util::stop::StopToken;

use super::config_error::ConfigError;
use super::env_file;
use super::fields::{Addresses, field_value, resource_value};
use super::settings::MachineNumbers;

/// Letters of a variable's name in a message.
const NAME_SHOWN: usize = 64;

/// Variables by name, each once, in the order of their first definition. A Secret's value may be no
/// UTF-8.
/// DIFFERS: upstream uses a map, so that the order changes from start to start.
#[derive(Clone, PartialEq, Eq, Default)]
pub(super) struct Env {
    ordered: Vec<(String, Vec<u8>)>,
    index: HashMap<String, usize>,
    /// The bytes left for more variables and for arguments.
    budget: Budget,
}

/// Values may be secrets.
impl std::fmt::Debug for Env {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_list().entries(self.ordered.iter().map(|(name, _)| name)).finish()
    }
}

impl Env {
    /// The value of `name`, as text.
    pub(super) fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        let index = *self.index.get(name)?;
        self.ordered.get(index).map(|(_, value)| String::from_utf8_lossy(value))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.ordered.iter().map(|(name, value)| (name.as_str(), value.as_slice()))
    }

    /// `$(NAME)` in an argument replaced by these variables. All arguments and the variables
    /// share one budget.
    ///
    /// # Errors
    /// When it is used up.
    pub(super) fn expand(&mut self, text: &str) -> Result<String, TooLarge> {
        let mut budget = self.budget;
        let expanded = budget.expand(text, |name| self.get(name))?;
        self.budget = budget;
        Ok(expanded)
    }

    /// As [`Env::expand`], also with the names, sorted, of those variables that are missing or empty.
    ///
    /// # Errors
    /// As [`Env::expand`].
    pub(super) fn expand_strictly(&mut self, text: &str) -> Result<(String, Vec<String>), TooLarge> {
        let missing = RefCell::new(BTreeSet::new());
        let mut budget = self.budget;
        let expanded = budget.expand(text, |name| {
            let value = self.get(name).filter(|value| !value.is_empty());
            if value.is_none() {
                missing.borrow_mut().insert(name.to_owned());
            }
            value
        })?;
        self.budget = budget;
        Ok((expanded, missing.into_inner().into_iter().collect()))
    }

    fn has(&self, name: &str) -> bool {
        self.index.contains_key(name)
    }

    fn set(&mut self, name: &str, value: Vec<u8>) -> Result<(), TooLarge> {
        // As the program gets it: `NAME=value`.
        let size = |value: &[u8]| name.len() + 1 + value.len();
        let known = self.index.get(name).and_then(|index| self.ordered.get_mut(*index));
        if let Some((_, old)) = &known {
            self.budget.release(size(old));
        }
        self.budget.reserve(size(&value))?;
        match known {
            Some(entry) => entry.1 = value,
            None => {
                self.index.insert(name.to_owned(), self.ordered.len());
                self.ordered.push((name.to_owned(), value));
            }
        }
        Ok(())
    }
}

/// A variable as messages name it. The name may be of any length.
fn field(index: usize, name: &str) -> String {
    let shown: String = name.chars().take(NAME_SHOWN).collect();
    format!("env[{index}] ({shown})")
}

/// The inputs of an environment.
#[derive(Clone, Copy)]
pub(super) struct EnvInputs<'a> {
    pub pod: &'a Pod,
    pub container: &'a Container,
    pub addresses: Addresses<'a>,
    /// Replaces limits that are not set.
    pub machine: &'a MachineNumbers,
    /// The volumes with env files.
    pub volumes: &'a [MountedVolume],
    /// Objects and services, on a node with an API server.
    pub api: Option<&'a PodDependencies>,
    /// The objects of static pods.
    pub local: &'a LocalObjects,
    pub stop: &'a StopToken,
}

/// Computes the environment of a container. May wait for objects that have not been read yet.
///
/// DIFFERS: upstream has no limit for the size of an environment and its arguments; the container
/// fails when it is started, if the node's memory lasts until then.
///
/// # Errors
/// When a variable's source cannot be read.
pub(super) fn environment(inputs: EnvInputs<'_>) -> Result<Env, ConfigError> {
    let EnvInputs { container, .. } = inputs;
    let services = services(&inputs)?;
    let mut objects = ObjectCache { inputs, found: BTreeMap::new() };
    let mut env = Env::default();
    let too_large = |field: String| ConfigError::too_large(container, field);
    for (index, from) in container.env_from.iter().flatten().enumerate() {
        let (kind, name, optional) = match (&from.config_map_ref, &from.secret_ref) {
            (Some(source), _) => (Kind::ConfigMap, &source.name, source.optional),
            (None, Some(source)) => (Kind::Secret, &source.name, source.optional),
            (None, None) => continue,
        };
        let Some(object) = objects.get(kind, name, optional)? else { continue };
        let prefix = from.prefix.as_deref().unwrap_or_default();
        for (key, value) in &object.data {
            env.set(&format!("{prefix}{key}"), value.clone())
                .map_err(|_| too_large(format!("envFrom[{index}] ({name})")))?;
        }
    }
    for (index, variable) in container.env.iter().flatten().enumerate() {
        let too_large = |_| too_large(field(index, &variable.name));
        let value = match (variable.value.as_deref().unwrap_or_default(), &variable.value_from) {
            ("", Some(source)) => objects.value(source)?,
            (text, _) => {
                let service = |name: &str| services.get(name).map(|value| Cow::from(value.as_str()));
                let known = |name: &str| env.get(name).or_else(|| service(name));
                Some(expand(text, known, env.budget.left()).map_err(too_large)?.into_bytes())
            }
        };
        if let Some(value) = value {
            env.set(&variable.name, value).map_err(too_large)?;
        }
    }
    for (name, value) in services {
        if !env.has(&name) {
            env.set(&name, value.into_bytes())
                .map_err(|_| too_large("the variables of services".to_owned()))?;
        }
    }
    Ok(env)
}

/// The variables about services. They are set unless the container defines the same name. A static
/// pod does not wait for an API server.
fn services(inputs: &EnvInputs<'_>) -> Result<BTreeMap<String, String>, ConfigError> {
    let EnvInputs { pod, api, stop, .. } = *inputs;
    let Some(api) = api else { return Ok(BTreeMap::new()) };
    if !pod.is_static() && !api.services.wait_until_read(FIRST_READ, stop) {
        return Err(ConfigError::ServicesNotRead);
    }
    let links = pod.spec().enable_service_links.unwrap_or(true);
    Ok(api.services.variables(pod.namespace(), links).into_iter().collect())
}

/// The objects that one environment needs, each looked up once.
struct ObjectCache<'a> {
    inputs: EnvInputs<'a>,
    /// `None`: it does not exist.
    found: BTreeMap<Key, Option<Arc<Object>>>,
}

impl ObjectCache<'_> {
    /// The object; `None` for an optional one that does not exist.
    fn get(
        &mut self,
        kind: Kind,
        name: &str,
        optional: Option<bool>,
    ) -> Result<Option<Arc<Object>>, ConfigError> {
        let EnvInputs { pod, api, local, stop, .. } = self.inputs;
        let Some(objects) = PodObjects::for_pod(pod, api, local) else {
            return without_client(pod, kind, name, optional).map(|()| None);
        };
        let key = Key::new(kind, pod.namespace(), name);
        let object = match self.found.get(&key) {
            Some(object) => object.clone(),
            None => {
                // A missing object may cost a request, and thousands of variables may name it.
                let object = match objects.get(&key, stop) {
                    Ok(object) => Some(object),
                    Err(ObjectError::NotFound { .. }) => None,
                    Err(error) => return Err(error.into()),
                };
                self.found.insert(key.clone(), object.clone());
                object
            }
        };
        match object {
            None if optional != Some(true) => Err(not_found(&key).into()),
            object => Ok(object),
        }
    }

    /// The value of a key; none for an optional one that is not there.
    fn key(
        &mut self,
        kind: Kind,
        (name, key): (&str, &str),
        optional: Option<bool>,
    ) -> Result<Option<Vec<u8>>, ConfigError> {
        let Some(object) = self.get(kind, name, optional)? else { return Ok(None) };
        match object.data.get(key) {
            Some(value) => Ok(Some(value.clone())),
            None if optional == Some(true) => Ok(None),
            None => Err(ConfigError::NoKey {
                key: key.to_owned(),
                kind: match kind {
                    Kind::ConfigMap => "ConfigMap",
                    Kind::Secret => "Secret",
                },
                namespace: self.inputs.pod.namespace().to_owned(),
                name: name.to_owned(),
            }),
        }
    }

    /// The value, or `None` for an optional source that does not exist.
    fn value(&mut self, source: &EnvVarSource) -> Result<Option<Vec<u8>>, ConfigError> {
        let EnvInputs { pod, container, addresses, machine, volumes, .. } = self.inputs;
        let text = if let Some(selector) = &source.field_ref {
            Some(field_value(pod, selector, addresses)?)
        } else if let Some(selector) = &source.resource_field_ref {
            Some(resource_value(pod, container, selector, machine)?)
        } else if let Some(selector) = &source.config_map_key_ref {
            return self.key(Kind::ConfigMap, (&selector.name, &selector.key), selector.optional);
        } else if let Some(selector) = &source.secret_key_ref {
            return self.key(Kind::Secret, (&selector.name, &selector.key), selector.optional);
        } else if let Some(selector) = &source.file_key_ref {
            env_file::value(selector, volumes)?
        } else {
            Some(String::new())
        };
        Ok(text.map(String::into_bytes))
    }
}

/// DIFFERS: without an API server upstream refuses optional references, too; here they count as
/// missing objects.
fn without_client(pod: &Pod, kind: Kind, name: &str, optional: Option<bool>) -> Result<(), ConfigError> {
    if optional == Some(true) {
        return Ok(());
    }
    let kind = match kind {
        Kind::ConfigMap => "configMap",
        Kind::Secret => "secret",
    };
    Err(ConfigError::NoClient { kind, namespace: pod.namespace().to_owned(), name: name.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::io;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use crate::kube::objects::{ObjectApi, Objects, OnUpdate, Strategy};
    use crate::kube::services::Services;
    use crate::util::threads::Running;

    fn env_with(
        metadata: serde_json::Value,
        container: serde_json::Value,
        api: Option<&PodDependencies>,
    ) -> Result<Vec<(String, String)>, String> {
        let pod = json!({"metadata": metadata, "spec": {"containers": [container]}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
        let (source, stop) = crate::util::stop::pair();
        // No test waits.
        drop(source);
        environment(EnvInputs {
            pod: &pod,
            container: &pod.containers()[0],
            addresses: Addresses::default(),
            machine: &MachineNumbers::default(),
            volumes: &[],
            api,
            local: &LocalObjects::default(),
            stop: &stop,
        })
        .map(|env| {
            let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
            env.iter().map(|(name, value)| (name.to_owned(), text(value))).collect()
        })
        .map_err(|error| error.to_string())
    }

    fn plain() -> serde_json::Value {
        json!({"name": "p", "namespace": "n"})
    }

    fn env_of(container: serde_json::Value) -> Result<Vec<(String, String)>, String> {
        env_with(plain(), container, None)
    }

    fn api() -> PodDependencies {
        let object = |pairs: &[(&str, &[u8])]| Object {
            data: pairs.iter().map(|(key, value)| ((*key).to_owned(), value.to_vec())).collect(),
            binary_data: [("bin".to_owned(), vec![1])].into(),
            ..Object::default()
        };
        let objects = Objects::fixed(vec![
            (Key::new(Kind::ConfigMap, "n", "m"), object(&[("a", b"1"), ("b.c-d", b"2")])),
            (Key::new(Kind::Secret, "n", "s"), object(&[("pw", b"x"), ("a", b"3"), ("raw", &[0xff])])),
        ]);
        for kind in [Kind::ConfigMap, Kind::Secret] {
            objects.set(&Key::new(kind, "n", "nope"), None);
        }
        let services = Services::default();
        services.replace(Vec::new());
        PodDependencies { services, ..PodDependencies::for_tests(objects) }
    }

    fn service(namespace: &str, name: &str, address: &str) -> crate::model::api::Service {
        serde_json::from_value(json!({"metadata": {"namespace": namespace, "name": name},
            "spec": {"clusterIP": address, "ports": [{"port": 80}]}}))
        .unwrap()
    }

    #[test]
    fn config_maps_and_secrets_become_variables() {
        let env = env_with(
            plain(),
            json!({"name": "c",
                "envFrom": [{"configMapRef": {"name": "m"}}, {"prefix": "S_", "secretRef": {"name": "s"}},
                    {"secretRef": {"name": "nope", "optional": true}}, {"configMapRef": {"name": "m"}, "prefix": "S_"}],
                "env": [{"name": "A", "value": "$(a)$(S_pw)"}, {"name": "a", "value": "own"},
                    {"name": "PW", "valueFrom": {"secretKeyRef": {"name": "s", "key": "pw"}}},
                    {"name": "K", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "a"}}},
                    {"name": "L", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "bin", "optional": true}}},
                    {"name": "M", "valueFrom": {"configMapKeyRef": {"name": "nope", "key": "x", "optional": true}}}]}),
            Some(&api()),
        );
        let expected = [
            ("a", "own"),
            ("b.c-d", "2"),
            ("S_a", "1"),
            ("S_pw", "x"),
            ("S_raw", "\u{fffd}"),
            ("S_b.c-d", "2"),
            ("A", "1x"),
            ("PW", "x"),
            ("K", "1"),
        ];
        assert_eq!(env.unwrap(), owned(&expected));
    }

    /// A pod whose optional object was missing used up the rate of the node's requests at each start.
    #[test]
    fn object_that_many_variables_name_is_read_once_per_environment_also_if_it_is_missing() {
        struct Empty(AtomicUsize);
        impl ObjectApi for Empty {
            fn read(&self, key: &Key) -> Result<Object, ObjectError> {
                self.0.fetch_add(1, Ordering::SeqCst);
                Err(not_found(key))
            }
            fn watch(&self, _: &Key, _: OnUpdate) -> io::Result<Running> {
                Err(io::ErrorKind::Unsupported.into())
            }
        }
        let server = Arc::new(Empty(AtomicUsize::new(0)));
        let source: Arc<dyn ObjectApi> = Arc::<Empty>::clone(&server);
        let objects = Objects::new(Strategy::Get, source, Box::new(|| None), Box::new(|_| {}));
        let variable = |name: &str, optional: bool| {
            let reference = json!({"name": "gone", "key": "k", "optional": optional});
            json!({"name": name, "valueFrom": {"configMapKeyRef": reference}})
        };
        let variables = |last| json!([variable("A", true), variable("B", true), variable("C", last)]);
        for (optional, expected) in [(true, Ok(0)), (false, Err("configmap \"gone\" not found".to_owned()))] {
            let containers = json!([{"name": "c", "env": variables(optional)}]);
            let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
                "spec": {"containers": containers}});
            let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
            objects.register(&pod);
            let api = PodDependencies::for_tests(objects.clone());
            api.services.replace(Vec::new());
            let before = server.0.load(Ordering::SeqCst);
            let env = environment(EnvInputs {
                pod: &pod,
                container: &pod.containers()[0],
                addresses: Addresses::default(),
                machine: &MachineNumbers::default(),
                volumes: &[],
                api: Some(&api),
                local: &LocalObjects::default(),
                stop: &StopToken::never(),
            });
            let count = env.map(|env| env.iter().count()).map_err(|error| error.to_string());
            assert_eq!((count, server.0.load(Ordering::SeqCst)), (expected, before + 1), "{optional}");
        }
    }

    #[test]
    fn missing_objects_and_keys_have_upstreams_error() {
        let key = |kind: &str, name: &str| json!({"env": [{"name": "A", "valueFrom": {kind: {"name": name, "key": "k"}}}]});
        for (container, expected) in [
            (json!({"envFrom": [{"configMapRef": {"name": "nope"}}]}), "configmap \"nope\" not found"),
            (json!({"envFrom": [{"secretRef": {"name": "nope"}}]}), "secret \"nope\" not found"),
            (key("secretKeyRef", "nope"), "secret \"nope\" not found"),
            (key("configMapKeyRef", "nope"), "configmap \"nope\" not found"),
            (key("secretKeyRef", "s"), "couldn't find key k in Secret n/s"),
            (key("configMapKeyRef", "m"), "couldn't find key k in ConfigMap n/m"),
            (key("configMapKeyRef", "unknown"), "object \"n\"/\"unknown\" not registered"),
        ] {
            let mut container = container;
            container["name"] = json!("c");
            assert_eq!(env_with(plain(), container, Some(&api())).unwrap_err(), expected);
        }
    }

    #[test]
    fn only_static_pods_start_before_services_are_known() {
        let api = PodDependencies { services: Services::default(), ..api() };
        let container = || json!({"name": "c"});
        assert_eq!(
            env_with(plain(), container(), Some(&api)).unwrap_err(),
            "services have not yet been read at least once, cannot construct envvars"
        );
        let fixed =
            json!({"name": "p", "namespace": "n", "annotations": {"kubernetes.io/config.source": "file"}});
        assert_eq!(env_with(fixed.clone(), container(), Some(&api)), Ok(Vec::new()));
        api.services.replace(vec![service("default", "kubernetes", "10.96.0.1")]);
        for metadata in [plain(), fixed] {
            let env = env_with(metadata, container(), Some(&api)).unwrap();
            assert!(env.contains(&("KUBERNETES_SERVICE_HOST".to_owned(), "10.96.0.1".to_owned())));
        }
    }

    #[test]
    fn debug_output_omits_values() {
        let mut env = Env::default();
        env.set("PW", b"hunter2".to_vec()).unwrap();
        assert_eq!(format!("{env:?}"), "[\"PW\"]");
    }

    fn owned(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    #[test]
    fn later_definition_replaces_earlier_one_in_place() {
        let env = env_of(json!({"name": "c", "env": [
            {"name": "A", "value": "1"}, {"name": "B", "value": "$(A)$(C)"}, {"name": "C", "value": ""},
            {"name": "A", "value": "2$(C)"}, {"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "bad-name.x", "value": "$(N)"}]}));
        let expected = [("A", "2"), ("B", "1$(C)"), ("C", ""), ("N", "p"), ("bad-name.x", "p")];
        assert_eq!(env.unwrap(), owned(&expected));
    }

    #[test]
    fn service_variables_do_not_replace_own_ones() {
        let api = api();
        api.services.replace(vec![service("n", "web", "10.0.0.1")]);
        let env = env_with(
            plain(),
            json!({"name": "c", "env": [{"name": "URL", "value": "$(WEB_SERVICE_HOST):$(WEB_SERVICE_PORT)"},
                {"name": "WEB_SERVICE_PORT", "value": "8080"}]}),
            Some(&api),
        )
        .unwrap();
        let expected =
            [("URL", "10.0.0.1:80"), ("WEB_SERVICE_PORT", "8080"), ("WEB_PORT", "tcp://10.0.0.1:80")];
        assert_eq!(env[..3], owned(&expected));
        assert!(env.contains(&("WEB_SERVICE_HOST".to_owned(), "10.0.0.1".to_owned())));
    }

    /// The error of an environment that is too large, which names this field.
    fn no_room_for(field: &str) -> String {
        format!(
            "environment and arguments of container \"c\" are larger than 2097152 bytes together: \
             there is no room for {field}"
        )
    }

    #[test]
    fn doubling_variables_are_refused_at_the_limit() {
        let mut env = vec![json!({"name": "V0", "value": "12345678"})];
        for n in 1..40 {
            env.push(json!({"name": format!("V{n}"), "value": format!("$(V{})$(V{})", n - 1, n - 1)}));
        }
        assert_eq!(env_of(json!({"name": "c", "env": env})).unwrap_err(), no_room_for("env[17] (V17)"));
    }

    #[test]
    fn each_use_of_a_value_counts_towards_the_limit() {
        let large = "x".repeat(1 << 20);
        let named = env_of(json!({"name": "c", "env": [
            {"name": "V", "value": large}, {"name": "W", "value": "$(V)".repeat(170_000)}]}));
        assert_eq!(named.unwrap_err(), no_room_for("env[1] (W)"));
        let note = json!({"name": "p", "namespace": "n", "annotations": {"a": "x".repeat(200_000)}});
        let field = json!({"fieldRef": {"fieldPath": "metadata.annotations['a']"}});
        let env: Vec<_> = (0..15_000).map(|n| json!({"name": format!("V{n}"), "valueFrom": field})).collect();
        let of_field = env_with(note.clone(), json!({"name": "c", "env": env}), None);
        assert_eq!(of_field.unwrap_err(), no_room_for("env[10] (V10)"));
        // A replaced value frees its bytes, up to a limit.
        let same = |times| vec![json!({"name": "V", "valueFrom": field}); times];
        assert_eq!(env_with(note.clone(), json!({"name": "c", "env": same(50)}), None).unwrap().len(), 1);
        assert!(env_with(note, json!({"name": "c", "env": same(1_000)}), None).is_err());
        let long =
            json!([{"name": "N".repeat(1 << 20), "value": "x"}, {"name": "M".repeat(1 << 20), "value": "x"}]);
        let expected = no_room_for(&format!("env[1] ({})", "M".repeat(NAME_SHOWN)));
        assert_eq!(env_of(json!({"name": "c", "env": long})).unwrap_err(), expected);
    }

    #[test]
    fn objects_and_services_count_towards_the_limit() {
        let large = Object {
            data: [("a".to_owned(), vec![0xff; 900_000]), ("b".to_owned(), Vec::new())].into(),
            ..Object::default()
        };
        let objects = Objects::fixed(vec![
            (Key::new(Kind::ConfigMap, "n", "large"), large.clone()),
            (Key::new(Kind::Secret, "n", "large"), large),
        ]);
        let api = PodDependencies { objects, ..api() };
        let from = |prefix: &str| json!({"prefix": prefix, "configMapRef": {"name": "large"}});
        let env =
            |from: serde_json::Value| env_with(plain(), json!({"name": "c", "envFrom": from}), Some(&api));
        assert_eq!(env(json!([from(""), from("A_")])).unwrap().len(), 4);
        assert_eq!(env(json!([from(""), from(""), from(""), from("")])).unwrap().len(), 2);
        let error = env(json!([from(""), from("A_"), {"prefix": "B_", "secretRef": {"name": "large"}}]));
        assert_eq!(error.unwrap_err(), no_room_for("envFrom[2] (large)"));
        let key = json!({"secretKeyRef": {"name": "large", "key": "a"}});
        let keys: Vec<_> = (0..3).map(|n| json!({"name": format!("V{n}"), "valueFrom": key})).collect();
        let error = env_with(plain(), json!({"name": "c", "env": keys}), Some(&api));
        assert_eq!(error.unwrap_err(), no_room_for("env[2] (V2)"));
        // Bytes that are not UTF-8 become three each.
        let text = json!({"name": "c", "envFrom": [from("")], "env": [{"name": "T", "value": "$(a)"}]});
        assert_eq!(env_with(plain(), text, Some(&api)).unwrap_err(), no_room_for("env[0] (T)"));
        let services = (0..20_000).map(|n| service("n", &format!("service-{n}"), "10.0.0.1"));
        api.services.replace(services.collect());
        let error = env_with(plain(), json!({"name": "c"}), Some(&api));
        assert_eq!(error.unwrap_err(), no_room_for("the variables of services"));
    }

    #[test]
    fn objects_without_api_server_fail_unless_optional() {
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
