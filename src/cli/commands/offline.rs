//! `coracle offline`: what is stored for a start without the API server, and whose pods count.

use std::io;

use jiff::Timestamp;

use crate::cli::exit::Exit;
use crate::cli::local::{OfflineCommand, Output};
use crate::cli::table::{Cell, Color, Table};
use crate::offline::{HeldReason, Phase, Report, SealState};

use super::age;
use super::client::Client;
use super::console::{Console, size};
use super::error::Outcome;

pub(super) fn run(
    client: &Client,
    console: &mut Console<'_>,
    output: Output,
    command: OfflineCommand,
) -> Outcome {
    let report: Report = match command {
        OfflineCommand::List => client.get("/v1/offline")?,
        OfflineCommand::Accept => client.post("/v1/offline/accept")?,
    };
    if !console.document(output, &report)? {
        match command {
            OfflineCommand::List => print(console, &report)?,
            OfflineCommand::Accept => {
                console.line(0, "the pods of the API server are accepted: other pods stop")?;
            }
        }
    }
    Ok(Exit::Success)
}

/// The line of the API server, with its color. `is_reachable`: no request to it has failed since the last
/// one that succeeded.
pub(super) fn server_line(report: &Report, is_reachable: bool, now: Timestamp) -> (String, Color) {
    let since = report.since.map(|since| {
        let seconds = Timestamp::from_second(since.as_second()).unwrap_or(since);
        format!(" since {seconds} ({})", age::since(since, now))
    });
    let since = since.unwrap_or_default();
    match report.phase {
        Phase::Undecided => ("not decided yet".to_owned(), Color::Yellow),
        Phase::Online if is_reachable => ("online".to_owned(), Color::Green),
        Phase::Online => ("not reachable; its last pods continue".to_owned(), Color::Yellow),
        Phase::Alone => (format!("away{since}; stored pods run"), Color::Yellow),
        Phase::Held => {
            let reason = match report.held {
                Some(HeldReason::OtherNode) => "its Node object is another one",
                Some(HeldReason::NoNode) | None => "it does not know this node",
            };
            (format!("held{since}: {reason}; coracle offline accept"), Color::Red)
        }
    }
}

fn print(console: &mut Console<'_>, report: &Report) -> io::Result<()> {
    console.field(0, "Pods of", whose(report.phase))?;
    // Whether the API server can be reached now is a part of the status only.
    if report.phase != Phase::Online {
        let (line, color) = server_line(report, true, console.now);
        console.colored_field(0, "API server", &line, Some(color))?;
    }
    if let Some(time) = report.accepts {
        let seconds = Timestamp::from_second(time.as_second()).unwrap_or(time);
        console.field(0, "Accepted", &format!("at {seconds} without an order"))?;
    }
    let (secrets, color) = match report.seal {
        SealState::Sealed => ("stored, sealed", Color::Green),
        SealState::Off => ("not stored (--offline-secrets=none)", Color::Yellow),
        SealState::NoKey => ("neither stored nor read: the key cannot be used", Color::Red),
    };
    console.colored_field(0, "Secrets", secrets, Some(color))?;
    let used = format!("{} of {}", size(report.bytes), size(report.limit_bytes));
    console.field(0, "Size", &used)?;
    if !report.problems.is_empty() {
        console.heading("Problems:")?;
        report.problems.iter().try_for_each(|problem| console.line(1, problem))?;
    }
    if report.objects.is_empty() {
        return console.field(0, "Objects", "none");
    }
    writeln!(console.out)?;
    let row = |(kind, count): (&String, &u64)| vec![Cell::from(kind.as_str()), Cell::from(count.to_string())];
    let rows: Vec<_> = report.objects.iter().map(row).collect();
    console.table(&mut Table::new(&["KIND", "OBJECTS"]), &rows)
}

/// Which set of pods runs.
fn whose(phase: Phase) -> &'static str {
    match phase {
        Phase::Undecided => "none yet",
        Phase::Online => "the API server",
        Phase::Alone | Phase::Held => "the store",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::Paint;
    use expect_test::expect;

    fn now() -> Timestamp {
        "2026-01-01T00:03:20Z".parse().unwrap()
    }

    fn since(phase: Phase) -> Report {
        Report { phase, since: Some("2026-01-01T00:00:00.75Z".parse().unwrap()), ..Report::default() }
    }

    #[test]
    fn line_of_the_api_server_names_phase_time_and_remedy() {
        let held = |reason| Report { held: Some(reason), ..since(Phase::Held) };
        let lines = [
            (Report::default(), true),
            (since(Phase::Online), true),
            (since(Phase::Online), false),
            (since(Phase::Alone), false),
            (held(HeldReason::NoNode), true),
            (held(HeldReason::OtherNode), true),
        ]
        .map(|(report, is_reachable)| {
            let (line, color) = server_line(&report, is_reachable, now());
            format!("{line} [{color:?}]\n")
        });
        expect![[r#"
            not decided yet [Yellow]
            online [Green]
            not reachable; its last pods continue [Yellow]
            away since 2026-01-01T00:00:00Z (3m20s); stored pods run [Yellow]
            held since 2026-01-01T00:00:00Z (3m20s): it does not know this node; coracle offline accept [Red]
            held since 2026-01-01T00:00:00Z (3m20s): its Node object is another one; coracle offline accept [Red]
        "#]]
        .assert_eq(&lines.concat());
    }

    #[test]
    fn list_shows_state_size_problems_and_kinds() {
        let report = Report {
            held: Some(HeldReason::NoNode),
            accepts: Some("2026-01-01T01:00:00.75Z".parse().unwrap()),
            seal: SealState::NoKey,
            objects: [("pod".to_owned(), 3), ("configmap".to_owned(), 12)].into(),
            bytes: 34_816,
            limit_bytes: 64 << 20,
            problems: vec!["secret a/b\u{1b}[31m: too large".to_owned()],
            ..since(Phase::Held)
        };
        let printed = |report: &Report| {
            let mut out = Vec::new();
            print(&mut Console { out: &mut out, paint: Paint::new(false), now: now() }, report).unwrap();
            String::from_utf8(out).unwrap()
        };
        expect![[r#"
            Pods of:           the store
            API server:        held since 2026-01-01T00:00:00Z (3m20s): it does not know this node; coracle offline accept
            Accepted:          at 2026-01-01T01:00:00Z without an order
            Secrets:           neither stored nor read: the key cannot be used
            Size:              34.0 KiB of 64.0 MiB
            Problems:
              secret a/b\u{1b}[31m: too large

            KIND        OBJECTS
            configmap   12
            pod         3
        "#]]
        .assert_eq(&printed(&report));
        assert!(printed(&since(Phase::Online)).ends_with("Objects:           none\n"));
    }
}
