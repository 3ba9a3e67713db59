//! The rule for `tracing.endpoint` (Go: component-base/tracing/api/v1, `validateEndpoint`).

/// What is wrong with an endpoint; `None`: it is valid.
pub(super) fn endpoint_problem(endpoint: &str) -> Option<String> {
    let url = match endpoint.contains("//") {
        true => endpoint.to_owned(),
        false => format!("dns://{endpoint}"),
    };
    if url.contains(|letter: char| letter.is_ascii_control()) {
        return Some(format!("{endpoint:?} has a control character"));
    }
    let (scheme, rest) = split_scheme(&url);
    if !matches!(scheme.as_str(), "dns" | "unix" | "unix-abstract") {
        return Some(format!(
            "{endpoint:?} has the unsupported scheme {scheme:?}: use none, dns, unix or unix-abstract"
        ));
    }
    let authority = rest.strip_prefix("//")?.split(['/', '?', '#']).next()?;
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let (name, port) = match host.strip_prefix('[') {
        Some(address) => match address.split_once(']') {
            Some((address, port)) => (address, port),
            None => return Some(format!("{endpoint:?} has no ] after the address")),
        },
        None => host.rfind(':').map_or((host, ""), |colon| host.split_at(colon)),
    };
    if !port.is_empty()
        && !port.strip_prefix(':').is_some_and(|port| port.bytes().all(|b| b.is_ascii_digit()))
    {
        return Some(format!("{endpoint:?} has no valid port"));
    }
    let is_invalid = |letter: char| matches!(letter, ' ' | '\\' | '^' | '`' | '{' | '|' | '}');
    name.contains(is_invalid).then(|| format!("{endpoint:?} has an invalid character in the host"))
}

/// The scheme in lower case, and what follows its colon; without a scheme it is empty.
fn split_scheme(url: &str) -> (String, &str) {
    let Some((scheme, rest)) = url.split_once(':') else { return (String::new(), url) };
    let begins = scheme.starts_with(|letter: char| letter.is_ascii_alphabetic());
    let is_scheme = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
    match begins && scheme.bytes().all(is_scheme) {
        true => (scheme.to_ascii_lowercase(), rest),
        false => (String::new(), url),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_valid_as_upstream() {
        for endpoint in [
            "localhost:4317",
            "collector",
            "[::1]:4317",
            "dns://8.8.8.8/collector:1",
            "dns:///collector:1",
            "DNS:///collector:1",
            "unix:///run/collector.sock",
            "unix:///run/a b.sock",
            "unix-abstract://name",
            "",
        ] {
            assert_eq!(endpoint_problem(endpoint), None, "{endpoint:?}");
        }
        for (endpoint, part) in [
            ("http://localhost:4317", "unsupported scheme \"http\""),
            ("//localhost:4317", "unsupported scheme \"\""),
            ("1x://localhost", "unsupported scheme \"\""),
            ("localhost:port", "no valid port"),
            ("unix:run.sock", "no valid port"),
            ("[::1:4317", "no ] after"),
            ("a b:1", "invalid character"),
            ("a\n:1", "control character"),
        ] {
            let problem = endpoint_problem(endpoint).unwrap_or_default();
            assert!(problem.contains(part), "{endpoint:?}: {problem:?}");
        }
    }
}
