//! The sysctls that pods may set (Go: pkg/kubelet/sysctl). Used by the admission of pods and the
//! check of `allowedUnsafeSysctls`.

/// The kernel namespace a sysctl belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Namespace {
    /// Shared memory, message queues, semaphores.
    Ipc,
    /// Networking.
    Net,
    /// The names of host and domain.
    Uts,
    /// Users, and the limits of namespaces.
    User,
}

/// Safe sysctls with the first kernel version that has them per namespace.
pub const SAFE: &[(&str, (u32, u32))] = &[
    ("kernel.shm_rmid_forced", (0, 0)),
    ("net.ipv4.ip_local_port_range", (0, 0)),
    ("net.ipv4.tcp_syncookies", (0, 0)),
    ("net.ipv4.ping_group_range", (0, 0)),
    ("net.ipv4.ip_unprivileged_port_start", (0, 0)),
    ("net.ipv4.ip_local_reserved_ports", (3, 16)),
    ("net.ipv4.tcp_keepalive_time", (4, 5)),
    ("net.ipv4.tcp_keepalive_intvl", (4, 5)),
    ("net.ipv4.tcp_keepalive_probes", (4, 5)),
    ("net.ipv4.tcp_fin_timeout", (4, 6)),
    ("net.ipv4.tcp_rmem", (4, 15)),
    ("net.ipv4.tcp_wmem", (4, 15)),
    ("net.ipv4.tcp_slow_start_after_idle", (4, 15)),
    ("net.ipv4.tcp_notsent_lowat", (4, 6)),
];

/// The sysctls of the IPC namespace, besides `fs.mqueue.*`.
const IPC: [&str; 8] = [
    "kernel.msgmax",
    "kernel.msgmnb",
    "kernel.msgmni",
    "kernel.sem",
    "kernel.shm_rmid_forced",
    "kernel.shmall",
    "kernel.shmmax",
    "kernel.shmmni",
];

/// The dotted form of a name: where the first separator is a slash, slashes and dots swap.
#[must_use]
pub fn normalize(name: &str) -> String {
    match name.find(['.', '/']) {
        Some(first) if name.as_bytes().get(first) == Some(&b'/') => name
            .chars()
            .map(|c| match c {
                '/' => '.',
                '.' => '/',
                c => c,
            })
            .collect(),
        _ => name.to_owned(),
    }
}

/// The namespace of a sysctl, or of a pattern ending in `*`; `None` when it belongs to the host (Go:
/// component-helpers/node/util/sysctl).
#[must_use]
pub fn namespace(pattern: &str) -> Option<Namespace> {
    let name = normalize(pattern);
    let stem = name.strip_suffix('*').unwrap_or(&name);
    let starts = |prefix: &str| stem.starts_with(prefix);
    if starts("net.") {
        Some(Namespace::Net)
    } else if starts("user.") {
        Some(Namespace::User)
    } else if stem == "kernel.domainname" {
        Some(Namespace::Uts)
    } else if starts("kernel.shm") || starts("kernel.msg") || starts("fs.mqueue.") || stem == "kernel.sem" {
        Some(Namespace::Ipc)
    } else {
        None
    }
}

/// Whether a sysctl in its dotted form belongs to the IPC namespace. [`namespace`] knows prefixes only.
pub fn is_ipc(name: &str) -> bool {
    IPC.contains(&name) || name.starts_with("fs.mqueue.")
}

/// Whether a sysctl, which is no pattern, is known to have a value of its own in each namespace (Go:
/// component-helpers/node/util/sysctl `GetNamespace`). `kernel.shm` and `kernel.msg` count, but no pod
/// gets them (Go: pkg/kubelet/kuberuntime `applyPodSysctls`).
pub fn is_namespaced(name: &str) -> bool {
    let name = normalize(name);
    match namespace(&name) {
        Some(Namespace::Ipc) => is_ipc(&name) || matches!(name.as_str(), "kernel.shm" | "kernel.msg"),
        other => other.is_some(),
    }
}

/// Whether a text has the form of a sysctl name, or of a prefix followed by `*`.
pub fn is_pattern(pattern: &str) -> bool {
    let stem = pattern.strip_suffix('*').unwrap_or(pattern);
    // `net.*` leaves `net.`: the last segment of a prefix may be empty.
    let open = stem.len() < pattern.len();
    let body = if open { stem.strip_suffix(['.', '/']).unwrap_or(stem) } else { stem };
    !body.is_empty()
        && pattern.len() <= 253
        && body.split(['.', '/']).all(|segment| {
            let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
            edge(segment.chars().next())
                && (open || edge(segment.chars().next_back()))
                && segment
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_'))
        })
}

/// Whether a pod may set a sysctl on this kernel with these `allowedUnsafeSysctls`.
pub fn is_allowed(name: &str, allowed: &[String], kernel: (u32, u32)) -> bool {
    let name = normalize(name);
    SAFE.iter().any(|(safe, since)| *safe == name && kernel >= *since)
        || allowed.iter().any(|pattern| is_match(pattern, &name))
}

/// The namespace of a sysctl that a pod names: its own, or that of a pattern that allows it (Go:
/// pkg/kubelet/sysctl `validateSysctl`). With `kernel.sem*`, `kernel.sem_next_id` counts as one of IPC.
#[must_use]
pub fn allowed_namespace(name: &str, allowed: &[String]) -> Option<Namespace> {
    let name = normalize(name);
    let matching = || allowed.iter().filter(|pattern| is_match(pattern, &name));
    namespace(&name).or_else(|| matching().find_map(|pattern| namespace(pattern)))
}

/// Whether a pattern has a sysctl with this name in dotted form.
fn is_match(pattern: &str, name: &str) -> bool {
    let pattern = normalize(pattern);
    match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => name == pattern,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sysctl_that_only_a_pattern_allows_has_the_namespace_of_the_pattern() {
        let allowed: Vec<String> = ["kernel/sem*", "net.*"].map(str::to_owned).into();
        for (name, expected) in [
            ("kernel.sem_next_id", Some(Namespace::Ipc)),
            ("kernel/sem_next_id", Some(Namespace::Ipc)),
            ("kernel.shmmax", Some(Namespace::Ipc)),
            ("net.core.somaxconn", Some(Namespace::Net)),
            ("kernel.panic", None),
        ] {
            assert_eq!(allowed_namespace(name, &allowed), expected, "{name}");
        }
    }

    #[test]
    fn only_sysctls_of_a_namespace_are_namespaced() {
        for name in
            ["kernel.shmmax", "kernel/sem", "fs.mqueue.msg_max", "net.a", "user.b", "kernel.domainname"]
        {
            assert!(is_namespaced(name), "{name}");
        }
        // The kernel does not have these; upstream accepts them.
        for name in ["kernel.shm", "kernel/msg"] {
            assert!(is_namespaced(name) && !is_ipc(&normalize(name)), "{name}");
        }
        // The kernel has more than those of the namespace.
        for name in ["kernel.shm_next_id", "kernel.msg_next_id", "kernel.shm*", "kernel.panic"] {
            assert!(!is_namespaced(name), "{name}");
        }
    }

    #[test]
    fn sysctl_names_are_normalized_and_have_a_namespace() {
        assert_eq!(normalize("net/ipv4/conf/eno2.100/rp_filter"), "net.ipv4.conf.eno2/100.rp_filter");
        assert_eq!(normalize("net.ipv4.conf.eno2/100.rp_filter"), "net.ipv4.conf.eno2/100.rp_filter");
        for (pattern, expected) in [
            ("net.core.somaxconn", Some(Namespace::Net)),
            ("net/core/somaxconn", Some(Namespace::Net)),
            ("net.*", Some(Namespace::Net)),
            ("kernel.shm*", Some(Namespace::Ipc)),
            ("kernel.msgmax", Some(Namespace::Ipc)),
            ("kernel.sem", Some(Namespace::Ipc)),
            ("fs.mqueue.*", Some(Namespace::Ipc)),
            ("user.max_user_namespaces", Some(Namespace::User)),
            ("user/*", Some(Namespace::User)),
            ("user*", None),
            ("kernel.domainname", Some(Namespace::Uts)),
            ("kernel/domainname", Some(Namespace::Uts)),
            ("kernel.domainname2", None),
            ("kernel.hostname", None),
            ("kernel.panic", None),
            ("vm.swappiness", None),
            ("*", None),
        ] {
            assert_eq!(namespace(pattern), expected, "{pattern}");
        }
        for (pattern, fits) in [
            ("net.*", true),
            ("kernel.shm*", true),
            ("net.core.somaxconn", true),
            ("net..x", false),
            ("", false),
            ("*", false),
            ("Net.x", false),
            ("net.*.x", false),
            ("net.x.", false),
        ] {
            assert_eq!(is_pattern(pattern), fits, "{pattern}");
        }
    }

    #[test]
    fn only_safe_and_listed_sysctls_are_allowed() {
        let allowed = vec!["net.core.somaxconn".to_owned(), "kernel.msg*".to_owned()];
        for (name, kernel, expected) in [
            ("net.ipv4.tcp_rmem", (4, 14), false),
            ("net.ipv4.tcp_rmem", (5, 4), true),
            ("net/ipv4/tcp_syncookies", (3, 0), true),
            ("net.ipv4.tcp_slow_start_after_idle", (4, 14), false),
            ("net.ipv4.tcp_slow_start_after_idle", (4, 15), true),
            ("net.ipv4.tcp_notsent_lowat", (4, 5), false),
            ("net.ipv4.tcp_notsent_lowat", (4, 6), true),
            ("user.max_user_namespaces", (6, 1), false),
            ("net.core.somaxconn", (6, 1), true),
            ("kernel.msgmax", (6, 1), true),
            ("kernel.shmmax", (6, 1), false),
        ] {
            assert_eq!(is_allowed(name, &allowed, kernel), expected, "{name}");
        }
    }
}
