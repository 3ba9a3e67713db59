//! Chains of clients' certificates against crypto/x509, as the API server's authenticator
//! verifies them.

use coracle::transport::tls::Authorities;
use jiff::Timestamp;
use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, CustomExtension, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose as Purpose, GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    NameConstraints, PKCS_ED25519, SanType, date_time_ymd,
};
use rustls::pki_types::PrivatePkcs8KeyDer;
use serde_json::json;

use crate::der::{of_version_1, value};
use crate::peer::{Peer, encode};
use crate::random::Random;
use crate::{Cases, mutate, pick, rarely};

const NAMES: [&str; 4] = ["root", "a", "b", "c"];

/// Keys that follow from the seed, with which signatures do so, too: of Ed25519.
struct Keys(Vec<Vec<u8>>);

impl Keys {
    fn new(random: &mut Random) -> Keys {
        let key = |random: &mut Random| {
            let secret: Vec<u8> = (0..32).map(|_| random.below(256) as u8).collect();
            let algorithm = value(0x30, &value(6, &[0x2b, 0x65, 0x70]));
            // PKCS #8 (RFC 8410).
            value(0x30, &[value(2, &[0]), algorithm, value(4, &value(4, &secret))].concat())
        };
        Keys((0..12).map(|_| key(random)).collect())
    }

    fn pick(&self, random: &mut Random) -> KeyPair {
        let der = PrivatePkcs8KeyDer::from(random.pick(&self.0).unwrap().as_slice());
        KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_ED25519).unwrap()
    }
}

/// A certificate's parameters, most of the time those of an authority or of a client.
fn params(random: &mut Random, is_client: bool) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, if is_client { "jane" } else { pick(random, &NAMES) });
    let (from, to) = match random.below(24) {
        0 => (2020, 2025),
        1 => (2027, 2030),
        _ => (2020, 2030),
    };
    (params.not_before, params.not_after) = (date_time_ymd(from, 1, 1), date_time_ymd(to, 1, 1));
    params.is_ca = match random.below(if is_client { 4 } else { 12 }) {
        0 => IsCa::NoCa,
        1 => IsCa::ExplicitNoCa,
        2 if is_client && !rarely(random, 10) => IsCa::NoCa,
        3 | 4 => IsCa::Ca(BasicConstraints::Constrained(random.below(3) as u8)),
        _ if is_client => IsCa::NoCa,
        _ => IsCa::Ca(BasicConstraints::Unconstrained),
    };
    use KeyUsagePurpose::{CrlSign, DigitalSignature, KeyCertSign};
    params.key_usages = match random.below(10) {
        0 => vec![DigitalSignature],
        1 => vec![CrlSign],
        2..=5 => vec![KeyCertSign, DigitalSignature],
        _ => Vec::new(),
    };
    params.extended_key_usages = match random.below(16) {
        0 => vec![Purpose::ServerAuth],
        1 => vec![Purpose::Any],
        2 => vec![Purpose::Other(vec![1, 2, 3])],
        3..=7 => vec![Purpose::ServerAuth, Purpose::ClientAuth],
        _ => Vec::new(),
    };
    let name = |text: &str| SanType::DnsName(text.try_into().unwrap());
    params.subject_alt_names = match random.below(8) {
        0 => vec![name("a.example.org")],
        1 => vec![name("example.com"), SanType::IpAddress("10.0.0.1".parse().unwrap())],
        2 => vec![SanType::Rfc822Name("a@example.org".try_into().unwrap())],
        3 => vec![SanType::URI("https://example.org/a".try_into().unwrap())],
        _ => Vec::new(),
    };
    if rarely(random, 10) {
        let tree = |random: &mut Random| match random.below(5) {
            0 => GeneralSubtree::DnsName("example.org".into()),
            1 => GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix("10.0.0.0".parse().unwrap(), 8)),
            2 => GeneralSubtree::Rfc822Name("example.org".into()),
            3 => GeneralSubtree::DirectoryName(DistinguishedName::new()),
            _ => GeneralSubtree::DnsName(".example.com".into()),
        };
        let (first, second) = (tree(random), tree(random));
        let (permitted_subtrees, excluded_subtrees) =
            if rarely(random, 2) { (vec![first], Vec::new()) } else { (vec![first], vec![second]) };
        params.name_constraints = Some(NameConstraints { permitted_subtrees, excluded_subtrees });
    }
    if rarely(random, 12) {
        // Policies, their constraints, and extensions that are unknown.
        let (id, value): (&[u64], &[u8]) = pick(
            random,
            &[
                (&[2, 5, 29, 32], &[0x30, 6, 0x30, 4, 6, 2, 0x2a, 3]),
                (&[2, 5, 29, 36], &[0x30, 3, 0x80, 1, 0]),
                (&[2, 5, 29, 33], &[0x30, 10, 0x30, 8, 6, 2, 0x2a, 3, 6, 2, 0x2a, 4]),
                (&[2, 5, 29, 54], &[2, 1, 0]),
                (&[2, 5, 29, 99], &[5, 0]),
                (&[1, 2, 3, 4], &[5, 0]),
            ],
        );
        let mut extension = CustomExtension::from_oid_content(id, value.to_vec());
        extension.set_criticality(rarely(random, 2));
        params.custom_extensions.push(extension);
    }
    params
}

/// A chain as a client shows it, and the certificates of the bundle.
fn case(random: &mut Random, keys: &Keys) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let mut all: Vec<(Issuer<'static, KeyPair>, Vec<u8>)> = Vec::new();
    for number in 0..=random.below(4) {
        let params = params(random, false);
        let key = keys.pick(random);
        // Most of the time signed by the one before.
        let by = if number == 0 || rarely(random, 6) {
            None
        } else if rarely(random, 6) {
            random.pick(&all)
        } else {
            all.last()
        };
        let certificate = match by {
            None => params.self_signed(&key),
            Some((by, _)) => params.signed_by(&key, by),
        };
        let der = certificate.unwrap().der().to_vec();
        all.push((Issuer::new(params, key), der));
    }
    let by = if rarely(random, 6) { random.pick(&all) } else { all.last() }.unwrap();
    let own = params(random, true).signed_by(&keys.pick(random), &by.0).unwrap().der().to_vec();
    let mut others: Vec<Vec<u8>> = all.iter().map(|(_, der)| der.clone()).collect();
    let mut roots: Vec<Vec<u8>> = vec![others[0].clone()];
    roots.extend(others.iter().filter(|_| rarely(random, 6)).cloned());
    if rarely(random, 12) {
        roots.push(own.clone());
    }
    others.retain(|_| !rarely(random, 12));
    if rarely(random, 2) {
        others.reverse();
    }
    for der in roots.iter_mut().chain(&mut others).filter(|_| rarely(random, 30)) {
        *der = of_version_1(der);
    }
    let mut chain = vec![own];
    chain.extend(others);
    for der in chain.iter_mut().chain(&mut roots) {
        if rarely(random, 60) {
            mutate(random, der);
        }
    }
    (chain, roots)
}

#[test]
fn accepted_chain_is_accepted_by_go_until_the_stated_time() {
    let (mut cases, mut random) = Cases::new("chains", 4_000);
    let mut peer = Peer::start();
    let keys = Keys::new(&mut random);
    let time = |year: u64| -> Timestamp { format!("{year}-06-01T00:00:00Z").parse().unwrap() };
    while cases.next() {
        let (chain, roots) = case(&mut random, &keys);
        let now = time(if rarely(&mut random, 10) { 2015 + random.below(20) } else { 2026 });
        let pem: String =
            roots.iter().map(|der| pem::encode(&pem::Pem::new("CERTIFICATE", der.as_slice()))).collect();
        let authorities = Authorities::of_pem(pem.as_bytes());
        let verdict = authorities.as_ref().ok().map(|authorities| authorities.verify(&chain, now));
        let counts = verdict.as_ref().is_some_and(|verdict| verdict.outcome.is_ok());
        let all = |list: &[Vec<u8>]| list.iter().map(|der| encode(der)).collect::<Vec<_>>();
        let theirs = peer.ask(&json!({
            "ask": "chain", "chain": all(&chain), "roots": all(&roots), "time": now.as_second(),
        }));
        let shown = || format!("{theirs} {now} chain {:?} bundle {:?}", all(&chain), all(&roots));
        match (counts, theirs["ok"] == true) {
            (true, true) => cases.count("count for both"),
            // Go reads the names of an authority, which nothing depends on, and more of its fields.
            (true, false) if theirs["left_out"] == true => cases.count("by an authority that Go cannot read"),
            (true, false) => cases.differs(&format!("counts here only: {}", shown())),
            (false, true) => cases.count("refused here only"),
            (false, false) => cases.count("refused by both"),
        }
        if let (Ok(authorities), Some(verdict)) = (&authorities, &verdict) {
            let other = time(2015 + random.below(20));
            let then = authorities.verify(&chain, other);
            if verdict.holds(other) && then.outcome.is_ok() != verdict.outcome.is_ok() {
                cases.differs(&format!("the verdict does not hold at {other}: {}", shown()));
            }
        }
    }
    cases.end("count for both", 10);
}
