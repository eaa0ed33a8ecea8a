//! The CUDA side of Ironloom: one device, its memory, captured graphs, and one launcher for each kernel.
//!
//! [`Gpu`] is a context with one stream. Memory comes as [`Buffer`]s; a launcher takes [`Slice`]s of them and checks that
//! each holds what the kernel will touch. The kernels of `cuda/*.cu` are compiled by the build where it finds `nvcc` and are
//! embedded for every architecture; nothing of CUDA is needed to build or to link, and the driver and cuBLASLt are loaded
//! when a device is opened. Each thing that can be missing has its own [`Error`].
//!
//! The crate knows rows and widths; it knows no model and no tensor.
//!
//! ```no_run
//! use ironloom_kernels::Gpu;
//! let gpu = Gpu::open(0)?;
//! let buffer = gpu.upload(&[1, 2, 3, 4], "an example")?;
//! let mut back = [0; 4];
//! gpu.read(buffer.slice(), &mut back)?;
//! assert_eq!(back, [1, 2, 3, 4]);
//! # Ok::<(), ironloom_kernels::Error>(())
//! ```
#![deny(missing_docs)]

mod adamw_8bit;
mod add;
mod advance;
mod arena;
mod argmax;
mod attention;
mod attention_backward_hopper;
mod attention_few;
mod attention_hopper;
mod attention_training;
mod buffer;
mod checks;
mod column_sums;
mod cross_entropy;
mod cublaslt;
mod dequantize;
mod driver;
mod dropout;
mod embedding;
mod embedding_backward;
mod error;
mod fingerprint;
mod form;
mod gated_activation;
mod gated_activation_backward;
mod gated_rows_backward;
mod gather_rows;
mod gemm;
mod gemm_transposed;
mod gpu;
mod gradient_norm;
mod graph;
mod images;
mod launch;
mod linear;
mod linear_plain;
mod mapped;
mod muon;
mod optimizer;
mod profile;
mod rmsnorm;
mod rmsnorm_backward;
mod rope_append;
mod rope_phases;
mod rope_training;
mod route_experts;
mod route_training;
mod routed;
mod routed_training;
mod sample;
mod tensor_map;
mod turn;
mod weights;

pub use adamw_8bit::{AdamW8bit, adamw_8bit};
pub use add::{AddGatedRows, add, add_bias, add_gated_rows, convert, scale};
pub use advance::{Advance, Report, advance};
pub use argmax::{Argmax, argmax, argmax_workspace};
pub use attention::{Attention, Mask, attention, attention_with};
pub use attention_few::{AttentionFew, FewShape, FewWorkspace, attention_few};
pub use attention_hopper::Kernels;
pub use attention_training::{
    AttentionBounds, AttentionTraining, AttentionTrainingBackward, attention_training, attention_training_backward,
    attention_training_backward_with, attention_training_with,
};
pub use buffer::{Buffer, Slice, lasting_bytes, pass_bytes};
pub use column_sums::{ColumnSums, column_sums, column_sums_workspace};
pub use cross_entropy::{CrossEntropy, LogitsBecome, cross_entropy};
pub use cublaslt::{Algorithm, CublasLt};
pub use dequantize::{Dequantize, dequantize};
pub use dropout::{Dropout, dropout};
pub use embedding::{Embedding, embedding};
pub use embedding_backward::{EmbeddingBackward, embedding_backward, embedding_backward_workspace};
pub use error::{Error, Result};
pub use fingerprint::fingerprint;
pub use form::Form;
pub use gated_activation::{Activation, GatedActivation, gated_activation};
pub use gated_activation_backward::{
    Columns, GatedActivationBackward, gated_activation_backward, gated_activation_backward_dots,
};
pub use gated_rows_backward::{GatedRowsBackward, gated_rows_backward};
pub use gather_rows::{GatherRows, gather_rows};
pub use gemm::{Multiply, Operand, Output, Product, gemm};
pub use gemm_transposed::gemm_transposed;
pub use gpu::{Gpu, Properties};
pub use gradient_norm::{
    JudgeStep, LossTotals, StepLimits, StepResult, StepValues, judge_step, sum_of_squares, sum_of_squares_pieces,
};
pub use graph::{Event, Graph};
pub use images::{Image, images};
pub use linear::{
    Linear, LinearRoutedDown, LinearRoutedGated, MOST_ROWS, Matrix, Then, linear, linear_routed_down,
    linear_routed_gated,
};
pub use linear_plain::{LinearPlain, linear_plain};
pub use mapped::Mapped;
pub use muon::{Muon, muon, muon_workspace};
pub use optimizer::{AdamW, AdamWRule, Lion, ParameterRange, Sgd, WeightAverage, adamw, lion, sgd, weight_average};
pub use profile::KernelTime;
pub use rmsnorm::{RmsNorm, RmsNormAdd, rmsnorm, rmsnorm_add};
pub use rmsnorm_backward::{NormWeightGradient, RmsNormBackward, rmsnorm_backward, rmsnorm_backward_workspace};
pub use rope_append::{RopeAppend, rope_append};
pub use rope_phases::{RopePhases, rope_phases};
pub use rope_training::{
    HeadNorm, HeadNormBackward, RopeTraining, RopeTrainingBackward, rope_training, rope_training_backward,
    rope_training_workspace,
};
pub use route_experts::{RouteExperts, route_experts};
pub use route_training::{RouterGradient, RouterLosses, router_gradient, router_losses, router_losses_workspace};
pub use routed::{
    RoutedCombine, RoutedDown, RoutedGated, RoutedSort, routed_combine, routed_down, routed_gated, routed_sort,
};
pub use routed_training::{
    GroupedInputGradient, GroupedProduct, GroupedWeightGradient, RoutedSpread, RoutedSum, grouped_input_gradient,
    grouped_product, grouped_weight_gradient, grouped_weight_gradient_workspace, routed_spread, routed_sum,
};
pub use sample::{Sample, SampleOptions, sample, sample_workspace};
pub use weights::{TileFormat, WeightLayout};
