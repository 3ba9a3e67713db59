//! Which mirror to create or to delete next (pure).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::redact::redact;
use super::request::{Request, Response};
use super::view::View;
use crate::model::api;
use crate::model::ids::{FullName, PodUid};
use crate::model::meta::OwnerReference;
use crate::model::pod::{CONFIG_HASH, CONFIG_MIRROR, Pod};
use crate::util::backoff::{Failures, jitter, random_unit};

/// First wait after a failure; doubles.
const RETRY: Duration = Duration::from_secs(1);
/// The longest wait after a failure, before jitter.
const RETRY_MAX: Duration = Duration::from_secs(60);
/// How long a mirror that was created is assumed to exist before the API server shows it.
const UNSEEN: Duration = Duration::from_secs(30);

/// The newest view and the results of requests since then.
#[derive(Default)]
pub(super) struct Core {
    view: View,
    names: BTreeMap<FullName, NameState>,
    due: Option<Instant>,
}

/// What is known about one full name in addition to the view.
#[derive(Default)]
struct NameState {
    /// The object of that name, as a response showed it; the view does not show it yet.
    found: Option<(Existing, Instant)>,
    /// Deleted mirrors that the view still shows.
    deleted: BTreeSet<PodUid>,
    /// An unknown object has the name.
    taken: bool,
    failures: Failures,
    not_before: Option<Instant>,
}

#[derive(Debug, Clone, PartialEq)]
struct Existing {
    namespace: String,
    name: String,
    uid: PodUid,
    /// The hash of the mirrored static pod; `None`: the object is no mirror.
    hash: Option<String>,
    deleting: bool,
}

impl Existing {
    fn from_pod(pod: &Pod) -> Self {
        Existing {
            namespace: pod.namespace().to_owned(),
            name: pod.name().to_owned(),
            uid: pod.uid().clone(),
            hash: pod.annotation(CONFIG_MIRROR).map(str::to_owned),
            deleting: pod.is_deleting(),
        }
    }

    fn delete(self) -> Request {
        Request::Delete { namespace: self.namespace, name: self.name, uid: self.uid.as_str().to_owned() }
    }
}

/// The next step for one name.
enum Step {
    Nothing,
    Send(Request),
    /// The mirror has to be created, but the Node object is not known.
    NoNode,
    /// A pod that is no mirror has the name.
    Foreign,
}

impl Core {
    pub(super) fn apply_view(&mut self, view: View, now: Instant) {
        self.view = view;
        let shown: BTreeMap<FullName, Vec<PodUid>> =
            self.view.mirrors.iter().flatten().fold(BTreeMap::new(), |mut all, mirror| {
                all.entry(mirror.full_name()).or_insert_with(Vec::new).push(mirror.uid().clone());
                all
            });
        let desired: BTreeSet<FullName> = self.view.desired.iter().map(Pod::full_name).collect();
        self.names.retain(|name, state| {
            let shown = shown.get(name).map(Vec::as_slice).unwrap_or_default();
            let before = state.deleted.len();
            state.deleted.retain(|uid| shown.contains(uid));
            if state.taken && state.deleted.len() < before {
                // Most likely this mirror had the name.
                state.not_before = None;
            }
            if state.found.as_ref().is_some_and(|(found, _)| shown.contains(&found.uid)) {
                state.found = None;
            }
            desired.contains(name) || !shown.is_empty() || state.found.is_some()
        });
        self.due = Some(now);
    }

    /// Whether no name is known.
    #[cfg(test)]
    pub(super) fn is_blank(&self) -> bool {
        self.names.is_empty()
    }

    /// When to check again without a new view.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.due
    }

    /// The next request. `None`: there is none until [`Core::next_due`].
    pub(super) fn next(&mut self, node: Option<&api::Node>, now: Instant) -> Option<(FullName, Request)> {
        let owner = node.and_then(owner);
        let mut names: BTreeSet<FullName> = self.view.desired.iter().map(Pod::full_name).collect();
        names.extend(self.view.mirrors.iter().flatten().map(Pod::full_name));
        names.extend(self.names.keys().cloned());
        self.due = None;
        for name in names {
            let waits = self.names.get(&name).and_then(|state| state.not_before);
            if let Some(until) = waits.filter(|until| now < *until) {
                set_earlier(&mut self.due, until);
                continue;
            }
            match self.step(&name, owner.as_ref(), now) {
                Step::Nothing => {}
                Step::Send(request) => return Some((name, request)),
                Step::NoNode => self.failed(&name, None, now),
                Step::Foreign => {
                    self.failed(&name, Some("a pod that is no mirror has the name of a static pod"), now);
                    self.names.entry(name).or_default().found = None;
                }
            }
        }
        None
    }

    fn step(&mut self, name: &FullName, owner: Option<&OwnerReference>, now: Instant) -> Step {
        // The pod is still being stopped; the mirror then shows its end.
        if self.view.removed.contains(name) {
            return Step::Nothing;
        }
        let pod = self.view.desired.iter().find(|pod| pod.full_name() == *name);
        let state = self.names.entry(name.clone()).or_default();
        let shown = self
            .view
            .mirrors
            .iter()
            .flatten()
            .find(|mirror| mirror.full_name() == *name && !state.deleted.contains(mirror.uid()))
            .map(Existing::from_pod);
        if state.found.as_ref().is_some_and(|(_, since)| now.saturating_duration_since(*since) >= UNSEEN) {
            state.found = None;
        }
        let unseen = state.found.as_ref().filter(|_| shown.is_none());
        let wake = unseen.and_then(|(_, since)| since.checked_add(UNSEEN));
        let present = unseen.map(|(found, _)| found.clone()).or(shown);
        let taken = state.taken;
        if let Some(time) = wake {
            set_earlier(&mut self.due, time);
        }
        match (pod, present) {
            (None, None) => Step::Nothing,
            (None, Some(mirror)) if self.view.sources_ready => Step::Send(mirror.delete()),
            (None, Some(_)) => Step::Nothing,
            (Some(_), Some(Existing { hash: None, .. })) => Step::Foreign,
            (Some(pod), Some(mirror)) if mirror.deleting || mirror.hash.as_deref() != Some(hash(pod)) => {
                Step::Send(mirror.delete())
            }
            (Some(_), Some(_)) => Step::Nothing,
            // The server may already have the mirror that is missing here.
            (Some(_), None) if self.view.mirrors.is_none() => Step::Nothing,
            (Some(pod), None) if taken => Step::Send(Request::Get {
                namespace: pod.namespace().to_owned(),
                name: pod.name().to_owned(),
            }),
            // DIFFERS: the Go kubelet waits for the pod's next periodic sync.
            (Some(pod), None) => match owner {
                Some(owner) => Step::Send(Request::Create(Box::new(mirror_of(pod, owner)))),
                None => Step::NoNode,
            },
        }
    }

    /// Applies the result of a request.
    pub(super) fn apply_response(
        &mut self,
        name: &FullName,
        request: &Request,
        response: Response,
        now: Instant,
    ) {
        let state = self.names.entry(name.clone()).or_default();
        match (request, response) {
            (_, Response::Stopping) => {}
            (Request::Delete { uid, .. }, Response::Gone | Response::Shown(_)) => {
                let uid = PodUid::from(uid.as_str());
                if state.found.as_ref().is_some_and(|(found, _)| found.uid == uid) {
                    state.found = None;
                }
                state.deleted.insert(uid);
                log::info!("mirror deleted pod={name}");
            }
            (Request::Create(_) | Request::Get { .. }, Response::Shown(pod)) => {
                let found = Existing::from_pod(&Pod::from(*pod));
                if found.deleting || state.deleted.contains(&found.uid) {
                    // A finalizer can keep it without a limit.
                    return self.failed(name, Some("the previous mirror still exists"), now);
                }
                let mut changed = false;
                if let Request::Create(own) = request {
                    log::info!("mirror created pod={name}");
                    let hash = own.metadata.annotations.as_ref().and_then(|all| all.get(CONFIG_MIRROR));
                    changed = hash != found.hash.as_ref();
                }
                state.found = Some((found, now));
                state.taken = false;
                if changed {
                    return self.failed(name, Some("the API server has changed its hash"), now);
                }
                state.failures.end();
                state.not_before = None;
            }
            (Request::Get { .. }, Response::Gone) => state.taken = false,
            (Request::Create(_), Response::Exists) => state.taken = true,
            (_, Response::Failed(reason)) => self.failed(name, Some(&reason), now),
            (_, Response::Gone | Response::Exists) => self.failed(name, Some("unexpected response"), now),
        }
    }

    /// The API server has returned: what failed is due again. The next waits are as long as before.
    pub(super) fn returned(&mut self, now: Instant) {
        for state in self.names.values_mut().filter(|state| state.failures.number() > 0) {
            state.not_before = None;
        }
        self.due = Some(now);
    }

    /// Schedules the next attempt, with a growing wait.
    fn failed(&mut self, name: &FullName, reason: Option<&str>, now: Instant) {
        let state = self.names.entry(name.clone()).or_default();
        if state.failures.count()
            && let Some(reason) = reason
        {
            log::warn!(
                "cannot create or delete the mirror of a static pod ({} times): {reason} pod={name}",
                state.failures
            );
        }
        let until = now + jitter(state.failures.delay(RETRY, RETRY_MAX), random_unit());
        state.not_before = Some(until);
        set_earlier(&mut self.due, until);
    }
}

fn set_earlier(due: &mut Option<Instant>, time: Instant) {
    *due = Some(due.map_or(time, |due| due.min(time)));
}

/// The hash of the mirrored pod: its UID, unless the manifest sets a hash.
fn hash(pod: &Pod) -> &str {
    pod.annotation(CONFIG_HASH).unwrap_or(pod.uid().as_str())
}

/// The node as the owner of its mirrors; none while it is not registered or is being deleted.
fn owner(node: &api::Node) -> Option<OwnerReference> {
    if node.metadata.deletion_timestamp.is_some() {
        return None;
    }
    Some(OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.metadata.name.clone()?,
        uid: node.metadata.uid.clone().filter(|uid| !uid.is_empty())?,
        controller: Some(true),
        block_owner_deletion: None,
    })
}

/// The mirror of a static pod. Fields that only a server sets are left out: a manifest may be the
/// export of another pod.
fn mirror_of(pod: &Pod, owner: &OwnerReference) -> api::Pod {
    let mut mirror = pod.object().clone();
    let meta = &mut mirror.metadata;
    meta.annotations.get_or_insert_default().insert(CONFIG_MIRROR.to_owned(), hash(pod).to_owned());
    meta.owner_references = Some(vec![owner.clone()]);
    meta.resource_version = None;
    meta.generation = None;
    meta.creation_timestamp = None;
    meta.deletion_timestamp = None;
    meta.deletion_grace_period_seconds = None;
    meta.managed_fields = None;
    meta.generate_name = None;
    meta.self_link = None;
    if let Some(spec) = &mut mirror.spec {
        redact(spec);
    }
    mirror
}
