//! File paths in fields.

use super::report::{Path, Report};

/// Checks a path below the root of a volume.
pub(super) fn relative_path(text: &str, path: &Path<'_>, report: &mut Report) {
    if text.is_empty() {
        report.required(path, "");
    } else if text.starts_with('/') {
        report.invalid(path, &text, "must be a relative path");
    } else if has_dot_dot(text) {
        report.invalid(path, &text, "must not contain '..'");
    } else if text.starts_with("..") {
        report.invalid(path, &text, "must not start with '..'");
    }
}

pub(super) fn has_dot_dot(path: &str) -> bool {
    path.split('/').any(|part| part == "..")
}
