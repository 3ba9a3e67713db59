//! Node log queries: `/logs/?query=<service or file>`, for `enableSystemLogQuery`.

use std::fmt::Write as _;
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::files;
use crate::server::http::response::{Reply, Response};
use crate::transport::http1::Target;
use crate::util::child::{self, ChildError, Limits};
use crate::util::gzip::Gzip;
use crate::util::stop::StopToken;

/// The limit of a query.
const LIMIT: Duration = Duration::from_secs(30);
/// The limit of the list of units.
const UNITS_BYTES: usize = 4 * 1024 * 1024;
const MAX_TAIL: i64 = 100_000;
const MAX_NAME: usize = 256;
const MAX_SERVICES: usize = 4;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Query {
    services: Vec<String>,
    files: Vec<String>,
    since: Option<Timestamp>,
    until: Option<Timestamp>,
    tail: Option<i64>,
    boot: Option<i64>,
    pattern: String,
}

impl Query {
    /// Parses the parameters; `None`: none is of a query.
    pub(super) fn read(target: &Target) -> Result<Option<Query>, Response> {
        let mut problems = Vec::new();
        let mut query = Query::default();
        let queries: Vec<&str> = target.all("query").collect();
        for text in &queries {
            if text.contains(['/', '\\']) {
                query.files.push((*text).to_owned());
            } else if !text.trim().is_empty() {
                query.services.push((*text).to_owned());
            }
        }
        if !queries.is_empty() && query.files.is_empty() && query.services.is_empty() {
            problems.push(invalid("query", &json(&queries), "query cannot be empty"));
        }
        let filled = |key| target.get(key).filter(|text| !text.is_empty());
        for (key, value) in [("sinceTime", &mut query.since), ("untilTime", &mut query.until)] {
            match filled(key).map(|text| (text, text.parse())) {
                None => {}
                Some((_, Ok(time))) => *value = Some(time),
                Some((text, Err(_))) => problems.push(invalid(key, &json(&text), "invalid time format")),
            }
        }
        for (key, value) in [("boot", &mut query.boot), ("tailLines", &mut query.tail)] {
            match filled(key).map(|text| (text, text.parse())) {
                None => {}
                Some((_, Ok(number))) => *value = Some(number),
                Some((text, Err(_))) => {
                    let reason = format!("strconv.Atoi: parsing {}: invalid syntax", json(&text));
                    problems.push(invalid(key, &json(&text), &reason));
                }
            }
        }
        filled("pattern").unwrap_or_default().clone_into(&mut query.pattern);
        reject(400, &problems)?;
        Ok((query != Query::default()).then_some(query))
    }

    pub(super) fn check(&self, root: &Path) -> Result<(), Response> {
        let mut problems = Vec::new();
        for service in &self.services {
            let safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':' | '@');
            if service.len() > MAX_NAME {
                problems.push(invalid("query", &json(service), "length must be less than 100"));
            } else if !service.chars().all(safe) {
                problems.push(invalid("query", &json(service), "input contains unsupported characters"));
            }
        }
        if self.services.len() > MAX_SERVICES {
            let count = self.services.len();
            problems.push(format!("query: Too many: {count}: must have at most {MAX_SERVICES} items"));
        }
        match self.files.as_slice() {
            [] if self.services.is_empty() => {
                problems.push("query: Required value: cannot be empty with options".to_owned());
            }
            [] => {}
            files if !self.services.is_empty() => {
                let both = format!("[{}], [{}]", files.join(" "), self.services.join(" "));
                problems.push(invalid("query", &json(&both), "cannot specify a file and service"));
            }
            [file] if self.has_options() => {
                problems.push(invalid("query", &json(&[file]), "cannot specify file with options"));
            }
            [file] if file.split('/').any(|part| part == "..") => {
                problems.push(invalid("query", &json(&[file]), "no such file or directory"));
            }
            [file] => {
                if let Err(error) = files::open(root, file.trim_start_matches('/')) {
                    problems.push(invalid("query", &json(&[file]), &error_text(&error)));
                }
            }
            files => problems.push(invalid("query", &json(&files), "cannot specify more than one file")),
        }
        if let (Some(since), Some(until)) = (self.since, self.until)
            && since > until
        {
            problems.push(invalid("untilTime", &json(&until.to_string()), "must be after `sinceTime`"));
        }
        if let Some(boot) = self.boot.filter(|boot| *boot > 0) {
            problems.push(invalid("boot", &boot.to_string(), "must be less than 1"));
        }
        if let Some(tail) = self.tail.filter(|tail| !(0..=MAX_TAIL).contains(tail)) {
            let reason = format!("must be between 0 and {MAX_TAIL}, inclusive");
            problems.push(invalid("tailLines", &tail.to_string(), &reason));
        }
        reject(406, &problems)
    }

    /// The file, if the query names one.
    pub(super) fn file(&self) -> Option<&str> {
        self.files.first().map(String::as_str)
    }

    fn has_options(&self) -> bool {
        self.since.is_some()
            || self.until.is_some()
            || self.tail.is_some()
            || self.boot.is_some()
            || !self.pattern.is_empty()
    }

    /// The arguments of journalctl.
    fn arguments(&self, services: &[&str]) -> Vec<String> {
        let mut arguments =
            vec!["--utc".to_owned(), "--no-pager".to_owned(), "--output=short-precise".to_owned()];
        // Without a zone journalctl would use the node's zone.
        let utc_text =
            |time: Timestamp| time.to_zoned(TimeZone::UTC).strftime("%Y-%m-%d %H:%M:%S UTC").to_string();
        arguments.extend(self.since.map(|since| format!("--since={}", utc_text(since))));
        arguments.extend(self.until.map(|until| format!("--until={}", utc_text(until))));
        if let Some(tail) = self.tail {
            arguments.extend(["--pager-end".to_owned(), format!("--lines={tail}")]);
        }
        arguments.extend(services.iter().map(|service| format!("--unit={service}")));
        if !self.pattern.is_empty() {
            arguments.push(format!("--grep={}", self.pattern));
        }
        if let Some(boot) = self.boot {
            arguments.extend(["--boot".to_owned(), boot.to_string()]);
        }
        arguments
    }

    /// Writes the logs of the services. A failure becomes a line of the body, since the status is
    /// sent.
    fn write(&self, journalctl: &str, out: &mut dyn Write, root: &Path, stop: &StopToken) -> io::Result<()> {
        let deadline = Instant::now() + LIMIT;
        let left = || deadline.saturating_duration_since(Instant::now());
        let units = units(journalctl, left(), stop);
        let (native, files): (Vec<&str>, Vec<&str>) = self
            .services
            .iter()
            .map(String::as_str)
            // DIFFERS: the Go kubelet searches the whole list, so it reads `ssh` from the journal if
            // there is an `openssh.service`, and never from a file.
            .partition(|service| units.lines().any(|unit| unit.strip_suffix(".service") == Some(service)));
        if !native.is_empty() {
            let mut command = Command::new(journalctl);
            command.args(self.arguments(&native));
            let mut broken = None;
            let outcome = child::stream(&mut command, left(), stop, &mut |bytes| {
                out.write_all(bytes).inspect_err(|error| broken = Some(error.kind()))
            });
            if let Some(kind) = broken {
                return Err(kind.into());
            }
            if let Err(error) = outcome
                && self.boot.is_none_or(|boot| boot == 0)
            {
                log::debug!("{error}");
                out.write_all(b"\nerror: journal output not available\n")?;
            }
        }
        if files.is_empty() {
            return Ok(());
        }
        if self.has_options() {
            let names = files.join(" ");
            return write!(
                out,
                "\noptions present and query resolved to log files for [{names}]\ntry without specifying options\n"
            );
        }
        for service in files {
            if left().is_zero() || stop.is_stopped() {
                return out.write_all(b"\ncontext error: context deadline exceeded\n");
            }
            match copy(root, service, out, deadline, stop) {
                Err(CopyError::Read(error)) if error.kind() == ErrorKind::NotFound => {
                    write!(out, "\nlog not found for {service}\n")?;
                }
                Err(CopyError::Read(error)) => {
                    write!(out, "\nerror getting log for {service}: {}\n", error_text(&error))?
                }
                Err(CopyError::Write(error)) => return Err(error),
                Ok(()) => {}
            }
        }
        Ok(())
    }
}

/// The response to a query for services.
pub(super) fn reply(query: Query, gzip: bool) -> Reply {
    Reply::stream(move |out, node, stop| {
        let text = ("Content-Type", "text/plain;charset=UTF-8");
        let fields: &[_] = if gzip { &[text, ("Content-Encoding", "gzip")] } else { &[text] };
        out.start(200, fields, None)?;
        let root = node.log_dir();
        if !gzip {
            return query.write("journalctl", out, root, stop);
        }
        let mut packed = Gzip::fast(out);
        query.write("journalctl", &mut packed, root, stop)?;
        packed.finish().map(drop)
    })
}

/// The units of the journal, one per line; empty without a journal.
fn units(journalctl: &str, limit: Duration, stop: &StopToken) -> String {
    let limits = Limits { time: limit, output_bytes: UNITS_BYTES };
    match child::run(Command::new(journalctl).args(["--field", "_SYSTEMD_UNIT"]), b"", limits, stop) {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).into_owned(),
        Ok(_) => String::new(),
        Err(error @ ChildError::Start { .. }) => {
            log::debug!("no journal: {error}");
            String::new()
        }
        Err(error) => {
            log::warn!("cannot list the journal's units: {error}");
            String::new()
        }
    }
}

enum CopyError {
    Read(io::Error),
    Write(io::Error),
}

/// Copies the first of the files that a service may log to.
fn copy(
    root: &Path,
    service: &str,
    out: &mut dyn Write,
    deadline: Instant,
    stop: &StopToken,
) -> Result<(), CopyError> {
    let mut missing = ErrorKind::NotFound.into();
    for name in [service.to_owned(), format!("{service}.log"), format!("{service}/{service}.log")] {
        match files::open(root, &name) {
            Ok((found, metadata)) if metadata.is_file() => {
                let mut file = files::read(&found).map_err(CopyError::Read)?;
                let mut block = vec![0; 64 * 1024];
                loop {
                    // An error prevents that the client treats a part as the whole file.
                    if Instant::now() >= deadline || stop.is_stopped() {
                        return Err(CopyError::Read(ErrorKind::TimedOut.into()));
                    }
                    match file.read(&mut block) {
                        Ok(0) => return Ok(()),
                        Ok(count) => {
                            out.write_all(block.get(..count).unwrap_or_default())
                                .map_err(CopyError::Write)?;
                        }
                        Err(error) if error.kind() == ErrorKind::Interrupted => {}
                        Err(error) => return Err(CopyError::Read(error)),
                    }
                }
            }
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                missing = error
            }
            Err(error) => return Err(CopyError::Read(error)),
        }
    }
    Err(CopyError::Read(match missing.kind() {
        ErrorKind::NotFound => missing,
        _ => ErrorKind::NotFound.into(),
    }))
}

fn error_text(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => "no such file or directory".to_owned(),
        ErrorKind::PermissionDenied => "permission denied".to_owned(),
        ErrorKind::TimedOut => "context deadline exceeded".to_owned(),
        _ => error.to_string(),
    }
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

fn invalid(field: &str, value: &str, reason: &str) -> String {
    format!("{field}: Invalid value: {value}: {reason}")
}

/// Rejects a query with all problems in one text, as Go joins errors.
fn reject(status: u16, problems: &[String]) -> Result<(), Response> {
    let mut text = String::new();
    match problems {
        [] => return Ok(()),
        [problem] => text.push_str(problem),
        several => {
            let _ = write!(text, "[{}]", several.join(", "));
        }
    }
    text.push('\n');
    Err(Response::text(status, text))
}

#[cfg(test)]
mod tests;
