//! Element and block types of stored tensors, with their sizes.
//!
//! A packed GGML type stores a fixed number of elements (a block) in a fixed number of bytes; a plain type is a block of
//! one. Sizes follow the GGUF specification's block layouts.

use crate::{Error, Result};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident, $text:literal, $block:literal, $bytes:literal, $gguf:expr;)*) => {
        /// What one stored element, or one block of packed elements, is.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(non_camel_case_types)]
        pub enum DType { $($(#[$doc])* $name,)* }

        impl DType {
            /// Every type, in the order of declaration.
            pub const ALL: &'static [DType] = &[$(DType::$name,)*];

            /// The field's name for it, such as `Q4_1` or `BF16`.
            pub const fn name(self) -> &'static str { match self { $(DType::$name => $text,)* } }
            /// Elements a block holds; 1 for plain types.
            pub const fn block_elements(self) -> usize { match self { $(DType::$name => $block,)* } }
            /// Bytes a block takes.
            pub const fn block_bytes(self) -> usize { match self { $(DType::$name => $bytes,)* } }
            /// The number GGUF stores for it, where GGUF has it.
            pub const fn gguf_id(self) -> Option<u32> { match self { $(DType::$name => $gguf,)* } }
        }
    };
}

dtypes! {
    /// IEEE single precision.
    F32, "F32", 1, 4, Some(0);
    /// IEEE half precision.
    F16, "F16", 1, 2, Some(1);
    /// bfloat16.
    BF16, "BF16", 1, 2, Some(30);
    /// IEEE double precision.
    F64, "F64", 1, 8, Some(28);
    /// Signed byte.
    I8, "I8", 1, 1, Some(24);
    /// Signed 16-bit integer.
    I16, "I16", 1, 2, Some(25);
    /// Signed 32-bit integer.
    I32, "I32", 1, 4, Some(26);
    /// Signed 64-bit integer.
    I64, "I64", 1, 8, Some(27);
    /// Unsigned byte.
    U8, "U8", 1, 1, None;
    /// Unsigned 32-bit integer.
    U32, "U32", 1, 4, None;
    /// One byte, 0 or 1.
    Bool, "BOOL", 1, 1, None;
    /// 32 weights of 4 bits, FP16 scale.
    Q4_0, "Q4_0", 32, 18, Some(2);
    /// 32 weights of 4 bits, FP16 scale and minimum.
    Q4_1, "Q4_1", 32, 20, Some(3);
    /// 32 weights of 5 bits, FP16 scale.
    Q5_0, "Q5_0", 32, 22, Some(6);
    /// 32 weights of 5 bits, FP16 scale and minimum.
    Q5_1, "Q5_1", 32, 24, Some(7);
    /// 32 weights of 8 bits, FP16 scale.
    Q8_0, "Q8_0", 32, 34, Some(8);
    /// 256 weights of 2 bits, 4-bit scales and minima for 16.
    Q2_K, "Q2_K", 256, 84, Some(10);
    /// 256 weights of 3 bits, 6-bit scales for 16.
    Q3_K, "Q3_K", 256, 110, Some(11);
    /// 256 weights of 4 bits, 6-bit scales and minima for 32.
    Q4_K, "Q4_K", 256, 144, Some(12);
    /// 256 weights of 5 bits, 6-bit scales and minima for 32.
    Q5_K, "Q5_K", 256, 176, Some(13);
    /// 256 weights of 6 bits, 8-bit scales for 16.
    Q6_K, "Q6_K", 256, 210, Some(14);
}

impl DType {
    /// The type GGUF numbers `id`, if Ironloom reads it.
    pub fn from_gguf(id: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.gguf_id() == Some(id))
    }

    /// The type of that [`name`](Self::name), in any case.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name().eq_ignore_ascii_case(name))
    }

    /// Whether blocks hold more than one element.
    pub const fn is_packed(self) -> bool {
        self.block_elements() > 1
    }

    /// Bytes that `elements` elements take.
    ///
    /// # Errors
    /// `elements` is not whole blocks, or the size overflows.
    pub fn bytes_for(self, elements: usize) -> Result<usize> {
        if !elements.is_multiple_of(self.block_elements()) {
            return Err(Error::PartialBlock { dtype: self, elements });
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes()).ok_or(Error::SizeOverflow)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gguf_numbers_and_names_round_trip() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_name(&dtype.name().to_lowercase()), Some(dtype));
            if let Some(id) = dtype.gguf_id() {
                assert_eq!(DType::from_gguf(id), Some(dtype));
            }
        }
        assert_eq!(DType::from_gguf(9999), None);
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(DType::Q6_K.bytes_for(512).unwrap(), 420);
        assert!(matches!(DType::Q4_0.bytes_for(33), Err(Error::PartialBlock { .. })));
        assert!(matches!(DType::F64.bytes_for(usize::MAX), Err(Error::SizeOverflow)));
    }
}
