//! Responses: whole ones and streams.

use std::io::{self, Cursor};

use jiff::Timestamp;
use serde::Serialize;

use crate::server::backend::NodeBackend;
use crate::transport::http1::target::BadParam;
use crate::transport::http1::{BufferedResponse, Form, Header, ResponseWriter, StatusCode, Target};
use crate::util::encoding::{escape_html, escape_percent};
use crate::util::stop::StopToken;

/// A whole response.
pub(crate) struct Response(BufferedResponse);

impl Response {
    pub(crate) fn new(status: u16, content_type: &str, body: Vec<u8>) -> Self {
        let length = body.len();
        let whole =
            BufferedResponse::new(StatusCode(status), Vec::new(), Cursor::new(body), Some(length), None);
        Response(whole).with("Content-Type", content_type)
    }

    pub(crate) fn text(status: u16, body: impl Into<String>) -> Self {
        Response::new(status, "text/plain; charset=utf-8", body.into().into_bytes())
    }

    /// Adds a header field; one with a control character is left out, because values from the request's
    /// target must not end the line. A second `Content-Type` replaces the first one.
    pub(crate) fn with(self, name: &str, value: &str) -> Self {
        if value.bytes().any(|byte| byte.is_ascii_control()) {
            return self;
        }
        // As upstream in redirects.
        let mut escaped = String::with_capacity(value.len());
        escape_percent(value.as_bytes(), |byte| byte.is_ascii(), &mut escaped);
        match Header::from_bytes(name, escaped) {
            Ok(field) => Response(self.0.with_header(field)),
            Err(()) => self,
        }
    }

    pub(crate) fn with_status(self, status: u16) -> Self {
        Response(self.0.with_status_code(status))
    }

    pub(crate) fn not_found() -> Self {
        Response::text(404, "404 page not found\n")
    }

    /// For a path whose first element is served.
    pub(crate) fn no_route() -> Self {
        Response::text(404, "404: Page Not Found")
    }

    /// Redirects to the path with a slash at its end.
    pub(crate) fn with_slash(target: &Target) -> Self {
        let mut location = format!("{}/", target.path);
        if !target.query.is_empty() {
            location.push('?');
            location.push_str(&target.query);
        }
        let body = format!("<a href=\"{}\">Temporary Redirect</a>.\n\n", html(&location));
        Response::text(307, body).with("Content-Type", "text/html; charset=utf-8").with("Location", &location)
    }

    /// `methods`: those that the path accepts.
    pub(crate) fn not_allowed(methods: &str) -> Self {
        Response::text(405, "405: Method Not Allowed").with("Allow", methods)
    }

    /// A limit was reached; the client may retry.
    pub(crate) fn too_many(text: impl Into<String>) -> Self {
        Response::text(429, text).with("Retry-After", "1")
    }

    pub(crate) fn json(value: &impl Serialize) -> Self {
        Response::written(serde_json::to_vec(value))
    }

    pub(crate) fn written(json: serde_json::Result<Vec<u8>>) -> Self {
        match json {
            Ok(body) => Response::new(200, "application/json", body),
            Err(error) => Response::text(500, format!("cannot write the response as JSON: {error}\n")),
        }
    }

    pub(crate) fn write(self, out: &mut ResponseWriter<'_>) -> io::Result<()> {
        out.write_response(self.0)
    }
}

impl From<BadParam> for Response {
    fn from(bad: BadParam) -> Self {
        Response::text(400, format!("{bad}\n"))
    }
}

#[cfg(test)]
impl Response {
    pub(crate) fn status(&self) -> u16 {
        self.0.status_code().0
    }

    pub(crate) fn into_text(self) -> String {
        String::from_utf8(self.0.into_reader().into_inner()).unwrap()
    }
}

#[cfg(test)]
impl std::fmt::Debug for Response {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Response({})", self.status())
    }
}

/// The form of a response after which the connection is closed.
pub(crate) const LAST: Form = Form { is_1_1: true, keep_alive: false, head_only: false };

/// A whole response as it is sent.
pub(crate) fn to_bytes(form: Form, status: u16, fields: &[(&str, &str)], text: &str) -> Vec<u8> {
    let response = Response::text(status, text);
    let response = fields.iter().fold(response, |response, (name, value)| response.with(name, value));
    let mut out = Vec::new();
    // Writing to memory does not fail.
    let _ = response.write(&mut ResponseWriter::new(&mut out, form, Timestamp::now()));
    out
}

/// Writes a response with its head. After an error the response is incomplete.
pub(crate) type Stream = dyn FnOnce(&mut ResponseWriter<'_>, &dyn NodeBackend, &StopToken) -> io::Result<()>;

/// The reply to a request.
pub(crate) enum Reply {
    Whole(Response),
    /// Written while it is generated.
    Stream(Box<Stream>),
}

impl Reply {
    pub(crate) fn stream(
        write: impl FnOnce(&mut ResponseWriter<'_>, &dyn NodeBackend, &StopToken) -> io::Result<()> + 'static,
    ) -> Reply {
        Reply::Stream(Box::new(write))
    }
}

/// Escapes text for HTML.
pub(crate) fn html(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    escape_html(text, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_value_cannot_end_its_line() {
        let mut out = Vec::new();
        let form = Form { is_1_1: true, keep_alive: true, head_only: false };
        let mut writer = ResponseWriter::new(&mut out, form, jiff::Timestamp::UNIX_EPOCH);
        let response = Response::text(301, "").with("Location", "/a\r\nX: y").with("Allow", "GET");
        response.with("A", "/\u{e4} b").write(&mut writer).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(!text.contains("X: y") && text.contains("\r\nAllow: GET\r\nA: /%C3%A4 b\r\n"), "{text}");
    }
}
