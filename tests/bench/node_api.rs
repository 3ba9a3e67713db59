//! What the node API of an agent does for its callers, and what that costs: exec, logs,
//! port-forward, metrics and statistics with a hundred pods, streams that are open and silent.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use coracle::kube::client::{Client, DeleteOptions};
use coracle::kube::target::{GroupVersion, Target};
use coracle::model::api::{Node, Pod};
use serde_json::{Value, json};

use crate::agent::{Agent, READ_ONLY, SECURE};
use crate::process::{cpu_seconds, memory};
use crate::registered::{administrator, is_ready, manifest, node_is_ready};
use crate::results::Results;
use crate::runtime::{LONG, Runtime};
use crate::support::control_plane::ControlPlane;
use crate::support::node::{FOREVER, http_get};
use crate::support::wait::{pause, wait_for, wait_until};

/// What one log, and one forwarded file, holds.
const MIB: u64 = 256;
const LINE: usize = 128;
/// A log that is rotated meanwhile would be another one.
const LOG_SIZE: &str = "2Gi";
/// Pods besides those that are called.
const MANY_PODS: usize = 100;
const STREAMS: usize = 100;
/// Longer than any agent caches statistics.
const SPACED: Duration = Duration::from_millis(1500);

struct Counts {
    execs: usize,
    reads: usize,
    scrapes: usize,
}

/// All measures of one binary.
pub fn measure(
    results: &mut Results,
    subject: &'static str,
    binary: &Path,
    runtime: &Runtime,
    plane: &ControlPlane,
    base: &Path,
    quick: bool,
) {
    let counts = if quick {
        Counts { execs: 5, reads: 1, scrapes: 3 }
    } else {
        Counts { execs: 30, reads: 5, scrapes: 15 }
    };
    let mut node = NodeUnderTest::start(subject, binary, runtime, plane, base);
    node.execs(results, &counts);
    node.logs(results, &counts);
    node.forwards(results, &counts);
    node.streams(results);
    node.scrapes(results, &counts);
    node.agent.stop();
}

struct NodeUnderTest<'a> {
    subject: &'static str,
    agent: Agent,
    plane: &'a ControlPlane,
    admin: Client,
}

/// One call: how long it took, and how many bytes it brought.
#[derive(Debug, Clone, Copy)]
struct Call {
    seconds: f64,
    mib: f64,
}

impl Call {
    fn read(line: &str) -> Call {
        let value: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        let number = |name: &str| value.get(name).and_then(Value::as_f64).expect("a number");
        Call { seconds: number("seconds"), mib: number("bytes") / f64::from(1 << 20) }
    }
}

impl<'a> NodeUnderTest<'a> {
    fn start(
        subject: &'static str,
        binary: &Path,
        runtime: &Runtime,
        plane: &'a ControlPlane,
        base: &Path,
    ) -> NodeUnderTest<'a> {
        let node = format!("{subject}-api");
        let dir = base.join(format!("api-{subject}"));
        let mut agent = Agent::serving(binary, dir, runtime, &node, plane, LOG_SIZE);
        let admin = administrator(plane);
        agent.launch();
        wait_until("the node to be ready", LONG, || {
            admin.get::<Node>(&Target::node(&node)).is_ok_and(|node| node_is_ready(&node))
        });
        agent.wait_healthy();
        NodeUnderTest { subject, agent, plane, admin }
    }

    fn name(&self, what: &str) -> String {
        format!("{}-{what}", self.subject)
    }

    /// Where the API has a container of a pod.
    fn container(&self, what: &str) -> String {
        format!("default/{}/main", self.name(what))
    }

    fn create(&self, what: &str, script: &str, host_network: bool) {
        let mut pod = manifest(&self.name(what), &self.name("api"), host_network);
        if let Some(command) = pod.pointer_mut("/spec/containers/0/command") {
            *command = json!(["sh", "-c", script]);
        }
        let target = Target::new(GroupVersion::Core, "pods").namespace("default");
        let made = self.admin.create::<_, Value>(&target, &pod);
        made.unwrap_or_else(|error| panic!("{what}: {error}"));
    }

    fn wait_ready(&self, what: &str) {
        let target = Target::pod("default", &self.name(what));
        wait_until("a pod to be ready", LONG, || {
            self.admin.get::<Pod>(&target).is_ok_and(|pod| is_ready(&pod))
        });
    }

    fn delete(&self, what: &str) {
        let target = Target::pod("default", &self.name(what));
        self.admin.delete(&target, &DeleteOptions::default()).unwrap_or_else(|error| panic!("{error}"));
        wait_until("a pod to go", LONG, || {
            self.admin.get::<Pod>(&target).is_err_and(|error| error.is_not_found())
        });
    }

    fn caller(&self, verb: &str, args: &[&str]) -> Command {
        let mut command = Command::new(self.plane.bin().join("caller"));
        command.arg(verb).arg("--kubeconfig").arg(self.plane.admin_kubeconfig());
        command.args(["--port", &SECURE.to_string()]).args(args);
        command
    }

    /// Calls, and what each took, and the agent's processor seconds for all.
    fn call(&self, verb: &str, args: &[&str]) -> (Vec<Call>, f64) {
        let before = cpu_seconds(self.agent.pid());
        let output = self.caller(verb, args).output().expect("the caller runs");
        let spent = cpu_seconds(self.agent.pid()) - before;
        let (out, complaint) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{verb} {args:?}: {complaint}{out}");
        (out.lines().map(Call::read).collect(), spent)
    }

    fn execs(&self, results: &mut Results, counts: &Counts) {
        self.create("web", &format!("{} {FOREVER}", web()), false);
        self.wait_ready("web");
        let (count, target) = (counts.execs.to_string(), self.container("web"));
        for (protocol, flag) in [("SPDY", "--websocket=false"), ("WebSocket", "--websocket=true")] {
            // The first one makes connections and caches.
            self.call("exec", &[flag, &target, "true"]);
            let (calls, spent) = self.call("exec", &["--count", &count, flag, &target, "true"]);
            for call in &calls {
                results.put(self.subject, &format!("exec of true, {protocol}"), "ms", call.seconds * 1e3);
            }
            let each = spent * 1e3 / amount(calls.len());
            results.put(self.subject, &format!("exec of true, {protocol}: processor for one"), "ms", each);
        }
    }

    fn logs(&self, results: &mut Results, counts: &Counts) {
        let script = format!(
            "line=$(head -c {} /dev/zero | tr '\\0' x); yes $line | head -c {}; {FOREVER}",
            LINE - 1,
            MIB << 20
        );
        self.create("log", &script, true);
        self.wait_ready("log");
        let grown = || {
            let files = files_below(&self.agent.logs());
            files.into_iter().filter(|(name, _)| name.contains("-log_")).map(|(_, bytes)| bytes).max()
        };
        wait_until("the log to be written", LONG, || grown().is_some_and(|bytes| bytes >= MIB << 20));
        let mut last = None;
        wait_until("the log to be complete", LONG, || {
            pause(Duration::from_millis(500));
            let now = grown();
            std::mem::replace(&mut last, now) == now
        });
        let path = format!("/containerLogs/{}", self.container("log"));
        self.bulk(results, "log", &["--count", &counts.reads.to_string(), &path], "get");
        self.delete("log");
    }

    fn forwards(&self, results: &mut Results, counts: &Counts) {
        let pod = format!("default/{}", self.name("web"));
        let count = counts.reads.to_string();
        self.bulk(results, "port-forward", &["--count", &count, "--path", "/big", &pod, "8080"], "forward");
        let count = counts.execs.to_string();
        let (calls, _) = self.call("forward", &["--count", &count, "--path", "/small", &pod, "8080"]);
        for call in calls {
            results.put(self.subject, "port-forward, a small page", "ms", call.seconds * 1e3);
        }
    }

    /// Calls that bring [`MIB`] each.
    fn bulk(&self, results: &mut Results, what: &str, args: &[&str], verb: &str) {
        let (calls, spent) = self.call(verb, args);
        let whole = f64::from(u32::try_from(MIB).unwrap_or(u32::MAX));
        let mut sum = 0.0;
        for call in calls {
            assert!(call.mib >= whole && call.mib < whole * 1.01, "{what}: {call:?}");
            results.put(self.subject, &format!("{what}, throughput"), "MiB/s", call.mib / call.seconds);
            sum += call.mib;
        }
        results.put(self.subject, &format!("{what}, processor"), "ms/MiB", spent * 1e3 / sum);
    }

    /// Streams that are open and say nothing.
    fn streams(&self, results: &mut Results) {
        pause(Duration::from_secs(5));
        let before = memory(self.agent.pid());
        let count = STREAMS.to_string();
        let target = self.container("web");
        let mut command = self.caller("hold", &["--count", &count, &target, "cat"]);
        let mut held = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the caller runs");
        let mut line = String::new();
        let out = held.stdout.take().expect("its output is piped");
        BufReader::new(out).read_line(&mut line).expect("its output can be read");
        assert!(!line.is_empty(), "the streams did not open: {:?}", held.wait());
        pause(Duration::from_secs(5));
        let during = memory(self.agent.pid());
        let idle = cpu_seconds(self.agent.pid());
        let begun = Instant::now();
        pause(Duration::from_secs(10));
        let idle = (cpu_seconds(self.agent.pid()) - idle) / begun.elapsed().as_secs_f64();
        drop(held.stdin.take());
        wait_for("the streams to end", LONG, || held.try_wait().ok().flatten());
        pause(Duration::from_secs(5));
        let after = memory(self.agent.pid());
        let mut put = |what: &str, unit: &'static str, value: f64| {
            results.put(self.subject, &format!("{STREAMS} idle exec streams: {what}"), unit, value);
        };
        put("resident before", "MiB", before.resident);
        put("resident", "MiB", during.resident);
        put("anonymous before", "MiB", before.anonymous);
        put("anonymous", "MiB", during.anonymous);
        put("resident after", "MiB", after.resident);
        put("threads before", "", before.threads);
        put("threads", "", during.threads);
        put("threads after", "", after.threads);
        put("processor", "%", idle * 100.0);
    }

    fn scrapes(&self, results: &mut Results, counts: &Counts) {
        for number in 0..MANY_PODS {
            self.create(&format!("many-{number}"), FOREVER, true);
        }
        for number in 0..MANY_PODS {
            self.wait_ready(&format!("many-{number}"));
        }
        pause(Duration::from_secs(15));
        let count = counts.scrapes.to_string();
        let spaced = format!("{}ms", SPACED.as_millis());
        for path in ["/metrics", "/stats/summary", "/metrics/resource", "/metrics/cadvisor"] {
            let what = format!("{path}, {MANY_PODS} pods");
            let span = SPACED * u32::try_from(counts.scrapes).unwrap_or(u32::MAX);
            let before = cpu_seconds(self.agent.pid());
            pause(span);
            let idle = cpu_seconds(self.agent.pid()) - before;
            let (calls, spent) = self.call("get", &["--gzip", "--count", &count, "--pause", &spaced, path]);
            for call in &calls {
                results.put(self.subject, &what, "ms", call.seconds * 1e3);
                results.put(self.subject, &format!("{what}: sent"), "KiB", call.mib * 1024.0);
            }
            let each = (spent - idle) * 1e3 / amount(calls.len());
            results.put(self.subject, &format!("{what}: processor for one"), "ms", each);
            let (plain, _) = self.call("get", &[path]);
            for call in plain {
                results.put(self.subject, &format!("{what}: uncompressed"), "KiB", call.mib * 1024.0);
            }
        }
        results.note(self.subject, "the runtime's answers: calls, mean ms", &json!(runtime_operations()));
        let after = memory(self.agent.pid());
        results.put(
            self.subject,
            &format!("resident after all, {} pods", MANY_PODS + 1),
            "MiB",
            after.resident,
        );
        for number in 0..MANY_PODS {
            let target = Target::pod("default", &self.name(&format!("many-{number}")));
            self.admin.delete(&target, &DeleteOptions::default()).unwrap_or_else(|error| panic!("{error}"));
        }
        self.delete("web");
        for number in 0..MANY_PODS {
            let target = Target::pod("default", &self.name(&format!("many-{number}")));
            wait_until("a pod to go", LONG, || {
                self.admin.get::<Pod>(&target).is_err_and(|error| error.is_not_found())
            });
        }
    }
}

/// How often the runtime was asked for numbers, and how long it took.
fn runtime_operations() -> BTreeMap<String, (f64, f64)> {
    let (_, page) = http_get(READ_ONLY, "/metrics").expect("the read-only port answers");
    let value = |name: &str, operation: &str| {
        let series =
            format!("kubelet_runtime_operations_duration_seconds_{name}{{operation_type=\"{operation}\"}} ");
        page.lines().find_map(|line| line.strip_prefix(&series)?.parse::<f64>().ok())
    };
    let operations = ["list_container_stats", "list_podsandbox_stats", "image_fs_info", "list_containers"];
    let found = operations.into_iter().filter_map(|name| {
        let (count, sum) = (value("count", name)?, value("sum", name)?);
        Some((name.to_owned(), (count, sum * 1e3 / count)))
    });
    found.collect()
}

fn amount(count: usize) -> f64 {
    f64::from(u32::try_from(count.max(1)).unwrap_or(u32::MAX))
}

/// A page and a file of [`MIB`], by HTTP.
fn web() -> String {
    format!(
        "mkdir -p /data/www; echo hello > /data/www/small; dd if=/dev/zero of=/data/www/big bs=1M count={MIB}; \
         httpd -p 8080 -h /data/www;"
    )
}

/// Files and their sizes.
fn files_below(dir: &Path) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.metadata() {
            Ok(data) if data.is_dir() => found.extend(files_below(&path)),
            Ok(data) => found.push((path.display().to_string(), data.len())),
            Err(_) => {}
        }
    }
    found
}
