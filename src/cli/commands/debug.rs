//! `coracle debug POD --image IMAGE`: an ephemeral container in a pod that runs.

use crate::cli::Exit;
use crate::cli::table::visible;
use crate::server::DebugReply;

use super::Outcome;
use super::client::{Client, encode};
use super::console::Console;

/// What was asked.
#[derive(Debug, Clone, Default)]
pub(super) struct Options {
    pub pod: String,
    pub image: String,
    pub target: Option<String>,
    pub name: Option<String>,
    pub command: Vec<String>,
}

pub(super) fn run(client: &Client, console: &mut Console<'_>, options: &Options) -> Outcome {
    let reply: DebugReply = client.post(&target(options))?;
    let (namespace, pod, container) =
        (visible(&reply.namespace), visible(&reply.pod), visible(&reply.container));
    writeln!(console.out, "ephemeral container {container} is being started in pod {namespace}/{pod}")?;
    writeln!(console.out, "its output: coracle logs {namespace}/{pod} -c {container}")?;
    Ok(Exit::Success)
}

fn target(options: &Options) -> String {
    let mut target = format!("/v1/debug?pod={}&image={}", encode(&options.pod), encode(&options.image));
    for (key, value) in [("target", &options.target), ("name", &options.name)] {
        if let Some(value) = value {
            target.push_str(&format!("&{key}={}", encode(value)));
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
        let plain = Options { pod: "ns/p".into(), image: "b:1".into(), ..Options::default() };
        assert_eq!(target(&plain), "/v1/debug?pod=ns/p&image=b:1");
        let all = Options {
            target: Some("c".into()),
            name: Some("d".into()),
            command: vec!["sh".into(), "-c".into(), "a & b".into()],
            ..plain
        };
        assert_eq!(
            target(&all),
            "/v1/debug?pod=ns/p&image=b:1&target=c&name=d&command=sh&command=-c&command=a%20%26%20b"
        );
    }
}
