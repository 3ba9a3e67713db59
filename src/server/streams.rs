//! Answers that go on: logs, changes of pods, events. One JSON document per line.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::time::Duration;

use crate::util::stop::{StopToken, Waited};

use super::routes::{Answer, WATCH_SLICE, sorted_pods};
use super::{Deps, LogOptions, LogSource, PodChange, PodView};

/// Changes that come close together are sent together.
const GATHER: Duration = Duration::from_millis(200);

/// How long a quiet event stream sleeps; only a bound, the stop signal ends it at once.
const QUIET: Duration = Duration::from_secs(600);

/// An answer that goes on.
pub(super) enum Stream {
    /// Writes its own answer, head and all.
    Own(Box<Own>),
    /// A container's log, for `coracle logs`.
    Logs { source: LogSource, options: LogOptions, container: String, of: usize },
    /// Changes of pods.
    Pods,
    /// Events from a sequence number on.
    Events { since: u64 },
}

/// See [`Stream::Own`].
pub(super) type Own = dyn FnOnce(&mut dyn Write, &Deps, &StopToken) -> io::Result<()> + Send;

impl Stream {
    /// Writes the whole response, head first. An error means that the client is gone.
    pub(super) fn run(self, out: &mut dyn Write, deps: &Deps, stop: &StopToken) -> io::Result<()> {
        match self {
            Stream::Own(write) => write(out, deps, stop),
            Stream::Logs { source, options, container, of } => {
                let extra =
                    format!("Coracle-Container: {}\r\nCoracle-Containers: {of}\r\n", tame(&container));
                let mut out = LateHead { out, extra, sent: false };
                if options.follow {
                    // So that the client knows at once that it is connected.
                    out.flush()?;
                }
                let running = source.running;
                let outcome = (deps.read_log)(&source.path, &options, &mut out, &*running, stop);
                match outcome {
                    Err(why) if !out.sent => {
                        write!(
                            out.out,
                            "HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n{why}\n"
                        )?;
                    }
                    Err(why) => log::debug!("reading {} ended early: {why}", source.path.display()),
                    Ok(()) => out.flush()?,
                }
                Ok(())
            }
            Stream::Pods => {
                head(out, "application/x-ndjson", "")?;
                pods(out, deps, stop)
            }
            Stream::Events { since } => {
                head(out, "application/x-ndjson", "")?;
                events(out, deps, since, stop)
            }
        }
    }
}

/// Header values come from manifests; nothing in them may end the line.
fn tame(text: &str) -> String {
    text.chars().filter(|c| c.is_ascii_graphic()).collect()
}

pub(super) fn head(out: &mut dyn Write, content_type: &str, extra: &str) -> io::Result<()> {
    write!(out, "HTTP/1.0 200 OK\r\nServer: coracle\r\nContent-Type: {content_type}\r\n{extra}\r\n")?;
    out.flush()
}

/// Writes a whole answer that took its time.
pub(super) fn whole(out: &mut dyn Write, answer: &Answer) -> io::Result<()> {
    let phrase = if answer.status == 200 { "OK" } else { "Internal Server Error" };
    write!(
        out,
        "HTTP/1.0 {} {phrase}\r\nServer: coracle\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n",
        answer.status,
        answer.content_type,
        answer.body.len()
    )?;
    out.write_all(&answer.body)
}

/// Sends the head with the first byte, so that an early error still has its own status.
struct LateHead<'a> {
    out: &'a mut dyn Write,
    extra: String,
    sent: bool,
}

impl LateHead<'_> {
    fn begin(&mut self) -> io::Result<()> {
        if !self.sent {
            self.sent = true;
            head(self.out, "text/plain; charset=utf-8", &self.extra)?;
        }
        Ok(())
    }
}

impl Write for LateHead<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.begin()?;
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.begin()?;
        self.out.flush()
    }
}

fn line(out: &mut dyn Write, value: &impl serde::Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec(value).map_err(io::Error::other)?;
    text.push(b'\n');
    out.write_all(&text)
}

fn events(out: &mut dyn Write, deps: &Deps, mut since: u64, stop: &StopToken) -> io::Result<()> {
    while !stop.is_stopped() {
        for event in deps.events.recent(since) {
            since = since.max(event.seq);
            line(out, &event)?;
        }
        out.flush()?;
        let _ = deps.events.wait_newer(since, stop, QUIET);
    }
    Ok(())
}

fn pods(out: &mut dyn Write, deps: &Deps, stop: &StopToken) -> io::Result<()> {
    let mut known = Known::default();
    let mut version = (deps.wait_pods)(0, Duration::ZERO);
    loop {
        for change in known.changes(sorted_pods(deps)) {
            line(out, &change)?;
        }
        out.flush()?;
        if stop.wait(GATHER) == Waited::Stopped {
            return Ok(());
        }
        // Statuses ring; that a pod came, began to end or went shows within a slice.
        version = version.max((deps.wait_pods)(version, WATCH_SLICE));
    }
}

/// What a watcher has been told.
#[derive(Default)]
struct Known {
    hasher: RandomState,
    /// By UID: hash of the document, and enough to tell of its end.
    pods: HashMap<String, (u64, PodView)>,
}

impl Known {
    fn changes(&mut self, pods: Vec<PodView>) -> Vec<PodChange> {
        let mut before = std::mem::take(&mut self.pods);
        let mut changes = Vec::new();
        for view in pods {
            let next_sync = view.next_sync;
            // That a pod was looked at again is no change of it.
            let lasting = PodView { next_sync: None, ..view };
            // What cannot be written hashes as empty and fails when it is sent.
            let text = serde_json::to_vec(&lasting).unwrap_or_default();
            let hash = self.hasher.hash_one(&text);
            let view = PodView { next_sync, ..lasting };
            let old = before.remove(view.uid());
            self.pods.insert(view.uid().to_owned(), (hash, identity(&view)));
            match old {
                None => changes.push(PodChange::Added(view)),
                Some((old, _)) if old != hash => changes.push(PodChange::Modified(view)),
                Some(_) => {}
            }
        }
        changes.extend(before.into_values().map(|(_, view)| PodChange::Deleted(view)));
        changes
    }
}

fn identity(view: &PodView) -> PodView {
    let mut small = PodView::default();
    small.pod.metadata.name = view.pod.metadata.name.clone();
    small.pod.metadata.namespace = view.pod.metadata.namespace.clone();
    small.pod.metadata.uid = view.pod.metadata.uid.clone();
    small
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watcher_hears_only_of_changes() {
        let view = |uid: &str, phase: &str| {
            let mut view = PodView { phase: phase.into(), ..PodView::default() };
            view.pod.metadata.uid = Some(uid.into());
            view
        };
        let mut known = Known::default();
        let kinds = |changes: Vec<PodChange>| {
            let text = |change: &PodChange| match change {
                PodChange::Added(view) => format!("+{}", view.uid()),
                PodChange::Modified(view) => format!("~{}", view.uid()),
                PodChange::Deleted(view) => format!("-{}", view.uid()),
            };
            changes.iter().map(text).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(kinds(known.changes(vec![view("a", "Syncing"), view("b", "Syncing")])), "+a +b");
        assert_eq!(kinds(known.changes(vec![view("a", "Syncing"), view("b", "Terminating")])), "~b");
        assert_eq!(kinds(known.changes(vec![view("b", "Terminating"), view("c", "")])), "+c -a");
    }
}
