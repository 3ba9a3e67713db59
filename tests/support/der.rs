//! Values in DER, made and taken apart: for certificates that no library makes.

/// A value with its tag and length.
pub(crate) fn value(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len();
    let mut out = vec![tag];
    match length {
        0..0x80 => out.push(length as u8),
        0x80..0x100 => out.extend([0x81, length as u8]),
        0x100..0x1_0000 => out.extend([0x82, (length >> 8) as u8, length as u8]),
        _ => panic!("no certificate has a value of {length} bytes"),
    }
    out.extend(content);
    out
}

/// The values one after the other, each with its tag and length.
pub(crate) fn split(mut content: &[u8]) -> Vec<&[u8]> {
    let mut all = Vec::new();
    while !content.is_empty() {
        let (head, length) = measure(content);
        let (element, rest) = content.split_at(head + length);
        all.push(element);
        content = rest;
    }
    all
}

/// A value without tag and length.
pub(crate) fn content(value: &[u8]) -> &[u8] {
    let (head, length) = measure(value);
    &value[head..head + length]
}

/// The bytes of tag and length, and the length of the content.
fn measure(value: &[u8]) -> (usize, usize) {
    match value[1] {
        0x81 => (3, usize::from(value[2])),
        0x82 => (4, usize::from(value[2]) << 8 | usize::from(value[3])),
        short => (2, usize::from(short)),
    }
}

/// Where the subject stands among the fields of a certificate of version 3.
pub(crate) const SUBJECT: usize = 5;

/// A certificate of version 3 with other fields; its signature stays, and so holds no more.
pub(crate) fn changed(certificate: &[u8], change: impl FnOnce(&mut Vec<Vec<u8>>)) -> Vec<u8> {
    let parts = split(content(certificate));
    let mut fields: Vec<Vec<u8>> = split(content(parts[0])).into_iter().map(<[u8]>::to_vec).collect();
    change(&mut fields);
    value(0x30, &[value(0x30, &fields.concat()), parts[1..].concat()].concat())
}

/// The same as a certificate of version 1, which has no extensions.
pub(crate) fn of_version_1(certificate: &[u8]) -> Vec<u8> {
    changed(certificate, |fields| {
        fields.remove(0);
        fields.truncate(6);
    })
}
