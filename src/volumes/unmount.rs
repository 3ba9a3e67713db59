//! Unmounts of file systems whose server may not respond (Go: mount-utils UnmountWithForce).
//!
//! A plain unmount of a dead server hangs in the kernel. It runs on its own thread; after
//! [`PLAIN`], upstream's minute, a forced one aborts the requests to the server, and if that hangs
//! too, the mount is detached from the tree and the kernel removes it when it can. A mount that is
//! only busy is never forced: a process still uses it. Nor is one of a file system that is also mounted
//! elsewhere, as the mount table shows just before: a forced unmount aborts the requests of all (DIFFERS:
//! the Go kubelet does not check that). Threads that hang end with the kernel's call;
//! [`hung_calls`] counts and names them. The volumes of one pod are unmounted at the same time
//! ([`run_together`]), so that one dead server does not delay the others.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, select_biased};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::error::VolumeError;
use super::mounts::{self, MountUse};
use super::paths::SUB_PATHS;
use crate::util::error_chain::chain;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};

/// The wait for a plain unmount: upstream's limit for NFS.
const PLAIN: Duration = Duration::from_secs(60);
/// The wait for a forced one.
const FORCED: Duration = Duration::from_secs(20);
/// The wait for the answer to a question that needs the server.
const PROBE: Duration = Duration::from_secs(10);
/// The wait for a lazy one, which the kernel ends without the server.
const LAZY: Duration = Duration::from_secs(10);
/// Calls that may hang at the same time for one pod. Beyond that, none is begun for it.
const MAX_HUNG_OF_POD: usize = 32;
/// Those of all pods, apart from one of each.
const MAX_HUNG: usize = 1024;
/// Volumes of one pod that are unmounted at the same time.
const MAX_TOGETHER: usize = 32;

/// Calls that have not ended.
static HUNG_CALLS: Mutex<Vec<(Call, Instant)>> = Mutex::new(Vec::new());

/// What a call does, and its mount point.
type Call = (&'static str, PathBuf);

const UNMOUNT: &str = "unmount";
const SIZE: &str = "size";

/// The ways to unmount, in order.
const WAYS: [(UnmountFlags, Duration); 3] =
    [(UnmountFlags::empty(), PLAIN), (UnmountFlags::FORCE, FORCED), (UnmountFlags::DETACH, LAZY)];

/// As [`WAYS`], for a bind mount of a part of another mount: the kernel does not need its server.
const BIND_WAYS: [(UnmountFlags, Duration); 3] = [
    (UnmountFlags::empty(), Duration::from_secs(10)),
    (UnmountFlags::FORCE, Duration::from_secs(5)),
    (UnmountFlags::DETACH, Duration::from_secs(5)),
];

/// The removal of one volume: its name, and the work.
pub(super) type Job = (String, Box<dyn FnOnce(&StopToken) -> Result<(), VolumeError> + Send>);

/// The result of a job, with its number and its name.
type Ended = (usize, String, Result<(), VolumeError>);

/// Runs jobs at the same time until all have ended, and returns what failed, in the order of the jobs:
/// the first failure is what users see, and must not change with each attempt. Each job has its own
/// limit of time. The stop token is given to all.
pub(super) fn run_together(mut jobs: Vec<Job>, stop: &StopToken) -> Vec<(String, VolumeError)> {
    if jobs.len() <= 1 {
        let run = |(name, work): Job| work(stop).err().map(|error| (name, error));
        return jobs.pop().and_then(run).into_iter().collect();
    }
    let count = jobs.len();
    let (job_sender, job_receiver) = bounded(count);
    let (report, reported) = bounded(count);
    for job in jobs.into_iter().enumerate() {
        // The channel has room for all.
        let _ = job_sender.send(job);
    }
    drop(job_sender);
    let mut workers = Vec::new();
    for _ in 0..count.min(MAX_TOGETHER) {
        let (job_receiver, report) = (job_receiver.clone(), report.clone());
        let work = move |stop: StopToken| run_jobs(&job_receiver, &report, &stop);
        match threads::spawn("vol/teardown", Stack::Small, OnDeath::Unsupervised, work) {
            Ok(running) => workers.push(running),
            Err(error) => {
                log::warn!("a thread to unmount volumes cannot be started: {error}");
                break;
            }
        }
    }
    if workers.is_empty() {
        run_jobs(&job_receiver, &report, stop);
    }
    drop((job_receiver, report));
    let _waiting = threads::waiting("the unmounts of a pod");
    let mut ended = Vec::new();
    loop {
        select_biased! {
            recv(reported) -> received => match received {
                Ok(result) => ended.push(result),
                Err(_) => break,
            },
            recv(stop.signal()) -> _ => {
                workers.iter_mut().for_each(Running::request_stop);
                ended.extend(reported.iter());
                break;
            }
        }
    }
    let panicked = (ended.len() < count).then(|| ("?".to_owned(), VolumeError::Panicked));
    ended.sort_by_key(|(number, _, _)| *number);
    let failed = |(_, name, result): Ended| result.err().map(|error| (name, error));
    ended.into_iter().filter_map(failed).chain(panicked).collect()
}

fn run_jobs(jobs: &Receiver<(usize, Job)>, report: &Sender<Ended>, stop: &StopToken) {
    for (number, (name, work)) in jobs.try_iter() {
        let _waiting = threads::waiting("unmount");
        // The channel has room for all.
        let _ = report.send((number, name, work(stop)));
    }
}

/// A call on a mount that hangs in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HungCall {
    /// The mount point.
    pub path: PathBuf,
    /// `unmount`, or `size` for the question whether the server responds.
    pub call: &'static str,
    /// How long it has hung.
    pub since: Duration,
}

/// The calls that have not ended, for `coracle status`.
#[must_use]
pub fn hung_calls() -> Vec<HungCall> {
    let table = HUNG_CALLS.locked();
    let shown = |((call, path), begun): &(Call, Instant)| HungCall {
        path: path.clone(),
        call,
        since: begun.elapsed(),
    };
    table.iter().map(shown).collect()
}

/// Unmounts a mount of the agent's own.
pub(super) fn unmount_own(mount: &Path, is_remote: bool) -> Result<(), VolumeError> {
    let Some(top) = mount.parent() else { return Ok(()) };
    if is_remote { unmount_remote(top, mount) } else { mounts::unmount(top, mount) }
}

/// Unmounts `mount`, in `top`, whose server may not respond.
pub(super) fn unmount_remote(top: &Path, mount: &Path) -> Result<(), VolumeError> {
    by_ways(top, mount, &WAYS)
}

/// As [`unmount_remote`], for a bind mount of a part of another mount.
pub(super) fn unmount_remote_bind(top: &Path, mount: &Path) -> Result<(), VolumeError> {
    by_ways(top, mount, &BIND_WAYS)
}

fn by_ways(top: &Path, mount: &Path, ways: &[(UnmountFlags, Duration)]) -> Result<(), VolumeError> {
    let (top, point) = (top.to_owned(), mount.to_owned());
    let pod = pod_of(&top, mount);
    let call = Arc::new(move |flags| mounts::unmount_in(&top, &point, flags));
    escalate(mount, &call, ways, &mut || use_now(mount, &pod))
}

/// Who uses the mount of a pod now. Without the mount table, others may use it.
fn use_now(mount: &Path, pod: &Path) -> MountUse {
    mounts::table().map_or(MountUse::Shared, |table| mounts::use_of(&table, mount, pod))
}

/// The directory of the pod with a mount, if `top` is that of all pods.
fn pod_of(top: &Path, mount: &Path) -> PathBuf {
    let mut way = mount.strip_prefix(top).unwrap_or(mount).iter();
    match (way.next(), way.next()) {
        (Some(pod), Some(_)) => top.join(pod),
        _ => owner(mount).to_owned(),
    }
}

/// Aborts all requests to the server of `mount`, which is in `top`, and unmounts it unless it is
/// busy. Processes that wait for the server get an error. Does nothing if others use the server too.
pub(super) fn unmount_by_force(top: &Path, mount: &Path) -> Result<(), VolumeError> {
    let pod = pod_of(top, mount);
    if use_now(mount, &pod) != MountUse::Own {
        return Ok(());
    }
    let (top, point) = (top.to_owned(), mount.to_owned());
    let call = Arc::new(move |flags| match mounts::unmount_in(&top, &point, flags) {
        // The requests were aborted before that was found.
        Err(Errno::BUSY) => Ok(()),
        result => result,
    });
    let result = escalate(mount, &call, &[(UnmountFlags::FORCE, FORCED)], &mut || MountUse::Own);
    // Another process may have unmounted it.
    result.or_else(|error| if use_now(mount, &pod) == MountUse::Gone { Ok(()) } else { Err(error) })
}

/// Unmounts `mount`, which is in `top` and is busy, because an operation of the agent waits for its
/// server. The operation ends when its requests are aborted, which is done unless others use the
/// server too. Else it keeps its files, and the kernel removes the mount with them.
pub(super) fn detach_busy(top: &Path, mount: &Path) -> Result<(), VolumeError> {
    log::warn!("{} is busy with an operation that hangs, and is detached", mount.display());
    if let Err(error) = unmount_by_force(top, mount) {
        log::warn!("unmount by force: {}", chain(&error));
    }
    by_ways(top, mount, &[(UnmountFlags::DETACH, LAZY)])
}

/// Whether the server of the mount responds. One thread at most waits for a server that does not.
pub(super) fn server_responds(mount: &Path) -> bool {
    let is_waiting = |call: &HungCall| call.call == SIZE && call.path == mount;
    if hung_calls().iter().any(is_waiting) {
        return false;
    }
    let point = mount.to_owned();
    let probe = move |_| rustix::fs::statvfs(&point).map(drop);
    // An error is an answer, and without a thread nothing is known.
    !matches!(attempt((SIZE, mount), &Arc::new(probe), UnmountFlags::empty(), PROBE), Ok(None))
}

/// Tries the ways in order; the next one only when the one before hangs. `use_now` reads who uses the
/// mount; that may have changed while an attempt took its time.
fn escalate<C>(
    mount: &Path,
    call: &Arc<C>,
    ways: &[(UnmountFlags, Duration)],
    use_now: &mut dyn FnMut() -> MountUse,
) -> Result<(), VolumeError>
where
    C: Fn(UnmountFlags) -> Result<(), Errno> + Send + Sync + ?Sized + 'static,
{
    for (flags, limit) in ways {
        if *flags == UnmountFlags::FORCE && use_now() == MountUse::Shared {
            log::warn!("{} is not unmounted by force: its file system is mounted elsewhere", mount.display());
            continue;
        }
        match attempt((UNMOUNT, mount), call, *flags, *limit)? {
            None => log::warn!("unmounting {} hangs after {limit:?} ({flags:?})", mount.display()),
            // Unmounted already, perhaps by the attempt before.
            Some(Ok(()) | Err(Errno::INVAL | Errno::NOENT)) => return Ok(()),
            Some(Err(errno)) => return Err(VolumeError::io("unmount", mount)(errno)),
        }
    }
    Err(VolumeError::UnmountHangs { path: mount.to_owned() })
}

/// The result of one way; `None`: it hangs, and its thread is left behind.
fn attempt<C>(
    (what, mount): (&'static str, &Path),
    call: &Arc<C>,
    flags: UnmountFlags,
    limit: Duration,
) -> Result<Option<Result<(), Errno>>, VolumeError>
where
    C: Fn(UnmountFlags) -> Result<(), Errno> + Send + Sync + ?Sized + 'static,
{
    let entry = Entry::enter((what, mount.to_owned()))?;
    let (report, reported) = bounded(1);
    let call = Arc::clone(call);
    let running = threads::spawn(&format!("vol/{what}"), Stack::Small, OnDeath::Unsupervised, move |_| {
        let _entry = entry;
        let _waiting = threads::waiting("file server that may not respond");
        // The caller may have stopped waiting.
        let _ = report.send(call(flags));
    })
    .map_err(|source| VolumeError::Thread { source })?;
    let _waiting = threads::waiting("file server");
    match reported.recv_timeout(limit) {
        Ok(result) => {
            drop(running);
            Ok(Some(result))
        }
        Err(RecvTimeoutError::Timeout) => {
            running.leave();
            Ok(None)
        }
        Err(RecvTimeoutError::Disconnected) => Err(VolumeError::Panicked),
    }
}

/// The directory of the pod that a mount belongs to; the directory above it for other mounts.
fn owner(mount: &Path) -> &Path {
    let is_of_pod =
        |path: &&Path| path.file_name().is_some_and(|name| name == "volumes" || name == SUB_PATHS);
    let of_pod = mount.ancestors().find(is_of_pod).and_then(Path::parent);
    of_pod.or(mount.parent()).unwrap_or(mount)
}

/// Takes the call off the list when it ends.
struct Entry(Call, Instant);

impl Entry {
    fn enter(call: Call) -> Result<Entry, VolumeError> {
        let mut table = HUNG_CALLS.locked();
        let owner = owner(&call.1);
        let of_pod = table.iter().filter(|((_, path), _)| self::owner(path) == owner).count();
        if of_pod >= MAX_HUNG_OF_POD || (of_pod > 0 && table.len() >= MAX_HUNG) {
            return Err(VolumeError::TooManyPending);
        }
        let begun = Instant::now();
        table.push((call.clone(), begun));
        Ok(Entry(call, begun))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut table = HUNG_CALLS.locked();
        if let Some(index) = table.iter().position(|(call, begun)| *call == self.0 && *begun == self.1) {
            table.swap_remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(60);

    /// One attempt of an unmount.
    type Attempt = dyn Fn(UnmountFlags) -> Result<(), Errno> + Send + Sync;

    /// A server that does not answer the listed ways until the hold is released.
    fn dead(hangs: &[UnmountFlags], hold: Receiver<()>, end: Result<(), Errno>) -> Arc<Attempt> {
        let hangs = hangs.to_vec();
        Arc::new(move |flags| {
            if hangs.contains(&flags) {
                let _ = hold.recv();
            }
            end
        })
    }

    fn ways(limits: [Duration; 3]) -> Vec<(UnmountFlags, Duration)> {
        WAYS.iter().zip(limits).map(|((flags, _), limit)| (*flags, limit)).collect()
    }

    fn hangs_at(path: &Path) -> usize {
        hung_calls().iter().filter(|call| call.path == path).count()
    }

    #[test]
    fn dead_server_is_unmounted_by_force_and_then_lazily() {
        let (release, hold) = bounded::<()>(0);
        let path = Path::new("/t/forced");
        let call = dead(&[UnmountFlags::empty()], hold.clone(), Ok(()));
        escalate(path, &call, &ways([SHORT, LONG, LONG]), &mut || MountUse::Own).unwrap();
        assert_eq!(hangs_at(path), 1);
        let path = Path::new("/t/lazy");
        let call = dead(&[UnmountFlags::empty(), UnmountFlags::FORCE], hold.clone(), Ok(()));
        escalate(path, &call, &ways([SHORT, SHORT, LONG]), &mut || MountUse::Own).unwrap();
        assert_eq!(hangs_at(path), 2);
        let path = Path::new("/t/never");
        let all = &[UnmountFlags::empty(), UnmountFlags::FORCE, UnmountFlags::DETACH];
        let error =
            escalate(path, &dead(all, hold, Ok(())), &ways([SHORT; 3]), &mut || MountUse::Own).unwrap_err();
        assert_eq!(error.to_string(), "cannot unmount /t/never: its server does not respond");
        drop(release);
        // The threads return with the server.
        let until = Instant::now() + LONG;
        while hangs_at(path) > 0 && Instant::now() < until {
            std::thread::yield_now();
        }
        assert_eq!(hangs_at(path), 0);
    }

    /// The requests of the other pod were aborted, and what it had written was lost.
    #[test]
    fn mount_that_another_pod_shares_meanwhile_is_not_forced() {
        for (now, expected) in
            [(MountUse::Shared, UnmountFlags::DETACH), (MountUse::Own, UnmountFlags::FORCE)]
        {
            let (release, hold) = bounded::<()>(0);
            let (report, calls) = bounded(3);
            let call: Arc<Attempt> = Arc::new(move |flags| {
                if flags == UnmountFlags::empty() {
                    let _ = hold.recv();
                } else {
                    report.send(flags).unwrap();
                }
                Ok(())
            });
            let mut questions = 0;
            let mut use_now = || {
                questions += 1;
                now
            };
            let path = Path::new("/t/shared");
            escalate(path, &call, &ways([SHORT, LONG, LONG]), &mut use_now).unwrap();
            assert_eq!((calls.try_iter().collect::<Vec<_>>(), questions), (vec![expected], 1));
            drop(release);
        }
        // Alone, it fails without a call.
        let (_release, hold) = bounded::<()>(0);
        let call = dead(&[UnmountFlags::FORCE], hold, Ok(()));
        let way = [(UnmountFlags::FORCE, LONG)];
        escalate(Path::new("/t/shared"), &call, &way, &mut || MountUse::Shared).unwrap_err();
    }

    /// A server that did not answer delayed the volumes after it, and the end of other pods.
    #[test]
    fn volumes_of_a_pod_are_unmounted_at_the_same_time() {
        let (entered, all) = bounded(20);
        let (release, hold) = bounded::<()>(0);
        let job = |n: usize| -> Job {
            let (entered, hold) = (entered.clone(), hold.clone());
            let work = move |_: &StopToken| {
                entered.send(n).unwrap();
                // Each waits until all have begun.
                let _ = hold.recv();
                if n == 7 { Err(VolumeError::Pending) } else { Ok(()) }
            };
            (format!("v{n}"), Box::new(work))
        };
        let jobs: Vec<Job> = (0..20).map(job).collect();
        let (done, result) = bounded(1);
        let work = move |stop: StopToken| done.send(run_together(jobs, &stop)).unwrap();
        let running = threads::spawn("t/together", Stack::Small, OnDeath::Unsupervised, work).unwrap();
        for _ in 0..20 {
            all.recv_timeout(LONG).unwrap();
        }
        drop(release);
        let failed = result.recv_timeout(LONG).unwrap();
        assert_eq!(failed.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["v7"]);
        drop(running);
        assert!(run_together(Vec::new(), &StopToken::never()).is_empty());
    }

    /// The reason in `coracle status` alternated, and each change was logged.
    #[test]
    fn failures_are_in_the_order_of_the_jobs() {
        let (sender, receiver) = bounded::<()>(0);
        let last = move |_: &StopToken| {
            let _ = receiver.recv();
            Err(VolumeError::Pending)
        };
        let first = move |_: &StopToken| {
            drop(sender);
            Err(VolumeError::Overdue)
        };
        let jobs: Vec<Job> = vec![("a".to_owned(), Box::new(last)), ("b".to_owned(), Box::new(first))];
        let failed = run_together(jobs, &StopToken::never());
        assert_eq!(failed.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn stop_and_panic_end_unmounts_at_the_same_time() {
        let (source, stop) = crate::util::stop::pair();
        let wait = |name: &str| -> Job {
            let work = |stop: &StopToken| match stop.wait(LONG) {
                crate::util::stop::Waited::Stopped => Err(VolumeError::Stopping),
                crate::util::stop::Waited::TimedOut => Ok(()),
            };
            (name.to_owned(), Box::new(work))
        };
        drop(source);
        let failed = run_together(vec![wait("a"), wait("b")], &stop);
        assert!(failed.len() == 2 && failed.iter().all(|(_, error)| matches!(error, VolumeError::Stopping)));
        let panics: Job = ("p".to_owned(), Box::new(|_| panic!("a test's own")));
        let fine: Job = ("f".to_owned(), Box::new(|_| Ok(())));
        let failed = run_together(vec![panics, fine], &StopToken::never());
        assert!(matches!(failed.as_slice(), [(_, VolumeError::Panicked)]), "{failed:?}");
    }

    #[test]
    fn hanging_calls_are_counted_for_each_pod() {
        let call =
            |pod: &str, n: usize| ("test", PathBuf::from(format!("/r/{pod}/volumes/kubernetes.io~nfs/{n}")));
        let many: Vec<Entry> = (0..MAX_HUNG_OF_POD).map(|n| Entry::enter(call("p1", n)).unwrap()).collect();
        assert!(matches!(Entry::enter(call("p1", 99)), Err(VolumeError::TooManyPending)));
        drop(Entry::enter(call("p2", 0)).unwrap());
        drop(many);
        assert_eq!(owner(Path::new("/r/p/volume-subpaths/v/c/0")), Path::new("/r/p"));
        assert_eq!(owner(Path::new("/r/plugins/x")), Path::new("/r/plugins"));
    }

    /// A volume may have the name of a directory of the agent.
    #[test]
    fn pod_of_a_mount_is_the_directory_below_that_of_all_pods() {
        for mount in ["/r/p/u/volumes/n/volumes", "/r/p/u/volume-subpaths/volumes/c/0"] {
            assert_eq!(pod_of(Path::new("/r/p"), Path::new(mount)), Path::new("/r/p/u"));
        }
        let mount = Path::new("/r/p/u/volumes/n/v");
        assert_eq!(pod_of(Path::new("/r/p/u/volumes/n"), mount), Path::new("/r/p/u"));
        assert_eq!(pod_of(Path::new("/r/plugins/n"), Path::new("/r/plugins/n/x")), Path::new("/r/plugins/n"));
        assert_eq!(use_now(Path::new("/t/none"), Path::new("/t")), MountUse::Gone);
    }

    #[test]
    fn busy_mount_is_not_forced() {
        let (_release, hold) = bounded::<()>(0);
        let call = dead(&[UnmountFlags::FORCE, UnmountFlags::DETACH], hold, Err(Errno::BUSY));
        let error =
            escalate(Path::new("/t/busy"), &call, &ways([LONG; 3]), &mut || MountUse::Own).unwrap_err();
        assert!(matches!(error, VolumeError::Io { attempt: "unmount", .. }), "{error}");
        let (_release, hold) = bounded::<()>(0);
        assert!(server_responds(Path::new("/")) && server_responds(Path::new("/t/none")));
        let gone = dead(&[], hold, Err(Errno::INVAL));
        escalate(Path::new("/t/gone"), &gone, &ways([LONG; 3]), &mut || MountUse::Own).unwrap();
    }
}
