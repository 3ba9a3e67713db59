use proptest::prelude::*;

use super::*;

/// All events in `bytes`, given in pieces of `piece` bytes; adjacent data is joined, and each event
/// is a text.
fn read(bytes: &[u8], piece: usize) -> Result<Vec<String>, SpdyError> {
    let mut reader = Reader::default();
    let mut events: Vec<String> = Vec::new();
    let mut open: Option<(u32, Vec<u8>)> = None;
    let close = |open: &mut Option<(u32, Vec<u8>)>, events: &mut Vec<String>| {
        if let Some((stream, bytes)) = open.take() {
            events.push(format!("{stream}:{}", String::from_utf8_lossy(&bytes)));
        }
    };
    for mut part in bytes.chunks(piece.max(1)) {
        while let Some(event) = reader.next(&mut part)? {
            if let Event::Data(stream, bytes) = event {
                match &mut open {
                    Some((same, all)) if *same == stream => all.extend_from_slice(bytes),
                    _ => {
                        close(&mut open, &mut events);
                        open = Some((stream, bytes.to_vec()));
                    }
                }
                continue;
            }
            close(&mut open, &mut events);
            events.push(match event {
                Event::Accepted(stream) => format!("taken {stream}"),
                Event::Ended(stream) => format!("ended {stream}"),
                Event::Reset(stream) => format!("reset {stream}"),
                Event::Opened(stream) => format!("opened {stream}"),
                Event::Ping(number) => format!("ping {number}"),
                Event::GoAway => "go away".to_owned(),
                Event::Data(..) => unreachable!(),
            });
        }
        assert!(part.is_empty());
    }
    close(&mut open, &mut events);
    Ok(events)
}

/// A control frame with this content.
fn frame(kind: u16, flags: u8, content: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    control(&mut out, kind, flags, content.len());
    out.extend_from_slice(content);
    out
}

#[test]
fn frames_are_read_in_pieces_of_any_size() {
    let mut all = Vec::new();
    all.extend(frame(SYN_REPLY, 0, &[0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]));
    data(&mut all, 3, b"some");
    data(&mut all, 3, b" bytes");
    data(&mut all, 5, b"");
    end(&mut all, 3);
    all.extend(frame(SYN_REPLY, FIN, &[0, 0, 0, 7]));
    // Settings, window updates and headers are ignored.
    all.extend(frame(4, 1, &[0, 0, 0, 1, 4, 0, 0, 7, 0, 0, 0, 100]));
    all.extend(frame(9, 0, &[0, 0, 0, 1, 0, 0, 0, 100]));
    all.extend(frame(HEADERS, FIN, &[0, 0, 0, 9, 1, 2]));
    all.extend(frame(99, 0, &[]));
    refuse(&mut all, 11);
    pong(&mut all, 4_000_000_000);
    all.extend(frame(SYN_STREAM, 0, &[0, 0, 0, 2, 0, 0, 0, 0, 0, 0]));
    all.extend(frame(GO_AWAY, 0, &[0, 0, 0, 0, 0, 0, 0, 0]));
    let expected = [
        "taken 1",
        "3:some bytes",
        "ended 3",
        "taken 7",
        "ended 7",
        "ended 9",
        "reset 11",
        "ping 4000000000",
        "opened 2",
        "go away",
    ];
    for piece in [1, 2, 3, 7, 8, 9, 64, all.len()] {
        assert_eq!(read(&all, piece).unwrap(), expected, "{piece}");
    }
}

#[test]
fn invalid_spdy_is_an_error() {
    assert_eq!(read(b"HTTP/1.1", 16), Ok(vec![]), "could be the head of a data frame");
    assert_eq!(read(&[0x80, 2, 0, 1, 0, 0, 0, 0], 8), Err(SpdyError::Version));
    assert_eq!(read(&frame(SYN_REPLY, 0, &[0]), 8), Err(SpdyError::Short(SYN_REPLY)));
    assert_eq!(read(&frame(RST_STREAM, 0, &[0, 0, 0, 1]), 8), Err(SpdyError::Short(RST_STREAM)));
    assert_eq!(read(&frame(PING, 0, &[]), 8), Err(SpdyError::Short(PING)));
}

#[test]
fn a_stream_is_opened_without_compression() {
    let mut out = Vec::new();
    let mut writer = Writer::default();
    writer.open(&mut out, 1, &[("a", "bc")]);
    let block = [0, 0, 0, 1, 0, 0, 0, 1, b'a', 0, 0, 0, 2, b'b', b'c'];
    let mut expected = vec![0x80, 3, 0, 1, 0, 0, 0, 41, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    expected.extend(ZLIB);
    expected.extend([0, 15, 0, 0xf0, 0xff]);
    expected.extend(block);
    expected.extend(FLUSH);
    assert_eq!(out, expected);
    // The check bits of the zlib header.
    assert_eq!((u32::from(ZLIB[0]) * 256 + u32::from(ZLIB[1])) % 31, 0);
    out.clear();
    writer.open(&mut out, 3, &[]);
    assert_eq!(out.len(), 18 + 5 + 4 + 5, "one zlib stream has one beginning");
    assert_eq!(read(&out, 5).unwrap(), ["opened 3"]);
}

#[test]
fn long_data_is_split_into_frames() {
    let mut out = Vec::new();
    data(&mut out, 1, &vec![b'x'; DATA_BYTES + 1]);
    assert_eq!(out.len(), DATA_BYTES + 1 + 16);
}

proptest! {
    #[test]
    fn any_bytes_are_read_alike_in_any_pieces(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        piece in 1_usize..20,
    ) {
        prop_assert_eq!(read(&bytes, piece), read(&bytes, usize::MAX));
    }

    #[test]
    fn any_control_frames_are_survived(
        kinds in proptest::collection::vec((0_u16..12, any::<u8>(), 0_usize..20), 0..10),
        piece in 1_usize..20,
    ) {
        let mut all = Vec::new();
        for (kind, flags, length) in kinds {
            all.extend(frame(kind, flags, &vec![7; length]));
        }
        prop_assert_eq!(read(&all, piece), read(&all, usize::MAX));
    }
}
