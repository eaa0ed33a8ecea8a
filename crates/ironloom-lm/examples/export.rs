//! Writes a model as GGUF in another type, or a GGUF file as a Hugging Face folder.
//!
//! `cargo run --release -p ironloom-lm --example export -- MODEL OUT.gguf Q4_K`, or `... -- MODEL.gguf FOLDER`.

use std::path::Path;

use ironloom_core::DType;
use ironloom_lm::export::{ExportOptions, to_gguf, to_hugging_face};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let report = match &arguments[..] {
        [model, out, dtype] => {
            let dtype = DType::from_name(dtype).ok_or("the type is one of those that `inspect` shows, such as Q8_0")?;
            to_gguf(&ironloom_weights::open(model)?, Path::new(out), &ExportOptions::new(dtype))?
        }
        [model, folder] => to_hugging_face(&ironloom_weights::open(model)?, Path::new(folder))?,
        _ => return Err("usage: export MODEL OUT.gguf TYPE, or export MODEL.gguf FOLDER".into()),
    };
    println!("{} tensors, {} bytes became {}", report.tensors, report.bytes_in, report.bytes_out);
    for line in report.kept.iter().chain(&report.notes) {
        println!("- {line}");
    }
    Ok(())
}
