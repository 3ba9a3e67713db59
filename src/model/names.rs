//! The forms of names (RFC 1123; Go: apimachinery pkg/util/validation).

/// Whether it is a DNS label: at most 63 lower-case letters, digits and dashes, no dash at the ends.
#[must_use]
pub fn is_dns_label(text: &str) -> bool {
    text.len() <= 63 && is_part(text)
}

/// Whether it is a DNS name of at most 253 bytes. Its labels may be long.
#[must_use]
pub fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_part)
}

/// Whether it is a label's value: empty, or at most 63 letters, digits, dashes, underscores and dots,
/// with letters or digits at the ends.
#[must_use]
pub fn is_label_value(text: &str) -> bool {
    let alphanumeric = |byte: u8| byte.is_ascii_alphanumeric();
    text.is_empty()
        || text.len() <= 63
            && text.bytes().all(|byte| alphanumeric(byte) || matches!(byte, b'-' | b'_' | b'.'))
            && has_ends(text, alphanumeric)
}

/// Whether it is a key of labels, taints or resources: `[prefix/]name`.
#[must_use]
pub fn is_qualified_name(text: &str) -> bool {
    let (is_valid, name) =
        text.split_once('/').map_or((true, text), |(prefix, name)| (is_dns_subdomain(prefix), name));
    is_valid && !name.is_empty() && is_label_value(name)
}

fn is_part(text: &str) -> bool {
    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.bytes().all(|byte| alphanumeric(byte) || byte == b'-') && has_ends(text, alphanumeric)
}

/// Whether the text is not empty and its first and last byte satisfy `good`.
#[must_use]
pub fn has_ends(text: &str, good: impl Fn(u8) -> bool) -> bool {
    matches!((text.bytes().next(), text.bytes().next_back()), (Some(first), Some(last)) if good(first) && good(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_the_forms_of_the_api() {
        let long = "a".repeat(64);
        for (text, expected) in [
            // Label, subdomain, value of a label, qualified name.
            ("a", [true, true, true, true]),
            ("a-1", [true, true, true, true]),
            ("a.b", [false, true, true, true]),
            ("A_b", [false, false, true, true]),
            ("", [false, false, true, false]),
            ("-a", [false, false, false, false]),
            ("a.", [false, false, false, false]),
            ("a..b", [false, false, true, true]),
            ("é", [false, false, false, false]),
            ("a/b", [false, false, false, true]),
            ("a.b/C_d", [false, false, false, true]),
            ("A/b", [false, false, false, false]),
            ("/b", [false, false, false, false]),
            ("a/", [false, false, false, false]),
            ("a/b/c", [false, false, false, false]),
            (&long, [false, true, false, false]),
            (&"a".repeat(254), [false, false, false, false]),
            (&format!("{long}/b"), [false, false, false, true]),
            (&format!("a/{long}"), [false, false, false, false]),
        ] {
            let found =
                [is_dns_label(text), is_dns_subdomain(text), is_label_value(text), is_qualified_name(text)];
            assert_eq!(found, expected, "{text:?}");
        }
    }
}
