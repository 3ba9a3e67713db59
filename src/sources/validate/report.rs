//! Field paths, and the list of their faults (Go: apimachinery field.ErrorList).

use std::fmt::{self, Debug, Display};

use crate::model::typed::clip;
use crate::sources::problem::Fault;

/// A field path; each part refers to its parent, and nothing is allocated until it is printed.
#[derive(Clone, Copy)]
pub(super) struct Path<'a> {
    parent: Option<&'a Path<'a>>,
    step: Step<'a>,
}

#[derive(Clone, Copy)]
enum Step<'a> {
    Field(&'a str),
    Key(&'a str),
    Index(usize),
}

impl<'a> Path<'a> {
    /// A top-level field.
    pub(super) fn root(name: &'a str) -> Self {
        Path { parent: None, step: Step::Field(name) }
    }

    pub(super) fn field(&'a self, name: &'a str) -> Path<'a> {
        Path { parent: Some(self), step: Step::Field(name) }
    }

    /// An entry of this mapping.
    pub(super) fn key(&'a self, key: &'a str) -> Path<'a> {
        Path { parent: Some(self), step: Step::Key(key) }
    }

    /// An item of this list.
    pub(super) fn index(&'a self, index: usize) -> Path<'a> {
        Path { parent: Some(self), step: Step::Index(index) }
    }
}

impl Display for Path<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(parent) = self.parent {
            parent.fmt(out)?;
        }
        match self.step {
            Step::Field(name) if self.parent.is_some() => write!(out, ".{name}"),
            Step::Field(name) => out.write_str(name),
            Step::Key(key) => write!(out, "[{key}]"),
            Step::Index(index) => write!(out, "[{index}]"),
        }
    }
}

/// All faults of one pod.
#[derive(Default)]
pub(super) struct Report {
    faults: Vec<Fault>,
}

/// At most this many faults of one pod are listed. A manifest can have thousands of faulty ports.
const MAX_FAULTS: usize = 100;

impl Report {
    /// The faults in the order of the checks.
    pub(super) fn into_faults(self) -> Vec<Fault> {
        self.faults
    }

    fn add(&mut self, path: &Path<'_>, message: String) {
        if self.faults.len() < MAX_FAULTS {
            self.faults.push(Fault::in_field(path.to_string(), message));
        }
    }

    /// A required value is missing.
    pub(super) fn required(&mut self, path: &Path<'_>, detail: &str) {
        let message =
            if detail.is_empty() { "Required value".to_owned() } else { format!("Required value: {detail}") };
        self.add(path, message);
    }

    /// A value is invalid. Strings are quoted, numbers are not.
    pub(super) fn invalid(&mut self, path: &Path<'_>, value: &dyn Debug, detail: impl Display) {
        self.add(path, format!("Invalid value: {}: {detail}", brief(value)));
    }

    /// The value is not one of the choices.
    pub(super) fn unsupported(&mut self, path: &Path<'_>, value: &str, choices: &[&str]) {
        let choices: Vec<String> = choices.iter().map(|choice| format!("{choice:?}")).collect();
        let message =
            format!("Unsupported value: {}: supported values: {}", brief(&value), choices.join(", "));
        self.add(path, message);
    }

    /// Another item has the same value.
    pub(super) fn duplicate(&mut self, path: &Path<'_>, value: &dyn Debug) {
        self.add(path, format!("Duplicate value: {}", brief(value)));
    }

    /// The named item does not exist.
    pub(super) fn not_found(&mut self, path: &Path<'_>, value: &str) {
        self.add(path, format!("Not found: {}", brief(&value)));
    }

    /// The value is not allowed here.
    pub(super) fn forbidden(&mut self, path: &Path<'_>, detail: &str) {
        self.add(path, format!("Forbidden: {detail}"));
    }

    /// The value has too many bytes.
    pub(super) fn too_long(&mut self, path: &Path<'_>, max: usize) {
        self.add(path, format!("Too long: may not be more than {max} bytes"));
    }

    /// The list has too many items.
    pub(super) fn too_many(&mut self, path: &Path<'_>, count: usize, max: usize) {
        self.add(path, format!("Too many: {count}: must have at most {max} items"));
    }

    /// Adds the problem that a check of the value found, if any.
    pub(super) fn check(&mut self, path: &Path<'_>, value: &str, problem: Option<String>) {
        if let Some(problem) = problem {
            self.invalid(path, &value, problem);
        }
    }

    /// Requires one of `choices`; an empty value counts as absent.
    pub(super) fn choice(&mut self, path: &Path<'_>, value: Option<&str>, choices: &[&str]) {
        if let Some(value) = value.filter(|value| !value.is_empty() && !choices.contains(value)) {
            self.unsupported(path, value, choices);
        }
    }

    /// Requires a number that is not negative; it may be absent.
    pub(super) fn not_negative(&mut self, path: &Path<'_>, value: Option<i64>) {
        if let Some(value) = value.filter(|value| *value < 0) {
            self.invalid(path, &value, "must be greater than or equal to 0");
        }
    }
}

/// A value for a message: strings are quoted, long values are cut.
fn brief(value: &dyn Debug) -> String {
    const MAX: usize = 120;
    let text = format!("{value:?}");
    if text.chars().nth(MAX).is_none() {
        return clip(&text);
    }
    let cut: String = text.chars().take(MAX).collect();
    format!("{}…", clip(&cut))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_equal_those_of_the_api_server() {
        let mut report = Report::default();
        let spec = Path::root("spec");
        let containers = spec.field("containers");
        let first = containers.index(0);
        report.required(&first.field("image"), "");
        report.invalid(&first.field("name"), &"A", "no");
        report.invalid(&spec.field("x"), &-1, "must be greater than or equal to 0");
        report.unsupported(&spec.field("restartPolicy"), "Maybe", &["Always", "Never"]);
        report.duplicate(&spec.field("y").key("a.b/c"), &"web");
        report.not_found(&spec, "v");
        let lines: Vec<String> = report
            .into_faults()
            .into_iter()
            .map(|f| format!("{}: {}", f.field.unwrap(), f.message))
            .collect();
        assert_eq!(
            lines,
            [
                "spec.containers[0].image: Required value",
                "spec.containers[0].name: Invalid value: \"A\": no",
                "spec.x: Invalid value: -1: must be greater than or equal to 0",
                "spec.restartPolicy: Unsupported value: \"Maybe\": supported values: \"Always\", \"Never\"",
                "spec.y[a.b/c]: Duplicate value: \"web\"",
                "spec: Not found: \"v\"",
            ]
        );
    }
}
