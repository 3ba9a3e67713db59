//! Reads tar archives (POSIX.1-2001 pax and ustar; GNU's long names), as a stream.
//!
//! Invariants: memory is bounded by [`NAME_LIMIT`] and [`PAX_LIMIT`]; no error leads to an endless
//! loop, because each header advances by 512 bytes.

use std::io::{self, Read};

use crate::util::decompress::Failure;

/// The unit of a tar archive.
const BLOCK: usize = 512;
/// The longest name of an entry, or of the target of a link.
pub(super) const NAME_LIMIT: u64 = 4096;
/// The largest pax header.
pub(super) const PAX_LIMIT: u64 = 64 * 1024;
/// The most headers of one entry.
const EXTENDED_LIMIT: usize = 16;
/// The most blocks of the map of a sparse file; the data of a larger one look like a damaged header.
const SPARSE_LIMIT: usize = 10_000;

/// The (decompressed) archive.
pub(super) trait Input: Read {
    /// Leaves out bytes, at most up to the end.
    fn skip(&mut self, bytes: u64) -> io::Result<()>;
}

/// The type of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Directory,
    /// Its target is relative to the directory of the entry.
    SymbolicLink(String),
    /// Its target is the name of another entry.
    HardLink(String),
    /// Another one, with its article.
    Other(&'static str),
}

/// An entry.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// As it is in the archive: it may be absolute, or contain `..`.
    pub(super) name: String,
    pub(super) kind: Kind,
    /// Bytes of data that follow.
    pub(super) size: u64,
    /// Of these data in the archive.
    pub(super) offset: u64,
}

/// A tar archive.
pub(super) struct Tar<'a> {
    input: &'a mut dyn Input,
    at: u64,
    /// Bytes of data of the current entry that were not read yet.
    left: u64,
    /// Bytes that fill the last block of the current entry.
    padding: u64,
    ended: bool,
}

/// What extended headers say about the next entry.
#[derive(Default)]
struct Extended {
    name: Option<String>,
    link: Option<String>,
    size: Option<u64>,
    sparse: bool,
}

fn damaged(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, Failure::Damaged(reason.to_owned()))
}

impl<'a> Tar<'a> {
    pub(super) fn new(input: &'a mut dyn Input) -> Tar<'a> {
        Tar { input, at: 0, left: 0, padding: 0, ended: false }
    }

    /// The position in the archive.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Whether the mark of the end was read.
    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// The next entry; `None` at the end, with or without its mark. Data of the current entry that
    /// were not read are left out.
    ///
    /// # Errors
    /// `UnexpectedEof` if the archive is truncated; [`Failure`] if it is damaged; others are those of
    /// the input.
    pub(super) fn next(&mut self) -> io::Result<Option<Header>> {
        let mut extended = Extended::default();
        for _ in 0..EXTENDED_LIMIT {
            let rest = self.left + self.padding;
            self.input.skip(rest)?;
            self.at += rest;
            (self.left, self.padding) = (0, 0);
            let Some(block) = self.block()? else { return Ok(None) };
            if block.iter().all(|byte| *byte == 0) {
                self.ended = true;
                return Ok(None);
            }
            check_sum(&block)?;
            let size = number(field(&block, 124, 12))?;
            let kind = block[156];
            match kind {
                b'L' => extended.name = Some(text(&self.document(size, NAME_LIMIT + 1)?)),
                b'K' => extended.link = Some(text(&self.document(size, NAME_LIMIT + 1)?)),
                b'x' => pax(&self.document(size, PAX_LIMIT)?, &mut extended)?,
                // Values for all entries that follow: those for names and sizes make no sense.
                b'g' => drop(self.document(size, PAX_LIMIT)?),
                _ => return self.entry(&block, kind, size, extended).map(Some),
            }
        }
        Err(damaged("an entry has too many extended headers"))
    }

    fn entry(&mut self, block: &[u8; BLOCK], kind: u8, size: u64, extended: Extended) -> io::Result<Header> {
        let name = extended.name.unwrap_or_else(|| {
            let (name, prefix) = (text(field(block, 0, 100)), text(field(block, 345, 155)));
            // GNU's own format has other values in the place of the prefix.
            let posix = field(block, 257, 6) == b"ustar\0";
            if posix && !prefix.is_empty() { format!("{prefix}/{name}") } else { name }
        });
        let link = extended.link.unwrap_or_else(|| text(field(block, 157, 100)));
        if name.len() as u64 > NAME_LIMIT || link.len() as u64 > NAME_LIMIT {
            return Err(damaged("a name is longer than 4,096 bytes"));
        }
        let kind = match kind {
            b'0' | b'7' | 0 if extended.sparse => Kind::Other("a sparse file"),
            0 if name.ends_with('/') => Kind::Directory,
            b'0' | b'7' | 0 => Kind::File,
            b'1' => Kind::HardLink(link),
            b'2' => Kind::SymbolicLink(link),
            b'3' | b'4' => Kind::Other("a device"),
            b'5' => Kind::Directory,
            b'6' => Kind::Other("a pipe"),
            b'S' => Kind::Other("a sparse file"),
            _ => Kind::Other("an entry of an unknown type"),
        };
        if matches!(block[156], b'S') {
            // The map of a sparse file continues in further blocks.
            let mut more = block[482];
            for _ in 0..SPARSE_LIMIT {
                if more == 0 {
                    break;
                }
                more = self.block()?.ok_or(io::ErrorKind::UnexpectedEof)?[504];
            }
        }
        // These have no data, whatever their size says.
        let size = match block[156] {
            b'1'..=b'6' => 0,
            _ => extended.size.unwrap_or(size),
        };
        if self.at.checked_add(size).is_none_or(|end| end > i64::MAX as u64) {
            return Err(damaged("an entry is larger than a file can be"));
        }
        self.expect(size);
        Ok(Header { name, kind, size, offset: self.at })
    }

    /// Data of this size follow.
    fn expect(&mut self, size: u64) {
        self.left = size;
        self.padding = size.next_multiple_of(BLOCK as u64) - size;
    }

    /// The data of an extended header.
    fn document(&mut self, size: u64, limit: u64) -> io::Result<Vec<u8>> {
        if size > limit {
            return Err(damaged("an extended header is too large"));
        }
        self.expect(size);
        let mut data = Vec::with_capacity(size as usize);
        let mut part = [0; BLOCK];
        loop {
            match self.read(&mut part)? {
                0 => return Ok(data),
                length => data.extend_from_slice(part.get(..length).unwrap_or_default()),
            }
        }
    }

    /// The next block; `None` at the end of the input.
    fn block(&mut self) -> io::Result<Option<[u8; BLOCK]>> {
        let mut block = [0; BLOCK];
        let mut length = 0;
        while let Some(rest) = block.get_mut(length..).filter(|rest| !rest.is_empty()) {
            match self.input.read(rest) {
                Ok(0) if length == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(more) => length += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.at += BLOCK as u64;
        Ok(Some(block))
    }

    /// Reads data of the current entry; 0 at their end.
    ///
    /// # Errors
    /// `UnexpectedEof` if the archive is truncated; others are those of the input.
    pub(super) fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let length = usize::try_from(self.left).map_or(out.len(), |left| left.min(out.len()));
        if length == 0 {
            return Ok(0);
        }
        loop {
            match self.input.read(out.get_mut(..length).unwrap_or_default()) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => {
                    self.left -= length as u64;
                    self.at += length as u64;
                    return Ok(length);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn field(block: &[u8; BLOCK], start: usize, length: usize) -> &[u8] {
    block.get(start..start + length).unwrap_or_default()
}

/// The text before the first zero byte.
fn text(field: &[u8]) -> String {
    let bytes = field.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

/// A number: octal digits, or (GNU) binary if the highest bit of the first byte is set.
fn number(field: &[u8]) -> io::Result<u64> {
    let invalid = || damaged("the size of an entry is not a number");
    if let Some((first, rest)) = field.split_first()
        && first & 0x80 != 0
    {
        // Negative numbers, and those above 64 bits, have other bits set in the high bytes.
        let (high, low) = rest.split_at_checked(3).ok_or_else(invalid)?;
        let low: [u8; 8] = low.try_into().map_err(|_| invalid())?;
        return if *first == 0x80 && high == [0; 3] { Ok(u64::from_be_bytes(low)) } else { Err(invalid()) };
    }
    let digits = text(field);
    let digits = digits.trim_matches(' ');
    if digits.is_empty() {
        return Ok(0);
    }
    if digits.bytes().all(|one| matches!(one, b'0'..=b'7')) {
        u64::from_str_radix(digits, 8).map_err(|_| invalid())
    } else {
        Err(invalid())
    }
}

/// Checks the sum over all bytes of a header, in which the field of the sum counts as blanks.
fn check_sum(block: &[u8; BLOCK]) -> io::Result<()> {
    let bytes =
        || block.iter().enumerate().map(|(i, byte)| if (148..156).contains(&i) { b' ' } else { *byte });
    let unsigned: u64 = bytes().map(u64::from).sum();
    // Some old programs added signed bytes.
    let signed: i64 = bytes().map(|byte| i64::from(byte.cast_signed())).sum();
    match number(field(block, 148, 8)) {
        Ok(sum) if sum == unsigned || i64::try_from(sum) == Ok(signed) => Ok(()),
        _ => Err(damaged("the header of an entry has a wrong checksum")),
    }
}

/// Reads the records of a pax header: `LENGTH KEY=VALUE\n`, where the length counts all of it.
fn pax(mut data: &[u8], extended: &mut Extended) -> io::Result<()> {
    let invalid = || damaged("a pax header is invalid");
    while !data.is_empty() {
        let blank = data.iter().take(20).position(|byte| *byte == b' ').ok_or_else(invalid)?;
        let (digits, _) = data.split_at_checked(blank).ok_or_else(invalid)?;
        let length =
            std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok()).ok_or_else(invalid)?;
        let (record, rest) = data.split_at_checked(length).ok_or_else(invalid)?;
        data = rest;
        let record =
            record.get(blank + 1..).and_then(|record| record.strip_suffix(b"\n")).ok_or_else(invalid)?;
        let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(invalid)?;
        let (key, value) = record.split_at(equals);
        let value = value.get(1..).unwrap_or_default();
        match key {
            b"path" => extended.name = Some(text(value)),
            b"linkpath" => extended.link = Some(text(value)),
            b"size" => {
                let size = std::str::from_utf8(value).ok().and_then(|digits| digits.parse().ok());
                extended.size = Some(size.ok_or_else(invalid)?);
            }
            _ => extended.sparse |= key.starts_with(b"GNU.sparse."),
        }
    }
    Ok(())
}

/// The name of an entry without `.` and empty parts. `None`: it is absolute or contains `..`.
pub(super) fn clean(name: &str) -> Option<String> {
    join("", name)
}

/// The target of a symbolic link as the name of an entry. `None`: it leads out of the archive.
pub(super) fn link_target(link: &str, target: &str) -> Option<String> {
    let (directory, _) = link.rsplit_once('/').unwrap_or_default();
    join(directory, target)
}

fn join(directory: &str, name: &str) -> Option<String> {
    if name.starts_with('/') {
        return None;
    }
    let mut parts: Vec<&str> = directory.split('/').filter(|part| !part.is_empty()).collect();
    // In the name of an entry, no directory is left for `..`.
    let up = !directory.is_empty();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." if up => drop(parts.pop()?),
            ".." => return None,
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Builder, padded};
    use super::*;
    use std::io::Cursor;

    impl Input for Cursor<Vec<u8>> {
        fn skip(&mut self, bytes: u64) -> io::Result<()> {
            io::copy(&mut self.take(bytes), &mut io::sink()).map(drop)
        }
    }

    type Found = (String, Kind, Vec<u8>);

    /// Name, kind and data of each entry, and whether the end is marked.
    fn entries(bytes: &[u8]) -> io::Result<(Vec<Found>, bool)> {
        let mut input = Cursor::new(bytes.to_vec());
        let mut tar = Tar::new(&mut input);
        let mut all = Vec::new();
        while let Some(header) = tar.next()? {
            assert_eq!(tar.at(), header.offset);
            let mut data = vec![0; header.size as usize];
            let mut filled = 0;
            while filled < data.len() {
                filled += tar.read(&mut data[filled..])?;
            }
            assert_eq!(tar.read(&mut [0]).unwrap(), 0);
            all.push((header.name, header.kind, data));
        }
        Ok((all, tar.ended()))
    }

    fn reason(bytes: &[u8]) -> String {
        entries(bytes).unwrap_err().to_string()
    }

    #[test]
    fn names_sizes_and_types_of_all_formats_are_read() {
        let (long, target) = (format!("{}/name", "d/".repeat(150)), "t".repeat(300));
        let bytes = Builder::default()
            .file("plain", b"data")
            .raw(b'L', "././@LongLink", "", format!("{long}\0").as_bytes())
            .file("cut", b"long")
            .raw(b'K', "././@LongLink", "", format!("{target}\0").as_bytes())
            .raw(b'2', "link", "cut", b"")
            .raw(b'x', "pax", "", &padded(&[("path", &long), ("mtime", "1.5")]))
            .file("cut", b"pax")
            .raw(b'x', "pax", "", &padded(&[("linkpath", &target)]))
            .raw(b'1', "hard", "cut", b"")
            .raw(b'g', "global", "", &padded(&[("comment", "x")]))
            .raw(0, "old/", "", b"")
            .raw(0, "old/file", "", &[7; 513])
            .raw(b'5', "directory", "", b"")
            .raw(b'3', "device", "", b"")
            .raw(b'x', "pax", "", &padded(&[("GNU.sparse.major", "1")]))
            .file("sparse", b"1\n0\n1\n")
            .raw(b'V', "volume", "", b"")
            .end();
        let (found, ended) = entries(&bytes).unwrap();
        let entry = |name: &str, kind, data: &[u8]| (name.to_owned(), kind, data.to_vec());
        assert_eq!(
            found,
            [
                entry("plain", Kind::File, b"data"),
                entry(&long, Kind::File, b"long"),
                entry("link", Kind::SymbolicLink(target.clone()), b""),
                entry(&long, Kind::File, b"pax"),
                entry("hard", Kind::HardLink(target), b""),
                entry("old/", Kind::Directory, b""),
                entry("old/file", Kind::File, &[7; 513]),
                entry("directory", Kind::Directory, b""),
                entry("device", Kind::Other("a device"), b""),
                entry("sparse", Kind::Other("a sparse file"), b"1\n0\n1\n"),
                entry("volume", Kind::Other("an entry of an unknown type"), b""),
            ]
        );
        assert!(ended);
    }

    #[test]
    fn sizes_are_octal_binary_or_from_pax_headers() {
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
        let bytes =
            Builder::default().raw(b'x', "pax", "", &padded(&[("size", "3")])).file("file", b"abcdef").end();
        assert_eq!(entries(&bytes).unwrap().0, [("file".to_owned(), Kind::File, b"abc".to_vec())]);
    }

    #[test]
    fn truncated_and_damaged_archives_are_distinguished() {
        let bytes = Builder::default().file("a", &[1; 600]).file("b", b"2").end();
        for length in [100, 513, 1100, 1600, 2000, 2048] {
            let kind = entries(&bytes[..length]).unwrap_err().kind();
            assert_eq!(kind, io::ErrorKind::UnexpectedEof, "{length}");
        }
        // Without the mark of the end, but not in the middle of an entry.
        let (found, ended) = entries(&bytes[..1536]).unwrap();
        assert_eq!((found.len(), ended), (1, false));
        let mut damaged = bytes.clone();
        damaged[1540] ^= 1;
        assert!(reason(&damaged).contains("wrong checksum"));
        assert!(reason(&[b'x'; 2048]).contains("wrong checksum"));
        let large = Builder::default().raw(b'x', "pax", "", &vec![b'1'; 65_537]).end();
        assert!(reason(&large).contains("too large"));
        let large = Builder::default().raw(b'L', "name", "", &vec![b'n'; 4098]).end();
        assert!(reason(&large).contains("too large"));
        let large = Builder::default()
            .raw(b'x', "pax", "", &padded(&[("path", &"n".repeat(4097))]))
            .file("x", b"")
            .end();
        assert!(reason(&large).contains("longer than 4,096 bytes"));
        for record in
            ["", " path=x\n", "x path=x\n", "99 path=x\n", "9 path=x", "7 pathx\n", "0 path=x\n", "3 p"]
        {
            let bytes = Builder::default()
                .raw(b'x', "pax", "", format!("{record}\0").as_bytes())
                .file("x", b"")
                .end();
            assert!(reason(&bytes).contains("pax header is invalid"), "{record:?}");
        }
        let bytes = Builder::default()
            .raw(b'x', "pax", "", &padded(&[("size", &u64::MAX.to_string())]))
            .file("x", b"")
            .end();
        assert!(reason(&bytes).contains("larger than a file can be"));
    }

    #[test]
    fn names_that_lead_out_are_refused() {
        for (name, cleaned) in [
            ("./blobs//sha256/x/", Some("blobs/sha256/x")),
            ("index.json", Some("index.json")),
            (".", Some("")),
            ("/index.json", None),
            ("../index.json", None),
            ("a/../index.json", None),
            ("a/..", None),
        ] {
            assert_eq!(clean(name).as_deref(), cleaned, "{name}");
        }
        for (link, target, resolved) in [
            ("b/layer.tar", "../a/layer.tar", Some("a/layer.tar")),
            ("b/layer.tar", "./c.tar", Some("b/c.tar")),
            ("b/layer.tar", "../../a", None),
            ("b/layer.tar", "/etc/passwd", None),
            ("link", "a", Some("a")),
            ("link", "../a", None),
        ] {
            assert_eq!(link_target(link, target).as_deref(), resolved, "{link} {target}");
        }
    }
}
