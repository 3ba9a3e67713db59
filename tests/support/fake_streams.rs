//! A streaming server as a runtime has one, which does what its path says.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use coracle::util::threads::{OnDeath, Running, Stack, spawn};

const SWITCHED: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";

/// The server. Dropping it ends it.
pub(crate) struct FakeStreams {
    port: u16,
    heads: Arc<Mutex<Vec<String>>>,
    _running: Running,
}

impl FakeStreams {
    pub(crate) fn start() -> FakeStreams {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let heads = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&heads);
        let running = spawn("t/streams", Stack::Small, OnDeath::Unsupervised, move |stop| {
            let mut open = Vec::new();
            for stream in listener.incoming() {
                if stop.is_stopped() {
                    return;
                }
                let (Ok(stream), notes) = (stream, Arc::clone(&notes)) else { continue };
                let second = stream.try_clone().expect("a second handle");
                let serving = spawn("t/stream", Stack::Small, OnDeath::Unsupervised, move |_| {
                    serve(stream, &notes);
                });
                // Closing it wakes the thread that waits in a read.
                let serving = serving.expect("a thread").with_waker(Box::new(move || {
                    let _ = second.shutdown(Shutdown::Both);
                }));
                open.retain(|connection: &Running| !connection.is_finished());
                open.push(serving);
            }
        });
        let running = running.expect("a thread").with_waker(Box::new(move || {
            let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        }));
        FakeStreams { port, heads, _running: running }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The heads of all requests so far.
    pub(crate) fn heads(&self) -> Vec<String> {
        self.heads.lock().expect("no thread panics while it holds the lock").clone()
    }
}

fn serve(mut stream: TcpStream, notes: &Mutex<Vec<String>>) {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte) {
            Ok(1) => head.push(byte[0]),
            _ => return,
        }
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
    notes.lock().expect("no thread panics while it holds the lock").push(head);
    let words: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    // The client may disconnect at any moment, which is no error.
    let _ = act(&mut stream, &words, notes);
    // There is a second handle, so that dropping this one would not be enough.
    let _ = stream.shutdown(Shutdown::Both);
}

fn act(stream: &mut TcpStream, words: &[&str], notes: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let number = words.get(1).and_then(|word| word.parse::<usize>().ok()).unwrap_or(0);
    let mut chunk = vec![0; 32 * 1024];
    match words.first().copied().unwrap_or_default() {
        // Echoes everything, then reports it.
        "echo" => {
            stream.write_all(SWITCHED.as_bytes())?;
            loop {
                match stream.read(&mut chunk)? {
                    0 => return stream.write_all(b"<end>"),
                    count => stream.write_all(&chunk[..count])?,
                }
            }
        }
        // Sends so many bytes before it reads, and then the number of bytes that it has read.
        "late" => {
            stream.write_all(SWITCHED.as_bytes())?;
            for _ in 0..number / chunk.len() {
                stream.write_all(&chunk)?;
            }
            let mut received = 0;
            loop {
                match stream.read(&mut chunk)? {
                    0 => return stream.write_all(format!("<{received}>").as_bytes()),
                    count => received += count,
                }
            }
        }
        // Sends without end, whether a client reads or not, and notes that it has received a word.
        "chat" => {
            stream.write_all(SWITCHED.as_bytes())?;
            let mut writer = stream.try_clone()?;
            let talking = spawn("t/talk", Stack::Small, OnDeath::Unsupervised, move |_| {
                while writer.write_all(&[0; 4096]).is_ok() {}
            });
            if stream.read(&mut chunk)? > 0 {
                notes.lock().expect("no thread panics while it holds the lock").push("heard".to_owned());
            }
            stream.shutdown(Shutdown::Both)?;
            talking.map(drop)
        }
        // So many bytes, and the end.
        "source" => {
            stream.write_all(SWITCHED.as_bytes())?;
            for _ in 0..number / chunk.len() {
                stream.write_all(&chunk)?;
            }
            Ok(())
        }
        "status" => stream.write_all(
            format!("HTTP/1.1 {number} Text\r\nX-Kept: yes\r\nContent-Length: 6\r\n\r\nreason").as_bytes(),
        ),
        "garbage" => stream.write_all(b"SSH-2.0-no\r\n\r\n"),
        "greeting" => stream.write_all(format!("{SWITCHED}hello").as_bytes()),
        // Until the client goes.
        _ => {
            stream.write_all(SWITCHED.as_bytes())?;
            while stream.read(&mut chunk)? > 0 {}
            Ok(())
        }
    }
}
