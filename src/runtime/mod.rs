//! Room `runtime`.

pub mod gc;
pub mod images;
pub mod logs;
