//! Locks on the root directory and of the local socket, each for one agent.
//!
//! A lock is a file `<name>.<number>` on which its process holds a POSIX write lock; the file
//! with the highest number counts. Such a lock needs a descriptor that is open for writing, so a
//! container that has the directory read-only cannot hold one. It can hold the other kinds,
//! flock(2) and POSIX read locks, and keep a process from locking a file that exists. Hence each
//! process makes a new file with the next number and locks it before it has its name, and only
//! checks the files of others for write locks.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Flock, FlockType};

use super::error::ServerError;
use crate::util::disk_writes;

/// The name of the root directory's locks.
const ROOT_LOCK: &str = "agent.lock";

/// How often another process may make the file first, or open it before it is locked.
const ATTEMPTS: u32 = 100;

/// While this lives the directory or socket belongs to this process. The kernel releases it when
/// the process ends for any reason.
///
/// INVARIANT: the process opens its lock's file once. A POSIX lock ends when any of the
/// process's descriptors of the file is closed.
#[derive(Debug)]
pub(crate) struct InstanceLock {
    _file: File,
}

/// Locks the root directory, before its files or its pods are used: two agents
/// with one directory would stop each other's pods.
///
/// # Errors
/// When another agent has it, or when it cannot be written to.
pub(crate) fn lock_root_dir(root_dir: &Path) -> Result<InstanceLock, ServerError> {
    match lock(root_dir, ROOT_LOCK) {
        Ok(Some(lock)) => Ok(lock),
        Ok(None) => Err(ServerError::AlreadyRunning { path: root_dir.to_owned() }),
        Err(source) => Err(ServerError::InstanceLock { path: root_dir.to_owned(), source }),
    }
}

/// The id of the process that has the lock of the root directory. `None`: no process that this one sees has it,
/// or the directory cannot be read.
pub(crate) fn root_dir_owner(root_dir: &Path) -> Option<u32> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(root_dir, flags, Mode::empty()).ok()?;
    let newest = numbers(&directory, ROOT_LOCK).ok()?.into_iter().max()?;
    // Of another PID namespace the kernel reports no id.
    let pid = holder(&directory, &format!("{ROOT_LOCK}.{newest}")).ok()??.pid?;
    u32::try_from(pid.as_raw_pid()).ok()
}

/// Locks the local socket's path and makes its directory, mode 0700, unless it exists.
///
/// # Errors
/// When another agent has it, or when its directory cannot be made or written to.
pub(crate) fn lock_local_socket(socket: &Path) -> Result<InstanceLock, ServerError> {
    let failed = |source| ServerError::InstanceLock { path: socket.to_owned(), source };
    let (Some(directory), Some(name)) = (socket.parent(), socket.file_name()) else {
        return Err(failed(io::ErrorKind::InvalidInput.into()));
    };
    disk_writes::make_directories(directory, 0o700).map_err(failed)?;
    match lock(directory, &format!("{}.lock", name.to_string_lossy())) {
        Ok(Some(lock)) => Ok(lock),
        Ok(None) => Err(ServerError::SocketInUse { path: socket.to_owned() }),
        Err(source) => Err(failed(source)),
    }
}

/// `None`: another process has it.
///
/// Two processes never both have it. Numbers go up by one, and only files below the highest number
/// are removed, so the highest number never falls. A process that has the lock by number n found n
/// to be the highest after it had made it. Number n + 1 is made by a process that found n to be the
/// highest and not held; but n is held from before it has its name until its process ends.
fn lock(directory: &Path, name: &str) -> io::Result<Option<InstanceLock>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, flags, Mode::empty())?;
    for _ in 0..ATTEMPTS {
        let newest = numbers(&directory, name)?.into_iter().max().unwrap_or(0);
        if newest > 0 && is_held(&directory, &format!("{name}.{newest}"))? {
            return Ok(None);
        }
        let number = newest.checked_add(1).ok_or(io::ErrorKind::FileTooLarge)?;
        let Some(file) = make(&directory, name, &format!("{name}.{number}"))? else { continue };
        let others = numbers(&directory, name)?;
        if others.iter().any(|other| *other > number) {
            remove(&directory, &format!("{name}.{number}"));
            continue;
        }
        for other in others.into_iter().filter(|other| *other < number) {
            remove(&directory, &format!("{name}.{other}"));
        }
        return Ok(Some(InstanceLock { _file: file }));
    }
    Err(io::ErrorKind::ResourceBusy.into())
}

/// The numbers of the locks' files.
fn numbers(directory: impl AsFd, name: &str) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let number =
            entry.file_name().to_str().ok().and_then(|file| file.strip_prefix(name)?.strip_prefix('.'));
        numbers.extend(number.and_then(|text| text.parse::<u64>().ok()));
    }
    Ok(numbers)
}

/// Whether another process has a write lock on the file.
fn is_held(directory: impl AsFd, file: &str) -> io::Result<bool> {
    Ok(holder(directory, file)?.is_some())
}

/// The write lock that another process has on the file.
fn holder(directory: impl AsFd, file: &str) -> io::Result<Option<Flock>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    match rustix::fs::openat(directory, file, flags, Mode::empty()) {
        // Only a write lock conflicts with a read lock.
        Ok(file) => Ok(rustix::process::fcntl_getlk(file, &FlockType::ReadLock.into())?),
        // A newer lock has replaced it, or it is no lock but a link or a socket.
        Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Makes a locked file of this name. `None`: the name is taken, or another process has opened the
/// file and locked it first.
fn make(directory: impl AsFd, name: &str, numbered: &str) -> io::Result<Option<File>> {
    // This name has no number, so it does not count.
    let temporary = format!("{name}.new-{:016x}", RandomState::new().hash_one(std::process::id()));
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file =
        disk_writes::created(rustix::fs::openat(&directory, &temporary, flags, Mode::RUSR | Mode::WUSR))?;
    let linked = rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive)
        .and_then(|()| rustix::fs::linkat(&directory, &temporary, &directory, numbered, AtFlags::empty()));
    remove(&directory, &temporary);
    match linked {
        Ok(()) => Ok(Some(file.into())),
        Err(Errno::AGAIN | Errno::ACCESS | Errno::EXIST) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn remove(directory: impl AsFd, file: &str) {
    // A file that stays does no harm: no process holds it, or its name has no number.
    let _ = rustix::fs::unlinkat(directory, file, AtFlags::empty());
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{fcntl_lock, flock};
    use std::io::{BufRead, BufReader, Read};
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Command, Stdio};

    fn files(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    // tests/integration/agent.rs tests locks between processes.

    /// Set in the process that has the lock.
    const DIRECTORY: &str = "CORACLE_TEST_LOCKED_DIRECTORY";

    /// Runs itself in another process, because the kernel does not report own locks.
    #[test]
    fn owner_of_the_root_directory_is_the_process_with_the_lock() {
        if let Some(directory) = std::env::var_os(DIRECTORY) {
            let _lock = lock_root_dir(Path::new(&directory)).unwrap();
            println!("locked");
            // The lock ends when the other process closes the pipe.
            io::stdin().lock().read_to_end(&mut Vec::new()).unwrap();
            return;
        }
        let root = tempfile::tempdir().unwrap();
        assert_eq!(root_dir_owner(root.path()), None);
        assert_eq!(root_dir_owner(&root.path().join("absent")), None);
        let test = "server::instance_lock::tests::owner_of_the_root_directory_is_the_process_with_the_lock";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(DIRECTORY, root.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("locked")));
        assert_eq!(root_dir_owner(root.path()), Some(child.id()));
        drop(child.stdin.take());
        lines.for_each(drop);
        assert!(child.wait().unwrap().success());
        // Its file stays.
        assert!(root.path().join("agent.lock.1").exists());
        assert_eq!(root_dir_owner(root.path()), None);
    }

    #[test]
    fn each_lock_is_a_file_of_the_next_number() {
        let root = tempfile::tempdir().unwrap();
        for number in 1..=3 {
            let lock = lock_root_dir(root.path()).unwrap();
            assert_eq!(files(root.path()), [format!("agent.lock.{number}")]);
            let mode = lock._file.metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        assert!(lock_root_dir(&root.path().join("absent")).is_err());
    }

    #[test]
    fn lock_ignores_files_without_a_number() {
        let root = tempfile::tempdir().unwrap();
        for name in
            ["agent.lock", "agent.lock.", "agent.lock.x", "agent.lock.new-7", "agent.lockout.9", "other"]
        {
            std::fs::write(root.path().join(name), "").unwrap();
        }
        drop(lock_root_dir(root.path()).unwrap());
        assert!(root.path().join("agent.lock.1").exists());
        std::fs::write(root.path().join(format!("agent.lock.{}", u64::MAX)), "").unwrap();
        assert!(lock_root_dir(root.path()).is_err());
    }

    #[test]
    fn what_is_no_file_in_the_place_of_a_lock_prevents_no_start() {
        let root = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("absent", root.path().join("agent.lock.3")).unwrap();
        drop(lock_root_dir(root.path()).unwrap());
        assert_eq!(files(root.path()), ["agent.lock.4"]);
        std::fs::create_dir(root.path().join("agent.lock.6")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(root.path().join("agent.lock.7")).unwrap();
        let _lock = lock_root_dir(root.path()).unwrap();
        assert!(root.path().join("agent.lock.8").exists());
    }

    #[test]
    fn locks_that_need_no_right_to_write_do_not_count() {
        let root = tempfile::tempdir().unwrap();
        drop(lock_root_dir(root.path()).unwrap());
        let readers = [root.path().to_owned(), root.path().join("agent.lock.1")].map(|path| {
            let reader = File::open(path).unwrap();
            flock(&reader, FlockOperation::NonBlockingLockExclusive).unwrap();
            reader
        });
        assert!(fcntl_lock(&readers[1], FlockOperation::NonBlockingLockExclusive).is_err());
        fcntl_lock(&readers[1], FlockOperation::NonBlockingLockShared).unwrap();
        lock_root_dir(root.path()).unwrap();
    }

    #[test]
    fn socket_gets_a_private_directory() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("run/coracle/a.sock");
        let _lock = lock_local_socket(&socket).unwrap();
        let mode = std::fs::metadata(socket.parent().unwrap()).unwrap().permissions().mode();
        assert_eq!(
            (mode & 0o777, files(socket.parent().unwrap())),
            (0o700, vec!["a.sock.lock.1".to_owned()])
        );
        // Another socket is another lock. An existing directory is not changed.
        let _other = lock_local_socket(&dir.path().join("run/coracle/b.sock")).unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let _above = lock_local_socket(&dir.path().join("c.sock")).unwrap();
        assert_eq!(std::fs::metadata(dir.path()).unwrap().permissions().mode() & 0o777, 0o755);
        assert!(lock_local_socket(Path::new("/")).is_err());
    }
}
