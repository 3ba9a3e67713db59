//! Hostile requests.

use super::request::{self, HEAD_BYTES, RequestHead};
use crate::util::fuzzing::{Budget, Target, repeated};
use crate::util::threads::Stack;

pub(in crate::transport) fn targets() -> Vec<Target> {
    vec![Target {
        name: "transport/request_head",
        // A connection's thread has a larger stack.
        stack: Stack::Small,
        max_bytes: HEAD_BYTES,
        budget: Budget::LINEAR,
        worst: |max| {
            let request = |line: &str, piece: &str| {
                repeated(&format!("{line}Host: a\r\n"), |_| piece.to_owned(), "\r\n", max)
            };
            let target = |piece: &str| {
                repeated("GET /", |_| piece.to_owned(), " HTTP/1.1\r\nHost: a\r\n\r\n", max)
            };
            vec![
                ("headers", request("GET / HTTP/1.1\r\n", "a: b\r\n")),
                ("empty headers", request("GET / HTTP/1.1\r\n", "a:\r\n")),
                ("connection tokens", request("GET / HTTP/1.1\r\nConnection: ", "a,")),
                ("parameters", target("?a=b&")),
                ("parameters without a name", target("&")),
                ("escapes", target("%41")),
                ("dots", target("../")),
                ("slashes", target("/")),
                ("carriage returns", b"\r".repeat(max)),
                ("line feeds", b"\n".repeat(max)),
                ("lines with a wrong end", b"\r\n\r".repeat(max / 3)),
            ]
        },
        seeds: &[
            b"GET /containerLogs/default/web/c?follow=true&tailLines=5 HTTP/1.1\r\nHost: a:10250\r\nAuthorization: Bearer x\r\nAccept-Encoding: gzip;q=0.5, identity\r\n\r\n",
            b"POST /exec/default/web/c?command=ls&command=%2F&output=1 HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        ],
        run: |bytes| {
            // Like a connection, the case searches for the end with each piece that arrives.
            let (mut length, mut searched) = (None, 0);
            for have in (1024..bytes.len()).step_by(1024).chain([bytes.len()]) {
                length = request::head_length(bytes.get(..have).unwrap_or_default(), searched);
                if length.is_some() {
                    break;
                }
                searched = have;
            }
            let (head, mut rest) = bytes.split_at(length.unwrap_or(bytes.len()).min(bytes.len()));
            if let Ok(head) = RequestHead::parse(head) {
                let _ = (head.keeps_alive(), head.is_websocket(), head.fields.get("accept"));
                let _ = (head.fields.has_element("connection", "upgrade"), head.target.get("command"));
                let _ = head.framing().read_up_to(&mut rest, HEAD_BYTES);
            }
        },
    }]
}
