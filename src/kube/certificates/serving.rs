//! The node's serving certificate: from the operator's files, self-signed, or issued on request
//! (Go: pkg/kubelet/certificate, cmd/kubelet's initializeTLS).

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use jiff::{SignedDuration, Timestamp};

use super::csr::{PrivateKey, Purpose, ServingNames, Template};
use super::error::Error;
use super::store::{self, Identity, Store};
pub use crate::transport::tls::ServingCertificate;
use crate::util::atomic_file;
use crate::util::error_chain::chain;
use crate::util::lock::LockExt;

/// Lifetime of a self-signed certificate.
const LIFETIME: Duration = Duration::from_secs(366 * 86_400);
/// A self-signed certificate is valid from this time ago, for clients whose clock is behind.
const BACKDATED: SignedDuration = SignedDuration::from_hours(1);
/// The shortest time between two checks of the operator's files.
const CHECK_PERIOD: Duration = Duration::from_secs(10);

/// Where a serving certificate comes from.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum Source {
    /// `tlsCertFile` and `tlsPrivateKeyFile`.
    Files { certificate: PathBuf, key: PathBuf },
    /// `kubelet.crt` and `kubelet.key` in the certificate directory, created if they are missing or
    /// have expired.
    SelfSigned {
        dir: PathBuf,
        /// The host's name, or a substitute for it.
        host: String,
        /// The host's addresses.
        ips: Vec<std::net::IpAddr>,
    },
    /// Issued on request (`serverTLSBootstrap`); none until then.
    Requested { dir: PathBuf },
}

/// The current serving certificate, for the server. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct CurrentServingCertificate {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    current: Option<Arc<ServingCertificate>>,
    /// The end of the current certificate, or of the stored one that is not used because it has expired.
    end: Option<Timestamp>,
    /// What replaces it.
    remedy: &'static str,
    files: Option<Files>,
}

/// Files that the operator may replace.
#[derive(Debug)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    checked: Instant,
    changed: [Option<SystemTime>; 2],
}

impl CurrentServingCertificate {
    /// Opens the source; a certificate that already exists is used immediately.
    ///
    /// # Errors
    /// When files cannot be read, used or written. A certificate on request that cannot be
    /// used is only logged: there will be another one.
    pub fn open(source: &Source, now: Timestamp) -> Result<CurrentServingCertificate, Error> {
        let serving = CurrentServingCertificate::default();
        serving.inner.locked().remedy = match source {
            Source::Files { .. } => "replace the files of tlsCertFile and tlsPrivateKeyFile",
            Source::SelfSigned { .. } => "a restart of the agent makes a new one",
            Source::Requested { .. } => "a new one is requested as soon as the API server responds",
        };
        match source {
            Source::Files { certificate, key } => {
                let mut inner = serving.inner.locked();
                let identity = read_pair(certificate, key)?;
                inner.files = Some(Files {
                    certificate: certificate.clone(),
                    key: key.clone(),
                    checked: Instant::now(),
                    changed: [changed(certificate), changed(key)],
                });
                inner.put(&identity);
            }
            Source::SelfSigned { dir, host, ips } => {
                let identity = self_signed(dir, host, ips, now)?;
                serving.put(&identity);
            }
            Source::Requested { dir } => match Store::new(dir, Purpose::Serving).load() {
                Ok(Some(identity)) if !identity.facts.is_expired(now) => serving.put(&identity),
                Ok(Some(identity)) => serving.inner.locked().end = Some(identity.facts.not_after),
                Ok(None) => {}
                Err(error) => log::warn!("{}", chain(&error)),
            },
        }
        Ok(serving)
    }

    /// What is wrong with the certificate at `now`, for users.
    #[must_use]
    pub fn problem(&self, now: Timestamp) -> Option<String> {
        let inner = self.inner.locked();
        let end = inner.end.filter(|end| now > *end)?;
        Some(format!(
            "the serving certificate expired at {end}, or the clock is wrong: requests to this node fail \
             (kubectl logs, exec); {} (the clock of this machine shows {now:.0})",
            inner.remedy
        ))
    }

    /// The certificate to show now. The operator's files are read again when they changed.
    #[must_use]
    pub fn current(&self) -> Option<Arc<ServingCertificate>> {
        let mut inner = self.inner.locked();
        inner.reload(Instant::now());
        inner.current.clone()
    }

    pub(super) fn put(&self, identity: &Identity) {
        self.inner.locked().put(identity);
    }
}

impl Inner {
    fn put(&mut self, identity: &Identity) {
        let generation = self.current.as_ref().map_or(0, |current| current.generation) + 1;
        self.end = Some(identity.facts.not_after);
        self.current = Some(Arc::new(ServingCertificate {
            certificate_chain_pem: identity.chain_pem.clone(),
            key_pem: identity.key_pem.clone(),
            generation,
        }));
    }

    fn reload(&mut self, now: Instant) {
        let Some(files) = &mut self.files else { return };
        if now.saturating_duration_since(files.checked) < CHECK_PERIOD {
            return;
        }
        files.checked = now;
        let seen = [changed(&files.certificate), changed(&files.key)];
        if seen == files.changed {
            return;
        }
        match read_pair(&files.certificate, &files.key) {
            Ok(identity) => {
                files.changed = seen;
                log::info!("the serving certificate {} was read again", files.certificate.display());
                self.put(&identity);
            }
            // Perhaps a replacement is in progress: the old files stay, and the next check reads
            // them.
            Err(error) => log::warn!("the serving certificate stays as it was: {}", chain(&error)),
        }
    }
}

fn changed(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

/// Reads a chain and its key from two files.
fn read_pair(certificate: &Path, key: &Path) -> Result<Identity, Error> {
    let text = |path: &Path| {
        store::read(path)?
            .ok_or_else(|| Error::Content { path: path.to_owned(), reason: "there is no such file" })
    };
    let chain = text(certificate)?;
    Identity::of_pem(&format!("{}\n{}", chain.trim_end(), text(key)?)).map_err(|reason| {
        let path = if reason.contains("key") { key } else { certificate };
        Error::Content { path: path.to_owned(), reason }
    })
}

fn self_signed(dir: &Path, host: &str, ips: &[std::net::IpAddr], now: Timestamp) -> Result<Identity, Error> {
    let (certificate, key) = (dir.join("kubelet.crt"), dir.join("kubelet.key"));
    if certificate.exists() && key.exists() {
        match read_pair(&certificate, &key) {
            // DIFFERS: upstream serves an expired certificate without a limit.
            Ok(identity) if !identity.facts.is_expired(now) => return Ok(identity),
            Ok(_) => log::info!("{} has expired; a new one replaces it", certificate.display()),
            Err(error) => log::warn!("{}; a new certificate replaces it", chain(&error)),
        }
    }
    let mut names = ServingNames { ips: ips.iter().copied().collect(), ..ServingNames::default() };
    match host.parse() {
        Ok(ip) => names.ips.insert(ip),
        Err(_) => names.dns_names.insert(host.to_owned()),
    };
    let private = PrivateKey::generate()?;
    let from = now.saturating_sub(BACKDATED).unwrap_or(now);
    let pem = Template::self_signed(host, &names, &private, from, LIFETIME)?;
    let stored = Store::new(dir, Purpose::Serving)
        .make_dir()
        .and_then(|()| store::write(&key, &private.pem()))
        .and_then(|()| {
            atomic_file::write(&certificate, pem.as_bytes(), 0o644)
                .map_err(|source| Error::Write { path: certificate.clone(), source })
        });
    // DIFFERS: upstream does not start. A full or read-only disk must not keep pods from running; clients do
    // not verify this certificate.
    if let Err(error) = stored {
        log::warn!("{}; the new certificate is used until the agent ends", chain(&error));
    }
    Identity::join(pem.as_bytes(), &private).map_err(|reason| Error::Content { path: certificate, reason })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn day_time(day: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + day * 86_400).unwrap()
    }

    fn self_signed_in(dir: &Path, day: i64) -> Arc<ServingCertificate> {
        let ips = vec!["10.0.0.7".parse().unwrap()];
        let source = Source::SelfSigned { dir: dir.to_owned(), host: "node1".into(), ips };
        CurrentServingCertificate::open(&source, day_time(day)).unwrap().current().unwrap()
    }

    #[test]
    fn a_self_signed_certificate_is_made_once_a_year() {
        let dir = tempfile::tempdir().unwrap();
        let pki = dir.path().join("pki");
        let first = self_signed_in(&pki, 0);
        let facts = store::facts_of_pem(first.certificate_chain_pem.as_bytes()).unwrap().remove(0);
        assert_eq!(
            (facts.dns_names, facts.ips),
            (vec!["node1".to_owned()], vec!["10.0.0.7".parse().unwrap()])
        );
        assert!(
            facts.not_before < day_time(0)
                && facts.not_after > day_time(365)
                && facts.not_after < day_time(367)
        );
        let mode = |name: &str| std::fs::metadata(pki.join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("kubelet.key"), mode("kubelet.crt")), (0o600, 0o644));
        assert_eq!(self_signed_in(&pki, 300), first);
        assert_ne!(self_signed_in(&pki, 400).key_pem, first.key_pem);
        std::fs::write(pki.join("kubelet.crt"), "nonsense").unwrap();
        assert_ne!(self_signed_in(&pki, 0).key_pem, first.key_pem);
        let shown = format!("{first:?}");
        assert!(shown.contains("Secret(..)") && !shown.contains("PRIVATE"), "{shown}");
    }

    #[test]
    fn files_of_the_operator_are_read_again_when_they_change() {
        let dir = tempfile::tempdir().unwrap();
        self_signed_in(dir.path(), 0);
        let source = Source::Files {
            certificate: dir.path().join("kubelet.crt"),
            key: dir.path().join("kubelet.key"),
        };
        let serving = CurrentServingCertificate::open(&source, day_time(0)).unwrap();
        let first = serving.current().unwrap();
        let reload = |later: u64| serving.inner.locked().reload(Instant::now() + Duration::from_secs(later));
        reload(60);
        assert_eq!(serving.current().unwrap(), first);
        let touch = |name: &str| {
            let file = std::fs::File::options().append(true).open(dir.path().join(name)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)).unwrap();
        };
        // An invalid file leaves the old certificate in use.
        let good = std::fs::read(dir.path().join("kubelet.crt")).unwrap();
        std::fs::write(dir.path().join("kubelet.crt"), "nonsense").unwrap();
        touch("kubelet.crt");
        reload(120);
        assert_eq!(serving.inner.locked().current.clone().unwrap(), first);
        std::fs::write(dir.path().join("kubelet.crt"), good).unwrap();
        reload(121);
        assert_eq!(
            serving.inner.locked().current.clone().unwrap().generation,
            1,
            "the last check was a moment ago"
        );
        touch("kubelet.crt");
        reload(180);
        assert_eq!(serving.inner.locked().current.clone().unwrap().generation, 2);
        assert!(
            CurrentServingCertificate::open(
                &Source::Files { certificate: "/none".into(), key: "/none".into() },
                day_time(0)
            )
            .is_err()
        );
    }

    #[test]
    fn self_signed_certificate_that_cannot_be_stored_is_served() {
        let dir = tempfile::tempdir().unwrap();
        let first = self_signed_in(dir.path(), 0);
        for name in ["kubelet.crt", "kubelet.key"] {
            std::fs::remove_file(dir.path().join(name)).unwrap();
            std::fs::create_dir(dir.path().join(name)).unwrap();
            assert_ne!(self_signed_in(dir.path(), 0), first, "{name}");
        }
        std::fs::write(dir.path().join("file"), "").unwrap();
        assert_ne!(self_signed_in(&dir.path().join("file"), 0), first, "no directory can be made");
    }

    #[test]
    fn requested_certificate_is_served_once_issued() {
        let dir = tempfile::tempdir().unwrap();
        let source = Source::Requested { dir: dir.path().to_owned() };
        assert!(CurrentServingCertificate::open(&source, day_time(0)).unwrap().current().is_none());
        let key = PrivateKey::generate().unwrap();
        let pem = Template::self_signed("n", &ServingNames::default(), &key, day_time(0), LIFETIME).unwrap();
        let identity = Identity::join(pem.as_bytes(), &key).unwrap();
        Store::new(dir.path(), Purpose::Serving).update(&identity, day_time(0)).unwrap();
        assert!(CurrentServingCertificate::open(&source, day_time(1)).unwrap().current().is_some());
        let late = CurrentServingCertificate::open(&source, day_time(400)).unwrap();
        assert!(late.current().is_none());
        let problem = late.problem(day_time(400)).unwrap();
        assert!(problem.starts_with("the serving certificate expired at 2024-11-"), "{problem}");
        assert!(problem.contains("requested as soon as the API server responds"), "{problem}");
        // The new one.
        let pem =
            Template::self_signed("n", &ServingNames::default(), &key, day_time(400), LIFETIME).unwrap();
        late.put(&Identity::join(pem.as_bytes(), &key).unwrap());
        assert_eq!((late.problem(day_time(400)), late.problem(day_time(800)).is_some()), (None, true));
    }
}
