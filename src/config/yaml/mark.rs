//! The lines of the parts of a document.

/// The line of a node, and those of its children.
#[derive(Debug, Clone, Default)]
pub(super) struct Mark {
    pub(super) line: u32,
    pub(super) children: Children,
}

#[derive(Debug, Clone, Default)]
pub(super) enum Children {
    #[default]
    Nothing,
    Fields(Vec<(String, Mark)>),
    Items(Vec<Mark>),
}

impl Mark {
    pub(super) fn on_line(line: u32) -> Self {
        Mark { line, children: Children::Nothing }
    }

    /// The line of a path, or of its nearest ancestor.
    pub(super) fn line_of(&self, path: &str) -> Option<u32> {
        let mut mark = self;
        let mut rest = path;
        while let Some((next, after)) = mark.step(rest) {
            (mark, rest) = (next, after);
        }
        (mark.line > 0).then_some(mark.line)
    }

    /// Removes the path's first step; `None` at its end or when the step does not exist.
    fn step<'m, 'p>(&'m self, path: &'p str) -> Option<(&'m Mark, &'p str)> {
        match &self.children {
            Children::Nothing => None,
            Children::Items(items) => {
                let (index, after) = path.strip_prefix('[')?.split_once(']')?;
                Some((items.get(index.parse::<usize>().ok()?)?, after))
            }
            Children::Fields(fields) => {
                // Keys may contain dots, so the longest key that matches is used.
                let path = path.strip_prefix('.').unwrap_or(path);
                let fits = |key: &str| -> Option<&'p str> {
                    if let Some(inner) = path.strip_prefix('[')
                        && let Some(after) = inner.strip_prefix(key)
                        && let Some(after) = after.strip_prefix(']')
                    {
                        return Some(after);
                    }
                    let after = path.strip_prefix(key)?;
                    (after.is_empty() || after.starts_with(['.', '['])).then_some(after)
                };
                fields
                    .iter()
                    .filter(|(key, _)| !key.is_empty())
                    .filter_map(|(key, mark)| Some((mark, fits(key)?)))
                    .min_by_key(|(_, after)| after.len())
            }
        }
    }
}
