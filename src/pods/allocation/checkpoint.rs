//! The state files of allocations, in the Go kubelet's format (pkg/kubelet/allocation/state).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::model::ids::PodUid;
use crate::util::atomic_file;

/// A state file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum CheckpointError {
    /// The file exists, but cannot be read or parsed.
    #[error(
        "could not restore state from checkpoint: {why}, please drain this node and delete pod resource \
         information checkpoint file \"{}\" before restarting Kubelet", path.display()
    )]
    Corrupt { path: PathBuf, why: String },
    /// The file cannot be written.
    #[error("cannot write the allocations of pods to {}: {error}", path.display())]
    Write { path: PathBuf, error: std::io::Error },
}

/// The entries of a file, each as JSON. There are none if the file does not exist.
pub(super) fn read(path: &Path) -> Result<BTreeMap<PodUid, Box<str>>, CheckpointError> {
    let corrupt = |why: String| CheckpointError::Corrupt { path: path.to_owned(), why };
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        other => other.map_err(|error| corrupt(error.to_string()))?,
    };
    parse(&text).map_err(corrupt)
}

fn parse(text: &str) -> Result<BTreeMap<PodUid, Box<str>>, String> {
    let json = |text: &str| serde_json::from_str::<Value>(text).map_err(|error| error.to_string());
    let outer = json(text)?;
    let data = outer.get("data").and_then(Value::as_str).unwrap_or_default();
    if outer.get("checksum").and_then(Value::as_u64) != Some(u64::from(checksum(data))) {
        return Err("checkpoint is corrupted".to_owned());
    }
    let inner = json(data)?;
    let entries = inner.get("entries").and_then(Value::as_object).into_iter().flatten();
    Ok(entries.map(|(uid, entry)| (PodUid::from(uid.as_str()), entry.to_string().into_boxed_str())).collect())
}

/// The content of a file with these entries.
pub(super) fn render(entries: &BTreeMap<PodUid, Box<str>>) -> String {
    let mut data = String::from("{");
    for (uid, entry) in entries {
        data.push_str(if data.len() == 1 { "\"entries\":{" } else { "," });
        data.push_str(&Value::from(uid.as_str()).to_string());
        data.push(':');
        data.push_str(entry);
    }
    data.push_str(if entries.is_empty() { "}" } else { "}}" });
    let checksum = checksum(&data);
    format!("{{\"data\":{},\"checksum\":{checksum}}}", Value::from(data))
}

pub(super) fn write(path: &Path, text: &str) -> Result<(), CheckpointError> {
    atomic_file::write(path, text.as_bytes(), 0o600)
        .map_err(|error| CheckpointError::Write { path: path.to_owned(), error })
}

/// The Go kubelet's checksum: the 32-bit FNV-1a of `(string)` and the text.
fn checksum(data: &str) -> u32 {
    let bytes = "(string)".bytes().chain(data.bytes());
    bytes.fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_go_kubelet() {
        assert_eq!(checksum("abc"), 2_241_406_447);
    }

    #[test]
    fn written_entries_equal_the_entries_read_back() {
        let entry = r#"{"ContainerResources":{"c":{"limits":{"cpu":"1"},"requests":{"cpu":"500m"}}}}"#;
        let entries = BTreeMap::from([(PodUid::from("u1"), entry.into()), (PodUid::from("u2"), "{}".into())]);
        let text = render(&entries);
        assert!(text.starts_with(r#"{"data":"{\"entries\":{\"u1\":{\"ContainerResources\""#), "{text}");
        assert_eq!(parse(&text).unwrap(), entries);
        assert_eq!(parse(&render(&BTreeMap::new())).unwrap(), BTreeMap::new());
    }

    #[test]
    fn a_corrupt_file_is_rejected_with_upstreams_message() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("allocated_pods_state");
        assert_eq!(read(&path).unwrap(), BTreeMap::new());
        let good = render(&BTreeMap::from([(PodUid::from("u1"), "{}".into())]));
        for bad in [good.replace("u1", "u2"), "{}".to_owned(), String::new(), "[".to_owned()] {
            std::fs::write(&path, &bad).unwrap();
            let message = read(&path).unwrap_err().to_string();
            assert!(message.starts_with("could not restore state from checkpoint: "), "{message}");
            let path = path.display();
            assert!(
                message.ends_with(&format!(
                    ", please drain this node and delete pod resource information checkpoint file \
                     \"{path}\" before restarting Kubelet"
                )),
                "{message}"
            );
        }
    }
}
