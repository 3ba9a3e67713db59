//! `coracle devices`: devices of device plugins, devices of resource claims, and plugins.

use std::io;

use jiff::Timestamp;

use crate::cli::exit::Exit;
use crate::cli::local::Output;
use crate::cli::table::{Cell, Color, Table};
use crate::server::{ClaimRow, DeviceRow, DevicesReply, PluginRow};

use super::age;
use super::client::Client;
use super::console::Console;
use super::error::{Outcome, print_stderr};

pub(super) fn run(client: &Client, console: &mut Console<'_>, output: Output) -> Outcome {
    let reply: DevicesReply = client.get("/v1/devices")?;
    if !console.document(output, &reply)? {
        print(console, &reply)?;
    }
    Ok(Exit::Success)
}

fn print(console: &mut Console<'_>, reply: &DevicesReply) -> io::Result<()> {
    let mut tables = 0;
    let mut table = |console: &mut Console<'_>, headers: &[&'static str], rows: Vec<Vec<Cell>>| {
        if rows.is_empty() {
            return Ok(());
        }
        if tables > 0 {
            writeln!(console.out)?;
        }
        tables += 1;
        console.table(&mut Table::new(headers), &rows)
    };
    let devices = reply.devices.iter().map(device_row).collect();
    table(console, &["RESOURCE", "DEVICE", "HEALTH", "NUMA", "USED BY"], devices)?;
    let claims = reply.claims.iter().map(claim_row).collect();
    table(console, &["CLAIM", "DRIVER", "POOL", "DEVICE", "STATE", "USED BY"], claims)?;
    let now = console.now;
    let plugins = reply.plugins.iter().map(|plugin| plugin_row(plugin, now)).collect();
    table(console, &["PLUGIN", "KIND", "SOCKET", "STATE", "SINCE"], plugins)?;
    if tables == 0 {
        print_stderr("there are no devices, no resource claims and no plugins");
    }
    console.omitted(reply.omitted)
}

/// The devices and claims of a pod; nothing for a pod without.
pub(super) fn describe(
    console: &mut Console<'_>,
    devices: &[DeviceRow],
    claims: &[ClaimRow],
) -> io::Result<()> {
    if !devices.is_empty() {
        console.field(0, "Devices", "")?;
    }
    for device in devices {
        let numa = match device.numa.as_slice() {
            [] => String::new(),
            [node] => format!(", NUMA node {node}"),
            nodes => format!(", NUMA nodes {}", joined(nodes.iter().map(ToString::to_string))),
        };
        let containers = device.users.iter().filter_map(|user| user.rsplit('/').next().map(str::to_owned));
        let text = format!("{}, {}{numa}, in {}", device.device, device.health, joined(containers));
        console.colored_field(1, &device.resource, &text, health_color(device))?;
    }
    if !claims.is_empty() {
        console.field(0, "Resource Claims", "")?;
    }
    for claim in claims {
        let (state, color) = claim_state(claim);
        let device = match claim.device.as_str() {
            "" => format!("no device of {}", or_dash(&claim.driver)),
            device => format!("{device} of {} in {}", claim.driver, claim.pool),
        };
        console.colored_field(1, &claim.claim, &format!("{device}, {state}"), Some(color))?;
    }
    Ok(())
}

fn joined(words: impl Iterator<Item = String>) -> String {
    let words: Vec<String> = words.collect();
    if words.is_empty() { "-".to_owned() } else { words.join(",") }
}

fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

fn health_color(device: &DeviceRow) -> Option<Color> {
    Some(match device.health.as_str() {
        "Healthy" => Color::Green,
        "Unhealthy" => Color::Red,
        _ => Color::Yellow,
    })
}

pub(super) fn device_row(device: &DeviceRow) -> Vec<Cell> {
    vec![
        Cell::from(device.resource.as_str()),
        Cell::from(device.device.as_str()),
        Cell::colored(device.health.as_str(), health_color(device)),
        Cell::from(joined(device.numa.iter().map(ToString::to_string))),
        Cell::from(joined(device.users.iter().cloned())),
    ]
}

/// Whether a claim can be used.
fn claim_state(claim: &ClaimRow) -> (&'static str, Color) {
    if claim.prepared { ("prepared", Color::Green) } else { ("not prepared", Color::Yellow) }
}

pub(super) fn claim_row(claim: &ClaimRow) -> Vec<Cell> {
    let (state, color) = claim_state(claim);
    vec![
        Cell::from(format!("{}/{}", claim.namespace, claim.claim)),
        Cell::from(or_dash(&claim.driver)),
        Cell::from(or_dash(&claim.pool)),
        Cell::from(or_dash(&claim.device)),
        Cell::colored(state, Some(color)),
        Cell::from(joined(claim.pods.iter().cloned())),
    ]
}

pub(super) fn plugin_row(plugin: &PluginRow, now: Timestamp) -> Vec<Cell> {
    let (state, color) = match (plugin.registered, &plugin.error) {
        (true, _) => ("registered".to_owned(), Color::Green),
        (false, Some(error)) => (format!("not registered: {error}"), Color::Red),
        (false, None) => ("being registered".to_owned(), Color::Yellow),
    };
    vec![
        Cell::from(or_dash(&plugin.name)),
        Cell::from(or_dash(&plugin.kind)),
        Cell::from(or_dash(&plugin.socket)),
        Cell::colored(state, Some(color)),
        Cell::from(age::since_or_unknown(plugin.since, now)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::Paint;
    use expect_test::expect;

    fn printed(reply: &DevicesReply) -> String {
        let mut out = Vec::new();
        let now = "2026-01-01T00:03:20Z".parse().unwrap();
        print(&mut Console { out: &mut out, paint: Paint::new(false), now }, reply).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn devices_claims_and_plugins_have_a_table_each() {
        let device = |name: &str, health: &str, users: &[&str]| DeviceRow {
            resource: "example.com/camera".into(),
            device: name.into(),
            health: health.into(),
            numa: if users.is_empty() { Vec::new() } else { vec![0, 1] },
            users: users.iter().map(|user| (*user).to_owned()).collect(),
        };
        let reply = DevicesReply {
            devices: vec![
                device("c1", "Healthy", &["default/web/main"]),
                device("c2\u{1b}[31m\n", "Unhealthy", &[]),
            ],
            claims: vec![ClaimRow {
                namespace: "default".into(),
                claim: "gpu".into(),
                driver: "gpu.example.com".into(),
                pool: "node1".into(),
                device: "gpu-0".into(),
                prepared: true,
                pods: vec!["web".into()],
            }],
            plugins: vec![
                PluginRow {
                    name: "gpu.example.com".into(),
                    kind: "DRAPlugin".into(),
                    socket: "/p/gpu.sock".into(),
                    registered: true,
                    since: Some("2026-01-01T00:00:00Z".parse().unwrap()),
                    error: None,
                },
                PluginRow {
                    socket: "/p/x.sock".into(),
                    error: Some("refused".into()),
                    ..PluginRow::default()
                },
            ],
            omitted: 3,
        };
        expect![[r#"
            RESOURCE             DEVICE           HEALTH      NUMA   USED BY
            example.com/camera   c1               Healthy     0,1    default/web/main
            example.com/camera   c2\u{1b}[31m\n   Unhealthy   -      -

            CLAIM         DRIVER            POOL    DEVICE   STATE      USED BY
            default/gpu   gpu.example.com   node1   gpu-0    prepared   web

            PLUGIN            KIND        SOCKET        STATE                     SINCE
            gpu.example.com   DRAPlugin   /p/gpu.sock   registered                3m20s
            -                 -           /p/x.sock     not registered: refused   <unknown>
            ... and 3 more
        "#]]
        .assert_eq(&printed(&reply));
        assert_eq!(printed(&DevicesReply::default()), "");
    }
}
