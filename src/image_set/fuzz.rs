//! Hostile archives of images.

use crate::fuzz::Target;

pub(crate) fn targets() -> Vec<Target> {
    Vec::new()
}
