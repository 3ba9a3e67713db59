//! The JSON documents of an archive: indexes, manifests, configurations (OCI image specification),
//! and the list of images of `docker save`.

use serde_json::Value;

use super::error::{Problem, shortened};
use super::limits::Limits;
use super::platform::Platform;
use super::types::Digest;
use crate::model::image_name;

/// A document, reduced to what is needed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Document {
    Index {
        media_type: Option<String>,
        manifests: Vec<Descriptor>,
    },
    Manifest {
        media_type: Option<String>,
        config: Descriptor,
        layers: Vec<Descriptor>,
    },
    Config {
        platform: Platform,
        diff_ids: Vec<String>,
    },
    /// The file `manifest.json` of `docker save`.
    Docker(Vec<DockerImage>),
}

/// A reference to a blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) media_type: String,
    pub(super) digest: Result<Digest, Problem>,
    pub(super) size: Option<u64>,
    pub(super) platform: Option<Platform>,
    /// The annotation `io.containerd.image.name`: a whole name.
    pub(super) name: Option<String>,
    /// The annotation `org.opencontainers.image.ref.name`: a whole name, or only a tag.
    pub(super) reference: Option<String>,
}

/// An image of `docker save`. Its paths are those of entries of the tar archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DockerImage {
    pub(super) config: String,
    pub(super) names: Vec<String>,
    pub(super) layers: Vec<String>,
}

impl Document {
    /// Parses a document.
    pub(super) fn parse(bytes: &[u8], limits: &Limits) -> Result<Document, Problem> {
        // Before the memory for the values is taken: each value but the first follows one of these.
        let values = bytes.iter().filter(|byte| matches!(byte, b',' | b':' | b'[' | b'{')).count();
        if values > limits.values {
            return Err(Problem::too_large(limits.values as u64, "values"));
        }
        match serde_json::from_slice(bytes).map_err(Problem::json)? {
            Value::Array(images) => {
                images.iter().map(docker_image).collect::<Result<_, _>>().map(Document::Docker)
            }
            value @ Value::Object(_) => object(&value),
            _ => Err(Problem::json("it is neither an object nor a list")),
        }
    }

    /// The number of references to blobs.
    pub(super) fn references(&self) -> usize {
        match self {
            Document::Index { manifests, .. } => manifests.len(),
            Document::Manifest { layers, .. } => layers.len() + 1,
            Document::Config { diff_ids, .. } => diff_ids.len(),
            Document::Docker(images) => images.iter().map(|one| one.layers.len() + one.names.len() + 1).sum(),
        }
    }

    /// The descriptors in the document.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = &Descriptor> {
        let (config, list) = match self {
            Document::Index { manifests, .. } => (None, manifests.as_slice()),
            Document::Manifest { config, layers, .. } => (Some(config), layers.as_slice()),
            Document::Config { .. } | Document::Docker(_) => (None, [].as_slice()),
        };
        config.into_iter().chain(list)
    }
}

impl Descriptor {
    /// The names of the image, normalized.
    pub(super) fn name(&self) -> Result<String, Problem> {
        let full = |reference: &&String| reference.contains(['/', ':', '@']);
        match self.name.as_ref().or(self.reference.as_ref().filter(full)) {
            Some(name) => normalized(name),
            None => Err(Problem::NoName { tag: self.reference.clone().unwrap_or_default() }),
        }
    }
}

/// The normalized name of an image.
pub(super) fn normalized(name: &str) -> Result<String, Problem> {
    image_name::normalized(name)
        .map_err(|error| Problem::BadName { name: shortened(name), reason: shortened(&error.to_string()) })
}

fn object(value: &Value) -> Result<Document, Problem> {
    let media_type = text(value, "mediaType");
    let manifests = list(value, "manifests")?;
    let layers = list(value, "layers")?;
    let config = value.get("config").filter(|config| config.get("digest").is_some());
    match (manifests, config) {
        (Some(_), Some(_)) => Err(Problem::json("it is an index and a manifest")),
        (Some(_), None) if layers.is_some() => Err(Problem::json("it is an index and a manifest")),
        (Some(manifests), None) => {
            let manifests = manifests.iter().map(descriptor).collect();
            Ok(Document::Index { media_type, manifests })
        }
        (None, Some(config)) => {
            let layers = layers.into_iter().flatten().map(descriptor).collect();
            Ok(Document::Manifest { media_type, config: descriptor(config), layers })
        }
        (None, None) => {
            let diff_ids = match value.get("rootfs") {
                Some(rootfs) => texts(rootfs, "diff_ids")?,
                None => Vec::new(),
            };
            Ok(Document::Config { platform: platform(value), diff_ids })
        }
    }
}

fn descriptor(value: &Value) -> Descriptor {
    let annotation = |key: &str| text(value.get("annotations")?, key).filter(|text| !text.is_empty());
    Descriptor {
        media_type: text(value, "mediaType").unwrap_or_default(),
        digest: Digest::parse(value.get("digest").and_then(Value::as_str).unwrap_or_default()),
        size: value.get("size").and_then(Value::as_u64),
        platform: value.get("platform").filter(|platform| platform.is_object()).map(platform),
        name: annotation("io.containerd.image.name"),
        reference: annotation("org.opencontainers.image.ref.name"),
    }
}

fn platform(value: &Value) -> Platform {
    let text = |key| text(value, key).unwrap_or_default();
    Platform::new(&text("os"), &text("architecture"), &text("variant"))
}

fn docker_image(value: &Value) -> Result<DockerImage, Problem> {
    let config = value.get("Config").and_then(Value::as_str);
    Ok(DockerImage {
        config: config.ok_or_else(|| Problem::json("an image has no Config"))?.to_owned(),
        names: texts(value, "RepoTags")?,
        layers: texts(value, "Layers")?,
    })
}

/// A text of at most 300 bytes; a longer one is none that is known here.
fn text(value: &Value, key: &str) -> Option<String> {
    value.get(key)?.as_str().filter(|text| text.len() <= 300).map(str::to_owned)
}

fn list<'a>(value: &'a Value, key: &str) -> Result<Option<&'a Vec<Value>>, Problem> {
    match value.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(list)) => Ok(Some(list)),
        Some(_) => Err(Problem::json(format!("{key} is not a list"))),
    }
}

fn texts(value: &Value, key: &str) -> Result<Vec<String>, Problem> {
    let not_text = || Problem::json(format!("{key} is not a list of texts"));
    let list = list(value, key)?.into_iter().flatten();
    list.map(|item| item.as_str().map(str::to_owned).ok_or_else(not_text)).collect()
}
