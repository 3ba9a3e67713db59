//! The thread `certs`: renews the client certificate and the serving certificate.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use jiff::{SignedDuration, Timestamp};

use super::bootstrap::{self, Cluster};
use super::chain;
use super::csr::{Purpose, ServingNames, Template};
use super::rotation::{self, OpenSigner, Outcome, Rotation, Signer};
use super::serving::Serving;
use super::signer::{OpenBootstrap, opener, signer};
use super::store::{Identity, Store};
use crate::kube::client::Client;
use crate::model::api;
use crate::model::metrics::{
    CLIENT_CERTIFICATE_END, CLIENT_CERTIFICATE_ERRORS, SERVING_CERTIFICATE_END, SERVING_CERTIFICATE_ERRORS,
};
use crate::transport;
use crate::util::backoff::random_unit;
use crate::util::metrics::{Counter, Gauge};
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};

/// A clock that was set is noticed after this time.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// What is renewed.
pub struct Settings {
    /// `--cert-dir`.
    pub cert_dir: PathBuf,
    /// The node's name.
    pub node_name: String,
    /// With `rotateCertificates`: the client certificate.
    pub client: Option<Renewed>,
    /// With `serverTLSBootstrap`: the serving certificate.
    pub serving: Option<Serving>,
}

/// The client certificate's part.
pub struct Renewed {
    /// The one in use; see [`client_identity`].
    pub current: Option<Identity>,
    /// For when the own credentials have expired, or there are none yet.
    pub bootstrap: Option<OpenBootstrap>,
    /// The kubeconfig to write once there is a good certificate, for a node that has none.
    pub kubeconfig: Option<(PathBuf, Cluster)>,
}

/// What the thread works with.
struct Parts {
    cert_dir: PathBuf,
    node_name: String,
    client: Option<ClientParts>,
    serving: Option<(Serving, Box<dyn Signer + Send>)>,
}

struct ClientParts {
    current: Option<Identity>,
    /// With the node's own credentials.
    own: Box<dyn Signer + Send>,
    bootstrap: Option<OpenSigner>,
    kubeconfig: Option<(PathBuf, Cluster)>,
    /// Puts a new certificate to use.
    install: Install,
}

type Install = Box<dyn FnMut(&Identity) + Send>;

/// What others hold of the thread. Clones share it.
#[derive(Clone)]
pub struct Certificates {
    shared: Arc<Mutex<Shared>>,
    bell: Sender<()>,
}

#[derive(Default)]
struct Shared {
    names: ServingNames,
    numbers: Numbers,
}

/// How it stands, for metrics and reports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Numbers {
    /// The end of the client certificate; none without one that is renewed here.
    pub client_not_after: Option<Timestamp>,
    /// The end of the serving certificate; likewise.
    pub serving_not_after: Option<Timestamp>,
    /// Attempts at a new client certificate that failed.
    pub client_errors: u64,
    /// Attempts at a new serving certificate that failed.
    pub serving_errors: u64,
}

impl Certificates {
    /// The node's addresses as they are now. A serving certificate that lacks one is replaced.
    pub fn set_addresses(&self, addresses: &[api::NodeAddress]) {
        let new = ServingNames::of_addresses(addresses);
        let mut shared = self.lock();
        if shared.names != new {
            shared.names = new;
            // A full bell already rings; a thread that has ended needs none.
            let _ = self.bell.try_send(());
        }
    }

    /// How it stands.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        self.lock().numbers
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The client certificate to start with: the current one of `store`, or, if that is not there
/// or has expired, that of the kubeconfig's credentials.
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

/// Starts the thread. `client` has the node's own credentials, which are replaced in it when
/// there is a new certificate.
///
/// # Errors
/// When the kernel refuses the thread.
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
    let parts = Parts { cert_dir, node_name, client: renewed, serving };
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
    let certificates = Certificates { shared: Arc::default(), bell: ring };
    let own = certificates.clone();
    let running = threads::spawn("certs", Stack::Large, on_death, move |stop| {
        // It holds the other end of the bell, so that is never cut off.
        Room::new(parts, own).run(&stop, &bell);
    })?;
    Ok((running, certificates))
}

/// The state of the thread.
struct Room {
    certificates: Certificates,
    node_name: String,
    client: Option<ClientRoom>,
    serving: Option<(Rotation, Serving)>,
}

struct ClientRoom {
    rotation: Rotation,
    store: Store,
    kubeconfig: Option<(PathBuf, Cluster)>,
    install: Install,
}

impl ClientRoom {
    /// Writes the kubeconfig if it is still to be written and there is what it points at.
    fn introduce(&mut self) {
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

impl Room {
    fn new(parts: Parts, certificates: Certificates) -> Room {
        let Parts { cert_dir, node_name, client, serving } = parts;
        let client = client.map(|client| {
            let store = Store::new(&cert_dir, Purpose::Client);
            let ClientParts { current, own, bootstrap, kubeconfig, install } = client;
            let good = bootstrap::good(&store, &Template::client(&node_name), Timestamp::now()).is_some();
            let rotation = Rotation::new(store.clone(), current, Some(own), bootstrap, random_unit());
            let mut client = ClientRoom { rotation, store, kubeconfig, install };
            if good {
                client.introduce();
            }
            client
        });
        let serving = serving.map(|(serving, signer)| {
            let store = Store::new(&cert_dir, Purpose::Serving);
            // One that cannot be read was told of when the source was opened.
            let current = store.load().unwrap_or_default();
            (Rotation::new(store, current, Some(signer), None, random_unit()), serving)
        });
        Room { certificates, node_name, client, serving }
    }

    fn run(&mut self, stop: &StopToken, bell: &Receiver<()>) {
        loop {
            let now = Timestamp::now();
            let due = self.turn(now, stop);
            let pause = due.duration_since(now).max(SignedDuration::ZERO).unsigned_abs().min(LONGEST_WAIT);
            let _waiting = threads::waiting("a certificate's renewal");
            select_biased! {
                recv(stop.signal()) -> _ => return,
                recv(bell) -> _ => {}
                default(pause) => {}
            }
        }
    }

    /// Does what is due and says when to come back.
    fn turn(&mut self, now: Timestamp, stop: &StopToken) -> Timestamp {
        let mut due = Timestamp::MAX;
        if let Some(client) = &mut self.client {
            let template = Template::client(&self.node_name);
            let outcome = client.rotation.turn(Some(&template), now, random_unit());
            if stop.is_stopped() {
                return due;
            }
            rotation::tell(Purpose::Client, &outcome, client.rotation.failures());
            if let Outcome::Issued(identity, stored) = &outcome {
                (client.install)(identity);
                if stored.is_none() {
                    client.introduce();
                }
            }
            due = due.min(client.rotation.due(Some(&template), now));
            let numbers = &mut self.certificates.lock().numbers;
            numbers.client_not_after = client.rotation.not_after();
            numbers.client_errors += u64::from(matches!(outcome, Outcome::Failed(_)));
            count(&outcome, numbers.client_not_after, &CLIENT_CERTIFICATE_END, &CLIENT_CERTIFICATE_ERRORS);
        }
        if let Some((rotation, serving)) = &mut self.serving {
            let names = self.certificates.lock().names.clone();
            // The signer refuses a node without an address; before there is one, none is asked for.
            let template = (!names.ips.is_empty()).then(|| Template::serving(&self.node_name, names));
            let outcome = rotation.turn(template.as_ref(), now, random_unit());
            if stop.is_stopped() {
                return due;
            }
            rotation::tell(Purpose::Serving, &outcome, rotation.failures());
            if let Outcome::Issued(identity, _) = &outcome {
                serving.put(identity);
            }
            due = due.min(rotation.due(template.as_ref(), now));
            let numbers = &mut self.certificates.lock().numbers;
            numbers.serving_not_after = rotation.not_after();
            numbers.serving_errors += u64::from(matches!(outcome, Outcome::Failed(_)));
            count(&outcome, numbers.serving_not_after, &SERVING_CERTIFICATE_END, &SERVING_CERTIFICATE_ERRORS);
        }
        due
    }
}

/// For the metrics.
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

    #[test]
    fn the_thread_asks_installs_and_serves() {
        let dir = tempfile::tempdir().unwrap();
        let signer = FakeSigner::approving();
        let (installed, news) = bounded(4);
        let serving = Serving::default();
        let changed = serving.subscribe();
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
        };
        let (running, certificates) = start(parts, OnDeath::Nobody).unwrap();
        let limit = Duration::from_secs(30);
        assert_eq!(news.recv_timeout(limit).unwrap(), "system:node:node1");
        assert!(serving.current().is_none(), "no address is known");
        let address = |ip: &str| api::NodeAddress { type_: "InternalIP".into(), address: ip.into() };
        certificates.set_addresses(&[address("10.0.0.7")]);
        changed.recv_timeout(limit).unwrap();
        assert_eq!(serving.current().unwrap().generation, 1);
        certificates.set_addresses(&[address("10.0.0.7")]);
        certificates.set_addresses(&[address("10.0.0.8")]);
        changed.recv_timeout(limit).unwrap();
        assert_eq!(serving.current().unwrap().generation, 2);
        drop(running);
        assert!(dir.path().join("kubelet.conf").exists());
        let numbers = certificates.numbers();
        assert!(numbers.client_not_after.is_some() && numbers.serving_not_after.is_some());
        assert_eq!((numbers.client_errors, numbers.serving_errors), (0, 0));
        assert!(Store::new(dir.path(), Purpose::Client).load().unwrap().is_some());
    }
}
