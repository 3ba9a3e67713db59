//! The pods that cannot agree yet, and why. A pod that agrees must not be on the list.

pub const DISAGREEMENTS: &[(&str, &str)] = &[
    ("downward", "downward API volumes are not built yet"),
    ("hooks", "container hooks are not built yet"),
    ("init", "init containers are not built yet"),
    ("init-fail", "init containers are not built yet"),
    ("liveness", "probes are not built yet"),
    ("readiness", "probes are not built yet"),
    ("sidecar", "sidecar containers and probes are not built yet"),
    ("subpath", "sub paths of volumes are not built yet"),
];
