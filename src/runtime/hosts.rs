//! The pod's `/etc/hosts` (Go: ensureHostsFile). Rewritten before every container start.

use std::fmt::Write as _;
use std::io::{Read, Seek, SeekFrom, Write as _};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::model::api::HostAlias;
use crate::model::pod::Pod;
use crate::util::disk_writes;
use crate::util::untrusted;

use super::config_error::ConfigError;
use super::hostname::Hostname;

/// The limit of the node's file, which may have a long list of hosts to block.
const FILE_LIMIT: u64 = 16 << 20;
/// All users may read the pod's copy.
const MODE: u32 = 0o644;

/// The path inside a container.
pub(super) const CONTAINER_PATH: &str = "/etc/hosts";

/// The path of the pod's copy.
pub(super) fn path(root_dir: &Path, pod: &Pod) -> PathBuf {
    root_dir.join("pods").join(pod.uid().as_str()).join("etc-hosts")
}

/// Whether the pod's containers get the file, which needs an address of the pod.
pub(super) fn needs_file(pod: &Pod, pod_ips: &[IpAddr]) -> bool {
    pod.host_network() || !pod_ips.is_empty()
}

/// Text for a pod with addresses of its own.
pub(super) fn managed(hostname: &Hostname, pod_ips: &[IpAddr], aliases: &[HostAlias]) -> String {
    let mut text = String::from(
        "# Kubernetes-managed hosts file.\n\
         127.0.0.1\tlocalhost\n\
         ::1\tlocalhost ip6-localhost ip6-loopback\n\
         fe00::0\tip6-localnet\n\
         fe00::0\tip6-mcastprefix\n\
         fe00::1\tip6-allnodes\n\
         fe00::2\tip6-allrouters\n",
    );
    for ip in pod_ips {
        // Writing to a String cannot fail.
        let _ = match hostname.domain.as_str() {
            "" => writeln!(text, "{ip}\t{}", hostname.name),
            domain => writeln!(text, "{ip}\t{name}.{domain}\t{name}", name = hostname.name),
        };
    }
    add_aliases(&mut text, aliases);
    text
}

/// Text for a pod on the node's network: the node's own file and the aliases.
pub(super) fn of_node(node_file: &str, aliases: &[HostAlias]) -> String {
    let mut text = format!("# Kubernetes-managed hosts file (host network).\n{node_file}");
    add_aliases(&mut text, aliases);
    text
}

fn add_aliases(text: &mut String, aliases: &[HostAlias]) {
    if aliases.is_empty() {
        return;
    }
    text.push_str("\n# Entries added by HostAliases.\n");
    for alias in aliases {
        text.push_str(&alias.ip);
        for name in alias.hostnames.iter().flatten() {
            text.push('\t');
            text.push_str(name);
        }
        text.push('\n');
    }
}

/// Writes the file for `pod` and returns its path.
///
/// # Errors
/// When the node's file cannot be read or the pod's cannot be written.
pub(super) fn write(
    root_dir: &Path,
    node_file: &Path,
    pod: &Pod,
    hostname: &Hostname,
    pod_ips: &[IpAddr],
) -> Result<PathBuf, ConfigError> {
    let aliases = pod.spec().host_aliases.as_deref().unwrap_or_default();
    let text = if pod.host_network() {
        let bytes = untrusted::read_own(node_file, FILE_LIMIT).map_err(|error| ConfigError::File {
            what: "read hosts file",
            path: node_file.to_owned(),
            error,
        })?;
        of_node(&String::from_utf8_lossy(&bytes), aliases)
    } else {
        managed(hostname, pod_ips, aliases)
    };
    let path = path(root_dir, pod);
    write_in_place(&path, text.as_bytes()).map_err(|error| ConfigError::File {
        what: "write hosts file",
        path: path.clone(),
        error,
    })?;
    Ok(path)
}

/// The file is bind-mounted into running containers, so the same inode must get the new text: after
/// a rename they would still see the old one.
fn write_in_place(path: &Path, text: &[u8]) -> std::io::Result<()> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(std::io::ErrorKind::InvalidInput.into());
    };
    let dir = untrusted::make_directory(dir, 1, 0o750)?;
    let mut file = untrusted::open_or_create_at(dir.as_fd(), Path::new(name), MODE)?;
    // Containers may write any amount here at any moment.
    let mut old = Vec::new();
    let read = (&mut file).take(text.len() as u64 + 1).read_to_end(&mut old);
    if read.is_ok() && old == text && file.metadata()?.permissions().mode() & 0o777 == MODE {
        return Ok(());
    }
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(text)?;
    disk_writes::file(text.len() as u64);
    file.set_permissions(std::fs::Permissions::from_mode(MODE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::testing::{fifo, unblocked};
    use serde_json::json;

    fn pod(spec: serde_json::Value) -> Pod {
        let mut spec = spec;
        spec["containers"] = json!([]);
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap())
    }

    #[test]
    fn hosts_file_has_addresses_domain_and_aliases() {
        let dir = tempfile::tempdir().unwrap();
        let pod = pod(json!({"hostAliases": [{"ip": "192.0.2.5", "hostnames": ["foo", "bar"]}]}));
        let host = Hostname { name: "h".into(), domain: "s.n.svc.c".into() };
        let ips = ["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
        let path = write(dir.path(), Path::new("/no/file"), &pod, &host, &ips).unwrap();
        assert_eq!(path, dir.path().join("pods/u/etc-hosts"));
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-")
        );
        assert!(text.ends_with(
            "fe00::2\tip6-allrouters\n10.0.0.1\th.s.n.svc.c\th\nfd00::1\th.s.n.svc.c\th\n\n\
             # Entries added by HostAliases.\n192.0.2.5\tfoo\tbar\n"
        ));
    }

    #[test]
    fn file_of_any_size_is_rewritten_with_little_memory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("etc-hosts");
        std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
        write_in_place(&path, b"127.0.0.1\tlocalhost\n").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"127.0.0.1\tlocalhost\n");
    }

    #[test]
    fn only_a_regular_file_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path_to = |name: &str| dir.path().join(name);
        std::fs::write(path_to("precious"), "precious").unwrap();
        let path = path_to("etc-hosts");
        for what in ["link", "pipe", "directory"] {
            match what {
                "link" => std::os::unix::fs::symlink(path_to("precious"), &path).unwrap(),
                "pipe" => fifo(&path),
                _ => std::fs::create_dir(&path).unwrap(),
            }
            let file = path.clone();
            assert!(unblocked(move || write_in_place(&file, b"text").is_err()), "{what}");
            assert_eq!(std::fs::read_to_string(path_to("precious")).unwrap(), "precious");
            if what == "directory" { std::fs::remove_dir(&path) } else { std::fs::remove_file(&path) }
                .unwrap();
        }
        // The pod's directory.
        std::fs::create_dir(path_to("outside")).unwrap();
        std::os::unix::fs::symlink(path_to("outside"), path_to("pod")).unwrap();
        assert!(write_in_place(&path_to("pod/etc-hosts"), b"text").is_err());
        assert!(!path_to("outside/etc-hosts").exists());
    }

    #[test]
    fn rewritten_hosts_file_keeps_its_inode() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let host = Hostname { name: "h".into(), domain: String::new() };
        let write = |ip: &str| {
            write(dir.path(), Path::new(""), &pod(json!({})), &host, &[ip.parse().unwrap()]).unwrap()
        };
        let path = write("10.0.0.1");
        let before = std::fs::metadata(&path).unwrap();
        write("10.0.0.2");
        let after = std::fs::metadata(&path).unwrap();
        assert_eq!((before.ino(), after.mode() & 0o777), (after.ino(), 0o644));
        assert!(std::fs::read_to_string(path).unwrap().ends_with("10.0.0.2\th\n"));
    }

    #[test]
    fn host_network_pod_gets_copy_of_nodes_hosts_file() {
        let dir = tempfile::tempdir().unwrap();
        let node = dir.path().join("hosts");
        let host = Hostname { name: "h".into(), domain: String::new() };
        let pod = pod(json!({"hostNetwork": true}));
        assert!(needs_file(&pod, &[]));
        assert!(write(dir.path(), &node, &pod, &host, &[]).is_err());
        std::fs::write(&node, "127.0.0.1 node\n").unwrap();
        let path = write(dir.path(), &node, &pod, &host, &[]).unwrap();
        assert_eq!(
            std::fs::read_to_string(path).unwrap(),
            "# Kubernetes-managed hosts file (host network).\n127.0.0.1 node\n"
        );
    }
}
