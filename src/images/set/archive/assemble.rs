//! Finds the images of an archive among its files, and what is wrong with the others (pure).

use std::collections::{BTreeMap, BTreeSet};

use super::document::{Descriptor, DockerImage, Document, normalized};
use super::error::{ArchiveError, Problem, shortened};
use super::limits::Limits;
use super::paths;
use super::platform::Platform;
use super::scan::{BLOBS, DOCKER, Entry, File, Scan};
use super::stamp::INDEX;
use super::types::{Blob, BlobPlace, Digest, Fault, Image, Layer, is_hex};
use crate::util::decompress::Compression;
use crate::util::sha256;

/// The media type of a manifest that is made for a `docker save` archive.
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
const UNKNOWN: &str = "application/octet-stream";

/// Children of indexes that are compared with the platform, in all images together.
const STEPS: usize = 1_000_000;

type Assembled = (Vec<Image>, BTreeMap<Digest, Blob>, Vec<Fault>);

struct Assembly<'a> {
    scan: &'a Scan,
    platform: &'a Platform,
    limits: &'a Limits,
    layout: bool,
    steps: usize,
    references: usize,
    images: Vec<Image>,
    blobs: BTreeMap<Digest, Blob>,
    faults: Vec<Fault>,
    /// Images for other platforms. They are no faults if another image has their name.
    others: Vec<Fault>,
    /// Configurations of images of the index, also of those that are not offered.
    configs: BTreeSet<Digest>,
}

/// The images, blobs and faults of an archive. `layout`: it is a directory.
pub(super) fn assemble(
    scan: &Scan,
    layout: bool,
    platform: &Platform,
    limits: &Limits,
) -> Result<Assembled, ArchiveError> {
    let mut assembly = Assembly {
        scan,
        platform,
        limits,
        layout,
        steps: STEPS,
        references: 0,
        images: Vec::new(),
        blobs: BTreeMap::new(),
        faults: scan.faults.clone(),
        others: Vec::new(),
        configs: BTreeSet::new(),
    };
    assembly.collect_blobs();
    let index = assembly.list(INDEX)?;
    let docker = assembly.list(DOCKER);
    let too_many = || ArchiveError::Whole(Problem::too_large(limits.images as u64, "images"));
    match index {
        Some(Document::Index { manifests, .. }) if manifests.len() > limits.images => return Err(too_many()),
        Some(Document::Index { manifests, .. }) => {
            manifests.iter().for_each(|descriptor| assembly.add_oci(descriptor))
        }
        Some(_) => return Err(ArchiveError::Whole(Problem::json("it is not an index").of_blob(INDEX))),
        None => {}
    }
    match (docker, index) {
        (Ok(Some(Document::Docker(images))), _) if images.len() > limits.images => return Err(too_many()),
        (Ok(Some(Document::Docker(images))), _) => images.iter().for_each(|image| assembly.add_docker(image)),
        (Ok(None), Some(_)) => {}
        (Ok(None), None) => {
            return Err(scan.cut.clone().map_or(ArchiveError::NotAnArchive, ArchiveError::Whole));
        }
        (Ok(Some(_)), Some(_)) => assembly.fault(DOCKER, Problem::json("it is not a list of images")),
        (Ok(Some(_)), None) => return Err(ArchiveError::NotAnArchive),
        (Err(ArchiveError::Whole(problem)), Some(_)) => assembly.fault(DOCKER, problem),
        (Err(error), _) => return Err(error),
    }
    Ok(assembly.finish())
}

impl<'a> Assembly<'a> {
    /// The list of images in this file; `None` if there is no such file.
    fn list(&self, name: &str) -> Result<Option<&'a Document>, ArchiveError> {
        let whole = |problem: Problem| ArchiveError::Whole(problem.of_blob(name));
        if !self.scan.entries.contains_key(name) {
            return Ok(None);
        }
        match self.scan.file(name).map_err(whole)?.document() {
            Some(Ok(document)) => Ok(Some(document)),
            Some(Err(problem)) => Err(whole(problem.clone())),
            None => Err(whole(Problem::json("it is not JSON"))),
        }
    }

    fn fault(&mut self, object: &str, problem: Problem) {
        if self.faults.len() < self.limits.faults {
            self.faults.push(Fault { object: object.to_owned(), problem });
        }
    }

    fn place(&self, file: &File) -> BlobPlace {
        if self.layout { BlobPlace::Layout } else { BlobPlace::File { offset: file.offset } }
    }

    /// Takes the intact blobs of the layout, and reports damaged ones.
    fn collect_blobs(&mut self) {
        let scan = self.scan;
        for name in scan.entries.keys() {
            let Some(hex) = name.strip_prefix(BLOBS).filter(|hex| is_hex(hex)) else { continue };
            let digest = Digest::of_hex(hex);
            match scan.file(name) {
                Ok(file) if file.digest == digest => {
                    let media_type = match file.document() {
                        Some(Ok(
                            Document::Index { media_type, .. } | Document::Manifest { media_type, .. },
                        )) => media_type.clone(),
                        _ => None,
                    };
                    let media_type = media_type.unwrap_or_else(|| UNKNOWN.to_owned());
                    let made = file.text.take().map(|text| BlobPlace::Made { text });
                    let place = made.unwrap_or_else(|| self.place(file));
                    self.blobs.insert(digest, Blob { size: file.size, place, media_type });
                }
                Ok(file) => {
                    let found = file.digest.clone();
                    self.fault(digest.as_str(), Problem::WrongDigest { found });
                }
                Err(problem) => self.fault(digest.as_str(), problem),
            }
        }
        for entry in scan.entries.values() {
            if let Entry::File(file) = entry
                && let Some(Ok(document)) = file.document()
            {
                document.descriptors().for_each(|descriptor| self.describe(descriptor));
            }
        }
    }

    /// Notes the media type of a blob, if it is not yet known.
    fn describe(&mut self, descriptor: &Descriptor) {
        if let Ok(digest) = &descriptor.digest
            && !descriptor.media_type.is_empty()
            && let Some(blob) = self.blobs.get_mut(digest).filter(|blob| blob.media_type == UNKNOWN)
        {
            blob.media_type.clone_from(&descriptor.media_type);
        }
    }

    /// Adds an image of the index, or the fault that prevents it.
    fn add_oci(&mut self, descriptor: &Descriptor) {
        let name = descriptor.name();
        let object = match (&name, &descriptor.digest) {
            (Ok(name), _) => name.clone(),
            (Err(_), Ok(digest)) => digest.to_string(),
            (Err(_), Err(_)) => INDEX.to_owned(),
        };
        let mut needed = Vec::new();
        match self.walk(descriptor, descriptor.platform.as_ref(), 0, &mut needed) {
            Ok((target, layers)) => {
                let size = descriptor.size.unwrap_or_default();
                let image = Image {
                    names: name.as_ref().ok().cloned().into_iter().collect(),
                    target,
                    media_type: descriptor.media_type.clone(),
                    size,
                    blobs: needed,
                    layers,
                };
                self.add(image);
                // An image of both formats gets its names from the other list.
                if let Err(problem) = name
                    && !self.scan.entries.contains_key(DOCKER)
                {
                    self.fault(&object, problem);
                }
            }
            Err(problem) => self.refuse(object, problem),
        }
    }

    /// Adds an image; one with the same target gets its names.
    fn add(&mut self, mut image: Image) {
        // A layer may occur twice.
        let mut seen = BTreeSet::new();
        image.blobs.retain(|digest| seen.insert(digest.clone()));
        match self.images.iter_mut().find(|other| other.target == image.target) {
            Some(same) => same.names.append(&mut image.names),
            None => self.images.push(image),
        }
    }

    fn refuse(&mut self, object: String, problem: Problem) {
        match problem {
            Problem::WrongPlatform { .. } if self.others.len() < self.limits.faults => {
                self.others.push(Fault { object, problem });
            }
            problem => self.fault(&object, problem),
        }
    }

    /// Collects the blobs below an index or a manifest into `needed`. Returns its digest and the
    /// layers. `declared` is the platform according to the index above.
    fn walk(
        &mut self,
        descriptor: &Descriptor,
        declared: Option<&Platform>,
        depth: usize,
        needed: &mut Vec<Digest>,
    ) -> Result<(Digest, Vec<Layer>), Problem> {
        if let Some(platform) = declared {
            self.check_platform(platform)?;
        }
        let (digest, file) = self.check(descriptor, needed)?;
        let of_blob = |problem: Problem| problem.of_blob(&digest);
        let document = match file.document() {
            Some(Ok(document)) => document,
            Some(Err(problem)) => return Err(of_blob(problem.clone())),
            None => return Err(of_blob(Problem::json("it is not JSON"))),
        };
        match document {
            Document::Index { media_type, manifests } => {
                same_type(descriptor, media_type.as_deref()).map_err(of_blob)?;
                if depth == self.limits.nesting {
                    return Err(of_blob(Problem::too_large(depth as u64, "levels of indexes")));
                }
                let layers = self.choose(manifests, depth, needed)?;
                Ok((digest, layers))
            }
            Document::Manifest { media_type, config, layers } => {
                same_type(descriptor, media_type.as_deref()).map_err(of_blob)?;
                if layers.len() > self.limits.layers {
                    return Err(of_blob(Problem::too_large(self.limits.layers as u64, "layers")));
                }
                let (config, file) = self.check(config, needed)?;
                self.configs.insert(config.clone());
                match file.document() {
                    Some(Ok(Document::Config { platform, .. })) if declared.is_none() => {
                        self.check_platform(platform)?;
                    }
                    Some(Ok(Document::Config { .. })) => {}
                    Some(Err(problem)) => return Err(problem.clone().of_blob(config)),
                    _ => return Err(Problem::json("it is not the configuration of an image").of_blob(config)),
                }
                let mut all = Vec::with_capacity(layers.len());
                for layer in layers {
                    let (digest, file) = self.check(layer, needed)?;
                    all.push(Layer { digest, media_type: layer.media_type.clone(), size: file.size });
                }
                Ok((digest, all))
            }
            Document::Config { .. } | Document::Docker(_) => {
                Err(of_blob(Problem::json("it is neither an index nor a manifest")))
            }
        }
    }

    /// The layers of the manifest for this platform, as the runtime chooses it.
    fn choose(
        &mut self,
        manifests: &'a [Descriptor],
        depth: usize,
        needed: &mut Vec<Digest>,
    ) -> Result<Vec<Layer>, Problem> {
        self.steps = self.steps.saturating_sub(manifests.len());
        if self.steps == 0 {
            return Err(Problem::too_large(STEPS as u64, "manifests in indexes"));
        }
        // Those without a platform are the last choice.
        let rank = |descriptor: &&Descriptor| match &descriptor.platform {
            Some(platform) => self.platform.rank(platform),
            None => Some(u8::MAX),
        };
        let mut fitting: Vec<&Descriptor> =
            manifests.iter().filter(|descriptor| rank(descriptor).is_some()).collect();
        fitting.sort_by_key(rank);
        let before = needed.len();
        let mut found: Vec<String> = Vec::new();
        for descriptor in fitting {
            self.steps = self.steps.saturating_sub(100);
            if self.steps == 0 {
                return Err(Problem::too_large(STEPS as u64, "manifests in indexes"));
            }
            match self.walk(descriptor, descriptor.platform.as_ref(), depth + 1, needed) {
                Err(Problem::WrongPlatform { found: other, .. }) => found.push(other),
                result => return result.map(|(_, layers)| layers),
            }
            needed.truncate(before);
        }
        found.extend(
            manifests.iter().filter_map(|descriptor| descriptor.platform.as_ref()).map(Platform::to_string),
        );
        found.sort();
        found.dedup();
        found.truncate(10);
        Err(Problem::WrongPlatform { wanted: self.platform.to_string(), found: shortened(&found.join(", ")) })
    }

    fn check_platform(&self, found: &Platform) -> Result<(), Problem> {
        match self.platform.rank(found) {
            Some(_) => Ok(()),
            None => Err(Problem::WrongPlatform {
                wanted: self.platform.to_string(),
                found: shortened(&found.to_string()),
            }),
        }
    }

    /// The blob of a descriptor, which must be intact.
    fn check(
        &mut self,
        descriptor: &Descriptor,
        needed: &mut Vec<Digest>,
    ) -> Result<(Digest, &'a File), Problem> {
        self.references += 1;
        if self.references > self.limits.references {
            return Err(Problem::too_large(self.limits.references as u64, "references to blobs"));
        }
        let digest = descriptor.digest.clone()?;
        let scan = self.scan;
        let file =
            scan.file(&format!("{BLOBS}{}", digest.hex())).map_err(|problem| problem.of_blob(&digest))?;
        let problem = match descriptor.size {
            _ if file.digest != digest => Problem::WrongDigest { found: file.digest.clone() },
            None => Problem::json("its descriptor has no size"),
            Some(wanted) if wanted != file.size => Problem::WrongSize { wanted, found: file.size },
            Some(_) => {
                // The type in the descriptor of an image counts more than that in other documents.
                if let Some(blob) = self.blobs.get_mut(&digest).filter(|_| !descriptor.media_type.is_empty())
                {
                    blob.media_type.clone_from(&descriptor.media_type);
                }
                needed.push(digest.clone());
                return Ok((digest, file));
            }
        };
        Err(problem.of_blob(&digest))
    }

    /// Adds an image of `docker save`, or the fault that prevents it.
    fn add_docker(&mut self, image: &DockerImage) {
        let mut names = Vec::new();
        for name in &image.names {
            match normalized(name) {
                Ok(name) => names.push(name),
                Err(problem) => self.fault(&shortened(name), problem),
            }
        }
        match self.docker(image) {
            Ok(Some(mut made)) => {
                if names.is_empty() && image.names.is_empty() {
                    self.fault(&shortened(&image.config), Problem::NoName { tag: String::new() });
                }
                made.names = names;
                self.add(made);
            }
            Ok(None) => {
                let scan = self.scan;
                let config = paths::clean(&image.config).and_then(|path| scan.file(&path).ok());
                let same = |candidate: &&mut Image| {
                    config.is_some_and(|config| candidate.blobs.contains(&config.digest))
                };
                if let Some(image) = self.images.iter_mut().find(same) {
                    image.names.append(&mut names);
                }
            }
            Err(problem) if names.is_empty() => self.refuse(shortened(&image.config), problem),
            Err(problem) => {
                for name in names {
                    self.refuse(name, problem.clone());
                }
            }
        }
    }

    /// An image of `docker save`, with a manifest that is made for it. `None`: the index has it.
    fn docker(&mut self, image: &DockerImage) -> Result<Option<Image>, Problem> {
        let (config_path, config) = self.docker_file(&image.config)?;
        if self.configs.contains(&config.digest) {
            return Ok(None);
        }
        // The name of the file is the digest of its content.
        let stem = config_path.rsplit('/').next().unwrap_or_default();
        let stem = stem.strip_prefix("sha256:").unwrap_or(stem);
        let stem = stem.strip_suffix(".json").unwrap_or(stem);
        if is_hex(stem) && stem != config.digest.hex() {
            return Err(Problem::WrongDigest { found: config.digest.clone() }.of_blob(config_path));
        }
        let diff_ids = match config.document() {
            Some(Ok(Document::Config { platform, diff_ids })) => {
                self.check_platform(platform)?;
                diff_ids
            }
            Some(Err(problem)) => return Err(problem.clone().of_blob(config_path)),
            _ => return Err(Problem::json("it is not the configuration of an image").of_blob(config_path)),
        };
        if diff_ids.len() != image.layers.len() {
            let reason = "the configuration has another number of layers";
            return Err(Problem::json(reason).of_blob(config_path));
        }
        if diff_ids.len() > self.limits.layers {
            return Err(Problem::too_large(self.limits.layers as u64, "layers").of_blob(config_path));
        }
        let mut files = vec![(DOCKER_CONFIG, config)];
        let mut layers = Vec::new();
        for (name, diff_id) in image.layers.iter().zip(diff_ids) {
            let (path, file) = self.docker_file(name)?;
            // containerd: core/images, media types of layers.
            let media_type = match file.compression {
                Compression::None => "application/vnd.docker.image.rootfs.diff.tar",
                Compression::Gzip => "application/vnd.docker.image.rootfs.diff.tar.gzip",
                Compression::Zstd => "application/vnd.docker.image.rootfs.diff.tar.zstd",
            };
            if file.compression == Compression::None && *diff_id != file.digest.as_str() {
                return Err(Problem::WrongDigest { found: file.digest.clone() }.of_blob(path));
            }
            layers.push(Layer {
                digest: file.digest.clone(),
                media_type: media_type.to_owned(),
                size: file.size,
            });
            files.push((media_type, file));
        }
        self.references += files.len();
        if self.references > self.limits.references {
            return Err(Problem::too_large(self.limits.references as u64, "references to blobs"));
        }
        for (media_type, file) in &files {
            let (size, place) = (file.size, self.place(file));
            let blob = Blob { size, place, media_type: (*media_type).to_owned() };
            self.blobs.insert(file.digest.clone(), blob);
        }
        let text = manifest(&files);
        let target = Digest::of_hex(&sha256::sha256_hex(text.as_bytes()));
        let size = text.len() as u64;
        let mut blobs = vec![target.clone()];
        blobs.extend(files.iter().map(|(_, file)| file.digest.clone()));
        let made = Blob { size, place: BlobPlace::Made { text }, media_type: DOCKER_MANIFEST.to_owned() };
        self.blobs.insert(target.clone(), made);
        let media_type = DOCKER_MANIFEST.to_owned();
        Ok(Some(Image { names: Vec::new(), target, media_type, size, blobs, layers }))
    }

    /// A file that the list of `docker save` names.
    fn docker_file(&self, name: &str) -> Result<(String, &'a File), Problem> {
        let short = shortened(name);
        let path = paths::clean(name).ok_or_else(|| Problem::UnsafeName { name: short.clone() })?;
        let file = self.scan.file(&path).map_err(|problem| problem.of_blob(&short))?;
        Ok((short, file))
    }

    fn finish(mut self) -> Assembled {
        // As if the images were imported in order: the last one keeps a name.
        let mut taken = BTreeSet::new();
        for image in self.images.iter_mut().rev() {
            image.names.sort();
            image.names.retain(|name| taken.insert(name.clone()));
        }
        for Fault { object, problem } in std::mem::take(&mut self.others) {
            if !taken.contains(&object) {
                self.fault(&object, problem);
            }
        }
        (self.images, self.blobs, self.faults)
    }
}

/// The descriptor and the document itself must agree about its type, as clients check.
fn same_type(descriptor: &Descriptor, own: Option<&str>) -> Result<(), Problem> {
    match own {
        Some(own) if !descriptor.media_type.is_empty() && own != descriptor.media_type => Err(Problem::json(
            format!("its type is {own}, and its descriptor says {}", descriptor.media_type),
        )),
        _ => Ok(()),
    }
}

/// A manifest of these files, of which the first is the configuration. The same files give the same
/// text.
fn manifest(files: &[(&str, &File)]) -> String {
    let descriptor_text = |(media_type, file): &(&str, &File)| {
        format!(r#"{{"mediaType":"{media_type}","size":{},"digest":"{}"}}"#, file.size, file.digest)
    };
    let (config, layers) = files.split_at(1);
    let layers: Vec<String> = layers.iter().map(descriptor_text).collect();
    format!(
        r#"{{"schemaVersion":2,"mediaType":"{DOCKER_MANIFEST}","config":{},"layers":[{}]}}"#,
        config.iter().map(descriptor_text).collect::<String>(),
        layers.join(",")
    )
}
