//! The values of scalars, as the YAML library of Kubernetes reads them (Go: go.yaml.in/yaml/v2
//! `resolve`).

use serde_json::Number;

use super::node::Content;
use crate::util::encoding::from_go_base64;

/// Start of the tags that YAML itself defines.
const CORE: &str = "tag:yaml.org,2002:";

/// The value of a scalar with a tag, which is empty if there is none; `plain` scalars without a tag
/// may be other than text.
pub(super) fn resolve(tag: &str, plain: bool, text: String) -> Result<Content, String> {
    if tag.is_empty() && !plain {
        return Ok(Content::Text(text));
    }
    let core = tag.strip_prefix(CORE);
    match core {
        Some("str") => Ok(Content::Text(text)),
        Some("binary") => match from_go_base64(&text) {
            Some(bytes) => Ok(Content::Text(lossy(&bytes))),
            None => Err("the value of the tag !!binary is no base64".to_owned()),
        },
        Some("timestamp") => match is_timestamp(&text) {
            true => Ok(Content::Text(text)),
            false => Err(does_not_fit("timestamp")),
        },
        Some(wanted @ ("null" | "bool" | "int" | "float")) => {
            let found = plain_value(&text);
            let fits = match (wanted, &found) {
                ("null", Content::Null)
                | ("bool", Content::Bool(_))
                | ("int", Content::Signed(_) | Content::Unsigned(_))
                | ("float", Content::Float(_)) => true,
                #[expect(clippy::cast_precision_loss, reason = "as Go converts it")]
                ("float", Content::Signed(number)) => return Ok(Content::Float(*number as f64)),
                _ => false,
            };
            if fits { Ok(found) } else { Err(does_not_fit(wanted)) }
        }
        // Other tags have no meaning.
        _ if !tag.is_empty() => Ok(Content::Text(text)),
        _ => Ok(match plain_value(&text) {
            Content::Text(_) => Content::Text(text),
            value => value,
        }),
    }
}

/// Without the text, which may be a password.
fn does_not_fit(tag: &str) -> String {
    format!("the value does not fit the tag !!{tag}")
}

/// Text of any bytes, as Go writes it in JSON: each bad byte becomes U+FFFD.
fn lossy(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|_| char::REPLACEMENT_CHARACTER));
    }
    text
}

/// The value of a scalar by its form. `Content::Text`, which is empty, means text.
fn plain_value(text: &str) -> Content {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Content::Null,
        "true" | "True" | "TRUE" | "yes" | "Yes" | "YES" | "y" | "Y" | "on" | "On" | "ON" => {
            return Content::Bool(true);
        }
        "false" | "False" | "FALSE" | "no" | "No" | "NO" | "n" | "N" | "off" | "Off" | "OFF" => {
            return Content::Bool(false);
        }
        ".nan" | ".NaN" | ".NAN" => return Content::Float(f64::NAN),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => return Content::Float(f64::INFINITY),
        "-.inf" | "-.Inf" | "-.INF" => return Content::Float(f64::NEG_INFINITY),
        _ => {}
    }
    let found = match text.as_bytes().first() {
        Some(b'.') => single_underscores(text).then(|| float(&text.replace('_', ""))).flatten(),
        Some(b'+' | b'-' | b'0'..=b'9') => {
            let digits = text.replace('_', "");
            integer(&digits).or_else(|| float(&digits)).or_else(|| signed_binary(&digits))
        }
        _ => None,
    };
    found.unwrap_or(Content::Text(String::new()))
}

/// Underscores are only between digits, as Go's literals have them.
fn single_underscores(text: &str) -> bool {
    let bytes = text.as_bytes();
    let is_digit =
        |index: Option<usize>| index.and_then(|index| bytes.get(index)).is_some_and(u8::is_ascii_digit);
    bytes
        .iter()
        .enumerate()
        .all(|(index, byte)| *byte != b'_' || (is_digit(index.checked_sub(1)) && is_digit(Some(index + 1))))
}

/// An integer in the forms of Go's literals: `0x`, `0o`, `0b`, or `0` for octal.
fn integer(text: &str) -> Option<Content> {
    let (sign, body) = match text.as_bytes().first()? {
        sign @ (b'-' | b'+') => (Some(*sign), text.get(1..)?),
        _ => (None, text),
    };
    let prefix = body.get(..2).map(str::to_ascii_lowercase);
    let (digits, radix) = match prefix.as_deref() {
        Some("0x") => (body.get(2..)?, 16),
        Some("0o") => (body.get(2..)?, 8),
        Some("0b") => (body.get(2..)?, 2),
        Some(_) if body.starts_with('0') => (body.get(1..)?, 8),
        _ => (body, 10),
    };
    number(sign, digits, radix)
}

/// `0b-1`, which Go reads as -1.
fn signed_binary(text: &str) -> Option<Content> {
    let digits = text.strip_prefix("0b")?;
    match digits.as_bytes().first()? {
        sign @ (b'-' | b'+') => number(Some(*sign), digits.get(1..)?, 2),
        _ => None,
    }
}

fn number(sign: Option<u8>, digits: &str, radix: u32) -> Option<Content> {
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(radix)) {
        return None;
    }
    let size = u64::from_str_radix(digits, radix).ok()?;
    if sign == Some(b'-') {
        let value = i128::from(size).checked_neg()?;
        return i64::try_from(value).ok().map(Content::Signed);
    }
    match i64::try_from(size) {
        Ok(value) => Some(Content::Signed(value)),
        // Only integers without a sign may be so large.
        Err(_) => sign.is_none().then_some(Content::Unsigned(size)),
    }
}

/// Digits with an optional fraction and exponent; a number that is too large is text.
fn float(text: &str) -> Option<Content> {
    let body = text.strip_prefix(['+', '-']).unwrap_or(text);
    let (number, exponent) = match body.split_once(['e', 'E']) {
        Some((number, exponent)) => (number, Some(exponent)),
        None => (body, None),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let all_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let number_fits = all_digits(whole) && all_digits(fraction) && !(whole.is_empty() && fraction.is_empty());
    let exponent_fits = exponent.is_none_or(|exponent| {
        let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        !digits.is_empty() && all_digits(digits)
    });
    if !number_fits || !exponent_fits {
        return None;
    }
    text.parse::<f64>().ok().filter(|value| value.is_finite()).map(Content::Float)
}

/// `2001-12-14`, `2001-12-14 21:59:43.1` or `2001-12-14t21:59:43Z`; months, days and hours may have one
/// digit.
fn is_timestamp(text: &str) -> bool {
    let (date, time) = match text.find(['T', 't', ' ']) {
        Some(offset) => (text.get(..offset).unwrap_or_default(), text.get(offset..)),
        None => (text, None),
    };
    let digits = |part: &str, most: usize| {
        (1..=most).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit())
    };
    let number = |part: &str| if digits(part, 4) { part.parse::<i16>().ok() } else { None };
    let date: Vec<&str> = date.split('-').collect();
    let [year, month, day] = date.as_slice() else { return false };
    let (4, Some(year), Some(month), Some(day)) = (year.len(), number(year), number(month), number(day))
    else {
        return false;
    };
    let narrow = |part: i16| i8::try_from(part).unwrap_or(-1);
    if jiff::civil::Date::new(year, narrow(month), narrow(day)).is_err() {
        return false;
    }
    let Some(time) = time else { return true };
    let is_zoned = !time.starts_with(' ');
    let time = time.get(1..).unwrap_or_default();
    let (clock, zone) = match time.find(['Z', '+', '-']).filter(|_| is_zoned) {
        Some(offset) => (time.get(..offset).unwrap_or_default(), time.get(offset..)),
        None => (time, None),
    };
    let (clock, fraction) = match clock.split_once(['.', ',']) {
        Some((clock, fraction)) => (clock, Some(fraction)),
        None => (clock, None),
    };
    let below = |part: Option<&&str>, limit: i16| {
        part.filter(|part| digits(part, 2)).and_then(|part| number(part)).is_some_and(|part| part < limit)
    };
    let clock: Vec<&str> = clock.split(':').collect();
    let clock_fits = clock.len() == 3
        && below(clock.first(), 24)
        && below(clock.get(1), 60)
        && below(clock.get(2), 60)
        && fraction.is_none_or(|part| digits(part, 64));
    let zone_fits = match zone {
        None => !is_zoned,
        Some("Z") => true,
        Some(zone) => {
            let parts: Vec<&str> = zone.get(1..).unwrap_or_default().split(':').collect();
            parts.len() == 2
                && parts.iter().all(|part| part.len() == 2)
                && below(parts.first(), 25)
                && below(parts.get(1), 61)
        }
    };
    clock_fits && zone_fits
}

/// A float as in JSON: a whole number has no fraction, and zeros after its shortest digits.
pub(super) fn json_number(value: f64) -> Option<Number> {
    if value.fract() == 0.0 {
        let text = format!("{value}");
        let whole = text.parse::<i64>().map(Number::from).or_else(|_| text.parse::<u64>().map(Number::from));
        if let Ok(number) = whole {
            return Some(number);
        }
    }
    Number::from_f64(value)
}

/// A float as a key: the shortest digits of single precision, with an exponent from 1e+06 on and
/// below 1e-04 (Go: strconv.FormatFloat with 'g' and 32).
#[expect(clippy::cast_possible_truncation, reason = "Go shows keys in single precision")]
pub(super) fn float_key(value: f64) -> String {
    let value = value as f32;
    if value.is_nan() {
        return ".nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { ".inf" } else { "-.inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..6).contains(&exponent) {
        return format!("{value}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}
