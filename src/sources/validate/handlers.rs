//! Probes and lifecycle hooks.

use super::names;
use super::report::{Path, Report};
use crate::model::api::{
    Container, ExecAction, GRPCAction, HTTPGetAction, LifecycleHandler, Probe, SleepAction, TCPSocketAction,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// Signals with names, besides the numbered ones.
const SIGNALS: &[&str] = &[
    "SIGABRT",
    "SIGALRM",
    "SIGBUS",
    "SIGCHLD",
    "SIGCLD",
    "SIGCONT",
    "SIGFPE",
    "SIGHUP",
    "SIGILL",
    "SIGINT",
    "SIGIO",
    "SIGIOT",
    "SIGKILL",
    "SIGPIPE",
    "SIGPOLL",
    "SIGPROF",
    "SIGPWR",
    "SIGQUIT",
    "SIGRTMAX",
    "SIGRTMIN",
    "SIGSEGV",
    "SIGSTKFLT",
    "SIGSTOP",
    "SIGSYS",
    "SIGTERM",
    "SIGTRAP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGUSR1",
    "SIGUSR2",
    "SIGVTALRM",
    "SIGWINCH",
    "SIGXCPU",
    "SIGXFSZ",
];

/// Whether a signal exists: one with a name, `SIGRTMIN+1` to `+15` or `SIGRTMAX-1` to `-14`.
fn is_signal(name: &str) -> bool {
    let numbered = |prefix: &str, most: u8| {
        let number = name.strip_prefix(prefix).filter(|number| !number.starts_with(['0', '+']));
        number.and_then(|number| number.parse().ok()).is_some_and(|number: u8| (1..=most).contains(&number))
    };
    SIGNALS.contains(&name) || numbered("SIGRTMIN+", 15) || numbered("SIGRTMAX-", 14)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Liveness,
    Readiness,
    Startup,
}

/// Checks the probes and hooks of a container that may have them.
pub(super) fn all(container: &Container, grace_seconds: i64, path: &Path<'_>, report: &mut Report) {
    probe(container.liveness_probe.as_ref(), Kind::Liveness, &path.field("livenessProbe"), report);
    probe(container.readiness_probe.as_ref(), Kind::Readiness, &path.field("readinessProbe"), report);
    probe(container.startup_probe.as_ref(), Kind::Startup, &path.field("startupProbe"), report);
    if let Some(lifecycle) = &container.lifecycle {
        let place = path.field("lifecycle");
        hook(lifecycle.post_start.as_ref(), grace_seconds, &place.field("postStart"), report);
        hook(lifecycle.pre_stop.as_ref(), grace_seconds, &place.field("preStop"), report);
        if let Some(signal) = lifecycle.stop_signal.as_deref().filter(|signal| !is_signal(signal)) {
            report.unsupported(&place.field("stopSignal"), signal, SIGNALS);
        }
    }
}

fn probe(probe: Option<&Probe>, kind: Kind, path: &Path<'_>, report: &mut Report) {
    let Some(probe) = probe else { return };
    let exec = probe.exec.as_ref();
    handlers(
        Handlers { exec, http_get: probe.http_get.as_ref(), tcp_socket: probe.tcp_socket.as_ref() },
        probe.grpc.as_ref().map(SpecialHandler::Grpc),
        path,
        report,
    );
    for (name, value) in [
        ("initialDelaySeconds", probe.initial_delay_seconds),
        ("timeoutSeconds", probe.timeout_seconds),
        ("periodSeconds", probe.period_seconds),
        ("successThreshold", probe.success_threshold),
        ("failureThreshold", probe.failure_threshold),
    ] {
        report.not_negative(&path.field(name), value.map(i64::from));
    }
    let grace = path.field("terminationGracePeriodSeconds");
    match (probe.termination_grace_period_seconds, kind) {
        (Some(value), Kind::Readiness) => {
            report.invalid(&grace, &value, "must not be set for readinessProbes");
        }
        (Some(value), _) if value <= 0 => report.invalid(&grace, &value, "must be greater than 0"),
        _ => {}
    }
    if kind != Kind::Readiness
        && let Some(value) = probe.success_threshold.filter(|value| *value > 1)
    {
        report.invalid(&path.field("successThreshold"), &value, "must be 1");
    }
}

fn hook(hook: Option<&LifecycleHandler>, grace_seconds: i64, path: &Path<'_>, report: &mut Report) {
    let Some(hook) = hook else { return };
    let sleep = hook.sleep.as_ref().map(|action| SpecialHandler::Sleep(action, grace_seconds));
    let set = Handlers {
        exec: hook.exec.as_ref(),
        http_get: hook.http_get.as_ref(),
        tcp_socket: hook.tcp_socket.as_ref(),
    };
    handlers(set, sleep, path, report);
}

/// The common fields of probes and hooks.
struct Handlers<'a> {
    exec: Option<&'a ExecAction>,
    http_get: Option<&'a HTTPGetAction>,
    tcp_socket: Option<&'a TCPSocketAction>,
}

/// The fields that only probes or only hooks have.
enum SpecialHandler<'a> {
    Grpc(&'a GRPCAction),
    Sleep(&'a SleepAction, i64),
}

fn handlers(set: Handlers<'_>, special: Option<SpecialHandler<'_>>, path: &Path<'_>, report: &mut Report) {
    let mut count = 0;
    let mut is_first = |report: &mut Report, name: &str| {
        count += 1;
        if count > 1 {
            report.forbidden(&path.field(name), "may not specify more than 1 handler type");
        }
        count == 1
    };
    if let Some(action) = set.exec
        && is_first(report, "exec")
        && action.command.as_ref().is_none_or(Vec::is_empty)
    {
        report.required(&path.field("exec").field("command"), "");
    }
    if let Some(action) = set.http_get
        && is_first(report, "httpGet")
    {
        http_get(action, &path.field("httpGet"), report);
    }
    if let Some(action) = set.tcp_socket
        && is_first(report, "tcpSocket")
    {
        port(&action.port, &path.field("tcpSocket").field("port"), report);
    }
    match special {
        Some(SpecialHandler::Grpc(action)) if is_first(report, "grpc") => {
            let place = path.field("grpc");
            number(action.port, &place.field("port"), report);
            let modes = ["Plaintext", "TLS"];
            if let Some(mode) = action.mode.as_deref().filter(|mode| !modes.contains(mode)) {
                report.unsupported(&place.field("mode"), mode, &modes);
            }
        }
        Some(SpecialHandler::Sleep(action, grace))
            if is_first(report, "sleep") && !(0..=grace).contains(&action.seconds) =>
        {
            report.invalid(
                &path.field("sleep").field("seconds"),
                &action.seconds,
                format!("must be non-negative and less than terminationGracePeriodSeconds ({grace})"),
            );
        }
        _ => {}
    }
    if count == 0 {
        report.required(path, "must specify a handler type");
    }
}

fn http_get(action: &HTTPGetAction, path: &Path<'_>, report: &mut Report) {
    if action.path.as_deref().unwrap_or_default().is_empty() {
        report.required(&path.field("path"), "");
    }
    port(&action.port, &path.field("port"), report);
    report.choice(&path.field("scheme"), action.scheme.as_deref(), &["HTTP", "HTTPS"]);
    for (index, header) in action.http_headers.iter().flatten().enumerate() {
        let headers = path.field("httpHeaders");
        report.check(&headers.index(index).field("name"), &header.name, names::header_name(&header.name));
    }
    let place = path.field("protocol");
    let host = action.host.as_deref().unwrap_or_default();
    match action.protocol.as_deref() {
        Some(protocol @ "HTTP2") if action.scheme.as_deref() != Some("HTTP") => {
            report.invalid(&place, &protocol, "is only supported with HTTP (H2C)");
        }
        Some("HTTP2") if !host.is_empty() => {
            report.invalid(&path.field("host"), &host, "must be empty when `protocol` is \"HTTP2\"");
        }
        None | Some("HTTP1" | "HTTP2") => {}
        Some(other) => report.unsupported(&place, other, &["HTTP1", "HTTP2"]),
    }
}

fn port(port: &IntOrString, path: &Path<'_>, report: &mut Report) {
    match port {
        IntOrString::Int(value) => number(*value, path, report),
        IntOrString::String(name) => report.check(path, name, names::port_name(name)),
    }
}

/// Checks a port number.
pub(super) fn number(port: i32, path: &Path<'_>, report: &mut Report) {
    if !(1..=65535).contains(&port) {
        report.invalid(path, &port, "must be between 1 and 65535, inclusive");
    }
}
