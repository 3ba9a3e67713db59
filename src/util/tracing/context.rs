//! The identity of a span, and its form in headers (W3C Trace Context, `traceparent`; Go:
//! go.opentelemetry.io/otel/propagation, trace_context.go).

use crate::util::token;

/// The header that carries the identity of a span.
pub const HEADER: &str = "traceparent";

/// The flag of a trace whose spans are recorded.
const SAMPLED: u8 = 1;
/// The flags that version 0 of the header defines: sampled, and random.
const KNOWN_FLAGS: u8 = 3;

/// The identity of a span, and whether its trace is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    /// The trace; never zero.
    pub trace: [u8; 16],
    /// The span; never zero.
    pub span: [u8; 8],
    /// Whether the spans of the trace are recorded.
    pub is_sampled: bool,
    /// Whether another process made the span.
    pub is_remote: bool,
}

impl SpanContext {
    /// A new span of the trace of `parent`, or the first span of a new trace. `None`: the kernel has no
    /// random bytes.
    pub(super) fn new(parent: Option<&SpanContext>, samples: impl FnOnce(&[u8; 16]) -> bool) -> Option<Self> {
        let span = random()?;
        let Some(parent) = parent else {
            let trace = random()?;
            return Some(SpanContext { trace, span, is_sampled: samples(&trace), is_remote: false });
        };
        Some(SpanContext { trace: parent.trace, span, is_sampled: parent.is_sampled, is_remote: false })
    }

    /// Reads the value of a `traceparent` header; `None` if it is not valid.
    #[must_use]
    pub fn parse(header: &str) -> Option<SpanContext> {
        let mut parts = header.trim().split('-');
        let [version] = digits(parts.next()?)?;
        let trace: [u8; 16] = digits(parts.next()?)?;
        let span: [u8; 8] = digits(parts.next()?)?;
        let [flags] = digits(parts.next()?)?;
        let is_exact = parts.next().is_none() && flags <= KNOWN_FLAGS;
        // A later version may have more parts and flags; version 255 is not allowed.
        if version == u8::MAX || (version == 0 && !is_exact) || trace == [0; 16] || span == [0; 8] {
            return None;
        }
        Some(SpanContext { trace, span, is_sampled: flags & SAMPLED != 0, is_remote: true })
    }

    /// The value of the header for requests that are made within the span.
    #[must_use]
    pub fn header(&self) -> String {
        let flags = if self.is_sampled { "01" } else { "00" };
        format!("00-{}-{}-{flags}", hexadecimal(&self.trace), hexadecimal(&self.span))
    }
}

/// Random bytes that are not all zero.
fn random<const N: usize>() -> Option<[u8; N]> {
    token::bytes().ok().filter(|bytes| *bytes != [0; N])
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Exactly `N` bytes in lower-case hexadecimal digits.
fn digits<const N: usize>(text: &str) -> Option<[u8; N]> {
    let lower = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if text.len() != N * 2 || !lower {
        return None;
    }
    let mut bytes = [0; N];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(index * 2..index * 2 + 2)?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn headers_are_read_and_written_as_by_other_programs() {
        let context = SpanContext::parse(VALID).unwrap();
        assert_eq!((context.trace[0], context.span[7]), (0x0a, 0x31));
        assert!(context.is_sampled && context.is_remote);
        assert_eq!(context.header(), VALID);
        let unsampled = VALID.replace("-01", "-02");
        assert!(!SpanContext::parse(&unsampled).unwrap().is_sampled);
        // A later version may have more.
        assert!(SpanContext::parse(&format!("{}-more", VALID.replacen("00", "01", 1))).is_some());
    }

    #[test]
    fn invalid_headers_are_ignored() {
        for header in [
            "",
            "00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-04",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
            "00-ä0af7651916cd43dd8448eb211c8031-b7ad6b7169203331-01",
        ] {
            assert_eq!(SpanContext::parse(header), None, "{header:?}");
        }
    }

    #[test]
    fn children_stay_in_the_trace_and_follow_its_sampling() {
        let parent = SpanContext::parse(VALID).unwrap();
        let never = |_: &[u8; 16]| false;
        let child = SpanContext::new(Some(&parent), never).unwrap();
        assert_eq!((child.trace, child.is_sampled, child.is_remote), (parent.trace, true, false));
        assert_ne!(child.span, parent.span);
        let (first, second) =
            (SpanContext::new(None, never).unwrap(), SpanContext::new(None, never).unwrap());
        assert!(first.trace != second.trace && first.span != second.span && !first.is_sampled);
    }
}
