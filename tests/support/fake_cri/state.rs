//! The runtime that the fake pretends to be: sandboxes, containers and images in memory,
//! with the answers containerd gives.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coracle::transport::generated::{EnumOrUnknown, MessageField, runtime as rt};
use grpcio::RpcStatusCode as Code;

/// A refused request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Failure {
    pub code: Code,
    pub message: String,
}

pub(super) type MethodResult<T> = Result<T, Failure>;

fn fail<T>(code: Code, message: impl Into<String>) -> MethodResult<T> {
    Err(Failure { code, message: message.into() })
}

#[derive(Debug, Clone)]
pub(crate) struct Sandbox {
    pub config: rt::PodSandboxConfig,
    pub status: rt::PodSandboxStatus,
}

#[derive(Debug, Clone)]
pub(crate) struct Container {
    pub sandbox_id: String,
    pub config: rt::ContainerConfig,
    pub status: rt::ContainerStatus,
    /// When it ends by itself (nanoseconds), and with which code.
    pub(super) ends: Option<(i64, i32)>,
}

impl Container {
    pub(crate) fn is_running(&self) -> bool {
        self.status.state == rt::ContainerState::CONTAINER_RUNNING.into()
    }

    fn exit(&mut self, time: i64, code: i32) {
        let reason = if code == 0 { "Completed" } else { "Error" };
        self.end(time, code, reason, "");
    }

    fn end(&mut self, time: i64, code: i32, reason: &str, message: &str) {
        self.status.state = rt::ContainerState::CONTAINER_EXITED.into();
        self.status.finished_at = time;
        self.status.exit_code = code;
        self.status.reason = reason.to_owned();
        self.status.message = message.to_owned();
        self.ends = None;
    }
}

/// What an exec answers: exit code, standard output, standard error.
pub(crate) type ExecOutput = (i32, Vec<u8>, Vec<u8>);
/// Decides it from the container's name and the command.
pub(super) type ExecRule = Arc<dyn Fn(&str, &[String]) -> ExecOutput + Send + Sync>;

/// The image that golden manifests use, with the id in their recordings.
pub(crate) const BUSYBOX: &str = "localhost/busybox:1";
pub(crate) const BUSYBOX_ID: &str = "sha256:5d1fb6e09aa75e9bdbbf9d51541d3e310c5f2237b0dbdafc0072e0d1503bc864";

pub(crate) struct State {
    pub sandboxes: BTreeMap<String, Sandbox>,
    pub containers: BTreeMap<String, Container>,
    pub images: BTreeMap<String, rt::Image>,
    pub conditions: BTreeMap<&'static str, (bool, String, String)>,
    pub handlers: Vec<rt::RuntimeHandler>,
    /// Whether `supplementalGroupsPolicy` is known.
    pub groups_policy: bool,
    pub cgroup_driver: rt::CgroupDriver,
    pub exec: ExecRule,
    /// Where streams are served, `http://127.0.0.1:1234`; the command follows as a path.
    pub streams: String,
    pub writes_logs: bool,
    /// Events since the subscribers last received any.
    pub unsent_events: Vec<rt::ContainerEventResponse>,
    /// See [`super::FakeCri::duplicates`].
    pub duplicates: Vec<String>,
    pub(super) made: u64,
    clock: i64,
    /// How far its time of day is from the test's, in nanoseconds.
    clock_offset: i64,
}

/// The labels by which pods and containers are known.
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

impl State {
    pub(crate) fn new() -> State {
        let mut state = State {
            sandboxes: BTreeMap::new(),
            containers: BTreeMap::new(),
            images: BTreeMap::new(),
            conditions: BTreeMap::new(),
            handlers: vec![rt::RuntimeHandler::default()],
            groups_policy: true,
            cgroup_driver: rt::CgroupDriver::CGROUPFS,
            exec: Arc::new(|_, _| (0, Vec::new(), Vec::new())),
            streams: String::new(),
            writes_logs: false,
            unsent_events: Vec::new(),
            duplicates: Vec::new(),
            made: 0,
            clock: 0,
            clock_offset: 0,
        };
        for name in ["RuntimeReady", "NetworkReady"] {
            state.conditions.insert(name, (true, String::new(), String::new()));
        }
        state.add_image(BUSYBOX, BUSYBOX_ID);
        state
    }

    /// Nanoseconds since 1970, never the same twice.
    fn now(&mut self) -> i64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        self.clock = (now.as_nanos() as i64).saturating_add(self.clock_offset).max(self.clock + 1);
        self.clock
    }

    /// Sets its time of day, so far from the test's.
    pub(crate) fn set_clock(&mut self, offset: i64) {
        // What ends by itself does so when it would have.
        for container in self.containers.values_mut() {
            if let Some((time, _)) = &mut container.ends {
                *time = time.saturating_add(offset - self.clock_offset);
            }
        }
        (self.clock_offset, self.clock) = (offset, 0);
    }

    fn id(&mut self) -> String {
        self.made += 1;
        // The number leads, so that cut-off ids still differ.
        format!("{:08x}{:056x}", self.made, 0xfa4e)
    }

    pub(crate) fn add_image(&mut self, name: &str, id: &str) {
        let image = rt::Image {
            id: id.to_owned(),
            repo_tags: vec![name.to_owned()],
            size: 4_000_000,
            ..Default::default()
        };
        self.images.insert(id.to_owned(), image);
    }

    fn image(&self, name: &str) -> Option<&rt::Image> {
        self.images
            .get(name)
            .or_else(|| self.images.values().find(|image| image.repo_tags.iter().any(|tag| tag == name)))
    }

    /// Lets containers end whose time has come.
    pub(crate) fn end_due_containers(&mut self) {
        let now = self.now();
        let mut ended = Vec::new();
        for container in self.containers.values_mut() {
            if let Some((time, code)) = container.ends
                && time <= now
                && container.is_running()
            {
                container.exit(time, code);
                ended.push(container.status.id.clone());
            }
        }
        for id in ended {
            self.emit(&id, rt::ContainerEventType::CONTAINER_STOPPED_EVENT);
        }
    }

    fn emit(&mut self, id: &str, kind: rt::ContainerEventType) {
        let sandbox_id = self.containers.get(id).map_or(id, |container| &container.sandbox_id).to_owned();
        self.emit_for(id, &sandbox_id, kind);
    }

    /// As the runtime does, with all that it knows of the sandbox, which may be nothing.
    fn emit_for(&mut self, id: &str, sandbox_id: &str, kind: rt::ContainerEventType) {
        let created_at = self.now();
        let event = rt::ContainerEventResponse {
            container_id: id.to_owned(),
            container_event_type: kind.into(),
            created_at,
            pod_sandbox_status: MessageField::from_option(
                self.sandboxes.get(sandbox_id).map(|sandbox| sandbox.status.clone()),
            ),
            containers_statuses: self
                .containers
                .values()
                .filter(|container| container.sandbox_id == sandbox_id)
                .map(|container| container.status.clone())
                .collect(),
            ..Default::default()
        };
        self.unsent_events.push(event);
    }

    /// Sends an event for every container again, without a change.
    pub(crate) fn repeat_all_events(&mut self) {
        let ids: Vec<String> = self.containers.keys().cloned().collect();
        for id in ids {
            self.emit(&id, rt::ContainerEventType::CONTAINER_STARTED_EVENT);
        }
    }

    pub(crate) fn kill_container(&mut self, id: &str, code: i32) -> bool {
        let now = self.now();
        match self.containers.get_mut(id) {
            Some(container) if container.is_running() => {
                container.exit(now, code);
                self.emit(id, rt::ContainerEventType::CONTAINER_STOPPED_EVENT);
                true
            }
            _ => false,
        }
    }

    pub(crate) fn kill_sandbox(&mut self, id: &str) -> bool {
        let inside: Vec<String> =
            self.containers.values().filter(|c| c.sandbox_id == id).map(|c| c.status.id.clone()).collect();
        for container in inside {
            self.kill_container(&container, 137);
        }
        let Some(sandbox) = self.sandboxes.get_mut(id) else { return false };
        let was_ready = sandbox.status.state == rt::PodSandboxState::SANDBOX_READY.into();
        sandbox.status.state = rt::PodSandboxState::SANDBOX_NOTREADY.into();
        if was_ready {
            self.emit(id, rt::ContainerEventType::CONTAINER_STOPPED_EVENT);
        }
        true
    }

    // ---- the runtime itself ----

    pub(crate) fn version(&mut self, _: rt::VersionRequest) -> MethodResult<rt::VersionResponse> {
        Ok(rt::VersionResponse {
            version: "0.1.0".into(),
            runtime_name: "containerd".into(),
            runtime_version: "v2.1.0-fake".into(),
            runtime_api_version: "v1".into(),
            ..Default::default()
        })
    }

    pub(crate) fn status(&mut self, _: rt::StatusRequest) -> MethodResult<rt::StatusResponse> {
        let conditions = self
            .conditions
            .iter()
            .map(|(name, (status, reason, message))| rt::RuntimeCondition {
                type_: (*name).to_owned(),
                status: *status,
                reason: reason.clone(),
                message: message.clone(),
                ..Default::default()
            })
            .collect();
        Ok(rt::StatusResponse {
            status: MessageField::some(rt::RuntimeStatus { conditions, ..Default::default() }),
            runtime_handlers: self.handlers.clone(),
            features: MessageField::some(rt::RuntimeFeatures {
                supplemental_groups_policy: self.groups_policy,
                ..Default::default()
            }),
            ..Default::default()
        })
    }

    pub(crate) fn runtime_config(
        &mut self,
        _: rt::RuntimeConfigRequest,
    ) -> MethodResult<rt::RuntimeConfigResponse> {
        let linux =
            rt::LinuxRuntimeConfiguration { cgroup_driver: self.cgroup_driver.into(), ..Default::default() };
        Ok(rt::RuntimeConfigResponse { linux: MessageField::some(linux), ..Default::default() })
    }

    pub(crate) fn update_runtime_config(
        &mut self,
        _: rt::UpdateRuntimeConfigRequest,
    ) -> MethodResult<rt::UpdateRuntimeConfigResponse> {
        Ok(rt::UpdateRuntimeConfigResponse::default())
    }

    // ---- sandboxes ----

    pub(crate) fn run_pod_sandbox(
        &mut self,
        request: rt::RunPodSandboxRequest,
    ) -> MethodResult<rt::RunPodSandboxResponse> {
        let config = request.config.unwrap_or_default();
        if !request.runtime_handler.is_empty()
            && !self.handlers.iter().any(|handler| handler.name == request.runtime_handler)
        {
            let message = format!(
                "failed to get sandbox runtime: no runtime for \"{}\" is configured",
                request.runtime_handler
            );
            return fail(Code::UNKNOWN, message);
        }
        let metadata = &config.metadata;
        if let Some(other) = self.sandboxes.values().find(|other| other.config.metadata == *metadata) {
            let name =
                format!("{}_{}_{}_{}", metadata.name, metadata.namespace, metadata.uid, metadata.attempt);
            let message = format!(
                "failed to reserve sandbox name \"{name}\": name \"{name}\" is reserved for \"{}\"",
                other.status.id
            );
            return fail(Code::UNKNOWN, message);
        }
        if let Some(uid) = config.labels.get(POD_UID)
            && let Some(twin) = self.sandboxes.values().find(|other| {
                other.status.state == rt::PodSandboxState::SANDBOX_READY.into()
                    && other.config.labels.get(POD_UID) == Some(uid)
            })
        {
            self.duplicates
                .push(format!("a sandbox was made for pod {uid}, which has {} ready", twin.status.id));
        }
        let options = &config.linux.security_context.namespace_options;
        let host_network = options.network == rt::NamespaceMode::NODE.into();
        let (id, created_at) = (self.id(), self.now());
        let address = Ipv4Addr::from_bits(0x0a58_0000 + self.made as u32);
        let status = rt::PodSandboxStatus {
            id: id.clone(),
            metadata: config.metadata.clone(),
            state: rt::PodSandboxState::SANDBOX_READY.into(),
            created_at,
            network: MessageField::some(rt::PodSandboxNetworkStatus {
                ip: if host_network { String::new() } else { address.to_string() },
                ..Default::default()
            }),
            linux: MessageField::some(rt::LinuxPodSandboxStatus {
                namespaces: MessageField::some(rt::Namespace {
                    options: options.clone(),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
            runtime_handler: request.runtime_handler,
            ..Default::default()
        };
        self.sandboxes.insert(id.clone(), Sandbox { config, status });
        self.emit(&id, rt::ContainerEventType::CONTAINER_STARTED_EVENT);
        Ok(rt::RunPodSandboxResponse { pod_sandbox_id: id, ..Default::default() })
    }

    pub(crate) fn stop_pod_sandbox(
        &mut self,
        request: rt::StopPodSandboxRequest,
    ) -> MethodResult<rt::StopPodSandboxResponse> {
        self.kill_sandbox(&request.pod_sandbox_id);
        Ok(rt::StopPodSandboxResponse::default())
    }

    pub(crate) fn remove_pod_sandbox(
        &mut self,
        request: rt::RemovePodSandboxRequest,
    ) -> MethodResult<rt::RemovePodSandboxResponse> {
        let id = request.pod_sandbox_id;
        let inside: Vec<String> =
            self.containers.values().filter(|c| c.sandbox_id == id).map(|c| c.status.id.clone()).collect();
        for container in inside {
            let request = rt::RemoveContainerRequest { container_id: container, ..Default::default() };
            self.remove_container(request)?;
        }
        if self.sandboxes.remove(&id).is_some() {
            self.emit_for(&id, &id, rt::ContainerEventType::CONTAINER_DELETED_EVENT);
        }
        Ok(rt::RemovePodSandboxResponse::default())
    }

    pub(crate) fn pod_sandbox_status(
        &mut self,
        request: rt::PodSandboxStatusRequest,
    ) -> MethodResult<rt::PodSandboxStatusResponse> {
        match self.sandboxes.get(&request.pod_sandbox_id) {
            Some(sandbox) => Ok(rt::PodSandboxStatusResponse {
                status: MessageField::some(sandbox.status.clone()),
                ..Default::default()
            }),
            None => fail(Code::NOT_FOUND, "an error occurred when try to find sandbox: not found"),
        }
    }

    pub(crate) fn list_pod_sandbox(
        &mut self,
        request: rt::ListPodSandboxRequest,
    ) -> MethodResult<rt::ListPodSandboxResponse> {
        let filter = request.filter.unwrap_or_default();
        let items = self
            .sandboxes
            .values()
            .map(|sandbox| &sandbox.status)
            .filter(|status| filter.id.is_empty() || status.id == filter.id)
            .filter(|status| filter.state.as_ref().is_none_or(|wanted| wanted.state == status.state))
            .filter(|status| matches(&filter.label_selector, &status.labels))
            .map(|status| rt::PodSandbox {
                id: status.id.clone(),
                metadata: status.metadata.clone(),
                state: status.state,
                created_at: status.created_at,
                labels: status.labels.clone(),
                annotations: status.annotations.clone(),
                runtime_handler: status.runtime_handler.clone(),
                ..Default::default()
            })
            .collect();
        Ok(rt::ListPodSandboxResponse { items, ..Default::default() })
    }

    // ---- containers ----

    pub(crate) fn create_container(
        &mut self,
        request: rt::CreateContainerRequest,
    ) -> MethodResult<rt::CreateContainerResponse> {
        let config = request.config.unwrap_or_default();
        let Some(sandbox) = self.sandboxes.get(&request.pod_sandbox_id) else {
            let message = format!("failed to find sandbox id \"{}\": not found", request.pod_sandbox_id);
            return fail(Code::NOT_FOUND, message);
        };
        if sandbox.status.state != rt::PodSandboxState::SANDBOX_READY.into() {
            return fail(Code::UNKNOWN, "failed to get sandbox container task: no running task found");
        }
        let log_path = PathBuf::from(&sandbox.config.log_directory).join(&config.log_path);
        let Some(image_id) = self.image(&config.image.image).map(|image| image.id.clone()) else {
            let message = format!("failed to resolve image \"{}\": not found", config.image.image);
            return fail(Code::NOT_FOUND, message);
        };
        if let Some(other) = self.containers.values().find(|other| {
            other.sandbox_id == request.pod_sandbox_id && other.config.metadata == config.metadata
        }) {
            let name = format!("{}_{}", config.metadata.name, config.metadata.attempt);
            let message = format!(
                "failed to reserve container name \"{name}\": name \"{name}\" is reserved for \"{}\"",
                other.status.id
            );
            return fail(Code::UNKNOWN, message);
        }
        let (id, created_at) = (self.id(), self.now());
        let security = &config.linux.security_context;
        let uid = security.run_as_user.as_ref().map_or(0, |user| user.value);
        let gid = security.run_as_group.as_ref().map_or(0, |group| group.value);
        let mut supplemental_groups = vec![gid];
        supplemental_groups
            .extend(security.supplemental_groups.iter().copied().filter(|group| *group != gid));
        let user = rt::LinuxContainerUser { uid, gid, supplemental_groups, ..Default::default() };
        let shown = match config.image.user_specified_image.as_str() {
            "" => &config.image.image,
            named => named,
        };
        let status = rt::ContainerStatus {
            id: id.clone(),
            metadata: config.metadata.clone(),
            state: rt::ContainerState::CONTAINER_CREATED.into(),
            created_at,
            image: MessageField::some(rt::ImageSpec { image: shown.to_owned(), ..Default::default() }),
            image_ref: image_id.clone(),
            image_id,
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
            mounts: config.mounts.clone(),
            log_path: log_path.to_string_lossy().into_owned(),
            resources: MessageField::some(rt::ContainerResources {
                linux: config.linux.resources.clone(),
                ..Default::default()
            }),
            user: MessageField::some(rt::ContainerUser {
                linux: MessageField::some(user),
                ..Default::default()
            }),
            stop_signal: config.stop_signal,
            ..Default::default()
        };
        let container = Container { sandbox_id: request.pod_sandbox_id, config, status, ends: None };
        self.containers.insert(id.clone(), container);
        self.emit(&id, rt::ContainerEventType::CONTAINER_CREATED_EVENT);
        Ok(rt::CreateContainerResponse { container_id: id, ..Default::default() })
    }

    pub(crate) fn start_container(
        &mut self,
        request: rt::StartContainerRequest,
    ) -> MethodResult<rt::StartContainerResponse> {
        let now = self.now();
        let writes_logs = self.writes_logs;
        self.check_for_duplicates(&request.container_id);
        let container = self.container(&request.container_id)?;
        if container.status.state != rt::ContainerState::CONTAINER_CREATED.into() {
            return fail(Code::UNKNOWN, "container is in a state in which it cannot be started");
        }
        let binary = container.config.command.first().cloned().unwrap_or_default();
        if binary.starts_with("/no/such/") {
            let message = format!(
                "failed to create containerd task: failed to create shim task: OCI runtime create failed: \
                 runc create failed: unable to start container process: exec: \"{binary}\": stat {binary}: \
                 no such file or directory"
            );
            container.end(now, 128, "StartError", &message);
            return fail(Code::UNKNOWN, message);
        }
        container.status.state = rt::ContainerState::CONTAINER_RUNNING.into();
        container.status.started_at = now;
        let (runs_for, code) = script(&container.config);
        container.ends = code.map(|code| (now.saturating_add(runs_for.as_nanos() as i64), code));
        if writes_logs && !container.config.log_path.is_empty() {
            let path = PathBuf::from(&container.status.log_path);
            let written = path
                .parent()
                .map_or(Ok(()), std::fs::create_dir_all)
                .and_then(|()| std::fs::write(&path, "2026-01-02T03:04:05.000000006Z stdout F started\n"));
            if let Err(error) = written {
                return fail(Code::UNKNOWN, format!("failed to create log {}: {error}", path.display()));
            }
        }
        self.emit(&request.container_id, rt::ContainerEventType::CONTAINER_STARTED_EVENT);
        self.end_due_containers();
        Ok(rt::StartContainerResponse::default())
    }

    fn check_for_duplicates(&mut self, id: &str) {
        let identity = |container: &Container| {
            let labels = &container.config.labels;
            Some((labels.get(POD_UID)?.clone(), labels.get(CONTAINER_NAME)?.clone()))
        };
        let Some(started) = self.containers.get(id).and_then(identity) else { return };
        let twin = self.containers.values().find(|other| {
            other.status.id != id && other.is_running() && identity(other).as_ref() == Some(&started)
        });
        if let Some(twin) = twin {
            let duplicate =
                format!("container {started:?} was started as {id} while {} runs", twin.status.id);
            self.duplicates.push(duplicate);
        }
    }

    /// Whether a running container ignores the request to end.
    pub(crate) fn is_stubborn(&self, id: &str) -> bool {
        self.containers
            .get(id)
            .is_some_and(|container| container.is_running() && words(&container.config).contains("stubborn"))
    }

    pub(crate) fn stop_container(
        &mut self,
        request: rt::StopContainerRequest,
    ) -> MethodResult<rt::StopContainerResponse> {
        // One that is gone has stopped.
        if let Ok(container) = self.container(&request.container_id) {
            let polite = words(&container.config).contains("trap");
            self.kill_container(&request.container_id, if polite { 0 } else { 137 });
        }
        Ok(rt::StopContainerResponse::default())
    }

    pub(crate) fn remove_container(
        &mut self,
        request: rt::RemoveContainerRequest,
    ) -> MethodResult<rt::RemoveContainerResponse> {
        if let Some(container) = self.containers.remove(&request.container_id) {
            let kind = rt::ContainerEventType::CONTAINER_DELETED_EVENT;
            self.emit_for(&request.container_id, &container.sandbox_id, kind);
        }
        Ok(rt::RemoveContainerResponse::default())
    }

    pub(crate) fn list_containers(
        &mut self,
        request: rt::ListContainersRequest,
    ) -> MethodResult<rt::ListContainersResponse> {
        let filter = request.filter.unwrap_or_default();
        let containers = self
            .containers
            .values()
            .filter(|container| filter.id.is_empty() || container.status.id == filter.id)
            .filter(|container| {
                filter.pod_sandbox_id.is_empty() || container.sandbox_id == filter.pod_sandbox_id
            })
            .filter(|container| {
                filter.state.as_ref().is_none_or(|wanted| wanted.state == container.status.state)
            })
            .filter(|container| matches(&filter.label_selector, &container.status.labels))
            .map(|container| rt::Container {
                id: container.status.id.clone(),
                pod_sandbox_id: container.sandbox_id.clone(),
                metadata: container.status.metadata.clone(),
                image: container.config.image.clone(),
                image_ref: container.status.image_ref.clone(),
                image_id: container.status.image_id.clone(),
                state: container.status.state,
                created_at: container.status.created_at,
                labels: container.status.labels.clone(),
                annotations: container.status.annotations.clone(),
                ..Default::default()
            })
            .collect();
        Ok(rt::ListContainersResponse { containers, ..Default::default() })
    }

    pub(crate) fn container_status(
        &mut self,
        request: rt::ContainerStatusRequest,
    ) -> MethodResult<rt::ContainerStatusResponse> {
        let status = self.container(&request.container_id)?.status.clone();
        Ok(rt::ContainerStatusResponse { status: MessageField::some(status), ..Default::default() })
    }

    pub(crate) fn update_pod_sandbox_resources(
        &mut self,
        request: rt::UpdatePodSandboxResourcesRequest,
    ) -> MethodResult<rt::UpdatePodSandboxResourcesResponse> {
        if !self.sandboxes.contains_key(&request.pod_sandbox_id) {
            return fail(Code::NOT_FOUND, "sandbox not found");
        }
        Ok(rt::UpdatePodSandboxResourcesResponse::default())
    }

    pub(crate) fn update_container_resources(
        &mut self,
        request: rt::UpdateContainerResourcesRequest,
    ) -> MethodResult<rt::UpdateContainerResourcesResponse> {
        let container = self.container(&request.container_id)?;
        let wanted = request.linux.unwrap_or_default();
        let resources = container.status.resources.mut_or_insert_default().linux.mut_or_insert_default();
        for (value, new) in [
            (&mut resources.cpu_period, wanted.cpu_period),
            (&mut resources.cpu_quota, wanted.cpu_quota),
            (&mut resources.cpu_shares, wanted.cpu_shares),
            (&mut resources.memory_limit_in_bytes, wanted.memory_limit_in_bytes),
        ] {
            if new != 0 {
                *value = new;
            }
        }
        if !wanted.cpuset_cpus.is_empty() {
            resources.cpuset_cpus = wanted.cpuset_cpus;
        }
        Ok(rt::UpdateContainerResourcesResponse::default())
    }

    pub(crate) fn reopen_container_log(
        &mut self,
        request: rt::ReopenContainerLogRequest,
    ) -> MethodResult<rt::ReopenContainerLogResponse> {
        let writes_logs = self.writes_logs;
        let container = self.container(&request.container_id)?;
        if !container.is_running() {
            return fail(Code::UNKNOWN, "container is not running");
        }
        if writes_logs && let Err(error) = std::fs::File::create(&container.status.log_path) {
            return fail(Code::UNKNOWN, format!("failed to reopen log: {error}"));
        }
        Ok(rt::ReopenContainerLogResponse::default())
    }

    pub(crate) fn exec_sync(&mut self, request: rt::ExecSyncRequest) -> MethodResult<rt::ExecSyncResponse> {
        let rule = Arc::clone(&self.exec);
        let container = self.container(&request.container_id)?;
        if !container.is_running() {
            return fail(Code::UNKNOWN, "failed to exec in container: container is not running");
        }
        let (exit_code, stdout, stderr) = rule(&container.config.metadata.name, &request.cmd);
        Ok(rt::ExecSyncResponse { stdout, stderr, exit_code, ..Default::default() })
    }

    pub(crate) fn exec(&mut self, request: rt::ExecRequest) -> MethodResult<rt::ExecResponse> {
        let base = self.streams.clone();
        if !self.container(&request.container_id)?.is_running() {
            return fail(Code::UNKNOWN, "failed to exec in container: container is not running");
        }
        Ok(rt::ExecResponse { url: format!("{base}/{}", request.cmd.join("/")), ..Default::default() })
    }

    pub(crate) fn attach(&mut self, request: rt::AttachRequest) -> MethodResult<rt::AttachResponse> {
        let base = self.streams.clone();
        self.container(&request.container_id)?;
        Ok(rt::AttachResponse { url: format!("{base}/echo"), ..Default::default() })
    }

    pub(crate) fn port_forward(
        &mut self,
        request: rt::PortForwardRequest,
    ) -> MethodResult<rt::PortForwardResponse> {
        if !self.sandboxes.contains_key(&request.pod_sandbox_id) {
            return fail(Code::NOT_FOUND, "sandbox not found");
        }
        Ok(rt::PortForwardResponse { url: format!("{}/echo", self.streams), ..Default::default() })
    }

    fn container(&mut self, id: &str) -> MethodResult<&mut Container> {
        match self.containers.get_mut(id) {
            Some(container) => Ok(container),
            None => {
                let message = format!("an error occurred when try to find container \"{id}\": not found");
                fail(Code::NOT_FOUND, message)
            }
        }
    }

    // ---- images ----

    pub(crate) fn list_images(
        &mut self,
        request: rt::ListImagesRequest,
    ) -> MethodResult<rt::ListImagesResponse> {
        let name = request.filter.image.image.clone();
        let images = match name.as_str() {
            "" => self.images.values().cloned().collect(),
            name => self.image(name).cloned().into_iter().collect(),
        };
        Ok(rt::ListImagesResponse { images, ..Default::default() })
    }

    pub(crate) fn image_status(
        &mut self,
        request: rt::ImageStatusRequest,
    ) -> MethodResult<rt::ImageStatusResponse> {
        let image = self.image(&request.image.image).cloned();
        Ok(rt::ImageStatusResponse { image: MessageField::from_option(image), ..Default::default() })
    }

    /// Every image can be pulled, except those with `none` or `missing` in their names.
    pub(crate) fn pull_image(
        &mut self,
        request: rt::PullImageRequest,
    ) -> MethodResult<rt::PullImageResponse> {
        let name = request.image.image.as_str();
        if name.contains("none") || name.contains("missing") {
            let message = format!(
                "failed to pull and unpack image \"{name}\": failed to resolve reference \"{name}\": \
                 {name}: not found"
            );
            return fail(Code::NOT_FOUND, message);
        }
        let image_ref = match self.image(name) {
            Some(image) => image.id.clone(),
            None => {
                let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                    (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
                });
                let id = format!("sha256:{}", format!("{seed:016x}").repeat(4));
                self.add_image(name, &id);
                id
            }
        };
        Ok(rt::PullImageResponse { image_ref, ..Default::default() })
    }

    pub(crate) fn remove_image(
        &mut self,
        request: rt::RemoveImageRequest,
    ) -> MethodResult<rt::RemoveImageResponse> {
        if let Some(id) = self.image(&request.image.image).map(|image| image.id.clone()) {
            self.images.remove(&id);
        }
        Ok(rt::RemoveImageResponse::default())
    }

    // ---- statistics ----

    /// The same numbers for everything: two seconds of a processor, and a MiB.
    fn container_use(id: &str, now: i64) -> rt::ContainerStats {
        let number = |value| MessageField::some(rt::UInt64Value { value, ..Default::default() });
        rt::ContainerStats {
            attributes: MessageField::some(rt::ContainerAttributes { id: id.into(), ..Default::default() }),
            cpu: MessageField::some(rt::CpuUsage {
                timestamp: now,
                usage_core_nano_seconds: number(2_000_000_000),
                usage_nano_cores: number(1_000_000),
                ..Default::default()
            }),
            memory: MessageField::some(rt::MemoryUsage {
                timestamp: now,
                working_set_bytes: number(1 << 20),
                ..Default::default()
            }),
            writable_layer: MessageField::some(rt::FilesystemUsage {
                timestamp: now,
                fs_id: MessageField::some(rt::FilesystemIdentifier {
                    mountpoint: "/".into(),
                    ..Default::default()
                }),
                used_bytes: number(4096),
                inodes_used: number(1),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    pub(crate) fn list_container_stats(
        &mut self,
        request: rt::ListContainerStatsRequest,
    ) -> MethodResult<rt::ListContainerStatsResponse> {
        // containerd measures each sandbox, too, where there is none: twice the work.
        if request.filter.is_none() {
            return fail(Code::INVALID_ARGUMENT, "no filter");
        }
        let now = self.now();
        let running = self.containers.iter().filter(|(_, container)| container.is_running());
        let stats = running.map(|(id, _)| State::container_use(id, now)).collect();
        Ok(rt::ListContainerStatsResponse { stats, ..Default::default() })
    }

    pub(crate) fn list_pod_sandbox_stats(
        &mut self,
        _: rt::ListPodSandboxStatsRequest,
    ) -> MethodResult<rt::ListPodSandboxStatsResponse> {
        let now = self.now();
        let stats_of = |sandbox: &String| {
            let own = State::container_use(sandbox, now);
            let containers = self
                .containers
                .iter()
                .filter(|(_, container)| container.is_running() && container.sandbox_id == *sandbox)
                .map(|(id, _)| State::container_use(id, now))
                .collect();
            rt::PodSandboxStats {
                attributes: MessageField::some(rt::PodSandboxAttributes {
                    id: sandbox.clone(),
                    ..Default::default()
                }),
                linux: MessageField::some(rt::LinuxPodSandboxStats {
                    cpu: own.cpu,
                    memory: own.memory,
                    containers,
                    ..Default::default()
                }),
                ..Default::default()
            }
        };
        let stats = self.sandboxes.keys().map(stats_of).collect();
        Ok(rt::ListPodSandboxStatsResponse { stats, ..Default::default() })
    }

    pub(crate) fn image_fs_info(
        &mut self,
        _: rt::ImageFsInfoRequest,
    ) -> MethodResult<rt::ImageFsInfoResponse> {
        let used: u64 = self.images.values().map(|image| image.size).sum();
        let usage = rt::FilesystemUsage {
            timestamp: self.now(),
            fs_id: MessageField::some(rt::FilesystemIdentifier {
                mountpoint: "/".into(),
                ..Default::default()
            }),
            used_bytes: MessageField::some(rt::UInt64Value { value: used, ..Default::default() }),
            inodes_used: MessageField::some(rt::UInt64Value { value: 1000, ..Default::default() }),
            ..Default::default()
        };
        Ok(rt::ImageFsInfoResponse {
            image_filesystems: vec![usage.clone()],
            container_filesystems: vec![usage],
            ..Default::default()
        })
    }
}

fn matches(selector: &BTreeMap<String, String>, labels: &BTreeMap<String, String>) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

fn words(config: &rt::ContainerConfig) -> String {
    let all: Vec<&str> = config.command.iter().chain(&config.args).map(String::as_str).collect();
    all.join(" ")
}

/// `… exit 3` ends with 3 at once, `sleep 2; exit 3` after two seconds, everything else
/// runs until it is stopped.
fn script(config: &rt::ContainerConfig) -> (Duration, Option<i32>) {
    let text = words(config);
    let words: Vec<&str> = text.split([' ', ';']).filter(|word| !word.is_empty()).collect();
    let [before @ .., "exit", code] = words.as_slice() else { return (Duration::ZERO, None) };
    let runs_for = match before {
        [.., "sleep", seconds] => seconds.parse().map_or(Duration::ZERO, Duration::from_secs_f64),
        _ => Duration::ZERO,
    };
    (runs_for, code.parse().ok())
}

/// The name of a state, for messages of failing tests.
pub(crate) fn state_name(state: EnumOrUnknown<rt::ContainerState>) -> String {
    state.enum_value().map_or_else(|number| number.to_string(), |known| format!("{known:?}"))
}
