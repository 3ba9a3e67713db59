//! `coracle pods`.

use std::collections::HashMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerState, PodStatus};
use serde_json::{Value, json};

use crate::cli::exit::Exit;
use crate::cli::local::{Output, PodsOptions};
use crate::cli::table::{Cell, Color, Table};
use crate::model::pod::{CONFIG_SEEN, Pod};
use crate::server::{PodChange, PodView, PodsReply};

use super::age;
use super::client::Client;
use super::console::Console;
use super::error::{CommandError, Outcome, print_stderr};
use super::pod_status::summary;

pub(super) fn run(client: &Client, console: &mut Console<'_>, options: &PodsOptions) -> Outcome {
    let wanted =
        |view: &PodView| options.namespace.as_deref().is_none_or(|namespace| view.namespace() == namespace);
    let mut pods = client.get::<PodsReply>("/v1/pods")?.pods;
    pods.retain(wanted);
    match options.output {
        Output::Json | Output::Yaml if !options.watch => {
            let items: Vec<Value> = pods.iter().map(document).collect();
            let list = json!({"apiVersion": "v1", "kind": "List", "items": items, "metadata": {}});
            console.document(options.output, &list)?;
        }
        Output::Json | Output::Yaml => watch_documents(client, console, options.output, wanted)?,
        Output::Table | Output::Wide => {
            if pods.is_empty() && !options.watch {
                match &options.namespace {
                    Some(namespace) => {
                        print_stderr(&format!("there are no pods in namespace {namespace} on this node"));
                    }
                    None => print_stderr("there are no pods on this node"),
                }
                return Ok(Exit::Success);
            }
            watch_table(client, console, options, &pods, wanted)?;
        }
    }
    Ok(Exit::Success)
}

/// The API object with the state of its worker.
fn document(view: &PodView) -> Value {
    let mut value = crate::util::json::to_value(&view.pod).unwrap_or_default();
    if let Some(object) = value.as_object_mut() {
        let mut worker = json!({"phase": view.phase});
        if let Some(error) = &view.last_error {
            worker["lastError"] = json!(error);
        }
        if let Some(next) = view.next_sync {
            worker["nextSync"] = json!(next);
        }
        object.insert("worker".to_owned(), worker);
    }
    value
}

fn watch_documents(
    client: &Client,
    console: &mut Console<'_>,
    output: Output,
    wanted: impl Fn(&PodView) -> bool,
) -> Result<(), CommandError> {
    let never = client.follow("/v1/pods/watch", |change: PodChange| {
        let (kind, view) = match &change {
            PodChange::Added(view) => ("ADDED", view),
            PodChange::Modified(view) => ("MODIFIED", view),
            PodChange::Deleted(view) => ("DELETED", view),
        };
        if !wanted(view) {
            return Ok(());
        }
        let event = json!({"type": kind, "object": document(view)});
        console.next_document(output, &event).map(drop)
    })?;
    match never {}
}

/// Prints the table and, with `watch`, each row that changes.
fn watch_table(
    client: &Client,
    console: &mut Console<'_>,
    options: &PodsOptions,
    pods: &[PodView],
    wanted: impl Fn(&PodView) -> bool,
) -> Result<(), CommandError> {
    let wide = options.output == Output::Wide;
    let mut headers = vec!["NAMESPACE", "NAME", "READY", "STATUS", "RESTARTS", "AGE"];
    if wide {
        headers.extend(["IP", "QOS", "WORKER", "UID"]);
    }
    let mut table = Table::new(&headers);
    let rows: Vec<Vec<Cell>> = pods.iter().map(|view| row(view, wide, console.now)).collect();
    console.table(&mut table, &rows)?;
    if !options.watch {
        return Ok(());
    }
    let mut shown: HashMap<String, Vec<Cell>> =
        pods.iter().map(|view| (view.uid().to_owned(), row_key(view, wide))).collect();
    let never = client.follow("/v1/pods/watch", |change: PodChange| {
        console.now = Timestamp::now();
        let rows = match &change {
            PodChange::Deleted(view) => {
                let Some(mut last) = shown.remove(view.uid()) else { return Ok(()) };
                if let Some(status) = last.get_mut(3) {
                    *status = Cell::colored("Deleted", Some(Color::Dim));
                }
                if let Some(age) = last.get_mut(AGE) {
                    *age = Cell::from("-");
                }
                vec![last]
            }
            PodChange::Added(view) | PodChange::Modified(view) => {
                let now = row_key(view, wide);
                if !wanted(view) || shown.insert(view.uid().to_owned(), now.clone()) == Some(now) {
                    return Ok(());
                }
                vec![row(view, wide, console.now)]
            }
        };
        Ok(console.table(&mut table, &rows)?)
    })?;
    match never {}
}

/// The column that changes with time.
const AGE: usize = 5;

/// A row without the columns that change with time. Rows with the same key are printed once.
fn row_key(view: &PodView, wide: bool) -> Vec<Cell> {
    let mut row = row(view, wide, Timestamp::UNIX_EPOCH);
    if let Some(age) = row.get_mut(AGE) {
        *age = Cell::from("");
    }
    if let Some(restarts) = row.get_mut(4) {
        *restarts = Cell::from(summary(view).restarts.to_string());
    }
    row
}

fn row(view: &PodView, wide: bool, now: Timestamp) -> Vec<Cell> {
    let line = summary(view);
    let mut row = vec![
        Cell::from(view.namespace()),
        Cell::from(view.name()),
        Cell::from(format!("{}/{}", line.ready, line.total)),
        Cell::colored(line.status.clone(), line.color()),
        Cell::from(line.restarts(now)),
        Cell::from(age::since_or_unknown(creation_time(view), now)),
    ];
    if wide {
        let status = view.pod.status.as_ref();
        let or_none =
            |text: Option<&str>| text.filter(|text| !text.is_empty()).unwrap_or("<none>").to_owned();
        row.extend([
            Cell::from(or_none(status.and_then(|status| status.pod_ip.as_deref()))),
            Cell::from(Pod::from(view.pod.clone()).qos().as_str()),
            Cell::from(or_none(Some(&view.phase))),
            Cell::from(view.uid()),
        ]);
    }
    row
}

/// The time of creation; else of the start on this node; else of the first sync. The two last ones
/// are not kept over a restart of the agent; then a container of the pod may have an earlier start.
pub(super) fn creation_time(view: &PodView) -> Option<Timestamp> {
    let status = view.pod.status.as_ref();
    let seen = || view.pod.metadata.annotations.as_ref()?.get(CONFIG_SEEN)?.parse().ok();
    if let Some(time) = &view.pod.metadata.creation_timestamp {
        return Some(time.0);
    }
    let synced = status.and_then(|status| Some(status.start_time.as_ref()?.0)).or_else(seen);
    synced.into_iter().chain(status.and_then(earliest_start)).min()
}

/// Earlier starts are not real: a container that could not be started has the start 0, and the clock of
/// a machine without a battery begins in 1970. This is 2024-01-01.
const PLAUSIBLE: Timestamp = Timestamp::constant(1_704_067_200, 0);

/// The earliest start that the statuses of the containers have. They have the last two starts of each.
fn earliest_start(status: &PodStatus) -> Option<Timestamp> {
    let lists = [&status.init_container_statuses, &status.container_statuses];
    let containers = lists.into_iter().flatten().flatten();
    let states = containers.flat_map(|container| [&container.state, &container.last_state]).flatten();
    let running = |state: &ContainerState| Some(state.running.as_ref()?.started_at.as_ref()?.0);
    let ended = |state: &ContainerState| Some(state.terminated.as_ref()?.started_at.as_ref()?.0);
    let starts = states.filter_map(|state| running(state).or_else(|| ended(state)));
    starts.filter(|start| *start >= PLAUSIBLE).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::render;
    use expect_test::expect;

    fn view() -> PodView {
        let pod = json!({
            "metadata": {"namespace": "default", "name": "web\u{1b}[31m", "uid": "u1",
                "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"containers": [{"name": "a"}]},
            "status": {"phase": "Running", "podIP": "10.0.0.7", "containerStatuses": [
                {"name": "a", "ready": true, "restartCount": 0, "image": "", "imageID": "", "state": {"running": {}}}]},
        });
        PodView { pod: serde_json::from_value(pod).unwrap(), phase: "Syncing".into(), ..PodView::default() }
    }

    #[test]
    fn rows_are_plain_and_wide() {
        let now = "2026-01-01T00:03:20Z".parse().unwrap();
        expect![[r#"
            default | web\u{1b}[31m | 1/1 | Running [Green] | 0 | 3m20s
            default | web\u{1b}[31m | 1/1 | Running [Green] | 0 | 3m20s | 10.0.0.7 | BestEffort | Syncing | u1
        "#]]
        .assert_eq(&render(&[row(&view(), false, now), row(&view(), true, now)]));
    }

    #[test]
    fn static_pod_is_as_old_as_its_first_container_after_a_restart_of_the_agent() {
        let mut view = view();
        view.pod.metadata.creation_timestamp = None;
        let status = |containers: Value| {
            let status = json!({"startTime": "2026-01-01T12:00:00Z", "containerStatuses": containers});
            Some(serde_json::from_value(status).unwrap())
        };
        let container = |name: &str, state: Value, last: Value| {
            json!({"name": name, "ready": true, "restartCount": 0, "image": "", "imageID": "",
                "state": state, "lastState": last})
        };
        let time = |text: &str| Some(text.parse::<Timestamp>().unwrap());

        view.pod.status = status(json!([]));
        assert_eq!(creation_time(&view), time("2026-01-01T12:00:00Z"));
        view.pod.status = status(json!([
            container(
                "a",
                json!({"running": {"startedAt": "2026-01-01T11:00:00Z"}}),
                json!({"terminated": {"exitCode": 1, "startedAt": "2026-01-01T10:00:00Z"}})
            ),
            // Its start failed.
            container(
                "b",
                json!({"terminated": {"exitCode": 128, "startedAt": "1970-01-01T00:00:00Z"}}),
                json!({})
            ),
            container("c", json!({"waiting": {}}), json!({})),
        ]));
        assert_eq!(creation_time(&view), time("2026-01-01T10:00:00Z"));
        // The API server knows better.
        view.pod.metadata.creation_timestamp = serde_json::from_value(json!("2026-01-01T13:00:00Z")).unwrap();
        assert_eq!(creation_time(&view), time("2026-01-01T13:00:00Z"));
    }

    #[test]
    fn only_visible_differences_count_as_a_change() {
        let mut other = view();
        other.next_sync = Some(Timestamp::UNIX_EPOCH);
        other.pod.metadata.creation_timestamp = None;
        assert_eq!(row_key(&view(), false), row_key(&other, false));
        other.phase = "Terminating".into();
        assert_ne!(row_key(&view(), false), row_key(&other, false));
    }

    #[test]
    fn a_document_is_the_object_with_its_worker() {
        let value = document(&view());
        assert_eq!((&value["kind"], &value["worker"]["phase"]), (&json!("Pod"), &json!("Syncing")));
    }
}
