//! Subscribers of container events: a queue each, drained by the server's own thread.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use coracle::transport::generated::runtime::ContainerEventResponse;

#[derive(Default)]
struct Queue {
    events: VecDeque<ContainerEventResponse>,
    ended: bool,
    waker: Option<Waker>,
}

/// One open stream.
#[derive(Clone, Default)]
pub struct Subscriber(Arc<Mutex<Queue>>);

impl Subscriber {
    fn change(&self, change: impl FnOnce(&mut Queue)) {
        let waker = {
            let mut queue = self.0.lock().unwrap();
            change(&mut queue);
            queue.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    pub fn push(&self, events: &[ContainerEventResponse]) {
        self.change(|queue| queue.events.extend(events.iter().cloned()));
    }

    pub fn end(&self) {
        self.change(|queue| queue.ended = true);
    }

    pub fn has_ended(&self) -> bool {
        self.0.lock().unwrap().ended
    }

    /// The next event; `None` at the end.
    pub async fn next(&self) -> Option<ContainerEventResponse> {
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
