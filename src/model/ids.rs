//! Types for identifiers, so that one cannot be passed for another. Cloning is cheap.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The text in the form of Kubernetes or the runtime.
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// Whether it is empty (an absent id in a message).
            pub fn is_empty(&self) -> bool {
                self.0.is_empty()
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                $name(Arc::from(text))
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                $name(Arc::from(text))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str(&self.0)
            }
        }
    };
}

id!(
    /// A pod's UID. Static pods: 32 lower-case hex digits; API pods: a UUID.
    PodUid
);
id!(
    /// A sandbox's id at the container runtime.
    SandboxId
);
id!(
    /// A container's id at the container runtime, without the `containerd://` prefix.
    ContainerId
);
id!(
    /// The image of a container: an image id such as `sha256:…`, or a reference.
    ImageRef
);
id!(
    /// `<name>_<namespace>`: the same for a static pod, its successors and its mirror pod.
    FullName
);

impl PodUid {
    /// The first eight characters, for thread names and log lines.
    pub fn short(&self) -> &str {
        self.0.get(..8).unwrap_or(&self.0)
    }
}

impl FullName {
    /// Builds `<name>_<namespace>`.
    #[must_use]
    pub fn new(name: &str, namespace: &str) -> Self {
        FullName::from(format!("{name}_{namespace}"))
    }
}
