//! Conversations: which tokens of a rendered conversation are the assistant's answers.
//!
//! In: messages and a chat template. Out: exactly the ids that [`encode_chat`](ironloom_lm::text::encode_chat) gives up to the
//! last answer's end, and which of them are learned: of each answer what the model has to write when it is asked, which is
//! what follows the text that the template makes of the messages before, with the start of an answer; up to and with the
//! token that ends a turn.
//!
//! The template is only ever run, never read: the text of the messages up to an answer, with the answer, must begin with the text
//! before it, and the whole must begin with both. A template that fails this (Qwen 3 drops the thoughts of earlier
//! answers once another question follows) is refused rather than cut at a wrong place.

use std::ops::Range;

use ironloom_lm::text::{AddBos, AddGenerationPrompt, ChatTemplate, Message, Specials, Tokenizer};
use serde::{Deserialize, Serialize};

use super::{
    DataError, Document, Place,
    source::{encode, encode_continuation},
};
use crate::Result;

/// Which of the assistant's messages are learned. One that starts the conversation answers nothing and never is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answers {
    /// All, in one document. Some templates rewrite earlier turns and can't do this.
    #[default]
    All,
    /// All, each in a document of its own with the messages before it. For every template.
    Each,
    /// The last.
    Last,
}

/// Hands the documents of a conversation to `each`.
pub(super) fn read(
    messages: &[Message],
    answers: Answers,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    place: &Place,
    each: &mut dyn FnMut(Document, &Place) -> Result<()>,
) -> Result<()> {
    let all: Vec<usize> = (1..messages.len()).filter(|&number| messages[number].role == "assistant").collect();
    let Some(&last) = all.last() else {
        return Err(DataError::NoAnswer { place: place.clone() }.into());
    };
    let renderer = Renderer { tokenizer, template, place };
    match answers {
        Answers::All => each(renderer.document(&messages[..=last], &all)?, place),
        Answers::Last => each(renderer.document(&messages[..=last], &[last])?, place),
        Answers::Each => {
            all.iter().try_for_each(|&number| each(renderer.document(&messages[..=number], &[number])?, place))
        }
    }
}

struct Renderer<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    place: &'a Place,
}

impl Renderer<'_> {
    /// A conversation that ends with an answer, of which the messages numbered in `learned` are learned.
    fn document(&self, messages: &[Message], learned: &[usize]) -> Result<Document> {
        let text = self.render(messages, AddGenerationPrompt::No)?;
        let answers: Result<Vec<Range<usize>>> =
            learned.iter().map(|&number| self.answer(messages, number, &text)).collect();
        let answers = answers?;
        if let Some(at) = answers.windows(2).position(|pair| pair[0].end > pair[1].start) {
            return Err(DataError::RewrittenTurns { place: self.place.clone(), message: learned[at] + 1 }.into());
        }
        let (mut ids, answers) = self.encode(&text, &answers)?;
        let mut is_learned = vec![false; ids.len()];
        for tokens in answers {
            let end = self.end_of_turn(&ids[tokens.clone()]);
            is_learned[tokens.start..tokens.start + end].fill(true);
        }
        let end = is_learned.iter().rposition(|&learned| learned).map_or(0, |token| token + 1);
        if end == 0 {
            return Err(DataError::NoAnswer { place: self.place.clone() }.into());
        }
        ids.truncate(end);
        is_learned.truncate(end);
        Ok(Document { ids, learned: Some(is_learned) })
    }

    /// How many of an answer's ids the model has to write: up to and with the one that ends the turn. After it a template may
    /// write more, such as a line's end and a mark for the end of all. All where no id ends the turn.
    fn end_of_turn(&self, ids: &[u32]) -> usize {
        let ends = |id: &u32| self.tokenizer.end_ids().contains(id);
        let is_blank = |id: &u32| self.tokenizer.token_text(*id).is_none_or(|text| text.trim().is_empty());
        let said = ids.iter().rposition(|id| !ends(id) && !is_blank(id)).map_or(0, |last| last + 1);
        let after = ids[said..].iter().position(ends).map(|first| said + first);
        after.or_else(|| ids.iter().rposition(ends)).map_or(ids.len(), |end| end + 1)
    }

    /// Where an answer lies in the text of the whole conversation.
    fn answer(&self, messages: &[Message], number: usize, text: &str) -> Result<Range<usize>> {
        let (before, with) = (&messages[..number], &messages[..=number]);
        let written = self.render(with, AddGenerationPrompt::No)?;
        let rewritten = |message: usize| DataError::RewrittenTurns { place: self.place.clone(), message };
        // Some templates end every conversation with one more mark.
        let marks = self.tokenizer.end_ids().iter().filter_map(|&id| self.tokenizer.token_text(id));
        let marks = [String::new()].into_iter().chain(marks);
        let beginning =
            marks.filter_map(|mark| written.strip_suffix(&*mark)).find(|&written| text.starts_with(written));
        let written = beginning.ok_or_else(|| rewritten(number + 1))?;
        let asked = self.render(before, AddGenerationPrompt::Yes)?;
        if let Some(answer) = written.strip_prefix(&asked) {
            // Templates trim and cut out thoughts; the end of an answer stays.
            let end = messages[number].content.split_whitespace().next_back().unwrap_or_default();
            return match answer.contains(end) {
                true => Ok(asked.len()..written.len()),
                false => Err(DataError::AnswerLeftOut { place: self.place.clone(), message: number + 1 }.into()),
            };
        }
        let told = self.render(before, AddGenerationPrompt::No)?;
        let (Some(prompt), Some(start)) = (asked.strip_prefix(&told), written.strip_prefix(&told)) else {
            return Err(rewritten(number).into());
        };
        let written = start.chars().take(prompt.chars().count() + 8).collect();
        let (place, prompt) = (self.place.clone(), prompt.to_owned());
        Err(DataError::AnswerStart { place, message: number + 1, prompt, written }.into())
    }

    /// The ids of a text, and where parts of it lie in them.
    ///
    /// A part begins and ends where the ids of the text before it do. If those are not how the whole text's ids begin, because a
    /// token spans the cut, the text is tokenized in pieces between the cuts: what a model sees when it is asked is the
    /// text up to a cut.
    fn encode(&self, text: &str, parts: &[Range<usize>]) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        let plain = |text: &str| encode(self.tokenizer, text, Specials::Parse, AddBos::No, self.place);
        let ids = plain(text)?;
        let place = |cut: usize| -> Result<Option<usize>> {
            let before = plain(&text[..cut])?;
            Ok(ids.starts_with(&before).then_some(before.len()))
        };
        let mut found = Vec::with_capacity(parts.len());
        for part in parts {
            if let (Some(start), Some(end)) = (place(part.start)?, place(part.end)?) {
                found.push(start..end);
            }
        }
        if found.len() == parts.len() {
            return Ok((ids, found));
        }
        let (mut ids, mut found, mut end) = (Vec::new(), Vec::new(), 0);
        let mut piece = |piece: Range<usize>| -> Result<Range<usize>> {
            let start = ids.len();
            ids.extend(match piece.start {
                0 => plain(&text[piece])?,
                _ => encode_continuation(self.tokenizer, &text[piece], Specials::Parse, self.place)?,
            });
            Ok(start..ids.len())
        };
        for part in parts {
            piece(end..part.start)?;
            found.push(piece(part.clone())?);
            end = part.end;
        }
        Ok((ids, found))
    }

    fn render(&self, messages: &[Message], add_generation_prompt: AddGenerationPrompt) -> Result<String> {
        let text = self.template.render(messages, add_generation_prompt);
        Ok(text.map_err(|source| DataError::Text { place: self.place.clone(), source })?)
    }
}
