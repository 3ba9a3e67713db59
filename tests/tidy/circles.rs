//! No circle of imports between rooms, and none of more than [`LIMIT`] files inside a room: what
//! imports each other can only be understood together.

use std::collections::{BTreeMap, BTreeSet};

use super::{code, imported_rooms, report, room, rooms_on_disk, sources};

/// The most files of one room that may import each other in a circle.
const LIMIT: usize = 4;

type Graph = BTreeMap<String, BTreeSet<String>>;

/// The nodes that import each other, directly or through others; each group once, sorted.
fn circles(graph: &Graph) -> Vec<Vec<&str>> {
    let reachable: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|start| (start.as_str(), reachable(graph, start))).collect();
    let mut circles = BTreeSet::new();
    for (start, ends) in &reachable {
        let back = |end: &&&str| reachable.get(**end).is_some_and(|ends| ends.contains(start));
        let circle: Vec<&str> = ends.iter().filter(back).copied().collect();
        if circle.len() > 1 {
            circles.insert(circle);
        }
    }
    circles.into_iter().collect()
}

fn reachable<'a>(graph: &'a Graph, start: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut open = vec![start];
    while let Some(node) = open.pop() {
        for next in graph.get(node).into_iter().flatten() {
            if found.insert(next.as_str()) {
                open.push(next);
            }
        }
    }
    found
}

/// Source text without the modules that only tests have. `text` has no comments and strings.
fn without_tests(text: &str) -> String {
    const MARK: &str = "#[cfg(test)]";
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(MARK) {
        out += before;
        let is_module = after.trim_start().strip_prefix("pub(super) ").unwrap_or(after.trim_start());
        let end = after.find([';', '{']);
        rest = match end.filter(|_| is_module.starts_with("mod ")) {
            Some(end) if after[end..].starts_with('{') => &after[end + block(&after[end..])..],
            Some(end) => &after[end + 1..],
            None => after,
        };
    }
    out + rest
}

/// The length of a block in braces.
fn block(text: &str) -> usize {
    let mut depth = 0;
    for (offset, character) in text.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return offset + 1;
        }
    }
    text.len()
}

/// The paths of a use tree, or the one path of an expression, that a text begins with. Also
/// returns what follows.
fn paths<'a>(text: &'a str, before: &[&'a str]) -> (Vec<Vec<&'a str>>, &'a str) {
    let mut path = before.to_vec();
    let mut rest = text.trim_start();
    loop {
        if let Some(list) = rest.strip_prefix('{') {
            let mut all = Vec::new();
            let mut rest = list;
            loop {
                let (found, after) = paths(rest, &path);
                all.extend(found);
                rest = after.trim_start();
                match rest.strip_prefix(',') {
                    Some(after) => rest = after,
                    None => return (all, rest.strip_prefix('}').unwrap_or(rest)),
                }
            }
        }
        let end = rest
            .find(|character: char| !character.is_alphanumeric() && character != '_')
            .unwrap_or(rest.len());
        path.extend(Some(&rest[..end]).filter(|name| !name.is_empty()));
        rest = &rest[end..];
        match rest.strip_prefix("::") {
            Some(after) => rest = after,
            None => break,
        }
    }
    let renamed = rest.trim_start().strip_prefix("as ").map(|rest| {
        rest.trim_start_matches(|character: char| {
            character.is_alphanumeric() || character == '_' || character == ' '
        })
    });
    (vec![path], renamed.unwrap_or(rest).trim_start_matches('*'))
}

/// The path of a source file's module, such as `sync::thread`.
fn module(file: &str) -> Option<String> {
    let path = file.strip_prefix("src/")?.strip_suffix(".rs")?;
    Some(path.strip_suffix("/mod").unwrap_or(path).replace('/', "::"))
}

/// Which of the modules a file imports; names that a module only passes on count as its own.
fn imports(here: &str, text: &str, modules: &BTreeSet<String>) -> BTreeSet<String> {
    let text = without_tests(text);
    let mut starts: Vec<usize> = Vec::new();
    let mut roots = vec!["crate".to_owned(), "self".to_owned(), "super".to_owned()];
    // A module names its own modules without a prefix.
    roots.extend(
        modules.iter().filter_map(|module| module.strip_prefix(here)?.strip_prefix("::").map(str::to_owned)),
    );
    for root in roots.iter().filter(|root| !root.contains("::")) {
        for (offset, _) in text.match_indices(&format!("{root}::")) {
            let inside = |character: char| {
                character.is_alphanumeric() || character == '_' || character == ':' || character == '.'
            };
            if !text[..offset].ends_with(inside) {
                starts.push(offset);
            }
        }
    }
    let mut found = BTreeSet::new();
    for start in starts {
        for path in paths(&text[start..], &[]).0 {
            let mut names = path.as_slice();
            let mut current: Vec<&str> = here.split("::").collect();
            match names.first() {
                Some(&"crate") => (current, names) = (Vec::new(), &names[1..]),
                Some(&"self") => names = &names[1..],
                _ => {
                    while names.first() == Some(&"super") {
                        current.pop();
                        names = &names[1..];
                    }
                }
            }
            for name in names {
                let next = [current.as_slice(), &[name]].concat().join("::");
                if !modules.contains(&next) {
                    break;
                }
                current.push(name);
            }
            found.insert(current.join("::"));
        }
    }
    found.retain(|other| other != here && modules.contains(other));
    found
}

#[test]
fn rooms_do_not_import_each_other_in_a_circle() {
    let mut graph = Graph::new();
    let rooms = rooms_on_disk();
    for (file, text) in sources() {
        let Some(here) = room(&file) else { continue };
        let others =
            imported_rooms(&code(&text)).into_iter().filter(|other| other != here && rooms.contains(other));
        graph.entry(here.to_owned()).or_default().extend(others);
    }
    assert!(graph.values().map(BTreeSet::len).sum::<usize>() > 50, "the imports are not read: {graph:?}");
    let problems: Vec<String> = circles(&graph)
        .iter()
        .map(|circle| format!("rooms import each other: {}", circle.join(", ")))
        .collect();
    report(&problems);
}

/// All modules of the rooms, and what each imports in its own room.
fn files_of_rooms() -> Graph {
    let is_test = |file: &str| file.ends_with("/tests.rs") || file.contains("/tests/");
    let sources: Vec<(String, String)> =
        sources().into_iter().filter(|(file, _)| room(file).is_some() && !is_test(file)).collect();
    let modules: BTreeSet<String> = sources.iter().filter_map(|(file, _)| module(file)).collect();
    let mut graph = Graph::new();
    for (file, text) in &sources {
        let (Some(here), Some(own_room)) = (module(file), room(file)) else { continue };
        let mut others = imports(&here, &code(text), &modules);
        others.retain(|other| other.split("::").next() == Some(own_room));
        graph.insert(here, others);
    }
    assert!(graph.values().map(BTreeSet::len).sum::<usize>() > 500, "the imports are not read");
    graph
}

#[test]
fn files_of_a_room_import_each_other_in_small_circles_only() {
    let graph = files_of_rooms();
    let problems: Vec<String> = circles(&graph)
        .iter()
        .filter(|circle| circle.len() > LIMIT)
        .map(|circle| format!("{} files import each other: {}", circle.len(), circle.join(", ")))
        .collect();
    report(&problems);
}

#[test]
fn files_of_different_folders_do_not_import_each_other_in_a_circle() {
    let graph = files_of_rooms();
    let folders: BTreeSet<&str> =
        graph.keys().filter_map(|module| module.rsplit_once("::")).map(|(folder, _)| folder).collect();
    let problems: Vec<String> = circles(&graph)
        .iter()
        .filter(|circle| {
            // A module with modules of its own belongs to their folder.
            let folder_of = |module: &str| match folders.get(module) {
                Some(own) => (*own).to_owned(),
                None => module.rsplit_once("::").map_or_else(String::new, |(folder, _)| folder.to_owned()),
            };
            circle.iter().map(|module| folder_of(module)).collect::<BTreeSet<_>>().len() > 1
        })
        .map(|circle| format!("files of different folders import each other: {}", circle.join(", ")))
        .collect();
    report(&problems);
}

#[test]
fn imports_are_read_from_use_trees_and_paths() {
    let modules: BTreeSet<String> =
        ["a", "a::b", "a::b::c", "a::d", "a::e", "f"].into_iter().map(str::to_owned).collect();
    let text = "use super::{d::{X, Y}, e as other, Own};\nuse crate::{f, a::b::c::Z};\nfn x() { self::c::y(); c::z(); my.d::w(); }\n#[cfg(test)]\nmod tests { use super::super::e; }\n#[cfg(test)]\nmod more;\nuse crate::g::H;";
    let found: Vec<String> = imports("a::b", text, &modules).into_iter().collect();
    assert_eq!(found, ["a", "a::b::c", "a::d", "a::e", "f"]);
    let found =
        imports("a::d", "#[cfg(test)]\nmod tests { mod inner { use super::super::super::e::X; } }", &modules);
    assert_eq!(found, BTreeSet::new());
    let found =
        imports("a", "mod b;\npub use b::{c::X, Y};\n#[cfg(test)]\nfn only() { crate::f::x(); }", &modules);
    assert_eq!(found.into_iter().collect::<Vec<_>>(), ["a::b", "a::b::c", "f"]);
}

#[test]
fn circles_are_found() {
    let graph = |edges: &[(&str, &[&str])]| -> Graph {
        let all = |(from, to): &(&str, &[&str])| {
            ((*from).to_owned(), to.iter().map(|target| (*target).to_owned()).collect())
        };
        edges.iter().map(all).collect()
    };
    let line = graph(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])]);
    assert_eq!(circles(&line), Vec::<Vec<&str>>::new());
    let two = graph(&[("a", &["b"]), ("b", &["c"]), ("c", &["a", "d"]), ("d", &["e"]), ("e", &["d"])]);
    assert_eq!(circles(&two), [vec!["a", "b", "c"], vec!["d", "e"]]);
}
