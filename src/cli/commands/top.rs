//! `coracle top`: the usage of pods and containers, once or periodically.

use std::cmp::Reverse;
use std::io::IsTerminal;
use std::time::Duration;

use serde_json::Value;

use crate::cli::exit::Exit;
use crate::cli::local::TopOptions;
use crate::cli::table::{Cell, Color, Table};
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
            print(console, &summary)?;
        }
        if once {
            return Ok(Exit::Success);
        }
        let _ = StopToken::never().wait(PERIOD);
    }
}

fn print(console: &mut Console<'_>, summary: &Value) -> Result<(), CommandError> {
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
    console.table(&mut Table::new(&["NAMESPACE", "POD", "CONTAINER", "CPU", "MEMORY"]), &rows(summary))?;
    Ok(())
}

/// The busiest pod first; its containers below it.
fn rows(summary: &Value) -> Vec<Vec<Cell>> {
    let mut pods: Vec<&Value> = summary["pods"].as_array().into_iter().flatten().collect();
    let rate = |of: &Value| number(of, "cpu", "usageNanoCores").unwrap_or(0);
    let name = |pod: &Value| (text(&pod["podRef"]["namespace"]), text(&pod["podRef"]["name"]));
    pods.sort_by_cached_key(|pod| (Reverse(rate(pod)), name(pod)));
    let mut rows = Vec::new();
    for pod in pods {
        let (namespace, name) = name(pod);
        let row = |container: Cell, of: &Value| {
            vec![
                Cell::from(namespace.as_str()),
                Cell::from(name.as_str()),
                container,
                Cell::from(cpu(of)),
                Cell::from(memory(of)),
            ]
        };
        rows.push(row(Cell::colored("(all)", Some(Color::Dim)), pod));
        let mut containers: Vec<&Value> = pod["containers"].as_array().into_iter().flatten().collect();
        containers.sort_by_cached_key(|container| (Reverse(rate(container)), text(&container["name"])));
        rows.extend(containers.into_iter().map(|one| row(Cell::from(text(&one["name"])), one)));
    }
    rows
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn number(of: &Value, part: &str, field: &str) -> Option<u64> {
    of.get(part)?.get(field)?.as_u64()
}

/// In thousandths of a processor, as everywhere in Kubernetes.
fn cpu(of: &Value) -> String {
    match number(of, "cpu", "usageNanoCores") {
        Some(nanocores) => format!("{}m", nanocores.div_ceil(1_000_000)),
        None => "-".to_owned(),
    }
}

fn memory(of: &Value) -> String {
    number(of, "memory", "workingSetBytes").map_or_else(|| "-".to_owned(), size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn busiest_container_comes_first() {
        let container = |name: &str, rate: Option<u64>| {
            let mut cpu = json!({"usageCoreNanoSeconds": 1});
            if let Some(rate) = rate {
                cpu["usageNanoCores"] = json!(rate);
            }
            json!({"name": name, "cpu": cpu, "memory": {"workingSetBytes": 2048}})
        };
        let pod = |name: &str, rate: u64, containers: Value| {
            json!({
                "podRef": {"namespace": "default", "name": name}, "containers": containers,
                "cpu": {"usageNanoCores": rate}, "memory": {},
            })
        };
        let summary = json!({"node": {}, "pods": [
            pod("idle", 0, json!([container("a", None)])),
            pod("busy", 1_500_000_001, json!([container("b", Some(1)), container("c", Some(1_500_000_000))])),
        ]});
        let lines: Vec<String> = rows(&summary)
            .into_iter()
            .map(|row| row.into_iter().map(|cell| cell.text).collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(
            lines,
            [
                "default busy (all) 1501m -",
                "default busy c 1500m 2.0 KiB",
                "default busy b 1m 2.0 KiB",
                "default idle (all) 0m -",
                "default idle a - 2.0 KiB",
            ]
        );
        assert!(rows(&json!({})).is_empty());
    }
}
