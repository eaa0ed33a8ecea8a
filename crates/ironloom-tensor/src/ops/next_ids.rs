//! The end of a decoding step on a graphics card: logits to ids, and the ids to where the next step reads them.
//!
//! Nothing of it waits for the host. Each row's id is the argmax of its logits or a draw by its own options; it becomes the
//! row's next token, its position moves on, and it is left in a ring in the host's memory, where the host finds it some steps
//! later. So a step can be captured whole, and the next one started before the last one's ids were looked at.

use ironloom_kernels::{self as kernels, Buffer, Form, Gpu, Mapped, SampleOptions};

use super::KvTable;
use crate::{Device, Error, Result, Tensor, error::expect_shape};

/// Steps whose ids the ring holds, many more than a host lets the device run ahead.
const RING: usize = 64;

const NAME: &str = "next ids";

/// What the steps of some rows need besides their table.
#[derive(Debug)]
pub struct NextIds {
    gpu: Gpu,
    rows: usize,
    vocabulary: usize,
    ids: Buffer,
    options: Buffer,
    /// Addresses of the rows' ids so far, for penalties; 0 for rows without.
    histories: Buffer,
    argmax_workspace: Buffer,
    sample_workspace: Buffer,
    /// How many steps the device has made.
    step: Buffer,
    /// Before the ring: how many steps' ids are in it.
    report: Mapped,
}

/// How a step chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choose {
    /// Every row takes its largest logit.
    Largest,
    /// Every row samples by its options.
    ByOptions,
}

impl NextIds {
    /// For `rows` rows of `vocabulary` logits.
    ///
    /// # Errors
    /// The device is the processor, or has no room.
    pub fn new(device: &Device, rows: usize, vocabulary: usize) -> Result<Self> {
        let gpu = device.card(NAME)?.gpu().clone();
        let cleared = |bytes| gpu.allocate_cleared(bytes, NAME);
        let options = gpu.upload(bytemuck::cast_slice(&vec![SampleOptions::GREEDY; rows]), NAME)?;
        Ok(Self {
            rows,
            vocabulary,
            ids: cleared(4 * rows)?,
            options,
            histories: cleared(8 * rows)?,
            argmax_workspace: cleared(kernels::argmax_workspace(rows, vocabulary)?)?,
            sample_workspace: cleared(kernels::sample_workspace(rows, vocabulary)?)?,
            step: cleared(8)?,
            report: gpu.mapped(8 + 4 * RING * rows)?,
            gpu,
        })
    }

    /// Sets how each row samples. The addresses of `history` in them are those of `histories`.
    ///
    /// # Errors
    /// There are more options than rows, or the driver fails.
    pub fn set_options(&self, options: &[SampleOptions]) -> Result<()> {
        let mut all = vec![SampleOptions::GREEDY; self.rows];
        let Some(first) = all.get_mut(..options.len()) else {
            let (expected, found) = (self.rows, options.len());
            return Err(Error::Count { operation: NAME, what: "the number of rows", expected, found });
        };
        first.copy_from_slice(options);
        let histories: Vec<u64> = all.iter().map(|options| options.history).collect();
        self.gpu.write(self.options.slice(), bytemuck::cast_slice(&all))?;
        Ok(self.gpu.write(self.histories.slice(), bytemuck::cast_slice(&histories))?)
    }

    /// Chooses from `logits [rows, vocabulary]` and moves `table` on. Logits of rows with penalties are changed.
    ///
    /// # Errors
    /// The shapes do not fit, or the driver fails.
    pub fn choose(&self, logits: &Tensor, table: &KvTable, how: Choose) -> Result<()> {
        expect_shape(NAME, "the logits", [self.rows, self.vocabulary], logits.shape())?;
        expect_shape(NAME, "the table", [self.rows], &[table.rows()].into())?;
        let (gpu, rows, vocabulary) = (&self.gpu, self.rows, self.vocabulary);
        let (logits, ids) = (logits.cuda(NAME, Form::F32)?, self.ids.slice());
        match how {
            Choose::Largest => {
                let workspace = self.argmax_workspace.slice();
                kernels::argmax(gpu, &kernels::Argmax { logits, ids, workspace, rows, vocabulary })?;
            }
            Choose::ByOptions => {
                let call = kernels::Sample {
                    logits,
                    options: self.options.slice(),
                    positions: table.positions_slice(),
                    ids,
                    workspace: self.sample_workspace.slice(),
                    rows,
                    vocabulary,
                };
                kernels::sample(gpu, &call)?;
            }
        }
        let address = self.report.address();
        let call = kernels::Advance {
            ids,
            tokens: table.ids_slice(),
            positions: table.positions_slice(),
            histories: (how == Choose::ByOptions).then(|| self.histories.slice()),
            step: self.step.slice(),
            report: kernels::Report { ring: address + 8, ring_length: RING, published: address },
            rows,
        };
        Ok(kernels::advance(gpu, &call)?)
    }

    /// How many steps' ids have come to the host, since the first.
    ///
    /// # Errors
    /// None in practice.
    pub fn published(&self) -> Result<u64> {
        Ok(self.report.u64(0)?)
    }

    /// The ids of step `step`, counted from 0; `u32::MAX` where a row had no usable logit. The step has to be published, and
    /// fewer than 64 older than the last one launched.
    ///
    /// # Errors
    /// None in practice.
    pub fn ids_of(&self, step: u64) -> Result<Vec<u32>> {
        let slot = (step % RING as u64) as usize;
        Ok((0..self.rows).map(|row| self.report.u32(2 + slot * self.rows + row)).collect::<kernels::Result<_>>()?)
    }
}
