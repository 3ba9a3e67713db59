//! Ages as kubectl writes them: two units at most, coarser with age.

use jiff::Timestamp;

/// The time from `then` to `now`.
pub(super) fn since(then: Timestamp, now: Timestamp) -> String {
    human(now.as_second().saturating_sub(then.as_second()))
}

/// Like `since`, for a time that may be unknown.
pub(super) fn since_or_unknown(then: Option<Timestamp>, now: Timestamp) -> String {
    then.map_or_else(|| "<unknown>".to_owned(), |then| since(then, now))
}

/// Seconds as an age.
pub(super) fn human(seconds: i64) -> String {
    let two = |big: i64, big_unit: char, small: i64, small_unit: char| match small {
        0 => format!("{big}{big_unit}"),
        small => format!("{big}{big_unit}{small}{small_unit}"),
    };
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        // Clocks often differ by a second; a larger difference is an error.
        ..=-2 => "<invalid>".to_owned(),
        -1..=0 => "0s".to_owned(),
        _ if seconds < 120 => format!("{seconds}s"),
        _ if minutes < 10 => two(minutes, 'm', seconds % 60, 's'),
        _ if minutes < 180 => format!("{minutes}m"),
        _ if hours < 8 => two(hours, 'h', minutes % 60, 'm'),
        _ if hours < 48 => format!("{hours}h"),
        _ if days < 8 => two(days, 'd', hours % 24, 'h'),
        _ if days < 2 * 365 => format!("{days}d"),
        _ if days < 8 * 365 => two(days / 365, 'y', days % 365, 'd'),
        _ => format!("{}y", days / 365),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_printed_as_by_kubectl() {
        const H: i64 = 3600;
        const D: i64 = 24 * H;
        for (seconds, expected) in [
            (-2, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (5, "5s"),
            (119, "119s"),
            (120, "2m"),
            (200, "3m20s"),
            (599, "9m59s"),
            (600, "10m"),
            (3 * H - 1, "179m"),
            (3 * H, "3h"),
            (5 * H + 61, "5h1m"),
            (8 * H, "8h"),
            (2 * D - 1, "47h"),
            (2 * D, "2d"),
            (4 * D + 3 * H, "4d3h"),
            (8 * D, "8d"),
            (729 * D, "729d"),
            (730 * D, "2y"),
            (731 * D, "2y1d"),
            (8 * 365 * D, "8y"),
            (i64::MAX, "292471208677y"),
        ] {
            assert_eq!(human(seconds), expected, "{seconds}");
        }
    }
}
