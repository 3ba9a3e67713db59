//! Allocates ranges of ids to pods with their own user namespace (Go: pkg/kubelet/userns).
//!
//! A pod's range is written into its directory before its sandbox is made, in upstream's form.
//! These files are the only state: a range is free if no pod's directory has a file with it. So
//! ranges survive a restart, and the removal of a pod's directory frees its range.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cri;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::transport::generated::runtime::{IDMapping, NamespaceMode, UserNamespace};
use crate::util::atomic_file;
use crate::util::child::{self, ChildError, Limits};
use crate::util::disk_writes;
use crate::util::lock::LockExt;
use crate::util::state_files;
use crate::util::stop::StopToken;
use crate::util::untrusted;

/// Each range starts at a multiple of this: an image may use any 16-bit id.
const UNIT: u32 = 65_536;
const FILE: &str = "userns";
/// Far above its size.
const MAX_BYTES: u64 = 64 * 1024;
/// The user whose subordinate ids are used, if this user exists.
const USER: &str = "kubelet";
const GETSUBIDS: &str = "getsubids";
const LIMITS: Limits = Limits { time: Duration::from_secs(10), output_bytes: 64 << 10 };

/// The node's ids to which a pod's ids 0, 1, 2 and so on are mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IdRange {
    /// The node's id for id 0 of the pod.
    pub first: u32,
    pub length: u32,
}

impl IdRange {
    /// The range as a mapping of the CRI.
    pub(super) fn mapping(self) -> IDMapping {
        IDMapping { host_id: self.first, container_id: 0, length: self.length, ..IDMapping::default() }
    }
}

/// The user namespace of a sandbox and its containers.
pub(super) fn message(range: Option<IdRange>) -> UserNamespace {
    match range {
        None => UserNamespace { mode: NamespaceMode::NODE.into(), ..UserNamespace::default() },
        Some(range) => UserNamespace {
            mode: NamespaceMode::POD.into(),
            uids: vec![range.mapping()],
            gids: vec![range.mapping()],
            ..UserNamespace::default()
        },
    }
}

/// Why a pod has no user namespace. Shown in the event `FailedCreatePodSandBox`.
#[derive(Debug, thiserror::Error)]
pub enum UserNamespaceError {
    /// The runtime does not support user namespaces.
    #[error("can't set `spec.hostUsers: false`, runtime does not support user namespaces")]
    Unsupported,
    /// The request for the runtime's features failed.
    #[error("can't set `spec.hostUsers: false`, runtime does not support user namespaces: {0}")]
    Runtime(cri::CriError),
    /// A pod's file cannot be read or written.
    #[error("cannot {attempt} {}: {error}", path.display())]
    File { attempt: &'static str, path: PathBuf, error: std::io::Error },
    /// A pod's file has invalid content.
    #[error("user namespace: invalid user namespace mappings file {}: {reason}", path.display())]
    Content { path: PathBuf, reason: String },
    /// All ranges are in use.
    #[error("create user namespace: could not find an empty slot to allocate a user namespace")]
    Full,
    /// The subordinate ids that the machine configures cannot be used.
    #[error("{0}")]
    NodeIds(String),
    /// The program that reports the subordinate ids failed.
    #[error("error retrieving additional ids for user {USER:?}: {0}")]
    Program(String),
}

/// The content of a pod's file, with the fields in upstream's order.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mappings {
    uid_mappings: Vec<Mapping>,
    gid_mappings: Vec<Mapping>,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mapping {
    host_id: u32,
    container_id: u32,
    length: u32,
}

/// The node's ids from which ranges are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NodeIds {
    first: u32,
    /// One more than the last.
    end: u64,
}

pub(super) struct UserNamespaces {
    pods: PathBuf,
    passwd: PathBuf,
    program: PathBuf,
    ids_per_pod: u32,
    max_pods: u32,
    /// `None` before the first use. The lock is held while a range is chosen and written.
    node_ids: Mutex<Option<NodeIds>>,
}

impl UserNamespaces {
    pub(super) fn new(root_dir: &Path, ids_per_pod: u32, max_pods: u32) -> UserNamespaces {
        UserNamespaces {
            pods: root_dir.join("pods"),
            passwd: PathBuf::from("/etc/passwd"),
            program: PathBuf::from(GETSUBIDS),
            ids_per_pod,
            max_pods,
            node_ids: Mutex::new(None),
        }
    }

    /// The pod's range: the one that it has, or a new one if the runtime supports it (`can`).
    /// `None` for pods that share the node's ids.
    pub(super) fn of_pod(
        &self,
        pod: &Pod,
        can: impl FnOnce() -> Result<bool, cri::CriError>,
        stop: &StopToken,
    ) -> Result<Option<IdRange>, UserNamespaceError> {
        if pod.spec().host_users != Some(false) {
            return Ok(None);
        }
        let file = self.file(pod.uid());
        if let Some(range) = read(&file, self.ids_per_pod)? {
            return Ok(Some(range));
        }
        if !can().map_err(UserNamespaceError::Runtime)? {
            return Err(UserNamespaceError::Unsupported);
        }
        let found = self.find_node_ids(stop)?;
        // Stored until the agent exits: the subordinate ids do not change before.
        let mut node_ids = self.node_ids.locked();
        let node_ids = *node_ids.get_or_insert(found);
        let taken = self.ids_in_use()?;
        let range = first_free_range(node_ids, self.ids_per_pod, &taken).ok_or(UserNamespaceError::Full)?;
        self.write(&file, range)?;
        Ok(Some(range))
    }

    fn file(&self, uid: &PodUid) -> PathBuf {
        self.pods.join(uid.as_str()).join(FILE)
    }

    /// First ids of all ranges in use. Fails if a file cannot be read, as its range is unknown.
    fn ids_in_use(&self) -> Result<BTreeSet<u32>, UserNamespaceError> {
        let failed = |error| UserNamespaceError::File { attempt: "list", path: self.pods.clone(), error };
        let entries = match std::fs::read_dir(&self.pods) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeSet::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut taken = BTreeSet::new();
        for entry in entries {
            let file = entry.map_err(failed)?.path().join(FILE);
            taken.extend(read(&file, self.ids_per_pod)?.map(|range| range.first));
        }
        Ok(taken)
    }

    fn write(&self, file: &Path, range: IdRange) -> Result<(), UserNamespaceError> {
        let failed =
            |attempt, path: &Path, error| UserNamespaceError::File { attempt, path: path.to_owned(), error };
        if let Some(dir) = file.parent() {
            disk_writes::make_directories(dir, 0o750).map_err(|error| failed("make", dir, error))?;
        }
        let mapping = Mapping { host_id: range.first, container_id: 0, length: range.length };
        let mappings = Mappings { uid_mappings: vec![mapping], gid_mappings: vec![mapping] };
        // Serializing numbers cannot fail.
        let bytes = serde_json::to_vec(&mappings).unwrap_or_default();
        atomic_file::write(file, &bytes, 0o600).map_err(|error| failed("write", file, error))?;
        state_files::report_usable(file);
        Ok(())
    }

    /// DIFFERS: the range of ids is determined for the first pod with `hostUsers: false`. Upstream does it
    /// at its start, and does not start if it fails.
    fn find_node_ids(&self, stop: &StopToken) -> Result<NodeIds, UserNamespaceError> {
        if let Some(known) = *self.node_ids.locked() {
            return Ok(known);
        }
        let default = NodeIds { first: self.ids_per_pod, end: 1 << 32 };
        // Names of users may have any bytes.
        let passwd = std::fs::read(&self.passwd).unwrap_or_default();
        let is_user = |line: &[u8]| line.split(|byte| *byte == b':').next() == Some(USER.as_bytes());
        if !passwd.split(|byte| *byte == b'\n').any(is_user) {
            return Ok(default);
        }
        let Some(users) = self.subordinate_ids(&[USER], stop)? else { return Ok(default) };
        let groups = self.subordinate_ids(&["-g", USER], stop)?;
        if groups.as_ref() != Some(&users) {
            let text = format!("mismatched subuids and subgids for user {USER:?}");
            return Err(UserNamespaceError::NodeIds(text));
        }
        self.check_node_ids(parse_node_ids(&users).map_err(UserNamespaceError::NodeIds)?)
    }

    fn subordinate_ids(&self, args: &[&str], stop: &StopToken) -> Result<Option<String>, UserNamespaceError> {
        match child::run(Command::new(&self.program).args(args), b"", LIMITS, stop) {
            Ok(output) if output.status.success() => {
                Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned()))
            }
            Ok(output) => Err(UserNamespaceError::Program(output.status.to_string())),
            Err(error) if error.is_missing() => {
                log::info!("the program {GETSUBIDS} is not installed: user namespaces use the default ids");
                Ok(None)
            }
            Err(error @ ChildError::Stopped { .. }) => Err(UserNamespaceError::Program(error.to_string())),
            Err(error) => Err(UserNamespaceError::Program(error.to_string())),
        }
    }

    fn check_node_ids(&self, node_ids: NodeIds) -> Result<NodeIds, UserNamespaceError> {
        let (each, length) = (self.ids_per_pod.max(1), node_ids.end - u64::from(node_ids.first));
        let fail = |text: String| Err(UserNamespaceError::NodeIds(text));
        if !node_ids.first.is_multiple_of(each) {
            return fail(format!("kubelet user assigned ID {} is not a multiple of {each}", node_ids.first));
        }
        if node_ids.first < each {
            // A pod must not use the ids of the node's users.
            return fail(format!(
                "kubelet user assigned ID {} must be greater or equal to {each}",
                node_ids.first
            ));
        }
        if !length.is_multiple_of(u64::from(each)) {
            return fail(format!("kubelet user assigned IDs length {length} is not a multiple of {each}"));
        }
        if length / u64::from(each) < u64::from(self.max_pods) {
            return fail(format!(
                "kubelet user assigned IDs are not enough to support {} pods",
                self.max_pods
            ));
        }
        Ok(node_ids)
    }
}

/// Parses the output of `getsubids`, one line such as `0: kubelet 65536 2147483648`.
fn parse_node_ids(text: &str) -> Result<NodeIds, String> {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let (Some(line), None) = (lines.next(), lines.next()) else {
        return Err(format!("error parsing subids: want one range for user {USER:?}: {text:?}"));
    };
    let mut words = line.split_whitespace().skip(2);
    let mut number = || words.next().and_then(|word| word.parse::<u32>().ok());
    match (number(), number()) {
        (Some(first), Some(length)) => Ok(NodeIds { first, end: u64::from(first) + u64::from(length) }),
        _ => Err(format!("error parsing subids: {line:?}")),
    }
}

/// The first range in `node_ids` that no pod has.
fn first_free_range(node_ids: NodeIds, each: u32, taken: &BTreeSet<u32>) -> Option<IdRange> {
    let mut first = node_ids.first;
    loop {
        let end = u64::from(first) + u64::from(each);
        // The highest id is not valid in the kernel, so no range contains it.
        if end > node_ids.end.min(u64::from(u32::MAX)) {
            return None;
        }
        if !taken.contains(&first) {
            return Some(IdRange { first, length: each });
        }
        first = u32::try_from(end).ok()?;
    }
}

fn read(file: &Path, ids_per_pod: u32) -> Result<Option<IdRange>, UserNamespaceError> {
    let read = read_file(file, ids_per_pod);
    match &read {
        Ok(_) => state_files::report_usable(file),
        Err(error) => state_files::report_damaged(file, &error.to_string()),
    }
    read
}

fn read_file(file: &Path, ids_per_pod: u32) -> Result<Option<IdRange>, UserNamespaceError> {
    let bytes = match untrusted::read_state(file, MAX_BYTES) {
        Ok(bytes) => bytes,
        // A file in the place of a pod's directory has no range either.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => {
            return Err(UserNamespaceError::File { attempt: "read", path: file.to_owned(), error });
        }
    };
    let wrong = |reason: String| UserNamespaceError::Content { path: file.to_owned(), reason };
    let mappings: Mappings = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    let ([uids], [gids]) = (mappings.uid_mappings.as_slice(), mappings.gid_mappings.as_slice()) else {
        return Err(wrong("one mapping of uids and one of gids are allowed".to_owned()));
    };
    if uids != gids {
        return Err(wrong("GID and UID mapping should be identical".to_owned()));
    }
    if uids.container_id != 0 {
        return Err(wrong("UID 0 must be mapped".to_owned()));
    }
    if uids.length != ids_per_pod {
        return Err(wrong(format!("wrong user namespace length {}", uids.length)));
    }
    if !uids.host_id.is_multiple_of(UNIT) || uids.host_id == 0 {
        return Err(wrong(format!("wrong user namespace offset specified {}", uids.host_id)));
    }
    Ok(Some(IdRange { first: uids.host_id, length: uids.length }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str, host_users: serde_json::Value) -> Pod {
        let pod = json!({"metadata": {"name": "p", "uid": uid}, "spec": {"containers": [], "hostUsers": host_users}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap())
    }

    fn namespaces(dir: &Path) -> UserNamespaces {
        UserNamespaces { passwd: dir.join("passwd"), ..UserNamespaces::new(dir, UNIT, 110) }
    }

    fn first(namespaces: &UserNamespaces, uid: &str) -> u32 {
        let range = namespaces.of_pod(&pod(uid, json!(false)), || Ok(true), &StopToken::never());
        range.unwrap().unwrap().first
    }

    #[test]
    fn ranges_survive_a_restart_and_are_freed_with_the_pods_directory() {
        let dir = tempfile::tempdir().unwrap();
        let before = namespaces(dir.path());
        assert_eq!(
            (first(&before, "a"), first(&before, "b"), first(&before, "a")),
            (65_536, 131_072, 65_536)
        );
        assert_eq!(
            std::fs::read_to_string(dir.path().join("pods/b/userns")).unwrap(),
            r#"{"uidMappings":[{"hostId":131072,"containerId":0,"length":65536}],"gidMappings":[{"hostId":131072,"containerId":0,"length":65536}]}"#
        );
        let restarted = namespaces(dir.path());
        // A pod keeps its range even if the runtime no longer supports user namespaces.
        let restored = restarted.of_pod(&pod("b", json!(false)), || Ok(false), &StopToken::never()).unwrap();
        assert_eq!(restored, Some(IdRange { first: 131_072, length: UNIT }));
        assert_eq!(first(&restarted, "c"), 196_608);
        std::fs::remove_dir_all(dir.path().join("pods/a")).unwrap();
        assert_eq!(first(&restarted, "d"), 65_536);
    }

    #[test]
    fn range_needs_a_pod_that_requests_it_and_a_runtime_that_supports_it() {
        let dir = tempfile::tempdir().unwrap();
        let namespaces = namespaces(dir.path());
        for host_users in [json!(null), json!(true)] {
            let range = namespaces.of_pod(&pod("a", host_users), || panic!("no call"), &StopToken::never());
            assert_eq!(range.unwrap(), None);
        }
        let error =
            namespaces.of_pod(&pod("a", json!(false)), || Ok(false), &StopToken::never()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "can't set `spec.hostUsers: false`, runtime does not support user namespaces"
        );
        assert!(!dir.path().join("pods").exists());
    }

    #[test]
    fn damaged_file_of_another_pod_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let namespaces = namespaces(dir.path());
        std::fs::create_dir_all(dir.path().join("pods/x")).unwrap();
        std::fs::write(dir.path().join("pods/stray"), "").unwrap();
        let good = r#"{"uidMappings":[{"hostId":65536,"containerId":0,"length":65536}],"gidMappings":[{"hostId":65536,"containerId":0,"length":65536}]}"#;
        for (from, to, reason) in [
            (good, "{", "EOF"),
            ("\"uidMappings\":[{\"hostId\":65536", "\"uidMappings\":[{\"hostId\":131072", "identical"),
            ("\"containerId\":0", "\"containerId\":1", "UID 0 must be mapped"),
            ("\"length\":65536", "\"length\":7", "wrong user namespace length 7"),
            ("\"hostId\":65536", "\"hostId\":65537", "wrong user namespace offset specified 65537"),
            (good, r#"{"uidMappings":[],"gidMappings":[]}"#, "one mapping"),
        ] {
            std::fs::write(dir.path().join("pods/x/userns"), good.replace(from, to)).unwrap();
            let error =
                namespaces.of_pod(&pod("a", json!(false)), || Ok(true), &StopToken::never()).unwrap_err();
            assert!(
                error.to_string().contains(reason) && error.to_string().contains("pods/x/userns"),
                "{error}"
            );
            let path = dir.path().join("pods/x/userns");
            assert!(state_files::problems().iter().any(|(damaged, _)| *damaged == path), "{error}");
        }
        std::fs::write(dir.path().join("pods/x/userns"), good).unwrap();
        assert_eq!(first(&namespaces, "a"), 131_072);
    }

    #[test]
    fn ids_of_the_kubelet_user_are_parsed_and_checked() {
        let dir = tempfile::tempdir().unwrap();
        let mut namespaces = namespaces(dir.path());
        std::fs::write(dir.path().join("passwd"), b"r\xe9my:x:0:0\nkubelet:x:999:999\n").unwrap();
        // The entry is found, so the program is asked.
        namespaces.program = "/bin/false".into();
        assert!(namespaces.find_node_ids(&StopToken::never()).is_err());
        namespaces.program = "/no/such/program".into();
        assert_eq!(
            namespaces.find_node_ids(&StopToken::never()).unwrap(),
            NodeIds { first: UNIT, end: 1 << 32 }
        );
        assert_eq!(
            parse_node_ids("0: kubelet 131072 65536\n").unwrap(),
            NodeIds { first: 131_072, end: 196_608 }
        );
        for bad in ["", "0: kubelet x 1", "0: kubelet 1", "0: kubelet 65536 1\n1: kubelet 7 1"] {
            assert!(parse_node_ids(bad).is_err(), "{bad:?}");
        }
        for (first, length, part) in [
            (65_537, 110 * 65_536, "is not a multiple of 65536"),
            (0, 110 * 65_536, "must be greater or equal to 65536"),
            (65_536, 110 * 65_536 + 1, "length 7208961 is not a multiple"),
            (65_536, 65_536, "not enough to support 110 pods"),
        ] {
            let error =
                namespaces.check_node_ids(NodeIds { first, end: u64::from(first) + length }).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn full_node_ids_have_no_free_range() {
        let node_ids = NodeIds { first: 65_536, end: 65_536 * 3 };
        assert_eq!(first_free_range(node_ids, UNIT, &BTreeSet::from([65_536])).unwrap().first, 131_072);
        assert_eq!(first_free_range(node_ids, UNIT, &BTreeSet::from([65_536, 131_072])), None);
        let top = NodeIds { first: 0xffff_0000, end: 1 << 32 };
        assert_eq!(first_free_range(top, UNIT, &BTreeSet::new()), None);
    }
}
