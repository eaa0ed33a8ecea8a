//! Lists a model file's metadata and tensors: `cargo run -p ironloom-weights --example inspect -- MODEL`.

use std::{process::ExitCode, time::Instant};

use ironloom_weights::{Array, Checkpoint, Result, Value};

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("give a .gguf file, a .safetensors file or a model's folder");
        return ExitCode::from(2);
    };
    let start = Instant::now();
    match ironloom_weights::open(&path) {
        Ok(checkpoint) => {
            let milliseconds = start.elapsed().as_secs_f64() * 1e3;
            println!("{:?}, {} bytes, opened in {milliseconds:.1} ms", checkpoint.format(), checkpoint.file_bytes());
            if let Err(error) = list(&checkpoint) {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn list(checkpoint: &Checkpoint) -> Result<()> {
    for (key, value) in checkpoint.metadata().iter() {
        match value {
            Value::Array(array) => println!("{key} = {} of {}", array.kind(), array.len()),
            value => println!("{key} = {value:?}"),
        }
        if let Value::Array(Array::Strings(strings)) = value {
            println!("    {:?} …", strings.iter().take(8).collect::<Vec<_>>());
        }
    }
    for info in checkpoint.tensors() {
        println!("{:6} {:18} {:12} {}", info.dtype.name(), info.shape.to_string(), info.bytes()?, info.name);
    }
    Ok(())
}
