//! The content of a certificate: lifetime, subject and public key (pure).
//!
//! Only six fields of a certificate are needed, and the other side of a connection verifies who
//! signed it. A parser for all of X.509 would add more code than the rest of this directory.

use std::net::IpAddr;

use jiff::Timestamp;

use crate::util::x509::{Certificate, Reader, is_identifier, tag};

/// Encoded object identifiers.
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
const ORGANIZATION: &[u8] = &[0x55, 0x04, 0x0a];
const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 0x11];
/// 1.3.6.1.4.1.57683.2 (apiserver: pkg/authentication/request/x509).
const USER_UID: &[u8] = &[0x2b, 0x06, 0x01, 0x04, 0x01, 0x83, 0xc2, 0x53, 0x02];

/// `[2]` in alternative names.
const DNS_NAME: u8 = tag::context(2);
/// `[7]` in alternative names.
const IP_ADDRESS: u8 = tag::context(7);

/// The fields of one certificate that are used here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFields {
    /// The time at which the validity begins.
    pub not_before: Timestamp,
    /// The time at which the validity ends.
    pub not_after: Timestamp,
    /// The subject; `None` if its form is not supported.
    pub subject: Option<Subject>,
    /// Alternative names: DNS.
    pub dns_names: Vec<String>,
    /// Alternative names: addresses.
    pub ips: Vec<IpAddr>,
    /// The subject's public key, without its algorithm.
    pub public_key: Vec<u8>,
}

/// The parts of a distinguished name that identify a user.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Subject {
    /// The common name, the last of several; empty without one.
    pub common_name: String,
    /// The organizations, in their order.
    pub organizations: Vec<String>,
    /// The UIDs that Kubernetes puts into certificates.
    pub uids: Vec<String>,
}

impl CertificateFields {
    /// Reads a certificate in DER; `None` if it is invalid.
    #[must_use]
    pub fn from_der(der: &[u8]) -> Option<CertificateFields> {
        let certificate = Certificate::from_der(der)?;
        let names = certificate.extension(SUBJECT_ALT_NAME);
        let (dns_names, ips) = names.map_or(Some(<_>::default()), |names| alternative_names(names.value))?;
        Some(CertificateFields {
            not_before: certificate.not_before,
            not_after: certificate.not_after,
            subject: Subject::from_der(certificate.subject),
            dns_names,
            ips,
            public_key: certificate.public_key.to_vec(),
        })
    }

    /// Whether it has expired.
    pub fn is_expired(&self, now: Timestamp) -> bool {
        now > self.not_after
    }
}

impl Subject {
    /// Reads the content of a distinguished name's SEQUENCE.
    ///
    /// DIFFERS: Go also reads T61String, BMPString and NumericString, and accepts `*` and `&` in a
    /// PrintableString. These strings grant rights to users and groups, so each must have only one
    /// possible reading.
    #[must_use]
    pub fn from_der(content: &[u8]) -> Option<Subject> {
        let mut subject = Subject::default();
        for set in Reader(content).all(tag::SET)? {
            for attribute in Reader(set).all(tag::SEQUENCE)? {
                let mut parts = Reader(attribute);
                let kind = parts.take(tag::OBJECT_IDENTIFIER).filter(|kind| is_identifier(kind))?;
                let text = text(parts.any()?)?;
                if !parts.0.is_empty() {
                    return None;
                }
                match kind {
                    COMMON_NAME => text.clone_into(&mut subject.common_name),
                    ORGANIZATION => subject.organizations.push(text.to_owned()),
                    USER_UID => subject.uids.push(text.to_owned()),
                    _ => {}
                }
            }
        }
        Some(subject)
    }
}

/// The text of a UTF8String, PrintableString or IA5String; `None` for other kinds.
fn text((kind, content): (u8, &[u8])) -> Option<&str> {
    let good = match kind {
        tag::UTF8_STRING => true,
        tag::IA5_STRING => content.is_ascii(),
        // X.680, 41.4.
        tag::PRINTABLE_STRING => {
            content.iter().all(|byte| byte.is_ascii_alphanumeric() || b" '()+,-./:=?".contains(byte))
        }
        _ => false,
    };
    std::str::from_utf8(content).ok().filter(|_| good)
}

fn alternative_names(value: &[u8]) -> Option<(Vec<String>, Vec<IpAddr>)> {
    let (mut dns_names, mut ips) = (Vec::new(), Vec::new());
    let mut names = Reader(Reader(value).take(tag::SEQUENCE)?);
    while !names.0.is_empty() {
        match names.any()? {
            (DNS_NAME, name) => dns_names.push(String::from_utf8_lossy(name).into_owned()),
            (IP_ADDRESS, bytes) => {
                let ip = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
                ips.push(ip.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()?);
            }
            _ => {}
        }
    }
    Some((dns_names, ips))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair, PublicKeyData, date_time_ymd};

    fn certificate(not_after: (i32, u8, u8)) -> (Vec<u8>, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let names = ["node1", "10.0.0.7", "fd00::7", "node1.example"].map(str::to_owned);
        let mut params = CertificateParams::new(names).unwrap();
        params.not_before = date_time_ymd(2026, 2, 28) + std::time::Duration::from_secs(3661);
        params.not_after = date_time_ymd(not_after.0, not_after.1, not_after.2);
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
        params.distinguished_name.push(DnType::CommonName, "system:node:node1");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        (params.self_signed(&key).unwrap().der().to_vec(), key)
    }

    #[test]
    fn reads_the_fields_of_a_certificate() {
        for (not_after, text) in
            [((2027, 12, 31), "2027-12-31T00:00:00Z"), ((2061, 1, 2), "2061-01-02T00:00:00Z")]
        {
            let (der, key) = certificate(not_after);
            let facts = CertificateFields::from_der(&der).unwrap();
            assert_eq!(facts.not_before.to_string(), "2026-02-28T01:01:01Z");
            assert_eq!(facts.not_after.to_string(), text);
            let subject = facts.subject.unwrap();
            assert_eq!(subject.common_name, "system:node:node1");
            assert_eq!(subject.organizations, ["system:nodes"]);
            assert_eq!(subject.uids, [""; 0]);
            assert_eq!(facts.dns_names, ["node1", "node1.example"]);
            assert_eq!(facts.ips, ["10.0.0.7", "fd00::7"].map(|ip| ip.parse::<std::net::IpAddr>().unwrap()));
            assert_eq!(facts.public_key, key.der_bytes());
        }
    }

    #[test]
    fn garbage_is_no_certificate_and_no_panic() {
        let (der, _) = certificate((2027, 1, 1));
        for length in 0..der.len() {
            assert_eq!(CertificateFields::from_der(&der[..length]), None, "cut at {length}");
        }
        // Each byte is replaced by several values: the parser must return, with any result.
        for offset in 0..der.len() {
            for value in [0x00, 0x30, 0x7f, 0x80, 0x84, 0xff] {
                let mut bad = der.clone();
                bad[offset] = value;
                let _ = CertificateFields::from_der(&bad);
            }
        }
        assert_eq!(CertificateFields::from_der(&[0x30, 0x84, 0xff, 0xff, 0xff, 0xff]), None);
    }

    /// A value in DER with a length below 128.
    fn value(tag: u8, content: &[u8]) -> Vec<u8> {
        [&[tag, u8::try_from(content.len()).unwrap()][..], content].concat()
    }

    fn attribute(kind: &[u8], tag: u8, text: &[u8]) -> Vec<u8> {
        value(0x30, &[value(0x06, kind), value(tag, text)].concat())
    }

    /// One set for each attribute.
    fn name(attributes: &[Vec<u8>]) -> Vec<u8> {
        attributes.iter().flat_map(|attribute| value(0x31, attribute)).collect()
    }

    #[test]
    fn subject_strings_of_other_kinds_or_characters_are_refused() {
        let read = |tag: u8, text: &[u8]| {
            Subject::from_der(&name(&[attribute(COMMON_NAME, tag, text)])).map(|subject| subject.common_name)
        };
        for (tag, text) in [
            (0x0c, "jane"),
            (0x0c, "j\u{e4}ne"),
            (0x0c, "a*b&c@d_e"),
            (0x13, "system:node:a-1.b (c) '+,/=?"),
            (0x16, "jane@example.org_*&"),
            (0x0c, ""),
        ] {
            assert_eq!(read(tag, text.as_bytes()).as_deref(), Some(text), "{tag:#x}");
        }
        for (tag, text, case) in [
            (0x14, &b"jane"[..], "T61String"),
            (0x1e, b"\0j\0a", "BMPString"),
            (0x1c, b"\0\0\0j", "UniversalString"),
            (0x12, b"12", "NumericString"),
            (0x1a, b"jane", "VisibleString"),
            (0x1b, b"jane", "GeneralString"),
            (0x03, b"\0jane", "a BIT STRING"),
            (0x04, b"jane", "an OCTET STRING"),
            (0x2c, b"jane", "a constructed UTF8String"),
            (0x0c, b"j\xe4ne", "not UTF-8"),
            (0x0c, b"\xed\xa0\x80", "a surrogate"),
            (0x0c, b"\xc0\xaf", "an overlong form"),
            (0x16, b"j\xe4ne", "not ASCII"),
            (0x13, b"a*", "an asterisk"),
            (0x13, b"a&b", "an ampersand"),
            (0x13, b"a@b", "an at sign"),
            (0x13, b"a_b", "an underscore"),
            (0x13, b"a\0", "a zero"),
            (0x13, "j\u{e4}".as_bytes(), "not ASCII"),
        ] {
            assert_eq!(read(tag, text), None, "{case}");
            // An invalid string in an unused field makes the whole name invalid.
            let other =
                name(&[attribute(&[0x55, 0x04, 0x0b], tag, text), attribute(COMMON_NAME, 0x0c, b"jane")]);
            assert_eq!(Subject::from_der(&other), None, "{case}");
        }
    }

    #[test]
    fn the_last_common_name_and_every_organization_count() {
        let text = |kind: &[u8], text: &str| attribute(kind, 0x0c, text.as_bytes());
        let read = |content: &[u8]| {
            Subject::from_der(content)
                .map(|subject| (subject.common_name, subject.organizations.join(","), subject.uids.join(",")))
        };
        let is = |name: &str, groups: &str, uids: &str| {
            Some((name.to_owned(), groups.to_owned(), uids.to_owned()))
        };
        let (cn, o) = (COMMON_NAME, ORGANIZATION);
        assert_eq!(read(&[]), is("", "", ""));
        assert_eq!(
            read(&name(&[text(cn, "a"), text(o, "g"), text(cn, "b"), text(o, "h")])),
            is("b", "g,h", "")
        );
        // An empty common name counts, also as the last one.
        assert_eq!(read(&name(&[text(cn, "a"), text(cn, "")])), is("", "", ""));
        assert_eq!(
            read(&name(&[text(USER_UID, "u1"), text(cn, "a"), text(USER_UID, "u2")])),
            is("a", "", "u1,u2")
        );
        // Several attributes in one set, in the order of the encoding.
        let both = value(0x31, &[text(cn, "a"), text(o, "g"), text(cn, "b")].concat());
        assert_eq!(read(&both), is("b", "g", ""));
        assert_eq!(read(&value(0x31, &[])), is("", "", ""));
        for (content, case) in [
            (value(0x30, &text(cn, "a")), "no set"),
            (value(0x31, &value(0x31, &value(0x06, cn))), "no sequence in the set"),
            (value(0x31, &value(0x30, &value(0x06, cn))), "no value"),
            (value(0x31, &value(0x30, &value(0x0c, b"a"))), "no kind"),
            (name(&[text(&[0x55, 0x80, 0x03], "a")]), "a bad identifier"),
            (
                value(0x31, &value(0x30, &[value(0x06, cn), value(0x0c, b"a"), value(0x0c, b"b")].concat())),
                "two values",
            ),
            (value(0x31, &[0x30, 0x81, 0x08, 6, 3, 0x55, 4, 3, 0x0c, 1, b'a']), "a long length"),
            ([name(&[text(cn, "a")]), vec![0]].concat(), "something after it"),
        ] {
            assert_eq!(read(&content), None, "{case}");
        }
    }
}
