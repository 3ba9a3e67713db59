//! What the kinds of volumes need from the node: programs, mounts, sysfs. A trait, so that tests
//! compare the commands and need no devices.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::super::error::{ToolError, VolumeError};
use super::super::mounts::{self, Mount};
use super::super::unmount;
use super::tools::{self, ProgramOutput};
use crate::util::stop::{StopToken, Waited};

/// The node.
pub(super) trait Host: Send + Sync {
    /// Runs a helper program until its end.
    fn run(
        &self,
        program: &str,
        args: &[&str],
        time: Duration,
        stop: &StopToken,
    ) -> Result<ProgramOutput, ToolError>;

    /// The mount table.
    fn mounts(&self) -> Result<Vec<Mount>, VolumeError>;

    /// Bind-mounts `source` at `target`, with these options and those of the mount of `source`.
    fn bind(&self, source: &Path, target: &Path, options: &[String]) -> Result<(), VolumeError>;

    /// Removes the mount at `target`.
    fn unmount(&self, target: &Path, is_remote: bool) -> Result<(), VolumeError>;

    /// `major:minor` of a block device; `None`: it is another kind of file.
    fn device_number(&self, device: &Path) -> std::io::Result<Option<String>>;

    /// The SELinux label that the file system at this mount point was mounted with; empty: none, also if
    /// nothing is mounted there.
    fn label_at(&self, path: &Path) -> Result<String, VolumeError>;

    /// The directory that contains `dev` and `sys`: `/` except in tests.
    fn root(&self) -> &Path;

    /// Waits. Ends with an error when the agent stops.
    fn pause(&self, time: Duration, stop: &StopToken) -> Result<(), VolumeError> {
        match stop.wait(time) {
            Waited::TimedOut => Ok(()),
            Waited::Stopped => Err(VolumeError::Stopping),
        }
    }
}

/// The node that this process runs on.
#[derive(Debug, Default)]
pub(super) struct RealHost;

impl Host for RealHost {
    fn run(
        &self,
        program: &str,
        args: &[&str],
        time: Duration,
        stop: &StopToken,
    ) -> Result<ProgramOutput, ToolError> {
        tools::run(program, args, time, stop)
    }

    fn mounts(&self) -> Result<Vec<Mount>, VolumeError> {
        mounts::table()
    }

    fn bind(&self, source: &Path, target: &Path, options: &[String]) -> Result<(), VolumeError> {
        mounts::bind(source, target, options)
    }

    fn unmount(&self, target: &Path, is_remote: bool) -> Result<(), VolumeError> {
        unmount::unmount_own(target, is_remote)
    }

    fn device_number(&self, device: &Path) -> std::io::Result<Option<String>> {
        let metadata = std::fs::metadata(device)?;
        let number = metadata.rdev();
        let text = || format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        Ok(metadata.file_type().is_block_device().then(text))
    }

    fn label_at(&self, path: &Path) -> Result<String, VolumeError> {
        mounts::label_at(path)
    }

    fn root(&self) -> &Path {
        Path::new("/")
    }
}

/// The mount on top of `path`, if `path` is a mount point.
pub(super) fn mount_at<'a>(table: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    table.iter().rev().find(|mount| mount.point == path)
}

/// A path below the host's root.
pub(super) fn below(host: &dyn Host, path: &str) -> PathBuf {
    host.root().join(path.trim_start_matches('/'))
}

#[cfg(test)]
pub(super) mod fake {
    //! A node that only records.

    use super::*;
    use std::collections::{HashMap, VecDeque};
    use std::sync::Mutex;

    type CommandResult = (String, Result<ProgramOutput, ToolError>);

    /// Records commands and answers them from a list; each unlisted command succeeds.
    #[derive(Default)]
    pub(in super::super) struct FakeHost {
        pub(in super::super) root: PathBuf,
        log: Mutex<Vec<String>>,
        responses: Mutex<VecDeque<CommandResult>>,
        table: Mutex<Vec<Mount>>,
        instead: Mutex<Option<(String, String)>>,
        labels: Mutex<HashMap<PathBuf, String>>,
    }

    impl FakeHost {
        /// A node whose `/dev` and `/sys` are in `root`.
        pub(in super::super) fn new(root: &Path) -> FakeHost {
            FakeHost { root: root.to_owned(), ..FakeHost::default() }
        }

        /// The answer to the next command that begins with `prefix`.
        pub(in super::super) fn respond(&self, prefix: &str, code: i32, output: &str) {
            let ended = ProgramOutput { code: Some(code), output: output.to_owned() };
            self.responses.lock().unwrap().push_back((prefix.to_owned(), Ok(ended)));
        }

        /// The next command that begins with `prefix` has no program.
        pub(in super::super) fn set_missing(&self, prefix: &str) {
            let program = prefix.split(' ').next().unwrap_or_default().to_owned();
            let result = (prefix.to_owned(), Err(tools::missing(&program)));
            self.responses.lock().unwrap().push_back(result);
        }

        /// The commands so far; the record is emptied.
        pub(in super::super) fn log(&self) -> Vec<String> {
            std::mem::take(&mut *self.log.lock().unwrap())
        }

        pub(in super::super) fn mounted(&self, source: &str, point: &Path, kind: &str) {
            self.table.lock().unwrap().push(Mount {
                point: point.to_owned(),
                root: PathBuf::from("/"),
                device: source.to_owned(),
                kind: kind.to_owned(),
                source: source.to_owned(),
            });
        }

        /// The next mount has this device and type; empty: it does not appear.
        pub(in super::super) fn mounts_instead(&self, device: &str, kind: &str) {
            *self.instead.lock().unwrap() = Some((device.to_owned(), kind.to_owned()));
        }

        /// What is mounted there has this label.
        pub(in super::super) fn set_label(&self, point: &Path, label: &str) {
            self.labels.lock().unwrap().insert(point.to_owned(), label.to_owned());
        }

        fn note(&self, text: String) {
            self.log.lock().unwrap().push(text);
        }
    }

    impl Host for FakeHost {
        fn run(
            &self,
            program: &str,
            args: &[&str],
            _: Duration,
            stop: &StopToken,
        ) -> Result<ProgramOutput, ToolError> {
            let line = format!("{program} {}", args.join(" "));
            self.note(line.clone());
            if stop.is_stopped() {
                let program = program.to_owned();
                return Err(ToolError::Child(crate::util::child::ChildError::Stopped { program }));
            }
            let mut responses = self.responses.lock().unwrap();
            let index = responses.iter().position(|(prefix, _)| line.starts_with(prefix.as_str()));
            let result = index.and_then(|index| responses.remove(index)).map(|(_, result)| result);
            let result = result.unwrap_or(Ok(ProgramOutput { code: Some(0), output: String::new() }));
            if program == "mount"
                && let [.., target] = args
                && let Some((_, rest)) = line.split_once("context=\"")
                && let Some((label, _)) = rest.split_once('"')
            {
                self.labels.lock().unwrap().insert(PathBuf::from(target), label.to_owned());
            }
            if program == "mount"
                && result.as_ref().is_ok_and(ProgramOutput::is_fine)
                && let [.., source, target] = args
            {
                let kind = args.iter().position(|arg| *arg == "-t").and_then(|index| args.get(index + 1));
                match self.instead.lock().unwrap().take() {
                    Some((device, _)) if device.is_empty() => {}
                    Some((device, kind)) => self.mounted(&device, Path::new(target), &kind),
                    None => self.mounted(source, Path::new(target), kind.unwrap_or(&"auto")),
                }
            }
            result
        }

        fn mounts(&self) -> Result<Vec<Mount>, VolumeError> {
            Ok(self.table.lock().unwrap().clone())
        }

        fn bind(&self, source: &Path, target: &Path, options: &[String]) -> Result<(), VolumeError> {
            let text = format!("bind {} {} {}", source.display(), target.display(), options.join(","));
            self.note(text.trim_end().to_owned());
            let device = self.table.lock().unwrap().iter().rev().find(|mount| mount.point == source).cloned();
            let device = device.map_or_else(|| source.display().to_string(), |mount| mount.device);
            self.mounted(&device, target, "none");
            let mut labels = self.labels.lock().unwrap();
            if let Some(label) = labels.get(source).cloned() {
                labels.insert(target.to_owned(), label);
            }
            Ok(())
        }

        fn unmount(&self, target: &Path, is_remote: bool) -> Result<(), VolumeError> {
            let suffix = if is_remote { " remote" } else { "" };
            self.note(format!("umount {}{suffix}", target.display()));
            self.table.lock().unwrap().retain(|mount| mount.point != target);
            self.labels.lock().unwrap().remove(target);
            Ok(())
        }

        fn device_number(&self, device: &Path) -> std::io::Result<Option<String>> {
            Ok(Some(device.display().to_string()))
        }

        fn label_at(&self, path: &Path) -> Result<String, VolumeError> {
            Ok(self.labels.lock().unwrap().get(path).cloned().unwrap_or_default())
        }

        fn root(&self) -> &Path {
            &self.root
        }

        fn pause(&self, time: Duration, stop: &StopToken) -> Result<(), VolumeError> {
            self.note(format!("wait {time:?}"));
            if stop.is_stopped() { Err(VolumeError::Stopping) } else { Ok(()) }
        }
    }
}
