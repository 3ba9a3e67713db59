//! A program at a terminal: the input of a user, and the text on the screen.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use super::wait::wait_for;

/// The program with its terminal. Dropping it kills the program.
pub struct Pty {
    screen: File,
    child: Child,
    seen: String,
}

impl Pty {
    /// Starts a program with a terminal of its own, of this size.
    pub fn spawn(program: &Command, columns: u16, rows: u16) -> Pty {
        let screen = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&screen).and_then(|()| unlockpt(&screen)).expect("a terminal for us");
        set_size(&screen, columns, rows);
        let name = ptsname(&screen, Vec::new()).expect("the terminal's name");
        let open = || -> Stdio {
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
            let end: OwnedFd = rustix::fs::open(&name, flags, Mode::empty()).expect("the terminal opens");
            end.into()
        };
        // Only the terminal of a session tells its programs of a new size.
        let mut command = Command::new("setsid");
        command.arg("-c").arg(program.get_program()).args(program.get_args());
        for (key, value) in program.get_envs() {
            command.env(key, value.unwrap_or_default());
        }
        let child = command.stdin(open()).stdout(open()).stderr(open()).spawn().expect("the program starts");
        Pty { screen: File::from(screen), child, seen: String::new() }
    }

    /// Gives the terminal another size.
    pub fn resize(&self, columns: u16, rows: u16) {
        set_size(&self.screen, columns, rows);
    }

    /// Types.
    pub fn types(&mut self, text: &str) {
        self.screen.write_all(text.as_bytes()).expect("the terminal takes input");
    }

    /// Waits until the screen shows `text`, and forgets what was shown up to it.
    #[track_caller]
    pub fn wait_for(&mut self, text: &str, limit: Duration) {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(at) = self.seen.find(text) {
                self.seen.drain(..at + text.len());
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "timed out waiting for {text:?} on the screen: {:?}", self.seen);
            assert!(self.read(left), "the program ended before {text:?}: {:?}", self.seen);
        }
    }

    /// Waits for the program's end.
    pub fn wait_ended(&mut self, limit: Duration) -> ExitStatus {
        let mut open = true;
        wait_for("the program to end", limit, || {
            open = open && self.read(Duration::from_millis(20));
            self.child.try_wait().expect("it is our child")
        })
    }

    /// False: no process has the terminal any more.
    fn read(&mut self, limit: Duration) -> bool {
        let limit = Timespec::try_from(limit).expect("a short time");
        let ready = poll(&mut [PollFd::new(&self.screen, PollFlags::IN)], Some(&limit));
        if !ready.is_ok_and(|count| count > 0) {
            return true;
        }
        let mut chunk = [0; 4096];
        match self.screen.read(&mut chunk) {
            Ok(count) if count > 0 => {
                self.seen.push_str(&String::from_utf8_lossy(&chunk[..count]));
                true
            }
            _ => false,
        }
    }
}

fn set_size(screen: impl std::os::fd::AsFd, columns: u16, rows: u16) {
    let size = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(screen, size).expect("the terminal takes a size");
}

impl Drop for Pty {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
