//! The manual pages and the completions of shells, generated from the tables. They exist in tests
//! only, so that the program does not carry them: a test compares the files in `packaging/man` and
//! `packaging/completions` with the tables, and writes them with `UPDATE_DOCS=1`.

use std::fmt::Write as _;
use std::path::Path;

use super::exit::EXITS;
use super::flags::{FLAGS, Flag, FlagEffect, Syntax};
use super::local::{COMMANDS, OPTIONS_OF_COMMANDS};
use super::options::{CommandOption, OPTIONS, option_text};
use crate::config::DefaultSet;
use crate::config::effects::default_text;
use crate::config::fields::{FIELDS, FieldEffect};

const ORIGIN: &str =
    "Generated from the tables of the sources by UPDATE_DOCS=1 cargo test --lib pages. Do not edit.";

/// What completes the value of an option.
#[derive(Clone, Copy)]
enum Value {
    Any,
    File,
    /// A container of the pod in the line.
    Container,
    /// With `|` between the words.
    Words(&'static str),
}

/// An option as the pages need it: name, letter, and what completes its value. One without a value has no
/// completion.
type PageOption = (&'static str, char, Option<Value>, &'static str);

fn page_option(option: &'static CommandOption) -> PageOption {
    let (name, letter, placeholder, meaning) = *option;
    let value = match placeholder {
        "" => None,
        "FILE" | "DIR" | "PATH" | "SOCKET" => Some(Value::File),
        "CONTAINER" => Some(Value::Container),
        words if words.contains('|') => Some(Value::Words(words)),
        _ => Some(Value::Any),
    };
    (name, letter, value, meaning)
}

fn options() -> Vec<PageOption> {
    OPTIONS.iter().map(page_option).collect()
}

/// Prints the names of pods in the table of `coracle pods`. A shell expands what it completes, so only
/// names pass.
const POD_NAMES: &str = "awk 'NR > 1 && $2 ~ /^[a-z0-9.-]+$/ { print $2 }'";

/// Prints the names of containers in the text of `coracle describe`, which are below headings.
const CONTAINER_NAMES: &str = "awk '/^[^ ]/ { names = /Containers:/ } names && /^  [^ ]/ { sub(\":.*\", \"\"); if ($1 ~ /^[a-z0-9-]+$/) print $1 }'";

/// Options that select the pods: they are passed on to the command that lists names.
const SELECTING: &[&str] = &["namespace", "local-socket"];

/// The other options with a value, which is no argument of the command; as patterns of a shell.
fn valued(separator: &str) -> String {
    let mut all: Vec<String> = Vec::new();
    for (name, letter, value, _) in &options() {
        if value.is_some() && !SELECTING.contains(name) {
            all.extend((*letter != ' ').then(|| format!("-{letter}")));
            all.push(format!("--{name}"));
        }
    }
    all.join(separator)
}

/// Commands whose first argument is a pod.
const FOR_PODS: &str = "describe|logs|debug|exec|attach|port-forward|events";

/// The second words of commands, and whether files follow.
const WORDS: &[(&str, &str, bool)] = &[
    ("images", "list import rm export verify", true),
    ("offline", "list check purge trust accept", true),
    ("setup", "runtime", false),
];

/// The options that a command takes.
fn options_of(command: &str) -> Vec<PageOption> {
    super::options::options_of(command).map(page_option).collect()
}

/// Names of commands, each once.
fn commands() -> Vec<&'static str> {
    let mut names: Vec<&str> = Vec::new();
    for (name, ..) in COMMANDS {
        if !names.contains(name) {
            names.push(name);
        }
    }
    names
}

fn dashed(flag: &Flag) -> String {
    let dashes = if flag.name.len() == 1 { "-" } else { "--" };
    format!("{dashes}{}", flag.name)
}

/// Whether a flag's value is a path, as its name says.
fn is_path(flag: &Flag) -> bool {
    let endings = [
        "file",
        "dir",
        "path",
        "config",
        "kubeconfig",
        "root-dir",
        "local-socket",
        "local-objects",
        "offline-key",
    ];
    flag.syntax == Syntax::Text && endings.iter().any(|ending| flag.name.ends_with(ending))
}

/// Text for troff: backslashes, hyphens and leading dots have a meaning there.
fn troff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

fn item(out: &mut String, head: &str, body: &str) {
    let _ = write!(out, ".TP\n.B {}\n{}\n", troff(head).replace('"', "\\(dq"), troff(body));
}

fn manual() -> String {
    let mut out = format!(
        ".\\\" {ORIGIN}\n.TH CORACLE 8 \"\" coracle \"System administration\"\n\
         .SH NAME\ncoracle \\- Kubernetes node agent\n\
         .SH SYNOPSIS\n.B coracle\n.RI [ flags ]\n.br\n.B coracle\n.I command\n.RI [ options ]\n\
         .SH DESCRIPTION\n\
         Without a command, coracle runs the agent of a node: it starts, watches and ends pods through a\n\
         container runtime, as the kubelet does. Pods come from manifests in a directory, from a URL, and\n\
         from an API server. A command asks the agent of this machine through its local socket, as root.\n\
         Without any argument on a terminal, and not as a service, it prints the next commands instead.\n\
         .SH COMMANDS\n"
    );
    for (_, synopsis, meaning) in COMMANDS {
        item(&mut out, synopsis, meaning);
    }
    out += ".PP\nOptions of commands:\n";
    for (name, letter, placeholder, meaning) in OPTIONS {
        item(&mut out, &option_text(name, *letter, placeholder), meaning);
    }
    out += ".SH FLAGS\nFlags of the agent. A name in brackets is the field of the configuration file that the flag sets.\n";
    for flag in FLAGS {
        let placeholder =
            if flag.syntax == Syntax::Bool { String::new() } else { format!("={}", flag.placeholder()) };
        let mut body = format!("{} (default {})", flag.help(), flag.default_text());
        if !flag.field.is_empty() {
            let _ = write!(body, " [{}]", flag.field);
        }
        if flag.effect() != FlagEffect::Works {
            let _ = write!(body, " [{}]", flag.effect().text());
        }
        item(&mut out, &format!("{}{placeholder}", dashed(flag)), &body);
    }
    out += ".SH EXIT STATUS\n";
    for (exit, meaning) in EXITS {
        item(&mut out, &exit.code().to_string(), meaning);
    }
    out += ".SH ENVIRONMENT\n";
    item(
        &mut out,
        "CORACLE_LOG",
        "log level for each module, such as warn,coracle::volumes=debug; overrides -v",
    );
    out += ".SH FILES\n";
    for (path, meaning) in [
        ("/etc/coracle/config.yaml", "configuration, see coracle-config(5)"),
        ("/etc/kubernetes/manifests", "manifests of static pods"),
        ("/var/lib/kubelet", "state of the agent"),
        ("/var/lib/kubelet/images.d", "archives of images"),
        ("/run/coracle/hosts.toml", "registry of image archives, for containerd"),
        ("/run/coracle/coracle.sock", "socket of the commands, for root"),
        ("/var/log/pods", "logs of containers"),
    ] {
        item(&mut out, path, meaning);
    }
    out + ".SH SIGNALS\n.B SIGTERM\nends the agent, and pods continue to run.\n.B SIGQUIT\nlogs what each thread waits for.\n\
         .SH SEE ALSO\n.BR coracle\\-config (5),\n.BR containerd (8)\n"
}

fn config_manual() -> String {
    let mut out = format!(
        ".\\\" {ORIGIN}\n.TH CORACLE\\-CONFIG 5 \"\" coracle \"File formats\"\n\
         .SH NAME\ncoracle\\-config \\- configuration of the node agent coracle\n\
         .SH SYNOPSIS\n.I /etc/coracle/config.yaml\n\
         .SH DESCRIPTION\n\
         The file is a KubeletConfiguration in YAML or JSON. The flag\n.B \\-\\-config\nnames it, and\n\
         .B \\-\\-config\\-dir\na directory of files (*.conf) that are merged over it. Flags override both.\n\
         .B coracle \\-\\-check\\-config\nprints all errors, and\n.B coracle \\-\\-print\\-config\nthe effective configuration.\n\
         .SH EXAMPLE\n.nf\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
         containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n\
         staticPodPath: /etc/kubernetes/manifests\n.fi\n.SH FIELDS\n"
    );
    for field in FIELDS {
        let mut body =
            format!("{} (default {}", field.kind.type_name(), default_text(field.path, DefaultSet::WithFile));
        if let Some(flag) = FLAGS.iter().find(|flag| flag.field == field.path) {
            let _ = write!(body, ", flag {}", dashed(flag));
        }
        let _ = write!(body, "): {}", field.help);
        if field.effect != FieldEffect::Works {
            let _ = write!(body, " [{}]", field.effect.text());
        }
        item(&mut out, field.path, &body);
    }
    out + ".SH SEE ALSO\n.BR coracle (8)\n"
}

fn bash() -> String {
    let mut out = format!("# bash completion of coracle. {ORIGIN}\n# shellcheck shell=bash\n");
    let _ = write!(
        out,
        "_coracle_names() {{ # pods | containers\n    local word before='' words=() agent=()\n    \
         for word in \"${{COMP_WORDS[@]:1:COMP_CWORD-1}}\"; do\n        \
         [ \"$word\" != = ] || continue\n        case $before in\n        \
         -n | --namespace | --local-socket) agent+=(\"$before\" \"$word\") before='' ;;\n        \
         {}) before='' ;;\n        \
         *)\n            before=$word\n            case $word in -*) ;; *) words+=(\"$word\") ;; esac\n            ;;\n        \
         esac\n    done\n    case $1 in\n    \
         pods) coracle pods \"${{agent[@]}}\" 2>/dev/null | {POD_NAMES} ;;\n    \
         containers)\n        [ -n \"${{words[1]-}}\" ] || return\n        \
         coracle describe \"${{words[1]}}\" \"${{agent[@]}}\" 2>/dev/null |\n            {CONTAINER_NAMES}\n        ;;\n    \
         esac\n}}\n",
        valued(" | ")
    );
    let _ = write!(
        out,
        "_coracle() {{\n    local current=$2 before=$3 command='' word\n    COMPREPLY=()\n    \
         for word in \"${{COMP_WORDS[@]:1:COMP_CWORD-1}}\"; do\n        case $word in\n        \
         {}) command=$word && break ;;\n        esac\n    done\n    case $before in\n",
        commands().join(" | ")
    );
    for (name, letter, value, _) in &options() {
        let short = if *letter == ' ' { String::new() } else { format!("-{letter} | ") };
        let words = match value {
            Some(Value::Words(words)) => format!("'{}'", words.replace('|', " ")),
            Some(Value::Container) => "\"$(_coracle_names containers)\"".to_owned(),
            _ => continue,
        };
        let _ = writeln!(
            out,
            "    {short}--{name}) mapfile -t COMPREPLY < <(compgen -W {words} -- \"$current\") && return ;;"
        );
    }
    let mut paths: Vec<String> = FLAGS.iter().filter(|flag| is_path(flag)).map(dashed).collect();
    for (name, _, value, _) in &options() {
        let long = format!("--{name}");
        if matches!(value, Some(Value::File)) && !paths.contains(&long) {
            paths.push(long);
        }
    }
    let _ = write!(
        out,
        "    {})\n        mapfile -t COMPREPLY < <(compgen -f -- \"$current\") && return\n        ;;\n    esac\n    \
         case $command:$current in\n",
        paths.join(" | ")
    );
    for command in commands() {
        let options: Vec<String> = options_of(command).iter().map(|(name, ..)| format!("--{name}")).collect();
        let _ = writeln!(
            out,
            "    {command}:-*) mapfile -t COMPREPLY < <(compgen -W '{}' -- \"$current\") ;;",
            options.join(" ")
        );
    }
    for (command, words, files) in WORDS {
        let files = if *files { " -f" } else { "" };
        let _ = writeln!(
            out,
            "    {command}:*) mapfile -t COMPREPLY < <(compgen -W '{words}'{files} -- \"$current\") ;;"
        );
    }
    let pods: Vec<String> = FOR_PODS.split('|').map(|command| format!("{command}:*")).collect();
    let _ = write!(
        out,
        "    {}) mapfile -t COMPREPLY < <(compgen -W \"$(_coracle_names pods)\" -- \"$current\") ;;\n    \
         validate:*) mapfile -t COMPREPLY < <(compgen -f -- \"$current\") ;;\n    \
         :-*) mapfile -t COMPREPLY < <(compgen -W '{}' -- \"$current\") ;;\n    \
         :*) mapfile -t COMPREPLY < <(compgen -W '{}' -- \"$current\") ;;\n    esac\n}}\n\
         complete -o filenames -F _coracle coracle\n",
        pods.join(" | "),
        FLAGS.iter().map(dashed).collect::<Vec<_>>().join(" "),
        commands().join(" ")
    );
    out
}

/// Text inside single quotes and brackets of zsh's `_arguments`.
fn zsh_text(text: &str) -> String {
    text.replace('\'', "'\\''").replace('[', "(").replace(']', ")").replace(':', "\\:")
}

fn zsh() -> String {
    let mut out = format!("#compdef coracle\n# zsh completion of coracle. {ORIGIN}\n\n");
    let _ = write!(
        out,
        "_coracle_names() {{\n    local word before=''\n    local -a arguments agent\n    \
         for word in \"${{(@)words[2,CURRENT-1]}}\"; do\n        case $before in\n        \
         -n|--namespace|--local-socket) agent+=(\"$before\" \"$word\"); before='' ;;\n        \
         {}) before='' ;;\n        \
         *)\n            before=$word\n            case $word in\n            \
         --namespace=*|--local-socket=*) agent+=(\"$word\") ;;\n            \
         -*) ;;\n            *) arguments+=(\"$word\") ;;\n            esac\n            ;;\n        \
         esac\n    done\n    case $1 in\n    \
         pods) coracle pods $agent 2>/dev/null | {POD_NAMES} ;;\n    \
         containers)\n        [[ -n $arguments[2] ]] || return\n        \
         coracle describe \"$arguments[2]\" $agent 2>/dev/null | {CONTAINER_NAMES}\n        ;;\n    \
         esac\n}}\n\n",
        valued("|")
    );
    for (function, names) in [("_coracle_pods", "pods"), ("_coracle_containers", "containers")] {
        let _ = write!(out, "{function}() {{\n    compadd -- ${{(f)\"$(_coracle_names {names})\"}}\n}}\n\n");
    }
    out += "_coracle_flags() {\n    _arguments -S \\\n";
    for flag in FLAGS {
        let value = match flag.syntax {
            Syntax::Bool => String::new(),
            _ if is_path(flag) => ":path:_files".to_owned(),
            _ => format!(":{}:", zsh_text(flag.placeholder())),
        };
        let equals = if flag.syntax == Syntax::Bool || flag.name.len() == 1 { "" } else { "=" };
        let _ = writeln!(out, "        '{}{equals}[{}]{value}' \\", dashed(flag), zsh_text(flag.help()));
    }
    out += "        '1:command:_coracle_commands'\n}\n\n_coracle_commands() {\n    local -a commands=(\n";
    for name in commands() {
        let meaning = COMMANDS.iter().find(|(known, ..)| *known == name).map_or("", |(.., meaning)| meaning);
        let _ = writeln!(out, "        '{name}:{}'", meaning.replace('\'', "'\\''"));
    }
    out += "    )\n    _describe command commands\n}\n\n_coracle() {\n    local command=${words[(r)";
    let _ = write!(out, "({})", commands().join("|"));
    out += "]}\n    case $command in\n";
    for command in commands() {
        let _ = writeln!(out, "    {command})\n        _arguments \\");
        for (name, letter, value, meaning) in &options_of(command) {
            let value = match value {
                None => String::new(),
                Some(Value::Any) => format!(":{name}:"),
                Some(Value::File) => ":path:_files".to_owned(),
                Some(Value::Container) => format!(":{name}:_coracle_containers"),
                Some(Value::Words(words)) => format!(":{name}:({})", words.replace('|', " ")),
            };
            let meaning = zsh_text(meaning);
            if *letter == ' ' {
                let _ = writeln!(out, "            '--{name}[{meaning}]{value}' \\");
            } else {
                let _ = writeln!(
                    out,
                    "            '(-{letter} --{name})'{{-{letter},--{name}}}'[{meaning}]{value}' \\"
                );
            }
        }
        let words = WORDS.iter().find(|(name, ..)| *name == command);
        let words = words.map(|(_, words, _)| format!("'2:word:({words})' '*:file:_files'"));
        let rest = match command {
            "validate" => "'*:manifest:_files'",
            _ if words.is_some() => words.as_deref().unwrap_or_default(),
            _ if FOR_PODS.split('|').any(|name| name == command) => {
                "'2:pod:_coracle_pods' '*::argument:_default'"
            }
            _ => "'*::'",
        };
        let _ = writeln!(out, "            '1:command:' {rest}\n        ;;");
    }
    out + "    *) _coracle_flags ;;\n    esac\n}\n\n_coracle \"$@\"\n"
}

fn fish() -> String {
    let quoted = |text: &str| text.replace('\\', "\\\\").replace('\'', "\\'");
    let mut out = format!("# fish completion of coracle. {ORIGIN}\n");
    let all = commands().join(" ");
    let _ = write!(
        out,
        "function __coracle_names\n    set -l before ''\n    set -l arguments\n    set -l agent\n    \
         for word in (commandline -opc)[2..-1]\n        switch \"$before\"\n            \
         case -n --namespace --local-socket\n                set -a agent $before $word\n                set before ''\n            \
         case {}\n                set before ''\n            \
         case '*'\n                set before $word\n                switch $word\n                    \
         case '--namespace=*' '--local-socket=*'\n                        set -a agent $word\n                    \
         case '-*'\n                    case '*'\n                        set -a arguments $word\n                \
         end\n        end\n    end\n    switch $argv[1]\n        case pods\n            \
         coracle pods $agent 2>/dev/null | {POD_NAMES}\n        case containers\n            \
         test -n \"$arguments[2]\"; or return\n            \
         coracle describe $arguments[2] $agent 2>/dev/null | {CONTAINER_NAMES}\n    end\nend\n",
        valued(" ")
    );
    let none = format!("not __fish_seen_subcommand_from {all}");
    out += "complete -c coracle -f\n";
    for name in commands() {
        let meaning = COMMANDS.iter().find(|(known, ..)| *known == name).map_or("", |(.., meaning)| meaning);
        let _ = writeln!(out, "complete -c coracle -n '{none}' -a {name} -d '{}'", quoted(meaning));
        for (option, letter, value, meaning) in &options_of(name) {
            let letter = if *letter == ' ' { String::new() } else { format!(" -s {letter}") };
            let value = match value {
                None => String::new(),
                Some(Value::Any) => " -x".to_owned(),
                Some(Value::File) => " -r -F".to_owned(),
                Some(Value::Container) => " -x -a '(__coracle_names containers)'".to_owned(),
                Some(Value::Words(words)) => format!(" -x -a '{}'", words.replace('|', " ")),
            };
            let _ = writeln!(
                out,
                "complete -c coracle -n '__fish_seen_subcommand_from {name}' -l {option}{letter}{value} -d '{}'",
                quoted(meaning)
            );
        }
    }
    let _ = writeln!(
        out,
        "complete -c coracle -n '__fish_seen_subcommand_from {}' -a '(__coracle_names pods)'\n\
         complete -c coracle -n '__fish_seen_subcommand_from validate' -F",
        FOR_PODS.replace('|', " ")
    );
    for (command, words, files) in WORDS {
        let files = if *files { " -F" } else { "" };
        let _ = writeln!(
            out,
            "complete -c coracle -n '__fish_seen_subcommand_from {command}'{files} -a '{words}'"
        );
    }
    for flag in FLAGS {
        let name =
            if flag.name.len() == 1 { format!("-s {}", flag.name) } else { format!("-l {}", flag.name) };
        let value = match flag.syntax {
            Syntax::Bool => "",
            _ if is_path(flag) => " -r -F",
            _ => " -x",
        };
        let _ = writeln!(out, "complete -c coracle -n '{none}' {name}{value} -d '{}'", quoted(flag.help()));
    }
    out
}

/// `UPDATE_DOCS=1` writes the files instead.
#[test]
fn manual_pages_and_completions_are_up_to_date() {
    let root = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let mut stale = Vec::new();
    for (name, wanted) in [
        ("man/coracle.8", manual()),
        ("man/coracle-config.5", config_manual()),
        ("completions/coracle.bash", bash()),
        ("completions/_coracle", zsh()),
        ("completions/coracle.fish", fish()),
    ] {
        let path = Path::new(&root).join("packaging").join(name);
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&path, wanted).expect("the file can be written");
        } else if std::fs::read_to_string(&path).ok() != Some(wanted) {
            stale.push(format!("packaging/{name}"));
        }
    }
    assert!(stale.is_empty(), "stale, write them with UPDATE_DOCS=1: {}", stale.join(", "));
}

#[test]
fn every_command_has_a_row_of_options() {
    for name in commands() {
        assert!(OPTIONS_OF_COMMANDS.iter().any(|(command, _)| *command == name), "{name}");
        assert!(options_of(name).len() >= 2, "{name}");
    }
}

/// The completion of bash with a program `coracle` that prints canned texts.
#[test]
fn bash_completes_pods_and_containers_of_the_pod_in_the_line() {
    const PROGRAM: &str = r#"
        coracle() {
            case "$*" in
            pods) printf 'NAMESPACE NAME READY\na web 1/1\nb db 1/1\nb $(false) 1/1\n' ;;
            'pods -n b --local-socket s') printf 'NAMESPACE NAME READY\nb db 1/1\n' ;;
            'describe web' | 'describe web -n a')
                printf 'Name: web\nInit Containers:\n  side:  (sidecar)\n    Image: i\nContainers:\n  app:\n    State: x\n'
                printf 'Conditions:\n  Ready   False\nVolumes:\n  data:  hostPath\n' ;;
            esac
        }
        source "$1"
        shift
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        _coracle coracle "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        echo "${COMPREPLY[*]}"
    "#;
    let root = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let file = Path::new(&root).join("packaging/completions/coracle.bash");
    for (line, expected) in [
        ("logs ", "web db"),
        ("logs w", "web"),
        ("exec -n b --local-socket s ", "db"),
        ("logs web -c ", "side app"),
        ("logs -n a --tail 3 web -f --container a", "app"),
        ("debug web --image i --target s", "side"),
        ("logs -c ", ""),
        ("check --c", "--config --cis"),
    ] {
        let words = line.split(' ');
        let mut bash = std::process::Command::new("bash");
        bash.args(["-c", PROGRAM, "bash"]).arg(&file).arg("coracle").args(words);
        let output = bash.output().expect("bash runs");
        let found = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        assert_eq!(found, expected, "{line:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
