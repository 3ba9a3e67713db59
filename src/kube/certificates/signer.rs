//! The API client as a signer of certificates.

use std::time::Duration;

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;

use super::error::Error;
use super::rotation::{OpenSigner, Refusal, Signer};
use crate::kube::client::{Client, CredentialError};
use crate::kube::error::ApiError;
use crate::kube::target::Target;
use crate::transport::api::Breaker;

/// Creates a client with the bootstrap credentials. It is called each
/// time that they are needed, because the file may have been replaced.
pub type OpenBootstrap = Box<dyn FnMut() -> Result<Client, CredentialError> + Send>;

/// Time limit for one request. Certificates are not urgent, but stopping may wait for this time.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A client whose requests `breaker` ends. Requests for certificates have no rate limit.
pub(super) fn signer(client: &Client, breaker: &Breaker) -> Box<dyn Signer + Send> {
    Box::new(client.with_limits(None, TIMEOUT).with_breaker(breaker.clone()))
}

/// Like [`signer`], with the bootstrap credentials.
pub(super) fn opener(mut open: OpenBootstrap, breaker: &Breaker) -> OpenSigner {
    let breaker = breaker.clone();
    Box::new(move || match open() {
        Ok(client) => Ok(signer(&client, &breaker)),
        Err(error) => Err(Error::Bootstrap(error.to_string())),
    })
}

impl Signer for Client {
    fn create(&self, request: &CertificateSigningRequest) -> Result<CertificateSigningRequest, Refusal> {
        Client::create(self, &Target::csrs(), request).map_err(|error| refusal(&error))
    }

    fn get(&self, name: &str) -> Result<CertificateSigningRequest, Refusal> {
        Client::get(self, &Target::csr(name)).map_err(|error| refusal(&error))
    }
}

fn refusal(error: &ApiError) -> Refusal {
    if error.is_already_exists() {
        Refusal::AlreadyExists
    } else if error.is_not_found() {
        Refusal::NotFound
    } else {
        Refusal::Other(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_errors_become_refusals() {
        let check = |code, reason, expected| {
            assert_eq!(refusal(&ApiError::for_test(code, reason, "words")), expected);
        };
        check(409, "AlreadyExists", Refusal::AlreadyExists);
        check(404, "NotFound", Refusal::NotFound);
        check(403, "Forbidden", Refusal::Other("words".into()));
        assert!(matches!(refusal(&ApiError::for_test_transport()), Refusal::Other(_)));
    }
}
