//! How a command ends, and what is said when it fails: one line with the whole chain of causes, and the exit code.

use std::{
    fmt::{self, Write as _},
    io::{self, Write as _},
    process::ExitCode,
};

/// How a command that did not fail ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All of its work is done.
    Done,
    /// Ctrl-C ended it.
    Interrupted,
}

/// An argument that clap cannot judge, refused: the exit code is that of wrong usage.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Prints the error to stderr and gives the exit code: 2 for wrong usage, 1 for all else. A closed pipe is no failure: its
/// reader, such as `head`, has seen enough.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if is_closed_pipe(error) {
        return ExitCode::SUCCESS;
    }
    let _ = writeln!(io::stderr(), "error: {}", line(error));
    ExitCode::from(if error.is::<Usage>() { 2 } else { 1 })
}

/// Whether the error is that nobody reads the output any more.
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let closed = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    };
    error.chain().any(closed)
}

/// The error with its causes on one line. A cause that its effect has already quoted is not said again.
pub(crate) fn line(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string().lines().map(str::trim).collect::<Vec<_>>().join(" ");
        if !text.contains(&cause) {
            let _ = write!(text, "{}{cause}", if text.is_empty() { "" } else { ": " });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn causes_are_said_once_and_on_one_line() {
        let source = io::Error::other("the disk\n  is gone");
        assert_eq!(
            line(&anyhow!(source).context("cannot read model.gguf")),
            "cannot read model.gguf: the disk is gone"
        );
        let quoting = anyhow!(io::Error::other("the disk is gone")).context("cannot read x: the disk is gone");
        assert_eq!(line(&quoting), "cannot read x: the disk is gone");
    }

    #[test]
    fn exit_codes_tell_usage_from_failure_and_from_a_closed_pipe() {
        let code = |error: anyhow::Error| format!("{:?}", report(&error));
        assert_eq!(code(anyhow!("failed")), format!("{:?}", ExitCode::from(1)));
        assert_eq!(code(anyhow!(Usage("wrong".into()))), format!("{:?}", ExitCode::from(2)));
        let closed = anyhow!(io::Error::from(io::ErrorKind::BrokenPipe)).context("cannot print");
        assert_eq!(code(closed), format!("{:?}", ExitCode::SUCCESS));
    }
}
