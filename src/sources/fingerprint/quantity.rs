//! Quantities as stored by Go: a number and a power of ten if both fit 18 digits, else a decimal
//! without a limit; and the text that was parsed, if that is the canonical one (Go: apimachinery
//! pkg/api/resource, gopkg.in/inf.v0).

use std::fmt::Write;

use serde_json::Value;

use super::{NoFingerprint, WriteResult};

/// The smallest powers of ten of the Go types: nano, and milli for resources of pods.
const NANO: i32 = -9;
const MILLI: i32 = -3;

/// A quantity in Go's representation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct GoQuantity {
    value: i64,
    scale: i32,
    /// All digits, and the number of decimals among them.
    decimal: Option<(i128, i32)>,
    text: String,
    format: &'static str,
}

/// Writes a quantity; `rounded` up to thousandths, like resources of containers.
pub(super) fn write(value: Option<&Value>, rounded: bool, out: &mut dyn Write) -> WriteResult {
    let mut quantity = match value {
        None => GoQuantity::default(),
        Some(Value::String(text)) => read(text.trim())?,
        Some(Value::Number(number)) => read(&number.to_string())?,
        Some(_) => return Err(NoFingerprint),
    };
    if rounded {
        round(&mut quantity)?;
    }
    let GoQuantity { value, scale, decimal, text, format } = quantity;
    write!(out, "{{i:(resource.int64Amount){{value:(int64){value} scale:(resource.Scale){scale}}} ")?;
    out.write_str("d:(resource.infDecAmount){Dec:(*inf.Dec)")?;
    match decimal {
        None => out.write_str("<nil>")?,
        Some((digits, decimals)) => {
            let words = words(digits.unsigned_abs());
            write!(out, "{{unscaled:(big.Int){{neg:(bool){} abs:(big.nat)[{words}]}} ", digits < 0)?;
            write!(out, "scale:(inf.Scale){decimals}}}")?;
        }
    }
    Ok(write!(out, "}} s:(string){text} Format:(resource.Format){format}}}")?)
}

/// Words of 64 bits, the lowest first.
fn words(mut number: u128) -> String {
    let mut words = Vec::new();
    while number > 0 {
        words.push((number & u128::from(u64::MAX)).to_string());
        number >>= 64;
    }
    words.join(" ")
}

fn read(text: &str) -> Result<GoQuantity, NoFingerprint> {
    if text == "0" {
        return Ok(GoQuantity { text: text.to_owned(), format: "DecimalSI", ..GoQuantity::default() });
    }
    let (negative, unsigned) = match text.strip_prefix(['-', '+']) {
        Some(rest) => (text.starts_with('-'), rest),
        None => (false, text),
    };
    let body = unsigned.trim_start_matches('0');
    let end = body.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(body.len());
    let (whole, rest) = body.split_at(end);
    let whole = if whole.is_empty() { "0" } else { whole };
    let (fraction, suffix) = match rest.strip_prefix('.') {
        None => ("", rest),
        Some(rest) => {
            rest.split_at(rest.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(rest.len()))
        }
    };
    let (base, exponent, format) = unit(suffix)?;
    let digits = format!("{whole}{fraction}");
    let (count, decimals) = (length(&digits)?, length(fraction)?);
    let precision = match base {
        10 => 18 - count,
        _ if decimals == 0 => 15 - count - exponent * 3 / 10 - 1,
        _ => -1,
    };
    let scale = if base == 10 { exponent } else { 0 } - decimals;
    if precision >= 0 && scale >= NANO {
        let value: i64 = digits.parse().map_err(|_| NoFingerprint)?;
        let factor =
            if base == 10 { 1 } else { 1_i64.checked_shl(exponent.unsigned_abs()).ok_or(NoFingerprint)? };
        let result = value.checked_mul(factor).ok_or(NoFingerprint)?;
        let canonical = if base == 10 {
            scale % 3 == 0 && !digits.ends_with("000") && !digits.starts_with('0')
        } else {
            value & 7 != 0
        };
        let text = if canonical { text.to_owned() } else { String::new() };
        let value = if negative { -result } else { result };
        return Ok(GoQuantity { value, scale, text, format, decimal: None });
    }
    if base == 10 {
        // Beyond 18 digits or below nano: no such quantity is used in practice.
        return Err(NoFingerprint);
    }
    binary(&digits, decimals, exponent, negative)
}

/// A number with a binary suffix that is large, or not a whole number.
fn binary(digits: &str, decimals: i32, exponent: i32, negative: bool) -> Result<GoQuantity, NoFingerprint> {
    let digits: i128 = digits.parse().map_err(|_| NoFingerprint)?;
    let digits = digits.checked_mul(1_i128 << exponent).filter(|digits| *digits > 0).ok_or(NoFingerprint)?;
    let digits = rescaled(digits, decimals, -NANO)?;
    let nanos_per_unit = 10_i128.pow(NANO.unsigned_abs());
    if digits > nanos_per_unit * i128::from(i64::MAX) {
        return Err(NoFingerprint);
    }
    let format = if digits < nanos_per_unit { "DecimalSI" } else { "BinarySI" };
    let digits = if negative { -digits } else { digits };
    Ok(GoQuantity { decimal: Some((digits, -NANO)), format, ..GoQuantity::default() })
}

fn round(quantity: &mut GoQuantity) -> WriteResult {
    if let Some((digits, decimals)) = quantity.decimal {
        quantity.text.clear();
        quantity.decimal = Some((rescaled(digits, decimals, -MILLI)?, -MILLI));
    } else if quantity.scale < MILLI {
        quantity.text.clear();
        let digits = rescaled(quantity.value.into(), -quantity.scale, -MILLI)?;
        quantity.value = i64::try_from(digits).map_err(|_| NoFingerprint)?;
        quantity.scale = MILLI;
    }
    Ok(())
}

/// The same number with `to` decimals, rounded away from zero.
fn rescaled(digits: i128, from: i32, to: i32) -> Result<i128, NoFingerprint> {
    let power = 10_i128.checked_pow((to - from).unsigned_abs()).ok_or(NoFingerprint)?;
    if to >= from {
        return digits.checked_mul(power).ok_or(NoFingerprint);
    }
    let rest = if digits % power == 0 { 0 } else { digits.signum() };
    Ok(digits / power + rest)
}

fn length(text: &str) -> Result<i32, NoFingerprint> {
    i32::try_from(text.len()).map_err(|_| NoFingerprint)
}

/// A suffix's base, exponent, and Go's name of its family.
fn unit(suffix: &str) -> Result<(i32, i32, &'static str), NoFingerprint> {
    let decimal = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
    let binary = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    if let Some((_, exponent)) = decimal.iter().zip((-9..).step_by(3)).find(|(known, _)| **known == suffix) {
        return Ok((10, exponent, "DecimalSI"));
    }
    if let Some((_, exponent)) = binary.iter().zip((10..).step_by(10)).find(|(known, _)| **known == suffix) {
        return Ok((2, exponent, "BinarySI"));
    }
    let exponent = suffix.strip_prefix(['e', 'E']).and_then(|digits| digits.parse().ok());
    let exponent = exponent.filter(|exponent| (-100..=100).contains(exponent)).ok_or(NoFingerprint)?;
    Ok((10, exponent, "DecimalExponent"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantity(text: &str, rounded: bool) -> Result<GoQuantity, NoFingerprint> {
        let mut quantity = read(text)?;
        if rounded {
            round(&mut quantity)?;
        }
        Ok(quantity)
    }

    #[test]
    fn small_quantities_keep_canonical_text() {
        for (text, value, scale, unchanged) in [
            ("100m", 100, -3, true),
            ("1000m", 1000, -3, false),
            ("0.5", 5, -1, false),
            ("2", 2, 0, true),
            ("1e3", 1, 3, true),
            ("100Mi", 100 << 20, 0, true),
            ("64Mi", 64 << 20, 0, false),
            ("-3", -3, 0, true),
        ] {
            let quantity = quantity(text, true).unwrap();
            assert_eq!(
                (quantity.value, quantity.scale, quantity.text == text),
                (value, scale, unchanged),
                "{text}"
            );
        }
        assert_eq!(
            quantity("1u", true).unwrap(),
            GoQuantity { value: 1, scale: -3, format: "DecimalSI", ..GoQuantity::default() }
        );
        assert_eq!(quantity("1u", false).unwrap().scale, -6);
    }

    #[test]
    fn large_or_fractional_quantities_are_stored_as_decimals() {
        assert_eq!(quantity("1.5Gi", true).unwrap().decimal, Some((1_610_612_736_000, 3)));
        assert_eq!(quantity("0.5Gi", false).unwrap().decimal, Some((536_870_912_000_000_000, 9)));
        assert_eq!(words(1 << 64), "0 1");
        for text in ["1234567890123456789", "1.5n", "0.0Gi", "99999Pi", "x"] {
            assert_eq!(quantity(text, false), Err(NoFingerprint), "{text}");
        }
    }
}
