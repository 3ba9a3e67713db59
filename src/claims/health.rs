//! What drivers say about the health of their devices (pure; Go:
//! pkg/kubelet/cm/dra/healthinfo.go), and its text in `dra_health_state`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::info::{ClaimKey, Device};
use super::names;
use super::state::ClaimState;
use crate::model::api::{Container, ResourceHealth, ResourceStatus};
use crate::model::pod::Pod;

/// The name below the root directory.
pub const NAME: &str = "dra_health_state";

/// How long a report holds if the driver does not say.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest that a report may hold: a driver's number may be anything.
const MAX_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 3600);
/// Devices of one driver that are recorded (Go: `maxDevicesPerDriver`).
pub const MAX_DEVICES: usize = 16_384;
/// Bytes of a message, as in the API.
const MAX_MESSAGE: usize = 1_024;
/// Bytes of the name of a pool or a device.
const MAX_NAME: usize = 512;

/// The health of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum Health {
    Healthy,
    Unhealthy,
    #[default]
    #[serde(other)]
    Unknown,
}

impl Health {
    /// The text in the pod's status.
    pub fn as_str(self) -> &'static str {
        match self {
            Health::Healthy => "Healthy",
            Health::Unhealthy => "Unhealthy",
            Health::Unknown => "Unknown",
        }
    }
}

/// A driver's report about one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The pool of the device.
    pub pool: String,
    /// The device in the pool.
    pub device: String,
    /// Its health.
    pub health: Health,
    /// How long the report holds, in seconds; zero or less: 30 s.
    pub timeout_seconds: i64,
    /// For people; may be empty.
    pub message: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct KnownHealth {
    health: Health,
    message: String,
    timeout: Duration,
    /// When it was reported, on both clocks: one for the age, one for the file.
    reported_at: Instant,
    on: Timestamp,
}

impl KnownHealth {
    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.reported_at) <= self.timeout
    }
}

/// Pool and device.
type DeviceKey = (String, String);

/// The reports of all drivers.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct HealthCache {
    drivers: BTreeMap<String, BTreeMap<DeviceKey, KnownHealth>>,
    /// The instance of each driver that reported last.
    reporters: BTreeMap<String, String>,
}

/// The file is plain JSON, one object per driver.
#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "PascalCase")]
struct StoredDriver {
    devices: Option<BTreeMap<String, StoredDevice>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct StoredDevice {
    pool_name: String,
    device_name: String,
    health: Health,
    last_updated: Timestamp,
    /// In nanoseconds.
    #[serde(default)]
    health_check_timeout: i64,
    #[serde(default)]
    message: String,
}

impl HealthCache {
    /// The reports of a file; reports that are too old count as unknown.
    ///
    /// # Errors
    /// When the text is not in this format.
    pub fn read(text: &str, now: Instant, wall_time: Timestamp) -> serde_json::Result<HealthCache> {
        let stored: BTreeMap<String, StoredDriver> = serde_json::from_str(text)?;
        let device = |stored: StoredDevice| {
            // A report from the future is of an unknown age.
            let age = Duration::try_from(wall_time.duration_since(stored.last_updated)).ok()?;
            let nanos = u64::try_from(stored.health_check_timeout).unwrap_or(0);
            let timeout = timeout_or_default(Duration::from_nanos(nanos));
            let known = KnownHealth {
                health: stored.health,
                message: cut(&stored.message),
                timeout,
                reported_at: now.checked_sub(age).filter(|_| age <= timeout)?,
                on: stored.last_updated,
            };
            Some(((stored.pool_name, stored.device_name), known))
        };
        let driver = |(name, driver): (String, StoredDriver)| {
            let devices = driver.devices.unwrap_or_default().into_values().take(MAX_DEVICES);
            let devices: BTreeMap<DeviceKey, KnownHealth> = devices.filter_map(device).collect();
            // Else the file would have the names of all drivers that were ever there.
            (!devices.is_empty()).then_some((name, devices))
        };
        Ok(HealthCache { drivers: stored.into_iter().filter_map(driver).collect(), ..HealthCache::default() })
    }

    /// The text of the file.
    #[must_use]
    pub fn write(&self) -> String {
        let device = |((pool, device), known): (&DeviceKey, &KnownHealth)| {
            let stored = StoredDevice {
                pool_name: pool.clone(),
                device_name: device.clone(),
                health: known.health,
                last_updated: known.on,
                health_check_timeout: i64::try_from(known.timeout.as_nanos()).unwrap_or(i64::MAX),
                message: known.message.clone(),
            };
            (format!("{pool}/{device}"), stored)
        };
        let driver = |devices: &BTreeMap<DeviceKey, KnownHealth>| StoredDriver {
            devices: Some(devices.iter().map(device).collect()),
        };
        let stored: BTreeMap<&String, StoredDriver> =
            self.drivers.iter().map(|(name, devices)| (name, driver(devices))).collect();
        serde_json::to_string(&stored).unwrap_or_default()
    }

    /// Enters the complete list of a driver's devices, and returns the devices whose state changed.
    /// Devices that it does not name any more become unknown when their last report is too old. New
    /// devices beyond [`MAX_DEVICES`] are ignored.
    pub fn update(
        &mut self,
        (driver, endpoint): (&str, &str),
        reports: impl IntoIterator<Item = Report>,
        now: Instant,
        wall_time: Timestamp,
    ) -> BTreeSet<DeviceKey> {
        self.reporters.insert(driver.to_owned(), endpoint.to_owned());
        let known = self.drivers.entry(driver.to_owned()).or_default();
        let mut changed = BTreeSet::new();
        let mut named = BTreeSet::new();
        let mut ignored = 0_usize;
        for report in reports {
            let key = (report.pool, report.device);
            let too_long = key.0.len() > MAX_NAME || key.1.len() > MAX_NAME;
            if too_long || known.len() >= MAX_DEVICES && !known.contains_key(&key) {
                ignored += 1;
                continue;
            }
            let timeout =
                timeout_or_default(Duration::from_secs(u64::try_from(report.timeout_seconds).unwrap_or(0)));
            let message = cut(&report.message);
            let new =
                KnownHealth { health: report.health, message, timeout, reported_at: now, on: wall_time };
            let same = known.get(&key).is_some_and(|old| {
                (old.health, &old.message, old.timeout) == (new.health, &new.message, new.timeout)
                    && old.is_fresh(now)
            });
            if !same {
                changed.insert(key.clone());
            }
            named.insert(key.clone());
            known.insert(key, new);
        }
        if ignored > 0 {
            log::debug!("{ignored} health reports of DRA driver {driver} are ignored");
        }
        known.retain(|key, device| {
            let stays = named.contains(key) || device.is_fresh(now);
            // A device without a report is unknown: for that one nothing changes.
            if !stays && device.health != Health::Unknown {
                changed.insert(key.clone());
            }
            stays
        });
        changed
    }

    /// Removes the reports of an instance whose stream has ended, and returns their devices.
    ///
    /// DIFFERS: upstream also removes what a newer instance of the driver has reported.
    pub fn clear(&mut self, driver: &str, endpoint: &str) -> BTreeSet<DeviceKey> {
        if self.reporters.get(driver).is_some_and(|reporter| reporter != endpoint) {
            return BTreeSet::new();
        }
        self.reporters.remove(driver);
        self.drivers.remove(driver).unwrap_or_default().into_keys().collect()
    }

    /// The health of a device and the message for people.
    #[must_use]
    pub fn get(&self, driver: &str, device: &Device, now: Instant) -> (Health, &str) {
        // The map's key is owned; devices are few.
        let key = (device.pool.clone(), device.name.clone());
        let known = self.drivers.get(driver).and_then(|devices| devices.get(&key));
        match known.filter(|known| known.is_fresh(now)) {
            Some(known) => (known.health, &known.message),
            None => (Health::Unknown, ""),
        }
    }

    /// `allocatedResourcesStatus` of a container, for its claims.
    #[must_use]
    pub fn statuses(
        &self,
        pod: &Pod,
        container: &Container,
        state: &ClaimState,
        now: Instant,
    ) -> Vec<ResourceStatus> {
        let claims = container.resources.as_ref().and_then(|resources| resources.claims.as_ref());
        let mut found: Vec<ResourceStatus> = Vec::new();
        for used in claims.into_iter().flatten() {
            let entries = pod.spec().resource_claims.iter().flatten();
            let entry = entries.into_iter().find(|entry| entry.name == used.name);
            let Some(Ok(Some(reference))) = entry.map(|entry| names::reference(pod, entry)) else { continue };
            let key = ClaimKey { namespace: pod.namespace().to_owned(), name: reference.claim.to_owned() };
            let Some(claim) = state.get(&key) else { continue };
            let request = used.request.as_deref().unwrap_or_default();
            let name = match request {
                "" => format!("claim:{}", used.name),
                request => format!("claim:{}/{request}", used.name),
            };
            let mut seen = BTreeSet::new();
            let mut resources = Vec::new();
            for (driver, device) in claim
                .drivers
                .iter()
                .flat_map(|(driver, devices)| devices.iter().map(move |device| (driver, device)))
            {
                if !device.is_for(names::base_request(request)) {
                    continue;
                }
                let resource_id = device
                    .cdi_ids
                    .first()
                    .cloned()
                    .unwrap_or_else(|| format!("{driver}/{}/{}", device.pool, device.name));
                if seen.insert(resource_id.clone()) {
                    let (health, message) = self.get(driver, device, now);
                    resources.push(ResourceHealth {
                        health: Some(health.as_str().to_owned()),
                        message: (!message.is_empty()).then(|| message.to_owned()),
                        resource_id,
                    });
                }
            }
            if !resources.is_empty() && found.iter().all(|status| status.name != name) {
                found.push(ResourceStatus { name, resources: Some(resources) });
            }
        }
        found
    }
}

fn timeout_or_default(timeout: Duration) -> Duration {
    if timeout.is_zero() { DEFAULT_TIMEOUT } else { timeout.min(MAX_TIMEOUT) }
}

/// A message within its limit.
fn cut(message: &str) -> String {
    if message.len() <= MAX_MESSAGE {
        return message.to_owned();
    }
    format!("{}...", &message[..message.floor_char_boundary(MAX_MESSAGE - 3)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::testing::{device, info, pod};
    use serde_json::json;

    fn report(device: &str, health: Health, timeout_seconds: i64, message: &str) -> Report {
        let (pool, device, message) = ("pool".to_owned(), device.to_owned(), message.to_owned());
        Report { pool, device, health, timeout_seconds, message }
    }

    fn keys(names: &[&str]) -> BTreeSet<DeviceKey> {
        names.iter().map(|name| ("pool".to_owned(), (*name).to_owned())).collect()
    }

    #[test]
    fn changes_are_reported_once_and_old_reports_become_unknown() {
        let (start, wall_time) = (Instant::now(), Timestamp::UNIX_EPOCH);
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        let mut cache = HealthCache::default();
        let both = || vec![report("a", Health::Healthy, 0, ""), report("b", Health::Unhealthy, 60, "hot")];
        assert_eq!(cache.update(("d", "/e"), both(), after(0), wall_time), keys(&["a", "b"]));
        assert!(cache.update(("d", "/e"), both(), after(20), wall_time).is_empty());
        assert_eq!(cache.get("d", &device("a", &[]), after(50)), (Health::Healthy, ""));
        assert_eq!(cache.get("d", &device("a", &[]), after(51)), (Health::Unknown, ""));
        assert_eq!(cache.get("d", &device("b", &[]), after(51)), (Health::Unhealthy, "hot"));
        assert_eq!(cache.get("e", &device("b", &[]), after(51)), (Health::Unknown, ""));
        // A device that is healthy again after its report was too old is a change.
        assert_eq!(
            cache.update(("d", "/e"), vec![report("a", Health::Healthy, -5, "")], after(60), wall_time),
            keys(&["a"])
        );
        assert_eq!(
            cache.update(("d", "/e"), vec![report("a", Health::Healthy, 0, "")], after(81), wall_time),
            keys(&["b"])
        );
        assert!(cache.clear("d", "/older").is_empty());
        assert_eq!(cache.clear("d", "/e"), keys(&["a"]));
        assert!(cache.clear("d", "/e").is_empty());
    }

    #[test]
    fn the_file_is_read_again_with_the_age_of_its_reports() {
        let now = Instant::now() + Duration::from_secs(1_000);
        let wall_time: Timestamp = "2026-03-01T10:00:00.5Z".parse().unwrap();
        let mut cache = HealthCache::default();
        cache.update(("d", "/e"), vec![report("a", Health::Unhealthy, 60, "x<y")], now, wall_time);
        let text = cache.write();
        assert_eq!(
            text,
            r#"{"d":{"Devices":{"pool/a":{"PoolName":"pool","DeviceName":"a","Health":"Unhealthy","LastUpdated":"2026-03-01T10:00:00.5Z","HealthCheckTimeout":60000000000,"Message":"x<y"}}}}"#
        );
        let after = |seconds: i64| {
            let cache =
                HealthCache::read(&text, now, wall_time + jiff::SignedDuration::from_secs(seconds)).unwrap();
            cache.get("d", &device("a", &[]), now).0
        };
        assert_eq!((after(60), after(61), after(-1)), (Health::Unhealthy, Health::Unknown, Health::Unknown));
        let zone = text.replace("10:00:00.5Z", "11:00:00.5+01:00").replace("Unhealthy", "Odd");
        assert!(HealthCache::read(&zone, now, wall_time).is_ok());
        assert!(HealthCache::read("[]", now, wall_time).is_err());
        assert_eq!(HealthCache::read("{}", now, wall_time).unwrap(), HealthCache::default());
        assert!(HealthCache::read(r#"{"d":{"Devices":null}}"#, now, wall_time).is_ok());
    }

    #[test]
    fn drivers_that_do_not_come_back_leave_the_file_at_the_next_start() {
        let (now, wall_time) = (Instant::now(), Timestamp::UNIX_EPOCH);
        let mut cache = HealthCache::default();
        cache.update(("d", "/e"), [report("a", Health::Healthy, 60, "")], now, wall_time);
        let later = wall_time + jiff::SignedDuration::from_secs(61);
        assert_eq!(HealthCache::read(&cache.write(), now, later).unwrap().write(), "{}");
    }

    #[test]
    fn hostile_reports_are_limited() {
        let (now, wall_time) = (Instant::now(), Timestamp::UNIX_EPOCH);
        let mut cache = HealthCache::default();
        let long = "é".repeat(600);
        let many =
            (0..MAX_DEVICES + 5).map(|number| report(&number.to_string(), Health::Healthy, i64::MAX, &long));
        assert_eq!(cache.update(("d", "/e"), many, now, wall_time).len(), MAX_DEVICES);
        let (_, message) = cache.get("d", &device("1", &[]), now);
        assert!(message.ends_with("é...") && message.len() <= MAX_MESSAGE);
        assert_eq!(cache.get("d", &device("1", &[]), now + MAX_TIMEOUT * 2).0, Health::Unknown);
        assert!(
            cache
                .update(("e", "/e"), vec![report(&"n".repeat(600), Health::Healthy, 0, "")], now, wall_time)
                .is_empty()
        );
        assert!(HealthCache::read(&cache.write(), now, wall_time).is_ok());
    }

    #[test]
    fn at_the_limit_known_devices_are_updated_and_new_ones_wait_for_the_end_of_old_ones() {
        let (start, wall_time) = (Instant::now(), Timestamp::UNIX_EPOCH);
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        let mut cache = HealthCache::default();
        let list = |prefix: &str, count: usize, health: Health| -> Vec<Report> {
            let names = (0..count).map(|number| format!("{prefix}{number}"));
            names.map(|name| report(&name, health, 60, "")).collect()
        };
        let health = |cache: &HealthCache, name: &str, now| cache.get("d", &device(name, &[]), now).0;
        let full = list("a", MAX_DEVICES, Health::Healthy);
        assert_eq!(cache.update(("d", "/e"), full, start, wall_time).len(), MAX_DEVICES);
        // A new device comes before a known one, which counts.
        let mut mixed = list("b", 1, Health::Healthy);
        mixed.extend(list("a", 1, Health::Unhealthy));
        assert_eq!(cache.update(("d", "/e"), mixed, after(50), wall_time), keys(&["a0"]));
        assert_eq!(health(&cache, "a0", after(50)), Health::Unhealthy);
        assert_eq!(health(&cache, "b0", after(50)), Health::Unknown);
        // The reports of all others are too old.
        let ended = cache.update(("d", "/e"), list("b", 1, Health::Healthy), after(61), wall_time);
        assert_eq!(ended.len(), MAX_DEVICES - 1);
        assert_eq!(cache.drivers["d"].len(), 1);
        assert_eq!(
            cache.update(("d", "/e"), list("b", 1, Health::Healthy), after(62), wall_time),
            keys(&["b0"])
        );
        assert_eq!(health(&cache, "b0", after(62)), Health::Healthy);
    }

    #[test]
    fn unknown_device_that_is_not_named_any_more_is_removed_without_a_change() {
        let (start, wall_time) = (Instant::now(), Timestamp::UNIX_EPOCH);
        let mut cache = HealthCache::default();
        cache.update(("d", "/e"), [report("a", Health::Unknown, 0, "")], start, wall_time);
        let later = start + DEFAULT_TIMEOUT + Duration::from_secs(1);
        assert!(cache.update(("d", "/e"), [], later, wall_time).is_empty());
        assert!(cache.drivers["d"].is_empty());
    }

    #[test]
    fn a_container_shows_the_health_of_its_devices() {
        let now = Instant::now();
        let mut cache = HealthCache::default();
        cache.update(
            ("x", "/e"),
            vec![report("one", Health::Unhealthy, 0, "hot")],
            now,
            Timestamp::UNIX_EPOCH,
        );
        let mut claim = info("c", "u", &["x", "y"]);
        let bare = Device { cdi_ids: vec![], ..device("bare", &["other"]) };
        claim.drivers.insert("x".into(), vec![device("one", &["r"]), device("one", &["r"]), bare]);
        claim.drivers.insert("y".into(), vec![device("all", &[])]);
        let state = ClaimState::new(vec![claim]);
        let pod = pod(
            json!({"resourceClaims": [{"name": "a", "resourceClaimName": "c"}, {"name": "gone", "resourceClaimName": "z"}],
                "containers": [{"name": "m", "resources": {"claims": [{"name": "a", "request": "r/sub"}, {"name": "a"}, {"name": "gone"}]}}]}),
            json!({}),
        );
        let shown = cache.statuses(&pod, &pod.containers()[0], &state, now);
        let shown = serde_json::to_value(shown).unwrap();
        assert_eq!(
            shown,
            json!([
                {"name": "claim:a/r/sub", "resources": [
                    {"health": "Unhealthy", "message": "hot", "resourceID": "example.com/dev=one"},
                    {"health": "Unknown", "resourceID": "example.com/dev=all"}]},
                {"name": "claim:a", "resources": [
                    {"health": "Unhealthy", "message": "hot", "resourceID": "example.com/dev=one"},
                    {"health": "Unknown", "resourceID": "x/pool/bare"},
                    {"health": "Unknown", "resourceID": "example.com/dev=all"}]}
            ])
        );
    }
}
