//! SPDY that a client hides in WebSocket messages, so that proxies let it pass: it is taken
//! out, and put back, unread.

use crate::transport::websocket::{self, Event, Reader};

/// What such a subprotocol begins with; the rest is the protocol that is spoken in SPDY.
pub(super) const PREFIX: &str = "SPDY/3.1+";

/// One tunnel.
#[derive(Debug, Default)]
pub(super) struct Tunnel {
    reader: Reader,
}

impl Tunnel {
    /// From the client. False: it is over.
    pub(super) fn client(
        &mut self,
        mut bytes: &mut [u8],
        client: &mut Vec<u8>,
        runtime: &mut Vec<u8>,
    ) -> bool {
        loop {
            match self.reader.next(&mut bytes) {
                Ok(Some(Event::Piece { bytes, .. })) => runtime.extend_from_slice(bytes),
                Ok(Some(Event::Ping(content))) => websocket::pong(client, &content),
                Ok(None) => return true,
                Ok(Some(Event::Close)) => break,
                Err(why) => {
                    log::debug!("a client's tunnel: {why}");
                    break;
                }
            }
        }
        websocket::close(client);
        false
    }

    /// From the runtime.
    pub(super) fn runtime(bytes: &[u8], client: &mut Vec<u8>) {
        if !bytes.is_empty() {
            websocket::binary_head(client, bytes.len());
            client.extend_from_slice(bytes);
        }
    }

    /// After the runtime's last byte.
    pub(super) fn runtime_ended(client: &mut Vec<u8>) {
        websocket::close(client);
    }
}
