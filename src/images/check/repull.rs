//! Removes an image and pulls it again: the last resort, if no intact copy of a damaged layer is on the
//! node, and only if the operator has permitted it. It cannot replace a layer that a container or another
//! image uses, because the runtime keeps that.
//!
//! An image of the runtime is all that has one configuration: names of several owners may be one image.
//! So an image is removed only if it has no other name than the requested one, no sandbox needs it, and
//! only containers of this name were made from it. Then only this name is removed, with the digest and
//! the id that the runtime has made of it. Pods that need it pull it again, by their own credentials.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::super::listed::{RuntimeImage, spec};
use super::checker::Checker;
use super::missing::{CheckNamespace, Reservation};
use super::storage::{self, Unpacked};
use crate::cri::{CriError, ErrorClass};
use crate::model::ids::{ContainerId, PodUid, SandboxId};
use crate::model::image_name::{listed_name, repository};
use crate::model::labels;
use crate::model::pod::Pod;
use crate::transport::generated::runtime::{Container, ContainerFilter, ContainerState, PodSandboxFilter};
use crate::util::backoff;
use crate::util::stop::{StopToken, Waited};

/// How often, and after which pause, the removal of the containers is tried: one that fails may
/// just be starting again.
const REMOVALS: u32 = 6;
const REMOVAL_PAUSE: Duration = Duration::from_secs(1);
/// How long a container that is being made is waited for.
const CREATE_LIMIT: Duration = Duration::from_secs(60);
pub(super) const PULL_LIMIT: Duration = Duration::from_mins(10);
/// A request for the image of a sandbox.
const SANDBOX_LIMIT: Duration = Duration::from_secs(10);
/// The most pods whose credentials are tried for a pull.
const MAX_PODS: usize = 8;

/// An image that is pulled again.
pub(super) struct Repull<'a> {
    pub(super) checker: &'a Checker,
    pub(super) unpacked: &'a Unpacked,
    /// The name by which the check was requested.
    pub(super) requested: &'a str,
    pub(super) namespace: &'a CheckNamespace,
    pub(super) stop: &'a StopToken,
    /// Whether too many names of the namespace are missing already.
    pub(super) is_full: Cell<bool>,
}

/// What did not succeed after an image was removed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct RepullFailures {
    pub(super) problems: Vec<String>,
    /// Names that were removed, and are not back.
    pub(super) missing: Vec<String>,
}

impl Repull<'_> {
    /// Removes the image and pulls it again, once by each of its names.
    ///
    /// # Errors
    /// Why the image was not removed.
    pub(super) fn run(&self) -> Result<RepullFailures, String> {
        let Repull { checker, unpacked, requested, namespace, stop, .. } = *self;
        let names = removable(requested, unpacked, &self.sandbox_images()?)?;
        let pods = (checker.pods)().ok_or_else(|| not_removed("the pods of the node are not known"))?;
        if let Some(pod) = pods.iter().find(|pod| never_pulls(pod, &names)) {
            return Err(not_removed(&format!("the pod {} never pulls it", pod.full_name())));
        }
        if let Some((pod, name)) = other_name(&pods, requested, &names) {
            return Err(not_removed(&format!("the pod {} uses it by the name {name}", pod.full_name())));
        }
        // Before anything is removed: a name that is not reserved would be lost after a failed pull.
        let mut reservation =
            Reservation::new(&checker.missing, namespace, requested, &names).map_err(|refusal| {
                self.is_full.set(refusal.is_full);
                refusal.reason
            })?;
        self.try_pull(&names)?;
        // A worker would start its container again as soon as the failed one is removed, and that would
        // keep the damaged layer.
        let closed: Vec<&str> = names.iter().map(String::as_str).collect();
        let closed = checker
            .replaced
            .close(&closed, CREATE_LIMIT, stop)
            .ok_or_else(|| not_removed("a container of it is made"))?;
        self.remove_containers(&names)?;
        self.check_not_stopped()?;
        // Meanwhile it may have got another name.
        let now = checker.images.image_status(spec(&unpacked.id)).map_err(|error| error.to_string())?;
        let now = now.ok_or("the runtime does not have the image any more")?;
        let RuntimeImage { names: listed, pinned, .. } = RuntimeImage::from(now);
        let now = Unpacked { names: listed, pinned, ..unpacked.clone() };
        removable(requested, &now, &self.sandbox_images()?)?;
        reservation.removing();
        let removed = self.remove(&names);
        drop(closed);
        let (mut pulled, begun) = (RepullFailures::default(), Instant::now());
        for name in &names {
            let limit = PULL_LIMIT.saturating_sub(begun.elapsed());
            // The pull does not end with the check: without it, the node would be left without the image.
            // At the end of the agent it has the second until the agent's exit, and what the runtime
            // has pulled by then stays.
            let result = checker.pull(requested, name, limit, &StopToken::never());
            reservation.pulled(name, &result.as_ref().map(drop).map_err(Clone::clone));
            match result {
                Ok(found) if found == unpacked.id => {}
                Ok(found) => pulled.problems.push(moved_message(name, &found)),
                Err(error) => {
                    pulled.problems.push(format!("the image cannot be pulled again as {name}: {error}"));
                    pulled.missing.push(name.clone());
                }
            }
        }
        pulled.problems.extend(removed.err());
        Ok(pulled)
    }

    /// Removes the names, and none that the image may have got in this moment.
    fn remove(&self, names: &[String]) -> Result<(), String> {
        let images = &self.checker.images;
        if self.unpacked.store.is_some() {
            let id = [self.unpacked.id.clone()];
            return storage::remove_names(images, &[names, &id].concat());
        }
        // CRI-O removes this name only, and the image with its last name (`UntagImage`).
        let last = names.last().map_or(self.requested, String::as_str);
        images.remove_image(spec(last)).map_err(|error| format!("the image cannot be removed: {error}"))
    }

    /// The names and ids of the images that sandboxes are made from: the configured one, and those of
    /// the sandboxes.
    fn sandbox_images(&self) -> Result<Vec<String>, String> {
        let Checker { runtime, images, .. } = self.checker;
        let failed = |error: CriError| not_removed(&format!("the images of sandboxes are unknown: {error}"));
        let mut found: Vec<String> = runtime.sandbox_image().map_err(failed)?.into_iter().collect();
        for sandbox in runtime.list_pod_sandbox(PodSandboxFilter::default()).map_err(failed)? {
            self.check_not_stopped()?;
            match runtime.image_of_sandbox(&SandboxId::from(sandbox.id.as_str()), SANDBOX_LIMIT) {
                Ok(image) => found.extend(image.filter(|image| !found.contains(image))),
                Err(error) if error.class() == ErrorClass::Gone => {}
                Err(error) => return Err(failed(error)),
            }
        }
        for image in found.clone() {
            let status = images.image_status(spec(&image)).map_err(failed)?;
            found.extend(status.map(|image| image.id));
        }
        Ok(found)
    }

    fn check_not_stopped(&self) -> Result<(), String> {
        if self.stop.is_stopped() { Err("the check was ended".to_owned()) } else { Ok(()) }
    }

    /// Pulls the image by one of its names: an image that cannot be pulled is better damaged than
    /// removed. A tag is used only for an image without digests, because it may have become that of
    /// another image, which would then be on the node.
    ///
    /// This shows that the registry answers and still has the image. It does not show that the layers
    /// can be loaded, because the runtime does not load layers that it has.
    fn try_pull(&self, names: &[String]) -> Result<(), String> {
        let begun = Instant::now();
        let mut reason = "the image has no name by which it can be pulled".to_owned();
        let has_digests = names.first().is_some_and(|name| is_digest(name));
        for name in names.iter().filter(|name| is_digest(name) == has_digests) {
            let limit = PULL_LIMIT.saturating_sub(begun.elapsed());
            match self.checker.pull(self.requested, name, limit, self.stop) {
                Ok(id) if id == self.unpacked.id => return self.check_not_stopped(),
                Ok(_) => reason = format!("{name} is another image in its registry now"),
                Err(error) => reason = format!("the image cannot be pulled again: {error}"),
            }
        }
        Err(reason)
    }

    /// Removes the containers of the image, which keep its layers.
    fn remove_containers(&self, names: &[String]) -> Result<(), String> {
        let mut tries = 0;
        loop {
            self.check_not_stopped()?;
            let reason = match self.try_remove_containers(names) {
                Ok(()) => return Ok(()),
                Err(RemovalRefusal::Permanent(reason)) => return Err(reason),
                Err(RemovalRefusal::Transient(reason)) => reason,
            };
            tries += 1;
            if tries == REMOVALS || self.stop.wait(REMOVAL_PAUSE) == Waited::Stopped {
                return Err(reason);
            }
        }
    }

    /// None is removed if one has to stay.
    fn try_remove_containers(&self, names: &[String]) -> Result<(), RemovalRefusal> {
        let runtime = &self.checker.runtime;
        let mut all = runtime.list_containers(ContainerFilter::default())?;
        let is_image = |reference: &String| *reference == self.unpacked.id || names.contains(reference);
        all.retain(|container| [&container.image_ref, &container.image_id].into_iter().any(is_image));
        let pods = (self.checker.pods)().unwrap_or_default();
        for container in &all {
            self.may_remove(container, &pods, names)?;
        }
        for container in &all {
            runtime.remove_container(&ContainerId::from(container.id.as_str()))?;
        }
        Ok(())
    }

    /// A container that has ended for good is the record of that: without it, it would run again. One
    /// that was never started is no record of anything. One that was made by another name of the image is
    /// that of another user.
    fn may_remove(
        &self,
        container: &Container,
        pods: &[Pod],
        names: &[String],
    ) -> Result<(), RemovalRefusal> {
        let id = ContainerId::from(container.id.as_str());
        let label = |key| container.labels.get(key).map(String::as_str).unwrap_or_default();
        let (uid, name) = (PodUid::from(label(labels::POD_UID)), label(labels::CONTAINER_NAME));
        let pod = pods.iter().find(|pod| *pod.uid() == uid);
        if !pod.is_some_and(|pod| {
            images_of(pod).any(|image_use| image_use.container == Some(name) && image_use.is_in(names))
        }) {
            return Err(RemovalRefusal::Transient(not_removed(&format!(
                "the container {id} of another name has it"
            ))));
        }
        match container.state.enum_value() {
            Ok(ContainerState::CONTAINER_CREATED) => return Ok(()),
            Ok(ContainerState::CONTAINER_EXITED) => {}
            Ok(ContainerState::CONTAINER_RUNNING) => {
                return Err(RemovalRefusal::Transient(not_removed(&format!("the container {id} runs"))));
            }
            _ => {
                return Err(RemovalRefusal::Transient(not_removed(&format!(
                    "the state of the container {id} is unknown"
                ))));
            }
        }
        let status = match self.checker.runtime.container_status(&id) {
            Ok(status) => status,
            Err(error) if error.class() == ErrorClass::Gone => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if (self.checker.restarts)(&uid, name, status.exit_code) {
            return Ok(());
        }
        Err(RemovalRefusal::Permanent(not_removed(&format!("the finished container {id} is kept"))))
    }
}

/// Why the containers of an image cannot be removed.
enum RemovalRefusal {
    /// This may end within seconds.
    Transient(String),
    /// As long as the pod is there.
    Permanent(String),
}

impl From<CriError> for RemovalRefusal {
    fn from(error: CriError) -> Self {
        RemovalRefusal::Transient(error.to_string())
    }
}

fn is_digest(name: &str) -> bool {
    name.contains('@')
}

/// Why an image was not removed.
fn not_removed(reason: &str) -> String {
    format!("the image is not pulled again while {reason}")
}

pub(super) fn moved_message(name: &str, id: &str) -> String {
    format!("{name} is another image in its registry now: {id}")
}

/// The names that may be removed to pull an image again by the requested name, digests first: after the
/// image is there by its digest, its tag costs nothing.
///
/// # Errors
/// When the image is not only that of the requested name.
fn removable(requested: &str, image: &Unpacked, sandbox_images: &[String]) -> Result<Vec<String>, String> {
    let name = listed_name(requested).filter(|name| image.names.contains(name)).ok_or_else(|| {
        format!("the image is not pulled again, because it does not have the name {requested}")
    })?;
    if image.pinned {
        return Err("the image is not pulled again, because the runtime has pinned it".to_owned());
    }
    let is_image = |reference: &String| {
        *reference == image.id
            || image.names.contains(reference)
            || listed_name(reference).is_some_and(|reference| image.names.contains(&reference))
    };
    if sandbox_images.iter().any(is_image) {
        return Err("the image is not pulled again, because sandboxes are made from it".to_owned());
    }
    // The runtime adds the digest of a tag by itself.
    let is_own =
        |other: &String| *other == name || is_digest(other) && repository(other) == repository(&name);
    if let Some(other) = image.names.iter().find(|other| !is_own(other)) {
        return Err(format!("the image is not pulled again, because it also has the name {other}"));
    }
    let mut names: Vec<String> = image.names.iter().filter(|other| **other != name).cloned().collect();
    names.push(name);
    Ok(names)
}

/// The use of an image in a pod.
struct ImageUse<'a> {
    /// The container; `None` for a volume.
    container: Option<&'a str>,
    image: &'a str,
    policy: Option<&'a str>,
}

impl ImageUse<'_> {
    fn is_in(&self, names: &[String]) -> bool {
        listed_name(self.image).is_some_and(|name| names.contains(&name))
    }
}

fn images_of(pod: &Pod) -> impl Iterator<Item = ImageUse<'_>> {
    let spec = pod.spec();
    let regular = pod
        .all_containers()
        .map(|container| (&container.name, &container.image, &container.image_pull_policy));
    let added = spec.ephemeral_containers.iter().flatten();
    let added = added.map(|container| (&container.name, &container.image, &container.image_pull_policy));
    let containers = regular.chain(added).map(|(name, image, policy)| ImageUse {
        container: Some(name.as_str()),
        image: image.as_deref().unwrap_or_default(),
        policy: policy.as_deref(),
    });
    let volumes = spec.volumes.iter().flatten().filter_map(|volume| volume.image.as_ref());
    containers.chain(volumes.map(|image| ImageUse {
        container: None,
        image: image.reference.as_deref().unwrap_or_default(),
        policy: image.pull_policy.as_deref(),
    }))
}

/// Whether a pod could not pull an image again that is removed.
fn never_pulls(pod: &Pod, names: &[String]) -> bool {
    images_of(pod).any(|image_use| image_use.policy == Some("Never") && image_use.is_in(names))
}

/// A pod that uses another of these names than the requested one, and this name. Its credentials, which may
/// be others, would not be those of the pulls that follow.
fn other_name<'a>(pods: &'a [Pod], requested: &str, names: &[String]) -> Option<(&'a Pod, String)> {
    let requested = listed_name(requested);
    pods.iter().find_map(|pod| {
        let mut used = images_of(pod).filter_map(|image_use| listed_name(image_use.image));
        let other = used.find(|name| names.contains(name) && Some(name) != requested.as_ref())?;
        Some((pod, other))
    })
}

/// The pods whose credentials a pull by one of these names uses, at most [`MAX_PODS`]. Those with pull
/// secrets are first, because the others have only the credentials of the node; of both, each namespace
/// has its turn. `start` decides which of them begin: over all its values, each pod is chosen.
fn users<'a>(pods: &'a [Pod], names: &[String], start: u64) -> Vec<&'a Pod> {
    let users = pods.iter().filter(|pod| images_of(pod).any(|image_use| image_use.is_in(names)));
    let has_secrets = |pod: &&Pod| pod.spec().image_pull_secrets.as_ref().is_some_and(|all| !all.is_empty());
    let (with, without): (Vec<&Pod>, Vec<&Pod>) = users.partition(has_secrets);
    let mut chosen = by_turns(&with, start);
    // Secrets that are wrong would also prevent a pull that needs none.
    chosen.truncate(MAX_PODS - usize::from(!without.is_empty()));
    chosen.extend(by_turns(&without, start));
    chosen.truncate(MAX_PODS);
    chosen
}

/// One pod of each namespace, then another one of each, and so on.
fn by_turns<'a>(pods: &[&'a Pod], start: u64) -> Vec<&'a Pod> {
    let mut namespaces: BTreeMap<&str, VecDeque<&'a Pod>> = BTreeMap::new();
    for pod in pods {
        namespaces.entry(pod.namespace()).or_default().push_back(pod);
    }
    let mut namespaces: Vec<VecDeque<&Pod>> = namespaces.into_values().collect();
    let count = namespaces.len();
    if count == 0 {
        return Vec::new();
    }
    // Two numbers that do not depend on each other.
    let (first, pod) = (start % count as u64, start / count as u64);
    namespaces.rotate_left(usize::try_from(first).unwrap_or(0));
    for pods in &mut namespaces {
        let pod = pod % pods.len() as u64;
        pods.rotate_left(usize::try_from(pod).unwrap_or(0));
    }
    let most = namespaces.iter().map(VecDeque::len).max().unwrap_or(0);
    (0..most).flat_map(|turn| namespaces.iter().filter_map(move |pods| pods.get(turn).copied())).collect()
}

impl Checker {
    /// Pulls an image by `name`, with the credentials of pods that use the requested name, and
    /// returns its id, which may be that of another image than before. Which pods, and in which order, is
    /// another at each call if there are many.
    pub(super) fn pull(
        &self,
        requested: &str,
        name: &str,
        limit: Duration,
        stop: &StopToken,
    ) -> Result<String, String> {
        let begun = Instant::now();
        let wanted: Vec<String> = listed_name(requested).into_iter().collect();
        let pods = (self.pods)().unwrap_or_default();
        let users: Vec<Option<&Pod>> =
            users(&pods, &wanted, backoff::random_u64()).into_iter().map(Some).collect();
        let mut problem = None;
        for pod in if users.is_empty() { vec![None] } else { users } {
            let left = limit.saturating_sub(begun.elapsed());
            if left.is_zero() || stop.is_stopped() {
                break;
            }
            match (self.pull)(pod, name, left, stop) {
                Ok(id) => return Ok(id),
                Err(error) => problem = Some(error.to_string()),
            }
        }
        Err(problem.unwrap_or_else(|| "context deadline exceeded".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::pull::PullError;
    use super::super::super::set::ImageSet;
    use super::*;
    use serde_json::json;

    fn image(names: &[&str]) -> Unpacked {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Unpacked { id: "sha256:1".to_owned(), names, pinned: false, layers: Vec::new(), store: None }
    }

    fn digest_of(repository: &str) -> String {
        format!("{repository}@sha256:{}", "a".repeat(64))
    }

    #[test]
    fn only_the_requested_name_and_its_digest_are_removed() {
        let digest = digest_of("evil.example/x");
        let own = image(&["evil.example/x:1", &digest]);
        let names = removable("evil.example/x:1", &own, &[]);
        assert_eq!(names, Ok(vec![digest.clone(), "evil.example/x:1".to_owned()]));
        let by_digest = image(&[&digest]);
        assert_eq!(removable(&digest, &by_digest, &[]), Ok(vec![digest.clone()]));
        assert!(removable("evil.example/y:1", &own, &[]).is_err());
        // By its id, and by a digest of an image that also has a tag.
        assert!(removable("sha256:1", &own, &[]).is_err());
        assert!(removable(&digest, &own, &[]).unwrap_err().ends_with("the name evil.example/x:1"));
        let short = image(&["docker.io/library/app:latest"]);
        assert_eq!(removable("app", &short, &[]), Ok(vec!["docker.io/library/app:latest".to_owned()]));
    }

    #[test]
    fn image_with_names_of_others_is_never_removed() {
        for other in ["registry.k8s.io/pause:3.10", "evil.example/x:2", &digest_of("registry.corp/app")] {
            let shared = image(&["evil.example/x:1", other]);
            let refusal = removable("evil.example/x:1", &shared, &[]).unwrap_err();
            assert!(refusal.ends_with(&format!("it also has the name {other}")), "{refusal}");
        }
    }

    #[test]
    fn pinned_images_and_those_of_sandboxes_are_never_removed() {
        let pause = image(&["docker.io/library/pause:1"]);
        let pinned = Unpacked { pinned: true, ..pause.clone() };
        assert!(removable("pause:1", &pinned, &[]).unwrap_err().ends_with("has pinned it"));
        for name in ["pause:1", "docker.io/library/pause:1", "sha256:1"] {
            let refusal = removable("pause:1", &pause, &[name.to_owned()]).unwrap_err();
            assert!(refusal.ends_with("sandboxes are made from it"), "{refusal}");
        }
        assert!(removable("pause:1", &pause, &["pause:2".to_owned()]).is_ok());
    }

    /// A pod that uses the image, with a pull secret or without.
    fn user(namespace: &str, name: &str, has_secret: bool) -> Pod {
        let secrets = if has_secret { json!([{"name": "secret"}]) } else { json!([]) };
        let pod = json!({
            "metadata": {"namespace": namespace, "name": name},
            "spec": {"containers": [{"name": "c", "image": "app:1"}], "imagePullSecrets": secrets},
        });
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap())
    }

    fn pull(pods: Vec<Pod>, right: &'static str) -> Result<String, String> {
        let (runtime, images) = crate::cri::unreachable_clients();
        let pull = move |pod: Option<&Pod>, _: &str, _: Duration, _: &StopToken| match pod {
            Some(pod) if pod.name() == right => Ok("sha256:1".to_owned()),
            _ => Err(PullError::Runtime(vec!["unauthorized".to_owned()])),
        };
        let checker = Checker {
            runtime,
            images,
            archives: ImageSet::default(),
            replaced: std::sync::Arc::default(),
            restarts: Box::new(|_, _, _| false),
            pods: Box::new(move || Some(pods.clone())),
            pull: Box::new(pull),
            removes: true,
            missing: std::sync::Arc::default(),
        };
        checker.pull("app:1", "docker.io/library/app:1", PULL_LIMIT, &StopToken::never())
    }

    #[test]
    fn pods_without_credentials_do_not_hide_those_that_can_pull() {
        let mut pods: Vec<Pod> =
            (0..20).map(|n| user(&format!("a{}", n % 3), &format!("none{n}"), false)).collect();
        pods.push(user("b", "right", true));
        assert_eq!(pull(pods, "right"), Ok("sha256:1".to_owned()));
        // Also not pods of another namespace with wrong ones.
        let mut pods: Vec<Pod> = (0..20).map(|n| user("a", &format!("wrong{n}"), true)).collect();
        pods.push(user("b", "right", true));
        assert_eq!(pull(pods, "right"), Ok("sha256:1".to_owned()));
        // Nor those of a pod that needs none.
        let mut pods: Vec<Pod> =
            (0..20).map(|n| user(&format!("a{n}"), &format!("wrong{n}"), true)).collect();
        pods.push(user("b", "right", false));
        assert_eq!(pull(pods, "right"), Ok("sha256:1".to_owned()));
    }

    #[test]
    fn each_pod_is_chosen_for_a_pull_at_some_try() {
        let names = ["docker.io/library/app:1".to_owned()];
        for (namespaces, has_secret) in [(1, true), (1, false), (12, true), (12, false), (36, true)] {
            let pods: Vec<Pod> = (0..36)
                .map(|n| user(&format!("n{}", n % namespaces), &format!("p{n}"), has_secret))
                .collect();
            let chosen: std::collections::BTreeSet<String> = (0..36)
                .flat_map(|start| {
                    let chosen = users(&pods, &names, start);
                    assert_eq!(chosen.len(), MAX_PODS);
                    chosen.into_iter().map(|pod| pod.name().to_owned()).collect::<Vec<_>>()
                })
                .collect();
            assert_eq!(chosen.len(), 36, "{namespaces} namespaces");
        }
        assert!(users(&[], &names, 7).is_empty());
        assert_eq!(users(&[user("a", "one", true), user("a", "two", false)], &names, 7).len(), 2);
        assert!(users(&[user("a", "one", true)], &["docker.io/library/app:2".to_owned()], 0).is_empty());
    }

    #[test]
    fn digest_that_another_pod_uses_is_not_removed_with_a_tag() {
        let pod_with = |name: &str, image: &str| {
            let spec = json!({"containers": [{"name": "c", "image": image}]});
            let pod = json!({"metadata": {"namespace": "n", "name": name}, "spec": spec});
            Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap())
        };
        let digest = digest_of("registry.corp/app");
        let names = [digest.clone(), "registry.corp/app:1".to_owned()];
        let pods = [
            pod_with("one", "registry.corp/app:1"),
            pod_with("other", "registry.corp/other:1"),
            pod_with("two", &digest),
        ];
        assert!(other_name(&pods[..2], "registry.corp/app:1", &names).is_none());
        let (pod, name) = other_name(&pods, "registry.corp/app:1", &names).unwrap();
        assert_eq!((pod.name(), name), ("two", digest.clone()));
        assert_eq!(other_name(&pods, &digest, &names).unwrap().0.name(), "one");
        assert!(other_name(&pods[..1], "registry.corp/app:1", &names[1..]).is_none());
    }

    #[test]
    fn pod_that_never_pulls_an_image_keeps_it() {
        let pod = |value: serde_json::Value| {
            Pod::from(serde_json::from_value::<crate::model::api::Pod>(json!({"spec": value})).unwrap())
        };
        let names = ["docker.io/library/app:1".to_owned()];
        let container =
            |image: &str, policy: &str| json!({"name": "c", "image": image, "imagePullPolicy": policy});
        for (spec, expected) in [
            (json!({"containers": [container("app:1", "Never")]}), true),
            (json!({"containers": [container("app:1", "IfNotPresent")]}), false),
            (json!({"containers": [container("app:2", "Never")]}), false),
            (json!({"containers": [], "initContainers": [container("app:1", "Never")]}), true),
            (json!({"containers": [], "ephemeralContainers": [container("app:1", "Never")]}), true),
            (
                json!({"containers": [], "volumes": [{"name": "v", "image": {"reference": "app:1", "pullPolicy": "Never"}}]}),
                true,
            ),
        ] {
            assert_eq!(never_pulls(&pod(spec.clone()), &names), expected, "{spec}");
        }
    }
}
