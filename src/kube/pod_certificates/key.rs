//! Private keys of pods, and the empty certificate signing requests that prove their possession.

use rcgen::{CertificateParams, DistinguishedName, KeyPair};

use super::CertificateError;

/// The head of an Ed25519 key in PKCS #8 version 1 (RFC 8410), before the 32 bytes of the key.
const ED25519_HEAD: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// A new key with its request. It has no `Debug`.
pub(super) struct Key {
    pem: String,
    request: Vec<u8>,
}

impl Key {
    /// Generates a key of a type such as `ECDSAP256`.
    pub(super) fn generate(kind: &str) -> Result<Key, CertificateError> {
        let algorithm = match kind {
            "ECDSAP256" => &rcgen::PKCS_ECDSA_P256_SHA256,
            "ECDSAP384" => &rcgen::PKCS_ECDSA_P384_SHA384,
            "ED25519" => &rcgen::PKCS_ED25519,
            other => return Err(CertificateError::KeyType(other.to_owned())),
        };
        let failed = |error: rcgen::Error| CertificateError::Key(error.to_string());
        let pair = KeyPair::generate_for(algorithm).map_err(failed)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let request = params.serialize_request(&pair).map_err(failed)?.der().to_vec();
        let der = match kind {
            "ED25519" => version_1(pair.serialized_der()).ok_or_else(unknown_form)?,
            _ => pair.serialize_der(),
        };
        let block = pem::Pem::new("PRIVATE KEY", der);
        let config = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
        Ok(Key { pem: pem::encode_config(&block, config), request })
    }

    /// The certificate signing request in DER: without a name, as upstream's.
    pub(super) fn request(&self) -> &[u8] {
        &self.request
    }

    /// The key in PEM (PKCS #8).
    pub(super) fn into_pem(self) -> String {
        self.pem
    }
}

fn unknown_form() -> CertificateError {
    CertificateError::Key("the library's form of the key is unknown".to_owned())
}

/// An Ed25519 key in PKCS #8 version 1. The library writes version 2, with the public key, which
/// many programs cannot read.
fn version_1(der: &[u8]) -> Option<Vec<u8>> {
    let head = der.get(..ED25519_HEAD.len())?;
    // The length and the version differ.
    if head.get(5..) != ED25519_HEAD.get(5..) {
        return None;
    }
    let key = der.get(ED25519_HEAD.len()..ED25519_HEAD.len() + 32)?;
    Some([&ED25519_HEAD, key].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::PublicKeyData;

    #[test]
    fn request_has_the_public_key_of_the_private_one() {
        for kind in ["ECDSAP256", "ECDSAP384", "ED25519"] {
            let key = Key::generate(kind).unwrap();
            assert!(key.pem.starts_with("-----BEGIN PRIVATE KEY-----\n") && !key.pem.contains('\r'));
            let pair = KeyPair::from_pem(&key.pem).unwrap();
            let public = pair.der_bytes();
            assert!(key.request().windows(public.len()).any(|part| part == public), "{kind}");
            assert_ne!(Key::generate(kind).unwrap().pem, key.pem);
        }
        let key = Key::generate("ED25519").unwrap();
        assert_eq!(pem::parse(&key.pem).unwrap().contents().len(), 48, "PKCS #8 version 1");
    }

    #[test]
    fn unsupported_key_type_is_named() {
        for kind in ["RSA3072", "ECDSAP521", ""] {
            let error = Key::generate(kind).err().unwrap();
            assert_eq!(error, CertificateError::KeyType(kind.to_owned()));
        }
    }
}
