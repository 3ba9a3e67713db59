//! The lease as the API server has sent it: it is sent back in the same encoding, with what a renewal changes
//! (pure; Go: k8s.io/api/coordination/v1).
//!
//! Of a lease in Protocol Buffers only the fields are read that a renewal changes. All others are sent back with
//! the bytes with which they came, also those that no release had when this was written. The managed fields are
//! left out, and the server keeps them.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::kube::client::JSON;
use crate::kube::envelope::{self, Envelope};
use crate::util::wire::{self, Content};

pub(super) const NAMESPACE: &str = "kube-node-lease";

/// The type of the object in Protocol Buffers.
const TYPE: Envelope<'static> =
    Envelope { api_version: API_VERSION.as_bytes(), kind: KIND.as_bytes(), object: &[] };
const API_VERSION: &str = "coordination.k8s.io/v1";
const KIND: &str = "Lease";
/// The owner of a lease.
const OWNER_VERSION: &str = "v1";
const OWNER_KIND: &str = "Node";
/// An owner needs more memory than its shortest message.
const MAX_OWNERS: usize = 1_000;

/// A lease in its encoding.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum LeaseObject {
    Json(Map<String, Value>),
    Protobuf(EncodedLease),
}

/// What a renewal writes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Renewal<'a> {
    /// The name of the node.
    pub(super) node: &'a str,
    /// The UID of the node's object, if it is known.
    pub(super) owner: Option<&'a str>,
    /// The duration of the lease.
    pub(super) seconds: i32,
    pub(super) time: Timestamp,
}

/// Why a body is no lease.
#[derive(Debug, thiserror::Error)]
#[error("the response is no lease: {0}")]
pub(super) struct NoLease(String);

impl LeaseObject {
    /// A lease that the server does not have yet.
    pub(super) fn new(node: &str, is_json: bool) -> LeaseObject {
        if is_json {
            let metadata = json!({"name": node, "namespace": NAMESPACE});
            let lease = [("apiVersion", API_VERSION.into()), ("kind", KIND.into()), ("metadata", metadata)];
            return LeaseObject::Json(
                lease.map(|(key, value)| (key.to_owned(), value)).into_iter().collect(),
            );
        }
        let mut metadata = Vec::new();
        wire::bytes(1, node.as_bytes(), &mut metadata);
        wire::bytes(3, NAMESPACE.as_bytes(), &mut metadata);
        LeaseObject::Protobuf(EncodedLease { metadata, ..EncodedLease::default() })
    }

    /// Reads the body of a response.
    pub(super) fn from_body(body: &[u8]) -> Result<LeaseObject, NoLease> {
        if envelope::is_sealed(body) {
            let lease = EncodedLease::decode(body);
            return lease
                .map(LeaseObject::Protobuf)
                .ok_or_else(|| NoLease("it is not in its form".to_owned()));
        }
        let mut lease: Map<String, Value> =
            serde_json::from_slice(body).map_err(|error| NoLease(error.to_string()))?;
        let metadata = lease.get_mut("metadata").and_then(Value::as_object_mut);
        let metadata = metadata
            .filter(|metadata| metadata.get("name").is_some_and(Value::is_string))
            .ok_or_else(|| NoLease("it has no name".to_owned()))?;
        metadata.remove("managedFields");
        Ok(LeaseObject::Json(lease))
    }

    /// The body of a request: its content type and its bytes.
    pub(super) fn to_body(&self) -> (&'static str, Vec<u8>) {
        match self {
            // Values of JSON have such a form.
            LeaseObject::Json(lease) => (JSON, serde_json::to_vec(lease).unwrap_or_default()),
            LeaseObject::Protobuf(lease) => (envelope::CONTENT_TYPE, lease.encode()),
        }
    }

    /// The UID of the object of this node that owns the lease.
    pub(super) fn owner(&self, node: &str) -> Option<&str> {
        match self {
            LeaseObject::Json(lease) => {
                let owners = lease.get("metadata")?.get("ownerReferences")?.as_array()?;
                owners.iter().find(|owner| is_node(owner, node))?.get("uid")?.as_str()
            }
            LeaseObject::Protobuf(lease) => {
                lease.owners.iter().find(|owner| owner.is_node(node)).map(|owner| owner.uid.as_str())
            }
        }
    }

    pub(super) fn renew(&mut self, renewal: &Renewal<'_>) {
        match self {
            LeaseObject::Json(lease) => renew(lease, renewal),
            LeaseObject::Protobuf(lease) => lease.renew(renewal),
        }
    }
}

fn is_node(owner: &Value, node: &str) -> bool {
    owner.get("kind").is_some_and(|kind| kind == OWNER_KIND)
        && owner.get("name").is_some_and(|name| name == node)
}

/// The object or the array of this name. A value of another kind is replaced.
fn member<'a>(object: &'a mut Map<String, Value>, name: &str, default: Value) -> &'a mut Value {
    let value = object.entry(name).or_insert(Value::Null);
    if std::mem::discriminant(value) != std::mem::discriminant(&default) {
        *value = default;
    }
    value
}

fn renew(lease: &mut Map<String, Value>, renewal: &Renewal<'_>) {
    let spec = member(lease, "spec", json!({}));
    spec["holderIdentity"] = renewal.node.into();
    spec["leaseDurationSeconds"] = renewal.seconds.into();
    spec["renewTime"] = format!("{:.6}", renewal.time).into();
    let Some(uid) = renewal.owner else { return };
    let metadata = member(lease, "metadata", json!({})).as_object_mut();
    let owners = metadata.map(|metadata| member(metadata, "ownerReferences", json!([])));
    let Some(owners) = owners.and_then(Value::as_array_mut) else { return };
    match owners.iter_mut().find(|owner| is_node(owner, renewal.node)) {
        // The node was registered again: without this the lease would be removed with the old one.
        Some(owner) => owner["uid"] = uid.into(),
        None => owners.push(json!({
            "apiVersion": OWNER_VERSION, "kind": OWNER_KIND, "name": renewal.node, "uid": uid,
        })),
    }
}

/// A lease in Protocol Buffers. The numbers of fields are those of generated.proto in k8s.io/api/coordination/v1
/// and apimachinery/pkg/apis/meta/v1.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct EncodedLease {
    /// The fields of the metadata but owners and managed fields.
    metadata: Vec<u8>,
    owners: Vec<Owner>,
    /// The fields of the spec that a renewal does not change, and those that it does.
    spec: Vec<u8>,
    renewed: Vec<u8>,
    /// All others.
    rest: Vec<u8>,
}

/// An owner reference.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Owner {
    kind: Vec<u8>,
    name: Vec<u8>,
    uid: String,
    /// The fields but these.
    rest: Vec<u8>,
}

impl EncodedLease {
    fn decode(body: &[u8]) -> Option<EncodedLease> {
        let sealed = envelope::open(body)?;
        if (Envelope { object: &[], ..sealed }) != TYPE {
            return None;
        }
        let (mut lease, mut rest) = (EncodedLease::default(), sealed.object);
        while !rest.is_empty() {
            let field = wire::next_field(&mut rest)?;
            match (field.number, field.content) {
                (1, Content::Bytes(metadata)) => lease.read_metadata(metadata)?,
                (2, Content::Bytes(spec)) => lease.read_spec(spec)?,
                _ => lease.rest.extend_from_slice(field.encoded),
            }
        }
        // Without a name it cannot be renewed.
        (!lease.metadata.is_empty()).then_some(lease)
    }

    fn read_metadata(&mut self, mut rest: &[u8]) -> Option<()> {
        while !rest.is_empty() {
            let field = wire::next_field(&mut rest)?;
            match (field.number, field.content) {
                (13, Content::Bytes(_)) if self.owners.len() == MAX_OWNERS => return None,
                (13, Content::Bytes(owner)) => self.owners.push(Owner::decode(owner)?),
                // Managed fields.
                (17, _) => {}
                _ => self.metadata.extend_from_slice(field.encoded),
            }
        }
        Some(())
    }

    fn read_spec(&mut self, mut rest: &[u8]) -> Option<()> {
        while !rest.is_empty() {
            let field = wire::next_field(&mut rest)?;
            let part = if matches!(field.number, 1 | 2 | 4) { &mut self.renewed } else { &mut self.spec };
            part.extend_from_slice(field.encoded);
        }
        Some(())
    }

    fn encode(&self) -> Vec<u8> {
        let mut object = self.rest.clone();
        wire::delimited(1, &mut object, |out| {
            out.extend_from_slice(&self.metadata);
            for owner in &self.owners {
                wire::bytes(13, &owner.encode(), out);
            }
        });
        wire::bytes(2, &[&self.spec[..], &self.renewed].concat(), &mut object);
        envelope::seal(&Envelope { object: &object, ..TYPE })
    }

    fn renew(&mut self, renewal: &Renewal<'_>) {
        self.renewed.clear();
        wire::bytes(1, renewal.node.as_bytes(), &mut self.renewed);
        wire::varint_field(2, i64::from(renewal.seconds).cast_unsigned(), &mut self.renewed);
        wire::bytes(4, &micro_time(renewal.time), &mut self.renewed);
        let Some(uid) = renewal.owner else { return };
        let uid = uid.to_owned();
        match self.owners.iter_mut().find(|owner| owner.is_node(renewal.node)) {
            // As above.
            Some(owner) => owner.uid = uid,
            None => {
                let mut rest = Vec::new();
                wire::bytes(5, OWNER_VERSION.as_bytes(), &mut rest);
                let (kind, name) = (OWNER_KIND.into(), renewal.node.into());
                self.owners.push(Owner { kind, name, uid, rest });
            }
        }
    }
}

impl Owner {
    fn decode(mut rest: &[u8]) -> Option<Owner> {
        let mut owner = Owner::default();
        while !rest.is_empty() {
            let field = wire::next_field(&mut rest)?;
            match (field.number, field.content) {
                (1, Content::Bytes(kind)) => owner.kind = kind.to_vec(),
                (3, Content::Bytes(name)) => owner.name = name.to_vec(),
                (4, Content::Bytes(uid)) => owner.uid = String::from_utf8(uid.to_vec()).ok()?,
                _ => owner.rest.extend_from_slice(field.encoded),
            }
        }
        Some(owner)
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        wire::bytes(1, &self.kind, &mut out);
        wire::bytes(3, &self.name, &mut out);
        wire::bytes(4, self.uid.as_bytes(), &mut out);
        out.extend_from_slice(&self.rest);
        out
    }

    fn is_node(&self, node: &str) -> bool {
        self.kind == OWNER_KIND.as_bytes() && self.name == node.as_bytes()
    }
}

/// Seconds and nanoseconds; as in JSON, microseconds are the smallest unit (Go: `MicroTime.ProtoMicroTime`).
fn micro_time(time: Timestamp) -> Vec<u8> {
    let mut out = Vec::new();
    let nanoseconds = i64::from(time.subsec_microsecond()) * 1_000;
    wire::varint_field(1, time.as_second().cast_unsigned(), &mut out);
    wire::varint_field(2, nanoseconds.cast_unsigned(), &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: i64 = 1_796_066_542;

    fn renewal(owner: &str) -> Renewal<'_> {
        let time = Timestamp::new(TIME, 123_456_789).unwrap();
        Renewal { node: "n", owner: Some(owner), seconds: 40, time }
    }

    /// A body with this message.
    fn sealed(object: &[u8]) -> Vec<u8> {
        let types = b"k8s\0\x0a\x1f\x0a\x16coordination.k8s.io/v1\x12\x05Lease";
        [&types[..], &field(2, object)].concat()
    }

    /// A field with a message or a text, of at most 255 bytes and with a number below 16.
    fn field(number: u8, content: &[u8]) -> Vec<u8> {
        let length = u8::try_from(content.len()).unwrap();
        let key = number << 3 | 2;
        // A byte has seven bits of a number.
        let head = if length < 0x80 { vec![key, length] } else { vec![key, length, length >> 7] };
        [head.as_slice(), content].concat()
    }

    fn bytes(lease: &LeaseObject) -> Vec<u8> {
        let (content_type, bytes) = lease.to_body();
        assert_eq!(content_type, "application/vnd.kubernetes.protobuf");
        bytes
    }

    /// holderIdentity 1, leaseDurationSeconds 2, and renewTime 4 with seconds 1 and nanos 2.
    const RENEWED: &[u8] = b"\x0a\x01n\x10\x28\x22\x0b\x08\xee\x99\xb7\xd8\x06\x10\x80\x94\xef\x3a";

    /// kind 1, name 3, uid 4 and apiVersion 5.
    fn owner(uid: &[u8]) -> Vec<u8> {
        [&b"\x0a\x04Node\x1a\x01n"[..], &field(4, uid), b"\x2a\x02v1"].concat()
    }

    #[test]
    fn lease_to_create_has_the_bytes_of_its_definition() {
        let mut lease = LeaseObject::new("n", false);
        lease.renew(&renewal("u"));
        // name 1, namespace 3 and ownerReferences 13.
        let metadata = [&b"\x0a\x01n\x1a\x0fkube-node-lease"[..], &field(13, &owner(b"u"))].concat();
        let expected = sealed(&[field(1, &metadata), field(2, RENEWED)].concat());
        assert_eq!(bytes(&lease), expected);
        assert_eq!(lease.owner("n"), Some("u"));
        // A renewal replaces what the last one has written.
        lease.renew(&renewal("u"));
        assert_eq!(bytes(&lease), expected);
        let mut json = LeaseObject::new("n", true);
        json.renew(&renewal("u"));
        let (content_type, body) = json.to_body();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            (content_type, &body["spec"]["leaseDurationSeconds"]),
            ("application/json", &Value::from(40))
        );
        assert_eq!(body["metadata"]["namespace"], NAMESPACE);
    }

    /// A lease with fields of other clients: the metadata, the spec, and fields of later releases in each message.
    fn stored() -> (Vec<u8>, Vec<u8>, Vec<u8>) {
        let metadata = [
            // name 1, uid 5, resourceVersion 6, a label 11, an annotation 12, a finalizer 14, and number 100.
            b"\x0a\x01n\x2a\x02id\x32\x017".as_slice(),
            b"\x5a\x06\x0a\x01a\x12\x01b\x62\x06\x0a\x01c\x12\x01d\x72\x01f",
            b"\xa2\x06\x03new",
        ];
        // leaseTransitions 5, strategy 6, preferredHolder 7, and number 101.
        let spec = b"\x28\x03\x32\x01s\x3a\x01p\xaa\x06\x03new".to_vec();
        // controller 6, blockOwnerDeletion 7, and number 102.
        let other = b"\x0a\x03Pod\x1a\x01p\x22\x01q\x2a\x02v1\x30\x01\x38\x01\xb2\x06\x03new".to_vec();
        (metadata.concat(), spec, other)
    }

    #[test]
    fn renewed_lease_has_all_fields_of_other_clients_also_those_of_later_releases() {
        let (metadata, spec, other) = stored();
        // Managed fields have number 17, whose key has two bytes, and the lease has a field 3.
        let managed = b"\x8a\x01\x03\x0a\x01m";
        let owners = [field(13, &owner(b"old")), field(13, &other)].concat();
        let old_spec = [&b"\x0a\x05other\x10\x07\x1a\x02\x08\x05\x22\0"[..], &spec].concat();
        let body = sealed(
            &[
                field(1, &[&metadata[..], managed, &owners].concat()),
                field(2, &old_spec),
                field(3, b"status"),
            ]
            .concat(),
        );
        let mut lease = LeaseObject::from_body(&body).unwrap();
        assert_eq!(lease.owner("n"), Some("old"));
        assert_eq!(lease.owner("p"), None);
        lease.renew(&renewal("u"));
        let owners = [field(13, &owner(b"u")), field(13, &other)].concat();
        // acquireTime 3 is not of the renewal.
        let new_spec = [&b"\x1a\x02\x08\x05"[..], &spec, RENEWED].concat();
        let expected = sealed(
            &[field(3, b"status"), field(1, &[metadata, owners].concat()), field(2, &new_spec)].concat(),
        );
        assert_eq!(bytes(&lease), expected);
        assert_eq!(LeaseObject::from_body(&expected).unwrap(), lease);
        // The UID of the node is not known yet.
        lease.renew(&Renewal { owner: None, ..renewal("") });
        assert_eq!(bytes(&lease), expected);
    }

    #[test]
    fn bytes_that_are_no_lease_are_an_error_and_no_byte_of_a_lease_can_be_missing() {
        let (metadata, spec, other) = stored();
        let metadata = [metadata, field(13, &other)].concat();
        let body = sealed(&[field(1, &metadata), field(2, &spec)].concat());
        assert!(LeaseObject::from_body(&body).is_ok());
        for length in 0..body.len() {
            assert!(LeaseObject::from_body(&body[..length]).is_err(), "{length}");
        }
        // Any other byte may be another lease.
        for index in 0..body.len() {
            for value in [0, 0x7f, 0x80, 0xff] {
                let mut changed = body.clone();
                changed[index] = value;
                if let Ok(mut lease) = LeaseObject::from_body(&changed) {
                    lease.renew(&renewal("u"));
                    let _ = (lease.to_body(), lease.owner("n"));
                }
            }
        }
        let pod = b"k8s\0\x0a\x09\x0a\x02v1\x12\x03Pod\x12\x00";
        let latin = sealed(&field(1, &field(13, b"\x22\x01\xff")));
        let mut owners = Vec::new();
        for _ in 0..=MAX_OWNERS {
            wire::bytes(13, b"", &mut owners);
        }
        let mut object = Vec::new();
        wire::bytes(1, &owners, &mut object);
        let many = envelope::seal(&Envelope { object: &object, ..TYPE });
        for wrong in [&pod[..], &latin, &many, b"", b"[]", b"<html>", br#"{"metadata":7}"#] {
            assert!(LeaseObject::from_body(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn json_lease_stays_json_without_its_managed_fields() {
        let body = br#"{"metadata":{"name":"n","labels":{"a":"b"},"managedFields":[{"manager":"m"}],
            "ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"n","uid":"old"}]},"spec":{}}"#;
        let mut lease = LeaseObject::from_body(body).unwrap();
        let time = Timestamp::new(TIME, 123_456_000).unwrap();
        lease.renew(&Renewal { time, ..renewal("u") });
        assert_eq!(lease.owner("n"), Some("u"));
        let (content_type, body) = lease.to_body();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!((content_type, &body["metadata"]["labels"]["a"]), ("application/json", &Value::from("b")));
        assert_eq!(body["metadata"]["managedFields"], Value::Null);
        assert_eq!(body["spec"]["renewTime"], "2026-11-30T19:22:22.123456Z");
    }
}
