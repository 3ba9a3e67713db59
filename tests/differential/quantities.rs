//! Quantities against apimachinery.

use coracle::model::quantity::{Amount, NotAQuantity, canonical};
use serde_json::json;

use crate::dice::Dice;
use crate::peer::Peer;
use crate::{Cases, mutate, pick, rarely};

const SUFFIXES: [&str; 17] =
    ["", "", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const ODD_SUFFIXES: [&str; 14] =
    ["i", "K", "mi", "ki", "MI", "kk", "e", "Ee", "eE3", " ", "Gi ", "B", "x", "Ni"];

fn digits(dice: &mut Dice, most: u64) -> String {
    (0..dice.below(most)).map(|_| pick(dice, &["0", "0", "0", "1", "2", "5", "9"])).collect()
}

fn text(dice: &mut Dice) -> String {
    let mut text = String::new();
    if rarely(dice, 8) {
        text += pick(dice, &["-", "+", "--", " "]);
    }
    let long = if rarely(dice, 10) { 70 } else { 8 };
    text += &digits(dice, long);
    if rarely(dice, 2) {
        text += ".";
        text += &digits(dice, long);
    }
    match dice.below(10) {
        0 => text += pick(dice, &ODD_SUFFIXES),
        1 | 2 => {
            text += pick(dice, &["e", "E"]);
            text += pick(dice, &["", "", "-", "+"]);
            let most = if rarely(dice, 10) { 200 } else { 12 };
            text += &dice.below(most).to_string();
        }
        _ => text += pick(dice, &SUFFIXES),
    }
    if rarely(dice, 20) {
        let mut bytes = text.into_bytes();
        mutate(dice, &mut bytes);
        text = String::from_utf8_lossy(&bytes).into_owned();
    }
    text
}

/// What differs on purpose; each is a row in docs/differences.md.
fn known(text: &str, ours: &Result<Amount, NotAQuantity>) -> Option<&'static str> {
    let number = text.trim_start_matches(['-', '+']);
    let number =
        number.find(|one: char| !one.is_ascii_digit() && one != '.').map_or(number, |end| &number[..end]);
    match ours {
        Err(_) if !number.contains(|one: char| one.is_ascii_digit()) => Some("without a digit, zero for Go"),
        Err(_) if number.len() > 100 => Some("too many digits, refused here"),
        Ok(amount) if amount.is_negative() => Some("below zero, another number for Go"),
        _ => None,
    }
}

#[test]
fn a_quantity_is_the_same_for_apimachinery() {
    let (mut cases, mut dice) = Cases::new("quantities", 60_000);
    let mut peer = Peer::start();
    while cases.next() {
        let text = text(&mut dice);
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
