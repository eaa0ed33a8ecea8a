//! Which layers a target names.
//!
//! As in PEFT's `target_modules`, a name stands for itself and for every layer whose name ends with it after a dot: `q_proj`
//! and `self_attn.q_proj` name `model.layers.0.self_attn.q_proj`, and `proj` doesn't. A pattern with `*`, any number of characters, is held against
//! the whole name.

use super::{ALL_LINEAR, LoraError};

/// The layers that a target names, in their order.
pub(super) fn select<'a>(targets: &[String], layers: Vec<&'a str>) -> Result<Vec<&'a str>, LoraError> {
    if let Some(target) = targets.iter().find(|target| !layers.iter().any(|layer| names(target, layer))) {
        return Err(LoraError::UnmatchedTarget { target: target.clone(), endings: endings(&layers) });
    }
    Ok(layers.into_iter().filter(|layer| targets.iter().any(|target| names(target, layer))).collect())
}

/// Whether a target is a pattern or [`ALL_LINEAR`], which other programs read differently or not at all.
pub(super) fn is_pattern(target: &str) -> bool {
    target == ALL_LINEAR || target.contains('*')
}

fn names(target: &str, layer: &str) -> bool {
    if target == ALL_LINEAR {
        return true;
    }
    if target.contains('*') {
        return matches_pattern(target, layer);
    }
    match layer.strip_suffix(target) {
        Some(before) => !target.is_empty() && (before.is_empty() || before.ends_with('.')),
        None => false,
    }
}

/// Whether `text` is `pattern` with each `*` standing for any characters. Taking the first place of each piece is enough: what
/// follows can only have more room.
fn matches_pattern(pattern: &str, text: &str) -> bool {
    let (Some((start, rest)), Some((_, end))) = (pattern.split_once('*'), pattern.rsplit_once('*')) else {
        return pattern == text;
    };
    let Some(mut text) = text.strip_prefix(start).and_then(|text| text.strip_suffix(end)) else { return false };
    let middle = &rest[..rest.len() - end.len()];
    for piece in middle.split('*').filter(|piece| !piece.is_empty()) {
        let Some(at) = text.find(piece) else { return false };
        text = &text[at + piece.len()..];
    }
    true
}

/// The last components of the names, once each, in order of appearance.
fn endings(layers: &[&str]) -> Vec<String> {
    let mut endings: Vec<String> = Vec::new();
    for layer in layers {
        let ending = layer.rsplit('.').next().unwrap_or(layer);
        if !endings.iter().any(|known| known == ending) {
            endings.push(ending.to_owned());
        }
    }
    endings
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LAYERS: [&str; 6] = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.10.mlp.up_proj",
    ];

    fn selected(targets: &[&str]) -> Result<Vec<&'static str>, LoraError> {
        select(&targets.iter().map(|target| (*target).to_owned()).collect::<Vec<_>>(), LAYERS.to_vec())
    }

    #[test]
    fn names_are_whole_components_at_the_end() {
        assert_eq!(selected(&["q_proj"]).unwrap(), [LAYERS[0], LAYERS[3]]);
        assert_eq!(selected(&["self_attn.q_proj", "up_proj"]).unwrap(), [LAYERS[0], LAYERS[2], LAYERS[3], LAYERS[5]]);
        assert_eq!(selected(&[LAYERS[4]]).unwrap(), [LAYERS[4]]);
        assert_eq!(selected(&["all-linear"]).unwrap(), LAYERS);
    }

    #[test]
    fn patterns_are_for_the_whole_name() {
        assert_eq!(selected(&["*.mlp.*"]).unwrap(), [LAYERS[2], LAYERS[5]]);
        assert_eq!(selected(&["model.layers.1.*"]).unwrap(), [LAYERS[3], LAYERS[4]]);
        assert_eq!(selected(&["model.layers.1*proj"]).unwrap(), [LAYERS[3], LAYERS[4], LAYERS[5]]);
        assert_eq!(selected(&["*"]).unwrap(), LAYERS);
        assert!(selected(&["*.mlp"]).is_err(), "no name ends there");
    }

    #[test]
    fn a_target_that_names_nothing_is_refused_with_what_there_is() {
        for target in ["proj", "q_pro", "lm_head", "", "layers.0"] {
            let error = selected(&["q_proj", target]).unwrap_err().to_string();
            assert!(error.contains(&format!("{target:?}")) && error.contains("q_proj, o_proj, up_proj"), "{error}");
        }
    }

    #[test]
    fn pieces_do_not_overlap() {
        assert!(!matches_pattern("ab*ba", "aba"));
        assert!(matches_pattern("ab*ba", "abba"));
        assert!(!matches_pattern("a*b*b", "ab"));
        assert!(matches_pattern("a**b", "ab"));
    }

    proptest! {
        #[test]
        fn patterns_match_as_a_plain_search_does(pattern in "[ab*]{0,8}", text in "[ab]{0,10}") {
            fn plain(pattern: &[u8], text: &[u8]) -> bool {
                match (pattern.first(), text.first()) {
                    (None, first) => first.is_none(),
                    (Some(b'*'), _) => (0..=text.len()).any(|skip| plain(&pattern[1..], &text[skip..])),
                    (Some(letter), Some(first)) => letter == first && plain(&pattern[1..], &text[1..]),
                    (Some(_), None) => false,
                }
            }
            prop_assert_eq!(matches_pattern(&pattern, &text), plain(pattern.as_bytes(), text.as_bytes()));
        }
    }
}
