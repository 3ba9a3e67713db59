//! The server's side of TLS: sessions over sockets that never block.
//!
//! A client's certificate is requested and the client must prove that it has the key. The signer is
//! verified separately from the handshake, by [`Authorities`]: as in Go a client with an unknown
//! signer gets an HTTP response, and a replaced bundle of authorities takes effect immediately.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, SupportedKxGroup};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{
    CipherSuite, DigitallySignedStruct, DistinguishedName, NamedGroup, ProtocolVersion, ServerConfig,
    ServerConnection, SignatureScheme, SupportedCipherSuite, SupportedProtocolVersion,
};

use super::names;

use crate::util::lock::LockExt;
use crate::util::secret::Secret;

/// Our certificate with its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServingCertificate {
    /// The certificates, our own first.
    pub certificate_chain_pem: String,
    /// The private key.
    pub key_pem: Secret<String>,
    /// Increases with every change.
    pub generation: u64,
}

impl ServingCertificate {
    /// Whether sessions can use it. Without this check each handshake would fail.
    ///
    /// # Errors
    /// When it is not a certificate in PEM with its key.
    pub fn check(&self) -> Result<(), ServeError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        certified(self, &provider).map(drop).map_err(ServeError::Settings)
    }
}

/// Returns the current certificate; `None`: there is none yet.
pub(super) type CurrentCertificate = dyn Fn() -> Option<Arc<ServingCertificate>> + Send + Sync;

/// The settings of sessions.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// `VersionTLS13` rules out 1.2; any other value means 1.2, the oldest supported version.
    pub min_version: String,
    /// Names of cipher suites for TLS 1.2; none: all.
    pub cipher_suites: Vec<String>,
    /// IANA numbers of key exchange groups; none: all.
    pub curves: Vec<u16>,
    /// Whether to request a certificate of clients.
    pub ask_for_certificates: bool,
}

/// Why the settings of a TLS server are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServeError {
    /// Not one of the names is supported.
    #[error("none of the {what} {names:?} is supported; there are {known}")]
    Unsupported {
        /// Cipher suites or curves.
        what: &'static str,
        /// The names as configured.
        names: Vec<String>,
        known: String,
    },
    /// The library's message.
    #[error("TLS settings: {0}")]
    Settings(String),
    /// The authorities are invalid.
    #[error("certificate authorities: {0}")]
    Authorities(String),
}

/// Creates sessions. Clones share it.
#[derive(Clone)]
pub struct Acceptor {
    config: Arc<ServerConfig>,
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Acceptor(..)")
    }
}

impl Acceptor {
    /// Prepares sessions with the certificate that `current` returns when they start.
    ///
    /// # Errors
    /// When none of the configured suites or curves is supported.
    pub fn new(settings: &Settings, current: Box<CurrentCertificate>) -> Result<Acceptor, ServeError> {
        let mut provider = rustls::crypto::ring::default_provider();
        provider.cipher_suites = cipher_suites(provider.cipher_suites, &settings.cipher_suites)?;
        provider.kx_groups = groups(provider.kx_groups, &settings.curves)?;
        let provider = Arc::new(provider);
        // DIFFERS: 1.0 and 1.1 are not supported.
        let all: &[&SupportedProtocolVersion] = &[&rustls::version::TLS13, &rustls::version::TLS12];
        let versions = if settings.min_version == "VersionTLS13" { &all[..1] } else { all };
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(|error| ServeError::Settings(error.to_string()))?;
        let builder = match settings.ask_for_certificates {
            true => builder.with_client_cert_verifier(Arc::new(AnyClientCertificate(Arc::clone(&provider)))),
            false => builder.with_no_client_auth(),
        };
        let resolver =
            CertificateResolver { current, provider, made: Mutex::default(), logged: AtomicBool::new(false) };
        let mut config = builder.with_cert_resolver(Arc::new(resolver));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        // To resume a session, its client's certificate would have to be stored; a client with many
        // requests reuses its connection.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Acceptor { config: Arc::new(config) })
    }

    /// A session before its handshake.
    ///
    /// # Errors
    /// When the library refuses its configuration.
    pub fn session(&self) -> io::Result<Session> {
        ServerConnection::new(Arc::clone(&self.config))
            .map(|connection| Session { connection, incoming: Vec::new(), from: 0, to: 0 })
            .map_err(io::Error::other)
    }
}

fn cipher_suites(
    all: Vec<SupportedCipherSuite>,
    wanted: &[String],
) -> Result<Vec<SupportedCipherSuite>, ServeError> {
    if wanted.is_empty() {
        return Ok(all);
    }
    let old = |suite: &SupportedCipherSuite| suite.version().version == ProtocolVersion::TLSv1_2;
    let known: Vec<String> =
        all.iter().filter(|suite| old(suite)).map(|suite| name_of(suite.suite())).collect();
    // The suites of TLS 1.3 cannot be selected; neither can they in Go.
    let enabled: Vec<_> = all
        .into_iter()
        .filter(|suite| !old(suite) || wanted.iter().any(|name| names_suite(name, suite.suite())))
        .collect();
    for name in wanted.iter().filter(|name| !enabled.iter().any(|suite| names_suite(name, suite.suite()))) {
        log::warn!("tlsCipherSuites: {name} is not supported; there are {}", known.join(", "));
    }
    if !enabled.iter().any(old)
        && !wanted.iter().any(|name| enabled.iter().any(|suite| names_suite(name, suite.suite())))
    {
        let (what, names) = ("cipher suites", wanted.to_vec());
        return Err(ServeError::Unsupported { what, names, known: known.join(", ") });
    }
    Ok(enabled)
}

/// The IANA name: the library's is the same except for the prefix of TLS 1.3.
fn name_of(suite: CipherSuite) -> String {
    format!("{suite:?}").replace("TLS13_", "TLS_")
}

fn names_suite(name: &str, suite: CipherSuite) -> bool {
    // Go also accepts two names that are older than the standard's.
    let name = match name {
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305" => "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305" => "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
        other => other,
    };
    name == name_of(suite)
}

fn groups(
    all: Vec<&'static dyn SupportedKxGroup>,
    wanted: &[u16],
) -> Result<Vec<&'static dyn SupportedKxGroup>, ServeError> {
    if wanted.is_empty() {
        return Ok(all);
    }
    let found = |number: &u16| all.iter().find(|group| group.name() == NamedGroup::from(*number)).copied();
    for number in wanted.iter().filter(|number| found(number).is_none()) {
        log::warn!("tlsCurvePreferences: {number} is not supported here");
    }
    let enabled: Vec<_> = wanted.iter().filter_map(found).collect();
    if enabled.is_empty() {
        let known: Vec<String> = all.iter().map(|group| u16::from(group.name()).to_string()).collect();
        let names = wanted.iter().map(u16::to_string).collect();
        return Err(ServeError::Unsupported { what: "curves", names, known: known.join(", ") });
    }
    Ok(enabled)
}

/// The parsed current certificate, cached until it changes.
struct CertificateResolver {
    current: Box<CurrentCertificate>,
    provider: Arc<CryptoProvider>,
    made: Mutex<Option<(u64, Arc<CertifiedKey>)>>,
    /// Whether a missing certificate was logged.
    logged: AtomicBool,
}

impl fmt::Debug for CertificateResolver {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("CertificateResolver(..)")
    }
}

impl ResolvesServerCert for CertificateResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let Some(current) = (self.current)() else {
            // Logged once: clients must not fill the log.
            if !self.logged.swap(true, Ordering::Relaxed) {
                log::warn!("no serving certificate available for the kubelet");
            }
            return None;
        };
        let mut made = self.made.locked();
        if let Some((generation, key)) = &*made
            && *generation == current.generation
        {
            return Some(Arc::clone(key));
        }
        match certified(&current, &self.provider) {
            Ok(key) => {
                let key = Arc::new(key);
                *made = Some((current.generation, Arc::clone(&key)));
                Some(key)
            }
            Err(reason) => {
                log::error!("the serving certificate cannot be used: {reason}");
                // The last valid one, if there was one.
                made.as_ref().map(|(_, key)| Arc::clone(key))
            }
        }
    }
}

fn certified(from: &ServingCertificate, provider: &Arc<CryptoProvider>) -> Result<CertifiedKey, String> {
    let chain: Result<Vec<_>, _> =
        CertificateDer::pem_slice_iter(from.certificate_chain_pem.as_bytes()).collect();
    let chain = chain.map_err(|error| error.to_string())?;
    let key = from.key_pem.reveal().as_bytes();
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| error.to_string())?;
    if let Some(curve) = names::unsupported_curve(&key) {
        return Err(names::no_such_key(curve));
    }
    CertifiedKey::from_der(chain, key, provider).map_err(|error| error.to_string())
}

/// Accepts any client's certificate if the client has its key.
#[derive(Debug)]
struct AnyClientCertificate(Arc<CryptoProvider>);

impl ClientCertVerifier for AnyClientCertificate {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// A socket that returns `WouldBlock` instead of waiting.
pub trait Stream: Read + Write {}

impl<T: Read + Write> Stream for T {}

/// One session; the caller owns the socket.
#[derive(Debug)]
pub struct Session {
    connection: ServerConnection,
    /// Received bytes that the session has not processed yet, `from..to`: it takes 4 KiB at a time,
    /// and one system call for each would be too many.
    incoming: Vec<u8>,
    from: usize,
    to: usize,
}

/// The size of one read: two records.
const INCOMING: usize = 32 * 1024;
/// The limit of records in a row without data; after that the caller decides whether to continue.
const EMPTY_RECORDS: usize = 64;

impl Session {
    /// Continues the handshake until the socket would block; true once it is complete.
    ///
    /// # Errors
    /// When it failed (the client receives an alert), or the socket did.
    pub fn handshake(&mut self, socket: &mut dyn Stream) -> io::Result<bool> {
        loop {
            let flushed = self.flush(socket)?;
            if !self.connection.is_handshaking() {
                return Ok(flushed);
            }
            if !flushed {
                return Ok(false);
            }
            match self.connection.read_tls(&mut &mut *socket) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => self.process(socket)?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads. `Ok(0)`: the client closed the session; an end without a closing alert is an error.
    ///
    /// # Errors
    /// `WouldBlock` when no data is available, and errors of the socket and of the session.
    pub fn read(&mut self, socket: &mut dyn Stream, into: &mut [u8]) -> io::Result<usize> {
        for _ in 0..EMPTY_RECORDS {
            match self.connection.reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return outcome,
            }
            if self.from == self.to {
                self.incoming.resize(INCOMING, 0);
                (self.from, self.to) = (0, 0);
                match socket.read(&mut self.incoming) {
                    Ok(count) => self.to = count,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Err(error),
                }
            }
            // No bytes are left at the end of the socket; this is how the session detects the end.
            let mut fresh = self.incoming.get(self.from..self.to).unwrap_or_default();
            self.from += self.connection.read_tls(&mut fresh)?;
            self.process(socket)?;
        }
        // The caller checks its deadline before the next call.
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Frees the memory that a session needs only while bytes arrive.
    pub fn release_buffers(&mut self) {
        if self.from == self.to {
            self.incoming = Vec::new();
        }
    }

    /// Accepts bytes if no earlier bytes wait, and sends as many as the socket accepts.
    ///
    /// # Errors
    /// `WouldBlock` while bytes wait, and errors of the socket and of the session.
    pub fn write(&mut self, socket: &mut dyn Stream, bytes: &[u8]) -> io::Result<usize> {
        if !self.flush(socket)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = self.connection.writer().write(bytes)?;
        self.flush(socket)?;
        Ok(count)
    }

    /// Sends the bytes that wait; true when all are sent.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn flush(&mut self, socket: &mut dyn Stream) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut &mut *socket) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Whether records wait to be sent.
    pub fn has_unsent_output(&self) -> bool {
        self.connection.wants_write()
    }

    /// Whether received bytes can be read without the socket.
    pub fn has_buffered(&mut self) -> bool {
        self.from < self.to
            || self.connection.process_new_packets().is_ok_and(|state| state.plaintext_bytes_to_read() > 0)
    }

    /// Queues the closing alert; [`Session::flush`] sends it.
    pub fn close(&mut self) {
        self.connection.send_close_notify();
    }

    /// The client's certificates in DER, its own first; empty if it has none. They are not verified
    /// yet.
    #[must_use]
    pub fn peer_certificates(&self) -> Vec<Vec<u8>> {
        self.connection
            .peer_certificates()
            .unwrap_or_default()
            .iter()
            .map(|certificate| certificate.to_vec())
            .collect()
    }

    fn process(&mut self, socket: &mut dyn Stream) -> io::Result<()> {
        match self.connection.process_new_packets() {
            Ok(_) => Ok(()),
            Err(error) => {
                // The client receives the alert if its socket accepts it now.
                let _ = self.flush(socket);
                Err(io::Error::new(io::ErrorKind::InvalidData, error))
            }
        }
    }
}
