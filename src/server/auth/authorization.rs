//! Maps a request to a verb and a sub-resource of the node, and decides whether it is allowed.

use std::sync::Arc;
use std::time::Duration;

use super::cache::Cache;
use super::settings::{Clock, Mode, Reviews};
use crate::kube::reviews::{Attributes, User};
use crate::server::listen::quota::Caller;
use crate::transport::http1::RequestHead;
use crate::util::sha256;

/// The maximum number of cached decisions.
const CACHED_DECISIONS: usize = 8192;

/// The decision on longer attributes, which callers choose, is not cached.
const ATTRIBUTE_BYTES: usize = 10_000;

/// Paths and the sub-resources that are tried for them, in this order.
const SUBRESOURCES: &[(&str, &[&str])] = &[
    ("/stats", &["stats"]),
    ("/metrics", &["metrics"]),
    ("/logs", &["log"]),
    ("/checkpoint", &["checkpoint"]),
    ("/statusz", &["statusz"]),
    ("/flagz", &["configz"]),
    ("/pods", &["pods", "proxy"]),
    ("/runningpods", &["pods", "proxy"]),
    ("/healthz", &["healthz", "proxy"]),
    ("/configz", &["configz", "proxy"]),
];

/// For every other path.
const OTHERS: &[&str] = &["proxy"];

/// Why a request is denied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Denied {
    /// The API server denied it; the string is the text of the response.
    Forbidden(String),
    /// There is no decision: the text of the response, and the reason for the log.
    Failed { text: String, reason: String },
}

pub(super) struct Authorization {
    node: String,
    webhook: Option<Webhook>,
}

struct Webhook {
    reviews: Arc<dyn Reviews>,
    allowed: Duration,
    denied: Duration,
    cache: Cache<bool>,
}

impl Authorization {
    pub(super) fn new(
        node: String,
        mode: Mode,
        reviews: Option<Arc<dyn Reviews>>,
        clock: Clock,
    ) -> Result<Self, String> {
        let webhook = match (mode, reviews) {
            (Mode::AlwaysAllow, _) => None,
            (Mode::Webhook { allowed, denied }, Some(reviews)) => {
                Some(Webhook { reviews, allowed, denied, cache: Cache::new(CACHED_DECISIONS, clock) })
            }
            (Mode::Webhook { .. }, None) => {
                return Err("authorization.mode: no client provided, cannot use webhook authorization: \
                            give a kubeconfig, or set AlwaysAllow"
                    .to_owned());
            }
        };
        Ok(Authorization { node, webhook })
    }

    /// Allows a request if the user may access one of its sub-resources.
    pub(super) fn allow(&self, user: &User, head: &RequestHead, caller: &Caller) -> Result<(), Denied> {
        let Some(webhook) = &self.webhook else { return Ok(()) };
        let path = head.target.path.as_str();
        let (verb, tried) = (verb(&head.method), subresources(path));
        for subresource in tried {
            let attributes = Attributes { verb, node: &self.node, subresource };
            match webhook.allows(user, &attributes, path, caller) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(reason) => {
                    let text = format!(
                        "Authorization error (user={}, verb={verb}, resource=nodes, subresource={subresource})",
                        user.name
                    );
                    return Err(Denied::Failed { text, reason });
                }
            }
        }
        Err(Denied::Forbidden(format!(
            "Forbidden (user={}, verb={verb}, resource=nodes, subresource(s)=[{}])\n",
            user.name,
            tried.join(" ")
        )))
    }
}

impl Webhook {
    fn allows(
        &self,
        user: &User,
        attributes: &Attributes<'_>,
        path: &str,
        caller: &Caller,
    ) -> Result<bool, String> {
        let review = || self.reviews.access(user, attributes).map_err(|error| error.to_string());
        let sizes = [path.len(), attributes.verb.len(), attributes.node.len(), attributes.subresource.len()];
        if sizes.iter().sum::<usize>() > ATTRIBUTE_BYTES {
            let _permit = self.cache.review_permit(caller)?;
            return review();
        }
        self.cache.get_or(key(user, attributes), caller, || {
            review().map(|yes| (yes, if yes { self.allowed } else { self.denied }))
        })
    }
}

/// A digest of all that a decision depends on.
fn key(user: &User, attributes: &Attributes<'_>) -> super::cache::Key {
    let mut text = Vec::with_capacity(512);
    let mut add = |part: &str| {
        // The length separates each part from the next one.
        text.extend_from_slice(&(part.len() as u64).to_le_bytes());
        text.extend_from_slice(part.as_bytes());
    };
    for part in [attributes.verb, attributes.node, attributes.subresource, &user.name, &user.uid] {
        add(part);
    }
    add(&user.groups.len().to_string());
    user.groups.iter().for_each(|group| add(group));
    for (name, values) in &user.extra {
        add(name);
        add(&values.len().to_string());
        values.iter().for_each(|value| add(value));
    }
    sha256::sha256(&text)
}

/// The verb of a method. HEAD and OPTIONS have none, which no user is granted.
fn verb(method: &str) -> &'static str {
    match method {
        "GET" => "get",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "",
    }
}

fn subresources(path: &str) -> &'static [&'static str] {
    let below =
        |start: &str| path.strip_prefix(start).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    SUBRESOURCES.iter().find(|(start, _)| below(start)).map_or(OTHERS, |(_, tried)| tried)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_methods_map_to_sub_resources_and_verbs() {
        for (path, tried) in [
            ("/", &["proxy"][..]),
            ("/stats/summary", &["stats"]),
            ("/metrics", &["metrics"]),
            ("/metrics/cadvisor", &["metrics"]),
            ("/metricsx", &["proxy"]),
            ("//metrics", &["proxy"]),
            ("/Metrics", &["proxy"]),
            ("/logs/", &["log"]),
            ("/checkpoint/a/b/c", &["checkpoint"]),
            ("/statusz", &["statusz"]),
            ("/flagz", &["configz"]),
            ("/pods/", &["pods", "proxy"]),
            ("/runningpods/", &["pods", "proxy"]),
            ("/healthz/ping", &["healthz", "proxy"]),
            ("/configz", &["configz", "proxy"]),
            ("/exec/a/b/c", &["proxy"]),
            ("/run/a/b/c", &["proxy"]),
            ("/containerLogs/a/b/c", &["proxy"]),
            ("/debug/pprof", &["proxy"]),
        ] {
            assert_eq!(subresources(path), tried, "{path}");
        }
        let verbs: Vec<_> =
            ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "get"].map(verb).to_vec();
        assert_eq!(verbs, ["get", "create", "update", "patch", "delete", "", "", ""]);
    }

    #[test]
    fn different_users_have_different_cache_keys() {
        let attributes = Attributes { verb: "get", node: "n", subresource: "proxy" };
        let user = |name: &str, groups: &[&str], extra: &[(&str, &[&str])]| {
            let texts = |all: &[&str]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
            let extra = extra.iter().map(|(name, values)| (name.to_string(), texts(values))).collect();
            User { name: name.into(), groups: texts(groups), extra, ..User::default() }
        };
        let users = [
            user("ab", &[], &[]),
            user("a", &["b"], &[]),
            user("a", &["b", "c"], &[]),
            user("a", &["bc"], &[]),
            user("a", &["b"], &[("c", &[])]),
            user("a", &["b"], &[("c", &["d"])]),
            user("a", &["b"], &[("c", &[]), ("d", &[])]),
        ];
        let keys: std::collections::BTreeSet<_> = users.iter().map(|user| key(user, &attributes)).collect();
        assert_eq!(keys.len(), users.len());
        let other = Attributes { verb: "get", node: "n", subresource: "metrics" };
        assert_ne!(key(&users[0], &attributes), key(&users[0], &other));
    }
}
