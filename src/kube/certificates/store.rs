//! Certificates on disk, stored as by the Go kubelet: chain and key in one file with a time in its
//! name, and a link to the current file.

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::csr::{PrivateKey, Purpose};
use super::error::Error;
use super::facts::CertificateFields;
use crate::transport;
use crate::util::atomic_file;
use crate::util::disk_writes;
use crate::util::secret::Secret;

/// Only the owner may read keys.
const KEY_MODE: u32 = 0o600;
/// The names in the directory are not secret.
const DIR_MODE: u32 = 0o755;
/// Larger files are not certificates and are refused.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// A certificate chain with its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The certificates, the node's own first.
    pub chain_pem: String,
    /// The private key.
    pub key_pem: Secret<String>,
    /// The content of the first certificate.
    pub facts: CertificateFields,
}

impl Identity {
    /// Reads the certificates and the key from a PEM text that has both.
    pub(super) fn of_pem(text: &str) -> Result<Identity, &'static str> {
        let blocks = pem::parse_many(text).map_err(|_| "it is not PEM")?;
        // A file that is named both as certificate and as key appears twice.
        let (mut chain_pem, mut key_pem, mut facts) = (String::new(), None, None);
        for block in &blocks {
            match block.tag() {
                "CERTIFICATE" => {
                    if facts.is_none() {
                        facts = Some(
                            CertificateFields::from_der(block.contents())
                                .ok_or("its certificate is damaged")?,
                        );
                    }
                    let block_pem = encode(block);
                    if !chain_pem.contains(&block_pem) {
                        chain_pem.push_str(&block_pem);
                    }
                }
                // PKCS #8, SEC 1, PKCS #1.
                "PRIVATE KEY" | "EC PRIVATE KEY" | "RSA PRIVATE KEY" => key_pem = Some(encode(block)),
                _ => {}
            }
        }
        Ok(Identity {
            chain_pem,
            key_pem: key_pem.ok_or("it has no private key")?.into(),
            facts: facts.ok_or("it has no certificate")?,
        })
    }

    /// Reads a certificate and key that a kubeconfig names or contains.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn of_client(client: &transport::api::Identity) -> Result<Identity, &'static str> {
        let text = |bytes| std::str::from_utf8(bytes).map_err(|_| "it is not PEM");
        let (certificate, key) = (text(client.certificate.reveal())?, text(client.key.reveal())?);
        Identity::of_pem(&format!("{}\n{key}", certificate.trim_end()))
    }

    /// For the API client: exactly the bytes of the current file, so that the client, which reads
    /// that file again regularly, detects no change.
    pub fn for_client(&self) -> transport::api::Identity {
        let text = Secret::new(self.file_text().into_bytes());
        transport::api::Identity { certificate: text.clone(), key: text }
    }

    fn file_text(&self) -> String {
        format!("{}{}", self.chain_pem, self.key_pem.reveal())
    }

    /// Joins an issued chain with its key.
    pub(super) fn join(chain: &[u8], key: &PrivateKey) -> Result<Identity, &'static str> {
        let chain = std::str::from_utf8(chain).map_err(|_| "it is not PEM")?;
        let identity = Identity::of_pem(&format!("{}\n{}", chain.trim_end(), key.pem()))?;
        if identity.facts.public_key != key.public() {
            return Err("it is for another key");
        }
        Ok(identity)
    }
}

fn encode(block: &pem::Pem) -> String {
    pem::encode_config(block, pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF))
}

/// Reads the certificates in a PEM text from elsewhere, such as a kubeconfig; an error describes
/// what is wrong with it.
///
/// # Errors
/// When there is no certificate, or one of them is damaged.
pub(super) fn facts_of_pem(text: &[u8]) -> Result<Vec<CertificateFields>, &'static str> {
    let blocks = pem::parse_many(text).map_err(|_| "it is not PEM")?;
    let facts: Option<Vec<CertificateFields>> = blocks
        .iter()
        .filter(|block| block.tag() == "CERTIFICATE")
        .map(|block| CertificateFields::from_der(block.contents()))
        .collect();
    match facts {
        None => Err("a certificate is damaged"),
        Some(facts) if facts.is_empty() => Err("there is no certificate"),
        Some(facts) => Ok(facts),
    }
}

/// The files of one purpose in a directory.
#[derive(Debug, Clone)]
pub struct Store {
    dir: PathBuf,
    purpose: Purpose,
}

impl Store {
    /// A store in `dir`, which is created when something is stored.
    #[must_use]
    pub fn new(dir: &Path, purpose: Purpose) -> Store {
        Store { dir: dir.to_owned(), purpose }
    }

    /// The link to the current file.
    #[must_use]
    pub fn current_path(&self) -> PathBuf {
        self.dir.join(format!("{}-current.pem", self.purpose.file_prefix()))
    }

    /// The file of the key that has no certificate yet.
    #[must_use]
    pub fn pending_key_path(&self) -> PathBuf {
        self.dir.join(format!("{}.key.tmp", self.purpose.file_prefix()))
    }

    /// The content of the current file; `None` if there is none.
    ///
    /// # Errors
    /// When there is one that cannot be read or holds no certificate with its key.
    pub fn load(&self) -> Result<Option<Identity>, Error> {
        let path = self.current_path();
        let Some(text) = read(&path)? else { return Ok(None) };
        Identity::of_pem(&text).map(Some).map_err(|reason| Error::Content { path, reason })
    }

    /// Writes a new file and makes it the current one. A reader of the current file gets the old or
    /// the new one, complete.
    pub(super) fn update(&self, identity: &Identity, now: Timestamp) -> Result<PathBuf, Error> {
        self.make_dir()?;
        let time = now.to_zoned(TimeZone::UTC).strftime("%Y-%m-%d-%H-%M-%S").to_string();
        let name = format!("{}-{time}.pem", self.purpose.file_prefix());
        let path = self.dir.join(&name);
        write(&path, &identity.file_text())?;
        // A relative link also works where the directory is mounted elsewhere.
        let new_link = self.dir.join(format!("{}-updated.pem", self.purpose.file_prefix()));
        let current = self.current_path();
        let failed = |source| Error::Write { path: current.clone(), source };
        match fs::remove_file(&new_link) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        disk_writes::created(std::os::unix::fs::symlink(&name, &new_link)).map_err(failed)?;
        fs::rename(&new_link, &current).map_err(failed)?;
        // If this fails, a crash may restore the old link, as if the renewal had not happened.
        let _ = atomic_file::sync_directory(&self.dir);
        Ok(path)
    }

    /// The key whose request may still be in progress, or a new key that is stored for the next
    /// start. A key that cannot be read is replaced.
    pub(super) fn pending_key(&self) -> Result<PrivateKey, Error> {
        let path = self.pending_key_path();
        if let Some(text) = read(&path)? {
            match PrivateKey::from_pem(&text) {
                Ok(key) => return Ok(key),
                Err(_) => log::warn!("the key {} cannot be read; a new one replaces it", path.display()),
            }
        }
        self.make_dir()?;
        let key = PrivateKey::generate()?;
        write(&path, &key.pem())?;
        Ok(key)
    }

    /// Removes the pending key: it has its certificate, or will get none.
    pub(super) fn forget_pending_key(&self) {
        let path = self.pending_key_path();
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                log::warn!("cannot remove the key {}: {error}", path.display());
            }
            _ => {}
        }
    }

    pub(super) fn make_dir(&self) -> Result<(), Error> {
        disk_writes::make_directories(&self.dir, DIR_MODE)
            .map_err(|source| Error::Write { path: self.dir.clone(), source })
    }
}

/// Reads a small file; `None` if it does not exist.
pub(super) fn read(path: &Path) -> Result<Option<String>, Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    match fs::metadata(path) {
        // Opening a pipe would block until a process writes to it.
        Ok(metadata) if !metadata.is_file() => {
            return Err(Error::Content { path: path.to_owned(), reason: "it is no regular file" });
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    }
    let file = fs::File::open(path).map_err(failed)?;
    let mut text = String::new();
    file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(Error::Content { path: path.to_owned(), reason: "it is larger than 1 MiB" });
    }
    Ok(Some(text))
}

/// Writes a file that only the owner reads.
pub(super) fn write(path: &Path, text: &str) -> Result<(), Error> {
    atomic_file::write(path, text.as_bytes(), KEY_MODE)
        .map_err(|source| Error::Write { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use super::*;
    use crate::kube::certificates::csr::{ServingNames, Template};

    fn timestamp(second: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + second).unwrap()
    }

    fn issue(key: &PrivateKey, second: i64) -> String {
        let day = Duration::from_secs(86400);
        Template::self_signed("node1", &ServingNames::default(), key, timestamp(second), day).unwrap()
    }

    #[test]
    fn the_link_follows_the_newest_file() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(&dir.path().join("pki"), Purpose::Client);
        assert_eq!(store.load().unwrap(), None);
        let key = PrivateKey::generate().unwrap();
        for (second, name) in
            [(0, "kubelet-client-2023-11-14-22-13-20.pem"), (5, "kubelet-client-2023-11-14-22-13-25.pem")]
        {
            let identity = Identity::join(issue(&key, second).as_bytes(), &key).unwrap();
            let path = store.update(&identity, timestamp(second)).unwrap();
            assert_eq!(path.file_name().unwrap(), name);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            assert_eq!(fs::read_link(store.current_path()).unwrap(), Path::new(name));
            assert_eq!(store.load().unwrap().unwrap(), identity);
        }
        assert_eq!(fs::read_dir(dir.path().join("pki")).unwrap().count(), 3);
        let mode = fs::metadata(dir.path().join("pki")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777 & !0o022, 0o755 & !0o022);
    }

    #[test]
    fn the_pending_key_stays_until_it_has_a_certificate() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), Purpose::Client);
        let first = store.pending_key().unwrap();
        let path = dir.path().join("kubelet-client.key.tmp");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(store.pending_key().unwrap().public(), first.public());
        fs::write(&path, "nonsense").unwrap();
        assert_ne!(store.pending_key().unwrap().public(), first.public());
        store.forget_pending_key();
        store.forget_pending_key();
        assert!(!path.exists());
    }

    #[test]
    fn invalid_files_are_reported_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), Purpose::Serving);
        let key = PrivateKey::generate().unwrap();
        let check = |content: &str, expected: &str| {
            fs::write(store.current_path(), content).unwrap();
            let error = store.load().unwrap_err().to_string();
            assert!(error.contains("kubelet-server-current.pem") && error.contains(expected), "{error}");
        };
        check("", "no private key");
        check("nonsense", "no private key");
        check(&key.pem(), "no certificate");
        check(&issue(&key, 0), "no private key");
        check(
            &format!("{}{}", pem::encode(&pem::Pem::new("CERTIFICATE", b"x".to_vec())), key.pem()),
            "damaged",
        );
        check("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n", "not PEM");
    }

    #[test]
    fn a_certificate_for_another_key_is_refused() {
        let (key, other) = (PrivateKey::generate().unwrap(), PrivateKey::generate().unwrap());
        assert!(Identity::join(issue(&key, 0).as_bytes(), &key).is_ok());
        assert_eq!(Identity::join(issue(&other, 0).as_bytes(), &key), Err("it is for another key"));
        assert_eq!(Identity::join(&[0xff, 0xfe], &key), Err("it is not PEM"));
        assert!(Identity::join(b"", &key).is_err());
        let shown = format!("{:?}", Identity::join(issue(&key, 0).as_bytes(), &key).unwrap());
        assert!(shown.contains("Secret(..)") && !shown.contains("PRIVATE"), "{shown}");
    }

    #[test]
    fn certificates_of_other_files_are_read() {
        let key = PrivateKey::generate().unwrap();
        let both = format!("{}{}", issue(&key, 0), issue(&key, 5));
        assert_eq!(facts_of_pem(both.as_bytes()).unwrap().len(), 2);
        assert_eq!(facts_of_pem(key.pem().as_bytes()), Err("there is no certificate"));
        assert_eq!(facts_of_pem(&[0xff]), Err("there is no certificate"));
        let identity = Identity::join(issue(&key, 0).as_bytes(), &key).unwrap();
        assert_eq!(Identity::of_client(&identity.for_client()), Ok(identity.clone()));
        // The client receives exactly the text that it later reads from the file.
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), Purpose::Client);
        store.update(&identity, timestamp(0)).unwrap();
        assert_eq!(&fs::read(store.current_path()).unwrap(), identity.for_client().key.reveal());
    }
}
