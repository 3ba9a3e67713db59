//! Requests, limits and resize policies.

use std::collections::BTreeMap;

use super::names;
use super::report::{Path, Report};
use crate::model::Quantity;
use crate::model::api::{ContainerResizePolicy, ResourceRequirements};
use crate::model::pod::Pod;
use crate::model::quantity::Amount;
use crate::model::requests::{container_limits, container_requests};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    Container,
    /// The pod itself, where only CPU, memory and huge pages may be set.
    Pod,
}

/// Checks requests against limits.
pub(super) fn requirements(
    resources: Option<&ResourceRequirements>,
    level: Level,
    path: &Path<'_>,
    report: &mut Report,
) {
    let Some(resources) = resources else { return };
    let empty = BTreeMap::new();
    let limits = resources.limits.as_ref().unwrap_or(&empty);
    let requests = resources.requests.as_ref().unwrap_or(&empty);
    let (limits_path, requests_path) = (path.field("limits"), path.field("requests"));
    for (name, quantity) in limits {
        check_resource(name, quantity, level, &limits_path.key(name), report);
    }
    for (name, quantity) in requests {
        let place = requests_path.key(name);
        // A request that was copied from its limit has been checked with it.
        if limits.get(name) != Some(quantity) {
            check_resource(name, quantity, level, &place, report);
        }
        let Ok(request) = Amount::parse(&quantity.0).map(Amount::rounded) else { continue };
        match limits.get(name).map(|limit| (limit, Amount::parse(&limit.0).map(Amount::rounded))) {
            Some((limit, Ok(most))) if request > most => {
                let detail = format!("must be less than or equal to {name} limit of {}", limit.0);
                report.invalid(&requests_path, &quantity.0, detail);
            }
            Some((limit, Ok(most))) if request != most && !overcommits(name) => {
                let detail = format!("must be equal to {name} limit of {}", limit.0);
                report.invalid(&requests_path, &quantity.0, detail);
            }
            None if !overcommits(name) => {
                report.required(&limits_path, "Limit must be set for non overcommitable resources");
            }
            _ => {}
        }
    }
    let huge = limits.keys().chain(requests.keys()).any(|name| name.starts_with("hugepages-"));
    let base =
        ["cpu", "memory"].iter().any(|name| limits.contains_key(*name) || requests.contains_key(*name));
    if huge && !base {
        report.forbidden(path, "HugePages require cpu or memory");
    }
}

/// Checks the pod-level resources against those of its containers.
pub(super) fn pod_level(pod: &Pod, path: &Path<'_>, report: &mut Report) {
    let Some(resources) = &pod.spec().resources else { return };
    let requests = path.field("requests");
    for (name, sum) in container_requests(pod) {
        let Some(own) = resources.requests.as_ref().and_then(|requests| requests.get(&name)) else {
            continue;
        };
        if Amount::parse(&own.0).is_ok_and(|own| own < sum) {
            let detail = format!(
                "must be greater than or equal to aggregate container requests of {}",
                text(&name, sum)
            );
            report.invalid(&requests.key(&name), &own.0, detail);
        }
    }
    // The API server requests what is limited. A static pod from a file has no such request that would be
    // compared above.
    let limits = path.field("limits");
    for (name, sum) in container_limits(pod).into_iter().filter(|(name, _)| name.starts_with("hugepages-")) {
        let Some(own) = resources.limits.as_ref().and_then(|limits| limits.get(&name)) else { continue };
        if Amount::parse(&own.0).is_ok_and(|own| own < sum) {
            let detail = format!(
                "must be greater than or equal to aggregate container limits of {}",
                text(&name, sum)
            );
            report.invalid(&limits.key(&name), &own.0, detail);
        }
    }
    let containers = path.field("containers");
    for (index, container) in pod.containers().iter().enumerate() {
        let limits = container.resources.iter().flat_map(|resources| resources.limits.iter().flatten());
        for (name, limit) in limits {
            let Some(own) = resources.limits.as_ref().and_then(|limits| limits.get(name)) else { continue };
            let larger = Amount::parse(&limit.0).and_then(|limit| Ok(limit > Amount::parse(&own.0)?));
            if larger == Ok(true) {
                // Upstream derives the path from that of the pod's resources.
                let item = containers.index(index);
                let place = item.key(name);
                let detail = format!("must be less than or equal to pod limits of {}", own.0);
                report.invalid(&place.field("limits"), &limit.0, detail);
            }
        }
    }
}

/// A sum in the API's format.
fn text(resource: &str, amount: Amount) -> String {
    if !amount.is_whole() {
        return format!("{}m", amount.milli());
    }
    let mut units = amount.units();
    let mut suffixes = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"].into_iter();
    let mut suffix = suffixes.next().unwrap_or_default();
    while resource != "cpu"
        && units >= 1024
        && units % 1024 == 0
        && let Some(next) = suffixes.next()
    {
        units /= 1024;
        suffix = next;
    }
    format!("{units}{suffix}")
}

/// Only the built-in resources may be requested below their limit.
fn overcommits(name: &str) -> bool {
    matches!(name, "cpu" | "memory" | "ephemeral-storage")
}

fn check_resource(name: &str, value: &Quantity, level: Level, path: &Path<'_>, report: &mut Report) {
    if let Some(problem) = names::qualified_name(name) {
        report.invalid(path, &name, problem);
        return;
    }
    let huge = name.strip_prefix("hugepages-");
    let known = matches!(name, "cpu" | "memory") || huge.is_some();
    match level {
        Level::Pod if !known => report.unsupported(path, name, &["cpu", "hugepages-", "memory"]),
        Level::Container if !known && name != "ephemeral-storage" && !name.contains('/') => {
            report.invalid(path, &name, "must be a standard resource for containers or fully qualified");
        }
        _ => {}
    }
    if let Some(problem) = quantity_error(&value.0) {
        report.invalid(path, &value.0, problem);
        return;
    }
    let Ok(parsed) = Amount::parse(&value.0) else { return };
    if !matches!(name, "cpu" | "memory" | "ephemeral-storage") && !parsed.is_whole() {
        report.invalid(path, &value.0, "must be an integer");
    }
    if let Some(size) = huge {
        let size = Amount::parse(size).unwrap_or(Amount::ZERO);
        if size <= Amount::ZERO {
            report.invalid(path, &name, "the page size must be a positive quantity");
        } else if parsed.units() % size.units().max(1) != 0 {
            report.invalid(path, &value.0, "must be a multiple of the page size");
        }
    }
}

/// The faults of a quantity that must not be negative.
pub(super) fn quantity_error(text: &str) -> Option<String> {
    match Amount::parse(text) {
        Err(_) => Some(
            "quantities must be a number with an optional suffix (n, u, m, k, M, G, T, P, E, Ki, Mi, Gi, Ti, \
             Pi, Ei or an exponent)"
                .to_owned(),
        ),
        Ok(amount) if amount.is_negative() => Some("must be greater than or equal to 0".to_owned()),
        Ok(_) => None,
    }
}

/// Checks the resize policy of a container.
pub(super) fn resize_policies(
    policies: Option<&[ContainerResizePolicy]>,
    path: &Path<'_>,
    report: &mut Report,
) {
    let mut seen = Vec::new();
    for (index, policy) in policies.unwrap_or_default().iter().enumerate() {
        let place = path.index(index);
        if seen.contains(&policy.resource_name.as_str()) {
            report.duplicate(&place, &policy.resource_name);
        }
        seen.push(policy.resource_name.as_str());
        for (name, value, choices) in [
            ("resourceName", &policy.resource_name, &["cpu", "memory"]),
            ("restartPolicy", &policy.restart_policy, &["NotRequired", "RestartContainer"]),
        ] {
            if value.is_empty() {
                report.required(&place.field(name), "");
            }
            report.choice(&place.field(name), Some(value), choices);
        }
    }
}
