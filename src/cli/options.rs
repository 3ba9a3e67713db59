//! The options of the commands, for their help, the manual and the completions of shells.

use super::local::OPTIONS_OF_COMMANDS;

/// An option: its name, its letter or a blank, a placeholder for its value (empty if it has none), and what
/// it does.
pub(super) type CommandOption = (&'static str, char, &'static str, &'static str);

/// The options of all commands.
pub(super) const OPTIONS: &[CommandOption] = &[
    ("output", 'o', "json|yaml|wide", "format of the output"),
    ("watch", 'w', "", "keep watching"),
    ("namespace", 'n', "NAMESPACE", "namespace"),
    ("all-namespaces", 'A', "", "all namespaces, which is the default"),
    ("container", 'c', "CONTAINER", "container"),
    ("follow", 'f', "", "follow the log"),
    ("previous", 'p', "", "the instance before"),
    ("tail", ' ', "LINES", "number of lines from the end"),
    ("since", ' ', "DURATION", "age of the oldest line"),
    ("timestamps", ' ', "", "print the time of each line"),
    ("image", ' ', "IMAGE", "image of the ephemeral container"),
    ("target", ' ', "CONTAINER", "container whose processes are shared"),
    ("stdin", 'i', "", "pass the input on"),
    ("tty", 't', "", "give the command a terminal"),
    ("address", ' ', "ADDRESS,...", "addresses to listen on"),
    ("once", ' ', "", "print one table"),
    ("digests", ' ', "", "compare contents, not only sizes"),
    ("root-dir", ' ', "DIR", "directory of the agent's state"),
    ("config", ' ', "FILE", "configuration file"),
    ("cis", ' ', "", "rules of benchmarks instead of the machine"),
    ("images-dir", ' ', "DIR", "directories of image archives"),
    ("no-wait", ' ', "", "do not wait for the images"),
    ("damaged", ' ', "", "remove copies of damaged files"),
    ("all", ' ', "", "remove all that is stored"),
    ("yes", ' ', "", "confirm the removal"),
    ("remove", ' ', "", "remove the added authorities"),
    ("dry-run", ' ', "", "print what would be done"),
    ("runtime", ' ', "containerd|crio", "container runtime"),
    ("containerd-config", ' ', "FILE", "configuration of containerd"),
    ("certs-dir", ' ', "DIR", "directory of registries of containerd"),
    ("registries-dir", ' ', "DIR", "directory registries.conf.d of CRI-O"),
    ("registry", ' ', "REGISTRY", "registries that get a mirror in CRI-O"),
    ("image-registry", ' ', "ADDRESS:PORT", "address of the agent's registry, with a fixed port"),
    ("image-mirror-file", ' ', "FILE", "file of the agent's registry for the runtime"),
    ("listen", ' ', "ADDRESS:PORT", "address and port of the pages"),
    ("tls-cert", ' ', "FILE", "certificate of the pages"),
    ("tls-key", ' ', "FILE", "key of that certificate"),
    ("insecure-listen", ' ', "", "listen for other machines without TLS"),
    ("token", ' ', "ID.SECRET", "bootstrap token; - reads it from standard input"),
    ("token-file", ' ', "FILE", "file with the bootstrap token"),
    ("discovery-token-ca-cert-hash", ' ', "sha256:HASH", "sha256 hash of the key of the cluster's authority"),
    ("discovery-token-unsafe-skip-ca-verification", ' ', "", "join without the hash, and trust the network"),
    ("discovery-file", ' ', "FILE", "kubeconfig with address and authority of the cluster"),
    ("tls-bootstrap-token", ' ', "ID.SECRET", "token for the first certificate"),
    ("k0s-token", ' ', "FILE", "file with a token of k0s"),
    ("bootstrap-kubeconfig", ' ', "FILE", "kubeconfig for the first certificate"),
    ("write-bundle", ' ', "FILE", "file to write for the nodes of bundles"),
    ("from-bundle", ' ', "FILE", "file of --write-bundle"),
    ("node-name", ' ', "NAME", "name of the node"),
    ("node-ip", ' ', "IP,...", "addresses of the node"),
    ("node-labels", ' ', "KEY=VALUE,...", "labels of the node"),
    ("cri-socket", ' ', "SOCKET", "socket of the container runtime"),
    ("kubernetes-dir", ' ', "DIR", "directory of the node's kubeconfig"),
    ("ignore-preflight-errors", ' ', "CHECK,...", "checks that may fail"),
    ("timeout", ' ', "DURATION", "longest wait, for the node or for the end of its pods"),
    ("drain", ' ', "", "evict the pods first"),
    ("kubeconfig", ' ', "FILE", "credentials that may evict pods"),
    ("no-start", ' ', "", "write the files, and start nothing"),
    ("local-socket", ' ', "PATH", "local socket of the agent"),
    ("help", 'h', "", "help of the command"),
];

/// The names of the options of one command only, without those that all take.
pub(super) fn own_options(command: &str) -> &'static [&'static str] {
    OPTIONS_OF_COMMANDS.iter().find(|(name, _)| *name == command).map_or(&[], |(_, options)| options)
}

/// The options that a command takes, with those that all take.
pub(super) fn options_of(command: &str) -> impl Iterator<Item = &'static CommandOption> {
    let names = own_options(command).iter().chain(&["local-socket", "help"]);
    names.filter_map(|name| OPTIONS.iter().find(|(option, ..)| option == name))
}

/// An option as it is typed: `-n, --namespace NAMESPACE`.
pub(super) fn option_text(name: &str, letter: char, placeholder: &str) -> String {
    let letter = if letter == ' ' { String::new() } else { format!("-{letter}, ") };
    format!("{letter}--{name} {placeholder}").trim_end().to_owned()
}
