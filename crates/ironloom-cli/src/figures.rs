//! Numbers as people read them.

use ironloom_core::grouped;

/// A number of parameters in short: `134.52 M`, `7.25 B`.
pub(crate) fn short_count(number: u64) -> String {
    let value = number as f64;
    match number {
        0..1_000 => number.to_string(),
        1_000..1_000_000 => format!("{:.2} K", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} M", value / 1e6),
        _ => format!("{:.2} B", value / 1e9),
    }
}

/// `1 tensor`, `2 tensors`.
pub(crate) fn counted(number: usize, noun: &str) -> String {
    format!("{} {noun}{}", grouped(number as u64), if number == 1 { "" } else { "s" })
}

/// `text` cut to `limit` characters, with what cannot be printed escaped.
pub(crate) fn cut(text: &str, limit: usize) -> String {
    let mut escaped = text.chars().flat_map(|character| {
        let control = character.is_control();
        let escaped = control.then(|| character.escape_default());
        escaped.into_iter().flatten().chain((!control).then_some(character))
    });
    let mut short: String = escaped.by_ref().take(limit).collect();
    if escaped.next().is_some() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_counted_and_shortened() {
        let counts = [950, 1_500, 134_515_008, 7_250_000_000];
        assert_eq!(counts.map(short_count), ["950", "1.50 K", "134.52 M", "7.25 B"]);
        assert_eq!((counted(1, "tensor"), counted(1200, "tensor")), ("1 tensor".into(), "1,200 tensors".into()));
    }

    #[test]
    fn text_is_cut_and_shown_on_one_line() {
        assert_eq!(cut("a\nb", 10), "a\\nb");
        assert_eq!(cut("abcdef", 3), "abc…");
        assert_eq!(cut("織機", 2), "織機");
        assert_eq!(cut("\u{1b}[31m", 20), "\\u{1b}[31m");
    }
}
