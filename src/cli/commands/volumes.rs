//! `coracle volumes`.

use std::io;

use jiff::Timestamp;

use crate::cli::exit::Exit;
use crate::cli::local::VolumesOptions;
use crate::cli::table::{Cell, Color, Table};
use crate::model::api::Volume;
use crate::server::{VolumeRow, VolumesReply};

use super::age;
use super::client::Client;
use super::console::Console;
use super::describe::scalars;
use super::error::{Outcome, print_stderr};

pub(super) fn run(client: &Client, console: &mut Console<'_>, options: &VolumesOptions) -> Outcome {
    let mut reply: VolumesReply = client.get("/v1/volumes")?;
    // Pods of which only the UID is known are in no namespace.
    reply.volumes.retain(|row| options.is_in(&row.namespace));
    if console.document(options.output, &reply)? {
        return Ok(Exit::Success);
    }
    if reply.volumes.is_empty() {
        print_stderr("no pod uses a volume");
        return Ok(Exit::Success);
    }
    let rows: Vec<_> = reply.volumes.iter().map(|volume| row(volume, console.now)).collect();
    let headers = ["NAMESPACE", "POD", "VOLUME", "KIND", "STATE", "SINCE"];
    console.table(&mut Table::new(&headers), &rows)?;
    console.omitted(reply.omitted)?;
    Ok(Exit::Success)
}

pub(super) fn row(volume: &VolumeRow, now: Timestamp) -> Vec<Cell> {
    vec![
        Cell::from(volume.namespace.as_str()),
        Cell::from(volume.pod.as_str()),
        Cell::from(volume.volume.as_str()),
        Cell::from(volume.kind.as_str()),
        Cell::colored(state(volume), color(volume)),
        Cell::from(age::since_or_unknown(volume.since, now)),
    ]
}

/// The volumes of a pod with their state, and what is left of others.
pub(super) fn describe(console: &mut Console<'_>, volumes: &[Volume], rows: &[VolumeRow]) -> io::Result<()> {
    let is_in_pod = |row: &VolumeRow| volumes.iter().any(|volume| volume.name == row.volume);
    if volumes.is_empty() && rows.is_empty() {
        return console.field(0, "Volumes", "<none>");
    }
    console.field(0, "Volumes", "")?;
    for volume in volumes {
        let value = crate::util::json::to_value(volume).unwrap_or_default();
        let source = value.as_object().and_then(|fields| fields.iter().find(|(key, _)| *key != "name"));
        let (kind, fields) = match source {
            Some((kind, fields)) => (kind.as_str(), fields.as_object().map(scalars).unwrap_or_default()),
            // A volume without a source is an emptyDir.
            None => ("emptyDir", String::new()),
        };
        console.field(1, &volume.name, format!("{kind} {fields}").trim_end())?;
        rows.iter().filter(|row| row.volume == volume.name).try_for_each(|row| state_field(console, row))?;
    }
    for row in rows.iter().filter(|row| !is_in_pod(row)) {
        console.field(1, &row.volume, &row.kind)?;
        state_field(console, row)?;
    }
    Ok(())
}

fn state_field(console: &mut Console<'_>, row: &VolumeRow) -> io::Result<()> {
    let age = row.since.map(|since| format!(" for {}", age::since(since, console.now)));
    let error = row.error.as_ref().map(|error| format!(": {error}"));
    let text = format!("{}{}{}", row.state, age.unwrap_or_default(), error.unwrap_or_default());
    console.colored_field(2, "State", &text, color(row))
}

/// The state with the last error.
fn state(volume: &VolumeRow) -> String {
    match &volume.error {
        Some(error) => format!("{}: {error}", volume.state),
        None => volume.state.clone(),
    }
}

fn color(volume: &VolumeRow) -> Option<Color> {
    match volume.state.as_str() {
        "failed" | "cannot be unmounted" => Some(Color::Red),
        "mounted" if volume.error.is_none() => Some(Color::Green),
        "unmounted" => None,
        _ => Some(Color::Yellow),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::render;
    use expect_test::expect;

    #[test]
    fn a_row_has_the_state_with_its_error_and_age() {
        let now = "2026-01-01T00:03:20Z".parse().unwrap();
        let volume = VolumeRow {
            namespace: "default".into(),
            pod: "web".into(),
            volume: "data".into(),
            kind: "persistentVolumeClaim data (hostpath.csi.k8s.io)".into(),
            state: "mounted".into(),
            error: None,
            since: Some("2026-01-01T00:00:00Z".parse().unwrap()),
        };
        let (state, error, since) =
            ("cannot be unmounted".to_owned(), Some("device is busy".to_owned()), None);
        let rows = [
            row(&volume, now),
            row(&VolumeRow { error: Some("no update".into()), ..volume.clone() }, now),
            row(&VolumeRow { state, error, since, ..volume }, now),
        ];
        expect![[r#"
            default | web | data | persistentVolumeClaim data (hostpath.csi.k8s.io) | mounted [Green] | 3m20s
            default | web | data | persistentVolumeClaim data (hostpath.csi.k8s.io) | mounted: no update [Yellow] | 3m20s
            default | web | data | persistentVolumeClaim data (hostpath.csi.k8s.io) | cannot be unmounted: device is busy [Red] | <unknown>
        "#]]
        .assert_eq(&render(&rows));
    }
}
