//! Decoding steps that a device makes by itself, ahead of the host.
//!
//! On a graphics card a step is one replay of a captured graph: the pass of the model, the choice of the next id, and its
//! return as the next step's input. The host launches a step before it has seen the last one's id, so the card never waits;
//! it reads each id from its own memory some microseconds after it was made. Steps that turn out to be one too many (an end
//! token, a stop string) have only written positions that nobody counts.

use std::sync::Arc;

use ironloom_kernels::{Buffer, Gpu, Graph, SampleOptions};
use ironloom_lm::Model;
use ironloom_nn::KvCache;
use ironloom_tensor::{
    Context, Device, Path,
    ops::{Choose, KvTable, NextIds, TableRow},
};

use crate::{Error, Result, SamplerOptions, model::check_device};

/// Steps in flight: while the host reads one, the device makes another.
pub(crate) const AHEAD: usize = 2;

/// The most rows of a step.
pub(crate) const MOST_ROWS: usize = ironloom_kernels::MOST_ROWS;

/// What a row's id is when none of its logits could be chosen.
pub(crate) const NO_ID: u32 = u32::MAX;

/// A sequence in device-made steps.
#[derive(Debug)]
pub struct StepRow<'a, C> {
    /// All of its ids; the last one is the first step's input.
    pub ids: &'a [u32],
    /// Its cache, which holds all ids but the last.
    pub cache: &'a mut C,
    /// How its ids are chosen.
    pub options: &'a SamplerOptions,
}

/// Steps of some rows, made by a device one after the other. What is chosen is what [`Sampler`](crate::Sampler) would choose
/// from the logits of [`LanguageModel::forward`](crate::LanguageModel::forward).
pub trait Steps<C>: Send {
    /// Takes these rows on, in place of those before. Steps in flight are forgotten.
    ///
    /// # Errors
    /// There are more rows than the steps were made for, or the device fails.
    fn begin(&mut self, rows: &mut [StepRow<'_, C>]) -> Result<()>;

    /// Puts one more step of all rows in flight; `caches` are those of [`Steps::begin`], in its order, and count one more
    /// position each.
    ///
    /// # Errors
    /// The device has no room or fails.
    fn launch(&mut self, caches: &mut [&mut C]) -> Result<()>;

    /// Waits for the oldest step in flight: an id for each row, `u32::MAX` where none of its logits could be chosen.
    ///
    /// # Errors
    /// The device fails, or nothing is in flight.
    fn next(&mut self) -> Result<Vec<u32>>;

    /// How many steps are launched and not taken.
    fn in_flight(&self) -> usize;
}

/// Steps of a [`Model`] on a graphics card.
#[derive(Debug)]
pub struct CudaSteps {
    graph: Graph,
    /// What the graph reads and writes lies in these, so they live as long; nobody changes a model that is shared.
    model: Arc<Model>,
    table: KvTable,
    next: NextIds,
    device: Device,
    /// Rows taken on.
    rows: usize,
    /// The ids so far of rows with penalties.
    histories: Vec<Buffer>,
    launched: u64,
    taken: u64,
}

impl CudaSteps {
    /// Captures steps of up to `rows` rows; `None` where the device is the processor, or graphs are switched off
    /// (`IRONLOOM_OFF=graph`). Where `sampled` is false every row takes its largest logit.
    ///
    /// # Errors
    /// [`Error::NoRoomForSteps`]; [`Error::OtherDevice`]; or the device fails.
    pub fn new(model: &Arc<Model>, device: &Device, rows: usize, sampled: bool) -> Result<Option<Self>> {
        check_device(model.as_ref(), device)?;
        let Device::Cuda(cuda) = device else { return Ok(None) };
        if ironloom_core::is_off("graph") || rows == 0 || rows > MOST_ROWS {
            return Ok(None);
        }
        Self::capture(model, device, cuda.gpu(), rows.next_power_of_two(), sampled).map(Some).map_err(|error| {
            if error.is_out_of_memory() { Error::NoRoomForSteps { source: Box::new(error) } } else { failed(error) }
        })
    }

    fn capture(
        model: &Arc<Model>,
        device: &Device,
        gpu: &Gpu,
        rows: usize,
        sampled: bool,
    ) -> ironloom_lm::Result<Self> {
        let (config, cache) = (model.config(), model.new_cache());
        let table = KvTable::new(device, rows, config.heads, cache.layers(), config.context_length)?;
        let next = NextIds::new(device, rows, config.vocab_size)?;
        let choose = if sampled { Choose::ByOptions } else { Choose::Largest };
        let cx = Context::inference(device).with_path(Path::Few);
        let step = || -> ironloom_lm::Result<()> { Ok(next.choose(&model.table_pass(&cx, &table)?, &table, choose)?) };
        let (graph, ()) = gpu.capture(step)?;
        // Capturing has made one step for real.
        let launched = 1;
        let (model, device, histories) = (model.clone(), device.clone(), Vec::new());
        Ok(Self { graph, model, table, next, device, rows: 0, histories, launched, taken: launched })
    }

    /// Kernels and copies of a step.
    pub fn nodes(&self) -> usize {
        self.graph.nodes()
    }

    fn sample_options(&mut self, row: &StepRow<'_, KvCache>) -> Result<SampleOptions> {
        let options = row.options;
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let mut history = 0;
        if options.has_penalties() {
            const NAME: &str = "ids so far";
            let gpu = self.device.card(NAME).map_err(failed)?.gpu();
            let buffer = gpu.allocate_lasting(4 * (self.model.config().context_length + 1), NAME).map_err(failed)?;
            gpu.write(buffer.slice(), bytemuck::cast_slice(row.ids)).map_err(failed)?;
            history = buffer.slice().address();
            self.histories.push(buffer);
        }
        Ok(SampleOptions {
            history,
            seed: options.seed,
            penalty_window: options.penalty_window.map_or(u32::MAX, number),
            top_k: number(options.top_k),
            temperature: options.temperature,
            top_p: options.top_p,
            min_p: options.min_p,
            repetition_penalty: options.repetition_penalty,
            presence_penalty: options.presence_penalty,
            frequency_penalty: options.frequency_penalty,
        })
    }
}

impl Steps<KvCache> for CudaSteps {
    fn begin(&mut self, rows: &mut [StepRow<'_, KvCache>]) -> Result<()> {
        self.taken = self.launched;
        self.histories.clear();
        let mut options = Vec::with_capacity(rows.len());
        for row in rows.iter_mut() {
            row.cache.reserve(1).map_err(failed)?;
            options.push(self.sample_options(row)?);
        }
        self.next.set_options(&options).map_err(failed)?;
        let entries: Vec<TableRow<'_>> = rows
            .iter()
            .map(|row| {
                let id = row.ids.last().copied().unwrap_or_default();
                TableRow { id, position: row.cache.len(), cache: row.cache.layers() }
            })
            .collect();
        self.table.set(&entries).map_err(failed)?;
        self.rows = rows.len();
        Ok(())
    }

    fn launch(&mut self, caches: &mut [&mut KvCache]) -> Result<()> {
        if caches.iter().any(|cache| !cache.has_room(1)) {
            for cache in caches.iter_mut() {
                cache.reserve(1).map_err(failed)?;
            }
            let layers: Vec<_> = caches.iter().map(|cache| cache.layers()).collect();
            self.table.set_caches(&layers).map_err(failed)?;
        }
        self.graph.replay().map_err(failed)?;
        self.launched += 1;
        caches.iter_mut().try_for_each(|cache| cache.advance(1)).map_err(failed)
    }

    fn next(&mut self) -> Result<Vec<u32>> {
        if self.in_flight() == 0 {
            return Err(Error::NothingInFlight);
        }
        // The device writes the count; a look costs a read of this processor's own memory.
        let mut looks = 0u32;
        while self.next.published().map_err(failed)? <= self.taken {
            looks += 1;
            if looks.is_multiple_of(1 << 22) {
                // Far longer than any step: either the device has failed, which this tells, or it is now done.
                self.device.synchronize().map_err(failed)?;
            }
            std::hint::spin_loop();
        }
        let mut ids = self.next.ids_of(self.taken).map_err(failed)?;
        ids.truncate(self.rows);
        self.taken += 1;
        Ok(ids)
    }

    fn in_flight(&self) -> usize {
        (self.launched - self.taken) as usize
    }
}

fn failed(source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Model { source: Box::new(source) }
}
