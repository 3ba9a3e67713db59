//! Static pods from a URL: poll, compare, decode (Go: pkg/kubelet/config/http.go).

use std::time::Duration;

use jiff::Timestamp;

use super::fnv::Fnv128;
use super::identity::Origin;
use super::manifest;
use super::notice::Notice;
use super::pods_at_start::PodsAtStart;
use super::problem::{Fault, SourceProblem, problems, summary};
use super::set::{Deps, SourceSet};
use super::settings::{HttpSettings, MAX_MANIFEST_BYTES};
use super::store::Store;
use crate::model::pod::{Pod, SourceName};
use crate::transport::http::{GetError, GetResponse, Getter};
use crate::util::stop::{StopToken, Waited};
use crate::util::threads::{self, OnDeath, Running, Stack};

/// Time limit of one request, its body included.
const TIMEOUT: Duration = Duration::from_secs(10);
const CHECK_MIN: Duration = Duration::from_secs(1);
const CHECK_MAX: Duration = Duration::from_secs(24 * 3600);

/// Starts the thread `src-http`.
pub(super) fn spawn(
    node_name: &str,
    settings: &HttpSettings,
    known: PodsAtStart,
    store: Store,
    deps: &Deps,
) -> std::io::Result<Running> {
    let getter = Getter::new(&settings.url, &settings.headers, TIMEOUT, MAX_MANIFEST_BYTES);
    let getter_for_stop = getter.clone();
    let check = settings.check.clamp(CHECK_MIN, CHECK_MAX);
    let remote = Remote { known, ..Remote::new(&settings.url, node_name, store) };
    let deps = deps.clone();
    let on_death = OnDeath::Supervisor(deps.on_death.clone());
    let running = threads::spawn("src-http", Stack::Large, on_death, move |stop| {
        run(&getter, remote, check, &deps, &stop);
    })?;
    Ok(running.with_waker(Box::new(move || getter_for_stop.shut_down())))
}

fn run(getter: &Getter, mut remote: Remote, check: Duration, deps: &Deps, stop: &StopToken) {
    let mut posted: Option<SourceSet> = None;
    loop {
        let outcome = {
            let _waiting = threads::waiting("a response of the manifest URL");
            getter.get()
        };
        if stop.is_stopped() {
            return;
        }
        if let Some(message) = remote.take(outcome, Timestamp::now()) {
            Notice { place: remote.place.clone(), message, carried_over: remote.carried_over.clone() }
                .report(deps);
        }
        let set = remote.set();
        if posted.as_ref() != Some(&set) {
            deps.post.put(SourceName::Http, set.clone());
            posted = Some(set);
        }
        // The disk is written after the pods are posted.
        remote.save();
        let _waiting = threads::waiting("poll timer or stop");
        if stop.wait(check) == Waited::Stopped {
            return;
        }
    }
}

/// The state of the URL.
struct Remote {
    url: String,
    origin: Origin,
    /// The URL for messages: without a password.
    place: String,
    node_name: String,
    /// The pods that were on the node when the agent started.
    known: PodsAtStart,
    /// `None` until a response, or the record of an earlier one, shows which pods should run.
    pods: Option<Vec<Pod>>,
    /// Hash of the last body that was read.
    body: Option<u128>,
    /// Unknown fields in that body; its pods are still valid.
    unknown: Vec<Fault>,
    body_faults: Vec<Fault>,
    /// Pods that are not in that body, but were in the last valid one.
    body_carried_over: Vec<Pod>,
    /// The current problems.
    faults: Vec<Fault>,
    /// Pods that continue to run because of them.
    carried_over: Vec<Pod>,
    since: Option<Timestamp>,
    store: Store,
    /// Whether the store was read; it is read once, if the first response is invalid.
    store_read: bool,
    /// Whether the store does not have the current `pods` yet.
    unsaved: bool,
    /// Whether the records of other URLs were removed.
    others_removed: bool,
}

impl Remote {
    fn new(url: &str, node_name: &str, store: Store) -> Self {
        Remote {
            url: url.to_owned(),
            origin: Origin::Http(url.to_owned()),
            place: without_credentials(url),
            node_name: node_name.to_owned(),
            known: PodsAtStart::default(),
            pods: None,
            body: None,
            unknown: Vec::new(),
            body_faults: Vec::new(),
            body_carried_over: Vec::new(),
            faults: Vec::new(),
            carried_over: Vec::new(),
            since: None,
            store,
            store_read: false,
            unsaved: false,
            others_removed: false,
        }
    }

    /// Restores the pods that ran before the start while the URL has no valid response.
    ///
    /// DIFFERS: upstream has no pods from a URL until it responds.
    fn load_stored(&mut self) {
        if self.pods.is_none() && !self.store_read {
            self.store_read = true;
            let pods = self.store.load(self.url.as_bytes(), &self.place);
            self.pods = Some(pods).filter(|pods| !pods.is_empty());
        }
    }

    /// Updates the store; a failed write is retried after the next response.
    fn save(&mut self) {
        if !self.others_removed {
            self.others_removed = true;
            self.store.remove_except(std::iter::once(self.url.as_bytes()));
        }
        if self.unsaved
            && let Some(pods) = &self.pods
        {
            self.unsaved = !self.store.save(self.url.as_bytes(), &self.place, pods);
        }
    }

    fn problems(&self) -> Vec<SourceProblem> {
        let (pods_continue, since) = (!self.carried_over.is_empty(), self.since.unwrap_or_default());
        problems(&self.place, &self.faults, &self.unknown, pods_continue, since).collect()
    }

    fn set(&self) -> SourceSet {
        SourceSet { pods: self.pods.clone(), problems: self.problems(), ..SourceSet::default() }
    }

    /// Handles the result of one request. Returns a message if there is a new problem.
    fn take(&mut self, outcome: Result<GetResponse, GetError>, now: Timestamp) -> Option<String> {
        let before = self.pods.clone();
        let unknown_before = self.unknown.clone();
        let faults = match outcome {
            Ok(response) => self.take_response(response),
            Err(error) => {
                self.load_stored();
                self.carried_over = self.pods.clone().unwrap_or_default();
                vec![Fault::whole(format!("GET failed: {error}"))]
            }
        };
        self.unsaved |= self.pods != before;
        let changed = faults != self.faults || self.unknown != unknown_before;
        self.faults = faults;
        if self.faults.is_empty() && self.unknown.is_empty() {
            if self.since.take().is_some() {
                log::info!("{}: valid again", self.place);
            }
            return None;
        }
        self.since.get_or_insert(now);
        changed.then(|| summary(&self.place, &self.problems()))
    }

    fn take_response(&mut self, response: GetResponse) -> Vec<Fault> {
        let refuse = |remote: &mut Self, message: String| {
            remote.load_stored();
            remote.carried_over = remote.pods.clone().unwrap_or_default();
            vec![Fault::whole(message)]
        };
        let GetResponse { status, body, proxy } = response;
        if body.len() > MAX_MANIFEST_BYTES {
            return refuse(
                self,
                format!("the response is larger than the limit of {MAX_MANIFEST_BYTES} bytes"),
            );
        }
        if status != 200 {
            let through = proxy.map(|proxy| format!(" through proxy {proxy}")).unwrap_or_default();
            return refuse(self, format!("GET failed with status {status}{through}"));
        }
        if body.is_empty() {
            // DIFFERS: upstream compares the next body with the one before the empty response and,
            // if they are equal, ignores its pods.
            self.body = None;
            self.unknown.clear();
            self.pods = Some(Vec::new());
            self.carried_over.clear();
            self.body_carried_over.clear();
            return vec![Fault::whole("the response is empty: there are no pods")];
        }
        let mut hash = Fnv128::default();
        hash.add(&body);
        let hash = hash.value();
        if self.body.replace(hash) != Some(hash) {
            let manifest = manifest::read_with(&body, &self.node_name, &self.origin, &self.known);
            self.unknown = manifest.unknown;
            self.body_faults = manifest.faults;
            let faulty = !self.body_faults.is_empty();
            if faulty {
                self.load_stored();
            }
            // A first response without a valid pod does not show which pods should run.
            if self.pods.is_some() || !faulty || !manifest.pods.is_empty() {
                let old = self.pods.take().unwrap_or_default();
                let (pods, carried_over) = manifest::carry_over(&old, manifest.pods, faulty);
                self.pods = Some(pods);
                self.body_carried_over = carried_over;
            }
        }
        self.carried_over.clone_from(&self.body_carried_over);
        self.body_faults.clone()
    }
}

/// Removes `user:password@` from a URL.
fn without_credentials(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let host = authority.rsplit('@').next().unwrap_or(authority);
    format!("{scheme}://{host}{path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timestamp(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn pod(name: &str) -> String {
        format!(
            "{{\"metadata\":{{\"name\":\"{name}\"}},\"spec\":{{\"containers\":[{{\"name\":\"c\",\"image\":\"i\"}}]}}}}"
        )
    }

    fn list(items: &[String]) -> String {
        format!("{{\"apiVersion\":\"v1\",\"kind\":\"PodList\",\"items\":[{}]}}", items.join(","))
    }

    fn response(status: u16, body: &str) -> Result<GetResponse, GetError> {
        Ok(GetResponse { status, body: body.as_bytes().to_vec(), proxy: None })
    }

    fn remote(url: &str, directory: Option<&std::path::Path>) -> Remote {
        Remote::new(url, "n", Store::new(directory, SourceName::Http, "n"))
    }

    fn names(remote: &Remote) -> Option<Vec<String>> {
        Some(remote.set().pods?.iter().map(|pod| pod.name().to_owned()).collect())
    }

    #[test]
    fn failed_request_keeps_last_set() {
        let mut remote = remote("http://u:p@h/x", None);
        let body = list(&[pod("a"), pod("b")]);
        assert!(remote.take(response(500, "x"), timestamp(1)).is_some());
        assert_eq!(names(&remote), None, "not seen yet");
        assert_eq!(remote.set().problems[0].to_string(), "http://h/x: GET failed with status 500");
        assert_eq!(remote.take(response(200, &body), timestamp(2)), None);
        let first = remote.set();
        assert_eq!(names(&remote), Some(vec!["a-n".into(), "b-n".into()]));
        assert_eq!(first.problems, []);

        assert!(remote.take(response(500, ""), timestamp(3)).is_some());
        assert_eq!(remote.take(response(500, ""), timestamp(4)), None, "reported once");
        let set = remote.set();
        assert_eq!(set.pods, first.pods);
        assert!(set.problems[0].pods_continue && set.problems[0].since == timestamp(3));
        assert_eq!(remote.take(response(200, &body), timestamp(5)), None);
        assert_eq!(remote.set(), first);

        assert!(remote.take(response(200, ""), timestamp(6)).is_some());
        assert_eq!(names(&remote), Some(vec![]));
        assert!(!remote.set().problems[0].pods_continue);
        remote.take(response(200, &body), timestamp(7));
        assert_eq!(remote.set().pods, first.pods);
    }

    #[test]
    fn pod_of_another_release_keeps_its_uid() {
        use crate::sources::{defaults, fingerprint};
        let written: crate::model::api::Pod = serde_json::from_str(&pod("a")).unwrap();
        let mut given = written.clone();
        defaults::set_defaults(&mut given);
        for release in &fingerprint::RELEASES {
            let expected = fingerprint::uid(release, &written, &given, "url:http://h/x").unwrap();
            let pods = tempfile::tempdir().unwrap();
            std::fs::create_dir(pods.path().join(&expected)).unwrap();
            let known = PodsAtStart::find(pods.path(), []);
            let mut remote = Remote { known, ..remote("http://h/x", None) };
            assert_eq!(remote.take(response(200, &list(&[pod("a")])), timestamp(1)), None);
            assert_eq!(remote.set().pods.unwrap()[0].uid().as_str(), expected, "{}", release.name);
        }
    }

    #[test]
    fn an_invalid_response_removes_no_pod() {
        let mut remote = remote("http://h/x", None);
        assert!(remote.take(response(200, "{\"kind\":"), timestamp(1)).is_some());
        assert_eq!(names(&remote), None);
        remote.take(response(200, &list(&[pod("a"), pod("b")])), timestamp(2));
        let bad = list(&[pod("b"), pod("UP")]);
        let message = remote.take(response(200, &bad), timestamp(3)).unwrap();
        assert!(message.contains("items[1].metadata.name"), "{message}");
        assert_eq!(names(&remote), Some(vec!["b-n".into(), "a-n".into()]));
        assert_eq!(remote.carried_over.len(), 1);
        assert_eq!(remote.take(response(200, &bad), timestamp(4)), None);
        assert!(remote.set().problems[0].pods_continue);
        remote.take(response(200, &list(&[pod("b")])), timestamp(5));
        assert_eq!(names(&remote), Some(vec!["b-n".into()]));
        assert_eq!(remote.set().problems, []);
        let huge = " ".repeat(MAX_MANIFEST_BYTES + 1);
        assert!(remote.take(response(200, &huge), timestamp(6)).is_some());
        assert_eq!(names(&remote), Some(vec!["b-n".into()]));
    }

    #[test]
    fn restart_with_invalid_response_keeps_last_set() {
        let state = tempfile::tempdir().unwrap();
        let start = || remote("http://u:p@h/x", Some(state.path()));
        let records = || std::fs::read_dir(state.path()).unwrap().count();
        let mut first = start();
        first.take(response(200, &list(&[pod("a"), pod("b")])), timestamp(1));
        first.save();
        let good = first.set();
        assert_eq!(records(), 1);
        let record = std::fs::read_dir(state.path()).unwrap().next().unwrap().unwrap().path();
        assert!(!std::fs::read_to_string(record).unwrap().contains("u:p"), "no password on disk");

        for bad in [response(503, ""), response(200, "{"), response(200, &list(&[pod("UP")]))] {
            let mut again = start();
            assert!(again.take(bad, timestamp(2)).is_some());
            again.save();
            let set = again.set();
            assert_eq!(set.pods, good.pods);
            assert!(set.problems[0].pods_continue && set.problems[0].since == timestamp(2));
            // Unchanged: the same pods. Then without one: it is removed.
            assert_eq!(again.take(response(200, &list(&[pod("a"), pod("b")])), timestamp(3)), None);
            assert_eq!(again.set(), good);
        }
        // The valid part of a response is used, now and after the next restart.
        let mut again = start();
        again.take(response(200, &list(&[pod("c"), pod("UP")])), timestamp(2));
        again.save();
        assert_eq!(names(&again), Some(vec!["c-n".into(), "a-n".into(), "b-n".into()]));
        let mut again = start();
        again.take(response(500, ""), timestamp(2));
        assert_eq!(names(&again), Some(vec!["c-n".into(), "a-n".into(), "b-n".into()]));

        // Another URL starts without pods, and an empty set needs no record.
        let mut other = remote("http://h/y", Some(state.path()));
        other.take(response(500, ""), timestamp(2));
        assert_eq!(names(&other), None);
        let mut again = start();
        again.take(response(200, &list(&[])), timestamp(2));
        again.save();
        assert_eq!((names(&again), records()), (Some(vec![]), 0));
        let mut again = start();
        again.take(response(500, ""), timestamp(2));
        assert_eq!(names(&again), None);

        // The record of a URL that is not configured any more is removed.
        again.take(response(200, &list(&[pod("a")])), timestamp(3));
        again.save();
        assert_eq!(records(), 1);
        other.save();
        assert_eq!(records(), 0);
    }

    #[test]
    fn url_password_is_not_printed() {
        for (url, shown) in [
            ("http://u:p@h:1/a@b", "http://h:1/a@b"),
            ("http://h/x?y=z@w", "http://h/x?y=z@w"),
            ("https://u@h", "https://h"),
            ("nonsense", "nonsense"),
        ] {
            assert_eq!(without_credentials(url), shown);
        }
    }

    #[test]
    fn the_thread_polls_and_stops_in_the_middle_of_a_request() {
        use crate::model::event::EventSink;
        use crate::util::mailbox::{mailbox, replace};
        use std::io::{Read, Write};
        const LIMIT: Duration = Duration::from_secs(60);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/pods", listener.local_addr().unwrap());
        let (requested, requests) = crossbeam_channel::bounded(4);
        let (seen, go_on) = crossbeam_channel::bounded::<()>(2);
        let body = list(&[pod("a")]);
        let server = threads::spawn("t/server", Stack::Small, OnDeath::Unsupervised, move |_| {
            let response = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
            for response in [response.as_str(), "HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", ""] {
                let (mut stream, _) = listener.accept().unwrap();
                let mut byte = [0];
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
                    request.push(byte[0]);
                }
                stream.write_all(response.as_bytes()).unwrap();
                let _ = requested.send(());
                if response.is_empty() {
                    // The response is delayed until the client is stopped.
                    let _ = stream.read(&mut byte);
                } else {
                    // The next set would replace one that the test has not received yet.
                    let _ = go_on.recv();
                }
            }
        })
        .unwrap();
        let (post, inbox) = mailbox(replace);
        let (events_sink, events) = EventSink::new();
        let (on_death, _deaths) = crossbeam_channel::bounded(1);
        let settings = HttpSettings { url, headers: Default::default(), check: Duration::ZERO };
        let store = Store::new(None, SourceName::Http, "n");
        let deps = Deps { post, events: events_sink, on_death };
        let running = spawn("n", &settings, PodsAtStart::default(), store, &deps).unwrap();
        let next = || {
            inbox.bell().recv_timeout(LIMIT).expect("a set in time");
            let set = inbox.drain().remove(&SourceName::Http).unwrap();
            seen.send(()).unwrap();
            set
        };
        let first = next();
        assert_eq!(first.pods.as_ref().map(Vec::len), Some(1));
        let second = next();
        assert_eq!((&second.pods, second.problems.len()), (&first.pods, 1));
        assert_eq!(events.recv_timeout(LIMIT).unwrap().reason, "InvalidManifest");
        for _ in 0..3 {
            requests.recv_timeout(LIMIT).unwrap();
        }
        // Before the request ends by itself.
        assert_eq!(running.stop(TIMEOUT * 4 / 5), threads::Stopped::Joined);
        drop(server);
    }
}
