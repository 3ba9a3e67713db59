//! Splits a text into tokens (YAML 1.1). The rules of where a key may be, and where a block begins
//! and ends, are those of go.yaml.in/yaml/v2 (`scannerc.go`), because manifests were written for it.

use std::collections::{HashMap, VecDeque};

use super::MAX_DEPTH;
use super::cursor::Cursor;
use super::error::{Position, YamlError};
use super::lexeme::{self, Directive};

/// The longest key without a `?`, in characters.
const MAX_KEY: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Token {
    Version(u8),
    TagDirective { handle: String, prefix: String },
    DocumentStart,
    DocumentEnd,
    BlockSequenceStart,
    BlockMappingStart,
    BlockEnd,
    FlowSequenceStart,
    FlowSequenceEnd,
    FlowMappingStart,
    FlowMappingEnd,
    BlockEntry,
    FlowEntry,
    Key,
    Value,
    Alias(String),
    Anchor(String),
    Tag { handle: String, suffix: String },
    Scalar { text: String, plain: bool },
    StreamEnd,
}

/// A token where it begins.
#[derive(Debug, Clone)]
pub(super) struct PlacedToken {
    pub(super) token: Token,
    pub(super) position: Position,
}

/// A node that may turn out to be a key, if a `:` follows.
#[derive(Debug, Clone, Copy, Default)]
struct KeyCandidate {
    possible: bool,
    /// Whether it must be a key, because it begins a line of a block mapping.
    required: bool,
    /// The number of its first token.
    number: usize,
    position: Position,
}

/// The scanner. Tokens are numbered from 0.
pub(super) struct Scanner<'t> {
    cursor: Cursor<'t>,
    /// Why the text ends here, if it is not the end of the file.
    bad: Option<YamlError>,
    queue: VecDeque<PlacedToken>,
    /// The number of the first token in the queue.
    taken: usize,
    /// The first token may be handed out: no key begins with it that is not known yet.
    is_ready: bool,
    /// One candidate for each flow level, the block context first.
    candidates: Vec<KeyCandidate>,
    /// The flow level of a candidate by the number of its token.
    level_by_number: HashMap<usize, usize>,
    key_allowed: bool,
    /// The column of the current block, -1 at the top.
    indent: isize,
    indents: Vec<isize>,
    flow_level: usize,
    /// Nothing was seen since the indicator of a document.
    at_document_start: bool,
}

impl<'t> Scanner<'t> {
    pub(super) fn new(text: &'t str, bad: Option<YamlError>) -> Self {
        Scanner {
            cursor: Cursor::new(text),
            bad,
            queue: VecDeque::new(),
            taken: 0,
            is_ready: false,
            candidates: vec![KeyCandidate::default()],
            level_by_number: HashMap::new(),
            key_allowed: true,
            indent: -1,
            indents: Vec::new(),
            flow_level: 0,
            at_document_start: false,
        }
    }

    /// The next token, which stays. After the end of the stream there is none.
    pub(super) fn peek(&mut self) -> Result<&PlacedToken, YamlError> {
        if !self.is_ready {
            self.fill()?;
            self.is_ready = true;
        }
        // INVARIANT: `fill` returns only with a token in the queue.
        let end = self.cursor.position();
        self.queue.front().ok_or_else(|| end.fail("unexpected end of the stream"))
    }

    /// Removes the next token.
    pub(super) fn next(&mut self) -> Result<PlacedToken, YamlError> {
        self.peek()?;
        let end = self.cursor.position();
        self.is_ready = false;
        self.taken += 1;
        self.queue.pop_front().ok_or_else(|| end.fail("unexpected end of the stream"))
    }

    /// The error that ends the text, if the scanner has reached that place.
    pub(super) fn bad_end(&self) -> Option<&YamlError> {
        self.bad.as_ref().filter(|_| self.cursor.is_end())
    }

    fn fill(&mut self) -> Result<(), YamlError> {
        loop {
            if !self.queue.is_empty() {
                let Some(level) = self.level_by_number.get(&self.taken).copied() else { return Ok(()) };
                if !self.is_candidate(level)? {
                    return Ok(());
                }
            }
            self.scan()?;
        }
    }

    fn push(&mut self, token: Token, position: Position) {
        self.queue.push_back(PlacedToken { token, position });
    }

    /// Inserts a token before the one with this number; at the end if that one was taken.
    fn insert(&mut self, number: usize, token: Token, position: Position) {
        let index = number.checked_sub(self.taken).unwrap_or(usize::MAX).min(self.queue.len());
        self.queue.insert(index, PlacedToken { token, position });
    }

    /// Whether the candidate of a flow level may still become a key.
    fn is_candidate(&mut self, level: usize) -> Result<bool, YamlError> {
        let here = self.cursor.position();
        let Some(candidate) = self.candidates.get_mut(level).filter(|candidate| candidate.possible) else {
            return Ok(false);
        };
        let Position { index, line, .. } = candidate.position;
        if line < here.line || index + MAX_KEY < here.index {
            if candidate.required {
                return Err(candidate.position.fail("could not find expected ':'"));
            }
            candidate.possible = false;
            return Ok(false);
        }
        Ok(true)
    }

    /// The next token may be a key.
    fn save_candidate(&mut self) -> Result<(), YamlError> {
        if self.key_allowed {
            let required = self.flow_level == 0 && self.indent == self.cursor.column();
            self.drop_candidate()?;
            let number = self.taken + self.queue.len();
            let position = self.cursor.position();
            if let Some(last) = self.candidates.last_mut() {
                *last = KeyCandidate { possible: true, required, number, position };
            }
            self.level_by_number.insert(number, self.candidates.len().saturating_sub(1));
        }
        Ok(())
    }

    /// What may have been a key on this flow level is none.
    fn drop_candidate(&mut self) -> Result<(), YamlError> {
        if let Some(last) = self.candidates.last_mut().filter(|last| last.possible) {
            if last.required {
                return Err(last.position.fail("could not find expected ':'"));
            }
            last.possible = false;
            self.level_by_number.remove(&last.number);
        }
        Ok(())
    }

    /// Begins a block at a column to the right of the current one, before the token with the number.
    fn open_block(
        &mut self,
        position: Position,
        number: Option<usize>,
        token: Token,
    ) -> Result<(), YamlError> {
        let column = isize::try_from(position.column).unwrap_or(isize::MAX);
        if self.flow_level > 0 || self.indent >= column {
            return Ok(());
        }
        if self.indents.len() >= MAX_DEPTH {
            return Err(position.fail(format!("nested deeper than {MAX_DEPTH} levels")));
        }
        self.indents.push(self.indent);
        self.indent = column;
        match number {
            Some(number) => self.insert(number, token, position),
            None => self.push(token, position),
        }
        Ok(())
    }

    /// Ends the blocks to the right of a column.
    fn close_blocks(&mut self, column: isize) {
        while self.flow_level == 0 && self.indent > column {
            self.push(Token::BlockEnd, self.cursor.position());
            self.indent = self.indents.pop().unwrap_or(-1);
        }
    }

    /// Scans one token, or some that belong together.
    fn scan(&mut self) -> Result<(), YamlError> {
        self.skip_space();
        self.close_blocks(self.cursor.column());
        let position = self.cursor.position();
        let in_flow = self.flow_level > 0;
        if self.cursor.is_end() {
            if let Some(bad) = &self.bad {
                return Err(bad.clone());
            }
            // No key continues after the end.
            self.cursor.end_line();
            return self.document_token(Token::StreamEnd, 0);
        }
        if position.column == 0 && self.cursor.byte(0) == b'%' {
            self.close_blocks(-1);
            self.drop_candidate()?;
            self.key_allowed = false;
            let token = match lexeme::directive(&mut self.cursor)? {
                Directive::Version(major) => Token::Version(major),
                Directive::Tag { handle, prefix } => Token::TagDirective { handle, prefix },
            };
            self.push(token, position);
            return Ok(());
        }
        if self.cursor.is_document_indicator() {
            let is_start = self.cursor.byte(0) == b'-';
            let token = if is_start { Token::DocumentStart } else { Token::DocumentEnd };
            return self.document_token(token, 3);
        }
        self.at_document_start = false;
        let before_blank = self.cursor.is_blank_or_end(1);
        match self.cursor.byte(0) {
            b'[' => self.open_flow(Token::FlowSequenceStart),
            b'{' => self.open_flow(Token::FlowMappingStart),
            b']' => self.close_flow(Token::FlowSequenceEnd),
            b'}' => self.close_flow(Token::FlowMappingEnd),
            b',' => {
                self.drop_candidate()?;
                self.key_allowed = true;
                self.indicator(Token::FlowEntry)
            }
            b'-' if before_blank => {
                if !in_flow {
                    if !self.key_allowed {
                        return Err(position.fail("block sequence entries are not allowed in this context"));
                    }
                    self.open_block(position, None, Token::BlockSequenceStart)?;
                }
                self.drop_candidate()?;
                self.key_allowed = true;
                self.indicator(Token::BlockEntry)
            }
            b'?' if in_flow || before_blank => {
                if !in_flow {
                    if !self.key_allowed {
                        return Err(position.fail("mapping keys are not allowed in this context"));
                    }
                    self.open_block(position, None, Token::BlockMappingStart)?;
                }
                self.drop_candidate()?;
                self.key_allowed = !in_flow;
                self.indicator(Token::Key)
            }
            b':' if in_flow || before_blank => self.value(position),
            b'*' | b'&' => {
                let is_alias = self.cursor.byte(0) == b'*';
                self.save_candidate()?;
                self.key_allowed = false;
                let name = lexeme::anchor(&mut self.cursor)?;
                self.push(if is_alias { Token::Alias(name) } else { Token::Anchor(name) }, position);
                Ok(())
            }
            b'!' => {
                self.save_candidate()?;
                self.key_allowed = false;
                let (handle, suffix) = lexeme::tag(&mut self.cursor)?;
                self.push(Token::Tag { handle, suffix }, position);
                Ok(())
            }
            style @ (b'|' | b'>') if !in_flow => {
                self.drop_candidate()?;
                self.key_allowed = true;
                let text = lexeme::block_scalar(&mut self.cursor, style == b'|', self.indent)?;
                self.push(Token::Scalar { text, plain: false }, position);
                Ok(())
            }
            quote @ (b'\'' | b'"') => {
                self.save_candidate()?;
                self.key_allowed = false;
                let text = lexeme::quoted_scalar(&mut self.cursor, quote == b'\'')?;
                self.push(Token::Scalar { text, plain: false }, position);
                Ok(())
            }
            first if self.begins_plain(first) => {
                self.save_candidate()?;
                self.key_allowed = false;
                let (text, at_line_start) = lexeme::plain_scalar(&mut self.cursor, in_flow, self.indent)?;
                self.key_allowed = at_line_start;
                self.push(Token::Scalar { text, plain: true }, position);
                Ok(())
            }
            b'\t' => Err(position.fail("found a tab character; want blanks for the indentation")),
            _ => Err(position.fail("found character that cannot start any token")),
        }
    }

    fn begins_plain(&self, first: u8) -> bool {
        match first {
            b'-' => !self.cursor.is_blank(1),
            b'?' | b':' => self.flow_level == 0 && !self.cursor.is_blank_or_end(1),
            _ => !self.cursor.is_blank_or_end(0) && !b",[]{}#&*!|>'\"%@`".contains(&first),
        }
    }

    /// Moves past blanks, comments and line breaks.
    fn skip_space(&mut self) {
        loop {
            // A file that was put together of others has their byte order marks.
            if self.at_document_start && self.cursor.skip_mark() {
                continue;
            }
            // A tab may not indent what can be a key.
            let tab = self.flow_level > 0 || !self.key_allowed;
            while self.cursor.byte(0) == b' ' || (tab && self.cursor.byte(0) == b'\t') {
                self.cursor.skip();
            }
            self.cursor.skip_comment();
            if !self.cursor.is_break(0) {
                return;
            }
            self.cursor.skip_line();
            if self.flow_level == 0 {
                self.key_allowed = true;
            }
        }
    }

    /// The start or the end of a document, or the end of the stream.
    fn document_token(&mut self, token: Token, length: usize) -> Result<(), YamlError> {
        self.close_blocks(-1);
        self.drop_candidate()?;
        self.key_allowed = false;
        self.at_document_start = true;
        self.push(token, self.cursor.position());
        for _ in 0..length {
            self.cursor.skip();
        }
        Ok(())
    }

    fn indicator(&mut self, token: Token) -> Result<(), YamlError> {
        self.push(token, self.cursor.position());
        self.cursor.skip();
        Ok(())
    }

    fn open_flow(&mut self, token: Token) -> Result<(), YamlError> {
        self.save_candidate()?;
        if self.flow_level >= MAX_DEPTH {
            let position = self.cursor.position();
            return Err(position.fail(format!("nested deeper than {MAX_DEPTH} levels")));
        }
        let number = self.taken + self.queue.len();
        self.candidates.push(KeyCandidate {
            number,
            position: self.cursor.position(),
            ..KeyCandidate::default()
        });
        self.flow_level += 1;
        self.key_allowed = true;
        self.indicator(token)
    }

    fn close_flow(&mut self, token: Token) -> Result<(), YamlError> {
        self.drop_candidate()?;
        if self.flow_level > 0 {
            self.flow_level -= 1;
            if let Some(last) = self.candidates.pop() {
                self.level_by_number.remove(&last.number);
            }
        }
        self.key_allowed = false;
        self.indicator(token)
    }

    /// A `:`, whose key may have no `?`.
    fn value(&mut self, position: Position) -> Result<(), YamlError> {
        let level = self.candidates.len().saturating_sub(1);
        if self.is_candidate(level)? {
            let Some(candidate) = self.candidates.last_mut() else { return Ok(()) };
            candidate.possible = false;
            let KeyCandidate { number, position, .. } = *candidate;
            self.level_by_number.remove(&number);
            self.insert(number, Token::Key, position);
            self.open_block(position, Some(number), Token::BlockMappingStart)?;
            self.key_allowed = false;
        } else {
            if self.flow_level == 0 {
                if !self.key_allowed {
                    return Err(position.fail("mapping values are not allowed in this context"));
                }
                self.open_block(position, None, Token::BlockMappingStart)?;
            }
            self.key_allowed = self.flow_level == 0;
        }
        self.indicator(Token::Value)
    }
}
