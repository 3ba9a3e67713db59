//! What an agent writes to the disk, and what it makes the runtime write: with no pods, with 30
//! pods, and with one pod in CrashLoopBackOff. Everything that stays on a node's disk is on an ext4
//! file system of its own, so that the kernel's counters show all writes, those of the journal
//! included. What a node has in `/run` or in its journal is not there: the state of the runtime, and
//! the logs of both daemons.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::agent::{Agent, full_name, manifest};
use crate::process;
use crate::results::{BARE, Results};
use crate::runtime::{LONG, Runtime};
use crate::support::manifest::restarts as restart_count;
use crate::support::wait::{pause, wait_until};

/// Pods of the second part.
const MANY: usize = 30;
/// The longest back-off of the third part. With the default of five minutes a container restarts
/// twelve times in an hour.
const BACK_OFF: u64 = 10;
const RESTARTS_PER_HOUR: f64 = 12.0;
/// The last lists, statuses and clean-ups of what went before.
const SETTLE: Duration = Duration::from_secs(40);

/// System calls that change a file or its name, or write it out.
const CALLS: &str = "open,openat,creat,mkdir,mkdirat,symlink,symlinkat,link,linkat,rename,renameat,renameat2,\
unlink,unlinkat,rmdir,ftruncate,fsync,fdatasync,syncfs,sync_file_range,msync";

/// The file system, unmounted when the namespace ends.
pub struct MeasuredDisk {
    top: PathBuf,
    /// Such as `loop0`.
    device: String,
}

impl MeasuredDisk {
    pub fn make(base: &Path) -> MeasuredDisk {
        let (top, image) = (base.join("disk"), base.join("disk.img"));
        fs::create_dir_all(&top).expect("a directory");
        fs::File::create(&image).and_then(|file| file.set_len(3 << 30)).expect("an image");
        run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image));
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&top));
        let mounts = fs::read_to_string("/proc/self/mounts").expect("the mounts");
        let place = top.display().to_string();
        let device = mounts.lines().find(|line| line.split(' ').nth(1) == Some(&*place));
        let device = device.and_then(|line| line.split(' ').next()?.strip_prefix("/dev/"));
        MeasuredDisk { device: device.expect("a loop device").to_owned(), top }
    }

    /// The directory of a containerd, prepared: its state and its log are elsewhere.
    pub fn runtime_dir(&self, base: &Path) -> PathBuf {
        let dir = self.top.join("bench");
        fs::create_dir_all(dir.join("cd/state")).expect("a directory");
        run(Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(dir.join("cd/state")));
        symlink(base.join("containerd.log"), dir.join("cd/containerd.log")).expect("a link");
        dir
    }

    /// Bytes that the device has received, after everything was written out.
    fn written(&self) -> f64 {
        let top = fs::File::open(&self.top).expect("the file system");
        rustix::fs::syncfs(top.as_fd()).expect("it can be synced");
        let stat = fs::read_to_string(format!("/sys/block/{}/stat", self.device)).unwrap_or_default();
        let sectors = stat.split_whitespace().nth(6).and_then(|text| text.parse::<f64>().ok());
        sectors.unwrap_or(f64::NAN) * 512.0
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// `write_bytes` of `/proc/PID/io`: bytes that the process made the kernel write to a disk.
fn write_bytes(pid: u32) -> f64 {
    let text = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    line.and_then(|text| text.trim().parse().ok()).unwrap_or(f64::NAN)
}

/// strace, attached to all threads of a process.
struct Trace {
    child: Child,
    file: PathBuf,
}

impl Trace {
    fn attach(pid: u32, file: PathBuf) -> Trace {
        let mut command = Command::new("strace");
        command.args(["-f", "-y", "-e", &format!("trace={CALLS}"), "-o"]).arg(&file);
        command.args(["-p", &pid.to_string()]).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().expect("strace starts");
        wait_until("strace to be attached", LONG, || {
            let traced = |task: &fs::DirEntry| {
                let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
                status.lines().any(|line| line.starts_with("TracerPid:") && !line.ends_with("\t0"))
            };
            fs::read_dir(format!("/proc/{pid}/task"))
                .is_ok_and(|tasks| tasks.flatten().all(|task| traced(&task)))
        });
        Trace { child, file }
    }

    fn end(mut self) -> Changes {
        process::signal(self.child.id(), Signal::INT);
        let _ = self.child.wait();
        Changes::parse(&fs::read_to_string(&self.file).unwrap_or_default())
    }
}

/// What the system calls of a process changed.
#[derive(Debug, Default)]
struct Changes {
    /// Files that were created, opened for writing, renamed or removed; directories and links, too.
    files: f64,
    syncs: f64,
    /// How often by call and path, in which numbers and ids are cut short.
    by_path: BTreeMap<String, usize>,
}

impl Changes {
    fn parse(text: &str) -> Changes {
        let mut changes = Changes::default();
        let mut begun: BTreeMap<&str, String> = BTreeMap::new();
        for line in text.lines() {
            let Some((thread, call)) = line.split_once(' ') else { continue };
            let call = call.trim();
            if let Some((head, _)) = call.split_once(" <unfinished ...>") {
                begun.insert(thread, head.to_owned());
                continue;
            }
            let resumed = call.split_once(" resumed>").map(|(_, rest)| rest);
            match resumed {
                Some(rest) => {
                    let whole = begun.remove(thread).unwrap_or_default() + rest;
                    changes.count(&whole);
                }
                None => changes.count(call),
            }
        }
        changes
    }

    fn count(&mut self, call: &str) {
        let Some((name, rest)) = call.split_once('(') else { return };
        let succeeded = call.rsplit_once(" = ").is_some_and(|(_, result)| !result.starts_with('-'));
        let is_sync = name.contains("sync");
        let opens = name.starts_with("open");
        let writes = ["O_WRONLY", "O_RDWR", "O_CREAT"].iter().any(|flag| rest.contains(flag));
        // With -y a descriptor has its path: `openat(3</dir>, "name", …)`, `fsync(4</dir/file>)`.
        let directory = rest.split(['<', '>']).nth(1).unwrap_or_default();
        let path = match rest.split('"').nth(1) {
            Some(absolute) if absolute.starts_with('/') => absolute.to_owned(),
            Some(name) => format!("{directory}/{name}"),
            None => directory.to_owned(),
        };
        // The kernel's own file systems, and what is in memory on a node.
        let elsewhere = ["/proc", "/sys", "/dev", "/run"].iter().any(|top| path.starts_with(top));
        if !succeeded || (opens && !writes) || elsewhere || path.contains("/cd/state") {
            return;
        }
        *(if is_sync { &mut self.syncs } else { &mut self.files }) += 1.0;
        *self.by_path.entry(format!("{name} {}", short(&path))).or_default() += 1;
    }
}

/// A path without ids.
fn short(path: &str) -> String {
    let is_id = |word: &str| word.len() >= 8 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let word = |word: &str| if is_id(word) { "ID".to_owned() } else { word.to_owned() };
    let part = |part: &str| part.split(['-', '.']).map(word).collect::<Vec<_>>().join("-");
    path.split('/').map(part).collect::<Vec<_>>().join("/")
}

/// One part of the measurement, and where its figures go.
struct Part<'a> {
    subject: &'static str,
    name: &'a str,
    disk: &'a MeasuredDisk,
    base: &'a Path,
    runtime_pid: u32,
}

impl Part<'_> {
    /// Measures for `span`; `per` turns the values into those of an hour.
    fn measure(
        &self,
        results: &mut Results,
        agent: Option<&Agent>,
        span: Duration,
        per: &dyn Fn(Duration) -> f64,
    ) {
        let trace = |pid: u32, process: &str| {
            Trace::attach(pid, self.base.join(format!("{}-{process}.trace", self.name)))
        };
        let own = agent.map(|agent| trace(agent.pid(), "agent"));
        let runtime = trace(self.runtime_pid, "runtime");
        let meter = || {
            // First: reading the link to the log changes its time of access.
            let own = agent.map(|agent| (write_bytes(agent.pid()), agent.log_bytes()));
            (self.disk.written(), write_bytes(self.runtime_pid), own)
        };
        let (begun, before) = (Instant::now(), meter());
        pause(span);
        let (took, after) = (begun.elapsed(), meter());
        let factor = per(took);
        let mut put = |what: &str, unit: &'static str, value: f64| {
            results.put(self.subject, &format!("{}: {what}", self.name), unit, value * factor);
        };
        put("bytes on the device", "B/h", after.0 - before.0);
        put("bytes written by the runtime", "B/h", after.1 - before.1);
        let caused = runtime.end();
        put("syncs of the runtime", "1/h", caused.syncs);
        let mut notes = vec![("calls of the runtime", caused.by_path)];
        if let (Some(own), Some(before), Some(after)) = (own, before.2, after.2) {
            put("bytes written by the agent", "B/h", after.0 - before.0);
            put("bytes logged by the agent", "B/h", after.1 - before.1);
            let changes = own.end();
            put("files changed by the agent", "1/h", changes.files);
            put("syncs of the agent", "1/h", changes.syncs);
            notes.push(("calls of the agent", changes.by_path));
        }
        for (what, calls) in notes {
            results.note(
                self.subject,
                &format!("{}, {what} in {:.0} s", self.name, took.as_secs_f64()),
                &json!(calls),
            );
        }
    }
}

/// An hour of a part in which nothing happens.
fn an_hour(took: Duration) -> f64 {
    3600.0 / took.as_secs_f64()
}

fn runtime_pid(dir: &Path) -> u32 {
    let text = fs::read_to_string(dir.join("cd/containerd.pid")).expect("the runtime's pid");
    text.trim().parse().expect("a number")
}

/// The runtime without an agent.
pub fn runtime_alone(results: &mut Results, disk: &MeasuredDisk, dir: &Path, base: &Path, span: Duration) {
    pause(SETTLE);
    let part = Part { subject: BARE, name: "no pods", disk, base, runtime_pid: runtime_pid(dir) };
    part.measure(results, None, span, &an_hour);
}

/// All parts with one agent.
pub fn measure(
    results: &mut Results,
    subject: &'static str,
    binary: &Path,
    runtime: &Runtime,
    (disk, dir, base): (&MeasuredDisk, &Path, &Path),
    span: Duration,
) {
    let extra = json!({"crashLoopBackOff": {"maxContainerRestartPeriod": format!("{BACK_OFF}s")}});
    let agent_dir = disk.top.join(subject);
    let mut agent = Agent::configured(binary, agent_dir.clone(), runtime, extra);
    symlink(base.join(format!("{subject}.log")), agent_dir.join("agent-1.log")).expect("a link");
    agent.launch();
    agent.wait_healthy();
    let runtime_pid = runtime_pid(dir);
    let part = |name| Part { subject, name, disk, base, runtime_pid };
    pause(SETTLE);
    part("no pods").measure(results, Some(&agent), span, &an_hour);
    let names: Vec<String> = (0..MANY).map(|number| format!("many-{number}")).collect();
    agent.apply(&names);
    wait_until("all pods to be known as running", LONG, || agent.known_running() == MANY);
    pause(SETTLE);
    part("30 pods").measure(results, Some(&agent), span, &an_hour);
    agent.withdraw(&names);
    runtime.wait_empty();
    agent.wait_no_pods();
    agent.apply_manifest("crash", &crashing());
    wait_until("a second restart", LONG, || restarts(&agent) >= 2);
    let before = restarts(&agent);
    let per = |_: Duration| {
        let restarts = restarts(&agent) - before;
        eprintln!("==> {subject}: {restarts} restarts");
        RESTARTS_PER_HOUR / f64::from(restarts.max(1))
    };
    part("a pod in CrashLoopBackOff").measure(
        results,
        Some(&agent),
        span.min(Duration::from_secs(122)),
        &per,
    );
    if subject == crate::results::CORACLE {
        results.note(subject, "its own count", &json!(agent.disk_metrics()));
    }
    agent.withdraw(&["crash".to_owned()]);
    runtime.wait_empty();
    agent.stop();
}

fn crashing() -> Value {
    let mut pod = manifest("crash");
    pod["spec"]["containers"][0]["command"] = json!(["sh", "-c", "echo failed; exit 1"]);
    pod
}

fn restarts(agent: &Agent) -> i32 {
    let pods = agent.pods().unwrap_or_default();
    let pod = pods.iter().find(|pod| pod.metadata.name.as_deref() == Some(&full_name("crash")));
    pod.map_or(0, |pod| restart_count(pod, "main"))
}
