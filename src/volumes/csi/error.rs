//! Errors of CSI volumes.

use std::path::Path;

use super::super::error::VolumeError;
use super::super::kind::{Certainty, KindError, Phase};
use super::driver::DriverError;

/// The longest text of a driver in an event or a log line, in bytes.
const MAX_TEXT: usize = 4096;

/// A failure that has nothing to do with a driver's call: nothing was begun.
pub(super) fn not_begun(phase: Phase, message: impl Into<String>) -> VolumeError {
    KindError { phase, message: clipped(message.into()), certainty: Certainty::NotBegun }.into()
}

/// The failure of a driver's call.
pub(super) fn of_call(phase: Phase, prefix: &str, error: &DriverError) -> VolumeError {
    let certainty = if error.is_final() { Certainty::Final } else { Certainty::Uncertain };
    KindError { phase, message: clipped(format!("{prefix}{error}")), certainty }.into()
}

/// A failure after a successful call: what the call did is there.
pub(super) fn after_call(phase: Phase, message: impl Into<String>) -> VolumeError {
    KindError { phase, message: clipped(message.into()), certainty: Certainty::Uncertain }.into()
}

/// A failure of a system call.
pub(super) fn io(attempt: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> VolumeError + use<> {
    let path = path.to_owned();
    move |source| VolumeError::Io { attempt, path, source }
}

/// The driver's text may have megabytes.
fn clipped(mut text: String) -> String {
    if text.len() > MAX_TEXT {
        text.truncate(text.floor_char_boundary(MAX_TEXT));
        text.push('…');
    }
    text
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
