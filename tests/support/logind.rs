//! A private message bus (Debian's `dbus-daemon`) and a fake logind on it.

use std::fs;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coracle::transport::dbus::wire::{self, Kind, Message, Value};
use coracle::util::threads::{self, OnDeath, Running, Stack};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::pipe::{PipeFlags, pipe_with};

use super::wait::{pause, wait_for};

/// The file that the agent writes when the maximum delay of logind is too short. Tests have a directory of
/// their own there (`tests/support/enclose`).
pub(crate) const CONF: &str = "/etc/systemd/logind.conf.d/99-kubelet.conf";
const LOGIND: &str = "org.freedesktop.login1";
const LIMIT: Duration = Duration::from_secs(60);
/// Connections that a flood reaches, and how many signals each gets in a row.
const FLOODED: u64 = 3;
const BURST: usize = 100;

/// A bus and its logind.
pub(crate) struct FakeSystemBus {
    dir: PathBuf,
    daemon: Option<Child>,
    state: Arc<Mutex<State>>,
    logind: Option<ServedConnection>,
}

#[derive(Default)]
struct State {
    allowed: Duration,
    /// Passes before each answer.
    delay: Duration,
    preparing: bool,
    /// The read ends of the locks, which see the other ends close.
    locks: Vec<OwnedFd>,
    /// The texts of every request for a lock.
    calls: Vec<Vec<Value>>,
    /// The bus name of the last client that requested one.
    holder: String,
    reloads: u32,
}

/// A connection that never stops sending.
pub(crate) struct Flood {
    sent: Arc<AtomicU64>,
    _running: Running,
}

impl Flood {
    /// How many signals the bus has taken.
    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Ordering::SeqCst)
    }
}

/// A connection that answers.
struct ServedConnection {
    stream: UnixStream,
    _thread: Running,
}

impl FakeSystemBus {
    /// A place for a bus that does not run yet.
    pub(crate) fn new(dir: &Path, allowed: Duration) -> FakeSystemBus {
        fs::create_dir_all(dir).expect("the directory of the bus can be made");
        let state = State { allowed, ..State::default() };
        FakeSystemBus { dir: dir.to_owned(), daemon: None, state: Arc::new(Mutex::new(state)), logind: None }
    }

    /// What `DBUS_SYSTEM_BUS_ADDRESS` has to say.
    pub(crate) fn address(&self) -> String {
        format!("unix:path={}", self.socket().display())
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("bus")
    }

    /// Starts the bus and logind.
    pub(crate) fn start(&mut self) {
        let config = self.dir.join("bus.conf");
        let text = format!(
            "<busconfig><listen>{}</listen><auth>EXTERNAL</auth><policy context=\"default\">\
             <allow user=\"*\"/><allow own=\"*\"/><allow send_type=\"method_call\"/>\
             <allow send_type=\"signal\"/><allow send_requested_reply=\"true\" send_type=\"method_return\"/>\
             <allow send_requested_reply=\"true\" send_type=\"error\"/><allow receive_type=\"method_call\"/>\
             <allow receive_type=\"method_return\"/><allow receive_type=\"error\"/>\
             <allow receive_type=\"signal\"/></policy></busconfig>",
            self.address()
        );
        fs::write(&config, text).expect("the configuration of the bus is written");
        let _ = fs::remove_file(self.socket());
        let mut command = Command::new("dbus-daemon");
        command.arg(format!("--config-file={}", config.display())).args(["--nofork", "--nopidfile"]);
        self.daemon = Some(
            command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("dbus-daemon is installed"),
        );
        self.start_logind();
    }

    /// Starts logind, or another one in its place.
    pub(crate) fn start_logind(&mut self) {
        self.stop_logind();
        let mut stream = self.connect();
        for name in [LOGIND, "org.freedesktop.systemd1"] {
            let args = vec![Value::Text(name.to_owned()), Value::Uint(0)];
            ask_bus(&mut stream, "RequestName", args);
        }
        let (mut own, state) = (stream.try_clone().expect("a second handle"), Arc::clone(&self.state));
        let thread = threads::spawn("t/logind", Stack::Small, OnDeath::Unsupervised, move |_| {
            while let Some(call) = read_message(&mut own) {
                if call.kind == Kind::Call {
                    let delay = state.lock().expect("no thread panicked with it").delay;
                    pause(delay);
                    serve(&mut own, &call, &mut state.lock().expect("no thread panicked with it"));
                }
            }
        });
        self.logind = Some(ServedConnection { stream, _thread: thread.expect("a thread") });
    }

    /// Ends logind; its name is free then. Locks are files: they stay.
    pub(crate) fn stop_logind(&mut self) {
        if let Some(served) = self.logind.take() {
            let _ = served.stream.shutdown(Shutdown::Both);
        }
    }

    /// Ends the bus and with it logind's connection.
    pub(crate) fn stop(&mut self) {
        self.stop_logind();
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }

    /// From now on logind is busy: each answer takes so long.
    pub(crate) fn reply_slowly(&self, delay: Duration) {
        self.state().delay = delay;
    }

    /// The machine is about to shut down, or no longer is.
    pub(crate) fn prepare(&mut self, on: bool) {
        self.set_preparing(on);
        let served = self.logind.as_mut().expect("logind runs");
        served.stream.write_all(&prepare_signal("", on)).expect("the bus takes it");
    }

    /// The same without a signal.
    pub(crate) fn set_preparing(&self, on: bool) {
        self.state().preparing = on;
    }

    /// A process that is not logind sends its signal straight to the process that holds the lock.
    pub(crate) fn forge(&self) {
        let holder = self.state().holder.clone();
        let mut stream = self.connect();
        stream.write_all(&prepare_signal(&holder, true)).expect("the bus takes it");
        // It has passed the bus before the answer to this.
        ask_bus(&mut stream, "GetId", Vec::new());
    }

    /// A process that is not logind sends its signal to the next connections that are made, as fast
    /// as the bus takes it, until this is dropped.
    pub(crate) fn flood(&self) -> Flood {
        let (mut stream, name) = self.connect_as();
        let own: u64 = name.strip_prefix(":1.").and_then(|number| number.parse().ok()).expect("a number");
        let shut = stream.try_clone().expect("a second handle");
        let next = own + 1..=own + FLOODED;
        let some: Vec<u8> =
            next.flat_map(|number| prepare_signal(&format!(":1.{number}"), true).repeat(BURST)).collect();
        let sent = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&sent);
        let running = threads::spawn("t/flood", Stack::Small, OnDeath::Unsupervised, move |_| {
            stream.set_read_timeout(Some(Duration::from_millis(1))).expect("a socket");
            while stream.write_all(&some).is_ok() {
                counted.fetch_add(FLOODED * BURST as u64, Ordering::SeqCst);
                // What the bus answers must not pile up there.
                let mut replies = [0; 65_536];
                while stream.read(&mut replies).is_ok_and(|count| count == replies.len()) {}
            }
        });
        let waker = Box::new(move || drop(shut.shutdown(Shutdown::Both)));
        Flood { sent, _running: running.expect("a thread").with_waker(waker) }
    }

    /// How many locks are held.
    pub(crate) fn locks(&self) -> usize {
        let mut state = self.state();
        // The end of the file: the other end is closed.
        state.locks.retain(|lock| !matches!(rustix::io::read(lock, &mut [0_u8; 8]), Ok(0)));
        state.locks.len()
    }

    /// How often a lock was asked for, and with which words the last time.
    pub(crate) fn received(&self) -> (usize, Vec<Value>) {
        let state = self.state();
        (state.calls.len(), state.calls.last().cloned().unwrap_or_default())
    }

    /// How often logind received a request to read its configuration again.
    pub(crate) fn reloads(&self) -> u32 {
        self.state().reloads
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no thread panicked with it")
    }

    fn connect(&self) -> UnixStream {
        self.connect_as().0
    }

    /// A connection, and its name on the bus.
    fn connect_as(&self) -> (UnixStream, String) {
        let mut stream = wait_for("the bus", LIMIT, || UnixStream::connect(self.socket()).ok());
        stream.set_read_timeout(None).expect("a socket");
        let uid = rustix::process::geteuid().as_raw().to_string();
        let uid: String = uid.bytes().map(|digit| format!("{digit:02x}")).collect();
        for line in [format!("\0AUTH EXTERNAL {uid}\r\n"), "NEGOTIATE_UNIX_FD\r\n".to_owned()] {
            stream.write_all(line.as_bytes()).expect("the bus takes it");
            let mut byte = [0];
            while byte != *b"\n" {
                stream.read_exact(&mut byte).expect("the bus answers");
            }
        }
        stream.write_all(b"BEGIN\r\n").expect("the bus takes it");
        let hello = ask_bus(&mut stream, "Hello", Vec::new());
        (stream, hello.text(0).expect("it has a name").to_owned())
    }
}

impl Drop for FakeSystemBus {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Asks the bus itself and waits for the answer.
fn ask_bus(stream: &mut UnixStream, member: &str, args: Vec<Value>) -> Message {
    let call = Message {
        serial: 5,
        path: "/org/freedesktop/DBus".to_owned(),
        interface: "org.freedesktop.DBus".to_owned(),
        member: member.to_owned(),
        destination: "org.freedesktop.DBus".to_owned(),
        args,
        ..Message::new(Kind::Call)
    };
    stream.write_all(&call.encode()).expect("the bus takes it");
    loop {
        let message = read_message(stream).expect("the bus answers");
        assert_ne!(message.kind, Kind::Error, "{member}: {message:?}");
        if message.reply_to == Some(5) {
            return message;
        }
    }
}

fn read_message(stream: &mut UnixStream) -> Option<Message> {
    let mut bytes = vec![0; wire::HEAD];
    stream.read_exact(&mut bytes).ok()?;
    bytes.resize(wire::length(&bytes)?, 0);
    stream.read_exact(bytes.get_mut(wire::HEAD..)?).ok()?;
    Message::decode(&bytes)
}

fn prepare_signal(to: &str, on: bool) -> Vec<u8> {
    let signal = Message {
        serial: 7,
        path: "/org/freedesktop/login1".to_owned(),
        interface: "org.freedesktop.login1.Manager".to_owned(),
        member: "PrepareForShutdown".to_owned(),
        destination: to.to_owned(),
        args: vec![Value::Bool(on)],
        ..Message::new(Kind::Signal)
    };
    signal.encode()
}

fn serve(stream: &mut UnixStream, call: &Message, state: &mut State) {
    let mut reply = Message {
        serial: 6,
        reply_to: Some(call.serial),
        destination: call.sender.clone(),
        ..Message::new(Kind::Return)
    };
    let mut lock = None;
    match (call.member.as_str(), call.args.as_slice()) {
        ("Get", [_, Value::Text(name)]) => {
            let value = match name.as_str() {
                "InhibitDelayMaxUSec" => Value::Long(u64::try_from(state.allowed.as_micros()).unwrap_or(0)),
                "PreparingForShutdown" => Value::Bool(state.preparing),
                _ => Value::Uint(0),
            };
            reply.args.push(Value::Variant(Box::new(value)));
        }
        ("Inhibit", _) if state.preparing => {
            reply.kind = Kind::Error;
            reply.error = "org.freedesktop.login1.OperationInProgress".to_owned();
        }
        ("Inhibit", args) => {
            let (ours, theirs) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC).expect("a pipe");
            state.locks.push(ours);
            state.calls.push(args.to_vec());
            state.holder.clone_from(&call.sender);
            lock = Some(theirs);
            reply.fds = 1;
            reply.args.push(Value::Fd(0));
        }
        ("KillUnit", [Value::Text(unit), _, Value::Int(1)]) if unit == "systemd-logind.service" => {
            state.reloads += 1;
            let text = fs::read_to_string(CONF).unwrap_or_default();
            let seconds =
                text.lines().find_map(|line| line.strip_prefix("InhibitDelayMaxSec=")?.parse().ok());
            if let Some(seconds) = seconds {
                state.allowed = Duration::from_secs(seconds);
            }
        }
        _ => {
            reply.kind = Kind::Error;
            reply.error = "org.freedesktop.DBus.Error.UnknownMethod".to_owned();
        }
    }
    let bytes = reply.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = lock.as_ref().map(|lock| [lock.as_fd()]);
    if let Some(fds) = &fds {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "one fits");
    }
    let _ = sendmsg(&*stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
}
