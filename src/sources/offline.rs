//! Checks manifests without an agent, by the rules of the file source.

use std::collections::HashMap;
use std::path::Path;

use serde::Serialize;

use super::error::Error;
use super::file::{self, Listing, Reading};
use super::identity::Origin;
use super::manifest;
use super::problem::Fault;
use super::unsupported::unsupported_fields;
use crate::model::ids::{FullName, PodUid};
use crate::model::pod::Pod;
use crate::util::error_chain::chain;

/// The node name of pods in a check; the node on which they will run is unknown.
const NODE: &str = "node";

/// How a finding affects the pods of its manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// A pod of the manifest does not start.
    Error,
    /// The pods start; the field has no effect.
    Warning,
}

/// One problem of a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// How it affects the pods.
    pub severity: Severity,
    /// The line, counted from 1, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// The path of the field, such as `spec.containers[0].image`, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    pub message: String,
}

/// The result for one manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct CheckedManifest {
    pub file: String,
    /// The valid pods, as `NAMESPACE/NAME`, in the order of the manifest.
    pub pods: Vec<String>,
    /// All problems: errors first, then warnings.
    pub findings: Vec<Finding>,
}

impl CheckedManifest {
    /// The result for a file that could not be read.
    fn unreadable(path: &Path, error: &Error) -> Self {
        let finding = finding(Severity::Error, Fault::whole(chain(error)));
        CheckedManifest {
            file: path.to_string_lossy().into_owned(),
            pods: Vec::new(),
            findings: vec![finding],
        }
    }

    /// Whether a pod of this manifest does not start.
    pub(crate) fn has_errors(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Error)
    }
}

fn finding(severity: Severity, fault: Fault) -> Finding {
    Finding { severity, line: fault.line, field: fault.field, message: fault.message }
}

/// Checks the manifest at `path`, or all manifests in the directory at `path`: the files that the
/// file source would read. Pods of one directory must have different names and UIDs.
#[must_use]
pub(crate) fn check(path: &Path) -> Vec<CheckedManifest> {
    let files = match file::list(path) {
        Ok(Listing::Files(files)) => files,
        Ok(Listing::Missing) => {
            let missing = std::io::Error::from(rustix::io::Errno::NOENT);
            return vec![CheckedManifest::unreadable(path, &Error::Open(path.to_owned(), missing))];
        }
        Err(error) => return vec![CheckedManifest::unreadable(path, &error)],
    };
    let mut all: Vec<CheckedManifest> = Vec::new();
    let mut names: HashMap<FullName, usize> = HashMap::new();
    let mut uids: HashMap<PodUid, usize> = HashMap::new();
    for file in files {
        let bytes = match file::read(&file, None) {
            // A directory, or a file that was removed meanwhile.
            Ok(Reading::Gone | Reading::Unchanged) => continue,
            Ok(Reading::Content(bytes, _)) => bytes,
            Err(error) => {
                all.push(CheckedManifest::unreadable(&file, &error));
                continue;
            }
        };
        let (checked, pods) = check_file(&file, &bytes);
        let index = all.len();
        all.push(checked);
        for pod in &pods {
            // In the agent, the later file takes precedence.
            let earlier = names.insert(pod.full_name(), index);
            let same_uid = uids.insert(pod.uid().clone(), index);
            let what = match (earlier, same_uid) {
                (Some(_), _) => format!("the pod {}", shown(pod)),
                (None, Some(_)) => format!("the UID {}", pod.uid()),
                (None, None) => continue,
            };
            let message = format!("{what} is also in {}, which replaces this one", file.display());
            let place = earlier.or(same_uid).and_then(|earlier| all.get_mut(earlier));
            if let Some(place) = place {
                place.findings.push(finding(Severity::Error, Fault::in_field("metadata.name", message)));
            }
        }
    }
    if all.is_empty() {
        let fault = Fault::whole("no manifests in this directory".to_owned());
        let findings = vec![finding(Severity::Warning, fault)];
        all.push(CheckedManifest { file: path.to_string_lossy().into_owned(), pods: Vec::new(), findings });
    }
    for checked in &mut all {
        checked.findings.sort_by_key(|finding| finding.severity == Severity::Warning);
    }
    all
}

fn check_file(path: &Path, bytes: &[u8]) -> (CheckedManifest, Vec<Pod>) {
    let file = path.to_string_lossy().into_owned();
    let manifest = manifest::read(bytes, NODE, &Origin::File(file.clone()));
    let mut findings: Vec<Finding> =
        manifest.faults.into_iter().map(|fault| finding(Severity::Error, fault)).collect();
    findings.extend(manifest.unknown.into_iter().map(|fault| finding(Severity::Warning, fault)));
    for pod in &manifest.pods {
        let name = shown(pod);
        let fields = unsupported_fields(pod);
        findings.extend(fields.into_iter().map(|field| {
            finding(Severity::Warning, Fault::in_field(field, format!("has no effect yet (pod {name})")))
        }));
    }
    let pods = manifest.pods.iter().map(shown).collect();
    (CheckedManifest { file, pods, findings }, manifest.pods)
}

/// The name as in the manifest, without the node's name.
fn shown(pod: &Pod) -> String {
    let name = pod.name().strip_suffix(NODE).and_then(|name| name.strip_suffix('-'));
    format!("{}/{}", pod.namespace(), name.unwrap_or(pod.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  containers:\n  - {name: c, image: i}\n";

    fn text(all: &[CheckedManifest]) -> Vec<String> {
        let mut lines = Vec::new();
        for checked in all {
            let name =
                Path::new(&checked.file).file_name().unwrap_or_default().to_string_lossy().into_owned();
            lines.push(format!("{name} {}", checked.pods.join(",")));
            for Finding { severity, line, field, message } in &checked.findings {
                let field = field.clone().unwrap_or_default();
                lines.push(format!("{severity:?} {} {field}: {message}", line.unwrap_or(0)));
            }
        }
        lines
    }

    #[test]
    fn errors_and_warnings_name_line_and_field() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.yaml");
        let check = |manifest: &str, expected: &[&str]| {
            std::fs::write(&path, manifest).unwrap();
            assert_eq!(text(&check(&path)), expected, "{manifest}");
        };
        check(GOOD, &["a.yaml default/web"]);
        check(
            &GOOD.replace("image: i", "imagine: i"),
            &[
                "a.yaml ",
                "Error 6 spec.containers[0].image: Required value",
                "Warning 6 spec.containers[0].imagine: unknown field, ignored",
            ],
        );
        check(
            &format!("{GOOD}  volumes:\n  - {{name: data, rbd: {{image: i, monitors: []}}}}\n"),
            &["a.yaml default/web", "Warning 0 spec.volumes[0].rbd: has no effect yet (pod default/web)"],
        );
        check("", &["a.yaml ", "Error 0 : the manifest is empty"]);
        std::fs::write(&path, "apiVersion: v1\nspec: [").unwrap();
        let broken = &super::check(&path)[0];
        assert!(broken.has_errors() && broken.findings[0].line.is_some(), "{broken:?}");
    }

    #[test]
    fn offline_check_reads_the_files_that_the_agent_reads() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["a.yaml", "b.yaml", ".hidden.yaml"] {
            std::fs::write(path(name), GOOD).unwrap();
        }
        std::fs::create_dir(path("sub")).unwrap();
        std::os::unix::fs::symlink("nowhere", path("link")).unwrap();
        let lines = text(&check(dir.path()));
        let b = path("b.yaml");
        let replaced = format!(
            "Error 0 metadata.name: the pod default/web is also in {}, which replaces this one",
            b.display()
        );
        assert_eq!(lines[..3], ["a.yaml default/web".to_owned(), replaced, "b.yaml default/web".to_owned()]);
        assert!(lines[3].starts_with("link ") && lines[4].contains("cannot open"), "{lines:?}");
        assert_eq!(lines.len(), 5, "{lines:?}");
    }

    #[test]
    fn paths_that_are_no_manifest_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let missing = &check(&dir.path().join("none"))[0];
        assert!(
            missing.has_errors() && missing.findings[0].message.contains("No such file or directory"),
            "{missing:?}"
        );
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from(0o600),
            0,
        )
        .unwrap();
        let pipe = &check(&fifo)[0];
        assert!(pipe.findings[0].message.contains("a named pipe"), "{pipe:?}");
        assert_eq!(check(dir.path()).len(), 1, "an empty manifest directory has no findings of its own");
    }
}
