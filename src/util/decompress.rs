//! Decompression of gzip (RFC 1952) as a stream.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;

/// Compressed bytes that are read from the source at a time.
const BLOCK: usize = 64 * 1024;

/// The compression of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// None that is known.
    None,
    /// gzip, with any number of members.
    Gzip,
}

/// A reader of the decompressed data of `source`, and the compression that its first bytes show.
/// The reader ends after `limit` decompressed bytes; data without compression are not limited.
///
/// # Errors
/// When `source` cannot be read.
pub fn open(source: Box<dyn Read + Send>, limit: u64) -> io::Result<(Box<dyn Read + Send>, Compression)> {
    let mut source = BufReader::with_capacity(BLOCK, source);
    if !source.fill_buf()?.starts_with(&[0x1f, 0x8b, 8]) {
        return Ok((Box::new(source), Compression::None));
    }
    Ok((Box::new(MultiGzDecoder::new(source).take(limit)), Compression::Gzip))
}
