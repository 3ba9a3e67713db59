//! The requests to the API server for pods, and their error texts.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Sender;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::client::{Client, DEFAULT_TIMEOUT};
use super::super::error::ApiError;
use super::super::objects::{
    self, Key, Kind, Object, ObjectApi, ObjectError, Objects, OnUpdate, Stored, Strategy, SyncPod, TimeToLive,
};
use super::super::pod_certificates::PodCertificates;
use super::super::runtime_classes::{Class, ClassApi, ClassError, RuntimeClasses};
use super::super::services::Services;
use super::super::spread::Spread;
use super::super::target::{GroupVersion, Target};
use super::super::tokens::{IssuedToken, ServiceAccount, TokenApi, Tokens};
use super::super::trust_bundles::TrustBundles;
use super::super::volume_claims::{ExpansionStep, ReadError, VolumeClaimApi, VolumeClaims};
use super::super::watch::{Change, Watched, spawn_reflector};
use super::certificates::{BundleRequests, CertificateRequests};
use super::{PodDependencies, ProjectedCertificates};
use crate::model::persistent::{Claim, PersistentVolume};
use crate::model::storage::{CsiDriver, VolumeAttachment};
use crate::offline::Offline;
use crate::util::stop::StopToken;
use crate::util::threads::{Died, OnDeath, Running};

/// Time limit of a request; stopping a pod waits for its worker, and the worker for the response.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a request for a token, which ends with its pod. A slow API server would go
/// on to sign it for a client that has left. Upstream has no limit, and waits for the server's own.
const TOKEN_LIMIT: Duration = DEFAULT_TIMEOUT;

struct Requests {
    client: Client,
    /// Of a request for a token.
    token_limit: Duration,
    deaths: Sender<Died>,
}

impl PodDependencies {
    /// Starts the thread `watch/services`; watches of objects start with the first pods. `changed`
    /// receives the pods with a changed object; the caller syncs them again. With `offline`, what is read is
    /// stored, and stored objects come first while the API server does not count.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(
        client: &Client,
        strategy: Strategy,
        time_to_live: TimeToLive,
        changed: SyncPod,
        deaths: &Sender<Died>,
        offline: Option<Offline>,
    ) -> io::Result<(PodDependencies, Running)> {
        let limited = |client: &Client, token_limit: Duration| Requests {
            client: client.with_timeout(TIMEOUT),
            token_limit,
            deaths: deaths.clone(),
        };
        let requests = |client: &Client| limited(client, TOKEN_LIMIT);
        let services = Services::default();
        let known = services.clone();
        let watched = Watched {
            target: Target::services(),
            field_selector: Some("spec.clusterIP!=None".to_owned()),
            label_selector: None,
            spread: Spread::OTHERS,
        };
        let on_death = OnDeath::Supervisor(deaths.clone());
        let running =
            spawn_reflector("services", client.clone(), watched, on_death, move |change| match change {
                Change::Replaced(services) => known.replace(services),
                Change::Set(service) => known.set(service),
                Change::Removed(service) => known.remove(&service),
            })?;
        let pod_api = PodDependencies {
            objects: Objects::new(strategy, Arc::new(requests(client)), time_to_live, changed)
                .with_offline(offline.clone()),
            tokens: Tokens::new(Box::new(requests(client))).with_offline(offline.clone()),
            // Pulls of other pods may wait for this.
            registry_tokens: Tokens::new(Box::new(limited(client, TIMEOUT))),
            services,
            classes: RuntimeClasses::new(Box::new(requests(client))).with_offline(offline.clone()),
            claims: VolumeClaims::new(Box::new(requests(client))).with_offline(offline.clone()),
            trust: ProjectedCertificates {
                bundles: TrustBundles::new(Box::new(BundleRequests::new(client.with_timeout(TIMEOUT))))
                    .with_offline(offline.clone()),
                certificates: PodCertificates::new(Box::new(CertificateRequests::new(
                    client.with_timeout(TIMEOUT),
                )))
                .with_offline(offline),
            },
        };
        Ok((pod_api, running))
    }
}

impl ObjectApi for Requests {
    fn read(&self, key: &Key) -> Result<Object, ObjectError> {
        let target = match key.kind {
            Kind::ConfigMap => Target::config_map(&key.namespace, &key.name),
            Kind::Secret => Target::secret(&key.namespace, &key.name),
        };
        match self.client.get::<Stored>(&target) {
            Ok(stored) => Ok(stored.into_object(key.kind)),
            Err(error) => Err(object_error(key, &error)),
        }
    }

    fn read_new(&self, key: &Key) -> Result<Object, ObjectError> {
        // The server may not know yet that a pod of this node names the object.
        let lags = |error: &ObjectError| matches!(error, ObjectError::Forbidden { .. });
        self.client.repeat_while_caches_lag(lags, || self.read(key))
    }

    fn responds(&self) -> bool {
        self.client.responds()
    }

    fn watch(&self, key: &Key, mut sink: OnUpdate) -> io::Result<Running> {
        let plural = match key.kind {
            Kind::ConfigMap => "configmaps",
            Kind::Secret => "secrets",
        };
        let watched = Watched {
            target: Target::new(GroupVersion::Core, plural).namespace(&key.namespace),
            field_selector: Some(format!("metadata.name={}", key.name)),
            label_selector: None,
            spread: Spread::OBJECTS,
        };
        let on_death = OnDeath::Supervisor(self.deaths.clone());
        let key = key.clone();
        spawn_reflector("object", self.client.clone(), watched, on_death, move |change: Change<Stored>| {
            let is_it = |stored: &Stored| stored.name() == key.name;
            match change {
                Change::Replaced(list) => {
                    sink(list.into_iter().find(is_it).map(|stored| stored.into_object(key.kind)));
                }
                Change::Set(stored) if is_it(&stored) => sink(Some(stored.into_object(key.kind))),
                Change::Removed(stored) if is_it(&stored) => sink(None),
                Change::Set(_) | Change::Removed(_) => {}
            }
        })
    }
}

/// Whether the API server may refuse a token only because its caches are older than the pod that this node
/// has received.
fn may_lag(error: &ApiError) -> bool {
    let text = error.to_string();
    // The admission knows no such pod. "pods ..." would be the text for a missing pod: then the pod was deleted.
    let misses_pod = error.is_not_found() && text.starts_with("pod \"");
    let refusals = [
        // The admission has the pod as it was before the scheduler bound it,
        "bound to a pod scheduled on a different node",
        // or the former pod of this name, which a controller has replaced,
        "the UID in the bound object reference",
        // or the authorizer does not have the pod.
        "no relationship found between node",
    ];
    misses_pod || (error.is_forbidden() && refusals.iter().any(|refusal| text.contains(refusal)))
}

/// A service account.
#[derive(Deserialize)]
struct AccountObject {
    metadata: ServiceAccount,
}

impl TokenApi for Requests {
    fn create(
        &self,
        namespace: &str,
        account: &str,
        body: &Value,
        stop: &StopToken,
    ) -> Result<IssuedToken, ApiError> {
        let target = Target::service_account_token(namespace, account);
        let client = self.client.with_stop(stop).with_timeout(self.token_limit);
        client.repeat_while_caches_lag(may_lag, || client.create(&target, body))
    }

    fn account(&self, namespace: &str, name: &str) -> Result<ServiceAccount, ApiError> {
        let target = Target::service_account(namespace, name);
        let object =
            self.client.repeat_while_caches_lag(may_lag, || self.client.get::<AccountObject>(&target));
        object.map(|object| object.metadata)
    }
}

impl ClassApi for Requests {
    fn read_class(&self, name: &str) -> Result<Class, ClassError> {
        self.client.get(&Target::runtime_classes().name(name)).map_err(|error| match error.is_not_found() {
            true => ClassError::NotFound(name.to_owned()),
            false => ClassError::Unavailable { name: name.to_owned(), reason: error.to_string() },
        })
    }
}

impl VolumeClaimApi for Requests {
    fn read_claim(&self, namespace: &str, name: &str) -> Result<Claim, ReadError> {
        self.client.get(&Target::claim(namespace, name)).map_err(|error| read_error(&error))
    }

    fn read_volume(&self, name: &str) -> Result<PersistentVolume, ReadError> {
        self.client.get(&Target::persistent_volume(name)).map_err(|error| read_error(&error))
    }

    fn read_secret(&self, namespace: &str, name: &str) -> Result<Object, ReadError> {
        let stored = self.client.get::<Stored>(&Target::secret(namespace, name));
        stored.map(|stored| stored.into_object(Kind::Secret)).map_err(|error| read_error(&error))
    }

    fn read_driver(&self, name: &str) -> Result<Option<CsiDriver>, ReadError> {
        match self.client.get(&Target::csi_driver(name)) {
            Ok(driver) => Ok(Some(driver)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(read_error(&error)),
        }
    }

    fn read_attachment(&self, name: &str) -> Result<VolumeAttachment, ReadError> {
        self.client.get(&Target::volume_attachment(name)).map_err(|error| read_error(&error))
    }

    fn write_expansion(&self, namespace: &str, name: &str, step: &ExpansionStep) -> Result<(), ReadError> {
        let body = expansion_patch(step, Timestamp::now());
        let changed: Result<Value, ApiError> =
            self.client.patch(&Target::claim_status(namespace, name), &body);
        changed.map(drop).map_err(|error| read_error(&error))
    }

    fn write_size(&self, namespace: &str, name: &str, size: &str) -> Result<(), ReadError> {
        // Conditions are merged by their type.
        let gone = ["FileSystemResizePending", "Resizing", "NodeResizeError", "ControllerResizeError"]
            .map(|kind| json!({"type": kind, "$patch": "delete"}));
        let body = json!({"status": {
            "capacity": {"storage": size},
            "conditions": gone,
            "allocatedResourceStatuses": {"storage": null},
        }});
        let changed: Result<Value, ApiError> =
            self.client.patch(&Target::claim_status(namespace, name), &body);
        changed.map(drop).map_err(|error| read_error(&error))
    }
}

/// The status of a claim (Go: pkg/volume/util/resize_util.go).
fn expansion_patch(step: &ExpansionStep, now: Timestamp) -> Value {
    let state = match step {
        ExpansionStep::InProgress => Some("NodeResizeInProgress"),
        ExpansionStep::Failed(_) => None,
        ExpansionStep::Infeasible(_) => Some("NodeResizeInfeasible"),
    };
    let mut status = json!({});
    if let Some(state) = state {
        status["allocatedResourceStatuses"] = json!({"storage": state});
    }
    if let ExpansionStep::Failed(reason) | ExpansionStep::Infeasible(reason) = step {
        // The API stores whole seconds only.
        let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
        status["conditions"] = json!([{
            "type": "NodeResizeError",
            "status": "True",
            "lastTransitionTime": now.to_string(),
            "message": format!("failed to expand pvc with {reason}"),
        }]);
    }
    json!({ "status": status })
}

fn read_error(error: &ApiError) -> ReadError {
    let text = error.to_string();
    if error.is_stopping() {
        ReadError::Stopping
    } else if error.is_not_found() && !is_unserved(error) {
        ReadError::NotFound { text }
    } else if error.is_forbidden() {
        ReadError::Forbidden { text }
    } else {
        ReadError::Unavailable { text }
    }
}

/// Whether the API server does not serve the resource at all: its 404 then is no `Status`.
pub(super) fn is_unserved(error: &ApiError) -> bool {
    let names_no_object = || error.to_string().contains("could not find the requested resource");
    error.status() == Some(404) && (!error.is_not_found() || names_no_object())
}

fn object_error(key: &Key, error: &ApiError) -> ObjectError {
    let text = error.to_string();
    if error.is_not_found() {
        objects::not_found(key)
    } else if error.is_stopping() {
        ObjectError::Stopping
    } else if error.is_forbidden() {
        ObjectError::Forbidden { text }
    } else {
        ObjectError::Unavailable { text }
    }
}

#[cfg(test)]
mod tests;
