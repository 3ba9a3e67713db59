//! Hostile records of the kernel's log.

use super::oom::{Parser, RECORD_LIMIT};
use crate::util::fuzzing::{Budget, Target, repeated};
use crate::util::threads::Stack;

pub(crate) fn targets() -> Vec<Target> {
    vec![Target {
        name: "resources/kmsg",
        stack: Stack::Small,
        max_bytes: 1 << 20,
        budget: Budget::LINEAR,
        worst: |max| {
            let lines = |line: &str| repeated("", |i| format!("4,{i},{i},-;{line}\0"), "", max);
            let fields = |before: &str, piece: &str| {
                let room = RECORD_LIMIT - before.len() - 100;
                let line = format!("{before}{}", piece.repeat(room / piece.len()));
                repeated("", |i| format!("4,{i},{i},-;{line}\0"), "", max)
            };
            vec![
                ("invocations", lines("a invoked oom-killer: gfp_mask=0")),
                ("kills", repeated("", |i| format!("4,{i},{i},-;Out of memory: Killed process {i} (a) total-vm:1kB\0"), "", max)),
                ("paths in paths", fields("oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/a", ",task_memcg=/a")),
                ("limits in limits", fields("oom-kill:constraint=CONSTRAINT_MEMCG", ",oom_memcg=/")),
                ("tasks in tasks", fields("oom-kill:constraint=CONSTRAINT_NONE", ",task=,pid=1,uid=1")),
                ("old paths in paths", fields("Task in /a", " killed as a result of limit of /a")),
                ("escapes", fields("", "\\x5c")),
                ("parentheses", fields("Killed process 1 (", ") total-vm:")),
                ("one record", b"4,1,1,-;".iter().copied().chain(std::iter::repeat_n(b'x', max - 8)).collect()),
            ]
        },
        seeds: &[
            b"4,1,5,-;a invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n\x006,2,6,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c,mems_allowed=0,oom_memcg=/kubepods/podx,task_memcg=/kubepods/podx/c,task=a,pid=7,uid=0\n\x003,3,7,c,caller=T1;Memory cgroup out of memory: Killed process 7 (a) total-vm:1kB, anon-rss:1kB\n",
            b"6,1,5,-;Task in /kubepods/podx killed as a result of limit of /kubepods\n\x006,1,5,-;Killed process 7 (a) total-vm:1kB\n",
            b"6,1,5,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/kubepods.slice/kubepods-podx.slice/crio-c.scope,task=a\\x5cb,pid=7,uid=0\n SUBSYSTEM=x\n",
        ],
        run: |bytes| {
            let mut parser = Parser::default();
            for record in bytes.split(|byte| *byte == 0) {
                if let Some(kill) = parser.read(record) {
                    let _ = (kill.owner(), kill.message(Some("ns/name")));
                }
            }
        },
    }]
}
