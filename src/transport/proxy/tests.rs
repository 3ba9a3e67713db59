use super::*;

/// The proxy for a URL, as `scheme://host:port`; empty if no proxy is used.
fn decide(variables: &[(&str, &str)], url: &str) -> String {
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    let environment = Environment::new(|name| {
        variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
    });
    let (scheme, rest) = url.split_once("://").unwrap();
    let UrlParts { host, port, .. } = UrlParts::split(rest).unwrap();
    let https = scheme == "https";
    let port = port.unwrap_or(if https { 443 } else { 80 });
    environment.proxy_for(https, host, port).map(Proxy::to_string).unwrap_or_default()
}

#[test]
fn scheme_of_target_selects_variable() {
    for (variables, url, expected) in [
        (&[("HTTP_PROXY", "http://p:1")][..], "http://h", "http://p:1"),
        (&[("HTTP_PROXY", "http://p:1")], "https://h", ""),
        (&[("HTTPS_PROXY", "http://p:1")], "https://h", "http://p:1"),
        (&[("HTTPS_PROXY", "http://p:1")], "http://h", ""),
        (&[("https_proxy", "http://p:1")], "https://h", "http://p:1"),
        (&[("HTTPS_PROXY", "http://p:1"), ("https_proxy", "http://q:1")], "https://h", "http://p:1"),
        (&[("HTTPS_PROXY", ""), ("https_proxy", "http://q:1")], "https://h", "http://q:1"),
        (&[("ALL_PROXY", "http://p:1")], "https://h", ""),
        (&[], "https://h", ""),
    ] {
        assert_eq!(decide(variables, url), expected, "{variables:?} {url}");
    }
}

#[test]
fn value_of_variable_may_lack_scheme() {
    for (value, expected) in [
        ("10.1.2.3:8080", "http://10.1.2.3:8080"),
        ("cache.corp.example.com", "http://cache.corp.example.com:80"),
        ("localhost:3128", "http://localhost:3128"),
        ("[fd00::1]:8080", "http://[fd00::1]:8080"),
        ("https://cache.corp.example.com", "https://cache.corp.example.com:443"),
        ("HTTPS://cache/path?x#y", "https://cache:443"),
        ("socks5://10.1.2.3", "socks5://10.1.2.3:1080"),
        ("socks5h://10.1.2.3:1", "socks5://10.1.2.3:1"),
        ("u:p@p:1", "http://p:1"),
        ("u:p://x@p:1", ""),
        ("foo://p", ""),
        ("http://u:%zz@p", ""),
        ("http://:1", ""),
    ] {
        assert_eq!(decide(&[("HTTPS_PROXY", value)], "https://h"), expected, "{value}");
    }
}

#[test]
fn no_proxy_lists_targets_reached_directly() {
    let list = "foobar.com, .barbaz.net, *.wildcard.io, 192.168.1.1, 192.168.1.2:81, 192.168.1.3:80, \
                10.0.0.0/30, 2001:db8::52:0:1, [2001:db8::52:0:2]:443, [2001:db8::52:0:3]:80, \
                2002:db8:a::45/64, ported.org:80, .UPPER.case, 1.2.3.4/99, :1, , [2001:db8::9]";
    for (host, direct) in [
        ("localhost", true),
        ("LOCALHOST", false),
        ("127.0.0.1", true),
        ("127.0.0.2", true),
        ("[::1]", true),
        ("[::ffff:127.0.0.1]", true),
        ("[::2]", false),
        ("192.168.1.1", true),
        ("[::ffff:192.168.1.1]", true),
        ("192.168.1.2", false),
        ("192.168.1.2:81", true),
        ("192.168.1.3", true),
        ("192.168.1.4", false),
        ("10.0.0.2", true),
        ("10.0.0.4", false),
        ("[2001:db8::52:0:1]", true),
        ("[2001:db8::52:0:2]", false),
        ("[2001:db8::52:0:3]", true),
        ("[2001:db8::9]", false),
        ("[2002:db8:a::123]", true),
        ("[2002:db8:b::123]", false),
        ("barbaz.net", false),
        ("www.barbaz.net", true),
        ("foobar.com", true),
        ("FooBar.com", true),
        ("www.foobar.com", true),
        ("foofoobar.com", false),
        ("localhost.net", false),
        ("local.localhost", false),
        ("barbarbaz.net", false),
        ("wildcard.io", false),
        ("nested.wildcard.io", true),
        ("awildcard.io", false),
        ("ported.org", true),
        ("a.ported.org:80", true),
        ("ported.org:81", false),
        ("a.upper.case", true),
        ("1.2.3.4", false),
    ] {
        let variables = [("HTTP_PROXY", "p:1"), ("no_proxy", list)];
        let expected = if direct { "" } else { "http://p:1" };
        assert_eq!(decide(&variables, &format!("http://{host}")), expected, "{host}");
        let everything = [("HTTP_PROXY", "p:1"), ("NO_PROXY", "x.y, *")];
        assert_eq!(decide(&everything, &format!("http://{host}")), "", "{host}");
    }
    for (list, host, direct) in [
        ("0.0.0.0/0", "10.0.0.1", true),
        ("0.0.0.0/0", "[fd00::1]", false),
        ("::/0", "[fd00::1]", true),
        ("::ffff:10.0.0.0/104", "10.1.2.3", true),
        ("10.0.0.0/+8", "10.1.2.3", false),
        ("fe80::/10", "[fe80::1%eth0]", true),
        // An address with a zone is not a domain.
        ("example.com", "[fe80::1%.example.com]", false),
    ] {
        let variables = [("HTTPS_PROXY", "p:1"), ("NO_PROXY", list)];
        let expected = if direct { "" } else { "http://p:1" };
        assert_eq!(decide(&variables, &format!("https://{host}")), expected, "{list} {host}");
    }
}

#[test]
fn credentials_are_decoded_and_never_shown() {
    let proxy = Proxy::parse("http://me:s%3Ac%40r@t@proxy.example:3128").unwrap();
    assert_eq!(proxy.credentials, Some(("me".to_owned(), "s:c@r@t".to_owned())));
    assert_eq!(proxy.authorization().as_deref(), Some("Basic bWU6czpjQHJAdA=="));
    assert_eq!(format!("{proxy} {proxy:?}"), "http://proxy.example:3128 Proxy(http://proxy.example:3128)");
    assert_eq!(Proxy::parse("http://me@p").unwrap().authorization().as_deref(), Some("Basic bWU6"));
    assert_eq!(Proxy::parse("http://p").unwrap().authorization(), None);
    let environment = Environment::new(|name| (name == "HTTPS_PROXY").then(|| "http://me:word@p".to_owned()));
    assert!(!format!("{environment:?}").contains("word"));
    for (text, expected) in [
        ("http://me:word@", "invalid proxy URL: host or port is invalid"),
        ("http://me:word@h:x", "invalid proxy URL: host or port is invalid"),
        ("http://me:word@h:99999", "invalid proxy URL: host or port is invalid"),
        ("http://me:word@[::1", "invalid proxy URL: host or port is invalid"),
        ("http://me:word@h h", "invalid proxy URL: host or port is invalid"),
        ("http://me:word%zz@h", "invalid proxy URL: user name or password is not escaped properly"),
        ("me:word@h", "invalid proxy URL: the scheme is missing"),
        ("me:word@h://x", "invalid proxy URL: the scheme is missing"),
        ("ftp://me:word@h", "unsupported scheme \"ftp\", must be http, https, or socks5"),
    ] {
        assert_eq!(Proxy::parse(text).unwrap_err().to_string(), expected, "{text}");
    }
}

proptest::proptest! {
    #[test]
    fn no_environment_causes_a_panic(proxy in "[-a-c0-9:/@%.\\[\\]*ü ]{0,20}", list in "[-a-c0-9:/@%.\\[\\]*,ü ]{0,30}") {
        let value = |name: &str| Some(if name == "NO_PROXY" { list.clone() } else { proxy.clone() });
        let environment = Environment::new(value);
        for (host, port) in [("a.b", 80), ("10.0.0.1", 443), ("::a", 1), ("", 0)] {
            let _ = environment.proxy_for(true, host, port);
        }
    }
}
