//! Subscribers of container events: a queue each, drained by the server's own thread. On
//! the way faults can be applied to a stream.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use coracle::transport::generated::runtime::ContainerEventResponse;

#[derive(Default)]
struct Queue {
    events: VecDeque<ContainerEventResponse>,
    ended: bool,
    waker: Option<Waker>,
}

/// One open stream.
#[derive(Clone, Default)]
pub(super) struct Subscriber(Arc<Mutex<Queue>>);

impl Subscriber {
    fn change(&self, change: impl FnOnce(&mut Queue)) {
        let waker = {
            let mut queue = self.0.lock().unwrap();
            change(&mut queue);
            queue.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    pub(super) fn push(&self, events: &[ContainerEventResponse]) {
        self.change(|queue| queue.events.extend(events.iter().cloned()));
    }

    pub(super) fn end(&self) {
        self.change(|queue| queue.ended = true);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.0.lock().unwrap().ended
    }

    /// The next event; `None` at the end.
    pub(super) async fn next(&self) -> Option<ContainerEventResponse> {
        poll_fn(|context| {
            let mut queue = self.0.lock().unwrap();
            match queue.events.pop_front() {
                Some(event) => Poll::Ready(Some(event)),
                None if queue.ended => Poll::Ready(None),
                None => {
                    queue.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// What happens to events on their way to the subscribers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum StreamFault {
    #[default]
    None,
    /// None arrives, without an error.
    Silent,
    /// Each comes three times.
    Repeats,
    /// Each comes this much later.
    Late(Duration),
    /// The newest comes first, after a while.
    Reordered,
    /// Each arrives with false events: unknown pods, no pod at all, old states.
    Lies,
    /// Every second one is lost.
    Loses,
    /// The stream ends after so many.
    Cuts(usize),
}

/// Applies faults between the state and the subscribers.
#[derive(Default)]
pub(super) struct StreamFaults {
    pub fault: StreamFault,
    seen: usize,
    held: Vec<(Instant, ContainerEventResponse)>,
}

impl StreamFaults {
    /// What is to be sent now, and whether the streams are to be ended after it.
    pub(super) fn deliver(
        &mut self,
        events: Vec<ContainerEventResponse>,
        now: Instant,
    ) -> (Vec<ContainerEventResponse>, bool) {
        let mut out = Vec::new();
        let mut cut = false;
        for event in events {
            self.seen += 1;
            match self.fault {
                StreamFault::None => out.push(event),
                StreamFault::Silent => {}
                StreamFault::Repeats => out.extend([event.clone(), event.clone(), event]),
                StreamFault::Late(delay) => self.held.push((now + delay, event)),
                StreamFault::Reordered => self.held.insert(0, (now + Duration::from_millis(60), event)),
                StreamFault::Lies => {
                    let mut other = event.clone();
                    if let Some(sandbox) = other.pod_sandbox_status.as_mut() {
                        sandbox
                            .labels
                            .insert("io.kubernetes.pod.uid".to_owned(), format!("lie-{}", self.seen));
                        sandbox.state = Default::default();
                    }
                    let empty = ContainerEventResponse::default();
                    let unknown =
                        ContainerEventResponse { container_id: "0123".to_owned(), ..Default::default() };
                    let old = ContainerEventResponse {
                        created_at: -1,
                        containers_statuses: Vec::new(),
                        ..event.clone()
                    };
                    out.extend([other, empty, unknown, old, event]);
                }
                StreamFault::Loses => {
                    if self.seen.is_multiple_of(2) {
                        out.push(event);
                    }
                }
                StreamFault::Cuts(after) => {
                    if cut {
                        continue;
                    }
                    out.push(event);
                    cut = self.seen.is_multiple_of(after);
                }
            }
        }
        let (due, held) = std::mem::take(&mut self.held).into_iter().partition(|(time, _)| *time <= now);
        self.held = held;
        let due: Vec<(Instant, ContainerEventResponse)> = due;
        out.extend(due.into_iter().map(|(_, event)| event));
        (out, cut)
    }
}
