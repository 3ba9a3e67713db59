//! `coracle setup runtime`: makes the container runtime pull from the registry of image archives
//! first. Needs no agent. The files of the operator are changed by one line, or not at all.

mod containerd;
mod crio;
mod plan;
#[cfg(test)]
mod tests;
mod toml;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::cli::exit::Exit;
use crate::cli::local::{Runtime, SetupOptions};
use crate::config::{MIRROR_FILE, NODE_TOKEN};
use crate::util::child::{self, Limits};
use crate::util::stop::StopToken;
use crate::util::token;

use super::console::Console;
use super::error::{Outcome, print_stderr};
use plan::{SetupPlan, Step, read};

/// The command `containerd --version` responds within milliseconds.
const VERSION_LIMITS: Limits = Limits { time: Duration::from_secs(10), output_bytes: 4096 };

/// `socket`: the agent's local socket.
pub(super) fn run(console: &mut Console<'_>, options: &SetupOptions, socket: &Path) -> Outcome {
    let plan = match make(options, socket, Path::new("/etc")) {
        Ok(plan) => plan,
        Err(reason) => {
            print_stderr(&reason);
            return Ok(Exit::Failure);
        }
    };
    for step in &plan.steps {
        step.show(!options.dry_run, console.out)?;
        if !options.dry_run
            && let Err(reason) = step.apply()
        {
            print_stderr(&reason);
            return Ok(Exit::Failure);
        }
    }
    for note in &plan.notes {
        writeln!(console.out, "note: {note}")?;
    }
    match (plan.steps.is_empty(), plan.restart) {
        (true, _) => writeln!(console.out, "nothing to do")?,
        (_, true) => writeln!(console.out, "restart {0} once: systemctl restart {0}", plan.service)?,
        _ => writeln!(console.out, "{} needs no restart", plan.service)?,
    }
    console.out.flush()?;
    Ok(Exit::Success)
}

fn make(options: &SetupOptions, socket: &Path, etc: &Path) -> Result<SetupPlan, String> {
    let runtime = options.runtime.unwrap_or_else(|| {
        let only_crio = etc.join("crio").is_dir() && !etc.join("containerd").is_dir();
        if only_crio { Runtime::Crio } else { Runtime::Containerd }
    });
    match runtime {
        Runtime::Containerd => {
            let config =
                options.containerd_config.clone().unwrap_or_else(|| etc.join("containerd/config.toml"));
            let mirror = options.mirror_file.clone().unwrap_or_else(|| socket.with_file_name(MIRROR_FILE));
            containerd::plan(&containerd::Settings {
                config: &config,
                certs_dir: options.certs_dir.as_deref(),
                mirror_file: &mirror,
                version: installed(),
            })
        }
        Runtime::Crio => {
            let address = options.address.filter(|address| address.port() != 0 && address.ip().is_loopback());
            let address = address.ok_or(
                "CRI-O needs a fixed port: start the agent with --image-registry=127.0.0.1:PORT, and give \
                 this command the same option",
            )?;
            let (token, step) = node_token(&options.root_dir)?;
            let dir = options.registries_dir.clone();
            let dir = dir.unwrap_or_else(|| etc.join("containers/registries.conf.d"));
            let usual: Vec<String> = crio::REGISTRIES.map(str::to_owned).to_vec();
            let registries = if options.registries.is_empty() { &usual } else { &options.registries };
            if let Some(bad) = registries.iter().find(|registry| !crio::is_registry(registry)) {
                return Err(format!("{bad:?} is not the name of a registry"));
            }
            let mut plan = crio::plan(&crio::Settings { dir: &dir, address, token: &token, registries })?;
            // First: CRI-O must not know a token that the agent does not accept.
            if let Some(step) = step {
                plan.steps.insert(0, step);
            }
            Ok(plan)
        }
    }
}

/// The token of the node, and the step that writes a new one.
fn node_token(root_dir: &Path) -> Result<(String, Option<Step>), String> {
    let path = root_dir.join(NODE_TOKEN);
    if let Some(text) = read(&path, 4096)? {
        let text = text.trim();
        return match token::is_token(text) {
            true => Ok((text.to_owned(), None)),
            false => Err(format!("{} has no valid token: remove this file", path.display())),
        };
    }
    let token = token::new().map_err(|error| error.to_string())?;
    let shown = vec!["a new token, for root only".to_owned()];
    let step = Step::Write { path, text: format!("{token}\n"), mode: 0o600, copy: false, shown };
    Ok((token, Some(step)))
}

/// The major version of the installed containerd.
fn installed() -> Option<u32> {
    let mut command = Command::new("containerd");
    let output = child::run(command.arg("--version"), &[], VERSION_LIMITS, &StopToken::never()).ok()?;
    major(&String::from_utf8_lossy(&output.stdout))
}

/// `containerd github.com/containerd/containerd v1.6.20 <commit>`: the first word that is a version.
fn major(text: &str) -> Option<u32> {
    text.split_whitespace().find_map(|word| {
        let (major, rest) = word.trim_start_matches('v').split_once('.')?;
        rest.starts_with(|first: char| first.is_ascii_digit()).then(|| major.parse().ok())?
    })
}
