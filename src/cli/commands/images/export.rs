//! `coracle images export`: writes an OCI archive of an image of the archives, with all platforms
//! that they have. Source: OCI Image Layout Specification.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::cli::commands::client::{Client, ReadTimeout, encode};
use crate::cli::commands::console::Console;
use crate::cli::commands::error::{CommandError, Outcome, print_stderr};
use crate::cli::exit::Exit;
use crate::model::image_name;

use super::progress::Progress;

/// The unit of a tar archive.
const BLOCK: u64 = 512;
/// The most entries without a usable digest that are named.
const MAX_SHOWN: usize = 16;

/// How deep an index may contain indexes.
const DEPTH: usize = 4;

/// The most documents of an image.
const MAX_DOCUMENTS: usize = 256;

/// The largest document; the agent serves none above 4 MiB.
const DOCUMENT_BYTES: usize = 8 * 1024 * 1024;

/// A manifest or an index.
struct Document {
    media_type: String,
    digest: String,
    bytes: Vec<u8>,
}

#[derive(Default)]
struct ArchiveContents {
    documents: Vec<Document>,
    /// Digests and sizes, each once.
    blobs: Vec<(String, u64)>,
    /// Manifests of platforms that no archive has.
    missing: Vec<String>,
    /// Entries of indexes that name no manifest by a digest that archives can have: the first ones.
    unusable: Vec<String>,
    /// How many more there are.
    more_unusable: u64,
}

impl ArchiveContents {
    /// An index may have millions of them.
    fn add_unusable(&mut self, entry: String) {
        if self.unusable.len() < MAX_SHOWN {
            self.unusable.push(entry);
        } else {
            self.more_unusable += 1;
        }
    }
}

pub(super) fn run(client: &Client, console: &mut Console<'_>, name: &str, file: &Path) -> Outcome {
    let full = match image_name::normalized(name) {
        Ok(full) => full,
        Err(error) => {
            print_stderr(&format!("{name}: {error}"));
            return Ok(Exit::Usage);
        }
    };
    let root = document(client, &full)?;
    let mut contents = ArchiveContents::default();
    let index = index(&root, &full);
    if let Err(reason) = collect(client, &full, root, &mut contents)? {
        print_stderr(&format!("{full}: {reason}"));
        return Ok(Exit::Failure);
    }
    let mut part = file.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    let written = write(client, &part, file, &index, &contents);
    match written {
        Ok(()) => {}
        Err(Failure::Agent(error)) => {
            let _ = std::fs::remove_file(&part);
            return Err(error);
        }
        Err(Failure::File(error)) => {
            let _ = std::fs::remove_file(&part);
            print_stderr(&format!("cannot write {}: {error}", file.display()));
            return Ok(Exit::Failure);
        }
    }
    for missing in &contents.missing {
        console.line(0, &format!("no archive has the part {missing} of the image"))?;
    }
    for entry in &contents.unusable {
        console.line(0, &format!("{entry} has no sha256 digest: this part of the image is left out"))?;
    }
    if contents.more_unusable > 0 {
        console.line(0, &format!("{} more entries of its indexes are left out", contents.more_unusable))?;
    }
    console.line(0, &format!("{full}: written to {}", file.display()))?;
    console.out.flush()?;
    Ok(Exit::Success)
}

/// A manifest by the name or `repository@digest` of an image.
fn document(client: &Client, name: &str) -> Result<Document, CommandError> {
    let target = format!("/v1/images/manifest?image={}", encode(name));
    let response = client.open(&target, ReadTimeout::Response)?;
    let field = |name: &str| response.header(name).unwrap_or_default().to_owned();
    let (media_type, digest) = (field("Content-Type"), field("Docker-Content-Digest"));
    let bytes = client.read_body(response, &target, DOCUMENT_BYTES)?;
    Ok(Document { media_type, digest, bytes })
}

/// Adds a document and everything below it.
fn collect(
    client: &Client,
    name: &str,
    root: Document,
    contents: &mut ArchiveContents,
) -> Result<Result<(), String>, CommandError> {
    let repository = image_name::repository(name);
    let mut seen = BTreeSet::new();
    let mut open = vec![(root, 0)];
    while let Some((document, depth)) = open.pop() {
        let Ok(value) = serde_json::from_slice::<Value>(&document.bytes) else {
            return Ok(Err(format!("{} is not JSON", document.digest)));
        };
        if depth > DEPTH || contents.documents.len() >= MAX_DOCUMENTS {
            return Ok(Err("the image has too many manifests".to_owned()));
        }
        let place = document.digest.clone();
        seen.insert(place.clone());
        contents.documents.push(document);
        let list = |key: &str| value.get(key).and_then(Value::as_array).cloned().unwrap_or_default();
        for (number, child) in list("manifests").iter().enumerate() {
            let Some(digest) = digest(child) else {
                contents.add_unusable(format!("entry {} of the index {place}", number + 1));
                continue;
            };
            if !seen.insert(digest.clone()) {
                continue;
            }
            match self::document(client, &format!("{repository}@{digest}")) {
                Ok(child) => open.push((child, depth + 1)),
                Err(CommandError::Rejected { status: 404, .. }) => contents.missing.push(digest),
                Err(error) => return Err(error),
            }
        }
        for blob in value.get("config").cloned().into_iter().chain(list("layers")) {
            let Some((digest, size)) = descriptor(&blob) else {
                return Ok(Err(format!(
                    "the manifest {place} names a blob without a sha256 digest or a size"
                )));
            };
            if seen.insert(digest.clone()) {
                contents.blobs.push((digest, size));
            }
        }
    }
    Ok(Ok(()))
}

fn descriptor(value: &Value) -> Option<(String, u64)> {
    Some((digest(value)?, value.get("size")?.as_u64()?))
}

fn digest(descriptor: &Value) -> Option<String> {
    let digest = descriptor.get("digest")?.as_str()?;
    let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    digest.strip_prefix("sha256:").filter(|digits| digits.len() == 64 && digits.bytes().all(is_hex))?;
    Some(digest.to_owned())
}

/// The file `index.json`.
fn index(root: &Document, name: &str) -> Vec<u8> {
    let tag = match name.rsplit_once(':') {
        Some((_, tag)) if !tag.contains('/') && !name.contains('@') => tag,
        _ => name,
    };
    json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{
            "mediaType": root.media_type,
            "digest": root.digest,
            "size": root.bytes.len(),
            "annotations": {
                // containerd reads the first one, other tools the second one.
                "io.containerd.image.name": name,
                "org.opencontainers.image.ref.name": tag,
            },
        }],
    })
    .to_string()
    .into_bytes()
}

enum Failure {
    Agent(CommandError),
    File(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::File(error)
    }
}

fn write(
    client: &Client,
    part: &Path,
    file: &Path,
    index: &[u8],
    contents: &ArchiveContents,
) -> Result<(), Failure> {
    let mut out = create(part)?;
    entry(&mut out, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    entry(&mut out, "index.json", index)?;
    for document in &contents.documents {
        entry(&mut out, &blob_name(&document.digest), &document.bytes)?;
    }
    let all = contents.blobs.iter().map(|(_, size)| *size).fold(0, u64::saturating_add);
    let mut done = 0;
    let mut progress = Progress::new();
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let mut buffer = vec![0; 256 * 1024];
    for (digest, size) in &contents.blobs {
        let target = format!("/v1/images/blob?digest={digest}");
        let response = client.open(&target, ReadTimeout::Response).map_err(Failure::Agent)?;
        out.write_all(&header(&blob_name(digest), *size)?)?;
        let mut body = response.body.take(*size);
        let mut left = *size;
        while left > 0 {
            progress.bytes(&name, done, all);
            let count = body
                .read(&mut buffer)
                .map_err(|error| Failure::Agent(client.io_error("read from")(error)))?;
            if count == 0 {
                return Err(Failure::File(io::Error::other(format!("the blob {digest} ends too early"))));
            }
            out.write_all(buffer.get(..count).unwrap_or_default())?;
            left -= count as u64;
            done += count as u64;
        }
        pad(&mut out, *size)?;
    }
    // Two empty blocks end an archive.
    out.write_all(&[0; 2 * BLOCK as usize])?;
    out.sync_all()?;
    std::fs::rename(part, file)?;
    Ok(())
}

/// Creates a new file. One of an export that was interrupted is removed; a link of another user, in a
/// directory such as `/tmp`, is not followed.
fn create(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    File::options().write(true).create_new(true).open(path)
}

fn blob_name(digest: &str) -> String {
    format!("blobs/{}", digest.replace(':', "/"))
}

fn entry(out: &mut impl Write, name: &str, bytes: &[u8]) -> io::Result<()> {
    out.write_all(&header(name, bytes.len() as u64)?)?;
    out.write_all(bytes)?;
    pad(out, bytes.len() as u64)
}

/// Fills the last block.
fn pad(out: &mut impl Write, size: u64) -> io::Result<()> {
    let missing = usize::try_from(size.next_multiple_of(BLOCK) - size).unwrap_or(0);
    out.write_all([0; BLOCK as usize].get(..missing).unwrap_or_default())
}

/// The header of a file (POSIX ustar). All its other fields are constant, so equal images give equal
/// archives.
fn header(name: &str, size: u64) -> io::Result<[u8; BLOCK as usize]> {
    let mut block = [0; BLOCK as usize];
    let mut put = |offset: usize, text: &[u8]| {
        if let Some(place) = block.get_mut(offset..offset + text.len()) {
            place.copy_from_slice(text);
        }
    };
    // Eleven octal digits.
    if name.len() > 99 || size >= 1 << 33 {
        return Err(io::Error::other("a blob of 8 GiB or more does not fit the archive"));
    }
    put(0, name.as_bytes());
    put(100, b"0000644\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{size:011o}\0").as_bytes());
    put(136, b"00000000000\0");
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    if let Some(place) = block.get_mut(148..156) {
        place.copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    Ok(block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::commands::tests::scripted;

    #[test]
    fn document_that_is_cut_off_is_reported_as_such() {
        let error = |response: &str| {
            let (client, _dir, _agent) = scripted(response);
            document(&client, "r.example/a:1").err().unwrap().to_string()
        };
        let cut_off = error("HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n{}");
        assert!(cut_off.ends_with("the response ends too early"), "{cut_off}");
        let long = error(&format!("HTTP/1.0 200 OK\r\n\r\n{}", " ".repeat(DOCUMENT_BYTES + 1)));
        assert!(long.ends_with("it has more than 8388608 bytes"), "{long}");
    }

    #[test]
    fn export_replaces_an_interrupted_one_and_follows_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let (part, other) = (dir.path().join("x.tar.part"), dir.path().join("other"));
        std::fs::write(&other, "of another user").unwrap();
        std::os::unix::fs::symlink(&other, &part).unwrap();
        create(&part).unwrap().write_all(b"new").unwrap();
        assert_eq!(std::fs::read(&other).unwrap(), b"of another user");
        assert_eq!(std::fs::read(&part).unwrap(), b"new");
        assert_eq!(create(&part).unwrap().metadata().unwrap().len(), 0);
        std::os::unix::fs::symlink(dir.path().join("missing"), dir.path().join("y.part")).unwrap();
        create(&dir.path().join("y.part")).unwrap();
        assert!(!dir.path().join("missing").exists());
    }

    #[test]
    fn archive_is_read_by_tar() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tar");
        let mut out = File::create(&path).unwrap();
        let name = blob_name(&format!("sha256:{}", "a".repeat(64)));
        for bytes in [&b""[..], &[b'x'; 512], &[b'y'; 513]] {
            entry(&mut out, &name, bytes).unwrap();
        }
        out.write_all(&[0; 1024]).unwrap();
        let output = std::process::Command::new("tar").arg("-tvf").arg(&path).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{:?}", output.stderr);
        let sizes: Vec<&str> = text.lines().map(|line| line.split_whitespace().nth(2).unwrap()).collect();
        assert_eq!(sizes, ["0", "512", "513"], "{text}");
        assert!(text.lines().all(|line| line.ends_with(&name)));
        assert!(header(&name, 1 << 33).is_err());
    }

    #[test]
    fn index_names_the_image_as_containerd_and_other_tools_do() {
        let root = Document { media_type: "m".into(), digest: "d".into(), bytes: vec![1; 7] };
        let value: Value = serde_json::from_slice(&index(&root, "r.example:5000/a/b:1.2")).unwrap();
        let first = &value["manifests"][0];
        assert_eq!((first["size"].as_u64(), first["digest"].as_str()), (Some(7), Some("d")));
        assert_eq!(first["annotations"]["io.containerd.image.name"], "r.example:5000/a/b:1.2");
        assert_eq!(first["annotations"]["org.opencontainers.image.ref.name"], "1.2");
    }

    #[test]
    fn descriptors_without_a_good_digest_are_refused() {
        let digest = format!("sha256:{}", "0".repeat(64));
        assert_eq!(descriptor(&json!({"digest": digest, "size": 3})), Some((digest.clone(), 3)));
        for bad in [
            json!({"digest": digest}),
            json!({"digest": "sha256:../../etc", "size": 3}),
            json!({"digest": digest.to_uppercase(), "size": 3}),
            json!({"digest": 7, "size": 3}),
        ] {
            assert_eq!(descriptor(&bad), None, "{bad}");
        }
    }
}
