//! Private keys and certificate signing requests: content, name and state of a request. Pure,
//! except for the random numbers of a key.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PublicKeyData, SanType};

use super::error::Error;
use super::facts::{CertificateFields, Subject};
use crate::model::{api, meta};
use crate::util::secret::Secret;
use crate::util::sha256;

const NODES_GROUP: &str = "system:nodes";
/// Prefix of a node's common name.
const NODE_USER: &str = "system:node:";

/// What a certificate is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The node as a client of the API server.
    Client,
    /// The node as a server.
    Serving,
}

impl Purpose {
    /// The signer name of a request.
    pub fn signer(self) -> &'static str {
        match self {
            Purpose::Client => "kubernetes.io/kube-apiserver-client-kubelet",
            Purpose::Serving => "kubernetes.io/kubelet-serving",
        }
    }

    /// Key usages of elliptic keys: only RSA keys have key encipherment.
    #[must_use]
    pub fn usages(self) -> [&'static str; 2] {
        match self {
            Purpose::Client => ["digital signature", "client auth"],
            Purpose::Serving => ["digital signature", "server auth"],
        }
    }

    pub(super) fn file_prefix(self) -> &'static str {
        match self {
            Purpose::Client => "kubelet-client",
            Purpose::Serving => "kubelet-server",
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Purpose::Client => "client certificate",
            Purpose::Serving => "serving certificate",
        })
    }
}

#[derive(Debug)]
pub(super) struct PrivateKey(Secret<KeyPair>);

impl PrivateKey {
    fn from_pair(pair: KeyPair) -> Self {
        PrivateKey(Secret::new(pair))
    }

    /// A new key on the curve P-256.
    pub(super) fn generate() -> Result<Self, Error> {
        KeyPair::generate().map(PrivateKey::from_pair).map_err(|source| Error::Key { source })
    }

    /// Reads a key as [`PrivateKey::pem`] writes it.
    pub(super) fn from_pem(pem: &str) -> Result<Self, Error> {
        KeyPair::from_pem(pem).map(PrivateKey::from_pair).map_err(|source| Error::Key { source })
    }

    /// The key in PEM (PKCS #8).
    pub(super) fn pem(&self) -> String {
        self.0.reveal().serialize_pem()
    }

    /// The public key, encoded as in [`CertificateFields::public_key`].
    pub(super) fn public(&self) -> &[u8] {
        self.0.reveal().der_bytes()
    }
}

/// The content of a certificate to request.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Template {
    /// The purpose of the certificate.
    pub purpose: Purpose,
    /// The name of the node.
    pub node_name: String,
    /// Names and addresses of the server; only for serving.
    pub names: ServingNames,
}

/// Names and addresses of a serving certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServingNames {
    /// DNS names.
    pub dns_names: BTreeSet<String>,
    /// Addresses.
    pub ips: BTreeSet<IpAddr>,
}

impl ServingNames {
    /// Sorts a node's addresses into IP addresses and DNS names. A host name may be either; a name
    /// that a certificate cannot contain is left out.
    #[must_use]
    pub fn of_addresses(addresses: &[api::NodeAddress]) -> ServingNames {
        let mut names = ServingNames::default();
        for address in addresses {
            match address.address.parse::<IpAddr>() {
                Ok(ip) => {
                    if matches!(address.type_.as_str(), "Hostname" | "InternalIP" | "ExternalIP") {
                        names.ips.insert(ip);
                    }
                }
                Err(_) if matches!(address.type_.as_str(), "Hostname" | "InternalDNS" | "ExternalDNS") => {
                    if !address.address.is_empty() && address.address.is_ascii() {
                        names.dns_names.insert(address.address.clone());
                    }
                }
                Err(_) => {}
            }
        }
        names
    }
}

impl Template {
    /// A template for the client certificate of a node.
    pub fn client(node_name: &str) -> Template {
        Template { purpose: Purpose::Client, node_name: node_name.to_owned(), names: ServingNames::default() }
    }

    /// A template for the serving certificate of a node.
    pub fn serving(node_name: &str, names: ServingNames) -> Template {
        Template { purpose: Purpose::Serving, node_name: node_name.to_owned(), names }
    }

    fn common_name(&self) -> String {
        format!("{NODE_USER}{}", self.node_name)
    }

    /// Whether a certificate meets the template. Additional names are allowed.
    pub fn is_met_by(&self, facts: &CertificateFields) -> bool {
        let named = |subject: &Subject| {
            subject.common_name == self.common_name()
                && subject.organizations.iter().any(|organization| organization == NODES_GROUP)
        };
        facts.subject.as_ref().is_some_and(named)
            && self.names.dns_names.iter().all(|name| facts.dns_names.contains(name))
            && self.names.ips.iter().all(|ip| facts.ips.contains(ip))
    }

    /// The request in PEM, signed with `key`.
    fn request_pem(&self, key: &PrivateKey) -> Result<String, Error> {
        let failed = |source| Error::Request { purpose: self.purpose, source };
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, NODES_GROUP);
        params.distinguished_name.push(DnType::CommonName, self.common_name());
        params.subject_alt_names = alternative_names(&self.names).map_err(failed)?;
        params.serialize_request(key.0.reveal()).and_then(|request| request.pem()).map_err(failed)
    }

    /// The object to create. Because of its fixed name, it is found again after a restart.
    pub(super) fn request(
        &self,
        key: &PrivateKey,
        name: Option<&str>,
    ) -> Result<CertificateSigningRequest, Error> {
        let metadata = match name {
            Some(name) => meta::ObjectMeta { name: Some(name.to_owned()), ..meta::ObjectMeta::default() },
            None => {
                meta::ObjectMeta { generate_name: Some("csr-".to_owned()), ..meta::ObjectMeta::default() }
            }
        };
        Ok(CertificateSigningRequest {
            metadata,
            spec: CertificateSigningRequestSpec {
                request: ByteString(self.request_pem(key)?.into_bytes()),
                signer_name: self.purpose.signer().to_owned(),
                usages: Some(self.purpose.usages().map(str::to_owned).to_vec()),
                ..CertificateSigningRequestSpec::default()
            },
            status: None,
        })
    }

    /// The name of the request for this key. It stays the same as long as the key and the template
    /// are the same.
    #[must_use]
    pub(super) fn request_name(&self, key: &PrivateKey) -> String {
        let mut text = key.public().to_vec();
        let common_name = self.common_name();
        let usages = self.purpose.usages();
        for part in [common_name.as_str(), NODES_GROUP].iter().chain(&usages) {
            // No part contains a zero byte, so different parts never give the same digest.
            text.push(0);
            text.extend_from_slice(part.as_bytes());
        }
        format!("node-csr-{}", sha256::sha256_hex(&text))
    }

    /// A certificate that the node signs itself, in PEM.
    pub(super) fn self_signed(
        host: &str,
        names: &ServingNames,
        key: &PrivateKey,
        from: jiff::Timestamp,
        lifetime: std::time::Duration,
    ) -> Result<String, Error> {
        let failed = |source| Error::Request { purpose: Purpose::Serving, source };
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, format!("{host}@{}", from.as_second()));
        params.subject_alt_names = alternative_names(names).map_err(failed)?;
        params.key_usages =
            vec![rcgen::KeyUsagePurpose::DigitalSignature, rcgen::KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
        let seconds = u64::try_from(from.as_second()).unwrap_or(0);
        params.not_before = rcgen::date_time_ymd(1970, 1, 1) + std::time::Duration::from_secs(seconds);
        params.not_after = params.not_before + lifetime;
        params.self_signed(key.0.reveal()).map(|certificate| certificate.pem()).map_err(failed)
    }
}

fn alternative_names(names: &ServingNames) -> Result<Vec<SanType>, rcgen::Error> {
    let dns = names.dns_names.iter().map(|name| name.as_str().try_into().map(SanType::DnsName));
    dns.chain(names.ips.iter().map(|ip| Ok(SanType::IpAddress(*ip)))).collect()
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RequestState {
    /// The request is not decided or not signed yet.
    Waiting,
    /// The chain, in PEM.
    Issued(Vec<u8>),
    Denied {
        reason: String,
        message: String,
    },
    Failed {
        reason: String,
        message: String,
    },
}

/// Reads the state from the object.
pub(super) fn request_state(request: &CertificateSigningRequest) -> RequestState {
    let Some(status) = &request.status else { return RequestState::Waiting };
    let conditions = status.conditions.as_deref().unwrap_or_default();
    for condition in conditions {
        let reason = condition.reason.clone().unwrap_or_default();
        let message = condition.message.clone().unwrap_or_default();
        match condition.type_.as_str() {
            "Denied" => return RequestState::Denied { reason, message },
            "Failed" => return RequestState::Failed { reason, message },
            _ => {}
        }
    }
    let approved = conditions.iter().any(|condition| condition.type_ == "Approved");
    match &status.certificate {
        Some(chain) if approved && !chain.0.is_empty() => RequestState::Issued(chain.0.clone()),
        _ => RequestState::Waiting,
    }
}

/// The reason why an existing request differs from the one for `template` and `key`.
pub(super) fn mismatch(
    request: &CertificateSigningRequest,
    template: &Template,
    key: &PrivateKey,
) -> Option<&'static str> {
    if request.spec.signer_name != template.purpose.signer() {
        return Some("its signer is another");
    }
    // A request contains the bytes of the public key exactly once.
    let der = std::str::from_utf8(&request.spec.request.0).ok().and_then(|text| pem::parse(text).ok());
    let holds_key = der.is_some_and(|der| {
        !key.public().is_empty()
            && der.contents().windows(key.public().len()).any(|part| part == key.public())
    });
    (!holds_key).then_some("its key is another")
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::certificates::v1::{
        CertificateSigningRequestCondition, CertificateSigningRequestStatus,
    };

    #[test]
    fn the_request_is_as_upstream_sends_it() {
        let key = PrivateKey::generate().unwrap();
        let template = Template::client("node1");
        let json = serde_json::to_value(template.request(&key, None).unwrap()).unwrap();
        assert_eq!(json["apiVersion"], "certificates.k8s.io/v1");
        assert_eq!(json["kind"], "CertificateSigningRequest");
        assert_eq!(json["metadata"], serde_json::json!({"generateName": "csr-"}));
        assert_eq!(json["spec"]["signerName"], "kubernetes.io/kube-apiserver-client-kubelet");
        assert_eq!(json["spec"]["usages"], serde_json::json!(["digital signature", "client auth"]));
        assert_eq!(json["spec"].as_object().unwrap().len(), 3, "{json}");
        let request = template.request(&key, Some("node-csr-x")).unwrap();
        assert_eq!(request.metadata.name.as_deref(), Some("node-csr-x"));
        let pem = String::from_utf8(request.spec.request.0).unwrap();
        assert!(pem.starts_with("-----BEGIN CERTIFICATE REQUEST-----"), "{pem}");
        let der = pem::parse(&pem).unwrap();
        for part in ["system:node:node1", "system:nodes"] {
            assert!(der.contents().windows(part.len()).any(|bytes| bytes == part.as_bytes()), "{part}");
        }
    }

    #[test]
    fn the_name_depends_on_key_and_template() {
        let key = PrivateKey::generate().unwrap();
        let again = PrivateKey::from_pem(&key.pem()).unwrap();
        let name = Template::client("node1").request_name(&key);
        assert_eq!(name, Template::client("node1").request_name(&again));
        assert_eq!(name.len(), "node-csr-".len() + 64);
        assert_ne!(name, Template::client("node2").request_name(&key));
        assert_ne!(name, Template::client("node1").request_name(&PrivateKey::generate().unwrap()));
        assert!(PrivateKey::from_pem("nonsense").is_err());
        assert_eq!(format!("{key:?}"), "PrivateKey(Secret(..))");
    }

    #[test]
    fn names_of_a_serving_certificate_come_from_the_addresses() {
        let address =
            |kind: &str, address: &str| api::NodeAddress { type_: kind.into(), address: address.into() };
        let names = ServingNames::of_addresses(&[
            address("InternalIP", "10.0.0.7"),
            address("ExternalIP", "fd00::7"),
            address("Hostname", "node1"),
            address("Hostname", "10.0.0.8"),
            address("InternalDNS", "node1.internal"),
            address("InternalDNS", ""),
            address("InternalDNS", "knötchen"),
            address("InternalIP", "nonsense"),
            address("ExternalDNS", "192.0.2.1"),
        ]);
        assert_eq!(
            names.dns_names.iter().map(String::as_str).collect::<Vec<_>>(),
            ["node1", "node1.internal"]
        );
        let ips: Vec<String> = names.ips.iter().map(ToString::to_string).collect();
        assert_eq!(ips, ["10.0.0.7", "10.0.0.8", "fd00::7"]);
    }

    #[test]
    fn a_certificate_meets_the_template_with_every_name() {
        let names = |dns: &[&str], ips: &[&str]| ServingNames {
            dns_names: dns.iter().map(|name| (*name).to_owned()).collect(),
            ips: ips.iter().map(|ip| ip.parse().unwrap()).collect(),
        };
        let facts = CertificateFields {
            not_before: jiff::Timestamp::UNIX_EPOCH,
            not_after: jiff::Timestamp::MAX,
            subject: Some(Subject {
                common_name: "system:node:node1".into(),
                organizations: vec!["system:nodes".into()],
                uids: Vec::new(),
            }),
            dns_names: vec!["node1".into()],
            ips: vec!["10.0.0.7".parse().unwrap()],
            public_key: Vec::new(),
        };
        let check =
            |template: Template, expected| assert_eq!(template.is_met_by(&facts), expected, "{template:?}");
        check(Template::client("node1"), true);
        check(Template::client("node2"), false);
        check(Template::serving("node1", names(&["node1"], &["10.0.0.7"])), true);
        check(Template::serving("node1", names(&[], &[])), true);
        check(Template::serving("node1", names(&["node1"], &["10.0.0.7", "10.0.0.8"])), false);
        check(Template::serving("node1", names(&["other"], &[])), false);
    }

    #[test]
    fn verdict_follows_the_conditions_of_a_request() {
        let check = |conditions: &[&str], chain: Option<&[u8]>, expected: RequestState| {
            let conditions = conditions
                .iter()
                .map(|kind| CertificateSigningRequestCondition {
                    type_: (*kind).into(),
                    status: "True".into(),
                    reason: Some("R".into()),
                    message: Some("m".into()),
                    ..CertificateSigningRequestCondition::default()
                })
                .collect();
            let request = CertificateSigningRequest {
                status: Some(CertificateSigningRequestStatus {
                    certificate: chain.map(|bytes| ByteString(bytes.to_vec())),
                    conditions: Some(conditions),
                }),
                ..CertificateSigningRequest::default()
            };
            assert_eq!(request_state(&request), expected);
        };
        let (reason, message) = ("R".to_owned(), "m".to_owned());
        assert_eq!(request_state(&CertificateSigningRequest::default()), RequestState::Waiting);
        check(&[], Some(b"x"), RequestState::Waiting);
        check(&["Approved"], None, RequestState::Waiting);
        check(&["Approved"], Some(b""), RequestState::Waiting);
        check(&["Approved"], Some(b"x"), RequestState::Issued(b"x".to_vec()));
        check(&["Denied"], None, RequestState::Denied { reason: reason.clone(), message: message.clone() });
        check(&["Approved", "Failed"], Some(b"x"), RequestState::Failed { reason, message });
    }

    #[test]
    fn a_request_with_another_key_is_distinguished() {
        let (ours, other) = (PrivateKey::generate().unwrap(), PrivateKey::generate().unwrap());
        let template = Template::client("node1");
        let request = template.request(&ours, Some("x")).unwrap();
        assert_eq!(mismatch(&request, &template, &ours), None);
        assert!(mismatch(&request, &template, &other).is_some());
        let serving = Template::serving("node1", ServingNames::default());
        assert!(mismatch(&request, &serving, &ours).is_some());
    }
}
