//! The benchmarks of a graphics card.
//!
//! Those that run on one model share a process, which loads it once: a model of 14 billion random weights takes longer to
//! make than to measure. Times of single kernels are those of the card, by events around replays of a graph; of whole models
//! they are the host's.

mod attention;
mod card;
mod decoding;
mod products;
mod training;

use anyhow::Result;
use ironloom_kernels::TileFormat;
use ironloom_lm::RandomWeights;
use ironloom_quant::WeightFormat;
use serde_json::json;

pub(crate) use card::Card;
pub(super) use card::Choice;
pub(crate) use training::TrainingRun;

use super::{
    benchmarks::{BANDWIDTH, Benchmark, PEAK},
    measurement::{Measurement, Work},
    training_shape::TrainingShape,
};

/// What a benchmark runs on a card.
#[derive(Clone, Copy, Debug)]
pub(super) enum Task {
    /// So many sequences, one token at a time.
    Decode(Choice, usize),
    /// A prompt of so many positions.
    Prompt(Choice, usize),
    /// Copying memory.
    Copy,
    /// The largest product.
    Peak,
    /// Products of one row.
    Gemv(TileFormat),
    /// Products of a prompt's rows.
    Gemm,
    /// Attention of many rows, of heads so wide.
    Attention(usize),
    /// Attention of few rows.
    AttentionFew,
    /// The way back of attention, of heads so wide.
    AttentionBackward(usize),
    /// Steps of training.
    Train(training::Case),
    /// Steps that keep little of the way forward.
    Checkpointing,
    /// Steps with small moments.
    Adam8,
    /// Steps of adapters beside frozen weights.
    Adapters(RandomWeights),
}

impl Task {
    /// The model it needs.
    fn model(self) -> Option<Choice> {
        match self {
            Self::Decode(choice, _) | Self::Prompt(choice, _) => Some(choice),
            _ => None,
        }
    }

    /// Whether it runs in the process of `before`, after it: where both need the same model or none, and the memory in use is
    /// not what either is about.
    pub(super) fn shares_process(self, before: Self) -> bool {
        let is_alone =
            |task: Self| matches!(task, Self::Train(_) | Self::Checkpointing | Self::Adam8 | Self::Adapters(_));
        !is_alone(self) && !is_alone(before) && self.model() == before.model()
    }

    /// Measures on `card`.
    pub(super) fn measure(self, card: &mut Card) -> Result<Measurement> {
        match self {
            Self::Decode(choice, sequences) => decoding::decode(card, choice, sequences),
            Self::Prompt(choice, length) => decoding::prompt(card, choice, length),
            Self::Copy => copy(card),
            Self::Peak => products::peak(card),
            Self::Gemv(format) => products::gemv(card, format),
            Self::Gemm => products::gemm(card),
            Self::Attention(head_width) => attention::forward(card, head_width),
            Self::AttentionFew => attention::few_rows(card),
            Self::AttentionBackward(head_width) => attention::backward(card, head_width),
            Self::Train(case) => training::train(card, case),
            Self::Checkpointing => training::checkpointing(card),
            Self::Adam8 => training::adamw_8bit(card),
            Self::Adapters(weights) => training::adapters(card, weights),
        }
    }
}

const F32: RandomWeights = RandomWeights::As(WeightFormat::F32);
const BF16: RandomWeights = RandomWeights::As(WeightFormat::Bf16);
const INT8: RandomWeights = RandomWeights::As(WeightFormat::Int8);
const NF4: RandomWeights = RandomWeights::As(WeightFormat::Nf4);
const TOKENS: &str = "tokens/s";
const BYTES: &str = "GB/s";
const OPERATIONS: &str = "TFLOP/s";

/// Every benchmark of a card, the probes first; those of one model side by side.
pub(super) const ALL: [Benchmark; 39] = [
    on_card(BANDWIDTH, "1 GiB read and written again and again, both counted", BYTES, Task::Copy),
    on_card(PEAK, "the bfloat16 product of two matrices of 8192 by 8192", OPERATIONS, Task::Peak),
    on_card("gemv-bf16", "one row's products of the 3B shape, bfloat16", BYTES, Task::Gemv(TileFormat::Bf16)),
    on_card("gemv-int8", "the same, int8 rows", BYTES, Task::Gemv(TileFormat::Int8)),
    on_card("gemv-nf4", "the same, NF4 blocks", BYTES, Task::Gemv(TileFormat::Nf4)),
    on_card("gemv-q4_0", "the same, Q4_0", BYTES, Task::Gemv(TileFormat::Q4_0)),
    on_card("gemv-q4_k", "the same, Q4_K", BYTES, Task::Gemv(TileFormat::Q4_K)),
    on_card("gemv-q6_k", "the same, Q6_K", BYTES, Task::Gemv(TileFormat::Q6_K)),
    on_card("gemm", "products of 512 rows of the 3B shape", OPERATIONS, Task::Gemm),
    on_card("attention-few", "one row after 32,768 positions, 16 heads, 2 kv heads", BYTES, Task::AttentionFew),
    on_card("attention-forward-64", "16 x 16 heads of 64, 4,096 positions, causal", OPERATIONS, Task::Attention(64))
        .beside(&["attention-forward-64"]),
    on_card("attention-forward-128", "16 x 16 heads of 128, 4,096 positions, causal", OPERATIONS, Task::Attention(128))
        .beside(&["attention-forward-128"]),
    on_card("attention-backward-64", "the way back, heads of 64", OPERATIONS, Task::AttentionBackward(64))
        .beside(&["attention-backward-64"]),
    on_card("attention-backward-128", "the way back, heads of 128", OPERATIONS, Task::AttentionBackward(128))
        .beside(&["attention-backward-128"]),
    on_card("decode-smollm2-1", "SmolLM2-135M Q4_1: 128 tokens after 512", TOKENS, Task::Decode(Choice::SmolLm2, 1)),
    on_card("decode-moe55m-bf16-1", "moe-55m, bfloat16", TOKENS, Task::Decode(Choice::Moe55M(BF16), 1))
        .beside(&["decode-moe55m-bf16-1"]),
    on_card("decode-moe55m-bf16-16", "the same, 16 sequences", TOKENS, Task::Decode(Choice::Moe55M(BF16), 16))
        .beside(&["decode-moe55m-bf16-16"]),
    on_card("decode-moe55m-int8-1", "moe-55m, int8 rows", TOKENS, Task::Decode(Choice::Moe55M(INT8), 1))
        .beside(&["decode-moe55m-bf16-1"]),
    on_card("decode-3b-bf16-1", "Qwen2.5-3B shape, bfloat16", TOKENS, Task::Decode(Choice::Qwen3B(BF16), 1))
        .beside(&["decode-3b-bf16-1"]),
    on_card("decode-3b-bf16-16", "the same, 16 sequences", TOKENS, Task::Decode(Choice::Qwen3B(BF16), 16))
        .beside(&["decode-3b-bf16-16"]),
    on_card("prefill-3b-bf16-512", "the same, a prompt of 512", TOKENS, Task::Prompt(Choice::Qwen3B(BF16), 512))
        .beside(&["prefill-3b-bf16-512"]),
    on_card("prefill-3b-bf16-4096", "the same, a prompt of 4,096", TOKENS, Task::Prompt(Choice::Qwen3B(BF16), 4096))
        .beside(&["prefill-3b-bf16-4096"]),
    on_card("decode-3b-nf4-1", "Qwen2.5-3B shape, NF4", TOKENS, Task::Decode(Choice::Qwen3B(NF4), 1))
        .beside(&["decode-3b-nf4-1", "decode-3b-bf16-1"]),
    on_card("decode-3b-nf4-16", "the same, 16 sequences", TOKENS, Task::Decode(Choice::Qwen3B(NF4), 16))
        .beside(&["decode-3b-nf4-16", "decode-3b-bf16-16"]),
    on_card("prefill-3b-nf4-512", "the same, a prompt of 512", TOKENS, Task::Prompt(Choice::Qwen3B(NF4), 512)),
    on_card(
        "decode-3b-q4k-1",
        "Qwen2.5-3B shape, the mix of a Q4_K_M file",
        TOKENS,
        Task::Decode(Choice::Qwen3B(RandomWeights::Q4_K_M), 1),
    )
    .beside(&["decode-3b-bf16-1"]),
    on_card("decode-3b-int8-1", "Qwen2.5-3B shape, int8 rows", TOKENS, Task::Decode(Choice::Qwen3B(INT8), 1))
        .beside(&["decode-3b-bf16-1"]),
    on_card("decode-14b-nf4-1", "Qwen2.5-14B shape, NF4", TOKENS, Task::Decode(Choice::Qwen14B(NF4), 1))
        .beside(&["decode-14b-nf4-1", "decode-14b-bf16-1"]),
    on_card("decode-14b-nf4-16", "the same, 16 sequences", TOKENS, Task::Decode(Choice::Qwen14B(NF4), 16)),
    train("train-dense-102m-4x1024", "AdamW steps of 4 x 1,024 tokens, dense-102m", TrainingShape::Dense102M, 4, 1024)
        .beside(&["train-dense-102m-4x1024"]),
    train("train-dense-102m-32x1024", "the same, 32 x 1,024 tokens", TrainingShape::Dense102M, 32, 1024)
        .beside(&["train-dense-102m-32x1024"]),
    train("train-moe-55m-4x1024", "AdamW steps of 4 x 1,024 tokens, moe-55m", TrainingShape::Moe55M, 4, 1024)
        .beside(&["train-moe-55m-4x1024"]),
    train("train-moe-55m-32x1024", "the same, 32 x 1,024 tokens", TrainingShape::Moe55M, 32, 1024)
        .beside(&["train-moe-55m-32x1024"]),
    train("train-dense-1.2b-8x2048", "AdamW steps of 8 x 2,048 tokens, dense-1.2b", TrainingShape::Dense1B2, 8, 2048)
        .beside(&["train-dense-1.2b-8x2048"]),
    on_card("checkpointing-16x512", "steps of moe-55m, blocks run again on the way back", TOKENS, Task::Checkpointing),
    on_card("adam8-4x1024", "steps of moe-55m, moments of a byte", TOKENS, Task::Adam8),
    on_card(
        "lora-fp32",
        "adapters of attention beside moe-55m, 4 x 512, F32 (experts bfloat16)",
        TOKENS,
        Task::Adapters(F32),
    ),
    on_card("lora-int8", "the same, int8 rows", TOKENS, Task::Adapters(INT8)),
    on_card("lora-nf4", "the same, NF4 blocks", TOKENS, Task::Adapters(NF4)),
];

const fn on_card(name: &'static str, about: &'static str, unit: &'static str, task: Task) -> Benchmark {
    Benchmark::on_card(name, about, unit, task)
}

const fn train(
    name: &'static str,
    about: &'static str,
    shape: TrainingShape,
    documents: usize,
    length: usize,
) -> Benchmark {
    on_card(name, about, TOKENS, Task::Train(training::Case { shape, documents, length }))
}

/// GB/s of reading and writing every number of 1 GiB. (The driver's own copies reach 2.7 TB/s where kernels reach over 4.)
fn copy(card: &Card) -> Result<Measurement> {
    const BYTES: usize = 1 << 30;
    const LAUNCHES: usize = 4;
    let data = card.noise(BYTES)?;
    card.measure(Work::Unbounded, json!({"bytes": BYTES}), || {
        let launch = |_| Ok(ironloom_kernels::scale(&card.gpu, data.slice(), 1.0, BYTES / 4)?);
        Ok(2.0 * BYTES as f64 / card.seconds_of(LAUNCHES, launch)? / 1e9)
    })
}
