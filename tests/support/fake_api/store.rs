//! The objects, their versions and their history.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::http::ReceivedRequest;
use super::status;

/// Where an object or a collection is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ResourcePath {
    /// `/api/v1` or `/apis/group/version`.
    pub prefix: String,
    pub plural: String,
    pub namespace: String,
    pub name: String,
    pub subresource: String,
}

impl ResourcePath {
    /// From a URL's path.
    pub(crate) fn parse(text: &str) -> Option<ResourcePath> {
        let parts: Vec<&str> = text.trim_matches('/').split('/').collect();
        let (prefix, rest) = match parts.as_slice() {
            ["api", "v1", rest @ ..] => ("/api/v1".to_owned(), rest),
            ["apis", group, version, rest @ ..] => (format!("/apis/{group}/{version}"), rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
            rest => ("", rest),
        };
        let segment = |index: usize| rest.get(index).map(|part| (*part).to_owned()).unwrap_or_default();
        let (plural, name, subresource) = (segment(0), segment(1), segment(2));
        (!plural.is_empty()).then(|| ResourcePath {
            prefix,
            plural,
            namespace: namespace.to_owned(),
            name,
            subresource,
        })
    }

    fn object(&self, name: &str) -> ResourcePath {
        ResourcePath { name: name.to_owned(), subresource: String::new(), ..self.clone() }
    }

    /// Whether an object at `other` belongs to this collection, or is this object.
    fn holds(&self, other: &ResourcePath) -> bool {
        (&self.prefix, &self.plural) == (&other.prefix, &other.plural)
            && (self.namespace.is_empty() || self.namespace == other.namespace)
            && (self.name.is_empty() || self.name == other.name)
    }

    fn api_version(&self) -> String {
        self.prefix.trim_start_matches("/apis/").trim_start_matches("/api/").to_owned()
    }

    fn kind(&self) -> String {
        let known = [
            ("pods", "Pod"),
            ("nodes", "Node"),
            ("services", "Service"),
            ("secrets", "Secret"),
            ("configmaps", "ConfigMap"),
            ("events", "Event"),
            ("leases", "Lease"),
            ("runtimeclasses", "RuntimeClass"),
            ("csinodes", "CSINode"),
            ("csidrivers", "CSIDriver"),
            ("serviceaccounts", "ServiceAccount"),
            ("certificatesigningrequests", "CertificateSigningRequest"),
        ];
        let found = known.iter().find(|(plural, _)| *plural == self.plural);
        found.map_or_else(|| self.plural.clone(), |(_, kind)| (*kind).to_owned())
    }
}

struct StoredChange {
    version: u64,
    path: ResourcePath,
    before: Option<Value>,
    after: Option<Value>,
}

#[derive(Default)]
pub(crate) struct Store {
    version: u64,
    objects: BTreeMap<ResourcePath, Value>,
    past: Vec<StoredChange>,
    /// What lies before is forgotten.
    oldest: u64,
    /// Versions at which bookmarks were sent.
    bookmarks: u64,
    /// Events come twice, and once more after others.
    pub repeats_events: bool,
    /// The longest page of a list, whatever is asked for.
    pub page: Option<usize>,
    /// How long tokens live, whatever is asked for.
    pub token_seconds: Option<i64>,
    tokens: u64,
    /// The versions in which there are ClusterTrustBundles and PodCertificateRequests; empty: v1.
    pub certificate_versions: Vec<&'static str>,
}

/// How far a watch has come.
pub(crate) struct WatchPosition {
    version: u64,
    bookmarks: u64,
}

type Response = (u16, Value);

impl Store {
    pub(crate) fn get(&self, path: &ResourcePath) -> Option<&Value> {
        self.objects.get(&path.object(&path.name))
    }

    pub(crate) fn put(&mut self, path: &ResourcePath, mut object: Value) -> Value {
        let key = path.object(&path.name);
        let before = self.objects.get(&key).cloned();
        self.version += 1;
        object["kind"] = json!(path.kind());
        object["apiVersion"] = json!(path.api_version());
        if !object["metadata"].is_object() {
            object["metadata"] = json!({});
        }
        let meta = &mut object["metadata"];
        meta["name"] = json!(path.name);
        if !path.namespace.is_empty() {
            meta["namespace"] = json!(path.namespace);
        }
        meta["resourceVersion"] = json!(self.version.to_string());
        let uid = before.as_ref().map(|before| before["metadata"]["uid"].clone());
        if !meta["uid"].is_string() {
            meta["uid"] =
                uid.unwrap_or_else(|| json!(format!("00000000-0000-4000-8000-{:012x}", self.version)));
        }
        if !meta["creationTimestamp"].is_string() {
            let seconds = Timestamp::now().as_second();
            meta["creationTimestamp"] = json!(Timestamp::from_second(seconds).unwrap().to_string());
        }
        self.objects.insert(key.clone(), object.clone());
        self.past.push(StoredChange {
            version: self.version,
            path: key,
            before,
            after: Some(object.clone()),
        });
        object
    }

    pub(crate) fn remove(&mut self, path: &ResourcePath) -> Option<Value> {
        let key = path.object(&path.name);
        let mut before = self.objects.remove(&key)?;
        self.version += 1;
        before["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.past.push(StoredChange {
            version: self.version,
            path: key,
            before: Some(before.clone()),
            after: None,
        });
        Some(before)
    }

    pub(crate) fn compact(&mut self) {
        self.version += 1;
        self.oldest = self.version;
        self.past.clear();
    }

    pub(crate) fn raise_versions(&mut self) {
        self.version += 1_000_000;
    }

    pub(crate) fn restore(&mut self) {
        self.past.clear();
        self.oldest = 0;
        self.version = 0;
        for (path, object) in &mut self.objects {
            self.version += 1;
            object["metadata"]["resourceVersion"] = json!(self.version.to_string());
            if path.plural == "pods" {
                object["status"] = json!({"phase": "Pending"});
            }
        }
    }

    /// The objects of a collection.
    pub(crate) fn all(&self, path: &ResourcePath) -> Vec<Value> {
        self.objects.iter().filter(|(key, _)| path.holds(key)).map(|(_, object)| object.clone()).collect()
    }

    pub(crate) fn bookmark(&mut self) {
        self.bookmarks += 1;
    }

    /// Anything but a watch.
    pub(crate) fn respond(&mut self, request: &ReceivedRequest) -> Response {
        if let Some(response) = self.certificates(&request.path()) {
            return response;
        }
        let Some(path) = ResourcePath::parse(&request.path()) else {
            return (404, status(404, "NotFound", "the server could not find the requested resource"));
        };
        match request.method.as_str() {
            "GET" if path.name.is_empty() => self.list(&path, request),
            "GET" => match self.get(&path) {
                Some(object) => (200, object.clone()),
                None => not_found(&path),
            },
            "POST" if path.subresource == "token" => (201, self.token(&path, &request.body)),
            "POST" => self.create(&path, request.body.clone()),
            "PUT" => self.update(&path, &request.body, |_, new| new.clone()),
            "PATCH" => self.update(&path, &request.body, |old, patch| {
                let mut new = old.clone();
                merge(&mut new, patch, "");
                new
            }),
            "DELETE" => self.delete(&path, &request.body),
            _ => (405, status(405, "MethodNotAllowed", "the server does not allow this method")),
        }
    }

    /// The response to a request for the resources of a version of certificates.k8s.io, or for one that
    /// this version does not have.
    fn certificates(&self, path: &str) -> Option<Response> {
        let plurals = ["clustertrustbundles", "podcertificaterequests"];
        let (version, rest) = path.strip_prefix("/apis/certificates.k8s.io/").map(|below| {
            let (version, rest) = below.split_once('/').unwrap_or((below, ""));
            (version.to_owned(), rest.to_owned())
        })?;
        let has_any = match self.certificate_versions.as_slice() {
            [] => version == "v1",
            versions => versions.contains(&version.as_str()),
        };
        let is_concerned = rest.split('/').any(|part| plurals.contains(&part));
        // As the real one: the body is no Status.
        let missing = (404, json!("404 page not found"));
        match (rest.is_empty(), has_any) {
            (true, true) => {
                let resources: Vec<Value> = plurals.iter().map(|plural| json!({ "name": plural })).collect();
                let group_version = format!("certificates.k8s.io/{version}");
                let kind = "APIResourceList";
                Some((200, json!({"kind": kind, "groupVersion": group_version, "resources": resources})))
            }
            // The version itself is there for CertificateSigningRequests.
            (true, false) if version == "v1" => Some((200, json!({"resources": []}))),
            (true, false) => Some(missing),
            (false, false) if is_concerned => Some(missing),
            (false, _) => None,
        }
    }

    fn list(&self, path: &ResourcePath, request: &ReceivedRequest) -> Response {
        let all: Vec<Value> = self.selected(path, request).cloned().collect();
        let limit: usize = request.parameter("limit").parse().unwrap_or(usize::MAX);
        let start: usize = request.parameter("continue").parse().unwrap_or(0);
        // As the real one: a list at "0" comes whole from a cache.
        let limit = if request.parameter("resourceVersion") == "0" { usize::MAX } else { limit };
        // Some stores page whatever is asked for, as long as pages are.
        let limit = match self.page {
            Some(page) if !request.parameter("limit").is_empty() => page,
            _ => limit,
        };
        let end = start.saturating_add(limit).min(all.len());
        let next = if end < all.len() { end.to_string() } else { String::new() };
        let items: Vec<Value> = all[start.min(end)..end]
            .iter()
            .map(|item| {
                let mut item = item.clone();
                // Items of a list do not say what they are.
                item.as_object_mut().unwrap().retain(|key, _| key != "kind" && key != "apiVersion");
                item
            })
            .collect();
        let meta = json!({"resourceVersion": self.version.to_string(), "continue": next});
        let kind = format!("{}List", path.kind());
        (200, json!({"kind": kind, "apiVersion": path.api_version(), "metadata": meta, "items": items}))
    }

    fn selected<'a>(
        &'a self,
        path: &'a ResourcePath,
        request: &'a ReceivedRequest,
    ) -> impl Iterator<Item = &'a Value> {
        self.objects
            .iter()
            .filter(|(key, object)| path.holds(key) && matches(request, object))
            .map(|(_, object)| object)
    }

    fn create(&mut self, path: &ResourcePath, object: Value) -> Response {
        let mut name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        if name.is_empty() {
            name = format!(
                "{}{:05x}",
                object["metadata"]["generateName"].as_str().unwrap_or_default(),
                self.version
            );
        }
        let path = path.object(&name);
        if path.plural.ends_with("reviews") {
            return (201, object);
        }
        if self.objects.contains_key(&path) {
            return (
                409,
                status(409, "AlreadyExists", &format!("{} \"{name}\" already exists", path.plural)),
            );
        }
        (201, self.put(&path, object))
    }

    fn update(
        &mut self,
        path: &ResourcePath,
        body: &Value,
        make: impl Fn(&Value, &Value) -> Value,
    ) -> Response {
        let Some(old) = self.get(path).cloned() else { return not_found(path) };
        for (field, wanted) in
            [("resourceVersion", &body["metadata"]["resourceVersion"]), ("uid", &body["metadata"]["uid"])]
        {
            if wanted.as_str().is_some_and(|wanted| !wanted.is_empty() && old["metadata"][field] != wanted) {
                let text = format!(
                    "Operation cannot be fulfilled on {} \"{}\": the object has been modified; \
                    please apply your changes to the latest version and try again",
                    path.plural, path.name
                );
                return (409, status(409, "Conflict", &text));
            }
        }
        let made = make(&old, body);
        let new = if path.subresource == "status" {
            let mut new = old.clone();
            new["status"] = made["status"].clone();
            new
        } else {
            made
        };
        if new == old {
            return (200, old);
        }
        (200, self.put(path, new))
    }

    pub(crate) fn delete(&mut self, path: &ResourcePath, options: &Value) -> Response {
        let Some(mut old) = self.get(path).cloned() else { return not_found(path) };
        let wanted = &options["preconditions"]["uid"];
        if wanted.is_string() && *wanted != old["metadata"]["uid"] {
            return (
                409,
                status(409, "Conflict", "the UID in the precondition does not match the UID in record"),
            );
        }
        let default = if path.plural == "pods" && old["spec"]["nodeName"].is_string() {
            old["spec"]["terminationGracePeriodSeconds"].as_i64().unwrap_or(30)
        } else {
            0
        };
        let grace = options["gracePeriodSeconds"].as_i64().unwrap_or(default);
        if path.plural == "pods" && grace > 0 {
            let deadline = Timestamp::now().as_second() + grace;
            old["metadata"]["deletionTimestamp"] =
                json!(Timestamp::from_second(deadline).unwrap().to_string());
            old["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
            return (200, self.put(path, old));
        }
        (200, self.remove(path).unwrap_or_default())
    }

    /// `token-of-ACCOUNT-NUMBER-END`, the end in seconds since 1970.
    fn token(&mut self, path: &ResourcePath, body: &Value) -> Value {
        self.tokens += 1;
        let mut spec = body["spec"].clone();
        let seconds = self.token_seconds.or(spec["expirationSeconds"].as_i64()).unwrap_or(3600);
        spec["expirationSeconds"] = json!(seconds);
        let end = Timestamp::now().as_second() + seconds;
        let token = format!("token-of-{}-{}-{end}", path.name, self.tokens);
        json!({"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": path.name}, "spec": spec,
            "status": {"token": token, "expirationTimestamp": Timestamp::from_second(end).unwrap()}})
    }

    /// The first lines of a watch.
    pub(crate) fn open_watch(
        &self,
        path: &ResourcePath,
        request: &ReceivedRequest,
    ) -> Result<(Vec<String>, WatchPosition), Response> {
        let wanted = request.parameter("resourceVersion");
        let from: u64 = wanted.parse().unwrap_or(0);
        if from > 0 && from < self.oldest {
            let text = format!("too old resource version: {from} ({})", self.oldest);
            return Err((410, status(410, "Expired", &text)));
        }
        let position = WatchPosition { version: self.version, bookmarks: self.bookmarks };
        let mut lines = Vec::new();
        if request.parameter("sendInitialEvents") == "true" {
            if from > self.version {
                let text = format!("Too large resource version: {from}, current: {}", self.version);
                return Err((504, status(504, "Timeout", &text)));
            }
            lines.extend(self.selected(path, request).map(|object| line("ADDED", object)));
            let meta = json!({"resourceVersion": self.version.to_string(),
                "annotations": {"k8s.io/initial-events-end": "true"}});
            lines.push(line(
                "BOOKMARK",
                &json!({"kind": path.kind(), "apiVersion": path.api_version(), "metadata": meta}),
            ));
            return Ok((lines, position));
        }
        if from == 0 {
            lines.extend(self.selected(path, request).map(|object| line("ADDED", object)));
            return Ok((lines, position));
        }
        Ok((lines, WatchPosition { version: from, ..position }))
    }

    /// What happened since.
    pub(crate) fn changes_since(
        &self,
        path: &ResourcePath,
        request: &ReceivedRequest,
        position: &mut WatchPosition,
    ) -> Result<Vec<String>, Value> {
        if position.version < self.oldest {
            return Err(status(410, "Expired", "too old resource version"));
        }
        let mut lines = Vec::new();
        for past in self.past.iter().filter(|past| past.version > position.version && path.holds(&past.path))
        {
            let before = past.before.as_ref().filter(|object| matches(request, object));
            let after = past.after.as_ref().filter(|object| matches(request, object));
            match (before, after) {
                (None, Some(object)) => lines.push(line("ADDED", object)),
                (Some(_), Some(object)) => lines.push(line("MODIFIED", object)),
                (Some(object), None) => lines.push(line("DELETED", past.after.as_ref().unwrap_or(object))),
                (None, None) => {}
            }
        }
        position.version = position.version.max(self.version);
        if self.repeats_events && !lines.is_empty() {
            lines.extend(lines.clone());
            // Of what is there, an event that others have overtaken.
            let old = self.objects.iter().find(|(key, object)| path.holds(key) && matches(request, object));
            lines.extend(old.map(|(_, object)| line("MODIFIED", object)));
        }
        if position.bookmarks != self.bookmarks {
            position.bookmarks = self.bookmarks;
            let meta = json!({"resourceVersion": self.version.to_string()});
            lines.push(line(
                "BOOKMARK",
                &json!({"kind": path.kind(), "apiVersion": path.api_version(), "metadata": meta}),
            ));
        }
        Ok(lines)
    }
}

fn line(kind: &str, object: &Value) -> String {
    json!({"type": kind, "object": object}).to_string()
}

fn not_found(path: &ResourcePath) -> Response {
    (404, status(404, "NotFound", &format!("{} \"{}\" not found", path.plural, path.name)))
}

/// Whether an object is selected: equalities and inequalities, by commas.
fn matches(request: &ReceivedRequest, object: &Value) -> bool {
    let all = |text: String, value: &dyn Fn(&str) -> String| {
        text.split(',').filter(|term| !term.is_empty()).all(|term| match term.split_once("!=") {
            Some((key, unwanted)) => value(key) != unwanted,
            None => {
                term.split_once('=').is_some_and(|(key, wanted)| value(key) == wanted.trim_start_matches('='))
            }
        })
    };
    let field = |path: &str| {
        let found = path.split('.').try_fold(object, |value, part| value.get(part));
        found.and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let label = |name: &str| object["metadata"]["labels"][name].as_str().unwrap_or_default().to_owned();
    all(request.parameter("fieldSelector"), &field) && all(request.parameter("labelSelector"), &label)
}

/// A patch; lists that have a merge key are merged by it, others are replaced.
fn merge(into: &mut Value, patch: &Value, field: &str) {
    match (into, patch) {
        (Value::Object(into), Value::Object(patch)) => merge_map(into, patch),
        (Value::Array(into), Value::Array(patch)) if merge_key(field).is_some() => {
            let key = merge_key(field).unwrap();
            for item in patch {
                let index = into.iter().position(|old| old[key] == item[key]);
                match index {
                    Some(index) if item["$patch"] == "delete" => drop(into.remove(index)),
                    Some(index) => merge(&mut into[index], item, ""),
                    None if item["$patch"] == "delete" || item["$patch"] == "replace" => {}
                    None => into.push(item.clone()),
                }
            }
        }
        (into, patch) => *into = patch.clone(),
    }
}

fn merge_map(into: &mut Map<String, Value>, patch: &Map<String, Value>) {
    for (key, value) in patch.iter().filter(|(key, _)| !key.starts_with('$')) {
        if value.is_null() {
            into.remove(key);
        } else if let Some(old) = into.get_mut(key) {
            merge(old, value, key);
        } else {
            into.insert(key.clone(), value.clone());
        }
    }
}

fn merge_key(field: &str) -> Option<&'static str> {
    match field {
        "conditions" | "addresses" => Some("type"),
        "podIPs" | "hostIPs" => Some("ip"),
        "ownerReferences" => Some("uid"),
        _ => None,
    }
}
