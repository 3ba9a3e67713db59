//! Where the cluster and the credentials for the first certificate come from.

use std::io::Read;
use std::path::Path;

use crate::cli::join_options::{JoinMethod, JoinOptions, TokenSource};
use crate::util::untrusted;

use super::bundle::JoinBundle;
use super::plane::{self, AuthorityPin, BootstrapToken, Cluster, Credentials, JoinError, Trust};
use super::refusal::{Reason, Refusal};

/// The largest token; one of k0s has the authority of the cluster and a key.
const MAX_TOKEN_BYTES: u64 = 256 * 1024;

/// Finds the cluster. `bundle`: the content of the file of `--from-bundle`, which is read once: the cluster
/// must be of the same text as the options. `input`: standard input, from which at most one token is read.
/// `progress`: receives the reason of each repetition, for up to five minutes.
pub(super) fn discover(
    options: &JoinOptions,
    bundle: Option<&JoinBundle>,
    input: &mut dyn Read,
    progress: &dyn Fn(&JoinError),
) -> Result<(Cluster, Credentials), Refusal> {
    let retry = plane::discovery_retry(progress);
    match &options.method {
        JoinMethod::Token { address } => {
            let source = options.token.as_ref().ok_or_else(|| without_credentials("the command line"))?;
            let token = BootstrapToken::parse(&token_text(source, input)?)?;
            let trust = match options.is_unverified {
                true => Trust::Unverified,
                false => Trust::Pins(
                    options.pins.iter().map(|pin| AuthorityPin::parse(pin)).collect::<Result<_, _>>()?,
                ),
            };
            let cluster = plane::by_token_within(address, &token, &trust, &retry)?;
            let credentials = match given_credentials(options.tls_token.as_ref(), input)? {
                Some(credentials) => credentials,
                None => Credentials::Token(token.bearer().to_string()),
            };
            Ok((cluster, credentials))
        }
        JoinMethod::DiscoveryFile(file) => {
            let (cluster, credentials) = plane::by_file_within(file, &retry)?;
            let source = options.tls_token.as_ref().or(options.token.as_ref());
            let given = given_credentials(source, input)?;
            let credentials =
                given.or(credentials).ok_or_else(|| without_credentials(&file.display().to_string()))?;
            Ok((cluster, credentials))
        }
        JoinMethod::BootstrapKubeconfig(file) => {
            let (cluster, credentials) = plane::by_file_within(file, &retry)?;
            let credentials = credentials.ok_or_else(|| without_credentials(&file.display().to_string()))?;
            Ok((cluster, credentials))
        }
        JoinMethod::K0sToken(file) => {
            let text = if file == Path::new("-") { from_input(input)? } else { from_file(file)? };
            Ok(plane::by_k0s_token(&text)?)
        }
        JoinMethod::Bundle(file) => match bundle {
            Some(bundle) => bundle.cluster(file),
            None => Err(without_credentials(&file.display().to_string())),
        },
    }
}

/// The server that a file of the command names, if it can be read. `bundle`: as for [`discover`]. Nothing is
/// sent.
pub(super) fn named_server(method: &JoinMethod, bundle: Option<&JoinBundle>) -> Option<String> {
    match method {
        JoinMethod::DiscoveryFile(file) | JoinMethod::BootstrapKubeconfig(file) => {
            plane::server_of_file(file).ok()
        }
        JoinMethod::K0sToken(file) if file != Path::new("-") => {
            let (cluster, _) = plane::by_k0s_token(&from_file(file).ok()?).ok()?;
            Some(cluster.server)
        }
        JoinMethod::Bundle(file) => {
            let (cluster, _) = bundle?.cluster(file).ok()?;
            Some(cluster.server)
        }
        JoinMethod::K0sToken(_) | JoinMethod::Token { .. } => None,
    }
}

fn given_credentials(
    source: Option<&TokenSource>,
    input: &mut dyn Read,
) -> Result<Option<Credentials>, Refusal> {
    let Some(source) = source else { return Ok(None) };
    let token = BootstrapToken::parse(&token_text(source, input)?)?;
    Ok(Some(Credentials::Token(token.bearer().to_string())))
}

fn without_credentials(place: &str) -> Refusal {
    let advice = "give a token with --tls-bootstrap-token or --token-file";
    Refusal::new(
        Reason::Configuration,
        format!("{place} has no credentials for the first certificate"),
        advice,
    )
}

fn token_text(source: &TokenSource, input: &mut dyn Read) -> Result<String, Refusal> {
    match source {
        TokenSource::Text(text) => Ok(text.trim().to_owned()),
        TokenSource::File(file) => from_file(file),
        TokenSource::StandardInput => from_input(input),
    }
}

fn from_file(file: &Path) -> Result<String, Refusal> {
    let bytes =
        untrusted::read_own(file, MAX_TOKEN_BYTES).map_err(|error| Refusal::file("read", file, &error))?;
    text_of(&file.display().to_string(), bytes)
}

fn from_input(input: &mut dyn Read) -> Result<String, Refusal> {
    let mut bytes = Vec::new();
    let limit = MAX_TOKEN_BYTES.saturating_add(1);
    input
        .take(limit)
        .read_to_end(&mut bytes)
        .map_err(|error| Refusal::file("read", Path::new("standard input"), &error))?;
    if bytes.len() as u64 > MAX_TOKEN_BYTES {
        let text = format!("standard input has more than {MAX_TOKEN_BYTES} bytes");
        return Err(Refusal::new(Reason::File, text, "give it only the token"));
    }
    text_of("standard input", bytes)
}

/// A token is one line; its content does not come into messages.
fn text_of(place: &str, bytes: Vec<u8>) -> Result<String, Refusal> {
    match String::from_utf8(bytes) {
        Ok(text) if !text.trim().is_empty() => Ok(text.trim().to_owned()),
        Ok(_) => Err(Refusal::new(Reason::File, format!("{place} is empty"), "write the token there")),
        Err(_) => Err(Refusal::new(Reason::File, format!("{place} is not text"), "write the token there")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::bundle;
    use super::*;
    use crate::transport::testing::AUTHORITY;

    #[test]
    fn file_that_is_replaced_while_the_command_runs_does_not_change_the_cluster() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("join.json");
        let options = JoinOptions {
            method: JoinMethod::Bundle(file.clone()),
            no_start: true,
            ..JoinOptions::default()
        };
        let write = |host: &str| {
            let cluster = Cluster { server: format!("https://{host}:6443"), authority: AUTHORITY.to_owned() };
            let credentials = Credentials::Token(format!("{host}.token"));
            JoinBundle::new(&cluster, &credentials, &options, None, true).write(&file).unwrap();
        };
        write("first");
        let bundle = bundle::read(&file).unwrap();
        for replace in [&(|| write("second")) as &dyn Fn(), &|| std::fs::remove_file(&file).unwrap()] {
            replace();
            let (cluster, credentials) =
                discover(&options, Some(&bundle), &mut std::io::empty(), &|_| {}).unwrap();
            assert_eq!(cluster.server, "https://first:6443");
            assert_eq!(credentials, Credentials::Token("first.token".to_owned()));
            let named = named_server(&options.method, Some(&bundle));
            assert_eq!(named.as_deref(), Some("https://first:6443"));
        }
    }

    #[test]
    fn token_comes_from_the_command_line_a_file_or_standard_input() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "from.file\n").unwrap();
        let read = |source: TokenSource| token_text(&source, &mut &b" from.input\n"[..]).unwrap();
        assert_eq!(read(TokenSource::Text("from.line ".into())), "from.line");
        assert_eq!(read(TokenSource::File(file.path().to_owned())), "from.file");
        assert_eq!(read(TokenSource::StandardInput), "from.input");
    }

    #[test]
    fn server_is_read_from_a_file_of_the_command() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "clusters: [{name: '', cluster: {server: 'https://a'}}]\n").unwrap();
        let method = JoinMethod::BootstrapKubeconfig(file.path().to_owned());
        assert_eq!(named_server(&method, None).as_deref(), Some("https://a:443"));
        assert_eq!(named_server(&JoinMethod::DiscoveryFile("/no/such/file".into()), None), None);
        assert_eq!(named_server(&JoinMethod::Token { address: "a:1".into() }, None), None);
    }

    #[test]
    fn empty_binary_and_endless_input_is_refused() {
        assert!(from_input(&mut &b"\n"[..]).unwrap_err().text.contains("is empty"));
        assert!(from_input(&mut &b"\xff"[..]).unwrap_err().text.contains("is not text"));
        assert!(from_input(&mut std::io::repeat(b'a')).unwrap_err().text.contains("more than"));
        assert!(from_file(Path::new("/no/such/file")).unwrap_err().text.contains("/no/such/file"));
    }
}
