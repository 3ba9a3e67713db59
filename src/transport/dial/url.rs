//! The URLs of requests and redirects (Go: net/url, the parts that are needed here).

use std::fmt;

use super::{Scheme, join_host_port};
use crate::util::encoding::{base64, escape_percent, from_percent};

/// An absolute http or https URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::transport) struct Url {
    pub(in crate::transport) scheme: Scheme,
    /// The host, without brackets.
    pub(in crate::transport) host: String,
    /// The port as written; `None` for the scheme's default.
    port: Option<u16>,
    /// Path and query, as the request line has them.
    pub(in crate::transport) target: String,
}

impl Url {
    /// The URL of a manifest's action.
    pub(in crate::transport) fn new(scheme: Scheme, host: &str, port: u16, path: &str) -> Url {
        Url { scheme, host: host.to_owned(), port: Some(port), target: target(path) }
    }

    /// An absolute URL, and the value of `Authorization` for the user name and password in it (RFC
    /// 7617). `None` if it is no http URL with a host.
    pub(in crate::transport) fn parse(text: &str) -> Option<(Url, Option<String>)> {
        let (_, rest) = scheme_of(text.trim_end())?;
        let rest = rest.strip_prefix("//")?;
        let url = Url::new(Scheme::Http, "", 80, "/").redirect(text)?;
        let Some(user) = UrlParts::split(rest)?.user else { return Some((url, None)) };
        let (name, password) = user.split_once(':').unwrap_or((user, ""));
        let text = [from_percent(name)?, from_percent(password)?].join(&b':');
        Some((url, Some(format!("Basic {}", base64(&text)))))
    }

    pub(in crate::transport) fn port(&self) -> u16 {
        self.port.unwrap_or(match self.scheme {
            Scheme::Http => 80,
            Scheme::Https => 443,
        })
    }

    /// Host and port in the form of the `Host` header.
    pub(in crate::transport) fn authority(&self) -> String {
        match self.port {
            Some(port) => join_host_port(&self.host, port),
            None if self.host.contains(':') => format!("[{}]", self.host),
            None => self.host.clone(),
        }
    }

    /// The target of a redirect to `location`; `None` if it is no http URL.
    pub(in crate::transport) fn redirect(&self, location: &str) -> Option<Url> {
        let location = location.trim();
        if location.bytes().any(|byte| byte < b' ' || byte == 0x7f) {
            return None;
        }
        let (scheme, rest) = match scheme_of(location) {
            Some((name, rest)) if name.eq_ignore_ascii_case("http") => (Scheme::Http, rest),
            Some((name, rest)) if name.eq_ignore_ascii_case("https") => (Scheme::Https, rest),
            Some(_) => return None,
            None => (self.scheme, location),
        };
        if let Some(rest) = rest.strip_prefix("//") {
            let UrlParts { host, port, rest, .. } = UrlParts::split(rest)?;
            let (host, target) = (host.to_owned(), target(&without_dots(rest)));
            return (!host.is_empty()).then_some(Url { scheme, host, port, target });
        }
        let (path, _) = self.target.split_once('?').unwrap_or((&self.target, ""));
        let merged = match rest.chars().next() {
            Some('/') => rest.to_owned(),
            Some('?') => format!("{path}{rest}"),
            None | Some('#') => self.target.clone(),
            Some(_) => {
                let directory = path.rfind('/').and_then(|index| path.get(..=index)).unwrap_or("/");
                format!("{directory}{rest}")
            }
        };
        Some(Url { target: target(&without_dots(&merged)), ..self.clone() })
    }
}

impl fmt::Display for Url {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.scheme {
            Scheme::Http => "http",
            Scheme::Https => "https",
        };
        write!(out, "{scheme}://{}{}", self.authority(), self.target)
    }
}

/// Whether a redirect names a scheme, and therefore also a host.
pub(in crate::transport) fn is_absolute(location: &str) -> bool {
    scheme_of(location.trim()).is_some()
}

fn scheme_of(location: &str) -> Option<(&str, &str)> {
    let (name, rest) = location.split_once(':')?;
    let valid = name.starts_with(|first: char| first.is_ascii_alphabetic())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    valid.then_some((name, rest))
}

/// What follows `scheme://` in a URL, as written (RFC 3986, section 3.2): `[user@]host[:port]`, and the
/// rest. All URLs of this program are split by this rule; its users decide which hosts and which rest
/// they accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UrlParts<'a> {
    /// What is before the last `@`.
    pub user: Option<&'a str>,
    /// The host, without brackets. It may be empty.
    pub host: &'a str,
    /// Whether the host is in brackets, as IPv6 addresses are.
    pub has_brackets: bool,
    /// The port; `None` if there is none, or it is empty.
    pub port: Option<u16>,
    /// Empty, or from the first `/`, `?` or `#` on.
    pub rest: &'a str,
}

impl UrlParts<'_> {
    /// `None` if a bracket is missing, or the port is no number of 16 bits.
    #[must_use]
    pub fn split(text: &str) -> Option<UrlParts<'_>> {
        let (authority, rest) = text.split_at(text.find(['/', '?', '#']).unwrap_or(text.len()));
        let (user, authority) = match authority.rsplit_once('@') {
            Some((user, authority)) => (Some(user), authority),
            None => (None, authority),
        };
        let (host, port, has_brackets) = match authority.strip_prefix('[') {
            Some(inner) => {
                let (host, after) = inner.split_once(']')?;
                (host, after.strip_prefix(':').or(after.is_empty().then_some(""))?, true)
            }
            None => {
                let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
                (host, port, false)
            }
        };
        let port = match port {
            "" => None,
            digits => Some(digits.parse().ok().filter(|_| !digits.starts_with('+'))?),
        };
        Some(UrlParts { user, host, has_brackets, port, rest })
    }
}

/// The request line's target for a path as written: `#…` is cut off, characters that a path or a
/// query cannot contain are escaped, and after an invalid `%` all of it is one path.
fn target(path: &str) -> String {
    let (path, _) = path.split_once('#').unwrap_or((path, ""));
    let (way, query) = match path.split_once('?') {
        Some((way, query)) => (way, Some(query)),
        None => (path, None),
    };
    let mut text = String::with_capacity(path.len() + 1);
    if !way.starts_with('/') {
        text.push('/');
    }
    if !escapes_are_valid(way) {
        escape_percent(path.as_bytes(), |byte| is_path(byte) && byte != b'%', &mut text);
        return text;
    }
    escape_percent(way.as_bytes(), is_path, &mut text);
    if let Some(query) = query {
        text.push('?');
        escape_percent(query.as_bytes(), |byte| byte.is_ascii_graphic(), &mut text);
    }
    text
}

fn is_path(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@!'()*[]%".contains(&byte)
}

fn escapes_are_valid(way: &str) -> bool {
    way.split('%')
        .skip(1)
        .all(|after| after.as_bytes().get(..2).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit)))
}

/// A path without `.` and `..` segments; the query is not changed.
fn without_dots(path: &str) -> String {
    let end = path.find(['?', '#']).unwrap_or(path.len());
    let (way, rest) = path.split_at(end);
    let mut resolved: Vec<&str> = Vec::new();
    let mut segments = way.split('/').skip(usize::from(way.starts_with('/'))).peekable();
    while let Some(segment) = segments.next() {
        let last = segments.peek().is_none();
        match segment {
            "." | ".." => {
                if segment == ".." {
                    resolved.pop();
                }
                if last {
                    resolved.push("");
                }
            }
            segment => resolved.push(segment),
        }
    }
    format!("/{}{rest}", resolved.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_manifests_are_escaped_as_in_go() {
        for (path, expected) in [
            ("", "http://10.0.0.1:80/"),
            ("/", "http://10.0.0.1:80/"),
            ("healthz", "http://10.0.0.1:80/healthz"),
            ("/a?b=c&d=e f", "http://10.0.0.1:80/a?b=c&d=e%20f"),
            ("/a b/ü", "http://10.0.0.1:80/a%20b/%C3%BC"),
            ("/a%20b", "http://10.0.0.1:80/a%20b"),
            ("/100%?x", "http://10.0.0.1:80/100%25%3Fx"),
            ("/a#part?x", "http://10.0.0.1:80/a"),
            ("/a\r\nX: y", "http://10.0.0.1:80/a%0D%0AX:%20y"),
            ("/a?\r\nX", "http://10.0.0.1:80/a?%0D%0AX"),
        ] {
            assert_eq!(Url::new(Scheme::Http, "10.0.0.1", 80, path).to_string(), expected, "{path:?}");
        }
        assert_eq!(Url::new(Scheme::Https, "fd00::1", 443, "/").to_string(), "https://[fd00::1]:443/");
    }

    #[test]
    fn redirect_locations_are_resolved_or_refused() {
        let from = Url::new(Scheme::Http, "10.0.0.1", 8080, "/a/b?q=1");
        for (location, expected) in [
            ("/c", Some("http://10.0.0.1:8080/c")),
            ("c?x=/../y", Some("http://10.0.0.1:8080/a/c?x=/../y")),
            ("../../c/./d/..", Some("http://10.0.0.1:8080/c/")),
            ("?z", Some("http://10.0.0.1:8080/a/b?z")),
            ("", Some("http://10.0.0.1:8080/a/b?q=1")),
            ("//other/x", Some("http://other/x")),
            ("https://10.0.0.1/x", Some("https://10.0.0.1/x")),
            ("HTTP://user:word@10.0.0.1:81?y", Some("http://10.0.0.1:81/?y")),
            ("http://[fd00::1]:1/", Some("http://[fd00::1]:1/")),
            ("ftp://10.0.0.1/", None),
            ("http:///x", None),
            ("http://h:99999/", None),
            ("http://h:+80/", None),
            ("http://[fd00::1/", None),
            ("/a\nb", None),
        ] {
            assert_eq!(
                from.redirect(location).map(|url| url.to_string()).as_deref(),
                expected,
                "{location:?}"
            );
        }
    }

    #[test]
    fn absolute_urls_are_split_and_their_passwords_become_a_field() {
        for (text, expected) in [
            ("http://h/a?b#c", Some(("http://h/a?b", None))),
            ("HTTPS://h:1", Some(("https://h:1/", None))),
            ("http://me:w%40rd@h:80/x@y", Some(("http://h:80/x@y", Some("Basic bWU6d0ByZA==")))),
            ("http://me@[::1]/", Some(("http://[::1]/", Some("Basic bWU6")))),
            ("http://%zz@h/", None),
            ("http:///x", None),
            ("http:x", None),
            ("ftp://h/", None),
            ("h/x", None),
            ("", None),
        ] {
            let parsed = Url::parse(text).map(|(url, user)| (url.to_string(), user));
            let parsed = parsed.as_ref().map(|(url, user)| (url.as_str(), user.as_deref()));
            assert_eq!(parsed, expected, "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_path_becomes_a_valid_request_target(path in "[-/?#%.:@\\[\\]a-cü\r\n ]{0,30}") {
            let from = Url::new(Scheme::Http, "h", 1, &path);
            proptest::prop_assert!(from.target.starts_with('/') && from.target.bytes().all(|b| b.is_ascii_graphic()));
            if let Some(to) = from.redirect(&path) {
                proptest::prop_assert!(to.target.starts_with('/') && to.target.bytes().all(|b| b.is_ascii_graphic()));
            }
        }
    }
}
