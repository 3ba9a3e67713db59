//! How long it took from the machine's start to a node that is ready; told once, of a node
//! that was new to the API server (Go: NodeStartupLatencyTracker).

use jiff::Timestamp;

use crate::model::metrics;
use crate::util::metrics::Gauge;

/// The moments on the way.
#[derive(Debug)]
pub(super) struct Startup {
    booted: Option<Timestamp>,
    started: Timestamp,
    attempted: Option<Timestamp>,
    registered: Option<Timestamp>,
}

impl Startup {
    pub(super) fn new(booted: Option<Timestamp>, started: Timestamp) -> Self {
        Startup { booted, started, attempted: None, registered: None }
    }

    /// A registration is tried; the first time counts.
    pub(super) fn attempt(&mut self, at: Timestamp) {
        self.attempted.get_or_insert(at);
    }

    /// There is a new object.
    pub(super) fn registered(&mut self, at: Timestamp) {
        self.registered.get_or_insert(at);
    }

    /// A status that is ready was written.
    pub(super) fn ready(&mut self, at: Timestamp) {
        let Some(moments) = self.moments(at) else { return };
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
        // Once is enough.
        self.booted = None;
    }

    fn moments(&self, ready: Timestamp) -> Option<[Timestamp; 5]> {
        // A node that is ready at once says so in its registration, which begins earlier.
        let registered = self.registered?;
        Some([self.booted?, self.started, self.attempted?, registered, ready.max(registered)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn startup_times_are_reported_once_and_together() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let values = [
            &metrics::STARTUP_BEFORE,
            &metrics::STARTUP_UNREGISTERED,
            &metrics::STARTUP_REGISTRATION,
            &metrics::STARTUP_REGISTERED,
            &metrics::STARTUP,
        ];
        let tell = || {
            let mut found = Startup::new(Some(at(100)), at(130));
            found.ready(at(140));
            assert_eq!(found.moments(at(140)), None, "it was registered before");
            found.attempt(at(131));
            found.attempt(at(135));
            found.registered(at(136));
            assert_eq!(found.moments(at(131)), Some([100, 130, 131, 136, 136].map(at)));
            found.ready(at(150));
            found.ready(at(190));
            values.map(Gauge::get)
        };
        // The gauges belong to the process: the nodes of other tests report there once each.
        let expected = [30.0, 1.0, 5.0, 14.0, 50.0].map(Some);
        assert!((0..1000).any(|_| tell() == expected), "{:?}", tell());
    }
}
