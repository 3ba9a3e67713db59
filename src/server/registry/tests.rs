//! Tests of the registry with clients over loopback.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::publish::Publication;
use super::*;
use crate::images::{ArchiveSetReport, BlobError, archive};
use crate::server::serve::accept::Listener;
use crate::server::testing::FakeNode;
use crate::server::{NodeBackend, Settings, bind, start};
use crate::util::stop::StopToken;
use crate::util::threads::{OnDeath, Running};
use crate::util::{sha256, token};

const MEDIA: &str = "application/vnd.oci.image.manifest.v1+json";
/// The size of a broken blob: more than the buffers of two sockets.
const SIZE: u64 = 32 << 20;
const MANIFEST: &[u8] = b"{\"schemaVersion\":2}";

/// One image, `docker.io/library/web:1`, some blobs, and the reported address of the registry.
struct Fake {
    blob: Vec<u8>,
    address: Mutex<String>,
    calls: Mutex<Vec<String>>,
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", sha256::sha256_hex(bytes))
}

/// A digest of a blob that breaks off after this number of bytes.
fn broken(bytes: u64) -> String {
    format!("sha256:{bytes:064}")
}

impl Images for Fake {
    fn manifest(&self, repository: &str, reference: &str) -> Result<Document, LookupError> {
        self.calls.lock().unwrap().push(format!("{repository} {reference}"));
        match (repository, reference) {
            ("docker.io/library/web", reference) if reference == "1" || reference == digest(MANIFEST) => {
                Ok(Document { media_type: MEDIA.into(), digest: digest(MANIFEST), bytes: MANIFEST.into() })
            }
            ("docker.io/library/bad", _) => Err(LookupError::Unavailable("a.tar is gone".into())),
            _ => Err(LookupError::Unknown("no archive has it".into())),
        }
    }

    fn blob(&self, wanted: &str) -> Result<BlobSource, LookupError> {
        if wanted == digest(&self.blob) {
            let all = self.blob.clone();
            let open = move |from, _: &StopToken| -> Result<Box<dyn Read + Send>, BlobError> {
                Ok(Box::new(io::Cursor::new(all.get(usize::try_from(from).unwrap()..).unwrap().to_vec())))
            };
            return Ok(BlobSource { size: self.blob.len() as u64, open: Box::new(open) });
        }
        let Some(bytes) = wanted.strip_prefix("sha256:0").and_then(|digits| digits.parse::<u64>().ok())
        else {
            return Err(LookupError::Unknown("no archive has the blob".into()));
        };
        let open = move |_, _: &StopToken| match bytes {
            0 => Err(BlobError {
                path: "a.tar".into(),
                digest: "sha256:00".to_owned(),
                error: archive::ArchiveError::Changed,
            }),
            _ => Ok(Box::new(io::repeat(b'x').take(bytes)) as Box<dyn Read + Send>),
        };
        Ok(BlobSource { size: SIZE, open: Box::new(open) })
    }

    fn tags(&self, repository: &str) -> Vec<String> {
        (repository == "docker.io/library/web").then(|| "1".to_owned()).into_iter().collect()
    }

    fn report(&self) -> ArchiveSetReport {
        ArchiveSetReport { registry: self.address.lock().unwrap().clone(), ..ArchiveSetReport::default() }
    }

    fn rescan(&self) {
        self.calls.lock().unwrap().push("rescan".into());
    }

    fn set_registry(&self, address: &str) {
        address.clone_into(&mut self.address.lock().unwrap());
    }

    fn report_no_registry(&self, reason: &str) {
        self.calls.lock().unwrap().push(reason.to_owned());
    }
}

struct Fixture {
    server: Option<Running>,
    fake: Arc<Fake>,
    address: SocketAddr,
    mirror: PathBuf,
    token: String,
    dir: tempfile::TempDir,
}

struct ClientResponse {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl ClientResponse {
    fn field(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    /// The code of the error.
    fn code(&self) -> String {
        let document: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        document["errors"][0]["code"].as_str().unwrap().to_owned()
    }
}

impl Fixture {
    fn new(blob: &[u8]) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let fake =
            Arc::new(Fake { blob: blob.to_owned(), address: Mutex::default(), calls: Mutex::default() });
        let mut node = FakeNode::new();
        node.image_set = Arc::clone(&fake) as Arc<dyn Images>;
        let node: Arc<dyn NodeBackend> = Arc::new(node);
        let mirror = dir.path().join("hosts.toml");
        let settings = RegistrySettings::new(
            "127.0.0.1:0".parse().unwrap(),
            mirror.clone(),
            dir.path().join("mirror-token"),
        )
        .unwrap();
        let token = settings.token.clone();
        let settings = Settings {
            healthz: None,
            read_only: None,
            main: None,
            local_socket: dir.path().join("a.sock"),
            registry: Some(settings),
            any_namespace: false,
        };
        let listeners = bind(&settings, &*node).unwrap();
        let address = listeners.iter().find_map(Listener::address).unwrap();
        let server = start(listeners, settings, node, OnDeath::Unsupervised).unwrap();
        Fixture { server: Some(server), fake, address, mirror, token, dir }
    }

    fn connect(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    fn request(&self, method: &str, path: &str, fields: &str) -> ClientResponse {
        let mut stream = self.connect(&format!("{method} {path} HTTP/1.1\r\nHost: x\r\n{fields}\r\n"));
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        let end = all.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        let head = String::from_utf8(all[..end].to_vec()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        ClientResponse { status, head, body: all.split_off(end + 4) }
    }

    /// A GET of a path after the token, by containerd for docker.io.
    fn get(&self, path: &str, fields: &str) -> ClientResponse {
        self.request("GET", &format!("/v2/{}/{path}?ns=docker.io", self.token), fields)
    }
}

#[test]
fn manifest_is_served_by_tag_and_digest_to_both_runtimes() {
    let fixture = Fixture::new(b"");
    let (token, by_digest) = (&fixture.token, digest(MANIFEST));
    for path in [
        format!("/v2/{token}/library/web/manifests/1?ns=docker.io"),
        format!("/v2/{token}/library/web/manifests/{by_digest}?ns=docker.io"),
        format!("/v2/{token}/docker.io/library/web/manifests/1"),
        format!("/v2/{token}/docker.io/library/web/manifests/{by_digest}"),
    ] {
        for method in ["GET", "HEAD"] {
            let got = fixture.request(method, &path, "Accept: */*\r\n");
            let body: &[u8] = if method == "GET" { MANIFEST } else { b"" };
            assert_eq!((got.status, got.body.as_slice()), (200, body), "{method} {path}");
            assert_eq!(got.field("Content-Type"), Some(MEDIA));
            assert_eq!(got.field("Content-Length"), Some("19"));
            assert_eq!(got.field("Docker-Content-Digest"), Some(by_digest.as_str()));
            assert_eq!(got.field("ETag"), Some(format!("\"{by_digest}\"").as_str()));
        }
    }
    let tags = fixture.request("GET", &format!("/v2/{token}/docker.io/library/web/tags/list"), "");
    let document: serde_json::Value = serde_json::from_slice(&tags.body).unwrap();
    assert_eq!(document, json!({"name": "docker.io/library/web", "tags": ["1"]}));
    // A registry with a port, in both forms.
    let path = format!("/v2/{token}/a/b/manifests/2?ns=registry.example%3A5000");
    assert_eq!(fixture.request("GET", &path, "").code(), "MANIFEST_UNKNOWN");
    let path = format!("/v2/{token}/registry.example__5000/a/b/manifests/2");
    assert_eq!(fixture.request("GET", &path, "").code(), "MANIFEST_UNKNOWN");
    let calls = fixture.fake.calls.lock().unwrap().clone();
    assert_eq!(calls[8..], ["registry.example:5000/a/b 2", "registry.example:5000/a/b 2"]);
}

#[test]
fn errors_have_the_code_of_the_specification() {
    let fixture = Fixture::new(b"");
    let absent = digest(b"absent");
    for (path, status, code) in [
        ("library/web/manifests/2", 404, "MANIFEST_UNKNOWN"),
        ("library/bad/manifests/1", 503, "UNAVAILABLE"),
        (&format!("library/web/blobs/{absent}"), 404, "BLOB_UNKNOWN"),
        (&format!("library/web/blobs/{}", broken(0)), 503, "UNAVAILABLE"),
        ("library/web/blobs/sha256:1", 400, "DIGEST_INVALID"),
        ("library/Web/manifests/1", 400, "NAME_INVALID"),
        ("library/other/tags/list", 404, "NAME_UNKNOWN"),
        ("library/web/uploads/1", 404, "NAME_UNKNOWN"),
    ] {
        let got = fixture.get(path, "");
        assert_eq!((got.status, got.code().as_str()), (status, code), "{path}");
        assert_eq!(got.field("Content-Type"), Some("application/json"));
    }
    let unavailable = fixture.get("library/bad/manifests/1", "");
    assert!(String::from_utf8(unavailable.body).unwrap().contains("a.tar is gone"));
}

#[test]
fn only_reads_are_allowed() {
    let fixture = Fixture::new(b"");
    let path = format!("/v2/{}/library/web/manifests/1?ns=docker.io", fixture.token);
    for method in ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
        for fields in ["Content-Length: 0\r\n", "Content-Length: 100\r\n"] {
            let got = fixture.request(method, &path, fields);
            assert_eq!((got.status, got.code().as_str()), (405, "UNSUPPORTED"), "{method}");
            assert_eq!(got.field("Allow"), Some("GET, HEAD"));
        }
    }
}

#[test]
fn without_the_token_nothing_is_served() {
    let fixture = Fixture::new(b"");
    let manifest = "library/web/manifests/1?ns=docker.io";
    let get = |token: &str| fixture.request("GET", &format!("/v2/{token}/{manifest}"), "").status;
    assert_eq!(get(&fixture.token), 200);
    let other = token::new().unwrap();
    for wrong in ["", "x", other.as_str(), fixture.token.get(1..).unwrap(), &format!("{}0", fixture.token)] {
        assert_eq!(get(wrong), 404, "{wrong}");
    }
    assert_eq!(fixture.request("GET", &format!("/v2/{manifest}"), "").status, 404);
    // No other listener's paths.
    for path in ["/", "/pods", "/healthz", "/metrics", "/v1/pods", "/v2/x"] {
        assert_eq!(fixture.request("GET", path, "").status, 404, "{path}");
    }
    // CRI-O requests this before any image.
    assert_eq!(fixture.request("GET", "/v2/", "").status, 200);
    assert_eq!(fixture.request("GET", &format!("/v2/{}/", fixture.token), "").status, 200);
    // The token of the node is read when it is needed.
    let file = fixture.dir.path().join("mirror-token");
    std::fs::write(&file, format!("{other}\n")).unwrap();
    assert_eq!((get(&other), get(&fixture.token), get("")), (200, 200, 404));
    std::fs::write(&file, "\n").unwrap();
    assert_eq!((get(&other), get("")), (404, 404));
}

#[test]
fn ranges_of_a_blob_are_exact() {
    let blob: Vec<u8> = (0..200_000_u32).map(|number| (number % 251) as u8).collect();
    let fixture = Fixture::new(&blob);
    let path = format!("library/web/blobs/{}", digest(&blob));
    let whole = fixture.get(&path, "");
    assert!(whole.status == 200 && whole.body == blob);
    assert_eq!(whole.field("Accept-Ranges"), Some("bytes"));
    assert_eq!(whole.field("Content-Length"), Some("200000"));
    assert_eq!(whole.field("Content-Type"), Some("application/octet-stream"));
    assert_eq!(whole.field("Docker-Content-Digest"), Some(digest(&blob).as_str()));
    for (range, from, to) in [
        ("0-", 0, 199_999),
        ("65536-", 65_536, 199_999),
        ("7-70000", 7, 70_000),
        ("199999-", 199_999, 199_999),
    ] {
        let got = fixture.get(&path, &format!("Range: bytes={range}\r\n"));
        assert!(got.status == 206 && got.body == blob[from..=to], "{range}");
        let expected = format!("bytes {from}-{to}/200000");
        assert_eq!(got.field("Content-Range"), Some(expected.as_str()));
        assert_eq!(got.field("Content-Length"), Some((to - from + 1).to_string().as_str()));
    }
    let got = fixture.get(&path, "Range: bytes=200000-\r\n");
    assert_eq!((got.status, got.code().as_str()), (416, "RANGE_INVALID"));
    assert_eq!(got.field("Content-Range"), Some("bytes */200000"));
    let head =
        fixture.request("HEAD", &format!("/v2/{}/{path}?ns=docker.io", fixture.token), "Range: bytes=5-\r\n");
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(head.field("Content-Length"), Some("200000"));
}

#[test]
fn empty_blob_is_served() {
    let fixture = Fixture::new(b"");
    let got = fixture.get(&format!("library/web/blobs/{}", digest(b"")), "");
    assert_eq!((got.status, got.field("Content-Length"), got.body.len()), (200, Some("0"), 0));
}

#[test]
fn blob_that_fails_half_way_ends_the_connection_early() {
    let fixture = Fixture::new(b"");
    for bytes in [1, 65_536, 300_001] {
        let got = fixture.get(&format!("library/web/blobs/{}", broken(bytes)), "");
        assert_eq!((got.status, got.field("Content-Length")), (200, Some(SIZE.to_string().as_str())));
        assert!(got.body.len() as u64 <= bytes, "{bytes}");
    }
    // More bytes than the archive's index says are not sent.
    let got = fixture.get(&format!("library/web/blobs/{}", broken(2 * SIZE)), "");
    assert_eq!((got.status, got.body.len() as u64), (200, SIZE));
}

#[test]
fn slow_client_delays_no_other() {
    let fixture = Fixture::new(b"");
    let blob = format!("/v2/{}/library/web/blobs/{}?ns=docker.io", fixture.token, broken(SIZE));
    let request = format!("GET {blob} HTTP/1.1\r\nHost: x\r\n\r\n");
    // The sockets' buffers take less than the blob, so these wait for their clients.
    let mut slow: Vec<TcpStream> = (0..31).map(|_| fixture.connect(&request)).collect();
    assert_eq!(fixture.get("library/web/manifests/1", "").status, 200);
    let mut body = Vec::new();
    slow[0].read_to_end(&mut body).unwrap();
    assert!(body.ends_with(&[b'x'; 100]) && body.len() as u64 > SIZE);
}

#[test]
fn mirror_file_exists_while_the_registry_listens() {
    let mut fixture = Fixture::new(b"");
    let text = std::fs::read_to_string(&fixture.mirror).unwrap();
    let line = format!("[host.\"http://{}/v2/{}\"]\n", fixture.address, fixture.token);
    assert!(text.contains(&line) && !text.contains("server"), "{text}");
    assert_eq!(std::fs::metadata(&fixture.mirror).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fixture.fake.report().registry, fixture.address.to_string());
    fixture.server.take().unwrap().stop(Duration::from_secs(30));
    assert!(!fixture.mirror.exists());
}

#[test]
fn mirror_file_of_another_agent_stays() {
    let mut fixture = Fixture::new(b"");
    std::fs::write(&fixture.mirror, "[host.\"http://127.0.0.1:1/v2/x\"]\n").unwrap();
    fixture.server.take().unwrap().stop(Duration::from_secs(30));
    assert!(fixture.mirror.exists());
}

#[test]
fn registry_whose_port_is_taken_leaves_no_mirror_file_and_reports_it() {
    let fixture = Fixture::new(b"");
    let settings = RegistrySettings::new(
        // It is taken by the fixture.
        fixture.address,
        fixture.dir.path().join("other.toml"),
        fixture.dir.path().join("mirror-token"),
    )
    .unwrap();
    // As an agent left it that was killed.
    std::fs::copy(&fixture.mirror, &settings.mirror_file).unwrap();
    let images = Arc::clone(&fixture.fake) as Arc<dyn Images>;
    let listener = Listener::registry(settings.address, Publication::new(&settings, images));
    assert_eq!(listener.address(), None);
    assert!(!settings.mirror_file.exists());
    let calls = fixture.fake.calls.lock().unwrap();
    assert!(calls.iter().any(|call| call.contains(&fixture.address.to_string())), "{calls:?}");
}
