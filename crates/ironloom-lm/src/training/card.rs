//! Training on a graphics card: where parameters and rows lie.

use ironloom_tensor::{
    Arena, Device, Indices, Tensor,
    ops::{CrossEntropyOptions, DocumentBounds, Figures, PassNumbers},
};

use super::{ParameterRole, Part, Piece, TrainingRows};
use crate::{Error, Model, Result};

impl Model {
    /// Moves everything that can be learnt to a graphics card, into one arena, and what else a training pass reads; frozen packed
    /// weights have to be there already. From then on the model trains there.
    ///
    /// # Errors
    /// A frozen weight is elsewhere, a matrix is not as wide as products on a card take them, or the card has no room.
    pub fn move_parameters(&mut self, device: &Device) -> Result<Arena> {
        self.passes.clear();
        let parameters = self.parameters();
        let shapes: Vec<_> = parameters
            .iter()
            .map(|parameter| (*parameter.values.shape(), parameter.role != ParameterRole::Vector))
            .collect();
        let arena = Arena::new(device, &shapes)?;
        for (number, parameter) in parameters.into_iter().enumerate() {
            arena.set(number, &parameter.values.into_f32()?)?;
        }
        arena.round()?;
        let mut number = 0;
        self.update(|_, values| {
            *values = arena.parameter(number)?.clone();
            number += 1;
            Ok(())
        })?;
        // Norms beside frozen matrices are no parameters, and are read all the same.
        let move_to = |values: &mut Tensor| -> Result<()> {
            *values = values.to_device(device)?;
            Ok(())
        };
        for block in &mut self.blocks {
            block.for_each(&mut |_: Part, piece| match piece {
                Piece::Norm(norm) => move_to(&mut norm.weight),
                Piece::Linear(linear) => linear.bias.as_mut().map_or(Ok(()), move_to),
            })?;
        }
        move_to(&mut self.output_norm.weight)?;
        self.ropes.iter_mut().try_for_each(|(frequencies, _)| move_to(frequencies))?;
        self.device = device.clone();
        Ok(arena)
    }
}

/// The rows of a training pass on a graphics card: memory that stays in its place while its contents change, so that a captured
/// pass can be replayed on other rows. What is not filled is padding, which changes nothing.
#[derive(Debug)]
pub struct CardRows {
    device: Device,
    pub(super) ids: Indices,
    pub(super) targets: Indices,
    /// -1 for padding.
    pub(super) positions: Indices,
    pub(super) bounds: DocumentBounds,
    pub(super) figures: Figures,
}

impl CardRows {
    /// Room for `rows` rows of `model`, which is on a graphics card; the sums of passes go to `figures`.
    ///
    /// # Errors
    /// The model is on the processor, or the card has no room.
    pub fn new(model: &Model, rows: usize, figures: Figures) -> Result<Self> {
        let device = model.device.clone();
        let masks: Vec<_> = model.blocks.iter().map(|block| block.attention.document_mask()).collect();
        let lasting = || Indices::lasting(&device, rows);
        let (ids, targets, positions) = (lasting()?, lasting()?, lasting()?);
        let (bounds, figures) = (DocumentBounds::new(&device, rows, &masks)?, figures.of_rows(positions.clone()));
        Ok(Self { ids, targets, positions, bounds, figures, device })
    }

    /// How many rows there is room for.
    pub fn capacity(&self) -> usize {
        self.ids.len()
    }

    /// Puts `rows` in, with the numbers of their pass; whatever was there before goes.
    ///
    /// # Errors
    /// They are more than there is room for, their documents' lengths or targets are not theirs, a document is empty or longer than
    /// the context, or an id or a target is outside the vocabulary.
    pub fn set(&self, model: &Model, rows: &TrainingRows<'_>, numbers: PassNumbers) -> Result<()> {
        model.check_documents(rows)?;
        let (count, capacity, limit) = (rows.ids.len(), self.capacity(), model.config.vocab_size);
        let expect = |what, expected, found| Error::Count { what, expected, found };
        if count > capacity {
            return Err(expect("the rows of a pass", capacity, count));
        }
        if rows.targets.len() != count {
            return Err(expect("the targets of a pass", count, rows.targets.len()));
        }
        let (operation, ignored) = ("training", CrossEntropyOptions::default().ignore_index);
        let mut targets = vec![-1i32; capacity];
        for (row, (place, &target)) in targets.iter_mut().zip(rows.targets).enumerate() {
            match usize::try_from(target) {
                _ if target == ignored => {}
                Ok(id) if id < limit => *place = id as i32,
                _ => {
                    let vocabulary = limit;
                    let error =
                        ironloom_tensor::Error::TargetOutOfRange { operation, target, row, vocabulary, ignored };
                    return Err(error.into());
                }
            }
        }
        if let Some((row, &id)) = rows.ids.iter().enumerate().find(|(_, id)| **id as usize >= limit) {
            return Err(ironloom_tensor::Error::IdOutOfRange { operation: "embedding", id, row, limit }.into());
        }
        let mut ids = rows.ids.to_vec();
        ids.resize(capacity, 0);
        let mut positions: Vec<i32> = rows.documents.iter().flat_map(|&length| 0..length as i32).collect();
        positions.resize(capacity, -1);
        self.ids.set(&self.device, &ids)?;
        self.targets.set(&self.device, &targets)?;
        self.positions.set(&self.device, &positions)?;
        self.bounds.set(rows.documents)?;
        Ok(self.figures.set(numbers)?)
    }

    /// The numbers and sums of its passes.
    pub fn figures(&self) -> &Figures {
        &self.figures
    }
}
