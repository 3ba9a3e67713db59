//! Paths in a kubeconfig.

use std::path::{Component, Path, PathBuf};

/// The place of a path in a directory, which is an absolute path itself. A relative path is shortened
/// without regard to links: `link/../ca.crt` is `ca.crt`, wherever `link` leads (Go: clientcmd
/// `ResolvePaths`, with `filepath.Join`).
pub(super) fn resolve(directory: &Path, path: &str) -> PathBuf {
    if path.starts_with('/') {
        return path.into();
    }
    let mut short = PathBuf::new();
    for part in directory.join(path).components() {
        match part {
            Component::CurDir => {}
            // Above the root is the root.
            Component::ParentDir => drop(short.pop()),
            part => short.push(part),
        }
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_are_shortened_and_absolute_ones_stay() {
        for (directory, path, expected) in [
            ("/etc/kubernetes", "pki/../ca.crt", "/etc/kubernetes/ca.crt"),
            ("/etc/kubernetes", "../pki//./ca.crt", "/etc/pki/ca.crt"),
            ("/etc/a/../b/.", "../../../../ca.crt", "/ca.crt"),
            ("/etc", "/a/../b", "/a/../b"),
        ] {
            assert_eq!(resolve(Path::new(directory), path), Path::new(expected), "{path}");
        }
    }
}
