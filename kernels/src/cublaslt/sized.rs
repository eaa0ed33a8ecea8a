//! Products of training: each size has an algorithm of its own, the fastest as measured at its first use of those that give
//! the bits of the library's first proposal. So two runs may choose differently, and yet their results are the same bits.

use std::sync::PoisonError;

use cudarc::cublaslt::{result, sys};

use super::{CublasLt, Description, Layout, Places, Preference, Problem, failed, pieces_of_sums, workspace};
use crate::{Error, Form, Gpu, Multiply, Output, Result, driver::call, fingerprint::fingerprint};

impl CublasLt {
    /// A product whose bits may depend on its whole size, as those of training may. The same size gives the same bits each
    /// time, in each run: those of the algorithm that the library proposes first for exactly this size, which may split the
    /// sum. Of its other proposals that give the same bits the fastest is taken; which one that is is measured when a size
    /// is met first, on the operands of that call, unless a graph is being captured.
    ///
    /// # Errors
    /// A slice is too short, a stride or an address is not aligned, there is no room for the workspace, or the library
    /// fails or has no algorithm.
    pub fn multiply(&self, gpu: &Gpu, call: &Multiply<'_>) -> Result<()> {
        let ([a, b, out], start) = call.addresses()?;
        if call.size.contains(&0) {
            return Ok(());
        }
        let _turn = self.shared.bind()?;
        let shape = SizedShape::of(call);
        let problem = shape.problem()?;
        let places = Places { weight: b, x: a, start, out };
        let algorithm = self.sized_algorithm(gpu, call, &problem, places)?;
        let workspace_bytes = problem.check(self.handle, &algorithm).ok_or_else(|| shape.unsupported())?;
        let workspace = workspace(gpu, workspace_bytes)?;
        gpu.timed("cublasLtMatmul", Some(call.size), || self.run(&problem, &algorithm, places, workspace.as_ref()))
    }

    /// The algorithm of a size.
    fn sized_algorithm(
        &self,
        gpu: &Gpu,
        call: &Multiply<'_>,
        problem: &Problem,
        places: Places,
    ) -> Result<sys::cublasLtMatmulAlgo_t> {
        let shape = SizedShape::of(call);
        let mut known = self.sized.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&algorithm) = known.get(&shape) {
            return Ok(algorithm);
        }
        let out_alignment = 1 << shape.output.form().bytes(1, shape.out_stride)?.trailing_zeros().min(4);
        let proposals = self.proposals(problem, &Preference::new(out_alignment)?)?;
        let serves = |proposal: &&sys::cublasLtMatmulHeuristicResult_t| {
            proposal.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && problem.check(self.handle, &proposal.algo).is_some()
        };
        let mut served = proposals.iter().filter(serves).map(|proposal| proposal.algo).collect::<Vec<_>>();
        let first = *served.first().ok_or_else(|| shape.unsupported())?;
        served.retain(|other| pieces_of_sums(other) == pieces_of_sums(&first));
        let measurable = !ironloom_core::is_off("timed-products") && gpu.properties().driver >= (12, 8);
        let chosen = match served.len() {
            // While a graph is captured nothing runs. What is taken then is not kept, so that a later call may measure.
            2.. if measurable && self.shared.is_capturing()? => return Ok(first),
            2.. if measurable => self.fastest(gpu, call, problem, places, &served)?.unwrap_or(first),
            _ => first,
        };
        known.insert(shape, chosen);
        Ok(chosen)
    }

    /// The fastest of `algorithms` that give the bits of the first; none where there is no room to measure, or where these
    /// operands tell nothing: their product is zero. What `out` holds is the same afterwards where it is added to.
    fn fastest(
        &self,
        gpu: &Gpu,
        call: &Multiply<'_>,
        problem: &Problem,
        places: Places,
        algorithms: &[sys::cublasLtMatmulAlgo_t],
    ) -> Result<Option<sys::cublasLtMatmulAlgo_t>> {
        let [rows, columns, _] = call.size;
        let layout = [rows, call.out_stride, columns];
        let form = if call.output == Output::Bf16 { Form::Bf16 } else { Form::F32 };
        let most = algorithms.iter().filter_map(|algorithm| problem.check(self.handle, algorithm)).max().unwrap_or(0);
        let room = |bytes| match gpu.allocate_lasting(bytes, "choosing an algorithm of cuBLASLt") {
            Ok(buffer) => Ok(Some(buffer)),
            Err(Error::OutOfMemory { .. } | Error::OverBudget { .. }) => Ok(None),
            Err(other) => Err(other),
        };
        // Of each algorithm a number for the sums alone, and one for what they are added to.
        let (Some(workspace), Some(marks)) = (room(most)?, room(16 * algorithms.len())?) else { return Ok(None) };
        let run = |algorithm, places| self.run(problem, algorithm, places, Some(&workspace));
        let mark = |number: usize| fingerprint(gpu, call.out, form, layout, marks.part(8 * number, 8)?);
        let sums = Places { start: None, ..places };
        let in_place = places.start == Some(places.out);
        let region = call.out.part(0, form.bytes(1, (rows - 1) * call.out_stride + columns)?)?;
        // On the host, so that the choice takes no memory of the card.
        let mut before = vec![0; if in_place { region.bytes() } else { 0 }];
        gpu.read(region.part(0, before.len())?, &mut before)?;
        let measured = (|| {
            gpu.clear(marks.slice())?;
            let mut runs_at_all = vec![true; algorithms.len()];
            for (number, algorithm) in algorithms.iter().enumerate() {
                runs_at_all[number] = run(algorithm, sums).is_ok();
                mark(2 * number)?;
                if places.start.is_none() {
                    continue;
                }
                if in_place {
                    // Added to 0.747 in each place: an algorithm that starts its sums there rounds differently.
                    call!(cuMemsetD8Async(places.out, 0x3f, region.bytes(), self.shared.stream))?;
                }
                runs_at_all[number] &= run(algorithm, places).is_ok();
                mark(2 * number + 1)?;
            }
            let mut found = vec![[0u64; 2]; algorithms.len()];
            gpu.read(marks.slice(), bytemuck::cast_slice_mut(&mut found))?;
            if !runs_at_all[0] || found[0][0] == 0 {
                return Ok(None);
            }
            let equal = (0..algorithms.len()).filter(|&number| runs_at_all[number] && found[number] == found[0]);
            let equal: Vec<_> = equal.map(|number| &algorithms[number]).collect();
            fastest_of(gpu, &equal, |algorithm| run(algorithm, places)).map(|place| place.map(|place| *equal[place]))
        })();
        gpu.write(region, &before)?;
        measured
    }
}

/// All of a product that the choice of its algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SizedShape {
    size: [usize; 3],
    strides: [usize; 2],
    transposed: [bool; 2],
    out_stride: usize,
    output: Output,
    has_start: bool,
}

impl SizedShape {
    fn of(call: &Multiply<'_>) -> Self {
        Self {
            size: call.size,
            strides: [call.a.stride, call.b.stride],
            transposed: [call.a.transposed, call.b.transposed],
            out_stride: call.out_stride,
            output: call.output,
            has_start: call.output == Output::AddF32 || call.start.is_some(),
        }
    }

    /// The library's matrices are column-major: `out^T = b^T a^T`, and rows as they lie are columns.
    fn problem(&self) -> Result<Problem> {
        use sys::{cublasLtMatmulDescAttributes_t as Attribute, cudaDataType as Type};
        let out_type = if self.output == Output::Bf16 { Type::CUDA_R_16BF } else { Type::CUDA_R_32F };
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description =
            result::create_matmul_desc(compute, Type::CUDA_R_32F).map_err(failed("cublasLtMatmulDescCreate"))?;
        let description = Description(description);
        // `CUBLAS_OP_N` and `CUBLAS_OP_T`.
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(self.transposed[1]))?;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(self.transposed[0]))?;
        let [rows, columns, summed] = self.size;
        let layout = |transposed: bool, [inner, outer]: [usize; 2], stride| {
            let (inner, outer) = if transposed { (outer, inner) } else { (inner, outer) };
            Layout::new(Type::CUDA_R_16BF, inner, outer, stride)
        };
        Ok(Problem {
            description,
            weight: layout(self.transposed[1], [columns, summed], self.strides[1])?,
            x: layout(self.transposed[0], [summed, rows], self.strides[0])?,
            out: Layout::new(out_type, columns, rows, self.out_stride)?,
        })
    }

    fn unsupported(&self) -> Error {
        let [rows, columns, summed] = self.size;
        let what = format!("a product of {rows} by {summed} and {summed} by {columns}: it has no algorithm");
        Error::Unsupported { operation: "product by cuBLASLt", what }
    }
}

/// The place of the item that `run` takes the least time for, the first of equal ones.
fn fastest_of<T>(gpu: &Gpu, items: &[T], run: impl Fn(&T) -> Result<()>) -> Result<Option<usize>> {
    const ROUNDS: usize = 3;
    const LAUNCHES: usize = 3;
    let mut spans = Vec::with_capacity(ROUNDS * items.len());
    for _ in 0..ROUNDS {
        for (place, item) in items.iter().enumerate() {
            // The one that is not measured keeps the card busy until the others are in the stream.
            run(item)?;
            let from = gpu.record_event()?;
            for _ in 0..LAUNCHES {
                run(item)?;
            }
            spans.push((place, from, gpu.record_event()?));
        }
    }
    let mut best = vec![f64::INFINITY; items.len()];
    for (place, from, to) in &spans {
        best[*place] = best[*place].min(to.seconds_since(from)?);
    }
    Ok((0..items.len()).min_by(|&a, &b| best[a].total_cmp(&best[b])))
}
