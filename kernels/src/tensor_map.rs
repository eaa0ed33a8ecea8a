//! Tensor maps: where copies to shared memory find the rows of a tensor on Hopper. The driver makes them, on the host.

use bytemuck::NoUninit;
use cudarc::driver::sys;

use crate::{Result, driver::call};

/// bfloat16 `[batch, rows, columns]` on the device. Its place is a multiple of 16 bytes, strides are multiples of 8
/// elements, and nothing of it is empty.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor {
    pub(crate) address: u64,
    pub(crate) columns: usize,
    pub(crate) rows: usize,
    pub(crate) batch: usize,
    /// From one row to the next, in elements.
    pub(crate) row_stride: usize,
    /// From the rows of one to those of the next in the batch, in elements. Not read where `batch` is 1.
    pub(crate) batch_stride: usize,
}

/// What a kernel takes by value: `TensorMap` in `cuda/vocabulary/warpgroup.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct TensorMap([u64; 16]);

// SAFETY: sixteen numbers.
unsafe impl NoUninit for TensorMap {}

/// Columns of a box: a row of a panel in shared memory.
const BOX_COLUMNS: u32 = 64;
const ELEMENT_BYTES: u64 = 2;

impl TensorMap {
    /// For copies of `box_rows` rows, at most 256, of 64 columns to a panel; rows behind the last become zero.
    pub(crate) fn new(tensor: &Tensor, box_rows: u32) -> Result<Self> {
        let row_bytes = tensor.row_stride as u64 * ELEMENT_BYTES;
        let batch_bytes = match tensor.batch {
            1 => tensor.rows as u64 * row_bytes,
            _ => tensor.batch_stride as u64 * ELEMENT_BYTES,
        };
        let sizes = [tensor.columns as u64, tensor.rows as u64, tensor.batch as u64];
        let strides = [row_bytes, batch_bytes];
        let (block, steps) = ([BOX_COLUMNS, box_rows, 1], [1; 3]);
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        call!(cuTensorMapEncodeTiled(
            &mut map,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            sizes.len() as u32,
            tensor.address as *mut _,
            sizes.as_ptr(),
            strides.as_ptr(),
            block.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ))?;
        Ok(Self(map.opaque))
    }
}
