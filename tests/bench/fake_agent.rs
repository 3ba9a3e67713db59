//! An agent with a fake runtime of its own, as a node of a real API server: many fit on one machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::control_plane::ControlPlane;
use crate::support::fake_cri::FakeCri;
use crate::support::fake_node::free_port;
use crate::support::launch;
use crate::support::wait::wait_until;

/// Agents that start at once share the processors.
const START: Duration = Duration::from_secs(600);

/// The program of the agents.
#[derive(Debug, Clone, Copy)]
pub struct Program<'a> {
    pub binary: &'a Path,
    /// It takes the flags of the Go kubelet only, and has its fixed directories.
    pub is_go_kubelet: bool,
}

/// An agent and its runtime. Dropping it kills the agent.
pub struct FakeAgent {
    pub name: String,
    dir: PathBuf,
    agent: Child,
    _runtime: FakeCri,
}

impl FakeAgent {
    /// Starts it in a directory of its own below `base`.
    pub fn start(name: String, program: Program<'_>, kubeconfig: &Path, base: &Path) -> FakeAgent {
        FakeAgent::configured(name, program, kubeconfig, base, json!({}))
    }

    /// With these fields of the configuration. The directory may be that of an earlier start.
    pub fn configured(
        name: String,
        program: Program<'_>,
        kubeconfig: &Path,
        base: &Path,
        fields: Value,
    ) -> FakeAgent {
        let runtime = FakeCri::start();
        let dir = base.join(&name);
        fs::create_dir_all(dir.join("manifests")).expect("the manifest directory can be made");
        // The file system of images is the machine's, and events that it is full would be counted as requests.
        let extra = json!({"port": free_port(), "readOnlyPort": 0, "healthzPort": free_port(),
            "imageGCHighThresholdPercent": 100});
        let mut extra = launch::merged(extra, fields);
        if program.is_go_kubelet {
            extra = launch::merged(extra, launch::go_kubelet_config(&dir));
        }
        launch::write_config(&dir, &runtime.endpoint(), extra);
        let mut command = launch::command(program.binary, &dir, &name);
        command.arg("--kubeconfig").arg(kubeconfig);
        if program.is_go_kubelet {
            let place = dir.join("place");
            fs::create_dir_all(&place).expect("a directory can be made");
            command = launch::with_kubelet_place(&command, &place);
        } else {
            command.arg("--local-socket").arg(launch::local_socket(&dir));
        }
        let agent = launch::spawn(&mut command, &dir.join("agent-1.log"));
        FakeAgent { name, dir, agent, _runtime: runtime }
    }

    pub fn pid(&self) -> u32 {
        self.agent.id()
    }

    /// A file of its root directory, as the agent sees it: its mounts may be its own.
    pub fn file(&self, path: &str) -> PathBuf {
        let inside = self.dir.join("root").join(path);
        let inside = inside.strip_prefix("/").unwrap_or(&inside);
        PathBuf::from(format!("/proc/{}/root", self.pid())).join(inside)
    }

    /// The end of its log.
    fn log_tail(&self) -> String {
        let log = fs::read_to_string(self.dir.join("agent-1.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

impl Drop for FakeAgent {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}

/// Whether a condition of an object is true.
pub fn has_condition(object: &Value, condition: &str) -> bool {
    let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    conditions.into_iter().any(|entry| entry["type"] == condition && entry["status"] == "True")
}

/// The objects of a list.
pub fn list(plane: &ControlPlane, arguments: &[&str]) -> Vec<Value> {
    let list = plane.poll(arguments).unwrap_or_default();
    list["items"].as_array().cloned().unwrap_or_default()
}

/// Waits until all are ready; fails as soon as an agent has ended.
pub fn wait_all_ready(agents: &mut [FakeAgent], plane: &ControlPlane) {
    wait_until("all nodes to be ready", START, || {
        for agent in &mut *agents {
            if let Ok(Some(status)) = agent.agent.try_wait() {
                panic!("{} ended with {status}; its log:\n{}", agent.name, agent.log_tail());
            }
        }
        list(plane, &["nodes"]).iter().filter(|node| has_condition(node, "Ready")).count() == agents.len()
    });
}
