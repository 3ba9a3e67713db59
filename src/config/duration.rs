//! Durations as Go writes them: `1m0s`, `100ms`, `-1.5h` (Go: time.Duration, metav1.Duration).

use std::time::Duration;

/// A signed duration in nanoseconds that reads and prints in Go's form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[must_use]
pub struct GoDuration(i64);

/// A text is not a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a duration: want numbers with units, such as 300ms, 10s or 1h30m")]
pub struct DurationError {
    /// The text.
    pub text: String,
}

const SECOND: i64 = 1_000_000_000;
/// The longest duration below zero, in nanoseconds without the sign.
const LONGEST: i128 = 1 << 63;

impl GoDuration {
    /// Zero.
    pub const ZERO: GoDuration = GoDuration(0);

    /// A duration of this number of seconds.
    pub const fn from_secs(seconds: i64) -> Self {
        GoDuration(seconds.saturating_mul(SECOND))
    }

    /// From milliseconds.
    pub const fn from_millis(millis: i64) -> Self {
        GoDuration(millis.saturating_mul(1_000_000))
    }

    /// Converts to the standard library's type; negative values become zero.
    pub fn to_std(self) -> Duration {
        Duration::from_nanos(u64::try_from(self.0).unwrap_or(0))
    }

    /// Whether it is below zero.
    pub const fn is_negative(self) -> bool {
        self.0 < 0
    }

    /// Whether it is exactly zero.
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Parses Go's syntax.
    ///
    /// # Errors
    /// When the text is not a duration or does not fit 64 bits of nanoseconds.
    pub fn parse(text: &str) -> Result<Self, DurationError> {
        parse(text).map(GoDuration).ok_or_else(|| DurationError { text: text.to_owned() })
    }
}

impl From<Duration> for GoDuration {
    fn from(duration: Duration) -> Self {
        GoDuration(i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX))
    }
}

fn parse(text: &str) -> Option<i64> {
    let (negative, mut rest) = match text.as_bytes().first()? {
        b'-' => (true, text.get(1..)?),
        b'+' => (false, text.get(1..)?),
        _ => (false, text),
    };
    if rest == "0" {
        return Some(0);
    }
    if rest.is_empty() {
        return None;
    }
    let mut total: i128 = 0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
            return None;
        }
        let unit_end = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, next) = after.split_at(unit_end);
        let nanos: i64 = match unit {
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return None,
        };
        if !whole.is_empty() {
            total += i128::from(whole.parse::<u64>().ok()?) * i128::from(nanos);
        }
        total += i128::from(part_of(nanos, fraction));
        if total > LONGEST {
            return None;
        }
        rest = next;
    }
    i64::try_from(if negative { -total } else { total }).ok()
}

/// The part of a unit that digits after a point are, as Go computes it: digits that do not fit 63 bits
/// have no effect, and the rest of a nanosecond is dropped.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "Go computes it so, too")]
fn part_of(nanos: i64, fraction: &str) -> i64 {
    let (mut value, mut scale) = (0_u64, 1.0_f64);
    for digit in fraction.bytes().map(|byte| u64::from(byte.wrapping_sub(b'0'))) {
        let next = value.saturating_mul(10).saturating_add(digit);
        if value > i64::MAX.unsigned_abs() / 10 || next > 1 << 63 {
            break;
        }
        value = next;
        scale *= 10.0;
    }
    (value as f64 * (nanos as f64 / scale)) as i64
}

impl std::fmt::Display for GoDuration {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 == 0 {
            return out.write_str("0s");
        }
        let sign = if self.0 < 0 { "-" } else { "" };
        let size = self.0.unsigned_abs();
        let decimal = |nanos: u64, unit: u64| -> String {
            let (whole, rest) = (nanos / unit, nanos % unit);
            if rest == 0 {
                return whole.to_string();
            }
            let width = unit.ilog10() as usize;
            format!("{whole}.{}", format!("{rest:0width$}").trim_end_matches('0'))
        };
        match size {
            0..1_000 => write!(out, "{sign}{size}ns"),
            1_000..1_000_000 => write!(out, "{sign}{}µs", decimal(size, 1_000)),
            1_000_000..1_000_000_000 => write!(out, "{sign}{}ms", decimal(size, 1_000_000)),
            _ => {
                let (minutes, rest) = (size / 60_000_000_000, size % 60_000_000_000);
                let seconds = decimal(rest, 1_000_000_000);
                match (minutes / 60, minutes % 60) {
                    (0, 0) => write!(out, "{sign}{seconds}s"),
                    (0, minutes) => write!(out, "{sign}{minutes}m{seconds}s"),
                    (hours, minutes) => write!(out, "{sign}{hours}h{minutes}m{seconds}s"),
                }
            }
        }
    }
}

impl serde::Serialize for GoDuration {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for GoDuration {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        GoDuration::parse(&text).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations_are_printed_as_go_does() {
        for (duration, expected) in [
            (Duration::ZERO, "0s"),
            (Duration::from_nanos(7), "7ns"),
            (Duration::from_nanos(1_500), "1.5µs"),
            (Duration::from_millis(523), "523ms"),
            (Duration::from_micros(2_500), "2.5ms"),
            (Duration::from_secs(10), "10s"),
            (Duration::from_secs(80), "1m20s"),
            (Duration::from_secs(300), "5m0s"),
            (Duration::from_millis(1_200), "1.2s"),
            (Duration::from_millis(62_050), "1m2.05s"),
            (Duration::from_secs(3_600), "1h0m0s"),
            (Duration::from_secs(100), "1m40s"),
        ] {
            assert_eq!(GoDuration::from(duration).to_string(), expected);
        }
    }

    #[test]
    fn reads_and_prints_go_durations() {
        for (text, nanos, printed) in [
            ("0", 0, "0s"),
            ("0s", 0, "0s"),
            ("1m", 60 * SECOND, "1m0s"),
            ("1m0s", 60 * SECOND, "1m0s"),
            ("90s", 90 * SECOND, "1m30s"),
            ("4h", 4 * 3600 * SECOND, "4h0m0s"),
            ("100ms", 100_000_000, "100ms"),
            ("1.5s", 1_500_000_000, "1.5s"),
            (".5h", 1800 * SECOND, "30m0s"),
            ("1h15m30.918273645s", 4_530_918_273_645, "1h15m30.918273645s"),
            ("-1m", -60 * SECOND, "-1m0s"),
            ("+5s", 5 * SECOND, "5s"),
            ("1us", 1_000, "1µs"),
            ("1µs", 1_000, "1µs"),
            ("1.5ms", 1_500_000, "1.5ms"),
            ("7ns", 7, "7ns"),
            ("2562047h47m16.854775807s", i64::MAX, "2562047h47m16.854775807s"),
        ] {
            let duration = GoDuration::parse(text).unwrap();
            assert_eq!(duration.0, nanos, "{text}");
            assert_eq!(duration.to_string(), printed, "{text}");
        }
        for text in [
            "", "1", "s", "1x", "1 s", "1s ", ".s", "1..5s", "--1s", "-", "1d", "9999999h", "1m0", "½s", "1S",
        ] {
            assert!(GoDuration::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn json_of_a_duration_must_be_a_string() {
        assert_eq!(serde_json::from_str::<GoDuration>("\"1m\"").unwrap(), GoDuration::from_secs(60));
        assert!(serde_json::from_str::<GoDuration>("60000000000").is_err());
        assert_eq!(serde_json::to_string(&GoDuration::from_secs(60)).unwrap(), "\"1m0s\"");
        assert_eq!(GoDuration::from_secs(-1).to_std(), Duration::ZERO);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_duration_reads_back(nanos: i64) {
            let duration = GoDuration(nanos);
            if nanos != i64::MIN {
                prop_assert_eq!(GoDuration::parse(&duration.to_string()).unwrap(), duration);
            }
        }

        #[test]
        fn parsing_any_text_does_not_panic(text in "\\PC{0,20}|[0-9.hmsnu+µ-]{0,20}") {
            let _ = GoDuration::parse(&text);
        }
    }
}
