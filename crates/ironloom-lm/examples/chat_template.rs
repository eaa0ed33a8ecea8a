//! What a model sees of a conversation: the text its chat template makes, and the tokens of that text.
//!
//! ```sh
//! cargo run -p ironloom-lm --example chat_template -- MODEL "What is a loom?"
//! ```
//!
//! MODEL is a GGUF file or a Hugging Face folder. Without it, a ChatML template and a tokenizer trained here show the same.

use std::error::Error;

use ironloom_lm::text::{
    AddGenerationPrompt, ChatTemplate, Message, TextStream, Tokenizer, TrainOptions, encode_chat, train_bpe,
};

const CHATML: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
                      {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (tokenizer, template) = match arguments.next() {
        Some(path) => {
            let checkpoint = ironloom_weights::open(path)?;
            (Tokenizer::from_checkpoint(&checkpoint)?, ChatTemplate::from_checkpoint(&checkpoint)?)
        }
        None => small_model()?,
    };
    let question = arguments.next().unwrap_or_else(|| "What is a loom?".to_owned());
    let messages = [Message::new("user", question)];

    println!("{}", template.render(&messages, AddGenerationPrompt::Yes)?);
    let ids = encode_chat(&tokenizer, &template, &messages, AddGenerationPrompt::Yes)?;
    for &id in &ids {
        println!("{id:>7}  {:?}", tokenizer.token_text(id).unwrap_or_default());
    }

    let mut stream = TextStream::new(&tokenizer);
    let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
    text.push_str(&stream.finish());
    println!("\n{} tokens; without the special ones: {text:?}", ids.len());
    Ok(())
}

fn small_model() -> Result<(Tokenizer, ChatTemplate), Box<dyn Error>> {
    let options = TrainOptions {
        vocab_size: 300,
        special_tokens: vec!["<|im_start|>".to_owned(), "<|im_end|>".to_owned()],
        ..TrainOptions::default()
    };
    let json = train_bpe([CHATML, "What is a loom? What is iron? A loom weaves; iron doesn't."], &options)?;
    Ok((Tokenizer::from_json(json.as_bytes())?, ChatTemplate::new(CHATML)?))
}
