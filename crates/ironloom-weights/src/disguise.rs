//! What a file is that was given in place of weights: an error page, a pointer, a pickle.
//!
//! Downloads fail in a few ways that leave a file behind under the right name. Each is told apart by its first bytes, so that
//! the message says what happened instead of "wrong magic".

use std::fmt;

/// Something that lies under a weight file's name and isn't weights.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Disguise {
    /// An HTML or XML page, as a server sends for an error or a login.
    WebPage,
    /// A pointer of Git Large File Storage, with the size of the file it stands for.
    GitLfsPointer {
        /// Bytes of the real file, where the pointer says.
        real_size: Option<u64>,
    },
    /// A zip archive, as PyTorch writes.
    Zip,
    /// A Python pickle, as older PyTorch wrote.
    Pickle,
    /// A gzip archive.
    Gzip,
    /// A JSON text, such as a server's error message or a model's configuration.
    Json,
    /// A file of the formats before GGUF.
    LegacyGgml,
}

impl Disguise {
    /// What the file that starts with `start` (its first kilobyte or all of it) is, if it's one of these. A safetensors file
    /// can start with any byte (the length of its header), so look for its header before asking this.
    pub fn detect(start: &[u8]) -> Option<Self> {
        let text = start.trim_ascii_start();
        let text = text.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(text);
        let begins =
            |prefix: &str| text.get(..prefix.len()).is_some_and(|head| head.eq_ignore_ascii_case(prefix.as_bytes()));
        if ["<!doctype", "<html", "<head", "<?xml", "<!--"].into_iter().any(begins) {
            return Some(Self::WebPage);
        }
        if begins("version https://git-lfs.github.com/spec/") {
            let real_size = String::from_utf8_lossy(text)
                .lines()
                .find_map(|line| line.strip_prefix("size ").and_then(|size| size.trim().parse().ok()));
            return Some(Self::GitLfsPointer { real_size });
        }
        match start {
            [b'P', b'K', 3 | 5 | 7, 4 | 6 | 8, ..] => Some(Self::Zip),
            [0x80, 2..=5, b'c' | b'}' | b'(' | b']' | b'X' | b'\x8a' | b'\x95' | b'N', ..] => Some(Self::Pickle),
            [0x1f, 0x8b, 8, ..] => Some(Self::Gzip),
            [b'l', b'm', b'g', b'g', ..] | [b'f' | b't', b'm' | b'j', b'g', b'g', ..] => Some(Self::LegacyGgml),
            [b'{', next, ..] if next.is_ascii_whitespace() || matches!(next, b'"' | b'}') => Some(Self::Json),
            _ => None,
        }
    }
}

impl fmt::Display for Disguise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WebPage => f.write_str(
                "is a web page, not weights: the download got an error or a login page; check the address and the access \
                 rights, and download it again",
            ),
            Self::GitLfsPointer { real_size } => {
                f.write_str("is a Git LFS pointer, not weights")?;
                if let Some(size) = real_size {
                    write!(f, " (the file it stands for has {size} bytes)")?;
                }
                f.write_str(": run `git lfs pull` in its folder, or download the file itself")
            }
            Self::Zip => f.write_str(
                "is a zip archive (as PyTorch's .bin and .pt files are), and those can run code when read: convert it to \
                 safetensors",
            ),
            Self::Pickle => f.write_str(
                "is a Python pickle (an old PyTorch .bin or .pt file), and those can run code when read: convert it to \
                 safetensors",
            ),
            Self::Gzip => f.write_str("is a gzip archive: unpack it first"),
            Self::Json => f.write_str(
                "is a JSON text, not weights: a server's error message or a configuration; open the model's folder, its \
                 *.safetensors.index.json or the weights themselves",
            ),
            Self::LegacyGgml => {
                f.write_str("is in a GGML format from before GGUF, which is not read: convert the model again")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_disguise_is_told() {
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 269060552\n";
        for (start, expected) in [
            (&b"\n <!DOCTYPE html><html>"[..], Disguise::WebPage),
            (b"<HTML>", Disguise::WebPage),
            (b"\xEF\xBB\xBF<?xml version", Disguise::WebPage),
            (pointer, Disguise::GitLfsPointer { real_size: Some(269_060_552) }),
            (&pointer[..60], Disguise::GitLfsPointer { real_size: None }),
            (b"PK\x03\x04....", Disguise::Zip),
            (b"\x80\x02}q\x00", Disguise::Pickle),
            (b"\x1f\x8b\x08\x00", Disguise::Gzip),
            (b"{\"error\": \"Entry not found\"}", Disguise::Json),
            (b"tjgg\x03\0\0\0", Disguise::LegacyGgml),
        ] {
            assert_eq!(Disguise::detect(start), Some(expected), "{start:?}");
        }
    }

    #[test]
    fn weights_are_not_disguises() {
        assert_eq!(Disguise::detect(b"GGUF\x03\0\0\0"), None);
        assert_eq!(Disguise::detect(b"\x80\x02\0\0\0\0\0\0{\"a\""), None, "a safetensors header of 640 bytes");
        assert_eq!(Disguise::detect(b""), None);
    }
}
