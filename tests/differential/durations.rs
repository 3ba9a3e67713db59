//! Durations of configurations against metav1.Duration.

use coracle::config::GoDuration;
use serde_json::json;

use crate::peer::Peer;
use crate::random::Random;
use crate::{Cases, mutate_text, pick, rarely};

const UNITS: [&str; 9] = ["ns", "us", "\u{b5}s", "\u{3bc}s", "ms", "s", "m", "h", "s"];
const ODD_UNITS: [&str; 10] = ["", "d", "S", "sec", " s", "s ", "min", "u", "\u{e4}s", "hh"];

fn digits(random: &mut Random, most: u64) -> String {
    (0..random.below(most)).map(|_| pick(random, &["0", "0", "1", "2", "5", "9"])).collect()
}

fn text(random: &mut Random) -> String {
    let mut text = String::new();
    if rarely(random, 6) {
        text += pick(random, &["-", "+", "--", " "]);
    }
    for _ in 0..if rarely(random, 15) { 0 } else { 1 + random.below(3) } {
        let long = if rarely(random, 8) { 45 } else { 5 };
        text += &digits(random, long);
        if rarely(random, 3) {
            text += ".";
            text += &digits(random, long);
        }
        text += if rarely(random, 12) { pick(random, &ODD_UNITS) } else { pick(random, &UNITS) };
    }
    if rarely(random, 20) {
        text = mutate_text(random, text);
    }
    text
}

#[test]
fn durations_equal_those_of_metav1() {
    let (mut cases, mut random) = Cases::new("durations", 60_000);
    let mut peer = Peer::start();
    while cases.next() {
        let text = if cases.done == 1 { "0".to_owned() } else { text(&mut random) };
        let theirs = peer.ask(&json!({"ask": "duration", "text": text}));
        let value = theirs["text"].as_str().map(str::to_owned);
        let ours = GoDuration::parse(&text).ok().map(|duration| duration.to_string());
        match (&ours, &value) {
            (Some(ours), Some(value)) if ours == value => cases.count("read alike"),
            (None, None) => cases.count("refused by both"),
            _ => cases.differs(&format!("{ours:?}, in Go {theirs}: {text:?}")),
        }
    }
    cases.end("read alike", 3);
}
