//! Which vector instructions this processor has.

use std::sync::OnceLock;

/// A level of vector instructions that CPU kernels are written for. Every level gives the same bits: kernels fix the order
/// of their sums, so a level changes speed only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimdLevel {
    /// Plain Rust: the reference.
    Scalar,
    /// AVX2 with FMA and F16C (x86-64-v3).
    Avx2,
    /// AVX-512 F, BW, DQ and VL on top of AVX2.
    Avx512,
}

impl SimdLevel {
    /// The best level this processor has and `IRONLOOM_OFF` (`avx512`, `avx2`) leaves on. Found once per process.
    pub fn detect() -> Self {
        static LEVEL: OnceLock<SimdLevel> = OnceLock::new();
        *LEVEL.get_or_init(|| Self::supported().into_iter().rev().find(|level| !level.is_off()).unwrap_or(Self::Scalar))
    }

    /// Every level this processor can run, [`SimdLevel::Scalar`] first, whatever `IRONLOOM_OFF` says.
    pub fn supported() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut levels = vec![Self::Scalar];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            levels.push(Self::Avx2);
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                levels.push(Self::Avx512);
            }
        }
        levels
    }

    fn is_off(self) -> bool {
        match self {
            Self::Scalar => false,
            Self::Avx2 => crate::is_off("avx2"),
            Self::Avx512 => crate::is_off("avx512") || crate::is_off("avx2"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SimdLevel;

    #[test]
    fn the_detected_level_is_supported() {
        let levels = SimdLevel::supported();
        assert_eq!(levels[0], SimdLevel::Scalar);
        assert!(levels.contains(&SimdLevel::detect()));
    }
}
