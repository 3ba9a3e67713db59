//! Room `kube`.
