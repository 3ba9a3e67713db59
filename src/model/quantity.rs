//! Resource quantities: `100m`, `1Gi`, `2e3` (Go: apimachinery pkg/api/resource).

use super::Quantity;

/// A quantity in units of 10⁻⁹, rounded up as upstream does when it scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Amount(i128);

const NANO: i128 = 1_000_000_000;

/// Why a text is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a quantity: want a number with an optional suffix such as m, k, M, Ki, Mi, Gi or e3"
)]
pub struct NotAQuantity {
    /// The text in question.
    pub text: String,
}

impl Amount {
    /// Nothing.
    pub const ZERO: Amount = Amount(0);

    /// From whole units (bytes, cores).
    #[must_use]
    pub fn from_units(units: i64) -> Self {
        Amount(i128::from(units) * NANO)
    }

    /// From thousandths.
    #[must_use]
    pub fn from_milli(milli: i64) -> Self {
        Amount(i128::from(milli) * (NANO / 1000))
    }

    /// Parses Kubernetes' quantity syntax.
    ///
    /// # Errors
    /// When the text is not a quantity.
    pub fn parse(text: &str) -> Result<Self, NotAQuantity> {
        parse(text).ok_or_else(|| NotAQuantity { text: text.to_owned() })
    }

    /// In whole units, rounded up (away from zero below zero is rounded towards it).
    #[must_use]
    pub fn units(self) -> i64 {
        clamp(ceil_div(self.0, NANO))
    }

    /// In thousandths, rounded up: millicores for CPU.
    #[must_use]
    pub fn milli(self) -> i64 {
        clamp(ceil_div(self.0, NANO / 1000))
    }

    /// The rounded-up quotient of two amounts; a divisor of zero counts as one.
    #[must_use]
    pub fn divide(self, divisor: Amount) -> i64 {
        let divisor = if divisor.0 == 0 { NANO } else { divisor.0 };
        clamp(ceil_div(self.0, divisor))
    }

    /// Whether it is exactly zero.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Whether it is below zero.
    #[must_use]
    pub fn is_negative(self) -> bool {
        self.0 < 0
    }

    /// Whether it is a whole number of units.
    #[must_use]
    pub fn is_whole(self) -> bool {
        self.0 % NANO == 0
    }
}

impl std::ops::Add for Amount {
    type Output = Amount;
    fn add(self, other: Amount) -> Amount {
        Amount(self.0.saturating_add(other.0))
    }
}

impl std::iter::Sum for Amount {
    fn sum<I: Iterator<Item = Amount>>(amounts: I) -> Amount {
        amounts.fold(Amount::ZERO, |total, amount| total + amount)
    }
}

/// Reads an API quantity; a text that validation let pass but is no quantity counts as zero.
#[must_use]
pub fn amount(quantity: &Quantity) -> Amount {
    Amount::parse(&quantity.0).unwrap_or(Amount::ZERO)
}

fn clamp(value: i128) -> i64 {
    i64::try_from(value).unwrap_or(if value < 0 { i64::MIN } else { i64::MAX })
}

fn ceil_div(value: i128, by: i128) -> i128 {
    let (quotient, rest) = (value / by, value % by);
    if rest != 0 && (rest > 0) == (by > 0) { quotient + 1 } else { quotient }
}

fn parse(text: &str) -> Option<Amount> {
    let (negative, body) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let end = body.bytes().position(|b| !b.is_ascii_digit() && b != b'.').unwrap_or(body.len());
    let (number, suffix) = body.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) || number.len() > 60 {
        return None;
    }
    // value = digits × 2^binary × 10^decimal, in units of 10⁻⁹
    let (binary, exponent) = scale(suffix)?;
    let digits: String = [whole, fraction].concat();
    let trimmed = digits.trim_start_matches('0');
    let mut value: i128 = if trimmed.is_empty() {
        0
    } else if trimmed.len() > 30 {
        i128::MAX >> 8
    } else {
        trimmed.parse().ok()?
    };
    value = value.checked_mul(1_i128.checked_shl(binary)?).unwrap_or(i128::MAX >> 8);
    let decimal = exponent + 9 - i32::try_from(fraction.len()).ok()?;
    value = if decimal >= 0 {
        let power = 10_i128.checked_pow(u32::try_from(decimal).ok()?).unwrap_or(i128::MAX);
        value.checked_mul(power).unwrap_or(i128::MAX >> 8)
    } else {
        match 10_i128.checked_pow(decimal.unsigned_abs()) {
            Some(power) => ceil_div(value, power),
            None => i128::from(value > 0),
        }
    };
    // Far beyond any resource; keeps later sums inside the type.
    value = value.min(i128::from(i64::MAX) * NANO);
    Some(Amount(if negative { -value } else { value }))
}

/// Suffix → (power of two, power of ten).
fn scale(suffix: &str) -> Option<(u32, i32)> {
    Some(match suffix {
        "" => (0, 0),
        "n" => (0, -9),
        "u" => (0, -6),
        "m" => (0, -3),
        "k" => (0, 3),
        "M" => (0, 6),
        "G" => (0, 9),
        "T" => (0, 12),
        "P" => (0, 15),
        "E" => (0, 18),
        "Ki" => (10, 0),
        "Mi" => (20, 0),
        "Gi" => (30, 0),
        "Ti" => (40, 0),
        "Pi" => (50, 0),
        "Ei" => (60, 0),
        _ => {
            let digits = suffix.strip_prefix(['e', 'E'])?;
            let exponent: i32 = digits.parse().ok()?;
            (-100..=100).contains(&exponent).then_some((0, exponent))?
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_kubernetes_quantities() {
        for (text, units, milli) in [
            ("0", 0, 0),
            ("1", 1, 1000),
            ("100m", 1, 100),
            ("0.5", 1, 500),
            (".5", 1, 500),
            ("1.5Gi", 1_610_612_736, 1_610_612_736_000),
            ("64Mi", 67_108_864, 67_108_864_000),
            ("2e3", 2000, 2_000_000),
            ("2E", 2_000_000_000_000_000_000, i64::MAX),
            ("1k", 1000, 1_000_000),
            ("1n", 1, 1),
            ("-1500m", -1, -1500),
            ("+3", 3, 3000),
            ("9999999999999999999999999999999999", i64::MAX, i64::MAX),
        ] {
            let amount = Amount::parse(text).unwrap();
            assert_eq!((amount.units(), amount.milli()), (units, milli), "{text}");
        }
        for text in ["", "-", "1.2.3", "abc", "1 Gi", "1gi", "e3", "1e", "1e999", "½", "0x10", "."] {
            assert!(Amount::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn divides_rounding_up() {
        let bytes = Amount::parse("64Mi").unwrap();
        assert_eq!(bytes.divide(Amount::parse("1Mi").unwrap()), 64);
        assert_eq!(bytes.divide(Amount::parse("1Gi").unwrap()), 1);
        assert_eq!(Amount::parse("250m").unwrap().divide(Amount::from_units(1)), 1);
        assert_eq!(Amount::parse("250m").unwrap().divide(Amount::from_milli(1)), 250);
        assert_eq!(bytes.divide(Amount::ZERO), 67_108_864);
    }
}
