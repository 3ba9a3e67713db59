//! The `coracle` program: parse, dispatch, exit code.

use std::process::ExitCode;

use coracle::agent::{self, Outcome};
use coracle::cli::{self, Command, Exit};

fn main() -> ExitCode {
    let exit = match cli::parse(std::env::args_os().skip(1)) {
        Err(problems) => {
            cli::report(&problems);
            Exit::Usage
        }
        Ok(Command::Help) => cli::print(&cli::help::help()),
        Ok(Command::LocalHelp(command)) => cli::print(&cli::help::command(command)),
        Ok(Command::Version) => cli::print(&format!("{}\n", cli::help::version())),
        Ok(Command::CheckConfig(args)) => cli::check_config(&args),
        Ok(Command::PrintConfig(args)) => cli::print_config(&args),
        Ok(Command::Local(command)) => cli::commands::run(command),
        Ok(Command::Agent(args)) => match coracle::config::load(&args.request) {
            Err(problems) => {
                cli::report(&problems);
                Exit::Configuration
            }
            Ok(loaded) => match agent::run(&args, &loaded, cli::effective_flags(&args.given)) {
                Outcome::Stopped => Exit::Success,
                Outcome::Failed => Exit::Failure,
                Outcome::Configuration => Exit::Configuration,
                Outcome::Locked => Exit::Locked,
            },
        },
    };
    exit.into()
}
