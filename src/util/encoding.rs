//! Base64 (RFC 4648).

use base64::Engine;
use base64::alphabet::{STANDARD, URL_SAFE};
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig, general_purpose};

/// What stands behind the last whole byte is not looked at.
const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_decode_allow_trailing_bits(true)
    .with_decode_padding_mode(DecodePaddingMode::RequireNone);
const BARE: GeneralPurpose = GeneralPurpose::new(&STANDARD, LENIENT);
const BARE_URL: GeneralPurpose = GeneralPurpose::new(&URL_SAFE, LENIENT);

/// With padding.
#[must_use]
pub fn base64(bytes: &[u8]) -> String {
    general_purpose::STANDARD.encode(bytes)
}

/// With or without padding; `None` for anything else.
#[must_use]
pub fn from_base64(text: &str) -> Option<Vec<u8>> {
    BARE.decode(text.trim_end_matches('=')).ok()
}

/// The letters for URLs, without padding; `None` for anything else.
#[must_use]
pub fn from_base64_url(text: &str) -> Option<Vec<u8>> {
    BARE_URL.decode(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_is_written_and_may_be_missing() {
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
    fn that_of_urls_has_letters_of_its_own_and_no_padding() {
        for (text, bytes) in [("", &b""[..]), ("YQ", b"a"), ("YWI", b"ab"), ("-_-_", &[0xfb, 0xff, 0xbf])] {
            assert_eq!(from_base64_url(text).as_deref(), Some(bytes), "{text}");
        }
        for text in ["Y", "YQ==", "+/"] {
            assert_eq!(from_base64_url(text), None, "{text}");
        }
    }
}
