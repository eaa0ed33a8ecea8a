//! Calls of the driver, each failure of which is an error with the call's name.

use std::ffi::CStr;

use cudarc::driver::sys;

use crate::{Error, Result};

/// Turns a result of `call` into ours.
pub(crate) fn check(call: &'static str, result: sys::CUresult) -> Result<()> {
    if result == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failure(call, result)) }
}

/// The error of a result that is not success.
pub(crate) fn failure(call: &'static str, result: sys::CUresult) -> Error {
    let mut text = std::ptr::null();
    // SAFETY: the driver writes the address of a static string, or leaves null.
    let message = unsafe {
        sys::cuGetErrorString(result, &mut text);
        if text.is_null() { "unknown error".into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    };
    Error::Driver { call, code: result as u32, message }
}

/// `call!(cuInit(0))`: the call, checked, with its own name in the error.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        $crate::driver::check(
            stringify!($name),
            // SAFETY: each caller passes handles that are alive and addresses that hold what the call touches.
            unsafe { cudarc::driver::sys::$name($($argument),*) },
        )
    };
}
pub(crate) use call;
