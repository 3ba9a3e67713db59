//! Texts that the YAML parser accepts and refuses.

use super::scalar::real;
use super::*;
use proptest::prelude::*;
use serde_json::json;

fn one(text: &str) -> Value {
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
        assert_eq!(one(&format!("a: {text}\n").replace("a: -\n", "a:\n-\n"))["a"], expected, "{text}");
    }
}

#[test]
fn keys_of_any_scalar_type_become_strings() {
    assert_eq!(one("80: a\ntrue: b\n\"x\": c\n"), json!({"80": "a", "true": "b", "x": "c"}));
    assert_eq!(one("y: a\n08: b\non: &k c\n"), json!({"y": "a", "08": "b", "on": "c"}));
}

#[test]
fn aliases_and_merges_copy() {
    let text = "base: &b {x: 1, y: 2}\ncopy: *b\nmerged:\n  <<: *b\n  y: 3\n";
    let value = one(text);
    assert_eq!(value["copy"], json!({"x": 1, "y": 2}));
    assert_eq!(value["merged"], json!({"x": 1, "y": 3}));
}

#[test]
fn empty_documents_are_skipped() {
    let documents = parse_documents("---\n---\na: 1\n---\n# only a comment\n---\nb: 2\n").unwrap();
    assert_eq!(documents.iter().map(|d| d.line).collect::<Vec<_>>(), [3, 7]);
    assert!(parse_documents("").unwrap().is_empty());
    assert!(parse_documents("# nothing\n").unwrap().is_empty());
    assert_eq!(one("\u{feff}a: 1\n"), json!({"a": 1}));
}

#[test]
fn json_is_read_and_its_repeated_keys_refused() {
    assert_eq!(one(r#"{"a": "\ud83d\ude00\/", "b": [1, null]}"#), json!({"a": "😀/", "b": [1, null]}));
    let long = "k".repeat(5000);
    assert_eq!(one(&format!("{{\"{long}\":\t1}}"))[&long], json!(1));
    assert!(parse_documents(r#"{"a": 1, "a": 2}"#).unwrap_err().message.contains("twice"));
    assert!(parse_documents(&format!("{{\"{long}\":1,\"{long}\":1}}")).is_err());
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
        ("a: 1\nb: 2\na: 3\n", 3, "twice"),
        ("a: [1,\nb", 1, ""),
        ("a: b: c\n", 1, ""),
        ("a:\n\t- b\n", 2, ""),
        ("a: *b\n", 1, ""),
        ("a: &b [*b]\n", 1, "contains it"),
        ("a: .inf\n", 1, "finite"),
        ("a: !foo b\n", 1, "tag"),
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
        (-1e9..1e9_f64).prop_map(|x| real(x).map_or(Value::Null, Value::Number)),
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
