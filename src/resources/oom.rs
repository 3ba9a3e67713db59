//! Kills of processes because memory ran out, from the kernel's log (pure; Go: pkg/kubelet/oom,
//! cadvisor utils/oomparser).
//!
//! Each read from `/dev/kmsg` gives one record (kernel: Documentation/ABI/testing/dev-kmsg). A kill
//! is several records, between which others may come: `invoked oom-killer:`, then, since kernel 5.0,
//! `oom-kill:constraint=…`, or before it `Task in … killed as a result of limit of …`, and
//! `Killed process …`. The names of processes and of nested cgroups in them are chosen by
//! containers, so that no part of a record is searched for at any place: each line is read from
//! both ends.

use std::borrow::Cow;
use std::collections::VecDeque;

use crate::model::ids::PodUid;

/// The most bytes of one record that are read; the kernel's records are smaller.
pub(crate) const RECORD_LIMIT: usize = 8192;

/// The longest name of a process.
const NAME_LIMIT: usize = 15;

/// An invocation without a kill is forgotten after this time, and a kill that was reported is not
/// reported again within it, in microseconds.
const SPAN: u64 = 60_000_000;

/// The most kills that are remembered.
const REPORTED: usize = 64;

/// One record of the kernel's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record<'a> {
    /// Microseconds since the boot, without the time in which the machine slept.
    pub time: u64,
    /// The first line, with escaped bytes as they were written.
    pub message: Cow<'a, str>,
}

/// Splits what one read returned. `None`: it is no record of the kernel. Records that processes
/// wrote have another facility, which the kernel enforces.
///
/// DIFFERS: upstream accepts those, too, so that a process that may write to `/dev/kmsg` can invent
/// kills.
#[must_use]
pub(crate) fn record(bytes: &[u8]) -> Option<Record<'_>> {
    let bytes = bytes.get(..RECORD_LIMIT).unwrap_or(bytes);
    let end = bytes.iter().position(|byte| *byte == b';')?;
    let (head, rest) = bytes.split_at(end);
    let mut fields = head.split(|byte| *byte == b',');
    let priority: u32 = number(fields.next()?)?;
    let _sequence: u64 = number(fields.next()?)?;
    let time = number(fields.next()?)?;
    let line = rest.get(1..)?.split(|byte| *byte == b'\n').next().unwrap_or_default();
    (priority < 8).then(|| Record { time, message: unescaped(String::from_utf8_lossy(line)) })
}

fn number<T: std::str::FromStr>(text: &[u8]) -> Option<T> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// The kernel writes bytes that are not printable, and backslashes, as `\x5c`.
fn unescaped(line: Cow<'_, str>) -> Cow<'_, str> {
    if !line.contains("\\x") {
        return line;
    }
    let mut bytes = Vec::with_capacity(line.len());
    let mut rest = line.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..3).and_then(|code| code.strip_prefix(b"x"));
        let byte = code
            .filter(|_| *first == b'\\')
            .and_then(|code| u8::from_str_radix(std::str::from_utf8(code).ok()?, 16).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = after.get(if byte.is_some() { 3 } else { 0 }..).unwrap_or_default();
    }
    Cow::Owned(String::from_utf8_lossy(&bytes).into_owned())
}

/// Which memory ran out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Scope {
    /// That of the machine.
    System,
    /// The limit of a cgroup, with its path if the kernel printed it.
    Cgroup(Option<String>),
}

/// A killed process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OomKill {
    /// When, as in [`Record::time`].
    pub time: u64,
    /// The name of the process.
    pub process: String,
    /// Its process id.
    pub pid: u32,
    /// Which memory ran out.
    pub scope: Scope,
    /// The cgroup of the process, if the kernel printed it (since 5.0, before that only for the
    /// limit of a cgroup).
    pub cgroup: Option<String>,
}

impl OomKill {
    /// The message of the event `SystemOOM` on the node, which is raised only for [`Scope::System`].
    ///
    /// DIFFERS: `pod` (namespace and name), if it is known, is added to upstream's message.
    #[must_use]
    pub(crate) fn message(&self, pod: Option<&str>) -> String {
        let pod = pod.map(|pod| format!(", pod: {pod}")).unwrap_or_default();
        format!("System OOM encountered, victim process: {}, pid: {}{pod}", self.process, self.pid)
    }

    /// The container or pod of the process.
    #[must_use]
    pub(crate) fn owner(&self) -> Option<Owner> {
        owner(self.cgroup.as_deref()?)
    }
}

/// The kernel's names of the memory that ran out.
const OF_CGROUP: &str = "Memory cgroup out of memory";
const OF_MACHINE: &str = "Out of memory";
/// What kernels before 5.0 print before the kill.
const INTENDED: &str = ": Kill process ";

/// An invocation whose victim is not known yet.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Invocation {
    since: u64,
    scope: Scope,
    cgroup: Option<String>,
}

/// Finds kills in the records, in their order. Its memory is a few strings.
#[derive(Debug, Clone, Default)]
pub(crate) struct Parser {
    open: Option<Invocation>,
    /// The last kills: each has several records, and on version 2 a group of processes is killed
    /// together.
    reported: VecDeque<(u32, u64)>,
}

impl Parser {
    /// Reads one record.
    pub(crate) fn read(&mut self, bytes: &[u8]) -> Option<OomKill> {
        let Record { time, message } = record(bytes)?;
        if self.open.as_ref().is_some_and(|open| time.saturating_sub(open.since) > SPAN) {
            self.open = None;
        }
        if is_invocation(&message) {
            self.open = Some(Invocation { since: time, scope: Scope::System, cgroup: None });
            return None;
        }
        if let Some(kill) = summary(&message, time) {
            self.open = None;
            return self.report_once(kill);
        }
        if let Some((cgroup, limited)) = legacy(&message) {
            self.open =
                Some(Invocation { since: time, scope: Scope::Cgroup(Some(limited)), cgroup: Some(cgroup) });
            return None;
        }
        let (scope, rest) = scope_of(&message);
        // DIFFERS: the kernel limits how often it prints the other records, and upstream finds no
        // kill without them.
        let (scope, cgroup) = match (&self.open, scope) {
            (Some(Invocation { scope: Scope::System, .. }) | None, Some(scope)) => (scope, None),
            (Some(open), _) => (open.scope.clone(), open.cgroup.clone()),
            (None, None) => return None,
        };
        if rest.starts_with(INTENDED) {
            self.open = Some(Invocation { since: time, scope, cgroup });
            return None;
        }
        let (pid, process) = killed(rest.strip_prefix(": ").unwrap_or(rest))?;
        self.open = None;
        self.report_once(OomKill { time, process, pid, scope, cgroup })
    }

    fn report_once(&mut self, kill: OomKill) -> Option<OomKill> {
        self.reported.retain(|(_, time)| kill.time.saturating_sub(*time) <= SPAN);
        if self.reported.iter().any(|(pid, _)| *pid == kill.pid) {
            return None;
        }
        if self.reported.len() >= REPORTED {
            self.reported.pop_front();
        }
        self.reported.push_back((kill.pid, kill.time));
        Some(kill)
    }
}

/// `NAME invoked oom-killer: gfp_mask=…`
fn is_invocation(message: &str) -> bool {
    let position = message.find(" invoked oom-killer:");
    position.is_some_and(|position| position <= NAME_LIMIT)
}

/// `oom-kill:constraint=C,nodemask=…,cpuset=NAME,mems_allowed=…[,global_oom|,oom_memcg=A],task_memcg=B,task=NAME,pid=N,uid=N`
/// (kernel: mm/oom_kill.c `dump_oom_summary`, mm/memcontrol.c `mem_cgroup_print_oom_context`).
fn summary(message: &str, time: u64) -> Option<OomKill> {
    let rest = message.strip_prefix("oom-kill:constraint=")?;
    let (constraint, rest) = rest.split_once(',')?;
    let (rest, uid) = rest.rsplit_once(",uid=")?;
    let (rest, pid) = rest.rsplit_once(",pid=")?;
    uid.parse::<u32>().ok()?;
    let pid = pid.parse().ok()?;
    // The name may contain anything, but it is short.
    const TASK: &str = ",task=";
    let (at_task, _) =
        rest.match_indices(TASK).find(|(offset, _)| rest.len() - offset - TASK.len() <= NAME_LIMIT)?;
    let (rest, process) = rest.split_at(at_task);
    let process = process.get(TASK.len()..)?.to_owned();
    // DIFFERS: upstream decides by the field `oom_memcg`, which a nested cgroup can contain in its
    // name. The constraint comes first.
    let (scope, cgroup) = if constraint == "CONSTRAINT_MEMCG" {
        let (limited, cgroup) = limited(rest)?;
        (Scope::Cgroup(Some(limited.to_owned())), cgroup)
    } else {
        (Scope::System, path_after(rest, ",global_oom,task_memcg=")?)
    };
    Some(OomKill { time, process, pid, scope, cgroup: Some(cgroup.to_owned()) })
}

/// The path behind a field. Before the first path is only the name of one cgroup, which contains no
/// slash, so the first occurrence is the kernel's.
fn path_after<'a>(text: &'a str, field: &str) -> Option<&'a str> {
    let mut found = text.match_indices(field).filter_map(|(offset, _)| text.get(offset + field.len()..));
    found.find(|path| path.starts_with('/'))
}

/// The cgroup whose limit was reached and the cgroup of the process, which is the same or below.
fn limited(rest: &str) -> Option<(&str, &str)> {
    split_below(path_after(rest, ",oom_memcg=")?, ",task_memcg=", |limited, task| is_below(task, limited))
}

/// `Task in B killed as a result of limit of A`, before kernel 5.0.
fn legacy(message: &str) -> Option<(String, String)> {
    let rest = message.strip_prefix("Task in ")?;
    let (task, limited) = split_below(rest, " killed as a result of limit of ", is_below)?;
    Some((task.to_owned(), limited.to_owned()))
}

/// Splits at the occurrence of `separator` where the parts fit, as names of cgroups may contain it.
fn split_below<'a>(
    text: &'a str,
    separator: &str,
    fit: impl Fn(&str, &str) -> bool,
) -> Option<(&'a str, &'a str)> {
    let mut splits = text.match_indices(separator).filter_map(|(offset, _)| {
        let (left, right) = text.split_at(offset);
        Some((left, right.get(separator.len()..)?))
    });
    splits.find(|(left, right)| fit(left, right))
}

fn is_below(path: &str, above: &str) -> bool {
    let rest = path.strip_prefix(above.trim_end_matches('/'));
    above.starts_with('/') && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The memory that ran out, if the line begins with it, and the rest of the line.
fn scope_of(message: &str) -> (Option<Scope>, &str) {
    if let Some(rest) = message.strip_prefix(OF_CGROUP) {
        return (Some(Scope::Cgroup(None)), rest);
    }
    match message.strip_prefix(OF_MACHINE) {
        // `oom_kill_allocating_task`
        Some(rest) => (Some(Scope::System), rest.strip_prefix(" (oom_kill_allocating_task)").unwrap_or(rest)),
        None => (None, message),
    }
}

/// `Killed process N (NAME) total-vm:…`
fn killed(text: &str) -> Option<(u32, String)> {
    let rest = text.strip_prefix("Killed process ")?;
    let (pid, rest) = rest.split_once(' ')?;
    // Some distributions: `Killed process N, UID N, (NAME) …`, `Killed process N (NAME), UID N, …`.
    let pid = pid.trim_end_matches(',').parse().ok()?;
    let (_, rest) = rest.split_once('(')?;
    let (name, _) = rest.rsplit_once(") total-vm:").or_else(|| rest.rsplit_once(')'))?;
    Some((pid, name.chars().take(NAME_LIMIT).collect()))
}

/// A pod and a container, as the path of a cgroup shows them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Owner {
    /// The UID, with `_` in the place of `-` if the driver is systemd.
    pub uid: String,
    /// The id of the container or sandbox; `None` in the pod's own cgroup.
    pub container: Option<String>,
}

impl Owner {
    /// Whether this is the pod with this UID.
    #[must_use]
    pub(crate) fn is(&self, uid: &PodUid) -> bool {
        let same = |a: char, b: char| a == b || (a == '_' && b == '-');
        let other = uid.as_str();
        self.uid.chars().count() == other.chars().count()
            && self.uid.chars().zip(other.chars()).all(|(a, b)| same(a, b))
    }
}

/// The pod of a cgroup: `…/kubepods/burstable/podUID/ID/…` or
/// `…/kubepods.slice/…/kubepods-burstable-podUID.slice/RUNTIME-ID.scope/…`. What containers make
/// below their own cgroup is not read.
#[must_use]
pub(crate) fn owner(path: &str) -> Option<Owner> {
    let mut parts = path.split('/').filter(|part| !part.is_empty());
    parts.find(|part| *part == "kubepods" || *part == "kubepods.slice")?;
    // Below are at most the tier and the pod.
    let uid = parts.by_ref().take(2).find_map(|part| match part.strip_suffix(".slice") {
        Some(slice) => slice.strip_prefix("kubepods-").and_then(|rest| {
            let rest = rest.strip_prefix("burstable-").or(rest.strip_prefix("besteffort-")).unwrap_or(rest);
            rest.strip_prefix("pod")
        }),
        None => part.strip_prefix("pod"),
    })?;
    let container = parts.next().map(|part| {
        let name = part.strip_suffix(".scope").unwrap_or(part);
        name.rsplit(['-', ':']).next().unwrap_or(name).to_owned()
    });
    (!uid.is_empty()).then(|| Owner { uid: uid.to_owned(), container: container.filter(|id| !id.is_empty()) })
}

#[cfg(test)]
mod tests;
