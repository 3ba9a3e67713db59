//! Secrets of one start: a client that repeats such a token has read a file of root.

use std::io;

use ring::rand::{SecureRandom, SystemRandom};

use super::sha256;

/// The number of digits of a token.
pub const DIGITS: usize = 32;

/// A new token: 128 random bits as lower-case hexadecimal digits.
///
/// # Errors
/// When the kernel returns no random bytes.
pub fn new() -> io::Result<String> {
    let mut text = sha256::sha256_hex(&bytes::<16>()?);
    text.truncate(DIGITS);
    Ok(text)
}

/// Random bytes that no other process can predict.
///
/// # Errors
/// When the kernel returns no random bytes.
pub fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| io::Error::other("no random bytes"))?;
    Ok(bytes)
}

/// Whether a text is a token: [`DIGITS`] lower-case hexadecimal digits.
#[must_use]
pub fn is_token(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether `given` is the token. The time depends only on the length of `given`, so a client cannot
/// find the token digit by digit.
#[must_use]
pub fn equal(given: &str, token: &str) -> bool {
    let differs = given.bytes().zip(token.bytes()).fold(0, |all, (a, b)| std::hint::black_box(all | (a ^ b)));
    is_token(token) && given.len() == token.len() && differs == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_token_is_new_and_equals_only_itself() {
        let (first, second) = (new().unwrap(), new().unwrap());
        assert!(is_token(&first) && is_token(&second) && first != second);
        assert!(equal(&first, &first) && !equal(&first, &second));
        for wrong in
            ["", first.get(1..).unwrap(), &format!("{first}0"), &first.to_uppercase().replace('0', "A")]
        {
            assert!(!equal(wrong, &first), "{wrong}");
        }
        // An empty file is no token.
        assert!(!equal("", "") && !is_token("0123456789ABCDEF0123456789ABCDEF"));
    }
}
