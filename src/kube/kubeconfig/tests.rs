use super::*;
use serde_json::{Value, json};

fn config(cluster: Value, user: Value) -> Kubeconfig {
    serde_json::from_value(json!({
        "kind": "Config", "apiVersion": "v1", "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "x"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "preferences": {}
    }))
    .unwrap()
}

fn base64(text: &str) -> Value {
    serde_json::to_value(k8s_openapi::ByteString(text.as_bytes().to_vec())).unwrap()
}

fn read_at(directory: &Path, cluster: Value, user: Value) -> Result<Credentials, KubeconfigError> {
    credentials_in(&config(cluster, user), &directory.join("kubelet.conf"), &Environment::default())
}

#[test]
fn credentials_are_read_from_data_fields() {
    let cluster = json!({"server": "https://10.0.0.1:6443/", "certificate-authority-data": base64("pem"),
        "tls-server-name": "kubernetes"});
    let user = json!({"client-certificate-data": base64("cert"), "client-key-data": base64("key"), "token": "sesame"});
    let credentials = read_at(Path::new("/nowhere"), cluster, user).unwrap();
    let endpoint = &credentials.endpoint;
    assert!(endpoint.https && endpoint.host == "10.0.0.1" && endpoint.port == 6443);
    assert_eq!(endpoint.roots, Roots::Pem(b"pem".to_vec()));
    assert_eq!(endpoint.server_name.as_deref(), Some("kubernetes"));
    let identity = Identity { certificate: b"cert".to_vec().into(), key: b"key".to_vec().into() };
    assert_eq!(endpoint.identity, Some(identity));
    assert_eq!(credentials.base_path, "");
    let source = credentials.token.clone().unwrap();
    let issued = source.current(Instant::now(), &Breaker::default()).unwrap();
    assert_eq!(issued.token.as_ref().unwrap().reveal(), "sesame");
    assert!(issued.identity.is_none() && !source.refused(&issued));
    assert!(!format!("{credentials:?}").contains("sesame"));
}

#[test]
fn parent_of_a_link_is_the_directory_of_the_link() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("other/deep")).unwrap();
    std::os::unix::fs::symlink("other/deep", dir.path().join("link")).unwrap();
    std::fs::write(dir.path().join("ca.crt"), "beside").unwrap();
    std::fs::write(dir.path().join("other/ca.crt"), "another").unwrap();
    let cluster = json!({"server": "https://h", "certificate-authority": "link/../ca.crt"});
    let user = json!({"tokenFile": "link/../ca.crt"});
    let credentials = read_at(dir.path(), cluster, user).unwrap();
    assert_eq!(credentials.endpoint.roots, Roots::Pem(b"beside".to_vec()));
    let issued = credentials.token.unwrap().current(Instant::now(), &Breaker::default()).unwrap();
    assert_eq!(issued.token.unwrap().reveal(), "beside");
}

#[test]
fn relative_files_are_read_from_the_kubeconfigs_directory() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    for (name, text) in [("ca.crt", "pem"), ("k.pem", "both"), ("token", " one\n")] {
        write(name, text);
    }
    let cluster = json!({"server": "https://h", "certificate-authority": "ca.crt"});
    let user =
        json!({"client-certificate": "k.pem", "client-key": "./k.pem", "tokenFile": "token", "token": "x"});
    let credentials = read_at(dir.path(), cluster, user).unwrap();
    assert_eq!(credentials.endpoint.roots, Roots::Pem(b"pem".to_vec()));
    assert_eq!(credentials.endpoint.port, 443);
    assert_eq!(credentials.endpoint.identity.clone().unwrap().certificate.reveal(), b"both");
    let source = credentials.token.unwrap();
    let current = || source.current(Instant::now(), &Breaker::default()).unwrap();
    let first = current();
    assert_eq!(first.token.as_ref().unwrap().reveal(), "one");
    write("token", "two");
    assert_eq!(current(), first, "not before its time");
    assert!(source.refused(&first), "or before the server refuses it");
    assert_eq!(current().token.unwrap().reveal(), "two");
    assert!(!source.refused(&current()), "the file has no other");
}

#[test]
fn without_tls_no_credentials_are_sent() {
    let user = json!({"client-certificate-data": base64("cert"), "client-key-data": base64("key"), "token": "sesame",
        "tokenFile": "/no/such/file"});
    let program = json!({"exec": {"command": "x", "apiVersion": "client.authentication.k8s.io/v1",
        "interactiveMode": "Never"}});
    for user in [user, program] {
        let read = |server: &str| read_at(Path::new("/"), json!({"server": server}), user.clone()).unwrap();
        let open = read("http://h");
        assert!(open.token.is_none() && open.endpoint.identity.is_none());
        assert!(read("https://h").token.is_some());
    }
    let wrong = json!({"exec": {"command": "x"}});
    assert!(read_at(Path::new("/"), json!({"server": "http://h"}), wrong).is_err());
}

#[test]
fn without_tls_files_must_exist_and_are_not_read() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    let read = |server: &str, file: &str, exec: Value| {
        let cluster =
            json!({"server": server, "certificate-authority": file, "insecure-skip-tls-verify": true});
        let user = json!({"client-certificate": file, "client-key": file, "exec": exec});
        read_at(dir.path(), cluster, user).map(drop)
    };
    let old = json!({"command": "x", "apiVersion": "client.authentication.k8s.io/v1alpha1"});
    assert_eq!(read("http://h", "sub", old.clone()), Ok(()));
    assert!(read("http://h", "absent", old.clone()).is_err());
    assert!(read("https://h", "sub", Value::Null).is_err());
    let read =
        |server: &str| read_at(dir.path(), json!({"server": server}), json!({"exec": old.clone()})).map(drop);
    assert_eq!(read("http://h"), Ok(()));
    assert!(read("https://h").unwrap_err().to_string().contains("v1alpha1"));
}

#[test]
fn entries_without_names_are_those_of_a_configuration_that_names_none() {
    let mut config = config(json!({"server": "https://h"}), json!({"token": "t"}));
    config.current_context = None;
    let read =
        |config: &Kubeconfig| credentials_in(config, Path::new("/kubelet.conf"), &Environment::default());
    assert_eq!(read(&config).unwrap_err(), KubeconfigError::Empty);
    config.clusters.as_mut().unwrap()[0].name.clear();
    assert_eq!(read(&config).unwrap().endpoint.host, "h");
    config.contexts.as_mut().unwrap()[0].name.clear();
    assert!(read(&config).unwrap_err().to_string().contains("\"c\" does not exist"));
}

#[test]
fn token_of_the_kubeconfig_is_used_until_its_file_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let program =
        json!({"command": "x", "apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never"});
    let user = json!({"tokenFile": "token", "token": "fixed", "exec": program});
    let credentials = read_at(dir.path(), json!({"server": "https://h"}), user).unwrap();
    // It also takes precedence over a program.
    let source = credentials.token.unwrap();
    let current = || source.current(Instant::now(), &Breaker::default()).unwrap().token.unwrap();
    assert_eq!(current().reveal(), "fixed");
    std::fs::write(dir.path().join("token"), "new").unwrap();
    assert_eq!(current().reveal(), "new");
}

#[test]
fn user_without_a_name_is_that_of_a_context_without_one() {
    let mut config = config(json!({"server": "https://h"}), json!({"token": "t"}));
    config.contexts.as_mut().unwrap()[0].context.as_mut().unwrap().user.clear();
    let read =
        |config: &Kubeconfig| credentials_in(config, Path::new("/kubelet.conf"), &Environment::default());
    assert!(read(&config).unwrap().token.is_none());
    config.users.as_mut().unwrap()[0].name.clear();
    assert!(read(&config).unwrap().token.is_some());
}

#[test]
fn changed_credential_files_are_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    let file = TokenFile::new(path.clone(), None);
    let now = Instant::now();
    assert!(file.token(now).unwrap_err().starts_with("unable to read token file"));
    std::fs::write(&path, "\n").unwrap();
    assert!(file.token(now).unwrap_err().starts_with("read empty token"));
    std::fs::write(&path, "one").unwrap();
    assert_eq!(file.token(now).unwrap().reveal(), "one");
    std::fs::write(&path, "two").unwrap();
    let later = now + TOKEN_PERIOD;
    assert_eq!(file.token(later).unwrap().reveal(), "two");
    std::fs::remove_file(&path).unwrap();
    assert_eq!(file.token(later + TOKEN_PERIOD).unwrap().reveal(), "two", "better an old one than none");

    let (certificate, key) = (dir.path().join("c"), dir.path().join("k"));
    let pem = |text: &str| Secret::new(text.as_bytes().to_vec());
    let identity = |text: &str| Identity { certificate: pem(text), key: pem(text) };
    let paths = CertificatePaths { certificate: certificate.clone(), key: key.clone() };
    let files = IdentityFiles::new(paths, Some(identity("old")));
    let later = Instant::now() + IDENTITY_PERIOD;
    assert_eq!(files.identity(later), None, "gone");
    for path in [&certificate, &key] {
        std::fs::write(path, "new").unwrap();
    }
    assert_eq!(files.identity(later), None, "not before its time");
    assert_eq!(files.identity(later + IDENTITY_PERIOD), Some(identity("new")));
    assert_eq!(files.identity(later + IDENTITY_PERIOD * 2), None, "no other");
}

#[test]
fn server_url_is_split_or_rejected() {
    let read = |server: &str, more: Value| {
        let mut cluster = json!({ "server": server });
        cluster.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let credentials = read_at(Path::new("/"), cluster, json!({}));
        let text = |credentials: Credentials| {
            let Endpoint { https, host, port, .. } = credentials.endpoint;
            format!("{https} {host} {port} {}", credentials.base_path)
        };
        credentials.map(text).map_err(|error| error.to_string())
    };
    for (server, expected) in [
        ("https://10.0.0.1:6443", Some("true 10.0.0.1 6443 ")),
        ("http://h:8080/a/b/", Some("false h 8080 /a/b")),
        ("http://h//a/./b/../c//", Some("false h 80 /a/c")),
        ("https://h/a%2Fb/%41!/%2e%2E/\u{e9}%20", Some("true h 443 /a/b/%C3%A9%20")),
        ("HTTPS://[fd00::1]", Some("true fd00::1 443 ")),
        ("h:1", Some("false h 1 ")),
        ("h", Some("false h 80 ")),
        ("ftp://h", None),
        ("https://", None),
        ("https://u:p@h", None),
        ("https://h:99999", None),
        ("https://h:+443", None),
        ("https://[h]", None),
        ("https://h/a b", None),
        ("https://h/%zz", None),
        ("https://h?x", None),
        ("https://h\t.x:1", None),
        ("https://h`", None),
        ("https://%68", None),
        ("https://fd00::1", None),
    ] {
        let outcome = read(server, json!({}));
        assert_eq!(outcome.as_deref().ok(), expected, "{server}");
        if expected.is_none() {
            assert_eq!(outcome.unwrap_err(), format!("cluster \"c\": server {server:?} is no URL"));
        }
    }
    assert_eq!(read("h", json!({"insecure-skip-tls-verify": true})).unwrap(), "true h 443 ");
}

#[test]
fn proxy_url_wins_over_environment() {
    let environment = Environment::new(|name| match name {
        "HTTPS_PROXY" => Some("http://me:word@environment:1".to_owned()),
        "NO_PROXY" => Some("near.example".to_owned()),
        _ => None,
    });
    let proxy = |server: &str, url: Option<&str>| {
        let cluster = json!({"server": server, "proxy-url": url});
        let read = credentials_in(&config(cluster, json!({})), Path::new("/kubelet.conf"), &environment);
        let shown = read.map(|credentials| format!("{:?}", credentials.endpoint.proxy));
        shown.unwrap_or_else(|error| error.to_string())
    };
    let given = Some("https://me:word@given.example");
    for (server, url, expected) in [
        ("https://far.example:6443", None, "Some(Proxy(http://environment:1))"),
        ("https://far.example:6443", Some(""), "Some(Proxy(http://environment:1))"),
        ("https://near.example:6443", None, "None"),
        ("http://far.example:8080", None, "None"),
        ("https://127.0.0.1:6443", None, "None"),
        ("https://far.example:6443", given, "Some(Proxy(https://given.example:443))"),
        ("https://near.example:6443", given, "Some(Proxy(https://given.example:443))"),
        ("https://127.0.0.1:6443", given, "Some(Proxy(https://given.example:443))"),
        ("https://h", Some("socks5://given"), "Some(Proxy(socks5://given:1080))"),
        (
            "https://h",
            Some("given:3128"),
            "cluster \"c\": proxy-url: invalid proxy URL: the scheme is missing",
        ),
        (
            "https://h",
            Some("ftp://me:word@given"),
            "cluster \"c\": proxy-url: unsupported scheme \"ftp\", must be http, https, or socks5",
        ),
    ] {
        assert_eq!(proxy(server, url), expected, "{server} {url:?}");
    }
}

#[test]
fn invalid_kubeconfigs_are_rejected() {
    let cluster = json!({"server": "https://h"});
    let wrong = |cluster: Value, user: Value| {
        let outcome = read_at(Path::new("/nowhere"), cluster, user);
        outcome.map(drop).unwrap_err().to_string()
    };
    let data = base64("x");
    for (cluster, user, expected) in [
        (json!({}), json!({}), "cluster \"c\": no server found"),
        (
            json!({"server": "h", "certificate-authority": "a"}),
            json!({}),
            "unable to read certificate-authority /nowhere/a: ",
        ),
        (
            json!({"server": "h", "certificate-authority": "a", "certificate-authority-data": data}),
            json!({}),
            "cluster \"c\": certificate-authority-data and certificate-authority are both",
        ),
        (
            json!({"server": "h", "insecure-skip-tls-verify": true, "certificate-authority-data": data}),
            json!({}),
            "cluster \"c\": specifying a root certificates file with the insecure flag is not allowed",
        ),
        (
            cluster.clone(),
            json!({"client-certificate": "a"}),
            "user \"u\": client-key-data or client-key must be specified",
        ),
        (cluster.clone(), json!({"client-key-data": data}), "user \"u\": a client key without"),
        (
            cluster.clone(),
            json!({"client-certificate": "a", "client-certificate-data": data}),
            "user \"u\": client-certificate-data and",
        ),
        (
            cluster.clone(),
            json!({"client-key": "a", "client-key-data": data, "client-certificate": "a"}),
            "user \"u\": client-key-data and",
        ),
        (
            cluster.clone(),
            json!({"client-key": "a", "client-certificate": "b"}),
            "unable to read client-certificate /nowhere/b: ",
        ),
        (cluster.clone(), json!({"username": "a", "password": "b"}), "user \"u\": basic authentication"),
        (
            cluster.clone(),
            json!({"username": "a", "token": "b"}),
            "user \"u\": more than one authentication method",
        ),
        (cluster.clone(), json!({"as": "a"}), "user \"u\": impersonation"),
        (
            cluster.clone(),
            json!({"auth-provider": {"name": "gcp"}}),
            "user \"u\": auth-provider is not supported",
        ),
        (cluster.clone(), json!({"exec": {"command": "a"}}), "user \"u\": apiVersion must be specified"),
    ] {
        let error = wrong(cluster, user);
        assert!(error.starts_with(expected), "{error}");
    }
    let mut other = config(cluster, json!({}));
    let read = |config: &Kubeconfig| {
        credentials(config, Path::new("k")).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(read(&other), Ok(()));
    other.users.as_mut().unwrap().clear();
    assert_eq!(read(&other).unwrap_err(), "user \"u\" does not exist");
    let twice = other.clusters.as_ref().unwrap()[0].clone();
    other.clusters.as_mut().unwrap().push(twice);
    assert_eq!(read(&other).unwrap_err(), "duplicate name \"c\" in list of clusters");
    other.clusters = None;
    assert_eq!(read(&other).unwrap_err(), "cluster \"c\" does not exist");
    other.current_context = Some("there".to_owned());
    assert_eq!(read(&other).unwrap_err(), "context \"there\" does not exist");
    assert_eq!(read(&Kubeconfig::default()).unwrap_err(), KubeconfigError::Empty.to_string());
}
