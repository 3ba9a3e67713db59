//! The output of commands: tables, fields and documents.

use std::io::{self, Write};

use jiff::Timestamp;
use serde::Serialize;

use crate::cli::local::Output;
use crate::cli::table::{Cell, Color, Paint, Table, visible};
use crate::config::yaml::to_yaml;

use super::error::CommandError;

/// Standard output with its colors, and the time that ages count from.
pub(super) struct Console<'a> {
    pub out: &'a mut dyn Write,
    pub paint: Paint,
    pub now: Timestamp,
}

impl Console<'_> {
    pub(super) fn table(&mut self, table: &mut Table, rows: &[Vec<Cell>]) -> io::Result<()> {
        table.print(self.out, self.paint, rows)?;
        self.out.flush()
    }

    /// Prints a value as JSON or YAML; false: the output is a table, which is left to the caller.
    pub(super) fn document(&mut self, output: Output, value: &impl Serialize) -> Result<bool, CommandError> {
        match output {
            Output::Json => {
                serde_json::to_writer_pretty(&mut *self.out, value).map_err(io::Error::from)?;
                writeln!(self.out)?;
            }
            Output::Yaml => {
                let value = crate::util::json::to_value(value).map_err(io::Error::from)?;
                self.out.write_all(to_yaml(&value).as_bytes())?;
            }
            Output::Table | Output::Wide => return Ok(false),
        }
        self.out.flush()?;
        Ok(true)
    }

    /// Like [`Console::document`], for one of several values.
    pub(super) fn next_document(
        &mut self,
        output: Output,
        value: &impl Serialize,
    ) -> Result<bool, CommandError> {
        if output == Output::Yaml {
            writeln!(self.out, "---")?;
        }
        self.document(output, value)
    }

    /// The number of rows that the agent has left out, if any.
    pub(super) fn omitted(&mut self, rows: usize) -> io::Result<()> {
        if rows > 0 { writeln!(self.out, "... and {rows} more") } else { Ok(()) }
    }

    pub(super) fn heading(&mut self, text: &str) -> io::Result<()> {
        let text = self.paint.put(Some(Color::Bold), text);
        writeln!(self.out, "{text}")
    }

    /// `key:   value`, indented, values of one depth in one column.
    pub(super) fn field(&mut self, depth: usize, key: &str, value: &str) -> io::Result<()> {
        self.colored_field(depth, key, value, None)
    }

    pub(super) fn colored_field(
        &mut self,
        depth: usize,
        key: &str,
        value: &str,
        color: Option<Color>,
    ) -> io::Result<()> {
        let indent = depth * 2;
        let key = format!("{}:", visible(key));
        let width = 18_usize.saturating_sub(indent);
        let value = self.paint.put(color, &visible(value));
        let line = format!("{:indent$}{key:<width$} {value}", "");
        writeln!(self.out, "{}", line.trim_end())
    }

    /// One more value of a field.
    pub(super) fn continued(&mut self, value: &str) -> io::Result<()> {
        writeln!(self.out, "{:19}{}", "", visible(value))
    }

    /// A line without a key, indented.
    pub(super) fn line(&mut self, depth: usize, text: &str) -> io::Result<()> {
        let indent = depth * 2;
        writeln!(self.out, "{:indent$}{}", "", visible(text))
    }
}

/// Bytes for people, in binary units.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut tenths = bytes.saturating_mul(10) / 1024;
    let mut unit = 0;
    while tenths >= 10_240 && unit + 1 < UNITS.len() {
        tenths /= 1024;
        unit += 1;
    }
    let name = UNITS.get(unit).copied().unwrap_or_default();
    format!("{}.{} {name}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_one_decimal_and_a_binary_unit() {
        for (bytes, expected) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1_572_864, "1.5 MiB"),
            (5 << 30, "5.0 GiB"),
            (3 << 50, "3072.0 TiB"),
        ] {
            assert_eq!(size(bytes), expected);
        }
        assert!(size(u64::MAX).ends_with("TiB"));
    }
}
