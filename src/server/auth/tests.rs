//! Authentication and authorization together, with a fake API server and a fake clock. Most
//! certificates are tested where they can be made, in `tests/integration`.

use std::cell::Cell;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

use super::*;
use crate::kube::reviews::{Attributes, ReviewError};
use crate::util::encoding::from_base64;

thread_local! {
    static LATER: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

fn clock() -> Instant {
    static BEGUN: OnceLock<Instant> = OnceLock::new();
    *BEGUN.get_or_init(Instant::now) + LATER.get()
}

fn pass(seconds: u64) {
    LATER.set(LATER.get() + Duration::from_secs(seconds));
}

/// An API server: `good-NAME` is the token of NAME, and the name of a user is its permission.
#[derive(Default)]
struct Fake {
    requests: Mutex<Vec<String>>,
    unavailable: Mutex<bool>,
}

impl Fake {
    fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }

    fn request(&self, what: String) -> Result<(), ReviewError> {
        self.requests.lock().unwrap().push(what);
        match *self.unavailable.lock().unwrap() {
            true => Err(ReviewError::Undecided("connection refused".to_owned())),
            false => Ok(()),
        }
    }
}

impl Reviews for Fake {
    fn token(&self, token: &str) -> Result<Option<User>, ReviewError> {
        self.request(format!("token {token}"))?;
        Ok(token.strip_prefix("good-").map(|name| User { name: name.to_owned(), ..User::default() }))
    }

    fn access(&self, user: &User, attributes: &Attributes<'_>) -> Result<bool, ReviewError> {
        let Attributes { verb, node, subresource } = attributes;
        self.request(format!("{} {verb} {node}/{subresource} {:?}", user.name, user.groups))?;
        Ok(user.name == "admin" || user.name == format!("{verb}-{subresource}"))
    }
}

fn settings() -> Settings {
    Settings {
        node: "n1".into(),
        client_ca_file: None,
        tokens: Some(Duration::from_secs(120)),
        anonymous: false,
        mode: Mode::Webhook { allowed: Duration::from_secs(300), denied: Duration::from_secs(30) },
    }
}

struct Fixture {
    auth: Auth,
    api: Arc<Fake>,
}

impl Fixture {
    fn new(settings: Settings) -> Fixture {
        let api = Arc::new(Fake::default());
        let auth = Auth::with_clock(settings, Some(Arc::clone(&api) as Arc<dyn Reviews>), clock).unwrap();
        Fixture { auth, api }
    }

    fn request(&self, request: &str, token: &str) -> Result<User, (u16, String)> {
        let credentials =
            if token.is_empty() { String::new() } else { format!("Authorization: Bearer {token}") };
        let text = format!("{request} HTTP/1.1\r\nHost: n\r\nX-Remote-User: admin\r\n{credentials}");
        let mut head = RequestHead::parse(format!("{}\r\n\r\n", text.trim_end()).as_bytes()).unwrap();
        let outcome = self.auth.admit(&mut ClientAuth::default(), &Vec::new, &mut head, None);
        assert_eq!(head.fields.get("authorization"), None);
        outcome.map_err(|rejection| (rejection.status, rejection.text))
    }
}

fn unauthorized() -> Result<User, (u16, String)> {
    Err((401, "Unauthorized".to_owned()))
}

#[test]
fn tokens_are_reviewed_once_in_two_minutes() {
    let fixture = Fixture::new(settings());
    let user = fixture.request("GET /metrics", "good-get-metrics").unwrap();
    assert_eq!((user.name.as_str(), user.groups), ("get-metrics", vec!["system:authenticated".to_owned()]));
    assert_eq!(
        fixture.api.requests(),
        ["token good-get-metrics", "get-metrics get n1/metrics [\"system:authenticated\"]"]
    );
    pass(119);
    assert!(fixture.request("GET /metrics/cadvisor", "good-get-metrics").is_ok());
    assert_eq!(fixture.api.requests(), Vec::<String>::new());
    pass(1);
    assert!(fixture.request("GET /metrics", "good-get-metrics").is_ok());
    assert_eq!(fixture.api.requests(), ["token good-get-metrics"]);
    // A rejection is cached as well.
    assert_eq!(fixture.request("GET /pods", "bad"), unauthorized());
    assert_eq!(fixture.request("GET /metrics", "bad"), unauthorized());
    assert_eq!(fixture.api.requests(), ["token bad"]);
}

#[test]
fn each_sub_resource_is_tried_and_a_denial_names_them() {
    let fixture = Fixture::new(settings());
    for (request, user, denied) in [
        ("GET /pods", "other", "verb=get, resource=nodes, subresource(s)=[pods proxy]"),
        ("HEAD /metrics", "get-metrics", "verb=, resource=nodes, subresource(s)=[metrics]"),
        ("GET /logs/", "get-proxy", "verb=get, resource=nodes, subresource(s)=[log]"),
        ("POST /run/a/b/c", "get-proxy", "verb=create, resource=nodes, subresource(s)=[proxy]"),
    ] {
        let denied = Err((403, format!("Forbidden (user={user}, {denied})\n")));
        assert_eq!(fixture.request(request, &format!("good-{user}")), denied, "{request}");
    }
    // Access to one of the sub-resources is enough.
    for (request, token) in [
        ("GET /metrics/cadvisor", "good-get-metrics"),
        ("GET /metrics/probes", "good-get-metrics"),
        ("GET /metrics/resource", "good-get-metrics"),
        ("GET /logs/a", "good-get-log"),
        ("GET /pods", "good-get-pods"),
        ("GET /pods", "good-get-proxy"),
        ("GET /healthz/ping", "good-get-healthz"),
        ("GET /exec/a/b/c", "good-get-proxy"),
        ("POST /exec/a/b/c", "good-create-proxy"),
        ("PUT /debug/flags/v", "good-update-proxy"),
        ("GET /anything", "good-admin"),
    ] {
        assert!(fixture.request(request, token).is_ok(), "{request} {token}");
    }
}

#[test]
fn decisions_expire_as_configured_and_then_access_fails_closed() {
    let fixture = Fixture::new(settings());
    assert!(fixture.request("GET /metrics", "good-get-metrics").is_ok());
    assert!(fixture.request("GET /metrics", "good-other").is_err());
    *fixture.api.unavailable.lock().unwrap() = true;
    pass(29);
    assert!(fixture.request("GET /metrics", "good-get-metrics").is_ok());
    assert_eq!(fixture.request("GET /metrics", "good-other").map_err(|(status, _)| status), Err(403));
    pass(1);
    // The denial has expired, the token has not.
    let error = "Authorization error (user=other, verb=get, resource=nodes, subresource=metrics)";
    assert_eq!(fixture.request("GET /metrics", "good-other"), Err((500, error.to_owned())));
    pass(89);
    assert!(fixture.request("GET /metrics", "good-get-metrics").is_ok());
    pass(1);
    assert_eq!(fixture.request("GET /metrics", "good-get-metrics"), unauthorized());
    *fixture.api.unavailable.lock().unwrap() = false;
    // The decision is cached for longer than the token.
    fixture.api.requests();
    assert!(fixture.request("GET /metrics", "good-get-metrics").is_ok());
    assert_eq!(fixture.api.requests(), ["token good-get-metrics"]);
}

#[test]
fn requests_without_credentials_are_anonymous_only_if_configured() {
    assert_eq!(Fixture::new(settings()).request("GET /healthz", ""), unauthorized());
    let fixture = Fixture::new(Settings { anonymous: true, mode: Mode::AlwaysAllow, ..settings() });
    let user = fixture.request("GET /healthz", "").unwrap();
    assert_eq!(
        (user.name.as_str(), user.groups),
        ("system:anonymous", vec!["system:unauthenticated".to_owned()])
    );
    assert_eq!(fixture.request("GET /healthz", "good-a").unwrap().name, "a");
    // A request with an invalid token, or one that cannot be reviewed, is not anonymous.
    assert_eq!(fixture.request("GET /healthz", "bad"), unauthorized());
    *fixture.api.unavailable.lock().unwrap() = true;
    assert_eq!(fixture.request("GET /healthz", "good-b"), unauthorized());
    // Without token authentication a token is ignored.
    let fixture =
        Fixture::new(Settings { tokens: None, anonymous: true, mode: Mode::AlwaysAllow, ..settings() });
    assert_eq!(fixture.request("GET /healthz", "bad").unwrap().name, "system:anonymous");
}

#[test]
fn decisions_on_long_attributes_are_not_cached() {
    let fixture = Fixture::new(settings());
    let long = format!("GET /anything/{}", "x".repeat(10_000));
    for _ in 0..2 {
        assert!(fixture.request(&long, "good-get-proxy").is_ok());
    }
    assert_eq!(fixture.api.requests().len(), 3);
}

#[test]
fn settings_that_need_an_api_server_are_rejected_without_one() {
    let error_of =
        |settings| Auth::new(settings, None).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error_of(settings()).contains("no client provided, cannot use webhook authentication"));
    let authorization = error_of(Settings { tokens: None, ..settings() });
    assert!(
        authorization.contains("no client provided, cannot use webhook authorization"),
        "{authorization}"
    );
    assert_eq!(error_of(Settings { tokens: None, mode: Mode::AlwaysAllow, ..settings() }), "");
    let file = Some(PathBuf::from("/does/not/exist"));
    let error = error_of(Settings { client_ca_file: file, tokens: None, ..settings() });
    assert!(error.contains("unable to load client CA file /does/not/exist"), "{error}");
}

/// The authorities "clients" and "others", and a certificate of "jane" in the group "readers" by
/// "clients" that is valid from 2020 to 2040. The authorities live until 2100.
const CLIENTS: &str = include_str!("data/clients.crt");
const OTHERS: &str = include_str!("data/others.crt");
const JANE: &str = include_str!("data/jane.crt");

fn der(pem: &str) -> Vec<u8> {
    let body: String = pem.lines().filter(|line| !line.starts_with('-')).collect();
    from_base64(&body).unwrap()
}

#[test]
fn connection_verifies_its_certificate_once_until_authorities_or_time_change() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ca.crt");
    fs::write(&file, CLIENTS).unwrap();
    let settings = Settings { client_ca_file: Some(file.clone()), mode: Mode::AlwaysAllow, ..settings() };
    let fixture = Fixture::new(settings);
    let shown = Cell::new(0);
    let show = || {
        shown.set(shown.get() + 1);
        vec![der(JANE)]
    };
    let mut client = ClientAuth::default();
    let mut request = |time: &str| {
        let mut head = RequestHead::parse(b"GET /pods HTTP/1.1\r\nHost: n\r\n\r\n").unwrap();
        let outcome = fixture.auth.admit_at(&mut client, &show, &mut head, None, time.parse().unwrap());
        (outcome.map(|user| user.name).map_err(|rejection| rejection.status), shown.get())
    };
    let jane = || Ok("jane".to_owned());
    for _ in 0..3 {
        assert_eq!(request("2026-01-01T00:00:00Z"), (jane(), 1));
    }
    assert_eq!(request("2040-01-01T00:00:00Z"), (jane(), 1), "its last second");
    // The expiry of the certificate is detected once.
    for _ in 0..2 {
        assert_eq!(request("2040-01-01T00:00:00.000000001Z"), (Err(401), 2));
    }
    // A clock that goes back, before its time and into it.
    assert_eq!(request("2019-12-31T23:59:59Z"), (Err(401), 3));
    assert_eq!(request("2020-01-01T00:00:00Z"), (jane(), 4));
    // Other authorities, and those of before.
    let write = |text: &str| {
        fs::write(&file, text).unwrap();
        pass(1);
    };
    write(OTHERS);
    for _ in 0..2 {
        assert_eq!(request("2026-01-01T00:00:00Z"), (Err(401), 5));
    }
    write(&format!("{OTHERS}{CLIENTS}"));
    for _ in 0..2 {
        assert_eq!(request("2026-01-01T00:00:00Z"), (jane(), 6));
    }
    // A file that is not a bundle leaves the last authorities in use.
    write("nonsense");
    assert_eq!(request("2026-01-01T00:00:00Z"), (jane(), 6));
}

#[test]
fn client_certificate_of_the_bundle_is_accepted_and_signs_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ca.crt");
    fs::write(&file, JANE).unwrap();
    let settings = Settings { client_ca_file: Some(file), mode: Mode::AlwaysAllow, ..settings() };
    let fixture = Fixture::new(settings);
    let request = |pem: &str, year: u16| {
        let mut head = RequestHead::parse(b"GET /pods HTTP/1.1\r\nHost: n\r\n\r\n").unwrap();
        let time = format!("{year}-06-01T00:00:00Z").parse().unwrap();
        let outcome =
            fixture.auth.admit_at(&mut ClientAuth::default(), &|| vec![der(pem)], &mut head, None, time);
        outcome.map(|user| user.name).map_err(|rejection| rejection.status)
    };
    assert_eq!(request(JANE, 2026), Ok("jane".to_owned()));
    assert_eq!(request(JANE, 2040), Err(401));
    assert_eq!(request(CLIENTS, 2026), Err(401));
}
