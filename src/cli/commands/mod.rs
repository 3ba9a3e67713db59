//! The local commands: they send requests to the agent's socket and print for people or for scripts.
//!
//! Threads: only `main`, and of `coracle ui` those of its connections. A wait for a response has a deadline, except while following.
//! Output: text of pods is printed with its control characters escaped, except by `logs`.
//! Go: kubectl's printers and describers, crictl.

mod age;
mod check;
mod cis;
mod client;
mod console;
mod debug;
mod describe;
mod devices;
mod error;
mod events;
mod images;
mod join;
mod logs;
mod offline;
mod pod_status;
mod pods;
mod setup;
mod status;
mod streams;
#[cfg(test)]
mod tests;
mod top;
mod ui;
mod validate;
mod verify_images;
mod version;
mod volumes;

use super::exit::Exit;
use super::local::{LocalCommand, Subcommand};
use super::table::Paint;

use client::Client;
use console::Console;
use error::{Outcome, print_stderr};

/// Runs a local command and prints its result, or why it failed.
#[must_use]
pub fn run(command: LocalCommand) -> Exit {
    let client = Client::new(&command.socket);
    let mut stdout = std::io::stdout().lock();
    let mut console = Console { out: &mut stdout, paint: Paint::for_stdout(), now: jiff::Timestamp::now() };
    match dispatch(command.subcommand, &client, &mut console) {
        Ok(exit) => exit,
        Err(error) => {
            let exit = error.exit();
            if exit != Exit::Success {
                print_stderr(&error.to_string());
            }
            exit
        }
    }
}

fn dispatch(subcommand: Subcommand, client: &Client, console: &mut Console<'_>) -> Outcome {
    match subcommand {
        Subcommand::Pods(options) => pods::run(client, console, &options),
        Subcommand::Describe { pod } => describe::run(client, console, &pod),
        Subcommand::Logs(options) => logs::run(client, console, &options),
        Subcommand::Debug(options) => debug::run(client, console, &options),
        Subcommand::Exec(options) => streams::session::run(client, &options),
        Subcommand::PortForward(options) => streams::forward::run(client, console, &options),
        Subcommand::Status { output } => status::run(client, console, output),
        Subcommand::Events(options) => events::run(client, console, &options),
        Subcommand::Top(options) => top::run(client, console, &options),
        Subcommand::Images { output, command } => images::run(client, console, output, &command),
        Subcommand::Setup(options) => {
            // Files of the runtime name the directory of the socket.
            let socket = std::path::absolute(client.socket());
            setup::run(console, &options, socket.as_deref().unwrap_or(client.socket()))
        }
        Subcommand::VerifyImages(options) => verify_images::run(client, console, &options),
        Subcommand::Volumes(options) => volumes::run(client, console, &options),
        Subcommand::Offline { output, command } => offline::run(client, console, output, &command),
        Subcommand::Devices { output } => devices::run(client, console, output),
        Subcommand::Join(options) => join::run(console, &options),
        Subcommand::Leave(options) => join::leave::run(client, console, &options),
        Subcommand::Check { output, config, cis: true, .. } => {
            cis::run(client, console, output, config.as_deref(), std::path::Path::new(check::CONFIG))
        }
        Subcommand::Check { output, root_dir, config, cis: false } => {
            check::run(client, console, output, root_dir, config.as_deref())
        }
        Subcommand::Validate { files, output } => validate::run(console, &files, output),
        Subcommand::Ui(options) => ui::run(client, console, &options),
        Subcommand::Version => version::run(client, console),
    }
}
