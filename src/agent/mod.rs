//! Room `agent`.

use crate::cli::{AgentArgs, Exit};
use crate::config::Loaded;

/// Runs the agent until it is told to stop.
#[must_use]
pub fn run(_args: AgentArgs, _loaded: Loaded) -> Exit {
    Exit::Failure
}
