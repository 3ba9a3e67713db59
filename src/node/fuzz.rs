//! Hostile leases of the API server.

use jiff::Timestamp;

use super::lease_object::{LeaseObject, Renewal};
use crate::kube::envelope::{self, Envelope};
use crate::util::fuzzing::{Budget, Target};
use crate::util::threads::Stack;
use crate::util::wire;

pub(crate) fn targets() -> Vec<Target> {
    vec![Target {
        name: "node/lease",
        stack: Stack::Large,
        // The limit of `Client::exchange`.
        max_bytes: 4 << 20,
        budget: Budget { per_byte: 200, ..Budget::LINEAR },
        worst: |max| {
            // A message in which a short field is repeated.
            let filled = |number: u32, field: &[u8]| {
                let mut object = Vec::new();
                wire::bytes(number, &field.repeat(max.saturating_sub(64) / field.len()), &mut object);
                let (api_version, kind) = (&b"coordination.k8s.io/v1"[..], &b"Lease"[..]);
                envelope::seal(&Envelope { api_version, kind, object: &object })
            };
            vec![
                ("names", filled(1, b"\x0a\0")),
                ("owners", filled(1, b"\x6a\0")),
                ("managed fields", filled(1, b"\x8a\x01\0")),
                ("durations", filled(2, b"\x10\x01")),
                ("fields of a later release", filled(3, b"\x10\x01")),
            ]
        },
        seeds: &[
            b"k8s\0\x0a\x1f\x0a\x16coordination.k8s.io/v1\x12\x05Lease\x12\x2e\
                \x0a\x18\x0a\x01n\x32\x017\x6a\x10\x0a\x04Node\x1a\x01n\x22\x01u\x2a\x02v1\x12\x12\
                \x0a\x01n\x10\x28\x22\x0b\x08\xee\x99\xb7\xd8\x06\x10\x80\x94\xef\x3a",
            br#"{"kind":"Lease","metadata":{"name":"n","managedFields":[{}],"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"n","uid":"u"}]},"spec":{"renewTime":"2026-01-01T00:00:00.000000Z"}}"#,
        ],
        run: |bytes| {
            if let Ok(mut lease) = LeaseObject::from_body(bytes) {
                let renewal = Renewal { node: "n", owner: Some("v"), seconds: 40, time: Timestamp::MAX };
                lease.renew(&renewal);
                let _ = (lease.to_body(), lease.owner("n"));
            }
        },
    }]
}
