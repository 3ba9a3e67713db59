//! An HTTPS server on loopback with scripted responses, for tests of other rooms.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::api::{Endpoint, Roots};
use crate::util::threads::{OnDeath, Running, Stack, spawn};

/// The place of a server on loopback without TLS.
pub(crate) fn plain_endpoint(port: u16) -> Endpoint {
    Endpoint {
        https: false,
        host: "127.0.0.1".to_owned(),
        port,
        roots: Roots::System,
        server_name: None,
        identity: None,
        proxy: None,
    }
}

/// The authority that signed the certificate of [`HttpsServer`], which is for `127.0.0.1`.
pub(crate) const AUTHORITY: &str = include_str!("tls/testdata/ca.pem");
/// An authority that has signed nothing of it.
pub(crate) const OTHER_AUTHORITY: &str = include_str!("tls/testdata/other.pem");

/// Ends a test that hangs.
const LIMIT: Duration = Duration::from_secs(20);

/// The server: each connection has one request.
pub(crate) struct HttpsServer {
    port: u16,
    requests: Receiver<String>,
    _running: Running,
}

impl HttpsServer {
    /// Sends what `respond` returns for the number of a request, from 0 on, and its head.
    pub(crate) fn start(mut respond: impl FnMut(usize, &str) -> Vec<u8> + Send + 'static) -> HttpsServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let chain = vec![CertificateDer::from_pem_slice(include_bytes!("tls/testdata/server.pem")).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(include_bytes!("tls/testdata/server.key")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        let config = Arc::new(config);
        let (sender, requests) = bounded(100);
        let running = spawn("t/https", Stack::Large, OnDeath::Unsupervised, move |stop| {
            let mut number = 0;
            while let Ok((socket, _)) = listener.accept() {
                if stop.is_stopped() {
                    return;
                }
                socket.set_read_timeout(Some(LIMIT)).unwrap();
                socket.set_write_timeout(Some(LIMIT)).unwrap();
                let connection = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
                let mut stream = rustls::StreamOwned::new(connection, socket);
                // A client that does not trust the certificate sends no request.
                let Some(head) = head(&mut stream) else { continue };
                let response = respond(number, &head);
                number += 1;
                let _ = sender.try_send(head);
                // A client may end a response that is too long for it.
                if stream.write_all(&response).is_ok() {
                    stream.conn.send_close_notify();
                    let _ = stream.flush();
                }
            }
        })
        .unwrap()
        .with_waker(Box::new(move || drop(TcpStream::connect(("127.0.0.1", port)))));
        HttpsServer { port, requests, _running: running }
    }

    /// `127.0.0.1:PORT`.
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The heads of the requests since the last call.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.requests.try_iter().collect()
    }
}

fn head(stream: &mut impl Read) -> Option<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte).ok()? == 0 {
            return None;
        }
        head.push(byte[0]);
    }
    String::from_utf8(head).ok()
}

/// A response with this status and JSON body, after which the connection ends.
pub(crate) fn json_response(status: u16, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "HTTP/1.1 {status} Status\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    )
    .into_bytes()
}
