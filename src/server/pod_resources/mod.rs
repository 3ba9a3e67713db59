//! The pod-resources API, v1 and v1alpha1: which container has which devices, CPUs, memory and claims
//! (Go: pkg/kubelet/apis/podresources).
//!
//! Monitoring agents call it over a socket below the root directory, which only root can open. A call
//! has a thread while it lasts (`rpc-call`).

mod compose;

use std::io;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Instant;

use super::bucket::Bucket;
use crate::model::api::Container;
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::pods::assignments::AssignedResources;
use crate::transport::generated::{MessageField, methods, podresources as pb};
use crate::transport::grpc::UnaryMethod;
use crate::transport::rpc_server::{RpcError, Server, Service};
use crate::util::disk_writes;
use crate::util::lock::LockExt;

/// The directory below the root directory.
const DIRECTORY: &str = "pod-resources";
const SOCKET: &str = "kubelet.sock";

static OLD_LIST: LazyLock<UnaryMethod<pb::ListPodResourcesRequest, pb::ListPodResourcesResponse>> =
    LazyLock::new(|| methods::podresources::LIST.at_path("/v1alpha1.PodResourcesLister/List"));

#[derive(Debug, Clone)]
pub(crate) struct NodePod {
    /// The pod, with the resources that it was granted.
    pub pod: Pod,
    /// Whether it was admitted and has not ended.
    pub is_active: bool,
}

/// Returns what a container has.
pub(crate) type FindContainerResources = dyn Fn(&Pod, &Container) -> AssignedResources + Send + Sync;

/// Returns what a pod has as a whole.
pub(crate) type FindPodResources = dyn Fn(&Pod) -> AssignedResources + Send + Sync;

/// Where the responses come from.
pub(crate) struct Deps {
    /// All pods that sources have.
    pub pods: Box<dyn Fn() -> Vec<NodePod> + Send + Sync>,
    /// What a container has.
    pub assigned: Box<FindContainerResources>,
    /// The CPUs and memory of a pod as a whole.
    pub assigned_pod: Box<FindPodResources>,
    /// What all containers together can have.
    pub assignable: Box<dyn Fn() -> AssignedResources + Send + Sync>,
}

/// Serves the API on `<root_dir>/pod-resources/kubelet.sock`. Dropping the server ends it.
///
/// # Errors
/// When the directory or the socket cannot be made.
pub(crate) fn serve(root_dir: &Path, deps: Deps) -> io::Result<Server> {
    let directory = root_dir.join(DIRECTORY);
    disk_writes::make_directories(&directory, 0o750)?;
    Server::start(&directory.join(SOCKET), services(deps, Bucket::new(Instant::now())))
}

/// The dependencies and the limit of the rate, which all methods share.
struct Shared {
    deps: Deps,
    bucket: Mutex<Bucket>,
}

impl Shared {
    fn admit(&self) -> Result<&Deps, RpcError> {
        let mut bucket = self.bucket.locked();
        match bucket.take(Instant::now()) {
            true => Ok(&self.deps),
            false => Err(RpcError::resource_exhausted("rejected by rate limit")),
        }
    }
}

fn services(deps: Deps, bucket: Bucket) -> [Service; 2] {
    let shared = Arc::new(Shared { deps, bucket: Mutex::new(bucket) });
    let handle = || Arc::clone(&shared);
    let (for_list, for_get, for_allocatable, for_old) = (handle(), handle(), handle(), handle());
    let service = Service::new()
        .unary(&methods::podresources::LIST, move |_: pb::ListPodResourcesRequest, _| {
            let deps = for_list.admit()?;
            metrics::POD_RESOURCES_REQUESTS.inc(["v1"]);
            metrics::POD_RESOURCES_LISTS.inc(["v1"]);
            Ok(compose::list(&(deps.pods)(), &*deps.assigned, &*deps.assigned_pod))
        })
        .unary(&methods::podresources::GET, move |request: pb::GetPodResourcesRequest, _| {
            let deps = for_get.admit()?;
            metrics::POD_RESOURCES_REQUESTS.inc(["v1"]);
            metrics::POD_RESOURCES_GETS.inc(["v1"]);
            let wanted = (request.pod_namespace.as_str(), request.pod_name.as_str());
            let found = compose::get(&(deps.pods)(), wanted, &*deps.assigned, &*deps.assigned_pod);
            let Some(found) = found else {
                metrics::POD_RESOURCES_GET_ERRORS.inc(["v1"]);
                let (namespace, name) = wanted;
                return Err(RpcError::unknown(format!("pod {name} in namespace {namespace} not found")));
            };
            Ok(pb::GetPodResourcesResponse { pod_resources: MessageField::some(found), ..Default::default() })
        })
        .unary(
            &methods::podresources::GET_ALLOCATABLE_RESOURCES,
            move |_: pb::AllocatableResourcesRequest, _| {
                let deps = for_allocatable.admit()?;
                metrics::POD_RESOURCES_REQUESTS.inc(["v1"]);
                metrics::POD_RESOURCES_ALLOCATABLES.inc(["v1"]);
                Ok(compose::allocatable((deps.assignable)()))
            },
        );
    let old = Service::new().unary(&OLD_LIST, move |_: pb::ListPodResourcesRequest, _| {
        let deps = for_old.admit()?;
        metrics::POD_RESOURCES_REQUESTS.inc(["v1alpha1"]);
        Ok(compose::list_v1alpha1(&(deps.pods)(), &*deps.assigned))
    });
    [service, old]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::grpc::{Channel, Kind};
    use crate::util::stop::StopToken;
    use std::time::Duration;

    /// A node without pods.
    fn empty() -> Deps {
        Deps {
            pods: Box::new(Vec::new),
            assigned: Box::new(|_, _| AssignedResources::default()),
            assigned_pod: Box::new(|_| AssignedResources::default()),
            assignable: Box::new(AssignedResources::default),
        }
    }

    #[test]
    fn a_client_gets_both_versions_and_too_many_requests_are_rejected() {
        let root = tempfile::tempdir().unwrap();
        let server = serve(root.path(), empty()).unwrap();
        let socket = root.path().join("pod-resources/kubelet.sock");
        let channel = Channel::new(&format!("unix://{}", socket.display())).unwrap();
        let limit = Some(Duration::from_secs(10));
        let list = |method| {
            channel.call_with_stop(
                method,
                &pb::ListPodResourcesRequest::default(),
                limit,
                &StopToken::never(),
            )
        };
        assert_eq!(list(&methods::podresources::LIST).unwrap().pod_resources.len(), 0);
        assert_eq!(list(&OLD_LIST).unwrap().pod_resources.len(), 0);
        let wanted = pb::GetPodResourcesRequest {
            pod_name: "a".into(),
            pod_namespace: "n".into(),
            ..Default::default()
        };
        let error = channel
            .call_with_stop(&methods::podresources::GET, &wanted, limit, &StopToken::never())
            .unwrap_err();
        assert_eq!((error.kind, error.message.as_str()), (Kind::Unknown, "pod a in namespace n not found"));
        drop(server);
        assert!(!socket.exists());
        // Full again in an hour.
        let empty_bucket = Bucket::new(Instant::now() + Duration::from_secs(3_600));
        let _server = Server::start(&socket, services(empty(), empty_bucket)).unwrap();
        let channel = Channel::new(&format!("unix://{}", socket.display())).unwrap();
        for method in [&methods::podresources::LIST, &*OLD_LIST] {
            let error = channel
                .call_with_stop(method, &pb::ListPodResourcesRequest::default(), limit, &StopToken::never())
                .unwrap_err();
            let expected = (Kind::ResourceExhausted, "rejected by rate limit");
            assert_eq!((error.kind, error.message.as_str()), expected);
        }
    }
}
