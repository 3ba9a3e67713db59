//! Errors with their causes, on one line, and errors of the system in the words of libc.

use std::error::Error;
use std::io;

use rustix::io::Errno;

/// The begin of the number that Rust adds to the text of a system error.
const CODE: &str = " (os error ";

/// The messages of an error and of its causes, separated by colons. A cause that an error repeats at the
/// end of its own message is there once.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.ends_with(&format!(": {message}")) {
            text.push_str(&format!(": {message}"));
        }
        cause = error.source();
    }
    text
}

/// A message for users, without the numbers that Rust adds to system errors: "No such file or directory",
/// as other programs of the system have it. Logs retain the numbers.
#[must_use]
pub fn without_codes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(CODE) {
        out.push_str(before);
        let digits = after.bytes().take_while(u8::is_ascii_digit).count();
        match after.get(digits..).and_then(|end| end.strip_prefix(')')) {
            Some(end) if digits > 0 => rest = end,
            _ => {
                out.push_str(CODE);
                rest = after;
            }
        }
    }
    out + rest
}

/// The name that libc has for an error of the system (strerror(3)); the message of other errors.
#[must_use]
pub fn system_error(error: &io::Error) -> String {
    // An error that a library made from a kind only has words of Rust, such as "entity not found".
    let errno = match error.kind() {
        _ if error.raw_os_error().is_some() || error.get_ref().is_some() => None,
        io::ErrorKind::NotFound => Some(Errno::NOENT),
        io::ErrorKind::PermissionDenied => Some(Errno::ACCESS),
        io::ErrorKind::AlreadyExists => Some(Errno::EXIST),
        io::ErrorKind::BrokenPipe => Some(Errno::PIPE),
        io::ErrorKind::ConnectionRefused => Some(Errno::CONNREFUSED),
        io::ErrorKind::ConnectionReset => Some(Errno::CONNRESET),
        io::ErrorKind::TimedOut => Some(Errno::TIMEDOUT),
        io::ErrorKind::Interrupted => Some(Errno::INTR),
        _ => None,
    };
    without_codes(&errno.map_or_else(|| error.to_string(), |errno| errno.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot read x: {0}")]
    struct Repeating(#[source] io::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("cannot start")]
    struct Outer(#[source] Repeating);

    #[test]
    fn cause_that_the_message_repeats_is_there_once() {
        let error = Outer(Repeating(io::Error::other("torn")));
        assert_eq!(chain(&error), "cannot start: cannot read x: torn");
    }

    #[test]
    fn numbers_of_system_errors_are_removed_and_other_brackets_stay() {
        for (text, expected) in [
            ("x: No such file or directory (os error 2)", "x: No such file or directory"),
            ("a (os error 2); b (os error 13): c", "a; b: c"),
            ("(os error 2)", "(os error 2)"),
            ("a (os error )", "a (os error )"),
            ("a (os error 2", "a (os error 2"),
            ("a (os error x)\u{e4} (os error 1)", "a (os error x)\u{e4}"),
            ("", ""),
        ] {
            assert_eq!(without_codes(text), expected, "{text:?}");
        }
    }

    #[test]
    fn errors_of_the_system_have_the_names_of_libc() {
        let absent = std::fs::File::open("/nonexistent/file").unwrap_err();
        for error in [absent, io::ErrorKind::NotFound.into()] {
            assert_eq!(system_error(&error), "No such file or directory");
        }
        assert_eq!(system_error(&io::ErrorKind::PermissionDenied.into()), "Permission denied");
        assert_eq!(system_error(&io::Error::other("torn")), "torn");
        assert_eq!(system_error(&io::Error::new(io::ErrorKind::NotFound, "no blob")), "no blob");
    }
}
