//! Registry credentials from the node's docker configuration files (Go: pkg/credentialprovider).

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::records::{Proof, PullAccount, PullSecret};
use crate::model::image_name::{normalized, repository};
use crate::model::registry_url;
use crate::util::encoding::from_base64;
use crate::util::lock::LockExt;
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

/// A user name and password for a registry. Both may be empty: the pull is then tried without any.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    /// The user's name.
    pub username: String,
    /// The user's password.
    pub password: String,
    /// The Secret of the credential; `None` for a credential of the node or of a service account.
    pub(super) secret: Option<Arc<PullSecret>>,
    /// The service account for which a program has supplied the credential.
    pub(super) account: Option<Arc<PullAccount>>,
}

impl Credential {
    /// What shows that the pod may have an image that was pulled with the credential; `None` for a
    /// credential of the node, whose images all pods may have.
    pub(super) fn proof(&self) -> Option<Proof> {
        let secret = self.secret.as_deref().cloned().map(Proof::Secret);
        secret.or_else(|| self.account.as_deref().cloned().map(Proof::Account))
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Credential({}, ***)", self.username)
    }
}

/// An entry in the format of files and programs.
#[derive(Default)]
pub struct Entry {
    username: String,
    password: String,
    auth: String,
}

/// The entries of a file by their key, which is a registry, perhaps with a scheme and a path.
pub type Entries = BTreeMap<String, Entry>;

/// The formats of files and Secrets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CredentialFormat {
    /// `config.json`: the entries are in its object `auths`.
    Current,
    /// `.dockercfg`: an object of entries.
    Legacy,
}

/// The content of a `config.json`.
struct DockerConfig {
    auths: Entries,
}

/// Reads a file or Secret as Go's decoder does: names of fields in any case of letters, the last one
/// counts, `null` changes nothing, and bytes that are no text are replaced.
///
/// # Errors
/// When it is not JSON, or a part has another type. The message may contain a password.
pub fn entries(bytes: &[u8], format: CredentialFormat) -> serde_json::Result<Entries> {
    let text = String::from_utf8_lossy(bytes);
    match format {
        CredentialFormat::Current => serde_json::from_str::<DockerConfig>(&text).map(|config| config.auths),
        CredentialFormat::Legacy => {
            serde_json::from_str::<Option<Entries>>(&text).map(Option::unwrap_or_default)
        }
    }
}

/// Whether Go's decoder takes `key` for the field `name`, which is in lower case: it folds all
/// letters, of which two are not ASCII.
fn is_field(key: &str, name: &str) -> bool {
    let folded = key.chars().map(|character| match character {
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        character => character.to_ascii_lowercase(),
    });
    folded.eq(name.chars())
}

struct EntryVisitor;

impl<'de> Visitor<'de> for EntryVisitor {
    type Value = Entry;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an entry")
    }

    fn visit_unit<E>(self) -> Result<Entry, E> {
        Ok(Entry::default())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entry, A::Error> {
        let mut entry = Entry::default();
        while let Some(key) = map.next_key::<String>()? {
            let field = match key.as_str() {
                key if is_field(key, "username") => &mut entry.username,
                key if is_field(key, "password") => &mut entry.password,
                key if is_field(key, "auth") => &mut entry.auth,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            if let Some(text) = map.next_value::<Option<String>>()? {
                *field = text;
            }
        }
        Ok(entry)
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(EntryVisitor)
    }
}

struct DockerConfigVisitor;

impl<'de> Visitor<'de> for DockerConfigVisitor {
    type Value = DockerConfig;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object with auths")
    }

    fn visit_unit<E>(self) -> Result<DockerConfig, E> {
        Ok(DockerConfig { auths: Entries::new() })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<DockerConfig, A::Error> {
        let mut auths = Entries::new();
        while let Some(key) = map.next_key::<String>()? {
            if !is_field(&key, "auths") {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            match map.next_value::<Option<Entries>>()? {
                Some(more) => auths.extend(more),
                None => auths.clear(),
            }
        }
        Ok(DockerConfig { auths })
    }
}

impl<'de> Deserialize<'de> for DockerConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DockerConfigVisitor)
    }
}

impl Entry {
    /// The credential of the node. `None`: `auth` is not base64 of user name and password, and there is no
    /// user name.
    ///
    /// DIFFERS: upstream refuses the whole file.
    fn credential(self) -> Option<Credential> {
        let Entry { mut username, mut password, auth } = self;
        if !auth.is_empty() {
            let decoded = decode(auth.trim());
            match decoded.as_deref().and_then(|text| text.split_once(':')) {
                Some((user, secret)) => (username, password) = (user.to_owned(), secret.to_owned()),
                None if username.is_empty() => return None,
                None => {}
            }
        }
        Some(Credential { username, password, secret: None, account: None })
    }
}

/// Credentials by key: host, port and path.
pub type Index = BTreeMap<String, Vec<Credential>>;

/// The entries of the files, which are read again regularly.
pub(super) struct Keyring {
    /// `config.json` files, then legacy `.dockercfg` files; the first that can be read is used.
    files: [Vec<PathBuf>; 2],
    cache: Mutex<Option<(Instant, Index)>>,
}

/// The directories in which files of credentials are searched for, in this order.
pub struct SearchDirectories<'a> {
    /// The agent's `--root-dir`.
    pub root_dir: &'a Path,
    /// The working directory; empty is the current one.
    pub working: &'a Path,
    /// The home directory; empty is the working directory (Go: `os.UserHomeDir` without `HOME`).
    pub home: &'a Path,
    /// The root of the machine's files.
    pub top: &'a Path,
}

impl SearchDirectories<'_> {
    fn keyring(&self) -> Keyring {
        let files = |below: &str, name: &str| {
            let (home, top) = (self.home.join(below), self.top.join(below));
            [self.root_dir, self.working, &home, &top].map(|dir| dir.join(name)).into()
        };
        Keyring { files: [files(".docker", "config.json"), files("", ".dockercfg")], cache: Mutex::new(None) }
    }

    /// The entries of the first file that can be used; none without such a file.
    #[must_use]
    pub fn read(&self) -> Index {
        self.keyring().read()
    }
}

impl Keyring {
    pub(super) fn new(root_dir: &Path) -> Keyring {
        let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
        SearchDirectories { root_dir, working: Path::new(""), home: &home, top: Path::new("/") }.keyring()
    }

    /// Credentials that match `image`, the most specific first.
    pub(super) fn for_image(&self, image: &str, now: Instant) -> Vec<Credential> {
        let cached = || self.cache.locked();
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
        for (format, files) in
            [CredentialFormat::Current, CredentialFormat::Legacy].into_iter().zip(&self.files)
        {
            for file in files {
                let bytes = match untrusted::read_own(file, FILE_LIMIT) {
                    Ok(bytes) => bytes,
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
                match entries(&bytes, format) {
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

/// There are more than `MAX_ENTRIES` of them.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("it names more than {MAX_ENTRIES} registries")]
pub struct TooMany;

/// Entries by key, without those that have no credentials and those whose host no registry can have.
///
/// # Errors
/// When there are more than `MAX_ENTRIES` entries.
pub fn index(entries: Entries) -> Result<Index, TooMany> {
    if entries.len() > MAX_ENTRIES {
        return Err(TooMany);
    }
    let mut index = Index::new();
    for (key, entry) in entries {
        let Some((credential, key)) = entry.credential().zip(normal_key(&key)) else { continue };
        if split_port(domain_of(&key).0).0.len() <= MAX_HOST {
            index.entry(key).or_default().push(credential);
        }
    }
    Ok(index)
}

/// The host with its port, and the path.
fn domain_of(key: &str) -> (&str, &str) {
    key.split_once('/').unwrap_or((key, ""))
}

/// The host and its port, which is empty if there is none. The address of IPv6 keeps its brackets.
fn split_port(domain: &str) -> (&str, &str) {
    match domain.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port),
        _ => (domain, ""),
    }
}

/// A key without scheme and without the API version that docker puts behind the host (Go:
/// `BasicDockerKeyring.Add`). A slash at its end stays: the path is then that of a directory. `None`: it
/// is no URL.
fn normal_key(key: &str) -> Option<String> {
    let bare = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://"));
    let (host, path) = registry_url::split(bare.unwrap_or(key))?;
    let version = |version| path.strip_prefix(version).filter(|rest| rest.starts_with('/'));
    Some(match version("/v1").or_else(|| version("/v2")).unwrap_or(&path) {
        "/" => host.to_owned(),
        path => format!("{host}{path}"),
    })
}

/// The whole name of an image without tag and digest, such as `docker.io/library/busybox`. `None`: it is
/// no image name.
pub(super) fn full_repository(image: &str) -> Option<String> {
    Some(repository(&normalized(image).ok()?).to_owned())
}

/// The credentials that match `image`, the most specific first (Go: `BasicDockerKeyring.Lookup`, for the
/// normalised repository).
///
/// DIFFERS: upstream also uses the key of Docker Hub for `localhost/…` if no other key matches, and no
/// key of a registry that is an IPv6 address without a port.
pub fn lookup(index: &Index, image: &str) -> Vec<Credential> {
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
    // The path may contain what was escaped in the file (Go: `URLsMatchStr` parses it again).
    let Some((key_domain, key_path)) = registry_url::split(key) else { return false };
    let key_path = key_path.strip_prefix('/').unwrap_or(&key_path);
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
    let (mut position, mut seen) = (0, 0);
    // The position after the last star, and the length of the text before and in it.
    let mut star: Option<(usize, usize)> = None;
    while let Some(got) = text.get(seen) {
        match pattern.get(position) {
            Some(b'*') => {
                position += 1;
                star = Some((position, seen));
            }
            Some(want) if want == got || *want == b'?' => {
                position += 1;
                seen += 1;
            }
            _ => {
                let Some((behind, taken)) = star else { return false };
                star = Some((behind, taken + 1));
                (position, seen) = (behind, taken + 1);
            }
        }
    }
    pattern.iter().skip(position).all(|rest| *rest == b'*')
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
            // The last field counts, in any case; entries of a repeated object are added.
            r#"{"auths": {"r.example": {"auth": "eDp5", "AUTH": "dTpw"}}, "Auth\u017f": {"s.example": {}}}"#,
            r#"{"auths": {"r.example": {"username": "x", "Username": "u", "password": "p", "Password": null}}}"#,
            // Numbers in fields that are not read.
            r#"{"auths": {"r.example": {"auth": "dTpw", "n": 1e999}}, "n": 1e999}"#,
        ] {
            let found = lookup(
                &index(entries(text.as_bytes(), CredentialFormat::Current).unwrap()).unwrap(),
                "r.example/x",
            );
            assert_eq!(found.len(), 1, "{text}");
            assert_eq!((found[0].username.as_str(), found[0].password.as_str()), ("u", "p"), "{text}");
        }
        for text in [r#"{"auths": null}"#, "{}", "null", r#"{"auths": {"r.example": {}}, "auths": null}"#] {
            assert!(entries(text.as_bytes(), CredentialFormat::Current).unwrap().is_empty(), "{text}");
        }
        assert!(entries(b"null", CredentialFormat::Legacy).unwrap().is_empty());
        for text in ["[]", r#"{"auths": 1}"#, r#"{"auths": {"r": []}}"#, r#"{"auths": {"r": {"auth": 1}}}"#] {
            assert!(entries(text.as_bytes(), CredentialFormat::Current).is_err(), "{text}");
        }
        // Bytes that are no text.
        let latin = b"{\"r.example\": {\"auth\": \"dTpw\", \"email\": \"f\xfcr\"}}";
        assert_eq!(entries(latin, CredentialFormat::Legacy).unwrap().len(), 1);
    }

    /// Such entries are written by a docker that keeps credentials elsewhere: the image may be public.
    #[test]
    fn entry_without_credentials_means_a_pull_without_them() {
        let text = br#"{"auths": {"a.example": {}, "b.example": null, "c.example": {"identitytoken": "t"},
            "d.example": {"auth": "Om=="}, "e.example": {"auth": "!"}, "f.example": {"auth": "!", "username": "u"}}}"#;
        let index = index(entries(text, CredentialFormat::Current).unwrap()).unwrap();
        for (image, expected) in [
            ("a.example/x", vec![""]),
            ("b.example/x", vec![""]),
            ("c.example/x", vec![""]),
            ("d.example/x", vec![""]),
            ("e.example/x", vec![]),
            ("f.example/x", vec!["u"]),
        ] {
            assert_eq!(users(&index, image), expected, "{image}");
        }
    }

    #[test]
    fn keys_are_read_as_urls() {
        for (key, image, matches) in [
            ("https://r.example:/team?a=b#c", "r.example/team/x", true),
            ("http://jane:a%20b@r.example", "r.example/x", true),
            ("ja ne@r.example", "r.example/x", false),
            ("r.example/te%61m", "r.example/team/x", true),
            ("r.example/te%6", "r.example/team/x", false),
            ("r.example/%3Fa", "r.example/x", true),
            ("r.example#%", "r.example/x", false),
            ("r.example?\u{1}", "r.example/x", false),
            ("oci://r.example", "r.example/x", false),
            ("[fd00::1]:5000", "[fd00::1]:5000/x", true),
            ("[fd00::1]", "[fd00::1]/x", true),
            ("r.example//team", "r.example/team/x", false),
        ] {
            let entry = Entry { username: "u".into(), ..Entry::default() };
            let index = index([(key.to_owned(), entry)].into()).unwrap();
            assert_eq!(!lookup(&index, image).is_empty(), matches, "{key}");
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
        for (key, indexed) in [
            (format!("https://{}:5000/{}", host(253), "path/".repeat(100)), 1),
            (host(254), 0),
            (format!("{}:5000", host(254)), 0),
        ] {
            assert_eq!(index_of(vec![key]).unwrap().len(), indexed);
        }
        let many = |count: usize| index_of((0..count).map(|n| format!("r{n}.example")).collect());
        assert_eq!(many(MAX_ENTRIES).unwrap().len(), MAX_ENTRIES);
        assert_eq!(many(MAX_ENTRIES + 1).err(), Some(TooMany));
        let long = format!("{}/x", host(253).replace('b', "c"));
        assert_eq!(lookup(&index_of(vec![long.clone()]).unwrap(), &long).len(), 1);
        assert!(!key_matches("*.example", &format!("{}.example", "a".repeat(250)), ""));
    }

    #[test]
    fn without_a_home_the_working_directory_takes_its_place() {
        let files = |home: &str| {
            let root_dir = Path::new("/r");
            SearchDirectories { root_dir, working: Path::new(""), home: Path::new(home), top: Path::new("/") }
                .keyring()
                .files
                .map(|files| files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>())
        };
        let [current, legacy] = files("");
        assert_eq!(current, ["/r/config.json", "config.json", ".docker/config.json", "/.docker/config.json"]);
        assert_eq!(legacy, ["/r/.dockercfg", ".dockercfg", ".dockercfg", "/.dockercfg"]);
        let [current, legacy] = files("/h");
        assert_eq!([&current[2], &legacy[2]], ["/h/.docker/config.json", "/h/.dockercfg"]);
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
        let expected = Credential { username: "u".into(), password: "p".into(), secret: None, account: None };
        assert_eq!(found, [expected]);
        assert_eq!(keyring("{broken").first().map(|c| c.username.as_str()), Some("old"));
        assert_eq!(format!("{found:?}"), "[Credential(u, ***)]");
    }
}
