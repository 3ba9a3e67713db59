//! Shared test material.
use crate::model::runtime::{ContainerState, ContainerStatus};

/// An instance with nothing special about it.
pub(super) fn instance(name: &str, state: ContainerState) -> ContainerStatus {
    ContainerStatus {
        id: format!("{name}/0").as_str().into(),
        name: name.to_owned(),
        state,
        created_at: Some(jiff::Timestamp::from_second(100).unwrap()),
        started_at: (state != ContainerState::Created).then(|| jiff::Timestamp::from_second(101).unwrap()),
        finished_at: (state == ContainerState::Exited).then(|| jiff::Timestamp::from_second(102).unwrap()),
        exit_code: 0,
        image: "localhost/busybox:1".to_owned(),
        image_id: "sha256:5d1f".into(),
        hash: None,
        restart_count: 0,
        reason: String::new(),
        message: String::new(),
        log_path: String::new(),
        termination_message_path: String::new(),
        termination_message_policy: String::new(),
        sandbox_id: "sandbox".into(),
        resources: None,
        user: None,
        mounts: Vec::new(),
    }
}
