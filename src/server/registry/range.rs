//! Which bytes of a blob a `Range` header wants (pure; RFC 9110, section 14).

/// The bytes of a blob that a request gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ByteRange {
    /// No range, or one that a server may ignore: another unit, several ranges, a malformed one.
    Whole,
    /// From an offset, a number of bytes above zero.
    Bytes(u64, u64),
    /// The range begins after the end.
    Unsatisfiable,
}

impl ByteRange {
    /// The offset and the number of bytes.
    pub(super) fn bytes(self, size: u64) -> (u64, u64) {
        match self {
            ByteRange::Bytes(from, length) => (from, length),
            ByteRange::Whole | ByteRange::Unsatisfiable => (0, size),
        }
    }
}

/// The part of a blob of `size` bytes that the header's value wants; empty: no header.
pub(super) fn byte_range(range: &str, size: u64) -> ByteRange {
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        // A number that does not fit is larger than any blob.
        digits.then(|| text.parse::<u64>().unwrap_or(u64::MAX))
    };
    let Some((first, last)) = range.strip_prefix("bytes=").and_then(|bounds| bounds.trim().split_once('-'))
    else {
        return ByteRange::Whole;
    };
    match (number(first), number(last)) {
        (Some(from), Some(to)) if from > to => ByteRange::Whole,
        (Some(from), _) if from >= size && (last.is_empty() || number(last).is_some()) => {
            ByteRange::Unsatisfiable
        }
        (Some(from), Some(to)) => ByteRange::Bytes(from, to.min(size.saturating_sub(1)) - from + 1),
        (Some(from), None) if last.is_empty() => ByteRange::Bytes(from, size - from),
        // The last bytes.
        (None, Some(count)) if first.is_empty() => match count.min(size) {
            0 => ByteRange::Unsatisfiable,
            count => ByteRange::Bytes(size - count, count),
        },
        _ => ByteRange::Whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_within_the_blob() {
        for (range, size, expected) in [
            ("", 10, ByteRange::Whole),
            ("bytes=0-", 10, ByteRange::Bytes(0, 10)),
            ("bytes=4-", 10, ByteRange::Bytes(4, 6)),
            ("bytes=9-", 10, ByteRange::Bytes(9, 1)),
            ("bytes=10-", 10, ByteRange::Unsatisfiable),
            ("bytes=2-5", 10, ByteRange::Bytes(2, 4)),
            ("bytes=2-2", 10, ByteRange::Bytes(2, 1)),
            ("bytes=2-99999999999999999999999", 10, ByteRange::Bytes(2, 8)),
            ("bytes=99999999999999999999999-", 10, ByteRange::Unsatisfiable),
            ("bytes=10-12", 10, ByteRange::Unsatisfiable),
            ("bytes=5-2", 10, ByteRange::Whole),
            ("bytes=-3", 10, ByteRange::Bytes(7, 3)),
            ("bytes=-30", 10, ByteRange::Bytes(0, 10)),
            ("bytes=-0", 10, ByteRange::Unsatisfiable),
            ("bytes=0-", 0, ByteRange::Unsatisfiable),
            ("bytes=-", 10, ByteRange::Whole),
            ("bytes=1-2,4-5", 10, ByteRange::Whole),
            ("bytes=a-", 10, ByteRange::Whole),
            ("bytes=11-x", 10, ByteRange::Whole),
            ("bytes=+1-", 10, ByteRange::Whole),
            ("lines=1-2", 10, ByteRange::Whole),
        ] {
            assert_eq!(byte_range(range, size), expected, "{range} of {size}");
        }
    }

    proptest::proptest! {
        #[test]
        fn random_ranges_stay_within_the_blob(range in "(bytes=)?[0-9,-]{0,24}", size: u64) {
            if let ByteRange::Bytes(from, length) = byte_range(&range, size) {
                proptest::prop_assert!(length > 0 && from.checked_add(length).is_some_and(|end| end <= size));
            }
        }
    }
}
