//! The file of the key that seals Secrets and tokens: 64 hexadecimal digits and a line end.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::util::aead::{AeadError, KEY_BYTES, SealKey};
use crate::util::atomic_file;
use crate::util::untrusted::{self, UntrustedPath};

/// A key is shorter; the rest is space for line ends.
const MAX_BYTES: u64 = 1024;
/// Its user may read and write it.
const MODE: u32 = 0o600;

/// Why there is no key. Says nothing about the content of the file.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeyFileError {
    /// It cannot be read or written.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A directory, a pipe or a device.
    #[error("it is not a regular file")]
    Type,
    /// Another user could replace it.
    #[error("it belongs to the user {0}")]
    Owner(u32),
    /// Another user can read it.
    #[error("its mode is {0:04o}; other users must not have access (chmod 600)")]
    Mode(u32),
    /// It is damaged, or no key.
    #[error("it has not 64 hexadecimal digits")]
    Form,
    /// A new key would not open what is stored.
    #[error(
        "it does not exist, and the stored Secrets and tokens need it: restore it, or remove the files \
         secret-*, token-* and podcertificate-* in the directory of the stored objects"
    )]
    Missing,
    /// The medium is not mounted.
    #[error("its directory does not exist")]
    NoDirectory,
    /// Such as to a medium that is not mounted.
    #[error("it is a link to a file that does not exist")]
    Dangling,
    /// Another key was restored, or the node has another name.
    #[error(
        "it opens none of the stored Secrets and tokens: they were sealed with another key, or for another \
         node name; restore the right key, or remove the files secret-*, token-* and podcertificate-* in the \
         directory of the stored objects"
    )]
    Other,
    /// An object could not be removed before.
    #[error("it is not replaced: there are still sealed objects")]
    Needed,
    /// No key can be made.
    #[error("{0}")]
    Random(#[from] AeadError),
}

/// Reads the key. `levels`: see [`untrusted::directory`]; with 0 the file may be a link. `None`: there is no
/// such file.
pub(super) fn read(path: &Path, levels: usize) -> Result<Option<SealKey>, KeyFileError> {
    let opened = match levels {
        0 => untrusted::open_own(path),
        levels => UntrustedPath::find(path, levels).and_then(|place| place.open()),
    };
    match opened {
        Ok(file) => from_file(file).map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Makes a new key in an existing directory, and makes it permanent.
pub(super) fn make(path: &Path, levels: usize) -> Result<(), KeyFileError> {
    if path.symlink_metadata().is_ok() {
        return Err(KeyFileError::Dangling);
    }
    let place = match UntrustedPath::find(path, levels) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(KeyFileError::NoDirectory),
        place => place?,
    };
    let mut text = String::with_capacity(2 * KEY_BYTES + 1);
    for byte in SealKey::generate()?.reveal() {
        let _ = write!(text, "{byte:02x}");
    }
    text.push('\n');
    let directory = place.dir_path();
    atomic_file::write(&directory.join(place.name()), text.as_bytes(), MODE)?;
    Ok(atomic_file::sync_directory(&directory)?)
}

fn from_file(file: File) -> Result<SealKey, KeyFileError> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(KeyFileError::Type);
    }
    if metadata.uid() != 0 && metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(KeyFileError::Owner(metadata.uid()));
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(KeyFileError::Mode(metadata.mode() & 0o7777));
    }
    let mut content = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut content)?;
    parse(&content).ok_or(KeyFileError::Form)
}

fn parse(content: &[u8]) -> Option<SealKey> {
    let digits = content.trim_ascii_end();
    if digits.len() != 2 * KEY_BYTES || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut bytes = [0; KEY_BYTES];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(SealKey::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_has_exactly_64_hexadecimal_digits() {
        let digits = "000102030405060708090a0b0c0d0e0f101112131415161718191A1B1C1D1E1F";
        for end in ["", "\n", "\r\n"] {
            let key = parse(format!("{digits}{end}").as_bytes()).unwrap();
            assert_eq!(key.reveal(), &std::array::from_fn(|index| index as u8));
        }
        for wrong in [
            String::new(),
            digits[1..].to_owned(),
            format!("{digits}0"),
            format!(" {digits}"),
            format!("{digits}\n{digits}"),
            digits.replace('0', "+"),
            digits.replace("00", "\0\0"),
            "\0".repeat(64),
        ] {
            assert!(parse(wrong.as_bytes()).is_none(), "{wrong:?}");
        }
    }
}
