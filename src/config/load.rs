//! Loading: defaults, then the file, then the drop-ins in order, then the flags. Every problem of
//! every layer is collected; the only I/O is reading those files.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::check::check_layer;
use super::defaults::{DefaultSet, fill, fill_hard_eviction, get, merge_patch, set, strip_nulls};
use super::effects::{typed, warning};
use super::gates::{self, Gates};
use super::kubelet::KubeletConfiguration;
use super::validate::validate;
use super::yaml::{self, Document};

pub(super) const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
pub(super) const KIND: &str = "KubeletConfiguration";

/// The limit of directory levels below the drop-in directory; deeper ones are refused.
const MAX_DIRECTORY_DEPTH: usize = 16;
const MAX_DROP_INS: usize = 1000;

/// The limit of listed problems. Finding the line of each takes time.
const MAX_PROBLEMS: usize = 100;

/// Fields with paths that may be relative to their file.
const PATHS: [&str; 7] = [
    "staticPodPath",
    "authentication.x509.clientCAFile",
    "tlsCertFile",
    "tlsPrivateKeyFile",
    "resolvConf",
    "podLogsDir",
    "volumePluginDir",
];

/// One problem with the configuration or the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The location: a file, with its line if known, or a flag.
    pub place: String,
    /// The field's path; empty when the problem concerns no single field.
    pub field: String,
    /// The message.
    pub message: String,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for part in [&self.place, &self.field] {
            if !part.is_empty() {
                write!(out, "{part}: ")?;
            }
        }
        out.write_str(&self.message)
    }
}

/// A value that a flag gives to a field.
#[derive(Debug, Clone, PartialEq)]
pub struct Override {
    /// The flag, with its dashes.
    pub flag: String,
    /// The field.
    pub path: &'static str,
    /// The value, of the field's type.
    pub value: Value,
}

/// The origin of the configuration.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LoadRequest {
    /// `--config`.
    pub file: Option<PathBuf>,
    /// `--config-dir`.
    pub drop_ins: Option<PathBuf>,
    /// The flags that set fields, in the order given.
    pub overrides: Vec<Override>,
    /// The memory of the machine, on which the default of `evictionHard` depends.
    pub memory_bytes: Option<u64>,
}

/// A valid configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadedConfig {
    /// All fields, with their defaults.
    pub config: KubeletConfiguration,
    /// The feature gates.
    pub gates: Gates,
    /// The files that were read, in order.
    pub files: Vec<PathBuf>,
}

impl LoadedConfig {
    /// One warning about all feature gates that are set without effect; `None` if there are none.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let gates: Vec<String> = (self.gates.without_effect().into_iter())
            .map(|name| match gates::is_not_built(name) {
                true => format!("featureGates[{name}] (alpha, not built)"),
                false => format!("featureGates[{name}]"),
            })
            .collect();
        warning(&gates.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The effective configuration as a file that can be given to `--config`.
    pub fn to_yaml(&self) -> String {
        let mut value = crate::util::json::to_value(&self.config).unwrap_or(Value::Null);
        set(&mut value, "apiVersion", Value::from(API_VERSION));
        set(&mut value, "kind", Value::from(KIND));
        yaml::to_yaml(&value)
    }
}

/// Loads and validates a configuration.
///
/// # Errors
/// All problems, in the order of the layers.
pub fn load(request: &LoadRequest) -> Result<LoadedConfig, Vec<Problem>> {
    load_with(request, &mut |layers, file| layers.read(file)).map(|(loaded, _)| loaded)
}

/// [`load`], with the flag, or the file and its line, that sets each of some fields. Fields that nothing
/// sets are absent.
///
/// # Errors
/// As those of [`load`].
pub fn load_with_origins(
    request: &LoadRequest,
    fields: &[&'static str],
) -> Result<(LoadedConfig, BTreeMap<&'static str, String>), Vec<Problem>> {
    let (loaded, layers) = load_with(request, &mut |layers, file| layers.read(file))?;
    let origins = fields.iter().filter_map(|field| Some((*field, layers.origin_of(field)?))).collect();
    Ok((loaded, origins))
}

/// [`load`] with the main file's content as an argument. The file does not have to exist.
///
/// # Errors
/// Those of [`load`].
pub fn load_content(request: &LoadRequest, content: &[u8]) -> Result<LoadedConfig, Vec<Problem>> {
    load_with(request, &mut |layers, file| layers.take(file, content)).map(|(loaded, _)| loaded)
}

/// [`load_content`] of a file without other layers.
#[cfg(test)]
pub(super) fn load_bytes(bytes: &[u8]) -> Result<LoadedConfig, Vec<Problem>> {
    let request = LoadRequest { file: Some(PathBuf::from("/config.yaml")), ..LoadRequest::default() };
    load_content(&request, bytes)
}

fn load_with(
    request: &LoadRequest,
    read: &mut dyn FnMut(&mut Layers, &Path) -> Option<Value>,
) -> Result<(LoadedConfig, Layers), Vec<Problem>> {
    let mut layers = Layers::default();
    let defaults = if request.file.is_some() { DefaultSet::WithFile } else { DefaultSet::FlagsOnly };
    let mut value = Value::Object(serde_json::Map::new());
    if let Some(file) = &request.file {
        if let Some(layer) = read(&mut layers, file) {
            value = layer;
        }
        strip_nulls(&mut value);
        fill_hard_eviction(&mut value, request.memory_bytes);
    }
    if let Some(directory) = &request.drop_ins {
        for file in layers.list_drop_ins(directory) {
            if let Some(layer) = read(&mut layers, &file) {
                merge_patch(&mut value, layer);
            }
        }
    }
    strip_nulls(&mut value);
    fill(&mut value, defaults, request.memory_bytes);
    for change in &request.overrides {
        layers.flags.insert(change.path, change.flag.clone());
        match (change.path, &change.value) {
            ("featureGates", Value::Object(_)) => {
                let mut gates = get(&value, change.path).cloned().unwrap_or_default();
                merge_patch(&mut gates, change.value.clone());
                set(&mut value, change.path, gates);
            }
            _ => set(&mut value, change.path, change.value.clone()),
        }
    }
    // The check ensured the type of every value; only an invalid flag table could still fail here.
    let config: KubeletConfiguration = match typed(value) {
        Ok(config) => config,
        Err(error) => {
            layers.fail(String::new(), "", error.to_string());
            return Err(layers.problems);
        }
    };
    let (gates, gate_problems) = Gates::resolve(&config.feature_gates);
    for (gate, error) in gate_problems.into_iter().take(MAX_PROBLEMS + 1) {
        let field = format!("featureGates[{gate}]");
        layers.fail(layers.place_of(&field), &field, error.to_string());
    }
    for (field, message) in validate(&config, &gates) {
        layers.fail(layers.place_of(&field), &field, message);
    }
    if !layers.problems.is_empty() {
        return Err(layers.problems);
    }
    let files = layers.files.iter().map(|(path, _)| path.clone()).collect();
    Ok((LoadedConfig { config, gates, files }, layers))
}

/// Adds a problem, up to [`MAX_PROBLEMS`] and a last one that reports that there are more.
fn report(problems: &mut Vec<Problem>, problem: Problem) {
    if problems.len() < MAX_PROBLEMS {
        problems.push(problem);
    } else if problems.len() == MAX_PROBLEMS {
        let message = "there are more problems, which are not listed".to_owned();
        problems.push(Problem { field: String::new(), message, ..problem });
    }
}

/// The layers so far, to find the origin of a value.
#[derive(Default)]
struct Layers {
    files: Vec<(PathBuf, Document)>,
    flags: BTreeMap<&'static str, String>,
    problems: Vec<Problem>,
}

impl Layers {
    fn fail(&mut self, place: String, field: &str, message: String) {
        report(&mut self.problems, Problem { place, field: field.to_owned(), message });
    }

    /// The last flag or file that set a field.
    fn place_of(&self, path: &str) -> String {
        let first = || self.files.first().map(|(file, _)| file.display().to_string());
        self.origin_of(path).or_else(first).unwrap_or_default()
    }

    /// As `place_of`; `None`: nothing sets the field.
    fn origin_of(&self, path: &str) -> Option<String> {
        let field = path.split('[').next().unwrap_or(path);
        if let Some(flag) = self.flags.get(field) {
            return Some(flag.clone());
        }
        for (file, document) in self.files.iter().rev() {
            if get(&document.value, field).is_some() {
                return Some(match document.line_of(path) {
                    Some(line) => format!("{}:{line}", file.display()),
                    None => file.display().to_string(),
                });
            }
        }
        None
    }

    /// Reads one file into a checked layer; `None` when nothing in it can be used.
    fn read(&mut self, file: &Path) -> Option<Value> {
        match read_file(file) {
            Ok(bytes) => self.take(file, &bytes),
            Err(message) => {
                self.fail(file.display().to_string(), "", message);
                None
            }
        }
    }

    /// Decodes the bytes of a file into a checked layer.
    fn take(&mut self, file: &Path, bytes: &[u8]) -> Option<Value> {
        let place = file.display().to_string();
        let documents = match yaml::parse_bytes(bytes) {
            Ok(documents) => documents,
            Err(error) => {
                self.fail(format!("{place}:{}", error.line), "", error.message);
                return None;
            }
        };
        let mut documents = documents.into_iter();
        let Some(document) = documents.next() else {
            self.fail(place, "", format!("is empty; want apiVersion: {API_VERSION} and kind: {KIND}"));
            return None;
        };
        if let Some(second) = documents.next() {
            self.fail(format!("{place}:{}", second.line), "", "holds more than one document".to_owned());
            return None;
        }
        if !document.value.is_object() {
            self.fail(format!("{place}:{}", document.line), "", "must be an object".to_owned());
            return None;
        }
        for duplicate in &document.duplicates {
            let line = duplicate.second;
            self.fail(format!("{place}:{line}"), &duplicate.key, format!("{duplicate}: remove one"));
        }
        for (field, wanted) in [("apiVersion", API_VERSION), ("kind", KIND)] {
            let found = document.value.get(field);
            if found.and_then(Value::as_str) != Some(wanted) {
                let message = match found {
                    None => format!("is missing; want {wanted}"),
                    Some(found) => format!("want {wanted}, not {}", super::check::describe_value(found)),
                };
                let line = document.line_of(field).unwrap_or(document.line);
                self.fail(format!("{place}:{line}"), field, message);
            }
        }
        let mut layer = document.value.clone();
        let problems = &mut self.problems;
        check_layer(&mut layer, &mut |path, message| {
            // Finding a line takes time, too.
            if problems.len() > MAX_PROBLEMS {
                return;
            }
            let place = match document.line_of(path) {
                Some(line) => format!("{place}:{line}"),
                None => place.clone(),
            };
            report(problems, Problem { place, field: path.to_owned(), message });
        });
        set(&mut layer, "apiVersion", Value::Null);
        set(&mut layer, "kind", Value::Null);
        resolve_paths(&mut layer, file);
        self.files.push((file.to_owned(), document));
        Some(layer)
    }

    /// The drop-ins of a directory: names ending in `.conf`, in lexical order, directories included.
    fn list_drop_ins(&mut self, directory: &Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        self.walk(directory, 0, &mut found);
        if found.len() > MAX_DROP_INS {
            self.fail(
                directory.display().to_string(),
                "",
                format!("holds more than {MAX_DROP_INS} drop-ins"),
            );
            found.truncate(MAX_DROP_INS);
        }
        found
    }

    fn walk(&mut self, directory: &Path, depth: usize, found: &mut Vec<PathBuf>) {
        let place = directory.display().to_string();
        if depth > MAX_DIRECTORY_DEPTH {
            self.fail(place, "", format!("lies more than {MAX_DIRECTORY_DEPTH} directories deep"));
            return;
        }
        let listed = std::fs::read_dir(directory).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
        let mut entries = match listed {
            Ok(entries) => entries,
            Err(error) => {
                self.fail(place, "", format!("cannot be listed: {error}"));
                return;
            }
        };
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => self.walk(&path, depth + 1, found),
                Ok(_) if path.extension().is_some_and(|ending| ending == "conf") => found.push(path),
                Ok(_) => {}
                Err(error) => self.fail(path.display().to_string(), "", format!("cannot be read: {error}")),
            }
        }
    }
}

pub(super) fn read_file(file: &Path) -> Result<Vec<u8>, String> {
    let failed = |error: std::io::Error| format!("cannot be read: {error}");
    // Opening a pipe would wait for a writer.
    if !std::fs::metadata(file).map_err(failed)?.is_file() {
        return Err("is not a regular file".to_owned());
    }
    let limit = yaml::MAX_TEXT_BYTES as u64 + 1;
    let mut bytes = Vec::new();
    std::fs::File::open(file).map_err(failed)?.take(limit).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() > yaml::MAX_TEXT_BYTES {
        return Err(format!("is larger than {} bytes", yaml::MAX_TEXT_BYTES));
    }
    Ok(bytes)
}

/// DIFFERS: upstream resolves relative paths in drop-ins against the working directory; here they
/// are resolved against the drop-in's directory, as those of the main file are.
fn resolve_paths(layer: &mut Value, file: &Path) {
    let absolute = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    let folder = absolute.parent().map(|folder| folder.to_string_lossy().into_owned()).unwrap_or_default();
    for path in PATHS {
        let relative = get(layer, path)
            .and_then(Value::as_str)
            .filter(|text| !text.is_empty() && !text.starts_with('/'));
        if let Some(relative) = relative {
            let joined = clean_path(&format!("{folder}/{relative}"));
            set(layer, path, Value::from(joined));
        }
    }
}

/// A path without empty, `.` and `..` segments and without a slash at its end, without file access.
#[must_use]
pub(super) fn clean_path(path: &str) -> String {
    let rooted = path.starts_with('/');
    let mut segments: Vec<&str> = Vec::new();
    for segment in path.split('/') {
        match segment {
            "" | "." => {}
            ".." if segments.last().is_some_and(|last| *last != "..") => {
                segments.pop();
            }
            ".." if rooted => {}
            segment => segments.push(segment),
        }
    }
    let joined = segments.join("/");
    match (rooted, joined.is_empty()) {
        (true, _) => format!("/{joined}"),
        (false, true) => ".".to_owned(),
        (false, false) => joined,
    }
}
