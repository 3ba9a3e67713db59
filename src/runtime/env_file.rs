//! Env values from files in a pod's volumes, `fileKeyRef` (Go: pkg/kubelet/util/env). The file
//! is a small part of shell syntax: names, and values in single quotes.

use std::io::Read;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags};

use crate::model::api::FileKeySelector;
use crate::model::mount::MountedVolume;

use super::config_error::ConfigError;

/// The limit of bytes, as containers write these files.
const FILE_LIMIT: u64 = 1 << 20;

/// Why a file is invalid. The message is only logged, at debug level.
#[derive(Debug, thiserror::Error)]
pub enum EnvFileError {
    /// It cannot be opened.
    #[error("{0}")]
    Open(rustix::io::Errno),
    /// It cannot be read.
    #[error("{0}")]
    Read(std::io::Error),
    /// It is a directory, a pipe or a device.
    #[error("it is no regular file")]
    Kind,
    /// DIFFERS: upstream limits only each line, to 64 KiB.
    #[error("it is larger than {FILE_LIMIT} bytes")]
    TooLarge,
    /// The value cannot be one of a process. Upstream passes it on, and the container does not start.
    #[error("the value is not UTF-8, or has a NUL character")]
    Value,
    /// A line is not as it must be.
    #[error("line {line}: {reason}")]
    Format {
        /// From 1.
        line: usize,
        /// What is wrong with it.
        reason: &'static str,
    },
}

/// The value of a key; `None` for an optional one that does not exist.
///
/// # Errors
/// When the file cannot be read or parsed, or does not define the key.
pub(super) fn value(
    selector: &FileKeySelector,
    volumes: &[MountedVolume],
) -> Result<Option<String>, ConfigError> {
    let volume = volumes
        .iter()
        .find(|volume| volume.volume == selector.volume_name)
        .ok_or_else(|| ConfigError::EnvFileVolume { volume: selector.volume_name.clone() })?;
    let found = read(&volume.host_path, &selector.path).and_then(|bytes| find(&bytes, &selector.key));
    let found = found.map_err(|error| {
        let (path, volume) = (&selector.path, &selector.volume_name);
        log::debug!("cannot use env file {path} of volume {volume}: {error}");
        ConfigError::EnvFile
    })?;
    // As upstream, an empty value counts as missing.
    match found.filter(|value| !value.is_empty()) {
        Some(value) => Ok(Some(value)),
        None if selector.optional == Some(true) => Ok(None),
        None => Err(ConfigError::EnvFileKey { key: selector.key.clone(), path: selector.path.clone() }),
    }
}

/// Reads a file below `root`, the volume's root being the root of its links.
fn read(root: &Path, path: &str) -> Result<Vec<u8>, EnvFileError> {
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, directory, Mode::empty()).map_err(EnvFileError::Open)?;
    // Opening a pipe must not block until it has a writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let file = match rustix::fs::openat2(&root, path, flags, Mode::empty(), resolve) {
        // Before Linux 5.6: files in the volume's root only, and no links.
        Err(rustix::io::Errno::NOSYS) if !path.contains('/') => {
            rustix::fs::openat(&root, path, flags | OFlags::NOFOLLOW, Mode::empty())
        }
        result => result,
    };
    let file = std::fs::File::from(file.map_err(EnvFileError::Open)?);
    if !file.metadata().map_err(EnvFileError::Read)?.is_file() {
        return Err(EnvFileError::Kind);
    }
    let mut bytes = Vec::new();
    file.take(FILE_LIMIT + 1).read_to_end(&mut bytes).map_err(EnvFileError::Read)?;
    if bytes.len() as u64 > FILE_LIMIT {
        return Err(EnvFileError::TooLarge);
    }
    Ok(bytes)
}

/// The value in the first definition of `key`. The rest is not read, and other values may have any bytes.
///
/// # Errors
/// When a line before it is not as it must be, or the value is no text.
pub fn find(text: &[u8], key: &str) -> Result<Option<String>, EnvFileError> {
    let mut lines = lines(text).enumerate();
    while let Some((number, line)) = lines.next() {
        let fail = |reason| Err(EnvFileError::Format { line: number + 1, reason });
        let line = without_blanks(line);
        if line.is_empty() || line.starts_with(b"#") {
            continue;
        }
        let Some((name, rest)) = split_once(line, b'=') else { return fail("missing '='") };
        if name.is_empty() || name.ends_with(b" ") || name.ends_with(b"\t") {
            return fail("want a name right before '='");
        }
        let is_wanted = name == key.as_bytes();
        let Some(first) = rest.strip_prefix(b"'") else {
            // As in a shell: `A= 'b'` makes A empty.
            if rest.starts_with(b" ") || rest.starts_with(b"\t") {
                if is_wanted {
                    return Ok(Some(String::new()));
                }
                continue;
            }
            return fail("value must be enclosed in single quotes");
        };
        let mut value = Vec::new();
        let mut rest = first;
        let after = loop {
            if let Some((before, after)) = split_once(rest, b'\'') {
                value.extend_from_slice(before);
                break after;
            }
            value.extend_from_slice(rest);
            value.push(b'\n');
            let Some((_, next)) = lines.next() else { return fail("unclosed single quote") };
            rest = next;
        };
        let after = without_blanks(after);
        if !after.is_empty() && !after.starts_with(b"#") {
            return fail("unexpected content after closing quote");
        }
        if is_wanted {
            let text = String::from_utf8(value).ok().filter(|text| !text.contains('\0'));
            return text.map(Some).ok_or(EnvFileError::Value);
        }
    }
    Ok(None)
}

/// Lines, without one carriage return at their end; also the last one, which may lack its end (Go: `bufio.ScanLines`).
fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    text.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line))
}

fn without_blanks(mut line: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] = line {
        line = rest;
    }
    line
}

/// What is before and behind the first of these bytes.
fn split_once(line: &[u8], separator: u8) -> Option<(&[u8], &[u8])> {
    let (before, rest) = line.split_at(line.iter().position(|byte| *byte == separator)?);
    Some((before, rest.get(1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selector(path: &str, key: &str, optional: Option<bool>) -> FileKeySelector {
        FileKeySelector { key: key.into(), optional, path: path.into(), volume_name: "v".into() }
    }

    fn volume(dir: &Path) -> MountedVolume {
        MountedVolume {
            volume: "v".into(),
            host_path: dir.to_owned(),
            read_only: false,
            selinux_relabel: false,
        }
    }

    #[test]
    fn quoted_values_and_comments_are_parsed() {
        let text =
            "# comment\n\n  A='1'\nB='two\n# lines' # note\nC= 'x'\nD=''\nA='2'\n E='$A \\n \"q\"'\t\n";
        for (key, expected) in [
            ("A", Some("1")),
            ("B", Some("two\n# lines")),
            ("C", Some("")),
            ("D", Some("")),
            ("E", Some("$A \\n \"q\"")),
            ("F", None),
        ] {
            assert_eq!(find(text.as_bytes(), key).unwrap().as_deref(), expected, "{key}");
        }
        for bad in ["A", "A =''", "=''", "A=b", "A=\"b\"", "A='b", "A='b'c", "A='b'\n'\n", "K='\0'"] {
            assert!(find(bad.as_bytes(), "K").is_err(), "{bad:?}");
        }
        // What comes after the key is not read.
        assert_eq!(find(b"K='v'\nrubbish", "K").unwrap().as_deref(), Some("v"));
    }

    #[test]
    fn bytes_of_other_lines_and_the_end_of_the_last_line_do_not_matter() {
        let latin = b"# caf\xe9\nA='\0\xe9'\r\nB='b\r\nc'\r\nK='v'\r";
        assert_eq!(find(latin, "K").unwrap().as_deref(), Some("v"));
        assert_eq!(find(latin, "B").unwrap().as_deref(), Some("b\nc"));
        assert!(matches!(find(latin, "A"), Err(EnvFileError::Value)));
        assert_eq!(find(b"", "K").unwrap(), None);
        assert!(find(b"K='v'\r\r", "K").is_err());
    }

    #[test]
    fn env_file_outside_volume_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("v");
        std::fs::create_dir_all(root.join("d")).unwrap();
        std::fs::write(root.join("d/f"), "K='inside'\n").unwrap();
        std::fs::write(root.join("outside"), "K='inside, too'\n").unwrap();
        std::fs::write(dir.path().join("outside"), "K='outside'\n").unwrap();
        std::os::unix::fs::symlink("/../outside", root.join("link")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("outside"), root.join("out")).unwrap();
        let volumes = [volume(&root)];
        let get = |path: &str, key: &str, optional| {
            value(&selector(path, key, optional), &volumes).map_err(|error| error.to_string())
        };
        assert_eq!(get("d/f", "K", None), Ok(Some("inside".into())));
        assert_eq!(get("d/f", "X", Some(true)), Ok(None));
        assert_eq!(
            get("d/f", "X", None),
            Err("environment variable key \"X\" not found in file \"d/f\"".into())
        );
        for path in ["gone", "d", "out"] {
            assert_eq!(get(path, "K", Some(true)), Err("couldn't parse env file".into()), "{path}");
        }
        assert_eq!(get("link", "K", None), Ok(Some("inside, too".into())));
        std::fs::write(root.join("big"), vec![b'#'; (FILE_LIMIT + 1) as usize]).unwrap();
        assert!(get("big", "K", None).is_err());
        assert_eq!(
            value(&selector("f", "K", None), &[]).unwrap_err().to_string(),
            "cannot find the volume \"v\" referenced by FileKeyRef"
        );
    }

    proptest::proptest! {
        #[test]
        fn random_env_file_causes_no_panic(text in "[A='# \\n\\t\0]{0,60}") {
            let _ = find(text.as_bytes(), "A");
        }
    }
}
