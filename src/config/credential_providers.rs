//! The configuration of image credential providers, `CredentialProviderConfig` (Go:
//! pkg/credentialprovider/plugin/config.go): one file, or all files of a directory.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::check::describe_value;
use super::duration::GoDuration;
use super::load::{Problem, read_file};
use super::yaml::{self, Document};
use crate::model::registry_url;

const GROUP: &str = "kubelet.config.k8s.io";
const KIND: &str = "CredentialProviderConfig";
/// Supported versions of the protocol of providers.
const PROTOCOLS: [&str; 3] = [
    "credentialprovider.kubelet.k8s.io/v1",
    "credentialprovider.kubelet.k8s.io/v1alpha1",
    "credentialprovider.kubelet.k8s.io/v1beta1",
];

/// A program that supplies credentials for registries.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CredentialProvider {
    /// The name of the program in the directory of programs.
    #[serde(default)]
    pub name: String,
    /// Images for which it is called; each part of a host may have wildcards.
    #[serde(default)]
    pub match_images: Vec<String>,
    /// The time for which a response without its own duration is valid.
    pub default_cache_duration: Option<GoDuration>,
    /// The protocol version that it uses.
    #[serde(default)]
    pub api_version: String,
    /// The arguments of the provider.
    #[serde(default)]
    pub args: Option<Vec<String>>,
    /// Additional environment variables.
    #[serde(default)]
    pub env: Option<Vec<Variable>>,
    /// Set if it needs a token of the pod's service account.
    pub token_attributes: Option<TokenAttributes>,
}

/// An environment variable.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variable {
    /// The name of the variable.
    pub name: String,
    /// The value of the variable.
    #[serde(default)]
    pub value: String,
}

/// The token that a provider needs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TokenAttributes {
    /// The audience of the token.
    #[serde(default)]
    pub service_account_token_audience: String,
    /// `Token` or `ServiceAccount`.
    #[serde(default)]
    pub cache_type: String,
    /// Whether the provider is skipped for pods without a service account.
    pub require_service_account: Option<bool>,
    /// Annotations that the service account must have.
    #[serde(default)]
    pub required_service_account_annotation_keys: Vec<String>,
    /// Annotations that are passed on if the account has them.
    #[serde(default)]
    pub optional_service_account_annotation_keys: Vec<String>,
}

/// The providers, and the directory of their programs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CredentialProviders {
    /// `--image-credential-provider-bin-dir`.
    pub bin_dir: PathBuf,
    /// In the order of the configuration.
    pub providers: Vec<CredentialProvider>,
}

/// Reads the configuration and checks that every program exists.
///
/// # Errors
/// All problems.
pub fn load(config: &Path, bin_dir: &Path) -> Result<CredentialProviders, Vec<Problem>> {
    let mut reader = Reader::default();
    for file in reader.files(config) {
        reader.read(&file);
    }
    if reader.problems.is_empty() && reader.providers.is_empty() {
        let place = config.display().to_string();
        reader.fail(place, "providers", "at least 1 item in plugins is required");
    }
    for (provider, place) in std::mem::take(&mut reader.providers) {
        if let Some(message) = missing_program(bin_dir, &provider.name) {
            reader.fail(place, "name", message);
        }
        reader.checked.push(provider);
    }
    if reader.problems.is_empty() {
        Ok(CredentialProviders { bin_dir: bin_dir.to_owned(), providers: reader.checked })
    } else {
        Err(reader.problems)
    }
}

fn missing_program(bin_dir: &Path, name: &str) -> Option<String> {
    use std::os::unix::fs::PermissionsExt;
    if name.is_empty() || name.contains('/') {
        // Reported already.
        return None;
    }
    let program = bin_dir.join(name);
    match std::fs::metadata(&program) {
        Ok(meta) if meta.is_file() && meta.permissions().mode() & 0o111 != 0 => None,
        Ok(_) => Some(format!("plugin binary executable {} is not an executable file", program.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Some(format!("plugin binary executable {} did not exist", program.display()))
        }
        Err(error) => Some(format!("error inspecting binary executable {}: {error}", program.display())),
    }
}

#[derive(Default)]
struct Reader {
    /// All providers, each with its file and path.
    providers: Vec<(CredentialProvider, String)>,
    checked: Vec<CredentialProvider>,
    problems: Vec<Problem>,
}

impl Reader {
    fn fail(&mut self, place: String, field: &str, message: impl Into<String>) {
        self.problems.push(Problem { place, field: field.to_owned(), message: message.into() });
    }

    fn files(&mut self, config: &Path) -> Vec<PathBuf> {
        if !config.is_dir() {
            return vec![config.to_owned()];
        }
        let place = config.display().to_string();
        let entries = std::fs::read_dir(config).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
        let entries = match entries {
            Ok(entries) => entries,
            Err(error) => {
                self.fail(place, "", format!("cannot be listed: {error}"));
                return Vec::new();
            }
        };
        let mut files: Vec<PathBuf> = entries
            .iter()
            .map(std::fs::DirEntry::path)
            .filter(|path| {
                let ending = path.extension().and_then(std::ffi::OsStr::to_str);
                matches!(ending, Some("json" | "yaml" | "yml")) && !path.is_dir()
            })
            .collect();
        files.sort();
        if files.is_empty() {
            self.fail(place, "", "no configuration files found in directory");
        }
        files
    }

    fn read(&mut self, file: &Path) {
        let place = file.display().to_string();
        let bytes = match read_file(file) {
            Ok(bytes) => bytes,
            Err(message) => return self.fail(place, "", message),
        };
        let mut documents = match yaml::parse_bytes(&bytes) {
            Ok(documents) => documents.into_iter(),
            Err(error) => return self.fail(format!("{place}:{}", error.line), "", error.message),
        };
        let (document, None) = (documents.next(), documents.next()) else {
            return self.fail(place, "", "holds more than one document");
        };
        let Some(document) = document else {
            return self.fail(place, "", format!("is empty; want kind: {KIND}"));
        };
        for duplicate in &document.duplicates {
            let line = duplicate.second;
            self.fail(format!("{place}:{line}"), &duplicate.key, format!("{duplicate}: remove one"));
        }
        self.take(&place, &document);
    }

    fn take(&mut self, file: &str, document: &Document) {
        let location = |path: &str| match document.line_of(path) {
            Some(line) => format!("{file}:{line}"),
            None => file.to_owned(),
        };
        let text = |field: &str| document.value.get(field).and_then(Value::as_str).unwrap_or_default();
        if text("kind") != KIND {
            let message = format!("failed to decode {:?} (wrong Kind)", text("kind"));
            return self.fail(location("kind"), "kind", message);
        }
        let versions = ["v1", "v1beta1", "v1alpha1"].map(|version| format!("{GROUP}/{version}"));
        if !versions.contains(&text("apiVersion").to_owned()) {
            let message = format!("want one of {}, not {:?}", versions.join(", "), text("apiVersion"));
            return self.fail(location("apiVersion"), "apiVersion", message);
        }
        for field in document.value.as_object().into_iter().flat_map(serde_json::Map::keys) {
            if !["kind", "apiVersion", "providers"].contains(&field.as_str()) {
                self.fail(location(field), field, "unknown field");
            }
        }
        let items = match document.value.get("providers") {
            None | Some(Value::Null) => return,
            Some(Value::Array(items)) => items,
            Some(other) => {
                let message = format!("must be a list, not {}", describe_value(other));
                return self.fail(location("providers"), "providers", message);
            }
        };
        for (index, item) in items.iter().enumerate() {
            let path = format!("providers[{index}]");
            match CredentialProvider::deserialize(item) {
                Ok(provider) => {
                    for (field, message) in self.check(&provider) {
                        let field = format!("{path}.{field}");
                        self.fail(location(&field), &field, message);
                    }
                    self.providers.push((provider, location(&path)));
                }
                Err(error) => self.fail(location(&path), &path, error.to_string()),
            }
        }
    }

    /// All faults of one provider.
    fn check(&self, provider: &CredentialProvider) -> Vec<(&'static str, String)> {
        let mut wrong: Vec<(&'static str, String)> = Vec::new();
        let name = provider.name.as_str();
        if name.is_empty() {
            wrong.push(("name", "must be set".to_owned()));
        }
        for (bad, what) in [
            (name.contains('/'), "provider name cannot contain '/'"),
            (name.contains(' '), "provider name cannot contain spaces"),
            (name == ".", "provider name cannot be '.'"),
            (name == "..", "provider name cannot be '..'"),
        ] {
            if bad {
                wrong.push(("name", format!("{name:?}: {what}")));
            }
        }
        if self.providers.iter().any(|(other, _)| other.name == name) {
            wrong.push(("name", format!("duplicate provider name {name:?} found in configuration file(s)")));
        }
        match provider.api_version.as_str() {
            "" => wrong.push(("apiVersion", "must be set".to_owned())),
            version if PROTOCOLS.contains(&version) => {}
            version => {
                let message = format!("{version:?} is not supported; want one of {}", PROTOCOLS.join(", "));
                wrong.push(("apiVersion", message));
            }
        }
        if provider.match_images.is_empty() {
            wrong.push(("matchImages", "at least 1 item in matchImages is required".to_owned()));
        }
        for image in provider.match_images.iter().filter(|image| registry_url::split(image).is_none()) {
            wrong.push(("matchImages", format!("{image:?}: match image is invalid")));
        }
        if provider.default_cache_duration.is_none() {
            wrong.push(("defaultCacheDuration", "must be set".to_owned()));
        }
        if provider.default_cache_duration.is_some_and(|duration| duration < GoDuration::ZERO) {
            wrong.push((
                "defaultCacheDuration",
                "defaultCacheDuration must be greater than or equal to 0".to_owned(),
            ));
        }
        if let Some(attributes) = &provider.token_attributes {
            token(attributes, &provider.api_version, &mut wrong);
        }
        wrong
    }
}

fn token(attributes: &TokenAttributes, api_version: &str, wrong: &mut Vec<(&'static str, String)>) {
    let mut check = |bad: bool, field: &'static str, message: &str| {
        if bad {
            wrong.push((field, message.to_owned()));
        }
    };
    check(
        attributes.service_account_token_audience.is_empty(),
        "tokenAttributes.serviceAccountTokenAudience",
        "must be set",
    );
    check(
        attributes.require_service_account.is_none(),
        "tokenAttributes.requireServiceAccount",
        "must be set",
    );
    check(
        api_version != "credentialprovider.kubelet.k8s.io/v1",
        "tokenAttributes",
        "tokenAttributes is only supported for credentialprovider.kubelet.k8s.io/v1 API version",
    );
    check(
        attributes.require_service_account == Some(false)
            && !attributes.required_service_account_annotation_keys.is_empty(),
        "tokenAttributes.requiredServiceAccountAnnotationKeys",
        "requireServiceAccount cannot be false when requiredServiceAccountAnnotationKeys is set",
    );
    check(
        !["Token", "ServiceAccount"].contains(&attributes.cache_type.as_str()),
        "tokenAttributes.cacheType",
        "want ServiceAccount or Token",
    );
    let optional = &attributes.optional_service_account_annotation_keys;
    check(
        attributes.required_service_account_annotation_keys.iter().any(|key| optional.contains(key)),
        "tokenAttributes",
        "annotation keys cannot be both required and optional",
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn bin_dir(names: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            std::fs::write(dir.path().join(name), "").unwrap();
            let mode = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(dir.path().join(name), mode).unwrap();
        }
        dir
    }

    fn text(provider: &str) -> String {
        format!(
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n{provider}"
        )
    }

    const GOOD: &str = "- name: one\n  matchImages: ['*.example', 'registry.example:5000/team']\n  \
        defaultCacheDuration: 10m\n  apiVersion: credentialprovider.kubelet.k8s.io/v1\n  args: [get]\n  \
        env: [{name: A, value: b}]\n";

    #[test]
    fn providers_are_read_from_a_file_or_a_directory() {
        let bin = bin_dir(&["one", "two"]);
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("b.yaml"), text(&GOOD.replace("one", "two"))).unwrap();
        std::fs::write(dir.path().join("a.yml"), text(GOOD)).unwrap();
        std::fs::write(dir.path().join("notes.txt"), "{").unwrap();
        let loaded = load(dir.path(), bin.path()).unwrap();
        let names: Vec<&str> = loaded.providers.iter().map(|provider| provider.name.as_str()).collect();
        assert_eq!(names, ["one", "two"]);
        let provider = load(&dir.path().join("a.yml"), bin.path()).unwrap().providers.remove(0);
        assert_eq!(provider.default_cache_duration.map(|duration| duration.to_std().as_secs()), Some(600));
        assert_eq!(provider.env.unwrap()[0].value, "b");
        std::fs::write(dir.path().join("c.json"), text(GOOD)).unwrap();
        let problems = load(dir.path(), bin.path()).unwrap_err();
        assert!(problems[0].message.contains("duplicate provider name \"one\""), "{problems:?}");
    }

    #[test]
    fn patterns_may_be_addresses_of_ipv6() {
        let bin = bin_dir(&["one"]);
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.yaml");
        for image in ["[::1]", "[::1]:5000/team", "[fd00::1]/team"] {
            std::fs::write(&file, text(&GOOD.replace("*.example", image))).unwrap();
            assert_eq!(load(&file, bin.path()).unwrap().providers[0].match_images[0], image);
        }
    }

    #[test]
    fn every_problem_has_its_place() {
        let bin = bin_dir(&["one"]);
        let check = |content: &str, place: &str, part: &str| {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("c.yaml");
            std::fs::write(&file, content).unwrap();
            let problems = load(&file, bin.path()).unwrap_err();
            let texts: Vec<String> = problems.iter().map(ToString::to_string).collect();
            assert!(
                texts.iter().any(|text| text.contains(place) && text.contains(part)),
                "{part}: {texts:?}"
            );
        };
        check("kind: X\n", "c.yaml:1: kind", "(wrong Kind)");
        check("", "c.yaml", "is empty");
        check(
            "kind: CredentialProviderConfig\napiVersion: v1\n",
            "c.yaml:2: apiVersion",
            "kubelet.config.k8s.io/v1",
        );
        check(&text(" []\n"), "c.yaml: providers", "at least 1 item");
        check(&text("- nome: x\n"), "c.yaml:4: providers[0]", "unknown field `nome`");
        check(&text(&GOOD.replace("one", "a/b")), "name", "cannot contain '/'");
        check(&text(&GOOD.replace("one", "..")), "name", "cannot be '..'");
        check(&text(&GOOD.replace("one", "gone")), "c.yaml:4", "gone did not exist");
        check(&text(&GOOD.replace("k8s.io/v1", "k8s.io/v9")), "apiVersion", "is not supported");
        check(&text(&GOOD.replace("10m", "-10m")), "defaultCacheDuration", "greater than or equal to 0");
        check(&text(&GOOD.replace("*.example", "a b")), "c.yaml:5", "match image is invalid");
        check(
            &text(&GOOD.replace("*.example", "[::1]:x")),
            "c.yaml:5",
            "\"[::1]:x\": match image is invalid",
        );
        let token = "  tokenAttributes: {cacheType: X, requireServiceAccount: false,\n    \
            requiredServiceAccountAnnotationKeys: [a]}\n";
        check(&text(&format!("{GOOD}{token}")), "cacheType", "ServiceAccount or Token");
        check(&text(&format!("{GOOD}{token}")), "requiredServiceAccountAnnotationKeys", "cannot be false");
        let problems = load(Path::new("/no/such/file"), bin.path()).unwrap_err();
        assert!(problems[0].to_string().starts_with("/no/such/file: cannot be read"));
    }
}
