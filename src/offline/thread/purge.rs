//! Removes stored objects on order.

use std::collections::BTreeSet;
use std::sync::Weak;
use std::time::Instant;

use super::Writer;
use crate::offline::files::FileError;
use crate::offline::key::{Key, Kind};
use crate::offline::problems::Problems;
use crate::offline::purge::{PurgeError, PurgeScope};
use crate::offline::state::{PurgeReport, SealState};
use crate::util::lock::LockExt;

/// The most problems of a report.
const MAX_PROBLEMS: usize = 16;

impl Writer {
    /// Carries out the orders that wait.
    pub(super) fn purge(&mut self, now: Instant) {
        let purges = std::mem::take(&mut *self.offline.shared.purges.locked());
        for purge in purges {
            let result = match &purge.scope {
                PurgeScope::Damaged => Ok(self.purge_copies()),
                PurgeScope::All => Ok(self.purge_all(now)),
                PurgeScope::Object { kind, name } => self.purge_object(*kind, name),
            };
            self.is_report_old = true;
            // The client may have left.
            let _ = purge.reply.try_send(result);
        }
    }

    fn purge_copies(&self) -> PurgeReport {
        let mut report = PurgeReport::default();
        let files = &self.offline.shared.files;
        for (name, bytes, _) in files.copies() {
            match files.remove_aside(&name) {
                Ok(()) => (report.removed, report.bytes) = (report.removed + 1, report.bytes + bytes),
                Err(error) => add(&mut report, || format!("the copy {name} cannot be removed: {error}")),
            }
        }
        report
    }

    fn purge_object(&mut self, kind: Kind, name: &str) -> Result<PurgeReport, PurgeError> {
        let mut wanted = BTreeSet::new();
        match kind {
            Kind::Node => {
                wanted.insert(Key::node());
            }
            Kind::Pod => {
                let names = self.offline.names_of_pods();
                let is_wanted = |uid: &str| uid == name || names.get(uid).is_some_and(|shown| shown == name);
                let keys = self.store.keys().filter(|key| key.pod_uid().is_some_and(is_wanted));
                wanted.extend(keys.cloned());
            }
            _ => {
                wanted.insert(Key::new(kind, name));
            }
        }
        wanted.retain(|key| self.store.has(key));
        if wanted.is_empty() {
            return Err(PurgeError::NotStored);
        }
        let mut report = PurgeReport::default();
        for key in &wanted {
            self.purge_key(key, &mut report);
        }
        self.sync(&mut report);
        Ok(report)
    }

    /// What waits for its write goes, too: it may be sealed with the former key, and its objects come again.
    fn purge_all(&mut self, now: Instant) -> PurgeReport {
        let mut report = self.purge_copies();
        let keys: Vec<Key> = self.store.keys().cloned().collect();
        for key in &keys {
            self.purge_key(key, &mut report);
        }
        self.queue.clear();
        // Those that could not be read.
        let files = &self.offline.shared.files;
        for (name, bytes) in files.list().unwrap_or_default() {
            match files.remove_file(&name) {
                Ok(()) => (report.removed, report.bytes) = (report.removed + 1, report.bytes + bytes),
                Err(error) => add(&mut report, || format!("the file {name} cannot be removed: {error}")),
            }
        }
        self.problems = Problems::default();
        // Before the key is replaced: files that a power cut brings back would make the new one unusable.
        self.sync(&mut report);
        match files.replace_key() {
            Ok(is_new) => {
                report.new_key = is_new;
                // That of the operator. The reason was among the problems.
                if files.seal_state() == SealState::NoKey {
                    self.problems.add(
                        "the key file of --offline-key cannot be used: the next start of the agent says why"
                            .to_owned(),
                    );
                }
            }
            Err(error) => {
                let text = format!("the key cannot be replaced: {error}");
                self.problems.add(text.clone());
                add(&mut report, || text);
            }
        }
        self.offline.shared.state().report.seal = self.offline.shared.files.seal_state();
        (self.node, self.node_digest, self.is_node_stored) = (Weak::new(), None, false);
        self.statuses.clear();
        // Also if it waited for its first write.
        self.cluster = None;
        (self.has_new_pods, self.has_old_pods) = (true, true);
        self.namespaces.clear();
        // The Node object, the pods and their statuses are known here: they are written again, if those of the
        // API server count. The pods are queued at once, because the Node object must not be there before them.
        if self.offline.accepts_absence() {
            self.seen_statuses = 0;
            self.read_statuses(now);
            self.collect(now);
            self.cluster_changed(now);
        }
        report
    }

    fn purge_key(&mut self, key: &Key, report: &mut PurgeReport) {
        let files = &self.offline.shared.files;
        let bytes = files.bytes(key).ok().flatten().unwrap_or_default();
        self.queue.remove(key);
        match self.store.remove(files, key) {
            Ok(()) => {
                (report.removed, report.bytes) = (report.removed + 1, report.bytes + bytes);
                self.problems.clear(key);
                self.forget(key);
            }
            Err(error) => {
                add(report, || format!("{} {} cannot be removed: {error}", key.kind.word(), key.name));
            }
        }
    }

    fn sync(&self, report: &mut PurgeReport) {
        if let Err(error) = self.offline.shared.files.sync() {
            let error = FileError::from(error);
            add(report, || format!("a power cut may bring the files back: {error}"));
        }
    }
}

fn add(report: &mut PurgeReport, text: impl FnOnce() -> String) {
    if report.problems.len() < MAX_PROBLEMS {
        report.problems.push(text());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use super::super::tests::{Fixture, empty, node};
    use super::*;
    use crate::model::api::PodStatus;
    use crate::model::ids::PodUid;
    use crate::offline::fence::{FenceSettings, boot_time};
    use crate::offline::files::Files;
    use crate::offline::handle::Offline;
    use crate::offline::purge::Purge;
    use crate::offline::state::Phase;
    use crate::offline::testing::{self, pod};
    use crate::offline::{Deps, Settings};
    use crate::util::testing::in_background;

    fn order(fixture: &mut Fixture, scope: PurgeScope, second: u64) -> Result<PurgeReport, PurgeError> {
        let offline = fixture.offline().clone();
        let client = in_background(move || offline.purge(scope));
        while fixture.offline().shared.purges.locked().is_empty() {
            std::thread::yield_now();
        }
        fixture.turns(second);
        client.result()
    }

    /// Each pod needs this object.
    fn needing(key: Key) -> Deps {
        Deps { needs: Box::new(move |_, _| BTreeSet::from([key.clone()])), ..testing::deps() }
    }

    fn object(kind: Kind, name: &str) -> PurgeScope {
        PurgeScope::Object { kind, name: name.to_owned() }
    }

    #[test]
    fn purged_object_goes_in_each_phase_and_a_pod_with_all_that_is_its() {
        let (root, offline) = empty();
        let mut fixture = Fixture::with(root, offline, needing(Key::namespaced(Kind::ConfigMap, "n", "m")));
        let (map, token) = (Key::namespaced(Kind::ConfigMap, "n", "m"), Key::new(Kind::Token, "a/1"));
        fixture.offline().server_set(vec![pod("a"), pod("b")], true);
        for key in [&map, &token] {
            fixture.put(key, "null");
        }
        fixture.turns(0);
        assert_eq!(order(&mut fixture, object(Kind::ConfigMap, "n/x"), 1), Err(PurgeError::NotStored));
        let report = order(&mut fixture, object(Kind::ConfigMap, "n/m"), 2).unwrap();
        assert_eq!((report.removed, report.bytes > 0, report.new_key), (1, true, false));
        assert!(!fixture.has(&map) && fixture.has(&token));
        let report = order(&mut fixture, object(Kind::Pod, "n/a"), 3).unwrap();
        assert_eq!(report.removed, 2, "the pod and its token");
        assert!(!fixture.has(&token) && fixture.has(&Key::new(Kind::Pod, "b")));
        fixture.put(&map, "null");
        fixture.turns(30);
        assert!(fixture.has(&map), "what the API server sends again is stored again");
    }

    #[test]
    fn purge_of_all_makes_another_key_and_stores_pods_and_node_again() {
        let root = tempfile::tempdir().unwrap();
        let settings = testing::settings(root.path());
        let (files, problems) = Files::open(&settings);
        assert!(problems.is_empty(), "{problems:?}");
        let key_file = settings.directory.join("key");
        let former = std::fs::read(&key_file).unwrap();
        let offline = Offline::with_files(files, Vec::new(), &settings, Instant::now());
        let shown = node("u", "1");
        let secret = Key::namespaced(Kind::Secret, "n", "s");
        let deps = Deps { node: Box::new(move || Some(Arc::clone(&shown))), ..needing(secret.clone()) };
        let mut fixture = Fixture::with(root, offline, deps);
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.put(&secret, "canary");
        fixture.turns(0);
        assert!(fixture.has(&secret) && fixture.has(&Key::node()));
        let report = order(&mut fixture, PurgeScope::All, 30).unwrap();
        assert_eq!((report.removed, report.new_key, report.problems.len()), (3, true, 0), "{report:?}");
        assert_ne!(std::fs::read(&key_file).unwrap(), former);
        assert!(!fixture.has(&secret));
        assert!(fixture.has(&Key::new(Kind::Pod, "a")) && fixture.has(&Key::node()), "they are known");
        fixture.put(&secret, "new");
        fixture.turns(60);
        assert_eq!(fixture.offline().read(&secret).unwrap().reveal(), b"new");
        let (again, problems) = Files::open(&settings);
        assert!(problems.is_empty() && again.read(&secret).unwrap().is_some(), "{problems:?}");
    }

    #[test]
    fn purge_of_all_repairs_a_lost_key_and_leaves_that_of_the_operator() {
        let root = tempfile::tempdir().unwrap();
        let settings = testing::settings(root.path());
        let secret = Key::namespaced(Kind::Secret, "n", "s");
        Files::open(&settings).0.write(&secret, b"x").unwrap();
        std::fs::remove_file(settings.directory.join("key")).unwrap();
        let (files, problems) = Files::open(&settings);
        let offline = Offline::with_files(files, problems, &settings, Instant::now());
        let mut fixture = Fixture::with(root, offline, testing::deps());
        fixture.turns(0);
        assert_eq!(fixture.offline().report().seal, SealState::NoKey);
        assert!(order(&mut fixture, PurgeScope::All, 1).unwrap().new_key);
        let report = fixture.offline().report();
        assert_eq!((report.seal, report.problems.len()), (SealState::Sealed, 0));

        let root = tempfile::tempdir().unwrap();
        let key_file = root.path().join("key");
        let settings = Settings { key_file: Some(key_file.clone()), ..testing::settings(root.path()) };
        let (files, _) = Files::open(&settings);
        files.write(&secret, b"x").unwrap();
        let former = std::fs::read(&key_file).unwrap();
        let offline = Offline::with_files(files, Vec::new(), &settings, Instant::now());
        let mut fixture = Fixture::with(root, offline, testing::deps());
        let report = order(&mut fixture, PurgeScope::All, 0).unwrap();
        assert_eq!((report.removed, report.new_key), (1, false));
        assert_eq!(std::fs::read(&key_file).unwrap(), former);
    }

    #[test]
    fn unusable_key_of_the_operator_stays_a_problem_after_a_purge_of_all() {
        let root = tempfile::tempdir().unwrap();
        let key_file = root.path().join("key");
        std::fs::write(&key_file, "x").unwrap();
        let settings = Settings { key_file: Some(key_file), ..testing::settings(root.path()) };
        let (files, problems) = Files::open(&settings);
        let offline = Offline::with_files(files, problems, &settings, Instant::now());
        let mut fixture = Fixture::with(root, offline, testing::deps());
        assert!(!order(&mut fixture, PurgeScope::All, 0).unwrap().new_key);
        let report = fixture.offline().report();
        assert_eq!((report.seal, report.problems.len()), (SealState::NoKey, 1), "{report:?}");
    }

    #[test]
    fn purge_while_alone_leaves_the_pods_that_run_and_stores_nothing_again() {
        let mut fixture = Fixture::new(&["a"], testing::deps());
        fixture.turns(40);
        assert_eq!(fixture.offline().phase(), Phase::Alone);
        let report = order(&mut fixture, PurgeScope::All, 41).unwrap();
        assert_eq!(report.removed, 2, "{report:?}");
        assert!(!fixture.has(&Key::new(Kind::Pod, "a")) && !fixture.has(&Key::node()));
        assert_eq!(fixture.offline().shared.state().decider.known().len(), 1);
    }

    #[test]
    fn purge_while_alone_leaves_no_statuses_until_the_server_counts() {
        let version = Arc::new(AtomicU64::new(1));
        let newest = Arc::clone(&version);
        let statuses = move |seen: u64| {
            let version = newest.load(Ordering::SeqCst);
            let reason = Some(version.to_string());
            let status = PodStatus { phase: Some("Running".to_owned()), reason, ..PodStatus::default() };
            let changed = (version > seen).then(|| (PodUid::from("a"), Arc::new(status)));
            (version, changed.into_iter().collect::<Vec<_>>())
        };
        let deps = Deps { statuses: Box::new(statuses), ..testing::deps() };
        let mut fixture = Fixture::new(&["a"], deps);
        fixture.turns(40);
        let keys = [Kind::Pod, Kind::PodStatus].map(|kind| Key::new(kind, "a"));
        let has = |fixture: &Fixture| keys.each_ref().map(|key| fixture.has(key));
        assert_eq!((fixture.offline().phase(), has(&fixture)), (Phase::Alone, [true, true]));
        order(&mut fixture, PurgeScope::All, 41).unwrap();
        assert_eq!(has(&fixture), [false, false]);
        version.store(2, Ordering::SeqCst);
        fixture.writer.read_statuses(Instant::now());
        fixture.turns(80);
        assert_eq!(has(&fixture), [false, false], "it has changed");
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.turns(120);
        assert_eq!(has(&fixture), [true, true]);
    }

    /// With the Node object, the stored pods count as complete.
    #[test]
    fn purge_of_all_stores_the_node_after_the_pods() {
        let shown = node("u", "1");
        let (root, offline) = empty();
        let deps = Deps { node: Box::new(move || Some(Arc::clone(&shown))), ..testing::deps() };
        let mut fixture = Fixture::with(root, offline, deps);
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.turns(0);
        assert!(fixture.has(&Key::node()));
        let (reply, _response) = crossbeam_channel::bounded(1);
        let purge = Purge { scope: PurgeScope::All, reply };
        fixture.offline().shared.purges.locked().push(purge);
        let now = Instant::now();
        fixture.writer.purge(now);
        fixture.writer.node_changed(now);
        let queue = &fixture.writer.queue;
        assert!(queue.has(&Key::new(Kind::Pod, "a")) && !queue.has(&Key::node()));
        fixture.turns(60);
        assert!(fixture.has(&Key::node()));
    }

    /// Otherwise the time without the API server would begin with the next start of the machine.
    #[test]
    fn purged_time_of_the_last_contact_is_stored_again() {
        let root = tempfile::tempdir().unwrap();
        let fence = FenceSettings { stop_after: Some(Duration::from_secs(300)), ..FenceSettings::default() };
        let settings = Settings { fence, ..testing::settings(root.path()) };
        let offline = Offline::with_files(testing::files(root.path()), Vec::new(), &settings, Instant::now());
        let mut fixture = Fixture::with(root, offline, testing::deps());
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.offline().contact(boot_time());
        fixture.turns(0);
        assert!(fixture.has(&Key::contact()));
        assert_eq!(order(&mut fixture, PurgeScope::All, 1).unwrap().removed, 2);
        assert!(fixture.has(&Key::contact()));
    }

    /// Otherwise another cluster would be accepted after a time.
    #[test]
    fn purged_uid_of_the_cluster_is_stored_again_while_the_server_counts() {
        let (root, offline) = empty();
        let deps = Deps { cluster: Box::new(|| Some("own".to_owned())), ..testing::deps() };
        let mut fixture = Fixture::with(root, offline, deps);
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.turns(0);
        assert!(fixture.has(&Key::cluster()));
        order(&mut fixture, PurgeScope::All, 1).unwrap();
        fixture.turns(20);
        assert!(fixture.has(&Key::cluster()));
        fixture.offline().server_set(Vec::new(), true);
        fixture.turns(40);
        assert_eq!(fixture.offline().phase(), Phase::Held);
        order(&mut fixture, PurgeScope::All, 41).unwrap();
        fixture.turns(60);
        assert!(!fixture.has(&Key::cluster()));
    }

    #[test]
    fn uid_of_the_cluster_that_waits_for_its_first_write_during_a_purge_is_stored() {
        let (root, offline) = empty();
        let deps = Deps { cluster: Box::new(|| Some("own".to_owned())), ..testing::deps() };
        let mut fixture = Fixture::with(root, offline, deps);
        fixture.offline().server_set(vec![pod("a")], true);
        order(&mut fixture, PurgeScope::All, 0).unwrap();
        fixture.turns(20);
        assert!(fixture.has(&Key::cluster()));
    }

    #[test]
    fn purge_of_damaged_files_removes_the_copies_only() {
        let mut fixture = Fixture::new(&["a"], testing::deps());
        let files = &fixture.offline().shared.files;
        std::fs::write(testing::path(fixture.root.path(), &Key::new(Kind::Volume, "v")), "xyz").unwrap();
        files.put_file_aside(&Key::new(Kind::Volume, "v").file_name(), "x");
        assert_eq!(files.copies().len(), 1);
        let report = order(&mut fixture, PurgeScope::Damaged, 0).unwrap();
        assert_eq!((report.removed, report.bytes), (1, 3));
        assert!(fixture.offline().shared.files.copies().is_empty() && fixture.has(&Key::new(Kind::Pod, "a")));
    }
}
