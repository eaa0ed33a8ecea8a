//! Reverse-mode differentiation over fused operations.
//!
//! An operation that runs under a tape, and has an input whose gradient is needed, adds one node: what it wrote, and a closure
//! that turns the gradient of its output into gradients of its inputs. [`Tape::backward`] walks the nodes once, last to first,
//! and drops each with what it kept. Gradients are single precision; a tensor's first writer sets its gradient and later ones
//! add to it, so nothing is zeroed first. What needs no gradient (frozen weights, and what is made of them alone) costs nothing.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet},
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering},
};

use ironloom_core::Shape;
use ironloom_kernels::{Form, Gpu};

use crate::{
    Context, Error, Result, Tensor,
    error::{expect_count, expect_shape},
    ops::Figures,
};

/// What a tape knows a tensor by; unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorId(u64);

impl TensorId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Where the gradient of a tensor that needs one goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    id: TensorId,
    shape: Shape,
    /// The tensor is some columns of a wider one, whose slot this is: the wider one's width, and the columns before.
    columns: Option<(usize, usize)>,
}

impl Slot {
    /// The tensor's shape.
    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }
}

type Backward = Box<dyn Fn(&Tensor, &mut Gradients) -> Result<()>>;

struct Node {
    output: Slot,
    backward: Backward,
}

/// The record of a forward pass.
pub struct Tape {
    nodes: RefCell<Vec<Node>>,
    /// Tensors whose gradients are asked for; shared with the tapes of repeated parts.
    watched: Rc<RefCell<HashSet<TensorId>>>,
    /// Tensors made of those.
    needed: RefCell<HashSet<TensorId>>,
    /// Tensors that are columns of others: the other, its width, and the columns before.
    parts: RefCell<HashMap<TensorId, (TensorId, usize, usize)>>,
    /// Losses besides the one that a backward pass starts from.
    side_losses: RefCell<Vec<Tensor>>,
    side_loss: Cell<f64>,
    expert_loads: RefCell<Vec<Vec<f32>>>,
    /// Those on a graphics card.
    expert_shares: RefCell<Vec<Tensor>>,
    /// The numbers and sums of a pass on a graphics card.
    figures: Option<Figures>,
    seed: u64,
    run: Run,
}

/// Which run of a part a tape records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    /// The only one.
    Only,
    /// The first of two: no nodes are kept.
    First,
    /// The second, of which gradients are all that anybody wants.
    Again,
}

impl Default for Tape {
    fn default() -> Self {
        Self::new()
    }
}

impl Tape {
    /// An empty tape.
    pub fn new() -> Self {
        Self::with_seed(0)
    }

    /// An empty tape whose random operations (dropout) draw from `seed`.
    pub fn with_seed(seed: u64) -> Self {
        Self::of(Rc::default(), seed, Run::Only)
    }

    fn of(watched: Rc<RefCell<HashSet<TensorId>>>, seed: u64, run: Run) -> Self {
        Self {
            nodes: RefCell::default(),
            watched,
            needed: RefCell::default(),
            parts: RefCell::default(),
            side_losses: RefCell::default(),
            side_loss: Cell::new(0.0),
            expert_loads: RefCell::default(),
            expert_shares: RefCell::default(),
            figures: None,
            seed,
            run,
        }
    }

    /// Asks for the gradient of a tensor that no operation makes: a parameter, an input.
    pub fn watch(&self, tensor: &Tensor) {
        self.watched.borrow_mut().insert(tensor.id());
    }

    /// What random operations draw from.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The sum of the losses that operations added by the way, such as the balance of routed experts.
    pub fn side_loss(&self) -> f64 {
        self.side_loss.get()
    }

    /// The tape of a pass on a graphics card, whose numbers and sums are `figures`.
    pub fn on_card(figures: Figures) -> Self {
        Self { figures: Some(figures), ..Self::new() }
    }

    /// The numbers and sums of a pass on a graphics card.
    pub(crate) fn figures(&self, operation: &'static str) -> Result<&Figures> {
        self.figures.as_ref().ok_or(Error::NoGradient { operation })
    }

    /// On a graphics card: the share of rows that each expert of each routed layer got, `[experts]` each.
    pub fn expert_shares(&self) -> Vec<Tensor> {
        self.expert_shares.borrow().clone()
    }

    /// Notes where those of a layer will be.
    pub(crate) fn note_expert_shares(&self, shares: Tensor) {
        self.expert_shares.borrow_mut().push(shares);
    }

    /// The share of rows that each expert of each routed layer got, in the order in which the layers ran.
    pub fn expert_loads(&self) -> Vec<Vec<f32>> {
        self.expert_loads.borrow().clone()
    }

    /// Adds a scalar to what is differentiated.
    pub(crate) fn add_side_loss(&self, loss: Tensor) -> Result<()> {
        let value = loss.as_f32()?.iter().map(|value| f64::from(*value)).sum::<f64>();
        self.side_loss.set(self.side_loss.get() + value);
        if self.slot(&loss).is_some() {
            self.side_losses.borrow_mut().push(loss);
        }
        Ok(())
    }

    /// Notes the share of rows that each expert of a layer got.
    pub(crate) fn note_expert_load(&self, shares: Vec<f32>) {
        self.expert_loads.borrow_mut().push(shares);
    }

    /// Whether nodes are kept.
    fn keeps(&self) -> bool {
        self.run != Run::First
    }

    /// Whether a part runs again: what its last operation gives is read by nobody, and the way back follows at once.
    pub(crate) fn runs_again(&self) -> bool {
        self.run == Run::Again
    }

    /// Where the gradient of `tensor` goes, if it needs one.
    pub(crate) fn slot(&self, tensor: &Tensor) -> Option<Slot> {
        let (mut id, mut columns) = (tensor.id(), None);
        if let Some(&(whole, width, before)) = self.parts.borrow().get(&id) {
            (id, columns) = (whole, Some((width, before)));
        }
        let needed = self.needed.borrow().contains(&id) || self.watched.borrow().contains(&id);
        (self.keeps() && needed).then(|| Slot { id, shape: *tensor.shape(), columns })
    }

    /// Notes that `part` is the columns of `whole` from `before` on: gradients of the one go to those of the other.
    pub(crate) fn note_columns(&self, whole: &Tensor, part: &Tensor, before: usize) {
        self.parts.borrow_mut().insert(part.id(), (whole.id(), whole.width(), before));
    }

    /// Records the operation that made `output`; `backward` gets the output's gradient, in its shape, and writes or adds those of
    /// the inputs that have a slot.
    pub(crate) fn record(&self, output: &Tensor, backward: impl Fn(&Tensor, &mut Gradients) -> Result<()> + 'static) {
        self.needed.borrow_mut().insert(output.id());
        let output = Slot { id: output.id(), shape: *output.shape(), columns: None };
        self.nodes.borrow_mut().push(Node { output, backward: Box::new(backward) });
    }

    /// Adds the gradients of every watched tensor that `output` and the side losses were made from, where `gradient` is the
    /// gradient of `output` and 1 that of a side loss. Ends the tape.
    ///
    /// # Errors
    /// An operation's backward fails, or `gradient` has another shape than `output`.
    pub fn backward(&self, output: &Tensor, gradient: Tensor, gradients: &mut Gradients) -> Result<()> {
        expect_shape("backward", "the gradient", *output.shape(), gradient.shape())?;
        if let Some(slot) = self.slot(output) {
            gradients.add(&slot, gradient)?;
        }
        for loss in self.side_losses.take() {
            if let Some(slot) = self.slot(&loss) {
                gradients.add(&slot, Tensor::from_f32(vec![1.0], slot.shape)?)?;
            }
        }
        for node in self.nodes.take().into_iter().rev() {
            if let Some(gradient) = gradients.take_whole(&node.output)? {
                (node.backward)(&gradient.reshape(node.output.shape)?, gradients)?;
            }
        }
        Ok(())
    }

    /// Runs `part` on `input` and keeps the input only: the backward pass runs it again to get what it needs (Chen et al.,
    /// arXiv 1604.06174). `part` must give the same bits both times, so it draws nothing but from the tape's seed. The gradients
    /// are those that they are without.
    ///
    /// # Errors
    /// `part` fails.
    pub fn checkpoint(
        &self,
        cx: &Context<'_>,
        input: &Tensor,
        part: impl Fn(&Context<'_>, &Tensor) -> Result<Tensor> + 'static,
    ) -> Result<Tensor> {
        let figures = self.figures.clone();
        let first = Self { figures: figures.clone(), ..Self::of(self.watched.clone(), self.seed, Run::First) };
        let output = part(&Context::training(cx.device, &first).with_path(cx.path), input)?;
        self.side_loss.set(self.side_loss.get() + first.side_loss.get());
        self.expert_loads.borrow_mut().append(&mut first.expert_loads.borrow_mut());
        self.expert_shares.borrow_mut().append(&mut first.expert_shares.borrow_mut());
        if self.keeps() {
            let (slot, input, device, path) = (self.slot(input), input.clone(), cx.device.clone(), cx.path);
            let (watched, seed) = (self.watched.clone(), self.seed);
            self.record(&output, move |gradient, gradients| {
                // What a pass adds up has been counted the first time.
                let figures = figures.as_ref().map(Figures::uncounted).transpose()?;
                let again = Self { figures, ..Self::of(watched.clone(), seed, Run::Again) };
                if slot.is_some() {
                    again.needed.borrow_mut().insert(input.id());
                }
                let output = part(&Context::training(&device, &again).with_path(path), &input)?;
                again.backward(&output, gradient.clone(), gradients)
            });
        }
        Ok(output)
    }
}

impl std::fmt::Debug for Tape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tape({} operations)", self.nodes.borrow().len())
    }
}

impl<'a> Context<'a> {
    /// The tape, and where the gradients of an operation's inputs go; `None` when none of them needs one.
    pub(crate) fn slots<const N: usize>(&self, inputs: [&Tensor; N]) -> Option<(&'a Tape, [Option<Slot>; N])> {
        let tape = self.tape?;
        let slots = inputs.map(|input| tape.slot(input));
        slots.iter().any(Option::is_some).then_some((tape, slots))
    }

    /// Where the gradient of one input goes, if a tape records and it needs one.
    pub(crate) fn slot(&self, input: &Tensor) -> Option<Slot> {
        self.tape?.slot(input)
    }
}

/// Gradients by tensor. Those of watched tensors stay, and further backward passes add to them, until [`Gradients::begin_step`].
#[derive(Debug, Default)]
pub struct Gradients {
    held: HashMap<TensorId, Held>,
}

#[derive(Debug)]
struct Held {
    gradient: Tensor,
    /// Of a step that is over: its memory serves the next writer.
    stale: bool,
    /// Columns that have been written, of a gradient that comes in columns.
    written: usize,
}

impl Gradients {
    /// No gradients.
    pub fn new() -> Self {
        Self::default()
    }

    /// The gradient of a tensor, if one was written in this step.
    pub fn get(&self, id: TensorId) -> Option<&Tensor> {
        self.held.get(&id).filter(|held| !held.stale).map(|held| &held.gradient)
    }

    /// Takes the gradient of `tensor` to be written to `place`, memory on a graphics card that lasts.
    pub fn keep_in(&mut self, tensor: &Tensor, place: Tensor) {
        self.held.insert(tensor.id(), Held { gradient: place, stale: true, written: 0 });
    }

    /// Whether the gradient of `tensor` was written in this step.
    pub fn is_written(&self, tensor: &Tensor) -> bool {
        self.get(tensor.id()).is_some()
    }

    /// Begins a step: what is held is over, and each gradient's next writer overwrites it.
    pub fn begin_step(&mut self) {
        self.held.values_mut().for_each(|held| held.stale = true);
    }

    /// The gradient of what an operation made; an error where some of its columns have none.
    fn take_whole(&mut self, slot: &Slot) -> Result<Option<Tensor>> {
        match self.held.get(&slot.id) {
            Some(held) if held.written != 0 => {
                expect_count("backward", "the columns with a gradient", width_of(&slot.shape), held.written)?;
            }
            _ => {}
        }
        Ok(self.take(slot.id))
    }

    fn take(&mut self, id: TensorId) -> Option<Tensor> {
        self.get(id)?;
        self.held.remove(&id).map(|held| held.gradient)
    }

    /// Sets the gradient of a slot, or adds to it.
    pub(crate) fn add(&mut self, slot: &Slot, gradient: Tensor) -> Result<()> {
        expect_count("backward", "the size of a gradient", slot.shape.elements()?, gradient.shape().elements()?)?;
        match self.held.get_mut(&slot.id) {
            Some(held) if !held.stale => held.gradient.add_in_place(&gradient),
            _ => {
                self.held.insert(slot.id, Held { gradient, stale: false, written: 0 });
                Ok(())
            }
        }
    }

    /// The gradient of a slot on a graphics card so far, for an operation that adds to it and puts the sum back by
    /// [`Gradients::put`].
    pub(crate) fn take_slot(&mut self, slot: &Slot) -> Option<Tensor> {
        self.take(slot.id)
    }

    /// Sets the gradient of a slot, in place of what it was.
    pub(crate) fn put(&mut self, slot: &Slot, gradient: Tensor) {
        self.held.insert(slot.id, Held { gradient, stale: false, written: 0 });
    }

    /// The lasting place of a weight's gradient on a graphics card, and whether it is to be overwritten rather than added to.
    pub(crate) fn weight_place(&mut self, slot: &Slot) -> Result<(Tensor, bool)> {
        let Some(held) = self.held.get_mut(&slot.id) else {
            return Err(Error::NoGradient { operation: "a weight without a place for its gradient" });
        };
        Ok((held.gradient.clone(), std::mem::replace(&mut held.stale, false)))
    }

    /// Where an operation on a graphics card writes a slot's gradient in bfloat16, all of it: the slot's columns, where it is a
    /// part. Each slot has one writer.
    pub(crate) fn place(&mut self, gpu: &Gpu, slot: &Slot, operation: &'static str) -> Result<Tensor> {
        let (rows, own) =
            (slot.shape.elements()?.checked_div(width_of(&slot.shape)).unwrap_or(0), width_of(&slot.shape));
        let Some((width, before)) = slot.columns else {
            if self.get(slot.id).is_some() {
                return Err(Error::NoGradient { operation });
            }
            let gradient = Tensor::allocate(gpu, Form::Bf16, [rows, own], operation)?;
            self.put(slot, gradient.clone());
            return Ok(gradient);
        };
        if self.get(slot.id).is_none() {
            self.put(slot, Tensor::allocate(gpu, Form::Bf16, [rows, width], operation)?);
        }
        let Some(held) = self.held.get_mut(&slot.id) else { return Err(Error::NoGradient { operation }) };
        held.written += own;
        held.gradient.columns(before..before + own)
    }

    /// Takes the gradient of what `slot` is columns of to be written over `whole`, which is that itself: nothing reads it any more.
    pub(crate) fn write_over(&mut self, slot: &Slot, whole: Tensor) {
        if slot.columns.is_some_and(|(width, _)| width == whole.width()) && self.get(slot.id).is_none() {
            self.put(slot, whole);
        }
    }

    /// Lets `write` set (`first`) or add to the elements of a slot's gradient.
    pub(crate) fn write(&mut self, slot: &Slot, write: impl FnOnce(&mut [f32], bool) -> Result<()>) -> Result<()> {
        let held = match self.held.entry(slot.id) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(Held { gradient: Tensor::zeros(slot.shape)?, stale: true, written: 0 })
            }
        };
        let first = std::mem::replace(&mut held.stale, false);
        write(held.gradient.as_f32_mut()?, first)
    }
}

fn width_of(shape: &Shape) -> usize {
    shape.dims().last().copied().unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, ops};

    fn tensor(values: &[f32]) -> Tensor {
        Tensor::from_f32(values.to_vec(), [values.len()]).unwrap()
    }

    #[test]
    fn later_passes_add_and_a_new_step_overwrites() {
        let device = Device::cpu(1);
        let (x, mut gradients) = (tensor(&[1.0, 2.0]), Gradients::new());
        let pass = |gradients: &mut Gradients| {
            let tape = Tape::new();
            tape.watch(&x);
            let y = ops::scale(&Context::training(&device, &tape), x.clone(), 3.0).unwrap();
            tape.backward(&y, tensor(&[1.0, 10.0]), gradients).unwrap();
            gradients.get(x.id()).unwrap().as_f32().unwrap().to_vec()
        };
        assert_eq!(pass(&mut gradients), [3.0, 30.0]);
        assert_eq!(pass(&mut gradients), [6.0, 60.0]);
        gradients.begin_step();
        assert!(gradients.get(x.id()).is_none());
        assert_eq!(pass(&mut gradients), [3.0, 30.0]);
        assert_eq!(gradients.held.len(), 1, "gradients between operations go");
    }

    #[test]
    fn what_nobody_asks_for_is_not_recorded() {
        let (device, tape) = (Device::cpu(1), Tape::new());
        let x = tensor(&[1.0]);
        ops::scale(&Context::training(&device, &tape), x, 3.0).unwrap();
        assert!(tape.nodes.borrow().is_empty());
    }

    #[test]
    fn a_checkpointed_part_gives_the_gradients_it_gives_without() {
        let device = Device::cpu(1);
        let (x, w) = (tensor(&[1.0, -2.0]), tensor(&[0.5, 4.0]));
        let gradients_of = |checkpointed: bool| {
            let (tape, mut gradients) = (Tape::new(), Gradients::new());
            [&x, &w].into_iter().for_each(|leaf| tape.watch(leaf));
            let cx = Context::training(&device, &tape);
            let weight = w.clone();
            let part = move |cx: &Context<'_>, x: &Tensor| {
                let y = ops::add(cx, ops::scale(cx, x.clone(), 2.0)?, &weight)?;
                ops::rmsnorm(cx, &y, &weight, 0.1)
            };
            let x2 = ops::scale(&cx, x.clone(), 1.5).unwrap();
            let y = if checkpointed { tape.checkpoint(&cx, &x2, part) } else { part(&cx, &x2) }.unwrap();
            let nodes = tape.nodes.borrow().len();
            tape.backward(&y, tensor(&[1.0, -1.0]), &mut gradients).unwrap();
            (nodes, [&x, &w].map(|leaf| gradients.get(leaf.id()).unwrap().as_f32().unwrap().to_vec()))
        };
        let ((kept, expected), (few, found)) = (gradients_of(false), gradients_of(true));
        assert_eq!(found, expected);
        assert!((few, kept) == (2, 4));
    }

    #[test]
    fn only_the_last_values_of_a_part_that_runs_again_are_unread() {
        let (device, tape, runs) = (Device::cpu(1), Tape::new(), Rc::new(RefCell::new(Vec::new())));
        let (x, seen) = (tensor(&[1.0, -2.0]), runs.clone());
        tape.watch(&x);
        let cx = Context::training(&device, &tape);
        assert!(!cx.last().is_unread());
        let part = move |cx: &Context<'_>, x: &Tensor| {
            seen.borrow_mut().push((cx.is_unread(), cx.last().is_unread(), cx.last().inside().is_unread()));
            ops::scale(&cx.last(), x.clone(), 2.0)
        };
        let y = tape.checkpoint(&cx, &x, part).unwrap();
        tape.backward(&y, tensor(&[1.0, -1.0]), &mut Gradients::new()).unwrap();
        assert_eq!(*runs.borrow(), [(false, false, false), (false, true, false)]);
    }
}
