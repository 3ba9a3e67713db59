//! The authorities of clients: `clientCAFile`, read again when it changes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::settings::Clock;
use crate::transport::tls::Authorities;
use crate::util::lock::LockExt;
use crate::util::untrusted;

/// The file is checked no more often than this.
const CHECK_PERIOD: Duration = Duration::from_secs(1);

/// A larger file is an error: no bundle of authorities is as large.
const MAX_BYTES: u64 = 4 * 1024 * 1024;

pub(super) struct AuthorityFile {
    path: PathBuf,
    clock: Clock,
    inner: Mutex<Inner>,
}

struct Inner {
    checked: Instant,
    stamp: Option<Stamp>,
    authorities: Arc<Authorities>,
    /// Grows with every bundle that was read.
    generation: u64,
}

/// Differs between files and versions of a file: device, inode, the time of its last change
/// (which no program can set), and length.
type Stamp = (u64, u64, i64, i64, u64);

impl AuthorityFile {
    pub(super) fn open(path: &Path, clock: Clock) -> Result<Self, String> {
        let stamp = file_stamp(path);
        let authorities = read(path)?;
        let inner = Mutex::new(Inner { checked: clock(), stamp, authorities, generation: 0 });
        Ok(AuthorityFile { path: path.to_owned(), clock, inner })
    }

    /// The generation of the authorities, and the authorities. A file that cannot be used
    /// changes nothing.
    pub(super) fn current(&self) -> (u64, Arc<Authorities>) {
        let mut inner = self.inner.locked();
        let now = (self.clock)();
        if now.saturating_duration_since(inner.checked) >= CHECK_PERIOD {
            inner.checked = now;
            let stamp = file_stamp(&self.path);
            if stamp != inner.stamp {
                match read(&self.path) {
                    Ok(authorities) => {
                        log::info!("reloaded the authorities in {}", self.path.display());
                        (inner.authorities, inner.stamp) = (authorities, stamp);
                        inner.generation += 1;
                    }
                    // The file may be being replaced; the next check reads the new one.
                    Err(error) => log::warn!("cannot reload the authorities of clients: {error}"),
                }
            }
        }
        (inner.generation, Arc::clone(&inner.authorities))
    }
}

fn file_stamp(path: &Path) -> Option<Stamp> {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.ctime(), metadata.ctime_nsec(), metadata.len()))
}

fn read(path: &Path) -> Result<Arc<Authorities>, String> {
    let named = |reason: &dyn std::fmt::Display| format!("{}: {reason}", path.display());
    if !fs::metadata(path).map_err(|error| named(&error))?.is_file() {
        return Err(named(&"it is not a regular file"));
    }
    // The file may have been replaced by a pipe since; a pipe is read as empty.
    let pem = untrusted::read_own(path, MAX_BYTES).map_err(|error| named(&error))?;
    let authorities = Authorities::of_pem(&pem).map_err(|error| named(&error))?;
    let (all, signing) = authorities.count(Timestamp::now());
    if signing < all {
        log::warn!(
            "{}: {} of {all} certificates cannot sign clients' certificates: they are no authorities for \
             clients, or not valid now",
            path.display(),
            all - signing
        );
    }
    Ok(Arc::new(authorities))
}
