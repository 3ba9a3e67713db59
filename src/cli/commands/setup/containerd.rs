//! How containerd learns about the registry of image archives: `config_path` in its configuration
//! names a directory, in which `_default/hosts.toml` counts for every registry without a directory
//! of its own. containerd reads that file for each pull, follows links, and ignores an absent file.
//!
//! containerd: remotes/docker/config/hosts.go, pkg/cri/config (1.6); core/remotes/docker/config,
//! internal/cri/config, plugins/cri/images (2.x).

use std::path::{Path, PathBuf};

use crate::config::NODE_TOKEN;

use super::plan::{MAX_BYTES, SetupPlan, Step, read};
use super::toml::{Entry, scan};

/// The table of the registries by version of the configuration.
const TABLE_2: [&str; 3] = ["plugins", "io.containerd.grpc.v1.cri", "registry"];
const TABLE_3: [&str; 3] = ["plugins", "io.containerd.cri.v1.images", "registry"];

/// The directory of registries unless the configuration or an option names another.
pub(super) const CERTS_DIR: &str = "/etc/containerd/certs.d";

/// What is set up.
pub(super) struct Settings<'a> {
    /// containerd's configuration.
    pub config: &'a Path,
    pub certs_dir: Option<&'a Path>,
    /// The file that the agent writes at each start.
    pub mirror_file: &'a Path,
    /// The major version of the installed containerd, if it is known.
    pub version: Option<u32>,
}

/// What has to be done.
///
/// # Errors
/// Why it cannot be done: the text names the file, and the line if there is one.
pub(super) fn plan(settings: &Settings<'_>) -> Result<SetupPlan, String> {
    let mut plan = SetupPlan { service: "containerd", ..SetupPlan::default() };
    let shown = settings.config.display().to_string();
    let found = read(settings.config, MAX_BYTES)?;
    let wanted = settings.certs_dir.unwrap_or(Path::new(CERTS_DIR)).display().to_string();
    let edit = edit(found.as_deref().unwrap_or_default(), &shown, &wanted, settings.version)?;
    if let (Some(set), Some(given)) = (&edit.config_path, settings.certs_dir)
        && !set.split(':').any(|directory| Path::new(directory) == given)
    {
        return Err(format!(
            "{shown} has config_path = {set:?}: leave out --certs-dir {}, or change that line",
            given.display()
        ));
    }
    if let Some(text) = edit.text {
        plan.steps.push(Step::Write {
            path: settings.config.to_owned(),
            text,
            mode: 0o644,
            copy: found.is_some(),
            shown: edit.shown,
        });
        plan.restart = true;
    }
    plan.notes.extend(edit.notes);
    let roots: Vec<PathBuf> = match edit.config_path {
        Some(set) => set.split(':').filter(|directory| !directory.is_empty()).map(PathBuf::from).collect(),
        None => vec![PathBuf::from(wanted)],
    };
    link(&roots, settings.mirror_file, &mut plan)?;
    Ok(plan)
}

/// Makes `_default/hosts.toml` a link to the file of the agent.
fn link(roots: &[PathBuf], mirror: &Path, plan: &mut SetupPlan) -> Result<(), String> {
    let own: Vec<Vec<String>> = roots.iter().map(|root| registries(root)).collect::<Result<_, _>>()?;
    // `_default` of one directory hides the registries in the next ones.
    let free = |index: usize| own.iter().skip(index + 1).all(Vec::is_empty);
    let Some((_, root)) = roots.iter().enumerate().find(|(index, _)| free(*index)) else {
        return Err("config_path names no directory".to_owned());
    };
    let default = root.join("_default");
    let path = default.join("hosts.toml");
    for (root, names) in roots.iter().zip(&own) {
        for name in names {
            plan.notes.push(format!(
                "{} counts for its registry instead of _default: images of archives are not used for it, \
                 unless its hosts.toml is removed or is a link to {} as well",
                root.join(name).display(),
                mirror.display()
            ));
        }
    }
    match std::fs::read_link(&path) {
        Ok(target) if target == mirror => return Ok(()),
        Ok(target) => {
            return Err(format!(
                "{} is a link to {}: make it a link to {}",
                path.display(),
                target.display(),
                mirror.display()
            ));
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(_) => {
            return Err(format!(
                "{} has hosts of its own. Make it a link to {}; or start the agent with a fixed port \
                 (--image-registry), write 32 hexadecimal digits to <root-dir>/{NODE_TOKEN} (mode 0600), and \
                 add as its first host [host.\"http://127.0.0.1:PORT/v2/DIGITS\"] with \
                 capabilities = [\"pull\", \"resolve\"] and override_path = true",
                path.display(),
                mirror.display()
            ));
        }
    }
    let others = names_in(&default)?;
    if let Some(other) = others.first() {
        return Err(format!(
            "{} has the file {other}, which containerd does not use any more when there is a hosts.toml: \
             move it to the directories of its registries",
            default.display()
        ));
    }
    plan.steps.push(Step::Link { path, target: mirror.to_owned() });
    Ok(())
}

/// The registries with a directory of their own.
fn registries(root: &Path) -> Result<Vec<String>, String> {
    let mut names = names_in(root)?;
    names.retain(|name| name != "_default" && root.join(name).is_dir());
    Ok(names)
}

fn names_in(dir: &Path) -> Result<Vec<String>, String> {
    let failed = |error| format!("cannot read {}: {error}", dir.display());
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// The change of a configuration.
#[derive(Debug, Default, PartialEq, Eq)]
struct Edit {
    /// The new text; `None`: it stays.
    text: Option<String>,
    /// The changed lines for people.
    shown: Vec<String>,
    /// The present value of `config_path`.
    config_path: Option<String>,
    notes: Vec<String>,
}

/// Adds `config_path` to a configuration. `file` is its name in messages; `version`: containerd's.
fn edit(text: &str, file: &str, certs_dir: &str, version: Option<u32>) -> Result<Edit, String> {
    let entries = scan(text).map_err(|bad| format!("{file}, line {}: this is not TOML", bad.line))?;
    let mut edit = Edit::default();
    let end = if text.contains("\r\n") { "\r\n" } else { "\n" };
    let (table, head) = match declared_version(&entries, file)? {
        Some(2) => (TABLE_2, None),
        Some(_) => (TABLE_3, None),
        None if version == Some(1) || version.is_none() => (TABLE_2, Some("version = 2")),
        None => (TABLE_3, Some("version = 3")),
    };
    for entry in &entries {
        if entry.is(&["imports"]) {
            edit.notes.push(format!(
                "{file}, line {}: imported files are not read here: they must not set mirrors of registries",
                entry.line
            ));
        }
        let off = entry.value.as_deref().unwrap_or_default();
        if entry.is(&["disabled_plugins"]) && (off.contains("\"cri\"") || off.contains("v1.cri\"")) {
            edit.notes.push(format!("{file}, line {}: the CRI plugin is off, and pods need it", entry.line));
        }
        refuse(entry, &table, file, certs_dir)?;
    }
    let [plugins, plugin, registry] = table;
    let path = [plugins, plugin, registry, "config_path"];
    let added = format!("config_path = \"{certs_dir}\"");
    if certs_dir.contains(['"', '\\']) || certs_dir.chars().any(char::is_control) {
        return Err(format!("{certs_dir:?} cannot be the directory of registries"));
    }
    let line = |number: usize| text.lines().nth(number.saturating_sub(1)).unwrap_or_default();
    if let Some(entry) = entries.iter().find(|entry| entry.is(&path)) {
        match (entry.string(), entry.around_string(line(entry.line))) {
            (Some(set), _) if !set.is_empty() => {
                edit.config_path = Some(set);
                return Ok(edit);
            }
            // Only the value changes: the key may be a dotted one.
            (Some(_), Some((key, comment))) => {
                let new = format!("{key}\"{certs_dir}\"{comment}");
                edit.shown = vec![format!("line {}: {}", entry.line, new.trim_start())];
                edit.text = Some(with_line(text, entry.line, &new, true, end));
                return Ok(edit);
            }
            _ => return Err(format!("{file}, line {}: config_path must be a string", entry.line)),
        }
    }
    // A table that dotted keys define has no header, and cannot get one.
    let is_dotted = |entry: &&Entry| entry.value.is_some() && entry.table < 3 && entry.is_below(&table);
    if let Some(entry) = entries.iter().find(is_dotted) {
        return Err(format!(
            "{file}, line {}: this table is made by dotted keys: {}",
            entry.line,
            by_hand(certs_dir)
        ));
    }
    let header = entries.iter().find(|entry| entry.value.is_none() && entry.is(&table));
    if let Some(entry) = header {
        let is_blank = |character: &char| matches!(character, ' ' | '\t');
        let indent: String = line(entry.line).chars().take_while(is_blank).collect();
        let new = format!("{indent}  {added}");
        edit.shown = vec![format!("after line {}: {}", entry.line, new.trim_start())];
        edit.text = Some(with_line(text, entry.line, &new, false, end));
        return Ok(edit);
    }
    let mut lines: Vec<String> = head.into_iter().map(str::to_owned).collect();
    lines.push(format!("[{plugins}.\"{plugin}\".{registry}]"));
    lines.push(format!("  {added}"));
    let mut new = text.to_owned();
    if !new.is_empty() && !new.ends_with('\n') {
        new.push_str(end);
    }
    for (number, line) in lines.iter().enumerate() {
        // A blank line before a table.
        if line.starts_with('[') && !(new.is_empty() && number == 0) {
            new.push_str(end);
        }
        new.push_str(line);
        new.push_str(end);
    }
    edit.shown = lines.iter().map(|line| format!("at the end: {line}")).collect();
    edit.text = Some(new);
    Ok(edit)
}

/// The declared version; `None`: the configuration is empty.
fn declared_version(entries: &[Entry], file: &str) -> Result<Option<u32>, String> {
    let old = || {
        format!(
            "{file} is a configuration of version 1: replace it by the output of `containerd config migrate`"
        )
    };
    let Some(entry) = entries.iter().find(|entry| entry.is(&["version"])) else {
        return if entries.is_empty() { Ok(None) } else { Err(old()) };
    };
    let text = entry.value.as_deref().unwrap_or_default();
    let digits = text.split('#').next().unwrap_or_default().trim();
    match digits.parse() {
        Ok(1) => Err(old()),
        Ok(version @ 2..) => Ok(Some(version)),
        _ => Err(format!("{file}, line {}: the version must be 2 or more", entry.line)),
    }
}

/// Refuses what excludes `config_path`, and forms of the table that one line cannot be added to.
fn refuse(entry: &Entry, table: &[&str; 3], file: &str, certs_dir: &str) -> Result<(), String> {
    let [plugins, plugin, registry] = *table;
    let line = entry.line;
    let excluded = |what: &str| {
        Err(format!(
            "{file}, line {line}: {what} is set, which containerd does not accept together with config_path: \
             move it to hosts.toml files in {certs_dir}"
        ))
    };
    if entry.is_below(&[plugins, plugin, registry, "mirrors"]) {
        return excluded("mirrors");
    }
    // Credentials may stay there.
    if entry.is_below(&[plugins, plugin, registry, "configs"]) {
        let value = entry.value.as_deref().unwrap_or_default();
        if entry.path.get(5).is_some_and(|part| part == "tls") || value.contains("tls") {
            return excluded("configs with tls");
        }
    }
    let inline = entry.value.is_some() && entry.path.len() <= 3;
    let above = [plugins, plugin, registry];
    if inline && above.get(..entry.path.len()).is_some_and(|parts| entry.is(parts)) {
        return Err(format!("{file}, line {line}: this table is in one line: {}", by_hand(certs_dir)));
    }
    Ok(())
}

fn by_hand(certs_dir: &str) -> String {
    format!("add config_path = {certs_dir:?} to the table of the registries by hand")
}

/// The text with another line in the place of, or after, a line. Lines count from 1.
fn with_line(text: &str, number: usize, new: &str, replaces: bool, end: &str) -> String {
    let mut out = String::with_capacity(text.len() + new.len() + 2);
    for (index, line) in text.split_inclusive('\n').enumerate() {
        let here = index + 1 == number;
        if !(here && replaces) {
            out.push_str(line);
            if here && !line.ends_with('\n') {
                out.push_str(end);
            }
        }
        if here {
            out.push_str(new);
            out.push_str(end);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edited(text: &str) -> Result<Edit, String> {
        edit(text, "config.toml", "/c", Some(1))
    }

    fn text_of(text: &str) -> String {
        edited(text).unwrap().text.unwrap()
    }

    const ADDED_2: &str = "[plugins.\"io.containerd.grpc.v1.cri\".registry]\n  config_path = \"/c\"\n";
    const ADDED_3: &str = "[plugins.\"io.containerd.cri.v1.images\".registry]\n  config_path = \"/c\"\n";

    #[test]
    fn absent_table_is_added_at_the_end() {
        assert_eq!(text_of(""), format!("version = 2\n\n{ADDED_2}"));
        assert_eq!(edit("", "f", "/c", Some(2)).unwrap().text.unwrap(), format!("version = 3\n\n{ADDED_3}"));
        assert_eq!(edit("", "f", "/c", None).unwrap().text.unwrap(), format!("version = 2\n\n{ADDED_2}"));
        assert_eq!(text_of("# mine"), format!("# mine\nversion = 2\n\n{ADDED_2}"));
        assert_eq!(text_of("version = 2"), format!("version = 2\n\n{ADDED_2}"));
        assert_eq!(text_of("version = 3 # new\n"), format!("version = 3 # new\n\n{ADDED_3}"));
        assert_eq!(text_of("version = 4\n"), format!("version = 4\n\n{ADDED_3}"));
        // Debian's configuration: tables of the plugin, none of the registries.
        let debian = "version = 2\n\n[plugins]\n  [plugins.\"io.containerd.grpc.v1.cri\"]\n    [plugins.\"io.containerd.grpc.v1.cri\".cni]\n      bin_dir = \"/usr/lib/cni\"\n";
        assert_eq!(text_of(debian), format!("{debian}\n{ADDED_2}"));
        // A table below it is no header of it.
        let below = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".registry.headers]\n  A = [\"b\"]\n";
        assert_eq!(text_of(below), format!("{below}\n{ADDED_2}"));
        // The table of the other version does not count.
        let other = "version = 3\n[plugins.\"io.containerd.grpc.v1.cri\".registry]\nconfig_path = \"/x\"\n";
        assert_eq!(text_of(other), format!("{other}\n{ADDED_3}"));
    }

    #[test]
    fn key_is_added_after_the_header_and_everything_else_stays() {
        let text = "version = 2\r\n# c\r\n\t[plugins.'io.containerd.grpc.v1.cri'.registry] # r\r\n\r\n[x]\r\na = 1\r\n";
        let expected = text.replace("# r\r\n", "# r\r\n\t  config_path = \"/c\"\r\n");
        let edit = edited(text).unwrap();
        assert_eq!(edit.text.as_deref(), Some(expected.as_str()));
        assert_eq!(edit.shown, ["after line 3: config_path = \"/c\""]);
        let last = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".registry]";
        assert_eq!(text_of(last), format!("{last}\n  config_path = \"/c\"\n"));
    }

    #[test]
    fn present_value_stays_and_an_empty_one_is_replaced() {
        let header = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".registry]\n";
        let edit = edited(&format!("{header}  config_path = '/a:/b' # x\n")).unwrap();
        assert_eq!((edit.text, edit.config_path.as_deref()), (None, Some("/a:/b")));
        let dotted = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nregistry.config_path = \"/a\"\n";
        assert_eq!(edited(dotted).unwrap().config_path.as_deref(), Some("/a"));
        let cri = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n";
        for (before, key, after) in [
            (header, "    config_path = ", "\n[x]\n"),
            (header, "\tconfig_path=", " # none yet\n"),
            // The key of another table, in a line with a prefix.
            (cri, "registry.config_path = ", "\nregistry.headers = {}\n"),
            (cri, "  \"registry\" . 'config_path' = ", "\n"),
            ("version = 2\n", "plugins.\"io.containerd.grpc.v1.cri\".registry.config_path = ", "\n"),
        ] {
            for empty in ["\"\"", "''"] {
                let edit = edited(&format!("{before}{key}{empty}{after}")).unwrap();
                assert_eq!(edit.text.unwrap(), format!("{before}{key}\"/c\"{after}"));
                let comment = after.lines().next().unwrap();
                assert_eq!(
                    edit.shown[0].split_once(": ").unwrap().1,
                    format!("{}\"/c\"{comment}", key.trim_start())
                );
            }
        }
        // What was added is found.
        let again = edited(&text_of(header)).unwrap();
        assert_eq!((again.text, again.config_path.as_deref()), (None, Some("/c")));
    }

    #[test]
    fn configurations_that_need_a_person_are_refused_by_line() {
        let cri = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n";
        let registry = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".registry]\n";
        for (text, words) in [
            (
                format!("{registry}[plugins.\"io.containerd.grpc.v1.cri\".registry.mirrors.\"docker.io\"]\n"),
                "config.toml, line 3: mirrors is set",
            ),
            (format!("{registry}mirrors = {{}}\n"), "line 3: mirrors is set"),
            (
                format!("{registry}[plugins.\"io.containerd.grpc.v1.cri\".registry.configs.\"a\".tls]\n"),
                "line 3: configs with tls is set",
            ),
            (format!("{registry}configs = {{ a = {{ tls = {{}} }} }}\n"), "line 3: configs with tls is set"),
            (
                format!("{cri}registry = {{}}\n"),
                "line 3: this table is in one line: add config_path = \"/c\"",
            ),
            ("version = 2\nplugins = {}\n".to_owned(), "line 2: this table is in one line"),
            (format!("{cri}registry.headers = {{}}\n"), "line 3: this table is made by dotted keys"),
            (
                format!("{cri}registry.configs.\"a\".auth.username = \"u\"\n"),
                "line 3: this table is made by dotted keys",
            ),
            (format!("{cri}registry.x.config_path = \"\"\n"), "line 3: this table is made by dotted keys"),
            (format!("{registry}config_path = 7\n"), "line 3: config_path must be a string"),
            ("[plugins.cri.registry]\n".to_owned(), "version 1: replace it by the output"),
            ("version = 1\n".to_owned(), "version 1: replace it by the output"),
            ("version = \"2\"\n".to_owned(), "line 1: the version must be 2 or more"),
            ("version = 2\n[x\n".to_owned(), "line 2: this is not TOML"),
        ] {
            let reason = edited(&text).unwrap_err();
            assert!(reason.contains(words), "{text}: {reason}");
        }
        // Credentials alone are accepted by containerd.
        let auth = format!("{registry}[plugins.\"io.containerd.grpc.v1.cri\".registry.configs.\"a\".auth]\n");
        assert!(edited(&auth).is_ok());
        // Dotted keys are no obstacle when the line is there.
        let set = format!("{cri}registry.configs.\"a\".auth = {{}}\nregistry.config_path = \"/a\"\n");
        assert_eq!(edited(&set).unwrap().config_path.as_deref(), Some("/a"));
    }

    #[test]
    fn imports_and_a_disabled_plugin_are_noted() {
        let edit =
            edited("version = 2\nimports = [\"/etc/x/*.toml\"]\ndisabled_plugins = [\"cri\"]\n").unwrap();
        assert!(
            edit.notes[0].contains("line 2: imported files") && edit.notes[1].contains("line 3: the CRI")
        );
    }
}
