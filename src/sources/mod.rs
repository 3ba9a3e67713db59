//! What should run: static pods from files and from a URL, and the merge of all sources
//! (Go: pkg/kubelet/config, pkg/apis/core/{v1/defaults,validation}).
//!
//! Owns: the last good version of every manifest, in memory and, for the next start, in
//! `Settings::state_dir`; in [`merge`], the pods of each source.
//! Threads: `src-file` (waits on inotify, an eventfd and the list timer) and `src-http`
//! (waits on its token, then on one GET), each only if it is configured.
//! Posts: [`SourceSet`], always the complete current set of one source, newest wins.
//! Raises: `InvalidManifest` events, once per fault, for the manifest and for its pods.
//! May call: `config::yaml`, `transport::http`.
//! Invariants: a fault in one manifest never touches another manifest, and never takes a
//! pod away, over a restart neither: only a deletion does. A manifest that is deleted and
//! written again restarts its pods once it is good, even if both happen between two looks.
//! Nothing is posted unless pods or problems changed. The disk is written after the post, and
//! only what changed.
//! Every document goes one way: decode, default, identify, validate, refuse references.
//! A static pod has the UID that the Go kubelet gives it (`fingerprint`).
//! The source of the API server is [`bound`]: it turns a watch of room `kube` into sets.
//! Absent on purpose: events of the merge (`sync` raises them).

pub mod bound;
mod decode;
mod defaults;
mod ephemeral;
mod file;
mod fingerprint;
#[cfg(test)]
pub(crate) mod fuzz;
mod http;
mod identity;
mod manifest;
pub mod merge;
pub mod offline;
mod references;
mod store;
mod unsupported;
mod validate;
mod watch;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crossbeam_channel::Sender;
use jiff::Timestamp;

use crate::model::api;
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::model::pod::{Pod, SourceName};
use crate::model::typed::{self, clip};
use crate::util::mailbox::Post;
use crate::util::threads::{Died, Running};

pub use ephemeral::ephemeral_container;
pub use unsupported::unsupported_fields;

use store::Store;

/// A pod from JSON that an agent has written itself: the same reading as a manifest's.
///
/// # Errors
/// The first fields whose values do not fit, with their paths.
pub fn pod_from_value(value: &serde_json::Value) -> Result<api::Pod, String> {
    let misfit = |misfits: Vec<typed::Misfit>| {
        let each = misfits.into_iter().take(3).map(|misfit| format!("{}: {}", misfit.path, misfit.message));
        each.collect::<Vec<_>>().join("; ")
    };
    typed::read::<api::Pod>(value).map(|typed| typed.object).map_err(misfit)
}

/// The largest manifest that is read, from a file or a URL.
pub const MAX_MANIFEST_BYTES: usize = 10 * 1024 * 1024;

/// Which sources there are. A source that is `None` does not exist and is not waited for.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// This node's name, as given: it becomes part of pod names and UIDs.
    pub node_name: String,
    /// Static pods in files.
    pub file: Option<FileSettings>,
    /// Static pods behind a URL.
    pub http: Option<HttpSettings>,
    /// Where last good versions outlive a restart; without it they do not.
    pub state_dir: Option<PathBuf>,
}

/// The file source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSettings {
    /// A directory of manifests, or one manifest.
    pub path: PathBuf,
    /// Time between full lists.
    pub check: Duration,
}

/// The http source.
#[derive(Clone, PartialEq, Eq)]
pub struct HttpSettings {
    /// Where to GET the pods.
    pub url: String,
    /// Headers to send; they may carry secrets.
    pub headers: BTreeMap<String, Vec<String>>,
    /// Time between requests.
    pub check: Duration,
}

impl fmt::Debug for HttpSettings {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&String> = self.headers.keys().collect();
        out.debug_struct("HttpSettings")
            .field("url", &self.url)
            .field("headers", &names)
            .field("check", &self.check)
            .finish()
    }
}

/// Incarnations of pods, by UID: numbers that a source uses once. A pod whose number changes was
/// gone in between, though no set without it may have been seen: it stops and starts again.
/// Pods of a source that cannot tell have none.
pub type Incarnations = BTreeMap<PodUid, u64>;

/// The complete current set of one source, and what is wrong there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SourceSet {
    /// All pods of the source. `None` until it could be read for the first time: the source
    /// then counts as not seen, and only its problems are news.
    pub pods: Option<Vec<Pod>>,
    /// Which incarnations these are, where the source can tell.
    pub incarnations: Incarnations,
    /// Everything that is wrong at the source now, ordered by place.
    pub problems: Vec<SourceProblem>,
}

/// One thing wrong at a source, for as long as it is wrong.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct SourceProblem {
    /// The file or URL.
    pub place: String,
    /// The line, where one is known.
    pub line: Option<u32>,
    /// The field path, where one is known.
    pub field: Option<String>,
    /// What is wrong.
    pub message: String,
    /// Since when something is wrong at this place.
    pub since: Timestamp,
    /// Whether pods of the last good version keep running because of it.
    pub kept: bool,
    /// Whether the manifest counts all the same: a field that nobody knows was left out.
    pub ignored: bool,
}

impl fmt::Display for SourceProblem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.place)?;
        if let Some(line) = self.line {
            write!(out, ":{line}")?;
        }
        if let Some(field) = self.field.as_deref().filter(|field| !field.is_empty()) {
            write!(out, ": {field}")?;
        }
        write!(out, ": {}", self.message)
    }
}

/// Where the threads deliver.
#[derive(Clone)]
pub struct Deps {
    /// Receives the complete set of a source whenever it changed.
    pub post: Post<SourceName, SourceSet>,
    /// Receives `InvalidManifest` events.
    pub events: EventSink,
    /// Is told when a source's thread dies.
    pub on_death: Sender<Died>,
}

/// Starts one thread per configured source.
///
/// # Errors
/// When the kernel refuses a thread or an eventfd. Whatever is wrong with the path or the
/// URL is a problem of the source, not an error here.
pub fn spawn(settings: &Settings, deps: &Deps) -> std::io::Result<Vec<Running>> {
    let mut running = Vec::new();
    let store = |source| Store::new(settings.state_dir.as_deref(), source, &settings.node_name);
    // A source that is not configured has no pods, and none to come back to.
    match &settings.file {
        Some(file_settings) => {
            running.push(file::spawn(&settings.node_name, file_settings, store(SourceName::File), deps)?);
        }
        None => store(SourceName::File).keep_only(std::iter::empty()),
    }
    match &settings.http {
        Some(http_settings) => {
            running.push(http::spawn(&settings.node_name, http_settings, store(SourceName::Http), deps)?);
        }
        None => store(SourceName::Http).keep_only(std::iter::empty()),
    }
    Ok(running)
}

/// Why a manifest or the place it should be at could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot open {0}")]
    Open(PathBuf, #[source] std::io::Error),
    #[error("cannot read {0}")]
    Read(PathBuf, #[source] std::io::Error),
    #[error("cannot list directory {0}")]
    List(PathBuf, #[source] std::io::Error),
    #[error("{0} is {1}; only regular files are read")]
    NotAFile(PathBuf, &'static str),
    #[error("{0} is larger than the limit of {MAX_MANIFEST_BYTES} bytes")]
    TooLarge(PathBuf),
}

impl Error {
    /// The message with its cause, on one line.
    fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        text
    }
}

/// One fault in a manifest. Its place and time are added by the source.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Flaw {
    line: Option<u32>,
    field: Option<String>,
    message: String,
}

impl Flaw {
    /// A fault of the whole manifest.
    fn whole(message: impl Into<String>) -> Self {
        Flaw { line: None, field: None, message: clip(&message.into()) }
    }

    /// A fault of one field.
    fn at(field: impl Into<String>, message: impl Into<String>) -> Self {
        Flaw { line: None, field: Some(clip(&field.into())), message: clip(&message.into()) }
    }

    fn into_problem(self, place: &str, since: Timestamp, kept: bool) -> SourceProblem {
        let Flaw { line, field, message } = self;
        SourceProblem { place: place.to_owned(), line, field, message, since, kept, ignored: false }
    }

    fn into_remark(self, place: &str, since: Timestamp) -> SourceProblem {
        SourceProblem { ignored: true, ..self.into_problem(place, since, false) }
    }
}

/// Joins the faults of one manifest for one event, which has room for 1,024 characters.
fn summary(place: &str, problems: &[SourceProblem]) -> String {
    const ROOM: usize = 1000;
    let mut text = String::new();
    for (index, problem) in problems.iter().enumerate() {
        let line = if index == 0 {
            problem.to_string()
        } else {
            let full = problem.to_string();
            let rest = full.strip_prefix(place).unwrap_or(&full);
            format!("; {}", rest.trim_start_matches([':', ' ']))
        };
        if text.chars().count() + line.chars().count() > ROOM {
            let more = problems.len() - index;
            if index == 0 {
                return line.chars().take(ROOM).collect();
            }
            text.push_str(&format!("; and {more} more"));
            break;
        }
        text.push_str(&line);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_read_like_compiler_errors() {
        let problem = Flaw { line: Some(7), ..Flaw::at("spec.containers[0].image", "Required value") }
            .into_problem("/etc/m/a.yaml", Timestamp::UNIX_EPOCH, true);
        assert_eq!(problem.to_string(), "/etc/m/a.yaml:7: spec.containers[0].image: Required value");
        let whole = Flaw::whole("empty").into_problem("/etc/m/a.yaml", Timestamp::UNIX_EPOCH, false);
        assert_eq!(whole.to_string(), "/etc/m/a.yaml: empty");
        assert_eq!(
            summary("/etc/m/a.yaml", &[problem.clone(), problem]),
            "/etc/m/a.yaml:7: spec.containers[0].image: Required value; \
             7: spec.containers[0].image: Required value"
        );
        let many: Vec<_> = (0..1000).map(|_| whole.clone()).collect();
        assert!(summary("/etc/m/a.yaml", &many).chars().count() < 1024);
        assert!(summary("/etc/m/a.yaml", &many).ends_with("more"));
    }

    #[test]
    fn quoted_input_is_cut_and_stays_on_one_line() {
        assert_eq!(clip("a\nb"), "a b");
        assert_eq!(clip(&"é".repeat(9000)).chars().count(), 501);
    }

    #[test]
    fn header_values_are_not_printed() {
        let headers = BTreeMap::from([("Authorization".to_owned(), vec!["Bearer s3cret".to_owned()])]);
        let settings = HttpSettings { url: "http://x".into(), headers, check: Duration::ZERO };
        let text = format!("{settings:?}");
        assert!(text.contains("Authorization") && !text.contains("s3cret"));
    }
}
