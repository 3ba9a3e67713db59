//! X.509 certificates (RFC 5280) in DER (X.690), the parts that are used here (pure).
//!
//! The parser is strict, as Go's is: each value has one encoding. It checks no signature:
//! `transport` does that.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

/// Tags of DER values.
pub mod tag {
    /// BOOLEAN.
    pub const BOOLEAN: u8 = 0x01;
    /// INTEGER.
    pub const INTEGER: u8 = 0x02;
    /// BIT STRING.
    pub const BIT_STRING: u8 = 0x03;
    /// OCTET STRING.
    pub const OCTET_STRING: u8 = 0x04;
    /// OBJECT IDENTIFIER.
    pub const OBJECT_IDENTIFIER: u8 = 0x06;
    /// UTF8String.
    pub const UTF8_STRING: u8 = 0x0c;
    /// PrintableString.
    pub const PRINTABLE_STRING: u8 = 0x13;
    /// IA5String.
    pub const IA5_STRING: u8 = 0x16;
    /// UTCTime.
    pub const UTC_TIME: u8 = 0x17;
    /// GeneralizedTime.
    pub const GENERALIZED_TIME: u8 = 0x18;
    /// SEQUENCE.
    pub const SEQUENCE: u8 = 0x30;
    /// SET.
    pub const SET: u8 = 0x31;

    /// `[n]` with a primitive value.
    #[must_use]
    pub const fn context(number: u8) -> u8 {
        0x80 | number
    }

    /// `[n]` with nested values.
    #[must_use]
    pub const fn constructed(number: u8) -> u8 {
        0xa0 | number
    }
}

/// The remaining bytes of a sequence of DER values.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// The next value's tag and content.
    pub fn any(&mut self) -> Option<(u8, &'a [u8])> {
        let (&tag, rest) = self.0.split_first()?;
        // Tags above 30 take more bytes and do not occur here.
        if tag & 0x1f == 0x1f {
            return None;
        }
        let (&first, mut rest) = rest.split_first()?;
        let length = if first < 0x80 {
            usize::from(first)
        } else {
            // Four length bytes allow 4 GiB, more than any certificate has; zero length bytes are BER.
            let count = usize::from(first & 0x7f);
            if !(1..=4).contains(&count) {
                return None;
            }
            let (bytes, after) = rest.split_at_checked(count)?;
            rest = after;
            let length = bytes.iter().fold(0_usize, |length, byte| (length << 8) | usize::from(*byte));
            // DER: only the shortest form is valid.
            if length < 0x80 || bytes.first() == Some(&0) {
                return None;
            }
            length
        };
        let (content, after) = rest.split_at_checked(length)?;
        self.0 = after;
        Some((tag, content))
    }

    /// The next value's content if it has this tag.
    pub fn take(&mut self, wanted: u8) -> Option<&'a [u8]> {
        self.any().filter(|(tag, _)| *tag == wanted).map(|(_, content)| content)
    }

    /// Reads like [`Reader::take`], but does not consume a value with another tag. `None` is an
    /// error.
    pub fn optional(&mut self, wanted: u8) -> Option<Option<&'a [u8]>> {
        if self.0.first() == Some(&wanted) { self.take(wanted).map(Some) } else { Some(None) }
    }

    /// A BOOLEAN with the default false. `None` is an error.
    pub fn flag(&mut self) -> Option<bool> {
        match self.optional(tag::BOOLEAN)? {
            None | Some([0]) => Some(false),
            Some([0xff]) => Some(true),
            Some(_) => None,
        }
    }

    /// The content of the only value, if it has this tag.
    #[must_use]
    pub fn only(mut self, wanted: u8) -> Option<&'a [u8]> {
        self.take(wanted).filter(|_| self.0.is_empty())
    }

    /// The contents of all values, if all of them have this tag.
    #[must_use]
    pub fn all(mut self, wanted: u8) -> Option<Vec<&'a [u8]>> {
        let mut all = Vec::new();
        while !self.0.is_empty() {
            all.push(self.take(wanted)?);
        }
        Some(all)
    }
}

/// The number of an INTEGER's content that is not below zero.
#[must_use]
pub fn unsigned(content: &[u8]) -> Option<u64> {
    match content {
        [] | [0x80..=0xff, ..] | [0, 0..=0x7f, ..] => None,
        [0, rest @ ..] | rest if rest.len() <= 8 => {
            Some(rest.iter().fold(0, |number, byte| (number << 8) | u64::from(*byte)))
        }
        _ => None,
    }
}

/// Whether this is the content of an OBJECT IDENTIFIER, with numbers below 2³¹ as in Go.
pub fn is_identifier(content: &[u8]) -> bool {
    let mut number = 0_u64;
    let mut begins = true;
    for byte in content {
        if begins && *byte == 0x80 {
            return false;
        }
        number = (number << 7) | u64::from(byte & 0x7f);
        if number >= 1 << 31 {
            return false;
        }
        begins = byte & 0x80 == 0;
        if begins {
            number = 0;
        }
    }
    begins && !content.is_empty()
}

/// An extension of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extension<'a> {
    /// The encoded object identifier.
    pub id: &'a [u8],
    /// Software that does not support it must refuse the certificate.
    pub critical: bool,
    /// The extension's content, in DER.
    pub value: &'a [u8],
}

/// The parts of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate<'a> {
    /// X.509 version 3, which has extensions.
    pub is_v3: bool,
    /// The distinguished name of the issuer: the content of the SEQUENCE.
    pub issuer: &'a [u8],
    /// The time before which the certificate is not valid.
    pub not_before: Timestamp,
    /// The time after which the certificate is not valid.
    pub not_after: Timestamp,
    /// The distinguished name of the subject: the content of the SEQUENCE.
    pub subject: &'a [u8],
    /// The algorithm of the public key with its parameters: the content of the SEQUENCE.
    pub key_algorithm: &'a [u8],
    /// The public key, without its algorithm.
    pub public_key: &'a [u8],
    /// The SubjectPublicKeyInfo: algorithm and public key as the whole SEQUENCE, with its tag and length.
    pub public_key_info: &'a [u8],
    /// The algorithm of the signature: the content of the SEQUENCE.
    pub signature_algorithm: &'a [u8],
    /// The extensions; each identifier occurs at most once.
    pub extensions: Vec<Extension<'a>>,
}

impl<'a> Certificate<'a> {
    /// Reads a certificate in DER; `None` if it is invalid.
    #[must_use]
    pub fn from_der(der: &'a [u8]) -> Option<Certificate<'a>> {
        let mut certificate = Reader(Reader(der).only(tag::SEQUENCE)?);
        let mut body = Reader(certificate.take(tag::SEQUENCE)?);
        let version = match body.optional(tag::constructed(0))? {
            None => 0,
            Some(version) => unsigned(Reader(version).only(tag::INTEGER)?)?,
        };
        let _serial = body.take(tag::INTEGER)?;
        let signature_algorithm = body.take(tag::SEQUENCE)?;
        let issuer = body.take(tag::SEQUENCE)?;
        let mut validity = Reader(body.take(tag::SEQUENCE)?);
        let not_before = time(validity.any()?)?;
        let not_after = time(validity.any()?)?;
        let subject = body.take(tag::SEQUENCE)?;
        let before_key = body.0;
        let mut key = Reader(body.take(tag::SEQUENCE)?);
        let public_key_info = before_key.get(..before_key.len() - body.0.len())?;
        let key_algorithm = key.take(tag::SEQUENCE)?;
        // The first byte counts the unused bits of the last one.
        let public_key = key.take(tag::BIT_STRING)?.get(1..)?;
        let mut extensions = Vec::new();
        while !body.0.is_empty() {
            let (kind, content) = body.any()?;
            if kind == tag::constructed(3) {
                extensions = extensions_of(content)?;
            }
        }
        let is_v3 = version == 2;
        Some(Certificate {
            is_v3,
            issuer,
            not_before,
            not_after,
            subject,
            key_algorithm,
            public_key,
            public_key_info,
            signature_algorithm,
            extensions,
        })
    }

    /// The extension of this identifier.
    #[must_use]
    pub fn extension(&self, id: &[u8]) -> Option<Extension<'a>> {
        self.extensions.iter().find(|extension| extension.id == id).copied()
    }
}

fn extensions_of(content: &[u8]) -> Option<Vec<Extension<'_>>> {
    let mut extensions: Vec<Extension<'_>> = Vec::new();
    for extension in Reader(Reader(content).only(tag::SEQUENCE)?).all(tag::SEQUENCE)? {
        let mut parts = Reader(extension);
        let id = parts.take(tag::OBJECT_IDENTIFIER)?;
        let critical = parts.flag()?;
        let value = parts.take(tag::OCTET_STRING)?;
        if extensions.len() >= MAX_EXTENSIONS || extensions.iter().any(|other| other.id == id) {
            return None;
        }
        extensions.push(Extension { id, critical, value });
    }
    Some(extensions)
}

/// The limit of extensions of one certificate, which are compared with each other. Real ones have ten.
const MAX_EXTENSIONS: usize = 64;

/// `YYMMDDhhmmssZ` or `YYYYMMDDhhmmssZ`, the only forms in certificates.
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
    let field = |start: usize| rest.get(start..start + 2).and_then(|two| two.parse::<i8>().ok());
    let date = DateTime::new(year, field(0)?, field(2)?, field(4)?, field(6)?, field(8)?, 0).ok()?;
    // RFC 5280 encodes "never" as the last second of 9999, which is beyond our last one.
    Some(date.to_zoned(TimeZone::UTC).map_or(Timestamp::MAX, |zoned| zoned.timestamp()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_in_other_encodings_than_der_are_refused() {
        let any = |bytes: &[u8]| {
            let mut reader = Reader(bytes);
            reader.any().map(|(tag, content)| (tag, content.len(), reader.0.len()))
        };
        assert_eq!(any(&[0x04, 2, 7, 7, 9]), Some((0x04, 2, 1)));
        let long = [&[0x04, 0x81, 0x80][..], &[7; 0x80]].concat();
        assert_eq!(any(&long), Some((0x04, 0x80, 0)));
        for (bytes, reason) in [
            (&[][..], "nothing"),
            (&[0x04], "no length"),
            (&[0x04, 2, 7], "cut"),
            (&[0x1f, 1, 1], "a long tag"),
            (&[0x04, 0x80, 0, 0], "no length at all"),
            (&[0x04, 0x81, 1, 7], "a length longer than needed"),
            (&[0x04, 0x82, 0, 0x80, 7], "a length with a zero before it"),
            (&[0x30, 0x84, 0xff, 0xff, 0xff, 0xff], "four gigabytes"),
            (&[0x30, 0x85, 1, 0, 0, 0, 0], "more"),
        ] {
            assert_eq!(any(bytes), None, "{reason}");
        }
        let flag = |bytes: &[u8]| Reader(bytes).flag();
        assert_eq!(flag(&[]), Some(false));
        assert_eq!(flag(&[4, 0]), Some(false));
        assert_eq!(flag(&[1, 1, 0]), Some(false));
        assert_eq!(flag(&[1, 1, 0xff]), Some(true));
        assert_eq!(flag(&[1, 1, 1]), None);
        assert_eq!(flag(&[1, 2, 0xff, 0xff]), None);
        assert_eq!(Reader(&[4, 0, 4]).only(4), None);
        assert_eq!(Reader(&[4, 0, 4, 1, 1]).all(4).map(|all| all.len()), Some(2));
        assert_eq!(Reader(&[4, 0, 5, 0]).all(4), None);
    }

    #[test]
    fn numbers_and_identifiers_are_of_the_shortest_form() {
        for (content, number) in [
            (&[0][..], Some(0)),
            (&[5], Some(5)),
            (&[0, 0x80], Some(128)),
            (&[0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], Some(u64::MAX)),
            (&[0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], Some(i64::MAX.unsigned_abs())),
            (&[], None),
            (&[0x80], None),
            (&[0, 5], None),
            (&[1, 0, 0, 0, 0, 0, 0, 0, 0], None),
            (&[0, 0, 0x80], None),
        ] {
            assert_eq!(unsigned(content), number, "{content:?}");
        }
        for (content, good) in [
            (&[0x55, 4, 3][..], true),
            (&[0x2b, 0x06, 0x01, 0x04, 0x01, 0x83, 0xc2, 0x51, 0x02], true),
            (&[0x55, 0x87, 0xff, 0xff, 0xff, 0x7f], true),
            (&[], false),
            (&[0x55, 0x80, 3], false),
            (&[0x55, 0x84], false),
            (&[0x55, 0x88, 0x80, 0x80, 0x80, 0], false),
        ] {
            assert_eq!(is_identifier(content), good, "{content:?}");
        }
    }

    #[test]
    fn two_digit_years_map_to_1950_to_2049() {
        let check = |kind, text: &str, expected: Option<&str>| {
            let read = time((kind, text.as_bytes())).map(|time| time.to_string());
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
