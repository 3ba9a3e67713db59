//! Reads and writes of a cgroup by disk. The parsers take text and are pure.

use super::sample::{DiskStatKind, DiskTraffic, Operation};

/// The sets of files that version 1 may have, by scheduler and age of the kernel; the first one
/// whose first file has a disk is used (runc: libcontainer/cgroups/fs/blkio.go). Counters of
/// sectors are left out: they do not distinguish reads and writes.
pub(super) const FILES: [&[(&str, DiskStatKind)]; 4] = [
    &[
        ("blkio.bfq.io_service_bytes_recursive", DiskStatKind::Bytes),
        ("blkio.bfq.io_serviced_recursive", DiskStatKind::Served),
        ("blkio.bfq.io_merged_recursive", DiskStatKind::Merged),
        ("blkio.bfq.io_queued_recursive", DiskStatKind::Queued),
        ("blkio.bfq.io_service_time_recursive", DiskStatKind::Time),
    ],
    &[
        ("blkio.io_service_bytes_recursive", DiskStatKind::Bytes),
        ("blkio.io_serviced_recursive", DiskStatKind::Served),
        ("blkio.io_merged_recursive", DiskStatKind::Merged),
        ("blkio.io_queued_recursive", DiskStatKind::Queued),
        ("blkio.io_service_time_recursive", DiskStatKind::Time),
    ],
    &[
        ("blkio.throttle.io_service_bytes_recursive", DiskStatKind::Bytes),
        ("blkio.throttle.io_serviced_recursive", DiskStatKind::Served),
    ],
    &[
        ("blkio.throttle.io_service_bytes", DiskStatKind::Bytes),
        ("blkio.throttle.io_serviced", DiskStatKind::Served),
    ],
];

/// Lines of version 1 such as `8:0 Read 4096`.
pub(super) fn read_v1(disks: &mut Vec<DiskTraffic>, text: &str, counted: DiskStatKind) {
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some(device), Some(name), Some(Ok(value))) =
            (words.next(), words.next(), words.next().map(str::parse::<u64>))
        else {
            continue;
        };
        use Operation::{Async, Discard, Read, Sync, Total, Write};
        let known = [Read, Write, Sync, Async, Discard, Total]
            .into_iter()
            .find(|operation| operation.as_str() == name);
        if let Some(operation) = known {
            disk(disks, device).counts.push((counted, operation, value));
        }
    }
}

/// Lines of version 2 such as `8:0 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0 dios=0`.
pub(super) fn read_v2(text: &str) -> Vec<DiskTraffic> {
    let mut disks = Vec::new();
    for line in text.lines() {
        let Some((device, rest)) = line.split_once(' ') else { continue };
        for (name, value) in rest.split_whitespace().filter_map(|word| word.split_once('=')) {
            let (counted, operation) = match name {
                "rbytes" => (DiskStatKind::Bytes, Operation::Read),
                "wbytes" => (DiskStatKind::Bytes, Operation::Write),
                "rios" => (DiskStatKind::Served, Operation::Read),
                "wios" => (DiskStatKind::Served, Operation::Write),
                "cost.usage" => (DiskStatKind::CostUsage, Operation::Count),
                "cost.wait" => (DiskStatKind::CostWait, Operation::Count),
                "cost.indebt" => (DiskStatKind::CostDebt, Operation::Count),
                "cost.indelay" => (DiskStatKind::CostDelay, Operation::Count),
                _ => continue,
            };
            if let Ok(value) = value.parse() {
                disk(&mut disks, device).counts.push((counted, operation, value));
            }
        }
    }
    disks
}

fn disk<'a>(disks: &'a mut Vec<DiskTraffic>, device: &str) -> &'a mut DiskTraffic {
    let index = disks.iter().position(|disk| disk.device == device).unwrap_or_else(|| {
        disks.push(DiskTraffic { device: device.to_owned(), ..DiskTraffic::default() });
        disks.len() - 1
    });
    // The index is valid.
    &mut disks[index]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn version_1_counts_by_operation() {
        let mut disks = Vec::new();
        let bytes = "8:0 Read 4096\n8:0 Write 0\n8:0 Sync 1\n8:0 Async 2\n8:0 Discard 3\n8:0 Total 4096\n\
                     259:1 Read 7\nTotal 4103\n8:16 6792\n8:0 Other 5\n8:0 Read many\n";
        read_v1(&mut disks, bytes, DiskStatKind::Bytes);
        read_v1(&mut disks, "8:0 Read 2\n8:0 Total 2\nTotal 2\n", DiskStatKind::Served);
        let names: Vec<&str> = disks.iter().map(|disk| disk.device.as_str()).collect();
        assert_eq!(names, ["8:0", "259:1"]);
        let get = |counted, operation| disks[0].get(counted, operation);
        assert_eq!(get(DiskStatKind::Bytes, Operation::Read), Some(4096));
        assert_eq!(get(DiskStatKind::Bytes, Operation::Discard), Some(3));
        assert_eq!(get(DiskStatKind::Bytes, Operation::Total), Some(4096));
        assert_eq!(get(DiskStatKind::Served, Operation::Read), Some(2));
        assert_eq!(get(DiskStatKind::Served, Operation::Write), Some(0), "counted, but not this");
        assert_eq!(get(DiskStatKind::Merged, Operation::Read), None, "not counted at all");
        assert_eq!(disks[1].get(DiskStatKind::Served, Operation::Read), None);
    }

    /// As a kernel 6.1 wrote it with the cost model switched on.
    #[test]
    fn version_2_has_one_line_per_disk() {
        let disks = read_v2(
            "8:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=5 dios=6 cost.vrate=100.00 cost.usage=11 cost.wait=12 cost.indebt=13 cost.indelay=14\n259:1 \n7:0 rbytes=x\n",
        );
        assert_eq!(disks.len(), 1, "{disks:?}");
        for (counted, operation, value) in [
            (DiskStatKind::Bytes, Operation::Read, 4096),
            (DiskStatKind::Bytes, Operation::Write, 8192),
            (DiskStatKind::Served, Operation::Read, 1),
            (DiskStatKind::Served, Operation::Write, 2),
            (DiskStatKind::CostUsage, Operation::Count, 11),
            (DiskStatKind::CostWait, Operation::Count, 12),
            (DiskStatKind::CostDebt, Operation::Count, 13),
            (DiskStatKind::CostDelay, Operation::Count, 14),
        ] {
            assert_eq!(disks[0].get(counted, operation), Some(value), "{counted:?}");
        }
        assert_eq!(disks[0].counts.len(), 8, "{disks:?}");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text: String) {
            let _ = read_v2(&text);
            read_v1(&mut Vec::new(), &text, DiskStatKind::Bytes);
        }
    }
}
