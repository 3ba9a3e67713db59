//! `--help` and `--version`, made from the tables.

use super::exit::EXITS;
use super::flags::{FLAGS, FlagEffect, Syntax};
use super::local::COMMANDS;
use super::options::{option_text, options_of};

use crate::server::KUBERNETES_VERSION;

/// The version line.
#[must_use]
pub fn version() -> String {
    format!("coracle {} (Kubernetes {KUBERNETES_VERSION})", env!("CARGO_PKG_VERSION"))
}

/// The version line of the Go kubelet, which programs such as kubeadm read.
///
/// Go: component-base/version/verflag, `PrintAndExitIfRequested`.
#[must_use]
pub fn kubelet_version() -> String {
    format!("Kubernetes {KUBERNETES_VERSION}\n")
}

/// The help for one command.
#[must_use]
pub fn command(name: &str) -> String {
    let mut out = String::new();
    for (_, synopsis, meaning) in COMMANDS.iter().filter(|(known, ..)| *known == name) {
        out += &format!("Usage:\n  coracle {synopsis}\n      {meaning}\n\n");
    }
    out += "Options:\n";
    for (option, letter, placeholder, meaning) in options_of(name) {
        out += &format!("  {}\n      {meaning}\n", option_text(option, *letter, placeholder));
    }
    out + "\ncoracle --help shows everything, with the exit codes.\n"
}

/// The whole help.
#[must_use]
pub fn help() -> String {
    let mut out = String::from(
        "coracle: a Kubernetes node agent (a kubelet)\n\n\
         Usage:\n  coracle [FLAGS]             run the agent\n  \
         coracle COMMAND [OPTIONS]   run a command; most need an agent on this machine\n\nCommands:\n",
    );
    for (_, synopsis, meaning) in COMMANDS {
        out += &format!("  {synopsis}\n      {meaning}\n");
    }
    out += "  Every command takes --local-socket PATH, the local socket of the agent.\n\nFlags:\n";
    for flag in FLAGS {
        let dashes = if flag.name.len() == 1 { "-" } else { "--" };
        let placeholder = match flag.syntax {
            Syntax::Bool => String::new(),
            _ => format!("={}", flag.placeholder()),
        };
        out += &format!(
            "  {dashes}{}{placeholder}\n      {} (default {})",
            flag.name,
            flag.help(),
            flag.default_text()
        );
        if !flag.field.is_empty() {
            out += &format!(" [{}]", flag.field);
        }
        if flag.effect() != FlagEffect::Works {
            out += &format!(" [{}]", flag.effect().text());
        }
        out.push('\n');
    }
    out += "\nA field's name in brackets is the field of the configuration file that the flag sets.\n\nExit codes:\n";
    for (exit, meaning) in EXITS {
        out += &format!("  {}  {meaning}\n", exit.code());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::local::OPTIONS_OF_COMMANDS;
    use crate::cli::options::{OPTIONS, own_options};

    #[test]
    fn help_shows_flags_commands_and_exit_codes() {
        let help = help();
        for words in ["--max-pods=N", "-v=N", "[maxPods]", "pods [-o", "  3  the configuration is wrong"] {
            assert!(help.contains(words), "{words}");
        }
        assert!(version().starts_with("coracle "));
        assert!(command("logs").contains("logs POD") && !command("logs").contains("pods [-o"));
    }

    #[test]
    fn help_of_each_command_explains_each_of_its_options() {
        for (name, options) in OPTIONS_OF_COMMANDS {
            let help = command(name);
            for option in options.iter().chain(&["local-socket", "help"]) {
                let (_, letter, placeholder, meaning) =
                    OPTIONS.iter().find(|(known, ..)| known == option).expect(option);
                let row = format!("\n  {}\n      {meaning}\n", option_text(option, *letter, placeholder));
                assert!(help.contains(&row), "{name} --{option}: {help}");
            }
        }
        assert!(command("logs").contains("  -n, --namespace NAMESPACE\n"));
        assert!(command("join").contains("  --no-start\n"));
    }

    #[test]
    fn usage_of_join_and_leave_names_each_of_their_options() {
        for name in ["join", "leave"] {
            let options = own_options(name);
            assert!(!options.is_empty());
            let help = command(name);
            let usage = help.split("Options:").next().unwrap();
            for option in options {
                let is_named =
                    usage.split(['[', ']', ' ', '|', '\n']).any(|word| word == format!("--{option}"));
                assert!(is_named, "{name} --{option}: {usage}");
            }
        }
    }
}
