//! Registry credentials from the node's docker configuration files (Go: pkg/credentialprovider).

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::name::split_domain;
use super::records::PullSecret;
use crate::util::encoding::from_base64;

/// The files are read again after this time.
const FRESH: Duration = Duration::from_secs(300);
/// Key of the registry that names without a host mean.
const DEFAULT_REGISTRY: &str = "index.docker.io";

/// A user name and password for a registry.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Credential {
    pub(super) username: String,
    pub(super) password: String,
    /// The Secret it is from; `None`: it is the node's own.
    pub(super) secret: Option<Arc<PullSecret>>,
}

impl fmt::Debug for Credential {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Credential({}, ***)", self.username)
    }
}

/// A user as files and programs write it.
#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct Entry {
    username: String,
    password: String,
    auth: String,
}

#[derive(Deserialize)]
pub(super) struct DockerConfig {
    #[serde(default)]
    pub(super) auths: BTreeMap<String, Entry>,
}

/// Credentials by key: host, port and path.
pub(super) type Index = BTreeMap<String, Vec<Credential>>;

/// What the files say, read again now and then.
pub(super) struct Keyring {
    /// `config.json` files, then legacy `.dockercfg` files; the first that can be read counts.
    files: [Vec<PathBuf>; 2],
    cache: Mutex<Option<(Instant, Index)>>,
}

impl Keyring {
    pub(super) fn new(root_dir: &Path) -> Keyring {
        let home = std::env::var_os("HOME").map(PathBuf::from);
        let of_home = |below: &str| home.iter().map(|home| home.join(below)).collect::<Vec<_>>();
        let current = vec![root_dir.to_owned(), PathBuf::new()];
        let place = |dirs: Vec<PathBuf>, name: &str| dirs.into_iter().map(|dir| dir.join(name)).collect();
        Keyring {
            files: [
                place([current.clone(), of_home(".docker"), vec!["/.docker".into()]].concat(), "config.json"),
                place([current, of_home(""), vec!["/".into()]].concat(), ".dockercfg"),
            ],
            cache: Mutex::new(None),
        }
    }

    /// Credentials that may be right for `image`, the most specific first.
    pub(super) fn for_image(&self, image: &str, now: Instant) -> Vec<Credential> {
        let cached = || self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((read, index)) = &*cached()
            && now.saturating_duration_since(*read) < FRESH
        {
            return lookup(index, image);
        }
        let index = self.read();
        let found = lookup(&index, image);
        *cached() = Some((now, index));
        found
    }

    fn read(&self) -> Index {
        let parse = |text: &str, kind: usize| -> serde_json::Result<BTreeMap<String, Entry>> {
            if kind == 0 {
                serde_json::from_str::<DockerConfig>(text).map(|config| config.auths)
            } else {
                serde_json::from_str(text)
            }
        };
        for (kind, files) in self.files.iter().enumerate() {
            for file in files {
                let Ok(text) = std::fs::read_to_string(file) else { continue };
                match parse(&text, kind) {
                    Ok(entries) => return index(entries),
                    // The decoder's own words may quote the file, and with it a password.
                    Err(error) => log::warn!(
                        "cannot use registry credentials in {}: line {}, column {} is not what is expected",
                        file.display(),
                        error.line(),
                        error.column()
                    ),
                }
            }
        }
        Index::new()
    }
}

/// Entries by key, those without a user left out.
pub(super) fn index(entries: BTreeMap<String, Entry>) -> Index {
    let mut index = Index::new();
    for (key, entry) in entries {
        let decoded = decode(entry.auth.trim()).and_then(|text| {
            let (username, password) = text.split_once(':')?;
            Some((username.to_owned(), password.to_owned()))
        });
        let (username, password) = decoded.unwrap_or((entry.username, entry.password));
        if !username.is_empty() {
            let credential = Credential { username, password, secret: None };
            index.entry(normal_key(&key)).or_default().push(credential);
        }
    }
    index
}

/// A key without scheme and without the API version that docker puts behind the host.
fn normal_key(key: &str) -> String {
    let key = key.split_once("://").map_or(key, |(_, rest)| rest);
    let (host, path) = key.split_once('/').map_or((key, ""), |(host, path)| (host, path));
    let path = ["v1", "v2"]
        .iter()
        .find_map(|version| {
            path.strip_prefix(version).filter(|rest| rest.is_empty() || rest.starts_with('/'))
        })
        .unwrap_or(path)
        .trim_matches('/');
    if path.is_empty() { host.to_owned() } else { format!("{host}/{path}") }
}

/// What may be right for `image`, the most specific first.
pub(super) fn lookup(index: &Index, image: &str) -> Vec<Credential> {
    let (domain, rest) = split_domain(image);
    let mut found = Vec::new();
    if let Some(domain) = domain {
        // In reverse order longer and therefore more specific keys come first.
        for (key, credentials) in index.iter().rev() {
            if key_matches(key, domain, rest) {
                found.extend(credentials.iter().cloned());
            }
        }
    }
    if found.is_empty() && matches!(domain, None | Some("docker.io" | DEFAULT_REGISTRY)) {
        found.extend(index.get(DEFAULT_REGISTRY).into_iter().flatten().cloned());
    }
    found
}

/// Whether a key, in whose host parts may have wildcards, covers an image.
pub(super) fn key_matches(key: &str, domain: &str, path: &str) -> bool {
    let (key_domain, key_path) = key.split_once('/').unwrap_or((key, ""));
    let split_port = |text: &str| match text.rsplit_once(':') {
        Some((host, port)) => (host.to_owned(), Some(port.to_owned())),
        None => (text.to_owned(), None),
    };
    let ((key_host, key_port), (host, port)) = (split_port(key_domain), split_port(domain));
    let (key_parts, parts): (Vec<&str>, Vec<&str>) =
        (key_host.split('.').collect(), host.split('.').collect());
    key_port == port
        && path.starts_with(key_path)
        && key_parts.len() == parts.len()
        && key_parts.iter().zip(&parts).all(|(pattern, part)| glob(pattern.as_bytes(), part.as_bytes()))
}

/// `*` is any text, `?` any byte.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    match (pattern.split_first(), text.split_first()) {
        (None, rest) => rest.is_none(),
        (Some((b'*', after)), rest) => glob(after, text) || rest.is_some_and(|(_, tail)| glob(pattern, tail)),
        (Some((want, after)), Some((got, tail))) => (*want == b'?' || want == got) && glob(after, tail),
        (Some(_), None) => false,
    }
}

/// Base64, with or without padding; `None` for anything else or for what is no text.
fn decode(text: &str) -> Option<String> {
    let bytes = from_base64(text).filter(|bytes| !bytes.is_empty())?;
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users(index: &Index, image: &str) -> Vec<String> {
        lookup(index, image).into_iter().map(|credential| credential.username).collect()
    }

    #[test]
    fn the_most_specific_key_comes_first() {
        let user = |name: &str| Entry { username: name.into(), password: "p".into(), ..Entry::default() };
        let keys = [
            ("https://index.docker.io/v1/", "hub"),
            ("registry.example", "reg"),
            ("registry.example/team", "team"),
            ("https://registry.example:5000/v2/", "port"),
            ("*.wild.example", "wild"),
        ];
        let index = index(keys.map(|(key, name)| (key.to_owned(), user(name))).into());
        for (image, expected) in [
            ("busybox:1", vec!["hub"]),
            ("team/app", vec!["hub"]),
            ("docker.io/library/busybox", vec!["hub"]),
            ("registry.example/x", vec!["reg"]),
            ("registry.example/team/x:1", vec!["team", "reg"]),
            ("registry.example:5000/x", vec!["port"]),
            ("a.wild.example/x", vec!["wild"]),
            ("a.b.wild.example/x", vec![]),
            ("other.example/x", vec![]),
        ] {
            assert_eq!(users(&index, image), expected, "{image}");
        }
    }

    #[test]
    fn auth_overrides_and_broken_files_are_skipped() {
        assert_eq!(decode("dXNlcjpwYXNz").as_deref(), Some("user:pass"));
        assert_eq!(decode("dTpw").as_deref(), Some("u:p"));
        assert_eq!(decode("dXNlcjpwYTo=").as_deref(), Some("user:pa:"));
        assert_eq!(decode("dXNlcjpwYTo").as_deref(), Some("user:pa:"));
        assert_eq!(decode("not base64!"), None);
        let dir = tempfile::tempdir().unwrap();
        let keyring = |text: &str| {
            std::fs::write(dir.path().join("config.json"), text).unwrap();
            let files = [vec![dir.path().join("config.json")], vec![dir.path().join(".dockercfg")]];
            Keyring { files, cache: Mutex::new(None) }.for_image("r.example/x", Instant::now())
        };
        std::fs::write(
            dir.path().join(".dockercfg"),
            r#"{"r.example": {"username": "old", "password": "p"}}"#,
        )
        .unwrap();
        let found = keyring(r#"{"auths": {"r.example": {"auth": "dTpw", "username": "x"}}}"#);
        assert_eq!(found, [Credential { username: "u".into(), password: "p".into(), secret: None }]);
        assert_eq!(keyring("{broken").first().map(|c| c.username.as_str()), Some("old"));
        assert_eq!(format!("{found:?}"), "[Credential(u, ***)]");
    }
}
