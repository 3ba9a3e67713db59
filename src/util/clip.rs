//! The one rule for texts of other programs and machines in messages: short, and on one line.

/// The beginning of `text`, at most `most` bytes.
#[must_use]
pub fn beginning(text: &str, most: usize) -> &str {
    text.get(..text.floor_char_boundary(most)).unwrap_or_default()
}

/// `text` on one line: control characters become spaces, and after `most` bytes `…` stands for the
/// rest.
#[must_use]
pub fn line(text: &str, most: usize) -> String {
    let shown = beginning(text, most);
    let mut line = shown.replace(char::is_control, " ");
    if shown.len() < text.len() {
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_end_between_characters_and_with_a_mark() {
        assert_eq!((beginning("äb", 1), beginning("äb", 2), beginning("äb", 9)), ("", "ä", "äb"));
        assert_eq!((line("äb", 2), line("äb", 3)), ("ä…".to_owned(), "äb".to_owned()));
    }

    #[test]
    fn lines_have_no_control_characters() {
        assert_eq!(line("a\nb\x1b[31m\u{85}", 20), "a b [31m ");
    }
}
