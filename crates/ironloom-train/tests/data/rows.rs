//! Rows and batches: every token once an epoch, in an order that the seed decides, and the same ones from a saved place on.

use super::*;

/// Fails unless the batch's documents are parts of numbered documents with the targets that follow in them.
fn check_numbered(batch: &Batch, lengths: &[usize]) {
    assert_eq!(batch.documents.iter().sum::<usize>(), batch.ids.len());
    assert_eq!(batch.targets.len(), batch.ids.len());
    for range in batch.ranges() {
        assert!(!range.is_empty());
        let first = batch.ids[range.start] as usize;
        for (offset, position) in range.enumerate() {
            let id = first + offset;
            assert_eq!(batch.ids[position] as usize, id, "a document is consecutive tokens of one document");
            let is_last = id % 1000 + 1 == lengths[id / 1000];
            assert_eq!(batch.targets[position], if is_last { IGNORED } else { id as i64 + 1 });
        }
    }
}

#[test]
fn continuous_rows_are_full_and_hold_each_token_once_an_epoch() {
    let total: usize = LENGTHS.iter().sum();
    let length = 16;
    let rows = total / length;
    let mut loader = Loader::new(one(numbered(&LENGTHS)), &options(length, 1, Packing::Continuous)).unwrap();
    assert_eq!(loader.rows_in_epoch(), [rows]);
    let mut starts = std::collections::HashSet::new();
    for epoch in 0..20 {
        let mut seen = HashMap::new();
        for row in 0..rows {
            let batch = loader.next_batch().unwrap();
            assert_eq!(batch.ids.len(), length);
            check_numbered(&batch, &LENGTHS);
            batch.ids.iter().for_each(|&id| *seen.entry(id).or_insert(0) += 1);
            if row == 0 {
                starts.insert(batch.ids[0]);
            }
            assert_eq!(loader.cursor().sources[0].next.epoch, epoch);
        }
        assert_eq!(seen.len(), rows * length, "no token twice in an epoch");
    }
    assert!(starts.len() > 10, "epochs cut the stream at different places: {starts:?}");
}

#[test]
fn packed_rows_hold_whole_documents_once_an_epoch() {
    let lengths: Vec<usize> = (0..500).map(|d| 2 + d * 37 % 60).collect();
    let mut loader = Loader::new(one(numbered(&lengths)), &options(64, 1, Packing::Documents)).unwrap();
    let rows = loader.rows_in_epoch()[0];
    let mut orders = Vec::new();
    for _ in 0..3 {
        let mut found = Vec::new();
        for _ in 0..rows {
            let batch = loader.next_batch().unwrap();
            check_numbered(&batch, &lengths);
            assert!(batch.ids.len() <= 64);
            for range in batch.ranges() {
                let document = batch.ids[range.start] as usize / 1000;
                assert_eq!(range.len(), lengths[document]);
                found.push(document);
            }
        }
        let mut sorted = found.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..500));
        orders.push(found);
    }
    assert!(orders[0] != orders[1] && orders[1] != orders[2]);
    let filled = lengths.iter().sum::<usize>() as f64 / (rows * 64) as f64;
    assert!(filled > 0.97, "rows are {filled} full");
}

#[test]
fn a_document_longer_than_a_row_is_split_or_cut() {
    let lengths = [25, 3];
    let rows = |overlong| -> Vec<usize> {
        let options = LoaderOptions { overlong, ..options(10, 1, Packing::Documents) };
        let batches: Result<Vec<Batch>, Error> = OnePass::new(&numbered(&lengths), &options).unwrap().collect();
        let batches = batches.unwrap();
        batches.iter().for_each(|batch| check_numbered(batch, &lengths));
        batches.iter().flat_map(|batch| batch.documents.clone()).collect()
    };
    assert_eq!(rows(Overlong::Split), [10, 10, 5, 3]);
    assert_eq!(rows(Overlong::Cut), [10, 3]);
    let cut = |length| numbered(&lengths).cut_to(length);
    assert_eq!(cut(10), CutDocuments { shortened: 1, left_out: 0 });
    assert_eq!(cut(25), CutDocuments::default());
    let mut documents = DocumentsBuilder::new("answers", 100);
    for question in [3, 12] {
        let learned = Some((0..20).map(|token| token >= question).collect());
        let place = Place { path: "answers".into(), line: None };
        documents.push(&Document { ids: vec![7; 20], learned }, &place).unwrap();
    }
    let cut = documents.finish().unwrap().cut_to(10);
    assert_eq!(cut, CutDocuments { shortened: 1, left_out: 1 }, "an answer that begins past the row is not learned");
}

#[test]
fn one_pass_counts_every_prediction_once() {
    let documents = numbered(&LENGTHS);
    for packing in [Packing::Continuous, Packing::Documents] {
        for rows in [1, 4] {
            let batches: Result<Vec<Batch>, Error> =
                OnePass::new(&documents, &options(16, rows, packing)).unwrap().collect();
            let batches = batches.unwrap();
            batches.iter().for_each(|batch| check_numbered(batch, &LENGTHS));
            assert_eq!(counted(&batches), documents.counted(), "{packing:?}");
            let mut ids: Vec<u32> = batches.iter().flat_map(|batch| batch.ids.clone()).collect();
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len(), batches.iter().map(|batch| batch.ids.len()).sum::<usize>());
        }
    }
    assert_eq!(documents.counted(), LENGTHS.iter().sum::<usize>() - LENGTHS.len());
}

#[test]
fn a_saved_cursor_goes_on_with_the_same_batches() {
    for packing in [Packing::Continuous, Packing::Documents] {
        let many: Vec<usize> = (0..2500).map(|d| 1 + d * 7 % 11).collect();
        let shares = || {
            vec![
                Share { documents: numbered(&LENGTHS), weight: 0.3 },
                Share { documents: numbered(&many[..900]), weight: 0.7 },
                Share { documents: numbered(&many), weight: 1.1 },
            ]
        };
        let options = options(16, 6, packing);
        let mut straight = Loader::new(shares(), &options).unwrap();
        let batches: Vec<Batch> = (0..50).map(|_| straight.next_batch().unwrap()).collect();
        assert!(straight.cursor().sources[0].next.epoch > 1, "the run goes through epochs");

        for stop in [0, 1, 20, 37] {
            let mut first = Loader::new(shares(), &options).unwrap();
            let start: Vec<Batch> = (0..stop).map(|_| first.next_batch().unwrap()).collect();
            let saved = serde_json::to_string(&first.cursor()).unwrap();
            drop(first);
            let mut resumed = Loader::new(shares(), &options).unwrap();
            resumed.next_batch().unwrap();
            resumed.restore(&serde_json::from_str::<Cursor>(&saved).unwrap()).unwrap();
            let rest = (stop..50).map(|_| resumed.next_batch().unwrap());
            assert!(start.into_iter().chain(rest).eq(batches.iter().cloned()), "{packing:?}, stopped after {stop}");
            assert_eq!(resumed.cursor(), straight.cursor());
        }
    }
}

#[test]
fn a_cursor_of_other_data_or_options_is_refused_by_name() {
    let base = options(16, 1, Packing::Continuous);
    let cursor = Loader::new(one(numbered(&LENGTHS)), &base).unwrap().cursor();
    let refusal = |shares: Vec<Share>, options: LoaderOptions| {
        data_error(Loader::new(shares, &options).unwrap().restore(&cursor)).to_string()
    };
    let same = || one(numbered(&LENGTHS));
    for (error, word) in [
        (refusal(same(), LoaderOptions { seed: 8, ..base.clone() }), "seed = 7, and it is 8"),
        (refusal(same(), LoaderOptions { sequence_length: 32, ..base.clone() }), "sequence_length = 16"),
        (refusal(same(), LoaderOptions { packing: Packing::Documents, ..base.clone() }), "packing = Continuous"),
        (refusal(same(), LoaderOptions { overlong: Overlong::Cut, ..base.clone() }), "overlong = Split"),
        (refusal(same(), LoaderOptions { order: Order::Stored, ..base.clone() }), "order = Shuffled"),
        (refusal(one(numbered(&LENGTHS[1..])), base.clone()), "the contents of numbered"),
        (refusal(vec![Share { documents: numbered(&LENGTHS), weight: 2.0 }], base.clone()), "the weight of numbered"),
        (refusal([same(), same()].concat(), base.clone()), "the number of sources = 1, and it is 2"),
    ] {
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn a_cursor_that_someone_edited_is_no_panic() {
    for packing in [Packing::Continuous, Packing::Documents] {
        let mut loader = Loader::new(one(numbered(&LENGTHS)), &options(16, 1, packing)).unwrap();
        let mut cursor = loader.cursor();
        cursor.sources[0].next.row = u64::MAX;
        cursor.sources[0].next.group = u64::MAX;
        cursor.sources[0].next.epoch = u32::MAX;
        loader.restore(&cursor).unwrap();
        check_numbered(&loader.next_batch().unwrap(), &LENGTHS);
    }
}

#[test]
fn seeds_and_sources_give_orders_of_their_own() {
    let ids = |seed, source: usize| -> Vec<u32> {
        let mut shares = one(numbered(&[999]));
        if source == 1 {
            // The other source is so rare that its first row comes late.
            shares.insert(0, Share { documents: numbered(&[30]), weight: 1e-9 });
        }
        let options = LoaderOptions { seed, ..options(10, 40, Packing::Continuous) };
        let mut loader = Loader::new(shares, &options).unwrap();
        loader.next_batch().unwrap().ids
    };
    assert_eq!(ids(1, 0), ids(1, 0));
    assert_ne!(ids(1, 0), ids(2, 0));
    assert_ne!(ids(1, 0), ids(1, 1));
    assert_ne!(ids(1, 0), ids(1 << 32 | 1, 0), "all 64 bits of a seed count");
}

#[test]
fn the_stored_order_is_the_files_order() {
    let options = LoaderOptions { order: Order::Stored, ..options(16, 1, Packing::Continuous) };
    let mut loader = Loader::new(one(numbered(&[40])), &options).unwrap();
    let lengths: Vec<(u32, usize)> =
        (0..4).map(|_| loader.next_batch().unwrap()).map(|b| (b.ids[0], b.ids.len())).collect();
    assert_eq!(lengths, [(0, 16), (16, 16), (32, 8), (0, 16)]);
}

#[test]
fn a_mix_gives_each_source_its_part_at_every_moment() {
    let weights = [5.0, 0.5, 2.25];
    let total: f64 = weights.iter().sum();
    let shares = weights.map(|weight| Share { documents: numbered(&[500]), weight });
    let mut loader = Loader::new(shares.to_vec(), &options(10, 1, Packing::Continuous)).unwrap();
    for drawn in 1..=1000 {
        loader.next_batch().unwrap();
        for (source, weight) in loader.cursor().sources.iter().zip(weights) {
            let due = weight / total * f64::from(drawn);
            assert!((source.drawn as f64 - due).abs() < 1.0 + 1e-9, "{} of {drawn}, and {due} are due", source.drawn);
        }
    }
}

/// Where only answers are learned, a row without any would have a loss of nothing over nothing.
#[test]
fn rows_in_which_nothing_counts_are_passed_over() {
    let mut learned = vec![false; 100];
    learned[55..58].fill(true);
    let document = Document { ids: (0..100).collect(), learned: Some(learned) };
    for packing in [Packing::Continuous, Packing::Documents] {
        let mut loader =
            Loader::new(one(built("masked", std::slice::from_ref(&document))), &options(8, 1, packing)).unwrap();
        for _ in 0..20 {
            let batch = loader.next_batch().unwrap();
            assert!(batch.counted() > 0);
            assert!(batch.targets.iter().all(|target| [IGNORED, 55, 56, 57].contains(target)));
        }
    }
    let nothing = Document { ids: vec![1, 2, 3], learned: Some(vec![true, false, false]) };
    for documents in [built("masked", &[nothing]), numbered(&[1, 1])] {
        for packing in [Packing::Continuous, Packing::Documents] {
            let mut loader = Loader::new(one(documents.clone()), &options(8, 1, packing)).unwrap();
            let before = loader.cursor();
            assert!(matches!(data_error(loader.next_batch()), DataError::NothingToLearn { .. }));
            assert_eq!(loader.cursor(), before, "a failed batch leaves the loader where it was");
            let mut pass = OnePass::new(&documents, &options(8, 1, packing)).unwrap();
            assert!(matches!(data_error(pass.next().unwrap()), DataError::NothingToLearn { .. }));
            assert!(pass.next().is_none());
        }
    }
}

#[test]
fn fewer_tokens_than_a_row_make_one_short_row() {
    let mut loader = Loader::new(one(numbered(&[4, 3])), &options(16, 2, Packing::Continuous)).unwrap();
    let batch = loader.next_batch().unwrap();
    assert_eq!(batch.documents, [4, 3, 4, 3]);
    check_numbered(&batch, &[4, 3]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_documents_make_right_rows(
        lengths in prop::collection::vec(1usize..70, 1..40),
        sequence_length in 2usize..50,
        rows in 1usize..5,
        packed: bool,
        cut: bool,
        seed: u64,
        mask in prop::collection::vec(any::<bool>(), 70),
    ) {
        let documents: Vec<Document> = lengths.iter().enumerate().map(|(d, &length)| Document {
            ids: (0..length as u32).map(|t| 1000 * d as u32 + t).collect(),
            // A mix of masked documents and others.
            learned: (d % 3 > 0).then(|| mask[..length].to_vec()),
        }).collect();
        let is_learned = |id: usize| documents[id / 1000].learned.as_ref().is_none_or(|learned| learned[id % 1000]);
        let options = LoaderOptions {
            overlong: if cut { Overlong::Cut } else { Overlong::Split },
            seed,
            ..options(sequence_length, rows, if packed { Packing::Documents } else { Packing::Continuous })
        };
        let mut loader = Loader::new(one(built("any", &documents)), &options).unwrap();
        for _ in 0..30 {
            let batch = match loader.next_batch() {
                Err(Error::Data(error)) if matches!(*error, DataError::NothingToLearn { .. }) => break,
                batch => batch.unwrap(),
            };
            prop_assert!(batch.ids.len() <= rows * sequence_length);
            prop_assert_eq!(batch.documents.iter().sum::<usize>(), batch.ids.len());
            for range in batch.ranges() {
                let first = batch.ids[range.start] as usize;
                for (offset, position) in range.enumerate() {
                    let next = first + offset + 1;
                    prop_assert_eq!(batch.ids[position] as usize + 1, next);
                    let counts = next % 1000 < lengths[first / 1000] && is_learned(next);
                    prop_assert_eq!(batch.targets[position], if counts { next as i64 } else { IGNORED });
                }
            }
        }
    }
}

#[test]
fn options_that_mean_nothing_are_refused() {
    let base = options(16, 2, Packing::Continuous);
    let refusal = |shares: Vec<Share>, options: LoaderOptions| data_error(Loader::new(shares, &options));
    let shares = || one(numbered(&LENGTHS));
    for sequence_length in [0, 1] {
        let error = refusal(shares(), LoaderOptions { sequence_length, ..base.clone() });
        assert!(matches!(error, DataError::Option { option: "sequence_length", .. }), "{error}");
    }
    assert!(matches!(refusal(shares(), LoaderOptions { rows: 0, ..base.clone() }), DataError::Option { .. }));
    assert!(matches!(refusal(Vec::new(), base.clone()), DataError::NoDocuments { .. }));
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let shares = vec![Share { documents: numbered(&LENGTHS), weight }];
        assert!(matches!(refusal(shares, base.clone()), DataError::Weight { .. }), "{weight}");
    }
    let error = refusal(shares(), LoaderOptions { vocab_size: 8030, ..base.clone() });
    assert!(matches!(error, DataError::IdOutOfRange { id: 8030, vocab_size: 8030, .. }), "{error}");
    let mut builder = DocumentsBuilder::new("x", 10);
    let place = Place { path: "x".into(), line: Some(4) };
    let error = data_error(builder.push(&Document { ids: vec![1, 10], learned: None }, &place));
    assert!(error.to_string().starts_with("x:4 holds the token id 10, and the vocabulary has 10 tokens"), "{error}");
    assert!(matches!(data_error(builder.push(&Document::default(), &place)), DataError::EmptyDocument { .. }));
    assert!(matches!(data_error(builder.finish()), DataError::NoDocuments { .. }));
}
