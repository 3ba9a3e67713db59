//! Which certificates prove that a server has a name (Go: crypto/x509, `Certificate.Verify` and
//! `VerifyHostname`).
//!
//! The TLS library builds and verifies the path from the server's certificate to an authority:
//! signatures, times, extended usages, name constraints. It treats what it gets as authorities as
//! names with keys only. So this file checks the rest of Go's rules about them: whether one may
//! sign, its time, its extended usages, its limit of a path's length; and it accepts a server's
//! certificate that is itself in the bundle, of which the library makes an authority only.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, ServerName, TrustAnchor, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, OtherError, RootCertStore, SignatureScheme};

use super::authorities::{Validity, read};
use super::client::ServerAuthority;
use super::ecdsa;
use super::names;
use super::usage::Usage;
use crate::util::sha256;
use crate::util::x509::Certificate;

/// The limit of additional certificates of a server that are used.
const MAX_RECEIVED: usize = 16;

const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 17];

/// Verifies servers by a bundle of authorities.
#[derive(Debug)]
pub(super) struct Verifier {
    anchors: Vec<Anchor>,
    /// The subjects of certificates in the bundle that must not sign.
    others: Vec<Vec<u8>>,
    /// Digests of all certificates in the bundle.
    bundle: BTreeSet<[u8; 32]>,
    algorithms: WebPkiSupportedAlgorithms,
}

/// An authority that may sign certificates of servers.
#[derive(Debug)]
struct Anchor {
    trusted: TrustAnchor<'static>,
    life: Validity,
    path_length: u64,
    subject: Vec<u8>,
    key: Key,
}

/// The kind of a public key.
#[derive(Debug, Clone)]
struct Key {
    /// The encoded algorithm.
    algorithm: Vec<u8>,
    /// For messages.
    name: String,
}

impl Key {
    fn new(certificate: &Certificate<'_>) -> Key {
        Key { algorithm: certificate.key_algorithm.to_vec(), name: names::key(certificate) }
    }

    fn is_rsa(&self) -> bool {
        self.name.starts_with("RSA")
    }

    /// Why a key of this type cannot have made such a signature.
    fn mismatch(&self, signature: &str) -> Option<&'static str> {
        let is_curve = signature.starts_with("ecdsa") || signature.starts_with("Ed");
        match self.is_rsa() {
            true if is_curve => {
                Some("x509: signature algorithm does not specify an RSA public key, but have one")
            }
            false if signature.contains("RSA") => {
                Some("x509: signature algorithm specifies an RSA public key, but have another one")
            }
            _ => None,
        }
    }

    /// Go's error for a signature that another key has made.
    fn failure(&self) -> &'static str {
        match self.name.as_str() {
            _ if self.is_rsa() => "crypto/rsa: verification error",
            name if name.starts_with("Ed25519") => "x509: Ed25519 verification failure",
            _ => "x509: ECDSA verification failure",
        }
    }

    /// Whether the library refuses it because it is short.
    fn is_short(&self) -> bool {
        let bits = self.name.strip_prefix("RSA with ").and_then(|rest| rest.split(' ').next());
        bits.and_then(|bits| bits.parse::<u32>().ok()).is_some_and(|bits| bits < 2048)
    }
}

/// Describes an authority; an error if the certificate is none, for servers.
pub(super) fn server_authority(der: &CertificateDer<'_>) -> Result<ServerAuthority, String> {
    let (certificate, usage) = read(der).ok_or("a certificate is damaged")?;
    let subject = names::subject(certificate.subject);
    if !usage.is_authority || !usage.may_sign || !usage.for_servers || usage.has_unsupported_critical {
        return Err(format!("the certificate {subject} is no authority for certificates of servers"));
    }
    let digits = sha256::sha256(der).iter().map(|byte| format!("{byte:02X}")).collect::<Vec<_>>();
    Ok(ServerAuthority { subject, fingerprint: digits.join(":"), not_after: certificate.not_after })
}

/// A reason that the TLS library has no error for.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn refused(reason: impl Into<String>) -> rustls::Error {
    CertificateError::Other(OtherError(Arc::new(Refusal(reason.into())))).into()
}

fn timestamp(now: UnixTime) -> Timestamp {
    i64::try_from(now.as_secs())
        .ok()
        .and_then(|now| Timestamp::from_second(now).ok())
        .unwrap_or(Timestamp::MAX)
}

impl Verifier {
    /// As in Go, an unreadable certificate does not make the others invalid.
    pub(super) fn new(bundle: &[CertificateDer<'_>]) -> Result<Verifier, String> {
        let algorithms = ecdsa::all();
        let mut verifier =
            Verifier { anchors: Vec::new(), others: Vec::new(), bundle: BTreeSet::new(), algorithms };
        for der in bundle {
            let Some((certificate, usage)) = read(der) else { continue };
            if !verifier.bundle.insert(sha256::sha256(der)) {
                continue;
            }
            let mut store = RootCertStore::empty();
            let may_sign =
                usage.is_authority && usage.may_sign && usage.for_servers && !usage.has_unsupported_critical;
            let subject = certificate.subject.to_vec();
            match may_sign && store.add(der.clone().into_owned()).is_ok() {
                false => verifier.others.push(subject),
                true => verifier.anchors.extend(store.roots.pop().map(|trusted| Anchor {
                    trusted,
                    life: Validity::from_certificate(&certificate),
                    path_length: usage.path_length.unwrap_or(u64::MAX),
                    subject,
                    key: Key::new(&certificate),
                })),
            }
        }
        if verifier.bundle.is_empty() { Err("no usable certificate".to_owned()) } else { Ok(verifier) }
    }

    /// Verifies the server's own certificate, except for its signature.
    fn check_own(
        &self,
        certificate: &Certificate<'_>,
        usage: Usage,
        der: &CertificateDer<'_>,
        name: &ServerName<'_>,
        now: Timestamp,
    ) -> Result<(), rustls::Error> {
        let own = names::subject(certificate.subject);
        if usage.has_unsupported_critical {
            return Err(refused(format!("unhandled critical extension in certificate {own}")));
        }
        check_time(Validity::from_certificate(certificate), now)?;
        // Only version 3 has alternative names.
        if certificate.extension(SUBJECT_ALT_NAME).is_none() {
            return Err(refused("certificate relies on legacy Common Name field, use SANs instead"));
        }
        verify_server_name(&ParsedCertificate::try_from(der)?, name)?;
        if !usage.for_servers {
            return Err(refused("certificate specifies an incompatible key usage"));
        }
        if !self
            .algorithms
            .all
            .iter()
            .any(|algorithm| *algorithm.public_key_alg_id() == *certificate.key_algorithm)
        {
            let key = names::key(certificate);
            return Err(refused(format!(
                "the server's certificate {own} has a key of {key}, which is not supported; use a key of \
                 P-256, P-384 or P-521, RSA with 2048 bits or more, or Ed25519"
            )));
        }
        Ok(())
    }

    /// Verifies a path from the server's certificate to one of the authorities.
    fn check_path(
        &self,
        der: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        let parsed = ParsedCertificate::try_from(der)?;
        // The library does not look at the key usage of certificates between.
        let signs = |der: &&CertificateDer<'_>| read(der).is_some_and(|(_, usage)| usage.may_sign);
        let intermediates: Vec<CertificateDer<'_>> = intermediates.iter().filter(signs).cloned().collect();
        let check = |is_wanted: &dyn Fn(u64) -> bool, between: &[CertificateDer<'_>]| {
            let is_valid =
                |anchor: &&Anchor| is_wanted(anchor.path_length) && anchor.life.check(timestamp(now)).is_ok();
            let anchors = self.anchors.iter().filter(is_valid);
            let roots = RootCertStore { roots: anchors.map(|anchor| anchor.trusted.clone()).collect() };
            if roots.is_empty() {
                return Err(CertificateError::UnknownIssuer.into());
            }
            verify_server_cert_signed_by_trust_anchor(&parsed, &roots, between, now, self.algorithms.all)
        };
        // The library does not limit a path's length for an authority: those with a limit get no paths
        // that could be longer.
        //
        // DIFFERS: a limit above one is not checked.
        let outcome = check(&|length| length > 1, &intermediates);
        if outcome.is_ok() || check(&|length| length <= 1, &[]).is_ok() {
            return Ok(());
        }
        let mut each = intermediates.iter().map(std::slice::from_ref);
        if each.any(|intermediate| check(&|length| length == 1, intermediate).is_ok()) {
            Ok(())
        } else {
            outcome
        }
    }

    /// The reason why there is no path, with the certificate that it concerns and the way out.
    fn explain(&self, error: rustls::Error, chain: &[&CertificateDer<'_>], now: Timestamp) -> rustls::Error {
        let chain: Vec<Certificate<'_>> = chain.iter().filter_map(|der| Certificate::from_der(der)).collect();
        for certificate in &chain {
            let issuer = certificate.issuer;
            let anchor = self.anchors.iter().find(|anchor| anchor.subject == issuer);
            let signer = chain.iter().find(|other| other.subject == issuer);
            let candidate = |reason: &str, more: &str| {
                refused(format!(
                    "certificate signed by unknown authority (possibly because of {reason:?} while trying to \
                     verify candidate authority certificate {}){more}",
                    names::subject(issuer)
                ))
            };
            if let Some(anchor) = anchor
                && let Err(reason) = anchor.life.check(now)
            {
                return candidate(&reason.to_string(), &format!("; {}", anchor.life.clock()));
            }
            if anchor.is_none() && self.others.iter().any(|subject| subject == issuer) {
                return candidate("x509: parent certificate cannot sign this kind of certificate", "");
            }
            let signature = names::signature(certificate);
            if let Some(anchor) = anchor
                && let Some(reason) = anchor.key.mismatch(&signature)
            {
                return candidate(reason, "");
            }
            let Some(key) = anchor.map(|anchor| anchor.key.clone()).or_else(|| signer.map(Key::new)) else {
                continue;
            };
            let is_supported = self.algorithms.all.iter().any(|algorithm| {
                *algorithm.signature_alg_id() == *certificate.signature_algorithm
                    && *algorithm.public_key_alg_id() == *key.algorithm
            });
            if !is_supported || key.is_short() {
                return refused(format!(
                    "certificate {} is signed with {} by a key of {}, which is not supported; use an \
                     authority that signs with SHA-256 or longer and a key of P-256, P-384, P-521 or RSA \
                     with 2048 bits or more, or with Ed25519",
                    names::subject(certificate.subject),
                    signature,
                    key.name
                ));
            }
            // A new authority of a control plane often has the name of the former one.
            if let Some(anchor) = anchor
                && matches!(error, rustls::Error::InvalidCertificate(CertificateError::BadSignature))
            {
                return candidate(anchor.key.failure(), "");
            }
        }
        error
    }
}

fn check_time(life: Validity, now: Timestamp) -> Result<(), rustls::Error> {
    life.check(now).map_err(|outside| {
        let text = outside.to_string();
        refused(format!("{}; {}", text.strip_prefix("x509: ").unwrap_or(&text), life.clock()))
    })
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let (certificate, usage) = read(own).ok_or(CertificateError::BadEncoding)?;
        self.check_own(&certificate, usage, own, name, timestamp(now))?;
        // As in Go, a certificate of the bundle needs no signature.
        if self.bundle.contains(&sha256::sha256(own)) {
            return Ok(ServerCertVerified::assertion());
        }
        if usage.is_marked_authority {
            // DIFFERS: Go accepts it if an authority has signed it.
            return Err(refused(format!(
                "certificate signed by unknown authority: the server's certificate {} is marked as an \
                 authority (CA:TRUE), and such a certificate is accepted only if it is itself one of the \
                 certificate authorities; add it there, or issue it with CA:FALSE",
                names::subject(certificate.subject)
            )));
        }
        let intermediates = intermediates.get(..MAX_RECEIVED).unwrap_or(intermediates);
        match self.check_path(own, intermediates, now) {
            Ok(()) => Ok(ServerCertVerified::assertion()),
            Err(error) => {
                let chain: Vec<_> = std::iter::once(own).chain(intermediates).collect();
                Err(self.explain(error, &chain, timestamp(now)))
            }
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        own: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, own, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        own: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, own, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let mut schemes = self.algorithms.supported_schemes();
        // Without it a server with such a certificate would end the handshake before it shows the
        // certificate that the error names.
        schemes.push(SignatureScheme::ED448);
        schemes
    }
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
