//! `coracle version`: of this program and, where one answers, of the agent.

use crate::cli::Exit;
use crate::server::VersionReply;

use super::Outcome;
use super::client::Client;
use super::console::Console;

pub(super) fn run(client: &Client, console: &mut Console<'_>) -> Outcome {
    let own = VersionReply::own();
    console.field(0, "coracle", &own.version)?;
    console.field(0, "Kubernetes", &own.kubernetes)?;
    // No agent is no error here: the program's own version was asked.
    match client.get::<VersionReply>("/v1/version") {
        Ok(agent) => console.field(0, "running agent", &agent.version)?,
        Err(why) => console.field(0, "running agent", &format!("none ({why})"))?,
    }
    Ok(Exit::Success)
}
