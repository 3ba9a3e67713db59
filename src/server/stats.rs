//! `/stats/summary`: what the node, its pods and their containers use.

use std::sync::Arc;

use super::Deps;
use super::routes::{Answer, Asked, Method, Reply};

/// The document, whole or processors and memory only; or why there is none.
pub type Summarize = dyn Fn(Detail) -> Result<Vec<u8>, String> + Send + Sync;

/// How much is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Everything.
    Whole,
    /// `only_cpu_and_memory=true`.
    CpuAndMemory,
}

/// Where numbers come from.
#[derive(Clone)]
pub struct StatsDeps {
    /// Waits for a collection.
    pub summary: Arc<Summarize>,
}

#[cfg(test)]
impl StatsDeps {
    /// Those of a node where nothing is measured.
    pub(crate) fn none() -> StatsDeps {
        StatsDeps { summary: Arc::new(|_| Err("nothing is measured".into())) }
    }
}

/// Answers a path below `/stats`.
pub(super) fn answer(asked: &Asked, deps: &Deps) -> Result<Reply, Answer> {
    if asked.target.path.trim_end_matches('/') != "/stats/summary" {
        return Err(Answer::no_route());
    }
    if !matches!(asked.method, Method::Get | Method::Head | Method::Post) {
        return Err(Answer::not_allowed("GET, POST"));
    }
    // As upstream, which takes nothing else for true.
    let only = asked.target.get("only_cpu_and_memory") == Some("true");
    let detail = if only { Detail::CpuAndMemory } else { Detail::Whole };
    match (deps.stats.summary)(detail) {
        Ok(body) => Ok(Reply::Whole(Answer {
            status: 200,
            content_type: "application/json",
            body,
            headers: Vec::new(),
        })),
        Err(why) => Err(Answer::text(500, format!("Internal Error: {why}\n"))),
    }
}
