//! A private containerd for one test, through `packaging/containerd-private`: the same
//! script that the quick start uses. It lives inside the namespaces that
//! `tests/support/enclose` made, so nothing of it can stay behind.
//!
//! With `E2E_RUNTIME=crio` it is a CRI-O, through `packaging/crio-private`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use super::wait::{wait_for, wait_until};

/// A limit for requests that containerd answers at once unless the machine is busy.
const LIMIT: Duration = Duration::from_secs(60);

/// Whether the runtime of the tests is CRI-O instead of containerd.
pub(crate) fn is_crio() -> bool {
    std::env::var("E2E_RUNTIME").is_ok_and(|runtime| runtime == "crio")
}

/// One containerd, or CRI-O, with its own root, state, socket and bridge.
pub(crate) struct Containerd {
    dir: PathBuf,
    bin: OnceLock<PathBuf>,
}

/// A task as `ctr tasks ls` lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Task {
    pub id: String,
    pub pid: u32,
    pub running: bool,
}

fn tool() -> String {
    std::env::var("E2E_TOOL").expect("the end-to-end tests run through: tests/run e2e")
}

impl Containerd {
    /// Where all of it is.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Starts one in `dir`/cd with the local images in it.
    pub(crate) fn start(dir: &Path) -> Containerd {
        Containerd::start_with(dir, false)
    }

    /// As [`Containerd::start`]; `systemd`: with the cgroup driver of systemd.
    pub(crate) fn start_with(dir: &Path, systemd: bool) -> Containerd {
        let images = std::env::var("E2E_IMAGES").expect("E2E_IMAGES: run through tests/run e2e");
        let containerd = Containerd { dir: dir.join("cd"), bin: OnceLock::new() };
        let mut args = vec!["up".to_owned(), containerd.dir.display().to_string()];
        // The image without any program is for tests of other kinds.
        let wanted = images.split_whitespace().filter(|path| !path.ends_with("/scratch.tar"));
        args.extend(wanted.map(str::to_owned));
        run_with(&args, &[("SYSTEMD_CGROUP", if systemd { "true" } else { "false" })]);
        containerd
    }

    /// The CRI endpoint.
    pub(crate) fn endpoint(&self) -> String {
        format!("unix://{}/{}.sock", self.dir.display(), daemon())
    }

    /// The file that describes the pods' network.
    pub(crate) fn network_config(&self) -> PathBuf {
        self.dir.join("cni/10-coracle.conflist")
    }

    /// The daemon's log, for a failed test.
    pub(crate) fn log(&self) -> PathBuf {
        self.dir.join(format!("{}.log", daemon()))
    }

    /// Ends the daemon and leaves its containers running.
    pub(crate) fn stop(&self) {
        run(&["stop".to_owned(), self.dir.display().to_string()]);
    }

    /// Ends the daemon with all containers and mounts, and removes its state, as a power cut does; its
    /// records and images stay. [`Containerd::resume`] is the next boot. Not for CRI-O.
    pub(crate) fn cut_power(&self) {
        run(&["cut".to_owned(), self.dir.display().to_string()]);
    }

    /// Starts the daemon again and returns once it answers.
    pub(crate) fn resume(&self) {
        run(&["start".to_owned(), self.dir.display().to_string()]);
    }

    /// Standard output of `ctr` in the k8s.io namespace.
    pub(crate) fn ctr(&self, args: &[&str]) -> String {
        let bin = self.bin.get_or_init(|| {
            let path = std::fs::read_to_string(self.dir.join("bin")).expect("the tool noted the directory");
            PathBuf::from(path.trim()).join("ctr")
        });
        let socket = self.dir.join("containerd.sock");
        let output = Command::new(bin)
            .arg("--address")
            .arg(socket)
            .args(["-n", "k8s.io"])
            .args(args)
            .stdin(Stdio::null())
            .output()
            .expect("ctr runs");
        assert!(
            output.status.success(),
            "ctr {args:?}: {}{}",
            String::from_utf8_lossy(&output.stderr),
            String::from_utf8_lossy(&output.stdout)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Every task, running or not.
    pub(crate) fn tasks(&self) -> Vec<Task> {
        if is_crio() {
            return self.runc_containers();
        }
        let listing = self.ctr(&["tasks", "ls"]);
        let mut tasks = Vec::new();
        for line in listing.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            if let [id, pid, status] = fields[..] {
                tasks.push(Task {
                    id: id.to_owned(),
                    pid: pid.parse().unwrap_or(0),
                    running: status == "RUNNING",
                });
            }
        }
        tasks
    }

    /// The containers that runc has for CRI-O, sandboxes included.
    fn runc_containers(&self) -> Vec<Task> {
        let mut command = Command::new("runc");
        command.arg("--root").arg(self.dir.join("runc")).args(["list", "--format", "json"]);
        // A container that ends or starts meanwhile can make it fail.
        let list = wait_for("a list of runc", LIMIT, || {
            let output = command.output().expect("runc runs");
            serde_json::from_slice::<serde_json::Value>(&output.stdout)
                .ok()
                .filter(|_| output.status.success())
        });
        let task = |container: &serde_json::Value| Task {
            id: container["id"].as_str().unwrap_or_default().to_owned(),
            pid: container["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0),
            running: container["status"] == "running",
        };
        list.as_array().into_iter().flatten().map(task).collect()
    }

    /// A task that runs. The list leaves out those whose shim does not answer within 2 s.
    pub(crate) fn running_task(&self, id: &str) -> Task {
        wait_for(&format!("the running task {id}"), LIMIT, || {
            self.tasks().into_iter().find(|task| task.id == id && task.running)
        })
    }

    /// The ids of all container records, living and dead, sandboxes included.
    pub(crate) fn record_ids(&self) -> Vec<String> {
        if is_crio() {
            return self.runc_containers().into_iter().map(|task| task.id).collect();
        }
        self.ctr(&["containers", "ls", "-q"]).split_whitespace().map(str::to_owned).collect()
    }

    /// Kills the first process of a container or sandbox without the agent.
    pub(crate) fn kill_task(&self, id: &str) {
        kill(self.running_task(id).pid, "KILL");
        wait_until(&format!("task {id} to be dead"), LIMIT, || {
            self.tasks().iter().all(|task| task.id != id || !task.running)
        });
    }

    /// Ends everything of this containerd.
    pub(crate) fn down(&self) {
        let _ = Command::new(tool()).args(["down", &self.dir.display().to_string()]).output();
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        self.down();
    }
}

/// Sends a signal to one process that this test, or its containerd, has started.
pub(crate) fn kill(pid: u32, signal: &str) {
    let _ =
        Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).stderr(Stdio::null()).status();
}

fn daemon() -> &'static str {
    if is_crio() { "crio" } else { "containerd" }
}

fn run(args: &[String]) -> String {
    run_with(args, &[])
}

fn run_with(args: &[String], environment: &[(&str, &str)]) -> String {
    let output =
        Command::new(tool()).args(args).envs(environment.iter().copied()).output().expect("the tool runs");
    assert!(
        output.status.success(),
        "{}-private {args:?}: {}: {}{}",
        daemon(),
        output.status,
        String::from_utf8_lossy(&output.stderr),
        String::from_utf8_lossy(&output.stdout)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}
