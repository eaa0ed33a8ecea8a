//! Lists a model file's metadata and tensors: `cargo run -p ironloom-weights --example inspect -- MODEL`.

use std::{error::Error, io::Write, process::ExitCode, time::Instant};

use ironloom_weights::{Array, Checkpoint, Value};

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("give a .gguf file, a .safetensors file or a model's folder");
        return ExitCode::from(2);
    };
    let start = Instant::now();
    let opened = ironloom_weights::open(&path);
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    match opened.map_err(Into::into).and_then(|checkpoint| list(&checkpoint, milliseconds)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn list(checkpoint: &Checkpoint, milliseconds: f64) -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{:?}, {} bytes, opened in {milliseconds:.1} ms", checkpoint.format(), checkpoint.file_bytes())?;
    for (key, value) in checkpoint.metadata().iter() {
        match value {
            Value::Array(array) => writeln!(out, "{key} = {} of {}", array.kind(), array.len())?,
            value => writeln!(out, "{key} = {value:?}")?,
        }
        if let Value::Array(Array::Strings(strings)) = value {
            writeln!(out, "    {:?} …", strings.iter().take(8).collect::<Vec<_>>())?;
        }
    }
    for info in checkpoint.tensors() {
        let (dtype, shape, bytes) = (info.dtype.name(), info.shape.to_string(), info.bytes()?);
        writeln!(out, "{dtype:6} {shape:18} {bytes:12} {}", info.name)?;
    }
    Ok(())
}
