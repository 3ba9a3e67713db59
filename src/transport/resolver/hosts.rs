//! The file `hosts`, read as by glibc (hosts(5)).

use std::io::{self, BufRead, Read};
use std::net::IpAddr;

/// The limit of the file; lists of blocked hosts have some megabytes.
const MAX_BYTES: u64 = 64 << 20;
/// The limit of one line.
const MAX_LINE: u64 = 64 << 10;
/// The limit of addresses of one name.
const MAX_ADDRESSES: usize = 64;

/// The addresses of a name in all lines that have it, in their order. Names differ only in case
/// if they are equal; a final dot does not count.
pub(super) fn find(file: impl BufRead, name: &str) -> io::Result<Vec<IpAddr>> {
    let name = name.trim_end_matches('.');
    let mut file = file.take(MAX_BYTES);
    let mut found = Vec::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        if (&mut file).take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
            return Ok(found);
        }
        let text = line.split(|byte| *byte == b'#').next().unwrap_or_default();
        let mut words = text.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        let Some(address) = words.next() else { continue };
        let is_name =
            |word: &[u8]| word.strip_suffix(b".").unwrap_or(word).eq_ignore_ascii_case(name.as_bytes());
        if !words.any(is_name) {
            continue;
        }
        let address = std::str::from_utf8(address).ok().and_then(|address| address.parse().ok());
        found.extend(address.filter(|address| !found.contains(address) && found.len() < MAX_ADDRESSES));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_all_lines_with_the_name_are_found() {
        let file = "127.0.0.1 localhost # api\n\n# 10.0.0.9 api\n10.0.0.1\tapi.site  api \n::1 localhost\r\n\
                    fd00::1 API other\n10.0.0.1 api\nbad api\n10.0.0.2 other.#api\n";
        let check = |name: &str| -> Vec<String> {
            find(file.as_bytes(), name).unwrap().iter().map(ToString::to_string).collect()
        };
        assert_eq!(check("api"), ["10.0.0.1", "fd00::1"]);
        assert_eq!(check("Api.Site."), ["10.0.0.1"]);
        assert_eq!(check("localhost"), ["127.0.0.1", "::1"]);
        assert_eq!(check("other"), ["fd00::1", "10.0.0.2"]);
        assert!(check("10.0.0.1").is_empty() && check("ap").is_empty() && check("").is_empty());
    }
}
