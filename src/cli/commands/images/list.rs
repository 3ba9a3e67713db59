//! `coracle images list`: the images of the runtime and of the archives in one table.

use serde::Serialize;

use crate::cli::exit::Exit;
use crate::cli::local::Output;
use crate::cli::table::{Cell, Color, Table};
use crate::images::ArchiveSetReport;
use crate::server::ImageRow;

use crate::cli::commands::client::Client;
use crate::cli::commands::console::{Console, size};
use crate::cli::commands::error::{CommandError, Outcome, print_stderr};

/// One image under one name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    name: String,
    size_bytes: u64,
    /// The path of its archive, or `-`.
    source: String,
    /// Whether the runtime or an archive keeps it from being collected.
    pinned: bool,
    /// `present`, or how far the set is with it.
    state: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    error: String,
}

pub(super) fn run(client: &Client, console: &mut Console<'_>, output: Output) -> Outcome {
    let set: ArchiveSetReport = client.get("/v1/images/set")?;
    let images: Vec<ImageRow> = match client.get("/v1/images") {
        Ok(images) => images,
        Err(CommandError::Rejected { text, .. }) => {
            print_stderr(&format!("these are the images of archives only: {text}"));
            Vec::new()
        }
        Err(error) => return Err(error),
    };
    let rows = rows(&images, &set);
    if console.document(output, &rows)? {
        return Ok(Exit::Success);
    }
    let cells: Vec<Vec<Cell>> = rows.iter().map(cells).collect();
    console.table(&mut Table::new(&["IMAGE", "SIZE", "SOURCE", "PINNED", "STATE"]), &cells)?;
    for archive in &set.archives {
        if archive.state != "ready" {
            console.line(0, &format!("{}: {}", archive.path, archive.state))?;
        }
        for fault in &archive.faults {
            console.line(0, &format!("{}: {fault}", archive.path))?;
        }
    }
    console.out.flush()?;
    Ok(Exit::Success)
}

/// The rows of the table: name, size, source, whether the image is pinned, state.
pub(crate) fn table_rows(images: &[ImageRow], set: &ArchiveSetReport) -> Vec<Vec<Cell>> {
    rows(images, set).iter().map(cells).collect()
}

fn cells(row: &Row) -> Vec<Cell> {
    let color = match row.state.as_str() {
        "present" => None,
        "failed" | "damaged" => Some(Color::Red),
        _ => Some(Color::Yellow),
    };
    let state =
        if row.error.is_empty() { row.state.clone() } else { format!("{}: {}", row.state, row.error) };
    vec![
        Cell::from(row.name.clone()),
        Cell::from(size(row.size_bytes)),
        Cell::from(row.source.clone()),
        Cell::from(if row.pinned { "yes" } else { "no" }),
        Cell::colored(state, color),
    ]
}

/// One row per name; those of the runtime that have no name by digest.
fn rows(images: &[ImageRow], set: &ArchiveSetReport) -> Vec<Row> {
    let mut rows: Vec<Row> = set
        .images
        .iter()
        .map(|image| Row {
            name: image.name.clone(),
            size_bytes: image.size_bytes,
            source: image.archive.clone(),
            pinned: true,
            state: image.state.clone(),
            error: image.error.clone(),
        })
        .collect();
    for image in images {
        let names = if image.tags.is_empty() {
            image.digests.get(..1).unwrap_or_default()
        } else {
            image.tags.as_slice()
        };
        let names = if names.is_empty() { std::slice::from_ref(&image.id) } else { names };
        for name in names {
            if let Some(row) = rows.iter_mut().find(|row| row.name == *name) {
                // What the runtime has unpacked.
                row.size_bytes = image.size_bytes;
                continue;
            }
            rows.push(Row {
                name: name.clone(),
                size_bytes: image.size_bytes,
                source: "-".to_owned(),
                pinned: image.pinned,
                state: "present".to_owned(),
                error: String::new(),
            });
        }
    }
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::render;
    use crate::images::SetImageReport;
    use expect_test::expect;

    #[test]
    fn images_of_runtime_and_archives_are_in_one_list() {
        let set = |name: &str, state: &str, error: &str| SetImageReport {
            name: name.into(),
            archive: "/i/a.tar".into(),
            size_bytes: 10,
            state: state.into(),
            error: error.into(),
            ..SetImageReport::default()
        };
        let images = [
            ImageRow {
                id: "sha256:1".into(),
                tags: vec!["r/b:1".into(), "r/d:1".into()],
                size_bytes: 7,
                pinned: true,
                ..ImageRow::default()
            },
            ImageRow { id: "sha256:2".into(), digests: vec!["r/e@sha256:9".into()], ..ImageRow::default() },
            ImageRow { id: "sha256:3".into(), ..ImageRow::default() },
        ];
        let report = ArchiveSetReport {
            images: vec![set("r/b:1", "present", ""), set("r/a:1", "damaged", "layer sha256:5")],
            ..ArchiveSetReport::default()
        };
        let rows: Vec<Vec<Cell>> = rows(&images, &report).iter().map(cells).collect();
        expect![[r#"
            r/a:1 | 10 B | /i/a.tar | yes | damaged: layer sha256:5 [Red]
            r/b:1 | 7 B | /i/a.tar | yes | present
            r/d:1 | 7 B | - | yes | present
            r/e@sha256:9 | 0 B | - | no | present
            sha256:3 | 0 B | - | no | present
        "#]]
        .assert_eq(&render(&rows));
    }
}
