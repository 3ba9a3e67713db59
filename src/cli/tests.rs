//! The command line, from arguments to commands.
