//! Authorities of the API server that an operator has added on the node (`coracle offline trust`), because
//! those of the kubeconfig are older than the certificate that the server has now.
//!
//! They are in one file, are read at each start, and count in addition to those of the kubeconfig.
//! No Go counterpart.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::client::{Client, Credentials};
use super::error::ApiError;
use super::target::{GroupVersion, Target};
use crate::offline::AUTHORITIES_FILE;
use crate::transport::api::{Endpoint, Roots, ServerAuthority, TlsSetupError, server_authorities};
use crate::util::{atomic_file, disk_writes, state_files, untrusted};

/// The largest file.
const MAX_BYTES: u64 = 1024 * 1024;
/// The limit of the request that shows whether the server is signed.
const PROBE_LIMIT: Duration = Duration::from_secs(20);

/// Why authorities were not added or removed.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// A file cannot be read, written or removed.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// The file has something else than authorities.
    #[error("{}: {reason}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: TlsSetupError,
    },
    /// The server at the address has a certificate that these authorities have not signed, or does not
    /// respond.
    #[error(
        "these authorities have not signed the certificate of the API server, or it is not reachable: {0}"
    )]
    Server(ApiError),
    /// The authorities cannot be used.
    #[error("the authorities cannot be used: {0}")]
    Unusable(ApiError),
}

/// The file of the added authorities in the directory of the store.
#[must_use]
pub fn file_in(directory: &Path) -> PathBuf {
    directory.join(AUTHORITIES_FILE)
}

/// The added authorities, as PEM; `None`: there are none. A file that cannot be used is reported, and does not
/// prevent a start.
#[must_use]
pub fn stored(directory: &Path) -> Option<Vec<u8>> {
    let path = file_in(directory);
    let reason = match untrusted::read_state(&path, MAX_BYTES) {
        Ok(pem) => match server_authorities(&pem) {
            Ok(_) => {
                state_files::report_usable(&path);
                return Some(pem);
            }
            Err(error) => error.to_string(),
        },
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return None,
        Err(error) => error.to_string(),
    };
    state_files::report_damaged(&path, &reason);
    None
}

/// The added authorities, for people.
#[must_use]
pub fn listed(directory: &Path) -> Vec<ServerAuthority> {
    stored(directory).and_then(|pem| server_authorities(&pem).ok()).unwrap_or_default()
}

/// Adds the stored authorities to those of the kubeconfig.
pub fn use_stored(directory: &Path, credentials: &mut Credentials) {
    if let Some(pem) = stored(directory) {
        credentials.endpoint.roots = credentials.endpoint.roots.with(&pem);
    }
}

/// Adds the authorities of a PEM file: checks that all of them are authorities, and that they have signed the
/// certificate of the server that is at the address now; stores them in the place of former ones, and uses
/// them at once.
///
/// # Errors
/// See [`TrustError`]; nothing has changed then, but for [`TrustError::Unusable`].
pub fn add(client: &Client, directory: &Path, file: &Path) -> Result<Vec<ServerAuthority>, TrustError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error| TrustError::File { path, error }
    };
    let pem = untrusted::read_own(file, MAX_BYTES).map_err(failed(file))?;
    let authorities =
        server_authorities(&pem).map_err(|reason| TrustError::Content { path: file.to_owned(), reason })?;
    client.probe(&pem, PROBE_LIMIT).map_err(TrustError::Server)?;
    let path = file_in(directory);
    disk_writes::make_directories(directory, 0o700).map_err(failed(directory))?;
    // A directory in its place would stay.
    let _ = std::fs::remove_dir(&path);
    atomic_file::write(&path, &pem, 0o600).map_err(failed(&path))?;
    atomic_file::sync_directory(directory).map_err(failed(directory))?;
    state_files::report_usable(&path);
    client.add_authorities(&pem).map_err(TrustError::Unusable)?;
    for authority in &authorities {
        log::warn!("the API server's certificate may now be signed by {authority}");
    }
    Ok(authorities)
}

/// Removes the file, and returns whether there was one. The running agent continues to use it.
///
/// # Errors
/// When it cannot be removed.
pub fn remove(directory: &Path) -> Result<bool, TrustError> {
    let path = file_in(directory);
    match std::fs::remove_file(&path) {
        // Otherwise a power cut may bring it back.
        Ok(()) => match atomic_file::sync_directory(directory) {
            Ok(()) => Ok(true),
            Err(error) => Err(TrustError::File { path: directory.to_owned(), error }),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(TrustError::File { path, error }),
    }
}

impl Client {
    /// Whether the server at the address has a certificate that these authorities have signed. Sends a
    /// request without credentials; each response to it is a proof.
    fn probe(&self, pem: &[u8], limit: Duration) -> Result<(), ApiError> {
        let credentials = self.with_credentials(|old| {
            let roots = Roots::Pem(pem.to_vec());
            let endpoint = Endpoint { roots, identity: None, https: true, ..old.endpoint.clone() };
            Credentials { endpoint, base_path: old.base_path.clone(), token: None }
        });
        let probe = Client::new(credentials, None)?.with_timeout(limit);
        match probe.get::<Value>(&Target::resources(GroupVersion::Core)) {
            Err(error) if error.status().is_none() => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CA: &[u8] = include_bytes!("../transport/tls/testdata/ca.pem");
    const LEAF: &[u8] = include_bytes!("../transport/tls/testdata/server.pem");

    fn endpoint() -> Endpoint {
        Endpoint {
            https: true,
            host: "127.0.0.1".to_owned(),
            // No server is there.
            port: 1,
            roots: Roots::Pem(b"former".to_vec()),
            server_name: None,
            identity: None,
            proxy: None,
        }
    }

    #[test]
    fn stored_authorities_are_added_to_those_of_the_kubeconfig() {
        let dir = tempfile::tempdir().unwrap();
        let mut credentials = Credentials { endpoint: endpoint(), base_path: String::new(), token: None };
        use_stored(dir.path(), &mut credentials);
        assert!(credentials.endpoint.roots == Roots::Pem(b"former".to_vec()));
        std::fs::write(file_in(dir.path()), CA).unwrap();
        use_stored(dir.path(), &mut credentials);
        assert!(credentials.endpoint.roots == Roots::Pem([b"former\n", CA].concat()));
        let listed = listed(dir.path());
        assert!(listed.len() == 1 && listed[0].fingerprint.len() == 95, "{listed:?}");
        assert!(remove(dir.path()).unwrap() && !remove(dir.path()).unwrap());
        assert!(stored(dir.path()).is_none());
    }

    #[test]
    fn authorities_that_are_added_again_do_not_grow_and_end_no_watches() {
        let credentials = Credentials {
            endpoint: Endpoint { roots: Roots::Pem(LEAF.to_vec()), ..endpoint() },
            base_path: String::new(),
            token: None,
        };
        let client = Client::new(credentials, None).unwrap();
        let roots = |client: &Client| client.with_credentials(|own| own.endpoint.roots.clone());
        client.add_authorities(CA).unwrap();
        assert!(roots(&client) == Roots::Pem([LEAF, b"\n", CA].concat()));
        let generation = client.credential_generation();
        client.add_authorities(CA).unwrap();
        assert!(roots(&client) == Roots::Pem([LEAF, b"\n", CA].concat()));
        assert_eq!(client.credential_generation(), generation);
    }

    #[test]
    fn file_that_cannot_be_used_is_reported_and_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = file_in(dir.path());
        let is_reported = || state_files::problems().iter().any(|(damaged, _)| *damaged == path);
        std::fs::write(&path, CA.split_at(CA.len() / 2).0).unwrap();
        assert!(stored(dir.path()).is_none() && is_reported());
        std::fs::remove_file(&path).unwrap();
        crate::util::testing::fifo(&path);
        let directory = dir.path().to_owned();
        assert!(crate::util::testing::unblocked(move || stored(&directory)).is_none());
    }

    #[test]
    fn certificates_that_are_no_authorities_and_servers_that_do_not_respond_add_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let credentials = Credentials {
            endpoint: Endpoint { roots: Roots::Pem(CA.to_vec()), ..endpoint() },
            base_path: String::new(),
            token: None,
        };
        let client = Client::new(credentials, None).unwrap();
        let file = dir.path().join("file");
        let directory = dir.path().join("offline");
        let add = |content: &[u8]| {
            std::fs::write(&file, content).unwrap();
            add(&client, &directory, &file).unwrap_err()
        };
        assert!(matches!(add(b"text"), TrustError::Content { .. }));
        let error = add(LEAF);
        assert!(
            matches!(&error, TrustError::Content { reason, .. } if reason.to_string().contains("no authority")),
            "{error}"
        );
        assert!(matches!(add(CA), TrustError::Server(_)));
        assert!(!directory.exists());
    }
}
