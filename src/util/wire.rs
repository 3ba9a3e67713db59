//! The wire format of Protocol Buffers: fields of messages, without a schema (pure).
//!
//! Messages are read field by field, so that neither depth nor memory depends on their content. Groups, which
//! no message of Kubernetes has, are not read.

/// A field of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field<'a> {
    /// Its number, which is not 0.
    pub number: u64,
    /// Its value.
    pub content: Content<'a>,
    /// All of its bytes, with number and length.
    pub encoded: &'a [u8],
}

/// The value of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content<'a> {
    /// An integer, a flag or an enumeration.
    Number(u64),
    /// A text, bytes or a message.
    Bytes(&'a [u8]),
    /// A number of four or eight bytes.
    Fixed,
}

/// Reads the field with which `rest` begins, and leaves what follows. `None`: it is no whole field.
pub fn next_field<'a>(rest: &mut &'a [u8]) -> Option<Field<'a>> {
    let message = *rest;
    let key = read_varint(rest)?;
    let content = match key & 7 {
        0 => Content::Number(read_varint(rest)?),
        1 => fixed(rest, 8)?,
        2 => {
            let length = usize::try_from(read_varint(rest)?).ok()?;
            Content::Bytes(take(rest, length)?)
        }
        5 => fixed(rest, 4)?,
        _ => return None,
    };
    let number = key >> 3;
    let encoded = message.get(..message.len() - rest.len())?;
    (number != 0).then_some(Field { number, content, encoded })
}

fn fixed<'a>(rest: &mut &'a [u8], length: usize) -> Option<Content<'a>> {
    take(rest, length).map(|_| Content::Fixed)
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, after) = rest.split_at_checked(length)?;
    *rest = after;
    Some(taken)
}

fn read_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (byte, after) = rest.split_first()?;
        *rest = after;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while let rest @ 1.. = value >> 7 {
        out.push(u8::try_from(value & 0x7f).unwrap_or_default() | 0x80);
        value = rest;
    }
    out.push(u8::try_from(value).unwrap_or_default());
}

/// Adds a field with an integer or a flag.
pub fn varint_field(number: u32, value: u64, out: &mut Vec<u8>) {
    varint(u64::from(number) << 3, out);
    varint(value, out);
}

/// Adds a field with a text or bytes.
pub fn bytes(number: u32, content: &[u8], out: &mut Vec<u8>) {
    varint(u64::from(number) << 3 | 2, out);
    varint(content.len() as u64, out);
    out.extend_from_slice(content);
}

/// Adds a field with the bytes that `write` adds.
pub fn delimited(number: u32, out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    write(out);
    let mut head = Vec::new();
    varint(u64::from(number) << 3 | 2, &mut head);
    varint((out.len() - start) as u64, &mut head);
    out.splice(start..start, head);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_seven_bits_a_byte() {
        let cases: [(u64, &[u8]); 4] = [
            (0, &[0]),
            (127, &[127]),
            (128, &[128, 1]),
            (u64::MAX, &[255, 255, 255, 255, 255, 255, 255, 255, 255, 1]),
        ];
        for (value, expected) in cases {
            let mut out = Vec::new();
            varint(value, &mut out);
            assert_eq!(out, expected);
            assert_eq!(read_varint(&mut out.as_slice()), Some(value));
        }
    }

    #[test]
    fn fields_are_read_as_they_were_written_and_no_part_of_a_field_is_read() {
        let mut message = Vec::new();
        varint_field(1, 300, &mut message);
        bytes(2, b"ab", &mut message);
        delimited(20, &mut message, |out| varint_field(1, 1, out));
        message.extend_from_slice(b"\x1d1234\x2112345678");
        let expected: [(u64, Content<'_>, &[u8]); 5] = [
            (1, Content::Number(300), b"\x08\xac\x02"),
            (2, Content::Bytes(b"ab"), b"\x12\x02ab"),
            // The key of field 20 has two bytes: 20 << 3 | 2 is 162.
            (20, Content::Bytes(b"\x08\x01"), b"\xa2\x01\x02\x08\x01"),
            (3, Content::Fixed, b"\x1d1234"),
            (4, Content::Fixed, b"\x2112345678"),
        ];
        let mut rest = message.as_slice();
        for (number, content, encoded) in expected {
            assert_eq!(next_field(&mut rest), Some(Field { number, content, encoded }));
            for length in 0..encoded.len() {
                assert_eq!(next_field(&mut &encoded[..length]), None, "{encoded:?} {length}");
            }
        }
        assert!(rest.is_empty());
        // Number 0, the begin of a group, a number with eleven bytes, and a length beyond each address.
        for wrong in [
            b"\x00\x01".as_slice(),
            b"\x0b\x0c",
            b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        ] {
            assert_eq!(next_field(&mut &wrong[..]), None, "{wrong:?}");
        }
    }
}
