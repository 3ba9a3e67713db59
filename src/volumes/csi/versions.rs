//! Versions that a driver reports at its registration (pure; Go: csi_plugin.go,
//! highestSupportedVersion).

use std::fmt;

use crate::util::clip;

/// Versions of a driver that are read. A registration has one or two.
const MAX_VERSIONS: usize = 64;
/// The bytes of a version in a message.
const MAX_SHOWN: usize = 32;

/// A version `1.2.3`. Absent parts are zero, and text after the numbers is ignored.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(Vec<u32>);

impl Version {
    fn parse(text: &str) -> Option<Version> {
        let text = text.trim();
        let text = text.strip_prefix('v').unwrap_or(text);
        let numbers = text.split(['-', '+']).next().unwrap_or_default();
        let parts: Option<Vec<u32>> = numbers.split('.').take(8).map(|part| part.parse().ok()).collect();
        parts.filter(|parts| parts.len() >= 2).map(Version)
    }

    fn major(&self) -> u32 {
        self.0.first().copied().unwrap_or_default()
    }
}

impl fmt::Display for Version {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        out.write_str(&parts.join("."))
    }
}

/// The highest version that this agent can use: one of major 1.
pub(super) fn highest(versions: &[String]) -> Result<Version, String> {
    if versions.is_empty() {
        return Err("CSI driver reporting empty array for supported versions".to_owned());
    }
    let mut cause = "<nil>".to_owned();
    let mut best: Option<Version> = None;
    for text in versions.iter().take(MAX_VERSIONS).rev() {
        match Version::parse(text) {
            None => cause = format!("could not parse {:?} as version", clip::line(text, MAX_SHOWN)),
            Some(version) if version.major() > 1 => cause = "No supported version found".to_owned(),
            Some(version) if best.as_ref().is_none_or(|best| *best < version) => best = Some(version),
            Some(_) => {}
        }
    }
    match best {
        None => Err(format!(
            "could not find a highest supported version from versions ({}) reported by this driver: {cause}",
            list_text(versions)
        )),
        // Version 0 ended with Kubernetes 1.17.
        Some(version) if version.major() != 1 => {
            Err(format!("highest supported version reported by driver is {version}, must be v1.x"))
        }
        Some(version) => Ok(version),
    }
}

/// A list as Go prints it, clipped: the driver chooses the text.
pub(super) fn list_text(versions: &[String]) -> String {
    let clipped = versions.iter().take(8).map(|version| clip::line(version, MAX_SHOWN));
    format!("[{}]", clipped.collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn highest_text(versions: &[&str]) -> Result<String, String> {
        let versions: Vec<String> = versions.iter().map(|version| (*version).to_owned()).collect();
        highest(&versions).map(|version| version.to_string())
    }

    #[test]
    fn highest_version_of_major_one_is_chosen() {
        assert_eq!(highest_text(&["1.0.0"]).unwrap(), "1.0.0");
        assert_eq!(highest_text(&["v1.2", "1.10.0", "0.3.0", "2.0.0"]).unwrap(), "1.10.0");
        assert_eq!(highest_text(&["x", "1.0.0-rc1"]).unwrap(), "1.0.0");
    }

    #[test]
    fn other_versions_are_refused_with_the_reason() {
        for (versions, part) in [
            (&[][..], "empty array"),
            (&["0.3.0"], "highest supported version reported by driver is 0.3.0, must be v1.x"),
            (&["2.0.0"], "No supported version found"),
            (&["abc"], "could not parse \"abc\" as version"),
            (&["1"], "could not find a highest supported version from versions ([1])"),
        ] {
            let error = highest_text(versions).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(versions in proptest::collection::vec(".*", 0..100)) {
            if let Err(error) = highest(&versions) {
                prop_assert!(error.len() < 4096);
            }
        }
    }
}
