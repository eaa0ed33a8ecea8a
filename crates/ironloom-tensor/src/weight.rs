//! A weight matrix held packed on a device.

use std::sync::Arc;

use ironloom_quant::PackedMatrix;

/// A weight matrix `[rows, cols]` in the packed form its device computes with. Cloning shares it.
#[derive(Clone)]
pub struct Weight {
    form: Form,
}

#[derive(Clone)]
enum Form {
    Cpu(Arc<PackedMatrix>),
}

impl Weight {
    /// A weight on the processor.
    pub fn cpu(matrix: PackedMatrix) -> Self {
        Self { form: Form::Cpu(Arc::new(matrix)) }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.as_cpu().rows()
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.as_cpu().cols()
    }

    /// Bytes it holds.
    pub fn bytes(&self) -> usize {
        self.as_cpu().bytes()
    }

    /// The packed form's name.
    pub fn format(&self) -> &'static str {
        self.as_cpu().name()
    }

    /// The matrix on the processor.
    pub fn as_cpu(&self) -> &PackedMatrix {
        let Form::Cpu(matrix) = &self.form;
        matrix
    }
}

impl std::fmt::Debug for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Weight([{}, {}] {})", self.rows(), self.cols(), self.format())
    }
}
