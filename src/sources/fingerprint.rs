//! The text of a pod that the Go kubelet hashes into a static pod's UID
//! (Go: k8s.io/utils/dump over the internal pod of pkg/apis/core).
//!
//! It is the dump of a Go value: names and types of all fields, also of those that are empty, in
//! the order of release 1.36.3. With equal UIDs, either agent can continue to run the static pods
//! of the other. `fingerprint/types.txt` has the types; `tests/controlplane/tools/podtypes`
//! generates it.

mod quantity;

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Map, Value};

use crate::model::api;

/// All types, one after the other; the head of `podtypes` describes the format.
const TYPES: &str = include_str!("fingerprint/types.txt");

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

/// Writes the text of a pod that has its defaults.
///
/// # Errors
/// When the text cannot be determined.
pub(super) fn write(pod: &api::Pod, out: &mut dyn Write) -> WriteResult {
    let mut value = crate::util::json::to_value(pod).map_err(|_| NoFingerprint)?;
    internal_form(&mut value)?;
    Dump { types: types(), out }.value("*core.Pod", Some(&value), true)
}

/// Converts fields that the internal pod has elsewhere, or does not have.
fn internal_form(pod: &mut Value) -> WriteResult {
    let spec = pod.get_mut("spec").and_then(Value::as_object_mut).ok_or(NoFingerprint)?;
    if spec.get("terminationGracePeriodSeconds").and_then(Value::as_i64).is_some_and(|grace| grace < 0) {
        spec.insert("terminationGracePeriodSeconds".to_owned(), 1.into());
    }
    // Sums and roundings of the containers' resources, which only the kubelet computes this way.
    if spec.get("resources").is_some_and(|resources| resources.as_object().is_some_and(|map| !map.is_empty()))
    {
        return Err(NoFingerprint);
    }
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
    if let Some(Value::Object(annotations)) = pod.pointer_mut("/metadata/annotations") {
        for age in ["alpha", "beta"] {
            for what in ["containers", "container-statuses"] {
                annotations.remove(&format!("pod.{age}.kubernetes.io/init-{what}"));
            }
        }
    }
    // The Go kubelet converts `podIP` to a list of addresses.
    if pod.pointer("/status/podIP").is_some() { Err(NoFingerprint) } else { Ok(()) }
}

/// Type name → its fields, or `=` and the type for which it is another name.
fn types() -> BTreeMap<&'static str, &'static str> {
    let structs = TYPES.split("\n#").skip(1).filter_map(|block| block.split_once('\n'));
    let aliases = TYPES.lines().filter_map(|line| line.strip_prefix('=')?.split_once(' '));
    structs.chain(aliases).collect()
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
