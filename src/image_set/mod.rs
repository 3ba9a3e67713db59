//! Room `image_set`: images from archives on the node's disk.

pub mod archive;
#[cfg(test)]
pub(crate) mod fuzz;
