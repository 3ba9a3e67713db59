//! `coracle events`.

use crate::cli::exit::Exit;
use crate::cli::local::{EventsOptions, Output};
use crate::cli::table::{Cell, Color, Table};
use crate::kube::events::RecordedEvent;
use crate::model::event::{EventType, Regarding};

use super::age;
use super::client::Client;
use super::console::Console;
use super::error::{Outcome, print_stderr};

pub(super) fn run(client: &Client, console: &mut Console<'_>, options: &EventsOptions) -> Outcome {
    let mut events: Vec<RecordedEvent> = client.get("/v1/events")?;
    let newest = events.iter().map(|event| event.seq).max().unwrap_or(0);
    events.retain(|event| is_wanted(event, options));
    let is_table = matches!(options.output, Output::Table | Output::Wide);
    if events.is_empty() && is_table && !options.watch {
        print_stderr("there are no events");
        return Ok(Exit::Success);
    }
    let mut table = table();
    if !console.document(options.output, &events)? {
        let rows: Vec<_> = events.iter().map(|event| row(event, console.now)).collect();
        console.table(&mut table, &rows)?;
    }
    if options.watch {
        let never =
            client.follow(&format!("/v1/events?follow=true&since={newest}"), |event: RecordedEvent| {
                if !is_wanted(&event, options) {
                    return Ok(());
                }
                console.now = jiff::Timestamp::now();
                if !console.next_document(options.output, &event)? {
                    let row = row(&event, console.now);
                    console.table(&mut table, &[row])?;
                }
                Ok(())
            })?;
        match never {}
    }
    Ok(Exit::Success)
}

fn is_wanted(event: &RecordedEvent, options: &EventsOptions) -> bool {
    if options.pod.is_none() && options.namespace.is_none() {
        return true;
    }
    let Regarding::Pod { namespace, name, uid, .. } = &event.regarding else { return false };
    let (wanted_namespace, wanted) = match options.pod.as_deref() {
        Some(pod) => match pod.split_once('/') {
            Some((namespace, pod)) => (Some(namespace), Some(pod)),
            None => (options.namespace.as_deref(), Some(pod)),
        },
        None => (options.namespace.as_deref(), None),
    };
    let suffix = format!("-{}", event.host.to_lowercase());
    wanted_namespace.is_none_or(|wanted| wanted == namespace)
        && wanted.is_none_or(|wanted| {
            name == wanted || name.strip_suffix(&suffix) == Some(wanted) || uid.as_str().starts_with(wanted)
        })
}

pub(super) fn table() -> Table {
    Table::new(&["LAST SEEN", "TYPE", "REASON", "OBJECT", "COUNT", "MESSAGE"])
}

pub(super) fn row(event: &RecordedEvent, now: jiff::Timestamp) -> Vec<Cell> {
    let (kind, color) = match event.kind {
        EventType::Normal => ("Normal", None),
        EventType::Warning => ("Warning", Some(Color::Yellow)),
    };
    vec![
        Cell::from(age::since(event.last_seen, now)),
        Cell::colored(kind, color),
        Cell::from(event.reason.as_str()),
        Cell::from(event.object()),
        Cell::from(event.count.to_string()),
        Cell::from(event.message.as_str()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::render;
    use expect_test::expect;

    fn event() -> RecordedEvent {
        serde_json::from_value(serde_json::json!({
            "seq": 1, "metadata": {"name": "e", "namespace": "default"},
            "involvedObject": {"kind": "Pod", "namespace": "default", "name": "web-node1", "uid": "abc"},
            "type": "Warning", "reason": "BackOff", "message": "line\none",
            "source": {"component": "kubelet", "host": "Node1"},
            "firstTimestamp": "2026-01-01T00:00:00Z", "lastTimestamp": "2026-01-01T00:01:00Z", "count": 4,
        }))
        .unwrap()
    }

    #[test]
    fn event_is_one_row() {
        let row = row(&event(), "2026-01-01T00:01:05Z".parse().unwrap());
        expect![[r#"
            5s | Warning [Yellow] | BackOff | pod/web-node1 | 4 | line\none
        "#]]
        .assert_eq(&render(&[row]));
    }

    #[test]
    fn events_are_filtered_by_pod_and_namespace() {
        let check = |pod: Option<&str>, namespace: Option<&str>, expected: bool| {
            let options = EventsOptions {
                pod: pod.map(str::to_owned),
                namespace: namespace.map(str::to_owned),
                ..EventsOptions::default()
            };
            assert_eq!(is_wanted(&event(), &options), expected, "{options:?}");
        };
        check(None, None, true);
        check(Some("web"), None, true);
        check(Some("web-node1"), Some("default"), true);
        check(Some("default/web"), None, true);
        check(Some("ab"), None, true);
        check(None, Some("default"), true);
        check(None, Some("other"), false);
        check(Some("other/web"), None, false);
        check(Some("we"), None, false);
        let node = RecordedEvent { regarding: Regarding::Node, ..event() };
        assert!(is_wanted(&node, &EventsOptions::default()));
        assert!(!is_wanted(
            &node,
            &EventsOptions { namespace: Some("default".into()), ..EventsOptions::default() }
        ));
    }
}
