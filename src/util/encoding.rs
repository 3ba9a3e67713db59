//! Base64 (RFC 4648), escapes of single bytes in texts, and numbers without a sign.

use std::str::FromStr;

use base64::Engine;
use base64::alphabet::{STANDARD, URL_SAFE};
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig, general_purpose};

/// The decoder ignores bits after the last complete byte.
const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_decode_allow_trailing_bits(true)
    .with_decode_padding_mode(DecodePaddingMode::RequireNone);
const BARE: GeneralPurpose = GeneralPurpose::new(&STANDARD, LENIENT);
const PADDED: GeneralPurpose =
    GeneralPurpose::new(&STANDARD, LENIENT.with_decode_padding_mode(DecodePaddingMode::RequireCanonical));
const BARE_URL: GeneralPurpose = GeneralPurpose::new(&URL_SAFE, LENIENT);

/// Encodes in base64, with padding.
#[must_use]
pub fn base64(bytes: &[u8]) -> String {
    general_purpose::STANDARD.encode(bytes)
}

/// Decodes base64 with or without padding; `None` if the text is invalid.
#[must_use]
pub fn from_base64(text: &str) -> Option<Vec<u8>> {
    BARE.decode(text.trim_end_matches('=')).ok()
}

/// Decodes base64 with padding as Go's standard decoder does: line breaks anywhere are skipped. `None`
/// if the text is invalid (Go: encoding/base64 `StdEncoding`).
#[must_use]
pub fn from_go_base64(text: &str) -> Option<Vec<u8>> {
    match text.contains(['\r', '\n']) {
        true => PADDED.decode(text.replace(['\r', '\n'], "")),
        false => PADDED.decode(text),
    }
    .ok()
}

/// Decodes base64 in the URL-safe alphabet without padding; `None` if the text is invalid.
#[must_use]
pub fn from_base64_url(text: &str) -> Option<Vec<u8>> {
    BARE_URL.decode(text).ok()
}

/// Encodes in the URL-safe alphabet of base64, without padding (RFC 7515, 2).
#[must_use]
pub fn base64_url(bytes: &[u8]) -> String {
    general_purpose::URL_SAFE_NO_PAD.encode(bytes)
}

/// Reads a number without a sign, as Go's `strconv.ParseUint` does; `str::parse` also accepts a plus sign.
#[must_use]
pub fn from_digits<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Decodes `%41` (RFC 3986, 2.1); `None` if no two hexadecimal digits follow a `%`.
#[must_use]
pub fn from_percent(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2)?;
        let digits = std::str::from_utf8(digits)
            .ok()
            .filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = after;
    }
    Some(bytes)
}

/// Appends bytes to a part of a URL; those for which `is_plain` is not true as `%41` (RFC 3986, 2.1).
/// It must be true for ASCII only.
pub fn escape_percent(bytes: &[u8], is_plain: impl Fn(u8) -> bool, out: &mut String) {
    for byte in bytes {
        if is_plain(*byte) {
            out.push(char::from(*byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
}

/// Appends a text with what has a meaning in texts and in quoted attributes of HTML escaped.
/// Go: html.EscapeString.
pub fn escape_html(text: &str, out: &mut String) {
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
}

/// Decodes `\040`, the escape of the kernel for blank, tab, newline and backslash in the table of
/// mounts (proc(5)). Other text does not change.
#[must_use]
pub fn from_octal(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, tail @ ..] = rest {
        if let (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..]) = (first, tail) {
            bytes.push((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'));
            rest = tail.get(3..).unwrap_or_default();
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn octal_escapes_are_decoded_and_others_unchanged() {
        for (text, expected) in [
            ("/a\\040b\\134", "/a b\\"),
            ("a\\134b\\9\\04", "a\\b\\9\\04"),
            ("\\04", "\\04"),
            ("\\9", "\\9"),
            ("\\777", "\\777"),
            ("", ""),
        ] {
            assert_eq!(from_octal(text.as_bytes()), expected.as_bytes());
        }
    }

    proptest::proptest! {
        #[test]
        fn decoded_text_is_never_longer_than_input(bytes: Vec<u8>, text: String) {
            proptest::prop_assert!(from_octal(&bytes).len() <= bytes.len());
            proptest::prop_assert!(from_percent(&text).is_none_or(|bytes| bytes.len() <= text.len()));
            let mut escaped = String::new();
            escape_percent(&bytes, |byte| byte.is_ascii_alphanumeric(), &mut escaped);
            proptest::prop_assert!(escaped.is_ascii() && from_percent(&escaped) == Some(bytes));
        }
    }

    #[test]
    fn base64_is_written_with_and_read_without_padding() {
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
            for form in [text, text.trim_end_matches('=')] {
                assert_eq!(from_base64(form).as_deref(), Some(bytes.as_bytes()), "{form}");
            }
        }
        assert_eq!(from_base64("Zh"), Some(b"f".to_vec()), "bits that make no byte");
        for text in ["Z", "not base64!", "Zm9v\n", "-_"] {
            assert_eq!(from_base64(text), None, "{text:?}");
        }
    }

    #[test]
    fn url_base64_has_own_alphabet_and_no_padding() {
        for (text, bytes) in [("", &b""[..]), ("YQ", b"a"), ("YWI", b"ab"), ("-_-_", &[0xfb, 0xff, 0xbf])] {
            assert_eq!(from_base64_url(text).as_deref(), Some(bytes), "{text}");
        }
        for text in ["Y", "YQ==", "+/"] {
            assert_eq!(from_base64_url(text), None, "{text}");
        }
    }
}
