use super::*;
use crossbeam_channel::Receiver;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::model::event::Event;
use crate::offline::Phase;
use crate::offline::test_store::TestStore;

/// An API server whose signer responds after some reads.
#[derive(Clone, Default)]
struct Fake {
    created: Arc<Mutex<Vec<Value>>>,
    /// What each read returns, in order; the last response repeats. `null`: deleted.
    responses: Arc<Mutex<Vec<Value>>>,
    reads: Arc<AtomicUsize>,
    /// The reads that are refused next: of the account or of the request.
    forbidden: Arc<Mutex<Vec<&'static str>>>,
    down: Arc<Mutex<bool>>,
}

impl CertificateApi for Fake {
    fn account_uid(&self, namespace: &str, name: &str) -> Result<String, ApiError> {
        self.refuse("account")?;
        Ok(format!("uid-of-{namespace}/{name}"))
    }

    fn node_uid(&self, name: &str) -> Result<String, ApiError> {
        Ok(format!("uid-of-{name}"))
    }

    fn create_request(&self, _: &str, body: &Value) -> Result<Request, ApiError> {
        if *self.down.lock().unwrap() {
            return Err(ApiError::for_test(503, "ServiceUnavailable", "down"));
        }
        let mut created = self.created.lock().unwrap();
        created.push(body.clone());
        let name = format!("req-{}", created.len());
        Ok(Request { metadata: RequestMetadata { name }, status: None })
    }

    fn read_request(&self, namespace: &str, name: &str) -> Result<Option<Request>, ApiError> {
        assert_eq!((namespace, name), ("n", format!("req-{}", self.created.lock().unwrap().len()).as_str()));
        self.refuse("request")?;
        let number = self.reads.fetch_add(1, Ordering::Relaxed);
        let responses = self.responses.lock().unwrap();
        let response = responses.get(number).or(responses.last()).cloned().unwrap_or_default();
        Ok(serde_json::from_value(response).unwrap())
    }
}

impl Fake {
    fn respond(&self, responses: &[Value]) {
        *self.responses.lock().unwrap() = responses.to_vec();
        self.reads.store(0, Ordering::Relaxed);
    }

    fn refuse(&self, read: &str) -> Result<(), ApiError> {
        let mut forbidden = self.forbidden.lock().unwrap();
        match forbidden.iter().position(|next| *next == read) {
            Some(position) => {
                forbidden.remove(position);
                Err(ApiError::for_test(403, "Forbidden", "no relationship found"))
            }
            None => Ok(()),
        }
    }

    fn created(&self) -> usize {
        self.created.lock().unwrap().len()
    }
}

fn issued(begin: &str) -> Value {
    let chain = format!("words\n{}", super::super::trust_bundles::certificate_pem(b"leaf".to_vec()));
    json!({"metadata": {"name": "r"}, "status": {"certificateChain": chain,
        "conditions": [{"type": "Issued", "status": "True", "reason": "r", "message": "m"}],
        "notBefore": "2020-01-01T00:00:00Z", "beginRefreshAt": begin, "notAfter": "2999-01-01T00:00:00Z"}})
}

fn pod() -> Pod {
    let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {"serviceAccountName": "sa", "nodeName": "node", "containers": []}});
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
}

struct Bench {
    fake: Fake,
    certificates: PodCertificates,
    events: EventSink,
    queue: Receiver<Box<Event>>,
}

impl Bench {
    fn new() -> Self {
        let fake = Fake::default();
        let (events, queue) = EventSink::new();
        Bench { certificates: PodCertificates::new(Box::new(fake.clone())), fake, events, queue }
    }

    fn get(&self, kind: &str) -> Result<Credential, CertificateError> {
        let source = json!({"signerName": "example.org/signer", "keyType": kind, "maxExpirationSeconds": 7200,
            "userAnnotations": {"example.org/a": "b"}, "credentialBundlePath": "bundle"});
        let source: PodCertificateProjection = serde_json::from_value(source).unwrap();
        let stop = StopToken::never();
        self.certificates.get(&pod(), ("v", 1), &source, (&self.events, &stop))
    }
}

#[test]
fn request_names_pod_account_and_node_and_its_certificate_is_used() {
    let bench = Bench::new();
    bench.fake.respond(&[json!({"metadata": {"name": "r"}}), issued("2999-01-01T00:00:00Z")]);
    let credential = bench.get("ECDSAP256").unwrap();
    assert!(credential.key().starts_with("-----BEGIN PRIVATE KEY-----\n"));
    assert!(credential.chain().starts_with("-----BEGIN CERTIFICATE-----\n"), "no text is left");
    let shown = format!("{credential:?}");
    assert!(shown.contains("Secret(..)") && !shown.contains("PRIVATE"), "{shown}");
    let mut body = bench.fake.created.lock().unwrap()[0].clone();
    let stub = body["spec"].as_object_mut().unwrap().remove("stubPKCS10Request").unwrap();
    assert!(crate::util::encoding::from_base64(stub.as_str().unwrap()).is_some());
    assert_eq!(
        body,
        json!({"kind": "PodCertificateRequest",
            "metadata": {"namespace": "n", "generateName": "req-",
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}]},
            "spec": {"signerName": "example.org/signer", "podName": "p", "podUID": "u",
                "serviceAccountName": "sa", "serviceAccountUID": "uid-of-n/sa",
                "nodeName": "node", "nodeUID": "uid-of-node", "maxExpirationSeconds": 7200,
                "unverifiedUserAnnotations": {"example.org/a": "b"}}})
    );
    assert_eq!(bench.get("ECDSAP256"), Ok(credential));
    assert_eq!(bench.fake.created(), 1);
    bench.certificates.forget(pod().uid());
    bench.fake.respond(&[issued("2999-01-01T00:00:00Z")]);
    assert!(bench.get("ECDSAP256").is_ok());
    assert_eq!(bench.fake.created(), 2);
}

#[test]
fn objects_that_may_not_be_read_yet_are_read_again() {
    let bench = Bench::new();
    bench.fake.respond(&[issued("2999-01-01T00:00:00Z")]);
    *bench.fake.forbidden.lock().unwrap() = vec!["account", "account", "request"];
    assert!(bench.get("ECDSAP256").is_ok());
    assert_eq!((bench.fake.created(), bench.fake.forbidden.lock().unwrap().len()), (1, 0));
    // An account that may not be read at all.
    let other = Bench::new();
    *other.fake.forbidden.lock().unwrap() = vec!["account"; 10];
    let error = other.get("ECDSAP256").unwrap_err().to_string();
    assert_eq!(error, "while fetching service account: no relationship found");
    assert_eq!((other.fake.created(), other.fake.forbidden.lock().unwrap().len()), (0, 7));
}

#[test]
fn old_request_that_may_not_be_read_was_deleted_and_is_repeated() {
    for (age, repeats) in [(FIRST_WAIT, 0), (DELETED_AFTER, 1)] {
        let bench = Bench::new();
        bench.fake.respond(&[issued("2999-01-01T00:00:00Z")]);
        *bench.fake.forbidden.lock().unwrap() = vec!["request"];
        let mut state = State::default();
        let created = Instant::now().checked_sub(age).unwrap();
        state.requested(Pending { name: "req-0".to_owned(), key: "key".to_owned().into(), created });
        let entry = Entry { signer: "s".to_owned(), state: Some(state), last: "not_yet_issued" };
        let places = HashMap::from([(("v".to_owned(), 1), entry)]);
        bench.certificates.table().insert(pod().uid().clone(), places);
        assert_eq!(bench.get("ECDSAP256").is_ok(), repeats > 0, "{age:?}");
        assert_eq!(bench.fake.created(), repeats, "{age:?}");
    }
}

#[test]
fn certificate_that_is_due_is_renewed_and_the_old_one_serves_meanwhile() {
    let bench = Bench::new();
    bench.fake.respond(&[issued("2020-01-01T00:00:00Z"), json!({"metadata": {"name": "r"}})]);
    // The first one is due at once.
    let first = bench.get("ED25519").unwrap();
    assert_eq!(bench.get("ED25519"), Ok(first.clone()));
    assert_eq!(bench.fake.created(), 2);
    let event = bench.queue.try_recv().unwrap();
    assert_eq!(event.reason, "CertificateOverdueForRefresh");
    *bench.fake.down.lock().unwrap() = true;
    bench.fake.respond(&[Value::Null]);
    assert_eq!(bench.get("ED25519"), Ok(first.clone()), "the request is gone, and no other is made");
    *bench.fake.down.lock().unwrap() = false;
    assert_eq!(bench.get("ED25519"), Ok(first), "a failed renewal is not repeated at once");
    assert_eq!(bench.fake.created(), 2);
    // A return of the API server ends that wait.
    assert_eq!(bench.certificates.returned(), [PodUid::from("u")]);
    bench.fake.respond(&[issued("2999-01-01T00:00:00Z")]);
    assert!(bench.get("ED25519").is_ok());
    assert_eq!(bench.fake.created(), 3);
    assert!(bench.certificates.returned().is_empty());
}

#[test]
fn stored_certificate_serves_after_a_restart_without_the_server_and_is_replaced_by_a_new_one() {
    let store = TestStore::new();
    store.enter(Phase::Online);
    let open = || {
        let mut bench = Bench::new();
        bench.certificates = bench.certificates.with_offline(Some(store.offline.clone()));
        bench
    };
    let bench = open();
    bench.fake.respond(&[issued("2999-01-01T00:00:00Z")]);
    let first = bench.get("ED25519").unwrap();
    let changes = store.changes();
    let key = changes.keys().next().unwrap();
    assert!(changes.len() == 1 && key.kind.is_sealed() && key.belongs_to("u"), "{key:?}");
    store.enter(Phase::Held);
    let other = open();
    *other.fake.down.lock().unwrap() = true;
    assert!(other.get("ECDSAP256").is_err(), "no such key is stored");
    let bench = open();
    *bench.fake.down.lock().unwrap() = true;
    assert!(bench.certificates.take_unrenewed().is_empty());
    assert_eq!(bench.get("ED25519"), Ok(first.clone()));
    assert!(!format!("{:?} {first:?}", store.offline).contains("PRIVATE KEY"));
    store.enter(Phase::Online);
    *bench.fake.down.lock().unwrap() = false;
    let own = BTreeSet::from([pod().uid().clone()]);
    assert_eq!(bench.certificates.take_unrenewed(), own, "its next sync may be a minute and a half away");
    bench.fake.respond(&[issued("2999-01-01T00:00:00Z")]);
    assert_ne!(bench.get("ED25519").unwrap().key(), first.key());
    assert_eq!(store.changes().len(), 1);
    assert!(bench.certificates.take_unrenewed().is_empty());
}

#[test]
fn certificates_are_counted_by_signer_and_state() {
    let bench = Bench::new();
    assert!(bench.certificates.states().is_empty());
    bench.fake.respond(&[issued("2999-01-01T00:00:00Z")]);
    bench.get("ECDSAP256").unwrap();
    let signer = "example.org/signer".to_owned();
    assert_eq!(bench.certificates.states(), BTreeMap::from([((signer.clone(), "fresh"), 1)]));
    bench.certificates.forget(pod().uid());
    assert!(bench.certificates.states().is_empty());
    *bench.fake.down.lock().unwrap() = true;
    bench.get("ECDSAP256").unwrap_err();
    assert_eq!(bench.certificates.states(), BTreeMap::from([((signer, "not_yet_issued"), 1)]));
}

#[test]
fn errors_of_first_requests_are_returned() {
    let bench = Bench::new();
    assert!(matches!(bench.get("RSA4096"), Err(CertificateError::KeyType(_))));
    *bench.fake.down.lock().unwrap() = true;
    let error = bench.get("ECDSAP384").unwrap_err().to_string();
    assert_eq!(error, "while creating PodCertificateRequest: down");
    *bench.fake.down.lock().unwrap() = false;
    let denied = json!({"metadata": {"name": "r"}, "status": {"conditions": [
        {"type": "Denied", "reason": "UnsupportedKeyType", "message": "ED25519"}]}});
    bench.fake.respond(&[denied]);
    let expected =
        "PodCertificateRequest was permanently denied: reason=\"UnsupportedKeyType\" message=\"ED25519\"";
    for _ in 0..2 {
        assert_eq!(bench.get("ECDSAP384").unwrap_err().to_string(), expected);
    }
    assert_eq!(bench.fake.created(), 1);
}
