//! The library's descriptions of a product, its matrices, and what is asked of an algorithm: each is destroyed with its owner.

use cudarc::cublaslt::{result, sys};

use super::{WORKSPACE_BYTES, failed};
use crate::{Error, Result};

pub(super) struct Description(pub(super) sys::cublasLtMatmulDesc_t);

impl Description {
    pub(super) fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<()> {
        // SAFETY: the description is alive, and the library reads as many bytes as the value has.
        unsafe {
            result::set_matmul_desc_attribute(self.0, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
        }
        .map_err(failed("cublasLtMatmulDescSetAttribute"))
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: it is alive until here.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

pub(super) struct Layout(pub(super) sys::cublasLtMatrixLayout_t);

impl Layout {
    /// A column-major matrix of `rows` by `columns`, `stride` elements from a column to the next.
    pub(super) fn new(element: sys::cudaDataType, rows: usize, columns: usize, stride: usize) -> Result<Self> {
        let stride = i64::try_from(stride).map_err(|_| Error::SizeOverflow)?;
        let layout = result::create_matrix_layout(element, rows as u64, columns as u64, stride);
        layout.map(Self).map_err(failed("cublasLtMatrixLayoutCreate"))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: it is alive until here.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

pub(super) struct Preference(pub(super) sys::cublasLtMatmulPreference_t);

impl Preference {
    /// The workspace allowed, and the alignment of addresses: 16 bytes of operands, `out_alignment` of the result.
    pub(super) fn new(out_alignment: u32) -> Result<Self> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let made = Self(result::create_matmul_pref().map_err(failed("cublasLtMatmulPreferenceCreate"))?);
        made.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE_BYTES)?;
        for (attribute, bytes) in [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, 16u32),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 16),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out_alignment),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_alignment),
        ] {
            made.set(attribute, &bytes)?;
        }
        Ok(made)
    }

    pub(super) fn set<T>(&self, attribute: sys::cublasLtMatmulPreferenceAttributes_t, value: &T) -> Result<()> {
        // SAFETY: the preference is alive, and the library reads as many bytes as the value has.
        unsafe {
            result::set_matmul_pref_attribute(self.0, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
        }
        .map_err(failed("cublasLtMatmulPreferenceSetAttribute"))
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: it is alive until here.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
