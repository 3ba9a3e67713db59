//! The command line, from arguments to commands.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::join_options::{JoinMethod, JoinOptions, TokenSource};
use super::local::*;
use super::*;
use crate::config::Problem;
use crate::server::LOCAL_SOCKET;

fn line(text: &str) -> Result<Command, Vec<Problem>> {
    parse_words(text.split_whitespace())
}

/// Arguments of the program under its own name.
fn parse_words<I>(words: I) -> Result<Command, Vec<Problem>>
where
    I: IntoIterator,
    I::Item: Into<OsString>,
{
    parse(OsStr::new("coracle"), words)
}

fn agent(text: &str) -> AgentArgs {
    match line(text) {
        Ok(Command::Agent(args)) => *args,
        other => panic!("{text}: {other:?}"),
    }
}

fn problems(text: &str) -> Vec<String> {
    line(text).expect_err(text).iter().map(ToString::to_string).collect()
}

/// The lines of the shell blocks of README.md, with continued lines joined and without comments.
fn readme_lines() -> Vec<String> {
    let root = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let text = std::fs::read_to_string(Path::new(&root).join("README.md")).expect("README.md is readable");
    let mut lines = Vec::new();
    let (mut is_shell, mut joined) = (false, String::new());
    for line in text.lines().map(str::trim) {
        if line.starts_with("```") {
            is_shell = line == "```sh";
        } else if is_shell {
            let line = line.split(" #").next().unwrap_or(line);
            match line.trim_end().strip_suffix('\\') {
                Some(part) => joined.push_str(part),
                None => lines.push(std::mem::take(&mut joined) + line.trim_end()),
            }
        }
    }
    lines
}

#[test]
fn commands_of_the_readme_are_valid_and_its_scripts_exist() {
    let root = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let (mut commands, mut scripts) = (0, 0);
    for text in readme_lines() {
        let words: Vec<&str> = text.split_whitespace().collect();
        if words.first() == Some(&"coracle") {
            commands += 1;
            let parsed = parse_words(&words[1..]);
            assert!(parsed.is_ok(), "README.md: {text}: {parsed:?}");
        }
        for word in words {
            let word = word.trim_start_matches("\"$(");
            if word.starts_with("packaging/") || word.starts_with("tests/") {
                scripts += 1;
                assert!(Path::new(&root).join(word).exists(), "README.md: {text}");
            }
        }
    }
    assert!(commands > 10 && scripts > 5, "README.md is not read: {commands} commands, {scripts} scripts");
}

#[test]
fn file_that_does_not_exist_is_reported_in_the_words_of_libc() {
    let request = LoadRequest { file: Some("/nonexistent.yaml".into()), ..LoadRequest::default() };
    let problems = load(&request).unwrap_err();
    let texts: Vec<String> = problems.iter().map(problem_text).collect();
    assert_eq!(texts, ["/nonexistent.yaml: cannot be read: No such file or directory"]);
}

#[test]
fn empty_command_line_runs_the_agent() {
    let args = agent("");
    assert_eq!(args, AgentArgs::new(LOCAL_SOCKET));
    assert_eq!(args.root_dir, Path::new("/var/lib/kubelet"));
}

#[test]
fn program_called_kubelet_is_the_agent_without_commands() {
    let called = |name: &str, text: &str| parse(OsStr::new(name), text.split_whitespace());
    for name in ["kubelet", "/usr/bin/kubelet", "./kubelet"] {
        assert_eq!(called(name, "--version"), Ok(Command::KubeletVersion));
        assert_eq!(called(name, "--max-pods=5"), line("--max-pods=5"));
        assert_eq!(called(name, "--help"), Ok(Command::Help));
        for word in ["pods", "version", "help", "check --root-dir=/r"] {
            let problems = called(name, word).expect_err(word);
            let first = word.split(' ').next().unwrap();
            assert_eq!(problems[0].to_string(), format!("command line: unknown command {first:?}"));
        }
    }
    assert_eq!(super::kubelet_version(), "Kubernetes v1.37.2\n");
    for name in ["", "coracle", "/opt/kubelet/coracle", "kubelet2", "/kubelet/"] {
        let expected = if name == "/kubelet/" { Command::KubeletVersion } else { Command::Version };
        assert_eq!(called(name, "--version"), Ok(expected), "{name}");
    }
}

#[test]
fn flags_set_fields() {
    for (text, path, expected) in [
        ("--max-pods=5", "maxPods", json!(5)),
        ("--max-pods 5", "maxPods", json!(5)),
        ("--max_pods 5", "maxPods", json!(5)),
        ("--max-pods=1 --max-pods=2", "maxPods", json!(2)),
        ("--oom-score-adj -500", "oomScoreAdj", json!(-500)),
        ("--pod-max-pids 5000000000", "podPidsLimit", json!(5_000_000_000_i64)),
        ("-v 4", "logging.verbosity", json!(4)),
        ("-v=4", "logging.verbosity", json!(4)),
        ("-v4", "logging.verbosity", json!(4)),
        ("--v=4", "logging.verbosity", json!(4)),
        ("--enable-server", "enableServer", json!(true)),
        ("--enable-server=false", "enableServer", json!(false)),
        ("--enable-server=F", "enableServer", json!(false)),
        ("--fail-swap-on=0", "failSwapOn", json!(false)),
        ("--sync-frequency=90s", "syncFrequency", json!("1m30s")),
        ("--pod-manifest-path=/etc/pods", "staticPodPath", json!("/etc/pods")),
        ("--resolv-conf=", "resolvConf", json!("")),
        (
            "--cluster-dns=10.0.0.1,10.0.0.2 --cluster-dns=10.0.0.3",
            "clusterDNS",
            json!(["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
        ),
        (
            "--eviction-hard=memory.available<1Gi,nodefs.available<10%",
            "evictionHard",
            json!({"memory.available": "1Gi", "nodefs.available": "10%"}),
        ),
        ("--eviction-hard=", "evictionHard", json!({})),
        (
            "--system-reserved=cpu=1,memory=1Gi --system-reserved=pid=5",
            "systemReserved",
            json!({"cpu": "1", "memory": "1Gi", "pid": "5"}),
        ),
        (
            "--feature-gates=A=true,B=false --feature-gates B=true",
            "featureGates",
            json!({"A": true, "B": true}),
        ),
        ("--manifest-url-header=a:b,c:d:e,a:f", "staticPodURLHeader", json!({"a": ["b", "f"], "c": ["d:e"]})),
        (
            "--register-with-taints=a=b:NoSchedule,c:NoExecute",
            "registerWithTaints",
            json!([{"key": "a", "value": "b", "effect": "NoSchedule"}, {"key": "c", "value": "", "effect": "NoExecute"}]),
        ),
        (
            "--reserved-memory 0:memory=1Gi,hugepages-1Gi=2Gi;1:memory=2Gi",
            "reservedMemory",
            json!([{"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-1Gi": "2Gi"}}, {"numaNode": 1, "limits": {"memory": "2Gi"}}]),
        ),
        ("--vmodule=a=70000", "logging.vmodule", json!([{"filePattern": "a", "verbosity": 70_000}])),
        ("--max-pods=+5", "maxPods", json!(5)),
        ("--vmodule=a*=2", "logging.vmodule", json!([{"filePattern": "a*", "verbosity": 2}])),
        ("--log-json-info-buffer-size=4Ki", "logging.options.json.infoBufferSize", json!("4Ki")),
        ("--runonce=false", "runOnce", json!(false)),
    ] {
        let args = agent(text);
        let found: Vec<_> =
            args.request.overrides.iter().map(|change| (change.path, &change.value)).collect();
        assert_eq!(found, [(path, &expected)], "{text}");
    }
}

#[test]
fn every_flag_takes_its_default() {
    for flag in flags::FLAGS {
        let default = flag.default_text();
        let text = match (flag.syntax, default.as_str()) {
            (_, "\"\"" | "[]" | "{}") => String::new(),
            _ => default,
        };
        let parsed = parse_words([format!("--{}={text}", flag.name)]);
        assert!(parsed.is_ok(), "--{}={text}: {parsed:?}", flag.name);
        if let Ok(Command::Agent(args)) = parsed {
            let loaded = crate::config::load(&args.request);
            assert!(loaded.is_ok(), "--{}={text}: {loaded:?}", flag.name);
        }
    }
}

#[test]
fn flags_without_a_field_are_parsed() {
    let args = agent(
        "--root-dir /r --hostname-override=Node-1 --node-ip=10.0.0.1,fd00::1 --node-labels=a=b,kubernetes.io/arch=x \
         --kubeconfig=/k --config=/c --config-dir=/d --minimum-container-ttl-duration=1m \
         --maximum-dead-containers-per-container=2 --maximum-dead-containers=-1 --housekeeping-interval=5s \
         --lock-file=/l --exit-on-lock-contention --cloud-provider=external \
         --experimental-allocatable-ignore-eviction",
    );
    assert_eq!((args.root_dir.as_path(), args.hostname_override.as_str()), (Path::new("/r"), "node-1"));
    assert_eq!((args.node_ips.len(), args.node_labels.len()), (2, 2));
    assert_eq!(args.request.file.as_deref(), Some(Path::new("/c")));
    assert_eq!(args.minimum_container_ttl.as_secs(), 60);
    assert_eq!((args.maximum_dead_containers_per_container, args.maximum_dead_containers), (2, -1));
    assert!(args.allocatable_ignores_eviction);
    assert!(args.exit_on_lock_contention && args.lock_file.is_some());
}

#[test]
fn bad_flags_are_all_reported() {
    for (text, expected) in [
        ("--v=+4", "command line: -v: \"+4\" is not a whole number"),
        ("--vmodule=a*=+2", "command line: --vmodule: \"+2\" is not a verbosity"),
        ("--max-pods=lots", "command line: --max-pods: \"lots\" is not a whole number"),
        ("--max-pods=5000000000", "command line: --max-pods: \"5000000000\" does not fit 32 bits"),
        ("--max-pods", "command line: --max-pods: needs a value: --max-pods=N"),
        (
            "--sync-frequency=10",
            "command line: --sync-frequency: \"10\" is not a duration: want numbers with units, such as 300ms, 10s or 1h30m",
        ),
        ("--enable-server=maybe", "command line: --enable-server: \"maybe\" is neither true nor false"),
        ("--max-pod=5", "command line: --max-pod: unknown flag; did you mean --max-pods?"),
        ("--nonsense=5", "command line: --nonsense: unknown flag"),
        ("-x", "command line: -x: unknown flag"),
        (
            "--network-plugin=cni",
            "command line: --network-plugin: no longer a flag: CNI is configured in the container runtime",
        ),
        ("--feature-gates=A", "command line: --feature-gates: \"A\" is not of the form key=value"),
        ("--feature-gates=A=x", "command line: --feature-gates: A must be true or false, not \"x\""),
        (
            "--eviction-hard=memory.available=1",
            "command line: --eviction-hard: \"memory.available=1\" is not of the form key<value",
        ),
        (
            "--register-with-taints=x",
            "command line: --register-with-taints: \"x\" is not of the form key=value:effect",
        ),
        (
            "--reserved-memory=x",
            "command line: --reserved-memory: \"x\" is not of the form 0:memory=1Gi,hugepages-2Mi=2Gi",
        ),
        ("--runonce", "command line: --runonce: setting it is an error"),
        ("--cloud-provider=aws", "command line: --cloud-provider: \"aws\" must be empty or external"),
        (
            "--hostname-override=a_b",
            "command line: --hostname-override: \"a_b\" is not a node name: want a lower-case DNS name",
        ),
        ("--node-ip=x", "command line: --node-ip: \"x\" is not an IP address"),
        (
            "--node-ip=10.0.0.1,10.0.0.2",
            "command line: --node-ip: must be one address, or an IPv4 and an IPv6 address",
        ),
        (
            "--node-labels=kubernetes.io/role=x",
            "command line: --node-labels: \"kubernetes.io/role\" is in a domain of Kubernetes: nodes must not set this label",
        ),
        ("--node-labels=a", "command line: --node-labels: \"a\" is not of the form key=value"),
        ("--root-dir=", "command line: --root-dir: must not be empty"),
        ("--local-socket=x.sock", "command line: --local-socket: must be an absolute path"),
        ("--root-dir=/r pods", "command line: --root-dir: cannot be used with the command pods"),
        ("pods --root-dir=/r", "pods: --root-dir: unknown option: --local-socket selects the agent"),
        (
            "--housekeeping-interval=x",
            "command line: --housekeeping-interval: \"x\" is not a duration: want numbers with units, such as 300ms, 10s or 1h30m",
        ),
        (
            "--exit-on-lock-contention",
            "command line: --exit-on-lock-contention: cannot be used without --lock-file",
        ),
        (
            "--image-credential-provider-config=/x",
            "command line: --image-credential-provider-config: must be used together with --image-credential-provider-bin-dir",
        ),
        ("podz", "command line: unknown command \"podz\"; did you mean pods?"),
        ("--max-pods=5 pods", "command line: --max-pods: cannot be used with the command pods"),
    ] {
        assert_eq!(problems(text), [expected], "{text}");
    }
    assert_eq!(problems("--docker-endpoint unix:///x --max-pods=x --port=y extra").len(), 4);
    let bytes = parse_words([OsString::from_vec(b"--root-dir=\xff".to_vec())]).unwrap_err();
    assert!(bytes[0].message.contains("UTF-8"));
}

#[test]
fn help_version_and_checks_do_not_run_the_agent() {
    for (text, expected) in [
        ("--help", Command::Help),
        ("-h", Command::Help),
        ("--nonsense --help", Command::Help),
        ("pods --help", Command::LocalHelp("pods")),
        ("help pods", Command::LocalHelp("pods")),
        ("help", Command::Help),
        ("help nothing", Command::Help),
        ("-V", Command::Version),
        ("--version", Command::Version),
        ("--version=raw", Command::Version),
        ("--check-config", Command::CheckConfig(Box::new(AgentArgs::new(LOCAL_SOCKET)))),
        ("--print-config", Command::PrintConfig(Box::new(AgentArgs::new(LOCAL_SOCKET)))),
    ] {
        assert_eq!(line(text).unwrap(), expected, "{text}");
    }
}

#[test]
fn local_commands_are_parsed() {
    let on_socket =
        |socket: &str, subcommand| Command::Local(LocalCommand { socket: socket.into(), subcommand });
    let ui = |listen: &str, tls: Option<(&str, &str)>| {
        let tls = tls.map(|(certificate, key)| (certificate.into(), key.into()));
        Subcommand::Ui(UiOptions { listen: listen.parse().unwrap(), tls })
    };
    let default = |subcommand| on_socket("/run/coracle/coracle.sock", subcommand);
    let check = |root: &str| Subcommand::Check {
        output: Output::Table,
        root_dir: root.into(),
        config: None,
        cis: false,
    };
    let pods = |output, watch, namespace: Option<&str>| {
        Subcommand::Pods(PodsOptions { output, watch, namespace: namespace.map(str::to_owned) })
    };
    let words = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
    for (text, expected) in [
        (
            "check --config /c.yaml",
            default(Subcommand::Check {
                output: Output::Table,
                root_dir: "/var/lib/kubelet".into(),
                config: Some("/c.yaml".into()),
                cis: false,
            }),
        ),
        (
            "check --cis -o json",
            default(Subcommand::Check {
                output: Output::Json,
                root_dir: "/var/lib/kubelet".into(),
                config: None,
                cis: true,
            }),
        ),
        ("pods", default(pods(Output::Table, false, None))),
        ("pods -o wide -w -n kube-system", default(pods(Output::Wide, true, Some("kube-system")))),
        ("pods -ojson", default(pods(Output::Json, false, None))),
        ("pods --output=yaml --local-socket=/r.sock", on_socket("/r.sock", pods(Output::Yaml, false, None))),
        ("--local-socket /r.sock pods", on_socket("/r.sock", pods(Output::Table, false, None))),
        ("--local-socket r.sock pods", on_socket("r.sock", pods(Output::Table, false, None))),
        ("pods --local-socket ./r.sock", on_socket("./r.sock", pods(Output::Table, false, None))),
        ("describe web", default(Subcommand::Describe { pod: "web".into() })),
        ("describe web -n ns", default(Subcommand::Describe { pod: "ns/web".into() })),
        ("describe a/web -n ns", default(Subcommand::Describe { pod: "a/web".into() })),
        (
            "logs -f web -c one -p --tail 5 --since=1m --timestamps",
            default(Subcommand::Logs(LogsOptions {
                pod: "web".into(),
                container: Some("one".into()),
                follow: true,
                previous: true,
                tail: Some(5),
                since: Some(std::time::Duration::from_secs(60)),
                timestamps: true,
            })),
        ),
        (
            "debug web --image=b:1 --target c -c dbg -- ls -l --image x",
            default(Subcommand::Debug(DebugOptions {
                pod: "web".into(),
                image: "b:1".into(),
                target: Some("c".into()),
                name: Some("dbg".into()),
                command: words(&["ls", "-l", "--image", "x"]),
                ..DebugOptions::default()
            })),
        ),
        (
            "debug -it web --image b:1",
            default(Subcommand::Debug(DebugOptions {
                pod: "web".into(),
                image: "b:1".into(),
                stdin: true,
                tty: true,
                ..DebugOptions::default()
            })),
        ),
        (
            "exec -it web -c one -- ls -l -- x",
            default(Subcommand::Exec(ExecOptions {
                pod: "web".into(),
                container: Some("one".into()),
                stdin: true,
                tty: true,
                command: words(&["ls", "-l", "--", "x"]),
            })),
        ),
        (
            "attach web -n ns --stdin=true --tty=false",
            default(Subcommand::Exec(ExecOptions {
                pod: "ns/web".into(),
                stdin: true,
                ..ExecOptions::default()
            })),
        ),
        (
            "port-forward web 80 8080:81 :82 0:83 --address 192.0.2.1,::1",
            default(Subcommand::PortForward(ForwardOptions {
                pod: "web".into(),
                addresses: vec!["192.0.2.1".parse().unwrap(), "::1".parse().unwrap()],
                ports: vec![(80, 80), (8080, 81), (0, 82), (0, 83)],
            })),
        ),
        ("status -o json", default(Subcommand::Status { output: Output::Json })),
        ("events", default(Subcommand::Events(EventsOptions::default()))),
        (
            "events web -w",
            default(Subcommand::Events(EventsOptions {
                pod: Some("web".into()),
                watch: true,
                ..EventsOptions::default()
            })),
        ),
        (
            "top --once -n x",
            default(Subcommand::Top(TopOptions {
                once: true,
                namespace: Some("x".into()),
                output: Output::Table,
            })),
        ),
        ("images", default(Subcommand::Images { output: Output::Table, command: ImagesCommand::Runtime })),
        ("images verify", default(Subcommand::VerifyImages(VerifyOptions::default()))),
        (
            "images verify --digests a:1 b:1 -o json",
            default(Subcommand::VerifyImages(VerifyOptions {
                images: vec!["a:1".into(), "b:1".into()],
                digests: true,
                output: Output::Json,
            })),
        ),
        ("volumes", default(Subcommand::Volumes(VolumesOptions::default()))),
        (
            "volumes -n kube-system -o json",
            default(Subcommand::Volumes(VolumesOptions {
                output: Output::Json,
                namespace: Some("kube-system".into()),
            })),
        ),
        ("devices -o yaml", default(Subcommand::Devices { output: Output::Yaml })),
        (
            "offline list -o json",
            default(Subcommand::Offline { output: Output::Json, command: OfflineCommand::List }),
        ),
        (
            "offline accept",
            default(Subcommand::Offline { output: Output::Table, command: OfflineCommand::Accept }),
        ),
        (
            "offline check",
            default(Subcommand::Offline {
                output: Output::Table,
                command: OfflineCommand::Check { pod: None },
            }),
        ),
        (
            "offline check web -n ns -o json",
            default(Subcommand::Offline {
                output: Output::Json,
                command: OfflineCommand::Check { pod: Some("ns/web".to_owned()) },
            }),
        ),
        (
            "offline trust ca.pem",
            default(Subcommand::Offline {
                output: Output::Table,
                command: OfflineCommand::Trust { file: Some("ca.pem".into()) },
            }),
        ),
        (
            "offline trust --remove",
            default(Subcommand::Offline {
                output: Output::Table,
                command: OfflineCommand::Trust { file: None },
            }),
        ),
        (
            "offline purge --damaged",
            default(Subcommand::Offline {
                output: Output::Table,
                command: OfflineCommand::Purge(Purged::Damaged),
            }),
        ),
        (
            "offline purge secret/n/s",
            default(Subcommand::Offline {
                output: Output::Table,
                command: OfflineCommand::Purge(Purged::Object("secret/n/s".to_owned())),
            }),
        ),
        (
            "offline purge --all --yes",
            default(Subcommand::Offline {
                output: Output::Table,
                command: OfflineCommand::Purge(Purged::All),
            }),
        ),
        ("check", default(check("/var/lib/kubelet"))),
        ("check --root-dir=/r", default(check("/r"))),
        ("--root-dir /r --local-socket=/r.sock check", on_socket("/r.sock", check("/r"))),
        (
            "validate a.yaml /m -o json",
            default(Subcommand::Validate { files: vec!["a.yaml".into(), "/m".into()], output: Output::Json }),
        ),
        ("ui", default(ui("127.0.0.1:10280", None))),
        ("ui --listen [::1]:80", default(ui("[::1]:80", None))),
        ("ui --listen=0.0.0.0:1 --insecure-listen", default(ui("0.0.0.0:1", None))),
        (
            "ui --listen 10.0.0.1:1 --tls-cert c.pem --tls-key k.pem",
            default(ui("10.0.0.1:1", Some(("c.pem", "k.pem")))),
        ),
        ("version", default(Subcommand::Version)),
    ] {
        assert_eq!(line(text).unwrap(), expected, "{text}");
    }
    for (text, expected) in [
        ("pods -o xml", "pods: -o: \"xml\" must be one of table, wide, json, yaml"),
        ("pods -x", "pods: -x: unknown option"),
        ("pods web", "pods: unexpected argument \"web\""),
        ("images web", "images: images has no command \"web\"; it has list, import, rm, export and verify"),
        ("images --digests", "images: --digests is for images verify"),
        ("describe", "describe: name a pod"),
        ("validate", "validate: name a manifest or a directory of manifests"),
        ("debug --image b:1", "debug: name a pod"),
        ("debug web", "debug: --image: name an image"),
        ("debug -t web --image b:1", "debug: -t needs -i: a terminal is for input"),
        ("logs web other", "logs: unexpected argument \"other\""),
        ("logs web --tail x", "logs: --tail: \"x\" is not a number of lines"),
        ("logs web --since -1s", "logs: --since: -1s must be greater than zero"),
        ("logs web -c", "logs: -c: needs a value"),
        ("exec web", "exec: name a command after --"),
        ("attach web ls", "attach: unexpected argument \"ls\""),
        ("attach web -i=x", "attach: unexpected argument for option '-i': \"x\""),
        ("port-forward web", "port-forward: name a port"),
        ("port-forward web 80:x", "port-forward: \"80:x\" is not of the form [LOCAL:]REMOTE"),
        ("port-forward web +80", "port-forward: \"+80\" is not of the form [LOCAL:]REMOTE"),
        ("port-forward web +81:80", "port-forward: \"+81:80\" is not of the form [LOCAL:]REMOTE"),
        ("port-forward web 0", "port-forward: \"0\" is not of the form [LOCAL:]REMOTE"),
        ("port-forward web 80 --address here", "port-forward: --address: \"here\" is not an IP address"),
        ("status -w", "status: -w: unknown option"),
        ("ui --listen 80", "ui: --listen: \"80\" is not an IP address with a port"),
        ("ui --tls-cert c", "ui: --tls-cert needs --tls-key"),
        ("ui --tls-key k", "ui: --tls-key needs --tls-cert"),
        (
            "ui --listen 10.0.0.1:1",
            "ui: --listen: 10.0.0.1:1 can be reached from other machines, and without TLS they can read the \
             link: give --tls-cert and --tls-key, or --insecure-listen",
        ),
        ("ui now", "ui: unexpected argument \"now\""),
        ("offline", "offline: name a command: list, check, purge, trust or accept"),
        (
            "offline clean",
            "offline: offline has no command \"clean\"; it has list, check, purge, trust and accept",
        ),
        ("offline purge", "offline: purge: name one of --damaged, --all or KIND/NAMESPACE/NAME"),
        (
            "offline purge --all --damaged --yes",
            "offline: purge: name one of --damaged, --all or KIND/NAMESPACE/NAME",
        ),
        (
            "offline purge --all pod/n/a --yes",
            "offline: purge: name one of --damaged, --all or KIND/NAMESPACE/NAME",
        ),
        (
            "offline purge --all",
            "offline: purge --all removes all that is stored, also the key of Secrets and tokens; confirm it with --yes",
        ),
        ("offline purge pod/n/a pod/n/b", "offline: unexpected argument \"pod/n/b\""),
        ("offline trust", "offline: trust: name either a file or --remove"),
        ("offline trust a --remove", "offline: trust: name either a file or --remove"),
        ("offline purge --damaged --remove", "offline: --remove is for offline trust"),
        ("offline list --yes", "offline: --yes is for offline purge"),
        ("offline check -n ns", "offline: --namespace is for offline check with a pod"),
        ("offline accept now", "offline: unexpected argument \"now\""),
        ("offline accept -w", "offline: -w: unknown option"),
    ] {
        assert_eq!(problems(text), [expected], "{text}");
    }
}

#[test]
fn flags_reach_the_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("c.yaml");
    std::fs::write(
        &file,
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 5\nport: 1\n",
    )
    .unwrap();
    let args = agent(&format!("--config={} --max-pods=7 --port=70000", file.display()));
    let problems = crate::config::load(&args.request).unwrap_err();
    assert_eq!(problems.len(), 1);
    assert_eq!(problems[0].to_string(), "--port: port: 70000 must be between 1 and 65535, inclusive");
    let args = agent(&format!("--config={} --max-pods=7", file.display()));
    let loaded = crate::config::load(&args.request).unwrap();
    assert_eq!((loaded.config.max_pods, loaded.config.port), (7, 1));
    assert_eq!(loaded.warning(), None);
    let printed: Value =
        crate::config::yaml::parse_bytes(loaded.to_yaml().as_bytes()).unwrap().remove(0).value;
    assert_eq!(printed["maxPods"], json!(7));
    let args = agent("--feature-gates=H2CContainerProbe=true");
    let loaded = crate::config::load(&args.request).unwrap();
    let text = loaded.warning();
    let expected =
        "set, but without effect in this version: featureGates[H2CContainerProbe] (alpha, not built)";
    assert_eq!(text.as_deref(), Some(expected));
}

/// Arguments for random command lines; the last one is empty.
fn words() -> Vec<&'static str> {
    "-- - = -v -o -n -w -c pods logs describe --tail --since web true -1 a=b a<b a:b 0:memory=1Gi --help --config \
     --node-ip 10.0.0.1 1h --eviction-hard --feature-gates --reserved-memory --register-with-taints --max-pods --v \
     ü --vmodule json "
        .split(' ')
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_flags_never_panic(
        picks in proptest::collection::vec((0_usize..words().len() + 60, 0_usize..words().len(), any::<bool>()), 0..6),
        raw in proptest::collection::vec(any::<u8>(), 0..6),
    ) {
        let mut args: Vec<OsString> = Vec::new();
        for (first, second, joined) in picks {
            let words = words();
            let name = match words.get(first) {
                Some(word) => (*word).to_owned(),
                None => flags::FLAGS.get((first * 7 + second) % flags::FLAGS.len()).map_or(String::new(), |flag| format!("--{}", flag.name)),
            };
            if joined {
                args.push(format!("{name}={}", words[second]).into());
            } else {
                args.push(name.into());
            }
        }
        args.push(OsString::from_vec(raw));
        if let Err(problems) = parse_words(args) {
            prop_assert!(!problems.is_empty());
        }
    }
}

#[test]
fn settings_that_need_a_cluster_are_warnings_without_one() {
    let fields = |text: &str, config: &KubeletConfiguration| {
        let args = agent(text);
        super::missing_cluster(&args, config).into_iter().map(|(field, _)| field).collect::<Vec<_>>()
    };
    let mut config = KubeletConfiguration { enable_server: true, ..KubeletConfiguration::default() };
    config.authorization.mode = "Webhook".to_owned();
    config.authentication.webhook.enabled = true;
    assert_eq!(fields("", &config), ["authorization.mode", "authentication.webhook.enabled"]);
    assert_eq!(fields("--kubeconfig /", &config), Vec::<&str>::new());
    assert_eq!(fields("--kubeconfig /no/such", &config), ["--kubeconfig"]);
    assert_eq!(fields("--kubeconfig /no/such --bootstrap-kubeconfig /", &config), Vec::<&str>::new());
    config.enable_server = false;
    assert_eq!(fields("", &config), Vec::<&str>::new());
}

#[test]
fn time_of_a_stop_with_which_the_agent_does_not_start_is_a_problem() {
    let config = KubeletConfiguration { node_lease_duration_seconds: 40, ..KubeletConfiguration::default() };
    let problem = |text: &str| super::unusable_time(&agent(text), &config).map(|problem| problem.to_string());
    for usable in ["", "--offline-stop-after=1s", "--offline --kubeconfig=/k --offline-stop-after=40s"] {
        assert_eq!(problem(usable), None, "{usable}");
    }
    assert_eq!(problem("--offline --kubeconfig=/k --offline-stop-after=0"), None);
    let found = problem("--offline --kubeconfig=/k --offline-stop-after=39900ms").unwrap_or_default();
    assert!(found.contains("--offline-stop-after: must not be shorter than"), "{found}");
}

#[test]
fn collector_with_which_the_agent_does_not_start_is_a_problem() {
    let problem = |tracing: Value| {
        let config: KubeletConfiguration = serde_json::from_value(json!({"tracing": tracing})).unwrap();
        super::unusable_collector(&config).map(|problem| problem.to_string())
    };
    for usable in [Value::Null, json!({}), json!({"endpoint": ""}), json!({"endpoint": "dns:///host:4317"})] {
        assert_eq!(problem(usable.clone()), None, "{usable}");
    }
    for endpoint in ["dns://8.8.8.8/host:4317", "unix://run.sock", "host:70000"] {
        let text = problem(json!({"endpoint": endpoint})).unwrap_or_default();
        assert!(text.starts_with("tracing.endpoint: ") && text.contains(endpoint), "{endpoint}: {text}");
    }
}

#[test]
fn flags_of_image_archives_set_directories_registry_and_mirror_file() {
    let args = agent("");
    assert_eq!(args.image_dirs(), [Path::new("/var/lib/kubelet/images.d")]);
    assert_eq!(args.image_registry, Some("127.0.0.1:0".parse().unwrap()));
    assert_eq!(args.image_mirror_file(), Path::new("/run/coracle/hosts.toml"));
    let args = agent(
        "--images-dir=a,/b --images-dir=c --root-dir=/r --image-registry=[::1]:5051 --local-socket=/x/y.sock",
    );
    assert_eq!(args.image_dirs(), [Path::new("/r/a"), Path::new("/b"), Path::new("/r/c")]);
    assert_eq!(args.image_registry, Some("[::1]:5051".parse().unwrap()));
    assert_eq!(args.image_mirror_file(), Path::new("/x/hosts.toml"));
    assert_eq!(args.image_node_token(), Path::new("/r/image_set/mirror-token"));
    let args = agent("--image-registry=off --image-mirror-file=/m/f");
    assert_eq!((args.image_registry, args.image_mirror_file()), (None, "/m/f".into()));
    for text in [
        "--image-registry=0.0.0.0:1",
        "--image-registry=10.0.0.1:5051",
        "--image-registry=localhost:1",
        "--image-registry=127.0.0.1",
        "--image-registry=",
        "--image-mirror-file=hosts.toml",
        "--image-mirror-file=",
        "--images-dir=,",
    ] {
        assert_eq!(problems(text).len(), 1, "{text}");
    }
}

#[test]
fn images_commands_have_their_own_arguments() {
    let command = |text: &str| match line(text) {
        Ok(Command::Local(LocalCommand { subcommand: Subcommand::Images { output, command }, .. })) => {
            (output, command)
        }
        other => panic!("{text}: {other:?}"),
    };
    assert_eq!(command("images -o wide"), (Output::Wide, ImagesCommand::Runtime));
    assert_eq!(command("images list -o json"), (Output::Json, ImagesCommand::List));
    let import = |directories: &[&str], wait| ImagesCommand::Import {
        files: vec!["a.tar".into(), "b".into()],
        directories: directories.iter().map(Into::into).collect(),
        wait,
    };
    assert_eq!(command("images import a.tar b").1, import(&[], true));
    assert_eq!(command("images import a.tar --no-wait b --images-dir=/x,/y").1, import(&["/x", "/y"], false));
    assert_eq!(command("images rm x").1, ImagesCommand::Remove { name: "x".into() });
    let export = ImagesCommand::Export { name: "x".into(), file: "/f".into() };
    assert_eq!(command("images export x -o /f").1, export);
    assert_eq!(command("images export --output=/f x").1, export);
    for (text, words) in [
        ("images other", "no command \"other\""),
        ("images list x", "unexpected argument \"x\""),
        ("images import", "name an image archive"),
        ("images rm", "name an image or an archive"),
        ("images rm a b", "unexpected argument \"b\""),
        ("images export x", "-o: name the file"),
        ("images -o /f export x", "must be one of"),
    ] {
        assert!(problems(text).join("\n").contains(words), "{text}: {:?}", problems(text));
    }
}

#[test]
fn setup_takes_absolute_paths_and_only_the_runtime() {
    let options = |text: &str| match line(text) {
        Ok(Command::Local(LocalCommand { subcommand: Subcommand::Setup(options), .. })) => options,
        other => panic!("{text}: {other:?}"),
    };
    let plain = options("setup runtime");
    assert_eq!(plain, SetupOptions { root_dir: "/var/lib/kubelet".into(), ..SetupOptions::default() });
    let all = options(
        "setup runtime --dry-run --runtime crio --containerd-config=/a --certs-dir=/b --registries-dir=/c \
         --registry=d,e --registry=f:1 --image-registry=127.0.0.1:5051 --image-mirror-file=/g --root-dir=/h",
    );
    let expected = SetupOptions {
        dry_run: true,
        runtime: Some(Runtime::Crio),
        containerd_config: Some("/a".into()),
        certs_dir: Some("/b".into()),
        registries_dir: Some("/c".into()),
        registries: ["d", "e", "f:1"].map(str::to_owned).to_vec(),
        address: Some("127.0.0.1:5051".parse().unwrap()),
        mirror_file: Some("/g".into()),
        root_dir: "/h".into(),
    };
    assert_eq!(all, expected);
    for (text, words) in [
        ("setup", "name what to set up"),
        ("setup other", "cannot set up \"other\""),
        ("setup runtime x", "unexpected argument \"x\""),
        ("setup runtime --runtime=docker", "must be containerd or crio"),
        ("setup runtime --certs-dir=b", "must be an absolute path"),
        ("setup runtime --image-registry=5051", "not an address with a port"),
    ] {
        assert!(problems(text).join("\n").contains(words), "{text}: {:?}", problems(text));
    }
}

#[test]
fn flags_of_the_offline_store_have_safe_defaults_and_bounds() {
    let args = agent("--kubeconfig=/k");
    assert!(!args.offline && args.offline_secrets && args.offline_key.is_none());
    assert_eq!((args.offline_wait.as_secs(), args.offline_accept_after.as_secs()), (30, 3600));
    assert!(args.offline_stop_after.is_zero());
    let stop = agent("--kubeconfig=/k --offline --offline-stop-after=5m").offline_stop_after;
    assert_eq!(stop.as_secs(), 300);
    let args = agent(
        "--kubeconfig=/k --offline --offline-secrets=none --offline-key=/media/key --offline-wait=0 \
         --offline-accept-after=24h",
    );
    assert!(args.offline && !args.offline_secrets);
    assert_eq!(args.offline_key.as_deref(), Some(Path::new("/media/key")));
    assert_eq!((args.offline_wait.as_secs(), args.offline_accept_after.as_secs()), (0, 24 * 3600));
    for (text, words) in [
        ("--offline", "--offline: cannot be used without --kubeconfig"),
        ("--offline-secrets=clear", "must be sealed or none"),
        ("--offline-key=key", "must be an absolute path"),
        ("--offline-wait=-1s", "must not be negative"),
        ("--offline-stop-after=-1s", "must not be negative"),
        ("--offline-accept-after=9000h", "is longer than a year"),
    ] {
        assert!(problems(text).join("\n").contains(words), "{text}: {:?}", problems(text));
    }
}

#[test]
fn join_and_leave_take_their_options_and_nothing_else() {
    let options = |text: &str| match line(text) {
        Ok(Command::Local(LocalCommand { subcommand: Subcommand::Join(options), .. })) => *options,
        other => panic!("{text}: {other:?}"),
    };
    let plain = options("join a:6443 --token x.y --discovery-token-ca-cert-hash sha256:aa");
    let expected = JoinOptions {
        method: JoinMethod::Token { address: "a:6443".to_owned() },
        token: Some(TokenSource::Text("x.y".to_owned())),
        pins: vec!["sha256:aa".to_owned()],
        root_dir: "/var/lib/kubelet".into(),
        ..JoinOptions::default()
    };
    assert_eq!(plain, expected);
    let all = options(
        "join --discovery-file /d --token-file=- --node-name=N --node-ip=192.0.2.1 --node-labels=a=b \
         --cri-socket=/s --config=/c --root-dir=/r --kubernetes-dir=/k --ignore-preflight-errors=Swap,all \
         --timeout=30s --no-start --dry-run",
    );
    let expected = JoinOptions {
        method: JoinMethod::DiscoveryFile("/d".into()),
        token: Some(TokenSource::StandardInput),
        node_name: "n".to_owned(),
        node_ips: vec!["192.0.2.1".parse().unwrap()],
        node_labels: vec![("a".to_owned(), "b".to_owned())],
        cri_socket: Some("unix:///s".to_owned()),
        config: Some("/c".into()),
        root_dir: "/r".into(),
        kubernetes_dir: "/k".into(),
        ignored: vec!["swap".to_owned(), "all".to_owned()],
        timeout: std::time::Duration::from_secs(30),
        has_timeout: true,
        no_start: true,
        dry_run: true,
        ..JoinOptions::default()
    };
    assert_eq!(all, expected);
    for (text, words) in [
        ("join", "name the API server as HOST:PORT"),
        ("join a:1 b:2", "unexpected argument \"b:2\""),
        ("join a:1 --token x.y", "--discovery-token-ca-cert-hash"),
        ("join --k0s-token /a --discovery-file /b", "give only one of"),
        ("join --from-bundle /a --discovery-file /b", "give only one of"),
        ("join --from-bundle /a --token x.y", "has its own credentials"),
        ("join --from-bundle /a b:1", "the file has the address"),
        ("join --k0s-token /a --write-bundle /b --root-dir=/r", "--root-dir is for one node"),
        ("join a:1 --output json", "unknown option"),
        ("leave now", "unexpected argument \"now\""),
        ("leave --token x", "unknown option"),
        ("leave --drain", "--drain needs --kubeconfig FILE"),
        ("leave --root-dir=relative", "must be an absolute path"),
    ] {
        assert!(problems(text).join("\n").contains(words), "{text}: {:?}", problems(text));
    }
    match line("leave --dry-run --kubernetes-dir=/k") {
        Ok(Command::Local(LocalCommand { subcommand: Subcommand::Leave(leave), .. })) => {
            assert_eq!((leave.dry_run, leave.kubernetes_dir), (true, "/k".into()));
        }
        other => panic!("{other:?}"),
    }
}
