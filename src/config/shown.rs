//! The configuration for other readers: secrets in it are masked.

use serde_json::Value;

use super::defaults::set;
use super::kubelet::KubeletConfiguration;
use super::load::{API_VERSION, KIND};

/// Replaces a secret.
pub const MASK: &str = "<masked>";

/// The whole configuration as v1beta1 JSON.
// DIFFERS: the Go kubelet shows the headers and the password of the static pod URL.
#[must_use]
pub fn configz(config: &KubeletConfiguration) -> Value {
    let mut shown = config.clone();
    for values in shown.static_pod_url_header.values_mut() {
        values.iter_mut().for_each(|value| MASK.clone_into(value));
    }
    shown.static_pod_url = without_password(&shown.static_pod_url);
    let mut value = crate::util::json::to_value(&shown).unwrap_or(Value::Null);
    set(&mut value, "apiVersion", Value::from(API_VERSION));
    set(&mut value, "kind", Value::from(KIND));
    value
}

/// A text that may be a URL, without the part before the host's `@`.
#[must_use]
pub fn without_password(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    match authority.rsplit_once('@') {
        Some((_, host)) => format!("{scheme}://{MASK}@{host}{path}"),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DefaultSet;
    use crate::config::effects::default_configuration;

    #[test]
    fn secrets_are_masked() {
        let mut config = default_configuration(DefaultSet::WithFile);
        config.static_pod_url = "https://me:secret@host:1/pods?x=a@b".to_owned();
        config.static_pod_url_header.insert("Authorization".into(), vec!["secret".into(), "other".into()]);
        let shown = configz(&config);
        assert_eq!(shown["kind"], "KubeletConfiguration");
        assert_eq!(shown["apiVersion"], "kubelet.config.k8s.io/v1beta1");
        assert_eq!(shown["maxPods"], 110);
        assert_eq!(shown["syncFrequency"], "1m0s");
        assert_eq!(shown["staticPodURL"], "https://<masked>@host:1/pods?x=a@b");
        assert_eq!(shown["staticPodURLHeader"]["Authorization"], serde_json::json!([MASK, MASK]));
        assert!(!shown.to_string().contains("secret"));
    }

    #[test]
    fn only_credentials_of_urls_are_masked() {
        for text in ["", "a@b", "https://host/a@b", "unix:///run/x@y", "/var/lib"] {
            assert_eq!(without_password(text), text);
        }
        assert_eq!(without_password("http://token@host"), "http://<masked>@host");
    }
}
