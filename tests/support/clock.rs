//! A time of day for one agent alone, which a test can set while the agent runs. The C library's
//! answer is what is changed (`clock.c`), so that every part of the program sees it, that of
//! gRPC included. Other clocks stay as they are.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The clock of an agent that runs with [`Clock::environment`].
pub(crate) struct Clock {
    library: PathBuf,
    path: PathBuf,
    file: File,
}

impl Clock {
    /// A clock without an offset, with its files in `dir`. It takes a C compiler, as the build does.
    pub(crate) fn new(dir: &Path) -> Clock {
        let (library, path) = (dir.join("clock.so"), dir.join("clock"));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/clock.c");
        let built = Command::new("cc")
            .args(["-O1", "-shared", "-fPIC", "-o"])
            .args([library.as_os_str(), source.as_ref()])
            .output()
            .expect("a C compiler is there: the build needs one");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        fs::write(&path, 0_i64.to_ne_bytes()).expect("the clock's file is written");
        let file = File::options().write(true).open(&path).expect("the clock's file is there");
        Clock { library, path, file }
    }

    /// What the agent is started with.
    pub(crate) fn environment(&self) -> [(&'static str, &Path); 2] {
        [("LD_PRELOAD", &self.library), ("CLOCK_AHEAD", &self.path)]
    }

    /// Sets it so many seconds ahead of the machine's.
    pub(crate) fn set(&self, ahead: i64) {
        self.file.write_all_at(&ahead.to_ne_bytes(), 0).expect("the clock can be set");
    }
}
