//! The options of `coracle join` and `coracle leave`.
//!
//! Go: cmd/kubeadm/app/cmd/options, join.go (`addJoinConfigFlags`).

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::parse::{node_ips, node_labels};
use crate::config::GoDuration;
use crate::model::names::is_dns_subdomain;

/// kubeadm waits as long for the certificate of a node.
const TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// The directory of the agent without `--root-dir`.
const ROOT_DIR: &str = "/var/lib/kubelet";

/// The directory of kubeadm.
pub(super) const KUBERNETES_DIR: &str = "/etc/kubernetes";

/// What `coracle join` does.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct JoinOptions {
    pub method: JoinMethod,
    /// `--token`, and `--tls-bootstrap-token`.
    pub token: Option<TokenSource>,
    pub tls_token: Option<TokenSource>,
    /// `--discovery-token-ca-cert-hash`, each as it was given.
    pub pins: Vec<String>,
    pub is_unverified: bool,
    /// Empty: the name of the machine.
    pub node_name: String,
    pub node_ips: Vec<IpAddr>,
    pub node_labels: Vec<(String, String)>,
    /// With `unix://`; `None`: the socket that exists.
    pub cri_socket: Option<String>,
    /// The node's own configuration, over the cluster's.
    pub config: Option<PathBuf>,
    pub root_dir: PathBuf,
    pub kubernetes_dir: PathBuf,
    /// Names of checks whose failure does not matter, in lower case; `all` is each of them.
    pub ignored: Vec<String>,
    pub timeout: Duration,
    /// Whether `timeout` is that of the command, and not the default.
    pub has_timeout: bool,
    pub no_start: bool,
    pub dry_run: bool,
    /// Nothing joins: what a node needs is written to this file.
    pub write_bundle: Option<PathBuf>,
}

impl Default for JoinOptions {
    fn default() -> JoinOptions {
        JoinOptions {
            method: JoinMethod::Token { address: String::new() },
            token: None,
            tls_token: None,
            pins: Vec::new(),
            is_unverified: false,
            node_name: String::new(),
            node_ips: Vec::new(),
            node_labels: Vec::new(),
            cri_socket: None,
            config: None,
            root_dir: PathBuf::new(),
            kubernetes_dir: PathBuf::from(KUBERNETES_DIR),
            ignored: Vec::new(),
            timeout: TIMEOUT,
            has_timeout: false,
            no_start: false,
            dry_run: false,
            write_bundle: None,
        }
    }
}

/// How the address and the authority of the cluster are found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum JoinMethod {
    /// From the object cluster-info, which the token signs.
    Token {
        /// `HOST:PORT`; empty until the arguments are complete.
        address: String,
    },
    /// From a kubeconfig, which may have no user.
    DiscoveryFile(PathBuf),
    /// From a kubeconfig with the user of the first certificate.
    BootstrapKubeconfig(PathBuf),
    /// From a token of k0s; `-` is standard input.
    K0sToken(PathBuf),
    /// From a file of `--write-bundle`, which has options of the node, too.
    Bundle(PathBuf),
}

/// Where a token comes from. A command line is visible to other users of the machine.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum TokenSource {
    Text(String),
    File(PathBuf),
    StandardInput,
}

impl std::fmt::Debug for TokenSource {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TokenSource::Text(_) => out.write_str("Text(hidden)"),
            TokenSource::File(file) => write!(out, "File({file:?})"),
            TokenSource::StandardInput => out.write_str("StandardInput"),
        }
    }
}

/// What `coracle leave` does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LeaveOptions {
    pub root_dir: PathBuf,
    pub kubernetes_dir: PathBuf,
    /// The credentials with which pods are evicted; `None`: they stay.
    pub drain: Option<PathBuf>,
    /// The longest wait for the end of the pods.
    pub timeout: Duration,
    pub dry_run: bool,
}

impl JoinOptions {
    /// Sets an option that has a value.
    ///
    /// # Errors
    /// The text says what is wrong with the value.
    pub(super) fn set(&mut self, option: &str, text: &str) -> Result<(), String> {
        match option {
            "token" if text == "-" => self.token = Some(TokenSource::StandardInput),
            "token" => self.token = Some(TokenSource::Text(text.to_owned())),
            "token-file" if text == "-" => self.token = Some(TokenSource::StandardInput),
            "token-file" => self.token = Some(TokenSource::File(PathBuf::from(text))),
            "discovery-token-ca-cert-hash" => {
                self.pins.extend(text.split(',').map(|pin| pin.trim().to_owned()));
            }
            "tls-bootstrap-token" => self.tls_token = Some(TokenSource::Text(text.to_owned())),
            "discovery-file" if text.contains("://") => {
                return Err(format!("{text:?} is a URL: download the file, and name it here"));
            }
            "discovery-file" => self.set_method(JoinMethod::DiscoveryFile(PathBuf::from(text)))?,
            "bootstrap-kubeconfig" => {
                self.set_method(JoinMethod::BootstrapKubeconfig(PathBuf::from(text)))?;
            }
            "k0s-token" => self.set_method(JoinMethod::K0sToken(PathBuf::from(text)))?,
            "from-bundle" => self.set_method(JoinMethod::Bundle(PathBuf::from(text)))?,
            // The token must not come into the output of the command.
            "write-bundle" if matches!(text, "" | "-") => return Err("name a file".to_owned()),
            "write-bundle" => self.write_bundle = Some(PathBuf::from(text)),
            "node-name" => {
                let name = text.trim().to_lowercase();
                if !is_dns_subdomain(&name) {
                    return Err(format!("{text:?} is not a node name: want a lower-case DNS name"));
                }
                self.node_name = name;
            }
            "node-ip" => self.node_ips = node_ips(text)?,
            "node-labels" => self.node_labels.extend(node_labels(text)?),
            "cri-socket" => self.cri_socket = Some(socket_url(text)?),
            "kubernetes-dir" => self.kubernetes_dir = PathBuf::from(text),
            "ignore-preflight-errors" => {
                let names = text.split(',').map(|name| name.trim().to_lowercase());
                self.ignored.extend(names.filter(|name| !name.is_empty()));
            }
            "timeout" => {
                let timeout = GoDuration::parse(text).map_err(|error| error.to_string())?;
                if timeout <= GoDuration::ZERO {
                    return Err(format!("{timeout} must be greater than zero"));
                }
                self.timeout = timeout.to_std();
                self.has_timeout = true;
            }
            _ => return Err("unknown option".to_owned()),
        }
        Ok(())
    }

    fn set_method(&mut self, method: JoinMethod) -> Result<(), String> {
        if !matches!(self.method, JoinMethod::Token { .. }) {
            return Err("give only one of --discovery-file, --bootstrap-kubeconfig, --k0s-token and \
                        --from-bundle"
                .to_owned());
        }
        self.method = method;
        Ok(())
    }

    /// Adds the argument, and checks which options belong together.
    ///
    /// # Errors
    /// The text says what is missing or too much.
    pub(super) fn complete(mut self, argument: Option<String>) -> Result<JoinOptions, String> {
        check_directories(&self.root_dir, &self.kubernetes_dir)?;
        self.check_write_bundle()?;
        let has_trust = self.is_unverified || !self.pins.is_empty();
        let has_token = self.token.is_some() || self.tls_token.is_some();
        match &self.method {
            JoinMethod::Token { .. } => {
                let address =
                    argument.ok_or("name the API server as HOST:PORT, or a file with --discovery-file")?;
                if self.token.is_none() {
                    return Err("--token: give the token that kubeadm token create prints".to_owned());
                }
                if !has_trust {
                    return Err("--discovery-token-ca-cert-hash: give the hash that kubeadm token create \
                                --print-join-command prints; without it, any server could take the node"
                        .to_owned());
                }
                if self.is_unverified && !self.pins.is_empty() {
                    return Err("--discovery-token-unsafe-skip-ca-verification cannot be used with \
                                --discovery-token-ca-cert-hash"
                        .to_owned());
                }
                self.method = JoinMethod::Token { address };
                return Ok(self);
            }
            JoinMethod::BootstrapKubeconfig(_) | JoinMethod::K0sToken(_) | JoinMethod::Bundle(_)
                if has_token =>
            {
                return Err("--token is not for this file, which has its own credentials".to_owned());
            }
            _ => {}
        }
        match argument {
            Some(argument) => Err(format!("unexpected argument {argument:?}: the file has the address")),
            None if has_trust => {
                Err("--discovery-token-ca-cert-hash is for a token: the file has the authority".to_owned())
            }
            None => Ok(self),
        }
    }

    /// Several nodes use the file of `--write-bundle`.
    fn check_write_bundle(&self) -> Result<(), String> {
        if self.write_bundle.is_none() {
            return Ok(());
        }
        for (option, is_given) in [
            ("--from-bundle", matches!(self.method, JoinMethod::Bundle(_))),
            ("--node-name", !self.node_name.is_empty()),
            ("--node-ip", !self.node_ips.is_empty()),
            ("--no-start", self.no_start),
            ("--root-dir", self.root_dir != Path::new(ROOT_DIR)),
            ("--kubernetes-dir", self.kubernetes_dir != Path::new(KUBERNETES_DIR)),
        ] {
            if is_given {
                return Err(format!(
                    "{option} is for one node, and cannot be used with --write-bundle: give it to coracle \
                     join --from-bundle on the node"
                ));
            }
        }
        Ok(())
    }

    /// The options that `leave` shares.
    ///
    /// # Errors
    /// When a directory is not usable, or of `--drain` and `--kubeconfig` one is missing.
    pub(super) fn into_leave(self, drain: bool, kubeconfig: Option<PathBuf>) -> Result<LeaveOptions, String> {
        check_directories(&self.root_dir, &self.kubernetes_dir)?;
        if drain && kubeconfig.is_none() {
            return Err(
                "--drain needs --kubeconfig FILE: the credentials of a node may not evict pods".to_owned()
            );
        }
        if !drain && kubeconfig.is_some() {
            return Err("--kubeconfig is for --drain".to_owned());
        }
        let JoinOptions { root_dir, kubernetes_dir, timeout, dry_run, .. } = self;
        Ok(LeaveOptions { root_dir, kubernetes_dir, drain: kubeconfig, timeout, dry_run })
    }
}

/// The paths come into a unit of systemd, where blanks and signs have a meaning.
fn check_directories(root_dir: &Path, kubernetes_dir: &Path) -> Result<(), String> {
    for (option, directory) in [("--root-dir", root_dir), ("--kubernetes-dir", kubernetes_dir)] {
        let text = directory.to_str().unwrap_or_default();
        let plain = text.chars().all(|letter| letter.is_ascii_alphanumeric() || "/._-".contains(letter));
        let has_parent = directory.components().any(|part| part.as_os_str() == "..");
        if !text.starts_with('/') || !plain || has_parent {
            return Err(format!(
                "{option}: {:?} must be an absolute path of letters, digits and /._-",
                directory.display().to_string()
            ));
        }
    }
    Ok(())
}

/// A path without a scheme is a socket (Go: kubeadm, `--cri-socket`).
fn socket_url(text: &str) -> Result<String, String> {
    let url = if text.starts_with('/') { format!("unix://{text}") } else { text.to_owned() };
    let path = url.strip_prefix("unix://").unwrap_or_default();
    if path.starts_with('/') && !path.chars().any(|letter| letter.is_control() || letter == ' ') {
        Ok(url)
    } else {
        Err(format!("{text:?} is not an absolute path or unix:///PATH"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(words: &[(&str, &str)]) -> JoinOptions {
        let mut options = JoinOptions { root_dir: "/var/lib/kubelet".into(), ..JoinOptions::default() };
        for (option, text) in words {
            options.set(option, text).unwrap();
        }
        options
    }

    #[test]
    fn token_needs_an_address_and_a_pin_or_the_explicit_renunciation() {
        let address = || Some("host:6443".to_owned());
        let token = ("token", "abcdef.0123456789abcdef");
        let pin = ("discovery-token-ca-cert-hash", "sha256:aa, sha256:bb");
        let complete = options(&[token, pin]).complete(address()).unwrap();
        assert_eq!(complete.method, JoinMethod::Token { address: "host:6443".into() });
        assert_eq!(complete.pins, ["sha256:aa", "sha256:bb"]);
        let refused = |options: JoinOptions, argument| options.complete(argument).unwrap_err();
        assert!(refused(options(&[token, pin]), None).starts_with("name the API server"));
        assert!(refused(options(&[pin]), address()).starts_with("--token"));
        assert!(refused(options(&[token]), address()).starts_with("--discovery-token-ca-cert-hash"));
        let unverified = JoinOptions { is_unverified: true, ..options(&[token]) };
        assert!(unverified.clone().complete(address()).is_ok());
        let both = JoinOptions { is_unverified: true, ..options(&[token, pin]) };
        assert!(refused(both, address()).contains("cannot be used with"));
    }

    #[test]
    fn files_exclude_each_other_and_an_address() {
        for option in ["discovery-file", "bootstrap-kubeconfig", "k0s-token", "from-bundle"] {
            let only = options(&[(option, "/f")]);
            assert!(only.clone().complete(None).is_ok(), "{option}");
            assert!(only.clone().complete(Some("host:1".into())).is_err(), "{option}");
            assert!(only.clone().set("k0s-token", "/g").is_err(), "{option}");
            let with_token = options(&[(option, "/f"), ("tls-bootstrap-token", "a.b")]).complete(None);
            assert_eq!(with_token.is_ok(), option == "discovery-file", "{option}");
        }
    }

    #[test]
    fn options_of_one_node_are_refused_for_a_file_for_several() {
        let token = [("token", "a.b"), ("discovery-token-ca-cert-hash", "sha256:aa")];
        let written = |more: &[(&str, &str)]| {
            let words = [&token[..], &[("write-bundle", "/b")][..], more].concat();
            options(&words).complete(Some("host:1".into()))
        };
        let shared = [
            ("node-labels", "a=b"),
            ("cri-socket", "/s"),
            ("timeout", "1m"),
            ("ignore-preflight-errors", "x"),
        ];
        assert_eq!(written(&shared).unwrap().write_bundle, Some("/b".into()));
        for (option, text) in [("node-name", "n"), ("node-ip", "192.0.2.1"), ("kubernetes-dir", "/k")] {
            let error = written(&[(option, text)]).unwrap_err();
            assert!(error.starts_with(&format!("--{option} is for one node")), "{error}");
        }
        let from = options(&[("write-bundle", "/b")]);
        for (option, other) in [
            ("--no-start", JoinOptions { no_start: true, ..from.clone() }),
            ("--root-dir", JoinOptions { root_dir: "/r".into(), ..from.clone() }),
            ("--from-bundle", JoinOptions { method: JoinMethod::Bundle("/a".into()), ..from.clone() }),
        ] {
            assert!(other.complete(None).unwrap_err().starts_with(option), "{option}");
        }
        assert!(from.clone().set("write-bundle", "-").is_err());
    }

    #[test]
    fn values_are_checked_and_secrets_are_not_shown() {
        let mut join =
            options(&[("cri-socket", "/run/a.sock"), ("node-name", "Node-1"), ("token", "s3cret")]);
        assert_eq!(
            (join.cri_socket.as_deref(), join.node_name.as_str()),
            (Some("unix:///run/a.sock"), "node-1")
        );
        assert!(!format!("{:?}", join.token).contains("s3cret"));
        for (option, text) in [
            ("cri-socket", "tcp://1.2.3.4"),
            ("cri-socket", "unix://relative"),
            ("discovery-file", "https://host/discovery.conf"),
            ("node-name", "a_b"),
            ("node-ip", "x"),
            ("node-labels", "node-role.kubernetes.io/x=y"),
            ("timeout", "0s"),
            ("unknown", "x"),
        ] {
            assert!(join.set(option, text).is_err(), "{option} {text}");
        }
        for directory in ["relative", "/with blank", "/a/../b", "/a%h"] {
            let leave =
                JoinOptions { kubernetes_dir: directory.into(), ..options(&[]) }.into_leave(false, None);
            assert!(leave.is_err(), "{directory}");
        }
        let leave = |drain, kubeconfig| options(&[]).into_leave(drain, kubeconfig);
        assert!(leave(true, None).unwrap_err().contains("--kubeconfig FILE"));
        assert!(leave(false, Some("/k".into())).unwrap_err().contains("for --drain"));
        assert_eq!(leave(true, Some("/k".into())).unwrap().drain, Some("/k".into()));
    }

    #[test]
    fn dash_is_standard_input() {
        for option in ["token", "token-file"] {
            assert_eq!(options(&[(option, "-")]).token, Some(TokenSource::StandardInput));
        }
        assert_eq!(options(&[("token-file", "/t")]).token, Some(TokenSource::File("/t".into())));
    }
}
