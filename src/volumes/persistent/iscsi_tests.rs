//! Tests of iSCSI: the commands in upstream's order.

use super::super::host::fake::FakeHost;
use super::super::sysfs::tests::{link, put, session};
use super::*;

const IQN: &str = "iqn.2020-01.x:t";
const TCP: &str = "iface.iscsi_ifacename = default\niface.transport_name = tcp\niface.hwaddress = <empty>\n";

fn source(portals: &[&str]) -> Iscsi {
    Iscsi {
        target_portal: portals[0].to_owned(),
        portals: portals[1..].iter().map(|portal| (*portal).to_owned()).collect(),
        iqn: IQN.to_owned(),
        lun: 1,
        iscsi_interface: "default".to_owned(),
        ..Iscsi::default()
    }
}

fn by_path(root: &Path, portal: &str, disk: &str) {
    link(root, &format!("dev/disk/by-path/ip-{portal}-iscsi-{IQN}-lun-1"), &format!("dev/{disk}"));
}

fn attach_it(host: &FakeHost, disk: &IscsiDisk) -> Result<String, String> {
    let chap = (Chap::default(), &Credentials::new());
    attach_disk(host, disk, chap, &StopToken::never()).map_err(|error| error.to_string())
}

#[test]
fn login_issues_upstreams_commands() {
    let root = tempfile::tempdir().unwrap();
    let host = FakeHost::new(root.path());
    let disk = IscsiDisk::from_source("v", &source(&["10.0.0.1"]));
    by_path(root.path(), "10.0.0.1:3260", "sda");
    host.respond("iscsiadm -m iface -I default -o show", 0, TCP);
    // The login makes no session here, so that no SCSI host is found.
    let error = attach_it(&host, &disk).unwrap_err();
    assert!(error.contains("Could not get SCSI host number for portal 10.0.0.1:3260"), "{error}");
    let portal = "-p 10.0.0.1:3260";
    assert_eq!(
        host.log(),
        [
            "iscsiadm -m iface -I default -o show".to_owned(),
            format!("iscsiadm -m discoverydb -t sendtargets {portal} -I default -o new"),
            format!("iscsiadm -m discoverydb -t sendtargets {portal} -I default --discover"),
            format!("iscsiadm -m node {portal} -T {IQN} -I default --login"),
            format!("iscsiadm -m node {portal} -T {IQN} -o update -n node.startup -v manual"),
        ]
    );
    // With a session, only the LUN is scanned.
    session(root.path(), (3, IQN), "10.0.0.1", "sda");
    host.respond("iscsiadm -m iface", 0, TCP);
    assert_eq!(
        attach_it(&host, &disk).unwrap(),
        format!("/dev/disk/by-path/ip-10.0.0.1:3260-iscsi-{IQN}-lun-1")
    );
    assert_eq!(host.log(), ["iscsiadm -m iface -I default -o show"]);
    let scan = std::fs::read_to_string(root.path().join("sys/class/scsi_host/host3/scan")).unwrap();
    assert_eq!(scan, "0 0 1");
}

#[test]
fn chap_is_set_before_discovery_and_login_and_secrets_are_in_no_message() {
    let root = tempfile::tempdir().unwrap();
    let host = FakeHost::new(root.path());
    let disk = IscsiDisk::from_source("v", &source(&["p:1"]));
    let chap = Chap { discovery: true, session: true };
    let credentials = Credentials::from([
        ("discovery.sendtargets.auth.username".to_owned(), "du".to_owned()),
        ("node.session.auth.password".to_owned(), "hunter2".to_owned()),
    ]);
    host.respond("iscsiadm -m iface", 0, TCP);
    host.respond(
        "iscsiadm -m node -p p:1 -T iqn.2020-01.x:t -I default -o update -n node.session.auth.password",
        1,
        "hunter2",
    );
    let error = attach_disk(&host, &disk, (chap, &credentials), &StopToken::never()).unwrap_err().to_string();
    assert!(!error.contains("hunter2"), "{error}");
    let discovery = "iscsiadm -m discoverydb -t sendtargets -p p:1 -I default";
    let node = format!("iscsiadm -m node -p p:1 -T {IQN} -I default");
    assert_eq!(
        host.log()[1..],
        [
            format!("{discovery} -o new"),
            format!("{discovery} -o update -n discovery.sendtargets.auth.authmethod -v CHAP"),
            format!("{discovery} -o update -n discovery.sendtargets.auth.username -v du"),
            format!("{discovery} --discover"),
            format!("{node} -o update -n node.session.auth.authmethod -v CHAP"),
            format!("{node} -o update -n node.session.auth.password -v hunter2"),
        ]
    );
}

#[test]
fn several_portals_lead_to_a_multipath_device() {
    let root = tempfile::tempdir().unwrap();
    let host = FakeHost::new(root.path());
    let disk = IscsiDisk::from_source("v", &source(&["10.0.0.1", "10.0.0.2:3260"]));
    assert_eq!(disk.portals, ["10.0.0.1:3260", "10.0.0.2:3260"]);
    for (number, disk) in [(1, "sda"), (2, "sdb")] {
        session(root.path(), (number, IQN), &format!("10.0.0.{number}"), disk);
        by_path(root.path(), &format!("10.0.0.{number}:3260"), disk);
        put(root.path(), &format!("sys/block/dm-3/slaves/{disk}"), "");
    }
    host.respond("iscsiadm -m iface", 0, TCP);
    assert_eq!(attach_it(&host, &disk).unwrap(), "/dev/dm-3");
    host.log();
    detach_disk(&host, &disk, false, &StopToken::never()).unwrap();
    let node = |number| format!("iscsiadm -m node -p 10.0.0.{number}:3260 -T {IQN}");
    assert_eq!(
        host.log(),
        [
            "multipath -f /dev/dm-3".to_owned(),
            format!("{} --logout -I default", node(1)),
            format!("{} -o delete -I default", node(1)),
            format!("{} --logout -I default", node(2)),
            format!("{} -o delete -I default", node(2)),
        ]
    );
    let deleted = std::fs::read_to_string(root.path().join("sys/block/sda/device/delete")).unwrap();
    assert_eq!(deleted, "1");
    detach_disk(&host, &disk, true, &StopToken::never()).unwrap();
    assert_eq!(host.log(), ["multipath -f /dev/dm-3"]);
}

/// The target was logged out, and its multipath device stayed.
#[test]
fn disk_stays_attached_while_sysfs_cannot_be_read() {
    let root = tempfile::tempdir().unwrap();
    let host = FakeHost::new(root.path());
    let disk = IscsiDisk::from_source("v", &source(&["10.0.0.1"]));
    session(root.path(), (1, IQN), "10.0.0.1", "sda");
    put(root.path(), "dev/sda", "");
    let sys = root.path().join("sys");
    for path in
        ["block", "class/iscsi_host", "class/iscsi_host/host1/device/session1/target1:0:0/1:0:0:1/block"]
    {
        let (path, aside) = (sys.join(path), sys.join("aside"));
        std::fs::rename(&path, &aside).unwrap();
        // Each call on a link to itself fails.
        std::os::unix::fs::symlink(&path, &path).unwrap();
        let error = detach_disk(&host, &disk, false, &StopToken::never()).unwrap_err().to_string();
        assert!(error.starts_with("cannot list") && error.contains(path.to_str().unwrap()), "{error}");
        assert_eq!(host.log(), [""; 0]);
        std::fs::remove_file(&path).unwrap();
        std::fs::rename(&aside, &path).unwrap();
    }
    let deleted = || std::fs::read_to_string(sys.join("block/sda/device/delete")).unwrap();
    assert_eq!(deleted(), "");
    detach_disk(&host, &disk, false, &StopToken::never()).unwrap();
    assert_eq!((deleted().as_str(), host.log().len()), ("1", 2));
}

#[test]
fn initiator_name_gets_its_own_interface() {
    let root = tempfile::tempdir().unwrap();
    let host = FakeHost::new(root.path());
    let with_name = Iscsi { initiator_name: "iqn.init".to_owned(), ..source(&["1.1.1.1"]) };
    let disk = IscsiDisk::from_source("v", &with_name);
    let iface = "1.1.1.1:3260:v";
    assert_eq!(disk.dir(), Path::new(&format!("iface-{iface}/1.1.1.1:3260-{IQN}-lun-1")));
    session(root.path(), (1, IQN), "1.1.1.1", "sda");
    by_path(root.path(), "1.1.1.1:3260", "sda");
    host.respond("iscsiadm -m iface", 0, TCP);
    host.respond("iscsiadm -m iface", 0, TCP);
    host.respond("iscsiadm -m iface", ALREADY_EXISTS, "");
    attach_it(&host, &disk).unwrap();
    assert_eq!(
        host.log()[2..],
        [
            format!("iscsiadm -m iface -I {iface} -o new"),
            format!("iscsiadm -m iface -I {iface} -o update -n iface.initiatorname -v iqn.init"),
            format!("iscsiadm -m iface -I {iface} -o update -n iface.transport_name -v tcp"),
        ]
    );
    detach_disk(&host, &disk, false, &StopToken::never()).unwrap();
    assert_eq!(host.log().last().unwrap(), &format!("iscsiadm -m iface -I {iface} -o delete"));
}

#[test]
fn state_file_has_upstreams_form_and_directory_names_are_enough_without_it() {
    let disk = IscsiDisk::from_source("v", &source(&["[fd00::1]:3260"]));
    let text = serde_json::to_value(&disk).unwrap();
    assert_eq!(
        text,
        serde_json::json!({"VolName": "v", "Portals": ["[fd00::1]:3260"], "Iqn": IQN, "Lun": "1",
            "InitIface": "default", "Iface": "default", "InitiatorName": ""})
    );
    let disk = IscsiDisk::from_source("v", &source(&["10.0.0.1"]));
    let found = IscsiDisk::from_dir(&Path::new("/r/plugins/kubernetes.io/iscsi").join(disk.dir())).unwrap();
    assert_eq!((&found.portals, &found.iqn, &found.lun), (&disk.portals, &disk.iqn, &disk.lun));
    // The three forms that the API server accepts.
    for iqn in ["iqn.2020-01.x:t", "eui.02004567A425678D", "naa.52004567BA64678D"] {
        let dir = format!("/p/iface-a/a-b:3260-{iqn}-lun-2");
        assert_eq!(IscsiDisk::from_dir(Path::new(&dir)).map(|disk| disk.iqn).as_deref(), Some(iqn));
    }
    for odd in ["/", "/x", "/iface-a/b", "/iface-a/p-iqn.x", "/iface-a/p-x-lun-1"] {
        assert_eq!(IscsiDisk::from_dir(Path::new(odd)), None, "{odd}");
    }
}

#[test]
fn missing_iscsiadm_names_its_package() {
    let host = FakeHost::default();
    host.set_missing("iscsiadm");
    let error = attach_it(&host, &IscsiDisk::from_source("v", &source(&["p"]))).unwrap_err();
    assert!(error.starts_with("iscsiadm is not installed on this node (package open-iscsi"), "{error}");
    host.respond("iscsiadm -m iface", 0, "nothing\n");
    let error = attach_it(&host, &IscsiDisk::from_source("v", &source(&["p"]))).unwrap_err();
    assert_eq!(error, "Could not parse iface file for default");
}
