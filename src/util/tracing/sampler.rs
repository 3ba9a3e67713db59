//! Which traces that begin here are recorded (Go: go.opentelemetry.io/otel/sdk/trace, sampling.go).

/// `samplingRatePerMillion` of all traces.
const MILLION: i32 = 1_000_000;

/// Decides by the identity of a trace, so that each process decides alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    /// Traces with a smaller number are recorded; the numbers have 63 bits.
    bound: u64,
}

impl Sampler {
    /// Records so many of a million traces; `None` and 0: only those whose first span is another
    /// process's and is recorded.
    #[must_use]
    pub fn per_million(rate: Option<i32>) -> Sampler {
        let rate = rate.unwrap_or(0).clamp(0, MILLION);
        let bound = match rate {
            MILLION => 1 << 63,
            rate => (f64::from(rate) / f64::from(MILLION) * (1_u64 << 63) as f64) as u64,
        };
        Sampler { bound }
    }

    pub(super) fn samples(&self, trace: &[u8; 16]) -> bool {
        let [_, _, _, _, _, _, _, _, low @ ..] = *trace;
        u64::from_be_bytes(low) >> 1 < self.bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(rate: Option<i32>, low: u64) -> bool {
        let mut trace = [0xff; 16];
        trace[8..].copy_from_slice(&low.to_be_bytes());
        Sampler::per_million(rate).samples(&trace)
    }

    #[test]
    fn the_rate_decides_by_the_second_half_of_the_trace() {
        for low in [0, 1, u64::MAX / 2, u64::MAX] {
            assert!(!samples(None, low) && !samples(Some(0), low) && !samples(Some(-1), low), "{low}");
            assert!(samples(Some(MILLION), low), "{low}");
        }
        // Go: TraceIDRatioBased(0.25) records what is below a quarter.
        assert!(samples(Some(250_000), u64::MAX / 4) && !samples(Some(250_000), u64::MAX / 4 + 2));
        assert!(samples(Some(1), 0) && !samples(Some(1), u64::MAX / 500_000));
    }
}
