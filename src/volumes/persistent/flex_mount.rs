//! The set-up of flexVolumes: by their driver, or what the driver leaves to the agent.

use std::path::{Path, PathBuf};

use super::super::error::VolumeError;
use super::super::group_marker::Marker;
use super::super::kind::Phase;
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
        let Request { pod, volume, spec, stop } = *request;
        let target = kinds.target(request, self)?;
        let (host, driver) = (&*kinds.host, self.driver.as_str());
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
            let dir = devices::plugins(&kinds.root_dir).join("flexvolume");
            let dir =
                dir.join(relative(PathBuf::from(driver))?).join("mounts").join(paths::element(&spec.name)?);
            lock = Some(kinds.locks.take(&dir, stop)?);
            kinds.mount_flex_device(spec, self, &dir, stop)?;
            global = Some(dir);
        }
        let wanted = self.secret_ref.clone().map(|mut secret| {
            if secret.namespace.is_empty() {
                secret.namespace = pod.namespace().to_owned();
            }
            secret
        });
        let secret = kinds.secret(wanted.as_ref(), Phase::SetUp)?;
        let options = flex::options(spec, self, &flex::pod_options(pod, gid, &secret));
        if walks.is_some() && policy(pod) == Policy::Always {
            Marker::for_volume(&target)?.make()?;
        }
        let is_done = kinds
            .drivers
            .mount(host, (driver, &target), &options, stop)
            .inspect_err(|_| remove_dir(&target))?;
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
}

impl Kinds {
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
