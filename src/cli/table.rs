//! Tables for people: columns as wide as their widest cell, three blanks apart.

use std::io::{self, Write};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Color {
    Green,
    Yellow,
    Red,
    Dim,
    Bold,
}

/// Adds colors to text if `on`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Paint {
    on: bool,
}

impl Paint {
    #[cfg(test)]
    pub(super) fn new(on: bool) -> Self {
        Paint { on }
    }

    /// Without colors.
    pub(super) fn plain() -> Self {
        Paint { on: false }
    }

    /// For standard output: only on a terminal, and not if `NO_COLOR` is set.
    pub(super) fn for_stdout() -> Self {
        use std::io::IsTerminal;
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
            || std::env::var_os("TERM").is_some_and(|value| value == "dumb");
        Paint { on: std::io::stdout().is_terminal() && !refused }
    }

    pub(super) fn put(self, color: Option<Color>, text: &str) -> String {
        let code = match color {
            Some(Color::Green) => "32",
            Some(Color::Yellow) => "33",
            Some(Color::Red) => "31",
            Some(Color::Dim) => "2",
            Some(Color::Bold) => "1",
            None => return text.to_owned(),
        };
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cell {
    /// Its control characters are escaped when it is printed.
    pub text: String,
    pub color: Option<Color>,
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Cell { text: text.into(), color: None }
    }
}

impl Cell {
    pub(super) fn colored(text: impl Into<String>, color: Option<Color>) -> Self {
        Cell { text: text.into(), color }
    }
}

/// A table that is printed row by row; columns become wider and never narrower.
#[derive(Debug, Clone)]
pub(super) struct Table {
    headers: Vec<&'static str>,
    widths: Vec<usize>,
    headed: bool,
}

impl Table {
    pub(super) fn new(headers: &[&'static str]) -> Self {
        Table {
            headers: headers.to_vec(),
            widths: headers.iter().map(|text| text.chars().count()).collect(),
            headed: false,
        }
    }

    /// Prints rows, the first time with headers.
    pub(super) fn print(&mut self, out: &mut dyn Write, paint: Paint, rows: &[Vec<Cell>]) -> io::Result<()> {
        let rows: Vec<Vec<Cell>> = rows
            .iter()
            .map(|row| row.iter().map(|cell| Cell::colored(visible(&cell.text), cell.color)).collect())
            .collect();
        for row in &rows {
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = (*width).max(cell.text.chars().count());
            }
        }
        if !self.headed {
            self.headed = true;
            let headers: Vec<Cell> =
                self.headers.iter().map(|text| Cell::colored(*text, Some(Color::Bold))).collect();
            self.line(out, paint, &headers)?;
        }
        rows.iter().try_for_each(|row| self.line(out, paint, row))
    }

    fn line(&self, out: &mut dyn Write, paint: Paint, row: &[Cell]) -> io::Result<()> {
        let last = row.len().saturating_sub(1);
        let mut line = String::new();
        for (index, (cell, width)) in row.iter().zip(&self.widths).enumerate() {
            line.push_str(&paint.put(cell.color, &cell.text));
            if index < last {
                let blanks = width.saturating_sub(cell.text.chars().count()) + 3;
                line.extend(std::iter::repeat_n(' ', blanks));
            }
        }
        writeln!(out, "{}", line.trim_end())
    }
}

/// Rows for snapshots: cells between bars, with their colors.
#[cfg(test)]
pub(super) fn render(rows: &[Vec<Cell>]) -> String {
    let render = |cell: &Cell| {
        let text = if cell.text.is_empty() { "\"\"".to_owned() } else { visible(&cell.text) };
        cell.color.map_or(text.clone(), |color| format!("{text} [{color:?}]"))
    };
    let line = |row: &Vec<Cell>| row.iter().map(render).collect::<Vec<_>>().join(" | ") + "\n";
    rows.iter().map(line).collect()
}

/// [`visible`] of each line.
pub(super) fn visible_lines(text: &str) -> String {
    text.lines().map(visible).collect::<Vec<_>>().join("\n")
}

/// Escapes control characters: names and messages of containers must not change the colors or
/// the direction of the operator's terminal.
pub(super) fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if is_unsafe(c) => out.push_str(&format!("\\u{{{:x}}}", u32::from(c))),
            c => out.push(c),
        }
    }
    out
}

/// Control characters, and those that reverse, isolate, annotate or hide text: the categories Cc, Cf, Zl
/// and Zp of Unicode 16, and the ranges that it reserves for characters without a shape. Selectors of the
/// shape of the character before them (U+FE00 to U+FE0F) are a part of usual text.
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{600}'..='\u{605}'
                | '\u{61c}'
                | '\u{6dd}'
                | '\u{70f}'
                | '\u{890}'..='\u{891}'
                | '\u{8e2}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff0}'..='\u{fffb}'
                | '\u{110bd}'
                | '\u{110cd}'
                | '\u{13430}'..='\u{1343f}'
                | '\u{1bca0}'..='\u{1bca3}'
                | '\u{1d173}'..='\u{1d17a}'
                | '\u{e0000}'..='\u{e0fff}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(table: &mut Table, paint: Paint, rows: &[Vec<Cell>]) -> String {
        let mut out = Vec::new();
        table.print(&mut out, paint, rows).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn columns_line_up_and_keep_their_widths() {
        let mut table = Table::new(&["NAME", "AGE", "NOTE"]);
        let plain = Paint::new(false);
        let row = |a: &str, b: &str, c: &str| vec![Cell::from(a), Cell::from(b), Cell::from(c)];
        assert_eq!(
            printed(&mut table, plain, &[row("grün", "5s", "x"), row("a", "10m", "")]),
            "NAME   AGE   NOTE\ngrün   5s    x\na      10m\n"
        );
        assert_eq!(printed(&mut table, plain, &[row("longer", "1", "y")]), "longer   1     y\n");
        assert_eq!(printed(&mut table, plain, &[row("b", "1", "y")]), "b        1     y\n");
    }

    #[test]
    fn colors_do_not_count_as_width() {
        let mut table = Table::new(&["A", "B"]);
        let row = vec![Cell::colored("x", Some(Color::Red)), Cell::from("y")];
        assert_eq!(
            printed(&mut table, Paint::new(true), &[row]),
            "\x1b[1mA\x1b[0m   \x1b[1mB\x1b[0m\n\x1b[31mx\x1b[0m   y\n"
        );
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(visible("a\x1b[31mb\u{9b}c\nd\u{202e}e ä"), "a\\u{1b}[31mb\\u{9b}c\\nd\\u{202e}e ä");
        // The property Bidi_Control of Unicode.
        let directions = ('\u{202a}'..='\u{202e}').chain('\u{2066}'..='\u{2069}');
        for c in ['\u{61c}', '\u{200e}', '\u{200f}'].into_iter().chain(directions) {
            assert_eq!(visible(&c.to_string()), format!("\\u{{{:x}}}", u32::from(c)));
        }
        // Hyphens, annotations, separators, and tags that show nothing.
        let hidden =
            "\u{ad}\u{600}\u{180e}\u{2028}\u{2029}\u{fff9}\u{fffa}\u{fffb}\u{1d173}\u{e0001}\u{e0100}";
        assert!(visible(hidden).is_ascii());
        let usual =
            "\u{e4} \u{4e2d}\u{6587} e\u{301} \u{2764}\u{fe0f} \u{5d0} \u{627} \u{a0} \u{fffc} \u{fffd}";
        assert_eq!(visible(usual), usual);
    }
}
