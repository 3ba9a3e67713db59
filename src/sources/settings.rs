//! Settings of the sources.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::pods_at_start::PodsAtStart;

/// The size limit of a manifest, from a file or a URL.
pub(super) const MAX_MANIFEST_BYTES: usize = 10 * 1024 * 1024;

/// The configured sources. The agent does not wait for a source that is `None`.
#[derive(Debug, Clone, Default)]
pub(crate) struct Settings {
    /// This node's name as configured: it becomes part of pod names and UIDs.
    pub node_name: String,
    /// The pods that were on the node when the agent started.
    pub known: PodsAtStart,
    /// Static pods in files.
    pub file: Option<FileSettings>,
    /// Static pods from a URL.
    pub http: Option<HttpSettings>,
    /// The directory of the last valid manifests; `None`: they are lost when the agent restarts.
    pub state_dir: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileSettings {
    /// A directory of manifests, or one manifest.
    pub path: PathBuf,
    /// Time between full lists.
    pub check: Duration,
}

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct HttpSettings {
    /// The URL of the pods.
    pub url: String,
    /// Headers to send; they may contain secrets.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_values_are_not_printed() {
        let headers = BTreeMap::from([("Authorization".to_owned(), vec!["Bearer s3cret".to_owned()])]);
        let settings = HttpSettings { url: "http://x".into(), headers, check: Duration::ZERO };
        let text = format!("{settings:?}");
        assert!(text.contains("Authorization") && !text.contains("s3cret"));
    }
}
