//! Certificate authorities of clients: the authorities of a bundle, and the chains from clients to
//! them (Go: crypto/x509, `Certificate.Verify`).
//!
//! The path from a client's certificate to an authority is searched here: the TLS library gets one
//! path and one authority at a time, so that the certificates of an unknown client cost a few
//! signature checks at most. The library checks signatures, times, extended usages and name
//! constraints along the path. This file checks the rest: whether an authority may sign, its time,
//! its path length limit, key usages, and critical extensions.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{CertificateError, RootCertStore};

use super::server::ServeError;
use super::usage::Usage;
use crate::util::sha256;
use crate::util::x509::Certificate;

/// The limit of authorities between a client's certificate and one of the bundle; also the library's.
const MAX_INTERMEDIATES: usize = 6;

/// The limit of additional certificates of a client that are used.
const MAX_RECEIVED: usize = 16;

/// The limit of certificates that are tried for one chain: several have the same name while they
/// are being replaced.
const MAX_TRIED: usize = 32;

/// The authorities that may sign clients' certificates.
#[derive(Debug)]
pub struct Authorities {
    signing: Vec<Authority>,
    /// Digests of all certificates in the bundle.
    bundle: BTreeSet<[u8; 32]>,
}

/// An authority that may sign.
struct Authority {
    subject: Vec<u8>,
    life: Validity,
    path_length: Option<u64>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Authority({:?})", self.life)
    }
}

/// Why a client's certificate is not accepted. The texts are those of Go's crypto/x509 where it has one.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CertificateRefusal {
    #[error("no certificate")]
    NoCertificate,
    #[error("x509: malformed certificate")]
    Malformed,
    #[error("x509: unhandled critical extension")]
    CriticalExtension,
    #[error("x509: certificate specifies an incompatible key usage")]
    KeyUsage,
    #[error("x509: a client certificate of version 1 is not supported")]
    VersionOne,
    #[error("x509: certificate policies are not supported")]
    Policies,
    #[error("x509: certificate signed by unknown authority")]
    UnknownAuthority,
    #[error("x509: parent certificate cannot sign this kind of certificate")]
    ParentCannotSign,
    #[error("x509: too many intermediates for path length constraint")]
    PathLength,
    #[error(transparent)]
    Validity(#[from] OutsideValidity),
    #[error("x509: {0}")]
    Library(rustls::Error),
}

/// A time at which a certificate is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("x509: certificate has expired or is not yet valid: current time {now:.0} is {relation} {limit}")]
pub struct OutsideValidity {
    now: Timestamp,
    /// `before` or `after`.
    relation: &'static str,
    limit: Timestamp,
}

/// The result of verifying a client's certificates, and how long it is valid.
#[derive(Debug, Clone, PartialEq)]
pub struct Verification {
    /// The reason why verification failed.
    pub outcome: Result<(), CertificateRefusal>,
    /// The cost: the number of certificates that were tried as the next of a path, and of
    /// authorities that were tried as its end. Each costs one signature check at most, and a valid
    /// path costs one for each of its certificates.
    pub tried: usize,
    /// The outcome may be different before this time.
    since: Timestamp,
    /// The outcome may be different after this time.
    until: Timestamp,
}

impl Verification {
    /// Whether the result is still valid at this time: no certificate that it depends on has become
    /// valid or expired.
    #[must_use]
    pub fn holds(&self, now: Timestamp) -> bool {
        (self.since..=self.until).contains(&now)
    }

    /// Records a time that the outcome depends on.
    fn depends_on(&mut self, life: Validity, now: Timestamp) {
        let instant = SignedDuration::from_nanos(1);
        if now < life.not_before {
            let before = life.not_before.checked_sub(instant).unwrap_or(life.not_before);
            self.until = self.until.min(before);
        } else {
            self.since = self.since.max(life.not_before);
        }
        if now <= life.not_after {
            self.until = self.until.min(life.not_after);
        } else {
            self.since = self.since.max(life.not_after.checked_add(instant).unwrap_or(life.not_after));
        }
    }
}

/// The validity of a certificate; both ends are included.
#[derive(Debug, Clone, Copy)]
pub(super) struct Validity {
    not_before: Timestamp,
    not_after: Timestamp,
}

impl Validity {
    pub(super) fn from_certificate(certificate: &Certificate<'_>) -> Validity {
        Validity { not_before: certificate.not_before, not_after: certificate.not_after }
    }

    /// For users: the times, and that a certificate may be right and the clock wrong.
    pub(super) fn clock(self) -> String {
        format!(
            "the certificate is valid from {} until {}: is the clock of this machine right?",
            self.not_before, self.not_after
        )
    }

    pub(super) fn check(self, now: Timestamp) -> Result<(), OutsideValidity> {
        let (relation, limit) = if now < self.not_before {
            ("before", self.not_before)
        } else if now > self.not_after {
            ("after", self.not_after)
        } else {
            return Ok(());
        };
        Err(OutsideValidity { now, relation, limit })
    }
}

impl Authorities {
    /// Reads a bundle in PEM.
    ///
    /// DIFFERS: an unreadable certificate is ignored; the Go kubelet refuses the whole bundle.
    ///
    /// # Errors
    /// When no certificate in it is readable.
    pub fn of_pem(pem: &[u8]) -> Result<Authorities, ServeError> {
        let unusable = |reason: &dyn fmt::Display| ServeError::Authorities(reason.to_string());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let (mut signing, mut bundle) = (Vec::new(), BTreeSet::new());
        for der in CertificateDer::pem_slice_iter(pem) {
            let der = der.map_err(|error| unusable(&error))?;
            let Some((certificate, usage)) = read(&der) else { continue };
            if bundle.insert(sha256::sha256(&der)) {
                signing.extend(Authority::new(&der, &certificate, usage, &provider));
            }
        }
        if bundle.is_empty() {
            return Err(unusable(&"no usable certificate"));
        }
        Ok(Authorities { signing, bundle })
    }

    /// The number of certificates in the bundle, and of those that may sign at this time.
    #[must_use]
    pub fn count(&self, now: Timestamp) -> (usize, usize) {
        let signing = self.signing.iter().filter(|authority| authority.life.check(now).is_ok()).count();
        (self.bundle.len(), signing)
    }

    /// Verifies the first certificate of a chain as a client's, at this time. The others may be
    /// authorities between it and one of the bundle, in any order. All are in DER.
    #[must_use]
    pub fn verify(&self, chain: &[Vec<u8>], now: Timestamp) -> Verification {
        let mut verification =
            Verification { outcome: Ok(()), tried: 0, since: Timestamp::MIN, until: Timestamp::MAX };
        verification.outcome = self.judge(chain, now, &mut verification);
        verification
    }

    fn judge(
        &self,
        chain: &[Vec<u8>],
        now: Timestamp,
        verification: &mut Verification,
    ) -> Result<(), CertificateRefusal> {
        let (own, others) = chain.split_first().ok_or(CertificateRefusal::NoCertificate)?;
        let (certificate, usage) = read(own).ok_or(CertificateRefusal::Malformed)?;
        verification.depends_on(Validity::from_certificate(&certificate), now);
        if usage.has_unsupported_critical {
            return Err(CertificateRefusal::CriticalExtension);
        }
        Validity::from_certificate(&certificate).check(now)?;
        if !usage.for_clients {
            return Err(CertificateRefusal::KeyUsage);
        }
        // A certificate that is in the bundle itself needs no signature check, as in Go.
        if self.bundle.contains(&sha256::sha256(own)) {
            return Ok(());
        }
        // The library that verifies signatures supports no other version.
        if !certificate.is_v3 {
            return Err(CertificateRefusal::VersionOne);
        }
        if usage.has_policies {
            return Err(CertificateRefusal::Policies);
        }
        let intermediates = others.iter().take(MAX_RECEIVED).filter_map(|der| {
            let (certificate, usage) = read(der)?;
            Some(Intermediate { der, certificate, usage, on_path: false })
        });
        let mut search = Search {
            authorities: &self.signing,
            own,
            intermediates: intermediates.collect(),
            path: Vec::new(),
            names: Vec::new(),
            refusal: CertificateRefusal::UnknownAuthority,
            now,
            verification,
        };
        if search.is_signed_by(certificate.issuer) { Ok(()) } else { Err(search.refusal) }
    }
}

/// An additional certificate of a client, which may lead to an authority.
struct Intermediate<'a> {
    der: &'a [u8],
    certificate: Certificate<'a>,
    usage: Usage,
    on_path: bool,
}

/// The search for a path from a client's certificate to an authority.
struct Search<'a> {
    authorities: &'a [Authority],
    own: &'a [u8],
    intermediates: Vec<Intermediate<'a>>,
    path: Vec<&'a [u8]>,
    /// The subjects on the path.
    names: Vec<&'a [u8]>,
    refusal: CertificateRefusal,
    now: Timestamp,
    verification: &'a mut Verification,
}

impl<'a> Search<'a> {
    /// Whether the end of the path was signed by an authority of this name, or by an additional
    /// certificate that leads to an authority. The depth is limited by [`MAX_INTERMEDIATES`].
    fn is_signed_by(&mut self, issuer: &'a [u8]) -> bool {
        let authorities = self.authorities;
        for authority in authorities.iter().filter(|authority| authority.subject == issuer) {
            self.verification.depends_on(authority.life, self.now);
            if !self.may_try() {
                return false;
            }
            match authority.check_path(self.own, &self.path, self.now) {
                Ok(()) => return true,
                Err(refusal) => self.refuse(refusal),
            }
        }
        if self.path.len() == MAX_INTERMEDIATES {
            return false;
        }
        for index in 0..self.intermediates.len() {
            let unused = self.intermediates.get_mut(index).filter(|parent| !parent.on_path);
            let Some(parent) = unused else { continue };
            // Each name once: the library then has only one way along a path, and there are no loops.
            let next = parent.certificate.issuer;
            if parent.certificate.subject != issuer || next == issuer || self.names.contains(&next) {
                continue;
            }
            self.verification.depends_on(Validity::from_certificate(&parent.certificate), self.now);
            if let Err(refusal) = may_lead(&parent.certificate, parent.usage, self.now) {
                self.refuse(refusal);
                continue;
            }
            parent.on_path = true;
            let der = parent.der;
            if !self.may_try() {
                return false;
            }
            self.path.push(der);
            self.names.push(issuer);
            if self.is_signed_by(next) {
                return true;
            }
            self.path.pop();
            self.names.pop();
            if let Some(parent) = self.intermediates.get_mut(index) {
                parent.on_path = false;
            }
        }
        false
    }

    fn may_try(&mut self) -> bool {
        let may = self.verification.tried < MAX_TRIED;
        self.verification.tried += usize::from(may);
        may
    }

    /// Stores the first reason that is more specific than a missing authority.
    fn refuse(&mut self, refusal: CertificateRefusal) {
        if self.refusal == CertificateRefusal::UnknownAuthority {
            self.refusal = refusal;
        }
    }
}

/// A certificate and its permitted usage.
pub(super) fn read(der: &[u8]) -> Option<(Certificate<'_>, Usage)> {
    let certificate = Certificate::from_der(der)?;
    let usage = Usage::from_certificate(&certificate)?;
    Some((certificate, usage))
}

/// Whether a certificate of a client may stand between it and an authority.
fn may_lead(certificate: &Certificate<'_>, usage: Usage, now: Timestamp) -> Result<(), CertificateRefusal> {
    if !usage.is_marked_authority || !usage.may_sign {
        return Err(CertificateRefusal::ParentCannotSign);
    }
    if usage.has_unsupported_critical || usage.has_policies {
        return Err(CertificateRefusal::CriticalExtension);
    }
    Ok(Validity::from_certificate(certificate).check(now)?)
}

impl Authority {
    /// `None`: the authority must not sign clients' certificates.
    fn new(
        der: &CertificateDer<'_>,
        certificate: &Certificate<'_>,
        usage: Usage,
        provider: &Arc<CryptoProvider>,
    ) -> Option<Authority> {
        if !usage.is_authority || !usage.may_sign || !usage.for_clients || usage.has_unsupported_critical {
            return None;
        }
        let mut roots = RootCertStore::empty();
        roots.add(der.clone().into_owned()).ok()?;
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
            .build()
            .ok()?;
        Some(Authority {
            subject: certificate.subject.to_vec(),
            life: Validity::from_certificate(certificate),
            path_length: usage.path_length,
            verifier,
        })
    }

    /// Whether it has signed the last certificate of the path. Each of the path has signed the one before,
    /// the first one the client's own. If the path is empty, it must have signed the client's own.
    fn check_path(&self, own: &[u8], path: &[&[u8]], now: Timestamp) -> Result<(), CertificateRefusal> {
        self.life.check(now)?;
        if self.path_length.is_some_and(|most| path.len() as u64 > most) {
            return Err(CertificateRefusal::PathLength);
        }
        let path: Vec<_> = path.iter().map(|der| CertificateDer::from(*der)).collect();
        let seconds = u64::try_from(now.as_second()).unwrap_or(0);
        let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        match self.verifier.verify_client_cert(&CertificateDer::from(own), &path, now) {
            Ok(_) => Ok(()),
            Err(rustls::Error::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            )) => Err(CertificateRefusal::UnknownAuthority),
            Err(other) => Err(CertificateRefusal::Library(other)),
        }
    }
}
