//! An HTTP and SOCKS 5 proxy on loopback that knows its targets by name. It can ask for
//! credentials, refuse, hang and cut connections. For TLS to the proxy put a `TlsFront` before it.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle::util::threads::{OnDeath, Running, Stack, spawn};

/// What the proxy does with a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ProxyBehavior {
    /// Connects to the target.
    Forward,
    /// These bytes are the answer; then it closes.
    Respond(Vec<u8>),
    /// Reads the request and keeps silent.
    Hang,
    /// Connects to the target and cuts both connections after so many bytes from the target.
    CutAfter(usize),
}

/// The proxy. Its connections end when it is dropped.
pub(crate) struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    _running: Running,
}

struct State {
    behavior: ProxyBehavior,
    /// The value that `Proxy-Authorization` must have.
    authorization: Option<String>,
    targets: BTreeMap<String, u16>,
    heads: Vec<String>,
    sockets: Vec<TcpStream>,
    threads: Vec<Running>,
}

struct Shared(Mutex<State>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Proxy {
    /// One that forwards to targets, given as `host:port` and a port of loopback.
    pub(crate) fn start(targets: &[(&str, u16)]) -> Proxy {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let state = State {
            behavior: ProxyBehavior::Forward,
            authorization: None,
            targets: targets.iter().map(|(name, port)| ((*name).to_owned(), *port)).collect(),
            heads: Vec::new(),
            sockets: Vec::new(),
            threads: Vec::new(),
        };
        let shared = Arc::new(Shared(Mutex::new(state)));
        let own = Arc::clone(&shared);
        let running = spawn("proxy", Stack::Large, OnDeath::Unsupervised, move |stop| {
            while let Ok((client, _)) = listener.accept() {
                if stop.is_stopped() {
                    break;
                }
                let shared = Arc::clone(&own);
                let mut state = own.lock();
                state.sockets.extend(client.try_clone());
                let serving = spawn("proxy/conn", Stack::Large, OnDeath::Unsupervised, move |_| {
                    let _ = serve(&client, &shared);
                    let _ = client.shutdown(Shutdown::Both);
                });
                state.threads.retain(|thread| !thread.is_finished());
                state.threads.extend(serving);
            }
        })
        .expect("a thread")
        .with_waker(Box::new(move || drop(TcpStream::connect((Ipv4Addr::LOCALHOST, port)))));
        Proxy { port, shared, _running: running }
    }

    /// Where it listens on loopback.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// `127.0.0.1:port`, as error messages name it.
    pub(crate) fn address(&self) -> String {
        format!("{}:{}", Ipv4Addr::LOCALHOST, self.port)
    }

    /// What it does with all later requests.
    pub(crate) fn set_behavior(&self, behavior: ProxyBehavior) {
        self.shared.lock().behavior = behavior;
    }

    /// Answers later requests with 407 unless they have this `Proxy-Authorization`.
    pub(crate) fn require(&self, authorization: &str) {
        self.shared.lock().authorization = Some(authorization.to_owned());
    }

    /// The heads of the requests so far; of SOCKS clients `SOCKS host:port`.
    pub(crate) fn heads(&self) -> Vec<String> {
        self.shared.lock().heads.clone()
    }

    /// Cuts every connection.
    pub(crate) fn cut(&self) {
        for socket in self.shared.lock().sockets.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        let threads = std::mem::take(&mut self.shared.lock().threads);
        drop(threads);
    }
}

fn serve(mut client: &TcpStream, shared: &Shared) -> io::Result<()> {
    let mut first = [0];
    client.read_exact(&mut first)?;
    let (head, target) = match first {
        [5] => {
            let target = socks_target(client)?;
            (format!("SOCKS {target}"), target)
        }
        // A client of an https proxy.
        [0x16] => return Ok(()),
        [first] => {
            let mut head = vec![first];
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                client.read_exact(&mut byte)?;
                head.extend_from_slice(&byte);
            }
            let head = String::from_utf8(head).map_err(io::Error::other)?;
            let named = head.split(' ').nth(1).unwrap_or_default();
            let named = named.strip_prefix("http://").unwrap_or(named);
            let target = named.split('/').next().unwrap_or_default().to_owned();
            (head, target)
        }
    };
    let (behavior, authorization, port) = {
        let mut state = shared.lock();
        state.heads.push(head.clone());
        (state.behavior.clone(), state.authorization.clone(), state.targets.get(&target).copied())
    };
    let refusal = |status: &str| format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").into_bytes();
    let given = head.lines().find_map(|line| line.strip_prefix("Proxy-Authorization: "));
    let most = match behavior {
        ProxyBehavior::Respond(bytes) => return client.write_all(&bytes),
        ProxyBehavior::Hang => return client.read(&mut first).map(drop),
        _ if authorization.is_some() && authorization.as_deref() != given => {
            return client.write_all(&refusal("407 Proxy Authentication Required"));
        }
        ProxyBehavior::CutAfter(bytes) => bytes,
        ProxyBehavior::Forward => usize::MAX,
    };
    let Some(port) = port else { return client.write_all(&refusal("502 Bad Gateway")) };
    let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    shared.lock().sockets.extend(server.try_clone());
    if head.starts_with("CONNECT ") {
        client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")?;
    } else if head.starts_with("SOCKS ") {
        client.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0])?;
    } else {
        // As a request to the server itself, without what is the proxy's.
        let mut own = head.replacen(&format!("http://{target}"), "", 1);
        if let Some(value) = given {
            own = own.replacen(&format!("Proxy-Authorization: {value}\r\n"), "", 1);
        }
        server.write_all(own.as_bytes())?;
    }
    let (mut from, mut to) = (client.try_clone()?, server.try_clone()?);
    let up = spawn("proxy/up", Stack::Large, OnDeath::Unsupervised, move |_| {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    })?;
    let _ = io::copy(&mut (&server).take(most as u64), &mut client);
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
    drop(up);
    Ok(())
}

/// Answers the greeting and reads the request, whose first byte is read: `host:port`.
fn socks_target(mut client: &TcpStream) -> io::Result<String> {
    let mut count = [0];
    client.read_exact(&mut count)?;
    client.read_exact(&mut vec![0; count[0].into()])?;
    client.write_all(&[5, 0])?;
    let mut request = [0; 4];
    client.read_exact(&mut request)?;
    let mut length = [4];
    if request[3] == 3 {
        client.read_exact(&mut length)?;
    }
    let mut host = vec![0; length[0].into()];
    client.read_exact(&mut host)?;
    let host = match request[3] {
        3 => String::from_utf8(host).map_err(io::Error::other)?,
        _ => host.iter().map(u8::to_string).collect::<Vec<_>>().join("."),
    };
    let mut port = [0; 2];
    client.read_exact(&mut port)?;
    Ok(format!("{host}:{}", u16::from_be_bytes(port)))
}
