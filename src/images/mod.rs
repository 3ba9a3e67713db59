//! Room `images`: the images of this node (Go: pkg/kubelet/images, pkg/credentialprovider).
//!
//! `pull` provides the image of each container, `gc` removes unused ones, `set` has the images of
//! archives on this node, and `check` finds and replaces damaged files of unpacked images.
//! Threads: `image-set` reads archives, `image-pull` makes the runtime pull what it lacks of them, and
//! `image-check` exists while images of failed containers are checked or removed names are missing.

pub mod check;
#[cfg(test)]
pub(crate) mod fuzz;
pub mod gc;
pub mod pull;
pub mod set;
