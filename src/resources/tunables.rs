//! Parameters of the kernel that a node needs (Go: pkg/kubelet/cm `setupKernelTunables`).

use std::path::Path;

use super::kernel_files::read;

/// A parameter, and its only value on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tunable {
    /// As `sysctl` names it.
    pub name: &'static str,
    pub value: i64,
}

const fn tunable(name: &'static str, value: i64) -> Tunable {
    Tunable { name, value }
}

pub(crate) const TUNABLES: [Tunable; 6] = [
    tunable("vm.overcommit_memory", 1),
    tunable("vm.panic_on_oom", 0),
    tunable("kernel.panic", 10),
    tunable("kernel.panic_on_oops", 1),
    tunable("kernel.keys.root_maxkeys", 1_000_000),
    tunable("kernel.keys.root_maxbytes", 25_000_000),
];

/// A parameter with another value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Difference {
    pub tunable: Tunable,
    /// The value of the kernel.
    pub found: i64,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} is {} instead of {}", self.tunable.name, self.found, self.tunable.value)
    }
}

/// The parameters with other values. `sys` is `/proc/sys`.
///
/// DIFFERS: a parameter that the kernel does not have, or that cannot be read, is left out; the Go
/// kubelet does not start then.
#[must_use]
pub(crate) fn differences(sys: &Path) -> Vec<Difference> {
    TUNABLES
        .into_iter()
        .filter_map(|tunable| {
            let found: i64 = read(&path(sys, tunable)).ok()?.trim().parse().ok()?;
            (found != tunable.value).then_some(Difference { tunable, found })
        })
        .collect()
}

/// A text for each parameter that was set, and for each that could not be.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    pub done: Vec<String>,
    pub failed: Vec<String>,
}

/// Sets the parameters with other values.
pub(crate) fn set(sys: &Path) -> Changes {
    let mut changes = Changes::default();
    for difference in differences(sys) {
        let Tunable { name, value } = difference.tunable;
        match std::fs::write(path(sys, difference.tunable), value.to_string()) {
            Ok(()) => changes.done.push(format!("{name} was {}, now it is {value}", difference.found)),
            Err(error) => changes.failed.push(format!("{difference}, and cannot be set: {error}")),
        }
    }
    changes
}

fn path(sys: &Path, tunable: Tunable) -> std::path::PathBuf {
    sys.join(tunable.name.replace('.', "/"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn values(sys: &Path, values: [i64; 6]) {
        for (tunable, value) in TUNABLES.into_iter().zip(values) {
            let path = path(sys, tunable);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{value}\n")).unwrap();
        }
    }

    #[test]
    fn parameters_with_other_values_are_found_and_set() {
        let dir = tempfile::tempdir().unwrap();
        let sys = dir.path();
        assert_eq!(differences(sys), [], "a kernel without these parameters");
        values(sys, [1, 0, 10, 1, 1_000_000, 25_000_000]);
        assert_eq!(differences(sys), []);
        assert_eq!(set(sys), Changes::default());
        values(sys, [0, 0, -1, 1, 2_000_000, 20_000]);
        let texts: Vec<String> = differences(sys).iter().map(ToString::to_string).collect();
        let expected = [
            "vm.overcommit_memory is 0 instead of 1",
            "kernel.panic is -1 instead of 10",
            "kernel.keys.root_maxkeys is 2000000 instead of 1000000",
            "kernel.keys.root_maxbytes is 20000 instead of 25000000",
        ];
        assert_eq!(texts, expected);
        let Changes { done, failed } = set(sys);
        assert_eq!((done.len(), failed.len()), (4, 0));
        assert_eq!(done[0], "vm.overcommit_memory was 0, now it is 1");
        assert_eq!(differences(sys), []);
        assert_eq!(fs::read_to_string(sys.join("kernel/panic")).unwrap(), "10");
    }

    #[test]
    fn parameter_that_cannot_be_read_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        values(dir.path(), [1, 0, 10, 1, 1_000_000, 25_000_000]);
        fs::write(dir.path().join("kernel/panic"), "ten").unwrap();
        fs::remove_file(dir.path().join("vm/panic_on_oom")).unwrap();
        fs::create_dir(dir.path().join("vm/panic_on_oom")).unwrap();
        assert_eq!(differences(dir.path()), []);
    }
}
