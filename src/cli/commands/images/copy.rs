//! Copies a file into a directory so that an interruption at any moment leaves either nothing under
//! its name or the whole file. A later copy continues where an interrupted one ended. If the disk
//! becomes full, nothing stays: a node without free space evicts pods.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FlockOperation, flock, fstatvfs, renameat, unlinkat};

use crate::util::untrusted;

/// The size of reads and writes.
const BUFFER_BYTES: usize = 1024 * 1024;

/// So much is written before it is synced: the unsynced pages of a large file would fill the memory
/// of a small machine, and the progress would be that of the page cache.
const SYNC_BYTES: u64 = 16 * 1024 * 1024;

/// What a copy has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyOutcome {
    /// The directory has the same file already.
    Present,
    /// The whole file is there; so many bytes were there from an earlier attempt.
    Whole { resumed: u64 },
}

/// Copies `source` to `directory/name`. `progress` receives the number of bytes that are done.
///
/// # Errors
/// The text names the file. What was copied stays, and the next copy continues with it, unless the
/// disk is full.
pub(super) fn copy(
    source: &Path,
    directory: &Path,
    name: &str,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<CopyOutcome, String> {
    let failed = |what: &Path| {
        let what = what.display().to_string();
        move |error: io::Error| format!("{what}: {error}")
    };
    let from = open_source(source).map_err(failed(source))?;
    let about = from.metadata().map_err(failed(source))?;
    let size = about.len();
    let target = directory.join(name);
    let dir = untrusted::directory(directory, 0).map_err(failed(directory))?;
    if let Ok(present) = untrusted::open_at(dir.as_fd(), Path::new(name)) {
        let found = present.metadata().map_err(failed(&target))?;
        let same = (found.dev(), found.ino()) == (about.dev(), about.ino());
        if same
            || (found.len() == size && common_length(&from, &present, size).map_err(failed(&target))? == size)
        {
            return Ok(CopyOutcome::Present);
        }
    }
    let part = OsString::from(format!(".{name}.part"));
    let part_path = directory.join(&part);
    let mut to =
        untrusted::open_or_create_at(dir.as_fd(), Path::new(&part), 0o600).map_err(failed(&part_path))?;
    flock(&to, FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| format!("{}: another import writes this file", part_path.display()))?;
    let part_metadata = to.metadata().map_err(failed(&part_path))?;
    // Before the lock was taken, another import may have given the file its final name.
    let named = untrusted::open_at(dir.as_fd(), Path::new(&part)).and_then(|file| file.metadata());
    let named = named.map_err(failed(&part_path))?;
    if (named.dev(), named.ino()) != (part_metadata.dev(), part_metadata.ino()) {
        return Err(format!("{}: another import has just written this file", part_path.display()));
    }
    let resumed = common_length(&from, &to, part_metadata.len().min(size)).map_err(failed(&part_path))?;
    let space = fstatvfs(&dir).map_err(|error| failed(directory)(error.into()))?;
    // The blocks of the part count as used; those beyond its good beginning become free. After a loss
    // of power, a part may have fewer blocks than its length needs.
    let freed = part_metadata.blocks().saturating_mul(512).saturating_sub(resumed);
    let free = space.f_bavail.saturating_mul(space.f_frsize).saturating_add(freed);
    if free < size.saturating_sub(resumed) {
        if resumed == 0 {
            let _ = unlinkat(&dir, &part, AtFlags::empty());
        }
        return Err(format!(
            "{}: there are {free} bytes of free space for {} bytes of {}",
            directory.display(),
            size.saturating_sub(resumed),
            source.display()
        ));
    }
    to.set_len(resumed).map_err(failed(&part_path))?;
    to.seek(SeekFrom::Start(resumed)).map_err(failed(&part_path))?;
    copy_bytes(&from, &mut to, resumed, size, progress).map_err(|failure| match failure {
        Failure::Read(error) => failed(source)(error),
        Failure::Write(error)
            if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) =>
        {
            let removed = unlinkat(&dir, &part, AtFlags::empty()).is_ok();
            let left =
                if removed { "the incomplete copy was removed" } else { "the incomplete copy is left" };
            format!("{}: {error}; {left}", target.display())
        }
        Failure::Write(error) => failed(&part_path)(error),
    })?;
    renameat(&dir, Path::new(&part), &dir, name).map_err(|error| failed(&target)(error.into()))?;
    // The name, too, survives a loss of power.
    rustix::fs::fsync(&dir).map_err(|error| failed(directory)(error.into()))?;
    Ok(CopyOutcome::Whole { resumed })
}

/// A pipe or a device has no size.
fn open_source(source: &Path) -> io::Result<File> {
    untrusted::open(&real_path(source)?)
}

/// The operator's file may be a link.
pub(super) fn real_path(source: &Path) -> io::Result<PathBuf> {
    std::fs::canonicalize(source)
}

/// The length of the common beginning of two files, up to `limit`.
fn common_length(first: &File, second: &File, limit: u64) -> io::Result<u64> {
    let (mut a, mut b) = (vec![0; BUFFER_BYTES], vec![0; BUFFER_BYTES]);
    let mut offset = 0;
    while offset < limit {
        let most = usize::try_from(limit - offset).unwrap_or(usize::MAX).min(BUFFER_BYTES);
        let (a, b) = (a.get_mut(..most).unwrap_or_default(), b.get_mut(..most).unwrap_or_default());
        first.read_exact_at(a, offset)?;
        second.read_exact_at(b, offset)?;
        let equal = a.iter().zip(b.iter()).take_while(|(a, b)| a == b).count();
        offset += equal as u64;
        if equal < most {
            break;
        }
    }
    Ok(offset)
}

/// Why bytes cannot be copied.
enum Failure {
    Read(io::Error),
    Write(io::Error),
}

/// Copies the bytes from `offset` to `size`, and syncs the file.
fn copy_bytes(
    from: &File,
    to: &mut File,
    mut offset: u64,
    size: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), Failure> {
    let changed = |how: &str| Failure::Read(io::Error::other(format!("the file {how} while it was copied")));
    let mut reader = from;
    reader.seek(SeekFrom::Start(offset)).map_err(Failure::Read)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut unsynced = 0;
    while offset < size {
        progress(offset, size);
        let count = match reader.read(&mut buffer) {
            Ok(0) => return Err(changed("became shorter")),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read.map_err(Failure::Read)?,
        };
        to.write_all(buffer.get(..count).unwrap_or_default()).map_err(Failure::Write)?;
        offset += count as u64;
        unsynced += count as u64;
        if unsynced >= SYNC_BYTES {
            to.sync_data().map_err(Failure::Write)?;
            unsynced = 0;
        }
    }
    if offset > size || from.metadata().map_err(Failure::Read)?.len() != size {
        return Err(changed("changed"));
    }
    progress(size, size);
    to.set_permissions(std::fs::Permissions::from_mode(0o644)).map_err(Failure::Write)?;
    to.sync_all().map_err(Failure::Write)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|index| (index % 253) as u8).collect()
    }

    struct Fixture {
        dir: tempfile::TempDir,
    }

    impl Fixture {
        fn new(content: &[u8]) -> Fixture {
            let fixture = Fixture { dir: tempfile::tempdir().unwrap() };
            std::fs::create_dir(fixture.images()).unwrap();
            std::fs::write(fixture.source(), content).unwrap();
            fixture
        }

        fn images(&self) -> std::path::PathBuf {
            self.dir.path().join("images.d")
        }

        fn source(&self) -> std::path::PathBuf {
            self.dir.path().join("a.tar")
        }

        fn part(&self) -> std::path::PathBuf {
            self.images().join(".a.tar.part")
        }

        fn copy(&self) -> Result<CopyOutcome, String> {
            unlocked(|| copy(&self.source(), &self.images(), "a.tar", &mut |_, _| {}))
        }

        fn names(&self) -> Vec<String> {
            let entries = std::fs::read_dir(self.images()).unwrap();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        }
    }

    /// Copies as soon as the part is not locked. A program that another test starts has a copy of the
    /// descriptor, with its lock, until it is executed.
    fn unlocked(copy: impl Fn() -> Result<CopyOutcome, String>) -> Result<CopyOutcome, String> {
        let begun = std::time::Instant::now();
        loop {
            let result = copy();
            let is_locked = result.as_ref().is_err_and(|error| error.contains("another import writes"));
            if !is_locked || begun.elapsed() > std::time::Duration::from_secs(60) {
                return result;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn copy_continues_after_the_equal_beginning() {
        let content = bytes(3 * BUFFER_BYTES + 17);
        let fixture = Fixture::new(&content);
        for (part, resumed) in [
            (Vec::new(), 0),
            (content[..5].to_vec(), 5),
            (content[..2 * BUFFER_BYTES + 3].to_vec(), 2 * BUFFER_BYTES + 3),
            // A loss of power left zeros at the end.
            ([&content[..100], &[0; 5000][..]].concat(), 100),
            // Another file.
            (b"other".to_vec(), 0),
            // Longer than the file.
            ([&content[..], b"more"].concat(), content.len()),
        ] {
            std::fs::write(fixture.part(), &part).unwrap();
            assert_eq!(fixture.copy(), Ok(CopyOutcome::Whole { resumed: resumed as u64 }));
            assert_eq!(fixture.names(), ["a.tar"]);
            let target = fixture.images().join("a.tar");
            assert!(std::fs::read(&target).unwrap() == content);
            assert_eq!(std::fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o644);
            assert_eq!(fixture.copy(), Ok(CopyOutcome::Present));
            std::fs::remove_file(target).unwrap();
        }
    }

    #[test]
    fn interrupted_copy_leaves_no_file_of_the_name_and_is_resumed() {
        let content = bytes(5 * BUFFER_BYTES);
        let fixture = Fixture::new(&content);
        let stopped = std::panic::catch_unwind(|| {
            copy(&fixture.source(), &fixture.images(), "a.tar", &mut |done, _| {
                // As a kill at this moment.
                assert!(done < 2 * BUFFER_BYTES as u64, "stop here");
            })
        });
        assert!(stopped.is_err());
        assert_eq!(fixture.names(), [".a.tar.part"]);
        assert_eq!(fixture.copy(), Ok(CopyOutcome::Whole { resumed: 2 * BUFFER_BYTES as u64 }));
        assert!(std::fs::read(fixture.images().join("a.tar")).unwrap() == content);
    }

    #[test]
    fn changed_archive_of_the_same_name_is_replaced() {
        let fixture = Fixture::new(b"new content");
        std::fs::write(fixture.images().join("a.tar"), "old content").unwrap();
        assert_eq!(fixture.copy(), Ok(CopyOutcome::Whole { resumed: 0 }));
        assert_eq!(std::fs::read(fixture.images().join("a.tar")).unwrap(), b"new content");
    }

    #[test]
    fn errors_name_the_file_and_nothing_is_replaced() {
        let fixture = Fixture::new(b"x");
        let error = |source: &Path| copy(source, &fixture.images(), "a.tar", &mut |_, _| {}).unwrap_err();
        assert!(error(Path::new("/no/such.tar")).starts_with("/no/such.tar: "));
        assert!(error(fixture.dir.path()).ends_with("not a regular file"));
        std::os::unix::fs::symlink("/etc/passwd", fixture.part()).unwrap();
        assert!(fixture.copy().unwrap_err().contains(".a.tar.part: "));
        std::fs::remove_file(fixture.part()).unwrap();
        let other = File::create(fixture.part()).unwrap();
        flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(error(&fixture.source()).contains("another import writes"));
        drop(other);
        // A sparse file that is larger than any disk.
        let large = fixture.dir.path().join("large.tar");
        File::create(&large).unwrap().set_len(1 << 43).unwrap();
        // A part without blocks does not become free space.
        for (part, length, left) in [("", 0, 0), ("other", 1 << 43, 0), ("\0\0", 2, 1)] {
            std::fs::write(fixture.part(), part).unwrap();
            File::options().write(true).open(fixture.part()).unwrap().set_len(length).unwrap();
            let result = unlocked(|| {
                copy(&large, &fixture.images(), "a.tar", &mut |_, _| panic!("nothing is copied"))
            });
            assert!(result.unwrap_err().contains("bytes of free space"));
            assert_eq!(fixture.names().len(), left, "a part is kept if it is a beginning");
        }
    }
}
