//! Captured work that is replayed with one call, and events that time it.

use std::sync::Arc;

use cudarc::driver::sys;

use crate::{
    Error, Gpu, Result,
    buffer::{Pool, Within},
    driver::call,
    gpu::Shared,
    turn::Turn,
};

/// A captured sequence of kernels. Replays touch the same addresses each time: what changes between them (tokens, positions,
/// addresses of caches) lies in device memory.
pub struct Graph {
    shared: Arc<Shared>,
    executable: sys::CUgraphExec,
    /// The memory its kernels work in.
    pool: Arc<Pool>,
    nodes: usize,
}

// SAFETY: an executable graph is a handle that any thread may launch with its context bound.
unsafe impl Send for Graph {}

impl Gpu {
    /// Captures what `work` puts into the stream. It is called twice: first for real, so that kernels are loaded and the
    /// graph's memory is there, then recorded, while the calls of all other threads wait: `work` may not wait for theirs. Its
    /// second result is given back with the graph.
    ///
    /// # Errors
    /// Those of `work` and of the driver.
    pub fn capture<T, E: From<crate::Error>>(
        &self,
        mut work: impl FnMut() -> std::result::Result<T, E>,
    ) -> std::result::Result<(Graph, T), E> {
        let shared = &self.inner.shared;
        let pool = Arc::new(Pool::of_graph(self.pool())?);
        let within = Within::new(pool.clone());
        let captured = work().and_then(|first| {
            drop(first);
            self.synchronize()?;
            let _turn = Turn::alone();
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            call!(cuStreamBeginCapture_v2(shared.stream, mode))?;
            let second = work();
            let mut graph = Recorded(std::ptr::null_mut());
            let ended = call!(cuStreamEndCapture(shared.stream, &mut graph.0));
            let second = second?;
            ended?;
            Ok((graph, second))
        });
        drop(within);
        let (graph, result) = captured?;
        let _turn = shared.bind()?;
        let (mut executable, mut nodes) = (std::ptr::null_mut(), 0);
        call!(cuGraphGetNodes(graph.0, std::ptr::null_mut(), &mut nodes))?;
        self.with_room("a graph", || call!(cuGraphInstantiateWithFlags(&mut executable, graph.0, 0)))?;
        Ok((Graph { shared: shared.clone(), executable, pool, nodes }, result))
    }

    /// A point in the stream.
    ///
    /// # Errors
    /// The driver fails, or serves no CUDA 12.8 (which measures between points differently).
    pub fn record_event(&self) -> Result<Event> {
        if self.properties().driver < (12, 8) {
            return Err(Error::Unsupported { operation: "timing", what: "drivers before CUDA 12.8".into() });
        }
        let _turn = self.inner.shared.bind()?;
        let mut raw = std::ptr::null_mut();
        call!(cuEventCreate(&mut raw, 0))?;
        let event = Event { shared: self.inner.shared.clone(), raw };
        call!(cuEventRecord(raw, self.inner.shared.stream))?;
        Ok(event)
    }
}

/// What a stream recorded, of which an executable graph is made; null where it recorded nothing.
struct Recorded(sys::CUgraph);

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // Nothing can be done about a failure at the end.
            let _ = call!(cuGraphDestroy(self.0));
        }
    }
}

impl Shared {
    /// Whether what is put into the stream is recorded instead of run.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        let _turn = self.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        call!(cuStreamIsCapturing(self.stream, &mut status))?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }
}

impl Graph {
    /// Puts the whole graph into the stream.
    ///
    /// # Errors
    /// The driver fails.
    pub fn replay(&self) -> Result<()> {
        let _turn = self.shared.bind()?;
        call!(cuGraphLaunch(self.executable, self.shared.stream))
    }

    /// Does `work`, whose passes take the memory that the graph's kernels work in: between replays it is free but for what the
    /// capture gave. The next replay overwrites what `work` leaves there.
    pub fn lend<T>(&self, work: impl FnOnce() -> T) -> T {
        let _within = Within::new(self.pool.clone());
        work()
    }

    /// How many kernels and copies it has.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Bytes of the memory its kernels work in.
    pub fn workspace_bytes(&self) -> usize {
        self.pool.held()
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // Nothing can be done about a failure at the end.
        let _turn = self.shared.bind();
        let _ = call!(cuStreamSynchronize(self.shared.stream));
        let _ = call!(cuGraphExecDestroy(self.executable));
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph({} nodes, {} bytes)", self.nodes, self.workspace_bytes())
    }
}

/// A point in the stream, to measure time between two.
pub struct Event {
    shared: Arc<Shared>,
    raw: sys::CUevent,
}

impl Event {
    /// Seconds of the device from `earlier` to this, both of which it waits for.
    ///
    /// # Errors
    /// Something before failed.
    pub fn seconds_since(&self, earlier: &Self) -> Result<f64> {
        let _turn = self.shared.bind()?;
        call!(cuEventSynchronize(self.raw))?;
        let mut milliseconds = 0.0;
        call!(cuEventElapsedTime_v2(&mut milliseconds, earlier.raw, self.raw))?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _turn = self.shared.bind();
        let _ = call!(cuEventDestroy_v2(self.raw));
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Event")
    }
}
