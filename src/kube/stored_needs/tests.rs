use super::super::objects::Object;
use super::super::objects::stored_object::StoredObject;
use super::*;
use crate::model::api::PodCertificateProjection;
use crate::offline::Phase;
use crate::offline::test_store::TestStore;
use serde_json::{Value, json};

fn pod(metadata: Value, spec: Value) -> Pod {
    let mut value = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
    for (field, content) in metadata.as_object().unwrap() {
        value["metadata"][field] = content.clone();
    }
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
}

fn names(keys: &BTreeSet<StoredKey>) -> Vec<String> {
    let is_named = |key: &&StoredKey| !matches!(key.kind, StoredKind::Token | StoredKind::PodCertificate);
    keys.iter().filter(is_named).map(|key| format!("{} {}", key.kind.word(), key.name)).collect()
}

fn token(audience: &str, seconds: Option<i64>) -> StoredKey {
    TokenParameters { namespace: "n", account: "a", audience, seconds }.key("u")
}

#[test]
fn a_pod_needs_what_is_behind_its_claims() {
    let pod = pod(
        json!({}),
        json!({"serviceAccountName": "a", "runtimeClassName": "gvisor", "containers": [],
            "imagePullSecrets": [{"name": "pull"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "gpu"}],
            "volumes": [
                {"name": "m", "configMap": {"name": "m"}},
                {"name": "t", "projected": {"sources": [
                    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
                    {"clusterTrustBundle": {"name": "ca", "path": "ca"}},
                    {"clusterTrustBundle": {"signerName": "example.org/s", "path": "s"}},
                    {"podCertificate": {"signerName": "example.org/s", "keyType": "ED25519"}}]}},
                {"name": "c", "persistentVolumeClaim": {"claimName": "c"}},
                {"name": "e", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}},
                {"name": "i", "csi": {"driver": "inline", "nodePublishSecretRef": {"name": "publish"}}}]}),
    );
    let stored = |key: &StoredKey| {
        let body = match (key.kind, key.name.as_str()) {
            (StoredKind::Claim, "n/c") => json!({"spec": {"volumeName": "pv"}}),
            (StoredKind::Volume, "pv") => json!({"spec": {"csi": {"driver": "disks", "volumeHandle": "h",
                "nodeStageSecretRef": {"name": "stage", "namespace": "storage"}}}}),
            (StoredKind::CsiDriver, "inline") => {
                json!({"spec": {"tokenRequests": [{"audience": "vault", "expirationSeconds": 600}]}})
            }
            (StoredKind::CsiDriver, "disks") => Value::Null,
            _ => return None,
        };
        Some(Secret::new(body.to_string().into_bytes()))
    };
    let keys = keys_of(&pod, &stored);
    let attachment = format!("attachment {}", attachment_name("h", "disks", ""));
    let expected = [
        "pod u",
        "configmap n/m",
        "secret n/publish",
        "secret n/pull",
        "secret storage/stage",
        "runtimeclass gvisor",
        "services default",
        "services n",
        "claim n/c",
        "claim n/p-e",
        "volume pv",
        "csidriver disks",
        "csidriver inline",
        attachment.as_str(),
        "trustbundles name/ca",
        "trustbundles signer/example.org/s",
        "resourceclaim n/gpu",
    ];
    assert_eq!(names(&keys), expected);
    assert!(keys.contains(&token("", Some(3607))) && keys.contains(&token("vault", Some(600))));
    let source: PodCertificateProjection =
        serde_json::from_value(json!({"signerName": "example.org/s", "keyType": "ED25519"})).unwrap();
    assert!(keys.contains(&certificate_key("u", ("t", 3), &source)));
    assert_eq!(keys.len(), expected.len() + 3);
    let without = keys_of(&pod, &|_| None);
    assert!(!without.contains(&volume_key("pv")) && without.contains(&claim_key("n", "c")));
    // A body that is no JSON.
    assert_eq!(keys_of(&pod, &|_| Some(Secret::new(b"{".to_vec()))), without);
}

/// A controller makes the claims of templates and of extended resources, and writes their names.
#[test]
fn a_pod_needs_the_resource_claims_that_were_made_for_it() {
    let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {"containers": [], "resourceClaims": [{"name": "t", "resourceClaimTemplateName": "t"}]},
        "status": {"resourceClaimStatuses": [{"name": "t", "resourceClaimName": "p-t-x"}, {"name": "none"}],
            "extendedResourceClaimStatus": {"resourceClaimName": "p-extended", "requestMappings": []}}});
    let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap());
    let names = names(&keys_of(&pod, &|_| None));
    assert_eq!(names[3..], ["resourceclaim n/p-extended", "resourceclaim n/p-t-x"], "{names:?}");
}

/// `coracle offline check` would report an object that no start reads.
#[test]
fn a_start_reads_the_attachment_only_with_the_annotation_and_the_secret_for_growth_only_to_grow() {
    let start_keys = |annotations: Value, attaches: bool, size: &str| {
        let pod = pod(
            json!({"annotations": annotations}),
            json!({"containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
                "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}),
        );
        let stored = |key: &StoredKey| {
            let body = match key.kind {
                StoredKind::Claim => json!({"spec": {"volumeName": "pv"},
                    "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}}),
                StoredKind::Volume => json!({"metadata": {"name": "pv"}, "spec": {
                    "capacity": {"storage": size},
                    "csi": {"driver": "disks", "volumeHandle": "h",
                        "nodeStageSecretRef": {"name": "stage", "namespace": "s"},
                        "nodeExpandSecretRef": {"name": "expand", "namespace": "s"}}}}),
                StoredKind::CsiDriver => json!({"spec": {"attachRequired": attaches}}),
                _ => return None,
            };
            Some(Secret::new(body.to_string().into_bytes()))
        };
        let (start, all) = (start_keys_of(&pod, &stored), keys_of(&pod, &stored));
        assert!(start.is_subset(&all), "what is read must not be collected: {start:?}");
        let kinds = [StoredKind::Secret, StoredKind::Attachment];
        let names = |keys: &BTreeSet<StoredKey>| {
            let keys = keys.iter().filter(|key| kinds.contains(&key.kind));
            keys.map(|key| key.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(&all).len(), 3, "{all:?}");
        names(&start)
    };
    let (none, bold) = (json!({}), json!({"coracle.dev/offline-volumes": "use-attached"}));
    let attachment = attachment_name("h", "disks", "");
    assert_eq!(start_keys(none, true, "1Gi"), ["s/stage"]);
    assert_eq!(start_keys(bold.clone(), true, "1Gi"), ["s/stage", attachment.as_str()]);
    assert_eq!(start_keys(bold.clone(), false, "1Gi"), ["s/stage"]);
    assert_eq!(start_keys(bold, false, "2Gi"), ["s/expand", "s/stage"]);
    let other = json!({"coracle.dev/offline-volumes": "yes"});
    assert_eq!(start_keys(other, true, "1Gi"), ["s/stage"]);
}

/// The agent requests no token for a volume that no container mounts, so that the check would always miss it.
#[test]
fn a_start_reads_nothing_for_a_volume_that_no_container_uses() {
    let token = |audience: &str| json!({"sources": [{"serviceAccountToken": {"path": "token", "audience": audience}}]});
    let pod = pod(
        json!({}),
        json!({"serviceAccountName": "a",
            "containers": [{"name": "c", "volumeMounts": [{"name": "used", "mountPath": "/v"}]}],
            "volumes": [{"name": "used", "projected": token("x")}, {"name": "unused", "projected": token("y")}]}),
    );
    let [used, unused] = ["x", "y"].map(|audience| self::token(audience, None));
    let (start, all) = (start_keys_of(&pod, &|_| None), keys_of(&pod, &|_| None));
    assert!(start.contains(&used) && !start.contains(&unused), "{start:?}");
    assert!(all.contains(&used) && all.contains(&unused), "an ephemeral container may use it: {all:?}");
}

/// Where the start reads it: otherwise it would be removed from the store.
#[test]
fn secret_of_a_volume_without_a_namespace_is_in_that_of_the_pod() {
    let pod = pod(
        json!({}),
        json!({"containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}),
    );
    let keys = |source: &Value, purpose| {
        let stored = |key: &StoredKey| {
            let body = match key.kind {
                StoredKind::Claim => {
                    json!({"metadata": {"name": "c", "namespace": "n"}, "spec": {"volumeName": "pv"}})
                }
                StoredKind::Volume => json!({"metadata": {"name": "pv"}, "spec": source}),
                _ => return None,
            };
            Some(Secret::new(body.to_string().into_bytes()))
        };
        let keys = keys_for(&pod, &stored, purpose).into_iter();
        keys.filter(|key| key.kind == StoredKind::Secret).map(|key| key.name).collect::<Vec<_>>()
    };
    let iscsi = |chap: bool| {
        json!({"iscsi": {"targetPortal": "t", "iqn": "q", "lun": 0, "chapAuthSession": chap,
            "secretRef": {"name": "s"}}})
    };
    let flex = json!({"flexVolume": {"driver": "d", "secretRef": {"name": "s"}}});
    for source in [&flex, &iscsi(true)] {
        for purpose in [Purpose::Storage, Purpose::Start] {
            assert_eq!(keys(source, purpose), ["n/s"], "{source}");
        }
    }
    assert_eq!(keys(&iscsi(false), Purpose::Storage), ["n/s"]);
    assert!(keys(&iscsi(false), Purpose::Start).is_empty(), "it is not read");
    let other = json!({"flexVolume": {"driver": "d", "secretRef": {"name": "s", "namespace": "m"}}});
    assert_eq!(keys(&other, Purpose::Storage), ["m/s"]);
}

#[test]
fn mirror_pods_need_nothing() {
    let mirror = json!({"annotations": {"kubernetes.io/config.mirror": "x"}});
    let volumes = json!({"containers": [], "volumes": [{"name": "m", "configMap": {"name": "m"}}]});
    assert!(keys_of(&pod(mirror, volumes), &|_| None).is_empty());
}

#[test]
fn tokens_of_different_requests_have_different_names() {
    let keys = [
        token("", None),
        token("", Some(600)),
        token("a", None),
        token("a", Some(600)),
        TokenParameters { namespace: "n", account: "b", audience: "", seconds: None }.key("u"),
        TokenParameters { namespace: "n", account: "a", audience: "", seconds: None }.key("v"),
    ];
    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len());
    assert!(keys[0].belongs_to("u") && keys[5].belongs_to("v"));
}

/// A server that has lost its data has no object; the store removes files late.
#[test]
fn absence_is_stored_only_if_no_object_was() {
    let (store, key) = (TestStore::new(), driver_key("d"));
    let put = |driver: Option<CsiDriver>| {
        store.offline.put_found(key.clone(), driver.as_ref());
        store.changes().remove(&key)
    };
    assert_eq!(put(None), None, "undecided");
    store.enter(Phase::Online);
    assert_eq!(put(None), Some(Some("null".to_owned())));
    assert_eq!(put(None), None, "it is stored already");
    assert!(put(Some(CsiDriver::default())).is_some_and(|body| body.is_some()));
    store.enter(Phase::Held);
    assert_eq!(put(None), None);
    store.enter(Phase::Online);
    assert_eq!(put(None), Some(None));
}

#[test]
fn stored_objects_are_equal_after_a_round_trip() {
    let object = Object {
        uid: "u".into(),
        resource_version: "7".into(),
        secret_type: "Opaque".into(),
        immutable: true,
        data: [("pw".to_owned(), vec![0, 255, b'"'])].into(),
        binary_data: [("b".to_owned(), Vec::new())].into(),
    };
    let body = serde_json::to_vec(&StoredObject::from(&object)).unwrap();
    assert!(Object::from(serde_json::from_slice::<StoredObject>(&body).unwrap()) == object);

    let claim: Claim = serde_json::from_value(json!({
        "metadata": {"name": "c", "namespace": "n", "uid": "cu", "deletionTimestamp": "2026-01-01T00:00:00Z",
            "finalizers": ["f"], "annotations": {"a": "b"}, "ownerReferences": [{"uid": "o", "controller": true}]},
        "spec": {"volumeName": "pv", "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
        "status": {"phase": "Bound", "capacity": {"storage": "1Gi"},
            "allocatedResources": {"storage": "2Gi"}, "allocatedResourceStatuses": {"storage": "NodeResizePending"}}}))
    .unwrap();
    let body = serde_json::to_vec(&claim).unwrap();
    assert_eq!(serde_json::from_slice::<Claim>(&body).unwrap(), claim);

    for source in [
        json!({"hostPath": {"path": "/d"}}),
        json!({"local": {"path": "/d", "fsType": "ext4"}}),
        json!({"nfs": {"server": "s", "path": "/d"}}),
        json!({"iscsi": {"targetPortal": "t", "iqn": "i", "lun": 1, "chapAuthSession": true, "secretRef": {"name": "s"}}}),
        json!({"flexVolume": {"driver": "d", "options": {"a": "b"}}}),
        json!({"csi": {"driver": "d", "volumeHandle": "h", "volumeAttributes": {"a": "b"}}}),
        json!({"awsElasticBlockStore": {"volumeID": "v"}, "nodeAffinity": {"required": {"nodeSelectorTerms": []}}}),
    ] {
        let mut spec = json!({"capacity": {"storage": "1Gi"}, "volumeMode": "Block", "claimRef": {"uid": "cu"},
            "mountOptions": ["ro"], "accessModes": ["ReadWriteOnce"]});
        spec.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        let volume: PersistentVolume =
            serde_json::from_value(json!({"metadata": {"name": "pv", "labels": {"a": "b"}}, "spec": spec}))
                .unwrap();
        let body = serde_json::to_vec(&volume).unwrap();
        assert_eq!(serde_json::from_slice::<PersistentVolume>(&body).unwrap(), volume, "{source}");
    }

    for driver in [
        None,
        Some(json!({"spec": {"attachRequired": false, "fsGroupPolicy": "File", "seLinuxMount": true,
        "volumeLifecycleModes": ["Ephemeral"], "tokenRequests": [{"audience": "a", "expirationSeconds": 600}]}})),
    ] {
        let driver: Option<CsiDriver> = driver.map(|driver| serde_json::from_value(driver).unwrap());
        let body = serde_json::to_vec(&driver).unwrap();
        assert_eq!(serde_json::from_slice::<Option<CsiDriver>>(&body).unwrap(), driver);
    }
}
