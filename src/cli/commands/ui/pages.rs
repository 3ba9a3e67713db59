//! The content of the pages, from the documents of the local API.

use std::sync::Mutex;

use jiff::Timestamp;
use serde_json::Value;

use crate::cli::exit::Exit;
use crate::cli::table::{Cell, Color, Paint};
use crate::images::{ArchiveReport, ArchiveSetReport};
use crate::kube::events::RecordedEvent;
use crate::model::api::{ContainerState, ContainerStatus, PodSpec, PodStatus};
use crate::offline::Report;
use crate::server::{
    ClaimRow, DeviceRow, DevicesReply, ImageRow, NodeReport, PodDescription, PodView, PodsReply, VolumesReply,
};
use crate::util::lock::LockExt;

use super::super::client::{Client, ReadTimeout, encode};
use super::super::console::Console;
use super::super::error::CommandError;
use super::super::pod_status::{PodSummary, summary};
use super::super::{age, describe, devices, events, images, offline, pods, status, volumes};
use super::curves::Samples;
use super::html::{Html, node_title};

/// The lines and the bytes of a log on its page; the stream has more.
const LOG_LINES: u32 = 500;
const LOG_BYTES: usize = 256 * 1024;
/// The events of a page, the newest.
const MOST_EVENTS: usize = 500;

/// A page before its frame.
#[derive(Debug)]
pub(super) struct Content {
    pub title: String,
    /// The name of the node, if the document of the page has it.
    pub node: Option<String>,
    pub html: Html,
}

impl Content {
    fn new(title: impl Into<String>) -> Content {
        let title = title.into();
        let mut html = Html::default();
        html.title(&title);
        Content { title, node: None, html }
    }
}

/// The status of a page about a failed request to the agent, and its content.
pub(super) fn failure(error: &CommandError) -> (u16, Content) {
    let (status, title) = match error.exit() {
        Exit::NotReachable => (503, "The agent is away"),
        Exit::NotFound => (404, "Not found"),
        _ => (502, "The agent refused the request"),
    };
    let mut content = Content::new(title);
    content.html.raw("<p class=\"problems\">").text(&error.to_string()).raw("</p>\n");
    if status == 503 {
        content.html.paragraph(
            "Containers run on without the agent, but it neither starts nor restarts them. This page tries \
             again by itself. On the node, the agent's log and \"coracle check\" show the cause.",
        );
    }
    (status, content)
}

/// Text that a command prints.
fn printed(
    now: Timestamp,
    print: impl FnOnce(&mut Console<'_>) -> std::io::Result<()>,
) -> Result<String, CommandError> {
    let mut out = Vec::new();
    print(&mut Console { out: &mut out, paint: Paint::plain(), now })?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// The name of the node; `None` if the agent does not respond.
pub(super) fn node_name(client: &Client) -> Option<String> {
    let report: NodeReport = client.get("/v1/status").ok()?;
    Some(report.node)
}

/// Problems, curves, pods, and the state of the node.
pub(super) fn overview(
    client: &Client,
    samples: &Mutex<Samples>,
    now: Timestamp,
) -> Result<Content, CommandError> {
    let report: NodeReport = client.get("/v1/status")?;
    let pods = client.get::<PodsReply>("/v1/pods")?.pods;
    // Without the runtime there may be no numbers; the page has what is there.
    let usage: Option<Value> = client.get("/stats/summary?only_cpu_and_memory=true").ok();
    let cores = usage.and_then(|usage| usage.get("node")?.get("cpu")?.get("usageNanoCores")?.as_f64());
    let cores = cores.map(|nanocores| nanocores / 1e9);
    let mut samples = samples.locked();
    samples.record(&report, cores, now);
    node(&report, &pods, &samples, now)
}

fn node(
    report: &NodeReport,
    pods: &[PodView],
    samples: &Samples,
    now: Timestamp,
) -> Result<Content, CommandError> {
    let mut content = Content::new(node_title(&report.node));
    content.node = Some(report.node.clone());
    let html = &mut content.html;
    let problems = status::problems(report, now);
    let mut lines: Vec<(PodSummary, &PodView)> = pods.iter().map(|view| (summary(view), view)).collect();
    // Those that need an operator first; the order of the others stays.
    lines.sort_by_key(|(line, _)| match line.color() {
        Some(Color::Red) => 0,
        Some(Color::Yellow) => 1,
        _ => 2,
    });
    let is_bad = |line: &PodSummary| matches!(line.color(), Some(Color::Red | Color::Yellow));
    let bad = lines.iter().filter(|(line, _)| is_bad(line)).count();
    if problems.is_empty() && bad == 0 {
        html.raw("<p class=\"ok\">No problems</p>\n");
    } else {
        html.raw("<div class=\"problems\"><h2>Problems</h2><ul>\n");
        for problem in &problems {
            html.raw("<li>").text(problem).raw("</li>\n");
        }
        if bad > 0 {
            html.raw("<li>");
            let text = format!("Pods that do not run as they should: {bad} of {}", pods.len());
            html.link("#pods", &text).raw("</li>\n");
        }
        html.raw("</ul></div>\n");
    }
    if let Some(offline) = &report.offline {
        let is_reachable = !report.problems.iter().any(|problem| problem.starts_with("API server: "));
        let (line, _) = offline::server_line(offline, is_reachable, now);
        html.paragraph(&format!("API server: {line}"));
    }
    samples.draw(html);
    html.raw("<h2 id=\"pods\" tabindex=\"-1\">").text(&format!("Pods ({})", pods.len())).raw("</h2>\n");
    let rows: Vec<Vec<Cell>> = lines.iter().map(|(line, view)| pod_row(line, view, now)).collect();
    html.linked_table(&["Namespace", "Name", "Ready", "Status", "Restarts", "Age"], &rows, 1, &|number| {
        lines.get(number).map(|(_, view)| format!("/pod?uid={}", encode(view.uid())))
    });
    html.heading("State of the node");
    html.preformatted(&printed(now, |console| status::print(console, report, true))?);
    Ok(content)
}

fn pod_row(line: &PodSummary, view: &PodView, now: Timestamp) -> Vec<Cell> {
    vec![
        Cell::from(view.namespace()),
        Cell::from(view.name()),
        Cell::from(format!("{}/{}", line.ready, line.total)),
        Cell::colored(line.status.as_str(), line.color()),
        Cell::from(line.restarts(now)),
        Cell::from(age::since_or_unknown(pods::creation_time(view), now)),
    ]
}

/// The description of the pod with this UID. A name, and the beginning of a UID, select none.
pub(super) fn find(client: &Client, uid: &str) -> Result<PodDescription, CommandError> {
    let described: PodDescription = client.get(&format!("/v1/describe?pod={}", encode(uid)))?;
    if described.view.uid() == uid && !uid.is_empty() {
        return Ok(described);
    }
    Err(CommandError::Rejected { status: 404, text: "there is no pod with this UID on this node".to_owned() })
}

/// One pod.
pub(super) fn pod(client: &Client, uid: &str, now: Timestamp) -> Result<Content, CommandError> {
    let described = find(client, uid)?;
    described_pod(&described, now)
}

fn described_pod(described: &PodDescription, now: Timestamp) -> Result<Content, CommandError> {
    let view = &described.view;
    let (no_spec, no_status) = (PodSpec::default(), PodStatus::default());
    let spec = view.pod.spec.as_ref().unwrap_or(&no_spec);
    let status = view.pod.status.as_ref().unwrap_or(&no_status);
    let mut content = Content::new(format!("Pod {}/{}", view.namespace(), view.name()));
    let html = &mut content.html;
    let line = summary(view);
    html.table(&["Namespace", "Name", "Ready", "Status", "Restarts", "Age"], &[pod_row(&line, view, now)]);
    for text in [&status.message, &view.last_error].into_iter().flatten().filter(|text| !text.is_empty()) {
        html.raw("<p class=\"problems\">").text(text).raw("</p>\n");
    }
    html.heading("Containers");
    containers(html, view.uid(), spec, status, now);
    html.heading("Conditions");
    let conditions = status.conditions.iter().flatten();
    let rows: Vec<Vec<Cell>> = conditions
        .map(|condition| {
            vec![
                Cell::from(condition.type_.as_str()),
                Cell::from(condition.status.as_str()),
                Cell::from(condition.reason.as_deref().unwrap_or_default()),
                Cell::from(condition.message.as_deref().unwrap_or_default()),
            ]
        })
        .collect();
    html.table(&["Condition", "Status", "Reason", "Message"], &rows);
    html.heading("Events");
    event_table(html, &described.events, now);
    html.heading("Volumes");
    let rows: Vec<Vec<Cell>> =
        described.volumes.iter().map(|volume| volumes::row(volume, now).split_off(2)).collect();
    html.table(&["Volume", "Kind", "State", "Since"], &rows);
    if !described.devices.is_empty() || !described.claims.is_empty() {
        html.heading("Devices");
        device_tables(html, &described.devices, &described.claims);
    }
    html.heading("Everything");
    html.preformatted(&printed(now, |console| describe::print(console, described))?);
    Ok(content)
}

/// The containers of a pod in the order of its specification: what they are, name, image.
fn specified(spec: &PodSpec) -> Vec<(&'static str, &str, &str)> {
    let init = spec.init_containers.iter().flatten().map(|container| ("init", container));
    let regular = spec.containers.iter().map(|container| ("container", container));
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    init.chain(regular)
        .map(|(role, container)| {
            (role, container.name.as_str(), container.image.as_deref().unwrap_or_default())
        })
        .chain(ephemeral.map(|container| {
            ("ephemeral", container.name.as_str(), container.image.as_deref().unwrap_or_default())
        }))
        .collect()
}

fn containers(html: &mut Html, uid: &str, spec: &PodSpec, status: &PodStatus, now: Timestamp) {
    let all = specified(spec);
    let lists =
        [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    let statuses: Vec<&ContainerStatus> = lists.into_iter().flatten().flatten().collect();
    let row = |(role, name, image): &(&'static str, &str, &str)| {
        let status = statuses.iter().find(|status| status.name == *name);
        let state = status.and_then(|status| status.state.as_ref());
        let ready = status.map_or("-", |status| if status.ready { "yes" } else { "no" });
        vec![
            Cell::from(*name),
            Cell::from(*role),
            state_cell(state, now),
            Cell::from(ready),
            Cell::from(status.map_or(0, |status| status.restart_count).to_string()),
            Cell::from(*image),
        ]
    };
    let rows: Vec<Vec<Cell>> = all.iter().map(row).collect();
    let headers = ["Name (its log)", "Kind", "State", "Ready", "Restarts", "Image"];
    html.linked_table(&headers, &rows, 0, &|number| {
        all.get(number).map(|(_, name, _)| log_target("/logs", uid, name, false))
    });
}

fn state_cell(state: Option<&ContainerState>, now: Timestamp) -> Cell {
    let Some(state) = state else { return Cell::from("unknown") };
    if let Some(running) = &state.running {
        let since = age::since_or_unknown(running.started_at.as_ref().map(|time| time.0), now);
        return Cell::colored(format!("running for {since}"), Some(Color::Green));
    }
    let words = |parts: [Option<&str>; 2]| {
        let parts: Vec<&str> = parts.into_iter().flatten().filter(|part| !part.is_empty()).collect();
        parts.join(": ")
    };
    if let Some(ended) = &state.terminated {
        let color = if ended.exit_code == 0 { Color::Dim } else { Color::Red };
        let reason = words([ended.reason.as_deref(), ended.message.as_deref()]);
        return Cell::colored(format!("ended with {} {reason}", ended.exit_code), Some(color));
    }
    let waiting = state.waiting.as_ref();
    let reason = waiting.map(|waiting| words([waiting.reason.as_deref(), waiting.message.as_deref()]));
    Cell::colored(format!("waiting {}", reason.unwrap_or_default()), Some(Color::Yellow))
}

fn log_target(path: &str, uid: &str, container: &str, previous: bool) -> String {
    let previous = if previous { "&previous=1" } else { "" };
    format!("{path}?uid={}&container={}{previous}", encode(uid), encode(container))
}

/// The target at the agent of a log that is followed from its last lines on.
pub(super) fn follow_target(uid: &str, container: &str) -> String {
    let (uid, container) = (encode(uid), encode(container));
    format!("/v1/logs?pod={uid}&container={container}&tail={LOG_LINES}&follow=true")
}

/// Whether a log whose stream has ended may grow: its container has not ended, or its state is not known.
pub(super) fn may_grow(client: &Client, uid: &str, container: &str) -> bool {
    let described = match find(client, uid) {
        Ok(described) => described,
        Err(error) => return error.exit() != Exit::NotFound,
    };
    let Some(status) = &described.view.pod.status else { return true };
    let lists =
        [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    let found = lists.into_iter().flatten().flatten().find(|status| status.name == container);
    let state = found.and_then(|status| status.state.as_ref());
    state.is_none_or(|state| state.running.is_some())
}

/// The end of a container's log.
pub(super) fn logs(
    client: &Client,
    uid: &str,
    container: &str,
    previous: bool,
) -> Result<Content, CommandError> {
    let described = find(client, uid)?;
    let view = &described.view;
    // Without a limit of bytes: the agent counts them from the first of these lines, and the last ones have
    // the reason why a container ended.
    let mut target = format!("/v1/logs?pod={}&container={}&tail={LOG_LINES}", encode(uid), encode(container));
    if previous {
        target.push_str("&previous=true");
    }
    let text = client
        .open(&target, ReadTimeout::Response)
        .and_then(|response| client.read_end(response, &target, LOG_BYTES));
    let (text, is_cut) = match text {
        Ok((bytes, is_cut)) => (String::from_utf8_lossy(&bytes).into_owned(), is_cut),
        // Such as a container without a log: the other containers may have some.
        Err(CommandError::Rejected { text, .. }) => (format!("(no log: {text})"), false),
        Err(error) => return Err(error),
    };
    // Without the part of a line, unless there is nothing else.
    let whole = text.split_once('\n').map(|(_, lines)| lines).filter(|lines| is_cut && !lines.is_empty());
    let text = whole.unwrap_or(&text);
    let end = if is_cut { ", of them the end" } else { "" };
    let mut content = Content::new(format!("Log of {container} in {}/{}", view.namespace(), view.name()));
    let html = &mut content.html;
    html.raw("<p class=\"links\">").link(&format!("/pod?uid={}", encode(uid)), "The pod").raw("\n");
    let spec = view.pod.spec.as_ref();
    for (_, name, _) in spec.map(specified).unwrap_or_default() {
        html.link(&log_target("/logs", uid, name, false), name).raw("\n");
    }
    html.link(&log_target("/logs", uid, container, true), "the instance before").raw("</p>\n");
    html.paragraph(&match previous {
        true => format!("The last {LOG_LINES} lines of the instance before{end}."),
        false => format!("The last {LOG_LINES} lines{end}; with JavaScript the log is followed."),
    });
    html.raw("<pre id=\"log\" class=\"log\" tabindex=\"0\"");
    if !previous {
        html.raw(" data-follow=\"").text(&log_target("/logs/follow", uid, container, false)).raw("\"");
    }
    html.raw(">").lines(text).raw("</pre>\n");
    Ok(content)
}

fn event_table(html: &mut Html, events: &[RecordedEvent], now: Timestamp) {
    // The newest first.
    let rows: Vec<Vec<Cell>> =
        events.iter().rev().take(MOST_EVENTS).map(|event| events::row(event, now)).collect();
    html.table(&["Last seen", "Type", "Reason", "Object", "Count", "Message"], &rows);
    html.omitted(events.len().saturating_sub(MOST_EVENTS));
}

/// The events that the agent has.
pub(super) fn all_events(client: &Client, now: Timestamp) -> Result<Content, CommandError> {
    let events: Vec<RecordedEvent> = client.get("/v1/events")?;
    let mut content = Content::new("Events");
    event_table(&mut content.html, &events, now);
    Ok(content)
}

fn device_tables(html: &mut Html, devices: &[DeviceRow], claims: &[ClaimRow]) {
    let rows: Vec<Vec<Cell>> = devices.iter().map(devices::device_row).collect();
    html.table(&["Resource", "Device", "Health", "NUMA", "Used by"], &rows);
    if !claims.is_empty() {
        let rows: Vec<Vec<Cell>> = claims.iter().map(devices::claim_row).collect();
        html.table(&["Claim", "Driver", "Pool", "Device", "State", "Used by"], &rows);
    }
}

/// Volumes, devices and plugins.
pub(super) fn storage(client: &Client, now: Timestamp) -> Result<Content, CommandError> {
    let volumes: VolumesReply = client.get("/v1/volumes")?;
    let devices: DevicesReply = client.get("/v1/devices")?;
    let mut content = Content::new("Volumes and devices");
    let html = &mut content.html;
    html.heading("Volumes");
    let rows: Vec<Vec<Cell>> = volumes.volumes.iter().map(|volume| volumes::row(volume, now)).collect();
    html.table(&["Namespace", "Pod", "Volume", "Kind", "State", "Since"], &rows).omitted(volumes.omitted);
    html.heading("Devices");
    device_tables(html, &devices.devices, &devices.claims);
    html.heading("Plugins");
    let rows: Vec<Vec<Cell>> =
        devices.plugins.iter().map(|plugin| devices::plugin_row(plugin, now)).collect();
    html.table(&["Plugin", "Kind", "Socket", "State", "Since"], &rows).omitted(devices.omitted);
    Ok(content)
}

/// The images of the runtime and of archives, and the archives.
pub(super) fn all_images(client: &Client) -> Result<Content, CommandError> {
    let set: ArchiveSetReport = client.get("/v1/images/set")?;
    let mut content = Content::new("Images and archives");
    let html = &mut content.html;
    let images: Vec<ImageRow> = match client.get("/v1/images") {
        Ok(images) => images,
        Err(CommandError::Rejected { text, .. }) => {
            html.raw("<p class=\"problems\">The runtime does not list its images: ")
                .text(&text)
                .raw("</p>\n");
            Vec::new()
        }
        Err(error) => return Err(error),
    };
    for problem in &set.problems {
        html.raw("<p class=\"problems\">").text(problem).raw("</p>\n");
    }
    html.heading("Images");
    let rows = images::table_rows(&images, &set);
    html.table(&["Image", "Size", "Source", "Pinned", "State"], &rows);
    html.heading("Archives");
    let row = |archive: &ArchiveReport| {
        let color = match archive.state.as_str() {
            "ready" => None,
            "failed" => Some(Color::Red),
            _ => Some(Color::Yellow),
        };
        vec![
            Cell::from(archive.path.as_str()),
            Cell::colored(archive.state.as_str(), color),
            Cell::from(archive.faults.join("; ")),
        ]
    };
    let rows: Vec<Vec<Cell>> = set.archives.iter().map(row).collect();
    html.table(&["Archive", "State", "Faults"], &rows);
    Ok(content)
}

/// What is stored for a start without the API server.
pub(super) fn offline_state(client: &Client, now: Timestamp) -> Result<Content, CommandError> {
    let mut content = Content::new("Offline");
    match client.get::<Report>("/v1/offline") {
        Ok(report) => {
            content.html.preformatted(&printed(now, |console| offline::print(console, &report))?);
        }
        Err(CommandError::Rejected { text, .. }) => {
            content.html.paragraph(&text);
        }
        Err(error) => return Err(error),
    }
    Ok(content)
}
