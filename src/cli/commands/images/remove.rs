//! `coracle images rm`: removes an archive, which releases its images.

use std::path::{Path, PathBuf};

use crate::cli::commands::client::Client;
use crate::cli::commands::console::Console;
use crate::cli::commands::error::{Outcome, print_stderr};
use crate::cli::exit::Exit;
use crate::images::ArchiveSetReport;
use crate::model::image_name;
use crate::util::untrusted;

pub(super) fn run(client: &Client, console: &mut Console<'_>, name: &str) -> Outcome {
    let report: ArchiveSetReport = client.get("/v1/images/set")?;
    let (archive, images) = match find(&report, name) {
        Ok(found) => found,
        Err(reason) => {
            print_stderr(&reason);
            return Ok(Exit::NotFound);
        }
    };
    if let Err(reason) = remove(&archive) {
        print_stderr(&reason);
        return Ok(Exit::Failure);
    }
    console.line(0, &format!("removed {}", archive.display()))?;
    for image in images {
        console.line(0, &format!("released {image}: it may be removed when disk space is short"))?;
    }
    console.out.flush()?;
    let _: ArchiveSetReport = client.post("/v1/images/rescan")?;
    Ok(Exit::Success)
}

/// The archive of this path, file name or image, and the names of its images.
fn find(report: &ArchiveSetReport, name: &str) -> Result<(PathBuf, Vec<String>), String> {
    let images_of = |path: &str| -> Vec<String> {
        let own = report.images.iter().filter(|image| image.archive == path);
        own.map(|image| image.name.clone()).collect()
    };
    let is_named = |path: &str| path == name || Path::new(path).file_name().is_some_and(|file| file == name);
    let archives: Vec<&str> =
        report.archives.iter().map(|archive| archive.path.as_str()).filter(|path| is_named(path)).collect();
    if let [path] = archives[..] {
        return Ok((PathBuf::from(path), images_of(path)));
    }
    if !archives.is_empty() {
        return Err(format!("{name} is in several directories: name one of {}", archives.join(", ")));
    }
    let full = image_name::normalized(name).unwrap_or_else(|_| name.to_owned());
    let Some(image) = report.images.iter().find(|image| image.name == full) else {
        return Err(format!("no archive and no image of an archive has the name {name}"));
    };
    let images = images_of(&image.archive);
    if let [_] = images[..] {
        return Ok((PathBuf::from(&image.archive), images));
    }
    let others: Vec<&str> = images.iter().filter(|other| **other != full).map(String::as_str).collect();
    Err(format!(
        "{} also has {}: name the archive to remove all of its images",
        image.archive,
        others.join(", ")
    ))
}

fn remove(archive: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| {
        let reason = match error.kind() {
            std::io::ErrorKind::ReadOnlyFilesystem => "its directory is read-only".to_owned(),
            _ => error.to_string(),
        };
        format!("cannot remove {}: {reason}", archive.display())
    };
    let about = std::fs::symlink_metadata(archive).map_err(failed)?;
    if about.is_dir() {
        return Err(format!("{0} is a directory: remove it with rm -r {0}", archive.display()));
    }
    let directory = archive.parent().unwrap_or(Path::new("/"));
    std::fs::remove_file(archive).map_err(failed)?;
    // The removal survives a loss of power.
    let directory = untrusted::directory(directory, 0).map_err(failed)?;
    rustix::fs::fsync(&directory).map_err(|error| failed(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::{ArchiveReport, SetImageReport};

    fn report() -> ArchiveSetReport {
        let archive = |path: &str| ArchiveReport { path: path.into(), ..ArchiveReport::default() };
        let image = |name: &str, path: &str| SetImageReport {
            name: name.into(),
            archive: path.into(),
            ..SetImageReport::default()
        };
        ArchiveSetReport {
            archives: ["/i/one.tar", "/i/two.tar", "/i/same.tar", "/j/same.tar"].map(archive).to_vec(),
            images: vec![
                image("docker.io/library/one:1", "/i/one.tar"),
                image("r.example/a:1", "/i/two.tar"),
                image("r.example/b:1", "/i/two.tar"),
            ],
            ..ArchiveSetReport::default()
        }
    }

    #[test]
    fn archive_is_found_by_path_file_name_and_only_image() {
        let found =
            |name: &str| find(&report(), name).map(|(path, images)| (path.display().to_string(), images));
        let only = ("/i/one.tar".to_owned(), vec!["docker.io/library/one:1".to_owned()]);
        for name in ["/i/one.tar", "one.tar", "docker.io/library/one:1", "one:1"] {
            assert_eq!(found(name), Ok(only.clone()), "{name}");
        }
        assert_eq!(found("two.tar").unwrap().1, ["r.example/a:1", "r.example/b:1"]);
        assert!(found("r.example/a:1").unwrap_err().contains("two.tar also has r.example/b:1"));
        assert!(found("same.tar").unwrap_err().contains("/i/same.tar, /j/same.tar"));
        assert_eq!(found("/j/same.tar").unwrap().1, [""; 0]);
        assert!(found("three.tar").unwrap_err().contains("three.tar"));
    }

    #[test]
    fn only_files_that_exist_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.tar");
        std::fs::write(&file, "x").unwrap();
        remove(&file).unwrap();
        assert!(!file.exists() && remove(&file).unwrap_err().contains("a.tar"));
        assert!(remove(dir.path()).unwrap_err().contains("rm -r"));
        assert!(remove(Path::new("/proc/version")).unwrap_err().starts_with("cannot remove /proc/version: "));
    }
}
