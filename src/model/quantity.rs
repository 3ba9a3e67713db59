//! Resource quantities: `100m`, `1Gi`, `2e3` (Go: apimachinery pkg/api/resource).

use super::Quantity;

/// A quantity in units of 10⁻⁹, rounded up as upstream does when it scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Amount(i128);

const NANO: i128 = 1_000_000_000;

/// A text is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a quantity: want a number with an optional suffix such as m, k, M, Ki, Mi, Gi or e3"
)]
pub struct QuantityError {
    /// The text.
    pub text: String,
}

impl Amount {
    /// Zero.
    pub const ZERO: Amount = Amount(0);

    /// The amount of this number of units (bytes, cores).
    pub fn from_units(units: i64) -> Self {
        Amount(i128::from(units) * NANO)
    }

    /// The amount of this number of thousandths of a unit.
    pub fn from_milli(milli: i64) -> Self {
        Amount(i128::from(milli) * (NANO / 1000))
    }

    /// Parses Kubernetes' quantity syntax.
    ///
    /// # Errors
    /// When the text is not a quantity.
    pub fn parse(text: &str) -> Result<Self, QuantityError> {
        parse(text).ok_or_else(|| QuantityError { text: text.to_owned() })
    }

    /// The number of units, rounded up.
    ///
    /// DIFFERS: Go's rounding of negative fractions depends on its representation of the number; no
    /// such quantity is valid anywhere.
    pub fn units(self) -> i64 {
        clamp(ceil_div(self.0, NANO))
    }

    /// In thousandths, rounded up: millicores for CPU.
    pub fn milli(self) -> i64 {
        clamp(ceil_div(self.0, NANO / 1000))
    }

    /// In thousandths, rounded to the nearest one, as CPU that is reserved (Go: cmd/kubelet/app
    /// `parseResourceList`, which rounds up to millionths first).
    #[must_use]
    pub fn nearest_milli(self) -> i64 {
        clamp(ceil_div(self.0, NANO / 1_000_000).saturating_add(500).div_euclid(1000))
    }

    /// Rounded up to thousandths, as the resources of a pod are before it is validated (Go:
    /// pkg/apis/core/v1 `SetDefaults_ResourceList`).
    #[must_use]
    pub fn rounded(self) -> Amount {
        const MILLI: i128 = NANO / 1000;
        Amount(ceil_div(self.0, MILLI).saturating_mul(MILLI))
    }

    /// The rounded-up quotient of two amounts; a divisor of zero counts as one.
    #[must_use]
    pub fn divide(self, divisor: Amount) -> i64 {
        let divisor = if divisor.0 == 0 { NANO } else { divisor.0 };
        clamp(ceil_div(self.0, divisor))
    }

    /// Whether it is exactly zero.
    pub fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Whether it is below zero.
    pub fn is_negative(self) -> bool {
        self.0 < 0
    }

    /// Whether it is a whole number of units.
    pub fn is_whole(self) -> bool {
        self.0 % NANO == 0
    }

    /// The quantity in one of the API's forms. Fractions are decimal in each form except the one
    /// with exponents, and so are numbers below 1024.
    #[must_use]
    pub fn format(self, form: Form) -> String {
        const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
        const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
        let divided = |mut number: i128, by: i128, most: usize| {
            let mut times = 0;
            while times < most && number % by == 0 {
                number /= by;
                times += 1;
            }
            (number, times)
        };
        if self.is_zero() {
            return "0".to_owned();
        }
        if form == Form::Binary && self.is_whole() && self.0.abs() >= 1024 * NANO {
            let (number, times) = divided(self.0 / NANO, 1024, BINARY.len() - 1);
            return format!("{number}{}", BINARY.get(times).unwrap_or(&""));
        }
        let (number, times) = divided(self.0, 1000, DECIMAL.len() - 1);
        match form {
            Form::Exponent if times == 3 => number.to_string(),
            Form::Exponent => format!("{number}e{}", 3 * i64::try_from(times).unwrap_or(3) - 9),
            _ => format!("{number}{}", DECIMAL.get(times).unwrap_or(&"")),
        }
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

/// Reads an API quantity; an invalid text, which validation may have accepted, counts as zero.
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

/// The parts of a quantity's text, split as Go splits it (apimachinery: `parseQuantityString`).
struct Split<'a> {
    negative: bool,
    /// The digits before the point, without leading zeros.
    whole: &'a str,
    /// The digits after the point.
    fraction: &'a str,
    scale: Scale,
}

/// The factor of a suffix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scale {
    /// A power of two.
    Binary(u32),
    /// A power of ten, named by a letter.
    Decimal(i64),
    /// A power of ten, named by its exponent.
    Exponent(i64),
}

/// The limit of digits of one number.
///
/// DIFFERS: Go has no limit.
const MAX_DIGITS: usize = 100;

fn split(text: &str) -> Option<Split<'_>> {
    let (negative, body) = match text.strip_prefix(['-', '+']) {
        Some(body) => (text.starts_with('-'), body),
        None => (false, text),
    };
    let number = body.bytes().position(|byte| !byte.is_ascii_digit() && byte != b'.').unwrap_or(body.len());
    let (number, suffix) = body.split_at(number);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    // DIFFERS: Go reads a sign or a point alone as zero.
    if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let whole = whole.trim_start_matches('0');
    let few = whole.len() + fraction.len() <= MAX_DIGITS;
    scale(suffix).filter(|_| few).map(|scale| Split { negative, whole, fraction, scale })
}

fn parse(text: &str) -> Option<Amount> {
    let Split { negative, whole, fraction, scale } = split(text)?;
    // digits × 2^binary × 10^decimal, in units of 10⁻⁹
    let (binary, exponent) = match scale {
        Scale::Binary(power) => (power, 0),
        Scale::Decimal(power) | Scale::Exponent(power) => (0, power),
    };
    let decimal = exponent + 9 - i64::try_from(fraction.len()).ok()?;
    let mut value = Wide::default();
    for digit in whole.bytes().chain(fraction.bytes()) {
        value.multiply(10, u64::from(digit - b'0'));
    }
    value.multiply(1 << binary, 0);
    if value.is_zero() {
        return Some(Amount::ZERO);
    }
    if decimal > 40 {
        return Some(Amount(if negative { -MAX_AMOUNT } else { MAX_AMOUNT }));
    }
    for _ in 0..decimal {
        value.multiply(10, 0);
    }
    let mut rest = false;
    // After this many divisions the result is zero.
    for _ in 0..(-decimal).min(2 * MAX_DIGITS as i64) {
        rest |= value.divide(10) != 0;
    }
    let value = value.get().map_or(MAX_AMOUNT, |value| (value + i128::from(rest)).min(MAX_AMOUNT));
    Some(Amount(if negative { -value } else { value }))
}

/// Far beyond any resource; keeps sums inside the type.
const MAX_AMOUNT: i128 = i64::MAX as i128 * NANO;

/// A number of up to 640 bits, the lowest first: [`MAX_DIGITS`] digits, the largest suffix and
/// 40 more digits have 526.
#[derive(Default)]
struct Wide([u64; 10]);

impl Wide {
    fn is_zero(&self) -> bool {
        self.0 == [0; 10]
    }

    fn multiply(&mut self, by: u64, more: u64) {
        let mut carry = u128::from(more);
        for word in &mut self.0 {
            carry += u128::from(*word) * u128::from(by);
            *word = (carry & u128::from(u64::MAX)) as u64;
            carry >>= 64;
        }
    }

    /// Stores the quotient and returns the remainder.
    fn divide(&mut self, by: u64) -> u64 {
        let mut rest = 0;
        for word in self.0.iter_mut().rev() {
            let part = (rest << 64) | u128::from(*word);
            // Below 2⁶⁴, as the remainder is below the divisor.
            *word = (part / u128::from(by)) as u64;
            rest = part % u128::from(by);
        }
        rest as u64
    }

    /// `None`: the number is larger than fits, with room for one more.
    fn get(&self) -> Option<i128> {
        let [low, high, rest @ ..] = &self.0;
        let value = (u128::from(*high) << 64) | u128::from(*low);
        i128::try_from(value).ok().filter(|value| rest.iter().all(|word| *word == 0) && *value < i128::MAX)
    }
}

fn scale(suffix: &str) -> Option<Scale> {
    const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
    const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    if let Some((_, power)) = DECIMAL.iter().zip((-9..).step_by(3)).find(|(unit, _)| **unit == suffix) {
        return Some(Scale::Decimal(power));
    }
    if let Some((_, power)) = BINARY.iter().zip((10..).step_by(10)).find(|(unit, _)| **unit == suffix) {
        return Some(Scale::Binary(power));
    }
    let digits = suffix.strip_prefix(['e', 'E'])?;
    // DIFFERS: Go keeps the lower 32 bits of larger exponents.
    digits.parse::<i32>().ok().map(|power| Scale::Exponent(power.into()))
}

/// The form of a quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Powers of 1024: `64Mi`.
    Binary,
    /// Powers of 1000: `250m`.
    Decimal,
    /// Powers of 1000 as exponents: `3e6`.
    Exponent,
}

impl Form {
    /// The form of this text.
    #[must_use]
    pub fn from_text(text: &str) -> Form {
        match split(text).map(|split| split.scale) {
            Some(Scale::Binary(_)) => Form::Binary,
            Some(Scale::Exponent(_)) => Form::Exponent,
            _ => Form::Decimal,
        }
    }
}

/// A quantity as the API writes it: `0.5` becomes `500m`, `1024Mi` becomes `1Gi`. An invalid text
/// is not changed.
#[must_use]
pub fn canonical(text: &str) -> String {
    match Amount::parse(text) {
        Ok(amount) if !is_unchanged(text) => amount.format(Form::from_text(text)),
        _ => text.to_owned(),
    }
}

/// Whether Go keeps this text of a quantity: where a fast path of its parser treats the text as
/// canonical. It is not always canonical, such as `0590m` (apimachinery: `ParseQuantity`).
fn is_unchanged(text: &str) -> bool {
    let Some(Split { whole, fraction, scale, .. }) = split(text) else { return false };
    let whole = if whole.is_empty() { "0" } else { whole };
    let digits = [whole, fraction].concat();
    let Ok(count) = i64::try_from(digits.len()) else { return false };
    match scale {
        Scale::Binary(power) => {
            let factor = 1_i64 << power;
            let value = digits.parse::<i64>().ok().filter(|_| fraction.is_empty());
            let fits = count + i64::from(power) * 3 / 10 < 15;
            fits && value.is_some_and(|value| value & 7 != 0 && value.checked_mul(factor).is_some())
        }
        Scale::Decimal(power) | Scale::Exponent(power) => {
            let power = power - (count - i64::try_from(whole.len()).unwrap_or(count));
            count <= 18
                && power >= -9
                && power % 3 == 0
                && !digits.ends_with("000")
                && !digits.starts_with('0')
        }
    }
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
            ("1e999", i64::MAX, i64::MAX),
        ] {
            let amount = Amount::parse(text).unwrap();
            assert_eq!((amount.units(), amount.milli()), (units, milli), "{text}");
        }
        for text in [
            "",
            "-",
            "1.2.3",
            "abc",
            "1 Gi",
            "1gi",
            "e3",
            "1e",
            "1e2147483648",
            "½",
            "0x10",
            ".",
            "+",
            "1e1e1",
        ] {
            assert!(Amount::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn many_digits_are_exact_and_too_many_refused() {
        for (text, units, milli) in [
            ("1.0000000000000000000000000000000001", 2, 1001),
            ("0.00000000000000000000000000000000001Ei", 1, 1),
            ("1.00000000000000000000000000000Gi", 1 << 30, (1 << 30) * 1000),
            ("2000000000000000000000000000000e-30", 2, 2000),
            ("123456789012345678901234567890123456e-35", 2, 1235),
            ("1e-2147483648", 1, 1),
            ("0e2147483647", 0, 0),
            ("1e2147483647", i64::MAX, i64::MAX),
            ("-1e40", -i64::MAX, i64::MIN),
            ("999999999999999999999999999999Ei", i64::MAX, i64::MAX),
        ] {
            let amount = Amount::parse(text).unwrap();
            assert_eq!((amount.units(), amount.milli()), (units, milli), "{text}");
        }
        let long = |count: usize| Amount::parse(&format!("0.{}1", "0".repeat(count - 1)));
        assert_eq!(long(MAX_DIGITS), Amount::parse("1n"));
        assert!(long(MAX_DIGITS + 1).is_err());
        assert_eq!(Amount::parse(&format!("{}7", "0".repeat(1000))), Amount::parse("7"));
    }

    #[test]
    fn quantities_are_printed_in_canonical_form() {
        for (text, expected) in [
            ("0.5", "500m"),
            ("1500m", "1500m"),
            ("1000m", "1"),
            ("1024Mi", "1Gi"),
            ("64Mi", "64Mi"),
            ("1.5Gi", "1536Mi"),
            ("512Ki", "512Ki"),
            ("1Ki", "1Ki"),
            ("0.5Ki", "512"),
            ("1000", "1k"),
            ("1500", "1500"),
            ("128974848", "128974848"),
            ("0", "0"),
            ("000", "0"),
            ("0Mi", "0"),
            ("-0", "0"),
            ("100u", "100u"),
            ("5n", "5n"),
            ("1100u", "1100u"),
            ("0.1n", "1n"),
            ("0.3Ki", "307200m"),
            ("nonsense", "nonsense"),
            // With exponents.
            ("2e3", "2e3"),
            ("2000e0", "2e3"),
            ("19e10", "190e9"),
            ("20E-4", "2e-3"),
            ("0.5e0", "500e-3"),
            ("1e0", "1e0"),
            ("-090e2", "-9e3"),
            // Go keeps these although they could be shorter.
            ("0590m", "0590m"),
            ("029910", "029910"),
            ("500.1011005e-2", "500.1011005e-2"),
            ("1500900.k", "1500900.k"),
            ("001Mi", "001Mi"),
            ("0008Mi", "8Mi"),
        ] {
            assert_eq!(canonical(text), expected, "{text}");
        }
    }

    #[test]
    fn thousandths_are_rounded_up_or_to_the_nearest() {
        for (text, up, nearest) in [
            ("100m", 100, 100),
            ("100400u", 101, 100),
            ("100500u", 101, 101),
            ("0.0004", 1, 0),
            ("0.0005", 1, 1),
            // Millionths are rounded up first.
            ("499001n", 1, 1),
            ("499n", 1, 0),
            ("0", 0, 0),
            ("9223372036854775807", i64::MAX, i64::MAX),
        ] {
            let amount = Amount::parse(text).unwrap();
            assert_eq!((amount.milli(), amount.nearest_milli()), (up, nearest), "{text}");
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
