//! Requests to logind and its signals, over D-Bus.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::transport::dbus::wire::{Kind, Message, Value};
use crate::transport::dbus::{Bus, Call, DbusError, ReceivedMessage};
use crate::util::atomic_file;
use crate::util::disk_writes;
use crate::util::stop::StopToken;
use crate::util::wake::Wake;

const BUS: &str = "org.freedesktop.DBus";
const LOGIND: &str = "org.freedesktop.login1";
const LOGIND_PATH: &str = "/org/freedesktop/login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";
/// The name is the Go kubelet's: a Go kubelet that takes the node over replaces this file.
const CONF_FILE: &str = "99-kubelet.conf";
/// First wait for logind to read its configuration again; each wait is twice the previous one.
const RELOAD_STEP: Duration = Duration::from_millis(100);
const RELOAD_STEPS: u32 = 5;

/// Why shutdowns cannot be watched.
#[derive(Debug, thiserror::Error)]
pub(super) enum LogindError {
    #[error(transparent)]
    Dbus(#[from] DbusError),
    #[error("cannot write {path}: {source}")]
    Conf { path: String, source: std::io::Error },
    #[error(
        "logind holds a shutdown back for {allowed:?} at most (InhibitDelayMaxSec), less than the {needed:?} \
         that are configured, and asking it for more did not help"
    )]
    TooShort { allowed: Duration, needed: Duration },
}

impl LogindError {
    pub(super) fn is_stopping(&self) -> bool {
        matches!(self, LogindError::Dbus(DbusError::Stopped))
    }
}

/// The meaning of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LogindSignal {
    /// The machine is about to shut down, or no longer is.
    Prepare(bool),
    /// Logind was restarted: it does not know our lock.
    Restarted,
    /// Nothing: the bell rang, the time has elapsed, or the signal does not concern us.
    Nothing,
}

/// The result of the set-up.
#[derive(Debug)]
pub(super) enum State {
    /// Logind delays a shutdown while this lock is open.
    Watched(OwnedFd),
    /// The machine is already about to shut down; then logind grants no lock.
    Preparing,
}

/// A connection to logind.
pub(super) struct Logind {
    bus: Bus,
    /// The unique bus name of logind's process. Such signals from other processes are forged.
    owner: String,
}

impl Logind {
    /// Connects and subscribes to the signals.
    pub(super) fn connect(address: &str, wake: &Wake, stop: &StopToken) -> Result<Self, LogindError> {
        let mut bus = Bus::open(address, wake, stop)?;
        bus.listen_to(&[BUS]);
        for rule in [
            format!("type='signal',sender='{LOGIND}',interface='{MANAGER}',member='PrepareForShutdown'"),
            format!("type='signal',sender='{BUS}',member='NameOwnerChanged',arg0='{LOGIND}'"),
        ] {
            bus.call(of_bus("AddMatch"), vec![Value::Text(rule)])?;
        }
        Ok(Logind { bus, owner: String::new() })
    }

    /// Makes logind delay shutdowns for `needed` and takes the lock.
    pub(super) fn set_up(&mut self, needed: Duration, conf_dir: &Path) -> Result<State, LogindError> {
        let owner = match self.name_owner() {
            // Logind does not run: any request starts it.
            Err(LogindError::Dbus(DbusError::Remote { .. })) => {
                self.is_preparing()?;
                self.name_owner()?
            }
            found => found?,
        };
        self.set_owner(owner);
        // A later shutdown is signaled, and this connection is subscribed already.
        if self.is_preparing()? {
            return Ok(State::Preparing);
        }
        let allowed = self.allowed()?;
        if allowed < needed {
            self.raise(allowed, needed, conf_dir)?;
        }
        match self.lock() {
            Ok(lock) => Ok(State::Watched(lock)),
            // A shutdown began in between: this is why the lock is refused.
            Err(LogindError::Dbus(DbusError::Remote { .. })) if self.is_preparing()? => Ok(State::Preparing),
            Err(error) => Err(error),
        }
    }

    fn name_owner(&mut self) -> Result<String, LogindError> {
        let name = Value::Text(LOGIND.to_owned());
        let reply = self.bus.call(of_bus("GetNameOwner"), vec![name])?;
        Ok(reply.message.text(0).ok_or(DbusError::UnexpectedReply("GetNameOwner"))?.to_owned())
    }

    /// Sets the owner: only signals of the bus and of this connection are accepted afterwards.
    fn set_owner(&mut self, owner: String) {
        self.bus.listen_to(&[BUS, &owner]);
        self.owner = owner;
    }

    fn is_preparing(&mut self) -> Result<bool, LogindError> {
        Ok(self.property("PreparingForShutdown")? == Value::Bool(true))
    }

    fn lock(&mut self) -> Result<OwnedFd, LogindError> {
        let text = |text: &str| Value::Text(text.to_owned());
        let reason = "Kubelet needs time to handle node shutdown";
        let call = Call { destination: LOGIND, path: LOGIND_PATH, interface: MANAGER, member: "Inhibit" };
        let args = vec![text("shutdown"), text("kubelet"), text(reason), text("delay")];
        let ReceivedMessage { message, fds } = self.bus.call(call, args)?;
        let index = match message.args.first() {
            Some(Value::Fd(index)) => usize::try_from(*index).ok(),
            _ => None,
        };
        let lock = index.and_then(|index| fds.into_iter().nth(index));
        Ok(lock.ok_or(DbusError::UnexpectedReply("Inhibit"))?)
    }

    pub(super) fn wait(&mut self, until: Option<Instant>) -> Result<LogindSignal, LogindError> {
        let Some(incoming) = self.bus.next(until)? else { return Ok(LogindSignal::Nothing) };
        let signal = interpret(&incoming.message, &self.owner);
        if let LogindSignal::Restarted = signal {
            self.set_owner(incoming.message.text(2).unwrap_or_default().to_owned());
        }
        Ok(signal)
    }

    /// How long logind delays a shutdown at most.
    fn allowed(&mut self) -> Result<Duration, LogindError> {
        match self.property("InhibitDelayMaxUSec")? {
            Value::Long(microseconds) => Ok(Duration::from_micros(microseconds)),
            _ => Err(DbusError::UnexpectedReply("InhibitDelayMaxUSec").into()),
        }
    }

    fn property(&mut self, name: &'static str) -> Result<Value, LogindError> {
        let interface = "org.freedesktop.DBus.Properties";
        let call = Call { destination: LOGIND, path: LOGIND_PATH, interface, member: "Get" };
        let args = vec![Value::Text(MANAGER.to_owned()), Value::Text(name.to_owned())];
        match self.bus.call(call, args)?.message.args.pop() {
            Some(Value::Variant(value)) => Ok(*value),
            _ => Err(DbusError::UnexpectedReply(name).into()),
        }
    }

    /// Configures logind to wait longer.
    fn raise(&mut self, before: Duration, needed: Duration, conf_dir: &Path) -> Result<(), LogindError> {
        let path = conf_dir.join(CONF_FILE);
        let seconds = needed.as_secs() + u64::from(needed.subsec_nanos() > 0);
        let text = format!(
            "# Written by coracle for its shutdownGracePeriod.\n[Login]\nInhibitDelayMaxSec={seconds}\n"
        );
        disk_writes::make_directories(conf_dir, 0o777)
            .and_then(|()| atomic_file::write(&path, text.as_bytes(), 0o644))
            .map_err(|source| LogindError::Conf { path: path.display().to_string(), source })?;
        log::info!(
            "logind delayed shutdowns for {before:?} at most; {} raises this to {seconds} s",
            path.display()
        );
        let systemd = Call {
            destination: "org.freedesktop.systemd1",
            path: "/org/freedesktop/systemd1",
            interface: "org.freedesktop.systemd1.Manager",
            member: "KillUnit",
        };
        let hang_up = rustix::process::Signal::HUP.as_raw();
        let text = |text: &str| Value::Text(text.to_owned());
        self.bus.call(systemd, vec![text("systemd-logind.service"), text("all"), Value::Int(hang_up)])?;
        let mut allowed = before;
        for step in 0..RELOAD_STEPS {
            self.bus.pause(RELOAD_STEP * 2_u32.pow(step))?;
            allowed = self.allowed()?;
            if allowed >= needed {
                return Ok(());
            }
        }
        Err(LogindError::TooShort { allowed, needed })
    }
}

fn of_bus(member: &'static str) -> Call {
    Call { destination: BUS, path: "/org/freedesktop/DBus", interface: BUS, member }
}

/// The meaning of a message: a signal of logind or nothing.
/// DIFFERS: the Go kubelet accepts the signal from any sender, and any user of the machine may send
/// it: match rules do not apply to a message that is addressed to one connection.
fn interpret(message: &Message, owner: &str) -> LogindSignal {
    if message.kind != Kind::Signal {
        return LogindSignal::Nothing;
    }
    match (message.interface.as_str(), message.member.as_str(), message.args.as_slice()) {
        (MANAGER, "PrepareForShutdown", [Value::Bool(on)])
            if !owner.is_empty() && message.sender == owner && message.path == LOGIND_PATH =>
        {
            LogindSignal::Prepare(*on)
        }
        (BUS, "NameOwnerChanged", [Value::Text(name), _, Value::Text(new)])
            if message.sender == BUS && name == LOGIND && !new.is_empty() && new != owner =>
        {
            LogindSignal::Restarted
        }
        _ => LogindSignal::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::transport::dbus::fake_bus;

    /// Sets up with a fake logind: `preparing` are its responses about a shutdown, `refuses` is
    /// whether logind refuses locks. Returns the result and the requests.
    fn set_up(preparing: &'static [bool], refuses: bool) -> (Result<State, LogindError>, Vec<String>) {
        let (sender, requests) = crossbeam_channel::bounded(16);
        let (dir, address, _bus) = fake_bus::bus(move |mut stream| {
            fake_bus::greet(&mut stream);
            let mut preparing = preparing.iter().copied();
            loop {
                let call = fake_bus::read_message(&mut stream);
                let property = call.text(1).unwrap_or_default().to_owned();
                sender
                    .send(if call.member == "Get" { property.clone() } else { call.member.clone() })
                    .unwrap();
                let value = match (call.member.as_str(), property.as_str()) {
                    ("Get", "PreparingForShutdown") => {
                        Value::Variant(Box::new(Value::Bool(preparing.next().unwrap())))
                    }
                    ("Get", _) => Value::Variant(Box::new(Value::Long(60_000_000))),
                    ("GetNameOwner", _) => Value::Text(":1.3".to_owned()),
                    ("Inhibit", _) if refuses => {
                        let mut refused = fake_bus::reply_to(&call, vec![Value::Text("too late".to_owned())]);
                        refused.kind = Kind::Error;
                        refused.error = "org.freedesktop.login1.OperationInProgress".to_owned();
                        stream.write_all(&refused.encode()).unwrap();
                        continue;
                    }
                    ("Inhibit", _) => {
                        let (given, _) = UnixStream::pair().unwrap();
                        fake_bus::send_with(&stream, &fake_bus::reply_to(&call, vec![Value::Fd(0)]), &given);
                        continue;
                    }
                    ("AddMatch", _) => Value::Bool(true),
                    ("End", _) => return,
                    other => panic!("{other:?}"),
                };
                stream.write_all(&fake_bus::reply_to(&call, vec![value]).encode()).unwrap();
            }
        });
        let wake = Wake::new().unwrap();
        let mut logind = Logind::connect(&address, &wake, &StopToken::never()).unwrap();
        let state = logind.set_up(Duration::from_secs(30), dir.path());
        assert_eq!(logind.owner, ":1.3");
        let _ = logind.bus.call(of_bus("End"), Vec::new());
        (state, requests.try_iter().filter(|member| member != "AddMatch" && member != "End").collect())
    }

    #[test]
    fn no_lock_is_requested_while_the_machine_shuts_down() {
        let (state, requests) = set_up(&[false], false);
        assert!(matches!(state, Ok(State::Watched(_))), "{state:?}");
        assert_eq!(requests, ["GetNameOwner", "PreparingForShutdown", "InhibitDelayMaxUSec", "Inhibit"]);
        let (state, requests) = set_up(&[true], true);
        assert!(matches!(state, Ok(State::Preparing)), "{state:?}");
        assert_eq!(requests, ["GetNameOwner", "PreparingForShutdown"]);
        // The shutdown begins between the first request and the request for the lock.
        let (state, _) = set_up(&[false, true], true);
        assert!(matches!(state, Ok(State::Preparing)), "{state:?}");
        let (state, _) = set_up(&[false, false], true);
        let error = state.unwrap_err().to_string();
        assert_eq!(error, "Inhibit: org.freedesktop.login1.OperationInProgress: too late");
    }

    /// A user of the machine sends signals all the time. The agent still gets the lock and the
    /// signals of logind.
    #[test]
    fn flood_of_signals_prevents_neither_the_lock_nor_the_shutdown() {
        let signal = |sender: &str| Message {
            sender: sender.to_owned(),
            path: LOGIND_PATH.to_owned(),
            interface: MANAGER.to_owned(),
            member: "PrepareForShutdown".to_owned(),
            args: vec![Value::Bool(true)],
            ..Message::new(Kind::Signal)
        };
        let (dir, address, _bus) = fake_bus::bus(move |mut stream| {
            fake_bus::greet(&mut stream);
            let flood = signal(":1.66").encode().repeat(1_000);
            loop {
                let call = fake_bus::read_message(&mut stream);
                stream.write_all(&flood).unwrap();
                let value = match (call.member.as_str(), call.text(1)) {
                    ("Get", Some("PreparingForShutdown")) => Value::Variant(Box::new(Value::Bool(false))),
                    ("Get", _) => Value::Variant(Box::new(Value::Long(60_000_000))),
                    ("GetNameOwner", _) => Value::Text(":1.3".to_owned()),
                    ("AddMatch", _) => Value::Bool(true),
                    ("Inhibit", _) => {
                        stream.write_all(&signal(":1.3").encode()).unwrap();
                        stream.write_all(&flood).unwrap();
                        let (given, _) = UnixStream::pair().unwrap();
                        fake_bus::send_with(&stream, &fake_bus::reply_to(&call, vec![Value::Fd(0)]), &given);
                        let _ = stream.write_all(&flood);
                        // The read ends when the client closes the connection.
                        let _ = std::io::Read::read(&mut stream, &mut [0]);
                        return;
                    }
                    other => panic!("{other:?}"),
                };
                stream.write_all(&fake_bus::reply_to(&call, vec![value]).encode()).unwrap();
            }
        });
        let wake = Wake::new().unwrap();
        let mut logind = Logind::connect(&address, &wake, &StopToken::never()).unwrap();
        let state = logind.set_up(Duration::from_secs(30), dir.path());
        assert!(matches!(state, Ok(State::Watched(_))), "{state:?}");
        let soon = Instant::now() + Duration::from_secs(60);
        assert_eq!(logind.wait(Some(soon)).unwrap(), LogindSignal::Prepare(true));
    }

    #[test]
    fn only_signals_of_logind_are_accepted() {
        let prepare = |sender: &str, path: &str, on: Value| Message {
            sender: sender.to_owned(),
            path: path.to_owned(),
            interface: MANAGER.to_owned(),
            member: "PrepareForShutdown".to_owned(),
            args: vec![on],
            ..Message::new(Kind::Signal)
        };
        let (on, off) = (Value::Bool(true), Value::Bool(false));
        for (message, expected) in [
            (prepare(":1.3", LOGIND_PATH, on.clone()), LogindSignal::Prepare(true)),
            (prepare(":1.3", LOGIND_PATH, off), LogindSignal::Prepare(false)),
            (prepare(":1.9", LOGIND_PATH, on.clone()), LogindSignal::Nothing),
            (prepare("", LOGIND_PATH, on.clone()), LogindSignal::Nothing),
            (prepare(":1.3", "/", on.clone()), LogindSignal::Nothing),
            (prepare(":1.3", LOGIND_PATH, Value::Uint(1)), LogindSignal::Nothing),
            (
                Message { kind: Kind::Return, ..prepare(":1.3", LOGIND_PATH, on.clone()) },
                LogindSignal::Nothing,
            ),
        ] {
            assert_eq!(interpret(&message, ":1.3"), expected, "{message:?}");
        }
        assert_eq!(interpret(&prepare("", LOGIND_PATH, on), ""), LogindSignal::Nothing);
        let owner = |sender: &str, new: &str| {
            let args = [LOGIND, ":1.3", new].map(|text| Value::Text(text.to_owned())).to_vec();
            let (interface, member) = (BUS.to_owned(), "NameOwnerChanged".to_owned());
            Message { sender: sender.to_owned(), interface, member, args, ..Message::new(Kind::Signal) }
        };
        for (message, expected) in [
            (owner(BUS, ":1.7"), LogindSignal::Restarted),
            (owner(BUS, ":1.3"), LogindSignal::Nothing),
            (owner(BUS, ""), LogindSignal::Nothing),
            (owner(":1.9", ":1.9"), LogindSignal::Nothing),
        ] {
            assert_eq!(interpret(&message, ":1.3"), expected, "{message:?}");
        }
    }
}
