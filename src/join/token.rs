//! Bootstrap tokens (Go: cluster-bootstrap/token/api, cmd/kubeadm/app/apis/bootstraptoken/v1).

use std::fmt;

use super::error::JoinError;
use crate::util::secret::Secret;

const ID_BYTES: usize = 6;
const SECRET_BYTES: usize = 16;

/// A bootstrap token `ID.SECRET` (`[a-z0-9]{6}.[a-z0-9]{16}`). Neither `Debug` nor `Display` shows the secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootstrapToken {
    id: String,
    secret: Secret<String>,
}

impl BootstrapToken {
    /// Reads a token.
    ///
    /// # Errors
    /// When the text has another form. The error does not contain it.
    pub fn parse(text: &str) -> Result<BootstrapToken, JoinError> {
        let is_part = |part: &str, length: usize| {
            part.len() == length
                && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
        };
        let parts = text.split_once('.');
        let parts = parts.filter(|(id, secret)| is_part(id, ID_BYTES) && is_part(secret, SECRET_BYTES));
        let (id, secret) = parts.ok_or_else(|| {
            let reason = "is not of the form ID.SECRET, with 6 and 16 lower-case letters and digits";
            JoinError::Argument { flag: "--token", reason: reason.to_owned() }
        })?;
        Ok(BootstrapToken { id: id.to_owned(), secret: Secret::new(secret.to_owned()) })
    }

    /// The public part, which names the token.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The secret part.
    #[must_use]
    pub fn secret(&self) -> &str {
        self.secret.reveal()
    }

    /// `ID.SECRET`, which API servers accept as a bearer token.
    #[must_use]
    pub fn bearer(&self) -> String {
        format!("{}.{}", self.id, self.secret())
    }
}

impl fmt::Display for BootstrapToken {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.(secret)", self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_has_an_id_and_a_secret_that_is_not_shown() {
        let token = BootstrapToken::parse("abcdef.0123456789abcdef").unwrap();
        assert_eq!((token.id(), token.secret()), ("abcdef", "0123456789abcdef"));
        assert_eq!(token.bearer(), "abcdef.0123456789abcdef");
        assert!(!format!("{token} {token:?}").contains("0123456789"));
    }

    #[test]
    fn other_forms_are_refused_without_being_shown() {
        for text in [
            "",
            ".",
            "abcdef",
            "abcdef.0123456789abcde",
            "abcdef.0123456789abcdef0",
            "abcde.0123456789abcdef",
            "ABCDEF.0123456789abcdef",
            "abcdef.0123456789abcde.",
            " abcdef.0123456789abcdef",
            "abcdef.0123456789abcdef\n",
            "äbcde.0123456789abcdef",
        ] {
            let error = BootstrapToken::parse(text).unwrap_err();
            assert!(error.exit_code() == 2 && !error.to_string().contains("0123"), "{text:?}: {error}");
        }
    }
}
