//! Hostile certificates of clients, and bundles of authorities.

use std::sync::LazyLock;

use jiff::Timestamp;

use super::Authorities;
use crate::transport::fuzz::{certificate_seeds, hostile_certificates, of_pem};
use crate::util::fuzzing::{Budget, Target, repeated};
use crate::util::threads::Stack;

/// A message of a handshake has 16 MiB at most, and the TLS library accepts 64 KiB; this target
/// measures how the cost grows.
const CERTIFICATE_BYTES: usize = 256 * 1024;

const CLIENTS: &[u8] = include_bytes!("../../server/auth/data/clients.crt");

static AUTHORITIES: LazyLock<Authorities> = LazyLock::new(|| Authorities::of_pem(CLIENTS).unwrap());

pub(in crate::transport) fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "transport/client_certificate",
            // The stack size of a connection's thread.
            stack: Stack::Small,
            max_bytes: CERTIFICATE_BYTES,
            // At most 32 signatures are checked, without optimization.
            budget: Budget { base: std::time::Duration::from_secs(5), ..Budget::LINEAR },
            worst: hostile_certificates,
            seeds: certificate_seeds(),
            run: |bytes| {
                let now = Timestamp::from_second(1_790_000_000).unwrap();
                // As the client's own certificate, as all of the others, and after a valid one.
                let good = of_pem(JANE);
                for chain in [vec![bytes.to_vec()], vec![bytes.to_vec(); 20], vec![good, bytes.to_vec()]] {
                    let verification = AUTHORITIES.verify(&chain, now);
                    assert!(verification.tried <= 33, "{} were tried", verification.tried);
                }
            },
        },
        Target {
            name: "transport/authorities",
            // Read at the start and when the file changes.
            stack: Stack::Small,
            max_bytes: 1 << 20,
            budget: Budget { per_mib: std::time::Duration::from_secs(20), per_byte: 100, ..Budget::LINEAR },
            worst: |max| {
                let all = |piece: &str| repeated("", |_| piece.to_owned(), "", max);
                let (begin, end) = ("-----BEGIN CERTIFICATE-----\n", "-----END CERTIFICATE-----\n");
                let clients = String::from_utf8_lossy(CLIENTS);
                vec![
                    ("one certificate again and again", all(&clients)),
                    ("begins", all(begin)),
                    ("ends", all(end)),
                    ("empty ones", all(&format!("{begin}{end}"))),
                    ("one without an end", repeated(begin, |_| "AAAA\n".to_owned(), "", max)),
                    ("one long line", repeated(begin, |_| "AAAA".to_owned(), end, max)),
                    ("lines", all("\n")),
                    ("dashes", all("-")),
                    ("zeros", vec![0; max]),
                ]
            },
            seeds: &[CLIENTS],
            run: |bytes| {
                if let Ok(authorities) = Authorities::of_pem(bytes) {
                    let _ = authorities.count(Timestamp::UNIX_EPOCH);
                }
            },
        },
    ]
}

const JANE: &str = include_str!("../../server/auth/data/jane.crt");
