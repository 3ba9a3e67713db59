//! Sets of CPUs.

use std::fmt;

/// CPU numbers are below this, as in the kernel (`NR_CPUS` is at most 8,192).
pub const MOST_CPUS: u32 = 8192;

const BITS: u32 = u64::BITS;

/// A set of CPUs by number. The numbers are below [`MOST_CPUS`].
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct CpuSet {
    /// 64 CPUs each. The last one is not zero, so that equal sets are equal.
    words: Vec<u64>,
}

/// A text is not a list of CPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a list of CPUs below {MOST_CPUS}, such as 0-3,8")]
pub struct NotCpus {
    /// The text.
    pub text: String,
}

impl CpuSet {
    /// The set without CPUs.
    #[must_use]
    pub fn new() -> CpuSet {
        CpuSet::default()
    }

    /// Parses the list format of the kernel: `0-3,8`. An empty text is the empty set, as upstream
    /// (k8s.io/utils/cpuset).
    ///
    /// # Errors
    /// When the text is not such a list, or has a CPU above the limit.
    pub fn parse(text: &str) -> Result<CpuSet, NotCpus> {
        let mut set = CpuSet::new();
        if text.is_empty() {
            return Ok(set);
        }
        let wrong = || NotCpus { text: text.chars().take(100).collect() };
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first).ok_or_else(wrong)?, number(last).ok_or_else(wrong)?);
            if first > last {
                return Err(wrong());
            }
            (first..=last).for_each(|cpu| set.insert(cpu));
        }
        Ok(set)
    }

    /// Adds a CPU. Numbers above the limit are left out.
    pub fn insert(&mut self, cpu: u32) {
        let Some((word, bit)) = word_and_bit(cpu) else { return };
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        if let Some(word) = self.words.get_mut(word) {
            *word |= bit;
        }
    }

    /// Whether it has the CPU.
    #[must_use]
    pub fn contains(&self, cpu: u32) -> bool {
        word_and_bit(cpu).and_then(|(word, bit)| Some(self.words.get(word)? & bit != 0)).unwrap_or(false)
    }

    /// How many CPUs it has.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether it has no CPU.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0_u32..).zip(&self.words).flat_map(|(index, word)| {
            (0..BITS).filter(move |bit| word & (1 << bit) != 0).map(move |bit| index * BITS + bit)
        })
    }

    /// The CPUs in either.
    #[must_use]
    pub fn union(&self, other: &CpuSet) -> CpuSet {
        self.combined(other, |ours, theirs| ours | theirs)
    }

    /// The CPUs in both.
    #[must_use]
    pub fn intersection(&self, other: &CpuSet) -> CpuSet {
        self.combined(other, |ours, theirs| ours & theirs)
    }

    /// The CPUs that are not in `other`.
    #[must_use]
    pub fn difference(&self, other: &CpuSet) -> CpuSet {
        self.combined(other, |ours, theirs| ours & !theirs)
    }

    /// Whether no CPU is in both.
    #[must_use]
    pub fn is_disjoint(&self, other: &CpuSet) -> bool {
        self.words.iter().zip(&other.words).all(|(ours, theirs)| ours & theirs == 0)
    }

    /// Whether each of its CPUs is in `other`.
    #[must_use]
    pub fn is_subset(&self, other: &CpuSet) -> bool {
        self.difference(other).is_empty()
    }

    fn combined(&self, other: &CpuSet, combine: impl Fn(u64, u64) -> u64) -> CpuSet {
        let word = |set: &CpuSet, index: usize| set.words.get(index).copied().unwrap_or(0);
        let most = self.words.len().max(other.words.len());
        let mut words: Vec<u64> =
            (0..most).map(|index| combine(word(self, index), word(other, index))).collect();
        while words.last() == Some(&0) {
            words.pop();
        }
        CpuSet { words }
    }
}

fn word_and_bit(cpu: u32) -> Option<(usize, u64)> {
    (cpu < MOST_CPUS).then_some((usize::try_from(cpu / BITS).ok()?, 1 << (cpu % BITS)))
}

fn number(text: &str) -> Option<u32> {
    // A sign would be accepted by `parse`.
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse::<u32>().ok())?
        .filter(|n| *n < MOST_CPUS)
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> CpuSet {
        let mut set = CpuSet::new();
        cpus.into_iter().for_each(|cpu| set.insert(cpu));
        set
    }
}

/// The list format of the kernel, as upstream prints it: ranges also for two CPUs.
impl fmt::Display for CpuSet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            if first == last {
                write!(out, "{separator}{first}")?;
            } else {
                write!(out, "{separator}{first}-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "[{self}]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(text: &str) -> CpuSet {
        CpuSet::parse(text).unwrap()
    }

    #[test]
    fn lists_are_parsed_and_printed_in_the_format_of_the_kernel() {
        for (text, printed) in [
            ("", ""),
            ("0", "0"),
            ("0-3,8", "0-3,8"),
            ("8,0,1", "0-1,8"),
            ("1-3,2-5", "1-5"),
            ("8191", "8191"),
        ] {
            assert_eq!(set(text).to_string(), printed, "{text:?}");
        }
    }

    #[test]
    fn invalid_lists_are_refused() {
        for text in ["a", "1-", "-1", "3-1", "0,", "+1", " 0", "0-8192", "4294967296", "1-2-3", "0\n"] {
            assert!(CpuSet::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn sets_combine() {
        let (left, right) = (set("0-3,70"), set("2-5"));
        assert_eq!(left.union(&right), set("0-5,70"));
        assert_eq!(left.intersection(&right), set("2-3"));
        assert_eq!(left.difference(&right), set("0-1,70"));
        assert_eq!(left.difference(&set("70")), set("0-3"));
        assert!(!left.is_disjoint(&right) && left.is_disjoint(&set("4-9")));
        assert!(set("1,70").is_subset(&left) && !left.is_subset(&right));
        assert_eq!((left.len(), CpuSet::new().len()), (5, 0));
        assert!(left.contains(70) && !left.contains(71) && !left.contains(u32::MAX));
    }

    #[test]
    fn numbers_above_the_limit_are_left_out() {
        assert!(CpuSet::from_iter([MOST_CPUS, u32::MAX]).is_empty());
    }

    proptest! {
        #[test]
        fn what_is_printed_is_parsed_back(cpus: Vec<u16>) {
            let original: CpuSet = cpus.iter().map(|cpu| u32::from(*cpu)).collect();
            prop_assert_eq!(CpuSet::parse(&original.to_string()).unwrap(), original);
        }

        #[test]
        fn no_text_makes_it_panic(text: String) {
            let _ = CpuSet::parse(&text);
        }
    }
}
