//! The file that tells the container runtime the address and the token of the registry.
//!
//! It has the syntax of containerd's `hosts.toml`; `_default/hosts.toml` in containerd's directory
//! of registries links to it. containerd reads it for each pull. If the file is absent, as while no
//! agent runs, containerd uses the registry of the image only.

use std::io::Read;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use super::{Images, RegistrySettings};
use crate::util::{atomic_file, untrusted};

/// Larger files are not ours.
const MOST_BYTES: u64 = 4096;

/// Publishes the address of the registry as soon as it is bound. Removes the file when it is dropped.
pub struct Publication {
    path: PathBuf,
    token: String,
    images: Arc<dyn Images>,
    /// The content of the written file; empty: none.
    written: String,
}

impl Publication {
    pub fn new(settings: &RegistrySettings, images: Arc<dyn Images>) -> Publication {
        let (path, token) = (settings.mirror_file.clone(), settings.token.clone());
        Publication { path, token, images, written: String::new() }
    }

    /// The registry listens on this address.
    pub fn publish(&mut self, address: SocketAddr) {
        let text = hosts_toml(address, &self.token);
        match atomic_file::write(&self.path, text.as_bytes(), 0o600) {
            Ok(()) => self.written = text,
            Err(why) => log::warn!(
                "the container runtime cannot pull images of archives: cannot write {}: {why}",
                self.path.display()
            ),
        }
        self.images.set_registry(&address.to_string());
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        let mut found = String::new();
        let read =
            untrusted::open(&self.path).and_then(|file| file.take(MOST_BYTES).read_to_string(&mut found));
        // Another agent may have replaced it.
        if read.is_ok()
            && !self.written.is_empty()
            && found == self.written
            && let Err(why) = std::fs::remove_file(&self.path)
        {
            log::warn!("cannot remove {}: {why}", self.path.display());
        }
    }
}

/// There is no `server` line: the registry of the image comes after this host.
fn hosts_toml(address: SocketAddr, token: &str) -> String {
    format!(
        "# Written by coracle at each start. Its images are those of the archives on this node.\n\
         [host.\"http://{address}/v2/{token}\"]\n  capabilities = [\"pull\", \"resolve\"]\n  \
         override_path = true\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_the_mirror_and_no_server() {
        let text = hosts_toml("127.0.0.1:4321".parse().unwrap(), "abc");
        assert_eq!(
            text.lines().skip(1).collect::<Vec<_>>(),
            [
                "[host.\"http://127.0.0.1:4321/v2/abc\"]",
                "  capabilities = [\"pull\", \"resolve\"]",
                "  override_path = true",
            ]
        );
    }
}
