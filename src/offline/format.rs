//! The form of a file (pure): a line of JSON that names the object, its body, and the SHA-256 digest of all
//! bytes before it.
//!
//! The digest finds damage, and needs no key; that a sealed body belongs to this node and this object is
//! shown by its tag.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::key::{Key, Kind, MAX_NAME_BYTES};
use crate::util::sha256::sha256;

/// The version of the form. Files of another version are put aside.
const VERSION: u32 = 1;
/// The largest body: API servers do not store objects above 3 MiB, and base64 makes them larger.
pub const MAX_BODY_BYTES: usize = 6 * 1024 * 1024;
/// The largest first line; each byte of a name may need six in JSON.
const MAX_LINE_BYTES: usize = 6 * MAX_NAME_BYTES + 256;
const DIGEST_BYTES: usize = 32;
/// The largest file.
pub const MAX_FILE_BYTES: usize = MAX_LINE_BYTES + MAX_BODY_BYTES + DIGEST_BYTES;

/// Why a file is not used, or an object is not stored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// There are less bytes than the smallest file has, or no first line.
    #[error("it is too short")]
    Short,
    /// The digest of the bytes is another one.
    #[error("its checksum is wrong")]
    Digest,
    /// The first line is no header of this program. The text has nothing of the line.
    #[error("its header is wrong: {0}")]
    Header(String),
    /// It was written by another version.
    #[error("version {0} of its form is not known")]
    Version(u32),
    /// The name or the body is too long.
    #[error("the object is too large")]
    TooLarge,
}

#[derive(Serialize, Deserialize)]
struct Header {
    version: u32,
    kind: String,
    name: String,
    sealed: bool,
}

/// A file's content. `Debug` does not print the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Body<'a> {
    /// The bytes, as they were passed to [`encode`].
    pub bytes: &'a [u8],
    /// Whether they are sealed.
    pub is_sealed: bool,
}

impl fmt::Debug for Body<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Body({} bytes, is_sealed: {})", self.bytes.len(), self.is_sealed)
    }
}

/// The content of the file of an object.
///
/// # Errors
/// [`FormatError::TooLarge`]; [`FormatError::Header`] if the name has control characters.
pub fn encode(key: &Key, body: Body<'_>) -> Result<Vec<u8>, FormatError> {
    if key.name.len() > MAX_NAME_BYTES || body.bytes.len() > MAX_BODY_BYTES {
        return Err(FormatError::TooLarge);
    }
    check_name(&key.name)?;
    let header = Header {
        version: VERSION,
        kind: key.kind.word().to_owned(),
        name: key.name.clone(),
        sealed: body.is_sealed,
    };
    let mut file = serde_json::to_vec(&header).map_err(|_| wrong_header("it cannot be encoded"))?;
    file.reserve_exact(1 + body.bytes.len() + DIGEST_BYTES);
    file.push(b'\n');
    file.extend_from_slice(body.bytes);
    let digest = sha256(&file);
    file.extend_from_slice(&digest);
    Ok(file)
}

/// The object and the body of a file.
///
/// # Errors
/// All of [`FormatError`].
pub fn decode(file: &[u8]) -> Result<(Key, Body<'_>), FormatError> {
    let (content, digest) = file.split_last_chunk::<DIGEST_BYTES>().ok_or(FormatError::Short)?;
    if sha256(content) != *digest {
        return Err(FormatError::Digest);
    }
    let end =
        content.iter().take(MAX_LINE_BYTES).position(|byte| *byte == b'\n').ok_or(FormatError::Short)?;
    let (line, rest) = content.split_at_checked(end).ok_or(FormatError::Short)?;
    // The text of the error may have parts of the line.
    let header: Header = serde_json::from_slice(line).map_err(|_| wrong_header("it has another form"))?;
    if header.version != VERSION {
        return Err(FormatError::Version(header.version));
    }
    let kind = Kind::parse(&header.kind).ok_or_else(|| wrong_header("the kind is not known"))?;
    if header.name.len() > MAX_NAME_BYTES {
        return Err(wrong_header("the name is too long"));
    }
    check_name(&header.name)?;
    let bytes = rest.split_first().map_or(rest, |(_, bytes)| bytes);
    if bytes.len() > MAX_BODY_BYTES {
        return Err(FormatError::TooLarge);
    }
    Ok((Key { kind, name: header.name }, Body { bytes, is_sealed: header.sealed }))
}

/// Whether an object of this name can be stored. Pods may name objects that no API server can have.
pub(super) fn can_store_name(name: &str) -> bool {
    name.len() <= MAX_NAME_BYTES && check_name(name).is_ok()
}

fn wrong_header(reason: &str) -> FormatError {
    FormatError::Header(reason.to_owned())
}

/// Names are part of log lines. No object of Kubernetes has such a name.
fn check_name(name: &str) -> Result<(), FormatError> {
    match name.chars().any(char::is_control) {
        true => Err(wrong_header("the name has control characters")),
        false => Ok(()),
    }
}

/// What the tag of a sealed body covers besides the body: node, kind and name of the object, each with
/// its length, so that no two objects have the same.
#[must_use]
pub fn seal_context(node_name: &str, key: &Key) -> Vec<u8> {
    let mut context = b"coracle offline 1".to_vec();
    for part in [node_name, key.kind.word(), key.name.as_str()] {
        context.extend_from_slice(&(part.len() as u64).to_be_bytes());
        context.extend_from_slice(part.as_bytes());
    }
    context
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_read_as_written_and_each_damage_is_found() {
        let key = Key::namespaced(Kind::ConfigMap, "ns", "a\"b");
        let body = Body { bytes: b"{}\n\0", is_sealed: false };
        let file = encode(&key, body).unwrap();
        assert_eq!(decode(&file), Ok((key.clone(), body)));
        for place in 0..file.len() {
            let mut damaged = file.clone();
            damaged[place] ^= 0x20;
            assert_eq!(decode(&damaged), Err(FormatError::Digest), "{place}");
            assert!(decode(&file[..place]).is_err(), "{place}");
        }
        assert_eq!(decode(&[]), Err(FormatError::Short));
        let long = Key::new(Kind::Volume, &"v".repeat(MAX_NAME_BYTES + 1));
        assert_eq!(encode(&long, body), Err(FormatError::TooLarge));
        let signed = |line: &str| {
            let mut file = line.as_bytes().to_vec();
            file.extend_from_slice(&sha256(line.as_bytes()));
            decode(&file).map(drop)
        };
        assert_eq!(signed("x"), Err(FormatError::Short));
        assert!(matches!(signed("x\n"), Err(FormatError::Header(_))));
        let header = |version: u32, kind: &str| {
            format!("{{\"version\":{version},\"kind\":\"{kind}\",\"name\":\"\",\"sealed\":false}}\n")
        };
        assert_eq!(signed(&header(1, "node")), Ok(()));
        assert_eq!(signed(&header(2, "node")), Err(FormatError::Version(2)));
        assert!(matches!(signed(&header(1, "bird")), Err(FormatError::Header(_))));
    }

    /// Files of this version stay readable.
    #[test]
    fn form_is_that_of_the_first_version() {
        let key = Key::namespaced(Kind::ConfigMap, "ns", "m");
        let body = Body { bytes: b"{}", is_sealed: false };
        let mut file =
            b"{\"version\":1,\"kind\":\"configmap\",\"name\":\"ns/m\",\"sealed\":false}\n{}".to_vec();
        file.extend_from_slice(&[
            0x7b, 0x5b, 0x00, 0x24, 0x79, 0x4c, 0x99, 0xd0, 0x1e, 0x46, 0xc1, 0xa6, 0xe8, 0x3a, 0xf2, 0x71,
            0xf1, 0x23, 0x39, 0x5a, 0x6d, 0x99, 0xe9, 0x2f, 0x51, 0x3e, 0xe0, 0x8f, 0xa6, 0xc6, 0x5f, 0x6d,
        ]);
        assert_eq!(encode(&key, body).unwrap(), file);
        assert_eq!(decode(&file), Ok((key.clone(), body)));
        assert_eq!(key.file_name(), "configmap-83063bb6a882e987369a2abc377adee6");
        let key = Key::namespaced(Kind::Secret, "ns", "s");
        assert_eq!(key.file_name(), "secret-eef75980e616f484ad4ef375539cd3e4");
        let mut context = b"coracle offline 1".to_vec();
        context.extend_from_slice(b"\0\0\0\0\0\0\0\x01n\0\0\0\0\0\0\0\x06secret\0\0\0\0\0\0\0\x04ns/s");
        assert_eq!(seal_context("n", &key), context);
    }

    #[test]
    fn errors_and_debug_output_have_nothing_of_the_file() {
        let signed = |content: &str| [content.as_bytes(), &sha256(content.as_bytes())].concat();
        for content in [
            "canary\n",
            "{\"version\":\"canary\",\"kind\":\"pod\",\"name\":\"\",\"sealed\":false}\n",
            "{\"version\":1,\"kind\":\"canary\",\"name\":\"\",\"sealed\":false}\n",
            "{\"version\":1,\"kind\":\"pod\",\"name\":\"\\ncanary\",\"sealed\":false}\n",
        ] {
            let error = decode(&signed(content)).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("canary"), "{error}");
        }
        let body = Body { bytes: b"canary", is_sealed: false };
        assert!(!format!("{body:?} {:?}", encode(&Key::new(Kind::Pod, "\n"), body)).contains("canary"));
    }

    #[test]
    fn names_that_are_no_names_are_refused() {
        let body = Body { bytes: b"", is_sealed: false };
        for name in ["a\nb", "\u{1b}[2J", "\0", "\u{9b}"] {
            assert!(
                matches!(encode(&Key::new(Kind::Pod, name), body), Err(FormatError::Header(_))),
                "{name:?}"
            );
        }
        let longest = Key::new(Kind::Volume, &"\"".repeat(MAX_NAME_BYTES));
        let file = encode(&longest, body).unwrap();
        assert_eq!(decode(&file), Ok((longest, body)));
        let large = vec![0; MAX_BODY_BYTES + 1];
        let body = Body { bytes: &large, is_sealed: false };
        assert_eq!(encode(&Key::node(), body), Err(FormatError::TooLarge));
        let body = Body { bytes: &large[1..], is_sealed: false };
        assert!(encode(&Key::node(), body).unwrap().len() <= MAX_FILE_BYTES);
    }

    #[test]
    fn contexts_of_other_objects_differ() {
        let context = |node: &str, kind, name: &str| seal_context(node, &Key::new(kind, name));
        let first = context("n", Kind::Secret, "a/b");
        assert_ne!(first, context("m", Kind::Secret, "a/b"));
        assert_ne!(first, context("n", Kind::Token, "a/b"));
        assert_ne!(first, context("n", Kind::Secret, "a/c"));
    }
}
