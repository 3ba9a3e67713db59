//! TLS around a socket, whoever answers.
//!
//! DIFFERS: HTTP/1.1 only; upstream takes HTTP/2 where the server offers it.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ureq::http::Uri;
use ureq::tls::TlsConfig;
use ureq::unversioned::resolver::{DefaultResolver, Resolver};
use ureq::unversioned::transport::time::Instant;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, RustlsConnector, Transport,
    TransportAdapter,
};

use super::error::{self, DialError};
use super::socket::{Limit, Socket};

/// A TLS record holds 16 KiB; the library reads it in such pieces.
const BUFFER_BYTES: usize = 4 * 1024;
/// How an answer in the clear begins.
const HTTP: &[u8] = b"HTTP/";

/// Makes a TLS session over `socket` for the server name `host`.
pub(super) fn wrap(
    socket: Socket,
    host: &str,
    limit: &Limit,
) -> Result<impl Read + Write + use<>, DialError> {
    let host = match host {
        "" => "127.0.0.1".to_owned(),
        host if host.contains(':') => format!("[{host}]"),
        host => host.to_owned(),
    };
    let uri: Uri = format!("https://{host}/")
        .parse()
        .map_err(|error| DialError::Tls(format!("server name: {error}")))?;
    let config = ureq::Agent::config_builder()
        .tls_config(
            TlsConfig::builder()
                .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .disable_verification(true)
                .build(),
        )
        .build();
    let resolver = DefaultResolver::default();
    let details = ConnectionDetails {
        uri: &uri,
        addrs: resolver.empty(),
        config: &config,
        request_level: false,
        resolver: &resolver,
        now: Instant::now(),
        // The socket has its own deadline.
        timeout: NextTimeout::default(),
        current_time: Arc::new(Instant::now),
        run_connector: Arc::new(|_| Err(ureq::Error::ConnectionFailed)),
        register_shutdown: Arc::new(|_| Ok(())),
    };
    let in_the_clear = Arc::new(AtomicUsize::new(0));
    let under = Under {
        socket,
        buffers: LazyBuffers::new(BUFFER_BYTES, BUFFER_BYTES),
        received: 0,
        in_the_clear: Arc::clone(&in_the_clear),
    };
    // A connector per session: it would keep the sessions of hundreds of servers.
    let connected = RustlsConnector::default().connect(&details, Some(under));
    match connected {
        Ok(Some(transport @ Either::B(_))) => {
            Ok(Session(TransportAdapter::new(transport, Arc::new(Instant::now))))
        }
        _ if limit.stop.is_stopped() => Err(DialError::Stopped),
        _ if limit.is_over() => Err(DialError::Timeout),
        _ if in_the_clear.load(Ordering::Relaxed) >= HTTP.len() => Err(DialError::PlainHttp),
        Ok(_) => Err(DialError::Tls("no session".to_owned())),
        Err(error) => Err(failed(error)),
    }
}

fn failed(error: ureq::Error) -> DialError {
    let error = error.into_io();
    match error.kind() {
        io::ErrorKind::UnexpectedEof => DialError::Eof,
        _ => DialError::Tls(error::words(&error)),
    }
}

/// The established session.
struct Session<T: Transport>(TransportAdapter<T>);

impl<T: Transport> Read for Session<T> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.0.read(into) {
            // Many servers close without saying so first; lengths and chunks show what is missing.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
            outcome => outcome,
        }
    }
}

impl<T: Transport> Write for Session<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// The socket under the session, in the library's terms.
struct Under {
    socket: Socket,
    buffers: LazyBuffers,
    received: usize,
    /// How many of the first bytes are those of an answer in the clear.
    in_the_clear: Arc<AtomicUsize>,
}

impl fmt::Debug for Under {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.socket.fmt(out)
    }
}

impl Transport for Under {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, _: NextTimeout) -> Result<(), ureq::Error> {
        let output = self.buffers.output();
        let output = output.get(..amount).unwrap_or(output);
        Ok(self.socket.write_all(output)?)
    }

    fn await_input(&mut self, _: NextTimeout) -> Result<bool, ureq::Error> {
        let into = self.buffers.input_append_buf();
        let count = self.socket.read(into)?;
        let same = into
            .iter()
            .take(count)
            .zip(HTTP.iter().skip(self.received))
            .take_while(|(read, wanted)| read == wanted)
            .count();
        if self.in_the_clear.load(Ordering::Relaxed) == self.received {
            self.in_the_clear.fetch_add(same, Ordering::Relaxed);
        }
        self.received = self.received.saturating_add(count);
        self.buffers.input_appended(count);
        Ok(count > 0)
    }

    fn is_open(&mut self) -> bool {
        true
    }
}
