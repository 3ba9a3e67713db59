//! Who vouches for clients: `clientCAFile`, read again when it changes.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Clock;
use crate::transport::serve::Authorities;

/// The file is looked at no more often than this.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// No bundle is longer; a file that is, is something else.
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
    authorities: Authorities,
}

/// What tells that a file is another one, or has another content: device, inode, the time of
/// its last change (which nobody can set), and length.
type Stamp = (u64, u64, i64, i64, u64);

impl AuthorityFile {
    pub(super) fn open(path: &Path, clock: Clock) -> Result<Self, String> {
        let seen = stamp(path);
        let authorities = read(path)?;
        let inner = Mutex::new(Inner { looked: clock(), seen, authorities });
        Ok(AuthorityFile { path: path.to_owned(), clock, inner })
    }

    /// Those that count now. A file that cannot be used leaves those of before.
    pub(super) fn current(&self) -> Authorities {
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
                    }
                    // Half-way through a replacement, perhaps: the next look tells.
                    Err(why) => log::warn!("clients' authorities stay as they were: {why}"),
                }
            }
        }
        inner.authorities.clone()
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.ctime(), metadata.ctime_nsec(), metadata.len()))
}

fn read(path: &Path) -> Result<Authorities, String> {
    let named = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
    // To open a pipe would wait for somebody to write to it.
    if !fs::metadata(path).map_err(|error| named(&error))?.is_file() {
        return Err(named(&"it is no regular file"));
    }
    let mut pem = Vec::new();
    fs::File::open(path)
        .and_then(|file| file.take(MAX_BYTES).read_to_end(&mut pem))
        .map_err(|error| named(&error))?;
    Authorities::of_pem(&pem).map_err(|error| named(&error))
}
