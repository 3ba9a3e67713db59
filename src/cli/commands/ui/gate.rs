//! Who may read the pages: the link that works once, the cookie that comes for it, and the checks of where
//! a request comes from (pure but for the random values).

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::transport::http1::fields::Fields;
use crate::util::token;

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The request names another server: a page of another site may have pointed its name to this address.
    Host,
    /// The request was made by a page of another site.
    CrossSite,
    /// There is no cookie of this start.
    NoSession,
    /// The link was used before.
    UsedToken,
    /// The token is not the one of this start.
    WrongToken,
}

impl Refusal {
    /// The HTTP status.
    pub(super) fn status(self) -> u16 {
        match self {
            Refusal::Host => 421,
            Refusal::NoSession => 401,
            Refusal::CrossSite | Refusal::UsedToken | Refusal::WrongToken => 403,
        }
    }

    /// What the page says, and what to do.
    pub(super) fn text(self) -> &'static str {
        match self {
            Refusal::Host => {
                "The name in the address is not one of this server. Use localhost, 127.0.0.1 or another IP \
                 address of the node."
            }
            Refusal::CrossSite => "A page of another site made this request.",
            Refusal::NoSession => {
                "This browser has no session. Open the link that coracle ui printed; it works once. Without \
                 an unused link, end coracle ui on the node with Ctrl-C and start it again: it prints a new \
                 one."
            }
            Refusal::UsedToken => {
                "This link was used already; each works once. End coracle ui on the node with Ctrl-C and \
                 start it again: it prints a new one. If you did not open the link yourself, another \
                 program has read it."
            }
            Refusal::WrongToken => {
                "This link is not the one of the running coracle ui. Open the link that its last start \
                 printed, or start it again for a new one."
            }
        }
    }
}

/// The secrets of one start.
pub(super) struct Gate {
    token: String,
    is_used: AtomicBool,
    session: String,
    cookie: String,
    is_tls: bool,
}

impl Gate {
    /// New secrets. `port`: browsers send cookies to all ports of a host, so each port has its own name.
    ///
    /// # Errors
    /// When the kernel returns no random bytes.
    pub(super) fn new(port: u16, is_tls: bool) -> io::Result<Gate> {
        Ok(Gate {
            token: token::new()?,
            is_used: AtomicBool::new(false),
            session: token::new()?,
            cookie: format!("coracle-ui-{port}"),
            is_tls,
        })
    }

    /// The token of the link.
    pub(super) fn token(&self) -> &str {
        &self.token
    }

    pub(super) fn scheme(&self) -> &'static str {
        if self.is_tls { "https" } else { "http" }
    }

    /// Checks which server a request names and which page made it.
    ///
    /// # Errors
    /// When it may come from another site.
    pub(super) fn check_source(&self, fields: &Fields) -> Result<(), Refusal> {
        let host = fields.get("host").filter(|host| self.is_own_host(host)).ok_or(Refusal::Host)?;
        let origin = format!("{}://{host}", self.scheme());
        if !fields.all("origin").all(|given| given.eq_ignore_ascii_case(origin.as_bytes())) {
            return Err(Refusal::CrossSite);
        }
        // A link in another page may lead here; the cookie does not come along.
        let is_visit = fields.get("sec-fetch-mode") == Some("navigate")
            && fields.get("sec-fetch-dest") == Some("document");
        let is_own = |site: &[u8]| matches!(site, b"same-origin" | b"none");
        if !is_visit && !fields.all("sec-fetch-site").all(is_own) {
            return Err(Refusal::CrossSite);
        }
        Ok(())
    }

    /// Whether a browser loads a page before its user has decided to open it.
    pub(super) fn is_prefetch(fields: &Fields) -> bool {
        let purposes = ["sec-purpose", "purpose", "x-purpose", "x-moz"];
        let is_early =
            |value: &str| ["prefetch", "prerender", "preview"].iter().any(|purpose| value.contains(purpose));
        purposes.iter().any(|name| fields.get(name).is_some_and(is_early))
    }

    /// Whether no other site can have this host: a page reaches an IP address only by that address. With
    /// TLS the certificate proves the name to the browser.
    fn is_own_host(&self, host: &str) -> bool {
        let name = match host.strip_prefix('[') {
            Some(rest) => rest.split_once(']').map_or("", |(address, _)| address),
            None => host.split_once(':').map_or(host, |(name, _)| name),
        };
        let is_local = name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok();
        is_local || (self.is_tls && !name.is_empty())
    }

    /// Whether the request has the cookie of this start.
    pub(super) fn has_session(&self, fields: &Fields) -> bool {
        let cookies = fields.all("cookie").flat_map(|value| value.split(|byte| *byte == b';'));
        cookies
            .filter_map(|cookie| std::str::from_utf8(cookie).ok()?.trim().split_once('='))
            .any(|(name, value)| name == self.cookie && token::equal(value, &self.session))
    }

    /// Exchanges the token for the value of `Set-Cookie`; only the first time.
    ///
    /// # Errors
    /// For another token, and for the same one again.
    pub(super) fn exchange(&self, given: &str) -> Result<String, Refusal> {
        if !token::equal(given, &self.token) {
            return Err(Refusal::WrongToken);
        }
        if self.is_used.swap(true, Ordering::SeqCst) {
            return Err(Refusal::UsedToken);
        }
        let secure = if self.is_tls { "; Secure" } else { "" };
        Ok(format!("{}={}; Path=/; HttpOnly; SameSite=Strict{secure}", self.cookie, self.session))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(list: &[(&str, &str)]) -> Fields {
        let mut fields = Fields::default();
        list.iter().for_each(|(name, value)| fields.push(name, value.as_bytes().to_vec()));
        fields
    }

    #[test]
    fn token_is_exchanged_once_for_a_cookie_that_opens_the_pages() {
        let gate = Gate::new(80, false).unwrap();
        assert_eq!(gate.exchange(""), Err(Refusal::WrongToken));
        assert_eq!(gate.exchange(&gate.session), Err(Refusal::WrongToken));
        let set = gate.exchange(&gate.token.clone()).unwrap();
        assert!(set.ends_with("; Path=/; HttpOnly; SameSite=Strict"), "{set}");
        assert_eq!(gate.exchange(&gate.token.clone()), Err(Refusal::UsedToken));
        let cookie = set.split(';').next().unwrap();
        assert!(gate.has_session(&fields(&[("Cookie", cookie)])));
        assert!(gate.has_session(&fields(&[("Cookie", format!("a=b; {cookie} ; c=d").as_str())])));
        for wrong in ["", "coracle-ui-80=", "coracle-ui-80", "coracle-ui-81=x"] {
            assert!(!gate.has_session(&fields(&[("Cookie", wrong)])), "{wrong}");
        }
        let as_cookie = format!("coracle-ui-80={}", gate.token);
        assert!(!gate.has_session(&fields(&[("Cookie", as_cookie.as_str())])), "the token is no session");
        assert!(!gate.has_session(&fields(&[])));
        let other = Gate::new(80, true).unwrap();
        assert!(!other.has_session(&fields(&[("Cookie", cookie)])), "another start has another session");
        assert!(other.exchange(&other.token.clone()).unwrap().ends_with("; Secure"));
    }

    #[test]
    fn loading_a_page_in_advance_is_no_visit() {
        for (name, value) in
            [("Sec-Purpose", "prefetch;prerender"), ("Purpose", "prefetch"), ("X-Moz", "prefetch")]
        {
            assert!(Gate::is_prefetch(&fields(&[(name, value)])), "{name}: {value}");
        }
        assert!(!Gate::is_prefetch(&fields(&[("Accept", "prefetch")])));
        assert!(!Gate::is_prefetch(&fields(&[("Sec-Purpose", "")])));
    }

    #[test]
    fn names_that_another_site_can_have_are_refused() {
        let (gate, tls) = (Gate::new(80, false).unwrap(), Gate::new(80, true).unwrap());
        for host in ["localhost:9000", "LOCALHOST", "127.0.0.1:80", "[::1]:80", "10.0.0.7"] {
            assert_eq!(gate.check_source(&fields(&[("Host", host)])), Ok(()), "{host}");
        }
        for host in ["", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "[::1", "127.1:80"] {
            assert_eq!(gate.check_source(&fields(&[("Host", host)])), Err(Refusal::Host), "{host}");
        }
        assert_eq!(gate.check_source(&fields(&[])), Err(Refusal::Host));
        assert_eq!(tls.check_source(&fields(&[("Host", "node.example:80")])), Ok(()));
    }

    #[test]
    fn requests_of_pages_of_other_sites_are_refused() {
        let gate = Gate::new(80, false).unwrap();
        let check = |more: &[(&str, &str)]| {
            gate.check_source(&fields(&[&[("Host", "127.0.0.1:80")][..], more].concat()))
        };
        assert_eq!(check(&[("Origin", "http://127.0.0.1:80")]), Ok(()));
        for origin in ["null", "https://127.0.0.1:80", "http://127.0.0.1:81", "http://evil.example"] {
            assert_eq!(check(&[("Origin", origin)]), Err(Refusal::CrossSite), "{origin}");
        }
        let site = |site: &'static str| ("Sec-Fetch-Site", site);
        assert_eq!(check(&[site("same-origin"), ("Sec-Fetch-Mode", "cors")]), Ok(()));
        assert_eq!(check(&[site("none")]), Ok(()));
        // Another port of this host is the same site.
        for other in ["cross-site", "same-site"] {
            assert_eq!(check(&[site(other)]), Err(Refusal::CrossSite), "{other}");
            let visit = [("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")];
            assert_eq!(check(&[&[site(other)][..], &visit[..]].concat()), Ok(()), "{other}");
            let frame = [("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "iframe")];
            assert_eq!(check(&[&[site(other)][..], &frame[..]].concat()), Err(Refusal::CrossSite), "{other}");
        }
    }
}
