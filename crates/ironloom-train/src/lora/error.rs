//! What can go wrong with adapters.

use std::path::PathBuf;

use ironloom_core::{DType, Shape};

/// What can go wrong with adapters and their files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // each field is what its name and the message say
pub enum LoraError {
    /// An option has a value that means nothing.
    #[error("the adapter's {option} is {value}, and it must be {limits}")]
    InvalidOption { option: &'static str, value: f64, limits: &'static str },
    /// No layer would get an adapter.
    #[error("no target says which layers get an adapter: name some, such as q_proj and v_proj, or all-linear")]
    NoTargets,
    /// A target that names no layer.
    #[error("target {target:?} names none of the model's linear layers; their names end with {}", endings.join(", "))]
    UnmatchedTarget { target: String, endings: Vec<String> },
    /// A folder without an adapter.
    #[error("{} has no {missing}: it is no adapter in PEFT's layout{}", folder.display(), match pickled {
        true => "; its adapter_model.bin is of an old kind that can run code: save it again with a newer peft, as safetensors",
        false => "",
    })]
    NotAnAdapter { folder: PathBuf, missing: &'static str, pickled: bool },
    /// The configuration isn't a JSON object.
    #[error("{} is not a JSON object: {source}", path.display())]
    Config { path: PathBuf, source: serde_json::Error },
    /// A field of the configuration is missing, or of another kind.
    #[error("{}: {field} should be {wanted}, and is {found}", path.display())]
    Field { path: PathBuf, field: &'static str, wanted: &'static str, found: String },
    /// The configuration asks for what isn't implemented; leaving it out would answer fluently and wrong.
    #[error("{} sets {field} to {value}, which is not supported: {way_out}", path.display())]
    Unsupported { path: PathBuf, field: String, value: String, way_out: &'static str },
    /// A tensor that is no part of an adapter of linear layers.
    #[error("{} holds tensor {tensor:?}, and only base_model.model.<layer>.lora_A.weight and .lora_B.weight are read", path.display())]
    UnknownTensor { path: PathBuf, tensor: String },
    /// One of a layer's two matrices is missing.
    #[error("{} holds one matrix of the adapter of {layer:?}, and not {missing}", path.display())]
    Unpaired { path: PathBuf, layer: String, missing: &'static str },
    /// A matrix of another shape than the rank says.
    #[error("{}: tensor {tensor:?} is {shape}, and with rank {rank} it must be {wanted}", path.display())]
    Shape { path: PathBuf, tensor: String, shape: Box<Shape>, rank: usize, wanted: &'static str },
    /// A matrix of integers.
    #[error("{}: tensor {tensor:?} is {dtype}, and F32, F16 and BF16 are read", path.display())]
    Type { path: PathBuf, tensor: String, dtype: DType },
    /// The file has no adapter at all.
    #[error("{} holds no tensors", path.display())]
    Empty { path: PathBuf },
    /// An adapter of another model: a layer that isn't there.
    #[error("the model has no layer {layer:?}: the adapter belongs to another model")]
    NoSuchLayer { layer: String },
    /// An adapter of another model: a layer of another shape.
    #[error(
        "the adapter's {layer:?} is for a layer of shape {expected:?}, and the model's is {found:?}: it belongs to another model"
    )]
    LayerShape { layer: String, expected: [usize; 2], found: [usize; 2] },
    /// A rank that products on a graphics card don't take.
    #[error("the adapters' rank is {rank}, and a graphics card takes multiples of 8")]
    CardRank { rank: usize },
    /// Adapters of some of a block's routed experts, which only the processor trains.
    #[error(
        "{with:?} gets an adapter and {without:?} does not: a graphics card trains adapters of all routed experts of a block or \
         of none. Target them by the end of their names, such as gate_proj, or train on the processor"
    )]
    CardExperts { with: String, without: String },
    /// A layer whose sides products on a graphics card don't take.
    #[error(
        "{layer:?} is of shape {sides:?}, and adapters on a graphics card are of layers whose sides are multiples of 8: target \
         other layers, or train on the processor"
    )]
    CardSides { layer: String, sides: [usize; 2] },
    /// A matrix to write has another length than its layer says.
    #[error("{matrix} of {layer:?} has {found} values to write, and {expected} are needed")]
    Length { layer: String, matrix: &'static str, expected: usize, found: usize },
}
