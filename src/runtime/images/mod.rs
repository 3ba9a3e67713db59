//! Images.

pub mod gc;
