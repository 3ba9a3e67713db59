use std::os::unix::fs::symlink;

use super::*;
use crate::server::node::tests::{Fixture, request};

fn tree() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("log");
    for inner in ["pods/p/c", "site", "empty"] {
        std::fs::create_dir_all(root.join(inner)).unwrap();
    }
    for (name, text) in [
        ("syslog", "line 1\nline 2\n"),
        ("bytes", "\0\u{1}\u{2}"),
        ("a b<&>.log", "odd\n"),
        ("x:y", "colon\n"),
        ("data.json", "{}"),
        ("old.gz", "\u{1f}"),
        ("pods/p/c/0.log", "container\n"),
        ("site/index.html", "<p>"),
    ] {
        std::fs::write(root.join(name), text).unwrap();
    }
    std::fs::write(dir.path().join("secret"), "secret").unwrap();
    std::fs::create_dir(dir.path().join("log-not")).unwrap();
    std::fs::write(dir.path().join("log-not/secret"), "secret").unwrap();
    // As the links of container logs: absolute, and below the root.
    symlink(root.join("pods/p/c/0.log"), root.join("container.log")).unwrap();
    symlink("pods/p", root.join("inside")).unwrap();
    symlink(dir.path().join("secret"), root.join("outside")).unwrap();
    symlink("../secret", root.join("above")).unwrap();
    symlink(dir.path(), root.join("parent")).unwrap();
    symlink("../log-not", root.join("neighbor")).unwrap();
    symlink("/", root.join("everything")).unwrap();
    symlink("loop", root.join("loop")).unwrap();
    symlink("nowhere", root.join("broken")).unwrap();
    symlink("/dev/zero", root.join("zero")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, root.join("pipe"), Mode::RUSR).unwrap();
    dir
}

fn fixture(dir: &tempfile::TempDir) -> Fixture {
    let root = dir.path().join("log");
    Fixture::new(|node| node.log_dir = root)
}

#[test]
fn list_of_a_very_large_directory_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    for number in 0..=super::ENTRIES {
        std::fs::write(dir.path().join(number.to_string()), "").unwrap();
    }
    let opened = OwnedFd::from(std::fs::File::open(dir.path()).unwrap());
    let page = super::list(&opened).unwrap().into_text();
    assert_eq!(page.matches("<a ").count(), super::ENTRIES);
    assert!(page.contains("The directory has more than 10000 entries."));
}

#[test]
fn log_files_and_directory_lists_are_served() {
    let dir = tree();
    let fixture = fixture(&dir);
    let response = fixture.get("/logs/syslog");
    assert_eq!(response.brief(), (200, "line 1\nline 2\n".to_owned()));
    assert_eq!(
        (response.header("Content-Length"), response.header("Content-Type")),
        ("14", "text/plain; charset=utf-8")
    );
    for (path, content_type) in [
        ("bytes", "application/octet-stream"),
        ("data.json", "application/json"),
        ("old.gz", "application/gzip"),
        ("site/", "text/html; charset=utf-8"),
        ("empty/", "text/html; charset=utf-8"),
    ] {
        let response = fixture.get(&format!("/logs/{path}"));
        assert_eq!((response.status, response.header("Content-Type")), (200, content_type), "{path}");
    }
    assert_eq!(fixture.get("/logs/site/").text(), "<p>");
    assert_eq!(
        fixture.get("/logs/pods/p/c/").text(),
        "<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n<a href=\"0.log\">0.log</a>\n</pre>\n"
    );
    let list = fixture.get("/logs/").text();
    for line in [
        "<a href=\"pods/\">pods/</a>",
        "<a href=\"a%20b%3C%26%3E.log\">a b&lt;&amp;&gt;.log</a>",
        "<a href=\"./x:y\">x:y</a>",
        "<a href=\"inside\">inside</a>",
    ] {
        assert!(list.contains(line), "{line}: {list}");
    }
    assert_eq!(fixture.get("/logs/a%20b%3C%26%3E.log").text(), "odd\n");
}

#[test]
fn paths_with_wrong_slashes_or_index_html_are_redirected() {
    let dir = tree();
    let fixture = fixture(&dir);
    for (path, location) in [
        ("/logs/pods", "pods/"),
        ("/logs/pods/p", "p/"),
        ("/logs/syslog/", "../syslog"),
        ("/logs/index.html", "./"),
        ("/logs/site/index.html", "./"),
        ("/logs/inside", "inside/"),
    ] {
        let response = fixture.get(path);
        assert_eq!((response.status, response.header("Location")), (301, location), "{path}");
    }
    assert_eq!(fixture.send(&request(Method::Put, "/logs/syslog")).status, 405);
}

#[test]
fn links_and_paths_out_of_the_log_directory_are_rejected() {
    let dir = tree();
    let fixture = fixture(&dir);
    assert_eq!(fixture.get("/logs/container.log").text(), "container\n");
    assert_eq!(fixture.get("/logs/inside/c/0.log").text(), "container\n");
    for path in [
        "outside",
        "above",
        "parent",
        "parent/",
        "parent/secret",
        "parent/log/parent/secret",
        "neighbor/secret",
        "everything/etc/passwd",
        "everything/",
        "broken",
        "syslog/below",
        "none",
        &format!("{}/secret", dir.path().display()),
        "/etc/passwd",
        "%2fetc%2fpasswd",
        &format!("{}x", "x/".repeat(300)),
    ] {
        let response = fixture.get(&format!("/logs/{path}"));
        assert_eq!(response.brief(), (404, "404 page not found\n".to_owned()), "{path}");
    }
    for path in ["../secret", "pods/../../secret", "%2e%2e/secret", "pods/..", "..", "..%5csecret", "a%00b"] {
        let response = fixture.get(&format!("/logs/{path}"));
        assert_eq!(response.brief(), (400, "invalid URL path\n".to_owned()), "{path}");
    }
    // Pipes and devices are not opened.
    assert_eq!(fixture.get("/logs/pipe").status, 403);
    assert_eq!(fixture.get("/logs/zero").status, 404);
    assert_eq!(fixture.get("/logs/loop").status, 404);
    // No list shows a directory outside.
    assert!(!fixture.get("/logs/parent").text().contains("secret"));
}

/// The path of a file that is found through such a link seems to be below the root, whichever mount
/// namespace it is in.
#[test]
fn links_of_processes_are_not_followed() {
    let dir = tree();
    let fixture = fixture(&dir);
    let root = dir.path().join("log");
    let (directory, file) = (File::open(&root).unwrap(), File::open(root.join("syslog")).unwrap());
    let fd = |file: &File| format!("/proc/self/fd/{}", file.as_raw_fd());
    for (name, target) in [
        ("process-root", format!("/proc/self/root{}/syslog", root.display())),
        ("process-file", fd(&file)),
        ("process-directory", format!("{}/syslog", fd(&directory))),
    ] {
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "line 1\nline 2\n");
        symlink(target, root.join(name)).unwrap();
        assert_eq!(fixture.get(&format!("/logs/{name}")).brief(), (404, "404 page not found\n".to_owned()));
    }
}

#[test]
fn without_openat2_no_link_is_followed() {
    let dir = tree();
    let root = dir.path().join("log");
    for (path, found) in [
        ("", true),
        ("syslog", true),
        ("pods/p/c/0.log", true),
        ("inside/c/0.log", false),
        ("outside", false),
    ] {
        assert_eq!(without_links(&root, path).is_ok(), found, "{path}");
    }
}

#[test]
fn log_file_is_opened_without_waiting_for_a_lease() {
    let dir = tree();
    let root = dir.path().join("log");
    let (found, _) = open(&root, "syslog").unwrap();
    let flags = rustix::fs::fcntl_getfl(read(&found).unwrap()).unwrap();
    assert!(flags.contains(OFlags::NONBLOCK));
}
