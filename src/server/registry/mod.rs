//! The registry of image archives: a read-only OCI distribution registry on loopback, from which the
//! container runtime pulls the images of archives (room `images`) like those of any registry.
//!
//! Layout: `images` (what is served), `settings` (with the tokens), `path` (pure: which document a
//! path names), `range` (pure: which bytes of a blob), `fault` (errors as the specification says),
//! `publish` (the file that tells the runtime the address and the token).
//! Invariants: a request without the token gets a 404; nothing can be written; a blob has exactly
//! the announced number of bytes, or its connection ends early; memory is bounded by two buffers of
//! 64 KiB per connection.
//! Source: OCI Distribution Specification 1.1.

mod fault;
pub(super) mod images;
mod path;
pub(super) mod publish;
mod range;
pub(super) mod settings;
#[cfg(test)]
mod tests;

use std::io::{self, Read, Write};

use serde_json::json;

use super::http::request::{Method, Request};
use super::http::response::{Reply, Response};
use crate::images::{Document, LookupError};
use crate::model::image_name;
use crate::transport::http1::ResponseWriter;
use fault::{Fault, VERSION, json_response};
use images::{BlobSource, Images};
use path::Resource;
use range::ByteRange;
use settings::RegistrySettings;

/// The size of a read of a blob.
const BUFFER_BYTES: usize = 64 * 1024;

/// The methods that a path accepts.
const METHODS: &str = "GET, HEAD";

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
    match path::resource(rest, target.get("ns"))? {
        Resource::Api => Ok(whole(api())),
        Resource::Tags { repository } => {
            let tags = images.tags(&repository);
            if tags.is_empty() {
                return Err(Fault::new(404, "NAME_UNKNOWN", "no archive has this repository"));
            }
            let name = path::name(rest);
            Ok(whole(json_response(200, &json!({"name": name, "tags": tags}))))
        }
        Resource::Manifest { repository, reference } => {
            let refused = |refusal| Fault::refused("MANIFEST_UNKNOWN", refusal);
            Ok(document(images.manifest(&repository, reference).map_err(refused)?))
        }
        Resource::Blob { digest } => {
            let source = images.blob(digest).map_err(|refusal| Fault::refused("BLOB_UNKNOWN", refusal))?;
            Ok(blob(digest.to_owned(), source, &request.range, request.method == Method::Get))
        }
    }
}

/// The manifest of an image by its whole name, for the local commands.
pub(super) fn manifest_by_name(image: &str, images: &dyn Images) -> Result<Reply, Response> {
    let repository = image_name::repository(image);
    let tag = || image.get(repository.len()..).and_then(|rest| rest.strip_prefix(':'));
    let reference = image.split_once('@').map(|(_, digest)| digest).or_else(tag);
    let reference = reference.ok_or_else(|| Response::text(400, "name an image with a tag\n"))?;
    images.manifest(repository, reference).map(document).map_err(|refusal| local(&refusal))
}

/// A blob, for the local commands.
pub(super) fn blob_of(digest: &str, images: &dyn Images) -> Result<Reply, Response> {
    let source = images.blob(digest).map_err(|refusal| local(&refusal))?;
    Ok(blob(digest.to_owned(), source, "", true))
}

fn local(refusal: &LookupError) -> Response {
    let status = if matches!(refusal, LookupError::Unknown(_)) { 404 } else { 503 };
    Response::text(status, format!("{refusal}\n"))
}

/// The response to a request with another method.
pub(super) fn not_allowed() -> Response {
    Fault::new(405, "UNSUPPORTED", "this registry is read-only").response().with("Allow", METHODS)
}

fn api() -> Response {
    json_response(200, &json!({}))
}

fn whole(response: Response) -> Reply {
    Reply::Whole(response)
}

fn document(document: Document) -> Reply {
    Reply::stream(move |out, _, _| {
        let Document { media_type, digest, bytes } = document;
        let is_clean = !media_type.is_empty() && media_type.bytes().all(|byte| matches!(byte, b' '..=b'~'));
        let kind = if is_clean { media_type.as_str() } else { "application/octet-stream" };
        Response::new(200, kind, bytes)
            .with("Docker-Content-Digest", &digest)
            .with("ETag", &format!("\"{digest}\""))
            .with(VERSION.0, VERSION.1)
            .write(out)
    })
}

fn blob(digest: String, source: BlobSource, range: &str, is_get: bool) -> Reply {
    // A range has a meaning for a GET only.
    let size = source.size;
    let byte_range = range::byte_range(if is_get { range } else { "" }, size);
    if byte_range == ByteRange::Unsatisfiable {
        let response = Fault::new(416, "RANGE_INVALID", "the range begins after the end").response();
        return whole(response.with("Content-Range", &format!("bytes */{size}")));
    }
    Reply::stream(move |out, _, stop| {
        let (from, length) = byte_range.bytes(size);
        // Opened before the head is sent, so that the runtime receives the reason of a failure.
        let opened = is_get.then(|| (source.open)(from, stop)).transpose();
        let reader = match opened {
            Ok(reader) => reader,
            Err(error) => {
                log::warn!("a layer or configuration of an image is not served: {error}");
                return Fault::new(503, "UNAVAILABLE", error.to_string()).response().write(out);
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
        let status = if byte_range == ByteRange::Whole { 200 } else { 206 };
        fields.extend((status == 206).then_some(("Content-Range", content_range.as_str())));
        out.start(status, &fields, Some(length))?;
        reader.map_or(Ok(()), |reader| copy(reader, out, &digest, length))
    })
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
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            read => read,
        }
        .inspect_err(|error| log::warn!("blob {digest} ends {left} bytes too early: {error}"))?;
        out.write_all(piece.get(..count).unwrap_or_default())?;
        left = left.saturating_sub(count as u64);
    }
    Ok(())
}
