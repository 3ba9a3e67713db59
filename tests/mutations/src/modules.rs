//! The files of a library that are compiled into the program: the modules below `src/lib.rs`, without those
//! that only the tests have.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use syn::{Attribute, Item, Meta};

use crate::read;

/// Whether an item is there in tests only: `#[cfg(test)]`, `#[cfg(all(test, ...))]`, `#[test]`.
pub(crate) fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string().replace(' ', "");
            condition == "test" || condition.starts_with("any(test") || condition.starts_with("all(test")
        }
        _ => false,
    })
}

/// The value of `#[path = "..."]`.
fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| {
        let Meta::NameValue(pair) = &attribute.meta else { return None };
        let syn::Expr::Lit(value) = &pair.value else { return None };
        match &value.lit {
            syn::Lit::Str(text) if pair.path.is_ident("path") => Some(text.value()),
            _ => None,
        }
    })
}

/// Where the file of a module is searched.
struct Place {
    /// The directory of its files.
    directory: PathBuf,
    /// The directory to which a `#[path]` is relative.
    of_paths: PathBuf,
}

/// The path and the text of each file, by the path from the root of the tree on.
pub(crate) fn of_library(tree: &Path) -> Result<BTreeMap<String, String>, String> {
    let mut files = BTreeMap::new();
    let mut open = vec![(PathBuf::from("src/lib.rs"), PathBuf::from("src"))];
    while let Some((file, directory)) = open.pop() {
        let text = read(&tree.join(&file))?;
        let parsed = syn::parse_file(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        let of_paths = file.parent().unwrap_or(Path::new("")).to_path_buf();
        collect(tree, &parsed.items, &Place { directory, of_paths }, &mut open)?;
        files.insert(file.display().to_string(), text);
    }
    Ok(files)
}

/// Adds the files of the modules that these items declare.
fn collect(
    tree: &Path,
    items: &[Item],
    place: &Place,
    open: &mut Vec<(PathBuf, PathBuf)>,
) -> Result<(), String> {
    for item in items {
        let Item::Mod(module) = item else { continue };
        if is_for_tests(&module.attrs) {
            continue;
        }
        let name = module.ident.to_string();
        let below = place.directory.join(&name);
        if let Some((_, items)) = &module.content {
            collect(tree, items, &Place { directory: below.clone(), of_paths: below }, open)?;
        } else if let Some(path) = path_attribute(&module.attrs) {
            let file = normal(&place.of_paths.join(path));
            // Its modules are searched beside it, as those of a mod.rs.
            let directory = file.parent().unwrap_or(Path::new("")).to_path_buf();
            open.push((file, directory));
        } else {
            let candidates = [place.directory.join(format!("{name}.rs")), below.join("mod.rs")];
            let file = candidates.iter().find(|file| tree.join(file).is_file());
            let file = file.ok_or_else(|| format!("no file of the module {}", below.display()))?;
            open.push((file.clone(), below));
        }
    }
    Ok(())
}

/// A path without `..`.
fn normal(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                parts.pop();
            }
            other => parts.push(other),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_of_tests_are_recognized() {
        let items = "#[cfg(test)] mod a; #[test] fn b() {} #[cfg(any(test, unix))] mod c; #[cfg(not(test))] mod d; mod e;";
        let file = syn::parse_file(items).unwrap();
        let found: Vec<bool> = file
            .items
            .iter()
            .map(|item| match item {
                Item::Mod(module) => is_for_tests(&module.attrs),
                Item::Fn(function) => is_for_tests(&function.attrs),
                _ => unreachable!("no other items"),
            })
            .collect();
        assert_eq!(found, [true, true, true, false, false]);
    }
}
