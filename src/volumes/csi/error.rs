//! Errors of CSI volumes.

use std::path::Path;

use super::super::error::VolumeError;
use super::super::kind::{Certainty, KindError, Phase};
use super::driver::DriverError;
use crate::util::clip;

/// The longest text of a driver in an event or a log line, in bytes.
pub(super) const MAX_TEXT: usize = 4096;

/// A failure that has nothing to do with a driver's call: nothing was begun.
pub(super) fn not_begun(phase: Phase, message: impl AsRef<str>) -> VolumeError {
    failure(phase, message.as_ref(), Certainty::NotBegun)
}

/// The failure of a driver's call.
pub(super) fn of_call(phase: Phase, prefix: &str, error: &DriverError) -> VolumeError {
    let certainty = if error.is_final() { Certainty::Final } else { Certainty::Uncertain };
    failure(phase, &format!("{prefix}{error}"), certainty)
}

/// A failure after a successful call: what the call did is there.
pub(super) fn after_call(phase: Phase, message: impl AsRef<str>) -> VolumeError {
    failure(phase, message.as_ref(), Certainty::Uncertain)
}

/// The driver's text may have megabytes.
fn failure(phase: Phase, message: &str, certainty: Certainty) -> VolumeError {
    KindError { phase, message: clip::line(message, MAX_TEXT), certainty }.into()
}

/// A failure of a system call.
pub(super) fn io(attempt: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> VolumeError + use<> {
    let path = path.to_owned();
    move |source| VolumeError::Io { attempt, path, source }
}

/// Whether the operation has certainly changed nothing.
pub(super) fn changed_nothing(error: &VolumeError) -> bool {
    matches!(error, VolumeError::Kind(KindError { certainty: Certainty::Final | Certainty::NotBegun, .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_clipped_between_characters() {
        let error = not_begun(Phase::SetUp, "ä".repeat(1 << 20));
        assert!(error.to_string().len() < MAX_TEXT + 8);
        assert!(changed_nothing(&error));
        assert!(!changed_nothing(&after_call(Phase::SetUp, "x")));
    }
}
