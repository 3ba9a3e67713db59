//! The pods that should run: static pods from files and from a URL, and the merge of all sources
//! (Go: pkg/kubelet/config, pkg/apis/core/{v1/defaults,validation}).
//!
//! Owns: the last valid version of every manifest, in memory and, for the next start, in
//! `Settings::state_dir`; in [`merge`], the pods of each source.
//! Threads: `src-file` (waits on inotify, an eventfd and the list timer) and `src-http`
//! (waits on its token, then on one GET), each only if it is configured; `src-objects` (inotify, likewise).
//! Posts: [`SourceSet`], always the complete current set of one source; the newest replaces others.
//! Raises: `InvalidManifest` events, once per fault, for the manifest and for its pods.
//! May call: `config::yaml`, `transport::http`.
//! Invariants: a fault in one manifest never affects another manifest, and never removes a pod,
//! also over a restart: only a deletion does. A manifest that is deleted and written again restarts
//! its pods once it is valid, even if both happen between two scans. Nothing is posted unless pods
//! or problems changed. The disk is written after the post, and only what changed.
//! Every document is processed in one order: decode, default, identify, validate, refuse references.
//! A static pod has the UID that the Go kubelet gives it (`fingerprint`); one that ran before the start
//! keeps the UID of another release (`known`).
//! The source of the API server is [`bound`]: it converts a watch of room `kube` into sets.
//! Absent on purpose: events of the merge (`sync` raises them).

pub(crate) mod bound;
mod decode;
mod defaults;
mod ephemeral;
mod error;
mod file;
mod fingerprint;
mod fnv;
#[cfg(test)]
pub(crate) mod fuzz;
mod http;
mod identity;
pub(crate) mod local;
mod manifest;
pub(crate) mod merge;
mod notice;
pub(crate) mod offline;
mod pods_at_start;
mod priority;
mod problem;
mod references;
mod set;
mod settings;
mod store;
mod unsupported;
mod validate;
mod watch;

pub(crate) use decode::pod_from_value;
pub(crate) use ephemeral::ephemeral_container;
pub(crate) use pods_at_start::PodsAtStart;
pub(crate) use problem::{Faults, SourceProblem};
pub(crate) use set::{Deps, SourceSet};
pub(crate) use settings::{FileSettings, HttpSettings, Settings};
pub(crate) use unsupported::unsupported_fields;

use crate::model::pod::SourceName;
use crate::util::threads::Running;
use store::Store;

/// Starts one thread per configured source.
///
/// # Errors
/// When the kernel cannot create a thread or an eventfd. An unusable path or URL is a problem of
/// the source, not an error here.
pub(crate) fn spawn(settings: &Settings, deps: &Deps) -> std::io::Result<Vec<Running>> {
    let (node_name, known) = (&settings.node_name, || settings.known.clone());
    let store = |source| Store::new(settings.state_dir.as_deref(), source, node_name);
    let files = settings
        .file
        .as_ref()
        .map(|file| file::spawn(node_name, file, known(), store(SourceName::File), deps));
    let http = settings
        .http
        .as_ref()
        .map(|http| http::spawn(node_name, http, known(), store(SourceName::Http), deps));
    let mut running = Vec::new();
    for (source, started) in [(SourceName::File, files), (SourceName::Http, http)] {
        match started {
            Some(started) => running.push(started?),
            // A source that is not configured has no pods, and needs no records.
            None => store(source).remove_except(std::iter::empty()),
        }
    }
    Ok(running)
}
