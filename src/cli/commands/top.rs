//! `coracle top`: the usage of pods and containers, once or periodically.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::Duration;

use serde_json::Value;

use crate::cli::exit::Exit;
use crate::cli::local::TopOptions;
use crate::cli::table::{Cell, Color, Table};
use crate::model::pod::{Pod, request};
use crate::model::requests::{Amounts, Overhead, pod_requests};
use crate::server::PodsReply;
use crate::util::stop::StopToken;

use super::client::Client;
use super::console::{Console, size};
use super::error::{CommandError, Outcome};

/// The agent caches the response for a second.
const TARGET: &str = "/stats/summary?only_cpu_and_memory=true";

/// The time between two tables.
const PERIOD: Duration = Duration::from_secs(2);

/// Moves the cursor to the upper left corner and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

pub(super) fn run(client: &Client, console: &mut Console<'_>, options: &TopOptions) -> Outcome {
    let once = options.once || !std::io::stdout().is_terminal();
    loop {
        let mut summary: Value = client.get(TARGET)?;
        if let (Some(wanted), Some(pods)) = (&options.namespace, summary["pods"].as_array_mut()) {
            pods.retain(|pod| pod["podRef"]["namespace"] == **wanted);
        }
        if !console.document(options.output, &summary)? {
            if !once {
                write!(console.out, "{CLEAR}")?;
            }
            let pods: PodsReply = client.get("/v1/pods")?;
            print(console, &summary, &ResourceRequests::from_pods(pods))?;
        }
        if once {
            return Ok(Exit::Success);
        }
        let _ = StopToken::never().wait(PERIOD);
    }
}

/// The requests of pods and containers: CPU in thousandths of a core, memory in bytes.
#[derive(Debug, Default)]
struct ResourceRequests(BTreeMap<(String, String), (u64, u64)>);

impl ResourceRequests {
    fn from_pods(pods: PodsReply) -> ResourceRequests {
        let mut all = BTreeMap::new();
        for view in pods.pods {
            let uid = view.uid().to_owned();
            let pod = Pod::from(view.pod);
            let unsigned = |number: i64| u64::try_from(number).unwrap_or(0);
            let amounts = |amounts: &Amounts| {
                let amount = |name: &str| amounts.get(name).copied().unwrap_or_default();
                (unsigned(amount("cpu").milli()), unsigned(amount("memory").units()))
            };
            for container in pod.all_containers() {
                let cpu = request(container, "cpu").map_or(0, |amount| unsigned(amount.milli()));
                let memory = request(container, "memory").map_or(0, |amount| unsigned(amount.units()));
                all.insert((uid.clone(), container.name.clone()), (cpu, memory));
            }
            all.insert((uid, String::new()), amounts(&pod_requests(&pod, Overhead::Included)));
        }
        ResourceRequests(all)
    }

    /// Of a container, or of the pod if `container` is empty; zero: it requests nothing.
    fn get(&self, uid: &str, container: &str) -> (u64, u64) {
        self.0.get(&(uid.to_owned(), container.to_owned())).copied().unwrap_or_default()
    }
}

/// A cell with the request if more than it is used.
fn usage_cell(text: String, used: Option<u64>, request: u64, show: impl Fn(u64) -> String) -> Cell {
    match used {
        Some(used) if request > 0 && used > request => {
            Cell::colored(format!("{text} > {}", show(request)), Some(Color::Yellow))
        }
        _ => Cell::from(text),
    }
}

fn print(
    console: &mut Console<'_>,
    summary: &Value,
    requests: &ResourceRequests,
) -> Result<(), CommandError> {
    let node = &summary["node"];
    let used = number(node, "memory", "workingSetBytes").unwrap_or(0);
    let left = number(node, "memory", "availableBytes").unwrap_or(0);
    console.line(
        0,
        &format!(
            "{}: CPU {}, memory {} of {}",
            text(&node["nodeName"]),
            cpu(node),
            size(used),
            size(used + left)
        ),
    )?;
    writeln!(console.out)?;
    console.table(
        &mut Table::new(&["NAMESPACE", "POD", "CONTAINER", "CPU", "MEMORY"]),
        &rows(summary, requests),
    )?;
    Ok(())
}

/// The busiest pod first; its containers below it.
fn rows(summary: &Value, requests: &ResourceRequests) -> Vec<Vec<Cell>> {
    let mut pods: Vec<&Value> = summary["pods"].as_array().into_iter().flatten().collect();
    let rate = |stats: &Value| number(stats, "cpu", "usageNanoCores").unwrap_or(0);
    let name = |pod: &Value| (text(&pod["podRef"]["namespace"]), text(&pod["podRef"]["name"]));
    pods.sort_by_cached_key(|pod| (Reverse(rate(pod)), name(pod)));
    let mut rows = Vec::new();
    for pod in pods {
        let (namespace, name) = name(pod);
        let uid = text(&pod["podRef"]["uid"]);
        let row = |container: Cell, key: &str, stats: &Value| {
            let (cpu_request, memory_request) = requests.get(&uid, key);
            let used = number(stats, "cpu", "usageNanoCores").map(|nanocores| nanocores.div_ceil(1_000_000));
            vec![
                Cell::from(namespace.as_str()),
                Cell::from(name.as_str()),
                container,
                usage_cell(cpu(stats), used, cpu_request, |milli| format!("{milli}m")),
                usage_cell(memory(stats), number(stats, "memory", "workingSetBytes"), memory_request, size),
            ]
        };
        rows.push(row(Cell::colored("(all)", Some(Color::Dim)), "", pod));
        let mut containers: Vec<&Value> = pod["containers"].as_array().into_iter().flatten().collect();
        containers.sort_by_cached_key(|container| (Reverse(rate(container)), text(&container["name"])));
        rows.extend(containers.into_iter().map(|container| {
            let name = text(&container["name"]);
            row(Cell::from(name.as_str()), &name, container)
        }));
    }
    rows
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn number(stats: &Value, part: &str, field: &str) -> Option<u64> {
    stats.get(part)?.get(field)?.as_u64()
}

/// In thousandths of a processor, as everywhere in Kubernetes.
fn cpu(stats: &Value) -> String {
    match number(stats, "cpu", "usageNanoCores") {
        Some(nanocores) => format!("{}m", nanocores.div_ceil(1_000_000)),
        None => "-".to_owned(),
    }
}

fn memory(stats: &Value) -> String {
    number(stats, "memory", "workingSetBytes").map_or_else(|| "-".to_owned(), size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::render;
    use expect_test::expect;
    use serde_json::json;

    #[test]
    fn busiest_container_comes_first_and_use_above_the_request_is_marked() {
        let container = |name: &str, rate: Option<u64>| {
            let mut cpu = json!({"usageCoreNanoSeconds": 1});
            if let Some(rate) = rate {
                cpu["usageNanoCores"] = json!(rate);
            }
            json!({"name": name, "cpu": cpu, "memory": {"workingSetBytes": 2048}})
        };
        let pod = |name: &str, rate: u64, containers: Value| {
            json!({
                "podRef": {"namespace": "default", "name": name, "uid": name}, "containers": containers,
                "cpu": {"usageNanoCores": rate}, "memory": {},
            })
        };
        let summary = json!({"node": {}, "pods": [
            pod("idle", 0, json!([container("a", None)])),
            pod("busy", 1_500_000_001, json!([container("b", Some(1)), container("c", Some(1_500_000_000))])),
        ]});
        let requests = ResourceRequests(BTreeMap::from([
            (("busy".to_owned(), "c".to_owned()), (100, 1024)),
            (("busy".to_owned(), "b".to_owned()), (1, 4096)),
            (("busy".to_owned(), String::new()), (101, 5120)),
        ]));
        expect![[r#"
            default | busy | (all) [Dim] | 1501m > 101m [Yellow] | -
            default | busy | c | 1500m > 100m [Yellow] | 2.0 KiB > 1.0 KiB [Yellow]
            default | busy | b | 1m | 2.0 KiB
            default | idle | (all) [Dim] | 0m | -
            default | idle | a | - | 2.0 KiB
        "#]]
        .assert_eq(&render(&rows(&summary, &requests)));
        assert!(rows(&json!({}), &ResourceRequests::default()).is_empty());
    }
}
