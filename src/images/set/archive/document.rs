//! The JSON documents of an archive: indexes, manifests, configurations (OCI image specification),
//! and the list of images of `docker save`.

use super::error::{Problem, shortened};
use super::limits::Limits;
use super::platform::Platform;
use super::tree::{MAX_TEXT, Tree};
use super::types::Digest;
use crate::model::image_name;

/// About the bytes of memory that a text takes in addition to its own.
pub(super) const TEXT: usize = size_of::<String>() + 16;

/// A document, reduced to what is needed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Document {
    Index {
        media_type: Option<String>,
        manifests: Vec<Descriptor>,
    },
    Manifest {
        media_type: Option<String>,
        config: Box<Descriptor>,
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
    /// Parses a document. Returns its text, too, if `keep` wants it and it is an index or a manifest.
    pub(super) fn parse(
        text: Vec<u8>,
        keep: bool,
        limits: &Limits,
    ) -> Result<(Document, Option<String>), Problem> {
        let text = String::from_utf8(text).map_err(|_| Problem::json("it is not UTF-8"))?;
        let tree = Tree::parse(&text, limits)?;
        // Otherwise its memory is free before that of the document is taken.
        let text = keep.then_some(text);
        let document = match tree {
            Tree::List(images) => {
                Document::Docker(images.into_iter().map(docker_image).collect::<Result<_, _>>()?)
            }
            tree @ Tree::Object(_) => object(tree, limits)?,
            _ => return Err(Problem::json("it is neither an object nor a list")),
        };
        let is_stored = matches!(document, Document::Index { .. } | Document::Manifest { .. });
        Ok((document, text.filter(|_| is_stored)))
    }

    /// About the bytes of memory that the document takes.
    pub(super) fn memory_bytes(&self) -> usize {
        let text = |text: &String| TEXT + text.len();
        let own = match self {
            Document::Index { .. } | Document::Manifest { .. } => 0,
            Document::Config { platform, diff_ids } => {
                platform_memory_bytes(platform) + diff_ids.iter().map(text).sum::<usize>()
            }
            Document::Docker(images) => {
                let texts = images
                    .iter()
                    .flat_map(|image| image.names.iter().chain(&image.layers).chain([&image.config]));
                images.len() * size_of::<DockerImage>() + texts.map(text).sum::<usize>()
            }
        };
        size_of::<Document>() + own + self.descriptors().map(Descriptor::memory_bytes).sum::<usize>()
    }

    /// The number of references to blobs.
    pub(super) fn references(&self) -> usize {
        match self {
            Document::Index { manifests, .. } => manifests.len(),
            Document::Manifest { layers, .. } => layers.len() + 1,
            Document::Config { diff_ids, .. } => diff_ids.len(),
            Document::Docker(images) => {
                images.iter().map(|image| image.layers.len() + image.names.len() + 1).sum()
            }
        }
    }

    /// The descriptors in the document.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = &Descriptor> {
        let (config, list) = match self {
            Document::Index { manifests, .. } => (None, manifests.as_slice()),
            Document::Manifest { config, layers, .. } => (Some(&**config), layers.as_slice()),
            Document::Config { .. } | Document::Docker(_) => (None, [].as_slice()),
        };
        config.into_iter().chain(list)
    }
}

impl Descriptor {
    fn memory_bytes(&self) -> usize {
        // A digest, or the text of the problem with it.
        let digest = TEXT + 200;
        let names = [&self.name, &self.reference].into_iter().flatten().map(|text| TEXT + text.len());
        let platform = self.platform.as_ref().map_or(0, platform_memory_bytes);
        size_of::<Descriptor>() + digest + TEXT + self.media_type.len() + names.sum::<usize>() + platform
    }

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

fn platform_memory_bytes(platform: &Platform) -> usize {
    3 * TEXT + platform.os.len() + platform.architecture.len() + platform.variant.len()
}

fn object(mut value: Tree, limits: &Limits) -> Result<Document, Problem> {
    let media_type = text(&mut value, "mediaType");
    let manifests = list(&mut value, "manifests")?;
    let layers = list(&mut value, "layers")?;
    if manifests.iter().chain(&layers).any(|list| list.len() > limits.references) {
        return Err(Problem::too_large(limits.references as u64, "references to blobs"));
    }
    let config = Some(value.take("config")).filter(|config| config.has("digest"));
    match (manifests, config) {
        (Some(_), Some(_)) => Err(Problem::json("it is an index and a manifest")),
        (Some(_), None) if layers.is_some() => Err(Problem::json("it is an index and a manifest")),
        (Some(manifests), None) => {
            let manifests = manifests.into_iter().map(descriptor).collect();
            Ok(Document::Index { media_type, manifests })
        }
        (None, Some(config)) => {
            let layers = layers.into_iter().flatten().map(descriptor).collect();
            Ok(Document::Manifest { media_type, config: Box::new(descriptor(config)), layers })
        }
        (None, None) => {
            let diff_ids = texts(&mut value.take("rootfs"), "diff_ids")?;
            Ok(Document::Config { platform: platform(value), diff_ids })
        }
    }
}

fn descriptor(mut value: Tree) -> Descriptor {
    let mut annotations = value.take("annotations");
    let mut annotation = |key: &str| text(&mut annotations, key).filter(|text| !text.is_empty());
    let digest = value.take("digest");
    Descriptor {
        media_type: text(&mut value, "mediaType").unwrap_or_default(),
        digest: Digest::parse(if let Tree::Text(text) = &digest { text } else { "" }),
        size: if let Tree::Number(size) = value.take("size") { Some(size) } else { None },
        platform: Some(value.take("platform")).filter(|value| matches!(value, Tree::Object(_))).map(platform),
        name: annotation("io.containerd.image.name"),
        reference: annotation("org.opencontainers.image.ref.name"),
    }
}

fn platform(mut value: Tree) -> Platform {
    let mut text = |key| text(&mut value, key).unwrap_or_default();
    Platform::new(&text("os"), &text("architecture"), &text("variant"))
}

fn docker_image(mut value: Tree) -> Result<DockerImage, Problem> {
    let Tree::Text(config) = value.take("Config") else {
        return Err(Problem::json(format!("an image has no Config of at most {MAX_TEXT} bytes")));
    };
    Ok(DockerImage { config, names: texts(&mut value, "RepoTags")?, layers: texts(&mut value, "Layers")? })
}

/// A text of at most 300 bytes; a longer one is none that is known here.
fn text(value: &mut Tree, key: &str) -> Option<String> {
    match value.take(key) {
        Tree::Text(text) if text.len() <= 300 => Some(text),
        _ => None,
    }
}

fn list(value: &mut Tree, key: &str) -> Result<Option<Vec<Tree>>, Problem> {
    match value.take(key) {
        Tree::Null => Ok(None),
        Tree::List(list) => Ok(Some(list)),
        _ => Err(Problem::json(format!("{key} is not a list"))),
    }
}

fn texts(value: &mut Tree, key: &str) -> Result<Vec<String>, Problem> {
    let text = |item| match item {
        Tree::Text(text) => Ok(text),
        _ => Err(Problem::json(format!("{key} is not a list of texts of at most {MAX_TEXT} bytes"))),
    };
    list(value, key)?.into_iter().flatten().map(text).collect()
}
