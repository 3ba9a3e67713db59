//! `coracle offline`: what is stored for a start without the API server, whether that is enough, and whose
//! pods count.

use std::io;

use jiff::Timestamp;

use crate::cli::exit::Exit;
use crate::cli::local::{OfflineCommand, Output, Purged};
use crate::cli::table::{Cell, Color, Table};
use crate::offline::{
    CheckReport, HeldReason, Phase, PurgeReport, Report, SealState, StoredEntry, TrustReport,
};

use super::age;
use super::client::{Client, encode};
use super::console::{Console, size};
use super::error::{CommandError, Outcome, checked};

pub(super) fn run(
    client: &Client,
    console: &mut Console<'_>,
    output: Output,
    command: &OfflineCommand,
) -> Outcome {
    match command {
        OfflineCommand::List => {
            // The agent reads all files for the names.
            let target = if output == Output::Table { "/v1/offline" } else { "/v1/offline?names=1" };
            let report: Report = client.get(target)?;
            if !console.document(output, &report)? {
                print(console, &report)?;
            }
        }
        OfflineCommand::Accept => {
            let report: Report = client.post("/v1/offline/accept")?;
            if !console.document(output, &report)? {
                console.line(0, "the pods of the API server are accepted: other pods stop")?;
            }
        }
        OfflineCommand::Check { pod } => {
            let query = pod.as_deref().map(|pod| format!("?pod={}", encode(pod))).unwrap_or_default();
            let report: CheckReport = client.get(&format!("/v1/offline/check{query}"))?;
            return checked(print_check(console, output, &report), report.has_problems());
        }
        OfflineCommand::Trust { file } => {
            let query = match file {
                // The agent has another working directory.
                Some(file) => {
                    let path = std::path::absolute(file).unwrap_or_else(|_| file.clone());
                    format!("file={}", encode(&path.to_string_lossy()))
                }
                None => "remove=1".to_owned(),
            };
            let report: TrustReport = client.post(&format!("/v1/offline/trust?{query}"))?;
            if !console.document(output, &report)? {
                print_trust(console, &report)?;
            }
        }
        OfflineCommand::Purge(purged) => {
            let query = match purged {
                Purged::Damaged => "scope=damaged".to_owned(),
                Purged::All => "scope=all".to_owned(),
                Purged::Object(object) => format!("object={}", encode(object)),
            };
            let report: PurgeReport = client.post(&format!("/v1/offline/purge?{query}"))?;
            let shown = print_purge(console, output, &report, *purged == Purged::All);
            return match shown {
                Ok(()) if !report.problems.is_empty() => Ok(Exit::Failure),
                shown => shown.map(|()| Exit::Success),
            };
        }
    }
    Ok(Exit::Success)
}

fn print_check(console: &mut Console<'_>, output: Output, report: &CheckReport) -> Result<(), CommandError> {
    if console.document(output, report)? {
        return Ok(());
    }
    report.problems.iter().try_for_each(|problem| console.line(0, problem))?;
    if report.pods.is_empty() {
        console.line(0, "no pod would start from the store")?;
        return Ok(());
    }
    let mut rows = Vec::new();
    for pod in &report.pods {
        let cells =
            |missing: Cell| vec![Cell::from(pod.namespace.as_str()), Cell::from(pod.name.as_str()), missing];
        match pod.missing.as_slice() {
            [] => rows.push(cells(Cell::colored("nothing", Some(Color::Green)))),
            missing => {
                rows.extend(missing.iter().map(|what| cells(Cell::colored(what.as_str(), Some(Color::Red)))))
            }
        }
    }
    Ok(console.table(&mut Table::new(&["NAMESPACE", "POD", "MISSING"]), &rows)?)
}

fn print_trust(console: &mut Console<'_>, report: &TrustReport) -> io::Result<()> {
    if !report.added.is_empty() {
        console.line(0, "the certificate of the API server may now be signed by")?;
        return report.added.iter().try_for_each(|authority| console.line(1, authority));
    }
    let text = match report.removed {
        true => "the added authorities are removed; the agent uses them until it restarts",
        false => "no authorities were added",
    };
    console.line(0, text)
}

fn print_purge(
    console: &mut Console<'_>,
    output: Output,
    report: &PurgeReport,
    is_all: bool,
) -> Result<(), CommandError> {
    if console.document(output, report)? {
        return Ok(());
    }
    console.line(0, &format!("files removed: {} ({})", report.removed, size(report.bytes)))?;
    if report.new_key {
        console.line(0, "Secrets and tokens are sealed with a new key from now on")?;
    } else if is_all {
        console
            .line(0, "the key is the same: it is in the file of --offline-key, or Secrets are not stored")?;
    }
    report.problems.iter().try_for_each(|problem| console.line(0, problem))?;
    Ok(())
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
                Some(HeldReason::OtherCluster) => "it is that of another cluster",
                Some(HeldReason::OtherNode) => "its Node object is another one",
                Some(HeldReason::NoNode) | None => "it does not know this node",
            };
            (format!("held{since}: {reason}; coracle offline accept"), Color::Red)
        }
    }
}

pub(super) fn print(console: &mut Console<'_>, report: &Report) -> io::Result<()> {
    console.field(0, "Pods of", whose(report.phase))?;
    // Whether the API server can be reached now is a part of the status only.
    if report.phase != Phase::Online {
        let (line, color) = server_line(report, true, console.now);
        console.colored_field(0, "API server", &line, Some(color))?;
    }
    if let Some(time) = report.accepts {
        let seconds = Timestamp::from_second(time.as_second()).unwrap_or(time);
        console.field(0, "Accepted", &format!("at {seconds} without a command"))?;
    }
    let (secrets, color) = match report.seal {
        SealState::Sealed => ("stored, sealed", Color::Green),
        SealState::Off => ("not stored (--offline-secrets=none)", Color::Yellow),
        SealState::NoKey => ("neither stored nor read: the key cannot be used", Color::Red),
    };
    console.colored_field(0, "Secrets", secrets, Some(color))?;
    let used = format!("{} of {}", size(report.bytes), size(report.limit_bytes));
    console.field(0, "Size", &used)?;
    report.trusted.iter().try_for_each(|authority| console.field(0, "Trusted", authority))?;
    if !report.problems.is_empty() {
        console.heading("Problems:")?;
        report.problems.iter().try_for_each(|problem| console.line(1, problem))?;
    }
    if report.objects.is_empty() {
        return console.field(0, "Objects", "none");
    }
    writeln!(console.out)?;
    if !report.stored.is_empty() {
        return print_entries(console, report);
    }
    let row = |(kind, count): (&String, &u64)| vec![Cell::from(kind.as_str()), Cell::from(count.to_string())];
    let rows: Vec<_> = report.objects.iter().map(row).collect();
    console.table(&mut Table::new(&["KIND", "OBJECTS"]), &rows)
}

fn print_entries(console: &mut Console<'_>, report: &Report) -> io::Result<()> {
    let now = console.now;
    let row = |entry: &StoredEntry| {
        let (state, color) = match (entry.usable, entry.sealed) {
            (false, _) => ("damaged", Some(Color::Red)),
            (true, true) => ("sealed", None),
            (true, false) => ("clear", None),
        };
        // The file of a damaged one.
        let name = if entry.name.is_empty() { &entry.file } else { &entry.name };
        vec![
            Cell::from(entry.kind.as_str()),
            Cell::from(name.as_str()),
            Cell::from(entry.pod.as_deref().unwrap_or("-")),
            Cell::from(size(entry.bytes)),
            Cell::from(age::since_or_unknown(entry.changed, now)),
            Cell::colored(state, color),
        ]
    };
    let rows: Vec<_> = report.stored.iter().map(row).collect();
    console.table(&mut Table::new(&["KIND", "NAME", "POD", "SIZE", "CHANGED", "STATE"]), &rows)?;
    if report.damaged.is_empty() {
        return Ok(());
    }
    writeln!(console.out)?;
    console.heading("Copies of damaged files:")?;
    report.damaged.iter().try_for_each(|copy| {
        let age = age::since_or_unknown(copy.changed, now);
        console.line(1, &format!("{} ({}, {age})", copy.file, size(copy.bytes)))
    })
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
            (held(HeldReason::OtherCluster), true),
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
            held since 2026-01-01T00:00:00Z (3m20s): it is that of another cluster; coracle offline accept [Red]
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
            Accepted:          at 2026-01-01T01:00:00Z without a command
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

    #[test]
    fn wide_list_has_a_row_for_each_object_and_the_copies() {
        let changed = Some("2026-01-01T00:00:00Z".parse().unwrap());
        let entry = |kind: &str, name: &str, pod: Option<&str>, sealed| StoredEntry {
            kind: kind.to_owned(),
            name: name.to_owned(),
            pod: pod.map(str::to_owned),
            bytes: 2048,
            changed,
            sealed,
            usable: !name.is_empty(),
            file: format!("{kind}-0"),
        };
        let report = Report {
            objects: [("pod".to_owned(), 1)].into(),
            stored: vec![
                entry("pod", "u-1", Some("n/web"), false),
                entry("secret", "n/s", None, true),
                entry("volume", "", None, false),
            ],
            damaged: vec![crate::offline::DamagedFile {
                file: "claim-0".to_owned(),
                bytes: 3,
                changed: None,
            }],
            ..since(Phase::Online)
        };
        let mut out = Vec::new();
        print(&mut Console { out: &mut out, paint: Paint::new(false), now: now() }, &report).unwrap();
        expect![[r#"
            KIND     NAME       POD     SIZE      CHANGED   STATE
            pod      u-1        n/web   2.0 KiB   3m20s     clear
            secret   n/s        -       2.0 KiB   3m20s     sealed
            volume   volume-0   -       2.0 KiB   3m20s     damaged

            Copies of damaged files:
              claim-0 (3 B, <unknown>)
        "#]]
        .assert_eq(String::from_utf8(out).unwrap().split_once("\n\n").unwrap().1);
    }

    #[test]
    fn check_names_what_is_missing_for_each_pod() {
        let pod = |name: &str, missing: &[&str]| crate::offline::PodCheck {
            namespace: "n".to_owned(),
            name: name.to_owned(),
            uid: name.to_owned(),
            missing: missing.iter().map(|&what| what.to_owned()).collect(),
        };
        let report = CheckReport {
            problems: vec!["the Node object is not stored".to_owned()],
            pods: vec![pod("db", &["image a: not on the node", "claim n/c: not stored"]), pod("web", &[])],
        };
        let mut out = Vec::new();
        let mut console = Console { out: &mut out, paint: Paint::new(false), now: now() };
        print_check(&mut console, Output::Table, &report).unwrap();
        expect![[r#"
            the Node object is not stored
            NAMESPACE   POD   MISSING
            n           db    image a: not on the node
            n           db    claim n/c: not stored
            n           web   nothing
        "#]]
        .assert_eq(&String::from_utf8(out).unwrap());
    }
}
