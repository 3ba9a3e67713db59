//! Making a pod's sandbox (Go: createPodSandbox and what SyncPod does around it).

use std::net::IpAddr;
use std::path::PathBuf;

use crate::cri;
use crate::kube::runtime_classes::{ClassError, RuntimeClasses};
use crate::model::event::{EventType, Regarding};
use crate::model::ids::SandboxId;
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::transport::generated::runtime::{PodSandboxConfig, PodSandboxStatus};
use crate::util::stop::StopToken;

use super::client::{CALL_PATIENCE, Runtime};
use super::config_error::ConfigError;
use super::dns::{self, DnsNotice};
use super::log_files;
use super::placement;
use super::sandbox_config::{SandboxInputs, log_directory, sandbox_config};
use super::security_context::pod_text;
use super::user_namespaces::{IdRange, UserNamespaceError};

/// The runtime's handler for pods that name no RuntimeClass.
const DEFAULT_HANDLER: &str = "";

/// A sandbox that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSandbox {
    /// Its id.
    pub id: SandboxId,
    /// Its addresses, primary first; empty on the node's network.
    pub ips: Vec<IpAddr>,
}

/// Why there is no usable sandbox. The event has been raised.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The pod's specification cannot be converted into a request.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The RuntimeClass of the pod is unknown or not supported.
    #[error(transparent)]
    RuntimeClass(#[from] ClassError),
    /// The pod's log directory cannot be made.
    #[error("cannot make log directory {}: {error}", path.display())]
    LogDirectory { path: PathBuf, error: std::io::Error },
    /// The runtime refused.
    #[error("{0}")]
    Run(cri::CriError),
    /// The sandbox runs, but its addresses cannot be read.
    #[error("{error}")]
    Status { id: SandboxId, error: cri::CriError },
}

impl SandboxError {
    /// Whether the creation was cancelled because the worker stops.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        matches!(self, SandboxError::Run(error) | SandboxError::Status { error, .. }
            if error.class() == cri::ErrorClass::Stopping)
    }

    /// The event's reason.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            SandboxError::Status { .. } => reasons::FAILED_POD_SANDBOX_STATUS,
            _ => reasons::FAILED_CREATE_POD_SANDBOX,
        }
    }
}

impl Runtime {
    /// Creates and starts a sandbox for `pod`, and reads its addresses. A failure is reported in an
    /// event, unless `stop` has cancelled it.
    ///
    /// # Errors
    /// The variants of `SandboxError`.
    pub fn create_sandbox(
        &self,
        pod: &Pod,
        attempt: u32,
        stop: &StopToken,
    ) -> Result<NewSandbox, SandboxError> {
        self.try_create_sandbox(pod, attempt, stop).inspect_err(|error| {
            if stop.is_stopped() || error.is_stopping() {
                return;
            }
            metrics::STARTED_PODS_ERRORS.inc();
            if pod.spec().host_users == Some(false) {
                metrics::STARTED_USER_NAMESPACED_PODS_ERRORS.inc();
            }
            let message = match error {
                SandboxError::Status { .. } => format!("Unable to get pod sandbox status: {error}"),
                _ => format!("Failed to create pod sandbox: {error}"),
            };
            self.shared.events.warning(pod, error.reason(), message);
        })
    }

    fn try_create_sandbox(
        &self,
        pod: &Pod,
        attempt: u32,
        stop: &StopToken,
    ) -> Result<NewSandbox, SandboxError> {
        let shared = &self.shared;
        let handler = self.handler_of(pod, RuntimeClasses::handler)?;
        self.check_groups_policy(pod, stop)?;
        let (config, notices) = self.sandbox_config(pod, attempt, stop)?;
        for notice in notices {
            self.report_dns_notice(pod, notice);
        }
        let path = log_directory(&shared.settings, pod);
        log_files::make_directory(&path)
            .map_err(|error| SandboxError::LogDirectory { path: path.clone(), error })?;
        let client = shared.cri.with_stop(stop.clone());
        metrics::STARTED_PODS.inc();
        if pod.spec().host_users == Some(false) {
            metrics::STARTED_USER_NAMESPACED_PODS.inc();
        }
        let id = {
            // After a stop the call itself returns it.
            let _permit = shared.sandbox_permits.take(stop, Some(CALL_PATIENCE));
            match client.run_pod_sandbox(config.clone(), &handler) {
                Err(error) if self.is_sandbox_image_offered(&error.to_string(), stop) => {
                    client.run_pod_sandbox(config, &handler)
                }
                result => result,
            }
            .map_err(SandboxError::Run)?
        };
        let (namespace, name) = (pod.namespace(), pod.name());
        log::info!("sandbox {id} runs, attempt {attempt} pod={namespace}/{name} uid={}", pod.uid());
        let status =
            client.pod_sandbox_status(&id).map_err(|error| SandboxError::Status { id: id.clone(), error })?;
        let ips = if pod.host_network() { Vec::new() } else { addresses(&status) };
        Ok(NewSandbox { id, ips })
    }

    /// Whether the runtime failed for want of the image of sandboxes, and an archive now offers it:
    /// right after a boot its archive may not have been read.
    fn is_sandbox_image_offered(&self, error: &str, stop: &StopToken) -> bool {
        missing_image(error).is_some_and(|image| self.shared.images.is_offered(image, stop))
    }

    /// The configuration of the sandbox, which is also sent with each container.
    pub(super) fn sandbox_config(
        &self,
        pod: &Pod,
        attempt: u32,
        stop: &StopToken,
    ) -> Result<(PodSandboxConfig, Vec<DnsNotice>), ConfigError> {
        let settings = &self.shared.settings;
        let host = dns::read_host(&settings.resolv_conf)?;
        let (resolver, notices) = dns::pod_resolver(pod, host, &settings.dns());
        let cgroup_parent = &(self.shared.cgroup_parent)(pod);
        let ids = self.user_namespace(pod, stop)?;
        let inputs = SandboxInputs { pod, attempt, resolver: &resolver, settings, cgroup_parent, ids };
        let mut config = sandbox_config(inputs)?;
        if self.shared.placement.is_without_quota(pod)
            && let Some(resources) = config.linux.as_mut().and_then(|linux| linux.resources.as_mut())
        {
            placement::remove_quota(resources);
        }
        Ok((config, notices))
    }

    /// The ids of a pod with a user namespace of its own; they are chosen before its first sandbox
    /// is created and do not change.
    pub(super) fn user_namespace(
        &self,
        pod: &Pod,
        stop: &StopToken,
    ) -> Result<Option<IdRange>, UserNamespaceError> {
        let can = || self.handler_can(&self.known_handler(pod), |handler| handler.user_namespaces, stop);
        self.shared.user_namespaces.of_pod(pod, can, stop)
    }

    /// The runtime's handler for a pod, according to its RuntimeClass.
    ///
    /// DIFFERS: without an API server upstream takes the default handler for all pods; here a pod
    /// that requests stronger isolation than it would get is refused.
    fn handler_of(
        &self,
        pod: &Pod,
        look: impl Fn(&RuntimeClasses, &str) -> Result<String, ClassError>,
    ) -> Result<String, ClassError> {
        let class = pod.spec().runtime_class_name.as_deref().filter(|name| !name.is_empty());
        match (class, &self.shared.api) {
            (None, _) => Ok(DEFAULT_HANDLER.to_owned()),
            (Some(name), Some(api)) => look(&api.classes, name),
            (Some(name), None) => Err(ClassError::NotFound(name.to_owned())),
        }
    }

    /// The handler of a pod whose sandbox exists; the default one if the class is unknown now.
    #[must_use]
    pub fn known_handler(&self, pod: &Pod) -> String {
        self.handler_of(pod, RuntimeClasses::known_handler).unwrap_or_default()
    }

    /// Whether one of the runtime's handlers has a feature.
    fn handler_can(
        &self,
        handler: &str,
        what: impl Fn(&cri::Handler) -> bool,
        stop: &StopToken,
    ) -> Result<bool, cri::CriError> {
        let status = self.shared.cri.with_stop(stop.clone()).status()?;
        Ok(status.handler(handler).is_some_and(what))
    }

    /// A runtime that does not know the policy would merge the groups without an error.
    ///
    /// DIFFERS: upstream checks at admission only, with the features known then.
    fn check_groups_policy(&self, pod: &Pod, stop: &StopToken) -> Result<(), ConfigError> {
        let context = pod.spec().security_context.as_ref();
        if context.and_then(|context| context.supplemental_groups_policy.as_deref()) != Some("Strict") {
            return Ok(());
        }
        let status = self.shared.cri.with_stop(stop.clone()).status().map_err(ConfigError::Abilities)?;
        match status.features {
            Some(features) if features.supplemental_groups_policy => Ok(()),
            _ => Err(ConfigError::StrictGroups),
        }
    }

    /// Reads the node's resolver file once at start and raises an event if pods will not get all of
    /// it.
    pub fn check_resolv_conf(&self) {
        let settings = &self.shared.settings;
        let problems = match dns::read_host(&settings.resolv_conf) {
            Ok(host) => dns::check_host(&host, &settings.resolv_conf, &settings.cluster_domain),
            Err(error) => vec![error.to_string()],
        };
        for problem in problems {
            log::warn!("{problem}");
            let events = &self.shared.events;
            events.raise(Regarding::Node, EventType::Warning, reasons::CHECK_LIMITS_FOR_RESOLV_CONF, problem);
        }
    }

    fn report_dns_notice(&self, pod: &Pod, notice: DnsNotice) {
        let events = &self.shared.events;
        match notice {
            DnsNotice::MissingClusterDns => {
                let message = "kubelet does not have ClusterDNS IP configured and cannot create Pod using \"ClusterFirst\" policy. Falling back to \"Default\" policy.";
                events.raise(Regarding::Node, EventType::Warning, reasons::MISSING_CLUSTER_DNS, message);
                let message = format!("pod: {:?}. {message}", pod_text(pod));
                events.warning(pod, reasons::MISSING_CLUSTER_DNS, message);
            }
            DnsNotice::Forming(message) => events.warning(pod, reasons::DNS_CONFIG_FORMING, message),
        }
    }
}

/// The primary address and the others; if one is invalid, none is used.
fn addresses(status: &PodSandboxStatus) -> Vec<IpAddr> {
    let Some(network) = status.network.as_ref() else { return Vec::new() };
    if network.ip.is_empty() {
        return Vec::new();
    }
    let texts = std::iter::once(&network.ip).chain(network.additional_ips.iter().map(|ip| &ip.ip));
    let parsed: Result<Vec<IpAddr>, _> = texts.map(|text| text.parse::<IpAddr>()).collect();
    parsed.unwrap_or_else(|error| {
        log::warn!("the runtime reports no usable address of sandbox {}: {error}", status.id);
        Vec::new()
    })
}

/// The image of sandboxes in containerd's error, if the runtime does not have it.
fn missing_image(error: &str) -> Option<&str> {
    let (_, rest) = error.split_once("sandbox image \"")?;
    rest.split_once('"').map(|(image, _)| image)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::generated::MessageField;
    use crate::transport::generated::runtime::{PodIP, PodSandboxNetworkStatus};

    #[test]
    fn one_invalid_address_leaves_the_sandbox_without_addresses() {
        let check = |ip: &str, more: &[&str], expected: &[&str]| {
            let status = PodSandboxStatus {
                network: MessageField::some(PodSandboxNetworkStatus {
                    ip: ip.to_owned(),
                    additional_ips: more
                        .iter()
                        .map(|ip| PodIP { ip: (*ip).to_owned(), ..PodIP::default() })
                        .collect(),
                    ..PodSandboxNetworkStatus::default()
                }),
                ..PodSandboxStatus::default()
            };
            let texts: Vec<String> = addresses(&status).iter().map(ToString::to_string).collect();
            assert_eq!(texts, expected);
        };
        check("10.0.0.1", &["fd00::1"], &["10.0.0.1", "fd00::1"]);
        check("", &["fd00::1"], &[]);
        check("10.0.0.1", &["x"], &[]);
        assert!(addresses(&PodSandboxStatus::default()).is_empty());
    }

    #[test]
    fn missing_image_of_sandboxes_is_read_from_containerds_error() {
        // containerd 1.6 and 2.x.
        for error in [
            "rpc error: code = Unknown desc = failed to get sandbox image \"localhost/pause:1\": failed to pull image",
            "failed to start sandbox \"0a\": failed to get sandbox image \"localhost/pause:1\": not found",
        ] {
            assert_eq!(missing_image(error), Some("localhost/pause:1"));
        }
        assert_eq!(missing_image("failed to set up the network of sandbox \"0a\""), None);
    }
}
