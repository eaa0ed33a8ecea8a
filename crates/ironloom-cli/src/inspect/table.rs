//! The report of `inspect` as text for people.

use std::fmt::Write as _;

use ironloom_core::{format_bytes, grouped};

use super::report::{ModelReport, Part, Report, TokenizerReport};
use crate::figures::{counted, short_count};

/// The whole report.
pub(super) fn text(report: &Report) -> String {
    let mut page = Page::default();
    page.heading(&report.path);
    page.row("format", &report.format);
    page.row("size", format!("{} ({} bytes)", format_bytes(report.file_bytes), grouped(report.file_bytes)));
    match &report.model {
        Part::Known(model) => page.model(model),
        Part::Unusable { error } => page.row("cannot run", error),
    }
    match &report.tokenizer {
        Part::Known(tokenizer) => page.tokenizer(tokenizer),
        Part::Unusable { error } => page.row("tokenizer", error),
    }
    match &report.chat_template {
        Part::Known(present) => page.row("chat template", if *present { "yes" } else { "none" }),
        Part::Unusable { error } => page.row("chat template", error),
    }
    page.heading(&counted(report.tensor_count, "tensor"));
    for row in &report.types {
        let elements = short_count(row.elements);
        page.row(row.dtype, format!("{:>5}  {elements:>9} elements  {:>10}", row.tensors, format_bytes(row.bytes)));
    }
    if let Some(memory) = &report.memory {
        page.heading(&format!("memory for a context of {}", grouped(memory.context as u64)));
        let mut line = |name: &str, bytes| page.row(name, format!("{:>10}", format_bytes(bytes)));
        memory.parts.iter().for_each(|(name, bytes)| line(name, *bytes));
        line("together", memory.total_bytes);
        if let Some(available) = memory.available_bytes {
            line("available now", available);
        }
        if memory.fits == Some(false) {
            page.row("", "does not fit: use a shorter --context or fewer bits (--weights int4)");
        }
    }
    if let Some(metadata) = &report.metadata {
        page.heading(&format!("metadata: {}", counted(metadata.len(), "key")));
        for (key, value) in metadata {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            page.line(format_args!("  {key:<42} {value}"));
        }
    }
    if let Some(tensors) = &report.tensors {
        page.heading("tensors");
        let longest = tensors.iter().map(|tensor| tensor.name.chars().count()).max().unwrap_or(0);
        for tensor in tensors {
            let (name, shape) = (&tensor.name, format!("{:?}", tensor.shape));
            page.line(format_args!(
                "  {name:<longest$}  {shape:<16} {:<5} {:>10}",
                tensor.dtype,
                format_bytes(tensor.bytes)
            ));
        }
    }
    page.text
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "{}", line.to_string().trim_end());
    }

    fn heading(&mut self, text: &str) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        self.line(format_args!("{text}"));
    }

    fn row(&mut self, name: &str, value: impl std::fmt::Display) {
        self.line(format_args!("  {name:<24} {value}"));
    }

    fn model(&mut self, model: &ModelReport) {
        self.row("architecture", model.architecture);
        let total = grouped(model.parameters);
        if model.active_parameters == model.parameters {
            self.row("parameters", total);
        } else {
            self.row("parameters", format!("{total}, {} active for a token", grouped(model.active_parameters)));
        }
        self.row("vocabulary", grouped(model.vocab_size as u64));
        self.row("context", grouped(model.context_length as u64));
        self.row("layers", model.layers);
        self.row("width", model.width);
        let (heads, kv_heads) = (counted(model.heads, "query head"), counted(model.kv_heads, "kv head"));
        self.row("attention", format!("{heads}, {kv_heads}, {} wide", model.head_width));
        for (window, layers) in &model.windows {
            self.row("window", format!("{} positions in {}", grouped(*window as u64), counted(*layers, "layer")));
        }
        for rope in &model.ropes {
            let scaling = if rope.scaling == "None" { String::new() } else { format!(", scaling {}", rope.scaling) };
            self.row("rotary embedding", format!("base {}, {} elements{scaling}", rope.base, rope.width));
        }
        for (width, layers) in &model.dense_widths {
            self.row("feed-forward", format!("{width} wide, {}, in {}", model.activation, counted(*layers, "layer")));
        }
        if let Some(experts) = &model.experts {
            let shared = experts.shared_width.map(|width| format!(", a shared one {width} wide")).unwrap_or_default();
            let (count, per_token, width) = (experts.count, experts.per_token, experts.width);
            let layers = counted(experts.layers, "layer");
            self.row("experts", format!("{per_token} of {count} for a token, {width} wide{shared}, in {layers}"));
        }
        self.row("head", if model.tied_embeddings { "the embedding" } else { "its own" });
        if !model.options.is_empty() {
            self.row("options", model.options.join(", "));
        }
    }

    fn tokenizer(&mut self, tokenizer: &TokenizerReport) {
        self.row("tokenizer", format!("{}, {}", tokenizer.kind, counted(tokenizer.tokens, "token")));
        if let Some(start) = &tokenizer.start {
            self.row("start token", format!("{start}{}", if tokenizer.adds_start { "" } else { " (not added)" }));
        }
        self.row("end tokens", tokenizer.ends.join(" "));
    }
}
