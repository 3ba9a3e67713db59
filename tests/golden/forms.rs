//! One form for both sides: what differs from run to run becomes a placeholder.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::proxy::Call;

/// A pod's own address and UID inside environment values are still those of the recording.
const RECORDED_IP: &str = "10.88.1.203";
const RECORDED_UID: &str = "b6d00cb2c08a9c51d4307614abd7a00e";
/// The id of the local busybox image in the recording.
pub const RECORDED_IMAGE: &str = "sha256:5d1fb6e09aa75e9bdbbf9d51541d3e310c5f2237b0dbdafc0072e0d1503bc864";

/// Texts of one pod and what stands for them.
#[derive(Default)]
pub struct Names(Vec<(String, String)>);

impl Names {
    pub fn add(&mut self, text: &str, placeholder: impl Into<String>) {
        if !text.is_empty() {
            self.0.push((text.to_owned(), placeholder.into()));
        }
    }

    /// The ids that the calls of one pod made.
    pub fn add_made(&mut self, calls: &[Call]) {
        for call in calls {
            let Some(id) = &call.made else { continue };
            let metadata = &call.request["config"]["metadata"];
            let attempt = metadata["attempt"].as_u64().unwrap_or(0);
            self.add(
                id,
                match call.method {
                    "RunPodSandbox" => format!("<sandbox {attempt}>"),
                    _ => format!("<container {}/{attempt}>", metadata["name"].as_str().unwrap_or("")),
                },
            );
        }
    }

    fn put(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from.as_str(), to))
    }
}

/// The names of the recording's own leftovers.
pub fn recorded_names() -> Names {
    let mut names = Names::default();
    names.add(RECORDED_UID, "<uid>");
    names.add(RECORDED_IP, "<podip>");
    names
}

/// Puts the placeholders, opens environment values and sorts what has no order.
pub fn normalize(value: &mut Value, names: &Names) {
    match value {
        Value::Object(map) => {
            for (key, value) in map.iter_mut() {
                if key == "envs" {
                    open_values(value);
                }
                normalize(value, names);
                if let ("options" | "envs" | "hugepage_limits", Value::Array(list)) = (key.as_str(), value) {
                    list.sort_by_key(ToString::to_string);
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|value| normalize(value, names)),
        Value::String(text) if is_time(text) => *text = "<time>".to_owned(),
        Value::String(text) => *text = missing_cpu(&random_file(&names.put(text))),
        _ => {}
    }
}

/// Environment values as text.
fn open_values(variables: &mut Value) {
    for variable in variables.as_array_mut().into_iter().flatten() {
        if let Some(Value::String(value)) = variable.get_mut("value") {
            *value = String::from_utf8_lossy(&from_base64(value)).into_owned();
        }
    }
}

fn is_time(text: &str) -> bool {
    let shape = |text: &str| {
        text.bytes()
            .map(|byte| if byte.is_ascii_digit() { '0' } else { char::from(byte) })
            .collect::<String>()
    };
    text.get(..20).is_some_and(|start| shape(start).starts_with("0000-00-00T00:00:00"))
}

/// The termination log's file has a random name.
fn random_file(text: &str) -> String {
    match text.rsplit_once('/') {
        Some((dir, file))
            if dir.contains("/containers/")
                && file.len() == 8
                && file.bytes().all(|byte| byte.is_ascii_hexdigit()) =>
        {
            format!("{dir}/<rand>")
        }
        _ => text.to_owned(),
    }
}

/// How much CPU is missing depends on the pods that came first, and on the machine.
fn missing_cpu(text: &str) -> String {
    match text.split_once("(res: cpu, q: ") {
        Some((before, after)) => {
            format!(
                "{before}(res: cpu, q: <missing>{}",
                after.trim_start_matches(|c: char| c.is_ascii_digit())
            )
        }
        None => text.to_owned(),
    }
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub fn base64(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits =
            chunk.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for index in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * index) & 63) as usize];
            text.push(if index <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

fn from_base64(text: &str) -> Vec<u8> {
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for digit in text.bytes().filter_map(|byte| DIGITS.iter().position(|digit| *digit == byte)) {
        bits = bits << 6 | u32::try_from(digit).unwrap();
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count & 0xff) as u8);
        }
    }
    bytes
}

/// Every place where the two differ, as a line.
pub fn differences(path: &str, recorded: &Value, seen: &Value, found: &mut Vec<String>) {
    let null = Value::Null;
    match (recorded, seen) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for key in keys {
                let (a, b) = (a.get(key).unwrap_or(&null), b.get(key).unwrap_or(&null));
                differences(&format!("{path}.{key}"), a, b, found);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (index, (a, b)) in a.iter().zip(b).enumerate() {
                differences(&format!("{path}[{index}]"), a, b, found);
            }
        }
        (a, b) if a == b => {}
        (a, b) => found.push(format!("{path}: recorded {a}, seen {b}")),
    }
}

/// The items by a key, each group in order.
pub fn grouped<T>(items: &[T], key: impl Fn(&T) -> String) -> BTreeMap<String, Vec<&T>> {
    let mut groups: BTreeMap<String, Vec<&T>> = BTreeMap::new();
    for item in items {
        groups.entry(key(item)).or_default().push(item);
    }
    groups
}
