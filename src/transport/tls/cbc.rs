//! Suites with AES-CBC and SHA-1 (RFC 5246, RFC 4492, FIPS 197), for probes of old servers only.
//!
//! The TLS library has no such suites: attacks on their padding and on the time of their check were
//! found again and again. A probe accepts any certificate, so an attacker on its way can be the server
//! in any case, and there is nothing that these suites could protect. As in Go they are the last
//! ones that are offered, and only with ECDHE. Nothing else uses this file.

use std::sync::LazyLock;

use rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, InboundPlainMessage, KeyBlockShape, MessageDecrypter, MessageEncrypter,
    OutboundOpaqueMessage, OutboundPlainMessage, PrefixedPayload, Tls12AeadAlgorithm,
    UnsupportedOperationError, make_tls12_aad,
};
use rustls::crypto::{CipherSuiteCommon, KeyExchangeAlgorithm};
use rustls::{CipherSuite, ConnectionTrafficSecrets, Error, SupportedCipherSuite, Tls12CipherSuite};

use crate::util::{sha1, token};

const BLOCK: usize = 16;
/// The bytes of the authentication code and of its key.
const CODE: usize = 20;
/// The limit of a record's content.
const MAX_CONTENT: usize = 1 << 14;

type Block = [u8; BLOCK];

/// The suites of the library, and after them those with CBC.
pub(super) fn with_cbc(library: &[SupportedCipherSuite]) -> Vec<SupportedCipherSuite> {
    static OWN: LazyLock<Vec<Tls12CipherSuite>> = LazyLock::new(|| {
        let library = rustls::crypto::ring::default_provider().cipher_suites;
        let make = |(like, suite, key_bytes): (CipherSuite, CipherSuite, &'static Cbc)| {
            let SupportedCipherSuite::Tls12(like) =
                library.iter().find(|candidate| candidate.suite() == like)?
            else {
                return None;
            };
            let hash_provider = like.common.hash_provider;
            Some(Tls12CipherSuite {
                common: CipherSuiteCommon { suite, hash_provider, confidentiality_limit: u64::MAX },
                prf_provider: like.prf_provider,
                kx: KeyExchangeAlgorithm::ECDHE,
                sign: like.sign,
                aead_alg: key_bytes,
            })
        };
        let rsa = CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256;
        let ecdsa = CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256;
        [
            (ecdsa, CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA, &Cbc(16)),
            (rsa, CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA, &Cbc(16)),
            (ecdsa, CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA, &Cbc(32)),
            (rsa, CipherSuite::TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA, &Cbc(32)),
        ]
        .into_iter()
        .filter_map(make)
        .collect()
    });
    library.iter().copied().chain(OWN.iter().map(SupportedCipherSuite::Tls12)).collect()
}

/// The number of bytes of the key of AES.
struct Cbc(usize);

impl Tls12AeadAlgorithm for Cbc {
    fn encrypter(&self, key: AeadKey, cipher_key: &[u8], _: &[u8]) -> Box<dyn MessageEncrypter> {
        Box::new(Keys { aes: Aes::new(cipher_key), code: key.as_ref().to_vec() })
    }

    fn decrypter(&self, key: AeadKey, cipher_key: &[u8]) -> Box<dyn MessageDecrypter> {
        Box::new(Keys { aes: Aes::new(cipher_key), code: key.as_ref().to_vec() })
    }

    fn key_block_shape(&self) -> KeyBlockShape {
        // The library takes first two keys and then two starting values from the secret. With CBC the keys of
        // the codes are first, and those of the cipher follow.
        KeyBlockShape { enc_key_len: CODE, fixed_iv_len: self.0, explicit_nonce_len: 0 }
    }

    fn extract_keys(
        &self,
        _: AeadKey,
        _: &[u8],
        _: &[u8],
    ) -> Result<ConnectionTrafficSecrets, UnsupportedOperationError> {
        Err(UnsupportedOperationError)
    }
}

/// The keys of one direction.
struct Keys {
    aes: Aes,
    /// The key of the codes.
    code: Vec<u8>,
}

impl Keys {
    /// HMAC with SHA-1 (RFC 2104) of a record.
    fn code(&self, head: &[u8], content: &[u8]) -> Vec<u8> {
        let pad = |byte: u8| {
            let mut key = [byte; 64];
            key.iter_mut().zip(&self.code).for_each(|(to, from)| *to ^= from);
            key
        };
        let inner = sha1::digest(&[&pad(0x36)[..], head, content].concat());
        sha1::digest(&[&pad(0x5c)[..], &inner].concat())
    }
}

impl MessageEncrypter for Keys {
    fn encrypt(
        &mut self,
        message: OutboundPlainMessage<'_>,
        sequence: u64,
    ) -> Result<OutboundOpaqueMessage, Error> {
        let content = message.payload.to_vec();
        let head = make_tls12_aad(sequence, message.typ, message.version, content.len());
        let mut plain = content;
        let code = self.code(&head, &plain);
        plain.extend(code);
        let padding = BLOCK - 1 - plain.len() % BLOCK;
        plain.resize(plain.len() + padding + 1, padding as u8);
        let mut last: Block = token::bytes().map_err(|_| Error::FailedToGetRandomBytes)?;
        let mut payload = PrefixedPayload::with_capacity(BLOCK + plain.len());
        payload.extend_from_slice(&last);
        for block in plain.as_chunks().0 {
            last = self.aes.encrypt(&xor(block, &last));
            payload.extend_from_slice(&last);
        }
        Ok(OutboundOpaqueMessage::new(message.typ, message.version, payload))
    }

    fn encrypted_payload_len(&self, length: usize) -> usize {
        BLOCK + (length + CODE + 1).next_multiple_of(BLOCK)
    }
}

impl MessageDecrypter for Keys {
    fn decrypt<'a>(
        &mut self,
        mut message: InboundOpaqueMessage<'a>,
        sequence: u64,
    ) -> Result<InboundPlainMessage<'a>, Error> {
        let (blocks, rest) = message.payload.as_chunks::<BLOCK>();
        let (Some((first, blocks)), true) = (blocks.split_first(), rest.is_empty()) else {
            return Err(Error::DecryptError);
        };
        let mut last = *first;
        let mut plain = Vec::with_capacity(blocks.len() * BLOCK);
        for block in blocks {
            plain.extend(xor(&self.aes.decrypt(block), &last));
            last = *block;
        }
        let padding = usize::from(*plain.last().ok_or(Error::DecryptError)?) + 1;
        let end = plain.len().checked_sub(padding).ok_or(Error::DecryptError)?;
        let length = end.checked_sub(CODE).ok_or(Error::DecryptError)?;
        let (content, code) = plain.split_at(length);
        let (code, padded) = code.split_at(CODE);
        let head = make_tls12_aad(sequence, message.typ, message.version, length);
        let is_padded = padded.iter().all(|byte| usize::from(*byte) + 1 == padding);
        if self.code(&head, content) != code || !is_padded {
            return Err(Error::DecryptError);
        }
        if length > MAX_CONTENT {
            return Err(Error::PeerSentOversizedRecord);
        }
        message.payload.iter_mut().zip(content).for_each(|(to, from)| *to = *from);
        message.payload.truncate(length);
        Ok(message.into_plain_message())
    }
}

fn xor(left: &Block, right: &Block) -> Block {
    std::array::from_fn(|index| left[index] ^ right[index])
}

/// AES with an expanded key.
struct Aes(Vec<Block>);

/// The substitution of bytes, and its inverse.
static BOXES: ([u8; 256], [u8; 256]) = boxes();

/// The product with x in the field of AES.
const fn double(byte: u8) -> u8 {
    (byte << 1) ^ (if byte & 0x80 == 0 { 0 } else { 0x1b })
}

const fn boxes() -> ([u8; 256], [u8; 256]) {
    let (mut forwards, mut backwards) = ([0; 256], [0; 256]);
    // Both run through all elements but zero: a power of three, and its inverse.
    let (mut power, mut inverse) = (1_u8, 1_u8);
    loop {
        power ^= double(power);
        inverse ^= inverse << 1;
        inverse ^= inverse << 2;
        inverse ^= inverse << 4;
        if inverse & 0x80 != 0 {
            inverse ^= 0x09;
        }
        let value = inverse
            ^ inverse.rotate_left(1)
            ^ inverse.rotate_left(2)
            ^ inverse.rotate_left(3)
            ^ inverse.rotate_left(4)
            ^ 0x63;
        forwards[power as usize] = value;
        backwards[value as usize] = power;
        if power == 1 {
            break;
        }
    }
    forwards[0] = 0x63;
    backwards[0x63] = 0;
    (forwards, backwards)
}

impl Aes {
    /// The key has 16 or 32 bytes.
    fn new(key: &[u8]) -> Aes {
        let words = key.len() / 4;
        let mut all: Vec<[u8; 4]> = key.as_chunks().0.to_vec();
        let mut round = 1_u8;
        for index in words..4 * (words + 7) {
            let mut word = all[index - 1];
            if index % words == 0 {
                word.rotate_left(1);
                word = word.map(|byte| BOXES.0[usize::from(byte)]);
                word[0] ^= round;
                round = double(round);
            } else if words > 6 && index % words == 4 {
                word = word.map(|byte| BOXES.0[usize::from(byte)]);
            }
            let before = all[index - words];
            all.push(std::array::from_fn(|byte| word[byte] ^ before[byte]));
        }
        Aes(all.as_flattened().as_chunks().0.to_vec())
    }

    fn encrypt(&self, block: &Block) -> Block {
        let mut keys = self.0.iter();
        let mut state = *block;
        if let Some(key) = keys.next() {
            state = xor(&state, key);
        }
        while let Some(key) = keys.next() {
            // Rows are rotated: row r of column c comes from column c + r.
            let moved: Block =
                std::array::from_fn(|index| BOXES.0[usize::from(state[(index + 4 * (index % 4)) % BLOCK])]);
            let is_last = keys.len() == 0;
            state = xor(&if is_last { moved } else { mix(&moved) }, key);
        }
        state
    }

    fn decrypt(&self, block: &Block) -> Block {
        let mut keys = self.0.iter().rev();
        let mut state = *block;
        if let Some(key) = keys.next() {
            state = xor(&state, key);
        }
        while let Some(key) = keys.next() {
            let moved: Block =
                std::array::from_fn(|index| BOXES.1[usize::from(state[(index + 12 * (index % 4)) % BLOCK])]);
            state = xor(&moved, key);
            if keys.len() > 0 {
                // The fourth power of the mixing is the identity.
                state = mix(&mix(&mix(&state)));
            }
        }
        state
    }
}

/// Multiplies each column with the polynomial of AES.
fn mix(state: &Block) -> Block {
    std::array::from_fn(|index| {
        let column = index / 4 * 4;
        let cell = |row: usize| state[column + (index + row) % 4];
        double(cell(0)) ^ double(cell(1)) ^ cell(1) ^ cell(2) ^ cell(3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::crypto::cipher::OutboundChunks;
    use rustls::{ContentType, ProtocolVersion};

    /// Stores what is sent, and ends.
    struct Sent(Vec<u8>);

    impl std::io::Read for Sent {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Ok(0)
        }
    }

    impl std::io::Write for Sent {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn only_clients_that_accept_any_certificate_offer_cbc_and_offer_it_last() {
        use super::super::client::{Roots, Tls};
        let offered = |tls: Tls| -> Vec<u16> {
            let mut sent = Sent(Vec::new());
            assert!(tls.handshake(&mut sent).is_err());
            // Heads of record and message, version, random bytes; then the session and the suites.
            let rest = &sent.0[5 + 4 + 2 + 32..];
            let rest = &rest[1 + usize::from(rest[0])..];
            let length = usize::from(u16::from_be_bytes([rest[0], rest[1]]));
            rest[2..2 + length].chunks(2).map(|two| u16::from_be_bytes([two[0], two[1]])).collect()
        };
        let old = [0xc009, 0xc013, 0xc00a, 0xc014];
        let probe = offered(Tls::unverified("a.test").unwrap());
        // The last one stands for renegotiation.
        let suites: Vec<u16> = probe.iter().copied().filter(|suite| *suite != 0xff).collect();
        assert!(suites.ends_with(&old), "{probe:x?}");
        let authorities = Roots::Pem(include_bytes!("testdata/ca.pem").to_vec());
        let verified = offered(Tls::new(&authorities, None, "a.test").unwrap());
        assert!(!old.iter().any(|suite| verified.contains(suite)), "{verified:x?}");
    }

    /// The examples of FIPS 197, appendix C.
    #[test]
    fn blocks_are_encrypted_as_in_the_standard() {
        let key: Vec<u8> = (0..32).collect();
        let plain: Block = std::array::from_fn(|index| index as u8 * 0x11);
        for (bytes, expected) in [
            (16, 0x69c4_e0d8_6a7b_0430_d8cd_b780_70b4_c55a_u128),
            (32, 0x8ea2_b7ca_5167_45bf_eafc_4990_4b49_6089),
        ] {
            let aes = Aes::new(&key[..bytes]);
            assert_eq!(u128::from_be_bytes(aes.encrypt(&plain)), expected);
            assert_eq!(aes.decrypt(&expected.to_be_bytes()), plain);
        }
    }

    fn keys() -> Keys {
        Keys { aes: Aes::new(&[7; 16]), code: vec![9; CODE] }
    }

    fn sealed(content: &[u8]) -> Vec<u8> {
        let chunks = [content];
        let payload = OutboundChunks::new(&chunks);
        let (typ, version) = (ContentType::ApplicationData, ProtocolVersion::TLSv1_2);
        let record = keys().encrypt(OutboundPlainMessage { typ, version, payload }, 3).unwrap().encode();
        assert_eq!(record.len(), 5 + keys().encrypted_payload_len(content.len()));
        record[5..].to_vec()
    }

    fn opened(record: &[u8], sequence: u64) -> Option<Vec<u8>> {
        let mut record = record.to_vec();
        let (typ, version) = (ContentType::ApplicationData, ProtocolVersion::TLSv1_2);
        let message = InboundOpaqueMessage::new(typ, version, &mut record);
        keys().decrypt(message, sequence).ok().map(|plain| plain.payload.to_vec())
    }

    #[test]
    fn record_is_opened_only_as_it_was_sealed() {
        for length in [0, 1, 10, 11, 12, 27, 28, 100, MAX_CONTENT] {
            let content = vec![b'a'; length];
            let record = sealed(&content);
            assert_eq!(opened(&record, 3), Some(content), "{length}");
            assert_eq!(opened(&record, 4), None);
            if length < 100 {
                for index in 0..record.len() {
                    let mut other = record.clone();
                    other[index] ^= 1;
                    assert_eq!(opened(&other, 3), None, "{length}: byte {index}");
                    assert_eq!(opened(&record[..index], 3), None);
                }
            }
        }
        let long = sealed(&vec![0; MAX_CONTENT + 1]);
        assert_eq!(opened(&long, 3), None);
    }
}
