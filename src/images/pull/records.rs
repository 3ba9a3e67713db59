//! Which images this node has pulled, and who may use them (Go: pkg/kubelet/images/pullmanager).
//! An image on the node is no proof that a pod may have it: one that was pulled with a pod's
//! own credentials is for pods that can show them.
//!
//! The files are upstream's, so that another kubelet that takes over knows as much:
//! an intent before each pull, a record after it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::model::ids::ImageRef;
use crate::model::metrics;
use crate::util::disk_writes;
use crate::util::{atomic_file, sha256, state_files, untrusted};

use super::super::listed::RuntimeImage;
use crate::model::image_name::{listed_name, repository};
use crate::util::lock::LockExt;

const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
/// Far above the largest record.
const MAX_BYTES: u64 = 16 * 1024 * 1024;
const INTENT_KIND: &str = "ImagePullIntent";
const RECORD_KIND: &str = "ImagePulledRecord";

/// `imagePullCredentialsVerificationPolicy`: which images on the node need a proof.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum CredentialVerification {
    /// The feature gate is off; there are no records.
    #[default]
    Off,
    /// No image needs a proof.
    Never,
    /// Images that a kubelet has pulled.
    NotPreloaded,
    /// All but these repositories, or what lies below an entry that ends with `/*`.
    NotAllowlisted(Vec<String>),
    /// All images.
    Always,
}

impl CredentialVerification {
    /// From the values of the configuration, which have been validated.
    #[must_use]
    pub fn from_policy(policy: &str, allowlist: &[String]) -> CredentialVerification {
        match policy {
            "NeverVerify" => CredentialVerification::Never,
            "NeverVerifyAllowlistedImages" => CredentialVerification::NotAllowlisted(allowlist.to_vec()),
            "AlwaysVerify" => CredentialVerification::Always,
            _ => CredentialVerification::NotPreloaded,
        }
    }

    fn wants_proof(&self, image: &str, pulled_here: bool) -> bool {
        match self {
            CredentialVerification::Off | CredentialVerification::Never => false,
            CredentialVerification::NotPreloaded => pulled_here,
            CredentialVerification::NotAllowlisted(list) => {
                !list.iter().any(|entry| match entry.strip_suffix("/*") {
                    Some(above) => {
                        repository(image).strip_prefix(above).is_some_and(|rest| rest.starts_with('/'))
                    }
                    None => repository(image) == entry,
                })
            }
            CredentialVerification::Always => true,
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Intent {
    kind: String,
    api_version: String,
    image: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    kind: String,
    api_version: String,
    last_updated_time: Timestamp,
    image_ref: String,
    /// The key is the image's name without tag and digest.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    credential_mapping: BTreeMap<String, Access>,
}

/// The pods that may use an image.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Access {
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "list")]
    kubernetes_secrets: Vec<PullSecret>,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "list")]
    kubernetes_service_accounts: Vec<PullAccount>,
    /// Pulled without credentials, or with the node's own.
    #[serde(skip_serializing_if = "is_false")]
    node_pods_accessible: bool,
}

/// A pod's credential that a registry has accepted.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PullSecret {
    pub(super) uid: String,
    pub(super) namespace: String,
    pub(super) name: String,
    /// The hash of user and password.
    pub(super) credential_hash: String,
}

impl PullSecret {
    fn is_same_object(&self, other: &PullSecret) -> bool {
        (&self.uid, &self.namespace, &self.name) == (&other.uid, &other.namespace, &other.name)
    }

    fn is_same_credential(&self, other: &PullSecret) -> bool {
        !self.credential_hash.is_empty() && self.credential_hash == other.credential_hash
    }
}

/// A service account with whose token a program has supplied a credential that a registry has accepted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PullAccount {
    pub(super) uid: String,
    pub(super) namespace: String,
    pub(super) name: String,
}

/// What shows that a pod may have an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Proof {
    /// A credential of a Secret.
    Secret(PullSecret),
    /// The pod's service account.
    Account(PullAccount),
}

/// The limit of secrets that are stored for an image.
const MAX_SECRETS: usize = 100;

/// A list that may be null.
fn list<'de, T: Deserialize<'de>, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl Access {
    /// The access after a pull with this proof.
    fn with(&self, proof: Option<&Proof>) -> Access {
        let Some(proof) = proof else {
            return Access { node_pods_accessible: true, ..Access::default() };
        };
        let mut access = self.clone();
        if access.node_pods_accessible {
            return access;
        }
        match proof {
            Proof::Secret(secret) => {
                access.kubernetes_secrets.retain(|known| !known.is_same_object(secret));
                access.kubernetes_secrets.push(secret.clone());
                access.kubernetes_secrets.sort();
            }
            Proof::Account(account) => {
                let accounts = &mut access.kubernetes_service_accounts;
                accounts.retain(|known| known != account);
                accounts.push(account.clone());
                accounts
                    .sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
            }
        }
        access
    }
}

fn is_false(flag: &bool) -> bool {
    !*flag
}

/// Why a record cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    #[error("cannot {attempt} {}: {error}", path.display())]
    Io { attempt: &'static str, path: PathBuf, error: std::io::Error },
    #[error("{} is damaged: {error}", path.display())]
    Content { path: PathBuf, error: serde_json::Error },
}

/// The result of a look-up in the records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CredentialCheck {
    /// No proof is needed.
    Allowed,
    /// A record says that this pod may have the image.
    Proven,
    /// Only the registry can decide.
    Unproven,
    /// The record cannot be read.
    Unknown,
}

impl CredentialCheck {
    fn as_str(self) -> &'static str {
        match self {
            CredentialCheck::Allowed => "credentialPolicyAllowed",
            CredentialCheck::Proven => "credentialRecordFound",
            CredentialCheck::Unproven => "mustAuthenticate",
            CredentialCheck::Unknown => "error",
        }
    }
}

pub(super) struct Records {
    verification: CredentialVerification,
    pulling: PathBuf,
    pulled: PathBuf,
    /// Running pulls by image. Locked while a file is written.
    under_way: Mutex<HashMap<String, usize>>,
}

impl Records {
    pub(super) fn new(root_dir: &Path, verification: CredentialVerification) -> Records {
        let dir = root_dir.join("image_manager");
        let records = Records {
            verification,
            pulling: dir.join("pulling"),
            pulled: dir.join("pulled"),
            under_way: Mutex::default(),
        };
        if records.is_on() {
            // As upstream, before the first pull: another kubelet and tests expect them.
            for dir in [&records.pulling, &records.pulled] {
                if let Err(error) = make(dir) {
                    log::warn!("{error}");
                }
            }
        }
        records.count_files();
        records
    }

    /// Whether proofs are checked.
    pub(super) fn is_on(&self) -> bool {
        self.verification != CredentialVerification::Off
    }

    /// Whether an image that is on the node has to be pulled nevertheless, to prove that the
    /// pod may have it. `proofs`: the credentials of the pod's own that fit the image. `account`: the pod's
    /// service account, if a program supplies a credential for it; called only if accounts may have the
    /// image, as the program may have to run.
    pub(super) fn must_pull(
        &self,
        image: &str,
        reference: &ImageRef,
        proofs: &[PullSecret],
        account: impl FnOnce() -> Option<PullAccount>,
    ) -> bool {
        if !self.is_on() {
            return false;
        }
        let account = if self.has_accounts(image, reference) { account() } else { None };
        let check = self.check(image, reference, proofs, account.as_ref());
        metrics::MUST_PULL_CHECKS.inc([check.as_str()]);
        matches!(check, CredentialCheck::Unproven | CredentialCheck::Unknown)
    }

    /// Whether the service account of a pod may decide.
    fn has_accounts(&self, image: &str, reference: &ImageRef) -> bool {
        if !self.verification.wants_proof(image, true) {
            return false;
        }
        let record = self.record(reference.as_str()).ok().flatten();
        let access = record.as_ref().and_then(|record| record.credential_mapping.get(repository(image)));
        access.is_some_and(|access| {
            !access.node_pods_accessible && !access.kubernetes_service_accounts.is_empty()
        })
    }

    fn check(
        &self,
        image: &str,
        reference: &ImageRef,
        proofs: &[PullSecret],
        account: Option<&PullAccount>,
    ) -> CredentialCheck {
        if self.verification == CredentialVerification::Never {
            return CredentialCheck::Allowed;
        }
        let under_way = self.under_way.locked();
        let record = match self.record(reference.as_str()) {
            Ok(record) => record,
            Err(error) => {
                log::warn!("cannot read which pods may use image {image}: {error}");
                return CredentialCheck::Unknown;
            }
        };
        let pulled_here =
            record.is_some() || under_way.contains_key(image) || file(&self.pulling, image).exists();
        if !self.verification.wants_proof(image, pulled_here) {
            return CredentialCheck::Allowed;
        }
        let Some(access) =
            record.as_ref().and_then(|record| record.credential_mapping.get(repository(image)))
        else {
            return CredentialCheck::Unproven;
        };
        if access.node_pods_accessible {
            return CredentialCheck::Proven;
        }
        for proof in proofs {
            for known in &access.kubernetes_secrets {
                let (object, credential) = (known.is_same_object(proof), known.is_same_credential(proof));
                let is_full = access.kubernetes_secrets.len() >= MAX_SECRETS;
                // As upstream, a new credential that cannot be stored any more is no proof.
                if !credential && (!object || is_full) {
                    continue;
                }
                // Either may change later, so both are stored.
                if (!object || !credential) && !is_full {
                    let access = access.with(Some(&Proof::Secret(proof.clone())));
                    if let Err(error) = self.note(image, reference.as_str(), Some(access)) {
                        log::warn!("cannot record which pods may use image {image}: {error}");
                    }
                }
                return CredentialCheck::Proven;
            }
        }
        if account.is_some_and(|account| access.kubernetes_service_accounts.contains(account)) {
            return CredentialCheck::Proven;
        }
        CredentialCheck::Unproven
    }

    /// Records that a pull begins. Without this the owner of the image would be unknown after a
    /// crash.
    ///
    /// # Errors
    /// When the record cannot be written; then the pull must not begin.
    pub(super) fn intend(&self, image: &str) -> Result<(), RecordError> {
        if !self.is_on() {
            return Ok(());
        }
        let mut under_way = self.under_way.locked();
        let count = under_way.entry(image.to_owned()).or_default();
        if *count == 0 {
            let intent = Intent {
                kind: INTENT_KIND.to_owned(),
                api_version: API_VERSION.to_owned(),
                image: image.to_owned(),
            };
            if let Err(error) = write(&self.pulling, image, &intent) {
                under_way.remove(image);
                return Err(error);
            }
        }
        *count += 1;
        self.count_files();
        Ok(())
    }

    /// Records that a pull has succeeded. If it had no credentials, or the node's own, every pod
    /// may use the image from now on; if it had a pod's, only pods with the same ones.
    pub(super) fn pulled(&self, image: &str, reference: &ImageRef, proof: Option<&Proof>) {
        if !self.is_on() {
            return;
        }
        let mut under_way = self.under_way.locked();
        let known = self.record(reference.as_str()).ok().flatten();
        let known = known.and_then(|mut record| record.credential_mapping.remove(repository(image)));
        let access = known.unwrap_or_default().with(proof);
        match self.note(image, reference.as_str(), Some(access)) {
            Ok(()) => self.end(&mut under_way, image),
            // The intent remains, so the image does not count as preloaded.
            Err(error) => log::warn!("cannot record which pods may use image {image}: {error}"),
        }
        self.count_files();
    }

    /// Records that a pull has failed.
    pub(super) fn failed(&self, image: &str) {
        if self.is_on() {
            self.end(&mut self.under_way.locked(), image);
            self.count_files();
        }
    }

    /// Records that a pull was cancelled. The runtime may have the image nevertheless, so the
    /// intent remains, as after a crash.
    pub(super) fn abandoned(&self, image: &str) {
        let mut under_way = self.under_way.locked();
        match under_way.get_mut(image) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(under_way.remove(image)),
        }
    }

    /// Cleans up after crashes and removals, with a list of the images. Pulls that a crashed agent
    /// did not finish become records without credentials, so that the next pod needs a proof;
    /// records of removed images are deleted.
    pub(super) fn settle(&self, images: &[RuntimeImage], listed_at: Timestamp) {
        if !self.is_on() {
            return;
        }
        let mut under_way = self.under_way.locked();
        for intent in all::<Intent>(&self.pulling) {
            let image = intent.image;
            if under_way.contains_key(&image) {
                continue;
            }
            if let Some(found) = images.iter().find(|seen| seen.names.iter().any(|name| same(name, &image)))
                && let Err(error) = self.note(&image, found.id.as_str(), None)
            {
                log::warn!("cannot record that image {image} was pulled: {error}");
                continue;
            }
            self.end(&mut under_way, &image);
        }
        let present: BTreeSet<&str> = images.iter().map(|seen| seen.id.as_str()).collect();
        for record in all::<Record>(&self.pulled) {
            if !present.contains(record.image_ref.as_str()) && record.last_updated_time < listed_at {
                remove(&file(&self.pulled, &record.image_ref));
            }
        }
        self.count_files();
    }

    /// Sets the metrics with the number of files.
    fn count_files(&self) {
        if self.is_on() {
            let files = |dir: &Path| std::fs::read_dir(dir).map_or(0, Iterator::count) as f64;
            metrics::PULL_INTENTS.set(files(&self.pulling));
            metrics::PULLED_RECORDS.set(files(&self.pulled));
        }
    }

    fn end(&self, under_way: &mut HashMap<String, usize>, image: &str) {
        match under_way.get_mut(image) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                under_way.remove(image);
                remove(&file(&self.pulling, image));
            }
        }
    }

    fn record(&self, reference: &str) -> Result<Option<Record>, RecordError> {
        read(&file(&self.pulled, reference))
    }

    fn note(&self, image: &str, reference: &str, access: Option<Access>) -> Result<(), RecordError> {
        let old = self.record(reference).unwrap_or_else(|error| {
            log::warn!("{error}; it is written again");
            None
        });
        let is_new = old.is_none();
        let mut record = old.unwrap_or_else(|| Record {
            kind: RECORD_KIND.to_owned(),
            api_version: API_VERSION.to_owned(),
            last_updated_time: Timestamp::now(),
            image_ref: reference.to_owned(),
            credential_mapping: BTreeMap::new(),
        });
        let before = record.credential_mapping.get(repository(image));
        if !is_new && (access.is_none() || before == access.as_ref()) {
            return Ok(());
        }
        if let Some(access) = access {
            record.credential_mapping.insert(repository(image).to_owned(), access);
        }
        let now = Timestamp::now();
        record.last_updated_time = Timestamp::from_second(now.as_second()).unwrap_or(now);
        write(&self.pulled, reference, &record)
    }
}

fn file(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("sha256-{}", sha256::sha256_hex(name.as_bytes())))
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != ErrorKind::NotFound
    {
        log::warn!("cannot remove {}: {error}", path.display());
    }
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, RecordError> {
    let read = match untrusted::read_state(path, MAX_BYTES) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| RecordError::Content { path: path.to_owned(), error }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(RecordError::Io { attempt: "read", path: path.to_owned(), error }),
    };
    match &read {
        Ok(_) => state_files::report_usable(path),
        Err(RecordError::Io { error, .. }) => state_files::report_damaged(path, &error.to_string()),
        Err(RecordError::Content { error, .. }) => state_files::report_damaged(path, &error.to_string()),
    }
    read
}

fn make(dir: &Path) -> Result<(), RecordError> {
    if dir.is_dir() {
        return Ok(());
    }
    disk_writes::make_directories(dir, 0o700).map_err(|error| RecordError::Io {
        attempt: "make",
        path: dir.to_owned(),
        error,
    })
}

fn write<T: Serialize>(dir: &Path, name: &str, content: &T) -> Result<(), RecordError> {
    make(dir)?;
    let path = file(dir, name);
    // Texts, numbers and maps of texts always serialize.
    let bytes = serde_json::to_vec(content).unwrap_or_default();
    let written = atomic_file::write(&path, &bytes, 0o600).map_err(|error| RecordError::Io {
        attempt: "write",
        path: path.clone(),
        error,
    });
    if written.is_ok() {
        state_files::report_usable(&path);
    }
    written
}

/// The readable records of a directory.
fn all<T: serde::de::DeserializeOwned>(dir: &Path) -> Vec<T> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let named = entries.filter(|entry| {
        entry.file_name().to_str().is_some_and(|name| name.starts_with("sha256-") && !name.ends_with(".tmp"))
    });
    named.filter_map(|entry| read(&entry.path()).ok().flatten()).collect()
}

/// Whether the runtime's name of an image equals the pod's, which may lack the default registry and tag.
fn same(listed: &str, image: &str) -> bool {
    listed == image || listed_name(image).as_deref() == Some(listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: &str = "r.example/team/app:1";

    fn reference() -> ImageRef {
        ImageRef::from("sha256:00")
    }

    fn records(dir: &tempfile::TempDir, verification: CredentialVerification) -> Records {
        Records::new(dir.path(), verification)
    }

    fn seen(id: &str, name: &str) -> RuntimeImage {
        RuntimeImage { id: id.into(), names: vec![name.to_owned()], size_bytes: 1, pinned: false }
    }

    #[test]
    fn policy_decides_which_images_need_a_proof() {
        let list = || CredentialVerification::NotAllowlisted(vec!["r.example/team/*".into(), "a".into()]);
        for (verification, image, preloaded, pulled) in [
            (CredentialVerification::Off, IMAGE, false, false),
            (CredentialVerification::Never, IMAGE, false, false),
            (CredentialVerification::NotPreloaded, IMAGE, false, true),
            (CredentialVerification::Always, IMAGE, true, true),
            (list(), IMAGE, false, false),
            (list(), "a:1", false, false),
            (list(), "a/b:1", true, true),
            (list(), "r.example/teams/x", true, true),
        ] {
            assert_eq!(verification.wants_proof(image, false), preloaded, "{verification:?} {image}");
            assert_eq!(verification.wants_proof(image, true), pulled, "{verification:?} {image}");
        }
        assert_eq!(CredentialVerification::from_policy("", &[]), CredentialVerification::NotPreloaded);
        assert_eq!(CredentialVerification::from_policy("AlwaysVerify", &[]), CredentialVerification::Always);
    }

    #[test]
    fn directories_of_records_exist_before_the_first_pull() {
        let dir = tempfile::tempdir().unwrap();
        Records::new(dir.path(), CredentialVerification::Off);
        assert!(!dir.path().join("image_manager").exists());
        records(&dir, CredentialVerification::Never);
        for name in ["pulling", "pulled"] {
            assert!(dir.path().join("image_manager").join(name).is_dir(), "{name}");
        }
    }

    #[test]
    fn image_pulled_with_node_credentials_is_for_all_pods() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(&dir, CredentialVerification::NotPreloaded);
        // Preloaded.
        assert!(!records.must_pull(IMAGE, &reference(), &[], || None));
        records.intend(IMAGE).unwrap();
        let intent = dir.path().join("image_manager/pulling");
        assert_eq!(std::fs::read_dir(&intent).unwrap().count(), 1);
        // Another pod finds it on the node during the pull.
        assert!(records.must_pull(IMAGE, &reference(), &[], || None));
        records.pulled(IMAGE, &reference(), None);
        assert_eq!(std::fs::read_dir(&intent).unwrap().count(), 0);
        assert!(!records.must_pull(IMAGE, &reference(), &[], || None));
        assert!(!records.must_pull("r.example/team/app@sha256:11", &reference(), &[], || None));
        // The same image under another name needs a proof.
        assert!(records.must_pull("other.example/app:1", &reference(), &[], || None));
        for (check, at_least) in
            [("credentialPolicyAllowed", 1), ("mustAuthenticate", 2), ("credentialRecordFound", 2)]
        {
            assert!(metrics::MUST_PULL_CHECKS.get([check]) >= at_least, "{check}");
        }
        assert!(metrics::PULL_INTENTS.get().is_some() && metrics::PULLED_RECORDS.get().is_some());
        let text =
            std::fs::read_to_string(file(&dir.path().join("image_manager/pulled"), "sha256:00")).unwrap();
        assert!(text.starts_with(
            r#"{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1beta1","lastUpdatedTime":""#
        ));
        assert!(text.ends_with(
            r#""imageRef":"sha256:00","credentialMapping":{"r.example/team/app":{"nodePodsAccessible":true}}}"#
        ));
    }

    #[test]
    fn image_pulled_with_a_secret_is_not_for_all_pods() {
        let dir = tempfile::tempdir().unwrap();
        let pulled = dir.path().join("image_manager/pulled");
        std::fs::create_dir_all(&pulled).unwrap();
        let record = r#"{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1alpha1",
            "lastUpdatedTime":"2026-01-01T00:00:00Z","imageRef":"sha256:00","credentialMapping":{"r.example/team/app":
            {"kubernetesSecrets":[{"uid":"u","namespace":"n","name":"s","credentialHash":"h"}]}}}"#;
        std::fs::write(file(&pulled, "sha256:00"), record).unwrap();
        let records = records(&dir, CredentialVerification::NotPreloaded);
        assert!(records.must_pull(IMAGE, &reference(), &[], || None));
        records.intend(IMAGE).unwrap();
        records.failed(IMAGE);
        assert!(records.must_pull(IMAGE, &reference(), &[], || None));
        let path = file(&pulled, "sha256:00");
        let is_reported = || state_files::problems().iter().any(|(damaged, _)| *damaged == path);
        std::fs::write(&path, "{").unwrap();
        assert!(!is_reported() && records.must_pull(IMAGE, &reference(), &[], || None) && is_reported());
        // Proven by a pull of the node's own.
        records.pulled(IMAGE, &reference(), None);
        assert!(!is_reported() && !records.must_pull(IMAGE, &reference(), &[], || None));
    }

    #[test]
    fn pipe_in_the_place_of_a_record_blocks_no_pull() {
        let dir = tempfile::tempdir().unwrap();
        let pulled = dir.path().join("image_manager/pulled");
        std::fs::create_dir_all(&pulled).unwrap();
        crate::util::testing::fifo(&file(&pulled, "sha256:00"));
        let must = crate::util::testing::unblocked(move || {
            records(&dir, CredentialVerification::NotPreloaded).must_pull(IMAGE, &reference(), &[], || None)
        });
        assert!(must);
    }

    #[test]
    fn pod_with_the_same_credential_may_use_the_image() {
        let secret = |uid: &str, hash: &str| PullSecret {
            uid: uid.into(),
            namespace: "n".into(),
            name: uid.into(),
            credential_hash: hash.into(),
        };
        let dir = tempfile::tempdir().unwrap();
        let records = records(&dir, CredentialVerification::NotPreloaded);
        records.intend(IMAGE).unwrap();
        records.pulled(IMAGE, &reference(), Some(&Proof::Secret(secret("a", "h1"))));
        let must = |proofs: &[PullSecret]| records.must_pull(IMAGE, &reference(), proofs, || None);
        assert!(must(&[]));
        assert!(must(&[secret("b", "h2"), secret("c", "")]));
        assert!(!must(&[secret("b", "h2"), secret("a", "h1")]));
        // The same credential in another secret, which is accepted then with another credential.
        assert!(!must(&[secret("b", "h1")]));
        assert!(!must(&[secret("b", "h2")]));
        assert!(!must(&[secret("d", "h2")]));
        let text = std::fs::read_to_string(file(&records.pulled, "sha256:00")).unwrap();
        assert!(
            text.contains(r#"{"r.example/team/app":{"kubernetesSecrets":[{"uid":"a","namespace":"n","name":"a","credentialHash":"h1"},"#),
            "{text}"
        );
        // Pulled without any: the secrets do not matter any more.
        records.pulled(IMAGE, &reference(), None);
        assert!(!must(&[]));
        records.pulled(IMAGE, &reference(), Some(&Proof::Secret(secret("a", "h1"))));
        assert!(!must(&[]));
    }

    #[test]
    fn pod_with_the_same_service_account_may_use_the_image() {
        let account = |uid: &str| PullAccount { uid: uid.into(), namespace: "n".into(), name: "sa".into() };
        let dir = tempfile::tempdir().unwrap();
        let records = records(&dir, CredentialVerification::NotPreloaded);
        for uid in ["u2", "u1"] {
            records.intend(IMAGE).unwrap();
            records.pulled(IMAGE, &reference(), Some(&Proof::Account(account(uid))));
        }
        let must = |known: Option<&str>| records.must_pull(IMAGE, &reference(), &[], || known.map(account));
        assert!(must(None) && must(Some("u3")));
        assert!(!must(Some("u1")) && !must(Some("u2")));
        let text = std::fs::read_to_string(file(&records.pulled, "sha256:00")).unwrap();
        let expected = r#"{"kubernetesServiceAccounts":[{"uid":"u1","namespace":"n","name":"sa"},{"uid":"u2","namespace":"n","name":"sa"}]}"#;
        assert!(text.contains(expected), "{text}");
        // No program runs if the policy needs no proof, and for an image that only Secrets have.
        let list = vec!["r.example/team/*".to_owned()];
        for verification in [CredentialVerification::Never, CredentialVerification::NotAllowlisted(list)] {
            let records = Records::new(dir.path(), verification);
            assert!(!records.must_pull(IMAGE, &reference(), &[], || panic!("no account is looked up")));
        }
        let other = ImageRef::from("sha256:01");
        let secret = PullSecret { credential_hash: "h".into(), ..PullSecret::default() };
        records.intend(IMAGE).unwrap();
        records.pulled(IMAGE, &other, Some(&Proof::Secret(secret)));
        assert!(records.must_pull(IMAGE, &other, &[], || panic!("no account is looked up")));
        records.pulled(IMAGE, &reference(), None);
        assert!(!must(None));
    }

    #[test]
    fn unfinished_pulls_of_a_crash_need_a_proof() {
        let dir = tempfile::tempdir().unwrap();
        for image in [IMAGE, "gone:1", "busybox"] {
            records(&dir, CredentialVerification::NotPreloaded).intend(image).unwrap();
        }
        let records = records(&dir, CredentialVerification::NotPreloaded);
        assert!(records.must_pull(IMAGE, &reference(), &[], || None));
        let images = [seen("sha256:00", IMAGE), seen("sha256:01", "docker.io/library/busybox:latest")];
        records.settle(&images, Timestamp::now());
        assert_eq!(std::fs::read_dir(&records.pulling).unwrap().count(), 0);
        assert_eq!(std::fs::read_dir(&records.pulled).unwrap().count(), 2);
        assert!(records.must_pull(IMAGE, &reference(), &[], || None));
        assert!(records.must_pull("busybox", &ImageRef::from("sha256:01"), &[], || None));
        // Only records older than the list are compared with it.
        records.settle(&images[..1], Timestamp::UNIX_EPOCH);
        assert_eq!(std::fs::read_dir(&records.pulled).unwrap().count(), 2);
        let later = Timestamp::from_second(Timestamp::now().as_second() + 60).unwrap();
        records.settle(&images[..1], later);
        assert_eq!(std::fs::read_dir(&records.pulled).unwrap().count(), 1);
    }

    #[test]
    fn no_image_is_pulled_if_intent_cannot_be_written() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("image_manager"), "").unwrap();
        let records = records(&dir, CredentialVerification::NotPreloaded);
        let error = super::super::PullError::from(records.intend(IMAGE).unwrap_err()).to_string();
        assert!(error.starts_with("failed to record image pull intent: cannot make"));
        Records::new(dir.path(), CredentialVerification::Off).intend(IMAGE).unwrap();
    }
}
