//! Requests to systemd, against a scripted bus.

use std::io::Write;

use super::systemd::Systemd;
use super::units::{new_slice_properties, properties};
use super::values::{Quota, Values};
use super::{CgroupError, Cgroups, Driver, Layout, Name, fake};
use crate::model::pod::QosClass;
use crate::transport::dbus::fake_bus;
use crate::transport::dbus::wire::{Kind, Message, Value};
use crate::util::cgroup_mounts::Version;
use crate::util::stop::StopToken;

const OWNER: &str = ":1.2";
const JOB: &str = "/org/freedesktop/systemd1/job/7";
const UNIT: &str = "kubepods-burstable.slice";

/// What systemd does with a call.
#[derive(Clone, Copy)]
enum Reply {
    /// Starts a job, which ends with this result.
    Job(&'static str),
    Error(&'static str),
    Nothing,
    Version(&'static str),
}

fn removed(sender: &str, job: &str, result: &str) -> Message {
    let text = |text: &str| Value::Text(text.to_owned());
    Message {
        sender: sender.to_owned(),
        path: "/org/freedesktop/systemd1".to_owned(),
        interface: "org.freedesktop.systemd1.Manager".to_owned(),
        member: "JobRemoved".to_owned(),
        args: vec![Value::Uint(7), Value::Path(job.to_owned()), text(UNIT), text(result)],
        ..Message::new(Kind::Signal)
    }
}

/// As [`play_at`], for one connection.
fn play<T>(
    replies: &'static [Reply],
    operation: impl FnOnce(&mut Systemd) -> Result<T, CgroupError>,
) -> (Result<T, CgroupError>, Vec<String>) {
    play_at(replies, |address| operation(&mut Systemd::connect(address, &StopToken::never())?))
}

/// Runs an operation against a systemd that replies in this order to the calls that are not about
/// the bus. Returns the calls, with their first argument.
fn play_at<T>(replies: &'static [Reply], operation: impl FnOnce(&str) -> T) -> (T, Vec<String>) {
    let (sender, calls) = crossbeam_channel::bounded(16);
    let (_dir, address, _bus) = fake_bus::bus(move |mut stream| {
        fake_bus::greet(&mut stream);
        let mut replies = replies.iter();
        while replies.len() > 0 {
            let call = fake_bus::read_message(&mut stream);
            match call.member.as_str() {
                "GetNameOwner" => {
                    let owner = vec![Value::Text(OWNER.to_owned())];
                    stream.write_all(&fake_bus::reply_to(&call, owner).encode()).unwrap();
                    continue;
                }
                "AddMatch" => {
                    stream.write_all(&fake_bus::reply_to(&call, Vec::new()).encode()).unwrap();
                    continue;
                }
                _ => {}
            }
            sender.send(format!("{} {}", call.member, call.text(0).unwrap_or_default())).unwrap();
            match *replies.next().unwrap() {
                Reply::Job(result) => {
                    // Signals of others, and of other jobs, are before it, and it may be before the
                    // reply.
                    stream.write_all(&removed(":1.66", JOB, "failed").encode()).unwrap();
                    stream.write_all(&removed(OWNER, "/another", "failed").encode()).unwrap();
                    stream.write_all(&removed(OWNER, JOB, result).encode()).unwrap();
                    let job = vec![Value::Path(JOB.to_owned())];
                    stream.write_all(&fake_bus::reply_to(&call, job).encode()).unwrap();
                }
                Reply::Error(name) => {
                    let mut refused = fake_bus::reply_to(&call, vec![Value::Text("no".to_owned())]);
                    refused.kind = Kind::Error;
                    refused.error = name.to_owned();
                    stream.write_all(&refused.encode()).unwrap();
                }
                Reply::Nothing => {
                    stream.write_all(&fake_bus::reply_to(&call, Vec::new()).encode()).unwrap();
                }
                Reply::Version(text) => {
                    let version = vec![Value::Variant(Box::new(Value::Text(text.to_owned())))];
                    stream.write_all(&fake_bus::reply_to(&call, version).encode()).unwrap();
                }
            }
        }
    });
    let result = operation(&address);
    (result, calls.try_iter().collect())
}

fn slice() -> Vec<super::units::Property> {
    new_slice_properties(&Name::parse("/kubepods/burstable").unwrap(), Version::V2)
}

#[test]
fn slices_are_started_and_the_job_is_awaited() {
    let (result, calls) = play(&[Reply::Job("done")], |systemd| systemd.start(UNIT, &slice()));
    result.unwrap();
    assert_eq!(calls, ["StartTransientUnit kubepods-burstable.slice"]);
    let exists = &[Reply::Error("org.freedesktop.systemd1.UnitExists")];
    play(exists, |systemd| systemd.start(UNIT, &slice())).0.unwrap();
}

#[test]
fn failed_jobs_are_errors_and_leave_no_failed_unit() {
    let (result, calls) =
        play(&[Reply::Job("failed"), Reply::Nothing], |systemd| systemd.start(UNIT, &slice()));
    let expected = "systemd unit kubepods-burstable.slice: cannot be started: failed";
    assert_eq!(result.unwrap_err().to_string(), expected);
    assert_eq!(calls.last().unwrap(), "ResetFailedUnit kubepods-burstable.slice");
    let (result, _) = play(&[Reply::Error("org.freedesktop.DBus.Error.AccessDenied")], |systemd| {
        systemd.start(UNIT, &slice())
    });
    let expected = "StartTransientUnit: org.freedesktop.DBus.Error.AccessDenied: no";
    assert_eq!(result.unwrap_err().to_string(), expected);
}

#[test]
fn slices_are_stopped_and_reset() {
    let both = ["StopUnit kubepods-burstable.slice", "ResetFailedUnit kubepods-burstable.slice"];
    let replies: [&'static [Reply]; 3] = [
        &[Reply::Job("done"), Reply::Nothing],
        &[Reply::Job("timeout"), Reply::Error("org.freedesktop.systemd1.NoSuchUnit")],
        &[Reply::Error("org.freedesktop.systemd1.NoSuchUnit"), Reply::Nothing],
    ];
    for replies in replies {
        let (result, calls) = play(replies, |systemd| systemd.stop(UNIT));
        result.unwrap();
        assert_eq!(calls, both);
    }
}

#[test]
fn properties_are_set_for_the_version_of_systemd() {
    let (result, calls) = play(&[Reply::Version("252.5-2"), Reply::Nothing], |systemd| {
        let version = systemd.version()?;
        let values = Values { cpu_shares: Some(512), cpus: Some("0".to_owned()), ..Values::default() };
        let (some, _) = properties(&values, Version::V2, version);
        systemd.set(UNIT, &some)?;
        // No call.
        systemd.set(UNIT, &[])?;
        Ok((version, some.len()))
    });
    assert_eq!(result.unwrap(), (252, 2));
    assert_eq!(calls, ["Get org.freedesktop.systemd1.Manager", "SetUnitProperties kubepods-burstable.slice"]);
}

fn cgroups(below: &std::path::Path, bus: &str) -> Cgroups {
    let layout = Layout::new("", Driver::Systemd).unwrap();
    Cgroups::with_mounts(
        layout,
        fake::v1(below, &["cpu,cpuacct", "cpuset", "memory", "pids"]),
        Vec::new(),
        bus,
    )
}

#[test]
fn pods_are_slices_and_files_have_the_rounded_values() {
    let dir = tempfile::tempdir().unwrap();
    let values = Values {
        cpu_quota: Some(Quota { microseconds: Some(12_300), period: 100_000 }),
        memory_bytes: Some(1 << 20),
        ..Values::default()
    };
    let pod = |all: &Cgroups| all.layout().pod(&"1-2".into(), QosClass::Burstable).unwrap();
    let replies = &[Reply::Job("done"), Reply::Version("252"), Reply::Nothing];
    let (outcome, calls) = play_at(replies, |bus| {
        let all = cgroups(dir.path(), bus);
        all.make(&pod(&all), &values, &StopToken::never())
    });
    let outcome = outcome.unwrap();
    assert!(outcome.made && outcome.failed.is_empty(), "{outcome:?}");
    let unit = "kubepods-burstable-pod1_2.slice";
    let expected = [
        format!("StartTransientUnit {unit}"),
        "Get org.freedesktop.systemd1.Manager".to_owned(),
        format!("SetUnitProperties {unit}"),
    ];
    assert_eq!(calls, expected);
    let place = format!("cpu,cpuacct/kubepods.slice/kubepods-burstable.slice/{unit}");
    let quota = std::fs::read_to_string(dir.path().join(&place).join("cpu.cfs_quota_us")).unwrap();
    assert_eq!(quota, "13000");

    let found = cgroups(dir.path(), "").list_pods().unwrap();
    assert_eq!((found.len(), found[0].uid.as_str()), (1, "1-2"));
    let (removed, calls) = play_at(&[Reply::Job("done"), Reply::Nothing], |bus| {
        cgroups(dir.path(), bus).remove_listed(&found[0], &StopToken::never())
    });
    removed.unwrap();
    assert_eq!(calls, [format!("StopUnit {unit}"), format!("ResetFailedUnit {unit}")]);
    assert!(!dir.path().join(&place).exists());
}

#[test]
fn directories_are_removed_even_if_systemd_cannot_be_reached() {
    let dir = tempfile::tempdir().unwrap();
    let all = cgroups(dir.path(), "unix:path=/nonexistent/bus");
    let pod = all.layout().pod(&"1".into(), QosClass::Guaranteed).unwrap();
    assert!(all.make(&pod, &Values::default(), &StopToken::never()).is_err());
    let place = dir.path().join("memory/kubepods.slice/kubepods-pod1.slice");
    std::fs::create_dir_all(&place).unwrap();
    let error = all.remove_pod(&pod, &StopToken::never()).unwrap_err();
    assert!(matches!(error, CgroupError::Dbus(_)), "{error}");
    assert!(!place.exists());
    // A directory that is no slice of the tier is no unit.
    std::fs::create_dir_all(dir.path().join("memory/kubepods.slice/xpod.slice")).unwrap();
    let found = all.list_pods().unwrap();
    all.remove_listed(&found[0], &StopToken::never()).unwrap();
}

#[test]
fn systemd_receives_values_only_if_they_differ() {
    let dir = tempfile::tempdir().unwrap();
    let never = StopToken::never();
    // The replies to one operation; only the first one starts the slice.
    let replies: &'static [Reply] = &[Reply::Job("done"), Reply::Version("252"), Reply::Nothing];
    let mut all = cgroups(dir.path(), "");
    let tier = all.layout().tier(QosClass::Burstable);
    let file = dir.path().join("cpu,cpuacct/kubepods.slice/kubepods-burstable.slice/cpu.shares");
    for (step, (shares, request)) in
        [(300, true), (300, false), (300, true), (400, true), (400, false)].into_iter().enumerate()
    {
        if step == 2 {
            // Another program has changed the file.
            std::fs::write(&file, "77").unwrap();
        }
        let values = Values { cpu_shares: Some(shares), ..Values::default() };
        let mut change = |bus: &str| {
            all = all.clone().with_bus(bus);
            let outcome =
                if step == 0 { all.make(&tier, &values, &never) } else { all.update(&tier, &values, &never) };
            assert!(outcome.unwrap().failed.is_empty());
        };
        if request {
            let ((), calls) = play_at(if step == 0 { replies } else { &replies[1..] }, change);
            assert_eq!(calls.last().unwrap(), "SetUnitProperties kubepods-burstable.slice");
        } else {
            // A request would fail.
            change("unix:path=/nonexistent/bus");
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), shares.to_string());
    }
}
