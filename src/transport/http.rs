//! A plain GET with headers, limits and a way to break it off, through the HTTP library.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

use super::api::system_bundle;

/// Name resolution in progress cannot be broken off, so it gets less than a stop may take.
const RESOLVE_LIMIT: Duration = Duration::from_secs(2);
/// Likewise a TCP connect.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// Trusts whom the machine trusts.
fn tls() -> TlsConfig {
    let pem = system_bundle().unwrap_or_else(|error| {
        log::warn!("no https: {error}");
        Vec::new()
    });
    let roots = parse_pem(&pem).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    TlsConfig::builder()
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .root_certs(RootCerts::Specific(Arc::new(roots.collect())))
        .build()
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[error("GET {url} failed")]
pub struct GetError {
    url: String,
    source: ureq::Error,
}

/// An answer of whatever status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The HTTP status code.
    pub status: u16,
    /// The body, at most the limit plus one byte: then it was longer.
    pub body: Vec<u8>,
}

/// Asks one URL again and again.
#[derive(Clone)]
pub struct Getter {
    agent: ureq::Agent,
    url: String,
    headers: BTreeMap<String, Vec<String>>,
    max_body_bytes: usize,
}

impl Getter {
    /// A getter whose requests end within `timeout`, the body included.
    #[must_use]
    pub fn new(
        url: &str,
        headers: &BTreeMap<String, Vec<String>>,
        timeout: Duration,
        max_body_bytes: usize,
    ) -> Self {
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(timeout))
            .timeout_resolve(Some(RESOLVE_LIMIT.min(timeout)))
            .timeout_connect(Some(CONNECT_LIMIT.min(timeout)))
            .http_status_as_error(false)
            .tls_config(tls())
            // Between two polls a connection would only hold a socket open.
            .max_idle_connections(0)
            .user_agent(concat!("coracle/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        Getter { agent, url: url.to_owned(), headers: headers.clone(), max_body_bytes }
    }

    /// Sends one request; redirects are followed.
    ///
    /// # Errors
    /// When there is no complete answer in time, or the URL or a header is none.
    pub fn get(&self) -> Result<Answer, GetError> {
        self.answer().map_err(|source| GetError { url: self.url.clone(), source })
    }

    fn answer(&self) -> Result<Answer, ureq::Error> {
        let mut request = self.agent.get(&self.url);
        for (name, values) in &self.headers {
            for value in values {
                request = request.header(name, value);
            }
        }
        let mut response = request.call()?;
        let status = response.status().as_u16();
        let limit = self.max_body_bytes as u64 + 1;
        let mut body = Vec::new();
        let mut reader = std::io::Read::take(response.body_mut().as_reader(), limit);
        std::io::Read::read_to_end(&mut reader, &mut body)?;
        Ok(Answer { status, body })
    }

    /// Breaks off a request in progress and refuses later ones. Does not block.
    pub fn shut_down(&self) {
        self.agent.clone().shutdown();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::threads::{OnDeath, Stack, spawn};
    use std::io::{Read, Write};
    use std::net::TcpListener;

    /// Serves `answers` one per connection and hands back the requests.
    fn serve(answers: Vec<Vec<u8>>) -> (String, crossbeam_channel::Receiver<String>, impl Drop) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/pods", listener.local_addr().unwrap());
        let (tx, rx) = crossbeam_channel::bounded(answers.len());
        let running = spawn("t/server", Stack::Small, OnDeath::Nobody, move |_| {
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = Vec::new();
                let mut byte = [0];
                while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
                    request.push(byte[0]);
                }
                let _ = stream.write_all(&answer);
                let _ = tx.send(String::from_utf8(request).unwrap());
                if answer.is_empty() {
                    // No answer at all: wait for the client to give up.
                    let _ = stream.read(&mut byte);
                }
            }
        })
        .unwrap();
        (url, rx, running)
    }

    fn getter(url: &str) -> Getter {
        let headers = BTreeMap::from([("X-Key".to_owned(), vec!["a".to_owned(), "b".to_owned()])]);
        Getter::new(url, &headers, Duration::from_secs(10), 8)
    }

    #[test]
    fn sends_headers_and_takes_any_status() {
        let (url, requests, _server) = serve(vec![
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi".to_vec(),
            b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n".to_vec(),
            b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n01234567890123456789".to_vec(),
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf".to_vec(),
        ]);
        let getter = getter(&url);
        assert_eq!(getter.get().unwrap(), Answer { status: 200, body: b"hi".to_vec() });
        let request = requests.recv_timeout(Duration::from_secs(10)).unwrap().to_lowercase();
        assert!(request.starts_with("get /pods http/1.1"), "{request}");
        assert!(request.contains("x-key: a") && request.contains("x-key: b"), "{request}");
        assert_eq!(getter.get().unwrap().status, 503);
        assert_eq!(getter.get().unwrap().body.len(), 9, "one byte over the limit");
        assert!(getter.get().is_err(), "cut short");
    }

    #[test]
    fn a_request_can_be_broken_off() {
        let (url, requests, _server) = serve(vec![Vec::new()]);
        let getter = getter(&url);
        let breaker = getter.clone();
        let (tx, rx) = crossbeam_channel::bounded(1);
        let _asking = spawn("t/get", Stack::Large, OnDeath::Nobody, move |_| {
            let _ = tx.send(getter.get().is_err());
        })
        .unwrap();
        requests.recv_timeout(Duration::from_secs(10)).unwrap();
        breaker.shut_down();
        assert_eq!(rx.recv_timeout(Duration::from_secs(5)), Ok(true));
        assert!(breaker.get().is_err());
    }

    #[test]
    fn nonsense_is_an_error() {
        for url in ["", "nonsense", "ftp://127.0.0.1/", "http://", "http://127.0.0.1:1/"] {
            assert!(getter(url).get().is_err(), "{url}");
        }
        let headers = BTreeMap::from([("bad name\n".to_owned(), vec!["x".to_owned()])]);
        assert!(Getter::new("http://127.0.0.1:1/", &headers, Duration::from_secs(1), 1).get().is_err());
    }
}
