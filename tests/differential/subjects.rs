//! Subjects of certificates against crypto/x509.

use coracle::kube::certificates::{CertificateFields, Subject};
use rcgen::{CertificateParams, KeyPair};
use serde_json::{Value, json};

use crate::der::{SUBJECT, changed, value};
use crate::peer::{Peer, encode};
use crate::random::Random;
use crate::{Cases, mutate, pick, rarely};

const KINDS: [&[u8]; 7] = [
    &[0x55, 4, 3],
    &[0x55, 4, 3],
    &[0x55, 4, 10],
    &[0x55, 4, 10],
    &[0x55, 4, 11],
    // The UID of Kubernetes.
    &[0x2b, 6, 1, 4, 1, 0x83, 0xc2, 0x53, 2],
    &[0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 25],
];
const ODD_KINDS: [&[u8]; 5] =
    [&[], &[0x55, 0x80, 3], &[0x55, 0x84], &[0x55, 4, 3, 0], &[0x55, 0x8f, 0xff, 0xff, 0xff, 0x7f]];
/// UTF8String, PrintableString, IA5String.
const STRINGS: [u8; 3] = [0x0c, 0x13, 0x16];
/// T61String, BMPString, NumericString, UniversalString, VisibleString, and what is no string.
const ODD_STRINGS: [u8; 9] = [0x14, 0x1e, 0x12, 0x1c, 0x1a, 0x03, 0x04, 0x2c, 0x30];
const TEXTS: [&[u8]; 16] = [
    b"system:node:n1",
    b"admin",
    b"system:masters",
    b"",
    b"12 34",
    b"a*b",
    b"a&b",
    b"a@b",
    b"a_b",
    b"a\0b",
    b"a\nb",
    "\u{e4}".as_bytes(),
    "\u{1f600}".as_bytes(),
    b"\xff",
    b"\xed\xa0\x80",
    b"\0a\0b",
];

fn attribute(random: &mut Random) -> Vec<u8> {
    let kind = if rarely(random, 30) { pick(random, &ODD_KINDS) } else { pick(random, &KINDS) };
    let tag = if rarely(random, 12) { pick(random, &ODD_STRINGS) } else { pick(random, &STRINGS) };
    let most = if rarely(random, 8) { TEXTS.len() } else { 5 };
    let mut parts =
        [value(if rarely(random, 100) { 0x0c } else { 6 }, kind), value(tag, pick(random, &TEXTS[..most]))]
            .concat();
    if rarely(random, 60) {
        parts.extend(value(0x0c, b"more"));
    }
    value(if rarely(random, 100) { 0x31 } else { 0x30 }, &parts)
}

fn subject(random: &mut Random) -> Vec<u8> {
    let mut content = Vec::new();
    for _ in 0..random.below(5) {
        let mut set = Vec::new();
        for _ in 0..if rarely(random, 4) { random.below(4) } else { 1 } {
            set.extend(attribute(random));
        }
        content.extend(value(if rarely(random, 100) { 0x30 } else { 0x31 }, &set));
    }
    if rarely(random, 10) {
        mutate(random, &mut content);
    }
    value(0x30, &content)
}

#[test]
fn accepted_subject_is_parsed_equally_by_go() {
    let (mut cases, mut random) = Cases::new("subjects", 30_000);
    let mut peer = Peer::start();
    let key = KeyPair::generate().unwrap();
    let template = CertificateParams::default().self_signed(&key).unwrap().der().to_vec();
    while cases.next() {
        let subject = subject(&mut random);
        let certificate = changed(&template, |fields| fields[SUBJECT] = subject.clone());
        let ours = CertificateFields::from_der(&certificate).and_then(|facts| facts.subject);
        let theirs = peer.ask(&json!({"ask": "subject", "data": encode(&certificate)}));
        match (ours, theirs["ok"] == true) {
            (Some(ours), true) => {
                let texts = |value: &Value| -> Vec<String> {
                    value
                        .as_array()
                        .into_iter()
                        .flatten()
                        .map(|value| value.as_str().unwrap().to_owned())
                        .collect()
                };
                let read = Subject {
                    common_name: theirs["common_name"].as_str().unwrap().to_owned(),
                    organizations: texts(&theirs["organizations"]),
                    uids: texts(&theirs["uids"]),
                };
                if ours != read {
                    cases.differs(&format!("{ours:?}, in Go {read:?}: {}", subject.escape_ascii()));
                }
                cases.count("read alike");
            }
            (Some(ours), false) => {
                cases.differs(&format!("{ours:?}, refused by Go: {theirs} {}", subject.escape_ascii()));
            }
            (None, true) => cases.count("refused here only"),
            (None, false) => cases.count("refused by both"),
        }
    }
    cases.end("read alike", 4);
}
