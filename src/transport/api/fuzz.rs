//! Hostile responses of an API server.

use std::io::BufReader;

use crate::util::fuzzing::{Budget, Target};
use crate::util::threads::Stack;

pub(in crate::transport) fn targets() -> Vec<Target> {
    vec![Target {
        name: "transport/api_answer",
        // Pod workers, which send requests, have the same stack size.
        stack: Stack::Small,
        max_bytes: 4 << 20,
        // The body is not stored here.
        budget: Budget { per_byte: 4, ..Budget::LINEAR },
        worst: crate::transport::fuzz::hostile_answers,
        seeds: crate::transport::fuzz::ANSWERS,
        run: |bytes| {
            for capacity in [1, 7, super::BUFFER_BYTES] {
                // Only short responses are read byte by byte.
                if capacity < super::BUFFER_BYTES && bytes.len() > 64 * 1024 {
                    continue;
                }
                let mut reader = BufReader::with_capacity(capacity, bytes);
                let Ok((_, mut framing)) = super::head(&mut reader) else { continue };
                while let Ok(there) = framing.fill(&mut reader) {
                    let count = there.len();
                    if count == 0 {
                        break;
                    }
                    framing.consume(&mut reader, count);
                }
            }
        },
    }]
}
