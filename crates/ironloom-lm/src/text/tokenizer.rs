//! A tokenizer: text to token ids, and ids back to text.
//!
//! In: text, with or without special tokens in it. Out: ids, with the start token (and, where the model says so, the end
//! token) around them. First the tokens that are found as written are cut out, then each section between them goes through
//! byte-level BPE, SentencePiece BPE or the `tokenizers` crate.

use std::collections::BTreeSet;

use ironloom_weights::{Checkpoint, Format};
use tokenizers::{AddedVocabulary, Model, OffsetReferential, OffsetType, PreTokenizer};

use super::{
    Result, Specials, TextError, TokenKind,
    byte_level::ByteLevel,
    gguf, json,
    merge::Merger,
    sentencepiece::SentencePiece,
    special_tokens::{Section, SpecialTokens},
    vocabulary::Vocabulary,
};

/// Whether the tokens that frame a text are added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddBos {
    /// As the model says: the start token for most, nothing for some, the end token too for a few.
    Yes,
    /// Nothing is added. For a text that goes on, or that a chat template made.
    No,
}

/// Turns text into token ids, and ids into text.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    pub(super) vocabulary: Vocabulary,
    /// Tokens found as written, pass by pass.
    pub(super) passes: Vec<SpecialTokens>,
    pub(super) engine: Engine,
    /// What goes before and after a text with [`AddBos::Yes`].
    pub(super) prefix: Vec<u32>,
    pub(super) suffix: Vec<u32>,
    pub(super) bos_id: Option<u32>,
    pub(super) end_ids: Vec<u32>,
    /// Whether decoding drops the space that encoding puts before a text.
    pub(super) drops_first_space: bool,
}

/// What turns a section of plain text into ids.
#[derive(Clone, Debug)]
pub(super) enum Engine {
    ByteLevel(ByteLevel),
    SentencePiece(SentencePiece),
    Library(Box<Library>),
}

/// A tokenizer of the `tokenizers` crate.
#[derive(Clone, Debug)]
pub(super) struct Library {
    pub(super) tokenizer: tokenizers::Tokenizer,
    /// Its added tokens, set to leave special ones in the text.
    pub(super) literal: AddedVocabulary,
}

impl Tokenizer {
    /// The tokenizer of a model: from a GGUF file's metadata, or from the `tokenizer.json` beside safetensors.
    ///
    /// # Errors
    /// There is none, it is damaged, or it is of a kind that isn't supported.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint.format() {
            Format::Gguf { .. } => gguf::tokenizer(checkpoint.metadata()),
            Format::Safetensors => {
                let bytes = checkpoint
                    .folder_file("tokenizer.json")?
                    .ok_or_else(|| TextError::NoTokenizer { folder: checkpoint.path().display().to_string() })?;
                let mut tokenizer = Self::from_json(&bytes)?;
                for file in ["tokenizer_config.json", "generation_config.json", "config.json"] {
                    if let Some(bytes) = checkpoint.folder_file(file)? {
                        json::add_configured_ids(&mut tokenizer, file, &bytes)?;
                    }
                }
                Ok(tokenizer)
            }
        }
    }

    /// A tokenizer from the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// It is damaged, or decodes in a way that isn't supported.
    ///
    /// ```
    /// use ironloom_lm::text::{AddBos, Specials, Tokenizer, TrainOptions, train_bpe};
    ///
    /// let json = train_bpe(["iron loom, iron loom"], &TrainOptions { vocab_size: 270, ..TrainOptions::default() })?;
    /// let tokenizer = Tokenizer::from_json(json.as_bytes())?;
    /// let ids = tokenizer.encode("iron loom", Specials::Literal, AddBos::Yes)?;
    /// assert!(ids.len() < 9);
    /// assert_eq!(tokenizer.decode(&ids), "iron loom");
    /// # Ok::<(), ironloom_lm::text::TextError>(())
    /// ```
    pub fn from_json(bytes: &[u8]) -> Result<Self> {
        json::tokenizer(bytes)
    }

    /// The ids of a text. Time is linear in the text but for a logarithm, also without white space.
    ///
    /// # Errors
    /// The text has 4 GiB or more, or the `tokenizers` crate refuses it.
    pub fn encode(&self, text: &str, specials: Specials, add_bos: AddBos) -> Result<Vec<u32>> {
        let limit = u32::MAX as usize - 1;
        if text.len() > limit {
            return Err(TextError::TooLong { what: "the text", bytes: text.len(), limit });
        }
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        if add_bos == AddBos::Yes {
            ids.extend_from_slice(&self.prefix);
        }
        match &self.engine {
            Engine::Library(library) => library.encode(text, specials, &mut ids)?,
            _ => self.encode_sections(
                &self.passes,
                Section::Text { text, first: true },
                specials,
                &mut Merger::default(),
                &mut ids,
            ),
        }
        if add_bos == AddBos::Yes {
            ids.extend_from_slice(&self.suffix);
        }
        Ok(ids)
    }

    fn encode_sections(
        &self,
        passes: &[SpecialTokens],
        section: Section<'_>,
        specials: Specials,
        merger: &mut Merger,
        ids: &mut Vec<u32>,
    ) {
        match (section, passes) {
            (Section::Token(id), _) => ids.push(id),
            (Section::Text { text, first }, [pass, later @ ..]) => {
                pass.split(text, first, specials, &mut |part| self.encode_sections(later, part, specials, merger, ids));
            }
            (Section::Text { text, first }, []) => match &self.engine {
                Engine::ByteLevel(engine) => engine.encode(&self.vocabulary, text, merger, ids),
                Engine::SentencePiece(engine) => engine.encode(&self.vocabulary, text, first, merger, ids),
                Engine::Library(_) => {}
            },
        }
    }

    /// The text of ids. Special tokens are left out; bytes that aren't UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            bytes.extend_from_slice(self.shown_bytes(id));
        }
        let start = usize::from(self.drops_first_space && bytes.first() == Some(&b' '));
        String::from_utf8_lossy(&bytes[start..]).into_owned()
    }

    /// The bytes that a token adds to a text: part of a character, a word, or nothing for a special token.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.shown_bytes(id).to_vec()
    }

    pub(super) fn shown_bytes(&self, id: u32) -> &[u8] {
        match self.vocabulary.kind(id) {
            TokenKind::Control | TokenKind::Unknown | TokenKind::Unused => &[],
            TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte => self.vocabulary.bytes(id),
        }
    }

    /// A token as it can be shown to a person: special tokens by name, part of a character with U+FFFD. `None` past the
    /// vocabulary.
    pub fn token_text(&self, id: u32) -> Option<String> {
        let known = (id as usize) < self.vocabulary.len();
        known.then(|| String::from_utf8_lossy(self.vocabulary.bytes(id)).into_owned())
    }

    /// What a token is for; `None` past the vocabulary.
    pub fn token_kind(&self, id: u32) -> Option<TokenKind> {
        ((id as usize) < self.vocabulary.len()).then(|| self.vocabulary.kind(id))
    }

    /// The id of a token found as written, such as `<|im_end|>`.
    pub fn special_id(&self, text: &str) -> Option<u32> {
        self.vocabulary.find(text.as_bytes()).filter(|&id| {
            matches!(self.vocabulary.kind(id), TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown)
        })
    }

    /// How many tokens there are. The model's output may be padded to more.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// The start token, whether or not it is added by default.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos_id
    }

    /// Whether [`AddBos::Yes`] puts the start token before a text.
    pub fn adds_bos(&self) -> bool {
        self.bos_id.is_some() && self.prefix.first().copied() == self.bos_id
    }

    /// Every token that ends an answer, ascending: end of text, of turn and of message.
    pub fn end_ids(&self) -> &[u32] {
        &self.end_ids
    }

    /// Makes `ids` end an answer, together with the marks that do so by their name.
    pub(super) fn set_end_ids(&mut self, ids: impl IntoIterator<Item = u32>) {
        let mut ends: BTreeSet<u32> = ids.into_iter().chain(self.end_ids.iter().copied()).collect();
        ends.extend(END_MARKS.iter().filter_map(|mark| self.special_id(mark)));
        // gpt-oss ends messages with <|end|> inside an answer that <|return|> or <|call|> ends.
        if self.special_id("<|return|>").is_some()
            && self.special_id("<|call|>").is_some()
            && let Some(end) = self.special_id("<|end|>")
        {
            ends.remove(&end);
        }
        self.end_ids = ends.into_iter().collect();
    }
}

/// Special tokens that end an answer in the model families that have them, whatever the file's end-of-text id is: files of
/// fine-tuned models often name only one of two.
const END_MARKS: &[&str] = &[
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
];

impl Library {
    fn encode(&self, text: &str, specials: Specials, ids: &mut Vec<u32>) -> Result<()> {
        let refuse = |reason: tokenizers::Error| TextError::Tokenize { reason: reason.to_string() };
        let added = match specials {
            Specials::Parse => self.tokenizer.get_added_vocabulary(),
            Specials::Literal => &self.literal,
        };
        let mut sections = added.extract_and_normalize(self.tokenizer.get_normalizer(), text);
        if let Some(pre_tokenizer) = self.tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut sections).map_err(refuse)?;
        }
        let model = self.tokenizer.get_model();
        sections.tokenize(|section| model.tokenize(section.get())).map_err(refuse)?;
        for (_, _, tokens) in sections.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            ids.extend(tokens.iter().flatten().map(|token| token.id));
        }
        Ok(())
    }
}
