//! Steps of a scripted model, as a device makes them: by a copy of the ids of its own, ahead of the host, with what a failed
//! step leaves behind.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex},
};

use ironloom_decode::{Error, Result, Sampler, StepRow, Steps};

use super::{Failed, ScriptedCache, ScriptedModel};

/// More than this in flight would be more than a host has use for.
const MOST_IN_FLIGHT: usize = 4;

/// What a device is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    Capture,
    Begin,
    Launch,
    Next,
}

/// How often a device was asked for what, and when it is to fail.
#[derive(Debug, Default)]
pub(crate) struct DeviceLog {
    counts: HashMap<Call, usize>,
    failing: HashSet<(Call, usize)>,
    /// Rows of each capture, and whether it samples.
    pub(crate) captures: Vec<(usize, bool)>,
    /// Whether it has no room for a capture.
    pub(crate) is_full: bool,
}

impl DeviceLog {
    /// How often it was asked.
    pub(crate) fn count(&self, call: Call) -> usize {
        self.counts.get(&call).copied().unwrap_or(0)
    }

    /// Lets the next such call fail.
    pub(crate) fn fail_next(&mut self, call: Call) {
        let number = self.count(call);
        self.failing.insert((call, number));
    }

    /// Lets no call fail that has not yet.
    pub(crate) fn fail_no_more(&mut self) {
        self.failing.clear();
    }

    fn note(&mut self, call: Call) -> Result<()> {
        let number = self.count(call);
        self.counts.insert(call, number + 1);
        if self.failing.contains(&(call, number)) { Err(failed(number)) } else { Ok(()) }
    }
}

fn failed(number: usize) -> Error {
    Error::Model { source: Box::new(Failed(number)) }
}

/// The device's own copy of a row.
struct Row {
    ids: Vec<u32>,
    sampler: Sampler,
}

pub(crate) struct ScriptedSteps {
    model: ScriptedModel,
    log: Arc<Mutex<DeviceLog>>,
    capacity: usize,
    sampled: bool,
    rows: Vec<Row>,
    in_flight: VecDeque<Vec<u32>>,
}

impl ScriptedSteps {
    pub(crate) fn capture(
        model: ScriptedModel,
        log: Arc<Mutex<DeviceLog>>,
        capacity: usize,
        sampled: bool,
    ) -> Result<Self> {
        {
            let mut log = log.lock().unwrap();
            log.note(Call::Capture)?;
            if log.is_full {
                return Err(Error::NoRoomForSteps { source: Box::new(Failed(log.count(Call::Capture))) });
            }
            log.captures.push((capacity, sampled));
        }
        Ok(Self { model, log, capacity, sampled, rows: Vec::new(), in_flight: VecDeque::new() })
    }
}

impl Steps<ScriptedCache> for ScriptedSteps {
    fn begin(&mut self, rows: &mut [StepRow<'_, ScriptedCache>]) -> Result<()> {
        assert!(rows.len() <= self.capacity);
        self.in_flight.clear();
        // A failure leaves the rows of before.
        self.log.lock().unwrap().note(Call::Begin)?;
        self.rows.clear();
        for row in rows {
            let (_, computed) = row.ids.split_last().expect("a row has an id to start from");
            assert_eq!(row.cache.0, computed, "the cache holds all ids but the last");
            let sampler = Sampler::new(row.options.clone())?;
            let largest = *row.options == *Sampler::greedy().options();
            assert!(self.sampled || largest, "captured for largest logits alone");
            self.rows.push(Row { ids: row.ids.to_vec(), sampler });
        }
        Ok(())
    }

    fn launch(&mut self, caches: &mut [&mut ScriptedCache]) -> Result<()> {
        assert_eq!(caches.len(), self.rows.len());
        assert!(self.in_flight.len() < MOST_IN_FLIGHT);
        if let Err(error) = self.log.lock().unwrap().note(Call::Launch) {
            // As where some caches were counted on and some were not.
            caches[0].0.push(u32::MAX);
            return Err(error);
        }
        let mut chosen = Vec::new();
        for (row, cache) in self.rows.iter_mut().zip(caches) {
            let (&input, computed) = row.ids.split_last().expect("rows have ids");
            assert_eq!(cache.0, computed, "the cache counts what the steps before have written");
            assert!(cache.0.len() < self.model.context, "no position is left");
            cache.0.push(input);
            let id = row.sampler.sample(&self.model.logits_after(&cache.0), &row.ids).unwrap_or(u32::MAX);
            row.ids.push(if id == u32::MAX { 0 } else { id });
            chosen.push(id);
        }
        self.in_flight.push_back(chosen);
        Ok(())
    }

    fn next(&mut self) -> Result<Vec<u32>> {
        let ids = self.in_flight.pop_front().ok_or(Error::NothingInFlight)?;
        self.log.lock().unwrap().note(Call::Next)?;
        Ok(ids)
    }

    fn in_flight(&self) -> usize {
        self.in_flight.len()
    }
}
