//! GET requests with headers, limits and cancellation (Go: net/http's Client, as
//! pkg/kubelet/config/http.go uses it).
//!
//! ureq sends them over the connections of `api`: each request opens one, through a proxy if the
//! environment has one, and closes it.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ureq::http::{HeaderName, HeaderValue, Request, header};

use super::api::adapter::{self, Client, FinalResponse, ResponseBody};
use super::api::route::Routes;
use super::api::{Breaker, RequestKind};
use super::dial::url::Url;
use super::dial::{DialError, Scheme};
use super::proxy::Environment;
use super::tls::Roots;

const USER_AGENT: &str = concat!("coracle/", env!("CARGO_PKG_VERSION"));

/// Fields that the URL and the connection decide, as in upstream's client.
const NOT_SENT: [&str; 5] = ["host", "content-length", "transfer-encoding", "trailer", "connection"];

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
pub enum GetError {
    /// [`Getter::shut_down`] was called.
    #[error("context canceled")]
    Stopped,
    /// Any other reason.
    #[error("{0}")]
    Failed(String),
}

impl From<DialError> for GetError {
    fn from(error: DialError) -> Self {
        match error {
            DialError::Stopped => GetError::Stopped,
            DialError::Timeout | DialError::BodyTimeout => {
                GetError::Failed("no complete response in time".to_owned())
            }
            other => GetError::Failed(other.to_string()),
        }
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
    client: Arc<Client>,
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
        let headers = headers
            .iter()
            .flat_map(|(name, values)| values.iter().map(|value| (name.clone(), value.clone())))
            .collect();
        let secure = Url::parse(url).is_some_and(|(url, _)| url.scheme == Scheme::Https);
        let config = adapter::settings().https_only(secure).user_agent(USER_AGENT).max_idle_connections(0);
        let routes = Routes::to_any_server(roots, environment, "the manifest URL");
        let client = Arc::new(Client::new(routes, config.build()));
        let (url, breaker) = (url.to_owned(), Breaker::default());
        Getter { url, headers, timeout, max_body_bytes, client, breaker }
    }

    /// Sends one request; redirects are followed, but not to http when this URL is https.
    ///
    /// # Errors
    /// When there is no complete response in time, or the URL or a header is invalid.
    pub fn get(&self) -> Result<GetResponse, GetError> {
        let now = Instant::now();
        let deadline = now.checked_add(self.timeout).unwrap_or(now);
        let request = self.request()?;
        let response = self.client.send(&request, deadline, (RequestKind::Call, false), &self.breaker)?;
        let FinalResponse { status, uri, body: incoming, .. } = response;
        let mut body = Vec::new();
        let limit = self.max_body_bytes.saturating_add(1) as u64;
        let read = incoming.take(limit).read_to_end(&mut body);
        read.map_err(|error| ResponseBody::failed(&error))?;
        Ok(GetResponse { status, body, proxy: self.client.forwarder(&uri) })
    }

    fn request(&self) -> Result<Request<()>, GetError> {
        let invalid = |url: &str| GetError::Failed(format!("invalid URL {url:?}"));
        let (url, authorization) = Url::parse(&self.url).ok_or_else(|| invalid(&self.url))?;
        // Without the password of the text.
        let url = url.to_string();
        let mut request = Request::get(&url).body(()).map_err(|_| invalid(&url))?;
        let fields = request.headers_mut();
        for (name, value) in &self.headers {
            let wrong = |what| GetError::Failed(format!("invalid header field {what} {name:?}"));
            let known = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong("name"))?;
            if NOT_SENT.contains(&known.as_str()) {
                continue;
            }
            let value = HeaderValue::from_bytes(value.trim().as_bytes()).map_err(|_| wrong("value for"))?;
            fields.try_append(known, value).map_err(|_| wrong("beyond the limit of their number:"))?;
        }
        if let Some(value) = authorization.filter(|_| !fields.contains_key(header::AUTHORIZATION)) {
            let value = HeaderValue::from_str(&value).map_err(|_| invalid(&url))?;
            fields.insert(header::AUTHORIZATION, value);
        }
        fields.insert(header::CONNECTION, HeaderValue::from_static("close"));
        Ok(request)
    }

    /// Ends a request in progress and refuses later ones. Does not block.
    pub fn shut_down(&self) {
        self.breaker.trip();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::threads::{OnDeath, Stack, spawn};
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use rustls::{ServerConfig, ServerConnection, StreamOwned};
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    const LIMIT: Duration = Duration::from_secs(60);

    /// Sends one of `responses` on each connection, and returns the requests.
    fn serve(responses: Vec<Vec<u8>>) -> (String, crossbeam_channel::Receiver<String>, impl Drop) {
        serve_over(responses, |socket| socket)
    }

    /// Like `serve`, over TLS with a certificate for 127.0.0.1.
    fn serve_tls(responses: Vec<Vec<u8>>) -> (String, crossbeam_channel::Receiver<String>, impl Drop) {
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
        let (url, requests, running) = serve_over(responses, move |socket| {
            StreamOwned::new(ServerConnection::new(Arc::clone(&config)).unwrap(), socket)
        });
        (url.replacen("http:", "https:", 1), requests, running)
    }

    fn serve_over<S: Read + Write>(
        responses: Vec<Vec<u8>>,
        wrap: impl Fn(TcpStream) -> S + Send + 'static,
    ) -> (String, crossbeam_channel::Receiver<String>, impl Drop) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (tx, rx) = crossbeam_channel::bounded(responses.len());
        let running = spawn("t/server", Stack::Large, OnDeath::Unsupervised, move |stop| {
            for response in responses {
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
                let _ = stream.write_all(&response);
                let _ = stream.flush();
                let _ = tx.send(String::from_utf8(request).unwrap());
                if response.is_empty() {
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

    fn ok_response(body: &str) -> Vec<u8> {
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
    fn headers_are_sent_and_any_status_is_returned() {
        let (url, requests, _server) = serve(vec![
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi".to_vec(),
            b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n".to_vec(),
            b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n01234567890123456789".to_vec(),
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf".to_vec(),
        ]);
        let getter = getter(&url);
        assert_eq!(getter.get().unwrap(), GetResponse { status: 200, body: b"hi".to_vec(), proxy: None });
        let request = requests.recv_timeout(LIMIT).unwrap().to_lowercase();
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
            let _ = tx.send(matches!(getter.get(), Err(GetError::Stopped)));
        })
        .unwrap();
        requests.recv_timeout(LIMIT).unwrap();
        breaker.shut_down();
        // Well before the deadline of the request.
        assert_eq!(rx.recv_timeout(LIMIT / 2), Ok(true));
        assert!(matches!(breaker.get(), Err(GetError::Stopped)));
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
        let (plain, plain_requests, _plain) = serve(vec![ok_response("plain"), ok_response("plain")]);
        let (secure, _, _secure) = serve_tls(vec![redirect(&plain), ok_response("tls")]);
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
            serve(vec![ok_response("hi"), b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n".to_vec()]);
        let address = address(&proxy);
        let with_password = format!("http://me:word@{address}");
        let url = "http://user:other@manifests.example:8080/pods?a=b";
        let getter = getter_behind(url, &[("HTTP_PROXY", &with_password)]);
        let response = getter.get().unwrap();
        assert_eq!(
            response,
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
        let (direct, _, _direct) = serve(vec![ok_response("direct")]);
        let (proxy, requests, _proxy) = serve(vec![redirect(&direct)]);
        let getter = getter_behind("http://manifests.example/pods", &[("HTTP_PROXY", address(&proxy))]);
        let response = getter.get().unwrap();
        assert_eq!((response.body.as_slice(), response.proxy), (&b"direct"[..], None));
        assert!(requests.recv_timeout(LIMIT).unwrap().starts_with("GET http://manifests.example/pods "));
    }
}
