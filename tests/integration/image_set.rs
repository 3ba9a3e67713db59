//! Archives of images and a runtime that responds late.

use std::fs;

use coracle::transport::grpc::Kind;
use serde_json::json;

use crate::support::fake_node::{FakeNode, LONG};
use crate::support::image_archives;
use crate::support::wait::wait_until;

#[test]
fn images_of_archives_are_pulled_when_the_runtime_starts_late() {
    let mut node = FakeNode::prepare(json!({}));
    let directory = node.root().join("images.d");
    fs::create_dir_all(&directory).unwrap();
    let image = "registry.example/late:1";
    image_archives::write_made_up(&node.path("work"), image, 1024, &directory.join("late.tar"));
    node.fake.fail("ListImages", Kind::Unavailable, "not started yet");
    node.start_agent();
    // The archive was read, and the runtime was asked again after it: no change wakes the agent later.
    wait_until("the archive to be read", LONG, || node.cli(&["images", "list"]).contains("late.tar"));
    let lists = node.fake.count("ListImages");
    wait_until("two more lists", LONG, || node.fake.count("ListImages") >= lists + 2);
    assert_eq!(node.fake.count("PullImage"), 0);
    node.fake.behave("ListImages");
    wait_until("the pull", LONG, || node.fake.count("PullImage") > 0);
}
