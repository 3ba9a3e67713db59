use super::*;
use rustls::pki_types::pem::PemObject;

/// The time of the tests: the certificates named `short` have expired, the others last until 2126.
const NOW: u64 = 1_900_000_000;
const EARLY: u64 = 1_795_896_000;

macro_rules! pem {
    ($name:literal) => {
        include_bytes!(concat!("testdata/verify/", $name, ".pem")).as_slice()
    };
}

fn der(pem: &[u8]) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pem).unwrap()
}

/// Verifies a chain by a bundle, for a name, at a time.
fn verify_at(bundle: &[&[u8]], chain: &[&[u8]], name: &str, now: u64) -> Result<(), String> {
    let bundle: Vec<_> = bundle.iter().map(|pem| der(pem)).collect();
    let chain: Vec<_> = chain.iter().map(|pem| der(pem)).collect();
    let (own, intermediates) = chain.split_first().unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let now = UnixTime::since_unix_epoch(std::time::Duration::from_secs(now));
    let outcome = Verifier::new(&bundle)?.verify_server_cert(own, intermediates, &name, &[], now);
    outcome.map(drop).map_err(|error| match error {
        rustls::Error::InvalidCertificate(CertificateError::Other(cause)) => cause.to_string(),
        other => other.to_string(),
    })
}

fn verify(bundle: &[&[u8]], chain: &[&[u8]]) -> Result<(), String> {
    verify_at(bundle, chain, "server.test", NOW)
}

#[track_caller]
fn refuses(bundle: &[&[u8]], chain: &[&[u8]], reason: &str) {
    let error = verify(bundle, chain).unwrap_err();
    assert!(error.contains(reason), "{error}");
}

#[test]
fn certificate_of_the_bundle_proves_the_server_if_name_and_time_are_right() {
    for own in [pem!("self-ca"), pem!("self-leaf")] {
        for bundle in [&[own][..], &[pem!("root"), own]] {
            assert_eq!(verify(bundle, &[own]), Ok(()));
            assert_eq!(verify_at(bundle, &[own], "10.0.0.1", NOW), Ok(()));
            for other in ["other.test", "10.0.0.2", "x.server.test"] {
                let error = verify_at(bundle, &[own], other, NOW).unwrap_err();
                assert!(error.contains("not valid for name") || error.contains("only valid for"), "{error}");
            }
            assert!(verify_at(bundle, &[own], "server.test", 1).unwrap_err().contains("is before"));
        }
        assert!(verify(&[pem!("root")], &[own]).is_err(), "any other certificate");
    }
    let leaf = pem!("leaf");
    assert_eq!(verify(&[leaf], &[leaf]), Ok(()), "also without its authority");
    let by_authority = pem!("leaf-ca");
    assert_eq!(verify(&[by_authority], &[by_authority]), Ok(()));
    assert_eq!(verify_at(&[pem!("self-short")], &[pem!("self-short")], "server.test", EARLY), Ok(()));
    let refuses = |own, reason| refuses(&[own], &[own], reason);
    refuses(
        pem!("self-short"),
        "certificate has expired or is not yet valid: current time 2030-03-17T17:46:40Z is after",
    );
    // Both times of the certificate, and that the clock may be wrong.
    let early = verify_at(&[leaf], &[leaf], "server.test", 1).unwrap_err();
    assert!(
        early.contains("current time 1970-01-01T00:00:01Z is before")
            && early.contains("; the certificate is valid from")
            && early.ends_with(": is the clock of this machine right?"),
        "{early}"
    );
    refuses(pem!("self-nosan"), "relies on legacy Common Name field");
    refuses(pem!("v1"), "relies on legacy Common Name field");
    refuses(pem!("self-client"), "incompatible key usage");
    refuses(pem!("self-odd"), "unhandled critical extension in certificate \"server\"");
}

#[test]
fn authority_must_be_one_that_may_sign_now() {
    assert_eq!(verify(&[pem!("root")], &[pem!("leaf")]), Ok(()));
    assert_eq!(verify(&[pem!("self-leaf"), pem!("root")], &[pem!("leaf")]), Ok(()));
    let cannot = "parent certificate cannot sign this kind of certificate";
    refuses(&[pem!("self-leaf")], &[pem!("leaf-of-leaf")], cannot);
    refuses(&[pem!("root-no-sign")], &[pem!("leaf-no-sign")], cannot);
    refuses(&[pem!("root-clients")], &[pem!("leaf-clients")], cannot);
    assert!(verify(&[pem!("root-between")], &[pem!("leaf-between"), pem!("between-no-sign")]).is_err());
    assert_eq!(verify_at(&[pem!("root-short")], &[pem!("leaf-short")], "server.test", EARLY), Ok(()));
    let late = verify(&[pem!("root-short")], &[pem!("leaf-short")]).unwrap_err();
    assert!(late.starts_with("certificate signed by unknown authority (possibly because of"), "{late}");
    assert!(
        late.contains("has expired")
            && late.contains("candidate authority certificate \"short\"); the ")
            && late.ends_with(": is the clock of this machine right?"),
        "{late}"
    );
    refuses(&[pem!("root")], &[pem!("leaf-new")], "UnknownIssuer");
    refuses(&[pem!("root-names")], &[pem!("leaf-names")], "NameConstraintViolation");
    refuses(&[pem!("root")], &[pem!("leaf-ca")], "marked as an authority (CA:TRUE)");
    assert_eq!(Verifier::new(&[]).unwrap_err(), "no usable certificate");
}

#[test]
fn paths_lead_through_replaced_authorities_within_their_length() {
    // One of two certificates of the same authority has expired.
    for between in [[pem!("cross"), pem!("cross-short")], [pem!("cross-short"), pem!("cross")]] {
        assert_eq!(verify(&[pem!("root")], &[&[pem!("leaf-new")][..], &between].concat()), Ok(()));
    }
    assert_eq!(verify(&[pem!("new")], &[pem!("leaf-new"), pem!("cross-short")]), Ok(()));
    assert!(verify(&[pem!("root")], &[pem!("leaf-new"), pem!("cross-short")]).is_err());
    let (length_0, length_1) = ([pem!("root-len0")], [pem!("root-len1")]);
    assert_eq!(verify(&length_0, &[pem!("leaf-len0")]), Ok(()));
    assert!(verify(&length_0, &[pem!("leaf-a-len0"), pem!("a-len0")]).is_err());
    assert!(verify(&length_0, &[pem!("leaf-b-len0"), pem!("b-len0"), pem!("a-len0")]).is_err());
    assert_eq!(verify(&length_1, &[pem!("leaf-len1")]), Ok(()));
    assert_eq!(verify(&length_1, &[pem!("leaf-a-len1"), pem!("b-len1"), pem!("a-len1")]), Ok(()));
    assert!(verify(&length_1, &[pem!("leaf-b-len1"), pem!("b-len1"), pem!("a-len1")]).is_err());
}

#[test]
fn error_names_certificate_key_and_signature_that_are_not_supported() {
    refuses(
        &[pem!("root-rsa1024")],
        &[pem!("leaf-rsa1024")],
        "certificate \"server\" is signed with sha256WithRSAEncryption by a key of RSA with 1024 bits, which is not \
         supported; use an authority",
    );
    refuses(
        &[pem!("root-rsa")],
        &[pem!("leaf-sha1")],
        "signed with sha1WithRSAEncryption by a key of RSA with 2048 bits",
    );
}

#[test]
fn long_curves_and_digests_are_verified() {
    assert_eq!(verify(&[pem!("root-p521")], &[pem!("leaf-by-p521")]), Ok(()));
    assert_eq!(verify(&[pem!("root-p384")], &[pem!("leaf-sha512")]), Ok(()));
    assert_eq!(verify(&[pem!("root")], &[pem!("leaf-p521")]), Ok(()));
    // The signature counts: another authority of the same name did not sign it.
    let error = verify(&[pem!("root-p521-other")], &[pem!("leaf-by-p521")]).unwrap_err();
    assert!(
        error.starts_with(
            "certificate signed by unknown authority (possibly because of \"x509: ECDSA verification failure\" \
             while trying to verify candidate authority certificate"
        ),
        "{error}"
    );
    let error = verify(&[pem!("root-rsa-same")], &[pem!("leaf")]).unwrap_err();
    assert!(
        error.starts_with(
            "certificate signed by unknown authority (possibly because of \"x509: signature algorithm"
        ),
        "{error}"
    );
    assert_eq!(verify(&[pem!("root-rsa-same"), pem!("root")], &[pem!("leaf")]), Ok(()));
    // Both are there after the authority was replaced by one of the same name.
    let (other, right) = (pem!("root-p521-other"), pem!("root-p521"));
    for both in [[other, right], [right, other]] {
        assert_eq!(verify(&both, &[pem!("leaf-by-p521")]), Ok(()));
    }
}
