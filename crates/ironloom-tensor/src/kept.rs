//! What an operation keeps of an input until the way back.
//!
//! On a graphics card, what is cheap to make from what is kept anyway (a norm's output from its input, a product of gate and up)
//! is not kept itself: its tensor carries a [`Recipe`], and who needs the values on the way back keeps that. The first reader
//! makes them, the others share them, and they go with the recipe's last holder.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use ironloom_core::Shape;

use crate::{Result, Tensor};

/// How a tensor is made again.
pub(crate) struct Recipe {
    make: Box<dyn Fn() -> Result<Tensor> + Send + Sync>,
    made: OnceLock<Tensor>,
}

impl Recipe {
    pub(crate) fn new(make: impl Fn() -> Result<Tensor> + Send + Sync + 'static) -> Self {
        Self { make: Box::new(make), made: OnceLock::new() }
    }

    fn get(&self) -> Result<Tensor> {
        if let Some(made) = self.made.get() {
            return Ok(made.clone());
        }
        let made = (self.make)()?;
        Ok(self.made.get_or_init(|| made).clone())
    }
}

impl fmt::Debug for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recipe").field("made", &self.made.get().is_some()).finish_non_exhaustive()
    }
}

/// A tensor until the way back: itself, or how it is made again.
#[derive(Debug)]
pub(crate) enum Kept {
    Values(Tensor),
    Recipe(Arc<Recipe>, Shape),
}

impl Kept {
    /// The tensor. What is made again need not have the bits that the way there saw, but has the same ones each time.
    pub(crate) fn get(&self) -> Result<Tensor> {
        match self {
            Self::Values(tensor) => Ok(tensor.clone()),
            Self::Recipe(recipe, shape) => recipe.get()?.reshape(*shape),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn what_carries_a_recipe_is_made_once_and_goes_with_its_last_holder() {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let made = Arc::new(Tensor::from_f32(vec![5.0; 6], [2, 3]).unwrap());
        let source = Arc::downgrade(&made);
        let recipe = Recipe::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(made.as_ref().clone())
        });
        let tensor = Tensor::from_f32(vec![4.0; 6], [2, 3]).unwrap().made_by(recipe);
        let (first, second) = (tensor.kept(), tensor.clone().reshape([3, 2]).unwrap().kept());
        // Other values, or a part of them, are not what the recipe makes.
        assert!(matches!(tensor.rows_view(0..1).unwrap().kept(), Kept::Values(_)));
        drop(tensor);
        assert_eq!(count.load(Ordering::Relaxed), 0);
        assert_eq!(first.get().unwrap().as_f32().unwrap(), [5.0; 6]);
        assert_eq!(second.get().unwrap().shape().dims(), [3, 2]);
        assert_eq!(count.load(Ordering::Relaxed), 1);
        drop(first);
        assert!(source.upgrade().is_some());
        drop(second);
        assert!(source.upgrade().is_none());
    }
}
