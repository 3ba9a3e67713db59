//! Files with credentials of registries against the kubelet's package credentialprovider.

use coracle::images::credentials::{CredentialFormat, entries, index, lookup};
use serde_json::{Value, json};

use crate::peer::{Peer, decode, encode};
use crate::random::Random;
use crate::{Cases, mutate, pick, rarely};

const SCHEMES: [&str; 10] =
    ["", "", "", "https://", "https://", "http://", "HTTPS://", "oci://", "//", "https://https://"];
const HOSTS: [&str; 22] = [
    "r.example",
    "r.example",
    "r.example:5000",
    "r.example:",
    "r.example:5000:1",
    "*.example",
    "*",
    "a.*.example",
    "*r.example",
    "r?.example",
    "[fd00::1]:5000",
    "[fd00::1]",
    "[fd00::1]:",
    "localhost",
    "localhost:5000",
    "docker.io",
    "index.docker.io",
    "index.docker.io",
    "*.io",
    "*.docker.io",
    "R.example",
    "",
];
const PATHS: [&str; 22] = [
    "",
    "",
    "",
    "/",
    "/v1/",
    "/v2/",
    "/v1",
    "/v2",
    "/v1/team",
    "/v2/team/",
    "/team",
    "/team/",
    "/team/app",
    "/tea",
    "//team",
    "/te%61m",
    "/%2Fteam",
    "/library",
    "/te%6",
    "/v3/",
    "/%3Fx",
    "/\u{e9}",
];
const TAILS: [&str; 12] = ["", "", "", "", "", "", "", "", "?a=b", "#x", "#%", "?\u{1}"];
const USERS: [&str; 12] = ["", "", "", "", "", "", "", "", "u@", "u:p%20x@", "u v@", "%zz@"];
const IMAGES: [&str; 22] = [
    "busybox",
    "busybox:1",
    "team/app:1",
    "docker.io/library/busybox",
    "docker.io/team/app",
    "index.docker.io/team/app",
    "r.example/team/app:1",
    "r.example/app",
    "r.example/team",
    "r.example:5000/team/app",
    "a.r.example/app",
    "ar.example/v1/team",
    "localhost/team/app",
    "localhost:5000/team/app",
    "[fd00::1]:5000/app",
    "[fd00::1]/app",
    "R.example/app",
    "r.example/Team",
    "r.example//x",
    "r.example/v2/team/x",
    "r.example/team/app@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "",
];
const FIELDS: [&str; 16] = [
    "auth",
    "auth",
    "auth",
    "username",
    "username",
    "password",
    "password",
    "email",
    "identitytoken",
    "Auth",
    "USERNAME",
    "pa\u{17f}\u{17f}word",
    "registrytoken",
    "\\u0061uth",
    "auth ",
    "x",
];
const AUTHS: [&str; 22] = [
    "dTpw",
    "dTpw",
    "dXNlcjpwYXNz",
    "dXNlcjpwYTo=",
    "dXNlcjpwYTo",
    "dXNlcjpw",
    "dXNlcjpwYQ==",
    "dXNlcjpwYQ",
    "dXNlcjpwYQ=",
    "dTpw=",
    "dTpw====",
    "dT\\npw",
    "dTpw\\r\\n",
    " dTpw",
    "dTpw ",
    "dXNlcjpwYTo= ",
    "Om",
    "Og==",
    "dXNlcg==",
    "!",
    "dTr_",
    "dTr/",
];
const TEXTS: [&str; 12] =
    ["u", "v", "p", "", "a b", "\u{e9}", "\\u00e9", "\\ud83d\\ude00", "\\ud800", "<&>", "\\u2028", "a:b"];
const OTHERS: [&str; 10] =
    ["null", "null", "null", "1", "1e999", "[]", "{}", "true", "[[{\"a\":1}]]", "{\"a\": null}"];

fn key(random: &mut Random) -> String {
    format!(
        "{}{}{}{}{}",
        pick(random, &SCHEMES),
        pick(random, &USERS),
        pick(random, &HOSTS),
        pick(random, &PATHS),
        pick(random, &TAILS)
    )
    .replace('\u{1}', "\\u0001")
}

fn object(random: &mut Random, fields: Vec<(String, String)>) -> String {
    let space = if rarely(random, 4) { "\n " } else { "" };
    let field = |(name, value)| format!("{space}\"{name}\":{space}{value}");
    format!("{{{}{space}}}", fields.into_iter().map(field).collect::<Vec<_>>().join(","))
}

fn entry(random: &mut Random) -> String {
    if rarely(random, 40) {
        return pick(random, &OTHERS).to_owned();
    }
    let field = |random: &mut Random| {
        let name = pick(random, &FIELDS);
        let value = match (name, random.below(30)) {
            (_, 0) => pick(random, &OTHERS).to_owned(),
            ("auth" | "Auth" | "\\u0061uth", _) if rarely(random, 2) => "\"dTpw\"".to_owned(),
            ("auth" | "Auth" | "\\u0061uth", _) => format!("\"{}\"", pick(random, &AUTHS)),
            _ => {
                let most = if rarely(random, 6) { TEXTS.len() } else { 3 };
                format!("\"{}\"", pick(random, &TEXTS[..most]))
            }
        };
        (name.to_owned(), value)
    };
    let fields = (0..random.below(4)).map(|_| field(random)).collect();
    object(random, fields)
}

fn auths(random: &mut Random) -> String {
    if rarely(random, 20) {
        return pick(random, &OTHERS).to_owned();
    }
    let mut all: Vec<(String, String)> = (0..random.below(5)).map(|_| (key(random), entry(random))).collect();
    if rarely(random, 8)
        && let Some((key, _)) = all.first().cloned()
    {
        all.push((key, entry(random)));
    }
    object(random, all)
}

fn text(random: &mut Random, form: CredentialFormat) -> Vec<u8> {
    let text = if form == CredentialFormat::Legacy {
        auths(random)
    } else {
        let mut fields = vec![("auths".to_owned(), auths(random))];
        for _ in 0..if rarely(random, 3) { 1 + random.below(2) } else { 0 } {
            let name =
                pick(random, &["Auths", "auth\u{17f}", "auths", "credsStore", "HttpHeaders", "credHelpers"]);
            let value = match name {
                "HttpHeaders" if rarely(random, 2) => "{\"a\": \"b\"}".to_owned(),
                _ if name.starts_with(['A', 'a']) => auths(random),
                _ => pick(random, &["\"desktop\"", "{}", "{\"a\": 1}", "null"]).to_owned(),
            };
            let index = random.below(fields.len() as u64 + 1) as usize;
            fields.insert(index, (name.to_owned(), value));
        }
        object(random, fields)
    };
    let mut bytes = text.into_bytes();
    if rarely(random, 12) {
        mutate(random, &mut bytes);
    }
    // A Secret without data has no credentials.
    if bytes.is_empty() { b" ".to_vec() } else { bytes }
}

/// Why Go refuses a file that coracle reads; the row is in docs/differences.md.
fn lenient(error: &str) -> Option<&'static str> {
    if error.contains("illegal base64") || error.contains("unable to parse auth field") {
        return Some("an auth that is invalid, its entry left out here");
    }
    let unused = [".email of type", ".HttpHeaders of type", "Go value of type string", "HttpHeaders"];
    (error.contains("cannot unmarshal") && unused.iter().any(|words| error.contains(words)))
        .then_some("another type in a field without effect")
}

/// A text as it was, or as Go and Rust replace its bytes.
fn plain(text: &str) -> String {
    let mut plain = text.to_owned();
    while plain.contains("\u{fffd}\u{fffd}") {
        plain = plain.replace("\u{fffd}\u{fffd}", "\u{fffd}");
    }
    plain
}

type Pairs = Vec<(String, String)>;

/// `None`: a user name or password is no text.
fn pairs(value: &Value) -> Option<Pairs> {
    let text = |value: &Value| String::from_utf8(decode(value)).ok().map(|text| plain(&text));
    let pair = |entry: &Value| text(&entry["username"]).zip(text(&entry["password"]));
    value.as_array().into_iter().flatten().map(pair).collect()
}

#[test]
fn credentials_of_registries_are_those_of_the_kubelet() {
    let (mut cases, mut random) = Cases::new("registry credentials", 40_000);
    let mut peer = Peer::managers();
    while cases.next() {
        let form = if rarely(&mut random, 3) { CredentialFormat::Legacy } else { CredentialFormat::Current };
        let bytes = text(&mut random, form);
        let images: Vec<&str> = (0..6).map(|_| pick(&mut random, &IMAGES)).collect();
        let theirs = peer.ask(&json!({
            "ask": "credentials", "data": encode(&bytes), "legacy": form == CredentialFormat::Legacy, "images": images,
        }));
        let shown = || format!("{theirs}: {images:?} {}", String::from_utf8_lossy(&bytes));
        let ours = entries(&bytes, form).map(|entries| index(entries).unwrap());
        let ours = match (ours, theirs["error"].as_str()) {
            (Ok(ours), None) => ours,
            (Ok(_), Some(error)) => {
                match lenient(error) {
                    Some(known) => cases.count(known),
                    None => cases.differs(&format!("refused by Go only: {}", shown())),
                }
                continue;
            }
            (Err(_), Some(_)) => {
                cases.count("refused by both");
                continue;
            }
            (Err(_), None) if bytes.windows(3).any(|three| three.eq_ignore_ascii_case(b"\\ud")) => {
                cases.count("half of a surrogate pair, refused here");
                continue;
            }
            (Err(error), None) => {
                cases.differs(&format!("refused here only, {error}: {}", shown()));
                continue;
            }
        };
        let mut what = "read alike";
        for (image, found) in images.iter().zip(theirs["found"].as_array().unwrap()) {
            let found_here = lookup(&ours, image).into_iter();
            let mut found_here: Pairs =
                found_here.map(|found| (plain(&found.username), plain(&found.password))).collect();
            let Some(mut found) = pairs(found) else {
                what = "credentials that are no text";
                continue;
            };
            if found_here == found {
                continue;
            }
            if image.starts_with("localhost/") && found_here.is_empty() {
                what = "the key of Docker Hub for localhost";
                continue;
            }
            if image.starts_with("[fd00::1]/") && found.iter().all(|pair| found_here.contains(pair)) {
                what = "an IPv6 address without a port";
                continue;
            }
            // The order of keys that differ only in their scheme is random in Go.
            found_here.sort();
            found.sort();
            if found_here == found {
                what = "random order in Go";
                continue;
            }
            cases.differs(&format!("{image}: {found_here:?}, in Go {found:?}: {}", shown()));
        }
        cases.count(what);
    }
    cases.end("read alike", 3);
}
