//! A program at a terminal: the input of a user, and the text on the screen.

use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Action, Winsize, tcflow, tcsetwinsize};

use super::wait::wait_for;

/// The program with its terminal. Dropping it kills the program.
pub(crate) struct Pty {
    screen: File,
    name: CString,
    child: Child,
    seen: String,
}

impl Pty {
    /// Starts a program with a terminal of its own, of this size.
    pub(crate) fn spawn(program: &Command, columns: u16, rows: u16) -> Pty {
        Pty::start(program, columns, rows, false)
    }

    /// The same with a stopped screen, as after Ctrl-S: the program waits in its first output, until
    /// [`Pty::resume_output`].
    pub(crate) fn spawn_stopped(program: &Command) -> Pty {
        Pty::start(program, 100, 40, true)
    }

    fn start(program: &Command, columns: u16, rows: u16, stopped: bool) -> Pty {
        // A program that another test starts must not have it: the terminal ends with its last owner.
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let screen = openpt(flags).expect("a terminal");
        grantpt(&screen).and_then(|()| unlockpt(&screen)).expect("a terminal for us");
        set_size(&screen, columns, rows);
        let name = ptsname(&screen, Vec::new()).expect("the terminal's name");
        let input = open(&name);
        if stopped {
            tcflow(&input, Action::OOff).expect("the screen can be stopped");
        }
        // Only the terminal of a session tells its programs of a new size.
        let mut command = Command::new("setsid");
        command.arg("-c").arg(program.get_program()).args(program.get_args());
        for (key, value) in program.get_envs() {
            command.env(key, value.unwrap_or_default());
        }
        let child = command.stdin(input).stdout(open(&name)).stderr(open(&name)).spawn();
        let child = child.expect("the program starts");
        Pty { screen: File::from(screen), name, child, seen: String::new() }
    }

    /// Gives the terminal another size.
    pub(crate) fn resize(&self, columns: u16, rows: u16) {
        set_size(&self.screen, columns, rows);
    }

    /// Ends the stop of the screen.
    pub(crate) fn resume_output(&self) {
        tcflow(open(&self.name), Action::OOn).expect("the screen goes on");
    }

    /// Kills the program.
    pub(crate) fn kill(&mut self) -> ExitStatus {
        self.child.kill().expect("it is our child");
        self.child.wait().expect("it is our child")
    }

    /// Types.
    pub(crate) fn type_text(&mut self, text: &str) {
        self.screen.write_all(text.as_bytes()).expect("the terminal takes input");
    }

    /// Waits until the screen shows `text`, and forgets what was shown up to it.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, text: &str, limit: Duration) {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(position) = self.seen.find(text) {
                self.seen.drain(..position + text.len());
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "timed out waiting for {text:?} on the screen: {:?}", self.seen);
            assert!(self.read(left), "the program ended before {text:?}: {:?}", self.seen);
        }
    }

    /// Waits for the program's end.
    pub(crate) fn wait_ended(&mut self, limit: Duration) -> ExitStatus {
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

/// The end of the program.
fn open(name: &CString) -> OwnedFd {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    rustix::fs::open(name, flags, Mode::empty()).expect("the terminal opens")
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
