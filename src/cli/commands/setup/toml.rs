//! The tables and keys of a TOML text with their lines (pure). It is for small edits of files that
//! operators wrote: everything else in the text, such as comments, stays as it is. Values are
//! returned as text.
//!
//! Source: TOML 1.0.

/// A header of a table, or a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// The number of its line, from 1.
    pub line: usize,
    /// `None`: the header of a table. Otherwise the text after the `=` in its line, trimmed.
    pub value: Option<String>,
    /// Its whole path.
    pub path: Vec<String>,
    /// How many parts of the path are the table's.
    pub table: usize,
}

impl Entry {
    /// Whether its path begins with `parts`.
    pub(super) fn is_below(&self, parts: &[&str]) -> bool {
        self.path.len() >= parts.len() && self.path.iter().zip(parts).all(|(own, part)| own == part)
    }

    /// Whether its path is `parts`.
    pub(super) fn is(&self, parts: &[&str]) -> bool {
        self.path.len() == parts.len() && self.is_below(parts)
    }

    /// Its value, if it is a string in one line.
    pub(super) fn string(&self) -> Option<String> {
        let value = self.value.as_deref()?;
        if value.starts_with("\"\"\"") || value.starts_with("'''") {
            return None;
        }
        let (text, rest) = quoted(value)?;
        is_end(rest).then_some(text)
    }

    /// What is before and behind its value in its line, if the value is a string in one line.
    pub(super) fn around_string<'a>(&self, line: &'a str) -> Option<(&'a str, &'a str)> {
        let line = line.trim_end();
        let before = line.strip_suffix(self.value.as_deref()?)?;
        Some((before, quoted(line.get(before.len()..)?)?.1))
    }
}

/// Why a text cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SyntaxError {
    /// The number of the line, from 1.
    pub line: usize,
}

/// Where the end of a line is in a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct OpenValue {
    /// The quotation mark of a string of several lines.
    quote: Option<char>,
    /// The number of open brackets.
    brackets: usize,
}

/// Finds all headers and keys.
///
/// # Errors
/// At the first line that is not of the form of TOML.
pub(super) fn scan(text: &str) -> Result<Vec<Entry>, SyntaxError> {
    let mut entries = Vec::new();
    let mut table: Vec<String> = Vec::new();
    let mut open = OpenValue::default();
    for (number, line) in text.lines().enumerate() {
        let number = number + 1;
        let bad = SyntaxError { line: number };
        if open != OpenValue::default() {
            open = value_end(line, open).ok_or(bad)?;
            continue;
        }
        let start = line.trim_start();
        if is_end(start) {
            continue;
        }
        if let Some(header) = start.strip_prefix('[') {
            let inner = header.strip_prefix('[');
            let (path, rest) = keys(inner.unwrap_or(header)).ok_or(bad.clone())?;
            let rest = rest.strip_prefix(if inner.is_some() { "]]" } else { "]" });
            if !rest.is_some_and(is_end) {
                return Err(bad);
            }
            table.clone_from(&path);
            entries.push(Entry { line: number, value: None, table: path.len(), path });
            continue;
        }
        let (key, rest) = keys(start).ok_or(bad.clone())?;
        let value = rest.strip_prefix('=').ok_or(bad.clone())?.trim();
        open = value_end(value, open).ok_or(bad)?;
        let path = table.iter().cloned().chain(key).collect();
        entries.push(Entry { line: number, value: Some(value.to_owned()), table: table.len(), path });
    }
    if open != OpenValue::default() {
        return Err(SyntaxError { line: text.lines().count() });
    }
    Ok(entries)
}

/// Whether only blanks and a comment are left in a line.
fn is_end(text: &str) -> bool {
    let text = text.trim();
    text.is_empty() || text.starts_with('#')
}

/// Reads a dotted key; returns its parts and what follows it, without blanks before that.
fn keys(text: &str) -> Option<(Vec<String>, &str)> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start();
    loop {
        let (part, after) = match rest.chars().next()? {
            '"' | '\'' => quoted(rest)?,
            _ => {
                let is_bare =
                    |character: char| character.is_ascii_alphanumeric() || matches!(character, '_' | '-');
                let end = rest.find(|character| !is_bare(character)).unwrap_or(rest.len());
                let (part, after) = rest.split_at(end);
                (!part.is_empty()).then(|| (part.to_owned(), after))?
            }
        };
        parts.push(part);
        rest = after.trim_start();
        match rest.strip_prefix('.') {
            Some(next) => rest = next.trim_start(),
            None => return Some((parts, rest)),
        }
    }
}

/// Reads a string in one line; returns it and what follows. Escapes other than of quotation marks
/// and backslashes stay as they are: no path or name of a registry needs them.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut chars = text.char_indices();
    let (_, mark) = chars.next().filter(|(_, mark)| matches!(mark, '"' | '\''))?;
    let mut found = String::new();
    while let Some((offset, character)) = chars.next() {
        match character {
            character if character == mark => return Some((found, text.get(offset + 1..)?)),
            '\\' if mark == '"' => match chars.next()?.1 {
                escaped @ ('"' | '\\') => found.push(escaped),
                other => found.extend(['\\', other]),
            },
            character => found.push(character),
        }
    }
    None
}

/// What is open at the end of a line of a value. `None`: a string has no end.
fn value_end(line: &str, mut open: OpenValue) -> Option<OpenValue> {
    let mut rest = line;
    loop {
        if let Some(quote) = open.quote {
            match after_triple(rest, quote) {
                Some(after) => rest = after,
                None => return Some(open),
            }
            open.quote = None;
        }
        let Some(character) = rest.chars().next() else { return Some(open) };
        match character {
            '#' => return Some(open),
            '"' | '\'' => {
                let triple: String = [character; 3].iter().collect();
                match rest.strip_prefix(triple.as_str()) {
                    Some(after) => {
                        open.quote = Some(character);
                        rest = after;
                    }
                    None => rest = quoted(rest)?.1,
                }
                continue;
            }
            '[' | '{' => open.brackets += 1,
            ']' | '}' => open.brackets = open.brackets.checked_sub(1)?,
            _ => {}
        }
        rest = rest.get(character.len_utf8()..)?;
    }
}

/// What follows the end of a string of several lines.
fn after_triple(text: &str, mark: char) -> Option<&str> {
    let triple: String = [mark; 3].iter().collect();
    let mut chars = text.char_indices();
    while let Some((offset, character)) = chars.next() {
        if character == '\\' && mark == '"' {
            chars.next();
        } else if let Some(mut after) = text.get(offset..).and_then(|rest| rest.strip_prefix(triple.as_str()))
        {
            // Up to two further marks belong to the string.
            for _ in 0..2 {
                after = after.strip_prefix(mark).unwrap_or(after);
            }
            return Some(after);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_and_keys_have_whole_paths_and_lines() {
        let text = "# a comment\r\nversion = 2\r\n\r\n[plugins.\"io.x\".registry] # here\r\n  a.'b c' = \"v\" # w\r\n[[host]]\r\nx = 1\r\n[ p . q ]\r\n";
        let found: Vec<_> = scan(text)
            .unwrap()
            .into_iter()
            .map(|entry| (entry.line, entry.path.join("|"), entry.value, entry.table))
            .collect();
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            found,
            [
                (2, "version".to_owned(), some("2"), 0),
                (4, "plugins|io.x|registry".to_owned(), None, 3),
                (5, "plugins|io.x|registry|a|b c".to_owned(), some("\"v\" # w"), 3),
                (6, "host".to_owned(), None, 1),
                (7, "host|x".to_owned(), some("1"), 1),
                (8, "p|q".to_owned(), None, 2),
            ]
        );
    }

    #[test]
    fn values_of_several_lines_hide_what_looks_like_tables() {
        let text = "a = [\n  [1], # ]\n  \"]\",\n]\nb = \"\"\"\n[no]\n\\\"\"\" [no]\n\"\"\"\"\nc = '''x\n[no]'''\n[yes]\nd = { x = [1] }\n";
        let paths: Vec<_> = scan(text).unwrap().into_iter().map(|entry| entry.path.join(".")).collect();
        assert_eq!(paths, ["a", "b", "c", "yes", "yes.d"]);
    }

    #[test]
    fn malformed_lines_are_named() {
        for (text, line) in [
            ("a = 1\nb\n", 2),
            ("[a\n", 1),
            ("[a]]\n", 1),
            ("[a] b\n", 1),
            ("[[a]\n", 1),
            ("a = \"x\n", 1),
            ("a = ]\n", 1),
            ("a = [\n\n", 2),
            ("a = \"\"\"\n", 1),
            (" = 1\n", 1),
            ("a. = 1", 1),
            ("\u{feff}a = 1\n", 1),
        ] {
            assert_eq!(scan(text), Err(SyntaxError { line }), "{text:?}");
        }
    }

    #[test]
    fn strings_of_one_line_are_decoded() {
        let value = |text: &str| scan(text).unwrap().pop().unwrap().string();
        for (text, expected) in [
            ("a = \"x\\\"\\\\y\" # c", Some("x\"\\y")),
            ("a = 'x\\y'", Some("x\\y")),
            ("a = \"\"", Some("")),
            ("a = 1", None),
            ("a = \"\"\"x\"\"\"", None),
            ("a = [\"x\"]", None),
        ] {
            assert_eq!(value(text).as_deref(), expected, "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn random_text_causes_no_panic(text in "([\\[\\]{}.=\"'#\\\\ \\na-c\u{e4}]){0,60}") {
            let _ = scan(&text);
        }
    }
}
