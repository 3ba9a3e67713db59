//! Calls to one instance of a driver (Go: pkg/kubelet/cm/dra/plugin/dra_plugin.go).

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use super::drivers::{HealthService, Service};
use super::health::{self, Health, Report};
use super::info::{ClaimId, Device};
use super::manager::Driver;
use super::response::{self, PrepareResults, UnprepareResults};
use crate::model::metrics;
use crate::transport::generated::{dra, drahealth, from_bytes, methods};
use crate::transport::grpc::{CallError, Channel, ResponseStream, StreamingMethod, UnaryMethod};
use crate::util::stop::StopToken;

/// Time limit of a call: upstream's, half of the time between attempts.
pub const TIMEOUT: Duration = Duration::from_secs(45);
/// The largest message of a driver: the default of Go's library, so upstream's limit.
const MAX_BYTES: i32 = 4 * 1024 * 1024;
/// Devices of a list of reports that are read. It can name more than are recorded, for those that are
/// known already count wherever they are in the list.
///
/// DIFFERS: upstream reads all.
const MAX_REPORTS: usize = 4 * health::MAX_DEVICES;

pub(super) static PREPARE_V1BETA1: LazyLock<UnaryMethod<dra::ClaimsRequest, dra::PrepareResponse>> =
    LazyLock::new(|| {
        methods::NODE_PREPARE_RESOURCES
            .at_path("/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources")
    });
pub(super) static UNPREPARE_V1BETA1: LazyLock<UnaryMethod<dra::ClaimsRequest, dra::UnprepareResponse>> =
    LazyLock::new(|| {
        methods::NODE_UNPREPARE_RESOURCES
            .at_path("/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources")
    });

pub(super) static WATCH_V1ALPHA1: LazyLock<
    StreamingMethod<drahealth::WatchRequest, drahealth::HealthResponse>,
> = LazyLock::new(|| methods::NODE_WATCH_RESOURCES.at_path("/v1alpha1.DRAResourceHealth/NodeWatchResources"));

/// The connection to an instance. Clones share it.
#[derive(Debug, Clone)]
pub struct Client {
    driver: String,
    service: Service,
    timeout: Duration,
    channel: Channel,
}

impl Client {
    /// Prepares the connection to a socket; `timeout` ends each call.
    ///
    /// # Errors
    /// When the path cannot be that of a socket.
    pub(super) fn new(
        driver: &str,
        endpoint: &str,
        service: Service,
        timeout: Duration,
    ) -> Result<Client, String> {
        let target = format!("unix://{endpoint}");
        let channel = Channel::limited(&target, MAX_BYTES).map_err(|error| {
            format!("create gRPC connection to DRA driver {driver} plugin at endpoint {endpoint}: {error}")
        })?;
        Ok(Client { driver: driver.to_owned(), service, timeout, channel })
    }

    fn call<Resp: Unpin>(
        &self,
        method: &'static UnaryMethod<dra::ClaimsRequest, Resp>,
        claims: &[ClaimId],
        stop: &StopToken,
    ) -> Result<Resp, String> {
        let claim = |claim: &ClaimId| dra::ClaimId {
            namespace: claim.key.namespace.clone(),
            uid: claim.uid.clone(),
            name: claim.key.name.clone(),
            ..Default::default()
        };
        let request = dra::ClaimsRequest { claims: claims.iter().map(claim).collect(), ..Default::default() };
        let begun = Instant::now();
        let result = self.channel.call_with_stop(method, &request, Some(self.timeout), stop);
        let code = result.as_ref().map_or_else(|error| error.kind.as_str(), |_| "OK");
        let labels = [self.driver.clone().into(), method.path().into(), code.into()];
        metrics::DRIVER_CALLS.observe_duration::<crate::util::metrics::Value>(labels, begun.elapsed());
        result.map_err(|error| error.to_string())
    }

    /// Opens the stream of the driver's reports.
    ///
    /// # Errors
    /// When the call cannot be started.
    pub fn watch(&self, service: HealthService) -> Result<HealthReports, CallError> {
        let method = match service {
            HealthService::V1 => &methods::NODE_WATCH_RESOURCES,
            HealthService::V1alpha1 => &*WATCH_V1ALPHA1,
        };
        let stream = self.channel.open(method, &drahealth::WatchRequest::default())?;
        Ok(HealthReports { stream })
    }

    /// Begins to connect, so that the loss of the driver can be noticed without a call.
    pub fn connect(&self) {
        self.channel.connect();
    }
}

impl Driver for Client {
    fn prepare(&self, claims: &[ClaimId], stop: &StopToken) -> Result<PrepareResults, String> {
        let method = match self.service {
            Service::V1 => &methods::NODE_PREPARE_RESOURCES,
            Service::V1beta1 => &*PREPARE_V1BETA1,
        };
        let found = self.call(method, claims, stop)?;
        let result = |result: dra::PrepareResult| match result.error.is_empty() {
            true => devices(&result.devices),
            false => Err(result.error),
        };
        // One more than was requested is enough to see that the response is wrong.
        let found = found.claims.into_iter().take(claims.len() + 1);
        Ok(found.map(|(uid, outcome)| (uid, result(outcome))).collect())
    }

    fn unprepare(&self, claims: &[ClaimId], stop: &StopToken) -> Result<UnprepareResults, String> {
        let method = match self.service {
            Service::V1 => &methods::NODE_UNPREPARE_RESOURCES,
            Service::V1beta1 => &*UNPREPARE_V1BETA1,
        };
        let found = self.call(method, claims, stop)?.claims.into_iter().take(claims.len() + 1);
        let result = |error: String| if error.is_empty() { Ok(()) } else { Err(error) };
        Ok(found.map(|(uid, outcome)| (uid, result(outcome.error))).collect())
    }

    fn is_connected(&self) -> bool {
        self.channel.is_connected()
    }
}

fn devices(messages: &[Vec<u8>]) -> Result<Vec<Device>, String> {
    let device = |bytes: &Vec<u8>| {
        let device: dra::PreparedDevice = from_bytes(bytes)?;
        Some(Device {
            pool: device.pool_name,
            name: device.device_name,
            share_id: device.share_id,
            requests: device.request_names,
            cdi_ids: device.cdi_device_ids,
        })
    };
    let found = messages.iter().take(response::MAX_DEVICES + 1).map(device);
    found.collect::<Option<_>>().ok_or_else(|| "a device of the answer cannot be read".to_owned())
}

/// The reports of a driver.
pub struct HealthReports {
    stream: ResponseStream<drahealth::HealthResponse>,
}

impl HealthReports {
    /// Waits for the next report, with the number of its devices; `None`: the driver has ended the
    /// stream. A device that cannot be read is left out, and so is what comes after the first
    /// `MAX_REPORTS` devices. `check` is called after each `interval` without a report until it returns
    /// `true`.
    ///
    /// # Errors
    /// Those of the call.
    pub fn next(
        &mut self,
        stop: &StopToken,
        interval: Duration,
        check: impl FnMut() -> bool,
    ) -> Result<Option<(usize, Vec<Report>)>, CallError> {
        let Some(found) = self.stream.next_with_check(stop, interval, check)? else { return Ok(None) };
        Ok(Some((found.devices.len(), reports(&found.devices))))
    }
}

/// A message of empty devices has millions of them, and the reports are entered under a lock that all
/// drivers share: so they are read before, and their number is limited.
fn reports(devices: &[Vec<u8>]) -> Vec<Report> {
    devices.iter().take(MAX_REPORTS).filter_map(|bytes| from_bytes(bytes)).map(report).collect()
}

fn report(report: drahealth::DeviceReport) -> Report {
    let device = report.device.into_option().unwrap_or_default();
    Report {
        pool: device.pool_name,
        device: device.device_name,
        health: match report.health.enum_value_or_default() {
            drahealth::HealthStatus::HEALTHY => Health::Healthy,
            drahealth::HealthStatus::UNHEALTHY => Health::Unhealthy,
            drahealth::HealthStatus::UNKNOWN => Health::Unknown,
        },
        timeout_seconds: report.health_check_timeout_seconds,
        message: report.message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::generated::{MessageField, to_bytes};

    #[test]
    fn list_of_millions_of_empty_devices_is_read_within_a_limit() {
        let device = |name: &str| {
            let id = drahealth::DeviceId { device_name: name.to_owned(), ..Default::default() };
            let device = MessageField::some(id);
            to_bytes(&drahealth::DeviceReport { device, ..Default::default() })
        };
        let mut devices = vec![vec![0xff, 0xff], device("a")];
        devices.resize(MAX_REPORTS, Vec::new());
        devices.push(device("b"));
        let found = reports(&devices);
        // The first one cannot be read.
        assert_eq!(found.len(), MAX_REPORTS - 1);
        assert!(found.iter().any(|report| report.device == "a"));
        assert!(!found.iter().any(|report| report.device == "b"));
    }
}
