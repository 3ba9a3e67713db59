//! CPU shares and weights, and the conversions between them (pure).

/// The least CPU shares of the kernel.
pub const MIN_SHARES: u64 = 2;
/// The most CPU shares of the kernel.
pub const MAX_SHARES: u64 = 262_144;

/// CPU shares of a request in millicores (Go: pkg/kubelet/cm `MilliCPUToShares`).
#[must_use]
pub fn shares(millicores: i64) -> u64 {
    let shares = u64::try_from(millicores).unwrap_or(0).saturating_mul(1024) / 1000;
    shares.clamp(MIN_SHARES, MAX_SHARES)
}

/// The request in millicores of CPU shares, rounded up; 0 below the least (`SharesToMilliCPU`).
#[must_use]
pub fn millicores_of_shares(shares: u64) -> i64 {
    if shares < MIN_SHARES {
        return 0;
    }
    i64::try_from(shares.saturating_mul(1000).div_ceil(1024)).unwrap_or(i64::MAX)
}

/// `cpu.weight` of CPU shares: linear, as the kubelet does it (`getCPUWeight`). Runtimes convert
/// the shares of containers with another curve.
#[must_use]
pub fn weight(shares: u64) -> u64 {
    let shares = shares.clamp(MIN_SHARES, MAX_SHARES);
    1 + (shares - MIN_SHARES) * 9999 / (MAX_SHARES - MIN_SHARES)
}

/// CPU shares of a `cpu.weight` (`cpuWeightToCPUShares`).
#[must_use]
pub fn shares_of_weight(weight: u64) -> u64 {
    (weight.clamp(1, 10_000) - 1) * (MAX_SHARES - MIN_SHARES) / 9999 + MIN_SHARES
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shares_and_weights() {
        for (milli, expected, as_weight) in [
            (0, 2, 1),
            (-5, 2, 1),
            (1, 2, 1),
            (100, 102, 4),
            (500, 512, 20),
            (1000, 1024, 39),
            (2000, 2048, 79),
            (256_000, 262_144, 10_000),
            (i64::MAX, 262_144, 10_000),
        ] {
            assert_eq!((shares(milli), weight(shares(milli))), (expected, as_weight), "{milli}");
        }
        for (weight, expected) in
            [(1, 2), (20, 500), (39, 998), (10_000, 262_144), (0, 2), (u64::MAX, 262_144)]
        {
            assert_eq!(shares_of_weight(weight), expected, "{weight}");
        }
        for (shares, milli) in [(0, 0), (2, 2), (102, 100), (512, 500), (1024, 1000), (262_144, 256_000)] {
            assert_eq!(millicores_of_shares(shares), milli, "{shares}");
        }
    }

    proptest! {
        #[test]
        fn every_number_is_within_the_limits_of_the_kernel(milli: i64, any: u64) {
            prop_assert!((MIN_SHARES..=MAX_SHARES).contains(&shares(milli)));
            prop_assert!((1..=10_000).contains(&weight(any)));
            prop_assert!((MIN_SHARES..=MAX_SHARES).contains(&shares_of_weight(any)));
            let _ = millicores_of_shares(any);
        }
    }
}
