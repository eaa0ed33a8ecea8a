//! Products of many rows by cuBLASLt, which is loaded when it is asked for.
//!
//! A row's result may not depend on the rows beside it, and the algorithm that the library would choose for a product
//! changes with the number of rows, and with it the order of sums. So each weight's shape has ONE algorithm, chosen by
//! the library's own estimate for a fixed number of rows, among those that do not split the sum; it serves every number
//! of rows. An algorithm that refuses a number of rows is passed over for all of them, and a shape that no algorithm
//! serves goes to the built-in kernel, always. Products of training have no such bond: `cublaslt/sized.rs`.
//!
//! The library's matrices are column-major. So `out = x weight^T` is asked for as `out^T = weight x^T`: the weight,
//! `inputs` by `outputs` with its stride, transposed, times x, `inputs` by `rows`.

mod descriptions;
mod sized;

use std::{
    collections::HashMap,
    ffi::c_void,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::cublaslt::{
    result::{self, CublasError},
    sys,
};

use self::{
    descriptions::{Description, Layout, Preference},
    sized::SizedShape,
};
use crate::{Buffer, Error, Gpu, Output, Product, Result, gemm, gpu::Shared};

/// The library, and the algorithm of each weight's shape.
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    /// The number of rows for which algorithms are chosen.
    choice_rows: usize,
    algorithms: Mutex<HashMap<Shape, Option<sys::cublasLtMatmulAlgo_t>>>,
    /// Those of products of one size.
    sized: Mutex<HashMap<SizedShape, sys::cublasLtMatmulAlgo_t>>,
    shared: Arc<Shared>,
}

// SAFETY: the library's handle may be used by any thread; each call binds the context first.
unsafe impl Send for CublasLt {}
// SAFETY: as above; the library is thread-safe.
unsafe impl Sync for CublasLt {}

/// All that the choice of an algorithm may depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    outputs: usize,
    inputs: usize,
    weight_stride: usize,
    x_stride: usize,
    out_stride: usize,
    output: Output,
    bias: bool,
}

/// The algorithm of a weight's shape, in the library's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Algorithm {
    /// The kind of kernel.
    pub id: u32,
    /// The tile of a block.
    pub tile: u32,
    /// The stages of its pipeline.
    pub stages: u32,
    /// The blocks of a cluster.
    pub cluster: u32,
}

/// What the library advises for Hopper. An algorithm that asks for more at some number of rows is passed over.
const WORKSPACE_BYTES: usize = 32 << 20;
/// How many of the library's proposals are looked at.
const PROPOSALS: usize = 16;
/// An algorithm has to serve each of these numbers of rows. Fewer go to the kernels for few rows.
const PROBED_ROWS: [usize; 7] = [17, 64, 100, 512, 1000, 4096, 65_536];

impl CublasLt {
    /// The number of rows for which algorithms are chosen where nothing else is said: the usual chunk of a prompt.
    pub const CHOICE_ROWS: usize = 512;

    /// Loads the library; algorithms will be chosen for products of `choice_rows` rows.
    ///
    /// # Errors
    /// [`Error::CublasLtMissing`] where it is not installed: use [`gemm`](crate::gemm) then. [`Error::CublasLt`] where
    /// it cannot serve the device, [`Error::OutOfMemory`] where it has no room now.
    pub fn open(gpu: &Gpu, choice_rows: usize) -> Result<Self> {
        // SAFETY: it only asks the loader for the library. Calling into a library that isn't there would panic.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::CublasLtMissing);
        }
        let shared = gpu.inner.shared.clone();
        let _turn = shared.bind()?;
        let handle = gpu.with_room("cuBLASLt", || result::create_handle().map_err(failed("cublasLtCreate")))?;
        Ok(Self { handle, choice_rows, algorithms: Mutex::default(), sized: Mutex::default(), shared })
    }

    /// A product; by the built-in kernel where no algorithm of the library serves the weight's shape.
    ///
    /// # Errors
    /// A slice is too short, a stride or an address is not aligned, there is no room for the workspace, or the library
    /// fails.
    pub fn matmul(&self, gpu: &Gpu, call: &Product<'_>) -> Result<()> {
        let addresses = call.addresses()?;
        if call.rows == 0 || call.outputs == 0 {
            return Ok(());
        }
        let _turn = self.shared.bind()?;
        let Some(algorithm) = self.algorithm_for(call)? else { return gemm(gpu, call) };
        let problem = Problem::new(&Shape::of(call), call.rows, addresses.bias)?;
        // Where the algorithm does not serve so few rows, they must not quietly be summed in another order.
        let workspace_bytes = problem.check(self.handle, &algorithm).ok_or_else(|| Error::Unsupported {
            operation: "product by cuBLASLt",
            what: format!("{} rows by the algorithm that serves other numbers of rows", call.rows),
        })?;
        let workspace = workspace(gpu, workspace_bytes)?;
        let start = (call.output == Output::AddF32).then_some(addresses.out);
        let places = Places { weight: addresses.weight, x: addresses.x, start, out: addresses.out };
        gpu.timed("cublasLtMatmul", Some([call.rows, call.outputs, call.inputs]), || {
            self.run(&problem, &algorithm, places, workspace.as_ref())
        })
    }

    /// Puts a product into the stream.
    fn run(
        &self,
        problem: &Problem,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        places: Places,
        workspace: Option<&Buffer>,
    ) -> Result<()> {
        let (alpha, beta) = (1.0f32, if places.start.is_some() { 1.0f32 } else { 0.0 });
        let (address, bytes) = workspace.map_or((0, 0), |buffer| (buffer.slice().address(), buffer.bytes()));
        // SAFETY: the descriptions are alive; whoever made `places` checked that the slices hold what they describe; the
        // workspace's memory is not used by anything else until what is in the stream now is done.
        unsafe {
            result::matmul(
                self.handle,
                problem.description.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                places.weight as *const c_void,
                problem.weight.0,
                places.x as *const c_void,
                problem.x.0,
                places.start.unwrap_or(places.out) as *const c_void,
                problem.out.0,
                places.out as *mut c_void,
                problem.out.0,
                algorithm,
                address as *mut c_void,
                bytes,
                self.shared.stream.cast(),
            )
        }
        .map_err(failed("cublasLtMatmul"))
    }

    /// What the library proposes, the best first.
    fn proposals(
        &self,
        problem: &Problem,
        preference: &Preference,
    ) -> Result<Vec<sys::cublasLtMatmulHeuristicResult_t>> {
        // SAFETY: a struct of numbers and one enumeration of which 0 is a value.
        let mut proposals: [sys::cublasLtMatmulHeuristicResult_t; PROPOSALS] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: the descriptions are alive, and there is room for as many proposals as are asked for.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                problem.description.0,
                problem.weight.0,
                problem.x.0,
                problem.out.0,
                problem.out.0,
                preference.0,
                PROPOSALS as i32,
                proposals.as_mut_ptr(),
                &mut count,
            )
        };
        match status {
            sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(proposals[..count as usize].to_vec()),
            sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => Ok(Vec::new()),
            other => Err(failed("cublasLtMatmulAlgoGetHeuristic")(CublasError(other))),
        }
    }

    /// The algorithm that serves products like `call` with any number of rows; none where the built-in kernel does.
    ///
    /// # Errors
    /// The library fails.
    pub fn algorithm(&self, call: &Product<'_>) -> Result<Option<Algorithm>> {
        let _turn = self.shared.bind()?;
        use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
        Ok(self.algorithm_for(call)?.map(|algorithm| {
            // A number that this version of the library does not know is shown as 0.
            let number = |attribute| config(&algorithm, attribute).unwrap_or(0);
            Algorithm {
                id: number(Attribute::CUBLASLT_ALGO_CONFIG_ID),
                tile: number(Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID),
                stages: number(Attribute::CUBLASLT_ALGO_CONFIG_STAGES_ID),
                cluster: cluster(&algorithm),
            }
        }))
    }

    fn algorithm_for(&self, call: &Product<'_>) -> Result<Option<sys::cublasLtMatmulAlgo_t>> {
        let shape = Shape::of(call);
        let mut algorithms = self.algorithms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&known) = algorithms.get(&shape) {
            return Ok(known);
        }
        let chosen = self.choose(&shape)?;
        algorithms.insert(shape, chosen);
        Ok(chosen)
    }

    /// The first of the library's proposals that sums in one piece and serves every number of rows.
    fn choose(&self, shape: &Shape) -> Result<Option<sys::cublasLtMatmulAlgo_t>> {
        // Sixteen bytes is what every launcher promises of addresses; a row of `out` may promise less.
        let preference = Preference::new(1 << shape.output.form().bytes(1, shape.out_stride)?.trailing_zeros().min(4))?;
        preference.set(
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            &(sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32),
        )?;
        // The bias's own address does not matter to the choice; it may not be null.
        let bias = if shape.bias { 256 } else { 0 };
        let problem = Problem::new(shape, self.choice_rows, bias)?;
        let proposals = self.proposals(&problem, &preference)?;
        let problems: Vec<Problem> =
            PROBED_ROWS.iter().map(|&rows| Problem::new(shape, rows, bias)).collect::<Result<_>>()?;
        let serves = |proposal: &&sys::cublasLtMatmulHeuristicResult_t| {
            proposal.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && sums_in_one_piece(&proposal.algo)
                && problems.iter().all(|problem| problem.check(self.handle, &proposal.algo).is_some())
        };
        Ok(proposals.iter().find(serves).map(|proposal| proposal.algo))
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // Nothing can be done about a failure at the end.
        let _turn = self.shared.bind();
        // SAFETY: the handle is alive until here.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl std::fmt::Debug for CublasLt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CublasLt(chosen for {} rows)", self.choice_rows)
    }
}

impl Shape {
    fn of(call: &Product<'_>) -> Self {
        Self {
            outputs: call.outputs,
            inputs: call.inputs,
            weight_stride: call.weight_stride,
            x_stride: call.x_stride,
            out_stride: call.out_stride,
            output: call.output,
            bias: call.bias.is_some(),
        }
    }
}

/// A product as the library has it described.
struct Problem {
    description: Description,
    weight: Layout,
    x: Layout,
    out: Layout,
}

impl Problem {
    fn new(shape: &Shape, rows: usize, bias: u64) -> Result<Self> {
        use sys::{cublasLtMatmulDescAttributes_t as Attribute, cudaDataType as Type};
        /// `CUBLAS_OP_T`.
        const TRANSPOSED: i32 = 1;
        let out_type = if shape.output == Output::Bf16 { Type::CUDA_R_16BF } else { Type::CUDA_R_32F };
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description =
            result::create_matmul_desc(compute, Type::CUDA_R_32F).map_err(failed("cublasLtMatmulDescCreate"))?;
        let description = Description(description);
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        if shape.bias {
            description.set(
                Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE,
                &(sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32),
            )?;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &(out_type as u32))?;
        }
        Ok(Self {
            description,
            weight: Layout::new(Type::CUDA_R_16BF, shape.inputs, shape.outputs, shape.weight_stride)?,
            x: Layout::new(Type::CUDA_R_16BF, shape.inputs, rows, shape.x_stride)?,
            out: Layout::new(out_type, shape.outputs, rows, shape.out_stride)?,
        })
    }

    /// The workspace that `algorithm` needs for it; none where it does not serve it.
    fn check(&self, handle: sys::cublasLtHandle_t, algorithm: &sys::cublasLtMatmulAlgo_t) -> Option<usize> {
        // SAFETY: a struct of numbers and one enumeration of which 0 is a value.
        let mut found: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: the handle, the descriptions and the algorithm are alive.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                handle,
                self.description.0,
                self.weight.0,
                self.x.0,
                self.out.0,
                self.out.0,
                algorithm,
                &mut found,
            )
        };
        (status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && found.workspaceSize <= WORKSPACE_BYTES)
            .then_some(found.workspaceSize)
    }
}

/// Where the operands of a product lie, by the library's names for them.
#[derive(Clone, Copy)]
struct Places {
    weight: u64,
    x: u64,
    /// What the product is added to.
    start: Option<u64>,
    out: u64,
}

fn workspace(gpu: &Gpu, bytes: usize) -> Result<Option<Buffer>> {
    match bytes {
        0 => Ok(None),
        bytes => Ok(Some(gpu.allocate(bytes, "the workspace of cuBLASLt")?)),
    }
}

/// Whether each sum is taken by one block from its first product to its last.
fn sums_in_one_piece(algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
    pieces_of_sums(algorithm) == Some((1, sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32))
}

/// Into how many pieces a sum is split, and how they are joined.
fn pieces_of_sums(algorithm: &sys::cublasLtMatmulAlgo_t) -> Option<(u32, u32)> {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let pieces = config(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM)?;
    Some((pieces.max(1), config(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME)?))
}

/// A number of an algorithm's configuration; none where the library has no such number.
fn config(algorithm: &sys::cublasLtMatmulAlgo_t, attribute: sys::cublasLtMatmulAlgoConfigAttributes_t) -> Option<u32> {
    let (mut value, mut written) = (0u32, 0);
    // SAFETY: the library writes at most the four bytes it is told of.
    let status = unsafe {
        sys::cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            attribute,
            (&raw mut value).cast(),
            size_of::<u32>(),
            &mut written,
        )
    };
    (status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS).then_some(value)
}

/// The shape of clusters, a number of two bytes.
fn cluster(algorithm: &sys::cublasLtMatmulAlgo_t) -> u32 {
    let attribute = sys::cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID;
    let (mut value, mut written) = (0u16, 0);
    // SAFETY: the library writes at most the two bytes it is told of.
    let status = unsafe {
        sys::cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            attribute,
            (&raw mut value).cast(),
            size_of::<u16>(),
            &mut written,
        )
    };
    if status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS { value.into() } else { 0 }
}

fn failed(call: &'static str) -> impl Fn(CublasError) -> Error {
    move |error| Error::CublasLt { call, status: error.0 as u32 }
}
