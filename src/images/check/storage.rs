//! Where a runtime has unpacked the layers of an image.
//!
//! containerd: the native API on the socket of the CRI. A read-only snapshot above the image's last
//! layer is made and removed; nothing is mounted, but its description names the directories of all
//! layers. The chain id of the last layer and the digests of the layers are in the verbose status of
//! the image; the manifest, with the digests of the compressed layers, is in the content store
//! (containerd: docs/content-flow.md).
//!
//! A manifest is what its author wrote: that of another image may name the same configuration, so that
//! both are one image for the runtime, and any blobs and sizes. So it is read by the name that was
//! requested, and only says where a copy of a layer may be; the copy's digest decides.
//!
//! CRI-O: the lists of images and layers of containers/storage, below its root.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::de::DeserializeOwned;

use super::super::listed::{RuntimeImage, spec};
use super::documents::{Document, Info, MAX_LAYERS, StoredImage, StoredLayer};
use super::usage::{Meter, Metered};
use crate::cri::ImageClient;
use crate::model::image_name;
use crate::transport::generated::methods;
use crate::transport::generated::{imagestore, snapshots};
use crate::transport::grpc::{Channel, Kind};
use crate::util::stop::StopToken;
use crate::util::{backoff, sha256, untrusted};

/// A call to containerd's own API.
const CALL_LIMIT: Duration = Duration::from_secs(30);
/// When containerd removes a snapshot that the agent could not remove.
const EXPIRY: SignedDuration = SignedDuration::from_mins(10);
/// The namespace of the CRI in containerd's own API.
const NAMESPACE: (&str, &str) = ("containerd-namespace", "k8s.io");
const SNAPSHOTTER: &str = "io.containerd.snapshotter.v1.";
const CONTENT: &str = "io.containerd.content.v1.content/blobs/sha256";
/// The largest manifest or index that is read, as in containerd.
const MAX_MANIFEST: u64 = 8 << 20;
/// The largest list of images or layers of CRI-O.
const MAX_LIST: u64 = 64 << 20;
/// The most names of an image whose manifests are read if it was requested by its id.
const MAX_NAMES: usize = 8;

/// A layer and its directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layer {
    /// The directory with the files of the layer.
    pub(super) dir: PathBuf,
    /// The digest of its tar archive, as the image's configuration has it.
    pub(super) diff_id: String,
    /// The digest of the compressed archive, if it is known and another one.
    pub(super) blob: Option<String>,
}

impl Layer {
    /// The digests of its archive, compressed and not.
    pub(super) fn digests(&self) -> impl Iterator<Item = &String> {
        self.blob.iter().chain([&self.diff_id])
    }
}

/// An image as the runtime has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unpacked {
    /// The runtime's id of the image.
    pub(super) id: String,
    /// All names of the image.
    pub(super) names: Vec<String>,
    /// Whether the runtime keeps it, as the image of its sandboxes.
    pub(super) pinned: bool,
    /// From the lowest one.
    pub(super) layers: Vec<Layer>,
    /// The directory of the store of containerd; CRI-O has none.
    pub(super) store: Option<PathBuf>,
}

/// Why the layers of an image cannot be found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The runtime does not have the image.
    #[error("the runtime does not have the image")]
    Absent,
    /// The runtime or its storage is not supported, or failed.
    #[error("cannot verify: {0}")]
    Unknown(String),
}

fn unknown(text: impl ToString) -> Problem {
    Problem::Unknown(text.to_string())
}

/// Finds the layers of an image. `meter` counts the documents that are read for that.
pub(super) fn find(
    images: &ImageClient,
    image: &str,
    meter: &Arc<Meter>,
    stop: &StopToken,
) -> Result<Unpacked, Problem> {
    let (status, info) = images.image_details(spec(image)).map_err(unknown)?.ok_or(Problem::Absent)?;
    let places = images.image_fs_info().map_err(unknown)?.image_filesystems;
    let place = places.first().and_then(|place| place.fs_id.as_ref());
    let place = PathBuf::from(place.map(|id| id.mountpoint.clone()).unwrap_or_default());
    let RuntimeImage { id, names, pinned, .. } = RuntimeImage::from(status);
    let mut unpacked = Unpacked { id: id.to_string(), names, pinned, layers: Vec::new(), store: None };
    let base = place.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let root = place.parent().unwrap_or(Path::new("/"));
    match base.strip_prefix(SNAPSHOTTER) {
        Some("overlayfs") => {
            let info = info.get("info").map(String::as_str).unwrap_or_default();
            meter.read(info.len() as u64).map_err(unknown)?;
            let info: Info = serde_json::from_str(info).unwrap_or_default();
            let documents = Documents { store: root.join(CONTENT), meter, stop };
            Containerd { channel: &images.channel(), documents }.find(image, &info, &mut unpacked)?;
        }
        Some(other) => return Err(Problem::Unknown(format!("the snapshotter {other:?} is not supported"))),
        None if base == "overlay-images" => find_in_storage(root, &mut unpacked, meter, stop)?,
        None => return Err(Problem::Unknown(format!("storage of an unknown form: {}", place.display()))),
    }
    Ok(unpacked)
}

/// The hexadecimal digits of a SHA-256 digest.
pub(super) fn hex_of(digest: &str) -> Option<&str> {
    let hex = digest.strip_prefix("sha256:")?;
    (hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(hex)
}

struct Containerd<'a> {
    channel: &'a Channel,
    documents: Documents<'a>,
}

impl Containerd<'_> {
    fn find(&self, requested: &str, info: &Info, unpacked: &mut Unpacked) -> Result<(), Problem> {
        let (chain, diff_ids) = (info.chain_id.as_str(), &info.image_spec.rootfs.diff_ids);
        if chain.is_empty() || diff_ids.first.is_empty() || diff_ids.has_more {
            return Err(unknown("the runtime does not report the layers of the image"));
        }
        let dirs = layer_dirs(&self.mounts(chain)?, diff_ids.first.len())?;
        let layer = |(dir, diff_id): (PathBuf, &String)| Layer { dir, diff_id: diff_id.clone(), blob: None };
        unpacked.layers = dirs.into_iter().zip(&diff_ids.first).map(layer).collect();
        if let Some(manifest) = self.manifest(requested, unpacked) {
            name_blobs(&manifest, unpacked);
        }
        unpacked.store = Some(self.documents.store.clone());
        Ok(())
    }

    fn mounts(&self, chain: &str) -> Result<Vec<snapshots::SnapshotMount>, Problem> {
        let key = format!("coracle-verify-{:016x}", backoff::random_u64());
        let expiry = Timestamp::now().checked_add(EXPIRY).unwrap_or_default().strftime("%Y-%m-%dT%H:%M:%SZ");
        let request = snapshots::ViewSnapshotRequest {
            snapshotter: "overlayfs".to_owned(),
            key: key.clone(),
            parent: chain.to_owned(),
            // If the agent is killed now, containerd removes the snapshot.
            labels: [("containerd.io/gc.expire".to_owned(), expiry.to_string())].into(),
            ..Default::default()
        };
        let stop = self.documents.stop;
        let view = &methods::snapshots::VIEW;
        let viewed = self.channel.call_with_header(view, &request, NAMESPACE, CALL_LIMIT, stop);
        let request = snapshots::RemoveSnapshotRequest {
            snapshotter: "overlayfs".to_owned(),
            key,
            ..Default::default()
        };
        // Also after an error: the snapshot may exist.
        let remove = &methods::snapshots::REMOVE;
        let removed =
            self.channel.call_with_header(remove, &request, NAMESPACE, CALL_LIMIT, &StopToken::never());
        if let (Ok(_), Err(error)) = (&viewed, removed) {
            log::warn!("cannot remove a snapshot, which containerd will do in some minutes: {error}");
        }
        Ok(viewed.map_err(unknown)?.mounts)
    }

    /// The manifest of an image for this machine, of the digest that the requested name has. Without it,
    /// only copies of layers without compression are found.
    fn manifest(&self, requested: &str, unpacked: &Unpacked) -> Option<Document> {
        let of_name = |name: &str| self.documents.find(&self.target(name)?, &unpacked.id);
        match image_name::listed_name(requested).filter(|name| unpacked.names.contains(name)) {
            Some(name) => of_name(&name),
            None => unpacked.names.iter().take(MAX_NAMES).find_map(|name| of_name(name)),
        }
    }

    /// The digest of the manifest or index that a name has.
    fn target(&self, name: &str) -> Option<String> {
        let request = imagestore::GetImageRequest { name: name.to_owned(), ..Default::default() };
        let get = &methods::imagestore::GET;
        let found = self.channel.call_with_header(get, &request, NAMESPACE, CALL_LIMIT, self.documents.stop);
        let image = found.inspect_err(|error| log::debug!("no manifest of {name}: {error}")).ok()?.image;
        Some(image.target.digest.clone())
    }
}

/// Removes names of an image from containerd, and no others: to remove one by the CRI would remove all
/// names of the image's id (containerd: `RemoveImage`). Returns after the content that no image needs
/// any more was removed.
pub(super) fn remove_names(images: &ImageClient, names: &[String]) -> Result<(), String> {
    let channel = images.channel();
    for (index, name) in names.iter().enumerate() {
        let sync = index + 1 == names.len();
        let request = imagestore::DeleteImageRequest { name: name.clone(), sync, ..Default::default() };
        let delete = &methods::imagestore::DELETE;
        // Not stopped: this is no time to leave half of the names.
        let never = StopToken::never();
        match channel.call_with_header(delete, &request, NAMESPACE, CALL_LIMIT, &never) {
            Ok(_) => {}
            Err(error) if error.kind == Kind::NotFound => {}
            Err(error) => return Err(format!("{name} cannot be removed: {error}")),
        }
    }
    Ok(())
}

/// The documents in the content store of containerd. Authors of images write them.
struct Documents<'a> {
    store: PathBuf,
    meter: &'a Arc<Meter>,
    stop: &'a StopToken,
}

impl Documents<'_> {
    /// The manifest with this configuration, which has this digest or is listed in the index that has it.
    fn find(&self, digest: &str, config: &str) -> Option<Document> {
        let document = self.read(digest)?;
        if document.config.digest == config {
            return Some(document);
        }
        let listed = document.manifests.first.iter();
        listed
            .filter_map(|descriptor| self.read(&descriptor.digest))
            .find(|manifest| manifest.config.digest == config)
    }

    fn read(&self, digest: &str) -> Option<Document> {
        let hex = hex_of(digest)?;
        let bytes = read_metered(&self.store.join(hex), MAX_MANIFEST, self.meter, self.stop).ok()?;
        (sha256::sha256_hex(&bytes) == hex).then_some(())?;
        serde_json::from_slice(&bytes).ok()
    }
}

/// Reads a file of the runtime, which may be a link.
fn read_metered(path: &Path, limit: u64, meter: &Arc<Meter>, stop: &StopToken) -> std::io::Result<Vec<u8>> {
    let inner = untrusted::open_own(path)?;
    let mut bytes = Vec::new();
    let metered = Metered { inner, meter: Arc::clone(meter), stop: stop.clone() };
    metered.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        let text = format!("larger than {limit} bytes");
        return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
}

/// The directories of the layers, from the lowest one. Of an image with one layer the mount is a
/// bind mount; of others it is an overlay, which lists the uppermost layer first.
fn layer_dirs(mounts: &[snapshots::SnapshotMount], layers: usize) -> Result<Vec<PathBuf>, Problem> {
    let other = || unknown("containerd describes the layers in an unknown form");
    let [mount] = mounts else { return Err(other()) };
    let dirs: Vec<PathBuf> = match mount.type_.as_str() {
        "bind" => vec![PathBuf::from(&mount.source)],
        "overlay" => {
            let lower = mount.options.iter().find_map(|option| option.strip_prefix("lowerdir="));
            lower.ok_or_else(other)?.rsplit(':').map(PathBuf::from).collect()
        }
        _ => return Err(other()),
    };
    if dirs.len() != layers || dirs.iter().any(|dir| !dir.is_absolute()) {
        return Err(other());
    }
    Ok(dirs)
}

/// Adds the digests of the blobs to the layers. A blob may be absent: containerd does not load a layer that
/// is unpacked already.
fn name_blobs(manifest: &Document, unpacked: &mut Unpacked) {
    for (layer, blob) in unpacked.layers.iter_mut().zip(&manifest.layers.first) {
        let is_other = hex_of(&blob.digest).is_some() && blob.digest != layer.diff_id;
        layer.blob = is_other.then(|| blob.digest.clone());
    }
}

fn find_in_storage(
    root: &Path,
    unpacked: &mut Unpacked,
    meter: &Arc<Meter>,
    stop: &StopToken,
) -> Result<(), Problem> {
    fn read<T: DeserializeOwned>(path: &Path, meter: &Arc<Meter>, stop: &StopToken) -> Result<T, Problem> {
        let named = |error: &dyn std::fmt::Display| Problem::Unknown(format!("{}: {error}", path.display()));
        let bytes = read_metered(path, MAX_LIST, meter, stop).map_err(|error| named(&error))?;
        serde_json::from_slice(&bytes).map_err(|error| named(&error))
    }
    let id = unpacked.id.trim_start_matches("sha256:");
    let images: Vec<StoredImage> = read(&root.join("overlay-images/images.json"), meter, stop)?;
    let image = images.iter().find(|image| image.id.as_deref() == Some(id));
    let mut next = image.and_then(|image| image.layer.clone());
    let listed: Vec<StoredLayer> = read(&root.join("overlay-layers/layers.json"), meter, stop)?;
    while let Some(id) = next {
        let layer = listed.iter().find(|layer| layer.id.as_deref() == Some(id.as_str()));
        let layer = layer.ok_or_else(|| unknown(format!("the storage does not list the layer {id}")))?;
        let valid = |digest: &Option<String>| digest.clone().filter(|digest| hex_of(digest).is_some());
        let diff_id =
            valid(&layer.diff_digest).ok_or_else(|| unknown(format!("the layer {id} has no digest")))?;
        // The id becomes part of a path.
        if !id.bytes().all(|byte| byte.is_ascii_hexdigit()) || unpacked.layers.len() == MAX_LAYERS {
            return Err(unknown(format!("the storage has an invalid layer {id:?}")));
        }
        unpacked.layers.push(Layer {
            dir: root.join("overlay").join(&id).join("diff"),
            blob: valid(&layer.compressed_diff_digest).filter(|blob| *blob != diff_id),
            diff_id,
        });
        next = layer.parent.clone().filter(|parent| !parent.is_empty());
    }
    if unpacked.layers.is_empty() {
        return Err(unknown("the storage does not list the image"));
    }
    unpacked.layers.reverse();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::usage::Usage;
    use super::*;
    use serde_json::{Value, json};

    fn find_in(root: &Path, unpacked: &mut Unpacked) -> Result<(), Problem> {
        find_in_storage(root, unpacked, &Meter::unlimited(), &StopToken::never())
    }

    fn mount(kind: &str, source: &str, options: &[&str]) -> snapshots::SnapshotMount {
        snapshots::SnapshotMount {
            type_: kind.to_owned(),
            source: source.to_owned(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
            ..Default::default()
        }
    }

    fn digest(digit: char) -> String {
        format!("sha256:{}", String::from(digit).repeat(64))
    }

    fn blank() -> Unpacked {
        Unpacked { id: digest('a'), names: Vec::new(), pinned: false, layers: Vec::new(), store: None }
    }

    #[test]
    fn layers_are_found_in_both_forms_of_mounts_and_in_no_other() {
        let dirs = |mounts: &[snapshots::SnapshotMount], layers| layer_dirs(mounts, layers).ok();
        let overlay = mount("overlay", "overlay", &["index=off", "lowerdir=/3/fs:/2/fs:/1/fs"]);
        let expected = ["/1/fs", "/2/fs", "/3/fs"].map(PathBuf::from).to_vec();
        assert_eq!(dirs(std::slice::from_ref(&overlay), 3), Some(expected));
        assert_eq!(dirs(std::slice::from_ref(&overlay), 2), None);
        let bind = mount("bind", "/1/fs", &["ro", "rbind"]);
        assert_eq!(dirs(std::slice::from_ref(&bind), 1), Some(vec![PathBuf::from("/1/fs")]));
        assert_eq!(dirs(std::slice::from_ref(&bind), 2), None);
        assert_eq!(dirs(&[mount("erofs", "/x", &[])], 1), None);
        assert_eq!(dirs(&[mount("overlay", "overlay", &["lowerdir=relative"])], 1), None);
        assert_eq!(dirs(&[bind, overlay], 1), None);
        assert_eq!(dirs(&[], 0), None);
    }

    #[test]
    fn blobs_are_named_by_the_manifest_and_its_sizes_prove_nothing() {
        let blob = |digit, size: u64| json!({"digest": digest(digit), "size": size});
        let layers = [blob('1', 1), blob('2', 1), json!({"digest": "../x"})];
        let manifest = json!({"config": blob('9', 7), "layers": layers, "other": [{}]});
        let manifest = serde_json::from_value(manifest).unwrap();
        let mut unpacked = blank();
        let layer = |digit| Layer { dir: PathBuf::new(), diff_id: digest(digit), blob: None };
        unpacked.layers = vec![layer('1'), layer('7'), layer('8')];
        name_blobs(&manifest, &mut unpacked);
        let blobs: Vec<_> = unpacked.layers.iter().map(|layer| layer.blob.clone()).collect();
        assert_eq!(blobs, [None, Some(digest('2')), None]);
    }

    #[test]
    fn manifest_whose_content_has_another_digest_is_not_read() {
        let store = tempfile::tempdir().unwrap();
        let text = r#"{"layers": []}"#;
        let name = format!("sha256:{}", sha256::sha256_hex(text.as_bytes()));
        let file = store.path().join(hex_of(&name).unwrap());
        std::fs::write(&file, text).unwrap();
        let (meter, stop) = (Meter::unlimited(), StopToken::never());
        let documents = Documents { store: store.path().to_owned(), meter: &meter, stop: &stop };
        assert!(documents.read(&name).is_some());
        std::fs::write(&file, r#"{"layers":[ ]}"#).unwrap();
        assert!(documents.read(&name).is_none());
    }

    /// An index may list 512 manifests of 8 MiB each, and none of them need be one.
    #[test]
    fn manifests_are_counted_and_no_more_are_read_at_the_limit() {
        let store = tempfile::tempdir().unwrap();
        let write = |text: &str| {
            let name = format!("sha256:{}", sha256::sha256_hex(text.as_bytes()));
            std::fs::write(store.path().join(hex_of(&name).unwrap()), text).unwrap();
            json!({"digest": name})
        };
        let size = 100_000;
        let wrong: Vec<_> = (0..8).map(|n| write(&format!("{n}{}", " ".repeat(size - 1)))).collect();
        let right = write(&json!({"config": {"digest": digest('a')}}).to_string());
        let listed: Vec<_> = wrong.into_iter().chain([right]).collect();
        let index = write(&json!({"manifests": listed}).to_string());
        let (index, stop) = (index["digest"].as_str().unwrap().to_owned(), StopToken::never());
        let find = |meter: &Arc<Meter>, stop: &StopToken| {
            Documents { store: store.path().to_owned(), meter, stop }.find(&index, &digest('a')).is_some()
        };
        let meter = Meter::unlimited();
        assert!(find(&meter, &stop));
        assert!(meter.used().read > 8 * size as u64, "{:?}", meter.used());
        let meter = Meter::new(Usage { read: 3 * size as u64, written: 0 });
        assert!(!find(&meter, &stop) && meter.is_exhausted());
        assert!(meter.used().read <= 3 * size as u64);
        let (source, ended) = crate::util::stop::pair();
        drop(source);
        let meter = Meter::unlimited();
        assert!(!find(&meter, &ended) && meter.used().read == 0);
    }

    #[test]
    fn layers_of_cri_o_are_found_in_its_lists() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, value: Value| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, value.to_string()).unwrap();
        };
        assert!(find_in(root.path(), &mut blank()).unwrap_err().to_string().contains("images.json"));
        write("overlay-images/images.json", json!([{"id": "a".repeat(64), "layer": "2f"}]));
        let top = json!({"id": "2f", "parent": "1f", "diff-digest": digest('2'), "compressed-diff-digest": digest('c')});
        let low = json!({"id": "1f", "diff-digest": digest('1'), "compressed-diff-digest": digest('1')});
        write("overlay-layers/layers.json", json!([top, low]));
        let mut unpacked = blank();
        find_in(root.path(), &mut unpacked).unwrap();
        let layer = |id: &str, digit, blob: Option<char>| Layer {
            dir: root.path().join(format!("overlay/{id}/diff")),
            diff_id: digest(digit),
            blob: blob.map(digest),
        };
        assert_eq!(unpacked.layers, [layer("1f", '1', None), layer("2f", '2', Some('c'))]);
        // A list that was damaged may lead out of the storage, or into a circle.
        for parent in ["../../etc", "2f"] {
            let top = json!({"id": "2f", "parent": parent, "diff-digest": digest('2')});
            let low = json!({"id": "../../etc", "diff-digest": digest('1')});
            write("overlay-layers/layers.json", json!([top, low]));
            let error = find_in(root.path(), &mut blank()).unwrap_err();
            assert!(error.to_string().contains("invalid layer"), "{error}");
        }
        let mut other = Unpacked { id: digest('b'), ..blank() };
        assert!(find_in(root.path(), &mut other).is_err());
    }
}
