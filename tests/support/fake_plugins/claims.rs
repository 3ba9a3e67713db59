//! A driver of resource claims, with reports about the health of its devices.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use coracle::transport::generated::{
    EnumOrUnknown, MessageField, dra as pb, drahealth, methods, pluginregistration, to_bytes,
};
use coracle::transport::rpc_server::{RpcError, Service};
use coracle::util::stop::Waited;

use super::{CLAIM_DRIVER, Plugin, Shared, registration, unary_alone};

/// Between two polls of a stream.
const PERIOD: Duration = Duration::from_millis(100);

/// The UIDs of the claims that are prepared.
#[derive(Debug, Default)]
pub(super) struct Prepared(BTreeSet<String>);

impl Prepared {
    pub(super) fn left(&self) -> Vec<String> {
        self.0.iter().map(|uid| format!("claim {uid} is prepared")).collect()
    }

    pub(super) fn is_prepared(&self, uid: &str) -> bool {
        self.0.contains(uid)
    }
}

fn subject(request: &pb::ClaimsRequest) -> String {
    request.claims.iter().map(|claim| claim.uid.as_str()).collect::<Vec<_>>().join(" ")
}

fn prepare(shared: &Shared, request: &pb::ClaimsRequest) -> Result<pb::PrepareResponse, RpcError> {
    let mut response = pb::PrepareResponse::default();
    for claim in &request.claims {
        let device = pb::PreparedDevice {
            pool_name: "pool".to_owned(),
            device_name: "gadget".to_owned(),
            cdi_device_ids: vec![format!("faulty.test/gadget={}", claim.uid)],
            ..Default::default()
        };
        let result = pb::PrepareResult { devices: vec![to_bytes(&device)], ..Default::default() };
        response.claims.insert(claim.uid.clone(), result);
        shared.state.lock().unwrap().claims.0.insert(claim.uid.clone());
    }
    Ok(response)
}

fn unprepare(shared: &Shared, request: &pb::ClaimsRequest) -> Result<pb::UnprepareResponse, RpcError> {
    let mut response = pb::UnprepareResponse::default();
    for claim in &request.claims {
        response.claims.insert(claim.uid.clone(), pb::UnprepareResult::default());
        shared.state.lock().unwrap().claims.0.remove(&claim.uid);
    }
    Ok(response)
}

fn report() -> drahealth::HealthResponse {
    let device = drahealth::DeviceId {
        pool_name: "pool".to_owned(),
        device_name: "gadget".to_owned(),
        ..Default::default()
    };
    let report = drahealth::DeviceReport {
        device: MessageField::some(device),
        health: EnumOrUnknown::new(drahealth::HealthStatus::HEALTHY),
        ..Default::default()
    };
    drahealth::HealthResponse { devices: vec![to_bytes(&report)], ..Default::default() }
}

pub(super) fn service(shared: &Arc<Shared>) -> Service {
    let call = |name: &'static str| (Plugin::Claims, name);
    let info = pluginregistration::PluginInfo {
        type_: "DRAPlugin".to_owned(),
        name: CLAIM_DRIVER.to_owned(),
        endpoint: Plugin::Claims.socket(&shared.root).display().to_string(),
        supported_versions: vec!["v1.DRAPlugin".to_owned(), "v1.DRAResourceHealth".to_owned()],
        ..Default::default()
    };
    let names = ["GetInfo of DRA", "NotifyRegistrationStatus of DRA"];
    let service = registration(Service::new(), shared, Plugin::Claims, names, info);
    let service = unary_alone(
        service,
        shared,
        call("NodePrepareResources"),
        &methods::NODE_PREPARE_RESOURCES,
        subject,
        prepare,
    );
    let service = unary_alone(
        service,
        shared,
        call("NodeUnprepareResources"),
        &methods::NODE_UNPREPARE_RESOURCES,
        subject,
        unprepare,
    );
    let own = Arc::clone(shared);
    service.stream(&methods::NODE_WATCH_RESOURCES, move |_, out, stop| {
        own.serve((Plugin::Claims, "NodeWatchResources"), stop, || {
            out.send(report(), stop).map_err(|_| RpcError::unavailable("the agent has left"))
        })?;
        while !out.has_client_left() && stop.wait(PERIOD) == Waited::TimedOut {}
        Ok(())
    })
}
