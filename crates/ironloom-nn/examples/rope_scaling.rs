//! What each RoPE scaling does to the frequencies: `cargo run -p ironloom-nn --example rope_scaling`.

use ironloom_nn::{RopeOptions, RopeScaling};

fn main() -> Result<(), ironloom_nn::Error> {
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_frequency_factor: 1.0,
        high_frequency_factor: 4.0,
        original_context: 8192.0,
    };
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 32_768.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor: RopeScaling::yarn_attention_factor(4.0, None, None, None),
    };
    for (name, scaling) in [("none", RopeScaling::None), ("llama3", llama3), ("yarn", yarn)] {
        let (frequencies, factor) = RopeOptions { base: 500_000.0, width: 128, scaling }.inverse_frequencies()?;
        let shown: Vec<String> = frequencies.iter().step_by(9).map(|f| format!("{f:.2e}")).collect();
        println!("{name:<7} factor {factor:.4}: {}", shown.join(" "));
    }
    Ok(())
}
