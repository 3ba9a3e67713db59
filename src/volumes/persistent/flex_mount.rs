//! The set-up of flexVolumes: by their driver, or what the driver leaves to the agent.

use std::path::{Path, PathBuf};

use super::super::error::VolumeError;
use super::super::group_marker::Marker;
use super::super::kind::{Certainty, KindError, Phase};
use super::super::ownership::Policy;
use super::super::plugin::Plugin;
use super::super::{empty_dir, paths};
use super::filesystem::{self, Mounting};
use super::host::mount_at;
use super::owner::policy;
use super::storage::{Request, Storage};
use super::{Kinds, bind_options, devices, flex, make_dirs, relative, remove_dir, system_options};
use crate::model::mount::MountedVolume;
use crate::model::persistent::{Flex, Spec};
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;

impl Plugin for Flex {
    fn name(&self) -> &'static str {
        "kubernetes.io/flexvolume"
    }

    fn describe(&self) -> Option<String> {
        Some(self.driver.clone())
    }
}

impl Storage for Flex {
    fn server(&self) -> Option<String> {
        Some(format!("flexvolume/{}", self.driver))
    }

    fn directory(&self) -> String {
        self.driver.replace('/', "~")
    }

    fn mount(&self, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError> {
        let mounted = mount(self, kinds, request)?;
        kinds.grow_flex(request, self)?;
        Ok(mounted)
    }

    fn grows(&self) -> bool {
        true
    }

    fn refresh(&self, kinds: &Kinds, request: &Request<'_>) -> Result<Option<MountedVolume>, VolumeError> {
        kinds.grow_flex(request, self)?;
        Ok(None)
    }
}

/// Has the driver mount the volume, or mounts what the driver leaves to the agent.
fn mount(source: &Flex, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError> {
    let Request { pod, volume, spec, stop, .. } = *request;
    let target = kinds.target(request, source)?;
    let (host, driver) = (&*kinds.host, source.driver.as_str());
    let able = kinds.drivers.init(host, driver, stop)?;
    let gid = empty_dir::fs_group(pod);
    let walks = gid.filter(|_| able.fs_group && !spec.read_only);
    if mount_at(&host.mounts()?, &target).is_some() {
        if let Some(gid) = walks {
            kinds.own(pod, &volume.name, &target, (gid, true))?;
        }
        return Ok(request.mounted(target, able.selinux_relabel));
    }
    let mut global = None;
    let mut lock = None;
    if able.attach {
        let dir = kinds.flex_device_dir(source, spec)?;
        lock = Some(kinds.locks.take(&dir, stop)?);
        kinds.mount_flex_device(spec, source, &dir, stop)?;
        global = Some(dir);
    }
    let wanted = source.secret_ref.clone().map(|mut secret| {
        if secret.namespace.is_empty() {
            secret.namespace = pod.namespace().to_owned();
        }
        secret
    });
    let secret = kinds.secret(wanted.as_ref(), Phase::SetUp)?;
    let options = flex::options(spec, source, &flex::pod_options(pod, gid, &secret));
    if walks.is_some() && policy(pod) == Policy::Always {
        Marker::for_volume(&target)?.make()?;
    }
    let is_done =
        kinds.drivers.mount(host, (driver, &target), &options, stop).inspect_err(|_| remove_dir(&target))?;
    if !is_done {
        let Some(global) = global else {
            return Err(VolumeError::device(Phase::SetUp, format!("driver {driver} supports no mount")));
        };
        host.bind(&global, &target, &bind_options(spec)).inspect_err(|_| remove_dir(&target))?;
    }
    drop(lock);
    if let Some(gid) = walks {
        kinds.own(pod, &volume.name, &target, (gid, false))?;
    }
    Ok(request.mounted(target, able.selinux_relabel))
}

impl Kinds {
    /// The directory of a volume that is mounted once for all pods.
    fn flex_device_dir(&self, source: &Flex, spec: &Spec) -> Result<PathBuf, VolumeError> {
        let top = devices::plugins(&self.root_dir).join("flexvolume");
        let driver = relative(PathBuf::from(source.driver.as_str()))?;
        Ok(top.join(driver).join("mounts").join(paths::element(&spec.name)?))
    }

    /// Grows a volume that the controller has made larger (Go: expander.go, expander-defaults.go).
    fn grow_flex(&self, request: &Request<'_>, source: &Flex) -> Result<(), VolumeError> {
        let Request { pod, spec, stop, .. } = *request;
        let Some(bytes) = spec.grow_to().filter(|_| !spec.read_only) else { return Ok(()) };
        let (host, driver) = (&*self.host, source.driver.as_str());
        let able = self.drivers.init(host, driver, stop)?;
        if !able.fs_resize {
            return Ok(());
        }
        let target = paths::pod(&self.root_dir, pod.uid())?.join("volumes");
        let target = target.join(paths::element(&source.directory())?).join(paths::element(&spec.name)?);
        let dir = self.flex_device_dir(source, spec)?;
        let _lock = able.attach.then(|| self.locks.take(&dir, stop)).transpose()?;
        let table = host.mounts()?;
        let mounts = [&dir, &target].into_iter().filter_map(|path| mount_at(&table, path));
        let device = mounts.map(|mount| mount.source.as_str()).find(|source| source.starts_with("/dev/"));
        let device = device.unwrap_or_default();
        let grow = || {
            let (options, sizes) = (flex::options(spec, source, &[]), (bytes, spec.expansion.claim_bytes));
            let expanded = self.drivers.expand_fs(host, (driver, device, &target), &options, sizes, stop)?;
            // Without a device the file system is that of a server, which has its size.
            if !expanded && !device.is_empty() {
                filesystem::grow(host, Mounting { source: Path::new(device), target: &target }, stop)?;
            }
            Ok(())
        };
        let failed = |error: VolumeError| match error {
            VolumeError::Stopping => VolumeError::Stopping,
            error => {
                let (phase, certainty) = (Phase::Expand, Certainty::Final);
                KindError { phase, message: chain(&error), certainty }.into()
            }
        };
        self.growing(request, || grow().map_err(failed))?;
        self.report_expansion(request);
        Ok(())
    }

    fn mount_flex_device(
        &self,
        spec: &Spec,
        source: &Flex,
        dir: &Path,
        stop: &StopToken,
    ) -> Result<(), VolumeError> {
        let (host, driver) = (&*self.host, source.driver.as_str());
        if mount_at(&host.mounts()?, dir).is_some() {
            return Ok(());
        }
        let options = flex::options(spec, source, &[]);
        let device = self.drivers.attach(host, (driver, &self.node), &options, stop)?;
        make_dirs(dir)?;
        let is_done = self.drivers.mount_device(host, (driver, dir, &device), &options, stop)?;
        if is_done || device.is_empty() {
            return Ok(());
        }
        let mounting = Mounting { source: Path::new(&device), target: dir };
        let options = filesystem::join(&[], &system_options(spec));
        filesystem::format_and_mount(host, mounting, &source.fs_type, &options, stop)
    }
}
