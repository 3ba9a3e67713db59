//! `coracle join --write-bundle`: checks the options with the cluster, and writes them to a file for several
//! nodes. This machine does not join, and needs neither root nor a runtime.

use std::io::Read;
use std::path::Path;

use crate::cli::commands::console::Console;
use crate::cli::join_options::{JoinMethod, JoinOptions};
use crate::server::KUBERNETES_VERSION;

use super::bundle::JoinBundle;
use super::files::Paths;
use super::plane::{self, Credentials};
use super::refusal::{Reason, Refusal};
use super::{
    cluster_configuration, configuration, discover, own_configuration, preflight, progress, service, step,
    validated,
};

/// The name beside `packaging/install`.
const NAME: &str = "join.json";

/// Any socket: the configuration of a node has that of its own runtime.
const SOCKET: &str = "unix:///run/containerd/containerd.sock";

/// `input`: standard input, from which at most one token is read.
pub(super) fn run(
    console: &mut Console<'_>,
    options: &JoinOptions,
    target: &Path,
    input: &mut dyn Read,
) -> Result<(), Refusal> {
    let (cluster, credentials) = discover(console, options, None, input)?;
    // With the credentials: the API server refuses those that have expired.
    let version = step("discovery", plane::server_version(&cluster, &credentials))?;
    progress(console, format!("discovery: {} runs Kubernetes {version}", cluster.server));
    if let Some(warning) = step("preflight", preflight::check_version(&version, KUBERNETES_VERSION))? {
        progress(console, format!("warning: {warning}"));
    }
    if options.is_unverified {
        progress(console, "warning: the authority was not compared with a hash, and the nodes will trust it");
    }
    let is_kubeadm = matches!(options.method, JoinMethod::Token { .. });
    let shared = cluster_configuration(console, &cluster, &credentials, is_kubeadm)?;
    let config = match &options.config {
        Some(file) => Some(step("configuration", text_of(file))?),
        None => None,
    };
    step("configuration", check(options, shared.as_deref(), config.as_deref()))?;
    let needs_configuration = shared.is_some();
    let bundle = JoinBundle::new(&cluster, &credentials, options, config, needs_configuration);
    if options.dry_run {
        progress(console, format!("files: would write {} (mode 0600)", target.display()));
        return Ok(());
    }
    step("files", bundle.write(target))?;
    progress(console, format!("files: wrote {} (mode 0600)", target.display()));
    progress(
        console,
        format!("it has the credentials for the first certificate: {}", validity(&credentials)),
    );
    progress(
        console,
        format!(
            "on each node, put it as {NAME} beside install of an unpacked bundle, as root with mode 0600, and \
             run ./install; or run coracle join --from-bundle FILE there"
        ),
    );
    Ok(())
}

/// How long the credentials can be used. A bootstrap token may not read the Secret with its own expiration
/// (Go: plugin/pkg/auth/authorizer/rbac/bootstrappolicy).
fn validity(credentials: &Credentials) -> &'static str {
    match credentials {
        Credentials::Token(_) => {
            "the API server does not show when this token expires; one of kubeadm does 24 hours after it was \
             made, unless it was made with --ttl, and kubeadm token list shows the time"
        }
        Credentials::ClientCertificate { .. } => "a client certificate, which ends them",
    }
}

/// The content of the file of `--config`.
fn text_of(file: &Path) -> Result<String, Refusal> {
    String::from_utf8(own_configuration(file)?).map_err(|_| {
        let text = format!("{} is not text", file.display());
        Refusal::new(Reason::Configuration, text, "correct it, and run this again")
    })
}

/// Applies the rules of the agent to the configuration of the nodes, as they will.
fn check(options: &JoinOptions, shared: Option<&str>, config: Option<&str>) -> Result<(), Refusal> {
    let name = options.config.as_ref().map(|file| file.display().to_string()).unwrap_or_default();
    let own = config.map(|text| (name.as_str(), text.as_bytes()));
    let merged = configuration::merge(shared, own, &options.kubernetes_dir, None)?;
    let socket = options.cri_socket.as_deref().unwrap_or(SOCKET);
    let paths = Paths {
        kubernetes_dir: options.kubernetes_dir.clone(),
        root_dir: options.root_dir.clone(),
        units_dir: service::UNITS.into(),
    };
    validated(&paths, &configuration::config_file(merged, socket)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::super::bundle;
    use super::*;
    use crate::cli::table::Paint;
    use crate::transport::testing::{AUTHORITY, HttpsServer, json_response};
    use serde_json::{Value, json};

    const TOKEN: &str = "abcdef.0123456789abcdef";
    const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

    /// An API server without cluster-info. `version`: the status of its version.
    fn server(version: u16) -> HttpsServer {
        server_with(version, 200, json!({"kubelet": HEAD}))
    }

    /// `status`, `data`: of kube-system/kubelet-config.
    fn server_with(version: u16, status: u16, data: Value) -> HttpsServer {
        HttpsServer::start(move |_, head| {
            if head.starts_with("GET /version") {
                json_response(version, &json!({"gitVersion": KUBERNETES_VERSION}).to_string())
            } else if head.contains("kubelet-config") {
                json_response(status, &json!({"kind": "Status", "data": data}).to_string())
            } else {
                json_response(404, r#"{"kind": "Status", "message": "absent"}"#)
            }
        })
    }

    /// Runs the command with a kubeconfig of the server, and returns its output.
    fn written(server: &HttpsServer, directory: &Path, config: &str) -> (Result<(), Refusal>, String) {
        let file = directory.join("bootstrap.conf");
        let cluster = plane::Cluster {
            server: format!("https://{}", server.address()),
            authority: AUTHORITY.to_owned(),
        };
        let text = plane::bootstrap_kubeconfig(&cluster, &Credentials::Token(TOKEN.to_owned()));
        std::fs::write(&file, text).unwrap();
        let own = directory.join("own.yaml");
        std::fs::write(&own, config).unwrap();
        let options = JoinOptions {
            method: JoinMethod::BootstrapKubeconfig(file),
            config: Some(own),
            root_dir: "/var/lib/kubelet".into(),
            ..JoinOptions::default()
        };
        let mut out = Vec::new();
        let mut console = Console { out: &mut out, paint: Paint::new(false), now: jiff::Timestamp::now() };
        let target = directory.join("join.json");
        let result = run(&mut console, &options, &target, &mut std::io::empty());
        (result, String::from_utf8(out).unwrap())
    }

    #[test]
    fn file_has_what_the_cluster_has_accepted_and_the_output_has_no_token() {
        let dir = tempfile::tempdir().unwrap();
        let server = server(200);
        let (result, output) = written(&server, dir.path(), "maxPods: 5\n");
        assert_eq!(result, Ok(()), "{output}");
        let target = dir.path().join("join.json");
        let found = bundle::read(&target).unwrap();
        assert_eq!(found.config.as_deref(), Some("maxPods: 5\n"));
        assert!(found.needs_configuration);
        assert_eq!(found.cluster(&target).unwrap().1, Credentials::Token(TOKEN.to_owned()));
        assert!(output.contains("24 hours") && output.contains("join.json"), "{output}");
        assert!(!output.contains("0123456789"), "{output}");
    }

    #[test]
    fn nodes_do_without_a_configuration_only_if_the_cluster_has_none() {
        for (status, expected) in
            [(404, Ok(())), (403, Ok(())), (401, Err(28)), (200, Err(30)), (400, Err(30))]
        {
            let dir = tempfile::tempdir().unwrap();
            let (result, output) = written(&server_with(200, status, json!({})), dir.path(), "");
            assert_eq!(result.map_err(|refusal| refusal.code), expected, "{status}: {output}");
            assert_eq!(output.contains("only --config counts"), expected.is_ok(), "{status}: {output}");
            let written = bundle::read(&dir.path().join("join.json"));
            assert_eq!(written.map(|bundle| bundle.needs_configuration).ok(), expected.ok().map(|()| false));
        }
    }

    #[test]
    fn expired_token_and_invalid_configuration_leave_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let refusal = written(&server(401), dir.path(), "").0.unwrap_err();
        assert!(refusal.text.starts_with("discovery: ") && refusal.code == 28, "{refusal:?}");
        let refusal = written(&server(200), dir.path(), "maxPods: many\n").0.unwrap_err();
        assert!(
            refusal.text.starts_with("configuration: ") && refusal.text.contains("maxPods"),
            "{refusal:?}"
        );
        assert!(!dir.path().join("join.json").exists());
    }
}
