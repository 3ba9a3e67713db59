//! The requests for certificates in projected volumes, in the version of `certificates.k8s.io` that the
//! API server has.

use std::time::Instant;

use serde::Deserialize;
use serde_json::{Value, json};

use super::super::client::Client;
use super::super::discovery::ServedVersion;
use super::super::error::ApiError;
use super::super::pod_certificates::{CertificateApi, Request};
use super::super::target::{GroupVersion, Target};
use super::super::trust_bundles::{Bundle, BundleApi, BundleList, Query};
use super::requests::is_unserved;

/// The list of the resources of a version of a group (Go: `metav1.APIResourceList`).
#[derive(Deserialize)]
struct ResourceList {
    resources: Option<Vec<ListedResource>>,
}

#[derive(Deserialize)]
struct ListedResource {
    name: String,
}

/// The requests for one resource.
struct VersionedRequests {
    client: Client,
    served: ServedVersion,
}

impl VersionedRequests {
    fn has_resource(&self, version: GroupVersion) -> Result<bool, ApiError> {
        match self.client.get::<ResourceList>(&Target::resources(version)) {
            Ok(list) => {
                let mut resources = list.resources.into_iter().flatten();
                Ok(resources.any(|resource| resource.name == self.served.plural()))
            }
            // Without this version the body is no `Status`.
            Err(error) if error.status() == Some(404) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn version(&self) -> Result<GroupVersion, ApiError> {
        self.served.find(Instant::now(), |version| self.has_resource(version))
    }

    /// Sends a request in the version that the server has. If it has lost that version since, the request
    /// is sent in another one.
    fn send<T>(&self, request: impl Fn(&Client, GroupVersion) -> Result<T, ApiError>) -> Result<T, ApiError> {
        let version = self.version()?;
        match request(&self.client, version) {
            Err(error) if is_unserved(&error) => {
                self.served.forget(version);
                match self.version()? {
                    // The server still has it, so another program has responded.
                    same if same == version => Err(error),
                    other => request(&self.client, other),
                }
            }
            outcome => outcome,
        }
    }
}

/// The requests for ClusterTrustBundles.
pub(super) struct BundleRequests(VersionedRequests);

impl BundleRequests {
    pub(super) fn new(client: Client) -> BundleRequests {
        const VERSIONS: &[GroupVersion] =
            &[GroupVersion::Certificates, GroupVersion::CertificatesBeta, GroupVersion::CertificatesAlpha];
        let served = ServedVersion::new("clustertrustbundles", VERSIONS);
        BundleRequests(VersionedRequests { client, served })
    }
}

impl BundleApi for BundleRequests {
    fn read_bundles(&self, query: &Query) -> Result<Vec<Bundle>, ApiError> {
        self.0.send(|client, version| {
            let all = Target::trust_bundles(version);
            match query {
                Query::Name(name) => match client.get(&all.name(name)) {
                    Ok(bundle) => Ok(vec![bundle]),
                    Err(error) if error.is_not_found() && !is_unserved(&error) => Ok(Vec::new()),
                    Err(error) => Err(error),
                },
                Query::Signer(signer) => {
                    let selector = format!("spec.signerName={signer}");
                    let list = client.get_with::<BundleList>(&all, &[("fieldSelector", &selector)]);
                    list.map(|list| list.items)
                }
            }
        })
    }
}

/// The requests for certificates of pods.
///
/// DIFFERS: upstream uses only v1 from 1.37 on; an API server of 1.36 has only v1beta1, whose objects
/// are the same as far as they are used.
pub(super) struct CertificateRequests(VersionedRequests);

impl CertificateRequests {
    pub(super) fn new(client: Client) -> CertificateRequests {
        const VERSIONS: &[GroupVersion] = &[GroupVersion::Certificates, GroupVersion::CertificatesBeta];
        let served = ServedVersion::new("podcertificaterequests", VERSIONS);
        CertificateRequests(VersionedRequests { client, served })
    }

    fn uid(&self, target: &Target) -> Result<String, ApiError> {
        self.0.client.get::<ObjectWithUid>(target).map(|object| object.metadata.uid)
    }
}

/// The metadata of any object.
#[derive(Deserialize)]
struct ObjectWithUid {
    metadata: MetadataWithUid,
}

#[derive(Deserialize)]
struct MetadataWithUid {
    uid: String,
}

impl CertificateApi for CertificateRequests {
    fn account_uid(&self, namespace: &str, name: &str) -> Result<String, ApiError> {
        self.uid(&Target::service_account(namespace, name))
    }

    fn node_uid(&self, name: &str) -> Result<String, ApiError> {
        self.uid(&Target::node(name))
    }

    fn create_request(&self, namespace: &str, body: &Value) -> Result<Request, ApiError> {
        self.0.send(|client, version| {
            let mut body = body.clone();
            if let Some(fields) = body.as_object_mut() {
                fields.insert("apiVersion".to_owned(), json!(version.api_version()));
            }
            client.create(&Target::pod_certificate_requests(version, namespace), &body)
        })
    }

    fn read_request(&self, namespace: &str, name: &str) -> Result<Option<Request>, ApiError> {
        self.0.send(|client, version| {
            match client.get(&Target::pod_certificate_requests(version, namespace).name(name)) {
                Ok(request) => Ok(Some(request)),
                Err(error) if error.is_not_found() && !is_unserved(&error) => Ok(None),
                Err(error) => Err(error),
            }
        })
    }
}
