//! Functions of shell scripts. A function hides the program of its name from the whole script, also from
//! the functions that were written before it.

use super::words::everything;

/// Programs that scripts call everywhere: those of coreutils, and of the packages that each Debian has.
const PROGRAMS: &str = "awk base64 basename cat chgrp chmod chown chroot cksum cmp comm cp cpio csplit cut \
    date dd df diff dirname du env expand expr factor false find flock fmt fold grep groups gunzip gzip head \
    hostname id install ip iptables join kill link ln logname losetup ls md5sum mkdir mkfifo mknod mktemp \
    mount mountpoint mv nice nl nohup nproc nsenter numfmt od openssl paste pathchk pgrep pkill pr printenv \
    printf ps pwd readlink realpath rm rmdir sed seq setsid sha1sum sha256sum sha512sum shred shuf sleep sort \
    split ss stat stdbuf stty sum sync tac tail tar tee test timeout touch tr true truncate tsort tty umount \
    uname unexpand uniq unlink unshare wc who whoami xargs yes";

/// Also a script with options of its interpreter, one of OpenRC, and one that others source.
fn is_script(file: &str, text: &str) -> bool {
    let interpreter = text.lines().next().and_then(|line| line.strip_prefix("#!"));
    let is_shell = |word: &str| word.ends_with("sh") || word.ends_with("/openrc-run");
    let is_sourced = text.lines().any(|line| line.starts_with("# shellcheck shell="));
    file.ends_with(".sh")
        || is_sourced
        || interpreter.is_some_and(|line| line.split_whitespace().any(is_shell))
}

/// The names of the functions that a script defines, each with its line.
fn functions(text: &str) -> Vec<(usize, &str)> {
    text.lines()
        .enumerate()
        .filter_map(|(number, line)| {
            let line = line.trim_start();
            let line = line.strip_prefix("function ").unwrap_or(line);
            let (name, _) = line.split_once("()")?;
            let name = name.trim_end();
            let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
            (!name.is_empty() && name.chars().all(is_name)).then_some((number + 1, name))
        })
        .collect()
}

#[test]
fn functions_of_scripts_hide_no_program() {
    let programs: Vec<&str> = PROGRAMS.split_whitespace().collect();
    let mut scripts = 0;
    let mut problems = Vec::new();
    for (file, text) in &everything() {
        if !is_script(file, text) {
            continue;
        }
        scripts += 1;
        for (line, name) in functions(text) {
            if programs.contains(&name) {
                problems.push(format!("{file}:{line}: {name}() hides the program {name} from this script"));
            }
        }
    }
    assert!(scripts > 20, "{scripts} scripts were read");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn scripts_are_known_by_their_interpreter_or_a_note() {
    assert!(is_script("a.sh", ""));
    for text in ["#!/bin/sh", "#!/bin/bash -e", "#!/usr/bin/env bash", "#!/sbin/openrc-run\n"] {
        assert!(is_script("a", text), "{text}");
    }
    assert!(is_script("a", "# What is sourced.\n# shellcheck shell=sh disable=SC2034\n"));
    assert!(!is_script("a", "#!/usr/bin/env python3\n#!/bin/sh"));
    assert!(!is_script("a.md", "cut() { :; }"));
}

#[test]
fn functions_of_a_script_are_found_where_they_are_defined() {
    let script =
        "cut() { :; }\n  inner () { :; }\n  link() (\nx=$(cut -c1)\nfunction sort() { :; }\n# tr() {";
    assert_eq!(functions(script), [(1, "cut"), (2, "inner"), (3, "link"), (5, "sort")]);
}
