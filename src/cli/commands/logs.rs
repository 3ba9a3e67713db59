//! `coracle logs POD`: prints the log of a container unchanged.

use std::io::Read;

use crate::cli::exit::Exit;
use crate::cli::local::LogsOptions;

use super::client::{Client, ReadTimeout, encode};
use super::console::Console;
use super::error::{Outcome, print_stderr};

pub(super) fn run(client: &Client, console: &mut Console<'_>, options: &LogsOptions) -> Outcome {
    let timeout = if options.follow { ReadTimeout::None } else { ReadTimeout::Response };
    let mut response = client.open(&target(options, console.now), timeout)?;
    let several = response.header("Coracle-Containers").and_then(|text| text.parse().ok()).unwrap_or(1) > 1;
    if options.container.is_none() && several {
        let name = response.header("Coracle-Container").unwrap_or_default().to_owned();
        print_stderr(&format!("using container {name}; choose another one with -c"));
    }
    let mut chunk = vec![0; 64 * 1024];
    loop {
        let count = response.body.read(&mut chunk).map_err(client.io_error("read from"))?;
        if count == 0 {
            return Ok(Exit::Success);
        }
        // Like kubectl, prints control characters unchanged: a log may be binary or use colors.
        console.out.write_all(chunk.get(..count).unwrap_or_default())?;
        console.out.flush()?;
    }
}

fn target(options: &LogsOptions, now: jiff::Timestamp) -> String {
    let mut target = format!("/v1/logs?pod={}", encode(&options.pod));
    if let Some(container) = &options.container {
        target.push_str(&format!("&container={}", encode(container)));
    }
    for (flag, name) in
        [(options.follow, "follow"), (options.previous, "previous"), (options.timestamps, "timestamps")]
    {
        if flag {
            target.push_str(&format!("&{name}=true"));
        }
    }
    if let Some(tail) = options.tail {
        target.push_str(&format!("&tail={tail}"));
    }
    if let Some(since) = options.since {
        // A duration that is too long for a timestamp means the whole log.
        let start = now.checked_sub(since).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
        target.push_str(&format!("&since={start}"));
    }
    target
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn options_become_a_query() {
        let now = "2026-01-01T00:10:00Z".parse().unwrap();
        let plain = LogsOptions { pod: "a/b".into(), ..LogsOptions::default() };
        assert_eq!(target(&plain, now), "/v1/logs?pod=a/b");
        let all = LogsOptions {
            pod: "p".into(),
            container: Some("c d".into()),
            follow: true,
            previous: true,
            tail: Some(3),
            since: Some(Duration::from_secs(600)),
            timestamps: true,
        };
        assert_eq!(
            target(&all, now),
            "/v1/logs?pod=p&container=c%20d&follow=true&previous=true&timestamps=true&tail=3&since=2026-01-01T00:00:00Z"
        );
        let ages = LogsOptions { since: Some(Duration::MAX), ..plain };
        assert!(target(&ages, now).ends_with("since=1970-01-01T00:00:00Z"));
    }
}
