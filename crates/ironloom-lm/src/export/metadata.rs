//! A model's description as GGUF metadata, by the keys that llama.cpp's converter writes and its loader reads.
//!
//! What a GGUF architecture has no key for is refused: its readers would run another model. What this crate's reader honours
//! and others don't is written, and noted for the person.

use ironloom_nn::{Activation, RopeOptions, RopeScaling};
use ironloom_weights::{Metadata, Value};

use super::refuse;
use crate::{Architecture, Config, FeedForwardConfig, Result};

/// What stands in the file besides weights and tokenizer.
pub(super) struct Description {
    pub(super) metadata: Metadata,
    /// By how much each rotary frequency is divided, for `rope_freqs.weight`.
    pub(super) rope_factors: Option<Vec<f32>>,
    /// What other readers will do differently.
    pub(super) notes: Vec<String>,
}

/// The description of `config`. `dense_width` is the feed-forward width that a configuration names for layers it doesn't have.
///
/// # Errors
/// GGUF has no architecture for the family, or no key for one of its options.
pub(super) fn describe(config: &Config, name: &str, dense_width: Option<usize>) -> Result<Description> {
    let architecture = gguf_architecture(config)?;
    refuse_what_has_no_key(config)?;
    let mut keys = Keys { architecture, metadata: Metadata::new(), notes: Vec::new() };
    keys.metadata.insert("general.architecture", architecture);
    keys.metadata.insert("general.type", "model");
    keys.metadata.insert("general.name", name);
    keys.count("block_count", config.layers.len())?;
    keys.count("context_length", config.context_length)?;
    keys.count("embedding_length", config.width)?;
    keys.count("feed_forward_length", feed_forward_length(config, dense_width))?;
    keys.count("attention.head_count", config.heads)?;
    keys.count("attention.head_count_kv", config.kv_heads)?;
    keys.count("attention.key_length", config.head_width)?;
    keys.count("attention.value_length", config.head_width)?;
    keys.set("attention.layer_norm_rms_epsilon", config.rms_epsilon);
    keys.count("vocab_size", config.vocab_size)?;
    keys.experts(config)?;
    keys.windows(config)?;
    let rope_factors = keys.ropes(config)?;
    Ok(Description { metadata: keys.metadata, rope_factors, notes: keys.notes })
}

/// The architecture's name in GGUF.
fn gguf_architecture(config: &Config) -> Result<&'static str> {
    Ok(match config.architecture {
        Architecture::Llama | Architecture::Mistral | Architecture::Mixtral => "llama",
        Architecture::Qwen2 => "qwen2",
        Architecture::Qwen3 => "qwen3",
        Architecture::Gemma3 => "gemma3",
        Architecture::InternLm2 => "internlm2",
        Architecture::Qwen2Moe => "qwen2moe",
        Architecture::Qwen3Moe => "qwen3moe",
        Architecture::Ernie45Moe | Architecture::IronloomDense | Architecture::IronloomMoe => {
            let reason = "its GGUF files are not written: keep it as a Hugging Face folder";
            return Err(refuse(config.architecture.name(), "GGUF", reason));
        }
    })
}

/// Options that readers of the architecture take as given.
fn refuse_what_has_no_key(config: &Config) -> Result<()> {
    let is_gemma = config.architecture == Architecture::Gemma3;
    let usual = if is_gemma { Activation::GeluTanh } else { Activation::Silu };
    if config.activation != usual {
        let what = format!("the activation {:?} of {}", config.activation, config.architecture);
        return Err(refuse(what, "GGUF", format!("readers of this architecture use {usual:?}")));
    }
    // Readers take 1 / sqrt(head width), and for the 62 layers of Gemma 3 27B alone 1 / sqrt(width / heads).
    let scale_width = match is_gemma && config.layers.len() == 62 {
        true => config.width as f64 / config.heads as f64,
        false => config.head_width as f64,
    };
    if config.attention_scale != (1.0 / scale_width.sqrt()) as f32 {
        let what = format!("an attention scale of {}", config.attention_scale);
        return Err(refuse(what, "GGUF", format!("readers of this architecture take 1 / sqrt({scale_width})")));
    }
    Ok(())
}

fn feed_forward_length(config: &Config, named: Option<usize>) -> usize {
    let dense = config.layers.iter().find_map(|layer| match layer.feed_forward {
        FeedForwardConfig::Dense { width } => Some(width),
        FeedForwardConfig::Routed => None,
    });
    let experts = config.experts.as_ref();
    match config.architecture {
        Architecture::Mixtral => experts.map_or(0, |experts| experts.width),
        _ => dense.or(named).unwrap_or_else(|| experts.map_or(0, |experts| experts.width * experts.per_row)),
    }
}

struct Keys {
    architecture: &'static str,
    metadata: Metadata,
    notes: Vec<String>,
}

impl Keys {
    fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.metadata.insert(format!("{}.{key}", self.architecture), value);
    }

    fn count(&mut self, key: &str, count: usize) -> Result<()> {
        let value = u32::try_from(count)
            .map_err(|_| refuse(format!("{key} of {count}"), "GGUF", format!("at most {} fits", u32::MAX)))?;
        self.set(key, value);
        Ok(())
    }

    fn experts(&mut self, config: &Config) -> Result<()> {
        let Some(experts) = &config.experts else { return Ok(()) };
        self.count("expert_count", experts.count)?;
        self.count("expert_used_count", experts.per_row)?;
        if config.architecture != Architecture::Mixtral {
            self.count("expert_feed_forward_length", experts.width)?;
        }
        if let Some(shared) = experts.shared {
            self.count("expert_shared_feed_forward_length", shared.width)?;
        }
        self.set("expert_weights_norm", experts.normalize);
        let usual = config.architecture != Architecture::Qwen2Moe;
        if experts.normalize != usual {
            let what = if experts.normalize { "divides" } else { "does not divide" };
            self.notes.push(format!(
                "the model {what} its experts' weights by their sum (norm_topk_prob); readers without the key \
                 {}.expert_weights_norm do the opposite",
                self.architecture
            ));
        }
        if config.layers.iter().any(|layer| layer.feed_forward != FeedForwardConfig::Routed) {
            self.notes.push(
                "some layers have no experts; readers that look for experts in every layer refuse the file".into(),
            );
        }
        Ok(())
    }

    fn windows(&mut self, config: &Config) -> Result<()> {
        let Some(window) = config.layers.iter().find_map(|layer| layer.window) else { return Ok(()) };
        let pattern = |period: usize| {
            config.layers.iter().enumerate().all(|(layer, options)| {
                let is_global = period > 0 && (layer + 1).is_multiple_of(period);
                options.window == if is_global { None } else { Some(window) }
            })
        };
        let is_gemma = config.architecture == Architecture::Gemma3;
        if is_gemma {
            let count = config.layers.len();
            let period = [6].into_iter().chain(1..=count + 1).find(|period| pattern(*period));
            let Some(period) = period else {
                let reason = "windowed and global layers must alternate with one period";
                return Err(refuse("this pattern of windows", "GGUF", reason));
            };
            self.count("attention.sliding_window", window)?;
            if period != 6 {
                self.count("attention.sliding_window_pattern", period)?;
                self.notes
                    .push(format!("every {period}th layer is global; readers without the key for it take every 6th"));
            }
            return Ok(());
        }
        if !pattern(0) {
            let reason = format!("{} files have one window for all layers", self.architecture);
            return Err(refuse("a window on some layers only", "GGUF", reason));
        }
        self.count("attention.sliding_window", window)?;
        self.notes.push(format!(
            "attention sees {window} positions ({}.attention.sliding_window); readers that know no window for this \
             architecture, llama.cpp among them, see all of the context",
            self.architecture
        ));
        Ok(())
    }

    /// The rotary keys; the divisors of Llama 3's scaling, which a tensor holds.
    fn ropes(&mut self, config: &Config) -> Result<Option<Vec<f32>>> {
        let Some(rope) = config.ropes.first() else { return Ok(None) };
        self.count("rope.dimension_count", rope.width)?;
        self.set("rope.freq_base", rope.base as f32);
        if let Some(local) = config.ropes.get(1) {
            if local.scaling != RopeScaling::None {
                let reason = "only the global layers' can be scaled";
                return Err(refuse("a scaled rotary embedding of windowed layers", "GGUF", reason));
            }
            if local.base != 1e4 {
                self.set("rope.freq_base_swa", local.base as f32);
                self.notes.push(format!(
                    "windowed layers turn by base {}; readers without the key rope.freq_base_swa take 10000",
                    local.base
                ));
            }
        }
        match &rope.scaling {
            RopeScaling::None => {}
            RopeScaling::Factors(factors) => return Ok(Some(factors.clone())),
            RopeScaling::Llama3 { .. } => return Ok(Some(llama3_divisors(rope))),
            RopeScaling::Linear { factor } => {
                self.set("rope.scaling.type", "linear");
                self.set("rope.scaling.factor", *factor as f32);
            }
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, attention_factor } => {
                if !truncate {
                    let reason = "readers of GGUF round the bounds of its ramp";
                    return Err(refuse("YaRN with truncate false", "GGUF", reason));
                }
                self.set("rope.scaling.type", "yarn");
                self.set("rope.scaling.factor", *factor as f32);
                self.set("rope.scaling.original_context_length", *original_context as u32);
                if (*beta_fast, *beta_slow) != (32.0, 1.0) {
                    self.set("rope.scaling.yarn_beta_fast", *beta_fast as f32);
                    self.set("rope.scaling.yarn_beta_slow", *beta_slow as f32);
                    self.notes.push(format!(
                        "YaRN's ramp runs from {beta_fast} to {beta_slow} rotations; readers without the keys yarn_beta_fast and \
                         yarn_beta_slow take 32 and 1 (llama.cpp has options for them)"
                    ));
                }
                // The key multiplies what follows from the factor.
                let usual = RopeScaling::yarn_attention_factor(*factor, None, None, None);
                if *attention_factor != usual {
                    self.set("rope.scaling.attn_factor", (attention_factor / usual) as f32);
                }
            }
        }
        Ok(None)
    }
}

/// By how much Llama 3's scaling divides each frequency: 1 for wavelengths below `original / high`, `factor` above
/// `original / low`, `1 / ((1 - k) / factor + k)` with `k = (original / wavelength - low) / (high - low)` between.
fn llama3_divisors(rope: &RopeOptions) -> Vec<f32> {
    let RopeScaling::Llama3 { factor, low_frequency_factor: low, high_frequency_factor: high, original_context } =
        rope.scaling
    else {
        return Vec::new();
    };
    let divisor = |pair: usize| {
        let wavelength = std::f64::consts::TAU * rope.base.powf(2.0 * pair as f64 / rope.width as f64);
        if wavelength < original_context / high {
            1.0
        } else if wavelength > original_context / low {
            factor
        } else {
            let kept = (original_context / wavelength - low) / (high - low);
            1.0 / ((1.0 - kept) / factor + kept)
        }
    };
    (0..rope.width / 2).map(|pair| divisor(pair) as f32).collect()
}

/// The parameters of Llama 3's scaling whose divisors are these: `rope_freqs.weight` names none. The ramp is taken to end
/// at 1 and 4 rotations over the original context, as in every released model.
pub(super) fn llama3_of_divisors(base: f64, width: usize, divisors: &[f32]) -> Option<RopeScaling> {
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    let factor = f64::from(divisors.iter().copied().fold(1.0, f32::max));
    let near = |original_context: f64| {
        let scaling =
            RopeScaling::Llama3 { factor, low_frequency_factor: LOW, high_frequency_factor: HIGH, original_context };
        let rope = RopeOptions { base, width, scaling };
        let made = llama3_divisors(&rope);
        let equal = made.len() == divisors.len() && made.iter().zip(divisors).all(|(a, b)| (a - b).abs() <= 1e-5 * b);
        equal.then_some(rope.scaling)
    };
    let between = divisors.iter().enumerate().filter(|(_, d)| f64::from(**d) > 1.0 && f64::from(**d) < factor);
    let originals = between.map(|(pair, divisor)| {
        let wavelength = std::f64::consts::TAU * base.powf(2.0 * pair as f64 / width as f64);
        let kept = (1.0 / f64::from(*divisor) - 1.0 / factor) / (1.0 - 1.0 / factor);
        (wavelength * (LOW + kept * (HIGH - LOW))).round()
    });
    originals.chain([8192.0]).find_map(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_scaling_is_found_again_from_its_divisors() {
        for (base, width, factor, original_context) in
            [(500_000.0, 128, 8.0, 8192.0), (500_000.0, 64, 32.0, 8192.0), (10_000.0, 16, 8.0, 64.0)]
        {
            let scaling =
                RopeScaling::Llama3 { factor, low_frequency_factor: 1.0, high_frequency_factor: 4.0, original_context };
            let divisors = llama3_divisors(&RopeOptions { base, width, scaling: scaling.clone() });
            assert!(divisors.iter().any(|divisor| *divisor > 1.0 && f64::from(*divisor) < factor), "a blend between");
            assert_eq!(llama3_of_divisors(base, width, &divisors), Some(scaling));
        }
        assert_eq!(llama3_of_divisors(1e4, 8, &[1.0, 1.5, 1.2, 3.0]), None, "no such scaling");
    }

    #[test]
    fn families_and_options_without_a_place_in_gguf_are_refused_by_name() {
        let refused = |config: &Config| describe(config, "m", None).err().map(|error| error.to_string());
        assert!(refused(&Config::moe_55m()).unwrap().contains("ernie4_5_moe"));
        let llama = Config { architecture: Architecture::Llama, ..Config::dense_102m() };
        assert_eq!(refused(&llama), None);
        let mut windowed = llama.clone();
        windowed.layers[3].window = Some(8);
        assert!(refused(&windowed).unwrap().contains("window"));
        let scaled = Config { attention_scale: 0.5, ..llama.clone() };
        assert!(refused(&scaled).unwrap().contains("attention scale"));
        let activated = Config { activation: Activation::GeluTanh, ..llama };
        assert!(refused(&activated).unwrap().contains("activation"));
    }
}
