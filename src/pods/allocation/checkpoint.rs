//! The state files of allocations, in the Go kubelet's format (pkg/kubelet/allocation/state).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::model::ids::PodUid;
use crate::util::atomic_file;
use crate::util::checkpoint_file::CheckpointFile;

/// A state file that cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the allocations of pods to {}: {error}", .path.display())]
pub struct CheckpointError {
    path: PathBuf,
    error: std::io::Error,
}

/// The entries of the file `name`, each as JSON. There are none if the file does not exist. One that
/// cannot be read or parsed is put aside, and described in `problems`.
///
/// DIFFERS: the Go kubelet does not start with such a file; an operator has to drain the node.
pub(super) fn read(dir: &Path, name: &str, problems: &mut Vec<String>) -> BTreeMap<PodUid, Box<str>> {
    let file = CheckpointFile::new(dir, name);
    let parsed = match file.read() {
        Ok(None) => return BTreeMap::new(),
        Ok(Some(text)) => parse(&text),
        Err(error) => Err(error.to_string()),
    };
    parsed.unwrap_or_else(|reason| {
        let path = file.path().display();
        problems.push(match file.put_aside(&reason) {
            Ok(aside) => format!(
                "the state file {path} cannot be used: {reason}; it is now {}, and pods have the resources \
                 that their specs request",
                aside.display()
            ),
            Err(error) => {
                format!("the state file {path} cannot be used: {reason}; it cannot be renamed: {error}")
            }
        });
        BTreeMap::new()
    })
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
        .map_err(|error| CheckpointError { path: path.to_owned(), error })
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
    fn limits_of_volumes_that_1_37_writes_stay_in_an_entry_that_does_not_change() {
        let data = r#"{"entries":{"u":{"ContainerResources":{"c":{}},"PodLevelResources":null,"EmptyDirVolumeLimits":{"v":"1Gi"}}}}"#;
        let text = format!("{{\"data\":{},\"checksum\":{}}}", Value::from(data), checksum(data));
        let entries = parse(&text).unwrap();
        let entry = &entries[&PodUid::from("u")];
        assert!(super::super::resources::PodResources::parse(entry).is_some(), "{entry}");
        assert!(render(&entries).contains(r#"\"EmptyDirVolumeLimits\":{\"v\":\"1Gi\"}"#));
    }

    #[test]
    fn unusable_file_is_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let name = "allocated_pods_state";
        let (path, aside) = (dir.path().join(name), dir.path().join("allocated_pods_state.unusable"));
        let mut problems = Vec::new();
        assert_eq!(read(dir.path(), name, &mut problems), BTreeMap::new());
        assert!(problems.is_empty() && !aside.exists());
        let good = render(&BTreeMap::from([(PodUid::from("u1"), "{}".into())]));
        for bad in [good.replace("u1", "u2").as_bytes(), b"{}", b"", b"[", b"\xff"] {
            std::fs::write(&path, bad).unwrap();
            let mut problems = Vec::new();
            assert_eq!(read(dir.path(), name, &mut problems), BTreeMap::new());
            let start = format!("the state file {} cannot be used: ", path.display());
            assert!(problems.len() == 1 && problems[0].starts_with(&start), "{problems:?}");
            assert!(!path.exists() && std::fs::read(&aside).unwrap() == bad);
        }
    }
}
