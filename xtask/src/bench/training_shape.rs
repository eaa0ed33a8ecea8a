//! The models that training on a card is measured with.

/// A model by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TrainingShape {
    /// 16 layers of 768
    #[value(name = "dense-102m")]
    Dense102M,
    /// 8 layers of 512, the last six with 8 experts of 352, two a row, and a shared one
    #[value(name = "moe-55m")]
    Moe55M,
    /// 16 layers of 2,048
    #[value(name = "dense-1.2b")]
    Dense1B2,
}

#[cfg(feature = "engine")]
mod of_models {
    use ironloom_lm::{Config, DenseShape};

    use super::TrainingShape;

    /// 1.04 billion weights, whatever its name says.
    const DENSE_1B2: DenseShape = DenseShape {
        vocab_size: 32_000,
        width: 2048,
        layers: 16,
        heads: 32,
        kv_heads: 8,
        head_width: 64,
        inner_width: 8192,
    };

    impl TrainingShape {
        /// The model's description.
        pub(crate) fn config(self) -> Config {
            match self {
                Self::Dense102M => Config::dense_102m(),
                Self::Moe55M => Config::moe_55m(),
                Self::Dense1B2 => Config::dense(DENSE_1B2),
            }
        }

        /// Steps that are timed together: some hundred milliseconds or more.
        pub(crate) fn steps(self) -> usize {
            if self == Self::Dense1B2 { 5 } else { 20 }
        }
    }

    #[test]
    fn the_large_shape_has_the_parameters_it_is_known_for() {
        assert_eq!(TrainingShape::Dense1B2.config().parameters(), 1_038_682_112);
    }
}
