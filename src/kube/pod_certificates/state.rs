//! The state of one certificate (pure).

use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;

use super::{CertificateError, Credential};
use crate::model::reasons::{CERTIFICATE_EXPIRED as EXPIRED, CERTIFICATE_OVERDUE_FOR_REFRESH as OVERDUE};
use crate::util::secret::Secret;

/// A certificate that is not renewed this long after its time is overdue.
const OVERDUE_AFTER: SignedDuration = SignedDuration::from_mins(10);
/// Wait after a failed renewal; doubles.
const RETRY: Duration = Duration::from_secs(5);
/// The longest of these waits.
const RETRY_MAX: Duration = Duration::from_secs(300);

/// A condition of a PodCertificateRequest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// `Issued`, `Denied` or `Failed`.
    #[serde(rename = "type")]
    pub type_: String,
    /// The signer's reason.
    pub reason: String,
    /// The signer's message.
    pub message: String,
}

/// A request that was created.
pub(super) struct Pending {
    pub(super) name: String,
    /// The private key in PEM.
    pub(super) key: Secret<String>,
    pub(super) created: Instant,
}

/// A certificate that was issued.
pub(super) struct IssuedCertificate {
    credential: Credential,
    begin_refresh_at: Timestamp,
    not_after: Timestamp,
    warned_overdue: bool,
    warned_expired: bool,
    /// When a failed renewal may be tried again, and the wait after that.
    retry: Option<(Instant, Duration)>,
}

impl IssuedCertificate {
    fn overdue_at(&self) -> Timestamp {
        self.begin_refresh_at.saturating_add(OVERDUE_AFTER).unwrap_or(Timestamp::MAX)
    }
}

/// The state of a request, as its status says.
pub(super) enum SignerResponse {
    Pending,
    /// There is no such request any more.
    Deleted,
    Refused(&'static str, Condition),
    Issued {
        chain: String,
        begin_refresh_at: Timestamp,
        not_after: Timestamp,
    },
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    Create,
    Read { name: String, created: Instant },
    Use,
}

/// The state of one certificate. The default: nothing was requested.
#[derive(Default)]
pub(super) struct State {
    issued: Option<IssuedCertificate>,
    pending: Option<Pending>,
    /// The last request was denied or has failed; final, as upstream.
    refused: Option<(&'static str, Condition)>,
}

impl State {
    pub(super) fn next(&self, now: Timestamp, instant: Instant) -> Step {
        if self.refused.is_some() {
            return Step::Use;
        }
        if let Some(pending) = &self.pending {
            return Step::Read { name: pending.name.clone(), created: pending.created };
        }
        match &self.issued {
            None => Step::Create,
            Some(issued) if now < issued.begin_refresh_at => Step::Use,
            Some(issued) if issued.retry.is_some_and(|(retry_at, _)| instant < retry_at) => Step::Use,
            Some(_) => Step::Create,
        }
    }

    pub(super) fn requested(&mut self, pending: Pending) {
        self.pending = Some(pending);
    }

    /// No request could be created. Whether there is an old certificate.
    pub(super) fn failed(&mut self, now: Instant) -> bool {
        let Some(issued) = &mut self.issued else { return false };
        let wait = issued.retry.map_or(RETRY, |(_, wait)| (wait * 2).min(RETRY_MAX));
        issued.retry = Some((now + wait, wait));
        true
    }

    /// The API server has returned: ends the wait after a failed renewal. Whether the pod is to be synced for a
    /// renewal: its next sync may be a minute away, also if that wait is over.
    pub(super) fn returned(&mut self, now: Instant) -> bool {
        let Some(issued) = &mut self.issued else { return false };
        if let Some((retry_at, _)) = &mut issued.retry {
            // The wait after another failure is as long as before.
            *retry_at = now.min(*retry_at);
        }
        issued.retry.is_some() || self.pending.is_some()
    }

    /// Handles what was read of the pending request. `jitter` is added to the time of the renewal.
    /// Whether the state has changed.
    pub(super) fn apply(&mut self, response: SignerResponse, jitter: SignedDuration) -> bool {
        match response {
            SignerResponse::Pending => return false,
            SignerResponse::Deleted => self.pending = None,
            SignerResponse::Refused(what, condition) => {
                self.pending = None;
                self.issued = None;
                self.refused = Some((what, condition));
            }
            SignerResponse::Issued { chain, begin_refresh_at, not_after } => {
                let Some(pending) = self.pending.take() else { return false };
                self.issued = Some(IssuedCertificate {
                    credential: Credential { key: pending.key, chain },
                    begin_refresh_at: begin_refresh_at.saturating_add(jitter).unwrap_or(Timestamp::MAX),
                    not_after,
                    warned_overdue: false,
                    warned_expired: false,
                    retry: None,
                });
            }
        }
        true
    }

    /// The name of the state in the metric (Go: `metricsState`).
    pub(super) fn name(&self, now: Timestamp) -> &'static str {
        match (&self.refused, &self.issued) {
            (Some((what, _)), _) => what,
            (None, None) => "not_yet_issued",
            (None, Some(issued)) if now > issued.not_after => "expired",
            (None, Some(issued)) if now > issued.overdue_at() => "overdue_for_refresh",
            (None, Some(_)) => "fresh",
        }
    }

    pub(super) fn has_credential(&self) -> bool {
        self.issued.is_some()
    }

    /// The credential; an expired one, too, as upstream.
    pub(super) fn credential(&self) -> Result<Credential, CertificateError> {
        if let Some((what, condition)) = &self.refused {
            let Condition { reason, message, .. } = condition.clone();
            return Err(CertificateError::Refused { what, reason, message });
        }
        self.issued.as_ref().map(|issued| issued.credential.clone()).ok_or(CertificateError::NotIssued)
    }

    /// The warnings about a certificate that is not renewed, each once: reason and message.
    pub(super) fn warnings(&mut self, now: Timestamp) -> Vec<(&'static str, &'static str)> {
        let mut warnings = Vec::new();
        let Some(issued) = &mut self.issued else { return warnings };
        if now > issued.overdue_at() && !std::mem::replace(&mut issued.warned_overdue, true) {
            warnings.push((OVERDUE, "PodCertificate refresh overdue"));
        }
        if now > issued.not_after && !std::mem::replace(&mut issued.warned_expired, true) {
            warnings.push((EXPIRED, "PodCertificate expired"));
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn second(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    fn pending(name: &str) -> Pending {
        Pending { name: name.to_owned(), key: format!("key of {name}").into(), created: Instant::now() }
    }

    fn issued() -> SignerResponse {
        SignerResponse::Issued {
            chain: "chain".to_owned(),
            begin_refresh_at: second(1000),
            not_after: second(5000),
        }
    }

    fn fresh() -> State {
        let mut state = State::default();
        state.requested(pending("r1"));
        assert!(state.apply(issued(), SignedDuration::from_secs(60)));
        state
    }

    #[test]
    fn certificate_is_requested_read_and_renewed() {
        let instant = Instant::now();
        let mut state = State::default();
        assert_eq!(state.next(second(0), instant), Step::Create);
        assert_eq!(state.credential(), Err(CertificateError::NotIssued));
        state.requested(pending("r1"));
        assert!(matches!(state.next(second(0), instant), Step::Read { name, .. } if name == "r1"));
        assert!(!state.apply(SignerResponse::Pending, SignedDuration::ZERO));
        let mut state = fresh();
        assert_eq!(state.next(second(1059), instant), Step::Use);
        assert_eq!(state.next(second(1060), instant), Step::Create);
        state.requested(pending("r2"));
        assert_eq!(state.credential().unwrap().key(), "key of r1");
        assert!(state.apply(issued(), SignedDuration::ZERO));
        assert_eq!(state.credential().unwrap().key(), "key of r2");
    }

    #[test]
    fn deleted_request_is_repeated_and_a_refused_one_is_final() {
        let instant = Instant::now();
        let mut state = State::default();
        state.requested(pending("r1"));
        assert!(state.apply(SignerResponse::Deleted, SignedDuration::ZERO));
        assert_eq!(state.next(second(0), instant), Step::Create);
        let mut state = fresh();
        state.requested(pending("r2"));
        let condition = Condition { type_: "Denied".into(), reason: "No".into(), message: "never".into() };
        assert!(state.apply(SignerResponse::Refused("denied", condition), SignedDuration::ZERO));
        assert_eq!(state.next(second(9999), instant), Step::Use);
        let expected = "PodCertificateRequest was permanently denied: reason=\"No\" message=\"never\"";
        assert_eq!(state.credential().unwrap_err().to_string(), expected);
    }

    #[test]
    fn metric_names_the_state_by_time_and_refusal() {
        assert_eq!(State::default().name(second(0)), "not_yet_issued");
        let mut state = State::default();
        state.requested(pending("r1"));
        assert_eq!(state.name(second(0)), "not_yet_issued");
        // With the time that was added, the renewal begins at 1060.
        let mut state = fresh();
        let names = [1060, 1660, 1661, 5000, 5001].map(|time| state.name(second(time)));
        assert_eq!(names, ["fresh", "fresh", "overdue_for_refresh", "overdue_for_refresh", "expired"]);
        // A renewal that is not answered does not change it.
        state.requested(pending("r2"));
        assert_eq!(state.name(second(1060)), "fresh");
        for what in ["denied", "failed"] {
            let mut state = State::default();
            state.apply(SignerResponse::Refused(what, Condition::default()), SignedDuration::ZERO);
            assert_eq!(state.name(second(0)), what);
        }
    }

    #[test]
    fn failed_renewal_waits_and_late_one_warns_once() {
        let instant = Instant::now();
        assert!(!State::default().failed(instant));
        let mut state = fresh();
        assert!(state.failed(instant));
        assert_eq!(state.next(second(2000), instant), Step::Use);
        assert_eq!(state.next(second(2000), instant + RETRY), Step::Create);
        assert!(state.warnings(second(1660)).is_empty());
        assert_eq!(state.warnings(second(1661)), [(OVERDUE, "PodCertificate refresh overdue")]);
        assert_eq!(state.warnings(second(5001)), [(EXPIRED, "PodCertificate expired")]);
        assert!(state.warnings(second(9000)).is_empty());
        assert!(state.credential().is_ok());
    }

    #[test]
    fn return_of_the_api_server_syncs_a_pod_until_its_renewal_has_succeeded() {
        let instant = Instant::now();
        assert!(!State::default().returned(instant));
        let mut state = fresh();
        assert!(!state.returned(instant), "nothing has failed");
        assert!(state.failed(instant));
        assert!(state.returned(instant));
        assert_eq!(state.next(second(2000), instant), Step::Create);
        // No sync came since the end of the wait.
        assert!(state.failed(instant) && state.returned(instant + RETRY_MAX));
        // Its request may have been read without success.
        let mut state = fresh();
        state.requested(pending("r2"));
        assert!(state.returned(instant));
        assert!(state.apply(issued(), SignedDuration::ZERO) && !state.returned(instant));
    }

    proptest! {
        /// A certificate, once issued, is lost only by a refusal.
        #[test]
        fn credential_stays_until_a_refusal(steps in proptest::collection::vec(0..5_u8, 0..40)) {
            let mut state = fresh();
            let instant = Instant::now();
            for (n, step) in steps.into_iter().enumerate() {
                let now = second(i64::try_from(n).unwrap() * 500);
                match step {
                    0 => drop(state.warnings(now)),
                    1 if state.next(now, instant) == Step::Create => state.requested(pending("next")),
                    2 => drop(state.apply(SignerResponse::Deleted, SignedDuration::ZERO)),
                    3 => drop(state.apply(issued(), SignedDuration::ZERO)),
                    _ => drop(state.failed(instant)),
                }
                prop_assert!(state.credential().is_ok());
            }
        }
    }
}
