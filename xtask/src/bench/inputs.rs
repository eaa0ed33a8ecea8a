//! The models and texts that benchmarks run on, seeded: the same on every machine and at every run.

use ironloom_core::Philox;
use ironloom_lm::DenseShape;

/// `host-decode`: small enough to live in the caches, so that what is measured is the program's own overhead.
pub(super) const HOST_DECODE: DenseShape =
    DenseShape { vocab_size: 32_000, width: 128, layers: 6, heads: 4, kv_heads: 4, head_width: 32, inner_width: 308 };

/// `host-nf4`: about 100M weights in blocks, so that what is measured is how fast packed weights stream.
pub(super) const HOST_NF4: DenseShape = DenseShape {
    vocab_size: 32_000,
    width: 1024,
    layers: 8,
    heads: 16,
    kv_heads: 16,
    head_width: 64,
    inner_width: 2816,
};

/// `count` token numbers below `vocabulary`, the same in each call.
pub(super) fn random_ids(vocabulary: usize, count: usize) -> Vec<u32> {
    let mut draws = Philox::new(29, 0);
    (0..count).map(|_| draws.next_u32() % vocabulary as u32).collect()
}

/// `characters` characters of plain English with some code, numbers and other scripts among them.
pub(super) fn text(characters: usize) -> String {
    const WORDS: [&str; 32] = [
        "the",
        "weights",
        "of",
        "a",
        "model",
        "are",
        "read",
        "once",
        "for",
        "each",
        "token",
        "and",
        "memory",
        "moves",
        "them",
        "through",
        "narrow",
        "pipes",
        "internationalization",
        "don't",
        "1,024",
        "3.14159",
        "für",
        "naïve",
        "数据",
        "модель",
        "let x = y[i];",
        "if (a != b) {",
        "}",
        "\n",
        "\n\n",
        "✓",
    ];
    let mut draws = Philox::new(31, 0);
    let mut text = String::new();
    let mut length = 0;
    while length < characters {
        let word = WORDS[draws.next_u32() as usize % WORDS.len()];
        text.push_str(word);
        text.push(' ');
        length += word.chars().count() + 1;
    }
    text.chars().take(characters).collect()
}

#[cfg(test)]
mod tests {
    use ironloom_lm::Config;

    use super::*;

    #[test]
    fn shapes_have_the_parameters_they_are_known_for() {
        let blocks = |shape: DenseShape| Config::dense(shape).parameters() - (shape.vocab_size * shape.width) as u64;
        assert!((100_000_000..105_000_000).contains(&blocks(HOST_NF4)));
        assert_eq!(blocks(HOST_DECODE), 6 * (4 * 128 * 128 + 3 * 128 * 308 + 2 * 128) + 128);
    }

    #[test]
    fn texts_and_ids_are_the_same_each_time() {
        assert_eq!(text(50_000).chars().count(), 50_000);
        assert_eq!(text(100), text(50_000).chars().take(100).collect::<String>());
        assert_eq!(random_ids(100, 512), random_ids(100, 512));
    }
}
