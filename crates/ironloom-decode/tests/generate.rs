//! Answers: text as it streams, and every reason to end.

mod scripted;

use std::ops::ControlFlow;

use ironloom_decode::{Error, FinishReason, GenerateOptions, Generation, Sampler, Session, SessionOptions, generate};
use ironloom_lm::text::Tokenizer;
use ironloom_tensor::Device;
use proptest::prelude::*;
use scripted::{ScriptedModel, bytes_of, tokenizer};

const PROMPT: &str = "Q: ";

fn options(max_tokens: usize, stop: &[&str]) -> GenerateOptions {
    GenerateOptions { max_tokens, stop: stop.iter().map(ToString::to_string).collect() }
}

/// The pieces of text and the answer of a model that says `answer`, a byte a step.
fn say(tokenizer: &Tokenizer, answer: &str, options: &GenerateOptions) -> (Vec<String>, Generation) {
    let prompt = bytes_of(tokenizer, PROMPT);
    let model = ScriptedModel::answering(&prompt, &bytes_of(tokenizer, answer), 1000);
    let mut session = model.session();
    session.feed(&prompt).unwrap();
    let mut pieces = Vec::new();
    let mut on_text = |piece: &str| {
        pieces.push(piece.to_string());
        ControlFlow::Continue(())
    };
    let generation = generate(&mut session, tokenizer, &mut Sampler::greedy(), options, &mut on_text).unwrap();
    assert_eq!(session.ids()[prompt.len()..], generation.ids);
    (pieces, generation)
}

#[test]
fn an_end_token_ends_the_answer_and_is_not_text() {
    let tokenizer = tokenizer();
    let (pieces, answer) = say(&tokenizer, "Iron.", &options(100, &[]));
    assert_eq!(pieces, ["I", "r", "o", "n", "."]);
    assert_eq!((answer.text.as_str(), answer.finish), ("Iron.", FinishReason::EndToken));
    assert_eq!((answer.generated, answer.prompt_tokens), (6, 3));
    assert_eq!(answer.ids[5], tokenizer.end_ids()[0]);
}

#[test]
fn max_tokens_is_honoured_whatever_it_is() {
    let tokenizer = tokenizer();
    for max_tokens in 0..5 {
        let (_, answer) = say(&tokenizer, "Iron.", &options(max_tokens, &["x"]));
        assert_eq!((answer.text.as_str(), answer.finish), (&"Iron."[..max_tokens], FinishReason::MaxTokens));
        assert_eq!(answer.ids.len(), max_tokens);
    }
}

#[test]
fn a_stop_string_of_many_tokens_ends_the_text_before_it() {
    let tokenizer = tokenizer();
    let (pieces, answer) = say(&tokenizer, "a\nUse\nUser: b", &options(100, &["\nUser:", "zz"]));
    assert_eq!((answer.text.as_str(), answer.finish), ("a\nUse", FinishReason::StopString));
    assert_eq!(pieces.concat(), "a\nUse");
    assert_eq!(pieces[0..6], ["a", "", "", "", "", "\nUse"], "held until the second newline decides");
    assert_eq!(answer.generated, "a\nUse\nUser:".len());
}

#[test]
fn held_text_is_given_at_the_end() {
    let tokenizer = tokenizer();
    let (pieces, answer) = say(&tokenizer, "a\nUse", &options(100, &["\nUser:"]));
    assert_eq!((answer.text.as_str(), answer.finish), ("a\nUse", FinishReason::EndToken));
    assert_eq!(pieces.last().unwrap(), "\nUse");
    let (pieces, answer) = say(&tokenizer, "a\nUse", &options(3, &["\nUser:"]));
    assert_eq!((pieces.concat().as_str(), answer.finish), ("a\nU", FinishReason::MaxTokens));
}

#[test]
fn a_full_context_ends_the_answer() {
    let tokenizer = tokenizer();
    let prompt = bytes_of(&tokenizer, PROMPT);
    let model = ScriptedModel::answering(&prompt, &bytes_of(&tokenizer, "Iron."), 1000);
    let context = SessionOptions { context: Some(6), ..Default::default() };
    let mut session = Session::new(model, Device::cpu(1), context).unwrap();
    session.feed(&prompt).unwrap();
    let mut sampler = Sampler::greedy();
    let mut go = |_: &str| ControlFlow::Continue(());
    let answer = generate(&mut session, &tokenizer, &mut sampler, &options(100, &[]), &mut go).unwrap();
    assert_eq!((answer.text.as_str(), answer.finish), ("Iro", FinishReason::ContextFull));
    let again = generate(&mut session, &tokenizer, &mut sampler, &options(100, &[]), &mut go).unwrap();
    assert_eq!((again.generated, again.finish, again.prompt_tokens), (0, FinishReason::ContextFull, 0));
}

#[test]
fn turns_continue_and_count_their_own_prompt() {
    let tokenizer = tokenizer();
    let model = ScriptedModel::hashing(1000);
    let mut session = model.session();
    session.feed(&bytes_of(&tokenizer, "first")).unwrap();
    let mut sampler = scripted::sampler(6);
    let mut go = |_: &str| ControlFlow::Continue(());
    generate(&mut session, &tokenizer, &mut sampler, &options(7, &[]), &mut go).unwrap();
    session.feed(&bytes_of(&tokenizer, "second turn")).unwrap();
    let held = session.ids().to_vec();
    let answer = generate(&mut session, &tokenizer, &mut sampler, &options(5, &[]), &mut go).unwrap();
    assert_eq!(answer.prompt_tokens, 11);
    assert_eq!(answer.ids, scripted::alone(&model, &held, &mut scripted::sampler(6), answer.ids.len()));
}

#[test]
fn wrong_options_and_empty_sessions_are_refused_before_work() {
    let tokenizer = tokenizer();
    let model = ScriptedModel::hashing(100);
    let mut session = model.session();
    let mut sampler = Sampler::greedy();
    let mut go = |_: &str| ControlFlow::Continue(());
    let empty = generate(&mut session, &tokenizer, &mut sampler, &options(5, &[]), &mut go);
    assert!(matches!(empty, Err(Error::EmptySession)));
    session.feed(&[1]).unwrap();
    model.take_passes();
    let stop = generate(&mut session, &tokenizer, &mut sampler, &options(5, &["a", ""]), &mut go);
    assert!(matches!(stop, Err(Error::EmptyStop { index: 1 })));
    assert!(model.take_passes().is_empty());
}

#[test]
fn options_and_answers_read_as_json() {
    let options: GenerateOptions = serde_json::from_str(r#"{"stop": ["\n"]}"#).unwrap();
    assert_eq!(options, GenerateOptions { max_tokens: 512, stop: vec!["\n".into()] });
    assert_eq!(serde_json::to_string(&FinishReason::StopString).unwrap(), "\"stop_string\"");
    let (_, answer) = say(&tokenizer(), "a", &GenerateOptions::default());
    let json = serde_json::to_value(&answer).unwrap();
    assert_eq!((json["text"].as_str(), json["finish"].as_str()), (Some("a"), Some("end_token")));
}

proptest! {
    #[test]
    fn pieces_are_the_text_up_to_the_first_stop(
        text in "[abé🦀]{0,20}",
        stop in prop::collection::vec("[abé🦀]{1,4}", 0..3),
        max_tokens in 0usize..80,
    ) {
        let tokenizer = tokenizer();
        let options = GenerateOptions { max_tokens, stop: stop.clone() };
        let (pieces, answer) = say(&tokenizer, &text, &options);
        prop_assert_eq!(pieces.concat(), answer.text.clone());
        // A stop string's last byte is its last character's last, so the first to be complete is the first by its end.
        let ends = |s: &String| text.find(s.as_str()).map(|start| (start + s.len(), start));
        let first = stop.iter().filter_map(ends).filter(|(end, _)| *end <= max_tokens).min();
        if let Some((end, start)) = first {
            prop_assert_eq!((answer.finish, answer.text.as_str()), (FinishReason::StopString, &text[..start]));
            prop_assert_eq!(answer.generated, end);
        } else if max_tokens > text.len() {
            prop_assert_eq!((answer.finish, answer.text.as_str()), (FinishReason::EndToken, text.as_str()));
        } else {
            prop_assert_eq!(answer.finish, FinishReason::MaxTokens);
            prop_assert_eq!(answer.text, String::from_utf8_lossy(&text.as_bytes()[..max_tokens]));
        }
    }
}
