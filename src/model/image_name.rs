//! Image names: which are valid, the default tag and registry (Go: distribution/reference).

/// The longest repository name, registry included.
const NAME_LIMIT: usize = 255;
const TAG_LIMIT: usize = 128;
/// The registry of names without one.
const DOCKER_HUB: &str = "docker.io";

/// Why a text is no image name. The messages are upstream's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// An image id instead of a name.
    #[error("invalid repository name ({0}), cannot specify 64-byte hexadecimal strings")]
    Identifier(String),
    /// Capital letters in the repository.
    #[error("invalid reference format: repository name ({0}) must be lowercase")]
    Uppercase(String),
    /// Another violation of the grammar.
    #[error("invalid reference format")]
    Format,
    /// The name is too long.
    #[error("repository name must not be more than {NAME_LIMIT} characters")]
    TooLong,
    /// A digest by an unknown algorithm.
    #[error("unsupported digest algorithm")]
    DigestAlgorithm,
    /// A digest of the wrong length.
    #[error("invalid checksum digest length")]
    DigestLength,
    /// A digest with other letters than lower-case hexadecimal ones.
    #[error("invalid checksum digest format")]
    DigestFormat,
}

/// `image` with `:latest` if it names neither a tag nor a digest. Nothing else changes.
///
/// # Errors
/// When `image` is no image name.
pub fn with_default_tag(image: &str) -> Result<String, NameError> {
    if image.len() == 64 && image.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(NameError::Identifier(image.to_owned()));
    }
    let (domain, remainder) = split_domain(image);
    let remote = remainder.split_once(':').map_or(remainder, |(remote, _)| remote);
    if remote.chars().any(char::is_uppercase) {
        // Upstream puts its default namespace in front of a name without one.
        let namespace = if domain.is_none() && !remainder.contains('/') { "library/" } else { "" };
        return Err(NameError::Uppercase(format!("{namespace}{remote}")));
    }
    let (name_and_tag, digest) = match remainder.split_once('@') {
        Some((name, digest)) => (name, Some(digest)),
        None => (remainder, None),
    };
    let (path, tag) = match name_and_tag.split_once(':') {
        Some((path, tag)) => (path, Some(tag)),
        None => (name_and_tag, None),
    };
    if !domain.is_none_or(is_domain) || !path.split('/').all(is_path_component) || !tag.is_none_or(is_tag) {
        return Err(NameError::Format);
    }
    if let Some(digest) = digest {
        check_digest(digest)?;
    }
    if domain.map_or(0, |domain| domain.len() + 1) + path.len() > NAME_LIMIT {
        return Err(NameError::TooLong);
    }
    Ok(if tag.is_none() && digest.is_none() { format!("{image}:latest") } else { image.to_owned() })
}

/// The name under which runtimes store an image: with registry and tag, for example
/// `docker.io/library/nginx:latest` for `nginx`. A name with a digest keeps it, and gets no tag.
///
/// # Errors
/// When `image` is no image name.
pub fn normalized(image: &str) -> Result<String, NameError> {
    let tagged = with_default_tag(image)?;
    Ok(match split_domain(&tagged) {
        (Some(domain), rest) if domain != DOCKER_HUB && domain != "index.docker.io" => {
            format!("{domain}/{rest}")
        }
        (_, rest) if rest.contains('/') => format!("{DOCKER_HUB}/{rest}"),
        (_, rest) => format!("{DOCKER_HUB}/library/{rest}"),
    })
}

/// The name under which runtimes list an image: as [`normalized`], but with either a tag or a digest.
/// `None`: it is no name, but for example an id.
#[must_use]
pub fn listed_name(image: &str) -> Option<String> {
    let name = normalized(image).ok()?;
    match name.split_once('@') {
        Some((_, digest)) => Some(format!("{}@{digest}", repository(&name))),
        None => Some(name),
    }
}

/// The image without tag and digest.
#[must_use]
pub fn repository(image: &str) -> &str {
    let name = image.split_once('@').map_or(image, |(name, _)| name);
    match name.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => repository,
        _ => name,
    }
}

/// The registry's host and port, if the name begins with one, and the rest.
#[must_use]
pub fn split_domain(image: &str) -> (Option<&str>, &str) {
    match image.split_once('/') {
        Some((first, rest))
            if first == "localhost"
                || first.contains(['.', ':'])
                || first.chars().any(char::is_uppercase) =>
        {
            (Some(first), rest)
        }
        _ => (None, image),
    }
}

fn is_domain(domain: &str) -> bool {
    let (host, port) = match domain.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (domain, None),
    };
    let component = |part: &str| {
        let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
        edge(part.as_bytes().first())
            && edge(part.as_bytes().last())
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    let bracketed = |host: &str| {
        host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).is_some_and(|address| {
            !address.is_empty() && address.bytes().all(|b| b.is_ascii_hexdigit() || b == b':')
        })
    };
    let digits = |port: &str| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    (host.split('.').all(component) || bracketed(host)) && port.is_none_or(digits)
}

/// Lower-case letters and digits with `.`, `_`, `__` or any number of `-` between them.
fn is_path_component(component: &str) -> bool {
    let is_word = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = component.as_bytes();
    if !bytes.first().is_some_and(is_word) || !bytes.last().is_some_and(is_word) {
        return false;
    }
    bytes
        .split(is_word)
        .filter(|separator| !separator.is_empty())
        .all(|separator| matches!(separator, b"." | b"_" | b"__") || separator.iter().all(|b| *b == b'-'))
}

fn is_tag(tag: &str) -> bool {
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    tag.len() <= TAG_LIMIT
        && tag.bytes().next().is_some_and(is_word)
        && tag.bytes().all(|b| is_word(b) || b == b'.' || b == b'-')
}

fn check_digest(digest: &str) -> Result<(), NameError> {
    let (algorithm, hex) = digest.split_once(':').ok_or(NameError::Format)?;
    let starts_with_letter = |part: &str| {
        part.bytes().next().is_some_and(|b| b.is_ascii_alphabetic())
            && part.bytes().all(|b| b.is_ascii_alphanumeric())
    };
    let well_formed = algorithm.split(['-', '_', '+', '.']).all(starts_with_letter)
        && hex.len() >= 32
        && hex.bytes().all(|b| b.is_ascii_hexdigit());
    let length = match algorithm {
        _ if !well_formed => return Err(NameError::Format),
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return Err(NameError::DigestAlgorithm),
    };
    if hex.len() != length {
        return Err(NameError::DigestLength);
    }
    if hex.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err(NameError::DigestFormat);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_names_get_a_tag_only_if_they_have_none() {
        let digest = format!("sha256:{}", "a".repeat(64));
        for image in [
            "busybox",
            "library/busybox",
            "localhost/busybox",
            "registry.example/a/b_c/d__e/f---g.h",
            "registry.example:5000/x",
            "UPPER/case",
            "[fd00::1]:5000/x",
            "a:5000/x",
        ] {
            assert_eq!(with_default_tag(image), Ok(format!("{image}:latest")), "{image}");
            for suffix in
                [":1".to_owned(), ":V_1.2-x".to_owned(), format!("@{digest}"), format!(":1@{digest}")]
            {
                let image = format!("{image}{suffix}");
                assert_eq!(with_default_tag(&image).as_deref(), Ok(image.as_str()));
            }
        }
    }

    #[test]
    fn normalized_name_has_registry_and_tag() {
        for (image, expected) in [
            ("nginx", "docker.io/library/nginx:latest"),
            ("nginx:1", "docker.io/library/nginx:1"),
            ("team/nginx:1", "docker.io/team/nginx:1"),
            ("docker.io/nginx:1", "docker.io/library/nginx:1"),
            ("index.docker.io/library/nginx", "docker.io/library/nginx:latest"),
            ("localhost/pause:1", "localhost/pause:1"),
            ("registry.example:5000/a/b", "registry.example:5000/a/b:latest"),
        ] {
            assert_eq!(normalized(image).as_deref(), Ok(expected));
            assert_eq!(normalized(expected).as_deref(), Ok(expected));
        }
        let digest = format!("a@sha256:{}", "a".repeat(64));
        assert_eq!(normalized(&digest), Ok(format!("docker.io/library/{digest}")));
        assert_eq!(normalized("a//b"), Err(NameError::Format));
    }

    #[test]
    fn listed_name_has_a_registry_and_either_tag_or_digest() {
        let digest = format!("sha256:{}", "b".repeat(64));
        for (image, expected) in [
            ("app".to_owned(), "docker.io/library/app:latest".to_owned()),
            (format!("r.example/app:1@{digest}"), format!("r.example/app@{digest}")),
            (format!("app@{digest}"), format!("docker.io/library/app@{digest}")),
        ] {
            assert_eq!(listed_name(&image), Some(expected));
        }
        assert_eq!(listed_name(&"a".repeat(64)), None);
    }

    #[test]
    fn invalid_names_are_refused_with_upstreams_reason() {
        let check = |image: &str, expected| assert_eq!(with_default_tag(image), Err(expected), "{image}");
        check("UPPER/case:!", NameError::Format);
        check("a/UPPER:1", NameError::Uppercase("a/UPPER".into()));
        check("Busybox", NameError::Uppercase("library/Busybox".into()));
        check(&"a".repeat(64), NameError::Identifier("a".repeat(64)));
        for image in [
            "",
            "/",
            "a//b",
            "a/",
            ":1",
            "a:",
            "a b",
            "-a",
            "a-",
            "a._b",
            "a___b",
            "a..b",
            "x.y/",
            "-x.y/a",
            "a:1:2",
            "a@",
            "a@sha256",
            "a@sha256:12",
            "ü",
        ] {
            check(image, NameError::Format);
        }
        check(&format!("a:{}", "1".repeat(129)), NameError::Format);
        check(&"b".repeat(256), NameError::TooLong);
        check(&format!("a@md5:{}", "a".repeat(32)), NameError::DigestAlgorithm);
        check(&format!("a@sha256:{}", "a".repeat(63)), NameError::DigestLength);
        check(&format!("a@sha256:{}", "A".repeat(64)), NameError::DigestFormat);
    }

    proptest::proptest! {
        #[test]
        fn random_name_is_tagged_once_without_panic(image in "\\PC{0,80}") {
            if let Ok(tagged) = with_default_tag(&image) {
                proptest::prop_assert!(tagged.starts_with(&image));
                proptest::prop_assert_eq!(with_default_tag(&tagged), Ok(tagged));
            }
            if let Ok(name) = normalized(&image) {
                proptest::prop_assert_eq!(normalized(&name), Ok(name));
            }
            let _ = repository(&image);
        }
    }

    #[test]
    fn repository_is_name_without_tag_and_digest() {
        for (image, expected) in
            [("a", "a"), ("a:1", "a"), ("r:5000/a", "r:5000/a"), ("r:5000/a:1@sha256:00", "r:5000/a")]
        {
            assert_eq!(repository(image), expected);
        }
    }
}
