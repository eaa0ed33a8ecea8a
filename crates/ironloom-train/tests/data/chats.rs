//! Conversations: which tokens are learned, with the templates of many models.

use super::*;

/// The stretches of learned tokens, as texts with special tokens by name.
fn learned(document: &Document, tokenizer: &Tokenizer) -> Vec<String> {
    let marks = document.learned.clone().unwrap();
    let tokens: Vec<(u32, bool)> = document.ids.iter().copied().zip(marks).collect();
    tokens
        .chunk_by(|a, b| a.1 == b.1)
        .filter(|stretch| stretch[0].1)
        .map(|stretch| stretch.iter().map(|&(id, _)| tokenizer.token_text(id).unwrap()).collect())
        .collect()
}

#[test]
fn of_a_conversation_the_answers_and_their_ends_are_learned() {
    let smollm = tokenizer("smollm");
    let template = template("smollm2");
    let document = chat(TURNS, Answers::All, &smollm, &template).unwrap().document(0);
    assert_eq!(learned(&document, &smollm), ["Hello!<|im_end|>", "Nothing.<|im_end|>"]);
    let whole = encode_chat(&smollm, &template, &messages(&TURNS[..4]), AddGenerationPrompt::No).unwrap();
    assert!(whole.starts_with(&document.ids) && whole.len() - document.ids.len() <= 1, "the line's end is left out");

    let last = chat(TURNS, Answers::Last, &smollm, &template).unwrap();
    assert_eq!(learned(&last.document(0), &smollm), ["Nothing.<|im_end|>"]);
    assert_eq!(last.document(0).ids, document.ids);
    let each = chat(TURNS, Answers::Each, &smollm, &template).unwrap();
    assert_eq!(each.len(), 2);
    assert_eq!(learned(&each.document(0), &smollm), ["Hello!<|im_end|>"]);
    assert_eq!(learned(&each.document(1), &smollm), ["Nothing.<|im_end|>"]);

    // An empty answer is its end; one that starts a conversation answers nothing.
    let empty = chat(&[("user", "x"), ("assistant", "")], Answers::All, &smollm, &template).unwrap();
    assert_eq!(learned(&empty.document(0), &smollm), ["<|im_end|>"]);
    let first =
        chat(&[("assistant", "Hm"), ("user", "x"), ("assistant", "y")], Answers::All, &smollm, &template).unwrap();
    assert_eq!(learned(&first.document(0), &smollm), ["y<|im_end|>"]);
    // What a template writes after the end of an answer, or once more at the end of all, is not.
    let phi = ChatTemplate::new(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>\n\n{% endfor %}\
         {% if add_generation_prompt %}<assistant>{% else %}<|endoftext|>{% endif %}",
    )
    .unwrap();
    let document = chat(TURNS, Answers::All, &smollm, &phi).unwrap().document(0);
    assert_eq!(learned(&document, &smollm), ["Hello!<|im_end|>", "Nothing.<|im_end|>"]);
    assert!(!document.ids.contains(&smollm.special_id("<|endoftext|>").unwrap()));
    // A mark inside an answer does not end what is learned of it.
    let inside = chat(&[("user", "x"), ("assistant", "a<|im_end|>b")], Answers::All, &smollm, &template).unwrap();
    assert_eq!(learned(&inside.document(0), &smollm), ["a<|im_end|>b<|im_end|>"]);
}

/// Whatever is learned follows exactly what the model sees when it is asked.
#[test]
fn every_template_is_cut_rightly_or_refused() {
    let tokenizers: Vec<Tokenizer> = ["smollm", "llama2", "gemma", "llama3"].map(tokenizer).into();
    let (mut cut, mut as_a_whole) = (Vec::new(), 0);
    for entry in std::fs::read_dir(golden("templates")).unwrap() {
        let name = entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned();
        let template = template(&name);
        for tokenizer in &tokenizers {
            match chat(TURNS, Answers::All, tokenizer, &template) {
                Ok(documents) => {
                    let document = documents.document(0);
                    as_a_whole += check_answers(&document, &TURNS[..4], &[1, 3], tokenizer, &template, &name);
                    cut.push(name.clone());
                }
                error => match data_error(error) {
                    DataError::RewrittenTurns { .. } | DataError::AnswerStart { .. } => {}
                    // It wants lists of parts.
                    DataError::AnswerLeftOut { message: 2, .. } => assert_eq!(name, "smolvlm"),
                    error => panic!("{name}: {error}"),
                },
            }
            match chat(TURNS, Answers::Each, tokenizer, &template) {
                Ok(documents) => {
                    as_a_whole += check_answers(&documents.document(0), &TURNS[..2], &[1], tokenizer, &template, &name);
                    as_a_whole += check_answers(&documents.document(1), &TURNS[..4], &[3], tokenizer, &template, &name);
                }
                error => match data_error(error) {
                    DataError::AnswerStart { .. } => {}
                    DataError::AnswerLeftOut { .. } => assert_eq!(name, "smolvlm"),
                    error => panic!("{name}: {error}"),
                },
            }
        }
    }
    cut.sort();
    cut.dedup();
    println!("{as_a_whole} checked; learned as a whole: {cut:?}");
    assert!(as_a_whole > 150, "{as_a_whole} conversations have the ids of the whole");
    for name in [
        "chatml",
        "smollm2",
        "llama2",
        "llama3",
        "llama3_2",
        "gemma",
        "gemma3",
        "mistral_v0_1",
        "zephyr",
        "qwen2_5",
        "cohere",
    ] {
        assert!(cut.iter().any(|found| found == name), "{name} can be learned as a whole: {cut:?}");
    }
    assert!(!cut.iter().any(|found| found == "qwen3" || found == "gptoss"), "these rewrite earlier answers");
}

/// Checks a document's answers; 1 where its ids are those of the whole conversation.
fn check_answers(
    document: &Document,
    turns: Turns<'_>,
    answers: &[usize],
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    name: &str,
) -> usize {
    let whole = encode_chat(tokenizer, template, &messages(turns), AddGenerationPrompt::No).unwrap();
    let asked = |answer: usize| {
        encode_chat(tokenizer, template, &messages(&turns[..answer]), AddGenerationPrompt::Yes).unwrap()
    };
    let marks = document.learned.clone().unwrap();
    if !answers.iter().all(|&answer| whole.starts_with(&asked(answer))) {
        // The template of one model with the tokenizer of another: its marks are plain text, and tokens span their ends.
        let first = asked(answers[0]);
        assert_eq!(document.ids[..first.len()], first, "{name}: what is given is what the model sees when it is asked");
        assert!(!marks[..first.len()].contains(&true) && marks[first.len()], "{name}");
        return 0;
    }
    assert!(whole.starts_with(&document.ids), "{name}: the ids are those of the whole conversation");
    let mut expected_start = Vec::new();
    for &answer in answers {
        let asked = asked(answer);
        assert!(document.ids.starts_with(&asked), "{name}: what is given is what the model sees when it is asked");
        expected_start.push(asked.len());
        let with = encode_chat(tokenizer, template, &messages(&turns[..=answer]), AddGenerationPrompt::No).unwrap();
        let learned = (asked.len()..with.len()).filter(|&token| marks.get(token) == Some(&true)).count();
        let bytes: Vec<u8> =
            document.ids[asked.len()..asked.len() + learned].iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.contains(turns[answer].1), "{name}: {text:?} holds the answer");
        let other = turns.iter().enumerate().filter(|&(number, _)| number != answer);
        assert!(other.clone().all(|(_, turn)| !text.contains(turn.1)), "{name}: {text:?} holds nothing else");
    }
    let starts: Vec<usize> =
        (0..marks.len()).filter(|&token| marks[token] && (token == 0 || !marks[token - 1])).collect();
    assert_eq!(starts, expected_start, "{name}");
    1
}

/// A token that spans the start of an answer: the text is tokenized in pieces, so that what is given is what is asked with.
#[test]
fn a_token_across_an_answers_start_is_not_used() {
    let source = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ '\n' if m.role == 'user' else '<|im_end|>' }}{% endfor %}\
                  {% if add_generation_prompt %}assistant:{% endif %}";
    let template = ChatTemplate::new(source).unwrap();
    for name in ["smollm", "gpt2", "gemma", "llama2"] {
        let tokenizer = tokenizer(name);
        let turns: Turns<'_> = &[("user", "x"), ("assistant", ": :::\n\n y")];
        let document = chat(turns, Answers::All, &tokenizer, &template).unwrap().document(0);
        let asked = encode_chat(&tokenizer, &template, &messages(&turns[..1]), AddGenerationPrompt::Yes).unwrap();
        let start = document.learned.unwrap().iter().position(|&learned| learned).unwrap();
        assert_eq!(document.ids[..start], asked, "{name}");
        let text: String = document.ids[start..].iter().map(|&id| tokenizer.token_text(id).unwrap()).collect();
        assert!(text.starts_with(": :::\n\n y"), "{name}: {text:?}");
    }
}

#[test]
fn a_template_that_rewrites_earlier_turns_is_refused_with_a_way_out() {
    let smollm = tokenizer("smollm");
    let shrinking = ChatTemplate::new(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last or m.role == 'user' else 'cut' }}<|im_end|>\n\
         {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    .unwrap();
    let error = data_error(chat(TURNS, Answers::All, &smollm, &shrinking));
    assert!(matches!(error, DataError::RewrittenTurns { message: 2, .. }), "{error}");
    assert!(error.to_string().contains("data.jsonl:1") && error.to_string().contains("\"each\""), "{error}");
    let each = chat(TURNS, Answers::Each, &smollm, &shrinking).unwrap();
    assert_eq!(learned(&each.document(0), &smollm), ["Hello!<|im_end|>"]);
    assert_eq!(learned(&each.document(1), &smollm), ["Nothing.<|im_end|>"]);
    assert_eq!(
        learned(&chat(TURNS, Answers::Last, &smollm, &shrinking).unwrap().document(0), &smollm),
        ["Nothing.<|im_end|>"]
    );

    let other_start = ChatTemplate::new(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}",
    )
    .unwrap();
    for answers in [Answers::All, Answers::Each] {
        let error = data_error(chat(TURNS, answers, &smollm, &other_start));
        assert!(
            matches!(&error, DataError::AnswerStart { prompt, message: 2, .. } if prompt == "[assistant]<think>"),
            "{error}"
        );
    }
}
