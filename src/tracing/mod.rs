//! Sends spans to an OpenTelemetry collector (Go: component-base/tracing, and the exporter of
//! go.opentelemetry.io/otel).
//!
//! `util::tracing` records spans in a bounded queue.
//! Threads: `traces` takes them from there in batches and sends each in a call, OTLP over gRPC without
//! TLS; it exists only with `tracing` in the configuration.
//! Invariants: a thread whose span ends never waits, whatever the collector does; while no span waits, this
//! room does not wake up; a call has a deadline.
//! Absent on purpose: TLS, as upstream; the variables `OTEL_*` of the environment.

mod encode;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::transport::destination::{Destination, DestinationError, RemoteService, ServiceError};
use crate::transport::generated::{methods, traces};
use crate::util::clip;
use crate::util::stop::{StopToken, Waited};
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::tracing::{self, FinishedSpan, Sampler, Spans};

/// The collector without `tracing.endpoint`: the port of OTLP over gRPC.
const DEFAULT_ENDPOINT: &str = "localhost:4317";
/// How long the first span of a batch waits for others.
const PATIENCE: Duration = Duration::from_secs(5);
/// The limit for a batch, with its repetitions.
const EXPORT_LIMIT: Duration = Duration::from_secs(10);
/// The most bytes of spans in one call: a collector takes 4 MiB. What the spans have in common is in the
/// rest.
const REQUEST_BYTES: usize = (4 << 20) - (64 << 10);
/// The time before a batch is sent again.
const RETRY: Duration = Duration::from_secs(5);
/// The limit for what is left when the agent stops.
const LAST_LIMIT: Duration = Duration::from_secs(1);
/// At most one log line about lost spans in this time.
const LOG_PERIOD: Duration = Duration::from_secs(60);
/// The longest text of a collector in a log line.
const MAX_TEXT: usize = 512;

/// `tracing` of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The collector.
    pub destination: Destination,
    /// Which traces are recorded.
    pub sampler: Sampler,
    /// The name of this host, which the spans carry.
    pub host: String,
}

impl Settings {
    /// `endpoint` and `rate` are `tracing.endpoint` and `tracing.samplingRatePerMillion`.
    ///
    /// # Errors
    /// When no connection can be made to such an endpoint.
    pub fn new(endpoint: Option<&str>, rate: Option<i32>, host: &str) -> Result<Settings, DestinationError> {
        Ok(Settings {
            destination: Destination::parse(endpoint.unwrap_or(DEFAULT_ENDPOINT))?,
            sampler: Sampler::per_million(rate),
            host: host.to_owned(),
        })
    }
}

/// Switches the recording of spans on and starts the thread. `None`: it is on already.
///
/// # Errors
/// When the thread cannot be started.
pub fn spawn(settings: Settings) -> std::io::Result<Option<Running>> {
    let Some(spans) = tracing::enable(settings.sampler) else { return Ok(None) };
    let Settings { destination, host, .. } = settings;
    let mut collector = Collector(RemoteService::new(destination));
    // Without it only spans are lost.
    threads::spawn("traces", Stack::Large, OnDeath::Unsupervised, move |stop| {
        let mut exporter = Exporter { spans, host, request_bytes: REQUEST_BYTES, losses: Losses::default() };
        exporter.run(&mut collector, PATIENCE, &stop);
    })
    .map(Some)
}

/// Where batches go.
trait Sink {
    /// Sends a batch once.
    fn send(
        &mut self,
        request: &traces::ExportRequest,
        limit: Duration,
        stop: &StopToken,
    ) -> Result<traces::ExportResponse, ServiceError>;
}

struct Collector(RemoteService);

impl Sink for Collector {
    fn send(
        &mut self,
        request: &traces::ExportRequest,
        limit: Duration,
        stop: &StopToken,
    ) -> Result<traces::ExportResponse, ServiceError> {
        self.0.call(&methods::traces::EXPORT, request, limit, stop)
    }
}

struct Exporter {
    spans: Spans,
    host: String,
    /// The most bytes of spans in one call.
    request_bytes: usize,
    losses: Losses,
}

impl Exporter {
    fn run(&mut self, sink: &mut impl Sink, patience: Duration, stop: &StopToken) {
        loop {
            let batch = {
                let _waiting = threads::waiting("spans");
                self.spans.next_batch(patience, stop)
            };
            let Some(batch) = batch else { return self.flush(None, VecDeque::new(), sink) };
            let mut parts = encode::parts(batch, self.request_bytes);
            while let Some(part) = parts.pop_front() {
                if let Some(interrupted) = self.export(part, sink, stop) {
                    return self.flush(Some(interrupted), parts, sink);
                }
            }
        }
    }

    /// Sends what is left at the end of the agent, within [`LAST_LIMIT`].
    fn flush(
        &mut self,
        mut interrupted: Option<traces::ExportRequest>,
        mut parts: VecDeque<Vec<FinishedSpan>>,
        sink: &mut impl Sink,
    ) {
        let begun = Instant::now();
        loop {
            if interrupted.is_none() && parts.is_empty() {
                parts = encode::parts(self.spans.take_batch(), self.request_bytes);
            }
            let part = || parts.pop_front().map(|part| encode::request(&self.host, part));
            let request = interrupted.take().or_else(part);
            let left = LAST_LIMIT.saturating_sub(begun.elapsed());
            let Some(request) = request.filter(|_| !left.is_zero()) else { return };
            if let Err(error) = sink.send(&request, left, &StopToken::never()) {
                log::debug!("the last spans were not sent: {error}");
                return;
            }
        }
    }

    /// Sends a part of a batch; a temporary failure is followed by another attempt while there is time. Returns
    /// what the stop signal has interrupted.
    fn export(
        &mut self,
        batch: Vec<FinishedSpan>,
        sink: &mut impl Sink,
        stop: &StopToken,
    ) -> Option<traces::ExportRequest> {
        let count = batch.len() as u64;
        let request = encode::request(&self.host, batch);
        let begun = Instant::now();
        let outcome = loop {
            let left = EXPORT_LIMIT.saturating_sub(begun.elapsed());
            match sink.send(&request, left, stop) {
                Err(error) if error.is_temporary() && begun.elapsed() + RETRY < EXPORT_LIMIT => {
                    let _waiting = threads::waiting("the next attempt to send spans");
                    if stop.wait(RETRY) == Waited::Stopped {
                        break Err(error);
                    }
                }
                outcome => break outcome,
            }
        };
        if stop.is_stopped() && outcome.is_err() {
            return Some(request);
        }
        let mut reason = String::new();
        match outcome {
            Ok(response) => {
                if let Some(partial) = response.partial_success.as_ref() {
                    self.losses.unsent += u64::try_from(partial.rejected_spans).unwrap_or(0).min(count);
                    reason = partial.error_message.clone();
                }
            }
            Err(error) => {
                self.losses.unsent += count;
                reason = error.to_string();
            }
        }
        self.losses.dropped += self.spans.take_dropped();
        if let Some(line) = self.losses.report(&clip::line(&reason, MAX_TEXT), Instant::now()) {
            log::warn!("{line}");
        }
        None
    }
}

/// Spans that were lost since the last log line.
#[derive(Debug, Default)]
struct Losses {
    /// The collector did not take them.
    unsent: u64,
    /// The queue was full.
    dropped: u64,
    logged: Option<Instant>,
}

impl Losses {
    /// The log line about them; `None`: there is nothing to report, or the last line is too recent.
    fn report(&mut self, reason: &str, now: Instant) -> Option<String> {
        let is_recent = |logged: Instant| now.saturating_duration_since(logged) < LOG_PERIOD;
        if (self.unsent == 0 && self.dropped == 0) || self.logged.is_some_and(is_recent) {
            return None;
        }
        let Losses { unsent, dropped, .. } = *self;
        *self = Losses { logged: Some(now), ..Losses::default() };
        let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        Some(format!(
            "spans are lost: the collector did not take {unsent}, and {dropped} were too many for the queue{reason}"
        ))
    }
}

#[cfg(test)]
mod tests;
