//! The `coracle` program: parse, dispatch, exit code.

use std::process::ExitCode;

use coracle::agent::{self, Outcome};
use coracle::cli::{self, Command, Exit};

fn main() -> ExitCode {
    let mut args = std::env::args_os();
    let program = args.next().unwrap_or_default();
    let args: Vec<_> = args.collect();
    let exit = match cli::parse(&program, &args) {
        Err(problems) => {
            cli::report(&problems);
            Exit::Usage
        }
        Ok(Command::Help) => cli::print(&cli::help()),
        Ok(Command::LocalHelp(command)) => cli::print(&cli::command_help(command)),
        Ok(Command::Version) => cli::print(&format!("{}\n", cli::version())),
        Ok(Command::KubeletVersion) => cli::print(&cli::kubelet_version()),
        Ok(Command::CheckConfig(args)) => cli::check_config(&args),
        Ok(Command::PrintConfig(args)) => cli::print_config(&args),
        Ok(Command::Local(command)) => cli::run_local(command),
        Ok(Command::Agent(_)) if cli::is_first_contact(&program, &args) => cli::print(&cli::welcome()),
        Ok(Command::Agent(args)) => cli::with_config(&args, |loaded| {
            match agent::run(&args, loaded, cli::effective_flags(&args.given)) {
                Outcome::Stopped => Exit::Success,
                Outcome::Failed => Exit::Failure,
                Outcome::Configuration => Exit::Configuration,
                Outcome::Locked => Exit::Locked,
            }
        }),
    };
    exit.into()
}
