//! What is known of the client of one connection.

use jiff::Timestamp;

use crate::kube::reviews::User;
use crate::transport::tls::Verdict;

/// Requests in a row that may fail to authenticate before the connection is closed. A client
/// whose token was replaced needs one or two; one that guesses has to shake hands again.
///
/// DIFFERS: the Go kubelet sends any number of 401 responses on one connection.
const MAX_UNAUTHENTICATED: u32 = 3;

/// Shows the client's certificates in DER, its own one first.
pub(in crate::server) type Certificates<'a> = dyn Fn() -> Vec<Vec<u8>> + 'a;

/// The client of one connection.
#[derive(Debug, Default)]
pub(in crate::server) struct Visitor {
    /// What its certificates have shown; they are the same for all its requests.
    pub(super) known: Option<Known>,
    /// Requests in a row that failed to authenticate.
    unauthenticated: u32,
}

impl Visitor {
    /// Counts a request by whether it could be authenticated.
    pub(super) fn authenticated(&mut self, outcome: bool) {
        self.unauthenticated = if outcome { 0 } else { self.unauthenticated.saturating_add(1) };
    }

    /// Whether the client may ask again on this connection.
    pub(in crate::server) fn may_go_on(&self) -> bool {
        self.unauthenticated < MAX_UNAUTHENTICATED
    }
}

/// Whose certificate it is, or why that is not known; `None`: it names no user.
#[derive(Debug)]
pub(super) struct Known {
    /// Of the authorities that it was verified by.
    pub generation: u64,
    pub verdict: Verdict,
    pub user: Result<Option<User>, String>,
}

impl Known {
    /// Whether verifying again, at this time and by authorities of this generation, would show
    /// the same.
    pub(super) fn counts(&self, generation: u64, now: Timestamp) -> bool {
        self.generation == generation && self.verdict.holds(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_unauthenticated_requests_in_a_row_end_a_connection() {
        let mut visitor = Visitor::default();
        let mut after = |outcome| {
            visitor.authenticated(outcome);
            visitor.may_go_on()
        };
        assert_eq!(
            [false, false, true, false, false, false, false].map(&mut after),
            [true, true, true, true, true, false, false]
        );
    }
}
