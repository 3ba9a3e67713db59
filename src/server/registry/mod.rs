//! The registry of image archives: a read-only OCI distribution registry on loopback, from which the
//! container runtime pulls the images of the room `image_set` like those of any registry.
//!
//! Layout: `path` (pure: which document a path names), `range` (pure: which bytes of a blob),
//! `publish` (the file that tells the runtime the address and the token).
//! Invariants: a request without the token gets a 404; nothing can be written; a blob has exactly
//! the announced number of bytes, or its connection ends early; memory is bounded by two buffers of
//! 64 KiB per connection.
//! Source: OCI Distribution Specification 1.1.

mod path;
pub(super) mod publish;
mod range;
#[cfg(test)]
mod tests;

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::path::PathBuf;

use serde_json::json;

use super::http::request::{Method, Request};
use super::http::response::{Reply, Response};
use crate::image_set::{Document, ImageSet, Refusal, SetReport};
use crate::transport::http1::ResponseWriter;
use crate::util::stop::StopToken;
use crate::util::{token, untrusted};
use path::Wanted;
use range::Part;

/// The size of a read of a blob.
const BUFFER_BYTES: usize = 64 * 1024;

/// The methods that a path accepts.
const METHODS: &str = "GET, HEAD";

/// A sign of this API, which old clients require.
const VERSION: (&str, &str) = ("Docker-Distribution-Api-Version", "registry/2.0");

/// The set of images as the registry and the local API need it.
pub trait Images: Send + Sync {
    /// See [`ImageSet::manifest`].
    ///
    /// # Errors
    /// When no archive has it, or it cannot be read.
    fn manifest(&self, repository: &str, reference: &str) -> Result<Document, Refusal>;

    /// See [`ImageSet::blob`].
    ///
    /// # Errors
    /// When no archive has it.
    fn blob(&self, digest: &str) -> Result<BlobSource, Refusal>;

    /// See [`ImageSet::tags`].
    fn tags(&self, repository: &str) -> Vec<String>;

    /// See [`ImageSet::report`].
    fn report(&self) -> SetReport;

    /// See [`ImageSet::rescan`].
    fn rescan(&self);

    /// See [`ImageSet::set_registry`].
    fn set_registry(&self, address: &str);
}

/// A blob that can be opened.
pub struct BlobSource {
    /// Its size in bytes.
    pub size: u64,
    /// Opens it for reading from an offset to its end, or to the stop signal.
    pub open: Box<OpenBlob>,
}

pub type OpenBlob = dyn Fn(u64, &StopToken) -> Result<Box<dyn Read + Send>, String> + Send;

impl Images for ImageSet {
    fn manifest(&self, repository: &str, reference: &str) -> Result<Document, Refusal> {
        ImageSet::manifest(self, repository, reference)
    }

    fn blob(&self, digest: &str) -> Result<BlobSource, Refusal> {
        let blob = ImageSet::blob(self, digest)?;
        Ok(BlobSource { size: blob.size, open: Box::new(move |from, stop| blob.open(from, stop)) })
    }

    fn tags(&self, repository: &str) -> Vec<String> {
        ImageSet::tags(self, repository)
    }

    fn report(&self) -> SetReport {
        ImageSet::report(self)
    }

    fn rescan(&self) {
        ImageSet::rescan(self);
    }

    fn set_registry(&self, address: &str) {
        ImageSet::set_registry(self, address);
    }
}

/// The registry's settings.
pub struct RegistrySettings {
    /// A loopback address; port 0: a free one.
    pub address: SocketAddr,
    /// The file for the runtime: `hosts.toml` of containerd.
    pub mirror_file: PathBuf,
    /// A file with a second token, for runtimes whose configuration does not change with each start
    /// of the agent. It may be absent.
    pub node_token: PathBuf,
    /// The token of this start.
    pub token: String,
}

impl RegistrySettings {
    /// Settings with a new token.
    ///
    /// # Errors
    /// When the kernel returns no random bytes.
    pub fn new(address: SocketAddr, mirror_file: PathBuf, node_token: PathBuf) -> io::Result<Self> {
        Ok(RegistrySettings { address, mirror_file, node_token, token: token::new()? })
    }

    /// Whether a request with this token is served.
    fn admits(&self, given: &str) -> bool {
        token::equal(given, &self.token)
            || self.read_node_token().is_some_and(|own| token::equal(given, &own))
    }

    fn read_node_token(&self) -> Option<String> {
        let mut text = String::new();
        let file = untrusted::open(&self.node_token).ok()?;
        file.take(2 * token::DIGITS as u64).read_to_string(&mut text).ok()?;
        Some(text.trim().to_owned())
    }
}

/// Responds to a GET or a HEAD.
pub(super) fn respond(request: &Request, settings: Option<&RegistrySettings>, images: &dyn Images) -> Reply {
    match route(request, settings, images) {
        Ok(reply) => reply,
        Err(fault) => Reply::Whole(fault.response()),
    }
}

fn route(
    request: &Request,
    settings: Option<&RegistrySettings>,
    images: &dyn Images,
) -> Result<Reply, Fault> {
    let target = &request.target;
    let (given, rest) = match path::split(&target.path).ok_or(Fault::NO_PATH)? {
        // The runtime CRI-O requires a 200 here, before it sends the path with the token.
        ("", "") => return Ok(whole(api())),
        parts => parts,
    };
    if !settings.is_some_and(|settings| settings.admits(given)) {
        return Err(Fault::NO_PATH);
    }
    match path::wanted(rest, target.get("ns"))? {
        Wanted::Api => Ok(whole(api())),
        Wanted::Tags { repository } => {
            let tags = images.tags(&repository);
            if tags.is_empty() {
                return Err(Fault::new(404, "NAME_UNKNOWN", "no archive has this repository"));
            }
            let name = path::name(rest);
            Ok(whole(json_response(200, &json!({"name": name, "tags": tags}))))
        }
        Wanted::Manifest { repository, reference } => {
            let refused = |why| Fault::refused("MANIFEST_UNKNOWN", why);
            Ok(document(images.manifest(&repository, reference).map_err(refused)?))
        }
        Wanted::Blob { digest } => {
            let source = images.blob(digest).map_err(|why| Fault::refused("BLOB_UNKNOWN", why))?;
            blob(digest.to_owned(), source, request)
        }
    }
}

/// The response to a request with another method.
pub(super) fn not_allowed() -> Response {
    let mut response = Fault::new(405, "UNSUPPORTED", "this registry is read-only").response();
    response.headers.push(("Allow", METHODS.to_owned()));
    response
}

fn api() -> Response {
    json_response(200, &json!({}))
}

fn whole(response: Response) -> Reply {
    Reply::Whole(response)
}

fn json_response(status: u16, document: &serde_json::Value) -> Response {
    let headers = vec![(VERSION.0, VERSION.1.to_owned())];
    Response { status, headers, ..Response::json(document) }
}

fn document(document: Document) -> Reply {
    Reply::stream(move |out, _, _| {
        let Document { media_type, digest, bytes } = &document;
        let is_clean = !media_type.is_empty() && media_type.bytes().all(|byte| matches!(byte, b' '..=b'~'));
        let kind = if is_clean { media_type.as_str() } else { "application/octet-stream" };
        let tag = format!("\"{digest}\"");
        out.whole(
            200,
            &[
                ("Content-Type", kind),
                ("Docker-Content-Digest", digest.as_str()),
                ("ETag", tag.as_str()),
                VERSION,
            ],
            bytes,
        )
    })
}

fn blob(digest: String, source: BlobSource, request: &Request) -> Result<Reply, Fault> {
    // A range has a meaning for a GET only.
    let is_get = request.method == Method::Get;
    let size = source.size;
    let part = range::part(if is_get { &request.range } else { "" }, size);
    if part == Part::Outside {
        let mut response = Fault::new(416, "RANGE_INVALID", "the range begins after the end").response();
        response.headers.push(("Content-Range", format!("bytes */{size}")));
        return Ok(whole(response));
    }
    Ok(Reply::stream(move |out, _, stop| {
        let (from, length) = part.bytes(size);
        // Opened before the head is sent, so that the runtime receives the reason of a failure.
        let opened = is_get.then(|| (source.open)(from, stop)).transpose();
        let reader = match opened {
            Ok(reader) => reader,
            Err(why) => {
                log::warn!("a layer or configuration of an image is not served: {why}");
                return Fault::new(503, "UNAVAILABLE", why).response().write(out);
            }
        };
        let (tag, content_range) =
            (format!("\"{digest}\""), format!("bytes {from}-{}/{size}", (from + length).saturating_sub(1)));
        let mut fields = vec![
            ("Content-Type", "application/octet-stream"),
            ("Docker-Content-Digest", digest.as_str()),
            ("ETag", tag.as_str()),
            ("Accept-Ranges", "bytes"),
            VERSION,
        ];
        let status = if part == Part::Whole { 200 } else { 206 };
        fields.extend((status == 206).then_some(("Content-Range", content_range.as_str())));
        out.start(status, &fields, Some(length))?;
        reader.map_or(Ok(()), |reader| copy(reader, out, &digest, length))
    }))
}

/// Sends exactly `length` bytes.
fn copy(
    mut reader: Box<dyn Read + Send>,
    out: &mut ResponseWriter<'_>,
    digest: &str,
    length: u64,
) -> io::Result<()> {
    let mut left = length;
    let mut buffer = vec![0; BUFFER_BYTES.min(usize::try_from(length).unwrap_or(BUFFER_BYTES))];
    while left > 0 {
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let piece = buffer.get_mut(..most).unwrap_or_default();
        let count = match reader.read(piece) {
            Err(why) if why.kind() == io::ErrorKind::Interrupted => continue,
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            read => read,
        }
        .inspect_err(|why| log::warn!("blob {digest} ends {left} bytes too early: {why}"))?;
        out.write_all(piece.get(..count).unwrap_or_default())?;
        left = left.saturating_sub(count as u64);
    }
    Ok(())
}

/// Why a request fails: status, code of the specification, and a text for people.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Fault {
    status: u16,
    code: &'static str,
    message: String,
}

impl Fault {
    /// Also for a wrong token: a client without it learns nothing.
    const NO_PATH: Fault = Fault { status: 404, code: "NAME_UNKNOWN", message: String::new() };

    fn new(status: u16, code: &'static str, message: impl Into<String>) -> Fault {
        Fault { status, code, message: message.into() }
    }

    fn refused(code: &'static str, refusal: Refusal) -> Fault {
        match refusal {
            Refusal::Unknown(why) => Fault::new(404, code, why),
            Refusal::Unavailable(why) => {
                log::warn!("an image is not served: {why}");
                Fault::new(503, "UNAVAILABLE", why)
            }
        }
    }

    fn response(&self) -> Response {
        let Fault { status, code, message } = self;
        json_response(*status, &json!({"errors": [{"code": code, "message": message}]}))
    }
}
