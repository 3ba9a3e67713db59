//! The thread `oom`: raises an event on the node when the kernel kills a process because the
//! machine's memory has run out (Go: pkg/kubelet/oom).

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::error::{StartError, thread_error};
use super::rooms::{Context, Rooms};
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::reasons;
use crate::resources::oom::{OomKill, Parser, RECORD_LIMIT, Scope};
use crate::sync::view::View;
use crate::util::threads::{self, Running, Stack};
use crate::util::wake::Wake;

/// The kernel's log.
const LOG: &str = "/dev/kmsg";
/// Wait after an error that is not expected.
const RETRY: Duration = Duration::from_secs(10);

/// Starts the thread; `None` if the kernel's log cannot be read, which is logged.
///
/// DIFFERS: the Go kubelet then does not start.
pub(super) fn start(context: Context<'_>, rooms: &Rooms) -> Result<Option<Running>, StartError> {
    let log = match open(Path::new(LOG)) {
        Ok(log) => log,
        Err(error) => {
            log::warn!("kills for lack of memory are not reported as events: cannot read {LOG}: {error}");
            return Ok(None);
        }
    };
    let wake = Wake::new().map_err(thread_error("oom"))?;
    let (waker, view, events) = (wake.clone(), rooms.view.clone(), rooms.events.clone());
    let running = threads::spawn("oom", Stack::Small, context.supervisor.on_death(), move |stop| {
        let mut parser = Parser::default();
        while !stop.is_stopped() {
            let ended = read_all(&log, |record| {
                if let Some(kill) = parser.read(record) {
                    report(&kill, &view, &events);
                }
            });
            let until = ended.err().map(|error| {
                log::debug!("cannot read {LOG}: {error}");
                std::time::Instant::now() + RETRY
            });
            let _waiting = threads::waiting("the kernel's log");
            let ready = if until.is_some() { None } else { Some((log.as_fd(), PollFlags::IN)) };
            // Only `poll` itself can fail, and then the stop is all that is left to wait for.
            if wake.wait(ready, until).is_err() {
                let _ = stop.wait(RETRY);
            }
        }
    });
    Ok(Some(running.map_err(thread_error("oom"))?.with_waker(Box::new(move || waker.ring()))))
}

/// Opens the log behind its last record.
///
/// DIFFERS: the Go kubelet reads it from its beginning, and reports old kills again at each start.
fn open(path: &Path) -> rustix::io::Result<OwnedFd> {
    let log = rustix::fs::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
    rustix::fs::seek(&log, SeekFrom::End(0))?;
    Ok(log)
}

/// Reads all records that are there.
fn read_all(log: &OwnedFd, mut each: impl FnMut(&[u8])) -> rustix::io::Result<()> {
    let mut record = [0_u8; RECORD_LIMIT];
    loop {
        match rustix::io::read(log, &mut record) {
            Ok(0) | Err(Errno::AGAIN) => return Ok(()),
            Ok(length) => each(record.get(..length).unwrap_or_default()),
            // Records were overwritten before they were read; or one is larger than any that counts.
            Err(Errno::PIPE | Errno::INTR | Errno::INVAL) => {}
            Err(error) => return Err(error),
        }
    }
}

fn report(kill: &OomKill, view: &View, events: &EventSink) {
    let owner = kill.owner();
    let snapshot = view.get();
    let pod = owner.as_ref().and_then(|owner| {
        let (_, entry) = snapshot.pods.iter().find(|(uid, _)| owner.is(uid))?;
        entry.any_pod().map(|pod| format!("{}/{}", pod.namespace(), pod.name()))
    });
    let text = kill.message(pod.as_deref());
    match &kill.scope {
        Scope::System => {
            log::warn!("{text}");
            events.raise(Regarding::Node, EventType::Warning, reasons::SYSTEM_OOM, text);
        }
        // The pod shows OOMKilled.
        Scope::Cgroup(_) => log::info!(
            "a process was killed at the memory limit of its cgroup: {}, pid {}, pod {}",
            kill.process,
            kill.pid,
            pod.as_deref().unwrap_or("unknown")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::event::Event;

    fn record(sequence: u32, text: &str) -> Vec<u8> {
        format!("4,{sequence},{sequence}00,-;{text}\n").into_bytes()
    }

    #[test]
    fn a_kill_for_the_machine_raises_an_event_on_the_node_and_others_do_not() {
        let (events, queue) = EventSink::new();
        let mut parser = Parser::default();
        let lines = [
            "eater invoked oom-killer: gfp_mask=0x0, order=0, oom_score_adj=1000",
            "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,\
             task_memcg=/kubepods/besteffort/podu1/c1,task=eater,pid=77,uid=0",
            "eater invoked oom-killer: gfp_mask=0x0, order=0, oom_score_adj=1000",
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,\
             oom_memcg=/kubepods/podu2,task_memcg=/kubepods/podu2/c2,task=other,pid=78,uid=0",
        ];
        for (sequence, line) in (1..).zip(lines) {
            if let Some(kill) = parser.read(&record(sequence, line)) {
                report(&kill, &View::default(), &events);
            }
        }
        let raised: Vec<Event> = queue.try_iter().map(|event| *event).collect();
        assert_eq!(raised.len(), 1, "{raised:?}");
        assert_eq!((&raised[0].regarding, raised[0].reason), (&Regarding::Node, "SystemOOM"));
        assert_eq!(raised[0].message, "System OOM encountered, victim process: eater, pid: 77");
    }

    #[test]
    fn records_are_read_until_none_is_left() {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        let mut found = Vec::new();
        rustix::io::write(&writer, b"6,1,1,-;one\n").unwrap();
        read_all(&reader, |record| found.push(record.to_vec())).unwrap();
        assert_eq!(found, [b"6,1,1,-;one\n"]);
        drop(writer);
        read_all(&reader, |_| panic!("there is nothing")).unwrap();
    }
}
