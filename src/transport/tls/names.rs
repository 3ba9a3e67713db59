//! Names of keys, signatures and certificates for messages (pure).

use rustls::pki_types::PrivateKeyDer;

use crate::util::x509::{Certificate, Reader, tag};

/// Encoded curves.
const CURVES: &[(&[u8], &str)] = &[
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7], "P-256"),
    (&[0x2b, 0x81, 4, 0, 34], "P-384"),
    (&[0x2b, 0x81, 4, 0, 35], "P-521"),
    (&[0x2b, 0x81, 4, 0, 33], "P-224"),
    (&[0x2b, 0x81, 4, 0, 10], "secp256k1"),
    (&[0x2b, 0x24, 3, 3, 2, 8, 1, 1, 7], "brainpoolP256r1"),
    (&[0x2b, 0x24, 3, 3, 2, 8, 1, 1, 11], "brainpoolP384r1"),
    (&[0x2b, 0x24, 3, 3, 2, 8, 1, 1, 13], "brainpoolP512r1"),
];
/// The curves of the cryptographic library.
const SUPPORTED: [&str; 2] = ["P-256", "P-384"];
const EC_KEY: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1];
const RSA_KEY: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 1];
/// Encoded algorithms of signatures.
const SIGNATURES: &[(&[u8], &str)] = &[
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 1], "ecdsa-with-SHA1"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 1], "ecdsa-with-SHA224"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2], "ecdsa-with-SHA256"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 3], "ecdsa-with-SHA384"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 4], "ecdsa-with-SHA512"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 4], "md5WithRSAEncryption"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 5], "sha1WithRSAEncryption"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 10], "RSASSA-PSS"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 11], "sha256WithRSAEncryption"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 12], "sha384WithRSAEncryption"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 13], "sha512WithRSAEncryption"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 14], "sha224WithRSAEncryption"),
    (&[0x2b, 0x65, 112], "Ed25519"),
    (&[0x2b, 0x65, 113], "Ed448"),
];
/// `id-at-commonName`.
const COMMON_NAME: &[u8] = &[0x55, 4, 3];
/// The limit of characters of a name in a message.
const MAX_NAME: usize = 64;

/// The name of a curve that the library does not support; `None` if it does, or if it is unknown
/// whether the key has a curve.
pub(super) fn unsupported_curve(key: &PrivateKeyDer<'_>) -> Option<&'static str> {
    let curve = match key {
        PrivateKeyDer::Pkcs8(key) => {
            let mut body = Reader(Reader(key.secret_pkcs8_der()).only(tag::SEQUENCE)?);
            body.take(tag::INTEGER)?;
            let mut algorithm = Reader(body.take(tag::SEQUENCE)?);
            (algorithm.take(tag::OBJECT_IDENTIFIER)? == EC_KEY).then_some(())?;
            algorithm.take(tag::OBJECT_IDENTIFIER)?
        }
        PrivateKeyDer::Sec1(key) => {
            let mut body = Reader(Reader(key.secret_sec1_der()).only(tag::SEQUENCE)?);
            body.take(tag::INTEGER)?;
            body.take(tag::OCTET_STRING)?;
            Reader(body.optional(tag::constructed(0))??).only(tag::OBJECT_IDENTIFIER)?
        }
        _ => return None,
    };
    let name = CURVES.iter().find(|(id, _)| *id == curve).map_or("another curve", |(_, name)| *name);
    (!SUPPORTED.contains(&name)).then_some(name)
}

/// Why a key of this curve of ours cannot be used, and what can.
pub(super) fn no_such_key(curve: &str) -> String {
    format!("a key of the curve {curve} is not supported; use a key of P-256 or P-384, RSA or Ed25519")
}

/// The algorithm of a certificate's key, such as `P-521` or `RSA with 1024 bits`.
pub(super) fn key(certificate: &Certificate<'_>) -> String {
    let mut algorithm = Reader(certificate.key_algorithm);
    let id = algorithm.take(tag::OBJECT_IDENTIFIER).unwrap_or_default();
    match id {
        EC_KEY => {
            let curve = algorithm.take(tag::OBJECT_IDENTIFIER).unwrap_or_default();
            name(CURVES, curve)
        }
        RSA_KEY => {
            let modulus = Reader(certificate.public_key)
                .only(tag::SEQUENCE)
                .and_then(|key| Reader(key).take(tag::INTEGER))
                .unwrap_or_default();
            let bytes = modulus.iter().skip_while(|byte| **byte == 0).count();
            format!("RSA with {} bits", bytes * 8)
        }
        other => name(SIGNATURES, other),
    }
}

/// The algorithm of a certificate's signature, such as `ecdsa-with-SHA512`.
pub(super) fn signature(certificate: &Certificate<'_>) -> String {
    let id = Reader(certificate.signature_algorithm).take(tag::OBJECT_IDENTIFIER).unwrap_or_default();
    name(SIGNATURES, id)
}

fn name(known: &[(&[u8], &str)], id: &[u8]) -> String {
    known.iter().find(|(other, _)| *other == id).map_or_else(|| numbers(id), |(_, name)| (*name).to_owned())
}

/// An object identifier in its usual form, such as `1.2.840`.
fn numbers(id: &[u8]) -> String {
    let mut all: Vec<u64> = Vec::new();
    let mut number = 0_u64;
    for byte in id.iter().take(MAX_NAME) {
        number = (number << 7) | u64::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            if all.is_empty() {
                let first = (number / 40).min(2);
                all.push(first);
                number -= first * 40;
            }
            all.push(number);
            number = 0;
        }
    }
    all.iter().map(u64::to_string).collect::<Vec<_>>().join(".")
}

/// The common name of a subject or an issuer; without one, a description.
pub(super) fn subject(name: &[u8]) -> String {
    let sets = Reader(name).all(tag::SET).unwrap_or_default();
    let mut common = sets.into_iter().filter_map(|set| {
        let mut pair = Reader(Reader(set).take(tag::SEQUENCE)?);
        (pair.take(tag::OBJECT_IDENTIFIER)? == COMMON_NAME).then_some(())?;
        pair.any().map(|(_, value)| value)
    });
    match common.next_back() {
        Some(value) => {
            let text: String = String::from_utf8_lossy(value).chars().take(MAX_NAME).collect();
            format!("{text:?}")
        }
        None => "without a common name".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_key_of_an_unsupported_curve_is_an_error_that_names_it() {
        use super::super::client::{Identity, Roots, Tls};
        let (authorities, certificate) =
            (include_bytes!("testdata/ca.pem"), include_bytes!("testdata/client.pem"));
        let connect = |key: &[u8]| {
            let identity = Identity { certificate: certificate.to_vec().into(), key: key.to_vec().into() };
            Tls::new(&Roots::Pem(authorities.to_vec()), Some(&identity), "a.test").map(drop)
        };
        assert_eq!(connect(include_bytes!("testdata/client.key")), Ok(()));
        for key in [&include_bytes!("testdata/p521.key")[..], include_bytes!("testdata/p521.pk8")] {
            assert_eq!(
                connect(key).unwrap_err().to_string(),
                "client certificate: key: a key of the curve P-521 is not supported; use a key of P-256 or P-384, \
                 RSA or Ed25519"
            );
        }
    }

    #[test]
    fn object_identifiers_and_subjects_have_names() {
        assert_eq!(numbers(&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d]), "1.2.840.113549");
        assert_eq!(numbers(&[0x88, 0x37, 3]), "2.999.3");
        assert_eq!(numbers(&[]), "");
        assert_eq!(numbers(&[0xff; 100]), "");
        let name = [0x31, 11, 0x30, 9, 6, 3, 0x55, 4, 3, 12, 2, b'a', b'"'];
        assert_eq!(subject(&name), r#""a\"""#);
        assert_eq!(subject(&[]), "without a common name");
        assert_eq!(subject(&[0x31]), "without a common name");
    }
}
