//! Volumes whose record is damaged: which one it is shows the VolumeAttachment in the API server, which
//! has the name of the persistent volume.
//!
//! DIFFERS: the Go kubelet leaves such a volume as it is.

use super::super::error::VolumeError;
use super::super::kind::{Form, Phase};
use super::cluster::AttachmentLookup;
use super::error::not_begun;
use super::names;
use super::rebuild::{self, UnreadableDirs};
use super::record::Record;
use super::request::Lifecycle;
use super::state::Csi;
use crate::util::stop::StopToken;

/// Names in the node's object for which the API server is asked in one attempt.
const MAX_READ: usize = 256;

/// The unique name of the persistent volume, as far as pods or the cluster know it. `None`: no
/// controller has attached it to this node.
///
/// # Errors
/// When that cannot be known yet.
pub(super) fn find_name(
    csi: &Csi,
    spec_name: &str,
    form: Form,
    stop: &StopToken,
) -> Result<Option<String>, String> {
    let locations = csi.users().locations(None);
    let of_the_name =
        locations.iter().filter(|location| location.spec_name == spec_name && location.form == form);
    for location in of_the_name {
        let name = csi.users().name_at(location);
        // The name of an inline volume is one within its pod: those of other pods have it, too.
        let is_inline = |name: &String| {
            let handle = names::inline_handle(location.pod.as_str(), &location.spec_name);
            names::parts(name).is_some_and(|(_, own)| own == handle)
        };
        if let Some(name) = name.filter(|name| !is_inline(name)) {
            return Ok(Some(name));
        }
    }
    if !csi.attachments.is_controlled() {
        return Ok(None);
    }
    let shown = csi.attachments.node_volumes().ok_or("the object of the node is not known yet")?;
    // The API server knows those for certain: not many others must take their place.
    let all = shown.attached.iter().chain(shown.in_use.difference(&shown.attached));
    let candidates = all.filter(|name| form == Form::Filesystem || csi.damaged().may_be(name));
    let candidates: Vec<&String> = candidates.collect();
    let mut unknown = (candidates.len() > MAX_READ).then(|| "too many volumes are attached".to_owned());
    for name in candidates.into_iter().take(MAX_READ) {
        let Some((driver, handle)) = names::parts(name) else { continue };
        let id = names::attachment_name(handle, driver, &csi.settings.node_name);
        match csi.cluster.attached_volume(&id, stop) {
            Ok(AttachmentLookup::Volume(found)) if found == spec_name => return Ok(Some(name.clone())),
            // The record of this one is damaged, too.
            Ok(AttachmentLookup::Volume(found)) if csi.damaged().has(&found, Form::Block) => {}
            Ok(AttachmentLookup::Volume(_)) => csi.damaged().set_known(name, None),
            // The controller shows it as attached: the API server may not know that yet.
            Ok(AttachmentLookup::Missing | AttachmentLookup::Forbidden) if shown.attached.contains(name) => {
                unknown = Some(format!("VolumeAttachment {id} was not found"));
            }
            Ok(AttachmentLookup::Missing) => csi.damaged().set_known(name, None),
            // It is none, but may become known as one: it stays in use.
            Ok(AttachmentLookup::Forbidden) => {}
            Err(error) => unknown = Some(error.to_string()),
        }
    }
    unknown.map_or(Ok(None), Err)
}

/// As [`find_name`]; the failure is that of an operation.
pub(super) fn name_of(
    csi: &Csi,
    spec_name: &str,
    form: Form,
    phase: Phase,
    stop: &StopToken,
) -> Result<Option<String>, VolumeError> {
    find_name(csi, spec_name, form, stop).map_err(|reason| not_known(phase, spec_name, &reason))
}

fn not_known(phase: Phase, spec_name: &str, reason: &str) -> VolumeError {
    let text =
        format!("the record of volume {spec_name} is damaged, and it is not known which one it is: {reason}");
    not_begun(phase, text)
}

/// The record of a block volume, from its unique name; it is written again.
pub(super) fn restore_block(csi: &Csi, spec_name: &str, name: &str) -> Result<Record, VolumeError> {
    let Some((driver, handle)) = names::parts(name) else {
        return Err(VolumeError::Name { name: name.to_owned() });
    };
    let node = &csi.settings.node_name;
    let record = Record::of_pod(spec_name, driver, handle, Lifecycle::Persistent.as_str(), node);
    log::warn!("the record of block volume {spec_name} is damaged, and is made again: it is {name}");
    record.write(&csi.layout.block_paths(spec_name)?.data)?;
    // Known as a volume in use before it is no candidate any more.
    csi.change(|users| users.add_found(name));
    csi.damaged().set_known(name, Some(spec_name));
    Ok(record)
}

/// Handles a block volume with a damaged record that no known pod uses. Its name, if it is known
/// now, and the record is readable again.
pub(super) fn recover_block(
    csi: &Csi,
    spec_name: &str,
    stop: &StopToken,
) -> Result<Option<String>, VolumeError> {
    // Each that cannot be read may be the lost one.
    let staged = rebuild::staged(&csi.layout, &mut UnreadableDirs::default());
    csi.damaged().add(&[spec_name.to_owned()], staged.readable);
    let phase = Phase::UnmountDevice;
    match name_of(csi, spec_name, Form::Block, phase, stop)? {
        Some(name) => restore_block(csi, spec_name, &name).map(|_| Some(name)),
        None if rebuild::has_block_parts(csi.mounter.as_ref(), &csi.layout, spec_name) => {
            let reason = "no controller has attached it, and something of it is left on the node";
            Err(not_known(phase, spec_name, reason))
        }
        None => {
            csi.damaged().remove(spec_name);
            Ok(None)
        }
    }
}
