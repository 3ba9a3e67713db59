//! Certificates for tests of other rooms.

/// A certificate that expired in 2021, and its key, in PEM.
pub(crate) fn expired() -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2021, 1, 1);
    params.self_signed(&key).unwrap().pem() + &key.serialize_pem()
}

/// A client certificate of a node that is valid until 2120, and its key, in PEM.
pub(crate) fn valid_for(node: &str) -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::OrganizationName, "system:nodes");
    params.distinguished_name.push(rcgen::DnType::CommonName, format!("system:node:{node}"));
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2120, 1, 1);
    params.self_signed(&key).unwrap().pem() + &key.serialize_pem()
}

/// A certificate that is valid until 2120, without its key, in PEM.
pub(crate) fn valid_without_key() -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2120, 1, 1);
    params.self_signed(&key).unwrap().pem()
}
