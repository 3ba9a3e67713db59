//! Lists of CPUs in the format of the kernel: `0-3,8`.

use std::collections::BTreeSet;

/// The number of CPUs in a list; `None`: it is invalid.
#[must_use]
pub fn count(text: &str) -> Option<u32> {
    let mut cpus = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u16>().ok()?, last.parse::<u16>().ok()?);
        if first > last {
            return None;
        }
        cpus.extend(first..=last);
    }
    u32::try_from(cpus.len()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn cpus_of_a_list_are_counted() {
        for (text, expected) in [
            ("0", Some(1)),
            ("0-7", Some(8)),
            ("0-1,4", Some(3)),
            ("0-3,2-4", Some(5)),
            ("", None),
            ("a", None),
            ("5-2", None),
            ("0-4294967295", None),
        ] {
            assert_eq!(count(text), expected, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn random_cpu_list_causes_no_panic(text: String) {
            let _ = count(&text);
        }
    }
}
