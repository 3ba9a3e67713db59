//! The authentication state of one connection.

use jiff::Timestamp;

use crate::kube::reviews::User;
use crate::transport::tls::Verification;

/// Requests in a row that may fail to authenticate before the connection is closed. A client
/// whose token was replaced needs one or two; a client that guesses needs a new handshake.
///
/// DIFFERS: the Go kubelet sends any number of 401 responses on one connection.
const MAX_UNAUTHENTICATED: u32 = 3;

/// Returns the client's certificates in DER, its own one first.
pub(crate) type Certificates<'a> = dyn Fn() -> Vec<Vec<u8>> + 'a;

/// The authentication state of the client of one connection.
#[derive(Debug, Default)]
pub(crate) struct ClientAuth {
    /// The result for its certificates, which are the same for all its requests.
    pub(super) verified: Option<VerifiedCertificate>,
    /// Requests in a row that failed to authenticate.
    unauthenticated: u32,
}

impl ClientAuth {
    /// Counts a request by whether it could be authenticated.
    pub(super) fn authenticated(&mut self, outcome: bool) {
        self.unauthenticated = if outcome { 0 } else { self.unauthenticated.saturating_add(1) };
    }

    /// Whether the client may send another request on this connection.
    pub(crate) fn may_continue(&self) -> bool {
        self.unauthenticated < MAX_UNAUTHENTICATED
    }
}

/// The user of a certificate, or why it is invalid; `None`: it names no user.
#[derive(Debug)]
pub(super) struct VerifiedCertificate {
    /// The generation of the authorities.
    pub generation: u64,
    pub verification: Verification,
    pub user: Result<Option<User>, String>,
}

impl VerifiedCertificate {
    /// Whether verifying again, at this time and by authorities of this generation, would have
    /// the same result.
    pub(super) fn is_current(&self, generation: u64, now: Timestamp) -> bool {
        self.generation == generation && self.verification.holds(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_unauthenticated_requests_in_a_row_end_a_connection() {
        let mut client = ClientAuth::default();
        let mut after = |outcome| {
            client.authenticated(outcome);
            client.may_continue()
        };
        assert_eq!(
            [false, false, true, false, false, false, false].map(&mut after),
            [true, true, true, true, true, false, false]
        );
    }
}
