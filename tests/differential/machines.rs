//! Facts about the machine against cadvisor and the CPU manager: memory, swap, huge pages, memory
//! modules, NUMA nodes and the topology of processors.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use coracle::kernel_readers::{CpuTopology, Machine, Roots, dimms};
use coracle::placement::machine::{Machine as Processors, MachineError};
use coracle::placement::numa_nodes;
use serde_json::{Value, json};

use crate::peer::Peer;
use crate::random::Random;
use crate::{Cases, mutate_text, pick, rarely};

/// A directory with files, which each case makes again.
pub struct Tree {
    top: tempfile::TempDir,
    files: BTreeMap<String, String>,
}

impl Tree {
    pub fn new() -> Tree {
        Tree { top: crate::directory(), files: BTreeMap::new() }
    }

    /// The directory of this case.
    pub fn path(&self) -> PathBuf {
        self.top.path().join("case")
    }

    pub fn clear(&mut self) {
        self.files.clear();
        let _ = std::fs::remove_dir_all(self.path());
        std::fs::create_dir(self.path()).unwrap();
    }

    pub fn put(&mut self, path: &str, text: &str) {
        let place = self.path().join(path);
        std::fs::create_dir_all(place.parent().unwrap()).unwrap();
        std::fs::write(place, text).unwrap();
        self.files.insert(path.to_owned(), text.to_owned());
    }

    pub fn directory(&mut self, path: &str) {
        std::fs::create_dir_all(self.path().join(path)).unwrap();
    }

    pub fn link(&mut self, path: &str, target: &str) {
        let place = self.path().join(path);
        std::fs::create_dir_all(place.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, place).unwrap();
    }

    /// All files, for a report.
    pub fn shown(&self) -> String {
        self.files.iter().map(|(path, text)| format!("{path}: {text:?}\n")).collect()
    }
}

const MEMORY: [&str; 10] = [
    "MemTotal",
    "MemFree",
    "MemAvailable",
    "Buffers",
    "SwapCached",
    "Active(file)",
    "SwapTotal",
    "SwapFree",
    "Hugetlb",
    "HugePages_Total",
];

/// Numbers as the kernel writes them, and others.
pub fn number(random: &mut Random) -> String {
    match random.below(60) {
        0 => pick(random, &["18446744073709551615", "18446744073709551616", "9223372036854775808", "00"]),
        1 => pick(random, &["-1", "+1", "", "x", "1.5", "0x10", "1_0", "1 2", "-9223372036854775809"]),
        _ => return (random.below(1 << 20) << random.below(21)).to_string(),
    }
    .to_owned()
}

/// Huge pages and mebibytes: small numbers, and what no kernel writes.
fn small(random: &mut Random, factor: u64) -> String {
    match rarely(random, 40) {
        true => pick(random, &["18446744073709551616", "x", "", "+1"]).to_owned(),
        false => (random.below(900) * factor).to_string(),
    }
}

/// The kernel's alignment of a number.
fn aligned(random: &mut Random, number: &str) -> String {
    format!("{}{number}", " ".repeat(1 + random.below(9) as usize))
}

fn meminfo(random: &mut Random, before: &str) -> String {
    let mut text = String::new();
    for name in MEMORY {
        if rarely(random, 40) {
            continue;
        }
        // Upstream multiplies without a check.
        let number = Some(number(random)).filter(|number| number.len() < 16).unwrap_or_default();
        let unit = if name == "HugePages_Total" || rarely(random, 80) { "" } else { " kB" };
        text += &format!("{before}{name}:{}{unit}\n", aligned(random, &number));
    }
    if rarely(random, 12) { mutate_text(random, text) } else { text }
}

/// Whether a text is not one of a kernel. Upstream finds a line also where it does not begin or end
/// as it should.
fn is_mutated(text: &str) -> bool {
    let is_good = |line: &str| {
        let of_node = line.strip_prefix("Node ").and_then(|rest| rest.split_once(' '));
        let line = of_node.filter(|(node, _)| node.parse::<u32>().is_ok()).map_or(line, |(_, rest)| rest);
        let Some((name, value)) = line.split_once(':') else { return false };
        let digits = value.trim_start_matches(' ').trim_end_matches(" kB");
        MEMORY.contains(&name) && !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
    };
    !text.lines().all(is_good)
}

fn huge_pages(random: &mut Random, tree: &mut Tree, directory: &str) {
    for size in [64_u64, 2048, 32768, 1 << 20, 16 << 20] {
        if rarely(random, 2) {
            let number = small(random, 1);
            tree.put(&format!("{directory}/hugepages-{size}kB/nr_hugepages"), &format!("{number}\n"));
        }
    }
    if rarely(random, 60) {
        tree.directory(&format!("{directory}/hugepages-1024kB"));
    }
}

fn modules(random: &mut Random, tree: &mut Tree) {
    for controller in 0..random.below(3) {
        for module in 0..random.below(4) {
            let directory = format!("sys/devices/system/edac/mc/mc{controller}/dimm{module}");
            let kind =
                pick(random, &["Unbuffered-DDR4", "Unbuffered-DDR4", "Registered-DDR5", "Unknown", ""]);
            tree.put(&format!("{directory}/dimm_mem_type"), &format!("{kind}\n"));
            let size = small(random, 4096);
            tree.put(&format!("{directory}/size"), &format!("{size}\n"));
        }
    }
    if rarely(random, 2) {
        tree.put("sys/devices/system/edac/mc/power/control", "auto\n");
    }
}

/// The list of these numbers as the kernel writes it.
fn list_of(all: &BTreeSet<u32>) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for number in all {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => parts.push((*number, *number)),
        }
    }
    let part = |(first, last): (u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    parts.into_iter().map(part).collect::<Vec<_>>().join(",")
}

/// A map of processors as the kernel writes it: words of 32, the highest first.
fn map_of(all: &[u32]) -> String {
    let words = all.iter().max().map_or(1, |last| last / 32 + 1);
    let word = |index: u32| {
        all.iter()
            .filter(|number| **number / 32 == index)
            .fold(0_u32, |word, number| word | 1 << (number % 32))
    };
    (0..words).rev().map(|index| format!("{:08x}", word(index))).collect::<Vec<_>>().join(",")
}

/// Nodes of sockets of cores of threads, with caches that some cores share. Returns whether the kernel
/// says which nodes there are.
fn processors(random: &mut Random, tree: &mut Tree) -> bool {
    let system = "sys/devices/system";
    let sockets = 1 + random.below(2) as u32;
    let cores = 1 + random.below(7) as u32;
    let threads = pick(random, &[1, 2, 2, 4]);
    let nodes_of_socket = pick(random, &[1, 1, 2]);
    let all = sockets * cores * threads;
    let has_nodes = !rarely(random, 8);
    let (unknown, odd_cores) = (rarely(random, 30), rarely(random, 6));
    let offline: BTreeSet<u32> = match rarely(random, 3) {
        true => (0..1 + random.below(3)).map(|_| 1 + random.below(u64::from(all)) as u32).collect(),
        false => BTreeSet::new(),
    };
    // How many cores share a cache, and the file that its descriptions lack.
    let shared = pick(random, &[0, 1, 2, 3, 8]);
    let lacking =
        if rarely(random, 4) { pick(random, &["id", "size", "level", "type", "cache"]) } else { "" };
    let number_of_node = pick(random, &[1, 1, 1, 3]);
    let mut online = BTreeSet::new();
    for cpu in 0..all {
        let (socket, core) = ((cpu % (sockets * cores)) / cores, cpu % cores);
        let node = (socket * nodes_of_socket + core % nodes_of_socket) * number_of_node;
        let base = format!("{system}/cpu/cpu{cpu}");
        tree.directory(&base);
        if has_nodes {
            tree.link(&format!("{system}/node/node{node}/cpu{cpu}"), &format!("../../cpu/cpu{cpu}"));
        }
        if offline.contains(&cpu) {
            continue;
        }
        online.insert(cpu);
        if rarely(random, 400) {
            // A processor whose firmware says nothing about it.
            continue;
        }
        let id = if odd_cores { core * 4 } else { core };
        let socket_id = if unknown { "-1".to_owned() } else { socket.to_string() };
        tree.put(&format!("{base}/topology/core_id"), &format!("{id}\n"));
        tree.put(&format!("{base}/topology/physical_package_id"), &format!("{socket_id}\n"));
        if shared == 0 || lacking == "cache" {
            continue;
        }
        let group = core / shared;
        let members: Vec<u32> = (0..all)
            .filter(|other| {
                !offline.contains(other)
                    && other % (sockets * cores) / cores == socket
                    && other % cores / shared == group
            })
            .collect();
        let siblings: Vec<u32> = (0..all)
            .filter(|other| !offline.contains(other) && other % (sockets * cores) == cpu % (sockets * cores))
            .collect();
        for (index, level, kind, size, id, sharing) in [
            (0, 1, "Data", "32K", core, &siblings),
            (2, 2, "Unified", "1024K", core, &siblings),
            (3, 3, "Unified", "32768K", socket * 16 + group, &members),
        ] {
            let cache = format!("{base}/cache/index{index}");
            for (name, text) in [
                ("id", id.to_string()),
                ("level", level.to_string()),
                ("type", kind.to_owned()),
                ("size", size.to_owned()),
                ("shared_cpu_map", map_of(sharing)),
            ] {
                if name != lacking {
                    tree.put(&format!("{cache}/{name}"), &format!("{text}\n"));
                }
            }
        }
    }
    tree.put(&format!("{system}/cpu/online"), &format!("{}\n", list_of(&online)));
    tree.put(&format!("{system}/cpu/cpufreq/boost"), "1\n");
    if !has_nodes {
        return false;
    }
    if rarely(random, 8) {
        // Memory without processors.
        tree.put(&format!("{system}/node/node9/meminfo"), "Node 9 MemTotal:  1024 kB\n");
    }
    let names: Vec<String> = std::fs::read_dir(tree.path().join(system).join("node"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let count = names.len();
    for name in names {
        let base = format!("{system}/node/{name}");
        if !rarely(random, 20) {
            let before = format!("Node {} ", &name[4..]);
            let text = meminfo(random, &before);
            tree.put(&format!("{base}/meminfo"), &text);
        }
        if !rarely(random, 20) {
            let distances: Vec<String> = (0..count).map(|_| (10 + random.below(30)).to_string()).collect();
            tree.put(&format!("{base}/distance"), &format!("{}\n", distances.join(" ")));
        }
        huge_pages(random, tree, &format!("{base}/hugepages"));
        tree.put(&format!("{base}/cpulist"), "0\n");
    }
    true
}

/// What both say, or only one of them.
fn same<T: PartialEq + std::fmt::Debug>(
    what: &str,
    ours: Result<T, String>,
    theirs: Result<T, String>,
) -> Verdict {
    match (ours, theirs) {
        (Ok(ours), Ok(theirs)) if ours == theirs => Verdict::Same,
        (Err(_), Err(_)) => Verdict::RefusedByBoth,
        // The kubelet does not start; a number that no kernel writes.
        (Ok(_), Err(_)) => Verdict::RefusedByGo,
        (ours, theirs) => Verdict::Differs(format!("{what}: {ours:?}, in Go {theirs:?}")),
    }
}

#[derive(Debug)]
enum Verdict {
    Same,
    RefusedByBoth,
    RefusedByGo,
    Differs(String),
}

/// The value of a part of the answer.
fn part<'a>(response: &'a Value, name: &str) -> Result<&'a Value, String> {
    match response[name]["error"].as_str() {
        Some(error) => Err(error.to_owned()),
        None => Ok(&response[name]["ok"]),
    }
}

fn sizes(pages: &Value) -> BTreeMap<u64, u64> {
    let pages = pages.as_array().into_iter().flatten();
    pages
        .map(|entry| (entry["page_size"].as_u64().unwrap() * 1024, entry["num_pages"].as_u64().unwrap()))
        .collect()
}

fn compare(tree: &Tree, theirs: &Value, has_nodes: bool) -> Vec<Verdict> {
    let roots = Roots { proc: tree.path().join("proc"), sys: tree.path().join("sys") };
    let system = roots.sys.join("devices/system");
    let unsigned = |name: &str| part(theirs, name).map(|value| value.as_u64().unwrap());
    let machine = Machine::read(&roots);
    let mut all = vec![
        same(
            "memory",
            machine.as_ref().map(|machine| machine.memory_bytes).map_err(ToString::to_string),
            unsigned("memory"),
        ),
        pages_of_both(&machine, theirs),
        modules_of_both(&roots, theirs),
    ];
    if let Ok(machine) = &machine {
        // Without a line about swap there is none here.
        all.push(same("swap", Ok(machine.swap_bytes), unsigned("swap")));
        all.push(same("swaps", Ok(machine.has_swap), part(theirs, "swaps").map(|value| value == true)));
    }
    all.extend(processors_of_both(&system, theirs, has_nodes));
    if has_nodes {
        all.push(nodes_of_both(&system.join("node"), theirs));
    }
    all
}

fn pages_of_both<E: ToString>(machine: &Result<Machine, E>, theirs: &Value) -> Verdict {
    let Ok(machine) = machine else { return Verdict::RefusedByBoth };
    let ours =
        machine.huge_pages.iter().map(|pages| (pages.size_bytes, pages.total)).collect::<BTreeMap<_, _>>();
    same("huge pages", Ok(ours), part(theirs, "pages").map(sizes))
}

fn modules_of_both(roots: &Roots, theirs: &Value) -> Verdict {
    let ours = dimms(roots)
        .into_iter()
        .map(|module| (module.kind, (module.count, module.bytes)))
        .collect::<BTreeMap<_, _>>();
    let read = |all: &Value| {
        let all = all.as_object().unwrap().iter();
        all.map(|(kind, module)| {
            (kind.clone(), (module["dimm_count"].as_u64().unwrap(), module["capacity"].as_u64().unwrap()))
        })
        .collect()
    };
    same("modules", Ok(ours), part(theirs, "modules").map(read))
}

fn processors_of_both(system: &Path, theirs: &Value, has_nodes: bool) -> Vec<Verdict> {
    let cpus = |found: &Value| -> BTreeMap<u32, [i64; 4]> {
        let found = found.as_object().unwrap().iter();
        found
            .map(|(cpu, numbers)| {
                (cpu.parse().unwrap(), [0, 1, 2, 3].map(|index| numbers[index].as_i64().unwrap()))
            })
            .collect()
    };
    let ours = Processors::read(system).map(|machine| {
        let row = |cpu: u32| {
            machine.cpu(cpu).map(|cpu_info| {
                (cpu, [cpu_info.core, cpu_info.socket, cpu_info.node, cpu_info.cache].map(i64::from))
            })
        };
        let mut all = machine.all().iter().filter_map(row).collect::<BTreeMap<_, _>>();
        // A cache that a whole node shares counts as none, and the nodes differ.
        all.values_mut().filter(|_| !has_nodes).for_each(|[.., cache]| *cache = 0);
        all
    });
    // DIFFERS: numbers that the kernel does not know are 0 here; without nodes there is one.
    let read = |found: &Value| {
        let mut found = cpus(found);
        for [_, socket, node, cache] in found.values_mut() {
            (*socket, *cache) = ((*socket).max(0), (*cache).max(0));
            (*node, *cache) = if has_nodes { (*node, *cache) } else { (0, 0) };
        }
        found
    };
    let found = part(theirs, "cpus").map(read);
    if matches!(&ours, Err(MachineError::NoCpus { .. })) && found.as_ref().is_ok_and(BTreeMap::is_empty) {
        // The Go kubelet then has too few for its reservation, which the policy needs.
        return vec![Verdict::RefusedByBoth];
    }
    vec![same("processors", ours.map_err(|error| error.to_string()), found)]
}

fn nodes_of_both(directory: &Path, theirs: &Value) -> Verdict {
    type Node = (u64, u64, BTreeMap<u64, u64>, Vec<u64>);
    let ours = numa_nodes::read(directory, 0, &BTreeMap::new()).map(|nodes| {
        let row = |node: numa_nodes::NumaNode| {
            (u64::from(node.number), node.memory_bytes, node.huge_pages, node.distances.unwrap_or_default())
        };
        nodes.into_iter().map(row).collect::<Vec<Node>>()
    });
    let read = |nodes: &Value| {
        let row = |node: &Value| {
            let distances = node["distances"].as_array().into_iter().flatten();
            let distances = distances.map(|distance| distance.as_u64().unwrap()).collect();
            let memory = node["memory"].as_u64().unwrap();
            (node["node_id"].as_u64().unwrap(), memory, sizes(&node["hugepages"]), distances)
        };
        let mut nodes: Vec<Node> = nodes.as_array().unwrap().iter().map(row).collect();
        nodes.sort_by_key(|node| node.0);
        nodes
    };
    same("nodes", ours.map_err(|error| error.to_string()), part(theirs, "nodes").map(read))
}

#[test]
fn facts_about_the_machine_equal_those_of_cadvisor() {
    let (mut cases, mut random) = Cases::new("machines", 2_000);
    let mut peer = Peer::managers();
    let mut tree = Tree::new();
    while cases.next() {
        tree.clear();
        let text = meminfo(&mut random, "");
        tree.put("proc/meminfo", &text);
        let mut swaps = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n".to_owned();
        for index in 0..random.below(3) {
            swaps += &format!("/dev/sda{index}                               partition\t999420\t\t0\t\t-2\n");
        }
        tree.put("proc/swaps", &swaps);
        huge_pages(&mut random, &mut tree, "sys/kernel/mm/hugepages");
        modules(&mut random, &mut tree);
        let has_nodes = processors(&mut random, &mut tree);
        let theirs = peer.ask(&json!({"ask": "machine", "dir": tree.path()}));
        let mut verdicts = compare(&tree, &theirs, has_nodes);
        verdicts.push(counts_of_both(&tree, &theirs));
        let is_odd = tree.files.iter().any(|(path, text)| path.ends_with("meminfo") && is_mutated(text));
        for verdict in verdicts {
            match verdict {
                Verdict::Differs(how) if is_odd && is_unread(&how) => {
                    cases.count("odd parts refused here only")
                }
                Verdict::Same => cases.count("parts read alike"),
                Verdict::RefusedByBoth => cases.count("parts refused by both"),
                Verdict::RefusedByGo => cases.count("parts refused by Go only"),
                Verdict::Differs(how) => cases.differs(&format!("{how}:\n{}", tree.shown())),
            }
        }
    }
    cases.end("parts read alike", 1);
}

/// Whether only upstream has read a number of a table of memory.
fn is_unread(how: &str) -> bool {
    how.starts_with("memory: Err") || how.starts_with("swap: Ok(0)") || how.starts_with("nodes: Err")
}

/// Cores and sockets for metrics. Upstream counts 0 for a processor without a topology.
fn counts_of_both(tree: &Tree, theirs: &Value) -> Verdict {
    let system = tree.path().join("sys/devices/system/cpu");
    let online: Vec<u32> =
        (0..1024).filter(|cpu| system.join(format!("cpu{cpu}/topology")).is_dir()).collect();
    let text = std::fs::read_to_string(system.join("online")).unwrap();
    if list_of(&online.into_iter().collect()) != text.trim() {
        return Verdict::RefusedByGo;
    }
    let CpuTopology { cores, sockets } =
        CpuTopology::read(&Roots { proc: tree.path().join("proc"), sys: tree.path().join("sys") });
    let count = |index: usize| theirs["cores"]["ok"][index].as_u64().unwrap() as usize;
    same("cores and sockets", Ok([cores, sockets]), Ok([count(0), count(1)]))
}
