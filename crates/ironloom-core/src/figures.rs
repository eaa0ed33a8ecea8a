//! Numbers as people read them.

/// A size in binary units, such as `93.8 MiB`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// `98362432` as `98,362,432`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(format_bytes(512), "512 B");
        assert_eq!(format_bytes(98_362_432), "93.8 MiB");
    }

    #[test]
    fn thousands_are_grouped() {
        let numbers = [0, 999, 1_000, 1_234_567, 98_362_432];
        assert_eq!(numbers.map(grouped), ["0", "999", "1,000", "1,234,567", "98,362,432"]);
    }
}
