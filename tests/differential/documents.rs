//! YAML against sigs.k8s.io/yaml, and JSON against the decoder of the API's objects.

use coracle::config::yaml;
use serde_json::{Value, json};

use crate::peer::{Peer, decode, encode};
use crate::random::Random;
use crate::{Cases, pick, rarely};

/// Documents as people and programs write them, and those about which parsers disagree.
const SEEDS: [&str; 66] = [
    "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  labels: {app: web, tier: \"1\"}\nspec:\n  hostNetwork: true\n  containers:\n  - name: c\n    image: busybox:1\n    command: [sh, -c, \"echo a; sleep 1\"]\n    env:\n    - name: A\n      value: b\n  hostNetwork: false\n",
    "x-a: &a\n  policy: File\n  dir: /tmp\nx-b: &b\n  pull: Never\nspec:\n- <<: *a\n  <<: *b\n  name: c\n- name: d\n  dir: /var\n  <<: *a\n- {<<: [*a, *b], name: e}\n",
    "args:\n- \"echo one\ntwo; sleep 1\"\n- 'it''s\n\n  two'\n- \"a \\\n  b\\tc\\u00e9\\x41\"\n",
    "a: |\n  x\n   y\n\n  z\n\nb: >\n  x\n  y\n\n   z\n  w\nc: |-\n  x\nd: >+\n  x\n\ne: |2\n   x\n",
    "a: |\n  x",
    "a: >-\n\n  x\n\n\n  y\n",
    "a: !!binary aGVsbG8=\nb: !!str 1\nc: !!int \"0x10\"\nd: !!float 1\ne: !foo bar\nf: !!set {a, b}\ng: !<tag:x,2000:y> z\nh: ! 12\n",
    "%TAG ! tag:example.com,2000:\n%TAG !e! tag:e,2000:\n---\na: !foo x\nb: !e!bar y\n",
    "%YAML 1.1\n# comment\n---\na: 1\n...\n",
    "--- a\n...\n---\nb\n",
    "---\n- a\n-\n- - b\n  - c\n-   d: e\n    f: g\n- ? h\n  : i\n",
    "? a\n? b\n: - c\n? |\n  block\n: d\n",
    "a: [b, c: d, ? e, ? f : g, {h: i, j, k: , \"l\":m}, ]\n",
    "a: {\n\tb: 1,\n\tc: 2\n}\n",
    "s:\n  c: [\n\t\"a\",\n\t\"b\"\n  ]\n",
    "a: \"x\"# c\nb: 1 # c\nc: a#b\n",
    "m:\n  a: \"{\n    \\\"x\\\": 1\n}\"\n  b: 1\n",
    "a: yes\nb: No\nc: on\nd: ~\ne: null\nf: 0777\ng: 0o17\nh: 0x1F\ni: 0b11\nj: 1_000\nk: 1e3\nl: .5\nm: -.5\nn: 1.\no: 12:30\np: 2024-01-02\nq: 08\nr: +1\ns: 1e400\nt: .inf\n",
    "a: 9223372036854775807\nb: 9223372036854775808\nc: 18446744073709551616\nd: -9223372036854775809\ne: 1e20\nf: 1e21\ng: 123456789012345678901234567890\nh: 0.1\n",
    "1: a\n1.5: b\ntrue: c\ny: d\nno: e\n1e6: f\n2024-01-02: g\n0x10: h\n\"1\": i\n",
    "~: a\n",
    "{}: x\n",
    "[a]: x\n",
    "{{ template }}: x\n",
    "a: {{ template }}\n",
    "a: &a [b, *a]\n",
    "a: &a 1\nb: &a 2\nc: *a\nd: &d {e: &d 3}\nf: *d\n",
    "a: *b\n",
    "&a a: &b b\n*a : *b\n",
    "a: &x\nb: !!str\nc: !!null\nd: &y !!str\ne: !t &z v\n",
    "a: b: c\n",
    "a:\n\t- b\n",
    "a:\n  - b\n - c\n",
    "a: 1\n b: 2\n",
    "  a: 1\n  b: 2\n",
    " a: 1\nb: 2\n",
    "a\nb\n  c\n",
    "a: b\n  c\n\n  d\ne: f\n",
    "- a\n b\n- c: d\n    e\n",
    "a: 'x\n---\ny'\n",
    "a: x\n--- \nb: y\n",
    "a: 1\n---\nb: [\n",
    "a: @b\n",
    "a: `b`\n",
    "a: %b\n%c: d\n",
    "a: - b\n",
    "a: -b\n- c\n",
    "key with spaces: value with: colon\n",
    "a: http://b:80/c?d=e&f#g\nb: [http://c/d]\nc: x?y\n",
    "a: \"\\q\"\n",
    "a: \"\\ud800\"\n",
    "a: 'b' c\n",
    "a: \"b\"c: d\n",
    "\"a\": b\n'c' : d\n\"e\":f\n",
    "a:\r\n  b: |\r\n    c\r\n    d\r\n  e: \"f\r\n    g\"\r\n",
    "a: b\rc: d\r",
    "a: b\u{85}c: d\u{2028}e: f\n",
    "a: caf\u{e9} \u{1f600}\n\u{e9}: x\n",
    "",
    "# nothing\n",
    "---\n---\na: 1\n",
    "null\n",
    "<<: 1\n",
    "<<: {a: 1}\nb: {<<: [{c: 1}, 2]}\n",
    "a: {<<: , b: 1}\n\"<<\": {c: 1}\n!!merge <<: {d: 1}\n",
    "- |+\n\n\n- >2-\n   x\n- |1+\n x\n\n",
];

/// What the mutations insert.
const PIECES: [&str; 64] = [
    " ", " ", "  ", "\n", "\n", "\n  ", "\t", ":", ": ", ":\n", "-", "- ", "\n- ", "?", "? ", ",", ", ", "[",
    "]", "{", "}", "&a ", "*a", "*a ", "<<: *a\n", "!", "!!str ", "!!int ", "!t ", "|", "|\n", ">-\n", "'",
    "\"", "\\", "\\n", "#", " #", "%", "@", "`", "---\n", "...\n", "\n---\n", "\r", "\r\n", "~", "1", "0x",
    "1.5", "1e", "_", "+", ".", "=", "a", "b: ", "\u{e9}", "\u{85}", "\u{2028}", "<<", "y", "\"x\": ",
    "\u{7f}",
];

fn text(random: &mut Random) -> String {
    let mut text: String = if rarely(random, 4) { String::new() } else { pick(random, &SEEDS).to_owned() };
    let changes = if text.is_empty() { 2 + random.below(24) } else { random.below(5) };
    for _ in 0..changes {
        let place = |random: &mut Random, text: &str| {
            text.floor_char_boundary(random.below(text.len() as u64 + 1) as usize)
        };
        let offset = place(random, &text);
        match random.below(8) {
            0 => {
                let end = text.ceil_char_boundary((offset + 1 + random.below(6) as usize).min(text.len()));
                text.replace_range(offset..end, "");
            }
            1 => {
                // A part of another document, as it is or with another indentation.
                let other = pick(random, &SEEDS);
                let from = place(random, other);
                let to = other.ceil_char_boundary((from + random.below(40) as usize).min(other.len()));
                let part = other[from..to].replace('\n', pick(random, &["\n", "\n", "\n  ", "\r\n"]));
                text.insert_str(offset, &part);
            }
            2 => {
                let lines: Vec<&str> = text.split_inclusive('\n').collect();
                let line = random.below(lines.len() as u64 + 1) as usize;
                let line = lines.get(line).copied().unwrap_or_default().to_owned();
                let offset = text[..offset].rfind('\n').map_or(0, |end| end + 1);
                text.insert_str(offset, &line);
            }
            _ => text.insert_str(offset, pick(random, &PIECES)),
        }
    }
    text
}

/// What only coracle accepts, on purpose: each is a row in docs/differences.md.
pub fn known(text: &str, theirs: &Value, broken: Option<&yaml::YamlError>) -> Option<&'static str> {
    let error = theirs["error"].as_str().unwrap_or_default();
    // Go finds them in the part of the file that it has read ahead.
    let ahead = ["control characters", "UTF-8", "UTF-16", "Unicode", "surrogate"];
    if broken.is_some() && ahead.iter().any(|words| error.contains(words)) {
        return Some("bad bytes in a later document");
    }
    if text.contains("\\/") {
        return Some("an escaped slash");
    }
    if text.contains('?') && text.contains(['[', '{']) {
        return Some("question mark in a flow collection");
    }
    error.contains("incompatible YAML document").then_some("another version of YAML")
}

fn same(ours: &Value, theirs: &Value) -> bool {
    match (ours, theirs) {
        (Value::Number(ours), Value::Number(theirs)) => {
            let distance = |ours: f64, theirs: f64| (ours - theirs).abs() <= ours.abs() * 1e-15;
            match (
                ours.as_i64().or(ours.as_u64().map(|_| -1)),
                theirs.as_i64().or(theirs.as_u64().map(|_| -1)),
            ) {
                (Some(_), Some(_)) => ours == theirs,
                _ => ours.as_f64().zip(theirs.as_f64()).is_some_and(|(ours, theirs)| distance(ours, theirs)),
            }
        }
        (Value::Array(ours), Value::Array(theirs)) => {
            ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(ours, theirs)| same(ours, theirs))
        }
        (Value::Object(ours), Value::Object(theirs)) => {
            ours.len() == theirs.len()
                && ours
                    .iter()
                    .zip(theirs)
                    .all(|((key, ours), (name, theirs))| key == name && same(ours, theirs))
        }
        _ => ours == theirs,
    }
}

#[test]
fn documents_equal_those_of_sigs_yaml() {
    let (mut cases, mut random) = Cases::new("documents", 60_000);
    let mut peer = Peer::start();
    let mut seeds = SEEDS.iter();
    while cases.next() {
        let mut text = seeds.next().map_or_else(|| text(&mut random), |seed| (*seed).to_owned());
        // What begins so is read as JSON first.
        if text.trim_start().starts_with('{') {
            text.insert_str(0, "--- ");
        }
        let theirs = peer.ask(&json!({"ask": "document", "data": encode(text.as_bytes())}));
        let yaml::Content { documents, broken } = yaml::parse(text.as_bytes());
        let ours = documents.first().map(|document| &document.value);
        if theirs["ambiguous"] == true {
            cases.count("random in Go");
            continue;
        }
        let value: Option<Value> =
            (theirs["ok"] == true).then(|| serde_json::from_slice(&decode(&theirs["value"])).unwrap());
        match (ours, value) {
            // Empty documents are skipped here.
            (_, Some(Value::Null)) => cases.count("empty"),
            (Some(ours), Some(value)) => {
                if !same(ours, &value) {
                    cases.differs(&format!("{ours}, in Go {value}: {text:?}"));
                }
                cases.count("read alike");
            }
            (None, Some(value)) => cases.differs(&format!("{broken:?}, in Go {value}: {text:?}")),
            (Some(ours), None) => match known(&text, &theirs, broken.as_ref()) {
                Some(known) => cases.count(known),
                None => cases.differs(&format!("{ours}, refused by Go: {theirs} {text:?}")),
            },
            (None, None) => cases.count("refused by both"),
        }
    }
    cases.end("read alike", 4);
}

/// UTF-16 and bytes that are no text.
#[test]
fn encodings_equal_those_of_sigs_yaml() {
    let (mut cases, mut random) = Cases::new("encodings", 10_000);
    let mut peer = Peer::start();
    while cases.next() {
        let seed = pick(&mut random, &SEEDS);
        let little = rarely(&mut random, 2);
        let unit = |unit: u16| if little { unit.to_le_bytes() } else { unit.to_be_bytes() };
        let mut bytes: Vec<u8> = match random.below(3) {
            0 => seed.as_bytes().to_vec(),
            1 => format!("\u{feff}{seed}").into_bytes(),
            _ => format!("\u{feff}{seed}").encode_utf16().flat_map(unit).collect(),
        };
        if rarely(&mut random, 3) {
            crate::mutate(&mut random, &mut bytes);
        }
        if bytes.trim_ascii_start().starts_with(b"{") {
            continue;
        }
        let theirs = peer.ask(&json!({"ask": "document", "data": encode(&bytes)}));
        let yaml::Content { documents, broken } = yaml::parse(&bytes);
        let value: Option<Value> =
            (theirs["ok"] == true).then(|| serde_json::from_slice(&decode(&theirs["value"])).unwrap());
        let text = String::from_utf8_lossy(&bytes);
        match (documents.first().map(|document| &document.value), value) {
            _ if theirs["ambiguous"] == true => cases.count("random in Go"),
            (_, Some(Value::Null)) => cases.count("empty"),
            (Some(ours), Some(value)) if same(ours, &value) => cases.count("read alike"),
            (Some(_), None) if known(&text, &theirs, broken.as_ref()).is_some() => cases.count("known"),
            (None, None) => cases.count("refused by both"),
            // Go then skips the first character of each line.
            _ if bytes.escape_ascii().to_string().matches("\\xfe").count() > 1 => cases.count("two marks"),
            (ours, value) => {
                cases.differs(&format!(
                    "{ours:?} {broken:?}, in Go {value:?} {theirs}: {}",
                    bytes.escape_ascii()
                ));
            }
        }
    }
    cases.end("read alike", 3);
}

/// A random JSON pod in which keys may be repeated.
fn pod(random: &mut Random) -> String {
    let name = pick(random, &["\"a\"", "\"b\"", "\"\\u0063\""]);
    let mut fields = Vec::new();
    for _ in 0..1 + random.below(4) {
        fields.push(match random.below(12) {
            0 => format!("\"metadata\":{{\"name\":{name}}}"),
            1 => format!("\"metadata\":{{\"labels\":{{{name}:\"x\"}},\"namespace\":{name}}}"),
            2 => "\"spec\":{\"hostNetwork\":true}".to_owned(),
            3 => format!("\"spec\":{{\"containers\":[{{\"name\":{name}}}],\"restartPolicy\":\"Never\"}}"),
            4 => format!(
                "\"spec\":{{\"containers\":[{{\"image\":{name}}},{{\"name\":{name},\"image\":\"x\"}}]}}"
            ),
            5 => "\"spec\":{\"nodeSelector\":{\"a\":\"b\"},\"activeDeadlineSeconds\":5}".to_owned(),
            6 => "\"spec\":{\"nodeSelector\":{\"c\":\"d\"},\"securityContext\":{\"runAsUser\":1}}".to_owned(),
            7 => "\"spec\":{\"securityContext\":{\"runAsGroup\":2},\"hostNetwork\":false}".to_owned(),
            8 => "\"spec\":{\"activeDeadlineSeconds\":null,\"securityContext\":null}".to_owned(),
            9 => "\"Spec\":{\"hostNetwork\":true},\"unknown\":[1,2.5,{}]".to_owned(),
            10 => "\"kind\":\"Pod\",\"apiVersion\":\"v1\"".to_owned(),
            _ => format!("\"spec\":{{\"containers\":[{{\"args\":[{name},\"\\ud83d\\ude00\",\"\\/\"]}}]}}"),
        });
    }
    format!("{{{}}}", fields.join(","))
}

#[test]
fn repeated_keys_of_json_are_merged_as_in_go() {
    let (mut cases, mut random) = Cases::new("repeated keys", 10_000);
    let mut peer = Peer::start();
    while cases.next() {
        let text = pod(&mut random);
        let documents = yaml::parse_bytes(text.as_bytes()).unwrap();
        let ours = documents[0].value.to_string();
        let theirs =
            peer.ask(&json!({"ask": "pods", "chain": [encode(text.as_bytes()), encode(ours.as_bytes())]}));
        if theirs["same"] != true {
            cases.differs(&format!("{theirs}: {text}\n{ours}"));
        }
        cases.count("read alike");
    }
    cases.end("read alike", 1);
}
