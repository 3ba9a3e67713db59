use super::*;
use crate::server::node::tests::{ClientResponse, Fixture, request};

fn get(fixture: &Fixture, path: &str, accept: &str) -> ClientResponse {
    let mut request = request(Method::Get, path);
    request.accept = accept.to_owned();
    fixture.send(&request)
}

#[test]
fn configz_is_the_configuration() {
    let fixture = Fixture::new(|_| {});
    assert_eq!(fixture.get("/configz").brief(), (200, r#"{"kubeletconfig":{"maxPods":110}}"#.to_owned()));
}

#[test]
fn pages_have_the_requested_format() {
    let fixture = Fixture::new(|_| {});
    for (accept, status, form) in [
        ("", 200, "text/plain; charset=utf-8"),
        ("*/*", 200, "text/plain; charset=utf-8"),
        ("text/html, text/*;q=0.5", 200, "text/plain; charset=utf-8"),
        ("text/plain;charset=UTF-8", 200, "text/plain; charset=utf-8"),
        ("application/json;g=config.k8s.io;v=v1beta1;as=KIND", 200, "application/json"),
        ("application/json; v=v1alpha1; g=config.k8s.io; as=KIND, */*", 200, "application/json"),
        ("application/yaml;v=v1beta1;g=config.k8s.io;as=KIND", 200, "application/yaml"),
        ("application/json", 406, "text/plain; charset=utf-8"),
        ("application/json;g=config.k8s.io;v=v1;as=KIND", 406, "text/plain; charset=utf-8"),
        ("application/json;g=config.k8s.io;v=v1beta1;as=Other", 406, "text/plain; charset=utf-8"),
        ("text/plain;charset=latin1", 406, "text/plain; charset=utf-8"),
        ("image/png", 406, "text/plain; charset=utf-8"),
        (";;,=;", 406, "text/plain; charset=utf-8"),
    ] {
        for (path, kind) in [("/flagz", "Flagz"), ("/statusz", "Statusz")] {
            let accept = accept.replace("KIND", kind);
            let response = get(&fixture, path, &accept);
            assert_eq!((response.status, response.header("Content-Type")), (status, form), "{path} {accept}");
            if form.starts_with("application/") {
                let object: Value = serde_json::from_slice(&response.body).unwrap();
                assert_eq!(object["kind"], kind);
                assert_eq!(object["metadata"]["name"], "kubelet");
                let old = accept.contains("v1alpha1");
                let version = if old { "config.k8s.io/v1alpha1" } else { "config.k8s.io/v1beta1" };
                assert_eq!(object["apiVersion"], version);
                assert_eq!(response.header("Warning").starts_with("299 - "), old);
            }
        }
    }
}

#[test]
fn pages_show_flags_and_status() {
    let fixture = Fixture::new(|_| {});
    let text = fixture.get("/flagz").text();
    assert!(
        text.starts_with("\nkubelet flagz\nWarning: ")
            && text.ends_with("purposes only.\nconfig=/etc/x\nv=2\n"),
        "{text}"
    );
    let flags = get(&fixture, "/flagz", "application/json;g=config.k8s.io;v=v1beta1;as=Flagz");
    let flags: Value = serde_json::from_slice(&flags.body).unwrap();
    assert_eq!(flags["flags"], json!({"config": "/etc/x", "v": "2"}));

    let text = fixture.get("/statusz").text();
    assert!(text.contains("\nStarted: Thu Jan  1 00:00:00 UTC 1970\nUp: "), "{text}");
    assert!(
        text.contains("\nBinary version: 1.37.2\nEmulation version: 1.37\nPaths: /attach /checkpoint "),
        "{text}"
    );
    let status = get(&fixture, "/statusz", "application/json;g=config.k8s.io;v=v1beta1;as=Statusz");
    let status: Value = serde_json::from_slice(&status.body).unwrap();
    assert_eq!(status["startTime"], "1970-01-01T00:00:00Z");
    assert!(status["uptimeSeconds"].as_i64().unwrap() > 1_000_000_000);
    assert!(status["paths"].as_array().unwrap().contains(&json!("/configz")));
}

#[test]
fn put_sets_the_log_level() {
    let fixture = Fixture::new(|_| {});
    let put = |body: &str| {
        let mut request = request(Method::Put, "/debug/flags/v");
        request.body = body.as_bytes().to_vec();
        fixture.send(&request)
    };
    let before = log::max_level();
    let response = put("4");
    assert_eq!(response.brief(), (200, "successfully set klog.logging.verbosity to 4\n".to_owned()));
    assert_eq!(response.header("Content-Type"), "text/plain");
    assert_eq!(log::max_level(), log::LevelFilter::Debug);
    assert_eq!(put("9").status, 200);
    assert_eq!(log::max_level(), log::LevelFilter::Trace);
    log::set_max_level(before);
    for bad in ["", "x", "4\n", "99999999999", "\u{ff}"] {
        let response = put(bad);
        assert_eq!(response.status, 400, "{bad}");
        assert!(response.text().starts_with("failed set klog.logging.verbosity "), "{}", response.text());
    }
    let response = fixture.get("/debug/flags/v");
    assert_eq!(response.brief(), (406, "unsupported http method\n".to_owned()));
    assert_eq!(log::max_level(), before);
}
