//! Names of images that were removed so that they are pulled again, until each is back. A name is reserved
//! here before it is removed, so that none is lost, whatever ends the check.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::turns::Turns;

use crate::util::clip;
use crate::util::lock::LockExt;

/// The namespace whose pod caused the check; `None` for a check on request.
pub(super) type CheckNamespace = Option<String>;

/// The most names of one namespace. The images of one namespace leave the others to the other namespaces.
const MAX_OF_NAMESPACE: usize = 64;
const MAX_NAMES: usize = 1024;
/// How many of them are for namespaces that have none.
const FOR_FIRST: usize = MAX_NAMES / 4;
/// The first pause between two pulls by a name, and the longest one.
const PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// The most bytes of the reason of a failed pull: the registry may have written it.
const MAX_REASON: usize = 1024;

/// A name that was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MissingName {
    /// The name that pods use.
    requested: String,
    namespace: CheckNamespace,
    /// The next pull; `None` while the check itself removes and pulls it.
    due: Option<Instant>,
    /// The pause after the next pull.
    pause: Duration,
    /// Why it is not back.
    reason: String,
}

/// Why names are not reserved.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) reason: String,
    /// Whether there are too many; if not, another check has one of them.
    pub(super) is_full: bool,
}

impl Refusal {
    fn full(reason: String) -> Refusal {
        Refusal { reason: format!("the image is not pulled again{reason}"), is_full: true }
    }
}

/// See the documentation of the module.
#[derive(Debug, Default)]
pub(super) struct MissingNames {
    names: BTreeMap<String, MissingName>,
    turns: Turns,
}

/// A pull by a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pull {
    pub(super) name: String,
    pub(super) requested: String,
}

impl MissingNames {
    /// Reserves places for the names of an image that are about to be removed. Returns those that are
    /// missing already: if the check ends before it removes the image, they are to be put back.
    ///
    /// # Errors
    /// When there are too many, or another check has reserved one of them; then none is reserved.
    fn reserve(
        &mut self,
        namespace: &CheckNamespace,
        requested: &str,
        names: &[String],
    ) -> Result<BTreeMap<String, MissingName>, Refusal> {
        let is_reserved = |name: &&String| self.names.get(*name).is_some_and(|known| known.due.is_none());
        if let Some(name) = names.iter().find(is_reserved) {
            let reason = format!("the image is not pulled again, because another check removes {name}");
            return Err(Refusal { reason, is_full: false });
        }
        let new = names.iter().filter(|name| !self.names.contains_key(*name)).count();
        let is_own = |name: &String| self.names.get(name).is_some_and(|known| known.namespace == *namespace);
        let more = names.iter().filter(|name| !is_own(name)).count();
        let own = self.names.values().filter(|name| name.namespace == *namespace).count();
        if own + more > MAX_OF_NAMESPACE {
            return Err(Refusal::full(format!(
                ", because it has {} names and {own} of other images are not back \
                 yet: there may be {MAX_OF_NAMESPACE} at a time",
                names.len()
            )));
        }
        let limit = if own == 0 { MAX_NAMES } else { MAX_NAMES - FOR_FIRST };
        if self.names.len() + new > limit {
            let all = self.names.len();
            return Err(Refusal::full(format!(" while {all} names of other images are not back")));
        }
        let mut previous = BTreeMap::new();
        for name in names {
            let (requested, namespace) = (requested.to_owned(), namespace.clone());
            let missing =
                MissingName { requested, namespace, due: None, pause: PAUSE, reason: String::new() };
            let known = self.names.insert(name.clone(), missing).filter(|known| known.due.is_some());
            previous.extend(known.map(|known| (name.clone(), known)));
        }
        Ok(previous)
    }

    /// Notes the end of the check that has reserved these names: those of `missing` are not back.
    fn settle(&mut self, names: &[String], missing: &[UnpulledName], now: Instant) {
        for name in names {
            match (self.names.get_mut(name), missing.iter().find(|other| other.name == *name)) {
                (Some(name), Some(UnpulledName { reason, .. })) => {
                    name.due = Some(now + PAUSE);
                    name.reason = clip::beginning(reason, MAX_REASON).to_owned();
                }
                _ => drop(self.names.remove(name)),
            }
        }
    }

    /// When the next name is to be pulled. `None`: there is none, or the check still has it.
    pub(super) fn due(&self) -> Option<Instant> {
        self.names.values().filter_map(|name| name.due).min()
    }

    /// The next pull, if one is due: of the namespace whose last turn is the longest ago the name that is due
    /// for the longest time. So a registry that does not answer delays the names of others by one pull.
    pub(super) fn next(&mut self, now: Instant) -> Option<Pull> {
        let is_due = |name: &MissingName| name.due.is_some_and(|due| due <= now);
        let turn = |name: &MissingName| self.turns.last(name.namespace.as_deref().unwrap_or_default());
        let due = self.names.iter().filter(|(_, name)| is_due(name));
        let (name, next) = due.min_by_key(|(_, name)| (turn(name), name.due))?;
        let pull = Pull { name: name.clone(), requested: next.requested.clone() };
        self.turns.take(next.namespace.as_deref().unwrap_or_default());
        // Also if the thread dies.
        if let Some(next) = self.names.get_mut(&pull.name) {
            next.due = Some(now + next.pause);
        }
        Some(pull)
    }

    /// Notes the result of a pull: `Err` has the reason why it failed.
    pub(super) fn pulled(&mut self, name: &str, result: &Result<(), String>, now: Instant) {
        match (self.names.get_mut(name), result) {
            // A check has it again.
            (Some(MissingName { due: None, .. }), _) => {}
            (Some(missing), Err(reason)) => {
                missing.pause = (missing.pause * 2).min(LONGEST_PAUSE);
                missing.due = Some(now + missing.pause);
                missing.reason = clip::beginning(reason, MAX_REASON).to_owned();
            }
            _ => drop(self.names.remove(name)),
        }
    }

    /// Names that are not back, and why.
    pub(super) fn problems(&self) -> impl Iterator<Item = String> {
        let missing = self.names.iter().filter(|(_, missing)| missing.due.is_some());
        missing.map(|(name, missing)| {
            let reason = &missing.reason;
            format!("image {name} was removed because it was damaged, and cannot be pulled again: {reason}")
        })
    }
}

/// Names of an image that a check removes. If it ends without a result, all that may have been removed are
/// pulled.
pub(super) struct Reservation {
    all: Arc<Mutex<MissingNames>>,
    names: Vec<String>,
    missing: Vec<UnpulledName>,
    /// Those that were missing before. Until this check removes the image, they remain so.
    previous: BTreeMap<String, MissingName>,
}

/// A name that was removed and is not back.
struct UnpulledName {
    name: String,
    reason: String,
}

impl UnpulledName {
    fn new(name: &str, reason: &str) -> UnpulledName {
        UnpulledName { name: name.to_owned(), reason: reason.to_owned() }
    }
}

impl Reservation {
    /// Reserves places for the names before they are removed.
    ///
    /// # Errors
    /// When there are too many, or another check has reserved one of them.
    pub(super) fn new(
        all: &Arc<Mutex<MissingNames>>,
        namespace: &CheckNamespace,
        requested: &str,
        names: &[String],
    ) -> Result<Reservation, Refusal> {
        let previous = all.locked().reserve(namespace, requested, names)?;
        let (all, names) = (Arc::clone(all), names.to_vec());
        Ok(Reservation { all, names, missing: Vec::new(), previous })
    }

    /// From now on they are missing, until [`Reservation::pulled`].
    pub(super) fn removing(&mut self) {
        self.previous.clear();
        self.missing = self.names.iter().map(|name| UnpulledName::new(name, "the check was ended")).collect();
    }

    /// Notes the result of a pull.
    pub(super) fn pulled(&mut self, name: &str, result: &Result<(), String>) {
        match (self.missing.iter_mut().find(|other| other.name == name), result) {
            (Some(known), Err(reason)) => known.reason.clone_from(reason),
            _ => self.missing.retain(|other| other.name != name),
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut all = self.all.locked();
        all.settle(&self.names, &self.missing, Instant::now());
        all.names.append(&mut self.previous);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(prefix: &str, count: usize) -> Vec<String> {
        (0..count).map(|n| format!("{prefix}@{n}")).collect()
    }

    fn namespace(name: &str) -> CheckNamespace {
        Some(name.to_owned())
    }

    fn missing(names: &[String]) -> Vec<UnpulledName> {
        names.iter().map(|name| UnpulledName::new(name, "no route")).collect()
    }

    fn removed(all: &mut MissingNames, image: &str, count: usize, now: Instant) {
        let names = names(image, count);
        all.reserve(&namespace(image), image, &names).unwrap();
        all.settle(&names, &missing(&names), now);
    }

    #[test]
    fn image_with_more_names_than_can_be_pulled_again_is_refused_and_none_is_lost() {
        let (mut all, now) = (MissingNames::default(), Instant::now());
        let refusal = all.reserve(&namespace("a"), "app:1", &names("app", 65)).unwrap_err().reason;
        assert!(refusal.contains("it has 65 names") && refusal.contains("64 at a time"), "{refusal}");
        assert!(all.names.is_empty());
        removed(&mut all, "a", 64, now);
        assert_eq!((all.names.len(), all.problems().count()), (64, 64));
        // The names of one image again need no other places.
        assert!(all.reserve(&namespace("a"), "app:1", &names("a", 64)).is_ok());
        assert!(
            all.reserve(&namespace("a"), "app:1", &names("other", 1))
                .unwrap_err()
                .reason
                .contains("64 of other images")
        );
        assert!(all.reserve(&namespace("b"), "app:1", &names("other", 64)).is_ok());
        assert!(all.reserve(&None, "app:1", &names("request", 64)).is_ok());
    }

    /// The check on request and the one of a failed container may remove the same image. The end of one
    /// made the other's names forgotten.
    #[test]
    fn names_that_a_check_has_reserved_are_refused_to_another() {
        let (mut all, now) = (MissingNames::default(), Instant::now());
        let (first, second) = (names("app", 2), names("app", 3));
        all.reserve(&None, "app:1", &first).unwrap();
        let refusal = all.reserve(&namespace("a"), "app:1", &second).unwrap_err();
        assert!(refusal.reason.contains("another check removes app@0") && !refusal.is_full, "{refusal:?}");
        assert_eq!(all.names.len(), 2);
        all.settle(&first, &missing(&first), now);
        assert_eq!(all.problems().count(), 2);
        all.reserve(&namespace("a"), "app:1", &second).unwrap();
    }

    #[test]
    fn namespaces_with_many_names_leave_places_to_others() {
        let mut all = MissingNames::default();
        for n in 0..100 {
            for m in 0..10 {
                let _ = all.reserve(&namespace(&n.to_string()), "app", &names(&format!("{n}/{m}"), 6));
            }
        }
        assert!(all.names.len() <= MAX_NAMES, "{}", all.names.len());
        let mut all = MissingNames::default();
        for n in 0..20 {
            let own = namespace(&n.to_string());
            for m in 0..64 {
                let _ = all.reserve(&own, "app", &names(&format!("{n}/{m}"), 1));
            }
        }
        let names_of =
            |n: usize| all.names.values().filter(|name| name.namespace == namespace(&n.to_string())).count();
        assert!((0..20).all(|n| names_of(n) >= 1));
        let refusal = all.reserve(&namespace("15"), "app", &names("x", 1)).unwrap_err();
        assert!(refusal.reason.contains("names of other images") && refusal.is_full, "{refusal:?}");
        assert!(all.reserve(&namespace("new"), "app", &names("x", 64)).is_ok());
    }

    #[test]
    fn removed_names_are_pulled_with_growing_pauses_until_they_are_back() {
        let (mut all, mut now) = (MissingNames::default(), Instant::now());
        removed(&mut all, "a", 2, now);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            assert_eq!(all.next(now), None);
            let due = all.due().unwrap();
            pauses.push(due.duration_since(now).as_secs());
            now = due;
            let mut pulled = Vec::new();
            while let Some(pull) = all.next(now) {
                assert_eq!(pull.requested, "a");
                all.pulled(&pull.name, &Err("no route to host".to_owned()), now);
                pulled.push(pull.name);
            }
            assert_eq!(pulled, ["a@0", "a@1"]);
        }
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
        assert!(all.problems().all(|problem| problem.ends_with("cannot be pulled again: no route to host")));
        all.pulled("a@0", &Ok(()), now);
        all.pulled("a@1", &Ok(()), now);
        assert!(all.names.is_empty() && all.due().is_none());
    }

    #[test]
    fn names_of_one_namespace_delay_those_of_another_by_one_pull() {
        let (mut all, begun) = (MissingNames::default(), Instant::now());
        removed(&mut all, "many", 64, begun);
        removed(&mut all, "one", 1, begun + Duration::from_secs(60));
        let now = begun + Duration::from_secs(600);
        assert_eq!(all.next(now).unwrap().name, "many@0");
        assert_eq!(all.next(now).unwrap().name, "one@0");
        assert_eq!(all.next(now).unwrap().name, "many@1");
    }

    /// Another check has removed the image meanwhile, and could not pull it again. It was forgotten.
    #[test]
    fn names_that_are_missing_remain_so_if_another_check_ends_before_it_removes_them() {
        let all = Arc::<Mutex<MissingNames>>::default();
        let names = names("a", 2);
        removed(&mut all.locked(), "a", 1, Instant::now());
        let before = all.locked().names.clone();
        let reserve = || Reservation::new(&all, &namespace("b"), "other", &names).unwrap();
        drop(reserve());
        assert_eq!(all.locked().names, before);
        assert_eq!(all.locked().problems().count(), 1);
        let mut reservation = reserve();
        reservation.removing();
        for name in &names {
            reservation.pulled(name, &Ok(()));
        }
        drop(reservation);
        assert!(all.locked().names.is_empty(), "the image is back");
    }

    #[test]
    fn names_that_were_not_removed_are_forgotten_and_those_of_a_check_that_died_are_pulled() {
        let all = Arc::<Mutex<MissingNames>>::default();
        let names = names("a", 3);
        let reserve = || Reservation::new(&all, &namespace("a"), "a", &names).unwrap();
        drop(reserve());
        assert!(all.locked().names.is_empty());
        let mut reservation = reserve();
        reservation.removing();
        assert!(all.locked().due().is_none(), "the check has them");
        drop(reservation);
        assert_eq!(all.locked().problems().count(), 3);
        let mut reservation = reserve();
        reservation.removing();
        reservation.pulled("a@0", &Ok(()));
        reservation.pulled("a@1", &Err("x".repeat(9999)));
        drop(reservation);
        let left = all.locked();
        assert_eq!(left.names.keys().collect::<Vec<_>>(), ["a@1", "a@2"]);
        assert_eq!(left.names["a@1"].reason.len(), MAX_REASON);
    }
}
