//! Stores the last valid version of every manifest on disk, so that an invalid one keeps its pods
//! also over a restart. Go has no counterpart: there it has no pods after a restart.
//!
//! One file per manifest, written after its pods were posted: no start of a pod waits for a disk.
//! Errors of the store cause a warning and, at worst, the loss of one last valid version.

use std::collections::BTreeSet;
use std::fs::{OpenOptions, Permissions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use super::decode::pod_from_value;
use super::fnv::Fnv128;
use super::settings::MAX_MANIFEST_BYTES;
use super::{merge, references, validate};
use crate::model::api;
use crate::model::pod::{CONFIG_HASH, Pod, SourceName};
use crate::model::typed::clip;
use crate::util::atomic_file;
use crate::util::disk_writes;
use crate::util::state_files;

/// The kind of every record.
const FORMAT: &str = "coracle/last-good-manifest";
/// Incremented when an older agent would misread a record.
const VERSION: u32 = 1;
/// A record contains all defaults, so it may be larger than its manifest.
const MAX_RECORD_BYTES: usize = 4 * MAX_MANIFEST_BYTES;
/// Manifests may contain secrets.
const DIRECTORY_MODE: u32 = 0o700;
const RECORD_MODE: u32 = 0o600;

#[derive(Debug)]
pub(super) struct Store {
    /// `None`: the store is off.
    directory: Option<PathBuf>,
    source: SourceName,
    node_name: String,
    /// Whether the directory was prepared, which happens before the first write.
    ready: bool,
    /// The last write error, logged once.
    last_error: Option<String>,
}

#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
}

/// A record for reading. Its pods are the objects that ran, with defaults and UIDs.
#[derive(Deserialize)]
struct Record {
    place: String,
    node: String,
    pods: Vec<serde_json::Value>,
}

/// The same for writing.
#[derive(Serialize)]
struct RecordRef<'a> {
    format: &'static str,
    version: u32,
    place: &'a str,
    node: &'a str,
    /// A pod without its marks, which each start adds again.
    pods: Vec<api::Pod>,
}

impl Store {
    /// The records of `source` below `directory`, which may be missing.
    pub(super) fn new(directory: Option<&Path>, source: SourceName, node_name: &str) -> Self {
        Store {
            directory: directory.map(Path::to_owned),
            source,
            node_name: node_name.to_owned(),
            ready: false,
            last_error: None,
        }
    }

    /// The pods of the last valid version of the manifest `key`; none if there is no record.
    pub(super) fn load(&self, key: &[u8], place: &str) -> Vec<Pod> {
        let Some(directory) = &self.directory else { return Vec::new() };
        let path = directory.join(self.file_name(key));
        self.load_record(&path).filter(|(found, _)| found == place).map_or_else(Vec::new, |(_, pods)| pods)
    }

    /// File or URL, and pods, of every record.
    pub(super) fn load_all(&self) -> Vec<(String, Vec<Pod>)> {
        let records = self.own_files().into_iter().filter(|name| name.ends_with(".json"));
        let Some(directory) = &self.directory else { return Vec::new() };
        records.filter_map(|name| self.load_record(&directory.join(name))).collect()
    }

    /// Stores `pods` as the last valid version of the manifest `key`; an empty list removes the
    /// record. Returns whether the record is current: after a failure the caller repeats the call.
    pub(super) fn save(&mut self, key: &[u8], place: &str, pods: &[Pod]) -> bool {
        let Some(directory) = self.directory.clone() else { return true };
        let path = directory.join(self.file_name(key));
        let result = if pods.is_empty() { remove(&path) } else { self.write(&directory, &path, place, pods) };
        match result {
            Ok(()) => {
                if self.last_error.take().is_some() {
                    log::info!("{}: last good versions can be kept again", directory.display());
                }
                true
            }
            Err(message) => {
                let message = format!("the last good version of {place} is not kept: {message}");
                if self.last_error.as_ref() != Some(&message) {
                    log::warn!("{message}");
                    self.last_error = Some(message);
                }
                false
            }
        }
    }

    /// Removes every record of this source except those of `keys`: their manifests were removed.
    pub(super) fn remove_except<'a>(&self, keys: impl Iterator<Item = &'a [u8]>) {
        let Some(directory) = &self.directory else { return };
        let keep: BTreeSet<String> = keys.map(|key| self.file_name(key)).collect();
        for name in self.own_files() {
            if !keep.contains(&name)
                && let Err(message) = remove(&directory.join(name))
            {
                log::warn!("{message}");
            }
        }
    }

    fn file_name(&self, key: &[u8]) -> String {
        let mut hash = Fnv128::default();
        hash.add(key);
        format!("{}-{:032x}.json", self.source.as_str(), hash.value())
    }

    /// Names of this source's records, and of incomplete files after a crash.
    fn own_files(&self) -> Vec<String> {
        let Some(directory) = &self.directory else { return Vec::new() };
        let entries = match std::fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Vec::new(),
            Err(error) => {
                log::warn!("cannot list {}: {error}", directory.display());
                return Vec::new();
            }
        };
        let mut own = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            match name.to_str().and_then(source_of_name) {
                Some(source) if source == self.source.as_str() => {
                    own.push(name.to_string_lossy().into_owned());
                }
                // All sources list the directory; only one logs the error.
                None if self.source == SourceName::File => log::warn!(
                    "{} does not belong there and is ignored",
                    clip(&entry.path().display().to_string())
                ),
                _ => {}
            }
        }
        own
    }

    fn write(&mut self, directory: &Path, path: &Path, place: &str, pods: &[Pod]) -> Result<(), String> {
        let record = RecordRef {
            format: FORMAT,
            version: VERSION,
            place,
            node: &self.node_name,
            pods: pods.iter().map(merge::unmarked).collect(),
        };
        let bytes = serde_json::to_vec(&record).map_err(|error| format!("cannot encode it: {error}"))?;
        if bytes.len() > MAX_RECORD_BYTES {
            return Err(format!("it is larger than the limit of {MAX_RECORD_BYTES} bytes"));
        }
        if !self.ready {
            prepare_directory(directory)
                .map_err(|error| format!("cannot make directory {}: {error}", directory.display()))?;
            self.ready = true;
        }
        // The usual case at a start: the record has this content already.
        if read(path).is_ok_and(|old| old.as_ref() == Some(&bytes)) {
            return Ok(());
        }
        // A directory in its place would stay.
        let _ = std::fs::remove_dir(path);
        atomic_file::write(path, &bytes, RECORD_MODE).map_err(|error| {
            // The directory may have been removed.
            self.ready = false;
            format!("cannot write {}: {error}", path.display())
        })?;
        state_files::report_usable(path);
        Ok(())
    }

    /// File or URL, and pods, of one record. `None` without a record, and for an invalid one after a warning.
    fn load_record(&self, path: &Path) -> Option<(String, Vec<Pod>)> {
        let bytes = match read(path) {
            Ok(bytes) => bytes?,
            Err(message) => {
                state_files::report_damaged(path, &message);
                return None;
            }
        };
        match self.decode(&bytes) {
            Ok((record, refused)) => {
                match refused.first() {
                    None => state_files::report_usable(path),
                    Some(first) => {
                        let text =
                            format!("{} of its pods are ignored; the first one: {first}", refused.len());
                        state_files::report_damaged(path, &text);
                    }
                }
                Some(record)
            }
            Err(message) => {
                state_files::report_damaged(path, &clip(&message));
                None
            }
        }
    }

    #[allow(clippy::type_complexity, reason = "the two halves part at the only caller")]
    fn decode(&self, bytes: &[u8]) -> Result<((String, Vec<Pod>), Vec<String>), String> {
        let broken = |error: serde_json::Error| format!("it is no record: {error}");
        let header: Header = serde_json::from_slice(bytes).map_err(broken)?;
        if header.format != FORMAT {
            return Err("it is no record of a manifest".to_owned());
        }
        if header.version != VERSION {
            return Err(format!("its version is {}, not {VERSION}", header.version));
        }
        let record: Record = serde_json::from_slice(bytes).map_err(broken)?;
        if record.node != self.node_name {
            return Err(format!("it belongs to node {:?}", record.node));
        }
        let mut pods = Vec::new();
        let mut refused = Vec::new();
        for value in record.pods {
            let object = pod_from_value(&value).map_err(|error| format!("it is no record: {error}"))?;
            match self.check_pod(object) {
                Ok(pod) => pods.push(pod),
                Err(message) => refused.push(message),
            }
        }
        Ok(((record.place, pods), refused))
    }

    /// Records are validated like manifests.
    fn check_pod(&self, object: api::Pod) -> Result<Pod, String> {
        let mut faults = validate::validate(&object);
        faults.extend(references::forbidden(&object));
        if let Some(fault) = faults.first() {
            let field = fault.field.as_deref().unwrap_or_default();
            return Err(format!("{field}: {}", fault.message));
        }
        let pod = Pod::from(object);
        let uid = pod.uid().as_str();
        if uid.is_empty() || pod.annotation(CONFIG_HASH) != Some(uid) {
            return Err("it is no static pod".to_owned());
        }
        if pod.spec().node_name.as_deref() != Some(&self.node_name) {
            return Err("it is bound to another node".to_owned());
        }
        Ok(pod)
    }
}

/// The source of a file in the store, by its name.
fn source_of_name(name: &str) -> Option<&str> {
    let (source, rest) = name.split_once('-')?;
    let (hash, ending) = rest.split_at_checked(32)?;
    let known = [SourceName::File, SourceName::Http].iter().any(|source_name| source_name.as_str() == source);
    let temporary = ending.strip_prefix(".json.").is_some_and(|ending| ending.ends_with(".tmp"));
    let hex = hash.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    (known && hex && (ending == ".json" || temporary)).then_some(source)
}

fn prepare_directory(directory: &Path) -> std::io::Result<()> {
    disk_writes::make_directories(directory, DIRECTORY_MODE)?;
    if std::fs::metadata(directory)?.permissions().mode() & 0o777 != DIRECTORY_MODE {
        std::fs::set_permissions(directory, Permissions::from_mode(DIRECTORY_MODE))?;
    }
    Ok(())
}

fn remove(path: &Path) -> Result<(), String> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(format!("cannot remove {}: {error}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Reads a whole record, and does not block if it is not a regular file.
fn read(path: &Path) -> Result<Option<Vec<u8>>, String> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let flags = i32::try_from(flags.bits()).unwrap_or(0);
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("cannot open it: {error}")),
    };
    let failed = |error: std::io::Error| format!("cannot read it: {error}");
    if !file.metadata().map_err(failed)?.is_file() {
        return Err("it is no regular file".to_owned());
    }
    let mut bytes = Vec::new();
    // One byte over the limit is enough to detect it.
    file.take(MAX_RECORD_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() > MAX_RECORD_BYTES {
        return Err(format!("it is larger than the limit of {MAX_RECORD_BYTES} bytes"));
    }
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::identity::Origin;
    use crate::sources::manifest;
    use serde_json::{Value, json};

    const KEY: &[u8] = b"/m/a.yaml";
    const PLACE: &str = "/m/a.yaml";

    fn pods(names: &[&str]) -> Vec<Pod> {
        let text = |name: &&str| {
            format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{a: b}}}}\nspec:\n  \
                 volumes: [{{name: e, emptyDir: {{medium: Memory, sizeLimit: 1Mi}}}}]\n  containers:\n  \
                 - name: c\n    image: i:1\n    resources: {{limits: {{cpu: 500m, memory: 64Mi}}}}\n    \
                 ports: [{{name: web, containerPort: 80}}]\n    \
                 livenessProbe: {{httpGet: {{port: web}}}}\n"
            )
        };
        let whole = names.iter().map(text).collect::<Vec<_>>().join("---\n");
        let read = manifest::read(whole.as_bytes(), "n", &Origin::File(PLACE.into()));
        assert_eq!(read.faults, []);
        read.pods
    }

    fn store(directory: &Path) -> Store {
        Store::new(Some(directory), SourceName::File, "n")
    }

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn stored_pods_are_loaded_unchanged() {
        let above = tempfile::tempdir().unwrap();
        let directory = above.path().join("sources");
        let mut store = store(&directory);
        assert_eq!(store.load(KEY, PLACE), []);
        let good = pods(&["a", "b"]);
        assert!(store.save(KEY, PLACE, &good));
        assert_eq!(store.load(KEY, PLACE), good);
        assert_eq!(store.load(KEY, "/m/other.yaml"), [], "a collision of hashes is no match");
        assert_eq!(store.load(b"/m/other.yaml", "/m/other.yaml"), []);
        assert_eq!(store.load_all(), [(PLACE.to_owned(), good.clone())]);
        let path = directory.join(store.file_name(KEY));
        assert_eq!((mode(&directory), mode(&path)), (0o700, 0o600));

        // Equal content is not written again.
        let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path).unwrap());
        let before = inode(&path);
        assert!(store.save(KEY, PLACE, &good));
        assert_eq!(inode(&path), before);
        assert!(store.save(KEY, PLACE, &pods(&["a"])));
        assert_eq!(store.load(KEY, PLACE), pods(&["a"]));

        assert!(store.save(KEY, PLACE, &[]) && store.save(KEY, PLACE, &[]));
        assert_eq!(store.load(KEY, PLACE), []);
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
    }

    #[test]
    fn invalid_records_and_pods_are_skipped() {
        let directory = tempfile::tempdir().unwrap();
        let mut store = store(directory.path());
        let good = pods(&["a", "b"]);
        assert!(store.save(KEY, PLACE, &good));
        let path = directory.path().join(store.file_name(KEY));
        let bytes = std::fs::read(&path).unwrap();
        let record: Value = serde_json::from_slice(&bytes).unwrap();

        let check = |bytes: &[u8], names: &[&str]| {
            std::fs::write(&path, bytes).unwrap();
            let found = store.load(KEY, PLACE);
            let found: Vec<&str> = found.iter().map(Pod::name).collect();
            assert_eq!(found, names, "{}", String::from_utf8_lossy(bytes));
            let is_reported = state_files::problems().iter().any(|(damaged, _)| *damaged == path);
            // That of another file is intact.
            let is_damaged = found.len() < 2 && !String::from_utf8_lossy(bytes).contains("/m/b.yaml");
            assert_eq!(is_reported, is_damaged, "{}", String::from_utf8_lossy(bytes));
        };
        for end in (0..bytes.len()).step_by(97) {
            check(&bytes[..end], &[]);
        }
        check(&[0, 159, 146, 150, 255], &[]);
        check("[".repeat(100_000).as_bytes(), &[]);
        let edited = |pointer: &str, value: Value| {
            let mut record = record.clone();
            *record.pointer_mut(pointer).unwrap() = value;
            record.to_string().into_bytes()
        };
        check(&edited("/version", json!(2)), &[]);
        check(&edited("/version", json!("1")), &[]);
        check(&edited("/format", json!("other")), &[]);
        check(&edited("/node", json!("m")), &[]);
        check(&edited("/place", json!("/m/b.yaml")), &[]);
        check(&edited("/pods", json!({})), &[]);
        check(&edited("/pods/0", json!(7)), &[]);
        // An invalid pod does not affect the others.
        check(&edited("/pods/0/metadata/uid", json!("../../etc")), &["b-n"]);
        check(&edited("/pods/0/metadata/uid", json!("")), &["b-n"]);
        check(&edited("/pods/1/metadata/name", json!("UP")), &["a-n"]);
        check(&edited("/pods/1/spec/nodeName", json!("m")), &["a-n"]);
        check(&edited("/pods/1/spec/volumes/0/name", json!("../x")), &["a-n"]);
        let claim = json!({"name": "e", "persistentVolumeClaim": {"claimName": "c"}});
        check(&edited("/pods/1/spec/volumes/0", claim), &["a-n"]);
        check(&bytes, &["a-n", "b-n"]);

        // Not a regular file: it is not read, and does not block.
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(store.load(KEY, PLACE), []);
        assert!(store.save(KEY, PLACE, &good), "a good version takes the place of whatever was there");
        assert_eq!(store.load(KEY, PLACE), good);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_eq!(store.load(KEY, PLACE), []);
        assert!(store.save(KEY, PLACE, &good), "an empty directory is replaced");
        assert_eq!(store.load(KEY, PLACE), good);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir_all(path.join("other")).unwrap();
        assert!(!store.save(KEY, PLACE, &good), "one with content is not");
        std::fs::remove_dir_all(&path).unwrap();
        assert!(store.save(KEY, PLACE, &good));
    }

    #[test]
    fn only_records_of_the_same_source_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let mut files = store(directory.path());
        let mut urls = Store::new(Some(directory.path()), SourceName::Http, "n");
        let good = pods(&["a"]);
        assert!(files.save(b"1", "1", &good) && files.save(b"2", "2", &good) && urls.save(b"1", "1", &good));
        let left = format!("{}.0badcafe.tmp", files.file_name(b"1"));
        for name in [left.as_str(), "notes.txt", "file-.json", "file-é.json"] {
            std::fs::write(directory.path().join(name), "x").unwrap();
        }
        files.remove_except([b"2".as_slice(), b"3"].into_iter());
        let mut names: Vec<String> = std::fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let mut expected = vec![files.file_name(b"2"), urls.file_name(b"1")];
        expected.extend(["notes.txt", "file-.json", "file-é.json"].map(str::to_owned));
        expected.sort();
        assert_eq!(names, expected);
    }

    #[test]
    fn store_without_usable_directory_loads_nothing() {
        let mut none = Store::new(None, SourceName::File, "n");
        assert!(none.save(KEY, PLACE, &pods(&["a"])));
        assert_eq!((none.load(KEY, PLACE), none.load_all().len()), (vec![], 0));
        none.remove_except(std::iter::empty());

        let above = tempfile::tempdir().unwrap();
        let directory = above.path().join("sources");
        std::fs::write(&directory, "in the way").unwrap();
        let mut store = store(&directory);
        assert!(!store.save(KEY, PLACE, &pods(&["a"])));
        assert_eq!((store.load(KEY, PLACE), store.load_all().len()), (vec![], 0));
        store.remove_except(std::iter::empty());
        std::fs::remove_file(&directory).unwrap();
        assert!(store.save(KEY, PLACE, &pods(&["a"])));
    }
}
