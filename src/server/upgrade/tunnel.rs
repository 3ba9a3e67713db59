//! SPDY in WebSocket messages, which pass more proxies: it is unpacked and packed, not parsed.

use crate::transport::websocket::{self, Event, Reader};

/// The prefix of such a subprotocol; the rest is the protocol in SPDY.
pub(super) const PREFIX: &str = "SPDY/3.1+";

#[derive(Debug, Default)]
pub(super) struct Tunnel {
    reader: Reader,
}

impl Tunnel {
    /// Handles bytes of the client. False: the stream is over.
    pub(super) fn handle_client_bytes(
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
                Err(error) => {
                    log::debug!("a client's tunnel: {error}");
                    break;
                }
            }
        }
        websocket::close(client);
        false
    }

    pub(super) fn handle_runtime_bytes(bytes: &[u8], client: &mut Vec<u8>) {
        if !bytes.is_empty() {
            websocket::binary_head(client, bytes.len());
            client.extend_from_slice(bytes);
        }
    }

    /// Handles the end of the runtime's bytes.
    pub(super) fn handle_runtime_end(client: &mut Vec<u8>) {
        websocket::close(client);
    }
}
