//! Quantities against apimachinery.

use coracle::model::quantity::{Amount, QuantityError, canonical};
use serde_json::json;

use crate::peer::Peer;
use crate::random::Random;
use crate::{Cases, mutate_text, pick, rarely};

const SUFFIXES: [&str; 17] =
    ["", "", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const ODD_SUFFIXES: [&str; 14] =
    ["i", "K", "mi", "ki", "MI", "kk", "e", "Ee", "eE3", " ", "Gi ", "B", "x", "Ni"];

fn digits(random: &mut Random, most: u64) -> String {
    (0..random.below(most)).map(|_| pick(random, &["0", "0", "0", "1", "2", "5", "9"])).collect()
}

fn text(random: &mut Random) -> String {
    let mut text = String::new();
    if rarely(random, 8) {
        text += pick(random, &["-", "+", "--", " "]);
    }
    let long = if rarely(random, 10) { 70 } else { 8 };
    text += &digits(random, long);
    if rarely(random, 2) {
        text += ".";
        text += &digits(random, long);
    }
    match random.below(10) {
        0 => text += pick(random, &ODD_SUFFIXES),
        1 | 2 => {
            text += pick(random, &["e", "E"]);
            text += pick(random, &["", "", "-", "+"]);
            let most = if rarely(random, 10) { 200 } else { 12 };
            text += &random.below(most).to_string();
        }
        _ => text += pick(random, &SUFFIXES),
    }
    if rarely(random, 20) {
        text = mutate_text(random, text);
    }
    text
}

/// What differs on purpose; each is a row in docs/differences.md.
fn known(text: &str, ours: &Result<Amount, QuantityError>) -> Option<&'static str> {
    let number = text.trim_start_matches(['-', '+']);
    let number = number
        .find(|character: char| !character.is_ascii_digit() && character != '.')
        .map_or(number, |end| &number[..end]);
    match ours {
        Err(_) if !number.contains(|character: char| character.is_ascii_digit()) => {
            Some("without a digit, zero for Go")
        }
        Err(_) if number.len() > 100 => Some("too many digits, refused here"),
        Ok(amount) if amount.is_negative() => Some("below zero, another number for Go"),
        _ => None,
    }
}

#[test]
fn quantities_equal_those_of_apimachinery() {
    let (mut cases, mut random) = Cases::new("quantities", 60_000);
    let mut peer = Peer::start();
    while cases.next() {
        let text = text(&mut random);
        let theirs = peer.ask(&json!({"ask": "quantity", "text": text}));
        let parsed = Amount::parse(&text);
        let known = known(&text, &parsed);
        match (parsed, theirs["ok"] == true) {
            (Ok(_), true) if theirs["fits"] != true => cases.count("too large for Go's numbers"),
            (Ok(ours), true) => {
                let found = (ours.units(), ours.milli(), canonical(&text));
                let read = (
                    theirs["units"].as_i64().unwrap(),
                    theirs["milli"].as_i64().unwrap(),
                    theirs["text"].as_str().unwrap().to_owned(),
                );
                match known {
                    _ if found == read => cases.count("read alike"),
                    Some(known) if found.2 == read.2 => cases.count(known),
                    _ => cases.differs(&format!("{text:?}: {found:?}, in Go {read:?}")),
                }
            }
            (Ok(ours), false) => cases.differs(&format!("{text:?}: {ours:?}, refused by Go")),
            (Err(_), true) => match known {
                Some(known) => cases.count(known),
                None => cases.differs(&format!("{text:?}: refused, in Go {theirs}")),
            },
            (Err(_), false) => cases.count("refused by both"),
        }
    }
    cases.end("read alike", 2);
}
