//! The gRPC side: every call is counted, noted, perhaps failed, and answered from the state.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use coracle::transport::generated::runtime as rt;
use futures_util::SinkExt as _;
use grpcio::{RpcContext, RpcStatus, RpcStatusCode as Code, ServerStreamingSink, UnarySink, WriteFlags};
use serde_json::Value;

use super::events::{StreamFaults, Subscriber};
use super::gate::Gate;
use super::json::ToJson;
use super::state::{Failure, MethodResult, State};

/// Stubs that `build.rs` writes.
#[allow(clippy::all, clippy::unwrap_used, missing_docs, unused)]
mod stubs {
    use coracle::transport::generated::runtime;

    include!(concat!(env!("OUT_DIR"), "/service.rs"));
}

pub(super) use stubs::{create_image_service, create_runtime_service};

/// What happens to calls of one method.
#[derive(Clone)]
pub(super) enum Misbehavior {
    Fail {
        failure: Failure,
        times: Option<u32>,
    },
    /// Calls wait behind the gate and are carried out when it opens; `times` as above.
    Hang {
        gate: Gate,
        times: Option<u32>,
    },
    Delay(std::time::Duration),
    /// Calls are carried out, and the answer of a success is lost: the caller gets this.
    Lose {
        failure: Failure,
        times: Option<u32>,
    },
}

/// One mutating request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JournalEntry {
    pub method: &'static str,
    /// In protojson with proto field names.
    pub request: Value,
    /// What the fake refused it with; also `None` while it is not answered.
    pub error: Option<Failure>,
}

/// Requests that change nothing; they are counted but not recorded.
const LOOKS: &[&str] = &[
    "Version",
    "Status",
    "RuntimeConfig",
    "ListPodSandbox",
    "PodSandboxStatus",
    "ListContainers",
    "ContainerStatus",
    "ListImages",
    "ImageStatus",
    "ImageFsInfo",
    "ListPodSandboxStats",
    "ListContainerStats",
];

pub(super) struct Shared {
    pub state: Mutex<State>,
    pub counts: Mutex<BTreeMap<&'static str, usize>>,
    pub journal: Mutex<Vec<JournalEntry>>,
    pub misbehavior: Mutex<HashMap<String, Misbehavior>>,
    pub subscribers: Mutex<Vec<Subscriber>>,
    pub stream_faults: Mutex<StreamFaults>,
    pub delayed: Mutex<Vec<coracle::util::threads::Running>>,
    pub endless: Mutex<Endless>,
    /// The spans that calls belong to, in the order of the calls.
    pub traceparents: Mutex<Vec<(&'static str, String)>>,
}

/// Calls that last until they are released.
#[derive(Default)]
pub(super) struct Endless {
    pub is_released: bool,
    pub gates: Vec<Gate>,
}

#[derive(Clone)]
pub(super) struct Service(pub Arc<Shared>);

impl Service {
    fn respond<Req, Resp>(
        &self,
        ctx: &RpcContext<'_>,
        method: &'static str,
        request: Req,
        sink: UnarySink<Resp>,
        act: fn(&mut State, Req) -> MethodResult<Resp>,
    ) where
        Req: ToJson + Send + 'static,
        Resp: Send + 'static,
    {
        let shared = Arc::clone(&self.0);
        // Until the whole call is noted: a test that has seen a part of it waits here for the count.
        let mut counts = shared.counts.lock().unwrap();
        *counts.entry(method).or_default() += 1;
        if let Some((_, span)) = ctx.request_headers().iter().find(|(name, _)| *name == "traceparent") {
            let span = String::from_utf8_lossy(span).into_owned();
            shared.traceparents.lock().unwrap().push((method, span));
        }
        let json = (!LOOKS.contains(&method)).then(|| request.to_json());
        let endless = json.as_ref().and_then(|json| shared.endless(method, json));
        let noted = json.map(|request| {
            let mut journal = shared.journal.lock().unwrap();
            journal.push(JournalEntry { method, request, error: None });
            journal.len() - 1
        });
        let loss = shared.take_loss(method);
        let (failure, gate) = shared.take_fault(method);
        drop(counts);
        ctx.spawn(async move {
            for gate in gate.into_iter().chain(endless) {
                gate.await;
            }
            let result = match failure {
                Some(failure) => Err(failure),
                None => {
                    let mut state = shared.state.lock().unwrap();
                    state.end_due_containers();
                    act(&mut state, request)
                }
            };
            shared.publish();
            if let (Some(index), Err(failure)) = (noted, &result)
                && let Some(entry) = shared.journal.lock().unwrap().get_mut(index)
            {
                entry.error = Some(failure.clone());
            }
            let result = match (result, loss) {
                (Ok(_), Some(loss)) => Err(loss),
                (result, _) => result,
            };
            // The client may have disconnected by now, which is no error.
            let _ = match result {
                Ok(response) => sink.success(response).await,
                Err(Failure { code, message }) => sink.fail(RpcStatus::with_message(code, message)).await,
            };
        });
    }
}

impl Shared {
    /// Sends new events to all subscribers.
    pub(super) fn publish(&self) {
        let subscribers = self.subscribers.lock().unwrap();
        let events = std::mem::take(&mut self.state.lock().unwrap().unsent_events);
        let (events, cut) = self.stream_faults.lock().unwrap().deliver(events, std::time::Instant::now());
        if !events.is_empty() {
            subscribers.iter().for_each(|subscriber| subscriber.push(&events));
        }
        if cut {
            subscribers.iter().for_each(Subscriber::end);
        }
    }

    /// Lets time pass: what ends by itself ends, what is late arrives.
    pub(super) fn tick(&self) {
        self.state.lock().unwrap().end_due_containers();
        self.publish();
    }

    pub(super) fn end_streams(&self) {
        self.subscribers.lock().unwrap().drain(..).for_each(|subscriber| subscriber.end());
    }

    /// What the caller gets in place of the answer of a success.
    fn take_loss(&self, method: &str) -> Option<Failure> {
        let mut all = self.misbehavior.lock().unwrap();
        let Some(Misbehavior::Lose { failure, times }) = all.get_mut(method) else { return None };
        let failure = failure.clone();
        if is_last(times) {
            all.remove(method);
        }
        Some(failure)
    }

    fn take_fault(&self, method: &str) -> (Option<Failure>, Option<Gate>) {
        let mut all = self.misbehavior.lock().unwrap();
        match all.get_mut(method) {
            None | Some(Misbehavior::Lose { .. }) => (None, None),
            Some(Misbehavior::Fail { failure, times }) => {
                let failure = failure.clone();
                if is_last(times) {
                    all.remove(method);
                }
                (Some(failure), None)
            }
            Some(Misbehavior::Hang { gate, times }) => {
                let gate = gate.clone();
                if is_last(times) {
                    all.remove(method);
                }
                (None, Some(gate))
            }
            Some(Misbehavior::Delay(delay)) => {
                let (gate, delay) = (Gate::default(), *delay);
                (None, Some(self.open_after(gate, delay)))
            }
        }
    }

    /// What a call waits for that names something endless, or stops a stubborn container.
    fn endless(&self, method: &str, request: &Value) -> Option<Gate> {
        let mut endless = self.endless.lock().unwrap();
        if endless.is_released {
            return None;
        }
        let gate = Gate::default();
        let subject = match method {
            "PullImage" => &request["image"]["image"],
            "RunPodSandbox" => &request["config"]["metadata"]["name"],
            "ExecSync" => &request["cmd"],
            "StopContainer" => {
                let id = request["container_id"].as_str()?;
                if !self.state.lock().unwrap().is_stubborn(id) {
                    return None;
                }
                let seconds = request["timeout"].as_str().and_then(|text| text.parse().ok()).unwrap_or(0);
                endless.gates.push(gate.clone());
                return Some(self.open_after(gate, std::time::Duration::from_secs(seconds)));
            }
            _ => return None,
        };
        if !subject.to_string().contains("endless") {
            return None;
        }
        endless.gates.push(gate.clone());
        Some(gate)
    }

    fn open_after(&self, gate: Gate, delay: std::time::Duration) -> Gate {
        use coracle::util::threads::{OnDeath, Stack, spawn};
        let opened = gate.clone();
        let running = spawn("fake-delay", Stack::Small, OnDeath::Unsupervised, move |stop| {
            let _ = stop.wait(delay);
            opened.open();
        });
        match running {
            Ok(running) => {
                let mut delayed = self.delayed.lock().unwrap();
                delayed.retain(|running| !running.is_finished());
                delayed.push(running);
            }
            Err(_) => gate.open(),
        }
        gate
    }
}

/// Counts one call down.
fn is_last(times: &mut Option<u32>) -> bool {
    let Some(left) = times else { return false };
    *left = left.saturating_sub(1);
    *left == 0
}

macro_rules! serve {
    ($($name:ident $method:literal ($request:ident) -> $response:ident;)*) => {
        $(fn $name(&mut self, ctx: RpcContext, request: rt::$request, sink: UnarySink<rt::$response>) {
            self.respond(&ctx, $method, request, sink, State::$name);
        })*
    };
}

impl stubs::RuntimeService for Service {
    fn get_container_events(
        &mut self,
        ctx: RpcContext,
        _: rt::GetEventsRequest,
        mut sink: ServerStreamingSink<rt::ContainerEventResponse>,
    ) {
        let shared = Arc::clone(&self.0);
        // As for other calls: one that was counted has its fault, and gets events.
        let mut counts = shared.counts.lock().unwrap();
        *counts.entry("GetContainerEvents").or_default() += 1;
        let (failure, gate) = shared.take_fault("GetContainerEvents");
        let subscriber = Subscriber::default();
        if failure.is_none() {
            let mut subscribers = shared.subscribers.lock().unwrap();
            subscribers.retain(|other| !other.has_ended());
            subscribers.push(subscriber.clone());
        }
        drop(counts);
        ctx.spawn(async move {
            if let Some(gate) = gate {
                gate.await;
            }
            if let Some(Failure { code, message }) = failure {
                let _ = sink.fail(RpcStatus::with_message(code, message)).await;
                return;
            }
            while let Some(event) = subscriber.next().await {
                if sink.send((event, WriteFlags::default())).await.is_err() {
                    // The reader has gone.
                    return subscriber.end();
                }
            }
            let _ = sink.close().await;
        });
    }

    serve! {
        version "Version" (VersionRequest) -> VersionResponse;
        status "Status" (StatusRequest) -> StatusResponse;
        runtime_config "RuntimeConfig" (RuntimeConfigRequest) -> RuntimeConfigResponse;
        update_runtime_config "UpdateRuntimeConfig" (UpdateRuntimeConfigRequest) -> UpdateRuntimeConfigResponse;
        run_pod_sandbox "RunPodSandbox" (RunPodSandboxRequest) -> RunPodSandboxResponse;
        stop_pod_sandbox "StopPodSandbox" (StopPodSandboxRequest) -> StopPodSandboxResponse;
        remove_pod_sandbox "RemovePodSandbox" (RemovePodSandboxRequest) -> RemovePodSandboxResponse;
        pod_sandbox_status "PodSandboxStatus" (PodSandboxStatusRequest) -> PodSandboxStatusResponse;
        list_pod_sandbox "ListPodSandbox" (ListPodSandboxRequest) -> ListPodSandboxResponse;
        create_container "CreateContainer" (CreateContainerRequest) -> CreateContainerResponse;
        start_container "StartContainer" (StartContainerRequest) -> StartContainerResponse;
        stop_container "StopContainer" (StopContainerRequest) -> StopContainerResponse;
        remove_container "RemoveContainer" (RemoveContainerRequest) -> RemoveContainerResponse;
        list_containers "ListContainers" (ListContainersRequest) -> ListContainersResponse;
        container_status "ContainerStatus" (ContainerStatusRequest) -> ContainerStatusResponse;
        update_pod_sandbox_resources "UpdatePodSandboxResources" (UpdatePodSandboxResourcesRequest)
            -> UpdatePodSandboxResourcesResponse;
        update_container_resources "UpdateContainerResources" (UpdateContainerResourcesRequest)
            -> UpdateContainerResourcesResponse;
        reopen_container_log "ReopenContainerLog" (ReopenContainerLogRequest) -> ReopenContainerLogResponse;
        exec_sync "ExecSync" (ExecSyncRequest) -> ExecSyncResponse;
        list_pod_sandbox_stats "ListPodSandboxStats" (ListPodSandboxStatsRequest) -> ListPodSandboxStatsResponse;
        list_container_stats "ListContainerStats" (ListContainerStatsRequest) -> ListContainerStatsResponse;
        exec "Exec" (ExecRequest) -> ExecResponse;
        attach "Attach" (AttachRequest) -> AttachResponse;
        port_forward "PortForward" (PortForwardRequest) -> PortForwardResponse;
    }
}

impl stubs::ImageService for Service {
    serve! {
        list_images "ListImages" (ListImagesRequest) -> ListImagesResponse;
        image_status "ImageStatus" (ImageStatusRequest) -> ImageStatusResponse;
        pull_image "PullImage" (PullImageRequest) -> PullImageResponse;
        remove_image "RemoveImage" (RemoveImageRequest) -> RemoveImageResponse;
        image_fs_info "ImageFsInfo" (ImageFsInfoRequest) -> ImageFsInfoResponse;
    }
}

/// The gRPC code of a [`coracle::transport::grpc::Kind`].
pub(super) fn code(kind: coracle::transport::grpc::Kind) -> Code {
    use coracle::transport::grpc::Kind;
    match kind {
        Kind::Cancelled => Code::CANCELLED,
        Kind::Unknown => Code::UNKNOWN,
        Kind::InvalidArgument => Code::INVALID_ARGUMENT,
        Kind::DeadlineExceeded => Code::DEADLINE_EXCEEDED,
        Kind::NotFound => Code::NOT_FOUND,
        Kind::AlreadyExists => Code::ALREADY_EXISTS,
        Kind::PermissionDenied => Code::PERMISSION_DENIED,
        Kind::ResourceExhausted => Code::RESOURCE_EXHAUSTED,
        Kind::FailedPrecondition => Code::FAILED_PRECONDITION,
        Kind::Aborted => Code::ABORTED,
        Kind::OutOfRange => Code::OUT_OF_RANGE,
        Kind::Unimplemented => Code::UNIMPLEMENTED,
        Kind::Internal => Code::INTERNAL,
        Kind::Unavailable => Code::UNAVAILABLE,
        Kind::DataLoss => Code::DATA_LOSS,
        Kind::Unauthenticated => Code::UNAUTHENTICATED,
    }
}
