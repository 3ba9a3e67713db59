//! What the node knows about a claim (pure; Go: pkg/kubelet/cm/dra/claiminfo.go).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::model::ids::PodUid;

/// Identifies a claim on the node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimKey {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for ClaimKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.namespace, self.name)
    }
}

/// Identifies a claim to a driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimId {
    /// Namespace and name.
    pub key: ClaimKey,
    /// `metadata.uid`.
    pub uid: String,
}

/// A prepared device, as its driver describes it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Device {
    /// The pool of the device.
    pub pool: String,
    /// The device in the pool.
    pub name: String,
    /// Identifies the share of a device that several claims use.
    pub share_id: Option<String>,
    /// The requests of the claim that it belongs to; none: all.
    pub requests: Vec<String>,
    /// What the runtime adds to containers, such as `example.com/gpu=0`.
    pub cdi_ids: Vec<String>,
}

impl Device {
    /// Whether the device belongs to a request; an empty request means all devices.
    pub fn is_for(&self, request: &str) -> bool {
        request.is_empty() || self.requests.is_empty() || self.requests.iter().any(|name| name == request)
    }
}

/// A claim that pods of this node use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimInfo {
    /// Name and UID.
    pub id: ClaimId,
    /// The pods that use it.
    pub pods: BTreeSet<PodUid>,
    /// The devices by driver. A driver without devices is here as well.
    pub drivers: BTreeMap<String, Vec<Device>>,
    /// The calls that a driver does not want for this claim, such as `NodeUnprepareResources`, by driver:
    /// from the file of a kubelet with the gate `DRAOptionalNodeOperations`.
    pub skips: BTreeMap<String, Vec<String>>,
    /// Whether all drivers have prepared it since the agent started.
    pub prepared: bool,
    /// Whether a driver has not prepared it since it was entered. This is in the file: a pod that has a
    /// sandbox and such a claim has no devices yet.
    pub incomplete: bool,
}

impl ClaimInfo {
    /// A claim without pods and drivers.
    #[must_use]
    pub fn new(id: ClaimId) -> ClaimInfo {
        ClaimInfo {
            id,
            pods: BTreeSet::new(),
            drivers: BTreeMap::new(),
            skips: BTreeMap::new(),
            prepared: false,
            incomplete: false,
        }
    }

    /// The drivers that are to prepare the claim (Go: `DriverState.Skips`).
    pub fn prepared_by(&self) -> impl Iterator<Item = &String> {
        self.called_for("NodePrepareResources")
    }

    /// The drivers that are to revert what they did for the claim.
    pub fn unprepared_by(&self) -> impl Iterator<Item = &String> {
        self.called_for("NodeUnprepareResources")
    }

    fn called_for(&self, method: &'static str) -> impl Iterator<Item = &String> {
        let skips = move |driver: &&String| {
            let calls = self.skips.get(*driver).into_iter().flatten();
            calls.map(String::as_str).any(|call| call == "*" || call == method)
        };
        self.drivers.keys().filter(move |driver| !skips(driver))
    }
}
