//! A position that moves through a text, and the classes of characters of YAML 1.1.

use super::error::Position;

/// The text from a position on. Its end reads as NUL, which no text contains.
pub(super) struct Cursor<'t> {
    text: &'t str,
    offset: usize,
    position: Position,
}

impl<'t> Cursor<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        Cursor { text, offset: 0, position: Position::default() }
    }

    pub(super) fn position(&self) -> Position {
        self.position
    }

    pub(super) fn column(&self) -> isize {
        isize::try_from(self.position.column).unwrap_or(isize::MAX)
    }

    /// The byte so many bytes ahead; NUL after the end.
    pub(super) fn byte(&self, ahead: usize) -> u8 {
        self.text.as_bytes().get(self.offset.saturating_add(ahead)).copied().unwrap_or(0)
    }

    pub(super) fn starts_with(&self, text: &str) -> bool {
        self.text.as_bytes().get(self.offset..).is_some_and(|rest| rest.starts_with(text.as_bytes()))
    }

    pub(super) fn is_end(&self) -> bool {
        self.byte(0) == 0
    }

    /// A blank or a tab.
    pub(super) fn is_blank(&self, ahead: usize) -> bool {
        matches!(self.byte(ahead), b' ' | b'\t')
    }

    /// CR, LF, NEL, LS or PS.
    pub(super) fn is_break(&self, ahead: usize) -> bool {
        match self.byte(ahead) {
            b'\r' | b'\n' => true,
            0xc2 => self.byte(ahead + 1) == 0x85,
            0xe2 => self.byte(ahead + 1) == 0x80 && matches!(self.byte(ahead + 2), 0xa8 | 0xa9),
            _ => false,
        }
    }

    pub(super) fn is_break_or_end(&self, ahead: usize) -> bool {
        self.byte(ahead) == 0 || self.is_break(ahead)
    }

    pub(super) fn is_blank_or_end(&self, ahead: usize) -> bool {
        self.is_blank(ahead) || self.is_break_or_end(ahead)
    }

    /// A letter, digit, hyphen or underscore.
    pub(super) fn is_word(&self) -> bool {
        self.byte(0).is_ascii_alphanumeric() || matches!(self.byte(0), b'-' | b'_')
    }

    /// `---` or `...` alone at the start of a line.
    pub(super) fn is_document_indicator(&self) -> bool {
        self.position.column == 0
            && (self.starts_with("---") || self.starts_with("..."))
            && self.is_blank_or_end(3)
    }

    fn width(&self) -> usize {
        match self.byte(0) {
            0..0x80 => 1,
            0x80..0xe0 => 2,
            0xe0..0xf0 => 3,
            _ => 4,
        }
    }

    /// Moves past one character.
    pub(super) fn skip(&mut self) {
        if !self.is_end() {
            self.offset += self.width();
            self.position.index += 1;
            self.position.column += 1;
        }
    }

    /// Moves past a byte order mark at the start of a line, which is no column.
    pub(super) fn skip_mark(&mut self) -> bool {
        let is_there = self.position.column == 0 && self.starts_with("\u{feff}");
        if is_there {
            self.offset += '\u{feff}'.len_utf8();
            self.position.index += 1;
        }
        is_there
    }

    pub(super) fn skip_blanks(&mut self) {
        while self.is_blank(0) {
            self.skip();
        }
    }

    /// Moves past a comment, if there is one, to the end of the line.
    pub(super) fn skip_comment(&mut self) {
        if self.byte(0) == b'#' {
            while !self.is_break_or_end(0) {
                self.skip();
            }
        }
    }

    /// Moves past one character, which is appended.
    pub(super) fn read(&mut self, into: &mut String) {
        let from = self.offset;
        self.skip();
        into.push_str(self.text.get(from..self.offset).unwrap_or_default());
    }

    /// Begins a new line at the end of the text, if the last one has no break.
    pub(super) fn end_line(&mut self) {
        if self.position.column > 0 {
            self.position.column = 0;
            self.position.line += 1;
        }
    }

    /// Moves past one line break, if there is one.
    pub(super) fn skip_line(&mut self) {
        self.read_line(&mut String::new());
    }

    /// Moves past one line break, which is appended: LF, or LS and PS as they are.
    pub(super) fn read_line(&mut self, into: &mut String) {
        let (bytes, characters, text) = match (self.byte(0), self.byte(1), self.byte(2)) {
            (b'\r', b'\n', _) => (2, 2, "\n"),
            (b'\r' | b'\n', ..) => (1, 1, "\n"),
            (0xc2, 0x85, _) => (2, 1, "\n"),
            (0xe2, 0x80, 0xa8) => (3, 1, "\u{2028}"),
            (0xe2, 0x80, 0xa9) => (3, 1, "\u{2029}"),
            _ => return,
        };
        into.push_str(text);
        self.offset += bytes;
        self.position.index += characters;
        self.position.column = 0;
        self.position.line += 1;
    }
}
