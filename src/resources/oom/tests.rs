//! The texts of kernels of both versions of cgroups, old and new, and hostile names in them.

use proptest::prelude::*;

use super::*;

const UID: &str = "3b9c0f5e-7c1d-4a2b-9e8f-0123456789ab";
const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// Records of the kernel, a millisecond apart.
fn records(lines: &[&str]) -> Vec<Vec<u8>> {
    let record = |(number, line): (usize, &&str)| {
        format!("{},{},{},-;{line}\n", 3 + number % 4, 1000 + number, 5_000_000 + 1000 * number).into_bytes()
    };
    lines.iter().enumerate().map(record).collect()
}

fn kills(lines: &[&str]) -> Vec<OomKill> {
    let mut parser = Parser::default();
    records(lines).iter().filter_map(|record| parser.read(record)).collect()
}

/// Process, pid, scope and cgroup of the only kill.
fn check(lines: &[&str], process: &str, pid: u32, scope: Scope, cgroup: Option<&str>) {
    let found = kills(lines);
    let [kill] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!((kill.process.as_str(), kill.pid), (process, pid));
    assert_eq!((&kill.scope, kill.cgroup.as_deref()), (&scope, cgroup));
}

fn cgroup_scope(path: &str) -> Scope {
    Scope::Cgroup(Some(path.to_owned()))
}

#[test]
fn limit_of_a_pod_on_version_2_with_a_new_kernel() {
    let pod = format!(
        "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice",
        UID.replace('-', "_")
    );
    let container = format!("{pod}/cri-containerd-{ID}.scope");
    let summary = format!(
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=cri-containerd-{ID}.scope,mems_allowed=0,oom_memcg={pod},task_memcg={container},task=stress,pid=41231,uid=0"
    );
    check(
        &[
            "stress invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=997",
            "CPU: 1 UID: 0 PID: 41231 Comm: stress Not tainted 6.12.9-amd64 #1  Debian 6.12.9-1",
            "Call Trace:",
            " <TASK>",
            " dump_stack_lvl+0x5d/0x80",
            "memory: usage 102400kB, limit 102400kB, failcnt 83",
            "Memory cgroup stats for /kubepods.slice/kubepods-burstable.slice:",
            "Tasks state (memory values in pages):",
            "[  pid  ]   uid  tgid total_vm      rss rss_anon rss_file rss_shmem pgtables_bytes swapents oom_score_adj name",
            "[  41231]     0 41231    52343    25087    25044       43         0   253952        0           997 stress",
            &summary,
            "Memory cgroup out of memory: Killed process 41231 (stress) total-vm:209372kB, anon-rss:100176kB, file-rss:172kB, shmem-rss:0kB, UID:0 pgtables:248kB oom_score_adj:997",
            "oom_reaper: reaped process 41231 (stress), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
        ],
        "stress",
        41231,
        cgroup_scope(&pod),
        Some(&container),
    );
    let owner = owner(&container).unwrap();
    assert!(owner.is(&PodUid::from(UID)));
    assert_eq!(owner.container.as_deref(), Some(ID));
}

#[test]
fn limit_of_a_container_on_version_1_with_an_old_kernel() {
    let container = format!("/kubepods/burstable/pod{UID}/{ID}");
    let legacy = format!("Task in {container} killed as a result of limit of {container}");
    let lines = |kill: &'static str| {
        vec![
            "python3 invoked oom-killer: gfp_mask=0x14000c0(GFP_KERNEL), nodemask=(null),  order=0, oom_score_adj=969",
            "python3 cpuset=0123 mems_allowed=0",
            "CPU: 0 PID: 991 Comm: python3 Not tainted 4.19.0-27-amd64 #1 Debian 4.19.316-1",
            "LEGACY",
            "memory: usage 51200kB, limit 51200kB, failcnt 12",
            "Memory cgroup out of memory: Kill process 991 (python3) score 1958 or sacrifice child",
            kill,
        ]
    };
    for kill in [
        "Killed process 991 (python3) total-vm:72280kB, anon-rss:49512kB, file-rss:5628kB, shmem-rss:0kB",
        "Killed process 991 (python3), UID 0, total-vm:72280kB, anon-rss:49512kB, file-rss:5628kB",
        "Killed process 991, UID 0, (python3) total-vm:72280kB, anon-rss:49512kB, file-rss:5628kB",
    ] {
        let lines: Vec<&str> = lines(kill)
            .into_iter()
            .map(|line| if line == "LEGACY" { legacy.as_str() } else { line })
            .collect();
        check(&lines, "python3", 991, cgroup_scope(&container), Some(&container));
    }
}

#[test]
fn the_machine_runs_out_of_memory_with_a_new_kernel() {
    let container = format!("/kubepods/besteffort/pod{UID}/{ID}");
    let summary = format!(
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg={container},task=tail,pid=2718,uid=65534"
    );
    let lines = [
        "systemd-journal invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0, oom_score_adj=-250",
        "Mem-Info:",
        &summary,
        "Out of memory: Killed process 2718 (tail) total-vm:8391520kB, anon-rss:8388672kB, file-rss:1024kB, shmem-rss:0kB, UID:65534 pgtables:16452kB oom_score_adj:1000",
    ];
    check(&lines, "tail", 2718, Scope::System, Some(&container));
    let kill = kills(&lines).remove(0);
    assert_eq!(kill.message(None), "System OOM encountered, victim process: tail, pid: 2718");
    assert_eq!(
        kill.message(Some("default/web")),
        "System OOM encountered, victim process: tail, pid: 2718, pod: default/web"
    );
    assert!(kill.owner().unwrap().is(&PodUid::from(UID)));
    assert_eq!(kill.time, 5_002_000);
}

#[test]
fn the_machine_runs_out_of_memory_with_an_old_kernel() {
    check(
        &[
            "java invoked oom-killer: gfp_mask=0x201da, order=0, oom_score_adj=0",
            "java cpuset=/ mems_allowed=0",
            "Out of memory: Kill process 7001 (java) score 893 or sacrifice child",
            "Killed process 7001 (java) total-vm:8210512kB, anon-rss:7120080kB, file-rss:0kB",
        ],
        "java",
        7001,
        Scope::System,
        None,
    );
}

/// The kernel prints the other records ten times in five seconds at most.
#[test]
fn a_kill_without_the_other_records_is_found() {
    let kill = "Killed process 12 (a) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0";
    check(&[&format!("Out of memory: {kill}")], "a", 12, Scope::System, None);
    check(&[&format!("Out of memory (oom_kill_allocating_task): {kill}")], "a", 12, Scope::System, None);
    check(&[&format!("Memory cgroup out of memory: {kill}")], "a", 12, Scope::Cgroup(None), None);
    assert_eq!(kills(&[kill]), [], "an old kernel does not say which memory");
    // The summary is missing.
    let invoked = "b invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0";
    check(&[invoked, &format!("Memory cgroup out of memory: {kill}")], "a", 12, Scope::Cgroup(None), None);
}

#[test]
fn each_process_of_a_group_is_reported_once() {
    let pod = format!("/kubepods/burstable/pod{UID}");
    let summary = format!(
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c,mems_allowed=0,oom_memcg={pod},task_memcg={pod}/{ID},task=sh,pid=100,uid=0"
    );
    let killed = |pid: u32| {
        format!(
            "Memory cgroup out of memory: Killed process {pid} (sh) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0"
        )
    };
    let group = format!("Tasks in {pod}/{ID} are going to be killed due to memory.oom.group set");
    let found = kills(&[
        "sh invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        &summary,
        &killed(100),
        &group,
        &killed(101),
        &killed(100),
        &killed(102),
    ]);
    assert_eq!(found.iter().map(|kill| kill.pid).collect::<Vec<_>>(), [100, 101, 102]);
    assert!(found.iter().all(|kill| kill.scope != Scope::System));
}

#[test]
fn kills_that_are_interleaved_are_separate() {
    let summary = |pid: u32| {
        format!(
            "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0-1,global_oom,task_memcg=/a,task=x,pid={pid},uid=0"
        )
    };
    let found = kills(&[
        "x invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "usb 1-1: new high-speed USB device number 2 using xhci_hcd",
        "y invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        &summary(1),
        &summary(2),
    ]);
    assert_eq!(found.iter().map(|kill| kill.pid).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn an_old_invocation_is_forgotten() {
    let mut parser = Parser::default();
    let read = |parser: &mut Parser, seconds: u64, line: &str| {
        parser.read(format!("4,1,{},-;{line}\n", seconds * 1_000_000).as_bytes())
    };
    let killed = "Killed process 1 (a) total-vm:1kB, anon-rss:1kB, file-rss:0kB";
    read(&mut parser, 10, "a invoked oom-killer: gfp_mask=0x201da, order=0, oom_score_adj=0");
    assert_eq!(read(&mut parser, 71, killed), None);
    read(&mut parser, 80, "a invoked oom-killer: gfp_mask=0x201da, order=0, oom_score_adj=0");
    assert_eq!(read(&mut parser, 81, killed).unwrap().pid, 1);
    // The id is used again.
    read(&mut parser, 200, "a invoked oom-killer: gfp_mask=0x201da, order=0, oom_score_adj=0");
    assert_eq!(read(&mut parser, 201, killed).unwrap().pid, 1);
}

#[test]
fn records_of_processes_and_damaged_ones_are_ignored() {
    let line = "Out of memory: Killed process 12 (a) total-vm:1kB";
    let parse = |head: &str| Parser::default().read(format!("{head};{line}\n").as_bytes());
    assert!(parse("3,1,5,-").is_some());
    assert!(parse("3,1,5,-,caller=T12").is_some());
    assert_eq!(parse("12,1,5,-"), None, "the facility of processes is not 0");
    for head in ["", "3", "3,1", "x,1,5,-", "3,x,5,-", "3,1,x,-", "-3,1,5,-", "3,1,99999999999999999999,-"] {
        assert_eq!(parse(head), None, "{head}");
    }
    assert_eq!(Parser::default().read(b"no record"), None);
    assert_eq!(Parser::default().read(b""), None);
}

#[test]
fn escapes_and_values_of_a_record_are_understood() {
    let found =
        record(b"6,339,5140900,c,caller=T1;a\\x09b\\x5cx\\xzz\\x4\n SUBSYSTEM=acpi\n DEVICE=+acpi:PNP\n")
            .unwrap();
    assert_eq!((found.time, found.message.as_ref()), (5_140_900, "a\tb\\x\\xzz\\x4"));
    let long = [b"6,1,2,-;".as_slice(), &b"x".repeat(100_000)].concat();
    assert_eq!(record(&long).unwrap().message.len(), RECORD_LIMIT - 8);
}

#[test]
fn names_of_processes_can_not_invent_kills() {
    let pod = format!("/kubepods/burstable/pod{UID}");
    let summary = |task: &str| {
        format!(
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c,mems_allowed=0,oom_memcg={pod},task_memcg={pod}/{ID},task={task},pid=7,uid=0"
        )
    };
    for name in ["a,pid=1,uid=2", ",task=x", "a,task_memcg=/", "", "Killed process ", ")(", "a,uid=0"] {
        check(&[&summary(name)], name, 7, cgroup_scope(&pod), Some(&format!("{pod}/{ID}")));
    }
    for name in ["a) total-vm:1", "x (y)", "(", ")"] {
        let line = format!("Out of memory: Killed process 7 ({name}) total-vm:1kB, anon-rss:1kB");
        check(&[&line], name, 7, Scope::System, None);
    }
    for line in [
        "overlayfs: upper Out of memory: Killed process 7 (x) total-vm:1kB",
        "process '/x/oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/,task=x,pid=7,uid=0' started with executable stack",
        "a name longer than any process invoked oom-killer: gfp_mask=0",
    ] {
        assert_eq!(kills(&[line, "Killed process 7 (x) total-vm:1kB"]), [], "{line}");
    }
}

#[test]
fn names_of_nested_cgroups_do_not_lead_to_another_pod() {
    let own = format!("/kubepods/besteffort/pod{UID}/{ID}");
    let other = format!("/kubepods/pod00000000-0000-0000-0000-000000000000/{ID}");
    let line = |constraint: &str, cpuset: &str, context: &str| {
        format!(
            "oom-kill:constraint={constraint},nodemask=(null),cpuset={cpuset},mems_allowed=0,{context},task=x,pid=7,uid=0"
        )
    };
    for nested in [
        format!("{own}/a,task_memcg={other}"),
        format!("{own}/a,oom_memcg=/,task_memcg={other}"),
        format!("{own}/a,global_oom,task_memcg={other}"),
        format!("{own}/a,task=y,pid=1,uid=1"),
        format!("{own},task_memcg={own}/b"),
    ] {
        for cpuset in ["a", "a,global_oom,task_memcg=", "a,oom_memcg=,task_memcg="] {
            let found = kills(&[&line(
                "CONSTRAINT_MEMCG",
                cpuset,
                &format!("oom_memcg={nested},task_memcg={nested}/c"),
            )]);
            assert!(matches!(found[0].scope, Scope::Cgroup(_)), "{nested}");
            assert!(found[0].owner().unwrap().is(&PodUid::from(UID)), "{nested}: {found:?}");
            let found =
                kills(&[&line("CONSTRAINT_NONE", cpuset, &format!("global_oom,task_memcg={nested}"))]);
            assert_eq!(found[0].scope, Scope::System, "{nested}");
            assert!(found[0].owner().unwrap().is(&PodUid::from(UID)), "{nested}: {found:?}");
        }
        let pod = format!("/kubepods/besteffort/pod{UID}");
        let legacy = format!("Task in {nested} killed as a result of limit of {pod}");
        let found = kills(&[&legacy, "Killed process 7 (x) total-vm:1kB"]);
        assert_eq!(found[0].scope, cgroup_scope(&pod));
    }
}

#[test]
fn owners_of_all_drivers_and_runtimes() {
    let check = |path: &str, uid: Option<&str>, container: Option<&str>| {
        let found = owner(path);
        assert_eq!(found.as_ref().map(|owner| owner.uid.as_str()), uid, "{path}");
        assert_eq!(found.and_then(|owner| owner.container).as_deref(), container, "{path}");
    };
    check("/kubepods/pod1-2/abc", Some("1-2"), Some("abc"));
    check("/kubepods/burstable/pod1-2/abc/init.scope/x", Some("1-2"), Some("abc"));
    check("/parent/kubepods/besteffort/pod1-2", Some("1-2"), None);
    check("/kubepods.slice/kubepods-pod1_2.slice/crio-abc.scope/container", Some("1_2"), Some("abc"));
    check(
        "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1_2.slice/cri-containerd-abc.scope",
        Some("1_2"),
        Some("abc"),
    );
    check(
        "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice:cri-containerd:abc",
        None,
        None,
    );
    check("/kubepods/burstable/pod1_2/system.slice:cri-containerd:abc", Some("1_2"), Some("abc"));
    check("/kubepods/burstable", None, None);
    check("/kubepods", None, None);
    check("/kubepods/a/b/podx", None, None);
    check("/system.slice/containerd.service", None, None);
    check("/user.slice/pod1/x", None, None);
    check("/kubepods/pod", None, None);
    check("/", None, None);
    check("", None, None);
    let owner = owner("/kubepods.slice/kubepods-pod1_2.slice").unwrap();
    assert!(owner.is(&PodUid::from("1-2")) && owner.is(&PodUid::from("1_2")));
    assert!(!owner.is(&PodUid::from("1-3")) && !owner.is(&PodUid::from("1-22")));
}

proptest! {
    #[test]
    fn no_record_causes_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Parser::default().read(&bytes);
    }

    /// Whatever a container calls its process and its cgroups, the kernel's own facts are read.
    #[test]
    fn names_do_not_change_the_kernels_facts(
        task in "[a,=()/ pidtskum0-9:_]{0,15}",
        nested in "[a,=()pidtskum0-9_:. ]{1,40}",
        machine: bool,
    ) {
        let own = format!("/kubepods/besteffort/pod{UID}/{ID}");
        let path = format!("{own}/{nested}");
        let (constraint, context) = if machine {
            ("CONSTRAINT_NONE", format!("global_oom,task_memcg={path}"))
        } else {
            ("CONSTRAINT_MEMCG", format!("oom_memcg={own},task_memcg={path}"))
        };
        let line = format!("oom-kill:constraint={constraint},nodemask=(null),cpuset={nested},mems_allowed=0,{context},task={task},pid=7,uid=0");
        let found = kills(&[&line]);
        prop_assert_eq!(found.len(), 1);
        prop_assert_eq!(found[0].pid, 7);
        prop_assert_eq!(found[0].scope == Scope::System, machine);
        prop_assert!(found[0].owner().unwrap().is(&PodUid::from(UID)));
    }
}
