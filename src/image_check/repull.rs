//! Removes an image and pulls it again: the last resort, if no intact copy of a damaged layer is on the
//! node. It cannot replace a layer that a container or another image uses, because the runtime keeps
//! that.

use std::time::{Duration, Instant};

use super::check::Checker;
use super::storage::{Unpacked, spec};
use crate::cri::{Class, CriError};
use crate::model::ids::{ContainerId, PodUid};
use crate::model::labels;
use crate::transport::generated::runtime::{Container, ContainerFilter, ContainerState};
use crate::util::stop::{StopToken, Waited};

/// How often, and after which pause, the removal of the containers is tried: one that fails may
/// just be starting again.
const REMOVALS: u32 = 6;
const REMOVAL_PAUSE: Duration = Duration::from_secs(1);
/// How long a container that is being made is waited for.
const CREATE_LIMIT: Duration = Duration::from_secs(60);
/// The longest pull by all names of the image, before its removal and after it. After the removal no
/// container of it is made meanwhile.
const PULL_LIMIT: Duration = Duration::from_mins(10);
/// The first pause between two pulls of an image that was removed, and the longest one.
const PULL_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PULL_PAUSE: Duration = Duration::from_secs(60);

/// An image that is pulled again.
pub(super) struct Repull<'a> {
    pub(super) checker: &'a Checker,
    pub(super) unpacked: &'a Unpacked,
    /// The name by which the check was requested.
    pub(super) requested: &'a str,
    pub(super) stop: &'a StopToken,
}

impl Repull<'_> {
    /// Removes the image and pulls it again. Returns what did not succeed after the removal.
    ///
    /// # Errors
    /// Why the image was not removed.
    pub(super) fn run(&self) -> Result<Vec<String>, String> {
        let Repull { checker, unpacked, requested, stop } = *self;
        self.try_pull()?;
        // A worker would start its container again as soon as the failed one is removed, and that would
        // keep the damaged layer.
        let mut names: Vec<&str> = unpacked.names.iter().map(String::as_str).collect();
        names.push(&unpacked.id);
        let _closed = checker
            .replaced
            .close(&names, CREATE_LIMIT, stop)
            .ok_or("the image is not pulled again while a container of it is made")?;
        self.remove_containers(&names)?;
        self.go_on()?;
        // A failed removal may have removed the image, or some of its names.
        let mut names = names_in_order(&unpacked.names);
        let removed = checker.images.remove_image(spec(&unpacked.id)).map_err(|error| error.to_string());
        if let (Err(error), Ok(Some(left))) = (&removed, checker.images.image_status(spec(&unpacked.id))) {
            // A tag that it still has could move to another image.
            names.retain(|name| !left.repo_tags.iter().chain(&left.repo_digests).any(|kept| kept == name));
            if names.is_empty() {
                return Err(error.clone());
            }
        }
        let begun = Instant::now();
        let pull = |name: &str| {
            // The pull does not end with the check: without it, the node would be left without the image.
            // At the end of the agent it has the second until the agent's exit, and what the runtime
            // has pulled by then stays.
            self.pull(name, PULL_LIMIT.saturating_sub(begun.elapsed()), &StopToken::never())
        };
        // The pod needs the name, and other pods may need the image by its digest.
        let is_there = || {
            [requested, &unpacked.id]
                .iter()
                .all(|name| matches!(checker.images.image_status(spec(name)), Ok(Some(_))))
        };
        let pause = |pause| begun.elapsed() + pause < PULL_LIMIT && stop.wait(pause) == Waited::TimedOut;
        let problems = pull_removed(&names, &unpacked.id, pull, is_there, pause);
        let refused = removed.err().map(|error| format!("the image cannot be removed: {error}"));
        Ok(problems.into_iter().chain(refused).collect())
    }

    fn go_on(&self) -> Result<(), String> {
        if self.stop.is_stopped() { Err("the check was ended".to_owned()) } else { Ok(()) }
    }

    /// Pulls the image by one of its names: an image that cannot be pulled is better damaged than
    /// removed. A tag is used only for an image without digests, because it may have become that of
    /// another image, which would then be on the node.
    ///
    /// This shows that the registry answers and still has the image. It does not show that the layers
    /// can be loaded, because the runtime does not load layers that it has.
    fn try_pull(&self) -> Result<(), String> {
        let begun = Instant::now();
        let mut why = "the image has no name by which it can be pulled".to_owned();
        let names = names_in_order(&self.unpacked.names);
        let has_digests = names.first().is_some_and(|name| is_digest(name));
        for name in names.into_iter().filter(|name| is_digest(name) == has_digests) {
            match self.pull(name, PULL_LIMIT.saturating_sub(begun.elapsed()), self.stop) {
                Ok(id) if id == self.unpacked.id => return self.go_on(),
                Ok(_) => why = format!("{name} is another image in its registry now"),
                Err(error) => why = format!("the image cannot be pulled again: {error}"),
            }
        }
        Err(why)
    }

    /// Pulls an image, and returns its id, which may be that of another image than before.
    fn pull(&self, name: &str, limit: Duration, stop: &StopToken) -> Result<String, String> {
        let images = &self.checker.images;
        let failed = |error: CriError| error.to_string();
        images.pull_image(spec(name), None, None, Some(limit), stop).map_err(failed)?;
        let found = images.image_status(spec(name)).map_err(failed)?;
        found.map(|image| image.id).ok_or_else(|| "the runtime does not have it".to_owned())
    }

    /// Removes the containers of the image, which keep its layers.
    fn remove_containers(&self, names: &[&str]) -> Result<(), String> {
        let mut tries = 0;
        loop {
            self.go_on()?;
            let why = match self.try_remove_containers(names) {
                Ok(()) => return Ok(()),
                Err(Blocked::ForGood(why)) => return Err(why),
                Err(Blocked::ForNow(why)) => why,
            };
            tries += 1;
            if tries == REMOVALS || self.stop.wait(REMOVAL_PAUSE) == Waited::Stopped {
                return Err(why);
            }
        }
    }

    /// None is removed if one has to stay.
    fn try_remove_containers(&self, names: &[&str]) -> Result<(), Blocked> {
        let runtime = &self.checker.runtime;
        let mut all = runtime.list_containers(ContainerFilter::default())?;
        all.retain(|one| [&one.image_ref, &one.image_id].iter().any(|of| names.contains(&of.as_str())));
        for one in &all {
            self.may_remove(one)?;
        }
        for one in &all {
            runtime.remove_container(&ContainerId::from(one.id.as_str()))?;
        }
        Ok(())
    }

    /// A container that has ended for good is the record of that: without it, it would run again. One
    /// that was never started is no record of anything.
    fn may_remove(&self, container: &Container) -> Result<(), Blocked> {
        let id = ContainerId::from(container.id.as_str());
        let refusal = |which: &str| format!("the image is not pulled again while {which}");
        match container.state.enum_value() {
            Ok(ContainerState::CONTAINER_CREATED) => return Ok(()),
            Ok(ContainerState::CONTAINER_EXITED) => {}
            Ok(ContainerState::CONTAINER_RUNNING) => {
                return Err(Blocked::ForNow(refusal(&format!("the container {id} runs"))));
            }
            _ => {
                return Err(Blocked::ForNow(refusal(&format!("the state of the container {id} is unknown"))));
            }
        }
        let label = |key| container.labels.get(key).map(String::as_str).unwrap_or_default();
        let (uid, name) = (label(labels::POD_UID), label(labels::CONTAINER_NAME));
        let status = match self.checker.runtime.container_status(&id) {
            Ok(status) => status,
            Err(error) if error.class() == Class::Gone => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if (self.checker.restarts)(&PodUid::from(uid), name, status.exit_code) {
            return Ok(());
        }
        Err(Blocked::ForGood(refusal(&format!("the finished container {id} is kept"))))
    }
}

/// Why the containers of an image cannot be removed.
enum Blocked {
    /// This may end within seconds.
    ForNow(String),
    /// As long as the pod is there.
    ForGood(String),
}

impl From<CriError> for Blocked {
    fn from(error: CriError) -> Self {
        Blocked::ForNow(error.to_string())
    }
}

fn is_digest(name: &str) -> bool {
    name.contains('@')
}

/// Digests first: after the image is there by its digest, tags of it cost nothing.
fn names_in_order(names: &[String]) -> Vec<&str> {
    let (digests, tags): (Vec<&str>, Vec<&str>) =
        names.iter().map(String::as_str).partition(|name| is_digest(name));
    [digests, tags].concat()
}

/// Pulls an image that was removed, by all of its names, again and again until it `is_there` or all
/// pulls succeed. `pull` returns the id of the image that has a name then. `pause` waits, and returns
/// whether there is time for another attempt. Returns the problems of the last attempt.
fn pull_removed(
    names: &[&str],
    id: &str,
    pull: impl Fn(&str) -> Result<String, String>,
    is_there: impl Fn() -> bool,
    pause: impl Fn(Duration) -> bool,
) -> Vec<String> {
    let mut length = PULL_PAUSE;
    loop {
        let results: Vec<_> = names.iter().map(|name| (name, pull(name))).collect();
        if results.iter().all(|(_, result)| result.is_ok()) || is_there() || !pause(length) {
            let problem = |(name, result): &(&&str, Result<String, String>)| match result {
                Err(error) => Some(format!("the image cannot be pulled again as {name}: {error}")),
                Ok(found) if found == id => None,
                Ok(found) => Some(format!("{name} is another image in its registry now: {found}")),
            };
            return results.iter().filter_map(problem).collect();
        }
        length = (length * 2).min(LONGEST_PULL_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    const NAMES: [&str; 2] = ["app@sha256:1", "app:1"];

    /// The pauses that were made, and the problems, if pulls by the two names have these results in
    /// turn, and there is time for this number of pauses. The image was requested by its tag.
    fn pulls(results: &[Result<&str, &str>], pauses: usize) -> (Vec<u64>, Vec<String>) {
        let (next, made) = (Cell::new(0), RefCell::new(Vec::new()));
        let pull = |_: &str| {
            let result = results[next.replace(next.get() + 1)];
            result.map(str::to_owned).map_err(str::to_owned)
        };
        let pause = |length: Duration| {
            made.borrow_mut().push(length.as_secs());
            made.borrow().len() <= pauses
        };
        let is_there = || {
            let last = &results[next.get() - NAMES.len()..next.get()];
            last[1].is_ok() && last.contains(&Ok("1"))
        };
        let problems = pull_removed(&NAMES, "1", pull, is_there, pause);
        assert_eq!(next.get(), results.len());
        (made.into_inner(), problems)
    }

    #[test]
    fn removed_image_is_pulled_until_it_has_the_requested_name() {
        let away = Err("no route to host");
        assert_eq!(pulls(&[Ok("1"), Ok("1")], 9), (vec![], vec![]));
        // Its digest alone does not help the pod.
        let results = [away, away, Ok("1"), away, away, Ok("1")];
        let problem = "the image cannot be pulled again as app@sha256:1: no route to host";
        assert_eq!(pulls(&results, 9), (vec![5, 10], vec![problem.to_owned()]));
        // There is no more time.
        let (pauses, problems) = pulls(&[away; 14], 6);
        assert_eq!((pauses, problems.len()), (vec![5, 10, 20, 40, 60, 60, 60], 2));
    }

    #[test]
    fn names_of_another_image_are_reported_and_not_pulled_again() {
        let moved = "app:1 is another image in its registry now: 2".to_owned();
        assert_eq!(pulls(&[Ok("1"), Ok("2")], 9), (vec![], vec![moved.clone()]));
        assert_eq!(pulls(&[Ok("2"), Ok("2")], 9).0, Vec::<u64>::new());
        // The digest is pulled again.
        assert_eq!(pulls(&[Err("reset"), Ok("2"), Ok("1"), Ok("2")], 9), (vec![5], vec![moved]));
    }

    #[test]
    fn digests_are_pulled_before_tags() {
        let names = ["a:1", "a@sha256:1", "b:1"].map(str::to_owned);
        assert_eq!(names_in_order(&names), ["a@sha256:1", "a:1", "b:1"]);
    }
}
