//! Releases memory that only the start needed.

use std::cell::Cell;
use std::fs;
use std::sync::OnceLock;

use rustix::mm::{Advice, madvise};
use rustix::param::page_size;

/// Removes this program's code and constants from its resident memory. The pages are clean and stay in the page
/// cache; pages that are used again are mapped one by one, without a disk. Most are not: the kernel
/// maps sixteen pages around each one that the start used.
///
/// Returns the number of bytes; 0 where the kernel does not report them.
pub fn release_code() -> usize {
    let (Ok(maps), Ok(program)) = (fs::read_to_string("/proc/self/maps"), fs::read_link("/proc/self/exe"))
    else {
        return 0;
    };
    let Some(program) = program.to_str() else { return 0 };
    let mut given = 0;
    for (start, length) in code_of(&maps, program) {
        // SAFETY: the range is a private, read-only mapping of this program's own file, as the
        // kernel lists it now; such mappings last as long as the process. It was never written
        // to: code is not relocated, and relocated data, which is read-only later, is not in the
        // mapping of the start of the file. So the kernel reads the same content back.
        #[expect(unsafe_code, reason = "madvise takes a pointer")]
        let done =
            unsafe { madvise(std::ptr::with_exposed_provenance_mut(start), length, Advice::LinuxDontNeed) };
        if done.is_ok() {
            given += length;
        }
    }
    given
}

/// Size below the caller that is not released: the frames of this call. Code that is not optimized
/// keeps every intermediate value in its frame. A signal's frame ends before its thread continues.
const STACK_ROOM: usize = if cfg!(debug_assertions) { 16 * 1024 } else { 1024 };

thread_local! {
    /// The lowest address of this thread's stack that may be released.
    static LOW: Cell<usize> = const { Cell::new(0) };
}

/// Records the end of this thread's stack of `bytes`. Must be called first in a thread.
///
/// The frames above and the thread's static data may be part of the size. They are assumed to take
/// less than a quarter. The first call verifies this: both are the same in every thread.
pub(super) fn note_stack(bytes: usize) {
    static VERIFIED: OnceLock<bool> = OnceLock::new();
    let local = 0_u8;
    let stack_address = std::ptr::from_ref(&local).expose_provenance();
    let low = stack_address.saturating_sub(bytes / 4 * 3).next_multiple_of(page_size());
    let inside = || {
        mapping_start(stack_address).is_some_and(|start| stack_address.saturating_sub(start) >= bytes / 4 * 3)
    };
    if *VERIFIED.get_or_init(inside) {
        LOW.set(low);
    }
}

/// The start of the mapping that contains `address`.
fn mapping_start(address: usize) -> Option<usize> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines()
        .filter_map(range)
        .find(|(start, end)| (*start..*end).contains(&address))
        .map(|(start, _)| start)
}

/// Start and end in a line of `/proc/self/maps`.
fn range(line: &str) -> Option<(usize, usize)> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
}

/// Releases the stack pages that deeper calls of this thread have used. To be called before a
/// thread waits for a long time, near the bottom of its stack: a step of a pod uses tens of KiB,
/// and then its thread waits for a minute.
///
/// Does nothing in a thread whose stack was not recorded.
#[inline(never)]
pub fn release_stack() {
    let low = LOW.get();
    let local = 0_u8;
    let top = (std::ptr::from_ref(&local).expose_provenance() - STACK_ROOM) & !(page_size() - 1);
    if low == 0 || low >= top {
        return;
    }
    // SAFETY: the range lies on this thread's own stack, as recorded at its start, and below every
    // frame that is in use. Nothing below the stack pointer is read before it is written, so zeros
    // do no harm. Both ends are aligned to pages.
    #[expect(unsafe_code, reason = "madvise takes a pointer")]
    let _ = unsafe { madvise(std::ptr::with_exposed_provenance_mut(low), top - low, Advice::LinuxDontNeed) };
}

/// The start and length of each read-only mapping of `program` that has code, and of the one with
/// the start of the file, which has constants.
fn code_of(maps: &str, program: &str) -> Vec<(usize, usize)> {
    let mapping = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (_, permissions, offset) = (words.next()?, words.next()?, words.next()?);
        let is_start = permissions == "r--p" && offset.bytes().all(|digit| digit == b'0');
        if !(permissions == "r-xp" || is_start) || words.nth(2)? != program {
            return None;
        }
        let (start, end) = range(line)?;
        Some((start, end.checked_sub(start)?))
    };
    maps.lines().filter_map(mapping).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_and_constants_of_own_executable_are_found() {
        let maps = "00400000-00500000 r--p 00000000 fe:00 12 /usr/bin/x\n\
                    00500000-00a00000 r-xp 00100000 fe:00 12 /usr/bin/x\n\
                    00a00000-00b00000 r--p 00600000 fe:00 12 /usr/bin/x\n\
                    00b00000-00c00000 rw-p 00700000 fe:00 12 /usr/bin/x\n\
                    7f0000000000-7f0000100000 r-xp 00000000 fe:00 13 /lib/libc.so.6\n\
                    7ffff7fc1000-7ffff7fc3000 r-xp 00000000 00:00 0 [vdso]\n\
                    zz-00 r-xp 0 0 0 /usr/bin/x\n\n";
        let expected = [(0x0040_0000, 0x0010_0000), (0x0050_0000, 0x0050_0000)];
        assert_eq!(code_of(maps, "/usr/bin/x"), expected);
        assert!(code_of(maps, "/usr/bin/y").is_empty());
    }

    #[test]
    fn the_program_continues_after_the_release() {
        assert!(release_code() > 0);
        assert_eq!("still here".len(), 10);
    }

    #[inline(never)]
    fn deep(level: u32) -> u64 {
        let filled = [u64::from(level); 512];
        let below = if level == 0 { 0 } else { deep(level - 1) };
        std::hint::black_box(&filled).iter().sum::<u64>() + below
    }

    #[test]
    fn a_thread_continues_after_the_release() {
        let (sum_sender, sum_receiver) = crossbeam_channel::bounded(1);
        let body = move |_| {
            let values = [7_u64; 64];
            let first = deep(12);
            release_stack();
            let _ = sum_sender.send((first, deep(12), std::hint::black_box(values).iter().sum::<u64>()));
        };
        let _running = crate::util::threads::spawn(
            "t/stack",
            crate::util::threads::Stack::Small,
            crate::util::threads::OnDeath::Unsupervised,
            body,
        )
        .unwrap();
        let sum = (0..=12).map(|level| level * 512).sum();
        assert_eq!(sum_receiver.recv_timeout(std::time::Duration::from_secs(10)), Ok((sum, sum, 7 * 64)));
    }

    /// Resident KiB of the mapping with an address.
    fn resident_kib(address: usize) -> usize {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in maps.lines() {
            if let Some((start, end)) = range(line) {
                inside = (start..end).contains(&address);
            } else if let Some(size) = line.strip_prefix("Rss:").filter(|_| inside) {
                return size.trim().trim_end_matches(" kB").parse().unwrap();
            }
        }
        panic!("no mapping has the address");
    }

    #[test]
    fn touched_stack_pages_are_released() {
        let long = std::time::Duration::from_secs(10);
        let (address_tx, address) = crossbeam_channel::bounded(0);
        let (next_tx, next) = crossbeam_channel::bounded::<()>(0);
        let body = move |_| {
            let local = 0_u8;
            let stack_address = std::ptr::from_ref(&local).addr();
            for release in [false, true] {
                std::hint::black_box(deep(32));
                if release {
                    release_stack();
                }
                let _ = (address_tx.send(stack_address), next.recv());
            }
        };
        use crate::util::threads::{OnDeath, Stack, spawn};
        let _running = spawn("t/stack", Stack::Small, OnDeath::Unsupervised, body).unwrap();
        let before = resident_kib(address.recv_timeout(long).unwrap());
        next_tx.send(()).unwrap();
        let after = resident_kib(address.recv_timeout(long).unwrap());
        drop(next_tx);
        assert!(before >= 128 && after <= before - 96, "{before} KiB, then {after} KiB");
    }
}
