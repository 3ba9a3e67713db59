//! The program of `tests/mutations/run`: chooses mutations of the sources, inserts them so that an
//! environment variable activates one of them, runs a test program within limits, and prints the table.
//! It uses no randomness but the seed: the same sources and the same seed give the same mutations.

// The rules for the agent's threads do not concern this program.
#![allow(clippy::disallowed_methods)]

mod attempt;
mod choice;
mod modules;
mod rewrite;
mod sites;
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use choice::Mutation;

/// The rooms from which mutations are drawn, each with the same number.
const ROOMS: &[&str] =
    &["pods", "sync", "status", "volumes", "sources", "kube", "eviction", "placement", "runtime", "probes"];

/// In the directory of a run: the chosen mutations, the keys of those that do not compile, and the results.
const CHOSEN: &str = "mutations.tsv";
const DROPPED: &str = "dropped";
const RESULTS: &str = "results.tsv";

const USAGE: &str = "usage:
  coracle-mutations choose SOURCES COPY RUN SEED COUNT
  coracle-mutations drop RUN <MESSAGES OF CARGO
  coracle-mutations attempt OUTCOME SECONDS all|first IGNORED PROGRAM [ARGUMENT...]
  coracle-mutations table RUN";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["choose", sources, copy, run, seed, count] => {
            choose(Path::new(sources), Path::new(copy), Path::new(run), seed, count)
        }
        ["drop", run] => drop_failing(Path::new(run)),
        ["attempt", outcome, seconds, extent, ignored, program, arguments @ ..] => {
            attempt::run(outcome, seconds, *extent == "all", ignored, program, arguments)
        }
        ["table", run] => print_table(Path::new(run)),
        _ => Err(USAGE.to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

pub(crate) fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Writes only what changes, so that cargo compiles nothing else.
fn write(path: &Path, text: &str) -> Result<(), String> {
    if fs::read_to_string(path).is_ok_and(|present| present == text) {
        return Ok(());
    }
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// The lines of a file that need not exist.
pub(crate) fn lines(path: &Path) -> Vec<String> {
    fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// Chooses mutations of the tree `sources`, and writes the mutated files into its copy and the table of
/// mutations into the directory of the run.
fn choose(sources: &Path, copy: &Path, run: &Path, seed: &str, count: &str) -> Result<(), String> {
    let seed: u64 = seed.parse().map_err(|_| format!("the seed is not a number: {seed}"))?;
    let count: usize = count.parse().map_err(|_| format!("the count is not a number: {count}"))?;
    let files = modules::of_library(sources)?;
    let mut sites = Vec::new();
    for (file, text) in &files {
        let room = file.strip_prefix("src/").and_then(|rest| rest.split(['/', '.']).next());
        let Some(room) = ROOMS.iter().find(|name| Some(**name) == room) else { continue };
        sites.extend(choice::candidates(seed, room, file, text)?);
    }
    let dropped = lines(&run.join(DROPPED));
    let mut chosen = choice::choose(sites, ROOMS, count, &dropped)?;
    for (file, text) in &files {
        let mut mutated = rewrite::with_mutations(file, text, &mut chosen);
        if file == "src/lib.rs" {
            mutated = rewrite::with_switch(&mutated);
        }
        write(&copy.join(file), &mutated)?;
    }
    let text: String = chosen.iter().map(|mutation| mutation.to_row() + "\n").collect();
    write(&run.join(CHOSEN), &text)
}

fn chosen(run: &Path) -> Result<Vec<Mutation>, String> {
    let path: PathBuf = run.join(CHOSEN);
    let rows = read(&path)?;
    let mutations: Option<Vec<Mutation>> = rows.lines().map(Mutation::from_row).collect();
    mutations.ok_or_else(|| format!("{}: a row is not complete", path.display()))
}

/// Notes the mutations in which the messages of cargo have errors; the next choice draws others.
fn drop_failing(run: &Path) -> Result<(), String> {
    let chosen = chosen(run)?;
    let messages = std::io::read_to_string(std::io::stdin()).map_err(|error| error.to_string())?;
    let failing = choice::failing(&chosen, &messages)?;
    let mut dropped = lines(&run.join(DROPPED));
    for (mutation, message) in failing {
        println!("does not compile, another is drawn: {}: {message}", mutation.place());
        println!("  {}\n  {}", mutation.before, mutation.after);
        dropped.push(mutation.key_text());
    }
    write(&run.join(DROPPED), &(dropped.join("\n") + "\n"))
}

fn print_table(run: &Path) -> Result<(), String> {
    let results: Vec<table::Outcome> =
        lines(&run.join(RESULTS)).iter().filter_map(|row| table::Outcome::from_row(row)).collect();
    print!("{}", table::text(&chosen(run)?, &results));
    Ok(())
}
