//! `/logs/`: the files below `/var/log`, and queries of the node's own services.

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::query::{self, Query};
use crate::server::backend::NodeBackend;
use crate::server::http::request::{Method, Request};
use crate::server::http::response::{Reply, Response, html};
use crate::util::encoding::escape_percent;

/// The number of bytes between two checks of the stop token.
const BLOCK: usize = 64 * 1024;

pub(super) fn respond(request: &Request, node: &dyn NodeBackend) -> Result<Reply, Response> {
    let switches = node.switches();
    if !switches.system_logs {
        return Err(Response::text(405, "logs endpoint is disabled.\n"));
    }
    let path = request.target.path.strip_prefix("/logs/").ok_or_else(Response::not_found)?;
    if request.method != Method::Get {
        return Err(Response::not_allowed("GET"));
    }
    let root = node.log_dir();
    if switches.system_log_query
        && let Some(query) = Query::read(&request.target)?
    {
        if !matches!(path, "" | "/") {
            return Err(Response::text(406, "path not allowed in query mode\n"));
        }
        query.check(root)?;
        return match query.file() {
            Some(file) => serve(root, file),
            None => Ok(query::reply(query, request.gzip)),
        };
    }
    serve(root, path)
}

/// Serves `path` below `root`: a file, the list of a directory, or a redirect.
fn serve(root: &Path, path: &str) -> Result<Reply, Response> {
    let inner = path.trim_start_matches('/');
    if inner.split(['/', '\\']).any(|element| element == "..") || inner.contains('\0') {
        return Err(Response::text(400, "invalid URL path\n"));
    }
    if inner == "index.html" || inner.ends_with("/index.html") {
        return Err(redirect("./".to_owned()));
    }
    let slash = inner.is_empty() || inner.ends_with('/');
    // A file is not found under a path that ends in a slash.
    let inner = inner.trim_end_matches('/');
    let (found, metadata) = open(root, inner).map_err(rejection)?;
    let last = inner.rsplit('/').next().unwrap_or_default();
    if !metadata.is_dir() {
        return if slash {
            Err(redirect(format!("../{}", encode(last))))
        } else {
            file(found, &metadata, last)
        };
    }
    if !slash {
        return Err(redirect(format!("{}/", encode(last))));
    }
    match open(root, format!("{inner}/index.html").trim_start_matches('/')) {
        Ok((page, metadata)) if metadata.is_file() => file(page, &metadata, "index.html"),
        _ => list(&found).map(Reply::Whole),
    }
}

/// Opens `path` below `root` with O_PATH. Links are followed, but only to files below `root`: the
/// kernel reports the path of the opened file, so a link that changes meanwhile has no effect.
/// `path` has no `..`.
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
    let real = std::fs::read_link(handle(&found))?;
    if !real.starts_with(&root) {
        log::debug!("/logs/{path} leads out of {}: refused", root.display());
        return Err(ErrorKind::NotFound.into());
    }
    // The open of a pipe or a device could block or have side effects.
    let metadata = std::fs::metadata(handle(&found))?;
    if !metadata.is_file() && !metadata.is_dir() {
        return Err(ErrorKind::PermissionDenied.into());
    }
    Ok((found, metadata))
}

/// Finds a file without following the links of `/proc/<pid>`, such as `root` and `cwd`. They lead
/// into the mount namespaces of other processes, where another directory has the name of `root`.
fn resolve(root: &Path, path: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let whole = root.join(path);
    match rustix::fs::openat2(CWD, &whole, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS) {
        // Linux before 5.6 has no `openat2`: no link below `root` is followed.
        Err(Errno::NOSYS) => without_links(root, path),
        result => result,
    }
}

fn without_links(root: &Path, path: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let mut found = rustix::fs::open(root, flags, Mode::empty())?;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        found = rustix::fs::openat(&found, name, flags, Mode::empty())?;
        // PATH and NOFOLLOW together open the link itself.
        if FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) == FileType::Symlink {
            return Err(Errno::LOOP);
        }
    }
    Ok(found)
}

/// The path by which an O_PATH descriptor is opened for reading.
fn handle(found: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", found.as_raw_fd())
}

/// Opens a regular file for reading. A file on which a container holds a lease is an error, not a
/// wait for the container.
pub(super) fn read(found: &OwnedFd) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    Ok(File::from(rustix::fs::open(handle(found), flags, Mode::empty())?))
}

fn rejection(error: io::Error) -> Response {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => Response::not_found(),
        ErrorKind::PermissionDenied => Response::text(403, "403 Forbidden\n"),
        _ => Response::text(500, "500 Internal Server Error\n"),
    }
}

fn redirect(location: String) -> Response {
    Response::text(301, "").with("Location", &location)
}

/// A file, up to its present length.
fn file(found: OwnedFd, metadata: &Metadata, name: &str) -> Result<Reply, Response> {
    let mut file = read(&found).map_err(rejection)?;
    let mut start = Vec::with_capacity(512);
    (&mut file).take(512).read_to_end(&mut start).map_err(rejection)?;
    let content_type = content_type(name, &start);
    let length = metadata.len();
    Ok(Reply::stream(move |out, _, stop| {
        out.start(200, &[("Content-Type", content_type)], Some(length))?;
        let mut rest = io::Cursor::new(start).chain(file).take(length);
        let mut block = vec![0; BLOCK];
        while !stop.is_stopped() {
            match rest.read(&mut block) {
                Ok(0) => break,
                Ok(count) => out.write_all(block.get(..count).unwrap_or_default())?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }))
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

/// The most entries of a directory that a page lists: a container may make any number.
const ENTRIES: usize = 10_000;

/// The page that lists a directory.
fn list(found: &OwnedFd) -> Result<Response, Response> {
    let unreadable = |_| Response::text(500, "Error reading directory\n");
    let mut names = Vec::new();
    let mut entries = std::fs::read_dir(handle(found)).map_err(unreadable)?;
    for entry in entries.by_ref().take(ENTRIES) {
        let entry = entry.map_err(unreadable)?;
        let slash = if entry.file_type().is_ok_and(|kind| kind.is_dir()) { "/" } else { "" };
        names.push(format!("{}{slash}", entry.file_name().to_string_lossy()));
    }
    names.sort_unstable();
    let mut page =
        String::from("<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n");
    for name in names {
        // A colon in the first element would begin a scheme.
        let here = if name.contains(':') { "./" } else { "" };
        page.push_str(&format!("<a href=\"{here}{}\">{}</a>\n", encode(&name), html(&name)));
    }
    if entries.next().is_some() {
        page.push_str(&format!("The directory has more than {ENTRIES} entries.\n"));
    }
    page.push_str("</pre>\n");
    Ok(Response::new(200, "text/html; charset=utf-8", page.into_bytes()))
}

/// Percent-encodes a path for a URL.
fn encode(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~/$+,:;=@".contains(&byte);
    escape_percent(path.as_bytes(), is_plain, &mut out);
    out
}

#[cfg(test)]
mod tests;
