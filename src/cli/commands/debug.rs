//! `coracle debug POD --image IMAGE`: an ephemeral container in a running pod. With `-i` the
//! command attaches to it.

use std::time::Duration;

use crate::cli::exit::Exit;
use crate::cli::local::{DebugOptions, ExecOptions, LogsOptions};
use crate::cli::table::visible;
use crate::model::api::{ContainerState, Pod};
use crate::server::{DebugReply, PodDescription};
use crate::util::stop::StopToken;

use super::client::{Client, encode};
use super::console::Console;
use super::error::{CommandError, Outcome, print_stderr};
use super::{logs, streams};

/// How often the status of a starting container is read.
const POLL_PERIOD: Duration = Duration::from_millis(100);

pub(super) fn run(client: &Client, console: &mut Console<'_>, options: &DebugOptions) -> Outcome {
    let reply: DebugReply = client.post(&target(options))?;
    if options.stdin {
        return attach(client, console, options, &reply);
    }
    let (namespace, pod, container) =
        (visible(&reply.namespace), visible(&reply.pod), visible(&reply.container));
    writeln!(console.out, "ephemeral container {container} is being started in pod {namespace}/{pod}")?;
    writeln!(console.out, "its output: coracle logs {namespace}/{pod} -c {container}")?;
    Ok(Exit::Success)
}

/// Waits until the container runs, and attaches to it. If it has ended by then, prints its log.
fn attach(client: &Client, console: &mut Console<'_>, options: &DebugOptions, reply: &DebugReply) -> Outcome {
    if options.name.is_none() {
        print_stderr(&format!("the container's name is {}", reply.container));
    }
    let pod = format!("{}/{}", reply.namespace, reply.pod);
    let mut printed = String::new();
    loop {
        let described: PodDescription = client.get(&format!("/v1/describe?pod={}", encode(&pod)))?;
        match state(&described.view.pod, &reply.container) {
            Some(ContainerState { running: Some(_), .. }) => break,
            Some(ContainerState { terminated: Some(_), .. }) => {
                let container = Some(reply.container.clone());
                let options = LogsOptions { pod, container, ..LogsOptions::default() };
                return logs::run(client, console, &options);
            }
            Some(ContainerState { waiting: Some(waiting), .. }) => {
                let message = waiting.message.unwrap_or_default();
                if !message.is_empty() && message != printed {
                    print_stderr(&message);
                    printed = message;
                }
            }
            _ => {}
        }
        let phase = described.view.pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if matches!(phase, Some("Succeeded" | "Failed")) {
            let text = format!("pod {pod} has ended");
            return Err(CommandError::Rejected { status: 409, text });
        }
        let _ = StopToken::never().wait(POLL_PERIOD);
    }
    let (container, tty) = (Some(reply.container.clone()), options.tty);
    streams::session::run(client, &ExecOptions { pod, container, stdin: true, tty, command: Vec::new() })
}

fn state(pod: &Pod, container: &str) -> Option<ContainerState> {
    let all = pod.status.as_ref()?.ephemeral_container_statuses.as_ref()?;
    all.iter().find(|status| status.name == container)?.state.clone()
}

fn target(options: &DebugOptions) -> String {
    let mut target = format!("/v1/debug?pod={}&image={}", encode(&options.pod), encode(&options.image));
    for (key, value) in [("target", &options.target), ("name", &options.name)] {
        if let Some(value) = value {
            target.push_str(&format!("&{key}={}", encode(value)));
        }
    }
    for (flag, name) in [(options.stdin, "input"), (options.tty, "tty")] {
        if flag {
            target.push_str(&format!("&{name}=1"));
        }
    }
    for word in &options.command {
        target.push_str(&format!("&command={}", encode(word)));
    }
    target
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_become_a_query() {
        let plain = DebugOptions { pod: "ns/p".into(), image: "b:1".into(), ..DebugOptions::default() };
        assert_eq!(target(&plain), "/v1/debug?pod=ns/p&image=b:1");
        let all = DebugOptions {
            target: Some("c".into()),
            name: Some("d".into()),
            stdin: true,
            tty: true,
            command: vec!["sh".into(), "-c".into(), "a & b".into()],
            ..plain
        };
        assert_eq!(
            target(&all),
            "/v1/debug?pod=ns/p&image=b:1&target=c&name=d&input=1&tty=1&command=sh&command=-c&command=a%20%26%20b"
        );
    }
}
