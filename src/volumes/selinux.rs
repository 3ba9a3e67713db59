//! The SELinux label of a volume that is mounted with it (Go: pkg/volume/util/selinux.go, and
//! go-selinux for the files of the policy). The labels of all volumes of the node are in `selinux_labels`.
//!
//! A volume gets a label only on a node that uses SELinux, and only if the pod names the level: else
//! the runtime chooses a level for each pod, which is not known before.

use std::collections::BTreeSet;
use std::path::Path;

use crate::model::api::{Container, SELinuxOptions};
use crate::model::pod::Pod;
use crate::util::{clip, untrusted};

/// The largest file of the policy that is read.
const MAX_FILE: u64 = 1 << 20;
/// The longest text about the labels of a pod, in bytes.
const MAX_TEXT: usize = 1024;
/// The policy of a node whose configuration does not name one.
const DEFAULT_POLICY: &str = "targeted";

/// The longest label that is used, in bytes: the kernel takes no longer options of a mount.
const MAX_LABEL: usize = 4096;
/// The number of categories that a policy may have here; usual policies have 1024.
const MAX_CATEGORIES: u16 = 4096;

/// The label of files of containers in the policy of this node, without a pod's options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileContext {
    user: String,
    role: String,
    kind: String,
}

/// What the pod's containers want of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodSelinuxLabels {
    /// The labels of the containers that mount the volume, at most one of which can be used.
    labels: BTreeSet<String>,
    /// `seLinuxChangePolicy: Recursive`: the runtime changes the labels of all files, and the volume is
    /// mounted with none.
    is_recursive: bool,
}

impl PodSelinuxLabels {
    /// The label of the containers; `None`: they name none.
    ///
    /// # Errors
    /// If they need different ones.
    pub(super) fn single(&self) -> Result<Option<&str>, SelinuxLabelError> {
        let mut labels = self.labels.iter();
        match (labels.next(), labels.next()) {
            (first, None) => Ok(first.map(String::as_str)),
            _ => {
                let all: Vec<&str> = self.labels.iter().map(String::as_str).collect();
                // No API server checks what a pod writes into its options.
                Err(SelinuxLabelError::Several { labels: clip::line(&all.join(","), MAX_TEXT) })
            }
        }
    }

    /// The label to mount with; empty: none.
    ///
    /// # Errors
    /// If containers need different ones, also if none is used. A label that would end the option of the
    /// mount that contains it, or that no mount takes because of its length, is refused.
    pub(super) fn to_mount_with(&self) -> Result<&str, SelinuxLabelError> {
        let label = self.single()?.filter(|_| !self.is_recursive).unwrap_or_default();
        let is_plain = |character: char| character.is_ascii_alphanumeric() || "_:,.-".contains(character);
        // A record with a much longer label counts as damaged: no volume of the node is unstaged then.
        if label.len() <= MAX_LABEL && label.chars().all(is_plain) {
            Ok(label)
        } else {
            Err(SelinuxLabelError::Invalid { label: clip::beginning(label, MAX_TEXT).to_owned() })
        }
    }

    #[cfg(test)]
    pub(super) fn with_label(label: &str) -> PodSelinuxLabels {
        [label].into_iter().collect()
    }
}

#[cfg(test)]
impl<'a> FromIterator<&'a str> for PodSelinuxLabels {
    fn from_iter<T: IntoIterator<Item = &'a str>>(labels: T) -> PodSelinuxLabels {
        PodSelinuxLabels { labels: labels.into_iter().map(str::to_owned).collect(), is_recursive: false }
    }
}

/// Why a pod cannot have a volume with its label (Go: pkg/kubelet/volumemanager/cache).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelinuxLabelError {
    /// Containers of the pod need different labels.
    #[error("multiple SELinux labels found: {labels}")]
    Several {
        /// The labels, with commas between them, clipped and on one line.
        labels: String,
    },
    /// The label contains a character that no label has, or is too long.
    #[error("the SELinux label {label:?} cannot be an option of a mount")]
    Invalid {
        /// The label, clipped.
        label: String,
    },
    /// Another pod of this node uses the volume with another label, or with none.
    #[error("conflicting SELinux labels of volume {volume}: {present:?} and {wanted:?}")]
    Conflict {
        /// The name of the persistent volume.
        volume: String,
        /// The label of the other pod; empty: none.
        present: String,
        /// The label of this pod; empty: none.
        wanted: String,
    },
    /// The volume is still mounted with another label, or with none.
    #[error(
        "waiting for unmount of volume {volume:?}, because it is already mounted to a different pod with a \
         different SELinux label"
    )]
    Mounted {
        /// The name of the volume on this node.
        volume: String,
    },
}

impl FileContext {
    /// Of the node whose files are below `root`; `None`: it does not use SELinux, or its policy has no
    /// label for containers.
    pub(crate) fn read(root: &Path) -> Option<FileContext> {
        if !root.join("sys/fs/selinux/enforce").exists() {
            return None;
        }
        let shared = text(&root.join("usr/share/containers/selinux/contexts"));
        let contexts = shared.or_else(|| {
            let config = text(&root.join("etc/selinux/config")).unwrap_or_default();
            let name = policy(&config).filter(|name| !name.contains('/') && *name != "..");
            let dir = root.join("etc/selinux").join(name.unwrap_or(DEFAULT_POLICY));
            text(&dir.join("contexts/lxc_contexts"))
        });
        parse(&contexts?)
    }

    #[cfg(test)]
    pub(super) fn for_tests() -> FileContext {
        let [user, role, kind] = ["system_u", "object_r", "container_file_t"].map(str::to_owned);
        FileContext { user, role, kind }
    }

    /// The label with a pod's options. As with the runtime, role and type of files are the policy's.
    fn with(&self, options: &SELinuxOptions) -> Option<String> {
        let level = options.level.as_deref().filter(|level| !level.is_empty())?;
        let user = options.user.as_deref().filter(|user| !user.is_empty()).unwrap_or(&self.user);
        Some(format!("{user}:{}:{}:{level}", self.role, self.kind))
    }
}

/// Whether the kernel takes both for one label: it writes the categories of a level in its own way, such as
/// `c1.c3` for `c3,c1,c2`.
pub(super) fn is_same_label(left: &str, right: &str) -> bool {
    left == right || parsed(left).is_some_and(|left| Some(left) == parsed(right))
}

/// A sensitivity and its categories.
type Level<'a> = (&'a str, BTreeSet<u16>);

/// The label without its level, and both ends of the level.
fn parsed(label: &str) -> Option<(&str, Level<'_>, Level<'_>)> {
    if label.len() > MAX_LABEL {
        return None;
    }
    let (end, _) = label.match_indices(':').nth(2)?;
    let (context, levels) = (label.get(..end)?, label.get(end + 1..)?);
    let (low, high) = levels.split_once('-').unwrap_or((levels, levels));
    Some((context, level(low)?, level(high)?))
}

fn level(text: &str) -> Option<Level<'_>> {
    let (sensitivity, categories) = text.split_once(':').unwrap_or((text, ""));
    let number = |name: &str| {
        let number: u16 = name.strip_prefix('c')?.parse().ok()?;
        (number < MAX_CATEGORIES).then_some(number)
    };
    let mut all = BTreeSet::new();
    for part in categories.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('.').unwrap_or((part, part));
        all.extend(number(first)?..=number(last)?);
    }
    Some((sensitivity, all))
}

fn text(path: &Path) -> Option<String> {
    String::from_utf8(untrusted::read_own(path, MAX_FILE).ok()?).ok()
}

/// The values of lines such as `NAME = "value"`.
fn values<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.trim().split_once('=')?;
        let value = value.trim().trim_matches('"');
        (key.trim() == name && !value.is_empty()).then_some(value)
    })
}

/// The policy's name in `/etc/selinux/config`.
fn policy(config: &str) -> Option<&str> {
    values(config, "SELINUXTYPE")
}

/// The label of files in `lxc_contexts`.
fn parse(contexts: &str) -> Option<FileContext> {
    let mut parts = values(contexts, "file")?.splitn(4, ':').map(str::to_owned);
    Some(FileContext { user: parts.next()?, role: parts.next()?, kind: parts.next()? })
}

/// The labels for a volume of a pod.
pub(super) fn labels(pod: &Pod, volume: &str, context: Option<&FileContext>) -> PodSelinuxLabels {
    let Some(context) = context else { return PodSelinuxLabels::default() };
    let shared = pod.spec().security_context.as_ref();
    let of_pod = shared.and_then(|context| context.se_linux_options.as_ref());
    let policy = shared.and_then(|context| context.se_linux_change_policy.as_deref());
    let ephemeral = pod.ephemeral_containers();
    let mounts =
        |container: &&Container| container.volume_mounts.iter().flatten().any(|mount| mount.name == volume);
    let label = |container: &Container| {
        let own = container.security_context.as_ref().and_then(|context| context.se_linux_options.as_ref());
        context.with(own.or(of_pod)?)
    };
    PodSelinuxLabels {
        labels: pod.all_containers().chain(&ephemeral).filter(mounts).filter_map(label).collect(),
        is_recursive: policy == Some("Recursive"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    const CONTEXTS: &str = "process = \"system_u:system_r:container_t:s0\"\ncontent = \"x\"\n\
                            file = \"system_u:object_r:container_file_t:s0\"\n";

    fn pod(of_pod: Value, containers: &[(Value, &str)]) -> Pod {
        let containers = containers.iter().map(|(options, volume)| {
            json!({"name": "c", "securityContext": {"seLinuxOptions": options},
                "volumeMounts": [{"name": volume, "mountPath": "/v"}]})
        });
        let value = json!({"metadata": {"name": "p", "uid": "u"}, "spec": {
            "securityContext": {"seLinuxOptions": of_pod}, "containers": containers.collect::<Vec<_>>()}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
    }

    #[test]
    fn label_is_of_the_policy_with_the_level_of_the_pod() {
        let context = parse(CONTEXTS).unwrap();
        let level = json!({"level": "s0:c1,c2", "type": "spc_t"});
        let own = json!({"user": "u_u", "level": "s0:c3"});
        let plain = "system_u:object_r:container_file_t:s0:c1,c2";
        for (of_pod, containers, expected) in [
            (level.clone(), vec![(Value::Null, "v")], Ok(Some(plain))),
            (level.clone(), vec![(own.clone(), "other")], Ok(None)),
            (Value::Null, vec![(own.clone(), "v")], Ok(Some("u_u:object_r:container_file_t:s0:c3"))),
            (json!({"type": "x"}), vec![(Value::Null, "v")], Ok(None)),
            (Value::Null, vec![(Value::Null, "v")], Ok(None)),
            (level.clone(), vec![(Value::Null, "v"), (Value::Null, "v")], Ok(Some(plain))),
            (level, vec![(Value::Null, "v"), (own, "v")], Err(())),
        ] {
            let labels = labels(&pod(of_pod, &containers), "v", Some(&context));
            let single = labels.single().map_err(|error| {
                let plain = "system_u:object_r:container_file_t:s0:c1,c2,u_u:object_r:container_file_t:s0:c3";
                assert_eq!(error.to_string(), format!("multiple SELinux labels found: {plain}"));
            });
            assert_eq!(single, expected);
        }
        let pod = pod(json!({"level": "s0"}), &[(Value::Null, "v")]);
        assert_eq!(labels(&pod, "v", None), PodSelinuxLabels::default());
    }

    #[test]
    fn error_about_several_labels_is_one_line_of_limited_length() {
        let long = "c".repeat(2 * MAX_TEXT);
        let labels: PodSelinuxLabels =
            ["u:r:t:s0\n2026-01-01 ERROR forged", long.as_str()].into_iter().collect();
        let text = labels.single().unwrap_err().to_string();
        assert!(!text.contains(char::is_control) && text.len() < MAX_TEXT + 100, "{text:?}");
    }

    /// Its record was longer than those that are read, and counted as damaged after a restart.
    #[test]
    fn label_that_no_mount_takes_is_refused_with_a_text_of_limited_length() {
        let longest = "c".repeat(MAX_LABEL);
        assert_eq!(PodSelinuxLabels::with_label(&longest).to_mount_with(), Ok(longest.as_str()));
        let error = PodSelinuxLabels::with_label(&"c".repeat(MAX_LABEL + 1)).to_mount_with().unwrap_err();
        assert!(matches!(error, SelinuxLabelError::Invalid { .. }));
        assert!(error.to_string().len() < MAX_TEXT + 100, "{error}");
    }

    #[test]
    fn pod_with_recursive_change_of_labels_mounts_without_a_label() {
        let context = parse(CONTEXTS).unwrap();
        let with_policy = |policy: &str| {
            let value = json!({"metadata": {"name": "p", "uid": "u"}, "spec": {
                "securityContext": {"seLinuxOptions": {"level": "s0:c1"}, "seLinuxChangePolicy": policy},
                "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]}});
            let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap());
            labels(&pod, "v", Some(&context))
        };
        let label = "system_u:object_r:container_file_t:s0:c1";
        assert_eq!(with_policy("MountOption").to_mount_with(), Ok(label));
        assert_eq!(with_policy("Recursive").to_mount_with(), Ok(""));
        // The containers must agree all the same.
        assert_eq!(with_policy("Recursive").single(), Ok(Some(label)));
    }

    #[test]
    fn policy_is_read_only_if_the_node_uses_selinux() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("etc/selinux/strict/contexts/lxc_contexts", CONTEXTS);
        write("etc/selinux/config", "# comment\nSELINUX=enforcing\nSELINUXTYPE=strict\n");
        assert_eq!(FileContext::read(root.path()), None);
        write("sys/fs/selinux/enforce", "1");
        assert_eq!(FileContext::read(root.path()), parse(CONTEXTS));
        write("etc/selinux/config", "SELINUXTYPE=../strict\n");
        assert_eq!(FileContext::read(root.path()), None);
        write("usr/share/containers/selinux/contexts", &CONTEXTS.replace("container_file_t", "own_t"));
        assert_eq!(FileContext::read(root.path()).unwrap().kind, "own_t");
    }

    #[test]
    fn labels_are_compared_as_the_kernel_writes_them() {
        for (left, right, expected) in [
            ("u:r:t:s0:c1,c2", "u:r:t:s0:c2,c1", true),
            ("u:r:t:s0:c1.c3", "u:r:t:s0:c3,c1,c2", true),
            ("u:r:t:s0-s0", "u:r:t:s0", true),
            ("u:r:t:s0:c1-s0:c1", "u:r:t:s0:c1", true),
            ("u:r:t:s0:c1", "u:r:t:s0:c2", false),
            ("u:r:t:s0:c1", "u:r:t:s1:c1", false),
            ("u:r:t:s0:c1", "u:r:x:s0:c1", false),
            ("u:r:t:s0-s0:c1", "u:r:t:s0:c1", false),
            ("u:r:t:s0:c1", "", false),
            ("", "", true),
            ("u:r:t:s0:x", "u:r:t:s0:y", false),
            ("u:r:t:s0:c0.c65535", "u:r:t:s0:c0.c65534", false),
        ] {
            assert_eq!(is_same_label(left, right), expected, "{left} {right}");
        }
    }

    proptest! {
        #[test]
        fn no_file_of_a_policy_makes_it_panic(text: String) {
            let _ = (parse(&text), policy(&text));
            let _ = parse(&format!("file = {text}"));
            let _ = is_same_label(&text, &format!("u:r:t:{text}"));
        }
    }
}
