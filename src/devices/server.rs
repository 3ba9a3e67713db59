//! The socket on which device plugins register (Go: pkg/kubelet/cm/devicemanager/plugin/v1beta1
//! `server`).

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use super::names::SOCKET;
use super::service::Devices;
use crate::transport::generated::{deviceplugin as pb, methods};
use crate::transport::rpc_server::{RpcError, Server, Service};
use crate::util::disk_writes;

/// More entries of the directory are not examined at the start.
const MAX_ENTRIES: usize = 10_000;

/// Makes the directory of device plugins (0750), if it is missing, removes the sockets of an earlier
/// run, and serves registrations. Plugins watch the directory and register again when their socket
/// vanishes. Without plugins there is no thread. Dropping the server ends it.
///
/// # Errors
/// When the directory or the socket cannot be made.
pub fn serve(devices: &Devices, directory: &Path) -> io::Result<Server> {
    disk_writes::make_directories(directory, 0o750)?;
    remove_sockets(directory)?;
    let devices = devices.clone();
    let service = Service::new().unary(&methods::REGISTER, move |request: pb::RegisterRequest, _| {
        let registered = devices.register(&request.version, &request.endpoint, &request.resource_name);
        registered.map(|()| pb::Empty::default()).map_err(RpcError::unknown)
    });
    Server::start(&directory.join(SOCKET), [service])
}

/// Removes all sockets; other files, such as the state file, stay.
fn remove_sockets(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)?.take(MAX_ENTRIES) {
        let entry = entry?;
        // The type of the entry itself: no link is followed.
        if !entry.file_type()?.is_socket() {
            continue;
        }
        match fs::remove_file(entry.path()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                log::warn!("cannot remove the socket {}: {error}", entry.path().display());
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn sockets_of_an_earlier_run_are_removed_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::create_dir(path("directory")).unwrap();
        drop(UnixListener::bind(path("directory/inner.sock")).unwrap());
        drop(UnixListener::bind(path("old.sock")).unwrap());
        drop(UnixListener::bind(path(SOCKET)).unwrap());
        fs::write(path("kubelet_internal_checkpoint"), "x").unwrap();
        std::os::unix::fs::symlink(path("directory/inner.sock"), path("link")).unwrap();
        remove_sockets(directory.path()).unwrap();
        let mut left: Vec<_> =
            fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["directory", "kubelet_internal_checkpoint", "link"]);
        assert!(path("directory/inner.sock").exists());
    }
}
