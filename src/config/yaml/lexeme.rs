//! The parts of a text that have an inner form: scalars, tags, anchors and directives.
//! The forms are those of YAML 1.1 as go.yaml.in/yaml/v2 reads them.

use super::cursor::Cursor;
use super::error::YamlError;

type Read<T> = Result<T, YamlError>;

/// The name after `&` or `*`, at which the cursor is.
pub(super) fn anchor(cursor: &mut Cursor) -> Read<String> {
    let start = cursor.position();
    cursor.skip();
    let mut name = String::new();
    while cursor.is_word() {
        cursor.read(&mut name);
    }
    let ends = cursor.is_blank_or_end(0)
        || matches!(cursor.byte(0), b'?' | b':' | b',' | b']' | b'}' | b'%' | b'@' | b'`');
    match ends && !name.is_empty() {
        true => Ok(name),
        false => Err(start.fail("did not find expected alphabetic or numeric character")),
    }
}

/// A tag: its handle, which is empty for a whole tag, and the rest.
pub(super) fn tag(cursor: &mut Cursor) -> Read<(String, String)> {
    let start = cursor.position();
    let found = if cursor.byte(1) == b'<' {
        cursor.skip();
        cursor.skip();
        let whole = uri(cursor, "")?;
        if cursor.byte(0) != b'>' {
            return Err(start.fail("did not find the expected '>'"));
        }
        cursor.skip();
        (String::new(), whole)
    } else {
        let handle = handle(cursor, false)?;
        if handle.len() > 1 && handle.ends_with('!') {
            let suffix = uri(cursor, "")?;
            (handle, suffix)
        } else {
            let suffix = uri(cursor, &handle)?;
            // A lone `!` is a tag of its own.
            if suffix.is_empty() { (suffix, "!".to_owned()) } else { ("!".to_owned(), suffix) }
        }
    };
    match cursor.is_blank_or_end(0) {
        true => Ok(found),
        false => Err(start.fail("did not find expected whitespace or line break")),
    }
}

fn handle(cursor: &mut Cursor, directive: bool) -> Read<String> {
    let missing = cursor.position().fail("did not find expected '!'");
    if cursor.byte(0) != b'!' {
        return Err(missing);
    }
    let mut handle = String::new();
    cursor.read(&mut handle);
    while cursor.is_word() {
        cursor.read(&mut handle);
    }
    if cursor.byte(0) == b'!' {
        cursor.read(&mut handle);
    } else if directive && handle != "!" {
        return Err(missing);
    }
    Ok(handle)
}

/// The characters of a URI after those of `head`, without its first one.
fn uri(cursor: &mut Cursor, head: &str) -> Read<String> {
    let start = cursor.position();
    let mut bytes = head.as_bytes().get(1..).unwrap_or_default().to_vec();
    let mut found = !head.is_empty();
    while cursor.is_word() || (!cursor.is_end() && b";/?:@&=+$,.!~*'()[]%".contains(&cursor.byte(0))) {
        found = true;
        if cursor.byte(0) == b'%' {
            escaped(cursor, &mut bytes)?;
        } else {
            bytes.push(cursor.byte(0));
            cursor.skip();
        }
    }
    match found {
        true => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        false => Err(start.fail("did not find expected tag URI")),
    }
}

/// One character of a URI as `%41`.
fn escaped(cursor: &mut Cursor, bytes: &mut Vec<u8>) -> Read<()> {
    let start = cursor.position();
    let mut left = None;
    while left != Some(0) {
        let digits = (hex(cursor.byte(1)), hex(cursor.byte(2)));
        let (b'%', (Some(high), Some(low))) = (cursor.byte(0), digits) else {
            return Err(start.fail("did not find URI escaped octet"));
        };
        let octet = u8::try_from(high * 16 + low).unwrap_or(u8::MAX);
        left = Some(match (left, octet) {
            (None, 0..0x80) => 0,
            (None, 0xc0..0xe0) => 1,
            (None, 0xe0..0xf0) => 2,
            (None, 0xf0..0xf8) => 3,
            (None, _) => return Err(start.fail("found an incorrect leading UTF-8 octet")),
            (Some(left), 0x80..0xc0) => left - 1,
            (Some(_), _) => return Err(start.fail("found an incorrect trailing UTF-8 octet")),
        });
        bytes.push(octet);
        cursor.skip();
        cursor.skip();
        cursor.skip();
    }
    Ok(())
}

fn hex(byte: u8) -> Option<u32> {
    char::from(byte).to_digit(16)
}

/// A line that begins with `%`.
pub(super) enum Directive {
    /// `%YAML 1.1`.
    Version(u8),
    /// `%TAG ! tag:example.com,2000:`.
    Tag { handle: String, prefix: String },
}

pub(super) fn directive(cursor: &mut Cursor) -> Read<Directive> {
    let start = cursor.position();
    cursor.skip();
    let mut name = String::new();
    while cursor.is_word() {
        cursor.read(&mut name);
    }
    if name.is_empty() {
        return Err(start.fail("could not find expected directive name"));
    }
    if !cursor.is_blank_or_end(0) {
        return Err(start.fail("found unexpected non-alphabetical character"));
    }
    cursor.skip_blanks();
    let found = match name.as_str() {
        "YAML" => {
            let major = version_number(cursor)?;
            if cursor.byte(0) != b'.' {
                return Err(start.fail("did not find expected digit or '.' character"));
            }
            cursor.skip();
            version_number(cursor)?;
            Directive::Version(major)
        }
        "TAG" => {
            let handle = handle(cursor, true)?;
            if !cursor.is_blank(0) {
                return Err(start.fail("did not find expected whitespace"));
            }
            cursor.skip_blanks();
            let prefix = uri(cursor, "")?;
            if !cursor.is_blank_or_end(0) {
                return Err(start.fail("did not find expected whitespace or line break"));
            }
            Directive::Tag { handle, prefix }
        }
        _ => return Err(start.fail("found unknown directive name")),
    };
    end_of_line(cursor)?;
    Ok(found)
}

fn version_number(cursor: &mut Cursor) -> Read<u8> {
    let start = cursor.position();
    let mut digits = String::new();
    while cursor.byte(0).is_ascii_digit() {
        cursor.read(&mut digits);
    }
    match digits.len() {
        1 | 2 => Ok(digits.parse().unwrap_or(0)),
        0 => Err(start.fail("did not find expected version number")),
        _ => Err(start.fail("found extremely long version number")),
    }
}

/// Blanks, a comment, and the line break.
fn end_of_line(cursor: &mut Cursor) -> Read<()> {
    cursor.skip_blanks();
    cursor.skip_comment();
    if !cursor.is_break_or_end(0) {
        return Err(cursor.position().fail("did not find expected comment or line break"));
    }
    cursor.skip_line();
    Ok(())
}

/// A scalar after `|` (literal) or `>` (folded). `parent` is the indentation of its parent, -1 at the
/// top.
pub(super) fn block_scalar(cursor: &mut Cursor, literal: bool, parent: isize) -> Read<String> {
    let start = cursor.position();
    cursor.skip();
    let (mut chomping, mut indent) = (None, 0);
    for _ in 0..2 {
        match cursor.byte(0) {
            sign @ (b'+' | b'-') if chomping.is_none() => chomping = Some(sign),
            b'0' if indent == 0 => return Err(start.fail("found an indentation indicator equal to 0")),
            digit @ b'1'..=b'9' if indent == 0 => indent = isize::from(digit - b'0') + parent.max(0),
            _ => break,
        }
        cursor.skip();
    }
    end_of_line(cursor)?;
    let (mut text, mut first_break, mut more_breaks) = (String::new(), String::new(), String::new());
    breaks_of_block(cursor, &mut indent, parent, &mut more_breaks)?;
    let mut after_blank = false;
    while cursor.column() == indent && !cursor.is_end() {
        let is_blank = cursor.is_blank(0);
        if !literal && !after_blank && !is_blank && first_break == "\n" {
            if more_breaks.is_empty() {
                text.push(' ');
            }
        } else {
            text.push_str(&first_break);
        }
        first_break.clear();
        text.push_str(&more_breaks);
        more_breaks.clear();
        after_blank = is_blank;
        while !cursor.is_break_or_end(0) {
            cursor.read(&mut text);
        }
        cursor.read_line(&mut first_break);
        breaks_of_block(cursor, &mut indent, parent, &mut more_breaks)?;
    }
    if chomping != Some(b'-') {
        text.push_str(&first_break);
    }
    if chomping == Some(b'+') {
        text.push_str(&more_breaks);
    }
    Ok(text)
}

/// The empty lines and the indentation before a line of a block scalar. An indentation of 0 is
/// unknown, and found here.
fn breaks_of_block(cursor: &mut Cursor, indent: &mut isize, parent: isize, into: &mut String) -> Read<()> {
    let mut most = 0;
    loop {
        let is_before = |cursor: &Cursor, indent: isize| indent == 0 || cursor.column() < indent;
        while is_before(cursor, *indent) && cursor.byte(0) == b' ' {
            cursor.skip();
        }
        most = most.max(cursor.column());
        if is_before(cursor, *indent) && cursor.byte(0) == b'\t' {
            let message = "found a tab character where an indentation space is expected";
            return Err(cursor.position().fail(message));
        }
        if !cursor.is_break(0) {
            break;
        }
        cursor.read_line(into);
    }
    if *indent == 0 {
        *indent = most.max(parent + 1).max(1);
    }
    Ok(())
}

/// Blanks and line breaks inside a scalar, which fold.
#[derive(Default)]
struct Fold {
    blanks: String,
    first_break: String,
    more_breaks: String,
    has_break: bool,
}

impl Fold {
    /// Reads one blank or line break.
    fn read(&mut self, cursor: &mut Cursor) {
        if cursor.is_blank(0) {
            match self.has_break {
                true => cursor.skip(),
                false => cursor.read(&mut self.blanks),
            }
        } else if self.has_break {
            cursor.read_line(&mut self.more_breaks);
        } else {
            self.blanks.clear();
            cursor.read_line(&mut self.first_break);
            self.has_break = true;
        }
    }

    /// Appends what the blanks and breaks become.
    fn write(&mut self, text: &mut String) {
        if self.has_break {
            if self.first_break == "\n" {
                if self.more_breaks.is_empty() {
                    text.push(' ');
                }
            } else {
                text.push_str(&self.first_break);
            }
            text.push_str(&self.more_breaks);
        } else {
            text.push_str(&self.blanks);
        }
        self.blanks.clear();
        self.first_break.clear();
        self.more_breaks.clear();
        self.has_break = false;
    }
}

/// A scalar in quotes. Its lines may continue at any column.
pub(super) fn quoted_scalar(cursor: &mut Cursor, single: bool) -> Read<String> {
    let start = cursor.position();
    let quote = if single { b'\'' } else { b'"' };
    cursor.skip();
    let mut text = String::new();
    let mut fold = Fold::default();
    loop {
        if cursor.is_document_indicator() {
            return Err(start.fail("found unexpected document indicator in a quoted scalar"));
        }
        if cursor.is_end() {
            return Err(start.fail("the quoted scalar that begins here has no end"));
        }
        // An escaped line break joins two lines without a blank.
        let mut joined = false;
        while !cursor.is_blank_or_end(0) {
            match cursor.byte(0) {
                b'\'' if single && cursor.byte(1) == b'\'' => {
                    text.push('\'');
                    cursor.skip();
                    cursor.skip();
                }
                byte if byte == quote => break,
                b'\\' if !single && cursor.is_break(1) => {
                    cursor.skip();
                    cursor.skip_line();
                    joined = true;
                    break;
                }
                b'\\' if !single => text.push(escape(cursor)?),
                _ => cursor.read(&mut text),
            }
        }
        if cursor.byte(0) == quote {
            cursor.skip();
            return Ok(text);
        }
        fold.has_break = joined;
        while cursor.is_blank(0) || cursor.is_break(0) {
            fold.read(cursor);
        }
        if joined {
            // Only the further breaks remain.
            text.push_str(&fold.more_breaks);
            fold = Fold::default();
        } else {
            fold.write(&mut text);
        }
    }
}

/// One escape of a double-quoted scalar.
fn escape(cursor: &mut Cursor) -> Read<char> {
    let start = cursor.position();
    let (letter, digits) = match cursor.byte(1) {
        b'0' => ('\0', 0),
        b'a' => ('\u{7}', 0),
        b'b' => ('\u{8}', 0),
        b't' | b'\t' => ('\t', 0),
        b'n' => ('\n', 0),
        b'v' => ('\u{b}', 0),
        b'f' => ('\u{c}', 0),
        b'r' => ('\r', 0),
        b'e' => ('\u{1b}', 0),
        // DIFFERS: `\/` is YAML 1.2, and JSON; Go refuses it.
        plain @ (b' ' | b'"' | b'\'' | b'\\' | b'/') => (char::from(plain), 0),
        b'N' => ('\u{85}', 0),
        b'_' => ('\u{a0}', 0),
        b'L' => ('\u{2028}', 0),
        b'P' => ('\u{2029}', 0),
        b'x' => ('\0', 2),
        b'u' => ('\0', 4),
        b'U' => ('\0', 8),
        _ => return Err(start.fail("found unknown escape character")),
    };
    cursor.skip();
    cursor.skip();
    if digits == 0 {
        return Ok(letter);
    }
    let mut value: u32 = 0;
    for _ in 0..digits {
        let Some(digit) = hex(cursor.byte(0)) else {
            return Err(start.fail("did not find expected hexadecimal number"));
        };
        value = (value << 4) | digit;
        cursor.skip();
    }
    char::from_u32(value).ok_or_else(|| start.fail("found invalid Unicode character escape code"))
}

/// A scalar without quotes: its text, and whether it ended at the start of a line.
pub(super) fn plain_scalar(cursor: &mut Cursor, in_flow: bool, parent: isize) -> Read<(String, bool)> {
    let start = cursor.position();
    let indent = parent + 1;
    let mut text = String::new();
    let mut fold = Fold::default();
    loop {
        if cursor.is_document_indicator() || cursor.byte(0) == b'#' {
            break;
        }
        while !cursor.is_blank_or_end(0) {
            let ends = match cursor.byte(0) {
                b':' => cursor.is_blank_or_end(1),
                b',' | b'[' | b']' | b'{' | b'}' => in_flow,
                // DIFFERS: `[http://a/?b]` is YAML 1.2; Go refuses it.
                b'?' => in_flow && cursor.is_blank_or_end(1),
                _ => false,
            };
            if ends {
                break;
            }
            fold.write(&mut text);
            cursor.read(&mut text);
        }
        if !cursor.is_blank(0) && !cursor.is_break(0) {
            break;
        }
        while cursor.is_blank(0) || cursor.is_break(0) {
            if fold.has_break && cursor.column() < indent && cursor.byte(0) == b'\t' {
                return Err(start.fail("found a tab character that violates indentation"));
            }
            fold.read(cursor);
        }
        if !in_flow && cursor.column() < indent {
            break;
        }
    }
    Ok((text, fold.has_break))
}
