//! Requests to systemd over D-Bus for slices.
//!
//! Each operation has its own connection, so that no operation waits for another one, and a restart
//! of the bus ends only the operations of that time.

use std::time::{Duration, Instant};

use super::error::CgroupError;
use super::units::{Property, argument, systemd_version};
use crate::transport::dbus::wire::{Kind, Message, Value};
use crate::transport::dbus::{Bus, Call, DbusError};
use crate::util::stop::StopToken;
use crate::util::wake::Wake;

const BUS: &str = "org.freedesktop.DBus";
const SYSTEMD: &str = "org.freedesktop.systemd1";
const SYSTEMD_PATH: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
const UNIT_EXISTS: &str = "org.freedesktop.systemd1.UnitExists";
const NO_SUCH_UNIT: &str = "org.freedesktop.systemd1.NoSuchUnit";
/// Time limit of a job (github.com/opencontainers/cgroups systemd `startUnit`).
const JOB_LIMIT: Duration = Duration::from_secs(30);

/// A connection for one operation.
pub(super) struct Systemd {
    bus: Bus,
}

impl Systemd {
    pub(super) fn connect(address: &str, stop: &StopToken) -> Result<Systemd, CgroupError> {
        let wake = Wake::new().map_err(DbusError::Lost)?;
        Ok(Systemd { bus: Bus::open(address, &wake, stop)? })
    }

    /// systemd's version; 0 if it is unknown.
    pub(super) fn version(&mut self) -> Result<u32, CgroupError> {
        let interface = "org.freedesktop.DBus.Properties";
        let call = Call { destination: SYSTEMD, path: SYSTEMD_PATH, interface, member: "Get" };
        let args = [MANAGER, "Version"].map(|text| Value::Text(text.to_owned())).to_vec();
        match self.bus.call(call, args)?.message.args.pop() {
            Some(Value::Variant(value)) => match *value {
                Value::Text(text) => Ok(systemd_version(&text)),
                _ => Ok(0),
            },
            _ => Ok(0),
        }
    }

    /// Starts a slice and waits until it is there. It is no error if it exists.
    pub(super) fn start(&mut self, unit: &str, properties: &[Property]) -> Result<(), CgroupError> {
        self.watch_jobs()?;
        let args =
            vec![text(unit), text("replace"), argument(properties), Value::Array("(sa(sv))", Vec::new())];
        let job = match self.bus.call(manager("StartTransientUnit"), args) {
            Err(DbusError::Remote { name, .. }) if name == UNIT_EXISTS => return Ok(()),
            reply => job(&reply?.message, "StartTransientUnit")?,
        };
        match self.wait_for(&job)? {
            Some(result) if result == "done" => Ok(()),
            result => {
                let _ = self.reset_failed(unit);
                let problem = match result {
                    Some(result) => format!("cannot be started: {result}"),
                    None => format!("was not started within {JOB_LIMIT:?}"),
                };
                Err(CgroupError::Unit { unit: unit.to_owned(), problem })
            }
        }
    }

    /// Sets properties until the machine is restarted.
    pub(super) fn set(&mut self, unit: &str, properties: &[Property]) -> Result<(), CgroupError> {
        if properties.is_empty() {
            return Ok(());
        }
        let args = vec![text(unit), Value::Bool(true), argument(properties)];
        self.bus.call(manager("SetUnitProperties"), args)?;
        Ok(())
    }

    /// Stops a slice, and removes it from systemd if it has failed. It is no error if it does not
    /// exist.
    pub(super) fn stop(&mut self, unit: &str) -> Result<(), CgroupError> {
        self.watch_jobs()?;
        let stopped = match self.bus.call(manager("StopUnit"), vec![text(unit), text("replace")]) {
            Ok(reply) => {
                let job = job(&reply.message, "StopUnit")?;
                self.wait_for(&job)?
            }
            // The unit is not loaded: there is nothing to stop.
            Err(DbusError::Remote { name, .. }) if name == NO_SUCH_UNIT => Some("done".to_owned()),
            Err(DbusError::Remote { name, message, .. }) => {
                log::debug!("systemd cannot stop {unit}: {name}: {message}");
                Some(name)
            }
            Err(error) => return Err(error.into()),
        };
        self.reset_failed(unit)?;
        match stopped {
            Some(result) => {
                if result != "done" {
                    log::warn!("systemd ended the stop of {unit} with {result}; its directory is removed");
                }
                Ok(())
            }
            None => {
                let problem = format!("was not stopped within {JOB_LIMIT:?}");
                Err(CgroupError::Unit { unit: unit.to_owned(), problem })
            }
        }
    }

    /// A failed unit stays until this. A unit that is not loaded is an error of systemd, but not here.
    fn reset_failed(&mut self, unit: &str) -> Result<(), CgroupError> {
        match self.bus.call(manager("ResetFailedUnit"), vec![text(unit)]) {
            Ok(_) | Err(DbusError::Remote { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Signals about the ends of jobs are received from now on; those of systemd only.
    fn watch_jobs(&mut self) -> Result<(), CgroupError> {
        let reply = self.bus.call(bus("GetNameOwner"), vec![text(SYSTEMD)])?;
        let owner = reply.message.text(0).ok_or(DbusError::UnexpectedReply("GetNameOwner"))?.to_owned();
        self.bus.listen_to(&[&owner]);
        let rule = format!("type='signal',sender='{SYSTEMD}',interface='{MANAGER}',member='JobRemoved'");
        self.bus.call(bus("AddMatch"), vec![Value::Text(rule)])?;
        Ok(())
    }

    /// The result of a job, `done` if it succeeded; `None`: it did not end in time.
    fn wait_for(&mut self, job: &str) -> Result<Option<String>, CgroupError> {
        let until = Instant::now() + JOB_LIMIT;
        while let Some(incoming) = self.bus.next(Some(until))? {
            if let Some(result) = ended(&incoming.message, job) {
                return Ok(Some(result.to_owned()));
            }
        }
        Ok(None)
    }
}

/// The result of `job`, if the message is its end: number, path, unit and result.
fn ended<'a>(message: &'a Message, job: &str) -> Option<&'a str> {
    let is_end =
        message.kind == Kind::Signal && message.interface == MANAGER && message.member == "JobRemoved";
    match message.args.as_slice() {
        [Value::Uint(_), Value::Path(path), Value::Text(_), Value::Text(result)] if is_end && path == job => {
            Some(result)
        }
        _ => None,
    }
}

fn job(reply: &Message, member: &'static str) -> Result<String, DbusError> {
    match reply.args.first() {
        Some(Value::Path(path)) => Ok(path.clone()),
        _ => Err(DbusError::UnexpectedReply(member)),
    }
}

fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

fn manager(member: &'static str) -> Call {
    Call { destination: SYSTEMD, path: SYSTEMD_PATH, interface: MANAGER, member }
}

fn bus(member: &'static str) -> Call {
    Call { destination: BUS, path: "/org/freedesktop/DBus", interface: BUS, member }
}
