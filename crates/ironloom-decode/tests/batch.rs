//! Batches: every row gets what it gets alone.

mod scripted;

use std::{collections::HashMap, sync::Arc};

use ironloom_decode::{BatchDecoder, Error, FinishReason, Padding, RowEvent, RowId, RowLimits, strip_left_padding};
use ironloom_tensor::Device;
use proptest::prelude::*;
use scripted::{ScriptedModel, alone, sampler};

fn batch(model: &Arc<ScriptedModel>, rows_per_pass: usize) -> BatchDecoder<ScriptedModel> {
    BatchDecoder::new(model.clone(), Device::cpu(1), rows_per_pass).unwrap()
}

fn limits(max_tokens: usize) -> RowLimits {
    RowLimits { max_tokens, ..Default::default() }
}

/// Steps until nothing is left, and gives each row's ids and the reason it ended.
fn run(batch: &mut BatchDecoder<ScriptedModel>) -> HashMap<RowId, (Vec<u32>, Option<FinishReason>)> {
    let mut rows: HashMap<RowId, (Vec<u32>, Option<FinishReason>)> = HashMap::new();
    while !batch.is_empty() {
        for (row, event) in batch.step().unwrap() {
            let (ids, finish) = rows.entry(row).or_default();
            match event {
                RowEvent::Token(id) => ids.push(id),
                RowEvent::Finished { last, reason, .. } => {
                    ids.extend(last);
                    *finish = Some(reason);
                }
                RowEvent::Failed { error, .. } => panic!("{error}"),
            }
        }
    }
    rows
}

#[test]
fn a_step_is_one_pass_and_prompts_share_its_room() {
    let model = ScriptedModel::hashing(100);
    let mut batch = batch(&model, 8);
    let first = batch.join(model.session(), &[1, 2], sampler(1), limits(3)).unwrap();
    assert_eq!(batch.step().unwrap().len(), 1);
    let second = batch.join(model.session_of(8), &[3; 12], sampler(2), limits(2)).unwrap();
    let rows = run(&mut batch);
    // The second prompt is cut as it is alone, not where the first row leaves it room.
    assert_eq!(model.take_passes(), [vec![2], vec![1, 8], vec![1, 4], vec![1]]);
    assert_eq!(rows[&first].0, alone(&model, &[1, 2], &mut sampler(1), 3)[1..]);
    assert_eq!(rows[&second], (alone(&model, &[3; 12], &mut sampler(2), 2), Some(FinishReason::MaxTokens)));
}

#[test]
fn waiting_prompts_divide_a_pass_in_the_order_they_joined() {
    let model = ScriptedModel::hashing(100);
    let mut batch = batch(&model, 8);
    for (seed, length) in [(1, 5), (2, 6), (3, 4)] {
        batch.join(model.session(), &vec![seed; length], sampler(u64::from(seed)), limits(2)).unwrap();
    }
    run(&mut batch);
    // The first pass has room for the first prompt, the second for the second: none is cut to fill a pass.
    assert_eq!(model.take_passes(), [vec![5], vec![1, 6], vec![1, 4], vec![1]]);
}

#[test]
fn a_prompt_is_cut_as_it_is_alone_however_few_rows_a_pass_takes() {
    let model = ScriptedModel::hashing(100);
    let mut alone = model.session_of(8);
    alone.feed(&[1; 20]).unwrap();
    let cut = model.take_passes().concat();
    assert_eq!(cut, [8, 8, 4]);
    for rows_per_pass in [1, 4, 8, 11, 64] {
        let mut batch = batch(&model, rows_per_pass);
        batch.join(model.session(), &[2], sampler(1), limits(9)).unwrap();
        batch.join(model.session_of(8), &[1; 20], sampler(2), limits(1)).unwrap();
        run(&mut batch);
        let shared = model.take_passes();
        let found: Vec<usize> = shared.into_iter().flatten().filter(|rows| *rows > 1).collect();
        assert_eq!(found, cut, "{rows_per_pass} rows in a pass");
    }
}

proptest! {
    #[test]
    fn rows_that_come_and_go_get_what_they_get_alone(
        rows in prop::collection::vec((prop::collection::vec(0u32..257, 1..30), 0usize..12, 0usize..10), 1..10),
        (rows_per_pass, prefill_rows) in (1usize..24, 1usize..24),
    ) {
        let model = ScriptedModel::hashing(64);
        let mut batch = batch(&model, rows_per_pass);
        let mut found: HashMap<RowId, Vec<u32>> = HashMap::new();
        let mut expected = HashMap::new();
        let mut waiting = rows.iter().enumerate();
        let mut next = waiting.next();
        let mut step = 0;
        while next.is_some() || !batch.is_empty() {
            while let Some((number, (prompt, tokens, delay))) = next {
                if step < number + delay && !batch.is_empty() {
                    break;
                }
                let session = model.session_of(prefill_rows);
                let row = batch.join(session, prompt, sampler(number as u64), limits(*tokens)).unwrap();
                expected.insert(row, alone(&model, prompt, &mut sampler(number as u64), *tokens));
                found.insert(row, Vec::new());
                next = waiting.next();
            }
            for (row, event) in batch.step().unwrap() {
                match event {
                    RowEvent::Token(id) => found.get_mut(&row).unwrap().push(id),
                    RowEvent::Finished { last, .. } => found.get_mut(&row).unwrap().extend(last),
                    RowEvent::Failed { error, .. } => panic!("{error}"),
                }
            }
            step += 1;
        }
        prop_assert_eq!(found, expected);
    }
}

#[test]
fn left_padded_rows_get_what_they_get_alone() {
    let model = ScriptedModel::hashing(100);
    let mut batch = batch(&model, 512);
    let prompts = strip_left_padding(&[0, 0, 0, 8, 0, 4, 5, 6, 1, 2, 3, 4], 4, Padding::Id(0)).unwrap();
    for prompt in &prompts {
        batch.join(model.session(), prompt, sampler(5), limits(6)).unwrap();
    }
    let mut rows: Vec<_> = run(&mut batch).into_iter().collect();
    rows.sort_by_key(|(row, _)| *row);
    let ids: Vec<_> = rows.into_iter().map(|(_, (ids, _))| ids).collect();
    let expected: Vec<_> =
        [&[8][..], &[4, 5, 6], &[1, 2, 3, 4]].iter().map(|p| alone(&model, p, &mut sampler(5), 6)).collect();
    assert_eq!(ids, expected);
}

#[test]
fn end_tokens_full_contexts_and_no_tokens_end_a_row() {
    let model = ScriptedModel::hashing(10);
    let ids = alone(&model, &[1, 2], &mut sampler(1), 4);
    let mut batch = batch(&model, 512);
    let end = RowLimits { max_tokens: 100, end_ids: vec![ids[3]] };
    let ended = batch.join(model.session(), &[1, 2], sampler(1), end).unwrap();
    let full = batch.join(model.session(), &[1, 2], sampler(1), limits(100)).unwrap();
    let none = batch.join(model.session(), &[1, 2], sampler(1), limits(0)).unwrap();
    let no_room = batch.join(model.session(), &[1; 10], sampler(1), limits(5)).unwrap();
    let rows = run(&mut batch);
    assert_eq!(rows[&ended], (ids, Some(FinishReason::EndToken)));
    assert_eq!((rows[&full].0.len(), rows[&full].1), (8, Some(FinishReason::ContextFull)));
    assert_eq!(rows[&none], (vec![], Some(FinishReason::MaxTokens)));
    assert_eq!(rows[&no_room], (vec![], Some(FinishReason::ContextFull)));
    assert_eq!(model.take_passes()[4], [2, 2], "rows without a sample to come take no part in a pass");
}

#[test]
fn a_row_can_leave_and_its_session_goes_on() {
    let model = ScriptedModel::hashing(100);
    let mut batch = batch(&model, 4);
    let row = batch.join(model.session(), &[1, 2, 3], sampler(1), limits(50)).unwrap();
    let other = batch.join(model.session_of(4), &[4; 9], sampler(2), limits(2)).unwrap();
    batch.step().unwrap();
    batch.step().unwrap();
    let mut session = batch.leave(row).unwrap();
    assert!(matches!(batch.leave(row), Err(Error::UnknownRow { row: 0 })));
    let continued: Vec<u32> = (0..3).map(|_| session.step(&mut sampler(1)).unwrap()).collect();
    assert_eq!(continued, alone(&model, &[1, 2, 3], &mut sampler(1), 5)[2..]);
    assert_eq!(run(&mut batch)[&other].0, alone(&model, &[4; 9], &mut sampler(2), 2));
    // A session that was fed elsewhere joins without a further prompt.
    session.logits().unwrap();
    let expected = session.fork().step(&mut sampler(1)).unwrap();
    model.take_passes();
    let row = batch.join(session, &[], sampler(1), limits(1)).unwrap();
    assert_eq!(run(&mut batch)[&row].0, [expected]);
    assert!(model.take_passes().is_empty(), "its logits were there");
}

#[test]
fn a_failed_pass_can_be_taken_again() {
    let model = ScriptedModel::hashing(100);
    let expected = [alone(&model, &[1, 2, 3], &mut sampler(1), 3), alone(&model, &[4, 5], &mut sampler(2), 3)];
    let mut batch = batch(&model, 512);
    let first = batch.join(model.session(), &[1, 2, 3], sampler(1), limits(3)).unwrap();
    let second = batch.join(model.session(), &[4, 5], sampler(2), limits(3)).unwrap();
    model.take_passes();
    model.failing.lock().unwrap().extend([0, 2]);
    assert!(matches!(batch.step(), Err(Error::Model { .. })));
    let mut rows: HashMap<RowId, Vec<u32>> = HashMap::new();
    while !batch.is_empty() {
        for (row, event) in batch.step().unwrap_or_default() {
            match event {
                RowEvent::Token(id) => rows.entry(row).or_default().push(id),
                RowEvent::Finished { last, .. } => rows.entry(row).or_default().extend(last),
                RowEvent::Failed { error, .. } => panic!("{error}"),
            }
        }
    }
    assert_eq!([&rows[&first], &rows[&second]], [&expected[0], &expected[1]]);
}

#[test]
fn one_rows_failure_is_its_own() {
    let model = Arc::new(ScriptedModel { context: 100, poisonous: Some(200), ..Default::default() });
    let mut batch = batch(&model, 512);
    let healthy = batch.join(model.session(), &[1, 2], sampler(1), limits(2)).unwrap();
    let poisoned = batch.join(model.session(), &[1, 200], sampler(1), limits(2)).unwrap();
    let events = batch.step().unwrap();
    assert!(matches!(&events[0], (row, RowEvent::Token(_)) if *row == healthy));
    match &events[1] {
        (row, RowEvent::Failed { error: Error::NotFinite { .. }, session }) => {
            assert_eq!((*row, session.ids()), (poisoned, &[1, 200][..]));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(batch.len(), 1);
}

#[test]
fn what_cannot_join_is_refused() {
    let (model, other) = (ScriptedModel::hashing(10), ScriptedModel::hashing(10));
    let mut batch = batch(&model, 512);
    let mut join = |session, prompt: &[u32]| batch.join(session, prompt, sampler(1), limits(5)).unwrap_err();
    assert!(matches!(join(other.session(), &[1]), Error::OtherModel));
    assert!(matches!(join(model.session(), &[]), Error::EmptySession));
    assert!(matches!(join(model.session(), &[257]), Error::UnknownId { .. }));
    assert!(matches!(join(model.session(), &[1; 11]), Error::PromptTooLong { prompt: 11, held: 0, context: 10 }));
    assert!(BatchDecoder::new(model.clone(), Device::cpu(1), 0).is_err());
}
