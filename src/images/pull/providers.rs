//! Registry credentials from programs (Go: pkg/credentialprovider/plugin). A program receives the
//! name of an image, and if its configuration says so a token of the pod's service account, and returns
//! credentials by pattern; if it fails, the pull continues without these credentials.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::config::GoDuration;
use crate::config::credential_providers::{CredentialProvider, CredentialProviders};
use crate::kube::PodDependencies;
use crate::kube::error::ApiError;
use crate::kube::tokens::{Token, TokenError};
use crate::model::pod::Pod;
use crate::util::child::{self, ChildError, Limits};
use crate::util::stop::StopToken;

use super::credentials::{Credential, Entry, Index, full_repository, index, key_matches, lookup};
use super::records::PullAccount;
use crate::model::typed;
use crate::util::lock::LockExt;
use crate::util::permits::Permits;
use crate::util::sha256;

/// The limits of one program; its time is that of upstream.
const LIMITS: Limits = Limits { time: Duration::from_secs(60), output_bytes: 1 << 20 };
/// The bytes of a failing program's output that are logged.
const STDERR_SHOWN: usize = 200;
const GLOBAL_KEY: &str = "global";
/// The most responses of a program that are kept: users of pods choose the names of images.
const MAX_CACHED: usize = 1000;
/// A response that may be used for all pods with the same token only.
const TOKEN_CACHE: &str = "Token";

/// A pod with a service account.
#[derive(Clone, Copy)]
pub(super) struct PodAccount<'a> {
    pod: &'a Pod,
    /// `None`: the node has no API server.
    api: Option<&'a PodDependencies>,
}

impl<'a> PodAccount<'a> {
    /// `None`: the pod has no service account, such as a static pod.
    pub(super) fn new(pod: &'a Pod, api: Option<&'a PodDependencies>) -> Option<PodAccount<'a>> {
        let name = pod.spec().service_account_name.as_deref().unwrap_or_default();
        (!name.is_empty()).then_some(PodAccount { pod, api })
    }
}

/// What a program receives of a service account.
struct Identity {
    account: Arc<PullAccount>,
    annotations: BTreeMap<String, String>,
    token: Arc<Token>,
    /// The start of the keys of its responses in the cache.
    key: String,
}

/// How a program is run for a pod.
enum Caller {
    /// The program supplies no credentials for this pod.
    Excluded,
    /// It receives only the name of the image.
    Anonymous,
    /// It receives a token, too.
    Identified(Identity),
}

pub(super) struct Providers {
    list: Vec<Provider>,
}

struct Provider {
    settings: CredentialProvider,
    program: PathBuf,
    /// One process at a time for an account, by the start of its keys in the cache: callers that waited find
    /// the response there.
    permits: Mutex<HashMap<String, Arc<Permits>>>,
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
    #[error("failed to get service account: {0}")]
    Account(ApiError),
    #[error("failed to get service account token: {0}")]
    Token(TokenError),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Request<'a> {
    kind: &'static str,
    api_version: &'a str,
    image: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_account_token: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_account_annotations: Option<&'a BTreeMap<String, String>>,
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
            permits: Mutex::default(),
            cache: Mutex::default(),
        };
        let list = settings.map(|settings| {
            settings.providers.iter().map(|provider| new_provider(&settings.bin_dir, provider)).collect()
        });
        Providers { list: list.unwrap_or_default() }
    }

    /// Credentials for `image` from every program that is responsible for it. Blocks while
    /// programs run, until `stop`, and for `limit` at most: then those that are known count.
    /// `account`: the pod that needs the image, if it has a service account.
    pub(super) fn for_image(
        &self,
        image: &str,
        account: Option<PodAccount<'_>>,
        limit: Option<Duration>,
        stop: &StopToken,
    ) -> Vec<Credential> {
        if self.list.is_empty() {
            return Vec::new();
        }
        let Some(image) = full_repository(image) else { return Vec::new() };
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let responsible = self.list.iter().filter(|provider| provider.matches(&image));
        responsible.flat_map(|provider| provider.credentials(&image, account, deadline, stop)).collect()
    }

    /// The account of the pod, if a program has a credential for `image` with its token. Programs that receive
    /// no token do not run. Blocks as [`Providers::for_image`].
    pub(super) fn account_for_image(
        &self,
        image: &str,
        account: Option<PodAccount<'_>>,
        stop: &StopToken,
    ) -> Option<PullAccount> {
        let account = Some(account?);
        let image = full_repository(image)?;
        let receives_token = |provider: &&Provider| provider.settings.token_attributes.is_some();
        let mut responsible =
            self.list.iter().filter(receives_token).filter(|provider| provider.matches(&image));
        responsible.find_map(|provider| {
            let found = provider.credentials(&image, account, None, stop);
            found.into_iter().find_map(|credential| credential.account.as_deref().cloned())
        })
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
    fn credentials(
        &self,
        image: &str,
        account: Option<PodAccount<'_>>,
        deadline: Option<Instant>,
        stop: &StopToken,
    ) -> Vec<Credential> {
        let identity = match self.caller(account, stop) {
            Ok(Caller::Excluded) => return Vec::new(),
            Ok(Caller::Anonymous) => None,
            Ok(Caller::Identified(identity)) => Some(identity),
            Err(error) => {
                self.log_failure(image, &error, stop);
                return Vec::new();
            }
        };
        let found = self.credentials_for(image, identity.as_ref(), deadline, stop);
        let Some(Identity { account, .. }) = identity else { return found };
        let of_account =
            |credential: Credential| Credential { account: Some(Arc::clone(&account)), ..credential };
        found.into_iter().map(of_account).collect()
    }

    /// How the program is run for a pod. Reads the service account and requests a token, which is cached.
    fn caller(&self, account: Option<PodAccount<'_>>, stop: &StopToken) -> Result<Caller, ProviderError> {
        let Some(attributes) = &self.settings.token_attributes else { return Ok(Caller::Anonymous) };
        let Some(PodAccount { pod, api }) = account else {
            let is_required = attributes.require_service_account == Some(true);
            return Ok(if is_required { Caller::Excluded } else { Caller::Anonymous });
        };
        let api = api.filter(|api| !api.is_without_server());
        let Some(api) = api else { return Err(ProviderError::Account(ApiError::no_server())) };
        let found = api.registry_tokens.account(pod).map_err(ProviderError::Account)?;
        let known = found.annotations.unwrap_or_default();
        let mut annotations = BTreeMap::new();
        for name in &attributes.required_service_account_annotation_keys {
            // The owner of the account decides with it whether the program is used.
            let Some(value) = known.get(name) else { return Ok(Caller::Excluded) };
            annotations.insert(name.clone(), value.clone());
        }
        for name in &attributes.optional_service_account_annotation_keys {
            if let Some(value) = known.get(name) {
                annotations.insert(name.clone(), value.clone());
            }
        }
        let audience = &attributes.service_account_token_audience;
        let token = api
            .registry_tokens
            .get_for_account(pod, audience, &found.uid, stop)
            .map_err(ProviderError::Token)?;
        let account = PullAccount {
            uid: found.uid,
            namespace: pod.namespace().to_owned(),
            name: pod.spec().service_account_name.clone().unwrap_or_default(),
        };
        let hash =
            (attributes.cache_type == TOKEN_CACHE).then(|| sha256::sha256_hex(token.expose().as_bytes()));
        // Annotations may be long, and keys have the length of a hash. No name of an image has a space.
        let key = serde_json::json!([account, annotations, hash]).to_string();
        let key = format!("{} ", sha256::sha256_hex(key.as_bytes()));
        Ok(Caller::Identified(Identity { account: Arc::new(account), annotations, token, key }))
    }

    fn log_failure(&self, image: &str, error: &ProviderError, stop: &StopToken) {
        if !stop.is_stopped() {
            let name = &self.settings.name;
            log::warn!("credential provider {name} has no answer for image {image}: {error}");
        }
    }

    fn credentials_for(
        &self,
        image: &str,
        identity: Option<&Identity>,
        deadline: Option<Instant>,
        stop: &StopToken,
    ) -> Vec<Credential> {
        if let Some(found) = self.cached(image, identity, Instant::now()) {
            return found;
        }
        let left = || deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let permits = self.permits(identity);
        let permit = permits.take(stop, left());
        if let Some(found) = self.cached(image, identity, Instant::now()) {
            return found;
        }
        let limits = Limits { time: left().map_or(LIMITS.time, |left| left.min(LIMITS.time)), ..LIMITS };
        let result = match &permit {
            Ok(_) if !limits.time.is_zero() => self.run(image, identity, limits, stop),
            _ => Err(ProviderError::NoTime),
        };
        match result {
            Ok(response) => self.store(image, identity, response, Instant::now()),
            Err(error) => {
                self.log_failure(image, &error, stop);
                Vec::new()
            }
        }
    }

    /// Other accounts do not wait: with an annotation, an account may decide how long the program needs.
    fn permits(&self, identity: Option<&Identity>) -> Arc<Permits> {
        let mut permits = self.permits.locked();
        // Those that no thread uses.
        permits.retain(|_, used| Arc::strong_count(used) > 1);
        let new_permits = || Arc::new(Permits::new(1, "a credential provider"));
        Arc::clone(permits.entry(cache_key(identity, "")).or_insert_with(new_permits))
    }

    fn cached(&self, image: &str, identity: Option<&Identity>, now: Instant) -> Option<Vec<Credential>> {
        let cache = self.cache.locked();
        let fresh = |key: &str| cache.get(&cache_key(identity, key)).filter(|cached| now < cached.until);
        let cached = fresh(image).or_else(|| fresh(registry(image))).or_else(|| fresh(GLOBAL_KEY))?;
        Some(lookup(&cached.credentials, image))
    }

    fn store(
        &self,
        image: &str,
        identity: Option<&Identity>,
        response: Response,
        now: Instant,
    ) -> Vec<Credential> {
        let credentials = match index(response.auth.unwrap_or_default()) {
            Ok(credentials) => credentials,
            Err(error) => {
                log::warn!("cannot use the answer of credential provider {}: {error}", self.settings.name);
                return Vec::new();
            }
        };
        let is_token = |password: &str| identity.is_some_and(|identity| password == identity.token.expose());
        let attributes = self.settings.token_attributes.as_ref();
        if attributes.is_some_and(|attributes| attributes.cache_type != TOKEN_CACHE)
            && credentials.values().flatten().any(|credential| is_token(&credential.password))
        {
            log::warn!(
                "cannot use the answer of credential provider {}: it returned the service account token as \
                 the password, which needs the cacheType \"{TOKEN_CACHE}\"",
                self.settings.name
            );
            return Vec::new();
        }
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
            cache.insert(cache_key(identity, key), Cached { until, credentials });
        }
        found
    }

    fn run(
        &self,
        image: &str,
        identity: Option<&Identity>,
        limits: Limits,
        stop: &StopToken,
    ) -> Result<Response, ProviderError> {
        let api_version = self.settings.api_version.as_str();
        let annotations = identity.map(|identity| &identity.annotations);
        let request = Request {
            kind: "CredentialProviderRequest",
            api_version,
            image,
            service_account_token: identity.map(|identity| identity.token.expose()),
            service_account_annotations: annotations.filter(|annotations| !annotations.is_empty()),
        };
        // Texts and a map of texts always serialize.
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

/// The key of a response: those for a service account count only for it.
fn cache_key(identity: Option<&Identity>, key: &str) -> String {
    let account = identity.map_or("", |identity| identity.key.as_str());
    format!("{account}{key}")
}

fn registry(image: &str) -> &str {
    image.split_once('/').map_or(image, |(registry, _)| registry)
}

#[cfg(test)]
mod tests {
    use super::super::records::Proof;
    use super::*;
    use crate::config::credential_providers::TokenAttributes;
    use crate::kube::objects::Objects;
    use crate::kube::tokens::{IssuedToken, ServiceAccount, TokenApi, Tokens};
    use crate::util::testing;
    use serde_json::{Value, json};

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
            let found = self.providers.for_image(image, None, None, &StopToken::never());
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
            let result = provider.run("r.example/x", None, LIMITS, &StopToken::never());
            let error = result.err().unwrap().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        let mut fixture = Fixture::new(&["r.example"], &response("Image", ""));
        testing::program(&fixture.dir.path().join("p"), "#!/bin/sh\necho no token >&2\nexit 7\n");
        let result = fixture.providers.list[0].run("r.example/x", None, LIMITS, &StopToken::never());
        let error = result.err().unwrap();
        assert!(error.to_string().ends_with("7: no token"), "{error}");
        fixture.providers.list[0].program = "/no/such/program".into();
        assert_eq!(fixture.users("r.example/x"), Vec::<String>::new());
    }

    #[test]
    fn time_for_all_programs_is_limited_and_known_responses_are_used_after_it() {
        let fixture = Fixture::new(&["r.example"], &response("Image", ""));
        let within = |image: &str, limit| {
            fixture.providers.for_image(image, None, Some(limit), &StopToken::never()).len()
        };
        assert_eq!(within("r.example/x", Duration::from_secs(60)), 1);
        assert_eq!((within("r.example/x", Duration::ZERO), within("r.example/y", Duration::ZERO)), (1, 0));
        assert_eq!(fixture.calls(), 1);
        // The program runs for another pod, and does not end.
        let permits = fixture.providers.list[0].permits(None);
        let running = permits.try_take();
        assert!(running.is_some());
        assert_eq!(within("r.example/y", Duration::from_millis(1)), 0);
        drop(running);
        assert_eq!(within("r.example/y", Duration::from_secs(60)), 1);
        // It hangs itself.
        testing::program(&fixture.dir.path().join("p"), "#!/bin/sh\nexec sleep 3600\n");
        let limits = Limits { time: Duration::from_millis(1), ..LIMITS };
        let result = fixture.providers.list[0].run("r.example/z", None, limits, &StopToken::never());
        let error = result.err().unwrap();
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
            provider.store(&format!("r.example/{n}"), None, response, now);
        }
        let known = |n: usize| provider.cached(&format!("r.example/{n}"), None, now).is_some();
        assert!(!known(0) && known(1) && known(MAX_CACHED));
    }

    /// An API server with the accounts `sa` and `sb`, whose tokens are `token of sa` and `token of sb`.
    struct Accounts;

    impl TokenApi for Accounts {
        fn create(
            &self,
            _: &str,
            account: &str,
            body: &Value,
            _: &StopToken,
        ) -> Result<IssuedToken, ApiError> {
            assert_eq!(body["spec"]["audiences"], json!(["registry"]));
            assert_eq!(body["metadata"]["uid"], format!("uid of {account}"));
            let status = json!({
                "token": format!("token of {account}"),
                "expirationTimestamp": "2999-01-01T00:00:00Z",
            });
            Ok(serde_json::from_value(json!({"status": status})).unwrap())
        }

        fn account(&self, _: &str, name: &str) -> Result<ServiceAccount, ApiError> {
            if !["sa", "sb"].contains(&name) {
                return Err(ApiError::for_test(404, "NotFound", "no such account"));
            }
            let annotations = BTreeMap::from([("team".to_owned(), "a".to_owned())]);
            Ok(ServiceAccount { uid: format!("uid of {name}"), annotations: Some(annotations) })
        }
    }

    /// Calls `run` with a pod of this service account.
    fn with_account<T>(account: &str, run: impl FnOnce(Option<PodAccount<'_>>) -> T) -> T {
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": account},
            "spec": {"containers": [], "serviceAccountName": account}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap());
        let api = PodDependencies {
            registry_tokens: Tokens::new(Box::new(Accounts)),
            ..PodDependencies::for_tests(Objects::fixed(Vec::new()))
        };
        run(PodAccount::new(&pod, Some(&api)))
    }

    /// The credentials for `r.example/x` of a pod with this service account.
    fn credentials_of(fixture: &Fixture, account: &str) -> Vec<Credential> {
        let limit = Some(Duration::from_secs(60));
        with_account(account, |account| {
            fixture.providers.for_image("r.example/x:1", account, limit, &StopToken::never())
        })
    }

    fn with_tokens(response: &str, attributes: TokenAttributes) -> Fixture {
        let mut fixture = Fixture::new(&["r.example"], response);
        let attributes = TokenAttributes { service_account_token_audience: "registry".into(), ..attributes };
        fixture.providers.list[0].settings.token_attributes = Some(attributes);
        fixture
    }

    #[test]
    fn program_receives_the_token_and_the_annotations_of_the_service_account() {
        let attributes = |required: &[&str]| TokenAttributes {
            cache_type: "ServiceAccount".into(),
            require_service_account: Some(true),
            required_service_account_annotation_keys: required.iter().map(|key| (*key).to_owned()).collect(),
            optional_service_account_annotation_keys: vec!["none".into()],
            ..TokenAttributes::default()
        };
        let fixture = with_tokens(&response("Global", ""), attributes(&["team"]));
        // A pod without an account, and one whose account does not exist.
        for account in ["", "sc"] {
            assert!(credentials_of(&fixture, account).is_empty(), "{account}");
        }
        assert_eq!(fixture.calls(), 0);
        let found = credentials_of(&fixture, "sa");
        assert_eq!(found[0].username, "u");
        let account = PullAccount { uid: "uid of sa".into(), namespace: "n".into(), name: "sa".into() };
        assert_eq!(found[0].proof(), Some(Proof::Account(account)));
        assert_eq!(
            std::fs::read_to_string(fixture.dir.path().join("request")).unwrap(),
            r#"{"kind":"CredentialProviderRequest","apiVersion":"credentialprovider.kubelet.k8s.io/v1","image":"r.example/x","serviceAccountToken":"token of sa","serviceAccountAnnotations":{"team":"a"}}"#
        );
        // The response counts for this account only.
        assert_eq!((credentials_of(&fixture, "sa").len(), fixture.calls()), (1, 1));
        assert_eq!((credentials_of(&fixture, "sb").len(), fixture.calls()), (1, 2));
        let cache = fixture.providers.list[0].cache.locked();
        assert!(cache.len() == 2 && cache.keys().all(|key| !key.contains("team")), "annotations may be long");
        drop(cache);
        // The account does not have the annotation with which its owner chooses the program.
        let fixture = with_tokens(&response("Global", ""), attributes(&["missing"]));
        assert_eq!((credentials_of(&fixture, "sa").len(), fixture.calls()), (0, 0));
        // A program that needs no account runs without one for other pods.
        let optional = TokenAttributes { require_service_account: Some(false), ..attributes(&[]) };
        let fixture = with_tokens(&response("Global", ""), optional);
        assert_eq!(credentials_of(&fixture, "")[0].proof(), None);
        let request = std::fs::read_to_string(fixture.dir.path().join("request")).unwrap();
        assert!(!request.contains("serviceAccount"), "{request}");
    }

    #[test]
    fn program_that_runs_for_an_account_delays_only_pods_of_this_account() {
        let attributes = TokenAttributes {
            cache_type: "ServiceAccount".into(),
            require_service_account: Some(true),
            ..TokenAttributes::default()
        };
        let fixture = with_tokens(&response("Image", ""), attributes);
        let provider = &fixture.providers.list[0];
        // The program runs for a pod of the account `sa`, and does not end.
        let permits = with_account("sa", |account| match provider.caller(account, &StopToken::never()) {
            Ok(Caller::Identified(identity)) => provider.permits(Some(&identity)),
            _ => panic!("the account is not found"),
        });
        let running = permits.try_take();
        assert!(running.is_some());
        assert_eq!((credentials_of(&fixture, "sb").len(), fixture.calls()), (1, 1));
        let wait = Some(Duration::from_millis(1));
        let found = with_account("sa", |account| {
            fixture.providers.for_image("r.example/x:1", account, wait, &StopToken::never())
        });
        assert!(found.is_empty());
        assert_eq!(provider.permits.locked().len(), 1, "those of the other account are not in use");
        drop(running);
        assert_eq!((credentials_of(&fixture, "sa").len(), fixture.calls()), (1, 2));
    }

    #[test]
    fn program_without_a_token_does_not_run_to_find_the_account_of_an_image() {
        let account_of = |fixture: &Fixture, account: &str| {
            with_account(account, |account| {
                fixture.providers.account_for_image("r.example/x:1", account, &StopToken::never())
            })
        };
        let fixture = Fixture::new(&["r.example"], &response("Image", ""));
        assert_eq!((account_of(&fixture, "sa"), fixture.calls()), (None, 0));
        let attributes = TokenAttributes {
            cache_type: "ServiceAccount".into(),
            require_service_account: Some(false),
            ..TokenAttributes::default()
        };
        let fixture = with_tokens(&response("Image", ""), attributes);
        assert_eq!((account_of(&fixture, ""), fixture.calls()), (None, 0));
        let found = account_of(&fixture, "sa").map(|account| account.uid);
        assert_eq!((found.as_deref(), fixture.calls()), (Some("uid of sa"), 1));
    }

    #[test]
    fn token_is_a_password_only_if_responses_count_for_one_token() {
        let response = response("Global", "").replace("\"p\"", "\"token of sa\"");
        for (cache_type, count) in [("ServiceAccount", 0), ("Token", 1)] {
            let attributes = TokenAttributes {
                cache_type: cache_type.into(),
                require_service_account: Some(true),
                ..TokenAttributes::default()
            };
            let fixture = with_tokens(&response, attributes);
            assert_eq!(credentials_of(&fixture, "sa").len(), count, "{cache_type}");
        }
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
