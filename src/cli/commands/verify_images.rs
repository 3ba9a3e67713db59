//! `coracle images verify`.

use std::collections::BTreeSet;
use std::io::{BufRead as _, Read as _};

use crate::cli::exit::Exit;
use crate::cli::local::{Output, VerifyOptions};
use crate::cli::table::{Cell, Color, Table};
use crate::images::CheckReport;
use crate::server::{ImageRow, VerifyLine};

use super::client::{Client, ReadTimeout, encode};
use super::console::Console;
use super::error::{CommandError, Outcome, print_stderr};

/// The longest line: a report has at most 100 findings.
const MAX_LINE: u64 = 1 << 20;

/// Exits with [`Exit::Failure`] if an image is damaged or could not be verified.
pub(super) fn run(client: &Client, console: &mut Console<'_>, options: &VerifyOptions) -> Outcome {
    let mut images = options.images.clone();
    if images.is_empty() {
        let all: Vec<ImageRow> = client.get("/v1/images")?;
        let names = all.into_iter().map(|image| image.tags.first().cloned().unwrap_or(image.id));
        images = names.collect::<BTreeSet<String>>().into_iter().collect();
    }
    let mut table = Table::new(&["IMAGE", "LAYERS", "RESULT"]);
    let mut reports = Vec::new();
    for image in &images {
        let report = verify(client, image, options.digests)?;
        if matches!(options.output, Output::Table | Output::Wide) {
            console.table(&mut table, &rows(&report))?;
        }
        reports.push(report);
    }
    console.document(options.output, &reports)?;
    if images.is_empty() {
        print_stderr("the runtime has no images");
    }
    let good = reports.iter().all(|report| report.damaged == 0 && report.problems.is_empty());
    Ok(if good { Exit::Success } else { Exit::Failure })
}

fn verify(client: &Client, image: &str, digests: bool) -> Result<CheckReport, CommandError> {
    let target = format!("/v1/images/verify?image={}&digests={digests}", encode(image));
    let mut body = client.open(&target, ReadTimeout::None)?.body;
    let failed = |reason: String| CommandError::Response { target: target.clone(), reason };
    let mut line = Vec::new();
    loop {
        line.clear();
        let count = (&mut body).take(MAX_LINE).read_until(b'\n', &mut line);
        let count = count.map_err(|error| failed(error.to_string()))?;
        if !line.ends_with(b"\n") && (count as u64) < MAX_LINE {
            return Err(failed("the response ends too early".to_owned()));
        }
        let update: VerifyLine = serde_json::from_slice(&line).map_err(|error| failed(error.to_string()))?;
        match update {
            VerifyLine { report: Some(report), .. } => return Ok(report),
            VerifyLine { error: Some(error), .. } => {
                return Ok(CheckReport {
                    image: image.to_owned(),
                    problems: vec![error],
                    ..CheckReport::default()
                });
            }
            _ => {}
        }
    }
}

/// The image, and one row for each of its damaged files and problems.
fn rows(report: &CheckReport) -> Vec<Vec<Cell>> {
    let (result, color) = match (report.damaged, report.problems.is_empty()) {
        (0, true) => ("intact".to_owned(), None),
        (0, false) => ("not verified".to_owned(), Some(Color::Yellow)),
        (damaged, _) => (format!("{damaged} damaged"), Some(Color::Red)),
    };
    let layers = format!("{}/{}", report.verified, report.layers);
    let mut rows =
        vec![vec![Cell::from(report.image.as_str()), Cell::from(layers), Cell::colored(result, color)]];
    let detail = |text: String| vec![Cell::from(""), Cell::from(""), Cell::from(text)];
    rows.extend(
        report.findings.iter().map(|finding| detail(format!("{} {}", finding.path, finding.problem))),
    );
    let more = report.damaged.saturating_sub(report.findings.len() as u64);
    rows.extend((more > 0).then(|| detail(format!("and {more} more"))));
    rows.extend(report.problems.iter().cloned().map(detail));
    rows
}

#[cfg(test)]
mod tests {
    use super::super::tests::scripted;
    use super::*;
    use crate::cli::table::render;
    use crate::images::Finding;
    use expect_test::expect;

    #[test]
    fn line_that_is_cut_off_is_reported_as_such() {
        let (client, _dir, _agent) = scripted("HTTP/1.0 200 OK\r\n\r\n{\"report\":{");
        let error = verify(&client, "a:1", false).unwrap_err().to_string();
        assert!(error.ends_with("the response ends too early"), "{error}");
    }

    #[test]
    fn report_shows_what_is_damaged_and_what_was_not_verified() {
        let mut report =
            CheckReport { image: "a:1".into(), layers: 2, verified: 2, ..CheckReport::default() };
        expect![[r#"
            a:1 | 2/2 | intact
        "#]]
        .assert_eq(&render(&rows(&report)));
        report.problems.push("cannot verify: x".into());
        expect![[r#"
            a:1 | 2/2 | not verified [Yellow]
            "" | "" | cannot verify: x
        "#]]
        .assert_eq(&render(&rows(&report)));
        report.damaged = 3;
        report.findings.push(Finding { path: "/f".into(), problem: "is missing".into() });
        expect![[r#"
            a:1 | 2/2 | 3 damaged [Red]
            "" | "" | /f is missing
            "" | "" | and 2 more
            "" | "" | cannot verify: x
        "#]]
        .assert_eq(&render(&rows(&report)));
    }
}
