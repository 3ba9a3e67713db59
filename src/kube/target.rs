//! URL paths of objects and collections of the Kubernetes API.

use std::fmt;

use crate::util::encoding::escape_percent;

/// An API group, at the version that is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupVersion {
    /// `v1`.
    Core,
    /// `coordination.k8s.io/v1`.
    Coordination,
    /// `certificates.k8s.io/v1`.
    Certificates,
    /// `certificates.k8s.io/v1beta1`.
    CertificatesBeta,
    /// `certificates.k8s.io/v1alpha1`.
    CertificatesAlpha,
    /// `node.k8s.io/v1`.
    Node,
    /// `authentication.k8s.io/v1`.
    Authentication,
    /// `authorization.k8s.io/v1`.
    Authorization,
    /// `resource.k8s.io/v1`.
    Resource,
    /// `storage.k8s.io/v1`.
    Storage,
}

impl GroupVersion {
    fn prefix(self) -> &'static str {
        match self {
            GroupVersion::Core => "/api/v1",
            GroupVersion::Coordination => "/apis/coordination.k8s.io/v1",
            GroupVersion::Certificates => "/apis/certificates.k8s.io/v1",
            GroupVersion::CertificatesBeta => "/apis/certificates.k8s.io/v1beta1",
            GroupVersion::CertificatesAlpha => "/apis/certificates.k8s.io/v1alpha1",
            GroupVersion::Node => "/apis/node.k8s.io/v1",
            GroupVersion::Authentication => "/apis/authentication.k8s.io/v1",
            GroupVersion::Authorization => "/apis/authorization.k8s.io/v1",
            GroupVersion::Resource => "/apis/resource.k8s.io/v1",
            GroupVersion::Storage => "/apis/storage.k8s.io/v1",
        }
    }

    /// The `apiVersion` of its objects, such as `node.k8s.io/v1`.
    pub fn api_version(self) -> &'static str {
        let prefix = self.prefix();
        prefix.strip_prefix("/apis/").or(prefix.strip_prefix("/api/")).unwrap_or(prefix)
    }
}

/// The target of a request: a collection, one object, or a subresource of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Target {
    group: GroupVersion,
    plural: &'static str,
    namespace: Option<String>,
    name: Option<String>,
    subresource: Option<&'static str>,
}

impl Target {
    /// The collection `plural` in all namespaces.
    pub fn new(group: GroupVersion, plural: &'static str) -> Target {
        Target { group, plural, namespace: None, name: None, subresource: None }
    }

    /// The list of the resources that the server has in this version of a group.
    pub fn resources(group: GroupVersion) -> Target {
        Target::new(group, "")
    }

    /// Selects one namespace.
    pub fn namespace(mut self, namespace: &str) -> Target {
        self.namespace = Some(namespace.to_owned());
        self
    }

    /// Selects one object.
    pub fn name(mut self, name: &str) -> Target {
        self.name = Some(name.to_owned());
        self
    }

    /// Selects a subresource of the object, such as `status`.
    pub fn subresource(mut self, subresource: &'static str) -> Target {
        self.subresource = Some(subresource);
        self
    }

    /// One pod.
    pub fn pod(namespace: &str, name: &str) -> Target {
        Target::new(GroupVersion::Core, "pods").namespace(namespace).name(name)
    }

    /// A pod's status.
    pub fn pod_status(namespace: &str, name: &str) -> Target {
        Target::pod(namespace, name).subresource("status")
    }

    /// All pods.
    pub fn pods() -> Target {
        Target::new(GroupVersion::Core, "pods")
    }

    /// One node.
    pub fn node(name: &str) -> Target {
        Target::nodes().name(name)
    }

    /// A node's status.
    pub fn node_status(name: &str) -> Target {
        Target::node(name).subresource("status")
    }

    /// All nodes.
    pub fn nodes() -> Target {
        Target::new(GroupVersion::Core, "nodes")
    }

    /// A node's lease.
    pub fn lease(name: &str) -> Target {
        Target::leases().name(name)
    }

    /// The leases of all nodes.
    pub fn leases() -> Target {
        Target::new(GroupVersion::Coordination, "leases").namespace("kube-node-lease")
    }

    /// One Secret.
    pub fn secret(namespace: &str, name: &str) -> Target {
        Target::new(GroupVersion::Core, "secrets").namespace(namespace).name(name)
    }

    /// One ConfigMap.
    pub fn config_map(namespace: &str, name: &str) -> Target {
        Target::new(GroupVersion::Core, "configmaps").namespace(namespace).name(name)
    }

    /// One PersistentVolumeClaim.
    pub fn claim(namespace: &str, name: &str) -> Target {
        Target::new(GroupVersion::Core, "persistentvolumeclaims").namespace(namespace).name(name)
    }

    /// One PersistentVolume.
    pub fn persistent_volume(name: &str) -> Target {
        Target::new(GroupVersion::Core, "persistentvolumes").name(name)
    }

    /// The status of one claim.
    pub fn claim_status(namespace: &str, name: &str) -> Target {
        Target::claim(namespace, name).subresource("status")
    }

    /// One CSIDriver.
    pub fn csi_driver(name: &str) -> Target {
        Target::new(GroupVersion::Storage, "csidrivers").name(name)
    }

    /// All CSINodes.
    pub fn csi_nodes() -> Target {
        Target::new(GroupVersion::Storage, "csinodes")
    }

    /// One VolumeAttachment.
    pub fn volume_attachment(name: &str) -> Target {
        Target::new(GroupVersion::Storage, "volumeattachments").name(name)
    }

    /// Tokens of a service account, which are made by POST.
    pub fn service_account_token(namespace: &str, name: &str) -> Target {
        Target::new(GroupVersion::Core, "serviceaccounts")
            .namespace(namespace)
            .name(name)
            .subresource("token")
    }

    /// All Services.
    pub fn services() -> Target {
        Target::new(GroupVersion::Core, "services")
    }

    /// All RuntimeClasses.
    pub fn runtime_classes() -> Target {
        Target::new(GroupVersion::Node, "runtimeclasses")
    }

    /// One CertificateSigningRequest.
    pub fn csr(name: &str) -> Target {
        Target::csrs().name(name)
    }

    /// All CertificateSigningRequests.
    pub fn csrs() -> Target {
        Target::new(GroupVersion::Certificates, "certificatesigningrequests")
    }

    /// All ClusterTrustBundles, in the version that the server has.
    pub fn trust_bundles(version: GroupVersion) -> Target {
        Target::new(version, "clustertrustbundles")
    }

    /// The PodCertificateRequests of a namespace, in the version that the server has.
    pub fn pod_certificate_requests(version: GroupVersion, namespace: &str) -> Target {
        Target::new(version, "podcertificaterequests").namespace(namespace)
    }

    /// One service account.
    pub fn service_account(namespace: &str, name: &str) -> Target {
        Target::new(GroupVersion::Core, "serviceaccounts").namespace(namespace).name(name)
    }

    /// A namespace's events.
    pub fn events(namespace: &str) -> Target {
        Target::new(GroupVersion::Core, "events").namespace(namespace)
    }

    /// One event.
    pub fn event(namespace: &str, name: &str) -> Target {
        Target::events(namespace).name(name)
    }

    /// Token reviews, which are made by POST.
    pub fn token_reviews() -> Target {
        Target::new(GroupVersion::Authentication, "tokenreviews")
    }

    /// Access reviews, which are made by POST.
    pub fn subject_access_reviews() -> Target {
        Target::new(GroupVersion::Authorization, "subjectaccessreviews")
    }

    /// One ResourceClaim.
    pub fn resource_claim(namespace: &str, name: &str) -> Target {
        Target::new(GroupVersion::Resource, "resourceclaims").namespace(namespace).name(name)
    }

    /// All ResourceSlices.
    pub fn resource_slices() -> Target {
        Target::new(GroupVersion::Resource, "resourceslices")
    }

    /// The path below the server's address.
    pub fn path(&self) -> String {
        let mut path = self.group.prefix().to_owned();
        if let Some(namespace) = &self.namespace {
            path.push_str("/namespaces/");
            escape(namespace, &mut path);
        }
        if !self.plural.is_empty() {
            path.push('/');
            path.push_str(self.plural);
        }
        if let Some(name) = &self.name {
            path.push('/');
            escape(name, &mut path);
        }
        if let Some(subresource) = self.subresource {
            path.push('/');
            path.push_str(subresource);
        }
        path
    }
}

impl fmt::Display for Target {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.plural.is_empty() {
            return write!(out, "resources of {}", self.group.api_version());
        }
        out.write_str(self.plural)?;
        if let Some(subresource) = self.subresource {
            write!(out, "/{subresource}")?;
        }
        match (&self.namespace, &self.name) {
            (Some(namespace), Some(name)) => write!(out, " \"{namespace}/{name}\""),
            (None, Some(name)) => write!(out, " \"{name}\""),
            (Some(namespace), None) => write!(out, " in namespace \"{namespace}\""),
            (None, None) => Ok(()),
        }
    }
}

/// Appends `text` as one path segment or query value.
pub(super) fn escape(text: &str, out: &mut String) {
    // The names `.` and `..` would change the path.
    let dots = text == "." || text == "..";
    let is_plain =
        |byte: u8| byte.is_ascii_alphanumeric() || b"-_~".contains(&byte) || (byte == b'.' && !dots);
    escape_percent(text.as_bytes(), is_plain, out);
}

/// The query string, such as `?a=b&c=d`; empty without parameters.
pub(super) fn query(parameters: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (name, value) in parameters {
        text.push(if text.is_empty() { '?' } else { '&' });
        text.push_str(name);
        text.push('=');
        escape(value, &mut text);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_have_the_paths_of_the_api() {
        for (target, expected) in [
            (Target::pods(), "/api/v1/pods"),
            (Target::pod("ns", "p"), "/api/v1/namespaces/ns/pods/p"),
            (Target::pod_status("ns", "p"), "/api/v1/namespaces/ns/pods/p/status"),
            (Target::node_status("n1"), "/api/v1/nodes/n1/status"),
            (Target::lease("n1"), "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1"),
            (Target::csr("c"), "/apis/certificates.k8s.io/v1/certificatesigningrequests/c"),
            (
                Target::trust_bundles(GroupVersion::CertificatesAlpha).name("b"),
                "/apis/certificates.k8s.io/v1alpha1/clustertrustbundles/b",
            ),
            (
                Target::pod_certificate_requests(GroupVersion::CertificatesBeta, "ns"),
                "/apis/certificates.k8s.io/v1beta1/namespaces/ns/podcertificaterequests",
            ),
            (Target::resources(GroupVersion::Certificates), "/apis/certificates.k8s.io/v1"),
            (Target::runtime_classes(), "/apis/node.k8s.io/v1/runtimeclasses"),
            (Target::csi_driver("d"), "/apis/storage.k8s.io/v1/csidrivers/d"),
            (Target::csi_nodes().name("n"), "/apis/storage.k8s.io/v1/csinodes/n"),
            (Target::volume_attachment("a"), "/apis/storage.k8s.io/v1/volumeattachments/a"),
            (Target::claim_status("n", "c"), "/api/v1/namespaces/n/persistentvolumeclaims/c/status"),
            (Target::service_account_token("ns", "a"), "/api/v1/namespaces/ns/serviceaccounts/a/token"),
            (Target::event("ns", "p.17ab"), "/api/v1/namespaces/ns/events/p.17ab"),
            (Target::secret("a/b", ".."), "/api/v1/namespaces/a%2Fb/secrets/%2E%2E"),
            (Target::token_reviews(), "/apis/authentication.k8s.io/v1/tokenreviews"),
            (Target::subject_access_reviews(), "/apis/authorization.k8s.io/v1/subjectaccessreviews"),
        ] {
            assert_eq!(target.path(), expected);
        }
        assert_eq!(Target::pod_status("ns", "p").to_string(), "pods/status \"ns/p\"");
        assert_eq!(Target::nodes().to_string(), "nodes");
        let resources = Target::resources(GroupVersion::CertificatesBeta).to_string();
        assert_eq!(resources, "resources of certificates.k8s.io/v1beta1");
        assert_eq!(GroupVersion::Core.api_version(), "v1");
        assert_eq!(
            query(&[("fieldSelector", "spec.clusterIP!=None"), ("watch", "true")]),
            "?fieldSelector=spec.clusterIP%21%3DNone&watch=true"
        );
    }
}
