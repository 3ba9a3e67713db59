//! Errors of connections and requests, worded as by Go's network library: events show them.

use std::io;

use rustls::{AlertDescription, CertificateError};

/// The two addresses of a connection, as `local->peer`.
pub(crate) type ConnectionEnds = std::sync::Arc<str>;

/// The message of [`DialError::Tls`] for a handshake that takes too long.
pub(in crate::transport) const HANDSHAKE_TIMEOUT: &str = "handshake timeout";

/// Why there is no connection or no response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum DialError {
    #[error("Get {url:?}: {cause}")]
    Get {
        /// The URL of the request or of a redirect.
        url: String,
        cause: Box<DialError>,
    },
    /// The name has no address.
    #[error("dial tcp: lookup {host}: {detail}")]
    Lookup {
        /// The name, with ` on ` and the DNS server if one was asked.
        host: String,
        /// The resolver's message.
        detail: String,
    },
    /// The peer or the network refused the connection.
    #[error("dial tcp {address}: connect: {message}")]
    Connect {
        address: String,
        /// The kernel's reason.
        message: String,
    },
    /// The proxy could not be reached, or did not connect to the server.
    #[error("proxyconnect tcp: proxy {proxy}: {cause}")]
    Proxy {
        /// The proxy's host and port, without credentials.
        proxy: String,
        cause: Box<DialError>,
    },
    /// The proxy's refusal.
    #[error("{0}")]
    Tunnel(String),
    /// The connection was not accepted in time.
    #[error("dial tcp {address}: i/o timeout")]
    ConnectTimeout {
        /// Address or name, and port.
        address: String,
    },
    /// No response in time.
    #[error("context deadline exceeded (Client.Timeout exceeded while awaiting headers)")]
    Timeout,
    /// The body did not end in time.
    #[error("context deadline exceeded (Client.Timeout or context cancellation while reading body)")]
    BodyTimeout,
    /// The caller's stop token.
    #[error("context canceled")]
    Stopped,
    /// The peer sends HTTP where TLS was expected.
    #[error("http: server gave HTTP response to HTTPS client")]
    PlainHttp,
    /// The TLS handshake failed.
    #[error("tls: {0}")]
    Tls(String),
    /// The connection ended before a response.
    #[error("EOF")]
    Eof,
    /// The connection broke before a response.
    #[error("{op} tcp {ends}: {op}: {message}")]
    Broken {
        /// `read` or `write`.
        op: &'static str,
        /// The addresses of both ends of the connection.
        ends: ConnectionEnds,
        /// The kernel's reason.
        message: String,
    },
    /// The response is not HTTP/1.
    #[error("net/http: HTTP/1.x transport connection broken: {0}")]
    Malformed(String),
    /// The body ended early or does not match its header.
    #[error("{0}")]
    Body(String),
    /// Too many redirects.
    #[error("stopped after 10 redirects")]
    TooManyRedirects,
    /// The request is invalid.
    #[error("{0}")]
    Request(String),
}

impl DialError {
    /// Whether the head of the response was read and only its body failed.
    pub fn is_body(&self) -> bool {
        matches!(self, DialError::Body(_) | DialError::BodyTimeout)
    }

    /// Whether the peer sends HTTP where TLS was expected.
    pub fn is_plain_http(&self) -> bool {
        matches!(self.innermost(), DialError::PlainHttp)
    }

    /// Whether the caller's stop token ended it.
    pub fn is_stopped(&self) -> bool {
        matches!(self.innermost(), DialError::Stopped)
    }

    /// Whether no process listens at the peer's port.
    pub fn is_refused(&self) -> bool {
        matches!(self.innermost(), DialError::Connect { message, .. } if message == "connection refused")
    }

    /// Whether there was no connection: no peer has seen the request.
    pub fn is_unreachable(&self) -> bool {
        matches!(
            self.innermost(),
            DialError::Lookup { .. } | DialError::Connect { .. } | DialError::ConnectTimeout { .. }
        )
    }

    /// Whether the connection broke, or the peer was silent for too long: the next attempt may succeed.
    pub fn is_broken(&self) -> bool {
        match self.innermost() {
            DialError::Tls(message) => {
                [HANDSHAKE_TIMEOUT, "connection reset by peer", "connection timed out", "broken pipe"]
                    .contains(&message.as_str())
            }
            error => matches!(error, DialError::Eof | DialError::Broken { .. } | DialError::Timeout),
        }
    }

    /// Whether a TLS handshake took too long, be it with a proxy.
    pub fn is_late_handshake(&self) -> bool {
        matches!(self.innermost(), DialError::Tls(message) if message == HANDSHAKE_TIMEOUT)
    }

    /// Whether the peer speaks no TLS, or cannot prove which server it is. A handshake that takes too long
    /// is no such error.
    pub fn is_tls(&self) -> bool {
        match self.innermost() {
            DialError::Tls(message) => message != HANDSHAKE_TIMEOUT,
            error => matches!(error, DialError::PlainHttp),
        }
    }

    /// Whether the certificate of the peer is outside of its time: then the clock of this machine may be
    /// wrong.
    pub fn may_be_clock(&self) -> bool {
        // The messages of `of_tls` and of `tls::verify`.
        matches!(self.innermost(), DialError::Tls(message) if message.contains("is the clock of this machine right?"))
    }

    /// The error of a TLS session, worded as by Go.
    pub(in crate::transport) fn of_tls(error: &io::Error) -> DialError {
        let Some(inner) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) else {
            return match error.kind() {
                io::ErrorKind::UnexpectedEof => DialError::Eof,
                _ => DialError::Tls(go_message(error)),
            };
        };
        let x509 = |what: &str| DialError::Tls(format!("failed to verify certificate: x509: {what}"));
        match inner {
            rustls::Error::InvalidCertificate(error) => match error {
                CertificateError::UnknownIssuer => x509("certificate signed by unknown authority"),
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. } => x509(&format!(
                    "certificate has expired or is not yet valid: {error}; is the clock of this machine right?"
                )),
                CertificateError::NotValidForName => x509("certificate is not valid for the server's name"),
                CertificateError::NotValidForNameContext { expected, presented } => x509(&format!(
                    "certificate is valid for {}, not {}",
                    if presented.is_empty() { "no name".to_owned() } else { presented.join(", ") },
                    expected.to_str()
                )),
                CertificateError::Other(error) => x509(&error.to_string()),
                other => x509(&other.to_string()),
            },
            rustls::Error::AlertReceived(alert) => {
                let known = match alert {
                    AlertDescription::BadCertificate => "bad certificate",
                    AlertDescription::CertificateExpired => "expired certificate",
                    AlertDescription::CertificateRequired => "certificate required",
                    AlertDescription::UnknownCA => "unknown certificate authority",
                    // DIFFERS: upstream offers suites with AES-CBC not only to servers of probes.
                    AlertDescription::HandshakeFailure => {
                        "handshake failure; supported are suites of TLS 1.3, and in TLS 1.2 ECDHE with AES-GCM or \
                         ChaCha20-Poly1305 and keys of RSA, P-256, P-384 or Ed25519"
                    }
                    AlertDescription::ProtocolVersion => {
                        "protocol version not supported; supported are TLS 1.2 and 1.3"
                    }
                    other => return DialError::Tls(format!("remote error: {other:?}")),
                };
                DialError::Tls(format!("remote error: {known}"))
            }
            // Usually a server that uses HTTP without TLS.
            rustls::Error::InvalidMessage(_) => {
                DialError::Tls("first record does not look like a TLS handshake".to_owned())
            }
            other => DialError::Tls(other.to_string()),
        }
    }

    fn innermost(&self) -> &DialError {
        match self {
            DialError::Get { cause, .. } | DialError::Proxy { cause, .. } => cause.innermost(),
            other => other,
        }
    }
}

/// An error of the kernel, worded as by Go.
pub(in crate::transport) fn go_message(error: &io::Error) -> String {
    use rustix::io::Errno;
    let known = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::CONNREFUSED) => "connection refused",
        Some(Errno::CONNRESET) => "connection reset by peer",
        Some(Errno::HOSTUNREACH) => "no route to host",
        Some(Errno::NETUNREACH) => "network is unreachable",
        Some(Errno::TIMEDOUT) => "connection timed out",
        Some(Errno::PIPE) => "broken pipe",
        Some(Errno::ADDRNOTAVAIL) => "cannot assign requested address",
        Some(Errno::AFNOSUPPORT) => "address family not supported by protocol",
        Some(Errno::INVAL) => "invalid argument",
        Some(Errno::ACCESS) => "permission denied",
        _ if error.kind() == io::ErrorKind::UnexpectedEof => "unexpected EOF",
        _ => return error.to_string(),
    };
    known.to_owned()
}
