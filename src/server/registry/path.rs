//! Which document a path of the registry names (pure).
//!
//! The runtimes name the registry of an image in two forms:
//! - containerd (`override_path = true` in hosts.toml): `<repository>/manifests/<ref>?ns=<registry>`;
//! - CRI-O (a mirror in registries.conf): `<registry>/<repository>/manifests/<ref>`. A path has no
//!   colon there, so `__5000` is the port 5000.

use super::fault::Fault;

/// The longest name of a registry or a repository, as in the specification.
const NAME_BYTES: usize = 255;

/// The longest tag.
const TAG_BYTES: usize = 128;

/// Other names of docker.io.
const DOCKER: [&str; 3] = ["docker.io", "index.docker.io", "registry-1.docker.io"];

/// The resource of a request (RFC 9110, section 3.1). `repository` begins with the registry:
/// `docker.io/library/nginx`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Resource<'a> {
    /// Whether there is such an API.
    Api,
    Manifest {
        repository: String,
        /// A tag or a digest.
        reference: &'a str,
    },
    Blob {
        digest: &'a str,
    },
    Tags {
        repository: String,
    },
}

/// The token in a path, and what follows it; both may be empty. `None`: not a path of this API.
pub(super) fn split(path: &str) -> Option<(&str, &str)> {
    let below = path.strip_prefix("/v2")?;
    if below.is_empty() {
        return Some(("", ""));
    }
    let below = below.strip_prefix('/')?;
    Some(below.split_once('/').unwrap_or((below, "")))
}

/// The name of the repository as the client wrote it.
pub(super) fn name(rest: &str) -> &str {
    let parts = rest.rsplit_once('/').and_then(|(before, _)| before.rsplit_once('/'));
    parts.map_or("", |(name, _)| name)
}

/// The resource that is named by the path after the token. `registry`: the query parameter `ns`.
pub(super) fn resource<'a>(rest: &'a str, registry: Option<&str>) -> Result<Resource<'a>, Fault> {
    if rest.is_empty() {
        return Ok(Resource::Api);
    }
    let parts = rest.rsplit_once('/').and_then(|(before, last)| {
        let (name, kind) = before.rsplit_once('/')?;
        Some((name, kind, last))
    });
    let Some((name, kind @ ("manifests" | "blobs" | "tags"), last)) = parts else {
        return Err(Fault::NO_PATH);
    };
    let repository = repository(name, registry)
        .ok_or_else(|| Fault::new(400, "NAME_INVALID", "this is no name of a repository"))?;
    match kind {
        "manifests" if is_tag(last) || is_digest(last) => {
            Ok(Resource::Manifest { repository, reference: last })
        }
        "manifests" => Err(Fault::new(404, "MANIFEST_UNKNOWN", "this is neither a tag nor a digest")),
        "blobs" if is_digest(last) => Ok(Resource::Blob { digest: last }),
        "blobs" => Err(Fault::new(400, "DIGEST_INVALID", "this is no digest of sha256")),
        _ if last == "list" => Ok(Resource::Tags { repository }),
        _ => Err(Fault::NO_PATH),
    }
}

/// Registry and repository in the form of image names.
fn repository(name: &str, registry: Option<&str>) -> Option<String> {
    let (host, path) = match registry.filter(|host| !host.is_empty()) {
        Some(host) => (host.to_owned(), name),
        None => {
            let (host, path) = name.split_once('/')?;
            (host_of_path(host)?, path)
        }
    };
    let is_host = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte);
    let fits = host.len() <= NAME_BYTES && host.bytes().all(is_host);
    if !fits || !is_path(path) {
        return None;
    }
    Some(match DOCKER.contains(&host.as_str()) {
        true if path.contains('/') => format!("docker.io/{path}"),
        true => format!("docker.io/library/{path}"),
        false => format!("{host}/{path}"),
    })
}

/// The registry that a first element of a path names; `None`: it is a part of a repository.
fn host_of_path(element: &str) -> Option<String> {
    let port = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if let Some((host, digits)) =
        element.rsplit_once("__").filter(|(host, digits)| !host.is_empty() && port(digits))
    {
        return Some(format!("{host}:{digits}"));
    }
    (element == "localhost" || element.contains(['.', ':'])).then(|| element.to_owned())
}

fn is_path(path: &str) -> bool {
    let good = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-' | b'/');
    path.len() <= NAME_BYTES && path.bytes().all(good) && path.split('/').all(|element| !element.is_empty())
}

fn is_tag(text: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=TAG_BYTES).contains(&text.len()) && text.bytes().all(good) && !text.starts_with(['.', '-'])
}

/// Whether this is `sha256:` and 64 hexadecimal digits.
fn is_digest(text: &str) -> bool {
    let hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    text.strip_prefix("sha256:").is_some_and(|digits| digits.len() == 64 && digits.bytes().all(hex))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository_of(path: &str, ns: Option<&str>) -> Option<String> {
        match resource(path, ns) {
            Ok(Resource::Manifest { repository, .. } | Resource::Tags { repository }) => Some(repository),
            _ => None,
        }
    }

    #[test]
    fn both_runtimes_name_the_same_repository() {
        for (name, ns, expected) in [
            ("library/nginx", Some("docker.io"), Some("docker.io/library/nginx")),
            ("nginx", Some("docker.io"), Some("docker.io/library/nginx")),
            ("nginx", Some("registry-1.docker.io"), Some("docker.io/library/nginx")),
            ("docker.io/library/nginx", None, Some("docker.io/library/nginx")),
            ("docker.io/nginx", None, Some("docker.io/library/nginx")),
            ("a/b/c", Some("registry.example:5000"), Some("registry.example:5000/a/b/c")),
            ("registry.example__5000/a/b/c", None, Some("registry.example:5000/a/b/c")),
            ("registry.example:5000/a", None, Some("registry.example:5000/a")),
            ("pause", Some("localhost"), Some("localhost/pause")),
            ("localhost/pause", None, Some("localhost/pause")),
            ("localhost__5000/pause", None, Some("localhost:5000/pause")),
            ("pause", Some("localhost:5000"), Some("localhost:5000/pause")),
            ("pause", Some("[::1]:5000"), Some("[::1]:5000/pause")),
            // A repository whose first element looks like a registry.
            ("a.b/c", Some("ghcr.io"), Some("ghcr.io/a.b/c")),
            ("library/nginx", None, None),
            ("nginx", None, None),
            ("nginx", Some(""), None),
            ("nginx", Some("a b"), None),
            ("nginx", Some("a/b"), None),
            ("__5000/a", None, None),
            ("docker.io/a//b", None, None),
            ("docker.io/A", None, None),
            ("docker.io/", None, None),
        ] {
            let found = repository_of(&format!("{name}/manifests/1"), ns);
            assert_eq!(found.as_deref(), expected, "{name} {ns:?}");
            let found = repository_of(&format!("{name}/tags/list"), ns);
            assert_eq!(found.as_deref(), expected, "{name} {ns:?}");
        }
        // Elements that are also words of the API.
        let blobs = repository_of("manifests/blobs/tags/manifests/1", Some("quay.io"));
        assert_eq!(blobs.as_deref(), Some("quay.io/manifests/blobs/tags"));
    }

    #[test]
    fn paths_are_split_at_the_token() {
        for (path, parts) in [
            ("/v2", Some(("", ""))),
            ("/v2/", Some(("", ""))),
            ("/v2/t", Some(("t", ""))),
            ("/v2/t/", Some(("t", ""))),
            ("/v2/t/a/b", Some(("t", "a/b"))),
            ("/v2x/t", None),
            ("/", None),
            ("/v1/t/a", None),
        ] {
            assert_eq!(split(path), parts, "{path}");
        }
    }

    #[test]
    fn malformed_references_and_digests_are_refused() {
        let digest = format!("sha256:{}", "a".repeat(64));
        fn status(path: &str) -> Result<Resource<'_>, (u16, &'static str)> {
            resource(path, Some("quay.io")).map_err(|fault| (fault.status, fault.code))
        }
        assert_eq!(status(&format!("a/blobs/{digest}")), Ok(Resource::Blob { digest: &digest }));
        assert_eq!(
            status(&format!("a/manifests/{digest}")),
            Ok(Resource::Manifest { repository: "quay.io/a".into(), reference: &digest })
        );
        for digest in ["sha256:", "sha256:aa", "sha512:aa", "latest", &digest.to_uppercase()] {
            assert_eq!(status(&format!("a/blobs/{digest}")), Err((400, "DIGEST_INVALID")), "{digest}");
        }
        for reference in ["", ".a", "a b", "sha256:aa", &"a".repeat(129)] {
            let path = format!("a/manifests/{reference}");
            assert_eq!(status(&path), Err((404, "MANIFEST_UNKNOWN")), "{reference}");
        }
        for path in ["a", "a/b", "a/uploads/x", "a/tags/other", "a/referrers/x"] {
            assert_eq!(status(path), Err((404, "NAME_UNKNOWN")), "{path}");
        }
        assert_eq!(status("manifests/1"), Err((404, "NAME_UNKNOWN")));
    }

    proptest::proptest! {
        #[test]
        fn random_paths_cause_no_panic(path in "\\PC{0,60}", ns in proptest::option::of("\\PC{0,10}")) {
            if let Some((_, rest)) = split(&path) {
                let _ = (resource(rest, ns.as_deref()), name(rest));
            }
        }
    }
}
