//! Token files, whole and damaged, and documents that are held out.

use super::*;

#[test]
fn a_token_file_gives_what_its_texts_give() {
    let smollm = tokenizer("smollm");
    let template = template("smollm2");
    let tokenization = Tokenization { template: Some(&template), ..plain(&smollm) };
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        std::fs::write(folder.path().join(name), text).unwrap();
        Source::guess(folder.path().join(name)).unwrap()
    };
    let texts = write("a.txt", "iron loom ".repeat(50));
    let chats = write("b.jsonl", [conversation(TURNS), conversation(&TURNS[..2])].join("\n"));
    let pairs = write("c.jsonl", "{\"prompt\": \"one\", \"completion\": \" two\"}".to_owned());
    let lines = write("d.jsonl", "{\"text\": \"three\"}".to_owned());
    let formats: Vec<&SourceFormat> = [&texts, &chats, &pairs, &lines].map(|source| &source.format).into();
    assert!(matches!(
        formats[..],
        [SourceFormat::Text { .. }, SourceFormat::Chat { .. }, SourceFormat::Completion, SourceFormat::JsonText { .. }]
    ));

    let sources = [texts, chats, pairs, lines];
    let path = folder.path().join("data.tokens");
    let mut heard = (0, 0);
    let mapped =
        tokenize(&sources, &tokenization, &path, &mut |documents, tokens| heard = (documents, tokens)).unwrap();
    assert_eq!(heard, (mapped.len(), mapped.tokens()));
    let mut number = 0;
    let mut predictions = 0;
    for source in &sources {
        let documents = source.load(&tokenization).unwrap();
        predictions += documents.counted();
        for local in 0..documents.len() {
            let (expected, found) = (documents.document(local), mapped.document(number));
            assert_eq!(found.ids, expected.ids);
            let all = vec![true; expected.ids.len()];
            assert_eq!(found.learned.unwrap(), expected.learned.unwrap_or(all));
            number += 1;
        }
    }
    assert_eq!((mapped.len(), mapped.counted()), (number, predictions));
    assert_eq!(
        (mapped.vocab_size(), mapped.largest_id() as usize),
        (smollm.vocab_size(), mapped.largest_id() as usize)
    );

    let again = Source::guess(&path).unwrap();
    assert_eq!(again.format, SourceFormat::Tokens);
    assert_eq!(again.load(&tokenization).unwrap().tokens(), mapped.tokens());
    let other = tokenizer("gpt2");
    assert!(matches!(data_error(again.load(&plain(&other))), DataError::OtherTokenizer { .. }));

    // A failure leaves the file that was there, and no other.
    let before = std::fs::read(&path).unwrap();
    let bad = write("e.jsonl", "{\"text\": \"\"}".to_owned());
    let files = std::fs::read_dir(folder.path()).unwrap().count();
    assert!(tokenize(&[sources[0].clone(), bad], &tokenization, &path, &mut |_, _| ()).is_err());
    assert_eq!((std::fs::read(&path).unwrap(), std::fs::read_dir(folder.path()).unwrap().count()), (before, files));
}

#[test]
fn a_damaged_token_file_is_an_error_and_never_a_panic() {
    let smollm = tokenizer("smollm");
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("a.jsonl");
    std::fs::write(
        &text,
        "{\"prompt\": \"one\", \"completion\": \" two\"}\n{\"prompt\": \"three\", \"completion\": \" four\"}",
    )
    .unwrap();
    let path = folder.path().join("a.tokens");
    tokenize(&[Source::guess(&text).unwrap()], &plain(&smollm), &path, &mut |_, _| ()).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let damaged = folder.path().join("b.tokens");
    let open = |bytes: &[u8]| {
        // A file of its own each time: the ones before are mapped.
        let _ = std::fs::remove_file(&damaged);
        std::fs::write(&damaged, bytes).unwrap();
        Documents::open(&damaged)
    };
    for length in 0..whole.len() {
        assert!(open(&whole[..length]).is_err(), "{length} of {} bytes", whole.len());
    }
    assert!(matches!(data_error(open(&[whole.as_slice(), &[0]].concat())), DataError::TokenFile { .. }));
    for byte in 0..whole.len() {
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[byte] ^= 1 << bit;
            let Ok(documents) = open(&bytes) else { continue };
            let options = LoaderOptions { vocab_size: smollm.vocab_size(), ..options(8, 4, Packing::Continuous) };
            // An id may have become another, or one past the vocabulary, which drawing it tells.
            let drawn = Loader::new(one(documents), &options).and_then(|mut loader| loader.next_step(3));
            if let Ok(batches) = drawn {
                assert!(batches.iter().flat_map(|batch| &batch.ids).all(|&id| (id as usize) < smollm.vocab_size()));
            }
        }
    }
}

#[test]
fn files_of_plain_ids_are_read_by_their_description() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.bin");
    let ids: [u16; 7] = [5, 6, 0, 7, 0, 8, 65_535];
    std::fs::write(&path, ids.map(u16::to_le_bytes).concat()).unwrap();
    assert!(matches!(data_error(Documents::open(&path)), DataError::NoDescription { .. }));
    let describe = |text: &str| {
        std::fs::write(folder.path().join("train.json"), text).unwrap();
        Documents::open(&path)
    };
    let documents = describe("{\"dtype\": \"uint16\", \"vocab_size\": 65536, \"end_id\": 0}").unwrap();
    let found: Vec<Vec<u32>> = (0..documents.len()).map(|number| documents.document(number).ids).collect();
    assert_eq!(found, [vec![5, 6, 0], vec![7, 0], vec![8, 65_535]]);
    assert_eq!(describe("{\"dtype\": \"u16\", \"vocab_size\": 70000}").unwrap().len(), 1);
    assert!(matches!(
        data_error(describe("{\"dtype\": \"u16\", \"vocab_size\": 65535}")),
        DataError::IdOutOfRange { id: 65_535, .. }
    ));
    assert!(matches!(data_error(describe("{\"dtype\": \"u32\", \"vocab_size\": 70000}")), DataError::TokenFile { .. }));
    assert!(matches!(data_error(describe("{\"dtype\": \"f16\"}")), DataError::Json { .. }));
    assert_eq!(Source::guess(&path).unwrap().format, SourceFormat::Tokens);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, [1u32, 70_000].map(u32::to_le_bytes).concat()).unwrap();
    assert_eq!(describe("{\"dtype\": \"u32\", \"vocab_size\": 70001}").unwrap().document(0).ids, [1, 70_000]);
}

#[test]
fn held_out_documents_are_the_same_ones_whatever_is_added() {
    let split = |count: usize, seed| {
        let documents = numbered(&vec![3; count]);
        let (training, held_out) = documents.split(HeldOut::Documents { fraction: 0.1, seed }).unwrap();
        let numbers = |documents: &Documents| -> Vec<u32> {
            (0..documents.len()).map(|number| documents.document(number).ids[0] / 1000).collect()
        };
        let (training, held_out) = (numbers(&training), numbers(&held_out));
        let mut all = [training, held_out.clone()].concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..count as u32));
        held_out
    };
    let some = split(600, 1);
    assert!((40..80).contains(&some.len()), "{} of 600 at a tenth", some.len());
    let more = split(900, 1);
    assert_eq!(more[..some.len()], some);
    assert_ne!(split(600, 2), some);
    assert_eq!(split(2, 1).len(), 1, "few documents still have one held out");
}

#[test]
fn a_held_out_tail_may_cut_a_document() {
    let documents = numbered(&[10, 80, 10]);
    let (training, held_out) = documents.split(HeldOut::Tail { fraction: 0.25 }).unwrap();
    let ids =
        |documents: &Documents| -> Vec<u32> { (0..documents.len()).flat_map(|n| documents.document(n).ids).collect() };
    assert_eq!((training.tokens(), training.len(), held_out.tokens(), held_out.len()), (75, 2, 25, 2));
    assert_eq!([ids(&training), ids(&held_out)].concat(), ids(&documents));
    let mut loader = Loader::new(one(training), &options(10, 8, Packing::Continuous)).unwrap();
    let batch = loader.next_step(20).unwrap();
    let held_out = ids(&held_out);
    for batch in batch {
        assert!(batch.ids.iter().all(|id| !held_out.contains(id)));
        assert!(batch.targets.iter().all(|&target| target == IGNORED || !held_out.contains(&(target as u32))));
    }
    for fraction in [0.0, 1.0, -0.5, f64::NAN] {
        assert!(matches!(data_error(documents.split(HeldOut::Tail { fraction })), DataError::Option { .. }));
    }
    let single = numbered(&[50]);
    let error = data_error(single.split(HeldOut::Documents { fraction: 0.5, seed: 0 }));
    assert!(matches!(error, DataError::TooFewToSplit { documents: 1, .. }), "{error}");
    assert!(single.split(HeldOut::Tail { fraction: 0.5 }).is_ok());
    assert!(matches!(
        data_error(numbered(&[3]).split(HeldOut::Tail { fraction: 0.5 })),
        DataError::TooFewToSplit { .. }
    ));
}
