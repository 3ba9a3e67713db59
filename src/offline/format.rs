//! The form of a file (pure): a line of JSON that names the object, its body, and the SHA-256 digest of all
//! bytes before it.
//!
//! The digest finds damage, and needs no key; that a sealed body belongs to this node and this object is
//! shown by its tag.

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
    /// The first line is no header of this program.
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

/// A file's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Body<'a> {
    /// The bytes, as they were passed to [`encode`].
    pub bytes: &'a [u8],
    /// Whether they are sealed.
    pub is_sealed: bool,
}

/// The content of the file of an object.
///
/// # Errors
/// [`FormatError::TooLarge`].
pub fn encode(key: &Key, body: Body<'_>) -> Result<Vec<u8>, FormatError> {
    if key.name.len() > MAX_NAME_BYTES || body.bytes.len() > MAX_BODY_BYTES {
        return Err(FormatError::TooLarge);
    }
    let header = Header {
        version: VERSION,
        kind: key.kind.word().to_owned(),
        name: key.name.clone(),
        sealed: body.is_sealed,
    };
    let mut file = serde_json::to_vec(&header).map_err(|error| FormatError::Header(error.to_string()))?;
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
/// All of [`FormatError`] but `TooLarge`.
pub fn decode(file: &[u8]) -> Result<(Key, Body<'_>), FormatError> {
    let (content, digest) = file.split_last_chunk::<DIGEST_BYTES>().ok_or(FormatError::Short)?;
    if sha256(content) != *digest {
        return Err(FormatError::Digest);
    }
    let end =
        content.iter().take(MAX_LINE_BYTES).position(|byte| *byte == b'\n').ok_or(FormatError::Short)?;
    let (line, rest) = content.split_at_checked(end).ok_or(FormatError::Short)?;
    let header: Header =
        serde_json::from_slice(line).map_err(|error| FormatError::Header(error.to_string()))?;
    if header.version != VERSION {
        return Err(FormatError::Version(header.version));
    }
    let kind = Kind::parse(&header.kind)
        .ok_or_else(|| FormatError::Header(format!("unknown kind {:?}", header.kind)))?;
    let bytes = rest.split_first().map_or(rest, |(_, bytes)| bytes);
    Ok((Key { kind, name: header.name }, Body { bytes, is_sealed: header.sealed }))
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
        let key = Key::namespaced(Kind::ConfigMap, "ns", "a\n\"b");
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

    #[test]
    fn contexts_of_other_objects_differ() {
        let context = |node: &str, kind, name: &str| seal_context(node, &Key::new(kind, name));
        let first = context("n", Kind::Secret, "a/b");
        assert_ne!(first, context("m", Kind::Secret, "a/b"));
        assert_ne!(first, context("n", Kind::Token, "a/b"));
        assert_ne!(first, context("n", Kind::Secret, "a/c"));
    }
}
