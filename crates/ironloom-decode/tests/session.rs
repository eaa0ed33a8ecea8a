//! Sessions: turns, truncation, forks, limits, failures, with a model that hashes its whole sequence.

mod scripted;

use std::ops::ControlFlow;

use ironloom_decode::{Error, FeedProgress, Sampler, Session, SessionOptions};
use ironloom_tensor::Device;
use proptest::prelude::*;
use scripted::{ScriptedModel, alone, sampler};

fn go(_: FeedProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn each_id_goes_through_the_model_once() {
    let model = ScriptedModel::hashing(100);
    let mut session = model.session();
    session.feed(&[1, 2, 3]).unwrap();
    let first = session.step(&mut Sampler::greedy()).unwrap();
    let second = session.step(&mut Sampler::greedy()).unwrap();
    // The second id is computed with the next turn, in the same pass.
    session.feed(&[4, 5]).unwrap();
    session.step(&mut Sampler::greedy()).unwrap();
    assert_eq!(model.take_passes(), [[3], [1], [3]]);
    assert_eq!(session.ids()[..7], [1, 2, 3, first, second, 4, 5]);
    let third = alone(&model, &[1, 2, 3, first, second, 4, 5], &mut Sampler::greedy(), 1);
    assert_eq!(session.ids()[7..], third);
}

#[test]
fn logits_are_those_after_the_last_id_however_it_came() {
    let model = ScriptedModel::hashing(100);
    let mut session = model.session();
    session.feed(&[7, 8]).unwrap();
    assert_eq!(session.logits().unwrap(), model.logits_after(&[7, 8]));
    session.step(&mut sampler(1)).unwrap();
    let ids = session.ids().to_vec();
    assert_eq!(session.logits().unwrap(), model.logits_after(&ids));
    session.truncate(1).unwrap();
    assert_eq!(session.logits().unwrap(), model.logits_after(&[7]));
    session.truncate(0).unwrap();
    assert!(matches!(session.logits(), Err(Error::EmptySession)));
    session.feed(&[9]).unwrap();
    assert_eq!(session.logits().unwrap(), model.logits_after(&[9]));
}

#[test]
fn a_long_prompt_goes_in_passes_with_progress() {
    let model = ScriptedModel::hashing(2000);
    let mut session = model.session();
    let prompt: Vec<u32> = (0..1100).map(|i| i % 257).collect();
    let mut seen = Vec::new();
    session
        .feed_with(&prompt, &mut |progress| {
            seen.push((progress.done, progress.total));
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(seen, [(0, 1100), (512, 1100), (1024, 1100), (1100, 1100)]);
    assert_eq!(model.take_passes(), [[512], [512], [76]]);
    assert_eq!(session.logits().unwrap(), model.logits_after(&prompt));
}

#[test]
fn a_cancelled_feed_is_undone() {
    let model = ScriptedModel::hashing(2000);
    let mut session = model.session();
    session.feed(&[5, 6]).unwrap();
    let prompt: Vec<u32> = (0..1100).map(|i| i % 257).collect();
    let after_one = &mut |progress: FeedProgress| {
        if progress.done > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    assert!(matches!(session.feed_with(&prompt, after_one), Err(Error::Cancelled { done: 512, total: 1100 })));
    assert_eq!(session.ids(), [5, 6]);
    model.take_passes();
    assert_eq!(session.logits().unwrap(), model.logits_after(&[5, 6]));
    assert!(model.take_passes().is_empty(), "the logits of before were kept");
    let before_any = &mut |_: FeedProgress| ControlFlow::Break(());
    assert!(session.feed_with(&prompt, before_any).is_err());
    assert!(model.take_passes().is_empty());
}

#[test]
fn a_failed_pass_leaves_the_session_as_it_was() {
    for failing in 1..4 {
        let model = ScriptedModel::hashing(2000);
        let mut session = model.session();
        session.feed(&[5, 6]).unwrap();
        let third = session.step(&mut sampler(3)).unwrap();
        model.failing.lock().unwrap().insert(failing);
        let prompt: Vec<u32> = (0..1400).map(|i| i % 257).collect();
        let error = session.feed(&prompt).unwrap_err();
        assert_eq!(error.to_string(), format!("the model failed: pass {failing} was to fail"));
        assert_eq!(session.ids(), [5, 6, third]);
        session.feed(&prompt).unwrap();
        let whole = [&[5, 6, third], &prompt[..]].concat();
        assert_eq!(session.logits().unwrap(), model.logits_after(&whole), "failing {failing}");
    }
}

#[test]
fn a_failed_step_can_be_taken_again() {
    let model = ScriptedModel::hashing(100);
    let expected = alone(&model, &[1, 2], &mut sampler(8), 3);
    model.take_passes();
    model.failing.lock().unwrap().insert(1);
    let mut session = model.session();
    session.feed(&[1, 2]).unwrap();
    let mut sampler = sampler(8);
    assert_eq!(session.step(&mut sampler).unwrap(), expected[0]);
    assert!(matches!(session.step(&mut sampler), Err(Error::Model { .. })));
    assert_eq!(session.step(&mut sampler).unwrap(), expected[1]);
    assert_eq!(session.step(&mut sampler).unwrap(), expected[2]);
}

#[test]
fn the_context_is_a_limit_said_with_both_numbers() {
    let model = ScriptedModel::hashing(50);
    let options = |context| SessionOptions { context: Some(context), ..Default::default() };
    let mut session = Session::new(model.clone(), Device::cpu(1), options(8)).unwrap();
    session.feed(&[1, 2, 3]).unwrap();
    model.take_passes();
    let text = session.feed(&[4; 6]).unwrap_err().to_string();
    assert!(text.starts_with("the prompt has 6 tokens and the context of 8 has room for 5: shorten"), "{text}");
    assert!(model.take_passes().is_empty(), "the refusal comes before work");
    session.feed(&[4; 5]).unwrap();
    assert!(session.is_full());
    assert!(matches!(session.step(&mut Sampler::greedy()), Err(Error::ContextFull { context: 8 })));
    session.truncate(7).unwrap();
    session.step(&mut Sampler::greedy()).unwrap();
    let refused = Session::new(model.clone(), Device::cpu(1), options(51)).unwrap_err();
    assert_eq!(refused.to_string(), "a context of 51 was asked for and the model takes 50: ask for at most 50");
    assert!(matches!(
        Session::new(model.clone(), Device::cpu(1), options(0)),
        Err(Error::InvalidOption { option: "context", .. })
    ));
    assert!(matches!(session.truncate(9), Err(Error::TruncateBeyond { asked: 9, length: 8 })));
}

#[test]
fn foreign_ids_and_empty_sessions_are_refused() {
    let model = ScriptedModel::hashing(50);
    let mut session = model.session();
    assert!(matches!(session.step(&mut Sampler::greedy()), Err(Error::EmptySession)));
    session.feed(&[]).unwrap();
    let error = session.feed(&[1, 257]).unwrap_err();
    assert!(matches!(error, Error::UnknownId { id: 257, position: 1, vocabulary: 257 }));
    assert!(session.is_empty() && model.take_passes().is_empty());
}

#[test]
fn a_fork_goes_its_own_way() {
    let model = ScriptedModel::hashing(100);
    let mut session = model.session();
    session.feed(&[1, 2, 3]).unwrap();
    let first = session.step(&mut sampler(1)).unwrap();
    let mut fork = session.fork();
    fork.feed(&[9, 9]).unwrap();
    fork.truncate(1).unwrap();
    let continued: Vec<u32> = (0..5).map(|_| session.step(&mut sampler(1)).unwrap()).collect();
    let expected = alone(&model, &[1, 2, 3], &mut sampler(1), 6);
    assert_eq!([&[first], &continued[..]].concat(), expected);
    assert_eq!(fork.step(&mut sampler(2)).unwrap(), alone(&model, &[1], &mut sampler(2), 1)[0]);
}

#[test]
fn a_conversation_written_anew_is_computed_from_where_it_differs() {
    let model = ScriptedModel::hashing(100);
    let mut session = model.session();
    session.feed(&[1, 2, 3, 4, 5]).unwrap();
    model.take_passes();
    assert_eq!(session.replace_with(&[1, 2, 3, 9, 9, 9], &mut go).unwrap(), 3);
    assert_eq!(model.take_passes(), [[3]]);
    assert_eq!(session.logits().unwrap(), model.logits_after(&[1, 2, 3, 9, 9, 9]));
    assert_eq!(session.replace_with(&[1, 2, 3, 9], &mut go).unwrap(), 4);
    assert_eq!(session.logits().unwrap(), model.logits_after(&[1, 2, 3, 9]));
    assert_eq!(model.take_passes(), [[1]], "only the last id, for its logits");
    assert_eq!(session.replace_with(&[1, 2, 3, 9], &mut go).unwrap(), 4);
    assert!(model.take_passes().is_empty());
    assert!(session.replace_with(&[7; 101], &mut go).is_err());
    assert_eq!(session.ids(), [1, 2, 3, 9]);
}

/// One thing done to a session.
#[derive(Clone, Debug)]
enum Action {
    Feed(Vec<u32>),
    Step,
    Truncate(usize),
    Fork,
    ReplaceWith(Vec<u32>),
    FailingFeed(Vec<u32>),
}

fn action() -> impl Strategy<Value = Action> {
    let ids = || prop::collection::vec(0u32..5, 0..12);
    prop_oneof![
        ids().prop_map(Action::Feed),
        Just(Action::Step),
        Just(Action::Step),
        (0usize..40).prop_map(Action::Truncate),
        Just(Action::Fork),
        ids().prop_map(Action::ReplaceWith),
        ids().prop_map(Action::FailingFeed),
    ]
}

proptest! {
    #[test]
    fn whatever_was_done_before_the_ids_alone_decide(actions in prop::collection::vec(action(), 1..30), rows in 1usize..6) {
        let model = ScriptedModel::hashing(2000);
        let options = SessionOptions { prefill_rows: rows, ..Default::default() };
        let mut session = Session::new(model.clone(), Device::cpu(1), options).unwrap();
        let mut ids: Vec<u32> = Vec::new();
        for action in actions {
            match action {
                Action::Feed(more) => {
                    session.feed(&more).unwrap();
                    ids.extend(more);
                }
                Action::Step if ids.is_empty() => prop_assert!(session.step(&mut sampler(4)).is_err()),
                Action::Step => {
                    let id = sampler(4).sample(&model.logits_after(&ids), &ids).unwrap();
                    prop_assert_eq!(session.step(&mut sampler(4)).unwrap(), id);
                    ids.push(id);
                }
                Action::Truncate(length) => {
                    let length = length.min(ids.len());
                    session.truncate(length).unwrap();
                    ids.truncate(length);
                }
                Action::Fork => session = session.fork(),
                Action::ReplaceWith(wanted) => {
                    session.replace_with(&wanted, &mut go).unwrap();
                    ids = wanted;
                }
                Action::FailingFeed(more) => {
                    let next = model.passes.lock().unwrap().len();
                    model.failing.lock().unwrap().insert(next + more.len() / rows / 2);
                    let failed = session.feed(&more).is_err();
                    model.failing.lock().unwrap().clear();
                    if !failed {
                        ids.extend(more);
                    }
                }
            }
            prop_assert_eq!(session.ids(), &ids[..]);
        }
        if !ids.is_empty() {
            prop_assert_eq!(session.logits().unwrap(), model.logits_after(&ids));
        }
    }
}
