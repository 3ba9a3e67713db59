//! Names of entries as paths inside an archive (pure).

/// The name of an entry without `.` and empty parts. `None`: it is absolute or contains `..`.
pub(super) fn clean(name: &str) -> Option<String> {
    join("", name)
}

/// The target of a symbolic link as the name of an entry. `None`: it leads out of the archive.
pub(super) fn link_target(link: &str, target: &str) -> Option<String> {
    let (directory, _) = link.rsplit_once('/').unwrap_or_default();
    join(directory, target)
}

fn join(directory: &str, name: &str) -> Option<String> {
    if name.starts_with('/') {
        return None;
    }
    let mut parts: Vec<&str> = directory.split('/').filter(|part| !part.is_empty()).collect();
    // In the name of an entry, no directory is left for `..`.
    let up = !directory.is_empty();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." if up => drop(parts.pop()?),
            ".." => return None,
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_out_are_refused() {
        for (name, cleaned) in [
            ("./blobs//sha256/x/", Some("blobs/sha256/x")),
            ("index.json", Some("index.json")),
            (".", Some("")),
            ("/index.json", None),
            ("../index.json", None),
            ("a/../index.json", None),
            ("a/..", None),
        ] {
            assert_eq!(clean(name).as_deref(), cleaned, "{name}");
        }
        for (link, target, resolved) in [
            ("b/layer.tar", "../a/layer.tar", Some("a/layer.tar")),
            ("b/layer.tar", "./c.tar", Some("b/c.tar")),
            ("b/layer.tar", "../../a", None),
            ("b/layer.tar", "/etc/passwd", None),
            ("link", "a", Some("a")),
            ("link", "../a", None),
        ] {
            assert_eq!(link_target(link, target).as_deref(), resolved, "{link} {target}");
        }
    }
}
