//! The pod itself: metadata, and its specification without containers and volumes.

use std::collections::BTreeMap;

use super::report::{Path, Report};
use super::resources::{self, Level};
use super::{container, names, security, volume};
use crate::model::api::{HostAlias, Pod, PodDNSConfig, PodSpec, Toleration};
use crate::model::meta::ObjectMeta;
use crate::model::pod_size::{self, Excess};
use crate::sources::problem::Fault;

/// The size limit of all keys and values of a pod's annotations together.
const MAX_ANNOTATIONS_BYTES: usize = 256 * 1024;

/// All faults of a pod with its defaults.
pub(crate) fn validate(pod: &Pod) -> Vec<Fault> {
    let mut report = Report::default();
    metadata(&pod.metadata, &Path::root("metadata"), &mut report);
    let path = Path::root("spec");
    match &pod.spec {
        Some(spec) => specification(spec, &path, &mut report),
        None => report.required(&path, ""),
    }
    if pod.spec.as_ref().is_some_and(|spec| spec.resources.is_some()) {
        resources::pod_level(&pod.clone().into(), &path.field("resources"), &mut report);
    }
    report.into_faults()
}

fn metadata(meta: &ObjectMeta, path: &Path<'_>, report: &mut Report) {
    let name = meta.name.as_deref().unwrap_or_default();
    if name.is_empty() {
        report.required(&path.field("name"), "name or generateName is required");
    } else {
        report.check(&path.field("name"), name, names::dns_subdomain(name));
    }
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    if namespace.is_empty() {
        report.required(&path.field("namespace"), "");
    } else {
        report.check(&path.field("namespace"), namespace, names::dns_label(namespace));
    }
    if let Some(uid) = meta.uid.as_deref() {
        report.check(&path.field("uid"), uid, names::uid_problem(uid));
    }
    labels(meta.labels.as_ref(), &path.field("labels"), report);
    let place = path.field("annotations");
    let mut bytes = 0;
    for (key, value) in meta.annotations.iter().flatten() {
        report.check(&place, key, names::qualified_name(&key.to_lowercase()));
        bytes += key.len() + value.len();
    }
    if bytes > MAX_ANNOTATIONS_BYTES {
        report.too_long(&place, MAX_ANNOTATIONS_BYTES);
    }
}

fn labels(labels: Option<&BTreeMap<String, String>>, path: &Path<'_>, report: &mut Report) {
    for (key, value) in labels.into_iter().flatten() {
        report.check(path, key, names::qualified_name(key));
        report.check(&path.key(key), value, names::label_value(value));
    }
}

fn specification(spec: &PodSpec, path: &Path<'_>, report: &mut Report) {
    if let Some(Excess { field, count, max }) = pod_size::excess(spec) {
        // The other checks take time for each item.
        report.too_many(&path.field(&field), count, max);
        return;
    }
    volume::volumes(spec.volumes.as_deref().unwrap_or_default(), &path.field("volumes"), report);
    container::containers(spec, path, report);
    report.choice(
        &path.field("restartPolicy"),
        spec.restart_policy.as_deref(),
        &["Always", "Never", "OnFailure"],
    );
    if let Some(deadline) = spec.active_deadline_seconds
        && !(1..=i64::from(i32::MAX)).contains(&deadline)
    {
        let detail = "must be between 1 and 2147483647, inclusive";
        report.invalid(&path.field("activeDeadlineSeconds"), &deadline, detail);
    }
    security::pod(spec, path, report);
    dns(spec, path, report);
    host_names(spec, path, report);
    labels(spec.node_selector.as_ref(), &path.field("nodeSelector"), report);
    for (name, value) in [
        ("serviceAccountName", &spec.service_account_name),
        ("priorityClassName", &spec.priority_class_name),
        ("runtimeClassName", &spec.runtime_class_name),
    ] {
        if let Some(value) = value.as_deref().filter(|value| !value.is_empty()) {
            report.check(&path.field(name), value, names::dns_subdomain(value));
        }
    }
    report.choice(
        &path.field("preemptionPolicy"),
        spec.preemption_policy.as_deref(),
        &["Never", "PreemptLowerPriority"],
    );
    if let Some(os) = &spec.os {
        match os.name.as_str() {
            "" => report.required(&path.field("os").field("name"), ""),
            name => report.choice(&path.field("os").field("name"), Some(name), &["linux", "windows"]),
        }
    }
    tolerations(spec.tolerations.as_deref().unwrap_or_default(), &path.field("tolerations"), report);
    resources::requirements(spec.resources.as_ref(), Level::Pod, &path.field("resources"), report);
    for (name, quantity) in spec.overhead.iter().flatten() {
        if let Some(problem) = resources::quantity_error(&quantity.0) {
            report.invalid(&path.field("overhead").key(name), &quantity.0, problem);
        }
    }
    for (index, gate) in spec.readiness_gates.iter().flatten().enumerate() {
        let list = path.field("readinessGates");
        let item = list.index(index);
        report.check(
            &item.field("conditionType"),
            &gate.condition_type,
            names::qualified_name(&gate.condition_type),
        );
    }
    if spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty()) {
        report
            .forbidden(&path.field("nodeName"), "cannot be set until all schedulingGates have been cleared");
    }
}

fn host_names(spec: &PodSpec, path: &Path<'_>, report: &mut Report) {
    for (name, value) in [("hostname", &spec.hostname), ("subdomain", &spec.subdomain)] {
        if let Some(value) = value.as_deref().filter(|value| !value.is_empty()) {
            report.check(&path.field(name), value, names::dns_label(value));
        }
    }
    if let Some(name) = spec.hostname_override.as_deref() {
        let place = path.field("hostnameOverride");
        if name.len() > 64 {
            report.too_long(&place, 64);
        } else {
            report.check(&place, name, names::dns_subdomain(name));
        }
        if spec.host_network == Some(true) {
            report.forbidden(&place, "may not be specified when hostNetwork is true");
        }
        if spec.set_hostname_as_fqdn == Some(true) {
            report.forbidden(&place, "may not be specified when setHostnameAsFQDN is true");
        }
    }
    for (index, HostAlias { hostnames, ip }) in spec.host_aliases.iter().flatten().enumerate() {
        let list = path.field("hostAliases");
        let item = list.index(index);
        report.check(&item.field("ip"), ip, names::ip_address(ip));
        for (number, name) in hostnames.iter().flatten().enumerate() {
            report.check(&item.field("hostnames").index(number), name, names::dns_subdomain(name));
        }
    }
}

fn dns(spec: &PodSpec, path: &Path<'_>, report: &mut Report) {
    let policy = spec.dns_policy.as_deref();
    let choices = &["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"];
    report.choice(&path.field("dnsPolicy"), policy, choices);
    let place = path.field("dnsConfig");
    let nameservers = spec.dns_config.as_ref().and_then(|config| config.nameservers.as_ref());
    if policy == Some("None") {
        if spec.dns_config.is_none() {
            report.required(&place, "must provide `dnsConfig` when `dnsPolicy` is None");
        } else if nameservers.is_none_or(Vec::is_empty) {
            report.required(
                &place.field("nameservers"),
                "must provide at least one DNS nameserver when `dnsPolicy` is None",
            );
        }
    }
    if let Some(config) = &spec.dns_config {
        dns_config(config, &place, report);
    }
}

fn dns_config(config: &PodDNSConfig, path: &Path<'_>, report: &mut Report) {
    const MAX_NAMESERVERS: usize = 3;
    const MAX_SEARCHES: usize = 32;
    const MAX_SEARCH_BYTES: usize = 2048;
    let place = path.field("nameservers");
    let nameservers = config.nameservers.as_deref().unwrap_or_default();
    if nameservers.len() > MAX_NAMESERVERS {
        report.too_many(&place, nameservers.len(), MAX_NAMESERVERS);
    }
    for (index, server) in nameservers.iter().enumerate() {
        report.check(&place.index(index), server, names::ip_address(server));
    }
    let place = path.field("searches");
    let searches = config.searches.as_deref().unwrap_or_default();
    if searches.len() > MAX_SEARCHES {
        report.too_many(&place, searches.len(), MAX_SEARCHES);
    }
    if searches.join(" ").len() > MAX_SEARCH_BYTES {
        report.too_long(&place, MAX_SEARCH_BYTES);
    }
    for (index, search) in searches.iter().enumerate() {
        // Underscores and a final dot occur in search lists, and a lone dot disables them.
        let name = search.strip_suffix('.').unwrap_or(search).replace('_', "x");
        if search != "." {
            report.check(&place.index(index), search, names::dns_subdomain(&name));
        }
    }
    for (index, option) in config.options.iter().flatten().enumerate() {
        if option.name.as_deref().unwrap_or_default().is_empty() {
            report.required(&path.field("options").index(index), "must not be empty");
        }
    }
}

fn tolerations(tolerations: &[Toleration], path: &Path<'_>, report: &mut Report) {
    for (index, toleration) in tolerations.iter().enumerate() {
        let item = path.index(index);
        let key = toleration.key.as_deref().unwrap_or_default();
        let value = toleration.value.as_deref().unwrap_or_default();
        let operator = toleration.operator.as_deref().unwrap_or_default();
        let effect = toleration.effect.as_deref();
        if !key.is_empty() {
            report.check(&item.field("key"), key, names::qualified_name(key));
        } else if operator != "Exists" {
            report.invalid(
                &item.field("operator"),
                &operator,
                "operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
            );
        }
        if toleration.toleration_seconds.is_some() && effect != Some("NoExecute") {
            report.invalid(
                &item.field("effect"),
                &effect.unwrap_or_default(),
                "effect must be 'NoExecute' when `tolerationSeconds` is set",
            );
        }
        match operator {
            "" | "Equal" => report.check(&item.field("operator"), value, names::label_value(value)),
            "Exists" if !value.is_empty() => {
                report.invalid(
                    &item.field("operator"),
                    &value,
                    "value must be empty when `operator` is 'Exists'",
                );
            }
            "Exists" | "Lt" | "Gt" => {}
            other => report.unsupported(&item.field("operator"), other, &["Equal", "Exists", "Gt", "Lt"]),
        }
        report.choice(&item.field("effect"), effect, &["NoExecute", "NoSchedule", "PreferNoSchedule"]);
    }
}
