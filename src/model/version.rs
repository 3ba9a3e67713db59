//! The release of Kubernetes that the agent implements: the one place from which all version strings
//! come.

macro_rules! release {
    () => {
        "1.37"
    };
}

/// The minor release, such as `1.37`: the emulated level of the feature gates, and a column of
/// `src/config/gates.txt`.
pub const RELEASE: &str = release!();

/// The release before [`RELEASE`], of which configurations may still be in use.
pub const PREVIOUS_RELEASE: &str = "1.36";

/// The version of the kubelet that this agent replaces, with its `v`. It is in
/// `status.nodeInfo.kubeletVersion`.
pub const KUBERNETES_VERSION: &str = concat!("v", release!(), ".2");

/// The `User-Agent` of HTTP and gRPC probes (Go: pkg/probe/http, pkg/probe/grpc).
pub const PROBE_USER_AGENT: &str = concat!("kube-probe/", release!());

/// The `User-Agent` of HTTP lifecycle hooks (Go: pkg/kubelet/lifecycle).
pub const HOOK_USER_AGENT: &str = concat!("kube-lifecycle/", release!());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_previous_release_is_one_minor_version_older() {
        let minor = |release: &str| release.split_once('.').and_then(|(_, minor)| minor.parse::<u32>().ok());
        assert_eq!(minor(PREVIOUS_RELEASE).map(|minor| minor + 1), minor(RELEASE));
        assert_eq!(
            (KUBERNETES_VERSION, PROBE_USER_AGENT, HOOK_USER_AGENT),
            ("v1.37.2", "kube-probe/1.37", "kube-lifecycle/1.37")
        );
    }
}
