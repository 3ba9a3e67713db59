//! Tests of the resolution of claims.

use super::*;
use proptest::prelude::*;
use serde_json::json;

fn pod(spec: Value) -> Pod {
    let value = json!({"metadata": {"name": "p", "namespace": "n", "uid": "pu"}, "spec": spec});
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
}

fn claim(change: Value) -> Claim {
    let mut value = json!({"metadata": {"name": "c", "namespace": "n", "uid": "cu"},
        "spec": {"volumeName": "pv"}, "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}});
    merge(&mut value, change);
    serde_json::from_value(value).unwrap()
}

fn volume(spec: Value) -> PersistentVolume {
    let mut value = json!({"metadata": {"name": "pv", "uid": "vu"},
        "spec": {"claimRef": {"uid": "cu"}, "capacity": {"storage": "1Gi"}}});
    merge(&mut value, json!({"spec": spec}));
    serde_json::from_value(value).unwrap()
}

fn merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            for (key, value) in change {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, change) => *into = change,
    }
}

fn named() -> ClaimName {
    ClaimName { name: "c".to_owned(), read_only: false, is_ephemeral: false }
}

#[test]
fn claim_that_cannot_be_used_has_upstreams_text() {
    let pod = pod(json!({"containers": []}));
    let check = |change: Value, wanted: &ClaimName| {
        check_claim(&pod, wanted, &claim(change)).map(str::to_owned).map_err(|problem| problem.to_string())
    };
    assert_eq!(check(json!({}), &named()).unwrap(), "pv");
    let gone = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
    assert_eq!(check(gone, &named()).unwrap_err(), "PVC is being deleted");
    let protected = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z",
        "finalizers": ["kubernetes.io/pvc-protection"]}});
    assert_eq!(check(protected, &named()).unwrap(), "pv");
    for phase in ["Pending", "Lost", ""] {
        assert_eq!(check(json!({"status": {"phase": phase}}), &named()).unwrap_err(), "PVC is not bound");
    }
    let unnamed = json!({"spec": {"volumeName": ""}});
    assert_eq!(check(unnamed, &named()).unwrap_err(), "PVC has empty pvc.Spec.VolumeName");
}

#[test]
fn generic_ephemeral_volume_has_a_claim_that_its_pod_owns() {
    let pod = pod(json!({"containers": [], "volumes": [
        {"name": "v", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}},
        {"name": "w", "persistentVolumeClaim": {"claimName": "c", "readOnly": true}},
        {"name": "x", "emptyDir": {}}]}));
    let volumes = pod.spec().volumes.as_ref().unwrap();
    let wanted = claim_name(&pod, &volumes[0]).unwrap();
    assert_eq!((wanted.name.as_str(), wanted.is_ephemeral), ("p-v", true));
    let other = claim_name(&pod, &volumes[1]).unwrap();
    assert_eq!(other, ClaimName { name: "c".to_owned(), read_only: true, is_ephemeral: false });
    assert_eq!(claim_name(&pod, &volumes[2]), None);
    let owner = |uid: &str, controller: bool| {
        claim(json!({"metadata": {"ownerReferences": [{"uid": uid, "controller": controller}]}}))
    };
    assert!(check_claim(&pod, &wanted, &owner("pu", true)).is_ok());
    for claim in [owner("pu", false), owner("other", true), claim(json!({}))] {
        assert_eq!(
            check_claim(&pod, &wanted, &claim).unwrap_err().to_string(),
            "PVC n/p-v was not created for pod n/p (pod is not owner)"
        );
    }
}

#[test]
fn volume_must_be_bound_to_the_claim_and_used_in_its_mode() {
    let bound = claim(json!({}));
    assert_eq!(check_binding(&bound, &volume(json!({}))), Ok(()));
    let text = |spec: Value| check_binding(&bound, &volume(spec)).unwrap_err().to_string();
    assert!(text(json!({"claimRef": null})).starts_with("found PV object pv but it has a nil"));
    assert_eq!(
        text(json!({"claimRef": {"uid": "x"}})),
        "found PV object pv but its pv.Spec.ClaimRef.UID x does not point to claim.UID cu"
    );
    let pod = pod(json!({"containers": [{"name": "c", "volumeMounts": [{"name": "m", "mountPath": "/m"}],
        "volumeDevices": [{"name": "d", "devicePath": "/dev/x"}]}]}));
    let check = |volume, mode| check_mode(&pod, volume, mode).map_err(|problem| problem.to_string());
    assert_eq!(check("m", VolumeMode::Filesystem), Ok(()));
    assert_eq!(check("d", VolumeMode::Block), Ok(()));
    assert_eq!(
        check("m", VolumeMode::Block).unwrap_err(),
        "volume m has volumeMode Block, but is specified in volumeMounts"
    );
    assert_eq!(
        check("d", VolumeMode::Filesystem).unwrap_err(),
        "volume d has volumeMode Filesystem, but is specified in volumeDevices"
    );
}

#[test]
fn sources_and_options_of_a_persistent_volume_are_read() {
    let spec = |spec: Value| Spec::persistent(&named(), &claim(json!({})), &volume(spec));
    let nfs = spec(json!({"nfs": {"server": "s", "path": "/x"}, "mountOptions": ["hard", "nfsvers=4.1"],
        "accessModes": ["ReadWriteOncePod"], "capacity": {"storage": "2Gi"}}));
    assert!(matches!(&nfs.source, Source::Nfs(source) if source.server == "s"));
    assert_eq!((nfs.name.as_str(), nfs.mount_options.len()), ("pv", 2));
    assert!(nfs.is_single_pod && nfs.has_grown && nfs.is_persistent);
    let mut annotated =
        volume(json!({"local": {"path": "/d"}, "volumeMode": "Block", "mountOptions": ["a"]}));
    annotated.metadata.annotations.insert(MOUNT_OPTIONS.to_owned(), "ro,noatime".to_owned());
    let local = Spec::persistent(&named(), &claim(json!({})), &annotated);
    assert_eq!(
        (local.mode, local.mount_options),
        (VolumeMode::Block, vec!["ro".to_owned(), "noatime".to_owned()])
    );
    assert!(!local.has_grown);
    let Source::Iscsi(iscsi) =
        spec(json!({"iscsi": {"targetPortal": "1.2.3.4", "iqn": "iqn.x", "lun": 3, "chapAuthSession": true,
            "secretRef": {"name": "s", "namespace": "m"}}}))
        .source
    else {
        panic!("an iSCSI source")
    };
    assert_eq!((iscsi.iscsi_interface.as_str(), iscsi.lun, iscsi.chap_session), ("default", 3, true));
    assert_eq!(iscsi.secret_ref.unwrap().namespace, "m");
    assert_eq!(spec(json!({"rbd": {"image": "i"}})).source, Source::Other("rbd".to_owned()));
}

#[test]
fn cloud_disks_have_the_names_of_their_drivers() {
    let csi = |spec: Value| match Spec::persistent(&named(), &claim(json!({})), &volume(spec)).source {
        Source::Csi(csi) => (csi.driver, csi.volume_handle),
        other => panic!("{other:?}"),
    };
    let pair = |driver: &str, handle: &str| (driver.to_owned(), handle.to_owned());
    assert_eq!(
        csi(json!({"awsElasticBlockStore": {"volumeID": "aws://us-east-1a/vol-1", "fsType": "xfs"}})),
        pair("ebs.csi.aws.com", "vol-1")
    );
    assert_eq!(csi(json!({"azureDisk": {"diskURI": "/s/d"}})), pair("disk.csi.azure.com", "/s/d"));
    assert_eq!(csi(json!({"cinder": {"volumeID": "id"}})), pair("cinder.csi.openstack.org", "id"));
    assert_eq!(csi(json!({"csi": {"driver": "d", "volumeHandle": "h"}})), pair("d", "h"));
}

/// The handle must be the one that the controller has attached.
#[test]
fn handles_of_gce_disks_follow_the_labels_of_their_volume() {
    let source = |labels: Value| {
        let mut volume = volume(json!({"gcePersistentDisk": {"pdName": "d"},
            "accessModes": ["ReadWriteOnce", "ReadOnlyMany"],
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["x", "y"]}]}]}}}));
        volume.metadata.labels = serde_json::from_value(labels).unwrap();
        let spec = Spec::persistent(&named(), &claim(json!({})), &volume);
        assert_eq!(spec.access_modes, [AccessMode::ReadWriteOnce]);
        match spec.source {
            Source::Csi(csi) => Ok(csi.volume_handle),
            Source::Other(kind) => Err(kind),
            other => panic!("{other:?}"),
        }
    };
    let (beta, zone) = ("failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone");
    for (labels, place) in [
        (json!({}), "zones/UNSPECIFIED"),
        (json!({zone: "europe-west1-b"}), "zones/europe-west1-b"),
        (json!({beta: "a-b-c", zone: "d"}), "zones/a-b-c"),
        (json!({beta: "", zone: "d"}), "zones/d"),
        (json!({zone: "europe-west1-b__europe-west1-c"}), "regions/europe-west1"),
    ] {
        assert_eq!(source(labels), Ok(format!("projects/UNSPECIFIED/{place}/disks/d")));
    }
    for zones in ["a-b-c__d-e-f", "a__b", "a-b-c__"] {
        assert!(source(json!({zone: zones})).unwrap_err().contains("not of one region"), "{zones}");
    }
}

#[test]
fn inline_sources_carry_their_own_read_only_field() {
    let pod = pod(json!({"containers": [], "volumes": [
        {"name": "n", "nfs": {"server": "s", "path": "/x", "readOnly": true}},
        {"name": "i", "iscsi": {"targetPortal": "t", "iqn": "q", "lun": 0, "secretRef": {"name": "s"}}},
        {"name": "f", "flexVolume": {"driver": "a/b", "options": {"k": "v"}}},
        {"name": "e", "emptyDir": {}},
        {"name": "c", "csi": {"driver": "d", "volumeAttributes": {"a": "b"},
            "nodePublishSecretRef": {"name": "s"}}}]}));
    let specs: Vec<_> =
        pod.spec().volumes.iter().flatten().map(|volume| Spec::inline(&pod, volume)).collect();
    assert!(specs[0].as_ref().unwrap().read_only);
    assert!(matches!(&specs[1].as_ref().unwrap().source,
        Source::Iscsi(iscsi) if iscsi.secret_ref.as_ref().unwrap().namespace == "n"));
    assert!(matches!(&specs[2].as_ref().unwrap().source, Source::Flex(flex) if flex.options["k"] == "v"));
    assert!(specs[3].is_none());
    let spec = specs[4].as_ref().unwrap();
    assert!(
        !spec.is_persistent
            && matches!(&spec.source, Source::Csi(csi) if csi.volume_handle.is_empty()
        && csi.volume_attributes["a"] == "b"
        && csi.node_publish_secret_ref.as_ref().unwrap().namespace == "n")
    );
}

proptest! {
    #[test]
    fn random_objects_cause_no_panic(phase in "[A-Z][a-z]{0,6}", id in "\\PC{0,20}", zone in "\\PC{0,9}") {
        let value = json!({"gcePersistentDisk": {"pdName": id}, "awsElasticBlockStore": {"volumeID": zone},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": zone}]}}});
        let claim = claim(json!({"status": {"phase": phase}}));
        let _ = Spec::persistent(&named(), &claim, &volume(value));
        let _ = check_claim(&pod(json!({"containers": []})), &named(), &claim);
    }
}

#[test]
fn volume_grows_to_the_size_that_the_controller_has_allocated() {
    let volume: PersistentVolume = serde_json::from_value(json!({"metadata": {"name": "pv"}, "spec": {
        "capacity": {"storage": "3Gi"}, "accessModes": ["ReadWriteMany"]}}))
    .unwrap();
    let name = ClaimName { name: "c".to_owned(), read_only: false, is_ephemeral: false };
    let spec_with = |status: serde_json::Value, annotations: serde_json::Value| {
        let claim: Claim = serde_json::from_value(json!({"metadata": {"annotations": annotations},
            "spec": {"resources": {"requests": {"storage": "2Gi"}}}, "status": status}))
        .unwrap();
        Spec::persistent(&name, &claim, &volume)
    };
    let status = |state: &str| {
        json!({"capacity": {"storage": "1Gi"}, "allocatedResources": {"storage": "2Gi"},
            "allocatedResourceStatuses": {"storage": state}})
    };
    let older = spec_with(json!({"capacity": {"storage": "1Gi"}}), json!({}));
    assert_eq!((older.grow_to(), older.expansion.is_shown), (Some(3 << 30), false));
    assert!(older.expansion.is_superseded);
    for (state, expected) in [
        ("NodeResizePending", Some(2 << 30)),
        ("NodeResizeInProgress", Some(2 << 30)),
        ("NodeResizeInfeasible", None),
        ("ControllerResizeInProgress", None),
        ("ControllerResizeInfeasible", None),
    ] {
        let spec = spec_with(status(state), json!({}));
        assert_eq!(spec.grow_to(), expected, "{state}");
        assert!(spec.expansion.is_shown && !spec.expansion.is_superseded && !spec.expansion.is_for_each_node);
    }
    let done = spec_with(json!({"capacity": {"storage": "3Gi"}}), json!({}));
    assert_eq!((done.grow_to(), done.expansion.claim_bytes), (None, 3 << 30));
    assert!(done.expansion.is_for_each_node);
    let alone = json!({"volume.kubernetes.io/node-expansion-not-required": "true"});
    assert!(!spec_with(json!({"capacity": {"storage": "3Gi"}}), alone).expansion.is_for_each_node);
}

/// Nodes have the labels of the drivers, so no node had the volume.
#[test]
fn nodes_of_a_migrated_disk_are_those_of_its_driver() {
    let terms = |list: Value| json!({"nodeAffinity": {"required": {"nodeSelectorTerms": list}}});
    let requirement = |key: &str, values: Value| json!({"key": key, "operator": "In", "values": values});
    let ebs = json!({"awsElasticBlockStore": {"volumeID": "v"}});
    let cinder = json!({"cinder": {"volumeID": "v"}});
    let vsphere = json!({"vsphereVolume": {"volumePath": "v"}});
    let check = |source: &Value, affinity: Value, labels: Value, expected: Value| {
        let mut object = volume(source.clone());
        object.metadata.labels = serde_json::from_value(labels).unwrap();
        let Value::Object(affinity) = affinity else { panic!() };
        object.spec.other.extend(affinity);
        let found = nodes(&object).map(|nodes| serde_json::to_value(nodes.node_selector_terms).unwrap());
        assert_eq!(found.unwrap_or(Value::Null), expected, "{source}");
    };
    for (source, key) in [
        (&ebs, "topology.ebs.csi.aws.com/zone"),
        (&json!({"gcePersistentDisk": {"pdName": "v"}}), "topology.gke.io/zone"),
        (&cinder, "topology.cinder.csi.openstack.org/zone"),
        (&vsphere, "topology.csi.vmware.com/zone"),
    ] {
        for given in [ZONE, OLD_ZONE] {
            let with = |key: &str| json!([{"matchExpressions": [requirement(key, json!(["z"]))]}]);
            check(source, terms(with(given)), json!({ZONE: "other"}), with(key));
            check(source, json!({}), json!({given: "z"}), with(key));
        }
        check(source, json!({}), json!({}), Value::Null);
    }
    // The region of the old label, and several zones in a label.
    let ebs_zone = "topology.ebs.csi.aws.com/zone";
    let old = json!([{"matchExpressions": [requirement(OLD_REGION, json!(["r"])), requirement(OLD_ZONE, json!(["z"]))]}]);
    let new = json!([{"matchExpressions": [requirement(REGION, json!(["r"])), requirement(ebs_zone, json!(["z"]))]}]);
    check(&ebs, terms(old), json!({}), new);
    let both = json!([{"matchExpressions": [requirement(ebs_zone, json!(["a", "b"]))]}]);
    check(&ebs, json!({}), json!({ZONE: "b__a"}), both);
    let added = json!([{"matchExpressions": [requirement("disk", json!(["x"])), requirement(ebs_zone, json!(["z"]))]}]);
    let disk = json!([{"matchExpressions": [requirement("disk", json!(["x"]))]}]);
    check(&ebs, terms(disk.clone()), json!({ZONE: "z"}), added);
    let place = json!([{"matchExpressions": [requirement("topology.csi.vmware.com/zone", json!(["z__y"])),
        requirement("topology.csi.vmware.com/region", json!(["r"]))]}]);
    check(&vsphere, json!({}), json!({ZONE: "z__y", REGION: "r"}), place);
    // A driver's own volume, and a disk whose driver has other labels.
    let zone = json!([{"matchExpressions": [requirement(ZONE, json!(["z"]))]}]);
    for source in
        [json!({"csi": {"driver": "d", "volumeHandle": "h"}}), json!({"azureDisk": {"diskURI": "u"}})]
    {
        check(&source, terms(zone.clone()), json!({ZONE: "z"}), zone.clone());
    }
}
