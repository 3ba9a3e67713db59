//! What a certificate says: its lifetime, for whom it is, and its key (pure).
//!
//! A walk over DER by hand: of a certificate six fields are wanted, and who signed it is for
//! the other side of a connection to judge. A parser of all of X.509 would cost the binary
//! more than everything else in this directory.

use std::net::IpAddr;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

/// Encoded object identifiers.
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
const ORGANIZATION: &[u8] = &[0x55, 0x04, 0x0a];
const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 0x11];

/// Tags of DER values.
mod tag {
    pub(super) const BOOLEAN: u8 = 0x01;
    pub(super) const BIT_STRING: u8 = 0x03;
    pub(super) const OCTET_STRING: u8 = 0x04;
    pub(super) const OBJECT_IDENTIFIER: u8 = 0x06;
    pub(super) const UTC_TIME: u8 = 0x17;
    pub(super) const GENERALIZED_TIME: u8 = 0x18;
    pub(super) const SEQUENCE: u8 = 0x30;
    /// `[0]`: the version.
    pub(super) const VERSION: u8 = 0xa0;
    /// `[3]`: the extensions.
    pub(super) const EXTENSIONS: u8 = 0xa3;
    /// `[2]` in a SAN.
    pub(super) const DNS_NAME: u8 = 0x82;
    /// `[7]` in a SAN.
    pub(super) const IP_ADDRESS: u8 = 0x87;
}

/// What is known of one certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Not valid before.
    pub not_before: Timestamp,
    /// Not valid after.
    pub not_after: Timestamp,
    /// The subject's common name; empty without one.
    pub common_name: String,
    /// The subject's organizations.
    pub organizations: Vec<String>,
    /// Alternative names: DNS.
    pub dns_names: Vec<String>,
    /// Alternative names: addresses.
    pub ips: Vec<IpAddr>,
    /// The subject's public key, without its algorithm.
    pub public_key: Vec<u8>,
}

impl Facts {
    /// Reads a certificate in DER; `None` if it is none.
    #[must_use]
    pub fn of_der(der: &[u8]) -> Option<Facts> {
        let mut certificate = Reader(Reader(der).take(tag::SEQUENCE)?);
        let mut body = Reader(certificate.take(tag::SEQUENCE)?);
        let _version = body.optional(tag::VERSION);
        // Serial number, signature algorithm, issuer.
        for _ in 0..3 {
            body.any()?;
        }
        let mut validity = Reader(body.take(tag::SEQUENCE)?);
        let not_before = time(validity.any()?)?;
        let not_after = time(validity.any()?)?;
        let (common_name, organizations) = subject(body.take(tag::SEQUENCE)?)?;
        let mut key = Reader(body.take(tag::SEQUENCE)?);
        key.take(tag::SEQUENCE)?;
        // The first byte counts the unused bits of the last one.
        let public_key = key.take(tag::BIT_STRING)?.get(1..)?.to_vec();
        let (mut dns_names, mut ips) = (Vec::new(), Vec::new());
        while !body.0.is_empty() {
            let (one, content) = body.any()?;
            if one == tag::EXTENSIONS {
                (dns_names, ips) = alternative_names(content)?;
            }
        }
        Some(Facts { not_before, not_after, common_name, organizations, dns_names, ips, public_key })
    }

    /// Whether its time is over.
    #[must_use]
    pub fn is_expired(&self, now: Timestamp) -> bool {
        now > self.not_after
    }
}

/// The rest of a run of DER values.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// The next value's tag and content.
    fn any(&mut self) -> Option<(u8, &'a [u8])> {
        let (&tag, rest) = self.0.split_first()?;
        // Tags above 30 take more bytes and do not occur here.
        if tag & 0x1f == 0x1f {
            return None;
        }
        let (&first, mut rest) = rest.split_first()?;
        let length = if first < 0x80 {
            usize::from(first)
        } else {
            // Four bytes of length are 4 GiB: more is nonsense, none is BER.
            let count = usize::from(first & 0x7f);
            if !(1..=4).contains(&count) {
                return None;
            }
            let (bytes, after) = rest.split_at_checked(count)?;
            rest = after;
            bytes.iter().fold(0_usize, |length, byte| (length << 8) | usize::from(*byte))
        };
        let (content, after) = rest.split_at_checked(length)?;
        self.0 = after;
        Some((tag, content))
    }

    /// The next value's content if it has this tag.
    fn take(&mut self, wanted: u8) -> Option<&'a [u8]> {
        self.any().filter(|(tag, _)| *tag == wanted).map(|(_, content)| content)
    }

    /// Like `take`, but another value stays where it is.
    fn optional(&mut self, wanted: u8) -> Option<&'a [u8]> {
        if self.0.first() == Some(&wanted) { self.take(wanted) } else { None }
    }
}

/// Common name and organizations of a distinguished name.
fn subject(content: &[u8]) -> Option<(String, Vec<String>)> {
    let (mut common_name, mut organizations) = (String::new(), Vec::new());
    let mut sets = Reader(content);
    while !sets.0.is_empty() {
        let (_, set) = sets.any()?;
        let mut attributes = Reader(set);
        while !attributes.0.is_empty() {
            let mut attribute = Reader(attributes.take(tag::SEQUENCE)?);
            let kind = attribute.take(tag::OBJECT_IDENTIFIER)?;
            let (_, value) = attribute.any()?;
            let text = || String::from_utf8_lossy(value).into_owned();
            match kind {
                COMMON_NAME => common_name = text(),
                ORGANIZATION => organizations.push(text()),
                _ => {}
            }
        }
    }
    Some((common_name, organizations))
}

fn alternative_names(extensions: &[u8]) -> Option<(Vec<String>, Vec<IpAddr>)> {
    let (mut dns_names, mut ips) = (Vec::new(), Vec::new());
    let mut all = Reader(Reader(extensions).take(tag::SEQUENCE)?);
    while !all.0.is_empty() {
        let mut extension = Reader(all.take(tag::SEQUENCE)?);
        let kind = extension.take(tag::OBJECT_IDENTIFIER)?;
        let _critical = extension.optional(tag::BOOLEAN);
        let content = extension.take(tag::OCTET_STRING)?;
        if kind != SUBJECT_ALT_NAME {
            continue;
        }
        let mut names = Reader(Reader(content).take(tag::SEQUENCE)?);
        while !names.0.is_empty() {
            match names.any()? {
                (tag::DNS_NAME, name) => dns_names.push(String::from_utf8_lossy(name).into_owned()),
                (tag::IP_ADDRESS, bytes) => {
                    let ip = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
                    ips.push(ip.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()?);
                }
                _ => {}
            }
        }
    }
    Some((dns_names, ips))
}

/// `YYMMDDhhmmssZ` or `YYYYMMDDhhmmssZ`, which is all that certificates may hold.
fn time((kind, content): (u8, &[u8])) -> Option<Timestamp> {
    let text = std::str::from_utf8(content).ok()?.strip_suffix('Z')?;
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (year, rest) = match kind {
        tag::UTC_TIME => {
            let (year, rest) = text.split_at_checked(2)?;
            let year: i16 = year.parse().ok()?;
            // RFC 5280: 50 to 99 are of the last century.
            (if year >= 50 { 1900 + year } else { 2000 + year }, rest)
        }
        tag::GENERALIZED_TIME => {
            let (year, rest) = text.split_at_checked(4)?;
            (year.parse().ok()?, rest)
        }
        _ => return None,
    };
    if rest.len() != 10 {
        return None;
    }
    let field = |at: usize| rest.get(at..at + 2).and_then(|two| two.parse::<i8>().ok());
    let at = DateTime::new(year, field(0)?, field(2)?, field(4)?, field(6)?, field(8)?, 0).ok()?;
    // RFC 5280 writes "never" as the last second of 9999, which is beyond our last one.
    Some(at.to_zoned(TimeZone::UTC).map_or(Timestamp::MAX, |zoned| zoned.timestamp()))
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
    fn reads_what_a_certificate_says() {
        for (not_after, text) in
            [((2027, 12, 31), "2027-12-31T00:00:00Z"), ((2061, 1, 2), "2061-01-02T00:00:00Z")]
        {
            let (der, key) = certificate(not_after);
            let facts = Facts::of_der(&der).unwrap();
            assert_eq!(facts.not_before.to_string(), "2026-02-28T01:01:01Z");
            assert_eq!(facts.not_after.to_string(), text);
            assert_eq!(facts.common_name, "system:node:node1");
            assert_eq!(facts.organizations, ["system:nodes"]);
            assert_eq!(facts.dns_names, ["node1", "node1.example"]);
            assert_eq!(facts.ips, ["10.0.0.7", "fd00::7"].map(|ip| ip.parse::<std::net::IpAddr>().unwrap()));
            assert_eq!(facts.public_key, key.der_bytes());
        }
    }

    #[test]
    fn garbage_is_no_certificate_and_no_panic() {
        let (der, _) = certificate((2027, 1, 1));
        for length in 0..der.len() {
            assert_eq!(Facts::of_der(&der[..length]), None, "cut at {length}");
        }
        // Every byte once as every kind of nonsense: an answer, whichever.
        for at in 0..der.len() {
            for value in [0x00, 0x30, 0x7f, 0x80, 0x84, 0xff] {
                let mut bad = der.clone();
                bad[at] = value;
                let _ = Facts::of_der(&bad);
            }
        }
        assert_eq!(Facts::of_der(&[0x30, 0x84, 0xff, 0xff, 0xff, 0xff]), None);
    }

    #[test]
    fn times_are_of_their_century_or_refused() {
        let check = |kind, text: &str, expected: Option<&str>| {
            let read = time((kind, text.as_bytes())).map(|at| at.to_string());
            assert_eq!(read.as_deref(), expected, "{text}");
        };
        check(tag::UTC_TIME, "491231235959Z", Some("2049-12-31T23:59:59Z"));
        check(tag::UTC_TIME, "500101000000Z", Some("1950-01-01T00:00:00Z"));
        check(tag::GENERALIZED_TIME, "20500101000000Z", Some("2050-01-01T00:00:00Z"));
        check(tag::GENERALIZED_TIME, "99991231235959Z", Some(&Timestamp::MAX.to_string()));
        check(tag::UTC_TIME, "260230000000Z", None);
        check(tag::UTC_TIME, "2602", None);
        check(tag::UTC_TIME, "26022800000+Z", None);
        check(tag::OCTET_STRING, "260228000000Z", None);
    }
}
