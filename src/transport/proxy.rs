//! HTTP proxies: the proxy for a URL, and how a proxy opens a connection (Go:
//! golang.org/x/net/http/httpproxy, net/http's Transport).
//!
//! The decision is pure. It depends on a kubeconfig's `proxy-url`, or on `HTTPS_PROXY`,
//! `HTTP_PROXY` and `NO_PROXY` in the environment of the process. Only requests to the API server
//! and to the manifest URL use proxies: probes, hooks and sockets of this machine do not.
//! Passwords are in no `Debug` output, message or log line.
//!
//! DIFFERS: host names outside ASCII are not converted to their ASCII form, a variable with an
//! unknown scheme is ignored with a warning, and `HTTP_PROXY` is also used if the environment looks
//! like that of a CGI script.

#[cfg(test)]
pub(super) mod fuzz;
mod no_proxy;
pub(super) mod tunnel;

use std::fmt;
use std::net::Ipv6Addr;
use std::sync::LazyLock;

use super::dial::{UrlParts, join_host_port};
use crate::util::encoding::{base64, from_percent};
use no_proxy::NoProxy;

/// The protocol of a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyScheme {
    /// HTTP without TLS.
    Http,
    /// HTTP inside TLS.
    Https,
    /// SOCKS version 5 (RFC 1928). The proxy resolves host names.
    Socks5,
}

impl ProxyScheme {
    fn name(self) -> &'static str {
        match self {
            ProxyScheme::Http => "http",
            ProxyScheme::Https => "https",
            ProxyScheme::Socks5 => "socks5",
        }
    }

    fn default_port(self) -> u16 {
        match self {
            ProxyScheme::Http => 80,
            ProxyScheme::Https => 443,
            ProxyScheme::Socks5 => 1080,
        }
    }
}

/// One proxy. `Debug` and `Display` show its URL without user name and password.
#[derive(Clone, PartialEq, Eq)]
pub struct Proxy {
    pub(super) scheme: ProxyScheme,
    /// A host name or an IP address. An IPv6 address has no brackets.
    pub(super) host: String,
    pub(super) port: u16,
    /// User name and password.
    pub(super) credentials: Option<(String, String)>,
}

impl fmt::Debug for Proxy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Proxy({self})")
    }
}

impl fmt::Display for Proxy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}://{}", self.scheme.name(), self.address())
    }
}

/// Why a proxy URL is not valid. Messages do not repeat the URL, as it may contain a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProxyError {
    /// The text is not `scheme://user:password@host:port`.
    #[error("invalid proxy URL: {0}")]
    Url(&'static str),
    /// The URL's scheme is not supported for proxies.
    #[error("unsupported scheme {0:?}, must be http, https, or socks5")]
    Scheme(String),
}

impl Proxy {
    /// Parses `scheme://[user[:password]@]host[:port]`. A path, query or fragment is ignored.
    ///
    /// # Errors
    /// When the scheme is missing or unknown, or the rest is invalid.
    pub fn parse(text: &str) -> Result<Proxy, ProxyError> {
        let parts = text.split_once("://").filter(|(scheme, _)| is_scheme(scheme));
        let (scheme, rest) = parts.ok_or(ProxyError::Url("the scheme is missing"))?;
        let scheme = match scheme.to_ascii_lowercase().as_str() {
            "http" => ProxyScheme::Http,
            "https" => ProxyScheme::Https,
            "socks5" | "socks5h" => ProxyScheme::Socks5,
            other => return Err(ProxyError::Scheme(other.to_owned())),
        };
        let parts = UrlParts::split(rest).filter(|parts| is_host(*parts));
        let UrlParts { user, host, port, .. } = parts.ok_or(ProxyError::Url("host or port is invalid"))?;
        let credentials = match user {
            None => None,
            Some(user) => {
                let (name, password) = user.split_once(':').unwrap_or((user, ""));
                let decoded = unescape(name).zip(unescape(password));
                Some(decoded.ok_or(ProxyError::Url("user name or password is not escaped properly"))?)
            }
        };
        let port = port.unwrap_or(scheme.default_port());
        Ok(Proxy { scheme, host: host.to_owned(), port, credentials })
    }

    /// Host and port, for messages.
    pub fn address(&self) -> String {
        join_host_port(&self.host, self.port)
    }

    /// The value of `Proxy-Authorization` (RFC 7617), if there are credentials.
    pub(super) fn authorization(&self) -> Option<String> {
        let (user, password) = self.credentials.as_ref()?;
        Some(format!("Basic {}", base64(format!("{user}:{password}").as_bytes())))
    }
}

/// Whether the host is a name, or an IPv6 address in brackets.
fn is_host(UrlParts { host, has_brackets, .. }: UrlParts<'_>) -> bool {
    let named = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    match host.split_once('%').map_or(host, |(address, _zone)| address) {
        address if has_brackets => address.parse::<Ipv6Addr>().is_ok(),
        _ => !host.is_empty() && host.bytes().all(named),
    }
}

/// Decodes `%41`; `None` if an escape is invalid or the result is not UTF-8.
fn unescape(text: &str) -> Option<String> {
    String::from_utf8(from_percent(text)?).ok()
}

/// The proxies of environment variables, and the targets that bypass them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Environment {
    http: Option<Proxy>,
    https: Option<Proxy>,
    no_proxy: NoProxy,
}

impl Environment {
    /// The environment of this process, as it was at the first call.
    pub fn of_process() -> &'static Environment {
        static OF_PROCESS: LazyLock<Environment> =
            LazyLock::new(|| Environment::new(|name| std::env::var(name).ok()));
        &OF_PROCESS
    }

    /// Reads variables: upper-case names take precedence, and empty variables count as unset. An
    /// invalid proxy is logged and ignored.
    pub fn new(variable: impl Fn(&str) -> Option<String>) -> Environment {
        let first = |names: [&'static str; 2]| {
            let mut set = names.into_iter().filter_map(|name| Some((name, variable(name)?)));
            set.find(|(_, value)| !value.is_empty())
        };
        let proxy = |names| {
            let (name, value) = first(names)?;
            let proxy = of_variable(&value);
            proxy.map_err(|error| log::warn!("environment variable {name} is ignored: {error}")).ok()
        };
        Environment {
            http: proxy(["HTTP_PROXY", "http_proxy"]),
            https: proxy(["HTTPS_PROXY", "https_proxy"]),
            no_proxy: NoProxy::parse(&first(["NO_PROXY", "no_proxy"]).unwrap_or_default().1),
        }
    }

    /// The proxy for a target; `None` if the target needs none. `host` has no brackets.
    #[must_use]
    pub fn proxy_for(&self, https: bool, host: &str, port: u16) -> Option<&Proxy> {
        let proxy = if https { &self.https } else { &self.http };
        proxy.as_ref().filter(|_| !self.no_proxy.bypasses(host, port))
    }
}

/// Parses the value of a variable. Without a scheme it is the address of an HTTP proxy.
fn of_variable(value: &str) -> Result<Proxy, ProxyError> {
    match value.split_once("://") {
        Some((scheme, _)) if is_scheme(scheme) => Proxy::parse(value),
        _ => Proxy::parse(&format!("http://{value}")),
    }
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

#[cfg(test)]
mod tests;
