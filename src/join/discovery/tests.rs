//! Against scripted servers on loopback, and with hostile texts.

use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;

use super::*;
use crate::transport::testing::{AUTHORITY, HttpsServer, OTHER_AUTHORITY, json_response};
use crate::util::encoding::base64;
use crate::util::gzip::Gzip;

const TOKEN: &str = "abcdef.0123456789abcdef";
const HASH: &str = "sha256:75f6a90d802743636d1848d88d109804c71c8b754551072b9a9b282181798e44";
const OTHER_HASH: &str = "sha256:3ceeadac3e8945b92000f13220288eee712eea6c1566ac160c3923c8e66a35a3";

fn token() -> BootstrapToken {
    BootstrapToken::parse(TOKEN).unwrap()
}

fn pins(hash: &str) -> Trust {
    Trust::Pins(vec![AuthorityPin::parse(hash).unwrap()])
}

/// One request, whatever its response is.
fn once() -> Retry<'static> {
    Retry { limit: Duration::ZERO, ..Retry::discovery() }
}

/// As kubeadm writes it.
fn kubeconfig_with(server: &str, authority: &str) -> String {
    let data = base64(authority.as_bytes());
    format!(
        "apiVersion: v1\nclusters:\n- cluster:\n    certificate-authority-data: {data}\n    server: {server}\n  \
         name: \"\"\ncontexts: null\ncurrent-context: \"\"\nkind: Config\npreferences: {{}}\nusers: null\n"
    )
}

fn signature(text: &str, token: &BootstrapToken) -> String {
    let header = base64_url(format!(r#"{{"alg":"HS256","kid":"{}"}}"#, token.id()).as_bytes());
    let tag =
        hmac::sign(token.secret().as_bytes(), format!("{header}.{}", base64_url(text.as_bytes())).as_bytes());
    format!("{header}..{}", base64_url(&tag))
}

/// The ConfigMap with a text that the token has signed.
fn signed(text: &str) -> String {
    let map = json!({
        "kind": "ConfigMap",
        "apiVersion": "v1",
        "metadata": { "name": "cluster-info", "namespace": "kube-public" },
        "data": { "kubeconfig": text, "jws-kubeconfig-abcdef": signature(text, &token()) },
    });
    map.to_string()
}

/// A server with this body for the first request, the second and so on; the last one is repeated.
fn server(bodies: Vec<String>) -> HttpsServer {
    HttpsServer::start(move |number, _| {
        let body = bodies.get(number).or(bodies.last());
        json_response(200, body.map(String::as_str).unwrap_or_default())
    })
}

fn find(server: &HttpsServer, trust: &Trust) -> Result<Cluster, JoinError> {
    by_token_within(&server.address(), &token(), trust, &once())
}

#[test]
fn cluster_is_found_by_token_and_pin_with_a_second_request_over_verified_tls() {
    let server = server(vec![signed(&kubeconfig_with("https://10.0.0.1:6443", AUTHORITY))]);
    let cluster = find(&server, &pins(HASH)).unwrap();
    assert_eq!(cluster.server, "https://10.0.0.1:6443");
    assert_eq!(Authorities::parse(cluster.authority.as_bytes()), Authorities::parse(AUTHORITY.as_bytes()));
    let requests = server.requests();
    assert_eq!(requests.len(), 2);
    for head in requests {
        let expected = "GET /api/v1/namespaces/kube-public/configmaps/cluster-info HTTP/1.1\r\n";
        assert!(head.starts_with(expected), "{head}");
        assert!(!head.to_ascii_lowercase().contains("authorization"), "the token is not sent: {head}");
    }
}

#[test]
fn without_pins_the_signature_alone_is_checked_and_must_be_requested() {
    let server = server(vec![signed(&kubeconfig_with("https://10.0.0.1:6443", OTHER_AUTHORITY))]);
    assert!(find(&server, &Trust::Unverified).is_ok());
    assert_eq!(server.requests().len(), 1);
    let error = find(&server, &Trust::Pins(Vec::new())).unwrap_err();
    assert!(matches!(error, JoinError::Argument { flag: "--discovery-token-ca-cert-hash", .. }));
    assert!(server.requests().is_empty());
}

#[test]
fn wrong_pin_ends_the_discovery_and_shows_the_hash_that_was_found() {
    let server = server(vec![signed(&kubeconfig_with("https://10.0.0.1:6443", AUTHORITY))]);
    // Nothing repeats it, although there are five minutes.
    let outcome = by_token_within(&server.address(), &token(), &pins(OTHER_HASH), &Retry::discovery());
    let name = format!("https://{}", server.address());
    let expected = JoinError::WrongAuthority { server: name, found: vec![HASH.to_owned()] };
    assert_eq!(outcome, Err(expected));
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn server_whose_certificate_the_pinned_authority_did_not_sign_is_refused() {
    // The second is the attack of a holder of the token: the pinned authority, and the attacker's own.
    for authority in [OTHER_AUTHORITY.to_owned(), [OTHER_AUTHORITY, AUTHORITY].concat()] {
        let server = server(vec![signed(&kubeconfig_with("https://10.0.0.1:6443", &authority))]);
        let error = find(&server, &pins(OTHER_HASH)).unwrap_err();
        assert!(matches!(error, JoinError::NotTrusted { .. }), "{error}");
    }
}

#[test]
fn bundle_of_a_cluster_that_replaces_its_authority_is_returned_whole() {
    let both = [AUTHORITY, OTHER_AUTHORITY].concat();
    let server = server(vec![signed(&kubeconfig_with("https://10.0.0.1:6443", &both))]);
    let cluster = find(&server, &pins(HASH)).unwrap();
    assert_eq!(Authorities::parse(cluster.authority.as_bytes()).unwrap().hashes(), [HASH, OTHER_HASH]);
}

#[test]
fn unknown_token_and_wrong_secret_are_different_errors() {
    let text = kubeconfig_with("https://10.0.0.1:6443", AUTHORITY);
    let server = server(vec![signed(&text)]);
    let find_with = |token: &str| {
        let token = BootstrapToken::parse(token).unwrap();
        by_token_within(&server.address(), &token, &pins(HASH), &once()).unwrap_err()
    };
    let unknown = find_with("ghijkl.0123456789abcdef");
    assert!(matches!(&unknown, JoinError::UnknownToken { id, .. } if id == "ghijkl"), "{unknown}");
    let wrong = find_with("abcdef.fedcba9876543210");
    assert!(matches!(wrong, JoinError::Signature { .. }), "{wrong}");
    for error in [unknown, wrong] {
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains("0123456789abcdef") && !shown.contains("fedcba"), "{shown}");
    }
}

#[test]
fn token_that_is_signed_later_is_found() {
    let text = kubeconfig_with("https://10.0.0.1:6443", AUTHORITY);
    let unsigned = json!({ "data": { "kubeconfig": text } }).to_string();
    let server = server(vec![unsigned.clone(), unsigned, signed(&text)]);
    let reported = AtomicUsize::new(0);
    let progress = |error: &JoinError| {
        assert!(matches!(error, JoinError::UnknownToken { .. }), "{error}");
        reported.fetch_add(1, Ordering::Relaxed);
    };
    let retry = Retry { interval: Duration::ZERO, progress: &progress, ..Retry::discovery() };
    assert!(by_token_within(&server.address(), &token(), &pins(HASH), &retry).is_ok());
    assert_eq!((reported.load(Ordering::Relaxed), server.requests().len()), (2, 4));
}

#[test]
fn cluster_info_that_changes_between_the_requests_is_refused() {
    let first = signed(&kubeconfig_with("https://10.0.0.1:6443", AUTHORITY));
    let second = signed(&kubeconfig_with("https://10.0.0.2:6443", AUTHORITY));
    let error = find(&server(vec![first, second]), &pins(HASH)).unwrap_err();
    assert!(matches!(error, JoinError::Changed { .. }), "{error}");
}

#[test]
fn refusals_of_the_server_are_reported_with_its_message() {
    let status = |code: u16| json!({ "kind": "Status", "message": "no", "code": code }).to_string();
    for (code, exit_code) in [(401, 28), (403, 28), (404, 29), (500, 30)] {
        let server = HttpsServer::start(move |_, _| json_response(code, &status(code)));
        let error = find(&server, &pins(HASH)).unwrap_err();
        assert_eq!(error.exit_code(), exit_code, "{error}");
        assert!(error.to_string().contains("ConfigMap kube-public/cluster-info"), "{error}");
    }
}

#[test]
fn control_plane_that_becomes_complete_is_waited_for() {
    let info = signed(&kubeconfig_with("https://10.0.0.1:6443", AUTHORITY));
    let server = HttpsServer::start(move |number, _| match number {
        0 => json_response(503, ""),
        1 => json_response(403, r#"{"kind":"Status","message":"no"}"#),
        2 => json_response(404, r#"{"kind":"Status","message":"no"}"#),
        _ => json_response(200, &info),
    });
    let retry = Retry { interval: Duration::ZERO, ..Retry::discovery() };
    assert!(by_token_within(&server.address(), &token(), &pins(HASH), &retry).is_ok());
}

#[test]
fn server_that_is_away_is_named() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = by_token_within(&format!("127.0.0.1:{port}"), &token(), &pins(HASH), &once()).unwrap_err();
    assert!(
        matches!(&error, JoinError::Unreachable { server, .. } if *server == format!("https://127.0.0.1:{port}"))
    );
    assert!(error.to_string().contains("connection refused"), "{error}");
}

#[test]
fn tripped_breaker_ends_the_discovery() {
    let server = server(vec![signed("x")]);
    let retry = Retry::discovery();
    retry.breaker.trip();
    let outcome = by_token_within(&server.address(), &token(), &pins(HASH), &retry);
    assert_eq!(outcome, Err(JoinError::Interrupted));
}

#[test]
fn hostile_cluster_info_is_refused_although_the_token_signed_it() {
    let good = kubeconfig_with("https://10.0.0.1:6443", AUTHORITY);
    let replace = |from: &str, to: &str| {
        assert!(good.contains(from));
        good.replace(from, to)
    };
    let data = base64(AUTHORITY.as_bytes());
    let file = replace(&format!("certificate-authority-data: {data}"), "certificate-authority: /etc/passwd");
    for text in [
        "{".to_owned(),
        "kind: Pod".to_owned(),
        "[".repeat(50_000),
        "a".repeat(2 << 20),
        file,
        replace("https://10.0.0.1:6443", "http://10.0.0.1:6443"),
        replace("https://10.0.0.1:6443", "file:///etc/passwd"),
        replace("https://10.0.0.1:6443", "https://10.0.0.1:6443\n    proxy-url: http://10.0.0.9:1"),
        replace("https://10.0.0.1:6443", "https://10.0.0.1:6443\n    insecure-skip-tls-verify: true"),
        replace(&data, "AAAA"),
        replace(&format!("certificate-authority-data: {data}"), "tls-server-name: \"\""),
    ] {
        let server = server(vec![signed(&text)]);
        for trust in [pins(HASH), Trust::Unverified] {
            let error = find(&server, &trust).unwrap_err();
            assert!(matches!(error, JoinError::Malformed { .. }), "{error}");
            assert!(error.to_string().len() < 1000, "{error}");
        }
    }
}

#[test]
fn responses_that_are_no_config_map_are_errors() {
    let text = kubeconfig_with("https://10.0.0.1:6443", AUTHORITY);
    let no_text = json!({ "data": { "jws-kubeconfig-abcdef": signature(&text, &token()) } });
    for (body, exit_code) in [
        ("[]".to_owned(), 24),
        ("{}".to_owned(), 24),
        (json!({ "data": [1] }).to_string(), 24),
        (json!({ "data": { "jws-kubeconfig-abcdef": 5 } }).to_string(), 24),
        (no_text.to_string(), 30),
        ("<html>".to_owned(), 30),
        (" ".repeat(5 << 20), 30),
    ] {
        let error = find(&server(vec![body]), &pins(HASH)).unwrap_err();
        assert_eq!(error.exit_code(), exit_code, "{error}");
    }
}

#[test]
fn signature_is_checked_as_by_kubeadm() {
    let text = "apiVersion: v1\nkind: Config\n";
    // Computed with Python: hmac.new(secret, header + "." + payload, sha256).
    let known = "eyJhbGciOiJIUzI1NiIsImtpZCI6ImFiY2RlZiJ9..vH_kT4yiol-nrAWgjfCYqvum5wsKETXe0S7OOp1VgnE";
    assert_eq!(signature(text, &token()), known);
    assert!(is_signed(text, known, &token()));
    let (header, tag) = known.split_once("..").unwrap();
    let none = base64_url(br#"{"alg":"none","kid":"abcdef"}"#);
    let critical = base64_url(br#"{"alg":"HS256","b64":false,"crit":["b64"],"kid":"abcdef"}"#);
    let spaced = base64_url(br#"{"alg": "HS256","kid":"abcdef"}"#);
    for wrong in [
        "",
        "..",
        tag,
        &format!("{header}.."),
        &format!("{header}.{tag}"),
        &format!("{header}..{}", &tag[..tag.len() - 4]),
        &format!("{header}..{tag}.."),
        &format!("{header}..{tag}="),
        &format!("{header}..!"),
        &format!("{header}.{}.{tag}", base64_url(text.as_bytes())),
        &format!("{none}.."),
        &format!("{none}..{tag}"),
        &format!("{critical}..{tag}"),
        &format!("{spaced}..{tag}"),
    ] {
        assert!(!is_signed(text, wrong, &token()), "{wrong}");
    }
    assert!(!is_signed("apiVersion: v1\nkind: Config", known, &token()));
}

#[test]
fn only_addresses_with_host_and_port_are_accepted() {
    for (address, url) in [
        ("10.0.0.1:6443", "https://10.0.0.1:6443"),
        ("api.example.org:443", "https://api.example.org:443"),
        ("[fd00::1]:6443", "https://[fd00::1]:6443"),
    ] {
        assert_eq!(url_of_address(address).as_deref(), Ok(url));
    }
    for address in [
        "",
        "10.0.0.1",
        ":6443",
        "10.0.0.1:",
        "10.0.0.1:0",
        "10.0.0.1:70000",
        "https://10.0.0.1:6443",
        "10.0.0.1:6443/path",
        "u@10.0.0.1:6443",
        "fd00::1:6443",
        "a b:1",
        "a:1\n",
    ] {
        let error = url_of_address(address).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{address:?}");
    }
}

/// A discovery file in a directory of its own.
fn file(text: &str) -> (tempfile::TempDir, std::path::PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("discovery.conf");
    std::fs::write(&path, text).unwrap();
    (directory, path)
}

fn discovery_file(server: &HttpsServer, cluster: &str, user: &str) -> String {
    let address = server.address();
    format!(
        "clusters: [{{name: c, cluster: {{server: 'https://{address}'{cluster}}}}}]\n\
         users: [{{name: u, user: {user}}}]\n\
         contexts: [{{name: x, context: {{cluster: c, user: u}}}}]\ncurrent-context: x\n"
    )
}

#[test]
fn discovery_file_is_used_if_its_server_proves_itself_whatever_it_responds() {
    for status in [200, 403, 404] {
        let body = r#"{"kind":"Status","message":"no"}"#;
        let server = HttpsServer::start(move |_, _| json_response(status, body));
        let text = discovery_file(&server, ", certificate-authority: ca.crt", "{token: secret-token}");
        let (directory, path) = file(&text);
        std::fs::write(directory.path().join("ca.crt"), AUTHORITY).unwrap();
        let (cluster, credentials) = by_file_within(&path, &once()).unwrap();
        assert_eq!(cluster.server, format!("https://{}", server.address()));
        assert_eq!(credentials, Some(Credentials::Token("secret-token".to_owned())));
        assert_eq!(Authorities::parse(cluster.authority.as_bytes()).unwrap().hashes(), [HASH]);
        let head = server.requests().remove(0).to_ascii_lowercase();
        assert!(head.contains("\r\nauthorization: bearer secret-token\r\n"), "{head}");
    }
}

#[test]
fn discovery_file_of_another_cluster_or_with_expired_credentials_is_refused() {
    let requests = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&requests);
    let server = HttpsServer::start(move |_, _| {
        count.fetch_add(1, Ordering::Relaxed);
        json_response(401, r#"{"kind":"Status","message":"Unauthorized"}"#)
    });
    let data = |authority: &str| format!(", certificate-authority-data: {}", base64(authority.as_bytes()));
    let (_directory, path) = file(&discovery_file(&server, &data(OTHER_AUTHORITY), "{token: secret}"));
    let error = by_file_within(&path, &once()).unwrap_err();
    assert!(matches!(error, JoinError::NotTrusted { .. }), "{error}");
    assert_eq!(requests.load(Ordering::Relaxed), 0, "the token is not sent to it");
    let (_directory, path) = file(&discovery_file(&server, &data(AUTHORITY), "{token: secret}"));
    let error = by_file_within(&path, &Retry::discovery()).unwrap_err();
    assert!(matches!(error, JoinError::Denied { status: 401, .. }), "{error}");
    let (_directory, path) = file(&discovery_file(&server, &data(AUTHORITY), "{}"));
    assert_eq!(by_file_within(&path, &once()).unwrap().1, None, "it accepts no anonymous requests");
}

#[test]
fn invalid_discovery_files_are_named() {
    let (_directory, path) = file("clusters: [{name: '', cluster: {server: 'http://h:1'}}]");
    let error = by_file_within(&path, &once()).unwrap_err();
    assert!(matches!(&error, JoinError::File { path: shown, .. } if *shown == path.display().to_string()));
    let (_directory, path) = file("users: [{name: u, user: {token: [sesame]}}]");
    let error = by_file_within(&path, &once()).unwrap_err();
    assert!(error.exit_code() == 20 && !error.to_string().contains("sesame"), "{error}");
    let error = by_file_within(Path::new("/no/such/file"), &once()).unwrap_err();
    assert!(error.to_string().starts_with("/no/such/file: cannot be read"), "{error}");
}

fn k0s_token(text: &str) -> String {
    let mut gzip = Gzip::fast(Vec::new());
    gzip.write_all(text.as_bytes()).unwrap();
    base64(&gzip.finish().unwrap())
}

fn k0s_kubeconfig(user: &str, fields: &str) -> String {
    let data = base64(AUTHORITY.as_bytes());
    format!(
        "apiVersion: v1\nclusters:\n- cluster:\n    server: https://10.0.0.1:6443\n    \
         certificate-authority-data: {data}\n  name: k0s\ncontexts:\n- context:\n    cluster: k0s\n    \
         user: {user}\n  name: k0s\ncurrent-context: k0s\nkind: Config\nusers:\n- name: {user}\n  \
         user: {fields}\n"
    )
}

#[test]
fn join_token_of_k0s_has_cluster_and_credentials() {
    let packed = k0s_token(&k0s_kubeconfig("kubelet-bootstrap", "{token: abcdef.0123456789abcdef}"));
    let (first, rest) = packed.split_at(70);
    for text in [packed.clone(), format!("{first}\n{rest}\n")] {
        let (cluster, credentials) = by_k0s_token(&text).unwrap();
        assert_eq!(cluster.server, "https://10.0.0.1:6443");
        assert_eq!(Authorities::parse(cluster.authority.as_bytes()).unwrap().hashes(), [HASH]);
        assert_eq!(credentials, Credentials::Token("abcdef.0123456789abcdef".to_owned()));
    }
}

#[test]
fn texts_that_are_no_join_token_for_workers_are_refused_without_being_shown() {
    let worker = |fields: &str| k0s_token(&k0s_kubeconfig("kubelet-bootstrap", fields));
    for (text, reason) in [
        (String::new(), "is no gzip"),
        ("sesame!".to_owned(), "is no base64"),
        (base64(b"sesame"), "is no gzip"),
        ("A".repeat(MAX_K0S_TOKEN_BYTES + 1), "is larger than 1 MiB"),
        // A small text that becomes a large one.
        (k0s_token(&" ".repeat(4 << 20)), "is no gzip of at most 1 MiB"),
        (k0s_token("a: ["), "the join token of k0s:1"),
        (k0s_token("{}"), "current-context"),
        (worker("{}"), "has no credentials"),
        (worker("{tokenFile: /etc/passwd}"), "names a file"),
        (worker("{exec: {command: sesame}}"), "exec is not supported"),
        (
            k0s_token(&k0s_kubeconfig("controller-bootstrap", "{token: sesame}")),
            "is for controllers: `k0s token create --role=worker`",
        ),
    ] {
        let error = by_k0s_token(&text).unwrap_err();
        let shown = error.to_string();
        assert!(shown.contains(reason) && !shown.contains("sesame") && shown.len() < 500, "{shown}");
        assert_eq!(error.exit_code(), 20, "{shown}");
    }
}

#[test]
fn kubeconfig_of_a_bundle_has_cluster_and_credentials_and_names_no_files() {
    let cluster = Cluster { server: "https://10.0.0.1:6443".to_owned(), authority: AUTHORITY.to_owned() };
    let credentials = Credentials::Token(TOKEN.to_owned());
    let text = crate::join::credentials::bootstrap_kubeconfig(&cluster, &credentials);
    let (found, own) = by_kubeconfig(&text, "/b").unwrap();
    assert_eq!((found.server, own), (cluster.server, credentials));
    assert_eq!(Authorities::parse(found.authority.as_bytes()).unwrap().hashes(), [HASH]);
    for (text, reason) in [
        (k0s_kubeconfig("u", "{tokenFile: /etc/passwd}"), "names a file"),
        (k0s_kubeconfig("u", "{}"), "has no credentials"),
        (kubeconfig_with("https://10.0.0.1:6443", ""), "has no"),
        (" ".repeat(2 << 20), "larger than 1 MiB"),
        ("a: [".to_owned(), "/b:1"),
    ] {
        let error = by_kubeconfig(&text, "/b").unwrap_err();
        let shown = error.to_string();
        assert!(shown.starts_with("/b") && shown.contains(reason) && !shown.contains("sesame"), "{shown}");
        assert_eq!(error.exit_code(), 20, "{shown}");
    }
}
