use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequestCondition, CertificateSigningRequestStatus,
};

use super::*;
use crate::kube::certificates::csr::ServingNames;

/// A signer with its own key. `Behaviour` selects how it treats requests.
#[derive(Clone)]
pub(in super::super) struct FakeSigner {
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    requests: BTreeMap<String, CertificateSigningRequest>,
    behaviour: Behaviour,
    lifetime: Duration,
    now: Timestamp,
    created: usize,
    looks: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Behaviour {
    Approve,
    Wait,
    Deny,
    Fail,
    Away,
    OtherKey,
    Expired,
    /// Most of its lifetime has passed when it is issued.
    Old,
}

impl FakeSigner {
    pub(in super::super) fn approving() -> FakeSigner {
        FakeSigner::with_behaviour(Behaviour::Approve, Timestamp::now())
    }

    fn with_behaviour(behaviour: Behaviour, now: Timestamp) -> FakeSigner {
        FakeSigner {
            inner: Arc::new(Mutex::new(Inner {
                requests: BTreeMap::new(),
                behaviour,
                lifetime: Duration::from_secs(1000),
                now,
                created: 0,
                looks: 0,
            })),
        }
    }

    pub(in super::super) fn boxed(&self) -> Box<dyn Signer + Send> {
        Box::new(self.clone())
    }

    pub(in super::super) fn opener(&self) -> OpenSigner {
        let signer = self.clone();
        Box::new(move || Ok(signer.boxed()))
    }

    fn set(&self, behaviour: Behaviour, now: Timestamp) {
        let mut inner = self.inner.lock().unwrap();
        (inner.behaviour, inner.now) = (behaviour, now);
    }

    fn counts(&self) -> (usize, usize) {
        let inner = self.inner.lock().unwrap();
        (inner.created, inner.looks)
    }

    fn names(&self) -> Vec<String> {
        self.inner.lock().unwrap().requests.keys().cloned().collect()
    }

    fn delete_all(&self) {
        self.inner.lock().unwrap().requests.clear();
    }
}

impl Signer for FakeSigner {
    fn create(&self, request: &CertificateSigningRequest) -> Result<CertificateSigningRequest, Refusal> {
        let mut inner = self.inner.lock().unwrap();
        if inner.behaviour == Behaviour::Away {
            return Err(Refusal::Other("connection refused".into()));
        }
        inner.created += 1;
        let mut made = request.clone();
        let prefix = request.metadata.generate_name.clone().unwrap_or_default();
        let name = request.metadata.name.clone().unwrap_or(format!("{prefix}{}", inner.created));
        if inner.requests.contains_key(&name) {
            inner.created -= 1;
            return Err(Refusal::AlreadyExists);
        }
        made.metadata.name = Some(name.clone());
        made.metadata.uid = Some(format!("uid-{}", inner.created));
        inner.requests.insert(name, made.clone());
        Ok(made)
    }

    fn get(&self, name: &str) -> Result<CertificateSigningRequest, Refusal> {
        let mut inner = self.inner.lock().unwrap();
        inner.looks += 1;
        let mut seen = inner.requests.get(name).cloned().ok_or(Refusal::NotFound)?;
        let condition = |kind: &str| {
            vec![CertificateSigningRequestCondition {
                type_: kind.into(),
                reason: Some("Because".into()),
                message: Some("of that".into()),
                status: "True".into(),
                ..CertificateSigningRequestCondition::default()
            }]
        };
        let status = |kind: &str, chain: Option<String>| {
            Some(CertificateSigningRequestStatus {
                conditions: Some(condition(kind)),
                certificate: chain.map(|text| ByteString(text.into_bytes())),
            })
        };
        seen.status = match inner.behaviour {
            Behaviour::Away => return Err(Refusal::Other("connection refused".into())),
            Behaviour::Wait => None,
            Behaviour::Deny => status("Denied", None),
            Behaviour::Fail => status("Failed", None),
            Behaviour::Approve => status("Approved", Some(sign(&seen, inner.now, inner.lifetime, true))),
            Behaviour::Old => {
                let past = inner.now - SignedDuration::from_secs(950);
                status("Approved", Some(sign(&seen, past, inner.lifetime, true)))
            }
            Behaviour::OtherKey => status("Approved", Some(sign(&seen, inner.now, inner.lifetime, false))),
            Behaviour::Expired => {
                let past = inner.now - SignedDuration::from_secs(5000);
                status("Approved", Some(sign(&seen, past, inner.lifetime, true)))
            }
        };
        Ok(seen)
    }
}

/// The public key of a request, for a certificate with that key.
struct RequestKey(Vec<u8>);

impl rcgen::PublicKeyData for RequestKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }
    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &rcgen::PKCS_ECDSA_P256_SHA256
    }
}

/// The certificate that a signer issues. The request's key is the 65 bytes of its point.
fn sign(request: &CertificateSigningRequest, from: Timestamp, lifetime: Duration, its_key: bool) -> String {
    let der = pem::parse(&request.spec.request.0).unwrap();
    // SubjectPublicKeyInfo of P-256: a bit string of 66 bytes after the curve's identifier.
    let curve = [0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00];
    let offset = der.contents().windows(curve.len()).position(|part| part == curve).unwrap() + curve.len();
    let mut point = der.contents()[offset..offset + 65].to_vec();
    if !its_key {
        point[64] ^= 1;
    }
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let ca = rcgen::Issuer::new(rcgen::CertificateParams::default(), ca_key);
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::OrganizationName, "system:nodes");
    params.distinguished_name.push(rcgen::DnType::CommonName, "system:node:node1");
    for ip in ["10.0.0.7", "10.0.0.8"] {
        let ip: std::net::IpAddr = ip.parse().unwrap();
        let std::net::IpAddr::V4(v4) = ip else { unreachable!() };
        if der.contents().windows(4).any(|part| part == v4.octets()) {
            params.subject_alt_names.push(rcgen::SanType::IpAddress(ip));
        }
    }
    let seconds = u64::try_from(from.as_second()).unwrap();
    params.not_before = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
    params.not_after = params.not_before + lifetime;
    params.signed_by(&RequestKey(point), &ca).unwrap().pem()
}

fn timestamp(second: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + second).unwrap()
}

struct Fixture {
    _dir: tempfile::TempDir,
    store: Store,
    signer: FakeSigner,
    template: Template,
}

impl Fixture {
    fn new(behaviour: Behaviour) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        Fixture {
            store: Store::new(dir.path(), Purpose::Client),
            _dir: dir,
            signer: FakeSigner::with_behaviour(behaviour, timestamp(0)),
            template: Template::client("node1"),
        }
    }

    fn bootstrapping(&self) -> Rotation {
        Rotation::new(self.store.clone(), None, None, Some(self.signer.opener()), 0.5)
    }

    fn own(&self, current: Option<Identity>) -> Rotation {
        Rotation::new(self.store.clone(), current, Some(self.signer.boxed()), None, 0.5)
    }

    /// Runs each due turn, starting at `second`, until an outcome other than `Quiet`.
    fn next(&self, rotation: &mut Rotation, second: &mut i64) -> Outcome {
        for _ in 0..10_000 {
            let due = rotation.due(Some(&self.template), timestamp(*second));
            if due == Timestamp::MAX {
                panic!("nothing is due");
            }
            let wait = due.duration_since(timestamp(*second)).max(SignedDuration::ZERO);
            *second += wait.as_secs() + i64::from(wait.subsec_nanos() > 0);
            match rotation.turn(Some(&self.template), timestamp(*second), 0.5) {
                Outcome::Quiet => {}
                outcome => return outcome,
            }
        }
        panic!("always quiet");
    }

    fn failure(&self, rotation: &mut Rotation, second: &mut i64) -> String {
        loop {
            match self.next(rotation, second) {
                Outcome::Failed(error) => return chain(&error),
                Outcome::Requested { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn issued(&self, rotation: &mut Rotation, second: &mut i64) -> Identity {
        loop {
            match self.next(rotation, second) {
                Outcome::Issued(identity, None) => return *identity,
                Outcome::Requested { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_node_bootstraps_and_keeps_the_name_over_restarts() {
    let fixture = Fixture::new(Behaviour::Wait);
    let mut rotation = fixture.bootstrapping();
    let mut second = 0;
    let Outcome::Requested { name, bootstrap: true } = fixture.next(&mut rotation, &mut second) else {
        panic!("no request")
    };
    assert!(name.starts_with("node-csr-"), "{name}");
    // The agent restarts before the request is approved.
    let mut rotation = fixture.bootstrapping();
    let Outcome::Requested { name: again, .. } = fixture.next(&mut rotation, &mut second) else {
        panic!("no request")
    };
    assert_eq!((name, fixture.signer.counts().0), (again, 1));
    fixture.signer.set(Behaviour::Approve, timestamp(second));
    let identity = fixture.issued(&mut rotation, &mut second);
    assert_eq!(fixture.store.load().unwrap().unwrap(), identity);
    assert!(!fixture.store.pending_key_path().exists());
    assert!(rotation.due(Some(&fixture.template), timestamp(second)) > timestamp(second + 600));
}

#[test]
fn a_denial_is_an_error() {
    let fixture = Fixture::new(Behaviour::Deny);
    let (mut rotation, mut second) = (fixture.bootstrapping(), 0);
    assert!(matches!(fixture.next(&mut rotation, &mut second), Outcome::Requested { .. }));
    let denied = fixture.next(&mut rotation, &mut second);
    assert!(matches!(denied, Outcome::Failed(Error::Denied { .. })), "{denied:?}");
}

#[test]
fn renewal_is_due_between_70_and_90_percent_of_the_life() {
    let fixture = Fixture::new(Behaviour::Approve);
    let mut second = 0;
    let identity = fixture.issued(&mut fixture.own(None), &mut second);
    let start = identity.facts.not_before;
    let due = |unit| renew_at(&identity, unit).duration_since(start).as_secs();
    assert_eq!((due(0.0), due(0.5), due(1.0)), (700, 800, 900));
    assert_eq!(due(-3.0), 700);
    let mut backwards = identity.clone();
    std::mem::swap(&mut backwards.facts.not_before, &mut backwards.facts.not_after);
    assert_eq!(renew_at(&backwards, 0.5), backwards.facts.not_before);
}

#[test]
fn a_renewal_uses_the_nodes_credentials_and_a_new_key() {
    let fixture = Fixture::new(Behaviour::Approve);
    let mut rotation = fixture.own(None);
    let mut second = 0;
    let first = fixture.issued(&mut rotation, &mut second);
    fixture.signer.set(Behaviour::Approve, timestamp(second + 800));
    let renewed = fixture.issued(&mut rotation, &mut second);
    assert!((800..900).contains(&second), "{second}");
    assert_ne!(first.facts.public_key, renewed.facts.public_key);
    assert_eq!(fixture.signer.names(), ["csr-1", "csr-2"]);
    assert_eq!(fixture.store.load().unwrap().unwrap(), renewed);
}

#[test]
fn failures_are_reported_and_retried() {
    let check = |behaviour, words: &str, pause: i64| {
        let fixture = Fixture::new(behaviour);
        let mut rotation = fixture.own(None);
        let mut second = 0;
        let text = fixture.failure(&mut rotation, &mut second);
        assert!(text.contains(words), "{text}");
        let due = rotation.due(Some(&fixture.template), timestamp(second));
        assert_eq!(due.duration_since(timestamp(second)).as_secs(), pause, "{text}");
        // In the end it succeeds.
        fixture.signer.set(Behaviour::Approve, timestamp(second));
        fixture.issued(&mut rotation, &mut second);
        assert_eq!(rotation.failures(), 0);
    };
    check(Behaviour::Deny, "is denied, reason: \"Because\", message: \"of that\"", 600);
    check(Behaviour::Fail, "failed, reason: \"Because\", message: \"of that\"", 2);
    check(Behaviour::Away, "cannot create the certificate signing request csr-*", 2);
    check(Behaviour::OtherKey, "it is for another key", 2);
    check(Behaviour::Expired, "it has expired", 2);
    check(Behaviour::Wait, "was not approved and signed within 15 min", 2);
}

#[test]
fn pauses_double_and_polls_of_a_long_wait_are_rare() {
    let fixture = Fixture::new(Behaviour::Away);
    let mut rotation = fixture.own(None);
    let (mut second, mut pauses) = (0, Vec::new());
    for _ in 0..6 {
        fixture.failure(&mut rotation, &mut second);
        pauses.push(
            rotation
                .due(Some(&fixture.template), timestamp(second))
                .duration_since(timestamp(second))
                .as_secs(),
        );
    }
    assert_eq!(pauses, [2, 4, 8, 16, 32, 32]);
    // A return of the API server ends the pause, but not that after a denial.
    assert!(rotation.is_waiting());
    rotation.returned(timestamp(second));
    assert!(rotation.due(Some(&fixture.template), timestamp(second)) <= timestamp(second));
    let fixture = Fixture::new(Behaviour::Deny);
    let (mut rotation, mut second) = (fixture.own(None), 0);
    fixture.failure(&mut rotation, &mut second);
    rotation.returned(timestamp(second));
    assert!(rotation.due(Some(&fixture.template), timestamp(second)) > timestamp(second + 500));
    let fixture = Fixture::new(Behaviour::Wait);
    let mut rotation = fixture.bootstrapping();
    let mut second = 0;
    assert!(fixture.failure(&mut rotation, &mut second).contains("within 60 min"));
    assert!((3600..3620).contains(&second), "{second}");
    assert!((230..260).contains(&fixture.signer.counts().1), "{:?}", fixture.signer.counts());
}

#[test]
fn a_clock_that_is_set_back_delays_no_request() {
    let day = 86_400;
    let turn = |fixture: &Fixture, rotation: &mut Rotation, second| {
        rotation.turn(Some(&fixture.template), timestamp(second), 0.5);
        rotation.due(Some(&fixture.template), timestamp(second)).duration_since(timestamp(second)).as_secs()
    };
    // A pause after a failure.
    let fixture = Fixture::new(Behaviour::Away);
    let mut rotation = fixture.own(None);
    assert_eq!(turn(&fixture, &mut rotation, day), 2);
    assert!(turn(&fixture, &mut rotation, 0) <= 2, "not a day and two seconds");
    // A request in progress.
    let fixture = Fixture::new(Behaviour::Wait);
    let mut rotation = fixture.own(None);
    turn(&fixture, &mut rotation, day);
    assert!(turn(&fixture, &mut rotation, 0) <= 1);
    fixture.signer.set(Behaviour::Approve, timestamp(0));
    let mut second = 1;
    let issued = fixture.issued(&mut rotation, &mut second);
    assert!(second < 20 && issued.facts.not_after == timestamp(1000), "{second} {issued:?}");
    // The time of the renewal follows from the certificate and does not change.
    assert_eq!(turn(&fixture, &mut rotation, -day), day + 800);
    assert_eq!(fixture.signer.counts().0, 1);
}

#[test]
fn an_unavailable_api_server_does_not_end_the_wait() {
    let fixture = Fixture::new(Behaviour::Wait);
    let mut rotation = fixture.own(None);
    let mut second = 0;
    assert!(matches!(fixture.next(&mut rotation, &mut second), Outcome::Requested { bootstrap: false, .. }));
    fixture.signer.set(Behaviour::Away, timestamp(0));
    assert!(matches!(rotation.turn(Some(&fixture.template), timestamp(60), 0.5), Outcome::Quiet));
    fixture.signer.set(Behaviour::Approve, timestamp(100));
    second = 100;
    fixture.issued(&mut rotation, &mut second);
    assert_eq!(fixture.signer.counts().0, 1);
}

#[test]
fn a_request_that_was_deleted_is_made_again() {
    let fixture = Fixture::new(Behaviour::Wait);
    let mut rotation = fixture.own(None);
    let mut second = 0;
    fixture.next(&mut rotation, &mut second);
    fixture.signer.delete_all();
    assert!(fixture.failure(&mut rotation, &mut second).contains("csr-1 for the client certificate is gone"));
    fixture.signer.set(Behaviour::Approve, timestamp(second));
    fixture.issued(&mut rotation, &mut second);
}

#[test]
fn an_expired_certificate_is_renewed_with_the_bootstrap_credentials() {
    let fixture = Fixture::new(Behaviour::Approve);
    let mut second = 0;
    let old = fixture.issued(&mut fixture.own(None), &mut second);
    let away = FakeSigner::with_behaviour(Behaviour::Away, timestamp(0));
    let mut rotation = Rotation::new(
        fixture.store.clone(),
        Some(old.clone()),
        Some(away.boxed()),
        Some(fixture.signer.opener()),
        0.5,
    );
    // While the certificate is valid, the node's own credentials are used.
    second = 850;
    assert!(fixture.failure(&mut rotation, &mut second).contains("connection refused"));
    second = 2000;
    fixture.signer.set(Behaviour::Approve, timestamp(second));
    let new = fixture.issued(&mut rotation, &mut second);
    assert!(new.facts.not_after > old.facts.not_after);
    assert!(fixture.signer.names().iter().any(|name| name.starts_with("node-csr-")));
}

#[test]
fn addresses_that_change_make_a_new_request() {
    let mut fixture = Fixture::new(Behaviour::Wait);
    let serving = |ip: &str| {
        let names = ServingNames { ips: [ip.parse().unwrap()].into(), ..ServingNames::default() };
        Template::serving("node1", names)
    };
    fixture.template = serving("10.0.0.7");
    let mut rotation = fixture.own(None);
    assert_eq!(rotation.due(None, timestamp(0)), Timestamp::MAX);
    let mut second = 0;
    fixture.next(&mut rotation, &mut second);
    // Another address, while the first request waits.
    fixture.template = serving("10.0.0.8");
    assert_eq!(rotation.due(Some(&fixture.template), timestamp(second)), timestamp(second));
    fixture.next(&mut rotation, &mut second);
    fixture.signer.set(Behaviour::Approve, timestamp(second));
    let identity = fixture.issued(&mut rotation, &mut second);
    assert_eq!(identity.facts.ips, ["10.0.0.8".parse::<std::net::IpAddr>().unwrap()]);
    assert!(rotation.due(Some(&fixture.template), timestamp(second)) > timestamp(second + 600));
    // Another address again, while the certificate is valid.
    fixture.template = serving("10.0.0.7");
    assert!(rotation.due(Some(&fixture.template), timestamp(second)) <= timestamp(second));
    assert_eq!(fixture.signer.counts().0, 2);
    // The wait includes the age of the other certificate.
    let before = SERVING_CERTIFICATE_AGE.count();
    fixture.issued(&mut rotation, &mut second);
    assert!(SERVING_CERTIFICATE_AGE.count() > before);
}

#[test]
fn short_lived_certificates_cause_no_request_loop() {
    let fixture = Fixture::new(Behaviour::Old);
    let mut rotation = fixture.own(None);
    let mut second = 0;
    let identity = fixture.issued(&mut rotation, &mut second);
    assert!(renew_at(&identity, 0.5) < timestamp(second));
    let due = rotation
        .due(Some(&fixture.template), timestamp(second))
        .duration_since(timestamp(second))
        .as_secs_f64();
    assert!((4.0..=5.0).contains(&due), "{due}");
}

#[test]
fn names_that_the_signer_omits_are_requested_at_the_renewal() {
    let mut fixture = Fixture::new(Behaviour::Approve);
    let names = ServingNames { ips: ["10.9.9.9".parse().unwrap()].into(), ..ServingNames::default() };
    fixture.template = Template::serving("node1", names);
    let mut rotation = fixture.own(None);
    let mut second = 0;
    let identity = fixture.issued(&mut rotation, &mut second);
    assert!(identity.facts.ips.is_empty(), "the signer knows two addresses only");
    assert!(rotation.due(Some(&fixture.template), timestamp(second)) > timestamp(second + 600));
}

#[test]
fn a_foreign_request_of_the_same_name_is_reported() {
    let fixture = Fixture::new(Behaviour::Wait);
    let key = fixture.store.pending_key().unwrap();
    let name = fixture.template.request_name(&key);
    let other = fixture.template.request(&PrivateKey::generate().unwrap(), Some(&name)).unwrap();
    fixture.signer.create(&other).unwrap();
    let text = fixture.failure(&mut fixture.bootstrapping(), &mut 0);
    assert!(text.contains("its key is another"), "{text}");
}

#[test]
fn missing_credentials_are_reported() {
    let fixture = Fixture::new(Behaviour::Approve);
    let mut rotation = Rotation::new(fixture.store.clone(), None, None, None, 0.5);
    assert!(fixture.failure(&mut rotation, &mut 0).contains("bootstrap credentials: there are none"));
}
