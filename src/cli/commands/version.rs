//! `coracle version`: of this program and of the running agent.

use crate::cli::exit::Exit;
use crate::server::VersionReply;

use super::client::Client;
use super::console::Console;
use super::error::Outcome;

pub(super) fn run(client: &Client, console: &mut Console<'_>) -> Outcome {
    let own = VersionReply::own();
    console.field(0, "coracle", &own.version)?;
    console.field(0, "Kubernetes", &own.kubernetes)?;
    // If no agent runs, the program prints its own version.
    match client.get::<VersionReply>("/v1/version") {
        Ok(agent) => console.field(0, "running agent", &agent.version)?,
        Err(error) => console.field(0, "running agent", &format!("none ({error})"))?,
    }
    Ok(Exit::Success)
}
