//! The authorities of clients: `clientCAFile`, read again when it changes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::settings::Clock;
use crate::transport::tls::Authorities;
use crate::util::untrusted;

/// The file is checked no more often than this.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A larger file is an error: no bundle of authorities is as large.
const MAX_BYTES: u64 = 4 * 1024 * 1024;

/// The authorities of a file.
pub(super) struct AuthorityFile {
    path: PathBuf,
    clock: Clock,
    inner: Mutex<Inner>,
}

struct Inner {
    looked: Instant,
    seen: Option<Stamp>,
    authorities: Arc<Authorities>,
    /// Grows with every bundle that was read.
    generation: u64,
}

/// What tells that a file is another one, or has another content: device, inode, the time of
/// its last change (which no program can set), and length.
type Stamp = (u64, u64, i64, i64, u64);

impl AuthorityFile {
    pub(super) fn open(path: &Path, clock: Clock) -> Result<Self, String> {
        let seen = stamp(path);
        let authorities = read(path)?;
        let inner = Mutex::new(Inner { looked: clock(), seen, authorities, generation: 0 });
        Ok(AuthorityFile { path: path.to_owned(), clock, inner })
    }

    /// Those that count now, and which generation of them it is. A file that cannot be used
    /// leaves those of before.
    pub(super) fn current(&self) -> (u64, Arc<Authorities>) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let now = (self.clock)();
        if now.saturating_duration_since(inner.looked) >= LOOK_AGAIN {
            inner.looked = now;
            let seen = stamp(&self.path);
            if seen != inner.seen {
                match read(&self.path) {
                    Ok(authorities) => {
                        log::info!("the authorities in {} were read again", self.path.display());
                        (inner.authorities, inner.seen) = (authorities, seen);
                        inner.generation += 1;
                    }
                    // Half-way through a replacement, perhaps: the next look tells.
                    Err(why) => log::warn!("clients' authorities stay as they were: {why}"),
                }
            }
        }
        (inner.generation, Arc::clone(&inner.authorities))
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.ctime(), metadata.ctime_nsec(), metadata.len()))
}

fn read(path: &Path) -> Result<Arc<Authorities>, String> {
    let named = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
    if !fs::metadata(path).map_err(|error| named(&error))?.is_file() {
        return Err(named(&"it is no regular file"));
    }
    // It may be a pipe by now, which reads as empty.
    let pem = untrusted::read_own(path, MAX_BYTES).map_err(|error| named(&error))?;
    let authorities = Authorities::of_pem(&pem).map_err(|error| named(&error))?;
    let (all, signing) = authorities.count(Timestamp::now());
    if signing < all {
        log::warn!(
            "{}: {} of {all} certificates cannot sign clients' certificates: they are no authorities for \
             clients, or outside of their time",
            path.display(),
            all - signing
        );
    }
    Ok(Arc::new(authorities))
}
