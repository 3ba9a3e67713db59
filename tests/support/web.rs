//! Web servers for tests: what probes, hooks and image pulls talk to. Each connection has a
//! thread of its own, so that a delayed response delays no other client.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coracle::util::threads::{OnDeath, Running, Stack, spawn};

/// A request of a client.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub method: String,
    pub path: String,
    /// The whole head, as it came.
    pub head: String,
}

impl Request {
    /// The value of a header, if it was sent.
    pub(crate) fn header(&self, name: &str) -> Option<String> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
        })
    }
}

/// A response of the server.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    /// A status and a text.
    pub(crate) fn text(status: u16, body: &str) -> Reply {
        Reply { status, headers: Vec::new(), body: body.as_bytes().to_vec() }
    }

    /// With one more header.
    pub(crate) fn with(mut self, name: &str, value: &str) -> Reply {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// A web server on loopback. It ends when it is dropped.
pub(crate) struct Server {
    pub port: u16,
    _running: Running,
}

impl Server {
    /// Answers every request by `respond`, on a port that the kernel chooses.
    pub(crate) fn start(respond: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port on loopback");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let respond: Arc<dyn Fn(&Request) -> Reply + Send + Sync> = Arc::new(respond);
        let running = spawn("t/web", Stack::Small, OnDeath::Unsupervised, move |stop| {
            let mut open: Vec<Running> = Vec::new();
            for stream in listener.incoming() {
                if stop.is_stopped() {
                    return;
                }
                open.retain(|connection| !connection.is_finished());
                let Ok(stream) = stream else { continue };
                let respond = Arc::clone(&respond);
                let serving = spawn("t/web/conn", Stack::Large, OnDeath::Unsupervised, move |_| {
                    // A client may disconnect at any time, which is no error.
                    let _ = serve(stream, respond.as_ref());
                });
                open.extend(serving);
            }
        })
        .expect("a thread");
        // A connection wakes the thread that waits in `accept`.
        let running = running.with_waker(Box::new(move || {
            let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        }));
        Server { port, _running: running }
    }
}

fn serve(mut stream: TcpStream, respond: &(dyn Fn(&Request) -> Reply + Send + Sync)) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte)? == 1 {
        head.push(byte[0]);
        if head == [0x16] {
            // A client that tries TLS first: answered as a plain server does.
            return stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        }
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let mut words = head.split(' ');
    let request = Request {
        method: words.next().unwrap_or_default().to_owned(),
        path: words.next().unwrap_or_default().to_owned(),
        head: head.clone(),
    };
    if request.path.is_empty() {
        return Ok(());
    }
    let reply = respond(&request);
    let mut out = format!("HTTP/1.1 {} Text\r\nConnection: close\r\n", reply.status);
    if !reply.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-length")) {
        out += &format!("Content-Length: {}\r\n", reply.body.len());
    }
    for (name, value) in &reply.headers {
        out += &format!("{name}: {value}\r\n");
    }
    out += "\r\n";
    stream.write_all(out.as_bytes())?;
    if request.method != "HEAD" {
        stream.write_all(&reply.body)?;
    }
    Ok(())
}

/// A server of fixed answers by path that records its requests.
pub(crate) struct FixedServer {
    pub port: u16,
    replies: Arc<Mutex<BTreeMap<String, Reply>>>,
    requests: Arc<Mutex<Vec<Request>>>,
    _server: Server,
}

impl FixedServer {
    /// Starts with no path: everything is 404.
    pub(crate) fn start() -> FixedServer {
        let replies = Arc::new(Mutex::new(BTreeMap::<String, Reply>::new()));
        let requests = Arc::new(Mutex::new(Vec::<Request>::new()));
        let (serves, notes) = (Arc::clone(&replies), Arc::clone(&requests));
        let server = Server::start(move |request| {
            notes.lock().expect("no holder panics").push(request.clone());
            let known = serves.lock().expect("no holder panics").get(&request.path).cloned();
            known.unwrap_or_else(|| Reply::text(404, "nothing here"))
        });
        FixedServer { port: server.port, replies, requests, _server: server }
    }

    /// What a path answers from now on.
    pub(crate) fn set(&self, path: &str, reply: Reply) {
        self.replies.lock().expect("no holder panics").insert(path.to_owned(), reply);
    }

    /// The requests for a path so far.
    pub(crate) fn received(&self, path: &str) -> Vec<Request> {
        let requests = self.requests.lock().expect("no holder panics");
        requests.iter().filter(|request| request.path == path).cloned().collect()
    }
}

/// The value of a series, written as on a page of metrics; 0 if it is not there.
pub(crate) fn metric(page: &str, series: &str) -> f64 {
    let wanted = identity(series);
    let mut lines = page.lines().filter_map(|line| line.rsplit_once(' '));
    let found = lines.find(|(name, _)| name.starts_with(wanted.0) && identity(name) == wanted);
    found.and_then(|(_, value)| value.parse().ok()).unwrap_or(0.0)
}

/// Name and labels, whose order says nothing.
fn identity(series: &str) -> (&str, Vec<&str>) {
    let (name, labels) = series.trim().split_once('{').unwrap_or((series.trim(), ""));
    let mut labels: Vec<&str> = labels.trim_end_matches('}').split(',').collect();
    labels.sort_unstable();
    (name, labels)
}
