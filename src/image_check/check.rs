//! Checks one image, and replaces what is damaged.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::layer::{self, Depth, Findings, Outcome};
use super::storage::{self, Layer, Problem, Unpacked};
use crate::cri::{ImageClient, RuntimeClient};
use crate::model::ids::ContainerId;
use crate::transport::generated::runtime::{Container, ContainerFilter, ContainerState, ImageSpec};
use crate::util::gate::Gate;
use crate::util::stop::{StopToken, Waited};
use crate::util::{decompress, disk_writes, tree, untrusted};

/// The largest layer without compression.
const MAX_LAYER: u64 = 1 << 40;
/// How often, and how long, the end of a container is waited for that may be failing.
const START_WAITS: u32 = 5;
const START_WAIT: Duration = Duration::from_secs(1);
/// How long a container that is being made is waited for.
const CREATE_LIMIT: Duration = Duration::from_secs(60);
/// How often an image is pulled again if the runtime keeps a damaged layer.
const PULLS: u32 = 3;

/// A place that has layers, such as the image archives of this node.
pub trait LayerSource: Send + Sync {
    /// Opens the blob with a digest (`sha256:` and 64 hexadecimal digits): the archive of a layer,
    /// plain or compressed. `None`: it has no such blob. `stop` ends the call early.
    ///
    /// # Errors
    /// When it has the blob and cannot read it. The text names the place.
    fn open(&self, digest: &str, stop: &StopToken) -> Result<Option<Box<dyn Read + Send>>, String>;
}

/// What a check has found.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Report {
    /// The image's name as requested.
    pub image: String,
    /// The runtime's id of the image.
    pub id: String,
    /// The number of layers.
    pub layers: usize,
    /// How many of them were compared.
    pub verified: usize,
    /// The number of damaged files and blobs before anything was replaced.
    pub damaged: u64,
    /// The first of them.
    pub findings: Vec<Finding>,
    /// The number of files that were replaced.
    pub mended: u64,
    /// Whether nothing is damaged any more, in the layers that were compared.
    pub intact: bool,
    /// Why layers could not be compared, or damaged files not be replaced.
    pub problems: Vec<String>,
}

/// A damaged file or blob.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Finding {
    /// Its path in the image, escaped; or `blob` and a digest.
    pub path: String,
    /// What is wrong with it.
    pub problem: String,
}

impl Report {
    /// The first damaged files and the number of others, for an event.
    #[must_use]
    pub fn summary(&self) -> String {
        let first: Vec<String> =
            self.findings.iter().take(3).map(|one| format!("{} {}", one.path, one.problem)).collect();
        match self.damaged.saturating_sub(first.len() as u64) {
            0 => first.join("; "),
            more => format!("{}; and {more} more", first.join("; ")),
        }
    }

    fn take(&mut self, found: Findings) {
        self.damaged += found.total;
        for (path, problem) in found.first {
            if self.findings.len() < layer::MAX_FINDINGS {
                self.findings.push(Finding { path, problem });
            }
        }
    }
}

/// What to check, and whether to replace what is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// Whether the contents of files are compared, and not only their types and sizes.
    pub contents: bool,
    /// Whether damaged files are replaced.
    pub mend: bool,
}

/// The connections of a check.
pub(super) struct Checker {
    pub(super) runtime: RuntimeClient,
    pub(super) images: ImageClient,
    pub(super) sources: Vec<Arc<dyn LayerSource>>,
    pub(super) replaced: Arc<Gate>,
}

/// The runtime's own store of blobs.
struct Store<'a>(&'a Path);

impl LayerSource for Store<'_> {
    fn open(&self, digest: &str, _: &StopToken) -> Result<Option<Box<dyn Read + Send>>, String> {
        let Some(hex) = storage::hex_of(digest) else { return Ok(None) };
        match untrusted::open(&self.0.join(hex)) {
            Ok(file) => Ok(Some(Box::new(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(format!("{digest} in the runtime's store: {error}")),
        }
    }
}

impl Checker {
    /// Checks an image. With `options.mend`, what is damaged is replaced, and checked again.
    pub(super) fn check(
        &self,
        image: &str,
        options: Options,
        progress: &mut dyn FnMut(usize, usize),
        stop: &StopToken,
    ) -> Result<Report, Problem> {
        let mut unpacked = storage::find(&self.images, image, stop)?;
        let mut checked = check_layers(&unpacked, &self.sources(&unpacked), options, progress, stop);
        for _ in 0..PULLS {
            if !options.mend || checked.report.intact || stop.is_stopped() {
                break;
            }
            if let Err(why) = self.pull_again(&unpacked, stop) {
                checked.report.problems.push(why);
                break;
            }
            unpacked = storage::find(&self.images, image, stop)?;
            let depth = Options { mend: false, ..options };
            let after = check_layers(&unpacked, &self.sources(&unpacked), depth, progress, stop);
            checked = checked.pulled_again(after);
        }
        checked.report.image = image.to_owned();
        Ok(checked.report)
    }

    fn sources<'a>(&'a self, unpacked: &'a Unpacked) -> Vec<Arc<dyn LayerSource + 'a>> {
        let store =
            unpacked.store.as_deref().map(|store| Arc::new(Store(store)) as Arc<dyn LayerSource + 'a>);
        store
            .into_iter()
            .chain(self.sources.iter().map(|source| Arc::clone(source) as Arc<dyn LayerSource + 'a>))
            .collect()
    }

    /// Removes the image and pulls it again: the last resort, if no intact copy of a damaged layer is
    /// on the node. It cannot replace a layer that a container or another image uses, because the
    /// runtime keeps that. The pull is tried first: an image that cannot be pulled is better damaged
    /// than removed.
    fn pull_again(&self, unpacked: &Unpacked, stop: &StopToken) -> Result<(), String> {
        let spec = |name: &str| ImageSpec { image: name.to_owned(), ..ImageSpec::default() };
        let is_of_image = |one: &Container| {
            let known = [one.image_ref.as_str(), one.image_id.as_str()];
            known.contains(&unpacked.id.as_str())
                || unpacked.names.iter().any(|name| known.contains(&name.as_str()))
        };
        let name = unpacked.names.first().ok_or("the image has no name by which it can be pulled")?;
        let failed = |error: crate::cri::CriError| format!("the image cannot be pulled again: {error}");
        self.images.pull_image(spec(name), None, None, stop).map_err(failed)?;
        // A worker would start its container again as soon as the failed one is removed, and that would
        // keep the damaged layer.
        let _closed = self
            .replaced
            .close(&unpacked.id, CREATE_LIMIT, stop)
            .ok_or("the image is not pulled again while a container of it is made")?;
        let mut waits = 0;
        loop {
            let all = self.runtime.list_containers(ContainerFilter::default());
            let mut all = all.map_err(|error| error.to_string())?;
            all.retain(is_of_image);
            // The container that fails may just be starting again: then it cannot be removed now.
            let blocked = all.iter().find_map(|one| {
                if one.state.enum_value() == Ok(ContainerState::CONTAINER_RUNNING) {
                    return Some(format!(
                        "the image is not pulled again while the container {} runs",
                        one.id
                    ));
                }
                let removed = self.runtime.remove_container(&ContainerId::from(one.id.as_str()));
                removed.err().map(|error| error.to_string())
            });
            let Some(why) = blocked else { break };
            waits += 1;
            if waits > START_WAITS || stop.wait(START_WAIT) == Waited::Stopped {
                return Err(why);
            }
        }
        self.images.remove_image(spec(&unpacked.id)).map_err(|error| error.to_string())?;
        // Also the names after one that fails.
        let pulled = unpacked.names.iter().map(|name| self.images.pull_image(spec(name), None, None, stop));
        pulled.map(|result| result.map(drop).map_err(failed)).fold(Ok(()), Result::and)
    }
}

/// A check of all layers.
#[derive(Debug)]
struct Checked {
    report: Report,
    /// Directories of layers of which no intact copy was found.
    unverified: Vec<PathBuf>,
    /// Those of them that are a reason to pull the image again.
    doubtful: Vec<PathBuf>,
}

impl Checked {
    /// The result after the image was pulled again. A container that was made between the removal and
    /// the pull keeps a layer, which the runtime then neither loads nor unpacks: the layer is in the same
    /// directory, cannot be compared, and is as damaged as before.
    fn pulled_again(self, mut after: Checked) -> Checked {
        let kept = |dir: &&PathBuf| self.doubtful.contains(dir);
        let kept: Vec<PathBuf> = after.unverified.iter().filter(kept).cloned().collect();
        if !kept.is_empty() {
            let what = format!("the runtime kept {} damaged layers, which a container uses", kept.len());
            after.report.problems.push(what);
            after.report.intact = false;
        }
        let mended = if after.report.intact { self.report.damaged } else { self.report.mended };
        let Report { intact, problems, .. } = after.report;
        let report = Report { intact, problems, mended, ..self.report };
        let doubtful = [after.doubtful, kept].concat();
        Checked { report, unverified: after.unverified, doubtful }
    }
}

fn check_layers(
    unpacked: &Unpacked,
    sources: &[Arc<dyn LayerSource + '_>],
    options: Options,
    progress: &mut dyn FnMut(usize, usize),
    stop: &StopToken,
) -> Checked {
    let layers = unpacked.layers.len();
    let report = Report { id: unpacked.id.clone(), layers, intact: true, ..Report::default() };
    let mut checked = Checked { report, unverified: Vec::new(), doubtful: Vec::new() };
    let report = &mut checked.report;
    for (path, problem) in &unpacked.damaged_blobs {
        report.damaged += 1;
        report.findings.push(Finding { path: path.clone(), problem: problem.clone() });
    }
    // A damaged blob is harmless as long as another copy of its layer is intact, and is not replaced.
    for (index, layer) in unpacked.layers.iter().enumerate() {
        progress(index, layers);
        check_layer(layer, sources, (options, !unpacked.damaged_blobs.is_empty()), &mut checked, stop);
    }
    progress(layers, layers);
    checked
}

/// Checks a layer with the first source that has an intact copy of it.
fn check_layer(
    layer: &Layer,
    sources: &[Arc<dyn LayerSource + '_>],
    (options, has_damaged_blobs): (Options, bool),
    checked: &mut Checked,
    stop: &StopToken,
) {
    let report = &mut checked.report;
    let short = layer.diff_id.get(..19).unwrap_or(&layer.diff_id);
    let is_missing = !layer.dir.exists();
    if is_missing {
        let mut found = Findings::default();
        found.add(format!("layer {short}"), "has no directory".to_owned());
        report.take(found);
        if !options.mend || disk_writes::created(std::fs::create_dir(&layer.dir)).is_err() {
            report.intact = false;
            checked.unverified.push(layer.dir.clone());
            checked.doubtful.push(layer.dir.clone());
            return;
        }
    }
    let mut why = Vec::new();
    let digests = || layer.blob.iter().chain([&layer.diff_id]);
    for (source, digest) in sources.iter().flat_map(|source| digests().map(move |digest| (source, digest))) {
        let pass = |mend: bool| -> Result<Option<(Findings, Outcome)>, String> {
            let Some(blob) = source.open(digest, stop)? else { return Ok(None) };
            let named = |error: io::Error| format!("a copy of {digest}: {error}");
            let (tar, _) = decompress::open(blob, MAX_LAYER).map_err(named)?;
            let dir = tree::open(&layer.dir)
                .map_err(|errno| format!("its directory: {}", io::Error::from(errno)))?;
            let mut found = Findings::default();
            let depth = Depth { contents: options.contents, mend };
            let outcome = layer::compare(dir, tar, depth, &mut found, stop).map_err(named)?;
            if outcome.digest == layer.diff_id {
                return Ok(Some((found, outcome)));
            }
            Err(format!("a copy of {digest} is damaged"))
        };
        let found = match pass(false) {
            Ok(None) => continue,
            Err(error) => {
                why.push(error);
                continue;
            }
            Ok(Some((found, _))) => found,
        };
        report.verified += 1;
        let damaged = found.total;
        report.take(found);
        if damaged == 0 {
            return;
        }
        // The copy is intact, as the first pass has shown.
        let mended = if options.mend { pass(true) } else { Ok(None) };
        match (mended, if options.mend { pass(false) } else { Ok(None) }) {
            (Ok(Some((_, outcome))), Ok(Some((after, _)))) if after.total == 0 => {
                report.mended += outcome.mended
            }
            (Ok(mended), after) => {
                report.intact = false;
                report.problems.extend(mended.and_then(|(_, outcome)| outcome.failure));
                report.problems.extend(after.err());
            }
            (Err(error), _) => {
                report.intact = false;
                report.problems.push(error);
            }
        }
        return;
    }
    let why = if why.is_empty() { "no copy of it is on this node".to_owned() } else { why.join("; ") };
    report.problems.push(format!("layer {short} cannot be verified: {why}"));
    if is_missing {
        // An empty directory would hide what is wrong.
        let _ = std::fs::remove_dir(&layer.dir);
    }
    checked.unverified.push(layer.dir.clone());
    // Without an intact copy, a damaged one is a reason to pull the image again.
    if is_missing || has_damaged_blobs {
        report.intact = false;
        checked.doubtful.push(layer.dir.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::gzip::Gzip;
    use crate::util::sha256;
    use crate::util::tar::tests::{end, entry};
    use std::collections::BTreeMap;
    use std::io::Write;

    struct Fixture {
        dir: tempfile::TempDir,
        unpacked: Unpacked,
        blobs: BTreeMap<String, Vec<u8>>,
    }

    struct Blobs<'a>(&'a BTreeMap<String, Vec<u8>>);

    impl LayerSource for Blobs<'_> {
        fn open(&self, digest: &str, _: &StopToken) -> Result<Option<Box<dyn Read + Send>>, String> {
            let blob = self.0.get(digest).cloned();
            Ok(blob.map(|blob| Box::new(io::Cursor::new(blob)) as Box<dyn Read + Send>))
        }
    }

    fn digest(bytes: &[u8]) -> String {
        format!("sha256:{}", sha256::hex(bytes))
    }

    impl Fixture {
        /// Two layers; blobs of the upper one are compressed.
        fn new() -> Fixture {
            let dir = tempfile::tempdir().unwrap();
            let low = [entry("f", b'0', "", b"lower"), entry("same", b'0', "", b"text"), end()].concat();
            let high = [entry("f", b'0', "", b"upper"), end()].concat();
            let mut gzip = Gzip::fast(Vec::new());
            gzip.write_all(&high).unwrap();
            let packed = gzip.finish().unwrap();
            let layer = |name: &str, tar: &[u8], blob: Option<String>| Layer {
                dir: dir.path().join(name),
                diff_id: digest(tar),
                blob,
            };
            let layers = vec![layer("1", &low, None), layer("2", &high, Some(digest(&packed)))];
            let unpacked = Unpacked {
                id: "sha256:1".to_owned(),
                names: vec!["registry/image:1".to_owned()],
                layers,
                damaged_blobs: Vec::new(),
                store: None,
            };
            let fixture =
                Fixture { blobs: [(digest(&low), low), (digest(&packed), packed)].into(), dir, unpacked };
            // Layers without a directory are made as a whole.
            let made = fixture.check(true);
            assert!(made.intact && made.problems.is_empty(), "{made:?}");
            fixture
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn check(&self, mend: bool) -> Report {
            self.check_layers(mend).report
        }

        fn check_layers(&self, mend: bool) -> Checked {
            let sources: Vec<Arc<dyn LayerSource + '_>> = vec![Arc::new(Blobs(&self.blobs))];
            let options = Options { contents: true, mend };
            check_layers(&self.unpacked, &sources, options, &mut |_, _| {}, &StopToken::never())
        }
    }

    #[test]
    fn damage_in_any_layer_is_found_and_mended() {
        let fixture = Fixture::new();
        let report = fixture.check(false);
        assert_eq!((report.damaged, report.verified, report.layers), (0, 2, 2));
        for layer in ["1", "2"] {
            std::fs::write(fixture.path(layer).join("f"), "").unwrap();
            let report = fixture.check(false);
            assert_eq!(report.summary(), "/f has 0 bytes instead of 5");
            assert!(!report.intact);
            let report = fixture.check(true);
            assert_eq!((report.damaged, report.mended, report.intact), (1, 1, true), "{report:?}");
        }
        assert_eq!(std::fs::read(fixture.path("1/f")).unwrap(), b"lower");
        assert_eq!(std::fs::read(fixture.path("2/f")).unwrap(), b"upper");
        std::fs::remove_dir_all(fixture.path("2")).unwrap();
        assert!(fixture.check(false).summary().ends_with("has no directory"));
        assert!(fixture.check(true).intact);
        assert!(fixture.check(false).findings.is_empty());
    }

    #[test]
    fn damaged_copy_of_a_layer_is_never_used() {
        let mut fixture = Fixture::new();
        let low = fixture.unpacked.layers[0].diff_id.clone();
        let intact = fixture.blobs.clone();
        std::fs::write(fixture.path("1/f"), "").unwrap();
        // A file of zero bytes, a cut one, and one with other content.
        let other = [entry("f", b'0', "", b"wrong"), end()].concat();
        for copy in [Vec::new(), intact[&low][..700].to_vec(), other] {
            fixture.blobs.insert(low.clone(), copy);
            let report = fixture.check(true);
            assert_eq!((report.verified, report.mended), (1, 0), "{report:?}");
            assert!(report.problems[0].contains("cannot be verified"), "{report:?}");
            assert_eq!(std::fs::read(fixture.path("1/f")).unwrap(), b"");
        }
        fixture.blobs.remove(&low);
        assert!(fixture.check(true).problems[0].ends_with("no copy of it is on this node"));
        // The next source has an intact one.
        fixture.blobs.insert(low, Vec::new());
        let sources: Vec<Arc<dyn LayerSource + '_>> =
            vec![Arc::new(Blobs(&fixture.blobs)), Arc::new(Blobs(&intact))];
        let options = Options { contents: false, mend: true };
        let checked = check_layers(&fixture.unpacked, &sources, options, &mut |_, _| {}, &StopToken::never());
        let report = checked.report;
        assert_eq!((report.intact, report.mended, report.problems.len()), (true, 1, 0), "{report:?}");
    }

    #[test]
    fn damaged_blob_is_a_finding_but_no_reason_to_replace_an_intact_image() {
        let mut fixture = Fixture::new();
        fixture.unpacked.damaged_blobs = vec![("blob sha256:1".to_owned(), "has 0 bytes".to_owned())];
        let report = fixture.check(true);
        assert_eq!((report.damaged, report.intact, report.mended), (1, true, 0));
        // Without another copy the image is pulled again.
        fixture.blobs.clear();
        assert!(!fixture.check(true).intact);
    }

    #[test]
    fn image_whose_damaged_layer_the_runtime_kept_is_not_mended() {
        let mut fixture = Fixture::new();
        let intact = std::mem::take(&mut fixture.blobs);
        fixture.unpacked.damaged_blobs = vec![("blob sha256:1".to_owned(), "has 0 bytes".to_owned())];
        let before = fixture.check_layers(false);
        assert!(!before.report.intact);
        // Pulled again: the layers have the same directories, and no blob was loaded.
        fixture.unpacked.damaged_blobs.clear();
        let after = fixture.check_layers(false);
        assert!(after.report.intact);
        let kept = before.pulled_again(after);
        assert!(!kept.report.intact && kept.report.mended == 0, "{kept:?}");
        let problem = "the runtime kept 2 damaged layers, which a container uses";
        assert!(kept.report.problems.iter().any(|one| one == problem), "{kept:?}");
        // Once more: both were unpacked again, one from a blob that is not kept.
        std::fs::rename(fixture.path("1"), fixture.path("3")).unwrap();
        fixture.unpacked.layers[0].dir = fixture.path("3");
        fixture.blobs = intact;
        fixture.blobs.remove(&fixture.unpacked.layers[0].diff_id);
        let mended = kept.pulled_again(fixture.check_layers(false));
        assert_eq!((mended.report.intact, mended.report.mended), (true, 1), "{mended:?}");
    }

    #[test]
    fn store_of_the_runtime_is_a_source() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(sha256::hex(b"text")), "text").unwrap();
        let store = Store(dir.path());
        let mut text = String::new();
        store
            .open(&digest(b"text"), &StopToken::never())
            .unwrap()
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "text");
        assert!(store.open(&digest(b"other"), &StopToken::never()).unwrap().is_none());
        assert!(store.open("sha256:../x", &StopToken::never()).unwrap().is_none());
    }
}
