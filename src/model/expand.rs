//! `$(NAME)` in env values, commands and arguments (Go: third_party/forked/golang/expansion), and
//! the limit of their total size.
//!
//! The kernel limits the arguments and the environment of a new program to a quarter of its stack
//! limit: 2 MiB by default (execve(2)); no container can be started with more. Without a limit
//! here, 40 variables of which each refers to the one before it twice would take a terabyte. Sub
//! paths of mounts count, too, though they are not arguments: they are expanded from the same
//! variables. Single texts have no separate limit: the kernel's (32 pages) depends on the machine,
//! and not every runtime starts programs on this kernel.

use std::borrow::Cow;

/// Bytes of environment and arguments together, counted as the kernel does.
pub const MAX_BYTES: usize = 2 << 20;
/// The limit of bytes that are produced in between, as a variable may be defined many times.
const WORK_LIMIT: usize = 8 * MAX_BYTES;
/// The kernel also stores the terminating zero and a pointer for each text.
const OVERHEAD: usize = 1 + size_of::<usize>();

/// Environment and arguments are larger than [`MAX_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("larger than {MAX_BYTES} bytes")]
pub struct TooLarge;

/// The part of [`MAX_BYTES`] that is left for the texts of one program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    room: usize,
    work: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Budget { room: MAX_BYTES, work: WORK_LIMIT }
    }
}

impl Budget {
    /// Reserves the size of one more text.
    ///
    /// # Errors
    /// When less is left; then nothing is reserved.
    pub fn reserve(&mut self, bytes: usize) -> Result<(), TooLarge> {
        let cost = bytes.saturating_add(OVERHEAD);
        let (room, work) = (self.room.checked_sub(cost), self.work.checked_sub(cost));
        (self.room, self.work) = room.zip(work).ok_or(TooLarge)?;
        Ok(())
    }

    /// Releases the size of a text that is no longer needed. The work that it cost still counts.
    pub fn release(&mut self, bytes: usize) {
        self.room = self.room.saturating_add(bytes.saturating_add(OVERHEAD)).min(MAX_BYTES);
    }

    /// The size of the largest text that still fits.
    pub fn left(&self) -> usize {
        self.room.min(self.work).saturating_sub(OVERHEAD)
    }

    /// Like [`expand`], within this budget, from which the size of the result is subtracted.
    ///
    /// # Errors
    /// When the result is too large.
    pub fn expand<'a>(
        &mut self,
        text: &str,
        lookup: impl Fn(&str) -> Option<Cow<'a, str>>,
    ) -> Result<String, TooLarge> {
        let expanded = expand(text, lookup, self.left())?;
        self.reserve(expanded.len())?;
        Ok(expanded)
    }
}

/// Replaces every `$(NAME)` that `lookup` has. `$$` is a literal dollar sign; an unknown or
/// unterminated reference is not changed. The time is linear in the text and the values.
///
/// # Errors
/// When the result would have more than `limit` bytes.
pub fn expand<'a>(
    text: &str,
    lookup: impl Fn(&str) -> Option<Cow<'a, str>>,
    limit: usize,
) -> Result<String, TooLarge> {
    let mut out = Bounded { text: String::with_capacity(text.len().min(limit)), limit };
    let mut rest = text;
    // Without this, each unterminated reference would search the whole rest of the text.
    let mut may_end = true;
    while let Some(offset) = rest.find('$') {
        let (before, tail) = rest.split_at(offset);
        out.push(before)?;
        rest = tail.get(1..).unwrap_or_default();
        if let Some(after) = rest.strip_prefix('$') {
            out.push("$")?;
            rest = after;
            continue;
        }
        let reference = rest.strip_prefix('(').filter(|_| may_end);
        if let Some((name, after)) = reference.and_then(|tail| tail.split_once(')')) {
            match lookup(name) {
                Some(value) => out.push(&value)?,
                None => {
                    out.push("$(")?;
                    out.push(name)?;
                    out.push(")")?;
                }
            }
            rest = after;
        } else {
            may_end &= reference.is_none();
            out.push("$")?;
        }
    }
    out.push(rest)?;
    Ok(out.text)
}

struct Bounded {
    text: String,
    limit: usize,
}

impl Bounded {
    fn push(&mut self, more: &str) -> Result<(), TooLarge> {
        if more.len() > self.limit - self.text.len() {
            return Err(TooLarge);
        }
        self.text.push_str(more);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn any_text_is_expanded(text in "[$()A-Cü]{0,40}", limit in 0_usize..60) {
            let value = |name: &str| (name != "B").then(|| Cow::Owned(name.repeat(2)));
            let whole = expand(&text, value, usize::MAX).unwrap();
            let bounded = expand(&text, value, limit);
            let expected = if whole.len() <= limit { Ok(whole) } else { Err(TooLarge) };
            proptest::prop_assert_eq!(bounded, expected);
        }
    }

    fn lookup(name: &str) -> Option<Cow<'static, str>> {
        match name {
            "A" => Some("1".into()),
            "E" => Some("".into()),
            "D" => Some("$(A)".into()),
            _ => None,
        }
    }

    #[test]
    fn dollar_signs_escape_themselves_and_begin_references() {
        for (text, expected) in [
            ("", ""),
            ("plain", "plain"),
            ("$(A)", "1"),
            ("x-$(A)-$(NOPE)-$$(A)", "x-1-$(NOPE)-$(A)"),
            ("$$$(A)", "$1"),
            ("$$$$(A)", "$$(A)"),
            ("$(A", "$(A"),
            ("$A $x $", "$A $x $"),
            ("$(E)|", "|"),
            ("$(D)", "$(A)"),
            ("$($(A))", "$($(A))"),
            ("$()", "$()"),
            ("ü$(A)ü", "ü1ü"),
        ] {
            assert_eq!(expand(text, lookup, MAX_BYTES).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn a_large_value_that_is_named_often_is_too_large() {
        let value = "x".repeat(1 << 20);
        let text = "$(V)".repeat(170_000);
        assert_eq!(expand(&text, |_| Some(value.as_str().into()), MAX_BYTES), Err(TooLarge));
        let twice = expand("$(V)$(V)", |_| Some(value.as_str().into()), MAX_BYTES);
        assert_eq!(twice.map(|text| text.len()), Ok(MAX_BYTES));
    }

    /// Searching the end for each of a million beginnings would take minutes.
    #[test]
    fn references_without_an_end_take_no_time() {
        let text = "$(".repeat(MAX_BYTES / 2);
        let expanded = crate::util::testing::unblocked({
            let text = text.clone();
            move || expand(&text, lookup, MAX_BYTES)
        });
        assert_eq!(expanded, Ok(text));
    }

    #[test]
    fn all_texts_share_one_budget() {
        let mut budget = Budget::default();
        let half = MAX_BYTES / 2 - OVERHEAD;
        assert_eq!(budget.left(), MAX_BYTES - OVERHEAD);
        assert_eq!((budget.reserve(half), budget.left()), (Ok(()), half));
        assert_eq!(budget.reserve(half + 1), Err(TooLarge));
        assert_eq!((budget.reserve(half), budget.left()), (Ok(()), 0));
        assert_eq!(budget.reserve(0), Err(TooLarge));
        budget.release(half);
        assert_eq!(budget.expand("$(A)", lookup), Ok("1".to_owned()));
        assert_eq!(budget.left(), half - 1 - OVERHEAD);
        // A replaced value frees its size, but the work still counts.
        let mut times = 0;
        while budget.reserve(1000).is_ok() {
            budget.release(1000);
            times += 1;
        }
        assert!((10_000..20_000).contains(&times), "{times}");
    }
}
