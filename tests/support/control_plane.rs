//! A Kubernetes control plane for one test: etcd, API server, controllers, scheduler and
//! kubectl of the release that this project is for, built from `tests/controlplane`. One
//! program runs them all and ends them when its standard input closes, so that nothing can
//! outlive the test; the kernel ends the rest if that program is killed.
//!
//! `CONTROLPLANE_BIN` is what `controlplane` of `packaging/programs.sh` prints, or, with
//! `CONTROLPLANE_IS_FORMER=yes`, what `former_controlplane` prints: the release before.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{LazyLock, Mutex, OnceLock};
use std::time::Duration;

use serde_json::Value;

use super::api_reader::ApiReader;
use super::node::Node;
use super::wait::{pause, wait_for, wait_until};

/// Required and optional components of a control plane.
pub(crate) const ETCD: &str = "etcd";
pub(crate) const API_SERVER: &str = "kube-apiserver";
pub(crate) const CONTROLLERS: &str = "kube-controller-manager";
pub(crate) const SCHEDULER: &str = "kube-scheduler";

/// Messages of kubectl when the server did not respond in time.
const SHORT_OF_TIME: &[&str] = &[
    "Unable to connect to the server",
    "TLS handshake timeout",
    "etcdserver: ",
    "unable to return a response in the time allotted",
    "net/http: request canceled",
    "context deadline exceeded",
    "http2: client connection lost",
];

/// The network namespace is ours alone. Three ports each, below those of the nodes.
static NEXT_PORT: AtomicU16 = AtomicU16::new(14_000);

/// The release of the control plane.
const RELEASE: &str = "v1.37.2";
/// The release of the former control plane.
const FORMER_RELEASE: &str = "v1.36.3";

/// Whether the tests run on a control plane of the former release.
pub(crate) fn is_former() -> bool {
    std::env::var("CONTROLPLANE_IS_FORMER").is_ok_and(|former| former == "yes")
}

/// The release of the control plane that the tests run on.
pub(crate) fn server_release() -> &'static str {
    if is_former() { FORMER_RELEASE } else { RELEASE }
}

/// What runs beside etcd and the API server.
#[derive(Debug, Clone)]
pub(crate) struct ControlPlaneOptions {
    pub controllers: bool,
    pub scheduler: bool,
    /// Where the API server listens: loopback, or an address that pods can reach.
    pub address: String,
    /// A component and one flag more for it.
    pub flags: Vec<(String, String)>,
}

impl Default for ControlPlaneOptions {
    fn default() -> ControlPlaneOptions {
        ControlPlaneOptions {
            controllers: true,
            scheduler: true,
            address: "127.0.0.1".to_owned(),
            flags: Vec::new(),
        }
    }
}

impl ControlPlaneOptions {
    /// etcd and the API server only: half the memory, and no controller changes anything.
    pub(crate) fn bare() -> ControlPlaneOptions {
        ControlPlaneOptions { controllers: false, scheduler: false, ..ControlPlaneOptions::default() }
    }

    /// One flag more for a component.
    pub(crate) fn flag(mut self, component: &str, flag: &str) -> ControlPlaneOptions {
        self.flags.push((component.to_owned(), flag.to_owned()));
        self
    }
}

/// A running control plane.
pub(crate) struct ControlPlane {
    dir: PathBuf,
    bin: PathBuf,
    server: String,
    components: Vec<&'static str>,
    pipes: Mutex<Pipes>,
    program: Child,
    reader: OnceLock<ApiReader>,
}

struct Pipes {
    /// Its end is the program's end.
    commands: Option<ChildStdin>,
    responses: BufReader<ChildStdout>,
}

impl ControlPlane {
    /// One with all components, for all tests of the program that do not disturb it: they use their own
    /// names of namespaces and nodes, and bind their pods to their nodes. It ends with
    /// the test program.
    pub(crate) fn shared() -> &'static ControlPlane {
        static SHARED: LazyLock<ControlPlane> = LazyLock::new(|| ControlPlane::start(&Node::base("all")));
        &SHARED
    }

    /// One with everything, in `dir`/cp. A node can join when this returns.
    pub(crate) fn start(dir: &Path) -> ControlPlane {
        ControlPlane::start_with(dir, &ControlPlaneOptions::default())
    }

    /// One with the given components.
    pub(crate) fn start_with(dir: &Path, options: &ControlPlaneOptions) -> ControlPlane {
        let bin = std::env::var_os("CONTROLPLANE_BIN").expect("CONTROLPLANE_BIN: run through tests/run");
        let (dir, bin) = (dir.join("cp"), PathBuf::from(bin));
        fs::create_dir_all(&dir).expect("the control plane's directory can be made");
        let mut command = Command::new(bin.join("cluster"));
        command.arg("run").arg(&dir).args(["-address", &options.address]);
        command.args(["-port", &NEXT_PORT.fetch_add(3, Ordering::Relaxed).to_string()]);
        let mut components = vec![ETCD, API_SERVER];
        if options.controllers {
            command.arg("-controllers");
            components.push(CONTROLLERS);
        }
        if options.scheduler {
            command.arg("-scheduler");
            components.push(SCHEDULER);
        }
        for (component, flag) in &options.flags {
            command.args(["-flag", &format!("{component}={flag}")]);
        }
        let log = File::create(dir.join("cluster.log")).expect("a log file");
        let mut program = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("the control plane starts");
        let commands = program.stdin.take();
        let responses = BufReader::new(program.stdout.take().expect("its output is piped"));
        let pipes = Mutex::new(Pipes { commands, responses });
        let mut plane = ControlPlane {
            dir,
            bin,
            server: String::new(),
            components,
            pipes,
            program,
            reader: OnceLock::new(),
        };
        let response = plane.read_response();
        plane.server = response.strip_prefix("ready ").map(str::to_owned).unwrap_or_else(|| {
            let log = fs::read_to_string(plane.dir.join("cluster.log")).unwrap_or_default();
            panic!("the control plane is not ready: {response} {log}")
        });
        plane
    }

    /// One line of the program. It bounds all waiting by itself.
    fn read_response(&self) -> String {
        let mut line = String::new();
        let mut pipes = self.pipes.lock().expect("no test thread died with the lock");
        pipes.responses.read_line(&mut line).expect("the control plane answers");
        line.trim_end().to_owned()
    }

    /// A command to the program: what it says, or its error.
    pub(crate) fn command(&self, words: &str) -> Result<String, String> {
        let mut line = String::new();
        let mut pipes = self.pipes.lock().expect("no test thread died with the lock");
        let commands = pipes.commands.as_mut().expect("it is open until the end");
        writeln!(commands, "{words}").map_err(|error| format!("the control plane has ended: {error}"))?;
        pipes.responses.read_line(&mut line).expect("the control plane answers");
        match line.trim_end().split_once(' ').unwrap_or((line.trim_end(), "")) {
            ("ok", result) => Ok(result.to_owned()),
            (_, error) => Err(error.to_owned()),
        }
    }

    fn must(&self, words: &str) -> String {
        self.command(words).unwrap_or_else(|error| panic!("{words}: {error}"))
    }

    /// The API server's URL.
    pub(crate) fn server(&self) -> &str {
        &self.server
    }

    /// Everything of it lies here; the program's head says what there is.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The directory of the programs, `kubelet` and `kubectl` among them.
    pub(crate) fn bin(&self) -> &Path {
        &self.bin
    }

    /// Ends a component with SIGKILL: open connections are reset, later ones refused.
    pub(crate) fn stop(&self, component: &str) {
        self.must(&format!("stop {component}"));
    }

    /// Starts it again, with the same data and port, and returns once it is ready.
    pub(crate) fn resume(&self, component: &str) {
        self.must(&format!("start {component}"));
    }

    /// Lets a component hang: its connections stay open and nothing answers.
    pub(crate) fn freeze(&self, component: &str) {
        self.must(&format!("freeze {component}"));
    }

    /// Ends the hanging.
    pub(crate) fn thaw(&self, component: &str) {
        self.must(&format!("thaw {component}"));
    }

    /// Forgets all history. The API server has some in memory too, and forgets it by
    /// [`ControlPlane::stop`] and [`ControlPlane::resume`]: old watches then get 410.
    pub(crate) fn compact(&self) {
        self.must("compact");
    }

    /// The process of a component.
    pub(crate) fn pid(&self, component: &str) -> u32 {
        self.must(&format!("pid {component}")).parse().expect("a process id")
    }

    /// The processes of all components, and of the program that runs them.
    pub(crate) fn pids(&self) -> Vec<u32> {
        let own = std::iter::once(self.program.id());
        own.chain(self.components.iter().map(|name| self.pid(name))).collect()
    }

    /// The administrator's kubeconfig.
    pub(crate) fn admin_kubeconfig(&self) -> PathBuf {
        self.dir.join("admin.kubeconfig")
    }

    /// A kubeconfig with which a node may ask for its certificate, and for nothing else.
    pub(crate) fn bootstrap_kubeconfig(&self) -> PathBuf {
        self.dir.join("bootstrap.kubeconfig")
    }

    /// A kubeconfig with a certificate of the node `name`.
    pub(crate) fn node_kubeconfig(&self, name: &str) -> PathBuf {
        self.node_kubeconfig_with(name, "")
    }

    /// As [`ControlPlane::node_kubeconfig`], with options: `server=URL` (a proxy before the API
    /// server), `ttl=DURATION` of the certificate.
    pub(crate) fn node_kubeconfig_with(&self, name: &str, options: &str) -> PathBuf {
        PathBuf::from(self.must(&format!("node {name} {options}")))
    }

    /// A node's request for a certificate, as the `request` of a CertificateSigningRequest. Its
    /// key is thrown away.
    pub(crate) fn request(&self, node: &str) -> String {
        self.must(&format!("request {node}"))
    }

    /// The status of a PodCertificateRequest that a signer has signed, without its conditions. `request`
    /// is `stubPKCS10Request` of the object.
    pub(crate) fn sign(&self, request: &str) -> Value {
        serde_json::from_str(&self.must(&format!("sign {request}"))).expect("the program prints JSON")
    }

    /// Standard output of kubectl, which has to succeed, as the administrator.
    pub(crate) fn kubectl(&self, args: &[&str]) -> String {
        stdout_of(args, &self.with_retries(args, ""))
    }

    /// kubectl as the administrator, retried when the server did not respond in time.
    fn with_retries(&self, args: &[&str], input: &str) -> Output {
        for _ in 0..4 {
            let output = self.try_kubectl(args, input);
            let error = String::from_utf8_lossy(&output.stderr);
            if output.status.success() || !SHORT_OF_TIME.iter().any(|part| error.contains(part)) {
                return output;
            }
            eprintln!("kubectl {args:?}: {error}");
            pause(Duration::from_secs(1));
        }
        self.try_kubectl(args, input)
    }

    /// kubectl as the administrator, with `input` on its standard input.
    pub(crate) fn try_kubectl(&self, args: &[&str], input: &str) -> Output {
        self.kubectl_as(&self.admin_kubeconfig(), args, input)
    }

    /// kubectl as the administrator, yet to be started.
    pub(crate) fn kubectl_command(&self, args: &[&str]) -> Command {
        self.command_line(&self.admin_kubeconfig(), args)
    }

    fn command_line(&self, kubeconfig: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(self.bin.join("kubectl"));
        // Its caches and preferences are those of the test.
        command.env("HOME", &self.dir).env("KUBECTL_KUBERC", "false");
        command.arg("--kubeconfig").arg(kubeconfig).args(args);
        command
    }

    /// kubectl as another user.
    pub(crate) fn kubectl_as(&self, kubeconfig: &Path, args: &[&str], input: &str) -> Output {
        let mut child = self
            .command_line(kubeconfig, args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("kubectl runs");
        // Short enough for a pipe, or kubectl reads it; one that ended early has its own error.
        let mut pipe = child.stdin.take().expect("its input is piped");
        let _ = pipe.write_all(input.as_bytes());
        drop(pipe);
        child.wait_with_output().expect("kubectl ends")
    }

    /// `kubectl apply` of a document.
    pub(crate) fn apply(&self, document: &Value) {
        let args = ["apply", "-f", "-"];
        stdout_of(&args, &self.with_retries(&args, &document.to_string()));
    }

    /// What `kubectl get -o json` prints; `None` when it is not there. Retried when the server did not
    /// respond in time.
    pub(crate) fn get(&self, args: &[&str]) -> Option<Value> {
        for _ in 0..4 {
            match self.reader().get(args) {
                None => break,
                Some(Ok(object)) => return object,
                Some(Err(error)) => eprintln!("{error}"),
            }
            pause(Duration::from_secs(1));
        }
        self.get_by_kubectl(args, Self::with_retries).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The same for polling: a busy server may fail to respond once. Its error is printed.
    pub(crate) fn poll(&self, args: &[&str]) -> Option<Value> {
        let outcome = self.reader().get(args).unwrap_or_else(|| self.get_by_kubectl(args, Self::try_kubectl));
        outcome.unwrap_or_else(|error| {
            eprintln!("{error}");
            None
        })
    }

    /// A page of the API server that is no object, such as `/metrics`, as the administrator.
    pub(crate) fn page(&self, path: &str) -> Result<String, String> {
        self.reader().page(path)
    }

    fn reader(&self) -> &ApiReader {
        self.reader.get_or_init(|| ApiReader::new(&self.server, &self.admin_kubeconfig()))
    }

    fn get_by_kubectl(
        &self,
        args: &[&str],
        kubectl: impl Fn(&Self, &[&str], &str) -> Output,
    ) -> Result<Option<Value>, String> {
        let mut all = vec!["get", "-o", "json", "--ignore-not-found"];
        all.extend(args);
        let output = kubectl(self, &all, "");
        if !output.status.success() {
            return Err(format!("kubectl {all:?}: {}", String::from_utf8_lossy(&output.stderr)));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        Ok((!text.trim().is_empty()).then(|| serde_json::from_str(&text).expect("kubectl writes JSON")))
    }

    /// Waits for an object to satisfy a condition.
    pub(crate) fn wait(
        &self,
        args: &[&str],
        what: &str,
        limit: Duration,
        holds: impl Fn(&Value) -> bool,
    ) -> Value {
        wait_for(&format!("{args:?} to be {what}"), limit, || self.poll(args).filter(&holds))
    }

    /// What nodes and joining nodes have asked for so far: the API server's audit events, with
    /// the bodies of requests. A watch is there twice: when it begins and when it ends.
    pub(crate) fn requests(&self) -> Vec<Value> {
        // It is being written: its end may be half a line, or half a letter.
        let bytes = fs::read(self.dir.join("audit.log")).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).expect("the audit log is JSON")).collect()
    }

    /// The log of a component.
    pub(crate) fn log(&self, component: &str) -> String {
        fs::read_to_string(self.dir.join(format!("logs/{component}.log"))).unwrap_or_default()
    }

    /// Ends everything and returns when it has ended.
    pub(crate) fn down(&mut self) {
        if let Ok(pipes) = self.pipes.get_mut() {
            pipes.commands = None;
            // The end of its output is the end of the program.
            let _ = pipes.responses.read_to_end(&mut Vec::new());
        }
        let _ = self.program.wait();
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for component in &self.components {
                let log = self.log(component);
                let bad: Vec<&str> = log.lines().filter(|line| line.starts_with(['E', 'F'])).collect();
                eprintln!("--- errors of {component} ---\n{}", bad[bad.len().saturating_sub(8)..].join("\n"));
            }
        }
        self.down();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn stdout_of(args: &[&str], output: &Output) -> String {
    assert!(output.status.success(), "kubectl {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Waits until none of the processes exists.
pub(crate) fn wait_ended(pids: &[u32]) {
    wait_until("the control plane's processes to be gone", Duration::from_secs(60), || {
        pids.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists())
    });
}
