//! Calls of the runtime service.

use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::convert;
use super::errors::{CriError, ErrorClass, ErrorLog, without_tokens};
use crate::model::ids::{ContainerId, PodUid, SandboxId};
use crate::model::metrics;
use crate::transport::generated::{MessageField, methods, runtime};
use crate::transport::grpc::{CallError, Channel, Kind, ResponseStream, UnaryMethod};
use crate::util::stop::StopToken;
use crate::util::tracing::{self, Span, SpanKind};

/// The release in which the Go kubelet requires the call RuntimeConfig (Go, 1.37: `getCgroupDriverFromCRI`).
const CONFIG_REQUIRED: &str = "1.38.0";

/// The version of the kubelet's side that the `Version` call announces.
const KUBELET_API_VERSION: &str = "0.1.0";

/// A channel with deadlines for calls and reduced logging of failures.
#[derive(Clone)]
pub(super) struct Caller {
    channel: Channel,
    log: Arc<ErrorLog>,
    stop: StopToken,
    pub(super) request_timeout: Duration,
}

impl Caller {
    pub(super) fn new(channel: Channel, request_timeout: Duration) -> Caller {
        Caller { channel, log: Arc::default(), stop: StopToken::never(), request_timeout }
    }

    pub(super) fn with_stop(&self, stop: StopToken) -> Caller {
        Caller { stop, ..self.clone() }
    }

    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// An ordinary call: the request timeout, and the client's own stop token.
    pub(super) fn call<Req, Resp: Unpin>(
        &self,
        method: &'static UnaryMethod<Req, Resp>,
        object: &str,
        request: &Req,
    ) -> Result<Resp, CriError> {
        self.call_for(method, object, request, Some(self.request_timeout), &self.stop)
    }

    pub(super) fn call_within<Req, Resp: Unpin>(
        &self,
        method: &'static UnaryMethod<Req, Resp>,
        object: &str,
        request: &Req,
        limit: Duration,
    ) -> Result<Resp, CriError> {
        self.call_for(method, object, request, Some(limit), &self.stop)
    }

    pub(super) fn call_for<Req, Resp: Unpin>(
        &self,
        method: &'static UnaryMethod<Req, Resp>,
        object: &str,
        request: &Req,
        limit: Option<Duration>,
        stop: &StopToken,
    ) -> Result<Resp, CriError> {
        let begun = Instant::now();
        let mut span = span(method.path());
        let result = self.channel.call_in_span(method, request, limit, &span, stop);
        self.ended(method.name, object, begun, result.is_ok());
        if result.is_ok() {
            span.set(STATUS_CODE, || "OK");
        }
        result.map_err(|error| self.failed(object, error, span, stop))
    }

    /// Counts a call. Like [`Caller::failed`] it has no type parameters, so that it is compiled once.
    fn ended(&self, method: &'static str, object: &str, begun: Instant, succeeded: bool) {
        let operation = metrics::operation(method);
        metrics::RUNTIME_OPERATIONS.inc([operation]);
        metrics::RUNTIME_OPERATIONS_DURATION.observe_duration([operation], begun.elapsed());
        if succeeded {
            self.log.succeeded(method, object);
        }
    }

    fn failed(&self, object: &str, error: CallError, mut span: Span, stop: &StopToken) -> CriError {
        let operation = metrics::operation(error.method);
        span.set(STATUS_CODE, || error.kind.code_name());
        if span.is_recorded() {
            span.fail(&without_tokens(&error.message));
        }
        let error = failed(object, error, stop);
        if error.class() != ErrorClass::Stopping {
            metrics::RUNTIME_OPERATIONS_ERRORS.inc([operation]);
        }
        self.note(error)
    }

    pub(super) fn incomplete(&self, method: &'static str, object: &str, what: &'static str) -> CriError {
        self.note(CriError::Incomplete { method, object: object.to_owned(), what })
    }

    fn note(&self, error: CriError) -> CriError {
        self.log.note(&error);
        error
    }
}

/// The attribute of a call's status.
const STATUS_CODE: &str = "rpc.response.status_code";

/// The span of a call, by the method's path (Go: otelgrpc, `clientHandler.TagRPC`).
fn span(path: &'static str) -> Span {
    let name = path.strip_prefix('/').unwrap_or(path);
    let mut span = tracing::start(name, SpanKind::Client);
    span.set("rpc.method", || name);
    span.set("rpc.system.name", || "grpc");
    span
}

fn failed(object: &str, error: CallError, stop: &StopToken) -> CriError {
    let object = object.to_owned();
    if error.kind == Kind::Cancelled && stop.is_stopped() {
        CriError::Stopped { method: error.method, object }
    } else {
        let error = CallError { message: without_tokens(&error.message), ..error };
        CriError::Call { object, error }
    }
}

/// The response to `Version`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeVersion {
    /// `containerd`, `cri-o`: the scheme of container ids in statuses.
    pub runtime_name: String,
    /// Such as `v2.1.9`.
    pub runtime_version: String,
    /// Of the CRI.
    pub runtime_api_version: String,
}

/// The features of one runtime handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handler {
    /// Name, as in a RuntimeClass; empty for the default one.
    pub name: String,
    /// Whether read-only mounts can be recursive.
    pub recursive_read_only_mounts: bool,
    /// Whether pods can have their own user namespace.
    pub user_namespaces: bool,
}

/// The features that do not depend on a runtime handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RuntimeFeatures {
    /// `supplementalGroupsPolicy` is honored.
    pub supplemental_groups_policy: bool,
    /// User namespaces together with the host's network.
    pub user_namespaces_host_network: bool,
}

/// A condition of the runtime that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{condition}=false reason:{reason} message:{message}")]
pub struct NotReady {
    condition: &'static str,
    reason: String,
    message: String,
}

/// The response to `Status`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeStatus {
    /// Whether the runtime can run containers.
    pub ready: Result<(), NotReady>,
    /// Whether pods get a network.
    pub network_ready: Result<(), NotReady>,
    /// Handlers, sorted by name.
    pub handlers: Vec<Handler>,
    /// `None` when the runtime is too old to report them.
    pub features: Option<RuntimeFeatures>,
}

impl RuntimeStatus {
    /// The handler `name`, if the runtime reported it.
    #[must_use]
    pub fn handler(&self, name: &str) -> Option<&Handler> {
        self.handlers.iter().find(|handler| handler.name == name)
    }
}

/// The manager of container cgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupDriver {
    /// systemd, in slices and scopes.
    Systemd,
    /// The runtime itself, in plain directories.
    Cgroupfs,
}

/// How a command in a container ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecOutput {
    /// All of its standard output; the runtime truncates it at 16 MiB.
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub exit_code: i32,
}

/// The stream of container events. Dropping it ends the stream. Failures are logged by the
/// reader, not here.
pub struct ContainerEvents {
    incoming: ResponseStream<runtime::ContainerEventResponse>,
}

impl ContainerEvents {
    /// Waits for the next event; `None` when the runtime ended the stream without an error.
    ///
    /// # Errors
    /// When the stream breaks or has a message that cannot be parsed, when the runtime does not
    /// offer it ([`super::ErrorClass::Unsupported`]), or after `stop`.
    pub fn next(&mut self, stop: &StopToken) -> Result<Option<ContainerEvent>, CriError> {
        match self.incoming.next(stop) {
            Ok(event) => Ok(event.map(convert::container_event)),
            Err(error) => {
                let error = failed("", error, stop);
                if error.class() != ErrorClass::Stopping {
                    metrics::RUNTIME_OPERATIONS_ERRORS.inc([EVENTS_OPERATION]);
                }
                Err(error)
            }
        }
    }
}

/// The used part of an event: that the state of a container changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerEvent {
    /// The container, or the sandbox itself.
    pub id: String,
    /// The pod, if the runtime still has the sandbox and it has our labels.
    pub uid: Option<PodUid>,
    /// Whether the event names a sandbox. One without our labels belongs to another client.
    pub sandbox_known: bool,
    /// When the runtime made the event.
    pub made_at: Option<Timestamp>,
}

const EVENTS_OPERATION: &str = "get_container_events";

/// Client of the runtime service. Cloning is cheap; clones share the connection.
#[derive(Clone)]
pub struct RuntimeClient {
    pub(super) caller: Caller,
}

impl RuntimeClient {
    pub(super) fn new(channel: Channel, request_timeout: Duration) -> RuntimeClient {
        RuntimeClient { caller: Caller::new(channel, request_timeout) }
    }

    /// A copy of the client, whose calls `stop` cancels immediately.
    #[must_use]
    pub fn with_stop(&self, stop: StopToken) -> RuntimeClient {
        RuntimeClient { caller: self.caller.with_stop(stop) }
    }

    // ---- the runtime itself ----

    /// Name and version of the runtime.
    ///
    /// # Errors
    /// When the call fails or a field is empty.
    pub fn version(&self) -> Result<RuntimeVersion, CriError> {
        let request =
            runtime::VersionRequest { version: KUBELET_API_VERSION.to_owned(), ..Default::default() };
        let response = self.caller.call(&methods::VERSION, "", &request)?;
        let fields = [
            &response.version,
            &response.runtime_name,
            &response.runtime_version,
            &response.runtime_api_version,
        ];
        if fields.iter().any(|field| field.is_empty()) {
            return Err(self.caller.incomplete(methods::VERSION.name, "", "a version field"));
        }
        Ok(RuntimeVersion {
            runtime_name: response.runtime_name,
            runtime_version: response.runtime_version,
            runtime_api_version: response.runtime_api_version,
        })
    }

    /// Conditions and features of the runtime.
    ///
    /// # Errors
    /// When the call fails or one of the two required conditions is missing.
    pub fn status(&self) -> Result<RuntimeStatus, CriError> {
        let response = self.caller.call(&methods::STATUS, "", &runtime::StatusRequest::default())?;
        let condition = |condition: &'static str| {
            let found = response.status.conditions.iter().find(|found| found.type_ == condition)?;
            let (reason, message) = (found.reason.clone(), found.message.clone());
            Some(if found.status { Ok(()) } else { Err(NotReady { condition, reason, message }) })
        };
        let (Some(ready), Some(network_ready)) = (condition("RuntimeReady"), condition("NetworkReady"))
        else {
            let what = "the RuntimeReady or NetworkReady condition";
            return Err(self.caller.incomplete(methods::STATUS.name, "", what));
        };
        let mut handlers: Vec<Handler> = response
            .runtime_handlers
            .iter()
            .map(|handler| Handler {
                name: handler.name.clone(),
                recursive_read_only_mounts: handler.features.recursive_read_only_mounts,
                user_namespaces: handler.features.user_namespaces,
            })
            .collect();
        handlers.sort_by(|a, b| a.name.cmp(&b.name));
        let features = response.features.as_ref().map(|features| RuntimeFeatures {
            supplemental_groups_policy: features.supplemental_groups_policy,
            user_namespaces_host_network: features.user_namespaces_host_network,
        });
        Ok(RuntimeStatus { ready, network_ready, handlers, features })
    }

    /// The image of all sandboxes, if the runtime reports it: containerd 1.x does not pin it, so
    /// image garbage collection would remove it as unused.
    ///
    /// # Errors
    /// When the call fails.
    pub fn sandbox_image(&self) -> Result<Option<String>, CriError> {
        let request = runtime::StatusRequest { verbose: true, ..Default::default() };
        let response = self.caller.call(&methods::STATUS, "", &request)?;
        Ok(response.info.get("config").and_then(|config| sandbox_image_in(config)))
    }

    /// The cgroup driver that the runtime uses; `None` when it does not report one.
    ///
    /// # Errors
    /// When the call fails; [`super::ErrorClass::Unsupported`] from older runtimes.
    pub fn cgroup_driver(&self) -> Result<Option<CgroupDriver>, CriError> {
        static IS_COUNTED: Once = Once::new();
        let request = runtime::RuntimeConfigRequest::default();
        let called = self.caller.call(&methods::RUNTIME_CONFIG, "", &request);
        let response = called.inspect_err(|error| {
            if error.class() == ErrorClass::Unsupported {
                IS_COUNTED.call_once(|| metrics::CRI_LOSING_SUPPORT.add([CONFIG_REQUIRED], 1));
            }
        })?;
        Ok(response.linux.as_ref().and_then(|linux| match linux.cgroup_driver.enum_value() {
            Ok(runtime::CgroupDriver::SYSTEMD) => Some(CgroupDriver::Systemd),
            Ok(runtime::CgroupDriver::CGROUPFS) => Some(CgroupDriver::Cgroupfs),
            Err(_) => None,
        }))
    }

    /// Sends the pod address range of this node to the runtime.
    ///
    /// # Errors
    /// When the call fails.
    pub fn update_runtime_config(&self, pod_cidr: &str) -> Result<(), CriError> {
        let network = runtime::NetworkConfig { pod_cidr: pod_cidr.to_owned(), ..Default::default() };
        let config =
            runtime::RuntimeConfig { network_config: MessageField::some(network), ..Default::default() };
        let request = runtime::UpdateRuntimeConfigRequest {
            runtime_config: MessageField::some(config),
            ..Default::default()
        };
        self.caller.call(&methods::UPDATE_RUNTIME_CONFIG, pod_cidr, &request).map(drop)
    }

    /// Opens the stream of container events. A refusal is an error of the first read.
    ///
    /// # Errors
    /// When the call cannot be started.
    pub fn container_events(&self) -> Result<ContainerEvents, CriError> {
        let request = runtime::GetEventsRequest::default();
        metrics::RUNTIME_OPERATIONS.inc([EVENTS_OPERATION]);
        match self.caller.channel.open(&methods::GET_CONTAINER_EVENTS, &request) {
            Ok(incoming) => Ok(ContainerEvents { incoming }),
            Err(error) => Err(failed("", error, &StopToken::never())),
        }
    }

    // ---- sandboxes ----

    /// Makes and starts a sandbox. May take twice the request timeout: networks are slow.
    ///
    /// # Errors
    /// When the call fails or no id comes back.
    pub fn run_pod_sandbox(
        &self,
        config: runtime::PodSandboxConfig,
        runtime_handler: &str,
    ) -> Result<SandboxId, CriError> {
        let object = config.metadata.as_ref().map_or_else(String::new, |metadata| {
            format!("{}_{}({})", metadata.name, metadata.namespace, metadata.uid)
        });
        let request = runtime::RunPodSandboxRequest {
            config: MessageField::some(config),
            runtime_handler: runtime_handler.to_owned(),
            ..Default::default()
        };
        let limit = self.caller.request_timeout.saturating_mul(2);
        let begun = Instant::now();
        let response = self.caller.call_within(&methods::RUN_POD_SANDBOX, &object, &request, limit);
        metrics::RUN_POD_SANDBOX.observe_duration([runtime_handler.to_owned()], begun.elapsed());
        if response.is_err() {
            metrics::RUN_POD_SANDBOX_ERRORS.inc([runtime_handler.to_owned()]);
        }
        let response = response?;
        if response.pod_sandbox_id.is_empty() {
            return Err(self.caller.incomplete(methods::RUN_POD_SANDBOX.name, &object, "pod_sandbox_id"));
        }
        Ok(SandboxId::from(response.pod_sandbox_id))
    }

    /// Kills all processes in the sandbox and removes its network. The call is idempotent.
    ///
    /// # Errors
    /// When the call fails.
    pub fn stop_pod_sandbox(&self, id: &SandboxId) -> Result<(), CriError> {
        let request = runtime::StopPodSandboxRequest { pod_sandbox_id: id.to_string(), ..Default::default() };
        self.caller.call(&methods::STOP_POD_SANDBOX, id.as_str(), &request).map(drop)
    }

    /// Removes the sandbox with all its containers.
    ///
    /// # Errors
    /// When the call fails.
    pub fn remove_pod_sandbox(&self, id: &SandboxId) -> Result<(), CriError> {
        let request =
            runtime::RemovePodSandboxRequest { pod_sandbox_id: id.to_string(), ..Default::default() };
        self.caller.call(&methods::REMOVE_POD_SANDBOX, id.as_str(), &request).map(drop)
    }

    /// The status of one sandbox.
    ///
    /// # Errors
    /// When the call fails or no status comes back.
    pub fn pod_sandbox_status(&self, id: &SandboxId) -> Result<runtime::PodSandboxStatus, CriError> {
        let request =
            runtime::PodSandboxStatusRequest { pod_sandbox_id: id.to_string(), ..Default::default() };
        let response = self.caller.call(&methods::POD_SANDBOX_STATUS, id.as_str(), &request)?;
        response
            .status
            .into_option()
            .ok_or_else(|| self.caller.incomplete(methods::POD_SANDBOX_STATUS.name, id.as_str(), "status"))
    }

    /// Sandboxes that match `filter`; all of them for an empty one.
    ///
    /// # Errors
    /// When the call fails.
    pub fn list_pod_sandbox(
        &self,
        filter: runtime::PodSandboxFilter,
    ) -> Result<Vec<runtime::PodSandbox>, CriError> {
        let request =
            runtime::ListPodSandboxRequest { filter: MessageField::some(filter), ..Default::default() };
        Ok(self.caller.call(&methods::LIST_POD_SANDBOX, "", &request)?.items)
    }

    // ---- containers ----

    /// Creates a container without starting it.
    ///
    /// # Errors
    /// When the call fails or no id comes back.
    pub fn create_container(
        &self,
        sandbox: &SandboxId,
        config: runtime::ContainerConfig,
        sandbox_config: &runtime::PodSandboxConfig,
    ) -> Result<ContainerId, CriError> {
        let name = config.metadata.as_ref().map_or("", |metadata| metadata.name.as_str());
        let object = format!("{name} in {sandbox}");
        let request = runtime::CreateContainerRequest {
            pod_sandbox_id: sandbox.to_string(),
            config: MessageField::some(config),
            sandbox_config: MessageField::some(sandbox_config.clone()),
            ..Default::default()
        };
        let response = self.caller.call(&methods::CREATE_CONTAINER, &object, &request)?;
        if response.container_id.is_empty() {
            return Err(self.caller.incomplete(methods::CREATE_CONTAINER.name, &object, "container_id"));
        }
        Ok(ContainerId::from(response.container_id))
    }

    /// Starts a container.
    ///
    /// # Errors
    /// When the call fails.
    pub fn start_container(&self, id: &ContainerId) -> Result<(), CriError> {
        let request = runtime::StartContainerRequest { container_id: id.to_string(), ..Default::default() };
        self.caller.call(&methods::START_CONTAINER, id.as_str(), &request).map(drop)
    }

    /// Sends the container its stop signal, kills it after `grace` (whole seconds, rounded up), and
    /// waits for its end. `stop` ends the wait, not the operation in the runtime.
    ///
    /// # Errors
    /// When the call fails.
    pub fn stop_container(
        &self,
        id: &ContainerId,
        grace: Duration,
        stop: &StopToken,
    ) -> Result<(), CriError> {
        let request = runtime::StopContainerRequest {
            container_id: id.to_string(),
            timeout: whole_seconds(grace),
            ..Default::default()
        };
        let limit = Some(self.stop_limit(grace));
        self.caller.call_for(&methods::STOP_CONTAINER, id.as_str(), &request, limit, stop).map(drop)
    }

    /// The deadline of [`RuntimeClient::stop_container`]: the grace period plus the request
    /// timeout.
    #[must_use]
    pub fn stop_limit(&self, grace: Duration) -> Duration {
        self.caller.request_timeout.saturating_add(grace)
    }

    /// Removes a container; the runtime kills it first if it still runs.
    ///
    /// # Errors
    /// When the call fails.
    pub fn remove_container(&self, id: &ContainerId) -> Result<(), CriError> {
        let request = runtime::RemoveContainerRequest { container_id: id.to_string(), ..Default::default() };
        self.caller.call(&methods::REMOVE_CONTAINER, id.as_str(), &request).map(drop)
    }

    /// Containers that match `filter`; all of them, in every state, for an empty one.
    ///
    /// # Errors
    /// When the call fails.
    pub fn list_containers(
        &self,
        filter: runtime::ContainerFilter,
    ) -> Result<Vec<runtime::Container>, CriError> {
        let request =
            runtime::ListContainersRequest { filter: MessageField::some(filter), ..Default::default() };
        Ok(self.caller.call(&methods::LIST_CONTAINERS, "", &request)?.containers)
    }

    /// The status of one container.
    ///
    /// # Errors
    /// When the call fails or no status comes back.
    pub fn container_status(&self, id: &ContainerId) -> Result<runtime::ContainerStatus, CriError> {
        let request = runtime::ContainerStatusRequest { container_id: id.to_string(), ..Default::default() };
        let response = self.caller.call(&methods::CONTAINER_STATUS, id.as_str(), &request)?;
        response
            .status
            .into_option()
            .ok_or_else(|| self.caller.incomplete(methods::CONTAINER_STATUS.name, id.as_str(), "status"))
    }

    /// Changes the resources of a running container; fields at their default stay as they are.
    ///
    /// # Errors
    /// When the call fails.
    pub fn update_container_resources(
        &self,
        id: &ContainerId,
        resources: runtime::LinuxContainerResources,
    ) -> Result<(), CriError> {
        let request = runtime::UpdateContainerResourcesRequest {
            container_id: id.to_string(),
            linux: MessageField::some(resources),
            ..Default::default()
        };
        self.caller.call(&methods::UPDATE_CONTAINER_RESOURCES, id.as_str(), &request).map(drop)
    }

    /// Reports the resources that the pod of a sandbox gets, before its cgroup has them.
    ///
    /// # Errors
    /// When the call fails.
    pub fn update_sandbox_resources(
        &self,
        id: &SandboxId,
        overhead: runtime::LinuxContainerResources,
        resources: runtime::LinuxContainerResources,
    ) -> Result<(), CriError> {
        let request = runtime::UpdatePodSandboxResourcesRequest {
            pod_sandbox_id: id.to_string(),
            overhead: MessageField::some(overhead),
            resources: MessageField::some(resources),
            ..Default::default()
        };
        self.caller.call(&methods::UPDATE_POD_SANDBOX_RESOURCES, id.as_str(), &request).map(drop)
    }

    /// The bytes of memory that the container uses, caches of files included. `None`: the runtime
    /// does not report them.
    ///
    /// # Errors
    /// When the call fails.
    pub fn memory_used(&self, id: &ContainerId) -> Result<Option<u64>, CriError> {
        let request = runtime::ContainerStatsRequest { container_id: id.to_string(), ..Default::default() };
        match self.caller.call(&methods::CONTAINER_STATS, id.as_str(), &request) {
            Ok(response) => {
                let memory = response.stats.into_option().and_then(|stats| stats.memory.into_option());
                Ok(memory.and_then(|memory| memory.usage_bytes.into_option()).map(|bytes| bytes.value))
            }
            Err(error) if error.class() == ErrorClass::Unsupported => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes the runtime open the log file again, after a rotation.
    ///
    /// # Errors
    /// When the call fails.
    pub fn reopen_container_log(&self, id: &ContainerId) -> Result<(), CriError> {
        let request =
            runtime::ReopenContainerLogRequest { container_id: id.to_string(), ..Default::default() };
        self.caller.call(&methods::REOPEN_CONTAINER_LOG, id.as_str(), &request).map(drop)
    }

    /// Runs a command in the container and waits for its end. The runtime enforces `timeout` (whole
    /// seconds, rounded up); with zero only `stop` ends it early.
    ///
    /// # Errors
    /// When the call fails; a non-zero exit code is no error here.
    pub fn exec_sync(
        &self,
        id: &ContainerId,
        command: Vec<String>,
        timeout: Duration,
        stop: &StopToken,
    ) -> Result<ExecOutput, CriError> {
        let limit = (!timeout.is_zero()).then(|| self.caller.request_timeout.saturating_add(timeout));
        self.exec(id, command, timeout, limit, stop)
    }

    /// Runs a command in the container and waits for its end. The request has no timeout; the call
    /// is cancelled after `limit`, if there is one, and the runtime then kills the command.
    ///
    /// # Errors
    /// When the call fails; a non-zero exit code is no error here.
    pub fn exec_sync_within(
        &self,
        id: &ContainerId,
        command: Vec<String>,
        limit: Option<Duration>,
        stop: &StopToken,
    ) -> Result<ExecOutput, CriError> {
        self.exec(id, command, Duration::ZERO, limit, stop)
    }

    fn exec(
        &self,
        id: &ContainerId,
        command: Vec<String>,
        timeout: Duration,
        limit: Option<Duration>,
        stop: &StopToken,
    ) -> Result<ExecOutput, CriError> {
        let request = runtime::ExecSyncRequest {
            container_id: id.to_string(),
            cmd: command,
            timeout: whole_seconds(timeout),
            ..Default::default()
        };
        let response = self.caller.call_for(&methods::EXEC_SYNC, id.as_str(), &request, limit, stop)?;
        Ok(ExecOutput { stdout: response.stdout, stderr: response.stderr, exit_code: response.exit_code })
    }
}

fn whole_seconds(time: Duration) -> i64 {
    let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    if time.subsec_nanos() > 0 { seconds.saturating_add(1) } else { seconds }
}

/// Reads the name from containerd's own configuration, which its status carries as JSON.
fn sandbox_image_in(config: &str) -> Option<String> {
    let config: serde_json::Value = serde_json::from_str(config).ok()?;
    let image = config.get("sandboxImage")?.as_str()?;
    (!image.is_empty()).then(|| image.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_image_is_read_from_status_of_containerd_1() {
        let image = sandbox_image_in(r#"{"containerd":{},"sandboxImage":"localhost/pause:1","x":1}"#);
        assert_eq!(image.as_deref(), Some("localhost/pause:1"));
        for other in ["", "{}", "[]", r#"{"sandboxImage":""}"#, r#"{"sandboxImage":7}"#] {
            assert_eq!(sandbox_image_in(other), None, "{other}");
        }
    }

    #[test]
    fn fraction_of_a_second_is_rounded_up() {
        for (time, seconds) in [
            (Duration::ZERO, 0),
            (Duration::from_millis(1), 1),
            (Duration::from_secs(30), 30),
            (Duration::from_millis(30_001), 31),
            (Duration::MAX, i64::MAX),
        ] {
            assert_eq!(whole_seconds(time), seconds, "{time:?}");
        }
    }
}
