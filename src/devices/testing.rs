//! A device plugin with faults.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded, select};

use super::{Device, DeviceId, DeviceList, PluginOptions};
use crate::transport::generated::{deviceplugin as pb, methods, to_bytes};
use crate::transport::rpc_server::{RpcError, Server, Service};
use crate::util::stop::StopToken;

/// What a method does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It does its work, and the answer is lost.
    Fail,
    /// There is no answer while the plugin lives.
    Hang,
    /// The answer comes after this time.
    Slow(Duration),
    /// The answer has no container.
    Empty,
    /// The answer has this many bytes.
    Large(usize),
}

#[derive(Default)]
struct State {
    calls: Mutex<Vec<String>>,
    faults: Mutex<BTreeMap<&'static str, Fault>>,
    feeds: Mutex<Vec<Sender<Option<pb::DeviceListResponse>>>>,
    options: PluginOptions,
}

impl State {
    fn call(&self, method: &'static str, text: &str) -> Option<Fault> {
        self.calls.lock().unwrap().push(format!("{method} {text}").trim_end().to_owned());
        self.faults.lock().unwrap().get(method).copied()
    }
}

/// A plugin that listens on a socket. It prefers the last devices.
pub(crate) struct FakePlugin {
    state: Arc<State>,
    pub(crate) socket: PathBuf,
    server: Option<Server>,
}

fn respond<T>(fault: Option<Fault>, good: T, stop: &StopToken) -> Result<T, RpcError> {
    match fault {
        Some(Fault::Fail) => return Err(RpcError::internal("made to fail")),
        Some(Fault::Hang) => {
            let _ = stop.wait(Duration::from_secs(60));
        }
        Some(Fault::Slow(time)) => {
            let _ = stop.wait(time);
        }
        Some(Fault::Empty | Fault::Large(_)) | None => {}
    }
    Ok(good)
}

pub(crate) fn message(devices: &DeviceList) -> pb::DeviceListResponse {
    let device = |(id, device): (&DeviceId, &Device)| {
        let nodes =
            device.nodes.iter().map(|node| pb::DeviceNumaNode { id: node.into(), ..Default::default() });
        to_bytes(&pb::PluginDevice {
            id: id.to_string(),
            health: if device.is_healthy { "Healthy" } else { "Unhealthy" }.to_owned(),
            topology: Some(pb::DeviceTopology { nodes: nodes.collect(), ..Default::default() }).into(),
            ..Default::default()
        })
    };
    pb::DeviceListResponse { devices: devices.iter().map(device).collect(), ..Default::default() }
}

impl FakePlugin {
    pub(crate) fn start(directory: &Path, name: &str, options: PluginOptions) -> FakePlugin {
        let state = Arc::new(State { options, ..State::default() });
        let socket = directory.join(name);
        let own = || Arc::clone(&state);
        let (of_options, of_preferred, of_allocate, of_start, of_lists) = (own(), own(), own(), own(), own());
        let service = Service::new()
            .unary(&methods::GET_DEVICE_PLUGIN_OPTIONS, move |_, stop| {
                let options = of_options.options;
                let good = pb::DevicePluginOptions {
                    pre_start_required: options.pre_start,
                    get_preferred_allocation_available: options.preferred,
                    ..Default::default()
                };
                respond(of_options.call("Options", ""), good, stop)
            })
            .unary(&methods::GET_PREFERRED_ALLOCATION, move |request, stop| {
                let wanted = request.container_requests.into_iter().next().unwrap_or_default();
                let fault = of_preferred.call("Preferred", &wanted.available.join(","));
                let size = usize::try_from(wanted.size).unwrap_or(0);
                let devices = wanted.available.into_iter().rev().take(size).collect();
                let container = pb::ContainerPreferredResponse { devices, ..Default::default() };
                let containers = if fault == Some(Fault::Empty) { vec![] } else { vec![container] };
                let good = pb::PreferredResponse { container_responses: containers, ..Default::default() };
                respond(fault, good, stop)
            })
            .unary(&methods::ALLOCATE, move |request, stop| {
                let wanted = request.container_requests.into_iter().next().unwrap_or_default();
                let ids = wanted.devices.join(",");
                let fault = of_allocate.call("Allocate", &ids);
                let mut container = pb::ContainerAllocateResponse::default();
                container.envs.insert("WIDGETS".to_owned(), ids);
                if let Some(Fault::Large(bytes)) = fault {
                    container.envs.insert("LARGE".to_owned(), "x".repeat(bytes));
                }
                let containers =
                    if fault == Some(Fault::Empty) { vec![] } else { vec![to_bytes(&container)] };
                let good = pb::AllocateResponse { container_responses: containers, ..Default::default() };
                respond(fault, good, stop)
            })
            .unary(&methods::PRE_START_CONTAINER, move |request, stop| {
                let fault = of_start.call("PreStart", &request.devices.join(","));
                respond(fault, pb::Empty::default(), stop)
            })
            .stream(&methods::LIST_AND_WATCH, move |_, out, stop| {
                match of_lists.call("ListAndWatch", "") {
                    Some(Fault::Fail) => return Err(RpcError::internal("made to fail")),
                    Some(Fault::Hang) => {
                        let _ = stop.wait(Duration::from_secs(60));
                        return Ok(());
                    }
                    Some(Fault::Slow(time)) => {
                        let _ = stop.wait(time);
                    }
                    _ => {}
                }
                let (sender, lists) = bounded(64);
                of_lists.feeds.lock().unwrap().push(sender);
                loop {
                    select! {
                        recv(lists) -> list => match list {
                            Ok(Some(list)) => {
                                if out.send(list, stop).is_err() {
                                    return Ok(());
                                }
                            }
                            _ => return Ok(()),
                        },
                        recv(stop.signal()) -> _ => return Ok(()),
                    }
                }
            });
        let server = Some(Server::start(&socket, [service]).unwrap());
        FakePlugin { state, socket, server }
    }

    pub(crate) fn fault(&self, method: &'static str, fault: Option<Fault>) {
        let mut faults = self.state.faults.lock().unwrap();
        match fault {
            Some(fault) => drop(faults.insert(method, fault)),
            None => drop(faults.remove(method)),
        }
    }

    /// The calls since the last time.
    pub(crate) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.state.calls.lock().unwrap())
    }

    /// The next message goes to a stream that begins later.
    pub(crate) fn forget_streams(&self) {
        self.state.feeds.lock().unwrap().clear();
    }

    /// Sends to the newest stream, and waits until there is one. `None` ends it.
    pub(crate) fn send(&self, list: Option<pb::DeviceListResponse>) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(feed) = self.state.feeds.lock().unwrap().last() {
                feed.send(list).unwrap();
                return;
            }
            assert!(Instant::now() < deadline, "the plugin was not watched");
            std::thread::yield_now();
        }
    }

    pub(crate) fn list(&self, devices: &DeviceList) {
        self.send(Some(message(devices)));
    }

    /// Sends to the newest stream.
    ///
    /// # Errors
    /// When there is none in this time.
    pub(crate) fn list_if_watched(&self, devices: &DeviceList, limit: Duration) -> Result<(), String> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if let Some(feed) = self.state.feeds.lock().unwrap().last() {
                return feed.send(Some(message(devices))).map_err(|_| "the stream has ended".to_owned());
            }
            std::thread::yield_now();
        }
        Err("the plugin was not watched".to_owned())
    }

    /// A second handle, which does not end the plugin when it is dropped.
    pub(crate) fn handle(&self) -> FakePlugin {
        FakePlugin { state: Arc::clone(&self.state), socket: self.socket.clone(), server: None }
    }

    /// Ends without a word.
    pub(crate) fn die(&mut self) {
        self.server = None;
    }
}
