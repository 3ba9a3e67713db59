//! Which version of a resource the API server has (Go: pkg/kubelet/clustertrustbundle
//! `ensureManagerSet`, `clusterTrustBundlesAvailable`).
//!
//! The version is found once, when the resource is first needed. A server that is upgraded or
//! downgraded may lose it: a request for it is a 404 then, and the version is found again.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::error::ApiError;
use super::target::GroupVersion;
use crate::util::backoff::Failures;
use crate::util::lock::LockExt;

/// After the first failure there is no other attempt for this time, which doubles.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest of these times.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The version of one resource.
#[derive(Debug)]
pub(super) struct ServedVersion {
    plural: &'static str,
    /// The versions that can be used, the best one first.
    versions: &'static [GroupVersion],
    /// Not locked during a request.
    lookup: Mutex<Lookup>,
}

#[derive(Debug, Default)]
struct Lookup {
    found: Option<GroupVersion>,
    failures: Failures,
    /// Why the last attempt failed, and when there may be another one.
    failed: Option<(ApiError, Instant)>,
}

impl ServedVersion {
    /// Nothing is known of the server.
    pub(super) fn new(plural: &'static str, versions: &'static [GroupVersion]) -> ServedVersion {
        ServedVersion { plural, versions, lookup: Mutex::default() }
    }

    /// The resource's name in paths.
    pub(super) fn plural(&self) -> &'static str {
        self.plural
    }

    /// The version to use. `has_resource` says whether the server has the resource in a version; it
    /// sends a request.
    ///
    /// # Errors
    /// The server has none of the versions, or a request failed. The same error is returned for a
    /// while without another request.
    pub(super) fn find(
        &self,
        now: Instant,
        has_resource: impl Fn(GroupVersion) -> Result<bool, ApiError>,
    ) -> Result<GroupVersion, ApiError> {
        {
            let lookup = self.lookup.locked();
            if let Some(version) = lookup.found {
                return Ok(version);
            }
            if let Some((error, _)) = lookup.failed.as_ref().filter(|(_, until)| now < *until) {
                return Err(error.clone());
            }
        }
        let outcome = self.discover(has_resource);
        let mut lookup = self.lookup.locked();
        match &outcome {
            Ok(version) => {
                log::info!("the API server has {} of {}", self.plural, version.api_version());
                *lookup = Lookup { found: Some(*version), ..Lookup::default() };
            }
            Err(error) if error.is_stopping() => {}
            Err(error) => {
                if lookup.failures.count() {
                    log::warn!("{error}");
                }
                let pause = lookup.failures.delay(FIRST_PAUSE, LONGEST_PAUSE);
                lookup.failed = Some((error.clone(), now + pause));
            }
        }
        outcome
    }

    fn discover(
        &self,
        has_resource: impl Fn(GroupVersion) -> Result<bool, ApiError>,
    ) -> Result<GroupVersion, ApiError> {
        for version in self.versions {
            if has_resource(*version)? {
                return Ok(*version);
            }
        }
        let names: Vec<&str> = self.versions.iter().map(|version| version.api_version()).collect();
        Err(ApiError::form(
            format!("find the version of {}", self.plural),
            format!("the API server has them in none of {}", names.join(", ")),
        ))
    }

    /// The server does not have this version any more.
    pub(super) fn forget(&self, version: GroupVersion) {
        let mut lookup = self.lookup.locked();
        if lookup.found == Some(version) {
            lookup.found = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    const ALL: &[GroupVersion] =
        &[GroupVersion::Certificates, GroupVersion::CertificatesBeta, GroupVersion::CertificatesAlpha];

    fn bundles() -> ServedVersion {
        ServedVersion::new("clustertrustbundles", ALL)
    }

    #[test]
    fn best_version_that_the_server_has_is_found_once() {
        let now = Instant::now();
        for (served, expected) in [(ALL, 0), (&ALL[1..], 1), (&ALL[2..], 2)] {
            let versions = bundles();
            let requests = RefCell::new(Vec::new());
            let has = |version: GroupVersion| {
                requests.borrow_mut().push(version);
                Ok(served.contains(&version))
            };
            assert_eq!(versions.find(now, has), Ok(ALL[expected]));
            assert_eq!(*requests.borrow(), ALL[..=expected]);
            assert_eq!(versions.find(now, |_| panic!("no request")), Ok(ALL[expected]));
        }
    }

    #[test]
    fn version_that_the_server_has_lost_is_replaced_at_once() {
        let (now, versions) = (Instant::now(), bundles());
        let only = |group: GroupVersion| move |version: GroupVersion| Ok(version == group);
        assert_eq!(
            versions.find(now, only(GroupVersion::CertificatesBeta)),
            Ok(GroupVersion::CertificatesBeta)
        );
        // The request of another thread was older.
        versions.forget(GroupVersion::Certificates);
        assert_eq!(versions.find(now, only(GroupVersion::Certificates)), Ok(GroupVersion::CertificatesBeta));
        versions.forget(GroupVersion::CertificatesBeta);
        assert_eq!(versions.find(now, only(GroupVersion::Certificates)), Ok(GroupVersion::Certificates));
    }

    #[test]
    fn failed_lookup_is_repeated_with_back_off_and_no_worse_version_is_used() {
        let (now, versions) = (Instant::now(), bundles());
        let down = || ApiError::for_test(503, "ServiceUnavailable", "down");
        let fails = |version: GroupVersion| match version {
            GroupVersion::Certificates => Err(down()),
            _ => Ok(true),
        };
        assert_eq!(versions.find(now, fails), Err(down()));
        let soon = now + FIRST_PAUSE / 2;
        assert_eq!(versions.find(soon, |_| panic!("no request")), Err(down()));
        assert_eq!(
            versions.find(now + FIRST_PAUSE, |_| Ok(false)).unwrap_err().to_string(),
            "find the version of clustertrustbundles: the API server has them in none of certificates.k8s.io/v1, \
             certificates.k8s.io/v1beta1, certificates.k8s.io/v1alpha1"
        );
        // The second pause is longer.
        let second = now + FIRST_PAUSE * 2;
        assert!(versions.find(second, |_| panic!("no request")).is_err());
        assert_eq!(versions.find(now + FIRST_PAUSE * 3, |_| Ok(true)), Ok(GroupVersion::Certificates));
    }

    #[test]
    fn lookup_that_the_end_of_the_agent_interrupts_is_no_failure() {
        let (now, versions) = (Instant::now(), bundles());
        let stopped = versions.find(now, |_| Err(ApiError::for_test_stopping())).unwrap_err();
        assert!(stopped.is_stopping());
        assert_eq!(versions.find(now, |_| Ok(true)), Ok(GroupVersion::Certificates));
    }
}
