//! `vol_data.json`, in the format of the Go kubelet: what a removal needs to know of a volume.

use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::super::error::VolumeError;
use super::error::io;
use super::names::{self, RECORD};
use crate::util::{atomic_file, state_files, untrusted};

/// The largest record that is read. Names and handles have at most some hundred bytes.
const MAX_BYTES: u64 = 64 * 1024;

/// The content of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Record {
    /// The name of the persistent volume, or of the volume in the pod.
    #[serde(rename = "specVolID", skip_serializing_if = "String::is_empty")]
    pub(super) spec_name: String,
    /// The driver's name of the volume.
    pub(super) volume_handle: String,
    pub(super) driver_name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) node_name: String,
    #[serde(rename = "attachmentID", skip_serializing_if = "String::is_empty")]
    pub(super) attachment: String,
    /// `Persistent` or `Ephemeral`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) volume_lifecycle_mode: String,
    /// The label that the volume was mounted with.
    #[serde(rename = "seLinuxMountContext", skip_serializing_if = "String::is_empty")]
    pub(super) selinux_context: String,
}

/// What is at the place of a record.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RecordFile {
    Readable(Record),
    Missing,
    /// Not readable, or not a record.
    Damaged(String),
}

impl Record {
    /// Of a volume of a pod.
    pub(super) fn of_pod(spec_name: &str, driver: &str, handle: &str, lifecycle: &str, node: &str) -> Record {
        Record {
            spec_name: spec_name.to_owned(),
            node_name: node.to_owned(),
            attachment: names::attachment_name(handle, driver, node),
            volume_lifecycle_mode: lifecycle.to_owned(),
            ..Record::staged(driver, handle)
        }
    }

    /// Of a staged file system.
    pub(super) fn staged(driver: &str, handle: &str) -> Record {
        let (driver_name, volume_handle) = (driver.to_owned(), handle.to_owned());
        Record { driver_name, volume_handle, ..Record::default() }
    }

    /// The name of the volume on this node.
    pub(super) fn unique_name(&self) -> String {
        names::unique_name(&self.driver_name, &self.volume_handle)
    }

    /// Reads the record in a directory.
    pub(super) fn read(dir: &Path) -> RecordFile {
        let path = dir.join(RECORD);
        let found = Record::read_file(&path);
        match &found {
            RecordFile::Readable(_) | RecordFile::Missing => state_files::report_usable(&path),
            RecordFile::Damaged(error) => state_files::report_damaged(&path, error),
        }
        found
    }

    fn read_file(path: &Path) -> RecordFile {
        let mut bytes = Vec::new();
        let read = untrusted::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes));
        match read {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return RecordFile::Missing,
            Err(error) => return RecordFile::Damaged(error.to_string()),
            Ok(_) if bytes.len() as u64 > MAX_BYTES => return RecordFile::Damaged("too large".to_owned()),
            Ok(_) => {}
        }
        match serde_json::from_slice::<Record>(&bytes) {
            Ok(record) if record.driver_name.is_empty() || record.volume_handle.is_empty() => {
                RecordFile::Damaged("no driver or no handle".to_owned())
            }
            Ok(record) => RecordFile::Readable(record),
            Err(error) => RecordFile::Damaged(error.to_string()),
        }
    }

    /// Writes the record into a directory, completely or not at all. A record that is the same
    /// stays as it is. Returns whether there was none.
    pub(super) fn write(&self, dir: &Path) -> Result<bool, VolumeError> {
        let before = Record::read(dir);
        if !matches!(&before, RecordFile::Readable(record) if record == self) {
            self.write_file(&dir.join(RECORD)).map_err(io("write the record in", dir))?;
        }
        Ok(before == RecordFile::Missing)
    }

    fn write_file(&self, path: &Path) -> std::io::Result<()> {
        let bytes = serde_json::to_vec(self).map_err(std::io::Error::other)?;
        atomic_file::write(path, &bytes, 0o600)?;
        state_files::report_usable(path);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_has_the_names_of_the_go_kubelet() {
        let dir = tempfile::tempdir().unwrap();
        let text = r#"{"attachmentID":"csi-1","driverName":"d","nodeName":"n","specVolID":"pv","volumeHandle":"h","volumeLifecycleMode":"Persistent","seLinuxMountContext":"x"}"#;
        std::fs::write(dir.path().join(RECORD), text).unwrap();
        let RecordFile::Readable(record) = Record::read(dir.path()) else { panic!() };
        assert_eq!((record.spec_name.as_str(), record.attachment.as_str()), ("pv", "csi-1"));
        let written: serde_json::Value = serde_json::to_value(&record).unwrap();
        assert_eq!(written, serde_json::from_str::<serde_json::Value>(text).unwrap());
        let other = Record { node_name: "m".to_owned(), ..record };
        other.write(dir.path()).unwrap();
        assert_eq!(Record::read(dir.path()), RecordFile::Readable(other));
    }

    #[test]
    fn damaged_and_foreign_files_are_recognized() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(RECORD);
        assert_eq!(Record::read(dir.path()), RecordFile::Missing);
        for text in ["", "{", "[]", "{}", r#"{"driverName":"d"}"#, &"x".repeat(70_000)] {
            std::fs::write(&path, text).unwrap();
            assert!(matches!(Record::read(dir.path()), RecordFile::Damaged(_)), "{text:.20}");
            assert!(state_files::problems().iter().any(|(damaged, _)| *damaged == path), "{text:.20}");
        }
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert!(matches!(Record::read(dir.path()), RecordFile::Damaged(_)));
    }
}
