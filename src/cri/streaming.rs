//! CRI calls that return a URL, at which the runtime serves exec, attach or port-forward.

use super::errors::CriError;
use super::runtime_client::RuntimeClient;
use crate::model::ids::{ContainerId, SandboxId};
use crate::transport::generated::{methods, runtime};

/// Which streams connect the process and the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Streams {
    /// Standard input, from the client.
    pub stdin: bool,
    /// Standard output, to the client.
    pub stdout: bool,
    /// Standard error, to the client, separate from the standard output.
    pub stderr: bool,
    /// Whether the process has a terminal, which merges the two outputs.
    pub tty: bool,
}

impl RuntimeClient {
    /// The URL that runs `command` in the container. It is valid for one use.
    ///
    /// # Errors
    /// When the call fails or no URL comes back.
    pub fn exec_url(
        &self,
        id: &ContainerId,
        command: Vec<String>,
        streams: Streams,
    ) -> Result<String, CriError> {
        let request = runtime::ExecRequest {
            container_id: id.to_string(),
            cmd: command,
            tty: streams.tty,
            stdin: streams.stdin,
            stdout: streams.stdout,
            stderr: streams.stderr,
            ..Default::default()
        };
        let response = self.caller.call(&methods::EXEC, id.as_str(), &request)?;
        self.url(methods::EXEC.name, id.as_str(), response.url)
    }

    /// The URL that attaches to the container's first process. It is valid for one use.
    ///
    /// # Errors
    /// When the call fails or no URL comes back.
    pub fn attach_url(&self, id: &ContainerId, streams: Streams) -> Result<String, CriError> {
        let request = runtime::AttachRequest {
            container_id: id.to_string(),
            stdin: streams.stdin,
            tty: streams.tty,
            stdout: streams.stdout,
            stderr: streams.stderr,
            ..Default::default()
        };
        let response = self.caller.call(&methods::ATTACH, id.as_str(), &request)?;
        self.url(methods::ATTACH.name, id.as_str(), response.url)
    }

    /// The URL that forwards to ports of the sandbox. It is valid for one use. `ports` is empty if
    /// the protocol names the ports only after the connection.
    ///
    /// # Errors
    /// When the call fails or no URL comes back.
    pub fn port_forward_url(&self, id: &SandboxId, ports: &[u16]) -> Result<String, CriError> {
        let request = runtime::PortForwardRequest {
            pod_sandbox_id: id.to_string(),
            port: ports.iter().map(|port| i32::from(*port)).collect(),
            ..Default::default()
        };
        let response = self.caller.call(&methods::PORT_FORWARD, id.as_str(), &request)?;
        self.url(methods::PORT_FORWARD.name, id.as_str(), response.url)
    }

    fn url(&self, method: &'static str, object: &str, url: String) -> Result<String, CriError> {
        if url.is_empty() {
            return Err(self.caller.incomplete(method, object, "url"));
        }
        Ok(url)
    }
}
