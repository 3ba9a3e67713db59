//! The header fields of a head.

/// Fields in the order of the head. Names are as sent and compared without regard to case; values
/// have no surrounding space and may contain any byte except control characters.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Fields(Vec<(String, Vec<u8>)>);

impl Fields {
    /// Copies the fields from `httparse`.
    pub(super) fn of(headers: &[httparse::Header<'_>]) -> Fields {
        Fields(headers.iter().map(|one| (one.name.to_owned(), one.value.to_vec())).collect())
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
    pub fn lists(&self, name: &str, element: &str) -> bool {
        self.elements(name).any(|one| one.eq_ignore_ascii_case(element))
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
