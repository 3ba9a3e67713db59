//! The `coracle` program: parse, dispatch, exit code.

use std::process::ExitCode;

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
            Ok(loaded) => coracle::agent::run(*args, loaded),
        },
    };
    exit.into()
}
