//! A client of the node API: TLS with or without a certificate, HTTP by hand. And the
//! authorities and certificates that it takes.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned};

/// A certificate with its key, PEM.
#[derive(Clone)]
pub(crate) struct Identity {
    pub certificate: String,
    pub key: String,
}

/// Signs certificates.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub pem: String,
}

impl Authority {
    pub(crate) fn new(name: &str) -> Authority {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Authority { issuer: Issuer::new(params, key), pem }
    }

    /// One for a user with groups.
    pub(crate) fn issue(&self, user: &str, groups: &[&str]) -> Identity {
        self.issue_until(user, groups, 2100)
    }

    /// One that ends with the year before.
    pub(crate) fn issue_until(&self, user: &str, groups: &[&str], year: i32) -> Identity {
        self.issue_as(user, groups, year, &[])
    }

    /// A certificate for servers, not for clients.
    pub(crate) fn issue_for_servers(&self, user: &str, groups: &[&str]) -> Identity {
        self.issue_as(user, groups, 2100, &[ExtendedKeyUsagePurpose::ServerAuth])
    }

    fn issue_as(
        &self,
        user: &str,
        groups: &[&str],
        year: i32,
        usages: &[ExtendedKeyUsagePurpose],
    ) -> Identity {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        // The library holds one of each kind, so the second is put another way: two at most.
        let kinds = [DnType::OrganizationName, DnType::CustomDnType(vec![2, 5, 4, 10])];
        assert!(groups.len() <= kinds.len());
        for (kind, group) in kinds.into_iter().zip(groups) {
            params.distinguished_name.push(kind, *group);
        }
        params.distinguished_name.push(DnType::CommonName, user);
        params.extended_key_usages = usages.to_vec();
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(year, 1, 1);
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate").pem();
        Identity { certificate, key: key.serialize_pem() }
    }
}

/// Accepts any server: tests check its certificate themselves.
#[derive(Debug)]
struct AcceptAnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAnyServer {
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
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(
            message,
            certificate,
            signed,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(
            message,
            certificate,
            signed,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Response {
    pub status: u16,
    pub head: String,
    pub body: String,
}

/// How to reach a server.
#[derive(Clone)]
pub(crate) struct TlsClient {
    address: SocketAddr,
    config: Arc<ClientConfig>,
    from: Option<Ipv4Addr>,
}

pub(crate) struct Connection {
    pub stream: StreamOwned<ClientConnection, TcpStream>,
}

/// What comes in. The stream itself reads nothing while something is left that it cannot send.
struct Incoming<'a>(&'a mut StreamOwned<ClientConnection, TcpStream>);

impl Read for Incoming<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let StreamOwned { conn, sock } = &mut *self.0;
        loop {
            match conn.reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return outcome,
            }
            conn.read_tls(sock)?;
            conn.process_new_packets().map_err(io::Error::other)?;
        }
    }
}

impl TlsClient {
    pub(crate) fn new(port: u16, identity: Option<&Identity>) -> TlsClient {
        TlsClient::with_versions(port, identity, rustls::ALL_VERSIONS)
    }

    pub(crate) fn with_versions(
        port: u16,
        identity: Option<&Identity>,
        versions: &[&'static rustls::SupportedProtocolVersion],
    ) -> TlsClient {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .expect("versions that are known")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AcceptAnyServer(provider)));
        let config = match identity {
            None => builder.with_no_client_auth(),
            Some(identity) => {
                let chain = CertificateDer::pem_slice_iter(identity.certificate.as_bytes());
                let chain = chain.collect::<Result<Vec<_>, _>>().expect("a certificate");
                let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).expect("a key");
                builder.with_client_auth_cert(chain, key).expect("certificate and key match")
            }
        };
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        TlsClient { address, config: Arc::new(config), from: None }
    }

    /// Of a server that is not on loopback.
    pub(crate) fn to(address: SocketAddr, identity: Option<&Identity>) -> TlsClient {
        TlsClient { address, ..TlsClient::new(address.port(), identity) }
    }

    /// The same with another address of its own.
    pub(crate) fn bound_to(&self, ip: Ipv4Addr) -> TlsClient {
        TlsClient { from: Some(ip), ..self.clone() }
    }

    /// What it begins a handshake with.
    pub(crate) fn hello(&self) -> Vec<u8> {
        let name = ServerName::try_from("localhost").expect("a name");
        let mut connection = ClientConnection::new(Arc::clone(&self.config), name).expect("a session");
        let mut hello = Vec::new();
        connection.write_tls(&mut hello).expect("a record");
        hello
    }

    /// Connects, and says nothing.
    pub(crate) fn dial(&self) -> io::Result<TcpStream> {
        let Some(ip) = self.from else { return TcpStream::connect(self.address) };
        // Agents that other tests start meanwhile must not inherit it.
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
        rustix::net::bind(&socket, &SocketAddr::from((ip, 0)))?;
        rustix::net::connect(&socket, &self.address)?;
        Ok(TcpStream::from(socket))
    }

    /// Connects and shakes hands.
    pub(crate) fn connect(&self) -> io::Result<Connection> {
        let mut socket = self.dial()?;
        // Only to end a test that hangs.
        socket.set_read_timeout(Some(Duration::from_secs(60)))?;
        socket.set_write_timeout(Some(Duration::from_secs(60)))?;
        let name = ServerName::try_from("localhost").expect("a name");
        let mut connection =
            ClientConnection::new(Arc::clone(&self.config), name).map_err(io::Error::other)?;
        while connection.is_handshaking() {
            connection.complete_io(&mut socket)?;
        }
        Ok(Connection { stream: StreamOwned::new(connection, socket) })
    }

    /// One request on a connection of its own.
    pub(crate) fn get(&self, path: &str) -> Response {
        self.get_with(path, "")
    }

    /// With more header lines, each with its end.
    pub(crate) fn get_with(&self, path: &str, headers: &str) -> Response {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n{headers}\r\n"))
    }

    /// With a bearer token.
    pub(crate) fn get_by(&self, path: &str, token: &str) -> Response {
        self.get_with(path, &format!("Authorization: Bearer {token}\r\n"))
    }

    /// These bytes on a connection of their own.
    pub(crate) fn send(&self, text: &str) -> Response {
        let mut connection = self.connect().expect("a connection");
        connection.ask(text).expect("an answer")
    }
}

impl Connection {
    /// The certificate that the server showed, DER.
    pub(crate) fn shown(&self) -> Vec<u8> {
        let shown = self.stream.conn.peer_certificates().and_then(|all| all.first());
        shown.map(|certificate| certificate.to_vec()).unwrap_or_default()
    }

    /// Sends a request and reads its response.
    pub(crate) fn ask(&mut self, text: &str) -> io::Result<Response> {
        let sent = self.stream.write_all(text.as_bytes()).and_then(|()| self.stream.flush());
        // A refusal may come, and the server go, before all is sent.
        self.read_response(text.starts_with("HEAD")).map_err(|error| sent.err().unwrap_or(error))
    }

    /// Whether the server closes the connection without another response; `false` if it sends something, or
    /// nothing until the limit of a read.
    pub(crate) fn is_closed_by_server(&mut self) -> bool {
        match self.read_response(false) {
            Ok(_) => false,
            Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut),
        }
    }

    pub(crate) fn read_response(&mut self, head_only: bool) -> io::Result<Response> {
        let mut incoming = Incoming(&mut self.stream);
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") {
            if incoming.read(&mut byte)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).map_err(io::Error::other)?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        let value = |wanted: &str| {
            let lines = head.lines().filter_map(|line| line.split_once(": "));
            lines.filter(|(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, value)| value).next()
        };
        let mut body = Vec::new();
        if head_only {
        } else if let Some(length) = value("content-length") {
            body.resize(length.parse().map_err(io::Error::other)?, 0);
            incoming.read_exact(&mut body)?;
        } else {
            // An end without a close_notify is an end, too.
            let _ = incoming.read_to_end(&mut body);
        }
        Ok(Response { status, body: String::from_utf8_lossy(&body).into_owned(), head })
    }
}
