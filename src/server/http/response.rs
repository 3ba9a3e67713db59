//! Responses: whole ones, and those that are written bit by bit.

use std::io;

use serde::Serialize;

use crate::server::deps::Deps;
use crate::transport::http1::target::BadParam;
use crate::transport::http1::{ResponseWriter, Target};
use crate::util::stop::StopToken;

/// A whole response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::server) struct Response {
    pub status: u16,
    pub content_type: &'static str,
    /// Further headers.
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
}

impl Response {
    pub(in crate::server) fn text(status: u16, body: impl Into<String>) -> Self {
        let body = body.into().into_bytes();
        Response { status, content_type: "text/plain; charset=utf-8", headers: Vec::new(), body }
    }

    pub(in crate::server) fn not_found() -> Self {
        Response::text(404, "404 page not found\n")
    }

    /// As above where the path begins like one that is served.
    pub(in crate::server) fn no_route() -> Self {
        Response::text(404, "404: Page Not Found")
    }

    /// The same path with a slash behind it is served.
    pub(in crate::server) fn with_slash(target: &Target) -> Self {
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

    /// The path accepts other methods only.
    pub(in crate::server) fn not_allowed(methods: &str) -> Self {
        Response {
            headers: vec![("Allow", methods.to_owned())],
            ..Response::text(405, "405: Method Not Allowed")
        }
    }

    /// There is no room now; the client is to retry.
    pub(in crate::server) fn too_many(text: impl Into<String>) -> Self {
        Response { headers: vec![("Retry-After", "1".to_owned())], ..Response::text(429, text) }
    }

    pub(in crate::server) fn json(value: &impl Serialize) -> Self {
        Response::written(serde_json::to_vec(value))
    }

    pub(in crate::server) fn written(json: serde_json::Result<Vec<u8>>) -> Self {
        match json {
            Ok(body) => Response { body, content_type: "application/json", ..Response::text(200, "") },
            Err(why) => Response::text(500, format!("cannot write the response as JSON: {why}\n")),
        }
    }

    /// Writes all of it.
    ///
    /// # Errors
    /// When the client is gone or too slow.
    pub(in crate::server) fn write(&self, out: &mut ResponseWriter<'_>) -> io::Result<()> {
        let mut fields = vec![("Content-Type", self.content_type)];
        // Some values come from the request's target: no one of them may end its line.
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

/// Writes a response, head and all. An error means that it is incomplete.
pub(in crate::server) type Stream = dyn FnOnce(&mut ResponseWriter<'_>, &Deps, &StopToken) -> io::Result<()>;

/// What a request leads to.
pub(in crate::server) enum Reply {
    /// All of it at once.
    Whole(Response),
    /// Bit by bit, or after a while.
    Stream(Box<Stream>),
}

impl Reply {
    pub(in crate::server) fn stream(
        write: impl FnOnce(&mut ResponseWriter<'_>, &Deps, &StopToken) -> io::Result<()> + 'static,
    ) -> Reply {
        Reply::Stream(Box::new(write))
    }
}

/// Text as it stands in a page of HTML.
pub(in crate::server) fn html(text: &str) -> String {
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
    use crate::transport::http1::Form;

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
