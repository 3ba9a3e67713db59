//! `$(NAME)` in env values, commands and arguments (Go: third_party/forked/golang/expansion).

/// Replaces every `$(NAME)` that `lookup` knows. `$$` is a dollar sign that starts nothing;
/// an unknown or unterminated reference stays as it is written.
#[must_use]
pub fn expand(text: &str, lookup: impl Fn(&str) -> Option<String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        let (before, tail) = rest.split_at(at);
        out.push_str(before);
        rest = tail.get(1..).unwrap_or_default();
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|tail| tail.split_once(')')) {
            match lookup(name) {
                Some(value) => out.push_str(&value),
                None => {
                    out.push_str("$(");
                    out.push_str(name);
                    out.push(')');
                }
            }
            rest = after;
        } else {
            out.push('$');
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn any_text_is_expanded(text in "[$()A-Cü]{0,40}") {
            let _ = expand(&text, |name| Some(name.to_owned()));
        }
    }

    #[test]
    fn follows_the_rules_for_dollars() {
        let lookup = |name: &str| match name {
            "A" => Some("1".to_owned()),
            "E" => Some(String::new()),
            "D" => Some("$(A)".to_owned()),
            _ => None,
        };
        for (text, expected) in [
            ("", ""),
            ("plain", "plain"),
            ("$(A)", "1"),
            ("x-$(A)-$(NOPE)-$$(A)", "x-1-$(NOPE)-$(A)"),
            ("$$$(A)", "$1"),
            ("$$$$(A)", "$$(A)"),
            ("$(A", "$(A"),
            ("$A $x $", "$A $x $"),
            ("$(E)|", "|"),
            ("$(D)", "$(A)"),
            ("$($(A))", "$($(A))"),
            ("$()", "$()"),
            ("ü$(A)ü", "ü1ü"),
        ] {
            assert_eq!(expand(text, lookup), expected, "{text}");
        }
    }
}
