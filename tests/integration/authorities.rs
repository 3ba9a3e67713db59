//! Which certificates of a bundle may sign clients' certificates, and by which chains.

use std::time::Duration;

use coracle::transport::tls::{Authorities, Verification};
use jiff::Timestamp;
use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose as Purpose, GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    NameConstraints, SanType, date_time_ymd,
};
use rustix::time::{ClockId, clock_gettime};

use crate::support::der;

/// A certificate with its key.
struct Signer {
    issuer: Issuer<'static, KeyPair>,
    der: Vec<u8>,
}

fn params(name: &str, change: impl FnOnce(&mut CertificateParams)) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2100, 1, 1);
    change(&mut params);
    params
}

/// An authority, but for what is changed.
fn authority(name: &str, by: Option<&Signer>, change: impl FnOnce(&mut CertificateParams)) -> Signer {
    let key = KeyPair::generate().unwrap();
    let params = params(name, |params| {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        change(params);
    });
    let certificate = match by {
        None => params.self_signed(&key),
        Some(by) => params.signed_by(&key, &by.issuer),
    };
    let der = certificate.unwrap().der().to_vec();
    Signer { issuer: Issuer::new(params, key), der }
}

/// A client's certificate.
fn client(by: &Signer, change: impl FnOnce(&mut CertificateParams)) -> Vec<u8> {
    let key = KeyPair::generate().unwrap();
    params("jane", change).signed_by(&key, &by.issuer).unwrap().der().to_vec()
}

fn bundle(certificates: &[&[u8]]) -> Authorities {
    let pem: String =
        certificates.iter().map(|der| pem::encode(&pem::Pem::new("CERTIFICATE", *der))).collect();
    Authorities::of_pem(pem.as_bytes()).unwrap()
}

fn june(year: u16) -> Timestamp {
    format!("{year}-06-01T00:00:00Z").parse().unwrap()
}

fn verify(bundle: &Authorities, chain: &[&[u8]]) -> Verification {
    let chain: Vec<Vec<u8>> = chain.iter().map(|der| der.to_vec()).collect();
    bundle.verify(&chain, june(2026))
}

fn plain(_: &mut CertificateParams) {}

#[test]
fn only_certificates_that_may_sign_for_clients_are_authorities() {
    type Change = fn(&mut CertificateParams);
    let odd = |params: &mut CertificateParams| {
        let mut extension = CustomExtension::from_oid_content(&[1, 2, 3, 4], vec![5, 0]);
        extension.set_criticality(true);
        params.custom_extensions.push(extension);
    };
    let unknown_constraint = |params: &mut CertificateParams| {
        // Permitted: a registered identifier, for which no names are checked.
        let mut extension =
            CustomExtension::from_oid_content(&[2, 5, 29, 30], vec![0x30, 7, 0xa0, 5, 0x30, 3, 0x88, 1, 5]);
        extension.set_criticality(true);
        params.custom_extensions.push(extension);
    };
    let cases: [(&str, Change, Result<(), &str>); 13] = [
        ("an authority", plain, Ok(())),
        (
            "one that may sign",
            |parameters| parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign],
            Ok(()),
        ),
        ("one for clients", |parameters| parameters.extended_key_usages = vec![Purpose::ClientAuth], Ok(())),
        ("one for everything", |parameters| parameters.extended_key_usages = vec![Purpose::Any], Ok(())),
        ("no basic constraints", |parameters| parameters.is_ca = IsCa::NoCa, Err("unknown authority")),
        ("marked as none", |parameters| parameters.is_ca = IsCa::ExplicitNoCa, Err("unknown authority")),
        (
            "may only sign data",
            |parameters| {
                parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::CrlSign]
            },
            Err("unknown authority"),
        ),
        (
            "one for servers",
            |parameters| parameters.extended_key_usages = vec![Purpose::ServerAuth, Purpose::CodeSigning],
            Err("unknown authority"),
        ),
        ("critical and unknown", odd, Err("unknown authority")),
        ("a constraint that is unknown", unknown_constraint, Err("unknown authority")),
        (
            "expired",
            |parameters| parameters.not_after = date_time_ymd(2026, 5, 31),
            Err("has expired or is not yet valid"),
        ),
        (
            "of the future",
            |parameters| parameters.not_before = date_time_ymd(2026, 6, 2),
            Err("has expired or is not yet valid"),
        ),
        (
            "for other names",
            |parameters| {
                let permitted_subtrees = vec![GeneralSubtree::DnsName("example.org".into())];
                parameters.name_constraints =
                    Some(NameConstraints { permitted_subtrees, excluded_subtrees: Vec::new() });
            },
            Ok(()),
        ),
    ];
    for (what, change, expected) in cases {
        let candidate = authority("authority", None, change);
        let others = authority("authority", None, plain);
        let all = bundle(&[&others.der, &candidate.der]);
        let outcome = verify(&all, &[&client(&candidate, plain)]).outcome;
        match (&outcome, expected) {
            (Ok(()), Ok(())) => {}
            (Err(error), Err(words)) if error.to_string().contains(words) => {}
            _ => panic!("{what}: {outcome:?}, not {expected:?}"),
        }
        // A name that the constraint does not permit.
        let named = |parameters: &mut CertificateParams| {
            parameters.subject_alt_names = vec![SanType::DnsName("example.com".try_into().unwrap())];
        };
        if what == "for other names" {
            assert!(verify(&all, &[&client(&candidate, named)]).outcome.is_err());
        }
    }
}

#[test]
fn version_1_root_signs_and_version_1_intermediate_does_not() {
    let old = authority("old", None, plain);
    let bytes = der::of_version_1(&old.der);
    let all = bundle(&[&bytes]);
    assert_eq!(verify(&all, &[&client(&old, plain)]).outcome, Ok(()));
    let root = authority("root", None, plain);
    let all = bundle(&[&root.der]);
    let between = authority("between", Some(&root), plain);
    let leaf = client(&between, plain);
    assert_eq!(verify(&all, &[&leaf, &between.der]).outcome, Ok(()));
    assert!(verify(&all, &[&leaf, &der::of_version_1(&between.der)]).outcome.is_err());
    let expected = "x509: a client certificate of version 1 is not supported";
    let refusal = verify(&all, &[&der::of_version_1(&leaf), &between.der]).outcome.unwrap_err();
    assert_eq!(refusal.to_string(), expected);
}

#[test]
fn bundled_client_certificate_is_accepted_and_cannot_sign() {
    let root = authority("root", None, plain);
    let own = authority("jane", Some(&root), |parameters| parameters.is_ca = IsCa::NoCa);
    let all = bundle(&[&own.der]);
    assert_eq!(all.count(june(2026)), (1, 0));
    assert_eq!(verify(&all, &[&own.der]).outcome, Ok(()));
    assert!(verify(&all, &[&client(&root, plain)]).outcome.is_err());
    assert!(verify(&all, &[&client(&own, plain)]).outcome.is_err());
    assert!(verify(&all, &[&client(&own, plain), &own.der]).outcome.is_err());
    // It must be for clients, and valid at the time.
    let server = authority("jane", Some(&root), |parameters| {
        parameters.is_ca = IsCa::NoCa;
        parameters.extended_key_usages = vec![Purpose::ServerAuth];
    });
    assert!(verify(&bundle(&[&server.der]), &[&server.der]).outcome.is_err());
    let expired =
        authority("jane", Some(&root), |parameters| parameters.not_after = date_time_ymd(2026, 5, 31));
    assert!(verify(&bundle(&[&expired.der]), &[&expired.der]).outcome.is_err());
}

#[test]
fn path_length_counts_intermediates() {
    for (limit, between, good) in [
        (None, 0, true),
        (None, 6, true),
        (None, 7, false),
        (Some(0), 0, true),
        (Some(0), 1, false),
        (Some(1), 1, true),
        (Some(1), 2, false),
        (Some(2), 2, true),
    ] {
        let constraints = limit.map_or(BasicConstraints::Unconstrained, BasicConstraints::Constrained);
        let root = authority("root", None, |parameters| parameters.is_ca = IsCa::Ca(constraints));
        let mut path = vec![root];
        for number in 0..between {
            let next = authority(&format!("a{number}"), path.last(), plain);
            path.push(next);
        }
        let leaf = client(path.last().unwrap(), plain);
        let mut chain: Vec<&[u8]> = vec![&leaf];
        // In any order, and with the authority itself.
        chain.extend(path.iter().map(|signer| signer.der.as_slice()));
        let outcome = verify(&bundle(&[&path[0].der]), &chain).outcome;
        assert_eq!(outcome.is_ok(), good, "{limit:?} {between}: {outcome:?}");
    }
}

#[test]
fn intermediates_must_be_authorities() {
    type Change = fn(&mut CertificateParams);
    let policies = |params: &mut CertificateParams| {
        params
            .custom_extensions
            .push(CustomExtension::from_oid_content(&[2, 5, 29, 36], vec![0x30, 3, 0x80, 1, 0]));
    };
    let cases: [(&str, Change, bool); 7] = [
        ("an authority", plain, true),
        ("none", |parameters| parameters.is_ca = IsCa::NoCa, false),
        ("marked as none", |parameters| parameters.is_ca = IsCa::ExplicitNoCa, false),
        ("may not sign", |parameters| parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature], false),
        ("for servers", |parameters| parameters.extended_key_usages = vec![Purpose::ServerAuth], false),
        ("expired", |parameters| parameters.not_after = date_time_ymd(2026, 5, 31), false),
        ("demands policies", policies, false),
    ];
    let root = authority("root", None, plain);
    let all = bundle(&[&root.der]);
    for (what, change, good) in cases {
        let between = authority("between", Some(&root), change);
        let outcome = verify(&all, &[&client(&between, plain), &between.der]).outcome;
        assert_eq!(outcome.is_ok(), good, "{what}: {outcome:?}");
    }
    // A replaced authority does not hide its successor of the same name.
    let (old, new) = (authority("between", Some(&root), plain), authority("between", Some(&root), plain));
    assert_eq!(verify(&all, &[&client(&new, plain), &old.der, &new.der]).outcome, Ok(()));
}

#[test]
fn verification_result_expires_with_its_certificates() {
    let root = authority("root", None, |parameters| parameters.not_after = date_time_ymd(2040, 1, 1));
    let between =
        authority("between", Some(&root), |parameters| parameters.not_before = date_time_ymd(2025, 1, 1));
    let leaf = client(&between, |parameters| parameters.not_after = date_time_ymd(2030, 1, 1));
    let all = bundle(&[&root.der]);
    let chain = [leaf, between.der];
    for (year, good, holds) in [
        (2019, false, 2000..=2019),
        (2022, false, 2020..=2024),
        (2026, true, 2025..=2029),
        (2035, false, 2030..=2060),
        (2050, false, 2030..=2060),
    ] {
        let verdict = all.verify(&chain, june(year));
        assert_eq!(verdict.outcome.is_ok(), good, "{year}: {:?}", verdict.outcome);
        for other in 2000..=2060 {
            assert_eq!(verdict.holds(june(other)), holds.contains(&other), "{year}, {other}");
        }
    }
    // To the nanosecond.
    let verdict = all.verify(&chain, june(2026));
    let last: Timestamp = "2030-01-01T00:00:00Z".parse().unwrap();
    let first: Timestamp = "2025-01-01T00:00:00Z".parse().unwrap();
    let instant = jiff::SignedDuration::from_nanos(1);
    assert!(verdict.holds(first) && verdict.holds(last));
    assert!(!verdict.holds(first - instant) && !verdict.holds(last + instant));
    assert!(all.verify(&chain, last).outcome.is_ok() && all.verify(&chain, last + instant).outcome.is_err());
    assert!(
        all.verify(&chain, first).outcome.is_ok() && all.verify(&chain, first - instant).outcome.is_err()
    );
}

/// The processor time of this thread: other programs do not count.
fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap()
}

/// The certificates of an unknown client must be cheap to refuse.
#[test]
fn unrelated_certificates_cost_few_signature_checks() {
    let root = authority("root", None, plain);
    let all = bundle(&[&root.der]);
    // All of one name, each signed by the next; in circles of two and of four names; each signed
    // by each.
    let same: Vec<Vec<u8>> = (0..60).map(|_| authority("root", None, plain).der).collect();
    let circle = |names: &[&str]| -> Vec<Vec<u8>> {
        let signers: Vec<Signer> = names.iter().map(|name| authority(name, None, plain)).collect();
        let certificates = (0..60).map(|index| {
            let (name, by) = (names[index % names.len()], &signers[(index + 1) % names.len()]);
            authority(name, Some(by), plain).der
        });
        certificates.collect()
    };
    let shared = KeyPair::generate().unwrap().serialize_pem();
    let mesh: Vec<Vec<u8>> = (0..60)
        .map(|index| {
            let key = KeyPair::from_pem(&shared).unwrap();
            let names = ["root", "a", "b", "c", "d"];
            let authority = |name| {
                params(name, |parameters| parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained))
            };
            let by = Issuer::new(authority(names[index % 5]), KeyPair::from_pem(&shared).unwrap());
            authority(names[index / 5 % 5]).signed_by(&key, &by).unwrap().der().to_vec()
        })
        .collect();
    let leaf = |name: &str| client(&authority(name, None, plain), plain);
    let time = |chain: &[Vec<u8>]| {
        let once = |_| {
            let begun = thread_time();
            assert!(all.verify(chain, june(2026)).outcome.is_err());
            thread_time().saturating_sub(begun)
        };
        (0..10).map(once).min().unwrap()
    };
    let alone = time(&[leaf("root")]);
    for (what, leaf, others) in [
        ("one name", leaf("root"), same),
        ("two names", leaf("root"), circle(&["root", "a"])),
        ("four names", leaf("b"), circle(&["root", "a", "b", "c"])),
        ("a mesh", leaf("d"), mesh),
    ] {
        let chain = [vec![leaf], others].concat();
        let tried = all.verify(&chain, june(2026)).tried;
        assert!(tried <= 32, "{what}: {tried}");
        // A try is one signature. The library would look for paths by itself, a hundred
        // signatures for each try, if there were several ways through what it is given.
        let cost = time(&chain);
        assert!(cost < 200 * alone, "{what}: {cost:?}, alone {alone:?}");
    }
    // Many authorities of one name in the bundle.
    let many: Vec<Vec<u8>> = (0..100).map(|_| authority("root", None, plain).der).collect();
    let all = bundle(&many.iter().map(Vec::as_slice).collect::<Vec<_>>());
    let verdict = all.verify(&[leaf("root")], june(2026));
    assert_eq!((verdict.outcome.is_err(), verdict.tried), (true, 32));
}

#[test]
fn bundle_with_invalid_blocks_is_accepted_and_empty_one_is_rejected() {
    let root = authority("root", None, plain);
    let pem = |der: &[u8]| pem::encode(&pem::Pem::new("CERTIFICATE", der));
    let mixed = format!("words\n{}{}{}", pem(b"nonsense"), pem(&root.der), pem(&root.der));
    let all = Authorities::of_pem(mixed.as_bytes()).unwrap();
    assert_eq!((all.count(june(2026)), all.count(june(2101))), ((1, 1), (1, 0)));
    assert_eq!(verify(&all, &[&client(&root, plain)]).outcome, Ok(()));
    for nothing in ["", "words", &pem(b"nonsense")] {
        let error = Authorities::of_pem(nothing.as_bytes()).unwrap_err().to_string();
        assert_eq!(error, "certificate authorities: no usable certificate");
    }
    assert!(verify(&all, &[]).outcome.is_err());
    assert!(verify(&all, &[b"nonsense"]).outcome.is_err());
}
