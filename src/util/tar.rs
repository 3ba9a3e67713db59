//! Reads tar archives as a stream: entries in their order, each with its data. The formats are
//! those of tar(5): ustar, the long names of GNU tar, and the extended headers of pax.
//!
//! Invariants: an archive of any content costs bounded memory; a name or a list of extended
//! headers that is too long is an error; sizes are never trusted for an allocation.

use std::io::{self, Read};

const BLOCK: usize = 512;
/// The longest name of an entry, in bytes: `PATH_MAX` of Linux.
pub const MAX_NAME: usize = 4096;
/// The most bytes of the extended headers of one entry. Extended attributes may have 64 KiB each.
const MAX_EXTENDED: u64 = 1024 * 1024;
/// The most headers that may belong to one entry.
const MAX_HEADERS: u32 = 16;
const XATTR: &[u8] = b"SCHILY.xattr.";

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A regular file; its data follows.
    File,
    /// Another name of an earlier entry, `Entry::link`.
    HardLink,
    /// A symbolic link to `Entry::link`.
    Symlink,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A directory.
    Directory,
    /// A named pipe.
    Fifo,
}

/// The header of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name as in the archive: it may begin with `/` or `./`, and may contain `..`.
    pub name: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// The number of bytes of a regular file, otherwise 0.
    pub size: u64,
    /// Permission bits with set-user-ID, set-group-ID and the sticky bit.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time in seconds since 1970.
    pub mtime: i64,
    /// The target of a link.
    pub link: Vec<u8>,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Names and values of extended attributes.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A stream of entries. [`Read`] returns the data of the entry that [`Archive::next_entry`] returned last.
pub struct Archive<R> {
    inner: R,
    /// Bytes of the current entry that are not read yet.
    left: u64,
    /// Bytes after its data, up to the next block.
    padding: u64,
    done: bool,
}

/// Values of extended headers for one entry.
#[derive(Default)]
struct Extended {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<i64>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

impl<R: Read> Archive<R> {
    /// Reads an archive from its start.
    pub fn new(inner: R) -> Archive<R> {
        Archive { inner, left: 0, padding: 0, done: false }
    }

    /// The stream below, after [`Archive::next_entry`] has returned `None`: bytes that follow the end mark
    /// are not read yet.
    pub fn into_inner(self) -> R {
        self.inner
    }

    /// The next entry; data of the last one that was not read is skipped. `None` at the end.
    ///
    /// # Errors
    /// When the stream fails or ends in the middle of an entry, when a header is damaged, or when a
    /// form is not supported: sparse files, archives in several volumes.
    pub fn next_entry(&mut self) -> io::Result<Option<Entry>> {
        let mut extended = Extended::default();
        for _ in 0..MAX_HEADERS {
            self.skip()?;
            let Some(block) = self.header()? else { return Ok(None) };
            let kind = block[156];
            let size = number(&block[124..136])?;
            match kind {
                b'L' | b'K' => {
                    let mut text = self.extra(size, MAX_NAME as u64 + 1)?;
                    text.truncate(text.iter().position(|byte| *byte == 0).unwrap_or(text.len()));
                    *(if kind == b'L' { &mut extended.name } else { &mut extended.link }) = Some(text);
                }
                b'x' => {
                    let records = self.extra(size, MAX_EXTENDED)?;
                    extended.read(&records)?;
                }
                // Settings for all entries: none of them concerns names or sizes in practice.
                b'g' => drop(self.extra(size, MAX_EXTENDED)?),
                _ => return self.entry(&block, extended, size).map(Some),
            }
        }
        Err(invalid("too many extended headers for one entry"))
    }

    fn entry(&mut self, block: &[u8; BLOCK], extended: Extended, size: u64) -> io::Result<Entry> {
        let size = extended.size.unwrap_or(size);
        let old_name = ustar_name(block);
        let kind = match block[156] {
            // Before POSIX, a directory was a file whose name ends with a slash.
            0 | b'0' | b'7' if old_name.ends_with(b"/") && extended.name.is_none() => Kind::Directory,
            0 | b'0' | b'7' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' => Kind::CharDevice,
            b'4' => Kind::BlockDevice,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            other => return Err(invalid(format!("entry of the unsupported type {:?}", char::from(other)))),
        };
        let name = extended.name.unwrap_or(old_name);
        let link = extended.link.unwrap_or_else(|| text(&block[157..257]).to_vec());
        if name.len() > MAX_NAME || link.len() > MAX_NAME || name.contains(&0) || link.contains(&0) {
            return Err(invalid("the name of an entry is too long or contains a zero byte"));
        }
        // Some writers give links and directories a size, without data.
        let size = if kind == Kind::File { size } else { 0 };
        self.left = size;
        self.padding = size.next_multiple_of(BLOCK as u64) - size;
        let id = |given: Option<u64>, field: &[u8]| -> io::Result<u32> {
            let value = given.map_or_else(|| number(field), Ok)?;
            u32::try_from(value).map_err(|_| invalid("an owner is out of range"))
        };
        Ok(Entry {
            kind,
            size,
            mode: (number(&block[100..108])? & 0o7777) as u32,
            uid: id(extended.uid, &block[108..116])?,
            gid: id(extended.gid, &block[116..124])?,
            // A time before 1970 is the only negative number; such a file gets the time 0.
            mtime: match extended.mtime {
                Some(mtime) => mtime,
                None => number(&block[136..148]).map_or(0, |time| i64::try_from(time).unwrap_or(0)),
            },
            device: (
                number(&block[329..337]).map_or(0, |n| u32::try_from(n).unwrap_or(0)),
                number(&block[337..345]).map_or(0, |n| u32::try_from(n).unwrap_or(0)),
            ),
            name,
            link,
            xattrs: extended.xattrs,
        })
    }

    /// The next header block; `None` at the end.
    fn header(&mut self) -> io::Result<Option<[u8; BLOCK]>> {
        let mut block = [0; BLOCK];
        if self.done {
            return Ok(None);
        }
        let mut filled = 0;
        while filled < BLOCK {
            match self.inner.read(&mut block[filled..]) {
                Ok(0) if filled == 0 => {
                    // Some writers leave out the end mark.
                    self.done = true;
                    return Ok(None);
                }
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if block.iter().all(|byte| *byte == 0) {
            self.done = true;
            return Ok(None);
        }
        let sum = |range: &[u8]| range.iter().map(|byte| u64::from(*byte)).sum::<u64>();
        if number(&block[148..156])? != sum(&block[..148]) + 8 * u64::from(b' ') + sum(&block[156..]) {
            return Err(invalid("a header has a wrong checksum"));
        }
        Ok(Some(block))
    }

    /// The data of an entry that belongs to the next one.
    fn extra(&mut self, size: u64, limit: u64) -> io::Result<Vec<u8>> {
        if size > limit {
            return Err(invalid(format!("an extended header has {size} bytes; the limit is {limit}")));
        }
        self.left = size;
        self.padding = size.next_multiple_of(BLOCK as u64) - size;
        let mut bytes = Vec::new();
        self.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Skips what is left of the current entry.
    fn skip(&mut self) -> io::Result<()> {
        let rest = self.left.checked_add(self.padding).ok_or_else(|| invalid("a size is out of range"))?;
        (self.left, self.padding) = (0, 0);
        if rest > 0 && io::copy(&mut (&mut self.inner).take(rest), &mut io::sink())? < rest {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }
}

impl<R: Read> Read for Archive<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 || buffer.is_empty() {
            return Ok(0);
        }
        let most = usize::try_from(self.left).map_or(buffer.len(), |left| left.min(buffer.len()));
        let count = self.inner.read(&mut buffer[..most])?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= count as u64;
        Ok(count)
    }
}

impl Extended {
    /// Reads records of the form `LENGTH KEY=VALUE\n`; the length is that of the whole record.
    fn read(&mut self, mut records: &[u8]) -> io::Result<()> {
        let damaged = || invalid("an extended header is damaged");
        while !records.is_empty() {
            let space = records.iter().take(8).position(|byte| *byte == b' ').ok_or_else(damaged)?;
            let length = decimal(&records[..space]).ok_or_else(damaged)?;
            let length = usize::try_from(length).map_err(|_| damaged())?;
            let record = records.get(space + 1..length).ok_or_else(damaged)?;
            let record = record.strip_suffix(b"\n").ok_or_else(damaged)?;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(damaged)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            let count = || decimal(value).ok_or_else(damaged);
            match key {
                b"path" => self.name = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(count()?),
                b"uid" => self.uid = Some(count()?),
                b"gid" => self.gid = Some(count()?),
                // Seconds with a fraction, which is left out.
                b"mtime" => {
                    let whole = value.split(|byte| *byte == b'.').next().unwrap_or_default();
                    let whole = std::str::from_utf8(whole).ok().and_then(|whole| whole.parse().ok());
                    self.mtime = Some(whole.ok_or_else(damaged)?);
                }
                _ if key.starts_with(b"GNU.sparse.") => {
                    return Err(invalid("sparse files are not supported"));
                }
                _ => {
                    if let Some(name) = key.strip_prefix(XATTR) {
                        self.xattrs.push((name.to_vec(), value.to_vec()));
                    }
                }
            }
            records = &records[length..];
        }
        Ok(())
    }
}

fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Bytes up to the first zero.
fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn ustar_name(block: &[u8; BLOCK]) -> Vec<u8> {
    let (name, prefix) = (text(&block[..100]), text(&block[345..500]));
    // GNU tar has other fields in the place of the prefix.
    if prefix.is_empty() || &block[257..263] != b"ustar\0" {
        return name.to_vec();
    }
    [prefix, b"/", name].concat()
}

/// A number in octal digits, or, if the highest bit is set, in binary.
fn number(field: &[u8]) -> io::Result<u64> {
    let bad = || invalid("a number in a header is damaged");
    let (first, rest) = field.split_first().ok_or_else(bad)?;
    if first & 0x80 != 0 {
        // 0xff is the start of a negative number.
        let mut value = u64::from(first & 0x7f);
        for byte in rest {
            value = value.checked_mul(256).ok_or_else(bad)? | u64::from(*byte);
        }
        return Ok(value);
    }
    let digits = text(field).trim_ascii();
    digits.iter().try_fold(0u64, |value, digit| match digit {
        b'0'..=b'7' => value.checked_mul(8).map(|value| value | u64::from(digit - b'0')).ok_or_else(bad),
        _ => Err(bad()),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An entry of a test archive in the format ustar. An empty archive ends with [`end`].
    pub(crate) fn entry(name: &str, kind: u8, link: &str, data: &[u8]) -> Vec<u8> {
        raw(name.as_bytes(), kind, link.as_bytes(), &format!("{:011o}\0", data.len()).into_bytes(), data)
    }

    fn raw(name: &[u8], kind: u8, link: &[u8], size: &[u8], data: &[u8]) -> Vec<u8> {
        let mut block = vec![0; BLOCK];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, name);
        put(100, if kind == b'5' { b"0000755\0" } else { b"0000754\0" });
        // The owner of the tests may be any user.
        put(108, format!("{:07o}\0", rustix::process::getuid().as_raw()).as_bytes());
        put(116, format!("{:07o}\0", rustix::process::getgid().as_raw()).as_bytes());
        put(124, size);
        put(136, b"00000000017\0");
        put(148, b"        ");
        put(156, &[kind]);
        put(157, link);
        put(257, b"ustar\x0000");
        let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block.extend_from_slice(data);
        block.resize(block.len().next_multiple_of(BLOCK), 0);
        block
    }

    /// The end mark.
    pub(crate) fn end() -> Vec<u8> {
        vec![0; 2 * BLOCK]
    }

    fn record(key: &str, value: &[u8]) -> Vec<u8> {
        let body = key.len() + value.len() + 3;
        let mut length = body + 1;
        while length != body + length.to_string().len() {
            length += 1;
        }
        [format!("{length} {key}=").as_bytes(), value, b"\n"].concat()
    }

    fn all(bytes: &[u8]) -> io::Result<Vec<(Entry, Vec<u8>)>> {
        let mut archive = Archive::new(bytes);
        let mut entries = Vec::new();
        while let Some(entry) = archive.next_entry()? {
            let mut data = Vec::new();
            archive.read_to_end(&mut data)?;
            entries.push((entry, data));
        }
        Ok(entries)
    }

    #[test]
    fn entries_of_all_kinds_are_read_with_their_data() {
        let bytes = [
            entry("d/", b'5', "", b""),
            entry("d/f", b'0', "", b"text"),
            entry("old/", 0, "", b""),
            entry("l", b'2', "/d/f", b""),
            entry("h", b'1', "d/f", b""),
            entry("big", b'0', "", &[7; 1500]),
            entry("p", b'6', "", b""),
            end(),
            b"what follows".to_vec(),
        ]
        .concat();
        let entries = all(&bytes).unwrap();
        let shown: Vec<_> = entries
            .iter()
            .map(|(entry, data)| (String::from_utf8_lossy(&entry.name).into_owned(), entry.kind, data.len()))
            .collect();
        let expected = [
            ("d/", Kind::Directory, 0),
            ("d/f", Kind::File, 4),
            ("old/", Kind::Directory, 0),
            ("l", Kind::Symlink, 0),
            ("h", Kind::HardLink, 0),
            ("big", Kind::File, 1500),
            ("p", Kind::Fifo, 0),
        ];
        assert_eq!(shown, expected.map(|(name, kind, size)| (name.to_owned(), kind, size)));
        assert_eq!((entries[1].0.mode, entries[1].0.mtime), (0o754, 15));
        assert_eq!(entries[3].0.link, b"/d/f");
        let mut archive = Archive::new(bytes.as_slice());
        while archive.next_entry().unwrap().is_some() {}
        let rest = io::read_to_string(archive.into_inner()).unwrap();
        assert!(rest.ends_with("what follows"));
    }

    #[test]
    fn long_names_and_extended_headers_belong_to_the_next_entry() {
        let long = "n/".repeat(200) + "x";
        let pax = [
            record("path", b"p/y"),
            record("linkpath", b"target"),
            record("mtime", b"12.5"),
            record("uid", b"3000000"),
            record("SCHILY.xattr.user.a", b"1=\n2"),
            record("comment", b"none"),
        ]
        .concat();
        let bytes = [
            entry("././@LongLink", b'L', "", format!("{long}\0").as_bytes()),
            entry("././@LongLink", b'K', "", b"far\0"),
            entry("short", b'2', "near", b""),
            entry("pax", b'x', "", &pax),
            entry("short", b'2', "near", b""),
            entry("g", b'g', "", &record("path", b"ignored")),
            entry("plain", b'0', "", b""),
        ]
        .concat();
        let entries: Vec<Entry> = all(&bytes).unwrap().into_iter().map(|(entry, _)| entry).collect();
        assert_eq!((&entries[0].name[..], &entries[0].link[..]), (long.as_bytes(), &b"far"[..]));
        assert_eq!((&entries[1].name[..], &entries[1].link[..]), (&b"p/y"[..], &b"target"[..]));
        assert_eq!((entries[1].mtime, entries[1].uid), (12, 3_000_000));
        assert_eq!(entries[1].xattrs, [(b"user.a".to_vec(), b"1=\n2".to_vec())]);
        assert_eq!((&entries[2].name[..], entries[2].xattrs.len()), (&b"plain"[..], 0));
    }

    #[test]
    fn sizes_are_octal_or_binary_or_extended() {
        let mut binary = vec![0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3];
        assert_eq!(all(&raw(b"f", b'0', b"", &binary, b"abc")).unwrap()[0].1, b"abc");
        binary[1] = 1;
        assert!(all(&raw(b"f", b'0', b"", &binary, b"abc")).is_err());
        let pax =
            [entry("pax", b'x', "", &record("size", b"2")), raw(b"f", b'0', b"", b"0\0", b"ab")].concat();
        assert_eq!(all(&pax).unwrap()[0].1, b"ab");
        assert!(all(&raw(b"f", b'0', b"", b"00000000009\0", b"")).is_err());
    }

    #[test]
    fn damaged_archives_are_errors() {
        let file = entry("f", b'0', "", b"text");
        let error = |bytes: &[u8]| all(bytes).unwrap_err().to_string();
        assert_eq!(error(&file[..100]), "unexpected end of file");
        assert_eq!(error(&file[..514]), "unexpected end of file");
        let mut other = file.clone();
        other[0] = b'g';
        assert_eq!(error(&other), "a header has a wrong checksum");
        assert!(error(&entry("s", b'S', "", b"")).contains("unsupported type"));
        assert!(error(&entry("p", b'x', "", b"9 path=")).contains("damaged"));
        assert!(error(&entry("p", b'x', "", &record("GNU.sparse.major", b"1"))).contains("sparse"));
        let huge = raw(b"p", b'x', b"", b"77777777777\0", b"");
        assert!(error(&huge).contains("the limit is"));
        let many = entry("p", b'g', "", b"").repeat(20);
        assert!(error(&many).contains("too many"));
        let long = record("path", &[b'a'; MAX_NAME + 1]);
        assert!(error(&[entry("p", b'x', "", &long), file].concat()).contains("too long"));
    }
}
