//! Which objects are stored, and the names of their files (pure).

use crate::util::sha256::sha256_hex;

/// The longest name of an object in bytes. A longer one is not stored.
pub const MAX_NAME_BYTES: usize = 1024;
/// The digits of a digest in the name of a file: 128 bits.
const DIGITS: usize = 32;

/// A kind of stored object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The Node object without the parts that change by themselves. One file, with an empty name.
    Node,
    /// A pod as the API server showed it last, without its status. By UID.
    Pod,
    /// The last status of a pod on this node. By UID.
    PodStatus,
    /// A ConfigMap. By `namespace/name`.
    ConfigMap,
    /// A Secret. By `namespace/name`.
    Secret,
    /// A token of a service account. By `pod UID/digest of what was requested`.
    Token,
    /// The handler of a RuntimeClass. By name.
    RuntimeClass,
    /// The services of a namespace, for environment variables. By namespace.
    Services,
    /// A PersistentVolumeClaim. By `namespace/name`.
    Claim,
    /// A PersistentVolume. By name.
    Volume,
    /// A CSIDriver, or that there is none. By name.
    CsiDriver,
    /// A VolumeAttachment by which a volume is attached to this node. By name.
    Attachment,
    /// ClusterTrustBundles, or that there is none. By `name/name of the bundle` or `signer/name of the signer`.
    TrustBundles,
    /// A ResourceClaim. By `namespace/name`.
    ResourceClaim,
    /// The certificate of a pod with its key. By `pod UID/digest of what was requested`.
    PodCertificate,
    /// When the API server was reached last, in seconds of the wall clock. One file, with an empty name.
    Contact,
    /// The UID of the cluster. One file, with an empty name.
    Cluster,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 17] = [
        Kind::Node,
        Kind::Pod,
        Kind::PodStatus,
        Kind::ConfigMap,
        Kind::Secret,
        Kind::Token,
        Kind::RuntimeClass,
        Kind::Services,
        Kind::Claim,
        Kind::Volume,
        Kind::CsiDriver,
        Kind::Attachment,
        Kind::TrustBundles,
        Kind::ResourceClaim,
        Kind::PodCertificate,
        Kind::Contact,
        Kind::Cluster,
    ];

    /// The word in names of files, headers and messages.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Kind::Node => "node",
            Kind::Pod => "pod",
            Kind::PodStatus => "podstatus",
            Kind::ConfigMap => "configmap",
            Kind::Secret => "secret",
            Kind::Token => "token",
            Kind::RuntimeClass => "runtimeclass",
            Kind::Services => "services",
            Kind::Claim => "claim",
            Kind::Volume => "volume",
            Kind::CsiDriver => "csidriver",
            Kind::Attachment => "attachment",
            Kind::TrustBundles => "trustbundles",
            Kind::ResourceClaim => "resourceclaim",
            Kind::PodCertificate => "podcertificate",
            Kind::Contact => "contact",
            Kind::Cluster => "cluster",
        }
    }

    /// The kind of a word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.word() == word)
    }

    /// Whether its bodies are sealed, and are not stored with `--offline-secrets=none`.
    #[must_use]
    pub fn is_sealed(self) -> bool {
        matches!(self, Kind::Secret | Kind::Token | Kind::PodCertificate)
    }
}

/// Identifies a stored object.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Its kind.
    pub kind: Kind,
    /// Its name, in the form that [`Kind`] says.
    pub name: String,
}

impl Key {
    /// The key of an object without a namespace.
    #[must_use]
    pub fn new(kind: Kind, name: &str) -> Key {
        Key { kind, name: name.to_owned() }
    }

    /// The key of an object with a namespace.
    #[must_use]
    pub fn namespaced(kind: Kind, namespace: &str, name: &str) -> Key {
        Key { kind, name: format!("{namespace}/{name}") }
    }

    /// The key of the Node object.
    #[must_use]
    pub fn node() -> Key {
        Key::new(Kind::Node, "")
    }

    /// The key of the time of the last contact.
    #[must_use]
    pub fn contact() -> Key {
        Key::new(Kind::Contact, "")
    }

    /// The key of the UID of the cluster.
    #[must_use]
    pub fn cluster() -> Key {
        Key::new(Kind::Cluster, "")
    }

    /// The name of its file: nothing of it comes from an object.
    #[must_use]
    pub fn file_name(&self) -> String {
        let word = self.kind.word();
        let digest = sha256_hex(format!("{word}\0{}", self.name).as_bytes());
        format!("{word}-{}", digest.get(..DIGITS).unwrap_or_default())
    }

    /// Who causes its size, as a kind and a name: the namespace, or for what goes with a pod the pod. Objects
    /// of the cluster have themselves.
    pub(super) fn owner(&self) -> (&'static str, &str) {
        let name = self.name.as_str();
        let (before_slash, _) = name.split_once('/').unwrap_or_default();
        match self.kind {
            Kind::Pod | Kind::PodStatus => ("pod", name),
            Kind::Token | Kind::PodCertificate => ("pod", before_slash),
            Kind::Services => ("namespace", name),
            Kind::ConfigMap | Kind::Secret | Kind::Claim | Kind::ResourceClaim => ("namespace", before_slash),
            Kind::Node
            | Kind::RuntimeClass
            | Kind::Volume
            | Kind::CsiDriver
            | Kind::Attachment
            | Kind::TrustBundles
            | Kind::Contact
            | Kind::Cluster => (self.kind.word(), name),
        }
    }

    /// The UID of the pod that owns it, if it goes with a pod.
    #[must_use]
    pub fn pod_uid(&self) -> Option<&str> {
        match self.owner() {
            ("pod", uid) => Some(uid),
            _ => None,
        }
    }

    /// Whether the pod with this UID owns it: it goes with the pod.
    #[must_use]
    pub fn belongs_to(&self, uid: &str) -> bool {
        self.pod_uid() == Some(uid)
    }
}

/// Whether a file of the directory has a name that [`Key::file_name`] makes.
#[must_use]
pub fn is_file_name(name: &str) -> bool {
    let digits = |text: &str| {
        text.len() == DIGITS
            && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    name.split_once('-').is_some_and(|(word, digest)| Kind::parse(word).is_some() && digits(digest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_have_nothing_of_the_object() {
        let key = Key::namespaced(Kind::Secret, "..", "../../etc/passwd");
        let name = key.file_name();
        assert!(is_file_name(&name) && name.starts_with("secret-") && !name.contains(['/', '.']), "{name}");
        assert_ne!(name, Key::namespaced(Kind::ConfigMap, "..", "../../etc/passwd").file_name());
        for wrong in ["secret-", "key", "secret-0123.tmp", "pods-00000000000000000000000000000000"] {
            assert!(!is_file_name(wrong), "{wrong}");
        }
        assert!(Kind::ALL.iter().all(|kind| Kind::parse(kind.word()) == Some(*kind)));
    }

    #[test]
    fn objects_of_a_namespace_or_a_pod_have_one_owner() {
        for (key, owner) in [
            (Key::namespaced(Kind::Secret, "n", "a/b"), ("namespace", "n")),
            (Key::namespaced(Kind::ConfigMap, "n", "s"), ("namespace", "n")),
            (Key::new(Kind::Services, "n"), ("namespace", "n")),
            (Key::new(Kind::Pod, "u"), ("pod", "u")),
            (Key::new(Kind::Token, "u/1"), ("pod", "u")),
            (Key::new(Kind::PodCertificate, "u/1"), ("pod", "u")),
            (Key::namespaced(Kind::ResourceClaim, "n", "c"), ("namespace", "n")),
            (Key::new(Kind::TrustBundles, "signer/a/b"), ("trustbundles", "signer/a/b")),
            (Key::new(Kind::Volume, "v"), ("volume", "v")),
            (Key::node(), ("node", "")),
        ] {
            assert_eq!(key.owner(), owner, "{key:?}");
        }
    }

    #[test]
    fn what_belongs_to_a_pod_goes_with_it() {
        let names =
            [(Kind::Pod, "u"), (Kind::PodStatus, "u"), (Kind::Token, "u/1"), (Kind::PodCertificate, "u/1")];
        let keys = names.map(|(kind, name)| Key::new(kind, name));
        assert!(keys.iter().all(|key| key.belongs_to("u") && !key.belongs_to("v")));
        assert!(!Key::new(Kind::Claim, "u").belongs_to("u"));
    }
}
