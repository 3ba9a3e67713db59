//! Registry credentials from the node's docker configuration files (Go: pkg/credentialprovider).

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::records::PullSecret;
use crate::model::image_name::{normalized, repository};
use crate::util::encoding::from_base64;
use crate::util::untrusted;

/// The files are read again after this time.
const FRESH: Duration = Duration::from_secs(300);
/// The largest size of a Secret.
const FILE_LIMIT: u64 = 1 << 20;
/// The longest name of a host (RFC 1035, 2.3.4). A longer key matches no registry.
/// DIFFERS: upstream matches keys of any length.
const MAX_HOST: usize = 253;
/// The limit of registries in one file, Secret or response of a program. Each is compared at every
/// pull; usually there are a few. DIFFERS: upstream has no limit.
pub(super) const MAX_ENTRIES: usize = 1_000;
/// Key of the default registry, for names without a host.
const DEFAULT_REGISTRY: &str = "index.docker.io";

/// A user name and password for a registry.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Credential {
    pub(super) username: String,
    pub(super) password: String,
    /// The Secret of the credential; `None` for a credential of the node.
    pub(super) secret: Option<Arc<PullSecret>>,
}

impl fmt::Debug for Credential {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Credential({}, ***)", self.username)
    }
}

/// An entry in the format of files and programs.
#[derive(Default)]
pub(super) struct Entry {
    username: String,
    password: String,
    auth: String,
}

/// The content of a `config.json`.
pub(super) struct DockerConfig {
    pub(super) auths: BTreeMap<String, Entry>,
}

/// A field as Go's decoder finds it: in any case of letters. `null` counts as absent.
fn field<'v>(value: &'v Value, name: &str) -> Option<&'v Value> {
    let fields = value.as_object()?;
    let inexact = || fields.iter().find(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| value);
    fields.get(name).or_else(inexact).filter(|value| !value.is_null())
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let text = |name: &str| -> Result<String, D::Error> {
            match (&value, field(&value, name)) {
                (Value::Object(_) | Value::Null, None) => Ok(String::new()),
                (_, Some(Value::String(text))) => Ok(text.clone()),
                // The value may be a secret.
                _ => Err(serde::de::Error::custom("an entry has another type than Docker writes")),
            }
        };
        Ok(Entry { username: text("username")?, password: text("password")?, auth: text("auth")? })
    }
}

impl<'de> Deserialize<'de> for DockerConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let wrong = || serde::de::Error::custom("want an object with auths");
        if !value.is_object() {
            return Err(wrong());
        }
        let auths = field(&value, "auths").cloned();
        let auths = auths
            .map(|auths| BTreeMap::<String, Entry>::deserialize(auths).map_err(|_| wrong()))
            .transpose()?;
        Ok(DockerConfig { auths: auths.unwrap_or_default() })
    }
}

/// Credentials by key: host, port and path.
pub(super) type Index = BTreeMap<String, Vec<Credential>>;

/// The entries of the files, which are read again regularly.
pub(super) struct Keyring {
    /// `config.json` files, then legacy `.dockercfg` files; the first that can be read is used.
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

    /// Credentials that match `image`, the most specific first.
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
                let text = untrusted::read_own(file, FILE_LIMIT)
                    .and_then(|text| String::from_utf8(text).map_err(io::Error::other));
                let text = match text {
                    Ok(text) => text,
                    Err(error)
                        if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
                    {
                        continue;
                    }
                    Err(error) => {
                        log::warn!("cannot read registry credentials in {}: {error}", file.display());
                        continue;
                    }
                };
                match parse(&text, kind) {
                    Ok(entries) => match index(entries) {
                        Ok(index) => return index,
                        Err(error) => {
                            log::warn!("cannot use registry credentials in {}: {error}", file.display());
                        }
                    },
                    // The decoder's message may contain a part of the file, such as a password.
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

/// There are more than [`MAX_ENTRIES`].
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("it names more than {MAX_ENTRIES} registries")]
pub(super) struct TooMany;

/// Entries by key, without those that have no user and those whose host no registry can have.
///
/// # Errors
/// When there are more than [`MAX_ENTRIES`].
pub(super) fn index(entries: BTreeMap<String, Entry>) -> Result<Index, TooMany> {
    if entries.len() > MAX_ENTRIES {
        return Err(TooMany);
    }
    let mut index = Index::new();
    for (key, entry) in entries {
        let decoded = decode(entry.auth.trim()).and_then(|text| {
            let (username, password) = text.split_once(':')?;
            Some((username.to_owned(), password.to_owned()))
        });
        let (username, password) = decoded.unwrap_or((entry.username, entry.password));
        let key = normal_key(&key);
        if !username.is_empty() && split_port(domain_of(&key).0).0.len() <= MAX_HOST {
            let credential = Credential { username, password, secret: None };
            index.entry(key).or_default().push(credential);
        }
    }
    Ok(index)
}

/// The host with its port, and the path.
fn domain_of(key: &str) -> (&str, &str) {
    key.split_once('/').unwrap_or((key, ""))
}

fn split_port(domain: &str) -> (&str, Option<&str>) {
    match domain.rsplit_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (domain, None),
    }
}

/// A key without scheme and without the API version that docker puts behind the host (Go:
/// `BasicDockerKeyring.Add`). A slash at its end stays: the path is then that of a directory.
fn normal_key(key: &str) -> String {
    let key = key.split_once("://").map_or(key, |(_, rest)| rest);
    let (host, path) = key.find('/').map_or((key, ""), |at| key.split_at(at));
    let version = |version| path.strip_prefix(version).filter(|rest| rest.starts_with('/'));
    match version("/v1").or_else(|| version("/v2")).unwrap_or(path) {
        "/" => host.to_owned(),
        path => format!("{host}{path}"),
    }
}

/// The whole name of an image without tag and digest, such as `docker.io/library/busybox`. `None`: it is
/// no image name.
pub(super) fn full_repository(image: &str) -> Option<String> {
    Some(repository(&normalized(image).ok()?).to_owned())
}

/// The credentials that match `image`, the most specific first (Go: `BasicDockerKeyring.Lookup`, for the
/// normalised repository).
///
/// DIFFERS: upstream also uses the key of Docker Hub for `localhost/…` if no other key matches.
pub(super) fn lookup(index: &Index, image: &str) -> Vec<Credential> {
    let Some(name) = full_repository(image) else { return Vec::new() };
    let (domain, path) = domain_of(&name);
    // In reverse order longer and therefore more specific keys come first.
    let matching = index.iter().rev().filter(|(key, _)| key_matches(key, domain, path));
    let mut found: Vec<Credential> =
        matching.flat_map(|(_, credentials)| credentials.iter().cloned()).collect();
    if found.is_empty() && domain == "docker.io" {
        found.extend(index.get(DEFAULT_REGISTRY).into_iter().flatten().cloned());
    }
    found
}

/// Whether a key, in whose host parts may have wildcards, covers an image.
pub(super) fn key_matches(key: &str, domain: &str, path: &str) -> bool {
    let (key_domain, key_path) = domain_of(key);
    let ((key_host, key_port), (host, port)) = (split_port(key_domain), split_port(domain));
    // Longer texts are no host, and would take time.
    if key_host.len() > MAX_HOST || host.len() > MAX_HOST {
        return false;
    }
    let (key_parts, parts) = (|| key_host.split('.'), || host.split('.'));
    key_port == port
        && path.starts_with(key_path)
        && key_parts().count() == parts().count()
        && key_parts().zip(parts()).all(|(pattern, part)| glob(pattern.as_bytes(), part.as_bytes()))
}

/// `*` is any text, `?` any byte. Takes no more steps than the product of both lengths: after a
/// mismatch only the last `*` gets one more byte, as it could take what an earlier one leaves.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut seen) = (0, 0);
    // The position after the last star, and the length of the text before and in it.
    let mut star: Option<(usize, usize)> = None;
    while let Some(got) = text.get(seen) {
        match pattern.get(at) {
            Some(b'*') => {
                at += 1;
                star = Some((at, seen));
            }
            Some(want) if want == got || *want == b'?' => {
                at += 1;
                seen += 1;
            }
            _ => {
                let Some((behind, taken)) = star else { return false };
                star = Some((behind, taken + 1));
                (at, seen) = (behind, taken + 1);
            }
        }
    }
    pattern.iter().skip(at).all(|rest| *rest == b'*')
}

/// Base64, with or without padding and in one line or several; `None` for anything else or for what is
/// no text.
fn decode(text: &str) -> Option<String> {
    let bytes = from_base64(&text.replace(['\r', '\n'], "")).filter(|bytes| !bytes.is_empty())?;
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::testing::unblocked;

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
            ("registry.example/dir/", "dir"),
            ("registry.example/v2", "path"),
        ];
        let index = index(keys.map(|(key, name)| (key.to_owned(), user(name))).into()).unwrap();
        for (image, expected) in [
            ("busybox:1", vec!["hub"]),
            ("team/app", vec!["hub"]),
            ("docker.io/library/busybox", vec!["hub"]),
            ("registry.example/x", vec!["reg"]),
            ("registry.example/team/x:1", vec!["team", "reg"]),
            ("registry.example/dir/x:1", vec!["dir", "reg"]),
            ("registry.example/directory:1", vec!["reg"]),
            ("registry.example/v2/x:1", vec!["path", "reg"]),
            ("registry.example:5000/x", vec!["port"]),
            ("a.wild.example/x", vec!["wild"]),
            ("a.b.wild.example/x", vec![]),
            ("other.example/x", vec![]),
        ] {
            assert_eq!(users(&index, image), expected, "{image}");
        }
    }

    /// Keys match the whole name, which has the default registry.
    #[test]
    fn keys_of_docker_hub_match_short_names() {
        let user = |name: &str| Entry { username: name.into(), password: "p".into(), ..Entry::default() };
        let keys = [
            ("docker.io", "d"),
            ("docker.io/team", "t"),
            ("https://index.docker.io/v1/", "hub"),
            ("*.io", "w"),
        ];
        let index = index(keys.map(|(key, name)| (key.to_owned(), user(name))).into()).unwrap();
        for (image, expected) in [
            ("team/app", vec!["t", "d", "w"]),
            ("team/app:1", vec!["t", "d", "w"]),
            ("docker.io/team/app:1", vec!["t", "d", "w"]),
            ("index.docker.io/team/app:1", vec!["t", "d", "w"]),
            ("busybox:1", vec!["d", "w"]),
            ("docker.io/busybox", vec!["d", "w"]),
            ("localhost/team/app", vec![]),
            ("Invalid//name", vec![]),
        ] {
            assert_eq!(users(&index, image), expected, "{image}");
        }
    }

    #[test]
    fn docker_config_is_read_as_by_go() {
        for text in [
            r#"{"auths": {"r.example": {"auth": "dTpw", "email": "a@b", "identitytoken": null}}}"#,
            r#"{"Auths": {"r.example": {"Auth": "dTpw", "username": null}}, "credHelpers": {}}"#,
            r#"{"auths": {"r.example": {"auth": "dT\npw\r\n"}, "s.example": null, "t.example": {}}}"#,
            r#"{"auths": null, "auths": {"r.example": {"username": "u", "password": "p"}}}"#,
        ] {
            let config: DockerConfig = serde_json::from_str(text).unwrap();
            let found = lookup(&index(config.auths).unwrap(), "r.example/x");
            assert_eq!(found.len(), 1, "{text}");
            assert_eq!((found[0].username.as_str(), found[0].password.as_str()), ("u", "p"), "{text}");
        }
        assert!(serde_json::from_str::<DockerConfig>(r#"{"auths": null}"#).unwrap().auths.is_empty());
        assert!(serde_json::from_str::<DockerConfig>("{}").unwrap().auths.is_empty());
        for text in
            ["[]", "null", r#"{"auths": 1}"#, r#"{"auths": {"r": []}}"#, r#"{"auths": {"r": {"auth": 1}}}"#]
        {
            assert!(serde_json::from_str::<DockerConfig>(text).is_err(), "{text}");
        }
    }

    /// A reference implementation: each star matches each length.
    fn matches_plainly(pattern: &[u8], text: &[u8]) -> bool {
        // The prefixes of the text that the pattern so far matches.
        let mut covered = vec![false; text.len() + 1];
        covered[0] = true;
        for want in pattern {
            covered = (0..=text.len())
                .map(|end| match want {
                    b'*' => covered[..=end].contains(&true),
                    b'?' => end > 0 && covered[end - 1],
                    byte => end > 0 && covered[end - 1] && text[end - 1] == *byte,
                })
                .collect();
        }
        covered[text.len()]
    }

    proptest::proptest! {
        #[test]
        fn glob_agrees_with_plain_recursive_matcher(pattern in "[ab*?]{0,12}", text in "[ab]{0,12}") {
            let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
            proptest::prop_assert_eq!(glob(pattern, text), matches_plainly(pattern, text));
        }
    }

    /// One Secret and one image must not use up the stack or much time.
    #[test]
    fn hostile_patterns_need_little_stack_and_time() {
        let image = format!("{}.b/x", "a".repeat(250));
        let user = || Entry { username: "u".into(), password: "p".into(), ..Entry::default() };
        for pattern in
            ["*".repeat(20_000), "*a".repeat(10_000) + "b", "*a".repeat(120) + "b", "*".repeat(200)]
        {
            let found = unblocked({
                let (pattern, image) = (pattern.clone(), image.clone());
                move || {
                    assert!(glob(&[b'*'; 20_000], b"b") && !glob(&b"*a".repeat(120), &[b'b'; 255]));
                    lookup(&index([(format!("{pattern}.b"), user())].into()).unwrap(), &image).len()
                }
            });
            assert_eq!(found, usize::from(pattern == "*".repeat(200)), "{}", pattern.len());
        }
        // A Secret full of the slowest patterns.
        let worst = move |n: usize| (format!("{}{n:04}.b", "*a".repeat(100)), user());
        let found =
            unblocked(move || lookup(&index((0..MAX_ENTRIES).map(worst).collect()).unwrap(), &image).len());
        assert_eq!(found, 0);
    }

    #[test]
    fn too_long_hosts_are_skipped_and_too_many_entries_refused() {
        let user = || Entry { username: "u".into(), password: "p".into(), ..Entry::default() };
        let index_of = |keys: Vec<String>| index(keys.into_iter().map(|key| (key, user())).collect());
        let host = |length: usize| "a.".repeat(length / 2) + &"b".repeat(length % 2);
        for (key, kept) in [
            (format!("https://{}:5000/{}", host(253), "path/".repeat(100)), 1),
            (host(254), 0),
            (format!("{}:5000", host(254)), 0),
        ] {
            assert_eq!(index_of(vec![key]).unwrap().len(), kept);
        }
        let many = |count: usize| index_of((0..count).map(|n| format!("r{n}.example")).collect());
        assert_eq!(many(MAX_ENTRIES).unwrap().len(), MAX_ENTRIES);
        assert_eq!(many(MAX_ENTRIES + 1).err(), Some(TooMany));
        let long = format!("{}/x", host(253).replace('b', "c"));
        assert_eq!(lookup(&index_of(vec![long.clone()]).unwrap(), &long).len(), 1);
        assert!(!key_matches("*.example", &format!("{}.example", "a".repeat(250)), ""));
    }

    #[test]
    fn auth_field_overrides_username_and_broken_file_is_skipped() {
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
