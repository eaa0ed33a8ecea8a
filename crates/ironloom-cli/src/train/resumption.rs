//! The run that is in the output folder: whether one may be there, and in what the one that goes on with it differs.

use std::{
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Result, bail};
use ironloom_core::grouped;
use ironloom_train::{
    RunState, TrainerOptions, read_state,
    run::{RunOptions, checkpoints},
};
use serde_json::{Value, json};

use crate::console::Console;

/// What may be in the output folder.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Beginning {
    /// No run.
    Empty,
    /// A run that is of no interest.
    Anew,
    /// The run to go on with.
    Resume,
}

impl Beginning {
    /// What `--resume` asks for, or else `--overwrite` and whatever writes nothing.
    pub(super) fn asked(resume: bool, overwrite: bool) -> Self {
        match (resume, overwrite) {
            (true, _) => Self::Resume,
            (false, true) => Self::Anew,
            (false, false) => Self::Empty,
        }
    }
}

/// The checkpoint to go on from.
pub(super) struct Resumed {
    pub(super) path: PathBuf,
    step: u64,
    state: RunState,
}

impl Resumed {
    /// The last checkpoint in `folder`, where a run is to go on and has one.
    ///
    /// # Errors
    /// There is a run, and none may be; or its checkpoints can't be read.
    pub(super) fn find(
        beginning: Beginning,
        folder: &Path,
        options: &RunOptions,
        console: &Console,
    ) -> Result<Option<Self>> {
        match (beginning, checkpoints(folder, options).list()?.pop()) {
            (Beginning::Resume, Some((step, path))) => {
                console.note(format_args!("going on after step {step}, from {}", path.display()));
                Ok(Some(Self { step, state: read_state(&path)?, path }))
            }
            (Beginning::Resume, None) => {
                console.note(format_args!("{} has no checkpoint yet: the run begins", folder.display()));
                Ok(None)
            }
            (Beginning::Empty, Some((step, _))) => bail!(
                "{} holds a run of {} steps: go on with --resume, begin anew with --overwrite, or choose another --output",
                folder.display(),
                grouped(step)
            ),
            (Beginning::Empty | Beginning::Anew, _) => Ok(None),
        }
    }

    /// When the run was begun, in seconds since 1970 (UTC).
    pub(super) fn begun(&self) -> Option<u64> {
        self.state.notes["begun"].as_u64()
    }

    /// Says in what the run that goes on differs from the one that was begun, but for its steps and what is `derived` from them.
    ///
    /// # Errors
    /// More steps are done than the whole run is to have.
    pub(super) fn compare(
        &self,
        training: &TrainerOptions,
        derived: &[&str],
        settings: &Value,
        console: &Console,
    ) -> Result<()> {
        if training.steps < self.step {
            bail!(
                "the run has {} steps already, and {} were asked for: ask for more with --steps, or run the model of {}",
                grouped(self.step),
                grouped(training.steps),
                self.path.display()
            );
        }
        let mut found = Vec::new();
        differences(
            "training",
            &serde_json::to_value(&self.state.options)?,
            &serde_json::to_value(training)?,
            &mut found,
        );
        found.retain(|(key, _)| {
            let key = key.strip_prefix("training.").unwrap_or(key);
            key != "steps" && !derived.iter().any(|derived| key.starts_with(derived))
        });
        // Runs of programs that noted nothing are held against nothing.
        if let Some(before) = self.state.notes.get("settings") {
            differences("", before, settings, &mut found);
        }
        for (key, difference) in found {
            let is_kept = KEPT.iter().any(|kept| key.starts_with(kept));
            let follows =
                if is_kept { "the run keeps what it was begun with" } else { "from here on the new one counts" };
            console.warn(format_args!("{key} {difference}: {follows}"));
        }
        Ok(())
    }
}

/// Settings that a checkpoint brings along.
const KEPT: [&str; 3] = ["model", "tokenizer", "adapters"];

/// What each checkpoint is to hold for the run that goes on from it.
pub(super) fn notes(begun: u64, settings: &Value) -> Value {
    json!({ "begun": begun, "settings": settings })
}

/// The time, in seconds since 1970 (UTC).
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The keys that differ, each with how.
fn differences(key: &str, before: &Value, now: &Value, found: &mut Vec<(String, String)>) {
    const UNSET: &Value = &Value::Null;
    if let (Value::Object(before), Value::Object(now)) = (before, now) {
        let added = now.keys().filter(|name| !before.contains_key(*name));
        for name in before.keys().chain(added) {
            let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
            differences(&key, before.get(name).unwrap_or(UNSET), now.get(name).unwrap_or(UNSET), found);
        }
    } else if before != now {
        let told = |value: &Value| if value.is_null() { "not set".to_owned() } else { value.to_string() };
        found.push((key.to_owned(), format!("is {} now and was {}", told(now), told(before))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_difference_is_named_with_both_values() {
        let before = json!({ "model": { "width": 64, "experts": null }, "batch": { "rows": 2 } });
        let now = json!({ "model": { "width": 32, "experts": { "count": 4 } }, "batch": { "rows": 2 }, "base": "nf4" });
        let mut found = Vec::new();
        differences("", &before, &now, &mut found);
        let told: Vec<String> = found.iter().map(|(key, difference)| format!("{key} {difference}")).collect();
        assert_eq!(
            told,
            [
                "model.width is 32 now and was 64",
                "model.experts is {\"count\":4} now and was not set",
                "base is \"nf4\" now and was not set"
            ]
        );
        found.clear();
        differences("", &before, &before, &mut found);
        assert!(found.is_empty());
    }
}
