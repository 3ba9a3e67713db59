//! Messages of DNS (RFC 1035): queries for addresses, and their answers (pure).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The limit of a name in a message, with its lengths and its end.
const MAX_NAME: usize = 255;
/// The limit of a part of a name.
const MAX_LABEL: usize = 63;
/// Aliases from a name to its addresses.
const MAX_ALIASES: usize = 16;
/// Records of an answer that are read.
const MAX_RECORDS: usize = 256;
/// The largest answer by UDP that a query with EDNS requests.
pub(super) const UDP_BYTES: u16 = 1232;

const HEADER: usize = 12;
const INTERNET: u16 = 1;
const ALIAS: u16 = 5;
const OPT: u16 = 41;

/// The type of the wanted records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// IPv4 addresses.
    A,
    /// IPv6 addresses.
    Aaaa,
}

impl Kind {
    fn number(self) -> u16 {
        match self {
            Kind::A => 1,
            Kind::Aaaa => 28,
        }
    }

    /// The address of a record of this type.
    fn address(self, data: &[u8]) -> Option<IpAddr> {
        match self {
            Kind::A => <[u8; 4]>::try_from(data).ok().map(|bytes| Ipv4Addr::from(bytes).into()),
            Kind::Aaaa => <[u8; 16]>::try_from(data).ok().map(|bytes| Ipv6Addr::from(bytes).into()),
        }
    }
}

/// What a message means for a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Response {
    /// It answers another question.
    Foreign,
    /// The answer is longer than a datagram.
    Truncated,
    /// The name exists; it may have no address of the type.
    Found(Vec<IpAddr>),
    /// The name does not exist.
    NoName,
    /// The server cannot answer.
    Failed,
}

/// A name in the form of messages, in lower case. A final dot is optional. `None`: it is no name.
pub(super) fn encode(name: &str) -> Option<Vec<u8>> {
    let name = name.strip_suffix('.').unwrap_or(name);
    let mut bytes = Vec::with_capacity(name.len() + 2);
    for label in name.split('.').filter(|_| !name.is_empty()) {
        let length = u8::try_from(label.len()).ok().filter(|length| usize::from(*length) <= MAX_LABEL)?;
        if length == 0 || !label.bytes().all(|byte| byte.is_ascii_graphic()) {
            return None;
        }
        bytes.push(length);
        bytes.extend(label.bytes().map(|byte| byte.to_ascii_lowercase()));
    }
    bytes.push(0);
    (bytes.len() <= MAX_NAME).then_some(bytes)
}

/// A query for the records of an encoded name.
pub(super) fn query(id: u16, name: &[u8], kind: Kind, edns: bool) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + name.len() + 15);
    // A query with recursion; one question.
    for part in [id, 0x0100, 1, 0, 0, u16::from(edns)] {
        bytes.extend(part.to_be_bytes());
    }
    bytes.extend(name);
    bytes.extend(kind.number().to_be_bytes());
    bytes.extend(INTERNET.to_be_bytes());
    if edns {
        bytes.push(0);
        for part in [OPT, UDP_BYTES, 0, 0, 0] {
            bytes.extend(part.to_be_bytes());
        }
    }
    bytes
}

/// Reads a message from a server that was asked this question.
pub(super) fn read(message: &[u8], id: u16, name: &[u8], kind: Kind) -> Response {
    parse(message, id, name, kind).unwrap_or(Response::Failed)
}

/// `None`: the message answers the question, and is malformed.
fn parse(message: &[u8], id: u16, name: &[u8], kind: Kind) -> Option<Response> {
    let mut cursor = Cursor { message, offset: 0 };
    let mut header = [0; 6];
    for part in &mut header {
        let Some(number) = cursor.number() else { return Some(Response::Foreign) };
        *part = number;
    }
    let [own_id, flags, questions, resource_count, _, additional] = header;
    // The highest bit marks an answer; the next four are the kind of query.
    if own_id != id || flags & 0xf800 != 0x8000 {
        return Some(Response::Foreign);
    }
    let code = flags & 0xf;
    // A server that did not understand the query may leave out the question.
    if questions == 0 && code != 0 && code != 3 {
        return Some(Response::Failed);
    }
    let same = questions == 1
        && cursor.name().as_deref() == Some(name)
        && cursor.number() == Some(kind.number())
        && cursor.number() == Some(INTERNET);
    if !same {
        return Some(Response::Foreign);
    }
    match code {
        _ if flags & 0x0200 != 0 => return Some(Response::Truncated),
        0 => {}
        3 => return Some(Response::NoName),
        _ => return Some(Response::Failed),
    }
    // Neither an authority of the name nor a server that asks others.
    if resource_count == 0 && additional == 0 && flags & 0x0480 == 0 {
        return Some(Response::Failed);
    }
    let mut records = Vec::new();
    for _ in 0..usize::from(resource_count).min(MAX_RECORDS) {
        let owner = cursor.name()?;
        let (number, class) = (cursor.number()?, cursor.number()?);
        let _time_to_live = (cursor.number()?, cursor.number()?);
        let length = usize::from(cursor.number()?);
        let mut data = Cursor { message: message.get(..cursor.offset + length)?, offset: cursor.offset };
        if class == INTERNET && number == ALIAS {
            records.push((owner, Err(data.name()?)));
        } else if class == INTERNET && number == kind.number() {
            records.push((owner, Ok(kind.address(message.get(cursor.offset..cursor.offset + length)?)?)));
        }
        cursor.offset += length;
    }
    let mut owner = name.to_vec();
    for _ in 0..=MAX_ALIASES {
        let own = || records.iter().filter(|(name, _)| *name == owner).map(|(_, record)| record);
        let found: Vec<IpAddr> = own().filter_map(|record| record.as_ref().ok().copied()).collect();
        let next = own().find_map(|record| record.as_ref().err());
        match next {
            Some(next) if found.is_empty() => owner = next.clone(),
            _ => return Some(Response::Found(found)),
        }
    }
    None
}

/// A position in a message.
struct Cursor<'a> {
    message: &'a [u8],
    offset: usize,
}

impl Cursor<'_> {
    fn number(&mut self) -> Option<u16> {
        let bytes = self.message.get(self.offset..self.offset + 2)?;
        self.offset += 2;
        Some(u16::from_be_bytes(bytes.try_into().ok()?))
    }

    /// A name, in lower case and without references: each reference leads to an earlier place.
    fn name(&mut self) -> Option<Vec<u8>> {
        let mut name = Vec::new();
        let mut position = self.offset;
        let mut lowest = self.offset;
        let mut is_referred = false;
        loop {
            let length = *self.message.get(position)?;
            position += 1;
            match length {
                0 => {
                    name.push(0);
                    break;
                }
                1..=0x3f => {
                    let label = self.message.get(position..position + usize::from(length))?;
                    name.push(length);
                    name.extend(label.iter().map(u8::to_ascii_lowercase));
                    position += label.len();
                }
                0xc0..=0xff => {
                    let low = *self.message.get(position)?;
                    if !is_referred {
                        self.offset = position + 1;
                        is_referred = true;
                    }
                    position = (usize::from(length & 0x3f) << 8) | usize::from(low);
                    if position >= lowest {
                        return None;
                    }
                    lowest = position;
                }
                _ => return None,
            }
            if name.len() >= MAX_NAME {
                return None;
            }
        }
        if !is_referred {
            self.offset = position;
        }
        Some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUESTION: &[u8] = b"\x03api\x04edge\x04test\0\0\x01\0\x01";

    fn name() -> Vec<u8> {
        encode("api.edge.test").unwrap()
    }

    fn response(flags: u16, counts: [u16; 3], rest: &[&[u8]]) -> Vec<u8> {
        let header = [7, flags, 1, counts[0], counts[1], counts[2]];
        let mut bytes: Vec<u8> = header.iter().flat_map(|part| part.to_be_bytes()).collect();
        bytes.extend(QUESTION);
        bytes.extend(rest.concat());
        bytes
    }

    fn check(message: &[u8]) -> Response {
        read(message, 7, &name(), Kind::A)
    }

    #[test]
    fn names_are_encoded_or_refused() {
        assert_eq!(encode("A.bc").unwrap(), b"\x01a\x02bc\0");
        assert_eq!(encode("a.bc."), encode("a.bc"));
        assert_eq!(encode("").unwrap(), b"\0");
        let longest =
            [["a"; 63].concat(), ["b"; 63].concat(), ["c"; 63].concat(), ["d"; 61].concat()].join(".");
        assert_eq!(encode(&longest).unwrap().len(), 255);
        for bad in ["a..b", ".a", "a b", "ü", "a..", &["a"; 64].concat(), &format!("{longest}d")] {
            assert_eq!(encode(bad), None, "{bad}");
        }
    }

    #[test]
    fn query_has_one_question_and_is_extended_on_request() {
        let plain = [&b"\0\x07\x01\0\0\x01\0\0\0\0\0\0"[..], QUESTION].concat();
        assert_eq!(query(7, &name(), Kind::A, false), plain);
        let extended = query(7, &name(), Kind::Aaaa, true);
        assert_eq!(extended.get(..12).unwrap(), b"\0\x07\x01\0\0\x01\0\0\0\0\0\x01");
        assert!(extended.ends_with(b"\0\0\x1c\0\x01\0\0\x29\x04\xd0\0\0\0\0\0\0"));
    }

    #[test]
    fn only_responses_to_the_question_are_read() {
        let found = response(0x8180, [1, 0, 0], &[b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\x0a\0\0\x01"]);
        assert_eq!(check(&found), Response::Found(vec!["10.0.0.1".parse().unwrap()]));
        assert_eq!(read(&found, 8, &name(), Kind::A), Response::Foreign);
        assert_eq!(read(&found, 7, &name(), Kind::Aaaa), Response::Foreign);
        assert_eq!(read(&found, 7, &encode("api.edge").unwrap(), Kind::A), Response::Foreign);
        assert_eq!(check(&response(0x0180, [0; 3], &[])), Response::Foreign, "a query");
        assert_eq!(check(&[]), Response::Foreign);
        assert_eq!(check(found.get(..20).unwrap()), Response::Foreign);
        assert_eq!(check(found.get(..found.len() - 1).unwrap()), Response::Failed, "cut");
        assert_eq!(check(&response(0x8380, [0; 3], &[])), Response::Truncated);
        assert_eq!(check(&response(0x8183, [0; 3], &[])), Response::NoName);
        assert_eq!(check(&response(0x8182, [0; 3], &[])), Response::Failed);
        assert_eq!(check(&response(0x8180, [0; 3], &[])), Response::Found(Vec::new()));
        assert_eq!(check(&response(0x8100, [0; 3], &[])), Response::Failed, "a server of other names");
        assert_eq!(check(b"\0\x07\x81\x81\0\0\0\0\0\0\0\0"), Response::Failed, "no question");
    }

    #[test]
    fn aliases_are_followed_in_any_order_and_never_in_a_circle() {
        let address = |owner: &[u8]| [owner, b"\0\x01\0\x01\0\0\0\x3c\0\x04\x0a\0\0\x01"].concat();
        let alias = |owner: &[u8], to: &[u8]| {
            let length = u16::try_from(to.len()).unwrap().to_be_bytes();
            [owner, b"\0\x05\0\x01\0\0\0\x3c", &length, to].concat()
        };
        let (b, c) = (&b"\x01b\0"[..], &b"\x01C\0"[..]);
        let all = response(0x8180, [3, 0, 0], &[&address(c), &alias(b, c), &alias(b"\xc0\x0c", b)]);
        assert_eq!(check(&all), Response::Found(vec!["10.0.0.1".parse().unwrap()]));
        let foreign = response(0x8180, [1, 0, 0], &[&address(c)]);
        assert_eq!(check(&foreign), Response::Found(Vec::new()));
        let circle = response(0x8180, [2, 0, 0], &[&alias(b"\xc0\x0c", b), &alias(b, b"\xc0\x0c")]);
        assert_eq!(check(&circle), Response::Failed);
        // A reference to itself, and one that leads forwards.
        for reference in [b"\xc0\x1f", b"\xc0\xff"] {
            assert_eq!(check(&response(0x8180, [1, 0, 0], &[&address(reference)])), Response::Failed);
        }
    }
}
