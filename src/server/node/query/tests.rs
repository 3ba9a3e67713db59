use std::sync::Arc;

use super::*;
use crate::server::http::request::Method;
use crate::server::node::tests::{Fixture, request};
use crate::server::tests::gunzip;

fn tree() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("nested")).unwrap();
    std::fs::write(dir.path().join("plain"), "plain\n").unwrap();
    std::fs::write(dir.path().join("dotted.log"), "dotted\n").unwrap();
    std::fs::write(dir.path().join("nested/nested.log"), "nested\n").unwrap();
    std::os::unix::fs::symlink("/etc/hostname", dir.path().join("link.log")).unwrap();
    dir
}

fn fixture(dir: &tempfile::TempDir) -> Fixture {
    let root = dir.path().to_owned();
    Fixture::new(|node| {
        node.log_dir = root;
        node.switches.system_log_query = true;
    })
}

#[test]
fn parameters_are_validated() {
    let dir = tree();
    let fixture = fixture(&dir);
    let long = "x".repeat(257);
    for (query, status, text) in [
        ("query=", 400, "query: Invalid value: [\"\"]: query cannot be empty\n".to_owned()),
        ("query=%20%20", 400, "query: Invalid value: [\"  \"]: query cannot be empty\n".to_owned()),
        ("sinceTime=x", 400, "sinceTime: Invalid value: \"x\": invalid time format\n".to_owned()),
        ("untilTime=x", 400, "untilTime: Invalid value: \"x\": invalid time format\n".to_owned()),
        (
            "boot=x&tailLines=y",
            400,
            "[boot: Invalid value: \"x\": strconv.Atoi: parsing \"x\": invalid syntax, tailLines: Invalid value: \"y\": strconv.Atoi: parsing \"y\": invalid syntax]\n".to_owned(),
        ),
        ("boot=0", 406, "query: Required value: cannot be empty with options\n".to_owned()),
        ("query=a&boot=1", 406, "boot: Invalid value: 1: must be less than 1\n".to_owned()),
        ("query=a&tailLines=-1", 406, "tailLines: Invalid value: -1: must be between 0 and 100000, inclusive\n".to_owned()),
        (
            "query=a&tailLines=100001",
            406,
            "tailLines: Invalid value: 100001: must be between 0 and 100000, inclusive\n".to_owned(),
        ),
        (
            "query=a&sinceTime=2026-01-02T00:00:00Z&untilTime=2026-01-01T00:00:00Z",
            406,
            "untilTime: Invalid value: \"2026-01-01T00:00:00Z\": must be after `sinceTime`\n".to_owned(),
        ),
        ("query=a;b", 406, "query: Invalid value: \"a;b\": input contains unsupported characters\n".to_owned()),
        ("query=a%20b", 406, "query: Invalid value: \"a b\": input contains unsupported characters\n".to_owned()),
        (
            &format!("query={long}"),
            406,
            format!("query: Invalid value: \"{long}\": length must be less than 100\n"),
        ),
        (
            "query=a&query=b&query=c&query=d&query=e",
            406,
            "query: Too many: 5: must have at most 4 items\n".to_owned(),
        ),
        (
            "query=/plain&query=a",
            406,
            "query: Invalid value: \"[/plain], [a]\": cannot specify a file and service\n".to_owned(),
        ),
        (
            "query=/plain&query=/b",
            406,
            "query: Invalid value: [\"/plain\",\"/b\"]: cannot specify more than one file\n".to_owned(),
        ),
        (
            "query=/plain&boot=0",
            406,
            "query: Invalid value: [\"/plain\"]: cannot specify file with options\n".to_owned(),
        ),
        ("query=/none", 406, "query: Invalid value: [\"/none\"]: no such file or directory\n".to_owned()),
        ("query=/../secret", 406, "query: Invalid value: [\"/../secret\"]: no such file or directory\n".to_owned()),
        ("query=/link.log", 406, "query: Invalid value: [\"/link.log\"]: no such file or directory\n".to_owned()),
    ] {
        let response = fixture.get(&format!("/logs/?{query}"));
        assert_eq!(response.brief(), (status, text), "{query}");
    }
    let response = fixture.get("/logs/plain?query=a");
    assert_eq!(response.brief(), (406, "path not allowed in query mode\n".to_owned()));
    // Without a parameter of a query files are served.
    assert_eq!(fixture.get("/logs/plain").text(), "plain\n");
    assert_eq!(fixture.get("/logs/?query=/plain").text(), "plain\n");
    assert_eq!(fixture.get("/logs/?query=/nested").header("Location"), "nested/");
    assert!(fixture.get("/logs/?other=x").text().contains("dotted.log"));
}

#[test]
fn queries_are_ignored_without_the_switch() {
    let dir = tree();
    let mut fixture = fixture(&dir);
    Arc::get_mut(&mut fixture.node).unwrap().switches.system_log_query = false;
    assert!(fixture.get("/logs/?query=a;b").text().contains("dotted.log"));
}

/// A journalctl of one unit, which prints its arguments.
fn journal(dir: &Path) -> String {
    let path = dir.join("journalctl");
    let script = "#!/bin/sh\nif [ \"$1\" = --field ]; then echo kubelet.service; else echo \"$@\"; fi\n";
    crate::util::testing::program(&path, script);
    path.display().to_string()
}

fn written(query: &str, journalctl: &str, root: &Path) -> String {
    let query = Query::read(&Target::parse(&format!("/logs/?{query}"))).unwrap().unwrap();
    query.check(root).unwrap();
    let mut out = Vec::new();
    query.write(journalctl, &mut out, root, &StopToken::never()).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn services_come_from_the_journal_or_from_files() {
    let dir = tree();
    let tools = tempfile::tempdir().unwrap();
    let journalctl = journal(tools.path());
    for (query, expected) in [
        ("query=kubelet", "--utc --no-pager --output=short-precise --unit=kubelet\n"),
        (
            "query=kubelet&sinceTime=2026-01-01T02:00:00.5%2B02:00&untilTime=2026-02-01T00:00:00Z&tailLines=5&pattern=a%20b&boot=-1",
            "--utc --no-pager --output=short-precise --since=2026-01-01 00:00:00 UTC --until=2026-02-01 00:00:00 UTC --pager-end --lines=5 --unit=kubelet --grep=a b --boot -1\n",
        ),
        ("query=plain", "plain\n"),
        ("query=dotted", "dotted\n"),
        ("query=nested", "nested\n"),
        ("query=none", "\nlog not found for none\n"),
        // The end of a unit's name is no unit.
        ("query=let", "\nlog not found for let\n"),
        // A link to a file outside is not followed.
        ("query=link", "\nlog not found for link\n"),
        ("query=..", "\nlog not found for ..\n"),
        ("query=kubelet&query=plain", "--utc --no-pager --output=short-precise --unit=kubelet\nplain\n"),
        (
            "query=plain&tailLines=1",
            "\noptions present and query resolved to log files for [plain]\ntry without specifying options\n",
        ),
    ] {
        assert_eq!(written(query, &journalctl, dir.path()), expected, "{query}");
    }
    // Files are read without a journal.
    assert_eq!(written("query=plain", "/no/such/journalctl", dir.path()), "plain\n");
}

/// A client that leaves when it has received something.
struct LeavingClient(Option<crate::util::stop::StopSource>);

impl Write for LeavingClient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = None;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_journal_is_not_read_on_when_the_client_has_left() {
    let tools = tempfile::tempdir().unwrap();
    let path = tools.path().join("journalctl");
    let script = "#!/bin/sh\nif [ \"$1\" = --field ]; then echo kubelet.service; else echo begun; exec sleep 1000; fi\n";
    crate::util::testing::program(&path, script);
    let query = Query::read(&Target::parse("/logs/?query=kubelet")).unwrap().unwrap();
    let (source, stop) = crate::util::stop::pair();
    let mut client = LeavingClient(Some(source));
    let begun = Instant::now();
    query.write(path.to_str().unwrap(), &mut client, tools.path(), &stop).unwrap();
    assert!(begun.elapsed() < LIMIT, "it was read until the limit of a query");
}

#[test]
fn incomplete_copy_of_a_file_is_an_error() {
    let dir = tree();
    let copied = |deadline: Instant| {
        let mut out = Vec::new();
        let problem = match copy(dir.path(), "plain", &mut out, deadline, &StopToken::never()) {
            Err(CopyError::Read(error)) => error_text(&error),
            Err(CopyError::Write(error)) => panic!("{error}"),
            Ok(()) => String::new(),
        };
        (String::from_utf8(out).unwrap(), problem)
    };
    assert_eq!(copied(Instant::now()), (String::new(), "context deadline exceeded".to_owned()));
    assert_eq!(copied(Instant::now() + LIMIT), ("plain\n".to_owned(), String::new()));
}

#[test]
fn query_response_is_compressed_on_request() {
    let dir = tree();
    let fixture = fixture(&dir);
    let mut request = request(Method::Get, "/logs/?query=plain");
    request.gzip = true;
    let response = fixture.send(&request);
    assert_eq!((response.status, response.header("Content-Encoding")), (200, "gzip"));
    assert_eq!(response.header("Content-Type"), "text/plain;charset=UTF-8");
    assert_eq!(gunzip(&response.body), "plain\n");
}
