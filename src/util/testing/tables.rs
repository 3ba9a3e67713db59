//! Tables of cases and their outcomes, as snapshots.

use expect_test::Expect;

/// The case that has an empty text.
const EMPTY: &str = "none";

/// A function from cases to outcomes.
pub(crate) struct Table<F>(F);

pub(crate) fn table<F: Fn(&str) -> String>(outcome: F) -> Table<F> {
    Table(outcome)
}

/// The outcomes for each restart policy, which is the first argument of `outcome`. Policies with the same
/// outcome share it.
pub(crate) fn table_of_policies(outcome: impl Fn(&str, &str) -> String) -> Table<impl Fn(&str) -> String> {
    table(move |case| {
        let mut outcomes: Vec<(Vec<&str>, String)> = Vec::new();
        for policy in ["Always", "OnFailure", "Never"] {
            let next = outcome(policy, case);
            match outcomes.last_mut() {
                Some((policies, same)) if *same == next => policies.push(policy),
                _ => outcomes.push((vec![policy], next)),
            }
        }
        if let [(_, same)] = outcomes.as_slice() {
            return same.clone();
        }
        let outcomes =
            outcomes.iter().map(|(policies, outcome)| format!("{}: {outcome}", policies.join(", ")));
        outcomes.collect::<Vec<_>>().join("; ")
    })
}

impl<F: Fn(&str) -> String> Table<F> {
    /// Compares lines `CASE -> OUTCOME`: each case is also the input. A new case needs no outcome,
    /// `UPDATE_EXPECT=1` adds it. Lines that begin with `#` are comments.
    pub(crate) fn check(&self, expected: Expect) {
        let lines = expected.data().lines().map(|line| line.split(" -> ").next().unwrap_or_default().trim());
        let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
        let cases = lines.iter().filter(|line| !line.starts_with('#'));
        let width = cases.map(|case| case.len()).max().expect("a table has cases");
        let row = |line: &&str| match *line {
            comment if comment.starts_with('#') => format!("{comment}\n"),
            case => format!("{case:<width$} -> {}\n", (self.0)(if case == EMPTY { "" } else { case })),
        };
        expected.assert_eq(&lines.iter().map(row).collect::<String>());
    }
}
