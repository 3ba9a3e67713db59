//! GET requests with headers, limits and cancellation: the HTTP library over our own connections
//! (Go: net/http's Client, as pkg/kubelet/config/http.go uses it).
//!
//! The library writes requests, reads responses and follows redirects. Its proxy support is not
//! used: it sends CONNECT also for http URLs, and interprets `NO_PROXY` differently. Its interface
//! for connections may change with any version, so `Cargo.toml` pins one version.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ureq::ResponseExt;
use ureq::http::Uri;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport,
};

use super::api::route::{Route, Stream};
use super::api::{Breaker, Use};
use super::dial::words;
use super::proxy::{Environment, Proxy, ProxyScheme};
use super::tls::client::Tls;
use super::tls::{Roots, TlsSetupError};

/// Buffer size in each direction; the library accepts no larger head. Allocated only during a request.
const BUFFER_BYTES: usize = 64 * 1024;

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct GetError(String);

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
    agent: ureq::Agent,
    url: String,
    headers: BTreeMap<String, Vec<String>>,
    max_body_bytes: usize,
    environment: Arc<Environment>,
    breaker: Breaker,
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
        let secure = url.get(..8).is_some_and(|start| start.eq_ignore_ascii_case("https://"));
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            // DIFFERS: upstream follows a redirect from https to http, where any host on the way
            // can insert pods into the response.
            .https_only(secure)
            .proxy(None)
            // Between two polls an idle connection would be useless.
            .max_idle_connections(0)
            .user_agent(concat!("coracle/", env!("CARGO_PKG_VERSION")))
            .build();
        let (environment, breaker) = (Arc::new(environment), Breaker::default());
        let dialer = Dialer {
            environment: Arc::clone(&environment),
            roots,
            tls: OnceLock::new(),
            breaker: breaker.clone(),
        };
        let agent = ureq::Agent::with_parts(config, dialer, NoResolver);
        Getter { agent, url: url.to_owned(), headers: headers.clone(), max_body_bytes, environment, breaker }
    }

    /// Sends one request; redirects are followed, but not to http when this URL is https.
    ///
    /// # Errors
    /// When there is no complete response in time, or the URL or a header is invalid.
    pub fn get(&self) -> Result<GetResponse, GetError> {
        self.answer().map_err(|error| GetError(explain(error)))
    }

    fn answer(&self) -> Result<GetResponse, ureq::Error> {
        let mut request = self.agent.get(&self.url);
        for (name, values) in &self.headers {
            for value in values {
                request = request.header(name, value);
            }
        }
        let mut response = request.call()?;
        let status = response.status().as_u16();
        let target = Target::of(response.get_uri());
        let proxy = target.and_then(|target| target.forwarder(&self.environment)).map(Proxy::address);
        let limit = self.max_body_bytes as u64 + 1;
        let mut body = Vec::new();
        response.body_mut().as_reader().take(limit).read_to_end(&mut body)?;
        Ok(GetResponse { status, body, proxy })
    }

    /// Ends a request in progress and refuses later ones. Does not block.
    pub fn shut_down(&self) {
        self.breaker.trip();
    }
}

fn explain(error: ureq::Error) -> String {
    match error {
        ureq::Error::RequireHttpsOnly(_) => "a redirect from https to http is not followed".to_owned(),
        ureq::Error::Timeout(_) => "no complete response in time".to_owned(),
        ureq::Error::Other(inner) => inner.to_string(),
        ureq::Error::Io(error) => words(&error),
        other => other.to_string(),
    }
}

/// The target of a URL.
struct Target<'a> {
    https: bool,
    /// The host, without brackets.
    host: &'a str,
    port: u16,
    /// Host and port as in the URL, without user and password.
    authority: &'a str,
}

impl Target<'_> {
    fn of(uri: &Uri) -> Option<Target<'_>> {
        let https = uri.scheme_str() == Some("https");
        let host = uri.host()?;
        let bare = host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(host);
        let authority = uri.authority()?.as_str();
        let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        let port = uri.port_u16().unwrap_or(if https { 443 } else { 80 });
        Some(Target { https, host: bare, port, authority })
    }

    fn proxy<'e>(&self, environment: &'e Environment) -> Option<&'e Proxy> {
        environment.proxy_for(self.https, self.host, self.port)
    }

    /// The HTTP proxy that gets the request itself, without CONNECT.
    fn forwarder<'e>(&self, environment: &'e Environment) -> Option<&'e Proxy> {
        self.proxy(environment).filter(|proxy| !self.https && proxy.scheme != ProxyScheme::Socks5)
    }
}

/// Opens connections for the library.
struct Dialer {
    environment: Arc<Environment>,
    roots: Roots,
    /// Created for the first https URL.
    tls: OnceLock<Tls>,
    breaker: Breaker,
}

impl fmt::Debug for Dialer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Dialer")
    }
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

    fn route(&self, target: &Target<'_>) -> Result<Route, TlsSetupError> {
        let tls = if target.https { Some(self.tls(target.host)?) } else { None };
        let route = Route::direct(target.host, target.port, tls, "the manifest URL");
        let Some(proxy) = target.proxy(&self.environment) else { return Ok(route) };
        let tls = match proxy.scheme {
            ProxyScheme::Https => Some(self.tls(&proxy.host)?),
            ProxyScheme::Http | ProxyScheme::Socks5 => None,
        };
        Ok(route.through(proxy.clone(), tls))
    }
}

impl Connector<()> for Dialer {
    type Out = Line;

    fn connect(&self, details: &ConnectionDetails, _: Option<()>) -> Result<Option<Line>, ureq::Error> {
        let target =
            Target::of(details.uri).ok_or_else(|| ureq::Error::BadUri("it names no host".to_owned()))?;
        let route = self.route(&target).map_err(|error| ureq::Error::Other(Box::new(error)))?;
        let stream = route
            .open(deadline(&details.timeout), &self.breaker, Use::Call)
            .map_err(|error| ureq::Error::Other(Box::new(error)))?;
        let forward = route.forwarder().map(|proxy| Forward {
            origin: format!("http://{}", target.authority),
            authorization: proxy.authorization(),
        });
        let buffers = LazyBuffers::new(BUFFER_BYTES, BUFFER_BYTES);
        Ok(Some(Line { stream, secure: target.https, forward, buffers }))
    }
}

fn deadline(timeout: &NextTimeout) -> Instant {
    let now = Instant::now();
    now.checked_add(*timeout.after).unwrap_or(now)
}

/// Does no look-up: the route does it, and behind a proxy this node may not know the server's name.
#[derive(Debug)]
struct NoResolver;

impl Resolver for NoResolver {
    fn resolve(
        &self,
        _: &Uri,
        _: &ureq::config::Config,
        _: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        Ok(self.empty())
    }
}

/// Converts a request into one for a proxy (RFC 9112, section 3.2.2).
struct Forward {
    /// Scheme and authority of the target.
    origin: String,
    /// The value of `Proxy-Authorization`.
    authorization: Option<String>,
}

impl Forward {
    /// Converts a head that begins with `METHOD /path HTTP/1.1` and a line end.
    fn apply(&self, head: &[u8]) -> Vec<u8> {
        let (method, rest) = head.split_at(head.iter().position(|byte| *byte == b' ').map_or(0, |at| at + 1));
        let (line, fields) =
            rest.split_at(rest.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1));
        let authorization = self.authorization.as_ref();
        let field =
            authorization.map(|value| format!("Proxy-Authorization: {value}\r\n")).unwrap_or_default();
        [method, self.origin.as_bytes(), line, field.as_bytes(), fields].concat()
    }
}

/// A connection for one request of the library.
struct Line {
    stream: Stream,
    secure: bool,
    /// Present until the head is sent.
    forward: Option<Forward>,
    buffers: LazyBuffers,
}

impl fmt::Debug for Line {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Line")
    }
}

impl Line {
    fn failed(&mut self, error: io::Error, timeout: &NextTimeout) -> ureq::Error {
        match error.kind() {
            io::ErrorKind::TimedOut if self.stream.socket().is_late() => ureq::Error::Timeout(timeout.reason),
            _ => ureq::Error::Io(error),
        }
    }
}

impl Transport for Line {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        self.stream.socket().set_deadline(deadline(&timeout));
        let output = self.buffers.output().get(..amount).unwrap_or_default();
        let sent = match self.forward.take() {
            Some(forward) => self.stream.write_all(&forward.apply(output)),
            None => self.stream.write_all(output),
        };
        sent.and_then(|()| self.stream.flush()).map_err(|error| self.failed(error, &timeout))
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        self.stream.socket().set_deadline(deadline(&timeout));
        let count = self.stream.read(self.buffers.input_append_buf());
        let count = count.map_err(|error| self.failed(error, &timeout))?;
        self.buffers.input_appended(count);
        Ok(count > 0)
    }

    fn is_open(&mut self) -> bool {
        // For one request only.
        false
    }

    fn is_tls(&self) -> bool {
        self.secure
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::threads::{OnDeath, Stack, spawn};
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use rustls::{ServerConfig, ServerConnection, StreamOwned};
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
