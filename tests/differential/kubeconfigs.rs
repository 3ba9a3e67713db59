//! Kubeconfigs against client-go, as a whole: which server, and with which credentials.

use std::path::Path;
use std::time::Instant;

use coracle::config::kubeconfig::load;
use coracle::kube::client::Credentials;
use coracle::kube::kubeconfig::credentials;
use coracle::transport::api::{Breaker, Endpoint, Roots};
use serde_json::{Value, json};

use crate::peer::{Peer, decode};
use crate::random::Random;
use crate::{Cases, documents, pick, rarely};

/// The files beside the kubeconfig.
const FILES: [(&str, &str); 7] = [
    ("ca.crt", "authority"),
    ("cert.pem", "certificate"),
    ("key.pem", "key"),
    ("token", " from a file\n"),
    ("blank", " \n"),
    ("sub/ca.crt", "another authority"),
    ("sub/x", ""),
];
const SERVERS: [&str; 30] = [
    "https://10.0.0.1:6443",
    "https://10.0.0.1:6443",
    "https://10.0.0.1:6443",
    "https://10.0.0.1:6443",
    "https://h",
    "https://h/",
    "https://h:443/a/b/",
    "https://h//a/../b",
    "https://h/a%2Fb",
    "HTTPS://H:1",
    "https://[fd00::1]:6443",
    "https://[fd00::1]",
    "https://fd00::1",
    "https://h:",
    "https://h:x",
    "https://h:70000",
    "http://h",
    "http://h:8080/a",
    "h",
    "h:6443",
    "10.0.0.1:6443",
    "h:6443/a",
    "https://u:p@h",
    "https://h?a=b",
    "https://h/a?b#c",
    "https://h#a",
    "ftp://h",
    "https://",
    "https:// h",
    "https://h/\u{e9}",
];
const SERVER_FIELDS: [&str; 13] = [
    "certificate-authority",
    "certificate-authority",
    "certificate-authority-data",
    "certificate-authority-data",
    "insecure-skip-tls-verify",
    "tls-server-name",
    "proxy-url",
    "extensions",
    "disable-compression",
    "Server",
    "unknown",
    "server",
    "locationOfOrigin",
];
const USER_FIELDS: [&str; 23] = [
    "client-certificate",
    "client-certificate-data",
    "client-key",
    "client-key-data",
    "token",
    "token",
    "token",
    "token",
    "tokenFile",
    "tokenFile",
    "tokenFile",
    "tokenFile",
    "tokenfile",
    "username",
    "password",
    "as",
    "as-groups",
    "as-uid",
    "auth-provider",
    "exec",
    "exec",
    "extensions",
    "unknown",
];
/// Base64 in the forms in which it is found.
const DATA: [&str; 16] = [
    "aGVsbG8=",
    "aGVsbG8=",
    "\"\"",
    "\"aGVs\\nbG8=\\n\"",
    "\"aGVs\\r\\nbG8=\"",
    "aGVsbG8",
    "\" aGVsbG8=\"",
    "\"aGVs bG8=\"",
    "!",
    "aGVsbG8==",
    "~",
    "5555",
    "[1, 2]",
    "aGVsbG9=",
    "aGVs_G8=",
    "!!binary aGVsbG8=",
];
const PATHS: [&str; 13] = [
    "ca.crt",
    "cert.pem",
    "key.pem",
    "./sub/../ca.crt",
    "link/../ca.crt",
    "sub/ca.crt",
    "token",
    "\"\"",
    "sub",
    "absent",
    "~",
    "sub/x",
    "blank",
];
const TOKENS: [&str; 12] = [
    "sesame",
    "\"sesame\"",
    "\"\"",
    "~",
    "5",
    "\"5\"",
    "0x10",
    "true",
    "[a]",
    "a b",
    "\"a\\nb\"",
    "12345678901234567890123",
];
const OTHERS: [&str; 8] = ["~", "5", "true", "[]", "{}", "[{name: a, extension: {b: c}}]", "text", "[a, 1]"];
const PROXIES: [&str; 14] = [
    "\"http://proxy:3128\"",
    "\"https://u:p@proxy\"",
    "\"socks5://proxy:1080\"",
    "\"socks5h://proxy\"",
    "\"proxy:3128\"",
    "proxy",
    "\"ftp://proxy\"",
    "\"\"",
    "\"http://\"",
    "\"http://proxy:x\"",
    "\"HTTP://proxy\"",
    "\"http://[fd00::1]:1\"",
    "\"http://pro xy\"",
    "\"http://%zz@proxy\"",
];
const PIECES: [&str; 16] =
    ["\n", "  ", " ", "\t", "---\n", "# c\n", "~", "\"", "}", "{", ", ", ": ", "- ", "&a ", "<<: ", "\r"];

/// Usually one of the first ones, which both accept.
fn value<'a>(random: &mut Random, all: &[&'a str], good: usize) -> &'a str {
    if rarely(random, 25) { pick(random, all) } else { pick(random, &all[..good]) }
}

fn program(random: &mut Random) -> String {
    if rarely(random, 20) {
        return pick(random, &OTHERS).to_owned();
    }
    let mut fields = Vec::new();
    if !rarely(random, 12) {
        fields.push(format!(
            "command: {}",
            pick(random, &["aws", "bin/x", "./x", "/bin/x", "/bin/../x", "link/../x", "\"\"", "5"])
        ));
    }
    if !rarely(random, 12) {
        let version = value(random, &["v1", "v1beta1", "v1alpha1", "v2"], 2);
        fields.push(format!("apiVersion: client.authentication.k8s.io/{version}"));
    }
    if !rarely(random, 8) {
        let mode = value(random, &["Never", "IfAvailable", "Always", "never", "\"\"", "~"], 2);
        fields.push(format!("interactiveMode: {mode}"));
    }
    if rarely(random, 3) {
        fields.push(
            pick(
                random,
                &[
                    "args: [a, \"1\"]",
                    "args: [1]",
                    "args: ~",
                    "env: [{name: A, value: b}]",
                    "env: [{value: b}]",
                    "env: [{name: A, value: 1}]",
                    "provideClusterInfo: true",
                    "provideClusterInfo: yes",
                    "installHint: a",
                    "provideClusterInfo: \"true\"",
                    "unknown: 1",
                    "env: ~",
                ],
            )
            .to_owned(),
        );
    }
    format!("{{{}}}", fields.join(", "))
}

fn server(random: &mut Random) -> String {
    let mut fields = Vec::new();
    if !rarely(random, 20) {
        fields.push(match random.below(40) {
            0 => format!("server: {}", pick(random, &OTHERS)),
            1 => "server: \"\"".to_owned(),
            _ => format!("server: \"{}\"", value(random, &SERVERS, 12)),
        });
    }
    for _ in 0..random.below(3) {
        let name = pick(random, &SERVER_FIELDS);
        let value = match name {
            _ if rarely(random, 40) => pick(random, &OTHERS),
            "certificate-authority" => value(random, &PATHS, 7),
            "certificate-authority-data" => value(random, &DATA, 5),
            "insecure-skip-tls-verify" => value(random, &["true", "false", "yes", "\"true\"", "~", "1"], 3),
            "tls-server-name" => value(random, &["name", "\"\"", "~", "\"1\"", "1"], 4),
            "proxy-url" => value(random, &PROXIES, 3),
            "disable-compression" => pick(random, &["true", "~", "\"x\""]),
            "server" | "Server" => "https://second",
            _ => pick(random, &OTHERS),
        };
        fields.push(format!("{name}: {value}"));
    }
    format!("{{{}}}", fields.join(", "))
}

fn user(random: &mut Random) -> String {
    let mut fields = Vec::new();
    if rarely(random, 4) {
        // A certificate and its key.
        let entry = |random: &mut Random, name: &str, file: &str| match rarely(random, 2) {
            true => format!("{name}: {file}"),
            false => format!("{name}-data: {}", pick(random, &DATA[..5])),
        };
        fields.push(entry(random, "client-certificate", "cert.pem"));
        fields.push(entry(random, "client-key", "key.pem"));
    }
    for _ in 0..random.below(3) {
        let name = pick(random, &USER_FIELDS);
        let value = match name {
            _ if rarely(random, 40) => pick(random, &OTHERS).to_owned(),
            "client-certificate" | "client-key" | "tokenFile" | "tokenfile" => {
                value(random, &PATHS, 7).to_owned()
            }
            "client-certificate-data" | "client-key-data" => value(random, &DATA, 5).to_owned(),
            "exec" => program(random),
            "token" | "username" | "password" | "as" | "as-uid" => value(random, &TOKENS, 4).to_owned(),
            "auth-provider" => pick(random, &["~", "{name: gcp}", "{name: gcp, config: {a: b}}"]).to_owned(),
            _ => pick(random, &OTHERS).to_owned(),
        };
        fields.push(format!("{name}: {value}"));
    }
    format!("{{{}}}", fields.join(", "))
}

/// Entries of a list; the first usually has the name that is looked for.
fn list(random: &mut Random, kind: &str, name: &str, inner: fn(&mut Random) -> String) -> String {
    let mut text = format!("{kind}s:\n");
    for number in 0..if rarely(random, 20) { 0 } else { 1 + random.below(4) / 2 } {
        let name = match number {
            0 if !rarely(random, 20) => name,
            _ => value(random, &["a", "b", "\"1\"", "\"\"", "~", name, "1"], 4),
        };
        match random.below(40) {
            0 => text += &format!("- {}\n", pick(random, &OTHERS)),
            1 => text += &format!("- name: {name}\n"),
            2 => text += &format!("- {{name: {name}, {kind}: ~}}\n"),
            _ => text += &format!("- {kind}: {}\n  name: {name}\n", inner(random)),
        }
    }
    text
}

fn context(random: &mut Random) -> String {
    let cluster = if rarely(random, 25) { pick(random, &["\"\"", "other", "~", "1"]) } else { "c" };
    let user = if rarely(random, 25) { pick(random, &["\"\"", "other", "~", "1"]) } else { "u" };
    let more = pick(random, &["", "", "", ", namespace: n", ", extensions: []"]);
    let more = if rarely(random, 20) { pick(random, &[", namespace: A B", ", namespace: 1"]) } else { more };
    format!("{{cluster: {cluster}, user: {user}{more}}}")
}

fn text(random: &mut Random) -> String {
    let mut parts = vec![
        list(random, "cluster", "c", server),
        list(random, "user", "u", user),
        list(random, "context", "x", context),
        format!(
            "current-context: {}\n",
            if rarely(random, 20) { pick(random, &["\"\"", "~", "y", "1"]) } else { "x" }
        ),
    ];
    if rarely(random, 2) {
        parts.push(format!(
            "kind: {}\n",
            if rarely(random, 12) { pick(random, &["Pod", "config", "\"\"", "~", "1"]) } else { "Config" }
        ));
    }
    if rarely(random, 2) {
        parts.push(format!(
            "apiVersion: {}\n",
            if rarely(random, 12) { pick(random, &["v2", "a/v1", "\"\"", "~", "1"]) } else { "v1" }
        ));
    }
    if rarely(random, 4) {
        parts.push(format!(
            "{}: {}\n",
            pick(random, &["preferences", "extensions", "unknown", "Clusters"]),
            pick(random, &OTHERS)
        ));
    }
    if rarely(random, 20) {
        parts.remove(random.below(parts.len() as u64) as usize);
    }
    let mut text = parts.concat();
    if rarely(random, 20) {
        let offset = text.floor_char_boundary(random.below(text.len() as u64 + 1) as usize);
        text.insert_str(offset, pick(random, &PIECES));
    }
    text
}

/// Why coracle refuses what Go accepts; each is a row in docs/differences.md.
fn strict(error: &str, text: &str, theirs: &Value) -> Option<&'static str> {
    // Without TLS files are not read, and how the server is verified does not matter.
    let of_tls = error.contains("Is a directory") || error.contains("with the insecure flag");
    if of_tls && theirs["scheme"] == "http" {
        return Some("a server without a scheme, by TLS here");
    }
    if error.contains("is not supported") || error.contains("more than one authentication method") {
        return Some("a method of authentication that is not supported");
    }
    if error.starts_with("user ") && error.ends_with(" does not exist") {
        return Some("a user that does not exist");
    }
    if error.contains("key without a client certificate") {
        return Some("a client key without a certificate");
    }
    if let Some(server) = error.strip_suffix(" is no URL").and_then(|rest| rest.split_once(": server ")) {
        let of_http = |server: &str| {
            let scheme = server.split_once("://").map_or("http", |(scheme, _)| scheme).to_ascii_lowercase();
            scheme == "http" || scheme == "https"
        };
        let server = server.1.trim_matches('"');
        let port = server.rsplit(':').next().unwrap_or_default().split('/').next().unwrap_or_default();
        let is_above = port.parse::<u32>().is_ok_and(|port| port > u32::from(u16::MAX));
        return (server.contains(['@', '?', '#', ' ']) || !of_http(server) || is_above)
            .then_some("a server that is no plain URL");
    }
    if error.contains("interactive mode") {
        return Some("a program that needs a terminal");
    }
    (error.contains("proxy-url") && text.contains("proxy-url"))
        .then_some("a proxy without a host or with an invalid port")
}

/// Why Go refuses what coracle accepts; each is a row in docs/differences.md.
fn lenient(error: &str, sent: &Result<Option<String>, String>) -> Option<&'static str> {
    if error.contains("duplicate name") {
        return Some("a name that is there twice and not used");
    }
    if error.contains("unsupported scheme \"socks5h\"") {
        return Some("a proxy with socks5h");
    }
    if sent.is_err() {
        return Some("a token file that is missing or empty");
    }
    let unused = [
        "extension",
        "preferences",
        "namespace",
        "as-",
        "disable-compression",
        "locationOfOrigin",
        "installHint",
        "unmarshal",
        "requesting uid, groups",
    ];
    unused.iter().any(|words| error.contains(words)).then_some("another value in a field without effect")
}

/// What a client sends as `Authorization`, without running a program.
fn sent(credentials: &Credentials) -> Result<Option<String>, String> {
    let Some(source) = &credentials.token else { return Ok(None) };
    if format!("{source:?}").starts_with("ExecPlugin(") {
        return Ok(None);
    }
    let issued = source.current(Instant::now(), &Breaker::default()).map_err(|error| error.to_string())?;
    Ok(issued.token.map(|token| format!("Bearer {}", token.reveal())))
}

fn program_of(credentials: &Credentials) -> Option<String> {
    let shown = format!("{:?}", credentials.token.as_ref()?);
    shown.strip_prefix("ExecPlugin(").map(|rest| rest.trim_end_matches(')').to_owned())
}

/// The differences of what both accept.
fn compare(credentials: &Credentials, sent: &Option<String>, theirs: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let text = |field: &str| theirs[field].as_str().unwrap_or_default().to_owned();
    let mut same = |what: &str, ours: String, theirs: String| {
        if ours != theirs {
            found.push(format!("{what} {ours:?}, in Go {theirs:?}"));
        }
    };
    let Endpoint { https, host, port, roots, server_name, identity, proxy } = &credentials.endpoint;
    let scheme = if *https { "https" } else { "http" };
    same("scheme", scheme.to_owned(), text("scheme"));
    same("host", host.clone(), text("host"));
    let preset = if *https { "443" } else { "80" };
    same("port", port.to_string(), if text("port").is_empty() { preset.to_owned() } else { text("port") });
    same("path", credentials.base_path.clone(), text("path").trim_end_matches('/').to_owned());
    same("proxy", proxy.is_some().to_string(), (!text("proxy").is_empty()).to_string());
    if *https {
        let authorities = match roots {
            Roots::Pem(pem) => format!("{pem:?}"),
            Roots::System => "[]".to_owned(),
            Roots::Unverified => "any".to_owned(),
        };
        let pem = format!("{:?}", decode(&theirs["ca"]));
        same("authorities", authorities, if theirs["insecure"] == true { "any".to_owned() } else { pem });
        same("server name", server_name.clone().unwrap_or_default(), text("name"));
    }
    let (certificate, key) = identity
        .as_ref()
        .map(|own| (own.certificate.reveal().clone(), own.key.reveal().clone()))
        .unwrap_or_default();
    same("certificate", format!("{certificate:?}"), format!("{:?}", decode(&theirs["certificate"])));
    same("key", format!("{key:?}"), format!("{:?}", decode(&theirs["key"])));
    same("sent", sent.clone().unwrap_or_default(), text("sent"));
    let program = if text("sent").is_empty() { text("program") } else { String::new() };
    let own = program_of(credentials).unwrap_or_default();
    same("program", own, program);
    found
}

#[test]
fn kubeconfigs_mean_what_they_mean_for_client_go() {
    let (mut cases, mut random) = Cases::new("kubeconfigs", 15_000);
    let mut peer = Peer::managers();
    let dir = crate::directory();
    std::fs::create_dir_all(dir.path().join("sub/inner")).unwrap();
    std::os::unix::fs::symlink("sub/inner", dir.path().join("link")).unwrap();
    for (name, content) in FILES {
        std::fs::write(dir.path().join(name), content).unwrap();
    }
    let file = dir.path().join("kubelet.conf");
    while cases.next() {
        let text = text(&mut random);
        std::fs::write(&file, &text).unwrap();
        let theirs = peer.ask(&json!({"ask": "kubeconfig", "file": file}));
        let ours = read(&file);
        let shown = || format!("{theirs}:\n{text}");
        match (ours, theirs["error"].as_str()) {
            (Ok(ours), None) => {
                let server_without_scheme = theirs["scheme"] == "http" && ours.endpoint.https;
                let token = sent(&ours);
                let found = match &token {
                    Ok(token) => compare(&ours, token, &theirs),
                    Err(error) => vec![error.clone()],
                };
                match found.as_slice() {
                    [] => cases.count("read alike"),
                    _ if token.as_ref().is_err_and(|error| error.contains("empty token")) => {
                        cases.count("a token file that is missing or empty");
                    }
                    _ if server_without_scheme => cases.count("a server without a scheme, by TLS here"),
                    _ => cases.differs(&format!("{}: {}", found.join(", "), shown())),
                }
            }
            (Ok(ours), Some(error)) => {
                let known = lenient(error, &sent(&ours)).or_else(|| documents::known(&text, &theirs, None));
                match known {
                    _ if error.contains("must be a URL") => {
                        cases.count("a server without a scheme, by TLS here")
                    }
                    Some(known) => cases.count(known),
                    None => cases.differs(&format!("refused by Go only: {}", shown())),
                }
            }
            (Err(_), Some(_)) => cases.count("refused by both"),
            (Err(error), None) => match strict(&error, &text, &theirs) {
                Some(known) => cases.count(known),
                None => cases.differs(&format!("refused here only, {error}: {}", shown())),
            },
        }
    }
    cases.end("read alike", 12);
}

fn read(file: &Path) -> Result<Credentials, String> {
    let config = load(file).map_err(|problem| problem.to_string())?;
    credentials(&config, file).map_err(|error| error.to_string())
}
