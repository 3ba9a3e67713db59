//! Drivers that come and go, and the reports about their devices (Go:
//! pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::client::{self, Client};
use super::drivers::{self, HealthService, Service};
use super::health::Report;
use super::manager::{Driver, ResourceClaims, Shared};
use crate::transport::grpc::Kind;
use crate::util::lock::LockExt;
use crate::util::stop::{StopToken, Waited};
use crate::util::threads::{self, OnDeath, Stack};

/// The pause before a stream is opened again, and between two checks of the connection of a driver
/// without reports.
const PAUSE: Duration = Duration::from_secs(5);

impl ResourceClaims {
    /// Checks a driver that wants to register.
    ///
    /// # Errors
    /// The text for the driver.
    pub fn validate(&self, driver: &str, endpoint: &str, offered: &[String]) -> Result<(), String> {
        drivers::check_name(driver)?;
        drivers::choose(driver, endpoint, offered).map(|_| ())
    }

    /// Registers an instance of a driver, and starts the thread `dra/<driver>` that reads its
    /// reports, if it offers them, and notices its loss.
    ///
    /// # Errors
    /// The text for the driver.
    pub fn register(&self, driver: &str, endpoint: &str, offered: &[String]) -> Result<(), String> {
        self.register_with(driver, endpoint, offered, client::TIMEOUT)
    }

    pub(super) fn register_with(
        &self,
        driver: &str,
        endpoint: &str,
        offered: &[String],
        timeout: Duration,
    ) -> Result<(), String> {
        drivers::check_name(driver)?;
        let service: Service = drivers::choose(driver, endpoint, offered)?;
        let health = HealthService::choose(offered);
        let client = Client::new(driver, endpoint, service, timeout)?;
        let shared = &self.shared;
        let called: Arc<dyn Driver> = Arc::new(client.clone());
        shared.drivers.locked().add(driver, endpoint, || Ok(called))?;
        shared.lost(driver);
        let instance =
            DriverInstance { shared: Arc::clone(shared), driver: driver.into(), endpoint: endpoint.into() };
        let body = move |stop: StopToken| instance.follow(&client, health, &stop);
        let running =
            match threads::spawn(&format!("dra/{driver}"), Stack::Large, OnDeath::Unsupervised, body) {
                Ok(running) => running,
                Err(error) => {
                    shared.drivers.locked().remove(driver, endpoint);
                    return Err(format!("no thread can be started for DRA driver {driver}: {error}"));
                }
            };
        let key = (driver.to_owned(), endpoint.to_owned());
        // The thread of an instance that was replaced is joined after the lock is released.
        let replaced = shared.streams.locked().insert(key, running);
        drop(replaced);
        Ok(())
    }

    /// Removes an instance of a driver.
    pub fn deregister(&self, driver: &str, endpoint: &str) {
        let shared = &self.shared;
        let removed = shared.drivers.locked().remove(driver, endpoint);
        let running = shared.streams.locked().remove(&(driver.to_owned(), endpoint.to_owned()));
        // Both end outside of the locks; this joins the thread, which takes them.
        drop((removed, running));
        let (driver, endpoint) = (driver.to_owned(), endpoint.to_owned());
        let instance = DriverInstance { shared: Arc::clone(shared), driver, endpoint };
        instance.clear_health();
        shared.lost(&instance.driver);
    }

    /// Ends the threads of all drivers.
    pub fn shut_down(&self) {
        let mut streams = std::mem::take(&mut *self.shared.streams.locked());
        streams.values_mut().for_each(crate::util::threads::Running::request_stop);
        drop(streams);
    }
}

impl Shared {
    /// Whether the driver can be called.
    pub(super) fn is_usable(&self, driver: &str) -> bool {
        self.drivers.locked().is_usable(driver, |client| client.is_connected())
    }

    /// The driver may be gone, or back: if it is gone later, too, its slices are deleted.
    fn lost(&self, driver: &str) {
        if self.api.is_none() {
            return;
        }
        if self.is_usable(driver) {
            self.wipes.locked().usable(driver);
        } else {
            self.wipes.locked().lost(driver, Instant::now());
            let _ = self.bell.try_send(());
        }
    }
}

/// One instance and its reports.
struct DriverInstance {
    shared: Arc<Shared>,
    driver: String,
    endpoint: String,
}

impl DriverInstance {
    fn follow(&self, client: &Client, mut health: Option<HealthService>, stop: &StopToken) {
        // Each loss of the driver is reported once: its slices are deleted once.
        let mut is_lost = false;
        loop {
            if let Some(service) = health {
                let outcome = self.read(client, service, &mut is_lost, PAUSE, stop);
                match outcome {
                    Ok(()) => {
                        log::debug!("DRA driver {} has ended its stream of health reports", self.driver)
                    }
                    Err(kind) => {
                        log::debug!("no health reports of DRA driver {}: {}", self.driver, kind.as_str());
                    }
                }
                health = next_service(service, outcome);
                // When the agent ends, the reports stay for the next one: the driver is still there.
                if stop.is_stopped() {
                    return;
                }
                self.clear_health();
            } else {
                client.connect();
            }
            if stop.is_stopped() {
                return;
            }
            if !is_lost {
                self.shared.lost(&self.driver);
            }
            is_lost = !self.shared.is_usable(&self.driver);
            if stop.wait(PAUSE) == Waited::Stopped {
                return;
            }
        }
    }

    /// Reads the reports until the stream ends. A driver that reports is there, and can be lost again. One
    /// may have nothing to report for a long time: its connection is checked after each `interval`.
    fn read(
        &self,
        client: &Client,
        service: HealthService,
        is_lost: &mut bool,
        interval: Duration,
        stop: &StopToken,
    ) -> Result<(), Kind> {
        let mut stream = client.watch(service).map_err(|error| error.kind)?;
        let mut is_noticed = false;
        loop {
            let next = stream.next(stop, interval, || {
                if !is_noticed && client.is_connected() {
                    is_noticed = true;
                    self.notice(is_lost);
                }
                is_noticed
            });
            let Some((devices, reports)) = next.map_err(|error| error.kind)? else { return Ok(()) };
            if !std::mem::replace(&mut is_noticed, true) {
                self.notice(is_lost);
            }
            let has_changed = self.update(reports);
            if stop.wait(self.report_wait(devices, has_changed, Instant::now())) == Waited::Stopped {
                return Err(Kind::Cancelled);
            }
        }
    }

    /// The driver is there.
    fn notice(&self, is_lost: &mut bool) {
        *is_lost = false;
        self.shared.lost(&self.driver);
    }

    /// The wait before the next report.
    fn report_wait(&self, devices: usize, has_changed: bool, now: Instant) -> Duration {
        self.shared.report_rate_limits.locked().next(&self.driver, devices, has_changed, now)
    }

    /// Returns whether the health of a device has changed.
    fn update(&self, reports: Vec<Report>) -> bool {
        let (now, wall_time) = (Instant::now(), jiff::Timestamp::now());
        let changed =
            self.shared.health.locked().update((&self.driver, &self.endpoint), reports, now, wall_time);
        let has_changed = !changed.is_empty();
        self.report(changed);
        has_changed
    }

    /// Removes what this instance has reported.
    fn clear_health(&self) {
        let changed = self.shared.health.locked().clear(&self.driver, &self.endpoint);
        self.report(changed);
    }

    /// Writes the file and reports the pods whose devices changed.
    fn report(&self, changed: BTreeSet<(String, String)>) {
        if changed.is_empty() {
            return;
        }
        {
            // The lock also keeps the order of writes; the file is small and local.
            let file = self.shared.health_file.locked();
            let text = self.shared.health.locked().write();
            if let Err(error) = file.write(&text) {
                log::warn!("{} cannot be written: {error}", file.path().display());
            }
        }
        let pods = self.shared.state.locked().users_of(&self.driver, &changed);
        pods.iter().for_each(|uid| (self.shared.changed)(uid));
    }
}

/// The service to watch after a stream of this one has ended. A driver that offers the service, but has
/// no reports, is not called again before it registers again.
fn next_service(service: HealthService, outcome: Result<(), Kind>) -> Option<HealthService> {
    match outcome {
        Err(Kind::Unimplemented) => None,
        _ => Some(service),
    }
}

#[cfg(test)]
mod tests;
