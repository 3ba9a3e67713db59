//! `coracle validate`: checks manifests of static pods. Needs no agent and no root.

use std::path::{Path, PathBuf};

use crate::cli::local::Output;
use crate::cli::table::{Color, visible};
use crate::sources::offline::{self, CheckedManifest, Severity};
use crate::util::error_chain::without_codes;

use super::console::Console;
use super::error::{CommandError, Outcome, checked};

pub(super) fn run(console: &mut Console<'_>, files: &[PathBuf], output: Output) -> Outcome {
    let all: Vec<CheckedManifest> = files.iter().flat_map(|path| offline::check(Path::new(path))).collect();
    let shown = match console.document(output, &all) {
        Ok(false) => print(console, &all).map_err(CommandError::from),
        shown => shown.map(drop),
    };
    checked(shown, all.iter().any(CheckedManifest::has_errors))
}

/// Prints a line per finding in the format of compilers, `FILE:LINE: SEVERITY: FIELD: MESSAGE`,
/// and a line for each file without an error.
fn print(console: &mut Console<'_>, all: &[CheckedManifest]) -> std::io::Result<()> {
    for checked in all {
        let file = visible(&checked.file);
        for finding in &checked.findings {
            let (color, severity) = match finding.severity {
                Severity::Error => (Color::Red, "error"),
                Severity::Warning => (Color::Yellow, "warning"),
            };
            let line = finding.line.map_or(String::new(), |line| format!(":{line}"));
            let severity = console.paint.put(Some(color), severity);
            let field = finding.field.as_ref().map_or(String::new(), |field| format!("{}: ", visible(field)));
            let message = visible(&without_codes(&finding.message));
            writeln!(console.out, "{file}{line}: {severity}: {field}{message}")?;
        }
        if !checked.has_errors() {
            let ok = console.paint.put(Some(Color::Green), "ok");
            let pods = if checked.pods.len() == 1 {
                "1 pod".to_owned()
            } else {
                format!("{} pods", checked.pods.len())
            };
            writeln!(console.out, "{file}: {ok}: {pods}")?;
        }
    }
    console.out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::exit::Exit;
    use crate::cli::table::Paint;

    fn validate(files: &[PathBuf], output: Output) -> (Exit, String) {
        let mut out = Vec::new();
        let now = jiff::Timestamp::UNIX_EPOCH;
        let mut console = Console { out: &mut out, paint: Paint::new(false), now };
        let exit = run(&mut console, files, output).unwrap();
        (exit, String::from_utf8(out).unwrap())
    }

    #[test]
    fn errors_are_in_the_exit_code_also_if_the_reader_closed_the_pipe() {
        struct Closed;
        impl std::io::Write for Closed {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let bad = dir.path().join("bad.yaml");
        std::fs::write(&bad, "kind: Pod\n").unwrap();
        let check = |path: &Path, output| {
            let (mut out, now) = (Closed, jiff::Timestamp::UNIX_EPOCH);
            let mut console = Console { out: &mut out, paint: Paint::new(false), now };
            run(&mut console, &[path.to_owned()], output).unwrap()
        };
        for output in [Output::Table, Output::Json] {
            assert_eq!(check(&bad, output), Exit::CheckFailed);
        }
        std::fs::remove_file(&bad).unwrap();
        assert_eq!(check(dir.path(), Output::Table), Exit::Success);
    }

    #[test]
    fn directory_without_manifests_is_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        let (exit, text) = validate(&[dir.path().to_owned()], Output::Table);
        assert_eq!(exit, Exit::Success);
        assert!(text.contains("warning: no manifests in this directory"), "{text}");
    }

    #[test]
    fn findings_are_printed_with_file_line_and_field() {
        let dir = tempfile::tempdir().unwrap();
        let (good, bad) = (dir.path().join("good.yaml"), dir.path().join("bad\u{1b}.yaml"));
        let manifest = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  containers:\n  - {name: c, image: i}\n";
        std::fs::write(&good, manifest.replace("spec:", "spek: 1\nspec:")).unwrap();
        std::fs::write(&bad, manifest.replace("image: i", "image: 7")).unwrap();

        let (exit, text) = validate(std::slice::from_ref(&good), Output::Table);
        let path = good.display();
        assert_eq!(exit, Exit::Success);
        assert_eq!(text, format!("{path}:4: warning: spek: unknown field, ignored\n{path}: ok: 1 pod\n"));

        let (exit, text) = validate(&[good, bad.clone()], Output::Table);
        assert_eq!(exit, Exit::CheckFailed);
        let want = "bad\\u{1b}.yaml:6: error: spec.containers[0].image: Invalid value: want a string";
        assert!(text.contains(want) && !text.contains('\u{1b}'), "{text}");

        let (exit, text) = validate(&[bad], Output::Json);
        let list: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(exit, Exit::CheckFailed);
        assert_eq!(list[0]["pods"], serde_json::json!([]));
        let finding = &list[0]["findings"][0];
        assert_eq!(finding["severity"], "error");
        assert_eq!(finding["line"], 6);
        assert_eq!(finding["field"], "spec.containers[0].image");
    }
}
