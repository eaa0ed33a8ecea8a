//! Sources: what becomes of texts, lines and pairs, and which errors name their place.

use super::*;

#[test]
fn texts_get_start_and_end_tokens_and_all_is_learned() {
    let smollm = tokenizer("smollm");
    let format = SourceFormat::Text { separator: Some("\n===\n".to_owned()) };
    let documents = load("One iron.\n===\n Two\nlooms. \n===\n\n", "txt", format.clone(), &plain(&smollm)).unwrap();
    let end = smollm.special_id("<|endoftext|>").unwrap();
    assert_eq!(documents.len(), 2);
    for (number, text) in ["One iron.", "Two\nlooms."].into_iter().enumerate() {
        let Document { ids, learned } = documents.document(number);
        assert_eq!((smollm.decode(&ids).as_str(), ids.last(), learned), (text, Some(&end), None));
    }
    let batch = OnePass::new(
        &documents,
        &LoaderOptions { vocab_size: smollm.vocab_size(), ..options(64, 1, Packing::Documents) },
    );
    let batch = batch.unwrap().next().unwrap().unwrap();
    for range in batch.ranges() {
        assert_eq!(
            batch.targets[range.end - 2..range.end],
            [i64::from(end), IGNORED],
            "the end is learned, what follows is not"
        );
    }

    let whole = load("One\n===\nTwo", "txt", SourceFormat::Text { separator: None }, &plain(&smollm)).unwrap();
    assert_eq!((whole.len(), smollm.decode(&whole.document(0).ids).as_str()), (1, "One\n===\nTwo"));
    let without = Tokenization { end: EndToken::None, ..plain(&smollm) };
    assert_ne!(
        load("One", "txt", SourceFormat::Text { separator: None }, &without).unwrap().document(0).ids.last(),
        Some(&end)
    );

    // A tokenizer that adds a start token does so here too, and special tokens in a text are only text.
    let llama = tokenizer("llama3");
    let jsonl = "{\"id\": 1, \"body\": \"Hi <|eot_id|>\"}\n\n{\"body\": \"é\"}\n";
    let documents = load(jsonl, "jsonl", SourceFormat::JsonText { field: "body".to_owned() }, &plain(&llama)).unwrap();
    let ids = documents.document(0).ids;
    assert_eq!(
        ids,
        [
            llama.encode("Hi <|eot_id|>", Specials::Literal, AddBos::Yes).unwrap(),
            vec![llama.special_id("<|end_of_text|>").unwrap()]
        ]
        .concat()
    );
    assert!(!ids.contains(&llama.special_id("<|eot_id|>").unwrap()));
}

#[test]
fn a_folders_files_come_in_the_order_of_their_names() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [("b.txt", "b"), ("a/z.md", "az"), ("c.rs", "c"), (".hidden.txt", "h"), ("a/b.TXT", "ab")] {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let smollm = tokenizer("smollm");
    let texts = |endings: &[&str]| -> Vec<String> {
        let endings = endings.iter().map(|&ending| ending.to_owned()).collect();
        let source =
            Source { paths: vec![folder.path().to_owned()], format: SourceFormat::Text { separator: None }, endings };
        let documents = source.load(&plain(&smollm)).unwrap();
        (0..documents.len()).map(|number| smollm.decode(&documents.document(number).ids)).collect()
    };
    assert_eq!(texts(&[]), ["ab", "az", "b"]);
    assert_eq!(texts(&["rs"]), ["c"]);
    let none = Source { paths: vec![folder.path().to_owned()], format: SourceFormat::Completion, endings: Vec::new() };
    assert!(data_error(none.load(&plain(&smollm))).to_string().contains("jsonl, ndjson, json"));
}

#[test]
fn of_prompt_and_completion_the_completion_is_learned() {
    for name in ["smollm", "llama2", "llama3", "gemma", "mistral_v0_3", "unigram"] {
        let tokenizer = tokenizer(name);
        for (prompt, completion) in
            [("Q: hello?\nA:", " iron"), ("Q: ", "iron"), ("The", "re is"), ("", "all"), ("x\n", "\n\ny"), ("é", "é")]
        {
            let line = serde_json::json!({"prompt": prompt, "completion": completion}).to_string();
            let documents = load(&line, "jsonl", SourceFormat::Completion, &plain(&tokenizer)).unwrap();
            let Document { ids, learned } = documents.document(0);
            let learned = learned.unwrap();
            let start = learned.iter().position(|&learned| learned).unwrap();
            assert!(learned[start..].iter().all(|&learned| learned), "{name}");
            // What is given is what the model sees when it is asked.
            let bos: Vec<u32> = tokenizer.bos_id().filter(|_| tokenizer.adds_bos()).into_iter().collect();
            let asked = [bos, tokenizer.encode(prompt, Specials::Literal, AddBos::No).unwrap()].concat();
            assert_eq!(ids[..start], asked, "{name}: {prompt:?} {completion:?}");
            let end = ids.last().copied().filter(|id| tokenizer.end_ids().contains(id));
            let answer = &ids[start..ids.len() - usize::from(end.is_some())];
            let bytes: Vec<u8> = answer.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
            let text = String::from_utf8(bytes).unwrap();
            // A tokenizer puts its space before a text that nothing is before.
            let text = if prompt.is_empty() { text.trim_start() } else { &text };
            match name {
                // It makes one space of any white space.
                "unigram" => assert!(text.split_whitespace().eq(completion.split_whitespace())),
                _ => assert_eq!(text, completion, "{name}: {prompt:?}"),
            }
            assert_eq!(end.is_some(), !tokenizer.end_ids().is_empty(), "{name}");
        }
    }
}

#[test]
fn bad_lines_are_errors_that_name_file_and_line() {
    let smollm = tokenizer("smollm");
    let template = template("smollm2");
    let tokenization = Tokenization { template: Some(&template), ..plain(&smollm) };
    let good = conversation(TURNS);
    let chat = SourceFormat::Chat { answers: Answers::All };
    let text = SourceFormat::JsonText { field: "text".to_owned() };
    for (format, line, words) in [
        (&chat, "{\"messages\": [", "not a JSON object: EOF while parsing a list at column 14"),
        (&chat, "[1]", "not a JSON object"),
        (
            &chat,
            "{\"text\": \"x\"}",
            "no \"messages\" that is a list of one or more messages; it has: \"text\" (a text)",
        ),
        (&chat, "{\"messages\": []}", "\"messages\" (an empty list)"),
        (&chat, "{\"messages\": [{\"role\": \"user\"}]}", "no \"content\" that is a text; it has: \"role\" (a text)"),
        (&chat, "{\"messages\": [{\"role\": \"user\", \"content\": [1]}]}", "\"content\" (a list)"),
        (
            &chat,
            "{\"messages\": [{\"role\": \"human\", \"content\": \"x\"}]}",
            "role \"human\"; roles are system, developer",
        ),
        (&chat, "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}", "no message of the assistant"),
        (&chat, "{\"tools\": [{}], \"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}", "has \"tools\""),
        (
            &chat,
            "{\"messages\": [{\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [{}]}]}",
            "has \"tool_calls\", which is not read",
        ),
        (
            &chat,
            "{\"messages\": [{\"role\": \"assistant\", \"content\": \"x\", \"weight\": 0}]}",
            "has \"weight\", which is not read",
        ),
        (&text, "{\"text\": 3}", "no \"text\" that is a text; it has: \"text\" (a number)"),
        (&text, "{}", "it has: nothing"),
        (&text, "{\"text\": \"\"}", "a document without tokens"),
        (&text, "\u{1}", "not a JSON object"),
        (&SourceFormat::Completion, "{\"prompt\": \"x\"}", "no \"completion\""),
        (&SourceFormat::Completion, "{\"prompt\": \"x\", \"completion\": \"\"}", "a document without tokens"),
    ] {
        let first = match format {
            SourceFormat::Chat { .. } => good.as_str(),
            SourceFormat::Completion => "{\"prompt\": \"a\", \"completion\": \"b\"}",
            _ => "{\"text\": \"a\"}",
        };
        let error =
            data_error(load(&format!("{first}\n\n{line}\n"), "jsonl", format.clone(), &tokenization)).to_string();
        assert!(error.contains("data.jsonl:3") && error.contains(words), "{line}: {error}");
    }
    let refused = ChatTemplate::new("{{ raise_exception('Only kings may speak') }}").unwrap();
    let error =
        data_error(load(&good, "jsonl", chat.clone(), &Tokenization { template: Some(&refused), ..plain(&smollm) }));
    assert!(
        error.to_string().contains("data.jsonl:1: ") && error.to_string().contains("Only kings may speak"),
        "{error}"
    );
    assert!(matches!(data_error(load(&good, "jsonl", chat.clone(), &plain(&smollm))), DataError::NoTemplate { .. }));
    assert!(matches!(data_error(load("\n\n", "jsonl", chat, &tokenization)), DataError::NoDocuments { .. }));

    let text = |separator: Option<&str>| SourceFormat::Text { separator: separator.map(str::to_owned) };
    assert!(matches!(data_error(load("", "txt", text(None), &tokenization)), DataError::EmptyDocument { .. }));
    assert!(matches!(data_error(load(" \n", "txt", text(Some("x")), &tokenization)), DataError::NoDocuments { .. }));
    assert!(matches!(data_error(load("a", "txt", text(Some("")), &tokenization)), DataError::EmptySeparator));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("latin.txt");
    std::fs::write(&path, b"ok\n--\ncaf\xe9\n").unwrap();
    let source = |separator| Source { paths: vec![path.clone()], format: text(separator), endings: Vec::new() };
    for separator in [None, Some("--")] {
        let error = data_error(source(separator).load(&tokenization));
        assert!(matches!(error, DataError::Encoding { offset: 9, .. }), "{error}");
    }
    let missing =
        Source { paths: vec![folder.path().join("none.jsonl")], format: SourceFormat::Completion, endings: Vec::new() };
    assert!(matches!(missing.load(&tokenization), Err(Error::Read { .. })));
}

#[test]
fn sources_are_written_in_configurations() {
    let source: Source =
        serde_json::from_str("{\"paths\": [\"a\"], \"format\": {\"chat\": {\"answers\": \"each\"}}}").unwrap();
    assert_eq!(source.format, SourceFormat::Chat { answers: Answers::Each });
    let source: Source = serde_json::from_str("{\"paths\": [\"a\"], \"format\": \"completion\"}").unwrap();
    assert_eq!(source.format, SourceFormat::Completion);
    assert!(serde_json::from_str::<Source>("{\"paths\": [], \"format\": {\"text\": {\"seperator\": \"x\"}}}").is_err());
}
