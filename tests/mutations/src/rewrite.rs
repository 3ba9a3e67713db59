//! Inserts mutations into a source file.

use crate::choice::Mutation;

/// The function that decides which mutation is active, at the end of `src/lib.rs`. The file that it makes
/// shows that a test came to the mutated place.
const SWITCH: &str = r#"
#[doc(hidden)]
pub fn mutation(number: u32) -> bool {
    static ACTIVE: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    static REACHED: std::sync::Once = std::sync::Once::new();
    let active = *ACTIVE.get_or_init(|| {
        std::env::var("CORACLE_MUTATION").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
    });
    if active != number {
        return false;
    }
    REACHED.call_once(|| {
        if let Some(path) = std::env::var_os("CORACLE_MUTATION_REACHED") {
            let _ = std::fs::write(path, "");
        }
    });
    true
}
"#;

/// The text of a file with its mutations; each mutation gets the lines that it has there.
pub(crate) fn with_mutations(file: &str, text: &str, mutations: &mut [Mutation]) -> String {
    let mut own: Vec<&mut Mutation> = mutations.iter_mut().filter(|mutation| mutation.file == file).collect();
    own.sort_by_key(|mutation| mutation.site.as_ref().map_or(0, |site| site.range.start));
    let mut mutated = String::with_capacity(text.len());
    let mut end = 0;
    for mutation in own {
        let Some(site) = &mutation.site else { continue };
        mutated.push_str(&text[end..site.range.start]);
        let first = mutated.matches('\n').count() + 1;
        mutated.push_str(&site.switched(text, mutation.number));
        mutation.lines = (first, mutated.matches('\n').count() + 1);
        end = site.range.end;
    }
    mutated.push_str(&text[end..]);
    mutated
}

/// `src/lib.rs` with the function. The brackets that mutations add are no reason for warnings.
pub(crate) fn with_switch(text: &str) -> String {
    format!("#![allow(warnings)] {text}{SWITCH}")
}
