//! The host name of a pod (Go: GeneratePodHostNameAndDomain).

use crate::model::names::{is_dns_label, is_dns_subdomain};
use crate::model::pod::Pod;

/// The longest DNS label.
const LABEL_LIMIT: usize = 63;
/// The length of the kernel's host name.
const KERNEL_LIMIT: usize = 64;

/// Why a pod has no usable host name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostnameError {
    /// Nothing is left of the name after cutting.
    #[error("pod hostname in pod {pod:?} is invalid: {hostname:?}")]
    Empty {
        pod: String,
        /// The name before cutting.
        hostname: String,
    },
    /// `spec.hostname` or `spec.subdomain` is no DNS label.
    #[error("spec.{field} {value:?} of pod {pod:?} is not a valid DNS label")]
    NotALabel { field: &'static str, value: String, pod: String },
    /// `spec.hostnameOverride` is no DNS name.
    #[error("pod HostnameOverride {value:?} of pod {pod:?} is not a valid DNS subdomain")]
    NotASubdomain { value: String, pod: String },
    /// The full name does not fit into the kernel's field.
    #[error(
        "failed to construct FQDN from pod hostname and cluster domain, FQDN {fqdn} is too long ({KERNEL_LIMIT} characters is the max, {} characters requested)",
        fqdn.len()
    )]
    FqdnTooLong { fqdn: String },
}

/// A pod's host name and the domain it is in (empty without `spec.subdomain`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hostname {
    /// First label, or `spec.hostnameOverride`.
    pub name: String,
    /// Everything after it.
    pub domain: String,
}

/// Computes the host name and its domain.
///
/// # Errors
/// See [`HostnameError`].
pub(super) fn hostname(pod: &Pod, cluster_domain: &str) -> Result<Hostname, HostnameError> {
    let spec = pod.spec();
    if let Some(name) = &spec.hostname_override {
        if !is_dns_subdomain(name) {
            return Err(HostnameError::NotASubdomain { value: name.clone(), pod: pod.name().to_owned() });
        }
        return Ok(Hostname { name: truncate(pod, name)?, domain: String::new() });
    }
    let label = |field, value: &Option<String>| match value.as_deref().unwrap_or_default() {
        "" => Ok(None),
        value if is_dns_label(value) => Ok(Some(value.to_owned())),
        value => Err(HostnameError::NotALabel { field, value: value.to_owned(), pod: pod.name().to_owned() }),
    };
    let full = label("hostname", &spec.hostname)?.unwrap_or_else(|| pod.name().to_owned());
    let name = truncate(pod, &full)?;
    let domain = match label("subdomain", &spec.subdomain)? {
        Some(subdomain) => format!("{subdomain}.{}.svc.{cluster_domain}", pod.namespace()),
        None => String::new(),
    };
    Ok(Hostname { name, domain })
}

/// A name of the length that the kernel takes. It does not end with a separator.
fn truncate(pod: &Pod, full: &str) -> Result<String, HostnameError> {
    let name: String = full.chars().take(LABEL_LIMIT).collect();
    let name = name.trim_end_matches(['-', '.']).to_owned();
    if name.is_empty() {
        return Err(HostnameError::Empty { pod: pod.name().to_owned(), hostname: full.to_owned() });
    }
    Ok(name)
}

/// The host name of the sandbox's UTS namespace: the first label, or the full name with
/// `setHostnameAsFQDN`.
///
/// # Errors
/// When the full name is too long.
pub(super) fn kernel_name(pod: &Pod, hostname: &Hostname) -> Result<String, HostnameError> {
    if !pod.spec().set_hostname_as_fqdn.unwrap_or(false) || hostname.domain.is_empty() {
        return Ok(hostname.name.clone());
    }
    let fqdn = format!("{}.{}", hostname.name, hostname.domain);
    if fqdn.len() > KERNEL_LIMIT { Err(HostnameError::FqdnTooLong { fqdn }) } else { Ok(fqdn) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn hostname_follows_from_pod_or_is_refused() {
        let check = |name: &str, spec: serde_json::Value, expected: Result<&str, &str>| {
            let mut spec = spec;
            spec["containers"] = json!([]);
            let pod = json!({"metadata": {"name": name, "namespace": "n"}, "spec": spec});
            let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
            let result = hostname(&pod, "cluster.local")
                .and_then(|host| kernel_name(&pod, &host).map(|kernel| format!("{kernel} {}", host.domain)));
            match (result, expected) {
                (Ok(text), Ok(expected)) => assert_eq!(text, expected),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                other => panic!("{other:?}"),
            }
        };
        check("web", json!({}), Ok("web "));
        check("web", json!({"hostname": "h"}), Ok("h "));
        check("web", json!({"hostname": "H_"}), Err("spec.hostname \"H_\" of pod \"web\""));
        check("web", json!({"subdomain": "sub"}), Ok("web sub.n.svc.cluster.local"));
        check(
            "web",
            json!({"subdomain": "s", "setHostnameAsFQDN": true}),
            Ok("web.s.n.svc.cluster.local s.n.svc.cluster.local"),
        );
        check("web", json!({"setHostnameAsFQDN": true}), Ok("web "));
        check("web", json!({"hostnameOverride": "a.b", "subdomain": "s"}), Ok("a.b "));
        let long = format!("{}.b", "a".repeat(62));
        check("web", json!({ "hostnameOverride": long }), Ok(&format!("{} ", "a".repeat(62))));
        check("web", json!({ "hostnameOverride": "a".repeat(64) }), Ok(&format!("{} ", "a".repeat(63))));
        for bad in ["", "A", "a_b", "a..b", "-a"] {
            check("web", json!({ "hostnameOverride": bad }), Err("is not a valid DNS subdomain"));
        }
        check(&format!("{}--.x", "a".repeat(61)), json!({}), Ok(&format!("{} ", "a".repeat(61))));
        check("...", json!({}), Err("is invalid"));
        check(&"b".repeat(60), json!({"subdomain": "s", "setHostnameAsFQDN": true}), Err("too long"));
    }
}
