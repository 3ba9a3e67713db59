//! Archives of images in every form, made from the local busybox image under other names, and
//! archives of made-up images.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use coracle::images::archive::Platform;
use coracle::util::sha256;
use serde_json::{Value, json};

/// The forms of archives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Oci,
    OciGzip,
    OciZstd,
    Docker,
    DockerGzip,
    /// A directory.
    Layout,
}

pub(crate) const FORMS: [Form; 6] =
    [Form::Oci, Form::OciGzip, Form::OciZstd, Form::Docker, Form::DockerGzip, Form::Layout];

/// Writes an archive with the busybox image as `image` to `path`, complete in one step. `scratch` is a
/// directory for the work.
pub(crate) fn write(scratch: &Path, form: Form, image: &str, path: &Path) {
    let work = scratch.join(path.file_name().expect("a file name"));
    let _ = fs::remove_dir_all(&work);
    let layout = work.join("layout");
    fs::create_dir_all(&layout).expect("the scratch directory can be made");
    run(Command::new("tar").arg("xf").arg(busybox()).arg("-C").arg(&layout));
    name(&layout, image);
    let made = match form {
        Form::Layout => layout,
        Form::Oci => tar(&work, &layout),
        Form::OciGzip => pack("gzip", tar(&work, &layout)),
        Form::OciZstd => pack("zstd", tar(&work, &layout)),
        Form::Docker => tar(&work, &docker(&work, &layout, image)),
        Form::DockerGzip => pack("gzip", tar(&work, &docker(&work, &layout, image))),
    };
    fs::rename(made, path).expect("the archive can be moved to its place");
}

/// Writes an archive of a made-up image for this machine, whose layer has so many bytes, to `path`. No
/// runtime can unpack it.
pub(crate) fn write_made_up(scratch: &Path, image: &str, layer_bytes: usize, path: &Path) {
    let work = scratch.join(path.file_name().expect("a file name"));
    let layout = work.join("layout");
    fs::create_dir_all(layout.join("blobs/sha256")).expect("the scratch directory can be made");
    let add = |kind: &str, bytes: &[u8]| {
        let digest = sha256::sha256_hex(bytes);
        fs::write(layout.join("blobs/sha256").join(&digest), bytes).expect("a blob can be written");
        let media_type = format!("application/vnd.oci.image.{kind}");
        json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len()})
    };
    let bytes: Vec<u8> = (0..layer_bytes).map(|index| (index % 251) as u8).collect();
    let layer = add("layer.v1.tar", &bytes);
    let architecture = Platform::of_this_machine().architecture;
    let config = json!({"os": "linux", "architecture": architecture,
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]}});
    let config = add("config.v1+json", config.to_string().as_bytes());
    let manifest = json!({"schemaVersion": 2, "config": config, "layers": [layer]});
    let manifest = add("manifest.v1+json", manifest.to_string().as_bytes());
    let index = json!({"schemaVersion": 2, "manifests": [manifest]});
    fs::write(layout.join("index.json"), index.to_string()).expect("index.json can be written");
    name(&layout, image);
    fs::rename(tar(&work, &layout), path).expect("the archive can be moved to its place");
}

/// The local busybox image.
pub(crate) fn busybox() -> PathBuf {
    let images = std::env::var("E2E_IMAGES").expect("E2E_IMAGES: run through tests/run e2e");
    let path = images.split_whitespace().find(|path| path.ends_with("/busybox.tar")).expect("busybox.tar");
    PathBuf::from(path)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("a document of the image")).expect("JSON")
}

fn name(layout: &Path, image: &str) {
    let path = layout.join("index.json");
    let mut index = json(&path);
    index["manifests"][0]["annotations"] = json!({"io.containerd.image.name": image});
    fs::write(path, index.to_string()).expect("index.json can be written");
}

fn blob(layout: &Path, descriptor: &Value) -> PathBuf {
    let digest = descriptor["digest"].as_str().expect("a digest");
    layout.join("blobs").join(digest.replace(':', "/"))
}

/// The same image as `docker save` writes it.
fn docker(work: &Path, layout: &Path, image: &str) -> PathBuf {
    let saved = work.join("docker");
    fs::create_dir_all(saved.join("layer")).expect("the directory can be made");
    let index = json(&layout.join("index.json"));
    let manifest = json(&blob(layout, &index["manifests"][0]));
    fs::copy(blob(layout, &manifest["config"]), saved.join("config.json")).expect("the configuration");
    fs::copy(blob(layout, &manifest["layers"][0]), saved.join("layer/layer.tar")).expect("the layer");
    let list = json!([{"Config": "config.json", "RepoTags": [image], "Layers": ["layer/layer.tar"]}]);
    fs::write(saved.join("manifest.json"), list.to_string()).expect("manifest.json can be written");
    saved
}

fn tar(work: &Path, directory: &Path) -> PathBuf {
    let out = work.join("archive.tar");
    run(Command::new("tar").arg("cf").arg(&out).arg("-C").arg(directory).arg("."));
    out
}

fn pack(program: &str, tar: PathBuf) -> PathBuf {
    run(Command::new(program).args(["-1", "-q", "-f"]).arg(&tar));
    tar.with_extension(if program == "gzip" { "tar.gz" } else { "tar.zst" })
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
