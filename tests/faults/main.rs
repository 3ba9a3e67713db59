//! The real agent against a runtime that misbehaves: whatever fails, hangs or is slow, no
//! pod is lost, no container runs twice, and the agent responds and stops in time.

#![allow(unreachable_pub, reason = "a program offers nothing to others")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/mod.rs"]
mod support;

mod api_server;
mod bus_floods;
mod certificates;
mod clock;
mod crashes;
mod event_stream;
mod file_races;
mod images;
mod lives;
mod log_races;
mod method_faults;
mod outages;
mod plugin_faults;
mod plugin_kills;
mod plugin_node;
mod races;
mod resizes;
mod rotation_races;
mod scale;
mod steps;
mod stops;
mod syscalls;

use std::any::Any;
use std::fmt::Debug;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Condvar, Mutex};

use serde_json::{Value, json};

use support::fake_node::FakeNode;
use support::node::{FOREVER, busybox, pod};
use support::output::print_line;

/// A small file system for an agent's directories, which can be filled.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts one of 32 MiB on the root directory of a node whose agent does not run yet.
    fn mount(node: &FakeNode) -> SmallDisk {
        let root = node.root();
        fs::create_dir_all(&root).unwrap();
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=32m,mode=755", "tmpfs"])
            .arg(&root)
            .status();
        assert!(done.unwrap().success(), "cannot mount a tmpfs on {}", root.display());
        SmallDisk(root)
    }

    /// Fills more than a half.
    fn fill(node: &FakeNode) {
        fs::write(node.root().join("filler"), vec![1_u8; 24 << 20]).unwrap();
    }

    fn clear(node: &FakeNode) {
        fs::remove_file(node.root().join("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        let _ = self.0.parent().map(fs::remove_dir_all);
    }
}

/// Cases at one time, those of all tests together: more of them would only be in each
/// other's way while they start. `FAULT_CASES` is another number.
const CASES_AT_ONCE: usize = 48;

fn cases_at_once() -> usize {
    let number = std::env::var("FAULT_CASES").ok().map(|text| text.parse().expect("a number of cases"));
    number.unwrap_or(CASES_AT_ONCE).max(1)
}

/// Permission to run one case; at most [`cases_at_once`] exist.
struct CaseSlot;

static RUNNING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

impl CaseSlot {
    fn take() -> CaseSlot {
        let (most, (running, ended)) = (cases_at_once(), &RUNNING);
        let running = running.lock().unwrap();
        *ended.wait_while(running, |running| *running >= most).unwrap() += 1;
        CaseSlot
    }
}

impl Drop for CaseSlot {
    fn drop(&mut self) {
        let (running, ended) = &RUNNING;
        *running.lock().unwrap() -= 1;
        ended.notify_one();
    }
}

/// Runs one case per thread and fails with the names of all that failed. The cases mostly
/// wait, so that many of them hardly take more time than the longest alone.
fn in_parallel<T: Debug + Sync>(cases: &[T], run: impl Fn(&T) + Sync) {
    let run_case = |case: &T| {
        let _slot = CaseSlot::take();
        run(case);
    };
    let run_case = &run_case;
    let failed: Vec<String> = std::thread::scope(|scope| {
        let running: Vec<_> = cases.iter().map(|case| (case, scope.spawn(move || run_case(case)))).collect();
        running
            .into_iter()
            .filter_map(|(case, thread)| Some(format!("{case:?}: {}", message(&*thread.join().err()?))))
            .collect()
    });
    assert!(failed.is_empty(), "{} of {} failed:\n{}", failed.len(), cases.len(), failed.join("\n"));
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words")
}

/// The containers of [`two`].
const BOTH: [&str; 2] = ["one", "two"];

/// An image that is pulled at every start of a container.
const REMOTE_IMAGE: &str = "registry.example/app:1";

/// A pod of two containers, of which the first needs a pull.
fn two(name: &str) -> Value {
    let mut first = busybox("one", FOREVER);
    first["image"] = json!(REMOTE_IMAGE);
    first["imagePullPolicy"] = json!("Always");
    pod(name, json!([first, busybox("two", FOREVER)]))
}

/// The running containers of [`rich`].
const RICH: [&str; 3] = ["one", "side", "two"];

/// A pod with all features: the containers of [`two`] with hooks and probes, a
/// sidecar and an init container before them, volumes on disk, in memory and made of files.
fn rich(name: &str) -> Value {
    let mut pod = two(name);
    let spec = &mut pod["spec"];
    let mut side = busybox("side", FOREVER);
    side["restartPolicy"] = json!("Always");
    spec["initContainers"] = json!([side, busybox("first", "exit 0")]);
    let container = &mut spec["containers"][0];
    container["lifecycle"] = json!({
        "postStart": {"exec": {"command": ["post-start"]}},
        "preStop": {"exec": {"command": ["pre-stop"]}},
    });
    container["volumeMounts"] = json!([
        {"name": "disk", "mountPath": "/disk"},
        {"name": "memory", "mountPath": "/memory"},
        {"name": "files", "mountPath": "/files"},
    ]);
    let two = &mut spec["containers"][1];
    for (probe, seconds) in [("livenessProbe", 3), ("readinessProbe", 1)] {
        two[probe] = json!({"exec": {"command": [probe]}, "periodSeconds": seconds});
    }
    // Only root can mount.
    let memory = if rustix::process::geteuid().is_root() { json!({"medium": "Memory"}) } else { json!({}) };
    let labels = json!({"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}});
    spec["volumes"] = json!([
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": memory},
        {"name": "files", "downwardAPI": {"items": [labels]}},
    ]);
    pod
}
