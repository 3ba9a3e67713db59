//! What the commands about the store need of several rooms: whether the pods that run now could start from
//! it alone (the objects by the table that decides what is stored, and the images), and the added
//! authorities of the API server.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use super::handles::Handles;
use crate::images::missing_image;
use crate::kube::PodDependencies;
use crate::kube::added_authorities::{self, TrustError};
use crate::model::image_name;
use crate::model::pod::Pod;
use crate::offline::{CheckReport, Offline, PodNeeds, Report, TrustReport};

/// What is missing of an image, or that the runtime does not respond.
type Missing = Result<Option<&'static str>, String>;

impl Handles {
    pub(super) fn check_store(&self, offline: &Offline) -> CheckReport {
        // Many pods have the same images; and a runtime that does not respond is called once.
        let known: RefCell<BTreeMap<String, Missing>> = RefCell::default();
        let failed: RefCell<Option<String>> = RefCell::default();
        let missing = |image: &str| -> Missing {
            if let Some(error) = &*failed.borrow() {
                return Err(error.clone());
            }
            if let Some(missing) = known.borrow().get(image) {
                return missing.clone();
            }
            let found = match self.is_in_archive(image) {
                true => Ok(None),
                false => missing_image(&self.images, image).map_err(|error| error.to_string()),
            };
            if let Err(error) = &found {
                *failed.borrow_mut() = Some(error.clone());
            }
            known.borrow_mut().insert(image.to_owned(), found.clone());
            found
        };
        let images = |pod: &Pod| -> Vec<String> {
            let missing = |image: &str| match missing(image) {
                Ok(reason) => reason.map(|reason| format!("image {image}: {reason}")),
                Err(error) => Some(format!("image {image}: the runtime does not respond: {error}")),
            };
            images_of(pod).into_iter().filter_map(missing).collect()
        };
        offline.check(&PodNeeds {
            keys: &PodDependencies::start_keys,
            others: &PodDependencies::gaps,
            images: &images,
        })
    }

    /// What the store shows of itself, with the added authorities.
    pub(super) fn with_authorities(&self, report: Report) -> Report {
        let directory = self.offline.as_ref().map(Offline::directory);
        let trusted = directory.map(added_authorities::listed).unwrap_or_default();
        Report { trusted: trusted.iter().map(ToString::to_string).collect(), ..report }
    }

    /// Adds the authorities of a file, or removes those that were added (`None`).
    pub(super) fn trust(&self, offline: &Offline, file: Option<&Path>) -> Result<TrustReport, TrustError> {
        let directory = offline.directory();
        let Some(file) = file else {
            return Ok(TrustReport { added: Vec::new(), removed: added_authorities::remove(directory)? });
        };
        // The store needs a kubeconfig, so there is a client.
        let Some(client) = &self.api else { return Ok(TrustReport::default()) };
        let added = added_authorities::add(client, directory, file)?;
        Ok(TrustReport { added: added.iter().map(ToString::to_string).collect(), removed: false })
    }

    /// Whether an archive on this node has the image: the runtime then pulls it from the agent.
    fn is_in_archive(&self, image: &str) -> bool {
        image_name::normalized(image).is_ok_and(|name| self.image_set.protects(&[name]))
    }
}

/// The images of a pod; equal ones once.
fn images_of(pod: &Pod) -> Vec<&str> {
    let containers = pod.all_containers().filter_map(|container| container.image.as_deref());
    let volumes = pod.spec().volumes.iter().flatten();
    let volumes = volumes.filter_map(|volume| volume.image.as_ref()?.reference.as_deref());
    let mut images: Vec<_> = containers.chain(volumes).collect();
    images.sort_unstable();
    images.dedup();
    images
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_of_all_containers_and_volumes_are_checked_once() {
        let object = serde_json::json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {
            "initContainers": [{"name": "i", "image": "a:1"}],
            "containers": [{"name": "c", "image": "a:1"}, {"name": "d", "image": "b", "imagePullPolicy": "Never"}],
            "volumes": [{"name": "v", "image": {"reference": "data:1", "pullPolicy": "Always"}}]}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap());
        assert_eq!(images_of(&pod), ["a:1", "b", "data:1"]);
    }
}
