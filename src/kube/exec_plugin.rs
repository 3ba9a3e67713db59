//! Programs that print credentials (Go: client-go/plugin/pkg/client/auth/exec).

use std::fmt;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::ByteString;
use serde::Deserialize;
use serde_json::{Value, json};

use super::client::{CredentialError, CredentialSource, IssuedCredentials};
use super::relative_path::resolve;
use crate::model::kubeconfig::{Cluster, Exec};
use crate::model::typed;
use crate::transport::api::{Breaker, Identity};
use crate::util::child::{self, Limits};
use crate::util::lock::LockExt;
use crate::util::permits::{NoPermit, Permits};
use crate::util::secret::Secret;

const V1: &str = "client.authentication.k8s.io/v1";
const V1BETA1: &str = "client.authentication.k8s.io/v1beta1";
const V1ALPHA1: &str = "client.authentication.k8s.io/v1alpha1";
const LIMITS: Limits = Limits { time: Duration::from_secs(60), output_bytes: 1 << 20 };
/// The longest part of a failing program's output that is reported.
const STDERR_SHOWN: usize = 300;

/// One program, and its last output. At most one process of it runs at a time.
pub(super) struct ExecPlugin {
    exec: Exec,
    api_version: &'static str,
    /// The value of `KUBERNETES_EXEC_INFO`.
    info: String,
    last: Mutex<Option<Response>>,
    /// For one process at a time.
    permits: Permits,
}

#[derive(Clone)]
struct Response {
    issued: IssuedCredentials,
    expires: Option<Timestamp>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PluginOutput {
    #[serde(default)]
    kind: String,
    #[serde(default)]
    api_version: String,
    status: Option<Status>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    expiration_timestamp: Option<Timestamp>,
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
}

/// What is wrong with a program even if it is never run (Go: tools/clientcmd `validateAuthInfo`).
pub(super) fn check(exec: &Exec) -> Result<(), String> {
    let missing = |what: &str| Err(format!("{what} must be specified to use exec authentication plugin"));
    let api_version = exec.api_version.as_deref().unwrap_or_default();
    if exec.command.is_empty() {
        return missing("command");
    }
    if api_version.is_empty() {
        return missing("apiVersion");
    }
    if exec.env.iter().flatten().any(|variable| variable.name.is_empty()) {
        return missing("env variable name");
    }
    match exec.interactive_mode.as_deref().unwrap_or_default() {
        "Never" | "IfAvailable" | "Always" => Ok(()),
        // The older versions have a default.
        "" if [V1BETA1, V1ALPHA1].contains(&api_version) => Ok(()),
        "" => missing("interactiveMode"),
        other => Err(format!("invalid interactiveMode {other:?}")),
    }
}

impl fmt::Debug for ExecPlugin {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "ExecPlugin({})", self.exec.command)
    }
}

impl ExecPlugin {
    /// A program that has not run yet. A relative path starts at `directory`; a bare name is looked
    /// up in `PATH`.
    pub(super) fn new(
        exec: &Exec,
        directory: &Path,
        cluster: &Cluster,
        roots: Option<Vec<u8>>,
    ) -> Result<ExecPlugin, String> {
        let mut exec = exec.clone();
        check(&exec)?;
        if exec.command.contains('/') {
            exec.command = resolve(directory, &exec.command).display().to_string();
        }
        let api_version = match exec.api_version.as_deref().unwrap_or_default() {
            V1 => V1,
            V1BETA1 => V1BETA1,
            other => return Err(format!("exec plugin: invalid apiVersion {other:?}")),
        };
        if exec.interactive_mode.as_deref() == Some("Always") {
            return Err("exec plugin cannot support interactive mode: a node has no terminal".to_owned());
        }
        let mut spec = json!({"interactive": false});
        if exec.provide_cluster_info {
            let mut cluster_info = json!({"server": cluster.server});
            if let Some(map) = cluster_info.as_object_mut() {
                let name = cluster.tls_server_name.clone().filter(|name| !name.is_empty());
                map.extend(name.map(|name| ("tls-server-name".to_owned(), Value::String(name))));
                if cluster.insecure_skip_tls_verify == Some(true) {
                    map.insert("insecure-skip-tls-verify".to_owned(), Value::Bool(true));
                }
                let roots = roots.and_then(|pem| serde_json::to_value(ByteString(pem)).ok());
                map.extend(roots.map(|roots| ("certificate-authority-data".to_owned(), roots)));
                let proxy = cluster.proxy_url.clone().filter(|url| !url.is_empty());
                map.extend(proxy.map(|url| ("proxy-url".to_owned(), Value::String(url))));
            }
            if let Some(spec) = spec.as_object_mut() {
                spec.insert("cluster".to_owned(), cluster_info);
            }
        }
        let info = json!({"kind": "ExecCredential", "apiVersion": api_version, "spec": spec}).to_string();
        let permits = Permits::new(1, "a credential plugin");
        Ok(ExecPlugin { exec, api_version, info, last: Mutex::new(None), permits })
    }

    fn last(&self, now: Timestamp) -> Option<IssuedCredentials> {
        let last = self.last.locked();
        let fresh = last.as_ref().filter(|response| response.expires.is_none_or(|expires| now < expires));
        fresh.map(|response| response.issued.clone())
    }

    fn run(&self, breaker: &Breaker) -> Result<Response, String> {
        let mut command = Command::new(&self.exec.command);
        command.args(self.exec.args.iter().flatten());
        command.envs(self.exec.env.iter().flatten().map(|variable| (&variable.name, &variable.value)));
        command.env("KUBERNETES_EXEC_INFO", &self.info);
        let output = child::run(&mut command, &[], LIMITS, breaker.token()).map_err(|error| {
            let hint = self.exec.install_hint.as_deref().filter(|_| error.is_missing());
            format!(
                "getting credentials: exec: {error}{}",
                hint.map(|hint| format!("\n\n{hint}")).unwrap_or_default()
            )
        })?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let stderr: String =
                stderr.trim().chars().take(STDERR_SHOWN).flat_map(char::escape_debug).collect();
            let program = &self.exec.command;
            return Err(format!(
                "getting credentials: exec: executable {program} failed with {}: {stderr}",
                output.status
            ));
        }
        self.read(&output.stdout).map_err(|what| format!("getting credentials: {what}"))
    }

    fn read(&self, stdout: &[u8]) -> Result<Response, String> {
        // The decoder's message may quote the output, and with it a token.
        let printed: PluginOutput = typed::from_json(stdout).map_err(|error| {
            format!("decoding stdout: no ExecCredential (line {}, column {})", error.line(), error.column())
        })?;
        if printed.kind != "ExecCredential" {
            return Err(format!("exec plugin returned kind {:?} instead of ExecCredential", printed.kind));
        }
        if printed.api_version != self.api_version {
            return Err(format!(
                "exec plugin is configured to use API version {}, plugin returned version {}",
                self.api_version, printed.api_version
            ));
        }
        let status = printed.status.ok_or("exec plugin didn't return a status field")?;
        let set = |text: Option<String>| text.filter(|text| !text.is_empty());
        let token = set(status.token).map(Secret::new);
        let identity = match (set(status.client_certificate_data), set(status.client_key_data)) {
            (Some(certificate), Some(key)) => {
                Some(Identity { certificate: certificate.into_bytes().into(), key: key.into_bytes().into() })
            }
            (None, None) => None,
            _ => return Err("exec plugin returned only certificate or key, not both".to_owned()),
        };
        if token.is_none() && identity.is_none() {
            return Err("exec plugin didn't return a token or cert/key pair".to_owned());
        }
        Ok(Response { issued: IssuedCredentials { token, identity }, expires: status.expiration_timestamp })
    }
}

impl CredentialSource for ExecPlugin {
    fn current(&self, deadline: Instant, breaker: &Breaker) -> Result<IssuedCredentials, CredentialError> {
        if let Some(issued) = self.last(Timestamp::now()) {
            return Ok(issued);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let _permit = self.permits.take(breaker.token(), Some(left)).map_err(|reason| match reason {
            NoPermit::Stopped => "the agent is stopping".to_owned(),
            NoPermit::TimedOut => format!("{} did not exit in time", self.exec.command),
        })?;
        // A caller that waited uses the result of the other caller.
        if let Some(issued) = self.last(Timestamp::now()) {
            return Ok(issued);
        }
        let response = self.run(breaker)?;
        let issued = response.issued.clone();
        *self.last.locked() = Some(response);
        Ok(issued)
    }

    fn refused(&self, issued: &IssuedCredentials) -> bool {
        let mut last = self.last.locked();
        // Another thread may have run the plugin meanwhile.
        if last.as_ref().is_some_and(|response| response.issued == *issued) {
            *last = None;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::kubeconfig::ExecVariable;

    fn exec(command: &str) -> Exec {
        Exec {
            command: command.to_owned(),
            api_version: Some(V1.to_owned()),
            interactive_mode: Some("Never".to_owned()),
            provide_cluster_info: true,
            args: Some(vec!["an arg".to_owned()]),
            env: Some(vec![ExecVariable { name: "OWN".to_owned(), value: "mine".to_owned() }]),
            install_hint: Some("install it".to_owned()),
        }
    }

    /// A script that appends its input to `log` and then runs `body`.
    fn script(body: &str) -> (tempfile::TempDir, Exec) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("plugin");
        let log = dir.path().join("log");
        let text =
            format!("#!/bin/sh\necho \"$OWN $1 $KUBERNETES_EXEC_INFO\" >> {}\n{body}\n", log.display());
        crate::util::testing::program(&path, &text);
        let exec = exec("./plugin");
        (dir, exec)
    }

    fn plugin(dir: &Path, exec: &Exec) -> ExecPlugin {
        let cluster = Cluster {
            server: Some("https://h".to_owned()),
            proxy_url: Some("http://me:word@p".to_owned()),
            ..Cluster::default()
        };
        ExecPlugin::new(exec, dir, &cluster, Some(b"pem".to_vec())).unwrap()
    }

    fn current(plugin: &ExecPlugin) -> Result<IssuedCredentials, String> {
        let issued = plugin.current(Instant::now() + Duration::from_secs(30), &Breaker::default());
        issued.map_err(|error| error.to_string())
    }

    fn printed(status: &Value) -> String {
        let all = json!({"kind": "ExecCredential", "apiVersion": V1, "status": status});
        format!("cat <<'END'\n{all}\nEND")
    }

    #[test]
    fn output_is_used_until_it_expires_or_is_refused() {
        let (dir, exec) =
            script(&printed(&json!({"token": "sesame", "expirationTimestamp": "2999-01-01T00:00:00Z"})));
        let plugin = plugin(dir.path(), &exec);
        let runs = || std::fs::read_to_string(dir.path().join("log")).unwrap().lines().count();
        let first = current(&plugin).unwrap();
        assert_eq!(first.token.as_ref().unwrap().reveal(), "sesame");
        assert!(!format!("{first:?} {plugin:?}").contains("sesame"));
        current(&plugin).unwrap();
        assert_eq!(runs(), 1);
        assert!(plugin.refused(&first));
        current(&plugin).unwrap();
        assert_eq!(runs(), 2);
        let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
        let (before, info) = log.lines().next().unwrap().split_once('{').unwrap();
        assert_eq!(before, "mine an arg ");
        let info: Value = serde_json::from_str(&format!("{{{info}")).unwrap();
        let cluster = json!({"server": "https://h", "certificate-authority-data": "cGVt",
            "proxy-url": "http://me:word@p"});
        assert_eq!(info["spec"], json!({"interactive": false, "cluster": cluster}));
        assert_eq!(info["apiVersion"], V1);

        let (dir, exec) =
            script(&printed(&json!({"token": "old", "expirationTimestamp": "1999-01-01T00:00:00Z"})));
        let plugin = self::plugin(dir.path(), &exec);
        current(&plugin).unwrap();
        current(&plugin).unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("log")).unwrap().lines().count(), 2);
    }

    #[test]
    fn certificate_and_key_of_a_plugin_are_used() {
        let (dir, exec) = script(&printed(&json!({"clientCertificateData": "C", "clientKeyData": "K"})));
        let issued = current(&plugin(dir.path(), &exec)).unwrap();
        let expected = Identity { certificate: b"C".to_vec().into(), key: b"K".to_vec().into() };
        assert_eq!((issued.token, issued.identity), (None, Some(expected)));
    }

    #[test]
    fn output_with_null_and_repeated_fields_is_read_as_by_go() {
        let body = format!(
            "echo '{{\"kind\":null,\"kind\":\"ExecCredential\",\"apiVersion\":\"{V1}\",\"spec\":null,\
             \"status\":{{\"token\":\"a\",\"clientKeyData\":null,\"token\":\"b\"}}}}'"
        );
        let (dir, exec) = script(&body);
        assert_eq!(current(&plugin(dir.path(), &exec)).unwrap().token.unwrap().reveal(), "b");
    }

    #[test]
    fn invalid_output_is_reported() {
        let other = json!({"kind": "ExecCredential", "apiVersion": V1BETA1, "status": {"token": "sesame"}});
        for (body, expected) in [
            (printed(&json!({})), "exec plugin didn't return a token or cert/key pair"),
            (printed(&Value::Null), "exec plugin didn't return a status field"),
            (
                printed(&json!({"clientKeyData": "K"})),
                "exec plugin returned only certificate or key, not both",
            ),
            (printed(&json!({"token": ["sesame"]})), "decoding stdout: no ExecCredential (line 1, column"),
            (
                format!("echo '{other}'"),
                "exec plugin is configured to use API version client.authentication.k8s.io/v1, plugin returned",
            ),
            ("echo '{\"kind\":\"Pod\"}'".to_owned(), "exec plugin returned kind \"Pod\""),
            ("echo oops >&2; exit 3".to_owned(), "failed with exit status: 3: oops"),
        ] {
            let (dir, exec) = script(&body);
            let error = current(&plugin(dir.path(), &exec)).unwrap_err();
            assert!(error.contains(expected) && !error.contains("sesame"), "{error}");
        }
        let error = current(&plugin(Path::new("/"), &exec("no-such-program-at-all"))).unwrap_err();
        assert!(error.ends_with("install it"), "{error}");
    }

    #[test]
    fn a_program_that_hangs_ends_with_the_breaker() {
        let (dir, exec) = script("exec sleep 600");
        let plugin = plugin(dir.path(), &exec);
        let breaker = Breaker::default();
        breaker.trip();
        assert!(plugin.current(Instant::now() + Duration::from_secs(30), &breaker).is_err());
    }

    #[test]
    fn invalid_settings_are_reported() {
        let new = |exec: &Exec| ExecPlugin::new(exec, Path::new("/"), &Cluster::default(), None).map(drop);
        let base = exec("x");
        let with = |change: fn(&mut Exec)| {
            let mut exec = base.clone();
            change(&mut exec);
            new(&exec)
        };
        assert_eq!(new(&base), Ok(()));
        assert_eq!(with(|exec| exec.interactive_mode = Some("IfAvailable".to_owned())), Ok(()));
        for (outcome, expected) in [
            (with(|exec| exec.command.clear()), "command must be specified"),
            (with(|exec| exec.api_version = None), "apiVersion must be specified"),
            (with(|exec| exec.api_version = Some("v1alpha1".to_owned())), "invalid apiVersion"),
            (with(|exec| exec.interactive_mode = None), "interactiveMode must be specified"),
            (with(|exec| exec.interactive_mode = Some("Always".to_owned())), "no terminal"),
            (with(|exec| exec.env = Some(vec![ExecVariable::default()])), "env variable name"),
        ] {
            assert!(outcome.as_ref().is_err_and(|error| error.contains(expected)), "{outcome:?}");
        }
    }
}
