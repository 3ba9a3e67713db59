//! The node's files with credentials of registries against the kubelet's package credentialprovider:
//! which of several files is used.

use std::path::Path;

use coracle::images::credentials::{SearchDirectories, lookup};
use serde_json::json;

use crate::peer::Peer;
use crate::random::Random;
use crate::{Cases, pick, rarely};

/// In their order, with those of the older format last.
const FILES: [&str; 8] = [
    "root/config.json",
    "work/config.json",
    "home/.docker/config.json",
    "top/.docker/config.json",
    "root/.dockercfg",
    "work/.dockercfg",
    "home/.dockercfg",
    "top/.dockercfg",
];
const IMAGES: [&str; 3] = ["a.example/x", "b.example/x", "busybox"];

/// What is in the place of a file: nothing, these bytes, or something else.
enum FileState {
    Absent,
    Bytes(Vec<u8>),
    Directory,
    /// A link to this file beside it.
    Link(Vec<u8>),
    Dangling,
    /// A file in the place of its directory.
    NoDirectory,
}

/// The content of a file, and what it is for Go: `None` where only coracle does not use it.
fn content(random: &mut Random, user: &str, is_current: bool) -> (Vec<u8>, Option<Vec<u8>>) {
    let mut keys =
        vec![pick(random, &["a.example", "b.example", "https://index.docker.io/v1/", "*.example"])];
    if rarely(random, 3) {
        keys.push("b.example");
    }
    let entries = |good: &[&str], bad: &str| {
        let good =
            good.iter().map(|key| format!("\"{key}\": {{\"username\": \"{user}\", \"password\": \"p\"}}"));
        let all: Vec<String> = good.chain((!bad.is_empty()).then(|| bad.to_owned())).collect();
        format!("{{{}}}", all.join(", "))
    };
    let whole = |entries: String| match is_current {
        true => format!("{{\"auths\": {entries}, \"credsStore\": \"desktop\"}}").into_bytes(),
        false => entries.into_bytes(),
    };
    let text = whole(entries(&keys, ""));
    let same = |bytes: Vec<u8>| (bytes.clone(), Some(bytes));
    match random.below(40) {
        // More than coracle reads, and more entries than it uses.
        0 => ([text, vec![b' '; 1 << 20]].concat(), None),
        1 => {
            let many: Vec<String> = (0..1_001).map(|index| format!("\"r{index}.example\": {{}}")).collect();
            (whole(entries(&keys, &many.join(", "))), None)
        }
        // An entry that is left out here, and for which Go leaves the file out.
        2 => (whole(entries(&keys, "\"c.example\": {\"auth\": \"!\"}")), Some(text)),
        3..6 => same(text[..random.below(text.len() as u64) as usize].to_vec()),
        6..9 => {
            let texts: [&[u8]; 10] = [
                b"",
                b"null",
                b"{}",
                b"[]",
                b" \n",
                b"{\"auths\": null}",
                b"{\"auths\": {}}",
                b"1",
                b"\"x\"",
                b"{} x",
            ];
            same(pick(random, &texts).to_vec())
        }
        9 => same([b"\xef\xbb\xbf".as_slice(), &text].concat()),
        // The other format.
        10 => same(match is_current {
            true => entries(&keys, "").into_bytes(),
            false => format!("{{\"auths\": {}}}", entries(&keys, "")).into_bytes(),
        }),
        _ => same(text),
    }
}

fn put(top: &Path, name: &str, place: &FileState) {
    let path = top.join(name);
    let directory = path.parent().unwrap();
    if matches!(place, FileState::NoDirectory) && directory.ends_with(".docker") {
        std::fs::create_dir_all(directory.parent().unwrap()).unwrap();
        std::fs::write(directory, "").unwrap();
        return;
    }
    std::fs::create_dir_all(directory).unwrap();
    match place {
        FileState::Absent | FileState::NoDirectory => {}
        FileState::Bytes(bytes) => std::fs::write(path, bytes).unwrap(),
        FileState::Directory => std::fs::create_dir(path).unwrap(),
        FileState::Link(bytes) => {
            let target = format!("{}.target", path.file_name().unwrap().display());
            std::fs::write(directory.join(&target), bytes).unwrap();
            std::os::unix::fs::symlink(target, path).unwrap();
        }
        FileState::Dangling => std::os::unix::fs::symlink("absent", path).unwrap(),
    }
}

#[test]
fn files_of_registries_are_searched_as_the_kubelet_does() {
    let (mut cases, mut random) = Cases::new("registry files", 3_000);
    let mut peer = Peer::managers();
    let dir = crate::directory();
    let (here, there) = (dir.path().join("here"), dir.path().join("there"));
    while cases.next() {
        for top in [&here, &there] {
            let _ = std::fs::remove_dir_all(top);
        }
        let (mut shown, mut is_known) = (String::new(), false);
        for (number, name) in FILES.iter().enumerate() {
            let (bytes, of_go) = content(&mut random, &format!("u{number}"), number < 4);
            let (ours, theirs) = match random.below(10) {
                0..6 => (FileState::Absent, FileState::Absent),
                6 if rarely(&mut random, 2) => (FileState::Directory, FileState::Directory),
                6 => (FileState::Dangling, FileState::Dangling),
                7 if rarely(&mut random, 3) => (FileState::NoDirectory, FileState::NoDirectory),
                kind => {
                    is_known |= of_go.as_ref() != Some(&bytes);
                    shown += &format!("{name}: {}\n", bytes[..bytes.len().min(200)].escape_ascii());
                    let place =
                        |bytes| if kind == 7 { FileState::Link(bytes) } else { FileState::Bytes(bytes) };
                    (place(bytes), of_go.map_or(FileState::Absent, place))
                }
            };
            put(&here, name, &ours);
            put(&there, name, &theirs);
        }
        let theirs = peer.ask(&json!({"ask": "registry files", "dir": there, "images": IMAGES}));
        let theirs: Vec<Vec<String>> = serde_json::from_value(theirs).unwrap();
        let directories = ["root", "work", "home", "top"].map(|name| here.join(name));
        let index = SearchDirectories {
            root_dir: &directories[0],
            working: &directories[1],
            home: &directories[2],
            top: &directories[3],
        }
        .read();
        let ours = IMAGES
            .map(|image| lookup(&index, image).into_iter().map(|found| found.username).collect::<Vec<_>>());
        match ours.as_slice() == theirs {
            false => cases.differs(&format!("{ours:?}, in Go {theirs:?}:\n{shown}")),
            true if is_known => cases.count("a file that only one of them can use"),
            true if index.is_empty() => cases.count("no credentials for both"),
            true => cases.count("read alike"),
        }
    }
    cases.end("read alike", 3);
}
