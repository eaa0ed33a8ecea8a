//! The longest context whose memory plan, made before anything is loaded, fits.

use anyhow::Result;
use ironloom_core::MemoryPlan;
use ironloom_lm::Config;

/// A context is not shortened below this without being asked to.
const SHORTEST: usize = 512;

/// What a command advises first where its plan does not fit, and what helps with any model.
macro_rules! advice {
    ($first:literal) => {
        concat!($first, ", hold the weights in fewer bits (--weights int4), free memory or raise --memory-budget")
    };
}
pub(crate) use advice;

/// The context to open: the one `asked` for, or else the model's own or the longest power of two below it that fits.
///
/// # Errors
/// It is longer than the model's, or does not fit in `available` bytes.
pub(crate) fn choose_context(
    config: &Config,
    asked: Option<usize>,
    available: Option<u64>,
    plan: impl Fn(usize) -> MemoryPlan,
) -> Result<usize> {
    let limit = config.context_length;
    let mut context = asked.unwrap_or(limit);
    if context > limit {
        return Err(ironloom_decode::Error::ContextOption { asked: context, limit }.into());
    }
    let Some(available) = available else { return Ok(context) };
    while asked.is_none() && context > SHORTEST && plan(context).total() > available {
        context = (1 << (context - 1).ilog2()).max(SHORTEST);
    }
    plan(context).check(available, advice!("use a shorter --context"))?;
    Ok(context)
}

#[cfg(test)]
mod tests {
    use ironloom_tensor::Device;

    use super::*;

    fn choose(asked: Option<usize>, available: u64) -> Result<usize> {
        choose_of(&Config::moe_55m(), asked, available)
    }

    fn choose_of(config: &Config, asked: Option<usize>, available: u64) -> Result<usize> {
        let plan = |context| {
            MemoryPlan::new().with("weights", 100 << 20).with("cache", config.cache_bytes(&Device::cpu(1), context))
        };
        choose_context(config, asked, Some(available), plan)
    }

    #[test]
    fn an_unasked_context_is_the_longest_that_fits() {
        let full = Config::moe_55m().context_length;
        assert_eq!(choose(None, u64::MAX).unwrap(), full);
        let half = (100 << 20) + Config::moe_55m().cache_bytes(&Device::cpu(1), full / 2);
        assert_eq!(choose(None, half).unwrap(), full / 2);
        assert_eq!(choose(None, half - 1).unwrap(), full / 4);
        // A cache holds a power of two of positions, or all of the model's.
        let long = Config { context_length: 40_960, ..Config::moe_55m() };
        let needed = |positions| (100 << 20) + long.cache_bytes(&Device::cpu(1), positions);
        assert_eq!(needed(40_960) - (100 << 20), 5 * (needed(8192) - (100 << 20)));
        assert_eq!(choose_of(&long, None, needed(40_960)).unwrap(), 40_960);
        assert_eq!(choose_of(&long, None, needed(40_960) - 1).unwrap(), 32_768);
        assert_eq!(choose_of(&long, None, needed(32_768) - 1).unwrap(), 16_384);
    }

    #[test]
    fn a_context_that_does_not_fit_is_refused_with_the_plan() {
        let message = choose(Some(4096), 50 << 20).unwrap_err().to_string();
        assert!(message.contains("weights 100.0 MiB") && message.contains("--context"), "{message}");
        assert!(choose(None, 50 << 20).is_err());
        let message = choose(Some(5000), u64::MAX).unwrap_err().to_string();
        assert!(message.contains("5000") && message.contains("4096"), "{message}");
    }
}
