//! Builds the values of a text's documents from its tokens, within limits. The grammar, and what
//! anchors, aliases and merge keys mean, are as in go.yaml.in/yaml/v2 (`parserc.go`, `decode.go`).

use std::collections::HashMap;

use super::error::{Position, YamlError};
use super::node::{Content, Fields, Node, Size};
use super::scalar::resolve;
use super::scanner::{PlacedToken, Scanner, Token};
use super::{Document, Duplicate, MAX_COPIED_BYTES, MAX_DEPTH, MAX_DOCUMENTS, MAX_DUPLICATES, MAX_NODES};

/// The tag of a merge key.
const MERGE: &str = "tag:yaml.org,2002:merge";

pub(super) struct Composer<'t> {
    scanner: Scanner<'t>,
    /// Anchors of the current document.
    anchors: HashMap<String, Anchor>,
    /// The handles of tags of the current document, with what they mean.
    handles: Vec<(String, String)>,
    duplicates: Vec<Duplicate>,
    opened: usize,
    nodes: usize,
    copied_bytes: usize,
}

enum Anchor {
    /// Its value is not complete. The number tells it from a later anchor of the same name.
    Open(usize),
    Complete(Node, Size),
}

/// A node, and what the grammar needs to know about it.
struct Composed {
    node: Node,
    /// A scalar that is a merge key, if it is a key.
    is_merge: bool,
    is_alias: bool,
}

impl<'t> Composer<'t> {
    pub(super) fn new(text: &'t str, bad: Option<YamlError>) -> Self {
        Composer {
            scanner: Scanner::new(text, bad),
            anchors: HashMap::new(),
            handles: Vec::new(),
            duplicates: Vec::new(),
            opened: 0,
            nodes: 0,
            copied_bytes: 0,
        }
    }

    /// Adds the documents to `into`, without empty ones, up to the first that is broken.
    pub(super) fn documents(mut self, into: &mut Vec<Document>) -> Result<(), YamlError> {
        let mut seen = 0;
        loop {
            match self.document(seen) {
                Ok(None) => return Ok(()),
                Ok(Some(document)) => into.extend(document),
                Err(error) => return Err(self.scanner.bad_end().cloned().unwrap_or(error)),
            }
            seen += 1;
        }
    }

    /// The next document, if there is one; the inner value is `None` if it is empty.
    fn document(&mut self, seen: usize) -> Result<Option<Option<Document>>, YamlError> {
        while seen > 0 && self.token()? == &Token::DocumentEnd {
            self.scanner.next()?;
        }
        if self.token()? == &Token::StreamEnd {
            return Ok(None);
        }
        let position = self.scanner.peek()?.position;
        if seen >= MAX_DOCUMENTS {
            return Err(position.fail(format!("more than {MAX_DOCUMENTS} documents")));
        }
        self.anchors.clear();
        self.handles.clear();
        self.duplicates.clear();
        let is_explicit = self.directives()?;
        let position = self.scanner.peek()?.position;
        let node = if is_explicit || seen > 0 {
            if self.scanner.next()?.token != Token::DocumentStart {
                return Err(position.fail("want --- here, before the next document"));
            }
            let ends = matches!(
                self.token()?,
                Token::Version(_)
                    | Token::TagDirective { .. }
                    | Token::DocumentStart
                    | Token::DocumentEnd
                    | Token::StreamEnd
            );
            if ends { None } else { Some(self.node(true, false, 0)?.node) }
        } else {
            Some(self.node(true, false, 0)?.node)
        };
        // What follows is scanned now, so that an error in it is found with this document.
        if self.token()? == &Token::DocumentEnd {
            self.scanner.next()?;
        }
        let Some(node) = node else { return Ok(Some(None)) };
        let line = node.line;
        let (value, marks) = node.into_json()?;
        let duplicates = std::mem::take(&mut self.duplicates);
        Ok(Some((!value.is_null()).then_some(Document { value, line, duplicates, marks })))
    }

    /// Reads the directives before a document. Returns whether `---` must follow.
    fn directives(&mut self) -> Result<bool, YamlError> {
        let mut has_version = false;
        loop {
            let position = self.scanner.peek()?.position;
            match self.token()? {
                Token::Version(major) => {
                    // DIFFERS: Go refuses 1.2, although it reads such documents.
                    if *major != 1 {
                        return Err(position.fail("found incompatible YAML document"));
                    }
                    if std::mem::replace(&mut has_version, true) {
                        return Err(position.fail("found duplicate %YAML directive"));
                    }
                }
                Token::TagDirective { handle, prefix } => {
                    let (handle, prefix) = (handle.clone(), prefix.clone());
                    if self.handles.iter().any(|(known, _)| *known == handle) {
                        return Err(position.fail("found duplicate %TAG directive"));
                    }
                    if self.handles.len() >= MAX_DEPTH {
                        return Err(position.fail(format!("more than {MAX_DEPTH} %TAG directives")));
                    }
                    self.handles.push((handle, prefix));
                }
                Token::DocumentStart => break Ok(true),
                _ => break Ok(has_version || !self.handles.is_empty()),
            }
            self.scanner.next()?;
        }
    }

    fn token(&mut self) -> Result<&Token, YamlError> {
        self.scanner.peek().map(|placed| &placed.token)
    }

    /// Removes the next token if it is this one.
    fn take(&mut self, token: &Token) -> Result<bool, YamlError> {
        let is_there = self.token()? == token;
        if is_there {
            self.scanner.next()?;
        }
        Ok(is_there)
    }

    fn node(&mut self, block: bool, indentless: bool, depth: usize) -> Result<Composed, YamlError> {
        let position = self.scanner.peek()?.position;
        if depth > MAX_DEPTH {
            return Err(position.fail(format!("nested deeper than {MAX_DEPTH} levels")));
        }
        self.count(position, Size { nodes: 1, ..Size::default() })?;
        if let Token::Alias(name) = self.token()? {
            let name = name.clone();
            self.scanner.next()?;
            let node = self.copy(&name, position, depth)?;
            return Ok(Composed { node, is_merge: false, is_alias: true });
        }
        let (mut anchor, mut tag) = (None, None);
        for _ in 0..2 {
            match self.token()? {
                Token::Anchor(_) if anchor.is_none() => {}
                Token::Tag { .. } if tag.is_none() => {}
                _ => break,
            }
            match self.scanner.next()? {
                PlacedToken { token: Token::Anchor(name), .. } => anchor = Some(name),
                PlacedToken { token: Token::Tag { handle, suffix }, position } => {
                    tag = Some(self.whole_tag(&handle, &suffix, position)?);
                }
                _ => {}
            }
        }
        let opened = anchor.as_ref().map(|name| {
            self.opened += 1;
            self.anchors.insert(name.clone(), Anchor::Open(self.opened));
            self.opened
        });
        let has_properties = anchor.is_some() || tag.is_some();
        let tag = tag.unwrap_or_default();
        let line = self.scanner.peek()?.position.line();
        let mut is_merge = false;
        let mut scalar = |text: String, plain: bool| {
            let plain = (tag.is_empty() && plain) || tag == "!";
            is_merge = text == "<<" && (plain || tag == MERGE);
            resolve(&tag, plain, text).map_err(|message| position.fail(message))
        };
        let content = match self.token()? {
            Token::BlockEntry if indentless => self.entries_without_indent(depth)?,
            Token::Scalar { .. } => match self.scanner.next()?.token {
                Token::Scalar { text, plain } => scalar(text, plain)?,
                _ => Content::Null,
            },
            Token::FlowSequenceStart => self.flow_sequence(depth)?,
            Token::FlowMappingStart => self.flow_mapping(depth)?,
            Token::BlockSequenceStart if block => self.block_sequence(depth)?,
            Token::BlockMappingStart if block => self.block_mapping(depth)?,
            _ if has_properties => scalar(String::new(), true)?,
            _ => return Err(self.scanner.peek()?.position.fail("did not find expected node content")),
        };
        let line =
            if matches!(content, Content::List(_) | Content::Fields(_)) { line } else { position.line() };
        let node = Node { line, content };
        if let (Some(name), Some(opened)) = (anchor, opened) {
            self.remember(name, opened, &node, position)?;
        }
        Ok(Composed { node, is_merge, is_alias: false })
    }

    fn whole_tag(&self, handle: &str, suffix: &str, position: Position) -> Result<String, YamlError> {
        if handle.is_empty() {
            return Ok(suffix.to_owned());
        }
        let known = self.handles.iter().find(|(known, _)| known == handle).map(|(_, prefix)| prefix.as_str());
        let prefix = known.or(match handle {
            "!" => Some("!"),
            "!!" => Some("tag:yaml.org,2002:"),
            _ => None,
        });
        let tag = prefix.map(|prefix| format!("{prefix}{suffix}")).filter(|tag| !tag.is_empty());
        tag.ok_or_else(|| {
            position.fail("found undefined tag handle (a value that begins with ! must be quoted)".to_owned())
        })
    }

    /// A node where there is none.
    fn empty(&mut self) -> Result<Composed, YamlError> {
        let position = self.scanner.peek()?.position;
        self.count(position, Size { nodes: 1, ..Size::default() })?;
        let node = Node { line: position.line(), content: Content::Null };
        Ok(Composed { node, is_merge: false, is_alias: false })
    }

    fn block_sequence(&mut self, depth: usize) -> Result<Content, YamlError> {
        self.scanner.next()?;
        let mut items = Vec::new();
        loop {
            let PlacedToken { token, position } = self.scanner.next()?;
            match token {
                Token::BlockEnd => return Ok(Content::List(items)),
                Token::BlockEntry => {
                    let is_empty = matches!(self.token()?, Token::BlockEntry | Token::BlockEnd);
                    let item = if is_empty { self.empty()? } else { self.node(true, false, depth + 1)? };
                    items.push(item.node);
                }
                _ => return Err(position.fail("did not find expected '-' indicator")),
            }
        }
    }

    /// A sequence in a mapping, whose entries are at the column of the keys.
    fn entries_without_indent(&mut self, depth: usize) -> Result<Content, YamlError> {
        let mut items = Vec::new();
        while self.take(&Token::BlockEntry)? {
            let is_empty =
                matches!(self.token()?, Token::BlockEntry | Token::Key | Token::Value | Token::BlockEnd);
            let item = if is_empty { self.empty()? } else { self.node(true, false, depth + 1)? };
            items.push(item.node);
        }
        Ok(Content::List(items))
    }

    fn block_mapping(&mut self, depth: usize) -> Result<Content, YamlError> {
        self.scanner.next()?;
        let mut fields = Fields::default();
        loop {
            let PlacedToken { token, position } = self.scanner.next()?;
            match token {
                Token::BlockEnd => return Ok(Content::Fields(fields)),
                Token::Key => {
                    let key = self.block_part(depth)?;
                    let value = match self.take(&Token::Value)? {
                        true => self.block_part(depth)?,
                        false => self.empty()?,
                    };
                    self.set(&mut fields, key, value, position)?;
                }
                _ => return Err(position.fail("did not find expected key")),
            }
        }
    }

    /// A key or a value in a block mapping.
    fn block_part(&mut self, depth: usize) -> Result<Composed, YamlError> {
        match self.token()? {
            Token::Key | Token::Value | Token::BlockEnd => self.empty(),
            _ => self.node(true, true, depth + 1),
        }
    }

    fn flow_sequence(&mut self, depth: usize) -> Result<Content, YamlError> {
        let start = self.scanner.next()?.position;
        let mut items = Vec::new();
        loop {
            if self.take(&Token::FlowSequenceEnd)? {
                break;
            }
            if !items.is_empty() {
                if !self.take(&Token::FlowEntry)? {
                    return Err(start.fail("did not find expected ',' or ']' of the list that begins here"));
                }
                if self.take(&Token::FlowSequenceEnd)? {
                    break;
                }
            }
            let item = match self.token()? {
                Token::StreamEnd => return Err(start.fail("the list that begins here has no end")),
                Token::Key => self.pair(depth + 1)?,
                _ => self.node(false, false, depth + 1)?.node,
            };
            items.push(item);
        }
        Ok(Content::List(items))
    }

    /// A mapping of one field in a flow sequence, without braces.
    fn pair(&mut self, depth: usize) -> Result<Node, YamlError> {
        let position = self.scanner.next()?.position;
        self.count(position, Size { nodes: 1, ..Size::default() })?;
        let ends = |token: &Token| matches!(token, Token::FlowEntry | Token::FlowSequenceEnd);
        let key = if self.token()? == &Token::Value || ends(self.token()?) {
            let key = self.empty()?;
            // Go takes this token as a part of the empty key.
            self.scanner.next()?;
            key
        } else {
            self.node(false, false, depth + 1)?
        };
        let has_value = self.take(&Token::Value)? && !ends(self.token()?);
        let value = if has_value { self.node(false, false, depth + 1)? } else { self.empty()? };
        let mut fields = Fields::default();
        self.set(&mut fields, key, value, position)?;
        Ok(Node { line: position.line(), content: Content::Fields(fields) })
    }

    fn flow_mapping(&mut self, depth: usize) -> Result<Content, YamlError> {
        let start = self.scanner.next()?.position;
        let mut fields = Fields::default();
        let mut is_first = true;
        loop {
            if self.take(&Token::FlowMappingEnd)? {
                break;
            }
            if !std::mem::take(&mut is_first) {
                if !self.take(&Token::FlowEntry)? {
                    return Err(
                        start.fail("did not find expected ',' or '}' of the mapping that begins here")
                    );
                }
                if self.take(&Token::FlowMappingEnd)? {
                    break;
                }
            }
            if self.token()? == &Token::StreamEnd {
                return Err(start.fail("the mapping that begins here has no end"));
            }
            let position = self.scanner.peek()?.position;
            let ends = |token: &Token| matches!(token, Token::FlowEntry | Token::FlowMappingEnd);
            let (key, value) = if self.take(&Token::Key)? {
                let is_empty = self.token()? == &Token::Value || ends(self.token()?);
                let key = if is_empty { self.empty()? } else { self.node(false, false, depth + 1)? };
                let has_value = self.take(&Token::Value)? && !ends(self.token()?);
                let value = if has_value { self.node(false, false, depth + 1)? } else { self.empty()? };
                (key, value)
            } else {
                let key = self.node(false, false, depth + 1)?;
                (key, self.empty()?)
            };
            self.set(&mut fields, key, value, position)?;
        }
        Ok(Content::Fields(fields))
    }

    /// Sets a field of a mapping, or merges another mapping into it.
    fn set(
        &mut self,
        fields: &mut Fields,
        key: Composed,
        value: Composed,
        position: Position,
    ) -> Result<(), YamlError> {
        self.count(position, Size { nodes: 1, ..Size::default() })?;
        if key.is_merge {
            let refusal = || position.fail("the merge key << needs a mapping or a list of mappings");
            match value.node.content {
                Content::Fields(other) => fields.merge(other),
                Content::List(items) if !value.is_alias => {
                    // The first mapping of the list wins.
                    for item in items.into_iter().rev() {
                        match item.content {
                            Content::Fields(other) => fields.merge(other),
                            _ => return Err(refusal()),
                        }
                    }
                }
                _ => return Err(refusal()),
            }
            return Ok(());
        }
        let key = key.node.content.into_key().ok_or_else(|| position.fail("a key must be a single value"))?;
        let name = key.text();
        let line = position.line();
        if let (Some(first), Ok(key)) = (fields.set(key, line, true, value.node), name)
            && self.duplicates.len() < MAX_DUPLICATES
        {
            self.duplicates.push(Duplicate { key, first, second: line });
        }
        Ok(())
    }

    fn remember(
        &mut self,
        name: String,
        opened: usize,
        node: &Node,
        position: Position,
    ) -> Result<(), YamlError> {
        let size = node.size();
        self.count(position, size)?;
        // An anchor of the same name inside the value has replaced it.
        if let Some(anchor @ Anchor::Open(_)) = self.anchors.get_mut(&name)
            && matches!(anchor, Anchor::Open(number) if *number == opened)
        {
            *anchor = Anchor::Complete(node.clone(), size);
        }
        Ok(())
    }

    fn copy(&mut self, name: &str, position: Position, depth: usize) -> Result<Node, YamlError> {
        let size = match self.anchors.get(name) {
            Some(Anchor::Complete(_, size)) => *size,
            Some(Anchor::Open(_)) => {
                return Err(position.fail("the alias refers to a value that contains it".to_owned()));
            }
            None => {
                return Err(position.fail(
                    "there is no anchor for this alias (a value that begins with * must be quoted)"
                        .to_owned(),
                ));
            }
        };
        if depth + size.depth > MAX_DEPTH {
            return Err(
                position.fail(format!("nested deeper than {MAX_DEPTH} levels, copies by aliases included"))
            );
        }
        self.count(position, size)?;
        match self.anchors.get(name) {
            Some(Anchor::Complete(node, _)) => {
                Ok(Node { line: position.line(), content: node.content.clone() })
            }
            _ => Err(position.fail("an alias refers to a value that contains it")),
        }
    }

    fn count(&mut self, position: Position, size: Size) -> Result<(), YamlError> {
        self.nodes = self.nodes.saturating_add(size.nodes);
        self.copied_bytes = self.copied_bytes.saturating_add(size.bytes);
        if self.nodes > MAX_NODES {
            return Err(position.fail(format!("more than {MAX_NODES} values, copies by aliases included")));
        }
        if self.copied_bytes > MAX_COPIED_BYTES {
            return Err(position.fail(format!("aliases copy more than {MAX_COPIED_BYTES} bytes")));
        }
        Ok(())
    }
}
