//! Networks of pods: name servers, hosts files, sysctls, ports; and pods on a node without a
//! network.

use std::fs;

use serde_json::{Value, json};

use crate::support::node::{FOREVER, LONG, Node, busybox, container_id, is_ready, pod, simple};
use crate::support::wait::wait_until;

fn pod_with(name: &str, change: impl FnOnce(&mut Value)) -> Value {
    let mut manifest = simple(name);
    change(&mut manifest["spec"]);
    manifest
}

/// A file inside the container `main` of a pod.
fn file(node: &Node, name: &str, path: &str) -> String {
    node.exec(&container_id(&node.wait_ready(name), "main"), &["cat", path])
}

/// The values of the lines of a resolv.conf that begin with a keyword.
fn lines(text: &str, word: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.strip_prefix(word)?.strip_prefix(' ').map(|rest| rest.trim().to_owned()))
        .collect()
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn dns_policies_configure_name_resolution() {
    let resolver = Node::base("dns").join("resolv.conf");
    fs::create_dir_all(Node::base("dns")).expect("the directory can be made");
    fs::write(
        &resolver,
        "nameserver 192.0.2.1\nnameserver 192.0.2.2\nnameserver 192.0.2.3\nnameserver 192.0.2.4\n\
         search one.example two.example\noptions timeout:3\n",
    )
    .expect("the resolver's file is written");
    let node = Node::start_with(
        "dns",
        json!({
            "clusterDNS": ["10.96.0.10"],
            "clusterDomain": "cluster.local",
            "resolvConf": resolver,
            "allowedUnsafeSysctls": ["net.core.*"],
        }),
    );
    node.apply(
        "cluster.json",
        &pod_with("cluster", |spec| {
            spec["hostname"] = json!("web");
            spec["subdomain"] = json!("farm");
            spec["hostAliases"] =
                json!([{"ip": "198.51.100.7", "hostnames": ["seven.example", "vii.example"]}]);
            spec["securityContext"] = json!({"sysctls": [
                {"name": "net.core.somaxconn", "value": "1234"},
                {"name": "net.ipv4.tcp_syncookies", "value": "0"},
            ]});
        }),
    );
    node.apply("plain.json", &pod_with("plain", |spec| spec["dnsPolicy"] = json!("Default")));
    node.apply("host.json", &pod_with("host", |spec| spec["hostNetwork"] = json!(true)));
    node.apply(
        "both.json",
        &pod_with("both", |spec| {
            spec["hostNetwork"] = json!(true);
            spec["dnsPolicy"] = json!("ClusterFirstWithHostNet");
        }),
    );
    node.apply("own.json", &pod_with("own", |spec| {
        spec["dnsPolicy"] = json!("None");
        spec["dnsConfig"] = json!({
            "nameservers": ["192.0.2.9"], "searches": ["own.example"], "options": [{"name": "ndots", "value": "2"}],
        });
    }));

    let cluster_search = "default.svc.cluster.local svc.cluster.local cluster.local one.example two.example";
    let text = file(&node, "cluster", "/etc/resolv.conf");
    assert_eq!(lines(&text, "nameserver"), ["10.96.0.10"], "{text}");
    assert_eq!(lines(&text, "search"), [cluster_search], "{text}");
    assert_eq!(lines(&text, "options"), ["ndots:5"], "the options of the node are not used: {text}");

    for name in ["plain", "host"] {
        let text = file(&node, name, "/etc/resolv.conf");
        assert_eq!(lines(&text, "nameserver"), ["192.0.2.1", "192.0.2.2", "192.0.2.3"], "{name}: {text}");
        assert_eq!(lines(&text, "search"), ["one.example two.example"], "{name}: {text}");
        assert_eq!(lines(&text, "options"), ["timeout:3"], "{name}: {text}");
        let event = node.wait_event(name, "DNSConfigForming", "Nameserver limits were exceeded");
        assert!(event.message.ends_with("192.0.2.1 192.0.2.2 192.0.2.3"), "{}", event.message);
    }
    assert!(node.events_with_reason("cluster", "DNSConfigForming").is_empty());

    let text = file(&node, "both", "/etc/resolv.conf");
    assert_eq!(lines(&text, "nameserver"), ["10.96.0.10"], "{text}");
    assert_eq!(lines(&text, "options"), ["ndots:5"], "{text}");

    let text = file(&node, "own", "/etc/resolv.conf");
    assert_eq!(
        (lines(&text, "nameserver"), lines(&text, "search")),
        (vec!["192.0.2.9".to_owned()], vec!["own.example".to_owned()])
    );
    assert_eq!(lines(&text, "options"), ["ndots:2"], "{text}");

    // The hosts file: the header first, the pod's own line, the aliases last.
    let ready = node.wait_ready("cluster");
    let address = ready.status.as_ref().and_then(|status| status.pod_ip.clone()).unwrap_or_default();
    let hosts = file(&node, "cluster", "/etc/hosts");
    assert!(hosts.starts_with("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n"), "{hosts}");
    assert!(hosts.contains(&format!("{address}\tweb.farm.default.svc.cluster.local\tweb\n")), "{hosts}");
    assert!(
        hosts.ends_with("\n# Entries added by HostAliases.\n198.51.100.7\tseven.example\tvii.example\n"),
        "{hosts}"
    );
    assert_eq!(node.exec(&container_id(&ready, "main"), &["hostname"]), "web\n");
    let hosts = file(&node, "host", "/etc/hosts");
    assert!(hosts.starts_with("# Kubernetes-managed hosts file (host network).\n"), "{hosts}");

    // Kernel settings of the pod's own: one that is safe, one that the node allows.
    assert_eq!(file(&node, "cluster", "/proc/sys/net/core/somaxconn"), "1234\n");
    assert_eq!(file(&node, "cluster", "/proc/sys/net/ipv4/tcp_syncookies"), "0\n");
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn without_pod_network_only_host_network_pods_start() {
    let node = Node::start("nonet");
    let (plugins, away) = (node.containerd.network_config(), node.shared().join("10-coracle.conflist"));
    fs::rename(&plugins, &away).expect("the network's configuration can be moved away");
    wait_until("status to name the network", LONG, || {
        String::from_utf8_lossy(&node.command(&["status"]).stdout).contains("NetworkReady=false")
    });
    node.apply("bridged.json", &simple("bridged"));
    node.apply("host.json", &pod_with("host", |spec| spec["hostNetwork"] = json!(true)));
    node.wait_ready("host");
    let event = node.wait_event("bridged", "NetworkNotReady", "network is not ready: ");
    assert_eq!(event.kind, "Warning");
    assert!(event.message.contains("NetworkReady=false"), "{}", event.message);
    wait_until("the event to be repeated", LONG, || {
        node.events_with_reason("bridged", "NetworkNotReady").iter().map(|event| event.count).sum::<u64>()
            >= 3
    });
    assert!(node.running_sandboxes("bridged").is_empty());
    // A rename into the directory is not noticed by containerd, a write is.
    let text = fs::read(&away).expect("the configuration was moved away");
    fs::write(&plugins, text).expect("the network's configuration can be written back");
    node.wait_ready("bridged");
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn host_port_reaches_the_pod() {
    let node = Node::start("hostport");
    let mut manifest = pod(
        "web",
        json!([busybox(
            "main",
            "mkdir /tmp/w; echo inside > /tmp/w/index.html; exec httpd -f -p 80 -h /tmp/w"
        )]),
    );
    manifest["spec"]["containers"][0]["ports"] = json!([{"containerPort": 80, "hostPort": 28080}]);
    node.apply("web.json", &manifest);
    // Requested from the host's network by a second pod: packets of the host itself to its own
    // address take another path.
    let asks = format!("until wget -q -O /tmp/page http://192.0.2.10:28080/; do sleep 0.1; done; {FOREVER}");
    let mut client = pod("client", json!([busybox("main", &asks)]));
    client["spec"]["hostNetwork"] = json!(true);
    node.apply("client.json", &client);
    node.wait_ready("web");
    let client = node.wait_ready("client");
    wait_until("the page", LONG, || {
        node.exec(&container_id(&client, "main"), &["sh", "-c", "cat /tmp/page 2>/dev/null || true"])
            == "inside\n"
    });
    node.remove("web.json");
    node.wait_gone("web");
    // Not by "-T" of wget: in Debian 12's busybox, that is a segmentation fault.
    let refused = node.exec(
        &container_id(&client, "main"),
        &["sh", "-c", "timeout 60 wget -O - http://192.0.2.10:28080/ 2>&1 || true"],
    );
    assert!(refused.contains("Connection refused"), "the port is closed with the pod: {refused}");
    assert!(node.pod("client").is_some_and(|pod| is_ready(&pod)));
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn packet_filter_hint_chain_exists() {
    let node = Node::start("hint");
    let chains = |table: &str| -> String {
        // Programs of other tests may hold the lock of the tables.
        let output = std::process::Command::new("iptables").args(["-w", "60", "-t", table, "-S"]).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
    };
    wait_until("the hint", LONG, || chains("mangle").lines().any(|line| line == "-N KUBE-IPTABLES-HINT"));
    wait_until("the rule against foreign packets to loopback", LONG, || {
        chains("filter").lines().any(|line| {
            line.starts_with("-A KUBE-FIREWALL") && line.contains("127.0.0.0/8") && line.ends_with("-j DROP")
        })
    });
    for from in ["INPUT", "OUTPUT"] {
        wait_until(&format!("the way from {from} to that rule"), LONG, || {
            chains("filter")
                .lines()
                .any(|line| line.starts_with(&format!("-A {from} ")) && line.ends_with("-j KUBE-FIREWALL"))
        });
    }
    node.finish();
}
