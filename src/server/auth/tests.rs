//! Admission as a whole, with an API server and a time of the tests' own. Most certificates are
//! tested where they can be made, in `tests/integration`.

use std::cell::Cell;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

use super::*;
use crate::kube::reviews::Attributes;
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

/// `good-NAME` is NAME's token; users may do what their name says.
#[derive(Default)]
struct Fake {
    asked: Mutex<Vec<String>>,
    away: Mutex<bool>,
}

impl Fake {
    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }

    fn ask(&self, what: String) -> Result<(), String> {
        self.asked.lock().unwrap().push(what);
        if *self.away.lock().unwrap() { Err("connection refused".to_owned()) } else { Ok(()) }
    }
}

impl Reviews for Fake {
    fn token(&self, token: &str) -> Result<Option<User>, String> {
        self.ask(format!("token {token}"))?;
        Ok(token.strip_prefix("good-").map(|name| User { name: name.to_owned(), ..User::default() }))
    }

    fn access(&self, user: &User, attributes: &Attributes<'_>) -> Result<bool, String> {
        let Attributes { verb, node, subresource } = attributes;
        self.ask(format!("{} {verb} {node}/{subresource} {:?}", user.name, user.groups))?;
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

struct Door {
    auth: Auth,
    api: Arc<Fake>,
}

impl Door {
    fn new(settings: Settings) -> Door {
        let api = Arc::new(Fake::default());
        let auth = Auth::with_clock(settings, Some(Arc::clone(&api) as Arc<dyn Reviews>), clock).unwrap();
        Door { auth, api }
    }

    fn ask(&self, request: &str, token: &str) -> Result<User, (u16, String)> {
        let credentials =
            if token.is_empty() { String::new() } else { format!("Authorization: Bearer {token}") };
        let text = format!("{request} HTTP/1.1\r\nHost: n\r\nX-Remote-User: admin\r\n{credentials}");
        let mut head = RequestHead::parse(format!("{}\r\n\r\n", text.trim_end()).as_bytes()).unwrap();
        let outcome = self.auth.admit(&mut Visitor::default(), &Vec::new, &mut head, None);
        assert_eq!(head.fields.get("authorization"), None);
        outcome.map_err(|refusal| (refusal.status, refusal.text))
    }
}

fn unauthorized() -> Result<User, (u16, String)> {
    Err((401, "Unauthorized".to_owned()))
}

#[test]
fn tokens_are_reviewed_once_in_two_minutes() {
    let door = Door::new(settings());
    let user = door.ask("GET /metrics", "good-get-metrics").unwrap();
    assert_eq!((user.name.as_str(), user.groups), ("get-metrics", vec!["system:authenticated".to_owned()]));
    assert_eq!(
        door.api.asked(),
        ["token good-get-metrics", "get-metrics get n1/metrics [\"system:authenticated\"]"]
    );
    pass(119);
    assert!(door.ask("GET /metrics/cadvisor", "good-get-metrics").is_ok());
    assert_eq!(door.api.asked(), Vec::<String>::new());
    pass(1);
    assert!(door.ask("GET /metrics", "good-get-metrics").is_ok());
    assert_eq!(door.api.asked(), ["token good-get-metrics"]);
    // A no is remembered as well.
    assert_eq!(door.ask("GET /pods", "bad"), unauthorized());
    assert_eq!(door.ask("GET /metrics", "bad"), unauthorized());
    assert_eq!(door.api.asked(), ["token bad"]);
}

#[test]
fn what_is_tried_and_said() {
    let door = Door::new(settings());
    let forbidden = |text: &str| Err((403, text.to_owned()));
    assert_eq!(
        door.ask("GET /pods", "good-other").map(|user| user.name),
        forbidden("Forbidden (user=other, verb=get, resource=nodes, subresource(s)=[pods proxy])\n")
    );
    assert_eq!(
        door.ask("HEAD /metrics", "good-get-metrics").map(|user| user.name),
        forbidden("Forbidden (user=get-metrics, verb=, resource=nodes, subresource(s)=[metrics])\n")
    );
    assert_eq!(
        door.ask("GET /logs/", "good-get-proxy").map(|user| user.name),
        forbidden("Forbidden (user=get-proxy, verb=get, resource=nodes, subresource(s)=[log])\n")
    );
    assert_eq!(
        door.ask("POST /run/a/b/c", "good-get-proxy").map(|user| user.name),
        forbidden("Forbidden (user=get-proxy, verb=create, resource=nodes, subresource(s)=[proxy])\n")
    );
    // The finer right is enough, and so is the one for everything.
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
        assert!(door.ask(request, token).is_ok(), "{request} {token}");
    }
}

#[test]
fn answers_last_as_configured_and_then_it_fails_closed() {
    let door = Door::new(settings());
    assert!(door.ask("GET /metrics", "good-get-metrics").is_ok());
    assert!(door.ask("GET /metrics", "good-other").is_err());
    *door.api.away.lock().unwrap() = true;
    pass(29);
    assert!(door.ask("GET /metrics", "good-get-metrics").is_ok());
    assert_eq!(door.ask("GET /metrics", "good-other").map_err(|(status, _)| status), Err(403));
    pass(1);
    // The no is forgotten, the token not yet.
    let error = "Authorization error (user=other, verb=get, resource=nodes, subresource=metrics)";
    assert_eq!(door.ask("GET /metrics", "good-other"), Err((500, error.to_owned())));
    pass(89);
    assert!(door.ask("GET /metrics", "good-get-metrics").is_ok());
    pass(1);
    assert_eq!(door.ask("GET /metrics", "good-get-metrics"), unauthorized());
    *door.api.away.lock().unwrap() = false;
    // The right was remembered for longer than the token.
    door.api.asked();
    assert!(door.ask("GET /metrics", "good-get-metrics").is_ok());
    assert_eq!(door.api.asked(), ["token good-get-metrics"]);
}

#[test]
fn nobody_is_somebody_only_if_that_is_wanted() {
    assert_eq!(Door::new(settings()).ask("GET /healthz", ""), unauthorized());
    let door = Door::new(Settings { anonymous: true, mode: Mode::AlwaysAllow, ..settings() });
    let user = door.ask("GET /healthz", "").unwrap();
    assert_eq!(
        (user.name.as_str(), user.groups),
        ("system:anonymous", vec!["system:unauthenticated".to_owned()])
    );
    assert_eq!(door.ask("GET /healthz", "good-a").unwrap().name, "a");
    // A token that is wrong, or cannot be judged, makes nobody anonymous.
    assert_eq!(door.ask("GET /healthz", "bad"), unauthorized());
    *door.api.away.lock().unwrap() = true;
    assert_eq!(door.ask("GET /healthz", "good-b"), unauthorized());
    // Where tokens mean nothing, they are no credentials.
    let door = Door::new(Settings { tokens: None, anonymous: true, mode: Mode::AlwaysAllow, ..settings() });
    assert_eq!(door.ask("GET /healthz", "bad").unwrap().name, "system:anonymous");
}

#[test]
fn long_attributes_are_not_remembered() {
    let door = Door::new(settings());
    let long = format!("GET /anything/{}", "x".repeat(10_000));
    for _ in 0..2 {
        assert!(door.ask(&long, "good-get-proxy").is_ok());
    }
    assert_eq!(door.api.asked().len(), 3);
}

#[test]
fn settings_that_need_an_api_server_say_so() {
    let why = |settings| Auth::new(settings, None).err().unwrap_or_default();
    assert!(why(settings()).contains("no client provided, cannot use webhook authentication"));
    let authorization = why(Settings { tokens: None, ..settings() });
    assert!(
        authorization.contains("no client provided, cannot use webhook authorization"),
        "{authorization}"
    );
    assert_eq!(why(Settings { tokens: None, mode: Mode::AlwaysAllow, ..settings() }), "");
    let file = Some(PathBuf::from("/does/not/exist"));
    let why = why(Settings { client_ca_file: file, tokens: None, ..settings() });
    assert!(why.contains("unable to load client CA file /does/not/exist"), "{why}");
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
fn a_connection_verifies_its_certificate_once_until_authorities_or_time_change() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ca.crt");
    fs::write(&file, CLIENTS).unwrap();
    let settings = Settings { client_ca_file: Some(file.clone()), mode: Mode::AlwaysAllow, ..settings() };
    let door = Door::new(settings);
    let shown = Cell::new(0);
    let show = || {
        shown.set(shown.get() + 1);
        vec![der(JANE)]
    };
    let mut visitor = Visitor::default();
    let mut ask = |time: &str| {
        let mut head = RequestHead::parse(b"GET /pods HTTP/1.1\r\nHost: n\r\n\r\n").unwrap();
        let outcome = door.auth.admit_at(&mut visitor, &show, &mut head, None, time.parse().unwrap());
        (outcome.map(|user| user.name).map_err(|refusal| refusal.status), shown.get())
    };
    let jane = || Ok("jane".to_owned());
    for _ in 0..3 {
        assert_eq!(ask("2026-01-01T00:00:00Z"), (jane(), 1));
    }
    assert_eq!(ask("2040-01-01T00:00:00Z"), (jane(), 1), "its last second");
    // It expires; that is found once.
    for _ in 0..2 {
        assert_eq!(ask("2040-01-01T00:00:00.000000001Z"), (Err(401), 2));
    }
    // A clock that goes back, before its time and into it.
    assert_eq!(ask("2019-12-31T23:59:59Z"), (Err(401), 3));
    assert_eq!(ask("2020-01-01T00:00:00Z"), (jane(), 4));
    // Other authorities, and those of before.
    let write = |text: &str| {
        fs::write(&file, text).unwrap();
        pass(1);
    };
    write(OTHERS);
    for _ in 0..2 {
        assert_eq!(ask("2026-01-01T00:00:00Z"), (Err(401), 5));
    }
    write(&format!("{OTHERS}{CLIENTS}"));
    for _ in 0..2 {
        assert_eq!(ask("2026-01-01T00:00:00Z"), (jane(), 6));
    }
    // A file that was written again, or that is no bundle, changes nothing that matters.
    write("nonsense");
    assert_eq!(ask("2026-01-01T00:00:00Z"), (jane(), 6));
}

#[test]
fn a_client_certificate_of_the_bundle_is_accepted_and_signs_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ca.crt");
    fs::write(&file, JANE).unwrap();
    let settings = Settings { client_ca_file: Some(file), mode: Mode::AlwaysAllow, ..settings() };
    let door = Door::new(settings);
    let ask = |pem: &str, year: u16| {
        let mut head = RequestHead::parse(b"GET /pods HTTP/1.1\r\nHost: n\r\n\r\n").unwrap();
        let time = format!("{year}-06-01T00:00:00Z").parse().unwrap();
        let outcome = door.auth.admit_at(&mut Visitor::default(), &|| vec![der(pem)], &mut head, None, time);
        outcome.map(|user| user.name).map_err(|refusal| refusal.status)
    };
    assert_eq!(ask(JANE, 2026), Ok("jane".to_owned()));
    assert_eq!(ask(JANE, 2040), Err(401));
    assert_eq!(ask(CLIENTS, 2026), Err(401));
}
