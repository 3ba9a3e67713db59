//! Messages that this and other implementations wrote, and invalid bytes.

use super::wire::*;
use proptest::prelude::*;

fn sample() -> Message {
    Message {
        serial: 7,
        path: "/org/freedesktop/login1".to_owned(),
        interface: "org.freedesktop.login1.Manager".to_owned(),
        member: "Inhibit".to_owned(),
        destination: "org.freedesktop.login1".to_owned(),
        sender: ":1.5".to_owned(),
        reply_to: Some(3),
        fds: 1,
        args: vec![
            Value::Bool(true),
            Value::Text("shutdown".to_owned()),
            Value::Long(u64::MAX - 1),
            Value::Fd(0),
            Value::Int(-1),
            Value::Variant(Box::new(Value::Variant(Box::new(Value::Long(5))))),
            Value::Path("/".to_owned()),
            Value::Signature("as".to_owned()),
            Value::Uint(9),
        ],
        ..Message::new(Kind::Call)
    }
}

#[test]
fn written_values_are_read_back() {
    for message in
        [sample(), Message::new(Kind::Signal), Message { reply_to: Some(1), ..Message::new(Kind::Return) }]
    {
        let bytes = message.encode();
        assert_eq!(length(&bytes), Some(bytes.len()));
        assert_eq!(Message::decode(&bytes), Some(message));
    }
}

/// Arrays and structures are aligned to 8 bytes, and an array's length does not count the padding
/// before its first element (the D-Bus specification, "Marshaling").
#[test]
fn arrays_and_structures_are_aligned() {
    let property = |name: &str, value| {
        Value::Struct(vec![Value::Text(name.to_owned()), Value::Variant(Box::new(value))])
    };
    let cpus = Value::Array("y", vec![Value::Byte(3), Value::Byte(1)]);
    let message = Message {
        args: vec![
            Value::Text("a.slice".to_owned()),
            Value::Array("(sv)", vec![property("C", cpus), property("W", Value::Long(9))]),
            Value::Array("(sa(sv))", vec![]),
        ],
        ..Message::new(Kind::Call)
    };
    let bytes = message.encode();
    assert_eq!(length(&bytes), Some(bytes.len()));
    let body = b"\x07\0\0\0a.slice\0\x30\0\0\0\
        \x01\0\0\0C\0\x02ay\0\0\0\x02\0\0\0\x03\x01\0\0\0\0\0\0\
        \x01\0\0\0W\0\x01t\0\0\0\0\0\0\0\0\x09\0\0\0\0\0\0\0\
        \0\0\0\0\0\0\0\0";
    assert!(bytes.ends_with(body), "{bytes:?}");
    assert_eq!(bytes.len() % 8, 0);
    let decoded = Message::decode(&bytes).unwrap();
    assert_eq!(decoded.args, message.args[..1], "what cannot be read ends the arguments");
}

/// The first call of every client, byte for byte as the reference library sends it.
#[test]
fn encoded_messages_equal_those_of_other_implementations() {
    let hello = Message {
        serial: 1,
        path: "/org/freedesktop/DBus".to_owned(),
        interface: "org.freedesktop.DBus".to_owned(),
        member: "Hello".to_owned(),
        destination: "org.freedesktop.DBus".to_owned(),
        ..Message::new(Kind::Call)
    };
    let expected = b"l\x01\x00\x01\x00\x00\x00\x00\x01\x00\x00\x00\x6d\x00\x00\x00\
        \x01\x01o\x00\x15\x00\x00\x00/org/freedesktop/DBus\x00\x00\x00\
        \x02\x01s\x00\x14\x00\x00\x00org.freedesktop.DBus\x00\x00\x00\x00\
        \x03\x01s\x00\x05\x00\x00\x00Hello\x00\x00\x00\
        \x06\x01s\x00\x14\x00\x00\x00org.freedesktop.DBus\x00\x00\x00\x00";
    assert_eq!(hello.encode(), expected.as_slice());
}

#[test]
fn big_endian_message_is_read() {
    let bytes = b"B\x04\x00\x01\x00\x00\x00\x04\x00\x00\x00\x05\x00\x00\x00\x0f\
        \x08\x01g\x00\x01b\x00\x00\x07\x01s\x00\x00\x00\x00\x01\
        :\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01";
    // The lengths: fields up to the sender's zero.
    let mut bytes = bytes.to_vec();
    bytes[15] = 18;
    let message = Message::decode(&bytes).unwrap();
    assert_eq!((message.serial, message.sender.as_str(), message.kind), (5, ":", Kind::Signal));
    assert_eq!(message.args, [Value::Bool(true)]);
}

#[test]
fn arguments_are_read_up_to_the_first_unsupported_type() {
    let mut message = sample();
    message.args = vec![Value::Uint(1), Value::Text("x".to_owned())];
    let mut bytes = message.encode();
    let offset = bytes.windows(3).position(|three| three == b"us\0").unwrap();
    bytes[offset + 1] = b'a';
    assert_eq!(Message::decode(&bytes).unwrap().args, [Value::Uint(1)]);
}

#[test]
fn invalid_lengths_and_heads_are_no_message() {
    assert_eq!(length(b"x\x01\x00\x01aaaaaaaaaaaa"), None);
    assert_eq!(length(b"l\x01\x00\x02\0\0\0\0\0\0\0\0\0\0\0\0"), None);
    assert_eq!(length(b"l\x01\x00\x01\xff\xff\xff\xff\0\0\0\0\xff\xff\xff\xff"), None);
    assert_eq!(length(b"l\x01"), None);
    assert_eq!(Message::decode(&[]), None);
}

proptest! {
    #[test]
    fn odd_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Message::decode(&bytes);
    }

    #[test]
    fn broken_messages_never_panic(offset in 0_usize..400, to in any::<u8>(), cut in 0_usize..400) {
        let mut bytes = sample().encode();
        let place = offset % bytes.len();
        bytes[place] = to;
        bytes.truncate(cut.max(1));
        let _ = Message::decode(&bytes);
    }
}
