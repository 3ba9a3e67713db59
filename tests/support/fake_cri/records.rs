//! Sandboxes and containers as a document, with which the runtime of another test continues.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use protobuf::Message;
use serde_json::{Value, json};

use super::state::{Container, Sandbox, State};

fn encode(message: &impl Message) -> Value {
    STANDARD.encode(message.write_to_bytes().expect("a message is serialized")).into()
}

fn decode<M: Message>(value: &Value) -> M {
    let bytes = STANDARD.decode(value.as_str().unwrap_or_default()).expect("a message is in base64");
    M::parse_from_bytes(&bytes).expect("a message of the CRI")
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

impl State {
    /// All sandboxes and containers. That a container ends by itself later is not in it.
    pub(crate) fn records(&self) -> Value {
        let sandboxes: Vec<Value> = self
            .sandboxes
            .values()
            .map(|sandbox| json!({"config": encode(&sandbox.config), "status": encode(&sandbox.status)}))
            .collect();
        let containers: Vec<Value> = self
            .containers
            .values()
            .map(|container| {
                json!({
                    "sandbox": container.sandbox_id,
                    "config": encode(&container.config),
                    "status": encode(&container.status),
                })
            })
            .collect();
        json!({"made": self.made, "sandboxes": sandboxes, "containers": containers})
    }

    /// Adds what [`State::records`] returned.
    pub(crate) fn add_records(&mut self, records: &Value) {
        // New records get other ids.
        self.made = self.made.max(records["made"].as_u64().unwrap_or(0));
        for record in list(&records["sandboxes"]) {
            let sandbox = Sandbox { config: decode(&record["config"]), status: decode(&record["status"]) };
            self.sandboxes.insert(sandbox.status.id.clone(), sandbox);
        }
        for record in list(&records["containers"]) {
            let container = Container {
                sandbox_id: record["sandbox"].as_str().unwrap_or_default().to_owned(),
                config: decode(&record["config"]),
                status: decode(&record["status"]),
                ends: None,
            };
            self.containers.insert(container.status.id.clone(), container);
        }
    }
}
