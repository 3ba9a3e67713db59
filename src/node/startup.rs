//! The time from the machine's start to a ready node; reported once, for a node that was new to the
//! API server (Go: NodeStartupLatencyTracker).

use jiff::Timestamp;

use crate::model::metrics;
use crate::util::metrics::Gauge;

/// The times of the steps.
#[derive(Debug)]
pub(super) struct StartupTimes {
    booted: Option<Timestamp>,
    started: Timestamp,
    attempted: Option<Timestamp>,
    registered: Option<Timestamp>,
}

impl StartupTimes {
    pub(super) fn new(booted: Option<Timestamp>, started: Timestamp) -> Self {
        StartupTimes { booted, started, attempted: None, registered: None }
    }

    /// Records the first attempt to register.
    pub(super) fn attempt(&mut self, timestamp: Timestamp) {
        self.attempted.get_or_insert(timestamp);
    }

    /// Records that the object was created.
    pub(super) fn registered(&mut self, timestamp: Timestamp) {
        self.registered.get_or_insert(timestamp);
    }

    /// Records that a ready status was written, and reports the times.
    pub(super) fn ready(&mut self, timestamp: Timestamp) {
        let Some(moments) = self.moments(timestamp) else { return };
        let gauges: [&Gauge; 4] = [
            &metrics::STARTUP_BEFORE,
            &metrics::STARTUP_UNREGISTERED,
            &metrics::STARTUP_REGISTRATION,
            &metrics::STARTUP_REGISTERED,
        ];
        for (gauge, pair) in gauges.into_iter().zip(moments.windows(2)) {
            if let [from, to] = pair {
                gauge.set(to.duration_since(*from).as_secs_f64());
            }
        }
        let [first, .., last] = moments;
        metrics::STARTUP.set(last.duration_since(first).as_secs_f64());
        // The times are reported only once.
        self.booted = None;
    }

    fn moments(&self, ready: Timestamp) -> Option<[Timestamp; 5]> {
        // A node may be ready in its registration, which begins before the object exists.
        let registered = self.registered?;
        Some([self.booted?, self.started, self.attempted?, registered, ready.max(registered)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn startup_times_are_reported_once_and_together() {
        let timestamp = |second| Timestamp::from_second(second).unwrap();
        let values = [
            &metrics::STARTUP_BEFORE,
            &metrics::STARTUP_UNREGISTERED,
            &metrics::STARTUP_REGISTRATION,
            &metrics::STARTUP_REGISTERED,
            &metrics::STARTUP,
        ];
        let measure = || {
            let mut found = StartupTimes::new(Some(timestamp(100)), timestamp(130));
            found.ready(timestamp(140));
            assert_eq!(found.moments(timestamp(140)), None, "it was registered before");
            found.attempt(timestamp(131));
            found.attempt(timestamp(135));
            found.registered(timestamp(136));
            assert_eq!(found.moments(timestamp(131)), Some([100, 130, 131, 136, 136].map(timestamp)));
            found.ready(timestamp(150));
            found.ready(timestamp(190));
            values.map(Gauge::get)
        };
        // The gauges are global in the process: nodes of other tests report there, too.
        let expected = [30.0, 1.0, 5.0, 14.0, 50.0].map(Some);
        assert!((0..1000).any(|_| measure() == expected), "{:?}", measure());
    }
}
