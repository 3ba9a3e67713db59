//! `/logs/`: the files below `/var/log`, and queries of the node's own services.

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::Deps;
use super::node_query::{self, Query};
use super::routes::{Answer, Asked, Method, Reply};
use super::streams::{Stream, head};

/// Passed on between two looks at the stop token.
const BLOCK: usize = 64 * 1024;

/// Answers one request.
pub(super) fn answer(asked: &Asked, deps: &Deps) -> Result<Reply, Answer> {
    let switches = deps.endpoints.switches;
    if !switches.system_logs {
        return Err(Answer::text(405, "logs endpoint is disabled.\n"));
    }
    // Without the slash there is nothing.
    let path = asked.target.path.strip_prefix("/logs/").ok_or_else(Answer::not_found)?;
    if asked.method != Method::Get {
        return Err(Answer::not_allowed("GET"));
    }
    let root = &deps.endpoints.log_dir;
    if switches.system_log_query
        && let Some(query) = Query::read(&asked.target)?
    {
        if !matches!(path, "" | "/") {
            return Err(Answer::text(406, "path not allowed in query mode\n"));
        }
        query.check(root)?;
        return match query.file() {
            Some(file) => serve(root, file),
            None => Ok(node_query::reply(query, asked.gzip)),
        };
    }
    serve(root, path)
}

/// Serves what is at `path` below `root`: a file, a list of a directory, or where else to look.
fn serve(root: &Path, path: &str) -> Result<Reply, Answer> {
    let inner = path.trim_start_matches('/');
    if inner.split(['/', '\\']).any(|element| element == "..") || inner.contains('\0') {
        return Err(Answer::text(400, "invalid URL path\n"));
    }
    if inner == "index.html" || inner.ends_with("/index.html") {
        return Err(elsewhere("./".to_owned()));
    }
    let slash = inner.is_empty() || inner.ends_with('/');
    // Without it, or a file would not be found.
    let inner = inner.trim_end_matches('/');
    let (found, metadata) = open(root, inner).map_err(refusal)?;
    let last = inner.rsplit('/').next().unwrap_or_default();
    if !metadata.is_dir() {
        return if slash {
            Err(elsewhere(format!("../{}", encode(last))))
        } else {
            file(found, &metadata, last)
        };
    }
    if !slash {
        return Err(elsewhere(format!("{}/", encode(last))));
    }
    match open(root, format!("{inner}/index.html").trim_start_matches('/')) {
        Ok((page, metadata)) if metadata.is_file() => file(page, &metadata, "index.html"),
        _ => list(&found).map(Reply::Whole),
    }
}

/// Opens what is at `path` below `root` without touching it. Links are followed, but only to
/// places below `root`: the kernel is asked where the file is after it was opened, so a link
/// that changes meanwhile makes no difference. `path` has no `..`.
// DIFFERS: the Go kubelet follows links to anywhere, so that a pod that can write to
// /var/log reads every file of the node.
pub(super) fn open(root: &Path, path: &str) -> io::Result<(OwnedFd, Metadata)> {
    let root = std::fs::canonicalize(root)?;
    let found = resolve(&root, path).map_err(|errno| match errno {
        Errno::LOOP => {
            log::debug!("/logs/{path} leads through links that are not followed");
            ErrorKind::NotFound.into()
        }
        errno => io::Error::from(errno),
    })?;
    let place = std::fs::read_link(handle(&found))?;
    if !place.starts_with(&root) {
        log::debug!("/logs/{path} leads out of {}: refused", root.display());
        return Err(ErrorKind::NotFound.into());
    }
    // What is neither would wait, or act.
    let metadata = std::fs::metadata(handle(&found))?;
    if !metadata.is_file() && !metadata.is_dir() {
        return Err(ErrorKind::PermissionDenied.into());
    }
    Ok((found, metadata))
}

/// Finds a file without following the links of `/proc/<pid>`, such as `root` and `cwd`. They
/// lead into the mount namespaces of other processes, where another directory has the name of
/// `root`.
fn resolve(root: &Path, path: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let whole = root.join(path);
    match rustix::fs::openat2(CWD, &whole, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS) {
        // Before Linux 5.6: no links at all below `root`.
        Err(Errno::NOSYS) => without_links(root, path),
        result => result,
    }
}

fn without_links(root: &Path, path: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let mut found = rustix::fs::open(root, flags, Mode::empty())?;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        found = rustix::fs::openat(&found, name, flags, Mode::empty())?;
        // With these flags the link itself is opened.
        if FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) == FileType::Symlink {
            return Err(Errno::LOOP);
        }
    }
    Ok(found)
}

/// The name by which a file that was only found is opened to be read.
fn handle(found: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", found.as_raw_fd())
}

/// Opens a regular file that was found. One on which a container holds a lease is an error
/// instead of a wait for the container.
pub(super) fn read(found: &OwnedFd) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    Ok(File::from(rustix::fs::open(handle(found), flags, Mode::empty())?))
}

fn refusal(why: io::Error) -> Answer {
    match why.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => Answer::not_found(),
        ErrorKind::PermissionDenied => Answer::text(403, "403 Forbidden\n"),
        _ => Answer::text(500, "500 Internal Server Error\n"),
    }
}

fn elsewhere(location: String) -> Answer {
    Answer { headers: vec![("Location", location)], ..Answer::text(301, "") }
}

/// A file as long as it is now, however it grows meanwhile.
fn file(found: OwnedFd, metadata: &Metadata, name: &str) -> Result<Reply, Answer> {
    let mut file = read(&found).map_err(refusal)?;
    let mut start = Vec::with_capacity(512);
    (&mut file).take(512).read_to_end(&mut start).map_err(refusal)?;
    let content_type = content_type(name, &start);
    let length = metadata.len();
    let show = move |out: &mut dyn Write, _: &Deps, stop: &crate::util::stop::StopToken| {
        head(out, content_type, &format!("Content-Length: {length}\r\n"))?;
        let mut rest = io::Cursor::new(start).chain(file).take(length);
        let mut block = vec![0; BLOCK];
        while !stop.is_stopped() {
            match rest.read(&mut block) {
                Ok(0) => break,
                Ok(count) => out.write_all(block.get(..count).unwrap_or_default())?,
                Err(why) if why.kind() == ErrorKind::Interrupted => {}
                Err(why) => return Err(why),
            }
        }
        Ok(())
    };
    Ok(Reply::Stream(Stream::Own(Box::new(show))))
}

fn content_type(name: &str, start: &[u8]) -> &'static str {
    let binary = |byte: &u8| matches!(byte, 0..=8 | 0x0b | 0x0e..=0x1a | 0x1c..=0x1f);
    match name.rsplit_once('.').map(|(_, ending)| ending) {
        Some("html" | "htm") => "text/html; charset=utf-8",
        Some("json") => "application/json",
        Some("gz") => "application/gzip",
        _ if start.iter().any(binary) => "application/octet-stream",
        _ => "text/plain; charset=utf-8",
    }
}

/// The page that lists a directory.
fn list(found: &OwnedFd) -> Result<Answer, Answer> {
    let unreadable = |_| Answer::text(500, "Error reading directory\n");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(handle(found)).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let slash = if entry.file_type().is_ok_and(|kind| kind.is_dir()) { "/" } else { "" };
        names.push(format!("{}{slash}", entry.file_name().to_string_lossy()));
    }
    names.sort_unstable();
    let mut page =
        String::from("<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n");
    for name in names {
        // A colon in its first element would make it another scheme.
        let here = if name.contains(':') { "./" } else { "" };
        page.push_str(&format!("<a href=\"{here}{}\">{}</a>\n", encode(&name), plain(&name)));
    }
    page.push_str("</pre>\n");
    Ok(Answer { content_type: "text/html; charset=utf-8", ..Answer::text(200, page) })
}

/// A path as it stands in a URL.
fn encode(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => out.push(char::from(byte)),
            b'-' | b'_' | b'.' | b'~' | b'/' | b'$' | b'+' | b',' | b':' | b';' | b'=' | b'@' => {
                out.push(char::from(byte));
            }
            other => out.push_str(&format!("%{other:02X}")),
        }
    }
    out
}

/// Text as it stands in a page.
pub(super) fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for one in text.chars() {
        match one {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests;
