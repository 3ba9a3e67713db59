//! Against scripted servers on the loopback interface.
