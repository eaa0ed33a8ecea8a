//! Tests of the program on a graphics card.

/// Whether a run ended for want of a card, which is said as the reason to skip the test.
pub(crate) fn is_missing(code: i32, errors: &str) -> bool {
    let missing = code != 0 && ["no CUDA driver", "no CUDA device"].iter().any(|missing| errors.contains(missing));
    if missing {
        println!("skipped: {errors}");
    }
    missing
}
