//! Authenticated encryption of values that are stored on disk: ChaCha20-Poly1305 (RFC 8439) with an own
//! key for each value.
//!
//! A sealed value is a salt of 32 bytes, the encrypted bytes and a tag of 16 bytes. The key of a value is
//! derived (HKDF, RFC 5869) from the long-lived key and the salt, so its nonce is always 0. The salt is a
//! MAC of random bytes, the context and the value: two values have the same salt only if the random
//! bytes, the contexts *and* the values are the same, and then their sealed forms are the same, too. So no
//! counter has to survive a power cut, and neither a restored disk nor a copied machine, whose random
//! numbers may repeat, uses a key and a nonce for two values.
//!
//! The salt is part of the info of HKDF, not its salt: the process that wrote the file chose it, and RFC
//! 5869 (3.4) permits no chosen salts. The long-lived key is 32 random bytes, which needs no salt.
//!
//! Not hidden: the length of a value. Not found: an older sealed form of the same context.

use std::fmt;

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Salt};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

use super::secret::Secret;

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;
/// Bytes of a salt.
const SALT_BYTES: usize = 32;
/// Bytes that a sealed value has more than the value.
pub const OVERHEAD_BYTES: usize = SALT_BYTES + 16;

/// Begins the info of each derived key. The number is that of the construction.
const LABEL: &[u8] = b"coracle sealed values 1 ";

/// Why a value was not sealed or opened. Says nothing about the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AeadError {
    /// The kernel has no random bytes.
    #[error("there are no random numbers")]
    Random,
    /// The value was sealed with another key or for another context, or was changed.
    #[error("sealed with another key, or changed")]
    Refused,
    /// The value is too short to be sealed.
    #[error("too short for a sealed value")]
    Short,
}

/// A long-lived key. It is never printed.
#[derive(Clone)]
pub struct SealKey(Secret<[u8; KEY_BYTES]>);

impl fmt::Debug for SealKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("SealKey(..)")
    }
}

impl SealKey {
    /// A new random key.
    ///
    /// # Errors
    /// [`AeadError::Random`].
    pub fn generate() -> Result<SealKey, AeadError> {
        random().map(SealKey::from_bytes)
    }

    /// A key that was stored.
    #[must_use]
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> SealKey {
        SealKey(Secret::new(bytes))
    }

    /// The bytes, for the key file.
    #[must_use]
    pub fn reveal(&self) -> &[u8; KEY_BYTES] {
        self.0.reveal()
    }

    /// Seals `value` for `context`, which is needed to open it and is not part of the result. A context of
    /// several parts has to have their lengths.
    ///
    /// # Errors
    /// [`AeadError::Random`].
    pub fn seal(&self, context: &[u8], value: &[u8]) -> Result<Vec<u8>, AeadError> {
        self.seal_with(&random()?, context, value)
    }

    fn seal_with(
        &self,
        random: &[u8; SALT_BYTES],
        context: &[u8],
        value: &[u8],
    ) -> Result<Vec<u8>, AeadError> {
        let salt = self.salt(random, context, value)?;
        let mut sealed = Vec::with_capacity(value.len() + OVERHEAD_BYTES);
        sealed.extend_from_slice(value);
        let key = self.value_key(&salt)?;
        key.seal_in_place_append_tag(nonce(), Aad::from(context), &mut sealed)
            .map_err(|_| AeadError::Refused)?;
        sealed.splice(0..0, salt);
        Ok(sealed)
    }

    /// Opens a value that [`SealKey::seal`] has sealed for the same context.
    ///
    /// # Errors
    /// [`AeadError::Short`] and [`AeadError::Refused`].
    pub fn open(&self, context: &[u8], sealed: &[u8]) -> Result<Secret<Vec<u8>>, AeadError> {
        let (salt, encrypted) = sealed.split_first_chunk::<SALT_BYTES>().ok_or(AeadError::Short)?;
        let mut bytes = encrypted.to_vec();
        let key = self.value_key(salt)?;
        let length =
            key.open_in_place(nonce(), Aad::from(context), &mut bytes).map_err(|_| AeadError::Refused)?.len();
        bytes.truncate(length);
        Ok(Secret::new(bytes))
    }

    fn salt(
        &self,
        random: &[u8; SALT_BYTES],
        context: &[u8],
        value: &[u8],
    ) -> Result<[u8; SALT_BYTES], AeadError> {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.derive(&[b"salt"])?);
        let mut mac = hmac::Context::with_key(&key);
        mac.update(random);
        // Otherwise the border between the two could move.
        mac.update(&(context.len() as u64).to_be_bytes());
        mac.update(context);
        mac.update(value);
        mac.sign().as_ref().try_into().map_err(|_| AeadError::Refused)
    }

    fn value_key(&self, salt: &[u8; SALT_BYTES]) -> Result<LessSafeKey, AeadError> {
        let bytes = self.derive(&[b"value", salt])?;
        UnboundKey::new(&CHACHA20_POLY1305, &bytes).map(LessSafeKey::new).map_err(|_| AeadError::Refused)
    }

    /// A key for a purpose. No purpose is the beginning of another one.
    fn derive(&self, purpose: &[&[u8]]) -> Result<[u8; KEY_BYTES], AeadError> {
        let info = [[LABEL].as_slice(), purpose].concat();
        let mut derived = [0; KEY_BYTES];
        Salt::new(HKDF_SHA256, &[])
            .extract(self.reveal())
            .expand(&info, HKDF_SHA256)
            .and_then(|material| material.fill(&mut derived))
            .map_err(|_| AeadError::Refused)?;
        Ok(derived)
    }
}

/// Each key is used for one value.
fn nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; ring::aead::NONCE_LEN])
}

fn random() -> Result<[u8; 32], AeadError> {
    let mut bytes = [0; 32];
    SystemRandom::new().fill(&mut bytes).map_err(|_| AeadError::Random)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_value_opens_only_with_its_key_and_context() {
        let key = SealKey::generate().unwrap();
        let sealed = key.seal(b"node/secret", b"hunter2").unwrap();
        assert_eq!(sealed.len(), 7 + OVERHEAD_BYTES);
        assert!(!sealed.windows(7).any(|part| part == b"hunter2"));
        assert_eq!(key.open(b"node/secret", &sealed).unwrap().reveal(), b"hunter2");
        let refused = |key: &SealKey, context: &[u8], sealed: &[u8]| key.open(context, sealed).unwrap_err();
        assert_eq!(refused(&key, b"other/secret", &sealed), AeadError::Refused);
        assert_eq!(refused(&SealKey::generate().unwrap(), b"node/secret", &sealed), AeadError::Refused);
        assert_eq!(refused(&key, b"node/secret", &sealed[..31]), AeadError::Short);
        assert_eq!(refused(&key, b"node/secret", &sealed[..40]), AeadError::Refused);
        for place in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[place] ^= 1;
            assert_eq!(refused(&key, b"node/secret", &changed), AeadError::Refused);
        }
        assert_eq!(format!("{key:?}"), "SealKey(..)");
    }

    fn bytes(digits: &str) -> Vec<u8> {
        let digit = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.as_bytes().chunks(2).map(digit).collect()
    }

    /// The expected bytes were computed with another implementation of HMAC, HKDF and
    /// ChaCha20-Poly1305: values that this version sealed stay readable.
    #[test]
    fn sealed_form_is_that_of_the_first_version() {
        let key = SealKey::from_bytes(std::array::from_fn(|index| index as u8));
        for (context, value, sealed) in [
            (
                b"context".as_slice(),
                b"value".as_slice(),
                "bf1a0a52e25b15f77a190b8273276a0767b947c6a05b5dc42e17b12058121a8919d47dd00fc7d5cbaf5cfab5a3f9d4\
                 f1101d285f94",
            ),
            (
                b"".as_slice(),
                b"".as_slice(),
                "55b528a45973994cd2ed6fc3b682d0d3cd0ed883a20b9bbba79de333ed676c357db395d67737489cd2c41d7f411199\
                 a3",
            ),
        ] {
            let sealed = bytes(sealed);
            assert_eq!(key.seal_with(&[0x2a; SALT_BYTES], context, value).unwrap(), sealed);
            assert_eq!(key.open(context, &sealed).unwrap().reveal(), value);
        }
    }

    #[test]
    fn empty_and_large_values_are_sealed() {
        let key = SealKey::generate().unwrap();
        for value in [Vec::new(), vec![0; 1], vec![0xa5; 3 << 20]] {
            let sealed = key.seal(b"c", &value).unwrap();
            assert_eq!(sealed.len(), value.len() + OVERHEAD_BYTES);
            assert!(*key.open(b"c", &sealed).unwrap().reveal() == value);
        }
        assert_eq!(key.open(b"c", &[]).unwrap_err(), AeadError::Short);
        assert_eq!(key.open(b"c", &[0; SALT_BYTES]).unwrap_err(), AeadError::Refused);
    }

    #[test]
    fn repeated_random_bytes_repeat_no_key_for_other_values() {
        let key = SealKey::from_bytes([7; KEY_BYTES]);
        let salt = |context: &[u8], value: &[u8]| key.salt(&[1; SALT_BYTES], context, value).unwrap();
        let first = salt(b"a", b"bc");
        assert_eq!(salt(b"a", b"bc"), first);
        assert!(salt(b"a", b"bd") != first && salt(b"ab", b"c") != first);
        let derived = |purpose: &[&[u8]]| key.derive(purpose).unwrap();
        assert_ne!(derived(&[b"value", &first]), derived(&[b"value", &salt(b"a", b"bd")]));
        assert_ne!(derived(&[b"value"]), derived(&[b"salt"]));
        let (left, right) = (key.seal(b"c", b"v").unwrap(), key.seal(b"c", b"v").unwrap());
        assert_ne!(left, right, "equal values cannot be recognized");
    }
}
