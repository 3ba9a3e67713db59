//! Texts of the kernel against the kubelet's readers: the table of mounts, lists of CPUs.

use coracle::placement::cpus::CpuSet;
use coracle::volumes::table_of;
use serde_json::json;

use crate::peer::Peer;
use crate::random::Random;
use crate::{Cases, mutate_text, pick, rarely};

const ROOTS: [&str; 8] = ["/", "/", "/", "/@/var", "/a\\040b", "net:[4026531840]", "/..", "//deleted"];
const POINTS: [&str; 12] = [
    "/",
    "/proc",
    "/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/v",
    "/mnt/a\\040b",
    "/mnt/a\\011b",
    "/mnt/a\\012b",
    "/mnt/a\\134b",
    "/mnt/\\043",
    "/mnt/\u{e9}",
    "/mnt/-",
    "/mnt/a,b",
    "/mnt/\"a",
];
const OPTIONAL: [&str; 8] =
    ["", "", "shared:1 ", "master:2 ", "shared:1 master:2 ", "propagate_from:3 ", "unbindable ", "new:x:y "];
const KINDS: [&str; 8] = ["ext4", "tmpfs", "nfs4", "overlay", "fuse.sshfs", "cgroup2", "fuse", "btrfs"];
const SOURCES: [&str; 12] = [
    "/dev/sda1",
    "tmpfs",
    "none",
    "server:/export",
    "server:/a\\040b",
    "[fd00::1]:/x",
    "-",
    "",
    "/dev/mapper/a-b",
    "\\134\\134h\\134s",
    "overlay",
    "\u{e9}",
];
const OPTIONS: [&str; 6] =
    ["rw", "ro,relatime", "rw,size=65536k", "rw,lowerdir=/a:/b", "rw,x=\"a,b\"", "rw,vers=4.2"];

fn mount(random: &mut Random) -> String {
    format!(
        "{} {} {}:{} {} {} {} {}- {} {} {}\n",
        random.below(3000),
        random.below(3000),
        pick(random, &["0", "8", "259", "254"]),
        random.below(300),
        pick(random, &ROOTS),
        pick(random, &POINTS),
        pick(random, &OPTIONS),
        pick(random, &OPTIONAL),
        pick(random, &KINDS),
        pick(random, &SOURCES),
        pick(random, &OPTIONS)
    )
}

/// The Go kubelet does not decode the kernel's escapes, and refuses a table with a source that is empty.
#[test]
fn table_of_mounts_equals_that_of_mount_utils() {
    let (mut cases, mut random) = Cases::new("mountinfo", 15_000);
    let mut peer = Peer::managers();
    let place = tempfile::NamedTempFile::new().unwrap();
    while cases.next() {
        let mut text: String = (0..random.below(6)).map(|_| mount(&mut random)).collect();
        if rarely(&mut random, 8) {
            text.pop();
        }
        std::fs::write(place.path(), &text).unwrap();
        let theirs = peer.ask(&json!({"ask": "mounts", "file": place.path()}));
        let table = table_of(text.as_bytes());
        assert_eq!(table.len(), text.lines().count(), "{text}");
        if theirs["ok"] != true {
            match text.contains("  ") {
                true => cases.count("an empty source, refused by Go"),
                false => cases.differs(&format!("refused by Go only: {theirs} {text}")),
            }
            continue;
        }
        let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
        let ours: Vec<Vec<String>> = table
            .into_iter()
            .map(|mount| vec![mount.device, path(&mount.root), path(&mount.point), mount.kind, mount.source])
            .collect();
        let read: Vec<Vec<String>> = serde_json::from_value(theirs["lines"].clone()).unwrap();
        let decoded = |text: &String| {
            let mut text = text.clone();
            for (escape, byte) in
                [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\043", "#"), ("\\134", "\\")]
            {
                text = text.replace(escape, byte);
            }
            text
        };
        let plain: Vec<Vec<String>> = read.iter().map(|line| line.iter().map(decoded).collect()).collect();
        match (ours == plain, plain == read) {
            (true, true) => cases.count("read alike"),
            (true, false) => cases.count("escapes, decoded here only"),
            (false, _) => cases.differs(&format!("{ours:?}, in Go {read:?}: {text}")),
        }
    }
    cases.end("read alike", 6);
}

fn list(random: &mut Random) -> String {
    let number = |random: &mut Random| match random.below(60) {
        0 => pick(random, &["", "-1", "+1", " 1", "x", "01", "0x1", "4096", "99999999999"]).to_owned(),
        _ => random.below(130).to_string(),
    };
    let part = |random: &mut Random| match random.below(3) {
        0 => {
            let first = random.below(128);
            let last = if rarely(random, 20) { first.saturating_sub(1) } else { first + random.below(20) };
            format!("{first}-{last}")
        }
        1 if rarely(random, 20) => format!("{}-{}-{}", number(random), number(random), number(random)),
        _ => number(random),
    };
    let parts: Vec<String> = (0..random.below(6)).map(|_| part(random)).collect();
    let mut text = parts.join(",");
    if rarely(random, 20) {
        text = mutate_text(random, text);
    }
    text
}

#[test]
fn lists_of_cpus_equal_those_of_cpuset() {
    let (mut cases, mut random) = Cases::new("lists of CPUs", 20_000);
    let mut peer = Peer::managers();
    while cases.next() {
        let text = list(&mut random);
        // Go adds each CPU of a range.
        if text.split(|character: char| !character.is_ascii_digit()).any(|digits| digits.len() > 6) {
            continue;
        }
        let theirs = peer.ask(&json!({"ask": "cpu lists", "text": text}));
        let value = theirs["text"].as_str();
        match (CpuSet::parse(&text), value) {
            (Ok(ours), Some(value)) if ours.to_string() == value => cases.count("read alike"),
            (Err(_), None) => cases.count("refused by both"),
            (Err(_), Some(value))
                if text.contains(['+', '-']) && (text.contains('+') || value.contains("-1")) =>
            {
                cases.count("a sign, refused here");
            }
            (Err(_), Some(value))
                if value.split([',', '-']).any(|part| part.parse().is_ok_and(|cpu: u32| cpu > 1023)) =>
            {
                cases.count("a CPU above the limit, refused here");
            }
            (ours, value) => cases.differs(&format!("{ours:?}, in Go {value:?}: {text:?}")),
        }
    }
    cases.end("read alike", 2);
}
