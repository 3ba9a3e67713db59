//! Problems of manifests and sources.

use std::fmt;

use jiff::Timestamp;

use crate::model::typed::clip;

/// One current problem of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceProblem {
    /// The file or URL.
    pub place: String,
    pub line: Option<u32>,
    /// The field path, if it is known.
    pub field: Option<String>,
    pub message: String,
    /// The time since which there is a problem in this file or URL.
    pub since: Timestamp,
    /// Whether pods of the last valid version continue to run because of it.
    pub pods_continue: bool,
    /// Whether the manifest is still valid: an unknown field, or the first of two equal keys, was
    /// ignored.
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

/// One fault in a manifest. The source adds its file or URL and its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) line: Option<u32>,
    pub(super) field: Option<String>,
    pub(super) message: String,
}

/// The faults of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Faults(pub(super) Vec<Fault>);

impl std::error::Error for Faults {}

impl fmt::Display for Faults {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Fault { field, message, .. }) in self.0.iter().enumerate() {
            out.write_str(if index == 0 { "" } else { "; " })?;
            match field {
                Some(field) => write!(out, "{field}: {message}")?,
                None => out.write_str(message)?,
            }
        }
        Ok(())
    }
}

impl Fault {
    /// A fault of the whole manifest.
    pub(super) fn whole(message: impl Into<String>) -> Self {
        Fault { line: None, field: None, message: clip(&message.into()) }
    }

    /// A fault of one field.
    pub(super) fn in_field(field: impl Into<String>, message: impl Into<String>) -> Self {
        Fault { line: None, field: Some(clip(&field.into())), message: clip(&message.into()) }
    }

    pub(super) fn into_problem(self, place: &str, since: Timestamp, pods_continue: bool) -> SourceProblem {
        let Fault { line, field, message } = self;
        SourceProblem { place: place.to_owned(), line, field, message, since, pods_continue, ignored: false }
    }

    pub(super) fn into_remark(self, place: &str, since: Timestamp) -> SourceProblem {
        SourceProblem { ignored: true, ..self.into_problem(place, since, false) }
    }
}

/// The problems of one manifest: its faults, then its unknown fields and duplicate keys.
pub(super) fn problems<'a>(
    place: &'a str,
    faults: &'a [Fault],
    unknown: &'a [Fault],
    pods_continue: bool,
    since: Timestamp,
) -> impl Iterator<Item = SourceProblem> + 'a {
    let faults = faults.iter().map(move |fault| fault.clone().into_problem(place, since, pods_continue));
    faults.chain(unknown.iter().map(move |fault| fault.clone().into_remark(place, since)))
}

/// Joins the faults of one manifest into an event message of at most 1,024 characters.
pub(super) fn summary(place: &str, problems: &[SourceProblem]) -> String {
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
    fn problem_text_has_file_line_field_and_message() {
        let problem =
            Fault { line: Some(7), ..Fault::in_field("spec.containers[0].image", "Required value") }
                .into_problem("/etc/m/a.yaml", Timestamp::UNIX_EPOCH, true);
        assert_eq!(problem.to_string(), "/etc/m/a.yaml:7: spec.containers[0].image: Required value");
        let whole = Fault::whole("empty").into_problem("/etc/m/a.yaml", Timestamp::UNIX_EPOCH, false);
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
    fn quoted_input_is_shortened_to_one_line() {
        assert_eq!(clip("a\nb"), "a b");
        assert_eq!(clip(&"é".repeat(9000)).chars().count(), 251);
    }
}
