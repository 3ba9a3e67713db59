//! The NUMA nodes of the machine, from `/sys/devices/system/node` (Go: cadvisor
//! utils/sysinfo `GetNodesInfo`). The only file access for the memory and topology managers
//! besides their state files.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::numa::NumaMask;

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NumaNode {
    /// Below 64.
    pub number: u32,
    /// `MemTotal`; 0 if the kernel does not say.
    pub memory_bytes: u64,
    /// Preallocated huge pages: bytes per page, and how many. Sizes without pages are included.
    pub huge_pages: BTreeMap<u64, u64>,
    /// To each node in the order of their numbers; `None` if the kernel does not say.
    pub distances: Option<Vec<u64>>,
}

/// Why the NUMA nodes are not known.
#[derive(Debug, thiserror::Error)]
pub enum NumaError {
    /// A file or directory cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        #[source]
        #[expect(missing_docs, reason = "the name says what it is")]
        source: io::Error,
    },
    /// A file has other content than the kernel writes.
    #[error("{} has no usable {what}", path.display())]
    Content {
        /// Which.
        path: PathBuf,
        /// What is missing.
        what: &'static str,
    },
    /// A node whose number does not fit into a set of nodes.
    ///
    /// DIFFERS: upstream starts, and ends with a panic at the first hint for such a node.
    #[error("NUMA node {number}: node numbers above 63 are not supported")]
    Number {
        #[expect(missing_docs, reason = "the name says what it is")]
        number: u32,
    },
}

/// Files of the kernel are smaller.
const MOST_BYTES: u64 = 64 * 1024;

/// The nodes in a directory such as `/sys/devices/system/node`, by number.
///
/// A machine without this directory has a kernel without NUMA. It has one node, 0, with
/// `memory_bytes` and `huge_pages` (bytes per page, and how many) of the whole machine.
///
/// DIFFERS: upstream takes the sockets for nodes then, and gives them no memory.
///
/// # Errors
/// When a directory or a file exists and cannot be used.
pub fn read(
    dir: &Path,
    memory_bytes: u64,
    huge_pages: &BTreeMap<u64, u64>,
) -> Result<Vec<NumaNode>, NumaError> {
    let mut nodes = Vec::new();
    for name in list(dir)? {
        let Some(number) = name.strip_prefix("node").and_then(|rest| rest.parse().ok()) else { continue };
        if number > 63 {
            return Err(NumaError::Number { number });
        }
        nodes.push(node(&dir.join(&name), number)?);
    }
    nodes.sort_by_key(|node| node.number);
    if nodes.is_empty() {
        let huge_pages = huge_pages.clone();
        nodes.push(NumaNode { number: 0, memory_bytes, huge_pages, distances: Some(vec![10]) });
    }
    Ok(nodes)
}

/// The numbers of these nodes.
pub fn all(nodes: &[NumaNode]) -> NumaMask {
    NumaMask::from_numbers(nodes.iter().map(|node| node.number))
}

fn node(dir: &Path, number: u32) -> Result<NumaNode, NumaError> {
    let content = |path: PathBuf, what| NumaError::Content { path, what };
    let path = dir.join("meminfo");
    let memory_bytes = match text(&path)? {
        Some(text) => mem_total(&text).ok_or_else(|| content(path, "MemTotal"))?,
        None => 0,
    };
    let path = dir.join("distance");
    let distances = match text(&path)? {
        Some(text) => {
            let numbers: Result<Vec<u64>, _> = text.split_whitespace().map(str::parse).collect();
            Some(numbers.map_err(|_| content(path, "list of distances"))?)
        }
        None => None,
    };
    let mut huge_pages = BTreeMap::new();
    let pages = dir.join("hugepages");
    for name in list(&pages)? {
        let size = name.strip_prefix("hugepages-").and_then(|rest| rest.strip_suffix("kB"));
        let Some(size) = size.and_then(|kib| kib.parse::<u64>().ok()?.checked_mul(1024)) else { continue };
        let path = pages.join(&name).join("nr_hugepages");
        let count = text(&path)?.and_then(|text| text.trim().parse().ok());
        huge_pages.insert(size, count.ok_or_else(|| content(path, "number of pages"))?);
    }
    Ok(NumaNode { number, memory_bytes, huge_pages, distances })
}

/// A line such as `Node 0 MemTotal:  12019916 kB`, in bytes.
fn mem_total(text: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.split_once("MemTotal:"))?.1;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The names in a directory; none if it does not exist.
fn list(dir: &Path) -> Result<Vec<String>, NumaError> {
    let failed = |source| NumaError::Read { path: dir.to_owned(), source };
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    Ok(names)
}

/// The text of a file; `None` if it does not exist.
fn text(path: &Path) -> Result<Option<String>, NumaError> {
    let mut text = String::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(MOST_BYTES).read_to_string(&mut text));
    match read {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(NumaError::Read { path: path.to_owned(), source }),
        Ok(_) => Ok(Some(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        dir
    }

    fn read_tree(files: &[(&str, &str)]) -> Result<Vec<NumaNode>, NumaError> {
        read(tree(files).path(), 1 << 30, &BTreeMap::from([(2 << 20, 7)]))
    }

    #[test]
    fn nodes_are_read_in_the_order_of_their_numbers() {
        let nodes = read_tree(&[
            ("node10/meminfo", "Node 10 MemTotal:       2048 kB\nNode 10 MemFree: 1 kB\n"),
            ("node10/distance", "21 10\n"),
            ("node10/hugepages/hugepages-2048kB/nr_hugepages", "3\n"),
            ("node10/hugepages/hugepages-1048576kB/nr_hugepages", "0\n"),
            ("node2/meminfo", "\nNode 2 MemTotal:       1024 kB\n"),
            ("node2/distance", "10 21\n"),
            ("nodes/distance", "x"),
            ("online", "2,10\n"),
        ])
        .unwrap();
        let expected = [
            NumaNode {
                number: 2,
                memory_bytes: 1 << 20,
                huge_pages: BTreeMap::new(),
                distances: Some(vec![10, 21]),
            },
            NumaNode {
                number: 10,
                memory_bytes: 2 << 20,
                huge_pages: BTreeMap::from([(2 << 20, 3), (1 << 30, 0)]),
                distances: Some(vec![21, 10]),
            },
        ];
        assert_eq!(nodes, expected);
        assert_eq!(all(&nodes), NumaMask::from_numbers([2, 10]));
    }

    #[test]
    fn a_kernel_without_numa_has_one_node_with_all_memory() {
        let dir = tempfile::tempdir().unwrap();
        let pages = BTreeMap::from([(2 << 20, 7)]);
        let nodes = read(&dir.path().join("missing"), 1 << 30, &pages).unwrap();
        let distances = Some(vec![10]);
        assert_eq!(nodes, [NumaNode { number: 0, memory_bytes: 1 << 30, huge_pages: pages, distances }]);
    }

    #[test]
    fn missing_values_are_unknown_and_wrong_ones_are_errors() {
        assert_eq!(read_tree(&[("node0/cpulist", "")]).unwrap(), [NumaNode::default()]);
        for (path, content) in [
            ("node0/meminfo", "Node 0 MemTotal: x kB"),
            ("node0/meminfo", ""),
            ("node0/meminfo", "Node 0 MemTotal: 18446744073709551615 kB"),
            ("node0/distance", "10 -1"),
            ("node0/hugepages/hugepages-64kB/nr_hugepages", "?"),
            ("node0/hugepages/hugepages-64kB/other", ""),
        ] {
            assert!(matches!(read_tree(&[(path, content)]), Err(NumaError::Content { .. })), "{path}");
        }
        let high = read_tree(&[("node64/distance", "10")]);
        assert!(matches!(high, Err(NumaError::Number { number: 64 })));
    }
}
