//! Which sites are mutated.
//!
//! A site's place in the order is a hash of the seed and its text, without line numbers: most choices stay
//! when other code changes, so that two commits can be compared. Each room gets the same number, of as many
//! kinds and files as possible.

use std::collections::HashMap;

use crate::sites::{self, Kind, Site};

/// Longer lines are cut in the table.
const LONGEST: usize = 160;

/// A site that may be chosen, or was.
pub(crate) struct Mutation {
    /// From 1 on; 0 before the choice.
    pub(crate) number: usize,
    /// Its place in the order.
    key: u64,
    pub(crate) room: String,
    pub(crate) kind: String,
    pub(crate) file: String,
    /// The line in the file without mutations.
    line: usize,
    pub(crate) before: String,
    pub(crate) after: String,
    /// The first and last line in the file with mutations.
    pub(crate) lines: (usize, usize),
    /// `None` if it was read from the table.
    pub(crate) site: Option<Site>,
}

impl Mutation {
    pub(crate) fn place(&self) -> String {
        format!("{}:{}", self.file, self.line)
    }

    pub(crate) fn key_text(&self) -> String {
        format!("{:016x}", self.key)
    }

    pub(crate) fn to_row(&self) -> String {
        format!(
            "{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}",
            self.number,
            self.key_text(),
            self.room,
            self.kind,
            self.file,
            self.line,
            self.lines.0,
            self.lines.1,
            self.before,
            self.after
        )
    }

    pub(crate) fn from_row(row: &str) -> Option<Mutation> {
        let cells: Vec<&str> = row.split('\t').collect();
        let [number, key, room, kind, file, line, first, last, before, after] = cells[..] else {
            return None;
        };
        Some(Mutation {
            number: number.parse().ok()?,
            key: u64::from_str_radix(key, 16).ok()?,
            room: room.to_owned(),
            kind: kind.to_owned(),
            file: file.to_owned(),
            line: line.parse().ok()?,
            before: before.to_owned(),
            after: after.to_owned(),
            lines: (first.parse().ok()?, last.parse().ok()?),
            site: None,
        })
    }
}

/// FNV-1a, with a final step that mixes the upper bits.
fn hash(parts: &[&str]) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in parts.iter().flat_map(|part| part.bytes().chain([0])) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

/// A text on one line.
fn collapsed(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= LONGEST {
        return line;
    }
    line.chars().take(LONGEST).chain("...".chars()).collect()
}

/// The lines that a mutation changes, before and after it.
fn shown(text: &str, site: &Site) -> (String, String) {
    let anchor = site.anchor();
    let start = text[..anchor.start].rfind('\n').map_or(0, |offset| offset + 1);
    let end = text[anchor.end..].find('\n').map_or(text.len(), |offset| anchor.end + offset);
    let new = match &site.change {
        sites::Change::Operator { new, .. } => (*new).to_owned(),
        sites::Change::Remove => return (collapsed(&text[site.range.clone()]), "(removed)".to_owned()),
        _ => site.plain(text),
    };
    let after = format!("{}{new}{}", &text[start..anchor.start], &text[anchor.end..end]);
    (collapsed(&text[start..end]), collapsed(&after))
}

/// All sites of a file.
pub(crate) fn candidates(seed: u64, room: &str, file: &str, text: &str) -> Result<Vec<Mutation>, String> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut found = Vec::new();
    for site in sites::of_text(text).map_err(|error| format!("{file}: {error}"))? {
        let (before, after) = shown(text, &site);
        // The same change of the same text again.
        let repetition = seen.entry(format!("{before}\n{after}")).or_default();
        let count = repetition.to_string();
        *repetition += 1;
        found.push(Mutation {
            number: 0,
            key: hash(&[&seed.to_string(), file, site.kind.name(), &before, &after, &count]),
            room: room.to_owned(),
            kind: site.kind.name().to_owned(),
            file: file.to_owned(),
            line: text[..site.anchor().start].matches('\n').count() + 1,
            before,
            after,
            lines: (0, 0),
            site: Some(site),
        });
    }
    Ok(found)
}

/// Chooses `count` mutations, as many of each room, without those whose keys are in `dropped`: for each of
/// them another is drawn, and the others stay.
pub(crate) fn choose(
    candidates: Vec<Mutation>,
    rooms: &[&str],
    count: usize,
    dropped: &[String],
) -> Result<Vec<Mutation>, String> {
    let mut of_rooms: HashMap<String, Vec<Mutation>> = HashMap::new();
    for mutation in candidates {
        of_rooms.entry(mutation.room.clone()).or_default().push(mutation);
    }
    let mut chosen: Vec<Mutation> = Vec::new();
    for (index, room) in rooms.iter().enumerate() {
        let wanted = count / rooms.len() + usize::from(index < count % rooms.len());
        let mut open = of_rooms.remove(*room).unwrap_or_default();
        let (mut kinds, mut files) = (HashMap::<Kind, usize>::new(), HashMap::<String, usize>::new());
        let end = chosen.len() + wanted;
        while chosen.len() < end {
            let next = (0..open.len()).min_by_key(|index| {
                let mutation = &open[*index];
                let uses = mutation.site.as_ref().and_then(|site| kinds.get(&site.kind)).unwrap_or(&0)
                    + files.get(&mutation.file).unwrap_or(&0);
                (uses, mutation.key)
            });
            let Some(next) = next else {
                return Err(format!("room {room} has fewer than {wanted} places for mutations"));
            };
            let mut mutation = open.swap_remove(next);
            let Some(site) = &mutation.site else { continue };
            let overlaps = chosen.iter().any(|other| {
                other.file == mutation.file
                    && other.site.as_ref().is_some_and(|other| {
                        other.range.start < site.range.end && site.range.start < other.range.end
                    })
            });
            if overlaps {
                continue;
            }
            *kinds.entry(site.kind).or_default() += 1;
            *files.entry(mutation.file.clone()).or_default() += 1;
            if !dropped.contains(&mutation.key_text()) {
                mutation.number = chosen.len() + 1;
                chosen.push(mutation);
            }
        }
    }
    Ok(chosen)
}

/// The mutations in which the short messages of cargo have errors, each with the first of them. An error
/// outside of all mutations is one of the nearest mutation in its file.
pub(crate) fn failing<'a>(
    chosen: &'a [Mutation],
    messages: &str,
) -> Result<Vec<(&'a Mutation, String)>, String> {
    let mut failing: Vec<(&Mutation, String)> = Vec::new();
    for message in messages.lines() {
        let mut parts = message.splitn(4, ':');
        let (Some(file), Some(line), Some(_), Some(text)) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let Ok(line) = line.parse::<usize>() else { continue };
        if !text.trim_start().starts_with("error") {
            continue;
        }
        let distance = |mutation: &&Mutation| {
            let (first, last) = mutation.lines;
            first.saturating_sub(line).max(line.saturating_sub(last))
        };
        let nearest = chosen.iter().filter(|mutation| mutation.file == file).min_by_key(distance);
        let nearest = nearest.ok_or_else(|| format!("an error in a file without mutations: {message}"))?;
        if !failing.iter().any(|(mutation, _)| mutation.number == nearest.number) {
            failing.push((nearest, text.trim().to_owned()));
        }
    }
    if failing.is_empty() {
        return Err("cargo failed for another reason than a mutation".to_owned());
    }
    Ok(failing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rewrite::with_mutations;

    const TEXT: &str =
        "fn f() {\n    if a < 1 {\n        b.c(2);\n    }\n    d(3);\n    let _ = e == f;\n}\n";

    fn chosen(texts: &[(&str, &str)], count: usize, dropped: &[String]) -> Vec<Mutation> {
        let all = texts.iter().flat_map(|(file, text)| candidates(7, "pods", file, text).unwrap());
        choose(all.collect(), &["pods"], count, dropped).unwrap()
    }

    fn keys(mutations: &[Mutation]) -> Vec<String> {
        mutations.iter().map(Mutation::key_text).collect()
    }

    #[test]
    fn choice_depends_neither_on_the_order_of_files_nor_on_line_numbers() {
        let other = "fn g() { h(4); }";
        let keys_of = |texts: &[(&str, &str)]| keys(&chosen(texts, 4, &[]));
        let wanted = keys_of(&[("a", TEXT), ("b", other)]);
        assert_eq!(keys_of(&[("b", other), ("a", TEXT)]), wanted);
        assert_eq!(keys_of(&[("a", &format!("// more\n\n{TEXT}")), ("b", other)]), wanted);
    }

    #[test]
    fn another_is_drawn_for_one_that_does_not_compile() {
        let first = chosen(&[("a", TEXT)], 3, &[]);
        let second = chosen(&[("a", TEXT)], 3, &[first[1].key_text()]);
        assert_eq!((first[0].key, first[2].key), (second[0].key, second[1].key));
        assert!(!keys(&second).contains(&first[1].key_text()));
    }

    #[test]
    fn error_of_the_compiler_names_its_mutation() {
        let mut mutations = chosen(&[("a", TEXT)], 3, &[]);
        with_mutations("a", TEXT, &mut mutations);
        let (number, line) = (mutations[1].number, mutations[1].lines.0);
        let messages = format!("a:{line}:1: warning: b\na:{line}:9: error[E0382]: c: d\nerror: e");
        let failing: Vec<_> = failing(&mutations, &messages)
            .unwrap()
            .into_iter()
            .map(|(mutation, text)| (mutation.number, text))
            .collect();
        assert_eq!(failing, [(number, "error[E0382]: c: d".to_owned())]);
        assert!(super::failing(&mutations, "error: could not compile").is_err());
    }

    #[test]
    fn rows_are_read_as_they_were_written() {
        for mutation in chosen(&[("a", TEXT)], 3, &[]) {
            let row = mutation.to_row();
            assert_eq!(Mutation::from_row(&row).unwrap().to_row(), row);
        }
    }
}
