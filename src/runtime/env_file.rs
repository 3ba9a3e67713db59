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
pub(super) enum EnvFileError {
    #[error("{0}")]
    Open(rustix::io::Errno),
    #[error("{0}")]
    Read(std::io::Error),
    #[error("it is no regular file")]
    Kind,
    #[error("it is larger than {FILE_LIMIT} bytes")]
    TooLarge,
    #[error("it is not UTF-8")]
    Encoding,
    #[error("line {line}: {why}")]
    Format { line: usize, why: &'static str },
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
    let found = read(&volume.host_path, &selector.path).and_then(|text| find(&text, &selector.key));
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
fn read(root: &Path, path: &str) -> Result<String, EnvFileError> {
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
    String::from_utf8(bytes).map_err(|_| EnvFileError::Encoding)
}

/// The first definition of `key`. The rest is not read.
pub(super) fn find(text: &str, key: &str) -> Result<Option<String>, EnvFileError> {
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let fail = |why| Err(EnvFileError::Format { line: number + 1, why });
        let line = line.trim_start_matches([' ', '\t']);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let Some((name, rest)) = line.split_once('=') else { return fail("missing '='") };
        if name.is_empty() || name.ends_with([' ', '\t']) {
            return fail("want a name right before '='");
        }
        let Some(first) = rest.strip_prefix('\'') else {
            // As in a shell: `A= 'b'` makes A empty.
            if rest.starts_with([' ', '\t']) {
                if name == key {
                    return Ok(Some(String::new()));
                }
                continue;
            }
            return fail("value must be enclosed in single quotes");
        };
        let mut value = String::new();
        let mut rest = first;
        let after = loop {
            if let Some((before, after)) = rest.split_once('\'') {
                value.push_str(before);
                break after;
            }
            value.push_str(rest);
            value.push('\n');
            let Some((_, next)) = lines.next() else { return fail("unclosed single quote") };
            rest = next;
        };
        let after = after.trim_start_matches([' ', '\t']);
        if !after.is_empty() && !after.starts_with('#') {
            return fail("unexpected content after closing quote");
        }
        if value.contains('\0') {
            return fail("a value cannot hold a NUL character");
        }
        if name == key {
            return Ok(Some(value));
        }
    }
    Ok(None)
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
            assert_eq!(find(text, key).unwrap().as_deref(), expected, "{key}");
        }
        for bad in ["A", "A =''", "=''", "A=b", "A=\"b\"", "A='b", "A='b'c", "A='b'\n'\n", "A='\0'"] {
            assert!(find(bad, "K").is_err(), "{bad:?}");
        }
        // What comes after the key is not read.
        assert_eq!(find("K='v'\nrubbish", "K").unwrap().as_deref(), Some("v"));
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
            let _ = find(&text, "A");
        }
    }
}
