//! Checksums of the state files of the Go kubelet: FNV-1a of a text with names and types of Go
//! (Go: pkg/kubelet/checkpointmanager/checksum, k8s.io/utils/dump).
//!
//! A state file is read by both agents only if both compute the same checksum, so the names of
//! Go's types and fields are part of the format of the file.

use std::borrow::Cow;
use std::fmt::Write as _;

use super::pod::fnv32;

/// A value as Go prints it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value<'a> {
    /// A text or a number.
    Plain(Cow<'a, str>),
    /// A struct: the name and the type of each field, and its value.
    Struct(Vec<(&'static str, &'static str, Value<'a>)>),
    /// A map. The entries must be in the order of Go's keys: numbers by value, texts by bytes.
    Map(Vec<(Cow<'a, str>, Value<'a>)>),
    /// A slice.
    List(Vec<Value<'a>>),
    /// What a pointer in a map or a slice points to.
    Pointer(Box<Value<'a>>),
    /// A map or a slice that is nil.
    Nil,
}

impl<'a> Value<'a> {
    /// A text.
    pub fn text(text: &'a str) -> Self {
        Value::Plain(Cow::Borrowed(text))
    }

    /// A number.
    pub fn number(number: impl ToString) -> Self {
        Value::Plain(Cow::Owned(number.to_string()))
    }

    /// A map with texts as keys.
    pub fn map(entries: impl IntoIterator<Item = (&'a str, Value<'a>)>) -> Self {
        Value::Map(entries.into_iter().map(|(key, value)| (Cow::Borrowed(key), value)).collect())
    }

    fn print(&self, out: &mut String) {
        // The depth is that of the types of a state file.
        match self {
            Value::Plain(text) => out.push_str(text),
            Value::Nil => out.push_str("<nil>"),
            Value::Pointer(value) => {
                out.push_str("<*>");
                value.print(out);
            }
            Value::Struct(fields) => {
                separated(out, "{", fields, "}", |out, (name, kind, value)| {
                    out.push_str(name);
                    out.push(':');
                    typed(kind, value, out);
                });
            }
            Value::Map(entries) => {
                separated(out, "map[", entries, "]", |out, (key, value)| {
                    out.push_str(key);
                    out.push(':');
                    value.print(out);
                });
            }
            Value::List(items) => separated(out, "[", items, "]", |out, item| item.print(out)),
        }
    }
}

fn separated<T>(out: &mut String, open: &str, items: &[T], close: &str, print: impl Fn(&mut String, &T)) {
    out.push_str(open);
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push(' ');
        }
        print(out, item);
    }
    out.push_str(close);
}

fn typed(kind: &str, value: &Value<'_>, out: &mut String) {
    out.push('(');
    out.push_str(kind);
    out.push(')');
    value.print(out);
}

/// The text of a value and its Go type, such as `(*state.CPUManagerCheckpoint){…}`.
#[must_use]
pub fn dump(kind: &str, value: &Value<'_>) -> String {
    let mut out = String::new();
    typed(kind, value, &mut out);
    out
}

/// The checksum of a value of this Go type. The field `Checksum` of a struct must be 0.
#[must_use]
pub fn checksum(kind: &str, value: &Value<'_>) -> u32 {
    fnv32(&dump(kind, value))
}

/// A JSON text as Go writes it: these characters are escaped in all texts.
#[must_use]
pub fn in_go_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for character in json.chars() {
        match character {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                let _ = write!(out, "\\u{:04x}", u32::from(character));
            }
            _ => out.push(character),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::encoding::from_base64;
    use serde_json::Value as Json;

    const RECORDED: &str = include_str!("../../tests/golden/resources/checksums.json");

    /// How a type of Go is written in JSON and in the dump.
    enum Kind {
        Plain,
        Bytes,
        /// Numbers as keys.
        Map(Box<Kind>),
        List(Box<Kind>),
        Pointer(Box<Kind>),
        /// Go's name, Go's type, the name in JSON.
        Struct(Vec<(&'static str, &'static str, &'static str, Kind)>),
    }

    fn map(element: Kind) -> Kind {
        Kind::Map(Box::new(element))
    }

    fn list(element: Kind) -> Kind {
        Kind::List(Box::new(element))
    }

    fn checkpoint(more: Vec<(&'static str, &'static str, &'static str, Kind)>) -> Kind {
        let mut fields = vec![("PolicyName", "string", "policyName", Kind::Plain)];
        fields.extend(more);
        // It is 0 when the sum is made, so the name does not exist in the file.
        fields.push(("Checksum", "checksum.Checksum", "zero", Kind::Plain));
        Kind::Struct(fields)
    }

    fn table() -> Kind {
        let names = [
            ("TotalMemSize", "total"),
            ("SystemReserved", "systemReserved"),
            ("Allocatable", "allocatable"),
            ("Reserved", "reserved"),
            ("Free", "free"),
        ];
        Kind::Struct(names.map(|(go, json)| (go, "uint64", json, Kind::Plain)).into())
    }

    fn kind(file: &str) -> (&'static str, Kind) {
        match file {
            "cpu_manager_state" => (
                "*state.CPUManagerCheckpoint",
                checkpoint(vec![
                    ("DefaultCPUSet", "string", "defaultCpuSet", Kind::Plain),
                    ("Entries", "map[string]map[string]string", "entries", map(map(Kind::Plain))),
                ]),
            ),
            "memory_manager_state" => {
                let node = Kind::Struct(vec![
                    ("NumberOfAssignments", "int", "numberOfAssignments", Kind::Plain),
                    (
                        "MemoryMap",
                        "map[v1.ResourceName]*state.MemoryTable",
                        "memoryMap",
                        map(Kind::Pointer(Box::new(table()))),
                    ),
                    ("Cells", "[]int", "cells", list(Kind::Plain)),
                ]);
                let block = Kind::Struct(vec![
                    ("NUMAAffinity", "[]int", "numaAffinity", list(Kind::Plain)),
                    ("Type", "v1.ResourceName", "type", Kind::Plain),
                    ("Size", "uint64", "size", Kind::Plain),
                ]);
                let fields = vec![
                    ("MachineState", "state.NUMANodeMap", "machineState", map(Kind::Pointer(Box::new(node)))),
                    ("Entries", "state.ContainerMemoryAssignments", "entries", map(map(list(block)))),
                ];
                ("*state.MemoryManagerCheckpoint", checkpoint(fields))
            }
            "kubelet_internal_checkpoint" => {
                let entry = Kind::Struct(vec![
                    ("PodUID", "string", "PodUID", Kind::Plain),
                    ("ContainerName", "string", "ContainerName", Kind::Plain),
                    ("ResourceName", "string", "ResourceName", Kind::Plain),
                    ("DeviceIDs", "checkpoint.DevicesPerNUMA", "DeviceIDs", map(list(Kind::Plain))),
                    ("AllocResp", "[]uint8", "AllocResp", Kind::Bytes),
                ]);
                let devices = Kind::Struct(vec![
                    ("PodDeviceEntries", "[]checkpoint.PodDevicesEntry", "PodDeviceEntries", list(entry)),
                    ("RegisteredDevices", "map[string][]string", "RegisteredDevices", map(list(Kind::Plain))),
                ]);
                ("checkpoint.checkpointData", devices)
            }
            _ => ("string", Kind::Plain),
        }
    }

    fn value(kind: &Kind, json: &Json) -> Value<'static> {
        match (kind, json) {
            (Kind::Map(_), Json::Null) => Value::Map(Vec::new()),
            (_, Json::Null) if !matches!(kind, Kind::Plain) => Value::Nil,
            (Kind::Plain, Json::String(text)) => Value::Plain(text.clone().into()),
            (Kind::Plain, Json::Number(number)) => Value::number(number),
            (Kind::Plain, _) => Value::number(0),
            (Kind::Bytes, Json::String(text)) => {
                Value::List(from_base64(text).unwrap().into_iter().map(Value::number).collect())
            }
            (Kind::Map(element), Json::Object(entries)) => Value::Map(
                entries.iter().map(|(key, json)| (Cow::Owned(key.clone()), value(element, json))).collect(),
            ),
            (Kind::List(element), Json::Array(items)) => {
                Value::List(items.iter().map(|json| value(element, json)).collect())
            }
            (Kind::Pointer(element), json) => Value::Pointer(Box::new(value(element, json))),
            (Kind::Struct(fields), json) => Value::Struct(
                fields
                    .iter()
                    .map(|(go, kind, name, element)| (*go, *kind, value(element, &json[name])))
                    .collect(),
            ),
            (_, other) => panic!("{other}"),
        }
    }

    #[test]
    fn recorded_state_files_have_the_checksums_of_go() {
        let recorded: Json = serde_json::from_str(RECORDED).unwrap();
        let vectors = recorded["vectors"].as_array().unwrap();
        assert!(vectors.len() >= 11);
        for vector in vectors {
            let file = vector["file"].as_str().unwrap();
            let content: Json = serde_json::from_str(vector["content"].as_str().unwrap()).unwrap();
            let hashed = match file {
                "kubelet_internal_checkpoint" => &content["Data"],
                "allocated_pods_state" => &content["data"],
                _ => &content,
            };
            let (name, kind) = kind(file);
            let value = value(&kind, hashed);
            assert_eq!(dump(name, &value), vector["hashed_text"].as_str().unwrap());
            let expected = vector["checksum"].as_u64().unwrap();
            assert_eq!(u64::from(checksum(name, &value)), expected, "{file}");
            let written = content.get("checksum").or(content.get("Checksum")).and_then(Json::as_u64);
            assert_eq!(written, Some(expected), "{file}");
        }
    }

    #[test]
    fn a_text_has_the_checksum_of_go() {
        assert_eq!(checksum("string", &Value::text("abc")), 2_241_406_447);
    }
}
