//! The third step of a set-up of a file system: its mount for the pod (Go: csi_mounter.go).

use std::collections::BTreeMap;
use std::path::Path;

use super::super::error::VolumeError;
use super::cluster::{read_secret, tokens_json};
use super::dirs::{clear_dir, clear_failed, make_dirs};
use super::driver::{Pairs, Publish, Secrets};
use super::error::{changed_nothing, not_begun, of_call};
use super::names::{TARGET, path_text};
use super::prepare::PreparedDriver;
use super::request::{TOKENS, VolumeRequest};
use super::state::Csi;
use crate::util::stop::StopToken;

/// Tokens of one driver.
const MAX_AUDIENCES: usize = 32;

/// Publishes a file system in the directory `dir` of its pod. The caller has the volume's lock.
pub(super) fn publish(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &PreparedDriver,
    dir: &Path,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    let target = dir.join(TARGET);
    let message = message(csi, request, driver, &target, stop)?;
    // The driver makes the target itself.
    make_dirs(dir)?;
    let is_new = request.record(&driver.label, &csi.settings.node_name).write(dir)?;
    let called = call(request, driver, &message, stop);
    if !called.as_ref().is_err_and(changed_nothing) {
        csi.users().set_published(&request.location());
    }
    called.inspect_err(|error| {
        if is_new && changed_nothing(error) {
            // Published before, perhaps, the volume stays as it is. What a driver publishes need not be a
            // mount (Go: `IsRemount`, `ReconstructedVolume`).
            let mounter = csi.mounter.as_ref();
            clear_failed(mounter, &target, || clear_dir(mounter, dir, TARGET));
        }
    })
}

/// What the driver is asked for, for both forms.
pub(super) fn message(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &PreparedDriver,
    target: &Path,
    stop: &StopToken,
) -> Result<Publish, VolumeError> {
    let inputs = inputs(csi, request, driver, stop);
    let (volume_context, secrets) =
        inputs.map_err(|error| not_begun(request.publish_phase(), format!("kubernetes.io/csi: {error}")))?;
    Ok(Publish {
        volume: request.source.volume_handle.clone(),
        publish_context: driver.publish_context.clone(),
        staging_path: request.staging_path(driver.capabilities, &csi.layout)?,
        target_path: path_text(target)?,
        volume_capability: request.volume_capability(driver.capabilities, &driver.label),
        read_only: request.is_read_only(),
        secrets,
        volume_context,
    })
}

/// The call itself, for both forms.
pub(super) fn call(
    request: &VolumeRequest,
    driver: &PreparedDriver,
    message: &Publish,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    driver.driver.publish(message, stop).map_err(|error| of_call(request.publish_phase(), "", &error))
}

/// The volume's context and the secrets of a publication, with tokens for the driver.
fn inputs(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &PreparedDriver,
    stop: &StopToken,
) -> Result<(Pairs, Secrets), String> {
    let reference = request.source.node_publish_secret_ref.as_ref();
    let mut secrets = read_secret(&*csi.cluster, reference, "NodePublishSecretRef", stop)?;
    let spec = &driver.spec;
    let mut context = request.context(spec);
    if spec.token_requests.is_empty() {
        return Ok((context, secrets));
    }
    let mut tokens = BTreeMap::new();
    for token in spec.token_requests.iter().take(MAX_AUDIENCES) {
        let (audience, seconds) = (&token.audience, token.expiration_seconds);
        let token = csi.cluster.token(&request.pod, audience, seconds, stop).map_err(|error| {
            format!("mounter.SetUpAt failed to get service account token attributes: {error}")
        })?;
        tokens.insert(audience.clone(), token);
    }
    let json = tokens_json(&tokens);
    if spec.service_account_token_in_secrets == Some(true) {
        secrets.insert(TOKENS, json);
    } else {
        context.insert(TOKENS.to_owned(), json);
    }
    Ok((context, secrets))
}
