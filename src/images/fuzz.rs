//! Hostile pull secrets, lists of images, and image archives.

use std::collections::BTreeSet;

use jiff::Timestamp;

use super::gc::{GcPolicy, KnownImages};
use super::listed::RuntimeImage;
use super::pull::PullSecrets;
use super::set;
use crate::kube::objects::{Key, Kind, Object, Objects};
use crate::kube::{PodDependencies, PodObjects};
use crate::model::api;
use crate::model::ids::ImageRef;
use crate::model::pod::Pod;
use crate::transport::generated::{Message, runtime};
use crate::util::fuzzing::{Budget, Target, nested, repeated};
use crate::util::stop::StopToken;
use crate::util::threads::Stack;

/// The largest Secret.
const SECRET_BYTES: usize = 1 << 20;
/// gRPC allows 16 MiB; a smaller size shows how the cost grows.
const RESPONSE_BYTES: usize = 4 << 20;

pub(crate) fn targets() -> Vec<Target> {
    let mut all = set::fuzz::targets();
    all.extend(own_targets());
    all
}

fn own_targets() -> Vec<Target> {
    vec![
        Target {
            name: "images/credentials",
            // Pod workers pull.
            stack: Stack::Small,
            max_bytes: SECRET_BYTES,
            budget: Budget { per_byte: 200, ..Budget::LINEAR },
            worst: |max| {
                let single_key = |key: &str| config(|_| key.to_owned(), key.len() + 100);
                let many = |key: fn(usize) -> String| config(key, max);
                vec![
                    ("20,000 stars", single_key(&format!("{}.b", "*".repeat(20_000)))),
                    ("stars as long as a Secret", single_key(&"*".repeat(max - 200))),
                    ("stars between letters", single_key(&format!("{}b.b", "*a".repeat(124)))),
                    // As many as one Secret may have, each as long as a host may be.
                    ("the most stars of one Secret", config(|i| format!("{}{i}.b", "*a".repeat(120)), 265_000)),
                    ("question marks", many(|i| format!("{}{i}.b", "?*".repeat(120)))),
                    ("keys of one letter", many(|i| i.to_string())),
                    ("parts of a host", single_key(&"*.".repeat(126))),
                    ("dots", single_key(&".".repeat(max - 200))),
                    ("slashes", single_key(&"/".repeat(max - 200))),
                    ("colons", single_key(&":".repeat(max - 200))),
                    ("schemes", single_key(&"a://".repeat(max / 4 - 100))),
                    ("long paths", many(|i| format!("r.example/{}{i}", "a/".repeat(2000)))),
                    ("one key", many(|_| "r.example".to_owned())),
                    ("a long password", [br#"{"auths":{"r.example":{"username":"u","password":""#.as_slice(), &b"<".repeat(max - 100), br#""}}}"#].concat()),
                    ("base64", [br#"{"auths":{"r.example":{"auth":""#.as_slice(), &b"Onh4".repeat(max / 4 - 25), br#""}}}"#].concat()),
                    ("nested arrays", nested("[", "]", max)),
                    ("nested objects", nested("{\"auths\":", "}", max)),
                ]
            },
            seeds: &[
                br#"{"auths":{"https://index.docker.io/v1/":{"auth":"dTpw"},"*.r.example:5000/team":{"username":"u","password":"p"},"a?.*b*.c":{"auth":"dTpw"}}}"#,
                br#"{"r.example":{"username":"u","password":"p","email":"x"},"[fd00::1]:5000/v2/":{"auth":"dTpw"}}"#,
            ],
            run: credentials,
        },
        Target {
            name: "images/list",
            // The `clean` thread.
            stack: Stack::Large,
            max_bytes: RESPONSE_BYTES,
            // An empty item takes two bytes and is an object of some 300 bytes.
            budget: Budget { per_byte: 300, ..Budget::LINEAR },
            worst: |max| {
                let list = |each: usize, image: fn(usize) -> runtime::Image| {
                    let images = (0..max / each).map(image).collect();
                    let bytes = runtime::ListImagesResponse { images, ..Default::default() };
                    let bytes = bytes.write_to_bytes().unwrap();
                    assert!(bytes.len() <= max, "{} bytes", bytes.len());
                    bytes
                };
                let image = |i: usize| runtime::Image { id: format!("i{i}"), ..Default::default() };
                let tags = runtime::Image {
                    repo_tags: (0..max / 16).map(|i| format!("r/a:{i}")).collect(),
                    ..image(0)
                };
                let tags = runtime::ListImagesResponse { images: vec![tags], ..Default::default() };
                vec![
                    ("images", list(40, image)),
                    ("images of one id", list(40, |i| runtime::Image { size: i as u64, id: "i".into(), ..Default::default() })),
                    ("tags of one image", tags.write_to_bytes().unwrap()),
                    ("sizes", list(40, |_| runtime::Image { size: u64::MAX, ..Default::default() })),
                    ("empty items", [0x0a, 0].repeat(max / 2)),
                ]
            },
            seeds: &[
                b"\x0a\x1c\x0a\x03abc\x12\x05r/a:1\x1a\x08r/a@sha1\x20\x05\x2a\x02\x08\x01\x0a\x07\x0a\x03def\x20\x07",
            ],
            run: image_list,
        },
    ]
}

/// A docker configuration with as many keys as fit.
fn config(key: impl Fn(usize) -> String, max: usize) -> Vec<u8> {
    repeated(
        r#"{"auths":{"own.example":{"auth":"dTpw"}"#,
        |i| format!(r#","{}":{{"auth":"dTpw"}}"#, key(i)),
        "}}",
        max,
    )
}

/// Two Secrets of these bytes, and a pod that pulls with them.
fn credentials(bytes: &[u8]) {
    let secret = |kind: &str, key: &str| Object {
        secret_type: kind.to_owned(),
        data: [(key.to_owned(), bytes.to_vec())].into(),
        ..Object::default()
    };
    let objects = Objects::fixed(vec![
        (Key::new(Kind::Secret, "n", "new"), secret("kubernetes.io/dockerconfigjson", ".dockerconfigjson")),
        (Key::new(Kind::Secret, "n", "old"), secret("kubernetes.io/dockercfg", ".dockercfg")),
    ]);
    let api = PodDependencies::for_tests(objects);
    let value = serde_json::json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {"containers": [], "imagePullSecrets": [{"name": "new"}, {"name": "old"}]}});
    let pod = Pod::from(serde_json::from_value::<api::Pod>(value).unwrap());
    let secrets = PullSecrets::read(&pod, Some(PodObjects::Api(&api.objects)), &StopToken::never());
    // A host as long as one may be, and the one that fits most of what stars leave open.
    let (long, parts) = (format!("{}.b/x", "a".repeat(250)), format!("{}/x", "a.".repeat(126)));
    for image in ["r.example/team/x:1", "busybox", &long, &parts] {
        let _ = secrets.for_image(image);
        let _ = secrets.proofs(image);
    }
}

fn image_list(bytes: &[u8]) {
    let Ok(response) = runtime::ListImagesResponse::parse_from_bytes(bytes) else { return };
    let seen: Vec<RuntimeImage> = response.images.into_iter().map(RuntimeImage::from).collect();
    let used: BTreeSet<ImageRef> = [ImageRef::from("r/a:1")].into();
    let (start, policy) = (Timestamp::UNIX_EPOCH, GcPolicy::default());
    let mut known_images = KnownImages::new(start);
    for second in [0, 1, 1000] {
        let now = start + jiff::SignedDuration::from_secs(second);
        known_images.detect(&seen, &used, now);
        let _ = (known_images.expired(&policy, now), known_images.candidates(&policy, now));
    }
}
