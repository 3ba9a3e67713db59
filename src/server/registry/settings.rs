//! The registry's settings, and its tokens.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::util::{token, untrusted};

pub(crate) struct RegistrySettings {
    /// A loopback address; port 0: a free one.
    pub address: SocketAddr,
    /// The file for the runtime: `hosts.toml` of containerd.
    pub mirror_file: PathBuf,
    /// A file with a second token, for runtimes whose configuration does not change with each start
    /// of the agent. It may be absent.
    pub node_token: PathBuf,
    /// The token of this start.
    pub token: String,
}

impl RegistrySettings {
    /// Settings with a new token.
    ///
    /// # Errors
    /// When the kernel returns no random bytes.
    pub(crate) fn new(address: SocketAddr, mirror_file: PathBuf, node_token: PathBuf) -> io::Result<Self> {
        Ok(RegistrySettings { address, mirror_file, node_token, token: token::new()? })
    }

    /// Whether a request with this token is served.
    pub(super) fn admits(&self, given: &str) -> bool {
        token::equal(given, &self.token)
            || self.read_node_token().is_some_and(|own| token::equal(given, &own))
    }

    fn read_node_token(&self) -> Option<String> {
        let mut text = String::new();
        let file = untrusted::open(&self.node_token).ok()?;
        file.take(2 * token::DIGITS as u64).read_to_string(&mut text).ok()?;
        Some(text.trim().to_owned())
    }
}
