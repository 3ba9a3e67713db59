//! The set-up of both runtimes in directories.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::*;
use crate::cli::table::Paint;

struct Fixture {
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Fixture {
        Fixture { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.path(path)).unwrap()
    }

    fn options(&self, runtime: Runtime) -> SetupOptions {
        SetupOptions {
            runtime: Some(runtime),
            containerd_config: Some(self.path("containerd/config.toml")),
            certs_dir: (runtime == Runtime::Containerd).then(|| self.path("certs.d")),
            registries_dir: Some(self.path("containers/registries.conf.d")),
            root_dir: self.path("kubelet"),
            ..SetupOptions::default()
        }
    }

    fn run(&self, options: &SetupOptions) -> (Exit, String) {
        let mut out = Vec::new();
        let mut console =
            Console { out: &mut out, paint: Paint::new(false), now: jiff::Timestamp::UNIX_EPOCH };
        let exit = run(&mut console, options, Path::new("/run/coracle/coracle.sock")).unwrap();
        (exit, String::from_utf8(out).unwrap())
    }

    fn refused(&self, options: &SetupOptions) -> String {
        make(options, Path::new("/run/coracle/coracle.sock"), self.dir.path()).unwrap_err()
    }

    /// All files with their content.
    fn everything(&self) -> Vec<(PathBuf, String)> {
        let mut found = Vec::new();
        let mut open = vec![self.dir.path().to_owned()];
        while let Some(dir) = open.pop() {
            for entry in std::fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() && !path.is_symlink() {
                    open.push(path);
                } else {
                    let text = std::fs::read_to_string(&path).unwrap_or_default();
                    found.push((path, text));
                }
            }
        }
        found.sort();
        found
    }
}

const DEBIAN: &str = "version = 2\n\n[plugins]\n  [plugins.\"io.containerd.grpc.v1.cri\".cni]\n    bin_dir = \"/usr/lib/cni\"\n";

#[test]
fn containerd_gets_one_line_and_a_link_and_nothing_more_the_second_time() {
    let fixture = Fixture::new();
    fixture.write("containerd/config.toml", DEBIAN);
    let options = fixture.options(Runtime::Containerd);
    let before = fixture.everything();
    let (exit, text) = fixture.run(&SetupOptions { dry_run: true, ..options.clone() });
    assert_eq!(exit, Exit::Success);
    assert!(text.contains("would write ") && text.contains("would make "), "{text}");
    assert_eq!(fixture.everything(), before, "a dry run writes nothing");
    let (exit, text) = fixture.run(&options);
    assert_eq!(exit, Exit::Success);
    assert!(text.contains("restart containerd once"), "{text}");
    let certs = fixture.path("certs.d");
    let added = format!(
        "\n[plugins.\"io.containerd.grpc.v1.cri\".registry]\n  config_path = \"{}\"\n",
        certs.display()
    );
    assert_eq!(fixture.read("containerd/config.toml"), format!("{DEBIAN}{added}"));
    assert_eq!(fixture.read("containerd/config.toml.before-coracle"), DEBIAN);
    let link = std::fs::read_link(certs.join("_default/hosts.toml")).unwrap();
    assert_eq!(link, Path::new("/run/coracle/hosts.toml"));
    let after = fixture.everything();
    assert_eq!(fixture.run(&options), (Exit::Success, "nothing to do\n".to_owned()));
    assert_eq!(fixture.everything(), after);
}

#[test]
fn mode_link_and_first_copy_of_the_configuration_stay() {
    let fixture = Fixture::new();
    fixture.write("elsewhere/config.toml", DEBIAN);
    fixture.write("elsewhere/config.toml.before-coracle", "the first one");
    std::fs::create_dir(fixture.path("containerd")).unwrap();
    let real = fixture.path("elsewhere/config.toml");
    std::fs::set_permissions(&real, std::fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::symlink(&real, fixture.path("containerd/config.toml")).unwrap();
    assert_eq!(fixture.run(&fixture.options(Runtime::Containerd)).0, Exit::Success);
    assert!(fixture.path("containerd/config.toml").is_symlink());
    assert!(fixture.read("elsewhere/config.toml").contains("config_path"));
    assert_eq!(std::fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o640);
}

#[test]
fn link_to_a_missing_configuration_stays_and_its_file_is_made() {
    for (link, file) in
        [("../elsewhere/config.toml", "elsewhere/config.toml"), ("other/c.toml", "other/c.toml")]
    {
        let fixture = Fixture::new();
        std::fs::create_dir(fixture.path("containerd")).unwrap();
        let config = fixture.path("containerd/config.toml");
        std::os::unix::fs::symlink("second.toml", &config).unwrap();
        // A relative link and an absolute one.
        let second = fixture.path("containerd/second.toml");
        let target = if link.starts_with("..") { PathBuf::from(link) } else { fixture.path(link) };
        std::os::unix::fs::symlink(target, &second).unwrap();
        assert_eq!(fixture.run(&fixture.options(Runtime::Containerd)).0, Exit::Success);
        assert!(config.is_symlink() && second.is_symlink());
        assert!(fixture.read(file).starts_with("version = "));
    }
    let fixture = Fixture::new();
    std::fs::create_dir(fixture.path("containerd")).unwrap();
    std::os::unix::fs::symlink("config.toml", fixture.path("containerd/config.toml")).unwrap();
    assert!(fixture.refused(&fixture.options(Runtime::Containerd)).contains("cannot read "));
}

#[test]
fn missing_configuration_of_containerd_is_made() {
    let fixture = Fixture::new();
    let (exit, _) = fixture.run(&fixture.options(Runtime::Containerd));
    assert_eq!(exit, Exit::Success);
    assert!(fixture.read("containerd/config.toml").starts_with("version = "));
    assert!(!fixture.path("containerd/config.toml.before-coracle").exists());
}

#[test]
fn present_directory_of_registries_is_used_without_a_restart() {
    let fixture = Fixture::new();
    let own = fixture.path("own");
    let config = format!(
        "version = 3\n[plugins.'io.containerd.cri.v1.images'.registry]\nconfig_path = '{}'\n",
        own.display()
    );
    fixture.write("containerd/config.toml", &config);
    let options = SetupOptions { certs_dir: None, ..fixture.options(Runtime::Containerd) };
    let (_, text) = fixture.run(&options);
    assert!(
        text.contains("containerd needs no restart") && own.join("_default/hosts.toml").is_symlink(),
        "{text}"
    );
    assert_eq!(fixture.read("containerd/config.toml"), config);
    // An option that contradicts the configuration.
    let options = SetupOptions { certs_dir: Some(fixture.path("other")), ..options };
    assert!(fixture.refused(&options).contains("leave out --certs-dir"));
}

#[test]
fn first_directory_that_hides_no_registry_gets_the_link() {
    let fixture = Fixture::new();
    let (a, b) = (fixture.path("a"), fixture.path("b"));
    let config = format!(
        "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".registry]\nconfig_path = \"{}:{}\"\n",
        a.display(),
        b.display()
    );
    fixture.write("containerd/config.toml", &config);
    fixture.write("b/r.example/hosts.toml", "");
    let options = SetupOptions { certs_dir: None, ..fixture.options(Runtime::Containerd) };
    let (_, text) = fixture.run(&options);
    assert!(b.join("_default/hosts.toml").is_symlink() && !a.join("_default").exists(), "{text}");
    let note = format!("note: {} counts for its registry instead of _default", b.join("r.example").display());
    assert!(text.contains(&note), "{text}");
    std::fs::remove_dir_all(&b).unwrap();
    fixture.run(&options);
    assert!(a.join("_default/hosts.toml").is_symlink() && !b.exists());
}

#[test]
fn files_of_the_operator_are_not_replaced() {
    let fixture = Fixture::new();
    fixture.write("containerd/config.toml", DEBIAN);
    let options = fixture.options(Runtime::Containerd);
    fixture.write("certs.d/_default/hosts.toml", "server = \"https://x\"\n");
    let reason = fixture.refused(&options);
    assert!(
        reason.contains("hosts.toml has hosts of its own") && reason.contains("override_path"),
        "{reason}"
    );
    std::fs::remove_file(fixture.path("certs.d/_default/hosts.toml")).unwrap();
    fixture.write("certs.d/_default/ca.crt", "");
    assert!(fixture.refused(&options).contains("has the file ca.crt"));
    std::fs::remove_file(fixture.path("certs.d/_default/ca.crt")).unwrap();
    std::os::unix::fs::symlink("/elsewhere", fixture.path("certs.d/_default/hosts.toml")).unwrap();
    assert!(fixture.refused(&options).contains("is a link to /elsewhere"));
    assert_eq!(fixture.read("containerd/config.toml"), DEBIAN);
}

#[test]
fn crio_gets_a_mirror_for_each_registry_and_a_token_for_root() {
    let fixture = Fixture::new();
    let address = Some("127.0.0.1:5051".parse().unwrap());
    let options = SetupOptions { address, ..fixture.options(Runtime::Crio) };
    let (exit, text) = fixture.run(&SetupOptions { dry_run: true, ..options.clone() });
    assert_eq!((exit, fixture.everything().len()), (Exit::Success, 0), "{text}");
    let (_, text) = fixture.run(&options);
    let token = fixture.read("kubelet/image_set/mirror-token").trim().to_owned();
    assert!(token::is_token(&token) && !text.contains(&token), "{text}");
    assert!(text.contains("restart crio once"), "{text}");
    let file = "containers/registries.conf.d/50-coracle.conf";
    let conf = fixture.read(file);
    for registry in crio::REGISTRIES {
        let mirror = format!(
            "[[registry]]\nprefix = \"{registry}\"\nlocation = \"{registry}\"\n[[registry.mirror]]\nlocation = \"127.0.0.1:5051/{token}/{registry}\"\ninsecure = true\n"
        );
        assert!(conf.contains(&mirror), "{conf}");
    }
    for path in [file, "kubelet/image_set/mirror-token"] {
        let mode = std::fs::metadata(fixture.path(path)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{path}");
    }
    assert_eq!(fixture.run(&options), (Exit::Success, "nothing to do\n".to_owned()));
    // Another list of registries; a registry with a port.
    let options = SetupOptions { registries: vec!["r.example:5000".into()], ..options };
    fixture.run(&options);
    let conf = fixture.read(file);
    assert!(conf.contains(&format!("location = \"127.0.0.1:5051/{token}/r.example__5000\"")), "{conf}");
    assert!(!conf.contains("docker.io"));
}

#[test]
fn crio_registries_that_are_configured_elsewhere_are_left_to_the_operator() {
    let fixture = Fixture::new();
    fixture.write("containers/registries.conf", "[[registry]]\nlocation = \"quay.io\"\nblocked = true\n");
    fixture.write("containers/registries.conf.d/10-x.conf", "# x\n[[registry]]\nprefix = 'docker.io'\n");
    let address = Some("127.0.0.1:5051".parse().unwrap());
    let options = SetupOptions { address, ..fixture.options(Runtime::Crio) };
    let (_, text) = fixture.run(&options);
    assert!(text.contains("registries.conf, line 2 configures quay.io already"), "{text}");
    assert!(text.contains("10-x.conf, line 3 configures docker.io already"), "{text}");
    let conf = fixture.read("containers/registries.conf.d/50-coracle.conf");
    assert!(conf.contains("ghcr.io") && !conf.contains("quay.io") && !conf.contains("docker.io"), "{conf}");
    fixture.write("containers/registries.conf.d/20-x.conf", "registry = [\n{prefix = \"ghcr.io\"}]\n");
    assert!(fixture.refused(&options).contains("20-x.conf, line 1: write each registry as a table"));
}

#[test]
fn crio_needs_a_fixed_port_and_its_own_file() {
    let fixture = Fixture::new();
    let options = fixture.options(Runtime::Crio);
    assert!(fixture.refused(&options).contains("fixed port"));
    let address = |text: &str| SetupOptions { address: Some(text.parse().unwrap()), ..options.clone() };
    assert!(fixture.refused(&address("127.0.0.1:0")).contains("fixed port"));
    assert!(fixture.refused(&address("10.0.0.1:5051")).contains("fixed port"));
    let good = address("127.0.0.1:5051");
    let bad = SetupOptions { registries: vec!["a\"b".into()], ..good.clone() };
    assert!(fixture.refused(&bad).contains("not the name of a registry"));
    fixture.write("containers/registries.conf.d/50-coracle.conf", "# mine\n");
    assert!(fixture.refused(&good).contains("not a file of this command"));
    fixture.write("kubelet/image_set/mirror-token", "short\n");
    assert!(fixture.refused(&good).contains("no valid token"));
}

#[test]
fn version_of_containerd_is_found_in_its_output() {
    for (text, expected) in [
        ("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3\n", Some(1)),
        ("containerd github.com/containerd/containerd/v2 v2.4.2+unknown \n", Some(2)),
        ("containerd containerd.io 1.7.27 05044ec0a9a75232cad458027ca83437aae3f4da", Some(1)),
        ("", None),
        ("no version", None),
    ] {
        assert_eq!(major(text), expected, "{text}");
    }
}
