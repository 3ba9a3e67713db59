use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::limits::{LIMITS, Limits};
use super::open::{CountingFile, read_within};
use super::testing::*;
use super::*;
use crate::util::decompress;
use crate::util::gzip::Gzip;
use crate::util::sha256;
use crate::util::stop::{self, StopToken};
use crate::util::testing::zstd;

fn amd64() -> Platform {
    Platform::new("linux", "amd64", "")
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut gzip = Gzip::fast(Vec::new());
    gzip.write_all(data).unwrap();
    gzip.finish().unwrap()
}

/// A file with these bytes in a new directory.
fn stored(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("archive");
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

fn read_path(path: &Path, limits: &Limits) -> Result<Archive, ArchiveError> {
    read_within(path, &amd64(), limits, &StopToken::never(), &mut |_| {})
}

fn read_bytes(bytes: &[u8]) -> Result<Archive, ArchiveError> {
    let (_dir, path) = stored(bytes);
    read_path(&path, &LIMITS)
}

fn read_tar(entries: &[Entry]) -> Archive {
    read_bytes(&tar(entries)).unwrap()
}

/// The first names of the images.
fn offered(archive: &Archive) -> Vec<&str> {
    archive.images.iter().map(|image| image.names.first().map_or("", String::as_str)).collect()
}

fn faults(archive: &Archive) -> Vec<String> {
    archive.faults.iter().map(|fault| format!("{}: {}", fault.object, fault.problem)).collect()
}

fn digest(data: &[u8]) -> String {
    format!("sha256:{}", sha256::sha256_hex(data))
}

/// Reads every blob of every image through the archive, from its start and from its middle.
fn assert_blobs_are_readable(path: &Path, archive: &Archive) {
    for blob in archive.images.iter().flat_map(|image| &image.blobs) {
        let read = |from| {
            let mut data = Vec::new();
            let mut reader =
                open_blob(path, archive, blob, from, &count_nothing(), &StopToken::never()).unwrap();
            assert_eq!(reader.left(), archive.blobs[blob].size - from);
            reader.read_to_end(&mut data).map(|_| data).unwrap()
        };
        let whole = read(0);
        assert_eq!(digest(&whole), blob.as_str());
        assert_eq!(read(whole.len() as u64 / 2), whole[whole.len() / 2..]);
        assert_eq!(read(whole.len() as u64), b"");
        let beyond =
            open_blob(path, archive, blob, whole.len() as u64 + 1, &count_nothing(), &StopToken::never());
        assert!(matches!(beyond, Err(ArchiveError::NoBlob(_))));
    }
}

/// Two images of different platforms below one index, which has two further entries.
fn multi_platform() -> Vec<Entry> {
    let (ours, other) =
        (image("linux/amd64", &["base", "ours"]), image("linux/arm64/v8", &["base", "other"]));
    let below = |blobs: &[Entry], platform: &str| {
        descriptor(&blobs[blobs.len() - 1].1, MANIFEST, &format!(r#","platform":{platform}"#))
    };
    let attestation = image("linux/amd64", &["attestation"]);
    let text = index(&[
        below(&attestation, r#"{"os":"unknown","architecture":"unknown"}"#),
        below(&other, r#"{"os":"linux","architecture":"arm64","variant":"v8"}"#),
        below(&ours, r#"{"os":"linux","architecture":"amd64"}"#),
    ]);
    // Of the other platform, only some blobs are there.
    let mut entries = ours;
    entries.extend(other.into_iter().skip(2));
    entries.push(blob(text.as_bytes()));
    entries
}

#[test]
fn each_form_and_compression_offers_its_images() {
    let first = image("linux/amd64", &["base", "one"]);
    let second = image("linux/amd64", &["base", "two"]);
    let oci = layout(&[("localhost/one:1", &first), ("docker.io/library/two:2", &second)]);
    let docker = docker(&[
        (&["localhost/one:1"], "linux/amd64", &["base", "one"]),
        (&["two:2", "other/two:2"], "linux/amd64", &["base", "two"]),
    ]);
    for (form, entries) in
        [(ArchiveFormat::OciTar, &oci), (ArchiveFormat::DockerTar, &docker), (ArchiveFormat::OciLayout, &oci)]
    {
        let plain = tar(entries);
        let halves = plain.split_at(plain.len() / 2);
        for (compression, bytes) in [
            (Compression::None, plain.clone()),
            (Compression::Gzip, gzip(&plain)),
            (Compression::Gzip, [gzip(halves.0), gzip(halves.1)].concat()),
            (Compression::Zstd, zstd(&plain)),
            (Compression::Zstd, [zstd(halves.0), zstd(halves.1)].concat()),
        ] {
            let (dir, mut path) = stored(&bytes);
            if form == ArchiveFormat::OciLayout {
                if compression != Compression::None {
                    continue;
                }
                path = dir.path().join("layout");
                unpack(&path, entries);
            }
            let mut last = 0;
            let archive = read(&path, &amd64(), &StopToken::never(), &mut |bytes| last = bytes).unwrap();
            assert_eq!((archive.form, archive.compression), (form, compression));
            assert_eq!(faults(&archive), [""; 0]);
            assert_eq!(offered(&archive), ["localhost/one:1", "docker.io/library/two:2"]);
            let size = |data: &[u8]| data.len() as u64;
            for (image, texts) in archive.images.iter().zip([["base", "one"], ["base", "two"]]) {
                let layers: Vec<(String, u64)> = image
                    .layers
                    .iter()
                    .map(|stored_layer| (stored_layer.digest.to_string(), stored_layer.size))
                    .collect();
                assert_eq!(layers, texts.map(|text| (digest(&layer(text)), size(&layer(text)))));
                assert_eq!(image.blobs.len(), 4);
                assert_eq!(image.blobs[0], image.target);
                assert_eq!(archive.blobs[&image.target].size, image.size);
                assert_eq!(archive.blobs[&image.target].media_type, image.media_type);
                for layer in &image.layers {
                    assert_eq!(archive.blobs[&layer.digest].media_type, layer.media_type);
                }
            }
            if form != ArchiveFormat::OciLayout {
                assert_eq!(last, bytes.len() as u64);
            }
            assert_blobs_are_readable(&path, &archive);
            let names = names(&path, &StopToken::never()).unwrap();
            let two = match form {
                ArchiveFormat::DockerTar => {
                    vec!["docker.io/library/two:2", "docker.io/other/two:2", "localhost/one:1"]
                }
                _ => vec!["docker.io/library/two:2", "localhost/one:1"],
            };
            assert_eq!(names.is_some(), compression == Compression::None);
            if let Some(mut names) = names {
                names.sort();
                assert_eq!(names, two);
            }
        }
    }
}

#[test]
fn archive_keeps_everything_as_json() {
    let mut entries = docker(&[(&["a:1"], "linux/amd64", &["x"]), (&["b:1"], "linux/arm64", &["x"])]);
    entries.insert(0, blob(b"damaged"));
    entries[0].1[0] = b'D';
    let archive = read_tar(&entries);
    assert_eq!((archive.images.len(), archive.faults.len()), (1, 2));
    let text = serde_json::to_string(&archive).unwrap();
    assert_eq!(serde_json::from_str::<Archive>(&text).unwrap(), archive);
    let invalid = text.replace("sha256:", "sha1:");
    assert!(serde_json::from_str::<Archive>(&invalid).is_err());
}

#[test]
fn entries_are_found_in_any_order_and_by_any_spelling() {
    let mut entries = layout(&[("localhost/a:1", &image("linux/amd64", &["x", "y"]))]);
    entries.reverse();
    for (name, _) in &mut entries {
        *name = format!("./{}", name.replace('/', "//"));
    }
    let archive = read_tar(&entries);
    assert_eq!(offered(&archive), ["localhost/a:1"]);
    // The same with pax headers.
    let mut bytes = Vec::new();
    for (name, data) in &entries {
        bytes.extend([entry("pax", b'x', "", &records(&[("path", name)])), file("other", data)].concat());
    }
    assert_eq!(offered(&read_bytes(&bytes).unwrap()), ["localhost/a:1"]);
}

#[test]
fn names_come_from_annotations_of_both_kinds_and_images_without_name_are_faults() {
    let images: Vec<Vec<Entry>> =
        ["a", "b", "c", "d", "e"].map(|text| image("linux/amd64", &[text])).to_vec();
    let target = |number: usize, annotations: &str| {
        let more = format!(r#","annotations":{{{annotations}}}"#);
        descriptor(&images[number][2].1, MANIFEST, &more)
    };
    let list = [
        target(
            0,
            r#""io.containerd.image.name":"docker.io/library/a:1","org.opencontainers.image.ref.name":"1""#,
        ),
        target(1, r#""org.opencontainers.image.ref.name":"localhost/b:1""#),
        target(2, r#""org.opencontainers.image.ref.name":"latest""#),
        target(3, r#""io.containerd.image.name":"UPPER CASE""#),
        target(0, r#""io.containerd.image.name":"again:1""#),
        target(4, r#""io.containerd.image.name":"localhost/b:1""#),
    ];
    let mut entries: Vec<Entry> = images.iter().flatten().cloned().collect();
    entries.push(("index.json".to_owned(), index(&list).into_bytes()));
    let archive = read_tar(&entries);
    let names: Vec<Vec<&str>> =
        archive.images.iter().map(|image| image.names.iter().map(String::as_str).collect()).collect();
    let a = vec!["docker.io/library/a:1", "docker.io/library/again:1"];
    assert_eq!(names, [a, vec![], vec![], vec![], vec!["localhost/b:1"]]);
    assert_eq!(
        faults(&archive),
        [
            format!("{}: it has no name, only the tag \"latest\"", digest(&images[2][2].1)),
            format!(
                "{}: \"UPPER CASE\" is not a name of an image: invalid reference format: repository name \
                 (library/UPPER CASE) must be lowercase",
                digest(&images[3][2].1)
            ),
        ]
    );
}

#[test]
fn archive_of_both_forms_keeps_its_manifest_and_gets_both_names() {
    let blobs = image("linux/amd64", &["base", "one"]);
    let mut entries = blobs.clone();
    let more = r#","annotations":{"org.opencontainers.image.ref.name":"1"}"#;
    entries.push(("index.json".to_owned(), index(&[descriptor(&blobs[3].1, MANIFEST, more)]).into_bytes()));
    let layers = [&blobs[0].0, &blobs[1].0];
    let other = docker(&[(&["only/docker:1"], "linux/amd64", &["base"])]);
    let (list, files) = other.split_last().unwrap();
    let only = String::from_utf8_lossy(&list.1);
    let list = format!(
        r#"[{{"Config":"{}","RepoTags":["one:1","alias/one:1"],"Layers":{layers:?}}},{}"#,
        blobs[2].0,
        only.trim_start_matches('[')
    );
    entries.extend(files.iter().cloned());
    entries.push(("manifest.json".to_owned(), list.into_bytes()));
    let (_dir, path) = stored(&tar(&entries));
    let archive = read_path(&path, &LIMITS).unwrap();
    assert_eq!(archive.form, ArchiveFormat::OciTar);
    assert_eq!(faults(&archive), [""; 0]);
    assert_eq!(archive.images[0].names, ["docker.io/alias/one:1", "docker.io/library/one:1"]);
    assert_eq!(archive.images[0].target.as_str(), digest(&blobs[3].1));
    assert_eq!(archive.images[1].names, ["docker.io/only/docker:1"]);
    assert_eq!(archive.images.len(), 2);
    assert_blobs_are_readable(&path, &archive);
}

#[test]
fn index_of_several_platforms_needs_only_blobs_of_this_platform() {
    let blobs = multi_platform();
    let (_dir, path) = stored(&tar(&layout(&[("localhost/a:1", &blobs)])));
    let archive = read_path(&path, &LIMITS).unwrap();
    assert_eq!(faults(&archive), [""; 0]);
    let image = &archive.images[0];
    let index = &blobs[blobs.len() - 1].1;
    assert_eq!((image.target.as_str(), image.size), (digest(index).as_str(), index.len() as u64));
    assert_eq!(image.media_type, INDEX);
    let needed: Vec<&str> = image.blobs.iter().map(Digest::as_str).collect();
    let expected = [index, &blobs[3].1, &blobs[2].1, &blobs[0].1, &blobs[1].1].map(|data| digest(data));
    assert_eq!(needed, expected);
    assert_blobs_are_readable(&path, &archive);

    // On the other node, a blob is missing.
    let arm = Platform::new("linux", "arm64", "");
    let archive = read(&path, &arm, &StopToken::never(), &mut |_| {}).unwrap();
    assert!(archive.images.is_empty());
    let missing = format!("localhost/a:1: blob {}: it is not in the archive", digest(&layer("other")));
    assert_eq!(faults(&archive), [missing]);
    let riscv = Platform::new("linux", "riscv64", "");
    let archive = read(&path, &riscv, &StopToken::never(), &mut |_| {}).unwrap();
    assert_eq!(
        faults(&archive),
        [
            "localhost/a:1: it is for linux/amd64, linux/arm64, unknown/unknown, and this node is linux/riscv64"
        ]
    );
}

#[test]
fn manifests_of_several_platforms_with_one_name_are_no_faults() {
    let (ours, other) = (image("linux/amd64", &["x"]), image("linux/arm64", &["x"]));
    let entries = layout(&[("localhost/a:1", &other), ("localhost/a:1", &ours), ("localhost/b:1", &other)]);
    let archive = read_tar(&entries);
    assert_eq!(offered(&archive), ["localhost/a:1"]);
    assert_eq!(faults(&archive), ["localhost/b:1: it is for linux/arm64, and this node is linux/amd64"]);
}

#[test]
fn index_without_platforms_is_resolved_by_the_configurations() {
    let (ours, other) = (image("linux/amd64", &["x"]), image("linux/s390x", &["y"]));
    let text = index(&[descriptor(&other[2].1, MANIFEST, ""), descriptor(&ours[2].1, MANIFEST, "")]);
    let blobs = [ours.clone(), other, vec![blob(text.as_bytes())]].concat();
    let archive = read_tar(&layout(&[("localhost/a:1", &blobs)]));
    assert_eq!(archive.images[0].layers[0].digest.as_str(), digest(&ours[0].1));
    assert_eq!(archive.images[0].blobs.len(), 4);
}

#[test]
fn truncated_archive_offers_the_images_before_the_cut() {
    let (first, second) = (image("linux/amd64", &["one"]), image("linux/amd64", &["two"]));
    let mut entries = layout(&[("localhost/one:1", &first), ("localhost/two:1", &second)]);
    // The list first, then the images in order.
    entries.sort_by_key(|entry| match entry {
        (name, _) if !name.starts_with("blobs") => 0,
        entry if first.contains(entry) => 1,
        (_, data) if data.starts_with(b"{") => 2,
        _ => 3,
    });
    let whole = tar(&entries);
    let lost = digest(&second[0].1);
    // In the middle of the last layer, and before its header.
    for length in [whole.len() - 1024 - 1000, whole.len() - 1024 - second[0].1.len() - 512] {
        let archive = read_bytes(&whole[..length]).unwrap();
        assert_eq!(offered(&archive), ["localhost/one:1"]);
        assert!(
            faults(&archive).contains(&format!("localhost/two:1: blob {lost}: the archive is truncated")),
            "{:?}",
            faults(&archive)
        );
    }
    for packed in [gzip(&whole), zstd(&whole)] {
        let error = read_bytes(&packed[..20]).unwrap_err();
        assert_eq!(error.to_string(), "the archive is truncated");
        // A decoder of zstd does not give out the last window of a frame that has no end.
        match read_bytes(&packed[..packed.len() - 12]) {
            Ok(archive) => assert_eq!(offered(&archive), ["localhost/one:1", "localhost/two:1"]),
            Err(error) => assert_eq!(error.to_string(), "the archive is truncated"),
        }
    }
    // Members are cut where the last layer begins.
    let start = whole.len() - 1024 - second[0].1.len() - 512;
    let packed = [gzip(&whole[..start]), gzip(&whole[start..])[..30].to_vec()].concat();
    let archive = read_bytes(&packed).unwrap();
    assert_eq!(offered(&archive), ["localhost/one:1"]);
    assert!(faults(&archive)[0].contains("the archive is truncated"), "{:?}", faults(&archive));
    // Cut before the list.
    entries.rotate_left(2);
    let whole = tar(&entries);
    let error = read_bytes(&whole[..2000]).unwrap_err();
    assert_eq!(error.to_string(), "the archive is truncated");
    assert!(matches!(read_bytes(b""), Err(ArchiveError::NotAnArchive)));
}

#[test]
fn damaged_header_in_the_middle_is_named_with_its_position() {
    let mut entries = layout(&[("localhost/a:1", &image("linux/amd64", &["x"]))]);
    // The list and the file `oci-layout`, after a directory without data.
    entries.rotate_right(2);
    let mut bytes = tar(&entries);
    let offset = 512 + 512 + entries[0].1.len().next_multiple_of(512);
    bytes[offset + 3] ^= 1;
    let archive = read_bytes(&bytes).unwrap();
    assert!(archive.images.is_empty());
    let expected = format!(
        "the archive is damaged at byte {}: the header of an entry has a wrong checksum",
        offset + 512
    );
    assert!(faults(&archive)[0].ends_with(&expected), "{:?}", faults(&archive));
    bytes[515] ^= 1;
    let error = read_bytes(&bytes).unwrap_err().to_string();
    assert!(error.starts_with("the archive is damaged at byte 1024"), "{error}");
}

#[test]
fn damaged_blobs_are_named_and_other_images_offered() {
    let good = image("linux/amd64", &["good"]);
    let bad = image("linux/amd64", &["bad", "good"]);
    let (layer_blob, config_blob, manifest_blob) = (&bad[0], &bad[2], &bad[3]);
    let whole = layout(&[("localhost/bad:1", &bad), ("localhost/good:1", &good)]);
    let changed = |blob: &Entry, change: &dyn Fn(&mut Vec<u8>)| {
        let mut entries = whole.clone();
        change(&mut entries.iter_mut().find(|entry| **entry == *blob).unwrap().1);
        entries
    };
    for damaged in [layer_blob, config_blob, manifest_blob] {
        let expected = digest(&damaged.1);
        let flip = |data: &mut Vec<u8>| data[40] ^= 1;
        let cut = |data: &mut Vec<u8>| data.truncate(data.len() / 2);
        for change in [&flip as &dyn Fn(&mut Vec<u8>), &cut] {
            let entries = changed(damaged, change);
            let found = digest(&entries.iter().find(|entry| entry.0 == damaged.0).unwrap().1);
            let archive = read_tar(&entries);
            assert_eq!(offered(&archive), ["localhost/good:1"]);
            assert_eq!(
                faults(&archive),
                [
                    format!("{expected}: the content has the digest {found}"),
                    format!("localhost/bad:1: blob {expected}: the content has the digest {found}"),
                ]
            );
            assert!(!archive.blobs.contains_key(&Digest::parse(&expected).unwrap()));
        }
        let missing: Vec<Entry> = whole.iter().filter(|entry| *entry != damaged).cloned().collect();
        let archive = read_tar(&missing);
        assert_eq!(offered(&archive), ["localhost/good:1"]);
        assert_eq!(faults(&archive), [format!("localhost/bad:1: blob {expected}: it is not in the archive")]);
    }
}

#[test]
fn descriptors_that_disagree_with_blobs_are_faults() {
    let blobs = image("linux/amd64", &["x"]);
    let manifest = &blobs[2].1;
    let (id, size) = (digest(manifest), manifest.len());
    let sha512 = format!("sha512:{}", "a".repeat(128));
    for (target, expected) in [
        (
            format!(r#"{{"mediaType":"{MANIFEST}","digest":"{id}","size":1}}"#),
            format!("blob {id}: the content has {size} bytes instead of 1"),
        ),
        (
            format!(r#"{{"mediaType":"{MANIFEST}","digest":"{id}","size":-1}}"#),
            format!("blob {id}: invalid document: its descriptor has no size"),
        ),
        (
            format!(r#"{{"mediaType":"{INDEX}","digest":"{id}","size":{size}}}"#),
            format!("blob {id}: invalid document: its type is {MANIFEST}, and its descriptor says {INDEX}"),
        ),
        (
            format!(r#"{{"mediaType":"{MANIFEST}","digest":"{sha512}","size":1}}"#),
            "digests with sha512 are not supported, only sha256".to_owned(),
        ),
        (
            format!(r#"{{"mediaType":"{MANIFEST}","digest":"{}","size":1}}"#, id.to_uppercase()),
            format!("{:?} is not a digest", id.to_uppercase()),
        ),
        (
            descriptor(&blobs[1].1, CONFIG, ""),
            format!("blob {}: invalid document: it is neither an index nor a manifest", digest(&blobs[1].1)),
        ),
        (
            descriptor(&blobs[0].1, LAYER, ""),
            format!("blob {}: invalid document: it is not JSON", digest(&blobs[0].1)),
        ),
    ] {
        let target =
            target.replacen('{', &format!("{{{},", named("localhost/a:1").trim_start_matches(',')), 1);
        let mut entries = blobs.clone();
        entries.push(("index.json".to_owned(), index(&[target]).into_bytes()));
        let archive = read_tar(&entries);
        assert!(archive.images.is_empty());
        assert_eq!(faults(&archive).len(), 1, "{:?}", faults(&archive));
        assert!(faults(&archive)[0].ends_with(&expected), "{:?}\n{expected}", faults(&archive));
    }
}

#[test]
fn ambiguous_and_invalid_documents_are_refused() {
    let blobs = image("linux/amd64", &["x"]);
    let both = format!(
        r#"{{"schemaVersion":2,"manifests":[],"config":{},"layers":[]}}"#,
        descriptor(&blobs[1].1, CONFIG, "")
    );
    for (text, expected) in [
        (both.as_str(), "it is an index and a manifest"),
        (r#"{"manifests":[],"layers":[]}"#, "it is an index and a manifest"),
        (r#"{"manifests":{}}"#, "manifests is not a list"),
        (r#"{"manifests":["#, "EOF while parsing"),
        (format!("{}{}", "[".repeat(300), "]".repeat(300)).as_str(), "recursion limit exceeded"),
        (format!("{{\"layers\":[{}0]}}", "0,".repeat(50_000)).as_str(), "it has more than 50000 values"),
        (format!("{{\"layers\":[{}0]}}", "0,".repeat(20_000)).as_str(), "it has more than 20000 references"),
        ("{\"layers\":null,\"a\":\"\\", "EOF while parsing"),
    ] {
        let mut entries = blobs.clone();
        entries.push(blob(text.as_bytes()));
        let list = index(&[descriptor(text.as_bytes(), "", &named("localhost/a:1"))]);
        entries.push(("index.json".to_owned(), list.into_bytes()));
        let archive = read_tar(&entries);
        assert!(archive.images.is_empty());
        let id = digest(text.as_bytes());
        assert!(faults(&archive)[0].starts_with(&format!("localhost/a:1: blob {id}: ")));
        assert!(faults(&archive)[0].contains(expected), "{:?}", faults(&archive));
        // The same as the list of images.
        let error = read_tar_error(&[("index.json".to_owned(), text.as_bytes().to_vec())]);
        assert!(error.contains("index.json"), "{error}");
    }
    assert!(matches!(read_bytes(&tar(&[("file".to_owned(), vec![1])])), Err(ArchiveError::NotAnArchive)));
    assert!(matches!(read_bytes(&[b'x'; 5000]), Err(ArchiveError::NotAnArchive)));
    let other = read_tar_error(&[("manifest.json".to_owned(), b"{}".to_vec())]);
    assert!(other.contains("not an archive of images"), "{other}");
}

fn read_tar_error(entries: &[Entry]) -> String {
    read_bytes(&tar(entries)).unwrap_err().to_string()
}

#[test]
fn indexes_in_indexes_are_followed_to_a_limit() {
    let mut blobs = image("linux/amd64", &["x"]);
    let mut images = Vec::new();
    for level in 1..=4 {
        let (target, media_type) = (&blobs[blobs.len() - 1].1, if level == 1 { MANIFEST } else { INDEX });
        let text = index(&[descriptor(target, media_type, "")]);
        blobs.push(blob(text.as_bytes()));
        images.push(blobs.clone());
    }
    let names = ["localhost/a:1", "localhost/a:2", "localhost/a:3", "localhost/a:4"];
    let list: Vec<(&str, &[Entry])> =
        names.iter().zip(&images).map(|(name, blobs)| (*name, blobs.as_slice())).collect();
    let archive = read_tar(&layout(&list));
    assert_eq!(offered(&archive), ["localhost/a:1", "localhost/a:2", "localhost/a:3"]);
    assert!(faults(&archive)[0].starts_with("localhost/a:4: blob sha256:"), "{:?}", faults(&archive));
    assert!(faults(&archive)[0].ends_with("it has more than 3 levels of indexes"));
}

#[test]
fn names_that_lead_out_of_the_archive_are_never_followed() {
    let blobs = image("linux/amd64", &["x"]);
    let entries = layout(&[("localhost/a:1", &blobs)]);
    let layer_name = blobs[0].0.as_str();
    let without: Vec<Entry> = entries.iter().filter(|entry| entry.0 != layer_name).cloned().collect();
    let rest: Vec<u8> = without.iter().flat_map(|(name, data)| file(name, data)).collect();
    let with = |more: &[Vec<u8>]| [&rest[..], &more.concat(), &end()].concat();
    let missing = format!("localhost/a:1: blob {}: it is not in the archive", digest(&blobs[0].1));
    for prefix in ["../", "/", "a/../../"] {
        let name = format!("{prefix}{layer_name}");
        let archive = read_bytes(&with(&[file(&name, &blobs[0].1)])).unwrap();
        assert!(archive.images.is_empty());
        assert_eq!(
            faults(&archive),
            [format!("{name}: the name {name:?} leads out of the archive"), missing.clone()]
        );
    }
    // In a place that does not matter.
    let archive = read_bytes(&with(&[file("../../etc/passwd", b"x"), file(layer_name, &blobs[0].1)]));
    assert_eq!(faults(&archive.unwrap()), [""; 0]);
    for (kind, target) in
        [(b'2', "/etc/passwd"), (b'2', "../../../etc/passwd"), (b'1', "/etc/passwd"), (b'1', "../x")]
    {
        let archive = read_bytes(&with(&[entry(layer_name, kind, target, b"")])).unwrap();
        assert!(archive.images.is_empty());
        let expected = format!("the name {target:?} leads out of the archive");
        assert!(faults(&archive).iter().all(|fault| fault.ends_with(&expected)), "{:?}", faults(&archive));
        assert_eq!(archive.faults.len(), 2);
    }
    for (kind, expected) in [(b'3', "it is a device"), (b'6', "it is a pipe"), (b'S', "it is a sparse file")]
    {
        let archive = read_bytes(&with(&[entry(layer_name, kind, "", b"")])).unwrap();
        assert!(archive.images.is_empty());
        assert!(faults(&archive).iter().all(|fault| fault.contains(expected)), "{:?}", faults(&archive));
    }
    let circle = [entry(layer_name, b'2', "other", b""), entry("blobs/sha256/other", b'1', layer_name, b"")];
    let archive = read_bytes(&with(&circle)).unwrap();
    assert!(
        faults(&archive)[0].ends_with("it is a link without an end and not a file"),
        "{:?}",
        faults(&archive)
    );
    // A link in the archive is as good as the file.
    let linked = [file("elsewhere", &blobs[0].1), entry(layer_name, b'2', "../../elsewhere", b"")];
    let (_dir, path) = stored(&with(&linked));
    let archive = read_path(&path, &LIMITS).unwrap();
    assert_eq!(faults(&archive), [""; 0]);
    assert_blobs_are_readable(&path, &archive);
}

#[test]
fn manifest_of_docker_archive_is_made_and_stays_the_same() {
    let entries = docker(&[(&["a:1"], "linux/amd64", &["x"])]);
    let (config, packed) = (&entries[0].1, gzip(&layer("x")));
    let zipped = {
        let mut entries = entries.clone();
        entries[1].1.clone_from(&packed);
        entries
    };
    for (entries, data, media_type) in [
        (&entries, layer("x"), "application/vnd.docker.image.rootfs.diff.tar"),
        (&zipped, packed.clone(), "application/vnd.docker.image.rootfs.diff.tar.gzip"),
    ] {
        let archive = read_tar(entries);
        let image = &archive.images[0];
        let expected = format!(
            r#"{{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json","config":{{"mediaType":"application/vnd.docker.container.image.v1+json","size":{},"digest":"{}"}},"layers":[{{"mediaType":"{media_type}","size":{},"digest":"{}"}}]}}"#,
            config.len(),
            digest(config),
            data.len(),
            digest(&data)
        );
        assert_eq!(archive.blobs[&image.target].place, BlobPlace::Made { text: expected.clone() });
        assert_eq!(image.target.as_str(), digest(expected.as_bytes()));
        assert_eq!(read_tar(entries).images, archive.images);
    }
}

#[test]
fn docker_archive_with_links_and_other_names_is_read() {
    let layers = [layer("x"), layer("x"), layer("y")];
    let config = config("linux/amd64", &layers);
    let id = sha256::sha256_hex(&config);
    // Old docker save: the second layer is a link to the first one; kaniko: a config with a prefix.
    let list = format!(
        r#"[{{"Config":"sha256:{id}","RepoTags":null,"Layers":["a/layer.tar","b/layer.tar","./y.tar.gz"]}},
            {{"Config":"sha256:{id}","RepoTags":["localhost/a"],"Layers":["a/layer.tar","b/layer.tar","./y.tar.gz"]}}]"#
    );
    let bytes = [
        entry("b/layer.tar", b'2', "../a/layer.tar", b""),
        file("a/VERSION", b"1.0"),
        file("a/json", br#"{"id":"a","parent":"b"}"#),
        file("a/layer.tar", &layers[0]),
        file("y.tar.gz", &gzip(&layers[2])),
        file(&format!("sha256:{id}"), &config),
        file("repositories", br#"{"localhost/a":{"latest":"a"}}"#),
        file("manifest.json", list.as_bytes()),
        end(),
    ]
    .concat();
    let (_dir, path) = stored(&bytes);
    let archive = read_path(&path, &LIMITS).unwrap();
    assert_eq!(archive.images.len(), 1);
    assert_eq!(archive.images[0].names, ["localhost/a:latest"]);
    assert_eq!(archive.images[0].layers.len(), 3);
    assert_blobs_are_readable(&path, &archive);
}

#[test]
fn damaged_docker_images_are_named_and_others_offered() {
    let entries = docker(&[
        (&["bad:1", "also/bad:1"], "linux/amd64", &["bad"]),
        (&["good:1"], "linux/amd64", &["good"]),
        (&["other:1"], "linux/arm64", &["good"]),
    ]);
    let config_name = format!("{}.json", sha256::sha256_hex(&config("linux/amd64", &[layer("bad")])));
    let other = "docker.io/library/other:1: it is for linux/arm64, and this node is linux/amd64".to_owned();
    let change = |name: &str, change: &dyn Fn(&mut Entry)| {
        let mut entries = entries.clone();
        change(entries.iter_mut().find(|entry| entry.0 == name).unwrap());
        read_tar(&entries)
    };
    let flip = |entry: &mut Entry| entry.1[600] ^= 1;
    let mut flipped = layer("bad");
    flipped[600] ^= 1;
    for (archive, blob, problem) in [
        (
            change("bad/layer.tar", &flip),
            "bad/layer.tar",
            format!("the content has the digest {}", digest(&flipped)),
        ),
        (
            change("bad/layer.tar", &|entry| entry.0 = "other".to_owned()),
            "bad/layer.tar",
            "it is not in the archive".to_owned(),
        ),
        (
            change(&config_name, &|entry| entry.1 = config("linux/amd64", &[layer("good")])),
            config_name.as_str(),
            format!("the content has the digest {}", digest(&config("linux/amd64", &[layer("good")]))),
        ),
    ] {
        assert_eq!(offered(&archive), ["docker.io/library/good:1"]);
        let faulty = |name: &str| format!("docker.io/{name}:1: blob {blob}: {problem}");
        assert_eq!(faults(&archive), [faulty("library/bad"), faulty("also/bad"), other.clone()]);
    }
    let out = change("manifest.json", &|entry| {
        let text = String::from_utf8_lossy(&entry.1).replace("bad/layer.tar", "../../etc/passwd");
        entry.1 = text.into_bytes();
    });
    let expected = "docker.io/library/bad:1: the name \"../../etc/passwd\" leads out of the archive";
    assert_eq!(faults(&out)[0], expected);
    assert_eq!(offered(&out), ["docker.io/library/good:1"]);
    let fewer = change("manifest.json", &|entry| {
        entry.1 = String::from_utf8_lossy(&entry.1).replace(r#"["bad/layer.tar"]"#, "[]").into_bytes();
    });
    assert!(faults(&fewer)[0].ends_with("the configuration has another number of layers"));
}

#[test]
fn decompression_bombs_end_at_the_limit() {
    let bomb = tar(&[("index.json".to_owned(), b"{}".to_vec()), ("zeros".to_owned(), vec![0; 4 << 20])]);
    let limits = Limits { expanded: 1 << 20, ratio: 20, ..LIMITS };
    for packed in [gzip(&bomb), zstd(&bomb)] {
        assert!(packed.len() < 60_000);
        let (_dir, path) = stored(&packed);
        let error = read_path(&path, &limits).unwrap_err();
        let limit = (1 << 20).max(packed.len() as u64 * 20);
        assert_eq!(error.to_string(), format!("it has more than {limit} decompressed bytes"));
        assert!(matches!(error, ArchiveError::Whole(Problem::TooLarge { .. })));
        // The limit grows with the size of the file.
        let larger = Limits { ratio: 1 << 20, ..limits };
        assert!(!matches!(read_path(&path, &larger), Err(ArchiveError::Whole(Problem::TooLarge { .. }))));
    }
}

#[test]
fn window_of_zstd_that_is_too_large_is_refused_with_advice() {
    // A frame with a window of 128 MiB, as of `zstd --ultra -22`.
    let packed = [0x28, 0xb5, 0x2f, 0xfd, 0, 17 << 3, 1, 0, 0];
    let error = read_bytes(&packed).unwrap_err();
    assert!(matches!(error, ArchiveError::Window { wanted: 134_217_728, limit: 8_388_608 }));
    let text = error.to_string();
    assert!(text.contains("134217728") && text.contains("8388608") && text.contains("--long"), "{text}");
}

#[test]
fn numbers_and_sizes_have_limits() {
    let blobs = image("linux/amd64", &["x", "y"]);
    let bytes = tar(&layout(&[("localhost/a:1", &blobs), ("localhost/b:1", &image("linux/amd64", &["z"]))]));
    let (_dir, path) = stored(&bytes);
    for (limits, expected) in [
        (Limits { entries: 5, ..LIMITS }, "5 entries"),
        (Limits { files: 4, ..LIMITS }, "4 files"),
        (Limits { names: 100, ..LIMITS }, "100 bytes of names of files"),
        (Limits { blobs: 6, ..LIMITS }, "6 blobs"),
        (Limits { images: 1, ..LIMITS }, "1 images"),
        (Limits { references: 5, ..LIMITS }, "5 references to blobs"),
        (Limits { document: 300, ..LIMITS }, "300 bytes of JSON"),
        (Limits { values: 10, ..LIMITS }, "10 values"),
        (Limits { texts: 100, ..LIMITS }, "100 bytes of texts"),
        (Limits { memory: 5000, ..LIMITS }, "5000 bytes of names and documents in memory"),
    ] {
        let text = read_path(&path, &limits).unwrap_err().to_string();
        assert!(text.ends_with(&format!("it has more than {expected}")), "{text}");
    }
    let archive = read_path(&path, &Limits { layers: 1, ..LIMITS }).unwrap();
    assert_eq!(offered(&archive), ["localhost/b:1"]);
    assert!(faults(&archive)[0].ends_with("it has more than 1 layers"));
}

#[test]
fn targets_of_links_count_like_names() {
    let link = |number: usize| entry(&format!("{number}"), b'2', &"x".repeat(90), b"");
    let bytes = [(0..10).flat_map(link).collect(), end()].concat();
    let (_dir, path) = stored(&bytes);
    let error = read_path(&path, &Limits { names: 900, ..LIMITS }).unwrap_err();
    assert_eq!(error.to_string(), "it has more than 900 bytes of names of files");
    assert!(matches!(read_path(&path, &Limits { names: 910, ..LIMITS }), Err(ArchiveError::NotAnArchive)));
}

#[test]
fn texts_of_documents_are_not_stored_beyond_the_limits() {
    let image =
        |config: &str| format!(r#"[{{"Config":"{config}","RepoTags":["a:1"],"Layers":[]}}]"#).into_bytes();
    let long = image(&"x".repeat(4097));
    let error = read_tar_error(&[("manifest.json".to_owned(), long)]);
    assert!(error.ends_with("an image has no Config of at most 4096 bytes"), "{error}");
    // Whatever the names of the files.
    let many: Vec<Entry> = (0..3000).map(|number| (format!("{number}"), image(&"x".repeat(4096)))).collect();
    assert_eq!(read_tar_error(&many), "it has more than 10485760 bytes of names and documents in memory");
}

#[test]
fn archive_of_hundreds_of_images_is_within_the_limits() {
    let layers: Vec<Vec<u8>> = (0..20).map(|number| layer(&format!("{number}"))).collect();
    let descriptors: Vec<String> = layers.iter().map(|content| descriptor(content, LAYER, "")).collect();
    let mut entries: Vec<Entry> = layers.iter().map(|content| blob(content)).collect();
    let mut list = Vec::new();
    for number in 0..400 {
        let text = String::from_utf8(config("linux/amd64", &layers)).unwrap();
        let config = text.replacen('{', &format!(r#"{{"created":"{number}","#), 1).into_bytes();
        let manifest = format!(
            r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}","config":{},"layers":[{}]}}"#,
            descriptor(&config, CONFIG, ""),
            descriptors.join(",")
        );
        list.push(descriptor(manifest.as_bytes(), MANIFEST, &named(&format!("r.example/image-{number}:1"))));
        entries.extend([blob(&config), blob(manifest.as_bytes())]);
    }
    entries.push(("index.json".to_owned(), index(&list).into_bytes()));
    let (_dir, path) = stored(&gzip(&tar(&entries)));
    let archive = read_path(&path, &LIMITS).unwrap();
    assert_eq!((archive.images.len(), faults(&archive)), (400, Vec::new()));
}

#[test]
fn file_that_is_replaced_or_changed_while_it_is_read_is_refused() {
    let bytes = tar(&layout(&[("localhost/a:1", &image("linux/amd64", &["x"]))]));
    let replace = |path: &Path| {
        let other = path.with_extension("new");
        std::fs::write(&other, &bytes).unwrap();
        std::fs::rename(other, path).unwrap();
    };
    let change =
        |path: &Path| std::fs::File::options().append(true).open(path).unwrap().write_all(b"x").unwrap();
    let remove = |path: &Path| std::fs::remove_file(path).unwrap();
    for disturb in [&replace as &dyn Fn(&Path), &change, &remove] {
        let (_dir, path) = stored(&bytes);
        let mut done = false;
        let result = read(&path, &amd64(), &StopToken::never(), &mut |_| {
            if !std::mem::replace(&mut done, true) {
                disturb(&path);
            }
        });
        assert!(matches!(result, Err(ArchiveError::Changed)), "{result:?}");
    }
    // After it was read.
    for disturb in [&replace as &dyn Fn(&Path), &change] {
        let (_dir, path) = stored(&bytes);
        let archive = read_path(&path, &LIMITS).unwrap();
        assert_eq!(stamp(&path).unwrap(), archive.stamp);
        let blob = &archive.images[0].blobs[0];
        let mut open = open_blob(&path, &archive, blob, 0, &count_nothing(), &StopToken::never()).unwrap();
        let size = std::fs::metadata(&path).unwrap().len();
        disturb(&path);
        assert_ne!(stamp(&path).unwrap(), archive.stamp);
        let again = open_blob(&path, &archive, blob, 0, &count_nothing(), &StopToken::never());
        assert!(matches!(again, Err(ArchiveError::Changed)));
        // The file that was replaced still has its bytes; those of the changed one may be others.
        let mut data = Vec::new();
        match open.read_to_end(&mut data) {
            Ok(_) => assert!(path.metadata().unwrap().len() == size && digest(&data) == blob.as_str()),
            Err(error) => assert!(error.to_string().contains("changed or replaced"), "{error}"),
        }
    }
}

#[test]
fn layout_directory_is_read_without_following_links() {
    let entries = layout(&[("localhost/a:1", &image("linux/amd64", &["x", "y"]))]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("layout");
    unpack(&path, &entries);
    let archive = read_path(&path, &LIMITS).unwrap();
    let layer = &archive.images[0].layers[0].digest;
    assert_eq!(archive.blobs[layer].place, BlobPlace::Layout);
    let file = path.join("blobs/sha256").join(layer.hex());
    std::fs::rename(&file, dir.path().join("outside")).unwrap();
    let open = || open_blob(&path, &archive, layer, 0, &count_nothing(), &StopToken::never());
    assert!(matches!(open(), Err(ArchiveError::Io(_))));
    symlink(dir.path().join("outside"), &file).unwrap();
    assert!(matches!(open(), Err(ArchiveError::Io(_))));
    let linked = read_path(&path, &LIMITS).unwrap();
    assert!(linked.images.is_empty());
    let problem = "it is a link or a special file and not a file";
    assert_eq!(
        faults(&linked),
        [format!("{layer}: {problem}"), format!("localhost/a:1: blob {layer}: {problem}")]
    );
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, b"other").unwrap();
    assert!(matches!(open(), Err(ArchiveError::Changed)));
    // Links in the path of the blobs, and of the index.
    std::fs::rename(path.join("blobs"), dir.path().join("blobs")).unwrap();
    symlink(dir.path().join("blobs"), path.join("blobs")).unwrap();
    assert!(read_path(&path, &LIMITS).is_err());
    std::fs::remove_file(path.join("blobs")).unwrap();
    assert_eq!(faults(&read_path(&path, &LIMITS).unwrap()).len(), 1);
    std::fs::rename(path.join("index.json"), dir.path().join("index.json")).unwrap();
    symlink(dir.path().join("index.json"), path.join("index.json")).unwrap();
    assert!(read_path(&path, &LIMITS).is_err() && stamp(&path).is_err());
    symlink(&path, dir.path().join("link")).unwrap();
    assert!(stamp(&dir.path().join("link")).is_err());
}

#[test]
fn names_are_found_without_reading_blobs() {
    let blobs = image("linux/amd64", &["x"]);
    let list = index(&[descriptor(&blobs[2].1, MANIFEST, &named("localhost/a:1"))]);
    // A blob of 16 GiB without content on the disk, and the list after it.
    let mut start = file("blobs/sha256/x", b"");
    start[124..136].copy_from_slice(b"200000000000");
    repair(&mut start);
    let (_dir, path) = stored(&start);
    let mut archive = std::fs::File::options().write(true).open(&path).unwrap();
    let size = 16 << 30;
    std::io::Seek::seek(&mut archive, std::io::SeekFrom::Start(512 + size)).unwrap();
    archive.write_all(&[file("index.json", list.as_bytes()), end()].concat()).unwrap();
    assert_eq!(names(&path, &StopToken::never()).unwrap(), Some(vec!["localhost/a:1".to_owned()]));
    let (_dir, path) = stored(&[b'x'; 600]);
    assert!(matches!(names(&path, &StopToken::never()), Err(ArchiveError::NotAnArchive)));
    let (_dir, path) = stored(&tar(&[("index.json".to_owned(), b"[".to_vec())]));
    assert_eq!(names(&path, &StopToken::never()).unwrap(), Some(Vec::new()));
    // The last entry of a name counts, and large lists are left to the reading of the whole.
    let list = |name: &str| index(&[descriptor(b"", MANIFEST, &named(name))]).into_bytes();
    let names_of = |entries: Vec<Entry>| {
        let (_dir, path) = stored(&tar(&entries));
        names(&path, &StopToken::never()).unwrap()
    };
    let own = |name: &str, bytes: Vec<u8>| (name.to_owned(), bytes);
    let docker = br#"[{"Config":"c","RepoTags":["localhost/c:1"]}]"#.to_vec();
    let twice = vec![
        own("index.json", list("localhost/a:1")),
        own("manifest.json", docker),
        own("./index.json", list("localhost/b:1")),
    ];
    assert_eq!(names_of(twice), Some(vec!["localhost/b:1".to_owned(), "localhost/c:1".to_owned()]));
    let tags =
        |count| format!(r#"[{{"Config":"c","RepoTags":[{}"a"]}}]"#, r#""a","#.repeat(count)).into_bytes();
    let tagged = |count| names_of(vec![own("manifest.json", tags(count))]);
    assert_eq!(tagged(19_000), Some(vec!["docker.io/library/a:latest".to_owned()]));
    assert_eq!((tagged(20_000), tagged(60_000)), (None, None));
}

#[test]
fn file_that_is_no_archive_is_refused_by_its_headers() {
    let images = layout(&[("r/a:1", &image("amd64", &["x"]))]);
    let docker = docker(&[(&["r/b:1"], "amd64", &["y"])]);
    let check_bytes = |bytes: &[u8]| {
        let (_dir, path) = stored(bytes);
        check(&path).map_err(|error| error.to_string())
    };
    for entries in [&images, &docker] {
        let whole = tar(entries);
        for bytes in [whole.clone(), gzip(&whole), zstd(&whole)] {
            assert_eq!(check_bytes(&bytes), Ok(()));
        }
    }
    let not_one = ArchiveError::NotAnArchive.to_string();
    let other = tar(&[("etc/motd".to_owned(), b"hello".to_vec())]);
    for bytes in [&b""[..], b"no archive", &[0; 4096], &[b'x'; 4096], &other] {
        assert_eq!(check_bytes(bytes), Err(not_one.clone()), "{} bytes", bytes.len());
    }
    // Its list of images is its last entry.
    let mut entries = vec![("layer".to_owned(), vec![7; 5000])];
    entries.extend(docker);
    let cut = &tar(&entries)[..3000];
    assert_eq!(check_bytes(cut).unwrap_err(), "the archive is truncated");
    assert_eq!(check_bytes(&gzip(&[0; 4096])), Err(not_one.clone()));
    assert!(check_bytes(&gzip(&[b'x'; 4096])).unwrap_err().contains("damaged at byte"));
    assert_eq!(check_bytes(&gzip(&other)[..20]).unwrap_err(), "the archive is truncated");
    let dir = tempfile::tempdir().unwrap();
    assert!(check(dir.path()).unwrap_err().to_string().ends_with("not a regular file"));
    assert!(check(&dir.path().join("none")).unwrap_err().to_string().starts_with("cannot read: "));
}

#[test]
fn stop_signal_ends_reading() {
    let (_dir, path) = stored(&zstd(&tar(&layout(&[("localhost/a:1", &image("linux/amd64", &["x"]))]))));
    let archive = read_path(&path, &LIMITS).unwrap();
    let (source, token) = stop::pair();
    let mut open =
        open_blob(&path, &archive, &archive.images[0].blobs[1], 0, &count_nothing(), &token).unwrap();
    let mut source = Some(source);
    let result = read(&path, &amd64(), &token, &mut |_| drop(source.take()));
    assert!(matches!(result, Err(ArchiveError::Stopped)));
    assert_eq!(open.read(&mut [0; 9]).unwrap_err().to_string(), "stopped");
}

#[test]
fn stop_signal_ends_reading_inside_of_a_decompressor() {
    // 32 MiB that decompress to nothing.
    let skipped = [0x50, 0x2a, 0x4d, 0x18, 8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8].repeat(2 << 20);
    let members = gzip(b"").repeat((32 << 20) / gzip(b"").len());
    for packed in [skipped, members] {
        let (_dir, path) = stored(&packed);
        let opened = std::sync::Arc::new(std::fs::File::open(&path).unwrap());
        let (source, token) = stop::pair();
        let bytes = std::sync::Arc::default();
        let counted = CountingFile::new(opened, std::sync::Arc::clone(&bytes), &token);
        let (mut reader, _) = decompress::open(Box::new(counted), 9).unwrap();
        drop(source);
        assert!(reader.read(&mut [0; 9]).is_err());
        let read = bytes.load(std::sync::atomic::Ordering::Relaxed);
        assert!(read < 1 << 20, "{read}");
        assert!(matches!(
            read_within(&path, &amd64(), &LIMITS, &token, &mut |_| {}),
            Err(ArchiveError::Stopped)
        ));
    }
}

#[test]
fn digest_is_parsed_strictly() {
    let hex = "a".repeat(64);
    assert_eq!(Digest::parse(&format!("sha256:{hex}")).unwrap().hex(), hex);
    for text in [
        "",
        "sha256",
        "sha256:",
        &hex,
        &format!("sha256:{hex}a"),
        &format!("sha256:{}", "A".repeat(64)),
        "md5:x",
    ] {
        assert!(matches!(Digest::parse(text), Err(Problem::BadDigest { .. })), "{text}");
    }
    assert!(matches!(Digest::parse("sha512:x"), Err(Problem::UnsupportedDigest { .. })));
}

#[test]
fn archive_in_memory_is_inspected_like_a_file() {
    let bytes = tar(&layout(&[("localhost/a:1", &image("linux/amd64", &["x"]))]));
    let read = read_bytes(&bytes).unwrap();
    let inspected = inspect(&bytes, 0).unwrap();
    assert_eq!((inspected.images, inspected.blobs), (read.images, read.blobs));
}
