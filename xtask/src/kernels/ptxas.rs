//! Reading what the assembler says of each kernel: the lines of `ptxas -v`, per kernel and architecture.
//!
//! ```text
//! ptxas info    : Compiling entry function 'rmsnorm' for 'sm_90'
//! ptxas info    : Function properties for rmsnorm
//!     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
//! ptxas info    : Used 40 registers, used 1 barriers, 256 bytes smem, 400 bytes cmem[0]
//! ```
//!
//! Kernels are `extern "C"`, so their names stand as they are. Functions that were not inlined have properties too, without a
//! line of their own before: they are passed over.

/// What one kernel takes on one architecture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Resources {
    pub(super) kernel: String,
    /// The number of `sm_90`.
    pub(super) architecture: u32,
    /// Of a thread.
    pub(super) registers: u32,
    /// Static shared memory of a block, in bytes; what a launch adds is not known here.
    pub(super) shared: u32,
    /// Local memory of a thread, in bytes: arrays that are indexed at run time, and spilled registers.
    pub(super) stack: u32,
    /// Bytes written to and read from local memory for want of registers, over the instructions of the kernel.
    pub(super) spilled: [u32; 2],
}

/// Every kernel of every architecture that `text` speaks of, in its order.
pub(super) fn read(text: &str) -> Vec<Resources> {
    let mut all: Vec<Resources> = Vec::new();
    // The function whose properties the next line has.
    let mut properties_of = None;
    for line in text.lines() {
        let said = line.strip_prefix("ptxas info").map_or(line, |rest| rest.trim_start_matches([' ', ':'])).trim();
        if let Some((kernel, rest)) = said.strip_prefix("Compiling entry function '").and_then(|s| s.split_once('\'')) {
            let architecture = rest.split("sm_").nth(1).map_or(0, leading_number);
            all.push(Resources { kernel: kernel.to_owned(), architecture, ..Resources::default() });
        } else if let Some(function) = said.strip_prefix("Function properties for ") {
            properties_of = Some(function);
        } else if let Some(last) = all.last_mut() {
            if said.contains("spill stores") && properties_of == Some(last.kernel.as_str()) {
                last.stack = number_before(said, " bytes stack frame");
                last.spilled = [number_before(said, " bytes spill stores"), number_before(said, " bytes spill loads")];
            } else if said.starts_with("Used ") {
                last.registers = number_before(said, " registers");
                last.shared = number_before(said, " bytes smem");
            }
        }
    }
    all
}

/// The number that stands before `words`; 0 where they are not said.
fn number_before(line: &str, words: &str) -> u32 {
    let Some((before, _)) = line.split_once(words) else { return 0 };
    before.rsplit([' ', ',']).next().map_or(0, leading_number)
}

fn leading_number(text: &str) -> u32 {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    text[..digits].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What nvcc 13.0.88 printed.
    const TEXT: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'spills' for 'sm_80'
ptxas info    : Function properties for spills
    536 bytes stack frame, 948 bytes spill stores, 996 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 536 bytes cumulative stack size, 360 bytes cmem[0]
ptxas info    : Compile time = 58.619 ms
ptxas info    : Compiling entry function 'scale_rows' for 'sm_80'
ptxas info    : Function properties for scale_rows
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 13 registers, used 1 barriers, 256 bytes smem, 364 bytes cmem[0]
ptxas info    : Compile time = 5.475 ms
ptxas info    : Function properties for _Z6helperf
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas warning : Value of threads per SM for entry spills is out of range. .minnctapersm will be ignored
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'scale_rows' for 'sm_90a'
ptxas info    : Function properties for scale_rows
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 1 barriers, 256 bytes smem
";

    #[test]
    fn every_kernel_of_every_architecture_is_read() {
        let resources = |kernel: &str, architecture, registers, shared, stack, spilled| Resources {
            kernel: kernel.to_owned(),
            architecture,
            registers,
            shared,
            stack,
            spilled,
        };
        assert_eq!(
            read(TEXT),
            [
                resources("spills", 80, 32, 0, 536, [948, 996]),
                resources("scale_rows", 80, 13, 256, 0, [0, 0]),
                resources("scale_rows", 90, 14, 256, 0, [0, 0]),
            ]
        );
        assert!(read("").is_empty() && read("nvcc warning : nothing to say\n").is_empty());
    }
}
