//! The header fields of a head.

/// Fields in the order of the head. Names are as sent and compared without regard to case; values
/// have no surrounding space and may contain any byte except control characters.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Fields(Vec<(String, Vec<u8>)>);

impl Fields {
    /// Copies the fields from `httparse`.
    pub(super) fn from_httparse(headers: &[httparse::Header<'_>]) -> Fields {
        Fields(headers.iter().map(|field| (field.name.to_owned(), field.value.to_vec())).collect())
    }

    /// Parses the lines of the fields as Go's client does (Go: net/textproto `ReadMIMEHeader`): a line
    /// that begins with a blank continues the value before it, and a name may contain blanks, which
    /// are a part of it. `None` for more than `max` fields.
    ///
    /// # Errors
    /// The first line that is no field.
    pub(super) fn parse(lines: &[u8], max: usize) -> Result<Option<Fields>, &[u8]> {
        let mut fields: Vec<(String, Vec<u8>)> = Vec::new();
        for line in lines.split(|byte| *byte == b'\n') {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let is_value = |byte: &u8| *byte == b'\t' || (*byte >= b' ' && *byte != 0x7f);
            if line.starts_with(b" ") || line.starts_with(b"\t") {
                let Some((_, value)) = fields.last_mut().filter(|_| line.iter().all(is_value)) else {
                    return Err(line);
                };
                if !value.is_empty() {
                    value.push(b' ');
                }
                value.extend_from_slice(blanks_trimmed(line));
                continue;
            }
            if line.is_empty() {
                continue;
            }
            let Some(colon) = line.iter().position(|byte| *byte == b':') else { return Err(line) };
            let (name, value) = line.split_at(colon);
            let value = value.get(1..).unwrap_or_default();
            let is_name = |byte: &u8| *byte == b' ' || is_token(*byte);
            let valid = !name.is_empty() && name.iter().all(is_name) && value.iter().all(is_value);
            let Some(name) = std::str::from_utf8(name).ok().filter(|_| valid) else { return Err(line) };
            if fields.len() >= max {
                return Ok(None);
            }
            fields.push((name.to_owned(), blanks_trimmed(value).to_vec()));
        }
        Ok(Some(Fields(fields)))
    }

    /// Names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> + Clone {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_slice()))
    }

    /// The values of each field of this name.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> + Clone {
        self.iter().filter_map(move |(own, value)| own.eq_ignore_ascii_case(name).then_some(value))
    }

    /// The value of the first field of this name, if it is UTF-8.
    #[must_use]
    pub fn get<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        self.all(name).next().and_then(|value| std::str::from_utf8(value).ok())
    }

    /// The elements of a field that is a list, without those that are not UTF-8.
    pub fn elements<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.all(name)
            .flat_map(|value| value.split(|byte| *byte == b','))
            .filter_map(|element| std::str::from_utf8(element).ok())
            .map(|element| element.trim_matches([' ', '\t']))
    }

    /// Whether a field that is a list has this element, ignoring case.
    #[must_use]
    pub fn has_element(&self, name: &str, element: &str) -> bool {
        self.elements(name).any(|entry| entry.eq_ignore_ascii_case(element))
    }

    /// Removes the fields of this name.
    pub fn remove(&mut self, name: &str) {
        self.0.retain(|(own, _)| !own.eq_ignore_ascii_case(name));
    }

    /// Appends a field.
    pub fn push(&mut self, name: &str, value: Vec<u8>) {
        self.0.push((name.to_owned(), value));
    }
}

/// Whether a byte may be in a method or in a field's name (RFC 9110, section 5.6.2).
pub fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

fn blanks_trimmed(bytes: &[u8]) -> &[u8] {
    let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let from = bytes.iter().position(|byte| !is_blank(byte)).unwrap_or(bytes.len());
    let to = bytes.iter().rposition(|byte| !is_blank(byte)).map_or(from, |last| last + 1);
    bytes.get(from..to).unwrap_or_default()
}
