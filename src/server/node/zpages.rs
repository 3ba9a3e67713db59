//! Pages about the agent: `/configz`, `/flagz`, `/statusz`, `/debug`.

use std::fmt::Write as _;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::{Value, json};

use crate::server::backend::NodeBackend;
use crate::server::http::request::{Method, Request};
use crate::server::http::response::Response;
use crate::server::views::KUBERNETES_VERSION;
use crate::util::logging;

const GROUP: &str = "config.k8s.io";
/// The deprecated version and the current one.
const VERSIONS: [&str; 2] = ["v1alpha1", "v1beta1"];

pub(super) fn configz(node: &dyn NodeBackend) -> Response {
    Response::json(&json!({"kubeletconfig": node.configuration()}))
}

pub(super) fn flagz(request: &Request, node: &dyn NodeBackend) -> Result<Response, Response> {
    let flags = || node.flags();
    let form = negotiate(request, "Flagz")?;
    if form == Form::Text {
        let mut text = title("flagz");
        for (name, value) in flags() {
            let _ = writeln!(text, "{name}={value}");
        }
        return Ok(Response::text(200, text));
    }
    let flags: serde_json::Map<String, Value> =
        flags().into_iter().map(|(name, value)| (name, value.into())).collect();
    Ok(object(form, "Flagz", json!({"flags": flags})))
}

pub(super) fn statusz(request: &Request, node: &dyn NodeBackend) -> Result<Response, Response> {
    let form = negotiate(request, "Statusz")?;
    let started = node.started();
    let up = Timestamp::now().as_second().saturating_sub(started.as_second()).max(0);
    let binary = KUBERNETES_VERSION.trim_start_matches('v');
    let release = binary.rsplit_once('.').map_or(binary, |(release, _)| release);
    // DIFFERS: this agent is not written in Go; the field has its version.
    let made_with = concat!("none (coracle ", env!("CARGO_PKG_VERSION"), ")");
    let paths = paths(node);
    if form == Form::Text {
        let mut text = title("statusz");
        let begun = started.to_zoned(TimeZone::UTC).strftime("%a %b %e %H:%M:%S UTC %Y");
        let _ = write!(
            text,
            "\nStarted: {begun}\nUp: {} hr {:02} min {:02} sec\nGo version: {made_with}\nBinary version: {binary}\nEmulation version: {release}\nPaths: {}\n",
            up / 3600,
            up / 60 % 60,
            up % 60,
            paths.join(" ")
        );
        return Ok(Response::text(200, text));
    }
    let begun = Timestamp::from_second(started.as_second()).unwrap_or(started).to_string();
    let fields = json!({
        "startTime": begun, "uptimeSeconds": up, "goVersion": made_with, "binaryVersion": binary,
        "emulationVersion": release, "paths": paths,
    });
    Ok(object(form, "Statusz", fields))
}

/// `/debug/…`: only the log level can be set.
pub(super) fn debug(request: &Request, node: &dyn NodeBackend) -> Response {
    let switches = node.switches();
    let path = request.target.path.as_str();
    if path == "/debug/flags/v" {
        return if switches.debug_flags { verbosity(request) } else { disabled("flags") };
    }
    // DIFFERS: the Go kubelet serves profiles of the Go runtime.
    match path.starts_with("/debug/pprof/") {
        true if !switches.profiling => disabled("profiling"),
        true if request.method != Method::Get => Response::not_allowed("GET"),
        _ => Response::not_found(),
    }
}

fn disabled(what: &str) -> Response {
    Response::text(405, format!("{what} endpoint is disabled.\n"))
}

fn verbosity(request: &Request) -> Response {
    let (status, text) = if request.method != Method::Put {
        (406, "unsupported http method\n".to_owned())
    } else {
        let given = String::from_utf8_lossy(&request.body);
        match given.parse::<i32>() {
            Ok(level) => {
                logging::set_verbosity(level);
                log::info!("log verbosity set to {level}");
                (200, format!("successfully set klog.logging.verbosity to {given}\n"))
            }
            Err(_) => {
                let reason = format!("strconv.ParseInt: parsing {given:?}: invalid syntax");
                (400, format!("failed set klog.logging.verbosity {given}: {reason}\n"))
            }
        }
    };
    Response::new(status, "text/plain", text.into_bytes())
}

fn title(what: &str) -> String {
    format!(
        "\nkubelet {what}\nWarning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.\n"
    )
}

fn paths(node: &dyn NodeBackend) -> Vec<&'static str> {
    let switches = node.switches();
    let all = [
        (switches.debugging, "/attach"),
        (switches.debugging && switches.checkpoint, "/checkpoint"),
        (switches.debugging, "/configz"),
        (switches.debugging, "/containerLogs"),
        (switches.debugging, "/debug"),
        (switches.debugging, "/exec"),
        (switches.debugging && switches.flagz, "/flagz"),
        (true, "/healthz"),
        (switches.debugging, "/logs"),
        (true, "/metrics"),
        (true, "/pods"),
        (switches.debugging, "/portForward"),
        (switches.debugging, "/run"),
        (switches.debugging, "/runningpods"),
        (true, "/stats"),
        (switches.debugging && switches.statusz, "/statusz"),
    ];
    all.into_iter().filter(|(there, _)| *there).map(|(_, path)| path).collect()
}

/// The requested format of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Text,
    Object { version: &'static str, yaml: bool },
}

/// The first acceptable format of the `Accept` header, which names kind, group and version for an
/// object.
fn negotiate(request: &Request, kind: &str) -> Result<Form, Response> {
    if request.accept.trim().is_empty() {
        return Ok(Form::Text);
    }
    for media_range in request.accept.split(',') {
        let mut parts = media_range.split(';').map(str::trim);
        let media = parts.next().unwrap_or_default();
        let parameters: Vec<(&str, &str)> = parts
            .filter_map(|part| part.split_once('='))
            .map(|(key, value)| (key.trim(), value.trim().trim_matches('"')))
            .filter(|(key, _)| *key != "q")
            .collect();
        let value = |wanted| parameters.iter().find(|(key, _)| *key == wanted).map(|(_, value)| *value);
        if matches!(media, "application/json" | "application/yaml") {
            let version = VERSIONS.into_iter().find(|version| value("v") == Some(*version));
            if let (Some(GROUP), Some(named), Some(version)) = (value("g"), value("as"), version)
                && named == kind
            {
                return Ok(Form::Object { version, yaml: media == "application/yaml" });
            }
        }
        let plain =
            parameters.iter().all(|(key, value)| *key == "charset" && value.eq_ignore_ascii_case("utf-8"));
        if matches!(media, "text/plain" | "text/*" | "*/*") && plain {
            return Ok(Form::Text);
        }
    }
    let forms = format!("text/plain, application/json;g={GROUP};v={};as={kind}", VERSIONS[1]);
    Err(Response::text(406, format!("only the following media types are accepted: {forms}\n")))
}

fn object(form: Form, kind: &str, fields: Value) -> Response {
    let Form::Object { version, yaml } = form else { return Response::json(&fields) };
    let mut object = json!({
        "kind": kind, "apiVersion": format!("{GROUP}/{version}"), "metadata": {"name": "kubelet"},
    });
    if let (Some(object), Value::Object(fields)) = (object.as_object_mut(), fields) {
        object.extend(fields);
    }
    // JSON is also YAML.
    let content_type = if yaml { "application/yaml" } else { "application/json" };
    let response = Response::json(&object).with("Content-Type", content_type);
    if version == VERSIONS[0] {
        let text =
            format!("299 - \"{GROUP}/{version} {kind} is deprecated, use {GROUP}/{} {kind}\"", VERSIONS[1]);
        return response.with("Warning", &text);
    }
    response
}

#[cfg(test)]
mod tests;
