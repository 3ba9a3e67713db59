//! The file that tells the container runtime the address and the token of the registry.
//!
//! It has the syntax of containerd's `hosts.toml`; `_default/hosts.toml` in containerd's directory
//! of registries links to it. containerd reads it for each pull. If the file is absent, as while no
//! agent runs, containerd uses the registry of the image only.

use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::images::Images;
use super::settings::RegistrySettings;
use crate::util::{atomic_file, untrusted};

/// Larger files are not ours.
const MOST_BYTES: u64 = 4096;

/// The first line of each file.
const HEADING: &str =
    "# Written by coracle at each start. Its images are those of the archives on this node.\n";

/// Publishes the address of the registry as soon as it is bound. Removes the file when it is dropped.
pub(crate) struct Publication {
    path: PathBuf,
    token: String,
    images: Arc<dyn Images>,
    /// The content of the written file; empty: none.
    written: String,
}

impl Publication {
    pub(crate) fn new(settings: &RegistrySettings, images: Arc<dyn Images>) -> Publication {
        let (path, token) = (settings.mirror_file.clone(), settings.token.clone());
        Publication { path, token, images, written: String::new() }
    }

    /// The registry cannot listen on this address now.
    pub(crate) fn withhold(&self, address: SocketAddr) {
        remove_stale(&self.path);
        self.images.report_no_registry(&format!(
            "the registry of image archives cannot listen on {address}, so no images of archives are pulled"
        ));
    }

    /// The registry listens on this address.
    pub(crate) fn publish(&mut self, address: SocketAddr) {
        let text = hosts_toml(address, &self.token);
        match atomic_file::write(&self.path, text.as_bytes(), 0o600) {
            Ok(()) => self.written = text,
            Err(error) => log::warn!(
                "the container runtime cannot pull images of archives: cannot write {}: {error}",
                self.path.display()
            ),
        }
        self.images.set_registry(&address.to_string());
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        // Another agent may have replaced it.
        remove_if(&self.path, |found| !self.written.is_empty() && found == self.written);
    }
}

/// Removes the file of an agent that was killed: its port may belong to another process by now, which
/// the runtime would trust.
pub(crate) fn remove_stale(path: &Path) {
    remove_if(path, |found| found.starts_with(HEADING));
}

fn remove_if(path: &Path, is_ours: impl Fn(&str) -> bool) {
    let mut found = String::new();
    let read = untrusted::open(path).and_then(|file| file.take(MOST_BYTES).read_to_string(&mut found));
    if read.is_ok()
        && is_ours(&found)
        && let Err(error) = std::fs::remove_file(path)
    {
        log::warn!("cannot remove {}: {error}", path.display());
    }
}

/// There is no `server` line: the registry of the image comes after this host.
fn hosts_toml(address: SocketAddr, token: &str) -> String {
    format!(
        "{HEADING}[host.\"http://{address}/v2/{token}\"]\n  capabilities = [\"pull\", \"resolve\"]\n  \
         override_path = true\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_file_is_removed_and_that_of_an_operator_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hosts.toml");
        remove_stale(&path);
        std::fs::write(&path, "server = \"https://registry.example\"\n").unwrap();
        remove_stale(&path);
        assert!(path.exists());
        std::fs::write(&path, hosts_toml("127.0.0.1:4321".parse().unwrap(), "abc")).unwrap();
        remove_stale(&path);
        assert!(!path.exists());
    }

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
