//! Starting one container: image, configuration, create, start, links (Go: startContainer).

use std::path::PathBuf;

use crate::cri::{CriError, ErrorClass};
use crate::images::{ContainerImage, ImageFailure, ImageRequest};
use crate::model::api::Container;
use crate::model::event::{EventType, Regarding};
use crate::model::ids::ContainerId;
use crate::model::image_name;
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::model::runtime::ContainerState;
use crate::transport::generated::Enum;
use crate::transport::generated::runtime::{ContainerConfig, NamespaceMode, PodSandboxConfig, Signal};

use super::client::{CALL_PATIENCE, Runtime};
use super::config_error::ConfigError;
use super::container_config::{ContainerInputs, container_config, log_path};
use super::fields::Addresses;
use super::hooks::Hook;
use super::hostname::hostname;
use super::mounts::ImageVolume;
use super::sandbox_config::log_directory;
use super::start_request::{Start, StartFailure, container_list, regarding};
use super::{devices, hosts, log_files, placement, security_context, termination_log};

/// The label `container_type` of metrics.
fn container_type(pod: &Pod, container: &str) -> &'static str {
    match container_list(pod, container) {
        "initContainers" => "init_container",
        "ephemeralContainers" => "ephemeral_container",
        _ => "container",
    }
}

impl Runtime {
    /// Starts a container and returns its id. Each step and each failure raises an event. Blocks
    /// during the image pull and the postStart hook.
    ///
    /// # Errors
    /// What the container's waiting state should show.
    pub fn start_container(&self, start: Start<'_>) -> Result<ContainerId, StartFailure> {
        let kind = container_type(start.pod, &start.container.name);
        metrics::STARTED_CONTAINERS.inc([kind]);
        self.try_start(start).inspect_err(|failure| {
            if !failure.stopping {
                metrics::STARTED_CONTAINERS_ERRORS.inc([kind, failure.reason]);
            }
        })
    }

    fn try_start(&self, start: Start<'_>) -> Result<ContainerId, StartFailure> {
        let shared = &self.shared;
        let regarding = regarding(start.pod, &start.container.name);
        let (sandbox_config, _notices) = self
            .sandbox_config(start.pod, start.sandbox_attempt, start.stop)
            .map_err(|error| self.config_failure(&start, &regarding, &error))?;
        let secrets = shared.images.secrets_of(start.pod, start.stop);
        let failed = |failure: ImageFailure| {
            shared.images.report_missing_secrets(start.pod, &secrets, &failure, start.stop);
            self.image_failure(&start, &regarding, failure)
        };
        let image = shared
            .images
            .ensure(ImageRequest {
                pod: start.pod,
                image: start.container.image.as_deref().unwrap_or_default(),
                policy: start.container.image_pull_policy.as_deref(),
                regarding: &regarding,
                sandbox_config: &sandbox_config,
                secrets: &secrets,
                stop: start.stop,
            })
            .map_err(failed)?;
        let image_volumes = self.image_volumes(&start, &sandbox_config, &secrets).map_err(failed)?;
        self.remove_never_started(&start, &regarding)?;
        let restart_count = self.restart_count(&start);
        let config = self
            .prepare(&start, &image, &image_volumes, restart_count)
            .map_err(|error| self.config_failure(&start, &regarding, &error))?;
        // Until the container runs, an image that is being removed to pull it again must not be used by
        // this name: the container would keep its damaged files.
        let volumes = image_volumes.iter().map(|volume| volume.requested());
        let own = start.container.image.as_deref().unwrap_or_default();
        let images: Vec<String> = volumes.chain([own]).filter_map(image_name::listed_name).collect();
        let images: Vec<&str> = images.iter().map(String::as_str).collect();
        let image_pass = shared.replaced.enter(&images, start.stop);
        // The limit applies after the image pull, which may be slow.
        let permit = shared.container_permits.take(start.stop, Some(CALL_PATIENCE));
        let created = self.create(&start, &regarding, config, &sandbox_config);
        let mounted = match created {
            Ok(_) => &metrics::IMAGE_VOLUMES_MOUNTED,
            Err(_) => &metrics::IMAGE_VOLUMES_FAILED,
        };
        image_volumes.iter().for_each(|_| mounted.inc());
        let id = created?;
        self.run(&start, &regarding, &id)?;
        shared.placement.started(start.pod, &start.container.name, &id);
        drop((permit, image_pass));
        self.link_log(&start, &id, restart_count);
        let lifecycle = start.container.lifecycle.as_ref();
        if let Some(handler) = lifecycle.and_then(|lifecycle| lifecycle.post_start.as_ref()) {
            let Start { pod, container, pod_ips, .. } = start;
            self.post_start(Hook { handler, pod, container, id: &id, ips: pod_ips }, start.stop)?;
        }
        Ok(id)
    }

    /// Removes an instance that was created and never ran. The runtime may still start it (the call
    /// was cancelled, or the agent was killed); then two instances would run.
    ///
    /// DIFFERS: upstream does not remove it and assumes that it is never started.
    fn remove_never_started(&self, start: &Start<'_>, regarding: &Regarding) -> Result<(), StartFailure> {
        let Some(status) = start.runtime.newest(&start.container.name) else { return Ok(()) };
        if status.state != ContainerState::Created {
            return Ok(());
        }
        match self.shared.cri.with_stop(start.stop.clone()).remove_container(&status.id) {
            Err(error) if !error.is_not_found() => {
                self.failed(start, regarding, &error.desc());
                Err(runtime_failure(reasons::CREATE_CONTAINER_ERROR, &error))
            }
            _ => Ok(()),
        }
    }

    /// The previous count plus one; from the names of log files when the runtime has no instance.
    fn restart_count(&self, start: &Start<'_>) -> u32 {
        match start.runtime.newest(&start.container.name) {
            Some(status) => status.restart_count.saturating_add(1),
            None => log_files::next_restart_count(&self.container_log_dir(start)),
        }
    }

    fn container_log_dir(&self, start: &Start<'_>) -> PathBuf {
        log_directory(&self.shared.settings, start.pod).join(&start.container.name)
    }

    /// Makes the files that the container mounts, and its configuration.
    fn prepare(
        &self,
        start: &Start<'_>,
        image: &ContainerImage,
        image_volumes: &[ImageVolume],
        restart_count: u32,
    ) -> Result<ContainerConfig, ConfigError> {
        let Start { pod, container, .. } = *start;
        let settings = &self.shared.settings;
        // Before any file is made: this fails at every retry until the manifest changes.
        security_context::verify_non_root(pod, container, &image.user)?;
        let setup = self.shared.placement.devices(pod, &container.name, start.stop);
        let setup = setup.map_err(ConfigError::Devices)?;
        let log_dir = self.container_log_dir(start);
        log_files::make_log_directory(&log_dir).map_err(|error| ConfigError::File {
            what: "make log directory",
            path: log_dir,
            error,
        })?;
        let hosts_file = if hosts::needs_file(pod, start.pod_ips) {
            let hostname = hostname(pod, &settings.cluster_domain)?;
            Some(hosts::write(&settings.root_dir, &settings.hosts_file, pod, &hostname, start.pod_ips)?)
        } else {
            None
        };
        let target = target(start)?;
        let ids = self.user_namespace(pod, start.stop)?;
        let termination_log = termination_log::create(&settings.root_dir, pod, container)?;
        let config = container_config(ContainerInputs {
            pod,
            container,
            restart_count,
            image_ref: image.reference.as_str(),
            image_user: &image.user,
            addresses: Addresses { pod: start.pod_ips, host: start.host_ips },
            volumes: start.volumes,
            image_volumes,
            sub_paths: start.sub_paths,
            recursive_read_only_mounts: start.recursive_read_only_mounts,
            stop: start.stop,
            api: self.shared.api.as_ref(),
            local: &self.shared.local,
            hosts_file: hosts_file.as_deref(),
            termination_log: termination_log.as_deref(),
            settings,
            host: &self.shared.host,
            ids,
        })
        .inspect_err(|_| {
            if let Some(file) = &termination_log {
                // The file was made for an instance that was not created.
                let _ = std::fs::remove_file(file);
            }
        })?;
        let mut config = complete(config, container, target, settings.stop_signals);
        devices::apply(setup, &mut config);
        if let Some(resources) = config.linux.as_mut().and_then(|linux| linux.resources.as_mut()) {
            placement::apply(self.shared.placement.place(pod, &container.name), resources);
        }
        Ok(config)
    }

    fn create(
        &self,
        start: &Start<'_>,
        regarding: &Regarding,
        config: ContainerConfig,
        sandbox_config: &PodSandboxConfig,
    ) -> Result<ContainerId, StartFailure> {
        let client = self.shared.cri.with_stop(start.stop.clone());
        let id = client.create_container(start.sandbox_id, config, sandbox_config).map_err(|error| {
            self.failed(start, regarding, &error.desc());
            runtime_failure(reasons::CREATE_CONTAINER_ERROR, &error)
        })?;
        self.raise_event(regarding, reasons::CREATED, "Container created");
        Ok(id)
    }

    fn run(&self, start: &Start<'_>, regarding: &Regarding, id: &ContainerId) -> Result<(), StartFailure> {
        self.shared.cri.with_stop(start.stop.clone()).start_container(id).map_err(|error| {
            // The name replaces the id, so that repetitions are one event with a count.
            self.failed(start, regarding, &error.desc().replace(id.as_str(), &start.container.name));
            runtime_failure(reasons::RUN_CONTAINER_ERROR, &error)
        })?;
        self.raise_event(regarding, reasons::STARTED, "Container started");
        let (pod, container) = (start.pod, &start.container.name);
        let (namespace, name) = (pod.namespace(), pod.name());
        log::info!("container {id} runs pod={namespace}/{name} uid={} container={container}", pod.uid());
        Ok(())
    }

    fn link_log(&self, start: &Start<'_>, id: &ContainerId, restart_count: u32) {
        let Start { pod, container, .. } = *start;
        let settings = &self.shared.settings;
        let link = log_files::link_path(&settings.container_logs_dir, pod, &container.name, id);
        let log = log_directory(settings, pod).join(log_path(&container.name, restart_count));
        if let Err(error) = log_files::link(&link, &log) {
            log::warn!("cannot link {} to {}: {error}", link.display(), log.display());
        }
    }

    fn image_failure(&self, start: &Start<'_>, regarding: &Regarding, failure: ImageFailure) -> StartFailure {
        self.failed(start, regarding, failure.reason);
        StartFailure {
            reason: failure.reason,
            message: failure.message,
            retry_at: failure.retry_at,
            stopping: start.stop.is_stopped(),
        }
    }

    fn config_failure(&self, start: &Start<'_>, regarding: &Regarding, error: &ConfigError) -> StartFailure {
        let message = error.to_string();
        self.failed(start, regarding, &message);
        StartFailure {
            reason: reasons::CREATE_CONTAINER_CONFIG_ERROR,
            message,
            retry_at: None,
            stopping: start.stop.is_stopped(),
        }
    }

    fn raise_event(&self, regarding: &Regarding, reason: &'static str, message: &str) {
        self.shared.events.raise(regarding.clone(), EventType::Normal, reason, message);
    }

    fn failed(&self, start: &Start<'_>, regarding: &Regarding, message: &str) {
        if !start.stop.is_stopped() {
            let message = format!("Error: {message}");
            self.shared.events.raise(regarding.clone(), EventType::Warning, reasons::FAILED, message);
        }
    }
}

/// The target container of an ephemeral container.
fn target<'a>(start: &Start<'a>) -> Result<Option<&'a ContainerId>, ConfigError> {
    let name = start
        .pod
        .spec()
        .ephemeral_containers
        .iter()
        .flatten()
        .find(|container| container.name == start.container.name)
        .and_then(|container| container.target_container_name.as_deref())
        .filter(|name| !name.is_empty());
    let Some(name) = name else { return Ok(None) };
    match start.runtime.newest(name) {
        Some(status) => Ok(Some(&status.id)),
        None => Err(ConfigError::NoTarget { container: name.to_owned() }),
    }
}

/// The rest of a configuration: the process namespace of another container, and the signal
/// that ends this one.
fn complete(
    mut config: ContainerConfig,
    container: &Container,
    target: Option<&ContainerId>,
    stop_signals: bool,
) -> ContainerConfig {
    if let Some(id) = target
        && let Some(namespaces) = config
            .linux
            .as_mut()
            .and_then(|linux| linux.security_context.as_mut())
            .and_then(|context| context.namespace_options.as_mut())
    {
        namespaces.pid = NamespaceMode::TARGET.into();
        namespaces.target_id = id.to_string();
    }
    let signal = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.stop_signal.as_deref());
    if let Some(signal) = signal.filter(|_| stop_signals) {
        config.stop_signal = stop_signal(signal).into();
    }
    config
}

/// A signal by its name in a manifest, such as `SIGUSR1` or `SIGRTMIN+2`. For one that is not in
/// the CRI the image's signal is used.
fn stop_signal(name: &str) -> Signal {
    let name = name.replace('+', "PLUS").replace('-', "MINUS");
    Signal::from_str(&format!("SIGNAL_{name}")).unwrap_or(Signal::SIGNAL_RUNTIME_DEFAULT)
}

fn runtime_failure(reason: &'static str, error: &CriError) -> StartFailure {
    StartFailure {
        reason,
        message: error.desc(),
        retry_at: None,
        stopping: error.class() == ErrorClass::Stopping,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_signal_names_are_converted_and_unknown_ones_ignored() {
        for (name, signal) in [
            ("SIGUSR1", Signal::SIGNAL_SIGUSR1),
            ("SIGRTMIN+2", Signal::SIGNAL_SIGRTMINPLUS2),
            ("SIGRTMAX-14", Signal::SIGNAL_SIGRTMAXMINUS14),
            ("SIGRTMAX", Signal::SIGNAL_SIGRTMAX),
            ("nonsense", Signal::SIGNAL_RUNTIME_DEFAULT),
            ("", Signal::SIGNAL_RUNTIME_DEFAULT),
        ] {
            assert_eq!(stop_signal(name), signal, "{name}");
        }
    }
}
