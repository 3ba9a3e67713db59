//! A recording proxy on the CRI socket: every unary call goes through unchanged, and what
//! changes something is written down.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use coracle::transport::generated::runtime as rt;
use grpcio::{
    CallOption, Client, Marshaller, Method, MethodType, RpcContext, RpcStatus, RpcStatusCode, UnarySink,
};
use protobuf::Message;
use serde_json::Value;

use crate::support::fake_cri::ToJson;

/// Any message at all: this one has no fields, so that all of them are kept as unknown ones
/// and are written again as they came.
type Raw = rt::RemoveContainerResponse;
type RawMethod = Method<Raw, Raw>;

/// One request that changes something.
#[derive(Debug, Clone)]
pub struct Call {
    pub method: &'static str,
    /// In protojson with proto field names.
    pub request: Value,
    /// The id of the sandbox or container that it made.
    pub made: Option<String>,
    /// The message with which the runtime refused it.
    pub error: Option<String>,
}

#[derive(Default)]
struct CallRecording {
    calls: Vec<Call>,
    /// Image names to ids, from what the runtime answered.
    images: BTreeMap<String, String>,
}

/// The proxy. It serves until it is dropped.
pub struct Proxy {
    notes: Arc<Mutex<CallRecording>>,
    server: grpcio::Server,
}

impl Proxy {
    /// Serves on the socket `here`; the runtime's socket is needed from the first call on.
    pub fn start(here: &Path, runtime: &Path) -> Proxy {
        let environment = Arc::new(grpcio::EnvBuilder::new().cq_count(2).name_prefix("proxy").build());
        let channel = grpcio::ChannelBuilder::new(Arc::clone(&environment))
            .connect(&format!("unix:{}", runtime.display()));
        let client = Client::new(channel);
        let notes = Arc::new(Mutex::new(CallRecording::default()));
        let mut builder = grpcio::ServerBuilder::new(environment).requests_slot_per_cq(256);
        for methods in services() {
            let mut service = grpcio::ServiceBuilder::new();
            for method in methods {
                let (client, notes) = (client.clone(), Arc::clone(&notes));
                service = service.add_unary_handler(method, move |ctx, request, sink| {
                    forward(&ctx, method, &client, &notes, &request, sink);
                });
            }
            builder = builder.register_service(service.build());
        }
        let mut server = builder.build().unwrap();
        server
            .add_listening_port(format!("unix:{}", here.display()), grpcio::ServerCredentials::insecure())
            .unwrap();
        server.start();
        Proxy { notes, server }
    }

    /// What was written down so far, in order of arrival.
    pub fn calls(&self) -> Vec<Call> {
        self.notes.lock().unwrap().calls.clone()
    }

    /// The id of an image by one of its names.
    pub fn image(&self, name: &str) -> Option<String> {
        self.notes.lock().unwrap().images.get(name).cloned()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _stopping = self.server.shutdown();
        self.server.cancel_all_calls();
    }
}

fn forward(
    ctx: &RpcContext,
    method: &'static RawMethod,
    client: &Client,
    notes: &Arc<Mutex<CallRecording>>,
    request: &Raw,
    sink: UnarySink<Raw>,
) {
    let name = method.name.rsplit('/').next().unwrap_or(method.name);
    // Noted before it is carried out: the order is that of arrival.
    let index = mutation(name, &request.write_to_bytes().unwrap()).map(|request| {
        let mut notes = notes.lock().unwrap();
        notes.calls.push(Call { method: name, request, made: None, error: None });
        notes.calls.len() - 1
    });
    let call = client.unary_call_async(method, request, CallOption::default());
    let notes = Arc::clone(notes);
    ctx.spawn(async move {
        let result = match call {
            Ok(call) => call.await,
            Err(error) => Err(error),
        };
        let sent = match result {
            Ok(response) => {
                notes.lock().unwrap().record_response(name, index, &response.write_to_bytes().unwrap());
                sink.success(response)
            }
            Err(error) => {
                let status = match error {
                    grpcio::Error::RpcFailure(status) => status,
                    other => RpcStatus::with_message(RpcStatusCode::UNAVAILABLE, other.to_string()),
                };
                notes.lock().unwrap().failed(index, status.message());
                sink.fail(status)
            }
        };
        // The agent may have disconnected, which is no error.
        let _ = sent.await;
    });
}

impl CallRecording {
    fn record_response(&mut self, name: &str, index: Option<usize>, response: &[u8]) {
        let made = match name {
            "RunPodSandbox" => decoded::<rt::RunPodSandboxResponse>(response).pod_sandbox_id,
            "CreateContainer" => decoded::<rt::CreateContainerResponse>(response).container_id,
            "ListImages" => {
                for image in decoded::<rt::ListImagesResponse>(response).images {
                    for tag in image.repo_tags {
                        self.images.insert(tag, image.id.clone());
                    }
                }
                return;
            }
            "ImageStatus" => {
                if let Some(image) = decoded::<rt::ImageStatusResponse>(response).image.into_option() {
                    for tag in image.repo_tags {
                        self.images.insert(tag, image.id.clone());
                    }
                }
                return;
            }
            _ => return,
        };
        if let Some(call) = index.and_then(|index| self.calls.get_mut(index)) {
            call.made = Some(made);
        }
    }

    fn failed(&mut self, index: Option<usize>, message: &str) {
        if let Some(call) = index.and_then(|index| self.calls.get_mut(index)) {
            call.error = Some(message.to_owned());
        }
    }
}

fn decoded<M: Message>(bytes: &[u8]) -> M {
    M::parse_from_bytes(bytes).unwrap()
}

fn json<M: Message + ToJson>(bytes: &[u8]) -> Value {
    decoded::<M>(bytes).to_json()
}

/// The request of a method that changes something, as JSON.
fn mutation(name: &str, bytes: &[u8]) -> Option<Value> {
    Some(match name {
        "RunPodSandbox" => json::<rt::RunPodSandboxRequest>(bytes),
        "StopPodSandbox" => json::<rt::StopPodSandboxRequest>(bytes),
        "RemovePodSandbox" => json::<rt::RemovePodSandboxRequest>(bytes),
        "CreateContainer" => json::<rt::CreateContainerRequest>(bytes),
        "StartContainer" => json::<rt::StartContainerRequest>(bytes),
        "StopContainer" => json::<rt::StopContainerRequest>(bytes),
        "RemoveContainer" => json::<rt::RemoveContainerRequest>(bytes),
        "UpdatePodSandboxResources" => json::<rt::UpdatePodSandboxResourcesRequest>(bytes),
        "UpdateContainerResources" => json::<rt::UpdateContainerResourcesRequest>(bytes),
        "ReopenContainerLog" => json::<rt::ReopenContainerLogRequest>(bytes),
        "ExecSync" => json::<rt::ExecSyncRequest>(bytes),
        "PullImage" => json::<rt::PullImageRequest>(bytes),
        "RemoveImage" => json::<rt::RemoveImageRequest>(bytes),
        _ => return None,
    })
}

/// The unary methods of each service, as the `.proto` file has them.
fn services() -> Vec<Vec<&'static RawMethod>> {
    let mut services = Vec::new();
    for part in include_str!("../../proto/runtime.proto").split("\nservice ").skip(1) {
        let service = part.split(' ').next().unwrap();
        let unary = part.lines().filter(|line| !line.contains("stream "));
        let methods = unary.filter_map(|line| line.trim().strip_prefix("rpc ")?.split('(').next());
        services.push(methods.map(|name| raw_method(service, name)).collect());
    }
    services
}

/// A method that lives as long as the test: servers keep its name.
fn raw_method(service: &str, name: &str) -> &'static RawMethod {
    fn marshaller() -> Marshaller<Raw> {
        Marshaller { ser: grpcio::pb_ser, de: grpcio::pb_de }
    }
    Box::leak(Box::new(Method {
        ty: MethodType::Unary,
        name: Box::leak(format!("/runtime.v1.{service}/{name}").into_boxed_str()),
        req_mar: marshaller(),
        resp_mar: marshaller(),
    }))
}
