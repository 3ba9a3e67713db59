//! Containers of all kinds.

use std::collections::HashSet;

use super::report::{Path, Report};
use super::resources::{self, Level};
use super::{environment, handlers, names, security, volume};
use crate::model::api::{Container, ContainerPort, ContainerRestartRule, PodSpec};
use crate::model::pod::is_sidecar;

/// Checks all containers of a pod.
pub(super) fn containers(spec: &PodSpec, path: &Path<'_>, report: &mut Report) {
    let mut names = HashSet::new();
    if spec.containers.is_empty() {
        report.required(&path.field("containers"), "");
    }
    let init = spec.init_containers.as_deref().unwrap_or_default();
    // Regular containers first: of two equal names, the later one is reported.
    for (index, container) in spec.containers.iter().enumerate() {
        let list = path.field("containers");
        let place = list.index(index);
        common(container, spec, &place, report);
        name(container, &mut names, &place, report);
        handlers::all(container, grace(spec), &place, report);
        restart_policy(container, &["Always", "OnFailure", "Never"], &place, report);
    }
    for (index, container) in init.iter().enumerate() {
        let list = path.field("initContainers");
        let place = list.index(index);
        common(container, spec, &place, report);
        name(container, &mut names, &place, report);
        init_container(container, spec, &place, report);
    }
    host_ports(spec, path, report);
    if spec.ephemeral_containers.as_ref().is_some_and(|list| !list.is_empty()) {
        report.forbidden(&path.field("ephemeralContainers"), "cannot be set on create");
    }
}

fn grace(spec: &PodSpec) -> i64 {
    spec.termination_grace_period_seconds.unwrap_or(30)
}

fn name<'a>(container: &'a Container, seen: &mut HashSet<&'a str>, path: &Path<'_>, report: &mut Report) {
    let place = path.field("name");
    if container.name.is_empty() {
        report.required(&place, "");
        return;
    }
    report.check(&place, &container.name, names::dns_label(&container.name));
    if !seen.insert(&container.name) {
        report.duplicate(&place, &container.name);
    }
}

fn init_container(container: &Container, spec: &PodSpec, path: &Path<'_>, report: &mut Report) {
    restart_policy(container, &["Always", "OnFailure", "Never"], path, report);
    if is_sidecar(container) {
        handlers::all(container, grace(spec), path, report);
        return;
    }
    for (set, field) in [
        (container.lifecycle.is_some(), "lifecycle"),
        (container.liveness_probe.is_some(), "livenessProbe"),
        (container.readiness_probe.is_some(), "readinessProbe"),
        (container.startup_probe.is_some(), "startupProbe"),
    ] {
        if set {
            report.forbidden(
                &path.field(field),
                "may not be set for init containers without restartPolicy=Always",
            );
        }
    }
}

fn restart_policy(container: &Container, choices: &[&str], path: &Path<'_>, report: &mut Report) {
    let policy = container.restart_policy.as_deref().filter(|policy| !policy.is_empty());
    report.choice(&path.field("restartPolicy"), policy, choices);
    let rules = container.restart_policy_rules.as_deref().unwrap_or_default();
    let place = path.field("restartPolicyRules");
    if !rules.is_empty() && policy.is_none() {
        report
            .required(&path.field("restartPolicy"), "must specify restartPolicy when restart rules are used");
    }
    if rules.len() > 20 {
        report.too_many(&place, rules.len(), 20);
    }
    for (index, rule) in rules.iter().enumerate() {
        restart_rule(rule, &place.index(index), report);
    }
}

fn restart_rule(rule: &ContainerRestartRule, path: &Path<'_>, report: &mut Report) {
    if rule.action.is_empty() {
        report.required(&path.field("action"), "");
    }
    report.choice(&path.field("action"), Some(&rule.action), &["Restart", "RestartAllContainers"]);
    let place = path.field("exitCodes");
    let Some(codes) = &rule.exit_codes else {
        report.required(&place, "");
        return;
    };
    if codes.operator.is_empty() {
        report.required(&place.field("operator"), "");
    }
    report.choice(&place.field("operator"), Some(&codes.operator), &["In", "NotIn"]);
    let values = codes.values.as_deref().unwrap_or_default();
    if values.is_empty() {
        report.required(&place.field("values"), "at least one exit code must be specified");
    } else if values.len() > 255 {
        report.too_many(&place.field("values"), values.len(), 255);
    }
}

/// The common fields of regular and init containers.
fn common(container: &Container, spec: &PodSpec, path: &Path<'_>, report: &mut Report) {
    let image = container.image.as_deref().unwrap_or_default();
    if image.is_empty() {
        report.required(&path.field("image"), "");
    } else if image.trim() != image {
        report.invalid(&path.field("image"), &image, "must not have leading or trailing whitespace");
    }
    report.choice(
        &path.field("imagePullPolicy"),
        container.image_pull_policy.as_deref(),
        volume::PULL_POLICIES,
    );
    report.choice(
        &path.field("terminationMessagePolicy"),
        container.termination_message_policy.as_deref(),
        &["FallbackToLogsOnError", "File"],
    );
    let lists = [("command", &container.command), ("args", &container.args)]
        .map(|(name, list)| (name, list.iter().flatten()));
    for (name, list) in lists {
        for (index, text) in list.enumerate() {
            if text.contains('\0') {
                report.invalid(&path.field(name).index(index), text, "must not contain a NUL character");
            }
        }
    }
    let volumes = spec.volumes.as_deref().unwrap_or_default();
    ports(container.ports.as_deref().unwrap_or_default(), spec, &path.field("ports"), report);
    environment::variables(container.env.as_deref(), volumes, &path.field("env"), report);
    environment::sources(container.env_from.as_deref(), &path.field("envFrom"), report);
    volume::mounts(container, volumes, path, report);
    resources::requirements(container.resources.as_ref(), Level::Container, &path.field("resources"), report);
    resources::resize_policies(container.resize_policy.as_deref(), &path.field("resizePolicy"), report);
    security::container(
        container.security_context.as_ref(),
        spec.host_users,
        &path.field("securityContext"),
        report,
    );
}

fn ports(ports: &[ContainerPort], spec: &PodSpec, path: &Path<'_>, report: &mut Report) {
    let mut seen = HashSet::new();
    for (index, port) in ports.iter().enumerate() {
        let item = path.index(index);
        if let Some(name) = port.name.as_deref().filter(|name| !name.is_empty()) {
            report.check(&item.field("name"), name, names::port_name(name));
            if !seen.insert(name) {
                report.duplicate(&item.field("name"), &name);
            }
        }
        if port.container_port == 0 {
            report.required(&item.field("containerPort"), "");
        } else {
            handlers::number(port.container_port, &item.field("containerPort"), report);
        }
        match port.host_port.filter(|port| *port != 0) {
            // A port that was copied from an invalid containerPort is not reported again.
            Some(host) if host != port.container_port => {
                handlers::number(host, &item.field("hostPort"), report);
                if spec.host_network == Some(true) {
                    let detail = format!(
                        "must match `containerPort` when `hostNetwork` is true ({})",
                        port.container_port
                    );
                    report.invalid(&item.field("hostPort"), &host, detail);
                }
            }
            _ => {}
        }
        match port.protocol.as_deref().unwrap_or_default() {
            "" => report.required(&item.field("protocol"), ""),
            protocol => report.choice(&item.field("protocol"), Some(protocol), &["SCTP", "TCP", "UDP"]),
        }
        if let Some(ip) = port.host_ip.as_deref().filter(|ip| !ip.is_empty()) {
            report.check(&item.field("hostIP"), ip, names::ip_address(ip));
        }
    }
}

/// Two containers of a pod must not use the same port of the node.
fn host_ports(spec: &PodSpec, path: &Path<'_>, report: &mut Report) {
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let mut seen = HashSet::new();
    let mut claim = |list: &Path<'_>, index: usize, container: &Container, report: &mut Report| {
        for (number, port) in container.ports.iter().flatten().enumerate() {
            let Some(host) = port.host_port.filter(|port| *port != 0) else { continue };
            let protocol = port.protocol.as_deref().unwrap_or_default();
            let ip = port.host_ip.as_deref().filter(|ip| !ip.is_empty()).unwrap_or("0.0.0.0");
            let key = format!("{host}/{protocol}/{ip}");
            if !seen.insert(key.clone()) {
                let container = list.index(index);
                let ports = container.field("ports");
                let port = ports.index(number);
                report.duplicate(&port.field("hostPort"), &key);
            }
        }
    };
    for (index, container) in spec.containers.iter().enumerate() {
        claim(&path.field("containers"), index, container, report);
    }
    // A plain init container has ended before the others start; a sidecar has not.
    for (index, container) in init.iter().enumerate().filter(|(_, container)| is_sidecar(container)) {
        claim(&path.field("initContainers"), index, container, report);
    }
}
