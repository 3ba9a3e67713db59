//! Archives of images in every form, made from the local busybox image under other names.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

/// The forms of archives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Oci,
    OciGzip,
    OciZstd,
    Docker,
    DockerGzip,
    /// A directory.
    Layout,
}

/// All forms.
pub const FORMS: [Form; 6] =
    [Form::Oci, Form::OciGzip, Form::OciZstd, Form::Docker, Form::DockerGzip, Form::Layout];

/// Writes an archive with the busybox image as `image` to `path`, complete in one step. `scratch` is a
/// directory for the work.
pub fn write(scratch: &Path, form: Form, image: &str, path: &Path) {
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

/// The local busybox image.
pub fn busybox() -> PathBuf {
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
