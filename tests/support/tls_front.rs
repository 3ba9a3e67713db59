//! TLS in front of a fake API server: real certificates, good, expired or not yet valid, and a
//! connection that is slow or drops all bytes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle::util::threads::{OnDeath, Running, Stack, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection};

use super::wait::pause;

/// Issues certificates of the server; times are in seconds from now.
pub(crate) struct Authority(rcgen::KeyPair);

impl Authority {
    /// A new one, which no client trusts yet.
    pub(crate) fn new() -> Authority {
        Authority(rcgen::KeyPair::generate().unwrap())
    }

    fn certificate(&self, from: i64, until: i64, is_ca: rcgen::IsCa) -> rcgen::Certificate {
        let mut params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::CommonName, "fake-api");
        params.is_ca = is_ca;
        let now = jiff::Timestamp::now().as_second();
        let time = |second: i64| {
            rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs((now + second).unsigned_abs())
        };
        (params.not_before, params.not_after) = (time(from), time(until));
        params.self_signed(&self.0).unwrap()
    }

    /// What a kubeconfig names as the authority. All certificates have the same name and key,
    /// and it is these that an authority is.
    pub(crate) fn pem(&self) -> String {
        self.certificate(-3600, 3600, rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained)).pem()
    }
}

/// What happens on connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionBehavior {
    /// They work normally.
    Free,
    /// So many bytes at a time to the client, with a pause after each block.
    Drops(usize, Duration),
    /// Bytes are read and dropped; nothing is sent back, and the connection stays open.
    Sink,
}

/// The TLS end. It is gone when it is dropped.
pub(crate) struct TlsFront {
    port: u16,
    authority: Authority,
    shared: Arc<Shared>,
    _running: Running,
}

struct State {
    config: Arc<ServerConfig>,
    flow: ConnectionBehavior,
    sockets: Vec<TcpStream>,
    threads: Vec<Running>,
}

struct Shared(Mutex<State>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn config(authority: &Authority, from: i64, until: i64) -> Arc<ServerConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(authority.0.serialize_der()));
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![authority.certificate(from, until, rcgen::IsCa::NoCa).der().clone()], key)
        .unwrap();
    Arc::new(config)
}

impl TlsFront {
    /// Before the server at this port of loopback, with a good certificate.
    pub(crate) fn before(server: u16) -> TlsFront {
        let authority = Authority::new();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = State {
            config: config(&authority, -3600, 3600),
            flow: ConnectionBehavior::Free,
            sockets: Vec::new(),
            threads: Vec::new(),
        };
        let shared = Arc::new(Shared(Mutex::new(state)));
        let own = Arc::clone(&shared);
        let running = spawn("front", Stack::Large, OnDeath::Unsupervised, move |stop| {
            while let Ok((client, _)) = listener.accept() {
                if stop.is_stopped() {
                    break;
                }
                let mut state = own.lock();
                state.sockets.push(client.try_clone().unwrap());
                let (config, shared) = (Arc::clone(&state.config), Arc::clone(&own));
                let relay = spawn("front/conn", Stack::Large, OnDeath::Unsupervised, move |_| {
                    let _ = relay(client, server, config, &shared);
                });
                state.threads.retain(|thread| !thread.is_finished());
                state.threads.push(relay.unwrap());
            }
        })
        .unwrap()
        .with_waker(Box::new(move || drop(TcpStream::connect((Ipv4Addr::LOCALHOST, port)))));
        TlsFront { port, authority, shared, _running: running }
    }

    /// `https://address:port`.
    pub(crate) fn url(&self) -> String {
        format!("https://{}:{}", Ipv4Addr::LOCALHOST, self.port)
    }

    /// Where it listens on loopback.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The authority of its certificate.
    pub(crate) fn authority(&self) -> String {
        self.authority.pem()
    }

    /// Shows a certificate with this life from now on, in seconds from now. Connections that
    /// there are stay.
    pub(crate) fn set_certificate(&self, from: i64, until: i64) {
        self.shared.lock().config = config(&self.authority, from, until);
    }

    /// What happens on all connections from now on.
    pub(crate) fn set_flow(&self, flow: ConnectionBehavior) {
        self.shared.lock().flow = flow;
    }

    /// Cuts every connection.
    pub(crate) fn cut(&self) {
        for socket in self.shared.lock().sockets.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for TlsFront {
    fn drop(&mut self) {
        self.cut();
        let threads = std::mem::take(&mut self.shared.lock().threads);
        drop(threads);
    }
}

/// Passes bytes on until either side ends.
fn relay(
    mut client: TcpStream,
    server: u16,
    config: Arc<ServerConfig>,
    shared: &Shared,
) -> std::io::Result<()> {
    let mut tls = ServerConnection::new(config).map_err(std::io::Error::other)?;
    tls.set_buffer_limit(None);
    let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, server))?;
    let mut block = vec![0; 64 * 1024];
    loop {
        while tls.wants_write() {
            tls.write_tls(&mut client)?;
        }
        let (reads_client, reads_server) = {
            let mut both = [
                PollFd::new(&client, PollFlags::IN),
                // Bytes wait until the handshake is complete.
                PollFd::new(&server, if tls.is_handshaking() { PollFlags::empty() } else { PollFlags::IN }),
            ];
            poll(&mut both, Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 }))?;
            (!both[0].revents().is_empty(), both[1].revents().contains(PollFlags::IN))
        };
        let flow = shared.lock().flow;
        if flow == ConnectionBehavior::Sink {
            if reads_client && client.read(&mut block)? == 0 {
                return Ok(());
            }
            if reads_server {
                pause(Duration::from_millis(100));
            }
            continue;
        }
        if reads_client {
            if tls.read_tls(&mut client)? == 0 {
                return Ok(());
            }
            if let Err(error) = tls.process_new_packets() {
                // The client must receive the alert.
                let _ = tls.write_tls(&mut client);
                return Err(std::io::Error::other(error));
            }
            loop {
                match tls.reader().read(&mut block) {
                    Ok(0) => return Ok(()),
                    Ok(count) => server.write_all(&block[..count])?,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                }
            }
        }
        if reads_server {
            let most = if let ConnectionBehavior::Drops(bytes, _) = flow { bytes } else { block.len() };
            let count = server.read(&mut block[..most])?;
            if count == 0 {
                tls.send_close_notify();
                while tls.wants_write() {
                    tls.write_tls(&mut client)?;
                }
                return Ok(());
            }
            tls.writer().write_all(&block[..count])?;
            if let ConnectionBehavior::Drops(_, wait) = flow {
                while tls.wants_write() {
                    tls.write_tls(&mut client)?;
                }
                pause(wait);
            }
        }
    }
}
