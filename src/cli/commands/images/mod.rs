//! `coracle images`: the images of the runtime, and the archives that provide images.

mod copy;
mod export;
mod import;
mod list;
mod progress;
mod remove;

use crate::cli::exit::Exit;
use crate::cli::local::{ImagesCommand, Output};
use crate::cli::table::{Cell, Table};
use crate::server::ImageRow;

use super::client::Client;
use super::console::{Console, size};
use super::error::{Outcome, print_stderr};

pub(super) use list::table_rows;

pub(super) fn run(
    client: &Client,
    console: &mut Console<'_>,
    output: Output,
    command: &ImagesCommand,
) -> Outcome {
    match command {
        ImagesCommand::Runtime => list_runtime_images(client, console, output),
        ImagesCommand::List => list::run(client, console, output),
        ImagesCommand::Import { files, directories, wait } => {
            import::run(client, console, files, directories, *wait)
        }
        ImagesCommand::Remove { name } => remove::run(client, console, name),
        ImagesCommand::Export { name, file } => export::run(client, console, name, file),
    }
}

fn list_runtime_images(client: &Client, console: &mut Console<'_>, output: Output) -> Outcome {
    let mut images: Vec<ImageRow> = client.get("/v1/images")?;
    images.sort_by(|a, b| (&a.tags, &a.digests, &a.id).cmp(&(&b.tags, &b.digests, &b.id)));
    if console.document(output, &images)? {
        return Ok(Exit::Success);
    }
    if images.is_empty() {
        print_stderr("the runtime has no images");
        return Ok(Exit::Success);
    }
    let rows: Vec<_> = images.iter().flat_map(|image| rows(image, output == Output::Wide)).collect();
    console.table(&mut Table::new(&["IMAGE", "TAG", "ID", "SIZE", "IN USE", "PINNED"]), &rows)?;
    Ok(Exit::Success)
}

/// One row per name, or one for an image without a name.
fn rows(image: &ImageRow, whole_id: bool) -> Vec<Vec<Cell>> {
    let yes_no = |yes: bool| if yes { "yes" } else { "no" };
    let hex = image.id.strip_prefix("sha256:").unwrap_or(&image.id);
    let id = if whole_id { hex } else { hex.get(..12).unwrap_or(hex) };
    let names: Vec<(&str, &str)> = match (image.tags.as_slice(), image.digests.first()) {
        ([], Some(digest)) => {
            vec![(digest.split_once('@').map_or(digest.as_str(), |(name, _)| name), "<none>")]
        }
        ([], None) => vec![("<none>", "<none>")],
        (tags, _) => tags.iter().map(|tag| split_tag(tag)).collect(),
    };
    let row = |(name, tag): (&str, &str)| {
        vec![
            Cell::from(name),
            Cell::from(tag),
            Cell::from(id),
            Cell::from(size(image.size_bytes)),
            Cell::from(yes_no(image.in_use)),
            Cell::from(yes_no(image.pinned)),
        ]
    };
    names.into_iter().map(row).collect()
}

/// `host:5000/name:tag`: the last colon separates a tag only after the last slash.
fn split_tag(reference: &str) -> (&str, &str) {
    match reference.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, tag),
        _ => (reference, "<none>"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::render;
    use expect_test::expect;

    #[test]
    fn image_has_one_row_per_name() {
        let image = ImageRow {
            id: "sha256:0123456789abcdef".into(),
            tags: vec!["host:5000/a/b:1".into(), "host:5000/a/b".into()],
            size_bytes: 2048,
            in_use: true,
            ..ImageRow::default()
        };
        let bare = ImageRow { tags: Vec::new(), digests: vec!["x/y@sha256:1".into()], ..image.clone() };
        expect![[r#"
            host:5000/a/b | 1 | 0123456789ab | 2.0 KiB | yes | no
            host:5000/a/b | <none> | 0123456789ab | 2.0 KiB | yes | no
            x/y | <none> | 0123456789ab | 2.0 KiB | yes | no
            <none> | <none> | "" | 0 B | no | no
        "#]]
        .assert_eq(&render(&[image, bare, ImageRow::default()].map(|image| rows(&image, false)).concat()));
    }
}
