//! D-Bus messages as bytes (pure). Supports only what the few exchanged messages need: basic types
//! and variants of them, and for writing also arrays and structures. Both byte orders are read,
//! little endian is written.
//! Invariants: no input panics; an unsupported part of a message costs that part or that message,
//! never the connection, if the length of the message is known.

/// The type of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Calls a method.
    Call,
    /// Returns values.
    Return,
    /// Returns an error.
    Error,
    /// Broadcast to all subscribers.
    Signal,
}

/// An argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// `b`.
    Bool(bool),
    /// `i`.
    Int(i32),
    /// `u`.
    Uint(u32),
    /// `t`.
    Long(u64),
    /// `s`.
    Text(String),
    /// `o`.
    Path(String),
    /// `g`.
    Signature(String),
    /// `h`: an index into the file descriptors of the message.
    Fd(u32),
    /// `v`.
    Variant(Box<Value>),
    /// `y`; only written.
    Byte(u8),
    /// `a` with the signature of its elements, which all have this type; only written.
    Array(&'static str, Vec<Value>),
    /// A structure of these fields; only written.
    Struct(Vec<Value>),
}

/// One message. Missing names are empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The type.
    pub kind: Kind,
    /// The sender's number for the message.
    pub serial: u32,
    /// The number of the call that it replies to.
    pub reply_to: Option<u32>,
    /// The object.
    pub path: String,
    /// The interface.
    pub interface: String,
    /// The method or signal.
    pub member: String,
    /// The name of the error.
    pub error: String,
    /// The receiver.
    pub destination: String,
    /// The sender, as verified by the bus.
    pub sender: String,
    /// The number of file descriptors sent with it.
    pub fds: u32,
    /// The arguments, up to the first of an unsupported type.
    pub args: Vec<Value>,
}

/// Length of the first part, which contains the length of the rest.
pub const HEAD: usize = 16;
/// No valid message is longer.
const LONGEST: usize = 1 << 27;
/// The deepest nesting of variants that is read.
const DEPTH: u8 = 4;

const PATH: u8 = 1;
const INTERFACE: u8 = 2;
const MEMBER: u8 = 3;
const ERROR: u8 = 4;
const REPLY_TO: u8 = 5;
const DESTINATION: u8 = 6;
const SENDER: u8 = 7;
const SIGNATURE: u8 = 8;
const FDS: u8 = 9;

impl Message {
    /// An empty message.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        Message {
            kind,
            serial: 0,
            reply_to: None,
            path: String::new(),
            interface: String::new(),
            member: String::new(),
            error: String::new(),
            destination: String::new(),
            sender: String::new(),
            fds: 0,
            args: Vec::new(),
        }
    }

    /// The first argument, if it is a text.
    #[must_use]
    pub fn text(&self, index: usize) -> Option<&str> {
        match self.args.get(index) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// The bytes of the message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::default();
        let mut signature = String::new();
        for arg in &self.args {
            signature.push_str(&arg.signature());
            body.value(arg);
        }
        let kind = match self.kind {
            Kind::Call => 1,
            Kind::Return => 2,
            Kind::Error => 3,
            Kind::Signal => 4,
        };
        let mut out = Writer(vec![b'l', kind, 0, 1]);
        out.uint(body.0.len());
        out.0.extend(self.serial.to_le_bytes());
        let mut fields = Writer::default();
        let text = |text: &String| Value::Text(text.clone());
        let all = [
            (PATH, &self.path, Value::Path(self.path.clone())),
            (INTERFACE, &self.interface, text(&self.interface)),
            (MEMBER, &self.member, text(&self.member)),
            (ERROR, &self.error, text(&self.error)),
            (DESTINATION, &self.destination, text(&self.destination)),
            (SENDER, &self.sender, text(&self.sender)),
            (SIGNATURE, &signature, Value::Signature(signature.clone())),
        ];
        for (code, _, value) in all.into_iter().filter(|(_, text, _)| !text.is_empty()) {
            fields.field(code, &value);
        }
        if let Some(serial) = self.reply_to {
            fields.field(REPLY_TO, &Value::Uint(serial));
        }
        if self.fds > 0 {
            fields.field(FDS, &Value::Uint(self.fds));
        }
        // The fields begin at a multiple of eight, so that they can be written separately.
        out.uint(fields.0.len());
        out.0.extend(fields.0);
        out.align(8);
        out.0.extend(body.0);
        out.0
    }

    /// Reads a whole message. `None`: it is invalid.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Message> {
        let length = length(bytes)?;
        let mut reader = Reader { bytes: bytes.get(..length)?, offset: 0, big: is_big(bytes)? };
        let [_, kind, _, _] = reader.array::<4>()?;
        let kind = match kind {
            1 => Kind::Call,
            2 => Kind::Return,
            3 => Kind::Error,
            4 => Kind::Signal,
            _ => return None,
        };
        let mut message = Message::new(kind);
        let _body = reader.uint()?;
        message.serial = reader.uint()?;
        let end = usize::try_from(reader.uint()?).ok()?.checked_add(reader.offset)?;
        let mut signature = String::new();
        while reader.offset < end {
            reader.align(8)?;
            let [code] = reader.array::<1>()?;
            match (code, reader.variant(0)?) {
                (PATH, Value::Path(path)) => message.path = path,
                (INTERFACE, Value::Text(text)) => message.interface = text,
                (MEMBER, Value::Text(text)) => message.member = text,
                (ERROR, Value::Text(text)) => message.error = text,
                (DESTINATION, Value::Text(text)) => message.destination = text,
                (SENDER, Value::Text(text)) => message.sender = text,
                (SIGNATURE, Value::Signature(text)) => signature = text,
                (REPLY_TO, Value::Uint(serial)) => message.reply_to = Some(serial),
                (FDS, Value::Uint(fds)) => message.fds = fds,
                _ => {}
            }
        }
        reader.align(8)?;
        for code in signature.chars() {
            let Some(value) = reader.value(code, 0) else { break };
            message.args.push(value);
        }
        Some(message)
    }
}

fn is_big(bytes: &[u8]) -> Option<bool> {
    match bytes.first()? {
        b'l' => Some(false),
        b'B' => Some(true),
        _ => None,
    }
}

/// The length of the message that starts with these [`HEAD`] bytes. `None`: the bytes are not a
/// message.
#[must_use]
pub fn length(head: &[u8]) -> Option<usize> {
    let mut reader = Reader { bytes: head.get(..HEAD)?, offset: 0, big: is_big(head)? };
    let [_, _, _, version] = reader.array::<4>()?;
    let body = usize::try_from(reader.uint()?).ok()?;
    let _serial = reader.uint()?;
    let fields = usize::try_from(reader.uint()?).ok()?;
    let all = HEAD.checked_add(fields)?.checked_next_multiple_of(8)?.checked_add(body)?;
    (version == 1 && all <= LONGEST).then_some(all)
}

impl Value {
    fn signature(&self) -> String {
        let basic = match self {
            Value::Bool(_) => "b",
            Value::Int(_) => "i",
            Value::Uint(_) => "u",
            Value::Long(_) => "t",
            Value::Text(_) => "s",
            Value::Path(_) => "o",
            Value::Signature(_) => "g",
            Value::Fd(_) => "h",
            Value::Variant(_) => "v",
            Value::Byte(_) => "y",
            Value::Array(element, _) => return format!("a{element}"),
            Value::Struct(fields) => {
                return format!("({})", fields.iter().map(Value::signature).collect::<String>());
            }
        };
        basic.to_owned()
    }
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn align(&mut self, to: usize) {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
    }

    fn uint(&mut self, value: usize) {
        self.align(4);
        self.0.extend(u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes());
    }

    fn field(&mut self, code: u8, value: &Value) {
        self.align(8);
        self.0.push(code);
        self.variant(value);
    }

    fn signature(&mut self, text: &str) {
        self.0.push(u8::try_from(text.len()).unwrap_or(u8::MAX));
        self.0.extend(text.as_bytes());
        self.0.push(0);
    }

    fn variant(&mut self, value: &Value) {
        self.signature(&value.signature());
        self.value(value);
    }

    fn value(&mut self, value: &Value) {
        match value {
            Value::Bool(on) => self.uint(usize::from(*on)),
            Value::Uint(number) | Value::Fd(number) => {
                self.align(4);
                self.0.extend(number.to_le_bytes());
            }
            Value::Int(number) => {
                self.align(4);
                self.0.extend(number.to_le_bytes());
            }
            Value::Long(number) => {
                self.align(8);
                self.0.extend(number.to_le_bytes());
            }
            Value::Text(text) | Value::Path(text) => {
                self.uint(text.len());
                self.0.extend(text.as_bytes());
                self.0.push(0);
            }
            Value::Signature(text) => self.signature(text),
            Value::Variant(inner) => self.variant(inner),
            Value::Byte(byte) => self.0.push(*byte),
            Value::Array(element, items) => self.array(element, items),
            Value::Struct(fields) => {
                self.align(8);
                for field in fields {
                    self.value(field);
                }
            }
        }
    }

    /// The length, which does not count the padding before the first element, and the elements.
    fn array(&mut self, element: &str, items: &[Value]) {
        self.uint(0);
        let length = self.0.len() - 4;
        self.align(match element.as_bytes().first() {
            Some(b'y' | b'g' | b'v') => 1,
            Some(b't' | b'(') => 8,
            _ => 4,
        });
        let start = self.0.len();
        for item in items {
            self.value(item);
        }
        let bytes = u32::try_from(self.0.len() - start).unwrap_or(u32::MAX).to_le_bytes();
        if let Some(place) = self.0.get_mut(length..length + 4) {
            place.copy_from_slice(&bytes);
        }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
    big: bool,
}

impl<'a> Reader<'a> {
    fn align(&mut self, to: usize) -> Option<()> {
        self.offset = self.offset.checked_next_multiple_of(to)?;
        Some(())
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let end = self.offset.checked_add(count)?;
        let taken = self.bytes.get(self.offset..end)?;
        self.offset = end;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn uint(&mut self) -> Option<u32> {
        self.align(4)?;
        let bytes = self.array()?;
        Some(if self.big { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
    }

    /// `count` bytes of text and a zero.
    fn text(&mut self, count: usize) -> Option<String> {
        let text = std::str::from_utf8(self.take(count)?).ok()?.to_owned();
        (self.array::<1>()? == [0]).then_some(text)
    }

    fn signature(&mut self) -> Option<String> {
        let [count] = self.array::<1>()?;
        self.text(usize::from(count))
    }

    fn variant(&mut self, depth: u8) -> Option<Value> {
        let signature = self.signature()?;
        let mut codes = signature.chars();
        match (codes.next(), codes.next()) {
            (Some(code), None) => self.value(code, depth),
            _ => None,
        }
    }

    fn value(&mut self, code: char, depth: u8) -> Option<Value> {
        Some(match code {
            'b' => Value::Bool(self.uint()? != 0),
            'u' => Value::Uint(self.uint()?),
            'i' => Value::Int(self.uint()?.cast_signed()),
            'h' => Value::Fd(self.uint()?),
            't' => {
                self.align(8)?;
                let bytes = self.array()?;
                Value::Long(if self.big { u64::from_be_bytes(bytes) } else { u64::from_le_bytes(bytes) })
            }
            's' | 'o' => {
                let count = usize::try_from(self.uint()?).ok()?;
                let text = self.text(count)?;
                if code == 's' { Value::Text(text) } else { Value::Path(text) }
            }
            'g' => Value::Signature(self.signature()?),
            'v' if depth < DEPTH => Value::Variant(Box::new(self.variant(depth + 1)?)),
            _ => return None,
        })
    }
}
