//! Decompression of gzip (RFC 1952) and zstd (RFC 8878) from untrusted files, as a stream.
//!
//! Invariants: the window of zstd, and so the memory of a decoder, is bounded; the number of
//! decompressed bytes is bounded; every failure says whether the data ended too early, is damaged,
//! exceeds a limit, or could not be read from the disk.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use serde::{Deserialize, Serialize};

/// The largest window of a zstd frame, in bytes: that of `zstd -19`, the highest normal level.
pub const WINDOW_LIMIT: u64 = 8 << 20;

/// The most bytes of skipped frames in zstd data. Compressors put a few bytes for each frame into
/// them, and lists of frames or of files; a sparse file could have terabytes.
const SKIPPED_LIMIT: u64 = 64 << 20;

/// Compressed bytes that are read from the source at a time.
const BLOCK: usize = 64 * 1024;

/// The compression of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Compression {
    /// None that is known.
    None,
    /// gzip, with any number of members.
    Gzip,
    /// zstd, with any number of frames.
    Zstd,
}

impl Compression {
    /// The compression of data that begins with `head`, of which 4 bytes suffice.
    #[must_use]
    pub fn detect(head: &[u8]) -> Compression {
        match head {
            [0x1f, 0x8b, 8, ..] => Compression::Gzip,
            // A normal frame, or one that is skipped: parallel compressors begin with such.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Compression::Zstd,
            _ => Compression::None,
        }
    }
}

/// Why data cannot be decompressed. [`find_error`] finds it in an error of the reader. Data that end
/// too early are an error of the kind [`io::ErrorKind::UnexpectedEof`] instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecompressError {
    /// The window of a zstd frame is larger than [`WINDOW_LIMIT`].
    #[error("a zstd frame needs a window of {wanted} bytes, and the limit is {WINDOW_LIMIT} bytes")]
    Window {
        /// Of the frame.
        wanted: u64,
    },
    /// The data expand to more bytes than the limit of the caller.
    #[error("the data expand to more than {limit} bytes")]
    TooLarge {
        /// Of the caller.
        limit: u64,
    },
    /// The data violate the format.
    #[error("the compressed data are damaged: {0}")]
    Damaged(String),
}

/// The [`DecompressError`] that an error of a decompressing reader contains.
#[must_use]
pub fn find_error(error: &io::Error) -> Option<&DecompressError> {
    error.get_ref().and_then(|inner| inner.downcast_ref())
}

/// A reader of the decompressed data of `source`, and the compression that its first bytes show.
/// The reader fails after `limit` decompressed bytes if more follow; data without compression are
/// not limited.
///
/// # Errors
/// When `source` cannot be read.
pub fn open(source: Box<dyn Read + Send>, limit: u64) -> io::Result<(Box<dyn Read + Send>, Compression)> {
    let mut source = Source { inner: BufReader::with_capacity(BLOCK, source), ended: false, error: None };
    let compression = Compression::detect(source.inner.fill_buf()?);
    let reader: Box<dyn Read + Send> = match compression {
        Compression::None => return Ok((Box::new(source.inner), compression)),
        Compression::Gzip => Box::new(Gunzip { decoder: MultiGzDecoder::new(source) }),
        Compression::Zstd => {
            let mut decoder = FrameDecoder::new();
            decoder.set_max_window_size(WINDOW_LIMIT);
            Box::new(Unzstd { decoder, source, inside: false, skipped: 0 })
        }
    };
    Ok((Box::new(Limited { reader, left: limit, limit }), compression))
}

/// The compressed data. The decoders hide why reading failed, so it is kept here.
struct Source {
    inner: BufReader<Box<dyn Read + Send>>,
    ended: bool,
    error: Option<io::Error>,
}

impl Source {
    fn record_error<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| {
            let copy = match error.raw_os_error() {
                Some(code) => io::Error::from_raw_os_error(code),
                None => io::Error::from(error.kind()),
            };
            if error.kind() != io::ErrorKind::Interrupted {
                self.error = Some(copy);
            }
        })
    }

    /// The reason why a decoder failed with this description.
    fn reason(&mut self, text: impl FnOnce() -> String) -> io::Error {
        match self.error.take() {
            Some(error) => error,
            None if self.ended => io::ErrorKind::UnexpectedEof.into(),
            None => io::Error::new(io::ErrorKind::InvalidData, DecompressError::Damaged(text())),
        }
    }
}

impl Read for Source {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let result = self.inner.read(out);
        let length = self.record_error(result)?;
        self.ended |= length == 0 && !out.is_empty();
        Ok(length)
    }
}

impl BufRead for Source {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let result = self.inner.fill_buf().map(<[u8]>::is_empty);
        self.ended |= self.record_error(result)?;
        // This returns the same bytes without reading.
        self.inner.fill_buf()
    }

    fn consume(&mut self, length: usize) {
        self.inner.consume(length);
    }
}

struct Gunzip {
    decoder: MultiGzDecoder<Source>,
}

impl Read for Gunzip {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.decoder.read(out).map_err(|error| match error.kind() {
            io::ErrorKind::Interrupted | io::ErrorKind::UnexpectedEof => error,
            _ => self.decoder.get_mut().reason(|| error.to_string()),
        })
    }
}

struct Unzstd {
    decoder: FrameDecoder,
    source: Source,
    /// Whether the header of a frame was read, but not yet all of its data.
    inside: bool,
    /// Bytes of the frames that were skipped.
    skipped: u64,
}

impl Unzstd {
    /// Reads the header of the next frame. Returns false at the end of the data.
    fn next_frame(&mut self) -> io::Result<bool> {
        loop {
            if self.source.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.decoder.reset(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    self.skipped += length;
                    if self.skipped > SKIPPED_LIMIT {
                        let text = format!("more than {SKIPPED_LIMIT} bytes are to be skipped");
                        return Err(io::Error::new(
                            io::ErrorKind::InvalidData,
                            DecompressError::Damaged(text),
                        ));
                    }
                    if io::copy(&mut (&mut self.source).take(length), &mut io::sink())? < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(FrameDecoderError::WindowSizeTooBig { requested, .. }) => {
                    let error = DecompressError::Window { wanted: requested };
                    return Err(io::Error::new(io::ErrorKind::InvalidData, error));
                }
                Err(error) => return Err(self.source.reason(|| error.to_string())),
            }
        }
    }
}

impl Read for Unzstd {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            if self.decoder.can_collect() > 0 {
                return self.decoder.read(out);
            }
            if self.inside && !self.decoder.is_finished() {
                let blocks = BlockDecodingStrategy::UptoBlocks(1);
                if let Err(error) = self.decoder.decode_blocks(&mut self.source, blocks) {
                    return Err(self.source.reason(|| error.to_string()));
                }
                continue;
            }
            self.inside = self.next_frame()?;
            if !self.inside {
                return Ok(0);
            }
        }
    }
}

/// Ends with an error instead of more than a number of bytes.
struct Limited {
    reader: Box<dyn Read + Send>,
    left: u64,
    limit: u64,
}

impl Read for Limited {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let length = self.reader.read(out)?;
        self.left = self.left.checked_sub(length as u64).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, DecompressError::TooLarge { limit: self.limit })
        })?;
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::gzip::Gzip;
    use crate::util::testing::zstd;
    use std::io::{Cursor, Write};

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut gzip = Gzip::small(Vec::new());
        gzip.write_all(data).unwrap();
        gzip.finish().unwrap()
    }

    fn read(packed: &[u8], limit: u64) -> io::Result<(Vec<u8>, Compression)> {
        let (mut reader, compression) = open(Box::new(Cursor::new(packed.to_vec())), limit)?;
        let mut data = Vec::new();
        reader.read_to_end(&mut data)?;
        Ok((data, compression))
    }

    fn text() -> Vec<u8> {
        (0..60_000).flat_map(|line| format!("line {}\n", line % 1000).into_bytes()).collect()
    }

    /// A raw zstd frame of one block with these bytes, whose window is `2^log` bytes.
    fn frame(log: u8, data: &[u8]) -> Vec<u8> {
        let header = ((data.len() as u32) << 3 | 1).to_le_bytes();
        [&[0x28, 0xb5, 0x2f, 0xfd, 0, (log - 10) << 3], &header[..3], data].concat()
    }

    #[test]
    fn each_compression_is_detected_and_undone() {
        let text = text();
        let halves = text.split_at(text.len() / 2);
        let skipped = [&[0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"xyz"].concat();
        for (packed, compression) in [
            (text.clone(), Compression::None),
            (gzip(&text), Compression::Gzip),
            ([gzip(halves.0), gzip(halves.1)].concat(), Compression::Gzip),
            (zstd(&text), Compression::Zstd),
            ([zstd(halves.0), skipped.clone(), zstd(halves.1)].concat(), Compression::Zstd),
            ([skipped.clone(), zstd(&text), zstd(b"")].concat(), Compression::Zstd),
        ] {
            let (data, found) = read(&packed, u64::MAX).unwrap();
            assert_eq!(found, compression);
            assert!(data == text, "{compression:?}: {} bytes", data.len());
        }
        assert_eq!(read(b"", 9).unwrap(), (Vec::new(), Compression::None));
    }

    #[test]
    fn truncated_data_are_an_early_end_and_others_are_damaged() {
        let text = text();
        for packed in [gzip(&text), zstd(&text), [zstd(&text), zstd(&text)].concat()] {
            for length in [10, packed.len() / 3, packed.len() - 1] {
                let error = read(&packed[..length], u64::MAX).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{length}");
            }
            let damaged = [&packed[..], b"more than nothing follows"].concat();
            let error = read(&damaged, u64::MAX).unwrap_err();
            assert!(matches!(find_error(&error), Some(DecompressError::Damaged(_))), "{error}");
        }
        let mut packed = gzip(&text);
        let middle = packed.len() / 2;
        packed[middle] ^= 0x55;
        let error = read(&packed, u64::MAX).unwrap_err();
        assert!(matches!(find_error(&error), Some(DecompressError::Damaged(_))), "{error}");
    }

    #[test]
    fn data_larger_than_the_limit_are_refused() {
        for packed in [gzip(&vec![0; 1 << 20]), zstd(&vec![0; 1 << 20])] {
            assert!(packed.len() < 4096);
            assert_eq!(read(&packed, 1 << 20).unwrap().0.len(), 1 << 20);
            let error = read(&packed, (1 << 20) - 1).unwrap_err();
            assert_eq!(find_error(&error), Some(&DecompressError::TooLarge { limit: (1 << 20) - 1 }));
        }
    }

    #[test]
    fn window_larger_than_the_limit_is_refused() {
        assert_eq!(read(&frame(23, b"abc"), 9).unwrap().0, b"abc");
        for (log, wanted) in [(24, 16 << 20), (31, 2 << 30), (41, 2 << 40)] {
            let error = read(&frame(log, b"abc"), 9).unwrap_err();
            assert_eq!(find_error(&error), Some(&DecompressError::Window { wanted }));
        }
        // A frame of one segment has no window; its whole content is kept.
        let single = [&[0x28, 0xb5, 0x2f, 0xfd, 0xe0][..], &(9_u64 << 20).to_le_bytes()].concat();
        let error = read(&single, 9).unwrap_err();
        assert_eq!(find_error(&error), Some(&DecompressError::Window { wanted: 9 << 20 }));
    }

    #[test]
    fn skipped_frames_have_a_limit_together() {
        let head = |length: u32| [[0x50, 0x2a, 0x4d, 0x18], length.to_le_bytes()].concat();
        let half = [head(32 << 20), vec![0; 32 << 20]].concat();
        assert_eq!(read(&[&half[..], &half, &zstd(b"abc")].concat(), 9).unwrap().0, b"abc");
        for packed in [[&half[..], &half, &head(1)].concat(), head(u32::MAX)] {
            let error = read(&packed, 9).unwrap_err();
            assert!(
                matches!(find_error(&error), Some(DecompressError::Damaged(text)) if text.contains("skipped"))
            );
        }
    }

    #[test]
    fn error_of_the_disk_is_reported_as_such() {
        struct Failing(Cursor<Vec<u8>>);
        impl Read for Failing {
            fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
                match self.0.read(out)? {
                    0 => Err(rustix::io::Errno::IO.into()),
                    length => Ok(length),
                }
            }
        }
        for packed in [gzip(&text()), zstd(&text())] {
            let half = packed[..packed.len() / 2].to_vec();
            let (mut reader, _) = open(Box::new(Failing(Cursor::new(half))), u64::MAX).unwrap();
            let error = reader.read_to_end(&mut Vec::new()).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()), "{error}");
        }
    }
}
