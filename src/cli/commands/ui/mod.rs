//! `coracle ui`: read-only pages about the node for a browser.
//!
//! Owns: the listening socket, the link that works once (`gate`), the connections (`serve`), the pages
//! (`pages`, written by `html`), and the samples of the curves (`curves`). It is a client of the agent's
//! local socket as the other commands are; nothing of it runs in the agent.
//! Threads: `ui/<n>` per open connection, at most 16; `main` accepts them.
//! Invariants: only GET and HEAD, and nothing that changes the node; each text of a document is escaped;
//! each wait for a client has a limit; a log passes through in pieces.

mod curves;
mod gate;
mod html;
mod pages;
mod serve;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cli::exit::Exit;
use crate::cli::local::UiOptions;
use crate::transport::tls::{Acceptor, ServingCertificate, Settings};
use crate::util::secret::Secret;
use crate::util::signals;

use super::client::Client;
use super::console::Console;
use super::error::{CommandError, Outcome, print_stderr};
use gate::Gate;
use serve::Server;

/// The size of a file with certificates or a key.
const PEM_BYTES: u64 = 1024 * 1024;

fn failed(text: String) -> CommandError {
    CommandError::Rejected { status: 500, text }
}

pub(super) fn run(client: &Client, console: &mut Console<'_>, options: &UiOptions) -> Outcome {
    if !rustix::process::geteuid().is_root() {
        return Err(CommandError::NoPermission(client.socket().to_owned()));
    }
    let system = |error: io::Error| failed(format!("cannot serve the pages: {error}"));
    let tls = match &options.tls {
        Some((certificate, key)) => Some(acceptor(certificate, key)?),
        None => None,
    };
    // Before the link is printed, so that no signal is lost after it.
    let default_action = Arc::new(AtomicBool::new(false));
    let termination = signals::termination(&default_action).map_err(system)?;
    let (listener, address) = listen(options.listen).map_err(|error| {
        failed(format!("cannot listen on {}: {error}; --listen names another address", options.listen))
    })?;
    let gate = Gate::new(address.port(), tls.is_some()).map_err(system)?;
    if tls.is_none() && !address.ip().is_loopback() {
        print_stderr("warning: without TLS other machines on the way can read the link and all pages");
    }
    for line in introduction(&gate, address) {
        writeln!(console.out, "{line}")?;
    }
    console.out.flush()?;
    let (stopper, shutdown) = UnixStream::pair().map_err(system)?;
    let server = Arc::new(Server::new(client, gate, tls, shutdown));
    let outcome = serve::run(&listener, &server, &termination);
    // A second signal ends the process at once.
    default_action.store(true, Ordering::SeqCst);
    drop(stopper);
    outcome.map_err(system)?;
    Ok(Exit::Success)
}

fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// What the command prints: the link, and how to reach it.
fn introduction(gate: &Gate, address: SocketAddr) -> Vec<String> {
    let port = address.port();
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    let mut lines = vec![
        "Open this link in a browser; it works once:".to_owned(),
        String::new(),
        format!("  {}://{}/?token={}", gate.scheme(), SocketAddr::new(ip, port), gate.token()),
        String::new(),
    ];
    if address.ip().is_loopback() {
        lines.push(format!(
            "From another machine, first: ssh -L {port}:{} root@NODE",
            SocketAddr::new(ip, port)
        ));
    } else if address.ip().is_unspecified() {
        lines.push(format!("From another machine, write the address of this node instead of {ip}."));
    }
    lines.push("Ctrl-C ends it.".to_owned());
    lines
}

/// Reads a certificate and its key.
fn acceptor(certificate: &Path, key: &Path) -> Result<Acceptor, CommandError> {
    let read = |path: &Path| {
        let mut text = String::new();
        File::open(path)
            .and_then(|file| file.take(PEM_BYTES).read_to_string(&mut text))
            .map_err(|error| failed(format!("cannot read {}: {error}", path.display())))?;
        Ok::<String, CommandError>(text)
    };
    let serving = ServingCertificate {
        certificate_chain_pem: read(certificate)?,
        key_pem: Secret::new(read(key)?),
        generation: 1,
    };
    serving.check().map_err(|error| {
        failed(format!("{} with {} cannot be used: {error}", certificate.display(), key.display()))
    })?;
    let serving = Arc::new(serving);
    Acceptor::new(&Settings::default(), Box::new(move || Some(Arc::clone(&serving))))
        .map_err(|error| failed(error.to_string()))
}
