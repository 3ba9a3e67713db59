//! Texts that the YAML parser accepts and refuses.

use super::scalar::json_number;
use super::*;
use proptest::prelude::*;
use serde_json::json;

fn parse_documents(text: &str) -> Result<Vec<Document>, YamlError> {
    parse_bytes(text.as_bytes())
}

fn parse_value(text: &str) -> Value {
    let mut documents = parse_documents(text).unwrap();
    assert_eq!(documents.len(), 1, "{text}");
    documents.remove(0).value
}

#[test]
fn scalars_follow_yaml_1_1() {
    for (text, expected) in [
        ("yes", json!(true)),
        ("off", json!(false)),
        ("'yes'", json!("yes")),
        ("!!str yes", json!("yes")),
        ("~", json!(null)),
        ("0777", json!(511)),
        ("0x1F", json!(31)),
        ("0b11", json!(3)),
        ("08", json!(8)),
        ("1_000", json!(1000)),
        ("-5", json!(-5)),
        ("18446744073709551615", json!(18_446_744_073_709_551_615_u64)),
        ("1.0", json!(1)),
        ("1.5", json!(1.5)),
        ("1e3", json!(1000)),
        ("10m", json!("10m")),
        ("1.2.3.4", json!("1.2.3.4")),
        ("2024-01-02", json!("2024-01-02")),
        ("12:30", json!("12:30")),
        ("-", json!([null])),
        ("..", json!("..")),
    ] {
        assert_eq!(
            parse_value(&format!("a: {text}\n").replace("a: -\n", "a:\n-\n"))["a"],
            expected,
            "{text}"
        );
    }
}

#[test]
fn keys_of_any_scalar_type_become_strings() {
    assert_eq!(parse_value("80: a\ntrue: b\n\"x\": c\n"), json!({"80": "a", "true": "b", "x": "c"}));
    assert_eq!(parse_value("y: a\n08: b\noff: &k c\n"), json!({"true": "a", "8": "b", "false": "c"}));
    assert_eq!(
        parse_value("1.0: a\n1e6: b\n123456789.5: c\n0.00001: d\n.inf: e\n2024-01-02: f\n"),
        json!({"1": "a", "1e+06": "b", "1.2345679e+08": "c", "1e-05": "d", ".inf": "e", "2024-01-02": "f"})
    );
}

#[test]
fn aliases_and_merges_copy() {
    let text = "base: &b {x: 1, z: 2}\ncopy: *b\nmerged:\n  <<: *b\n  z: 3\n";
    let value = parse_value(text);
    assert_eq!(value["copy"], json!({"x": 1, "z": 2}));
    assert_eq!(value["merged"], json!({"x": 1, "z": 3}));
}

#[test]
fn empty_documents_are_skipped() {
    let documents = parse_documents("---\n---\na: 1\n---\n# only a comment\n---\nb: 2\n").unwrap();
    assert_eq!(documents.iter().map(|d| d.line).collect::<Vec<_>>(), [3, 7]);
    assert!(parse_documents("").unwrap().is_empty());
    assert!(parse_documents("# nothing\n").unwrap().is_empty());
    assert_eq!(parse_value("\u{feff}a: 1\n"), json!({"a": 1}));
}

#[test]
fn json_is_read_and_its_repeated_keys_are_merged() {
    assert_eq!(
        parse_value(r#"{"a": "\ud83d\ude00\/", "b": [1, null]}"#),
        json!({"a": "😀/", "b": [1, null]})
    );
    let long = "k".repeat(5000);
    assert_eq!(parse_value(&format!("{{\"{long}\":\t1}}"))[&long], json!(1));
    assert_eq!(parse_value(&format!("{{\"{long}\":1,\"{long}\":2}}"))[&long], json!(2));
    let twice = parse(b"{\"a\": 1,\n\"a\": 2}").documents.remove(0);
    assert_eq!(twice.value, json!({"a": 2}));
    assert_eq!(twice.duplicates, [Duplicate { key: "a".to_owned(), first: 1, second: 2 }]);
    assert_eq!(
        parse_value(r#"{"a": {"x": 1, "l": [{"n": 1}, 2]}, "a": {"y": 2, "l": [{"m": 1}]}}"#),
        json!({"a": {"x": 1, "y": 2, "l": [{"n": 1, "m": 1}]}})
    );
    // What follows a JSON document is refused with it, as in Go.
    for text in ["{\"a\": 1} xx", "{\"a\": 1}\n{\"b\": 2}\n"] {
        let content = parse(text.as_bytes());
        assert!(content.documents.is_empty() && content.broken.is_some(), "{text}");
    }
}

#[test]
fn each_field_path_has_its_line() {
    let text = "apiVersion: v1\nmetadata:\n  labels:\n    a.b/c: x\n    a: y\nspec:\n  containers:\n  - name: one\n    image: i\n  - name: two\n    env: [{name: A,\n      value: b}]\n";
    let document = &parse_documents(text).unwrap()[0];
    for (path, line) in [
        ("", 1),
        ("apiVersion", 1),
        ("metadata.labels", 3),
        ("metadata.labels.a.b/c", 4),
        ("metadata.labels[a.b/c]", 4),
        ("metadata.labels.a", 5),
        ("spec.containers[0]", 8),
        ("spec.containers[0].image", 9),
        ("spec.containers[1].name", 10),
        ("spec.containers[1].image", 10),
        ("spec.containers[1].env[0].value", 12),
        ("spec.containers[7].name", 7),
        ("nowhere", 1),
    ] {
        assert_eq!(document.line_of(path), Some(line), "{path}");
    }
}

#[test]
fn invalid_yaml_is_refused_with_its_line() {
    for (text, line, words) in [
        ("a: [1,\nb", 1, ""),
        ("a: b: c\n", 1, ""),
        ("a:\n\t- b\n", 2, ""),
        ("a: *b\n", 1, ""),
        ("a: &b [*b]\n", 1, "contains it"),
        ("a: b\nc: 'd\n\n", 2, "has no end"),
        ("a: 1\n\0b: 2\n", 2, "control"),
        ("a: 1\n{{ b }}: 2\nc: 3\n", 2, ""),
        ("a: .inf\n", 1, "finite"),
        ("a: !!int b\n", 1, "tag"),
        ("? [a]\n: b\n", 1, "key"),
        ("~: b\n", 1, "key"),
        ("<<: 1\n", 1, "mappings"),
    ] {
        let error = parse_documents(text).unwrap_err();
        assert_eq!(error.line, line, "{text:?}: {error}");
        assert!(error.to_string().contains(words), "{text:?}: {error}");
    }
    assert_eq!(parse_bytes(b"a: 1\nb: \xff").unwrap_err().line, 2);
}

#[test]
fn yaml_beyond_a_limit_of_size_or_depth_is_refused() {
    let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
    for level in 1..30 {
        let below = format!("*a{}, ", level - 1).repeat(9);
        bomb += &format!("a{level}: &a{level} [{below}]\n");
    }
    assert!(parse_documents(&bomb).unwrap_err().message.contains("aliases"));
    let wide = format!("a: &a {}\nb: [{}]\n", "x".repeat(1 << 20), "*a, ".repeat(40));
    assert!(parse_documents(&wide).unwrap_err().message.contains("aliases"));
    for deep in ["[".repeat(100_000), "- ".repeat(100_000), "{a: ".repeat(1000), "? ".repeat(10_000)] {
        assert!(parse_documents(&deep).is_err());
    }
    assert!(parse_documents(&" ".repeat(MAX_TEXT_BYTES + 1)).is_err());
    assert!(parse_documents(&"---\n".repeat(5000)).is_err());
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e9..1e9_f64).prop_map(|x| json_number(x).map_or(Value::Null, Value::Number)),
        "[ -~]{0,8}".prop_map(Value::from),
        "[a-z0-9:#\\-?~'\"\n\t ]{0,12}".prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        proptest::sample::select(vec![
            "yes",
            "no",
            "~",
            "null",
            "0777",
            "1e3",
            "0x1",
            "1_0",
            ".5",
            "=",
            "<<",
            "-",
            "---",
            "...",
            "y",
            "On",
            "",
            " ",
            "\n",
            "a\n",
            "a\n\n",
            "\na",
            " a\nb\n",
            "2024-01-01",
            "12:30",
            "#a",
            "a #b",
            "!x",
            "&a",
            "*a",
            "%a",
            "@a",
            "`a",
            "|",
            ">",
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            proptest::collection::btree_map("[a-zA-Z0-9./ -]{1,6}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn written_yaml_reads_back(value in values()) {
        let wrapped = json!({"value": value});
        let text = to_yaml(&wrapped);
        let back = parse_documents(&text).map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?;
        prop_assert_eq!(&back[0].value, &wrapped, "{}", text);
    }

    #[test]
    fn parsing_any_text_does_not_panic(text in "[a-z0-9 \n\t:\\-\\[\\]{}&*!|>'\"%@`#,?~.<\\\\]{0,60}") {
        let _ = parse_documents(&text);
    }
}

#[test]
fn documents_are_read_as_go_reads_them() {
    for (text, expected) in [
        ("a: 1\nb: 2\na: 3\n", json!({"a": 3, "b": 2})),
        ("x: &x {k: 1, l: 2}\nw:\n  k: 9\n  <<: *x\n", json!({"x": {"k": 1, "l": 2}, "w": {"k": 1, "l": 2}})),
        (
            "x: &x {k: 1}\nz: &z {k: 2, m: 2}\nw:\n  <<: *x\n  <<: *z\n  o: 3\n",
            json!({"x": {"k": 1}, "z": {"k": 2, "m": 2}, "w": {"k": 2, "m": 2, "o": 3}}),
        ),
        (
            "x: &x {k: 1}\nz: &z {k: 2, m: 2}\nw: {k: 0, <<: [*x, *z, {o: 3}], m: 4}\n",
            json!({"x": {"k": 1}, "z": {"k": 2, "m": 2}, "w": {"k": 1, "m": 4, "o": 3}}),
        ),
        ("a: !!binary aGVsbG8=\n", json!({"a": "hello"})),
        ("a: !!binary |\n  aGVs\n  bG8=\n", json!({"a": "hello"})),
        ("a: !foo bar\nb: !foo [x]\nc: !<tag:x,2000:y> 1\n", json!({"a": "bar", "b": ["x"], "c": "1"})),
        ("%TAG ! tag:example.com,2000:\n---\na: !foo x\n", json!({"a": "x"})),
        ("%YAML 1.1\n---\na: x\n", json!({"a": "x"})),
        ("%YAML 1.2\n---\na: x\n", json!({"a": "x"})),
        ("a: \"x\ny\"\n", json!({"a": "x y"})),
        ("a:\n- 'x\n\n  y'\n", json!({"a": ["x\ny"]})),
        ("a: \"x\\\n\n  y\"\n", json!({"a": "x\ny"})),
        ("m:\n  a: \"{\n    \\\"x\\\": 1\n}\"\n  b: 1\n", json!({"m": {"a": "{ \"x\": 1 }", "b": 1}})),
        ("a: {\n\tb: 1,\n\tc: 2\n}\n", json!({"a": {"b": 1, "c": 2}})),
        ("s:\n  c: [\n\t\"a\",\n\t\"b\"\n  ]\n", json!({"s": {"c": ["a", "b"]}})),
        ("a: \"x\"# c\nb: 1\n", json!({"a": "x", "b": 1})),
        ("a: |\n  x", json!({"a": "x"})),
        ("a: |+\n  x\n\n", json!({"a": "x\n\n"})),
        ("a: >-\n  x\n  y\n\n   z\n", json!({"a": "x y\n\n z"})),
        ("a: [http://b/?c=d, e?f]\n", json!({"a": ["http://b/?c=d", "e?f"]})),
        ("a: [b: 1, ? c]\n", json!({"a": [{"b": 1}, {"c": null}]})),
        (
            "a: 1e400\nb: 0b-1\nc: .5_0\nd: ! 12\ne: !!int '7'\n",
            json!({"a": "1e400", "b": -1, "c": 0.5, "d": "12", "e": 7}),
        ),
        ("a: 10000000000000000000.0\n", json!({"a": 10_000_000_000_000_000_000_u64})),
        ("\u{feff}a: 1\n", json!({"a": 1})),
        // A byte order mark elsewhere belongs to what it stands before.
        ("a: 1\n\u{feff}b: 2\n", json!({"a": 1, "\u{feff}b": 2})),
    ] {
        assert_eq!(parse_value(text), expected, "{text}");
    }
    for (bytes, name) in [(u16::to_le_bytes as fn(u16) -> [u8; 2], "LE"), (u16::to_be_bytes, "BE")] {
        let bytes: Vec<u8> = "\u{feff}a: 1\nb: \u{1f600}\n".encode_utf16().flat_map(bytes).collect();
        assert_eq!(parse_bytes(&bytes).unwrap()[0].value, json!({"a": 1, "b": "\u{1f600}"}), "{name}");
        assert!(parse_bytes(&bytes[..bytes.len() - 1]).is_err());
    }
}

#[test]
fn duplicate_keys_are_reported_with_both_lines() {
    let text = "a: 1\nb: &b {x: 1, x: 2}\nc:\n  <<: *b\n  x: 3\n  '1': 4\n  1: 5\na: 2\n";
    let document = parse(text.as_bytes()).documents.remove(0);
    assert_eq!(document.value, json!({"a": 2, "b": {"x": 2}, "c": {"x": 3, "1": 5}}));
    let duplicate = |key: &str, first, second| Duplicate { key: key.to_owned(), first, second };
    assert_eq!(document.duplicates, [duplicate("x", 2, 2), duplicate("a", 1, 8)]);
    assert_eq!(document.line_of("a"), Some(8));
}

#[test]
fn broken_document_does_not_affect_those_before_it() {
    for (text, line) in [("a: 1\n---\nb: [\n", 3), ("a: 1\n---\n\tb\n", 3), ("a: 1\n---\nb: \u{1}\n", 3)] {
        let content = parse(text.as_bytes());
        assert_eq!(content.documents.len(), 1, "{text:?}");
        assert_eq!(content.documents[0].value, json!({"a": 1}));
        assert_eq!(content.broken.as_ref().map(|error| error.line), Some(line), "{text:?}");
        assert!(content.clone().all_documents().is_err() && content.first().unwrap().is_some());
    }
    let marked = parse("a: 1\n---\n\u{feff}b: 2\nc: 3\n".as_bytes()).all_documents().unwrap();
    assert_eq!(marked[1].value, json!({"b": 2, "c": 3}));
}

#[test]
fn aliases_do_not_nest_deeper_than_the_limit() {
    let mut text = String::from("- &a0 [x]\n");
    for level in 1..200 {
        text += &format!("- &a{level} [*a{}]\n", level - 1);
    }
    assert!(parse_documents(&text).unwrap_err().message.contains("nested deeper"));
}
