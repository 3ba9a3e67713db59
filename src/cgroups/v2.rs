//! Cgroups of version 2: one directory, in which the one above enables controllers.

use std::collections::BTreeSet;
use std::path::Path;

use super::dir::{Dir, text};
use super::error::CgroupError;

/// The controllers that a cgroup must have to exist, if the root has them (Go:
/// cgroup_v2_manager `getSupportedUnifiedControllers`).
const NEEDED: [&str; 5] = ["cpu", "cpuset", "memory", "hugetlb", "pids"];
const CONTROLLERS: &str = "cgroup.controllers";
const ENABLED: &str = "cgroup.subtree_control";

fn words(dir: &Dir, file: &'static str, path: &str) -> Result<BTreeSet<String>, CgroupError> {
    let read = dir.read(file).map_err(|source| CgroupError::io("read", format!("{path}/{file}"), source))?;
    Ok(read.unwrap_or_default().split_whitespace().map(str::to_owned).collect())
}

/// The controllers that the cgroup lacks; all, if it does not exist.
pub(super) fn missing(mount: &Path, directories: &[String]) -> Result<Vec<String>, CgroupError> {
    let path = mount.display().to_string();
    let failed = |source| CgroupError::io("open", &path, source);
    let root = Dir::open(mount).map_err(failed)?;
    let all = words(&root, CONTROLLERS, &path)?;
    let mut needed: BTreeSet<String> =
        NEEDED.iter().map(|name| (*name).to_owned()).filter(|name| all.contains(name)).collect();
    if let Some(dir) = root.find(directories).map_err(failed)? {
        let own = words(&dir, CONTROLLERS, &path)?;
        needed.retain(|name| !own.contains(name));
    } else if needed.is_empty() {
        // A machine without controllers: only the directory is needed.
        needed.insert("any".to_owned());
    }
    Ok(needed.into_iter().collect())
}

/// Makes the cgroup and those above it where they are missing, and enables all controllers for it.
/// `own`: so many directories from the root are not this agent's, and are not changed; if one of
/// these does not enable a controller, cgroups below lack it. Returns whether any was made.
///
/// DIFFERS: the Go kubelet also enables controllers above `cgroupRoot`.
pub(super) fn make(mount: &Path, directories: &[String], own: usize) -> Result<bool, CgroupError> {
    let mut path = mount.display().to_string();
    let mut dir = Dir::open(mount).map_err(|source| CgroupError::io("open", &path, source))?;
    let mut made_here: Vec<(Dir, &String)> = Vec::new();
    let mut result = Ok(());
    for (index, name) in directories.iter().enumerate() {
        if index >= own {
            result = enable(&dir, &path);
        }
        path = format!("{path}/{name}");
        let next =
            result.and_then(|()| dir.make(name).map_err(|source| CgroupError::io("make", &path, source)));
        let (child, made) = match next {
            Ok(next) => next,
            Err(error) => {
                result = Err(error);
                break;
            }
        };
        if made {
            made_here.push((dir, name));
        }
        result = check_mode(&child, &path);
        dir = child;
        if result.is_err() {
            break;
        }
    }
    let any = !made_here.is_empty();
    if let Err(error) = result {
        for (parent, name) in made_here.into_iter().rev() {
            // The error that is returned is the reason.
            let _ = text(name).and_then(|name| parent.remove(&name));
        }
        return Err(error);
    }
    Ok(any)
}

/// Enables the controllers of `dir` for the cgroups in it. One that cannot be enabled is left out:
/// the cgroups in it then lack it, which [`missing`] shows.
fn enable(dir: &Dir, path: &str) -> Result<(), CgroupError> {
    let all = words(dir, CONTROLLERS, path)?;
    let enabled: BTreeSet<String> =
        words(dir, ENABLED, path)?.iter().map(|word| word.trim_start_matches('+').to_owned()).collect();
    let more: Vec<String> = all.difference(&enabled).map(|name| format!("+{name}")).collect();
    if more.is_empty() || dir.write(ENABLED, &more.join(" ")).is_ok() {
        return Ok(());
    }
    for controller in more {
        if let Err(error) = dir.write(ENABLED, &controller) {
            log::debug!("cannot write {controller} to {path}/{ENABLED}: {error}");
        }
    }
    Ok(())
}

/// A cgroup below one with processes is `domain invalid`; controllers of memory cannot be used in
/// it, nor in one of threads.
fn check_mode(dir: &Dir, path: &str) -> Result<(), CgroupError> {
    let mode = dir.read("cgroup.type").ok().flatten().unwrap_or_default();
    match mode.trim() {
        "" | "domain" => Ok(()),
        mode => Err(CgroupError::Mode { path: path.to_owned(), mode: mode.to_owned() }),
    }
}
