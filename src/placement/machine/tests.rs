use std::fs;

use super::*;

/// A tree of sysfs.
struct Tree {
    dir: tempfile::TempDir,
}

/// A CPU: number, core id, package, NUMA node.
type CpuRow = (u32, u32, i64, Option<u32>);

impl Tree {
    fn new(cpus: &[CpuRow]) -> Tree {
        let tree = Tree { dir: tempfile::tempdir().unwrap() };
        for (cpu, core, package, node) in cpus {
            tree.write(&format!("cpu/cpu{cpu}/topology/core_id"), &core.to_string());
            tree.write(&format!("cpu/cpu{cpu}/topology/physical_package_id"), &package.to_string());
            if let Some(node) = node {
                fs::create_dir_all(tree.dir.path().join(format!("node/node{node}/cpu{cpu}"))).unwrap();
            }
        }
        fs::create_dir_all(tree.dir.path().join("cpu/cpufreq")).unwrap();
        tree
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    fn cache(&self, cpu: u32, index: u32, level: u32, id: u32, map: &str) {
        for (name, text) in [
            ("id", id.to_string()),
            ("level", level.to_string()),
            ("shared_cpu_map", map.to_owned()),
            ("size", "32768K".to_owned()),
            ("type", "Unified".to_owned()),
        ] {
            self.write(&format!("cpu/cpu{cpu}/cache/index{index}/{name}"), &text);
        }
    }

    fn read(&self) -> Machine {
        Machine::read(self.dir.path()).unwrap()
    }
}

/// Nodes of four cores of one socket each; sibling threads are far apart.
fn regular(nodes: u32, threads: u32) -> Vec<CpuRow> {
    let cores = nodes * 4;
    (0..threads)
        .flat_map(|thread| {
            (0..cores).map(move |core| (thread * cores + core, core % 4, i64::from(core / 4), Some(core / 4)))
        })
        .collect()
}

fn shape(machine: &Machine) -> [u32; 5] {
    let count = |level| machine.count(level);
    [
        machine.all().len(),
        count(Level::Core),
        count(Level::Socket),
        count(Level::Node),
        machine.cpus_per_group(Level::Core),
    ]
}

#[test]
fn nodes_and_threads_are_counted() {
    for nodes in [1, 2, 4, 8] {
        assert_eq!(shape(&Tree::new(&regular(nodes, 1)).read()), [nodes * 4, nodes * 4, nodes, nodes, 1]);
        assert_eq!(shape(&Tree::new(&regular(nodes, 2)).read()), [nodes * 8, nodes * 4, nodes, nodes, 2]);
    }
}

#[test]
fn core_is_its_lowest_thread() {
    let machine = Tree::new(&regular(2, 2)).read();
    assert_eq!(machine.cpu(13), Some(Cpu { core: 5, socket: 1, node: 1, cache: 1 }));
}

#[test]
fn offline_cpus_are_left_out() {
    let tree = Tree::new(&regular(2, 2));
    tree.write("cpu/online", "0-7,9-12");
    let machine = tree.read();
    assert_eq!(machine.all().to_string(), "0-7,9-12");
    assert_eq!(shape(&machine), [12, 8, 2, 2, 1]);
}

#[test]
fn cpu_without_topology_is_left_out() {
    let tree = Tree::new(&regular(1, 1));
    fs::create_dir_all(tree.dir.path().join("node/node0/cpu9")).unwrap();
    assert_eq!(tree.read().all().to_string(), "0-3");
}

#[test]
fn all_cpus_are_one_node_where_there_are_no_nodes() {
    let cpus: Vec<CpuRow> =
        regular(2, 1).into_iter().map(|(cpu, core, socket, _)| (cpu, core, socket, None)).collect();
    let machine = Tree::new(&cpus).read();
    assert_eq!(shape(&machine), [8, 8, 2, 1, 1]);
    // Boards whose kernel does not know the package.
    let unknown = Tree::new(&[(0, 0, -1, None), (1, 1, -1, None)]).read();
    assert_eq!(shape(&unknown), [2, 2, 1, 1, 1]);
}

#[test]
fn caches_of_a_part_of_a_node_are_found() {
    let tree = Tree::new(&regular(1, 2));
    for cpu in 0..8 {
        let half = (cpu % 4) / 2;
        tree.cache(cpu, 0, 1, cpu % 4, "0");
        tree.cache(cpu, 3, 3, half + 10, if half == 0 { "33" } else { "cc" });
    }
    let machine = tree.read();
    assert_eq!(machine.groups(machine.all(), Level::Cache).keys().copied().collect::<Vec<_>>(), [10, 11]);
    assert_eq!(machine.cpu(6).unwrap().cache, 11);
}

#[test]
fn cache_of_a_whole_node_is_none_of_its_own() {
    let tree = Tree::new(&regular(2, 1));
    for cpu in 0..8 {
        tree.cache(cpu, 3, 3, 7 + cpu / 4, if cpu < 4 { "00000000,0000000f" } else { "f0" });
    }
    let machine = tree.read();
    assert_eq!((machine.cpu(0).unwrap().cache, machine.cpu(7).unwrap().cache), (0, 1));
}

#[test]
fn incomplete_caches_are_the_socket() {
    let tree = Tree::new(&regular(1, 1));
    tree.write("cpu/cpu0/cache/index3/level", "3");
    assert_eq!(tree.read().count(Level::Cache), 1);
}

#[test]
fn caches_of_unknown_size_or_kind_are_the_socket() {
    for missing in ["size", "type"] {
        let tree = Tree::new(&regular(1, 1));
        for cpu in 0..4 {
            tree.cache(cpu, 3, 3, cpu, "1");
        }
        assert_eq!(tree.read().count(Level::Cache), 4);
        for cpu in 0..4 {
            fs::remove_file(tree.dir.path().join(format!("cpu/cpu{cpu}/cache/index3/{missing}"))).unwrap();
        }
        assert_eq!(tree.read().count(Level::Cache), 1, "{missing}");
    }
}

#[test]
fn cores_with_one_and_two_threads_are_read() {
    let machine =
        Tree::new(&[(0, 0, 0, Some(0)), (1, 0, 0, Some(0)), (2, 1, 0, Some(0)), (3, 2, 0, Some(0))]).read();
    assert_eq!(shape(&machine), [4, 3, 1, 1, 1]);
}

#[test]
fn damaged_trees_are_errors() {
    let check = |tree: Tree| Machine::read(tree.dir.path()).unwrap_err();
    assert!(matches!(check(Tree::new(&[])), MachineError::NoCpus { .. }));
    assert!(matches!(check(Tree::new(&[(0, 0, 0, Some(64))])), MachineError::NodeNumber { number: 64 }));
    let tree = Tree::new(&regular(1, 1));
    tree.write("cpu/online", "x");
    assert!(matches!(check(tree), MachineError::Format { .. }));
    let tree = Tree::new(&regular(1, 1));
    tree.write("cpu/cpu2/topology/core_id", "two");
    assert!(matches!(check(tree), MachineError::Format { .. }));
}
