//! Streams: logs; changes of pods and events, with one JSON document per line.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::time::Duration;

use super::select::sorted_pods;
use crate::images::CheckOptions;
use crate::runtime::logs::read::ReadOptions;
use crate::server::backend::{LogSource, NodeBackend};
use crate::server::http::response::Response;
use crate::server::views::{PodChange, PodView, VerifyLine};
use crate::transport::http1::ResponseWriter;
use crate::util::stop::{StopToken, Waited};

/// How long a watch waits for a change before it checks its stop signal again.
const WATCH_SLICE: Duration = Duration::from_secs(1);

/// Changes within this time are sent together.
const GATHER: Duration = Duration::from_millis(200);

/// How long an event stream waits for an event; the stop signal ends the wait.
const QUIET: Duration = Duration::from_secs(600);

/// A container's log, for `coracle logs`. `container`: its name; `of`: the pod's containers.
pub(super) fn logs(
    source: &LogSource,
    options: &ReadOptions,
    (container, container_count): (&str, usize),
    out: &mut ResponseWriter<'_>,
    node: &dyn NodeBackend,
    stop: &StopToken,
) -> io::Result<()> {
    // Names come from manifests and must not end the line.
    let container: String = container.chars().filter(char::is_ascii_graphic).collect();
    let container_count = container_count.to_string();
    let fields =
        [TEXT, ("Coracle-Container", container.as_str()), ("Coracle-Containers", container_count.as_str())];
    let mut deferred = DeferredHead { out, fields: &fields };
    if options.follow {
        // The client sees that it is connected.
        deferred.flush()?;
    }
    match node.read_log(source, options, &mut deferred, stop) {
        Err(error) if !deferred.out.has_started() => {
            Response::text(400, format!("{error}\n")).write(deferred.out)
        }
        Err(error) => {
            log::debug!("reading {} ended early: {error}", source.path.display());
            Ok(())
        }
        Ok(()) => deferred.flush(),
    }
}

const TEXT: (&str, &str) = ("Content-Type", "text/plain; charset=utf-8");
const LINES: (&str, &str) = ("Content-Type", "application/x-ndjson");

/// Sends the head with the first byte, so that an early error can have its own status.
struct DeferredHead<'a, 'b> {
    out: &'a mut ResponseWriter<'b>,
    fields: &'a [(&'a str, &'a str)],
}

impl DeferredHead<'_, '_> {
    fn begin(&mut self) -> io::Result<()> {
        if self.out.has_started() { Ok(()) } else { self.out.start(200, self.fields, None) }
    }
}

impl Write for DeferredHead<'_, '_> {
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

/// Events from a sequence number on.
pub(super) fn events(
    out: &mut ResponseWriter<'_>,
    node: &dyn NodeBackend,
    mut since: u64,
    stop: &StopToken,
) -> io::Result<()> {
    out.start(200, &[LINES], None)?;
    while !stop.is_stopped() {
        for event in node.events().recent(since) {
            since = since.max(event.seq);
            line(out, &event)?;
        }
        out.flush()?;
        let _ = node.events().wait_newer(since, stop, QUIET);
    }
    Ok(())
}

/// The check of an image: how many layers are done, then the report or the reason why there is none.
pub(super) fn verify_image(
    image: &str,
    options: CheckOptions,
    out: &mut ResponseWriter<'_>,
    node: &dyn NodeBackend,
    stop: &StopToken,
) -> io::Result<()> {
    out.start(200, &[LINES], None)?;
    out.flush()?;
    let mut sent = Ok(());
    let mut progress = |done, layers| {
        let update = VerifyLine { done, layers, ..VerifyLine::default() };
        sent = line(out, &update).and_then(|()| out.flush());
    };
    let end = match node.verify_image(image, options, &mut progress, stop) {
        Ok(report) => VerifyLine { report: Some(report), ..VerifyLine::default() },
        Err(error) => VerifyLine { error: Some(error.to_string()), ..VerifyLine::default() },
    };
    sent.and_then(|()| line(out, &end)).and_then(|()| out.flush())
}

/// Changes of pods.
pub(super) fn pods(out: &mut ResponseWriter<'_>, node: &dyn NodeBackend, stop: &StopToken) -> io::Result<()> {
    out.start(200, &[LINES], None)?;
    let mut sent = SentPods::default();
    let mut version = node.wait_for_pods(0, Duration::ZERO);
    loop {
        for change in sent.changes(sorted_pods(node)) {
            line(out, &change)?;
        }
        out.flush()?;
        if stop.wait(GATHER) == Waited::Stopped {
            return Ok(());
        }
        // A changed status ends the wait; a new or removed pod shows within a slice.
        version = version.max(node.wait_for_pods(version, WATCH_SLICE));
    }
}

/// The pods that a watch has sent.
#[derive(Default)]
struct SentPods {
    hasher: RandomState,
    /// For each UID: the hash of the document, and what the report of its deletion needs.
    pods: HashMap<String, (u64, PodView)>,
}

impl SentPods {
    fn changes(&mut self, pods: Vec<PodView>) -> Vec<PodChange> {
        let mut before = std::mem::take(&mut self.pods);
        let mut changes = Vec::new();
        for view in pods {
            let next_sync = view.next_sync;
            // A new time of the next sync is no change.
            let compared = PodView { next_sync: None, ..view };
            // A view that cannot be serialized fails when it is sent.
            let text = serde_json::to_vec(&compared).unwrap_or_default();
            let hash = self.hasher.hash_one(&text);
            let view = PodView { next_sync, ..compared };
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
    fn watch_sends_changes_only() {
        let view = |uid: &str, phase: &str| {
            let mut view = PodView { phase: phase.into(), ..PodView::default() };
            view.pod.metadata.uid = Some(uid.into());
            view
        };
        let mut sent = SentPods::default();
        let kinds = |changes: Vec<PodChange>| {
            let text = |change: &PodChange| match change {
                PodChange::Added(view) => format!("+{}", view.uid()),
                PodChange::Modified(view) => format!("~{}", view.uid()),
                PodChange::Deleted(view) => format!("-{}", view.uid()),
            };
            changes.iter().map(text).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(kinds(sent.changes(vec![view("a", "Syncing"), view("b", "Syncing")])), "+a +b");
        assert_eq!(kinds(sent.changes(vec![view("a", "Syncing"), view("b", "Terminating")])), "~b");
        assert_eq!(kinds(sent.changes(vec![view("b", "Terminating"), view("c", "")])), "+c -a");
    }
}
