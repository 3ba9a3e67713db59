//! The file of `coracle join --write-bundle`: what several machines need to join one cluster, with the
//! credentials for the first certificate. `packaging/install` passes it to `coracle join --from-bundle`.
//!
//! The file decides whose pods run on a node, and these can become root there. So it is read only if root or
//! this user wrote it, and no other user can read the credentials.

use std::fmt;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cli::join_options::JoinOptions;
use crate::util::{atomic_file, untrusted};

use super::files;
use super::plane::{self, Cluster, Credentials, JoinError};
use super::refusal::{Reason, Refusal};

/// The form of the file. Another form has another number.
const VERSION: u32 = 1;

/// The largest file: a configuration of 1 MiB and the authorities, as strings of JSON.
const MAX_BUNDLE_BYTES: u64 = 4 * 1024 * 1024;

const MODE: u32 = 0o600;

/// What the machines need. `Debug` shows no secret.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct JoinBundle {
    version: u32,
    /// Address, authorities and credentials, all embedded.
    kubeconfig: String,
    /// Whether the cluster has kube-system/kubelet-config, as those of kubeadm: without it nothing joins.
    pub needs_configuration: bool,
    /// Each `KEY=VALUE`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    node_labels: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cri_socket: Option<String>,
    /// The content of the file of `--config`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    ignore_preflight_errors: Vec<String>,
    timeout_seconds: u64,
}

impl fmt::Debug for JoinBundle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("JoinBundle").field("version", &self.version).finish_non_exhaustive()
    }
}

/// The part of the file that each form has.
#[derive(Deserialize)]
struct Head {
    version: u32,
}

impl JoinBundle {
    /// `config`: the content of the file of `--config`.
    pub(super) fn new(
        cluster: &Cluster,
        credentials: &Credentials,
        options: &JoinOptions,
        config: Option<String>,
        needs_configuration: bool,
    ) -> JoinBundle {
        JoinBundle {
            version: VERSION,
            kubeconfig: plane::bootstrap_kubeconfig(cluster, credentials),
            needs_configuration,
            node_labels: options.node_labels.iter().map(|(key, value)| format!("{key}={value}")).collect(),
            cri_socket: options.cri_socket.clone(),
            config,
            ignore_preflight_errors: options.ignored.clone(),
            timeout_seconds: options.timeout.as_secs().max(1),
        }
    }

    /// The cluster and the credentials. `path`: where the file is. Nothing is sent.
    pub(super) fn cluster(&self, path: &Path) -> Result<(Cluster, Credentials), Refusal> {
        plane::by_kubeconfig(&self.kubeconfig, &path.display().to_string()).map_err(unusable)
    }

    /// The options of a node: those of its command, which have precedence, and those of the file, which is at
    /// `path`.
    pub(super) fn options(&self, command: &JoinOptions, path: &Path) -> Result<JoinOptions, Refusal> {
        let mut merged = JoinOptions { node_labels: Vec::new(), ..command.clone() };
        let mut values: Vec<(&str, &str)> = Vec::new();
        values.extend(self.node_labels.iter().map(|label| ("node-labels", label.as_str())));
        values.extend(
            self.ignore_preflight_errors.iter().map(|name| ("ignore-preflight-errors", name.as_str())),
        );
        if command.cri_socket.is_none() {
            values.extend(self.cri_socket.iter().map(|socket| ("cri-socket", socket.as_str())));
        }
        for (option, text) in values {
            merged.set(option, text).map_err(|reason| invalid(path, format!("{option}: {reason}")))?;
        }
        merged.node_labels.retain(|(key, _)| !command.node_labels.iter().any(|(own, _)| own == key));
        merged.node_labels.extend(command.node_labels.iter().cloned());
        if !command.has_timeout {
            merged.timeout = Duration::from_secs(self.timeout_seconds.max(1));
        }
        Ok(merged)
    }

    /// Writes the file for this user only; an existing regular file is replaced.
    pub(super) fn write(&self, path: &Path) -> Result<(), Refusal> {
        let failed = |error: std::io::Error| Refusal::file("write", path, &error);
        let text = serde_json::to_string_pretty(self).map_err(|error| failed(error.into()))?;
        let text = format!("{text}\n");
        if text.len() as u64 > MAX_BUNDLE_BYTES {
            let text = format!("{} would be larger than {MAX_BUNDLE_BYTES} bytes", path.display());
            return Err(Refusal::new(Reason::File, text, "give a smaller file with --config"));
        }
        let path = std::path::absolute(path).map_err(failed)?;
        // The file is put in the place of what is there: a device such as /dev/stdout would be gone.
        if fs::symlink_metadata(&path).is_ok_and(|found| !found.is_file()) {
            let text = format!("{} is there, and is no regular file", path.display());
            return Err(Refusal::new(Reason::File, text, "name a file that can be replaced"));
        }
        atomic_file::write(&path, text.as_bytes(), MODE).map_err(failed)?;
        atomic_file::sync_directory(path.parent().unwrap_or(Path::new("/"))).map_err(failed)
    }
}

/// Reads a file of [`JoinBundle::write`].
pub(super) fn read(path: &Path) -> Result<JoinBundle, Refusal> {
    let failed = |error: std::io::Error| Refusal::file("read", path, &error);
    let file = untrusted::open(path).map_err(failed)?;
    if !files::is_safe(&file.metadata().map_err(failed)?, MODE) {
        let text = format!("{} is not of root, or other users have rights on it", path.display());
        let advice =
            "if it is the file that you wrote, give it to root (chown root), with mode 0600 (chmod 600)";
        return Err(Refusal::new(Reason::File, text, advice));
    }
    let mut bytes = Vec::new();
    file.take(MAX_BUNDLE_BYTES.saturating_add(1)).read_to_end(&mut bytes).map_err(failed)?;
    parse(path, &bytes)
}

fn parse(path: &Path, bytes: &[u8]) -> Result<JoinBundle, Refusal> {
    if bytes.len() as u64 > MAX_BUNDLE_BYTES {
        return Err(invalid(path, format!("is larger than {MAX_BUNDLE_BYTES} bytes")));
    }
    // The messages of serde_json have values, which may be secrets.
    let wrong = |error: serde_json::Error| {
        let (line, column) = (error.line(), error.column());
        invalid(path, format!("line {line}, column {column}: not as coracle join --write-bundle writes it"))
    };
    let head: Head = serde_json::from_slice(bytes).map_err(wrong)?;
    if head.version != VERSION {
        let version = head.version;
        return Err(invalid(path, format!("has the form {version}, and this release reads {VERSION}")));
    }
    serde_json::from_slice(bytes).map_err(wrong)
}

fn invalid(path: &Path, reason: String) -> Refusal {
    unusable(JoinError::File { path: path.display().to_string(), reason })
}

fn unusable(error: JoinError) -> Refusal {
    let advice = "write the file again with coracle join --write-bundle, and copy it completely".to_owned();
    Refusal { advice, ..Refusal::from(error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::join_options::JoinMethod;
    use std::os::unix::fs::{PermissionsExt, symlink};

    const TOKEN: &str = "abcdef.0123456789abcdef";

    fn bundle(words: &[(&str, &str)]) -> JoinBundle {
        let cluster = Cluster {
            server: "https://10.0.0.1:6443".to_owned(),
            authority: crate::transport::testing::AUTHORITY.to_owned(),
        };
        let config = Some("maxPods: 5\n".to_owned());
        JoinBundle::new(&cluster, &Credentials::Token(TOKEN.to_owned()), &options(words), config, true)
    }

    fn options(words: &[(&str, &str)]) -> JoinOptions {
        let mut options = JoinOptions { method: JoinMethod::Bundle("/b".into()), ..JoinOptions::default() };
        for (option, text) in words {
            options.set(option, text).unwrap();
        }
        options
    }

    #[test]
    fn written_file_is_read_back_and_only_its_owner_reads_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("join.json");
        std::fs::write(&path, "another file").unwrap();
        let written = bundle(&[("node-labels", "a=b"), ("cri-socket", "/s"), ("timeout", "90s")]);
        written.write(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        let found = read(&path).unwrap();
        assert_eq!(found, written);
        let (cluster, credentials) = found.cluster(&path).unwrap();
        assert_eq!(cluster.server, "https://10.0.0.1:6443");
        assert_eq!(credentials, Credentials::Token(TOKEN.to_owned()));
        assert!(!format!("{found:?}").contains("0123456789"));
        assert!(written.write(&dir.path().join("no/such/directory")).is_err());
    }

    #[test]
    fn link_or_device_is_not_replaced_by_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("stdout");
        symlink("/dev/null", &link).unwrap();
        assert_eq!(bundle(&[]).write(&link).unwrap_err().code, Reason::File.code());
        assert_eq!(std::fs::read_link(&link).unwrap(), Path::new("/dev/null"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn file_that_others_can_read_or_replace_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("join.json");
        bundle(&[]).write(&path).unwrap();
        for mode in [0o640, 0o604, 0o620, 0o700] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let refusal = read(&path).unwrap_err();
            assert_eq!(refusal.code, Reason::File.code(), "{mode:o}");
            assert!(refusal.advice.contains("chmod 600"), "{refusal:?}");
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
        assert!(read(&path).is_ok());
        let link = dir.path().join("link");
        symlink(&path, &link).unwrap();
        assert_eq!(read(&link).unwrap_err().code, Reason::File.code());
        assert!(read(Path::new("/dev/zero")).is_err());
    }

    #[test]
    fn option_of_the_command_has_precedence_over_that_of_the_file() {
        let file = bundle(&[
            ("node-labels", "a=file,b=file"),
            ("cri-socket", "/file"),
            ("ignore-preflight-errors", "swap"),
            ("timeout", "90s"),
        ]);
        let path = Path::new("/b");
        let plain = file.options(&options(&[("node-name", "n")]), path).unwrap();
        assert_eq!((plain.node_name.as_str(), plain.cri_socket.as_deref()), ("n", Some("unix:///file")));
        assert_eq!((plain.timeout, plain.ignored), (Duration::from_secs(90), vec!["swap".to_owned()]));
        let own = options(&[
            ("node-labels", "b=own"),
            ("cri-socket", "/own"),
            ("ignore-preflight-errors", "port-10250"),
            ("timeout", "10s"),
        ]);
        let merged = file.options(&own, path).unwrap();
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(merged.node_labels, [pair("a", "file"), pair("b", "own")]);
        assert_eq!((merged.cri_socket.as_deref(), merged.timeout.as_secs()), (Some("unix:///own"), 10));
        assert_eq!(merged.ignored, ["port-10250", "swap"]);
        // Also one that is the default.
        let merged = file.options(&options(&[("timeout", "5m")]), path).unwrap();
        assert_eq!(merged.timeout, Duration::from_secs(300));
    }

    #[test]
    fn damaged_files_are_refused_without_their_values() {
        let text = serde_json::to_string(&bundle(&[])).unwrap();
        let path = Path::new("/b");
        assert!(parse(path, text.as_bytes()).is_ok());
        for (text, reason) in [
            (String::new(), "line 1"),
            (text.replace("\"version\":1", "\"version\":2"), "has the form 2"),
            (text.replace("\"version\":1", "\"version\":\"sesame\""), "line 1"),
            (text.replace("\"kubeconfig\":", "\"sesame\":"), "line 1"),
            (text[..text.len() / 2].to_owned(), "line 1"),
            (" ".repeat(5 << 20), "is larger than"),
        ] {
            let refusal = parse(path, text.as_bytes()).unwrap_err();
            assert_eq!(refusal.code, 20, "{}", refusal.text);
            assert!(refusal.text.starts_with("/b: ") && refusal.text.contains(reason), "{}", refusal.text);
            let shown = format!("{} {}", refusal.text, refusal.advice);
            assert!(!shown.contains("sesame") && shown.contains("--write-bundle"), "{shown}");
        }
        let changed = JoinBundle { node_labels: vec!["a_/=b".to_owned()], ..bundle(&[]) };
        let refusal = changed.options(&options(&[]), path).unwrap_err();
        assert!(refusal.text.starts_with("/b: node-labels: "), "{}", refusal.text);
        let other = JoinBundle { kubeconfig: "kind: Config\n".to_owned(), ..bundle(&[]) };
        assert_eq!(other.cluster(path).unwrap_err().code, 20);
    }
}
