//! The target of a request: path and query.

/// A decoded target.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Target {
    /// The decoded path.
    pub path: String,
    /// The query as sent.
    pub query: String,
    params: Vec<(String, String)>,
}

impl Target {
    /// Splits and decodes `/path?a=b&c`. Bytes that are not UTF-8 become replacement characters.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let (path, query) = text.split_once('?').unwrap_or((text, ""));
        let params = query
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| {
                let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                (decode(key, true), decode(value, true))
            })
            .collect();
        Target { path: decode(path, false), query: query.to_owned(), params }
    }

    /// The first value of `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.params.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// All values of `key`.
    pub fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.params.iter().filter(move |(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Whether a flag is set: the key is present without a value, or with `true` or `1`.
    ///
    /// # Errors
    /// When there is another value than `true`, `1`, `false` and `0`.
    pub fn flag(&self, key: &str) -> Result<bool, BadParam> {
        match self.get(key) {
            None | Some("false" | "0") => Ok(false),
            Some("" | "true" | "1") => Ok(true),
            Some(other) => Err(BadParam { key: key.to_owned(), value: other.to_owned() }),
        }
    }

    /// A parsed value; `None` if the key is missing.
    ///
    /// # Errors
    /// When the value is invalid.
    pub fn parsed<T: std::str::FromStr>(&self, key: &str) -> Result<Option<T>, BadParam> {
        let parse = |value: &str| {
            value.parse().map_err(|_| BadParam { key: key.to_owned(), value: value.to_owned() })
        };
        self.get(key).map(parse).transpose()
    }
}

/// A query parameter with an invalid value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid value {value:?} for the query parameter {key}")]
pub struct BadParam {
    key: String,
    value: String,
}

/// Whether a path or a query is UTF-8 after its escapes are decoded.
pub(super) fn is_text(text: &str) -> bool {
    std::str::from_utf8(&bytes(text, false)).is_ok()
}

fn decode(text: &str, plus_is_space: bool) -> String {
    String::from_utf8_lossy(&bytes(text, plus_is_space)).into_owned()
}

fn bytes(text: &str, plus_is_space: bool) -> Vec<u8> {
    let mut bytes = text.bytes();
    let mut out = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        let hex = |digit: Option<u8>| digit.and_then(|digit| char::from(digit).to_digit(16));
        match byte {
            b'+' if plus_is_space => out.push(b' '),
            b'%' => {
                let mut ahead = bytes.clone();
                match (hex(ahead.next()), hex(ahead.next())) {
                    (Some(high), Some(low)) => {
                        // Two hex digits fit into a byte.
                        out.push(u8::try_from(high * 16 + low).unwrap_or(b'?'));
                        bytes = ahead;
                    }
                    _ => out.push(b'%'),
                }
            }
            other => out.push(other),
        }
    }
    out
}

/// Whether an element of `Accept-Encoding` is gzip with a quality above zero.
#[must_use]
pub fn takes_gzip(element: &str) -> bool {
    let (name, quality) = element.split_once(';').unwrap_or((element, ""));
    let zero = quality.trim().strip_prefix("q=").is_some_and(|q| q.parse::<f32>() == Ok(0.0));
    name.trim().eq_ignore_ascii_case("gzip") && !zero
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_parameters_are_decoded() {
        let target = Target::parse("/v1/%70ods+x?pod=a%2Fb+c&follow&tail=5&x=%zz%4&&follow=no");
        assert_eq!(target.path, "/v1/pods+x");
        assert_eq!(target.get("pod"), Some("a/b c"));
        assert_eq!(target.flag("follow"), Ok(true));
        assert_eq!(target.flag("none"), Ok(false));
        assert!(target.flag("tail").is_err());
        assert_eq!(target.parsed::<u64>("tail"), Ok(Some(5)));
        assert_eq!(target.parsed::<u64>("none"), Ok(None));
        assert!(target.parsed::<u64>("x").is_err());
        assert_eq!(target.get("x"), Some("%zz%4"));
        assert_eq!(target.all("follow").collect::<Vec<_>>(), ["", "no"]);
        assert_eq!(Target::parse("/%ff").path, "/\u{fffd}");
    }

    #[test]
    fn gzip_with_quality_zero_is_not_accepted() {
        for (element, taken) in [
            ("gzip", true),
            ("GZIP;q=0.5", true),
            ("gzip; q=0", false),
            ("gzip;q=0.0", false),
            ("identity", false),
            ("", false),
        ] {
            assert_eq!(takes_gzip(element), taken, "{element}");
        }
    }
}
