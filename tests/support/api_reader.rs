//! Reads objects of an API server as `kubectl get -o json` does, without a process for each read: the
//! tests poll a lot, and a start of kubectl costs more than the read.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use base64::Engine as _;
use serde_json::Value;

use super::tls_client::{Identity, Response, TlsClient};

/// Names of a resource as the tests write them, the path of its group and version, its name in URLs,
/// and whether its objects are in namespaces.
type Resource = (&'static [&'static str], &'static str, &'static str, bool);

const RESOURCES: &[Resource] = &[
    (&["pod", "pods"], "api/v1", "pods", true),
    (&["node", "nodes"], "api/v1", "nodes", false),
    (&["event", "events"], "api/v1", "events", true),
    (&["configmap", "configmaps"], "api/v1", "configmaps", true),
    (&["secret", "secrets"], "api/v1", "secrets", true),
    (&["serviceaccount", "serviceaccounts"], "api/v1", "serviceaccounts", true),
    (&["pvc", "persistentvolumeclaims"], "api/v1", "persistentvolumeclaims", true),
    (&["pv", "persistentvolumes"], "api/v1", "persistentvolumes", false),
    (&["lease", "leases"], "apis/coordination.k8s.io/v1", "leases", true),
    (&["job", "jobs"], "apis/batch/v1", "jobs", true),
    (&["csr"], "apis/certificates.k8s.io/v1", "certificatesigningrequests", false),
    (&["csinode", "csinodes"], "apis/storage.k8s.io/v1", "csinodes", false),
    (&["volumeattachments"], "apis/storage.k8s.io/v1", "volumeattachments", false),
    (&["resourceslices"], "apis/resource.k8s.io/v1", "resourceslices", false),
];

/// The path and query of a read with the arguments of `kubectl get`; `None` for what is not known here.
fn path(arguments: &[&str]) -> Option<String> {
    let (mut words, mut query) = (Vec::new(), Vec::new());
    let (mut namespace, mut all) = ("default", false);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match *argument {
            "-A" => all = true,
            "-n" => namespace = rest.next()?,
            "-l" => query.push(format!("labelSelector={}", encoded(rest.next()?))),
            "--field-selector" => query.push(format!("fieldSelector={}", encoded(rest.next()?))),
            word if word.starts_with('-') || word.contains('/') => return None,
            word => words.push(word),
        }
    }
    let (resource, name) = match words[..] {
        [resource] => (resource, None),
        [resource, name] if query.is_empty() && !all => (resource, Some(name)),
        _ => return None,
    };
    let (_, group, plural, namespaced) = RESOURCES.iter().find(|(names, ..)| names.contains(&resource))?;
    let mut path = format!("/{group}");
    if *namespaced && !all {
        path.push_str(&format!("/namespaces/{namespace}"));
    }
    path.push_str(&format!("/{plural}"));
    if let Some(name) = name {
        path.push_str(&format!("/{name}"));
    }
    if !query.is_empty() {
        path.push_str(&format!("?{}", query.join("&")));
    }
    Some(path)
}

fn encoded(text: &str) -> String {
    text.replace('%', "%25").replace('=', "%3D").replace('&', "%26").replace(' ', "%20").replace('+', "%2B")
}

/// What kubectl leaves out, and adds to the objects of a list.
fn as_kubectl_prints(mut value: Value) -> Value {
    let Some(kind) = value["kind"].as_str().and_then(|kind| kind.strip_suffix("List")).map(str::to_owned)
    else {
        remove_managed_fields(&mut value);
        return value;
    };
    let version = value["apiVersion"].clone();
    for item in value["items"].as_array_mut().into_iter().flatten() {
        remove_managed_fields(item);
        item["kind"] = kind.as_str().into();
        item["apiVersion"] = version.clone();
    }
    value
}

fn remove_managed_fields(object: &mut Value) {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("managedFields");
    }
}

/// A reader with the identity of a kubeconfig in JSON.
pub(crate) struct ApiReader(TlsClient);

impl ApiReader {
    pub(crate) fn new(server: &str, kubeconfig: &Path) -> ApiReader {
        let text = fs::read_to_string(kubeconfig).expect("the kubeconfig is readable");
        let config: Value = serde_json::from_str(&text).expect("the kubeconfig is JSON");
        let pem = |field: &str| {
            let data = config["users"][0]["user"][field].as_str().expect("the user has a certificate");
            let bytes = base64::engine::general_purpose::STANDARD.decode(data).expect("base64");
            String::from_utf8(bytes).expect("PEM")
        };
        let identity = Identity { certificate: pem("client-certificate-data"), key: pem("client-key-data") };
        let address: SocketAddr =
            server.strip_prefix("https://").and_then(|address| address.parse().ok()).expect("an address");
        ApiReader(TlsClient::to(address, Some(&identity)))
    }

    /// The object or the list, `None` if it is not there. The outer `None`: only kubectl can read this.
    pub(crate) fn get(&self, arguments: &[&str]) -> Option<Result<Option<Value>, String>> {
        let path = path(arguments)?;
        Some(self.read(&path).map_err(|error| format!("GET {path}: {error}")))
    }

    /// A page that is no object, such as `/metrics`.
    pub(crate) fn page(&self, path: &str) -> Result<String, String> {
        let response = self.request(path, "text/plain")?;
        if response.status == 200 {
            Ok(response.body)
        } else {
            Err(format!("GET {path}: {}", response.status))
        }
    }

    fn request(&self, path: &str, accept: &str) -> Result<Response, String> {
        // In this version of HTTP a body is not cut into chunks.
        let request = format!("GET {path} HTTP/1.0\r\nHost: kubernetes\r\nAccept: {accept}\r\n\r\n");
        let mut connection = self.0.connect().map_err(|error| error.to_string())?;
        connection.ask(&request).map_err(|error| error.to_string())
    }

    fn read(&self, path: &str) -> Result<Option<Value>, String> {
        let response = self.request(path, "application/json")?;
        match response.status {
            200 => serde_json::from_str(&response.body)
                .map(|value| Some(as_kubectl_prints(value)))
                .map_err(|error| format!("{error}: {}", response.body)),
            404 => Ok(None),
            status => Err(format!("{status}: {}", response.body)),
        }
    }
}
