//! Why a machine cannot join, with what to do about it.

/// A refusal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are; server is https://HOST:PORT")]
pub enum JoinError {
    /// A value of the command line is invalid.
    #[error("{flag}: {reason}")]
    Argument { flag: &'static str, reason: String },
    /// A file with a cluster and its credentials is invalid.
    #[error("{path}: {reason}")]
    File { path: String, reason: String },
    /// There was no response.
    #[error("no response from {server}: {reason}")]
    Unreachable { server: String, reason: String },
    /// The server speaks no TLS, its certificate is not signed by the authority of the cluster, or it refuses
    /// our certificate.
    #[error("there is no trusted TLS connection to {server}: {reason}")]
    NotTrusted { server: String, reason: String },
    /// The server's certificate is outside of its time.
    #[error("the certificate of {server} is not valid at the time of this machine's clock, {now}: {reason}")]
    Clock { server: String, reason: String, now: String },
    /// The cluster has no signature by this token.
    #[error(
        "{server} does not know the token {id:?}: ConfigMap kube-public/cluster-info has no key jws-kubeconfig-{id}"
    )]
    UnknownToken { server: String, id: String },
    /// The signature was made with another secret, or for another text.
    #[error(
        "the signature of ConfigMap kube-public/cluster-info of {server} does not match the token {id:?}"
    )]
    Signature { server: String, id: String },
    /// No authority of the cluster has a pinned key. `found` are their hashes.
    #[error("the authority of {server} has another key than the pinned: {}", .found.join(", "))]
    WrongAuthority { server: String, found: Vec<String> },
    /// The cluster described itself in two ways.
    #[error(
        "ConfigMap kube-public/cluster-info of {server} was another one when it was read again over verified TLS"
    )]
    Changed { server: String },
    /// Status 401 or 403.
    #[error("{server} denies access to {object} (status {status}): {message}")]
    Denied { server: String, object: String, status: u16, message: String },
    /// The API server says that there is no such object.
    #[error("{server} has no {object}: {message}")]
    Missing { server: String, object: String, message: String },
    /// Another status than success.
    #[error("{server} refused the request for {object} (status {status}): {message}")]
    Refused { server: String, object: String, status: u16, message: String },
    /// The response is larger than `limit` bytes.
    #[error("the response of {server} for {object} is larger than {limit} bytes")]
    TooLarge { server: String, object: String, limit: u64 },
    /// The response is not what it should be.
    #[error("{object} of {server} cannot be used: {reason}")]
    Malformed { server: String, object: String, reason: String },
    /// The breaker was tripped.
    #[error("interrupted")]
    Interrupted,
}

impl JoinError {
    /// What to do about it: a sentence for the terminal.
    #[must_use]
    pub fn advice(&self) -> &'static str {
        match self {
            JoinError::Argument { .. } => {
                "Correct the value; `kubeadm token create --print-join-command` \
                 on the control plane prints a command with all values."
            }
            JoinError::File { .. } => {
                "Fetch the file again from the control plane, and check that it was \
                 copied completely."
            }
            JoinError::Unreachable { .. } => {
                "Check address and port, that the API server runs, and that no \
                 firewall or proxy is between: `curl -k https://HOST:PORT/version` must respond."
            }
            JoinError::NotTrusted { .. } => {
                "Check that address and port are those of this cluster's API \
                 server; another machine may respond there."
            }
            JoinError::Clock { .. } => {
                "Set the clock of this machine (`date`, or a time service), or the \
                 certificates of the control plane have expired: `kubeadm certs check-expiration`."
            }
            JoinError::UnknownToken { .. } => {
                "The token is mistyped, has expired (after 24 hours by \
                 default), or its Secret has no usage-bootstrap-signing: \
                 `kubeadm token create --print-join-command` on the control plane makes a new one."
            }
            JoinError::Signature { .. } => {
                "The part of the token after the point is mistyped, or another \
                 machine responds at this address; do not continue before you know which."
            }
            JoinError::WrongAuthority { .. } => {
                "Compare --discovery-token-ca-cert-hash with the command that \
                 the control plane prints. If it is right, another machine responds at this address."
            }
            JoinError::Changed { .. } => {
                "Run the command again. If the error repeats, several control planes \
                 with different data respond at this address, or another machine does."
            }
            JoinError::Denied { status: 401, .. } => {
                "The credentials are wrong or have expired, the Secret of \
                 the token has no usage-bootstrap-authentication, or the API server accepts no anonymous \
                 requests: then use --discovery-file with credentials."
            }
            JoinError::Denied { .. } => {
                "The control plane must permit this to the token's group; on clusters \
                 of kubeadm `kubeadm init phase bootstrap-token` and `kubeadm init phase upload-config \
                 kubelet` repair it."
            }
            JoinError::Missing { .. } => {
                "The cluster was not made by kubeadm, or is not complete yet: wait \
                 for the end of `kubeadm init`, or use --bootstrap-kubeconfig with a configuration of your own."
            }
            JoinError::Refused { .. } | JoinError::TooLarge { .. } | JoinError::Malformed { .. } => {
                "Check that address and port are those of an API server, and the log of the API server."
            }
            JoinError::Interrupted => "Run the command again.",
        }
    }

    /// The exit code of `coracle join`. The table:
    ///
    /// | Code | Meaning |
    /// |---|---|
    /// | 2 | a value of the command line is invalid |
    /// | 20 | a discovery file or a join token of k0s is invalid |
    /// | 21 | the API server is away |
    /// | 22 | the server is not that of this cluster (TLS) |
    /// | 23 | the server's certificate is not valid at this machine's time |
    /// | 24 | the token is unknown or has expired |
    /// | 25 | the signature does not match the token |
    /// | 26 | the authority has another key than the pinned |
    /// | 27 | cluster-info was another one when it was read again |
    /// | 28 | the API server denies access |
    /// | 29 | an object of the cluster is missing |
    /// | 30 | the response has an error status, is too large or malformed |
    /// | 31 | interrupted |
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            JoinError::Argument { .. } => 2,
            JoinError::File { .. } => 20,
            JoinError::Unreachable { .. } => 21,
            JoinError::NotTrusted { .. } => 22,
            JoinError::Clock { .. } => 23,
            JoinError::UnknownToken { .. } => 24,
            JoinError::Signature { .. } => 25,
            JoinError::WrongAuthority { .. } => 26,
            JoinError::Changed { .. } => 27,
            JoinError::Denied { .. } => 28,
            JoinError::Missing { .. } => 29,
            JoinError::Refused { .. } | JoinError::TooLarge { .. } | JoinError::Malformed { .. } => 30,
            JoinError::Interrupted => 31,
        }
    }

    /// Whether the same request may succeed later without any change by the user.
    pub(super) fn is_temporary(&self) -> bool {
        match self {
            JoinError::Unreachable { .. } => true,
            JoinError::Refused { status, .. } => matches!(*status, 408 | 429 | 500..=599),
            _ => false,
        }
    }

    /// Whether a control plane that is not complete yet responds like this: the roles that permit the
    /// request, or the object, are still missing.
    pub(super) fn may_be_incomplete(&self) -> bool {
        matches!(self, JoinError::Denied { status: 403, .. } | JoinError::Missing { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<JoinError> {
        let text = |text: &str| text.to_owned();
        let (server, object) = (text("https://h:1"), text("ConfigMap a/b"));
        vec![
            JoinError::Argument { flag: "--token", reason: text("r") },
            JoinError::File { path: text("/f"), reason: text("r") },
            JoinError::Unreachable { server: server.clone(), reason: text("r") },
            JoinError::NotTrusted { server: server.clone(), reason: text("r") },
            JoinError::Clock { server: server.clone(), reason: text("r"), now: text("n") },
            JoinError::UnknownToken { server: server.clone(), id: text("i") },
            JoinError::Signature { server: server.clone(), id: text("i") },
            JoinError::WrongAuthority { server: server.clone(), found: vec![text("sha256:00")] },
            JoinError::Changed { server: server.clone() },
            JoinError::Denied {
                server: server.clone(),
                object: object.clone(),
                status: 403,
                message: text("m"),
            },
            JoinError::Missing { server: server.clone(), object: object.clone(), message: text("m") },
            JoinError::Refused {
                server: server.clone(),
                object: object.clone(),
                status: 500,
                message: text("m"),
            },
            JoinError::TooLarge { server: server.clone(), object: object.clone(), limit: 5 },
            JoinError::Malformed { server, object, reason: text("r") },
            JoinError::Interrupted,
        ]
    }

    #[test]
    fn each_class_of_refusal_has_its_exit_code_and_advice() {
        let codes: Vec<u8> = all().iter().map(JoinError::exit_code).collect();
        assert_eq!(codes, [2, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 30, 30, 31]);
        assert!(all().iter().all(|error| error.advice().ends_with('.')));
    }

    #[test]
    fn refusals_of_a_server_name_the_server() {
        for error in all() {
            let is_local =
                matches!(error, JoinError::Argument { .. } | JoinError::File { .. } | JoinError::Interrupted);
            assert!(is_local || error.to_string().contains("https://h:1"), "{error}");
        }
    }

    #[test]
    fn wrong_proofs_are_not_temporary() {
        let temporary: Vec<u8> =
            all().iter().filter(|error| error.is_temporary()).map(JoinError::exit_code).collect();
        assert_eq!(temporary, [21, 30]);
        let incomplete: Vec<u8> =
            all().iter().filter(|error| error.may_be_incomplete()).map(JoinError::exit_code).collect();
        assert_eq!(incomplete, [28, 29]);
    }
}
