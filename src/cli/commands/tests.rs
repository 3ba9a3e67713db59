//! The commands against a real server with made-up data.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use expect_test::expect;
use serde_json::json;

use super::client::Client;
use super::*;
use crate::cli::local::{
    DebugOptions, EventsOptions, ImagesCommand, LogsOptions, OfflineCommand, Output, PodsOptions, Purged,
    TopOptions, VerifyOptions, VolumesOptions,
};
use crate::cli::table::Paint;
use crate::images::{ArchiveReport, ArchiveSetReport, BlobError, Document, LookupError, SetImageReport};
use crate::images::{CheckReport, Finding};
use crate::model::event::{EventSink, EventType, Regarding};
use crate::offline::{HeldReason, Phase, Report};
use crate::server::testing::FakeNode;
use crate::server::{self, DeviceRow, DevicesReply, ImageRow, PodView, VolumeRow, VolumesReply};
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};

const SOCKET: &str = "coracle.sock";

pub(super) struct Agent {
    dir: tempfile::TempDir,
    sink: EventSink,
    version: Arc<AtomicU64>,
    server: Option<Running>,
}

fn view(name: &str, uid: &str, phase: &str) -> PodView {
    let pod = json!({
        "metadata": {"namespace": "default", "name": name, "uid": uid},
        "spec": {"containers": [{"name": "a"}, {"name": "b"}]},
        "status": {"phase": phase},
    });
    PodView { pod: serde_json::from_value(pod).unwrap(), phase: "Syncing".into(), ..PodView::default() }
}

impl Agent {
    fn new() -> Self {
        Self::with(|_| {})
    }

    pub(super) fn with(change: impl FnOnce(&mut FakeNode)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut node = FakeNode::new();
        node.pods = Box::new(|version| {
            let web = view("web-node1", "uid1", if version == 1 { "Pending" } else { "Running" });
            let db = (version <= 2).then(|| view("db-node1", "uid2", "Running"));
            std::iter::once(web).chain(db).collect()
        });
        node.images = Box::new(|| {
            Ok(vec![ImageRow { id: "sha256:1".into(), tags: vec!["a:1".into()], ..ImageRow::default() }])
        });
        node.verify_image = Box::new(|image, options, progress| {
            progress(1, 2);
            let finding = Finding { path: "/bin/app".into(), problem: "has 0 bytes".into() };
            let damaged = u64::from(options.contents);
            let findings = if options.contents { vec![finding] } else { Vec::new() };
            let report = CheckReport {
                image: image.into(),
                layers: 2,
                verified: 2,
                damaged,
                findings,
                ..CheckReport::default()
            };
            if image == "a:1" {
                Ok(report)
            } else {
                Err("the runtime does not have the image".to_owned().into())
            }
        });
        node.volumes = {
            let row = |namespace: &str| VolumeRow {
                namespace: namespace.into(),
                volume: "data\u{1b}[31m".into(),
                state: "mounted".into(),
                ..VolumeRow::default()
            };
            VolumesReply { volumes: vec![row("default"), row("other")], omitted: 0 }
        };
        node.devices = DevicesReply {
            devices: vec![DeviceRow { resource: "example.com/cam".into(), ..DeviceRow::default() }],
            ..DevicesReply::default()
        };
        node.read_log = Box::new(|log, _, out, _| {
            let name = log.path.file_name().unwrap_or_default().as_encoded_bytes();
            Ok(out.write_all(&[name, b" \x1b[31m\xff\n"].concat()).map_err(|error| error.to_string())?)
        });
        node.summary = Box::new(|detail| {
            assert_eq!(detail, server::Detail::CpuAndMemory);
            let used = serde_json::json!({
                "cpu": {"usageNanoCores": 12_000_000},
                "memory": {"workingSetBytes": 1 << 20, "availableBytes": 1 << 20},
            });
            let mut pod = used.clone();
            pod["podRef"] = serde_json::json!({"namespace": "default", "name": "web\u{1b}[31m"});
            let mut node = used;
            node["nodeName"] = "node1".into();
            Ok(serde_json::to_vec(&serde_json::json!({"node": node, "pods": [pod]})).unwrap())
        });
        node.add_ephemeral = Box::new(|pod, container| match pod.as_str() {
            "uid1" if container.command.as_deref() == Some(&["sh".to_owned()]) => Ok(()),
            _ => Err("the pod does not run".to_owned().into()),
        });
        change(&mut node);
        let (version, sink) = (Arc::clone(&node.version), node.sink.clone());
        let settings = server::Settings {
            registry: None,
            healthz: None,
            read_only: None,
            main: None,
            local_socket: dir.path().join(SOCKET),
            any_namespace: false,
        };
        let server = server::spawn(settings, Arc::new(node), OnDeath::Unsupervised).unwrap();
        Agent { dir, sink, version, server: Some(server) }
    }

    pub(super) fn client(&self) -> Client {
        Client::new(&self.dir.path().join(SOCKET))
    }

    /// Ends the agent.
    pub(super) fn stop(&mut self) {
        self.server = None;
    }

    fn run(&self, subcommand: Subcommand) -> (Result<Exit, String>, String) {
        let mut out = Vec::new();
        let outcome = self.run_into(subcommand, &mut out);
        (outcome, String::from_utf8_lossy(&out).into_owned())
    }

    fn run_into(&self, subcommand: Subcommand, out: &mut dyn std::io::Write) -> Result<Exit, String> {
        let client = Client::new(&self.dir.path().join(SOCKET));
        let mut console = Console { out, paint: Paint::new(false), now: jiff::Timestamp::now() };
        dispatch(subcommand, &client, &mut console).map_err(|error| format!("{:?}: {error}", error.exit()))
    }
}

/// The client of an agent that sends a response and closes the connection.
pub(super) fn scripted(response: &str) -> (Client, tempfile::TempDir, Running) {
    use std::io::{Read as _, Write as _};
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join(SOCKET);
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let response = response.to_owned();
    let agent = threads::spawn("t/agent", Stack::Small, OnDeath::Unsupervised, move |_| {
        let (mut stream, _) = listener.accept().unwrap();
        // Read before the response, or the close would reset the connection.
        let mut byte = [0];
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
            request.push(byte[0]);
        }
        stream.write_all(response.as_bytes()).unwrap();
    });
    (Client::new(&socket), dir, agent.unwrap())
}

fn list(output: Output, watch: bool) -> Subcommand {
    Subcommand::Pods(PodsOptions { output, watch, namespace: None })
}

fn logs(pod: &str, container: Option<&str>) -> Subcommand {
    let (pod, container) = (format!("default/{pod}"), container.map(str::to_owned));
    Subcommand::Logs(LogsOptions { pod, container, ..LogsOptions::default() })
}

#[test]
fn top_once_prints_one_table() {
    let agent = Agent::new();
    let top = |namespace: Option<&str>| {
        let namespace = namespace.map(str::to_owned);
        agent.run(Subcommand::Top(TopOptions { once: true, namespace, output: Output::Table }))
    };
    let (outcome, text) = top(None);
    assert_eq!(outcome, Ok(Exit::Success));
    expect![[r#"
        node1: CPU 12m, memory 1.0 MiB of 2.0 MiB

        NAMESPACE   POD             CONTAINER   CPU   MEMORY
        default     web\u{1b}[31m   (all)       12m   1.0 MiB
    "#]]
    .assert_eq(&text);
    assert!(!top(Some("other")).1.contains("default"));
}

#[test]
fn each_command_prints_what_the_server_returns() {
    let agent = Agent::new();
    let (_, text) = agent.run(list(Output::Json, false));
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["items"][1]["worker"]["phase"], "Syncing");
    let (_, text) = agent.run(list(Output::Yaml, false));
    assert!(text.contains("kind: List"), "{text}");
    let (_, text) = agent.run(Subcommand::Describe { pod: "web".into() });
    assert!(text.contains("UID:               uid1\n"), "{text}");
    let (_, text) = agent.run(Subcommand::Status { output: Output::Table });
    assert!(text.contains("Node:              node1\n"), "{text}");
    let options = VolumesOptions { output: Output::Json, namespace: Some("default".into()) };
    let (_, text) = agent.run(Subcommand::Volumes(options));
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["volumes"].as_array().unwrap().len(), 1, "{text}");
    let verify = |images: &[&str], digests| {
        let images = images.iter().map(|image| (*image).to_owned()).collect();
        Subcommand::VerifyImages(VerifyOptions { images, digests, output: Output::Table })
    };
    let debug = |pod: &str| {
        Subcommand::Debug(DebugOptions {
            pod: pod.into(),
            image: "i".into(),
            name: Some("dbg".into()),
            command: vec!["sh".into()],
            ..DebugOptions::default()
        })
    };
    let transcript = [
        ("pods", list(Output::Table, false)),
        ("images runtime", images(ImagesCommand::Runtime)),
        ("images verify", verify(&[], false)),
        ("images verify --digests a:1 none", verify(&["a:1", "none"], true)),
        ("volumes", Subcommand::Volumes(VolumesOptions::default())),
        ("devices", Subcommand::Devices { output: Output::Table }),
        ("debug web", debug("web")),
    ]
    .map(|(title, subcommand)| {
        let (outcome, text) = agent.run(subcommand);
        let end = match outcome {
            Ok(Exit::Success) => String::new(),
            Ok(exit) => format!("ends with {exit:?}\n"),
            Err(error) => format!("{error}\n"),
        };
        format!("$ {title}\n{text}{end}")
    });
    expect![[r#"
        $ pods
        NAMESPACE   NAME        READY   STATUS    RESTARTS   AGE
        default     db-node1    0/2     Running   0          <unknown>
        default     web-node1   0/2     Pending   0          <unknown>
        $ images runtime
        IMAGE   TAG   ID   SIZE   IN USE   PINNED
        a       1     1    0 B    no       no
        $ images verify
        IMAGE   LAYERS   RESULT
        a:1     2/2      intact
        $ images verify --digests a:1 none
        IMAGE   LAYERS   RESULT
        a:1     2/2      1 damaged
                         /bin/app has 0 bytes
        none    0/0      not verified
                         the runtime does not have the image
        ends with Failure
        $ volumes
        NAMESPACE   POD   VOLUME           KIND   STATE     SINCE
        default           data\u{1b}[31m          mounted   <unknown>
        other             data\u{1b}[31m          mounted   <unknown>
        $ devices
        RESOURCE          DEVICE   HEALTH   NUMA   USED BY
        example.com/cam                     -      -
        $ debug web
        ephemeral container dbg is being started in pod default/web-node1
        its output: coracle logs default/web-node1 -c dbg
    "#]]
    .assert_eq(&transcript.concat());
    assert_ne!(agent.run(debug("db")).0, Ok(Exit::Success));
    assert_eq!(agent.run(Subcommand::Version).0, Ok(Exit::Success));
    agent.sink.raise(Regarding::Node, EventType::Normal, "Starting", "Starting kubelet.");
    let deadline = Instant::now() + Duration::from_secs(30);
    while !agent.run(Subcommand::Events(EventsOptions::default())).1.contains("Starting kubelet.") {
        assert!(Instant::now() < deadline);
    }
}

#[test]
fn missing_image_is_described_with_a_way_that_needs_no_registry() {
    let hint = |reason: &str| {
        let reason = reason.to_owned();
        let agent = Agent::with(|node| {
            node.pods = Box::new(move |_| {
                let mut view = view("web", "uid1", "Pending");
                let waiting = json!({"containerStatuses": [{
                    "name": "a", "image": "a", "imageID": "", "ready": false, "restartCount": 0,
                    "state": {"waiting": {"reason": reason}},
                }]});
                view.pod.status = Some(serde_json::from_value(waiting).unwrap());
                vec![view]
            });
        });
        let (_, text) = agent.run(Subcommand::Describe { pod: "web".into() });
        assert!(text.contains(" Waiting\n"), "{text}");
        text.contains("coracle images import")
    };
    for reason in ["ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "RegistryUnavailable"] {
        assert!(hint(reason), "{reason}");
    }
    assert!(!hint("CrashLoopBackOff"));
}

#[test]
fn logs_are_raw_and_rejections_have_exit_codes() {
    let agent = Agent::new();
    let mut out = Vec::new();
    assert_eq!(agent.run_into(logs("web", Some("b")), &mut out), Ok(Exit::Success));
    assert_eq!(out, b"b \x1b[31m\xff\n");
    assert_eq!(agent.run(logs("web-node1", None)).1, "a \u{1b}[31m\u{fffd}\n");
    let rejected = |subcommand| agent.run(subcommand).0.unwrap_err();
    assert_eq!(rejected(logs("none", None)), "NotFound: there is no pod \"default/none\" on this node");
    assert!(rejected(logs("web", Some("x"))).starts_with("NotFound: pod default/web-node1 has no container"));
    assert!(rejected(logs("uid", None)).starts_with("NotFound: \"default/uid\" matches several pods"));
}

#[test]
fn held_set_of_pods_is_shown_and_accepted_once() {
    let held = Report { phase: Phase::Held, held: Some(HeldReason::NoNode), ..Report::default() };
    let agent = Agent::with(|node| node.offline = std::sync::Mutex::new(Some(held)));
    let offline = |output, command| Subcommand::Offline { output, command };
    let (outcome, text) = agent.run(offline(Output::Table, OfflineCommand::List));
    assert_eq!(outcome, Ok(Exit::Success));
    assert!(text.contains("held: it does not know this node; coracle offline accept\n"), "{text}");
    let (outcome, text) = agent.run(offline(Output::Table, OfflineCommand::Accept));
    assert_eq!((outcome, text.contains("are accepted")), (Ok(Exit::Success), true), "{text}");
    let (_, text) = agent.run(offline(Output::Json, OfflineCommand::List));
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&value["phase"], &value["seal"]), (&json!("online"), &json!("sealed")));
    let (outcome, _) = agent.run(offline(Output::Table, OfflineCommand::Accept));
    assert_eq!(outcome, Err("NotFound: no set of pods is held".to_owned()));
    let (outcome, _) = Agent::new().run(offline(Output::Table, OfflineCommand::List));
    assert_eq!(outcome, Err("NotFound: this agent runs without --offline".to_owned()));
}

#[test]
fn stored_objects_are_checked_and_removed() {
    let agent = Agent::with(|node| node.offline = std::sync::Mutex::new(Some(Report::default())));
    let run = |command| agent.run(Subcommand::Offline { output: Output::Table, command });
    let (outcome, text) = run(OfflineCommand::Check { pod: None });
    assert_eq!(outcome, Ok(Exit::CheckFailed));
    assert!(text.contains("configmap default/m: not stored"), "{text}");
    let (outcome, _) = run(OfflineCommand::Check { pod: Some("absent".to_owned()) });
    assert_eq!(outcome, Err("NotFound: there is no pod \"absent\" on this node".to_owned()));
    let (outcome, text) = run(OfflineCommand::Trust { file: Some("/ca.pem".into()) });
    assert_eq!((outcome, text.contains("\n  ca (SHA-256 00)\n")), (Ok(Exit::Success), true), "{text}");
    let (outcome, _) = run(OfflineCommand::Trust { file: Some("/x".into()) });
    assert!(outcome.unwrap_err().contains("/x: no authorities"));
    let (_, text) = run(OfflineCommand::Trust { file: None });
    assert!(text.contains("are removed"), "{text}");
    let (outcome, text) = run(OfflineCommand::Purge(Purged::All));
    assert_eq!(outcome, Ok(Exit::Success));
    assert!(text.contains("files removed: 1 (2.0 KiB)") && text.contains("a new key"), "{text}");
    let (outcome, _) = run(OfflineCommand::Purge(Purged::Object("pod/n/a".to_owned())));
    assert_eq!(
        outcome,
        Err("NotFound: no such object is stored (coracle offline list -o wide names all)".to_owned())
    );
}

/// Sends each write to a test that runs at the same time.
struct Lines(crossbeam_channel::Sender<String>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // The test may have ended.
        let _ = self.0.send(String::from_utf8_lossy(bytes).into_owned());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn watch_prints_rows_that_change() {
    let mut agent = Agent::new();
    let (give, lines) = crossbeam_channel::bounded(1000);
    let (result, end) = crossbeam_channel::bounded(1);
    let version = Arc::clone(&agent.version);
    let server = agent.server.take().unwrap();
    let command = threads::spawn("t/watch", Stack::Large, OnDeath::Unsupervised, move |_| {
        let _ = result.send(agent.run_into(list(Output::Table, true), &mut Lines(give)));
    })
    .unwrap();
    let mut printed = String::new();
    let mut until = |text: &str| {
        while !printed.contains(text) {
            printed.push_str(&lines.recv_timeout(Duration::from_secs(60)).unwrap());
        }
    };
    until("web-node1   0/2     Pending");
    version.store(2, Ordering::SeqCst);
    until("web-node1   0/2     Running");
    version.store(3, Ordering::SeqCst);
    until("db-node1    0/2     Deleted");
    drop(server);
    let end = end.recv_timeout(Duration::from_secs(60)).unwrap().unwrap_err();
    assert!(end.starts_with("NotReachable: the agent at "), "{end}");
    drop(command);
}

fn images(command: ImagesCommand) -> Subcommand {
    Subcommand::Images { output: Output::Table, command }
}

/// A set with the archives of a directory. Each has the image `r.example/<name of its file>:1`, with
/// one layer.
struct Archives {
    dir: std::path::PathBuf,
    manifest: String,
    layer: Vec<u8>,
    scans: AtomicU64,
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", crate::util::sha256::sha256_hex(bytes))
}

impl Archives {
    /// An index whose entries are the manifest, without its size, and three that cannot be had.
    fn index(&self) -> String {
        let digests = [digest(self.manifest.as_bytes()), format!("sha512:{}", "0".repeat(128))];
        let [own, unsupported] = digests.map(|digest| json!({"digest": digest}));
        let missing = json!({"digest": digest(b"missing"), "size": 7});
        json!({"manifests": [own, unsupported, {"size": 7}, missing]}).to_string()
    }

    fn new(dir: &std::path::Path) -> Archives {
        let layer = vec![7; 100_000];
        let part = json!({"digest": digest(&layer), "size": layer.len()});
        let manifest = json!({"schemaVersion": 2, "config": part, "layers": [part]}).to_string();
        Archives { dir: dir.to_owned(), manifest, layer, scans: AtomicU64::new(0) }
    }
}

impl server::Images for Archives {
    fn manifest(&self, repository: &str, reference: &str) -> Result<Document, LookupError> {
        let document = |kind: &str, text: &str| Document {
            media_type: format!("application/vnd.oci.image.{kind}.v1+json"),
            digest: digest(text.as_bytes()),
            bytes: text.as_bytes().into(),
        };
        match (repository, reference) {
            ("r.example/a.tar", "1") => Ok(document("manifest", &self.manifest)),
            ("r.example/index", "1") => Ok(document("index", &self.index())),
            ("r.example/index", reference) if reference == digest(self.manifest.as_bytes()) => {
                Ok(document("manifest", &self.manifest))
            }
            _ => Err(LookupError::Unknown(format!("no archive has {repository}:{reference}"))),
        }
    }

    fn blob(&self, wanted: &str) -> Result<server::BlobSource, LookupError> {
        assert_eq!(wanted, digest(&self.layer));
        let layer = self.layer.clone();
        let open = move |_: u64, _: &StopToken| -> Result<Box<dyn std::io::Read + Send>, BlobError> {
            Ok(Box::new(std::io::Cursor::new(layer.clone())))
        };
        Ok(server::BlobSource { size: self.layer.len() as u64, open: Box::new(open) })
    }

    fn tags(&self, _: &str) -> Vec<String> {
        Vec::new()
    }

    fn report(&self) -> ArchiveSetReport {
        let mut report = ArchiveSetReport {
            directories: vec![self.dir.display().to_string()],
            ..ArchiveSetReport::default()
        };
        // Before the first scan nothing is known.
        let files =
            if self.scans.load(Ordering::SeqCst) > 0 { std::fs::read_dir(&self.dir).ok() } else { None };
        for entry in files.into_iter().flatten().flatten() {
            let (name, path) = (entry.file_name().into_string().unwrap(), entry.path().display().to_string());
            let faults: Vec<String> =
                name.contains("bad").then(|| "blob sha256:5 is damaged".into()).into_iter().collect();
            let state = if faults.is_empty() { "present" } else { "damaged" };
            report.images.push(SetImageReport {
                name: format!("r.example/{name}:1"),
                archive: path.clone(),
                state: state.into(),
                ..SetImageReport::default()
            });
            let size_bytes = entry.metadata().unwrap().len();
            report.archives.push(ArchiveReport {
                path,
                state: "ready".into(),
                read_bytes: 0,
                size_bytes,
                faults,
            });
        }
        report
    }

    fn rescan(&self) {
        self.scans.fetch_add(1, Ordering::SeqCst);
    }

    fn set_registry(&self, _: &str) {}

    fn report_no_registry(&self, _: &str) {}
}

#[test]
fn archives_are_imported_listed_exported_and_removed() {
    let files = tempfile::tempdir().unwrap();
    let path = |name: &str| files.path().join(name);
    let directory = path("images.d");
    let agent = Agent::with(|node| node.image_set = Arc::new(Archives::new(&directory)));
    std::fs::write(path("index.json"), "{}").unwrap();
    for name in ["a.tar", "bad.tar"] {
        let tar = std::process::Command::new("tar")
            .current_dir(files.path())
            .args(["-cf", name, "index.json"])
            .status()
            .unwrap();
        assert!(tar.success());
    }
    std::fs::write(path("text.tar"), "no archive").unwrap();
    let import = |name: &str| {
        images(ImagesCommand::Import { files: vec![path(name)], directories: Vec::new(), wait: true })
    };
    let target = directory.join("a.tar");
    let (outcome, text) = agent.run(import("a.tar"));
    let shown = target.display();
    assert_eq!(
        (outcome, text),
        (Ok(Exit::Success), format!("{shown}: copied\n{shown}: r.example/a.tar:1\n"))
    );
    let (outcome, text) = agent.run(import("a.tar"));
    assert_eq!(outcome, Ok(Exit::Success));
    assert!(text.contains("is there already"), "{text}");
    assert_eq!(agent.run(import("bad.tar")).0, Ok(Exit::Failure));
    assert_eq!(agent.run(import("text.tar")), (Ok(Exit::Failure), String::new()));
    assert!(!directory.join("text.tar").exists(), "what is no archive is not copied");

    let (outcome, text) = agent.run(images(ImagesCommand::List));
    assert_eq!(outcome, Ok(Exit::Success));
    let words = |start: &str| {
        let line = text.lines().find(|line| line.starts_with(start)).unwrap();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(words("a:1"), ["a:1", "0", "B", "-", "no", "present"]);
    assert_eq!(words("r.example/a.tar:1")[3..], [shown.to_string(), "yes".into(), "present".into()]);
    assert_eq!(words("r.example/bad.tar:1")[5..], ["damaged"]);
    assert!(text.contains("bad.tar: blob sha256:5 is damaged\n"), "{text}");

    let archive = path("out.tar");
    let export = |name: &str| images(ImagesCommand::Export { name: name.into(), file: archive.clone() });
    assert!(agent.run(export("r.example/none:1")).0.unwrap_err().starts_with("NotFound: no archive has"));
    assert!(!archive.exists());
    assert_eq!(agent.run(export("r.example/a.tar:1")).0, Ok(Exit::Success));
    let tar = std::process::Command::new("tar").arg("-tf").arg(&archive).output().unwrap();
    let fake = Archives::new(&directory);
    let blob = |bytes: &[u8]| format!("blobs/{}", digest(bytes).replace(':', "/"));
    let names =
        ["oci-layout".to_owned(), "index.json".into(), blob(fake.manifest.as_bytes()), blob(&fake.layer)];
    assert_eq!(String::from_utf8(tar.stdout).unwrap().lines().collect::<Vec<_>>(), names);
    let content =
        std::process::Command::new("tar").arg("-xOf").arg(&archive).arg(&names[3]).output().unwrap();
    assert!(content.stdout == fake.layer);

    let (outcome, text) = agent.run(export("r.example/index:1"));
    assert_eq!(outcome, Ok(Exit::Success));
    let index = digest(fake.index().as_bytes());
    let expected = format!(
        "no archive has the part {} of the image\n\
         entry 2 of the index {index} has no sha256 digest: this part of the image is left out\n\
         entry 3 of the index {index} has no sha256 digest: this part of the image is left out\n\
         r.example/index:1: written to {}\n",
        digest(b"missing"),
        archive.display()
    );
    assert_eq!(text, expected);
    let tar = std::process::Command::new("tar").arg("-tf").arg(&archive).output().unwrap();
    let blobs = String::from_utf8(tar.stdout).unwrap();
    assert!(blobs.contains(&names[2]) && blobs.contains(&names[3]), "{blobs}");

    let remove = |name: &str| images(ImagesCommand::Remove { name: name.into() });
    assert_eq!(agent.run(remove("none.tar")).0, Ok(Exit::NotFound));
    let (outcome, text) = agent.run(remove("r.example/a.tar:1"));
    assert_eq!(
        (outcome, text),
        (
            Ok(Exit::Success),
            format!(
                "removed {shown}\nreleased r.example/a.tar:1: it may be removed when disk space is short\n"
            )
        )
    );
    assert!(!target.exists());
}
