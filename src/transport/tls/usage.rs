//! The permitted usage of a certificate (pure; Go: crypto/x509, `CheckSignatureFrom` and `isValid`).

use crate::util::x509::{Certificate, Reader, tag, unsigned};

/// The encoded `id-ce`, 2.5.29, the prefix of the extensions of RFC 5280.
const ID_CE: [u8; 2] = [0x55, 0x1d];
const KEY_USAGE: u8 = 15;
const SUBJECT_ALT_NAME: u8 = 17;
const BASIC_CONSTRAINTS: u8 = 19;
const NAME_CONSTRAINTS: u8 = 30;
const POLICY_MAPPINGS: u8 = 33;
const POLICY_CONSTRAINTS: u8 = 36;
const EXTENDED_KEY_USAGE: u8 = 37;
/// Also known, as in Go: CRL distribution points, policies, "inhibit any policy".
const OTHERS: [u8; 3] = [31, 32, 54];

/// `id-kp-clientAuth`, 1.3.6.1.5.5.7.3.2.
const CLIENT_AUTH: &[u8] = &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x02];
/// `id-kp-serverAuth`, 1.3.6.1.5.5.7.3.1.
const SERVER_AUTH: &[u8] = &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x01];
/// `anyExtendedKeyUsage`, 2.5.29.37.0.
const ANY_USAGE: &[u8] = &[0x55, 0x1d, 0x25, 0x00];

/// The bit of `keyCertSign` in the first byte of a key usage.
const CERT_SIGN: u8 = 0x80 >> 5;

/// The kinds of names whose constraints are checked: mail, DNS, URI, IP.
const NAMES: [u8; 4] = [tag::context(1), tag::context(2), tag::context(6), tag::context(7)];

/// The permitted usage of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Usage {
    /// Whether basic constraints make it an authority; one older than version 3 needs none.
    pub is_authority: bool,
    /// Whether basic constraints mark the certificate as an authority.
    pub is_marked_authority: bool,
    /// No key usage forbids it to sign certificates.
    pub may_sign: bool,
    /// The limit of other authorities between it and a client.
    pub path_length: Option<u64>,
    /// The certificate is for clients, or for signing their certificates.
    pub for_clients: bool,
    /// The certificate is for servers, or for signing their certificates.
    pub for_servers: bool,
    /// The certificate has an unsupported critical extension.
    pub has_unsupported_critical: bool,
    /// The certificate has constraints on the policies of certificates.
    ///
    /// DIFFERS: Go evaluates policies; here such a certificate is refused in every chain.
    pub has_policies: bool,
}

impl Usage {
    /// Reads the extensions; `None`: one of them is invalid.
    pub(super) fn from_certificate(certificate: &Certificate<'_>) -> Option<Usage> {
        let mut constraints = None;
        let mut usage = Usage {
            is_authority: false,
            is_marked_authority: false,
            may_sign: true,
            path_length: None,
            for_clients: true,
            for_servers: true,
            has_unsupported_critical: false,
            has_policies: false,
        };
        for extension in &certificate.extensions {
            let known = match *extension.id {
                [arc, ce, number] if [arc, ce] == ID_CE => Some(number),
                _ => None,
            };
            let is_understood = match known {
                Some(KEY_USAGE) => {
                    usage.may_sign = may_sign(extension.value)?;
                    true
                }
                Some(BASIC_CONSTRAINTS) => {
                    constraints = Some(basic_constraints(extension.value)?);
                    true
                }
                Some(EXTENDED_KEY_USAGE) => {
                    let all = Reader(Reader(extension.value).only(tag::SEQUENCE)?);
                    let all = all.all(tag::OBJECT_IDENTIFIER)?;
                    let is_for =
                        |usage| all.is_empty() || all.iter().any(|id| [usage, ANY_USAGE].contains(id));
                    (usage.for_clients, usage.for_servers) = (is_for(CLIENT_AUTH), is_for(SERVER_AUTH));
                    true
                }
                Some(SUBJECT_ALT_NAME) => names(extension.value)?.iter().any(|name| NAMES.contains(name)),
                Some(NAME_CONSTRAINTS) => {
                    constrained(extension.value)?.iter().all(|name| NAMES.contains(name))
                }
                Some(POLICY_MAPPINGS | POLICY_CONSTRAINTS) => {
                    usage.has_policies = true;
                    true
                }
                Some(other) => OTHERS.contains(&other),
                None => false,
            };
            usage.has_unsupported_critical |= extension.critical && !is_understood;
        }
        usage.is_authority = constraints.map_or(!certificate.is_v3, |(is_authority, _)| is_authority);
        usage.is_marked_authority = constraints.is_some_and(|(is_authority, _)| is_authority);
        usage.path_length = constraints.and_then(|(_, length)| length);
        Some(usage)
    }
}

/// Whether it is an authority, and its path length.
fn basic_constraints(value: &[u8]) -> Option<(bool, Option<u64>)> {
    let mut parts = Reader(Reader(value).only(tag::SEQUENCE)?);
    let is_authority = parts.flag()?;
    let length = match parts.optional(tag::INTEGER)? {
        None => None,
        Some(length) => Some(unsigned(length)?),
    };
    parts.0.is_empty().then_some((is_authority, length))
}

fn may_sign(value: &[u8]) -> Option<bool> {
    match Reader(value).only(tag::BIT_STRING)? {
        [0] => Some(false),
        [0..=7, first, ..] => Some(first & CERT_SIGN != 0),
        _ => None,
    }
}

/// The tags of alternative names.
fn names(value: &[u8]) -> Option<Vec<u8>> {
    let mut names = Reader(Reader(value).only(tag::SEQUENCE)?);
    let mut tags = Vec::new();
    while !names.0.is_empty() {
        tags.push(names.any()?.0);
    }
    Some(tags)
}

/// The tags of names that are permitted or excluded.
fn constrained(value: &[u8]) -> Option<Vec<u8>> {
    let mut parts = Reader(Reader(value).only(tag::SEQUENCE)?);
    let mut tags = Vec::new();
    for number in [0, 1] {
        let Some(trees) = parts.optional(tag::constructed(number))? else { continue };
        for tree in Reader(trees).all(tag::SEQUENCE)? {
            tags.push(Reader(tree).any()?.0);
        }
    }
    parts.0.is_empty().then_some(tags)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::x509::Extension;
    use jiff::Timestamp;

    /// The usage of a certificate with these extensions: number, critical, value.
    fn usage(is_v3: bool, extensions: &[(u8, bool, &[u8])]) -> Option<Usage> {
        let ids: Vec<[u8; 3]> = extensions.iter().map(|(number, ..)| [0x55, 0x1d, *number]).collect();
        let extensions = ids
            .iter()
            .zip(extensions)
            .map(|(id, (_, critical, value))| Extension { id, critical: *critical, value })
            .collect();
        let (not_before, not_after) = (Timestamp::MIN, Timestamp::MAX);
        let empty = &[][..];
        Usage::from_certificate(&Certificate {
            is_v3,
            issuer: empty,
            not_before,
            not_after,
            subject: empty,
            key_algorithm: empty,
            public_key: empty,
            public_key_info: empty,
            signature_algorithm: empty,
            extensions,
        })
    }

    #[test]
    fn authorities_need_basic_constraints() {
        let constraints = |value: &[u8]| {
            usage(true, &[(19, true, value)])
                .map(|usage| (usage.is_authority, usage.is_marked_authority, usage.path_length))
        };
        assert_eq!(constraints(&[0x30, 0]), Some((false, false, None)));
        assert_eq!(constraints(&[0x30, 3, 1, 1, 0xff]), Some((true, true, None)));
        assert_eq!(constraints(&[0x30, 3, 1, 1, 0]), Some((false, false, None)));
        assert_eq!(constraints(&[0x30, 6, 1, 1, 0xff, 2, 1, 0]), Some((true, true, Some(0))));
        assert_eq!(constraints(&[0x30, 7, 1, 1, 0xff, 2, 2, 0, 0x80]), Some((true, true, Some(128))));
        for bad in [
            &[][..],
            &[0x30],
            &[0x31, 0],
            &[0x30, 0, 0x30, 0],
            &[0x30, 3, 1, 1, 7],
            &[0x30, 6, 1, 1, 0xff, 2, 1, 0xff],
            &[0x30, 8, 1, 1, 0xff, 4, 0, 2, 1, 0],
        ] {
            assert_eq!(constraints(bad), None, "{bad:?}");
        }
        let is = |is_v3| usage(is_v3, &[]).map(|usage| (usage.is_authority, usage.is_marked_authority));
        assert_eq!(is(true), Some((false, false)));
        assert_eq!(is(false), Some((true, false)));
    }

    #[test]
    fn a_key_usage_without_cert_sign_forbids_to_sign() {
        let signs = |value: &[u8]| usage(true, &[(15, true, value)]).map(|usage| usage.may_sign);
        assert_eq!(usage(true, &[]).map(|usage| usage.may_sign), Some(true));
        assert_eq!(signs(&[3, 2, 2, 0x04]), Some(true));
        assert_eq!(signs(&[3, 2, 1, 0x86]), Some(true));
        assert_eq!(signs(&[3, 2, 5, 0xa0]), Some(false));
        assert_eq!(signs(&[3, 3, 7, 0x83, 0x80]), Some(false));
        assert_eq!(signs(&[3, 1, 0]), Some(false));
        for bad in [&[][..], &[3, 0], &[3, 1, 1], &[3, 2, 8, 4], &[4, 2, 2, 4], &[3, 2, 2, 4, 0]] {
            assert_eq!(signs(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn extended_usages_are_for_clients_or_not() {
        let encoded = |id: &[u8]| [&[6, u8::try_from(id.len()).unwrap()], id].concat();
        let list = |ids: &[Vec<u8>]| {
            let content = ids.concat();
            [&[0x30, u8::try_from(content.len()).unwrap()][..], &content].concat()
        };
        let server = encoded(&[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x01]);
        let check = |value: &[u8]| usage(true, &[(37, false, value)]).map(|usage| usage.for_clients);
        assert_eq!(usage(true, &[]).map(|usage| usage.for_clients), Some(true));
        assert_eq!(check(&list(&[])), Some(true));
        assert_eq!(check(&list(std::slice::from_ref(&server))), Some(false));
        assert_eq!(check(&list(&[server.clone(), encoded(CLIENT_AUTH)])), Some(true));
        assert_eq!(check(&list(&[encoded(ANY_USAGE)])), Some(true));
        assert_eq!(check(&server), None);
        assert_eq!(check(&[0x30, 2, 5, 0]), None);
    }

    #[test]
    fn unknown_critical_extensions_are_rejected() {
        let odd = |number: u8, value: &[u8]| {
            [false, true].map(|critical| {
                usage(true, &[(number, critical, value)]).map(|usage| usage.has_unsupported_critical)
            })
        };
        let (never, critical) = ([Some(false); 2], [Some(false), Some(true)]);
        assert_eq!(odd(99, &[5, 0]), critical);
        assert_eq!(odd(14, &[4, 0]), critical);
        for number in [31, 32, 33, 36, 54] {
            assert_eq!(odd(number, &[0x30, 0]), never, "{number}");
        }
        // Alternative names: one supported kind is enough.
        assert_eq!(odd(17, &[0x30, 3, 0x82, 1, b'a']), never);
        assert_eq!(odd(17, &[0x30, 2, 0xa4, 0]), critical);
        assert_eq!(odd(17, &[0x30, 0]), critical);
        assert_eq!(odd(17, &[0x30, 5, 0xa4, 0, 0x82, 1, b'a']), never);
        // Constraints: all kinds must be supported.
        let permitted = |names: &[u8]| {
            let trees: Vec<u8> = names.iter().flat_map(|name| [0x30, 3, *name, 1, b'a']).collect();
            let length = u8::try_from(trees.len()).unwrap();
            [&[0x30, length + 2, 0xa0, length][..], &trees].concat()
        };
        assert_eq!(odd(30, &permitted(&[0x82])), never);
        assert_eq!(odd(30, &permitted(&[0x81, 0x86, 0x87])), never);
        assert_eq!(odd(30, &permitted(&[0x82, 0xa4])), critical);
        let excluded = [0x30, 7, 0xa1, 5, 0x30, 3, 0x88, 1, 5];
        assert_eq!(odd(30, &excluded), critical);
        for bad in [&[0x30, 2, 0xa2, 0][..], &[0x30, 4, 0xa0, 2, 0x31, 0], &[0x30, 4, 0xa0, 2, 0x30, 0]] {
            assert_eq!(odd(30, bad), [None, None], "{bad:?}");
        }
        let policies = |number| usage(true, &[(number, false, &[0x30, 0])]).map(|usage| usage.has_policies);
        assert_eq!([32, 33, 36].map(policies), [Some(false), Some(true), Some(true)]);
    }
}
