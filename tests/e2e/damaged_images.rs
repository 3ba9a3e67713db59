//! Files of unpacked images that a loss of power has emptied, and images that are repaired.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::node::{FOREVER, LONG, Node, busybox, phase, pod, simple};
use crate::support::registry::Registry;
use crate::support::wait::wait_until;
use crate::support::web::{Reply, Request, Server};
use coracle::util::sha256;

const IMAGE: &str = "localhost/busybox:1";
const STORE: &str = "io.containerd.content.v1.content/blobs/sha256";

fn root(node: &Node) -> PathBuf {
    let config = node.containerd.network_config();
    config.ancestors().nth(2).expect("two directories above the file").join("root")
}

/// The program of the only image, where containerd has unpacked it.
fn program(node: &Node) -> PathBuf {
    let snapshots = root(node).join("io.containerd.snapshotter.v1.overlayfs/snapshots");
    let dirs = fs::read_dir(&snapshots).expect("containerd has snapshots").flatten();
    let mut found: Vec<PathBuf> =
        dirs.map(|dir| dir.path().join("fs/bin/busybox")).filter(|path| path.is_file()).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

/// Puts another file in the place of one. Processes keep the old one, as after a restart of the machine
/// no process would have it.
fn replace(path: &Path, content: &[u8]) {
    let new = path.with_extension("new");
    fs::write(&new, content).expect("the file is written");
    let mode = fs::metadata(path).expect("the file exists").permissions();
    fs::set_permissions(&new, mode).expect("the mode is set");
    fs::rename(&new, path).expect("the file is replaced");
}

fn with_image(name: &str, image: &str) -> Value {
    let mut manifest = simple(name);
    manifest["spec"]["containers"][0]["image"] = json!(image);
    manifest["spec"]["containers"][0]["imagePullPolicy"] = json!("IfNotPresent");
    manifest
}

fn verify(node: &Node, args: &[&str]) -> (bool, String) {
    let output = node.command(&[&["images", "verify"], args].concat());
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

// Runtimes: containerd 2.
#[test]
fn damaged_image_is_mended_and_running_pods_keep_their_containers() {
    let node = Node::start("mend");
    node.apply("healthy.json", &simple("healthy"));
    node.wait_ready("healthy");
    let before = node.running("healthy");
    let (good, shown) = verify(&node, &["--digests"]);
    let is_intact = |line: &str| line.split_whitespace().eq([IMAGE, "1/1", "intact"]);
    assert!(good && shown.lines().any(is_intact), "{shown}");

    let program = program(&node);
    let intact = fs::read(&program).expect("the program is readable");
    // The same size, so only a comparison of the contents finds it.
    let mut other = intact.clone();
    other[5000..9000].fill(0);
    replace(&program, &other);
    assert!(verify(&node, &[IMAGE]).0);
    let (good, shown) = verify(&node, &["--digests", IMAGE]);
    assert!(!good && shown.contains("/bin/busybox has other content from byte 5"), "{shown}");
    replace(&program, b"");
    let (good, shown) = verify(&node, &[IMAGE]);
    assert!(!good && shown.contains("/bin/busybox has 0 bytes instead of "), "{shown}");

    node.apply("failing.json", &pod("failing", json!([busybox("main", FOREVER)])));
    node.wait_ready("failing");
    let event = node.wait_event("failing", "DamagedImage", "/bin/busybox has 0 bytes instead of ");
    assert_eq!(event.kind, "Warning");
    node.wait_event("failing", "ImageMended", "Replaced damaged files of image \"localhost/busybox:1\": 1");
    assert!(fs::read(&program).expect("the program is readable") == intact);
    assert!(verify(&node, &["--digests"]).0);
    assert_eq!(node.running("healthy"), before);
    // No snapshot of a check is left: one for the image, and two for each pod.
    let snapshots = node.containerd.ctr(&["snapshots", "ls"]);
    assert!(!snapshots.contains("coracle-verify"), "{snapshots}");
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn image_without_an_intact_copy_is_pulled_again() {
    let base = Node::base("remend");
    fs::create_dir_all(&base).expect("the directory can be made");
    let registry = Registry::start(&base.join("images"));
    let mut node = Node::start("remend");
    let image = registry.image("app");
    // Its layers would be kept. containerd has a second record of it, by its id.
    let images: Value = serde_json::from_str(&node.cli(&["images", "-o", "json"])).expect("a list");
    let mut listed = images.as_array().expect("a list").iter();
    let busybox = listed.find(|image| image["tags"][0] == IMAGE).expect("the image is listed");
    node.containerd.ctr(&["images", "rm", "--sync", IMAGE, busybox["id"].as_str().expect("an id")]);
    let gone = || {
        let snapshots = node.containerd.ctr(&["snapshots", "ls"]);
        snapshots.lines().count() <= 2
    };
    wait_until("only the snapshot of the sandbox image to be left", LONG, gone);
    // A pod that has ended for good, and would run again without its container.
    let mut done = with_image("done", &image);
    done["spec"]["restartPolicy"] = json!("Never");
    done["spec"]["containers"][0]["command"] = json!(["true"]);
    node.apply("done.json", &done);
    node.wait_pod("done", "ended", LONG, |pod| phase(pod) == "Succeeded");
    let finished_containers = |node: &Node| {
        let all = node.cri().0.list_containers(Default::default()).expect("containers are listed");
        let of_done = all
            .into_iter()
            .filter(|container| container.labels["io.kubernetes.pod.name"].starts_with("done"));
        of_done.map(|container| container.id).collect::<Vec<_>>()
    };
    let before = finished_containers(&node);
    assert_eq!(before.len(), 1);

    let intact = fs::read(program(&node)).expect("the program is readable");
    replace(&program(&node), b"");
    let blobs = fs::read_dir(root(&node).join(STORE)).expect("the store is readable").flatten();
    let layer =
        blobs.map(|blob| blob.path()).max_by_key(|path| fs::metadata(path).map_or(0, |data| data.len()));
    replace(&layer.expect("the store has blobs"), b"");
    let (good, shown) = verify(&node, &[&image]);
    assert!(!good && shown.contains(" has another digest"), "{shown}");
    assert!(shown.contains("cannot be verified"), "{shown}");

    // Without the operator's permission nothing is removed.
    node.apply("second.json", &with_image("second", &image));
    node.wait_event("second", "ImageMendFailed", "by itself without --remove-damaged-images");
    node.remove("second.json");
    node.wait_gone("second");
    node.stop_agent();
    node.set_flags(&["--remove-damaged-images".to_owned()]);
    node.start_agent();
    node.apply("second.json", &with_image("second", &image));
    node.wait_event("second", "ImageMendFailed", "is not pulled again while the finished container");
    assert_eq!(finished_containers(&node), before);
    node.remove("done.json");
    node.wait_gone("done");
    // It would check the image again after an hour.
    node.stop_agent();
    node.start_agent();
    node.wait_ready("second");
    node.wait_event("second", "DamagedImage", " has another digest");
    node.wait_event("second", "ImageMended", "");
    assert!(fs::read(program(&node)).expect("the program is readable") == intact);
    let (good, shown) = verify(&node, &["--digests", &image]);
    assert!(good, "{shown}");
    node.finish();
}

/// A manifest of an attacker names the configuration of another image, so that both are one image for
/// the runtime, and as its layer a blob that is none.
// Runtimes: containerd 2.
#[test]
fn image_with_the_configuration_of_another_removes_nothing() {
    let mut node = Node::start("foreign");
    node.stop_agent();
    node.set_flags(&["--remove-damaged-images".to_owned()]);
    node.start_agent();
    let of_node = |node: &Node| -> Vec<Value> {
        let images: Value = serde_json::from_str(&node.cli(&["images", "-o", "json"])).expect("a list");
        images.as_array().expect("a list").clone()
    };
    let tags = |image: &Value| image["tags"].as_array().expect("tags").clone();
    let has = |image: &Value, tag: &str| tags(image).iter().any(|other| other == tag);
    let id = {
        let images = of_node(&node);
        let busybox = images.iter().find(|image| has(image, IMAGE)).expect("the image is listed");
        busybox["id"].as_str().expect("an id").to_owned()
    };
    let config = fs::read(root(&node).join(STORE).join(id.trim_start_matches("sha256:")));
    let config = config.expect("the configuration is readable");
    let manifest_type = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": manifest_type,
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": id, "size": config.len()},
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": id, "size": 1}],
    });
    let manifest = manifest.to_string().into_bytes();
    let server = Server::start(move |request: &Request| {
        let digest = format!("sha256:{}", sha256::sha256_hex(&manifest));
        let (body, kind, digest) = match request.path.rsplit('/').nth(1) {
            Some("manifests") => (manifest.clone(), manifest_type, digest),
            Some("blobs") => (config.clone(), "application/octet-stream", id.clone()),
            _ => return Reply::text(200, "{}"),
        };
        let reply = Reply { status: 200, headers: Vec::new(), body };
        reply.with("Content-Type", kind).with("Docker-Content-Digest", &digest)
    });
    let foreign = format!("127.0.0.1:{}/foreign:1", server.port);
    let mut wrong = with_image("wrong", &foreign);
    wrong["spec"]["containers"][0]["command"] = json!(["/no/such/program"]);
    node.apply("wrong.json", &wrong);
    let checked = format!("checked image {foreign}");
    wait_until("the image to be checked", LONG, || node.log().contains(&checked));
    let images = of_node(&node);
    assert!(images.iter().any(|image| has(image, IMAGE) && has(image, &foreign)), "{images:?}");
    assert!(node.events_with_reason("wrong", "DamagedImage").is_empty(), "{}", node.log());
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn intact_image_of_a_failing_container_is_checked_once() {
    let node = Node::start("nomend");
    let mut manifest = pod("wrong", json!([busybox("main", "")]));
    manifest["spec"]["containers"][0]["command"] = json!(["/no/such/program"]);
    node.apply("wrong.json", &manifest);
    node.wait_pod("wrong", "restarted twice", LONG, |pod| crate::support::node::restarts(pod, "main") >= 2);
    assert!(node.events_with_reason("wrong", "DamagedImage").is_empty());
    let checks = || node.log().matches("checked image localhost/busybox:1").count();
    wait_until("the check", LONG, || checks() > 0);
    assert_eq!(checks(), 1, "{}", node.log());
    node.finish();
}
