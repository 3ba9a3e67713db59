//! URLs without a scheme that name registries and repositories in lists of credentials (Go: `url.Parse`
//! of `https://` and the text, as in pkg/credentialprovider `ParseSchemelessURL`).

use std::borrow::Cow;
use std::net::Ipv6Addr;

use crate::util::encoding::from_percent;

/// The host with its port, and the decoded path, which are behind a user's name, and before `?` and `#`.
/// The host may be empty. `None`: this is no URL.
#[must_use]
pub fn split(text: &str) -> Option<(&str, Cow<'_, str>)> {
    let (rest, fragment) = text.split_once('#').unwrap_or((text, ""));
    let (place, _) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = place.find('/').map_or((place, ""), |index| place.split_at(index));
    let (user, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    let of_user = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:~!$&'()*+,;=%@".contains(&byte);
    if rest.bytes().any(|byte| byte.is_ascii_control()) || !user.bytes().all(of_user) || !is_host(host) {
        return None;
    }
    for escaped in [fragment, user] {
        from_percent(escaped)?;
    }
    let path = match path.contains('%') {
        true => Cow::Owned(String::from_utf8(from_percent(path)?).ok()?),
        false => Cow::Borrowed(path),
    };
    Some((host, path))
}

/// A name, or an address of IPv6 in brackets, and perhaps a port, which may be empty.
fn is_host(host: &str) -> bool {
    let is_digits = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    if let Some(inner) = host.strip_prefix('[') {
        return inner.rsplit_once(']').is_some_and(|(address, port)| {
            let (address, zone) = address.split_once("%25").unwrap_or((address, "-"));
            address.parse::<Ipv6Addr>().is_ok()
                && !zone.is_empty()
                && zone.bytes().all(|byte| byte != b'%' && is_in_host(byte))
                && (port.is_empty() || port.strip_prefix(':').is_some_and(is_digits))
        });
    }
    let (name, port) = host.split_once(':').unwrap_or((host, ""));
    // Only the bytes of other alphabets may be escaped, and the percent sign.
    let is_escape = |text: &str| {
        text.get(..2).is_some_and(|digits| {
            digits == "25"
                || digits.starts_with(['8', '9', 'a', 'b', 'c', 'd', 'e', 'f', 'A', 'B', 'C', 'D', 'E', 'F'])
                    && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
        })
    };
    is_digits(port)
        && name.bytes().all(|byte| byte != b'[' && is_in_host(byte))
        && name.split('%').skip(1).all(is_escape)
}

fn is_in_host(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || !byte.is_ascii() || b"-_.~!$&'()*+,;=:[]<>\"%".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_split_as_by_go() {
        for (text, host, path) in [
            ("*.example", "*.example", ""),
            ("registry.example:5000/team", "registry.example:5000", "/team"),
            ("[::1]", "[::1]", ""),
            ("[::1]:", "[::1]:", ""),
            ("[::1]:5000/a", "[::1]:5000", "/a"),
            ("[::1]/[x", "[::1]", "/[x"),
            ("[fe80::1%25en0]:80", "[fe80::1%25en0]:80", ""),
            ("[::ffff:10.0.0.1]", "[::ffff:10.0.0.1]", ""),
            ("r]x.example", "r]x.example", ""),
            ("r.example:", "r.example:", ""),
            ("", "", ""),
            ("/team", "", "/team"),
            ("a/b c", "a", "/b c"),
            ("a#b\u{1}", "a", ""),
            ("a%25", "a%25", ""),
            ("a%c3%a4", "a%c3%a4", ""),
            ("\u{e4}.example", "\u{e4}.example", ""),
            ("a/%41", "a", "/A"),
            ("a?%6", "a", ""),
            ("u:p@ss@r.example", "r.example", ""),
            ("<a>\"b", "<a>\"b", ""),
            ("oci://r.example", "oci:", "//r.example"),
            ("a/b@c", "a", "/b@c"),
            ("~a!$&'()*+,;=", "~a!$&'()*+,;=", ""),
        ] {
            assert_eq!(split(text), Some((host, path.into())), "{text:?}");
        }
        for text in [
            "[::1]:50x",
            "[::1]5000",
            "[fe80::1%25]:80",
            "[fe80::1%en0]",
            "[10.0.0.1]",
            "[::1",
            "[]",
            "[*]",
            "a[::1]",
            "r[12].example",
            "r.example:5000:1",
            "r.example:50x",
            "r.example:+80",
            "::1",
            "fd00::1",
            "a b",
            "a\tb",
            "a/b\u{1}",
            "a?b\u{1}",
            "a\u{7f}",
            "a%20b",
            "a%41",
            "a%\u{e4}",
            "a%c",
            "a%cx",
            "a/%6",
            "a#%6",
            "us er@r.example",
            "us%er@r.example",
            "a\\b",
            "a^b",
            "{a}",
            "a|b",
            "[::1]]",
            "[[::1]]",
        ] {
            assert_eq!(split(text), None, "{text:?}");
        }
    }
}
