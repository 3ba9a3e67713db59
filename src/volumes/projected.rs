//! projected: files of several sources in one volume.
//!
//! DIFFERS: without an API server the Go kubelet refuses every projected volume. Files that depend
//! on the pod alone need none, and are made here.

use std::time::{Duration, Instant};

use super::atomic_writer::{File, Payload};
use super::config_map::Choice;
use super::downward_api::{self, DEFAULT_MODE, MAX_PROBLEMS};
use super::error::VolumeError;
use super::file_owner::{FileOwners, user_id};
use super::plugin::{FileSources, Files, FilesRequest, Plugin};
use crate::kube::objects::Kind;
use crate::kube::pod_certificates::CertificateError;
use crate::kube::{PodDependencies, PodObjects};
use crate::model::api::{
    PodCertificateProjection, ProjectedVolumeSource, ServiceAccountTokenProjection, VolumeProjection,
};
use crate::model::event::EventSink;
use crate::model::fields::NodeAllocatable;
use crate::model::pod::Pod;
use crate::util::stop::StopToken;

/// A source that fails after this time has an API server that does not respond: the others would wait, too.
const SILENCE: Duration = Duration::from_secs(10);
/// The mode of a token's or certificate's file for one particular user.
const PRIVATE_MODE: u32 = 0o600;

impl Plugin for ProjectedVolumeSource {
    fn name(&self) -> &'static str {
        "kubernetes.io/projected"
    }

    fn files(&self) -> Option<&dyn Files> {
        Some(self)
    }
}

impl Files for ProjectedVolumeSource {
    fn payload(&self, request: &FilesRequest<'_>) -> Result<Payload, VolumeError> {
        let FileSources { api, allocatable, events, has_user_fields, .. } = *request.sources;
        let objects = request.objects().ok();
        let inputs = ProjectionInputs { objects, api, allocatable, events, has_user_fields };
        payload(request.pod, request.volume, self, &inputs, request.stop)
    }

    fn is_at_hand(&self, request: &FilesRequest<'_>) -> bool {
        let FilesRequest { pod, volume, .. } = *request;
        self.sources.iter().flatten().enumerate().all(|(index, source)| {
            if let Some(source) = &source.config_map {
                return request.has(Kind::ConfigMap, &source.name);
            }
            if let Some(source) = &source.secret {
                return request.has(Kind::Secret, &source.name);
            }
            // Without an API server there is no request.
            let Some(api) = request.sources.api else { return true };
            if let Some(source) = &source.service_account_token {
                let audience = source.audience.as_deref().unwrap_or_default();
                return api.tokens.is_cached(pod, audience, source.expiration_seconds);
            }
            if let Some(source) = &source.cluster_trust_bundle {
                return api.trust.bundles.is_cached(source);
            }
            source.pod_certificate.is_none() || api.trust.certificates.is_cached(pod.uid(), (volume, index))
        })
    }
}

/// What the files are made of.
pub(super) struct ProjectionInputs<'a> {
    /// ConfigMaps and Secrets; `None` without any source of them.
    pub(super) objects: Option<PodObjects<'a>>,
    /// Tokens and certificates.
    pub(super) api: Option<&'a PodDependencies>,
    pub(super) allocatable: &'a NodeAllocatable,
    /// The sink of warnings about certificates.
    pub(super) events: &'a EventSink,
    /// The feature gate `AtomicWriteVolumeUserFields`.
    pub(super) has_user_fields: bool,
}

/// What the files of all sources have, if an item does not say otherwise.
#[derive(Clone, Copy)]
struct FileDefaults {
    mode: Option<i32>,
    owners: FileOwners,
}

/// The files of the volume; of two with the same path the later one is used.
pub(super) fn payload(
    pod: &Pod,
    volume: &str,
    source: &ProjectedVolumeSource,
    inputs: &ProjectionInputs<'_>,
    stop: &StopToken,
) -> Result<Payload, VolumeError> {
    let owners = FileOwners::new(inputs.has_user_fields, source.default_user);
    let defaults = FileDefaults { mode: source.default_mode, owners };
    let mut payload = Payload::default();
    let mut problems: Vec<String> = Vec::new();
    // Each source that fails may have cost as much as a whole volume before.
    let mut failed = 0;
    for (index, projection) in source.sources.iter().flatten().enumerate() {
        let begun = Instant::now();
        let files = if let Some(downward) = &projection.downward_api {
            let items = downward.items.as_deref();
            downward_api::payload(pod, items, (defaults.mode, defaults.owners), inputs.allocatable)
        } else {
            let without_client = || VolumeError::Content {
                problem: format!(
                    "cannot setup projected volume {volume} because kube client is not configured"
                ),
            };
            match of_objects(pod, projection, defaults, inputs.objects, stop) {
                Some(files) => files,
                None => {
                    let api = inputs.api.ok_or_else(without_client)?;
                    let known = (api, inputs.events, stop);
                    of_the_api(pod, (volume, index), projection, defaults, known)
                }
            }
        };
        match files {
            Ok(files) => payload.extend(files)?,
            Err(VolumeError::Stopping) => return Err(VolumeError::Stopping),
            // All problems up to a limit are reported together.
            Err(error) => {
                let text = error.to_string();
                if !problems.contains(&text) {
                    problems.push(text);
                }
                failed += 1;
                if failed >= MAX_PROBLEMS || begun.elapsed() >= SILENCE {
                    break;
                }
            }
        }
    }
    match problems.as_slice() {
        [] => Ok(payload),
        [problem] => Err(VolumeError::Content { problem: problem.clone() }),
        many => Err(VolumeError::Content { problem: format!("[{}]", many.join(", ")) }),
    }
}

/// The files of a ConfigMap or a Secret; `None` for another source, or without a source of objects.
fn of_objects(
    pod: &Pod,
    projection: &VolumeProjection,
    defaults: FileDefaults,
    objects: Option<PodObjects<'_>>,
    stop: &StopToken,
) -> Option<Result<Payload, VolumeError>> {
    let namespace = pod.namespace();
    let objects = objects?;
    let (default_mode, owners) = (defaults.mode, defaults.owners);
    if let Some(source) = &projection.config_map {
        let items = source.items.as_deref();
        let optional = source.optional;
        let (kind, name) = (Kind::ConfigMap, source.name.as_str());
        let choice = Choice { kind, name, items, default_mode, owners, optional };
        return Some(choice.payload(objects.config_map(namespace, &source.name, stop)));
    }
    let source = projection.secret.as_ref()?;
    let items = source.items.as_deref();
    let optional = source.optional;
    let (kind, name) = (Kind::Secret, source.name.as_str());
    let choice = Choice { kind, name, items, default_mode, owners, optional };
    Some(choice.payload(objects.secret(namespace, &source.name, stop)))
}

fn of_the_api(
    pod: &Pod,
    place: (&str, usize),
    projection: &VolumeProjection,
    defaults: FileDefaults,
    (api, events, stop): (&PodDependencies, &EventSink, &StopToken),
) -> Result<Payload, VolumeError> {
    if let Some(source) = &projection.service_account_token {
        return token(pod, source, defaults, (api, stop));
    }
    if let Some(source) = &projection.cluster_trust_bundle {
        let data = api.trust.bundles.file(source);
        let data = data.map_err(|error| api_failure(&error, error.is_stopping()))?;
        let mut payload = Payload::default();
        payload.insert(&source.path, private(pod, data, (defaults, source.user)))?;
        return Ok(payload);
    }
    if let Some(source) = &projection.pod_certificate {
        return certificate(pod, place, source, defaults, (api, events, stop));
    }
    // A source without a field.
    Ok(Payload::default())
}

/// A failure of a request for a source; the end of the agent is not one.
fn api_failure(error: &dyn std::fmt::Display, is_stopping: bool) -> VolumeError {
    if is_stopping { VolumeError::Stopping } else { VolumeError::Content { problem: error.to_string() } }
}

fn token(
    pod: &Pod,
    source: &ServiceAccountTokenProjection,
    defaults: FileDefaults,
    (api, stop): (&PodDependencies, &StopToken),
) -> Result<Payload, VolumeError> {
    let audience = source.audience.as_deref().unwrap_or_default();
    let token = api
        .tokens
        .get(pod, audience, source.expiration_seconds, stop)
        .map_err(|error| api_failure(&error, error.is_stopping()))?;
    let mut payload = Payload::default();
    let data = token.expose().as_bytes().to_vec();
    payload.insert(&source.path, private(pod, data, (defaults, source.user)))?;
    Ok(payload)
}

/// The files of a certificate and its key.
fn certificate(
    pod: &Pod,
    place: (&str, usize),
    source: &PodCertificateProjection,
    defaults: FileDefaults,
    (api, events, stop): (&PodDependencies, &EventSink, &StopToken),
) -> Result<Payload, VolumeError> {
    let credential = api
        .trust
        .certificates
        .get(pod, place, source, (events, stop))
        .map_err(|error| api_failure(&error, error == CertificateError::Stopping))?;
    let (key, chain) = (credential.key(), credential.chain());
    let mut payload = Payload::default();
    for (path, data) in [
        (&source.credential_bundle_path, format!("{key}{chain}")),
        (&source.key_path, key.to_owned()),
        (&source.certificate_chain_path, chain.to_owned()),
    ] {
        if let Some(path) = path.as_deref().filter(|path| !path.is_empty()) {
            payload.insert(path, private(pod, data.into_bytes(), (defaults, source.user)))?;
        }
    }
    Ok(payload)
}

/// A file that is readable for the user that the pod names for it, or for the pod's user if all containers
/// have the same. With an fsGroup the group's permission is set with the group of the volume.
fn private(pod: &Pod, data: Vec<u8>, (defaults, user): (FileDefaults, Option<i64>)) -> File {
    let user = defaults.owners.owner(user).or_else(|| one_user(pod));
    let has_group = pod.spec().security_context.as_ref().is_some_and(|context| context.fs_group.is_some());
    let mode = if user.is_some() || has_group {
        PRIVATE_MODE
    } else {
        u32::try_from(defaults.mode.unwrap_or(DEFAULT_MODE)).unwrap_or_default()
    };
    File { owner: user, ..File::new(data, mode) }
}

/// The user that all containers run as, ephemeral ones included, if each names one and it is
/// the same (Go: pkg/volume/util FsUserFrom).
fn one_user(pod: &Pod) -> Option<u32> {
    let of_pod = pod.spec().security_context.as_ref().and_then(|context| context.run_as_user);
    let mut found: Option<i64> = None;
    let ephemeral = pod.spec().ephemeral_containers.iter().flatten();
    let contexts = pod
        .all_containers()
        .map(|container| &container.security_context)
        .chain(ephemeral.map(|container| &container.security_context));
    for context in contexts {
        let own = context.as_ref().and_then(|context| context.run_as_user);
        let user = own.or(of_pod)?;
        if *found.get_or_insert(user) != user {
            return None;
        }
    }
    found.and_then(user_id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::error::ApiError;
    use crate::kube::objects::{Key, Object, Objects};
    use crate::kube::pod_certificates::{CertificateApi, PodCertificates, Request};
    use crate::kube::tokens::{IssuedToken, TokenApi, Tokens};
    use crate::kube::trust_bundles::{Bundle, BundleApi, Query, TrustBundles};
    use crate::kube::{LocalObjects, ProjectedCertificates};
    use serde_json::{Value, json};

    fn pod(spec: Value) -> Pod {
        let mut spec = spec;
        spec.as_object_mut().unwrap().entry("containers").or_insert(json!([]));
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap())
    }

    fn api() -> PodDependencies {
        let object = |value: &str| Object {
            data: [("k".to_owned(), value.as_bytes().to_vec())].into(),
            ..Object::default()
        };
        let objects = Objects::fixed(vec![
            (Key::new(Kind::ConfigMap, "n", "kube-root-ca.crt"), object("ca")),
            (Key::new(Kind::Secret, "n", "s"), object("pw")),
        ]);
        objects.set(&Key::new(Kind::ConfigMap, "n", "gone"), None);
        objects.set(&Key::new(Kind::Secret, "n", "gone"), None);
        PodDependencies::for_tests(objects)
    }

    fn collect_for(pod: &Pod, source: Value, api: Option<&PodDependencies>) -> Result<Payload, String> {
        let source: ProjectedVolumeSource = serde_json::from_value(source).unwrap();
        let local = LocalObjects::default();
        let inputs = ProjectionInputs {
            objects: PodObjects::for_pod(pod, api, &local),
            api,
            allocatable: &NodeAllocatable::default(),
            events: &EventSink::new().0,
            has_user_fields: true,
        };
        payload(pod, "v", &source, &inputs, &StopToken::never()).map_err(|error| error.to_string())
    }

    fn collect(source: Value) -> Result<Payload, String> {
        collect_for(&pod(json!({})), source, None)
    }

    #[test]
    fn later_source_replaces_file_of_earlier_one() {
        let source = |path: &str, field: &str| json!({"downwardAPI": {"items": [{"path": path, "fieldRef": {"fieldPath": field}}]}});
        let files = collect(json!({"defaultMode": 256, "sources": [
            source("a", "metadata.name"), source("b", "metadata.name"), source("a", "metadata.uid")]}))
        .unwrap();
        let file = |path: &str| files.get(path).map(|file| (&*file.data, file.mode));
        assert_eq!(file("a"), Some((&b"u"[..], 0o400)));
        assert_eq!(file("b"), Some((&b"p"[..], 0o400)));
        assert_eq!(collect(json!({})), Ok(Payload::default()));
    }

    #[test]
    fn api_sources_fail_in_standalone_mode() {
        for source in [
            json!({"secret": {"name": "s"}}),
            json!({"configMap": {"name": "c"}}),
            json!({"serviceAccountToken": {"path": "token"}}),
            json!({"clusterTrustBundle": {"path": "ca"}}),
        ] {
            assert_eq!(
                collect(json!({"sources": [source]})).unwrap_err(),
                "cannot setup projected volume v because kube client is not configured"
            );
        }
    }

    #[test]
    fn static_pod_gets_local_objects_with_and_without_an_api_server() {
        let local = LocalObjects::default();
        let object = Object { data: [("k".to_owned(), b"here".to_vec())].into(), ..Object::default() };
        let keys = [Key::new(Kind::Secret, "n", "s"), Key::new(Kind::ConfigMap, "n", "kube-root-ca.crt")];
        let objects = keys.into_iter().map(|key| (key, std::sync::Arc::new(object.clone())));
        local.replace(objects.collect(), Vec::new());
        let source = json!({"sources": [{"secret": {"name": "s"}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "k", "path": "map"}]}}]});
        let source: ProjectedVolumeSource = serde_json::from_value(source).unwrap();
        let mut object = pod(json!({})).object().clone();
        let annotations = object.metadata.annotations.get_or_insert_default();
        annotations.insert("kubernetes.io/config.source".to_owned(), "file".to_owned());
        let pod = Pod::from(object);
        let api = api();
        for api in [None, Some(&api)] {
            let inputs = ProjectionInputs {
                objects: PodObjects::for_pod(&pod, api, &local),
                api,
                allocatable: &NodeAllocatable::default(),
                events: &EventSink::new().0,
                has_user_fields: true,
            };
            let files = payload(&pod, "v", &source, &inputs, &StopToken::never()).unwrap();
            for path in ["k", "map"] {
                assert_eq!(files.get(path).map(|file| &*file.data), Some(&b"here"[..]), "{path}");
            }
        }
    }

    /// The volume that the API server adds to every pod.
    #[test]
    fn service_account_volume_has_token_ca_and_namespace() {
        let source = json!({"defaultMode": 420, "sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "k", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}}]});
        for (spec, mode, owner) in [
            (json!({"serviceAccountName": "sa"}), 0o644, None),
            (json!({"serviceAccountName": "sa", "securityContext": {"fsGroup": 7}}), 0o600, None),
            (
                json!({"serviceAccountName": "sa", "securityContext": {"runAsUser": 1000}, "containers": [{"name": "c"}]}),
                0o600,
                Some(1000),
            ),
        ] {
            let files = collect_for(&pod(spec), source.clone(), Some(&api())).unwrap();
            let text = |path: &str| String::from_utf8(files.get(path).unwrap().data.to_vec()).unwrap();
            assert_eq!(
                (text("token"), text("ca.crt"), text("namespace")),
                ("n/sa null".into(), "ca".into(), "n".into())
            );
            let token = files.get("token").unwrap();
            assert_eq!((token.mode, token.owner), (mode, owner));
            assert_eq!(files.get("ca.crt").map(|file| (file.mode, file.owner)), Some((0o644, None)));
        }
    }

    #[test]
    fn files_of_all_sources_have_the_owners_that_the_pod_names() {
        let sources = json!([
            {"serviceAccountToken": {"path": "token", "user": 7}},
            {"serviceAccountToken": {"path": "other"}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "k", "path": "ca", "user": 8}]}},
            {"secret": {"name": "s"}},
            {"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}, "user": 9}]}}]);
        let spec = json!({"serviceAccountName": "sa", "securityContext": {"runAsUser": 1000},
            "containers": [{"name": "c"}]});
        let pod = pod(spec);
        let expect = |source: Value, expected: [(&str, u32, Option<u32>); 5]| {
            let files = collect_for(&pod, source, Some(&api())).unwrap();
            for (path, mode, owner) in expected {
                assert_eq!(
                    files.get(path).map(|file| (file.mode, file.owner)),
                    Some((mode, owner)),
                    "{path}"
                );
            }
        };
        expect(
            json!({"defaultUser": 5, "sources": sources}),
            [
                ("token", 0o600, Some(7)),
                ("other", 0o600, Some(5)),
                ("ca", 0o644, Some(8)),
                ("k", 0o644, Some(5)),
                ("name", 0o644, Some(9)),
            ],
        );
        expect(
            json!({"sources": sources}),
            [
                ("token", 0o600, Some(7)),
                ("other", 0o600, Some(1000)),
                ("ca", 0o644, Some(8)),
                ("k", 0o644, None),
                ("name", 0o644, Some(9)),
            ],
        );
    }

    #[test]
    fn error_names_problems_of_all_sources() {
        let (map, secret) = (json!({"configMap": {"name": "gone"}}), json!({"secret": {"name": "gone"}}));
        for (sources, expected) in [
            (json!([map, secret]), "[configmap \"gone\" not found, secret \"gone\" not found]"),
            (json!([map, map]), "configmap \"gone\" not found"),
            (
                json!([{"secret": {"name": "s", "items": [{"key": "x", "path": "y"}]}}]),
                "references non-existent secret key: x",
            ),
            (
                json!([{"serviceAccountToken": {"path": "t"}}]),
                "failed to fetch token: serviceaccounts \"missing\" not found",
            ),
            (
                json!([{"clusterTrustBundle": {"path": "ca"}}]),
                "ClusterTrustBundle projection requires either name or signerName to be set",
            ),
            (
                json!([{"podCertificate": {"signerName": "s", "keyType": "RSA3072"}}]),
                "key type \"RSA3072\" is not supported by this agent: it supports ECDSAP256, ECDSAP384 and ED25519",
            ),
        ] {
            let pod = pod(json!({"serviceAccountName": "missing"}));
            let found = collect_for(&pod, json!({"sources": sources}), Some(&api()));
            assert_eq!(found.unwrap_err(), expected);
        }
        let optional = json!({"sources": [{"secret": {"name": "gone", "optional": true}}, {}]});
        assert_eq!(collect_for(&pod(json!({})), optional, Some(&api())), Ok(Payload::default()));
    }

    /// A client that was shut down.
    struct Stopped;

    impl TokenApi for Stopped {
        fn create(&self, _: &str, _: &str, _: &Value, _: &StopToken) -> Result<IssuedToken, ApiError> {
            Err(ApiError::for_test_stopping())
        }
    }

    impl BundleApi for Stopped {
        fn read_bundles(&self, _: &Query) -> Result<Vec<Bundle>, ApiError> {
            Err(ApiError::for_test_stopping())
        }
    }

    impl CertificateApi for Stopped {
        fn account_uid(&self, _: &str, _: &str) -> Result<String, ApiError> {
            Err(ApiError::for_test_stopping())
        }

        fn node_uid(&self, _: &str) -> Result<String, ApiError> {
            Err(ApiError::for_test_stopping())
        }

        fn create_request(&self, _: &str, _: &Value) -> Result<Request, ApiError> {
            Err(ApiError::for_test_stopping())
        }

        fn read_request(&self, _: &str, _: &str) -> Result<Option<Request>, ApiError> {
            Err(ApiError::for_test_stopping())
        }
    }

    #[test]
    fn end_of_the_agent_is_no_failure_of_a_source() {
        let api = PodDependencies {
            tokens: Tokens::new(Box::new(Stopped)),
            trust: ProjectedCertificates {
                bundles: TrustBundles::new(Box::new(Stopped)),
                certificates: PodCertificates::new(Box::new(Stopped)),
            },
            ..api()
        };
        for source in [
            json!({"serviceAccountToken": {"path": "t"}}),
            json!({"clusterTrustBundle": {"name": "b", "path": "ca"}}),
            json!({"podCertificate": {"signerName": "s", "keyType": "ED25519"}}),
        ] {
            // The failure of an earlier source does not hide it.
            let sources = json!({"sources": [{"secret": {"name": "gone"}}, source]});
            let found = collect_for(&pod(json!({})), sources.clone(), Some(&api));
            assert_eq!(found.unwrap_err(), VolumeError::Stopping.to_string(), "{sources}");
        }
    }

    /// A comparison of each problem with all others would take minutes.
    #[test]
    fn number_of_reported_problems_is_limited() {
        let sources: Vec<Value> = (0..100)
            .map(|n| json!({"secret": {"name": "s", "items": [{"key": format!("x{n}"), "path": "y"}]}}))
            .collect();
        let error = collect_for(&pod(json!({})), json!({"sources": sources}), Some(&api())).unwrap_err();
        assert_eq!(error.matches("non-existent").count(), MAX_PROBLEMS, "{error}");
        let items: Vec<Value> =
            (0..100).map(|n| json!({"path": "y", "fieldRef": {"fieldPath": format!("x{n}")}})).collect();
        let error = collect(json!({"sources": [{"downwardAPI": {"items": items}}]})).unwrap_err();
        assert_eq!(error.matches("unsupported fieldPath").count(), MAX_PROBLEMS, "{error}");
    }

    #[test]
    fn token_owner_is_the_user_common_to_all_containers() {
        let user = |id: i64| json!({"runAsUser": id});
        for (spec, expected) in [
            (json!({"containers": [{"name": "c"}]}), None),
            (json!({"securityContext": user(5), "containers": [{"name": "c"}]}), Some(5)),
            (json!({"containers": [{"name": "c", "securityContext": user(5)}]}), Some(5)),
            (json!({"containers": [{"name": "c", "securityContext": user(5)}, {"name": "d"}]}), None),
            (
                json!({"securityContext": user(5), "initContainers": [{"name": "i", "securityContext": user(6)}],
                    "containers": [{"name": "c"}]}),
                None,
            ),
            (
                json!({"containers": [{"name": "c", "securityContext": user(5)}],
                    "ephemeralContainers": [{"name": "e"}]}),
                None,
            ),
            (json!({"securityContext": user(-1), "containers": [{"name": "c"}]}), None),
            (json!({}), None),
        ] {
            assert_eq!(one_user(&pod(spec.clone())), expected, "{spec}");
        }
    }
}
