//! nfs: an export of a server, mounted by the distribution's `mount.nfs` (Go: pkg/volume/nfs).

use std::path::Path;

use super::super::error::VolumeError;
use super::super::plugin::Plugin;
use super::host::{Host, mount_at};
use super::storage::{Request, Storage};
use super::{Kinds, filesystem, remove_dir};
use crate::model::api::NFSVolumeSource;
use crate::model::mount::MountedVolume;
use crate::model::persistent::Spec;
use crate::util::stop::StopToken;

impl Plugin for NFSVolumeSource {
    fn name(&self) -> &'static str {
        "kubernetes.io/nfs"
    }

    fn describe(&self) -> Option<String> {
        Some(format!("{}:{}", self.server, self.path))
    }
}

impl Storage for NFSVolumeSource {
    fn server(&self) -> Option<String> {
        Some(format!("nfs/{}", self.server))
    }

    fn mount(&self, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError> {
        let target = kinds.target(request, self)?;
        set_up(&*kinds.host, request.spec, self, &target, request.stop)
            .inspect_err(|_| remove_dir(&target))?;
        Ok(request.mounted(target, false))
    }
}

/// Mounts the export at `target`. A mount that exists is not touched: its server may not respond.
fn set_up(
    host: &dyn Host,
    spec: &Spec,
    source: &NFSVolumeSource,
    target: &Path,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    if mount_at(&host.mounts()?, target).is_some() {
        return Ok(());
    }
    let options = filesystem::join(&spec.mount_options, if spec.read_only { &["ro"] } else { &[] });
    filesystem::mount(host, (&export(source), target), "nfs", &options, stop)
}

/// `server:path`, with the brackets that an IPv6 address needs.
fn export(source: &NFSVolumeSource) -> String {
    let server = source.server.as_str();
    if server.contains(':') && !server.starts_with('[') {
        format!("[{server}]:{}", source.path)
    } else {
        format!("{server}:{}", source.path)
    }
}

#[cfg(test)]
mod tests {
    use super::super::host::fake::FakeHost;
    use super::*;
    use crate::model::persistent::{Source, VolumeMode};

    fn spec(read_only: bool, options: &[&str]) -> Spec {
        Spec {
            name: "v".to_owned(),
            source: Source::Other(String::new()),
            read_only,
            mount_options: options.iter().map(|option| (*option).to_owned()).collect(),
            mode: VolumeMode::Filesystem,
            access_modes: Vec::new(),
            is_single_pod: false,
            size: None,
            has_grown: false,
            expansion: Default::default(),
            is_persistent: true,
            nodes: None,
        }
    }

    fn source(server: &str) -> NFSVolumeSource {
        NFSVolumeSource { server: server.to_owned(), path: "/x".to_owned(), read_only: None }
    }

    #[test]
    fn export_is_mounted_once_with_its_options() {
        let (host, never, target) = (FakeHost::default(), StopToken::never(), Path::new("/t"));
        set_up(&host, &spec(false, &[]), &source("srv"), target, &never).unwrap();
        assert_eq!(host.log(), ["mount -t nfs srv:/x /t"]);
        // It is mounted now.
        set_up(&host, &spec(false, &[]), &source("srv"), target, &never).unwrap();
        assert!(host.log().is_empty());
        let other = Path::new("/u");
        set_up(&host, &spec(true, &["nfsvers=4.1", "hard"]), &source("fd00::1"), other, &never).unwrap();
        assert_eq!(host.log(), ["mount -t nfs -o hard,nfsvers=4.1,ro [fd00::1]:/x /u"]);
    }

    #[test]
    fn server_that_looks_like_an_option_is_refused() {
        let host = FakeHost::default();
        let error = set_up(&host, &spec(false, &[]), &source("-osuid"), Path::new("/t"), &StopToken::never());
        assert_eq!(error.unwrap_err().to_string(), "\"-osuid:/x\" cannot be the source of a mount");
        assert!(host.log().is_empty());
    }

    #[test]
    fn missing_helper_names_its_package_and_other_failures_are_shown() {
        let root = tempfile::tempdir().unwrap();
        let host = FakeHost::new(root.path());
        let text = || {
            let result = set_up(&host, &spec(false, &[]), &source("s"), Path::new("/t"), &StopToken::never());
            result.unwrap_err().to_string()
        };
        let bad = "mount: /t: bad option; for several filesystems (e.g. nfs, cifs) you might need a \
                   /sbin/mount.<type> helper program.";
        host.respond("mount", 32, bad);
        assert_eq!(
            text(),
            "mount.nfs is not installed on this node (package nfs-common on Debian, nfs-utils on Alpine, \
             nfs-utils on Fedora)"
        );
        std::fs::create_dir(root.path().join("sbin")).unwrap();
        std::fs::write(root.path().join("sbin/mount.nfs"), "").unwrap();
        host.respond("mount", 32, "mount.nfs: access denied by server\n");
        assert_eq!(
            text(),
            "mount failed: exit status 32\nMounting command: mount\nMounting arguments: -t nfs s:/x /t\n\
             Output: mount.nfs: access denied by server\n"
        );
    }
}
