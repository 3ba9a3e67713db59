//! The authorities of a cluster, and the hashes that pin their keys (Go: cmd/kubeadm/app/util/pubkeypin).

use std::fmt;

use super::error::JoinError;
use crate::transport::api::bundle_certificates;
use crate::util::encoding::base64;
use crate::util::sha256::sha256_hex;
use crate::util::x509::Certificate;

/// The only kind of hash.
const PREFIX: &str = "sha256";
/// Digits of a hash.
const DIGITS: usize = 64;
/// The most certificates of a bundle. Clusters have one, and two while they replace it.
const MAX_CERTIFICATES: usize = 32;
/// Characters of a line of PEM (RFC 7468).
const LINE_CHARACTERS: usize = 64;

/// The SHA-256 of a certificate's SubjectPublicKeyInfo: `sha256:<hex>`, as kubeadm prints it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthorityPin {
    /// In lower case.
    digits: String,
}

impl AuthorityPin {
    /// Reads a hash. Upper case counts as lower case.
    ///
    /// # Errors
    /// When the text has another form.
    pub fn parse(text: &str) -> Result<AuthorityPin, JoinError> {
        let is_hash =
            |digits: &str| digits.len() == DIGITS && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        let parts = text.split_once(':');
        let digits = parts
            .filter(|(kind, digits)| kind.eq_ignore_ascii_case(PREFIX) && is_hash(digits))
            .map(|(_, digits)| digits.to_ascii_lowercase());
        let digits = digits.ok_or_else(|| {
            let shown = crate::util::clip::line(text, 100);
            let reason = format!("{shown:?} is not \"sha256:\" and 64 hexadecimal digits");
            JoinError::Argument { flag: "--discovery-token-ca-cert-hash", reason }
        })?;
        Ok(AuthorityPin { digits })
    }

    /// The hash of the key of a certificate in DER; `None` if this is no certificate.
    fn from_certificate(der: &[u8]) -> Option<AuthorityPin> {
        let certificate = Certificate::from_der(der)?;
        Some(AuthorityPin { digits: sha256_hex(certificate.public_key_info) })
    }
}

impl fmt::Display for AuthorityPin {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{PREFIX}:{}", self.digits)
    }
}

/// The authorities of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Authorities {
    /// In DER, with the hashes of their keys.
    certificates: Vec<(Vec<u8>, AuthorityPin)>,
}

impl Authorities {
    /// Reads a PEM bundle; the error is its reason.
    pub(super) fn parse(pem: &[u8]) -> Result<Authorities, String> {
        let bundle = bundle_certificates(pem).map_err(|error| error.to_string())?;
        if bundle.len() > MAX_CERTIFICATES {
            return Err(format!(
                "{} certificate authorities, and the limit is {MAX_CERTIFICATES}",
                bundle.len()
            ));
        }
        let certificates = bundle.into_iter().map(|der| {
            let pin = AuthorityPin::from_certificate(&der)?;
            Some((der, pin))
        });
        let certificates: Option<Vec<_>> = certificates.collect();
        let certificates = certificates.ok_or("a certificate authority is no X.509 certificate")?;
        Ok(Authorities { certificates })
    }

    /// Those whose key is pinned; `None` if there are none.
    pub(super) fn pinned(&self, pins: &[AuthorityPin]) -> Option<Authorities> {
        let certificates = self.certificates.iter().filter(|(_, pin)| pins.contains(pin));
        let certificates: Vec<_> = certificates.cloned().collect();
        (!certificates.is_empty()).then_some(Authorities { certificates })
    }

    /// The hashes of all keys.
    pub(super) fn hashes(&self) -> Vec<String> {
        self.certificates.iter().map(|(_, pin)| pin.to_string()).collect()
    }

    /// The certificates alone as PEM: what else was in the bundle is left out.
    pub(super) fn to_pem(&self) -> String {
        let mut pem = String::new();
        for (der, _) in &self.certificates {
            let text = base64(der);
            let mut rest = text.as_str();
            pem.push_str("-----BEGIN CERTIFICATE-----\n");
            while !rest.is_empty() {
                // Base64 is ASCII.
                let (line, after) = rest.split_at_checked(LINE_CHARACTERS).unwrap_or((rest, ""));
                pem.push_str(line);
                pem.push('\n');
                rest = after;
            }
            pem.push_str("-----END CERTIFICATE-----\n");
        }
        pem
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::testing::{AUTHORITY, OTHER_AUTHORITY};

    // `openssl x509 -pubkey -noout | openssl pkey -pubin -outform der | sha256sum`.
    const HASH: &str = "sha256:75f6a90d802743636d1848d88d109804c71c8b754551072b9a9b282181798e44";
    const OTHER_HASH: &str = "sha256:3ceeadac3e8945b92000f13220288eee712eea6c1566ac160c3923c8e66a35a3";

    #[test]
    fn hash_is_that_of_the_public_key_with_its_algorithm() {
        let both = Authorities::parse([AUTHORITY, OTHER_AUTHORITY].concat().as_bytes()).unwrap();
        assert_eq!(both.hashes(), [HASH, OTHER_HASH]);
        let pinned = both.pinned(&[AuthorityPin::parse(OTHER_HASH).unwrap()]).unwrap();
        assert_eq!(pinned.hashes(), [OTHER_HASH]);
        assert_eq!(both.pinned(&[AuthorityPin::parse(&format!("sha256:{}", "0".repeat(64))).unwrap()]), None);
    }

    #[test]
    fn hashes_are_read_in_either_case_and_other_forms_are_refused() {
        let upper = AuthorityPin::parse(&HASH.to_ascii_uppercase()).unwrap();
        assert_eq!(upper.to_string(), HASH);
        for text in ["", "sha256:", "sha256", &HASH[7..], &HASH[..70], "sha512:00", &format!("{HASH}0")] {
            let error = AuthorityPin::parse(text).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{text}");
        }
        let long = AuthorityPin::parse(&"é".repeat(100_000)).unwrap_err();
        assert!(long.to_string().len() < 400);
    }

    #[test]
    fn bundle_is_written_with_nothing_but_its_certificates() {
        let text =
            format!("# a comment\n{AUTHORITY}\n-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n");
        let authorities = Authorities::parse(text.as_bytes()).unwrap();
        let pem = authorities.to_pem();
        assert_eq!(Authorities::parse(pem.as_bytes()), Ok(authorities));
        assert!(!pem.contains("comment") && !pem.contains("CRL"));
        assert!(pem.lines().all(|line| line.len() <= 64));
    }

    #[test]
    fn damaged_empty_and_huge_bundles_are_refused() {
        let der = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        for bundle in ["", "text", der, &AUTHORITY.repeat(MAX_CERTIFICATES + 1), &AUTHORITY[..200]] {
            assert!(Authorities::parse(bundle.as_bytes()).is_err());
        }
    }
}
