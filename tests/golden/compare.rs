//! Compares one pod's calls and statuses with the recorded ones.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::forms::{differences, grouped};

/// One request in the common form.
#[derive(Debug, Clone)]
pub struct Step {
    pub method: String,
    pub request: Value,
    pub failed: bool,
}

impl Step {
    fn number(&self) -> u64 {
        match self.method.as_str() {
            "RunPodSandbox" | "CreateContainer" => {
                self.request["config"]["metadata"]["attempt"].as_u64().unwrap_or(0)
            }
            // `<container NAME/ATTEMPT>`
            _ => self
                .target()
                .trim_end_matches('>')
                .rsplit_once('/')
                .and_then(|(_, attempt)| attempt.parse().ok())
                .unwrap_or(0),
        }
    }

    fn target(&self) -> &str {
        let field = if self.method == "StopPodSandbox" { "pod_sandbox_id" } else { "container_id" };
        self.request[field].as_str().unwrap_or("")
    }

    /// The container's name.
    fn container(&self) -> String {
        if self.method == "CreateContainer" {
            return self.request["config"]["metadata"]["name"].as_str().unwrap_or("").to_owned();
        }
        let name = self.target().trim_start_matches("<container ");
        name.split('/').next().unwrap_or("").to_owned()
    }

    fn line(&self) -> String {
        match self.method.as_str() {
            "RunPodSandbox" => format!("RunPodSandbox {}", self.number()),
            "CreateContainer" => format!("CreateContainer {}/{}", self.container(), self.number()),
            _ => format!("{} {}", self.method, self.target()),
        }
    }

    /// The request without the attempt of its container.
    fn of_any_attempt(&self) -> Value {
        let mut request = self.request.clone();
        if request.get("container_id").is_some() {
            request["container_id"] = self.container().into();
        }
        request
    }
}

/// The differences of a pod's requests.
pub fn compare_calls(recorded: &[Step], seen: &[Step]) -> Vec<String> {
    let mut found = Vec::new();
    let seen = without_refused(recorded, seen);
    compare_starts(recorded, &seen, &mut found);
    compare_restarts(recorded, &seen, &mut found);
    compare_stops(recorded, &seen, &mut found);
    compare_execs(recorded, &seen, &mut found);
    // How often things are removed depends on timing; other changes have to be recorded ones.
    let known: BTreeSet<&str> = recorded.iter().map(|step| step.method.as_str()).collect();
    for step in &seen {
        let method = step.method.as_str();
        if !known.contains(method) && !method.starts_with("Remove") && !starts(step) && !stops(step) {
            found.push(format!("not recorded: {}", step.line()));
        }
    }
    found
}

/// What was seen without the starts that the runtime answered with an error, unless it did so in
/// the recording: a busy one can fail at any of them, and each is rightly tried again.
fn without_refused(recorded: &[Step], seen: &[Step]) -> Vec<Step> {
    let refused: BTreeSet<String> =
        recorded.iter().filter(|step| starts(step) && step.failed).map(Step::line).collect();
    let left_out = |step: &Step| starts(step) && step.failed && !refused.contains(&step.line());
    seen.iter().filter(|step| !left_out(step)).cloned().collect()
}

fn starts(step: &Step) -> bool {
    ["RunPodSandbox", "CreateContainer", "StartContainer"].contains(&step.method.as_str())
}

fn stops(step: &Step) -> bool {
    ["StopContainer", "StopPodSandbox"].contains(&step.method.as_str())
}

fn compare_step(recorded: &Step, seen: &Step, found: &mut Vec<String>) {
    differences(&recorded.line(), &recorded.request, &seen.request, found);
    if recorded.failed != seen.failed {
        found.push(format!(
            "{}: recorded failed: {}, seen {}",
            recorded.line(),
            recorded.failed,
            seen.failed
        ));
    }
}

/// The first start of everything: the same requests in the same order. Sandboxes are never
/// made twice.
fn compare_starts(recorded: &[Step], seen: &[Step], found: &mut Vec<String>) {
    let first = |steps: &[Step]| -> Vec<Step> {
        let is_first = |step: &&Step| starts(step) && (step.method == "RunPodSandbox" || step.number() == 0);
        steps.iter().filter(is_first).cloned().collect()
    };
    let (recorded, seen) = (first(recorded), first(seen));
    let lines = |steps: &[Step]| steps.iter().map(Step::line).collect::<Vec<_>>();
    if lines(&recorded) != lines(&seen) {
        found.push(format!("starts: recorded {:?}, seen {:?}", lines(&recorded), lines(&seen)));
        return;
    }
    for (recorded, seen) in recorded.iter().zip(&seen) {
        compare_step(recorded, seen, found);
    }
}

/// Later attempts: as far as both go, per container.
fn compare_restarts(recorded: &[Step], seen: &[Step], found: &mut Vec<String>) {
    let later = |steps: &[Step]| -> Vec<Step> {
        let is_later = |step: &&Step| starts(step) && step.method != "RunPodSandbox" && step.number() > 0;
        steps.iter().filter(is_later).cloned().collect()
    };
    let (recorded, seen) = (later(recorded), later(seen));
    let (recorded, seen) = (grouped(&recorded, Step::container), grouped(&seen, Step::container));
    if recorded.keys().ne(seen.keys()) {
        let (recorded, seen): (Vec<_>, Vec<_>) = (recorded.keys().collect(), seen.keys().collect());
        found.push(format!("restarted: recorded {recorded:?}, seen {seen:?}"));
        return;
    }
    for (recorded, seen) in recorded.values().zip(seen.values()) {
        for (recorded, seen) in recorded.iter().zip(seen) {
            if recorded.line() == seen.line() {
                compare_step(recorded, seen, found);
            } else {
                found.push(format!("restarts: recorded {}, seen {}", recorded.line(), seen.line()));
            }
        }
    }
}

/// The first StopContainer of each container (they go on side by side, so their order means
/// nothing), and that the sandbox is stopped after them.
fn compare_stops(recorded: &[Step], seen: &[Step], found: &mut Vec<String>) {
    let first = |steps: &[Step]| -> BTreeMap<String, Value> {
        let mut first = BTreeMap::new();
        for step in steps.iter().filter(|step| stops(step)) {
            first.entry(format!("{} {}", step.method, step.container())).or_insert(step.of_any_attempt());
        }
        first
    };
    let (a, b) = (first(recorded), first(seen));
    if a.keys().ne(b.keys()) {
        let (a, b): (Vec<_>, Vec<_>) = (a.keys().collect(), b.keys().collect());
        found.push(format!("stops: recorded {a:?}, seen {b:?}"));
    }
    for (key, recorded) in &a {
        if let Some(seen) = b.get(key) {
            differences(key, recorded, seen, found);
        }
    }
    let containers_first = |steps: &[Step]| {
        let sandbox = steps.iter().position(|step| step.method == "StopPodSandbox");
        let container = steps.iter().rposition(|step| step.method == "StopContainer");
        sandbox.zip(container).is_none_or(|(sandbox, container)| container < sandbox)
    };
    if containers_first(recorded) != containers_first(seen) {
        found.push("stops: a container was stopped after its sandbox".to_owned());
    }
}

/// What is run inside containers: the same commands, however often.
fn compare_execs(recorded: &[Step], seen: &[Step], found: &mut Vec<String>) {
    let commands = |steps: &[Step]| -> BTreeSet<String> {
        let execs = steps.iter().filter(|step| step.method == "ExecSync");
        execs.map(|step| step.of_any_attempt().to_string()).collect()
    };
    let (recorded, seen) = (commands(recorded), commands(seen));
    for command in recorded.symmetric_difference(&seen) {
        let side = if recorded.contains(command) { "missing" } else { "not recorded" };
        found.push(format!("ExecSync {side}: {command}"));
    }
}

/// The differences of a pod's status to the recorded one. The recording is one moment: with
/// restarts, that moment must be among those seen; without, the last one counts.
pub fn compare_status(recorded: &Value, seen: &[Value]) -> Vec<String> {
    let mut best: Option<Vec<String>> = None;
    let moments = if restarts(recorded) { seen } else { seen.split_at(seen.len().saturating_sub(1)).1 };
    for seen in moments {
        let mut found = Vec::new();
        differences("", recorded, seen, &mut found);
        if best.as_ref().is_none_or(|best| found.len() <= best.len()) {
            best = Some(found);
        }
    }
    best.unwrap_or_else(|| vec!["the pod was never seen".to_owned()])
}

fn restarts(pod: &Value) -> bool {
    let status = &pod["status"];
    ["containerStatuses", "initContainerStatuses"].iter().any(|list| {
        let list = status[list].as_array().into_iter().flatten();
        list.into_iter().any(|container| container["restartCount"].as_u64().is_some_and(|count| count > 0))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn step(method: &str, request: Value) -> Step {
        Step { method: method.to_owned(), request, failed: false }
    }

    fn create(name: &str, attempt: u64, extra: &str) -> Step {
        let config = json!({"metadata": {"name": name, "attempt": attempt}, "log_path": extra});
        step("CreateContainer", json!({"config": config}))
    }

    fn stop(name: &str, attempt: u64) -> Step {
        step(
            "StopContainer",
            json!({"container_id": format!("<container {name}/{attempt}>"), "timeout": "2"}),
        )
    }

    fn stop_sandbox() -> Step {
        step("StopPodSandbox", json!({"pod_sandbox_id": "<sandbox 0>"}))
    }

    #[test]
    fn timing_dependent_fields_are_ignored() {
        let recorded =
            [create("a", 0, ""), create("a", 1, ""), create("a", 2, ""), stop("a", 2), stop_sandbox()];
        let seen = [
            create("a", 0, ""),
            create("a", 1, ""),
            stop("a", 1),
            stop_sandbox(),
            stop_sandbox(),
            step("RemoveContainer", json!({"container_id": "<container a/0>"})),
        ];
        assert_eq!(compare_calls(&recorded, &seen), Vec::<String>::new());
    }

    #[test]
    fn relevant_changes_are_differences() {
        let recorded = [create("a", 0, ""), create("a", 1, ""), stop("a", 1), stop_sandbox()];
        for seen in [
            vec![create("a", 0, "x"), create("a", 1, ""), stop("a", 1), stop_sandbox()],
            vec![create("a", 0, ""), create("a", 1, "x"), stop("a", 1), stop_sandbox()],
            vec![create("a", 0, ""), stop("a", 0), stop_sandbox()],
            vec![create("a", 0, ""), create("a", 1, ""), stop_sandbox()],
            vec![create("a", 0, ""), create("a", 1, ""), stop_sandbox(), stop("a", 1)],
            vec![create("b", 0, ""), create("a", 1, ""), stop("a", 1), stop_sandbox()],
            vec![
                create("a", 0, ""),
                create("a", 1, ""),
                step("UpdateContainerResources", json!({"container_id": "<container a/0>"})),
                stop("a", 1),
                stop_sandbox(),
            ],
        ] {
            assert_ne!(compare_calls(&recorded, &seen), Vec::<String>::new(), "{seen:?}");
        }
    }

    #[test]
    fn refused_start_may_be_retried() {
        let failed = |step: Step| Step { failed: true, ..step };
        let sandbox = || step("RunPodSandbox", json!({"config": {"metadata": {"name": "p"}}}));
        let start = || step("StartContainer", json!({"container_id": "<container a/0>"}));
        let recorded = [sandbox(), create("a", 0, ""), start()];
        let seen = [failed(sandbox()), sandbox(), failed(create("a", 0, "")), create("a", 0, ""), start()];
        assert_eq!(compare_calls(&recorded, &seen), Vec::<String>::new());
        // But it has to succeed in the end, once, and one that was recorded as refused counts.
        for seen in [
            vec![failed(sandbox()), create("a", 0, ""), start()],
            vec![sandbox(), sandbox(), create("a", 0, ""), start()],
            vec![sandbox(), create("a", 0, ""), failed(start())],
        ] {
            assert_ne!(compare_calls(&recorded, &seen), Vec::<String>::new(), "{seen:?}");
        }
        let recorded = [sandbox(), create("a", 0, ""), failed(start())];
        assert_eq!(compare_calls(&recorded, &recorded), Vec::<String>::new());
        assert_ne!(compare_calls(&recorded, &[sandbox(), create("a", 0, ""), start()]), Vec::<String>::new());
    }

    #[test]
    fn restarting_pod_matches_one_recorded_status() {
        let pod = |count: u64| json!({"status": {"containerStatuses": [{"restartCount": count}]}});
        assert!(compare_status(&pod(2), &[pod(1), pod(2), pod(3)]).is_empty());
        assert!(!compare_status(&pod(2), &[pod(1), pod(3)]).is_empty());
        assert!(!compare_status(&pod(0), &[pod(0), pod(1)]).is_empty());
        assert!(!compare_status(&pod(0), &[]).is_empty());
    }
}
