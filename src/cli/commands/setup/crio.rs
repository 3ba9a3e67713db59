//! How CRI-O learns about the registry of image archives: a file in `registries.conf.d` names it as
//! a mirror of each registry. This file does not change with each start of the agent, so the port is
//! fixed and the token is the node's.
//!
//! containers-registries.conf(5): a mirror's location replaces the registry in the image's name; a
//! later file replaces the whole `[[registry]]` of an earlier one.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use super::plan::{MAX_BYTES, SetupPlan, Step, read};
use super::toml::{Entry, scan};

/// The registries unless `--registry` names others.
pub(super) const REGISTRIES: [&str; 5] = ["docker.io", "quay.io", "ghcr.io", "registry.k8s.io", "localhost"];

/// The first line of our file.
const MARK: &str = "# Written by `coracle setup runtime`; it replaces this file.";

/// The name of our file.
const FILE: &str = "50-coracle.conf";

/// What is set up.
pub(super) struct Settings<'a> {
    /// `registries.conf.d`; `registries.conf` is beside it.
    pub dir: &'a Path,
    /// The fixed address of the registry.
    pub address: SocketAddr,
    /// The token of the node.
    pub token: &'a str,
    pub registries: &'a [String],
}

/// What has to be done.
///
/// # Errors
/// Why it cannot be done.
pub(super) fn plan(settings: &Settings<'_>) -> Result<SetupPlan, String> {
    let mut plan = SetupPlan { service: "crio", ..SetupPlan::default() };
    let path = settings.dir.join(FILE);
    let present = read(&path, MAX_BYTES)?;
    if present.as_ref().is_some_and(|text| !text.starts_with(MARK)) {
        return Err(format!("{} is not a file of this command: move it away", path.display()));
    }
    let mut registries = Vec::new();
    for registry in settings.registries {
        match other_configuration(settings.dir, registry)? {
            Some(place) => plan.notes.push(format!(
                "{place} configures {registry} already, and CRI-O uses one configuration only: add to it\n  \
                 [[registry.mirror]]\n  location = \"{}\"\n  insecure = true",
                location(settings.address, "TOKEN", registry),
            )),
            None => registries.push(registry.as_str()),
        }
    }
    let text = text(settings, &registries);
    if present.as_deref() != Some(text.as_str()) {
        let shown = text.replace(settings.token, "TOKEN").lines().map(str::to_owned).collect();
        // The token is in it.
        plan.steps.push(Step::Write { path, text, mode: 0o600, copy: false, shown });
        plan.restart = true;
    }
    Ok(plan)
}

/// The location of the mirror of a registry. A path has no colon: `__5000` is the port 5000.
pub(super) fn location(address: SocketAddr, token: &str, registry: &str) -> String {
    format!("{address}/{token}/{}", registry.replace(':', "__"))
}

fn text(settings: &Settings<'_>, registries: &[&str]) -> String {
    let mut text = format!("{MARK}\n");
    for registry in registries {
        let location = location(settings.address, settings.token, registry);
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "\n[[registry]]\nprefix = \"{registry}\"\nlocation = \"{registry}\"\n\
             [[registry.mirror]]\nlocation = \"{location}\"\ninsecure = true\n"
        );
    }
    text
}

/// The file and line of another configuration of a registry.
fn other_configuration(dir: &Path, registry: &str) -> Result<Option<String>, String> {
    for file in files(dir)? {
        let Some(text) = read(&file, MAX_BYTES)? else { continue };
        let entries =
            scan(&text).map_err(|bad| format!("{}, line {}: this is not TOML", file.display(), bad.line))?;
        let is_inline = |entry: &&Entry| {
            entry.is(&["registry"]) && entry.value.as_deref().is_some_and(|value| !value.starts_with("[]"))
        };
        if let Some(entry) = entries.iter().find(is_inline) {
            return Err(format!(
                "{}, line {}: write each registry as a table [[registry]]: a list in one value is not read \
                 by this command",
                file.display(),
                entry.line
            ));
        }
        let found = entries.iter().find(|entry| {
            let is_key = entry.is(&["registry", "prefix"]) || entry.is(&["registry", "location"]);
            is_key && entry.string().as_deref() == Some(registry)
        });
        if let Some(entry) = found {
            return Ok(Some(format!("{}, line {}", file.display(), entry.line)));
        }
    }
    Ok(None)
}

/// The other files that CRI-O reads.
fn files(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let mut files = vec![dir.with_file_name("registries.conf")];
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(files),
        entries => entries.map_err(|error| format!("cannot read {}: {error}", dir.display()))?,
    };
    let mut others: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    others.retain(|path| path.extension().is_some_and(|end| end == "conf") && !path.ends_with(FILE));
    others.sort();
    files.extend(others);
    Ok(files)
}

/// Whether this may be the name of a registry.
pub(super) fn is_registry(text: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b".-:".contains(&byte);
    !text.is_empty() && text.bytes().all(good)
}
