//! HTML with two doors: markup is a constant of these sources, and everything else is escaped (pure).

use std::fmt::Write as _;

use crate::cli::table::{Cell, Color, visible};
use crate::util::encoding::escape_html;

/// The rows of one table; more are counted only.
const MOST_ROWS: usize = 2000;
/// A word with more characters may be broken, in a column that is wide enough for so many.
const LONGEST_WORD: usize = 20;

/// The pages in the order of the navigation: path, name.
pub(super) const PAGES: &[(&str, &str)] = &[
    ("/", "Node and pods"),
    ("/storage", "Volumes and devices"),
    ("/images", "Images"),
    ("/events", "Events"),
    ("/offline", "Offline"),
];

/// How the pages name the node; the title of the page about it.
pub(super) fn node_title(node: &str) -> String {
    format!("Node {node}")
}

/// A part of a page.
#[derive(Debug, Default)]
pub(super) struct Html(String);

impl Html {
    /// Adds markup.
    pub(super) fn raw(&mut self, markup: &'static str) -> &mut Self {
        self.0.push_str(markup);
        self
    }

    /// Adds text in one line, or the value of an attribute in double quotes.
    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        escape_html(&visible(text), &mut self.0);
        self
    }

    /// Adds text whose lines stay lines.
    pub(super) fn lines(&mut self, text: &str) -> &mut Self {
        for (number, line) in text.split('\n').enumerate() {
            if number > 0 {
                self.0.push('\n');
            }
            for (column, part) in line.trim_end_matches('\r').split('\t').enumerate() {
                if column > 0 {
                    self.0.push('\t');
                }
                escape_html(&visible(part), &mut self.0);
            }
        }
        self
    }

    /// Adds a number, such as a coordinate.
    pub(super) fn number(&mut self, number: f64) -> &mut Self {
        // Writing to a string does not fail.
        let _ = write!(self.0, "{number:.1}");
        self
    }

    pub(super) fn heading(&mut self, text: &str) -> &mut Self {
        self.raw("<h2>").text(text).raw("</h2>\n")
    }

    pub(super) fn title(&mut self, text: &str) -> &mut Self {
        self.raw("<h1>").text(text).raw("</h1>\n")
    }

    pub(super) fn paragraph(&mut self, text: &str) -> &mut Self {
        self.raw("<p>").text(text).raw("</p>\n")
    }

    /// Adds text of a command as the terminal shows it.
    pub(super) fn preformatted(&mut self, text: &str) -> &mut Self {
        self.raw("<pre tabindex=\"0\">").lines(text).raw("</pre>\n")
    }

    /// Adds a link to a path of this server.
    pub(super) fn link(&mut self, target: &str, text: &str) -> &mut Self {
        self.raw("<a href=\"").text(target).raw("\">").text(text).raw("</a>")
    }

    /// Adds a cell with its text and, for narrow screens, the header of its column.
    fn start_cell(&mut self, header: &str, text: &str) -> &mut Self {
        let is_long = text.split_whitespace().any(|word| word.chars().nth(LONGEST_WORD).is_some());
        self.raw(if is_long { "<td class=\"long\" data-label=\"" } else { "<td data-label=\"" });
        self.text(header).raw("\">")
    }

    /// Adds a cell's text; its color is a class, to which the style sheet adds a mark.
    fn cell(&mut self, cell: &Cell) -> &mut Self {
        let markup = match cell.color {
            Some(Color::Red) => "<span class=\"bad\">",
            Some(Color::Yellow) => "<span class=\"warn\">",
            Some(Color::Green) => "<span class=\"ok\">",
            Some(Color::Dim) => "<span class=\"dim\">",
            Some(Color::Bold) | None => return self.text(&cell.text),
        };
        self.raw(markup).text(&cell.text).raw("</span>")
    }

    pub(super) fn table(&mut self, headers: &[&'static str], rows: &[Vec<Cell>]) -> &mut Self {
        self.linked_table(headers, rows, usize::MAX, &|_| None)
    }

    /// Adds a table in which the cells of one column are links. `target`: of a row's number.
    pub(super) fn linked_table(
        &mut self,
        headers: &[&'static str],
        rows: &[Vec<Cell>],
        column: usize,
        target: &dyn Fn(usize) -> Option<String>,
    ) -> &mut Self {
        if rows.is_empty() {
            return self.raw("<p class=\"dim\">none</p>\n");
        }
        self.raw(
            "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Table\"><table><thead><tr>",
        );
        for header in headers {
            self.raw("<th scope=\"col\">").text(header).raw("</th>");
        }
        self.raw("</tr></thead><tbody>\n");
        for (number, row) in rows.iter().take(MOST_ROWS).enumerate() {
            self.raw("<tr>");
            for (index, cell) in row.iter().enumerate() {
                self.start_cell(headers.get(index).copied().unwrap_or_default(), &cell.text);
                match target(number).filter(|_| index == column) {
                    Some(target) => self.link(&target, &cell.text),
                    None => self.cell(cell),
                };
                self.raw("</td>");
            }
            self.raw("</tr>\n");
        }
        self.raw("</tbody></table></div>\n");
        self.omitted(rows.len().saturating_sub(MOST_ROWS))
    }

    /// The number of rows that are left out, if any.
    pub(super) fn omitted(&mut self, rows: usize) -> &mut Self {
        if rows > 0 { self.paragraph(&format!("... and {rows} more")) } else { self }
    }

    /// Puts this content into a page. `node`: the name of the node; empty if it is not known, or not for this
    /// client. `current`: its path in the navigation; empty for a page that does not lead to others. `renews`:
    /// whether the page loads its content again.
    pub(super) fn into_page(self, title: &str, node: &str, current: &str, renews: bool) -> Vec<u8> {
        let mut page = Html::default();
        page.raw(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <meta name=\"color-scheme\" content=\"light dark\"><title>",
        );
        page.text(title);
        if !node.is_empty() && title != node_title(node) {
            page.raw(" - ").text(node);
        }
        page.raw(
            " - coracle</title><link rel=\"stylesheet\" href=\"/style.css\">\
             <script src=\"/ui.js\" defer></script>",
        );
        if renews {
            page.raw("<noscript><meta http-equiv=\"refresh\" content=\"10\"></noscript>");
        }
        page.raw("</head>\n<body><a class=\"skip\" href=\"#main\">Skip to the content</a>\n<header>");
        // The script sets its text when it loads the content again.
        page.raw("<p id=\"node\">");
        if !node.is_empty() {
            page.text(&node_title(node));
        }
        page.raw("</p>");
        if !current.is_empty() {
            page.raw("<nav aria-label=\"Pages\">");
            for (path, name) in PAGES {
                page.raw(if *path == current { "<a aria-current=\"page\" href=\"" } else { "<a href=\"" });
                page.text(path).raw("\">").text(name).raw("</a> ");
            }
            page.raw("</nav>");
        }
        page.raw("<p id=\"note\" role=\"status\"></p></header>\n<main id=\"main\" tabindex=\"-1\"");
        page.raw(if renews { " data-refresh=\"5\">\n" } else { ">\n" });
        page.0.push_str(&self.0);
        page.raw("</main></body></html>\n");
        page.0.into_bytes()
    }

    #[cfg(test)]
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCRIPT: &str = "\"'><script>alert(1)</script>&\u{202e}\n";

    #[test]
    fn text_links_cells_and_lines_cannot_become_markup() {
        let mut html = Html::default();
        html.text(SCRIPT).lines(SCRIPT).title(SCRIPT).paragraph(SCRIPT).link(SCRIPT, SCRIPT);
        let rows = [vec![Cell::from(SCRIPT), Cell::colored(SCRIPT, Some(Color::Red))]];
        html.linked_table(&["A", "B"], &rows, 0, &|_| Some(SCRIPT.to_owned()));
        let page = String::from_utf8(html.into_page(SCRIPT, SCRIPT, "/", true)).unwrap();
        assert!(!page.contains("<script>") && !page.contains("'>") && !page.contains('\u{202e}'), "{page}");
        assert_eq!(page.matches("&#34;&#39;&gt;&lt;script&gt;alert(1)&lt;/script&gt;&amp;").count(), 12);
        // The only script is that of the page.
        assert_eq!(page.matches("<script").count(), 1);
    }

    #[test]
    fn title_and_header_name_the_node_once() {
        let page = |title: &str, node: &str| {
            String::from_utf8(Html::default().into_page(title, node, "/", true)).unwrap()
        };
        for (title, node, in_title, in_header) in [
            ("Events", "n1", "Events - n1 - coracle", "Node n1"),
            ("Node n1", "n1", "Node n1 - coracle", "Node n1"),
            ("No access", "", "No access - coracle", ""),
        ] {
            let page = page(title, node);
            assert!(page.contains(&format!("<title>{in_title}</title>")), "{page}");
            assert!(page.contains(&format!("<header><p id=\"node\">{in_header}</p>")), "{page}");
        }
    }

    #[test]
    fn lines_and_tabs_of_a_log_stay_and_its_control_characters_are_shown() {
        let mut html = Html::default();
        html.lines("a\tb\r\n\u{1b}[31mc");
        assert_eq!(html.as_str(), "a\tb\n\\u{1b}[31mc");
    }

    #[test]
    fn cell_has_its_header_and_only_its_long_words_may_be_broken() {
        let mut html = Html::default();
        let long = "é".repeat(LONGEST_WORD + 1);
        let row = vec![Cell::from("many words without one that is long"), Cell::from(long.as_str())];
        html.table(&["A", "B"], &[row]);
        let text = html.as_str();
        assert!(text.contains("<td data-label=\"A\">many words"), "{text}");
        assert!(text.contains("<td class=\"long\" data-label=\"B\">é"), "{text}");
    }

    #[test]
    fn table_has_at_most_its_rows_and_counts_the_others() {
        let rows: Vec<Vec<Cell>> = (0..MOST_ROWS + 3).map(|_| vec![Cell::from("x")]).collect();
        let mut html = Html::default();
        html.table(&["A"], &rows);
        assert_eq!(html.as_str().matches("<td ").count(), MOST_ROWS);
        assert!(html.as_str().contains("... and 3 more"));
        let mut html = Html::default();
        html.table(&["A"], &[]);
        assert_eq!(html.as_str(), "<p class=\"dim\">none</p>\n");
    }
}
