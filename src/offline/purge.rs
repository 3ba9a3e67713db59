//! `coracle offline purge`: the order, and what it is for. The thread carries it out, because it is the
//! only one that removes files.

use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};

use super::handle::Offline;
use super::key::Kind;
use super::state::PurgeReport;
use crate::util::lock::LockExt;

/// How long an order may take: thousands of files on a slow card.
const LIMIT: Duration = Duration::from_secs(60);
/// The most orders that wait.
const MAX_WAITING: usize = 4;

/// What is removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PurgeScope {
    /// The copies of files that could not be used.
    Damaged,
    /// All stored objects and copies. A key file of ours gets another key.
    All,
    /// An object by its name; a pod by `namespace/name` or UID, with all that goes with it.
    Object {
        /// Its kind.
        kind: Kind,
        /// Its name, in the form that [`Kind`] says; that of the Node object does not count.
        name: String,
    },
}

/// Why a text names no object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ObjectNameError {
    /// There is no such kind.
    #[error("{0:?} is no kind of a stored object; it must be one of {kinds}", kinds = Kind::ALL.map(Kind::word).join(", "))]
    Kind(String),
    /// The name is missing.
    #[error("{0:?} has no name; it must have the form KIND/NAMESPACE/NAME or KIND/NAME")]
    Name(String),
}

impl PurgeScope {
    /// An object as `KIND/NAMESPACE/NAME`, `KIND/NAME` or `node`.
    ///
    /// # Errors
    /// See [`ObjectNameError`].
    pub fn parse(text: &str) -> Result<PurgeScope, ObjectNameError> {
        let (word, name) = text.split_once('/').unwrap_or((text, ""));
        let kind = Kind::parse(word).ok_or_else(|| ObjectNameError::Kind(word.to_owned()))?;
        if name.is_empty() && kind != Kind::Node {
            return Err(ObjectNameError::Name(text.to_owned()));
        }
        Ok(PurgeScope::Object { kind, name: name.to_owned() })
    }
}

/// Why nothing was purged, or it is not known whether it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PurgeError {
    /// There is no such object.
    #[error("no such object is stored (coracle offline list -o wide names all)")]
    NotStored,
    /// Other orders are in progress.
    #[error("other stored objects are being removed")]
    Busy,
    /// The disk is slow.
    #[error("the removal has not ended within {} s; it continues", LIMIT.as_secs())]
    Slow,
    /// The agent stops, or has just started.
    #[error("the agent is starting or stopping")]
    NoThread,
}

/// An order for the thread.
#[derive(Debug)]
pub(super) struct Purge {
    pub(super) scope: PurgeScope,
    pub(super) reply: Sender<Result<PurgeReport, PurgeError>>,
}

impl Offline {
    /// Removes stored objects, in each phase, and waits for the end. Pods that run continue. An object that
    /// the API server sends later is stored again.
    ///
    /// # Errors
    /// See [`PurgeError`].
    pub fn purge(&self, scope: PurgeScope) -> Result<PurgeReport, PurgeError> {
        let (reply, response) = bounded(1);
        {
            let mut purges = self.shared.purges.locked();
            if purges.len() >= MAX_WAITING {
                return Err(PurgeError::Busy);
            }
            purges.push(Purge { scope, reply });
        }
        self.shared.ring();
        match response.recv_timeout(LIMIT) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(PurgeError::Slow),
            Err(RecvTimeoutError::Disconnected) => Err(PurgeError::NoThread),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_named_as_the_list_shows_them() {
        let object = |kind, name: &str| Ok(PurgeScope::Object { kind, name: name.to_owned() });
        assert_eq!(PurgeScope::parse("secret/n/s"), object(Kind::Secret, "n/s"));
        assert_eq!(PurgeScope::parse("volume/v"), object(Kind::Volume, "v"));
        assert_eq!(PurgeScope::parse("node"), object(Kind::Node, ""));
        assert_eq!(PurgeScope::parse("node/node1"), object(Kind::Node, "node1"));
        for (text, reason) in [
            ("bird/n/s", "is no kind"),
            ("", "is no kind"),
            ("secret/", "has no name"),
            ("pod", "has no name"),
        ] {
            assert!(PurgeScope::parse(text).unwrap_err().to_string().contains(reason), "{text}");
        }
    }
}
