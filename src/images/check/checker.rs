//! Checks one image, and replaces what is damaged.

use std::cell::Cell;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use super::super::listed::spec;
use super::super::set::archive::CountBytes;
use super::super::set::{ImageSet, LookupError};
use super::layer::{self, Findings, LayerCheckOptions, Outcome};
use super::missing::{CheckNamespace, MissingNames};
use super::repull::Repull;
use super::storage::{self, Layer, Problem, Unpacked};
use super::usage::{Meter, Metered, Usage};
use crate::cri::{ImageClient, RuntimeClient};
use crate::util::decompress::{self, Compression};
use crate::util::gate::Gate;
use crate::util::stop::StopToken;
use crate::util::{disk_writes, tree, untrusted};

/// Why an image stays damaged.
const NOT_REMOVED: &str = "no intact copy of its layers is on this node; the image is not removed and pulled \
    again by itself without --remove-damaged-images";
/// How often the entries of a layer are replaced, if some can only be compared after others.
const ROUNDS: usize = 3;
/// The largest layer without compression.
const MAX_LAYER: u64 = 1 << 40;

/// A place that has layers, such as the image archives of this node.
pub(super) trait LayerSource {
    /// Opens the blob with a digest (`sha256:` and 64 hexadecimal digits): the archive of a layer,
    /// plain or compressed. `None`: it has no such blob. `count` counts what is read to find the bytes of
    /// the blob, and not these. `stop` ends the call and the reading early.
    ///
    /// # Errors
    /// When it has the blob and cannot read it. The text names the place.
    fn open(
        &self,
        digest: &str,
        count: &CountBytes,
        stop: &StopToken,
    ) -> Result<Option<Box<dyn Read + Send>>, String>;
}

/// The image archives of this node.
impl LayerSource for ImageSet {
    fn open(
        &self,
        digest: &str,
        count: &CountBytes,
        stop: &StopToken,
    ) -> Result<Option<Box<dyn Read + Send>>, String> {
        match self.blob(digest) {
            Ok(blob) => blob.open_counted(0, count, stop).map(Some).map_err(|error| error.to_string()),
            Err(LookupError::Unknown(_)) => Ok(None),
            Err(LookupError::Unavailable(reason)) => Err(reason),
        }
    }
}

/// What a check has found.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CheckReport {
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
    /// Whether the image was removed to replace it, and could not be pulled.
    pub removed: bool,
    /// Its names that were removed, and could not be pulled yet. The agent continues to pull them.
    pub missing: Vec<String>,
    /// What the check has read and written.
    pub used: Usage,
    /// Why layers could not be compared, or damaged files not be replaced.
    pub problems: Vec<String>,
    /// What the check has found out about each layer, from the lowest one.
    #[serde(skip)]
    pub states: Vec<LayerState>,
    /// Whether the image was not removed because too many names of the namespace are missing.
    #[serde(skip)]
    pub lacks_places: bool,
}

/// What a check has found out about a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LayerState {
    /// Nothing, or not enough: the check was ended before, no copy can be compared, or only sizes were.
    #[default]
    Unknown,
    /// All of its files are intact.
    Intact,
    /// Some are damaged or may be, also after a repair.
    Damaged,
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

impl CheckReport {
    /// The first damaged files and the number of others, for an event.
    #[must_use]
    pub fn summary(&self) -> String {
        let first: Vec<String> = self
            .findings
            .iter()
            .take(3)
            .map(|finding| format!("{} {}", finding.path, finding.problem))
            .collect();
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
pub struct CheckOptions {
    /// Whether the contents of files are compared, and not only their types and sizes.
    pub contents: bool,
    /// Whether damaged files are replaced.
    pub mend: bool,
}

/// The connections of a check.
pub(super) struct Checker {
    pub(super) runtime: RuntimeClient,
    pub(super) images: ImageClient,
    pub(super) archives: ImageSet,
    pub(super) replaced: Arc<Gate>,
    pub(super) restarts: super::Restarts,
    pub(super) pods: super::Pods,
    pub(super) pull: super::Pull,
    /// Whether an image may be removed to pull it again.
    pub(super) removes: bool,
    /// Names that were removed for that.
    pub(super) missing: Arc<Mutex<MissingNames>>,
}

/// The runtime's own store of blobs.
struct Store<'a>(&'a Path);

impl LayerSource for Store<'_> {
    fn open(
        &self,
        digest: &str,
        _: &CountBytes,
        _: &StopToken,
    ) -> Result<Option<Box<dyn Read + Send>>, String> {
        let Some(hex) = storage::hex_of(digest) else { return Ok(None) };
        match untrusted::open(&self.0.join(hex)) {
            Ok(file) => Ok(Some(Box::new(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(format!("{digest} in the runtime's store: {error}")),
        }
    }
}

impl Checker {
    /// Checks an image. With `options.mend`, what is damaged is replaced, and checked again. `namespace`
    /// causes the check.
    pub(super) fn check(
        &self,
        (image, namespace): (&str, &CheckNamespace),
        options: CheckOptions,
        progress: &mut dyn FnMut(usize, usize),
        meter: &Arc<Meter>,
        stop: &StopToken,
    ) -> Result<CheckReport, Problem> {
        let unpacked = storage::find(&self.images, image, meter, stop)?;
        let mut checked = check_layers(&unpacked, &self.sources(&unpacked), options, progress, meter, stop);
        let goes_on = !stop.is_stopped() && !meter.is_exhausted();
        if options.mend && !checked.report.intact && goes_on {
            if self.removes {
                let repull = Repull {
                    checker: self,
                    unpacked: &unpacked,
                    requested: image,
                    namespace,
                    stop,
                    is_full: Cell::default(),
                };
                match repull.run() {
                    Ok(pulled) => {
                        // Also after a failed pull of one of its names, the image may be there. By its
                        // id, because a name may be that of another image now.
                        match storage::find(&self.images, &unpacked.id, meter, stop) {
                            Ok(found) => {
                                let recheck = CheckOptions { mend: false, ..options };
                                let sources = self.sources(&found);
                                let after = check_layers(&found, &sources, recheck, progress, meter, stop);
                                checked = checked.pulled_again(after);
                            }
                            Err(Problem::Absent) => checked.report.removed = true,
                            Err(Problem::Unknown(reason)) => checked.report.problems.push(reason),
                        }
                        checked.report.missing = pulled.missing;
                        checked.report.problems.extend(pulled.problems);
                    }
                    Err(reason) => checked.report.problems.push(reason),
                }
                checked.report.lacks_places = repull.is_full.get();
            } else if checked.layers.iter().any(|(_, state)| !state.is_compared() && state.is_bad()) {
                checked.report.problems.push(NOT_REMOVED.to_owned());
            }
        }
        checked.report.image = image.to_owned();
        checked.report.used = meter.used();
        Ok(checked.report)
    }

    /// The id of an image that is on the node.
    pub(super) fn id_of(&self, image: &str, stop: &StopToken) -> Result<String, String> {
        let found = self.images.with_stop(stop.clone()).image_status(spec(image));
        let found = found.map_err(|error| error.to_string())?;
        found.map(|found| found.id).ok_or_else(|| Problem::Absent.to_string())
    }

    fn sources<'a>(&'a self, unpacked: &'a Unpacked) -> Vec<Source<'a>> {
        let store = unpacked.store.as_deref().map(|store| Source::Store(Store(store)));
        store.into_iter().chain([Source::Other(&self.archives)]).collect()
    }
}

/// Where copies of layers are.
enum Source<'a> {
    /// With the runtime, which unpacked the layers from these copies.
    Store(Store<'a>),
    Other(&'a dyn LayerSource),
}

impl Source<'_> {
    /// Opens a blob, and counts all that is read for it.
    fn open(
        &self,
        digest: &str,
        meter: &Arc<Meter>,
        stop: &StopToken,
    ) -> Result<Option<Metered<Box<dyn Read + Send>>>, String> {
        let count: CountBytes = {
            let meter = Arc::clone(meter);
            Arc::new(move |bytes| meter.read(bytes))
        };
        let blob = match self {
            Source::Store(store) => store.open(digest, &count, stop)?,
            Source::Other(source) => source.open(digest, &count, stop)?,
        };
        let metered = |inner| Metered { inner, meter: Arc::clone(meter), stop: stop.clone() };
        Ok(blob.map(metered))
    }

    /// What is wrong with the copy that the runtime unpacked. Nothing is, if it is intact and only in a
    /// form that cannot be compared: a new pull would bring the same one.
    fn damage(&self, digest: &str, meter: &Arc<Meter>, stop: &StopToken) -> Option<String> {
        let Source::Store(_) = self else { return None };
        let mut blob = self.open(digest, meter, stop).ok()??;
        match layer::digest(&mut blob, stop) {
            Ok(found) => (found != digest).then(|| "has another digest".to_owned()),
            // The check was ended, and the blob may be intact.
            Err(_) if stop.is_stopped() || meter.is_exhausted() => None,
            Err(error) => Some(format!("cannot be read: {error}")),
        }
    }
}

/// What is known about the files of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// They are those of an intact copy.
    Intact,
    /// They differ from those of an intact copy.
    Damaged,
    /// There is no directory of the layer.
    Missing,
    /// No copy can be compared, and the runtime's own is damaged: they may be damaged like that.
    Doubtful,
    /// No copy can be compared, and the runtime has just unpacked them.
    Restored,
    /// No copy can be compared.
    Unknown,
}

impl State {
    fn is_compared(self) -> bool {
        matches!(self, State::Intact | State::Damaged)
    }

    /// Whether the image is pulled again because of this layer.
    fn is_bad(self) -> bool {
        matches!(self, State::Damaged | State::Missing | State::Doubtful)
    }

    /// For a comparison of contents, or only of types and sizes.
    fn shown(self, contents: bool) -> LayerState {
        match self {
            State::Damaged | State::Missing | State::Doubtful => LayerState::Damaged,
            State::Intact if contents => LayerState::Intact,
            State::Restored => LayerState::Intact,
            State::Intact | State::Unknown => LayerState::Unknown,
        }
    }
}

/// A check of all layers.
#[derive(Debug)]
struct Checked {
    report: CheckReport,
    /// The layers by their directories.
    layers: Vec<(PathBuf, State)>,
    /// Whether contents were compared.
    contents: bool,
}

impl Checked {
    /// The result after the image was pulled again. A layer that a container or another image uses is
    /// kept by the runtime, which then neither loads nor unpacks it: the layer is in the same directory,
    /// cannot be compared, and is as damaged as before. A directory that was missing is a new one,
    /// because CRI-O names directories by the contents of their layers.
    fn pulled_again(self, mut after: Checked) -> Checked {
        let mut retained = 0;
        for (dir, state) in &mut after.layers {
            if *state != State::Unknown {
                continue;
            }
            match self.layers.iter().find(|(known, _)| known == dir) {
                Some((_, before @ (State::Damaged | State::Doubtful))) => {
                    *state = *before;
                    retained += 1;
                }
                Some((_, State::Missing)) | None => *state = State::Restored,
                Some(_) => {}
            }
        }
        if retained > 0 {
            let what = format!("the runtime kept {retained} damaged layers, which others use");
            after.report.problems.push(what);
        }
        after.count();
        let CheckReport { damaged, findings, mended, .. } = self.report;
        let mended = if after.report.intact { damaged } else { mended };
        Checked { report: CheckReport { damaged, findings, mended, ..after.report }, ..after }
    }

    fn count(&mut self) {
        let states = || self.layers.iter().map(|(_, state)| *state);
        self.report.verified = states().filter(|state| state.is_compared()).count();
        self.report.intact = !states().any(State::is_bad);
        self.report.states = states().map(|state| state.shown(self.contents)).collect();
    }
}

fn check_layers(
    unpacked: &Unpacked,
    sources: &[Source<'_>],
    options: CheckOptions,
    progress: &mut dyn FnMut(usize, usize),
    meter: &Arc<Meter>,
    stop: &StopToken,
) -> Checked {
    let layers = unpacked.layers.len();
    let mut checked = Checked {
        report: CheckReport { id: unpacked.id.clone(), layers, ..CheckReport::default() },
        layers: Vec::new(),
        contents: options.contents,
    };
    for (index, layer) in unpacked.layers.iter().enumerate() {
        progress(index, layers);
        let state = LayerCheck { layer, sources, options, meter, stop }.run(&mut checked.report);
        checked.layers.push((layer.dir.clone(), state));
    }
    progress(layers, layers);
    checked.count();
    checked
}

struct LayerCheck<'a> {
    layer: &'a Layer,
    sources: &'a [Source<'a>],
    options: CheckOptions,
    meter: &'a Arc<Meter>,
    stop: &'a StopToken,
}

/// A copy that cannot be compared: its source, its digest, and why.
type FailedCopy<'a> = (&'a Source<'a>, &'a String, String);

impl LayerCheck<'_> {
    /// Checks the layer with the first source that has an intact copy of it.
    fn run(&self, report: &mut CheckReport) -> State {
        let LayerCheck { layer, options, .. } = *self;
        let short = layer.diff_id.get(..19).unwrap_or(&layer.diff_id);
        let is_missing = !layer.dir.exists();
        if is_missing {
            let mut found = Findings::default();
            found.add(format!("layer {short}"), "has no directory".to_owned());
            report.take(found);
            let make = || disk_writes::created(std::fs::create_dir(&layer.dir)).is_ok();
            if !options.mend || self.stop.is_stopped() || self.meter.write(0).is_err() || !make() {
                return State::Missing;
            }
        }
        let mut failed = Vec::new();
        for (source, digest) in
            self.sources.iter().flat_map(|source| layer.digests().map(move |digest| (source, digest)))
        {
            match self.pass(source, digest, None) {
                Ok(None) => {}
                Ok(Some((found, _))) => {
                    let state = match found.total {
                        0 => State::Intact,
                        _ if options.mend => self.mend(source, digest, &found, report),
                        _ => State::Damaged,
                    };
                    report.take(found);
                    // A damaged blob is harmless as long as another copy of its layer is intact, and is
                    // not replaced.
                    self.has_damaged_blob(&failed, report);
                    return state;
                }
                Err(reason) => failed.push((source, digest, reason)),
            }
        }
        let reasons: Vec<&str> = failed.iter().map(|(_, _, reason)| reason.as_str()).collect();
        let reason =
            if reasons.is_empty() { "no copy of it is on this node".to_owned() } else { reasons.join("; ") };
        report.problems.push(format!("layer {short} cannot be verified: {reason}"));
        if is_missing {
            // An empty directory would hide what is wrong.
            let _ = std::fs::remove_dir(&layer.dir);
            return State::Missing;
        }
        if self.has_damaged_blob(&failed, report) { State::Doubtful } else { State::Unknown }
    }

    /// Whether a copy of the runtime that cannot be compared is damaged: its content has another digest
    /// than its name.
    fn has_damaged_blob(&self, failed: &[FailedCopy<'_>], report: &mut CheckReport) -> bool {
        for (source, digest, _) in failed {
            if let Some(damage) = source.damage(digest, self.meter, self.stop) {
                let mut found = Findings::default();
                found.add(format!("blob {digest}"), damage);
                report.take(found);
                return true;
            }
        }
        false
    }

    /// Replaces what differs from a copy that is intact, and compares again.
    fn mend(&self, source: &Source<'_>, digest: &str, found: &Findings, report: &mut CheckReport) -> State {
        let (mut next, mut failure) = (None, None);
        for _ in 0..ROUNDS {
            let mended = self.pass(source, digest, Some(next.as_ref().unwrap_or(found)));
            let after = self.pass(source, digest, None);
            match (mended, after) {
                (Ok(Some((_, outcome))), Ok(Some((after, _)))) => {
                    report.mended += outcome.mended;
                    if after.total == 0 {
                        return State::Intact;
                    }
                    next = Some(after);
                    failure = outcome.failure;
                    if outcome.mended == 0 {
                        break;
                    }
                }
                (mended, after) => {
                    report.problems.extend([mended.err(), after.err()].into_iter().flatten());
                    break;
                }
            }
        }
        report.problems.extend(failure);
        State::Damaged
    }

    /// Compares the layer with a copy, and replaces what differed in an earlier comparison. `None`: there is
    /// no copy.
    fn pass(
        &self,
        source: &Source<'_>,
        digest: &str,
        mend: Option<&Findings>,
    ) -> Result<Option<(Findings, Outcome)>, String> {
        let LayerCheck { layer, options, meter, stop, .. } = *self;
        let named = |error: io::Error| format!("a copy of {digest}: {}", meter.reason(error));
        let Some(blob) = source.open(digest, meter, stop)? else { return Ok(None) };
        let (mut tar, compression) = decompress::open(Box::new(blob), MAX_LAYER).map_err(named)?;
        if compression != Compression::None {
            // Both are work: the compressed bytes, and those that they expand to.
            tar = Box::new(Metered { inner: tar, meter: Arc::clone(meter), stop: stop.clone() });
        }
        let dir =
            tree::open(&layer.dir).map_err(|errno| format!("its directory: {}", io::Error::from(errno)))?;
        let mut found = Findings::default();
        let layer_options = LayerCheckOptions { contents: options.contents, mend };
        let outcome = layer::compare(dir, tar, layer_options, &mut found, meter, stop).map_err(named)?;
        if outcome.digest == layer.diff_id {
            return Ok(Some((found, outcome)));
        }
        Err(format!("a copy of {digest} does not have the digest of the layer"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::gzip::Gzip;
    use crate::util::sha256;
    use crate::util::tar::tests::{end, entry};
    use crate::util::testing::zstd;
    use std::collections::BTreeMap;
    use std::io::Write;

    struct Fixture {
        dir: tempfile::TempDir,
        unpacked: Unpacked,
        blobs: BTreeMap<String, Vec<u8>>,
    }

    struct Blobs<'a>(&'a BTreeMap<String, Vec<u8>>);

    impl LayerSource for Blobs<'_> {
        fn open(
            &self,
            digest: &str,
            _: &CountBytes,
            _: &StopToken,
        ) -> Result<Option<Box<dyn Read + Send>>, String> {
            let blob = self.0.get(digest).cloned();
            Ok(blob.map(|blob| Box::new(io::Cursor::new(blob)) as Box<dyn Read + Send>))
        }
    }

    fn digest(bytes: &[u8]) -> String {
        format!("sha256:{}", sha256::sha256_hex(bytes))
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
            let names = vec!["registry/image:1".to_owned()];
            let unpacked = Unpacked { id: "sha256:1".to_owned(), names, pinned: false, layers, store: None };
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

        /// A store of the runtime with damaged blobs of these layers, and nothing else.
        fn damaged_store(&self, layers: &[usize]) -> tempfile::TempDir {
            let store = tempfile::tempdir().unwrap();
            for layer in layers {
                let digest = self.unpacked.layers[*layer].digests().next().unwrap();
                std::fs::write(store.path().join(storage::hex_of(digest).unwrap()), "").unwrap();
            }
            store
        }

        fn check_with_store(&self, store: &Path, mend: bool) -> Checked {
            let blobs = Blobs(&self.blobs);
            self.check_sources(&[Source::Store(Store(store)), Source::Other(&blobs)], mend)
        }

        fn check(&self, mend: bool) -> CheckReport {
            self.check_layers(mend).report
        }

        fn check_layers(&self, mend: bool) -> Checked {
            self.check_sources(&[Source::Other(&Blobs(&self.blobs))], mend)
        }

        fn check_sources(&self, sources: &[Source<'_>], mend: bool) -> Checked {
            let (options, meter) = (CheckOptions { contents: true, mend }, Meter::unlimited());
            let stop = StopToken::never();
            check_layers(&self.unpacked, sources, options, &mut |_, _| {}, &meter, &stop)
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
        let (first, second) = (Blobs(&fixture.blobs), Blobs(&intact));
        let sources = [Source::Other(&first), Source::Other(&second)];
        let options = CheckOptions { contents: false, mend: true };
        let (meter, stop) = (Meter::unlimited(), StopToken::never());
        let checked = check_layers(&fixture.unpacked, &sources, options, &mut |_, _| {}, &meter, &stop);
        let report = checked.report;
        assert_eq!((report.intact, report.mended, report.problems.len()), (true, 1, 0), "{report:?}");
    }

    #[test]
    fn damaged_blob_is_a_finding_but_no_reason_to_replace_an_intact_image() {
        let mut fixture = Fixture::new();
        let store = fixture.damaged_store(&[0, 1]);
        let report = fixture.check_with_store(store.path(), true).report;
        assert_eq!((report.damaged, report.intact, report.mended), (2, true, 0));
        assert!(report.findings[0].problem == "has another digest", "{report:?}");
        // Without another copy the image is doubtful.
        fixture.blobs.clear();
        assert!(!fixture.check_with_store(store.path(), true).report.intact);
    }

    /// The manifest of an image may name any blob of the store for a layer, for example its configuration.
    #[test]
    fn intact_blob_that_is_no_copy_of_the_layer_is_no_damage() {
        let mut fixture = Fixture::new();
        fixture.blobs.clear();
        let (store, config) = (tempfile::tempdir().unwrap(), b"{\"rootfs\": {}}");
        std::fs::write(store.path().join(sha256::sha256_hex(config)), config).unwrap();
        fixture.unpacked.layers.iter_mut().for_each(|layer| layer.blob = Some(digest(config)));
        let checked = fixture.check_with_store(store.path(), true);
        assert!(checked.layers.iter().all(|(_, state)| *state == State::Unknown), "{checked:?}");
        let report = checked.report;
        assert_eq!((report.damaged, report.intact, report.verified), (0, true, 0), "{report:?}");
    }

    #[test]
    fn copy_that_could_not_be_read_within_the_limit_is_not_damaged() {
        let fixture = Fixture::new();
        let store = tempfile::tempdir().unwrap();
        for (digest, blob) in &fixture.blobs {
            std::fs::write(store.path().join(storage::hex_of(digest).unwrap()), blob).unwrap();
        }
        let (options, stop) = (CheckOptions { contents: true, mend: true }, StopToken::never());
        let sources = [Source::Store(Store(store.path()))];
        let check = |limit| {
            let meter = Meter::new(Usage { read: limit, written: 0 });
            check_layers(&fixture.unpacked, &sources, options, &mut |_, _| {}, &meter, &stop).report
        };
        let report = check(1000);
        assert_eq!((report.damaged, report.verified), (0, 0), "{report:?}");
        assert!(report.problems[0].contains("the limit of bytes"), "{report:?}");
        assert_eq!(check(100_000).verified, 2);
    }

    /// Members of gzip without content, and frames of zstd that are skipped, expand to nothing.
    #[test]
    fn compressed_bytes_that_expand_to_nothing_are_counted_and_limited() {
        let mut fixture = Fixture::new();
        let tar = [entry("f", b'0', "", b"upper"), end()].concat();
        let gzip = |data: &[u8]| {
            let mut gzip = Gzip::fast(Vec::new());
            gzip.write_all(data).unwrap();
            gzip.finish().unwrap()
        };
        let skipped =
            [&[0x50, 0x2a, 0x4d, 0x18][..], &(1_u32 << 20).to_le_bytes(), &vec![0; 1 << 20]].concat();
        let empty = gzip(b"").repeat((1 << 20) / gzip(b"").len());
        for blob in [[empty, gzip(&tar)].concat(), [skipped, zstd(&tar)].concat()] {
            let size = blob.len() as u64;
            fixture.unpacked.layers.truncate(1);
            let name = digest(&blob);
            fixture.unpacked.layers[0] =
                Layer { dir: fixture.path("2"), diff_id: digest(&tar), blob: Some(name.clone()) };
            fixture.blobs.insert(name, blob);
            let blobs = Blobs(&fixture.blobs);
            let sources = [Source::Other(&blobs)];
            let options = CheckOptions { contents: true, mend: false };
            let check = |meter: &Arc<Meter>| {
                check_layers(&fixture.unpacked, &sources, options, &mut |_, _| {}, meter, &StopToken::never())
            };
            let meter = Meter::unlimited();
            assert_eq!(check(&meter).report.verified, 1);
            assert!(meter.used().read >= size + tar.len() as u64, "{:?}", meter.used());
            let meter = Meter::new(Usage { read: size / 2, written: 0 });
            let report = check(&meter).report;
            assert!(meter.is_exhausted() && report.verified == 0, "{report:?}");
            assert!(report.problems[0].contains("the limit of bytes"), "{report:?}");
            let (source, ended) = crate::util::stop::pair();
            drop(source);
            let meter = Meter::unlimited();
            check_layers(&fixture.unpacked, &sources, options, &mut |_, _| {}, &meter, &ended);
            assert_eq!(meter.used().read, 0, "it was stopped");
        }
    }

    #[test]
    fn copy_without_compression_is_counted_once() {
        let mut fixture = Fixture::new();
        fixture.unpacked.layers.truncate(1);
        let meter = Meter::unlimited();
        let (options, stop) = (CheckOptions { contents: true, mend: false }, StopToken::never());
        let blobs = Blobs(&fixture.blobs);
        check_layers(&fixture.unpacked, &[Source::Other(&blobs)], options, &mut |_, _| {}, &meter, &stop);
        let tar = fixture.blobs[&fixture.unpacked.layers[0].diff_id].len() as u64;
        // Two entries are searched for, and the content of both files is read.
        assert_eq!(meter.used(), Usage { read: tar + 2 * 4096 + 9, written: 0 });
    }

    #[test]
    fn image_whose_damaged_layer_the_runtime_retained_is_not_mended() {
        let mut fixture = Fixture::new();
        let intact = std::mem::take(&mut fixture.blobs);
        let store = fixture.damaged_store(&[0, 1]);
        let before = fixture.check_with_store(store.path(), false);
        assert!(!before.report.intact);
        // Pulled again: the layers have the same directories, and no blob was loaded.
        let after = fixture.check_layers(false);
        assert!(after.report.intact);
        let pulled = before.pulled_again(after);
        assert!(!pulled.report.intact && pulled.report.mended == 0, "{pulled:?}");
        let problem = "the runtime kept 2 damaged layers, which others use";
        assert!(pulled.report.problems.iter().any(|reported| reported == problem), "{pulled:?}");
        // Once more: both were unpacked again, one from a blob that is not kept.
        std::fs::rename(fixture.path("1"), fixture.path("3")).unwrap();
        fixture.unpacked.layers[0].dir = fixture.path("3");
        fixture.blobs = intact;
        fixture.blobs.remove(&fixture.unpacked.layers[0].diff_id);
        let mended = pulled.pulled_again(fixture.check_layers(false));
        assert_eq!((mended.report.intact, mended.report.mended), (true, 2), "{mended:?}");
    }

    /// CRI-O names the directory of a layer by its contents, and keeps no blobs.
    #[test]
    fn missing_layer_that_a_pull_has_restored_is_mended() {
        let mut fixture = Fixture::new();
        fixture.blobs.clear();
        std::fs::rename(fixture.path("2"), fixture.path("away")).unwrap();
        let before = fixture.check_layers(false);
        assert_eq!(before.layers[1].1, State::Missing);
        std::fs::rename(fixture.path("away"), fixture.path("2")).unwrap();
        let after = before.pulled_again(fixture.check_layers(false)).report;
        assert_eq!((after.intact, after.mended), (true, 1), "{after:?}");
    }

    /// A layer that another image brought is intact, and the runtime has no blob of it.
    #[test]
    fn damaged_blob_of_one_layer_leaves_the_state_of_the_others_unknown() {
        let mut fixture = Fixture::new();
        fixture.blobs.clear();
        let store = fixture.damaged_store(&[1]);
        let before = fixture.check_with_store(store.path(), false);
        let states: Vec<State> = before.layers.iter().map(|(_, state)| *state).collect();
        assert_eq!(states, [State::Unknown, State::Doubtful]);
        // The image is pulled again, and only the damaged layer is unpacked again.
        std::fs::rename(fixture.path("2"), fixture.path("3")).unwrap();
        fixture.unpacked.layers[1].dir = fixture.path("3");
        let after = before.pulled_again(fixture.check_layers(false)).report;
        assert_eq!((after.intact, after.mended, after.verified), (true, 1, 0), "{after:?}");
    }

    fn check_layer(layer: &Layer, source: Source<'_>) -> (State, CheckReport) {
        let (options, stop) = (CheckOptions { contents: true, mend: false }, &StopToken::never());
        let check = LayerCheck { layer, sources: &[source], options, meter: &Meter::unlimited(), stop };
        let mut report = CheckReport::default();
        (check.run(&mut report), report)
    }

    #[test]
    fn damaged_blob_of_the_right_size_makes_its_layer_doubtful() {
        let fixture = Fixture::new();
        let store = tempfile::tempdir().unwrap();
        let layer = &fixture.unpacked.layers[0];
        let mut blob = fixture.blobs[&layer.diff_id].clone();
        blob[512] ^= 1;
        std::fs::write(store.path().join(storage::hex_of(&layer.diff_id).unwrap()), &blob).unwrap();
        let (state, report) = check_layer(layer, Source::Store(Store(store.path())));
        let what = format!("blob {} has another digest", layer.diff_id);
        assert_eq!((state, report.damaged, report.summary()), (State::Doubtful, 1, what));
        // The image was not unpacked from this copy.
        let other = [(layer.diff_id.clone(), blob)].into();
        let (state, report) = check_layer(layer, Source::Other(&Blobs(&other)));
        assert_eq!((state, report.damaged), (State::Unknown, 0));
    }

    #[test]
    fn intact_blob_that_cannot_be_compared_does_not_make_its_layer_doubtful() {
        let fixture = Fixture::new();
        let store = tempfile::tempdir().unwrap();
        let place = |digest: &str| store.path().join(storage::hex_of(digest).unwrap());
        let sparse = [entry("f", b'S', "", b"data"), end()].concat();
        let mut gzip = Gzip::fast(Vec::new());
        gzip.write_all(&sparse).unwrap();
        let packed = gzip.finish().unwrap();
        let other_form = [b"BZh9 made by bzip2".as_slice(), &[1; 1024]].concat();
        let cases = [
            (&sparse, None, "is not supported"),
            (&sparse, Some(&packed), "is not supported"),
            (&other_form, None, "a copy of"),
        ];
        for (tar, packed, problem) in cases {
            let blob = packed.unwrap_or(tar);
            let layer =
                Layer { dir: fixture.path("1"), diff_id: digest(tar), blob: packed.map(|blob| digest(blob)) };
            let place = place(&digest(blob));
            std::fs::write(&place, blob).unwrap();
            let (state, report) = check_layer(&layer, Source::Store(Store(store.path())));
            assert_eq!((state, report.damaged), (State::Unknown, 0), "{report:?}");
            assert!(report.problems[0].contains(problem), "{report:?}");
            // Another digest is damage in every form.
            let mut damaged = blob.clone();
            damaged[300.min(blob.len() - 1)] ^= 1;
            std::fs::write(&place, damaged).unwrap();
            let (state, report) = check_layer(&layer, Source::Store(Store(store.path())));
            assert_eq!((state, report.damaged), (State::Doubtful, 1), "{report:?}");
            std::fs::remove_file(place).unwrap();
        }
    }

    #[test]
    fn store_of_the_runtime_is_a_source() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(sha256::sha256_hex(b"text")), "text").unwrap();
        let store = Store(dir.path());
        let (count, stop): (CountBytes, _) = (Arc::new(|_| Ok(())), StopToken::never());
        let open = |digest: &str| store.open(digest, &count, &stop).unwrap();
        let mut text = String::new();
        open(&digest(b"text")).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
        assert!(open(&digest(b"other")).is_none());
        assert!(open("sha256:../x").is_none());
    }
}
