//! Compression with gzip (RFC 1952), of HTTP responses and of rotated logs.

use std::io::{self, Write};

use flate2::write::GzEncoder;
use flate2::{Compression, Crc};

/// The checksum of gzip, CRC-32 of IEEE 802.3 (RFC 1952, 8).
#[must_use]
pub fn crc32(text: &str) -> u32 {
    let mut crc = Crc::new();
    crc.update(text.as_bytes());
    crc.sum()
}

/// A writer that compresses.
pub struct Gzip<W: Write> {
    encoder: GzEncoder<W>,
}

impl<W: Write> Gzip<W> {
    /// Writes the compressed data to `out`. It is fast rather than thorough, for a client that waits
    /// for the response.
    pub fn fast(out: W) -> Self {
        Gzip { encoder: GzEncoder::new(out, Compression::fast()) }
    }

    /// Writes the compressed data to `out`, with the usual effort, for data that is stored.
    pub fn small(out: W) -> Self {
        Gzip { encoder: GzEncoder::new(out, Compression::default()) }
    }

    /// Writes the end of the stream; without it the stream is incomplete.
    ///
    /// # Errors
    /// When writing to `out` fails.
    pub fn finish(self) -> io::Result<W> {
        self.encoder.finish()
    }
}

impl<W: Write> Write for Gzip<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.encoder.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.encoder.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn decompressed_text_equals_input() {
        let text = "a line of a log\n".repeat(1000);
        let mut gzip = Gzip::fast(Vec::new());
        gzip.write_all(text.as_bytes()).unwrap();
        let packed = gzip.finish().unwrap();
        assert!(packed.len() < text.len() / 10);
        let mut back = String::new();
        flate2::read::GzDecoder::new(packed.as_slice()).read_to_string(&mut back).unwrap();
        assert_eq!(back, text);
    }

    #[test]
    fn the_check_value_of_the_standard_is_computed() {
        assert_eq!((crc32("123456789"), crc32("")), (0xcbf4_3926, 0));
    }
}
