//! The thread `certs`: renews the client certificate and the serving certificate.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use jiff::{SignedDuration, Timestamp};

use super::bootstrap::{self, Cluster};
use super::csr::{Purpose, ServingNames, Template};
use super::rotation::{self, OpenSigner, Outcome, Rotation, Signer};
use super::serving::CurrentServingCertificate;
use super::signer::{OpenBootstrap, opener, signer};
use super::store::{Identity, Store};
use crate::kube::Returns;
use crate::kube::client::Client;
use crate::model::api;
use crate::model::metrics::{
    CLIENT_CERTIFICATE_END, CLIENT_CERTIFICATE_ERRORS, SERVING_CERTIFICATE_END, SERVING_CERTIFICATE_ERRORS,
};
use crate::transport;
use crate::util::backoff::random_unit;
use crate::util::error_chain::chain;
use crate::util::lock::LockExt;
use crate::util::metrics::{Counter, Gauge};
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};

/// A clock change is noticed within this time.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// The certificates to renew.
pub struct Settings {
    /// `--cert-dir`.
    pub cert_dir: PathBuf,
    /// The node's name.
    pub node_name: String,
    /// The client certificate, if `rotateCertificates` is set.
    pub client: Option<ClientRenewal>,
    /// The serving certificate, if `serverTLSBootstrap` is set.
    pub serving: Option<CurrentServingCertificate>,
}

/// The client certificate to renew.
pub struct ClientRenewal {
    /// The current one; see [`client_identity`].
    pub current: Option<Identity>,
    /// Used when the node's own credentials have expired, or do not exist yet.
    pub bootstrap: Option<OpenBootstrap>,
    /// The kubeconfig to write once there is a valid certificate, for a node that has none.
    pub kubeconfig: Option<(PathBuf, Cluster)>,
}

struct Parts {
    cert_dir: PathBuf,
    node_name: String,
    client: Option<ClientParts>,
    serving: Option<(CurrentServingCertificate, Box<dyn Signer + Send>)>,
    returns: Returns,
}

struct ClientParts {
    current: Option<Identity>,
    /// The client with the node's own credentials.
    own: Box<dyn Signer + Send>,
    bootstrap: Option<OpenSigner>,
    kubeconfig: Option<(PathBuf, Cluster)>,
    /// Uses a new certificate.
    install: Install,
}

type Install = Box<dyn FnMut(&Identity) + Send>;

/// A handle of the thread for its users. Clones share it.
#[derive(Clone)]
pub struct Certificates {
    names: Arc<Mutex<ServingNames>>,
    bell: Sender<()>,
}

impl Certificates {
    /// Sets the node's addresses. A serving certificate that lacks one is replaced.
    pub fn set_addresses(&self, addresses: &[api::NodeAddress]) {
        let new = ServingNames::of_addresses(addresses);
        let mut names = self.names.locked();
        if *names != new {
            *names = new;
            // If the bell is full, it rings already; a thread that has ended needs none.
            let _ = self.bell.try_send(());
        }
    }
}

/// The client certificate to start with: the current one of `store`, or, if that is missing or has
/// expired, that of the kubeconfig's credentials.
#[must_use]
pub fn client_identity(
    store: &Store,
    kubeconfig: Option<&transport::api::Identity>,
    now: Timestamp,
) -> Option<Identity> {
    let kubeconfig = kubeconfig.and_then(|identity| Identity::of_client(identity).ok());
    let stored = store.load().unwrap_or_else(|error| {
        log::warn!("{}", chain(&error));
        None
    });
    match (stored, kubeconfig) {
        (Some(stored), Some(other)) if stored.facts.is_expired(now) && !other.facts.is_expired(now) => {
            Some(other)
        }
        (Some(stored), _) => Some(stored),
        (None, other) => other,
    }
}

/// Starts the thread. `client` has the node's own credentials, which are replaced when there is a
/// new certificate.
///
/// # Errors
/// When the kernel cannot create the thread.
pub fn spawn(
    settings: Settings,
    client: &Client,
    on_death: OnDeath,
) -> std::io::Result<(Running, Certificates)> {
    let breaker = client.breaker();
    let serving = settings.serving.map(|serving| (serving, signer(client, &breaker)));
    let renewed = settings.client.map(|renewed| {
        let client = client.clone();
        ClientParts {
            current: renewed.current,
            own: signer(&client, &breaker),
            bootstrap: renewed.bootstrap.map(|open| opener(open, &breaker)),
            kubeconfig: renewed.kubeconfig,
            install: Box::new(move |identity| install(&client, identity)),
        }
    });
    let Settings { cert_dir, node_name, .. } = settings;
    let parts = Parts { cert_dir, node_name, client: renewed, serving, returns: client.returns() };
    let (running, certificates) = start(parts, on_death)?;
    Ok((running.with_waker(Box::new(move || breaker.trip())), certificates))
}

fn install(client: &Client, identity: &Identity) {
    if let Err(error) = client.set_identity(identity.for_client()) {
        log::error!("the new client certificate cannot be used: {error}");
    }
}

fn start(parts: Parts, on_death: OnDeath) -> std::io::Result<(Running, Certificates)> {
    let (ring, bell) = bounded(1);
    let certificates = Certificates { names: Arc::default(), bell: ring };
    let own = certificates.clone();
    let running = threads::spawn("certs", Stack::Large, on_death, move |stop| {
        // `parts` has the other end of the bell, so the channel stays open.
        State::new(parts, own).run(&stop, &bell);
    })?;
    Ok((running, certificates))
}

struct State {
    certificates: Certificates,
    node_name: String,
    client: Option<ClientState>,
    serving: Option<(Rotation, CurrentServingCertificate)>,
    returns: Returns,
}

struct ClientState {
    rotation: Rotation,
    store: Store,
    kubeconfig: Option<(PathBuf, Cluster)>,
    install: Install,
}

impl ClientState {
    /// Writes the kubeconfig if it was not written yet and its certificate exists.
    fn publish_kubeconfig(&mut self) {
        let Some((path, cluster)) = &self.kubeconfig else { return };
        match bootstrap::write_kubeconfig(path, cluster, &self.store) {
            Ok(()) => {
                log::info!("the node's kubeconfig is {}", path.display());
                self.kubeconfig = None;
            }
            Err(error) => log::error!("{}", chain(&error)),
        }
    }
}

impl State {
    fn new(parts: Parts, certificates: Certificates) -> State {
        let Parts { cert_dir, node_name, client, serving, returns } = parts;
        let client = client.map(|client| {
            let store = Store::new(&cert_dir, Purpose::Client);
            let ClientParts { current, own, bootstrap, kubeconfig, install } = client;
            let is_valid =
                bootstrap::valid_identity(&store, &Template::client(&node_name), Timestamp::now()).is_some();
            let rotation = Rotation::new(store.clone(), current, Some(own), bootstrap, random_unit());
            let mut client = ClientState { rotation, store, kubeconfig, install };
            if is_valid {
                client.publish_kubeconfig();
            }
            client
        });
        let serving = serving.map(|(serving, signer)| {
            let store = Store::new(&cert_dir, Purpose::Serving);
            // An unreadable certificate was logged when the source was opened.
            let current = store.load().unwrap_or_default();
            (Rotation::new(store, current, Some(signer), None, random_unit()), serving)
        });
        State { certificates, node_name, client, serving, returns }
    }

    fn run(&mut self, stop: &StopToken, bell: &Receiver<()>) {
        loop {
            let now = Timestamp::now();
            let number = self.returns.number();
            let due = self.turn(now, stop);
            let returned = if self.is_waiting() { self.returns.after(number) } else { StopToken::never() };
            let pause = due.duration_since(now).max(SignedDuration::ZERO).unsigned_abs().min(LONGEST_WAIT);
            let _waiting = threads::waiting("a certificate's renewal");
            select_biased! {
                recv(stop.signal()) -> _ => return,
                recv(bell) -> _ => {}
                recv(returned.signal()) -> _ => self.returned(Timestamp::now()),
                default(pause) => {}
            }
        }
    }

    fn rotations(&mut self) -> impl Iterator<Item = &mut Rotation> {
        let client = self.client.as_mut().map(|client| &mut client.rotation);
        client.into_iter().chain(self.serving.as_mut().map(|(rotation, _)| rotation))
    }

    fn is_waiting(&mut self) -> bool {
        self.rotations().any(|rotation| rotation.is_waiting())
    }

    fn returned(&mut self, now: Timestamp) {
        self.rotations().for_each(|rotation| rotation.returned(now));
    }

    /// Runs the due turns and returns the time of the next turn.
    fn turn(&mut self, now: Timestamp, stop: &StopToken) -> Timestamp {
        let mut due = Timestamp::MAX;
        if let Some(client) = &mut self.client {
            let template = Template::client(&self.node_name);
            let outcome = client.rotation.turn(Some(&template), now, random_unit());
            if stop.is_stopped() {
                return due;
            }
            rotation::log_outcome(Purpose::Client, &outcome, client.rotation.failures());
            if let Outcome::Issued(identity, stored) = &outcome {
                (client.install)(identity);
                if stored.is_none() {
                    client.publish_kubeconfig();
                }
            }
            due = due.min(client.rotation.due(Some(&template), now));
            let end = client.rotation.not_after();
            count(&outcome, end, &CLIENT_CERTIFICATE_END, &CLIENT_CERTIFICATE_ERRORS);
        }
        if let Some((rotation, serving)) = &mut self.serving {
            let names = self.certificates.names.locked().clone();
            // The signer rejects a node without an address, so no request is made before there is one.
            let template = (!names.ips.is_empty()).then(|| Template::serving(&self.node_name, names));
            let outcome = rotation.turn(template.as_ref(), now, random_unit());
            if stop.is_stopped() {
                return due;
            }
            rotation::log_outcome(Purpose::Serving, &outcome, rotation.failures());
            if let Outcome::Issued(identity, _) = &outcome {
                serving.put(identity);
            }
            due = due.min(rotation.due(template.as_ref(), now));
            count(&outcome, rotation.not_after(), &SERVING_CERTIFICATE_END, &SERVING_CERTIFICATE_ERRORS);
        }
        due
    }
}

/// Sets the expiry of a certificate for the metrics.
fn count(outcome: &Outcome, end: Option<Timestamp>, shown: &Gauge, errors: &Counter) {
    if let Some(end) = end {
        shown.set(end.as_second() as f64);
    }
    if matches!(outcome, Outcome::Failed(_)) {
        errors.inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::certificates::rotation::tests::FakeSigner;
    use std::time::Instant;

    #[test]
    fn the_thread_requests_installs_and_serves() {
        let dir = tempfile::tempdir().unwrap();
        let signer = FakeSigner::approving();
        let (installed, installs) = bounded(4);
        let serving = CurrentServingCertificate::default();
        let limit = Duration::from_secs(30);
        // Waits for the certificate of this generation.
        let generation = |wanted: u64| {
            let end = Instant::now() + limit;
            while serving.current().is_none_or(|current| current.generation < wanted) {
                assert!(Instant::now() < end, "no certificate of generation {wanted}");
                let _ = StopToken::never().wait(Duration::from_millis(1));
            }
            serving.current().unwrap().generation
        };
        let parts = Parts {
            cert_dir: dir.path().to_owned(),
            node_name: "node1".into(),
            client: Some(ClientParts {
                current: None,
                own: signer.boxed(),
                bootstrap: None,
                kubeconfig: Some((dir.path().join("kubelet.conf"), Cluster::default())),
                install: Box::new(move |identity| {
                    let _ = installed.send(identity.facts.subject.clone().unwrap_or_default().common_name);
                }),
            }),
            serving: Some((serving.clone(), signer.boxed())),
            returns: Returns::default(),
        };
        let (running, certificates) = start(parts, OnDeath::Unsupervised).unwrap();
        assert_eq!(installs.recv_timeout(limit).unwrap(), "system:node:node1");
        assert!(serving.current().is_none(), "there is no address yet");
        let address = |ip: &str| api::NodeAddress { type_: "InternalIP".into(), address: ip.into() };
        certificates.set_addresses(&[address("10.0.0.7")]);
        assert_eq!(generation(1), 1);
        certificates.set_addresses(&[address("10.0.0.7")]);
        certificates.set_addresses(&[address("10.0.0.8")]);
        assert_eq!(generation(2), 2);
        drop(running);
        assert!(dir.path().join("kubelet.conf").exists());
        assert!(Store::new(dir.path(), Purpose::Client).load().unwrap().is_some());
    }
}
