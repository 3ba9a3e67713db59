//! Helper programs of the distribution: `mount`, `mkfs.ext4`, `iscsiadm` and so on. They run
//! without a shell, with a deadline and bounded output.

use std::process::Command;
use std::time::Duration;

use super::super::error::ToolError;
use crate::util::child::{self, Limits};
use crate::util::clip;
use crate::util::stop::StopToken;

/// The most output of a program that is kept.
const OUTPUT_BYTES: usize = 1 << 20;
/// The most output of a program in a message.
const SHOWN_BYTES: usize = 1000;
/// Helper programs are also searched here: a service manager may set a short path.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Packages by program: of Debian, Alpine and Fedora.
const PACKAGES: [(&str, [&str; 3]); 22] = [
    ("mount", ["mount", "util-linux", "util-linux"]),
    ("umount", ["mount", "util-linux", "util-linux"]),
    ("blkid", ["util-linux", "blkid", "util-linux"]),
    ("blockdev", ["util-linux", "util-linux-misc", "util-linux"]),
    ("losetup", ["mount", "losetup", "util-linux"]),
    ("fsck", ["util-linux", "util-linux-misc", "util-linux"]),
    ("mount.nfs", ["nfs-common", "nfs-utils", "nfs-utils"]),
    ("mount.nfs4", ["nfs-common", "nfs-utils", "nfs-utils"]),
    ("iscsiadm", ["open-iscsi", "open-iscsi", "iscsi-initiator-utils"]),
    ("multipath", ["multipath-tools", "multipath-tools", "device-mapper-multipath"]),
    ("mkfs.ext2", ["e2fsprogs", "e2fsprogs", "e2fsprogs"]),
    ("mkfs.ext3", ["e2fsprogs", "e2fsprogs", "e2fsprogs"]),
    ("mkfs.ext4", ["e2fsprogs", "e2fsprogs", "e2fsprogs"]),
    ("dumpe2fs", ["e2fsprogs", "e2fsprogs-extra", "e2fsprogs"]),
    ("resize2fs", ["e2fsprogs", "e2fsprogs-extra", "e2fsprogs"]),
    ("mkfs.xfs", ["xfsprogs", "xfsprogs", "xfsprogs"]),
    ("xfs_io", ["xfsprogs", "xfsprogs-extra", "xfsprogs"]),
    ("xfs_growfs", ["xfsprogs", "xfsprogs-extra", "xfsprogs"]),
    ("mkfs.btrfs", ["btrfs-progs", "btrfs-progs", "btrfs-progs"]),
    ("btrfs", ["btrfs-progs", "btrfs-progs", "btrfs-progs"]),
    ("mkfs.ntfs", ["ntfs-3g", "ntfs-3g-progs", "ntfsprogs"]),
    ("mkfs.vfat", ["dosfstools", "dosfstools", "dosfstools"]),
];

/// How a program ended, with its output on both descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ProgramOutput {
    /// The exit code; `None`: it was ended by a signal.
    pub(super) code: Option<i32>,
    pub(super) output: String,
}

impl ProgramOutput {
    pub(super) fn is_fine(&self) -> bool {
        self.code == Some(0)
    }

    /// The end in the words of Go's os/exec.
    pub(super) fn status(&self) -> String {
        match self.code {
            Some(code) => format!("exit status {code}"),
            None => "signal: killed".to_owned(),
        }
    }

    /// The beginning of the output, for messages.
    pub(super) fn output_text(&self) -> String {
        clip(&self.output)
    }
}

/// The error for a program that is not installed.
pub(super) fn missing(program: &str) -> ToolError {
    let packages = match PACKAGES.iter().find(|(name, _)| *name == program) {
        Some((_, [debian, alpine, fedora])) => {
            format!(" (package {debian} on Debian, {alpine} on Alpine, {fedora} on Fedora)")
        }
        None => String::new(),
    };
    ToolError::Missing { program: program.to_owned(), packages }
}

/// Runs a program until its end.
pub(super) fn run(
    program: &str,
    args: &[&str],
    time: Duration,
    stop: &StopToken,
) -> Result<ProgramOutput, ToolError> {
    let mut command = Command::new(program);
    // The texts of programs are compared, and must not be translated.
    command.args(args).env("LC_ALL", "C");
    let path = std::env::var("PATH").map_or_else(|_| PATH.to_owned(), |path| format!("{path}:{PATH}"));
    command.env("PATH", path);
    let limits = Limits { time, output_bytes: OUTPUT_BYTES };
    match child::run(&mut command, b"", limits, stop) {
        Ok(output) => {
            let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.push_str(&String::from_utf8_lossy(&output.stderr));
            Ok(ProgramOutput { code: output.status.code(), output: text })
        }
        Err(error) if error.is_missing() => Err(missing(program)),
        Err(error) => Err(ToolError::Child(error)),
    }
}

/// Whether a helper of `mount` is installed in a directory where `mount` searches it.
pub(super) fn has_mount_helper(root: &std::path::Path, program: &str) -> bool {
    ["sbin", "usr/sbin", "usr/bin", "bin"].iter().any(|dir| root.join(dir).join(program).exists())
}

/// At most [`SHOWN_BYTES`] of a text that a program wrote, on one line per line.
pub(super) fn clip(text: &str) -> String {
    let is_other = |character: char| character.is_control() && character != '\n';
    clip::beginning(text.trim_end(), SHOWN_BYTES).replace(is_other, " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::child::ChildError;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn missing_program_names_its_packages() {
        let error = run("mkfs.no-such", &[], LONG, &StopToken::never()).unwrap_err();
        assert_eq!(error.to_string(), "mkfs.no-such is not installed on this node");
        assert_eq!(
            missing("iscsiadm").to_string(),
            "iscsiadm is not installed on this node (package open-iscsi on Debian, open-iscsi on Alpine, \
             iscsi-initiator-utils on Fedora)"
        );
    }

    #[test]
    fn output_of_both_descriptors_and_exit_code_are_returned() {
        let ended = run("sh", &["-c", "echo a; echo b >&2; exit 3"], LONG, &StopToken::never()).unwrap();
        assert_eq!((ended.code, ended.output.as_str()), (Some(3), "a\nb\n"));
        assert_eq!((ended.is_fine(), ended.status().as_str()), (false, "exit status 3"));
        assert_eq!(clip(&"ö".repeat(1000)).len(), SHOWN_BYTES);
        assert_eq!(clip("a\x1b[31m\nb\n"), "a [31m\nb");
    }

    #[test]
    fn hanging_program_ends_at_its_deadline() {
        let error = run("sleep", &["600"], Duration::from_millis(50), &StopToken::never()).unwrap_err();
        assert!(matches!(error, ToolError::Child(ChildError::Overdue { .. })), "{error}");
    }
}
