//! The text of a pod that the Go kubelet hashes into a static pod's UID
//! (Go: k8s.io/utils/dump over the internal pod of pkg/apis/core).
//!
//! It is the dump of a Go value: names and types of all fields, also of those that are empty, in
//! the order of a release. So each release gives other UIDs. With equal UIDs, either agent can
//! continue to run the static pods of the other.
//! `fingerprint/types.txt` has the types of 1.37, and the other tables have, for each older release,
//! those that differ from the types of the next one; `tests/controlplane/tools/podtypes` makes them.

mod md5;
mod quantity;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use serde_json::{Map, Value};

use super::defaults;
use super::fnv::Fnv128;
use crate::model::api;
use md5::Md5;

/// What decides about UIDs in a release of Kubernetes.
#[derive(Debug)]
pub(super) struct Release {
    pub(super) name: &'static str,
    /// The number of [`TABLES`] that apply.
    tables: usize,
    form: Form,
    algorithm: HashAlgorithm,
}

/// How a release converts a pod that it has read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Since 1.37.
    Flat,
    /// Before 1.37: the use of the host's namespaces is in the security context, resources of the whole
    /// pod have defaults, and annotations of init containers are dropped.
    Nested,
    /// The same, and volumes of images have no default for their pull policy (1.34 without the gate
    /// `ImageVolume`).
    NestedWithoutImageDefaults,
}

/// How a release hashes a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HashAlgorithm {
    Fnv,
    Md5,
}

/// The types of the releases, the newest first. What a table has replaces what those before it have;
/// the head of `podtypes` describes the format.
const TABLES: [&str; 4] = [
    include_str!("fingerprint/types.txt"),
    include_str!("fingerprint/types-1.36.txt"),
    include_str!("fingerprint/types-1.35.txt"),
    include_str!("fingerprint/types-1.34.txt"),
];

/// The releases whose static pods can be continued, the newest first. New pods get its UIDs.
pub(super) static RELEASES: [Release; 5] = [
    Release { name: "1.37", tables: 1, form: Form::Flat, algorithm: HashAlgorithm::Fnv },
    Release { name: "1.36", tables: 2, form: Form::Nested, algorithm: HashAlgorithm::Fnv },
    Release { name: "1.35", tables: 3, form: Form::Nested, algorithm: HashAlgorithm::Fnv },
    Release {
        name: "1.34",
        tables: 4,
        form: Form::NestedWithoutImageDefaults,
        algorithm: HashAlgorithm::Md5,
    },
    Release { name: "1.34", tables: 4, form: Form::Nested, algorithm: HashAlgorithm::Md5 },
];

/// A hash that is being computed.
enum Hasher {
    Fnv(Fnv128),
    Md5(Md5),
}

impl Hasher {
    fn hex(self) -> String {
        match self {
            Hasher::Fnv(hash) => hash.hex(),
            Hasher::Md5(hash) => hash.hex(),
        }
    }
}

impl Write for Hasher {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        match self {
            Hasher::Fnv(hash) => hash.write_str(text),
            Hasher::Md5(hash) => hash.write_str(text),
        }
    }
}

/// A value whose dump depends on the machine or on earlier actions of the kubelet: a time, an old
/// status, a number beyond 18 digits.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NoFingerprint;

type WriteResult = Result<(), NoFingerprint>;

impl From<std::fmt::Error> for NoFingerprint {
    fn from(_: std::fmt::Error) -> Self {
        NoFingerprint
    }
}

/// The UID of a pod from `place` by a release. `written` is the pod of the manifest, `given` is the same
/// with its defaults.
///
/// # Errors
/// When the text that is hashed cannot be determined.
pub(super) fn uid(
    release: &Release,
    written: &api::Pod,
    given: &api::Pod,
    place: &str,
) -> Result<String, NoFingerprint> {
    let mut hash = match release.algorithm {
        HashAlgorithm::Fnv => Hasher::Fnv(Fnv128::default()),
        HashAlgorithm::Md5 => Hasher::Md5(Md5::default()),
    };
    write(release, written, given, &mut hash)?;
    hash.write_str(place)?;
    Ok(hash.hex())
}

/// Writes the text of a pod.
fn write(release: &Release, written: &api::Pod, given: &api::Pod, out: &mut dyn Write) -> WriteResult {
    let mut given = given.clone();
    set_pod_level(release.form, written, &mut given)?;
    let mut value = crate::util::json::to_value(&given).map_err(|_| NoFingerprint)?;
    // The Go kubelet converts between `podIP` and a list of addresses.
    if value.pointer("/status/podIP").is_some() {
        return Err(NoFingerprint);
    }
    let spec = value.get_mut("spec").and_then(Value::as_object_mut).ok_or(NoFingerprint)?;
    if spec.get("terminationGracePeriodSeconds").and_then(Value::as_i64).is_some_and(|grace| grace < 0) {
        spec.insert("terminationGracePeriodSeconds".to_owned(), 1.into());
    }
    match release.form {
        Form::Flat => {
            // The old name of the field has the same value as the new one.
            if let Some(name) = spec.get("serviceAccountName").cloned() {
                spec.insert("serviceAccount".to_owned(), name);
            }
        }
        Form::Nested => nest(spec),
        Form::NestedWithoutImageDefaults => {
            nest(spec);
            remove_image_defaults(spec, written);
        }
    }
    if let Some(Value::Object(annotations)) = value.pointer_mut("/metadata/annotations")
        && release.form != Form::Flat
    {
        for age in ["alpha", "beta"] {
            for what in ["containers", "container-statuses"] {
                annotations.remove(&format!("pod.{age}.kubernetes.io/init-{what}"));
            }
        }
    }
    Dump { types: types(release.tables), out }.value("*core.Pod", Some(&value), true)
}

/// Moves fields to where the internal pod has them before 1.37.
fn nest(spec: &mut Map<String, Value>) {
    let mut security = match spec.remove("securityContext") {
        Some(Value::Object(security)) => security,
        _ => Map::new(),
    };
    for key in ["hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "hostUsers"] {
        if let Some(value) = spec.remove(key) {
            security.insert(key.to_owned(), value);
        }
    }
    spec.insert("securityContext".to_owned(), Value::Object(security));
}

/// Removes the pull policies of volumes that the manifest does not have.
fn remove_image_defaults(spec: &mut Map<String, Value>, written: &api::Pod) {
    let volumes = spec.get_mut("volumes").and_then(Value::as_array_mut);
    let written = written.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
    for (volume, written) in volumes.into_iter().flatten().zip(written.into_iter().flatten()) {
        let policy = written.image.as_ref().and_then(|image| image.pull_policy.as_deref());
        if policy.unwrap_or_default().is_empty()
            && let Some(Value::Object(image)) = volume.get_mut("image")
        {
            image.remove("pullPolicy");
        }
    }
}

/// Sets the resources for the whole pod. Before 1.37 the Go kubelet adds defaults: copies of limits are
/// exact, but a sum of the containers' resources has a form that only the kubelet gives it.
fn set_pod_level(form: Form, written: &api::Pod, pod: &mut api::Pod) -> WriteResult {
    let stated = written.spec.as_ref().and_then(|spec| spec.resources.clone());
    let names = |resources: Option<api::ResourceRequirements>| {
        let names = |amounts: Option<BTreeMap<_, _>>| -> BTreeSet<String> {
            amounts.unwrap_or_default().into_keys().collect()
        };
        let resources = resources.unwrap_or_default();
        (names(resources.limits), names(resources.requests))
    };
    let (limits, requests) = names(stated.clone());
    let Some(spec) = &mut pod.spec else { return Err(NoFingerprint) };
    spec.resources = stated;
    if form == Form::Flat || limits.is_empty() && requests.is_empty() {
        return Ok(());
    }
    defaults::set_pod_level(pod);
    let spec = pod.spec.as_ref().ok_or(NoFingerprint)?;
    let (limits_after, requests_after) = names(spec.resources.clone());
    let containers = || spec.init_containers.iter().flatten().chain(&spec.containers);
    let is_sum = |name: &String| {
        let requested = |container: &api::Container| container.resources.as_ref()?.requests.clone();
        containers().filter_map(requested).any(|amounts| amounts.contains_key(name))
            || spec.overhead.as_ref().is_some_and(|amounts| amounts.contains_key(name))
    };
    if limits_after != limits || requests_after.difference(&requests).any(is_sum) {
        return Err(NoFingerprint);
    }
    Ok(())
}

/// Type name → its fields, or `=` and the type for which it is another name.
fn types(tables: usize) -> BTreeMap<&'static str, &'static str> {
    let mut types = BTreeMap::new();
    for table in TABLES.into_iter().take(tables) {
        types.extend(table.split("\n#").skip(1).filter_map(|block| block.split_once('\n')));
        types.extend(table.lines().filter_map(|line| line.strip_prefix('=')?.split_once(' ')));
    }
    types
}

struct Dump<'a> {
    types: BTreeMap<&'static str, &'static str>,
    out: &'a mut dyn Write,
}

impl Dump<'_> {
    /// Writes a value, after its type if that is `shown`. An absent value is Go's zero value.
    fn value(&mut self, kind: &str, value: Option<&Value>, shown: bool) -> WriteResult {
        let value = value.filter(|value| !value.is_null());
        if let Some(target) = kind.strip_prefix('*') {
            match (value, shown) {
                (None, true) => write!(self.out, "({kind})<nil>")?,
                (None, false) => self.out.write_str("<nil>")?,
                (Some(_), true) => write!(self.out, "({kind})")?,
                (Some(_), false) => self.out.write_str("<*>")?,
            }
            return if value.is_some() { self.value(target, value, false) } else { Ok(()) };
        }
        if shown {
            write!(self.out, "({kind})")?;
        }
        match self.types.get(kind).copied() {
            Some(fields) if fields.starts_with(|c: char| c.is_ascii_uppercase()) => {
                self.fields(fields, value)
            }
            other => self.plain(other.unwrap_or(kind), value, kind),
        }
    }

    /// A value of a type without fields; `name` is the name of the type.
    fn plain(&mut self, kind: &str, value: Option<&Value>, name: &str) -> WriteResult {
        if let Some(item) = kind.strip_prefix("[]") {
            return self.list(item, value);
        }
        if let Some((_, item)) = kind.strip_prefix("map[").and_then(|rest| rest.split_once(']')) {
            return self.map(item, value, name);
        }
        match (kind, value) {
            ("string", None) => Ok(()),
            ("string", Some(Value::String(text))) => Ok(self.out.write_str(text)?),
            ("bool", None) => Ok(self.out.write_str("false")?),
            ("bool", Some(Value::Bool(value))) => Ok(write!(self.out, "{value}")?),
            ("int32" | "int64", None) => Ok(self.out.write_str("0")?),
            ("int32" | "int64", Some(Value::Number(number))) => {
                Ok(write!(self.out, "{}", number.as_i64().ok_or(NoFingerprint)?)?)
            }
            ("v1.Time", None) => {
                let zero = "{Time:(time.Time){wall:(uint64)0 ext:(int64)0 loc:(*time.Location)<nil>}}";
                Ok(self.out.write_str(zero)?)
            }
            ("intstr.IntOrString", _) => self.int_or_string(value),
            ("resource.Quantity", _) => quantity::write(value, false, self.out),
            _ => Err(NoFingerprint),
        }
    }

    fn list(&mut self, item: &str, value: Option<&Value>) -> WriteResult {
        let Some(value) = value else { return Ok(self.out.write_str("<nil>")?) };
        self.out.write_char('[')?;
        for (index, element) in value.as_array().ok_or(NoFingerprint)?.iter().enumerate() {
            if index > 0 {
                self.out.write_char(' ')?;
            }
            self.value(item, Some(element), false)?;
        }
        Ok(self.out.write_char(']')?)
    }

    /// `serde_json` keeps its maps sorted, as the dump does.
    fn map(&mut self, item: &str, value: Option<&Value>, name: &str) -> WriteResult {
        let Some(value) = value else { return Ok(self.out.write_str("<nil>")?) };
        self.out.write_str("map[")?;
        for (index, (key, element)) in value.as_object().ok_or(NoFingerprint)?.iter().enumerate() {
            let space = if index > 0 { " " } else { "" };
            write!(self.out, "{space}{key}:")?;
            if name == "core.ResourceList" {
                quantity::write(Some(element), true, self.out)?;
            } else {
                self.value(item, Some(element), false)?;
            }
        }
        Ok(self.out.write_char(']')?)
    }

    fn int_or_string(&mut self, value: Option<&Value>) -> WriteResult {
        let (kind, number, text) = match value {
            None => (0, 0, ""),
            Some(Value::Number(number)) => (0, number.as_i64().ok_or(NoFingerprint)?, ""),
            Some(Value::String(text)) => (1, 0, text.as_str()),
            Some(_) => return Err(NoFingerprint),
        };
        Ok(write!(self.out, "{{Type:(intstr.Type){kind} IntVal:(int32){number} StrVal:(string){text}}}")?)
    }

    fn fields(&mut self, fields: &'static str, value: Option<&Value>) -> WriteResult {
        if value.is_some_and(|value| !value.is_object()) {
            return Err(NoFingerprint);
        }
        self.out.write_char('{')?;
        let lines = fields.lines().take_while(|line| !line.starts_with(['#', '=']));
        for (index, line) in lines.enumerate() {
            let mut words = line.split(' ');
            let (Some(name), Some(kind)) = (words.next(), words.next()) else { return Err(NoFingerprint) };
            let mut simple = String::new();
            let json = words.next().unwrap_or_else(|| {
                let mut chars = name.chars();
                simple.extend(chars.next().map(|first| first.to_ascii_lowercase()));
                simple.push_str(chars.as_str());
                &simple
            });
            let found = match (json, json.strip_prefix('?')) {
                (".", _) => value,
                ("-", _) => None,
                (_, None) => value.and_then(|value| value.get(json)),
                (_, Some(json)) => match value.and_then(|value| value.get(json)) {
                    Some(set) if !set.is_null() => return Err(NoFingerprint),
                    _ => None,
                },
            };
            let space = if index > 0 { " " } else { "" };
            write!(self.out, "{space}{name}:")?;
            self.value(kind, found, true)?;
        }
        Ok(self.out.write_char('}')?)
    }
}

#[cfg(test)]
mod tests;
