use super::*;
use crate::util::threads::{OnDeath, Running, Stack, spawn};

/// A connection, its client, and the other end of `shutdown`.
fn pair() -> (Connection, UnixStream, UnixStream) {
    let (client, server) = UnixStream::pair().unwrap();
    let (end, shutdown) = UnixStream::pair().unwrap();
    server.set_nonblocking(true).unwrap();
    (Connection::new(Socket::Unix(server), Arc::new(shutdown)), client, end)
}

/// Writes without end, and sends the error that ends it.
fn endless(mut connection: Connection) -> (Running, crossbeam_channel::Receiver<io::ErrorKind>) {
    let (ends, ended) = crossbeam_channel::bounded(1);
    let running = spawn("t/writer", Stack::Small, OnDeath::Unsupervised, move |_| {
        let error = loop {
            if let Err(error) = connection.write_all(&[b'x'; 4096]) {
                break error;
            }
        };
        let _ = ends.send(error.kind());
    });
    (running.unwrap(), ended)
}

#[test]
fn pace_allows_more_time_for_more_bytes() {
    let second = Duration::from_secs;
    let mut pace = Pace::total(second(60), 16 * 1024);
    assert_eq!(pace.left(), second(60));
    pace.waited += second(59);
    pace.wrote(1);
    assert!(pace.left() < second(2));
    pace.wrote(1024 * 1024 - 1);
    assert_eq!(pace.left(), second(65));
    pace.waited += second(66);
    assert_eq!(pace.left(), Duration::ZERO);
    // In a stream only pauses count.
    let mut pace = Pace::progress(second(14_400));
    pace.waited += second(125);
    assert_eq!(pace.left(), second(14_400 - 125));
    pace.wrote(1);
    assert_eq!(pace.left(), second(14_400));
}

#[test]
fn slow_client_of_a_whole_response_is_dropped_and_of_a_stream_is_not() {
    let millis = Duration::from_millis;
    // Longer than the socket takes to have room again.
    let whole = Pace::total(millis(1000), 4 << 20);
    for (pace, drops) in [(whole, true), (Pace::progress(Duration::from_secs(3600)), false)] {
        let (mut connection, mut client, _end) = pair();
        connection.set_pace(Some(pace));
        let (_running, ended) = endless(connection);
        // A few bytes from time to time, so that it never pauses for long.
        let begun = Instant::now();
        let limit = if drops { Duration::from_secs(60) } else { millis(2500) };
        let mut outcome = None;
        while outcome.is_none() && begun.elapsed() < limit {
            let _ = client.read(&mut [0; 4096]).unwrap();
            outcome = ended.recv_timeout(millis(10)).ok();
        }
        assert_eq!(outcome, drops.then_some(io::ErrorKind::TimedOut));
        drop(client);
    }
}

#[test]
fn write_ends_with_the_server_and_with_the_client() {
    let (connection, _client, end) = pair();
    let (_running, ended) = endless(connection);
    drop(end);
    assert_eq!(ended.recv(), Ok(io::ErrorKind::ConnectionAborted));
    let (connection, client, _end) = pair();
    let (_running, ended) = endless(connection);
    drop(client);
    assert!(matches!(ended.recv(), Ok(io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)));
}

#[test]
fn client_that_sends_and_does_not_read_is_dropped() {
    let (connection, mut client, _end) = pair();
    let (_running, ended) = endless(connection);
    let (mut sent, piece) = (0, [b'y'; 1024]);
    while client.write_all(&piece).is_ok() {
        sent += piece.len();
    }
    // What was read ahead, and what the kernel keeps.
    assert!(sent < 16 * AHEAD_BYTES, "{sent}");
    assert_eq!(ended.recv(), Ok(io::ErrorKind::Other));
}

#[test]
fn client_that_has_ended_its_direction_gets_the_whole_response() {
    let (connection, mut client, _end) = pair();
    client.write_all(b"the next request").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let writer = spawn("t/writer", Stack::Small, OnDeath::Unsupervised, move |_| {
        let mut connection = connection;
        connection.write_all(&vec![b'x'; 1 << 20]).unwrap();
        // The writes have read it if they had to wait.
        connection.set_deadline(Instant::now() + Duration::from_secs(60));
        while connection.input() != b"the next request" {
            assert_ne!(connection.read_more().unwrap(), 0);
        }
        connection.close(false);
    });
    let mut all = Vec::new();
    client.read_to_end(&mut all).unwrap();
    assert_eq!(all.len(), 1 << 20);
    drop(writer);
}

#[test]
fn reads_wait_until_the_deadline_or_the_servers_stop() {
    let (mut connection, mut client, end) = pair();
    connection.set_deadline(Instant::now() + Duration::from_millis(10));
    assert_eq!(connection.read_more().unwrap_err().kind(), io::ErrorKind::TimedOut);
    connection.set_deadline(Instant::now() + Duration::from_secs(60));
    client.write_all(b"ab").unwrap();
    assert_eq!((connection.read_more().unwrap(), connection.input()), (2, &b"ab"[..]));
    connection.consume(1);
    client.write_all(b"cd").unwrap();
    assert_eq!((connection.read_more().unwrap(), connection.input()), (2, &b"bcd"[..]));
    assert_eq!((connection.take_input(), connection.input()), (b"bcd".to_vec(), &b""[..]));
    drop(end);
    assert_eq!(connection.read_more().unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
}

#[test]
fn close_leaves_the_response_to_a_client_that_still_sends() {
    let (mut connection, mut client, _end) = pair();
    // Unread: a close now would reset the connection.
    client.write_all(&[b'x'; 8192]).unwrap();
    connection.write_all(b"rejected").unwrap();
    let closer = spawn("t/closer", Stack::Small, OnDeath::Unsupervised, move |_| connection.close(true));
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    assert_eq!(text, "rejected");
    drop((client, closer));
}
