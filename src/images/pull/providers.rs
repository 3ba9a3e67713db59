//! Registry credentials from programs (Go: pkg/credentialprovider/plugin). A program receives the
//! name of an image and returns credentials by pattern; if it fails, the pull continues without
//! these credentials.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::config::GoDuration;
use crate::config::credential_providers::{CredentialProvider, CredentialProviders};
use crate::util::child::{self, ChildError, Limits};
use crate::util::stop::StopToken;

use super::credentials::{Credential, Entry, Index, full_repository, index, key_matches, lookup};
use crate::model::typed;
use crate::util::lock::LockExt;
use crate::util::permits::Permits;

/// The limits of one program; its time is that of upstream.
const LIMITS: Limits = Limits { time: Duration::from_secs(60), output_bytes: 1 << 20 };
/// The bytes of a failing program's output that are logged.
const STDERR_SHOWN: usize = 200;
const GLOBAL_KEY: &str = "global";
/// The most responses of a program that are kept: users of pods choose the names of images.
const MAX_CACHED: usize = 1000;

pub(super) struct Providers {
    list: Vec<Provider>,
}

struct Provider {
    settings: CredentialProvider,
    program: PathBuf,
    /// One process at a time; callers that waited find the response in the cache.
    permits: Permits,
    cache: Mutex<HashMap<String, Cached>>,
}

struct Cached {
    until: Instant,
    credentials: Index,
}

#[derive(Debug, thiserror::Error)]
enum ProviderError {
    #[error("{0}")]
    Child(#[from] ChildError),
    #[error("it was not run: the time for all programs is over")]
    NoTime,
    #[error("it ended with {status}: {stderr}")]
    Exit { status: std::process::ExitStatus, stderr: String },
    #[error("its answer is no CredentialProviderResponse (line {line}, column {column})")]
    Decode { line: usize, column: usize },
    #[error("kind from credential plugin response is {actual:?}")]
    Kind { actual: String },
    #[error(
        "apiVersion from credential plugin response did not match expected apiVersion:{expected}, actual apiVersion:{actual}"
    )]
    ApiVersion { expected: String, actual: String },
    #[error("credential provider plugin did not return a valid cacheKeyType: {0:?}")]
    CacheKeyType(String),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Request<'a> {
    kind: &'static str,
    api_version: &'a str,
    image: &'a str,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct Response {
    kind: String,
    api_version: String,
    cache_key_type: String,
    cache_duration: Option<GoDuration>,
    auth: Option<BTreeMap<String, Entry>>,
}

impl Providers {
    pub(super) fn new(settings: Option<&CredentialProviders>) -> Providers {
        let new_provider = |bin_dir: &PathBuf, provider: &CredentialProvider| Provider {
            program: bin_dir.join(&provider.name),
            settings: provider.clone(),
            permits: Permits::new(1, "a credential provider"),
            cache: Mutex::default(),
        };
        let list = settings.map(|settings| {
            settings.providers.iter().map(|provider| new_provider(&settings.bin_dir, provider)).collect()
        });
        Providers { list: list.unwrap_or_default() }
    }

    /// Credentials for `image` from every program that is responsible for it. Blocks while
    /// programs run, until `stop`, and for `limit` at most: then those that are known count.
    pub(super) fn for_image(
        &self,
        image: &str,
        limit: Option<Duration>,
        stop: &StopToken,
    ) -> Vec<Credential> {
        if self.list.is_empty() {
            return Vec::new();
        }
        let Some(image) = full_repository(image) else { return Vec::new() };
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let responsible = self.list.iter().filter(|provider| provider.matches(&image));
        responsible.flat_map(|provider| provider.credentials(&image, deadline, stop)).collect()
    }
}

impl Provider {
    fn matches(&self, image: &str) -> bool {
        let (host, path) = image.split_once('/').unwrap_or((image, ""));
        self.settings.match_images.iter().any(|pattern| {
            let pattern = pattern.split_once("://").map_or(pattern.as_str(), |(_, rest)| rest);
            key_matches(pattern, host, path)
        })
    }

    /// `deadline`: when the wait for other pods and for the program ends.
    fn credentials(&self, image: &str, deadline: Option<Instant>, stop: &StopToken) -> Vec<Credential> {
        // Pods of this node have no service accounts as long as there is no API server.
        if self
            .settings
            .token_attributes
            .as_ref()
            .is_some_and(|attributes| attributes.require_service_account == Some(true))
        {
            return Vec::new();
        }
        if let Some(found) = self.cached(image, Instant::now()) {
            return found;
        }
        let left = || deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let permit = self.permits.take(stop, left());
        if let Some(found) = self.cached(image, Instant::now()) {
            return found;
        }
        let limits = Limits { time: left().map_or(LIMITS.time, |left| left.min(LIMITS.time)), ..LIMITS };
        let result = match &permit {
            Ok(_) if !limits.time.is_zero() => self.run(image, limits, stop),
            _ => Err(ProviderError::NoTime),
        };
        match result {
            Ok(response) => self.store(image, response, Instant::now()),
            Err(error) => {
                if !stop.is_stopped() {
                    let name = &self.settings.name;
                    log::warn!("credential provider {name} has no answer for image {image}: {error}");
                }
                Vec::new()
            }
        }
    }

    fn cached(&self, image: &str, now: Instant) -> Option<Vec<Credential>> {
        let cache = self.cache.locked();
        let fresh = |key: &str| cache.get(key).filter(|cached| now < cached.until);
        let cached = fresh(image).or_else(|| fresh(registry(image))).or_else(|| fresh(GLOBAL_KEY))?;
        Some(lookup(&cached.credentials, image))
    }

    fn store(&self, image: &str, response: Response, now: Instant) -> Vec<Credential> {
        let credentials = match index(response.auth.unwrap_or_default()) {
            Ok(credentials) => credentials,
            Err(error) => {
                log::warn!("cannot use the answer of credential provider {}: {error}", self.settings.name);
                return Vec::new();
            }
        };
        let found = lookup(&credentials, image);
        let duration = response.cache_duration.or(self.settings.default_cache_duration).unwrap_or_default();
        let key = match response.cache_key_type.as_str() {
            "Registry" => registry(image),
            "Global" => GLOBAL_KEY,
            _ => image,
        };
        let mut cache = self.cache.locked();
        cache.retain(|_, cached| now < cached.until);
        if let Some(until) = now.checked_add(duration.to_std()).filter(|until| *until > now) {
            if cache.len() >= MAX_CACHED
                && let Some(first) = cache.iter().min_by_key(|(_, cached)| cached.until)
            {
                let first = first.0.clone();
                cache.remove(&first);
            }
            cache.insert(key.to_owned(), Cached { until, credentials });
        }
        found
    }

    fn run(&self, image: &str, limits: Limits, stop: &StopToken) -> Result<Response, ProviderError> {
        let api_version = self.settings.api_version.as_str();
        let request = Request { kind: "CredentialProviderRequest", api_version, image };
        // Three texts always serialize.
        let request = serde_json::to_vec(&request).unwrap_or_default();
        let mut command = Command::new(&self.program);
        command.args(self.settings.args.iter().flatten());
        command.envs(self.settings.env.iter().flatten().map(|variable| (&variable.name, &variable.value)));
        let output = child::run(&mut command, &request, limits, stop)?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let stderr = stderr.trim().chars().take(STDERR_SHOWN).flat_map(char::escape_debug).collect();
            return Err(ProviderError::Exit { status: output.status, stderr });
        }
        // The decoder's message may contain a part of the response, such as a password.
        let response: Response = typed::from_json(&output.stdout)
            .map_err(|error| ProviderError::Decode { line: error.line(), column: error.column() })?;
        if response.kind != "CredentialProviderResponse" {
            return Err(ProviderError::Kind { actual: response.kind });
        }
        if response.api_version != api_version {
            let expected = api_version.to_owned();
            return Err(ProviderError::ApiVersion { expected, actual: response.api_version });
        }
        if !["Image", "Registry", "Global"].contains(&response.cache_key_type.as_str()) {
            return Err(ProviderError::CacheKeyType(response.cache_key_type));
        }
        Ok(response)
    }
}

fn registry(image: &str) -> &str {
    image.split_once('/').map_or(image, |(registry, _)| registry)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::testing;

    /// A program that counts its calls and answers with `answer`.
    struct Fixture {
        dir: tempfile::TempDir,
        providers: Providers,
    }

    impl Fixture {
        fn new(match_images: &[&str], response: &str) -> Fixture {
            let dir = tempfile::tempdir().unwrap();
            let program = dir.path().join("p");
            let script = format!(
                "#!/bin/sh\ncat > {0}/request\necho \"$1 $A\" >> {0}/calls\ncat <<'END'\n{response}\nEND\n",
                dir.path().display()
            );
            testing::program(&program, &script);
            let provider = CredentialProvider {
                name: "p".into(),
                match_images: match_images.iter().map(|image| (*image).to_owned()).collect(),
                default_cache_duration: Some(GoDuration::from_secs(60)),
                api_version: "credentialprovider.kubelet.k8s.io/v1".into(),
                args: Some(vec!["get".into()]),
                env: Some(vec![crate::config::credential_providers::Variable {
                    name: "A".into(),
                    value: "b".into(),
                }]),
                token_attributes: None,
            };
            let settings = CredentialProviders { bin_dir: dir.path().to_owned(), providers: vec![provider] };
            Fixture { providers: Providers::new(Some(&settings)), dir }
        }

        fn users(&self, image: &str) -> Vec<String> {
            let found = self.providers.for_image(image, None, &StopToken::never());
            found.into_iter().map(|credential| credential.username).collect()
        }

        fn calls(&self) -> usize {
            let calls = std::fs::read_to_string(self.dir.path().join("calls")).unwrap_or_default();
            assert!(calls.lines().all(|line| line == "get b"), "{calls}");
            calls.lines().count()
        }
    }

    fn response(key_type: &str, more: &str) -> String {
        format!(
            r#"{{"kind": "CredentialProviderResponse", "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
                "cacheKeyType": "{key_type}"{more}, "auth": {{
                "r.example": {{"username": "u", "password": "p"}}, "*.r.example/x": {{"username": "v", "password": "q"}}}}}}"#
        )
    }

    #[test]
    fn program_runs_only_for_its_images_and_is_cached() {
        let fixture = Fixture::new(&["r.example", "*.r.example"], &response("Image", ""));
        assert_eq!(fixture.users("other.example/x"), Vec::<String>::new());
        assert_eq!(fixture.calls(), 0);
        assert_eq!(fixture.users("r.example/x:1"), ["u"]);
        assert_eq!(fixture.users("r.example/x:2"), ["u"]);
        assert_eq!(fixture.calls(), 1);
        assert_eq!(
            std::fs::read_to_string(fixture.dir.path().join("request")).unwrap(),
            r#"{"kind":"CredentialProviderRequest","apiVersion":"credentialprovider.kubelet.k8s.io/v1","image":"r.example/x"}"#
        );
        assert_eq!(fixture.users("a.r.example/x/y"), ["v"]);
        assert_eq!(fixture.calls(), 2);
    }

    #[test]
    fn responses_are_cached_by_key_type_and_duration() {
        let check = |key_type, more, calls| {
            let fixture = Fixture::new(&["r.example", "*.r.example"], &response(key_type, more));
            for image in ["r.example/x", "r.example/y", "r.example/x", "a.r.example/x"] {
                assert_eq!(fixture.users(image).len(), 1);
            }
            assert_eq!(fixture.calls(), calls, "{key_type} {more}");
        };
        check("Image", "", 3);
        check("Registry", "", 2);
        check("Global", "", 1);
        check("Global", r#", "cacheDuration": "0s""#, 4);
        check("Global", r#", "cacheDuration": "1h0m0s""#, 1);
    }

    #[test]
    fn invalid_response_gives_no_credentials() {
        for bad in [
            "",
            "{",
            r#"{"auth": "secret"}"#,
            &response("Image", "").replace("Response", "Request"),
            &response("Image", "").replace("io/v1", "io/v1beta1"),
            &response("Pod", ""),
        ] {
            let fixture = Fixture::new(&["r.example"], bad);
            assert_eq!(fixture.users("r.example/x"), Vec::<String>::new(), "{bad}");
            let provider = &fixture.providers.list[0];
            let error = provider.run("r.example/x", LIMITS, &StopToken::never()).err().unwrap().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        let mut fixture = Fixture::new(&["r.example"], &response("Image", ""));
        testing::program(&fixture.dir.path().join("p"), "#!/bin/sh\necho no token >&2\nexit 7\n");
        let error = fixture.providers.list[0].run("r.example/x", LIMITS, &StopToken::never()).err().unwrap();
        assert!(error.to_string().ends_with("7: no token"), "{error}");
        fixture.providers.list[0].program = "/no/such/program".into();
        assert_eq!(fixture.users("r.example/x"), Vec::<String>::new());
    }

    #[test]
    fn time_for_all_programs_is_limited_and_known_responses_are_used_after_it() {
        let fixture = Fixture::new(&["r.example"], &response("Image", ""));
        let within =
            |image: &str, limit| fixture.providers.for_image(image, Some(limit), &StopToken::never()).len();
        assert_eq!(within("r.example/x", Duration::from_secs(60)), 1);
        assert_eq!((within("r.example/x", Duration::ZERO), within("r.example/y", Duration::ZERO)), (1, 0));
        assert_eq!(fixture.calls(), 1);
        // The program runs for another pod, and does not end.
        let running = fixture.providers.list[0].permits.try_take();
        assert!(running.is_some());
        assert_eq!(within("r.example/y", Duration::from_millis(1)), 0);
        drop(running);
        assert_eq!(within("r.example/y", Duration::from_secs(60)), 1);
        // It hangs itself.
        testing::program(&fixture.dir.path().join("p"), "#!/bin/sh\nexec sleep 3600\n");
        let limits = Limits { time: Duration::from_millis(1), ..LIMITS };
        let error = fixture.providers.list[0].run("r.example/z", limits, &StopToken::never()).err().unwrap();
        assert!(matches!(error, ProviderError::Child(ChildError::Overdue { .. })), "{error}");
    }

    #[test]
    fn cached_responses_are_limited_and_the_one_that_ends_first_is_dropped() {
        let fixture = Fixture::new(&["r.example"], &response("Image", ""));
        let provider = &fixture.providers.list[0];
        let now = Instant::now();
        for n in 0..=MAX_CACHED as u64 {
            let cache_duration = serde_json::from_str(&format!("\"{}s\"", 1000 + n)).ok();
            let response = Response { cache_duration, cache_key_type: "Image".into(), ..Response::default() };
            provider.store(&format!("r.example/{n}"), response, now);
        }
        let known = |n: usize| provider.cached(&format!("r.example/{n}"), now).is_some();
        assert!(!known(0) && known(1) && known(MAX_CACHED));
    }

    #[test]
    fn short_names_get_default_registry_and_lose_their_tag() {
        let digest = format!("r.example:5000/a@sha256:{}", "0".repeat(64));
        for (image, expected) in [
            ("busybox", "docker.io/library/busybox"),
            ("docker.io/busybox", "docker.io/library/busybox"),
            ("team/app:1", "docker.io/team/app"),
            ("index.docker.io/a/b", "docker.io/a/b"),
            (&digest, "r.example:5000/a"),
        ] {
            assert_eq!(full_repository(image).as_deref(), Some(expected));
        }
    }
}
