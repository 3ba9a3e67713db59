//! Which machine this is and what it runs: identities, kernel, distribution, swap.

use std::path::Path;

use super::kernel_files::{Roots, read};
use super::machine::{kernel_release, memory_field};

/// Facts about the installation. Unknown ones are empty.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SystemFacts {
    /// Of the installation.
    pub machine_id: String,
    /// Of the hardware, or of the virtual machine.
    pub system_uuid: String,
    /// Of the time since the last boot.
    pub boot_id: String,
    pub kernel_version: String,
    /// The distribution's display name.
    pub os_image: String,
    pub swap_bytes: u64,
}

impl SystemFacts {
    /// Reads all of it. `host` is the machine's `/`.
    pub fn read(roots: &Roots, host: &Path) -> Self {
        let first = |paths: &[&Path]| {
            paths
                .iter()
                .filter_map(|path| read(path).ok())
                .map(|text| text.trim().trim_end_matches('\0').trim().to_owned())
                .find(|text| !text.is_empty())
                .unwrap_or_default()
        };
        let machine_id = host.join("etc/machine-id");
        let release = first(&[&host.join("etc/os-release"), &host.join("usr/lib/os-release")]);
        let meminfo = read(&roots.proc.join("meminfo")).unwrap_or_default();
        SystemFacts {
            machine_id: first(&[&machine_id, &host.join("var/lib/dbus/machine-id")]),
            system_uuid: first(&[
                &roots.sys.join("class/dmi/id/product_uuid"),
                &roots.proc.join("device-tree/system-id"),
                &roots.proc.join("device-tree/vm,uuid"),
                &machine_id,
            ]),
            boot_id: first(&[&roots.proc.join("sys/kernel/random/boot_id")]),
            kernel_version: kernel_release(),
            os_image: pretty_name(&release).unwrap_or("Linux").to_owned(),
            swap_bytes: memory_field(&meminfo, "SwapTotal").unwrap_or(0),
        }
    }
}

fn pretty_name(release: &str) -> Option<&str> {
    let value = release.lines().find_map(|line| line.trim().strip_prefix("PRETTY_NAME="))?.trim();
    let quoted = |quote: char| value.strip_prefix(quote)?.strip_suffix(quote);
    let name = quoted('"').or_else(|| quoted('\'')).unwrap_or(value);
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn put(root: &Path, path: &str, content: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    #[test]
    fn reads_an_installation_and_its_substitutes() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let roots = Roots { proc: root.join("proc"), sys: root.join("sys") };
        let facts = || SystemFacts::read(&roots, root);
        let nothing = facts();
        assert_eq!((nothing.machine_id.as_str(), nothing.os_image.as_str()), ("", "Linux"));
        assert!(!nothing.kernel_version.is_empty());
        put(root, "var/lib/dbus/machine-id", "dbus\n");
        put(root, "usr/lib/os-release", "NAME=x\nPRETTY_NAME='Lib 1'\n");
        put(root, "proc/device-tree/vm,uuid", "tree\0");
        let substitutes = facts();
        assert_eq!(
            [&substitutes.machine_id, &substitutes.os_image, &substitutes.system_uuid],
            ["dbus", "Lib 1", "tree"]
        );
        put(root, "etc/machine-id", "etc\n");
        put(root, "etc/os-release", "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nNAME=\"Debian\"\n");
        put(root, "sys/class/dmi/id/product_uuid", "product\n");
        put(root, "proc/sys/kernel/random/boot_id", "boot\n");
        put(root, "proc/meminfo", "MemTotal: 9 kB\nSwapTotal:       2 kB\n");
        let all = facts();
        assert_eq!(
            [&all.machine_id, &all.os_image, &all.system_uuid, &all.boot_id],
            ["etc", "Debian GNU/Linux 12 (bookworm)", "product", "boot"]
        );
        assert_eq!(all.swap_bytes, 2048);
    }

    #[test]
    fn names_of_distributions() {
        for (text, name) in [
            ("PRETTY_NAME=Plain OS", Some("Plain OS")),
            ("PRETTY_NAME=\"\"", None),
            ("PRETTY_NAME=\"open", Some("\"open")),
            ("NAME=x", None),
            ("", None),
        ] {
            assert_eq!(pretty_name(text), name, "{text:?}");
        }
    }
}
