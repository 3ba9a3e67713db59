//! Reads a kubeconfig; room `kube` interprets it.

use std::path::Path;

use serde_json::Value;

use super::load::{Problem, read_file};
use super::yaml;
use crate::model::kubeconfig::Kubeconfig;
use crate::model::typed;

/// Reads the file. Unknown keys are ignored, as upstream does.
///
/// # Errors
/// When the file cannot be read or is not a kubeconfig.
pub fn load(file: &Path) -> Result<Kubeconfig, Problem> {
    let place = file.display().to_string();
    let bytes = read_file(file).map_err(|message| problem(&place, "", message))?;
    parse(&bytes, &place)
}

/// Reads the content of a kubeconfig, which is at `place`. Unknown keys are ignored, as upstream does.
///
/// # Errors
/// When it is not a kubeconfig. The message has no values of it, which may be secrets.
pub fn parse(bytes: &[u8], place: &str) -> Result<Kubeconfig, Problem> {
    // Only the first document is used. A file without documents is an empty configuration.
    let document = yaml::parse(bytes)
        .first()
        .map_err(|error| problem(&format!("{place}:{}", error.line), "", error.message))?;
    let value = document.map_or_else(|| serde_json::json!({}), |document| document.value);
    for (field, known) in [("kind", "Config"), ("apiVersion", "v1")] {
        match value.get(field) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text.is_empty() || text == known => {}
            Some(Value::String(text)) => {
                return Err(problem(place, field, format!("{text:?} is not {known:?}")));
            }
            Some(_) => return Err(problem(place, field, format!("is not the text {known:?}"))),
        }
    }
    // The decoder's message is dropped: it may contain a value, and values may be secrets.
    part(&value, "").map_err(|_| wrong_part(&value, place))
}

fn problem(place: &str, field: &str, message: String) -> Problem {
    Problem { place: place.to_owned(), field: field.to_owned(), message }
}

fn part<T: serde::de::DeserializeOwned>(value: &Value, pointer: &str) -> Result<T, ()> {
    let found = value.pointer(pointer).cloned().unwrap_or_default();
    // As in Go, null is an absent value, also in a list or where a field is required.
    typed::decode(&found).map_err(drop)
}

/// Finds the invalid field, so that the error names it without its value.
fn wrong_part(value: &Value, place: &str) -> Problem {
    let message = "is invalid (a value of the wrong type, or data that is not base64)".to_owned();
    let problem = |field: String| Problem { place: place.to_owned(), field, message: message.clone() };
    for (list, inner) in [("clusters", "cluster"), ("users", "user"), ("contexts", "context")] {
        let Some(items) = value.get(list).and_then(Value::as_array) else { continue };
        for (index, item) in items.iter().enumerate() {
            let Some(fields) = item.get(inner).and_then(Value::as_object) else { continue };
            for (field, value) in fields {
                let alone = serde_json::json!({ list: [{ inner: { field.as_str(): value } }] });
                if part::<Kubeconfig>(&alone, "").is_err() {
                    return problem(format!("{list}[{index}].{inner}.{field}"));
                }
            }
        }
    }
    let field = ["clusters", "users", "contexts", "current-context"].into_iter().find(|field| {
        let alone = serde_json::json!({ *field: value.get(*field) });
        part::<Kubeconfig>(&alone, "").is_err()
    });
    problem(field.unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Kubeconfig, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        load(file.path())
            .map_err(|problem| problem.to_string().replace(&file.path().display().to_string(), "F"))
    }

    #[test]
    fn kubeconfig_of_kubeadm_is_read() {
        let config = read(
            "apiVersion: v1\nclusters:\n- cluster:\n    certificate-authority-data: cGVt\n    \
             server: https://10.0.0.1:6443\n  name: kubernetes\ncontexts:\n- context:\n    cluster: kubernetes\n    \
             user: system:node:n1\n  name: system:node:n1@kubernetes\ncurrent-context: system:node:n1@kubernetes\n\
             kind: Config\npreferences: {}\nusers:\n- name: system:node:n1\n  user:\n    \
             client-certificate: /var/lib/kubelet/pki/kubelet-client-current.pem\n    \
             client-key: /var/lib/kubelet/pki/kubelet-client-current.pem\n",
        )
        .unwrap();
        assert_eq!(config.current_context.as_deref(), Some("system:node:n1@kubernetes"));
        let cluster = config.clusters.unwrap()[0].cluster.clone().unwrap();
        assert_eq!(cluster.certificate_authority_data.unwrap().0, b"pem");
        assert_eq!(config.contexts.unwrap()[0].context.clone().unwrap().user, "system:node:n1");
        let user = config.users.unwrap()[0].user.clone().unwrap();
        assert!(user.client_key.unwrap().ends_with("current.pem"));
    }

    #[test]
    fn data_in_several_lines_are_read_in_every_field() {
        let config = read(
            "clusters:\n- name: a\n  cluster:\n    certificate-authority-data: |\n      aGVs\n      bG8=\n\
             users:\n- name: b\n  user:\n    client-certificate-data: \"aGVs\\r\\nbG8=\\n\"\n    \
             client-key-data: |-\n      aGVs\n\n      bG8=\n---\n- [\n",
        )
        .unwrap();
        let user = config.users.unwrap()[0].user.clone().unwrap();
        let cluster = config.clusters.unwrap()[0].cluster.clone().unwrap();
        let data = [cluster.certificate_authority_data, user.client_certificate_data, user.client_key_data];
        assert!(data.iter().all(|data| data.as_ref().unwrap().0 == b"hello"));
        assert!(read("users:\n- user:\n    client-key-data: aGVs bG8=\n").is_err());
        let list = read("users:\n- user: {client-key-data: [104, ~, 255], client-certificate-data: []}\n");
        let user = list.unwrap().users.unwrap()[0].user.clone().unwrap();
        assert_eq!(user.client_key_data.unwrap().0, [104, 0, 255]);
        assert!(user.client_certificate_data.unwrap().0.is_empty());
        for wrong in ["[256]", "[-1]", "[a]", "[1.5]", "{}", "5"] {
            assert!(read(&format!("users:\n- user: {{client-key-data: {wrong}}}\n")).is_err(), "{wrong}");
        }
    }

    #[test]
    fn error_about_invalid_kubeconfig_has_no_secrets() {
        assert!(read("").unwrap().current_context.is_none());
        assert!(read("{\"clusters\": null, \"users\": []}").is_ok());
        let sparse = read(
            "clusters:\n- name:\n  cluster:\nusers:\n- name: a\n  user:\n    exec:\n      command: x\n      args: [~]\n      env: [{name: A, value: }]\n      provideClusterInfo:\ncontexts:\n- context: {cluster: , user: }\n",
        );
        assert_eq!(sparse.unwrap().clusters.unwrap()[0].name, "");
        for (text, expected) in [
            ("a: [", "F:1: "),
            ("kind: Pod", "F: kind: \"Pod\" is not \"Config\""),
            ("kind: [Config]", "F: kind: is not the text \"Config\""),
            ("apiVersion: 1", "F: apiVersion: is not the text \"v1\""),
            ("- a", "F: is invalid"),
            ("users: 7", "F: users: is invalid"),
            ("users:\n- name: a\n  user:\n    token: [sesame]", "F: users[0].user.token: is invalid"),
            ("users:\n- name: a\n  user:\n    password: *sesame", "F:4: "),
            ("users:\n- name: a\n  user:\n    token: !se!sesame x", "F:4: "),
            ("users:\n- name: a\n  user:\n    token: !!int sesame", "F:4: "),
            (
                "clusters:\n- {}\n- cluster:\n    certificate-authority-data: '!sesame'",
                "F: clusters[1].cluster.certificate-authority-data: is invalid",
            ),
        ] {
            let error = read(text).err().unwrap_or_default();
            assert!(error.starts_with(expected) && !error.contains("sesame"), "{text}: {error}");
        }
        assert!(
            load(Path::new("/no/such/file"))
                .is_err_and(|problem| problem.message.starts_with("cannot be read"))
        );
    }
}
