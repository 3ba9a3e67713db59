//! What `coracle offline list` shows of each stored object: all but its body.

use std::collections::BTreeMap;

use super::files::FoundFile;
use super::handle::Offline;
use super::key::Kind;
use super::state::{DamagedFile, Report, StoredEntry};

impl Offline {
    /// The report with each stored object and each copy of a damaged file. Reads all files.
    #[must_use]
    pub fn listing(&self) -> Report {
        let mut report = self.report();
        let names = self.names_of_pods();
        let files = &self.shared.files;
        let shown = |(file, found): (String, FoundFile)| {
            let Some((key, sealed)) = found.object else {
                let kind = file.split_once('-').map_or("", |(word, _)| word).to_owned();
                return StoredEntry {
                    kind,
                    file,
                    bytes: found.bytes,
                    changed: found.changed,
                    ..StoredEntry::default()
                };
            };
            let pod = key.pod_uid().and_then(|uid| names.get(uid)).cloned();
            StoredEntry {
                kind: key.kind.word().to_owned(),
                name: match key.kind {
                    Kind::Node => files.node_name().to_owned(),
                    _ => key.name,
                },
                pod,
                bytes: found.bytes,
                changed: found.changed,
                sealed,
                usable: true,
                file,
            }
        };
        report.stored = files.found().into_iter().map(shown).collect();
        report
            .stored
            .sort_by(|a, b| (&a.kind, &a.pod, &a.name, &a.file).cmp(&(&b.kind, &b.pod, &b.name, &b.file)));
        report.damaged = files
            .copies()
            .into_iter()
            .map(|(file, bytes, changed)| DamagedFile { file, bytes, changed })
            .collect();
        report
    }

    /// `namespace/name` of the pods of the set that counts, by UID.
    pub(super) fn names_of_pods(&self) -> BTreeMap<String, String> {
        let state = self.shared.state();
        let pods = state.decider.known().iter();
        pods.map(|pod| (pod.uid().to_string(), format!("{}/{}", pod.namespace(), pod.name()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::key::Key;
    use super::super::testing;
    use serde_json::json;

    #[test]
    fn listing_names_each_object_and_its_pod_and_has_no_body() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &["a"]);
        let files = &offline.shared.files;
        files.write(&Key::namespaced(super::Kind::Secret, "n", "s"), b"canary").unwrap();
        files.write(&Key::new(super::Kind::Token, "a/1"), b"canary").unwrap();
        testing::store(
            root.path(),
            &Key::namespaced(super::Kind::ConfigMap, "n", "m"),
            &json!({"x": "canary"}),
        );
        let damaged = testing::path(root.path(), &Key::new(super::Kind::Volume, "v"));
        std::fs::write(&damaged, "canary").unwrap();
        let listing = offline.listing();
        let rows: Vec<_> = listing
            .stored
            .iter()
            .map(|entry| {
                assert!(entry.bytes > 0 && entry.changed.is_some(), "{entry:?}");
                let pod = entry.pod.as_deref().unwrap_or("-");
                format!("{} {} {pod} {} {}", entry.kind, entry.name, entry.sealed, entry.usable)
            })
            .collect();
        assert_eq!(
            rows,
            [
                "configmap n/m - false true",
                "node node1 - false true",
                "pod a n/a false true",
                "secret n/s - true true",
                "token a/1 n/a true true",
                "volume  - false false",
            ]
        );
        assert!(listing.damaged.is_empty());
        files.put_file_aside(damaged.file_name().unwrap().to_str().unwrap(), "x");
        let listing = offline.listing();
        assert_eq!((listing.stored.len(), listing.damaged.len(), listing.damaged[0].bytes), (5, 1, 6));
        let text = format!("{listing:?}{}", serde_json::to_string(&listing).unwrap());
        assert!(!text.contains("canary"), "{text}");
        assert!(offline.report().stored.is_empty(), "the short report has no names");
    }
}
