//! Steps that a device makes ahead: sessions, answers and batches give what they give where the host makes every step.

mod scripted;

use std::{collections::HashMap, fmt::Debug, ops::ControlFlow, sync::Arc};

use ironloom_decode::{
    BatchDecoder, Cache, Error, FeedProgress, FinishReason, GenerateOptions, Result, RowEvent, RowId, RowLimits,
    Sampler, SamplerOptions, Session, SessionOptions, generate,
};
use ironloom_tensor::Device;
use proptest::prelude::*;
use scripted::{ScriptedModel, alone, bytes_of, sampler, steps::Call, tokenizer};

type Scripted = Arc<ScriptedModel>;

/// A model whose host makes every step, and the same model with a device.
fn pair(context: usize) -> (Scripted, Scripted) {
    let host = ScriptedModel::hashing(context);
    let device = host.on_device();
    (host, device)
}

/// The samplers that tests choose from: largest logits, those with a penalty, and two seeds.
fn sampler_of(number: usize) -> Sampler {
    let penalized = SamplerOptions { repetition_penalty: 1.3, ..Sampler::greedy().options().clone() };
    match number {
        0 => Sampler::greedy(),
        1 => Sampler::new(penalized).unwrap(),
        seed => sampler(seed as u64),
    }
}

fn go(_: FeedProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A result that can be compared.
fn told<T>(result: Result<T>) -> std::result::Result<T, String> {
    result.map_err(|error| error.to_string())
}

fn steps(session: &mut Session<ScriptedModel>, sampler: &mut Sampler, count: usize) -> Vec<u32> {
    (0..count).map(|_| session.step(sampler).unwrap()).collect()
}

/// The logits after all ids of a session are the model's.
fn expect_logits(session: &mut Session<ScriptedModel>, model: &Scripted) {
    let held = session.ids().to_vec();
    assert_eq!(session.logits().unwrap(), model.logits_after(&held));
}

// ---- Sessions ---------------------------------------------------------------------------------------------------------

#[test]
fn every_sampler_gives_the_hosts_ids_without_a_pass_of_the_host() {
    for number in 0..4 {
        let (host, device) = pair(100);
        let expected = alone(&host, &[1, 2, 3], &mut sampler_of(number), 30);
        assert_eq!(alone(&device, &[1, 2, 3], &mut sampler_of(number), 30), expected, "sampler {number}");
        assert_eq!(device.take_passes(), [[3]], "the prompt alone");
        let log = device.log();
        assert_eq!((&log.captures[..], log.count(Call::Begin)), (&[(1, number != 0)][..], 1));
        // The first id comes from the prompt's logits; while the last one is read, another step is made.
        assert_eq!(log.count(Call::Launch), 30);
    }
}

#[test]
fn options_that_change_take_hold_with_the_next_id() {
    let (host, device) = pair(200);
    let (mut found, mut expected) = (device.session(), host.session());
    found.feed(&[1, 2]).unwrap();
    expected.feed(&[1, 2]).unwrap();
    for number in [2, 2, 2, 3, 3, 2, 0, 0, 1, 0, 3] {
        let id = found.step(&mut sampler_of(number)).unwrap();
        assert_eq!(id, expected.step(&mut sampler_of(number)).unwrap());
    }
    // What was captured serves other options of its kind.
    let kinds: Vec<bool> = device.log().captures.iter().map(|(_, sampled)| *sampled).collect();
    assert_eq!(kinds, [true, false, true, false, true]);
    assert_eq!(device.take_passes(), [[2]]);
}

#[test]
fn what_ran_ahead_is_forgotten_and_what_was_chosen_is_kept() {
    let (host, device) = pair(100);
    let mut session = device.session();
    session.feed(&[1, 2, 3]).unwrap();
    let first = steps(&mut session, &mut sampler(1), 6);
    let held = [&[1, 2, 3][..], &first].concat();
    assert_eq!(session.cache().positions(), held.len(), "no position past the ids is counted");

    // A fork copies what is in flight as far as it is known, and both go on.
    let mut fork = session.fork();
    assert_eq!(fork.logits().unwrap(), host.logits_after(&held));
    assert_eq!(steps(&mut fork, &mut sampler(1), 3), alone(&host, &held, &mut sampler(1), 3));
    device.take_passes();

    // The last id has been through a step: a turn that is fed does not compute it again.
    session.feed(&[7, 8]).unwrap();
    assert_eq!(device.take_passes(), [[2]]);
    let held = [&held[..], &[7, 8]].concat();
    assert_eq!(session.logits().unwrap(), host.logits_after(&held));
    assert_eq!(steps(&mut session, &mut sampler(1), 5), alone(&host, &held, &mut sampler(1), 5));

    // Logits that are asked for on the way, and a shorter session.
    let held = session.ids().to_vec();
    assert_eq!(session.logits().unwrap(), host.logits_after(&held));
    assert_eq!(steps(&mut session, &mut sampler(1), 3), alone(&host, &held, &mut sampler(1), 3));
    session.truncate(4).unwrap();
    assert_eq!(steps(&mut session, &mut sampler(9), 4), alone(&host, &held[..4], &mut sampler(9), 4));
    let held = session.ids().to_vec();
    session.truncate(held.len()).unwrap();
    assert_eq!(steps(&mut session, &mut sampler(9), 4), alone(&host, &held, &mut sampler(9), 4));
}

#[test]
fn steps_end_where_the_context_does() {
    for (context, model_context) in [(10, 10), (10, 100), (4, 4), (5, 100)] {
        let (host, device) = pair(model_context);
        let options = SessionOptions { context: Some(context), ..Default::default() };
        let mut session = Session::new(device.clone(), Device::cpu(1), options).unwrap();
        session.feed(&[1, 2, 3]).unwrap();
        let found = steps(&mut session, &mut sampler(1), context - 3);
        assert_eq!(found, alone(&host, &[1, 2, 3], &mut sampler(1), context - 3));
        let full = session.step(&mut sampler(1)).unwrap_err();
        assert!(matches!(full, Error::ContextFull { context: found } if found == context));
        assert!(session.cache().positions() <= context);
        expect_logits(&mut session, &host);
        session.truncate(context - 1).unwrap();
        assert_eq!(session.step(&mut sampler(1)).unwrap(), found[found.len() - 1]);
    }
}

#[test]
fn logits_that_none_can_be_chosen_of_are_the_hosts_to_tell() {
    let expected = alone(&ScriptedModel::hashing(100), &[1, 2, 3], &mut sampler(1), 12);
    for at in 0..8 {
        // Whatever was chosen first at this place is poison.
        let poisonous = expected[at];
        if expected[..at].contains(&poisonous) {
            continue;
        }
        let host = Arc::new(ScriptedModel { context: 100, poisonous: Some(poisonous), ..Default::default() });
        let device = host.on_device();
        let mut session = device.session();
        session.feed(&[1, 2, 3]).unwrap();
        assert_eq!(steps(&mut session, &mut sampler(1), at + 1), expected[..=at]);
        for _ in 0..2 {
            assert!(matches!(session.step(&mut sampler(1)), Err(Error::NotFinite { .. })), "place {at}");
            assert_eq!(session.len(), 3 + at + 1);
        }
        session.feed(&[4]).unwrap();
        let held = session.ids().to_vec();
        assert_eq!(steps(&mut session, &mut sampler(2), 4), alone(&host, &held, &mut sampler(2), 4));
    }
}

#[test]
fn a_device_that_fails_leaves_the_session_as_it_was() {
    for call in [Call::Capture, Call::Begin, Call::Launch, Call::Next] {
        for after in 0..4 {
            let (host, device) = pair(100);
            let expected = alone(&host, &[1, 2, 3], &mut sampler(1), 10);
            let mut session = device.session();
            session.feed(&[1, 2, 3]).unwrap();
            let mut found = steps(&mut session, &mut sampler(1), 1 + after);
            device.log().fail_next(call);
            while found.len() < 6 {
                match session.step(&mut sampler(1)) {
                    Ok(id) => found.push(id),
                    // The next turn may come at once: nothing of a failed step counts.
                    Err(Error::Model { .. }) => {
                        let mut fork = session.fork();
                        fork.feed(&[9]).unwrap();
                        expect_logits(&mut fork, &host);
                    }
                    Err(error) => panic!("{error}"),
                }
                assert_eq!(session.len(), 3 + found.len());
            }
            assert_eq!(found, expected[..6], "{call:?} after {after}");
        }
    }
}

#[test]
fn a_device_without_room_for_steps_leaves_every_id_to_the_host() {
    let (host, device) = pair(100);
    device.log().is_full = true;
    assert_eq!(
        alone(&device, &[1, 2, 3], &mut sampler(1), 10),
        alone(&host, &[1, 2, 3], &mut sampler(1), 10),
        "a session"
    );
    let asked = [Call::Capture, Call::Launch].map(|call| device.log().count(call));
    assert_eq!(asked, [1, 0], "it is asked once");

    // Steps that ran, and no room for those of another kind.
    device.log().is_full = false;
    let mut session = device.session();
    session.feed(&[1, 2, 3]).unwrap();
    let held = [&[1, 2, 3][..], &steps(&mut session, &mut sampler(1), 4)].concat();
    device.log().is_full = true;
    assert_eq!(steps(&mut session, &mut sampler_of(0), 5), alone(&host, &held, &mut sampler_of(0), 5));

    let mut batch = batch(&device);
    let captures = device.log().count(Call::Capture);
    let prompts: [&[u32]; 2] = [&[1, 2], &[3, 4, 5]];
    let joined = prompts.map(|prompt| batch.join(device.session(), prompt, sampler(2), limits(8)).unwrap());
    let mut rows = HashMap::new();
    while !batch.is_empty() {
        take(&mut rows, batch.step().unwrap());
    }
    for (prompt, row) in prompts.iter().zip(joined) {
        assert_eq!(rows[&row].ids, alone(&host, prompt, &mut sampler(2), 8), "a batch");
    }
    assert_eq!(device.log().count(Call::Capture), captures + 1);
}

#[test]
fn rows_that_fail_to_begin_are_begun_again() {
    let (host, device) = pair(100);
    let mut session = device.session();
    session.feed(&[1, 2, 3]).unwrap();
    let held = [&[1, 2, 3][..], &steps(&mut session, &mut sampler(1), 4)].concat();
    device.log().fail_next(Call::Begin);
    // Other options begin anew, in vain; the old ones must not go on with what is forgotten.
    assert!(matches!(session.step(&mut sampler(2)), Err(Error::Model { .. })));
    assert_eq!(steps(&mut session, &mut sampler(1), 4), alone(&host, &held, &mut sampler(1), 4));
}

/// One thing done to a session.
#[derive(Clone, Debug)]
enum Action {
    Feed(Vec<u32>),
    Step(usize, usize),
    Truncate(usize),
    Fork,
    ForkAside(usize),
    Logits,
    ReplaceWith(Vec<u32>),
    FailingFeed(Vec<u32>),
    Fail(Call),
}

fn action() -> impl Strategy<Value = Action> {
    let ids = || prop::collection::vec(0u32..5, 0..6);
    let call = prop_oneof![Just(Call::Capture), Just(Call::Begin), Just(Call::Launch), Just(Call::Next)];
    prop_oneof![
        3 => ids().prop_map(Action::Feed),
        8 => (0usize..4, 1usize..6).prop_map(|(sampler, count)| Action::Step(sampler, count)),
        2 => (0usize..40).prop_map(Action::Truncate),
        1 => Just(Action::Fork),
        1 => (0usize..4).prop_map(Action::ForkAside),
        1 => Just(Action::Logits),
        1 => ids().prop_map(Action::ReplaceWith),
        1 => ids().prop_map(Action::FailingFeed),
        2 => call.prop_map(Action::Fail),
    ]
}

/// A step, taken again while the device fails.
fn step_again(session: &mut Session<ScriptedModel>, sampler: &mut Sampler) -> std::result::Result<u32, String> {
    loop {
        match session.step(sampler) {
            Err(Error::Model { .. }) => {}
            result => return told(result),
        }
    }
}

/// What both sessions say to the same request.
fn same<T: PartialEq + Debug>(found: Result<T>, expected: Result<T>) {
    assert_eq!(told(found), told(expected));
}

proptest! {
    #[test]
    fn whatever_is_done_meanwhile_a_session_is_what_it_is_on_the_host(actions in prop::collection::vec(action(), 1..40)) {
        let (host, device) = pair(60);
        let (mut found, mut expected) = (device.session(), host.session());
        for action in actions {
            match action {
                Action::Feed(ids) => same(found.feed(&ids), expected.feed(&ids)),
                Action::Step(number, count) => {
                    for _ in 0..count {
                        let id = step_again(&mut found, &mut sampler_of(number));
                        prop_assert_eq!(id, told(expected.step(&mut sampler_of(number))));
                    }
                }
                Action::Truncate(length) => same(found.truncate(length), expected.truncate(length)),
                Action::Fork => (found, expected) = (found.fork(), expected.fork()),
                Action::ForkAside(number) => {
                    let id = step_again(&mut found.fork(), &mut sampler_of(number));
                    prop_assert_eq!(id, told(expected.fork().step(&mut sampler_of(number))));
                }
                Action::Logits => same(found.logits().map(<[f32]>::to_vec), expected.logits().map(<[f32]>::to_vec)),
                Action::ReplaceWith(ids) => same(found.replace_with(&ids, &mut go), expected.replace_with(&ids, &mut go)),
                Action::FailingFeed(ids) => {
                    for (model, session) in [(&device, &mut found), (&host, &mut expected)] {
                        let next = model.passes.lock().unwrap().len();
                        model.failing.lock().unwrap().insert(next);
                        let _ = session.feed(&ids);
                        model.failing.lock().unwrap().clear();
                    }
                }
                Action::Fail(call) => device.log().fail_next(call),
            }
            prop_assert_eq!(found.ids(), expected.ids());
            prop_assert!(found.cache().positions() <= found.len(), "no position past the ids is counted");
        }
    }
}

// ---- Answers ----------------------------------------------------------------------------------------------------------

#[test]
fn answers_end_as_they_do_on_the_host() {
    let tokenizer = tokenizer();
    let prompt = bytes_of(&tokenizer, "Q: ");
    let cases: [(usize, &[&str]); 6] =
        [(100, &[]), (0, &[]), (1, &[]), (7, &["zz"]), (100, &["\nUser:"]), (100, &["ron"])];
    for (max_tokens, stop) in cases {
        let options = GenerateOptions { max_tokens, stop: stop.iter().map(ToString::to_string).collect() };
        let host = ScriptedModel::answering(&prompt, &bytes_of(&tokenizer, "Iron.\nUse\nUser: b"), 1000);
        let device = host.on_device();
        let answer = |model: &Scripted| {
            let mut session = model.session();
            session.feed(&prompt).unwrap();
            let mut pieces = Vec::new();
            let mut on_text = |piece: &str| {
                pieces.push(piece.to_string());
                ControlFlow::Continue(())
            };
            let answer = generate(&mut session, &tokenizer, &mut Sampler::greedy(), &options, &mut on_text).unwrap();
            // The next turn goes on behind the answer.
            let held = [&prompt[..], &answer.ids, &[5, 6]].concat();
            session.feed(&[5, 6]).unwrap();
            assert_eq!(session.ids(), held);
            assert_eq!(session.logits().unwrap(), model.logits_after(&held));
            (answer.ids, answer.text, answer.finish, pieces)
        };
        assert_eq!(answer(&device), answer(&host), "{options:?}");
        assert_eq!(device.log().count(Call::Launch) > 0, max_tokens > 1);
    }
}

#[test]
fn an_answer_fills_the_context_and_no_more() {
    let tokenizer = tokenizer();
    let (host, device) = pair(20);
    let options = GenerateOptions { max_tokens: 100, ..Default::default() };
    let answer = |model: &Scripted| {
        let mut session = model.session();
        session.feed(&[1, 2, 3]).unwrap();
        let mut on_text = |_: &str| ControlFlow::Continue(());
        let answer = generate(&mut session, &tokenizer, &mut sampler(2), &options, &mut on_text).unwrap();
        (answer.ids, answer.finish)
    };
    let found = answer(&device);
    assert_eq!(found, answer(&host));
    assert_eq!((found.0.len(), found.1), (17, FinishReason::ContextFull));
}

// ---- Batches ----------------------------------------------------------------------------------------------------------

fn batch(model: &Scripted) -> BatchDecoder<ScriptedModel> {
    BatchDecoder::new(model.clone(), Device::cpu(1), 16).unwrap()
}

fn limits(max_tokens: usize) -> RowLimits {
    RowLimits { max_tokens, ..Default::default() }
}

/// What a row gave: its ids, why it ended, and its session after it.
#[derive(Default)]
struct Row {
    ids: Vec<u32>,
    finish: Option<FinishReason>,
    session: Option<Session<ScriptedModel>>,
}

fn take(rows: &mut HashMap<RowId, Row>, events: Vec<(RowId, RowEvent<ScriptedModel>)>) {
    for (row, event) in events {
        let row = rows.entry(row).or_default();
        match event {
            RowEvent::Token(id) => row.ids.push(id),
            RowEvent::Finished { last, reason, session } => {
                row.ids.extend(last);
                (row.finish, row.session) = (Some(reason), Some(session));
            }
            RowEvent::Failed { error, .. } => panic!("{error}"),
        }
    }
}

#[test]
fn rows_that_answer_take_steps_of_the_device_alone() {
    let (host, device) = pair(100);
    let mut batch = batch(&device);
    let prompts: [&[u32]; 3] = [&[1, 2], &[3, 4, 5], &[6]];
    let joined: Vec<RowId> =
        (0..3).map(|i| batch.join(device.session(), prompts[i], sampler_of(i), limits(10 + 5 * i)).unwrap()).collect();
    let mut rows = HashMap::new();
    while !batch.is_empty() {
        take(&mut rows, batch.step().unwrap());
    }
    for (i, id) in joined.iter().enumerate() {
        let row = rows.remove(id).unwrap();
        assert_eq!(row.ids, alone(&host, prompts[i], &mut sampler_of(i), 10 + 5 * i));
        let mut session = row.session.unwrap();
        expect_logits(&mut session, &host);
        let held = session.ids().to_vec();
        assert_eq!(steps(&mut session, &mut sampler(7), 4), alone(&host, &held, &mut sampler(7), 4));
    }
    assert_eq!(device.take_passes()[0], [2, 3, 1]);
    assert_eq!(device.log().captures[0], (4, true), "room for a power of two");
}

#[test]
fn a_row_whose_logits_are_known_takes_its_id_from_them() {
    let (host, device) = pair(100);
    let mut batch = batch(&device);
    let first = batch.join(device.session(), &[1, 2], sampler(1), limits(8)).unwrap();
    let mut rows = HashMap::new();
    for _ in 0..3 {
        take(&mut rows, batch.step().unwrap());
    }
    let mut session = device.session();
    session.feed(&[4, 5, 6]).unwrap();
    device.take_passes();
    let second = batch.join(session, &[], sampler(2), limits(6)).unwrap();
    while !batch.is_empty() {
        take(&mut rows, batch.step().unwrap());
    }
    assert_eq!(rows[&first].ids, alone(&host, &[1, 2], &mut sampler(1), 8));
    assert_eq!(rows[&second].ids, alone(&host, &[4, 5, 6], &mut sampler(2), 6));
    assert_eq!(device.take_passes(), [[1]], "one pass of the first row, beside what the second knew");
}

#[test]
fn a_prompt_that_waits_does_not_hold_back_a_row_whose_logits_are_known() {
    let (_, device) = pair(100);
    let mut batch = BatchDecoder::new(device.clone(), Device::cpu(1), 1).unwrap();
    let mut session = device.session();
    session.feed(&[4, 5, 6]).unwrap();
    let answering = batch.join(session, &[], sampler(2), limits(20)).unwrap();
    batch.join(device.session_of(1), &[7; 10], sampler(1), limits(20)).unwrap();
    for _ in 0..12 {
        let events = batch.step().unwrap();
        assert!(events.iter().any(|(row, _)| *row == answering));
    }
}

#[test]
fn rows_end_by_end_ids_and_by_the_context() {
    let (host, device) = pair(12);
    let ids = alone(&host, &[1, 2, 3], &mut sampler(1), 9);
    let mut batch = batch(&device);
    let full = batch.join(device.session(), &[1, 2, 3], sampler(1), limits(100)).unwrap();
    let ends = RowLimits { max_tokens: 100, end_ids: vec![ids[4]] };
    let ended = batch.join(device.session(), &[1, 2, 3], sampler(1), ends).unwrap();
    let none = batch.join(device.session(), &[1, 2, 3], sampler(1), limits(0)).unwrap();
    let mut rows = HashMap::new();
    while !batch.is_empty() {
        take(&mut rows, batch.step().unwrap());
    }
    let end = ids.iter().position(|id| *id == ids[4]).unwrap();
    assert_eq!((&rows[&full].ids[..], rows[&full].finish), (&ids[..], Some(FinishReason::ContextFull)));
    assert_eq!((&rows[&ended].ids[..], rows[&ended].finish), (&ids[..=end], Some(FinishReason::EndToken)));
    assert_eq!((rows[&none].ids.len(), rows[&none].finish), (0, Some(FinishReason::MaxTokens)));
    assert!(device.log().count(Call::Launch) > 0);
}

#[test]
fn one_rows_failure_is_its_own() {
    let expected = alone(&ScriptedModel::hashing(100), &[1, 2], &mut sampler(1), 12);
    let healthy = alone(&ScriptedModel::hashing(100), &[5], &mut sampler(2), 12);
    assert!(!healthy.contains(&expected[5]) && !expected[..5].contains(&expected[5]), "a poison of one row alone");
    let host = Arc::new(ScriptedModel { context: 100, poisonous: Some(expected[5]), ..Default::default() });
    let device = host.on_device();
    let mut batch = batch(&device);
    let poisoned = batch.join(device.session(), &[1, 2], sampler(1), limits(12)).unwrap();
    let other = batch.join(device.session(), &[5], sampler(2), limits(12)).unwrap();
    let (mut ids, mut failed) = (HashMap::from([(poisoned, Vec::new()), (other, Vec::new())]), false);
    while !batch.is_empty() {
        for (row, event) in batch.step().unwrap() {
            match event {
                RowEvent::Token(id) => ids.get_mut(&row).unwrap().push(id),
                RowEvent::Finished { last, .. } => ids.get_mut(&row).unwrap().extend(last),
                RowEvent::Failed { error: Error::NotFinite { .. }, session } => {
                    assert_eq!((row, session.ids()), (poisoned, &[&[1, 2], &expected[..6]].concat()[..]));
                    failed = true;
                }
                RowEvent::Failed { error, .. } => panic!("{error}"),
            }
        }
    }
    assert!(failed);
    assert_eq!((&ids[&poisoned], &ids[&other]), (&expected[..6].to_vec(), &healthy));
}

#[test]
fn more_rows_than_a_step_takes_go_over_the_host_until_some_have_left() {
    let (host, device) = pair(100);
    let mut batch = batch(&device);
    let joined: Vec<RowId> = (0..70u32)
        .map(|i| batch.join(device.session(), &[i], sampler(u64::from(i)), limits(6 + i as usize % 9)).unwrap())
        .collect();
    let mut rows = HashMap::new();
    while !batch.is_empty() {
        take(&mut rows, batch.step().unwrap());
        assert!(batch.len() <= 64 || device.log().captures.is_empty());
    }
    assert!(device.log().count(Call::Launch) > 0);
    for (i, row) in joined.iter().enumerate() {
        assert_eq!(rows[row].ids, alone(&host, &[i as u32], &mut sampler(i as u64), 6 + i % 9));
    }
}

/// A row of a plan: its prompt, its sampler, the ids it may sample, the step it joins at and the one it leaves at.
type Planned = (Vec<u32>, usize, usize, usize, Option<usize>);

fn planned() -> impl Strategy<Value = Planned> {
    let prompt = prop::collection::vec(0u32..257, 1..20);
    (prompt, 0usize..4, 0usize..14, 0usize..20, prop::option::of(1usize..25))
}

proptest! {
    #[test]
    fn rows_that_come_and_go_get_what_they_get_alone(
        plan in prop::collection::vec(planned(), 1..8),
        faults in prop::collection::vec((0usize..30, 0usize..4), 0..4),
    ) {
        let (host, device) = pair(64);
        let mut batch = batch(&device);
        let (mut rows, mut joined) = (HashMap::new(), vec![None; plan.len()]);
        for step in 0..60 {
            for (at, call) in &faults {
                if *at == step {
                    device.log().fail_next([Call::Capture, Call::Begin, Call::Launch, Call::Next][*call]);
                }
            }
            for (place, (prompt, number, tokens, joins, leaves)) in plan.iter().enumerate() {
                if *joins == step {
                    let row = batch.join(device.session(), prompt, sampler_of(*number), limits(*tokens)).unwrap();
                    joined[place] = Some(row);
                    rows.insert(row, Row::default());
                }
                if let (Some(row), true) = (joined[place], *leaves == Some(step))
                    && let Ok(session) = batch.leave(row)
                {
                    rows.get_mut(&row).unwrap().session = Some(session);
                }
            }
            match batch.step() {
                Ok(events) => take(&mut rows, events),
                Err(error) => prop_assert!(matches!(error, Error::Model { .. }), "{}", error),
            }
        }
        prop_assert!(batch.is_empty());
        device.log().fail_no_more();
        for ((prompt, number, tokens, ..), row) in plan.iter().zip(joined) {
            let row = rows.remove(&row.unwrap()).unwrap();
            let expected = alone(&host, prompt, &mut sampler_of(*number), *tokens);
            prop_assert_eq!(&row.ids[..], &expected[..row.ids.len()]);
            prop_assert!(row.finish.is_none() || row.ids.len() == *tokens);
            // Whether it ended or left, its session goes on as one that was alone.
            let mut session = row.session.unwrap();
            let held = [&prompt[..], &row.ids].concat();
            prop_assert_eq!(session.ids(), &held[..]);
            prop_assert!(session.cache().positions() <= held.len());
            prop_assert_eq!(steps(&mut session, &mut sampler(3), 3), alone(&host, &held, &mut sampler(3), 3));
        }
    }
}
