//! GET requests with headers, limits and cancellation (Go: net/http's Client, as
//! pkg/kubelet/config/http.go uses it).
//!
//! The codec is that of probes (`dial`) and the connections are those to the API server (`api`):
//! each request opens one, through a proxy if the environment has one, and closes it.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Write};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::api::route::{Route, Stream};
use super::api::{Breaker, Use};
use super::dial::url::Url;
use super::dial::{DialError, Fields, MAX_REDIRECTS, Scheme};
use super::http1::ResponseHead;
use super::proxy::{Environment, Proxy, ProxyScheme};
use super::tls::client::Tls;
use super::tls::{Roots, TlsSetupError};

const USER_AGENT: &str = concat!("coracle/", env!("CARGO_PKG_VERSION"));

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct GetError(String);

impl From<TlsSetupError> for GetError {
    fn from(error: TlsSetupError) -> Self {
        GetError(error.to_string())
    }
}

impl From<DialError> for GetError {
    fn from(error: DialError) -> Self {
        GetError(match error {
            DialError::Timeout => "no complete response in time".to_owned(),
            other => other.to_string(),
        })
    }
}

/// A response of any status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GetResponse {
    /// The HTTP status code.
    pub status: u16,
    /// The body. If it is longer than the limit, its first bytes, one more than the limit.
    pub body: Vec<u8>,
    /// The proxy that forwarded it and could have forged it, as `host:port`.
    pub proxy: Option<String>,
}

/// Sends GET requests for one URL.
#[derive(Clone)]
pub struct Getter {
    url: String,
    headers: Vec<(String, String)>,
    timeout: Duration,
    max_body_bytes: usize,
    dialer: Arc<Dialer>,
}

impl Getter {
    /// A getter whose requests end within `timeout`, the body included. It trusts the certificate
    /// authorities of the machine and uses the proxies of the environment.
    #[must_use]
    pub fn new(
        url: &str,
        headers: &BTreeMap<String, Vec<String>>,
        timeout: Duration,
        max_body_bytes: usize,
    ) -> Self {
        let environment = Environment::of_process().clone();
        Getter::with(url, headers, timeout, max_body_bytes, Roots::System, environment)
    }

    fn with(
        url: &str,
        headers: &BTreeMap<String, Vec<String>>,
        timeout: Duration,
        max_body_bytes: usize,
        roots: Roots,
        environment: Environment,
    ) -> Self {
        let headers = headers
            .iter()
            .flat_map(|(name, values)| values.iter().map(|value| (name.clone(), value.clone())))
            .collect();
        let dialer = Dialer { environment, roots, tls: OnceLock::new(), breaker: Breaker::default() };
        Getter { url: url.to_owned(), headers, timeout, max_body_bytes, dialer: Arc::new(dialer) }
    }

    /// Sends one request; redirects are followed, but not to http when this URL is https.
    ///
    /// # Errors
    /// When there is no complete response in time, or the URL or a header is invalid.
    pub fn get(&self) -> Result<GetResponse, GetError> {
        let now = Instant::now();
        let deadline = now.checked_add(self.timeout).unwrap_or(now);
        let (mut url, authorization) =
            Url::parse(&self.url).ok_or_else(|| GetError(format!("invalid URL {:?}", self.url)))?;
        let mut fields = Fields::of(&self.headers, USER_AGENT)?;
        if let Some(value) = authorization {
            fields.authorize(value);
        }
        let secure = url.scheme == Scheme::Https;
        for _ in 0..=MAX_REDIRECTS {
            let route = self.dialer.route(&url)?;
            let forwarded = route.forwarder().map(|proxy| {
                let field = |value| format!("Proxy-Authorization: {value}\r\n");
                proxy.authorization().map(field).unwrap_or_default()
            });
            let request = fields.request(&url, forwarded.as_deref());
            let (response, location) = self.exchange(&route, &request, deadline)?;
            let Some(location) = location.filter(|_| matches!(response.status, 301..=303 | 307 | 308)) else {
                return Ok(response);
            };
            let next = url.redirect(&location);
            let next =
                next.ok_or_else(|| GetError(format!("failed to parse Location header {location:?}")))?;
            // DIFFERS: upstream follows a redirect from https to http, where any host on the way can
            // insert pods into the response.
            if secure && next.scheme == Scheme::Http {
                return Err(GetError("a redirect from https to http is not followed".to_owned()));
            }
            fields.redirected(&url, &next, &location);
            fields.without_secrets();
            url = next;
        }
        Err(DialError::TooManyRedirects.into())
    }

    /// One request. Returns the response, and the target of its redirect.
    fn exchange(
        &self,
        route: &Route,
        request: &[u8],
        deadline: Instant,
    ) -> Result<(GetResponse, Option<String>), DialError> {
        let breaker = &self.dialer.breaker;
        let mut stream = route.open(deadline, breaker, Use::Call)?;
        stream
            .write_all(request)
            .and_then(|()| stream.flush())
            .map_err(|error| stream.failed(&error, "write", breaker))?;
        let mut reader = BufReader::with_capacity(8 * 1024, stream);
        let read = self.read(&mut reader);
        let (head, body) = read.map_err(|error| reader.get_mut().failed(&error, "read", breaker))?;
        let mut locations =
            head.fields.all("Location").map(|value| String::from_utf8_lossy(value).into_owned());
        let location = locations.find(|value| !value.is_empty());
        let proxy = route.forwarder().map(Proxy::address);
        Ok((GetResponse { status: head.status, body, proxy }, location))
    }

    fn read(&self, reader: &mut BufReader<Stream>) -> io::Result<(ResponseHead, Vec<u8>)> {
        let head = ResponseHead::read(reader)?;
        let body = head.framing()?.read_up_to(reader, self.max_body_bytes.saturating_add(1))?;
        Ok((head, body))
    }

    /// Ends a request in progress and refuses later ones. Does not block.
    pub fn shut_down(&self) {
        self.dialer.breaker.trip();
    }
}

/// Chooses the connections.
struct Dialer {
    environment: Environment,
    roots: Roots,
    /// Created for the first https URL.
    tls: OnceLock<Tls>,
    breaker: Breaker,
}

impl Dialer {
    fn tls(&self, host: &str) -> Result<Tls, TlsSetupError> {
        let tls = match self.tls.get() {
            Some(tls) => tls,
            None => {
                let first = Tls::new(&self.roots, None, host)?;
                self.tls.get_or_init(|| first)
            }
        };
        tls.to(host)
    }

    fn route(&self, url: &Url) -> Result<Route, TlsSetupError> {
        let https = url.scheme == Scheme::Https;
        let tls = if https { Some(self.tls(&url.host)?) } else { None };
        let route = Route::direct(&url.host, url.port(), tls, "the manifest URL");
        let Some(proxy) = self.environment.proxy_for(https, &url.host, url.port()) else { return Ok(route) };
        let tls = match proxy.scheme {
            ProxyScheme::Https => Some(self.tls(&proxy.host)?),
            ProxyScheme::Http | ProxyScheme::Socks5 => None,
        };
        Ok(route.through(proxy.clone(), tls))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::threads::{OnDeath, Stack, spawn};
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use rustls::{ServerConfig, ServerConnection, StreamOwned};
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    const LIMIT: Duration = Duration::from_secs(10);

    /// Sends one of `answers` on each connection, and returns the requests.
    fn serve(answers: Vec<Vec<u8>>) -> (String, crossbeam_channel::Receiver<String>, impl Drop) {
        serve_over(answers, |socket| socket)
    }

    /// Like `serve`, over TLS with a certificate for 127.0.0.1.
    fn serve_tls(answers: Vec<Vec<u8>>) -> (String, crossbeam_channel::Receiver<String>, impl Drop) {
        let chain = CertificateDer::from_pem_slice(include_bytes!("tls/testdata/server.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_slice(include_bytes!("tls/testdata/server.key")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![chain], key)
            .unwrap();
        let config = Arc::new(config);
        let (url, requests, running) = serve_over(answers, move |socket| {
            StreamOwned::new(ServerConnection::new(Arc::clone(&config)).unwrap(), socket)
        });
        (url.replacen("http:", "https:", 1), requests, running)
    }

    fn serve_over<S: Read + Write>(
        answers: Vec<Vec<u8>>,
        wrap: impl Fn(TcpStream) -> S + Send + 'static,
    ) -> (String, crossbeam_channel::Receiver<String>, impl Drop) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (tx, rx) = crossbeam_channel::bounded(answers.len());
        let running = spawn("t/server", Stack::Large, OnDeath::Unsupervised, move |stop| {
            for answer in answers {
                let (socket, _) = listener.accept().unwrap();
                if stop.is_stopped() {
                    return;
                }
                let mut stream = wrap(socket);
                let mut request = Vec::new();
                let mut byte = [0];
                while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|count| count == 1)
                {
                    request.push(byte[0]);
                }
                let _ = stream.write_all(&answer);
                let _ = stream.flush();
                let _ = tx.send(String::from_utf8(request).unwrap());
                if answer.is_empty() {
                    // No response at all: wait until the client closes the connection.
                    let _ = stream.read(&mut byte);
                }
            }
        })
        .unwrap()
        .with_waker(Box::new(move || drop(TcpStream::connect(address))));
        (format!("http://{address}/pods"), rx, running)
    }

    fn getter(url: &str) -> Getter {
        getter_behind(url, &[])
    }

    /// A getter with these environment variables.
    fn getter_behind(url: &str, variables: &[(&str, &str)]) -> Getter {
        let headers = BTreeMap::from([("X-Key".to_owned(), vec!["a".to_owned(), "b".to_owned()])]);
        let roots = Roots::Pem(include_bytes!("tls/testdata/ca.pem").to_vec());
        let environment = Environment::new(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        });
        Getter::with(url, &headers, LIMIT, 8, roots, environment)
    }

    fn answered(body: &str) -> Vec<u8> {
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
    }

    fn redirect(location: &str) -> Vec<u8> {
        format!("HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n").into_bytes()
    }

    /// `host:port` of `http://host:port/pods`.
    fn address(url: &str) -> &str {
        url.split('/').nth(2).unwrap()
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
        assert_eq!(getter.get().unwrap(), GetResponse { status: 200, body: b"hi".to_vec(), proxy: None });
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
        let _asking = spawn("t/get", Stack::Large, OnDeath::Unsupervised, move |_| {
            let _ = tx.send(getter.get().is_err());
        })
        .unwrap();
        requests.recv_timeout(Duration::from_secs(10)).unwrap();
        breaker.shut_down();
        assert_eq!(rx.recv_timeout(Duration::from_secs(5)), Ok(true));
        assert!(breaker.get().is_err());
    }

    #[test]
    fn invalid_urls_and_headers_are_errors() {
        for url in ["", "nonsense", "ftp://127.0.0.1/", "http://", "http://127.0.0.1:1/"] {
            assert!(getter(url).get().is_err(), "{url}");
        }
        let headers = BTreeMap::from([("bad name\n".to_owned(), vec!["x".to_owned()])]);
        assert!(Getter::new("http://127.0.0.1:1/", &headers, Duration::from_secs(1), 1).get().is_err());
        let error = getter("http://127.0.0.1:1/").get().unwrap_err().to_string();
        assert_eq!(error, "dial tcp 127.0.0.1:1: connect: connection refused");
    }

    #[test]
    fn redirects_never_lead_from_https_to_http() {
        let (plain, plain_requests, _plain) = serve(vec![answered("plain"), answered("plain")]);
        let (secure, _, _secure) = serve_tls(vec![redirect(&plain), answered("tls")]);
        let error = getter(&secure).get().unwrap_err().to_string();
        assert_eq!(error, "a redirect from https to http is not followed");
        assert!(plain_requests.is_empty(), "no request was sent without TLS");
        let (first, _, _first) = serve(vec![redirect(&plain), redirect(&secure)]);
        assert_eq!(getter(&first).get().unwrap().body, b"plain");
        assert_eq!(getter(&first).get().unwrap().body, b"tls");
    }

    #[test]
    fn http_proxy_is_sent_whole_url() {
        let (proxy, requests, _proxy) =
            serve(vec![answered("hi"), b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n".to_vec()]);
        let address = address(&proxy);
        let with_password = format!("http://me:word@{address}");
        let url = "http://user:other@manifests.example:8080/pods?a=b";
        let getter = getter_behind(url, &[("HTTP_PROXY", &with_password)]);
        let answer = getter.get().unwrap();
        assert_eq!(
            answer,
            GetResponse { status: 200, body: b"hi".to_vec(), proxy: Some(address.to_owned()) }
        );
        let request = requests.recv_timeout(LIMIT).unwrap();
        let start = "GET http://manifests.example:8080/pods?a=b HTTP/1.1\r\n\
                     Proxy-Authorization: Basic bWU6d29yZA==\r\n";
        assert!(request.starts_with(start), "{request}");
        let lower = request.to_lowercase();
        assert!(lower.contains("host: manifests.example:8080\r\n"), "{request}");
        assert!(lower.contains("x-key: a") && lower.contains("\r\nauthorization: basic "), "{request}");
        let refused = getter.get().unwrap();
        assert_eq!((refused.status, refused.proxy.as_deref()), (407, Some(address)));
    }

    #[test]
    fn https_proxy_variable_means_connect() {
        let refusal = b"HTTP/1.1 403 Forbidden\r\n\r\n".to_vec();
        let (proxy, requests, _proxy) = serve(vec![refusal]);
        let address = address(&proxy);
        let with_password = format!("http://me:word@{address}");
        let getter = getter_behind("https://manifests.example/pods", &[("https_proxy", &with_password)]);
        let error = getter.get().unwrap_err().to_string();
        assert_eq!(
            error,
            format!("proxyconnect tcp: proxy {address}: CONNECT manifests.example:443: 403 Forbidden")
        );
        let request = requests.recv_timeout(LIMIT).unwrap();
        assert!(request.starts_with("CONNECT manifests.example:443 HTTP/1.1\r\n"), "{request}");
        assert!(request.contains("\r\nProxy-Authorization: Basic bWU6d29yZA==\r\n"), "{request}");
        assert!(!request.to_lowercase().contains("x-key"), "headers are only for the server");
    }

    #[test]
    fn each_redirect_selects_its_own_proxy() {
        let (direct, _, _direct) = serve(vec![answered("direct")]);
        let (proxy, requests, _proxy) = serve(vec![redirect(&direct)]);
        let getter = getter_behind("http://manifests.example/pods", &[("HTTP_PROXY", address(&proxy))]);
        let answer = getter.get().unwrap();
        assert_eq!((answer.body.as_slice(), answer.proxy), (&b"direct"[..], None));
        assert!(requests.recv_timeout(LIMIT).unwrap().starts_with("GET http://manifests.example/pods "));
    }
}
