//! The responses of drivers (pure). A driver may send anything: what it sends is limited, and
//! checked against what was requested.

use std::collections::BTreeMap;

use super::info::{ClaimId, ClaimKey, Device};

use crate::util::clip;

/// Devices of one claim by one driver; the API allows 32 in an allocation.
pub(super) const MAX_DEVICES: usize = 1_024;
/// Requests or CDI devices of one device.
const MAX_NAMES: usize = 1_024;
const MAX_NAME_BYTES: usize = 4_096;
/// Characters of an error that are shown.
const MAX_TEXT: usize = 1_024;

/// By the UID of the claim: its devices, or why it could not be prepared.
pub(super) type PrepareResults = BTreeMap<String, Result<Vec<Device>, String>>;
/// By the UID of the claim: why it could not be unprepared.
pub(super) type UnprepareResults = BTreeMap<String, Result<(), String>>;

/// What was called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// `NodePrepareResources`.
    Prepare,
    /// `NodeUnprepareResources`.
    Unprepare,
}

impl Method {
    /// The name of the method.
    pub fn as_str(self) -> &'static str {
        match self {
            Method::Prepare => "NodePrepareResources",
            Method::Unprepare => "NodeUnprepareResources",
        }
    }
}

/// What is wrong with a response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum ResponseError {
    #[error("{} failed for ResourceClaim {claim}: {text}", method.as_str())]
    Claim { method: Method, claim: String, text: String },
    #[error("{} returned result for unknown claim UID {uid}", method.as_str())]
    UnknownUid { method: Method, uid: String },
    #[error("{} skipped {number} ResourceClaims", method.as_str())]
    Skipped { method: Method, number: usize },
    #[error("{} returned too much for ResourceClaim {claim}: {what}", Method::Prepare.as_str())]
    TooMuch { claim: String, what: &'static str },
}

/// The claims that a driver has prepared, with their devices.
pub type PreparedClaims = Vec<(ClaimKey, Vec<Device>)>;

/// The devices of the claims that were prepared, and the first error.
pub fn check_prepared(
    batch: &[ClaimId],
    mut response: PrepareResults,
) -> (PreparedClaims, Result<(), ResponseError>) {
    let mut good = Vec::new();
    let outcome = check(batch, |claim| {
        let Some(result) = response.remove(&claim.uid) else { return Ok(None) };
        let devices = result.map_err(|text| failed(Method::Prepare, claim, &text))?;
        within_limits(claim, &devices)?;
        good.push((claim.key.clone(), devices));
        Ok(Some(()))
    });
    (good, outcome.and_then(|skipped| check_complete(Method::Prepare, skipped, response.keys().next())))
}

/// The claims that were unprepared, and the first error.
pub fn check_unprepared(
    batch: &[ClaimId],
    response: &UnprepareResults,
) -> (Vec<ClaimKey>, Result<(), ResponseError>) {
    let mut good = Vec::new();
    let outcome = check(batch, |claim| {
        let Some(result) = response.get(&claim.uid) else { return Ok(None) };
        result.as_ref().map_err(|text| failed(Method::Unprepare, claim, text))?;
        good.push(claim.key.clone());
        Ok(Some(()))
    });
    let unknown = response.keys().find(|uid| batch.iter().all(|claim| claim.uid != **uid));
    (good, outcome.and_then(|skipped| check_complete(Method::Unprepare, skipped, unknown)))
}

/// Checks all claims of the batch, and returns the number of those without a response, or the first
/// error.
fn check(
    batch: &[ClaimId],
    mut check_claim: impl FnMut(&ClaimId) -> Result<Option<()>, ResponseError>,
) -> Result<usize, ResponseError> {
    let mut first = None;
    let mut skipped = 0;
    for claim in batch {
        match check_claim(claim) {
            Ok(Some(())) => {}
            Ok(None) => skipped += 1,
            Err(error) => first = first.or(Some(error)),
        }
    }
    first.map_or(Ok(skipped), Err)
}

fn check_complete(method: Method, skipped: usize, unknown: Option<&String>) -> Result<(), ResponseError> {
    if let Some(uid) = unknown {
        return Err(ResponseError::UnknownUid { method, uid: shown(uid) });
    }
    if skipped > 0 {
        return Err(ResponseError::Skipped { method, number: skipped });
    }
    Ok(())
}

fn failed(method: Method, claim: &ClaimId, text: &str) -> ResponseError {
    ResponseError::Claim { method, claim: claim.key.name.clone(), text: shown(text) }
}

/// A driver's text in messages for users.
fn shown(text: &str) -> String {
    clip::beginning(text, MAX_TEXT).to_owned()
}

fn within_limits(claim: &ClaimId, devices: &[Device]) -> Result<(), ResponseError> {
    let too_much = |what| Err(ResponseError::TooMuch { claim: claim.key.name.clone(), what });
    if devices.len() > MAX_DEVICES {
        return too_much("more than 1024 devices");
    }
    for device in devices {
        if device.requests.len() > MAX_NAMES || device.cdi_ids.len() > MAX_NAMES {
            return too_much("a device with more than 1024 requests or CDI devices");
        }
        let names = [&device.pool, &device.name].into_iter().chain(&device.share_id);
        if names.chain(&device.requests).chain(&device.cdi_ids).any(|name| name.len() > MAX_NAME_BYTES) {
            return too_much("a name of more than 4096 bytes");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::testing::{device, info};

    fn batch() -> Vec<ClaimId> {
        ["a", "b"].iter().map(|name| info(name, &format!("{name}-uid"), &[]).id).collect()
    }

    fn results(list: &[(&str, Result<Vec<Device>, &str>)]) -> PrepareResults {
        let entry = |(uid, result): &(&str, Result<Vec<Device>, &str>)| {
            ((*uid).to_owned(), result.clone().map_err(str::to_owned))
        };
        list.iter().map(entry).collect()
    }

    #[test]
    fn each_claim_needs_a_result_and_no_other_may_have_one() {
        let fails = |list: &[(&str, Result<Vec<Device>, &str>)]| {
            let (good, outcome) = check_prepared(&batch(), results(list));
            (good.len(), outcome.unwrap_err().to_string())
        };
        assert_eq!(
            fails(&[("a-uid", Ok(vec![]))]),
            (1, "NodePrepareResources skipped 1 ResourceClaims".to_owned())
        );
        assert_eq!(
            fails(&[("a-uid", Ok(vec![])), ("b-uid", Ok(vec![])), ("x", Ok(vec![]))]),
            (2, "NodePrepareResources returned result for unknown claim UID x".to_owned())
        );
        assert_eq!(
            fails(&[("a-uid", Err("no such GPU")), ("b-uid", Ok(vec![]))]),
            (1, "NodePrepareResources failed for ResourceClaim a: no such GPU".to_owned())
        );
        let (good, outcome) = check_prepared(
            &batch(),
            results(&[("a-uid", Ok(vec![device("x", &[])])), ("b-uid", Ok(vec![]))]),
        );
        assert_eq!((good.len(), good[0].1.len(), outcome), (2, 1, Ok(())));
    }

    #[test]
    fn unpreparing_is_checked_in_the_same_way() {
        let run = |list: &[(&str, Result<(), &str>)]| {
            let response: UnprepareResults =
                list.iter().map(|(uid, result)| ((*uid).to_owned(), result.map_err(str::to_owned))).collect();
            let (good, outcome) = check_unprepared(&batch(), &response);
            (good.len(), outcome.map_err(|error| error.to_string()))
        };
        assert_eq!(run(&[("a-uid", Ok(())), ("b-uid", Ok(()))]), (2, Ok(())));
        let fails = |number, text: &str| (number, Err(text.to_owned()));
        assert_eq!(run(&[]), fails(0, "NodeUnprepareResources skipped 2 ResourceClaims"));
        assert_eq!(
            run(&[("a-uid", Ok(())), ("b-uid", Err("busy"))]),
            fails(1, "NodeUnprepareResources failed for ResourceClaim b: busy")
        );
        assert_eq!(
            run(&[("a-uid", Ok(())), ("c", Ok(()))]),
            fails(1, "NodeUnprepareResources returned result for unknown claim UID c")
        );
    }

    #[test]
    fn responses_beyond_the_limits_are_refused() {
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        let many = vec![String::new(); MAX_NAMES + 1];
        for devices in [
            vec![Device::default(); MAX_DEVICES + 1],
            vec![Device { cdi_ids: many.clone(), ..Device::default() }],
            vec![Device { requests: many, ..Device::default() }],
            vec![Device { cdi_ids: vec![long.clone()], ..Device::default() }],
            vec![Device { share_id: Some(long.clone()), ..Device::default() }],
        ] {
            let (good, outcome) =
                check_prepared(&batch(), results(&[("a-uid", Ok(devices)), ("b-uid", Ok(vec![]))]));
            assert_eq!(good.len(), 1);
            assert!(matches!(outcome, Err(ResponseError::TooMuch { .. })));
        }
        let text = "y".repeat(1_000_000);
        let (_, outcome) = check_prepared(&batch(), results(&[("a-uid", Err(&text)), ("b-uid", Ok(vec![]))]));
        assert!(outcome.unwrap_err().to_string().len() < 2_000);
    }
}
