//! The options of the static policy (Go: pkg/kubelet/cm/cpumanager/policy_options.go).

use std::collections::BTreeMap;

/// The options of `cpuManagerPolicyOptions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::struct_excessive_bools, reason = "each is an option of the configuration")]
pub struct Options {
    /// `full-pcpus-only`: only whole cores.
    pub full_cores: bool,
    /// `distribute-cpus-across-numa`: as many CPUs of each NUMA node, if one is not enough.
    pub across_nodes: bool,
    /// `align-by-socket` (alpha): sockets instead of NUMA nodes.
    pub by_socket: bool,
    /// `distribute-cpus-across-cores` (alpha): one thread of each core.
    pub across_cores: bool,
    /// `strict-cpu-reservation`: shared containers do not run on reserved CPUs.
    pub strict_reservation: bool,
    /// `prefer-align-cpus-by-uncorecache`: as few uncore caches as possible.
    pub by_cache: bool,
}

/// Which options may be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gates {
    /// Gate `CPUManagerPolicyAlphaOptions`.
    pub alpha: bool,
    /// Gate `CPUManagerPolicyBetaOptions`.
    pub beta: bool,
}

impl Default for Gates {
    fn default() -> Gates {
        Gates { alpha: false, beta: true }
    }
}

/// Options are invalid. The texts of users' mistakes are upstream's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names of fields say what the values are")]
pub enum OptionsError {
    /// The name is unknown.
    #[error("unknown CPU Manager Policy option: {name:?}")]
    Unknown { name: String },
    /// The gate of its maturity is off.
    #[error("CPU Manager Policy {maturity}-level Options not enabled, but option {name:?} provided")]
    Gate { maturity: &'static str, name: String },
    /// The value is not one of Go's texts for true and false.
    #[error("bad value for option {name:?}: {value:?} is not a boolean")]
    Value { name: String, value: String },
    /// Two options exclude each other.
    #[error("static policy options {first} and {second} can not be used at the same time")]
    Conflict { first: &'static str, second: &'static str },
}

const FULL_CORES: &str = "full-pcpus-only";
const ACROSS_NODES: &str = "distribute-cpus-across-numa";
const BY_SOCKET: &str = "align-by-socket";
const ACROSS_CORES: &str = "distribute-cpus-across-cores";
const STRICT_RESERVATION: &str = "strict-cpu-reservation";
const BY_CACHE: &str = "prefer-align-cpus-by-uncorecache";

impl Options {
    /// From `cpuManagerPolicyOptions`.
    ///
    /// # Errors
    /// For an unknown option, one whose gate is off, a value that is no boolean, and two options
    /// that exclude each other.
    pub fn parse(given: &BTreeMap<String, String>, gates: Gates) -> Result<Options, OptionsError> {
        let mut options = Options::default();
        for (name, value) in given {
            let option = match name.as_str() {
                FULL_CORES => &mut options.full_cores,
                ACROSS_NODES => &mut options.across_nodes,
                BY_SOCKET => &mut options.by_socket,
                ACROSS_CORES => &mut options.across_cores,
                STRICT_RESERVATION => &mut options.strict_reservation,
                BY_CACHE => &mut options.by_cache,
                _ => return Err(OptionsError::Unknown { name: name.clone() }),
            };
            let off = match name.as_str() {
                BY_SOCKET | ACROSS_CORES => (!gates.alpha).then_some("Alpha"),
                ACROSS_NODES => (!gates.beta).then_some("Beta"),
                _ => None,
            };
            if let Some(maturity) = off {
                return Err(OptionsError::Gate { maturity, name: name.clone() });
            }
            *option = boolean(value)
                .ok_or_else(|| OptionsError::Value { name: name.clone(), value: value.clone() })?;
        }
        let conflicts = [
            (options.full_cores && options.across_cores, FULL_CORES, ACROSS_CORES),
            (options.across_nodes && options.across_cores, ACROSS_NODES, ACROSS_CORES),
            (options.by_cache && options.across_cores, BY_CACHE, ACROSS_CORES),
            (options.by_cache && options.across_nodes, BY_CACHE, ACROSS_NODES),
        ];
        match conflicts.into_iter().find(|(both, ..)| *both) {
            Some((_, first, second)) => Err(OptionsError::Conflict { first, second }),
            None => Ok(options),
        }
    }
}

/// The texts of Go's `strconv.ParseBool`.
fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}
