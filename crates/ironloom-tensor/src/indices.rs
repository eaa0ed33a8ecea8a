//! Whole numbers, one for each row of a pass: ids, positions, rows to pick.

use ironloom_kernels::{Buffer, Slice};

use crate::{Device, Error, Result};

/// Whole numbers where the operations of a device read them.
#[derive(Clone, Debug)]
pub struct Indices {
    place: Place,
}

#[derive(Clone, Debug)]
enum Place {
    Cpu(Vec<u32>),
    Cuda { buffer: Buffer, count: usize },
}

impl Indices {
    /// `values` on `device`.
    ///
    /// # Errors
    /// The device has no room.
    pub fn new(device: &Device, values: &[u32]) -> Result<Self> {
        let place = match device {
            Device::Cpu(_) => Place::Cpu(values.to_vec()),
            Device::Cuda(cuda) => {
                let buffer = cuda.gpu().allocate(size_of_val(values), "whole numbers of rows")?;
                cuda.gpu().write(buffer.slice(), bytemuck::cast_slice(values))?;
                Place::Cuda { buffer, count: values.len() }
            }
        };
        Ok(Self { place })
    }

    /// `count` zeros in memory that lasts, to be [`set`](Self::set) between the replays of a captured pass.
    ///
    /// # Errors
    /// The device is the processor, or has no room.
    pub fn lasting(device: &Device, count: usize) -> Result<Self> {
        const NAME: &str = "whole numbers of rows";
        Ok(Self::on_cuda(device.card(NAME)?.gpu().allocate_cleared(4 * count, NAME)?, count))
    }

    /// Sets all of the numbers, u32 or i32.
    ///
    /// # Errors
    /// There are not as many, they are not on `device`, or the device fails.
    pub fn set<T: bytemuck::NoUninit>(&self, device: &Device, values: &[T]) -> Result<()> {
        const NAME: &str = "setting whole numbers of rows";
        crate::error::expect_count(NAME, "the number of bytes", 4 * self.len(), size_of_val(values))?;
        Ok(device.card(NAME)?.gpu().write(self.cuda(NAME)?, bytemuck::cast_slice(values))?)
    }

    /// Numbers in memory of a graphics card that change between the replays of a graph: u32, or i32 with -1 for rows that
    /// are not in use.
    pub(crate) fn on_cuda(buffer: Buffer, count: usize) -> Self {
        Self { place: Place::Cuda { buffer, count } }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match &self.place {
            Place::Cpu(values) => values.len(),
            Place::Cuda { count, .. } => *count,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn cpu(&self, operation: &'static str) -> Result<&[u32]> {
        match &self.place {
            Place::Cpu(values) => Ok(values),
            Place::Cuda { .. } => {
                Err(Error::Device { operation, expected: "the processor", found: "numbers on a graphics card" })
            }
        }
    }

    pub(crate) fn cuda(&self, operation: &'static str) -> Result<Slice<'_>> {
        match &self.place {
            Place::Cuda { buffer, .. } => Ok(buffer.slice()),
            Place::Cpu(_) => {
                Err(Error::Device { operation, expected: "a graphics card", found: "numbers on the processor" })
            }
        }
    }
}
