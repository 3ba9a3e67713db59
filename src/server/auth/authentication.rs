//! Finds the user of a request: by certificate, by token, or the anonymous one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::authority::AuthorityFile;
use super::cache::Cache;
use super::client::{Certificates, VerifiedCertificate};
use super::settings::{Clock, Reviews, Settings};
use crate::kube::certificates::{CertificateFields, Subject};
use crate::kube::reviews::User;

use crate::server::listen::quota::Caller;
use crate::transport::http1::RequestHead;
use crate::util::encoding::from_base64_url;
use crate::util::sha256;

/// The maximum number of cached reviews.
const CACHED_TOKENS: usize = 2048;

/// A longer token is invalid; those of service accounts have about 1 KiB.
const TOKEN_BYTES: usize = 16 * 1024;

/// The prefix of a token among a WebSocket's protocols, for browsers, which cannot set a header.
pub(crate) const PROTOCOL_TOKEN: &str = "base64url.bearer.authorization.k8s.io.";
const PROTOCOLS: &str = "Sec-WebSocket-Protocol";

pub(super) const ANONYMOUS: &str = "system:anonymous";
const AUTHENTICATED: &str = "system:authenticated";
const UNAUTHENTICATED: &str = "system:unauthenticated";
const CREDENTIAL_ID: &str = "authentication.kubernetes.io/credential-id";
const OF_CERTIFICATE: &str = "X509SHA256=";

/// Why a request has no user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unauthenticated {
    NoCredentials,
    /// The credentials are invalid or could not be checked.
    Failed(String),
}

pub(super) struct Authentication {
    authorities: Option<AuthorityFile>,
    tokens: Option<Tokens>,
    anonymous: bool,
}

struct Tokens {
    reviews: Arc<dyn Reviews>,
    time: Duration,
    cache: Cache<Option<User>>,
}

impl Authentication {
    pub(super) fn new(
        settings: &Settings,
        reviews: Option<Arc<dyn Reviews>>,
        clock: Clock,
    ) -> Result<Self, String> {
        let authorities = settings.client_ca_file.as_ref().map(|path| AuthorityFile::open(path, clock));
        let authorities = authorities.transpose().map_err(|error| {
            format!("authentication.x509.clientCAFile: unable to load client CA file {error}")
        })?;
        let tokens = match (settings.tokens, reviews) {
            (Some(time), Some(reviews)) => {
                Some(Tokens { reviews, time, cache: Cache::new(CACHED_TOKENS, clock) })
            }
            (Some(_), None) => {
                return Err("authentication.webhook.enabled: no client provided, cannot use webhook \
                            authentication: give a kubeconfig, or set it to false"
                    .to_owned());
            }
            (None, _) => None,
        };
        Ok(Authentication { authorities, tokens, anonymous: settings.anonymous })
    }

    /// The user of a request. Credentials that fail are an error: the caller does not become
    /// anonymous. `verified` is the result for this connection's certificates.
    pub(super) fn user(
        &self,
        verified: &mut Option<VerifiedCertificate>,
        certificates: &Certificates<'_>,
        head: &mut RequestHead,
        caller: &Caller,
        now: Timestamp,
    ) -> Result<User, Unauthenticated> {
        let by_certificate = self.by_certificate(verified, certificates, now);
        let outcome = match by_certificate {
            Ok(Some(user)) => Ok(Some(user)),
            Ok(None) => self.by_token(head, caller),
            // A valid token is enough.
            Err(error) => match self.by_token(head, caller) {
                Ok(Some(user)) => Ok(Some(user)),
                Ok(None) => Err(error),
                Err(other) => Err(format!("[{error}, {other}]")),
            },
        };
        match outcome {
            Ok(Some(user)) => Ok(with_group(user)),
            Ok(None) if self.anonymous => Ok(User {
                name: ANONYMOUS.to_owned(),
                groups: vec![UNAUTHENTICATED.to_owned()],
                ..User::default()
            }),
            Ok(None) => Err(Unauthenticated::NoCredentials),
            Err(error) => Err(Unauthenticated::Failed(error)),
        }
    }

    /// The user of the client's certificate. It is verified once for each generation of the
    /// authorities, and again when time has changed its validity.
    fn by_certificate(
        &self,
        verified: &mut Option<VerifiedCertificate>,
        certificates: &Certificates<'_>,
        now: Timestamp,
    ) -> Result<Option<User>, String> {
        let Some(file) = &self.authorities else { return Ok(None) };
        let (generation, authorities) = file.current();
        if let Some(verified) = verified.as_ref().filter(|verified| verified.is_current(generation, now)) {
            return verified.user.clone();
        }
        let chain = certificates();
        let Some(own) = chain.first() else { return Ok(None) };
        let verification = authorities.verify(&chain, now);
        let refusal = verification.outcome.clone().err();
        let user = refusal.map_or_else(|| user_of(own), |refusal| Err(refusal.to_string()));
        *verified = Some(VerifiedCertificate { generation, verification, user: user.clone() });
        user
    }

    fn by_token(&self, head: &mut RequestHead, caller: &Caller) -> Result<Option<User>, String> {
        let Some(tokens) = &self.tokens else { return Ok(None) };
        if head.fields.all("authorization").any(|value| std::str::from_utf8(value).is_err()) {
            return Err("the Authorization header is not text".to_owned());
        }
        let token = match bearer(head) {
            Some(token) => token,
            None => match protocol_token(head)? {
                Some(token) => token,
                None => return Ok(None),
            },
        };
        tokens.user(&token, caller)?.map(Some).ok_or_else(|| "invalid bearer token".to_owned())
    }
}

/// The user of a verified certificate.
fn user_of(own: &[u8]) -> Result<Option<User>, String> {
    let facts = CertificateFields::from_der(own).ok_or("x509: malformed certificate")?;
    let bad = "x509: the subject has a string that is no valid UTF8String, PrintableString or IA5String";
    user_named(facts.subject.ok_or(bad)?, own)
}

/// The user that a subject names; `None`: it has no common name.
fn user_named(subject: Subject, own: &[u8]) -> Result<Option<User>, String> {
    let Subject { common_name, organizations, uids } = subject;
    if common_name.is_empty() {
        return Ok(None);
    }
    let uid = match uids.as_slice() {
        [] => String::new(),
        [uid] if !uid.is_empty() => uid.clone(),
        [_] => return Err("x509: the UID is empty".to_owned()),
        _ => return Err("x509: there are several UIDs".to_owned()),
    };
    let id = format!("{OF_CERTIFICATE}{}", sha256::sha256_hex(own));
    let extra = BTreeMap::from([(CREDENTIAL_ID.to_owned(), vec![id])]);
    Ok(Some(User { name: common_name, uid, groups: organizations, extra }))
}

impl Tokens {
    fn user(&self, token: &str, caller: &Caller) -> Result<Option<User>, String> {
        if token.len() > TOKEN_BYTES {
            return Ok(None);
        }
        self.cache.get_or(sha256::sha256(token.as_bytes()), caller, || {
            let user = self.reviews.token(token).map_err(|error| error.to_string())?;
            Ok((user, self.time))
        })
    }
}

/// Whether the user was authenticated by a certificate.
pub(super) fn has_certificate(user: &User) -> bool {
    user.extra.get(CREDENTIAL_ID).into_iter().flatten().any(|id| id.starts_with(OF_CERTIFICATE))
}

/// The token in the `Authorization` header.
fn bearer(head: &RequestHead) -> Option<String> {
    let mut words = head.fields.get("authorization")?.trim().splitn(3, ' ');
    let scheme = words.next()?;
    let token = words.next()?;
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then(|| token.to_owned())
}

/// The token among the protocols of a WebSocket, which is removed from them.
fn protocol_token(head: &mut RequestHead) -> Result<Option<String>, String> {
    if !head.is_websocket() {
        return Ok(None);
    }
    let (mut token, mut others) = (None, Vec::new());
    for protocol in head.fields.elements(PROTOCOLS) {
        match protocol.strip_prefix(PROTOCOL_TOKEN) {
            Some(_) if token.is_some() => {
                return Err("multiple base64.bearer.authorization tokens specified".to_owned());
            }
            Some(encoded) => {
                let text = from_base64_url(encoded).and_then(|bytes| String::from_utf8(bytes).ok());
                token = Some(text.ok_or("invalid base64.bearer.authorization token encoding")?);
            }
            None => others.push(protocol.to_owned()),
        }
    }
    let Some(token) = token.filter(|token| !token.is_empty()) else { return Ok(None) };
    if others.is_empty() {
        return Err("missing additional subprotocol".to_owned());
    }
    head.fields.remove(PROTOCOLS);
    head.fields.push(PROTOCOLS, others.join(",").into_bytes());
    Ok(Some(token))
}

/// Adds the group of authenticated users, unless the user's groups settle that.
fn with_group(mut user: User) -> User {
    let settled = |group: &String| group == AUTHENTICATED || group == UNAUTHENTICATED;
    if user.name != ANONYMOUS && !user.groups.iter().any(settled) {
        user.groups.push(AUTHENTICATED.to_owned());
    }
    user
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(headers: &str) -> RequestHead {
        let text = format!("GET /pods HTTP/1.1\r\nHost: n\r\n{headers}");
        RequestHead::parse(format!("{}\r\n\r\n", text.trim_end()).as_bytes()).unwrap()
    }

    #[test]
    fn subject_names_a_user_with_groups_and_at_most_one_uid() {
        let named = |name: &str, uids: &[&str]| {
            let uids = uids.iter().map(ToString::to_string).collect();
            let subject = Subject { common_name: name.into(), organizations: vec!["g".into()], uids };
            user_named(subject, b"certificate")
                .map(|user| user.map(|user| (user.name, user.groups, user.uid)))
        };
        let is = |uid: &str| Ok(Some(("jane".to_owned(), vec!["g".to_owned()], uid.to_owned())));
        assert_eq!(named("", &[]), Ok(None));
        assert_eq!(named("", &["a", "b"]), Ok(None));
        assert_eq!(named("jane", &[]), is(""));
        assert_eq!(named("jane", &["u1"]), is("u1"));
        assert!(named("jane", &[""]).is_err() && named("jane", &["u1", "u2"]).is_err());
    }

    #[test]
    fn tokens_are_read_from_header_and_websocket_protocols() {
        for (header, token) in [
            ("Bearer abc", Some("abc")),
            ("bEARER abc def", Some("abc")),
            ("Bearer  abc", None),
            ("Bearer", None),
            ("Basic abc", None),
            ("", None),
        ] {
            assert_eq!(bearer(&head(&format!("Authorization: {header}"))).as_deref(), token, "{header}");
        }
        let websocket = |protocols: &str| {
            let text = format!("Connection: Upgrade\r\nUpgrade: websocket\r\n{PROTOCOLS}: {protocols}");
            let mut head = head(&text);
            let outcome = protocol_token(&mut head);
            (outcome, head.fields.get(PROTOCOLS).unwrap_or_default().to_owned())
        };
        let with = format!("v5.channel.k8s.io, {PROTOCOL_TOKEN}YWJj");
        assert_eq!(websocket(&with), (Ok(Some("abc".to_owned())), "v5.channel.k8s.io".to_owned()));
        assert_eq!(websocket("v5.channel.k8s.io").0, Ok(None));
        assert!(websocket(&format!("{PROTOCOL_TOKEN}YWJj")).0.is_err());
        assert!(websocket(&format!("a, {PROTOCOL_TOKEN}YWJj, {PROTOCOL_TOKEN}YWJj")).0.is_err());
        assert!(websocket(&format!("a, {PROTOCOL_TOKEN}YW=j")).0.is_err());
        let mut plain = head(&format!("{PROTOCOLS}: {with}"));
        assert_eq!(protocol_token(&mut plain), Ok(None));
    }
}
