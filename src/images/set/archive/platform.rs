//! Platforms of images (containerd: platforms package, `Only` and `Normalize`). The node must choose
//! the same manifest of an index as the runtime, because only this one is verified and served.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The platform of an image or of a node, with the names of Go: `linux`, `amd64`, and for arm `v7`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// The operating system.
    pub os: String,
    /// The architecture.
    pub architecture: String,
    /// The variant of the architecture; may be empty.
    pub variant: String,
}

impl Platform {
    /// A platform with the usual names; `x86_64` becomes `amd64`, for example.
    #[must_use]
    pub fn new(os: &str, architecture: &str, variant: &str) -> Platform {
        let architecture = architecture.to_ascii_lowercase();
        let (architecture, variant) = match (architecture.as_str(), variant) {
            ("x86_64" | "x86-64" | "amd64", "v1") => ("amd64", ""),
            ("x86_64" | "x86-64" | "amd64", other) => ("amd64", other),
            ("i386" | "i686" | "x86" | "386", _) => ("386", ""),
            ("aarch64" | "arm64", "8" | "v8") => ("arm64", ""),
            ("aarch64" | "arm64", other) => ("arm64", other),
            ("armhf", _) | ("arm", "" | "7") => ("arm", "v7"),
            ("armel", _) | ("arm", "6") => ("arm", "v6"),
            ("arm", "5") => ("arm", "v5"),
            ("arm", "8") => ("arm", "v8"),
            ("powerpc64", _) => ("ppc64le", ""),
            (other, variant) => (other, variant),
        };
        Platform {
            os: if os.is_empty() { "linux".to_owned() } else { os.to_ascii_lowercase() },
            architecture: architecture.to_owned(),
            variant: variant.to_owned(),
        }
    }

    /// That of this machine.
    #[must_use]
    pub fn of_this_machine() -> Platform {
        let machine = rustix::system::uname();
        let variant = match (std::env::consts::ARCH, machine.machine().to_bytes()) {
            ("arm", [b'a', b'r', b'm', b'v', b'5', ..]) => "v5",
            ("arm", [b'a', b'r', b'm', b'v', b'6', ..]) => "v6",
            ("arm", _) => "v7",
            _ => "",
        };
        Platform::new("linux", std::env::consts::ARCH, variant)
    }

    /// How well an image of the platform `other` fits a node of this platform: 0 is best. `None`: the
    /// node cannot run it.
    pub(super) fn rank(&self, other: &Platform) -> Option<u8> {
        let Platform { architecture, variant, .. } = other;
        if self.os != other.os {
            return None;
        }
        // Old images may name no architecture.
        if architecture.is_empty() || (self.architecture == *architecture && self.variant == *variant) {
            return Some(0);
        }
        let number = |variant: &str| variant.strip_prefix('v').and_then(|digits| digits.parse::<u8>().ok());
        let lower = |from: u8| Some(from.checked_sub(number(variant)?)?.saturating_add(1));
        match (self.architecture.as_str(), architecture.as_str()) {
            ("arm", "arm") => lower(number(&self.variant)?),
            ("arm64", "arm") => lower(8),
            ("amd64", "amd64") if variant.is_empty() => Some(9),
            ("amd64", "amd64") => lower(number(&self.variant)?),
            ("amd64", "386") => Some(10),
            _ => None,
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.os, self.architecture)?;
        if self.variant.is_empty() { Ok(()) } else { write!(out, "/{}", self.variant) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Platform {
        let mut parts = text.split('/');
        let mut next = || parts.next().unwrap_or_default();
        let (os, architecture, variant) = (next(), next(), next());
        Platform::new(os, architecture, variant)
    }

    #[test]
    fn platforms_that_a_node_runs_are_in_the_order_of_containerd() {
        for (node, fitting, others) in [
            (
                "linux/amd64",
                &["linux/x86_64/v1", "linux/386"][..],
                &["linux/arm64", "windows/amd64", "linux/amd64/v2"][..],
            ),
            (
                "linux/arm64",
                &["linux/arm64/v8", "linux/arm/v8", "linux/arm", "linux/arm/v6", "linux/arm/v5"],
                &["linux/amd64", "unknown/unknown"],
            ),
            (
                "linux/arm/v7",
                &["linux/armhf", "linux/arm/v6", "linux/arm/v5"],
                &["linux/arm/v8", "linux/arm64"],
            ),
            ("linux/arm/v6", &["linux/arm/6", "linux/arm/v5"], &["linux/arm/v7", "linux/arm"]),
            ("linux/riscv64", &["linux/riscv64"], &["linux/amd64", "linux/arm/v7"]),
        ] {
            let node = parse(node);
            let ranks: Vec<u8> = fitting.iter().map(|other| node.rank(&parse(other)).expect(other)).collect();
            assert!(ranks.is_sorted_by(|a, b| a < b), "{node}: {ranks:?}");
            for other in others {
                assert_eq!(node.rank(&parse(other)), None, "{node} {other}");
            }
        }
        assert_eq!(Platform::of_this_machine().rank(&Platform::of_this_machine()), Some(0));
        assert_eq!(parse("linux/arm/v7").to_string(), "linux/arm/v7");
        assert_eq!(parse("/amd64").to_string(), "linux/amd64");
    }
}
