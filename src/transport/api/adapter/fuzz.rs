//! Hostile responses of a server, read by the library in our buffers.

use std::io::{Cursor, Write};

use super::*;
use crate::util::fuzzing::{Budget, Target};
use crate::util::threads::Stack;

/// A server that sends these bytes on each connection, at most `piece` of them at once.
#[derive(Clone)]
struct ScriptedPeer {
    bytes: Cursor<Arc<[u8]>>,
    piece: usize,
}

impl fmt::Debug for ScriptedPeer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("ScriptedPeer")
    }
}

impl Read for ScriptedPeer {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = into.len().min(self.piece);
        self.bytes.read(into.get_mut(..count).unwrap_or_default())
    }
}

impl Write for ScriptedPeer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Wire for ScriptedPeer {
    fn begin_call(&mut self, _: &Arc<Call>) {}

    fn wait(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn end_sending(&mut self) {}

    fn is_quiet(&mut self) -> bool {
        false
    }

    fn failed(&mut self, error: &io::Error, _: &'static str) -> DialError {
        DialError::Malformed(error.to_string())
    }
}

impl Connector for ScriptedPeer {
    type Out = Connection<ScriptedPeer>;

    fn connect(
        &self,
        _: &ConnectionDetails<'_>,
        _: Option<()>,
    ) -> Result<Option<Connection<ScriptedPeer>>, UreqError> {
        Ok(Call::current().map(|call| {
            let wire = ConnectedWire { wire: self.clone(), is_tls: false, origin: Arc::from("http://a") };
            Connection::new(wire, None, &call, &Arc::default())
        }))
    }
}

pub(in crate::transport) fn targets() -> Vec<Target> {
    vec![Target {
        name: "transport/api_answer",
        // Pod workers, which send requests, have the same stack size.
        stack: Stack::Small,
        max_bytes: 4 << 20,
        // The body is not stored here.
        budget: Budget { per_byte: 4, ..Budget::LINEAR },
        worst: crate::transport::fuzz::hostile_responses,
        seeds: crate::transport::fuzz::RESPONSES,
        run: |bytes| {
            let bytes: Arc<[u8]> = bytes.into();
            for piece in [1, 7, READ_BYTES] {
                // Only short responses are read byte by byte.
                if piece < READ_BYTES && bytes.len() > 64 * 1024 {
                    continue;
                }
                let peer = ScriptedPeer { bytes: Cursor::new(Arc::clone(&bytes)), piece };
                let agent = Agent::with_parts(settings().build(), peer, DeferredResolver);
                let now = Instant::now();
                let call = Call::new(&Breaker::default(), RequestKind::Call, (now, now), true, 0);
                let request = Request::get("http://a.example/b").body(()).unwrap();
                let Ok(response) = run(&agent, request, &call) else { continue };
                if let Ok(mut received) = final_response(response, call, &Arc::default()) {
                    let _ = io::copy(&mut received.body, &mut io::sink());
                }
            }
        },
    }]
}
