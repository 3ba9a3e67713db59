//! Sessions with a server or a proxy: how it is verified, and our certificate.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::{Arc, LazyLock};

use jiff::Timestamp;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    ClientConfig, ClientConnection, ConfigBuilder, DigitallySignedStruct, SignatureScheme, WantsVerifier,
};

use super::cbc;
use super::names;
use super::verify::{self, Verifier};
use crate::util::secret::Secret;
use crate::util::x509::Certificate;

/// The files with public authorities on Linux distributions, in Go's order.
const SYSTEM_BUNDLES: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// The number of tickets; one server needs few, and each ticket contains our certificate.
const SESSIONS: usize = 2;

/// The authorities that may sign the server's certificate.
#[derive(Clone, PartialEq, Eq)]
pub enum Roots {
    /// The authorities in a PEM bundle.
    Pem(Vec<u8>),
    /// The authorities of the machine.
    System,
    /// Any server is accepted.
    Unverified,
}

/// A client certificate with its chain and its key, both PEM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// The chain, leaf first. The file may contain the key, too.
    pub certificate: Secret<Vec<u8>>,
    /// The key: PKCS#1, PKCS#8 or SEC1.
    pub key: Secret<Vec<u8>>,
}

impl Identity {
    /// The time of the certificate: begin and end. `None` if it cannot be read.
    #[must_use]
    pub fn validity(&self) -> Option<(Timestamp, Timestamp)> {
        let der = CertificateDer::pem_slice_iter(self.certificate.reveal()).next()?.ok()?;
        let certificate = Certificate::from_der(&der)?;
        Some((certificate.not_before, certificate.not_after))
    }
}

impl fmt::Debug for Roots {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Roots::Pem(_) => "Pem(..)",
            Roots::System => "System",
            Roots::Unverified => "Unverified",
        })
    }
}

/// Why TLS settings are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TlsSetupError {
    /// The authorities are invalid.
    #[error("certificate authority: {0}")]
    Roots(String),
    /// Certificate or key is invalid.
    #[error("client certificate: {0}")]
    Identity(String),
    /// The host is neither a name nor an address.
    #[error("server name {0:?} is not a DNS name or an address")]
    ServerName(String),
}

impl Roots {
    /// These authorities, and those of a PEM bundle. A bundle that is in them already is not added again.
    #[must_use]
    pub fn with(&self, pem: &[u8]) -> Roots {
        let own = match self {
            Roots::Unverified => return Roots::Unverified,
            Roots::Pem(own) => own.clone(),
            Roots::System => system_bundle().unwrap_or_default(),
        };
        if !pem.is_empty() && own.windows(pem.len()).any(|part| part == pem) {
            return Roots::Pem(own);
        }
        Roots::Pem([own.as_slice(), b"\n", pem].concat())
    }

    /// The authorities for a proxy to a server with these authorities: the same, and the readable
    /// ones of the machine.
    ///
    /// DIFFERS: upstream trusts the server's authorities alone.
    pub(in crate::transport) fn of_proxy(&self) -> Roots {
        match self {
            Roots::Pem(pem) => {
                let system = system_bundle().unwrap_or_default();
                if let Err(error) = certificates(&system) {
                    log::debug!("the machine's authorities are not used for proxies: {error}");
                    return self.clone();
                }
                Roots::Pem([pem.as_slice(), b"\n", system.as_slice()].concat())
            }
            other => other.clone(),
        }
    }
}

/// An authority that may sign certificates of servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerAuthority {
    /// The common name of its subject.
    pub subject: String,
    /// The SHA-256 digest of the certificate, as OpenSSL shows it: pairs of hexadecimal digits with colons.
    pub fingerprint: String,
    /// The time after which it is not valid.
    pub not_after: Timestamp,
}

impl fmt::Display for ServerAuthority {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} (SHA-256 {}, until {})", self.subject, self.fingerprint, self.not_after)
    }
}

/// The authorities of a PEM bundle.
///
/// # Errors
/// When one of its certificates is damaged, or must not sign certificates of servers; with the reason.
pub fn server_authorities(pem: &[u8]) -> Result<Vec<ServerAuthority>, TlsSetupError> {
    let all = certificates(pem).map_err(TlsSetupError::Roots)?;
    all.iter().map(|der| verify::server_authority(der).map_err(TlsSetupError::Roots)).collect()
}

/// The certificates of a PEM bundle, each in DER. Blocks of other types are skipped.
///
/// # Errors
/// When the bundle is damaged, or has no certificate.
pub fn bundle_certificates(pem: &[u8]) -> Result<Vec<Vec<u8>>, TlsSetupError> {
    let all = certificates(pem).map_err(TlsSetupError::Roots)?;
    Ok(all.iter().map(|der| der.as_ref().to_vec()).collect())
}

/// The common settings of all sessions with one server.
#[derive(Clone)]
pub(in crate::transport) struct Tls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Tls {
    /// Sessions with the server `name`.
    pub(in crate::transport) fn new(
        roots: &Roots,
        identity: Option<&Identity>,
        name: &str,
    ) -> Result<Tls, TlsSetupError> {
        let verifier: Arc<dyn ServerCertVerifier> = match roots {
            Roots::Unverified => Arc::new(AnyServer),
            Roots::Pem(pem) => verifier(pem)?,
            Roots::System => verifier(&system_bundle()?)?,
        };
        let builder = builder(rustls::crypto::ring::default_provider())
            .map_err(|error| TlsSetupError::Roots(error.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let mut config = match identity {
            None => builder.with_no_client_auth(),
            Some(identity) => {
                let wrong = |what: &str, error: &dyn fmt::Display| {
                    TlsSetupError::Identity(format!("{what}: {error}"))
                };
                let chain = certificates(identity.certificate.reveal())
                    .map_err(|error| wrong("certificate", &error))?;
                let key = PrivateKeyDer::from_pem_slice(identity.key.reveal())
                    .map_err(|error| wrong("key", &error))?;
                if let Some(curve) = names::unsupported_curve(&key) {
                    return Err(wrong("key", &names::no_such_key(curve)));
                }
                builder
                    .with_client_auth_cert(chain, key)
                    .map_err(|error| wrong("certificate and key", &error))?
            }
        };
        config.resumption = Resumption::in_memory_sessions(SESSIONS);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Tls { config: Arc::new(config), name: server_name(name)? })
    }

    /// Sessions with the server `name`, which may have any certificate. Sessions are not resumed:
    /// there are many servers of probes.
    pub(in crate::transport) fn unverified(name: &str) -> Result<Tls, TlsSetupError> {
        static CONFIG: LazyLock<Result<Arc<ClientConfig>, rustls::Error>> = LazyLock::new(|| {
            let mut provider = rustls::crypto::ring::default_provider();
            provider.cipher_suites = cbc::with_cbc(&provider.cipher_suites);
            let mut config = builder(provider)?
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(AnyServer))
                .with_no_client_auth();
            config.resumption = Resumption::disabled();
            Ok(Arc::new(config))
        });
        match &*CONFIG {
            Ok(config) => Ok(Tls { config: Arc::clone(config), name: server_name(name)? }),
            Err(error) => Err(TlsSetupError::Roots(error.to_string())),
        }
    }

    /// These settings for the server `name`.
    pub(in crate::transport) fn to(&self, name: &str) -> Result<Tls, TlsSetupError> {
        Ok(Tls { config: Arc::clone(&self.config), name: server_name(name)? })
    }

    /// Opens a session over `stream`.
    ///
    /// # Errors
    /// Errors of the stream, and a `rustls::Error` inside of an [`io::Error`].
    pub(in crate::transport) fn handshake(
        &self,
        stream: &mut (impl Read + Write),
    ) -> io::Result<ClientConnection> {
        let connection = ClientConnection::new(Arc::clone(&self.config), self.name.clone());
        let mut connection = connection.map_err(io::Error::other)?;
        while connection.is_handshaking() {
            connection.complete_io(stream)?;
        }
        Ok(connection)
    }
}

fn builder(provider: CryptoProvider) -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, rustls::Error> {
    ClientConfig::builder_with_provider(Arc::new(provider)).with_safe_default_protocol_versions()
}

fn server_name(name: &str) -> Result<ServerName<'static>, TlsSetupError> {
    ServerName::try_from(name.to_owned()).map_err(|_| TlsSetupError::ServerName(name.to_owned()))
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| error.to_string())?;
    if found.is_empty() { Err("no PEM block of type CERTIFICATE".to_owned()) } else { Ok(found) }
}

fn verifier(pem: &[u8]) -> Result<Arc<dyn ServerCertVerifier>, TlsSetupError> {
    let bundle = certificates(pem).map_err(TlsSetupError::Roots)?;
    Ok(Arc::new(Verifier::new(&bundle).map_err(TlsSetupError::Roots)?))
}

/// The bundle of the machine's authorities, PEM.
fn system_bundle() -> Result<Vec<u8>, TlsSetupError> {
    let own = std::env::var_os("SSL_CERT_FILE").map(std::path::PathBuf::from);
    own.into_iter()
        .chain(SYSTEM_BUNDLES.iter().map(std::path::PathBuf::from))
        .find_map(|path| std::fs::read(path).ok())
        .ok_or_else(|| TlsSetupError::Roots("this machine has no bundle of trusted authorities".to_owned()))
}

/// Accepts any certificate, even if its signature or form is not supported: the peer could use a
/// supported one of its own.
#[derive(Debug)]
struct AnyServer;

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        use SignatureScheme as S;
        vec![
            S::ECDSA_NISTP256_SHA256,
            S::ECDSA_NISTP384_SHA384,
            S::ECDSA_NISTP521_SHA512,
            S::ED25519,
            S::ED448,
            S::RSA_PSS_SHA256,
            S::RSA_PSS_SHA384,
            S::RSA_PSS_SHA512,
            S::RSA_PKCS1_SHA256,
            S::RSA_PKCS1_SHA384,
            S::RSA_PKCS1_SHA512,
            S::ECDSA_SHA1_Legacy,
            S::RSA_PKCS1_SHA1,
        ]
    }
}
