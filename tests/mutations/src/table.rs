//! The table of mutations and the share that was found.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::choice::Mutation;

/// A row of the results: what a tier found.
pub(crate) struct Outcome {
    number: usize,
    tier: String,
    /// `found`, or `survived`.
    verdict: String,
    /// The test, or a remark.
    by: String,
    /// Whether a test came to the mutated place; `None` if that was not measured.
    reached: Option<bool>,
}

impl Outcome {
    pub(crate) fn from_row(row: &str) -> Option<Outcome> {
        let cells: Vec<&str> = row.split('\t').collect();
        let [number, tier, verdict, _seconds, reached, by] = cells[..] else { return None };
        Some(Outcome {
            number: number.parse().ok()?,
            tier: tier.to_owned(),
            verdict: verdict.to_owned(),
            by: by.to_owned(),
            reached: match reached {
                "yes" => Some(true),
                "no" => Some(false),
                _ => None,
            },
        })
    }

    fn found(&self) -> bool {
        self.verdict == "found"
    }
}

fn percent(part: usize, whole: usize) -> String {
    let percent = (part * 100).checked_div(whole).unwrap_or(0);
    format!("{part} of {whole} ({percent} %)")
}

/// How many mutations a tier found, of those that it ran. A tier has all steps that begin with its name.
fn share(results: &[Outcome], tier: &str) -> String {
    let own = || {
        let rest = |outcome: &&Outcome| outcome.tier.strip_prefix(tier).map(str::to_owned);
        results
            .iter()
            .filter(move |outcome| rest(outcome).is_some_and(|rest| rest.is_empty() || rest.starts_with(' ')))
    };
    let ran: BTreeSet<usize> = own().map(|outcome| outcome.number).collect();
    let found: BTreeSet<usize> =
        own().filter(|outcome| outcome.found()).map(|outcome| outcome.number).collect();
    percent(found.len(), ran.len())
}

/// The result of one mutation, in words.
fn verdict(outcomes: &[&Outcome]) -> String {
    if let Some(found) = outcomes.iter().find(|outcome| outcome.found()) {
        return format!("{}: {}", found.tier, found.by);
    }
    if outcomes.is_empty() {
        return "not run".to_owned();
    }
    let mut text = "survived".to_owned();
    let measured: Vec<bool> = outcomes.iter().filter_map(|outcome| outcome.reached).collect();
    if !measured.is_empty() && !measured.contains(&true) {
        text.push_str(", not reached by a test");
    }
    for remark in outcomes.iter().map(|outcome| &outcome.by).filter(|remark| !remark.is_empty()) {
        let _ = write!(text, "; {remark}");
    }
    text
}

pub(crate) fn text(chosen: &[Mutation], results: &[Outcome]) -> String {
    let mut text = String::new();
    for mutation in chosen {
        let own: Vec<&Outcome> = results.iter().filter(|outcome| outcome.number == mutation.number).collect();
        let _ = writeln!(text, "{:3} {} ({})", mutation.number, mutation.place(), mutation.kind);
        let _ = writeln!(text, "    - {}\n    + {}", mutation.before, mutation.after);
        if !results.is_empty() {
            let _ = writeln!(text, "    {}", verdict(&own));
        }
    }
    if results.is_empty() {
        return text;
    }
    let _ = writeln!(text, "\nfound, of those that each tier ran:");
    let mut printed: Vec<&str> = Vec::new();
    for result in results {
        // A tier of several steps has a line for all of them.
        let whole = result.tier.split(' ').next().unwrap_or_default();
        for tier in [whole, &result.tier] {
            if !printed.contains(&tier) {
                printed.push(tier);
                let _ = writeln!(text, "  {tier:12} {}", share(results, tier));
            }
        }
    }
    let numbers = results.iter().filter(|outcome| outcome.found()).map(|outcome| outcome.number);
    let found: BTreeSet<usize> = numbers.collect();
    let _ = writeln!(text, "  {:12} {}", "all", percent(found.len(), chosen.len()));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_mutations_that_a_tier_ran() {
        let rows = [
            "1\tunit room\tsurvived\t3\tyes\t",
            "1\tunit rest\tfound\t3\tyes\ta::b",
            "2\tunit room\tsurvived\t3\tno\t",
            "2\tfaults\tsurvived\t9\t-\tc",
        ];
        let results: Vec<Outcome> = rows.iter().filter_map(|row| Outcome::from_row(row)).collect();
        let mutation = |number: usize| format!("{number}\t0\tpods\tlogic\tsrc/a.rs\t7\t7\t8\ta\tb");
        let chosen: Vec<Mutation> =
            (1..=3).map(|number| Mutation::from_row(&mutation(number)).unwrap()).collect();
        let text = text(&chosen, &results);
        for line in [
            "    unit rest: a::b",
            "    survived, not reached by a test; c",
            "    not run",
            "  unit         1 of 2 (50 %)",
            "  unit room    0 of 2 (0 %)",
            "  unit rest    1 of 1 (100 %)",
            "  faults       0 of 1 (0 %)",
            "  all          1 of 3 (33 %)",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
