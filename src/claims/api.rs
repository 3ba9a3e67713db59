//! The requests to the API server (Go: `ResourceClaims().Get`, `ResourceSlices().DeleteCollection`).

use std::time::Duration;

use super::info::ClaimKey;
use super::object::ResourceClaim;
use crate::kube::client::Client;
use crate::kube::error::ApiError;
use crate::kube::target::Target;
use crate::util::stop::Waited;

/// Time limit of a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Right after a pod was bound, the API server may not know yet that this node may read its claims.
const LAGS: [Duration; 3] =
    [Duration::from_millis(50), Duration::from_millis(150), Duration::from_millis(400)];

/// Why a claim could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ReadError {
    /// The text of the API server or of the client.
    pub text: String,
    /// Whether the API server did not respond: what was known before still holds.
    pub unavailable: bool,
}

/// The requests; a trait so that tests need no server.
pub trait ResourceClaimApi: Send + Sync {
    /// Reads a claim.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn read(&self, key: &ClaimKey) -> Result<ResourceClaim, ReadError>;

    /// Deletes all ResourceSlices that a field selector matches.
    ///
    /// # Errors
    /// That of the request.
    fn delete_slices(&self, selector: &str) -> Result<(), ApiError>;
}

/// Requests by a client of the node.
#[derive(Debug)]
pub struct ClaimApiClient {
    client: Client,
}

impl ClaimApiClient {
    /// Uses the rate and the credentials of this client.
    #[must_use]
    pub fn new(client: &Client) -> ClaimApiClient {
        ClaimApiClient { client: client.with_timeout(TIMEOUT) }
    }
}

impl ResourceClaimApi for ClaimApiClient {
    fn read(&self, key: &ClaimKey) -> Result<ResourceClaim, ReadError> {
        let target = Target::resource_claim(&key.namespace, &key.name);
        let mut waits = LAGS.iter();
        loop {
            let error = match self.client.get(&target) {
                Ok(claim) => return Ok(claim),
                Err(error) => error,
            };
            match waits.next().filter(|_| error.is_forbidden()) {
                Some(wait) if self.client.pause(*wait) == Waited::TimedOut => {}
                _ => {
                    let unavailable = error.is_transport();
                    return Err(ReadError { text: error.to_string(), unavailable });
                }
            }
        }
    }

    fn delete_slices(&self, selector: &str) -> Result<(), ApiError> {
        match self.client.delete_collection(&Target::resource_slices(), selector) {
            // An API server without this kind has no slices.
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }
}
