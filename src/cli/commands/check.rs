//! `coracle check`: the machine, the runtime and the agent; each line with its fix.
//! Works without an agent.

use std::path::PathBuf;
use std::time::Duration;

use crate::cli::exit::Exit;
use crate::cli::local::Output;
use crate::cli::table::Color;
use crate::cri;
use crate::resources::preflight::{self, CheckLine, Standing};
use crate::server::NodeReport;
use crate::util::error_chain::chain;

use super::age;
use super::client::Client;
use super::console::Console;
use super::error::{CommandError, Outcome};

/// The default endpoint of containerd.
const DEFAULT_ENDPOINT: &str = "unix:///run/containerd/containerd.sock";

/// A runtime that takes longer for its status is unusable.
const RUNTIME_LIMIT: Duration = Duration::from_secs(10);

pub(super) fn run(client: &Client, console: &mut Console<'_>, output: Output, root_dir: PathBuf) -> Outcome {
    let agent = client.get::<NodeReport>("/v1/status");
    let mut settings = preflight::Settings { root_dir, ..preflight::Settings::default() };
    if agent.is_ok() {
        // The configuration of a running agent allows what the defaults forbid.
        settings.fail_swap_on = false;
        settings.fail_cgroup_v1 = false;
    }
    let mut lines = preflight::preflight(&settings);
    let endpoint = match &agent {
        Ok(report) if !report.runtime.endpoint.is_empty() => report.runtime.endpoint.as_str(),
        _ => DEFAULT_ENDPOINT,
    };
    let runtime = runtime(endpoint);
    // A network that works may be configured elsewhere.
    if runtime.iter().any(|line| line.name == "pod network" && line.standing == Standing::Ok) {
        lines.retain(|line| line.name != "cni config" || line.standing == Standing::Ok);
    }
    lines.extend(runtime);
    lines.extend(agent_lines(&agent));
    if !console.document(output, &lines)? {
        print(console, &lines)?;
    }
    let failed = lines.iter().any(|line| line.standing == Standing::Fail);
    Ok(if failed { Exit::CheckFailed } else { Exit::Success })
}

fn line(name: &str, standing: Standing, message: String, fix: &str) -> CheckLine {
    CheckLine { name: name.to_owned(), standing, message, fix: fix.to_owned() }
}

fn runtime(endpoint: &str) -> Vec<CheckLine> {
    let settings = cri::Settings {
        runtime_endpoint: endpoint.to_owned(),
        image_endpoint: None,
        request_timeout: RUNTIME_LIMIT,
    };
    let start = "start a container runtime there, or set containerRuntimeEndpoint";
    let outcome = cri::connect(settings)
        .and_then(|(runtime, _)| runtime.version().and_then(|version| Ok((version, runtime.status()?))));
    let (version, status) = match outcome {
        Ok(versions) => versions,
        Err(why) => {
            let message = format!("no usable runtime at {endpoint}: {}", chain(&why));
            return vec![line("runtime", Standing::Fail, message, start)];
        }
    };
    let name = format!("{} {} at {endpoint}", version.runtime_name, version.runtime_version);
    let mut lines = vec![match status.ready {
        Ok(()) => line("runtime", Standing::Ok, name, ""),
        Err(why) => {
            let fix = "read the runtime's log";
            line("runtime", Standing::Fail, format!("{name} is not ready: {why}"), fix)
        }
    }];
    if let Err(why) = status.network_ready {
        let fix = "install a CNI configuration; until then only pods with hostNetwork start";
        lines.push(line("pod network", Standing::Warn, why, fix));
    } else {
        lines.push(line("pod network", Standing::Ok, "the runtime's network is ready".to_owned(), ""));
    }
    lines
}

fn agent_lines(agent: &Result<NodeReport, CommandError>) -> Vec<CheckLine> {
    let report = match agent {
        Ok(report) => report,
        Err(why @ CommandError::NoPermission(_)) => {
            return vec![line("agent", Standing::Warn, why.to_string(), "run this as root")];
        }
        Err(why) => {
            let fix = "start it: coracle, or systemctl start coracle";
            return vec![line("agent", Standing::Warn, why.to_string(), fix)];
        }
    };
    let uptime = age::human(i64::try_from(report.uptime_seconds).unwrap_or(i64::MAX));
    let message = format!("coracle {} on {}, up {uptime}", report.version, report.node);
    let mut lines = vec![line("agent", Standing::Ok, message, "")];
    let warn = |problem: &String| line("agent", Standing::Warn, problem.clone(), "see coracle status");
    lines.extend(report.problems.iter().map(warn));
    lines
}

fn print(console: &mut Console<'_>, lines: &[CheckLine]) -> std::io::Result<()> {
    let width = lines.iter().map(|line| line.name.chars().count()).max().unwrap_or(0);
    for CheckLine { name, standing, message, fix } in lines {
        let (mark, color) = match standing {
            Standing::Ok => ("ok  ", Color::Green),
            Standing::Warn => ("warn", Color::Yellow),
            Standing::Fail => ("fail", Color::Red),
        };
        let mark = console.paint.put(Some(color), mark);
        let message = crate::cli::table::visible(message);
        writeln!(console.out, "{mark}  {name:width$}  {message}")?;
        if !fix.is_empty() {
            writeln!(console.out, "{:6}{:width$}  → {fix}", "", "")?;
        }
    }
    console.out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::Paint;

    #[test]
    fn lines_are_printed_with_their_fixes() {
        let lines = [
            line("disk", Standing::Ok, "10 GiB".into(), ""),
            line("runtime", Standing::Fail, "away\u{1b}".into(), "start it"),
        ];
        let mut out = Vec::new();
        let now = jiff::Timestamp::UNIX_EPOCH;
        print(&mut Console { out: &mut out, paint: Paint::new(false), now }, &lines).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "ok    disk     10 GiB\nfail  runtime  away\\u{1b}\n               → start it\n"
        );
    }

    #[test]
    fn an_absent_runtime_fails_and_an_absent_agent_warns() {
        let dir = tempfile::tempdir().unwrap();
        let endpoint = format!("unix://{}/none.sock", dir.path().display());
        assert_eq!(runtime(&endpoint)[0].standing, Standing::Fail);
        assert_eq!(runtime("http://example.org")[0].standing, Standing::Fail);
        let absent = Client::new(&dir.path().join("coracle.sock")).get::<NodeReport>("/v1/status");
        assert_eq!(agent_lines(&absent)[0].standing, Standing::Warn);
        let report = NodeReport { problems: vec!["x".into()], ..NodeReport::default() };
        assert_eq!(agent_lines(&Ok(report)).len(), 2);
    }
}
