//! Lifecycle hooks: actions after the start and before the end of a container (Go:
//! pkg/kubelet/lifecycle/handlers.go).
//!
//! A hook that runs when the agent stops is not resumed. After the next start postStart counts as
//! done, and a pod that still has to be stopped runs its preStop again.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded, select_biased};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::cri::{CriError, ErrorClass};
use crate::model::api::{Container, HTTPGetAction, LifecycleHandler};
use crate::model::event::EventType;
use crate::model::ids::ContainerId;
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::model::version::HOOK_USER_AGENT;
use crate::transport::dial::{HttpGet, Scheme, http_get, join_host_port};
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;
use crate::util::tracing;

use super::client::Runtime;
use super::grace::{Countdown, Grace};
use super::kill::{ContainerKill, MINIMUM_GRACE};
use super::kill_order::pause;
use super::security_context::pod_text;
use super::start_request::{StartFailure, regarding};

/// The bytes of each output stream of a failing command that are shown.
const OUTPUT_SHOWN: usize = 1024;

/// A hook and the container that it belongs to.
#[derive(Clone, Copy)]
pub(super) struct Hook<'a> {
    pub(super) handler: &'a LifecycleHandler,
    pub(super) pod: &'a Pod,
    pub(super) container: &'a Container,
    pub(super) id: &'a ContainerId,
    /// The pod's addresses as its status has them.
    pub(super) ips: &'a [IpAddr],
}

/// How a hook that did not succeed ended.
#[derive(Debug, PartialEq, Eq)]
enum HookError {
    /// The stop token ended the hook.
    Stopping,
    /// The hook failed, or did not end in time.
    Failed(String),
}

impl Hook<'_> {
    /// Whether the hook runs a command or sends a request. Such a call does not end by itself at
    /// the end of the grace period.
    fn makes_call(&self) -> bool {
        self.handler.exec.is_some() || self.handler.http_get.is_some()
    }

    /// The status message of a failed hook. Events do not show its output, which may contain
    /// secrets: more users can read events than statuses.
    fn failure(&self, kind: &str, what: &str, error: &str) -> HookError {
        let (container, pod) = (&self.container.name, pod_text(self.pod));
        HookError::Failed(format!(
            "{kind} lifecycle hook ({what}) for Container {container:?} in Pod {pod:?} failed - error: {error}"
        ))
    }
}

impl Runtime {
    /// Runs the postStart hook of a container that has just been started. If that fails the
    /// container is stopped again.
    ///
    /// DIFFERS: a pod that is to be stopped does not wait for the end of the hook.
    ///
    /// # Errors
    /// `PostStartHookError`.
    pub(super) fn post_start(&self, hook: Hook<'_>, stop: &StopToken) -> Result<(), StartFailure> {
        let message = match self.run_hook(hook, Instant::now(), None, stop) {
            Ok(()) => return Ok(()),
            Err(HookError::Stopping) => {
                return Err(StartFailure {
                    reason: reasons::POST_START_HOOK_ERROR,
                    message: "the hook was cancelled".to_owned(),
                    retry_at: None,
                    stopping: true,
                });
            }
            Err(HookError::Failed(message)) => message,
        };
        let (pod, name) = (hook.pod, &hook.container.name);
        // Part of it is from the container: escaped, it cannot imitate log lines of the agent.
        log::warn!("{}", message.escape_debug());
        self.warn(pod, name, reasons::FAILED_POST_START_HOOK, "PostStartHook failed");
        let kill = ContainerKill {
            message: Some(reasons::FAILED_POST_START_HOOK.to_owned()),
            ips: hook.ips.to_vec(),
            ..ContainerKill::for_container(pod, hook.id, name)
        };
        if let Err(error) = self.kill_container(&kill, stop) {
            // The next inspection finds it running; as upstream, the pod then continues.
            log::warn!("cannot stop the container whose postStart hook failed: {error}");
        }
        Err(StartFailure { reason: reasons::POST_START_HOOK_ERROR, message, retry_at: None, stopping: false })
    }

    /// Runs the preStop hook of `kill`, if there is one, and waits for its end, until the grace
    /// period is over at most. A call that takes longer continues in the thread `hook/<uid>` while its
    /// container is stopped (Go: executePreStopHook in pkg/kubelet/kuberuntime). A hook that fails
    /// raises an event and changes nothing else.
    ///
    /// Returns the thread of a hook that has not ended in its grace period. Dropping it cancels the
    /// hook, so it is to be kept until the container has ended.
    ///
    /// # Errors
    /// When it is cancelled.
    pub(super) fn pre_stop(
        &self,
        kill: &ContainerKill,
        countdown: &Countdown<'_>,
    ) -> Result<Option<Running>, CriError> {
        let begun = Instant::now();
        let Some(hook) = kill.pre_stop() else { return Ok(None) };
        let stopped = || CriError::Stopped { method: "StopContainer", object: hook.id.to_string() };
        let mut wait = countdown.wait();
        let mut left = countdown.time_left().unwrap_or_default();
        let spawned = self.spawn_pre_stop(kill, hook, left, countdown.grace());
        let _waiting = threads::waiting("preStop hook");
        loop {
            match &spawned {
                Some((_, end)) => select_biased! {
                    recv(wait.token.signal()) -> _ => {}
                    recv(end) -> _ => return Ok(None),
                    // A deadline beyond the range of the clock is no deadline.
                    recv(timers::deadline_channel(Instant::now().checked_add(left))) -> _ => break,
                },
                None => {
                    if self.run_pre_stop(hook, begun, left, &wait.token).is_ok() {
                        return Ok(None);
                    }
                }
            }
            if !countdown.is_shortened(&wait) {
                return Err(stopped());
            }
            // A call without a thread of its own was cancelled, and is not made again.
            if spawned.is_none() && hook.makes_call() {
                return Ok(None);
            }
            wait = countdown.wait();
            match countdown.time_left() {
                Some(time) => left = time,
                None => break,
            }
        }
        log::info!(
            "preStop hook has not ended in its grace period pod={} uid={} container={}",
            hook.pod.full_name(),
            hook.pod.uid(),
            hook.container.name
        );
        Ok(spawned.map(|(thread, _)| thread))
    }

    /// Starts a hook in a thread of its own; the channel disconnects when it has ended. `None` for
    /// a hook that only sleeps, and if no thread can be started: such a hook ends with its grace
    /// period.
    fn spawn_pre_stop(
        &self,
        kill: &ContainerKill,
        hook: Hook<'_>,
        left: Duration,
        grace: &Grace,
    ) -> Option<(Running, Receiver<()>)> {
        if !hook.makes_call() {
            return None;
        }
        // At this limit the stop of the container has succeeded or failed.
        let limit = left.saturating_add(self.shared.cri.stop_limit(MINIMUM_GRACE));
        let (ended, end) = bounded(0);
        let (runtime, kill, grace) = (self.clone(), kill.clone(), grace.clone());
        let name = format!("hook/{}", hook.pod.uid().short());
        let parent = tracing::current();
        let spawned = threads::spawn(&name, Stack::Small, OnDeath::Unsupervised, move |stop| {
            let _ended = ended;
            let _span = tracing::enter(parent);
            let Some(hook) = kill.pre_stop() else { return };
            if runtime.run_pre_stop(hook, Instant::now(), limit, &stop).is_err() && !grace.is_cancelled() {
                let (container, pod) = (&hook.container.name, pod_text(hook.pod));
                runtime.pre_stop_failed(
                    hook,
                    &format!("preStop hook of Container {container:?} in Pod {pod:?} outlived its container"),
                );
            }
        });
        match spawned {
            Ok(thread) => Some((thread, end)),
            Err(error) => {
                log::warn!("no thread for a preStop hook: {error} pod={}", hook.pod.full_name());
                None
            }
        }
    }

    /// Runs a preStop hook that began at `begun`, for `limit` at most.
    ///
    /// # Errors
    /// When `stop` cancels it.
    fn run_pre_stop(
        &self,
        hook: Hook<'_>,
        begun: Instant,
        limit: Duration,
        stop: &StopToken,
    ) -> Result<(), HookError> {
        match self.run_hook(hook, begun, Some(limit), stop) {
            Err(HookError::Failed(message)) => {
                self.pre_stop_failed(hook, &message);
                Ok(())
            }
            ended => ended,
        }
    }

    fn pre_stop_failed(&self, hook: Hook<'_>, message: &str) {
        // Part of it may be from the container: escaped, it cannot imitate log lines of the agent.
        log::warn!("{}", message.escape_debug());
        self.warn(hook.pod, &hook.container.name, reasons::FAILED_PRE_STOP_HOOK, "PreStopHook failed");
    }

    fn warn(&self, pod: &Pod, container: &str, reason: &'static str, message: &str) {
        self.shared.events.raise(regarding(pod, container), EventType::Warning, reason, message);
    }

    /// Runs a hook. A sleep ends its time after `begun`.
    fn run_hook(
        &self,
        hook: Hook<'_>,
        begun: Instant,
        limit: Option<Duration>,
        stop: &StopToken,
    ) -> Result<(), HookError> {
        let _waiting = threads::waiting("lifecycle hook");
        let handler = hook.handler;
        if let Some(exec) = &handler.exec {
            return self.run_exec(hook, exec.command.as_deref().unwrap_or_default(), limit, stop);
        }
        if let Some(get) = &handler.http_get {
            return self.run_http(hook, get, limit, stop);
        }
        if let Some(sleep) = &handler.sleep {
            let wanted = Duration::from_secs(u64::try_from(sleep.seconds).unwrap_or(0));
            let wanted = wanted.saturating_sub(begun.elapsed());
            let granted = limit.map_or(wanted, |limit| wanted.min(limit));
            return match pause(granted, stop) {
                true if granted < wanted => {
                    metrics::SLEEP_ENDED_EARLY.inc();
                    Ok(())
                }
                true => Ok(()),
                false => Err(HookError::Stopping),
            };
        }
        // A TCP hook makes no connection, as upstream.
        let kind = if handler.tcp_socket.is_some() { "tcpSocket" } else { "none" };
        Err(HookError::Failed(format!("Cannot run handler: invalid handler: {kind}")))
    }

    fn run_exec(
        &self,
        hook: Hook<'_>,
        command: &[String],
        limit: Option<Duration>,
        stop: &StopToken,
    ) -> Result<(), HookError> {
        let failure = |error: &str, output: &[u8]| {
            let output = String::from_utf8_lossy(output);
            let error = format!("{error}, message: {output:?}");
            hook.failure("Exec", &format!("[{}]", command.join(" ")), &error)
        };
        match self.shared.cri.exec_sync_within(hook.id, command.to_vec(), limit, stop) {
            Ok(output) if output.exit_code == 0 => Ok(()),
            Ok(output) => {
                // DIFFERS: upstream shows all of it, which may be megabytes.
                let cut = |bytes: &[u8]| bytes.get(..OUTPUT_SHOWN).unwrap_or(bytes).to_vec();
                let (stdout, stderr) = (cut(&output.stdout), cut(&output.stderr));
                let shown = String::from_utf8_lossy(&stderr);
                let error =
                    format!("command '{}' exited with {}: {shown}", command.join(" "), output.exit_code);
                Err(failure(&error, &[stdout, stderr].concat()))
            }
            Err(error) if error.class() == ErrorClass::Stopping => Err(HookError::Stopping),
            Err(error) => Err(failure(&error.to_string(), b"")),
        }
    }

    /// A response with any status is a success.
    fn run_http(
        &self,
        hook: Hook<'_>,
        action: &HTTPGetAction,
        limit: Option<Duration>,
        stop: &StopToken,
    ) -> Result<(), HookError> {
        let start = Instant::now();
        let failure = |error: &str| hook.failure("HTTP", action.path.as_deref().unwrap_or_default(), error);
        let host = self.host_of(hook, action).map_err(|error| failure(&error))?;
        let port = port_number(hook.container, &action.port).map_err(|error| failure(&error))?;
        let mut headers: Vec<(String, String)> = action
            .http_headers
            .iter()
            .flatten()
            .map(|header| (header.name.clone(), header.value.clone()))
            .collect();
        let get = |scheme, headers: &[(String, String)]| {
            let response = http_get(
                &HttpGet {
                    scheme,
                    host: &host,
                    port,
                    path: action.path.as_deref().unwrap_or_default(),
                    headers,
                    user_agent: HOOK_USER_AGENT,
                    timeout: limit.map(|limit| limit.saturating_sub(start.elapsed())),
                },
                stop,
            );
            match response {
                // The header was received, and the body is not needed.
                Err(error) if error.is_body() => Ok(()),
                response => response.map(drop),
            }
        };
        let scheme = if action.scheme.as_deref() == Some("HTTPS") { Scheme::Https } else { Scheme::Http };
        let error = match get(scheme, &headers) {
            Ok(()) => return Ok(()),
            Err(error) if error.is_stopped() => return Err(HookError::Stopping),
            Err(error) => error,
        };
        if !error.is_plain_http() {
            return Err(failure(&error.to_string()));
        }
        // Older kubelets never used TLS here, and containers rely on that. But secrets must not be
        // sent unencrypted.
        headers.retain(|(name, _)| !name.eq_ignore_ascii_case("Authorization"));
        match get(Scheme::Http, &headers) {
            Ok(()) => {
                metrics::LIFECYCLE_HTTP_FALLBACKS.inc();
                let host = join_host_port(&host, port);
                let text = format!(
                    "request to HTTPS lifecycle hook {host} got HTTP response, retry with HTTP succeeded"
                );
                self.shared.events.warning(hook.pod, reasons::LIFECYCLE_HTTP_FALLBACK, text);
                Ok(())
            }
            Err(error) if error.is_stopped() => Err(HookError::Stopping),
            Err(_) => Err(failure(&error.to_string())),
        }
    }

    /// The host of a hook without one: the pod's address. Without an API server a status shows none
    /// for a pod on the node's network.
    ///
    /// DIFFERS: then the node's is used. Upstream uses only the runtime's address, and fails
    /// without one also with an API server.
    fn host_of(&self, hook: Hook<'_>, get: &HTTPGetAction) -> Result<String, String> {
        if let Some(host) = get.host.as_deref().filter(|host| !host.is_empty()) {
            return Ok(host.to_owned());
        }
        let of_node = self.shared.settings.node_ips.first().filter(|_| hook.pod.host_network());
        let ip = hook.ips.first().or(of_node);
        ip.map(ToString::to_string).ok_or_else(|| "failed to find networking container".to_owned())
    }
}

/// The port of a handler: a number, a port's name, or a number as a string.
fn port_number(container: &Container, port: &IntOrString) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => i64::from(*number),
        IntOrString::String(name) => container
            .ports
            .iter()
            .flatten()
            .find(|port| port.name.as_deref() == Some(name))
            .map(|port| i64::from(port.container_port))
            .or_else(|| name.parse().ok())
            .ok_or_else(|| format!("the container has no port {name:?}"))?,
    };
    match u16::try_from(number) {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(format!("invalid port number: {number}")),
    }
}
