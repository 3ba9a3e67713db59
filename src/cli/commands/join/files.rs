//! The files of a node of a cluster, in the places and with the modes of kubeadm.
//!
//! A record lists the files that `coracle join` wrote, with the digest of each. It is written before
//! them, so an interrupted command leaves no file that the record does not have.
//!
//! Go: cmd/kubeadm/app/constants, cmd/kubeadm/app/phases/kubelet.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::util::sha256::sha256_hex;
use crate::util::{atomic_file, disk_writes, untrusted};

use super::refusal::{Reason, Refusal};

/// The largest file that is read.
pub(super) const MAX_BYTES: u64 = 1024 * 1024;

/// The first line of the drop-in, by which it is recognized after a change.
pub(super) const HEADER: &str = "# Written by coracle join, and removed by coracle leave.";

/// Where the files are.
#[derive(Debug, Clone)]
pub(super) struct Paths {
    pub kubernetes_dir: PathBuf,
    pub root_dir: PathBuf,
    /// The directory of units of the operator.
    pub units_dir: PathBuf,
}

impl Paths {
    pub(super) fn bootstrap(&self) -> PathBuf {
        self.kubernetes_dir.join("bootstrap-kubelet.conf")
    }

    /// Made by the agent, with the certificate that it gets.
    pub(super) fn kubeconfig(&self) -> PathBuf {
        self.kubernetes_dir.join("kubelet.conf")
    }

    pub(super) fn authority(&self) -> PathBuf {
        self.kubernetes_dir.join("pki/ca.crt")
    }

    pub(super) fn config(&self) -> PathBuf {
        self.root_dir.join("config.yaml")
    }

    pub(super) fn instance(&self) -> PathBuf {
        self.root_dir.join("instance-config.yaml")
    }

    pub(super) fn flags(&self) -> PathBuf {
        self.root_dir.join("kubeadm-flags.env")
    }

    pub(super) fn record(&self) -> PathBuf {
        self.root_dir.join("coracle-join.json")
    }

    pub(super) fn drop_in(&self) -> PathBuf {
        self.units_dir.join("coracle.service.d/10-join.conf")
    }

    /// The certificates of the agent.
    pub(super) fn certificates(&self) -> PathBuf {
        self.root_dir.join("pki")
    }

    /// The files that `join` writes itself.
    fn own(&self) -> [PathBuf; 6] {
        [self.bootstrap(), self.authority(), self.config(), self.instance(), self.flags(), self.drop_in()]
    }
}

/// What `coracle join` wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// The URL of the API server.
    pub server: String,
    /// The address that was given, if there was one.
    #[serde(default)]
    pub address: String,
    pub node: String,
    /// Whether the unit was enabled by `join`.
    #[serde(default)]
    pub enabled: bool,
    /// SHA-256 of the content in hexadecimal, by path.
    #[serde(default)]
    pub files: BTreeMap<PathBuf, String>,
    /// The same of the content that an interrupted `join` has not replaced yet.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub former: BTreeMap<PathBuf, String>,
    /// The same of files with the names of those that the agent makes, which were there before the first
    /// `join`. They stay unless the agent has replaced them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub earlier: BTreeMap<PathBuf, String>,
}

impl Record {
    /// Whether the unit of the agent belongs to this node: `join` wrote its drop-in. Another node of the
    /// machine, with other directories, may have it.
    pub(super) fn has_drop_in(&self, paths: &Paths) -> bool {
        self.files.contains_key(&paths.drop_in())
    }

    /// Whether a file is as it was before the first `join`.
    fn is_earlier(&self, path: &Path) -> Result<bool, Refusal> {
        let Some(digest) = self.earlier.get(path) else { return Ok(false) };
        Ok(read(path)?.is_some_and(|content| sha256_hex(&content) == *digest))
    }

    /// Whether `join` wrote this content of a file. `config`: the value of `--config` in the drop-in.
    fn has_written(&self, path: &Path, content: &[u8], config: Option<&str>) -> bool {
        let digest = sha256_hex(content);
        is_drop_in(content) && config_flag(content).as_deref() == config
            || [&self.files, &self.former].iter().any(|digests| digests.get(path) == Some(&digest))
    }
}

/// Whether a file is a drop-in of `join`, also of one whose record is lost.
fn is_drop_in(content: &[u8]) -> bool {
    content.starts_with(HEADER.as_bytes())
}

/// The value of `--config`: the nodes of a machine differ in it.
fn config_flag(content: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(content);
    text.split_whitespace().find_map(|word| word.strip_prefix("--config=")).map(str::to_owned)
}

/// Reads the record; `None`: there is none.
pub(super) fn read_record(paths: &Paths) -> Result<Option<Record>, Refusal> {
    let path = paths.record();
    let Some(bytes) = read(&path)? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| {
        let text = format!("{}: {error}", path.display());
        Refusal::new(Reason::File, text, "remove this file, and the files of the node that it lists")
    })
}

/// Reads a file; `None`: there is none.
pub(super) fn read(path: &Path) -> Result<Option<Vec<u8>>, Refusal> {
    match untrusted::read_own(path, MAX_BYTES) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Refusal::file("read", path, &error)),
    }
}

/// A file with its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlannedFile {
    pub path: PathBuf,
    pub content: String,
    pub mode: u32,
    /// Whether the content is not shown.
    pub is_secret: bool,
}

/// What happens with a planned file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// It does not exist.
    Create,
    /// It was written by an earlier `join`.
    Replace,
    /// It has this content.
    Keep,
    /// It has this content, but another owner, or more rights for others.
    Repair,
    /// It is not from `join`, and has another content.
    Refuse,
}

/// Decides about a file. `present`: its content. `is_own`: whether `join` wrote that. `is_safe`: whether it
/// has the owner and the mode.
fn decide(file: &PlannedFile, present: Option<&[u8]>, is_own: bool, is_safe: bool) -> Action {
    match present {
        None => Action::Create,
        Some(present) if present == file.content.as_bytes() && is_safe => Action::Keep,
        Some(present) if present == file.content.as_bytes() => Action::Repair,
        Some(_) if is_own => Action::Replace,
        Some(_) => Action::Refuse,
    }
}

/// The files, and what happens with each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FilePlan {
    pub files: Vec<(PlannedFile, Action)>,
    pub record: Record,
    had_record: bool,
}

/// Compares the files with what is there.
///
/// # Errors
/// When a file of another origin is in the way, or its place is not safe.
pub(super) fn plan(
    files: Vec<PlannedFile>,
    before: Option<&Record>,
    mut record: Record,
) -> Result<FilePlan, Refusal> {
    let mut planned = Vec::new();
    let had_record = before.is_some();
    let before = before.cloned().unwrap_or_default();
    record.files.clone_from(&before.files);
    record.former.clone_from(&before.former);
    if had_record {
        record.earlier.clone_from(&before.earlier);
    }
    for file in files {
        check_place(&file.path)?;
        let present = read(&file.path)?;
        let config = config_flag(file.content.as_bytes());
        let is_own = present
            .as_deref()
            .is_some_and(|present| before.has_written(&file.path, present, config.as_deref()));
        let is_safe = fs::metadata(&file.path).is_ok_and(|found| is_safe(&found, file.mode));
        let action = decide(&file, present.as_deref(), is_own, is_safe);
        match action {
            Action::Refuse if present.as_deref().is_some_and(is_drop_in) => {
                let text = format!("{} is that of another node of this machine", file.path.display());
                let advice = "leave with that node first (coracle leave --root-dir), or join with --no-start";
                return Err(Refusal::new(Reason::FileInTheWay, text, advice));
            }
            Action::Refuse => {
                let text = format!("{} has a content that coracle join did not write", file.path.display());
                let advice = "if it is not needed, move it away, and run the same command again";
                return Err(Refusal::new(Reason::FileInTheWay, text, advice));
            }
            // A file that was there before stays when the node leaves.
            Action::Keep | Action::Repair if !is_own => {}
            Action::Create | Action::Replace | Action::Keep | Action::Repair => {
                record.files.insert(file.path.clone(), sha256_hex(file.content.as_bytes()));
                match present.filter(|_| action == Action::Replace) {
                    Some(present) => record.former.insert(file.path.clone(), sha256_hex(&present)),
                    None => record.former.remove(&file.path),
                };
            }
        }
        planned.push((file, action));
    }
    Ok(FilePlan { files: planned, record, had_record })
}

/// A link in a directory in which other users write could lead the file to another place, or its secret
/// to another reader.
fn check_place(path: &Path) -> Result<(), Refusal> {
    let is_link = fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_symlink());
    let Some(directory) = path.parent() else { return Ok(()) };
    let Ok(found) = fs::metadata(directory) else { return Ok(()) };
    let own = rustix::process::geteuid().as_raw();
    if is_link && !is_private(found.uid(), found.mode(), own) {
        let text = format!("{} is a link, and other users can write in its directory", path.display());
        let advice = "remove the link, and give the directory to root with mode 0755 or less";
        return Err(Refusal::new(Reason::UnsafeDirectory, text, advice));
    }
    Ok(())
}

/// Whether a file belongs to root or this user, and permits nothing that `mode` does not.
pub(super) fn is_safe(found: &fs::Metadata, mode: u32) -> bool {
    let own = rustix::process::geteuid().as_raw();
    (found.uid() == 0 || found.uid() == own) && found.mode() & 0o7777 & !mode == 0
}

/// Whether only root and this user write in a directory.
fn is_private(owner: u32, mode: u32, own: u32) -> bool {
    (owner == 0 || owner == own) && mode & 0o022 == 0
}

/// Writes the files. If a file cannot be written, those that this call created are removed.
pub(super) fn write(plan: &FilePlan, paths: &Paths) -> Result<(), Refusal> {
    let mut created = Vec::new();
    let result = write_all(plan, paths, &mut created);
    if result.is_err() {
        undo(&created);
    }
    result
}

/// Removes what [`write()`] has created; a file that was there before stays.
pub(super) fn undo(created: &[PathBuf]) {
    for path in created.iter().rev() {
        // Best effort: the error that led here is reported.
        let _ = fs::remove_file(path);
    }
}

/// The files that [`write()`] creates, the record first.
pub(super) fn created(plan: &FilePlan, paths: &Paths) -> Vec<PathBuf> {
    let record = (!plan.had_record).then(|| paths.record());
    let new = plan.files.iter().filter(|(_, action)| *action == Action::Create);
    record.into_iter().chain(new.map(|(file, _)| file.path.clone())).collect()
}

fn write_all(plan: &FilePlan, paths: &Paths, created: &mut Vec<PathBuf>) -> Result<(), Refusal> {
    write_record(&plan.record, paths)?;
    if !plan.had_record {
        created.push(paths.record());
    }
    for (file, action) in &plan.files {
        if matches!(action, Action::Create | Action::Replace | Action::Repair) {
            write_file(&file.path, file.content.as_bytes(), file.mode)?;
            if *action == Action::Create {
                created.push(file.path.clone());
            }
        }
    }
    Ok(())
}

/// Writes the record, for root only.
pub(super) fn write_record(record: &Record, paths: &Paths) -> Result<(), Refusal> {
    let path = paths.record();
    make_root(paths)?;
    let text = serde_json::to_string_pretty(record)
        .map_err(|error| Refusal::file("write", &path, &std::io::Error::other(error)))?;
    write_file(&path, format!("{text}\n").as_bytes(), 0o600)
}

/// Notes in the record, before a start that enables the unit, that `leave` has to disable it. `is_enabled`:
/// whether the unit is started with the machine already.
pub(super) fn note_enabling(
    record: &Record,
    paths: &Paths,
    is_enabled: impl Fn() -> bool,
) -> Result<(), Refusal> {
    if record.enabled || is_enabled() {
        return Ok(());
    }
    write_record(&Record { enabled: true, ..record.clone() }, paths)
}

/// Makes the root directory, as kubeadm makes it; the directories of other files are readable.
pub(super) fn make_root(paths: &Paths) -> Result<(), Refusal> {
    disk_writes::make_directories(&paths.root_dir, 0o700)
        .map_err(|error| Refusal::file("make", &paths.root_dir, &error))
}

fn write_file(path: &Path, content: &[u8], mode: u32) -> Result<(), Refusal> {
    let written = || -> std::io::Result<()> {
        let directory = path.parent().ok_or(ErrorKind::InvalidInput)?;
        disk_writes::make_directories(directory, 0o755)?;
        atomic_file::write(path, content, mode)?;
        atomic_file::sync_directory(directory)
    };
    written().map_err(|error| Refusal::file("write", path, &error))
}

/// What `leave` does with a file of the record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Removal {
    Remove(PathBuf),
    /// It was changed after `join`.
    Changed(PathBuf),
    /// It was there before `join`.
    Earlier(PathBuf),
}

/// The files that `leave` removes: those of the record that are as `join` wrote them, and those that the
/// agent made for the cluster. The record comes last.
pub(super) fn removals(record: &Record, paths: &Paths) -> Result<Vec<Removal>, Refusal> {
    let mut removals = Vec::new();
    for path in paths.own() {
        let (true, Some(present)) = (record.files.contains_key(&path), read(&path)?) else { continue };
        let config = config_flag(&present).filter(|config| Path::new(config) == paths.config());
        let is_own = record.has_written(&path, &present, config.as_deref());
        removals.push(if is_own { Removal::Remove(path) } else { Removal::Changed(path) });
    }
    removals.extend(temporary(&paths.bootstrap()).into_iter().map(Removal::Remove));
    for path in of_agent(paths) {
        let is_earlier = record.is_earlier(&path)?;
        removals.push(if is_earlier { Removal::Earlier(path) } else { Removal::Remove(path) });
    }
    removals.push(Removal::Remove(paths.record()));
    Ok(removals)
}

/// The files with the names of those that the agent makes for a cluster.
fn of_agent(paths: &Paths) -> Vec<PathBuf> {
    let mut certificates = Vec::new();
    if let Ok(entries) = fs::read_dir(paths.certificates()) {
        for entry in entries.flatten().filter(|entry| is_certificate(&entry.file_name().to_string_lossy())) {
            certificates.push(entry.path());
        }
    }
    certificates.sort();
    let kubeconfig = Some(paths.kubeconfig()).filter(|path| fs::symlink_metadata(path).is_ok());
    kubeconfig.into_iter().chain(certificates).collect()
}

/// The digests of such files before the first `join`, for [`Record::earlier`].
pub(super) fn earlier(paths: &Paths) -> Result<BTreeMap<PathBuf, String>, Refusal> {
    let mut digests = BTreeMap::new();
    for path in of_agent(paths) {
        if let Some(content) = read(&path)? {
            digests.insert(path, sha256_hex(&content));
        }
    }
    Ok(digests)
}

/// The names of the agent's certificates and keys (Go: client-go util/certificate, kubelet/certificate).
fn is_certificate(name: &str) -> bool {
    let name = target_of_temporary(name).unwrap_or(name);
    // The last two are keys whose request has no response yet.
    matches!(name, "kubelet.crt" | "kubelet.key" | "kubelet-client.key.tmp" | "kubelet-server.key.tmp")
        || (["kubelet-client-", "kubelet-server-"].iter().any(|start| name.starts_with(start))
            && name.ends_with(".pem"))
}

/// Removes the credentials for the first certificate.
pub(super) fn remove_bootstrap(paths: &Paths) -> Result<(), Refusal> {
    let path = paths.bootstrap();
    temporary(&path).iter().try_for_each(|temporary| remove(temporary))?;
    remove(&path)
}

/// What a process that was killed has left beside a file that it wrote: the name of the file, eight digits
/// and `.tmp` ([`atomic_file::write`]).
fn temporary(path: &Path) -> Vec<PathBuf> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name().and_then(OsStr::to_str)) else {
        return Vec::new();
    };
    let is_temporary = |found: &str| target_of_temporary(found) == Some(name);
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let entries = entries.filter(|entry| {
        entry.file_name().to_str().is_some_and(is_temporary)
            && entry.file_type().is_ok_and(|kind| kind.is_file())
    });
    entries.map(|entry| entry.path()).collect()
}

/// The name of the file for which a process has written a temporary one.
fn target_of_temporary(name: &str) -> Option<&str> {
    let (target, digits) = name.strip_suffix(".tmp")?.rsplit_once('.')?;
    (digits.len() == 8 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())).then_some(target)
}

/// Removes a file that may be missing already.
pub(super) fn remove(path: &Path) -> Result<(), Refusal> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Refusal::file("remove", path, &error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn paths(dir: &Path) -> Paths {
        Paths {
            kubernetes_dir: dir.join("kubernetes"),
            root_dir: dir.join("kubelet"),
            units_dir: dir.join("units"),
        }
    }

    fn file(path: PathBuf, content: &str) -> PlannedFile {
        PlannedFile { path, content: content.to_owned(), mode: 0o644, is_secret: false }
    }

    fn both(paths: &Paths, config: &str) -> Vec<PlannedFile> {
        vec![file(paths.authority(), "pem\n"), file(paths.config(), config)]
    }

    #[test]
    fn present_file_is_replaced_only_if_it_is_of_join() {
        let planned = file("/f".into(), "new");
        for (present, is_own, is_safe, expected) in [
            (None, false, false, Action::Create),
            (Some("new"), false, true, Action::Keep),
            (Some("new"), false, false, Action::Repair),
            (Some("old"), true, true, Action::Replace),
            (Some("old"), false, true, Action::Refuse),
        ] {
            assert_eq!(
                decide(&planned, present.map(str::as_bytes), is_own, is_safe),
                expected,
                "{present:?}"
            );
        }
    }

    #[test]
    fn equal_file_that_others_may_read_gets_its_mode_and_stays_foreign() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        write_file(&paths.bootstrap(), b"secret", 0o644).unwrap();
        let secret = PlannedFile { mode: 0o600, is_secret: true, ..file(paths.bootstrap(), "secret") };
        let plan = plan(vec![secret], None, Record::default()).unwrap();
        assert_eq!(plan.files[0].1, Action::Repair);
        write(&plan, &paths).unwrap();
        assert_eq!(fs::metadata(paths.bootstrap()).unwrap().permissions().mode() & 0o7777, 0o600);
        assert!(plan.record.files.is_empty() && !created(&plan, &paths).contains(&paths.bootstrap()));
    }

    #[test]
    fn drop_in_of_join_counts_as_its_own_without_a_record_and_after_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        let present = format!("{HEADER}\n[Service]\n");
        write_file(&paths.drop_in(), present.as_bytes(), 0o600).unwrap();
        for (content, action) in [(present.clone(), Action::Keep), (format!("{present}#\n"), Action::Replace)]
        {
            let plan = plan(vec![file(paths.drop_in(), &content)], None, Record::default()).unwrap();
            assert_eq!(plan.files[0].1, action);
            assert_eq!(removals(&plan.record, &paths).unwrap()[0], Removal::Remove(paths.drop_in()));
        }
    }

    #[test]
    fn drop_in_of_another_node_is_neither_overwritten_nor_removed() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        let text =
            |config: &Path| format!("{HEADER}\n[Service]\nExecStart=/c --config={}\n", config.display());
        let (own, other) = (text(&paths.config()), text(Path::new("/data/config.yaml")));
        let planned = || vec![file(paths.drop_in(), &format!("{own}#\n"))];
        write_file(&paths.drop_in(), other.as_bytes(), 0o600).unwrap();
        let refused = plan(planned(), None, Record::default()).unwrap_err();
        assert!(refused.text.contains("another node"), "{}", refused.text);
        write_file(&paths.drop_in(), own.as_bytes(), 0o600).unwrap();
        let record = plan(planned(), None, Record::default()).unwrap().record;
        assert_eq!(removals(&record, &paths).unwrap()[0], Removal::Remove(paths.drop_in()));
        write_file(&paths.drop_in(), other.as_bytes(), 0o600).unwrap();
        assert_eq!(removals(&record, &paths).unwrap()[0], Removal::Changed(paths.drop_in()));
    }

    #[test]
    fn keys_in_temporary_files_of_the_agent_are_removed() {
        for (name, expected) in [
            ("kubelet-client-2026-11-29-00-00-00.pem.0123abcd.tmp", true),
            ("kubelet-client.key.tmp.0123abcd.tmp", true),
            ("kubelet.key.0123abcd.tmp", true),
            ("other.key.0123abcd.tmp", false),
            ("kubelet.key.0123abcg.tmp", false),
            ("kubelet.key.tmp", false),
        ] {
            assert_eq!(is_certificate(name), expected, "{name}");
        }
    }

    #[test]
    fn unit_with_the_drop_in_of_another_node_is_not_that_of_the_record() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        write_file(&paths.drop_in(), HEADER.as_bytes(), 0o600).unwrap();
        let without = plan(both(&paths, "a\n"), None, Record::default()).unwrap();
        assert!(!without.record.has_drop_in(&paths));
        let with = plan(vec![file(paths.drop_in(), "x")], None, Record::default()).unwrap();
        assert!(with.record.has_drop_in(&paths));
    }

    #[test]
    fn file_that_was_changed_after_join_is_refused_by_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        let first = plan(both(&paths, "a\n"), None, Record::default()).unwrap();
        write(&first, &paths).unwrap();
        fs::write(paths.config(), "of the operator\n").unwrap();
        let refused = plan(both(&paths, "b\n"), Some(&first.record), Record::default()).unwrap_err();
        assert_eq!(refused.code, Reason::FileInTheWay.code());
    }

    #[test]
    fn leave_after_an_interrupted_replacement_removes_the_former_files() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        let mut record = None;
        // Each command after the first is killed when it has written the record.
        for content in ["a\n", "b\n", "c\n"] {
            let next = plan(both(&paths, content), record.as_ref(), Record::default()).unwrap();
            match record {
                None => write(&next, &paths).unwrap(),
                Some(_) => write_record(&next.record, &paths).unwrap(),
            }
            record = read_record(&paths).unwrap();
        }
        assert_eq!(fs::read_to_string(paths.config()).unwrap(), "a\n");
        let removals = removals(&record.unwrap(), &paths).unwrap();
        assert!(removals.contains(&Removal::Remove(paths.config())), "{removals:?}");
    }

    #[test]
    fn files_are_written_once_replaced_later_and_removed_by_leave() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        let record = Record { node: "n".into(), ..Record::default() };
        let first = plan(both(&paths, "a\n"), None, record.clone()).unwrap();
        write(&first, &paths).unwrap();
        assert_eq!(fs::metadata(paths.config()).unwrap().permissions().mode() & 0o777, 0o644);
        assert_eq!(fs::metadata(paths.record()).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(&paths.root_dir).unwrap().permissions().mode() & 0o777, 0o700);
        let before = read_record(&paths).unwrap().unwrap();
        assert_eq!(before, first.record);

        let second = plan(both(&paths, "b\n"), Some(&before), record).unwrap();
        let actions: Vec<Action> = second.files.iter().map(|(_, action)| *action).collect();
        assert_eq!(actions, [Action::Keep, Action::Replace]);
        write(&second, &paths).unwrap();

        fs::create_dir_all(paths.certificates()).unwrap();
        for name in ["kubelet-client-current.pem", "kubelet-client.key.tmp", "kubelet.key", "other.pem"] {
            fs::write(paths.certificates().join(name), "").unwrap();
        }
        fs::write(paths.authority(), "changed\n").unwrap();
        let removals = removals(&read_record(&paths).unwrap().unwrap(), &paths).unwrap();
        let pki = paths.certificates();
        assert_eq!(
            removals,
            [
                Removal::Changed(paths.authority()),
                Removal::Remove(paths.config()),
                Removal::Remove(pki.join("kubelet-client-current.pem")),
                Removal::Remove(pki.join("kubelet-client.key.tmp")),
                Removal::Remove(pki.join("kubelet.key")),
                Removal::Remove(paths.record()),
            ]
        );
    }

    #[test]
    fn certificates_that_were_there_before_the_join_stay_unless_the_agent_replaced_them() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        let pki = paths.certificates();
        fs::create_dir_all(&pki).unwrap();
        for name in ["kubelet.crt", "kubelet.key"] {
            fs::write(pki.join(name), "earlier").unwrap();
        }
        let record = Record { earlier: earlier(&paths).unwrap(), ..Record::default() };
        let first = plan(both(&paths, "a\n"), None, record).unwrap();
        write(&first, &paths).unwrap();
        fs::write(pki.join("kubelet.key"), "of the agent").unwrap();
        fs::write(pki.join("kubelet-client-1.pem"), "of the agent").unwrap();
        // The same command again.
        let record = Record { earlier: earlier(&paths).unwrap(), ..Record::default() };
        let second = plan(both(&paths, "a\n"), read_record(&paths).unwrap().as_ref(), record).unwrap();
        write(&second, &paths).unwrap();
        let removals = removals(&read_record(&paths).unwrap().unwrap(), &paths).unwrap();
        assert_eq!(
            removals[2..],
            [
                Removal::Remove(pki.join("kubelet-client-1.pem")),
                Removal::Earlier(pki.join("kubelet.crt")),
                Removal::Remove(pki.join("kubelet.key")),
                Removal::Remove(paths.record()),
            ]
        );
    }

    #[test]
    fn unit_that_a_later_join_enables_is_noted_for_leave() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        let record = plan(both(&paths, "a\n"), None, Record::default()).unwrap().record;
        write_record(&record, &paths).unwrap();
        note_enabling(&record, &paths, || true).unwrap();
        assert_eq!(read_record(&paths).unwrap().as_ref(), Some(&record));
        note_enabling(&record, &paths, || false).unwrap();
        let noted = read_record(&paths).unwrap().unwrap();
        assert_eq!(noted, Record { enabled: true, ..record });
        // What is noted stays.
        note_enabling(&noted, &paths, || true).unwrap();
        assert_eq!(read_record(&paths).unwrap(), Some(noted));
    }

    #[test]
    fn foreign_file_is_refused_and_an_equal_one_is_not_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        fs::create_dir_all(paths.authority().parent().unwrap()).unwrap();
        fs::write(paths.authority(), "pem\n").unwrap();
        let plan_now = || plan(both(&paths, "a\n"), None, Record::default());
        assert!(!plan_now().unwrap().record.files.contains_key(&paths.authority()));
        fs::write(paths.authority(), "other\n").unwrap();
        assert_eq!(plan_now().unwrap_err().code, Reason::FileInTheWay.code());
    }

    #[test]
    fn interrupted_write_continues_at_each_step() {
        let all = |paths: &Paths, suffix: &str| {
            let own = paths.own().into_iter();
            own.map(|path| file(path.clone(), &format!("{}{suffix}", path.display()))).collect::<Vec<_>>()
        };
        for written in 0..=6 {
            let dir = tempfile::tempdir().unwrap();
            let paths = paths(dir.path());
            let first = plan(all(&paths, "1"), None, Record::default()).unwrap();
            // The process is killed after so many files.
            write_record(&first.record, &paths).unwrap();
            for (file, _) in first.files.iter().take(written) {
                write_file(&file.path, file.content.as_bytes(), file.mode).unwrap();
            }
            // The same command, for which the cluster has a new configuration.
            let before = read_record(&paths).unwrap();
            let second = plan(all(&paths, "2"), before.as_ref(), Record::default()).unwrap();
            write(&second, &paths).unwrap();
            for (file, _) in &second.files {
                assert_eq!(fs::read_to_string(&file.path).unwrap(), file.content, "after {written} files");
            }
            let removals = removals(&read_record(&paths).unwrap().unwrap(), &paths).unwrap();
            let removed = removals.iter().filter(|removal| matches!(removal, Removal::Remove(_))).count();
            assert_eq!(removed, 7, "after {written} files: {removals:?}");
        }
    }

    #[test]
    fn failed_write_leaves_no_new_file() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        let plan = plan(both(&paths, "a\n"), None, Record::default()).unwrap();
        // A directory in the place of the last file.
        fs::create_dir_all(paths.config().join("x")).unwrap();
        assert_eq!(write(&plan, &paths).unwrap_err().code, Reason::File.code());
        assert!(!paths.record().exists() && !paths.authority().exists());
        assert_eq!(created(&plan, &paths), [paths.record(), paths.authority(), paths.config()]);
    }

    #[test]
    fn credentials_in_a_temporary_file_do_not_stay() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        fs::create_dir_all(paths.kubernetes_dir.join("bootstrap-kubelet.conf.00000000.tmp")).unwrap();
        let temporary = paths.kubernetes_dir.join("bootstrap-kubelet.conf.0123abcd.tmp");
        let others = ["bootstrap-kubelet.conf.tmp", "bootstrap-kubelet.conf.0123abcg.tmp", "x.0123abcd.tmp"];
        let others = others.map(|name| paths.kubernetes_dir.join(name));
        for path in others.iter().chain([&temporary]) {
            fs::write(path, "secret").unwrap();
        }
        let removals = removals(&Record::default(), &paths).unwrap();
        assert_eq!(removals, [Removal::Remove(temporary.clone()), Removal::Remove(paths.record())]);
        remove_bootstrap(&paths).unwrap();
        assert!(!temporary.exists() && others.iter().all(|path| path.exists()));
    }

    #[test]
    fn links_are_refused_where_other_users_write() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        fs::create_dir_all(&paths.root_dir).unwrap();
        symlink("/nonexistent", paths.config()).unwrap();
        let mode = |mode| fs::set_permissions(&paths.root_dir, fs::Permissions::from_mode(mode)).unwrap();
        mode(0o755);
        assert_eq!(check_place(&paths.config()), Ok(()));
        mode(0o777);
        assert_eq!(check_place(&paths.config()).unwrap_err().code, Reason::UnsafeDirectory.code());
        assert!(is_private(0, 0o755, 5) && is_private(5, 0o700, 5));
        assert!(!is_private(6, 0o755, 5) && !is_private(0, 0o775, 5));
    }
}
