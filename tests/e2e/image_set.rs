//! Images from archives on the node, which the runtime pulls through the agent's registry.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::containerd::is_crio;
use crate::support::image_archives::{self, FORMS, Form};
use crate::support::node::{FOREVER, LONG, Node, busybox, free_port, pod};
use crate::support::wait::{wait_for, wait_until};

const READ: &str = "coracle_image_archive_read_bytes_total";

/// A node that is not started, with an empty directory of archives.
fn prepare(name: &str) -> (Node, PathBuf) {
    let mut node = Node::prepare(name, json!({}));
    let directory = node.root().join("images.d");
    fs::create_dir_all(&directory).expect("the directory of archives");
    if is_crio() {
        name_to_crio(&mut node);
    }
    (node, directory)
}

/// CRI-O reads its mirrors from a file that does not change with each start of the agent.
fn name_to_crio(node: &mut Node) {
    let address = format!("127.0.0.1:{}", free_port());
    let (root, mirrors) = (node.root(), node.containerd.dir().join("registries.conf.d"));
    let (root, mirrors) = (root.display().to_string(), mirrors.display().to_string());
    let words = ["setup", "runtime", "--runtime=crio", "--registry=registry.example"];
    let places = ["--image-registry", &address, "--registries-dir", &mirrors, "--root-dir", &root];
    let setup = |more: &[&str]| node.cli(&[&words[..], &places, more].concat());
    assert!(setup(&["--dry-run"]).contains("registry.example"));
    assert!(setup(&[]).contains("restart crio"));
    assert_eq!(setup(&[]), "nothing to do\n");
    node.containerd.stop();
    node.containerd.resume();
    node.set_flags(&[format!("--image-registry={address}")]);
}

fn with_image(name: &str, image: &str, policy: &str) -> Value {
    let mut manifest = pod(name, json!([busybox("main", FOREVER)]));
    manifest["spec"]["containers"][0]["image"] = json!(image);
    manifest["spec"]["containers"][0]["imagePullPolicy"] = json!(policy);
    manifest
}

fn has(node: &Node, image: &str) -> bool {
    node.containerd.ctr(&["images", "ls", "-q"]).lines().any(|line| line == image)
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn archives_of_all_forms_provide_their_images() {
    let (mut node, directory) = prepare("setforms");
    for (number, form) in FORMS.into_iter().enumerate() {
        let image = format!("registry.example/team/form{number}:1");
        image_archives::write(&node.shared(), form, &image, &directory.join(format!("form{number}")));
        let policy = if number % 2 == 0 { "IfNotPresent" } else { "Always" };
        node.apply(&format!("{number}.json"), &with_image(&format!("form{number}"), &image, policy));
    }
    node.start_agent();
    for number in 0..FORMS.len() {
        node.wait_ready(&format!("form{number}"));
    }
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn image_is_restored_when_pruned_and_released_when_its_archive_goes() {
    let (mut node, directory) = prepare("setprune");
    node.start_agent();
    let names = ["docker.io/library/kept:1", "registry.example/later:2"];
    // Archives that come while the agent runs.
    image_archives::write(&node.shared(), Form::Oci, names[0], &directory.join("kept.tar"));
    wait_until("the first image", LONG, || has(&node, names[0]));
    node.containerd.ctr(&["images", "rm", "--sync", names[0]]);
    // Any change of the set compares it with the runtime; without one that happens every five minutes.
    image_archives::write(&node.shared(), Form::Docker, names[1], &directory.join("later.tar"));
    wait_until("both images", LONG, || names.iter().all(|name| has(&node, name)));

    let list = node.cli(&["images", "list"]);
    assert!(names.iter().all(|name| list.contains(name)), "{list}");
    fs::remove_file(directory.join("kept.tar")).expect("the archive can be removed");
    wait_until("the release", LONG, || !node.cli(&["images", "list"]).contains("kept.tar"));
    assert!(has(&node, names[0]), "the image itself stays until the disk is short");
    node.containerd.ctr(&["images", "rm", "--sync", names[0]]);
    image_archives::write(
        &node.shared(),
        Form::Oci,
        "registry.example/third:1",
        &directory.join("third.tar"),
    );
    wait_until("the third image", LONG, || has(&node, "registry.example/third:1"));
    assert!(!has(&node, names[0]), "a released image is not restored");
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn image_is_pinned_while_an_archive_has_it() {
    let (mut node, directory) = prepare("setpinned");
    node.start_agent();
    // The image of the archive is the same, under another name.
    let pinned = || {
        let images: Value = serde_json::from_str(&node.cli(&["images", "-o", "json"])).expect("JSON");
        let has_name = |image: &&Value| image["tags"].to_string().contains("localhost/busybox:1");
        let image = images.as_array().expect("a list").iter().find(has_name)?;
        Some(image["pinned"] == true)
    };
    // The runtime lists an image a moment after its import.
    assert!(!wait_for("the image", LONG, pinned));
    let archive = directory.join("pinned.tar");
    image_archives::write(&node.shared(), Form::Oci, "registry.example/pinned:1", &archive);
    wait_until("the pinned image", LONG, || pinned() == Some(true));
    fs::remove_file(archive).expect("the archive can be removed");
    wait_until("the release", LONG, || pinned() == Some(false));
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn unchanged_archives_are_not_read_after_a_restart() {
    let (mut node, directory) = prepare("setindex");
    let image = "registry.example/indexed:1";
    image_archives::write(&node.shared(), Form::OciGzip, image, &directory.join("indexed.tar.gz"));
    node.start_agent();
    wait_until("the image", LONG, || has(&node, image));
    let size = fs::metadata(directory.join("indexed.tar.gz")).expect("the archive").len();
    let read = node.metric(READ);
    assert!(read >= size as f64, "{read} of {size} bytes were read");
    node.stop_agent();
    node.containerd.ctr(&["images", "rm", "--sync", image]);
    node.start_agent();
    node.apply("pod.json", &with_image("again", image, "IfNotPresent"));
    node.wait_ready("again");
    assert_eq!(node.metric(READ), 0.0);
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn damaged_archives_are_named_and_other_images_are_pulled() {
    let (mut node, directory) = prepare("setdamage");
    let good = "registry.example/good:1";
    image_archives::write(&node.shared(), Form::Oci, good, &directory.join("good.tar"));
    let bad = directory.join("bad.tar");
    image_archives::write(&node.shared(), Form::Oci, "registry.example/bad:1", &bad);
    let mut bytes = fs::read(&bad).expect("the archive");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    fs::write(&bad, &bytes).expect("the archive can be written");
    fs::write(directory.join("cut.tar"), &bytes[..middle]).expect("the archive can be written");
    node.apply("good.json", &with_image("good", good, "IfNotPresent"));
    node.apply("bad.json", &with_image("bad", "registry.example/bad:1", "IfNotPresent"));
    node.start_agent();
    node.wait_ready("good");
    wait_until("the event that names the blob", LONG, || {
        let events = node.cli(&["events"]);
        events.contains("ImageArchiveFault") && events.contains("bad.tar") && events.contains("sha256:")
    });
    assert!(!has(&node, "registry.example/bad:1"), "no part of a damaged image is imported");
    // The repaired archive starts its pod without a wait for the end of the back-off.
    bytes[middle] ^= 0xff;
    fs::write(&bad, &bytes).expect("the archive can be written");
    node.wait_ready("bad");
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn image_of_a_waiting_pod_is_read_before_a_large_archive() {
    let (mut node, directory) = prepare("setlarge");
    // A gigabyte without an image, first by its name; read and digested it takes seconds.
    let large = node.shared().join("large");
    fs::create_dir_all(large.join("blobs/sha256")).expect("the directory can be made");
    let blob = fs::File::create(large.join(format!("blobs/sha256/{}", "0".repeat(64)))).expect("the blob");
    blob.set_len(2 << 30).expect("a sparse file");
    fs::write(large.join("index.json"), r#"{"schemaVersion":2,"manifests":[]}"#).expect("index.json");
    fs::write(large.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).expect("oci-layout");
    fs::rename(&large, directory.join("a-large")).expect("the layout can be moved");
    let image = "registry.example/small:1";
    image_archives::write(&node.shared(), Form::Oci, image, &directory.join("b-small.tar"));
    node.apply("small.json", &with_image("small", image, "IfNotPresent"));
    node.start_agent();
    node.wait_ready("small");
    let before = node.metric("coracle_peak_memory_bytes");
    wait_until("the large archive", LONG * 3, || {
        node.cli(&["images", "list"]).contains("the content has the digest")
    });
    let grown = node.metric("coracle_peak_memory_bytes") - before;
    assert!(grown < 8e6, "reading a large archive needed {grown} bytes more");
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn node_without_images_starts_pods_from_archives() {
    let (mut node, directory) = prepare("setalone");
    let images = std::env::var("E2E_IMAGES").expect("E2E_IMAGES: run through tests/run e2e");
    for name in ["pause", "busybox"] {
        let archive = images.split_whitespace().find(|path| path.ends_with(&format!("/{name}.tar")));
        fs::copy(archive.expect("an archive"), directory.join(format!("{name}.tar"))).expect("a copy");
        node.containerd.ctr(&["images", "rm", "--sync", &format!("localhost/{name}:1")]);
    }
    node.apply("pod.json", &pod("alone", json!([busybox("main", FOREVER)])));
    node.start_agent();
    node.wait_ready("alone");
    node.finish();
}
