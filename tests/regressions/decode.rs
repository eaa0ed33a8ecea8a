//! Public faults of this field that concern decoding, one case each, named by project and number.

#[path = "../../crates/ironloom-decode/tests/scripted/mod.rs"]
mod scripted;

use std::ops::ControlFlow;

use ironloom_decode::{
    BatchDecoder, Error, FeedProgress, FinishReason, GenerateOptions, RowEvent, RowLimits, Sampler, Session,
    SessionOptions, generate,
};
use ironloom_tensor::Device;
use scripted::{ScriptedModel, alone, bytes_of, sampler, tokenizer};

fn go(_: &str) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn context(limit: usize) -> SessionOptions {
    SessionOptions { context: Some(limit), ..Default::default() }
}

/// The context shifted on and on, and generation never ended.
#[test]
fn llama_cpp_3969_a_full_context_ends_the_answer() {
    let (tokenizer, model) = (tokenizer(), ScriptedModel::answering(&[1], &[65; 500], 1000));
    let mut session = Session::new(model, Device::cpu(1), context(32)).unwrap();
    session.feed(&[1]).unwrap();
    let options = GenerateOptions { max_tokens: usize::MAX, stop: Vec::new() };
    let answer = generate(&mut session, &tokenizer, &mut Sampler::greedy(), &options, &mut go).unwrap();
    assert_eq!((answer.finish, answer.generated, session.len()), (FinishReason::ContextFull, 31, 32));
}

/// A prompt longer than the context crashed.
#[test]
fn llama_cpp_3817_a_prompt_longer_than_the_context_is_an_error() {
    let model = ScriptedModel::hashing(1000);
    let mut session = Session::new(model.clone(), Device::cpu(1), context(32)).unwrap();
    let error = session.feed(&[1; 33]).unwrap_err();
    assert!(matches!(error, Error::PromptTooLong { prompt: 33, held: 0, context: 32 }));
    assert!(error.to_string().contains("33") && error.to_string().contains("32"));
    assert!(session.is_empty() && model.take_passes().is_empty());
}

/// The limit on tokens was passed over when the context came into play.
#[test]
fn llama_cpp_25026_max_tokens_is_honoured_beside_the_context() {
    let (tokenizer, model) = (tokenizer(), ScriptedModel::answering(&[1], &[65; 500], 1000));
    for (max_tokens, finish) in
        [(30, FinishReason::MaxTokens), (31, FinishReason::MaxTokens), (32, FinishReason::ContextFull)]
    {
        let mut session = Session::new(model.clone(), Device::cpu(1), context(32)).unwrap();
        session.feed(&[1]).unwrap();
        let options = GenerateOptions { max_tokens, stop: Vec::new() };
        let answer = generate(&mut session, &tokenizer, &mut Sampler::greedy(), &options, &mut go).unwrap();
        assert_eq!((answer.finish, answer.generated), (finish, max_tokens.min(31)));
    }
}

/// The same seed gave another text with more sequences at once.
#[test]
fn llama_cpp_7052_a_seed_gives_the_same_ids_beside_other_rows() {
    let model = ScriptedModel::hashing(200);
    let expected = alone(&model, &[1, 2, 3], &mut sampler(77), 20);
    for others in [0, 1, 7] {
        let mut batch = BatchDecoder::new(model.clone(), Device::cpu(1), 16).unwrap();
        let limits = RowLimits { max_tokens: 20, ..Default::default() };
        for other in 0..others {
            let prompt = vec![40 + other; 5 + other as usize];
            batch.join(model.session(), &prompt, sampler(u64::from(other)), limits.clone()).unwrap();
        }
        let row = batch.join(model.session(), &[1, 2, 3], sampler(77), limits).unwrap();
        let mut ids = Vec::new();
        while !batch.is_empty() {
            for (_, event) in batch.step().unwrap().into_iter().filter(|(id, _)| *id == row) {
                match event {
                    RowEvent::Token(id) => ids.push(id),
                    RowEvent::Finished { last, .. } => ids.extend(last),
                    RowEvent::Failed { error, .. } => panic!("{error}"),
                }
            }
        }
        assert_eq!(ids, expected, "beside {others}");
    }
}

/// The same prompt gave another text when its beginning came from an earlier request.
#[test]
fn llama_cpp_2838_a_reused_beginning_changes_nothing() {
    let model = ScriptedModel::hashing(200);
    let expected = alone(&model, &[1, 2, 3, 4], &mut sampler(5), 10);
    let mut session = model.session();
    session.feed(&[1, 2, 3, 9, 9]).unwrap();
    session.step(&mut sampler(6)).unwrap();
    let mut go = |_: FeedProgress| ControlFlow::Continue(());
    for reused in [3, 4, 4] {
        assert_eq!(session.replace_with(&[1, 2, 3, 4], &mut go).unwrap(), reused);
        let ids: Vec<u32> = (0..10).map(|_| session.step(&mut sampler(5)).unwrap()).collect();
        assert_eq!(ids, expected);
    }
}

/// Characters of several tokens came out as replacement characters.
#[test]
fn llama_cpp_4036_characters_are_never_cut() {
    let tokenizer = tokenizer();
    let text = "naïve 織機 🦀!";
    let model = ScriptedModel::answering(&[1], &bytes_of(&tokenizer, text), 100);
    let mut session = model.session();
    session.feed(&[1]).unwrap();
    let mut pieces = Vec::new();
    let mut on_text = |piece: &str| {
        pieces.push(piece.to_string());
        ControlFlow::Continue(())
    };
    let options = GenerateOptions { stop: vec!["機x".into()], ..Default::default() };
    let answer = generate(&mut session, &tokenizer, &mut Sampler::greedy(), &options, &mut on_text).unwrap();
    assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{pieces:?}");
    assert_eq!((pieces.concat().as_str(), answer.text.as_str()), (text, text));
}

/// The client was gone and generation went on.
#[test]
fn llama_cpp_11720_cancelling_takes_effect_within_one_step() {
    let (tokenizer, model) = (tokenizer(), ScriptedModel::hashing(2000));
    let mut session = model.session();
    session.feed(&[1, 2]).unwrap();
    model.take_passes();
    let options = GenerateOptions { max_tokens: 100, stop: Vec::new() };
    let mut calls = 0;
    let mut third = |_: &str| {
        calls += 1;
        if calls == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let answer = generate(&mut session, &tokenizer, &mut sampler(9), &options, &mut third).unwrap();
    assert_eq!((answer.finish, answer.generated, calls), (FinishReason::Cancelled, 3, 3));
    assert_eq!(model.take_passes().len(), 2, "no pass after the third id");
}

/// As before, while every token is the start of a character or of a stop string and no text comes out.
#[test]
fn vllm_54947_cancelling_does_not_wait_for_text() {
    let tokenizer = tokenizer();
    let model = ScriptedModel::answering(&[1], &bytes_of(&tokenizer, &"a".repeat(200)), 2000);
    let mut session = model.session();
    session.feed(&[1]).unwrap();
    let options = GenerateOptions { max_tokens: 150, stop: vec!["a".repeat(190)] };
    let mut calls = 0;
    let mut second = |piece: &str| {
        assert_eq!(piece, "");
        calls += 1;
        if calls == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let answer = generate(&mut session, &tokenizer, &mut Sampler::greedy(), &options, &mut second).unwrap();
    assert_eq!((answer.finish, answer.generated, answer.text.as_str()), (FinishReason::Cancelled, 2, ""));
}

/// A request that was cancelled while its prompt was computed held its place.
#[test]
fn llama_cpp_24496_cancelling_stops_a_prompt_between_passes() {
    let model = ScriptedModel::hashing(5000);
    let mut session = model.session();
    let mut at_once = |progress: FeedProgress| {
        if progress.done >= 512 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    assert!(matches!(session.feed_with(&[1; 4000], &mut at_once), Err(Error::Cancelled { done: 512, total: 4000 })));
    assert_eq!(model.take_passes().len(), 1);
    // In a batch: rows leave between steps, whether answering or waiting.
    let mut batch = BatchDecoder::new(model.clone(), Device::cpu(1), 8).unwrap();
    let answering = batch.join(model.session(), &[1], sampler(1), RowLimits::default()).unwrap();
    let waiting = batch.join(model.session(), &[1; 4000], sampler(1), RowLimits::default()).unwrap();
    batch.step().unwrap();
    batch.leave(waiting).unwrap();
    batch.leave(answering).unwrap();
    model.take_passes();
    assert!(batch.step().unwrap().is_empty() && model.take_passes().is_empty());
}
