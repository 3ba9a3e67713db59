//! Reads tar archives as a stream: entries in their order, each with its data. The formats are
//! those of tar(5): ustar, the long names of GNU tar, and the extended headers of pax.
//!
//! Invariants: an archive of any content costs bounded memory; a name or a list of extended
//! headers that is too long is an error; sizes are never trusted for an allocation; each header
//! advances by 512 bytes, so no archive is read without an end.
//!
//! Errors: `UnexpectedEof` if the archive is truncated, `InvalidData` if it is damaged. Others are
//! those of the input.

use std::io::{self, BufReader, Read, Seek};

const BLOCK: usize = 512;
/// The longest name of an entry, in bytes: `PATH_MAX` of Linux.
const MAX_NAME: usize = 4096;
/// The most bytes of the extended headers of one entry. Extended attributes may have 64 KiB each.
const MAX_EXTENDED: u64 = 1024 * 1024;
/// The most headers that may belong to one entry.
const MAX_HEADERS: u32 = 16;
/// The most blocks of the map of a sparse file; the data of a larger one look like a damaged header.
const MAX_SPARSE: u32 = 10_000;
const XATTR: &[u8] = b"SCHILY.xattr.";

/// The (decompressed) archive.
pub trait Input: Read {
    /// Leaves out bytes. An input that seeks may leave out more than it has.
    ///
    /// # Errors
    /// Those of reading; `UnexpectedEof` if the input ends before.
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        match io::copy(&mut self.take(bytes), &mut io::sink())? {
            skipped if skipped < bytes => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }
}

impl Input for Box<dyn Read + Send> {}

impl<R: Read + Seek> Input for BufReader<R> {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        self.seek_relative(i64::try_from(bytes).map_err(|_| io::ErrorKind::UnexpectedEof)?)
    }
}

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
    /// A form that is not supported, with its article: a sparse file, a part of a larger archive.
    Other(&'static str),
}

/// The header of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name as in the archive: it may begin with `/` or `./`, and may contain `..`.
    pub name: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// The number of bytes of data that follow; 0 for links, devices, directories and pipes.
    pub size: u64,
    /// The position of these data in the archive.
    pub offset: u64,
    /// Permission bits with set-user-ID, set-group-ID and the sticky bit.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time in seconds since 1970.
    pub mtime: i64,
    /// The target of a link: a name of an entry (hard link), or any path (symbolic link).
    pub link: Vec<u8>,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Names and values of extended attributes.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A stream of entries. [`Read`] returns the data of the entry that [`Archive::next_entry`] returned last.
pub struct Archive<'a> {
    input: &'a mut dyn Input,
    position: u64,
    /// Bytes of the current entry that are not read yet.
    left: u64,
    /// Bytes after its data, up to the next block.
    padding: u64,
    ended: bool,
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
    is_sparse: bool,
}

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

impl<'a> Archive<'a> {
    /// Reads an archive from its start. After the end, bytes that follow the end mark are not read yet.
    pub fn new(input: &'a mut dyn Input) -> Archive<'a> {
        Archive { input, position: 0, left: 0, padding: 0, ended: false }
    }

    /// The position in the archive.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Whether the end mark was read. Some writers leave it out.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// The next entry; data of the last one that was not read is skipped. `None` at the end, with or
    /// without its mark.
    ///
    /// # Errors
    /// When the input fails or ends in the middle of an entry, or when a header is damaged.
    pub fn next_entry(&mut self) -> io::Result<Option<Entry>> {
        let mut extended = Extended::default();
        for _ in 0..MAX_HEADERS {
            let rest = self.left + self.padding;
            if rest > 0 {
                self.input.skip(rest)?;
            }
            self.position += rest;
            (self.left, self.padding) = (0, 0);
            let Some(block) = self.header()? else { return Ok(None) };
            let size = number(&block[124..136])?;
            match block[156] {
                kind @ (b'L' | b'K') => {
                    let name = Some(text(&self.extra(size, MAX_NAME as u64 + 1)?).to_vec());
                    *(if kind == b'L' { &mut extended.name } else { &mut extended.link }) = name;
                }
                b'x' => extended.read(&self.extra(size, MAX_EXTENDED)?)?,
                // Settings for all entries: none of them concerns names or sizes in practice.
                b'g' => drop(self.extra(size, MAX_EXTENDED)?),
                _ => return self.entry(&block, extended, size).map(Some),
            }
        }
        Err(invalid("an entry has too many extended headers"))
    }

    fn entry(&mut self, block: &[u8; BLOCK], extended: Extended, size: u64) -> io::Result<Entry> {
        let name = extended.name.unwrap_or_else(|| ustar_name(block));
        let link = extended.link.unwrap_or_else(|| text(&block[157..257]).to_vec());
        if name.len() > MAX_NAME || link.len() > MAX_NAME || name.contains(&0) || link.contains(&0) {
            return Err(invalid("a name is longer than 4,096 bytes, or contains a zero byte"));
        }
        let kind = match block[156] {
            // Before POSIX, a directory was a file whose name ends with a slash.
            0 if name.ends_with(b"/") => Kind::Directory,
            0 | b'0' | b'7' if extended.is_sparse => Kind::Other("a sparse file"),
            0 | b'0' | b'7' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' => Kind::CharDevice,
            b'4' => Kind::BlockDevice,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            b'S' => Kind::Other("a sparse file"),
            _ => Kind::Other("an entry of an unknown type"),
        };
        if block[156] == b'S' {
            // The map of a sparse file continues in further blocks.
            let mut more = block[482];
            for _ in 0..MAX_SPARSE {
                if more == 0 {
                    break;
                }
                more = self.block()?.ok_or(io::ErrorKind::UnexpectedEof)?[504];
            }
        }
        // Some writers give links and directories a size, without data.
        let has_data = matches!(kind, Kind::File | Kind::Other(_));
        self.expect(if has_data { extended.size.unwrap_or(size) } else { 0 })?;
        let id = |given: Option<u64>, field: &[u8]| -> io::Result<u32> {
            let value = given.map_or_else(|| number(field), Ok)?;
            u32::try_from(value).map_err(|_| invalid("an owner is out of range"))
        };
        let device = |field: &[u8]| number(field).map_or(0, |n| u32::try_from(n).unwrap_or(0));
        Ok(Entry {
            kind,
            size: self.left,
            offset: self.position,
            mode: (number(&block[100..108])? & 0o7777) as u32,
            uid: id(extended.uid, &block[108..116])?,
            gid: id(extended.gid, &block[116..124])?,
            // A time before 1970 is the only negative number; such a file gets the time 0.
            mtime: match extended.mtime {
                Some(mtime) => mtime,
                None => number(&block[136..148]).map_or(0, |time| i64::try_from(time).unwrap_or(0)),
            },
            device: (device(&block[329..337]), device(&block[337..345])),
            name,
            link,
            xattrs: extended.xattrs,
        })
    }

    /// The next header; `None` at the end.
    fn header(&mut self) -> io::Result<Option<[u8; BLOCK]>> {
        if self.ended {
            return Ok(None);
        }
        let Some(block) = self.block()? else { return Ok(None) };
        if block.iter().all(|byte| *byte == 0) {
            self.ended = true;
            return Ok(None);
        }
        // The field of the sum counts as blanks.
        let bytes = || block[..148].iter().chain(b"        ").chain(&block[156..]);
        let unsigned: u64 = bytes().map(|byte| u64::from(*byte)).sum();
        // Some old programs added signed bytes.
        let signed: i64 = bytes().map(|byte| i64::from(byte.cast_signed())).sum();
        match number(&block[148..156]) {
            Ok(sum) if sum == unsigned || i64::try_from(sum) == Ok(signed) => Ok(Some(block)),
            _ => Err(invalid("the header of an entry has a wrong checksum")),
        }
    }

    /// The next block; `None` at the end of the input.
    fn block(&mut self) -> io::Result<Option<[u8; BLOCK]>> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match self.read_input(&mut block[filled..])? {
                0 if filled == 0 => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => filled += count,
            }
        }
        Ok(Some(block))
    }

    /// The data of an entry that belongs to the next one.
    fn extra(&mut self, size: u64, limit: u64) -> io::Result<Vec<u8>> {
        if size > limit {
            return Err(invalid(format!("an extended header has {size} bytes; the limit is {limit}")));
        }
        self.expect(size)?;
        let mut bytes = Vec::new();
        self.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Data of this size follow.
    fn expect(&mut self, size: u64) -> io::Result<()> {
        if self.position.checked_add(size).is_none_or(|end| end > i64::MAX as u64) {
            return Err(invalid("an entry is larger than a file can be"));
        }
        self.left = size;
        self.padding = size.next_multiple_of(BLOCK as u64) - size;
        Ok(())
    }

    /// Reads some bytes of the input.
    fn read_input(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.input.read(out) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => {
                    let count = result?;
                    self.position += count as u64;
                    return Ok(count);
                }
            }
        }
    }
}

impl Read for Archive<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).map_or(buffer.len(), |left| left.min(buffer.len()));
        if most == 0 {
            return Ok(0);
        }
        let count = self.read_input(&mut buffer[..most])?;
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
                _ => {
                    self.is_sparse |= key.starts_with(b"GNU.sparse.");
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
        let mut put =
            |offset: usize, bytes: &[u8]| block[offset..offset + bytes.len()].copy_from_slice(bytes);
        put(0, name);
        put(100, if kind == b'5' { b"0000755\0" } else { b"0000754\0" });
        // The owner of the tests may be any user.
        put(108, format!("{:07o}\0", rustix::process::getuid().as_raw()).as_bytes());
        put(116, format!("{:07o}\0", rustix::process::getgid().as_raw()).as_bytes());
        put(124, size);
        put(136, b"00000000017\0");
        put(156, &[kind]);
        put(157, link);
        put(257, b"ustar\x0000");
        repair(&mut block);
        block.extend_from_slice(data);
        block.resize(block.len().next_multiple_of(BLOCK), 0);
        block
    }

    /// Writes the checksum of a header.
    pub(crate) fn repair(block: &mut [u8]) {
        block[148..156].copy_from_slice(b"        ");
        let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }

    /// The end mark.
    pub(crate) fn end() -> Vec<u8> {
        vec![0; 2 * BLOCK]
    }

    /// The data of a pax header.
    pub(crate) fn records(pairs: &[(&str, &str)]) -> Vec<u8> {
        let mut data = String::new();
        for (key, value) in pairs {
            let rest = format!(" {key}={value}\n");
            let mut length = rest.len() + 1;
            while length != rest.len() + length.to_string().len() {
                length += 1;
            }
            data += &format!("{length}{rest}");
        }
        data.into_bytes()
    }

    fn pax(pairs: &[(&str, &str)]) -> Vec<u8> {
        entry("pax", b'x', "", &records(pairs))
    }

    impl Input for &[u8] {}

    type EntryWithData = (Entry, Vec<u8>);

    /// All entries, and whether the end is marked.
    fn all(mut bytes: &[u8]) -> io::Result<(Vec<EntryWithData>, bool)> {
        let mut archive = Archive::new(&mut bytes);
        let mut entries = Vec::new();
        while let Some(entry) = archive.next_entry()? {
            assert_eq!(archive.position(), entry.offset);
            let mut data = Vec::new();
            archive.read_to_end(&mut data)?;
            assert_eq!(data.len() as u64, entry.size);
            entries.push((entry, data));
        }
        Ok((entries, archive.ended()))
    }

    fn first(bytes: &[u8]) -> EntryWithData {
        all(bytes).unwrap().0.remove(0)
    }

    fn reason(bytes: &[u8]) -> String {
        all(bytes).unwrap_err().to_string()
    }

    #[test]
    fn entries_of_all_kinds_are_read_with_their_data() {
        let sparse = [pax(&[("GNU.sparse.major", "1")]), entry("sparse", b'0', "", b"1\n0\n1\n")].concat();
        let mut old_sparse = entry("old sparse", b'S', "", &[1; 600]);
        // One more block of its map.
        old_sparse[482] = 1;
        repair(&mut old_sparse[..BLOCK]);
        old_sparse.splice(BLOCK..BLOCK, [0; BLOCK]);
        let bytes = [
            entry("d/", b'5', "", b""),
            entry("d/f", b'0', "", b"text"),
            entry("old/", 0, "", b""),
            entry("old/f", 0, "", &[7; 513]),
            entry("l", b'2', "/d/f", b""),
            entry("h", b'1', "d/f", b""),
            entry("c", b'3', "", b""),
            entry("b", b'4', "", b""),
            entry("p", b'6', "", b""),
            sparse,
            old_sparse,
            entry("volume", b'V', "", b""),
            entry("big", b'7', "", &[7; 1500]),
            end(),
            b"what follows".to_vec(),
        ]
        .concat();
        let (entries, ended) = all(&bytes).unwrap();
        let shown: Vec<_> = entries
            .iter()
            .map(|(entry, _)| (String::from_utf8_lossy(&entry.name).into_owned(), entry.kind, entry.size))
            .collect();
        let expected = [
            ("d/", Kind::Directory, 0),
            ("d/f", Kind::File, 4),
            ("old/", Kind::Directory, 0),
            ("old/f", Kind::File, 513),
            ("l", Kind::Symlink, 0),
            ("h", Kind::HardLink, 0),
            ("c", Kind::CharDevice, 0),
            ("b", Kind::BlockDevice, 0),
            ("p", Kind::Fifo, 0),
            ("sparse", Kind::Other("a sparse file"), 6),
            ("old sparse", Kind::Other("a sparse file"), 600),
            ("volume", Kind::Other("an entry of an unknown type"), 0),
            ("big", Kind::File, 1500),
        ];
        assert_eq!(shown, expected.map(|(name, kind, size)| (name.to_owned(), kind, size)));
        assert!(ended);
        assert_eq!(
            (entries[1].1.as_slice(), entries[1].0.mode, entries[1].0.mtime),
            (&b"text"[..], 0o754, 15)
        );
        assert_eq!(entries[4].0.link, b"/d/f");
        // Without reading data, as a stream and by seeking.
        let names = |input: &mut dyn Input| {
            let mut archive = Archive::new(input);
            let names: Vec<_> = std::iter::from_fn(|| archive.next_entry().unwrap()).collect();
            (names, archive.position())
        };
        let mut stream = bytes.as_slice();
        let expected = (entries.into_iter().map(|(entry, _)| entry).collect(), bytes.len() as u64 - 12 - 512);
        assert_eq!(names(&mut stream), expected);
        assert_eq!(names(&mut BufReader::with_capacity(BLOCK, io::Cursor::new(&bytes))), expected);
        assert!(stream.ends_with(b"what follows"));
    }

    #[test]
    fn long_names_and_extended_headers_belong_to_the_next_entry() {
        let (long, target) = ("n/".repeat(200) + "x", "t".repeat(300));
        let bytes = [
            entry("././@LongLink", b'L', "", format!("{long}\0").as_bytes()),
            entry("././@LongLink", b'K', "", format!("{target}\0").as_bytes()),
            entry("short", b'2', "near", b""),
            pax(&[
                ("path", &long),
                ("linkpath", "target"),
                ("mtime", "12.5"),
                ("uid", "3000000"),
                ("SCHILY.xattr.user.a", "1=\n2"),
                ("comment", "none"),
            ]),
            entry("short", b'2', "near", b""),
            entry("g", b'g', "", &records(&[("path", "ignored")])),
            entry("plain", b'0', "", b""),
        ]
        .concat();
        let (entries, ended) = all(&bytes).unwrap();
        let entries: Vec<Entry> = entries.into_iter().map(|(entry, _)| entry).collect();
        assert_eq!((&entries[0].name[..], &entries[0].link[..]), (long.as_bytes(), target.as_bytes()));
        assert_eq!((&entries[1].name[..], &entries[1].link[..]), (long.as_bytes(), &b"target"[..]));
        assert_eq!((entries[1].mtime, entries[1].uid), (12, 3_000_000));
        assert_eq!(entries[1].xattrs, [(b"user.a".to_vec(), b"1=\n2".to_vec())]);
        assert_eq!((&entries[2].name[..], entries[2].xattrs.len()), (&b"plain"[..], 0));
        assert!(!ended);
    }

    #[test]
    fn sizes_are_octal_or_binary_or_extended() {
        for (field, size) in [
            (&b"00000000144\0"[..], Some(100)),
            (b"       144 \0", Some(100)),
            (b"\0\0\0\0\0\0\0\0\0\0\0\0", Some(0)),
            (b"777777777777", Some(0o777_777_777_777)),
            (b"\x80\0\0\0\0\0\0\x02\0\0\0\0", Some(0x2_0000_0000)),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", None),
            (b"\x80\0\0\x01\0\0\0\0\0\0\0\0", None),
            (b"0000000014x\0", None),
            (b"-0000000144\0", None),
        ] {
            assert_eq!(number(field).ok(), size, "{field:?}");
        }
        let binary = raw(b"f", b'0', b"", b"\x80\0\0\0\0\0\0\0\0\0\0\x03", b"abc");
        assert_eq!(first(&binary).1, b"abc");
        let extended = [pax(&[("size", "2")]), raw(b"f", b'0', b"", b"0\0", b"ab")].concat();
        assert_eq!(first(&extended).1, b"ab");
    }

    #[test]
    fn truncated_archives_and_damaged_ones_are_distinguished() {
        let bytes = [entry("a", b'0', "", &[1; 600]), entry("b", b'0', "", b"2"), end()].concat();
        for length in [100, 513, 1100, 1200, 1600, 2000, 2048, 2050] {
            assert_eq!(all(&bytes[..length]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{length}");
        }
        // Without the end mark, but not in the middle of an entry.
        let (entries, ended) = all(&bytes[..1536]).unwrap();
        assert_eq!((entries.len(), ended), (1, false));
        let file = entry("x", b'0', "", b"");
        let with = |records: &[(&str, &str)]| [pax(records), file.clone()].concat();
        let mut other = bytes.clone();
        other[1540] ^= 1;
        let long = "n".repeat(MAX_NAME + 1);
        for (damaged, expected) in [
            (other, "wrong checksum"),
            (vec![b'x'; 2048], "wrong checksum"),
            (entry("p", b'x', "", &vec![b'1'; 1024 * 1024 + 1]), "the limit is"),
            (raw(b"p", b'x', b"", b"77777777777\0", b""), "the limit is"),
            (entry("p", b'L', "", &[b'n'; MAX_NAME + 2]), "the limit is"),
            (with(&[("path", &long)]), "longer than 4,096 bytes"),
            (with(&[("linkpath", "a\0b")]), "a zero byte"),
            (with(&[("size", &u64::MAX.to_string())]), "larger than a file can be"),
            (with(&[("uid", "5000000000")]), "an owner is out of range"),
            (entry("p", b'g', "", b"").repeat(20), "too many"),
        ] {
            let error = all(&damaged).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(error.to_string().contains(expected), "{expected}: {error}");
        }
        for record in
            ["", " path=x\n", "x path=x\n", "99 path=x\n", "9 path=x", "7 pathx\n", "0 path=x\n", "3 p"]
        {
            let bytes = [entry("p", b'x', "", format!("{record}\0").as_bytes()), file.clone()].concat();
            assert!(reason(&bytes).contains("extended header is damaged"), "{record:?}");
        }
    }

    #[test]
    fn checksum_may_be_that_of_signed_bytes() {
        let mut bytes = raw("ö".as_bytes(), b'0', b"", b"0\0", b"");
        let field =
            |bytes: &[u8]| u64::from_str_radix(std::str::from_utf8(&bytes[148..154]).unwrap(), 8).unwrap();
        // Two bytes of the name are above 127.
        let signed = field(&bytes) - 2 * 256;
        bytes[148..154].copy_from_slice(format!("{signed:06o}").as_bytes());
        assert_eq!(first(&bytes).0.name, "ö".as_bytes());
        bytes[153] ^= 1;
        assert!(reason(&bytes).contains("wrong checksum"));
    }
}
