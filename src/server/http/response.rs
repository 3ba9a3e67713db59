//! Responses: whole ones and streams.

use std::io;

use jiff::Timestamp;
use serde::Serialize;

use crate::server::backend::NodeBackend;
use crate::transport::http1::target::BadParam;
use crate::transport::http1::{Form, ResponseWriter, Target};
use crate::util::stop::StopToken;

/// A whole response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    pub content_type: &'static str,
    /// Further headers.
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
}

impl Response {
    pub fn text(status: u16, body: impl Into<String>) -> Self {
        let body = body.into().into_bytes();
        Response { status, content_type: "text/plain; charset=utf-8", headers: Vec::new(), body }
    }

    pub fn not_found() -> Self {
        Response::text(404, "404 page not found\n")
    }

    /// For a path whose first element is served.
    pub fn no_route() -> Self {
        Response::text(404, "404: Page Not Found")
    }

    /// Redirects to the path with a slash at its end.
    pub fn with_slash(target: &Target) -> Self {
        let mut location = format!("{}/", target.path);
        if !target.query.is_empty() {
            location.push('?');
            location.push_str(&target.query);
        }
        let body = format!("<a href=\"{}\">Temporary Redirect</a>.\n\n", html(&location));
        Response {
            content_type: "text/html; charset=utf-8",
            headers: vec![("Location", location)],
            ..Response::text(307, body)
        }
    }

    /// `methods`: those that the path accepts.
    pub fn not_allowed(methods: &str) -> Self {
        Response {
            headers: vec![("Allow", methods.to_owned())],
            ..Response::text(405, "405: Method Not Allowed")
        }
    }

    /// A limit was reached; the client may retry.
    pub fn too_many(text: impl Into<String>) -> Self {
        Response { headers: vec![("Retry-After", "1".to_owned())], ..Response::text(429, text) }
    }

    pub fn json(value: &impl Serialize) -> Self {
        Response::written(serde_json::to_vec(value))
    }

    pub fn written(json: serde_json::Result<Vec<u8>>) -> Self {
        match json {
            Ok(body) => Response { body, content_type: "application/json", ..Response::text(200, "") },
            Err(why) => Response::text(500, format!("cannot write the response as JSON: {why}\n")),
        }
    }

    pub fn write(&self, out: &mut ResponseWriter<'_>) -> io::Result<()> {
        let mut fields = vec![("Content-Type", self.content_type)];
        // Some values come from the request's target: they must not contain a line end.
        let clean = |value: &str| !value.bytes().any(|byte| byte.is_ascii_control());
        let further = self.headers.iter().map(|(name, value)| (*name, value.as_str()));
        fields.extend(further.filter(|(_, value)| clean(value)));
        out.whole(self.status, &fields, &self.body)
    }
}

impl From<BadParam> for Response {
    fn from(bad: BadParam) -> Self {
        Response::text(400, format!("{bad}\n"))
    }
}

/// The form of a response after which the connection is closed.
pub const LAST: Form = Form { is_1_1: true, keep_alive: false, head_only: false };

/// A whole response as it is sent.
pub fn to_bytes(form: Form, status: u16, fields: &[(&str, &str)], text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    // Writing to memory does not fail.
    let _ = ResponseWriter::new(&mut out, form, Timestamp::now()).whole(status, fields, text.as_bytes());
    out
}

/// Writes a response with its head. After an error the response is incomplete.
pub type Stream = dyn FnOnce(&mut ResponseWriter<'_>, &dyn NodeBackend, &StopToken) -> io::Result<()>;

/// The reply to a request.
pub enum Reply {
    Whole(Response),
    /// Written while it is generated.
    Stream(Box<Stream>),
}

impl Reply {
    pub fn stream(
        write: impl FnOnce(&mut ResponseWriter<'_>, &dyn NodeBackend, &StopToken) -> io::Result<()> + 'static,
    ) -> Reply {
        Reply::Stream(Box::new(write))
    }
}

/// Escapes text for HTML.
pub fn html(text: &str) -> String {
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
mod tests {
    use super::*;

    #[test]
    fn header_value_cannot_end_its_line() {
        let mut out = Vec::new();
        let form = Form { is_1_1: true, keep_alive: true, head_only: false };
        let mut writer = ResponseWriter::new(&mut out, form, jiff::Timestamp::UNIX_EPOCH);
        let headers = vec![("Location", "/a\r\nX: y".to_owned()), ("Allow", "GET".to_owned())];
        Response { headers, ..Response::text(301, "") }.write(&mut writer).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(!text.contains("X: y") && text.contains("\r\nAllow: GET\r\n"), "{text}");
    }
}
