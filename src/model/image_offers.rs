//! What the node's own set of images (room `images`) offers to the room that starts containers.

use std::sync::Arc;

use crate::util::stop::StopToken;

/// What the set of image archives says about an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Offer {
    /// No archive has it, or archives are still being read after the longest wait.
    NotInSet,
    /// A pull gets it from an archive.
    Available,
    /// An archive has it and cannot provide it. The text names the archive and the damaged part.
    Damaged(String),
}

/// The images that archives on this node provide.
pub trait ImageOffers: Send + Sync {
    /// Called before a pull of an image. While archives that may have the image are being read,
    /// it waits, for ten minutes at most, and these archives are read first. `image` has a tag or
    /// a digest. `stop` ends the wait.
    fn offer(&self, image: &str, stop: &StopToken) -> Offer;

    /// Whether an image with one of these names or digests (as the runtime lists them) must not be
    /// collected as unused.
    fn keeps(&self, names: &[String]) -> bool;
}

/// A shared [`ImageOffers`].
pub type SharedOffers = Arc<dyn ImageOffers>;

/// A node without image archives.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoOffers;

impl ImageOffers for NoOffers {
    fn offer(&self, _: &str, _: &StopToken) -> Offer {
        Offer::NotInSet
    }

    fn keeps(&self, _: &[String]) -> bool {
        false
    }
}
