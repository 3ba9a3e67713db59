//! Archives for tests.

use std::io::Cursor;
use std::path::Path;

use super::assemble::assemble;
use super::limits::{LIMITS, Limits};
use super::open::scan_tar;
use super::platform::Platform;
use super::types::{Archive, ArchiveFormat};
use super::{ArchiveError, Stamp};
use crate::util::sha256;
pub(crate) use crate::util::tar::tests::{end, entry, records, repair};

/// What an archive in memory contains for linux/amd64, with the limits of the agent except that of
/// decompressed bytes.
pub(crate) fn inspect(bytes: &[u8], expanded: u64) -> Result<Archive, ArchiveError> {
    let limits = Limits { expanded, ratio: 1, ..LIMITS };
    let source = Box::new(Cursor::new(bytes.to_vec()));
    let (scan, compression) = scan_tar(source, bytes.len() as u64, &limits, &mut || Ok(()))?;
    let (images, blobs, faults) = assemble(&scan, false, &Platform::new("linux", "amd64", ""), &limits)?;
    let stamp = Stamp { dev: 0, ino: 0, size: 0, mtime_ns: 0, ctime_ns: 0 };
    Ok(Archive { form: ArchiveFormat::OciTar, compression, stamp, images, blobs, faults })
}

/// A file of an archive.
pub(crate) type Entry = (String, Vec<u8>);

/// A regular file in a tar archive.
pub(crate) fn file(name: &str, data: &[u8]) -> Vec<u8> {
    entry(name, b'0', "", data)
}

/// A blob of a layout: its path.
pub(crate) fn blob(data: &[u8]) -> Entry {
    (format!("blobs/sha256/{}", sha256::sha256_hex(data)), data.to_vec())
}

/// A descriptor of a blob, with further fields.
pub(crate) fn descriptor(data: &[u8], media_type: &str, more: &str) -> String {
    let (digest, size) = (sha256::sha256_hex(data), data.len());
    format!(r#"{{"mediaType":"{media_type}","digest":"sha256:{digest}","size":{size}{more}}}"#)
}

pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// A layer: a tar archive with one file.
pub(crate) fn layer(text: &str) -> Vec<u8> {
    [file("etc/text", text.repeat(300).as_bytes()), end()].concat()
}

/// The configuration of an image of `os/architecture/variant` with these layers.
pub(crate) fn config(platform: &str, layers: &[Vec<u8>]) -> Vec<u8> {
    let mut parts = platform.split('/');
    let mut part = || parts.next().unwrap_or_default();
    let ids: Vec<String> =
        layers.iter().map(|layer| format!(r#""sha256:{}""#, sha256::sha256_hex(layer))).collect();
    format!(
        r#"{{"os":"{}","architecture":"{}","variant":"{}","config":{{"Env":["A=b"]}},"rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
        part(),
        part(),
        part(),
        ids.join(",")
    )
    .into_bytes()
}

/// An OCI image: its blobs, the last of which is the manifest.
pub(crate) fn image(platform: &str, texts: &[&str]) -> Vec<Entry> {
    let layers: Vec<Vec<u8>> = texts.iter().map(|text| layer(text)).collect();
    let config = config(platform, &layers);
    let list: Vec<String> = layers.iter().map(|layer| descriptor(layer, LAYER, "")).collect();
    let manifest = format!(
        r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}","config":{},"layers":[{}]}}"#,
        descriptor(&config, CONFIG, ""),
        list.join(",")
    );
    let mut blobs: Vec<Entry> = layers.iter().map(|layer| blob(layer)).collect();
    blobs.push(blob(&config));
    blobs.push(blob(manifest.as_bytes()));
    blobs
}

/// The text of an index of these descriptors.
pub(crate) fn index(descriptors: &[String]) -> String {
    format!(r#"{{"schemaVersion":2,"mediaType":"{INDEX}","manifests":[{}]}}"#, descriptors.join(","))
}

/// The annotations of a descriptor in `index.json`.
pub(crate) fn named(name: &str) -> String {
    format!(r#","annotations":{{"io.containerd.image.name":"{name}"}}"#)
}

/// A layout with images, each with its name.
pub(crate) fn layout(images: &[(&str, &[Entry])]) -> Vec<Entry> {
    let mut entries = vec![("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec())];
    let mut list = Vec::new();
    for (name, blobs) in images {
        let target = &blobs[blobs.len() - 1].1;
        let media_type = if String::from_utf8_lossy(target).contains(INDEX) { INDEX } else { MANIFEST };
        list.push(descriptor(target, media_type, &named(name)));
        entries.extend(blobs.iter().cloned());
    }
    entries.push(("index.json".to_owned(), index(&list).into_bytes()));
    entries.sort();
    entries.dedup();
    entries
}

/// The archive of `docker save` with images: names, platform, texts of the layers.
pub(crate) fn docker(images: &[(&[&str], &str, &[&str])]) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut list = Vec::new();
    for (names, platform, texts) in images {
        let layers: Vec<Vec<u8>> = texts.iter().map(|text| layer(text)).collect();
        let config = config(platform, &layers);
        let config_name = format!("{}.json", sha256::sha256_hex(&config));
        let paths: Vec<String> = texts.iter().map(|text| format!("{text}/layer.tar")).collect();
        list.push(format!(r#"{{"Config":"{config_name}","RepoTags":{names:?},"Layers":{paths:?}}}"#));
        entries.push((config_name, config));
        entries.extend(paths.into_iter().zip(layers));
    }
    entries.sort();
    entries.dedup();
    entries.push(("manifest.json".to_owned(), format!("[{}]", list.join(",")).into_bytes()));
    entries
}

/// A tar archive of files, with the directories of their paths.
pub(crate) fn tar(entries: &[Entry]) -> Vec<u8> {
    let files: Vec<u8> = entries.iter().flat_map(|(name, data)| file(name, data)).collect();
    [entry("blobs/", b'5', "", b""), files, end()].concat()
}

/// Writes files below a directory.
pub(crate) fn unpack(directory: &Path, entries: &[Entry]) {
    for (name, data) in entries {
        let path = directory.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, data).unwrap();
    }
}
