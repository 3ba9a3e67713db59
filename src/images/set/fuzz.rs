//! Hostile archives of images.

use std::io::{self, Cursor, Write};
use std::time::Duration;

use super::archive::testing::*;
use crate::util::decompress;
use crate::util::fuzzing::{Budget, Target, nested, repeated};
use crate::util::gzip::Gzip;
use crate::util::threads::Stack;

/// Archives may have any size; a smaller one shows how the cost grows.
const ARCHIVE_BYTES: usize = 4 << 20;
/// The limit of decompressed bytes, instead of 1 GiB.
const EXPANDED: u64 = 16 << 20;

pub(crate) fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "images/archive",
            stack: Stack::Large,
            max_bytes: ARCHIVE_BYTES,
            // The input is copied.
            budget: Budget { base_kib: 20 * 1024, per_byte: 2, ..Budget::LINEAR },
            worst: |max| {
                let entries = |kind: u8, name: fn(usize) -> String| {
                    let mut bytes = Vec::new();
                    for number in 0..max / 512 {
                        bytes.extend(entry(&name(number), kind, "", b""));
                    }
                    bytes
                };
                let chain = repeated("", |i| format!("{i:x<512}"), "", max);
                vec![
                    ("empty files", entries(b'0', |i| format!("{i}"))),
                    ("long names", entries(b'0', |i| format!("{i}{}", "n".repeat(90)))),
                    ("one name", entries(b'0', |_| "blobs/sha256/x".to_owned())),
                    ("links", entries(b'2', |i| format!("{i}"))),
                    ("extended headers", entries(b'x', |_| "pax".to_owned())),
                    ("headers of names", entries(b'L', |_| "name".to_owned())),
                    ("sparse files", entries(b'S', |_| "sparse".to_owned())),
                    ("text", chain),
                    ("zeros", vec![0; max]),
                    ("long texts", packed(4, |_| format!("[{{\"Config\":\"{}\"}}]", "a".repeat((4 << 20) - 1024)))),
                    ("many texts", packed(3800, |_| format!("[{{\"Config\":\"{}\"}}]", "a".repeat(3500)))),
                    ("small documents", packed(16_000, |_| "{\"os\":\"a\"}".to_owned())),
                    ("small manifests", packed(16_000, |_| "{\"manifests\":[]}".to_owned())),
                    ("unused texts", packed(4, |_| format!("{{\"manifests\":[],\"a\":\"{}\"}}", "a".repeat((4 << 20) - 1024)))),
                    ("descriptors", packed(10_000, |number| match number {
                        9999 => {
                            let descriptor = format!("{{\"mediaType\":\"{}\",\"os\":0}},", "a".repeat(100));
                            format!("{{\"manifests\":[{}{{}}]}}", descriptor.repeat(16_000))
                        }
                        _ => "{}".to_owned(),
                    })),
                    ("targets of links", targets_of_links()),
                ]
            },
            seeds: &[],
            run: |bytes| {
                let _ = inspect(bytes, EXPANDED);
            },
        },
        Target {
            name: "images/mutated_archive",
            stack: Stack::Large,
            max_bytes: ARCHIVE_BYTES,
            budget: Budget { base_kib: 48 * 1024, ..Budget::LINEAR },
            worst: |_| {
                let amd64 = image("linux/amd64", &["a", "b"]);
                let arm64 = image("linux/arm64", &["a"]);
                vec![
                    ("a layout", tar(&layout(&[("localhost/a:1", &amd64), ("localhost/b:1", &arm64)]))),
                    ("docker save", tar(&docker(&[(&["a:1", "b:1"], "linux/amd64", &["a", "b"])]))),
                ]
            },
            // Changes to the archives that the bytes describe: position and value, 4 bytes each.
            seeds: &[b"\0\x00\x02a\0\0\x04b\x01\x00\x9c7\x01\x02\x7c0", b"\x02\x01\x9dL\x00\x10\x00\x80\x01\x00\x00\x00"],
            run: mutated,
        },
        Target {
            name: "images/documents",
            stack: Stack::Large,
            max_bytes: ARCHIVE_BYTES,
            budget: Budget { base_kib: 64 * 1024, ..Budget::LINEAR },
            worst: |max| {
                let list = |field: &str, item: &str| {
                    repeated(&format!("{{\"{field}\":[{item}"), |_| format!(",{item}"), "]}", max)
                };
                vec![
                    ("empty descriptors", list("manifests", "{}")),
                    ("numbers", list("manifests", "0")),
                    ("strings", list("layers", "\"\"")),
                    ("nested arrays", nested("[", "]", max)),
                    ("nested objects", nested("{\"config\":", "}", max)),
                    ("one long string", [b"{\"mediaType\":\"".as_slice(), &b"x".repeat(max - 30), b"\"}"].concat()),
                    ("images", repeated("[{}", |_| ",{}".to_owned(), "]", max)),
                    ("paths", repeated("[{\"Config\":\"a\",\"Layers\":[\"\"", |_| ",\"/\"".to_owned(), "]}]", max)),
                ]
            },
            seeds: &[
                br#"{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","size":1,"platform":{"os":"linux","architecture":"arm","variant":"v7"},"annotations":{"io.containerd.image.name":"a:1","org.opencontainers.image.ref.name":"1"}}]}"#,
                br#"{"mediaType":"m","config":{"digest":"sha256:bb","size":0},"layers":[{"digest":"sha512:00","size":-1}]}"#,
                br#"{"os":"linux","architecture":"amd64","config":{},"rootfs":{"type":"layers","diff_ids":["sha256:cc"]}}"#,
                br#"[{"Config":"c.json","RepoTags":["a:1",null],"Layers":["../x","a/layer.tar"]},{"Config":"c.json"}]"#,
            ],
            run: documents,
        },
        Target {
            name: "images/decompression",
            stack: Stack::Large,
            max_bytes: 1 << 20,
            budget: Budget {
                base: Duration::from_secs(6),
                // The window, twice while it grows.
                base_kib: 48 * 1024,
                ..Budget::LINEAR
            },
            worst: |max| {
                let frame = |descriptor: u8| [0x28, 0xb5, 0x2f, 0xfd, 0, descriptor];
                // Blocks of 128 KiB of one byte, which take four bytes each.
                let block = [((128_u32 << 10) << 3 | 2).to_le_bytes().as_slice().split_at(3).0, b"x"].concat();
                let blocks = [&frame(13 << 3)[..], &block.repeat(max / 4 - 2)].concat();
                vec![
                    ("equal bytes", blocks),
                    ("empty frames", [&frame(13 << 3)[..], &[1, 0, 0]].concat().repeat(max / 9)),
                    ("skipped frames", [0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0].repeat(max / 8)),
                    ("empty members", [&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255, 3, 0][..], &[0; 8]].concat().repeat(max / 20)),
                    ("a long comment", [&[0x1f, 0x8b, 8, 16, 0, 0, 0, 0, 0, 255][..], &b"x".repeat(max - 10)].concat()),
                ]
            },
            seeds: &[
                b"\x28\xb5\x2f\xfd\x00\x58\x01\x00\x00",
                // Of zstd 1.5.4 (levels 19 and 1) and gzip 1.12: twenty times `abcabcabcabcabcabcd`, and
                // some lines.
                b"\x28\xb5\x2f\xfd\x64\x7c\x00\x6d\x00\x00\x20\x61\x62\x63\x64\x02\x00\x66\x36\x55\x61\xe7\x86\x16\x13\x82\x0f",
                b"\x28\xb5\x2f\xfd\x60\x9f\x01\x8d\x02\x00\xb2\x43\x0c\x11\xa0\xe9\x01\x8d\x8f\x7e\xaa\x2a\x34\x52\x84\x44\x28\xd4\x70\x6a\x04\x96\xa1\x79\x35\xf1\x6e\x18\x9a\x57\x13\xef\x76\xa1\x79\x35\xf1\x6e\x0f\xcd\xab\x89\x07\x4a\x3a\x25\x8a\xa4\x7a\x0d\x64\x4e\x28\xa8\x11\xa0\xbb\x7f\x06\xf0\xe5\x10\x12\x61\x44\x98\xf4\x01\x3f\x3e\xf1\x0b\x87\x27\x4b\xaa\x34\x0c\x03\x92\x1a",
                b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\x4b\x4c\x4a\x4e\x44\x45\x29\x89\xa3\x42\xf4\x11\x02\x00\x39\xcb\x90\xfc\x7c\x01\x00\x00",
            ],
            run: |bytes| {
                if let Ok((mut reader, _)) = decompress::open(Box::new(Cursor::new(bytes.to_vec())), EXPANDED) {
                    let _ = io::copy(&mut reader, &mut io::sink());
                }
            },
        },
    ]
}

/// An archive with files of these contents, with gzip.
fn packed(files: usize, content: impl Fn(usize) -> String) -> Vec<u8> {
    let mut gzip = Gzip::small(Vec::new());
    for number in 0..files {
        gzip.write_all(&file(&format!("{number}"), content(number).as_bytes())).unwrap();
    }
    gzip.finish().unwrap()
}

/// An archive with links, each with the longest target, with gzip.
fn targets_of_links() -> Vec<u8> {
    let mut gzip = Gzip::small(Vec::new());
    for number in 0..2900 {
        gzip.write_all(&entry("link", b'K', "", &[b'a'; 4096])).unwrap();
        gzip.write_all(&entry(&format!("{number}"), b'2', "", b"")).unwrap();
    }
    gzip.finish().unwrap()
}

/// Archives with changed bytes, whose checksums are mostly right.
fn mutated(changes: &[u8]) {
    if changes.len() > 4096 {
        let _ = inspect(changes, EXPANDED);
        return;
    }
    let amd64 = image("linux/amd64", &["a"]);
    for mut bytes in
        [tar(&layout(&[("localhost/a:1", &amd64)])), tar(&docker(&[(&["a:1"], "linux/amd64", &["a"])]))]
    {
        for change in changes.chunks_exact(4) {
            let offset = usize::from(change[0]) << 16 | usize::from(change[1]) << 8 | usize::from(change[2]);
            let length = bytes.len();
            bytes[offset % length] = change[3];
        }
        // The headers, by the sizes in them.
        let mut offset = 0;
        while let Some(block) = bytes.get_mut(offset..offset + 512) {
            if block.iter().any(|byte| *byte != 0) {
                repair(block);
            }
            let size =
                std::str::from_utf8(&block[124..135]).ok().and_then(|text| u64::from_str_radix(text, 8).ok());
            offset +=
                512 + usize::try_from(size.unwrap_or(0)).unwrap_or(0).next_multiple_of(512).min(1 << 30);
        }
        let _ = inspect(&bytes, EXPANDED);
    }
}

/// A document in every place of an archive.
fn documents(bytes: &[u8]) {
    let list = index(&[descriptor(bytes, "", &named("localhost/a:1"))]);
    let own = |name: &str| (name.to_owned(), bytes.to_vec());
    let _ = inspect(&tar(&[blob(bytes), ("index.json".to_owned(), list.into_bytes())]), EXPANDED);
    let _ = inspect(&tar(&[own("index.json"), own("manifest.json"), own("c.json")]), EXPANDED);
    let _ = inspect(&tar(&[own("manifest.json"), own("c.json"), own("a/layer.tar")]), EXPANDED);
}
