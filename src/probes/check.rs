//! One check of one container, over the network or in the container (Go: prober/prober.go
//! and pkg/probe).

use std::borrow::Cow;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use super::container::ContainerIndex;
use super::state::Kind;
use crate::config::GoDuration;
use crate::cri::RuntimeClient;
use crate::model::api::{Container, EnvVar, GRPCAction, HTTPGetAction, Probe, TCPSocketAction};
use crate::model::expand::{Budget, TooLarge};
use crate::model::ids::ContainerId;
use crate::model::pod::Pod;
use crate::model::version::PROBE_USER_AGENT;
use crate::transport::dial::{self, HttpGet, MAX_BODY_BYTES, Scheme, join_host_port};
use crate::transport::grpc::Kind as CallKind;
use crate::transport::health::{self, Health, HealthError};
use crate::util::stop::StopToken;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// A check that ends with an error is repeated immediately, up to this number of attempts.
const ATTEMPTS: u32 = 3;

#[derive(Debug, Clone)]
pub(super) struct ProbeRun {
    pub(super) kind: Kind,
    pub(super) container: ContainerIndex,
    /// The instance that it is about.
    pub(super) id: ContainerId,
    pub(super) pod: Pod,
    /// The pod's address; `None` for a pod on the node's network whose status has none.
    pub(super) ip: Option<IpAddr>,
    /// Ends with the instance or its pod.
    pub(super) stop: StopToken,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CheckResult {
    Success,
    /// Success with a message for users.
    Warning(String),
    Failure(String),
    /// The check could not be made: upstream's name of the result, and the reason.
    Error(&'static str, String),
    /// The check's token stopped.
    Aborted,
}

/// Runs a check; one that cannot be made is retried immediately.
pub(super) fn run(check: &ProbeRun, cri: &RuntimeClient) -> CheckResult {
    let mut result = CheckResult::Aborted;
    for _ in 0..ATTEMPTS {
        if check.stop.is_stopped() {
            return CheckResult::Aborted;
        }
        result = once(check, cri);
        if !matches!(result, CheckResult::Error(..)) {
            break;
        }
    }
    result
}

fn once(check: &ProbeRun, cri: &RuntimeClient) -> CheckResult {
    let container = check.container.resolve(&check.pod);
    let Some((container, probe)) =
        container.and_then(|container| Some((container, check.kind.find_probe(container)?)))
    else {
        return CheckResult::Error("unknown", "the probe was removed".to_owned());
    };
    let timeout = timeout_of(probe);
    if let Some(action) = &probe.exec {
        return match command(action.command.as_deref().unwrap_or_default(), container) {
            Ok(command) => exec(check, cri, command, timeout),
            Err(error) => CheckResult::Error("unknown", format!("the command with its variables is {error}")),
        };
    }
    let ip = check.ip.map(|ip| ip.to_string()).unwrap_or_default();
    let named = |host: &Option<String>| host.clone().filter(|host| !host.is_empty());
    let requested_host = probe.http_get.as_ref().map(|action| named(&action.host));
    let requested_host =
        requested_host.or_else(|| probe.tcp_socket.as_ref().map(|action| named(&action.host))).flatten();
    // DIFFERS: upstream takes an unknown address of a pod for this machine.
    if requested_host.is_none() && ip.is_empty() && !check.pod.host_network() {
        return CheckResult::Error("unknown", "the pod has no IP address".to_owned());
    }
    let host = requested_host.unwrap_or(ip.clone());
    match (&probe.http_get, &probe.tcp_socket, &probe.grpc) {
        (Some(action), ..) => http(action, container, &host, timeout, &check.stop),
        (_, Some(action), _) => tcp(action, container, &host, timeout, &check.stop),
        (.., Some(action)) => grpc(action, &ip, timeout, &check.stop),
        _ => {
            let container_name = format!("{}_{}:{}", check.pod.name(), check.pod.namespace(), container.name);
            CheckResult::Error("unknown", format!("missing probe handler for {container_name}"))
        }
    }
}

fn timeout_of(probe: &Probe) -> Duration {
    let seconds = probe.timeout_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    Duration::from_secs(seconds.filter(|seconds| *seconds > 0).unwrap_or(1))
}

/// The command with `$(NAME)` replaced where the container's `env` has a literal value.
fn command(words: &[String], container: &Container) -> Result<Vec<String>, TooLarge> {
    let variables: &[EnvVar] = container.env.as_deref().unwrap_or_default();
    // Most commands have no variables. A value from another source is not known here and is empty.
    let values: HashMap<&str, &str> = match words.iter().any(|word| word.contains("$(")) {
        true => variables
            .iter()
            .map(|variable| (variable.name.as_str(), variable.value.as_deref().unwrap_or_default()))
            .collect(),
        false => HashMap::new(),
    };
    let value = |name: &str| values.get(name).map(|value| Cow::from(*value));
    let mut budget = Budget::default();
    words.iter().map(|word| budget.expand(word, value)).collect()
}

fn exec(check: &ProbeRun, cri: &RuntimeClient, command: Vec<String>, timeout: Duration) -> CheckResult {
    let text = command.join(" ");
    match cri.exec_sync(&check.id, command, timeout, &check.stop) {
        Ok(done) if done.exit_code == 0 => CheckResult::Success,
        Ok(done) => {
            let mut output = done.stdout;
            output.truncate(MAX_BODY_BYTES);
            let room = MAX_BODY_BYTES - output.len();
            output.extend(done.stderr.into_iter().take(room));
            CheckResult::Failure(String::from_utf8_lossy(&output).into_owned())
        }
        Err(_) if check.stop.is_stopped() => CheckResult::Aborted,
        Err(error) if error.kind() == Some(CallKind::DeadlineExceeded) => {
            let timeout = GoDuration::from(timeout);
            CheckResult::Failure(format!("command timed out: {text:?} timed out after {timeout}"))
        }
        Err(error) => CheckResult::Error("unknown", error.to_string()),
    }
}

fn http(
    action: &HTTPGetAction,
    container: &Container,
    host: &str,
    timeout: Duration,
    stop: &StopToken,
) -> CheckResult {
    let port = match resolve_port(&action.port, container) {
        Ok(port) => port,
        Err(message) => return CheckResult::Error("unknown", message),
    };
    let headers: Vec<(String, String)> = action
        .http_headers
        .iter()
        .flatten()
        .map(|header| (header.name.clone(), header.value.clone()))
        .collect();
    let tls = action.scheme.as_deref().is_some_and(|scheme| scheme.eq_ignore_ascii_case("https"));
    let get = HttpGet {
        scheme: if tls { Scheme::Https } else { Scheme::Http },
        host,
        port,
        path: action.path.as_deref().unwrap_or_default(),
        headers: &headers,
        user_agent: PROBE_USER_AGENT,
        timeout: Some(timeout),
    };
    match dial::http_get(&get, stop) {
        Ok(response) => match response.status {
            200..300 => CheckResult::Success,
            300..400 => {
                let body = String::from_utf8_lossy(&response.body);
                CheckResult::Warning(format!("Probe terminated redirects, Response body: {body}"))
            }
            status => CheckResult::Failure(format!("HTTP probe failed with statuscode: {status}")),
        },
        Err(error) if error.is_stopped() => CheckResult::Aborted,
        Err(error) if error.is_body() => CheckResult::Error("failure", error.to_string()),
        Err(error) => CheckResult::Failure(error.to_string()),
    }
}

fn tcp(
    action: &TCPSocketAction,
    container: &Container,
    host: &str,
    timeout: Duration,
    stop: &StopToken,
) -> CheckResult {
    match resolve_port(&action.port, container) {
        Ok(port) => match dial::tcp_connect(host, port, timeout, stop) {
            Ok(()) => CheckResult::Success,
            Err(error) if error.is_stopped() => CheckResult::Aborted,
            Err(error) => CheckResult::Failure(error.to_string()),
        },
        Err(message) => CheckResult::Error("unknown", message),
    }
}

fn grpc(action: &GRPCAction, host: &str, timeout: Duration, stop: &StopToken) -> CheckResult {
    let Ok(port) = u16::try_from(action.port) else {
        return CheckResult::Error("unknown", format!("invalid port number: {}", action.port));
    };
    let service = action.service.as_deref().unwrap_or_default();
    let outcome = health::check(host, port, service, PROBE_USER_AGENT, timeout, stop);
    let within = GoDuration::from(timeout);
    CheckResult::Failure(match outcome {
        Ok(Health::Serving) => return CheckResult::Success,
        Err(HealthError::Stopped) => return CheckResult::Aborted,
        Ok(Health::Other(status)) => format!("service unhealthy (responded with {status:?})"),
        Err(HealthError::ConnectTimeout) => {
            let address = join_host_port(host, port);
            format!(
                "timeout: failed to connect service {address:?} within {within}: context deadline exceeded"
            )
        }
        Err(HealthError::Timeout) => format!("timeout: health rpc did not complete within {within}"),
        Err(HealthError::Unimplemented(words)) => format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {words}"
        ),
        Err(HealthError::Call(error)) => format!("error: health rpc probe failed: {error}"),
    })
}

/// A port by number, or by the name of one of the container's ports. A number in quotes is a name
/// (Go: pkg/probe, since 1.37; before, it was read as a number if no port has this name).
pub(super) fn resolve_port(port: &IntOrString, container: &Container) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => i64::from(*number),
        IntOrString::String(name) => {
            let named = container.ports.iter().flatten().find(|port| port.name.as_deref() == Some(name));
            named.ok_or_else(|| format!("port {name:?} not found"))?.container_port.into()
        }
    };
    u16::try_from(number)
        .ok()
        .filter(|number| *number > 0)
        .ok_or_else(|| format!("invalid port number: {number}"))
}

#[cfg(test)]
mod tests;
