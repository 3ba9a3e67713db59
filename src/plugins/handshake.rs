//! The calls to a plugin that wants to register (Go:
//! pkg/kubelet/pluginmanager/operationexecutor/operation_generator.go).

use std::path::Path;
use std::time::Duration;

use super::Handlers;
use super::state::Plugin;
use crate::transport::generated::methods::pluginregistration as methods;
use crate::transport::generated::pluginregistration::{InfoRequest, RegistrationStatus};
use crate::transport::grpc::{CallError, Channel, Kind};
use crate::util::clip;
use crate::util::stop::StopToken;

/// Time limit of `GetInfo`, with the connection.
///
/// DIFFERS: upstream waits 10 s for the connection; a local socket connects at once or not at all.
const INFO_LIMIT: Duration = Duration::from_secs(1);
/// Time limit of `NotifyRegistrationStatus`.
const NOTIFY_LIMIT: Duration = Duration::from_secs(5);
/// The largest message of a plugin.
const MOST_BYTES: i32 = 64 << 10;
/// The longest name and endpoint, in bytes.
const MOST_TEXT: usize = 4096;
/// The longest text for a plugin, in bytes.
const MOST_ERROR: usize = 8192;

/// Makes a handshake.
///
/// # Errors
/// Upstream's text. The plugin is not registered then.
pub(super) fn register(socket: &Path, handlers: &Handlers, stop: &StopToken) -> Result<Plugin, String> {
    let shown = socket.display();
    let endpoint = socket.to_str().ok_or("RegisterPlugin error -- the path of the socket is not UTF-8")?;
    let dial = |error: String| format!("RegisterPlugin error -- dial failed at socket {shown}, err: {error}");
    let channel = Channel::limited(endpoint, MOST_BYTES).map_err(|error| dial(error.to_string()))?;
    let info = channel
        .call_with_stop(&methods::GET_INFO, &InfoRequest::default(), Some(INFO_LIMIT), stop)
        .map_err(|error| match error.kind {
            Kind::Unavailable => dial(short(error.to_string())),
            _ => short(format!(
                "RegisterPlugin error -- failed to get plugin info using RPC GetInfo at socket {shown}, err: {error}"
            )),
        })?;
    let notice = RegistrationNotifier { channel: &channel, stop };
    let endpoint = if info.endpoint.is_empty() { endpoint.to_owned() } else { info.endpoint };
    let plugin = Plugin { kind: info.type_, name: info.name, endpoint, versions: info.supported_versions };
    let Some(handler) = handlers.get(plugin.kind.as_str()) else {
        let kind = short(plugin.kind);
        return Err(notice.failure(
            socket,
            format!(
                "RegisterPlugin error -- no handler registered for plugin type: {kind} at socket {shown}"
            ),
        ));
    };
    let checked = if plugin.name.len() > MOST_TEXT || plugin.endpoint.len() > MOST_TEXT {
        Err(format!("the name or the endpoint is longer than {MOST_TEXT} bytes"))
    } else {
        handler.validate(&plugin.name, &plugin.endpoint, &plugin.versions)
    };
    checked.map_err(|error| {
        notice.failure(socket, format!("RegisterPlugin error -- plugin validation failed with err: {error}"))
    })?;
    if stop.is_stopped() {
        return Err("the agent ends".to_owned());
    }
    handler.register(&plugin.name, &plugin.endpoint, &plugin.versions, stop).map_err(|error| {
        notice
            .failure(socket, format!("RegisterPlugin error -- plugin registration failed with err: {error}"))
    })?;
    if let Err(error) = notice.send(true, String::new()) {
        // When the agent ends, plugins stay registered: the next one finds them.
        if !stop.is_stopped() {
            handler.deregister(&plugin.name, &plugin.endpoint);
        }
        return Err(short(format!(
            "RegisterPlugin error -- failed to send registration status at socket {shown}, err: {error}"
        )));
    }
    Ok(plugin)
}

/// What a plugin is sent about its registration.
struct RegistrationNotifier<'a> {
    channel: &'a Channel,
    stop: &'a StopToken,
}

impl RegistrationNotifier<'_> {
    /// Tells the plugin why it is not registered, and returns the text for the log.
    fn failure(&self, socket: &Path, error: String) -> String {
        let error = short(error);
        match self.send(false, error.clone()) {
            Ok(()) => error,
            Err(failed) => short(format!(
                "RegisterPlugin error -- failed to send error at socket {}, err: {failed}: {error}",
                socket.display()
            )),
        }
    }

    fn send(&self, plugin_registered: bool, error: String) -> Result<(), CallError> {
        let status = RegistrationStatus { plugin_registered, error, ..RegistrationStatus::default() };
        let method = &methods::NOTIFY_REGISTRATION_STATUS;
        self.channel.call_with_stop(method, &status, Some(NOTIFY_LIMIT), self.stop).map(drop)
    }
}

/// A plugin's texts end in the log and in the memory of the agent.
fn short(text: impl AsRef<str>) -> String {
    clip::line(text.as_ref(), MOST_ERROR)
}
