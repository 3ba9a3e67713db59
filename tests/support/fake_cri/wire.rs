//! A proxy between an agent and the fake, which the test controls: it copies bytes, and can cut
//! connections or send random bytes at any point.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use coracle::util::threads::{OnDeath, Running, Stack, spawn};

/// Bytes that are no valid HTTP/2.
const NOISE: [u8; 64] = [0xa5; 64];

struct Connection {
    agent: UnixStream,
    runtime: UnixStream,
}

/// A socket that leads to the fake's. It ends when it is dropped.
pub(crate) struct Wire {
    path: PathBuf,
    open: Arc<Mutex<Vec<Connection>>>,
    _accepting: Running,
}

impl Wire {
    /// Listens beside the socket of the fake.
    pub(crate) fn start(target: &Path) -> Wire {
        let path = target.with_extension("wire");
        let listener = UnixListener::bind(&path).unwrap();
        let open = Arc::new(Mutex::new(Vec::new()));
        let (list, target) = (Arc::clone(&open), target.to_owned());
        let accepting = spawn("t/wire", Stack::Small, OnDeath::Unsupervised, move |stop| {
            let mut copying: Vec<Running> = Vec::new();
            for agent in listener.incoming() {
                if stop.is_stopped() {
                    return;
                }
                copying.retain(|copier| !copier.is_finished());
                // A runtime that is down refuses: the agent's connection ends at once, too.
                let (Ok(agent), Ok(runtime)) = (agent, UnixStream::connect(&target)) else { continue };
                let ends = [(&agent, &runtime), (&runtime, &agent)]
                    .map(|(from, to)| (from.try_clone().unwrap(), to.try_clone().unwrap()));
                // Before its first byte passes: a test that has seen a call cuts its connection.
                list.lock().unwrap().push(Connection { agent, runtime });
                for (from, to) in ends {
                    let copy =
                        spawn("t/wire/copy", Stack::Small, OnDeath::Unsupervised, move |_| copy(from, to));
                    copying.push(copy.unwrap());
                }
            }
        });
        let (wake, list) = (path.clone(), Arc::clone(&open));
        let accepting = accepting.unwrap().with_waker(Box::new(move || {
            let _ = UnixStream::connect(&wake);
            cut(&mut list.lock().unwrap());
        }));
        Wire { path, open, _accepting: accepting }
    }

    /// What the agent connects to.
    pub(crate) fn endpoint(&self) -> String {
        format!("unix://{}", self.path.display())
    }

    /// Ends every connection; new ones can be made at once.
    pub(crate) fn cut(&self) {
        cut(&mut self.open.lock().unwrap());
    }

    /// Sends random bytes to the agent on every connection. New connections are not affected.
    pub(crate) fn send_random_bytes(&self) {
        let mut open = self.open.lock().unwrap();
        for connection in open.iter_mut() {
            let _ = connection.agent.write_all(&NOISE);
        }
        // It is garbled only once; the agent ends it.
        open.clear();
    }
}

fn cut(open: &mut Vec<Connection>) {
    for connection in open.drain(..) {
        let _ = connection.agent.shutdown(Shutdown::Both);
        let _ = connection.runtime.shutdown(Shutdown::Both);
    }
}

/// Passes bytes on until either side ends, and then ends both.
fn copy(mut from: UnixStream, mut to: UnixStream) {
    let mut buffer = [0; 16 * 1024];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
