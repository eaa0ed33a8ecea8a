//! Calls of the driver, each failure of which is an error with the call's name, or says that there is no room.

use std::ffi::CStr;

use cudarc::driver::sys;

use crate::{Error, Gpu, Result};

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

/// Makes something; where there is no room, once more after `give_back`.
pub(crate) fn once_more<T>(mut make: impl FnMut() -> Result<T>, give_back: impl FnOnce()) -> Result<T> {
    make().or_else(|error| {
        if !error.is_out_of_memory() {
            return Err(error);
        }
        give_back();
        make()
    })
}

impl Gpu {
    /// Makes something for which the driver takes memory of its own; what passes do not use may have to be given back for it.
    ///
    /// # Errors
    /// That of `make`; where there is no room, [`Error::OutOfMemory`] with `operation`'s name.
    pub(crate) fn with_room<T>(&self, operation: &'static str, make: impl FnMut() -> Result<T>) -> Result<T> {
        once_more(make, || self.trim()).or_else(|error| {
            if !error.is_out_of_memory() {
                return Err(error);
            }
            let (free, total) = self.memory()?;
            Err(Error::OutOfMemory { operation, asked: 0, free, total, held: self.held_bytes() })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lack() -> Error {
        let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;
        Error::Driver { call: "cuModuleLoadData", code, message: "out of memory".into() }
    }

    #[test]
    fn what_finds_no_room_is_tried_once_more_and_nothing_else_is() {
        let attempts = |mut results: Vec<Result<u32>>| {
            let mut given_back = 0;
            let made = once_more(|| results.remove(0), || given_back += 1);
            (made.ok(), given_back, results.len())
        };
        assert_eq!(attempts(vec![Ok(1), Ok(2)]), (Some(1), 0, 1));
        assert_eq!(attempts(vec![Err(lack()), Ok(2), Ok(3)]), (Some(2), 1, 1));
        assert_eq!(attempts(vec![Err(lack()), Err(lack()), Ok(3)]), (None, 1, 1));
        assert_eq!(attempts(vec![Err(Error::SizeOverflow), Ok(2)]), (None, 0, 1));
    }

    #[test]
    fn whoever_finds_no_room_is_understood() {
        let held = Error::OverBudget { operation: "a test", asked: 2, held: 3, budget: 4 };
        let library = |status| Error::CublasLt { call: "cublasLtCreate", status };
        for error in [lack(), held, library(3), Error::OutOfHostMemory { asked: 8 }] {
            assert!(error.is_out_of_memory(), "{error}");
        }
        let other = Error::Driver { call: "cuInit", code: 1, message: "invalid argument".into() };
        for error in [other, library(1), Error::CublasLtMissing] {
            assert!(!error.is_out_of_memory(), "{error}");
        }
    }

    #[test]
    fn a_size_that_only_the_driver_knows_is_left_out() {
        let error = |asked| Error::OutOfMemory { operation: "a graph", asked, free: 1, total: 2, held: 0 }.to_string();
        assert!(error(0).contains("a graph asked for memory, 1 of 2 are free"), "{}", error(0));
        assert!(error(7).contains("a graph asked for 7 bytes, 1 of 2 are free"), "{}", error(7));
    }
}
