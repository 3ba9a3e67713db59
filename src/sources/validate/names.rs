//! Validation of names (Go: apimachinery pkg/util/validation). Each check returns its error messages.

use crate::model::names;

const LABEL: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const SUBDOMAIN: &str = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const WORD: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const SYSCTL: &str = r"^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$";

/// The expected form, with examples and the regular expression, as upstream formats it.
fn expected_form(what: &str, examples: &[&str], expression: &str) -> String {
    let examples: Vec<String> = examples.iter().map(|example| format!("'{example}', ")).collect();
    format!("{what} (e.g. {}regex used for validation is '{expression}')", examples.join(" or "))
}

/// `[a-z0-9]([-a-z0-9]*[a-z0-9])?`, at most 63 bytes.
pub(crate) fn dns_label(name: &str) -> Option<String> {
    if name.len() > 63 {
        return Some("must be no more than 63 bytes".to_owned());
    }
    (!names::is_dns_label(name)).then(|| {
        let what = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', \
                    and must start and end with an alphanumeric character";
        expected_form(what, &["my-name", "123-abc"], LABEL)
    })
}

/// Labels joined by dots, at most 253 bytes.
pub(crate) fn dns_subdomain(name: &str) -> Option<String> {
    if name.len() > 253 {
        return Some("must be no more than 253 bytes".to_owned());
    }
    (!names::is_dns_subdomain(name)).then(|| {
        let what = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' \
                    or '.', and must start and end with an alphanumeric character";
        expected_form(what, &["example.com"], SUBDOMAIN)
    })
}

const OF_WORDS: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an \
                        alphanumeric character";

/// A key of labels, annotations or resources: `[prefix/]name`.
pub(super) fn qualified_name(key: &str) -> Option<String> {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    if name.contains('/') {
        return Some(format!(
            "a qualified name {} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')",
            expected_form(OF_WORDS, &["MyName", "my.name", "123-abc"], WORD)
        ));
    }
    match prefix {
        Some("") => return Some("prefix part must be non-empty".to_owned()),
        Some(prefix) => {
            if let Some(problem) = dns_subdomain(prefix) {
                return Some(format!("prefix part {problem}"));
            }
        }
        None => {}
    }
    if name.is_empty() {
        return Some("name part must be non-empty".to_owned());
    }
    if name.len() > 63 {
        return Some("name part must be no more than 63 bytes".to_owned());
    }
    let problem = || expected_form(OF_WORDS, &["MyName", "my.name", "123-abc"], WORD);
    (!names::is_label_value(name)).then(|| format!("name part {}", problem()))
}

/// A label's value: empty, or a name of up to 63 bytes.
pub(super) fn label_value(value: &str) -> Option<String> {
    if value.len() > 63 {
        return Some("must be no more than 63 bytes".to_owned());
    }
    (!names::is_label_value(value)).then(|| {
        let what = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' \
                    or '.', and must start and end with an alphanumeric character";
        expected_form(what, &["MyValue", "my_value", "12345"], &format!("({WORD})?"))
    })
}

/// A port's name: at most 15 lower-case letters, digits and single dashes, with a letter.
pub(super) fn port_name(name: &str) -> Option<String> {
    let problem = if name.len() > 15 {
        "must be no more than 15 bytes"
    } else if !name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-') {
        "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)"
    } else if !name.bytes().any(|byte| byte.is_ascii_lowercase()) {
        "must contain at least one letter (a-z)"
    } else if name.contains("--") {
        "must not contain consecutive hyphens"
    } else if name.starts_with('-') || name.ends_with('-') {
        "must not begin or end with a hyphen"
    } else {
        return None;
    };
    Some(problem.to_owned())
}

/// An environment variable's name: printable ASCII except `=`.
pub(super) fn env_name(name: &str) -> Option<String> {
    (name.is_empty() || !name.bytes().all(|byte| (b' '..=b'~').contains(&byte) && byte != b'=')).then(|| {
        "a valid environment variable name must consist only of printable ASCII characters other than '='"
            .to_owned()
    })
}

/// A key of a ConfigMap, a Secret or a file of variables.
pub(crate) fn config_key(key: &str) -> Option<String> {
    if key.len() > 253 {
        return Some("must be no more than 253 bytes".to_owned());
    }
    if key == "." || key == ".." {
        return Some(format!("must not be '{key}'"));
    }
    if key.starts_with("..") {
        return Some("must not start with '..'".to_owned());
    }
    let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (key.is_empty() || !key.bytes().all(good)).then(|| {
        let what = "a valid config key must consist of alphanumeric characters, '-', '_' or '.'";
        expected_form(what, &["key.name", "KEY_NAME", "key-name"], "[-._a-zA-Z0-9]+")
    })
}

pub(super) fn header_name(name: &str) -> Option<String> {
    (name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')).then(|| {
        let what = "a valid HTTP header must consist of alphanumeric characters or '-'";
        expected_form(what, &["X-Header-Name"], "[-A-Za-z0-9]+")
    })
}

/// A namespaced kernel parameter, with dots or slashes between its parts.
pub(super) fn sysctl_name(name: &str) -> Option<String> {
    let part = |text: &str| {
        let word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        text.bytes().all(|byte| word(byte) || matches!(byte, b'-' | b'_')) && names::has_ends(text, word)
    };
    (name.len() > 253 || !name.split(['.', '/']).all(part))
        .then(|| format!("must have at most 253 characters and match regex {SYSCTL}"))
}

/// An IP address, v4 or v6.
pub(super) fn ip_address(text: &str) -> Option<String> {
    text.parse::<std::net::IpAddr>()
        .is_err()
        .then(|| "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)".to_owned())
}

/// The UID in a manifest. It becomes the name of a directory, and part of the name of a cgroup. In
/// the name of a slice of systemd `_` stands for `-`: UIDs with `_` are refused, so that two pods
/// never have one slice.
///
/// DIFFERS: upstream accepts any text.
pub(super) fn uid_problem(uid: &str) -> Option<String> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    (uid.len() > 63 || !uid.bytes().all(good) || !names::has_ends(uid, |byte| byte.is_ascii_alphanumeric()))
        .then(|| {
            "must have at most 63 bytes, consist of alphanumeric characters, '-' or '.', and start and \
         end with an alphanumeric character"
                .to_owned()
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(test: fn(&str) -> Option<String>, good: &[&str], bad: &[&str]) {
        for name in good {
            assert_eq!(test(name), None, "{name:?}");
        }
        for name in bad {
            assert!(test(name).is_some(), "{name:?}");
        }
    }

    #[test]
    fn names_are_accepted_or_refused_as_upstream() {
        let (long, longer, longest) = ("a".repeat(63), "a".repeat(64), "a".repeat(254));
        check(dns_label, &["a", "a-b", "0a", &long], &["", "-a", "a-", "A", "a.b", "a_b", "é", &longer]);
        check(
            dns_subdomain,
            &["a", "a.b-c.d", "1.2"],
            &["", ".", "a..b", "a.", ".a", "a.-b", "A.b", &longest],
        );
        check(
            qualified_name,
            &["a", "A_b.C-1", "example.com/Name", "a/b"],
            &["", "/a", "a/", "a/b/c", "-a", "a-", "Ex/a", "a b", "é", &longer],
        );
        check(label_value, &["", "a", "A.b_c-1"], &["-a", "a-", "a b", "a/b", &longer]);
        check(
            port_name,
            &["http", "a-1", "8080a"],
            &["", "8080", "a--b", "-a", "a-", "HTTP", "abcdefghijklmnop"],
        );
        check(env_name, &["A", "a.b-c", "A B"], &["", "A=B", "é", "a\tb"]);
        check(config_key, &["a", "a.b", ".a", "-"], &["", ".", "..", "..a", "a/b"]);
        check(
            sysctl_name,
            &["net.core.somaxconn", "net/ipv4/ip_forward", "a"],
            &["", ".", "a..b", "A.b", "a b"],
        );
        check(ip_address, &["1.2.3.4", "::1"], &["", "1.2.3", "1.2.3.400", "a", "1.2.3.4/8"]);
        check(
            uid_problem,
            &["0123abcd", "a-b-c", "A", "a.b", &long],
            &["", "..", "a/b", "../../x", ".a", "a_b", "a:b", "a\\x2db", &longer],
        );
        check(header_name, &["X-A", "Host"], &["", "a b", "a:"]);
    }
}
